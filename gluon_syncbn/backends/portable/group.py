"""The groups of the portable back end: the devices that share one layer's statistics, and where they meet.

The protocol is the one in csrc/meeting/rendezvous.h, for devices that have a thread each. The devices that have come
sleep; the last one computes the result of all vectors, outside of the lock. The sleepers leave an exchange through a
KVStore that does not return after one more timeout.
"""

import threading
import time
import weakref
from functools import partial
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, Union

import mxnet as mx
import numpy as np

from gluon_syncbn.backends.interface import LayerGroup, groups
from gluon_syncbn.base import library
from gluon_syncbn.base.errors import SyncBatchNormError
from gluon_syncbn.distributed.default import find
from gluon_syncbn.layer.spec import LayerSpec, check_groups
from gluon_syncbn.meeting import waiting
from gluon_syncbn.meeting.active_set import absent_text, active_sets
from gluon_syncbn.meeting.statistics import merge


class _Round:
    def __init__(self, number: int, num_ranks: int):
        self.number, self.opened = number, time.monotonic()
        self.vectors: List[Any] = [None] * num_ranks
        self.result: Any = None
        self.error = ""

    def is_done(self) -> bool:
        return self.result is not None or bool(self.error)

    def missing(self) -> List[int]:
        return [rank for rank, vector in enumerate(self.vectors) if vector is None]


class Rendezvous:
    """The meeting point of some devices, for one direction.

    ``what`` begins its errors, and ``advice`` ends those about missing devices; ``ranks`` are the names of the devices.
    """

    def __init__(
        self,
        what: str,
        ranks: Sequence[str],
        timeout: float,
        exchange: Callable[[List[np.ndarray]], Any],
        advice: Callable[[], str] = lambda: "",
    ):
        self._what, self._ranks, self._timeout = what, list(ranks), timeout
        self._exchange, self._advice = exchange, advice
        self._rounds: Dict[int, _Round] = {}
        self._changed = threading.Condition()
        self._opened = 0  # rounds, so far

    def all_reduce(self, rank: int, vector: np.ndarray, key: int = 0) -> Tuple[Any, int]:
        """Bring ``vector``. Returns the result of the vectors of all ranks, and the number of the round.

        Raises
        ------
        SyncBatchNormError
            The same text on every rank that took part: a rank did not arrive within the timeout, or arrived twice, or
            the exchange failed.
        """
        with self._changed:
            if key not in self._rounds:
                self._opened += 1
                self._rounds[key] = _Round(self._opened, len(self._ranks))
            current = self._rounds[key]
            if current.vectors[rank] is not None:
                self._fail(current, self._twice_text(current, rank), key)
            current.vectors[rank] = vector
            is_last = not current.missing()
            if is_last:
                del self._rounds[key]
            else:
                self._sleep(current, key)
        if is_last:
            self._lead(current)
        if current.error:
            raise SyncBatchNormError(current.error)
        return current.result, current.number

    def _sleep(self, current: _Round, key: int) -> None:
        def has_gathered() -> bool:
            return current.is_done() or not current.missing()

        waited = waiting.wait(self._changed, current.opened, self._timeout, has_gathered)
        if waited is not None:
            self._fail(current, self._missing_text(current, waited), key)
        elif not self._changed.wait_for(current.is_done, self._timeout + waiting.GRACE_SECONDS):
            self._fail(current, f"{self._what}: all devices arrived, but the exchange between them did not return.")

    def _lead(self, current: _Round) -> None:
        result, error = None, ""
        try:
            sizes = [vector.size for vector in current.vectors]
            if len(set(sizes)) > 1:
                listed = ", ".join(f"{name}: {size}" for name, size in zip(self._ranks, sizes))
                raise ValueError(f"the devices brought vectors of different lengths ({listed})")
            result = self._exchange(current.vectors)
        except Exception as problem:  # every sleeper gets it
            error = f"{self._what}: the exchange between devices failed: {problem}"
        with self._changed:
            if not current.is_done():
                current.result, current.error = result, error
            self._changed.notify_all()

    def _fail(self, current: _Round, error: str, key: Optional[int] = None) -> None:
        current.error = error
        if key is not None:
            del self._rounds[key]
        self._changed.notify_all()

    def _named(self, ranks: Sequence[int]) -> str:
        return ", ".join(self._ranks[rank] for rank in ranks)

    def _twice_text(self, current: _Round, rank: int) -> str:
        return (
            f"{self._what}: {self._ranks[rank]} arrived twice before {self._named(current.missing())} arrived. Every "
            f"device must run this layer equally often per step, and in the same order."
        )

    def _missing_text(self, current: _Round, waited: waiting.Waited) -> str:
        missing = current.missing()
        arrived = [rank for rank in range(len(self._ranks)) if rank not in missing]
        return (
            f"{self._what} {waited.text(f'{len(missing)} of {len(self._ranks)} devices')}. "
            f"Arrived: {self._named(arrived)}. Missing: {self._named(missing)}. {waited.advice(self._advice())}"
        ).rstrip()


class Group(LayerGroup):
    """A `LayerGroup`. Without devices it is open: it takes in the first ``spec.num_devices`` that come."""

    def __init__(self, spec: LayerSpec, devices: Sequence[mx.Context]):
        super().__init__(spec, devices)
        self._changed = threading.Condition()
        # By active set: the rank of each device, and its rendezvous of both directions.
        self._members: Dict[int, Dict[mx.Context, Tuple[int, Rendezvous, Rendezvous]]] = {}
        self._seconds = spec.seconds  # a variable that is no number shows here

    def connect(self) -> None:
        where = self.spec.where
        if find(self.spec.process_group, where) is not None:
            raise RuntimeError(
                f"{where}: it runs on the portable back end, which does not synchronize several processes."
            )
        if library.core is not None and library.core.gluon_syncbn_is_profiling():
            raise RuntimeError(f"{where}: gluon_syncbn.profile() does not see layers on the portable back end.")
        check_groups(self.spec, self.spec.num_devices)

    def member(self, device: mx.Context, set_id: int) -> Tuple[int, Rendezvous, Rendezvous]:
        """The rank of a device in this active set, and its rendezvous of both directions."""
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

    def _make_members(self, set_id: int) -> Dict[mx.Context, Tuple[int, Rendezvous, Rendezvous]]:
        members = {}
        for neighbours in self.spec.groups_of(self.devices).values():
            devices = [device for device in neighbours if active_sets.includes(device, set_id)]
            both = (
                self._rendezvous("forward", devices, merge),
                self._rendezvous("backward", devices, partial(np.sum, axis=0)),
            )
            members.update({device: (rank, *both) for rank, device in enumerate(devices)})
        return members

    def _rendezvous(self, direction: str, devices: List[mx.Context], reduce: Callable) -> Rendezvous:
        def exchange(vectors: List[np.ndarray]):
            rows, kvstore = np.stack(vectors), self.spec.kvstore
            return reduce(rows if kvstore is None else _stores.all_gather(rows, devices, kvstore))

        what = f"{self.spec.where}: {direction} pass"
        return Rendezvous(what, list(map(str, devices)), self._seconds, exchange, waiting.usual_reasons)

    def _wait_for_devices(self, device: mx.Context) -> None:
        """Wait in the first round of an open group until all of its devices have come."""
        size = self.spec.num_devices or 0
        if device not in self.devices:
            self.devices.append(device)
        if len(self.devices) == size:
            self.devices.sort(key=lambda item: (item.device_type, item.device_id))
            self._changed.notify_all()
        waited = waiting.wait(self._changed, time.monotonic(), self._seconds, lambda: len(self.devices) == size)
        if waited is not None:
            raise SyncBatchNormError(
                f"{self.spec.where}: forward pass {waited.text(f'{size - len(self.devices)} of {size} devices')}. "
                f"Arrived: {', '.join(map(str, self.devices))}. Missing: devices that have never run it; it was made "
                f"for num_devices={size}. {waited.advice(waiting.usual_reasons())}"
            )


def find_group(reference: str) -> Group:
    """The group that a graph names: a group of this process by its id, or one that is made here of a description.

    Raises
    ------
    KeyError
        The layer of that id is gone, or lives in another process.
    """
    if "{" in reference:
        return Group(LayerSpec.from_json(reference), [])
    group = groups.of_layers.get(int(reference))
    if not isinstance(group, Group):
        raise KeyError(
            f"no SyncBatchNorm layer number {reference} in this process. Its layer was dropped, or another process has "
            f"run this graph: save the net, or the symbol from which the graph was made."
        )
    return group


class _Stores:
    """KVStores through which the vectors of devices are exchanged, where the user gave one.

    A store adds what devices push, in an order of its own. So each device pushes a matrix that is zero outside its own
    row: the sum is exactly the rows (x + 0 loses nothing), and these are merged in rank order as without a store.
    """

    def __init__(self) -> None:
        # MXNet's stores are not made for several threads at once, and a user may hand one store to many layers.
        self._lock = threading.Lock()
        self._by_name: Dict[str, mx.kv.KVStore] = {}
        # A store keeps a key for ever, so all vectors of one length on the same devices share one, and its arrays.
        self._arrays: weakref.WeakKeyDictionary[mx.kv.KVStore, Dict[str, tuple]] = weakref.WeakKeyDictionary()

    def all_gather(
        self, rows: np.ndarray, devices: Sequence[mx.Context], kvstore: Union[str, mx.kv.KVStore]
    ) -> np.ndarray:
        """The float64 ``rows``, one of each device, as they come out of the store. Blocks until done."""
        with self._lock:
            if isinstance(kvstore, str):
                kvstore = self._by_name.get(kvstore) or self._by_name.setdefault(kvstore, mx.kv.create(kvstore))
            known = self._arrays.setdefault(kvstore, {})
            key = "/".join(map(str, ["gluon_syncbn", *devices, rows.shape[1]]))
            if key not in known:
                made = [mx.nd.zeros(rows.shape, ctx=device, dtype="float64") for device in (*devices, devices[0])]
                kvstore.init(key, made[-1])
                known[key] = made[:-1], made[-1]
            slots, result = known[key]
            for rank, slot in enumerate(slots):
                alone = np.zeros_like(rows)
                alone[rank] = rows[rank]
                slot[:] = alone
            kvstore.push(key, slots)
            kvstore.pull(key, out=result)
            return result.asnumpy()


_stores = _Stores()
