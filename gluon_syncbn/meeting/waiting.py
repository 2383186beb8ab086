"""How long a device waits for the others: the layer's timeout, or less once the wait can no longer succeed.

csrc/meeting/waiting.h has the rules, and how Ctrl-C is noticed. The compiled rendezvous follows them there, and the
portable back end here. Without the compiled library no signal is noticed, and a wait then lasts until the timeout.
"""

import contextlib
import signal
import threading
import time
from typing import Any, Callable, Iterator, NamedTuple, Optional

from gluon_syncbn.base import library
from gluon_syncbn.base.errors import ADVICE, listed_reasons
from gluon_syncbn.mxnet_engine import failures
from gluon_syncbn.mxnet_engine.cpu_resources import settings_in_force

# For devices that are on their way when waits are cut short: they may still arrive.
GRACE_SECONDS = 2.0
# For processes that have yet to run the last step of one that ends.
LAST_STEP_SECONDS = 60.0
# Between two looks whether waits have been cut short.
POLL_SECONDS = 0.1


class _Cut:
    """Whether waits are cut short."""

    def __init__(self) -> None:
        self.now = ("", 0.0, 0.0)  # the reason, its time, and the grace period
        self.under_way = 0  # how many `cut_short` blocks
        self.lock = threading.Lock()


_cut = _Cut()

if library.core is not None:
    library.core.gluon_syncbn_set_waiting_times(GRACE_SECONDS, POLL_SECONDS)


class Waited(NamedTuple):
    """How long a wait in vain lasted, and the reason if it ended before the timeout."""

    seconds: float
    because: str

    def text(self, whom: str) -> str:
        """ "waited 60 s for WHOM", or if it ended before the timeout, "waited only 2 s for WHOM, because ..."."""
        if not self.because:
            return f"waited {self.seconds:g} s for {whom}"
        return f"waited only {self.seconds:.1f} s for {whom}, because {self.because}"

    def advice(self, usual: str) -> str:
        """The end of an error: all of ``usual``, or its last line if the reason is known."""
        return usual.split("\n")[-1] if self.because else usual


def usual_reasons() -> str:
    """The end of an error about a missing device, if the reason is not known; the last line is advice."""
    settings = settings_in_force()
    return listed_reasons(
        "a last batch has fewer images than there are devices: see gluon_syncbn.devices",
        "an exception left this step or an earlier one: see gluon_syncbn.abandon_step",
        "an output was read, or a process forked, before all devices were started",
        "the net's parameters live on more devices than are training",
        "only some devices ran this layer, in a branch",
        "a device was slower than the timeout: see timeout= and GLUON_SYNCBN_TIMEOUT",
        *([f"CPU contexts ran out of temp-space slots or random generators (now {settings})"] if settings else []),
        end=ADVICE,
    )


@contextlib.contextmanager
def cut_short(because: str, grace: Optional[float] = None) -> Iterator[None]:
    """Let waits end after a grace period, within the ``with`` block; on several threads, until the last block ends."""
    with _cut.lock:
        _cut.under_way += 1
        cut_short_from_now_on(because, grace=grace)
    try:
        yield
    finally:
        with _cut.lock:
            _cut.under_way -= 1
            if not _cut.under_way:
                cut_short_from_now_on("")


def cut_short_from_now_on(because: str, process_grace: float = GRACE_SECONDS, grace: Optional[float] = None) -> None:
    """Let waits end after the grace period, for this reason; an empty text takes it back.

    ``process_grace`` is the grace period of waits for other processes.
    """
    grace = GRACE_SECONDS if grace is None else grace
    _cut.now = (because, time.monotonic(), grace)
    if library.core is not None:
        library.core.gluon_syncbn_cut_waits_short(because.encode(), grace, process_grace)


def handle(number: int, handler: Callable[..., Any]) -> None:
    """Set the handler of a signal, as `signal.signal`; waits that are under way notice the signal nevertheless."""
    signal.signal(number, handler)
    if library.core is not None:
        library.core.gluon_syncbn_renew_watch()


def wait(changed: threading.Condition, began: float, timeout: float, enough: Callable[[], bool]) -> Optional[Waited]:
    """Wait on ``changed``, which is held, until ``enough()``: then None; or until the wait ends in vain.

    ``began`` is on the clock of `time.monotonic`.
    """
    is_watching = False
    try:
        while not enough():
            if is_watching:
                library.core.gluon_syncbn_renew_watch()
            elif library.core is not None and time.monotonic() > began + POLL_SECONDS:
                library.core.gluon_syncbn_begin_watch()
                is_watching = True
            waited = _ended(began, timeout)
            if waited is not None:
                return waited
            changed.wait(min(POLL_SECONDS, began + timeout - time.monotonic()))
        return None
    finally:
        if is_watching:
            library.core.gluon_syncbn_end_watch()


def _ended(began: float, timeout: float) -> Optional[Waited]:
    """The wait, if it ends now; None while it goes on."""
    now = time.monotonic()
    if now >= began + timeout:
        return Waited(timeout, "")
    signalled = -1.0 if library.core is None else library.core.gluon_syncbn_signalled_at()
    if signalled >= began and now >= signalled + GRACE_SECONDS:
        return Waited(now - began, "Ctrl-C or SIGTERM came")
    error = failures.failure()
    if error and now >= max(began, failures.failed_at()) + GRACE_SECONDS:
        return Waited(now - began, f"the step has failed ({error})")
    because, since, grace = _cut.now
    if because and now >= max(began, since) + grace:
        return Waited(now - began, because)
    return None
