"""What the benchmarks share: pairs that take turns, medians of ratios, what they ran on, and random weights."""

import os
import platform
import statistics
import sys
from typing import Callable, Dict, List

import mxnet as mx


class Start(mx.init.Xavier):
    """Xavier, also for the vectors of a SymbolBlock, which have no initializers of their own."""

    def _init_weight(self, name, arr):
        if arr.ndim > 1:
            super()._init_weight(name, arr)
        else:
            arr[:] = 1 if str(name).endswith(("gamma", "var", "scale")) else 0


def interleaved(runs: Dict[str, Callable[[], float]], rounds: int, warm_up: int = 3) -> Dict[str, list]:
    """Seconds of each run, ``rounds`` times; all take turns, so that a machine that slows down does so for all."""
    for run in runs.values():
        for _ in range(warm_up):
            run()
    seconds = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            seconds[name].append(run())
    return seconds


def ratio(seconds: Dict[str, list], of: str, to: str) -> float:
    """Median over rounds of how often ``of`` would fit into ``to``: its throughput as a share of that of ``to``."""
    return statistics.median(b / a for a, b in zip(seconds[of], seconds[to]))


def milliseconds(values: list) -> float:
    return 1e3 * statistics.median(values)


def machine() -> str:
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        processor = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown")
    return (
        f"{processor}, {os.cpu_count()} cores; Python {platform.python_version()}, MXNet {mx.__version__}; "
        f"OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS')}"
    )


def launcher(engine: str, size: int) -> List[str]:
    """The command that starts so many processes, on this machine, of what follows; 'none' starts one by itself."""
    folder = os.path.dirname(sys.executable)
    return {
        "mpi": [os.path.join(folder, "mpirun"), "--allow-run-as-root", "--map-by", ":OVERSUBSCRIBE", "-np", str(size)],
        "horovod": [os.path.join(folder, "horovodrun"), "--gloo", "-np", str(size), "-H", f"localhost:{size}"],
        "none": [],
    }[engine]


def path_of_launchers() -> str:
    """PATH for them: they start programs of their own."""
    return os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]
