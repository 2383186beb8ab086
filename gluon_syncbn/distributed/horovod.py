"""Processes that are connected by Horovod, which their gradients use already.

An exchange is one ``allreduce`` with SUM of a matrix that is zero outside this process's own row: the sum is then
exactly the gathered rows. Horovod is fastest with names that it has seen, so each key has one name. Two rounds of a key
may be under way at a time, in another order on each process (the backward passes of a layer that is called several
times). Under the one name they follow each other, and each row has the number of its round.

Horovod's operation runs in MXNet's engine, and cannot be taken back; a thread waits for each. If a process does not
come, the wait ends, and Horovod is shut down on all processes, which releases them within milliseconds: a job that has
lost a process, or a step, starts again from its last checkpoint.

If the processes share memory they only meet by Horovod, and can abandon a step. But another process may wait for the
gradients of a process that has abandoned the step. So if a program does not abandon a failed step within 10 s, it
probably waits for gradients, and Horovod is shut down there, too.

If the launcher keeps a board (``horovodrun`` with gloo does), processes write to it that they have come to a round, if
they wait for more than a second, and why they have failed.
"""

import atexit
import concurrent.futures
import contextlib
import ctypes
import functools
import math
import os
import queue
import threading
import time
from collections import deque
from typing import Any, Callable, Deque, Dict, Optional, Tuple
from urllib.parse import quote

import mxnet as mx
import numpy as np

from gluon_syncbn.base import library
from gluon_syncbn.base.errors import text_of
from gluon_syncbn.distributed.process_group import VECTOR, CommunicatorError, Message, ProcessGroup

_POST_SECONDS = 1.0  # a process that waits for longer writes to the board that it has come
_PENDING_SECONDS = 10.0  # for the program to abandon a failed step; else it waits in vain for gradients
_REASON_SECONDS = 0.1  # for another process to write its reason to the board
_SHUTDOWN_SECONDS = 5.0  # it takes milliseconds, or else minutes
_HEADER = 1  # the number of the round


class HorovodProcessGroup(ProcessGroup):
    """The processes of a process set of Horovod (None: all processes), in its rank order.

    CommunicatorError if Horovod is not installed for MXNet, or ``hvd.init()`` has not been called.
    """

    name = "horovod"
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
        self._waiting: Dict[int, Deque[Message]] = {}  # by key, while a message of the key is under way: the next ones
        self._under_way: Dict[Tuple[int, int], float] = {}  # by key and round: since when, or inf when that is posted
        self._lock = threading.Lock()  # of these two
        self._ended_by = ""  # why the processes are no longer connected
        self._begin()

    @property
    def needs_subsets(self):
        return not self.shares_memory

    def _pause(self):
        return _POST_SECONDS / 2

    @property
    def _is_busy(self):
        return bool(self._under_way)

    def _send(self, message):
        if self._ended_by:
            raise CommunicatorError(self._ended_by)
        with self._lock:
            self._under_way[message.key, message.round_id] = time.monotonic()
            if message.key in self._waiting:
                self._waiting[message.key].append(message)
                return
            self._waiting[message.key] = deque()
        _horovod.run(lambda: self._run(message))

    def _run(self, message: Optional[Message]) -> None:
        """Exchange a message, and then each message that has come under its key meanwhile."""
        while message is not None:
            key = message.key
            members = tuple(sorted({self.rank, *message.ranks}))
            matrix = np.zeros((len(members), _HEADER + message.numbers.size))
            matrix[members.index(self.rank)] = [message.round_id, *message.numbers]
            try:
                rows = self._allreduce(matrix, f"gluon_syncbn.{message.key}", members)
            except Exception as problem:  # every exchange that waits must get the error
                with self._lock:
                    self._under_way.clear()
                text = text_of(problem)
                self._lose(text if isinstance(problem, CommunicatorError) else self._failed(text))
                return
            for rank, row in zip(members, rows):
                if rank != self.rank:
                    self._receive(rank, VECTOR, message.key, int(row[0]), row[_HEADER:])
            with self._lock:
                self._under_way.pop((message.key, message.round_id), None)
                others = self._waiting[message.key]
                message = others.popleft() if others else None
                if message is None:
                    del self._waiting[key]

    def _allreduce(self, matrix: np.ndarray, name: str, members: Tuple[int, ...]) -> np.ndarray:
        """Return the sum over the members; waits for them."""
        if members not in self._sets:
            raise CommunicatorError(
                f"the processes {', '.join(map(str, members))} cannot meet without the others: set "
                f"HOROVOD_DYNAMIC_PROCESS_SETS=1 before hvd.init()"
            )
        array = mx.nd.array(matrix, ctx=mx.cpu(), dtype="float64")
        return self._hvd.allreduce(array, name=name, op=self._hvd.Sum, process_set=self._sets[members]).asnumpy()

    def _take_in(self):
        """Look after long waits; each operation hands its messages to the core when it ends."""
        now = time.monotonic()
        if self.shares_memory and self.state.seconds_failed > _PENDING_SECONDS:
            self._abandon("its gradients, which Horovod adds up, could not be taken back")
        with self._lock:
            late = [item for item, since in self._under_way.items() if now > since + _POST_SECONDS]
            self._under_way.update(dict.fromkeys(late, math.inf))
        for key, round_id in late:
            _horovod.run(functools.partial(self.board.post, f"{key}.{round_id}", ""))

    def _find_out_who_came(self, message):
        def read():
            posted = self.board.read(f"{message.key}.{message.round_id}", [self._ranks[rank] for rank in message.ranks])
            self._hear_who_came(message, None if posted is None else list(map(self._ranks.index, posted)))

        _horovod.run(read)

    def _abandon(self, why):
        with self._lock:
            if self._ended_by:
                return
            self._ended_by = (
                f"Horovod was shut down on all processes, because a step was abandoned here ({why.rstrip('.')}). "
                f"Start the job again from its last checkpoint"
            )
        library.core.gluon_syncbn_end_processes(self.id, self._ended_by.encode())  # for good
        _horovod.shut_down(self._hvd, lambda: self.board.post("reason", why))

    def leave(self):
        super().leave()
        if self.state.has_lost_some and not self._ended_by:  # those with whom it would wait for the end
            self._ended_by = "the process ends"
            _horovod.shut_down(self._hvd, lambda: self.board.post("reason", "it has ended"))
        if self._ended_by:
            if not _horovod.is_down.wait(_SHUTDOWN_SECONDS):
                _end_at_once()
        else:
            self.board.post("reason", "it has ended")

    def _failed(self, text: str) -> str:
        """Return the text for an error of Horovod, with the other processes' reasons."""
        if "shut down" not in text:
            return f"Horovod failed: {text}"
        time.sleep(_REASON_SECONDS)
        reasons = self.board.read("reason", self._ranks) or {}
        texts = "; ".join(f"process {self._ranks.index(rank)}: {reason}" for rank, reason in reasons.items())
        if texts:
            return f"another process has ended the job. {texts}"
        return "Horovod was shut down: another process has ended, or was killed"

    def add_subsets(self, subsets, seconds):
        for members in subsets:
            if members in self._sets or len(members) == 1:
                continue
            future: concurrent.futures.Future = concurrent.futures.Future()
            _horovod.run(functools.partial(self._add_set, members, future))
            try:
                self._sets[members] = future.result(seconds)
            except concurrent.futures.TimeoutError:
                raise CommunicatorError(f"Horovod made no process set within {seconds:g} s") from None
            except ValueError as problem:  # not dynamic
                raise CommunicatorError(f"Horovod refused a process set: {problem}") from None

    def _add_set(self, members, future) -> None:
        try:
            future.set_result(self._hvd.add_process_set([self._ranks[rank] for rank in members]))
        except Exception as problem:
            future.set_exception(problem)


def _end_at_once() -> None:
    """End the process, with its exit code, as soon as the interpreter has ended: Horovod would wait for others."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit"):  # only glibc has it, and runs it before all handlers that have been registered before
        libc.fflush(None)
        libc.on_exit(libc._exit, None)


class _Board:
    """The texts that processes exchange outside of Horovod, by rank; empty if the launcher keeps no board."""

    def __init__(self, rank: int):
        self._rank = rank
        address = (os.environ.get(f"HOROVOD_GLOO_RENDEZVOUS_{name}") for name in ("ADDR", "PORT"))
        self._place = [*address, "gluon_syncbn"]

    def post(self, title: str, text: str) -> None:
        if self._place[0] is None:
            return
        from horovod.runner.http.http_client import put_data_into_kvstore

        with contextlib.suppress(Exception):  # the launcher may be gone
            put_data_into_kvstore(*self._place, quote(f"{title}.{self._rank}"), text)

    def read(self, title: str, ranks) -> Optional[Dict[int, str]]:
        """The texts by rank; None if there is no board."""
        if self._place[0] is None:
            return None
        from horovod.runner.http.http_client import read_data_from_kvstore

        found = {}
        for rank in ranks:
            with contextlib.suppress(Exception):  # it has posted nothing
                found[rank] = read_data_from_kvstore(*self._place, quote(f"{title}.{rank}"))
        return found


class _Horovod:
    """Horovod as all process groups share it: the threads that wait for it, and its end."""

    def __init__(self) -> None:
        self.is_down = threading.Event()
        self._is_ending = threading.Lock()  # taken for ever
        self._idle: queue.SimpleQueue[queue.SimpleQueue] = queue.SimpleQueue()

    def shut_down(self, hvd: Any, tell: Callable[[], None]) -> None:
        """Let the other processes know, and shut Horovod down, once: two at a time would wait for ever."""
        atexit.unregister(hvd.shutdown)
        if not self._is_ending.acquire(blocking=False):
            return

        def shut_down() -> None:
            tell()
            hvd.shutdown()
            self.is_down.set()

        self.run(shut_down)

    def run(self, work: Callable[[], Any]) -> None:
        """Run the work on an idle thread, or on a new one, which does not keep the process from ending."""
        try:
            todo = self._idle.get_nowait()
        except queue.Empty:
            todo = queue.SimpleQueue()
            threading.Thread(target=self._work, args=(todo,), name="gluon_syncbn Horovod", daemon=True).start()
        todo.put(work)

    def _work(self, todo) -> None:
        while True:
            todo.get()()
            self._idle.put(todo)


_horovod = _Horovod()
