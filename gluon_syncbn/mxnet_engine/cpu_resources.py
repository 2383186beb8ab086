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

import mxnet as mx

# For each environment variable, our value and MXNet's default.
CPU_RESOURCES = {"MXNET_CPU_TEMP_COPY": (16384, 4), "MXNET_CPU_PARALLEL_RAND_COPY": (16, 1)}


def set_cpu_resources() -> None:
    """Give CPU contexts enough temp-space slots and random generators, except where the user has chosen a number.

    Does nothing where there is a GPU. Warns (UserWarning) where MXNet's engine has already started and may go on with
    its old numbers.
    """
    ours = {name: value for name, (value, _) in CPU_RESOURCES.items() if name not in os.environ}
    if not ours or may_have_gpus():
        return
    os.environ.update({name: str(value) for name, value in ours.items()})
    if _engine_was_running():
        chosen = " and ".join(f"{name}={value}" for name, value in ours.items())
        warnings.warn(
            f"gluon_syncbn was imported after MXNet had begun to compute, too late to set {chosen}: with several "
            f"CPU contexts a synchronized layer may wait until its timeout. Import gluon_syncbn before the first "
            f"array is made, or set {chosen} before the program starts.",
            stacklevel=3,
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
    return ", ".join(f"{name}={os.environ.get(name, default)}" for name, (_, default) in CPU_RESOURCES.items())


def _engine_was_running() -> bool:
    """Start MXNet's engine, and return whether it was running already, by the threads that it creates (Linux only)."""
    threads = "/proc/self/task"
    if not os.path.isdir(threads) or os.environ.get("MXNET_ENGINE_TYPE") == "NaiveEngine":
        return False
    before = len(os.listdir(threads))
    mx.nd.waitall()
    return len(os.listdir(threads)) == before
