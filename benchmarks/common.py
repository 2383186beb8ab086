"""Shared by the benchmarks: pairs that take turns, medians of ratios, a line about the machine, and random weights."""

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
    """Seconds of each run, ``rounds`` times. All take turns, so a machine that slows down slows them all."""
    for run in runs.values():
        for _ in range(warm_up):
            run()
    seconds = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            seconds[name].append(run())
    return seconds


def ratio(seconds: Dict[str, list], of: str, to: str) -> float:
    """The throughput of ``of`` as a share of the throughput of ``to``: the median over rounds."""
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


def module_of_hosts():
    """tests/hosts, which makes hosts on this machine."""
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "tests"))
    import hosts

    return hosts


def launcher(engine: str, size: int, hosts=None, **on_hosts) -> List[str]:
    """Words to put before a command so that it runs in so many processes on this machine; 'none' is one process.

    ``hosts`` are hosts of `module_of_hosts` to run it on instead, with further arguments of their `launcher`.
    """
    if hosts is not None:
        return hosts.launcher(engine, size, **on_hosts)
    folder = os.path.dirname(sys.executable)
    return {
        "mpi": [os.path.join(folder, "mpirun"), "--allow-run-as-root", "--map-by", ":OVERSUBSCRIBE", "-np", str(size)],
        "horovod": [os.path.join(folder, "horovodrun"), "--gloo", "-np", str(size), "-H", f"localhost:{size}"],
        "none": [],
    }[engine]


def path_of_launchers() -> str:
    """PATH for the launchers, which start programs of their own."""
    return os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]
