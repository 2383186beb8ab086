"""Carries per-channel vectors between the devices of a layer: the seam where a KVStore is plugged in.

A KVStore adds what its devices push. Adding is not merging, and its order is its own affair, so every rank
pushes a matrix with one row per rank that is zero outside its own row. The sum is then exactly the gathered rows (x + 0
loses nothing), and the arithmetic that follows is done in rank order, alike for every kind of store.
"""

import threading
import weakref
from typing import Dict, List, Sequence, Tuple, Union

import mxnet as mx
import numpy as np

from gluon_syncbn.meeting.host_arrays import HostArrays


def default_kvstore(devices: Sequence[mx.Context]) -> str:
    """``'device'`` where every device is a GPU, so that vectors are added there; ``'local'`` otherwise."""
    return "device" if all(device.device_type == "gpu" for device in devices) else "local"


class KVStoreTransport:
    """All-gathers one vector per device through an MXNet KVStore.

    Parameters
    ----------
    devices : sequence of mx.Context
        In rank order.
    kvstore : str or mx.kv.KVStore, optional
        A name creates a store that lives and dies with this object. By default see `default_kvstore`.
    """

    # MXNet's stores are not made for several threads at once, and a user may hand one store to many layers.
    _lock = threading.Lock()
    # A store keeps a key for ever, so one that a transport has left behind serves the next on the same devices: by
    # store, then by devices and length.
    _free_keys: "weakref.WeakKeyDictionary[mx.kv.KVStore, dict]" = weakref.WeakKeyDictionary()

    def __init__(self, devices: Sequence[mx.Context], kvstore: Union[str, mx.kv.KVStore, None] = None):
        self._devices = list(devices)
        self._hosts = [HostArrays(device) for device in devices]
        kvstore = kvstore or default_kvstore(devices)
        self._store = mx.kv.create(kvstore) if isinstance(kvstore, str) else kvstore
        self._buffers: Dict[Tuple[str, int], tuple] = {}

    def all_gather(self, key: str, vectors: List[np.ndarray]) -> np.ndarray:
        """Return the float64 matrix of shape (devices, length) whose row d is ``vectors[d]``. Blocks until done.

        ``key`` names the sender (layer and direction).
        """
        ranks, length = len(vectors), vectors[0].size
        with self._lock:
            name, slots, result = self._buffers_for(key, ranks, length)
            for rank, vector in enumerate(vectors):
                matrix = np.zeros((ranks, length))
                matrix[rank] = vector
                self._hosts[rank].write(slots[rank], matrix.shape, "float64", matrix)
            self._store.push(name, slots)
            self._store.pull(name, out=result)
            return result.asnumpy()

    def _buffers_for(self, key: str, ranks: int, length: int):
        if (key, length) not in self._buffers:
            slots = [mx.nd.zeros((ranks, length), ctx=device, dtype="float64") for device in self._devices]
            result = mx.nd.zeros((ranks, length), ctx=self._devices[0], dtype="float64")
            free = self._free_keys.setdefault(self._store, {}).setdefault((*self._devices, length), [])
            if free:
                name = free.pop()
            else:
                name = f"{key}/{length}"
                self._store.init(name, result)
            weakref.finalize(self, free.append, name).atexit = False
            for slot in slots:
                slot.wait_to_read()  # or the zeros would overwrite what is written there behind the engine's back
            self._buffers[key, length] = name, slots, result
        return self._buffers[key, length]
