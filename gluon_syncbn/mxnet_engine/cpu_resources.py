"""Settings of MXNet's engine that several CPU contexts need, made when the package is imported.

All contexts ``mx.cpu(i)`` draw temporary space from one ring of ``MXNET_CPU_TEMP_COPY`` slots (4 by default). An
operator of cpu(0) that waits *after* a synchronized layer can hold the slot that cpu(1) needs to *reach* that layer:
the two wait for each other until the timeout. This module makes the ring long. Two things remain to the user:

Memory. Every slot keeps the largest buffer that it ever held. Operators outside a static graph take the next slot each
time they run, until all have been used: an imperative ResNet-18 can take over 15 GB with 4096 slots.

Long runs with ``hybridize(static_alloc=True, static_shape=True)``. There each operator stays with the slot that it
drew first, except those that read an input or write an output of the graph, or run outside of it: these go round the
ring, and after hundreds or thousands of steps one meets the slot of an operator that another device needs. Operators
that need no temporary space do not take part, so the remedy is to put such ones at the borders and to compute nothing
outside: ``F.cast(x, dtype='float32')`` on every input and output, with the loss in the graph. (``F.identity`` will not
do, it asks for space.) Then no slot is ever shared, and memory is constant from the first step.

Random generators are the same story: all CPU contexts draw from ``MXNET_CPU_PARALLEL_RAND_COPY`` of them (1 by
default), so two devices cannot both be inside a net with Dropout between synchronized layers. Here the ring is as long
as the number of Dropouts in flight that it can serve, devices times Dropouts of a net; each generator takes 5 MB, so it
is made no longer than most nets need.

GPUs have pools of their own and need none of this.
"""

import os
import re
import warnings
from typing import Dict

import mxnet as mx

_SLOTS = "MXNET_CPU_TEMP_COPY"
# For each environment variable, our value and MXNet's default.
CPU_RESOURCES = {_SLOTS: (16384, 4), "MXNET_CPU_PARALLEL_RAND_COPY": (16, 1)}
# What MXNet had taken already when this package was imported, where it had computed before and we would have set it.
_taken: Dict[str, str] = {}


def set_cpu_resources() -> None:
    """Give CPU contexts enough temp-space slots and random generators, except where the user has chosen a number.

    Does nothing where there is a GPU. Warns (UserWarning) where MXNet has taken its own numbers already: it keeps them,
    and `refuse_late_import` then refuses several CPU contexts.
    """
    ours = [name for name in CPU_RESOURCES if name not in os.environ]
    if not ours or may_have_gpus():
        return
    os.environ.update({name: str(CPU_RESOURCES[name][0]) for name in ours})
    if _engine_was_running() and _has_resources():
        _taken.update({name: str(CPU_RESOURCES[name][1]) for name in ours})
        end = "Several CPU contexts cannot train now." if _SLOTS in _taken else "Dropout may wait until the timeout."
        warnings.warn(f"{_too_late()} {end}", stacklevel=3)


def refuse_late_import(where: str, num_devices: int) -> None:
    """RuntimeError if this many CPU contexts would wait for each other, because MXNet has few slots for them."""
    if _SLOTS in _taken and num_devices > 1:
        raise RuntimeError(f"{where}: {_too_late()} As it is, {num_devices} CPU contexts would wait for each other.")


def _too_late() -> str:
    wanted = " and ".join(f"{name}={CPU_RESOURCES[name][0]}" for name in _taken)
    return (
        f"gluon_syncbn was imported after MXNet had begun to compute, too late for it to set {wanted}: MXNet has taken "
        f"{_listed(_taken)} for all CPU contexts. Import gluon_syncbn before the first operator runs, or set {wanted} "
        f"before the program starts."
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
    """The numbers in force for CPU contexts, as text; empty where there is a GPU and they hardly matter."""
    if may_have_gpus():
        return ""
    return _listed(resources_in_force())


def resources_in_force() -> Dict[str, str]:
    """The numbers that MXNet has taken, or will take when it first needs such a resource."""
    return {name: _taken.get(name) or os.environ.get(name) or str(value) for name, (_, value) in CPU_RESOURCES.items()}


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
