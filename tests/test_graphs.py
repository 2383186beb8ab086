"""What follows a norm in a graph is computed in its own passes, where nobody can tell the difference; results stay.

Each net is compared with `graphs.Whole` on one device, which has the whole batch in float64. Random networks, with
parallel branches, shared heads and Dropout, run in a process with a hard limit, so that one that hangs is seen.
"""

import functools
import logging
import re

import mxnet as mx
import numpy as np
import pytest
import testing
from endings import Late
from executors import check_net
from graphs import CHANNELS, Pair, Whole
from mxnet import gluon
from mxnet.gluon import nn
from test_symbols import BATCH, classifier
from testing import (
    MODES,
    check_step,
    cpus,
    initialized,
    on_devices,
    options_of,
    random_shards,
    reference_of,
    run_program,
    sequential,
    set_mode,
)

from gluon_syncbn import SyncBatchNorm, convert_batchnorm, convert_symbol, convert_sync_batchnorm
from gluon_syncbn.base.mxnet_private import device_of

GRAPHS = {"native": 50, "portable": 15}
SHAPES = [(2, CHANNELS, 3, 5), (1, CHANNELS, 3, 5)]
graph_modes = pytest.mark.parametrize("mode", ["hybridize", "static"])


class Net(gluon.HybridBlock):
    """A norm, and ``behind(F, norm(x), x)``; what that returns is the output."""

    def __init__(self, behind, norm=nn.BatchNorm, axis=1):
        super().__init__(prefix="net_")
        self._behind = behind
        with self.name_scope():
            self.norm = norm(axis=axis, in_channels=CHANNELS)

    def hybrid_forward(self, F, x):
        return self._behind(F, self.norm(x), x)


# What the log calls them, and the graphs.
PATTERNS = {
    "relu": ("ReLU", lambda F, y, x: F.relu(y)),
    "activation": ("ReLU", lambda F, y, x: F.Activation(y, act_type="relu")),
    "leaky": ("leaky ReLU", lambda F, y, x: F.LeakyReLU(y, slope=0.1)),
    "leaky by default": ("leaky ReLU", lambda F, y, x: F.LeakyReLU(y)),
    "steep": ("leaky ReLU", lambda F, y, x: F.LeakyReLU(y, act_type="leaky", slope=1.5)),
    "skip": ("sum and ReLU", lambda F, y, x: F.relu(y + x)),
    "skip first": ("sum and ReLU", lambda F, y, x: F.Activation(F.square(x) + y, act_type="relu")),
    "skip without a gradient": ("sum and ReLU", lambda F, y, x: F.relu(y + F.BlockGrad(x))),
}


def told(caplog) -> list:
    """What was fused, as the log says."""
    found = [re.search(r"fused into its norms \((.*)\)", text) for text in caplog.messages]
    caplog.clear()
    return [match[1] for match in found if match]


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO, "gluon_syncbn")
    return caplog


def pair(behind, devices=2, dtype="float32", mode="static", axis=1, is_leaky=False, **options):
    net = convert_sync_batchnorm(Net(behind, axis=axis), **options)
    return Pair(net, Net(behind, Whole, axis), devices, dtype, mode, axis=axis, is_leaky=is_leaky)


NUMBERS = [(1, "float32", 1), (2, "float32", 1), (3, "float32", -1), (4, "float64", 1)]


@pytest.mark.parametrize("devices, dtype, axis", [*NUMBERS, (2, "float16", 1), (2, "float16", -1)])
@pytest.mark.parametrize("pattern", list(PATTERNS))
def test_a_pattern_is_fused_and_its_numbers_are_right(pattern, mode, devices, dtype, axis, backend, log):
    """With fuse=False it is not. Predictions are the same to the last bit, and those of the plain net."""
    kind, behind = PATTERNS[pattern]
    is_leaky = kind == "leaky ReLU"
    shapes = [((n, 3, 5, CHANNELS) if axis == -1 else (n, CHANNELS, 3, 5)) for n in (1, 2, 1, 3)[:devices]]
    x = mx.nd.array(random_shards(shapes, dtype, 7)[0], dtype=dtype)
    plain = Pair(Net(behind, axis=axis), Net(behind, Whole, axis), 1, dtype, mode).net
    predictions = []
    for fuse in (True, False) if backend == "native" else (True,):  # the other fuses nothing
        both = pair(behind, devices, dtype, mode, axis, is_leaky, fuse=fuse)
        both.check_steps(shapes)
        is_fused = fuse and backend == "native" and devices > 1 and mode != "imperative"
        assert told(log) == ([f"1 × {kind}"] if is_fused else [])
        predictions.append(both.net(x).asnumpy())
        for ours, theirs in zip(plain.collect_params().values(), both.net.collect_params().values()):
            ours.set_data(theirs.data(mx.cpu(0)))
        if dtype == "float32" or mode == "imperative" or backend == "portable":
            np.testing.assert_array_equal(predictions[-1], plain(x).asnumpy())
    if not (dtype == "float64" and is_leaky):
        np.testing.assert_array_equal(predictions[0], predictions[-1])


@graph_modes
@pytest.mark.parametrize("request_", ["add", "null"])
@pytest.mark.parametrize("pattern", ["skip", "leaky"])
def test_gradients_that_are_added_or_not_asked_for(pattern, request_, mode, backend):
    both, shards = pair(PATTERNS[pattern][1], mode=mode), random_shards(SHAPES)
    inputs = both.inputs(shards, request_)
    for times in (1, 2, 3):
        both.check_step(shards, random_shards(SHAPES, seed=1), inputs, times)


ALMOST = {
    "a second reader": lambda F, y, x: F.relu(y) + y,
    "an output between": lambda F, y, x: F.slice_axis(F.concat(F.relu(y), y, dim=1), axis=1, begin=2, end=6),
    "the sum is read": lambda F, y, x: (lambda both: F.relu(both) * both)(y + x),
    "the norm is read beside the sum": lambda F, y, x: F.relu(y + x) * y,
    "added to itself": lambda F, y, x: F.relu(y + y),
    "a sum that broadcasts": lambda F, y, x: F.relu(F.broadcast_add(y, x.mean(axis=(2, 3), keepdims=True))),
    "another activation": lambda F, y, x: F.Activation(y, act_type="sigmoid"),
    "elu": lambda F, y, x: F.LeakyReLU(y, act_type="elu", slope=0.1),
    "a slope of 0": lambda F, y, x: F.LeakyReLU(y, slope=0.0),
    "a negative slope": lambda F, y, x: F.LeakyReLU(y, slope=-0.25),
    "a sum and a leaky ReLU": lambda F, y, x: F.LeakyReLU(y + x, slope=0.25),
    "a difference": lambda F, y, x: F.relu(y - x),
}


@pytest.mark.parametrize("name", list(ALMOST))
def test_what_is_almost_a_pattern_is_left_alone(name, log):
    is_leaky = "LeakyReLU" in ALMOST[name].__code__.co_names
    pair(ALMOST[name], dtype="float64", is_leaky=is_leaky, backend="native").check_steps(SHAPES)
    assert told(log) == []


@pytest.mark.parametrize("pattern", ["relu", "leaky", "skip"])
def test_a_norm_with_an_activation_of_its_own_computes_that(pattern, log):
    behind = PATTERNS[pattern][1]
    net = Net(behind, lambda **options: SyncBatchNorm(activation="relu", backend="native", **options))
    whole = Net(lambda F, y, x: behind(F, F.relu(y), x), Whole)
    Pair(net, whole, 2, mode="static", is_leaky=pattern == "leaky").check_steps(SHAPES)
    assert told(log) == ["1 × ReLU"]


def test_random_graphs(backend, seed):
    count = GRAPHS[backend]
    done = run_program(["tests/graphs.py", "--backend", backend, "--first", seed, "--count", count])
    fused = ["ReLU", "leaky ReLU", "sum and ReLU"] if backend == "native" else []
    assert f"RIGHT: {count} graphs" in done.stdout and f"fused {fused}\n" in done.stdout


class Calls(gluon.HybridBlock):
    """Six calls of norms that share their Parameters: of one, of twins, or of a SymbolBlock with such a node, too."""

    def __init__(self, graph, norm, kind):
        super().__init__(prefix="net_")
        self._graph = graph
        with self.name_scope():
            self.first = norm(in_channels=CHANNELS, momentum=0.5)
            shared = {"in_channels": CHANNELS, "momentum": 0.5, "params": self.first.params}
            self.norms = [self.first if kind == "one layer" else norm(**shared) for _ in range(5)]
        if kind == "and a SymbolBlock" and norm is not Whole:
            data = mx.sym.var("data")
            self.norms[0] = gluon.SymbolBlock(self.first(data), data, params=self.first.params)
        for block in self.norms:
            self.register_child(block)

    def hybrid_forward(self, F, x):
        return self._graph(F, x, self.first, *self.norms)


CALLS = {
    # The second summand comes from a later call.
    "one after the other": lambda F, x, one, other, *_: F.relu(one(x) + F.relu(other(F.square(x)))),
    # The last is read first, and so comes first in the graph.
    "read backwards": lambda F, x, one, other, third, *_: (lambda a, b, c: F.relu(F.tanh(c) * b + a))(
        one(x), other(F.cos(x)), third(F.sin(x))
    ),
    # Each branch adds its own, whichever is faster.
    "side by side": lambda F, x, *norms: sum(F.relu(norm(F.sin(x * i))) * i for i, norm in enumerate(norms, 1)),
}


@pytest.mark.parametrize("kind", ["one layer", "twins", "and a SymbolBlock"])
@pytest.mark.parametrize("graph", list(CALLS))
def test_calls_that_share_statistics_keep_their_order(graph, kind, mode, backend):
    """They are averaged call by call, on every device alike, and none is lost."""
    net = convert_sync_batchnorm(Calls(CALLS[graph], nn.BatchNorm, kind))
    Pair(net, Calls(CALLS[graph], Whole, kind), 2, mode=mode).check_steps(SHAPES, 6)


def executor_of(symbol, layer, device):
    """An executor of the symbol of a norm, with the layer's arrays on this device."""
    arrays = {name: getattr(layer, name).data(device) for name in ("gamma", "beta", "running_mean", "running_var")}
    given = {"data": mx.nd.zeros(SHAPES[0], device), "bn_gamma": arrays["gamma"], "bn_beta": arrays["beta"]}
    states = {"bn_moving_mean": arrays["running_mean"], "bn_moving_var": arrays["running_var"]}
    return symbol.bind(device, given, aux_states=states)


@pytest.mark.parametrize("reader", ["another net", "an operator"])
@pytest.mark.parametrize("trained", [*MODES, "executors"])
def test_what_was_called_before_a_training_pass_reads_the_statistics_from_before_it(reader, trained):
    """Also where it can only run after the training pass."""
    mode = "static" if trained == "executors" else trained
    layer = initialized(SyncBatchNorm(in_channels=CHANNELS, momentum=0.5), 2, mode)
    other = set_mode(SyncBatchNorm(in_channels=CHANNELS, prefix=layer.prefix, params=layer.params), mode)
    inputs, late = on_devices(random_shards([SHAPES[0]] * 2)), Late(lambda device: 0.2)
    symbol = convert_symbol(mx.sym.BatchNorm(mx.sym.var("data"), fix_gamma=False, momentum=0.5, name="bn"), 2)
    executors = [executor_of(symbol, layer, device) for device in cpus(2)]
    run = [functools.partial(item.forward, is_train=True) for item in executors] if trained == "executors" else None

    def read(x):
        return other(x) if reader == "another net" else x[0, :, 0, 0] + layer.running_mean.data(device_of(x))

    for _ in range(3):
        mx.nd.waitall()
        expected = [read(x).asnumpy() for x in inputs]
        before = [read(late(x)) for x in inputs]
        with mx.autograd.record():
            outputs = [layer(x) for x in inputs] if run is None else [call(data=x) for call, x in zip(run, inputs)]
        if run is None:
            mx.autograd.backward(outputs)
        means = [layer.running_mean.data(device).asnumpy() for device in cpus(2)]
        np.testing.assert_array_equal([item.asnumpy() for item in before], expected)
        assert abs(means[0]).max() > 0.1 and (means[0] == means[1]).all()


class Loop(gluon.HybridBlock):
    """A layer before, within and after a loop over two images, whose body is a graph of its own."""

    def __init__(self, norm=nn.BatchNorm):
        super().__init__()
        self.norm = norm(in_channels=CHANNELS, momentum=0.5)

    def hybrid_forward(self, F, x):
        def body(part, total):
            total = self.norm(3 * F.square(part)) + total
            return total, total

        parts = F.reshape(self.norm(x), shape=(-4, 2, -1, -2))
        out, _ = F.contrib.foreach(body, parts, F.sum(parts, axis=0))
        return self.norm(F.reshape(out, shape=(-3, -2)))


@pytest.mark.parametrize("mode", ["imperative", "hybridize"])
def test_a_loop_whose_body_calls_the_layer(mode, backend):
    """MXNet has no backward pass of a BatchNorm in a loop, and a static graph computes NaN, of `nn.BatchNorm` too."""
    both = Pair(convert_sync_batchnorm(Loop()), Loop(Whole), 2, mode=mode)
    for seed in range(3):
        shards = random_shards([(2, CHANNELS, 3, 5)] * 2, "float64", seed)
        whole = mx.nd.array(np.stack(shards, 1).reshape(4, CHANNELS, 3, 5), dtype="float64")  # image by image
        for is_training in (True, False):
            with mx.autograd.record() if is_training else mx.autograd.predict_mode():
                outputs = [both.net(item) for item in both.inputs(shards)]
                expected = both.whole(whole).asnumpy()
            seen = np.stack([item.asnumpy() for item in outputs], 1).reshape(expected.shape)
            np.testing.assert_allclose(seen, expected, rtol=1e-10, atol=1e-12)
            for name in ("running_mean", "running_var"):
                wanted = getattr(both.whole.norm, name).data().asnumpy()
                for array in getattr(both.net.norm, name).list_data():
                    np.testing.assert_allclose(array.asnumpy(), wanted, rtol=1e-12)


class Masked(gluon.HybridBlock):
    """Convolutions in oneDNN's layouts, behind an operator whose output has no shape until it has run."""

    def __init__(self, norm=nn.BatchNorm):
        super().__init__(prefix="net_")
        with self.name_scope():
            convs = [functools.partial(nn.Conv2D, 32, 3, padding=1, in_channels=32) for _ in range(3)]
            norms = [functools.partial(norm, in_channels=32)] * 3
            self.body = sequential(*(block for both in zip(convs, norms) for block in both), prefix="")

    def hybrid_forward(self, F, x):
        return self.body(F.contrib.boolean_mask(x, F.ones_like(F.mean(x, axis=(1, 2, 3)))))


def test_a_static_graph_that_mxnet_runs_one_operator_at_a_time(mode):
    both = Pair(convert_sync_batchnorm(Masked()), Masked(Whole), 2, "float32", mode, units=3000)
    both.check_steps([(4, 32, 12, 12)] * 2, count=5)


class Scaled(gluon.HybridBlock):
    def __init__(self, norm=nn.BatchNorm):
        super().__init__(prefix="net_")
        with self.name_scope():
            self.norm, self.factor = norm(in_channels=CHANNELS), self.params.get("factor", shape=[1, CHANNELS, 1, 1])

    def hybrid_forward(self, F, x, factor):
        return F.broadcast_mul(self.norm(x), factor)


def test_a_parameter_whose_shape_is_a_list(mode):
    Pair(convert_sync_batchnorm(Scaled()), Scaled(Whole), 2, mode=mode).check_steps(SHAPES)


class Twice(gluon.Block):
    """A net that runs twice per step, as a head or a discriminator does. On cpu(1) the second input is ready first."""

    def __init__(self, norm=nn.BatchNorm):
        super().__init__()
        self.late = Late(lambda device: 0.02 * device.device_id)
        self.net = sequential(norm(in_channels=CHANNELS), norm(in_channels=CHANNELS))

    def forward(self, x):
        return mx.nd.concat(self.net(self.late(x)), self.net(x.cos()), dim=1)


def test_a_net_that_runs_twice_per_step_on_each_device(mode, backend):
    both = Pair(convert_sync_batchnorm(Twice()), Twice(Whole), 2, mode=mode)
    for seed in range(5):
        heads = random_shards([(n, 2 * CHANNELS, *rest) for n, _, *rest in SHAPES], "float64", seed + 10)
        both.check_step(random_shards(SHAPES, "float64", seed), heads)


def test_whoever_looks_at_the_graph_sees_the_plain_nodes(tmp_path, log):
    """Export, names of outputs, and converting back; forward hooks, which are called when the graph is made."""
    both, names = pair(PATTERNS["skip"][1], backend="native"), []
    net, x = both.net, mx.nd.array(random_shards(SHAPES)[0])
    net.norm.register_forward_hook(lambda block, inputs, output: names.append(getattr(output, "name", None)))
    both.check_steps(SHAPES)
    assert told(log) == ["1 × sum and ReLU"] and names == ["net_batchnorm0_fwd"]
    net.export(str(tmp_path / "net"))
    exported = mx.sym.load(str(tmp_path / "net-symbol.json"))
    outputs = ["net_batchnorm0_fwd_output", "net__plus0_output", "net_relu0_output"]
    assert [name for name in exported.get_internals().list_outputs() if "output" in name] == outputs
    prediction = net(x).asnumpy()
    assert type(convert_batchnorm(net).norm) is nn.BatchNorm
    np.testing.assert_array_equal(net(x).asnumpy(), prediction)


@pytest.mark.skipif(not hasattr(gluon.Block, "register_op_hook"), reason="MXNet has it since 1.7")
@graph_modes
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_operator_hook_sees_every_node(when, mode, log):
    both, seen = pair(PATTERNS["skip"][1], mode=mode, backend="native"), []
    if when == "after":
        both.check_steps(SHAPES)
        assert told(log) == ["1 × sum and ReLU"]
    both.net.register_op_hook(lambda name, *_: seen.append(name if isinstance(name, str) else mx.base.py_str(name)))
    both.check_steps(SHAPES)
    mx.nd.waitall()
    assert told(log) == [] and all(any(word in name for name in seen) for word in ("_plus", "relu"))


def train_module(symbol, count):
    """What steps of a Module on devices with uneven shares leave, one with a larger batch; and what it has bound."""
    module = mx.mod.Module(symbol, context=cpus(count), work_load_list=[1, 2, 1][:count])
    data, label = (mx.io.DataDesc(*told, "float64") for told in (("data", BATCH), ("softmax_label", BATCH[:1])))
    module.bind([data], [label], inputs_need_grad=True)
    mx.random.seed(0)
    module.init_params(mx.init.Xavier())
    module.init_optimizer(optimizer_params={"learning_rate": 0.1})
    rng = np.random.RandomState(0)
    for images in (BATCH[0], 9, BATCH[0]):
        arrays = rng.standard_normal((images, *BATCH[1:])) * 2 + 1, rng.randint(4, size=images)
        module.forward_backward(mx.io.DataBatch(*[[mx.nd.array(array, dtype="float64")] for array in arrays]))
        mx.nd.waitall()  # MXNet's own BatchNorm writes its statistics in the backward pass, untold to the engine
        module.update()
    found = {"output": module.get_outputs()[0], "dx": module.get_input_grads()[0]}
    for items in module.get_params():
        found.update(items)
    return {name: item.asnumpy() for name, item in found.items()}, module._exec_group.execs[0]._symbol


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("pattern", ["relu", "leaky by default", "skip", "skip first", "two norms", "own"])
def test_a_module_that_is_bound(pattern, fuse, log):
    """Its arguments keep their order, by which Module finds them; the symbol stays as it is."""
    options = {"fix_gamma": False, "eps": 1e-5, "momentum": 0.75}
    two_norms = "sum and ReLU", lambda F, y, x: F.relu(F.BatchNorm(x, name="other", **options) + y)
    kind, behind = {**PATTERNS, "own": PATTERNS["relu"], "two norms": two_norms}[pattern]
    x = mx.sym.var("data")
    convs = [mx.sym.Convolution(x, num_filter=CHANNELS, kernel=(1, 1), no_bias=True, name=f"conv{i}") for i in range(2)]
    plain = source = classifier(behind(mx.sym, mx.sym.BatchNorm(convs[0], name="bn", **options), convs[1]))
    if pattern == "own":  # of the operator itself
        source = classifier(mx.sym.contrib.BatchNormWithReLU(convs[0], name="bn", **options))
    sym = convert_symbol(source, 3, backend="native", fuse=fuse, dtype="float64")
    before = sym.tojson()
    (seen, bound), (expected, _) = train_module(sym, 3), train_module(plain, 1)
    # MXNet's own leaky ReLU computes in float32.
    check_net(seen, expected, **({"dtype": "float32", "units": 300} if "leaky" in pattern else {}))
    # With the norm as the first summand, the arguments would change places.
    is_fused = fuse and pattern != "skip"
    assert set(told(log)) == ({f"1 × {kind}"} if is_fused else set()) and sym.tojson() == before
    assert bound.list_outputs() == sym.list_outputs()
    assert bound.list_arguments() == plain.list_arguments()


@pytest.mark.skipif(not hasattr(gluon.HybridBlock, "optimize_for"), reason="MXNet has it since 1.8")
@pytest.mark.parametrize("how", ["optimize_for", "hybridize"])
@pytest.mark.parametrize("flags", [{}, MODES["static"]], ids=["", "static"])
@pytest.mark.parametrize("has_run", [False, True], ids=["new", "after a step"])
@pytest.mark.parametrize("pattern", ["relu", "leaky", "skip", "skip first"])
def test_a_net_that_was_taken_apart_exports_what_it_computes(pattern, has_run, flags, how, tmp_path, backend):
    """MXNet keeps the graph that its partitioner was handed; what is exported is the whole."""
    both = pair(PATTERNS[pattern][1], mode="imperative")
    net, x = both.net, mx.nd.array(random_shards(SHAPES)[0])
    if has_run:
        net.hybridize(**flags)
        both.check_steps(SHAPES, 1)
    getattr(net, how)(*[x] if how == "optimize_for" else [], backend="MKLDNN", **flags)
    both.check_steps(SHAPES, 1)
    net.export(str(tmp_path / "net"))
    files = str(tmp_path / "net-symbol.json"), ["data"], str(tmp_path / "net-0000.params")
    text = (tmp_path / "net-symbol.json").read_text(encoding="utf-8")
    assert "Custom" not in text and "__syncbn__" not in text
    for block in (net, gluon.SymbolBlock.imports(*files)):
        expected = both.whole(x.astype("float64")).asnumpy()
        np.testing.assert_allclose(block(x).asnumpy(), expected, rtol=1e-5, atol=1e-6)


def norm_and_relu(norm=nn.BatchNorm, behind=None, kind=nn.HybridSequential):
    blocks = functools.partial(norm, in_channels=CHANNELS), behind or functools.partial(nn.Activation, "relu")
    return sequential(*blocks, prefix="net_", kind=kind)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_norm_before_a_relu_there_and_back(mode, dtype, backend, recwarn):
    """However often it is converted, it computes the same. fuse=False stays until it is asked for again."""
    net = norm_and_relu()
    both = Pair(convert_sync_batchnorm(net), norm_and_relu(Whole), 2, dtype, mode)
    for options, fuses in (({}, True), ({"fuse": False}, False), ({}, False), ({"fuse": True}, True)):
        convert_sync_batchnorm(net, **options)
        assert options_of(net[0])["fuse"] == fuses and type(net[1]) is nn.Activation
        both.check_steps(SHAPES)
    x = mx.nd.array(random_shards(SHAPES, dtype)[0], dtype=dtype)
    for part in (net, net[0]):
        convert_sync_batchnorm(net)
        prediction = net(x).asnumpy()
        convert_batchnorm(part)
        assert [type(child) for child in net._children.values()] == [nn.BatchNorm, nn.Activation]
        np.testing.assert_allclose(net(x).asnumpy(), prediction, rtol=0 if dtype == "float32" else 1e-14, atol=1e-15)
    norm = reference_of(net[0], activation="relu", group_size=1)
    check_step(net, norm, *testing.shards_and_heads(SHAPES, dtype), layer=net[0])
    assert sorted(net.collect_params()) == sorted(norm_and_relu().collect_params())
    assert not [item for item in recwarn if "unregistered" in str(item.message)]
    with pytest.raises(TypeError, match="fuse must be True or False"):
        SyncBatchNorm(fuse=1)


def with_more(name, norm):
    """A pair that cannot be fused, and the outputs that a hook sees."""
    seen = []
    kind = type("Holder", (nn.HybridSequential,), {}) if name == "class" else nn.HybridSequential
    net = norm_and_relu(norm, nn.Activation("sigmoid") if name == "sigmoid" else None, kind)
    place = 0 if "norm" in name else 1
    if "shared" in name:
        net.add(nn.Conv2D(CHANNELS, 1, in_channels=CHANNELS, use_bias=False), net[place])
    if "hook" in name:
        net[place].register_forward_hook(lambda block, inputs, output: seen.append(output))
    return net, seen


@pytest.mark.parametrize("name", ["shared relu", "shared norm", "hook on norm", "hook on relu", "class", "sigmoid"])
def test_the_relu_is_left_alone_where_it_could_be_seen(name, backend):
    net, seen = with_more(name, nn.BatchNorm)
    convert_sync_batchnorm(net)
    assert "activation" not in repr(net[0]) and type(net[1]) is nn.Activation
    Pair(net, with_more(name, Whole)[0], 2).check_steps(SHAPES)
    assert [item.min().asscalar() < 0 for item in seen] == [name == "hook on norm"] * 4 * ("hook" in name)
