"""The group of devices that share one layer's statistics: who they are, how long they wait, what they exchange."""

import itertools
import json
import math
import os
import threading
import time
import weakref
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np

from gluon_syncbn.engine.cpu_resources import rings_in_force
from gluon_syncbn.meeting import active_set, waiting
from gluon_syncbn.meeting.rendezvous import Rendezvous, SyncBatchNormError
from gluon_syncbn.meeting.statistics import Moments, add_ranks, merge
from gluon_syncbn.meeting.transport import KVStoreTransport, check_kvstore

DEFAULT_TIMEOUT = 60.0

_numbers = itertools.count()
_groups = weakref.WeakValueDictionary()


def next_number() -> int:
    """A number by which a graph names a group; no two groups of this process share one."""
    return next(_numbers)


def default_timeout() -> float:
    """Seconds from the environment variable ``GLUON_SYNCBN_TIMEOUT``, else 60."""
    return check_timeout(os.environ.get("GLUON_SYNCBN_TIMEOUT", DEFAULT_TIMEOUT), "GLUON_SYNCBN_TIMEOUT")


def check_timeout(value, where: str) -> float:
    """``value`` as seconds; ValueError, starting with ``where``, unless it is a positive finite number."""
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = float("nan")
    if not 0 < seconds <= threading.TIMEOUT_MAX:
        raise ValueError(f"{where}: the timeout must be a positive number of seconds, not {value!r}.")
    return seconds


class Options(NamedTuple):
    """What a layer's user chose; together with its devices it makes a group."""

    num_devices: Optional[int]
    group_size: Optional[int]
    timeout: Optional[float]
    kvstore: object

    def seconds(self) -> float:
        """The timeout, or its default."""
        return default_timeout() if self.timeout is None else self.timeout


class Description(NamedTuple):
    """A group as a graph describes it that no layer owns; the text of this makes the same group in another process.

    Which devices there are is not known before they come, only how many: 0 if that was not said either, and then it can
    not train. ``dtype`` is that of parameters and statistics.
    """

    name: str
    num_devices: int
    group_size: Optional[int]
    timeout: Optional[float]
    kvstore: Optional[str]
    dtype: str
    momentum: float
    epsilon: float
    scale: bool

    @property
    def reference(self) -> str:
        """The text by which a graph names this group."""
        return json.dumps(self._asdict())

    @property
    def on_gpu(self) -> bool:
        return mx.context.num_gpus() > 0

    @classmethod
    def parse(cls, reference: str) -> "Description":
        """The group that a text describes; the text may come from any file.

        Raises
        ------
        ValueError
            It describes none, or one that could not work.
        """
        try:
            described = cls(**json.loads(reference))
        except (TypeError, ValueError) as problem:
            raise ValueError(f"a SyncBatchNorm node describes its group as {reference!r}: {problem}.") from None
        described.check()
        return described

    def check(self) -> None:
        """ValueError for numbers that could not work, whoever wrote them."""
        where = f"SyncBatchNorm '{self.name}'"
        for option, value, least in (("num_devices", self.num_devices, 0), ("group_size", self.group_size, 1)):
            if value is None and option == "group_size":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{where}: {option} must be a positive integer, not {value!r}.")
        if self.num_devices % (self.group_size or 1):
            raise ValueError(f"{where}: group_size={self.group_size} does not divide num_devices={self.num_devices}.")
        if self.timeout is not None:
            check_timeout(self.timeout, where)
        if self.dtype not in ("float32", "float64"):
            raise ValueError(f"{where}: dtype must be 'float32' or 'float64', not {self.dtype!r}.")
        for option, value in (("momentum", self.momentum), ("eps", self.epsilon)):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise ValueError(f"{where}: {option} must be a number, not {value!r}.")
        if not isinstance(self.scale, bool):
            raise ValueError(f"{where}: scale must be true or false, not {self.scale!r}.")
        check_kvstore(self.kvstore, where)

    def options(self) -> Options:
        return Options(self.num_devices, self.group_size, self.timeout, self.kvstore)


class Group:
    """The synchronization of one layer over its devices.

    Parameters
    ----------
    name : str
        The layer's name, for errors.
    devices : sequence of mx.Context
        In rank order: the order in which the parameters were initialised; `check_devices` has accepted them. None for a
        group that is open: it takes in the first ``options.num_devices`` that come.
    options : Options
        ``group_size`` splits the devices into neighbours that synchronize among themselves.
    dtype : str
        Of statistics and parameters.
    momentum, epsilon, scale :
        As in `nn.BatchNorm`.
    """

    def __init__(
        self,
        name: str,
        devices: Sequence[mx.Context],
        options: Options,
        dtype: str,
        momentum: float,
        epsilon: float,
        scale: bool,
    ):
        self.name = name
        self.devices = list(devices)
        self.dtype = dtype
        self.momentum = momentum
        self.epsilon = epsilon
        self.scale = scale
        self.number = next_number()
        self._options = options
        self._size = len(self.devices) or options.num_devices
        self._timeout = options.seconds()
        self._changed = threading.Condition()
        self._places: Dict[int, Dict[mx.Context, Place]] = {}  # by participants
        if self.devices:
            self._place_of(self.devices[0], active_set.EVERYONE)  # a KVStore that cannot be made shows here
        _groups[self.number] = self

    @property
    def reference(self) -> str:
        """The text by which a graph names this group."""
        return str(self.number)

    @property
    def on_gpu(self) -> bool:
        return self.devices[0].device_type == "gpu"

    def rounds(self, participants: int) -> int:
        """How many forward passes were met by exactly these participants."""
        places = self._places.get(participants, {}).values()
        return sum(place.forward.rounds for place in places if place.rank == 0)

    def _make_places(self, participants: int) -> Dict[mx.Context, "Place"]:
        places = {}
        for neighbours in neighbourhoods(self.devices, self._options):
            members = [device for device in neighbours if active_set.takes_part(device, participants)]
            if not members:
                continue
            transport = KVStoreTransport(members, self._options.kvstore)
            key = f"{self.name}{self.number}/{participants}/{members[0]}"
            forward = self._rendezvous("forward", members, key, transport, merge)
            backward = self._rendezvous("backward", members, key, transport, add_ranks)
            for rank, device in enumerate(members):
                places[device] = Place(rank, forward, backward)
        return places

    def _rendezvous(
        self,
        direction: str,
        members: List[mx.Context],
        key: str,
        transport: KVStoreTransport,
        reduce: Callable[[np.ndarray], Any],
    ) -> Rendezvous:
        what = f"SyncBatchNorm '{self.name}': {direction} pass"
        ranks = [str(device) for device in members]
        return Rendezvous(
            what,
            ranks,
            self._timeout,
            lambda vectors: reduce(transport.all_gather(f"{key}/{direction}", vectors)),
            usual_reasons,
        )

    def meet_forward(self, device: mx.Context, moments: Moments, participants: int) -> Tuple[Moments, int]:
        """The moments of the whole mini-batch, and the number of this forward pass."""
        place = self._place_of(device, participants)
        meeting = place.forward.meet(place.rank, moments.pack())
        return meeting.result, meeting.number

    def meet_backward(self, device: mx.Context, sums: np.ndarray, number: int, participants: int) -> np.ndarray:
        """The sum of ``sums`` over the backward passes that answer forward pass ``number``."""
        place = self._place_of(device, participants)
        return place.backward.meet(place.rank, sums, key=number).result

    def _place_of(self, device: mx.Context, participants: int) -> "Place":
        with self._changed:
            if not self._size:
                raise ValueError(
                    f"SyncBatchNorm '{self.name}': its graph does not say on how many devices it trains. Give "
                    f"num_devices where the layer is made, or call hybridize() again after initialize()."
                )
            if len(self.devices) < self._size:
                self._wait_for_devices(device)
            if participants not in self._places:
                self._places[participants] = self._make_places(participants)
            place = self._places[participants].get(device)
        if place is not None:
            return place
        if device in self.devices:
            raise ValueError(absent_text(self.name, device))
        shown = ", ".join(str(item) for item in self.devices)
        raise ValueError(
            f"SyncBatchNorm '{self.name}': its graph was built for {shown}, and now runs on {device}. "
            f"Call hybridize() again after the parameters have moved to other devices; load a symbol again before it "
            f"is bound to other devices."
        )

    def _wait_for_devices(self, device: mx.Context) -> None:
        """The first round of an open group: returns when as many devices as it has are there."""
        if device not in self.devices:
            self.devices.append(device)
        if len(self.devices) == self._size:
            self.devices.sort(key=lambda item: (item.device_type, item.device_id))
            self._changed.notify_all()
        waited = waiting.wait(self._changed, time.monotonic(), self._timeout, lambda: len(self.devices) == self._size)
        if waited is not None:
            arrived = ", ".join(map(str, self.devices))
            raise SyncBatchNormError(
                f"SyncBatchNorm '{self.name}': forward pass "
                f"{waited.text(f'{self._size - len(self.devices)} of {self._size} devices')}. Arrived: {arrived}. "
                f"Missing: devices that have never run it; it was made for num_devices={self._size}. {usual_reasons()}"
            )


class Place(NamedTuple):
    """Where a device meets those that it synchronizes with."""

    rank: int
    forward: Rendezvous
    backward: Rendezvous


def neighbourhoods(devices: Sequence[mx.Context], options: Options) -> List[List[mx.Context]]:
    """The devices in groups of ``options.group_size``, in rank order."""
    size = options.group_size or len(devices)
    return [list(devices[start : start + size]) for start in range(0, len(devices), size)]


def absent_text(name: str, device: mx.Context) -> str:
    """What to say of a device that runs a layer although `gluon_syncbn.devices` has not named it."""
    return (
        f"SyncBatchNorm '{name}': ran on {device} in training mode, which is not in the list of "
        f"gluon_syncbn.devices(...)."
    )


def find_group(reference: str) -> Group:
    """The group that a graph names: one of this process by its number, or one made here and now of a description.

    Raises
    ------
    KeyError
        The layer of that number is gone, or lives in another process.
    """
    if "{" in reference:
        described = Description.parse(reference)
        return Group(
            described.name,
            [],
            described.options(),
            described.dtype,
            momentum=described.momentum,
            epsilon=described.epsilon,
            scale=described.scale,
        )
    number = int(reference)
    group = _groups.get(number)
    if group is None:
        raise KeyError(
            f"no SyncBatchNorm layer number {number} in this process. Its layer was dropped, or this graph was "
            f"exported from a synchronized net: call convert_batchnorm(net) before you export."
        )
    return group


def check_devices(name: str, devices: Sequence[mx.Context], options: Options) -> None:
    """Refuse a group that could never meet.

    Raises
    ------
    ValueError
        A device is given twice, their number is not ``num_devices``, or ``group_size`` does not divide it.
    RuntimeError
        MXNet runs on its NaiveEngine, where no device could ever wait for another.
    """
    shown = ", ".join(str(device) for device in devices)
    if len(set(devices)) != len(devices):
        raise ValueError(f"SyncBatchNorm '{name}': its parameters name one device twice ({shown}).")
    if options.num_devices is not None and options.num_devices != len(devices):
        raise ValueError(
            f"SyncBatchNorm '{name}': num_devices={options.num_devices}, but its parameters live on {len(devices)} "
            f"({shown}). Initialize the net on the devices that train, or leave num_devices out."
        )
    if options.group_size is not None and len(devices) % options.group_size:
        raise ValueError(
            f"SyncBatchNorm '{name}': group_size={options.group_size} does not divide its {len(devices)} devices "
            f"({shown})."
        )
    check_engine(name, len(devices))


def check_engine(name: str, num_devices: int) -> None:
    """RuntimeError if MXNet runs on its NaiveEngine, where no device could ever wait for another."""
    if num_devices > 1 and os.environ.get("MXNET_ENGINE_TYPE") == "NaiveEngine":
        raise RuntimeError(
            f"SyncBatchNorm '{name}': MXNET_ENGINE_TYPE=NaiveEngine runs one operator at a time, so {num_devices} "
            f"devices could never meet. Unset it, or debug on one device."
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
    rings = rings_in_force()
    if not rings:
        return reasons + "."
    return reasons + f"; (4) several CPU contexts ran out of temp-space slots or random generators (now {rings})."
