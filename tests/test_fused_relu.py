"""A norm computes the ReLU after it where no one can tell the difference, and nowhere else."""

import mxnet as mx
import numpy as np
import oracle
import pytest
from harness import MODES, cpus, random_affine, random_shards, set_mode, step
from mxnet.gluon import nn

from gluon_syncbn import SyncBatchNorm, convert_batchnorm, convert_sync_batchnorm

pytestmark = pytest.mark.usefixtures("backend")
SHAPES = [(3, 4, 5, 7), (1, 4, 5, 7)]


def pair(activation="relu"):
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.BatchNorm(in_channels=4), nn.Activation(activation))
    return net


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("mode", list(MODES))
def test_same_numbers_as_batchnorm_and_relu_on_the_concatenated_batch(mode, dtype, fuse):
    net = convert_sync_batchnorm(pair(), fuse=fuse)
    net.cast(dtype)
    net.initialize(ctx=cpus(2))
    gamma, beta = random_affine(net[0], 4)
    set_mode(net, mode)
    shards, heads = random_shards(SHAPES, dtype), random_shards(SHAPES, dtype, seed=1)
    outputs, inputs = step(net, shards, heads, cpus(2))
    before = oracle.batch_norm(shards, gamma, beta)
    passed = [head * (output > 0) for head, output in zip(heads, before.outputs)]
    expected = oracle.batch_norm(shards, gamma, beta, heads=passed)
    tolerance = 1e-5 if dtype == "float32" else 1e-12
    assert oracle.distance([y.asnumpy() for y in outputs], [np.maximum(y, 0) for y in expected.outputs]) < tolerance
    assert oracle.distance([x.grad.asnumpy() for x in inputs], expected.input_gradients) < 10 * tolerance
    for parameter, gradient in ((net[0].gamma, expected.gamma_gradient), (net[0].beta, expected.beta_gradient)):
        total = sum(parameter.grad(device).asnumpy() for device in cpus(2))
        assert oracle.distance([total], [gradient]) < 10 * tolerance


@pytest.mark.parametrize("axis", [1, -1])
@pytest.mark.parametrize("devices", [1, 2])
def test_activation_option(devices, axis):
    """On one device it is nn.BatchNorm and a ReLU; prediction mode applies it too."""
    layer = SyncBatchNorm(axis=axis, in_channels=4, activation="relu")
    plain = nn.BatchNorm(axis=axis, in_channels=4)
    for block in (layer, plain):
        block.initialize(ctx=cpus(devices))
    shape = (2, 4, 3, 4)
    x = mx.nd.array(random_shards([shape], mean=0)[0])
    np.testing.assert_array_equal(layer(x).asnumpy(), np.maximum(plain(x).asnumpy(), 0))
    outputs, _ = step(layer, random_shards([shape] * devices), random_shards([shape] * devices), cpus(devices))
    assert all(output.asnumpy().min() == 0 for output in outputs)
    layer.hybridize()
    assert layer(x).asnumpy().min() == 0


def test_nan_is_not_turned_into_zero(backend):
    layer = SyncBatchNorm(in_channels=2, activation="relu")
    layer.initialize(ctx=cpus(2))
    shards = random_shards([(1, 2, 3, 3)] * 2)
    shards[0][0, 1, 0, 0] = np.nan
    outputs, inputs = step(layer, shards, shards, cpus(2))
    for array in [*outputs, *(item.grad for item in inputs)]:
        values = array.asnumpy()
        assert np.isfinite(values[:, 0]).all()
        if backend == "native":  # oneDNN's ReLU, which portable uses, makes 0 of NaN
            assert np.isnan(values[:, 1]).all()


def test_the_norm_takes_the_relu_over():
    net = convert_sync_batchnorm(pair())
    assert net[0]._sync.options.activation == "relu" and type(net[1]) is not nn.Activation
    assert convert_sync_batchnorm(net)[0]._sync.options.activation == "relu"  # once, however often it is converted
    assert convert_sync_batchnorm(net, fuse=False)[0]._sync.options.activation is None
    assert type(net[1]) is nn.Activation
    convert_sync_batchnorm(net)
    assert type(net[1]) is nn.Activation  # fuse=False stays until it is asked for again
    convert_sync_batchnorm(net, fuse=True)
    assert "activation='relu'" in repr(net[0])
    convert_batchnorm(net)
    assert [type(child) for child in net._children.values()] == [nn.BatchNorm, nn.Activation]
    assert sorted(net.collect_params()) == sorted(pair().collect_params())


class Holder(nn.HybridSequential):
    """Not the class that is known to call one child after the other."""


def shared_relu():
    net, relu = nn.HybridSequential(), nn.Activation("relu")
    net.add(nn.BatchNorm(), relu, nn.Conv2D(3, 1), relu)
    return net


def shared_norm():
    net, norm = nn.HybridSequential(), nn.BatchNorm()
    net.add(norm, nn.Activation("relu"), norm)
    return net


def hooked(index):
    net = pair()
    net[index].register_forward_hook(lambda *_: None)
    return net


def of_another_class():
    net = Holder()
    net.add(nn.BatchNorm(), nn.Activation("relu"))
    return net


@pytest.mark.parametrize(
    "make",
    [shared_relu, shared_norm, lambda: hooked(0), lambda: hooked(1), of_another_class, lambda: pair("sigmoid")],
    ids=["shared relu", "shared norm", "hook on the norm", "hook on the relu", "another class", "sigmoid"],
)
def test_left_alone_where_it_could_be_seen(make):
    net = convert_sync_batchnorm(make())
    assert net[0]._sync.options.activation is None
    assert type(net[1]) is nn.Activation


def test_no_warning_of_mxnet_shows(recwarn):
    net = nn.HybridSequential()
    net.add(nn.BatchNorm(in_channels=3), nn.Activation("relu"))
    convert_sync_batchnorm(net).collect_params()
    assert not [str(item.message) for item in recwarn if "unregistered" in str(item.message)]
