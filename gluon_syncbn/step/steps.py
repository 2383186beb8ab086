"""How often Python has started the passes of a layer on each device, so that a step which broke off is noticed.

When an exception, or Ctrl-C, comes between ``losses[0].backward()`` and ``losses[1].backward()`` and is caught, nothing
tells it: device 0 waits in the backward pass, and with it whatever needs its gradients, so that the next step waits,
too. By then Python knows: at the forward pass that begins the next step all devices have been given equally many
forward passes, but not equally many backward passes.

Forward passes are counted where a layer, or a graph that has some, is called. Backward passes have no such place: which
devices ``backward()`` of some arrays reaches, their graph alone knows. But MXNet notes at every Parameter whether its
gradient is fresh, for the Trainer, and does so before ``backward()`` returns, whatever the engine has done by then. So
that note is taken away before the call, looked at behind it, and put back. Several threads may be in ``backward()``
together, and one of them may wait there for what another has yet to start: nothing is held during the call. Whoever
returns first counts what is fresh by then, and the last one puts back what nobody has reached.

One layer of a net is enough, and 100 would cost time: that which is the first in its ``autograd.record()``.

Other processes must know where a step breaks off here that is under way (`is_under_way`): from the first recorded call
of a layer on, until a ``backward()`` has reached that layer (any, if its parameters are frozen). For this the first
layer of each graph counts that learns. Training passes that nobody records (statistics that are estimated anew) never
are under way. One that is recorded and has no backward pass is no longer when its thread enters the next
``autograd.record()``; unless the program has shown that it answers calls of one ``record()`` after the next.
"""

import functools
import sys
import threading
import weakref
from collections import Counter
from types import FrameType
from typing import Dict, Iterator, List, Optional, Set, Tuple

import mxnet as mx

from gluon_syncbn.base.mxnet_private import has_fresh_gradient, has_gradient, is_record, set_fresh_gradient
from gluon_syncbn.engine import failures
from gluon_syncbn.job.default import has_groups

_watched: "weakref.WeakSet[Passes]" = weakref.WeakSet()
_watched_lock = threading.Lock()
_notes_lock = threading.Lock()
_notes: Dict[Tuple["Passes", int], "_Note"] = {}  # by layer and array, while a backward() is under way
_calls = 0  # of backward() that are under way
_scope = threading.local()  # .has_begun: no layer has been called in it yet; .net: see `take_net_of_scope`
# By thread: the layers that it has called in its last record(), or in it now, and that no backward() has reached since.
_open: Dict[int, Set["Passes"]] = {}
_left: "weakref.WeakSet[Passes]" = weakref.WeakSet()  # those that were open when the thread entered the next record()
_answers_late = False  # whether a backward() has reached one of them that was not called again
_inside: Counter = Counter()  # by thread: how many record() it is in
_executors: "weakref.WeakSet[mx.executor.Executor]" = weakref.WeakSet()  # that have synchronized layers
_open_executors: "weakref.WeakSet[mx.executor.Executor]" = weakref.WeakSet()  # with a forward and no backward pass


class Passes:
    """Of one layer."""

    def __init__(self, layer: mx.gluon.nn.BatchNorm):
        self._layer = weakref.ref(layer)
        self.forget()

    def forget(self) -> None:
        """Begin anew: nothing is under way."""
        self._devices: List[mx.Context] = []
        self._forwards: Counter = Counter()
        self._backwards: Counter = Counter()

    def is_unfinished(self) -> bool:
        """Whether the forward pass that begins now begins a new step, and the one before broke off on some device."""
        return _is_even(self._forwards, self._devices) and not _is_even(self._backwards, self._devices)

    def started(self) -> List[mx.Context]:
        """The devices that have had most backward passes."""
        most = max(self._backwards.values(), default=0)
        return [device for device in self._devices if self._backwards[device] == most]

    def begin_forward(self, device: mx.Context) -> None:
        """Python starts a recorded forward pass in training mode on ``device``."""
        is_first = getattr(_scope, "has_begun", False)
        if is_first:
            _scope.has_begun, _scope.net = False, outermost_block()
        if not self._is_watched(is_first):
            return
        devices = [array.context for array in self.arrays()]
        if not devices:
            return
        if devices != self._devices:  # it has moved
            self.forget()
            self._devices = devices
        self._forwards[device] += 1

    def end_backward(self, device: mx.Context) -> None:
        """Python has started a backward pass that reaches ``device``."""
        self._backwards[device] += 1

    def arrays(self) -> List[mx.nd.NDArray]:
        """A Parameter that learns, on each device; none if it is frozen."""
        layer = self._layer()
        for parameter in (layer.gamma, layer.beta) if layer is not None else ():
            if has_gradient(parameter):
                return parameter.list_data()
        return []

    def take_notes(self) -> Iterator["_Note"]:
        """Take from each of these arrays the note whether its gradient is fresh."""
        was_seen = failures.was_seen()
        for array in self.arrays():
            was_fresh = has_fresh_gradient(array)
            try:
                set_fresh_gradient(array, False)
            except mx.MXNetError:  # a copy, of which autograd does not know
                if not was_seen:
                    failures.forget_seen()
                break
            yield _Note(self, array, was_fresh)

    def _is_watched(self, is_first: bool) -> bool:
        with _watched_lock:
            if is_first:
                _watched.add(self)
            return self in _watched


class _Note:
    """Whether the gradient of an array was fresh before ``backward()``; and whether one that has reached it counts."""

    def __init__(self, passes: Passes, array: mx.nd.NDArray, was_fresh: bool):
        self.passes, self.array, self.was_fresh = passes, array, was_fresh
        self.is_counted = False

    def count(self) -> None:
        if not self.is_counted and has_fresh_gradient(self.array):
            self.is_counted = True
            self.passes.end_backward(self.array.context)

    def put_back(self) -> None:
        if self.was_fresh and not self.is_counted:
            set_fresh_gradient(self.array, True)


def _is_even(counts: Counter, devices: List[mx.Context]) -> bool:
    return len({counts[device] for device in devices}) == 1


def noticing_record(enter):
    """The beginning of ``autograd.record()``: the first layer that is called on this thread from now on counts."""

    @functools.wraps(enter)
    def __enter__(self):
        enter(self)
        if is_record(self):
            _scope.has_begun, _scope.net = True, None
            me = threading.get_ident()
            with _watched_lock:
                if not _inside[me] and not _answers_late:
                    _left.update(_open.pop(me, ()))
                _inside[me] += 1

    return __enter__


def noticing_end_of_record(leave):
    """The end of ``autograd.record()``."""

    @functools.wraps(leave)
    def __exit__(self, kind, value, trace):
        if is_record(self):
            me = threading.get_ident()
            with _watched_lock:
                _inside[me] -= 1
                if _inside[me] <= 0:
                    del _inside[me]
        leave(self, kind, value, trace)

    return __exit__


def is_followed() -> bool:
    """Whether other processes may have to know of a call that this thread makes now."""
    return has_groups() and mx.autograd.is_recording() and mx.autograd.is_training()


def note_forward(passes: Passes) -> None:
    """This thread calls a synchronized layer, or a graph of which this one is to count."""
    if is_followed():
        with _watched_lock:
            _open.setdefault(threading.get_ident(), set()).add(passes)
            _left.discard(passes)


def _note_backward(reached: Set[Passes]) -> None:
    """A ``backward()`` has reached these layers."""
    global _answers_late
    with _watched_lock:
        _answers_late = _answers_late or any(passes in _left for passes in reached)
        for passes in reached:
            _left.discard(passes)
        for thread in list(_open):
            _open[thread] = {passes for passes in _open[thread] - reached if passes.arrays()}
            if not _open[thread]:
                del _open[thread]


def noticing_grad(grad):
    """``autograd.grad``: what it returns is the end of the step, unless more is to be done with its graph."""

    @functools.wraps(grad)
    def noticed_grad(heads, variables, head_grads=None, retain_graph=None, create_graph=False, train_mode=True):
        done = grad(heads, variables, head_grads, retain_graph, create_graph, train_mode)
        if not create_graph and not retain_graph:
            with _watched_lock:
                _open.pop(threading.get_ident(), None)
        return done

    return noticed_grad


def add_executor(executor: "mx.executor.Executor") -> None:
    """It has synchronized layers."""
    _executors.add(executor)


def noticing_forward_of_symbols(forward):
    """``Executor.forward`` in training."""

    @functools.wraps(forward)
    def noticed_forward(self, is_train=False, **kwargs):
        if is_train and self in _executors and any(array is not None for array in self.grad_arrays):
            _open_executors.add(self)
        return forward(self, is_train, **kwargs)

    return noticed_forward


def noticing_backward_of_symbols(backward):
    """``Executor.backward``."""

    @functools.wraps(backward)
    def noticed_backward(self, *args, **kwargs):
        done = backward(self, *args, **kwargs)
        _open_executors.discard(self)
        return done

    return noticed_backward


def is_under_way() -> bool:
    """Whether a step has begun here that other processes may be in the middle of, too."""
    return bool(_open or _open_executors) or any_is_uneven()


def take_net_of_scope() -> Optional[mx.gluon.Block]:
    """The net that has the first layer that was called in ``autograd.record()`` on this thread, if one was; once."""
    net, _scope.net = getattr(_scope, "net", None), None
    return net


def outermost_block() -> Optional[mx.gluon.Block]:
    """Of the blocks that are being called now."""
    frame: Optional[FrameType] = sys._getframe()
    found = None
    while frame is not None:
        if frame.f_code is mx.gluon.Block.__call__.__code__:
            found = frame.f_locals["self"]
        frame = frame.f_back
    return found


def _watched_now() -> List[Passes]:
    with _watched_lock:
        return list(_watched)


def any_is_uneven() -> bool:
    """Whether ``backward()`` has been called for some devices only, of those that have run a layer in this step."""
    return any(passes.is_unfinished() for passes in _watched_now())


def forget_passes() -> None:
    """All steps are done with."""
    for passes in _watched_now():
        passes.forget()
    with _watched_lock:
        _open.clear()
        _left.clear()
    _open_executors.clear()


def counting_backward(backward):
    """``backward()`` of an array, and of several with ``autograd.backward``: counts the passes that it starts."""

    @functools.wraps(backward)
    def counted_backward(*args, **kwargs):
        if failures.is_in_use():
            heads = args[0] if args else kwargs.get("heads")
            for head in [heads] if isinstance(heads, mx.nd.NDArray) else heads or []:
                failures.watch([head], f"an operator before backward() on {head.context} had failed.", are_heads=True)
        _begin_backward()
        try:
            done = backward(*args, **kwargs)
        finally:
            reached = _end_backward()
        _note_backward(reached)
        return done

    return counted_backward


def _begin_backward() -> None:
    global _calls
    with _notes_lock:
        _calls += 1
        for note in _notes.values():  # what calls that are still under way have reached
            note.count()
        for passes in _awaited():
            for note in passes.take_notes():
                key = passes, id(note.array)
                note.was_fresh |= key in _notes and _notes[key].was_fresh
                _notes[key] = note


def _awaited() -> Set[Passes]:
    """The layers that a ``backward()`` may reach and somebody wants to know of."""
    with _watched_lock:
        return {*_watched, *_left, *(passes for some in _open.values() for passes in some)}


def _end_backward() -> Set[Passes]:
    """The layers that have been reached by now."""
    global _calls
    with _notes_lock:
        _calls -= 1
        for note in _notes.values():
            note.count()
        reached = {note.passes for note in _notes.values() if note.is_counted}
        if not _calls:
            for note in _notes.values():
                note.put_back()
            _notes.clear()
        return reached
