"""The devices that synchronize now: all, or those that `gluon_syncbn.devices` has named.

In a job of several processes a set also has the processes with devices in it. A set has an id; 0 is all devices. A
forward pass reads the id in force when it *runs*, some time after Python has started it, and hands it to its backward
pass. `gluon_syncbn.devices` waits for all pending work on its way in and out, so that the set changes only while
nothing runs.
"""

from typing import Any, FrozenSet, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

import mxnet as mx

from gluon_syncbn.base import library
from gluon_syncbn.distributed.process_group import ProcessGroup


class _ActiveSet(NamedTuple):
    devices: Optional[FrozenSet[mx.Context]]  # of this process; None is all
    ranks: FrozenSet[Tuple[ProcessGroup, Tuple[int, ...]]]  # with devices in it


class ActiveSets:
    """All sets of devices that have been in force."""

    def __init__(self) -> None:
        self._sets: List[_ActiveSet] = [_ActiveSet(None, frozenset())]  # by id
        self.current = 0  # the id of the set in force
        self.trained: Optional[Set[Any]] = None  # the layers that were called to train with it; None with all devices

    def note(self, layers: Iterable[Any]) -> None:
        """Note layers that are called to train."""
        if self.trained is not None:
            self.trained.update(layers)

    def id_of(self, devices: Iterable[mx.Context], ranks: Mapping[ProcessGroup, Sequence[int]]) -> int:
        wanted = _ActiveSet(frozenset(devices), frozenset((group, tuple(some)) for group, some in ranks.items()))
        if wanted not in self._sets:
            self._sets.append(wanted)
        return self._sets.index(wanted)

    def active_ranks(self, group: ProcessGroup, set_id: int, members: Sequence[int]) -> Sequence[int]:
        """The ranks among ``members`` that have devices in this set."""
        chosen = dict(self._sets[set_id].ranks).get(group)
        return members if chosen is None else [rank for rank in members if rank in chosen]

    def includes(self, device: mx.Context, set_id: int) -> bool:
        devices = self._sets[set_id].devices
        return devices is None or device in devices

    def use(self, set_id: int) -> None:
        """Put this set in force, on both back ends. No operator may be running."""
        self.current = set_id
        if library.core is not None:
            names = sorted(str(device) for device in self._sets[set_id].devices or ())
            library.core.gluon_syncbn_use_active_set(set_id, library.strings(names), len(names))


active_sets = ActiveSets()


def absent_text(layer: str, device: mx.Context) -> str:
    """The error of a device that runs a layer in training although `gluon_syncbn.devices` has not named it."""
    return (
        f"SyncBatchNorm '{layer}': ran on {device} in training mode, which is not in the list of "
        f"gluon_syncbn.devices(...)."
    )
