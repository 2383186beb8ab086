"""Tells MXNet's engine what a static graph does not: that its layers write their running statistics.

The engine orders operators by the arrays that they write. A graph with ``static_alloc`` and ``static_shape`` counts the
running statistics as only read. Two things go wrong then. Whoever reads them next does not wait: ``save_parameters``,
or the first ``Trainer.step``, which copies every parameter and writes the copy back, so that an update was lost. And
while the outputs of one call are in use, the next call of the net runs in memory of its own, and nothing orders the
two: a layer would meet the second call of one device with the first of another, which is wrong, or meet one device
twice, which is an error. (`SyncBatchNorm.order_token_before` orders several calls of a layer within one graph.)

So behind each call of such a net in training mode, an empty operator that "writes" the running statistics of all its
layers on that device is given to the engine. It waits for what the call does with them, and whoever reads them, the
next call among others, waits for it. The net is the block that owns the graph (`graphs.calls`). One push per
call and device.
"""

import ctypes
import functools
from typing import Iterable, Optional

import mxnet as mx
from mxnet.gluon import Block

from gluon_syncbn.base import library
from gluon_syncbn.base.library import LIBMXNET, check_call
from gluon_syncbn.base.mxnet_private import arrays_of

# mxnet::Context: the device's type (1 is a CPU) and number. The operator runs on a CPU thread, whatever it waits for.
_CPU = (ctypes.c_int * 2)(1, 0)


@functools.lru_cache(maxsize=None)
def _empty_operator() -> Optional[ctypes.c_void_p]:
    """None where the engine cannot be told: nothing is compiled, or MXNet was built without this function."""
    return library.empty_operator() if hasattr(LIBMXNET, "MXEnginePushSyncND") else None


def tell_writes(layers: Iterable[Block], device: Optional[mx.Context]) -> None:
    """After a call of a static graph on ``device``: the engine knows that it writes the statistics of ``layers``."""
    function = _empty_operator()
    if function is None or device is None or not mx.autograd.is_training():
        return
    found = {
        array.handle.value
        for layer in layers
        if hasattr(layer, "_group")  # not converted back since
        for array in arrays_of(layer.running_mean) + arrays_of(layer.running_var)
        if array.context == device
    }
    if not found:
        return
    handles = (ctypes.c_void_p * len(found))(*found)
    # With a priority, so that it is not bundled with other operators, which would then wait with it.
    nothing, priority, name = None, 1, b"SyncBatchNormOrder"
    check_call(
        LIBMXNET.MXEnginePushSyncND(
            function, nothing, nothing, _CPU, nothing, 0, handles, len(handles), nothing, priority, name
        )
    )
