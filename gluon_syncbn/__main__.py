"""``python -m gluon_syncbn``: a doctor's report of this installation, for bug reports and for peace of mind.

It lists the versions and the back end with its reason, tries a synchronized layer on 2 CPU contexts, and warns of bad
settings. It exits with 1 if the layer gave wrong numbers or did not run. Started by ``horovodrun`` or ``mpirun``, it
tries the layer over all processes, and the first of them makes the report::

    horovodrun -np 2 python -m gluon_syncbn
"""

import argparse
import contextlib
import os
import platform
import statistics
import sys
import time
from importlib import metadata
from typing import List, Optional, Tuple

import mxnet as mx
import numpy as np
from mxnet import autograd

import gluon_syncbn
from gluon_syncbn.backends import native
from gluon_syncbn.backends.choose import choose, find_backend, why
from gluon_syncbn.distributed.default import VARIABLE, name_of_communicator
from gluon_syncbn.distributed.process_group import check_process_group
from gluon_syncbn.layer.spec import LayerSpec, default_timeout
from gluon_syncbn.meeting.processes import processes_of
from gluon_syncbn.mxnet_engine import cpu_resources

_ROUNDS = 200
_EXCHANGED = 4097  # the message of a layer with 2,048 channels


def main() -> int:
    style = argparse.RawDescriptionHelpFormatter
    description = __doc__.replace("``", "")
    argparse.ArgumentParser("python -m gluon_syncbn", description=description, formatter_class=style).parse_args()
    devices = [mx.cpu(0), mx.cpu(1)]
    wrong = _wrong_variables(devices)
    if wrong:
        print("\n".join(f"warning      {text}" for text in wrong))
        return 1
    group, why_alone = _join()
    if group is not None and group.rank > 0:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    print(f"gluon_syncbn {gluon_syncbn.__version__} in {os.path.dirname(gluon_syncbn.__file__)}")
    print(f"MXNet        {mx.__version__}, oneDNN {'on' if mx.runtime.Features().is_enabled('MKLDNN') else 'off'}")
    print(f"Python       {platform.python_version()}, NumPy {np.__version__}, {platform.platform()}")
    print(f"beside it    {_installed('gluoncv', 'opencv-python', 'opencv-python-headless') or 'no GluonCV, no OpenCV'}")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    print(f"devices      {cores} CPU cores for this process, {mx.context.num_gpus()} GPUs")
    print(f"threads      OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'not set')}")
    print(f"CPU devices  {_cpu_devices()}")
    missing = native.UNAVAILABLE_REASON
    print(f"compiled     {'no: ' + missing if missing else 'yes, ' + native.instruction_set()}")
    print(f"back end     {_back_end(devices, 'CPU')}")
    if mx.context.num_gpus():
        print(f"             {_back_end([mx.gpu(0)], 'GPU')}")
    engines = _installed("mpi4py", "horovod")
    print(f"processes    {engines or 'one only: neither mpi4py nor horovod is installed'}")
    warned = ([why_alone] if why_alone else []) + _warnings(group)
    try:
        is_native = choose(LayerSpec("doctor"), devices).name == "native"
        with gluon_syncbn.profile() if is_native else contextlib.nullcontext() as report:
            milliseconds = _all_reduce(devices, group)
        where = "cpu(0), cpu(1)" + (f" of {group.size} processes" if group else "")
        print(f"all-reduce   right on {where}; {milliseconds:.2f} ms for a forward and backward pass (median)")
        if report is not None:
            spreads = ", ".join(f"{row.direction} {1e3 * row.spread:.2f} ms" for row in report.rows)
            print(f"waiting      first to last device: {spreads} (median); gluon_syncbn.profile() measures your net")
        if group is not None:
            delay = np.median(group.time_exchanges(_EXCHANGED, _ROUNDS))
            way = processes_of(group).way()
            print(f"exchange     {_EXCHANGED} numbers of {group.size} processes, {delay:.0f} µs (median), {way}")
        status = 1 if why_alone else 0
    except (AssertionError, mx.MXNetError, RuntimeError) as problem:
        print(f"all-reduce   FAILED: {problem}")
        status = 1
    for text in warned:
        print(f"warning      {text}")
    if not warned and status == 0:
        print("all is well")
    return status


def _join() -> Tuple[Optional[gluon_syncbn.ProcessGroup], str]:
    """Connect the processes of this job. Returns their group, or None and the reason if that fails."""
    name = os.environ.get(VARIABLE) or name_of_communicator()
    try:
        if name == "horovod":
            import horovod.mxnet as hvd

            hvd.init()
        return gluon_syncbn.init_process_group(name), ""
    except (ImportError, RuntimeError) as problem:
        return None, f"this process stands alone: {problem}"


def _wrong_variables(devices: List[mx.Context]) -> List[str]:
    """Return the errors about environment variables with which no layer can work."""
    found = []
    group = os.environ.get(VARIABLE) or None
    for ask in (
        default_timeout,
        native.instruction_set,
        lambda: find_backend(LayerSpec("doctor"), devices),
        lambda: check_process_group(group, VARIABLE),
    ):
        try:
            with contextlib.suppress(RuntimeError):  # `_back_end` tells it
                ask()
        except ValueError as problem:
            found.append(str(problem))
    return found


def _installed(*packages: str) -> str:
    """Name the packages that are installed, with their versions."""
    found = []
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found.append(f"{package} {metadata.version(package)}")
    return ", ".join(found)


def _cpu_devices() -> str:
    """Say whether CPU devices can wait for each other's temporary space and random generators."""
    if not cpu_resources.shared_because():
        return "each has temporary space and random generators of its own"
    settings = cpu_resources.settings_in_force() or "the default number"
    return f"all share {settings}, which takes memory and time: {cpu_resources.shared_because()}"


def _back_end(devices: List[mx.Context], kind: str) -> str:
    """Name the back end on these devices, and the reason."""
    try:
        backend, reasons = find_backend(LayerSpec("doctor"), devices)
    except RuntimeError as problem:
        return f"none on {kind}: {problem}"
    return f"{backend.name} on {kind}: {why(backend, reasons, devices)}"


def _warnings(group: Optional[gluon_syncbn.ProcessGroup]) -> List[str]:
    found = []
    try:
        with contextlib.suppress(ModuleNotFoundError):
            import cv2  # noqa: F401
    except (ImportError, AttributeError) as problem:
        found.append(
            f"OpenCV cannot be imported ({problem}). Run: apt-get install libgl1, or pip install 'opencv-python<4.10'"
        )
    if native.UNAVAILABLE_REASON:
        found.append(
            "the compiled operator is missing, training is slower. Install a C++17 compiler (g++) and then, in the "
            "folder of this package's source, again: pip install --force-reinstall --no-deps --no-cache-dir ."
        )
    if os.environ.get("MXNET_ENGINE_TYPE") == "NaiveEngine":
        found.append(
            "MXNET_ENGINE_TYPE=NaiveEngine runs one operator at a time: several devices cannot meet. Unset it."
        )
    for name, value, enough in cpu_resources.too_few():
        found.append(f"{name}={value} may be too few for several CPU devices. Unset it to have {enough}.")
    if mx.context.num_gpus() == 0 and os.environ.get("OMP_NUM_THREADS") is None:
        of = "CPU contexts" if group is None else "processes"
        found.append(f"several {of} share the cores best with OMP_NUM_THREADS=1, or cores ÷ {of.split()[-1]}.")
    return found


def _all_reduce(devices, group: Optional[gluon_syncbn.ProcessGroup]) -> float:
    """Return the milliseconds of a step of one small layer on all devices; AssertionError if its numbers are wrong."""
    layer = gluon_syncbn.SyncBatchNorm(in_channels=64, timeout=10, prefix="doctor_")
    layer.initialize(ctx=devices)
    layer.hybridize(static_alloc=True, static_shape=True)
    rank, size = (group.rank, group.size) if group is not None else (0, 1)
    values = np.random.RandomState(0).standard_normal((4 * size, 64, 2, 2))
    mine = values[4 * rank : 4 * rank + 4]
    inputs = [mx.nd.array(part, ctx=device) for part, device in zip(np.split(mine, 2), devices)]
    seconds = []
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        with autograd.record():
            outputs = [layer(item) for item in inputs]
        autograd.backward(outputs)
        mx.nd.waitall()
        seconds.append(time.perf_counter() - started)
    mean, var = (function(values, axis=(0, 2, 3), keepdims=True) for function in (np.mean, np.var))
    got = np.concatenate([output.asnumpy() for output in outputs])
    if not np.allclose(got, (mine - mean) / np.sqrt(var + 1e-5), rtol=0, atol=1e-4):
        raise AssertionError("the output is not the input normalized over all devices")
    return 1e3 * statistics.median(seconds)


if __name__ == "__main__":
    sys.exit(main())
