"""The reference agrees with its own finite differences and with `nn.BatchNorm`, so that agreeing with it means
something; and what is off in one small channel is seen."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from mxnet.gluon import nn
from reference import UNIT, Norm, Sized, check
from testing import initialized, observe, random_shards

OPTIONS = [
    {},
    {"axis": -1},
    {"axis": 0},
    {"group_size": 1},
    {"group_size": 2, "activation": "relu"},
    {"activation": "leaky"},
    {"activation": "relu", "skip": True},
    {"scale": False},
    {"frozen": True},
    {"in_place": "float16", "activation": "leaky"},
]


def draw(axis=1, channels=3):
    rng = np.random.RandomState(1)
    shapes = [[2, 2, 2], [1, 3, 2], [2, 2, 1]]
    for shape in shapes:
        shape[axis] = channels
    return [[rng.standard_normal(shape) for shape in shapes] for _ in range(3)]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradients_are_finite_differences(options):
    options = dict(options)
    shards, heads, skips = draw(options.get("axis", 1))
    skips = skips if options.pop("skip", False) else None
    gamma, beta = np.array([0.5, -1.5, 2.0]), np.array([0.3, 0.0, -0.6])

    def step(with_heads=None):
        norm = Norm(gamma, beta, **options)
        norm.set_running([0.1, -0.2, 0.3], [0.5, 1.0, 2.0])
        return norm.step(shards, with_heads, skips)

    def loss():
        return sum((item.value * head).sum() for item, head in zip(step().outputs, heads))

    expected = step(heads)
    pairs = [*zip(shards, expected.input_gradients), (gamma, expected.gamma_gradient), (beta, expected.beta_gradient)]
    pairs += zip(skips, expected.skip_gradients) if skips else []
    for values, gradient in pairs:
        for index in np.ndindex(values.shape):
            original = values[index]
            values[index] = original + 1e-6
            above = loss()
            values[index] = original - 1e-6
            slope = (above - loss()) / 2e-6
            values[index] = original
            assert slope == pytest.approx(gradient.value[index], rel=1e-5, abs=1e-6)


def test_renorm_is_another_gamma_and_beta():
    """By the formulas of the paper, with r and d as constants to the gradient."""
    gamma, beta = np.array([0.5, -1.5, 2.0]), np.array([0.3, 0.0, -0.6])
    norm, mean, var = Norm(gamma, beta, renorm=(1.25, 0.25)), np.zeros(3), np.ones(3)
    shards, heads, _ = draw()
    for number in range(3):
        shards = [shard * (1 + number) + number for shard in shards]
        r_max, d_max = norm.renorm = [(1.25, 0.25), (1, 0), (3, 1)][number]
        whole = np.concatenate([np.moveaxis(shard, 1, -1).reshape(-1, 3) for shard in shards])
        r = np.clip(np.sqrt((whole.var(0) + 1e-5) / (var + 1e-5)), 1 / r_max, r_max)
        d = np.clip((whole.mean(0) - mean) / np.sqrt(var + 1e-5), -d_max, d_max)
        plain = Norm(gamma * r, beta + gamma * d).step(shards, heads)
        seen = norm.step(shards, heads)
        for one, other in zip((*seen.outputs, *seen.input_gradients), (*plain.outputs, *plain.input_gradients)):
            np.testing.assert_allclose(one.value, other.value, rtol=1e-12, atol=1e-14)
        wanted = r * plain.gamma_gradient.value + d * plain.beta_gradient.value
        np.testing.assert_allclose(seen.gamma_gradient.value, wanted, rtol=1e-12, atol=1e-14)
        mean, var = 0.9 * mean + 0.1 * whole.mean(0), 0.9 * var + 0.1 * whole.var(0)
        for item, value in zip(norm.running(), (mean, var)):
            np.testing.assert_allclose(item.value, value, rtol=1e-12)


@pytest.mark.parametrize("axis", [1, -1])
def test_one_device_is_batchnorm_in_float64(axis):
    layer = initialized(nn.BatchNorm(axis=axis, in_channels=3, epsilon=2**-10, momentum=0.75), dtype="float64")
    layer.gamma.set_data(mx.nd.array([0.5, -1.5, 2.0], dtype="float64"))
    norm = Norm([0.5, -1.5, 2.0], np.zeros(3), axis=axis, epsilon=2**-10, momentum=0.75)
    shape = (4, 3, 5, 3)
    for seed in range(2):
        shards, heads = random_shards([shape], "float64", seed), random_shards([shape], "float64", seed + 5)
        seen, expected = observe(layer, shards, heads, [mx.cpu(0)]), norm.step(shards, heads)
        for name, one, other in (
            ("output", seen.outputs[0], expected.outputs[0]),
            ("input gradient", seen.input_gradients[0], expected.input_gradients[0]),
            ("gradient of gamma", seen.gamma_gradient, expected.gamma_gradient),
            ("gradient of beta", seen.beta_gradient, expected.beta_gradient),
            ("running mean", layer.running_mean.data().asnumpy(), norm.running()[0]),
            ("running variance", layer.running_var.data().asnumpy(), norm.running()[1]),
        ):
            check(name, one, other, "float64", axis=axis, units=64)
    with autograd.predict_mode():
        predicted = layer(mx.nd.array(shards[0], dtype="float64")).asnumpy()
    check("prediction", predicted, norm.step(shards, training=False).outputs[0], "float64", axis=axis, units=64)


@pytest.mark.parametrize("dtype", list(UNIT))
def test_an_error_in_a_small_channel_is_seen(dtype):
    values = np.array([[1e6, 1e-6], [-1e6, 2e-6]])
    expected = Sized(values, np.abs(values).max(0))
    check("it", values, expected, dtype)
    with pytest.raises(AssertionError, match="1 of 2 channels are wrong; channel 1 is off by"):
        check("it", values + [0, 40 * UNIT[dtype] * 1e-5], expected, dtype, units=1)
    for wrong in (np.nan, np.inf):
        with pytest.raises(AssertionError, match="channel 0 is off"):
            check("it", values + [wrong, 0], expected, dtype)
    with pytest.raises(AssertionError, match="the shape is"):
        check("it", values[0], expected, dtype)


def test_which_side_of_the_edge_was_taken_counts_for_the_gradient_alone():
    norm, shards, heads = Norm(np.ones(3), np.zeros(3), activation="relu"), *draw()[:2]
    outputs = [item.value for item in norm.step(shards, heads).outputs]
    flipped = [np.where(item == item[item > 0].min(), 0, item) for item in outputs]
    one, other = norm.step(shards, heads), norm.step(shards, heads, seen=flipped)
    assert all((a.value == b.value).all() for a, b in zip(one.outputs, other.outputs))
    assert any((a.value != b.value).any() for a, b in zip(one.input_gradients, other.input_gradients))
