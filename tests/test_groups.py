"""Who synchronizes with whom: groups of neighbours, steps on some devices, evaluation in the middle of training."""

import mxnet as mx
import numpy as np
import pytest
import test_layer
import testing
from mxnet import autograd, gluon
from mxnet.gluon import nn
from reference import check, check_all
from testing import check_running, check_step, cpus, initialized, on_devices, precision, random_shards, shards_and_heads

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm

pytestmark = pytest.mark.usefixtures("backend")

SHAPES = [(2, 3, 4, 4), (1, 3, 4, 4), (1, 3, 4, 4), (3, 3, 4, 4)]
WRONG = [  # lists of devices
    ([], ValueError, "the list of devices is empty"),
    ([mx.cpu(0), mx.cpu(0)], ValueError, r"one device is given twice \(cpu\(0\), cpu\(0\)\)"),
    ([0], TypeError, "expected contexts such as"),
]


def make(mode, **options):
    return test_layer.make(SHAPES, mode=mode, prefix="stem_", **options)


def train_on(layer, norm, numbers, seed=0, running=True):
    """A step on the devices of these numbers, with an image more or less on each."""
    data = shards_and_heads([SHAPES[(number + seed) % 4] for number in numbers], seed=seed)
    check_step(layer, norm, *data, [mx.cpu(number) for number in numbers], used=numbers, running=running)


def test_groups_of_neighbours(mode):
    """A pair does not wait for the other pair."""
    layer, norm = make(mode, group_size=2)
    for seed, numbers in enumerate((range(4), [2, 3], [0, 1], range(4))):
        train_on(layer, norm, numbers, seed)


@pytest.mark.parametrize("group_size", [None, 2])
def test_steps_on_some_devices(mode, group_size):
    """Not always the first; devices that rest get the statistics of their neighbours. The pairs are 0, 1 and 2, 3."""
    layer, norm = make(mode, group_size=group_size)
    for seed, numbers in enumerate(([0, 1, 2, 3], [2, 3], [0, 1, 2], [3], [1, 2], [0, 1, 2, 3])):
        with gluon_syncbn.devices([mx.cpu(number) for number in numbers]):
            train_on(layer, norm, numbers, seed, running=False)
        check_running(layer, norm)
        (x,) = random_shards([(5, 3, 2, 2)], seed=seed + 20)  # an evaluation on one device
        expected = norm.step([x], used=[2], training=False).outputs[0]
        check("prediction", layer(mx.nd.array(x, ctx=mx.cpu(2))).asnumpy(), expected, **precision(layer, is_plain=True))
    train_on(layer, norm, range(4), 9)


def test_a_first_update_without_the_first_device(mode):
    """A Trainer then copies all Parameters of the first device to the others, running statistics, too."""
    layer, norm = make(mode)
    trainer = gluon.Trainer(layer.collect_params(), "sgd", {"learning_rate": 0.0})
    with gluon_syncbn.devices(cpus(4)[1:], layer):
        train_on(layer, norm, [1, 2, 3], running=False)
        trainer.step(1)
    check_running(layer, norm)


def test_beside_a_net_that_was_converted_back(mode):
    other, its = make(mode)
    train_on(other, its, range(4))
    gluon_syncbn.convert_batchnorm(other)
    layer, norm = make(mode)
    with gluon_syncbn.devices(cpus(2)):
        train_on(layer, norm, [0, 1], running=False)
    train_on(layer, norm, range(4), 1)


def test_the_backward_pass_may_come_after_the_block(mode):
    layer, norm = make(mode)
    shards, heads = shards_and_heads(SHAPES[:2])
    inputs = on_devices(shards, learn=True)
    with gluon_syncbn.devices(cpus(2)), autograd.record():
        outputs = [layer(item) for item in inputs]
    autograd.backward(outputs, on_devices(heads))
    gradients = [item.grad.asnumpy() for item in inputs]
    check_all("input gradient", gradients, norm.step(shards, heads).input_gradients, **precision(layer))
    train_on(layer, norm, range(4), 1)


@pytest.mark.parametrize("kvstore, on_kvstore", [("device", True), ("local", False)])
@pytest.mark.parametrize("inside", [True, False])
def test_training_with_a_smaller_last_batch(mode, inside, kvstore, on_kvstore):
    """4 devices, 6 images, in batches of 4 and 2: every weight is what one device with nn.BatchNorm arrives at."""
    (images,) = random_shards([(6, 3, 6, 6)], "float64")

    def build(norm, count):
        convs = nn.Conv2D(4, 3, in_channels=3, use_bias=False), nn.Conv2D(2, 3, in_channels=4)
        return initialized(testing.sequential(convs[0], norm, convs[1]), count, dtype="float64")

    def train(net, contexts):
        options = {"learning_rate": 0.1, "momentum": 0.9}
        how = {"kvstore": kvstore, "update_on_kvstore": on_kvstore} if len(contexts) > 1 else {"kvstore": None}
        trainer = gluon.Trainer(net.collect_params(), "sgd", options, **how)
        for batch in (images[:4], images[4:]) * 2:
            used = contexts[: len(batch)]
            parts = gluon.utils.split_and_load(mx.nd.array(batch, dtype="float64"), used)
            with gluon_syncbn.devices(used, net):
                with autograd.record():
                    losses = [(net(part) ** 2).sum() for part in parts]
                autograd.backward(losses)
                if inside:
                    trainer.step(len(batch))
            if not inside:
                trainer.step(len(batch))

    reference = build(nn.BatchNorm(in_channels=4, momentum=0.875), 1)
    net = build(SyncBatchNorm(in_channels=4, momentum=0.875, timeout=60), 4)
    pairs = list(zip(net.collect_params().values(), reference.collect_params().values()))
    for ours, theirs in pairs:
        ours.set_data(theirs.data())
    testing.set_mode(net, mode)
    train(net, cpus(4))
    train(reference, cpus(1))
    mx.nd.waitall()
    for ours, theirs in pairs:
        for array in ours.list_data():
            np.testing.assert_allclose(array.asnumpy(), theirs.data().asnumpy(), rtol=1e-9, atol=1e-10)


def test_a_device_that_is_not_in_the_list(mode):
    layer, norm = make(mode)
    words = r"'stem': ran on cpu\(2\) in training mode, which is not in the list of gluon_syncbn.devices"
    with pytest.raises((ValueError, mx.MXNetError), match=words), gluon_syncbn.devices(cpus(2)), autograd.record():
        layer(mx.nd.ones((1, 3, 4, 4), ctx=mx.cpu(2)))
    train_on(layer, norm, range(4))


def test_an_exception_in_the_block_ends_it(mode):
    layer, norm = make(mode)
    with pytest.raises(KeyError, match="mine"), gluon_syncbn.devices(cpus(2)):
        raise KeyError("mine")
    train_on(layer, norm, range(4))


@pytest.mark.parametrize("chosen, error, words", WRONG)
def test_lists_that_cannot_be(mode, chosen, error, words):
    with pytest.raises(error, match=words), gluon_syncbn.devices(chosen):
        pass


def means_of(layer):
    return [layer.running_mean.data(device).asnumpy().tolist() for device in cpus(2)]


def test_only_the_statistics_of_layers_that_were_called_in_the_block_are_copied(mode, backend):
    """Others may differ between the devices: of a net that has only been trained plain, or by a block around this."""

    def step(net, devices):
        parts = [
            mx.nd.array(x, ctx=device) for x, device in zip(random_shards([(4, 3)] * 2, seed=len(devices)), devices)
        ]
        with autograd.record():
            losses = [(net(x) + x.context.device_id).sum() for x in parts]
        autograd.backward(losses)
        mx.nd.waitall()

    layer, other, plain = (
        initialized(kind(in_channels=3), 2, mode) for kind in (SyncBatchNorm, SyncBatchNorm, nn.BatchNorm)
    )
    for net in (layer, other, plain):
        step(net, cpus(2))
    gluon_syncbn.convert_sync_batchnorm(plain)
    [plain(mx.nd.ones((1, 3), ctx=device)).wait_to_read() for device in cpus(2)]
    before = means_of(plain)
    assert before[0] != before[1]
    with gluon_syncbn.devices(mx.cpu(0)):
        step(layer, cpus(1))
        trained, left = means_of(layer)
        assert trained != left
        with gluon_syncbn.devices(mx.cpu(1)):
            step(other, [mx.cpu(1)])
        assert means_of(layer) == [trained, left]
        assert len({str(means) for means in means_of(other)}) == 1
    assert means_of(layer) == [trained, trained]
    assert means_of(plain) == before
