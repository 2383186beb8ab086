"""The layer takes mx.np arrays under npx.set_np() and returns them, with the same numbers."""

import contextlib
import warnings

import mxnet as mx
import numpy as np
import pytest
import testing
from mxnet import autograd
from mxnet import np as mnp
from mxnet.gluon import nn
from testing import check_step, cpus, initialized, layers_of, random_shards, reference_of, sequential, shards_and_heads

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm, convert_sync_batchnorm

pytestmark = pytest.mark.usefixtures("backend")
SHAPES = [(3, 4, 5), (1, 4, 5)]


@pytest.fixture
def numpy_interface():
    mx.npx.set_np()
    yield
    mx.npx.reset_np()


def as_numpy(block):
    """The block for `check_step`, which has arrays of mx.nd."""

    def call(x):
        out = block(x.as_np_ndarray())
        assert type(out) is mnp.ndarray
        return out.as_nd_ndarray()

    return call


def set_affine(layer):
    layer.gamma.set_data(mnp.array([0.5, 1, -2, 1.5], dtype=layer.gamma.dtype))
    layer.beta.set_data(mnp.array([0.1, -1, 0, 1], dtype=layer.beta.dtype))


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("shapes, axis", [(SHAPES, 1), ([(2, 3, 3, 4), (1, 3, 3, 4)], -1), (SHAPES[:1], 1)])
def test_the_numbers_are_the_references(shapes, axis, activation, mode, dtype, numpy_interface):
    layer = SyncBatchNorm(axis=axis, in_channels=4, timeout=60, activation=activation)
    set_affine(initialized(layer, len(shapes), mode, dtype))
    norm = reference_of(layer, activation=activation)
    for seed in range(2):
        data = shards_and_heads(shapes, dtype, seed)
        check_step(as_numpy(layer), norm, *data, layer=layer)
        seen = reference_of(layer, activation=activation, frozen=True)
        check_step(as_numpy(layer), seen, *data, layer=layer, train_mode=False)


def test_a_net_trains_as_on_one_device(mode, numpy_interface):
    """With shapes that are known at the first call and a smaller last shard."""
    data = random_shards([(5, 3, 6, 6)] * 2)
    results = []
    for devices, borders in ((cpus(1), []), (cpus(2), [4])):
        net = sequential(nn.Conv2D(4, 3, use_bias=False), nn.BatchNorm(), nn.Activation("relu"), nn.Dense(2))
        if len(devices) > 1:
            convert_sync_batchnorm(net, timeout=60)
        mx.npx.random.seed(3)
        initialized(net, devices, mode, init=mx.init.Xavier())
        trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
        for batch in data:
            parts = [mnp.array(part, ctx=device) for part, device in zip(np.split(batch, borders), devices)]
            with autograd.record():
                losses = [(net(part) ** 2).sum() for part in parts]
            autograd.backward(losses)
            trainer.step(5)
        mx.nd.waitall()
        items = net._collect_params_with_prefix()
        results.append({name: [item.data(device).asnumpy() for device in devices] for name, item in items.items()})
    for name, (wanted,) in results[0].items():
        for value in results[1][name]:
            np.testing.assert_allclose(value, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max(), err_msg=name)


def test_an_exported_net_and_a_symbol_block(mode, numpy_interface, tmp_path):
    """The file is plain; a converted SymbolBlock of it trains, by itself or in a graph."""
    prefix = str(tmp_path / "net")
    net = initialized(sequential(SyncBatchNorm(timeout=60), nn.Activation("relu")), 2, "hybridize")
    net(mnp.ones((1, 4, 5)))
    set_affine(net[0])
    check_step(as_numpy(net), reference_of(net[0], activation="relu"), *shards_and_heads(SHAPES), layer=net[0])
    net.export(prefix)
    assert "Custom" not in (tmp_path / "net-symbol.json").read_text(encoding="utf-8")
    block = mx.gluon.SymbolBlock.imports(f"{prefix}-symbol.json", ["data"], f"{prefix}-0000.params", ctx=cpus(2))
    x = mnp.array(random_shards([(2, 4, 5)], seed=9)[0])
    np.testing.assert_allclose(block(x).asnumpy(), net(x).asnumpy(), rtol=1e-5, atol=1e-6)
    convert_sync_batchnorm(block, timeout=60)
    whole = testing.set_mode(sequential(block), mode)
    block(x)
    (layer,) = layers_of(block)
    norm = reference_of(layer, activation="relu")
    testing.check_steps(as_numpy(whole), norm, lambda seed: shards_and_heads(SHAPES, seed=seed), layer=layer)


@pytest.mark.parametrize("where", ["in the block", "after it"])
def test_the_first_step_may_be_short(where, mode, numpy_interface):
    """Shapes are unknown before it. The Trainer takes the other device's gradients, which are zero, as new ones."""
    net = convert_sync_batchnorm(sequential(nn.Conv2D(4, 3), nn.BatchNorm(), nn.Dense(2)))
    initialized(net, 2, mode)
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd")
    (x,) = random_shards([(3, 3, 6, 6)])
    for _ in range(2):
        with warnings.catch_warnings(), contextlib.ExitStack() as block:
            warnings.simplefilter("error")
            block.enter_context(gluon_syncbn.devices(cpus(1), net))
            with autograd.record():
                loss = (net(mnp.array(x, ctx=mx.cpu(0))) ** 2).sum()
            loss.backward()
            if where == "after it":
                block.close()
            trainer.step(3)
    mx.nd.waitall()
    for item in net.collect_params().values():
        assert (item.data(mx.cpu(0)).asnumpy() == item.data(mx.cpu(1)).asnumpy()).all(), item.name


def test_gradients_that_are_added_are_zero_after_a_step_that_was_abandoned(mode, numpy_interface):
    net = initialized(sequential(nn.Dense(3, in_units=4), SyncBatchNorm(in_channels=3)), 2, mode)
    net.collect_params().setattr("grad_req", "add")
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd")  # noqa: F841 (it knows them)

    def accumulate(shards):
        with autograd.record():
            losses = [(net(mnp.array(x, ctx=device)) ** 3).sum() for x, device in zip(shards, cpus(2))]
        autograd.backward(losses)

    shards = random_shards([(2, 4)] * 2)
    accumulate(shards)
    assert net[0].weight.grad(mx.cpu(1)).asnumpy().any()
    with pytest.raises(TypeError, match="not an image"):
        accumulate([shards[0], "not an image"])
    for parameter in net.collect_params().values():
        assert parameter.grad_req == "null" or not any(item.asnumpy().any() for item in parameter.list_grad())
