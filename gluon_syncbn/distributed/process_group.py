"""The processes of a job, and the communicator that carries their messages.

The compiled core exchanges vectors and ends steps that fail (csrc/processes/processes.h has the protocol). A
communicator is a library that connects processes; it carries their messages where they share no memory. A new one is a
subclass of `ProcessGroup`, named in `gluon_syncbn.distributed.default`. The thread of a group takes messages from the
core to send them, and hands messages that arrive to the core.
"""

import contextlib
import ctypes
import functools
import hashlib
import threading
import time
from abc import ABC, abstractmethod
from typing import Any, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np

from gluon_syncbn.base import library
from gluon_syncbn.base.errors import TO_GO_ON, SyncBatchNormError, listed_reasons

_REASONS = listed_reasons(
    "the processes do not run equally many steps: give each equally many batches",
    "a process has ended, or an exception left its step: see gluon_syncbn.abandon_step",
    "a process was slower than the timeout, as one that evaluates while the others train: see timeout= and "
    "GLUON_SYNCBN_TIMEOUT",
    "the processes do not run the same layers",
    end=f"{TO_GO_ON}call gluon_syncbn.abandon_step() in every process, or begin the next step.",
)
_END_SECONDS = 2.0  # for the last messages to be sent, at most
_LOOK_SECONDS = 1e-3  # between two looks whether they are
VECTOR = 0  # the kind of a message that brings something to an exchange


class CommunicatorError(RuntimeError):
    """The communicator cannot connect the processes, or has ended; the text says why."""


class ExchangeError(SyncBatchNormError):
    """An exchange has failed, and so has the step."""


class Message(NamedTuple):
    """A message for other processes, as the core has made it."""

    kind: int
    key: int
    round_id: int
    numbers: np.ndarray  # float64 of shape (n,)
    ranks: Tuple[int, ...]  # of the receivers


class ProcessGroup(ABC):
    """Processes that synchronize with each other. Made by `gluon_syncbn.init_process_group`.

    Attributes
    ----------
    name : str
        The name of the communicator: 'mpi' or 'horovod'.
    can_resume : bool
        Whether a message can go to one process alone. So it shows that its sender has come, hosts can exchange by
        leaders, and the processes can go on together after they have abandoned a step.
    rank, size : int
        The number of this process, from 0, and how many there are.
    """

    name: str
    can_resume: bool
    rank: int
    size: int

    def _begin(self) -> None:
        """Carry messages from now on; rank and size are known. CommunicatorError without the compiled library."""
        if library.core is None:
            raise CommunicatorError(f"several processes need the compiled library: {library.unavailable_reason}")
        self.id: int = library.core.gluon_syncbn_make_processes(
            self.rank, self.size, _REASONS.encode(), self.can_resume
        )
        if self.id < 0:
            raise CommunicatorError("this process has made 1,024 groups of processes; use these again")
        self._has_ended = threading.Event()
        threading.Thread(target=self._carry, name=f"gluon_syncbn {self.name}", daemon=True).start()

    def _carry(self) -> None:
        """Carry messages, on the group's thread."""
        task, what = library.Task(), library.Task
        while task.what != what.END:
            library.core.gluon_syncbn_next_task(self.id, self._pause(), self._is_busy, ctypes.byref(task))
            try:
                if task.what == what.SEND:
                    self._send(_message_of(task))
                elif task.what == what.ASK_WHO_CAME:
                    self._find_out_who_came(_message_of(task))
                elif task.what == what.ABANDON:
                    self._abandon(task.text.decode())
                self._take_in()
            except CommunicatorError as problem:
                self._lose(str(problem))
            except Exception as problem:  # no process may wait for this one then
                self._lose(f"the thread that carries messages has failed: {problem!r}")
        deadline = time.monotonic() + _END_SECONDS
        with contextlib.suppress(Exception):
            while self._is_busy and time.monotonic() < deadline:
                time.sleep(_LOOK_SECONDS)
                self._take_in()
        self._has_ended.set()

    @abstractmethod
    def _pause(self) -> float:
        """Return how many seconds may pass between two calls of `_take_in`, while an exchange waits or `_is_busy`."""

    @property
    @abstractmethod
    def _is_busy(self) -> bool:
        """Whether messages of this process are still on their way."""

    @abstractmethod
    def _send(self, message: Message) -> None:
        """Send a message, without waiting for other processes. Raises CommunicatorError, as the next two do."""

    @abstractmethod
    def _take_in(self) -> None:
        """Hand each message that has arrived to `_receive`."""

    def _find_out_who_came(self, message: Message) -> None:  # noqa: B027
        """Call `_hear_who_came` with each of ``message.ranks`` that has come to its round; not if `can_resume`."""

    def _abandon(self, why: str) -> None:  # noqa: B027
        """The step has failed in this process, and no message can say so: where not `can_resume`."""

    def _receive(self, rank: int, kind: int, key: int, round_id: int, numbers: np.ndarray) -> None:
        """Hand the core a message from this rank."""
        numbers = np.ascontiguousarray(numbers, dtype=np.float64)
        library.core.gluon_syncbn_receive(self.id, rank, kind, key, round_id, library.numbers(numbers), numbers.size)

    def _hear_who_came(self, message: Message, ranks: Optional[Sequence[int]]) -> None:
        """Tell the core which ranks have come to the round of a message; None if that is not known."""
        count = -1 if ranks is None else len(ranks)
        array = library.integers(ranks or ())
        library.core.gluon_syncbn_hear_who_came(self.id, message.key, message.round_id, array, count)

    def _lose(self, why: str) -> None:
        """Tell the core that no more messages come."""
        library.core.gluon_syncbn_lose_transport(self.id, why.encode())

    @property
    def needs_subsets(self) -> bool:
        """Whether processes meet without the others only after `add_subsets`."""
        return False

    def add_subsets(self, subsets: Sequence[Tuple[int, ...]], seconds: float) -> None:  # noqa: B027
        """Let each of these sets of ranks meet without the others. All processes call it, with the same list.

        CommunicatorError if the communicator cannot, or other processes have not come within so many seconds.
        """

    def all_gather(self, key: str, vector: np.ndarray, where: str = "all_gather", seconds: float = 600.0) -> np.ndarray:
        """Return the vectors of all processes, which all have the same length n, as rows of (size, n) in rank order.

        The n-th calls with this key belong together. Raises ExchangeError, starting with ``where``, if a process has
        not come within so many seconds, has ended or has abandoned the step, or if lengths differ.
        """
        vector = np.ascontiguousarray(vector, dtype=np.float64)
        rows = np.empty((self.size, vector.size))
        mine, all_rows = library.numbers(vector), library.numbers(rows)
        exchange = library.core.gluon_syncbn_exchange
        _raise(exchange(self.id, where.encode(), number_of(key), seconds, mine, vector.size, all_rows))
        return rows

    def time_exchanges(self, numbers: int, count: int) -> np.ndarray:
        """Return the microseconds of each of ``count`` exchanges of vectors of ``numbers`` float64 numbers.

        Each begins when the previous one has ended, as exchanges of layers do. All processes call it together. Raises
        as `all_gather`.
        """
        microseconds = np.empty(count)
        key = number_of(f"time.{numbers}")
        _raise(library.core.gluon_syncbn_time_exchanges(self.id, key, numbers, count, library.numbers(microseconds)))
        return microseconds

    def fail(self, error: str) -> None:
        """Let the step fail in this process, unless it has failed before."""
        library.core.gluon_syncbn_fail_processes(self.id, error.encode())

    @property
    def failure(self) -> str:
        """Why the step has failed; empty if it has not."""
        return library.core.gluon_syncbn_failure_of_processes(self.id).decode()

    @property
    def state(self) -> library.State:
        """Where the processes stand with each other."""
        state = library.State()
        library.core.gluon_syncbn_state_of_processes(self.id, ctypes.byref(state))
        return state

    def abandon(self, is_under_way: bool, step: int = -1) -> None:
        """Abandon a step that has failed, or that ``is_under_way``, so that no process waits for this one.

        ``step``: its number, if others may abandon the same step.
        """
        why = library.core.gluon_syncbn_abandon(self.id, is_under_way, step).decode()
        if why and not (self.can_resume or self.shares_memory):
            self._abandon(why)

    def resume(self, where: str, seconds: float) -> None:
        """Return when all processes have abandoned the step. ExchangeError, starting with ``where``, if they do not."""
        _raise(library.core.gluon_syncbn_resume(self.id, where.encode(), seconds))

    def name_processes(self, names: Sequence[str]) -> None:
        """Set the names of hosts, which errors put after the ranks."""
        library.core.gluon_syncbn_name_processes(self.id, library.strings(names), len(names))

    @property
    def shares_memory(self) -> bool:
        """Whether messages go through memory within a host."""
        return bool(self.state.shares_memory)

    def offer_memory(self, size: int) -> Tuple[str, str]:
        """Make memory that so many processes may share. Return its address, for `join_memory`, and the error."""
        problem = ctypes.c_char_p()
        where = library.core.gluon_syncbn_offer_memory(self.id, size, ctypes.byref(problem))
        return where.decode(), (problem.value or b"").decode()

    def join_memory(self, where: str, ranks: Sequence[int]) -> str:
        """Map the memory that these ranks share, and receive messages by it. Return the error, or ""."""
        array = library.integers(ranks)
        return library.core.gluon_syncbn_join_memory(self.id, where.encode(), array, len(ranks)).decode()

    def use_memory(self, all_have_joined: bool) -> None:
        """Send messages by the memory from now on, or drop it."""
        library.core.gluon_syncbn_use_memory(self.id, all_have_joined)

    def leave(self) -> None:
        """End: the other processes no longer wait for this one."""
        library.core.gluon_syncbn_leave(self.id, _END_SECONDS)
        self._has_ended.wait(2 * _END_SECONDS)

    def __repr__(self) -> str:
        return f"<ProcessGroup {self.name!r}: process {self.rank} of {self.size}>"


def _message_of(task: library.Task) -> Message:
    numbers = np.ctypeslib.as_array(task.numbers, (task.num_numbers,)).copy() if task.num_numbers else np.empty(0)
    return Message(task.kind, task.key, task.round_id, numbers, tuple(task.ranks[: task.num_ranks]))


def _raise(error: bytes) -> None:
    if error:
        raise ExchangeError(error.decode())


@functools.lru_cache(maxsize=None)
def number_of(key: str) -> int:
    """The key as a number, for the core."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little", signed=True)


# A user's choice of processes: a name, a group that exists, or a communicator or process set of the library.
ProcessGroupLike = Union[str, ProcessGroup, Any]
NAMES = ("auto", "horovod", "mpi", "none")


def check_process_group(process_group: Optional[ProcessGroupLike], where: str) -> None:
    """ValueError or TypeError, starting with ``where``, if it can be no process group."""
    if isinstance(process_group, str):
        if process_group not in NAMES:
            raise ValueError(f"{where}: process_group must be one of {', '.join(NAMES)}, not {process_group!r}.")
        return
    is_communicator = hasattr(process_group, "Idup") and hasattr(process_group, "Isend")
    is_group = process_group is None or isinstance(process_group, ProcessGroup)
    if not (is_group or is_communicator or is_process_set(process_group)):
        raise TypeError(
            f"{where}: process_group must be a name, what init_process_group returned, a communicator of mpi4py, or a "
            f"process set of Horovod, not {type(process_group).__name__}."
        )


def is_process_set(item) -> bool:
    """Whether it is a process set of Horovod."""
    return hasattr(item, "process_set_id") and hasattr(item, "included")
