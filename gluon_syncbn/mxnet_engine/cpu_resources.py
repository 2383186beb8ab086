"""Temporary space and random generators of CPU devices, settled when the package is imported.

In MXNet all devices ``mx.cpu(i)`` share a few of both. An operator of cpu(0) that waits *behind* a synchronized layer
can have the buffer, or the generator, that cpu(1) needs to *reach* that layer: the two wait for each other until the
timeout. So the compiled core gives each CPU device its own (csrc/mxnet/temporary_space.h and cpu_resources.cpp).

Where it cannot (nothing is compiled, MXNet is older than 1.7, or is built otherwise), `shared_because` returns why. The
devices then share many instead: MXNet reads from two environment variables how many it makes, before its first operator
that needs one. Operators outside a static graph go round all buffers, each of which keeps the largest size that it ever
had; and when they have come round, an operator can still meet a buffer that another device needs.
"""

import os
import re
import warnings
import weakref
from typing import Any, Callable, Dict, Iterator, Optional, Tuple

import mxnet as mx

from gluon_syncbn.base import library

_BUFFERS = "MXNET_CPU_TEMP_COPY"
# For each environment variable, our value and MXNet's default.
CPU_RESOURCES = {_BUFFERS: (16384, 4), "MXNET_CPU_PARALLEL_RAND_COPY": (16, 1)}

_FEW = 256  # buffers for all devices, each of which has its own


class _CPUs:
    def __init__(self) -> None:
        self.shared_because = "the package is being imported"
        self.taken: Dict[str, str] = {}  # the numbers that MXNet had taken before this package could set its own
        self.buffers: weakref.WeakKeyDictionary[Any, GraphsBuffers] = weakref.WeakKeyDictionary()


_cpus = _CPUs()


def shared_because() -> str:
    """Why CPU devices share temporary space and random generators; empty if each has its own."""
    return _cpus.shared_because


def set_cpu_resources() -> None:
    """Give each CPU device temporary space and random generators of its own; or many of both to all of them.

    ValueError if ``MXNET_CPU_TEMP_COPY`` is not a positive whole number.
    """
    _cpus.shared_because = _separate()
    if _cpus.shared_because:
        _set_variables()


def _separate() -> str:
    """Why each CPU device cannot have its own; empty if it has."""
    if library.core is None:
        return library.unavailable_reason
    if os.environ.get("MXNET_ENGINE_TYPE") == "NaiveEngine":
        return "MXNET_ENGINE_TYPE=NaiveEngine runs one operator at a time"
    value = os.environ.get(_BUFFERS, str(CPU_RESOURCES[_BUFFERS][0]))
    if not value.isdecimal() or not int(value):
        raise ValueError(f"{_BUFFERS} must be a positive whole number, not {value!r}.")
    is_ours = _BUFFERS not in os.environ
    os.environ[_BUFFERS] = value  # MXNet reads it meanwhile
    try:
        return library.core.gluon_syncbn_separate_cpu_devices(library.LIBMXNET._handle, int(value)).decode()
    finally:
        if is_ours:
            del os.environ[_BUFFERS]


def open_step() -> None:
    """Begin a step, unless one is open: from now on operators wait for no buffer of another call."""
    if not _cpus.shared_because:
        library.core.gluon_syncbn_open_step()


def close_step() -> None:
    """End the step: all pushed operators can finish by themselves, so the next ones may wait for them."""
    if not _cpus.shared_because:
        library.core.gluon_syncbn_close_step()


class GraphsBuffers:
    """The buffers that the graph of a net or executor keeps, on all devices. When this object goes, others get them."""

    def __init__(self):
        self.handle = None
        if not _cpus.shared_because:
            self.handle = library.core.gluon_syncbn_new_graph()
            weakref.finalize(self, library.core.gluon_syncbn_drop_graph, self.handle).atexit = False


def buffers_of(owner: Any) -> GraphsBuffers:
    return _cpus.buffers.get(owner) or _cpus.buffers.setdefault(owner, GraphsBuffers())


def give_buffers(owner: Any, buffers: GraphsBuffers) -> None:
    """Let ``owner`` keep these buffers until it goes, or has others."""
    _cpus.buffers[owner] = buffers


def in_one_call(
    buffers: Optional[GraphsBuffers], device: Optional[mx.Context], function: Callable, /, *args, **kwargs
) -> Any:
    """Return ``function(*args, **kwargs)``, which makes the graph that keeps these buffers, or calls it on this device,
    or is a backward pass (None).

    The operators that it pushes for a device may wait for each other, and so need little space.
    """
    if _cpus.shared_because:
        return function(*args, **kwargs)
    number = device.device_id if device is not None and device.device_type == "cpu" else -1
    before = 0
    try:
        before = library.core.gluon_syncbn_begin_call(buffers and buffers.handle, number)
        return function(*args, **kwargs)
    finally:
        library.core.gluon_syncbn_end_call(before)


# Where devices share


def _set_variables() -> None:
    """Set both variables, except where the user has chosen a number, or there is a GPU.

    Warns (UserWarning) where MXNet has taken its own numbers already: it keeps them, and `refuse_late_import` then
    refuses several CPU contexts.
    """
    ours = [name for name in CPU_RESOURCES if name not in os.environ]
    if not ours or may_have_gpus():
        return
    os.environ.update({name: str(CPU_RESOURCES[name][0]) for name in ours})
    if _engine_was_running() and _has_resources():
        _cpus.taken.update({name: str(CPU_RESOURCES[name][1]) for name in ours})
        has_few = _BUFFERS in _cpus.taken
        end = "Several CPU contexts cannot train now." if has_few else "Dropout may wait until the timeout."
        warnings.warn(f"{_too_late()} {end}", stacklevel=4)


def refuse_late_import(where: str, num_devices: int) -> None:
    """RuntimeError if this many CPU contexts would wait for each other, because MXNet has few buffers for them."""
    if _BUFFERS in _cpus.taken and num_devices > 1:
        raise RuntimeError(f"{where}: {_too_late()} As it is, {num_devices} CPU contexts would wait for each other.")


def _too_late() -> str:
    wanted = " and ".join(f"{name}={CPU_RESOURCES[name][0]}" for name in _cpus.taken)
    return (
        f"gluon_syncbn was imported after MXNet had begun to compute, too late for it to set {wanted}: MXNet has taken "
        f"{_listed(_cpus.taken)} for all CPU contexts. Import gluon_syncbn before the first operator runs, or set "
        f"{wanted} before the program starts."
    )


def may_have_gpus() -> bool:
    """Whether MXNet is built for CUDA, and GPUs are here.

    CUDA is not called: after a process has called it and forked, its children cannot use it.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") or not mx.runtime.Features().is_enabled("CUDA"):
        return False
    # As the driver names them: /dev/nvidia0, /dev/nvidia1, ...; and under WSL.
    return os.path.isdir("/dev") and any(re.fullmatch(r"nvidia\d+|dxg", name) for name in os.listdir("/dev"))


def settings_in_force() -> str:
    """The numbers that all CPU devices share, as text; empty where each has its own, or there is a GPU."""
    return "" if not _cpus.shared_because or may_have_gpus() else _listed(resources_in_force())


def resources_in_force() -> Dict[str, str]:
    """The numbers that MXNet has taken, or will take when it first needs such a resource."""
    found = {**os.environ, **_cpus.taken}
    return {name: found.get(name) or str(value) for name, (_, value) in CPU_RESOURCES.items()}


def too_few() -> Iterator[Tuple[str, str, int]]:
    """The variables that several CPU devices need larger: name, value, and our value."""
    for name, value in resources_in_force().items():
        ours, _ = CPU_RESOURCES[name]
        if _cpus.shared_because:
            is_few = not may_have_gpus() and int(value) < ours
        else:
            is_few = name == _BUFFERS and name in os.environ and int(value) < _FEW
        if is_few:
            yield name, value, ours


def _listed(settings: Dict[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())


def _has_resources() -> bool:
    """Whether MXNet has made its temp-space slots and random generators already (Linux only).

    It makes all of them for the first operator that needs one, and the generators take 5 MB each.
    """
    before = _data_megabytes()
    mx.nd.ones(2).sum().wait_to_read()  # it needs a slot, and draws no number
    return _data_megabytes() - before < 2


def _data_megabytes() -> float:
    """The resident memory of this process, without the files that are mapped into it where Linux tells."""
    with open("/proc/self/status", encoding="utf-8") as file:
        found = dict(re.findall(r"^(RssAnon|VmRSS):\s*(\d+) kB", file.read(), re.MULTILINE))
    return int(found.get("RssAnon") or found["VmRSS"]) / 1024


def _engine_was_running() -> bool:
    """Start MXNet's engine, and return whether it was running already, by the threads that it creates (Linux only)."""
    threads = "/proc/self/task"
    if not os.path.isdir(threads) or os.environ.get("MXNET_ENGINE_TYPE") == "NaiveEngine":
        return False
    before = len(os.listdir(threads))
    mx.nd.waitall()
    return len(os.listdir(threads)) == before
