"""Ends a step in which a result is read before all devices have been called, from which no program can go on::

    for x in parts:
        losses.append(loss(net(x)).mean().asscalar())

The first read waits for the second device, and the thread that would call the net there is the one that reads. So
while a thread reads after it has called layers on some of their devices only, another thread looks, ten times a second,
whether the program can still go on, and if not, ends the waits with an error. It cannot go on if

- only the reading thread has called those layers so far;
- no other thread could call them: no thread exists that may run the user's code;
- the process does nothing for half a second, and no operator of the user's runs: a read may also take long because much
  is computed, by another net, say.

If one of these is not known, the wait lasts until the timeout. A thread that Python has not made, and that runs no
Python at that moment, is not seen.
"""

import contextlib
import os
import sys
import threading
import traceback
from types import FrameType
from typing import Iterator, List, Optional, Sequence, Set

from gluon_syncbn.meeting import waiting
from gluon_syncbn.step.passes import HalfCalled
from gluon_syncbn.step.progress import is_made_by_python
from gluon_syncbn.step.steps import steps

_LOOK_SECONDS = 0.1
_IDLE_LOOKS = 5  # in a row
_PACKAGE = "gluon_syncbn"
_TASKS = "/proc/self/task"  # Linux has the state of each thread there
# Modules whose threads call no net. Threads of a pool may, and so may all that are not known.
_HARMLESS = [
    *("multiprocessing.pool", "multiprocessing.queues", "tqdm", _PACKAGE, "horovod"),
    *("IPython.core", "ipykernel", "zmq", "tornado", "debugpy", "_pydevd_bundle", "pydevd"),
    *("tensorboard", "tensorboardX", "mxboard"),
]


@contextlib.contextmanager
def noticing_what_cannot_end(reader: Optional[FrameType]) -> Iterator[None]:
    """While this thread reads an array, or waits for all of them. The package itself may do that for other reasons."""
    half = steps.progress.half_called()
    if half is None or reader is None or _is_ours(reader) or _others_may_call({threading.get_ident()}):
        yield
        return
    is_over = threading.Event()
    arguments = half, is_over, threading.get_ident()
    looking = threading.Thread(target=_look, args=arguments, name="gluon_syncbn reading", daemon=True)
    try:
        looking.start()
        yield
    finally:
        is_over.set()


def _look(half: HalfCalled, is_over: threading.Event, reader: int) -> None:
    idle = 0
    while idle < _IDLE_LOOKS:
        if is_over.wait(_LOOK_SECONDS) or _others_may_call({reader, threading.get_ident()}):
            return
        idle = 0 if _computes() or _runs_an_operator() else idle + 1
    with waiting.cut_short(_text(half), grace=0.0):
        is_over.wait()


def _computes() -> bool:
    """Whether another thread of the process runs, or would if a processor were free; unless this is known, it does."""
    try:
        for task in os.listdir(_TASKS):
            if task != str(threading.get_native_id()):
                with open(f"{_TASKS}/{task}/stat", encoding="utf-8", errors="replace") as file:
                    if file.read().rpartition(")")[2].split()[0] in "RD":
                        return True
        return False
    except (OSError, IndexError):  # a thread has just ended, or there is no such file
        return True


def _text(half: HalfCalled) -> str:
    called, missing = (", ".join(map(str, devices)) for devices in (half.called, half.missing))
    if half.direction == "backward":
        return (
            f"a result of {called} is read before backward() has been called for {missing}. Call it for all devices, "
            f"autograd.backward(losses), and then read"
        )
    return (
        f"a result of {called} is read before the net has been called on {missing}. Call it on all devices, outputs = "
        f"[net(x) for x in parts], and then read. If {missing} has no images in this step, see gluon_syncbn.devices; "
        f"if it never has, net.collect_params().reset_ctx(devices)"
    )


def _is_ours(frame: FrameType) -> bool:
    """Whether a function of this package has called MXNet."""
    return next((_is_in(name, [_PACKAGE]) for name in _modules(frame) if not _is_in(name, ["mxnet"])), False)


def _others_may_call(known: Set[int]) -> bool:
    """Whether other threads than these may run the user's code, and call nets."""
    threads = {thread.ident: thread for thread in threading.enumerate()}
    others = [item for item in sys._current_frames().items() if item[0] not in known]
    return any(_may_call(threads.get(ident), frame) for ident, frame in others)


def _may_call(thread: Optional[threading.Thread], frame: FrameType) -> bool:
    if thread is None or not is_made_by_python(thread):
        return not any(_is_in(module, ("mxnet", _PACKAGE)) for module in _modules(frame))
    target = getattr(thread, "_target", None)
    module = getattr(target, "__module__", None) if type(thread) is threading.Thread else type(thread).__module__
    return not _is_in(module or "", _HARMLESS)


def _runs_an_operator() -> bool:
    """Whether MXNet runs a custom operator that is not this package's."""
    threads = map(_modules, sys._current_frames().values())
    operators = (modules for modules in threads if modules[-1] == "mxnet.operator")
    return any(not any(_is_in(module, [_PACKAGE]) for module in modules) for modules in operators)


def _modules(frame: FrameType) -> List[str]:
    """The modules of the functions that are being called, from the inside."""
    return [called.f_globals.get("__name__", "") for called, _ in traceback.walk_stack(frame)]


def _is_in(module: str, names: Sequence[str]) -> bool:
    return any(f"{module}.".startswith(f"{name}.") for name in names)
