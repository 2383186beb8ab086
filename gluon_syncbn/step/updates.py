"""The gates before each optimizer: a failed step updates no weight, and leaves no trace in the optimizer.

In a failed step the gates (`mxnet_engine.failures`) make MXNet skip the updates of weights, and of the optimizer's
arrays; `step.held` undoes its numbers in Python.

A Trainer's first step also copies all parameters into its KVStore, and back. It waits for its gates, and raises the
error before anything is copied.
"""

import contextlib
import signal
import threading
import warnings
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Union

import mxnet as mx
from mxnet.gluon import Parameter

from gluon_syncbn.base.mxnet_private import (
    Update,
    device_of,
    is_first_update,
    is_for_one_process,
    joined,
    optimizer_of,
    outputs_of_module,
    parameters_of,
    reduces_gradients,
    updaters_of,
    updates_of,
    updates_of_module,
    updates_of_trainer,
)
from gluon_syncbn.base.walk import users_line
from gluon_syncbn.meeting import waiting
from gluon_syncbn.mxnet_engine import failures
from gluon_syncbn.step.steps import steps
from gluon_syncbn.step.unmet import check_met, check_module


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
    >>> loss.backward()  # on one device
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
    steps.updates.guarded.update(listed)
    with _guarding(lambda: joined(updates_of(listed))):
        yield


def noting_trainer(init, trainer, /, *args, **kwargs):
    """``Trainer.__init__``: a step may fail before the first update."""
    init(trainer, *args, **kwargs)
    steps.updates.trainers[trainer] = False
    if steps.updates.when_trainer_is_made is not None:
        steps.updates.when_trainer_is_made(trainer)


def guarding_trainer(update, trainer, /, *args, **kwargs):
    """A method of Trainer that reads gradients, or updates weights."""
    parameters = parameters_of(trainer)
    with steps.progress.notes.given_back(parameters):
        check_met(parameters)
        is_first = is_first_update(trainer)
        steps.updates.before_update(is_first)
        if not failures.is_in_use():
            return update(trainer, *args, **kwargs)
        if not steps.updates.trainers.get(trainer) and update.__name__ != "update":
            _warn_if_alone(trainer)
        steps.updates.trainers[trainer] = True
        ignores_stale = kwargs.get("ignore_stale_grad") or any(args if update.__name__ == "_update" else args[1:])
        # One gate for all is closed for all, but delays a reduction that could run beside the backward pass. It is
        # needed where the gradients of some device may be of the step before.
        has_one_gate = is_first or ignores_stale or steps.progress.is_uneven() or not reduces_gradients(trainer)

        def updates() -> List[Update]:
            found = updates_of_trainer(trainer)
            return joined(found) if has_one_gate else found

        with _guarding(updates, is_first, optimizer_of(trainer), updaters_of(trainer)):
            return update(trainer, *args, **kwargs)


def finishing_update(update, trainer, /, *args, **kwargs):
    """``Trainer._update`` and ``_allreduce_grads``, which update one device after the other: Ctrl-C waits for the last.

    They are guarded, too, where a subclass of Trainer has a ``step`` of its own.
    """
    with _holding_ctrl_c():
        if steps.updates.here.updates:
            return update(trainer, *args, **kwargs)
        return guarding_trainer(update, trainer, *args, **kwargs)


@contextlib.contextmanager
def _holding_ctrl_c() -> Iterator[None]:
    """Let Ctrl-C raise its error after the block, on the main thread: else devices would have different weights."""
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    came: List[Any] = []
    waiting.handle(signal.SIGINT, lambda *event: came.append(event))
    try:
        yield
    finally:
        waiting.handle(signal.SIGINT, handler)
        if came:
            handler(*came[-1])


def _warn_if_alone(trainer: mx.gluon.Trainer) -> None:
    """Where a net synchronizes with other processes, and nothing adds up their gradients."""
    updated = {id(parameter) for parameter in parameters_of(trainer)}
    connected = (layer for sync, layer in steps.layers.in_use().items() if sync.link is not None)
    if is_for_one_process(trainer) and any(id(layer.running_mean) in updated for layer in connected):
        warnings.warn(
            "The layers of this net synchronize with other processes, but its gluon.Trainer does not add up their "
            "gradients, so each process trains weights of its own. Use horovod.mxnet.DistributedTrainer, or with MPI "
            "gluon_syncbn.DistributedTrainer. If you add up gradients yourself before Trainer.step, silence this: "
            "warnings.filterwarnings('ignore', message='The layers of this net synchronize').",
            stacklevel=users_line(),
        )


def guarding_module(update, module, /, *args, **kwargs):
    """``Module.update``. It also watches the outputs of the Module's graphs: nothing else of ours sees them run."""
    check_module(module)
    if not failures.is_in_use():
        return update(module, *args, **kwargs)
    for outputs in outputs_of_module(module):
        failures.watch(outputs, f"an operator of the Module on {device_of(outputs[0])} had failed.", are_heads=True)
    guard = _guarding(lambda: updates_of_module(module), False, optimizer_of(module), updaters_of(module))
    with guard, _holding_ctrl_c():
        return update(module, *args, **kwargs)


@contextlib.contextmanager
def _guarding(
    updates: Callable[[], List[Update]],
    is_first: bool = False,
    optimizer: Optional[mx.optimizer.Optimizer] = None,
    updaters: Sequence[mx.optimizer.Updater] = (),
) -> Iterator[None]:
    """Gates before the block, one for each update, and a seal after it, when updates may have written more arrays.

    ``is_first``: the block copies all parameters into a KVStore.
    """
    steps.progress.begin_update()
    before = updates()
    gradients = [item.gradients for item in before]
    if not any(gradients):
        yield
        return
    probes = [mx.nd.empty(1)] if is_first else []
    gate = failures.gate([[*probes, *gradients[0]], *gradients[1:]], [item.written for item in before])
    steps.updates.hold(gate, [item.keys for item in before], optimizer, updaters)
    for probe in probes:
        probe.wait_to_read()
    steps.updates.here.updates += 1
    try:
        yield
    finally:
        steps.updates.here.updates -= 1
        failures.seal([array for item in updates() for array in (*item.gradients, *item.written)])
