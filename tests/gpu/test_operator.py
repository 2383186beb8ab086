"""The compiled operator inside MXNet, on GPUs and on groups of a CPU and a GPU, against the oracle.

Nothing here needs a kernel of MXNet's own: arrays are filled on the CPU and copied, head gradients are given.
"""

import contextlib

import mxnet as mx
import numpy as np
import oracle
import psutil
import pytest
from mxnet import autograd, gluon

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm

GROUPS = {
    "cpu, gpu": [mx.cpu(0), mx.gpu(0)],
    "gpu, cpu": [mx.gpu(0), mx.cpu(0)],
    "gpu, gpu": [mx.gpu(0), mx.gpu(1)],
    "gpu, cpu, gpu": [mx.gpu(1), mx.cpu(0), mx.gpu(0)],
}
groups = pytest.mark.parametrize(
    "devices",
    [pytest.param(group, id=name, marks=pytest.mark.gpus(name.count("gpu"))) for name, group in GROUPS.items()],
)
alone = pytest.mark.parametrize("devices", [pytest.param(GROUPS["gpu, gpu"], id="gpu, gpu", marks=pytest.mark.gpus(2))])
PRECISION = {"float32": 4e-6, "float64": 1e-12, "float16": 4e-3}


def make(devices, dtype="float32", channels=5, **options):
    layer = SyncBatchNorm(in_channels=channels, backend="native", timeout=20, **options)
    layer.cast(dtype)
    layer.initialize(ctx=devices)
    rng = np.random.RandomState(9)
    for parameter, low in ((layer.gamma, 0.5), (layer.beta, -1)):
        parameter.set_data(mx.nd.array(rng.uniform(low, 2, channels), dtype=parameter.dtype))
    return layer


def draw(shapes, dtype, seed=0):
    rng = np.random.RandomState(seed)
    return [(rng.standard_normal(shape) * 2 + 1).astype(dtype) for shape in shapes]


def place(arrays, devices):
    return [mx.nd.array(array, dtype=array.dtype).copyto(device) for array, device in zip(arrays, devices)]


def step(layer, arrays, heads, devices, skips=()):
    """One training step; outputs and input gradients as NumPy arrays, behind them those of the skips."""
    inputs, head_gradients = place([*arrays, *skips], devices * 2), place(heads, devices)
    gradients = place([np.zeros_like(array) for array in (*arrays, *skips)], devices * 2)
    autograd.mark_variables(inputs, gradients)
    with autograd.record():
        outputs = [layer(*inputs[i :: len(devices)]) for i in range(len(devices))]
    autograd.backward(outputs, head_gradients)
    return [output.asnumpy() for output in outputs], [gradient.asnumpy() for gradient in gradients]


def check(layer, devices, shapes, dtype, axis=1, relu=False):
    arrays, heads = draw(shapes, dtype), draw(shapes, dtype, 1)
    before = layer.running_mean.data(devices[0]).asnumpy()
    outputs, gradients = step(layer, arrays, heads, devices)
    gamma = layer.gamma.data(devices[0]).asnumpy() if layer._kwargs["fix_gamma"] is False else np.ones(shapes[0][axis])
    beta = layer.beta.data(devices[0]).asnumpy()
    plain = oracle.batch_norm(arrays, gamma, beta, axis)
    passed = [head * (y > 0) if relu else head for head, y in zip(heads, plain.outputs)]
    expected = oracle.batch_norm(arrays, gamma, beta, axis, heads=passed)
    wanted = [np.maximum(y, 0) if relu else y for y in expected.outputs]
    assert oracle.distance(outputs, wanted) < PRECISION[dtype]
    assert oracle.distance(gradients, expected.input_gradients) < 4 * PRECISION[dtype]
    vectors = PRECISION["float64" if dtype == "float64" else "float32"]
    for device in devices:
        mean = layer.running_mean.data(device).asnumpy()
        assert oracle.distance([mean], [0.9 * before + 0.1 * expected.mean]) < vectors
    if layer.gamma.grad_req == "null":
        return
    d_gamma, d_beta = (
        sum(parameter.grad(device).asnumpy().astype(np.float64) for device in devices)
        for parameter in (layer.gamma, layer.beta)
    )
    size = sum(np.abs(head).sum() for head in passed)
    assert np.abs(d_gamma - expected.gamma_gradient).max() < vectors * size
    assert np.abs(d_beta - expected.beta_gradient).max() < vectors * size


@groups
@pytest.mark.parametrize("dtype", list(PRECISION))
@pytest.mark.parametrize("shape", [(3, 5, 7, 9), (2, 5, 32, 32), (3, 5, 3, 3), (6, 5)], ids=str)
def test_uneven_shards_give_what_the_oracle_says(devices, dtype, shape):
    shapes = [(shape[0] + i, *shape[1:]) for i in range(len(devices))]
    check(make(devices, dtype), devices, shapes, dtype)


@groups
def test_channels_last(devices):
    check(make(devices, axis=-1, channels=16), devices, [(2, 4, 5, 16)] * len(devices), "float32", axis=-1)


@groups
def test_fused_relu(devices):
    check(make(devices, activation="relu"), devices, [(3, 5, 7, 9)] * len(devices), "float32", relu=True)


@groups
def test_no_scale(devices):
    check(make(devices, scale=False), devices, [(3, 5, 7, 9)] * len(devices), "float32")


@groups
def test_many_steps_stay_right(devices):
    """Memory of one step is used again by the next, and layers of a net share it."""
    layers = [make(devices), make(devices), make(devices, channels=3)]
    for _ in range(15):
        for layer in layers:
            channels = layer.gamma.shape[0]
            check(layer, devices, [(3, channels, 7, 9)] * len(devices), "float32")


class Followed(mx.gluon.HybridBlock):
    """A layer and what follows it; hybridized, the layer computes all of it."""

    def __init__(self, layer, behind):
        super().__init__()
        self.layer, self._behind = layer, behind

    def hybrid_forward(self, F, x, *skip):
        y = self.layer(x)
        if self._behind == "leaky":
            return F.LeakyReLU(y, slope=0.125)
        return F.relu(skip[0] + y) if skip else y


@alone
@pytest.mark.parametrize("renorm", [None, (1.25, 0.5)])
@pytest.mark.parametrize("behind, in_place", [("leaky", False), ("skip", False), ("nothing", True), ("leaky", True)])
def test_what_follows_in_place_and_renormalized(devices, behind, in_place, renorm):
    """In float32: of MXNet's own kernels the stand-in has those that a graph of this kind needs."""
    layer = make(devices, in_place=in_place, renorm=renorm)
    net = Followed(layer, behind)
    net.hybridize(static_alloc=True, static_shape=True)
    shapes = [(3, 5, 7, 9), (2, 5, 7, 9)]
    running_mean, running_var = (item.data(devices[0]).asnumpy() for item in (layer.running_mean, layer.running_var))
    gamma, beta = (item.data(devices[0]).asnumpy().astype(np.float64) for item in (layer.gamma, layer.beta))
    for _ in range(2):
        arrays, heads = draw(shapes, "float32"), draw(shapes, "float32", 1)
        skips = draw(shapes, "float32", 2) if behind == "skip" else []
        outputs, gradients = step(net, arrays, heads, devices, skips)
        plain = oracle.batch_norm(arrays, gamma, beta)
        r, d = np.ones(5), np.zeros(5)
        if renorm:
            deviation = np.sqrt(running_var + 1e-5)
            r = np.clip(np.sqrt(plain.var + 1e-5) / deviation, 1 / renorm[0], renorm[0])
            d = np.clip((plain.mean - running_mean) / deviation, -renorm[1], renorm[1])
        affine = gamma * r, beta + gamma * d
        plain = oracle.batch_norm(arrays, *affine)
        zs = [z + skip for z, skip in zip(plain.outputs, skips)] if skips else plain.outputs
        share = {"leaky": 0.125, "skip": 0, "nothing": 1}[behind]
        passed = [head * np.where(z > 0, 1, share) for head, z in zip(heads, zs)]
        expected = oracle.batch_norm(arrays, *affine, heads=passed)
        wanted = [*expected.input_gradients, *(passed if skips else [])]
        assert oracle.distance(outputs, [np.where(z > 0, z, share * z) for z in zs]) < 1e-5
        assert oracle.distance(gradients, wanted) < 1e-4
        d_gamma = sum(layer.gamma.grad(device).asnumpy().astype(np.float64) for device in devices)
        size = sum(np.abs(head).sum() for head in passed)
        assert np.abs(d_gamma - r * expected.gamma_gradient - d * expected.beta_gradient).max() < 1e-5 * size
        running_mean, running_var = 0.9 * running_mean + 0.1 * expected.mean, 0.9 * running_var + 0.1 * expected.var


@alone
@pytest.mark.parametrize("requested", ["neither", "input", "skip"])
def test_a_skip_whose_gradients_are_not_all_asked_for(devices, requested):
    """A net on data, or after frozen layers."""
    layer = make(devices)
    net = Followed(layer, "skip")
    net.hybridize(static_alloc=True, static_shape=True)
    shapes = [(3, 5, 7, 9), (2, 5, 7, 9)]
    arrays, skips, heads = (draw(shapes, "float32", seed) for seed in (0, 2, 1))
    inputs, added, head_gradients = place(arrays, devices), place(skips, devices), place(heads, devices)
    wanted = {"neither": [], "input": inputs, "skip": added}[requested]
    gradients = place([np.zeros(shape, "float32") for shape in shapes], devices)
    autograd.mark_variables(wanted, gradients[: len(wanted)])
    with autograd.record():
        outputs = [net(x, skip) for x, skip in zip(inputs, added)]
    autograd.backward(outputs, head_gradients)
    gamma, beta = (item.data(devices[0]).asnumpy().astype(np.float64) for item in (layer.gamma, layer.beta))
    plain = oracle.batch_norm(arrays, gamma, beta)
    passed = [head * (z + skip > 0) for head, z, skip in zip(heads, plain.outputs, skips)]
    expected = oracle.batch_norm(arrays, gamma, beta, heads=passed)
    d_gamma = sum(layer.gamma.grad(device).asnumpy().astype(np.float64) for device in devices)
    assert np.abs(d_gamma - expected.gamma_gradient).max() < 1e-5 * sum(np.abs(head).sum() for head in passed)
    if wanted:
        results = expected.input_gradients if requested == "input" else passed
        assert oracle.distance([gradient.asnumpy() for gradient in gradients], results) < 1e-4


@alone
def test_a_gamma_near_zero_is_told_in_place(devices):
    layer = make(devices, in_place=True)
    layer.gamma.set_data(mx.nd.array([1, 0, 1, 1, 1]))
    with pytest.warns(UserWarning, match="cannot recover the input where .gamma. is this small; channel 1"):
        arrays = draw([(3, 5, 7, 9)] * 2, "float32")
        gradients = step(layer, arrays, arrays, devices)[1]
    assert all(np.isfinite(item).all() for item in gradients)


@alone
@pytest.mark.parametrize("static", [False, True])
def test_hybridized(devices, static):
    layer = make(devices)
    layer.hybridize(static_alloc=static, static_shape=static)
    for _ in range(5):
        check(layer, devices, [(3, 5, 7, 9)] * 2, "float32")


@alone
def test_gradients_can_be_added(devices):
    layer = make(devices)
    for parameter in (layer.gamma, layer.beta):
        parameter.grad_req = "add"
    arrays, heads = draw([(3, 5, 4, 4)] * 2, "float32"), draw([(3, 5, 4, 4)] * 2, "float32", 1)
    step(layer, arrays, heads, devices)
    once = [parameter.grad(devices[1]).asnumpy() for parameter in (layer.gamma, layer.beta)]
    step(layer, arrays, heads, devices)
    twice = [parameter.grad(devices[1]).asnumpy() for parameter in (layer.gamma, layer.beta)]
    assert oracle.distance(twice, [2 * item for item in once]) < 1e-6


@groups
def test_a_device_that_does_not_come_is_named(devices):
    layer = SyncBatchNorm(in_channels=5, backend="native", timeout=0.5, prefix="stem_")
    layer.initialize(ctx=devices)
    arrays = place(draw([(3, 5, 4, 4)] * len(devices), "float32"), devices)
    with autograd.record():
        outputs = [layer(item) for item in arrays[:-1]]
    text = rf"'stem': forward pass.*Missing: {devices[-1].device_type}\({devices[-1].device_id}\)"
    with pytest.raises(mx.MXNetError, match=text):
        outputs[0].asnumpy()
    for output in outputs[1:]:
        with pytest.raises(mx.MXNetError):
            output.asnumpy()
    gluon_syncbn.abandon_step()
    for output in outputs:  # MXNet has forgotten the error by now; what a GPU has there must not look like a result
        assert output.context.device_type == "cpu" or np.isnan(output.asnumpy()).all()
    layer.gamma.set_data(mx.nd.array(np.full(5, 1.5)))
    check(layer, devices, [(3, 5, 4, 4)] * len(devices), "float32")


@groups
def test_it_says_what_it_runs_on(devices):
    assert make(devices).backend == "native"
    assert SyncBatchNorm(in_channels=5, backend="portable").backend == "portable"


@pytest.mark.gpus(1)
def test_cpu_devices_beside_gpus_have_temporary_space_of_their_own():
    net = gluon.nn.HybridSequential()
    for _ in range(4):
        net.add(gluon.nn.Conv2D(4, 3, padding=1), SyncBatchNorm(timeout=60))
    net.initialize(ctx=[mx.cpu(0), mx.cpu(1)])  # with MXNet's four buffers for both, this waits until the timeout
    for _ in range(3):
        with autograd.record():
            outputs = [net(mx.nd.ones((2, 3, 8, 8), ctx=mx.cpu(i))) for i in range(2)]
        autograd.backward(outputs)
        assert all(np.isfinite(output.asnumpy()).all() for output in outputs)


@alone
@pytest.mark.mxnet_kernels
@pytest.mark.parametrize("static", [None, False, True], ids=["imperative", "hybridize", "static"])
def test_a_layer_that_is_called_twice_in_a_step(devices, static):
    """As a head that pyramid levels share: on the way back the calls come in the other order."""
    layer = make(devices)

    class Head(gluon.HybridBlock):
        def __init__(self):
            super().__init__()
            self.norm = layer

        def hybrid_forward(self, F, small, large):
            return self.norm(small), self.norm(large)

    head = Head()
    if static is not None:
        head.hybridize(static_alloc=static, static_shape=static)
    levels = [draw([shape] * 2, "float32", seed) for seed, shape in enumerate([(3, 5, 4, 4), (3, 5, 8, 8)])]
    heads = [draw([shape] * 2, "float32", 5 + seed) for seed, shape in enumerate([(3, 5, 4, 4), (3, 5, 8, 8)])]
    for _ in range(3):
        inputs = [place(level, devices) for level in levels]
        gradients = [place([np.zeros_like(item) for item in level], devices) for level in levels]
        for item, gradient in zip(inputs, gradients):
            autograd.mark_variables(item, gradient)
        with autograd.record():
            outputs = [head(small, large) for small, large in zip(*inputs)]
        head_gradients = [place(item, devices) for item in heads]
        autograd.backward([y for pair in outputs for y in pair], [h for pair in zip(*head_gradients) for h in pair])
        for i in range(2):
            gamma, beta = layer.gamma.data(devices[0]).asnumpy(), layer.beta.data(devices[0]).asnumpy()
            expected = oracle.batch_norm(levels[i], gamma, beta, heads=heads[i])
            assert oracle.distance([pair[i].asnumpy() for pair in outputs], expected.outputs) < 4e-6
            assert oracle.distance([item.asnumpy() for item in gradients[i]], expected.input_gradients) < 2e-5


@alone
@pytest.mark.parametrize("static", [False, True])
def test_prediction_in_a_graph(devices, static):
    layer = make(devices, activation="relu")
    layer.hybridize(static_alloc=static, static_shape=static)
    check(layer, devices, [(3, 5, 7, 9)] * 2, "float32", relu=True)
    names = ("gamma", "beta", "running_mean", "running_var")
    gamma, beta, mean, var = (getattr(layer, name).data(devices[1]).asnumpy().reshape(1, 5, 1, 1) for name in names)
    (array,) = draw([(2, 5, 7, 9)], "float32", 7)
    (x,) = place([array], devices[1:])
    expected = np.maximum((array - mean) / np.sqrt(var + 1e-5) * gamma + beta, 0)
    assert oracle.distance([layer(x).asnumpy()], [expected]) < 4e-6
    assert (layer.running_mean.data(devices[1]).asnumpy().ravel() == mean.ravel()).all()


@pytest.mark.gpus(2)
def test_neighbours_synchronize_where_a_group_is_smaller():
    devices = [mx.cpu(0), mx.gpu(0), mx.cpu(1), mx.gpu(1)]
    layer = make(devices, group_size=2)
    arrays, heads = draw([(3, 5, 4, 4)] * 4, "float32"), draw([(3, 5, 4, 4)] * 4, "float32", 1)
    outputs, gradients = step(layer, arrays, heads, devices)
    gamma, beta = layer.gamma.data(devices[0]).asnumpy(), layer.beta.data(devices[0]).asnumpy()
    for pair in (slice(0, 2), slice(2, 4)):
        expected = oracle.batch_norm(arrays[pair], gamma, beta, heads=heads[pair])
        assert oracle.distance(outputs[pair], expected.outputs) < 4e-6
        assert oracle.distance(gradients[pair], expected.input_gradients) < 2e-5


@pytest.mark.gpus(2)
def test_a_smaller_last_batch():
    devices = GROUPS["gpu, cpu, gpu"]
    layer = make(devices)
    with gluon_syncbn.devices(devices[:2]):
        arrays, heads = draw([(3, 5, 4, 4)] * 2, "float32"), draw([(3, 5, 4, 4)] * 2, "float32", 1)
        outputs, _ = step(layer, arrays, heads, devices[:2])
    gamma, beta = layer.gamma.data(devices[0]).asnumpy(), layer.beta.data(devices[0]).asnumpy()
    assert oracle.distance(outputs, oracle.batch_norm(arrays, gamma, beta).outputs) < 4e-6
    layer.gamma.set_data(layer.gamma.data(devices[1]))


@groups
def test_a_device_that_goes_back_alone(devices):
    layer = SyncBatchNorm(in_channels=5, backend="native", timeout=0.5, prefix="stem_")
    layer.initialize(ctx=devices)
    arrays = place(draw([(3, 5, 4, 4)] * len(devices), "float32"), devices)
    gradients = place([np.zeros((3, 5, 4, 4), "float32")] * len(devices), devices)
    autograd.mark_variables(arrays, gradients)
    with autograd.record():
        outputs = [layer(item) for item in arrays]
    autograd.backward(outputs[:1], place(draw([(3, 5, 4, 4)], "float32"), devices))
    with pytest.raises(mx.MXNetError, match="'stem': backward pass.*Missing"):
        gradients[0].asnumpy()
    with contextlib.suppress(mx.MXNetError):
        mx.nd.waitall()


@pytest.mark.gpus(1)
def test_nothing_is_allocated_in_a_training_step():
    """Neither memory nor threads grow with steps."""
    devices = GROUPS["cpu, gpu"]
    layers = [make(devices, channels=channels) for channels in (5, 64, 200)]
    process = psutil.Process()

    def train(steps):
        for _ in range(steps):
            for layer in layers:
                shape = [(2, layer.gamma.shape[0], 4, 4)] * 2
                step(layer, draw(shape, "float32"), draw(shape, "float32", 1), devices)
        return process.num_threads(), process.memory_info().rss

    train(20)
    threads, memory = train(20)
    more_threads, more_memory = train(60)
    assert more_threads <= threads + 2  # MXNet adds one whenever more custom operators wait than ever before
    assert more_memory - memory < 8 << 20


@alone
@pytest.mark.parametrize("static", [False, True])
def test_a_backward_pass_whose_forward_pass_failed(devices, static):
    """In a static graph the memory still holds the step before; the backward pass must not compute with it."""
    layer = SyncBatchNorm(in_channels=5, backend="native", timeout=2)
    layer.initialize(ctx=devices)
    layer.hybridize(static_alloc=static, static_shape=static)
    arrays = draw([(2, 5, 3, 3)] * 2, "float32")
    step(layer, arrays, arrays, devices)
    (x,), (gradient,) = place(arrays[:1], devices), place([np.zeros_like(arrays[0])], devices)
    autograd.mark_variables([x], [gradient])
    with autograd.record():
        out = layer(x)
    with pytest.raises(mx.MXNetError, match="forward pass waited 2 s for 1 of 2 devices"):
        out.wait_to_read()
    autograd.backward([out], place(arrays[:1], devices))
    with pytest.raises(mx.MXNetError, match="the step had failed|cannot be run"):
        gradient.wait_to_read()
    gluon_syncbn.abandon_step()
    step(layer, arrays, arrays, devices)
    mx.nd.waitall()


@alone
@pytest.mark.parametrize("static", [False, True])
def test_in_place_gradients_of_prediction_mode(devices, static):
    """Both passes take one γ, also where it is nearly 0; where no gradient can follow, it is γ itself."""
    layer = SyncBatchNorm(in_channels=4, backend="native", timeout=20, in_place=True)
    layer.initialize(ctx=devices)
    gamma, beta = np.array([0.0, 1e-9, 0.5, -1e-9]), np.array([0.0, 0.5, -0.5, 1.0])
    layer.gamma.set_data(mx.nd.array(gamma))
    layer.beta.set_data(mx.nd.array(beta))
    layer.hybridize(static_alloc=static, static_shape=static)
    arrays, heads = draw([(2, 4, 3, 3)] * 2, "float32"), draw([(2, 4, 3, 3)] * 2, "float32", seed=1)
    inputs, gradients = place(arrays, devices), place([np.zeros_like(array) for array in arrays], devices)
    predicted = [layer(x).asnumpy() for x in inputs]
    autograd.mark_variables(inputs, gradients)
    with autograd.record(train_mode=False):
        outputs = [layer(x) for x in inputs]
    autograd.backward(outputs, place(heads, devices), train_mode=False)
    taken = np.where(np.abs(gamma) < 2.0**-20, np.copysign(2.0**-20, gamma), gamma)
    for rank, (array, head) in enumerate(zip(arrays, heads)):
        normalized = array.astype("float64") / np.sqrt(1 + 1e-5)
        for seen, factor in ((predicted[rank], gamma), (outputs[rank].asnumpy(), taken)):
            expected = normalized * factor.reshape(1, -1, 1, 1) + beta.reshape(1, -1, 1, 1)
            assert oracle.distance([seen], [expected]) < 1e-6
        dx = gradients[rank].asnumpy().astype("float64") * np.sqrt(1 + 1e-5) / taken.reshape(1, -1, 1, 1)
        assert oracle.distance([dx], [head]) < 1e-5
        d_gamma = layer.gamma.grad(devices[rank]).asnumpy()
        assert np.abs(d_gamma - (head * normalized).sum(axis=(0, 2, 3))).max() < 0.07 * np.abs(head * normalized).sum()
