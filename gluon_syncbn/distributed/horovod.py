"""Processes that are connected by Horovod, which their gradients use already.

A round is one ``allreduce`` with SUM of a matrix that is zero outside this process's own row: the sum is then exactly
the gathered rows. Horovod knows it by its name, and is fastest with names that it has seen, so there is one per key.
Two rounds of one key may be under way at a time, in another order on each process (the backward passes of a layer that
is called several times). Under one name they follow each other; each row says which round it belongs to, and lies in a
mailbox until that is complete.

Horovod's operation runs in MXNet's engine, and cannot be taken back. Where a process does not come, the wait ends, and
with it Horovod is shut down, on all processes, which releases them within milliseconds: a job that has lost a process,
or a step, starts again from its last checkpoint. A thread of its own waits for each operation, so that whoever called
it can go when the wait has ended, even if Horovod is slow to notice (a process that is stopped: 30 s).

Who has come, and why a process has given up, is written to a board, where the launcher keeps one (``horovodrun`` with
gloo does). It is used by waits that last for more than a second, and by processes that fail.
"""

import atexit
import contextlib
import ctypes
import os
import queue
import threading
import time
from collections import defaultdict, deque
from typing import Any, Callable, Deque, Dict, Optional, Tuple
from urllib.parse import quote

import mxnet as mx
import numpy as np

from gluon_syncbn.distributed.process_group import CommunicatorError, MissingProcesses, ProcessGroup

_LOOK_SECONDS = 0.1  # between two looks whether a wait has ended
_POST_SECONDS = 1.0  # waits that last longer say on the board that their process has come
_SHUTDOWN_SECONDS = 5.0  # it takes milliseconds, or else minutes
_HEADER = 1  # the number of the round


class HorovodProcessGroup(ProcessGroup):
    """The processes of a process set of Horovod, in its rank order.

    Parameters
    ----------
    process_set : horovod.mxnet.ProcessSet, optional
        By default all processes.

    Raises
    ------
    CommunicatorError
        Horovod is not installed for MXNet, or ``hvd.init()`` has not been called.
    """

    name = "horovod"
    meets_in_pairs = False
    can_resume = False

    def __init__(self, process_set: Any = None) -> None:
        try:
            import horovod.mxnet as hvd
        except ImportError as problem:
            raise CommunicatorError(
                f"Horovod cannot be imported ({problem}). docs/processes.md has the command that builds it for MXNet"
            ) from problem
        if not hvd.is_initialized():
            raise CommunicatorError("Horovod is not initialized: call hvd.init() first")
        self._hvd = hvd
        process_set = hvd.global_process_set if process_set is None else process_set
        if not process_set.included():
            raise CommunicatorError(f"this process is not in the process set {process_set}")
        self.rank, self.size = process_set.rank(), process_set.size()
        self._ranks = list(range(self.size) if process_set.ranks is None else process_set.ranks)
        self.board = _Board(hvd.rank())
        # The process sets in which layers meet, by their members.
        self._sets: Dict[Tuple[int, ...], Any] = {tuple(range(self.size)): process_set}
        self._lock = threading.Lock()
        self._channels: Dict[str, _Channel] = {}
        self._ended_by = ""  # why it is connected no more
        self._is_down = threading.Event()

    def all_gather(self, key, round_id, vector, members, ended):
        with self._lock:
            if self._ended_by:
                raise CommunicatorError(self._ended_by)
            channel = self._channels.get(key)
            if channel is None:
                channel = self._channels[key] = _Channel(self, key)
        try:
            return channel.exchange(round_id, vector, tuple(members), ended)
        except MissingProcesses as problem:
            posted = self.board.read(f"{key}.{round_id}", [self._ranks[rank] for rank in members])
            arrived = None if posted is None else sorted({self.rank, *map(self._ranks.index, posted)})
            raise MissingProcesses(problem.waited, arrived) from None
        except mx.MXNetError as problem:
            raise CommunicatorError(self._failed(str(problem).split("\nStack trace")[0].strip())) from None

    def allreduce(self, matrix: np.ndarray, name: str, members: Tuple[int, ...]) -> np.ndarray:
        """The sum over the members, on the thread that calls it."""
        if members not in self._sets:
            raise CommunicatorError(
                f"the processes {', '.join(map(str, members))} cannot meet without the others: set "
                f"HOROVOD_DYNAMIC_PROCESS_SETS=1 before hvd.init()"
            )
        array = mx.nd.array(matrix, ctx=mx.cpu(), dtype="float64")
        return self._hvd.allreduce(array, name=name, op=self._hvd.Sum, process_set=self._sets[members]).asnumpy()

    def abandon(self, reason, highest_round):
        with self._lock:
            if self._ended_by:
                return
            self._ended_by = (
                f"Horovod was shut down on all processes, because a step was given up here ({reason.rstrip('.')}). "
                f"Start the job again from its last checkpoint"
            )
        atexit.unregister(self._hvd.shutdown)  # two at a time would wait for ever
        _in_the_background(lambda: self._shut_down(reason))

    def _shut_down(self, reason: str) -> None:
        """Shut Horovod down, which may take its time."""
        self.board.post("reason", reason)
        self._hvd.shutdown()
        self._is_down.set()

    def resume(self, ended):
        raise CommunicatorError(self._ended_by)

    def leave(self):
        if self._ended_by:
            if not self._is_down.wait(_SHUTDOWN_SECONDS):
                _end_at_once()
        else:
            self.board.post("reason", "it has ended")

    def _failed(self, text: str) -> str:
        """Return the text for an error of Horovod's."""
        if "shut down" not in text:
            return f"Horovod failed: {text}"
        time.sleep(_LOOK_SECONDS)  # for the reason to be on the board
        reasons = self.board.read("reason", self._ranks) or {}
        texts = "; ".join(f"process {self._ranks.index(rank)}: {reason}" for rank, reason in reasons.items())
        if texts:
            return f"another process has ended the job. {texts}"
        return "Horovod was shut down: another process has ended, or was killed"

    def add_subsets(self, subsets):
        for members in subsets:
            if members not in self._sets and len(members) > 1:
                try:
                    self._sets[members] = self._hvd.add_process_set([self._ranks[rank] for rank in members])
                except ValueError as problem:  # not dynamic
                    raise CommunicatorError(f"Horovod refused a process set: {problem}") from None


class _Channel:
    """The rounds of one key, one operation of Horovod's after the other."""

    def __init__(self, group: HorovodProcessGroup, key: str):
        self._group = group
        self._key = key
        self._changed = threading.Condition()
        self._is_busy = False
        # By round and rank; as in `MPIProcessGroup`.
        self._mailbox: Dict[int, Dict[int, Deque[np.ndarray]]] = defaultdict(lambda: defaultdict(deque))
        self._error: Optional[Exception] = None

    def exchange(self, round_id, vector, members, ended):
        matrix = np.zeros((len(members), _HEADER + vector.size))
        matrix[members.index(self._group.rank)] = [round_id, *vector]
        began = time.monotonic()
        with self._changed:
            self._wait(lambda: not self._is_busy, began, round_id, ended)
            self._is_busy = True
        _in_the_background(lambda: self._run(matrix, members))
        with self._changed:
            mailbox = self._mailbox[round_id]
            self._wait(lambda: all(mailbox[rank] for rank in members), began, round_id, ended)
            rows = np.stack([mailbox[rank].popleft() for rank in members])
            if not any(mailbox.values()):
                self._mailbox.pop(round_id, None)
        return rows

    def _run(self, matrix, members) -> None:
        try:
            rows = self._group.allreduce(matrix, f"gluon_syncbn.{self._key}", members)
        except Exception as problem:  # whatever it was, those who wait must hear of it
            with self._changed:
                self._error = problem
                self._changed.notify_all()
            return
        with self._changed:
            for rank, row in zip(members, rows):
                self._mailbox[int(row[0])][rank].append(row[_HEADER:])
            self._is_busy = False
            self._changed.notify_all()

    def _wait(self, enough: Callable[[], bool], began: float, round_id: int, ended) -> None:
        has_posted = False
        while not enough():
            if self._error is not None:
                raise self._error
            waited = ended()
            if waited is not None:
                raise MissingProcesses(waited)
            self._changed.wait(_LOOK_SECONDS)
            if not has_posted and time.monotonic() > began + _POST_SECONDS:
                has_posted = True
                _in_the_background(lambda: self._group.board.post(f"{self._key}.{round_id}", ""))


def _end_at_once() -> None:
    """When the interpreter has ended, so does the process, with its exit code: Horovod would go on to wait for
    others."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit"):  # glibc's; it runs before what was to run at exit until now
        libc.fflush(None)
        libc.on_exit(libc._exit, None)


class _Board:
    """The texts that processes exchange outside of Horovod, by rank; empty where the launcher keeps no board."""

    def __init__(self, rank: int):
        self._rank = rank
        self._address = os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR")
        self._port = os.environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT")

    def post(self, title: str, text: str) -> None:
        if self._address is None:
            return
        from horovod.runner.http.http_client import put_data_into_kvstore

        with contextlib.suppress(Exception):  # the launcher may be gone
            put_data_into_kvstore(self._address, self._port, "gluon_syncbn", quote(f"{title}.{self._rank}"), text)

    def read(self, title: str, ranks) -> Optional[Dict[int, str]]:
        """The texts by rank; None where there is no board."""
        if self._address is None:
            return None
        from horovod.runner.http.http_client import read_data_from_kvstore

        found = {}
        for rank in ranks:
            with contextlib.suppress(Exception):  # it has posted nothing
                found[rank] = read_data_from_kvstore(
                    self._address, self._port, "gluon_syncbn", quote(f"{title}.{rank}")
                )
        return found


_idle: "queue.SimpleQueue[queue.SimpleQueue]" = queue.SimpleQueue()


def _in_the_background(work: Callable[[], None]) -> None:
    """Run it on a thread that is idle, or on a new one, which does not keep the process from ending."""
    try:
        todo = _idle.get_nowait()
    except queue.Empty:
        todo = queue.SimpleQueue()
        threading.Thread(target=_work, args=(todo,), name="gluon_syncbn Horovod", daemon=True).start()
    todo.put(work)


def _work(todo) -> None:
    while True:
        todo.get()()
        _idle.put(todo)
