"""The connection of one layer of this process with the same layer in the other processes of a job."""

import threading
from typing import Callable, List, Optional, Sequence, Tuple

from mxnet.gluon import Block

from gluon_syncbn.base.errors import SyncBatchNormError
from gluon_syncbn.distributed.default import find
from gluon_syncbn.distributed.process_group import ProcessGroup, number_of
from gluon_syncbn.layer.spec import Facts, LayerSpec, check_groups
from gluon_syncbn.meeting.active_set import active_sets
from gluon_syncbn.meeting.positions import Place
from gluon_syncbn.meeting.processes import Processes, processes_of, seconds_for_processes


class Link:
    """The link of one layer's group, for as long as the layer has these devices."""

    def __init__(self, group: ProcessGroup, spec: LayerSpec):
        self._processes: Processes = processes_of(group)
        self._spec = spec
        self._num_devices = spec.num_devices or 0
        self._devices_per_group = spec.group_size or self._num_devices * group.size
        self.size = group.size  # in processes
        self.processes_id = group.id  # for the core
        # The number of this process's first device among the devices of all processes, which have equally many.
        self.first_device = group.rank * self._num_devices
        self.place: Optional[Place] = None  # the layer's position in its net, once it has trained
        self._place_lock = threading.Lock()

    def prepare(self, chunk: int, set_id: int) -> Tuple[int, Sequence[int]]:
        """Let the processes that have devices in group number ``chunk`` of the layer exchange vectors.

        Returns the key of their exchanges, and their ranks. Raises as `Processes.together`.
        """
        with self._place_lock:  # several groups of the layer may come for the first time together
            if self.place is None:
                name = self._spec.name
                key = f"{name}.{self._processes.count_layers(name)}"
                self.place = Place(key, key, "layer", name, [self._spec.facts(None)], self._subsets())
        self._meet(self.place, set_id)
        members = active_sets.active_ranks(self._processes.group, set_id, self._members(chunk))
        # Whoever exchanges under a key does so each time, so all number its rounds alike.
        return number_of(f"{self.place.key}.{chunk}.{tuple(members)}"), members

    def take_place(self, layer: Block, facts: Callable[[Block, ProcessGroup], Facts]) -> None:
        """Find the layer's place in the net that is about to train; ``facts`` describes a layer of a process group."""
        group = self._processes.group
        place = self._processes.nets.place_of(layer, lambda block: facts(block, group))
        with self._place_lock:
            if self.place is not None:
                return
            self.place = place._replace(subsets=self._subsets())
        if self.place.subsets and self._processes.group.needs_subsets:
            with self._processes.in_order:  # of the program
                self._meet(self.place, active_sets.current)

    def _meet(self, place: Place, set_id: int) -> None:
        """Let the processes compare the net, and make its sets of processes. All of them must train it, the first time.

        Raises as `Processes.together`.
        """
        group, where = self._processes.group, f"{self._spec.where}: forward pass"
        idle = set(range(group.size)).difference(active_sets.active_ranks(group, set_id, range(group.size)))
        if idle and not self._processes.knows(place):
            error = (
                f"{where}: the net trains for the first time, and gluon_syncbn.devices gives process {min(idle)} no "
                f"devices. Train a first step on all processes."
            )
            group.fail(error)
            raise SyncBatchNormError(error)
        with self._processes.together(where, self._spec.timeout, place):
            pass

    @property
    def seconds(self) -> float:
        """How long processes wait for each other."""
        return seconds_for_processes(self._spec.timeout)

    def peers(self) -> Sequence[int]:
        """The processes that share the statistics of this one's first device."""
        return self._members(self.first_device // self._devices_per_group)

    def _members(self, chunk: int) -> Sequence[int]:
        """The ranks that have devices in this group of the layer."""
        first = chunk * self._devices_per_group
        last = first + self._devices_per_group - 1
        return range(first // self._num_devices, last // self._num_devices + 1)

    def _subsets(self) -> List[Tuple[int, ...]]:
        """The ranks of each group of the layer, in this process or another."""
        groups = self.size * self._num_devices // self._devices_per_group
        return [tuple(self._members(chunk)) for chunk in range(groups)] if groups > 1 else []


def link_of(spec: LayerSpec) -> Optional[Link]:
    """The link of a layer; None if the process is alone. ValueError if the groups do not divide its devices."""
    group = find(spec.process_group, spec.where)
    check_groups(spec, spec.num_devices)
    return None if group is None else Link(group, spec)
