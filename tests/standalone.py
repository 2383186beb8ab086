"""What the tests compile, each once; and the compiled core without MXNet: kernels, rendezvous and launches as plain C
functions (csrc/standalone.cpp).

Symbols of the package's own library are hidden, so these are in a library of their own, made of the same sources or,
where they are up to date, the same objects.
"""

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
CSRC = ROOT / "gluon_syncbn" / "csrc"
# Where there is no compiler: .ci/gpu_bundle.py puts it there.
READY_MADE = HERE / "libstandalone.so"
_KEPT, _KEPT_FOR = ROOT / "build" / "compiled", 30 * 24 * 3600
KERNELS = ["cpu/kernels", *(f"cpu/kernels/{name}" for name in ("baseline", "avx2", "avx512"))]
_SOURCES = [*KERNELS, "cuda/driver", "cuda/launch", "cuda/program"]
_SOURCES += [f"meeting/{name}" for name in ("rendezvous", "statistics", "step", "waiting", "watchdog")]


def made_once(name: str, sources, words, make) -> Path:
    """The file that ``make(path)`` makes of ``sources``, once, however many processes ask.

    It is kept in build/compiled under a name that changes with the sources, what they include, the compiler's ``words``
    and its version. What nobody asks for goes after a month.
    """
    contents = hashlib.sha256(repr((_compiler(), list(map(str, words)))).encode())
    for file in sorted(_with_included(sources)):
        contents.update(file.read_bytes())
    file = _KEPT / f"{contents.hexdigest()[:16]}-{name}"
    _KEPT.mkdir(parents=True, exist_ok=True)
    with open(file.with_name(f"{file.name}.lock"), "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        if file.exists():
            os.utime(file)
            return file
        made = file.with_name(f"{file.name}.made")
        make(made)
        made.rename(file)
    with contextlib.suppress(FileNotFoundError):  # another process does the same
        for old in _KEPT.iterdir():
            if time.time() - old.stat().st_mtime > _KEPT_FOR:
                old.unlink()
    return file


def compiled(name: str, sources, words) -> Path:
    """What g++ makes of ``sources`` with the options ``words``, once."""
    command = ["g++", *words, *sources, "-o"]
    return made_once(name, sources, words, lambda made: subprocess.run([*command, made], check=True))


@functools.lru_cache(maxsize=None)
def _compiler() -> str:
    return subprocess.run(["g++", "--version"], capture_output=True, check=True, text=True).stdout


def _with_included(files) -> set:
    """And what they include by a name in quotes."""
    found, waiting = set(), [Path(file).resolve() for file in files]
    while waiting:
        file = waiting.pop()
        if file not in found:
            found.add(file)
            names = re.findall(rb'^ *# *include "(.+?)"', file.read_bytes(), re.MULTILINE)
            places = [folder / name.decode() for name in names for folder in (file.parent, CSRC)]
            waiting += [place.resolve() for place in places if place.exists()]
    return found


@functools.lru_cache(maxsize=None)
def library() -> ctypes.CDLL:
    return ctypes.CDLL(str(READY_MADE if READY_MADE.exists() else build()))


def build() -> Path:
    """The library's file."""
    main = HERE / "csrc" / "standalone.cpp"
    sources = [CSRC / f"{name}.cpp" for name in _SOURCES]

    def make(made: Path) -> None:
        compile_flags, link_flags = _flags()
        parts = [object_of(source) or source for source in sources]
        command = ["g++", "-fPIC", "-shared", f"-I{CSRC}", *compile_flags, main, *parts, "-o", made, *link_flags]
        subprocess.run(command, check=True)

    return made_once("standalone.so", [main, *sources, ROOT / "setup.py"], [], make)


def checked(name: str, *arguments, returns=ctypes.c_int, fails=lambda result: result is None):
    """Call a function of the library that leaves a text where it fails, which is a RuntimeError here."""
    error = ctypes.create_string_buffer(1 << 16)
    function = getattr(library(), name)
    function.restype = returns
    result = function(*arguments, error, ctypes.c_int64(len(error)))
    if fails(result):
        raise RuntimeError(error.value.decode())
    return result


def _flags():
    """For the compiler and the linker, as setup.py has them: the same bits as the package's own library."""
    code = """
import json, setuptools
(extension,) = setuptools.distutils.core.run_setup("setup.py", stop_after="init").ext_modules
print(json.dumps([extension.extra_compile_args, extension.extra_link_args]))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def object_of(source: Path):
    """What `setup.py build_ext --inplace` has made of a source, if neither that nor what it includes is newer."""
    newest = max(map(os.path.getmtime, [*_with_included([source]), ROOT / "setup.py"]))
    for found in (ROOT / "build").glob(f"temp.*/{source.relative_to(ROOT).with_suffix('.o')}"):
        if os.path.getmtime(found) > newest:
            return found
    return None
