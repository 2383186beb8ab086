"""Finishes pending work before the process exits or forks.

At both, MXNet first stops the threads that run custom operators, each as soon as it is idle, and only then waits for
all pending work. A device that comes to a rendezvous in between finds no thread, and the others wait for it until
the timeout; and if an operator has failed by then, MXNet throws its error through ``fork``, which ends the process with
``terminate called``. So this module waits for all pending work before MXNet begins: at exit by `atexit`, whose handlers
run in reverse order of registration (MXNet's was registered when it was imported); before a fork by
`os.register_at_fork`, which serves ``os.fork`` and `multiprocessing`, hence a ``DataLoader`` with workers. Each wait
ends, because every round does; at exit soon, since a pass that has not been started by then never will be.

It also waits for the threads of the compiled rendezvous, which no one joins: threads that carry exchanges with other
processes until they have ended, the watchdog until it stands still.

MXNet counts an operator as done before it has dropped it, and to drop an operator that is written in Python takes the
interpreter lock. The thread that forks holds that lock while MXNet waits for its threads: a hang. And a thread that
comes for the lock while the interpreter shuts down ends the process with ``terminate called``. So operators are dropped
before: when a device's thread runs the next operator, it has dropped the one before. That is certain with one thread
per device, MXNet's default; a moment is left to others. At exit, the package's operators are then dropped without
Python (csrc/mxnet/python_operator.cpp).
"""

import atexit
import contextlib
import logging
import os
import time

import mxnet as mx

from gluon_syncbn.base import forks, library
from gluon_syncbn.base.errors import text_of
from gluon_syncbn.distributed.default import leave_processes
from gluon_syncbn.meeting import waiting
from gluon_syncbn.mxnet_engine import failures
from gluon_syncbn.step.steps import steps

_SECONDS_TO_DROP_OPERATORS = 0.01
_log = logging.getLogger("gluon_syncbn")


def finish_pending_work() -> str:
    """Wait until nothing runs. Returns the error of work that nobody has waited for, if there is one."""
    error = ""
    try:
        mx.nd.waitall()
    except mx.MXNetError as problem:
        error = text_of(problem)
    for device in steps.layers.devices_in_use():
        # A GPU that is newer than MXNet has no kernel for this; its thread has come by all the same.
        with contextlib.suppress(mx.MXNetError):
            mx.nd.ones(1, ctx=device).wait_to_read()
    if library.core is not None:  # threads of exchanges with other processes end a moment after the work does
        library.core.gluon_syncbn_wait_for_exchanges(waiting.GRACE_SECONDS)
    time.sleep(_SECONDS_TO_DROP_OPERATORS)
    return error


def _log_pending_work(occasion: str, advice: str = "") -> None:
    """Finish it, and log its error if nobody has seen that."""
    was_seen = bool(failures.failure()) and failures.was_seen()
    error = finish_pending_work()
    if error and not was_seen:
        _log.error("%s, pending work had failed: %s%s", occasion, error, advice)


def _before_fork() -> None:
    try:
        _log_pending_work("When the process forked", " Call gluon_syncbn.abandon_step() before the next step.")
    finally:
        if library.core is not None:  # a lock that another thread holds now would be locked for ever in the child
            library.core.gluon_syncbn_before_fork()


def _after_fork(is_child: bool) -> None:
    if library.core is not None:
        library.core.gluon_syncbn_after_fork(is_child)
    if is_child:
        steps.layers.lose_gpus()


def _at_exit() -> None:
    waiting.cut_short_from_now_on("the process ends", waiting.LAST_STEP_SECONDS)
    try:
        _log_pending_work("When the process ended")
        leave_processes()
    finally:
        failures.end_use()
        if library.core is not None:  # MXNet's threads are not to call wrapped operators any more
            library.core.gluon_syncbn_stop_calling_python()


def end_before_communicators() -> None:
    """Wait for pending work at exit before the handlers that have been registered until now.

    Horovod's would break off the last step, for which scripts do not wait.
    """
    atexit.unregister(_at_exit)
    atexit.register(_at_exit)


def watch_exits_and_forks() -> None:
    """Wait for pending work before them from now on; again does nothing (``importlib.reload``)."""
    if (_before_fork, _after_fork) in forks.handlers:
        return
    atexit.register(forks.handlers.clear)  # they lead to MXNet; runs after handlers that are registered later
    atexit.register(_at_exit)
    forks.handlers.append((_before_fork, _after_fork))
    os.register_at_fork(
        before=forks.before_fork, after_in_parent=forks.after_fork_in_parent, after_in_child=forks.after_fork_in_child
    )
