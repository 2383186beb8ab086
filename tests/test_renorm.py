"""Batch Renormalization: the numbers of the reference, with limits that stay or change between steps.

On the native back end; portable refuses it.
"""

import copy

import mxnet as mx
import numpy as np
import pytest
import test_layer
from mxnet import autograd
from mxnet.gluon import nn
from reference import check_tensors
from testing import (
    check_running,
    check_step,
    check_steps,
    cpus,
    initialized,
    observe,
    reference_of,
    sequential,
    set_mode,
    shards_and_heads,
)

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm, convert_batchnorm, convert_sync_batchnorm

CHANNELS = 4
BOUND = (1.5, 0.5)
GROWING = [(1, 0), (1.25, 0), (2, 0.5), (2, 3), (5, 4), (1, 0), (3, 1)]  # from step to step
WRONG = [3, (3,), (0.5, 1), (2, -1), (2, float("nan")), (), (1, 2, 3), [(0, 1)], "3"]
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


def test_nan_stays(mode):
    """A batch with NaN leaves NaN in the running statistics of its channel; later batches must not look right there."""
    layer, norm = make(2, BOUND, mode=mode)
    for number in range(3):
        shards, heads = draw(2, number)
        if number == 1:
            shards[0][0, 2, 0, 0] = np.nan
        seen, expected = observe(layer, shards, heads, cpus(2)), norm.step(shards, heads)
        for arrays, sized in ((seen.outputs, expected.outputs), (seen.input_gradients, expected.input_gradients)):
            for array, item in zip(arrays, sized):
                np.testing.assert_allclose(array, item.value, 1e-4, 1e-4)
                assert np.isnan(array).all((0, 2, 3)).tolist() == [False, False, number > 0, False]
    assert np.isnan(layer.running_mean.data(mx.cpu(1)).asnumpy()).tolist() == [False, False, True, False]


def test_limits_that_are_set_between_steps(mode):
    """Also where the layer is on fewer devices for a step, moves, or is converted again; they are its own."""
    layer, norm = make(2, GROWING[0], mode=mode)
    other, other_norm = make(2, BOUND, mode=mode)
    for number, limits in enumerate(GROWING):
        norm.renorm = limits
        assert gluon_syncbn.set_renorm(layer, *limits) is layer
        if number == 3:
            check_step_on([1], layer, norm, number)
            layer(mx.nd.array(draw()[0][0])).wait_to_read()
            continue
        if number == 4:
            layer = convert_sync_batchnorm(layer, timeout=60)
        if number == 5:
            layer.collect_params().reset_ctx([mx.cpu(0), mx.cpu(2)])
        check_step(layer, norm, *draw(seed=number), layer.gamma.list_ctx())
        check_step(other, other_norm, *draw(seed=number))


@pytest.mark.parametrize("group_size", [None, 1, 2])
def test_limits_of_groups_and_of_a_short_step(mode, group_size):
    layer, norm = make(4, GROWING[0], mode=mode, group_size=group_size)
    for number, used in enumerate([[0, 1, 2, 3], [0], [3, 2, 1, 0], [1, 2, 3], [3], [0, 1, 2, 3]]):
        norm.renorm = GROWING[number]
        gluon_syncbn.set_renorm(layer, *GROWING[number])
        check_step_on(used, layer, norm, number)


def test_limits_are_set_before_the_layer_has_devices_and_are_copied():
    net = sequential(SyncBatchNorm(in_channels=CHANNELS, renorm=(1, 0), timeout=60), nn.BatchNorm(in_channels=CHANNELS))
    gluon_syncbn.set_renorm(net, *BOUND)
    assert "renorm=(1.5, 0.5)" in repr(net[0]) and "renorm" not in repr(net[1])
    layer = initialized(copy.deepcopy(net[0]), 2)
    check_steps(layer, reference_of(layer, renorm=BOUND), lambda seed: draw(seed=seed), 3)


def test_limits_reach_the_graph_of_a_larger_net_although_check_looked_at_a_part(mode):
    """`check` calls the part on one device, where the layer is another one."""
    layer, norm = make(2, (1, 0))
    net = set_mode(sequential(sequential(layer)), mode)
    check_step(net, norm, *draw(), layer=layer)
    gluon_syncbn.check(net[0], np.concatenate(draw()[0]))
    norm.renorm = BOUND
    gluon_syncbn.set_renorm(net, *BOUND)
    check_step(net, norm, *draw(seed=1), layer=layer)


def test_limits_are_set_although_a_step_has_failed():
    """Whoever sets them once would not do so again."""
    layer, norm = make(2, (1, 0), timeout=0.5)
    with autograd.record():
        layer(mx.nd.array(draw()[0][0])), layer(mx.nd.random.normal(0, -1, shape=SHAPES[0], ctx=mx.cpu(1)))
    norm.renorm = BOUND
    with pytest.raises(mx.MXNetError):
        gluon_syncbn.set_renorm(layer, *BOUND)
    gluon_syncbn.abandon_step()
    check_step(layer, norm, *draw())


def test_what_set_renorm_refuses():
    layer, _ = make(2, BOUND)
    for limits, error in (((0.5, 1), ValueError), ((2, -1), ValueError), (("x", 1), TypeError)):
        with pytest.raises(error, match="^set_renorm: renorm"):
            gluon_syncbn.set_renorm(layer, *limits)
    with pytest.raises(ValueError, match=r"no layer of '.*' has the option renorm. Convert it with renorm=\(1, 0\)"):
        gluon_syncbn.set_renorm(nn.BatchNorm(), 1, 0)
    with pytest.raises(TypeError):
        gluon_syncbn.set_renorm(3, 1, 0)
    with autograd.record(), pytest.raises(ValueError, match="a step is under way. Call it between two"):
        gluon_syncbn.set_renorm(layer, 1, 0)


def test_no_limits_but_1_and_0_is_batch_normalization(mode):
    """To the bit."""
    results = []
    for renorm in (None, (1, 0)):
        layer, norm = make(2, renorm, mode=mode)
        results.append([array for seed in range(2) for array in check_step(layer, norm, *draw(seed=seed))])
    np.testing.assert_equal(*results)


def test_prediction_is_that_of_batchnorm(mode):
    """And so are its gradients."""
    layer, norm = make(2, BOUND, mode=mode)
    for seed in range(3):
        check_step(layer, norm, *draw(seed=seed))
        norm.frozen = True
        check_step(layer, norm, *draw(seed=seed + 10), train_mode=False)
        norm.frozen = False
    x = mx.nd.array(draw()[0][0])
    predicted = layer(x).asnumpy()
    np.testing.assert_array_equal(predicted, convert_batchnorm(layer)(x).asnumpy())


@pytest.mark.parametrize("renorm", WRONG)
def test_what_can_be_no_limits_is_refused(renorm):
    with pytest.raises((TypeError, ValueError), match="SyncBatchNorm 'layer_?': .*renorm"):
        SyncBatchNorm(renorm=renorm, prefix="layer_")


@pytest.mark.parametrize("renorm", [(3, 5), [3, 5], np.array([3, 5])])
def test_what_users_may_write(renorm):
    assert "renorm=(3.0, 5.0)" in repr(SyncBatchNorm(renorm=renorm))
