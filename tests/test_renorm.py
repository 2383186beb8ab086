"""Batch Renormalization: the numbers of the reference, and a schedule that counts the training passes.

On the native back end; portable refuses it.
"""

import mxnet as mx
import numpy as np
import pytest
import test_layer
from reference import check_tensors
from testing import check_running, check_step, check_steps, cpus, observe, shards_and_heads

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm, convert_batchnorm, convert_sync_batchnorm

CHANNELS = 4
BOUND = (1.5, 0.5)
GROWING = [(0, 1, 0), (8, 5, 4)]  # with each pass other limits
WRITTEN = [  # by users, and what is meant
    (None, None),
    ((3, 5), [(0.0, 3.0, 5.0)]),
    ([3, 5], [(0.0, 3.0, 5.0)]),
    (np.array([3, 5]), [(0.0, 3.0, 5.0)]),
    ([[1, 1, 0], (3, 3, 5)], [(1.0, 1.0, 0.0), (3.0, 3.0, 5.0)]),
    ([(0, 1, 0)], [(0.0, 1.0, 0.0)]),
]
WRONG = [3, (3,), (0.5, 1), (2, -1), (2, float("nan")), [], [(0, 1, 0), (0, 2, 1)], [(0, 1)], "3"]
SHAPES = [(2, CHANNELS, 3, 5), (1, CHANNELS, 3, 5), (3, CHANNELS, 3, 5), (1, CHANNELS, 3, 5)]


def make(devices, renorm, dtype="float32", mode="imperative", **options):
    return test_layer.make(SHAPES[:devices], 1, dtype, mode, renorm=renorm, backend="native", **options)


def draw(devices=2, seed=0, dtype="float32", mean=1.0, std=2.0):
    """Shards and heads, on each device others."""
    return shards_and_heads(SHAPES[:devices], dtype, seed, mean=mean, std=std)


def check_step_on(used, layer, norm, seed):
    """A step on some of the devices, whose statistics the others get when the block ends."""
    shards, heads = draw(len(used), seed, mean=3)
    chosen = [mx.cpu(device) for device in used]
    with gluon_syncbn.devices(chosen):
        seen = observe(layer, shards, heads, chosen)
    check_tensors(seen.outputs, seen.input_gradients, norm.step(shards, heads, used=used), units=16)
    check_running(layer, norm)


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_the_numbers_are_the_references(mode, dtype, devices):
    """On one device too, where the layer is nn.BatchNorm otherwise, and the option would have been ignored."""
    layer, norm = make(devices, BOUND, dtype, mode)
    met = []
    for number, (mean, std) in enumerate([(0, 1), (0.3, 2), (2, 3), (-1, 0.2)]):
        shards, heads = draw(devices, number, dtype, mean, std)
        batch = np.concatenate(shards).astype(np.float64)
        deviation = np.sqrt(norm.running()[1].value + norm.epsilon)
        r = np.sqrt(batch.var((0, 2, 3)) + norm.epsilon) / deviation
        d = (batch.mean((0, 2, 3)) - norm.running()[0].value) / deviation
        met += [*np.where(r > 1.5, "high r", np.where(r < 1 / 1.5, "low r", "r"))]
        met += [*np.where(d > 0.5, "high d", np.where(d < -0.5, "low d", "d"))]
        check_step(layer, norm, shards, heads)
    assert set(met) == {"high r", "low r", "r", "high d", "low d", "d"}  # or this shows nothing of one of them


@pytest.mark.parametrize("schedule", [[(0, 1, 0), (2, 1, 0), (4, 3, 2)], [(2, 1.25, 0.5), (4.5, 3, 2)]])
def test_a_schedule_counts_the_training_passes(mode, schedule):
    """Also those on fewer devices, and not predictions; it goes on where the layer moves or is converted again.

    Before the first point the limits are those of that point.
    """
    layer, norm = make(2, schedule, mode=mode)
    for number in range(7):
        if number == 3:
            check_step_on([1], layer, norm, number)
            layer(mx.nd.array(draw()[0][0])).wait_to_read()
            continue
        if number == 4:
            layer = convert_sync_batchnorm(layer, renorm=schedule, timeout=60, backend="native")
        if number == 5:
            layer.collect_params().reset_ctx([mx.cpu(0), mx.cpu(2)])
        check_step(layer, norm, *draw(seed=number), layer.gamma.list_ctx())


@pytest.mark.parametrize("group_size", [None, 1, 2])
def test_the_pass_is_one_number_for_all_groups(mode, group_size):
    """After steps on some of the devices, too, of which a group may have none."""
    layer, norm = make(4, GROWING, mode=mode, group_size=group_size)
    for number, used in enumerate([[0, 1, 2, 3], [0], [3, 2, 1, 0], [1, 2, 3], [3], [0, 1, 2, 3]]):
        check_step_on(used, layer, norm, number)


def test_a_step_that_was_given_up_leaves_one_number():
    """A group of two has done a pass that the other has not."""
    layer, norm = make(4, GROWING, group_size=2, timeout=1)
    check_step(layer, norm, *draw(4))
    with pytest.raises(mx.MXNetError):
        observe(layer, *draw(3), cpus(3))
    gluon_syncbn.abandon_step()
    norm.passes += 1
    layer.running_mean.set_data(mx.nd.zeros(CHANNELS))
    layer.running_var.set_data(mx.nd.ones(CHANNELS))
    for device in (0, 2):
        norm.set_running(np.zeros(CHANNELS), np.ones(CHANNELS), device)
    check_step(layer, norm, *draw(4, seed=1))


def test_no_limits_but_1_and_0_is_batch_normalization(mode):
    """To the bit."""
    results = []
    for renorm in (None, (1, 0)):
        layer, norm = make(2, renorm, mode=mode)
        results.append([array for seed in range(2) for array in check_step(layer, norm, *draw(seed=seed))])
    np.testing.assert_equal(*results)


def test_prediction_is_that_of_batchnorm(mode):
    """And so are its gradients; neither counts as a pass."""
    layer, norm = make(2, GROWING, mode=mode)
    for seed in range(3):
        check_step(layer, norm, *draw(seed=seed))
        norm.frozen = True
        check_step(layer, norm, *draw(seed=seed + 10), train_mode=False)
        norm.frozen = False
    x = mx.nd.array(draw()[0][0])
    predicted = layer(x).asnumpy()
    np.testing.assert_array_equal(predicted, convert_batchnorm(layer)(x).asnumpy())


@pytest.mark.parametrize("renorm", WRONG)
def test_what_is_no_schedule_is_refused(renorm):
    with pytest.raises((TypeError, ValueError), match="SyncBatchNorm 'layer_?': .*renorm"):
        SyncBatchNorm(renorm=renorm, prefix="layer_")


@pytest.mark.parametrize("renorm, schedule", WRITTEN)
def test_what_users_may_write(renorm, schedule):
    layer, norm = make(2, renorm)
    norm.renorm = schedule
    shown = repr(layer)
    assert f"renorm={tuple(schedule)!r}" in shown if schedule else "renorm" not in shown
    check_steps(layer, norm, lambda seed: draw(seed=seed), 3)
