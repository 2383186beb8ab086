"""The steps of run.sh. This file is in the folder and needs nothing but Python.

Each step is a program in a process group of its own, with a time limit after which the stacks of all its threads are
written down and the whole group is killed. If a step fails, the next ones still run. Everything ends in one archive,
OUT/results-PART.tar.gz: the text of each step (head and tail if it is long), results.json with the measurements, the
compiled kernels. It is written anew after every step, so that nothing is lost if the machine is taken away, and holds
only whole files. The steps are in three parts, each of which ends in time where one command may take ten minutes.
"""

import argparse
import concurrent.futures
import contextlib
import ctypes
import glob
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Callable, Dict, List, NamedTuple, Optional

HERE = Path(__file__).resolve().parent
# On a stand-in for a GPU, sizes are smaller and limits longer: a fraction of a CPU core does a GPU's work.
STANDS_IN = "STAND_IN_KERNELS" in os.environ
PATIENCE = 4 if STANDS_IN else 1
# Seconds for a part, by whether the run is short; a little less than promised.
TOTAL = {False: 560 * PATIENCE, True: 270 * PATIENCE}
KEEP = 40_000  # characters of a step's text, at each end


class Step(NamedTuple):
    part: int
    name: str
    what: str
    limit: int  # seconds
    short_limit: int
    needs_mxnet: bool
    command: Callable[["Run", float], List[str]]  # given the seconds that it may take


class Run:
    """One run of all steps: where things are, and the results so far."""

    def __init__(self, archive: Path, short: bool):
        self.archive, self.short = archive, short
        self._deadline = time.monotonic() + TOTAL[short]
        self.work = Path(tempfile.mkdtemp(prefix="gluon_syncbn-"))
        self.out = self.work / "results"
        self.out.mkdir()
        self.python = self.work / "venv" / "bin" / "python"
        self.gpus = count_gpus()
        self.nvrtc = find_nvrtc()
        self.results = {
            "machine": describe_machine(self),
            "bundle": json.loads((HERE / "bundle.json").read_text(encoding="utf-8")),
        }
        self.results.update(short=short, steps=[])
        self._mxnet: Optional[concurrent.futures.Future] = None

    def unpack(self) -> None:
        """The project at once, MXNet in the background."""
        (wheel,) = HERE.glob("gluon_syncbn-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(self.work)
        for name in ("tests", "benchmarks"):
            shutil.copytree(HERE / name, self.work / name)
        shutil.copy(HERE / "pyproject.toml", self.work)
        self._mxnet = concurrent.futures.ThreadPoolExecutor(1).submit(self._unpack_mxnet)

    def _unpack_mxnet(self) -> None:
        wanted = self.results["bundle"]["python"]
        if platform.python_version_tuple()[:2] != tuple(wanted.split(".")):
            raise RuntimeError(
                f"this folder was made for Python {wanted}, and {sys.executable} is {platform.python_version()}: "
                "set PYTHON, or make the folder with --python"
            )
        # An environment of its own: CuPy and PyTorch want a NumPy that MXNet cannot use.
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", self.work / "venv"], check=True)
        (site,) = (self.work / "venv" / "lib").glob("python*/site-packages")
        (packed,) = HERE.glob("site.tar*")
        with tarfile.open(packed) as archive:
            archive.extractall(site, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))

    def environment(self, needs_mxnet: bool) -> Dict[str, str]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(self.work)}
        environment["PYTHONFAULTHANDLER"] = "1"
        if self.nvrtc:
            environment["GLUON_SYNCBN_NVRTC"] = self.nvrtc
        if needs_mxnet:
            # Ours first, but for CUDA's runtime, of which a machine may have its own.
            inherited = os.environ.get("LD_LIBRARY_PATH", "").split(":")
            paths = [str(HERE / "lib"), *filter(None, inherited), str(HERE / "lib_last")]
            environment.update(LD_LIBRARY_PATH=":".join(paths), MXNET_CUDNN_LIB_CHECKING="0")
            environment.setdefault("CUDA_MODULE_LOADING", "LAZY")
            # MXNet compiles fused operators for the GPU's own architecture, which its compiler may not know.
            environment.setdefault("MXNET_USE_FUSION", "0")
        return environment

    def do(self, step: Step) -> None:
        left = self._deadline - time.monotonic()
        limit = min(PATIENCE * (step.short_limit if self.short else step.limit), left)
        print(f"\n== {step.name}: {step.what} (at most {limit:.0f} s)", flush=True)
        started = time.monotonic()
        if limit < 10:
            ended, status, last = "no time left", None, ""
        else:
            try:
                if step.needs_mxnet:
                    self._mxnet.result(timeout=limit)
                ended, status, last = self._run(step, started + limit)
            except Exception as problem:  # a step never stops the next
                ended, status, last = f"not started: {problem or type(problem).__name__}", None, ""
        took = time.monotonic() - started
        print(f"== {step.name}: {ended} after {took:.0f} s", flush=True)
        told = {"name": step.name, "ended": ended, "status": status, "seconds": round(took, 1), "last_line": last}
        self.results["steps"].append(told)
        measured = self.work / f"{step.name}.json"
        # It may not be there, or not be whole.
        with contextlib.suppress(OSError, ValueError):
            self.results[step.name] = json.loads(measured.read_text(encoding="utf-8"))
        self.save()

    def _run(self, step: Step, deadline: float):
        text = self.out / f"{step.name}.txt"
        command = [str(word) for word in step.command(self, deadline - time.monotonic())]
        environment = self.environment(step.needs_mxnet)
        with open(text, "w", encoding="utf-8") as output:
            output.write(f"$ {' '.join(command)}\n")
            output.flush()
            process = subprocess.Popen(
                command, cwd=self.work, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                status = process.wait(deadline - time.monotonic())
                ended = "ok" if status == 0 else f"FAILED with status {status}"
            except subprocess.TimeoutExpired:
                status, ended = None, "OUT OF TIME"
                write_stacks(process.pid, self.out / f"{step.name}-stacks.txt")
            finally:
                kill_group(process)
        said = text.read_text(errors="replace")
        if status == 3 and "NOT RUN" in said:
            ended = "NOT RUN"
        if len(said) > 2 * KEEP:
            said = f"{said[:KEEP]}\n[...]\n{said[-KEEP:]}"
            text.write_text(said)
        print(said[-3000:], end="", flush=True)
        lines = said.split("\n") if status is not None else []
        last = next((line for line in reversed(lines) if line.strip()), "")[:200]
        return ended, status, last

    def save(self) -> None:
        (self.out / "results.json").write_text(json.dumps(self.results, indent=1) + "\n")
        written = self.archive.with_suffix(".new")
        with tarfile.open(written, "w:gz", compresslevel=6) as archive:
            archive.add(self.out, "results")
        written.replace(self.archive)


def write_stacks(group: int, file: Path) -> None:
    """Where each thread of each process of a group is: in the kernel, in Python, and in C if there is a debugger."""
    debugger = shutil.which("cuda-gdb") or shutil.which("gdb")
    until = time.monotonic() + 15
    with open(file, "w", encoding="utf-8") as output:
        for process in members_of(group):
            output.write(f"== process {process}: {read(f'/proc/{process}/cmdline')}\n")
            for thread in glob.glob(f"/proc/{process}/task/*"):
                said = [read(f"{thread}/{name}").strip() for name in ("comm", "wchan", "syscall")]
                output.write(f"{os.path.basename(thread)}: {'; '.join(said)}\n")
            if debugger and time.monotonic() < until:
                command = [debugger, "--batch", "-p", str(process), "-ex", "thread apply all bt 30"]
                output.write(said_by(command, 10) or "")
                output.flush()
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGABRT)  # Python's own stacks, to the step's output
    time.sleep(1)


def members_of(group: int) -> List[int]:
    processes = [int(path.split("/")[2]) for path in glob.glob("/proc/[0-9]*")]
    return [process for process in processes if group_of(process) == group]


def group_of(process: int) -> Optional[int]:
    try:
        return os.getpgid(process)
    except ProcessLookupError:
        return None


def read(file: str) -> str:
    try:
        return Path(file).read_text(errors="replace").replace("\0", " ")
    except OSError as problem:
        return f"({problem.strerror})"


def kill_group(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def count_gpus() -> int:
    """As the driver says. In a process of its own: CUDA must not be used before a fork."""
    code = (
        "import ctypes; c = ctypes.c_int(0); d = ctypes.CDLL('libcuda.so.1'); "
        "assert d.cuInit(0) == 0 == d.cuDeviceGetCount(ctypes.byref(c)); print(c.value)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return int(done.stdout) if done.returncode == 0 else 0


def find_nvrtc() -> Optional[str]:
    """The machine's own run-time compiler, the oldest one: the driver must know its output."""
    if "GLUON_SYNCBN_NVRTC" in os.environ:
        return os.environ["GLUON_SYNCBN_NVRTC"]
    folders = [f"{path}/nvidia/*/lib" for path in sys.path if path]
    folders += ["/usr/local/cuda*/lib64", "/usr/local/cuda*/targets/*/lib", "/usr/lib/x86_64-linux-gnu"]
    folders += filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":"))
    found = {path for folder in folders for path in glob.glob(f"{folder}/libnvrtc.so.[0-9]*")}
    usable = sorted((nvrtc_version(path), path) for path in found)
    return next((path for version, path in usable if version >= (11, 0)), None)


def nvrtc_version(path: str):
    """(major, minor), or (0, 0) if it cannot be loaded."""
    try:
        major, minor = ctypes.c_int(0), ctypes.c_int(0)
        ctypes.CDLL(path).nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value
    except (OSError, AttributeError):
        return 0, 0


def describe_machine(run: Run) -> Dict[str, object]:
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        processor = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown")
    query = "name,driver_version,memory.total,compute_cap,clocks.max.sm,clocks.max.memory"
    state = "mig.mode.current,pcie.link.gen.current,pcie.link.width.current,clocks.sm,clocks.mem"
    return {
        "gpus": run.gpus,
        "stands_in": STANDS_IN,
        "nvidia_smi": said_by(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]),
        "compute_mode": said_by(["nvidia-smi", "--query-gpu=compute_mode", "--format=csv,noheader"]),
        # MIG, PCI Express generation and width, clocks now.
        "state": said_by(["nvidia-smi", f"--query-gpu={state}", "--format=csv,noheader"]),
        "processor": processor,
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": f"{platform.python_version()} ({sys.executable})",
        "nvrtc": f"{run.nvrtc} {'.'.join(map(str, nvrtc_version(run.nvrtc)))}" if run.nvrtc else None,
        "compute_sanitizer": find_sanitizer(),
        "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
    }


def said_by(command: List[str], limit: float = 15) -> Optional[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=limit).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return None


def is_exclusive(run: Run) -> bool:
    """Whether only one process at a time may use the GPU, so that tests cannot run beside each other."""
    return "Exclusive" in (run.results["machine"]["compute_mode"] or "")


def find_sanitizer() -> Optional[str]:
    places = [*glob.glob("/usr/local/cuda*/bin/compute-sanitizer"), *glob.glob("/opt/nvidia/*/compute-sanitizer")]
    return shutil.which("compute-sanitizer") or next(iter(sorted(places)), None)


def measured(run: Run, name: str) -> List[str]:
    return ["--json", str(run.work / f"{name}.json")]


def kernels(run: Run, seconds: float) -> List[str]:
    values = 20_000 if STANDS_IN else 4_000_000
    cases = 12 if STANDS_IN else 1000
    jobs = 1 if is_exclusive(run) else 2 if STANDS_IN else min(9, os.cpu_count() or 1)
    told = ["--cases", cases, "--values", values, "--seconds", int(seconds * 0.7), "--jobs", jobs]
    return [sys.executable, "tests/check_kernels.py", *told, *measured(run, "kernels")]


def speed(run: Run, seconds: float) -> List[str]:
    told = ["--rounds", 10 if run.short else 25]
    if STANDS_IN:
        told = ["--rounds", 2, "--shapes", "2,8,5,5", "4,16,3,3"]
    return [sys.executable, "benchmarks/gpu.py", *told, *measured(run, "speed")]


def smoke(run: Run, seconds: float) -> List[str]:
    return [run.python, "tests/gpu/smoke.py", *measured(run, "smoke")]


def code(run: Run, seconds: float) -> List[str]:
    return [sys.executable, "benchmarks/gpu.py", "--code", run.out / "code", *measured(run, "code")]


def latency(run: Run, seconds: float) -> List[str]:
    told = ["--rounds", 2] if STANDS_IN else []
    return [sys.executable, "benchmarks/gpu.py", "--latency", *told, *measured(run, "latency")]


def pytest(run: Run, name: str, *words) -> List[str]:
    workers = 0 if is_exclusive(run) else min(6, os.cpu_count() or 1)
    told = ["--confcutdir=tests/gpu", "-p", "no:cacheprovider", "-n", workers, "--timeout=120", "-q", "-rA"]
    told += ["--durations=5", f"--junitxml={run.out / name}.xml"]
    return [run.python, "-m", "pytest", *told, *words]


TESTS = [f"tests/gpu/test_{name}.py" for name in ("operator", "fallback", "faults_on_gpus")]  # numbers first


def operator(run: Run, seconds: float) -> List[str]:
    return pytest(run, "operator", "-m", "not several_gpus", *TESTS)


def as_two(run: Run) -> List[str]:
    """If there is one GPU, it is used as two."""
    return ["env", f"LD_PRELOAD={HERE / 'lib' / 'one_gpu_as_two.so'}"] if run.gpus == 1 else []


def groups(run: Run, seconds: float) -> List[str]:
    """Everything that needs two GPUs."""
    # Tests of faults start processes, which an exclusive GPU refuses.
    chosen = TESTS[:1] if is_exclusive(run) or (STANDS_IN and run.short) else TESTS
    return [*as_two(run), *pytest(run, "groups", "-m", "several_gpus", *chosen)]


def meeting(run: Run, seconds: float) -> List[str]:
    told = ["--rounds", 20 if STANDS_IN else 300, "--devices", "cpu:0,gpu:0", "gpu:0,gpu:1"]
    return [*as_two(run), run.python, "benchmarks/gpu_rendezvous.py", *told, *measured(run, "meeting")]


def sanitizer(tool: str) -> Callable[[Run, float], List[str]]:
    def command(run: Run, seconds: float) -> List[str]:
        program = find_sanitizer()
        if program is None:
            raise FileNotFoundError("there is no compute-sanitizer")
        told = [
            "--cases",
            4 if STANDS_IN else 40,
            "--values",
            20_000,
            "--seconds",
            int(seconds * 0.4),
            "--exact-memory",
        ]
        return [program, "--tool", tool, "--error-exitcode", "9", sys.executable, "tests/check_kernels.py", *told]

    return command


def soak(run: Run, seconds: float) -> List[str]:
    wanted = 10 if STANDS_IN else 40 if run.short else 300
    told = ["--seconds", int(max(5, min(wanted, seconds - 20))), *measured(run, "soak")]
    return [*as_two(run), run.python, "tests/gpu/soak.py", *told]


STEPS = [
    # Is it right, and how fast is it?
    Step(1, "smoke", "the whole chain once", 60, 50, True, smoke),
    Step(1, "kernels", "the kernels against the reference on random shapes, through CuPy", 90, 50, False, kernels),
    Step(1, "operator", "the operator inside MXNet, on a GPU and a CPU", 90, 50, True, operator),
    Step(1, "groups", "the operator inside MXNet, on two GPUs (or one as two)", 200, 180, True, groups),
    Step(1, "code", "registers and memory of each kernel, and its PTX", 80, 70, False, code),
    Step(1, "speed", "the kernels beside a copy and PyTorch's", 140, 60, False, speed),
    # Why?
    Step(2, "latency", "from a launch to its numbers on the host", 40, 20, False, latency),
    Step(2, "meeting", "the cost of a meeting", 60, 30, True, meeting),
    # Is it right for long, and in places where nobody looks?
    Step(3, "memcheck", "the kernels under compute-sanitizer", 60, 30, False, sanitizer("memcheck")),
    Step(3, "racecheck", "the kernels under compute-sanitizer", 70, 40, False, sanitizer("racecheck")),
    Step(3, "initcheck", "the kernels under compute-sanitizer", 60, 30, False, sanitizer("initcheck")),
    Step(3, "synccheck", "the kernels under compute-sanitizer", 60, 30, False, sanitizer("synccheck")),
    Step(3, "soak", "the same bits every step", 300, 120, True, soak),
]


def main() -> int:
    parser = argparse.ArgumentParser(prog="run.sh", description="Proves the GPU side of gluon_syncbn on this machine.")
    parser.add_argument("out", nargs="?", type=Path, default=Path("results"), help="folder for the archive")
    parts = "1: is it right, and how fast; 2: why; 3: is it right for long (default: %(default)s)"
    parser.add_argument("--part", type=int, choices=[1, 2, 3], default=1, help=parts)
    parser.add_argument("--short", action="store_true", help="in half of the time")
    parser.add_argument("--steps", help="which, in place of a part")
    arguments = parser.parse_args()
    names = [step.name for step in STEPS]
    chosen = arguments.steps.split(",") if arguments.steps else [s.name for s in STEPS if s.part == arguments.part]
    unknown = set(chosen) - set(names)
    if unknown:
        parser.error(f"there is no step {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    which, number = "steps" if arguments.steps else arguments.part, 1
    archive = arguments.out.resolve() / f"results-{which}.tar.gz"
    while archive.exists():  # of a run before
        number += 1
        archive = archive.with_name(f"results-{which}-{number}.tar.gz")
    run = Run(archive, arguments.short)
    # A signal that ends this program lets it clean up.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        for key, value in run.results["machine"].items():
            print(f"{key}: {value}")
        run.save()
        run.unpack()
        for step in STEPS:
            if step.name in chosen:
                run.do(step)
    finally:
        run.save()
        shutil.rmtree(run.work, ignore_errors=True)
    print()
    for step in run.results["steps"]:
        print(f"{step['name']}: {step['ended']} ({step['seconds']:.0f} s)")
    print(f"All of it is in {run.archive}.")
    return 0 if all(step["ended"] == "ok" for step in run.results["steps"]) else 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # do not wait for an unpacking that still runs
