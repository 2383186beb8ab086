"""The interface of a communicator, a library that connects processes: all that the rest of the package knows of it.

A new one is a subclass of `ProcessGroup`, named in `gluon_syncbn.distributed.default`.
"""

from abc import ABC, abstractmethod
from typing import Any, Callable, Optional, Sequence, Tuple, Union

import numpy as np

# Called from time to time by who waits: None, or, once the wait is to end, how long it was and why. What it returns
# goes into `MissingProcesses` as it is.
Ended = Callable[[], Any]


class CommunicatorError(RuntimeError):
    """The communicator cannot connect the processes, or does so no more; the text says why."""


class MissingProcesses(RuntimeError):
    """A wait for other processes has ended in vain.

    ``arrived`` are ranks, or None where they are not known. ``suspects`` are those of whom one or more are missing;
    None means all that have not arrived.
    """

    def __init__(self, waited: Any, arrived: Optional[Sequence[int]] = None, suspects: Optional[Sequence[int]] = None):
        super().__init__("a process did not come")
        self.waited, self.arrived, self.suspects = waited, arrived, suspects


class ProcessGroup(ABC):
    """Processes that synchronize with each other. Made by `gluon_syncbn.init_process_group`.

    Attributes
    ----------
    name : str
        The name of the communicator: 'mpi' or 'horovod'.
    meets_in_pairs : bool
        Whether two processes can meet without the others, at no more cost than all together.
    can_resume : bool
        Whether the processes can go on together after a step that was given up.
    rank, size : int
        The number of this process, from 0, and how many there are.
    """

    name: str
    meets_in_pairs: bool
    can_resume: bool
    rank: int
    size: int

    @abstractmethod
    def all_gather(
        self, key: str, round_id: int, vector: np.ndarray, members: Sequence[int], ended: Ended
    ) -> np.ndarray:
        """Bring a vector, and return those of all members. Blocks; several threads may call it for different keys.

        Parameters
        ----------
        key : str
            The same on all processes.
        round_id : int
            Which of the rounds under this key; each process brings one vector to each, in any order.
        vector : np.ndarray
            float64 of shape (n,), on all processes of the same n.
        members : sequence of int
            Ranks that take part, in order, this process among them.
        ended : callable
            Ends the wait.

        Returns
        -------
        np.ndarray
            float64 of shape (members, n), in their order.

        Raises
        ------
        MissingProcesses
            The wait has ended.
        CommunicatorError
            The processes are not connected any more, a process gave the step up, or vectors differ in length.
        """

    @abstractmethod
    def abandon(self, reason: str, highest_round: int) -> None:
        """Give a step up: whoever waits for this process need not wait any longer.

        ``highest_round`` is the highest number that it has given a round. It goes on with `resume`, if it can.
        """

    @abstractmethod
    def resume(self, ended: Ended) -> int:
        """Return after `abandon`, when all processes have called it: the highest round of all.

        Raises
        ------
        MissingProcesses, CommunicatorError
            As in `all_gather`.
        """

    @abstractmethod
    def add_subsets(self, subsets: Sequence[Tuple[int, ...]]) -> None:
        """Let these ranks meet without the others. Collective, with the same list on all processes.

        Raises
        ------
        CommunicatorError
            The communicator cannot.
        """

    @abstractmethod
    def leave(self) -> None:
        """The process ends: whoever waits for it need not wait any longer."""

    def __repr__(self) -> str:
        return f"<ProcessGroup {self.name!r}: process {self.rank} of {self.size}>"


# What a user may give for one: a name, or one that exists, of ours or of the library's.
ProcessGroupLike = Union[str, ProcessGroup, Any]

# What a name may be; 'none' keeps to the devices of the process.
NAMES = ("auto", "horovod", "mpi", "none")


def check_process_group(process_group: Optional[ProcessGroupLike], where: str) -> None:
    """ValueError or TypeError, starting with ``where``, for what can be no process group."""
    if isinstance(process_group, str):
        if process_group not in NAMES:
            raise ValueError(f"{where}: process_group must be one of {', '.join(NAMES)}, not {process_group!r}.")
    elif not (process_group is None or isinstance(process_group, ProcessGroup) or _is_of_library(process_group)):
        raise TypeError(
            f"{where}: process_group must be a name, what init_process_group returned, a communicator of mpi4py, or a "
            f"process set of Horovod, not {type(process_group).__name__}."
        )


def _is_of_library(item) -> bool:
    return is_process_set(item) or (hasattr(item, "Idup") and hasattr(item, "Isend"))  # a communicator


def is_process_set(item) -> bool:
    """Whether it is one of Horovod's."""
    return hasattr(item, "process_set_id") and hasattr(item, "included")
