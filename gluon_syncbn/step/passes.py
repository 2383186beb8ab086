"""Counts the passes of a layer that Python has begun on each device, so that a step that breaks off is noticed.

An exception, or Ctrl-C, may come between ``losses[0].backward()`` and ``losses[1].backward()``, and the program may
catch it. Device 0 then waits in the backward pass, and so does every operator that needs its gradients, until the next
step waits, too. By then Python can tell: when the next step begins its forward pass, all devices have begun equally
many forward passes, but not equally many backward passes.
"""

import threading
import weakref
from typing import Callable, Dict, Iterable, List, Mapping, NamedTuple, Optional

import mxnet as mx
from mxnet.gluon import Parameter

from gluon_syncbn.base.mxnet_private import has_gradient
from gluon_syncbn.meeting.active_set import active_sets


class HalfCalled(NamedTuple):
    """Passes of one direction that were begun on some devices only."""

    direction: str
    called: List[mx.Context]
    missing: List[mx.Context]


class _Begun:
    """The numbers of passes that were begun on one device."""

    def __init__(self) -> None:
        self.forward = self.backward = 0
        self.uncounted = 0  # backward passes since the last recorded forward pass that ``backward`` does not count
        self.recorded = 0  # of the forward passes
        self.predicts = False  # whether a prediction has been recorded since
        self.backward_before = 0  # the last forward pass
        self.caller: Optional[threading.Thread] = None  # of the last forward pass
        self.thread: Optional[threading.Thread] = None  # that will call the next; None if that is not known

    def is_ahead_of(self, other: "_Begun", counts_all: bool) -> bool:
        """Whether more passes of one direction were begun than on another device.

        With ``counts_all`` those that are uncounted count, too, after equally many forward passes.
        """
        has_more = counts_all and self.forward == other.forward and self.uncounted > other.uncounted
        return has_more or self.forward > other.forward or self.backward > other.backward


class Subgroup:
    """The passes of a layer that were begun on active devices that wait for each other."""

    def __init__(self, devices: Iterable[mx.Context]):
        self._begun = {device: _Begun() for device in devices}
        self._is_reached_from_elsewhere = False  # perhaps: by a backward pass that began on another device

    def __contains__(self, device: mx.Context) -> bool:
        return device in self._begun

    def forget(self) -> None:
        """Begin anew: nothing is under way."""
        self._begun = {device: _Begun() for device in self._begun}
        self._is_reached_from_elsewhere = False

    def begin_forward(self, device: mx.Context) -> None:
        """Count a forward pass in training mode."""
        begun = self._begun[device]
        begun.backward_before = begun.backward
        begun.forward += 1
        if mx.autograd.is_recording():
            begun.recorded += 1
            begun.uncounted, begun.predicts = 0, False
            self._is_reached_from_elsewhere = False
        me = threading.current_thread()
        if begun.caller not in (None, me):  # threads change their devices, or others have taken over
            for item in self._begun.values():
                if item.thread is not me:
                    item.thread = None
        begun.caller = begun.thread = me

    def begin_recorded_prediction(self, device: mx.Context) -> None:
        """Note that backward passes which ``backward`` does not count are of a prediction, and wait for nobody."""
        self._begun[device].predicts = True

    def begin_counting(self) -> None:
        """Count the backward passes of forward passes from now on."""
        for begun in self._begun.values():
            begun.backward = begun.recorded

    def begin_backward(self, device: mx.Context) -> None:
        """Count a backward pass that reaches the layer on ``device``."""
        begun = self._begun[device]
        if begun.backward < begun.recorded:
            begun.backward += 1
        elif not begun.predicts:
            begun.uncounted += 1  # once more through a graph that was retained

    def begin_uncounted(self, devices: Iterable[mx.Context], may_leave_device: bool) -> None:
        """Note a backward pass that may reach the layer on these devices, or on any if it may go to others."""
        for device in devices:
            if device in self._begun:
                self._begun[device].uncounted += not self._begun[device].predicts
            elif may_leave_device:
                self._is_reached_from_elsewhere = True

    def end_uncounted(self) -> None:
        """Note that backward passes which no layer has counted have begun on all devices."""
        self._is_reached_from_elsewhere = False
        for begun in self._begun.values():
            begun.uncounted = 0

    def is_balanced(self) -> bool:
        """Whether all devices have begun equally many passes of each direction."""
        return not (self._is_reached_from_elsewhere or any(map(self._differ, ("forward", "backward", "uncounted"))))

    def is_broken(self) -> bool:
        """Whether a step broke off, or its backward passes are under way."""
        # In this order: between the two looks, the threads of other devices may run both passes of the new step. If
        # this thread sees their backward passes, it sees their forward passes, too, and its own device has yet to
        # begin one.
        return self._differ("backward") and not self._differ("forward")

    def _differ(self, direction: str) -> bool:
        return len({getattr(begun, direction) for begun in self._begun.values()}) > 1

    def is_mine(self) -> bool:
        """Whether this thread alone has called it."""
        return {begun.caller for begun in self._begun.values() if begun.caller} == {threading.current_thread()}

    def broke_off_before(self, device: mx.Context, callers_of_backward: Mapping[mx.Context, threading.Thread]) -> bool:
        """Whether a step broke off before the forward pass that ``device`` is about to begin.

        A step can only have broken off if all devices have begun equally many forward passes: the next one begins a new
        step. Where each device has a thread, one may begin its next step, or accumulate gradients, before another has
        called ``backward()``. But all run one program: a device has broken off if it lacks a backward pass that another
        device had before its same forward pass. And no thread will call the backward passes that are missing if the
        device that lacks one goes on, its thread has ended, or another thread calls the backward passes of all devices.
        """
        if self.is_mine():
            return self.is_broken()
        mine, everyone = self._begun[device], self._begun.values()
        if any(begun.forward == mine.forward + 1 and begun.backward_before > mine.backward for begun in everyone):
            return True
        if not self.is_broken():
            return False
        ahead = self.ahead("backward")
        for item, begun in self._begun.items():
            if item in ahead:
                if callers_of_backward.get(item, begun.caller) is not begun.caller:
                    return True
            elif item == device or (begun.caller and not begun.caller.is_alive()):
                return True
        return False

    def ahead(self, direction: str) -> List[mx.Context]:
        """The devices that have begun more passes of one direction than others."""
        counts = {device: getattr(begun, direction) for device, begun in self._begun.items()}
        least = min(counts.values())
        return [device for device, count in counts.items() if count > least]

    def is_ahead(self, device: mx.Context, counts_all: bool) -> bool:
        """Whether a pass on ``device``, with ``counts_all`` also one that is uncounted, may wait for a device on which
        this thread has yet to begin it."""
        others = [begun for begun in self._begun.values() if begun.thread in (None, threading.current_thread())]
        return device in self and any(self._begun[device].is_ahead_of(other, counts_all) for other in others)

    def half_called(self) -> Optional[HalfCalled]:
        """The passes that this thread alone has begun on some devices, and no thread on the others."""
        for direction in ("forward", "backward") if self.is_mine() else ():
            called = self.ahead(direction)
            if called:
                return HalfCalled(direction, called, [device for device in self._begun if device not in called])
        return None


class Passes:
    """The passes of one layer that Python has begun.

    ``groups_of`` divides its devices into subgroups. (If a subgroup lies in several processes, it is
    counted as if it began with the first device of this process: a step that runs everywhere is balanced either way.)
    """

    def __init__(
        self, layer: mx.gluon.nn.BatchNorm, groups_of: Callable[[List[mx.Context]], Dict[int, List[mx.Context]]]
    ):
        self._layer = weakref.ref(layer)
        self._groups_of = groups_of
        self._devices: List[mx.Context] = []  # when it was last called
        self._active_set = 0  # then
        self.subgroups: List[Subgroup] = []  # of the devices that were active then
        # In the ``record()`` that began with this layer: of each net, the first layer that learns.
        self.followers: weakref.WeakSet[Passes] = weakref.WeakSet()

    @property
    def layer(self) -> Optional[mx.gluon.nn.BatchNorm]:
        return self._layer()

    @property
    def name(self) -> str:
        """The layer's name."""
        layer = self.layer
        return "" if layer is None else layer.name

    def subgroup(self, device: mx.Context) -> Optional[Subgroup]:
        """The subgroup of a device; None if the layer has moved, or other devices are active, since it was called."""
        if self._active_set != active_sets.current or self._devices != self._devices_now():
            return None
        return next((item for item in self.subgroups if device in item), None)

    def begin_forward(self, device: mx.Context) -> Optional[Subgroup]:
        """Count a forward pass, and return the subgroup of ``device``; None if MXNet will raise an error."""
        found = self.subgroup(device)
        if found is None:
            self._devices, self._active_set = self._devices_now(), active_sets.current
            parts = self._groups_of(self._devices).values()
            active = ([item for item in part if active_sets.includes(item, self._active_set)] for part in parts)
            self.subgroups = [Subgroup(part) for part in active if part]
            found = self.subgroup(device)
        if found is not None:
            found.begin_forward(device)
        return found

    def _devices_now(self) -> List[mx.Context]:
        layer = self.layer
        return [] if layer is None else layer.running_mean.list_ctx()

    def parameter(self) -> Optional[Parameter]:
        """γ or β, if one of them learns."""
        layer = self.layer
        return None if layer is None else next(filter(has_gradient, (layer.gamma, layer.beta)), None)

    def arrays(self) -> Dict[mx.Context, mx.nd.NDArray]:
        """The arrays of the Parameter that learns, by device.

        A device is named as the Parameter names it: the arrays of a CPU are on cpu(0) in a net that was pickled.
        """
        parameter = self.parameter()
        return {} if parameter is None else dict(zip(parameter.list_ctx(), parameter.list_data()))
