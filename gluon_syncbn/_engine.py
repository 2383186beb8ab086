"""What several CPU contexts need from MXNet's engine, set in one place when the package is imported.

All contexts ``mx.cpu(i)`` draw temporary space from one ring of ``MXNET_CPU_TEMP_COPY`` slots (4 by default). An
operator of cpu(0) that waits *behind* a synchronized layer can hold the slot that cpu(1) needs to *reach* that layer:
the two wait for each other until the timeout. This module makes the ring long. Two things remain to the user:

Memory. Every slot keeps the largest buffer that it ever held. Operators outside a static graph take the next slot each
time they run, until all have been used: an imperative ResNet-18 can take over 15 GB with 4096 slots.

Long runs with ``hybridize(static_alloc=True, static_shape=True)``. There each operator stays with the slot that it
drew first, except those that read an input or write an output of the graph, or run outside of it: these go round the
ring, and after hundreds or thousands of steps one meets the slot of an operator that another device needs. Operators
that need no temporary space do not take part, so the remedy is to put such ones at the borders and to compute nothing
outside: ``F.cast(x, dtype='float32')`` on every input and output, with the loss in the graph. (``F.identity`` will not
do, it asks for space.) Then no slot is ever shared, and memory is constant from the first step.

GPUs have a pool each and need none of this.
"""

import os
import warnings
from typing import Optional

import mxnet as mx

CPU_TEMP_SLOTS = 16384
_VARIABLE = "MXNET_CPU_TEMP_COPY"
_MXNET_DEFAULT = 4


def set_cpu_temp_slots() -> None:
    """Give CPU contexts enough temp-space slots, unless there is a GPU or the user has chosen a number.

    Warns (UserWarning) where MXNet's engine has already started and may go on with its old number.
    """
    if _VARIABLE in os.environ or mx.context.num_gpus() > 0:
        return
    os.environ[_VARIABLE] = str(CPU_TEMP_SLOTS)
    if _engine_was_running():
        warnings.warn(
            f"gluon_syncbn was imported after MXNet had begun to compute, too late to set {_VARIABLE}: with several "
            f"CPU contexts a synchronized layer may wait until its timeout. Import gluon_syncbn before the first "
            f"array is made, or set {_VARIABLE}={CPU_TEMP_SLOTS} before the program starts.",
            stacklevel=3,
        )


def slots_in_force() -> Optional[str]:
    """The number of temp-space slots for CPU contexts; None where there is a GPU and it hardly matters."""
    return None if mx.context.num_gpus() > 0 else os.environ.get(_VARIABLE, str(_MXNET_DEFAULT))


def _engine_was_running() -> bool:
    """Start MXNet's engine and tell whether that was news to it, by the threads that it creates (Linux only)."""
    threads = "/proc/self/task"
    if not os.path.isdir(threads) or os.environ.get("MXNET_ENGINE_TYPE") == "NaiveEngine":
        return False
    before = len(os.listdir(threads))
    mx.nd.waitall()
    return len(os.listdir(threads)) == before
