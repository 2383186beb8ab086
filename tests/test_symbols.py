"""Symbols and symbol blocks: several contexts train as one would with the concatenated batch.

Single nodes are compared with the reference; whole nets, in float64, with MXNet's own BatchNorm on one device.
"""

import json
import os
import warnings

import mxnet as mx
import numpy as np
import pytest
import testing
from executors import bind, check_executors, check_net, check_vectors, norm_of, run, train_block, vectors_of
from gluoncv import model_zoo
from gluoncv.nn.feature import FeatureExpander
from mxnet.gluon import SymbolBlock, nn
from reference import Sized, check, check_all, total
from testing import (
    MODES,
    check_steps,
    cpus,
    layers_of,
    options_of,
    random_shards,
    run_python,
    set_mode,
    shards_and_heads,
)

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm, convert_batchnorm, convert_symbol, convert_sync_batchnorm, plain_symbol

pytestmark = pytest.mark.usefixtures("backend")
DATA = mx.sym.var("data")
SYNCHRONIZED = gluon_syncbn.symbol.SyncBatchNorm
SHAPES = [(3, 5, 4, 2), (1, 5, 4, 2), (2, 5, 4, 2), (1, 5, 4, 2)]


# One node

NODES = {  # options of the node, and of the reference
    "defaults": ({}, {"scale": False}),
    "all in float64": (
        {"fix_gamma": False, "eps": 1e-2, "momentum": 0.5, "activation": "relu", "dtype": "float64", "fuse": False},
        {"epsilon": 1e-2, "momentum": 0.5, "activation": "relu"},
    ),
    "numbers of NumPy's": (
        {"axis": np.int64(3), "group_size": np.int32(2), "dtype": np.dtype("float32"), "fix_gamma": np.bool_(False)},
        {"axis": 3, "group_size": 2},
    ),
    "pairs, from behind": ({"fix_gamma": False, "axis": -3, "group_size": 2}, {"axis": -3, "group_size": 2}),
    "each alone": ({"fix_gamma": False, "group_size": 1, "process_group": "none"}, {"group_size": 1}),
    "frozen": ({"fix_gamma": False, "use_global_stats": np.bool_(True)}, {"frozen": True}),
    "renorm": ({"fix_gamma": False, "renorm": (3, 2)}, {"renorm": (3, 2)}),
    "in place": ({"fix_gamma": False, "in_place": True}, {"in_place": "float32"}),
}
WAYS = ["made", "converted again", "loaded", "taken apart"]


@pytest.mark.parametrize("way", [*WAYS, *(f"{mode} block" for mode in MODES)])
@pytest.mark.parametrize("node", list(NODES))
def test_a_node_trains_as_it_says_whatever_way_it_comes(node, way, tmp_path, backend):
    """What is saved says every option, a second conversion keeps what it is not given, and so does a block."""
    options, own = NODES[node]
    if node in ("renorm", "in place") and backend == "portable":
        return  # test_back_ends.py
    dtype = str(np.dtype(options.get("dtype", "float32")))
    number = 2 if way in ("converted again", "taken apart") else 4
    attr = {"__lr_mult__": "0.5"}
    symbol = SYNCHRONIZED(DATA, num_devices=number, timeout=60, name="bn", attr=attr, **options)
    is_plain = node in ("each alone", "frozen")
    norm = norm_of(5, "portable" if is_plain or dtype == "float64" else backend, **own)
    shapes = SHAPES if norm.axis != 3 else [(n, 4, 2, 5) for n, *_ in SHAPES]
    file = str(tmp_path / "net-symbol.json")
    symbol.save(file)
    symbol = {
        "converted again": lambda: convert_symbol(symbol, 4, timeout=50),
        "loaded": lambda: mx.sym.load(file),
    }.get(way, lambda: symbol)()
    plain = mx.sym.BatchNorm(DATA, name="bn", attr=attr).attr_dict()
    assert all(plain[name]["__lr_mult__"] == symbol.attr_dict()[name]["__lr_mult__"] for name in plain)
    if "block" in way:
        block = set_mode(SymbolBlock(symbol, DATA), way.split()[0])
        if norm.frozen:
            assert type(block) is SymbolBlock  # nothing of ours
            return
        values = [norm.gamma, norm.beta, *(item.value for item in norm.running())]
        for name, value in zip(vectors_of(block.collect_params(), "bn").values(), values):
            parameter = block.collect_params()[name]
            parameter.shape = (5,)
            parameter.cast(dtype)
            parameter.initialize(ctx=cpus(4))
            parameter.set_data(mx.nd.array(value, dtype=dtype))
        (layer,) = layers_of(block)
        kept = {"timeout": 60, "num_devices": 4, "fuse": options.get("fuse", True)}
        assert kept.items() <= options_of(layer).items()
        check_steps(block, norm, lambda seed: shards_and_heads(shapes, dtype, seed), layer=layer)
        return
    if way == "taken apart":
        symbol = plain_symbol(symbol)
        assert "syncbn" not in symbol.tojson() and plain_symbol(symbol).tojson() == symbol.tojson()
        norm.group_size, norm.renorm, norm.in_place, norm.mean_is_rounded = 1, None, None, True
    executors = bind(symbol, shards_and_heads(shapes, dtype)[0], {"bn": norm})
    for seed in range(3):
        check_executors(executors, norm, *shards_and_heads(shapes, dtype, seed), is_train=seed < 2)


@pytest.mark.parametrize("operator", ["BatchNorm", "contrib.SyncBatchNorm", "contrib.BatchNormWithReLU"])
def test_every_operator_is_converted(operator, backend):
    """With its names, attributes and options; frozen ones stay."""
    make, key = mx.sym, {"key": "bn"} if "Sync" in operator else {}
    for name in operator.split("."):
        make = getattr(make, name, None)
    if make is None:
        pytest.skip("this MXNet has no such operator")
    plain = make(DATA, name="bn", fix_gamma=False, eps=1e-2, momentum=0.6, attr={"__lr_mult__": "0.5"}, **key)
    symbol = convert_symbol(plain, 2, timeout=60)
    assert symbol.attr_dict()["bn"]["__lr_mult__"] == "0.5"
    for listed in ("list_arguments", "list_auxiliary_states", "list_outputs"):
        assert getattr(symbol, listed)() == getattr(plain, listed)()
    norm = norm_of(5, backend, epsilon=1e-2, momentum=0.6, activation="relu" if "ReLU" in operator else None)
    executors = bind(symbol, shards_and_heads(SHAPES[:2])[0], {"bn": norm})
    for seed in range(2):
        check_executors(executors, norm, *shards_and_heads(SHAPES[:2], seed=seed))
    if operator == "BatchNorm":
        frozen = mx.sym.BatchNorm(DATA, name="bn", use_global_stats=True)
        assert convert_symbol(frozen, 2).tojson() == frozen.tojson()


def test_nodes_that_share_their_statistics(backend):
    """Pairs of four devices; the running mean that two nodes share sees both, in the order of the graph."""
    variables = [mx.sym.var(f"shared_{name}") for name in ("gamma", "beta", "moving_mean", "moving_var")]
    both = [mx.sym.BatchNorm(factor * DATA, *variables, fix_gamma=False) for factor in (1, 3)]
    norm, (shards, heads) = norm_of(5, backend, group_size=2), shards_and_heads(SHAPES)
    symbol = convert_symbol(mx.sym.Group(both), num_devices=4, group_size=2, timeout=60)
    executors = bind(symbol, shards, {"shared": norm})
    how = {"units": 64, "roundings": 3} if backend == "portable" else {"units": 16}
    for _ in range(2):
        seen = run(executors, shards)
        for executor, device, head in zip(executors, cpus(4), heads):
            executor.backward(testing.on_devices([head, -2 * head], [device] * 2))
        first, second = norm.step(shards, heads), norm.step([3 * x for x in shards], [-2 * head for head in heads])
        for outputs, wanted in zip(zip(*seen), (first.outputs, second.outputs)):
            check_all("output", outputs, wanted, **how)
        dx = [
            total([one, Sized(3 * other.value, 3 * other.size)])
            for one, other in zip(first.input_gradients, second.input_gradients)
        ]
        check_all("input gradient", [item.grad_dict["data"].asnumpy() for item in executors], dx, **how)
        names = ("gamma_gradient", "beta_gradient")
        made = {name: total([getattr(first, name), getattr(second, name)]) for name in names}
        check_vectors(executors, norm, first._replace(**made), "shared", units=how["units"])


# Modules

BATCH = (6, 3, 6, 6)


def relu_norm(*args, **options):
    return mx.sym.relu(mx.sym.BatchNorm(*args, **options))


def expander(norm=mx.sym.BatchNorm, **options):
    x = mx.sym.Convolution(DATA, num_filter=3, kernel=(3, 3), no_bias=True, name="conv")
    x = norm(x, fix_gamma=False, momentum=0.75, name="bn0", **options)
    x = mx.sym.Activation(x, act_type="tanh", name="tanh")
    return norm(x, fix_gamma=True, eps=1e-2, momentum=0.5, name="bn1", **options)


def classifier(features):
    """All that Module needs."""
    return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(features, num_hidden=4, name="fc"), name="softmax")


def network(norm=mx.sym.BatchNorm, **options):
    return classifier(expander(norm, **options))


def test_fit_and_checkpoints(tmp_path):
    """`Module.fit`, a checkpoint, and training on with another number of devices than it was saved with."""
    rng, prefix = np.random.RandomState(0), str(tmp_path / "net")
    labels = rng.randint(4, size=24)
    data = mx.nd.array(rng.standard_normal((24, *BATCH[1:])) + labels[:, None, None, None], dtype="float64")
    iterator = mx.io.NDArrayIter(data, mx.nd.array(labels, dtype="float64"), BATCH[0])
    sgd = {"initializer": mx.init.Xavier(), "optimizer_params": {"learning_rate": 0.1}}
    # MXNet's own BatchNorm writes its statistics in the backward pass, untold to the engine.
    sgd["batch_end_callback"] = lambda _: mx.nd.waitall()
    found, ours = [], network(SYNCHRONIZED, num_devices=2, timeout=60, dtype="float64")
    for symbol, count in ((ours, 2), (network(), 1), (network(), 2)):
        mx.random.seed(0)
        module = mx.mod.Module(symbol, context=cpus(count))
        iterator.reset()
        module.fit(iterator, num_epoch=3, **sgd)
        if symbol is ours:
            module.save_checkpoint(prefix, 3)
        found.append({"output": module.predict(iterator).asnumpy()})
    check_net(found[0], found[1])
    with pytest.raises(AssertionError, match="output"):  # so it can fail
        check_net(found[2], found[1])
    symbol, *values = mx.model.load_checkpoint(prefix, 3)
    trained = []
    for count, loaded in enumerate((plain_symbol(symbol), symbol, convert_symbol(symbol, 3, timeout=60)), start=1):
        module = mx.mod.Module(loaded, context=cpus(count))
        module.bind(iterator.provide_data, iterator.provide_label)
        module.set_params(*values)
        check_net({"output": module.predict(iterator).asnumpy()}, found[0])
        iterator.reset()
        module.fit(iterator, num_epoch=1, **sgd)
        trained.append({name: item.asnumpy() for items in module.get_params() for name, item in items.items()})
        check_net(trained[-1], trained[0])


def mixed():
    """The second node stays plain, each device for itself."""
    x = SYNCHRONIZED(mx.sym.tanh(DATA), num_devices=2, timeout=60, name="bn0")
    return classifier(mx.sym.BatchNorm(x, name="bn1"))


def taken_apart():
    symbol = convert_symbol(network(), 2, timeout=60)
    return symbol.optimize_for("MKLDNN") if hasattr(symbol, "optimize_for") else symbol


@pytest.mark.parametrize("make", [lambda: convert_symbol(network(), 2, timeout=60), mixed, taken_apart])
def test_statistics_that_are_read_right_after_an_update(make, backend):
    """`Module.get_params`, and so a checkpoint, has what this step has written; then a prediction writes nothing."""
    module = mx.mod.Module(make(), context=cpus(2))
    module.bind([("data", BATCH)], [("softmax_label", BATCH[:1])])
    module.init_params(mx.init.Xavier())
    module.init_optimizer()
    for seed in range(20):
        batch = mx.io.DataBatch([mx.nd.array(random_shards([BATCH], seed=seed)[0])], [mx.nd.zeros(BATCH[0])])
        module.forward_backward(batch)
        if seed % 2:
            module.forward(batch, is_train=False)
        module.update()
        seen = {name: item.asnumpy() for name, item in module.get_params()[1].items()}
        mx.nd.waitall()
        for name, value in seen.items():
            arrays = [execution.aux_dict[name].asnumpy() for execution in module._exec_group.execs]
            np.testing.assert_allclose(value, np.mean(arrays, axis=0), rtol=1e-6, atol=1e-7)
            assert seed or value.min() not in (0, 1)


@pytest.mark.skipif(not hasattr(mx.sym.Symbol, "optimize_for"), reason="MXNet has it since 1.6")
def test_a_symbol_that_was_taken_apart_is_not_changed_any_more(backend):
    for change in (plain_symbol, lambda symbol: convert_symbol(symbol, 2), lambda symbol: SymbolBlock(symbol, DATA)):
        with pytest.raises(ValueError, match="Take the symbol from before, and call optimize_for last"):
            change(taken_apart())


@pytest.mark.parametrize("partitioner", ["MKLDNN", "MKLDNN_QUANTIZE"])
def test_a_partition_in_which_nothing_can_synchronize(partitioner):
    """As a quantization makes it."""
    symbols = [convert_symbol(network(), 2), convert_symbol(network().get_backend_symbol(partitioner), 2)]
    for symbol in (symbols[0].get_backend_symbol(partitioner), symbols[1]):
        with pytest.raises(ValueError, match="has made the part 'sg_mkldnn_.*plain_symbol"):
            symbol.simple_bind(mx.cpu(), data=BATCH)
    plain = plain_symbol(symbols[0]).get_backend_symbol(partitioner)
    executors = [symbol.simple_bind(mx.cpu(), data=BATCH, grad_req="null") for symbol in (plain, network())]
    for executor in executors:
        values = np.random.RandomState(0)
        for _, array in sorted([*executor.arg_dict.items(), *executor.aux_dict.items()]):
            array[:] = values.uniform(1, 2, array.shape)
    outputs = [executor.forward(is_train=False)[0].asnumpy() for executor in executors]
    np.testing.assert_allclose(*outputs, rtol=1e-4)


def test_a_module_that_splits_a_net_over_devices(backend):
    def halves(norm, **options):
        with mx.AttrScope(ctx_group="first"):
            x = mx.sym.Convolution(DATA, num_filter=3, kernel=(3, 3), no_bias=True, name="conv")
        with mx.AttrScope(ctx_group="second"):
            x = mx.sym.relu(norm(x, fix_gamma=False, momentum=0.75, name="bn0", **options))
        with mx.AttrScope(ctx_group="first"):
            return classifier(norm(x, fix_gamma=False, momentum=0.75, name="bn1", **options))

    places = [{"first": mx.cpu(i), "second": mx.cpu(2 + i)} for i in range(2)]
    found = []
    for symbol, count in ((halves(SYNCHRONIZED, num_devices=2, dtype="float64"), 2), (halves(mx.sym.BatchNorm), 1)):
        mx.random.seed(0)
        module = mx.mod.Module(symbol, context=cpus(count), group2ctxs=places[:count])
        data = mx.nd.array(random_shards([BATCH])[0], dtype="float64")
        described = [mx.io.DataDesc("data", BATCH, "float64")], [mx.io.DataDesc("softmax_label", BATCH[:1], "float64")]
        module.bind(*described)
        module.init_params(mx.init.Xavier())
        module.init_optimizer()
        for _ in range(3):
            module.forward_backward(mx.io.DataBatch([data], [mx.nd.arange(BATCH[0], dtype="float64")]))
            mx.nd.waitall()
            module.update()
        found.append({name: item.asnumpy() for items in module.get_params() for name, item in items.items()})
    check_net(*found)


BOUND = """
import mxnet as mx, numpy as np, gluon_syncbn
symbol = gluon_syncbn.symbol.SyncBatchNorm(mx.sym.var('data'), num_devices=2, name='bn', timeout=60)
arguments, pools = {'data': (2, 3), 'bn_gamma': (3,), 'bn_beta': (3,)}, []
executors = []
for i in range(2):
    pools.append(mx.nd.zeros((2, 3), ctx=mx.cpu(i)))
    states = {'bn_moving_mean': pools[i][0].copy(), 'bn_moving_var': pools[i][1].copy()}
    arrays = {name: mx.nd.ones(shape, ctx=mx.cpu(i)) for name, shape in arguments.items()}
    executors.append(symbol.bind(mx.cpu(i), arrays, aux_states=states))
for i, executor in enumerate(executors):
    executor.forward(is_train=True, data=mx.nd.array([[0, 2, 4]] * 2) + i)
for executor in executors:
    seen = [array.asnumpy() for array in executor.aux_arrays]
    np.testing.assert_allclose(seen, [[0.05, 0.25, 0.45], [0.025] * 3], rtol=1e-6)
"""


def test_executors_without_gradients():
    run_python(BOUND)


def test_many_symbols_are_bound_device_by_device():
    """All executors of a symbol meet, however many symbols were bound in between."""
    symbols = [SYNCHRONIZED(DATA, num_devices=2, timeout=10, name=f"bn{i}") for i in range(20)]
    executors = [[symbol.simple_bind(device, data=(1, 3)) for symbol in symbols] for device in cpus(2)]
    for both in zip(*executors):
        for value, executor in enumerate(both):
            executor.forward(is_train=True, data=mx.nd.full((1, 3), value))
        for executor in both:
            np.testing.assert_allclose(executor.aux_arrays[0].asnumpy(), 0.05, rtol=1e-6)  # the mean of 0 and 1


# What cannot work, and files that were damaged


def test_bad_input(monkeypatch):
    wrong = [
        (TypeError, "data must be a Symbol, not NDArray", lambda: SYNCHRONIZED(mx.nd.ones((1, 1)))),
        (ValueError, "num_devices must be given", lambda: convert_symbol(SYNCHRONIZED(DATA), None)),
        (TypeError, "expected a Symbol, not BatchNorm; for a block use", lambda: convert_symbol(nn.BatchNorm(), 2)),
        (TypeError, "convert_symbol: unknown option 'activation'", {"activation": "relu"}),
        (ValueError, "group_size=3 does not divide its 2 devices", {"group_size": 3}),
    ]
    made = [
        (ValueError, "num_devices must be a positive integer, not 0", {"num_devices": 0}),
        (ValueError, "group_size=2 does not divide its 3 devices", {"num_devices": 3, "group_size": 2}),
        (TypeError, "axis must be an integer, not 1.5", {"axis": 1.5}),
        (TypeError, "fix_gamma must be True or False, not 'False'", {"fix_gamma": "False"}),
        (TypeError, "use_global_stats must be True or False, not 'False'", {"use_global_stats": "False"}),
        *((ValueError, "dtype must be 'float32' or 'float64'", {"dtype": it}) for it in (None, "float16", ["int32"])),
        (TypeError, "a symbol can be saved, so kvstore must be a name", {"kvstore": mx.kv.create("local")}),
    ]
    for kind, text, given in wrong:
        with pytest.raises(kind, match=text):
            given() if callable(given) else convert_symbol(SYNCHRONIZED(DATA, num_devices=2, name="x"), 2, **given)
    for kind, text, given in made:
        with pytest.raises(kind, match=f"SyncBatchNorm 'x': {text}"):
            SYNCHRONIZED(DATA, name="x", **{"num_devices": 2, **given})
    with pytest.raises(ValueError, match="mean or variance of 1 BatchNorm nodes"):
        convert_symbol(mx.sym.BatchNorm(DATA, name="x", output_mean_var=True), 2)
    # A block that is called with a symbol may be saved, too.
    layer = testing.initialized(SyncBatchNorm(in_channels=3, kvstore=mx.kv.create("local")))
    with pytest.raises(TypeError, match="a symbol can be saved, so kvstore must be a name"):
        layer(DATA)
    with pytest.raises(ValueError, match="group_size=3 does not divide its 4 devices"):
        SyncBatchNorm(num_devices=4, group_size=3)(DATA)
    monkeypatch.setenv("MXNET_ENGINE_TYPE", "NaiveEngine")
    for make in (SyncBatchNorm(num_devices=2), lambda data: SYNCHRONIZED(data, num_devices=2)):
        with pytest.raises(RuntimeError, match="2 devices could never meet"):
            make(DATA)


DAMAGE = {  # of the mark
    "num_devices must be a positive integer, not -2": {"num_devices": -2},
    "num_devices must be a positive integer, not '2'": {"num_devices": "2"},
    "group_size must be a positive integer, not 0": {"group_size": 0},
    "the timeout must be a positive number of seconds, not nan": {"timeout": float("nan")},
    "dtype must be 'float32' or 'float64', not 'int8'": {"dtype": "int8"},
    "eps must be a number, not nan": {"epsilon": float("nan")},
    "momentum must be a number, not None": {"momentum": None},
    "scale must be true or false, not 1": {"scale": 1},
    "kvstore 'dist_sync' is not supported": {"kvstore": "dist_sync"},
    "unexpected keyword argument 'color'": {"color": "red"},
    "the mark of node 'x' is damaged: '{no mark'": "{no mark",
    "axis": {"axis": "3"},
    "in_place": {"in_place": 1},
    "kvstore": {"kvstore": 5},
    "process_group": {"process_group": 7},
}


@pytest.mark.parametrize("text", list(DAMAGE))
def test_a_damaged_file_is_refused(text, tmp_path):
    """Not read beyond, not waited for: it may come from anywhere."""
    graph = json.loads(SYNCHRONIZED(DATA, num_devices=2, name="x").tojson())
    (attributes,) = (node["attrs"] for node in graph["nodes"] if "__syncbn__" in node.get("attrs", {}))
    given = json.loads(attributes["__syncbn__"])
    attributes["__syncbn__"] = DAMAGE[text] if isinstance(DAMAGE[text], str) else json.dumps({**given, **DAMAGE[text]})
    (tmp_path / "x.json").write_text(json.dumps(graph), encoding="utf-8")
    symbol = mx.sym.load(str(tmp_path / "x.json"))
    for read in (
        lambda: symbol.simple_bind(mx.cpu(0), data=(2, 3)),
        lambda: SymbolBlock(symbol, DATA),
        lambda: convert_symbol(symbol, 2),
    ):
        with pytest.raises(ValueError, match=f"'x'.*{text}|{text}"):
            read()


def test_shapes_of_which_only_some_are_known():
    """`BatchNorm` says what it can, and so does the compiled layer, if the number of axes is known."""
    ours = SYNCHRONIZED(DATA, num_devices=2, name="x", backend="native")
    plain = mx.sym.BatchNorm(DATA, name="x")
    for shape in ((0, 3, 8, 8), (2, 0, 8, 8), (0, 0, 8, 8), (2, 3, 0, 0)):
        assert ours.infer_shape_partial(data=shape) == plain.infer_shape_partial(data=shape)


# Blocks of symbols


IMAGES, MAPS = [(3, 2, 6, 6), (1, 2, 6, 6)], [(3, 3, 4, 4), (1, 3, 4, 4)]


class Around(mx.gluon.HybridBlock):
    """Calls a symbol block once or twice in a step, and has a layer beside it."""

    def __init__(self, inner, factors):
        super().__init__()
        self.inner, self.beside, self.factors = inner, nn.BatchNorm(momentum=0.5, prefix="beside_"), factors

    def hybrid_forward(self, F, x):
        return self.beside(sum(self.inner(factor * x) for factor in self.factors))


def load(block, contexts):
    """Random parameters in float64."""
    testing.initialized(block, contexts, dtype="float64", force_reinit=True)
    block(mx.nd.ones((1, *IMAGES[0][1:]), dtype="float64"))
    rng = np.random.RandomState(3)
    for _, parameter in sorted(block.collect_params().items()):
        parameter.set_data(mx.nd.array(rng.uniform(0.5, 1.5, parameter.shape), dtype="float64"))
    return block


def draw_images(seed):
    return random_shards(IMAGES, "float64", seed), random_shards(MAPS, "float64", seed + 9)


def check_trains_as_on_one_device(net, theirs, draw=draw_images):
    """On two devices, as another net on one; both begin anew."""
    check_net(*(train_block(load(block, cpus(count)), count, draw) for block, count in ((net, 2), (theirs, 1))))


@pytest.mark.parametrize("factors", [(1,), (1, 3)], ids=["", "called twice"])
@pytest.mark.parametrize("origin", ["converted", "made of synchronized nodes", "num_devices comes later"])
def test_a_block_trains_as_on_one_device(origin, factors, mode):
    number = {"made of synchronized nodes": 2}.get(origin)
    symbol = expander() if origin == "converted" else expander(SYNCHRONIZED, num_devices=number, timeout=60)
    # nn.BatchNorm updates statistics on the way back, in the opposite order.
    net, theirs = Around(SymbolBlock(symbol, DATA), factors), Around(SymbolBlock(expander(), DATA), factors[::-1])
    if origin == "converted":
        convert_sync_batchnorm(net, timeout=60)
        assert type(net.beside) is SyncBatchNorm and len(list(net.collect_params(".*gamma"))) == 3
    else:
        convert_sync_batchnorm(net.beside)
    assert [options_of(layer)["timeout"] for layer in layers_of(net.inner)] == [60, 60]
    check_trains_as_on_one_device(set_mode(net, mode), theirs)


@pytest.mark.parametrize("has_relu", [False, True], ids=["BatchNorm", "BatchNormWithReLU"])
def test_there_and_back_and_there_again(has_relu, mode, caplog):
    """The block stays what it was, with its parameters and symbol: also the layer that stands for two operators."""
    if has_relu and not hasattr(mx.sym.contrib, "BatchNormWithReLU"):
        pytest.skip("this MXNet has no such operator")
    net = SymbolBlock(expander(mx.sym.contrib.BatchNormWithReLU if has_relu else mx.sym.BatchNorm), DATA)
    theirs = SymbolBlock(expander(relu_norm if has_relu else mx.sym.BatchNorm), DATA)
    before, graph = dict(net.collect_params().items()), net(DATA).tojson()
    assert graph.count("_contrib_BatchNormWithReLU") == 2 * has_relu
    for _ in range(2):
        convert_sync_batchnorm(net, num_devices=3, timeout=60)
        convert_sync_batchnorm(net, num_devices=2)
        made = [(options_of(layer)["num_devices"], options_of(layer)["timeout"]) for layer in layers_of(net)]
        assert made == [(2, 60), (2, 60)] and not caplog.records
        check_trains_as_on_one_device(set_mode(net, mode), theirs)
        x = mx.nd.array(random_shards(IMAGES)[0], dtype="float64")
        predicted = {"output": theirs(x).asnumpy()}
        check_net({"output": net(x).asnumpy()}, predicted)
        convert_batchnorm(net)
        assert type(net) is SymbolBlock and net(DATA).tojson() == graph
        assert all(before[name] is parameter for name, parameter in net.collect_params().items())
        net.cast("float32")  # MXNet has the one with a ReLU in float32 only
        seen = net(x.astype("float32")).asnumpy()
        check("output", seen, Sized(predicted["output"], np.full(3, np.abs(seen).max())), units=16)


def test_gluoncvs_feature_expander():
    """SSD on MobileNet, whose backbone and additional layers are one symbol: 35 norms, whatever way they come.

    The second way is what gluoncv's train_ssd.py --syncbn does: a layer that is called with a symbol before there are
    parameters. The additional layers are plain BatchNorm there, and take over the options of the others.
    """
    name, options = "ssd_300_mobilenet0.25_custom", {"classes": ["a"], "pretrained_base": False}
    converted = model_zoo.get_model(name, **options)
    assert type(converted.features) is FeatureExpander
    convert_sync_batchnorm(converted, num_devices=2)
    made = model_zoo.get_model(name, norm_layer=SyncBatchNorm, norm_kwargs={"num_devices": 2}, **options)
    for net in (converted, made):
        layers = layers_of(net.features)
        assert [options_of(layer)["num_devices"] for layer in layers] == [2] * 35
    convert_batchnorm(converted)
    assert type(converted.features) is FeatureExpander


def test_nodes_of_one_name(mode, caplog):
    """Two nodes are one layer if name and parameters are the same."""
    roles = ("gamma", "beta", "moving_mean", "moving_var")
    first, other = ([mx.sym.var(f"{name}_{role}") for role in roles] for name in ("first", "other"))
    nodes = [
        mx.sym.BatchNorm(factor * DATA, *variables, fix_gamma=False, momentum=0.75, name="n")
        for factor, variables in ((1, first), (3, first), (2, other))
    ]
    # In the opposite order, as above.
    net, theirs = (SymbolBlock(one - 2 * nodes[1] + two, DATA) for one, two in (nodes[::2], nodes[::-2]))
    convert_sync_batchnorm(net, timeout=60)
    assert len(layers_of(net)) == 2 and not caplog.records
    check_trains_as_on_one_device(set_mode(net, mode), theirs, lambda seed: shards_and_heads(IMAGES, "float64", seed))


def test_a_block_of_which_some_nodes_can_be_converted(caplog):
    """A gamma that is computed stays as it is, and so does a node whose statistics are outputs."""
    first = mx.sym.BatchNorm(DATA, name="first")
    computed, shown = mx.sym.BatchNorm(first, 2 * mx.sym.var("g")), mx.sym.BatchNorm(first, output_mean_var=True)
    for outputs in (computed, [shown[0], shown[1]]):
        net = convert_sync_batchnorm(SymbolBlock(outputs, DATA))
        assert [layer.name for layer in layers_of(net)] == ["first"]
        assert "1 BatchNorm nodes inside SynchronizedSymbolBlock" in caplog.text
        caplog.clear()


def test_mirroring_is_off_for_symbols_with_synchronized_layers(backend, monkeypatch):
    """MXNet would compute them again in the backward pass, and running statistics would move twice in a step."""
    (x,) = testing.random_shards([(4, 3, 5, 5)])
    moved = []
    for mirror in "01":
        monkeypatch.setenv("MXNET_BACKWARD_DO_MIRROR", mirror)
        norm = mx.sym.BatchNorm(mx.sym.var("data"), fix_gamma=False, name="norm")
        symbol = convert_symbol(mx.sym.relu(norm), 2)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            module = testing.module_of(symbol, testing.cpus(2), x.shape)
        told = [item.filename for item in caught if "MIRROR" in str(item.message)]
        assert (
            set(told) == ({testing.__file__} if mirror == "1" else set())
            and os.environ["MXNET_BACKWARD_DO_MIRROR"] == mirror
        )
        module.forward(mx.io.DataBatch([mx.nd.array(x)]), is_train=True)
        module.backward([mx.nd.ones(x.shape)])
        module.update()  # or get_params() has what was there
        moved.append(module.get_params()[1]["norm_moving_mean"].asnumpy())
    np.testing.assert_array_equal(*moved)
    assert moved[0].all()


@pytest.mark.parametrize("name", ["device", "buffers", "function", "bind", "symbol", "executor", "forward"])
def test_an_input_may_have_any_name(name):
    """Inputs are keywords of MXNet's methods, which are extended."""
    executor = (mx.sym.var(name) + 1).simple_bind(mx.cpu(), **{name: (2, 3)})
    assert executor.forward(is_train=True, **{name: mx.nd.ones((2, 3))})[0].asnumpy().tolist() == [[2] * 3] * 2
    executor.backward(mx.nd.ones((2, 3)))
    assert executor.reshape(**{name: (1, 3)}).forward(**{name: mx.nd.ones((1, 3))})[0].shape == (1, 3)
