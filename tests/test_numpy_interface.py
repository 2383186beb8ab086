"""The layer takes mx.np arrays under npx.set_np() and returns them, with the same numbers."""

import mxnet as mx
import numpy as np
import oracle
import pytest
from harness import MODES, cpus, random_shards, set_mode
from mxnet import autograd
from mxnet import np as mnp
from mxnet.gluon import nn

from gluon_syncbn import SyncBatchNorm, convert_sync_batchnorm

pytestmark = pytest.mark.usefixtures("backend")


@pytest.fixture
def numpy_interface():
    mx.npx.set_np()
    yield
    mx.npx.reset_np()


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("shapes, axis", [([(3, 4, 5), (1, 4, 5)], 1), ([(2, 3, 3, 4)] * 2, -1), ([(3, 4, 5)], 1)])
def test_equals_the_oracle(shapes, axis, mode, numpy_interface):
    devices = cpus(len(shapes))
    layer = SyncBatchNorm(axis=axis, in_channels=4, timeout=20)
    layer.initialize(ctx=devices)
    gamma, beta = np.array([0.5, 1, 2, 1.5]), np.array([0.1, -1, 0, 1])
    layer.gamma.set_data(mnp.array(gamma))
    layer.beta.set_data(mnp.array(beta))
    set_mode(layer, mode)
    shards, heads = random_shards(shapes), random_shards(shapes, seed=1)
    inputs = [mnp.array(shard, ctx=device) for shard, device in zip(shards, devices)]
    for item in inputs:
        item.attach_grad()
    with autograd.record():
        outputs = [layer(item) for item in inputs]
        loss = [(out * mnp.array(head, ctx=out.ctx)).sum() for out, head in zip(outputs, heads)]
    autograd.backward(loss)
    assert all(type(out) is mnp.ndarray for out in outputs)
    expected = oracle.batch_norm(shards, gamma, beta, axis, heads=heads)
    assert oracle.distance([out.asnumpy() for out in outputs], expected.outputs) < 1e-5
    assert oracle.distance([item.grad.asnumpy() for item in inputs], expected.input_gradients) < 1e-4
    assert oracle.distance([sum(layer.gamma.grad(d).asnumpy() for d in devices)], [expected.gamma_gradient]) < 1e-4
    assert oracle.distance([layer.running_mean.data(devices[0]).asnumpy()], [0.1 * expected.mean]) < 1e-5
    assert type(layer(inputs[0])) is mnp.ndarray  # in prediction mode


def test_a_net(numpy_interface):
    devices = cpus(2)
    net = nn.HybridSequential()
    net.add(nn.Conv2D(4, 3), nn.BatchNorm(), nn.Activation("relu"), nn.Dense(2))
    convert_sync_batchnorm(net, timeout=20)
    net.initialize(ctx=devices)
    net.hybridize(static_alloc=True, static_shape=True)
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    for _ in range(2):
        with autograd.record():
            losses = [
                (net(mnp.ones((1, 3, 6, 6), ctx=device) * (i + 1)) ** 2).sum() for i, device in enumerate(devices)
            ]
        autograd.backward(losses)
        trainer.step(2)
    means = [net[1].running_mean.data(device).asnumpy() for device in devices]
    np.testing.assert_array_equal(*means)
    assert np.abs(means[0]).max() > 0


@pytest.mark.parametrize("around", [False, True])
def test_an_exported_net_and_a_symbol_block(around, numpy_interface, tmp_path):
    devices, prefix = cpus(2), str(tmp_path / "net")
    net = nn.HybridSequential()
    net.add(nn.Conv2D(4, 3), SyncBatchNorm(timeout=20), nn.Activation("relu"))
    net.initialize(ctx=devices)
    net.hybridize()

    def step(block):
        inputs = [mnp.random.normal(size=(2, 3, 6, 6), ctx=device) for device in devices]
        with autograd.record():
            outputs = [block(item) for item in inputs]
        autograd.backward(outputs)
        assert all(type(out) is mnp.ndarray and np.isfinite(out.asnumpy()).all() for out in outputs)

    step(net)
    net.export(prefix)
    assert "Custom" not in (tmp_path / "net-symbol.json").read_text(encoding="utf-8")
    block = mx.gluon.SymbolBlock.imports(f"{prefix}-symbol.json", ["data"], f"{prefix}-0000.params", ctx=devices)
    x = mnp.ones((1, 3, 6, 6))
    np.testing.assert_allclose(block(x).asnumpy(), net(x).asnumpy(), rtol=1e-5, atol=1e-6)
    convert_sync_batchnorm(block, timeout=20)
    whole = block
    if around:
        whole = nn.HybridSequential()
        whole.add(block, nn.Dense(2))
        whole.initialize(ctx=devices)
        whole.hybridize(static_alloc=True, static_shape=True)
    (mean,) = (item for name, item in block.collect_params().items() if name.endswith("running_mean"))
    before = mean.data(devices[0]).asnumpy()
    step(whole)
    copies = [mean.data(device).asnumpy() for device in devices]
    np.testing.assert_array_equal(*copies)
    assert not np.allclose(copies[0], before)
