"""`update_statistics`: against NumPy on all batches in float64."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn
from testing import cpus, initialized, sequential, set_mode

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm, update_statistics

pytestmark = pytest.mark.usefixtures("backend")
SIZES = (5, 3, 8)  # images of a batch; each batch counts alike


def draw(shape=(3, 4, 5), dtype="float32", seed=0):
    values = np.random.RandomState(seed)
    scale, shift = values.uniform(0.5, 2, (2, 1, shape[0], 1, 1))
    return [(values.standard_normal((size, *shape)) * scale + shift).astype(dtype) for size in SIZES]


def moments(batches, axis=(0, 2, 3)):
    """Mean and biased variance of values of which each batch has the same share."""
    means = [batch.astype(np.float64).mean(axis=axis) for batch in batches]
    squares = [np.square(batch.astype(np.float64)).mean(axis=axis) for batch in batches]
    return np.mean(means, axis=0), np.mean(squares, axis=0) - np.mean(means, axis=0) ** 2


def check(layer, expected, tolerance=1e-6):
    for parameter, value in zip((layer.running_mean, layer.running_var), expected):
        for array in parameter.list_data():
            np.testing.assert_allclose(array.asnumpy(), value, rtol=tolerance, atol=tolerance)


def everything(net):
    """All arrays, and all gradients."""
    parameters = net.collect_params().values()
    learning = [parameter for parameter in parameters if parameter.grad_req != "null"]
    arrays = [array.asnumpy() for parameter in parameters for array in parameter.list_data()]
    return arrays, [array.asnumpy() for parameter in learning for array in parameter.list_grad()]


PLAIN = [(nn.BatchNorm, 1, "float32"), (nn.BatchNorm, 3, "float32"), (nn.BatchNorm, 3, "float64")]
SYNCHRONIZED = [(SyncBatchNorm, 1, "float32"), *((SyncBatchNorm, 3, f"float{bits}") for bits in (16, 32, 64))]


@pytest.mark.parametrize("norm, count, dtype", PLAIN + SYNCHRONIZED)
def test_one_layer(norm, count, dtype, mode):
    """On several devices with shards of different size; batches as a list, as (data, label), from a generator."""
    kind = "float64" if dtype == "float64" else "float32"
    layer = initialized(norm(in_channels=3), count, mode, dtype=kind)
    batches = draw(dtype=dtype)
    given = [mx.nd.array(batch, dtype=dtype) for batch in batches]
    of_numpy = [batches] if dtype == "float32" else []  # MXNet makes float32 of them
    for some in (given, [(batch, None) for batch in given], iter(given), *of_numpy):
        layer.running_mean.set_data(mx.nd.ones(3))
        assert update_statistics(layer, some) is layer
        check(layer, moments(batches))
    update_statistics(layer, given, count=2.0)
    check(layer, moments(batches[:2]))
    update_statistics(layer, given, ctx=cpus(count)[-1])
    check(layer, moments(batches))


def test_axes_and_groups(mode):
    layer = initialized(SyncBatchNorm(axis=-1, in_channels=5, group_size=2), 4, mode)
    batches = [batch for batch in draw() if len(batch) > 3]
    update_statistics(layer, batches)
    check(layer, moments(batches, (0, 1, 2)))


@pytest.mark.parametrize("is_converted", [True, False])
def test_a_net_changes_nothing_but_its_statistics(is_converted, mode):
    """A second layer sees what the first makes of each batch; a frozen one stays. Then the net predicts."""
    norms = [nn.BatchNorm(in_channels=4) for _ in range(2)] + [nn.BatchNorm(in_channels=4, use_global_stats=True)]
    net = sequential(nn.Conv2D(4, 1, in_channels=3), norms[0], nn.Activation("relu"), norms[1], norms[2])
    devices, batches = cpus(2 if is_converted else 1), draw()
    initialized(net, devices, mode)
    if is_converted:
        gluon_syncbn.convert_sync_batchnorm(net)
    with autograd.record():
        losses = [net(mx.nd.array(batch[:2], ctx=device)) for device, batch in zip(devices, batches)]
    autograd.backward(losses)
    parameters, gradients = everything(net)
    update_statistics(net, batches)
    assert not any(layer._forward_pre_hooks for layer in norms)  # nor is it followed any more
    assert all((old == new).all() for old, new in zip(gradients, everything(net)[1]))
    learning = [p.grad_req != "null" for p in net.collect_params().values() for _ in p.list_data()]
    assert all((old == new).all() for old, new, is_same in zip(parameters, everything(net)[0], learning) if is_same)
    weight, bias = (parameter.data(devices[0]).asnumpy() for parameter in (net[0].weight, net[0].bias))
    first = [np.einsum("nchw,kc->nkhw", batch, weight[:, :, 0, 0].astype(np.float64)) for batch in batches]
    first = [item + bias[:, None, None] for item in first]
    check(net[1], moments(first), 1e-5)
    shown = [(b - b.mean((0, 2, 3), keepdims=True)) / np.sqrt(b.var((0, 2, 3), keepdims=True) + 1e-5) for b in first]
    check(net[3], moments([np.maximum(item, 0) for item in shown]), 1e-5)
    check(net[4], (np.zeros(4), np.ones(4)), 0)
    x = mx.nd.array(batches[0])
    seen = net(x).asnumpy()
    set_mode(net, "imperative")
    np.testing.assert_allclose(seen, net(x).asnumpy(), rtol=1e-5, atol=1e-5)


class Branches(gluon.HybridBlock):
    """The second norm is never called, the first twice."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.used, self.unused = (nn.BatchNorm(in_channels=3) for _ in range(2))

    def hybrid_forward(self, F, x):
        return self.used(x) + self.used(x + 1)


def test_layers_that_are_called_twice_or_never(mode):
    net = gluon_syncbn.convert_sync_batchnorm(initialized(Branches(), 2, mode))
    update_statistics(net, draw())
    check(net.used, moments([np.concatenate([batch, batch + 1]) for batch in draw()]))
    check(net.unused, (np.zeros(3), np.ones(3)), 0)
    idle = nn.HybridLambda(lambda F, x: x)
    idle.norms = [nn.BatchNorm(in_channels=3)]  # in a list, which Gluon does not look into
    idle.norms[0].initialize()
    with pytest.raises(ValueError, match="the net has called none of its BatchNorms"):
        update_statistics(idle, draw())


class Breaks(nn.HybridBlock):
    """Raises at a batch of three images."""

    def hybrid_forward(self, F, x):
        if F is mx.nd and len(x) == 3:
            raise ValueError("a bad batch")
        return x


def symbol_block():
    data = mx.sym.var("data")
    block = gluon.SymbolBlock(mx.sym.BatchNorm(data, name="norm"), data)
    block.initialize()
    return block


LAYER = {"in_channels": 3}
BAD = [
    (lambda: SyncBatchNorm(**LAYER), [], {}, ValueError, "there are no batches"),
    (lambda: SyncBatchNorm(**LAYER), [draw()[0][:1]], {}, ValueError, "a batch has 1 images for 2 devices"),
    (lambda: SyncBatchNorm(**LAYER), [None], {}, TypeError, "a batch must be an array"),
    (lambda: SyncBatchNorm(**LAYER), draw(), {"count": 0}, ValueError, "count must be at least 1, not 0"),
    (lambda: SyncBatchNorm(**LAYER), draw(), {"count": 1.5}, ValueError, "count must be a whole number, not 1.5"),
    (lambda: nn.BatchNorm(use_global_stats=True, **LAYER), draw(), {}, ValueError, "all BatchNorms of '.*' are frozen"),
    (lambda: nn.Dense(2, in_units=60), draw(), {}, ValueError, "no BatchNorm"),
    (lambda: sequential(Breaks(), nn.BatchNorm(**LAYER)), draw(), {"ctx": cpus(1)}, ValueError, "a bad batch"),
    (symbol_block, draw(), {}, ValueError, "the BatchNorms of the SymbolBlock '.*' are nodes of its graph"),
]


@pytest.mark.parametrize("build, batches, options, error, words", BAD)
def test_what_is_refused_changes_nothing(build, batches, options, error, words, mode):
    net = build()
    if not isinstance(net, gluon.SymbolBlock):
        initialized(net, 2, mode)
    is_known = all(parameter._data for parameter in net.collect_params().values())
    before = everything(net)[0] if is_known else []
    with pytest.raises(error, match=words):
        update_statistics(net, batches, **options)
    assert not is_known or all((old == new).all() for old, new in zip(before, everything(net)[0]))


def test_in_the_middle_of_a_step(mode):
    net = initialized(SyncBatchNorm(**LAYER), 2, mode)
    with autograd.record():
        net(mx.nd.array(draw()[0][:2]))
    with pytest.raises(ValueError, match="update_statistics: a step is under way"):
        update_statistics(net, draw())
    gluon_syncbn.abandon_step()
    update_statistics(net, draw())


class SkipsOne(gluon.Block):
    """Does not call its norm for a shard of one image."""

    def __init__(self, **options):
        super().__init__()
        self.norm = SyncBatchNorm(in_channels=3, **options)

    def forward(self, x):
        return self.norm(x) if len(x) > 1 else x


def test_a_layer_that_fails_in_the_middle_keeps_what_it_had():
    """The error shows when everything has been asked for: nothing reads what the last layer computes."""
    net = initialized(SkipsOne(timeout=0.3), 2)
    with pytest.raises(mx.MXNetError, match=r"waited 0.3 s for 1 of 2 devices"):
        update_statistics(net, draw())
    check(net.norm, (np.zeros(3), np.ones(3)), 0)
    update_statistics(net, draw()[::2])
    check(net.norm, moments(draw()[::2]))


def test_layers_that_predict_and_layers_that_share_statistics():
    class Teacher(gluon.Block):
        def __init__(self):
            super().__init__()
            with self.name_scope():
                self.fixed, self.one = (SyncBatchNorm(in_channels=3) for _ in range(2))
                self.other = SyncBatchNorm(in_channels=3, params=self.one.params)

        def forward(self, x):
            with autograd.predict_mode():
                self.fixed(x)
            return self.one(x) + self.other(x + 10)

    net = initialized(Teacher(), 2)
    update_statistics(net, draw())
    check(net.fixed, (np.zeros(3), np.ones(3)), 0)
    check(net.one, moments([np.concatenate([batch, batch + 10]) for batch in draw()]), 1e-5)


def test_not_initialized_and_no_block():
    with pytest.raises(ValueError, match="is not initialized"):
        update_statistics(SyncBatchNorm(in_channels=3), draw())
    with pytest.raises(TypeError, match="expected a Gluon block"):
        update_statistics(None, draw())


def test_parameters_without_shapes():
    net = sequential(nn.Conv2D(4, 1), SyncBatchNorm())
    net.initialize(ctx=cpus(2))
    update_statistics(net, draw())
    assert net[1].running_mean.data(mx.cpu(1)).asnumpy().any()


def test_arrays_of_the_numpy_interface(mode):
    with mx.util.np_shape(True), mx.util.np_array(True):
        layer = initialized(SyncBatchNorm(in_channels=3), 2, mode)
        update_statistics(layer, [mx.np.array(batch) for batch in draw()])
        check(layer, moments(draw()))
