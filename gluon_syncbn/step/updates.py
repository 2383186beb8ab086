"""The gates before each optimizer: a failed step updates no weight, and leaves no trace in the optimizer.

In a failed step the gates (`engine.failures`) make MXNet skip the updates of weights, and of what the optimizer keeps
in arrays. What it keeps in Python has changed when the update was *called*: the number of updates, by which Adam
corrects its means and schedules choose the learning rate. So that is remembered at the gates, until they are known to
have opened, and put back when the step is abandoned.

A Trainer's first step also copies all parameters into its KVStore, and back. There the gates are waited for, and the
error raised, before anything is copied.
"""

import contextlib
import functools
import threading
import warnings
import weakref
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Union

import mxnet as mx
from mxnet.gluon import Parameter

from gluon_syncbn.base.mxnet_private import (
    device_of,
    gradients_of,
    gradients_of_module,
    has_gradient,
    is_first_update,
    is_for_one_process,
    optimizer_of,
    outputs_of_module,
    parameters_of,
    reduces_gradients,
    states_of,
    weights_of,
    weights_of_module,
)
from gluon_syncbn.base.walk import users_line
from gluon_syncbn.mxnet_engine import failures
from gluon_syncbn.step.steps import HeldUpdate, steps
from gluon_syncbn.step.unmet import check_met, check_module

# Numbers that optimizers of MXNet's keep in Python; Nadam has the last.
_NUMBERS = ("num_update", "m_schedule")


class _Here(threading.local):
    updates = 0  # that this thread is within


_here = _Here()


def is_updating() -> bool:
    """Whether this thread is within an update."""
    return _here.updates > 0


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
    TypeError
        Something else than Parameters.

    Examples
    --------
    >>> loss.backward()
    >>> with gluon_syncbn.guard_update(net.collect_params()):
    ...     for weight in net.collect_params().values():
    ...         if weight.grad_req != "null":
    ...             mx.nd.sgd_update(weight.data(), weight.grad(), lr=0.1, out=weight.data())
    """
    listed = list(parameters.values() if hasattr(parameters, "values") else parameters)
    for item in listed:
        if not isinstance(item, Parameter):
            raise TypeError(f"gluon_syncbn.guard_update: expected Parameters, not {type(item).__name__}.")
    if not failures.is_in_use():
        yield
        return
    gradients = [[array for some in gradients_of(listed).values() for array in some]]
    with _guarding(gradients, lambda: weights_of(listed)):
        yield


def noting_trainer(init):
    """``Trainer.__init__``: a step may fail before the first update."""

    @functools.wraps(init)
    def noted(self, *args, **kwargs):
        init(self, *args, **kwargs)
        steps.trainers[self] = False

    return noted


def guarding_trainer(update):
    """A method of Trainer's that reads gradients, or updates weights."""

    @functools.wraps(update)
    def guarded(self, *args, **kwargs):
        check_met(parameters_of(self))
        steps.before_update()
        if not failures.is_in_use():
            return update(self, *args, **kwargs)
        if not steps.trainers.get(self) and update.__name__ != "update":
            _warn_if_alone(self)
        steps.trainers[self] = True
        parameters = parameters_of(self)
        by_index = gradients_of(parameters)
        is_first = is_first_update(self)
        # One gate for all is closed for all, but delays a reduction that could run beside the backward pass. It is
        # needed where the gradients of some device may be those of the step before.
        ignores_stale = kwargs.get("ignore_stale_grad", args[1:] and args[1])
        if is_first or ignores_stale or steps.is_uneven() or not reduces_gradients(self):
            indices = [list(by_index)]
        else:
            indices = [[index] for index in by_index]
        gradients = [[array for index in some for array in by_index[index]] for some in indices]

        def written():
            return weights_of(parameters) + states_of(self)

        with _guarding(gradients, written, is_first, optimizer_of(self), indices):
            return update(self, *args, **kwargs)

    return guarded


def _warn_if_alone(trainer: mx.gluon.Trainer) -> None:
    """Where a net synchronizes with other processes, and nothing adds up their gradients."""
    updated = {id(parameter) for parameter in parameters_of(trainer)}
    connected = (layer for layer in steps.layers() if layer._sync.link is not None)
    if is_for_one_process(trainer) and any(id(layer.running_mean) in updated for layer in connected):
        warnings.warn(
            "The layers of this net synchronize with other processes, but its gluon.Trainer does not add up their "
            "gradients, so each process trains weights of its own. Use horovod.mxnet.DistributedTrainer, or with MPI "
            "gluon_syncbn.DistributedTrainer. If you add up gradients yourself before Trainer.step, silence this: "
            "warnings.filterwarnings('ignore', message='The layers of this net synchronize').",
            stacklevel=users_line(),
        )


def guarding_module(update):
    """``Module.update``. What its graphs have computed is watched here, too: nothing else of ours sees them run."""

    @functools.wraps(update)
    def guarded(self, *args, **kwargs):
        check_module(self)
        if not failures.is_in_use():
            return update(self, *args, **kwargs)
        for outputs in outputs_of_module(self):
            failures.watch(outputs, f"an operator of the Module on {device_of(outputs[0])} had failed.", are_heads=True)
        indices, gradients = gradients_of_module(self)
        with _guarding(gradients, lambda: weights_of_module(self), False, optimizer_of(self), indices):
            return update(self, *args, **kwargs)

    return guarded


@contextlib.contextmanager
def _guarding(
    gradients: Sequence[Sequence[mx.nd.NDArray]],
    written: Callable[[], List[mx.nd.NDArray]],
    is_first: bool = False,
    optimizer: Optional[mx.optimizer.Optimizer] = None,
    indices: Sequence[List[Any]] = (),
) -> Iterator[None]:
    """Gates before the block, and a seal after it, for what is ``written`` in it beside the gradients.

    ``is_first``: the block copies all parameters into a KVStore. ``indices`` are those of the gradients.
    """
    steps.begin_update()
    steps.close_if_balanced()
    if not any(gradients):
        yield
        return
    probes = [mx.nd.empty(1)] if is_first else []
    gate = failures.gate([[*probes, *gradients[0]], *gradients[1:]])
    if optimizer is not None:
        numbers = {name: getattr(optimizer, name) for name in _NUMBERS if hasattr(optimizer, name)}
        counts = {device: dict(some) for device, some in _counts(optimizer).items()}
        steps.hold(HeldUpdate(gate, list(indices), weakref.ref(optimizer), numbers, counts))
    for probe in probes:
        probe.wait_to_read()
    _here.updates += 1
    try:
        yield
    finally:
        _here.updates -= 1
        failures.seal([array for some in gradients for array in some] + written())


def _counts(optimizer: mx.optimizer.Optimizer) -> Dict[int, Dict[Any, int]]:
    return getattr(optimizer, "_all_index_update_counts", {})


def clear_added_gradients() -> None:
    """Set gradients with ``grad_req='add'`` to zero: a failed step may have added anything to them."""
    with mx.autograd.pause():  # a step may be abandoned where the next one is recorded
        for trainer in list(steps.trainers):
            for parameter in parameters_of(trainer):
                if parameter.grad_req == "add" and has_gradient(parameter):
                    parameter.zero_grad()


def undo_held_updates() -> str:
    """Take back what optimizers have counted of updates that were held back. The step was abandoned; nothing runs.

    Returns which weights it has updated, for the log.
    """
    updates = steps.take_updates()
    for update, opened in reversed(updates):  # so that the oldest of an optimizer's has the last word
        optimizer = update.optimizer()
        if optimizer is not None and not all(opened):
            held = [index for some, is_open in zip(update.indices, opened) if not is_open for index in some]
            for device, counts in _counts(optimizer).items():
                before = update.counts.get(device, {})
                for index in held:
                    counts.pop(index, None)
                    if index in before:
                        counts[index] = before[index]
            if not any(opened):
                for name, value in update.numbers.items():
                    setattr(optimizer, name, value)
    failures.forget_gates()
    held = [opened for _, opened in updates if not all(opened)]
    if not held:
        return "No weight has been updated since it failed."
    if not any(map(any, held)):
        return "Weights and optimizer states are as they were before it."
    return (
        "Its backward pass had failed when some weights had their whole gradient: those are updated, on all devices. "
        "The others, and their optimizer states, are as they were before it."
    )
