"""Finds the layers that a ``backward()`` reaches.

The graph of the arrays alone knows them. But MXNet notes at every Parameter whether its gradient is fresh, for the
Trainer, and does so before ``backward()`` returns, however far the engine has come. So the note is taken away before
the call, looked at after it, and put back.
"""

import contextlib
import threading
from collections import Counter
from typing import Dict, Iterable, Iterator, List, NamedTuple, Tuple

import mxnet as mx
from mxnet.gluon import Parameter

from gluon_syncbn.base.mxnet_private import has_fresh_gradient, set_fresh_gradient
from gluon_syncbn.mxnet_engine import failures
from gluon_syncbn.step.passes import Passes


class _Note(NamedTuple):
    """A note that was taken away, of an array that no ``backward()`` has reached since."""

    passes: Passes
    device: mx.Context
    array: mx.nd.NDArray
    was_fresh: bool


class GradientNotes:
    """The notes that are taken away while a ``backward()`` is under way.

    Several threads may be in ``backward()`` together, and one of them may wait there for a pass that another has yet to
    start: nothing is held during the call. The first thread to return finds the gradients that are fresh by then, and
    the last one puts back the notes of gradients that no call has reached.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: Dict[Tuple[Passes, int], _Note] = {}  # by layer and id of the array
        self._reached: List[Tuple[Passes, mx.Context]] = []  # since a call has returned
        self._calls = 0  # of backward() that are under way
        self._updated: Counter = Counter()  # ids of Parameters, in updates that are under way

    def begin(self, layers: Iterable[Passes]) -> None:
        """Note that a ``backward()`` is called, which may reach these layers."""
        with self._lock:
            self._calls += 1
            self._look()  # calls that are still under way may have reached some
            for passes in layers:
                if id(passes.parameter()) in self._updated:
                    continue
                for device, array in passes.arrays().items():
                    if (passes, id(array)) not in self._taken:  # else a call that is under way may reach it now
                        was_fresh = has_fresh_gradient(array)
                        if not take_fresh_gradient(array):  # a copy
                            break
                        self._taken[passes, id(array)] = _Note(passes, device, array, was_fresh)

    def end(self) -> List[Tuple[Passes, mx.Context]]:
        """Note that a ``backward()`` returns, or raises. Returns the passes that have been reached since one did."""
        with self._lock:
            self._calls = max(0, self._calls - 1)
            self._look()
            if not self._calls:
                self._put_back()
            reached, self._reached = self._reached, []
            return reached

    def _look(self) -> None:
        for key, note in list(self._taken.items()):
            if has_fresh_gradient(note.array):
                self._reached.append((note.passes, note.device))
                del self._taken[key]

    def _put_back(self) -> None:
        for note in self._taken.values():
            if note.was_fresh:
                set_fresh_gradient(note.array, True)
        self._taken.clear()

    @contextlib.contextmanager
    def given_back(self, parameters: Iterable[Parameter]) -> Iterator[None]:
        """Let a Trainer see the notes of these Parameters within the block: another thread may be in ``backward()``."""
        ids = Counter(set(map(id, parameters)))
        with self._lock:
            self._updated += ids
            self._look()
            for key, note in list(self._taken.items()):
                if id(note.passes.parameter()) in ids:
                    if note.was_fresh:  # else another layer with this Parameter may have the note
                        set_fresh_gradient(note.array, True)
                    del self._taken[key]
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
            self._reached.clear()
            self._put_back()


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
