"""Conversion reaches every BatchNorm of a net, keeps what each computes, and can be undone; copies do the same.

What a converted net computes is compared with the reference on devices with different data; what it leaves as it is,
it says.
"""

import copy
import functools
import json
import logging
import pickle
import warnings

import mxnet as mx
import numpy as np
import pytest
from gluoncv import model_zoo
from gluoncv.nn import BatchNormCudnnOff
from mxnet import autograd, gluon
from mxnet.gluon import contrib, nn
from reference import Norm
from testing import (
    MODES,
    check_running,
    check_step,
    cpus,
    layers_of,
    options_of,
    random_affine,
    random_shards,
    reference_of,
    run_python,
    set_mode,
    shards_and_heads,
    step,
)

from gluon_syncbn import SyncBatchNorm, convert_batchnorm, convert_sync_batchnorm

modes = pytest.mark.parametrize("mode", list(MODES))
SHAPES = [(3, 4, 5, 3), (1, 4, 5, 3)]
NODE = {"fix_gamma": False, "eps": 1e-5}


def draw(seed=0, shapes=SHAPES):
    return shards_and_heads(shapes, seed=seed, mean=0.5)


def check_alone(layer, **told):
    """A layer by itself synchronizes, with these numbers and what it has; two steps."""
    layer.initialize(ctx=cpus(2), force_reinit=True)
    random_affine(layer, 4)
    norm = reference_of(layer, **told)
    for seed in range(2):
        check_step(layer, norm, *draw(seed), layer=layer)


def make_net(*blocks, devices=2, **how):
    net = nn.HybridSequential(**how)
    with net.name_scope():
        net.add(*[block if isinstance(block, gluon.Block) else block() for block in blocks])
    net.initialize(ctx=cpus(devices))
    return net


def symbol_block(*outputs, **options):
    """Of a BatchNorm node, and what is made of it."""
    data = mx.sym.var("data")
    node = mx.sym.BatchNorm(data, name="inside", **NODE, **options)
    return gluon.SymbolBlock([make(node) for make in outputs] or node, data)


class Nested(mx.gluon.HybridBlock):
    """BatchNorm as a child, twice; as an attribute; in lists, dicts and tuples; held by a function."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.first = nn.BatchNorm(in_channels=4)
            self.inner = nn.HybridSequential()
            self.inner.add(nn.BatchNorm(in_channels=4, epsilon=1e-2, momentum=0.5, scale=False), self.first)
            self.lists = [nn.BatchNorm(in_channels=4), {"a": (nn.BatchNorm(in_channels=4), "text")}]
        self.lists.append(self.lists)
        self.function = lambda x: self.first(x)

    def norms(self):
        return [self.first, *self.inner, self.lists[0], self.lists[1]["a"][0]]


def test_finds_everything_once_and_says_so(caplog):
    caplog.set_level(logging.INFO, "gluon_syncbn")
    net, untouched = Nested(), Nested()
    net.lists.append(symbol_block())
    before, parameters = net.norms(), dict(net.collect_params().items())
    assert convert_sync_batchnorm(net, num_devices=2, timeout=9) is net
    assert caplog.messages == ["5 BatchNorm layers converted to SyncBatchNorm."]
    assert all(type(layer) is SyncBatchNorm for layer in net.norms())
    assert all(a is b for a, b in zip(before, net.norms()))
    after = dict(net.collect_params().items())
    assert list(parameters) == list(after) and all(parameters[name] is after[name] for name in after)
    assert all("num_devices=2, timeout=9.0" in repr(layer) for layer in (*net.norms(), *layers_of(net.lists[-1])))
    for layer in net.norms():
        is_second = layer is net.inner[0]
        check_alone(layer, epsilon=1e-2 if is_second else 1e-5, momentum=0.5 if is_second else 0.9, scale=not is_second)
    net.lists[-1].initialize(ctx=cpus(2))
    net.lists[-1](mx.nd.ones((1, 4, 2, 2)))
    check_step(net.lists[-1], reference_of(*layers_of(net.lists[-1])), *draw(), layer=layers_of(net.lists[-1])[0])
    caplog.clear()
    assert convert_batchnorm(net) is net
    assert caplog.messages == ["5 SyncBatchNorm layers converted back to BatchNorm."]
    assert all(type(layer) is nn.BatchNorm for layer in net.norms()) and type(net.lists[-1]) is gluon.SymbolBlock
    assert set(vars(net.first)) == set(vars(nn.BatchNorm(in_channels=4)))
    assert repr(net.inner) == repr(untouched.inner)
    for layer in set(net.norms()):
        check_step(layer, reference_of(layer, group_size=1), *draw(), layer=layer)


@pytest.mark.parametrize("layer_class", [nn.BatchNorm, BatchNormCudnnOff, contrib.nn.SyncBatchNorm, SyncBatchNorm])
def test_a_net_that_is_one_layer(layer_class, backend):
    options = {"num_devices": 4} if layer_class is contrib.nn.SyncBatchNorm else {}
    layer = layer_class(in_channels=4, epsilon=1e-3, momentum=0.6, **options)
    assert convert_sync_batchnorm(layer) is layer and type(layer) is SyncBatchNorm
    check_alone(layer, epsilon=1e-3, momentum=0.6, axis=1)
    convert_batchnorm(layer)
    assert type(layer) is (layer_class if layer_class is BatchNormCudnnOff else nn.BatchNorm)
    told = {"epsilon": 1e-3, "momentum": 0.6, "axis": 1, "group_size": 1}
    check_step(layer, reference_of(layer, **told), *draw())


@modes
@pytest.mark.parametrize("moment", ["before initialize", "after initialize", "after a forward pass", "after a step"])
def test_when_it_is_converted_does_not_matter(moment, mode, backend):
    """Nor that nobody knows the channels before the first pass."""
    gamma, beta = [0.5, 2.0, 1.0, -0.25], [0.5, -1.0, 0.0, 1.0]
    initializers = {
        "gamma_initializer": mx.init.Constant(mx.nd.array(gamma)),
        "beta_initializer": mx.init.Constant(mx.nd.array(beta)),
    }
    net = nn.HybridSequential()
    net.add(nn.BatchNorm(epsilon=1e-3, momentum=0.6, **initializers), nn.Activation("relu"))
    set_mode(net, mode)
    numbers = {"epsilon": 1e-3, "momentum": 0.6, "activation": "relu"}
    if moment == "before initialize":
        convert_sync_batchnorm(net)
    net.initialize(ctx=cpus(2))
    norm = Norm(gamma, beta, **numbers)
    if moment == "after a forward pass":
        for device in cpus(2):
            net(mx.nd.ones((1, *SHAPES[0][1:]), ctx=device)).wait_to_read()
    elif moment == "after a step":
        plain = Norm(gamma, beta, group_size=1, mean_is_rounded=True, **numbers)
        check_step(net, plain, *draw(), layer=net[0])
        mean, var = (item.value for item in plain.running(0))
        for name, vector in (("running_mean", mean), ("running_var", var)):
            getattr(net[0], name).set_data(mx.nd.array(vector))
        norm.set_running(mean, var)
    if moment != "before initialize":
        convert_sync_batchnorm(net)
    norm.mean_is_rounded = backend == "portable"
    for seed in range(2):
        check_step(net, norm, *draw(seed), layer=net[0])
    convert_batchnorm(net)  # drops the graph again: from here on each device is on its own
    check_step(net, reference_of(net[0], group_size=1, **numbers), *draw(3), layer=net[0])


@pytest.mark.parametrize("full_names", [False, True])
@pytest.mark.parametrize("source, target", [(nn.BatchNorm, SyncBatchNorm), (SyncBatchNorm, nn.BatchNorm)])
def test_params_files_move_both_ways(tmp_path, full_names, source, target):
    file = str(tmp_path / "net.params")
    one, other = (make_net(lambda: nn.Dense(4), kind, nn.BatchNorm, prefix="net_") for kind in (source, target))
    shards, heads = draw(shapes=[(3, 4), (2, 4)])
    step(one, shards, heads, cpus(2))
    mx.nd.waitall()
    one.collect_params().save(file) if full_names else one.save_parameters(file)
    for net in (one, other):  # statistics are averages in the file
        (net.collect_params().load if full_names else net.load_parameters)(file, ctx=cpus(2))
    assert list(one.collect_params()) == list(other.collect_params())
    for shard, device in zip(shards, cpus(2)):
        x = mx.nd.array(shard, ctx=device)
        np.testing.assert_array_equal(one(x).asnumpy(), other(x).asnumpy())


SAVED = """
import sys
import mxnet as mx, numpy as np
folder = {folder!r}
assert 'gluon_syncbn' not in sys.modules
x = mx.nd.array(np.load(folder + '/x.npy'))
for name in ('net', 'symbol', 'back'):
    block = mx.gluon.SymbolBlock.imports(folder + f'/{{name}}-symbol.json', ['data'], folder + f'/{{name}}-0000.params')
    np.testing.assert_array_equal(block(x).asnumpy(), np.load(folder + f'/{{name}}.npy'), err_msg=name)
print('THE SAME')
"""


def test_what_is_saved_needs_nothing_of_ours(tmp_path, backend):
    """An exported net, the symbol of one with weights on one device, and a net that was converted back."""
    shards, heads = draw()
    np.save(tmp_path / "x.npy", shards[0])
    x, norm = mx.nd.array(shards[0]), SyncBatchNorm(activation="relu", backend=backend)
    net = make_net(norm, SyncBatchNorm)
    net.hybridize()
    step(net, shards, heads, cpus(2))
    mx.nd.waitall()
    np.save(tmp_path / "net.npy", net(x).asnumpy())
    net.export(str(tmp_path / "net"))
    net.collect_params().reset_ctx(mx.cpu(0))
    np.save(tmp_path / "symbol.npy", net(x).asnumpy())
    out = net(mx.sym.var("data"))
    out.save(str(tmp_path / "symbol-symbol.json"))
    assert {node["op"] for node in json.loads(out.tojson())["nodes"]} == {"null", "BatchNorm", "relu"}
    values = {name: parameter.data() for name, parameter in net.collect_params().items()}
    kinds = {name: "aux" if name in out.list_auxiliary_states() else "arg" for name in values}
    mx.nd.save(str(tmp_path / "symbol-0000.params"), {f"{kinds[name]}:{name}": values[name] for name in values})
    convert_batchnorm(net)
    net.hybridize()
    np.save(tmp_path / "back.npy", net(x).asnumpy())
    net.export(str(tmp_path / "back"))
    assert np.array_equal(np.load(tmp_path / "net.npy"), np.load(tmp_path / "back.npy"))
    done = run_python(SAVED.format(folder=str(tmp_path)))
    assert done.stdout.strip() == "THE SAME", done.stdout + done.stderr


class OwnHybridForward(nn.BatchNorm):
    def hybrid_forward(self, F, x, **parameters):
        return 2 * super().hybrid_forward(F, x, **parameters)


class OwnForward(nn.BatchNorm):
    def forward(self, x, *arguments):
        return 2 * super().forward(x, *arguments)


class OwnSymbolBlock(gluon.SymbolBlock):
    def forward(self, x, *arguments):
        return 2 * super().forward(x, *arguments)


OWN = {
    "MXNet's with a ReLU": lambda: nn.BatchNormReLU(in_channels=4, prefix="stem_"),
    "hybrid_forward": lambda: OwnHybridForward(in_channels=4, prefix="stem_"),
    "forward": lambda: OwnForward(in_channels=4, prefix="stem_"),
    "a symbol's": lambda: OwnSymbolBlock(mx.sym.BatchNorm(mx.sym.var("data"), name="in", **NODE), mx.sym.var("data")),
    "statistics are outputs": lambda: symbol_block(lambda node: node[0], lambda node: node[1], output_mean_var=True),
}


@pytest.mark.parametrize("own", list(OWN))
def test_what_has_a_forward_pass_of_its_own_stays_as_it_is(own, caplog):
    block, other = OWN[own](), nn.BatchNorm(in_channels=4)
    kind, net = type(block), nn.HybridSequential()
    net.add(block, other)
    convert_sync_batchnorm(net)
    assert type(block) is kind and type(other) is SyncBatchNorm
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    if isinstance(block, gluon.SymbolBlock):
        assert f"1 BatchNorm nodes inside {kind.__name__} '{block.name}' stay unsynchronized" in warning
    else:
        assert warning == f"{kind.__name__} 'stem' stays unsynchronized: it has a forward pass of its own."
    untouched = OWN[own]()
    x, results = mx.nd.array(draw()[0][0]), []
    for item in (block, untouched):
        mx.random.seed(0)
        item.initialize()
        with autograd.record():
            made = item(x)
        results.append([part.asnumpy() for part in (made if isinstance(made, (list, tuple)) else [made])])
    for one, theirs in zip(*results):
        np.testing.assert_array_equal(one, theirs)


def test_a_symbol_of_which_some_nodes_can_be_converted(caplog):
    first = mx.sym.BatchNorm(mx.sym.var("data"), name="first")
    both = mx.sym.BatchNorm(first, name="second", output_mean_var=True)
    net = gluon.SymbolBlock([both[0], both[1]], mx.sym.var("data"))
    convert_sync_batchnorm(net)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "1 BatchNorm nodes inside SynchronizedSymbolBlock" in warning and "stay unsynchronized" in warning
    assert [layer.name for layer in layers_of(net)] == ["first"]


def test_gluoncvs_pruned_networks_whose_parameters_have_no_shape():
    net = model_zoo.get_model("resnet18_v1b_0.89", pretrained=False)
    names = list(net.collect_params())
    convert_sync_batchnorm(net).initialize(mx.init.Xavier(), ctx=cpus(2))
    shards = random_shards([(2, 3, 32, 32)] * 2)
    step(net, shards, random_shards([(2, 1000)] * 2), cpus(2))
    means = [item for name, item in net.collect_params().items() if name.endswith("running_mean")]
    assert len(means) == 20 and names == list(net.collect_params())
    for mean in means:
        first, second = (mean.data(device).asnumpy() for device in cpus(2))
        assert np.array_equal(first, second) and first.any()
    seen = net.conv1(mx.nd.array(np.concatenate(shards))).asnumpy().mean((0, 2, 3))
    np.testing.assert_allclose(net.bn1.running_mean.data(mx.cpu(1)).asnumpy(), 0.1 * seen, rtol=1e-5, atol=1e-6)


OPTIONS = {"num_devices": 2, "group_size": 1, "timeout": 7.0, "process_group": "none", "fuse": False}
OPTIONS["activation"] = "relu"
OPTIONS = {
    "native": {**OPTIONS, "backend": "native", "renorm": ((0.0, 2.0, 1.0),), "in_place": True},
    "portable": {**OPTIONS, "backend": "portable", "kvstore": "local"},
}


@pytest.mark.parametrize("options", list(OPTIONS.values()), ids=list(OPTIONS))
def test_a_second_conversion_keeps_what_it_is_not_given(options):
    layer = SyncBatchNorm(in_channels=4, **options)
    before = options_of(layer)
    assert before.items() >= options.items()
    convert_sync_batchnorm(layer)
    assert options_of(layer) == before
    for name, value in {"num_devices": None, "timeout": 9.0, "fuse": True, "group_size": 2}.items():
        convert_sync_batchnorm(layer, **{name: value})
        before[name] = value
        assert options_of(layer) == before
    if before["renorm"] is None:
        check_alone(layer, activation="relu")  # in one group now, of two devices


@pytest.mark.parametrize(
    "own, given, words",
    [
        ({"in_place": True}, {"backend": "portable"}, "only the native back end has in_place"),
        ({"backend": "native"}, {"kvstore": "local"}, "only the portable back end uses one"),
    ],
)
def test_what_does_not_fit_a_layers_own_options_is_refused_before_anything_changes(own, given, words):
    net = nn.HybridSequential()
    net.add(nn.BatchNorm(), SyncBatchNorm(**own))
    before = options_of(net[1])
    with pytest.raises(RuntimeError, match=words):
        convert_sync_batchnorm(net, **given)
    assert type(net[0]) is nn.BatchNorm and options_of(net[1]) == before


@modes
@pytest.mark.parametrize("is_np", [False, True], ids=["nd", "np"])
def test_an_activation_goes_there_and_back(mode, is_np):
    """It is part of what the layer computes, and no conversion may drop it."""
    with mx.util.np_shape(is_np), mx.util.np_array(is_np):
        own = SyncBatchNorm(in_channels=4, activation="relu")
        net = make_net(own, nn.BatchNorm(in_channels=4), nn.Activation("relu"), prefix="net_")
        x = (mx.np if is_np else mx.nd).array(draw()[0][0] - 0.5, dtype="float32")
        expected, names = net(x).asnumpy(), sorted(net.collect_params())
        set_mode(net, mode)
        for convert in (convert_sync_batchnorm, convert_batchnorm, convert_batchnorm, *[convert_sync_batchnorm] * 2):
            convert(net)
            np.testing.assert_allclose(net(x).asnumpy(), expected, rtol=1e-6)
            assert sorted(net.collect_params()) == names and isinstance(net[0], nn.BatchNorm)
        assert type(net[0]) is SyncBatchNorm and options_of(net[0])["activation"] == "relu"
    if not is_np:
        check_step(net[0], reference_of(net[0], activation="relu"), *draw())


def test_a_layer_alone_takes_its_relu_along():
    """Of a pair in a `nn.HybridSequential`; converting only the norm must not lose the other half."""
    net = make_net(nn.BatchNorm(in_channels=4), nn.Activation("relu"))
    convert_sync_batchnorm(net)
    assert options_of(net[0])["activation"] == "relu"
    check_step(net, reference_of(net[0], activation="relu"), *draw(), layer=net[0])
    convert_batchnorm(net[0])
    check_step(net, reference_of(net[0], activation="relu", group_size=1), *draw(), layer=net[0])
    assert [type(block) for block in net] == [nn.BatchNorm, nn.Activation]


def test_a_net_without_batchnorm_is_warned_of_at_the_users_line():
    with pytest.warns(UserWarning, match="has no BatchNorm layer that can be converted") as seen:
        convert_sync_batchnorm(nn.Dense(3))
    assert [item.filename for item in seen] == [__file__]


# Copies

COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda block: pickle.loads(pickle.dumps(block))}
copies = pytest.mark.parametrize("way", list(COPIES))


def learn_again(made):
    """The gradients of MXNet's copies of Parameters are not written."""
    for gradients in ("null", "write"):
        made.collect_params(".*gamma|.*beta").setattr("grad_req", gradients)


@copies
@pytest.mark.parametrize("used", [False, True], ids=["new", "used"])
def test_a_copy_does_the_same_and_nothing_is_shared(backend, way, used):
    layer = SyncBatchNorm(in_channels=4, timeout=30, activation="relu", momentum=0.6)
    layer.initialize(ctx=cpus(2))
    random_affine(layer, 4)
    norm = reference_of(layer, activation="relu", momentum=0.6)
    if used:
        check_step(layer, norm, *draw(1))
    made = COPIES[way](layer)
    assert type(made) is SyncBatchNorm and options_of(made) == options_of(layer) and repr(made) == repr(layer)
    for name in ("gamma", "beta", "running_mean", "running_var"):
        theirs, ours = getattr(made, name), getattr(layer, name)
        assert theirs is not ours and theirs.name == ours.name and theirs.list_ctx() == cpus(2)
    learn_again(made)
    copied = copy.deepcopy(norm)
    seen = check_step(made, copied, *draw(3))
    check_running(layer, norm)  # as before
    assert all((one == other).all() for one, other in zip(seen, check_step(layer, norm, *draw(3))))
    for seed, (block, its) in enumerate([(made, copied), (layer, norm)] * 2):  # by turns, each on its own
        check_step(block, its, *draw(seed))
    shallow = copy.copy(layer)  # has the same parameters
    check_step(shallow, norm, *draw(7))
    check_step(layer, norm, *draw(8))


@copies
def test_a_copy_of_a_whole_net(backend, way):
    """With a layer that is in it twice, which stays one, and one that is made for a symbol's node."""
    shared, net = SyncBatchNorm(in_channels=4), nn.HybridSequential()
    net.add(shared, SyncBatchNorm(in_channels=4), shared)
    net.initialize(ctx=cpus(2))
    step(net, *draw(), cpus(2))
    if way == "deepcopy":  # before the first pass, after which MXNet's SymbolBlock cannot be copied
        net.add(convert_sync_batchnorm(symbol_block()))
        net[3].initialize(mx.init.One(), ctx=cpus(2))
    made = COPIES[way](net)
    learn_again(made)
    assert made[0] is made[2] and made[0] is not shared
    outputs = [[item.asnumpy() for items in step(one, *draw(1), cpus(2)) for item in items] for one in (net, made)]
    np.testing.assert_equal(*outputs)
    for name, parameter in net.collect_params().items():
        mine = made.collect_params()[name]
        assert mine is not parameter
        np.testing.assert_array_equal(mine.data(mx.cpu(1)).asnumpy(), parameter.data(mx.cpu(1)).asnumpy())
    layer = layers_of(made[3])[0] if way == "deepcopy" else made[1]
    check_step(made[3] if way == "deepcopy" else layer, reference_of(layer), *draw(2), layer=layer)


def test_a_store_of_the_users_is_shared():
    store = mx.kv.create("local")
    layer = SyncBatchNorm(in_channels=4, backend="portable", kvstore=store)
    made = copy.deepcopy(layer)
    assert options_of(made)["kvstore"] is store
    check_alone(made)
    check_alone(layer)


# What is left plain

FROZEN = functools.partial(nn.BatchNorm, use_global_stats=True)


def train(net, count=2, train_mode=True):
    """The texts of warnings of this package."""
    parts = [mx.nd.array(part, ctx=device) for part, device in zip(random_shards([SHAPES[0]] * count), cpus(count))]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            with autograd.record(train_mode=train_mode):
                losses = [net(part) for part in parts]
            autograd.backward(losses, train_mode=train_mode)
        mx.nd.waitall()
    return [str(item.message) for item in caught if "gluon_syncbn" in str(item.message)]


@modes
def test_one_warning_with_numbers_names_and_the_line_that_mends_it(mode):
    net = set_mode(make_net(SyncBatchNorm, nn.BatchNorm, FROZEN, *[nn.BatchNorm] * 3, prefix="net_"), mode)
    (text,) = train(net)
    assert text.startswith("4 of the 5 BatchNorm layers of net are not synchronized (net_batchnorm1, ")
    assert ", ...): each device" in text and "gluon_syncbn.convert_sync_batchnorm(net)" in text
    assert train(net) == []
    net = set_mode(make_net(SyncBatchNorm, nn.BatchNorm), mode)
    convert_sync_batchnorm(net)
    for norms in ([SyncBatchNorm, FROZEN], [nn.BatchNorm]):
        assert train(net) == []  # that line has mended it; then: frozen; nobody asked for synchronization
        net = set_mode(make_net(*norms), mode)
    assert train(net) == []
    net = set_mode(make_net(SyncBatchNorm, nn.BatchNorm, devices=1), mode)
    assert train(net, count=1) == []  # nothing to synchronize
    net = set_mode(make_net(SyncBatchNorm, nn.BatchNorm), mode)
    assert train(net, train_mode=False) == [] and len(train(net)) == 1


def test_a_symbol_block_is_warned_of_by_its_nodes_names():
    net = make_net(SyncBatchNorm, symbol_block())
    (text,) = train(net)
    assert text.startswith("1 of the 2 BatchNorm layers") and "(inside)" in text
    net, data = nn.HybridSequential(prefix="net_"), mx.sym.var("data")
    node = mx.sym.BatchNorm(data, name="inside", **NODE)
    with net.name_scope():  # as GluonCV's SSD makes its base: layers have their nodes' names, and take no number
        block = convert_sync_batchnorm(gluon.SymbolBlock(node, data))
        net.add(block, FROZEN())
    net.initialize(ctx=cpus(2))
    assert net[1].name == "net_batchnorm0" and train(net) == []
    convert_sync_batchnorm(block, timeout=0.3)
    with autograd.record():
        output = net(mx.nd.ones(SHAPES[0]))
    with pytest.raises(mx.MXNetError, match="SyncBatchNorm 'inside'"):
        output.wait_to_read()


def test_gluoncvs_yolo_with_a_synchronized_base():
    """As GluonCV's YOLOv3Estimator builds it: its heads stay plain."""
    net = model_zoo.get_model("yolo3_mobilenet0.25_voc", pretrained_base=False)
    convert_sync_batchnorm(net.stages)
    net.initialize(ctx=cpus(2))
    net.hybridize()
    shapes = [(1, 3, 64, 64), (1, 1, 4), *[(1, 3 * (2 * 2 + 4 * 4 + 8 * 8), size) for size in (1, 2, 2, 2, 20)]]
    with pytest.warns(UserWarning, match="^20 of the 47 BatchNorm layers") as seen:
        with autograd.record():
            outputs = [net(*[mx.nd.zeros(shape, ctx=device) for shape in shapes]) for device in cpus(2)]
        mx.nd.waitall()
    assert len([item for item in seen if "not synchronized" in str(item.message)]) == 1 and len(outputs) == 2


# Nodes of a symbol that a net has computed


def test_norms_without_options_take_over_their_neighbours():
    def computed(x, name, **options):
        layer = SyncBatchNorm(in_channels=4, prefix=f"{name}_", **options)
        layer.initialize()
        return layer(x)

    data = mx.sym.var("data")
    first = computed(data, "first", num_devices=2, timeout=7)
    block = gluon.SymbolBlock(mx.sym.BatchNorm(first, name="added", fix_gamma=False), data)
    found = [(options_of(layer)["num_devices"], options_of(layer)["timeout"]) for layer in layers_of(block)]
    assert found == [(2, 7)] * 2
    out = mx.sym.BatchNorm(computed(first, "second", timeout=8), name="added")
    with pytest.raises(ValueError, match="different options, so 'added', a BatchNorm without any"):
        gluon.SymbolBlock(out, data)
