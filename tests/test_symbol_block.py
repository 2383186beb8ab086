"""Nets that are symbols inside train as one device would, and stay what they were for everyone else."""

import contextlib
import json

import mxnet as mx
import numpy as np
import oracle
import pytest
from gluoncv import model_zoo
from gluoncv.nn.feature import FeatureExpander
from harness import MODES, cpus, random_shards, set_mode, step
from mxnet.gluon import SymbolBlock, nn

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm, convert_batchnorm, convert_sync_batchnorm, devices, freeze_statistics
from gluon_syncbn.nets.symbol_block import SynchronizedSymbolBlock

pytestmark = pytest.mark.usefixtures("backend")

SHAPES = [(3, 2, 6, 6), (1, 2, 6, 6)]


def make_symbol(norm=mx.sym.BatchNorm, **options):
    x = mx.sym.Convolution(mx.sym.var("data"), num_filter=3, kernel=(3, 3), no_bias=True, name="conv")
    x = norm(x, fix_gamma=False, name="bn0", **options)
    x = mx.sym.Activation(x, act_type="relu", name="relu")
    return norm(x, fix_gamma=True, eps=1e-2, name="bn1", **options)


@pytest.fixture
def parameters(tmp_path):
    """A file of random parameters for `make_symbol`."""
    rng = np.random.RandomState(3)
    block = SymbolBlock(make_symbol(), mx.sym.var("data"))
    block.initialize()
    block(mx.nd.ones((1, *SHAPES[0][1:])))
    for parameter in block.collect_params().values():
        parameter.set_data(mx.nd.array(rng.uniform(0.5, 1.5, parameter.shape)))
    block.save_parameters(str(tmp_path / "start.params"))
    return str(tmp_path / "start.params")


def observe(block, shards, heads, contexts):
    outputs, inputs = step(block, shards, heads, contexts)
    found = {
        "out": np.concatenate([item.asnumpy() for item in outputs]),
        "dx": np.concatenate([item.grad.asnumpy() for item in inputs]),
    }
    for name, parameter in block.collect_params().items():
        if "moving" in name:
            copies = [parameter.data(context).asnumpy() for context in contexts]
            assert all(np.array_equal(copies[0], item) for item in copies)
            found[name] = copies[0]
        elif name != "bn1_gamma":  # fixed
            found[name] = sum(parameter.grad(context).asnumpy() for context in contexts)
    return found


def as_block(sym):
    return SymbolBlock(sym, mx.sym.var("data"))


class Around(mx.gluon.HybridBlock):
    """Calls a symbol block inside a net, twice, so that its layers meet twice per step."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def hybrid_forward(self, F, x):
        return self.inner(x) + self.inner(3 * x)


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("origin", ["converted", "made of synchronized nodes", "num_devices comes later"])
def test_equals_one_device(origin, around, mode, parameters):
    shards = random_shards(SHAPES)
    heads = random_shards([(shape[0], 3, 4, 4) for shape in SHAPES], seed=1)
    whole = [np.concatenate(shards)], [np.concatenate(heads)]
    wrap = Around if around else (lambda inner: inner)
    reference = wrap(as_block(make_symbol()))
    if origin == "converted":
        net = wrap(as_block(make_symbol()))
        convert_sync_batchnorm(net, timeout=20)
    else:
        number = 2 if origin == "made of synchronized nodes" else None
        net = wrap(as_block(make_symbol(gluon_syncbn.symbol.SyncBatchNorm, num_devices=number, timeout=20)))
    inner = net.inner if around else net
    assert type(inner) is SynchronizedSymbolBlock and len(inner.hidden_blocks()) == 2
    assert inner.hidden_blocks()[0]._sync.options.timeout == 20
    set_mode(net, mode)
    inner.load_parameters(parameters, ctx=cpus(2))
    (reference.inner if around else reference).load_parameters(parameters, ctx=cpus(1))
    actual, expected = (
        observe(block, *data, contexts)
        for block, data, contexts in ((net, (shards, heads), cpus(2)), (reference, whole, cpus(1)))
    )
    for name, value in expected.items():
        if around and "moving" in name:  # nn.BatchNorm updates them on the way back, in the opposite order
            continue
        assert oracle.distance([actual[name]], [value]) < 1e-4, name


def test_conversion_and_back_keep_the_block(caplog):
    net = as_block(make_symbol())
    before, graph = dict(net.collect_params().items()), net._cached_graph[1].tojson()
    convert_sync_batchnorm(net, num_devices=2)
    assert "2 BatchNorm layers converted" not in caplog.text  # INFO is off; nothing to warn of
    assert not caplog.records
    convert_sync_batchnorm(net, num_devices=3)
    assert [layer._sync.options.num_devices for layer in net.hidden_blocks()] == [3, 3]
    assert all(before[name] is parameter for name, parameter in net.collect_params().items())
    convert_batchnorm(net)
    assert type(net) is SymbolBlock and net._cached_graph[1].tojson() == graph
    assert all(before[name] is parameter for name, parameter in net.collect_params().items())
    net.initialize()
    net(mx.nd.ones((1, *SHAPES[0][1:]))).wait_to_read()


def relu_norm(x, **options):
    return mx.sym.relu(mx.sym.BatchNorm(x, **options))


@pytest.mark.skipif(not hasattr(mx.sym.contrib, "BatchNormWithReLU"), reason="this MXNet has no such operator")
@pytest.mark.parametrize("mode", list(MODES))
def test_an_operator_with_a_relu_keeps_it_there_and_back(mode, parameters, tmp_path):
    """`contrib.BatchNormWithReLU`: the layer that stands for it has the ReLU, which no operator of the symbol has."""
    shards = random_shards(SHAPES)
    heads = random_shards([(shape[0], 3, 4, 4) for shape in SHAPES], seed=1)
    net, reference = as_block(make_symbol(mx.sym.contrib.BatchNormWithReLU)), as_block(make_symbol(relu_norm))
    graph = net._cached_graph[1].tojson()
    assert graph.count("_contrib_BatchNormWithReLU") == 2
    convert_sync_batchnorm(net, timeout=20)
    assert [layer._sync.options.activation for layer in net.hidden_blocks()] == ["relu", "relu"]
    convert_sync_batchnorm(net, timeout=21)
    assert [layer._sync.options.activation for layer in net.hidden_blocks()] == ["relu", "relu"]
    set_mode(net, mode)
    net.load_parameters(parameters, ctx=cpus(2))
    reference.load_parameters(parameters, ctx=cpus(1))
    for _ in range(2):
        seen = observe(net, shards, heads, cpus(2))
        expected = observe(reference, [np.concatenate(shards)], [np.concatenate(heads)], cpus(1))
        for name, value in expected.items():
            assert oracle.distance([seen[name]], [value]) < 1e-4, name
    assert (seen["out"] >= 0).all() and (seen["out"] == 0).any()
    x = mx.nd.array(shards[0])
    predicted = reference(x).asnumpy()
    assert oracle.distance([net(x).asnumpy()], [predicted]) < 1e-5
    net.hybridize()
    net(x)
    net.export(str(tmp_path / "net"))
    exported = SymbolBlock.imports(str(tmp_path / "net-symbol.json"), ["data"], str(tmp_path / "net-0000.params"))
    assert oracle.distance([exported(x).asnumpy()], [predicted]) < 1e-5
    convert_batchnorm(net)
    assert type(net) is SymbolBlock and net._cached_graph[1].tojson() == graph
    assert oracle.distance([net(x).asnumpy()], [predicted]) < 1e-5
    convert_sync_batchnorm(net, timeout=20)
    seen = observe(net, shards, heads, cpus(2))
    expected = observe(reference, [np.concatenate(shards)], [np.concatenate(heads)], cpus(1))
    assert oracle.distance([seen["dx"]], [expected["dx"]]) < 1e-4


def test_frozen_statistics_groups_and_devices_reach_the_nodes(parameters):
    net = as_block(make_symbol())
    convert_sync_batchnorm(net, timeout=20, group_size=1)  # each on its own
    net.load_parameters(parameters, ctx=cpus(2))
    shards = random_shards(SHAPES)
    heads = random_shards([(shape[0], 3, 4, 4) for shape in SHAPES], seed=1)

    def mean(context):
        return net.collect_params()["bn0_moving_mean"].data(context).asnumpy()

    step(net, shards, heads, cpus(2))
    mx.nd.waitall()
    assert not np.allclose(mean(mx.cpu(0)), mean(mx.cpu(1)))
    freeze_statistics(net)
    kept = mean(mx.cpu(0))
    step(net, shards, heads, cpus(2))
    mx.nd.waitall()
    np.testing.assert_array_equal(mean(mx.cpu(0)), kept)
    freeze_statistics(net, frozen=False)
    convert_sync_batchnorm(net, timeout=20)
    with devices(cpus(1), net):
        step(net, shards[:1], heads[:1], cpus(1))
    mx.nd.waitall()
    assert not np.allclose(mean(mx.cpu(0)), kept)


def test_a_device_that_does_not_come_is_named():
    net = as_block(make_symbol())
    convert_sync_batchnorm(net, timeout=1)
    net.initialize(ctx=cpus(2))
    with pytest.raises(mx.MXNetError, match=r"'bn0': forward pass waited 1 s for 1 of 2 devices. .*Missing: cpu\(1\)"):
        step(net, random_shards(SHAPES[:1]), random_shards([(3, 3, 4, 4)]), cpus(1))[0][0].asnumpy()
    with contextlib.suppress(mx.MXNetError):
        mx.nd.waitall()


def test_gluoncvs_feature_expander():
    """SSD on MobileNet, whose backbone and additional layers are one symbol: 35 norms, whatever way they come."""
    name, options = "ssd_300_mobilenet0.25_custom", {"classes": ["a"], "pretrained_base": False}
    net = model_zoo.get_model(name, **options)
    assert type(net.features) is FeatureExpander
    convert_sync_batchnorm(net, num_devices=2)
    assert len(net.features.hidden_blocks()) == 35
    convert_batchnorm(net)
    assert type(net.features) is FeatureExpander
    # What gluoncv's train_ssd.py --syncbn does: a layer that is called with a symbol before there are parameters. The
    # additional layers are plain BatchNorm there, and take over the options of the others.
    net = model_zoo.get_model(name, norm_layer=SyncBatchNorm, norm_kwargs={"num_devices": 2}, **options)
    assert len(net.features.hidden_blocks()) == 35
    options = [layer._sync.options.num_devices for layer in net.features.hidden_blocks()]
    assert options == [2] * 35


def test_imports_and_exports(tmp_path, parameters):
    """A net that trained on two devices, exported, imported where nothing of ours is needed, trained on."""
    prefix = str(tmp_path / "net")
    net = as_block(make_symbol())
    convert_sync_batchnorm(net, timeout=20)
    net.load_parameters(parameters, ctx=cpus(2))
    shards = random_shards(SHAPES)
    heads = random_shards([(shape[0], 3, 4, 4) for shape in SHAPES], seed=1)
    step(net, shards, heads, cpus(2))
    x = mx.nd.array(shards[0])
    expected = net(x).asnumpy()
    net.export(prefix)
    operators = [node["op"] for node in json.loads((tmp_path / "net-symbol.json").read_text(encoding="utf-8"))["nodes"]]
    assert operators.count("BatchNorm") == 2 and "Custom" not in operators
    again = SymbolBlock.imports(f"{prefix}-symbol.json", ["data"], f"{prefix}-0000.params", ctx=cpus(2))
    np.testing.assert_allclose(again(x).asnumpy(), expected, rtol=1e-5, atol=1e-6)
    convert_sync_batchnorm(again, timeout=20)
    step(again, shards, heads, cpus(2))
    mx.nd.waitall()


def test_a_net_with_a_symbol_block_beside_layers():
    net = nn.HybridSequential()
    net.add(as_block(make_symbol()), nn.BatchNorm())
    convert_sync_batchnorm(net, num_devices=2)
    assert type(net[0]) is SynchronizedSymbolBlock and type(net[1]) is SyncBatchNorm
    assert len(list(net.collect_params(".*gamma"))) == 3


def test_nodes_of_one_name_and_nodes_without_parameters(caplog):
    """Two nodes are one layer if name and parameters are the same; a gamma that is computed stays as it is."""
    data, shared = mx.sym.var("data"), [mx.sym.var(f"n_{name}") for name in ("gamma", "beta", "mean", "var")]
    first, second = (mx.sym.BatchNorm(item, *shared, fix_gamma=False, name="n") for item in (data, 3 * data))
    other = mx.sym.BatchNorm(data, *[mx.sym.var(f"o_{name}") for name in ("gamma", "beta", "mean", "var")], name="n")
    net = SymbolBlock([first, second, other], data)
    convert_sync_batchnorm(net, timeout=20)
    assert len(net.hidden_blocks()) == 2 and net.count_nodes() == 3 and not caplog.records
    net.initialize(ctx=cpus(2))
    net.collect_params()["n_gamma"].set_data(mx.nd.ones(3))
    net.collect_params()["n_mean"].set_data(mx.nd.zeros(3))
    shards = random_shards([(4, 3), (2, 3)])
    with mx.autograd.record():
        outputs = [net(mx.nd.array(shard, ctx=device)) for shard, device in zip(shards, cpus(2))]
    mx.autograd.backward([item for items in outputs for item in items])
    beta = net.collect_params()["n_beta"].data(mx.cpu(0)).asnumpy()
    for number, factor in enumerate((1, 3)):
        expected = oracle.batch_norm([factor * shard for shard in shards], np.ones(3), beta, 1, 1e-3)
        assert oracle.distance([items[number].asnumpy() for items in outputs], expected.outputs) < 1e-5
    mean = np.concatenate(shards).mean(axis=0)
    average = 0.9 * (0.1 * mean) + 0.1 * 3 * mean
    assert oracle.distance([net.collect_params()["n_mean"].data(mx.cpu(1)).asnumpy()], [average]) < 1e-5
    computed = mx.sym.BatchNorm(data, 2 * mx.sym.var("g"), name="c")
    net = SymbolBlock(mx.sym.BatchNorm(computed, name="d"), data)
    convert_sync_batchnorm(net)
    assert [layer.name for layer in net.hidden_blocks()] == ["d"]
    assert "1 BatchNorm nodes inside SynchronizedSymbolBlock" in caplog.text
