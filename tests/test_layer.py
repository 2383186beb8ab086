"""The layer by itself: outputs, gradients and running statistics of all devices are those of the concatenated batch.

Every shape in every mode and dtype, the options, and any of them at random.
"""

import hypothesis
import mxnet as mx
import numpy as np
import pytest
import testing
from hypothesis import strategies as st
from mxnet import autograd
from mxnet.gluon import nn
from reference import check, check_tensors, total
from testing import MODES, check_running, check_step, cpus, initialized, on_devices, reference_of, shards_and_heads

from gluon_syncbn import SyncBatchNorm

pytestmark = pytest.mark.usefixtures("backend")
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
    layer = SyncBatchNorm(axis=axis, in_channels=shapes[0][axis], **{"timeout": 60, **options})
    testing.random_affine(initialized(layer, len(shapes), mode, dtype), shapes[0][axis])
    own = {name: options.get(name) for name in ("activation", "group_size", "renorm")}
    return layer, reference_of(layer, **own)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", list(CASES))
def test_two_steps(case, mode, dtype):
    shapes, axis = CASES[case]
    layer, norm = make(shapes, axis, dtype, mode)
    testing.check_steps(layer, norm, lambda seed: shards_and_heads(shapes, dtype, seed))
    for parameter in (layer.running_mean, layer.running_var):
        first, *others = (parameter.data(device).asnumpy() for device in cpus(len(shapes)))
        assert all((first == other).all() for other in others)


def test_the_order_of_the_sums_is_that_of_the_devices_numbers(mode):
    """Not of their names: cpu(10) is behind cpu(2), whoever comes first. Of more than one order the bits differ."""
    shapes = [(2, 3, 3, 5)] * 12
    inputs = on_devices(testing.random_shards(shapes, mean=0))
    results = []
    for order in (range(12), reversed(range(12))):
        layer, _ = make(shapes, mode=mode)
        with autograd.record():
            outputs = {rank: layer(inputs[rank]) for rank in order}
        results.append(np.stack([outputs[rank].asnumpy() for rank in range(12)]))
    np.testing.assert_array_equal(*results)


def test_gradients_that_are_added_or_not_asked_for(mode):
    shapes = [(3, 5, 4, 6), (1, 5, 4, 6)]
    layer, norm = make(shapes, mode=mode)
    layer.gamma.grad_req = layer.beta.grad_req = "add"
    for times in (1, 2, 3):
        check_step(layer, norm, *shards_and_heads(shapes), times=times)
    for asked in (("null", "write"), ("null", "null"), ("write", "write")):
        layer.gamma.grad_req, layer.beta.grad_req = asked
        check_step(layer, norm, *shards_and_heads(shapes))


@pytest.mark.parametrize("dtype", DTYPES)
def test_prediction_is_batchnorm_to_the_last_bit(dtype, mode, backend):
    """On each device, after training and before; a graph that was made for training too."""
    shapes = [(3, 5, 4, 6), (1, 5, 4, 6)]
    layer, norm = make(shapes, dtype=dtype, mode=mode)
    plain = initialized(nn.BatchNorm(in_channels=5), 1, mode, dtype)
    for seed in range(2):
        for name in ("gamma", "beta", "running_mean", "running_var"):
            getattr(plain, name).set_data(getattr(layer, name).data(mx.cpu(1)))
        x = testing.random_shards([(2, 5, 3, 3)], dtype, seed=9)[0]
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


@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("why", ["frozen", "one device", "groups of one"])
def test_where_it_meets_nobody_it_is_batchnorm(why, activation, mode):
    """To the last bit, and the other device need not come."""
    options = {"frozen": {"use_global_stats": True}, "groups of one": {"group_size": 1}}.get(why, {})
    layer, _ = make([(3, 5, 4, 6)] * (1 if why == "one device" else 2), mode=mode, activation=activation, **options)
    behind = [nn.Activation(activation)] if activation else []
    net = testing.sequential(nn.BatchNorm(in_channels=5, use_global_stats=why == "frozen"), *behind)
    initialized(net, 1, mode)
    testing.random_affine(net[0], 5)
    trained = []
    for block, item in ((layer, layer), (net, net[0])):
        item.running_mean.set_data(mx.nd.arange(5))
        item.running_var.set_data(mx.nd.arange(1, 6))
        norm = reference_of(item, activation=activation, frozen=why == "frozen", group_size=1)
        data = [shards_and_heads([(3, 5, 4, 6)], seed=seed, mean=0) for seed in range(2)]
        trained.append([check_step(block, norm, *arrays, cpus(1), layer=item, used=[0]) for arrays in data])
    for ours, theirs in zip(*trained):  # ours has the statistics of the other device, too
        np.testing.assert_equal(ours[: len(theirs)], theirs)


def test_running_statistics_change_in_the_forward_pass_in_training_mode_only(mode):
    shapes = [(3, 5, 4, 6), (1, 5, 4, 6)]
    layer, norm = make(shapes, mode=mode)
    shards, heads = shards_and_heads(shapes)
    inputs = on_devices(shards)
    for mode_of_call, is_training in (
        (autograd.predict_mode(), False),
        (autograd.record(train_mode=False), False),
        (autograd.train_mode(), True),  # not recorded: statistics are estimated anew
        (autograd.record(), True),
    ):
        with mode_of_call:
            outputs = [layer(item) for item in inputs]
        mx.nd.waitall()
        if is_training:
            norm.step(shards)
        after = check_running(layer, norm)
    autograd.backward(outputs, on_devices(heads))
    mx.nd.waitall()
    assert all((one == other).all() for one, other in zip(after, check_running(layer, norm)))


def test_the_gradient_of_a_recorded_prediction_is_its_own(mode, backend):
    """Statistics are constants, and stay, also if ``backward()`` is called for training, which it is by default.

    But for what MXNet's own BatchNorm computes in a graph (docs/limits.md).
    """
    is_mxnets = backend == "portable" and mode != "imperative"
    shapes = [(3, 5, 4, 6), (1, 5, 4, 6)]
    layer, norm = make(shapes, mode=mode)
    norm.frozen = True

    def take_step(block, shards, heads, devices, _):
        inputs = on_devices(shards, devices, learn=True)
        with autograd.record(train_mode=False):
            outputs = [block(item) for item in inputs]
        autograd.backward(outputs, on_devices(heads, devices), train_mode=not is_mxnets)
        return outputs, inputs

    check_step(layer, norm, *shards_and_heads(shapes), train_mode=False, take_step=take_step)


class Head(mx.gluon.HybridBlock):
    """One layer called on several feature maps, as a RetinaNet head is on pyramid levels."""

    TIMES = 6

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.norm = SyncBatchNorm(in_channels=3, timeout=60)

    def hybrid_forward(self, F, x):
        return F.concat(*[self.norm(part) for part in F.split(x, num_outputs=self.TIMES, axis=0)], dim=0)


def test_a_layer_that_is_called_several_times_per_step(mode):
    """Backward passes of the calls may come in any order; each must meet its own."""
    head = initialized(Head(), 3, mode)
    norm, how = reference_of(head.norm), testing.precision(head.norm)
    for seed in range(3):
        shards, heads = shards_and_heads([(Head.TIMES * images, 3, 4, 4) for images in (2, 1, 3)], seed=seed)
        seen = testing.observe(head, shards, heads, cpus(3), head.norm)
        of_calls = [
            zip(*(np.split(item, Head.TIMES) for item in items))
            for items in (shards, heads, seen.outputs, seen.input_gradients)
        ]
        d_gammas = []
        for x, dy, y, dx in zip(*of_calls):
            expected = norm.step(x, dy)
            check_tensors(y, dx, expected, **how)
            d_gammas.append(expected.gamma_gradient)
        check("gradient of gamma", seen.gamma_gradient, total(d_gammas), units=64)
        check_running(head.norm, norm)


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


@pytest.mark.parametrize("mode", list(MODES))  # not the fixture, which Hypothesis refuses
@hypothesis.settings(max_examples=60, deadline=None, database=None)
@hypothesis.given(
    case=any_layer(), dtype=st.sampled_from(DTYPES), mean=st.sampled_from([0.0, 2.0, -30.0]), seed=st.integers(0, 2**31)
)
# Two values at -30 whose mean is not a float32: a difference that nn.BatchNorm makes alone.
@hypothesis.example(case=([(2, 11), (1, 11), (1, 11)], 1, PLAIN), dtype="float32", mean=-30.0, seed=2)
def test_any_layer(mode, case, dtype, mean, seed):
    shapes, axis, options = case
    layer, norm = make(shapes, axis, dtype, mode, **options)
    check_step(layer, norm, *shards_and_heads(shapes, dtype, seed, mean=mean, std=1))
    assert layer.beta.grad_req == ("write" if options["center"] else "null")
    assert layer.gamma.grad_req == ("write" if options["scale"] else "null")
