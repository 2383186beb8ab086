"""A net that synchronizes some of its BatchNorms and not others says so, once, when it trains on several devices."""

import warnings

import mxnet as mx
import pytest
from gluoncv import model_zoo
from harness import MODES, cpus, random_shards, set_mode
from mxnet import autograd, gluon
from mxnet.gluon import nn

from gluon_syncbn import SyncBatchNorm, convert_sync_batchnorm

modes = pytest.mark.parametrize("mode", list(MODES))


def train(net, count=2, steps=2):
    """The texts of warnings of this package."""
    parts = [mx.nd.array(part, ctx=device) for part, device in zip(random_shards([(2, 3, 8, 8)] * count), cpus(count))]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            with autograd.record():
                losses = [net(part) for part in parts]
            autograd.backward(losses)
        mx.nd.waitall()
    return [str(item.message) for item in caught if "gluon_syncbn" in str(item.message)]


def make(*norms, devices=2, mode="imperative"):
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Conv2D(4, 3), *[norm() for norm in norms])
    net.initialize(ctx=cpus(devices))
    return set_mode(net, mode)


def frozen():
    return nn.BatchNorm(use_global_stats=True)


@modes
def test_one_warning_with_numbers_names_and_the_line_that_mends_it(mode):
    net = make(SyncBatchNorm, nn.BatchNorm, frozen, *[nn.BatchNorm] * 3, SyncBatchNorm, mode=mode)
    (text,) = train(net)
    assert text.startswith("4 of the 6 BatchNorm layers of net are not synchronized")
    assert "(net_batchnorm1, net_batchnorm3, net_batchnorm4, ...)" in text
    assert "gluon_syncbn.convert_sync_batchnorm(net)" in text
    assert train(net) == []


@modes
def test_that_line_mends_it(mode):
    net = make(SyncBatchNorm, nn.BatchNorm, mode=mode)
    convert_sync_batchnorm(net)
    assert train(net) == []


@modes
def test_no_warning_without_need(mode):
    assert train(make(SyncBatchNorm, frozen, mode=mode)) == []  # frozen
    assert train(make(nn.BatchNorm, mode=mode)) == []  # nobody asked for synchronization
    assert train(make(SyncBatchNorm, nn.BatchNorm, devices=1, mode=mode), count=1) == []  # nothing to synchronize


def test_prediction_is_no_reason():
    net = make(SyncBatchNorm, nn.BatchNorm)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        with autograd.record(train_mode=False):
            net(mx.nd.array(random_shards([(2, 3, 8, 8)])[0])).wait_to_read()
    assert len(train(net)) == 1


def test_nodes_of_a_symbol_block():
    data = mx.sym.var("data")
    block = gluon.SymbolBlock(mx.sym.BatchNorm(data, name="inside", fix_gamma=False), data)
    net = make(SyncBatchNorm)
    net.add(block)
    block.initialize(ctx=cpus(2))
    (text,) = train(net)
    assert "1 of the 2 BatchNorm layers" in text
    assert "(inside)" in text


def test_a_symbol_block_that_is_made_within_a_name_scope():
    """As GluonCV's SSD makes its base; nothing of it is plain, and its layers have their nodes' names."""
    data = mx.sym.var("data")
    symbol = mx.sym.BatchNorm(data, name="inside", fix_gamma=False)
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        block = gluon.SymbolBlock(symbol, data)
        convert_sync_batchnorm(block, timeout=0.3)
        net.add(block, nn.BatchNorm(use_global_stats=True))
    assert net[1].name == "net_batchnorm0"  # those layers take no number of the scope's
    net.initialize(ctx=cpus(2))
    assert train(net) == []
    assert [layer.name for layer in block.hidden_blocks()] == ["inside"]
    with autograd.record():
        output = net(mx.nd.ones((2, 3, 8, 8)))
    with pytest.raises(mx.MXNetError, match="SyncBatchNorm 'inside'"):
        output.wait_to_read()


def test_gluoncvs_yolo_with_a_synchronized_base():
    """As GluonCV's YOLOv3Estimator builds it: its heads stay plain."""
    net = model_zoo.get_model("yolo3_mobilenet0.25_voc", pretrained_base=False)
    convert_sync_batchnorm(net.stages)
    net.initialize(ctx=cpus(2))
    net.hybridize()
    shapes = [(1, 3, 64, 64), (1, 1, 4), *[(1, 3 * (2 * 2 + 4 * 4 + 8 * 8), size) for size in (1, 2, 2, 2, 20)]]
    parts = [[mx.nd.zeros(shape, ctx=device) for shape in shapes] for device in cpus(2)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with autograd.record():
            outputs = [net(*part) for part in parts]
        mx.nd.waitall()
    del outputs
    (text,) = [str(item.message) for item in caught if "not synchronized" in str(item.message)]
    assert text.startswith("20 of the 47 BatchNorm layers")
