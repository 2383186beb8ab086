"""Updates of weights that are held until their gates are known to have opened, and undone if the step is abandoned.

In a failed step the gates (`step.updates`) make MXNet skip the updates of weights and of the optimizer's arrays. But
the optimizer also counts updates, in Python, when it is *called*: Adam corrects its means by that number, and schedules
choose the learning rate by it. So the numbers are remembered at the gates, and put back when the step is abandoned.
"""

import threading
import weakref
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

import mxnet as mx

from gluon_syncbn.base.mxnet_private import added_gradients_of_module, arrays_of, has_gradient, parameters_of
from gluon_syncbn.mxnet_engine import failures
from gluon_syncbn.step.reached import take_fresh_gradient

# Numbers that optimizers of MXNet's keep in Python: all, Nadam, and LARS.
_NUMBERS = ("num_update", "m_schedule", "last_lr", "cur_lr")


class _Held(NamedTuple):
    """An update that is not known to have passed all of its gates."""

    first_gate: int
    indices: Sequence[List[Any]]  # by gate, as the optimizer counts
    optimizer: "weakref.ref[mx.optimizer.Optimizer]"
    numbers: Dict[str, Any]
    counts: Dict[int, Dict[Any, int]]  # by device
    # The dicts of each updater, and their items before the update: states, and whether they are on the right device.
    # MXNet makes and moves states in an update. States that are loaded meanwhile stay: they are in other dicts.
    states: List[Tuple[Dict[Any, Any], Dict[Any, Any]]]

    def opened(self) -> List[bool]:
        return [failures.has_opened(self.first_gate + i) for i in range(len(self.indices))]

    def undo(self, opened: List[bool]) -> None:
        """Take back the counts and states of weights whose gates have not opened."""
        optimizer = self.optimizer()
        if optimizer is None or all(opened):
            return
        held = [index for some, is_open in zip(self.indices, opened) if not is_open for index in some]
        for states, before in self.states:
            for index in held:
                _put_back(states, index, before)
        for device, counts in counts_of(optimizer).items():
            for index in held:
                _put_back(counts, index, self.counts.get(device, {}))
        if not any(opened):
            for name, value in self.numbers.items():
                setattr(optimizer, name, value)


def _put_back(now: Dict, key: Any, before: Dict) -> None:
    now.pop(key, None)
    if key in before:
        now[key] = before[key]


class _Here(threading.local):
    updates = 0  # that this thread is within


class Updates:
    """The Trainers and Modules that update weights, and the updates that are held, in `steps.updates`."""

    def __init__(self) -> None:
        self.trainers: weakref.WeakKeyDictionary[mx.gluon.Trainer, bool] = weakref.WeakKeyDictionary()  # has updated?
        self.checked_modules: weakref.WeakSet[mx.mod.Module] = weakref.WeakSet()  # whose symbols are right for them
        self.guarded: weakref.WeakSet[mx.gluon.Parameter] = weakref.WeakSet()  # by `gluon_syncbn.guard_update`
        self.before_update: Callable[[bool], None] = lambda is_first: None  # set by `gluon_syncbn.devices`
        self.when_trainer_is_made: Optional[Callable[[mx.gluon.Trainer], None]] = None  # set by `gluon_syncbn.install`
        self.here = _Here()
        self._lock = threading.Lock()
        self._held: List[_Held] = []  # oldest first

    def hold(
        self,
        gate: int,
        indices: Sequence[List[Any]],
        optimizer: Optional[mx.optimizer.Optimizer],
        updaters: Sequence[mx.optimizer.Updater],
    ) -> None:
        """Remember the optimizer's numbers and states until these gates, one for each list of indices, have opened."""
        if optimizer is None:
            return
        numbers = numbers_of(optimizer)
        counts = {device: dict(some) for device, some in counts_of(optimizer).items()}
        with self._lock:
            while self._held and all(self._held[0].opened()):
                del self._held[0]
            states = [(some, dict(some)) for item in updaters for some in (item.states, item.states_synced)]
            self._held.append(_Held(gate, indices, weakref.ref(optimizer), numbers, counts, states))

    def parameters(self) -> Set[mx.gluon.Parameter]:
        """The Parameters that are updated."""
        of_trainers = (parameter for trainer in list(self.trainers) for parameter in parameters_of(trainer))
        return {*self.guarded, *of_trainers}

    def drop_last(self) -> None:
        """Forget the update that was held last: it has not begun."""
        with self._lock:
            del self._held[-1:]

    def undo(self) -> str:
        """Undo updates that were held back. The step was abandoned; nothing runs.

        Returns which weights it has updated, for the log.
        """
        with self._lock:
            updates = [(update, update.opened()) for update in self._held]
            self._held.clear()
        for update, opened in reversed(updates):  # so that the oldest of an optimizer's has the last word
            update.undo(opened)
        failures.forget_gates()
        held = [opened for _, opened in updates if not all(opened)]
        if not held:
            return "No weight has been updated since it failed."
        if not any(map(any, held)):
            return "Weights and optimizer states are as they were before it."
        return (
            "Its backward pass had failed when some weights had their whole gradient: those are updated, on all "
            "devices. The others, and their optimizer states, are as they were before it."
        )

    def forget_gradients(self) -> None:
        """Forget the gradients of a step that was abandoned: it may have written anything to them.

        A Trainer does not take them for new ones, and gradients with ``grad_req='add'`` are zero.
        """
        learning = [parameter for parameter in self.parameters() if has_gradient(parameter)]
        for array in (array for parameter in learning for array in arrays_of(parameter)):
            take_fresh_gradient(array)
        with mx.autograd.pause():  # a step may be abandoned where the next one is recorded
            for parameter in learning:
                if parameter.grad_req == "add":
                    for gradient in (array.as_nd_ndarray() for array in parameter.list_grad()):
                        mx.nd.zeros_like(gradient, out=gradient)  # zero_grad() knows no arrays of mx.np
            for module in list(self.checked_modules):
                for gradient in added_gradients_of_module(module):
                    gradient[:] = 0


def numbers_of(optimizer: mx.optimizer.Optimizer) -> Dict[str, Any]:
    return {name: getattr(optimizer, name) for name in _NUMBERS if hasattr(optimizer, name)}


def counts_of(optimizer: mx.optimizer.Optimizer) -> Dict[int, Dict[Any, int]]:
    """How often each parameter was updated, by the devices' numbers."""
    return getattr(optimizer, "_all_index_update_counts", {})
