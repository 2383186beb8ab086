"""Vectors cross devices through a KVStore that the user may choose, and arrive as they were."""

from concurrent.futures import ThreadPoolExecutor

import mxnet as mx
import numpy as np
import oracle
import pytest
from harness import HANG, cpus, observe, random_shards

from gluon_syncbn import SyncBatchNorm
from gluon_syncbn.backends.portable.kvstore import all_gather

STORES = {
    "none": lambda: None,
    "local": lambda: "local",
    "device": lambda: "device",
    "created": lambda: mx.kv.create("local"),
}


@pytest.mark.parametrize("store", list(STORES))
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_gathers_every_row_exactly(ranks, store):
    kvstore = STORES[store]()
    rng = np.random.RandomState(0)
    for length in (1, 7, 7, 1025):
        vectors = [rng.standard_normal(length) * 10.0 ** rng.randint(-300, 300, length) for _ in range(ranks)]
        vectors[0][0] = np.nan
        vectors[-1][-1] = np.inf
        np.testing.assert_array_equal(all_gather(vectors, cpus(ranks), kvstore), np.stack(vectors))


@pytest.mark.parametrize("store", list(STORES))
def test_a_layer_on_each_store(store):
    shapes = [(3, 5, 4, 6), (1, 5, 4, 6)]
    shards, heads = random_shards(shapes), random_shards(shapes, seed=1)
    layers = [SyncBatchNorm(in_channels=5, timeout=30, backend="portable", kvstore=STORES[store]()) for _ in range(2)]
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
    for number in range(5):
        layer = SyncBatchNorm(in_channels=5, timeout=30, kvstore=store, prefix=f"layer{number}_")
        layer.initialize(ctx=cpus(2))
        shards = random_shards([(2, 5, 3, 3)] * 2, seed=number)
        for _ in range(2):
            observe(layer, shards, shards, cpus(2))
    there_and_back = ["gluon_syncbn/cpu(0)/cpu(1)/11", "gluon_syncbn/cpu(0)/cpu(1)/10"]
    assert made == there_and_back  # a count, a mean and an M2 each; two sums each
    all_gather([np.ones(4)] * 3, cpus(3), store)
    assert made == [*there_and_back, "gluon_syncbn/cpu(0)/cpu(1)/cpu(2)/4"]


def test_it_goes_through_the_store_that_was_given():
    store, pushed = mx.kv.create("local"), []
    push = store.push
    store.push = lambda key, value: (pushed.append(key), push(key, value))
    vectors = [np.arange(4.0), np.ones(4)]
    np.testing.assert_array_equal(all_gather(vectors, cpus(2), store), np.stack(vectors))
    assert len(pushed) == 1
    store.pull = lambda key, out: out.__setitem__(slice(None), 7)
    assert (all_gather(vectors, cpus(2), store) == 7).all()


def test_layers_that_meet_at_the_same_time_share_a_store():
    """Vectors of one length have one key, and threads of several devices come at once."""
    store = mx.kv.create("local")

    def gather(number):
        vectors = [np.full(9, 2.0 * number), np.full(9, 2.0 * number + 1)]
        for _ in range(50):
            np.testing.assert_array_equal(all_gather(vectors, cpus(2), store), np.stack(vectors))

    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(gather, number) for number in range(4)]:
            future.result(timeout=HANG)
