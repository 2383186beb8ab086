"""The compiled operator inside MXNet, on GPUs and on groups of a CPU and a GPU, against the oracle.

Nothing here needs a kernel of MXNet's own: arrays are filled on the CPU and copied, head gradients are given.
"""

import mxnet as mx
import numpy as np
import oracle
import pytest
from mxnet import autograd

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


def step(layer, arrays, heads, devices):
    """One training step; outputs and input gradients as NumPy arrays."""
    inputs, head_gradients = place(arrays, devices), place(heads, devices)
    gradients = place([np.zeros_like(array) for array in arrays], devices)
    autograd.mark_variables(inputs, gradients)
    with autograd.record():
        outputs = [layer(item) for item in inputs]
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
@pytest.mark.parametrize("shape", [(3, 5, 7, 9), (2, 5, 32, 32), (6, 5)], ids=str)
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
    try:
        mx.nd.waitall()
    except mx.MXNetError:
        pass
    layer.gamma.set_data(mx.nd.array(np.full(5, 1.5)))
    check(layer, devices, [(3, 5, 4, 4)] * len(devices), "float32")


@groups
def test_it_says_what_it_runs_on(devices):
    assert make(devices).backend == "native"
    assert SyncBatchNorm(in_channels=5, backend="portable").backend == "portable"
