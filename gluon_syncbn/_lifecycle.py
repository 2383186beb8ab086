"""What must have ended before the process exits or forks.

At both, MXNet first stops the threads that run custom operators, each as soon as it is idle, and only then waits for
all pending work. A device that comes to a rendezvous in between finds no thread, and the others wait for it until
the timeout; and if an operator has failed by then, MXNet throws its error through ``fork``, which ends the process with
``terminate called``. So all pending work is waited for here, before MXNet begins: at exit by `atexit`, whose handlers
run in reverse order of registration (MXNet's was registered when it was imported); before a fork by
`os.register_at_fork`, which serves ``os.fork`` and `multiprocessing`, hence a ``DataLoader`` with workers. Each wait ends,
because every rendezvous does.
"""

import atexit
import logging
import os

import mxnet as mx

_log = logging.getLogger("gluon_syncbn")


def finish_pending_work(occasion: str) -> None:
    """Wait until nothing runs; an error of work that no one has asked for yet is logged, for no one will see it else."""
    try:
        mx.nd.waitall()
    except mx.MXNetError as error:
        _log.error("%s, pending work had failed; its arrays hold NaN. %s", occasion, _first_line(error))


def _first_line(error: mx.MXNetError) -> str:
    """Without the stack trace that MXNet adds."""
    return str(error).split("\nStack trace")[0].strip()


def watch() -> None:
    """Wait for pending work before exits and forks from now on."""
    atexit.register(finish_pending_work, "When the process ended")
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=lambda: finish_pending_work("When the process forked"))
