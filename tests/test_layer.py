"""The layer by itself: outputs, gradients and running statistics of all devices are those of the concatenated batch.

Every shape in every mode and dtype, the options, and any of them at random.
"""

import hypothesis
import mxnet as mx
import numpy as np
import pytest
from hypothesis import strategies as st
from mxnet import autograd
from mxnet.gluon import nn
from reference import Sized, check, check_all
from testing import (
    MODES,
    check_running,
    check_step,
    cpus,
    observe,
    precision,
    random_affine,
    random_shards,
    reference_of,
    set_mode,
    shards_and_heads,
    step,
)

from gluon_syncbn import SyncBatchNorm

pytestmark = pytest.mark.usefixtures("backend")
modes = pytest.mark.parametrize("mode", list(MODES))
DTYPES = ["float32", "float64", "float16"]

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
    "axis -3 of 4": ([(2, 3, 4, 5), (1, 3, 4, 5)], -3),
    "axis 3 of 5": ([(2, 3, 4, 5, 2), (1, 3, 4, 5, 2)], 3),
    "axis 0": ([(4, 3, 5), (4, 2, 5)], 0),
    "one channel": ([(2, 1, 3, 3)] * 2, 1),
    "3 devices, wide": ([(2, 33, 9, 9), (1, 33, 9, 9), (4, 33, 9, 9)], 1),
    "8 devices": ([(1, 8, 5, 3)] * 7 + [(2, 8, 5, 3)], 1),
    "12 devices": ([(1 + i % 3, 3, 2, 2) for i in range(12)], 1),  # cpu(10) is behind cpu(2)
}


def make(shapes, axis=1, dtype="float32", mode="imperative", **options):
    """A layer with γ and β on a device for each shape, and its reference."""
    layer = SyncBatchNorm(axis=axis, timeout=60, in_channels=shapes[0][axis], **options)
    layer.cast(dtype)
    layer.initialize(ctx=cpus(len(shapes)))
    random_affine(layer, shapes[0][axis])
    own = {"activation": options.get("activation"), "group_size": options.get("group_size")}
    return set_mode(layer, mode), reference_of(layer, **own)


@pytest.mark.parametrize("dtype", DTYPES)
@modes
@pytest.mark.parametrize("case", list(CASES))
def test_two_steps(case, mode, dtype):
    shapes, axis = CASES[case]
    layer, norm = make(shapes, axis, dtype, mode)
    for seed in range(2):
        check_step(layer, norm, *shards_and_heads(shapes, dtype, seed))
    for parameter in (layer.running_mean, layer.running_var):
        first, *others = (parameter.data(device).asnumpy() for device in cpus(len(shapes)))
        assert all((first == other).all() for other in others)


@modes
def test_the_order_of_the_sums_is_that_of_the_devices_numbers(mode):
    """Not of their names: cpu(10) is behind cpu(2), whoever comes first. Of more than one order the bits differ."""
    shapes = [(2, 3, 3, 5)] * 12
    results = []
    for order in (range(12), reversed(range(12))):
        layer, _ = make(shapes, mode=mode)
        shards, heads = shards_and_heads(shapes, mean=0)
        inputs = [mx.nd.array(shard, ctx=device) for shard, device in zip(shards, cpus(12))]
        outputs = {}
        with autograd.record():
            for rank in order:
                outputs[rank] = layer(inputs[rank])
        results.append(np.stack([outputs[rank].asnumpy() for rank in range(12)]))
    np.testing.assert_array_equal(*results)


@modes
@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("options", [{}, {"center": False}, {"scale": False}, {"center": False, "scale": False}])
def test_center_scale_and_activation(options, activation, mode):
    shapes = [(3, 5, 4, 6), (1, 5, 4, 6)]
    layer, norm = make(shapes, mode=mode, activation=activation, epsilon=1e-2, momentum=0.5, **options)
    for seed in range(2):
        check_step(layer, norm, *shards_and_heads(shapes, seed=seed, mean=0.3))
    assert layer.beta.grad_req == ("write" if options.get("center", True) else "null")
    assert layer.gamma.grad_req == ("write" if options.get("scale", True) else "null")


@modes
def test_gradients_that_are_added_or_not_asked_for(mode):
    shapes = [(3, 5, 4, 6), (1, 5, 4, 6)]
    layer, norm = make(shapes, mode=mode)
    layer.gamma.grad_req = layer.beta.grad_req = "add"
    for times in (1, 2, 3):
        check_step(layer, norm, *shards_and_heads(shapes), times=times)
    layer.gamma.grad_req = "null"
    layer.beta.grad_req = "write"
    check_step(layer, norm, *shards_and_heads(shapes))
    layer.beta.grad_req = "null"
    check_step(layer, norm, *shards_and_heads(shapes))
    layer.gamma.grad_req = layer.beta.grad_req = "write"
    check_step(layer, norm, *shards_and_heads(shapes))


@modes
def test_one_value_per_channel_and_device(mode):
    """A 1×1 pooled feature with one image each: on one device alone the variance would be 0 and the output β."""
    layer, norm = make([(1, 3, 1, 1)] * 2, mode=mode)
    shards = [np.full((1, 3, 1, 1), value, np.float32) for value in (1, 3)]
    check_step(layer, norm, shards, shards)


@modes
@pytest.mark.parametrize("dtype", DTYPES)
def test_prediction_is_batchnorm_to_the_last_bit(dtype, mode, backend):
    """On each device, after training and before; a graph that was made for training too."""
    shapes = [(3, 5, 4, 6), (1, 5, 4, 6)]
    layer, norm = make(shapes, dtype=dtype, mode=mode)
    plain = nn.BatchNorm(in_channels=5)
    plain.cast(dtype)
    plain.initialize()
    set_mode(plain, mode)
    for seed in range(2):
        for name in ("gamma", "beta", "running_mean", "running_var"):
            getattr(plain, name).set_data(getattr(layer, name).data(mx.cpu(1)))
        x = random_shards([(2, 5, 3, 3)], dtype, seed=9)[0]
        x[1, 0, 0, 0] = np.nan  # stays in its own image and channel
        expected = plain(mx.nd.array(x, dtype=dtype)).asnumpy()
        for device in cpus(2):
            actual = layer(mx.nd.array(x, ctx=device, dtype=dtype)).asnumpy()
            if backend == "portable" or mode == "imperative" or dtype == "float32":
                np.testing.assert_array_equal(actual, expected)
            else:  # within a graph the compiled operator rounds in another order
                rounding = 2 * np.finfo(dtype).eps * np.nanmax(np.abs(expected))
                np.testing.assert_allclose(actual, expected, rtol=0, atol=rounding)
        check_step(layer, norm, *shards_and_heads(shapes, dtype, seed))


@modes
@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("why", ["frozen", "one device", "groups of one"])
def test_where_it_meets_nobody_it_is_batchnorm(why, activation, mode):
    """To the last bit, and the other device need not come."""
    options = {"frozen": {"use_global_stats": True}, "groups of one": {"group_size": 1}}.get(why, {})
    layer, _ = make([(3, 5, 4, 6)] * (1 if why == "one device" else 2), mode=mode, activation=activation, **options)
    net = nn.HybridSequential()
    net.add(nn.BatchNorm(in_channels=5, use_global_stats=why == "frozen"))
    if activation:
        net.add(nn.Activation(activation))
    net.initialize()
    random_affine(net[0], 5)
    for item in (layer, net[0]):
        item.running_mean.set_data(mx.nd.arange(5))
        item.running_var.set_data(mx.nd.arange(1, 6))
    set_mode(net, mode)
    for seed in range(2):
        results = []
        for block, norm in ((layer, layer), (net, net[0])):
            seen = observe(block, *shards_and_heads([(3, 5, 4, 6)], seed=seed, mean=0), cpus(1), layer=norm)
            mx.nd.waitall()  # MXNet's own writes its statistics in the backward pass, untold to the engine
            statistics = [item.data(mx.cpu(0)).asnumpy() for item in (norm.running_mean, norm.running_var)]
            results.append([*seen.outputs, *seen.input_gradients, seen.gamma_gradient, seen.beta_gradient, *statistics])
        for actual, expected in zip(*results):
            np.testing.assert_array_equal(actual, expected)


@modes
def test_running_statistics_change_in_the_forward_pass_in_training_mode_only(mode):
    shapes = [(3, 5, 4, 6), (1, 5, 4, 6)]
    layer, norm = make(shapes, mode=mode)
    shards, heads = shards_and_heads(shapes)
    inputs = [mx.nd.array(shard, ctx=device) for shard, device in zip(shards, cpus(2))]
    for is_recorded in (False, True):
        with autograd.record(train_mode=False) if is_recorded else autograd.predict_mode():
            outputs = [layer(item) for item in inputs]
        mx.nd.waitall()
        check_running(layer, norm)
    with autograd.train_mode():  # not recorded: statistics are estimated anew
        outputs = [layer(item) for item in inputs]
    norm.step(shards)
    check_running(layer, norm)
    with autograd.record():
        outputs = [layer(item) for item in inputs]
    norm.step(shards)
    after = check_running(layer, norm)
    autograd.backward(outputs, [mx.nd.array(head, ctx=device) for head, device in zip(heads, cpus(2))])
    mx.nd.waitall()
    assert all((one == other).all() for one, other in zip(after, check_running(layer, norm)))


@modes
def test_gradients_through_prediction_mode(mode):
    """Recorded with train_mode=False, as for adversarial examples: those of nn.BatchNorm with running statistics."""
    shapes = [(3, 5, 4, 6), (1, 5, 4, 6)]
    layer, norm = make(shapes, mode=mode)
    check_step(layer, norm, *shards_and_heads(shapes))
    norm.frozen = True
    for _ in range(2):
        check_step(layer, norm, *shards_and_heads(shapes, seed=1), train_mode=False)
    norm.frozen = False
    check_step(layer, norm, *shards_and_heads(shapes, seed=2))


class Head(mx.gluon.HybridBlock):
    """One layer called on several feature maps, as a RetinaNet head is on pyramid levels."""

    def __init__(self, times):
        super().__init__()
        self.times = times
        with self.name_scope():
            self.norm = SyncBatchNorm(in_channels=3, timeout=60)

    def hybrid_forward(self, F, x):
        return F.concat(*[self.norm(F.sin(x * (i + 1))) for i in range(self.times)], dim=0)


@modes
def test_a_layer_that_is_called_several_times_per_step(mode):
    """Backward passes of the calls may come in any order; each must meet its own."""
    times, shapes = 6, [(2, 3, 4, 4), (1, 3, 4, 4), (3, 3, 4, 4)]
    head = Head(times)
    head.initialize(ctx=cpus(3))
    set_mode(head, mode)
    norm, layer = reference_of(head.norm), head.norm
    for seed in range(3):
        shards = random_shards(shapes, seed=seed)
        heads = random_shards([(times * n, *rest) for n, *rest in shapes], seed=seed + 50)
        outputs, inputs = step(head, shards, heads, cpus(3))
        outputs = [np.split(item.asnumpy(), times) for item in outputs]
        heads = [np.split(item, times) for item in heads]
        totals = [Sized(0.0, 0.0)] * 3
        d_gamma = Sized(0.0, 0.0)
        for i in range(times):
            warped = [np.sin(shard * np.float32(i + 1)) for shard in shards]
            expected = norm.step(warped, [item[i] for item in heads])
            check_all("output", [item[i] for item in outputs], expected.outputs, **precision(layer))
            chain = [np.cos(shard * (i + 1.0)) * (i + 1) for shard in shards]
            totals = [
                Sized(total.value + part.value * by, total.size + (i + 1) * part.size)
                for total, part, by in zip(totals, expected.input_gradients, chain)
            ]
            d_gamma = Sized(*(a + b for a, b in zip(d_gamma, expected.gamma_gradient)))
        check_all("input gradient", [item.grad.asnumpy() for item in inputs], totals, **precision(layer))
        seen = sum(layer.gamma.grad(device).asnumpy() for device in cpus(3))
        check("gradient of gamma", seen, d_gamma, units=64)
        check_running(layer, norm)


@st.composite
def any_layer(draw):
    """Shapes of the shards with the axis of their channels, and how the layer is made."""
    rank = draw(st.integers(2, 5))
    axis = draw(st.integers(-rank, rank - 1))
    channels = draw(st.integers(1, 17))
    devices = draw(st.integers(2, 4))
    shapes = []
    for _ in range(devices):
        shape = [draw(st.integers(1, 7)) for _ in range(rank)]
        shape[axis] = channels
        shapes.append(tuple(shape))
    options = {
        "epsilon": draw(st.sampled_from([1e-5, 1e-3, 0.1])),
        "momentum": draw(st.sampled_from([0.0, 0.5, 0.875])),
        "center": draw(st.booleans()),
        "scale": draw(st.booleans()),
        "group_size": draw(st.sampled_from([size for size in (None, 1, 2, 4) if not size or devices % size == 0])),
        "activation": draw(st.sampled_from([None, "relu"])),
    }
    return shapes, axis, options


PLAIN = {"epsilon": 1e-5, "momentum": 0.0, "center": False, "scale": False, "group_size": 1}


@modes
@hypothesis.settings(max_examples=100, deadline=None, database=None)
@hypothesis.given(
    case=any_layer(),
    dtype=st.sampled_from(DTYPES),
    mean=st.sampled_from([0.0, 2.0, -30.0]),
    seed=st.integers(0, 2**31),
)
# Two values at -30 whose mean is not a float32: a difference that nn.BatchNorm makes alone.
@hypothesis.example(case=([(2, 11), (1, 11), (1, 11)], 1, PLAIN), dtype="float32", mean=-30.0, seed=2)
def test_any_layer(mode, case, dtype, mean, seed):
    shapes, axis, options = case
    layer, norm = make(shapes, axis, dtype, mode, **options)
    check_step(layer, norm, *shards_and_heads(shapes, dtype, seed, mean=mean, std=1))
