"""What follows a norm in a graph is computed in its own passes, with the numbers of the plain graph, and only there."""

import logging

import mxnet as mx
import numpy as np
import oracle
import pytest
from harness import MODES, cpus, random_shards, set_mode, step
from mxnet import autograd, gluon
from mxnet.gluon import nn

from gluon_syncbn import SyncBatchNorm, convert_batchnorm, convert_symbol, convert_sync_batchnorm, plain_symbol
from gluon_syncbn.graphs.fuse import LEAKY_RELU, RELU, SKIP, fuse

CHANNELS = 4
# Rounding: the sums of the plain graph are over the same numbers, in another order.
TOLERANCE = {"float32": 1e-5, "float64": 1e-12, "float16": 5e-3}
IN_FLOAT32 = 1e-6  # MXNet's leaky ReLU multiplies in float32, whatever the dtype


class Net(gluon.HybridBlock):
    """A norm, and ``behind(F, norm(x), x)``; what that returns is the output."""

    def __init__(self, behind, axis=1, **kwargs):
        super().__init__(prefix="net_", **kwargs)
        self._behind = behind
        with self.name_scope():
            self.norm = nn.BatchNorm(axis=axis, in_channels=CHANNELS)

    def hybrid_forward(self, F, x):
        return self._behind(F, self.norm(x), x)


PATTERNS = {
    "relu": (RELU, lambda F, y, x: F.relu(y)),
    "activation": (RELU, lambda F, y, x: F.Activation(y, act_type="relu")),
    "leaky": (LEAKY_RELU, lambda F, y, x: F.LeakyReLU(y, slope=0.1)),
    "steep": (LEAKY_RELU, lambda F, y, x: F.LeakyReLU(y, act_type="leaky", slope=1.5)),
    "skip": (SKIP, lambda F, y, x: F.relu(y + x)),
    "skip first": (SKIP, lambda F, y, x: F.Activation(F.square(x) + y, act_type="relu")),
}


def train(behind, devices, mode, dtype="float32", axis=1, fuse=True, **options):
    """What steps leave: outputs, gradients of inputs and parameters, running statistics; and a prediction."""
    net = convert_sync_batchnorm(Net(behind, axis), fuse=fuse, backend="native", **options)
    net.cast(dtype)
    net.initialize(ctx=cpus(devices))
    rng = np.random.RandomState(5)
    for parameter in (net.norm.gamma, net.norm.beta):
        parameter.set_data(mx.nd.array(rng.uniform(-1, 2, CHANNELS), dtype=parameter.dtype))
    set_mode(net, mode)
    shapes = [(1 + i % 2, 3, 5, CHANNELS) if axis == -1 else (1 + i % 2, CHANNELS, 3, 5) for i in range(devices)]
    shards, heads = random_shards(shapes, dtype, mean=0.5), random_shards(shapes, dtype, seed=1)
    left = []
    for _ in range(2):
        outputs, inputs = step(net, shards, heads, cpus(devices))
        left += [item.asnumpy() for item in outputs] + [item.grad.asnumpy() for item in inputs]
    for device in cpus(devices):
        left += [parameter.grad(device).asnumpy() for parameter in (net.norm.gamma, net.norm.beta)]
        left += [item.data(device).asnumpy() for item in (net.norm.running_mean, net.norm.running_var)]
    prediction = net(mx.nd.array(shards[0], dtype=dtype)).asnumpy()
    return left, prediction


def assert_alike(ones, others, tolerance):
    for one, other in zip(ones, others):
        assert one.shape == other.shape
        scale = max(np.abs(other.astype(np.float64)).max(), 1)
        assert np.abs(one.astype(np.float64) - other).max() / scale < tolerance


@pytest.mark.parametrize("devices", [1, 2, 3, 4])
@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("pattern", list(PATTERNS))
def test_the_numbers_are_those_of_the_plain_graph(pattern, mode, devices):
    kind, behind = PATTERNS[pattern]
    (fused, prediction), (plain, plain_prediction) = (train(behind, devices, mode, fuse=flag) for flag in (True, False))
    assert_alike(fused, plain, TOLERANCE["float32"])
    np.testing.assert_array_equal(prediction, plain_prediction)


@pytest.mark.parametrize("axis", [1, -1])
@pytest.mark.parametrize("dtype", ["float64", "float16"])
@pytest.mark.parametrize("pattern", list(PATTERNS))
def test_dtypes_and_layouts(pattern, dtype, axis):
    kind, behind = PATTERNS[pattern]
    (fused, prediction), (plain, plain_prediction) = (
        train(behind, 2, "static", dtype, axis, fuse=flag) for flag in (True, False)
    )
    if dtype == "float64" and kind == LEAKY_RELU:
        assert_alike([*fused, prediction], [*plain, plain_prediction], IN_FLOAT32)
    else:
        assert_alike(fused, plain, TOLERANCE[dtype])
        np.testing.assert_array_equal(prediction, plain_prediction)


def kinds_in(net, devices=2, shape=(2, CHANNELS, 3, 5), mode="static"):
    """What was fused in its graph, as the log tells."""
    told = []

    class Handler(logging.Handler):
        def emit(self, record):
            told.append(record.getMessage())

    logger, handler = logging.getLogger("gluon_syncbn"), Handler()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        net.initialize(ctx=cpus(devices))
        set_mode(net, mode)
        step(net, random_shards([shape] * devices), random_shards([shape] * devices), cpus(devices))
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return [text.split("(")[1].rstrip(").") for text in told if "in their own passes" in text]


@pytest.mark.parametrize("pattern", list(PATTERNS))
def test_the_log_counts_them(pattern):
    kind, behind = PATTERNS[pattern]
    assert kinds_in(convert_sync_batchnorm(Net(behind), backend="native")) == [f"1 × {kind}"]
    assert kinds_in(convert_sync_batchnorm(Net(behind), backend="native", fuse=False)) == []
    assert kinds_in(convert_sync_batchnorm(Net(behind), backend="portable")) == []


def twice_read(F, y, x):
    return F.relu(y) + y


def ends_between(F, y, x):
    return F.concat(F.relu(y), y, dim=1).slice_axis(axis=1, begin=0, end=CHANNELS)


def sum_read(F, y, x):
    both = y + x
    return F.relu(both) * both


def twice_the_norm(F, y, x):
    return F.relu(y + y)


def broadcast(F, y, x):
    return F.relu(F.broadcast_add(y, x.mean(axis=(2, 3), keepdims=True)))


ALMOST = {
    "a second reader": twice_read,
    "an output between": ends_between,
    "the sum is read": sum_read,
    "added to itself": twice_the_norm,
    "a sum that broadcasts": broadcast,
    "another activation": lambda F, y, x: F.Activation(y, act_type="sigmoid"),
    "elu": lambda F, y, x: F.LeakyReLU(y, act_type="elu", slope=0.1),
    "a slope of 0": lambda F, y, x: F.LeakyReLU(y, slope=0.0),
    "a negative slope": lambda F, y, x: F.LeakyReLU(y, slope=-0.2),
    "a sum and a leaky ReLU": lambda F, y, x: F.LeakyReLU(y + x, slope=0.1),
    "a difference": lambda F, y, x: F.relu(y - x),
}


@pytest.mark.parametrize("name", list(ALMOST))
def test_what_is_almost_a_pattern_is_left_alone(name):
    behind = ALMOST[name]
    assert kinds_in(convert_sync_batchnorm(Net(behind), backend="native")) == []
    (one, _), (other, _) = (train(behind, 2, "static", fuse=flag) for flag in (True, False))
    for a, b in zip(one, other):
        np.testing.assert_array_equal(a, b)


class Random(gluon.HybridBlock):
    """Norms, sums and activations at random, some of them shared or read twice."""

    def __init__(self, seed):
        super().__init__(prefix=f"random{seed}_")
        self._seed = seed
        with self.name_scope():
            self.norms = nn.HybridSequential()
            for _ in range(3):
                self.norms.add(nn.BatchNorm(in_channels=CHANNELS))

    def hybrid_forward(self, F, x):
        rng = np.random.RandomState(self._seed)
        values = [x]
        for _ in range(10):
            # Mostly the newest, so that chains form.
            one, other = (values[-1 - min(rng.geometric(0.6) - 1, len(values) - 1)] for _ in range(2))
            what = rng.choice(["norm", "norm", "relu", "leaky", "sum", "block", "tail"])
            norm = self.norms[int(rng.randint(3))]
            if what == "norm":
                made = norm(one)
            elif what == "relu":
                made = F.relu(one)
            elif what == "leaky":
                made = F.LeakyReLU(one, slope=0.3)
            elif what == "sum":
                made = one + other
            elif what == "block":
                made = F.relu(norm(one) + other)
            else:
                made = F.Activation(other + norm(one), act_type="relu")
            values.append(made)
        return values[-1] + 0.1 * F.tanh(values[-2])


# Seeds of graphs in which something was found: two calls of a layer that MXNet sorts by what is fused.
FOUND = [110712737]


@pytest.mark.parametrize("mode", ["hybridize", "static"])
@pytest.mark.parametrize("number", [*range(12), *FOUND])
def test_random_graphs(number, mode, seed):
    drawn = number if number in FOUND else (seed + number) % 2**32
    results = []
    for flag in (True, False):
        net = convert_sync_batchnorm(Random(drawn), fuse=flag, backend="native")
        net.cast("float64")
        net.initialize(ctx=cpus(2))
        set_mode(net, mode)
        shapes = [(2, CHANNELS, 3, 3), (1, CHANNELS, 3, 3)]
        shards, heads = random_shards(shapes, "float64"), random_shards(shapes, "float64", seed=1)
        outputs, inputs = step(net, shards, heads, cpus(2))
        left = [item.asnumpy() for item in outputs] + [item.grad.asnumpy() for item in inputs]
        for parameter in net.collect_params().values():
            values = parameter.list_grad() if parameter.grad_req != "null" else parameter.list_data()
            left += [item.asnumpy() for item in values]
        results.append(left)
    assert_alike(*results, IN_FLOAT32)


def test_random_graphs_have_every_pattern():
    found = set()
    for seed in range(12):
        net = convert_sync_batchnorm(Random(seed), backend="native")
        found.update(part.split(" × ")[1] for text in kinds_in(net) for part in text.split(", "))
    assert found == {RELU, LEAKY_RELU, SKIP}


def test_a_skip_without_a_gradient():
    """A label, or an input that nobody asks a gradient of."""

    def behind(F, y, x):
        return F.relu(y + F.BlockGrad(x))

    (one, _), (other, _) = (train(behind, 2, "static", fuse=flag) for flag in (True, False))
    assert_alike(one, other, TOLERANCE["float32"])


@pytest.mark.parametrize("request_", ["add", "null"])
@pytest.mark.parametrize("pattern", ["skip", "leaky"])
def test_gradients_that_are_added_or_not_asked_for(pattern, request_):
    _, behind = PATTERNS[pattern]
    results = []
    for flag in (True, False):
        net = convert_sync_batchnorm(Net(behind), fuse=flag, backend="native")
        net.initialize(ctx=cpus(2))
        set_mode(net, "static")
        inputs = [mx.nd.array(x, ctx=device) for x, device in zip(random_shards([(2, CHANNELS, 3, 5)] * 2), cpus(2))]
        for item in inputs:
            if request_ != "null":
                item.attach_grad(grad_req=request_)
        for _ in range(2):
            with autograd.record():
                outputs = [net(item) for item in inputs]
            autograd.backward(outputs)
        left = [item.asnumpy() for item in outputs] + [net.norm.gamma.grad(device).asnumpy() for device in cpus(2)]
        results.append(left + [item.grad.asnumpy() for item in inputs if request_ != "null"])
    assert_alike(*results, TOLERANCE["float32"])


def test_whoever_looks_at_the_graph_sees_the_plain_nodes(tmp_path):
    """Export, names of outputs, and converting back."""
    net = convert_sync_batchnorm(Net(PATTERNS["skip"][1]), backend="native")
    assert kinds_in(net) == [f"1 × {SKIP}"]
    net.export(str(tmp_path / "net"))
    exported = mx.sym.load(str(tmp_path / "net-symbol.json"))
    assert [name for name in exported.get_internals().list_outputs() if "output" in name] == [
        "net_batchnorm0_fwd_output",
        "net__plus0_output",
        "net_relu0_output",
    ]
    convert_batchnorm(net)
    assert type(net.norm) is nn.BatchNorm
    step(net, random_shards([(2, CHANNELS, 3, 5)] * 2), random_shards([(2, CHANNELS, 3, 5)] * 2), cpus(2))


@pytest.mark.skipif(not hasattr(gluon.Block, "register_op_hook"), reason="MXNet has it since 1.7")
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_operator_hook_sees_every_node(when):
    net = convert_sync_batchnorm(Net(PATTERNS["skip"][1]), backend="native")
    seen = []

    def hook(name, *_):
        seen.append(name if isinstance(name, str) else mx.base.py_str(name))

    if when == "before":
        net.register_op_hook(hook)
    shapes = [(2, CHANNELS, 3, 5)] * 2
    net.initialize(ctx=cpus(2))
    net.hybridize()
    step(net, random_shards(shapes), random_shards(shapes), cpus(2))
    if when == "after":
        net.register_op_hook(hook)
        step(net, random_shards(shapes), random_shards(shapes), cpus(2))
    mx.nd.waitall()
    assert any("_plus" in name for name in seen)
    assert any("relu" in name for name in seen)


def test_forward_hooks_are_called_with_what_they_expect():
    net = convert_sync_batchnorm(Net(PATTERNS["relu"][1]), backend="native")
    names = []
    net.norm.register_forward_hook(lambda block, inputs, output: names.append(getattr(output, "name", None)))
    assert kinds_in(net) == [f"1 × {RELU}"]
    assert names == ["net_batchnorm0_fwd"]


def test_a_graph_without_patterns_is_the_same_object():
    plain = mx.sym.relu(mx.sym.BatchNorm(mx.sym.var("x")))
    assert fuse(plain)[0] is plain
    alone = convert_symbol(mx.sym.BatchNorm(mx.sym.var("x"), name="bn"), 2, backend="native")
    assert fuse(alone)[0] is alone


def residual(norm_first):
    """Two norms behind convolutions of one input, one of them with a new input: the order of arguments counts."""
    x = mx.sym.var("data")
    one, other = (
        mx.sym.BatchNorm(mx.sym.Convolution(x, num_filter=3, kernel=(1, 1), name=f"conv{i}"), name=f"bn{i}")
        for i in range(2)
    )
    if norm_first:
        other = mx.sym.Convolution(x, num_filter=3, kernel=(1, 1), name="conv2")
        return mx.sym.relu(one + other, name="out")
    return mx.sym.relu(one + other, name="out")


@pytest.mark.parametrize("fuse_it", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_a_module_that_is_bound(norm_first, fuse_it):
    """Its arguments keep their order, by which Module finds them; the symbol stays as it is."""
    sym = convert_symbol(residual(norm_first), 2, backend="native", fuse=fuse_it)
    before = sym.tojson()
    results = []
    for candidate in (sym, convert_symbol(residual(norm_first), 2, backend="portable")):
        module = mx.mod.Module(candidate, label_names=None, context=cpus(2))
        module.bind([("data", (4, 2, 5, 5))], for_training=True, inputs_need_grad=True)
        rng = np.random.RandomState(0)
        shapes = candidate.infer_shape(data=(4, 2, 5, 5))
        arguments = dict(zip(candidate.list_arguments(), shapes[0]))
        values = {name: mx.nd.array(rng.randn(*shape)) for name, shape in arguments.items() if name != "data"}
        states = {name: mx.nd.ones(shape) for name, shape in zip(candidate.list_auxiliary_states(), shapes[2])}
        module.init_params(arg_params=values, aux_params=states)
        x = mx.nd.array(rng.randn(4, 2, 5, 5))
        module.forward(mx.io.DataBatch([x]), is_train=True)
        module.backward([mx.nd.ones((4, 3, 5, 5))])
        left = [module.get_outputs()[0].asnumpy(), module.get_input_grads()[0].asnumpy()]
        left += [
            sum(grad.asnumpy() for grad in grads) for grads in module._exec_group.grad_arrays if grads[0] is not None
        ]
        left += [array.asnumpy() for _, array in sorted(module.get_params()[1].items())]
        results.append(left)
    assert_alike(*results, 1e-4)
    assert sym.tojson() == before


def test_a_layer_that_is_called_twice():
    """The second summand comes from a later call of the same layer."""

    def behind(norm):
        class Shared(gluon.HybridBlock):
            def __init__(self):
                super().__init__(prefix="shared_")
                with self.name_scope():
                    self.norm = nn.BatchNorm(in_channels=CHANNELS)

            def hybrid_forward(self, F, x):
                first = self.norm(x)
                second = self.norm(F.square(x))
                return F.relu(first + F.relu(second))

        return Shared()

    results = []
    for flag in (True, False):
        net = convert_sync_batchnorm(behind(None), fuse=flag, backend="native")
        net.initialize(ctx=cpus(2))
        set_mode(net, "static")
        shapes = [(2, CHANNELS, 3, 5)] * 2
        outputs, inputs = step(net, random_shards(shapes), random_shards(shapes, seed=1), cpus(2))
        results.append([item.asnumpy() for item in outputs] + [item.grad.asnumpy() for item in inputs])
    assert_alike(*results, TOLERANCE["float32"])


def test_fuse_is_an_option_of_the_layer_too():
    net = nn.HybridSequential()
    net.add(SyncBatchNorm(in_channels=CHANNELS, fuse=False, backend="native"), nn.LeakyReLU(0.1))
    assert kinds_in(net) == []
    assert "fuse=False" in repr(net[0])
    with pytest.raises(TypeError, match="fuse must be True or False"):
        SyncBatchNorm(fuse=1)


def test_a_symbol_that_was_saved_before_activations_had_names():
    """Its ReLU is not lost."""
    sym = convert_symbol(mx.sym.contrib.BatchNormWithReLU(mx.sym.var("x"), name="bn"), 2, backend="native")
    text = sym.tojson()
    assert '"activation": "relu"' in text
    old = mx.sym.load_json(text.replace('"activation": "relu"', '"relu": "1"'))
    module = mx.mod.Module(old, data_names=["x"], label_names=None, context=cpus(2))
    module.bind([("x", (4, 3, 5, 5))], for_training=True)
    module.init_params()
    module.forward(mx.io.DataBatch([mx.nd.array(np.random.RandomState(0).randn(4, 3, 5, 5))]), is_train=True)
    assert module.get_outputs()[0].asnumpy().min() == 0


class Shared(gluon.HybridBlock):
    """One norm, or two that share their Parameters, called twice: relu(norm(x) + tanh(norm(cos(x)))."""

    def __init__(self, sync, twins, **options):
        super().__init__(prefix="net_")
        with self.name_scope():
            self.norm = sync(in_channels=CHANNELS, **options)
            self.twin = sync(in_channels=CHANNELS, params=self.norm.params, **options) if twins else self.norm

    def hybrid_forward(self, F, x):
        one, other = self.norm(x), F.tanh(self.twin(F.cos(x)))
        return F.relu(one + other)


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("twins", [False, True], ids=["one layer", "two that share Parameters"])
def test_two_calls_of_shared_statistics_keep_their_order(mode, twins, backend):
    """The running statistics are averaged call by call, on every device alike."""
    net = Shared(SyncBatchNorm, twins, backend=backend, momentum=0.5)
    net.cast("float64")
    net.initialize(ctx=cpus(2))
    set_mode(net, mode)
    shards = random_shards([(2, CHANNELS, 3, 5), (1, CHANNELS, 3, 5)], "float64")
    for _ in range(3):
        step(net, shards, shards, cpus(2))
    seen = [
        oracle.batch_norm(part, np.ones(CHANNELS), np.zeros(CHANNELS)) for part in (shards, list(map(np.cos, shards)))
    ]
    mean, var = np.zeros(CHANNELS), np.ones(CHANNELS)
    for _ in range(3):
        for call in seen:
            mean, var = (mean + call.mean) / 2, (var + call.var) / 2
    for device in cpus(2):
        np.testing.assert_allclose(net.norm.running_mean.data(device).asnumpy(), mean, rtol=1e-9)
        np.testing.assert_allclose(net.norm.running_var.data(device).asnumpy(), var, rtol=1e-9)


class Branches(gluon.HybridBlock):
    """Layers on parallel branches, which share their Parameters; those of a SymbolBlock too."""

    def __init__(self, count, with_symbol):
        super().__init__(prefix="net_")
        with self.name_scope():
            self.first = SyncBatchNorm(in_channels=CHANNELS, momentum=0.5)
            self.others = nn.HybridSequential()
            for _ in range(count):
                self.others.add(SyncBatchNorm(in_channels=CHANNELS, momentum=0.5, params=self.first.params))
        if with_symbol:
            data = mx.sym.var("data")
            out = self.first(data)
            self.block = convert_sync_batchnorm(gluon.SymbolBlock(out, data, params=self.first.params))
            self.others.add(self.block)

    def hybrid_forward(self, F, x):
        total = self.first(x)
        for number, layer in enumerate(self.others, 2):
            total = total + layer(x * number)
        return total


@pytest.mark.parametrize("mode", ["hybridize", "static"])
@pytest.mark.parametrize("with_symbol", [False, True], ids=["layers", "and a SymbolBlock"])
def test_shared_statistics_on_parallel_branches(backend, with_symbol, mode):
    """Each branch adds its own; none is lost, whichever is faster."""
    net = Branches(5, with_symbol)
    net.initialize(ctx=cpus(2))
    set_mode(net, mode)
    shards = random_shards([(2, CHANNELS, 9, 9), (1, CHANNELS, 9, 9)])
    expected = np.zeros(CHANNELS)
    batch = oracle.batch_norm(shards, np.ones(CHANNELS), np.zeros(CHANNELS)).mean
    for _ in range(20):
        step(net, shards, shards, cpus(2))
        for number in range(1, len(net.others) + 2):
            expected = (expected + number * batch) / 2
    for device in cpus(2):
        np.testing.assert_allclose(net.first.running_mean.data(device).asnumpy(), expected, rtol=1e-4)


class Loop(gluon.HybridBlock):
    """A layer before, within and after a loop, whose body is a graph of its own."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.norm = SyncBatchNorm(in_channels=CHANNELS, momentum=0.5)

    def hybrid_forward(self, F, x):
        parts = F.reshape(self.norm(x), shape=(-4, 2, -1, -2))
        out, _ = F.contrib.foreach(lambda part, one: (F.broadcast_add(self.norm(3 * part), one), one), parts, F.sum(x))
        return self.norm(F.reshape(out, shape=(-3, -2)))


def test_a_loop_whose_body_calls_the_layer(backend):
    """MXNet has no backward pass of a BatchNorm in a loop, and a static graph computes NaN, of `nn.BatchNorm` too."""
    results = []
    for mode in ("imperative", "hybridize"):
        net = Loop()
        net.initialize(ctx=cpus(2))
        set_mode(net, mode)
        inputs = [mx.nd.array(x, ctx=device) for x, device in zip(random_shards([(2, CHANNELS, 3, 5)] * 2), cpus(2))]
        with autograd.record():
            outputs = [net(item) for item in inputs]
        left = [item.asnumpy() for item in outputs]
        left += [net.norm.running_mean.data(device).asnumpy() for device in cpus(2)]
        results.append([*left, net(inputs[0]).asnumpy()])
    assert_alike(*results, 1e-5)


@pytest.mark.skipif(not hasattr(gluon.HybridBlock, "optimize_for"), reason="MXNet has it since 1.8")
@pytest.mark.parametrize("how", ["optimize_for", "hybridize"])
@pytest.mark.parametrize("flags", [{}, MODES["static"]], ids=["", "static"])
@pytest.mark.parametrize("has_run", [False, True], ids=["new", "after a step"])
@pytest.mark.parametrize("pattern", list(PATTERNS))
def test_a_net_that_was_taken_apart_exports_what_it_computes(pattern, has_run, flags, how, tmp_path, backend):
    """MXNet keeps, and exports, the graph that its partitioner was handed."""
    net = convert_sync_batchnorm(Net(PATTERNS[pattern][1]))
    net.initialize(ctx=cpus(2))
    shards = random_shards([(2, CHANNELS, 3, 5)] * 2)
    x = mx.nd.array(shards[0])
    if has_run:
        net.hybridize(**flags)
        step(net, shards, shards, cpus(2))
    if how == "optimize_for":
        net.optimize_for(x, backend="MKLDNN", **flags)
    else:
        net.hybridize(backend="MKLDNN", **flags)
    step(net, shards, shards, cpus(2))
    expected = net(x).asnumpy()
    net.export(str(tmp_path / "net"))
    files = str(tmp_path / "net-symbol.json"), ["data"], str(tmp_path / "net-0000.params")
    text = (tmp_path / "net-symbol.json").read_text(encoding="utf-8")
    assert "Custom" not in text and "__syncbn__" not in text
    np.testing.assert_allclose(gluon.SymbolBlock.imports(*files)(x).asnumpy(), expected, rtol=1e-5, atol=1e-6)
    want = PATTERNS[pattern][1](
        mx.nd, (x - _column(net.norm.running_mean)) / mx.nd.sqrt(_column(net.norm.running_var) + 1e-5), x
    )
    np.testing.assert_allclose(expected, want.asnumpy(), rtol=1e-4, atol=1e-5)


def _column(parameter):
    return parameter.data(mx.cpu(0)).reshape((1, CHANNELS, 1, 1))


def test_a_fused_symbol_is_not_taken_for_a_plain_one():
    for pattern in ("relu", "leaky", "skip"):
        x = mx.sym.var("x")
        sym = PATTERNS[pattern][1](mx.sym, mx.sym.BatchNorm(x, name="bn"), x)
        made, kinds = fuse(convert_symbol(sym, 2, backend="native"))
        assert kinds
        with pytest.raises(ValueError, match="computes a SyncBatchNorm and what follows it"):
            plain_symbol(made)
