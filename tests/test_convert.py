"""Conversion reaches every BatchNorm of a net, keeps its Parameters, and can be undone."""

import logging

import mxnet as mx
import numpy as np
import pytest
from gluoncv import model_zoo
from gluoncv.nn import BatchNormCudnnOff
from harness import MODES, cpus, random_shards, set_mode, step
from mxnet.gluon import contrib, nn

from gluon_syncbn import SyncBatchNorm, convert_batchnorm, convert_sync_batchnorm


class Nested(mx.gluon.HybridBlock):
    """BatchNorm as a child, twice; as an attribute; in lists, dicts and tuples; held by a function."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.first = nn.BatchNorm(in_channels=2)
            self.inner = nn.HybridSequential()
            self.inner.add(nn.BatchNorm(in_channels=2, epsilon=1e-3, momentum=0.5, scale=False), self.first)
            self.lists = [nn.BatchNorm(in_channels=2), {"a": (nn.BatchNorm(in_channels=2), "text")}]
        self.lists.append(self.lists)
        self.function = lambda x: self.first(x)


def norms(net):
    return [net.first, *net.inner, net.lists[0], net.lists[1]["a"][0]]


def test_finds_everything_once_and_says_so(caplog):
    net = Nested()
    before = norms(net)
    with caplog.at_level(logging.INFO, "gluon_syncbn"):
        assert convert_sync_batchnorm(net, num_devices=2, timeout=9) is net
    assert caplog.messages == ["4 BatchNorm layers converted to SyncBatchNorm."]
    assert all(type(layer) is SyncBatchNorm for layer in norms(net))
    assert all(a is b for a, b in zip(before, norms(net)))
    assert net.inner[0]._kwargs["eps"] == 1e-3 and net.inner[0]._kwargs["fix_gamma"]
    assert "num_devices=2" in repr(net.first) and "timeout=9.0" in repr(net.first)
    caplog.clear()
    with caplog.at_level(logging.INFO, "gluon_syncbn"):
        assert convert_batchnorm(net) is net
    assert caplog.messages == ["4 SyncBatchNorm layers converted back to BatchNorm."]
    assert all(type(layer) is nn.BatchNorm for layer in norms(net))
    assert repr(net) == repr(Nested()).replace("nested1", "nested0")
    assert set(vars(net.first)) == set(vars(nn.BatchNorm(in_channels=2)))


@pytest.mark.parametrize("layer_class", [nn.BatchNorm, BatchNormCudnnOff, contrib.nn.SyncBatchNorm, SyncBatchNorm])
def test_a_net_that_is_one_layer(layer_class):
    options = {"num_devices": 4} if layer_class is contrib.nn.SyncBatchNorm else {}
    layer = layer_class(in_channels=3, **options)
    assert convert_sync_batchnorm(layer) is layer
    layer.initialize(ctx=cpus(2))
    shards = random_shards([(2, 3, 2, 2)] * 2)
    step(layer, shards, shards, cpus(2))
    mx.nd.waitall()
    means = [layer.running_mean.data(device).asnumpy() for device in cpus(2)]
    np.testing.assert_array_equal(*means)
    np.testing.assert_allclose(means[0], 0.1 * np.concatenate(shards).mean(axis=(0, 2, 3)), rtol=1e-5)
    convert_batchnorm(layer)
    assert type(layer) is (layer_class if layer_class is BatchNormCudnnOff else nn.BatchNorm)
    layer(mx.nd.ones((2, 3, 2, 2))).wait_to_read()


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("moment", ["before initialize", "after initialize", "after a forward pass"])
def test_when_it_is_converted_does_not_matter(moment, mode):
    devices = cpus(2)
    net = nn.HybridSequential()
    net.add(nn.Conv2D(4, 3), nn.BatchNorm(), nn.Activation("relu"))
    set_mode(net, mode)
    if moment == "before initialize":
        convert_sync_batchnorm(net)
    net.initialize(ctx=devices)
    if moment == "after a forward pass":
        for device in devices:
            net(mx.nd.ones((1, 3, 5, 5), ctx=device)).wait_to_read()
    if moment != "before initialize":
        convert_sync_batchnorm(net)
    shards = random_shards([(2, 3, 5, 5), (1, 3, 5, 5)])
    heads = random_shards([(2, 4, 3, 3), (1, 4, 3, 3)], seed=2)
    step(net, shards, heads, devices)
    mx.nd.waitall()
    variances = [net[1].running_var.data(device).asnumpy() for device in devices]
    np.testing.assert_array_equal(*variances)
    assert not np.allclose(variances[0], 1)
    convert_batchnorm(net)  # drops the graph again: from here on each device is on its own
    step(net, shards, heads, devices)
    mx.nd.waitall()
    assert not np.allclose(*[net[1].running_var.data(device).asnumpy() for device in devices])


def test_keeps_parameters_and_their_names():
    net = model_zoo.get_model("resnet18_v1b", pretrained=False)
    before = dict(net.collect_params().items())
    convert_sync_batchnorm(net)
    after = dict(net.collect_params().items())
    assert list(before) == list(after) and all(before[name] is after[name] for name in before)


@pytest.mark.parametrize("full_names", [False, True])
def test_params_files_move_both_ways(tmp_path, full_names):
    def build(layer_class):
        net = nn.HybridSequential(prefix="net_")
        with net.name_scope():
            net.add(nn.Conv2D(4, 3, in_channels=3), layer_class(in_channels=4), layer_class(in_channels=4))
        net.initialize(mx.init.Uniform(), ctx=mx.cpu(0), force_reinit=True)
        return net

    file = str(tmp_path / "net.params")
    for source, target in ((nn.BatchNorm, SyncBatchNorm), (SyncBatchNorm, nn.BatchNorm)):
        one, other = build(source), build(target)
        if full_names:
            one.collect_params().save(file)
            other.collect_params().load(file)
        else:
            one.save_parameters(file)
            other.load_parameters(file)
        for a, b in zip(one.collect_params().values(), other.collect_params().values()):
            assert a.name == b.name
            np.testing.assert_array_equal(a.data().asnumpy(), b.data().asnumpy())


def test_accepts_what_gluoncv_passes_to_the_contrib_layer():
    net = model_zoo.get_model(
        "resnet18_v1b", pretrained=False, norm_layer=SyncBatchNorm, norm_kwargs={"num_devices": 2}
    )
    assert type(net.bn1) is SyncBatchNorm and net.bn1._sync.options.num_devices == 2


def test_warns_of_a_symbol_whose_statistics_are_outputs(caplog):
    x = mx.sym.BatchNorm(mx.sym.var("data"), name="first")
    both = mx.sym.BatchNorm(x, name="second", output_mean_var=True)
    net = mx.gluon.SymbolBlock([both[0], both[1]], mx.sym.var("data"))
    convert_sync_batchnorm(net)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "1 BatchNorm nodes inside SynchronizedSymbolBlock" in warning and "stay unsynchronized" in warning
    assert [layer.name for layer in net.hidden_blocks()] == ["first"]


def test_export_after_converting_back_needs_nothing_of_ours(tmp_path):
    net = nn.HybridSequential()
    net.add(nn.Conv2D(4, 3), SyncBatchNorm())
    net.initialize(ctx=cpus(2))
    net.hybridize()
    shards = random_shards([(2, 3, 5, 5)] * 2)
    step(net, shards, random_shards([(2, 4, 3, 3)] * 2), cpus(2))
    x = mx.nd.array(shards[0])
    expected = net(x).asnumpy()
    convert_batchnorm(net)
    net.hybridize()
    np.testing.assert_array_equal(net(x).asnumpy(), expected)
    net.export(str(tmp_path / "net"))
    assert "Custom" not in (tmp_path / "net-symbol.json").read_text(encoding="utf-8")


class DoubledBatchNorm(nn.BatchNorm):
    def hybrid_forward(self, F, x, **parameters):
        return 2 * super().hybrid_forward(F, x, **parameters)


@pytest.mark.parametrize("layer_class", [nn.BatchNormReLU, DoubledBatchNorm])
def test_leaves_layers_with_a_forward_pass_of_their_own_alone_and_says_so(layer_class, caplog):
    net = nn.HybridSequential()
    net.add(layer_class(in_channels=2, prefix="stem_"), nn.BatchNorm(in_channels=2))
    convert_sync_batchnorm(net)
    assert [type(layer) for layer in net] == [layer_class, SyncBatchNorm]
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warning == f"{layer_class.__name__} 'stem' stays unsynchronized: it has a forward pass of its own."


def test_gluoncvs_pruned_networks_whose_parameters_have_no_shape():
    net = convert_sync_batchnorm(model_zoo.get_model("resnet18_v1b_0.89", pretrained=False))
    net.initialize(mx.init.Xavier(), ctx=cpus(2))
    step(net, random_shards([(2, 3, 32, 32)] * 2), random_shards([(2, 1000)] * 2), cpus(2))
    means = [item for name, item in net.collect_params().items() if name.endswith("running_mean")]
    assert len(means) == 20
    for mean in means:
        first, second = (mean.data(device).asnumpy() for device in cpus(2))
        assert np.array_equal(first, second) and first.any()


OPTIONS = {
    "num_devices": 2,
    "group_size": 1,
    "timeout": 7.0,
    "process_group": "none",
    "fuse": False,
    "activation": "relu",
}
OPTIONS = {
    "native": {**OPTIONS, "backend": "native", "renorm": ((0.0, 2.0, 1.0),), "in_place": True},
    "portable": {**OPTIONS, "backend": "portable", "kvstore": "local"},
}


@pytest.mark.parametrize("options", list(OPTIONS.values()), ids=list(OPTIONS))
@pytest.mark.parametrize("name", ["num_devices", "timeout", "fuse"])
def test_a_second_conversion_keeps_what_it_is_not_given(options, name):
    layer = SyncBatchNorm(**options)
    before = layer._sync.options.options()
    assert before.items() >= options.items()
    convert_sync_batchnorm(layer)
    assert layer._sync.options.options() == before
    given = {"num_devices": 4, "timeout": 9.0, "fuse": True}[name]
    convert_sync_batchnorm(layer, **{name: given})
    assert layer._sync.options.options() == {**before, name: given}


def test_what_does_not_fit_a_layers_own_options_is_refused_before_anything_changes():
    net = nn.HybridSequential()
    net.add(nn.BatchNorm(), SyncBatchNorm(in_place=True))
    with pytest.raises(RuntimeError, match="only the native back end has in_place"):
        convert_sync_batchnorm(net, backend="portable")
    assert type(net[0]) is nn.BatchNorm and net[1]._sync.options.options()["backend"] == "auto"
    net = nn.HybridSequential()
    net.add(nn.BatchNorm(), SyncBatchNorm(backend="native"))
    with pytest.raises(RuntimeError, match="only the portable back end uses one"):
        convert_sync_batchnorm(net, kvstore="local")
    assert type(net[0]) is nn.BatchNorm and net[1]._sync.options.options()["kvstore"] is None


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("is_np", [False, True], ids=["nd", "np"])
def test_an_activation_goes_there_and_back(mode, is_np):
    """It is part of what the layer computes, and no conversion may drop it."""
    with mx.util.np_shape(is_np), mx.util.np_array(is_np):
        net = nn.HybridSequential(prefix="net_")
        with net.name_scope():
            net.add(SyncBatchNorm(in_channels=3, activation="relu"), nn.BatchNorm(in_channels=3), nn.Activation("relu"))
        net.initialize(ctx=cpus(2))
        x = (mx.np if is_np else mx.nd).array(random_shards([(2, 3, 5, 5)], mean=0)[0], dtype="float32")
        expected = net(x).asnumpy()
        names = sorted(net.collect_params())
        set_mode(net, mode)
        for convert in (convert_sync_batchnorm, convert_batchnorm, convert_batchnorm, *[convert_sync_batchnorm] * 2):
            convert(net)
            np.testing.assert_allclose(net(x).asnumpy(), expected, rtol=1e-6)
            assert sorted(net.collect_params()) == names
            assert isinstance(net[0], nn.BatchNorm)
        assert type(net[0]) is SyncBatchNorm and net[0]._sync.options.options()["activation"] == "relu"


def test_a_layer_alone_takes_its_relu_along():
    """Of a pair in a `nn.HybridSequential`; converting only the norm must not lose the other half."""
    net = nn.HybridSequential()
    net.add(nn.BatchNorm(in_channels=3), nn.Activation("relu"))
    net.initialize(ctx=cpus(2))
    x = mx.nd.array(random_shards([(2, 3, 5, 5)], mean=0)[0])
    expected = net(x).asnumpy()
    convert_sync_batchnorm(net)
    assert net[0]._sync.options.options()["activation"] == "relu"
    convert_batchnorm(net[0])
    np.testing.assert_array_equal(net(x).asnumpy(), expected)
    assert [type(block) for block in net] == [nn.BatchNorm, nn.Activation]


def test_a_net_without_batchnorm_is_warned_of_at_the_users_line():
    with pytest.warns(UserWarning, match="has no BatchNorm layer that can be converted") as seen:
        convert_sync_batchnorm(nn.Dense(3))
    assert [item.filename for item in seen] == [__file__]


def test_a_misspelt_option_changes_nothing_and_names_the_nearest():
    net = nn.HybridSequential()
    net.add(nn.BatchNorm(in_channels=3))
    with pytest.raises(TypeError, match="unknown option 'grup_size'. Did you mean 'group_size'?"):
        convert_sync_batchnorm(net, grup_size=2)
    assert type(net[0]) is nn.BatchNorm
