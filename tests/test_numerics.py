"""Outputs, gradients and running statistics equal Batch Normalization of the concatenated batch."""

import mxnet as mx
import numpy as np
import oracle
import pytest
from harness import MODES, cpus, observe, random_affine, random_shards, set_mode, step
from mxnet.gluon import nn

from gluon_syncbn import SyncBatchNorm
from gluon_syncbn.backends.portable import operator
from gluon_syncbn.backends.portable.host_arrays import HostArrays

pytestmark = pytest.mark.usefixtures("backend")

# float32 as promised; float64 and float16 by their own precision.
TOLERANCES = {"float32": (1e-5, 1e-4), "float64": (1e-12, 1e-11), "float16": (2e-3, 4e-3)}

# Shapes of the shards, and the axis of the channels.
CASES = {
    "1 device": ([(3, 5, 4, 6)], 1),
    "N C": ([(3, 5), (2, 5)], 1),
    "N C W, odd": ([(3, 7, 5), (1, 7, 5)], 1),
    "N C H W, uneven": ([(3, 5, 4, 6), (1, 5, 4, 6)], 1),
    "N C H W, sizes differ": ([(1, 3, 5, 7), (2, 3, 8, 2)], 1),
    "N C D H W": ([(2, 3, 2, 3, 5), (1, 3, 2, 3, 5), (1, 3, 2, 3, 5)], 1),
    "one value per device": ([(1, 6, 1, 1)] * 4, 1),
    "N H W C": ([(2, 3, 4, 5), (1, 3, 4, 5)], 3),
    "N H W C from behind": ([(2, 3, 4, 5), (1, 3, 4, 5)], -1),
    "axis 2 of 4": ([(2, 3, 4, 5), (1, 3, 4, 5)], 2),
    "axis -2 of 4": ([(2, 3, 4, 5), (1, 3, 4, 5)], -2),
    "axis -3 of 4": ([(2, 3, 4, 5), (1, 3, 4, 5)], -3),
    "axis 3 of 5": ([(2, 3, 4, 5, 2), (1, 3, 4, 5, 2)], 3),
    "axis 0": ([(4, 3, 5), (4, 2, 5)], 0),
    "one channel": ([(2, 1, 3, 3)] * 2, 1),
    "3 devices, wide": ([(2, 33, 9, 9), (1, 33, 9, 9), (4, 33, 9, 9)], 1),
    "4 devices": ([(1, 16, 7, 7)] * 4, 1),
    "8 devices": ([(1, 8, 5, 3)] * 7 + [(2, 8, 5, 3)], 1),
}


def make_layer(shapes, axis, dtype="float32", mode="imperative", **options):
    devices = cpus(len(shapes))
    layer = SyncBatchNorm(axis=axis, timeout=30, in_channels=shapes[0][axis], **options)
    layer.cast(dtype)
    layer.initialize(ctx=devices)
    affine = random_affine(layer, shapes[0][axis])
    return set_mode(layer, mode), devices, affine


def same_size_except_batch(shapes, axis):
    join = oracle.batch_axis(axis)
    return len({tuple(n for i, n in enumerate(shape) if i != join) for shape in shapes}) == 1


def flatten(shards, axis):
    """Shards of different extent as (values, channels), which the oracle can concatenate."""
    return [np.moveaxis(shard, axis, -1).reshape(-1, shard.shape[axis]) for shard in shards]


@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("case", list(CASES))
def test_against_numpy(case, mode, dtype):
    shapes, axis = CASES[case]
    layer, devices, (gamma, beta) = make_layer(shapes, axis, dtype, mode)
    forward_tolerance, backward_tolerance = TOLERANCES[dtype]
    mean, var = np.zeros(len(gamma)), np.ones(len(gamma))
    for seed in range(2):
        shards = random_shards(shapes, dtype, seed)
        heads = random_shards(shapes, dtype, seed + 10)
        observed = observe(layer, shards, heads, devices)
        expected = oracle.batch_norm(flatten(shards, axis), gamma, beta, -1, heads=flatten(heads, axis))
        assert [item.dtype for item in observed.outputs] == [np.dtype(dtype)] * len(shapes)
        assert oracle.distance(flatten(observed.outputs, axis), expected.outputs) < forward_tolerance
        assert oracle.distance(flatten(observed.input_gradients, axis), expected.input_gradients) < backward_tolerance
        assert oracle.distance([observed.gamma_gradient], [expected.gamma_gradient]) < backward_tolerance
        assert oracle.distance([observed.beta_gradient], [expected.beta_gradient]) < backward_tolerance
        mean, var = 0.9 * mean + 0.1 * expected.mean, 0.9 * var + 0.1 * expected.var
    for parameter, value in ((layer.running_mean, mean), (layer.running_var, var)):
        copies = [parameter.data(device).asnumpy() for device in devices]
        # On one device the layer is MXNet's own, which loses some of the variance with float16 input.
        assert oracle.distance(copies, [value] * len(copies)) < (1e-6 if len(devices) > 1 else 1e-3)
        assert all(np.array_equal(copies[0], copy) for copy in copies)


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize(
    "case", [name for name, (shapes, axis) in CASES.items() if same_size_except_batch(shapes, axis)]
)
def test_against_batchnorm_on_the_concatenated_batch(case, mode):
    shapes, axis = CASES[case]
    layer, devices, (gamma, beta) = make_layer(shapes, axis, mode=mode)
    reference = nn.BatchNorm(axis=axis, in_channels=shapes[0][axis])
    reference.initialize()
    reference.gamma.set_data(mx.nd.array(gamma))
    reference.beta.set_data(mx.nd.array(beta))
    join = oracle.batch_axis(axis)
    for seed in range(3):
        shards, heads = random_shards(shapes, seed=seed), random_shards(shapes, seed=seed + 10)
        observed = observe(layer, shards, heads, devices)
        expected = observe(reference, [np.concatenate(shards, join)], [np.concatenate(heads, join)], [mx.cpu(0)])
        assert oracle.distance([np.concatenate(observed.outputs, join)], expected.outputs) < 1e-5
        assert oracle.distance([np.concatenate(observed.input_gradients, join)], expected.input_gradients) < 1e-4
        assert oracle.distance([observed.gamma_gradient], [expected.gamma_gradient]) < 1e-4
        assert oracle.distance([observed.beta_gradient], [expected.beta_gradient]) < 1e-4
    for name in ("running_mean", "running_var"):
        value = getattr(reference, name).data().asnumpy()
        for device in devices:
            assert oracle.distance([getattr(layer, name).data(device).asnumpy()], [value]) < 1e-5


@pytest.mark.parametrize("case", list(CASES))
def test_the_operators_chosen_for_gpus_are_right_too(case, monkeypatch):
    """They differ in how they sum; nothing in them needs a GPU."""
    centre = operator._centre
    monkeypatch.setattr(operator, "_centre", lambda F, rows, is_on_gpu: centre(F, rows, is_on_gpu=True))
    shapes, axis = CASES[case]
    layer, devices, (gamma, beta) = make_layer(shapes, axis, mode="hybridize", backend="portable")
    shards, heads = random_shards(shapes), random_shards(shapes, seed=5)
    observed = observe(layer, shards, heads, devices)
    expected = oracle.batch_norm(flatten(shards, axis), gamma, beta, -1, heads=flatten(heads, axis))
    assert oracle.distance(flatten(observed.outputs, axis), expected.outputs) < 1e-5
    assert oracle.distance(flatten(observed.input_gradients, axis), expected.input_gradients) < 1e-4


@pytest.mark.parametrize("mode", list(MODES))
def test_the_way_vectors_leave_a_gpu_is_right_too(mode, monkeypatch):
    """Through NDArray's own interface instead of its memory; that works on a CPU device as well."""
    monkeypatch.setattr(HostArrays, "__init__", lambda self, device: setattr(self, "_direct", False))
    shapes = [(3, 5, 4, 6), (1, 5, 4, 6)]
    layer, devices, (gamma, beta) = make_layer(shapes, 1, mode=mode, backend="portable")
    layer.gamma.grad_req = "add"
    shards, heads = random_shards(shapes), random_shards(shapes, seed=5)
    expected = oracle.batch_norm(shards, gamma, beta, heads=heads)
    for times in (1, 2):
        observed = observe(layer, shards, heads, devices)
        assert oracle.distance(observed.outputs, expected.outputs) < 1e-5
        assert oracle.distance(observed.input_gradients, expected.input_gradients) < 1e-4
        assert oracle.distance([observed.gamma_gradient], [times * expected.gamma_gradient]) < 1e-4


@pytest.mark.parametrize("mode", list(MODES))
def test_large_mean(mode):
    """Mean 1e4, deviation 1, float32: E[x²] − E[x]² would leave no correct digit of the variance."""
    shapes = [(3, 4, 9, 9), (1, 4, 9, 9)]
    layer, devices, _ = make_layer(shapes, 1, mode=mode, momentum=0)
    shards = random_shards(shapes, mean=1e4, std=1)
    observe(layer, shards, shards, devices)
    expected = oracle.batch_norm(flatten(shards, 1), np.ones(4), np.zeros(4), -1)
    np.testing.assert_allclose(layer.running_var.data(devices[1]).asnumpy(), expected.var, rtol=1e-3)
    np.testing.assert_allclose(layer.running_mean.data(devices[1]).asnumpy(), expected.mean, rtol=1e-6)


@pytest.mark.parametrize("mode", list(MODES))
def test_one_value_per_channel_and_device(mode):
    """A 1×1 pooled feature with one image each: on one device alone the variance would be 0 and the output β."""
    shapes = [(1, 3, 1, 1)] * 2
    layer, devices, (gamma, beta) = make_layer(shapes, 1, mode=mode)
    shards = [np.full(shape, value, np.float32) for shape, value in zip(shapes, (1, 3))]
    outputs = observe(layer, shards, shards, devices).outputs
    unit = 1 / np.sqrt(1 + 1e-5)
    np.testing.assert_allclose(outputs[0].ravel(), beta - gamma * unit, rtol=1e-5)
    np.testing.assert_allclose(outputs[1].ravel(), beta + gamma * unit, rtol=1e-5)


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("options", [{"center": False}, {"scale": False}, {"center": False, "scale": False}])
def test_without_center_or_scale(options, mode):
    shapes = [(3, 5, 4, 6), (1, 5, 4, 6)]
    devices = cpus(2)
    layer = SyncBatchNorm(timeout=30, gamma_initializer=mx.init.Constant(3), **options)
    layer.initialize(ctx=devices)
    set_mode(layer, mode)
    shards, heads = random_shards(shapes), random_shards(shapes, seed=7)
    outputs, inputs = step(layer, shards, heads, devices)
    gamma = np.full(5, 3.0 if options.get("scale", True) else 1.0)  # nn.BatchNorm takes γ as 1 without scale
    expected = oracle.batch_norm(shards, gamma, np.zeros(5), heads=heads)
    assert oracle.distance([item.asnumpy() for item in outputs], expected.outputs) < 1e-5
    assert oracle.distance([item.grad.asnumpy() for item in inputs], expected.input_gradients) < 1e-4
    assert layer.beta.grad_req == ("write" if options.get("center", True) else "null")
    assert layer.gamma.grad_req == ("write" if options.get("scale", True) else "null")


@pytest.mark.parametrize("mode", list(MODES))
def test_grad_req_add_and_null(mode):
    shapes = [(3, 5, 4, 6), (1, 5, 4, 6)]
    layer, devices, (gamma, beta) = make_layer(shapes, 1, mode=mode)
    shards, heads = random_shards(shapes), random_shards(shapes, seed=7)
    expected = oracle.batch_norm(shards, gamma, beta, heads=heads)
    layer.gamma.grad_req = layer.beta.grad_req = "add"
    for times in (1, 2, 3):
        observed = observe(layer, shards, heads, devices)
        assert oracle.distance([observed.gamma_gradient], [times * expected.gamma_gradient]) < 1e-4
        assert oracle.distance([observed.beta_gradient], [times * expected.beta_gradient]) < 1e-4
    layer.gamma.grad_req = layer.beta.grad_req = "null"
    _, inputs = step(layer, shards, heads, devices)
    assert oracle.distance([item.grad.asnumpy() for item in inputs], expected.input_gradients) < 1e-4
