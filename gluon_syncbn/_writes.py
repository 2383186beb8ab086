"""Tells MXNet's engine what a static graph does not: that its layers write their running statistics.

The engine orders operators by the arrays that they write. A graph with ``static_alloc`` and ``static_shape`` counts the
running statistics as only read. Two things go wrong then. Whoever reads them next does not wait: ``save_parameters``,
or the first ``Trainer.step``, which copies every parameter and writes the copy back, so that an update was lost. And
while the outputs of one call are in use, the next call of the net runs in memory of its own, and nothing orders the
two: a layer would meet the second call of one device with the first of another, which is wrong, or meet one device
twice, which is an error. (`SyncBatchNorm._call_before` orders several calls of a layer within one graph.)

So behind each call of such a net in training mode, an empty operator that "writes" the running statistics of all its
layers on that device is given to the engine. It waits for what the call does with them, and whoever reads them, the
next call among others, waits for it. The net is the block that owns the graph. One push per call and device.

The method that calls graphs is extended for it. A forward hook would do as well, but MXNet warns of hooks, with the
whole net in print, whenever a net is hybridized again, and cannot copy a net whose hook holds a function.
"""

import ctypes
import functools
import weakref

import mxnet as mx
from mxnet.base import _LIB, check_call
from mxnet.gluon import Block, HybridBlock

from gluon_syncbn import native

# mxnet::Context: the device's type (1 is a CPU) and number. The operator runs on a CPU thread, whatever it waits for.
_CPU = (ctypes.c_int * 2)(1, 0)
_nets = weakref.WeakKeyDictionary()


def declare_writes(net: Block, trace: mx.sym.Symbol, layer: Block) -> None:
    """From now on the engine knows that calls of ``net`` write ``layer``; ``trace`` names the graph built now."""
    empty_operator = native.empty_operator()
    if empty_operator is None or not hasattr(_LIB, "MXEnginePushSyncND"):  # MXNet 1.6 has no such function
        return
    if net not in _nets:
        _nets[net] = _Declaration(empty_operator)
    _nets[net].add(trace, layer)


def watch_graphs() -> None:
    """From now on, what was declared of a net is told to the engine whenever its graph has been called."""
    call = HybridBlock._call_cached_op

    @functools.wraps(call)
    def _call_cached_op(self, *args):
        out = call(self, *args)
        if self in _nets:
            _nets[self].tell(args)
        return out

    HybridBlock._call_cached_op = _call_cached_op


class _Declaration:
    """What one net writes."""

    def __init__(self, empty_operator: ctypes.c_void_p):
        self._empty_operator = empty_operator
        self._trace = None
        self._layers = weakref.WeakSet()

    def add(self, trace: mx.sym.Symbol, layer: Block) -> None:
        if self._trace is not trace:  # the graph is built anew
            self._trace, self._layers = trace, weakref.WeakSet()
        self._layers.add(layer)

    def tell(self, inputs) -> None:
        """After a call of the net."""
        device = next((item.context for item in inputs if isinstance(item, mx.nd.NDArray)), None)
        if device is None or not mx.autograd.is_training():
            return
        found = {
            array.handle.value
            for layer in self._layers
            if hasattr(layer, "_group")  # not converted back since
            for array in [*(layer.running_mean._data or ()), *(layer.running_var._data or ())]
            if array.context == device
        }
        if not found:
            return
        handles = (ctypes.c_void_p * len(found))(*found)
        # With a priority, so that it is not bundled with other operators, which would then wait with it.
        function, nothing, priority, name = self._empty_operator, None, 1, b"SyncBatchNormOrder"
        check_call(
            _LIB.MXEnginePushSyncND(
                function, nothing, nothing, _CPU, nothing, 0, handles, len(handles), nothing, priority, name
            )
        )
