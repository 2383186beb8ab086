"""The state of a process's steps: how far Python has come with them, so that one which breaks off is noticed.

When an exception, or Ctrl-C, comes between ``losses[0].backward()`` and ``losses[1].backward()`` and is caught, nothing
says so: device 0 waits in the backward pass, and with it whatever needs its gradients, so that the next step waits,
too. By then Python knows: at the forward pass that begins the next step all devices have been given equally many
forward passes, but not equally many backward passes.

Forward passes are counted where a layer is called, or a graph that has some (for its first layer). Backward passes have
no such place: which devices ``backward()`` of some arrays reaches, their graph alone knows. But MXNet notes at every
Parameter whether its gradient is fresh, for the Trainer, and does so before ``backward()`` returns, whatever the engine
has done by then. So that note is taken away before the call, looked at after it, and put back. Several threads may be
in ``backward()`` together, and one of them may wait there for what another has yet to start: nothing is held during the
call. Whoever returns first counts what is fresh by then, and the last one puts back what nobody has reached.

For backward passes one layer of a net is enough, and 100 would cost time: that which is the first in its
``autograd.record()``.

Other processes must know where a step breaks off here that is under way (`Steps.is_under_way`): from the first recorded
call of a layer on, until a ``backward()`` has reached that layer (any, if its parameters are frozen). For this the
first layer of each graph counts that learns. Training passes that nobody records (statistics that are estimated anew)
never are under way. One that is recorded and has no backward pass is no longer when its thread enters the next
``autograd.record()``; unless the program has shown that it answers calls of one ``record()`` after the next. A step is
also under way from ``backward()`` on until a Trainer that waits for other processes (`gluon_syncbn.DistributedTrainer`)
has added gradients up.
"""

import threading
import weakref
from collections import Counter
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Optional, Set, Tuple

import mxnet as mx
from mxnet.gluon import Block

from gluon_syncbn.base.mxnet_private import device_of, has_fresh_gradient, has_gradient, set_fresh_gradient
from gluon_syncbn.base.walk import outermost_block
from gluon_syncbn.distributed.default import has_groups
from gluon_syncbn.meeting.active_set import active_sets
from gluon_syncbn.meeting.positions import Nets
from gluon_syncbn.mxnet_engine import cpu_resources, failures

Group = List[mx.Context]


class Passes:
    """How often Python has started the passes of one layer on each device.

    ``groups_of`` divides its devices into those that wait for each other. (Of a group that lies in several processes,
    as if it began with the first device of this one: a step that runs everywhere is even in either way.)
    """

    def __init__(self, layer: mx.gluon.nn.BatchNorm, groups_of: Callable[[List[mx.Context]], Dict[int, Group]]):
        self._layer = weakref.ref(layer)
        self._groups_of = groups_of
        self.forget()

    def forget(self) -> None:
        """Begin anew: nothing is under way."""
        self._devices: List[mx.Context] = []
        self._groups: List[Group] = []
        self._callers: Dict[mx.Context, int] = {}  # the threads of the last forward passes
        self._forwards: Counter = Counter()
        self._backwards: Counter = Counter()

    def is_unfinished(self, device: Optional[mx.Context] = None, is_first: bool = False) -> bool:
        """Whether a step broke off in the group of ``device``; or in any.

        Where the pass ``is_first`` in its ``record()``, also in a group that this thread alone has called.

        It is known when all devices of the group have begun equally many forward passes: the next begins a new step.
        Of another thread's group it is not: its backward passes may be under way.
        """
        groups = self._groups
        if device is not None:
            me = {threading.get_ident()} if is_first else None
            groups = [group for group in groups if device in group or {*map(self._callers.get, group)} == me]
        # In this order: between the two looks, the threads of other devices may run both passes of the new step. So
        # whoever sees their backward passes sees their forward passes, too, which this device is yet to begin.
        uneven = [group for group in groups if not _is_even(self._backwards, [group])]
        return any(_is_even(self._forwards, [group]) for group in uneven)

    def is_even(self) -> bool:
        """Whether all devices of a group have begun equally many forward passes."""
        return _is_even(self._forwards, self._groups)

    def is_balanced(self) -> bool:
        """Whether all devices of a group have begun equally many passes of each direction."""
        return self.is_even() and _is_even(self._backwards, self._groups)

    def started(self) -> List[mx.Context]:
        """The devices that have had more backward passes than others of their group."""
        least = {id(group): min(self._backwards[device] for device in group) for group in self._groups}
        return [device for group in self._groups for device in group if self._backwards[device] > least[id(group)]]

    def half_called(self) -> Optional["HalfCalled"]:
        """What this thread alone has begun, on some devices of a group, and nobody on the others; None if nothing."""
        me = {threading.get_ident()}
        for direction, counts in (("forward", self._forwards), ("backward", self._backwards)):
            for group in self._groups:
                group = [device for device in group if active_sets.includes(device, active_sets.current)]
                most = max((counts[device] for device in group), default=0)
                missing = [device for device in group if counts[device] < most]
                if missing and {self._callers[device] for device in group if device in self._callers} == me:
                    return HalfCalled(direction, [device for device in group if device not in missing], missing)
        return None

    def begin_forward(self, device: mx.Context) -> None:
        """Count a forward pass in training mode on ``device``."""
        devices = self._devices_now()
        if devices != self._devices:  # it has moved
            self.forget()
            self._devices, self._groups = devices, list(self._groups_of(devices).values())
        self._forwards[device] += 1
        self._callers[device] = threading.get_ident()

    def end_backward(self, device: mx.Context) -> None:
        """Count a backward pass that reaches ``device``, of a forward pass that was counted.

        The layer may have moved since, or have been called for a prediction.
        """
        if self._devices_now() == self._devices and self._backwards[device] < self._forwards[device]:
            self._backwards[device] += 1

    def _devices_now(self) -> List[mx.Context]:
        layer = self._layer()
        return [] if layer is None else layer.running_mean.list_ctx()

    def arrays(self) -> Dict[mx.Context, mx.nd.NDArray]:
        """A Parameter that learns, by device; none if it is frozen.

        A device is what the Parameter calls it: the arrays of a CPU are on cpu(0) in a net that was pickled.
        """
        layer = self._layer()
        for parameter in (layer.gamma, layer.beta) if layer is not None else ():
            if has_gradient(parameter):
                return dict(zip(parameter.list_ctx(), parameter.list_data()))
        return {}


class HalfCalled(NamedTuple):
    """Passes of one direction that were begun on some devices only."""

    direction: str
    called: List[mx.Context]
    missing: List[mx.Context]


class _Note:
    """Whether the gradient of an array was fresh before ``backward()``; and whether one that has reached it counts."""

    def __init__(self, passes: Passes, device: mx.Context, array: mx.nd.NDArray, was_fresh: bool):
        self.passes, self.device, self.array, self.was_fresh = passes, device, array, was_fresh
        self.is_counted = False

    def count(self) -> None:
        if not self.is_counted and has_fresh_gradient(self.array):
            self.is_counted = True
            self.passes.end_backward(self.device)


def take_fresh_gradient(array: mx.nd.NDArray) -> bool:
    """Take from the array the note that its gradient is fresh. Returns whether autograd knows the array.

    MXNet says so by an error, which nobody is to take for that of a step.
    """
    seen = failures.last_error()
    try:
        set_fresh_gradient(array, False)
    except mx.MXNetError:
        failures.set_last_error(seen)
        return False
    return True


def _is_even(counts: Counter, groups: List[Group]) -> bool:
    return all(len({counts[device] for device in group}) <= 1 for group in groups)


class HeldUpdate(NamedTuple):
    """An update of weights that is not known to have passed all of its gates (`step.updates`)."""

    first_gate: int
    indices: List[List[Any]]  # by gate, as the optimizer counts
    optimizer: "weakref.ref[mx.optimizer.Optimizer]"
    numbers: Dict[str, Any]
    counts: Dict[int, Dict[Any, int]]  # by device

    def opened(self) -> List[bool]:
        return [failures.has_opened(self.first_gate + i) for i in range(len(self.indices))]


class _Scope(threading.local):
    """The last ``autograd.record()`` of each thread, or the one that it is in."""

    has_begun = False  # no layer has been called in it yet
    net: Optional[Block] = None  # that has the first layer that was called in it


class Steps:
    """All that a process must know of its steps, in one object, `steps`. Threads of several devices call it together.

    ``nets`` are those that have trained with other processes, ``executors`` those of symbols that have synchronized
    layers, ``trainers`` all Trainers, with whether each has updated.
    """

    def __init__(self) -> None:
        self.nets = Nets()
        # With the mode of the last call: training, prediction, or none yet.
        self.executors: weakref.WeakKeyDictionary[mx.executor.Executor, Optional[bool]] = weakref.WeakKeyDictionary()
        self.trainers: weakref.WeakKeyDictionary[mx.gluon.Trainer, bool] = weakref.WeakKeyDictionary()
        self.trainers_of_jobs: weakref.WeakSet[mx.gluon.Trainer] = weakref.WeakSet()  # who wait for other processes
        self._has_gradients_of_job = False  # that none of them has used
        self.before_update: Callable[[], None] = lambda: None  # what `gluon_syncbn.devices` has yet to do
        self._lock = threading.Lock()  # of layers, passes and updates
        self._layers: weakref.WeakSet[Any] = weakref.WeakSet()  # that have synchronized
        self._used_gpus = False  # when work was last waited for
        self._lost_gpus = False

        self._scope = _Scope()
        self._inside: Counter = Counter()  # by thread: how many record() it is in
        self._looked_through: weakref.WeakSet[Block] = weakref.WeakSet()

        self._watched: weakref.WeakSet[Passes] = weakref.WeakSet()  # whose backward passes are counted
        self._heads: Counter = Counter()  # of backward passes, by device, since weights were updated
        self._uneven: weakref.WeakSet[Passes] = weakref.WeakSet()  # that some device has yet to begin
        # By thread: the layers that it has called in its last record(), or in it now, and that no backward() has
        # reached since; and those that were open when the thread entered the next record().
        self._open: Dict[int, Set[Passes]] = {}
        self._left: weakref.WeakSet[Passes] = weakref.WeakSet()
        self._answers_late = False  # whether a backward() has reached one of them that was not called again
        self._open_executors: weakref.WeakSet[mx.executor.Executor] = weakref.WeakSet()  # with no backward pass yet

        self._notes_lock = threading.Lock()
        # While a backward() is under way, by layer and id of the array.
        self._notes: Dict[Tuple[Passes, int], _Note] = {}
        self._calls = 0  # of backward() that are under way
        self._updates: List[HeldUpdate] = []  # oldest first

    # The layers and their devices

    def add_layer(self, layer: Block) -> None:
        """Add one that synchronizes from now on."""
        with self._lock:
            self._layers.add(layer)

    def remove_layer(self, layer: Block) -> None:
        """Remove one that synchronizes no more."""
        with self._lock:
            self._layers.discard(layer)

    def layers(self) -> List:
        """Every layer of this process that has synchronized."""
        with self._lock:
            return list(self._layers)

    def devices_in_use(self) -> Set[mx.Context]:
        """The devices of the layers; no GPUs in a process forked by one that had used them, where CUDA fails."""
        devices = {device for layer in self.layers() for device in layer.running_mean.list_ctx()}
        gpus = {device for device in devices if device.device_type == "gpu"}
        self._used_gpus = bool(gpus)
        return devices - gpus if self._lost_gpus else devices

    def lose_gpus(self) -> None:
        """Use no GPU any more in a process that was just forked, if its parent has used some."""
        self._lost_gpus = self._lost_gpus or self._used_gpus

    # Where a step begins and ends

    def begin_record(self) -> None:
        """Note that this thread has entered ``autograd.record()``: the first layer that it calls from now on counts."""
        self._scope.has_begun, self._scope.net = True, None
        me = threading.get_ident()
        with self._lock:
            if not self._inside[me] and not self._answers_late:
                self._left.update(self._open.pop(me, ()))
            self._inside[me] += 1

    def end_record(self) -> None:
        """Note that this thread leaves ``autograd.record()``."""
        me = threading.get_ident()
        with self._lock:
            self._inside[me] -= 1
            if self._inside[me] <= 0:
                del self._inside[me]

    def begins_record(self) -> bool:
        """Whether this thread has called no layer in its ``record()`` yet."""
        return self._scope.has_begun

    def take_new_net(self) -> Optional[Block]:
        """The net that has the first layer that this thread has called in ``autograd.record()``; each net once."""
        net, self._scope.net = self._scope.net, None
        if net is None or net in self._looked_through:
            return None
        self._looked_through.add(net)
        return net

    def is_under_way(self) -> bool:
        """Whether a step has begun here that other processes may be in the middle of, too."""
        return bool(self._open or self._open_executors) or self.is_uneven() or self._has_gradients_of_job

    def is_uneven(self) -> bool:
        """Whether ``backward()`` has been called for some devices only, of those that have run a layer in this step."""
        return any(passes.is_unfinished() for passes in self._watched_now())

    def is_balanced(self) -> bool:
        """Whether all passes that have begun can end: no device waits for one that Python has yet to begin.

        For the backward passes that nobody counts, all devices must have had equally many heads.
        """
        with self._lock:
            if self._uneven or self._open_executors or len(set(self._heads.values())) > 1:
                return False
        return all(passes.is_balanced() for passes in self._watched_now())

    def half_called(self) -> Optional[HalfCalled]:
        """The passes that this thread alone has begun on some devices, and nobody on the others; None if nothing."""
        with self._lock:
            if not self._uneven and len(set(self._heads.values())) < 2:
                return None
            passes = [*self._uneven, *self._watched]
        return next(filter(None, (item.half_called() for item in passes)), None)

    def close_if_balanced(self) -> None:
        """Tell `cpu_resources` that all passes that have begun can end, if that is so."""
        if self.is_balanced():
            cpu_resources.close_step()

    def forget_passes(self) -> None:
        """Begin anew: no step is under way."""
        with self._lock:
            for passes in {*self._watched, *self._uneven}:
                passes.forget()
            self._uneven.clear()
            self._heads.clear()
            self._open.clear()
            self._left.clear()
        self._open_executors.clear()
        self._has_gradients_of_job = False
        with self._notes_lock:  # of a backward() that Ctrl-C has ended in the middle of `begin_backward`
            self._calls = 0
            self._put_notes_back()

    def _watched_now(self) -> List[Passes]:
        with self._lock:
            return list(self._watched)

    # Forward passes

    def begin_forward(self, passes: Passes, device: mx.Context) -> None:
        """Note that Python starts a forward pass in training mode on ``device``."""
        self.note_forward(passes)
        is_first = self._scope.has_begun and mx.autograd.is_recording()
        if is_first:
            self._scope.has_begun, self._scope.net = False, outermost_block()
        with self._lock:
            if is_first:
                self._watched.add(passes)
            self._heads[device] += 0
            passes.begin_forward(device)
            if passes.is_even():
                self._uneven.discard(passes)
            else:
                self._uneven.add(passes)

    def note_forward(self, passes: Passes) -> None:
        """Note that this thread calls a synchronized layer, or a graph of which this one is to count."""
        if is_followed():
            with self._lock:
                self._open.setdefault(threading.get_ident(), set()).add(passes)
                self._left.discard(passes)

    def begin_executor(self, executor: mx.executor.Executor) -> None:
        """Note that ``Executor.forward`` is called in training."""
        if executor in self.executors and any(array is not None for array in executor.grad_arrays or ()):
            self._open_executors.add(executor)

    # Backward passes

    def count_heads(self, heads: Iterable[mx.nd.NDArray]) -> None:
        """Note that a backward pass of these arrays begins."""
        with self._lock:
            self._heads.update(map(device_of, heads))

    def begin_backward(self) -> None:
        """Note that a ``backward()`` is called."""
        with self._notes_lock:
            self._calls += 1
            for note in self._notes.values():  # what calls that are still under way have reached
                note.count()
            with self._lock:  # the layers that it may reach and somebody wants to know of
                awaited = {*self._watched, *self._left, *(passes for some in self._open.values() for passes in some)}
            for passes in awaited:
                for device, array in passes.arrays().items():
                    before = self._notes.get((passes, id(array)))
                    if before is not None and not before.is_counted:
                        continue  # it stays as it is: those calls may reach it at this moment
                    was_fresh = has_fresh_gradient(array) or (before is not None and before.was_fresh)
                    if not take_fresh_gradient(array):  # a copy
                        break
                    self._notes[passes, id(array)] = _Note(passes, device, array, was_fresh)

    def end_backward(self) -> Set[Passes]:
        """Note that a ``backward()`` returns, or raises. Returns the layers that have been reached by now."""
        with self._notes_lock:
            self._calls = max(0, self._calls - 1)
            self._has_gradients_of_job = bool(self.trainers_of_jobs)
            for note in self._notes.values():
                note.count()
            reached = {note.passes for note in self._notes.values() if note.is_counted}
            if not self._calls:
                self._put_notes_back()
            return reached

    def _put_notes_back(self) -> None:
        for note in self._notes.values():
            if note.was_fresh and not note.is_counted:
                set_fresh_gradient(note.array, True)
        self._notes.clear()

    def note_backward(self, reached: Set[Passes]) -> None:
        """Note that a ``backward()`` has reached these layers."""
        with self._lock:
            self._answers_late = self._answers_late or any(passes in self._left for passes in reached)
            for passes in reached:
                self._left.discard(passes)
            for thread in list(self._open):
                self._open[thread] = {passes for passes in self._open[thread] - reached if passes.arrays()}
                if not self._open[thread]:
                    del self._open[thread]

    def end_grad(self) -> None:
        """Note that ``autograd.grad`` was called on this thread, and its graph is done with."""
        with self._lock:
            self._open.pop(threading.get_ident(), None)

    def end_executor(self, executor: mx.executor.Executor) -> None:
        """Note that ``Executor.backward`` was called."""
        self._open_executors.discard(executor)

    # Updates

    def begin_update(self) -> None:
        """Note that weights are about to be updated: the backward passes of all devices have begun."""
        with self._lock:
            self._heads = Counter(dict.fromkeys(self._heads, 0))

    def end_update_of_job(self) -> None:
        """Note that gradients have been added up over processes."""
        self._has_gradients_of_job = False

    def hold(self, update: HeldUpdate) -> None:
        """Remember an update until its gates are known to have opened."""
        with self._lock:
            while self._updates and all(self._updates[0].opened()):
                del self._updates[0]
            self._updates.append(update)

    def drop_update(self) -> None:
        """Forget the update that was held last: it has not begun."""
        with self._lock:
            del self._updates[-1:]

    def take_updates(self) -> List[Tuple[HeldUpdate, List[bool]]]:
        """Forget the updates that were held. Returns them, oldest first, each with which of its gates have opened."""
        with self._lock:
            updates = [(update, update.opened()) for update in self._updates]
            self._updates.clear()
        return updates


def is_followed() -> bool:
    """Whether other processes may have to know of a call that this thread makes now."""
    return has_groups() and mx.autograd.is_recording() and mx.autograd.is_training()


steps = Steps()
