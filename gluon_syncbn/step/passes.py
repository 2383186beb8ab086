"""Counts the passes of a layer that Python has started on each device, so that a step that breaks off is noticed.

An exception, or Ctrl-C, may come between ``losses[0].backward()`` and ``losses[1].backward()``, and the program may
catch it. Device 0 then waits in the backward pass, and so does every operator that needs its gradients, until the next
step waits, too. By then Python can tell: when the next step begins its forward pass, all devices have begun equally
many forward passes, but not equally many backward passes.

Forward passes are counted where a layer, or a graph that has some, is called. Backward passes have no such place: the
graph of the arrays alone knows which devices their ``backward()`` reaches. But MXNet notes at every Parameter whether
its gradient is fresh, for the Trainer, and does so before ``backward()`` returns, however far the engine has come. So
the note is taken away before the call, looked at after it, and put back.
"""

import contextlib
import threading
import weakref
from collections import Counter
from typing import Callable, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Set, Tuple

import mxnet as mx
from mxnet.gluon import Parameter

from gluon_syncbn.base.mxnet_private import has_fresh_gradient, has_gradient, set_fresh_gradient
from gluon_syncbn.meeting.active_set import active_sets
from gluon_syncbn.mxnet_engine import failures

Group = List[mx.Context]


class HalfCalled(NamedTuple):
    """Passes of one direction that were begun on some devices only."""

    direction: str
    called: List[mx.Context]
    missing: List[mx.Context]


class Passes:
    """Counts of the passes of one layer that Python has started on each device.

    ``groups_of`` divides its devices into groups that wait for each other. (If a group lies in several processes, it is
    counted as if it began with the first device of this one: a step that runs everywhere is even in either way.)
    """

    def __init__(self, layer: mx.gluon.nn.BatchNorm, groups_of: Callable[[List[mx.Context]], Dict[int, Group]]):
        self._layer = weakref.ref(layer)
        self._groups_of = groups_of
        self.forget()

    @property
    def name(self) -> str:
        """The layer's name."""
        layer = self._layer()
        return "" if layer is None else layer.name

    def forget(self) -> None:
        """Begin anew: nothing is under way."""
        self._devices: List[mx.Context] = []
        self._groups: List[Group] = []
        self._callers: Dict[mx.Context, threading.Thread] = {}  # of the last forward passes
        self._forwards: Counter = Counter()
        self._recorded: Counter = Counter()  # of these
        self._backwards: Counter = Counter()
        self._backwards_before: Counter = Counter()  # the last forward pass

    def is_unfinished(self) -> bool:
        """Whether a step broke off in any group, or its backward passes are under way."""
        return any(map(self._is_broken, self._groups))

    def broke_off_before(
        self, device: mx.Context, is_first: bool, callers_of_backward: Mapping[mx.Context, threading.Thread]
    ) -> bool:
        """Whether a step broke off in the group of ``device``, which is about to begin a forward pass.

        If the pass ``is_first`` in its ``record()``, groups that this thread alone has called count, too. Groups that
        other threads have called do not: their backward passes may be under way.

        A step can only have broken off if all devices of a group have begun equally many forward passes: the next one
        begins a new step. Where each device has a thread, one may begin its next step, or accumulate gradients, before
        another has called ``backward()``. But all run one program: a device has broken off if it lacks a backward pass
        that another device had before its same forward pass.
        """
        if is_first and self.broke_off_here():
            return True
        for group in (group for group in self._groups if device in group):
            if self._is_mine(group):
                if self._is_broken(group):
                    return True
            elif self._lacks_backward(device, group) or self._has_lost(device, group, callers_of_backward):
                return True
        return False

    def broke_off_here(self) -> bool:
        """Whether a step broke off in a group that this thread alone has called."""
        return any(self._is_mine(group) and self._is_broken(group) for group in self._groups)

    def _is_mine(self, group: Group) -> bool:
        return {*map(self._callers.get, group)} == {threading.current_thread()}

    def _is_broken(self, group: Group) -> bool:
        # In this order: between the two looks, the threads of other devices may run both passes of the new step. If
        # this thread sees their backward passes, it sees their forward passes, too, and its own device has yet to
        # begin one.
        return not _is_even(self._backwards, [group]) and _is_even(self._forwards, [group])

    def _lacks_backward(self, device: mx.Context, group: Group) -> bool:
        """Whether another device had more backward passes before the forward pass that ``device`` is about to begin."""
        number = self._forwards[device] + 1
        return any(
            self._forwards[other] == number and self._backwards_before[other] > self._backwards[device]
            for other in group
        )

    def _has_lost(
        self, device: mx.Context, group: Group, callers_of_backward: Mapping[mx.Context, threading.Thread]
    ) -> bool:
        """Whether a step broke off, so that no thread will call the backward passes that are missing: the device that
        lacks one goes on, its thread has ended, or another thread calls the backward passes of all devices."""
        if not self._is_broken(group):
            return False
        most = max(self._backwards[other] for other in group)
        for other in group:
            caller = self._callers.get(other)
            if self._backwards[other] == most:
                if callers_of_backward.get(other, caller) is not caller:
                    return True
            elif other == device or (caller is not None and not caller.is_alive()):
                return True
        return False

    def is_even(self) -> bool:
        """Whether all devices of a group have begun equally many forward passes."""
        return _is_even(self._forwards, self._groups)

    def is_balanced(self) -> bool:
        """Whether all devices of a group have begun equally many passes of each direction."""
        return self.is_even() and _is_even(self._backwards, self._groups)

    def is_ahead(self, device: mx.Context) -> bool:
        """Whether a pass on ``device`` may wait for another device that has yet to begin it."""
        groups = [group for group in self._groups if device in group]
        return any(
            counts[device] > min(counts[other] for other in group)
            for group in groups
            for counts in (self._forwards, self._backwards)
        )

    def started(self) -> List[mx.Context]:
        """The devices that have had more backward passes than others of their group."""
        least = {id(group): min(self._backwards[device] for device in group) for group in self._groups}
        return [device for group in self._groups for device in group if self._backwards[device] > least[id(group)]]

    def half_called(self) -> Optional[HalfCalled]:
        """The passes that this thread alone has begun on some devices of a group, and no thread on the others."""
        me = {threading.current_thread()}
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
        self._backwards_before[device] = self._backwards[device]
        self._forwards[device] += 1
        self._recorded[device] += mx.autograd.is_recording()
        self._callers[device] = threading.current_thread()

    def end_backward(self, device: mx.Context) -> None:
        """Count a backward pass that reaches ``device``, of a forward pass that was counted.

        The layer may have moved since, or have been called for a prediction.
        """
        if self._devices_now() == self._devices and self._backwards[device] < self._recorded[device]:
            self._backwards[device] += 1

    def _devices_now(self) -> List[mx.Context]:
        layer = self._layer()
        return [] if layer is None else layer.running_mean.list_ctx()

    def parameter(self) -> Optional[Parameter]:
        """γ or β, if one of them learns."""
        layer = self._layer()
        return None if layer is None else next(filter(has_gradient, (layer.gamma, layer.beta)), None)

    def arrays(self) -> Dict[mx.Context, mx.nd.NDArray]:
        """The arrays of the Parameter that learns, by device.

        A device is named as the Parameter names it: the arrays of a CPU are on cpu(0) in a net that was pickled.
        """
        parameter = self.parameter()
        return {} if parameter is None else dict(zip(parameter.list_ctx(), parameter.list_data()))


def _is_even(counts: Counter, groups: List[Group]) -> bool:
    return all(len({counts[device] for device in group}) <= 1 for group in groups)


class _Note:
    """Whether the gradient of an array was fresh before ``backward()``, and whether a pass that reached it counts."""

    def __init__(self, passes: Passes, device: mx.Context, array: mx.nd.NDArray, was_fresh: bool):
        self.passes, self.device, self.array, self.was_fresh = passes, device, array, was_fresh
        self.is_counted = False

    def count(self) -> None:
        if not self.is_counted and has_fresh_gradient(self.array):
            self.is_counted = True
            self.passes.end_backward(self.device)

    def put_back(self) -> None:
        if self.was_fresh and not self.is_counted:
            set_fresh_gradient(self.array, True)


class GradientNotes:
    """The notes that are taken away while a ``backward()`` is under way.

    Several threads may be in ``backward()`` together, and one of them may wait there for a pass that another has yet to
    start: nothing is held during the call. The first thread to return counts the gradients that are fresh by then, and
    the last one puts back the notes of gradients that no call has reached.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._notes: Dict[Tuple[Passes, int], _Note] = {}  # by layer and id of the array
        self._calls = 0  # of backward() that are under way
        self._is_alone = True  # whether no other call has overlapped with the last that began
        self._updated: Counter = Counter()  # ids of Parameters, in updates that are under way

    def begin(self, awaited: Callable[[], Iterable[Passes]]) -> None:
        """Note that a ``backward()`` is called, which may reach the ``awaited`` layers."""
        with self._lock:
            self._calls += 1
            self._is_alone = self._calls == 1
            for note in self._notes.values():  # calls that are still under way may have reached some
                note.count()
            for passes in awaited():
                if id(passes.parameter()) in self._updated:
                    continue
                for device, array in passes.arrays().items():
                    before = self._notes.get((passes, id(array)))
                    if before is not None and not before.is_counted:
                        continue  # it stays as it is: those calls may reach it at this moment
                    was_fresh = has_fresh_gradient(array) or (before is not None and before.was_fresh)
                    if not take_fresh_gradient(array):  # a copy
                        break
                    self._notes[passes, id(array)] = _Note(passes, device, array, was_fresh)

    def end(self) -> Tuple[Set[Passes], Set[mx.Context]]:
        """Note that a ``backward()`` returns, or raises.

        Returns the layers that have been reached by now, and the devices that this call has reached, if it is known.
        """
        with self._lock:
            self._calls = max(0, self._calls - 1)
            for note in self._notes.values():
                note.count()
            counted = [note for note in self._notes.values() if note.is_counted]
            if not self._calls:
                self._put_back()
            return {note.passes for note in counted}, {note.device for note in counted if self._is_alone}

    @contextlib.contextmanager
    def given_back(self, parameters: Iterable[Parameter]) -> Iterator[None]:
        """Let a Trainer see the notes of these Parameters within the block: another thread may be in ``backward()``."""
        ids = Counter(set(map(id, parameters)))
        with self._lock:
            self._updated += ids
            for key, note in list(self._notes.items()):
                if id(note.passes.parameter()) in ids:
                    note.count()
                    note.put_back()
                    del self._notes[key]
        try:
            yield
        finally:
            with self._lock:
                self._updated -= ids

    def forget(self) -> None:
        """Forget calls that Ctrl-C has ended in the middle of `begin` or `given_back`."""
        with self._lock:
            self._calls = 0
            self._updated.clear()
            self._put_back()

    def _put_back(self) -> None:
        for note in self._notes.values():
            note.put_back()
        self._notes.clear()


def take_fresh_gradient(array: mx.nd.NDArray) -> bool:
    """Take from the array the note that its gradient is fresh. Returns whether autograd knows the array.

    MXNet says so by an error, which must not count as an error of the step.
    """
    seen = failures.last_error()
    try:
        set_fresh_gradient(array, False)
    except mx.MXNetError:
        failures.set_last_error(seen)
        return False
    return True
