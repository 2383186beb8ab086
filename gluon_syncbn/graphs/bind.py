"""Executors of symbols: MXNet binds the lowered copy of a symbol (`gluon_syncbn.graphs.lower`)."""

import os
import warnings
from collections import OrderedDict
from typing import Tuple

import mxnet as mx

from gluon_syncbn.base.mxnet_private import json_of
from gluon_syncbn.base.walk import users_line
from gluon_syncbn.graphs.graph import Kind
from gluon_syncbn.graphs.lower import Lowering, making, say
from gluon_syncbn.graphs.norms import MARK, Layers, has_what_runs
from gluon_syncbn.mxnet_engine import cpu_resources
from gluon_syncbn.step.steps import steps

_MIRROR = "MXNET_BACKWARD_DO_MIRROR"
_MOST_KEPT = 16
# Each device's executor is bound by itself, and all must be bound to one lowered copy: its nodes are where devices
# meet. So the last few copies are kept, by the handles and texts of the originals; and the originals with them, or
# another symbol could get the handle.
_kept: "OrderedDict[Tuple, Tuple[mx.sym.Symbol, mx.sym.Symbol]]" = OrderedDict()


def _lowered(symbol: mx.sym.Symbol, kind: Kind) -> mx.sym.Symbol:
    """The lowered copy, with arguments and states in their order; the symbol itself if it has no marks."""
    text = json_of(symbol)
    if MARK not in text:
        return symbol
    key = symbol.handle.value, text, kind
    with making:
        if key not in _kept:
            lowering = Lowering(symbol, Layers(), {}, kind)
            if _inputs_of(lowering.symbol) != _inputs_of(symbol):
                lowering = Lowering(symbol, Layers(), {}, kind._replace(fuses_sums=False))
            say(symbol.name or "symbol", lowering.fused)
            _kept[key] = symbol, lowering.symbol
        _kept.move_to_end(key)
        if len(_kept) > _MOST_KEPT:
            _kept.popitem(last=False)
        return _kept[key][1]


def lowering_bind(bind, symbol, /, *args, **kwargs):
    """``Symbol.bind`` and ``simple_bind``, as a Module calls them."""
    lowered = _lowered(symbol, Kind())
    return _bind(bind, lowered, has_what_runs(lowered), args, kwargs)


def lowering_partition(optimize_for, symbol, /, *args, **kwargs):
    """``Symbol.optimize_for``, which takes a symbol apart for a partitioner: it gets the lowered copy.

    Nothing is fused, as in a net with a partitioner. A net's graph has been lowered before, for its layers.
    """
    return optimize_for(_lowered(symbol, Kind(is_partitioned=True, fuses=False)), *args, **kwargs)


def following_reshape(reshape, executor, /, *args, **kwargs):
    """``Executor.reshape``, which binds another executor; a Module calls it for a batch of another size."""
    return _bind(reshape, executor, executor in steps.progress.executors, args, kwargs)


def _bind(bind, bound, synchronizes: bool, args, kwargs) -> mx.executor.Executor:
    buffers = cpu_resources.GraphsBuffers()
    with making:
        before = os.environ.get(_MIRROR, "0")
        is_off = synchronizes and before not in ("", "0")
        try:
            if is_off:
                # MXNet would compute the layers again in the backward pass: their running statistics would move twice.
                warnings.warn(f"{_MIRROR} is off for symbols with synchronized layers.", stacklevel=users_line())
                os.environ[_MIRROR] = "0"
            executor = cpu_resources.in_one_call(buffers, None, bind, bound, *args, **kwargs)
        finally:
            if is_off:
                os.environ[_MIRROR] = before
    cpu_resources.give_buffers(executor, buffers)
    if synchronizes:
        steps.progress.executors[executor] = None
    return executor


def _inputs_of(symbol: mx.sym.Symbol):
    return symbol.list_arguments(), symbol.list_auxiliary_states()
