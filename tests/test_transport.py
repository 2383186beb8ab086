"""Vectors cross devices through a KVStore that the user may choose, and arrive as they were."""

import mxnet as mx
import numpy as np
import oracle
import pytest
from harness import cpus, observe, random_shards

from gluon_syncbn import SyncBatchNorm
from gluon_syncbn.meeting.transport import KVStoreTransport, default_kvstore

STORES = {
    "default": lambda: None,
    "local": lambda: "local",
    "device": lambda: "device",
    "created": lambda: mx.kv.create("local"),
}


def test_the_default_follows_the_devices():
    assert default_kvstore([mx.gpu(0), mx.gpu(1)]) == "device"
    assert default_kvstore([mx.cpu(0), mx.gpu(0)]) == "local"
    assert default_kvstore(cpus(2)) == "local"


@pytest.mark.parametrize("store", list(STORES))
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_gathers_every_row_exactly(ranks, store):
    transport = KVStoreTransport(cpus(ranks), STORES[store]())
    rng = np.random.RandomState(0)
    for length in (1, 7, 7, 1025):
        vectors = [rng.standard_normal(length) * 10.0 ** rng.randint(-300, 300, length) for _ in range(ranks)]
        vectors[0][0] = np.nan
        vectors[-1][-1] = np.inf
        np.testing.assert_array_equal(transport.all_gather("key", vectors), np.stack(vectors))


@pytest.mark.parametrize("store", list(STORES))
def test_a_layer_on_each_store(store):
    shapes = [(3, 5, 4, 6), (1, 5, 4, 6)]
    shards, heads = random_shards(shapes), random_shards(shapes, seed=1)
    layers = [SyncBatchNorm(in_channels=5, timeout=30, kvstore=STORES[store]()) for _ in range(2)]
    for layer in layers:
        layer.initialize(ctx=cpus(2))
        observed = observe(layer, shards, heads, cpus(2))
        expected = oracle.batch_norm(shards, np.ones(5), np.zeros(5), heads=heads)
        assert oracle.distance(observed.outputs, expected.outputs) < 1e-5
        assert oracle.distance(observed.input_gradients, expected.input_gradients) < 1e-4


def test_layers_may_share_a_store():
    store = mx.kv.create("local")
    layers = [SyncBatchNorm(in_channels=5, timeout=30, prefix="same_", kvstore=store) for _ in range(2)]
    for seed, layer in enumerate(layers):
        layer.initialize(ctx=cpus(2))
        shards = random_shards([(2, 5, 3, 3)] * 2, seed=seed)
        outputs = observe(layer, shards, shards, cpus(2)).outputs
        assert oracle.distance(outputs, oracle.batch_norm(shards, np.ones(5), np.zeros(5)).outputs) < 1e-5


def test_a_store_of_the_users_does_not_grow_with_every_layer_that_has_used_it():
    store, made = mx.kv.create("local"), []
    init = store.init
    store.init = lambda key, value: (made.append(key), init(key, value))
    vectors = [np.arange(4.0), np.ones(4)]
    for number in range(5):
        transport = KVStoreTransport(cpus(2), store)
        for direction in ("forward", "backward"):
            gathered = transport.all_gather(f"layer{number}/{direction}", vectors)
            np.testing.assert_array_equal(gathered, np.stack(vectors))
        del transport
    assert made == ["layer0/forward/4", "layer0/backward/4"]
    two = [KVStoreTransport(cpus(2), store) for _ in range(2)]
    for number, transport in enumerate(two):
        np.testing.assert_array_equal(transport.all_gather(f"new{number}", vectors), np.stack(vectors))
    assert made == ["layer0/forward/4", "layer0/backward/4"]  # both at once, one key for each
    KVStoreTransport(cpus(3), store).all_gather("other", [np.ones(4)] * 3)
    assert made[2:] == ["other/4"]
