"""Runs tests/gpu inside a CUDA build of MXNet; `make gpu` calls this. Arguments go to pytest.

The package is installed as a wheel beside mxnet-cu117 and the real NVRTC, in build/gpu. Where this machine has a GPU,
the kernels run on it; where not, a stand-in for CUDA runs them on the CPU, and pytest's header says so. Libraries that
mxnet-cu117 wants, and that neither the package nor these tests use, are stubs (tests/stand_in/libraries.py).
"""

import ctypes
import os
import subprocess
import sys
import venv
from pathlib import Path

from wheels import ROOT, build_wheel, run

HOME = ROOT / "build" / "gpu"
MXNET = "mxnet-cu117==1.9.1"
NVIDIA = ["nvidia-cuda-nvrtc-cu11", "nvidia-cuda-runtime-cu11"]
TESTING = ["numpy<1.24", "psutil", "pytest", "pytest-timeout", "requests", "graphviz"]


def has_gpu() -> bool:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


def install() -> Path:
    """The virtual environment; returns its site-packages."""
    python = HOME / "venv" / "bin" / "python"
    if not (HOME / "installed").exists():
        venv.create(HOME / "venv", clear=True, with_pip=True)
        run(python, "-m", "pip", "install", "--quiet", *TESTING)
        run(python, "-m", "pip", "install", "--quiet", "--no-deps", MXNET, *NVIDIA)
        (HOME / "installed").touch()
    for old in HOME.glob("gluon_syncbn-*.whl"):
        old.unlink()
    wheel = build_wheel(HOME)
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall", wheel)
    (site,) = (HOME / "venv" / "lib").glob("python*/site-packages")
    return site


def main() -> int:
    HOME.mkdir(parents=True, exist_ok=True)
    site, real = install(), has_gpu()
    folder = HOME / ("stubs" if real else "stand_in")
    sys.path.insert(0, str(ROOT / "tests"))
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from stand_in.libraries import build

    build(folder, site / "mxnet" / "libmxnet.so", real)
    nvidia = [str(path) for path in site.glob("nvidia/*/lib")]
    environment = {**os.environ, "LD_LIBRARY_PATH": ":".join([str(folder), *nvidia]), "OMP_NUM_THREADS": "1"}
    environment["MXNET_CUDNN_LIB_CHECKING"] = "0"  # it is a stub
    if not real:
        environment["STAND_IN_KERNELS"] = str(folder)
        environment["STAND_IN_DELAY_US"] = "100"  # whoever forgets to wait reads old numbers
    pytest = [str(HOME / "venv" / "bin" / "pytest"), "tests/gpu", "--confcutdir=tests/gpu", "-p", "no:cacheprovider"]
    return subprocess.run([*pytest, *sys.argv[1:]], cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
