"""What connects one layer of this process with the same layer in the other processes of a job."""

import itertools
import os
import threading
from typing import Callable, Dict, List, Optional, Sequence, Tuple

import numpy as np

from gluon_syncbn.distributed.default import find
from gluon_syncbn.distributed.process_group import ProcessGroup
from gluon_syncbn.meeting import active_set
from gluon_syncbn.meeting.processes import Place, Processes, processes_of
from gluon_syncbn.meeting.spec import TIMEOUT_VARIABLE, GroupSpec, check_group_size, default_timeout

# Processes wait for longer than the devices of one: for one that evaluates, or writes a file, while the others train.
DEFAULT_SECONDS = 600.0
_trained: Dict[str, "itertools.count[int]"] = {}  # layers without a place in a net, by name


class Link:
    """Of a group of one layer. It holds while the layer has these devices."""

    def __init__(self, group: ProcessGroup, spec: GroupSpec, go_to_step: Callable[[int], int]):
        self._processes: Processes = processes_of(group)
        self.go_to_step = go_to_step
        if spec.renorm is not None:
            self._processes.add_counted(self)
        self._spec = spec
        self._place: Optional[Place] = None
        self._place_lock = threading.Lock()

    @property
    def first_device(self) -> int:
        """The number of this process's first device among those of all processes, each of which has equally many."""
        return self._processes.group.rank * self._spec.num_devices

    @property
    def size(self) -> int:
        """In processes."""
        return self._processes.group.size

    def exchange(
        self, direction: str, chunk: int, set_id: int, round_id: int, vector: np.ndarray
    ) -> Tuple[np.ndarray, int]:
        """The rows of all processes that have devices in group number ``chunk`` of the layer, and the round.

        Raises
        ------
        SyncBatchNormError
            As in `Processes.exchange`.
        """
        with self._place_lock:  # several groups of the layer may come for the first time together
            if self._place is None:
                self._place = self._place_by_name()
        members = active_set.active_ranks(self._processes.group, set_id, self._members(chunk))
        return self._processes.exchange(
            self._place, chunk, direction, round_id, vector, members, self.seconds, self._spec.where
        )

    @property
    def place(self) -> Optional[Place]:
        """Where the layer stands, once it has trained."""
        return self._place

    def take(self, place: Place) -> None:
        """The layer is about to train, in a net."""
        with self._place_lock:
            if self._place is None:
                self._place = place._replace(subsets=self.subsets())
                if self._place.subsets:
                    self._processes.announce_subsets(place.net)

    def fail(self, text: str) -> None:
        """A round failed among the devices of this process."""
        self._processes.fail(text)

    @property
    def seconds(self) -> float:
        """How long processes wait for each other."""
        return seconds_for_processes(self._spec.timeout)

    def peers(self) -> Sequence[int]:
        """The processes that share the statistics of this one's first device."""
        return self._members(self.first_device // (self._spec.group_size or self._spec.num_devices * self.size))

    def _members(self, chunk: int) -> Sequence[int]:
        """The processes that have devices in this group of the layer."""
        spec = self._spec
        if spec.group_size is None:
            return range(self.size)
        first = chunk * spec.group_size
        return range(first // spec.num_devices, (first + spec.group_size - 1) // spec.num_devices + 1)

    def subsets(self) -> List[Tuple[int, ...]]:
        """The processes of each of its groups, in this process or another."""
        spec = self._spec
        if spec.group_size is None:
            return []
        return [tuple(self._members(chunk)) for chunk in range(self.size * spec.num_devices // spec.group_size)]

    def _place_by_name(self) -> Place:
        spec = self._spec
        number = next(_trained.setdefault(spec.name, itertools.count()))
        key = f"{spec.name}.{number}"
        return Place(key, key, "layer", spec.name, [describe(spec, None)], self.subsets())


def seconds_for_processes(timeout: Optional[float]) -> float:
    """How long processes wait for each other, where this is the ``timeout`` of a layer."""
    if timeout is not None:
        return timeout
    return default_timeout() if TIMEOUT_VARIABLE in os.environ else DEFAULT_SECONDS


def link_of(spec: GroupSpec, go_to_step: Callable[[int], int]) -> Optional[Link]:
    """None where the process is alone. Raises ValueError for a spec whose ``group_size`` cannot be.

    ``go_to_step`` takes the step from which the layer's schedule of Batch Renormalization is to go on if it is not
    further, and returns that with which it does.
    """
    group = find(spec.process_group, spec.where)
    check_group_size(spec.group_size, spec.num_devices, 1 if group is None else group.size, spec.where)
    return None if group is None else Link(group, spec, go_to_step)


def count_processes(process_group, where: str) -> int:
    """That a layer with this option synchronizes."""
    group = find(process_group, where)
    return 1 if group is None else group.size


def describe(spec: GroupSpec, channels: Optional[int]) -> str:
    """What must be the same in all processes but for the name, for them to compare and for users to read."""
    groups = "" if spec.group_size is None else f", groups of {spec.group_size}, {spec.num_devices} devices per process"
    renorm = "" if spec.renorm is None else f", renorm {spec.renorm}"
    return (
        f"'{spec.name}', {spec.dtype}, momentum {spec.momentum:g}, epsilon {spec.epsilon:g}, "
        f"{'with' if spec.scale else 'without'} gamma{groups}{renorm}, {channels or '?'} channels"
    )
