"""Batch Renormalization against an oracle, and its schedule. On the native back end: portable refuses it."""

import mxnet as mx
import numpy as np
import oracle
import pytest
from harness import MODES, cpus, random_affine, random_shards, set_mode, step

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm, convert_batchnorm, convert_sync_batchnorm
from gluon_syncbn.layer.spec import LayerSpec

CHANNELS = 4
TOLERANCE = {"float32": 1e-5, "float64": 1e-12, "float16": 4e-3}


class Oracle:
    """The layer's steps in NumPy: r and d are constants to the gradient, so they are another γ and β."""

    def __init__(self, gamma, beta, limits, epsilon=1e-5, momentum=0.9):
        self.gamma, self.beta, self.limits = gamma.astype(np.float64), beta.astype(np.float64), limits
        self.epsilon, self.momentum = epsilon, momentum
        self.mean, self.var = np.zeros(len(gamma)), np.ones(len(gamma))

    def step(self, shards, heads, number=0):
        r_max, d_max = self.limits(number)
        seen = oracle.batch_norm(shards, self.gamma, self.beta)
        sigma = np.sqrt(self.var + self.epsilon)
        r = np.clip(np.sqrt(seen.var + self.epsilon) / sigma, 1 / r_max, r_max)
        d = np.clip((seen.mean - self.mean) / sigma, -d_max, d_max)
        made = oracle.batch_norm(shards, self.gamma * r, self.beta + self.gamma * d, heads=heads)
        self.mean = self.momentum * self.mean + (1 - self.momentum) * seen.mean
        self.var = self.momentum * self.var + (1 - self.momentum) * seen.var
        return made, r * made.gamma_gradient + d * made.beta_gradient


def check_step(layer, expected: Oracle, shards, heads, devices, number, dtype="float32"):
    outputs, inputs = step(layer, shards, heads, devices)
    made, d_gamma = expected.step(shards, heads, number)
    limit = TOLERANCE[dtype]
    assert oracle.distance([item.asnumpy() for item in outputs], made.outputs) < limit
    assert oracle.distance([item.grad.asnumpy() for item in inputs], made.input_gradients) < 10 * limit
    size = sum(np.abs(head).astype(np.float64).sum() for head in heads)
    for parameter, gradient in ((layer.gamma, d_gamma), (layer.beta, made.beta_gradient)):
        total = sum(parameter.grad(device).asnumpy().astype(np.float64) for device in devices)
        assert np.abs(total - gradient).max() / size < limit
    for device in devices:
        vectors = 1e-5 if dtype == "float16" else limit
        assert oracle.distance([layer.running_mean.data(device).asnumpy()], [expected.mean]) < vectors
        assert oracle.distance([layer.running_var.data(device).asnumpy()], [expected.var]) < vectors


def make(devices, renorm, dtype="float32", mode="imperative", **options):
    layer = SyncBatchNorm(in_channels=CHANNELS, renorm=renorm, **options)
    layer.cast(dtype)
    layer.initialize(ctx=cpus(devices))
    gamma, beta = random_affine(layer, CHANNELS)
    set_mode(layer, mode)
    return layer, gamma, beta


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("mode", list(MODES))
def test_the_numbers_are_the_oracles(mode, dtype, devices):
    layer, gamma, beta = make(devices, (1.5, 0.5), dtype, mode)
    expected = Oracle(gamma, beta, lambda step: (1.5, 0.5))
    for number in range(3):
        shapes = [(1 + i % 2, CHANNELS, 3, 5) for i in range(devices)]
        shards = random_shards(shapes, dtype, seed=number, mean=0.5 * number, std=1 + number)
        heads = random_shards(shapes, dtype, seed=10 + number)
        check_step(layer, expected, shards, heads, cpus(devices), number, dtype)


def test_both_limits_were_met_and_left_in_that_test():
    """Or it would have shown nothing of one of them."""
    expected = Oracle(np.ones(CHANNELS), np.zeros(CHANNELS), lambda step: (1.5, 0.5))
    ratios = []
    for number in range(3):
        shards = random_shards(
            [(1, CHANNELS, 3, 5), (2, CHANNELS, 3, 5)], seed=number, mean=0.5 * number, std=1 + number
        )
        seen = oracle.batch_norm(shards, np.ones(CHANNELS), np.zeros(CHANNELS))
        ratios += list(np.sqrt(seen.var / expected.var))
        expected.step(shards, [np.zeros(shard.shape) for shard in shards], number)
    assert min(ratios) < 1.5 < max(ratios)


@pytest.mark.parametrize("schedule", [[(0, 1, 0), (2, 1, 0), (4, 3, 2)], [(2, 1.25, 0.5), (4.5, 3, 2)]])
@pytest.mark.parametrize("mode", list(MODES))
def test_a_schedule_counts_the_training_passes(mode, schedule):
    """Also over steps of which some are on fewer devices, and predictions do not count.

    Before the first point and after the last the limits are those of that point.
    """
    layer, gamma, beta = make(2, schedule, mode=mode)
    steps, r_max, d_max = zip(*schedule)
    expected = Oracle(gamma, beta, lambda step: (np.interp(step, steps, r_max), np.interp(step, steps, d_max)))
    for number in range(6):
        shards = random_shards([(2, CHANNELS, 3, 5)] * 2, seed=number, mean=1, std=2)
        heads = random_shards([(2, CHANNELS, 3, 5)] * 2, seed=10 + number)
        if number == 3:
            with gluon_syncbn.devices(cpus(1)):
                step(layer, shards[:1], heads[:1], cpus(1))
            expected.step(shards[:1], heads[:1], number)
            layer(mx.nd.array(shards[0])).wait_to_read()
        else:
            check_step(layer, expected, shards, heads, cpus(2), number)


@pytest.mark.parametrize("group_size", [None, 1, 2])
def test_the_step_is_one_number_on_all_devices(group_size):
    """After steps on some of them, too: where limits bind, equal data then give equal outputs."""
    devices, schedule = cpus(4), [(0, 1, 0), (20, 21, 20)]
    layer, _, _ = make(4, schedule, group_size=group_size)
    shape = (2, CHANNELS, 3, 5)
    passes = 0
    for number, used in enumerate((4, 1, 4, 3, 1, 4)):
        chosen = devices[-used:] if number % 2 else devices[:used]
        data = random_shards([shape], seed=number, mean=1000, std=1)[0]
        with gluon_syncbn.devices(chosen):
            step(layer, [data] * used, [data] * used, chosen)
        passes += 1
    for parameter in (layer.running_mean, layer.running_var):  # statistics of groups may differ, the step may not
        parameter.set_data(mx.nd.ones(CHANNELS))
    data = random_shards([shape], mean=1000, std=1)[0]
    outputs, _ = step(layer, [data] * 4, [data] * 4, devices)
    expected = Oracle(
        layer.gamma.data(devices[0]).asnumpy(), layer.beta.data(devices[0]).asnumpy(), lambda step: (1 + step, step)
    )
    expected.mean, expected.var = np.ones(CHANNELS), np.ones(CHANNELS)
    made, _ = expected.step([data], [data], passes)
    for item in outputs:
        assert oracle.distance([item.asnumpy()], made.outputs) < 1e-4


def test_a_step_that_was_given_up_leaves_one_number():
    """A subgroup of two has done a pass that the other has not."""
    layer, _, _ = make(4, [(0, 1, 0), (20, 21, 20)], group_size=2, timeout=1)
    data = random_shards([(2, CHANNELS, 3, 5)], mean=1000, std=1)[0]
    step(layer, [data] * 4, [data] * 4, cpus(4))
    with pytest.raises(mx.MXNetError):
        outputs, _ = step(layer, [data] * 3, [data] * 3, cpus(3))
        for item in outputs:
            item.wait_to_read()
    gluon_syncbn.abandon_step()
    for parameter in (layer.running_mean, layer.running_var):
        parameter.set_data(mx.nd.ones(CHANNELS))
    outputs, _ = step(layer, [data] * 4, [data] * 4, cpus(4))
    for item in outputs[1:]:
        np.testing.assert_array_equal(item.asnumpy(), outputs[0].asnumpy())


def test_no_limits_but_1_and_0_is_batch_normalization():
    """To the bit."""
    results = []
    for renorm in (None, (1, 0)):
        layer, _, _ = make(2, renorm)
        shards, heads = random_shards([(2, CHANNELS, 3, 5)] * 2), random_shards([(2, CHANNELS, 3, 5)] * 2, seed=1)
        outputs, inputs = step(layer, shards, heads, cpus(2))
        results.append([item.asnumpy() for item in outputs] + [item.grad.asnumpy() for item in inputs])
    for one, other in zip(*results):
        np.testing.assert_array_equal(one, other)


def test_prediction_is_that_of_batchnorm():
    layer, _, _ = make(2, (3, 5))
    shards = random_shards([(2, CHANNELS, 3, 5)] * 2)
    step(layer, shards, shards, cpus(2))
    x = mx.nd.array(shards[0])
    predicted = layer(x).asnumpy()
    np.testing.assert_array_equal(predicted, convert_batchnorm(layer)(x).asnumpy())


def test_with_what_follows_it_and_in_place():
    """r and d are part of what is undone."""
    net = mx.gluon.nn.HybridSequential()
    net.add(mx.gluon.nn.BatchNorm(in_channels=CHANNELS), mx.gluon.nn.LeakyReLU(0.1))
    results = []
    for options in ({"in_place": True}, {"fuse": False}):
        convert_sync_batchnorm(net, renorm=(1.5, 0.5), backend="native", **options)
        net.initialize(ctx=cpus(2), force_reinit=True)
        set_mode(net, "static")
        shapes = [(2, CHANNELS, 3, 5)] * 2
        outputs, inputs = step(net, random_shards(shapes), random_shards(shapes, seed=1), cpus(2))
        results.append([item.asnumpy() for item in outputs] + [item.grad.asnumpy() for item in inputs])
    for one, other in zip(*results):
        assert oracle.distance([one], [other]) < 1e-5


@pytest.mark.parametrize(
    "renorm", [3, (3,), (0.5, 1), (2, -1), (2, float("nan")), [], [(0, 1, 0), (0, 2, 1)], [(0, 1)], "3"]
)
def test_what_is_no_schedule_is_refused(renorm):
    with pytest.raises((TypeError, ValueError), match="SyncBatchNorm 'layer_?': .*renorm"):
        SyncBatchNorm(renorm=renorm, prefix="layer_")


@pytest.mark.parametrize(
    "renorm, schedule",
    [
        (None, None),
        ((3, 5), ((0.0, 3.0, 5.0),)),
        ([3, 5], ((0.0, 3.0, 5.0),)),
        ([[10, 1, 0], (20, 3, 5)], ((10.0, 1.0, 0.0), (20.0, 3.0, 5.0))),
        ([(0, 1, 0)], ((0.0, 1.0, 0.0),)),
    ],
)
def test_what_users_may_write(renorm, schedule):
    assert LayerSpec.of("x", renorm=renorm).renorm == schedule


def test_a_symbol_carries_it(tmp_path):
    """Saved and loaded, with tuples or not."""
    sym = gluon_syncbn.symbol.SyncBatchNorm(mx.sym.var("x"), num_devices=2, renorm=[(0, 1, 0), (5, 3, 5)], name="bn")
    sym.save(str(tmp_path / "net.json"))
    assert '"renorm"' in gluon_syncbn.symbol.load(str(tmp_path / "net.json")).tojson().replace("\\", "")


@pytest.mark.parametrize("mode", list(MODES))
def test_on_one_device(mode):
    """There the layer is nn.BatchNorm otherwise, and the option would have been ignored."""
    layer, gamma, beta = make(1, (1.5, 0.5), mode=mode)
    expected = Oracle(gamma, beta, lambda step: (1.5, 0.5))
    for number in range(3):
        shards = random_shards([(1, CHANNELS, 3, 5)], seed=number, mean=0.5 * number, std=1 + number)
        check_step(layer, expected, shards, random_shards([(1, CHANNELS, 3, 5)], seed=9), cpus(1), number)


def test_in_groups_of_one():
    layer, gamma, beta = make(2, (1.5, 0.5), group_size=1)
    shards = random_shards([(2, CHANNELS, 3, 5)] * 2, mean=1)
    outputs, _ = step(layer, shards, shards, cpus(2))
    for shard, output in zip(shards, outputs):
        made, _ = Oracle(gamma, beta, lambda step: (1.5, 0.5)).step([shard], [np.zeros(shard.shape)])
        assert oracle.distance([output.asnumpy()], made.outputs) < 1e-5
