"""Makes the folder that tests the GPU side on a machine without a network, and rehearses it where there is no GPU.

`make` packs the package's wheel, tests, benchmarks, MXNet's GPU build with its NumPy for that machine's Python, and the
libraries that MXNet loads. `rehearse` runs that folder in an empty directory as on that machine: with a Python of its
own, a stand-in for CuPy, CUDA's driver and runtime as in tests/stand_in, a real NVRTC, and no network. Only the GPU is
missing.
"""

import json
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from fatbin import blank
from wheels import ROOT, find_python, run

LIMIT = 60_000_000  # bytes of the folder
PYTHON = "3.12"
HERE = Path(__file__).resolve().parent / "bundle"
# The last NumPy that MXNet can be made to work with (bundle/site). Python 3.12 has no distutils; setuptools has one.
SITE = ["numpy==1.26.4", "psutil", "pytest", "pytest-timeout", "pytest-xdist", "setuptools<80"]
PLATFORMS = ["manylinux_2_17_x86_64", "manylinux2014_x86_64"]
LEFT_OUT = ("tests", "include", "__pycache__", "bin", "f2py", "pkg_resources")
TESTS = ["check_kernels.py", "kernel_cases.py", "reference.py", "testing.py", "prepared.py", "standalone.py"]
TESTS += ["endings.py", "test_endings.py", "gpu"]
BENCHMARKS = ["common.py", "cupy_gpu.py", "gpu.py", "gpu_kernels.py", "gpu_rendezvous.py"]


def make(folder: Path, wheel: Path, libraries: Path, python: str, quick: bool) -> None:
    """Fill ``folder``, which must be empty or not exist.

    ``libraries`` is a site-packages with MXNet's GPU build and CUDA's runtime.
    With ``quick`` nothing is compressed: this saves minutes, but the folder is far larger than the limit.
    """
    import standalone
    from stand_in.libraries import build_forwarder, build_one_as_two, build_stubs

    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise SystemExit(f"{folder} is not empty")
    for name in ("run.sh", "steps.py"):
        shutil.copy(HERE / name, folder)
    shutil.copy(ROOT / "pyproject.toml", folder)
    shutil.copy(wheel, folder)
    for name, files in (("tests", TESTS), ("benchmarks", BENCHMARKS)):
        (folder / name).mkdir()
        for file in files:
            copy = shutil.copytree if (ROOT / name / file).is_dir() else shutil.copy
            copy(ROOT / name / file, folder / name / file)
    shutil.copy(standalone.build(), folder / "tests" / standalone.READY_MADE.name)
    libmxnet = libraries / "mxnet" / "libmxnet.so"
    for build in (build_stubs, build_forwarder):
        build(folder / "lib", libmxnet)
    build_one_as_two(folder / "lib")
    # If the machine has these itself, its own are used.
    (folder / "lib_last").mkdir()
    shutil.copy(next(libraries.glob("nvidia/cuda_runtime/lib/libcudart.so.*")), folder / "lib_last")
    shutil.copy(run("gcc", "-print-file-name=libgomp.so.1").strip(), folder / "lib_last")
    for library in [*(folder / "lib").iterdir(), folder / "tests" / standalone.READY_MADE.name]:
        run("strip", library)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        site = collect_site(Path(temporary), libraries, python)
        pack(site, folder / ("site.tar" if quick else "site.tar.xz"))
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    about = {
        "python": python,
        "commit": commit.stdout.strip(),
        "mxnet": "mxnet-cu117 1.9.1",
    }
    (folder / "bundle.json").write_text(json.dumps(about) + "\n")
    size = write_contents(folder, python)
    print(f"{folder}: {size / 1e6:.1f} MB")
    if size > LIMIT and not quick:
        raise SystemExit(f"that is more than {LIMIT / 1e6:.0f} MB")


def collect_site(site: Path, libraries: Path, python: str) -> Path:
    """The packages for the interpreter there, with an MXNet without machine code."""
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    where = ["--target", site, "--only-binary=:all:", "--implementation", "cp", "--python-version", python, *platforms]
    run(sys.executable, "-m", "pip", "install", "--quiet", *where, *SITE)
    shutil.copytree(libraries / "mxnet", site / "mxnet")
    print(f"machine code left out of libmxnet: {blank(site / 'mxnet' / 'libmxnet.so') / 1e6:.0f} MB")
    for file in (HERE / "site").iterdir():
        shutil.copy(file, site)
    return site


def pack(site: Path, file: Path) -> None:
    """As xz if the name says so, with the filter for x86 machine code, which saves a tenth."""

    def wanted(member):
        return None if set(Path(member.name).parts) & set(LEFT_OUT) else member

    if file.suffix == ".xz":
        filters = [{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": 6}]
        with lzma.open(file, "wb", filters=filters) as packed, tarfile.open(fileobj=packed, mode="w") as archive:
            archive.add(site, ".", filter=wanted)
    else:
        with tarfile.open(file, "w") as archive:
            archive.add(site, ".", filter=wanted)


def write_contents(folder: Path, python: str) -> int:
    """Write CONTENTS.txt; returns the size of the folder in bytes."""
    sizes = {item: sum(f.stat().st_size for f in [item, *item.rglob("*")] if f.is_file()) for item in folder.iterdir()}
    about = {
        "run.sh": "bash run.sh [OUT] [--part 1|2|3] [--short]: does it all",
        "steps.py": "the steps of run.sh",
        "site.tar.xz": "MXNet's GPU build without its machine code; NumPy, pytest and psutil",
        "lib": "stubs for the libraries that MXNet loads; a forwarder to the machine's NVRTC; one GPU as two",
        "lib_last": "the runtimes of CUDA 11 and OpenMP, if the machine has none",
    }
    lines = [
        f"For Python {python} on x86-64 Linux with a GPU, its driver and an NVRTC (CUDA 11 or newer);",
        "for the first steps CuPy in that Python, and PyTorch to compare with.",
        "",
        *(
            f"{size / 1e6:8.3f} MB  {item.name}  {about.get(item.name, '')}".rstrip()
            for item, size in sorted(sizes.items())
        ),
        f"{sum(sizes.values()) / 1e6:8.3f} MB  in all",
    ]
    (folder / "CONTENTS.txt").write_text("\n".join(lines) + "\n")
    return sum(sizes.values()) + (folder / "CONTENTS.txt").stat().st_size


def rehearse(folder: Path, out: Path, home: Path, libraries: Path, words) -> int:
    """Run ``folder`` as on the machine with a GPU, but without one; returns the status of run.sh."""
    from stand_in.libraries import build_stand_in

    python = json.loads((folder / "bundle.json").read_text(encoding="utf-8"))["python"]
    interpreter = find_python(python)
    if interpreter is None:
        print(f"NOT RUN: no Python {python} with venv was found")
        return 3
    machine = home / "machine"
    if not (machine / "installed").exists():
        shutil.rmtree(machine, ignore_errors=True)
        run(interpreter, "-m", "venv", machine / "venv")
        run(machine / "venv" / "bin" / "pip", "install", "--quiet", "numpy", "nvidia-cuda-nvrtc")
        (machine / "installed").touch()
    build_stand_in(machine / "lib", libraries / "mxnet" / "libmxnet.so")
    (site,) = (machine / "venv" / "lib").glob("python*/site-packages")
    for file in (ROOT / "tests" / "stand_in" / "machine").iterdir():
        shutil.copy(file, site if file.suffix == ".py" else machine / "venv" / "bin")
    out.mkdir(parents=True, exist_ok=True)
    environment = {
        "HOME": str(home),
        "PATH": f"{machine / 'venv' / 'bin'}:/usr/local/bin:/usr/bin:/bin",
        "LD_LIBRARY_PATH": str(machine / "lib"),
        "STAND_IN_KERNELS": str(machine / "lib"),
        "STAND_IN_GPUS": "1",
        "STAND_IN_CAPABILITY": "90",
        "STAND_IN_DELAY_US": "100",  # code that forgets to wait reads old numbers
    }
    environment.update({name: os.environ[name] for name in ["GLUON_SYNCBN_NVRTC"] if name in os.environ})
    # A new network namespace is empty. Not every container may create one.
    alone = ["unshare", "--net"]
    if subprocess.run([*alone, "true"], capture_output=True).returncode != 0:
        print("(this machine does not let a process have no network: the rehearsal has one)")
        alone = []
    with tempfile.TemporaryDirectory(dir=home) as empty:
        copied = shutil.copytree(folder, Path(empty) / "folder")
        command = [*alone, "bash", str(copied / "run.sh"), str(out), *words]
        return subprocess.run(command, cwd=empty, env={**environment, "TMPDIR": empty}).returncode
