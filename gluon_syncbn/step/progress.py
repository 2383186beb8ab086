"""How far Python has come with the steps of this process.

Forward passes are counted where a layer, or a graph that has some, is called. Backward passes are counted for one layer
of a net, since to look at all layers would cost time: in each ``autograd.record()``, the first that learns. A
``backward()`` that reaches none of these is uncounted, and may reach any layer that was called on its device.
"""

import contextlib
import threading
import weakref
from typing import Callable, Dict, Iterator, List, Optional, Set

import mxnet as mx
from mxnet.gluon import Block

from gluon_syncbn.base.errors import STEP_IS_UNDER_WAY
from gluon_syncbn.base.walk import outermost_block
from gluon_syncbn.mxnet_engine import cpu_resources
from gluon_syncbn.step.passes import HalfCalled, Passes, Subgroup
from gluon_syncbn.step.reached import GradientNotes
from gluon_syncbn.step.under_way import UnderWay


def is_made_by_python(thread: threading.Thread) -> bool:
    """Whether Python has made the thread; if not, it is one of MXNet's that runs an operator, say."""
    return not thread.name.startswith("Dummy-")


class _LastRecord(threading.local):
    """The last ``autograd.record()`` of a thread, or the one that it is in."""

    def __init__(self) -> None:
        self.new_nets: List[Block] = []
        self.begin()

    def begin(self) -> None:
        self.first: Callable[[], Optional[Passes]] = lambda: None  # of the layers that were called in it
        self.nets: weakref.WeakSet[Block] = weakref.WeakSet()  # of which a layer that learns was called in it


class Progress:
    """Counts passes that Python has begun. Threads of several devices call it together."""

    def __init__(self) -> None:
        self.has_trained = False  # since `step.unmet` has looked at layers
        # Whether autograd has ever recorded a copy from one CPU device to another. In a backward pass, one device may
        # then wait for another.
        self.has_copies_in_graphs = False
        self.when_net_is_new: Callable[[Block], None] = lambda net: None  # called when its first record() ends
        self._nets: weakref.WeakSet[Block] = weakref.WeakSet()  # for which it was called
        # Those of symbols with synchronized layers, which have had no backward pass yet.
        self.open_executors: weakref.WeakSet[mx.executor.Executor] = weakref.WeakSet()
        self.under_way = UnderWay()  # for other processes
        self.notes = GradientNotes()
        self._record = _LastRecord()
        self._turn = threading.RLock()  # of a thread that begins a step, and may abandon the one before

        self._lock = threading.Lock()  # of all that follows, and of subgroups
        self._step = 0  # its number; all that are not abandoned have the number of the next one that is
        self._is_abandoned = False
        self._leaving: Set[threading.Thread] = set()  # the threads that exceptions have taken out of the last step
        self._watched: weakref.WeakSet[Passes] = weakref.WeakSet()  # layers whose backward passes are counted
        self._unbalanced: weakref.WeakSet[Subgroup] = weakref.WeakSet()  # where some device has yet to begin a pass
        self._called: weakref.WeakSet[Subgroup] = weakref.WeakSet()  # in record()
        self._calls_of_backward = 0  # that have not returned
        self._reached_early: Set[mx.Context] = set()  # by those calls, while others were noted
        self._is_overdue = False  # whether a step has begun while the step before seemed to be under way
        self._callers_of_backward: Dict[mx.Context, threading.Thread] = {}  # the last

    # What others ask

    def is_under_way(self) -> bool:
        """Whether a step has begun here that other processes may be in the middle of, too."""
        return bool(self.under_way.is_open() or self.open_executors) or self.is_uneven()

    def is_uneven(self) -> bool:
        """Whether ``backward()`` has been called for only some of the devices that have run a layer in this step."""
        return any(subgroup.is_broken() for subgroup in self._half_called())

    def is_balanced(self) -> bool:
        """Whether all passes that have begun can end: no device waits for one that Python has yet to begin."""
        with self._lock:
            return not (self._unbalanced or self.open_executors or self._calls_of_backward)

    def half_called(self) -> Optional[HalfCalled]:
        """The passes that this thread alone has begun on some devices, and no thread on the others; None if none."""
        return next(filter(None, (subgroup.half_called() for subgroup in self._half_called())), None)

    def refuse_within_step(self, where: str) -> None:
        """ValueError, starting with ``where``, if this thread is in the middle of a step."""
        if mx.autograd.is_recording() or self.half_called() is not None:
            raise ValueError(f"{where}: {STEP_IS_UNDER_WAY}")

    def is_ahead(self, device: mx.Context, passes: Optional[Passes]) -> bool:
        """Whether work on ``device``, of the net of this layer, may wait for a device on which this thread has yet to
        begin a pass."""
        own = None if passes is None else passes.subgroup(device)
        with self._lock:
            counted, subgroups = self._counted(), list(self._unbalanced)
        return any(item.is_ahead(device, counts_all=item is own or item in counted) for item in subgroups)

    def begins_record(self) -> bool:
        """Whether this thread has called no layer since it entered ``record()``."""
        return self._record.first() is None

    def broken_off(self, passes: Passes, device: mx.Context) -> Optional[Passes]:
        """The layer at which it shows that a step broke off before this forward pass; None if none did.

        It is the layer that is called; or one that followed it in a ``record()`` that began with it: after a teacher,
        or a layer that is frozen.
        """
        if self.begins_record():
            with self._lock:
                suspects = [passes, *passes.followers]
            for item in suspects:
                if any(subgroup.is_mine() and subgroup.is_broken() for subgroup in item.subgroups):
                    return item
        subgroup = passes.subgroup(device)
        return passes if subgroup is not None and subgroup.broke_off_before(device, self._callers_of_backward) else None

    def _half_called(self) -> List[Subgroup]:
        with self._lock:
            return list(self._unbalanced)

    def _counted(self) -> Set[Subgroup]:
        """The subgroups that know each ``backward()`` which has reached them."""
        return {item for passes in self._watched if passes.parameter() is not None for item in passes.subgroups}

    # What happens

    @contextlib.contextmanager
    def taking_turns(self) -> Iterator[None]:
        """Let one thread at a time look whether the step before must be abandoned, and abandon it.

        It then waits for all operators. So a thread that runs one (it recomputes activations, say) does not wait.
        """
        with self._turn if is_made_by_python(threading.current_thread()) else contextlib.nullcontext():
            yield

    def begin_step(self) -> None:
        """Note that this thread begins a step; or comes late to the abandoned one, if an exception took others out."""
        with self._lock:
            if not self._leaving or threading.current_thread() in self._leaving:
                self._step += self._is_abandoned
                self._is_abandoned = False
                self._leaving.clear()

    def end_step(self, is_over: bool) -> int:
        """Note that the step is abandoned: by an exception of this thread alone, or with ``is_over`` for all threads.

        Returns its number, which is the same if several threads abandon it.
        """
        with self._lock:
            self._is_abandoned = True
            self._leaving = set() if is_over else {*self._leaving, threading.current_thread()}
            return self._step

    def begin_record(self, trains: bool) -> None:
        """Note that this thread is about to enter ``autograd.record()``."""
        self.has_trained |= trains
        self._is_overdue = not self.is_balanced()
        self._record.begin()
        self.under_way.begin_record()

    def end_record(self) -> None:
        """Call `when_net_is_new` for the nets that this thread has trained for the first time."""
        if self._is_overdue and not mx.autograd.is_recording():
            self.close_if_balanced()  # where no Trainer updates, it shows only now that the step before has ended
        nets, self._record.new_nets = self._record.new_nets, []
        for net in nets:
            self.when_net_is_new(net)

    def begin_forward(self, passes: Passes, device: mx.Context) -> None:
        """Note that Python begins a forward pass in training mode on ``device``."""
        self.under_way.note_call(passes)
        if mx.autograd.is_recording():
            self._watch(passes)
        with self._lock:
            subgroup = passes.begin_forward(device)
            if subgroup is not None:
                self._note_balance(subgroup)
                if mx.autograd.is_recording():
                    self._called.add(subgroup)

    def _watch(self, passes: Passes) -> None:
        """Count the backward passes of a layer from now on if it is the first of its net that learns."""
        record, net = self._record, outermost_block()
        net = passes.layer if net is None else net
        first = record.first() or passes
        record.first = weakref.ref(first)
        if net is None or net in record.nets:
            return
        with self._lock:
            is_new = net not in self._nets
            self._nets.add(net)
            if passes.parameter() is not None:
                record.nets.add(net)
                if passes not in self._watched:
                    for subgroup in passes.subgroups:
                        subgroup.begin_counting()
                self._watched.add(passes)
                first.followers.add(passes)
        if is_new:
            record.new_nets.append(net)

    def begin_recorded_prediction(self, passes: Passes, device: mx.Context) -> None:
        """Note that a call in prediction mode is recorded: its backward pass waits for nobody."""
        with self._lock:
            subgroup = passes.subgroup(device)
            if subgroup is not None:
                subgroup.begin_recorded_prediction(device)

    def _note_balance(self, subgroup: Subgroup) -> None:
        (self._unbalanced.discard if subgroup.is_balanced() else self._unbalanced.add)(subgroup)

    def begin_backward(self, devices: List[mx.Context], writes_gradients: bool) -> None:
        """Note that a backward pass begins, of an array on each of these devices.

        With ``writes_gradients`` it writes gradients of Parameters, and may so reach layers.
        """
        with self._lock:
            self._calls_of_backward += 1
            self._callers_of_backward.update(dict.fromkeys(devices, threading.current_thread()))
            layers = {*self._watched, *self.under_way.layers()}
        if writes_gradients:
            self.notes.begin(layers)

    def end_backward(self, devices: List[mx.Context], is_done: bool, writes_gradients: bool) -> None:
        """Note that a backward pass of arrays on these devices has reached layers, or that it has raised an error.

        If it has reached no layer that is counted, it may have reached any that was called on its device.
        """
        reached = self.notes.end() if writes_gradients else []
        with self._lock:
            self._calls_of_backward = max(self._calls_of_backward - 1, 0)
            uncounted = {*devices, *(device for _, device in reached)}
            for passes, device in reached:
                subgroup = passes.subgroup(device)
                if subgroup is not None and passes in self._watched:
                    subgroup.begin_backward(device)
                    self._note_balance(subgroup)
                    uncounted.discard(device)
                    if device not in devices and self._calls_of_backward:
                        self._reached_early.add(device)
            uncounted, early = uncounted - self._reached_early, uncounted & self._reached_early
            self._reached_early = self._reached_early - early if self._calls_of_backward else set()
            if uncounted:
                for subgroup in set(self._called) - (self._counted() if writes_gradients else set()):
                    subgroup.begin_uncounted(uncounted, self.has_copies_in_graphs)
                    self._note_balance(subgroup)
        if writes_gradients:
            self.under_way.end_backward(dict(reached), is_done)

    def begin_update(self) -> None:
        """Note that weights are about to be updated: the backward passes of all devices have begun.

        The step ends for `cpu_resources`, if all passes that have begun can end.
        """
        with self._lock:
            for subgroup in self._called:
                subgroup.end_uncounted()
                self._note_balance(subgroup)
        self.close_if_balanced()

    def close_if_balanced(self) -> None:
        """Tell `cpu_resources` that all passes that have begun can end, if that is so."""
        if self.is_balanced():
            cpu_resources.close_step()

    def forget(self) -> None:
        """Begin anew: no step is under way."""
        with self._lock:
            for passes in self._watched:
                passes.subgroups = []
            for subgroup in self._unbalanced:
                subgroup.forget()
            self._unbalanced.clear()
            self._called.clear()
            self._calls_of_backward = 0
            self._reached_early.clear()
        self.open_executors.clear()
        self.under_way.forget()
        self.notes.forget()
