"""The compiled core without MXNet: kernels, rendezvous and launches as plain C functions (tests/csrc/standalone.cpp).

Symbols of the package's own library are hidden, so these are in a library of their own, made of the same sources or,
where they are up to date, the same objects. It is compiled at first use and kept in build/standalone, under a name that
changes with what it is made of.
"""

import ctypes
import fcntl
import functools
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
# Where there is no compiler: .ci/gpu_bundle.py puts it there.
READY_MADE = HERE / "libstandalone.so"
_CSRC = Path("gluon_syncbn", "csrc")
_SOURCES = [
    "cpu/kernels",
    *(f"meeting/{name}" for name in ("rendezvous", "statistics", "step", "threads", "waiting", "watchdog")),
]
_SOURCES += [f"cuda/{name}" for name in ("driver", "launch", "program")]


@functools.lru_cache(maxsize=None)
def library() -> ctypes.CDLL:
    return ctypes.CDLL(str(READY_MADE if READY_MADE.exists() else build()))


def build() -> Path:
    """The library's file, compiled if need be: once, however many processes ask for it."""
    main = HERE / "csrc" / "standalone.cpp"
    sources = [ROOT / _CSRC / f"{name}.cpp" for name in _SOURCES]
    shared = [*sorted((ROOT / _CSRC).rglob("*.h")), ROOT / "setup.py"]
    contents = hashlib.sha256(b"".join(path.read_bytes() for path in [main, *sources, *shared]))
    folder = ROOT / "build" / "standalone"

    def make(made: Path) -> None:
        for old in folder.glob("*.so"):
            old.unlink()
        compile_flags, link_flags = _flags()
        parts = [_object_of(source, shared) or source for source in sources]
        command = ["g++", "-fPIC", "-shared", f"-I{ROOT / _CSRC}", *compile_flags, main, *parts, "-o", made]
        subprocess.run([*command, *link_flags], check=True)

    return made_once(folder / f"{contents.hexdigest()}.so", folder / "lock", make)


def made_once(file: Path, lock: Path, make) -> Path:
    """Return ``file``, made by ``make(path)`` if it is not there: once, however many processes ask, under ``lock``."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(lock, "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        if not file.exists():
            made = file.with_suffix(".made")
            make(made)
            made.rename(file)
    return file


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


def _object_of(source: Path, shared):
    """What `setup.py build_ext --inplace` has made of a source, if neither that nor what it includes is newer."""
    newest = max(map(os.path.getmtime, [source, *shared]))
    for found in (ROOT / "build").glob(f"temp.*/{source.relative_to(ROOT).with_suffix('.o')}"):
        if os.path.getmtime(found) > newest:
            return found
    return None
