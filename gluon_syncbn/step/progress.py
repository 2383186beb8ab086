"""How far Python has come with the steps of this process.

Passes are counted for one layer of a net, as 100 would cost time: the first that learns, and the layer that is the
first in its ``autograd.record()`` (`step.passes`).

Other processes must know where a step breaks off here that is under way (`Progress.is_under_way`): from the first
recorded call of a layer on, until a ``backward()`` has reached that layer (any ``backward()``, if its parameters are
frozen). For this the first layer of each graph counts that learns. Training passes outside ``record()`` (statistics
that are estimated anew) never are under way. A recorded pass without a backward pass is no longer under way when its
thread enters the next ``autograd.record()``; unless the program has shown that it calls ``backward()`` for one
``record()`` after it has entered the next. A step is also under way from ``backward()`` on until a Trainer that waits
for other processes (`gluon_syncbn.DistributedTrainer`) has added gradients up.
"""

import threading
import weakref
from collections import Counter
from typing import Callable, Dict, List, Optional, Set

import mxnet as mx
from mxnet.gluon import Block

from gluon_syncbn.base.walk import outermost_block
from gluon_syncbn.distributed.default import has_groups
from gluon_syncbn.mxnet_engine import cpu_resources
from gluon_syncbn.step.passes import GradientNotes, HalfCalled, Passes


class _Scope(threading.local):
    """The last ``autograd.record()`` of each thread, or the one that it is in."""

    def __init__(self) -> None:
        self.has_begun = False  # no layer has been called in it yet
        self.first: Callable[[], Optional[Passes]] = lambda: None  # of the layers that were called in it
        self.nets: Set[Block] = set()  # whose layers were called in it for the first time


class Progress:
    """Counts passes that Python has begun and ended. Threads of several devices call it together."""

    def __init__(self) -> None:
        # Executors of symbols that have synchronized layers, with the mode of the last call: training, prediction, or
        # none yet.
        self.executors: weakref.WeakKeyDictionary[mx.executor.Executor, Optional[bool]] = weakref.WeakKeyDictionary()
        self.open_executors: weakref.WeakSet[mx.executor.Executor] = weakref.WeakSet()  # with no backward pass yet
        self.has_trained = False  # since `step.unmet` has looked at layers
        # Whether autograd has ever recorded a copy from one CPU device to another. In a backward pass, one device may
        # then wait for another.
        self.has_copies_in_graphs = False
        self.when_net_is_new: Callable[[Block], None] = lambda net: None  # called when its first record() has ended
        self._nets: weakref.WeakSet[Block] = weakref.WeakSet()  # for which it was called
        self._called: weakref.WeakSet[Passes] = weakref.WeakSet()  # in a record()
        # By net, the first layer that learns.
        self._leaders: weakref.WeakKeyDictionary[Block, weakref.ref[Passes]] = weakref.WeakKeyDictionary()
        self.scope = _Scope()

        self._lock = threading.Lock()  # of all that follows, and of the layers' passes
        self._inside: Counter = Counter()  # by thread: how many record() it is in
        self._watched: weakref.WeakSet[Passes] = weakref.WeakSet()  # whose backward passes are counted
        self._uneven: weakref.WeakSet[Passes] = weakref.WeakSet()  # that some device has yet to begin
        self._heads: Counter = Counter()  # of backward passes, by device, since weights were updated
        self._callers_of_backward: Dict[mx.Context, threading.Thread] = {}  # the last
        # By the first layer of a record(), the watched layers that have followed it.
        self._followers: weakref.WeakKeyDictionary[Passes, weakref.WeakSet[Passes]] = weakref.WeakKeyDictionary()
        # By thread: the layers that it has called in its last record(), or in it now, and that no backward() has
        # reached since; and those that were open when the thread entered the next record().
        self._open: Dict[int, Set[Passes]] = {}
        self._left: weakref.WeakSet[Passes] = weakref.WeakSet()
        self._answers_late = False  # whether a backward() has reached one of them that was not called again
        self.notes = GradientNotes()  # takes its own lock first
        self.trainers_of_jobs: weakref.WeakSet[mx.gluon.Trainer] = weakref.WeakSet()  # that wait for other processes
        self.has_gradients_of_job = False  # that none of them has added up over processes

    # Where a step begins and ends

    def begin_record(self, trains: bool) -> None:
        """Note that this thread has entered ``autograd.record()``: the first layer that it calls from now on counts."""
        self.has_trained |= trains
        self.scope.has_begun = True
        me = threading.get_ident()
        with self._lock:
            if not self._inside[me] and not self._answers_late:
                self._left.update(self._open.pop(me, ()))
            self._inside[me] += 1

    def end_record(self) -> None:
        me = threading.get_ident()
        with self._lock:
            self._inside[me] -= 1
            if self._inside[me] <= 0:
                del self._inside[me]

    def show_new_net(self) -> None:
        """Call `when_net_is_new` for nets whose layers were new in this thread's last ``record()``, once per net."""
        nets, self.scope.nets = self.scope.nets, set()
        with self._lock:
            new = [net for net in nets if net not in self._nets]
            self._nets.update(new)
        for net in new:
            self.when_net_is_new(net)

    def is_under_way(self) -> bool:
        """Whether a step has begun here that other processes may be in the middle of, too."""
        return bool(self._open or self.open_executors) or self.is_uneven() or self.has_gradients_of_job

    def is_uneven(self) -> bool:
        """Whether ``backward()`` has been called for only some of the devices that have run a layer in this step."""
        return any(passes.is_unfinished() for passes in self.watched())

    def is_balanced(self) -> bool:
        """Whether all passes that have begun can end: no device waits for one that Python has yet to begin.

        For the backward passes that nobody counts, all devices must have had equally many heads.
        """
        with self._lock:
            if self._uneven or self.open_executors or len(set(self._heads.values())) > 1:
                return False
        return all(passes.is_balanced() for passes in self.watched())

    def half_called(self) -> Optional[HalfCalled]:
        """The passes that this thread alone has begun on some devices, and no thread on the others; None if none."""
        with self._lock:
            if not self._uneven and len(set(self._heads.values())) < 2:
                return None
            passes = [*self._uneven, *self._watched]
        return next(filter(None, (item.half_called() for item in passes)), None)

    def close_if_balanced(self) -> None:
        """Tell `cpu_resources` that all passes that have begun can end, if that is so."""
        if self.is_balanced():
            cpu_resources.close_step()

    def forget(self) -> None:
        """Begin anew: no step is under way."""
        with self._lock:
            for passes in {*self._watched, *self._uneven}:
                passes.forget()
            self._uneven.clear()
            self._heads.clear()
            self._open.clear()
            self._left.clear()
        self.open_executors.clear()
        self.has_gradients_of_job = False
        self.notes.forget()

    def watched(self) -> List[Passes]:
        with self._lock:
            return list(self._watched)

    # Forward passes

    def begin_forward(self, passes: Passes, device: mx.Context) -> None:
        """Note that Python starts a forward pass in training mode on ``device``."""
        self.note_forward(passes)
        is_first = self.scope.has_begun and mx.autograd.is_recording()
        leads = mx.autograd.is_recording() and passes not in self._called and self._meet(passes)
        if is_first:
            self.scope.has_begun, self.scope.first = False, weakref.ref(passes)
        first = self.scope.first()
        with self._lock:
            if is_first or leads:
                self._watched.add(passes)
            if first is not None and first is not passes and mx.autograd.is_recording() and passes in self._watched:
                self._followers.setdefault(first, weakref.WeakSet()).add(passes)
            self._heads[device] += 0
            passes.begin_forward(device)
            if passes.is_even():
                self._uneven.discard(passes)
            else:
                self._uneven.add(passes)

    def broken_off(self, passes: Passes, device: mx.Context) -> Optional[Passes]:
        """The layer at which it shows that a step broke off before this forward pass; None if none did.

        It is the layer that is called; or one that followed it in the last ``record()`` that began with it: after a
        teacher, or a layer that is frozen.
        """
        is_first = self.scope.has_begun
        if passes.broke_off_before(device, is_first, self._callers_of_backward):
            return passes
        with self._lock:
            followers = list(self._followers.get(passes, ())) if is_first else []
        return next((item for item in followers if item.broke_off_here()), None)

    def is_ahead(self, device: mx.Context) -> bool:
        """Whether work on ``device`` may wait for another device, whose pass Python has yet to begin."""
        with self._lock:
            passes = {*self._uneven, *self._watched}
            if self._heads[device] > min(self._heads.values(), default=0):
                return True
        return any(item.is_ahead(device) for item in passes)

    def _meet(self, passes: Passes) -> bool:
        """Note a layer that is called for the first time. Returns whether it is the first of its net that learns."""
        self._called.add(passes)
        net = outermost_block()
        if net is None:
            return False
        self.scope.nets.add(net)
        leader = self._leaders.get(net, lambda: None)()
        leads = leader is None and bool(passes.arrays())
        if leads:
            self._leaders[net] = weakref.ref(passes)
        return leads

    def note_forward(self, passes: Passes) -> None:
        """Note that this thread calls a synchronized layer, or a graph of which this one is to count."""
        if is_followed():
            with self._lock:
                self._open.setdefault(threading.get_ident(), set()).add(passes)
                self._left.discard(passes)

    # Backward passes

    def begin_backward(self, devices: List[mx.Context], writes_gradients: bool) -> None:
        """Note that a backward pass begins, of an array on each of these devices; it may write those of Parameters."""
        with self._lock:
            self._heads.update(devices)
            self._callers_of_backward.update(dict.fromkeys(devices, threading.current_thread()))
        if writes_gradients:
            self.notes.begin(self._awaited)

    def _awaited(self) -> Set[Passes]:
        """The layers that a ``backward()`` may reach, and whose backward passes are counted."""
        with self._lock:
            return {*self._watched, *self._left, *(passes for some in self._open.values() for passes in some)}

    def end_backward(self, devices: List[mx.Context], is_done: bool) -> None:
        """Note that a ``backward()`` of arrays on these devices has reached layers, or that it has raised an error."""
        self.has_gradients_of_job = bool(self.trainers_of_jobs)
        reached, reached_devices = self.notes.end()
        if not is_done:
            return
        with self._lock:
            if self.has_copies_in_graphs:  # one loss may be the sum of the losses of all devices
                self._heads.update(reached_devices - set(devices))
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

    # Updates

    def begin_update(self) -> None:
        """Note that weights are about to be updated: the backward passes of all devices have begun.

        The step ends for `cpu_resources`, if all passes that have begun can end.
        """
        with self._lock:
            self._heads = Counter(dict.fromkeys(self._heads, 0))
        self.close_if_balanced()


def is_followed() -> bool:
    """Whether other processes may have to know of a call that this thread makes now."""
    return has_groups() and mx.autograd.is_recording() and mx.autograd.is_training()
