"""Who synchronizes with whom: groups of neighbours, steps on some devices, evaluation in the middle of training."""

import mxnet as mx
import numpy as np
import oracle
import pytest
from harness import MODES, cpus, observe, random_shards, set_mode, step
from mxnet import autograd, gluon
from mxnet.gluon import nn

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm

pytestmark = [pytest.mark.usefixtures("backend"), pytest.mark.parametrize("mode", list(MODES))]

SHAPES = [(2, 3, 4, 4), (1, 3, 4, 4), (1, 3, 4, 4), (3, 3, 4, 4)]
ONES, ZEROS = np.ones(3), np.zeros(3)


def make(mode, **options):
    layer = SyncBatchNorm(in_channels=3, timeout=60, prefix="stem_", **options)
    layer.initialize(ctx=cpus(4))
    return set_mode(layer, mode)


def check(layer, devices, shards, heads, members=None):
    """One step, in which each of ``members`` (slices of the devices) must be a batch of its own."""
    outputs, inputs = step(layer, shards, heads, devices)
    for part in members or [slice(None)]:
        expected = oracle.batch_norm(shards[part], ONES, ZEROS, heads=heads[part])
        assert oracle.distance([item.asnumpy() for item in outputs[part]], expected.outputs) < 1e-5
        assert oracle.distance([item.grad.asnumpy() for item in inputs[part]], expected.input_gradients) < 1e-4
        for device in devices[part] if layer._kwargs["momentum"] == 0 else []:
            assert oracle.distance([layer.running_var.data(device).asnumpy()], [expected.var]) < 1e-5
            assert oracle.distance([layer.running_mean.data(device).asnumpy()], [expected.mean]) < 1e-5


def test_groups_of_neighbours(mode):
    layer = make(mode, group_size=2, momentum=0)
    for seed in range(3):
        shards, heads = random_shards(SHAPES, seed=seed), random_shards(SHAPES, seed=seed + 10)
        check(layer, cpus(4), shards, heads, [slice(0, 2), slice(2, 4)])


def test_a_pair_does_not_wait_for_the_other_pair(mode):
    layer = make(mode, group_size=2, momentum=0)
    check(layer, cpus(2), random_shards(SHAPES[:2]), random_shards(SHAPES[:2], seed=1))


def test_num_devices_smaller_than_the_contexts(mode):
    layer = make(mode, num_devices=2)
    with autograd.record(), pytest.raises(ValueError, match=r"'stem'.*num_devices=2, but its parameters live on 4"):
        layer(mx.nd.ones((2, 3, 4, 4)))


def test_evaluation_on_one_device_in_the_middle_of_training(mode):
    layer = make(mode)
    for seed in range(3):
        check(layer, cpus(4), random_shards(SHAPES, seed=seed), random_shards(SHAPES, seed=seed + 10))
        x = random_shards([(5, 3, 2, 2)], seed=seed + 20)[0]
        mean, var = (getattr(layer, name).data(mx.cpu(2)).asnumpy() for name in ("running_mean", "running_var"))
        expected = (x - mean.reshape(1, 3, 1, 1)) / np.sqrt(var.reshape(1, 3, 1, 1) + 1e-5)
        np.testing.assert_allclose(layer(mx.nd.array(x, ctx=mx.cpu(2))).asnumpy(), expected, rtol=1e-4, atol=1e-5)


def test_steps_on_some_devices(mode):
    layer = make(mode, momentum=0)
    for count in (4, 2, 3, 1, 4):
        devices = cpus(4)[4 - count :]  # not always the first ones
        shards, heads = random_shards(SHAPES[:count], seed=count), random_shards(SHAPES[:count], seed=count + 10)
        with gluon_syncbn.devices(devices):
            check(layer, devices, shards, heads)
        copies = [layer.running_var.data(device).asnumpy() for device in cpus(4)]
        assert all(np.array_equal(copies[0], copy) for copy in copies), "devices that rested have old statistics"


def test_steps_on_some_devices_within_groups(mode):
    """The pairs are cpu(0), cpu(1) and cpu(2), cpu(3); of the second only one takes part."""
    layer = make(mode, group_size=2, momentum=0)
    with gluon_syncbn.devices(cpus(3)):
        check(layer, cpus(3), random_shards(SHAPES[:3]), random_shards(SHAPES[:3], seed=1), [slice(0, 2), slice(2, 3)])
    variances = [layer.running_var.data(device).asnumpy() for device in cpus(4)]
    assert np.array_equal(variances[2], variances[3])
    assert not np.array_equal(variances[1], variances[2])


def test_steps_on_some_devices_beside_a_net_that_was_converted_back(mode):
    other = make(mode)
    step(other, *[random_shards(SHAPES)] * 2, cpus(4))
    gluon_syncbn.convert_batchnorm(other)
    layer = make(mode)
    with gluon_syncbn.devices(cpus(2)):
        check(layer, cpus(2), random_shards(SHAPES[:2]), random_shards(SHAPES[:2], seed=1))


def test_the_backward_pass_may_come_after_the_block(mode):
    layer = make(mode)
    shards, heads = random_shards(SHAPES[:2]), random_shards(SHAPES[:2], seed=1)
    inputs = [mx.nd.array(shard, ctx=device) for shard, device in zip(shards, cpus(2))]
    for item in inputs:
        item.attach_grad()
    with gluon_syncbn.devices(cpus(2)), autograd.record():
        outputs = [layer(item) for item in inputs]
    autograd.backward(outputs, [mx.nd.array(head, ctx=device) for head, device in zip(heads, cpus(2))])
    expected = oracle.batch_norm(shards, ONES, ZEROS, heads=heads)
    assert oracle.distance([item.grad.asnumpy() for item in inputs], expected.input_gradients) < 1e-4


@pytest.mark.parametrize("update_on_kvstore", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_training_with_a_smaller_last_batch(mode, inside, update_on_kvstore):
    """4 devices, 6 images, in batches of 4 and 2: every weight is what one device with nn.BatchNorm arrives at."""
    images = random_shards([(1, 3, 6, 6)] * 6)

    def build(norm, contexts):
        net = nn.HybridSequential()
        net.add(nn.Conv2D(4, 3, in_channels=3, use_bias=False), norm, nn.Conv2D(2, 3, in_channels=4))
        net.initialize(ctx=contexts)
        return net

    def train(net, contexts):
        on_kvstore = update_on_kvstore if len(contexts) > 1 else None
        options = {"learning_rate": 0.1, "momentum": 0.9}
        trainer = gluon.Trainer(net.collect_params(), "sgd", options, update_on_kvstore=on_kvstore)
        for _ in range(2):
            for batch in (images[:4], images[4:]):
                used = contexts[: len(batch)]
                parts = gluon.utils.split_and_load(mx.nd.array(np.concatenate(batch)), used)
                with gluon_syncbn.devices(used, net):
                    with autograd.record():
                        losses = [mx.nd.sum(mx.nd.square(net(part))) for part in parts]
                    autograd.backward(losses)
                    if inside:
                        trainer.step(len(batch))
                if not inside:
                    trainer.step(len(batch))

    reference = build(nn.BatchNorm(in_channels=4), [mx.cpu(0)])
    net = build(SyncBatchNorm(in_channels=4, timeout=60), cpus(4))
    pairs = list(zip(net.collect_params().values(), reference.collect_params().values()))
    for ours, theirs in pairs:
        ours.set_data(theirs.data())
    set_mode(net, mode)
    train(net, cpus(4))
    train(reference, [mx.cpu(0)])
    for ours, theirs in pairs:
        for device in cpus(4):
            assert oracle.distance([ours.data(device).asnumpy()], [theirs.data().asnumpy()]) < 1e-4, (ours.name, device)


def test_a_device_that_is_not_in_the_list(mode):
    layer = make(mode)
    words = r"'stem': ran on cpu\(2\) in training mode, which is not in the list of gluon_syncbn.devices"
    with pytest.raises((ValueError, mx.MXNetError), match=words), gluon_syncbn.devices(cpus(2)), autograd.record():
        layer(mx.nd.ones((1, 3, 4, 4), ctx=mx.cpu(2)))
    check(layer, cpus(4), random_shards(SHAPES), random_shards(SHAPES, seed=1))


def test_an_exception_in_the_block_ends_it(mode):
    layer = make(mode)
    with pytest.raises(KeyError, match="mine"), gluon_syncbn.devices(cpus(2)):
        raise KeyError("mine")
    observe(layer, random_shards(SHAPES), random_shards(SHAPES), cpus(4))


@pytest.mark.parametrize(
    "chosen, error, words",
    [
        ([], ValueError, "the list of devices is empty"),
        ([mx.cpu(0), mx.cpu(0)], ValueError, r"one device is given twice \(cpu\(0\), cpu\(0\)\)"),
        ([0], TypeError, "expected contexts such as"),
    ],
)
def test_lists_that_cannot_be(mode, chosen, error, words):
    with pytest.raises(error, match=words), gluon_syncbn.devices(chosen):
        pass
