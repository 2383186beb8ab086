"""Executors of symbols: MXNet binds the lowered copy of a symbol (`gluon_syncbn.graphs.lower`).

An executor that MXNet has bound becomes a `FollowedExecutor`, whose methods follow the step.
"""

import os
import warnings
import weakref
from collections import deque
from typing import Deque, Iterable, Optional, Tuple

import mxnet as mx

from gluon_syncbn.base.mxnet_private import device_of, json_of
from gluon_syncbn.base.walk import users_line
from gluon_syncbn.graphs.graph import Kind
from gluon_syncbn.graphs.lower import Lowering, say
from gluon_syncbn.graphs.norms import MARK, Layers, has_what_runs, making
from gluon_syncbn.mxnet_engine import cpu_resources, failures
from gluon_syncbn.step.abandon import leave_failed_step, refuse_after_a_failure
from gluon_syncbn.step.steps import steps

_MIRROR = "MXNET_BACKWARD_DO_MIRROR"
_MOST_KEPT = 16


class _Lowered:
    """A symbol, whose handle no other symbol gets meanwhile, and its lowered copy, or itself if it has no marks."""

    def __init__(self, symbol: mx.sym.Symbol, copy: mx.sym.Symbol):
        self.symbol, self.copy = symbol, copy


class _Copies:
    """Each device's executor is bound by itself, and all must be bound to one lowered copy: its nodes are where devices
    meet. So copies are kept while they have an executor, and the last few in any case."""

    def __init__(self) -> None:
        self._all: weakref.WeakValueDictionary[Tuple, _Lowered] = weakref.WeakValueDictionary()  # by handle and text
        self._last: Deque[_Lowered] = deque(maxlen=_MOST_KEPT)

    def lowered(self, symbol: mx.sym.Symbol, kind: Kind) -> _Lowered:
        """The copy has arguments and states in the symbol's order."""
        text = json_of(symbol)
        if MARK not in text:
            return _Lowered(symbol, symbol)
        key = symbol.handle.value, text, kind
        with making.lock:
            found = self._all.get(key)
            if found is None:
                lowering = Lowering(symbol, Layers(), {}, kind)
                if _inputs_of(lowering.symbol) != _inputs_of(symbol):
                    lowering = Lowering(symbol, Layers(), {}, kind._replace(fuses_sums=False))
                say(symbol.name or "symbol", lowering.fused)
                found = self._all[key] = _Lowered(symbol, lowering.symbol)
                self._last.append(found)
            return found


_kept = _Copies()


def lowering_bind(bind, symbol, /, *args, **kwargs):
    """``Symbol.bind`` and ``simple_bind``, as a Module calls them."""
    lowered = _kept.lowered(symbol, Kind())
    return _bind(lowered, has_what_runs(lowered.copy), bind, lowered.copy, *args, **kwargs)


def lowering_partition(optimize_for, symbol, /, *args, **kwargs):
    """``Symbol.optimize_for``, which takes a symbol apart for a partitioner: it gets the lowered copy.

    Nothing is fused, as in a net with a partitioner. A net's graph has been lowered before, for its layers.
    """
    kind = Kind(is_partitioned=True, fuses=False)
    return optimize_for(_kept.lowered(symbol, kind).copy, *args, **kwargs)


class FollowedExecutor(mx.executor.Executor):
    """An Executor that MXNet has bound, also where nothing synchronizes."""

    synchronizes: bool
    lowered: _Lowered
    buffers: cpu_resources.GraphsBuffers  # which it keeps until it goes
    is_training: Optional[bool] = None  # the mode of the last call

    def forward(self, /, is_train=False, **kwargs):
        """As MXNet's; in training a step of symbols and Modules begins with it.

        MXNet gives operators that are pending the mode of the next call. So calls in the other mode run first. And it
        does not know that the call writes running statistics: ``Module.get_params`` would read those from before.
        """
        if self.synchronizes:
            if self.is_training not in (None, bool(is_train)):
                for output in self.outputs:
                    output.wait_to_read()
            self.is_training = bool(is_train)
        if is_train:
            leave_failed_step()
            if self.synchronizes:
                steps.progress.close_if_balanced()
                cpu_resources.open_step()
                failures.seal(self.aux_arrays)
                if any(array is not None for array in self.grad_arrays or ()):
                    steps.progress.open_executors.add(self)
        outputs = super().forward(is_train, **kwargs)
        if is_train:
            self._watch_statistics(outputs)
        return outputs

    def backward(self, *args, **kwargs):
        """As MXNet's; a step of symbols and Modules ends with it."""
        super().backward(*args, **kwargs)
        self._watch_statistics(self.grad_arrays or ())
        steps.progress.open_executors.discard(self)

    def _watch_statistics(self, computed: Iterable[Optional[mx.nd.NDArray]]) -> None:
        """The call that computes these arrays writes running statistics, MXNet's own BatchNorm in the backward pass."""
        arrays = [array for array in computed if array is not None]
        if arrays and self.synchronizes and failures.is_in_use():
            device = device_of(arrays[0])
            error = f"an operator of a symbol, or one before it, had failed on {device}."
            failures.watch([array for array in arrays if device_of(array) == device], error, self.aux_arrays)

    def reshape(self, *args, **kwargs):
        """As MXNet's, which binds another executor; a Module calls it for a batch of another size."""
        return _bind(self.lowered, self.synchronizes, super().reshape, *args, **kwargs)

    def copy_params_from(self, *args, **kwargs):
        """As MXNet's."""
        if self.synchronizes:
            refuse_after_a_failure("Executor.copy_params_from")
        super().copy_params_from(*args, **kwargs)


def _bind(lowered: _Lowered, synchronizes: bool, bind, /, *args, **kwargs) -> FollowedExecutor:
    buffers = cpu_resources.GraphsBuffers()
    with making.lock:
        before = os.environ.get(_MIRROR, "0")
        is_off = synchronizes and before not in ("", "0")
        try:
            if is_off:
                # MXNet would compute the layers again in the backward pass: their running statistics would move twice.
                warnings.warn(f"{_MIRROR} is off for symbols with synchronized layers.", stacklevel=users_line())
                os.environ[_MIRROR] = "0"
            executor = cpu_resources.in_one_call(buffers, None, bind, *args, **kwargs)
        finally:
            if is_off:
                os.environ[_MIRROR] = before
    executor.__class__ = FollowedExecutor
    executor.lowered, executor.synchronizes, executor.buffers = lowered, synchronizes, buffers
    return executor


def _inputs_of(symbol: mx.sym.Symbol):
    return symbol.list_arguments(), symbol.list_auxiliary_states()
