"""Conversion reaches every BatchNorm of a net, keeps what each computes, and can be undone; copies do the same.

What a converted net computes is compared with the reference on devices with different data; what it leaves as it is,
it says.
"""

import copy
import functools
import logging
import pickle
import warnings

import mxnet as mx
import numpy as np
import pytest
import testing
from gluoncv import model_zoo
from gluoncv.nn import BatchNormCudnnOff
from mxnet import autograd, gluon
from mxnet.gluon import contrib, nn
from reference import Norm, check_all
from testing import check_step, cpus, initialized, layers_of, options_of, reference_of, sequential, set_mode, step

from gluon_syncbn import SyncBatchNorm, abandon_step, convert_batchnorm, convert_sync_batchnorm

SHAPES = [(3, 4, 5, 3), (1, 4, 5, 3)]
NODE = {"fix_gamma": False, "eps": 1e-5}


def draw(seed=0, shapes=SHAPES):
    return testing.shards_and_heads(shapes, seed=seed, mean=0.5)


def check_alone(layer, **told):
    """A layer by itself synchronizes, with these numbers and what it has; two steps."""
    testing.random_affine(initialized(layer, 2, force_reinit=True), 4)
    testing.check_steps(layer, reference_of(layer, **told), draw)


def make_net(*blocks, devices=2, mode="imperative", **how):
    return initialized(sequential(*blocks, **how), devices, mode)


def node_and_data(**options):
    data = mx.sym.var("data")
    return mx.sym.BatchNorm(data, name="inside", **NODE, **options), data


def symbol_block(*outputs, **options):
    """Of a BatchNorm node, and what is made of it."""
    node, data = node_and_data(**options)
    return gluon.SymbolBlock([make(node) for make in outputs] or node, data)


class Nested(mx.gluon.HybridBlock):
    """BatchNorm as a child, twice; as an attribute; in lists, dicts, tuples, of other classes; held by a function."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.first = nn.BatchNorm(in_channels=4)
            self.inner = nn.HybridSequential()
            self.inner.add(nn.BatchNorm(in_channels=4, epsilon=1e-2, momentum=0.5, scale=False), self.first)
            numbers = {"in_channels": 4, "epsilon": 1e-3, "momentum": 0.6}
            theirs = contrib.nn.SyncBatchNorm(num_devices=4, **numbers)
            self.lists = [BatchNormCudnnOff(**numbers), {"a": (theirs, "text")}]
        self.lists.append(self.lists)
        self.function = lambda x: self.first(x)

    def norms(self):
        return [self.first, *self.inner, self.lists[0], self.lists[1]["a"][0]]


def test_finds_everything_once_and_says_so(caplog, backend):
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
    first, second, third = (1e-5, 0.9, True), (1e-2, 0.5, False), (1e-3, 0.6, True)
    for layer, (epsilon, momentum, scale) in zip(net.norms(), (first, second, first, third, third)):
        check_alone(layer, axis=1, epsilon=epsilon, momentum=momentum, scale=scale)
    net.lists[-1].initialize(ctx=cpus(2))
    net.lists[-1](mx.nd.ones((1, 4, 2, 2)))
    check_step(net.lists[-1], reference_of(*layers_of(net.lists[-1])), *draw(), layer=layers_of(net.lists[-1])[0])
    caplog.clear()
    assert convert_batchnorm(net) is net
    assert caplog.messages == ["5 SyncBatchNorm layers converted back to BatchNorm."]
    assert [type(layer) for layer in net.norms()] == [*[nn.BatchNorm] * 3, BatchNormCudnnOff, nn.BatchNorm]
    assert type(net.lists[-1]) is gluon.SymbolBlock
    assert set(vars(net.first)) == set(vars(nn.BatchNorm(in_channels=4)))
    assert repr(net.inner) == repr(untouched.inner)
    for layer in set(net.norms()):
        check_step(layer, reference_of(layer, group_size=1), *draw(), layer=layer)


@pytest.mark.parametrize("moment", ["before initialize", "after initialize", "after a forward pass", "after a step"])
def test_when_it_is_converted_does_not_matter(moment, mode, backend):
    """Nor that nobody knows the channels before the first pass."""
    gamma, beta = [0.5, 2.0, 1.0, -0.25], [0.5, -1.0, 0.0, 1.0]
    of_gamma, of_beta = (mx.init.Constant(mx.nd.array(vector)) for vector in (gamma, beta))
    norm = nn.BatchNorm(epsilon=1e-3, momentum=0.6, gamma_initializer=of_gamma, beta_initializer=of_beta)
    net = set_mode(sequential(norm, nn.Activation("relu")), mode)
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
    testing.check_steps(net, norm, draw, layer=net[0])
    convert_batchnorm(net)  # drops the graph again: from here on each device is on its own
    check_step(net, reference_of(net[0], group_size=1, **numbers), *draw(3), layer=net[0])


def doubled(kind, method):
    """A class whose method of that name gives twice as much."""

    def double(self, *arguments, **parameters):
        return 2 * getattr(kind, method)(self, *arguments, **parameters)

    return type("Own", (kind,), {method: double})


OWN = {
    "MXNet's with a ReLU": lambda: nn.BatchNormReLU(in_channels=4, prefix="stem_"),
    "hybrid_forward": lambda: doubled(nn.BatchNorm, "hybrid_forward")(in_channels=4, prefix="stem_"),
    "forward": lambda: doubled(nn.BatchNorm, "forward")(in_channels=4, prefix="stem_"),
    "__call__": lambda: doubled(nn.BatchNorm, "__call__")(in_channels=4, prefix="stem_"),
    "__getstate__": lambda: type("Own", (nn.BatchNorm,), {"__getstate__": lambda self: vars(self).copy()})(
        in_channels=4, prefix="stem_"
    ),
    "_imperative": lambda: type("Own", (nn.BatchNorm,), {"_imperative": lambda self: 7})(in_channels=4, prefix="stem_"),
    "contrib's with another forward pass": lambda: doubled(contrib.nn.SyncBatchNorm, "hybrid_forward")(
        in_channels=4, prefix="stem_"
    ),
    "a symbol's": lambda: doubled(gluon.SymbolBlock, "forward")(*node_and_data()),
    "statistics are outputs": lambda: symbol_block(lambda node: node[0], lambda node: node[1], output_mean_var=True),
}


@pytest.mark.parametrize("own", list(OWN))
def test_what_has_a_forward_pass_of_its_own_stays_as_it_is(own, caplog):
    block, other = OWN[own](), nn.BatchNorm(in_channels=4)
    kind = type(block)
    convert_sync_batchnorm(sequential(block, other))
    assert type(block) is kind and type(other) is SyncBatchNorm
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    if isinstance(block, gluon.SymbolBlock):
        assert f"1 BatchNorm nodes inside {kind.__name__} '{block.name}' stay unsynchronized" in warning
    else:
        name = {"MXNet's with a ReLU": "fuse_relu", "contrib's with another forward pass": "hybrid_forward"}.get(
            own, own
        )
        assert warning == f"{kind.__name__} 'stem' stays unsynchronized: its {name} is not that of nn.BatchNorm."
    results = []
    for item in (block, OWN[own]()):
        mx.random.seed(0)
        item.initialize()
        with autograd.record():
            made = item(mx.nd.array(draw()[0][0]))
        results.append([part.asnumpy() for part in (made if isinstance(made, (list, tuple)) else [made])])
    np.testing.assert_equal(*results)


class Scaled(nn.BatchNorm):
    """A user's, with all that a subclass may have but a forward pass."""

    def __init__(self, factor, **options):
        super().__init__(**options)
        self.factor, self.dtypes = factor, []

    def cast(self, dtype):
        self.dtypes.append(dtype)
        super().cast(dtype)

    def scaled_gamma(self):
        return self.factor * self.gamma.data(mx.cpu(0))

    def __repr__(self):
        return f"{self.factor} times {super().__repr__()}"


def test_what_else_a_subclass_overrides_stays(mode, backend):
    layer = Scaled(3, in_channels=4)
    net = set_mode(sequential(layer), mode)
    convert_sync_batchnorm(net).initialize(ctx=cpus(2))
    assert isinstance(layer, SyncBatchNorm) and isinstance(layer, Scaled)
    assert repr(layer).startswith("3 times SyncScaled(") and (layer.scaled_gamma() == 3).asnumpy().all()
    layer.cast("float16")
    assert layer.dtypes == ["float16"] and layer.gamma.dtype == "float32"
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(other) is type(layer) and other.factor == 3 and other.dtypes == ["float16"]
        other.collect_params().reset_ctx(cpus(2))
        check_step(other, reference_of(other), *draw(), layer=other)
    check_step(net, reference_of(layer), *draw(), layer=layer)
    convert_batchnorm(net)
    assert type(layer) is Scaled
    check_step(net, reference_of(layer, group_size=1), *draw(3), layer=layer)


class OfContrib(contrib.nn.SyncBatchNorm):
    def __init__(self, **options):
        super().__init__(num_devices=1, **options)

    def helper(self):
        return "helped"


class OfGluonCV(BatchNormCudnnOff):
    pass


@pytest.mark.parametrize("kind, back", [(OfContrib, nn.BatchNorm), (OfGluonCV, OfGluonCV)])
def test_subclasses_of_others_are_converted_too(kind, back, backend):
    layer = kind(in_channels=4)
    copy.deepcopy(layer)  # leaves a note in the class
    convert_sync_batchnorm(layer, num_devices=2).initialize(ctx=cpus(2))
    assert isinstance(layer, kind) and isinstance(layer, SyncBatchNorm)
    assert kind is OfGluonCV or layer.helper() == "helped"
    check_step(layer, reference_of(layer), *draw(), layer=layer)
    assert type(convert_batchnorm(layer)) is back
    check_step(layer, reference_of(layer, group_size=1), *draw(3), layer=layer)


def test_a_class_that_cannot_be_made_changes_nothing():
    class Registered(nn.BatchNorm):
        def __init_subclass__(cls, key, **more):
            super().__init_subclass__(**more)

    net = sequential(nn.BatchNorm(in_channels=4), Registered(in_channels=4))
    with pytest.raises(TypeError):
        convert_sync_batchnorm(net)
    assert [type(layer) for layer in net] == [nn.BatchNorm, Registered]


def test_gluoncvs_pruned_networks_whose_parameters_have_no_shape():
    net = model_zoo.get_model("resnet18_v1b_0.89", pretrained=False)
    names = list(net.collect_params())
    convert_sync_batchnorm(net).initialize(mx.init.Xavier(), ctx=cpus(2))
    shards, heads = testing.shards_and_heads([(2, 3, 32, 32)] * 2)[0], testing.random_shards([(2, 1000)] * 2)
    step(net, shards, heads, cpus(2))
    means = list(net.collect_params(".*running_mean").values())
    assert len(means) == 20 and names == list(net.collect_params())
    for first, second in (mean.list_data() for mean in means):
        assert np.array_equal(first.asnumpy(), second.asnumpy()) and first.asnumpy().any()
    seen = net.conv1(mx.nd.array(np.concatenate(shards))).asnumpy().mean((0, 2, 3))
    np.testing.assert_allclose(net.bn1.running_mean.data(mx.cpu(1)).asnumpy(), 0.1 * seen, rtol=1e-5, atol=1e-6)


BOTH = {"num_devices": 2, "group_size": 1, "timeout": 7.0, "process_group": "none", "fuse": False, "activation": "relu"}
OPTIONS = {
    "native": {**BOTH, "backend": "native", "renorm": (2.0, 1.0), "in_place": True},
    "portable": {**BOTH, "backend": "portable", "kvstore": "local"},
}
# What does not fit these.
WRONG = {
    "native": [{"backend": "portable"}, {"kvstore": "local"}],
    "portable": [{"in_place": True}, {"backend": "native"}],
}


@pytest.mark.parametrize("which", list(OPTIONS))
def test_a_second_conversion_keeps_what_it_is_not_given(which):
    """And all of it, if what it is given does not fit."""
    layer = SyncBatchNorm(in_channels=4, **OPTIONS[which])
    before = options_of(layer)
    assert before.items() >= OPTIONS[which].items()
    convert_sync_batchnorm(layer)
    for wrong in WRONG[which]:
        with pytest.raises(RuntimeError, match="only the (native back end has|portable back end uses)"):
            convert_sync_batchnorm(layer, **wrong)
    assert options_of(layer) == before
    for name, value in {"num_devices": None, "timeout": 9.0, "fuse": True, "group_size": 2}.items():
        convert_sync_batchnorm(layer, **{name: value})
        before[name] = value
        assert options_of(layer) == before
    if which == "portable":
        check_alone(layer, activation="relu")  # in one group now, of two devices


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
    layer = initialized(SyncBatchNorm(in_channels=4, timeout=30, activation="relu", momentum=0.6), 2)
    testing.random_affine(layer, 4)
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
    testing.check_running(layer, norm)  # as before
    assert all((one == other).all() for one, other in zip(seen, check_step(layer, norm, *draw(3))))
    for seed, (block, its) in enumerate([(made, copied), (layer, norm)] * 2):  # by turns, each on its own
        check_step(block, its, *draw(seed))
    shallow = copy.copy(layer)  # has the same parameters
    check_step(shallow, norm, *draw(7))
    check_step(layer, norm, *draw(8))


@copies
def test_a_copy_of_a_whole_net(backend, way):
    """With a layer that is in it twice, which stays one, and one that is made for a symbol's node."""
    shared = SyncBatchNorm(in_channels=4)
    net = make_net(shared, SyncBatchNorm(in_channels=4), shared)
    step(net, *draw(), cpus(2))
    if way == "deepcopy":  # before the first pass, after which MXNet's SymbolBlock cannot be copied
        net.add(initialized(convert_sync_batchnorm(symbol_block()), 2, init=mx.init.One()))
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
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for seed in range(2):
            step(net, *draw(seed, [SHAPES[0]] * count), cpus(count), train_mode)
        mx.nd.waitall()
    return [str(item.message) for item in caught if "gluon_syncbn" in str(item.message)]


def test_one_warning_with_numbers_names_and_the_line_that_mends_it(mode):
    net = make_net(SyncBatchNorm, nn.BatchNorm, FROZEN, *[nn.BatchNorm] * 3, prefix="net_", mode=mode)
    (text,) = train(net)
    assert text.startswith("4 of the 5 BatchNorm layers of net are not synchronized (net_batchnorm1, ")
    assert ", ...): each device" in text and "gluon_syncbn.convert_sync_batchnorm(net)" in text
    assert train(net) == []
    (text,) = train(make_net(SyncBatchNorm, *[nn.BatchNorm] * 3, prefix="net_"))
    assert text.startswith("3 of the 4 ") and "(net_batchnorm1, net_batchnorm2, net_batchnorm3): each device" in text
    own = type("Own", (nn.BatchNorm,), {"forward": lambda self, x: x * 1})
    with pytest.warns(
        UserWarning, match=r"\): each device .* there\. They have a forward pass of their own, and cannot"
    ):
        step(make_net(SyncBatchNorm, own), *draw(0, [SHAPES[0]] * 2), cpus(2))
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
    made = node_and_data()
    # As GluonCV's SSD makes its base: layers have their nodes' names, and take no number.
    net = make_net(lambda: convert_sync_batchnorm(gluon.SymbolBlock(*made)), FROZEN, prefix="net_")
    assert net[1].name == "net_batchnorm0" and train(net) == []
    convert_sync_batchnorm(net, timeout=0.3)
    with autograd.record():
        output = net(mx.nd.ones(SHAPES[0]))
    words = r"'inside': forward pass waited 0.3 s for 1 of 2 devices. Arrived: cpu\(0\). Missing: cpu\(1\). Usual"
    with pytest.raises(mx.MXNetError, match=words):
        output.wait_to_read()
    abandon_step()


def test_a_net_that_comes_second_in_a_step_is_warned_of_too(mode):
    encoder, decoder = (set_mode(make_net(SyncBatchNorm, norm), mode) for norm in (SyncBatchNorm, nn.BatchNorm))
    with pytest.warns(UserWarning, match=f"^1 of the 2 BatchNorm layers of {decoder.name} are not synchronized"):
        step(lambda x: decoder(encoder(x)), *draw(0, [SHAPES[0]] * 2), cpus(2))


class Halving(gluon.SymbolBlock):
    """A user's, with a forward pass and a method of its own."""

    def forward(self, x, *args):
        return super().forward(self.half(x), *args)

    def half(self, x):
        return x * 0.5


def test_a_symbol_block_of_a_users_class_keeps_its_methods(mode, backend):
    """As a block of a net's symbol, which says that it synchronizes, and back; copied, too."""
    net, data = sequential(SyncBatchNorm(in_channels=4)), mx.sym.var("data")
    initialized(net, 2)
    testing.random_affine(net[0], 4)
    block = set_mode(Halving(net(data), data, params=net.collect_params()), mode)
    norm, (shards, heads) = reference_of(net[0]), draw()
    for item in (block, pickle.loads(pickle.dumps(block))):
        assert isinstance(item, Halving) and item.half(2) == 1
        item.collect_params().reset_ctx(cpus(2))
        outputs, _ = step(item, shards, heads, cpus(2))
        expected = copy.deepcopy(norm).step([shard * np.float32(0.5) for shard in shards], heads)
        check_all("output", [out.asnumpy() for out in outputs], expected.outputs, **testing.precision(net[0]))
    assert type(convert_batchnorm(block)) is Halving


class Bent(SyncBatchNorm):
    """A user's, with a forward pass of its own."""

    def hybrid_forward(self, F, *arrays, **parameters):
        return F.tanh(super().hybrid_forward(F, *arrays, **parameters))


def test_a_layer_of_a_users_class_with_a_forward_pass_of_its_own_is_not_converted_back(mode, caplog):
    net = initialized(sequential(Bent(in_channels=4), SyncBatchNorm(in_channels=4)), 1, mode)
    x = mx.nd.array(draw()[0][0])
    before = net(x).asnumpy()
    convert_batchnorm(net)
    assert [type(layer) for layer in net] == [Bent, nn.BatchNorm]
    assert "Bent 'batchnorm" in caplog.text and "is not converted" in caplog.text
    np.testing.assert_array_equal(net(x).asnumpy(), before)


def test_gluoncvs_yolo_with_a_synchronized_base():
    """As GluonCV's YOLOv3Estimator builds it: its heads stay plain."""
    net = model_zoo.get_model("yolo3_mobilenet0.25_voc", pretrained_base=False)
    convert_sync_batchnorm(net.stages)
    net.initialize(ctx=cpus(2))
    net.hybridize()
    shapes = [(1, 3, 64, 64), (1, 1, 4), *[(1, 3 * (2 * 2 + 4 * 4 + 8 * 8), size) for size in (1, 2, 2, 2, 20)]]
    with pytest.warns(UserWarning, match="^20 of the 47 BatchNorm layers") as seen, autograd.record():
        outputs = [net(*[mx.nd.zeros(shape, ctx=device) for shape in shapes]) for device in cpus(2)]
        mx.nd.waitall()
    assert len([item for item in seen if "not synchronized" in str(item.message)]) == 1 and len(outputs) == 2


# Nodes of a symbol that a net has computed


def test_norms_without_options_take_over_their_neighbours():
    data, layers = mx.sym.var("data"), [SyncBatchNorm(in_channels=4, num_devices=2, timeout=time) for time in (7, 8)]
    for layer in layers:
        layer.initialize()
    first = layers[0](data)
    block = gluon.SymbolBlock(mx.sym.BatchNorm(first, name="added", fix_gamma=False), data)
    found = [(options_of(layer)["num_devices"], options_of(layer)["timeout"]) for layer in layers_of(block)]
    assert found == [(2, 7)] * 2
    with pytest.raises(ValueError, match="different options, so 'added', a BatchNorm without any"):
        gluon.SymbolBlock(mx.sym.BatchNorm(layers[1](first), name="added"), data)
