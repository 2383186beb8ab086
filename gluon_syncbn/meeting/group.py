"""The groups of the portable back end: which devices share one layer's statistics, and where each meets the others."""

import itertools
import threading
import time
import weakref
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np

from gluon_syncbn.base.errors import SyncBatchNormError
from gluon_syncbn.meeting import active_set, profile, waiting
from gluon_syncbn.meeting.link import Link, link_of
from gluon_syncbn.meeting.processes import BACKWARD, FORWARD
from gluon_syncbn.meeting.rendezvous import Rendezvous
from gluon_syncbn.meeting.renorm import Limits, limits_at
from gluon_syncbn.meeting.spec import GroupReference, GroupSpec, LayerGroup, subgroups
from gluon_syncbn.meeting.statistics import Moments, add_ranks, merge
from gluon_syncbn.meeting.transport import KVStoreTransport
from gluon_syncbn.mxnet_engine import failures
from gluon_syncbn.mxnet_engine.cpu_resources import settings_in_force

_ids = itertools.count()
_groups: "weakref.WeakValueDictionary[int, Group]" = weakref.WeakValueDictionary()


def next_id() -> int:
    """The id by which a graph names a group; no two groups of this process share one."""
    failures.begin_use()
    return next(_ids)


class Membership(NamedTuple):
    """Where a device meets those that it synchronizes with."""

    rank: int
    forward: Rendezvous
    backward: Rendezvous


class _Exchanges:
    """What the leader of a round does: gathers what its process brought, and exchanges that with the others."""

    def __init__(self, transport: KVStoreTransport, key: str, link: Optional[Link], chunk: int, set_id: int):
        self._transport = transport
        self._key = key
        self._link = link
        self._chunk = chunk
        self._set_id = set_id

    def moments(self, vectors: List[np.ndarray], _: int) -> Tuple[Moments, Optional[int]]:
        """Of all, and the number of the round across processes, if there are others."""
        moments = merge(self._transport.all_gather(f"{self._key}/{FORWARD}", vectors))
        if self._link is None:
            return moments, None
        rows, round_id = self._link.exchange(FORWARD, self._chunk, self._set_id, 0, moments.pack())
        return merge(rows), round_id

    def sums(self, vectors: List[np.ndarray], round_id: int) -> np.ndarray:
        sums = add_ranks(self._transport.all_gather(f"{self._key}/{BACKWARD}", vectors))
        if self._link is None:
            return sums
        return add_ranks(self._link.exchange(BACKWARD, self._chunk, self._set_id, round_id, sums)[0])


class Group(LayerGroup):
    """The synchronization of one layer over its devices.

    Parameters
    ----------
    spec : GroupSpec
        Its ``group_size`` splits the devices into neighbours that synchronize among themselves.
    devices : sequence of mx.Context
        In rank order: the order in which the parameters were initialised; `check_devices` has accepted them. None for a
        group that is open: it takes in the first ``spec.num_devices`` that come.
    """

    def __init__(self, spec: GroupSpec, devices: Sequence[mx.Context]):
        self.spec = spec
        self.devices: List[mx.Context] = list(devices)
        self._is_connected = False
        self._id = next_id()
        self._changed = threading.Condition()
        self._members: Dict[int, Dict[mx.Context, Membership]] = {}  # by active set
        self._steps: Dict[mx.Context, int] = {}  # see `_step_of`
        self._common_step = 0
        self._occasion = (0, 0)
        self._seconds = spec.seconds  # a variable that is no number shows here
        if self.devices:
            KVStoreTransport(self.devices, spec.kvstore)  # and one that cannot be made
        _groups[self._id] = self

    @property
    def reference(self) -> GroupReference:
        return GroupReference(str(self._id), self.spec, self.devices)

    def connect(self) -> Optional[Link]:
        with self._changed:
            if not self._is_connected:
                self.link, self._is_connected = link_of(self.spec, self.go_to_step), True
            return self.link

    def rounds(self, set_id: int) -> int:
        members = self._members.get(set_id, {}).values()
        return sum(member.forward.rounds for member in members if member.rank == 0)

    def _make_members(self, set_id: int) -> Dict[mx.Context, Membership]:
        members = {}
        first = 0 if self.link is None else self.link.first_device
        for chunk, neighbours in subgroups(self.devices, self.spec.group_size, first).items():
            devices = [device for device in neighbours if active_set.includes(device, set_id)]
            if not devices:
                continue
            transport = KVStoreTransport(devices, self.spec.kvstore)
            key = f"{self.spec.name}/{self._id}/{set_id}/{devices[0]}"
            exchanges = _Exchanges(transport, key, self.link, chunk, set_id)
            forward = self._rendezvous(FORWARD, devices, exchanges.moments)
            backward = self._rendezvous(BACKWARD, devices, exchanges.sums)
            for rank, device in enumerate(devices):
                members[device] = Membership(rank, forward, backward)
        return members

    def _rendezvous(self, direction: str, devices: List[mx.Context], exchange: Callable) -> Rendezvous:
        more = {} if self.link is None else {"exchange_timeout": self.link.seconds, "on_failure": self.link.fail}
        names = [str(device) for device in devices]
        what = f"{self.spec.where}: {direction} pass"
        return Rendezvous(what, names, self._seconds, exchange, usual_reasons, **more)

    def all_reduce_moments(self, device: mx.Context, local: Moments, set_id: int) -> Tuple[Moments, int, Limits]:
        """The moments of the whole mini-batch, the id of this forward round, and how far it may be renormalized."""
        member = self._membership_of(device, set_id)
        if self.spec.renorm is not None:
            local = local._replace(step=self._step_of(device))
        arrived = time.monotonic()
        (moments, number), round_id = member.forward.all_reduce(member.rank, local.pack())
        self._note(device, FORWARD, member.forward, round_id, arrived)
        step = int(moments.step or 0)
        if self.spec.renorm is not None:
            with self._changed:
                self._steps[device] = max(step, self._step_of(device)) + 1
        return moments, round_id if number is None else number, limits_at(self.spec.renorm, step)

    def _step_of(self, device: mx.Context) -> int:
        """The step of the layer that comes next on ``device``, for the schedule of Batch Renormalization.

        Devices that meet bring theirs, and take the latest. Those that do not (in other subgroups, or left out of a
        short step) go on together whenever nothing runs: when the active set changes, or a step is given up.
        """
        occasion = active_set.changes(), failures.generation()
        with self._changed:
            if occasion != self._occasion:
                self._occasion = occasion
                self._common_step = max([self._common_step, *self._steps.values()])
                self._steps.clear()
            return max(self._common_step, self._steps.get(device, 0))

    def go_to_step(self, least: int) -> int:
        with self._changed:
            self._common_step = max(self._common_step, least)
            return max([self._common_step, *self._steps.values()])

    def all_reduce_sums(self, device: mx.Context, local: np.ndarray, round_id: int, set_id: int) -> np.ndarray:
        """The sum of what all devices bring to the backward passes that answer forward round ``round_id``."""
        member = self._membership_of(device, set_id)
        arrived = time.monotonic()
        result = member.backward.all_reduce(member.rank, local, key=round_id).result
        self._note(device, BACKWARD, member.backward, round_id, arrived)
        return result

    def _note(self, device: mx.Context, direction: str, place: Rendezvous, round_id: int, arrived: float) -> None:
        if profile.is_on():
            times = None, arrived, time.monotonic(), None
            profile.note(profile.Pass(self.spec.name, str(device), direction, id(place), round_id, *times))

    def _membership_of(self, device: mx.Context, set_id: int) -> Membership:
        spec = self.spec
        with self._changed:
            if not (self.devices or spec.num_devices):
                raise ValueError(
                    f"{spec.where}: its graph does not say on how many devices it trains. Give num_devices where the "
                    f"layer is made, or call hybridize() again after initialize()."
                )
            self.connect()
            if len(self.devices) < spec.num_devices:
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
        size = self.spec.num_devices
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
                f"{usual_reasons()}"
            )


def find_group(reference: str) -> Group:
    """The group that a graph names: one of this process by its id, or one made here and now of a description.

    Raises
    ------
    KeyError
        The layer of that id is gone, or lives in another process.
    """
    if "{" in reference:
        return Group(GroupSpec.from_json(reference), [])
    group = _groups.get(int(reference))
    if group is None:
        raise KeyError(
            f"no SyncBatchNorm layer number {reference} in this process. Its layer was dropped, or this graph was "
            f"exported from a synchronized net: call convert_batchnorm(net) before you export."
        )
    return group


def absent_text(name: str, device: mx.Context) -> str:
    """What to say of a device that runs a layer although `gluon_syncbn.devices` has not named it."""
    return (
        f"SyncBatchNorm '{name}': ran on {device} in training mode, which is not in the list of "
        f"gluon_syncbn.devices(...)."
    )


def usual_reasons() -> str:
    """The end of every error about a missing device."""
    reasons = (
        "Usual reasons: (1) not every device ran this layer in this step (a last batch with fewer images than "
        "devices: see gluon_syncbn.devices; a branch on one device; an exception in this or an earlier step: see "
        "gluon_syncbn.abandon_step; an output read, or a process forked, before all devices were started); "
        "(2) the net's parameters live on more devices than are training; (3) a device was slower than the timeout "
        "(timeout=, GLUON_SYNCBN_TIMEOUT)"
    )
    settings = settings_in_force()
    if settings:
        reasons += f"; (4) several CPU contexts ran out of temp-space slots or random generators (now {settings})"
    return f"{reasons}. To go on, call gluon_syncbn.abandon_step(), or begin the next step."
