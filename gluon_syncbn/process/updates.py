"""The gate before each optimizer: a failed step updates no weight, and leaves no trace in the optimizer.

In a failed step the gate (`engine.failures`) makes MXNet skip the updates of weights, and of what the optimizer keeps
in arrays. What it keeps in Python has changed when the update was *asked for*: the number of updates, by which Adam
corrects its means and schedules choose the learning rate. So that is remembered at the gate, until the gate is known to
have opened, and put back when the step is given up.

A Trainer's first step also copies all parameters into its KVStore, and back. There the gate is waited for, and the
error raised, before anything is copied.
"""

import collections.abc
import contextlib
import functools
import threading
import weakref
from typing import Any, Callable, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Union

import mxnet as mx
from mxnet.gluon import Parameter

from gluon_syncbn.base.mxnet_private import (
    gradients_of,
    gradients_of_module,
    is_first_update,
    optimizer_of,
    outputs_of_module,
    parameters_of,
    states_of,
    weights_of,
    weights_of_module,
)
from gluon_syncbn.engine import failures

# Numbers that optimizers of MXNet's keep in Python; Nadam has the last.
_NUMBERS = ("num_update", "m_schedule")


class _Update(NamedTuple):
    """One that is not known to have passed its gate."""

    gate: int
    optimizer: "weakref.ref[mx.optimizer.Optimizer]"
    numbers: Dict[str, Any]
    counts: Dict[int, Dict[Any, int]]  # by device


_updates: List[_Update] = []  # oldest first
_lock = threading.Lock()


@contextlib.contextmanager
def guard_update(parameters: Union[Dict[str, Parameter], Iterable[Parameter]]) -> Iterator[None]:
    """Within the ``with`` block, updates of these parameters are skipped if the step has failed.

    For loops that update weights themselves. Enter it after ``backward()``, before you read the gradients.
    ``Trainer.step``, ``allreduce_grads`` and ``update`` and ``Module.update`` do so by themselves. It waits for nothing
    but the first time.

    Parameters
    ----------
    parameters : ParameterDict, dict or iterable of Parameter
        As ``net.collect_params()``.

    Raises
    ------
    MXNetError
        The first time, and always where nothing is compiled: the step has failed. (Else the weights carry the error
        until `gluon_syncbn.abandon_step`.)

    Examples
    --------
    >>> loss.backward()
    >>> with gluon_syncbn.guard_update(net.collect_params()):
    ...     for weight in net.collect_params().values():
    ...         if weight.grad_req != "null":
    ...             mx.nd.sgd_update(weight.data(), weight.grad(), lr=0.1, out=weight.data())
    """
    listed = list(parameters.values() if isinstance(parameters, collections.abc.Mapping) else parameters)
    gradients = gradients_of(listed) if failures.is_in_use() else []
    with _guarding(gradients, lambda: weights_of(listed)):
        yield


def guarding_trainer(update):
    """A method of Trainer's that reads gradients, or updates weights."""

    @functools.wraps(update)
    def guarded(self, *args, **kwargs):
        if not failures.is_in_use():
            return update(self, *args, **kwargs)
        parameters = parameters_of(self)

        def written():
            return weights_of(parameters) + states_of(self)

        with _guarding(gradients_of(parameters), written, optimizer_of(self), is_first_update(self)):
            return update(self, *args, **kwargs)

    return guarded


def guarding_module(update):
    """``Module.update``. What its graphs have computed is watched here, too: nothing else of ours sees them run."""

    @functools.wraps(update)
    def guarded(self, *args, **kwargs):
        if not failures.is_in_use():
            return update(self, *args, **kwargs)
        for outputs in outputs_of_module(self):
            failures.watch(outputs, [], f"an operator of the Module on {outputs[0].context} had failed.")
        with _guarding(gradients_of_module(self), lambda: weights_of_module(self), optimizer_of(self)):
            return update(self, *args, **kwargs)

    return guarded


@contextlib.contextmanager
def _guarding(
    gradients: Sequence[Sequence[mx.nd.NDArray]],
    written: Callable[[], List[mx.nd.NDArray]],
    optimizer: Optional[mx.optimizer.Optimizer] = None,
    is_first: bool = False,
) -> Iterator[None]:
    """A gate before the block, and a seal after it, for what is ``written`` in it beside the gradients.

    ``is_first``: the block copies all parameters into a KVStore.
    """
    devices = [list(some) for some in gradients if some]
    if not devices:
        yield
        return
    probe = mx.nd.empty(1)
    number = failures.gate([[probe], *devices] if is_first else devices)
    _remember(number, optimizer)
    if is_first:
        probe.wait_to_read()
    try:
        yield
    finally:
        failures.seal([array for some in devices for array in some] + written())


def _remember(number: int, optimizer: Optional[mx.optimizer.Optimizer]) -> None:
    with _lock:
        while _updates and failures.has_opened(_updates[0].gate):
            del _updates[0]
        if optimizer is not None:
            numbers = {name: getattr(optimizer, name) for name in _NUMBERS if hasattr(optimizer, name)}
            counts = {device: dict(some) for device, some in _counts(optimizer).items()}
            _updates.append(_Update(number, weakref.ref(optimizer), numbers, counts))


def _counts(optimizer: mx.optimizer.Optimizer) -> Dict[int, Dict[Any, int]]:
    return getattr(optimizer, "_all_index_update_counts", {})


def undo_held_updates() -> None:
    """The step was given up, and nothing runs: optimizers have not made the updates that were held back."""
    with _lock:
        held = [update for update in _updates if not failures.has_opened(update.gate)]
        _updates.clear()
    for update in reversed(held):  # so that the oldest of an optimizer's has the last word
        optimizer = update.optimizer()
        if optimizer is None:
            continue
        for name, value in update.numbers.items():
            setattr(optimizer, name, value)
        for device, counts in _counts(optimizer).items():
            counts.clear()
            counts.update(update.counts.get(device, {}))
    failures.forget_gates()
