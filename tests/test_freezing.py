"""Freezing in the middle of training: running statistics, γ and β, statistics from a file."""

import mxnet as mx
import numpy as np
import oracle
import pytest
from harness import MODES, cpus, random_shards, set_mode, step
from mxnet.gluon import nn

from gluon_syncbn import SyncBatchNorm, freeze_statistics

pytestmark = [pytest.mark.usefixtures("backend"), pytest.mark.parametrize("mode", list(MODES))]

SHAPES = [(2, 3, 4, 4), (1, 3, 4, 4)]
ONES, ZEROS = np.ones(3), np.zeros(3)


def make(mode, norm=None):
    net = nn.HybridSequential()
    net.add(norm or SyncBatchNorm(in_channels=3, timeout=60))
    net.initialize(ctx=cpus(2))
    return set_mode(net, mode), net[0]


def values(layer, name):
    return [getattr(layer, name).data(device).asnumpy() for device in cpus(2)]


def check_synchronized(net, seed=0):
    shards, heads = random_shards(SHAPES, seed=seed), random_shards(SHAPES, seed=seed + 10)
    outputs, inputs = step(net, shards, heads, cpus(2))
    expected = oracle.batch_norm(shards, ONES, ZEROS, heads=heads)
    assert oracle.distance([item.asnumpy() for item in outputs], expected.outputs) < 1e-5
    assert oracle.distance([item.grad.asnumpy() for item in inputs], expected.input_gradients) < 1e-4


@pytest.mark.parametrize("norm", [SyncBatchNorm, nn.BatchNorm])
def test_statistics_are_frozen_and_released(mode, norm):
    net, layer = make(mode, norm(in_channels=3))
    step(net, random_shards(SHAPES), random_shards(SHAPES), cpus(2))
    assert freeze_statistics(net) is net
    mean, var = values(layer, "running_mean"), values(layer, "running_var")
    shards, heads = random_shards(SHAPES, seed=3), random_shards(SHAPES, seed=4)
    for count in (2, 1):  # a device alone waits for no one
        outputs, inputs = step(net, shards[:count], heads[:count], cpus(count))
        for rank in range(count):
            std = np.sqrt(var[rank] + 1e-5).reshape(1, 3, 1, 1)
            expected = (shards[rank] - mean[rank].reshape(1, 3, 1, 1)) / std
            np.testing.assert_allclose(outputs[rank].asnumpy(), expected, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(inputs[rank].grad.asnumpy(), heads[rank] / std, rtol=1e-4, atol=1e-5)
    assert all(np.array_equal(a, b) for a, b in zip(values(layer, "running_var"), var))
    freeze_statistics(net, frozen=False)
    if norm is SyncBatchNorm:
        check_synchronized(net, seed=5)
    else:
        step(net, shards, heads, cpus(2))
        mx.nd.waitall()
    assert not any(np.array_equal(a, b) for a, b in zip(values(layer, "running_mean"), mean))


def test_gamma_and_beta_are_frozen_while_statistics_are_shared(mode):
    net, layer = make(mode)
    check_synchronized(net)
    net.collect_params(".*gamma|.*beta").setattr("grad_req", "null")
    check_synchronized(net, seed=1)
    with pytest.raises(RuntimeError, match="grad_req='null'"):
        layer.gamma.grad(mx.cpu(0))
    net.collect_params(".*gamma|.*beta").setattr("grad_req", "write")
    check_synchronized(net, seed=2)
    assert np.abs(layer.gamma.grad(mx.cpu(1)).asnumpy()).max() > 0


def test_statistics_loaded_in_the_middle_of_training(mode, tmp_path):
    net, layer = make(mode)
    check_synchronized(net)
    saved = {name: values(layer, name)[0] for name in ("running_mean", "running_var")}
    net.save_parameters(str(tmp_path / "net.params"))
    check_synchronized(net, seed=1)
    net.load_parameters(str(tmp_path / "net.params"), ctx=cpus(2))
    for name, value in saved.items():
        np.testing.assert_array_equal(values(layer, name), [value] * 2)
    shards = random_shards(SHAPES, seed=2)
    step(net, shards, shards, cpus(2))
    expected = oracle.batch_norm(shards, ONES, ZEROS)
    for name, now in (("running_mean", expected.mean), ("running_var", expected.var)):
        np.testing.assert_allclose(values(layer, name), [0.9 * saved[name] + 0.1 * now] * 2, rtol=1e-5, atol=1e-6)
