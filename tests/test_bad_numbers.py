"""NaN, infinity, constant channels, single values and huge means: nothing is lost, nothing is made up."""

import mxnet as mx
import numpy as np
import oracle
import pytest
from harness import MODES, cpus, observe, random_shards, run_python, set_mode
from mxnet.gluon import nn

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm

pytestmark = [pytest.mark.usefixtures("backend"), pytest.mark.parametrize("mode", list(MODES))]

SHAPE = (2, 3, 4, 5)


def run(shards, heads, mode, **options):
    devices = cpus(len(shards))
    layer = SyncBatchNorm(in_channels=shards[0].shape[1], timeout=20, **options)
    layer.initialize(ctx=devices)
    return layer, observe(set_mode(layer, mode), shards, heads, devices)


def reference(shards, heads):
    """`nn.BatchNorm` on the concatenated batch."""
    layer = nn.BatchNorm(in_channels=shards[0].shape[1])
    layer.initialize()
    return layer, observe(layer, [np.concatenate(shards)], [np.concatenate(heads)], [mx.cpu(0)])


@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_in_one_shard_reach_every_device(value, activation, mode):
    shards, heads = random_shards([SHAPE] * 3), random_shards([SHAPE] * 3, seed=1)
    shards[1][0, 1, 2, 2] = value
    layer, seen = run(shards, heads, mode, activation=activation)
    plain, expected = reference(shards, heads)
    assert np.isnan(expected.outputs[0]).sum() == 3 * 2 * 4 * 5  # one channel, every image
    for ours, theirs in (
        (np.concatenate(seen.outputs), expected.outputs[0]),
        (np.concatenate(seen.input_gradients), expected.input_gradients[0]),
        (seen.gamma_gradient, expected.gamma_gradient),
    ):
        np.testing.assert_array_equal(np.isnan(ours), np.isnan(theirs))
    for device in cpus(3):
        # nn.BatchNorm's running mean becomes infinite where ours becomes NaN; neither can be mistaken for a number.
        for name in ("running_mean", "running_var"):
            ours, theirs = getattr(layer, name).data(device).asnumpy(), getattr(plain, name).data().asnumpy()
            np.testing.assert_array_equal(np.isfinite(ours), np.isfinite(theirs))


def test_nan_in_a_gradient_reaches_every_device(mode):
    shards, heads = random_shards([SHAPE] * 2), random_shards([SHAPE] * 2, seed=1)
    heads[1][0, 1, 2, 2] = np.nan
    _, seen = run(shards, heads, mode)
    for gradient in seen.input_gradients:
        assert np.isnan(gradient[:, 1]).all()
        assert np.isfinite(gradient[:, [0, 2]]).all()


def test_constant_channels(mode):
    shards, heads = [np.full(SHAPE, 7, np.float32)] * 2, random_shards([SHAPE] * 2, seed=1)
    layer, seen = run(shards, heads, mode, momentum=0)
    expected = oracle.batch_norm(shards, np.ones(3), np.zeros(3), heads=heads)
    np.testing.assert_array_equal(layer.running_var.data(mx.cpu(1)).asnumpy(), np.zeros(3))
    np.testing.assert_array_equal(layer.running_mean.data(mx.cpu(1)).asnumpy(), np.full(3, 7))
    np.testing.assert_array_equal(np.concatenate(seen.outputs), 0)
    assert oracle.distance(seen.input_gradients, expected.input_gradients) < 1e-5


def test_one_value_in_all(mode):
    """N = 1: one device with one image of one pixel. As with nn.BatchNorm the output is β, the gradient 0."""
    layer = SyncBatchNorm(in_channels=3, timeout=20, momentum=0)
    layer.initialize(ctx=cpus(2))
    set_mode(layer, mode)
    shard, head = np.float32([[[[4]], [[5]], [[6]]]]), np.ones((1, 3, 1, 1), np.float32)
    with gluon_syncbn.devices(mx.cpu(1)):
        x = mx.nd.array(shard, ctx=mx.cpu(1))
        x.attach_grad()
        with mx.autograd.record():
            y = layer(x)
        y.backward(mx.nd.array(head, ctx=mx.cpu(1)))
    plain, expected = reference([shard], [head])
    np.testing.assert_array_equal(y.asnumpy(), expected.outputs[0])
    np.testing.assert_array_equal(x.grad.asnumpy(), expected.input_gradients[0])
    np.testing.assert_array_equal(layer.running_var.data(mx.cpu(1)).asnumpy(), np.zeros(3))


def test_a_mean_of_a_million_with_a_deviation_of_a_hundredth(mode, backend):
    """In float32, whose numbers are 0.06 apart there. nn.BatchNorm's result has no right digit."""
    shards, heads = (
        random_shards([(4, 3, 16, 16)] * 2, seed=seed, mean=mean, std=std)
        for seed, mean, std in ((0, 1e6, 1e-2), (1, 0, 1))
    )
    layer, seen = run(shards, heads, mode, momentum=0)
    expected = oracle.batch_norm(shards, np.ones(3), np.zeros(3), heads=heads)
    np.testing.assert_allclose(layer.running_mean.data(mx.cpu(1)).asnumpy(), expected.mean, rtol=1e-7)
    np.testing.assert_allclose(layer.running_var.data(mx.cpu(1)).asnumpy(), expected.var, rtol=1e-6)
    # The portable back end normalizes with MXNet's own BatchNorm, whose rounding it corrects only in the statistics.
    forward, backward = (1e-6, 1e-6) if backend == "native" else (1e-2, 0.2)
    assert oracle.distance(seen.outputs, expected.outputs) < forward
    assert oracle.distance(seen.input_gradients, expected.input_gradients) < backward
    _, plain = reference(shards, heads)
    assert oracle.distance(plain.outputs, [np.concatenate(expected.outputs)]) > 0.5


def test_an_empty_shard(mode):
    """MXNet has arrays of 0 images only with NumPy shapes.

    On portable it is refused where Python sees it, which is not in a graph: there MXNet itself divides by zero when it
    reshapes an empty array, as docs/limits.md tells.
    """
    code = """
from harness import *
from gluon_syncbn import SyncBatchNorm
layer = SyncBatchNorm(in_channels=3, prefix='stem_', timeout=1)
layer.initialize(ctx=cpus(2))
if layer.backend == 'native':
    set_mode(layer, {mode!r})
with mx.util.np_shape(True), autograd.record():
    try:
        layer(mx.nd.ones((2, 3, 4), ctx=mx.cpu(0)))
        layer(mx.nd.ones((0, 3, 4), ctx=mx.cpu(1))).asnumpy()
    except (ValueError, mx.MXNetError) as error:
        print(error)
"""
    done = run_python(code.format(mode=mode))
    assert done.returncode == 0, done.stderr
    assert "SyncBatchNorm 'stem': the input" in done.stdout
    assert "on cpu(1) is empty. A device without images cannot take part; leave it out with gluon" in done.stdout
