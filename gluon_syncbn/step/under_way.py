"""Whether a step is under way that other processes may be in the middle of, too: they must know where it breaks off.

It is from the first recorded call of a layer on, until a ``backward()`` has reached that layer (any ``backward()``, if
its parameters are frozen). Of each graph, the first layer that learns counts. Training passes outside ``record()``
(statistics that are estimated anew) never are under way. A recorded pass without a backward pass is no longer under way
when its thread enters the next ``autograd.record()``. A program may also call ``backward()`` for one ``record()`` after
it has entered the next: once it has done so, the pass stays under way. A step is also under way from ``backward()`` on
until a Trainer that waits for other processes (`gluon_syncbn.DistributedTrainer`) has added gradients up.
"""

import threading
import weakref
from typing import Container, Dict, List, Set

import mxnet as mx

from gluon_syncbn.distributed.default import has_groups
from gluon_syncbn.step.passes import Passes


class UnderWay:
    """The recorded passes that wait for an answer: a ``backward()``, and a Trainer after it."""

    def __init__(self) -> None:
        self.trainers: weakref.WeakSet[mx.gluon.Trainer] = weakref.WeakSet()  # that wait for other processes
        self.has_new_gradients = False  # that none of them has added up
        self._lock = threading.Lock()
        # The layers that no backward() has reached, with the threads that have called them in their last record(), or
        # in it now: none if all of them have entered the next one.
        self._called: Dict[Passes, Set[int]] = {}
        self._answers_late = False  # whether a backward() has reached a layer without such threads

    def is_open(self) -> bool:
        with self._lock:
            return self.has_new_gradients or any(self._called.values())

    def layers(self) -> List[Passes]:
        """The layers that no ``backward()`` has reached."""
        with self._lock:
            return list(self._called)

    def note_call(self, passes: Passes) -> None:
        """Note that this thread calls a layer, or a graph that it stands for."""
        if has_groups() and mx.autograd.is_recording() and mx.autograd.is_training():
            with self._lock:
                self._called.setdefault(passes, set()).add(threading.get_ident())

    def begin_record(self) -> None:
        """Note that this thread is about to enter ``autograd.record()``."""
        if not (self._answers_late or mx.autograd.is_recording()):
            with self._lock:
                for threads in self._called.values():
                    threads.discard(threading.get_ident())

    def end_backward(self, reached: Container[Passes], is_done: bool) -> None:
        """Note that a ``backward()`` has reached these layers, or that it has raised an error."""
        with self._lock:
            self.has_new_gradients = bool(self.trainers)
            for passes, threads in list(self._called.items()) if is_done else ():
                self._answers_late |= passes in reached and not threads
                if passes in reached or not passes.arrays():
                    del self._called[passes]

    def end_grad(self) -> None:
        """Note that ``autograd.grad`` was called on this thread, and its graph is done with."""
        me = threading.get_ident()
        with self._lock:
            for passes, threads in list(self._called.items()):
                if threads == {me}:
                    del self._called[passes]
                threads.discard(me)

    def forget(self) -> None:
        """Begin anew: nothing is under way."""
        with self._lock:
            self._called.clear()
            self.has_new_gradients = False
