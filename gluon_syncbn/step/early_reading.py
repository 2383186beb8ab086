"""Ends a step in which a result is read before all devices have been called, from which no program can go on::

    for x in parts:
        losses.append(loss(net(x)).mean().asscalar())

The first read waits for the second device, and the thread that would call the net there is the one that reads. So
while a thread reads after it has called layers on some of their devices only, another one looks, ten times a second,
whether it can still go on, and if not, ends the waits with an error that says so. It cannot if

- nobody but this thread has called those layers, so far;
- no other thread could: none is there that may run code of the user's;
- the process does nothing for half a second: a read may also take long because much is computed, by another net, say.

Where one of these is not known, the wait lasts until the timeout, as ever.
"""

import contextlib
import threading
import time
from typing import Iterator, List

import mxnet as mx

from gluon_syncbn.meeting import waiting
from gluon_syncbn.step.steps import HalfCalled, steps

_LOOK_SECONDS = 0.1
_IDLE_LOOKS = 5  # in a row
_BUSY = 0.3  # of a processor
# Modules whose threads call no net. Those of a pool of threads may, and so may any that are not known.
_HARMLESS = [
    *("multiprocessing.pool", "multiprocessing.queues", "tqdm", "gluon_syncbn", "horovod"),
    *("IPython", "ipykernel", "zmq", "tornado", "debugpy", "_pydevd_bundle", "pydevd"),
    *("tensorboard", "tensorboardX", "mxboard"),
]


@contextlib.contextmanager
def noticing_what_cannot_end() -> Iterator[None]:
    """While this thread reads an array, or waits for all of them."""
    half = steps.half_called()
    if half is None or _others_may_call():
        yield
        return
    is_over = threading.Event()
    looking = threading.Thread(target=_look, args=(half, is_over), name="gluon_syncbn reading", daemon=True)
    looking.start()
    try:
        yield
    finally:
        is_over.set()
        looking.join()


def _look(half: HalfCalled, is_over: threading.Event) -> None:
    idle, before = 0, time.process_time()
    while idle < _IDLE_LOOKS:
        if is_over.wait(_LOOK_SECONDS):
            return
        now = time.process_time()
        idle, before = idle + 1 if now - before < _BUSY * _LOOK_SECONDS else 0, now
    with waiting.cut_short(_text(half), grace=0.0):
        is_over.wait()


def _text(half: HalfCalled) -> str:
    called, missing = _listed(half.called), _listed(half.missing)
    if half.direction == "forward":
        what, how = f"the net is called on {missing}", "outputs = [net(x) for x in parts]"
    else:
        what, how = f"backward() reaches {missing}", "autograd.backward(losses)"
    return f"a result of {called} is read before {what}. First call all devices, {how}, and then read"


def _listed(devices: List[mx.Context]) -> str:
    return ", ".join(map(str, devices))


def _others_may_call() -> bool:
    """Whether there are threads that may run code of the user's."""
    return any(_may_call(thread) for thread in threading.enumerate() if thread is not threading.current_thread())


def _may_call(thread: threading.Thread) -> bool:
    kind = type(thread)
    if kind is threading._DummyThread:  # not of Python's making: MXNet's, which runs operators
        return False
    target = getattr(thread, "_target", None)
    module = getattr(target, "__module__", None) if kind is threading.Thread else kind.__module__
    return not any(module == name or (module or "").startswith(f"{name}.") for name in _HARMLESS)
