"""The groups of the portable back end: which devices share one layer's statistics, and where each meets the others."""

import threading
import time
import weakref
from typing import Callable, Dict, List, NamedTuple, Sequence, Tuple

import mxnet as mx
import numpy as np

from gluon_syncbn.backends.interface import LayerGroup
from gluon_syncbn.backends.portable.kvstore import stores
from gluon_syncbn.backends.portable.rendezvous import Rendezvous
from gluon_syncbn.base.errors import SyncBatchNormError
from gluon_syncbn.distributed.default import find
from gluon_syncbn.layer.decision import check_groups
from gluon_syncbn.layer.spec import LayerSpec
from gluon_syncbn.meeting import profile, waiting
from gluon_syncbn.meeting.active_set import absent_text, active_sets
from gluon_syncbn.meeting.processes import BACKWARD, FORWARD
from gluon_syncbn.meeting.statistics import Moments, add_ranks, merge

_groups: "weakref.WeakValueDictionary[int, Group]" = weakref.WeakValueDictionary()


class Membership(NamedTuple):
    """The rendezvous where a device meets those that it synchronizes with."""

    rank: int
    forward: Rendezvous
    backward: Rendezvous


class Group(LayerGroup):
    """A `LayerGroup`. Without devices it is open: it takes in the first ``spec.num_devices`` that come."""

    def __init__(self, spec: LayerSpec, devices: Sequence[mx.Context]):
        super().__init__(spec, devices)
        self._changed = threading.Condition()
        self._members: Dict[int, Dict[mx.Context, Membership]] = {}  # by active set
        self._seconds = spec.seconds  # a variable that is no number shows here
        _groups[self.id] = self

    def connect(self) -> None:
        if find(self.spec.process_group, self.spec.where) is not None:
            raise RuntimeError(
                f"{self.spec.where}: it runs on the portable back end, which does not synchronize several processes."
            )
        if profile.is_on:
            raise RuntimeError(
                f"{self.spec.where}: gluon_syncbn.profile() does not see layers on the portable back end."
            )
        check_groups(self.spec, self.spec.num_devices)

    def rounds(self, set_id: int) -> int:
        members = self._members.get(set_id, {}).values()
        return sum(member.forward.rounds for member in members if member.rank == 0)

    def all_reduce_moments(self, device: mx.Context, local: Moments, set_id: int) -> Tuple[Moments, int]:
        """The moments of the whole mini-batch, and the id of this forward round."""
        member = self._membership_of(device, set_id)
        return member.forward.all_reduce(member.rank, local.pack())

    def all_reduce_sums(self, device: mx.Context, local: np.ndarray, round_id: int, set_id: int) -> np.ndarray:
        """The sum of what all devices bring to the backward passes that answer forward round ``round_id``."""
        member = self._membership_of(device, set_id)
        return member.backward.all_reduce(member.rank, local, key=round_id).result

    def _make_members(self, set_id: int) -> Dict[mx.Context, Membership]:
        members = {}
        for neighbours in self.spec.groups_of(self.devices).values():
            devices = [device for device in neighbours if active_sets.includes(device, set_id)]
            forward = self._rendezvous(FORWARD, devices, merge)
            backward = self._rendezvous(BACKWARD, devices, add_ranks)
            for rank, device in enumerate(devices):
                members[device] = Membership(rank, forward, backward)
        return members

    def _rendezvous(self, direction: str, devices: List[mx.Context], reduce: Callable) -> Rendezvous:
        def exchange(vectors: List[np.ndarray]):
            rows, kvstore = np.stack(vectors), self.spec.kvstore
            return reduce(rows if kvstore is None else stores.all_gather(rows, devices, kvstore))

        what = f"{self.spec.where}: {direction} pass"
        return Rendezvous(what, list(map(str, devices)), self._seconds, exchange, waiting.usual_reasons)

    def _membership_of(self, device: mx.Context, set_id: int) -> Membership:
        spec = self.spec
        with self._changed:
            if not (self.devices or spec.num_devices):
                raise ValueError(
                    f"{spec.where}: its graph does not say on how many devices it trains. Give num_devices where the "
                    f"layer is made, or call hybridize() again after initialize()."
                )
            self.connect()
            if len(self.devices) < (spec.num_devices or 0):
                self._wait_for_devices(device)
            if set_id not in self._members:
                self._members[set_id] = self._make_members(set_id)
            member = self._members[set_id].get(device)
        if member is not None:
            return member
        if device in self.devices:
            raise ValueError(absent_text(spec.name, device))
        shown = ", ".join(str(item) for item in self.devices)
        raise ValueError(
            f"{spec.where}: its graph was built for {shown}, and now runs on {device}. Call hybridize() again after "
            f"the parameters have moved to other devices; load a symbol again before it is bound to other devices."
        )

    def _wait_for_devices(self, device: mx.Context) -> None:
        """The first round of an open group: returns when as many devices as it has are there."""
        size = self.spec.num_devices or 0
        if device not in self.devices:
            self.devices.append(device)
        if len(self.devices) == size:
            self.devices.sort(key=lambda item: (item.device_type, item.device_id))
            self._changed.notify_all()
        waited = waiting.wait(self._changed, time.monotonic(), self._seconds, lambda: len(self.devices) == size)
        if waited is not None:
            arrived = ", ".join(map(str, self.devices))
            raise SyncBatchNormError(
                f"{self.spec.where}: forward pass {waited.text(f'{size - len(self.devices)} of {size} devices')}. "
                f"Arrived: {arrived}. Missing: devices that have never run it; it was made for num_devices={size}. "
                f"{waited.advice(waiting.usual_reasons())}"
            )


def find_group(reference: str) -> Group:
    """The group that a graph names: one of this process by its id, or one made here and now of a description.

    Raises
    ------
    KeyError
        The layer of that id is gone, or lives in another process.
    """
    if "{" in reference:
        return Group(LayerSpec.from_json(reference), [])
    group = _groups.get(int(reference))
    if group is None:
        raise KeyError(
            f"no SyncBatchNorm layer number {reference} in this process. Its layer was dropped, or this is a graph "
            f"that another process has run: save the net, or the symbol that it is of."
        )
    return group
