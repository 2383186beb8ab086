"""Copies of a layer, by `copy` and by `pickle`, are layers of their own: same results, a group of their own."""

import copy
import pickle
import threading

import mxnet as mx
import numpy as np
import oracle
import pytest
from harness import cpus, random_affine, random_shards, run_python, step
from mxnet import gluon
from mxnet.gluon import nn

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm

WAYS = {"deepcopy": copy.deepcopy, "pickle": lambda block: pickle.loads(pickle.dumps(block))}
DEVICES = cpus(2)
SHAPE = (2, 3, 4, 5)


def make(backend, **options):
    layer = SyncBatchNorm(in_channels=3, backend=backend, **options)
    layer.initialize(ctx=DEVICES)
    random_affine(layer, 3)
    return layer


def run(layer, seed=0):
    outputs, inputs = step(layer, random_shards([SHAPE] * 2, seed=seed), random_shards([SHAPE] * 2, seed=9), DEVICES)
    return [item.asnumpy() for item in (*outputs, *(item.grad for item in inputs))]


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("used", [False, True], ids=["new", "used"])
def test_a_copy_does_the_same_and_nothing_is_shared(backend, way, used):
    layer = make(backend, timeout=30, activation="relu")
    if used:
        run(layer)
    made = WAYS[way](layer)
    assert type(made) is SyncBatchNorm and made._sync.options == layer._sync.options and repr(made) == repr(layer)
    for name in ("gamma", "beta", "running_mean", "running_var"):
        theirs, ours = getattr(made, name), getattr(layer, name)
        assert theirs is not ours and theirs.name == ours.name and theirs.list_ctx() == DEVICES
        assert (theirs.data(DEVICES[1]).asnumpy() == ours.data(DEVICES[1]).asnumpy()).all()
    before = layer.running_mean.data(DEVICES[0]).asnumpy()
    results = run(made, seed=3)
    assert (layer.running_mean.data(DEVICES[0]).asnumpy() == before).all()
    assert all(np.array_equal(a, b) for a, b in zip(results, run(layer, seed=3)))
    assert made._sync._group is not layer._sync._group
    shards = random_shards([SHAPE] * 2, seed=3)
    affine = (layer.gamma.data(DEVICES[0]).asnumpy(), layer.beta.data(DEVICES[0]).asnumpy())
    expected = oracle.batch_norm(shards, *affine)
    assert oracle.distance(results[:2], [np.maximum(y, 0) for y in expected.outputs]) < 4e-6


@pytest.mark.parametrize("way", list(WAYS))
def test_a_whole_net(backend, way):
    """With a layer that is in it twice, which stays one."""
    shared = make(backend)
    net = nn.HybridSequential()
    net.add(shared, nn.Conv2D(3, 1), SyncBatchNorm(backend=backend), shared)
    net[1].initialize(ctx=DEVICES)
    net[2].initialize(ctx=DEVICES)
    run(net)
    made = WAYS[way](net)
    assert made[0] is made[3] and made[0] is not shared
    assert all(np.array_equal(a, b) for a, b in zip(run(made), run(net)))


def test_a_store_of_the_users_is_shared():
    store = mx.kv.create("local")
    layer = make("portable", kvstore=store)
    expected = run(layer)
    made = copy.deepcopy(layer)
    assert made._sync.options.kvstore is store
    assert all(np.array_equal(a, b) for a, b in zip(run(made), expected))


def test_a_symbol_block(backend):
    data = mx.sym.var("data")
    out = mx.sym.BatchNorm(
        mx.sym.Convolution(data, kernel=(1, 1), num_filter=3, name="conv"), name="bn", fix_gamma=False
    )
    block = gluon_syncbn.convert_sync_batchnorm(gluon.SymbolBlock(out, data), backend=backend)
    (norm,) = block.hidden_blocks()
    assert repr(norm).startswith("SyncBatchNorm(axis=1,") and f"in_channels=None, backend='{backend}')" in repr(norm)
    block.initialize(ctx=DEVICES)
    made = copy.deepcopy(block)
    (other,) = made.hidden_blocks()
    assert other is not norm and other.running_mean is made.params["bn_moving_mean"]
    run(block)
    for name, parameter in block.params.items():
        made.params[name].set_data(parameter.data(DEVICES[0]))
    assert all(np.array_equal(a, b) for a, b in zip(run(made), run(block)))


def test_shallow_copies_do_not_share_a_lock(backend):
    layer = make(backend)
    made = copy.copy(layer)
    assert made.gamma is layer.gamma and made._sync._group is None
    locks = [item._sync._group_lock for item in (layer, made)]
    assert isinstance(locks[1], type(threading.Lock())) and locks[0] is not locks[1]


def test_hybridizing_again_is_silent(backend):
    """A net that has run in a static graph is hybridized anew, as GluonCV's SSD is before each validation."""
    code = """
import warnings
import mxnet as mx
from mxnet.gluon import nn
import gluon_syncbn
warnings.simplefilter("error", UserWarning)
net = nn.HybridSequential()
net.add(nn.Conv2D(4, 3), gluon_syncbn.SyncBatchNorm())
net.initialize(ctx=[mx.cpu(0), mx.cpu(1)])
before = None
for _ in range(3):
    net.hybridize(static_alloc=True, static_shape=True)
    for _ in range(2):
        with mx.autograd.record():
            outputs = [net(mx.nd.random.normal(shape=(2, 3, 8, 8)).as_in_context(mx.cpu(i))) for i in range(2)]
        mx.autograd.backward(outputs)
        for parameter in net.collect_params(".*running.*").values():
            first, second = (parameter.data(mx.cpu(i)).asnumpy() for i in range(2))
            assert (first == second).all()
        assert before is None or (before != first).any()
        before = first
print("SILENT")
"""
    done = run_python(code)
    assert done.stdout.strip() == "SILENT" and "hook" not in done.stderr, done.stdout + done.stderr
