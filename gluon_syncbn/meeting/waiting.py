"""How long a device waits for the others: the layer's timeout, or less once the wait can no longer succeed.

csrc/meeting/waiting.h says when that is, and how Ctrl-C is noticed. The compiled rendezvous follows it there, that of
the portable back end here. Without the compiled library no signal is noticed, and a wait lasts until the timeout then.
"""

import contextlib
import threading
import time
from typing import Callable, Iterator, NamedTuple, Optional

from gluon_syncbn.base import library
from gluon_syncbn.mxnet_engine import failures
from gluon_syncbn.mxnet_engine.cpu_resources import settings_in_force

# For devices that are on their way when waits are cut short: they may still arrive.
GRACE_SECONDS = 2.0
# For processes that have yet to run the last step of one that ends.
LAST_STEP_SECONDS = 60.0
# How often it is looked whether waits have been cut short.
POLL_SECONDS = 0.1


class _Cut:
    """Whether waits are cut short."""

    def __init__(self) -> None:
        self.now = ("", 0.0, 0.0)  # because of what, since when, and the grace period of waits for processes
        self.under_way = 0  # how many `cut_short` there are
        self.lock = threading.Lock()


_cut = _Cut()

if library.core is not None:
    library.core.gluon_syncbn_set_waiting_times(GRACE_SECONDS, POLL_SECONDS)


class Waited(NamedTuple):
    """How long a wait in vain lasted, and why it ended before the timeout, if it did."""

    seconds: float
    because: str

    def text(self, whom: str) -> str:
        """ "waited 60 s for WHOM", and if it ended before the timeout, why."""
        if not self.because:
            return f"waited {self.seconds:g} s for {whom}"
        return f"waited {self.seconds:.1f} s for {whom}, and no longer because {self.because}"


def usual_reasons() -> str:
    """The end of every error about a missing device."""
    settings = settings_in_force()
    return listed_reasons(
        "a last batch has fewer images than there are devices: see gluon_syncbn.devices",
        "an exception left this step or an earlier one: see gluon_syncbn.abandon_step",
        "an output was read, or a process forked, before all devices were started",
        "the net's parameters live on more devices than are training",
        "only some devices ran this layer, in a branch",
        "a device was slower than the timeout: see timeout= and GLUON_SYNCBN_TIMEOUT",
        *([f"CPU contexts ran out of temp-space slots or random generators (now {settings})"] if settings else []),
        end="To go on, call gluon_syncbn.abandon_step(), or begin the next step.",
    )


def listed_reasons(*reasons: str, end: str) -> str:
    """The end of an error, with the usual reasons on a line each, the likeliest first.

    MXNet takes lines that begin with spaces for a stack trace.
    """
    lines = "".join(f"\n({number}) {reason}" for number, reason in enumerate(reasons, start=1))
    return f"Usual reasons:{lines}\n{end}"


@contextlib.contextmanager
def cut_short(because: str) -> Iterator[None]:
    """Within the ``with`` block waits end after the grace period; on several threads, within the last block."""
    with _cut.lock:
        _cut.under_way += 1
        cut_short_from_now_on(because)
    try:
        yield
    finally:
        with _cut.lock:
            _cut.under_way -= 1
            if not _cut.under_way:
                cut_short_from_now_on("")


def cut_short_from_now_on(because: str, process_grace: float = GRACE_SECONDS) -> None:
    """Waits end after the grace period, "because" of this; an empty text takes it back.

    ``process_grace`` is the grace period of waits for other processes.
    """
    _cut.now = (because, time.monotonic(), process_grace)
    if library.core is not None:
        library.core.gluon_syncbn_cut_waits_short(because.encode())


class Wait:
    """One wait that its owner ends: within a ``with`` block, calls `ended` from time to time."""

    def __init__(self, seconds: float, began: Optional[float] = None, is_for_processes: bool = False):
        self._began = time.monotonic() if began is None else began
        self._is_for_processes = is_for_processes
        self._timeout = seconds
        self._is_watching = False

    def __enter__(self) -> "Wait":
        return self

    def __exit__(self, *_) -> None:
        if self._is_watching:
            library.core.gluon_syncbn_watch_signals(0)

    def ended(self) -> Optional[Waited]:
        """How long it was, and why it ends now; None while it goes on."""
        if library.core is not None and not self._is_watching and time.monotonic() > self._began + POLL_SECONDS:
            library.core.gluon_syncbn_watch_signals(1)
            self._is_watching = True
        now = time.monotonic()
        if now >= self._began + self._timeout:
            return Waited(self._timeout, "")
        signalled = -1.0 if library.core is None else library.core.gluon_syncbn_signalled_at()
        if signalled >= self._began and now >= signalled + GRACE_SECONDS:
            return Waited(now - self._began, "Ctrl-C or SIGTERM came")
        error = failures.failure()
        if error and now >= max(self._began, failures.failed_at()) + GRACE_SECONDS:
            return Waited(now - self._began, f"the step has failed ({error})")
        because, since, process_grace = _cut.now
        if because and now >= max(self._began, since) + (process_grace if self._is_for_processes else GRACE_SECONDS):
            return Waited(now - self._began, because)
        return None


def wait(changed: threading.Condition, began: float, timeout: float, enough: Callable[[], bool]) -> Optional[Waited]:
    """Wait on ``changed``, which is held, until ``enough()``: then None; or until the wait ends in vain.

    ``began`` is on the clock of `time.monotonic`.
    """
    with Wait(timeout, began) as this:
        while not enough():
            ended = this.ended()
            if ended is not None:
                return ended
            changed.wait(min(POLL_SECONDS, began + timeout - time.monotonic()))
    return None
