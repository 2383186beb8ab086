"""Runs tests/gpu inside a CUDA build of MXNet; `make gpu` calls this.

    python .ci/gpu.py [words for pytest]
    python .ci/gpu.py --bundle FOLDER [--python 3.12]     make a folder that does the same without a network
    python .ci/gpu.py --rehearse FOLDER OUT [--short]     run such a folder here, on a stand-in for the GPU

The package is installed as a wheel beside mxnet-cu117 and the real NVRTC, in build/gpu. If this machine has a GPU, the
kernels run on it; if not, a stand-in for CUDA runs them on the CPU, and pytest's header says so. Stubs replace the
libraries that mxnet-cu117 loads but neither the package nor these tests use (tests/stand_in/libraries.py).
"""

import argparse
import os
import subprocess
import sys
import venv
from pathlib import Path

import gpu_bundle
from wheels import ROOT, build_wheel, run

HOME = ROOT / "build" / "gpu"
MXNET = "mxnet-cu117==1.9.1"
NVIDIA = ["nvidia-cuda-nvrtc-cu11", "nvidia-cuda-runtime-cu11"]
TESTING = ["numpy<1.24", "psutil", "pytest", "pytest-timeout", "pytest-xdist", "requests", "graphviz"]


def install() -> tuple:
    """The virtual environment; returns its site-packages and the package's wheel."""
    if not (3, 8) <= sys.version_info[:2] <= (3, 11):
        raise SystemExit(f"MXNet needs Python 3.8 to 3.11 here, and this is {sys.version.split()[0]}")
    HOME.mkdir(parents=True, exist_ok=True)
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
    return site, wheel


def test(site: Path, words) -> int:
    from stand_in.libraries import build_stand_in, build_stubs
    from steps import count_gpus

    real = count_gpus() > 0
    folder = HOME / ("stubs" if real else "stand_in")
    libmxnet = site / "mxnet" / "libmxnet.so"
    build_stubs(folder, libmxnet)
    if not real:
        build_stand_in(folder, libmxnet)
    nvidia = [str(path) for path in site.glob("nvidia/*/lib")]
    environment = {**os.environ, "LD_LIBRARY_PATH": ":".join([str(folder), *nvidia]), "OMP_NUM_THREADS": "1"}
    environment["MXNET_CUDNN_LIB_CHECKING"] = "0"  # it is a stub
    if not real:
        environment["STAND_IN_KERNELS"] = str(folder)
        environment["STAND_IN_DELAY_US"] = "100"  # code that forgets to wait reads old numbers
    pytest = [str(HOME / "venv" / "bin" / "pytest"), "tests/gpu", "--confcutdir=tests/gpu", "-p", "no:cacheprovider"]
    pytest += ["-n", str(min(3, os.cpu_count() or 1))]
    return subprocess.run([*pytest, *words], cwd=ROOT, env=environment).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, metavar="FOLDER", help="make a folder for a machine without a network")
    parser.add_argument("--python", default=gpu_bundle.PYTHON, help="version on that machine (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="pack it faster, but larger")
    parser.add_argument("--rehearse", type=Path, nargs=2, metavar=("FOLDER", "OUT"), help="try one without a GPU")
    arguments, words = parser.parse_known_args()
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks"), str(ROOT / ".ci" / "bundle")]
    site, wheel = install()
    if arguments.bundle:
        gpu_bundle.make(arguments.bundle.resolve(), wheel, site, arguments.python, arguments.quick)
    if arguments.rehearse:
        folder, out = (path.resolve() for path in arguments.rehearse)
        return gpu_bundle.rehearse(folder, out, HOME, site, words)
    return 0 if arguments.bundle else test(site, words)


if __name__ == "__main__":
    sys.exit(main())
