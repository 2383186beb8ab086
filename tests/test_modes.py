"""Prediction mode, frozen statistics and one device are nn.BatchNorm itself; training mode follows the calls."""

import mxnet as mx
import numpy as np
import oracle
import pytest
from delay import Late
from harness import MODES, cpus, observe, random_affine, random_shards, set_mode, step
from mxnet import autograd
from mxnet.gluon import nn

from gluon_syncbn import SyncBatchNorm

pytestmark = pytest.mark.usefixtures("backend")

SHAPES = [(3, 5, 4, 6), (1, 5, 4, 6)]


def make_pair(mode, count=2, dtype="float32", **options):
    """A SyncBatchNorm on ``count`` devices and an nn.BatchNorm on one, with the same parameters."""
    rng = np.random.RandomState(3)
    layer = SyncBatchNorm(in_channels=5, timeout=30, **options)
    plain = nn.BatchNorm(in_channels=5, **options)
    layer.initialize(ctx=cpus(count))
    plain.initialize()
    for name, low in (("gamma", 0.5), ("beta", -1), ("running_mean", -1), ("running_var", 0.5)):
        value = mx.nd.array(rng.uniform(low, 2, 5))
        getattr(layer, name).set_data(value)
        getattr(plain, name).set_data(value)
    for item in (layer, plain):
        item.cast(dtype)
        set_mode(item, mode)
    return layer, plain


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("mode", list(MODES))
def test_prediction_is_batchnorm_to_the_last_bit(mode, dtype, backend):
    layer, plain = make_pair(mode, dtype=dtype)
    # A graph that was traced in training mode must predict like one that was not.
    observe(layer, random_shards(SHAPES, dtype), random_shards(SHAPES, dtype), cpus(2))
    for name in ("running_mean", "running_var"):
        getattr(plain, name).set_data(getattr(layer, name).data(mx.cpu(1)))
    x = random_shards([(2, 5, 3, 3)], dtype, seed=9)[0]
    x[1, 0, 0, 0] = np.nan  # stays in its own image and channel
    expected = plain(mx.nd.array(x, dtype=dtype)).asnumpy()
    for device in cpus(2):
        actual = layer(mx.nd.array(x, ctx=device, dtype=dtype)).asnumpy()
        if backend == "portable" or mode == "imperative" or dtype == "float32":
            np.testing.assert_array_equal(actual, expected)
        else:  # within a graph the compiled operator rounds in another order
            rounding = np.finfo(dtype).eps * np.nanmax(np.abs(expected))
            np.testing.assert_allclose(actual, expected, rtol=0, atol=rounding)


@pytest.mark.parametrize("mode", list(MODES))
def test_frozen_statistics_meet_no_one(mode):
    layer, plain = make_pair(mode, use_global_stats=True)
    shards, heads = random_shards(SHAPES), random_shards(SHAPES, seed=4)
    alone = observe(layer, shards[:1], heads[:1], cpus(1))  # the other device never comes
    expected = observe(plain, shards[:1], heads[:1], cpus(1))
    for actual, wanted in zip(alone, expected):
        np.testing.assert_array_equal(actual, wanted)
    np.testing.assert_array_equal(layer.running_mean.data(mx.cpu(0)).asnumpy(), plain.running_mean.data().asnumpy())


@pytest.mark.parametrize("mode", list(MODES))
def test_one_device_is_batchnorm(mode):
    layer, plain = make_pair(mode, count=1)
    shards, heads = random_shards(SHAPES[:1]), random_shards(SHAPES[:1], seed=4)
    for actual, wanted in zip(observe(layer, shards, heads, cpus(1)), observe(plain, shards, heads, cpus(1))):
        np.testing.assert_array_equal(actual, wanted)


@pytest.mark.parametrize("mode", list(MODES))
def test_running_statistics_change_in_the_forward_pass_in_training_mode_only(mode):
    layer, _ = make_pair(mode)
    devices = cpus(2)
    inputs = [mx.nd.array(shard, ctx=device) for shard, device in zip(random_shards(SHAPES), devices)]

    def statistics():
        return [item.data(device).asnumpy() for item in (layer.running_mean, layer.running_var) for device in devices]

    before = statistics()
    for item in inputs:
        layer(item).wait_to_read()
    assert all(np.array_equal(a, b) for a, b in zip(before, statistics()))
    with autograd.record(train_mode=False):
        outputs = [layer(item) for item in inputs]
    mx.nd.waitall()
    assert all(np.array_equal(a, b) for a, b in zip(before, statistics()))
    with autograd.record():
        outputs = [layer(item) for item in inputs]
    mx.nd.waitall()
    after = statistics()
    assert not any(np.array_equal(a, b) for a, b in zip(before, after))
    autograd.backward(outputs)
    mx.nd.waitall()
    assert all(np.array_equal(a, b) for a, b in zip(after, statistics()))


@pytest.mark.parametrize("mode", list(MODES))
def test_training_and_prediction_take_turns(mode):
    layer, _ = make_pair(mode)
    affine = random_affine(layer, 5)
    for seed in range(3):
        shards, heads = random_shards(SHAPES, seed=seed), random_shards(SHAPES, seed=seed + 5)
        expected = oracle.batch_norm(shards, *affine, heads=heads)
        observed = observe(layer, shards, heads, cpus(2))
        assert oracle.distance(observed.outputs, expected.outputs) < 1e-5
        assert oracle.distance(observed.input_gradients, expected.input_gradients) < 1e-4
        layer(mx.nd.array(shards[0])).wait_to_read()  # one device alone, between steps


class Head(mx.gluon.HybridBlock):
    """One layer called on several feature maps, as a RetinaNet head is on pyramid levels."""

    def __init__(self, times):
        super().__init__()
        self.times = times
        with self.name_scope():
            self.norm = SyncBatchNorm(in_channels=3, timeout=30)

    def hybrid_forward(self, F, x):
        return F.concat(*[self.norm(F.sin(x * (i + 1))) for i in range(self.times)], dim=0)


@pytest.mark.parametrize("mode", list(MODES))
def test_a_layer_that_is_called_several_times_per_step(mode):
    """Backward passes of the calls may come in any order; each must meet its own."""
    times, shapes = 6, [(2, 3, 4, 4), (1, 3, 4, 4), (3, 3, 4, 4)]
    devices = cpus(3)
    head = Head(times)
    head.initialize(ctx=devices)
    set_mode(head, mode)
    for seed in range(5):
        shards = random_shards(shapes, seed=seed)
        heads = random_shards([(times * n, *rest) for n, *rest in shapes], seed=seed + 50)
        outputs, inputs = step(head, shards, heads, devices)
        gradients = [0] * 3
        for i in range(times):
            parts = [item[i * len(shard) : (i + 1) * len(shard)] for item, shard in zip(heads, shards)]
            warped = [np.sin(shard * np.float32(i + 1)) for shard in shards]
            expected = oracle.batch_norm(warped, np.ones(3), np.zeros(3), heads=parts)
            actual = [item.asnumpy()[i * len(shard) : (i + 1) * len(shard)] for item, shard in zip(outputs, shards)]
            assert oracle.distance(actual, expected.outputs) < 1e-5
            chain = [np.cos(shard * (i + 1.0)) * (i + 1) for shard in shards]
            gradients = [g + e * c for g, e, c in zip(gradients, expected.input_gradients, chain)]
        assert oracle.distance([item.grad.asnumpy() for item in inputs], gradients) < 1e-4


@pytest.mark.parametrize("mode", list(MODES))
def test_gradients_through_prediction_mode(mode):
    """Recorded with train_mode=False, as for adversarial examples: whatever nn.BatchNorm gives."""
    layer, plain = make_pair(mode)
    shards, heads = random_shards(SHAPES[:1]), random_shards(SHAPES[:1], seed=4)
    results = []
    for block in (layer, plain):
        x, head = mx.nd.array(shards[0]), mx.nd.array(heads[0])
        x.attach_grad()
        with autograd.record(train_mode=False):
            y = block(x)
        autograd.backward([y], [head], train_mode=False)
        results.append(
            [item.asnumpy() for item in (y, x.grad, block.gamma.grad(mx.cpu(0)), block.beta.grad(mx.cpu(0)))]
        )
    for actual, expected in zip(*results):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", list(MODES))
def test_who_reads_running_statistics_waits_for_the_layers_that_write_them(mode):
    """The first step of a Trainer too, which copies all parameters: in static graphs it lost what came later."""
    net = nn.HybridSequential()
    for _ in range(2):
        net.add(Late(lambda device: 0.1), SyncBatchNorm(in_channels=5, timeout=30))
    net.initialize(ctx=cpus(2))
    set_mode(net, mode)
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.0})
    shards = random_shards(SHAPES)
    expected = oracle.batch_norm(shards, np.ones(5), np.zeros(5))
    step(net, shards, shards, cpus(2))
    trainer.step(4)
    for device in cpus(2):  # read while the net may still run
        np.testing.assert_allclose(net[1].running_mean.data(device).asnumpy(), 0.1 * expected.mean, rtol=1e-4)
        np.testing.assert_allclose(net[1].running_var.data(device).asnumpy(), 0.9 + 0.1 * expected.var, rtol=1e-4)
    with autograd.record():
        outputs = [net(mx.nd.array(shard, ctx=device)) for shard, device in zip(shards, cpus(2))]
    for device in cpus(2):
        np.testing.assert_allclose(net[1].running_mean.data(device).asnumpy(), 0.19 * expected.mean, rtol=1e-4)
    assert len(outputs) == 2
