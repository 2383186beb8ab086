"""Where the devices of one layer meet on the portable back end: a barrier that hands everyone what became of it all.

The compiled one has no threads that wait: csrc/meeting/rendezvous.h.

The protocol, as a story
------------------------
Every device ("rank") runs on a thread of its own and comes to the rendezvous with one vector, its *contribution*.
Ranks meet in *rounds*. A round has a key, and is in one of three states:

``gathering``
    Opened by the first rank to arrive, from when its timeout counts. Ranks that arrive leave their contribution and
    sleep. A round waits for ranks, and for nothing else.
``exchanging``
    The last rank to arrive is the *leader*. It alone runs ``exchange(contributions)``, the reduction across devices,
    while the others go on sleeping. The round leaves the table now, so a rank that comes again opens the next round and
    cannot disturb this one.
``done``
    The leader, or the first sleeper whose wait ended, has stored the outcome: a result, or an error that is the same
    for every rank. Everyone is woken, and takes it home.

What ends every wait: the last arrival; the timeout, or less (`waiting`), which fails the round for all ranks that wait
and removes it from the table, so that the next step starts clean; or an error in the exchange.
The leader of an exchange that does not come back releases the sleepers after one more timeout.

Which rounds belong together: forward passes of one layer on one device run in program order (each writes the
running statistics), so all of them share one key, and the n-th round holds the n-th call of every device. Backward
passes of a layer that is called several times per step come in any order, so their key is the number of the
forward round that they answer (``RoundResult.round_id``).

A rank that arrives after its round has failed opens a new round, and cannot be distinguished from one that starts the
next step. Whoever catches the error and goes on must therefore let the stragglers finish first: `abandon_step`.
"""

import threading
import time
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence

import numpy as np

from gluon_syncbn.base.errors import SyncBatchNormError
from gluon_syncbn.meeting import waiting


class RoundResult(NamedTuple):
    """The result of an exchange, and the number of its round."""

    result: Any
    round_id: int


class _Round:
    def __init__(self, round_id: int, size: int):
        self.id = round_id
        self.opened = time.monotonic()
        self.contributions: List[Any] = [None] * size  # np.ndarray, where a rank has come
        self.outcome: Optional[RoundResult] = None
        self.error: Optional[str] = None

    @property
    def done(self) -> bool:
        return self.outcome is not None or self.error is not None

    @property
    def gathering(self) -> bool:
        return not self.done and bool(self.missing())

    def missing(self) -> List[int]:
        return [rank for rank, item in enumerate(self.contributions) if item is None]


class Rendezvous:
    """The meeting point of one layer's devices, for one direction.

    Parameters
    ----------
    what : str
        How errors call it, e.g. ``"SyncBatchNorm 'resnet_batchnorm0': forward pass"``.
    ranks : sequence of str
        Names of the participants in rank order, e.g. ``['cpu(0)', 'cpu(1)']``.
    timeout : float
        Seconds that a round stays open after its first arrival.
    exchange : callable
        ``exchange(contributions)`` makes the result; called once per round, by one thread, outside of our lock.
    advice : callable
        Returns the usual reasons for a missing device; its text ends the error.
    """

    def __init__(
        self,
        what: str,
        ranks: Sequence[str],
        timeout: float,
        exchange: Callable[[List[np.ndarray]], Any],
        advice: Callable[[], str] = lambda: "",
    ):
        self._what = what
        self._ranks = list(ranks)
        self._timeout = timeout
        self._exchange = exchange
        self._advice = advice
        self._rounds: Dict[int, _Round] = {}
        self.rounds = 0  # that were ever opened
        self._changed = threading.Condition()

    def all_reduce(self, rank: int, contribution: np.ndarray, key: int = 0) -> RoundResult:
        """Leave ``contribution`` as ``rank``, wait for the others, and return the result of all of it.

        Raises
        ------
        SyncBatchNormError
            The same text on every rank that took part: a rank did not arrive within the timeout, a rank arrived
            twice, the contributions have different lengths, or the exchange failed.
        """
        with self._changed:
            round_ = self._join(rank, contribution, key)
            is_leader = not round_.missing()
            if is_leader:
                del self._rounds[key]
            else:
                self._sleep(round_, key)
        if is_leader:
            self._lead(round_)
        if round_.outcome is None:
            raise SyncBatchNormError(round_.error)
        return round_.outcome

    def _join(self, rank: int, contribution: np.ndarray, key: int) -> _Round:
        round_ = self._rounds.get(key)
        if round_ is None:
            self.rounds += 1
            round_ = _Round(self.rounds, len(self._ranks))
            self._rounds[key] = round_
        if round_.contributions[rank] is not None:
            self._fail(self._rounds.pop(key), self._twice_text(round_, rank))
        else:
            round_.contributions[rank] = contribution
        return round_

    def _sleep(self, round_: _Round, key: int) -> None:
        waited = waiting.wait(self._changed, round_.opened, self._timeout, lambda: not round_.gathering)
        if waited is not None:
            del self._rounds[key]
            self._fail(round_, self._missing_text(round_, waited))
        elif not self._changed.wait_for(lambda: round_.done, self._timeout + waiting.GRACE_SECONDS):
            self._fail(round_, f"{self._what}: all devices arrived, but the exchange between them did not return.")

    def _lead(self, round_: _Round) -> None:
        try:
            if len({item.size for item in round_.contributions}) > 1:
                sizes = ", ".join(f"{name}: {item.size}" for name, item in zip(self._ranks, round_.contributions))
                raise ValueError(f"the devices brought vectors of different lengths ({sizes})")
            outcome, error = RoundResult(self._exchange(round_.contributions), round_.id), None
        except Exception as problem:  # whatever it was, the sleepers must hear of it
            outcome, error = None, f"{self._what}: the exchange between devices failed: {problem}"
        with self._changed:
            if not round_.done:
                round_.outcome, round_.error = outcome, error
            self._changed.notify_all()

    def _fail(self, round_: _Round, text: str) -> None:
        round_.error = text
        self._changed.notify_all()

    def _twice_text(self, round_: _Round, rank: int) -> str:
        missing = ", ".join(self._ranks[rank] for rank in round_.missing())
        return (
            f"{self._what}: {self._ranks[rank]} arrived twice before {missing} arrived. Every device must run this "
            f"layer equally often per step, and in the same order."
        )

    def _missing_text(self, round_: _Round, waited: waiting.Waited) -> str:
        missing = round_.missing()
        arrived = [name for rank, name in enumerate(self._ranks) if rank not in missing]
        return (
            f"{self._what} {waited.text(f'{len(missing)} of {len(self._ranks)} devices')}. "
            f"Arrived: {', '.join(arrived)}. Missing: {', '.join(self._ranks[rank] for rank in missing)}. "
            f"{waited.advice(self._advice())}"
        ).rstrip()
