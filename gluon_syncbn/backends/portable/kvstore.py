"""Brings the vectors of a layer's devices together through a KVStore, where the user gave one.

All devices are of this process, so their vectors only have to be stacked. A KVStore adds what its devices push. Adding
is not merging, and its order is its own affair, so every rank pushes a matrix with one row per rank that is zero
outside its own row. The sum is then exactly the gathered rows (x + 0 loses nothing), and the arithmetic that follows is
done in rank order, alike for every kind of store.
"""

import threading
import weakref
from typing import Dict, List, Sequence, Tuple, Union

import mxnet as mx
import numpy as np


class _Stores:
    def __init__(self) -> None:
        # MXNet's stores are not made for several threads at once, and a user may hand one store to many layers.
        self._lock = threading.Lock()
        self._by_name: Dict[str, mx.kv.KVStore] = {}
        # A store keeps a key for ever, so all vectors of one length on the same devices share one, and its arrays.
        self._keys: weakref.WeakKeyDictionary[mx.kv.KVStore, Dict[Tuple, tuple]] = weakref.WeakKeyDictionary()

    def all_gather(
        self, rows: np.ndarray, devices: Sequence[mx.Context], kvstore: Union[str, mx.kv.KVStore]
    ) -> np.ndarray:
        """The float64 ``rows``, one of each device, as they come out of the store. Blocks until done."""
        with self._lock:
            if isinstance(kvstore, str):
                kvstore = self._by_name.get(kvstore) or self._by_name.setdefault(kvstore, mx.kv.create(kvstore))
            key, slots, result = self._buffers(kvstore, rows, devices)
            for rank, slot in enumerate(slots):
                alone = np.zeros_like(rows)
                alone[rank] = rows[rank]
                slot[:] = alone
            kvstore.push(key, slots)
            kvstore.pull(key, out=result)
            return result.asnumpy()

    def _buffers(
        self, kvstore: mx.kv.KVStore, rows: np.ndarray, devices: Sequence[mx.Context]
    ) -> Tuple[str, List[mx.nd.NDArray], mx.nd.NDArray]:
        known = self._keys.setdefault(kvstore, {})
        purpose = (*map(str, devices), rows.shape[1])
        if purpose not in known:
            slots = [mx.nd.zeros(rows.shape, ctx=device, dtype="float64") for device in devices]
            result = mx.nd.zeros(rows.shape, ctx=devices[0], dtype="float64")
            key = f"gluon_syncbn/{'/'.join(map(str, purpose))}"
            kvstore.init(key, result)
            known[purpose] = key, slots, result
        return known[purpose]


stores = _Stores()
