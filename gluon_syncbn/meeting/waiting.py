"""How long a device waits for the others: the layer's timeout, or less once waiting has lost its sense.

csrc/patience.h says when that is, and how Ctrl-C is noticed. The compiled rendezvous follows it there, that of the
portable back end here. Without the compiled library no signal is noticed, and a wait lasts until the timeout then.
"""

import contextlib
import ctypes
import threading
import time
from typing import Callable, Iterator, NamedTuple, Optional

MOMENT = 2.0  # seconds; as in csrc/patience.h, like the next
_LOOK = 0.1

_library: Optional[ctypes.CDLL] = None
_limit = ("", 0.0)  # because of what, and since when
_limiting = 0  # how many `limited` are under way
_lock = threading.Lock()


class Waited(NamedTuple):
    """How long a wait in vain lasted, and why it ended before the timeout, if it did."""

    seconds: float
    because: str

    def text(self, whom: str) -> str:
        """ "waited 60 s for WHOM", and if it ended before the timeout, why."""
        if not self.because:
            return f"waited {self.seconds:g} s for {whom}"
        return f"waited {self.seconds:.1f} s for {whom}, and no longer because {self.because}"


def connect(library: ctypes.CDLL) -> None:
    """Tell ``library`` from now on what is said here, and learn of signals from it."""
    global _library
    library.gluon_syncbn_limit_patience.argtypes = [ctypes.c_char_p]
    library.gluon_syncbn_limit_patience.restype = None
    library.gluon_syncbn_watch_signals.argtypes = [ctypes.c_int]
    library.gluon_syncbn_watch_signals.restype = None
    library.gluon_syncbn_signalled_at.argtypes = []
    library.gluon_syncbn_signalled_at.restype = ctypes.c_double
    _library = library


@contextlib.contextmanager
def limited(because: str) -> Iterator[None]:
    """Within the ``with`` block waits end after `MOMENT`, "because" of this; on several threads, within the last."""
    global _limiting
    with _lock:
        _limiting += 1
        limit(because)
    try:
        yield
    finally:
        with _lock:
            _limiting -= 1
            if not _limiting:
                limit("")


def limit(because: str) -> None:
    """From now on waits end after `MOMENT`, "because" of this; an empty text takes it back."""
    global _limit
    _limit = (because, time.monotonic())
    if _library is not None:
        _library.gluon_syncbn_limit_patience(because.encode())


def wait(changed: threading.Condition, began: float, timeout: float, enough: Callable[[], bool]) -> Optional[Waited]:
    """Wait on ``changed``, which is held, until ``enough()``: then None; or until patience ends.

    ``began`` is on the clock of `time.monotonic`.
    """
    watching = False
    try:
        while not enough():
            ended = _out_of_patience(began, timeout)
            if ended is not None:
                return ended
            notified = changed.wait(min(_LOOK, began + timeout - time.monotonic()))
            if _library is not None and not notified and not watching:
                _library.gluon_syncbn_watch_signals(1)
                watching = True
    finally:
        if watching:
            _library.gluon_syncbn_watch_signals(0)
    return None


def _out_of_patience(began: float, timeout: float) -> Optional[Waited]:
    now = time.monotonic()
    if now >= began + timeout:
        return Waited(timeout, "")
    signalled = -1.0 if _library is None else _library.gluon_syncbn_signalled_at()
    if signalled >= began and now >= signalled + MOMENT:
        return Waited(now - began, "Ctrl-C or SIGTERM came")
    because, since = _limit
    if because and now >= max(began, since) + MOMENT:
        return Waited(now - began, because)
    return None
