"""Installs Horovod into this environment, built for its MXNet; `make .venv/horovod` calls this.

Horovod links to the MXNet that it finds when it is built, which takes 2 minutes on 2 cores. So the wheel is kept in
~/.cache/gluon_syncbn (or below XDG_CACHE_HOME), in a folder whose name is a hash of all that it was built from and for.
"""

import contextlib
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib.metadata import version
from pathlib import Path

HOROVOD = "horovod==0.28.1"
OPTIONS = {
    "HOROVOD_WITH_MXNET": "1",
    "HOROVOD_WITHOUT_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_PYTORCH": "1",
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_WITHOUT_MPI": "1",
}
# Its requirements where it runs; the build needs an older setuptools than the rest of this environment.
NEEDS, BUILDS_WITH = ["cloudpickle", "psutil", "pyyaml", "cffi"], ["setuptools<70", "wheel", "packaging"]


def pip(*words, **variables) -> None:
    command = [sys.executable, "-m", "pip", *map(str, words)]
    subprocess.run(command, check=True, env={**os.environ, **variables})


def cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gluon_syncbn"


def fingerprint() -> str:
    """The sources and the target of a wheel."""
    compiler = [*shlex.split(os.environ.get("CXX", "c++")), "--version"]
    made_by = subprocess.run(compiler, capture_output=True, text=True, check=True).stdout
    processor = Path("/proc/cpuinfo")  # Horovod's build looks at its instructions
    flags = re.findall(r"^flags\s*:.*$", processor.read_text(encoding="utf-8"), re.M)[:1] if processor.exists() else []
    parts = [HOROVOD, OPTIONS, version("mxnet"), sys.version, sysconfig.get_platform(), platform.libc_ver(), made_by]
    return hashlib.sha256(repr([*parts, flags]).encode()).hexdigest()[:16]


def build(folder: Path) -> Path:
    """The wheel, in ``folder``."""
    tools = folder / "tools"
    pip("install", "--quiet", "--target", tools, *BUILDS_WITH)
    options = {**OPTIONS, "PYTHONPATH": str(tools), "PATH": f"{tools / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    command = ["wheel", "--quiet", "--no-cache-dir", "--no-build-isolation", "--no-deps", "--wheel-dir", folder]
    pip(*command, HOROVOD, **options)
    (wheel,) = folder.glob("*.whl")
    return wheel


def install(wheel: Path) -> None:
    pip("install", "--quiet", "--no-deps", "--force-reinstall", wheel)
    subprocess.run([sys.executable, "-c", "import horovod.mxnet"], check=True)


def keep(wheel: Path, kept: Path) -> None:
    """Whole or not at all; another clone may do the same at this moment."""
    with contextlib.suppress(OSError):  # without a cache, the next clone builds its own
        kept.mkdir(parents=True, exist_ok=True)
        copy = Path(shutil.copy(wheel, kept / f"{os.getpid()}.part"))
        copy.replace(kept / wheel.name)


def main() -> int:
    try:
        pip("install", "--quiet", *NEEDS)
        kept = cache() / fingerprint()
        for wheel in kept.glob("*.whl"):
            with contextlib.suppress(subprocess.CalledProcessError):  # one that does not work is built anew
                install(wheel)
                return 0
        with tempfile.TemporaryDirectory() as folder:
            wheel = build(Path(folder))
            install(wheel)
            keep(wheel, kept)
    except (OSError, RuntimeError, ValueError, subprocess.CalledProcessError) as problem:
        print(f"Horovod could not be installed ({problem}): its tests are NOT RUN.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
