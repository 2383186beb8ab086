"""Processes that are connected by MPI, through mpi4py.

Every process sends its vector to each of the others. Whoever waits, on whatever thread, takes in all messages that are
there and puts them into one mailbox, by key and round, and looks whether its own round is complete. So messages may
come in any order, no communicator is needed per layer, and who has come is known where somebody has not. MPI is only
asked whether something is there, and never waits, so a wait can be ended at any time.

A process that gives a step up informs the others. It takes part in no round until they have done so, too, and then all
know the highest number that a round has had: rounds go on after it, and messages of older ones are dropped. A process
that ends says so as well.
"""

import ctypes
import functools
import hashlib
import threading
import time
from collections import defaultdict, deque
from typing import Any, Callable, Deque, Dict, List, Sequence, Set, Tuple

import numpy as np

from gluon_syncbn.distributed.process_group import CommunicatorError, Ended, MissingProcesses, ProcessGroup

_TAG = 1
# The first numbers of a message: which of the three it is, the key (or number of the resume), and the round.
_HEADER = 3
_VECTOR, _ABANDONED, _LEFT = range(3)
# A process that has looked for this long lets go of the processor between two looks, for longer and longer.
_SPIN_SECONDS = 2e-4
_FINALIZE_SECONDS = 2.0  # for it to begin
_SHORTEST_SLEEP, _LONGEST_SLEEP = 2e-5, 1e-3
# Open MPI looks at its TCP connections in one of eight calls (opal_progress).
_PROBES = 8


class MPIProcessGroup(ProcessGroup):
    """The processes of a communicator, in its rank order.

    To make it is collective: every process of the communicator does.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm, optional
        By default ``MPI.COMM_WORLD``.
    ended : callable
        Ends the wait for the others.

    Raises
    ------
    CommunicatorError
        mpi4py is not installed, or MPI does not take calls from several threads.
    MissingProcesses
        The others did not come.
    """

    name = "mpi"
    meets_in_pairs = True
    can_resume = True

    def __init__(self, comm: Any, ended: Ended) -> None:
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as problem:  # not there, or there is no MPI library
            raise CommunicatorError(
                f"mpi4py cannot be imported ({problem}). pip install 'gluon_syncbn[mpi]'"
            ) from problem
        if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
            raise CommunicatorError(
                "MPI was initialized without MPI_THREAD_MULTIPLE, and layers call it from several threads. Import "
                "mpi4py.MPI before what initialized it, or use an MPI library that supports it"
            )
        self._mpi = MPI
        comm = MPI.COMM_WORLD if comm is None else comm
        self.rank, self.size = comm.rank, comm.size
        # No message of the user's can meet one of ours then.
        self._comm, request = comm.Idup()
        _poll(request.Test, ended)
        self._comm.Set_errhandler(MPI.ERRORS_RETURN)
        self._lock = threading.Lock()  # of all below, and while this calls MPI
        # By key and round, then by rank. A rank may be in one round again before it is over here: two backward passes
        # of one forward pass (retain_graph=True).
        self._mailbox: Dict[Tuple[int, int], Dict[int, Deque[np.ndarray]]] = defaultdict(dict)
        self._arriving: List[Tuple[Any, int, np.ndarray]] = []
        self._status = MPI.Status()
        self._is_message_there = _probing(MPI, self._comm)
        self._unfinished: List[Any] = []  # messages that a process has not taken in, and may never
        self._resumes = 0
        self._highest_given_up = 0
        # By number of the resume, then by rank: the highest round.
        self._abandoned: Dict[int, Dict[int, int]] = defaultdict(dict)
        self._left: Set[int] = set()
        self._has_lost_some = False  # now; they may come back

    def all_gather(self, key, round_id, vector, members, ended):
        place = _number_of(key), round_id
        others = [rank for rank in members if rank != self.rank]
        message = np.empty(_HEADER + vector.size)
        message[:_HEADER].view(np.int64)[:] = _VECTOR, *place
        message[_HEADER:] = vector
        with self._lock:
            sending = [self._comm.Isend(message, rank, _TAG) for rank in others]

        def is_complete() -> bool:
            nonlocal sending
            with self._lock:
                self._take_in()
                sending = [request for request in sending if not request.Test()]
                arrived = self._mailbox.get(place, {})
                if sending or len(arrived) < len(others):
                    self._check_missing([rank for rank in others if rank not in arrived])
                    return False
                return True

        try:
            _poll(is_complete, ended)
        except MissingProcesses as problem:
            with self._lock:
                self._has_lost_some = True
                arrived = [self.rank, *self._mailbox.pop(place, {})]
            raise MissingProcesses(problem.waited, arrived) from None
        except self._mpi.Exception as problem:
            raise CommunicatorError(f"MPI failed: {problem}") from problem
        finally:
            self._unfinished += sending
        with self._lock:
            rows = {**self._take_out(place), self.rank: vector}
        sizes = {rank: rows[rank].size for rank in members}
        if len(set(sizes.values())) > 1:
            shown = ", ".join(f"process {rank}: {size}" for rank, size in sizes.items())
            raise CommunicatorError(f"the processes brought vectors of different lengths ({shown})")
        return np.stack([rows[rank] for rank in members])

    def abandon(self, reason, highest_round):
        with self._lock:
            abandoned = self._abandoned[self._resumes]
            if self.rank not in abandoned:
                abandoned[self.rank] = highest_round
                self._tell_all(_ABANDONED, self._resumes, highest_round)

    def resume(self, ended):
        def is_complete() -> bool:
            with self._lock:
                self._take_in()
                self._check_missing([rank for rank in range(self.size) if rank not in abandoned])
                return len(abandoned) == self.size

        abandoned = self._abandoned[self._resumes]
        try:
            _poll(is_complete, ended)
        except MissingProcesses as problem:
            raise MissingProcesses(problem.waited, list(abandoned)) from None
        with self._lock:
            self._resumes += 1
            self._has_lost_some = False
            self._highest_given_up = max(abandoned.values())
            for key, round_id in list(self._mailbox):
                if round_id <= self._highest_given_up:
                    del self._mailbox[key, round_id]
            return self._highest_given_up

    def add_subsets(self, subsets):
        pass  # nothing that they need

    def leave(self):
        with self._lock:
            self._tell_all(_LEFT)
        if self._has_lost_some:
            self._finalize_without_them()

    def _finalize_without_them(self) -> None:
        """``MPI_Finalize`` waits for all processes, and these will never come.

        Left to a thread that does not keep the process from ending: MPI counts as finalized as soon as that has begun,
        so that mpi4py does not do it again, and the launcher ends whoever remains of the job.
        """
        # Through ctypes, as mpi4py's keeps Python's lock.
        threading.Thread(target=ctypes.CDLL(self._mpi.__file__).MPI_Finalize, daemon=True).start()
        deadline = time.monotonic() + _FINALIZE_SECONDS
        while not self._mpi.Is_finalized() and time.monotonic() < deadline:
            time.sleep(_LONGEST_SLEEP)

    def _tell_all(self, *numbers: int) -> None:
        """Call with the lock held."""
        message = np.zeros(_HEADER)
        message.view(np.int64)[: len(numbers)] = numbers
        self._unfinished += [self._comm.Isend(message, rank, _TAG) for rank in range(self.size) if rank != self.rank]

    def _take_in(self) -> None:
        """Receive all messages that are there. Call with the lock held."""
        while self._is_message_there():
            found = self._comm.Improbe(self._mpi.ANY_SOURCE, _TAG, self._status)
            if found is None:
                break
            buffer = np.empty(self._status.Get_count(self._mpi.DOUBLE))
            self._arriving.append((found.Irecv(buffer), self._status.source, buffer))
        waiting: List[Tuple[Any, int, np.ndarray]] = []
        for request, rank, message in self._arriving:
            is_next = all(rank != other for _, other, _ in waiting)  # or two could change places
            if is_next and request.Test():
                self._sort_in(rank, message)
            else:
                waiting.append((request, rank, message))
        self._arriving = waiting

    def _take_out(self, place: Tuple[int, int]) -> Dict[int, np.ndarray]:
        """Take the first message of each rank in a round; the others stay. Call with the lock held."""
        waiting = self._mailbox.pop(place, {})
        first = {rank: messages.popleft() for rank, messages in waiting.items()}
        rest = {rank: messages for rank, messages in waiting.items() if messages}
        if rest:
            self._mailbox[place] = rest
        return first

    def _sort_in(self, rank: int, message: np.ndarray) -> None:
        what, key, number = message[:_HEADER].view(np.int64)
        if what == _VECTOR:
            if number > self._highest_given_up:
                self._mailbox[int(key), int(number)].setdefault(rank, deque()).append(message[_HEADER:])
        elif what == _ABANDONED:
            self._abandoned[int(key)][rank] = int(number)
        else:
            self._left.add(rank)

    def _check_missing(self, missing: Sequence[int]) -> None:
        for rank in missing:
            if rank in self._left:
                raise CommunicatorError(f"process {rank} has ended")
            if rank in self._abandoned[self._resumes] and self.rank not in self._abandoned[self._resumes]:
                raise CommunicatorError(
                    f"process {rank} gave the step up (an exception, or gluon_syncbn.abandon_step())"
                )


def _probing(mpi: Any, comm: Any) -> Callable[[], bool]:
    """Make a function that says whether a message is there, as ``comm.Iprobe()`` would, and keeps the interpreter lock.

    mpi4py gives that up in each call, and where other threads run Python it takes up to 5 ms to get it back.
    """
    probe = ctypes.PyDLL(mpi.__file__).MPI_Iprobe
    kind = {ctypes.sizeof(item): item for item in (ctypes.c_int, ctypes.c_void_p)}[mpi._sizeof(mpi.Comm)]
    is_there, status = ctypes.c_int(), ctypes.create_string_buffer(mpi._sizeof(mpi.Status))
    source, tag, handle = ctypes.c_int(mpi.ANY_SOURCE), ctypes.c_int(_TAG), kind.from_address(mpi._addressof(comm))

    def is_message_there() -> bool:
        # After an error, mpi4py's own call is to raise it.
        return any(probe(source, tag, handle, ctypes.byref(is_there), status) or is_there.value for _ in range(_PROBES))

    return is_message_there


@functools.lru_cache(maxsize=None)
def _number_of(key: str) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little", signed=True)


def _poll(is_complete, ended) -> None:
    """Return once ``is_complete()``; raises MissingProcesses once the wait has ended."""
    began = time.monotonic()
    pause = _SHORTEST_SLEEP
    while not is_complete():
        if time.monotonic() - began < _SPIN_SECONDS:
            time.sleep(0)  # to whoever else wants the processor
            continue
        waited = ended()
        if waited is not None:
            raise MissingProcesses(waited)
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_SLEEP)
