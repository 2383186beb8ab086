"""Files: what is saved, exported and loaded computes what the net did, wherever it is loaded.

Exports need nothing of this package. tests/data has symbols that version 0.1.0 has saved, by each back end; their marks
and descriptions of groups are not those that are written today.
"""

import json
import re
from pathlib import Path

import mxnet as mx
import numpy as np
import onnx
import onnxruntime
import pytest
from executors import bind, check_executors, check_net, norm_of, run, train_block, train_executors
from mxnet import gluon
from mxnet.gluon import SymbolBlock, nn
from reference import check_all
from testing import (
    MODES,
    check_step,
    cpus,
    layers_of,
    options_of,
    random_shards,
    reference_of,
    run_python,
    set_mode,
    step,
)

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm, convert_batchnorm, convert_symbol, convert_sync_batchnorm, plain_symbol

pytestmark = pytest.mark.usefixtures("backend")
modes = pytest.mark.parametrize("mode", list(MODES))
DATA = mx.sym.var("data")
X = random_shards([(4, 3, 8, 8)], seed=5)[0]
SHAPES, HEADS = [(2, 3, 8, 8), (1, 3, 8, 8)], [(2, 5), (1, 5)]


def make_net(norm=SyncBatchNorm, **options):
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Conv2D(4, 3), norm(**options), nn.Activation("relu"), norm(scale=False), nn.Dense(5))
    return net


def train(net):
    step(net, random_shards(SHAPES), random_shards(HEADS, seed=1), cpus(2))
    mx.nd.waitall()


def trained(mode):
    """After one step on two devices, with the graph of that step still in place."""
    net = make_net()
    if mode == "static":
        convert_sync_batchnorm(net)  # with fused ReLU
    net.initialize(mx.init.Xavier(), ctx=cpus(2))
    train(set_mode(net, mode))
    return net


def one_layer(**options):
    """A hybridized layer whose axis is NumPy's, trained, with what it predicts."""
    layer = SyncBatchNorm(axis=np.int64(-1), in_channels=8, prefix="one_", **options)
    layer.initialize(ctx=cpus(2))
    layer.hybridize()
    train_one = random_shards(SHAPES)
    check_step(layer, reference_of(layer, axis=-1), train_one, random_shards(SHAPES, seed=1))
    return layer


PLAIN_MXNET = """
import os, sys, mxnet as mx, numpy as np
os.chdir(FOLDER)
x = mx.nd.array(np.load('x.npy'))
for name in NAMES:
    net = mx.gluon.SymbolBlock.imports(name + '-symbol.json', ['data'], name + '-0003.params')
    np.save(name + '.npy', net(x).asnumpy())
for name in SYMBOLS:
    mx.sym.load(name).simple_bind(mx.cpu(0), data=x.shape).forward(is_train=True, data=x)[0].wait_to_read()
assert 'gluon_syncbn' not in sys.modules
print('RIGHT')
"""


def test_what_is_exported_needs_nothing_of_ours_and_predicts_the_same_to_the_last_bit(tmp_path):
    """In a process that knows only MXNet; so do symbols that were made plain, or for one device. The net trains on."""
    x, prefix = mx.nd.array(X), str(tmp_path)
    np.save(tmp_path / "x.npy", X)
    expected = {}
    for mode in ("hybridize", "static"):
        net = trained(mode)
        net.export(f"{prefix}/{mode}", epoch=3)
        theirs = make_net(nn.BatchNorm)
        net.save_parameters(f"{prefix}/net.params")
        theirs.load_parameters(f"{prefix}/net.params")
        theirs.hybridize()
        expected[mode] = theirs(x).asnumpy()
        train(net)
        file = f"{prefix}/net.onnx"
        files = f"{prefix}/{mode}-symbol.json", f"{prefix}/{mode}-0003.params"
        mx.onnx.export_model(*files, [X.shape], np.float32, file)
        model = onnx.load(file)
        assert [node.op_type for node in model.graph.node].count("BatchNormalization") == 2
        session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
        (y,) = session.run(None, {session.get_inputs()[0].name: X})
        np.testing.assert_allclose(y, expected[mode], rtol=1e-4, atol=1e-5)
    layer = one_layer()
    layer.export(f"{prefix}/one", epoch=3)
    expected["one"] = layer(x).asnumpy()
    net = SymbolBlock(mx.sym.BatchNorm(DATA, fix_gamma=False, name="bn"), DATA)
    convert_sync_batchnorm(net, timeout=60)
    net.initialize(ctx=cpus(2))
    step(net, random_shards(SHAPES), random_shards(SHAPES, seed=1), cpus(2))
    net.export(f"{prefix}/block", epoch=3)
    expected["block"] = net(x).asnumpy()
    symbols = {
        "plain.json": plain_symbol(gluon_syncbn.symbol.SyncBatchNorm(DATA, num_devices=2, activation="relu")),
        "one.json": gluon_syncbn.symbol.SyncBatchNorm(DATA, num_devices=1),
    }
    for name, symbol in symbols.items():
        symbol.save(f"{prefix}/{name}")
    done = run_python(f"FOLDER, NAMES, SYMBOLS = {prefix!r}, {list(expected)}, {list(symbols)}" + PLAIN_MXNET)
    assert "RIGHT" in done.stdout, done.stdout + done.stderr
    for name, value in expected.items():
        np.testing.assert_array_equal(np.load(tmp_path / f"{name}.npy"), value)
    again = SymbolBlock.imports(f"{prefix}/block-symbol.json", ["data"], f"{prefix}/block-0003.params", ctx=cpus(2))
    convert_sync_batchnorm(again, timeout=60)
    for block in (again, net):
        (layer,) = layers_of(block)
        check_step(block, reference_of(layer), random_shards(SHAPES), random_shards(SHAPES, seed=3), layer=layer)


def test_a_symbol_that_a_user_makes_of_a_net(tmp_path):
    """It can be saved and loaded by itself, and made plain; names are those of nn.BatchNorm."""
    net = trained("imperative")
    symbol, theirs = net(DATA), make_net(nn.BatchNorm)(DATA)
    symbol.save(str(tmp_path / "net.json"))
    inside = {name for name in theirs.get_internals().list_outputs() if "batchnorm" in name}
    for made in (symbol, mx.sym.load(str(tmp_path / "net.json")), plain_symbol(symbol)):
        assert made.list_arguments() == theirs.list_arguments() and made.list_outputs() == theirs.list_outputs()
        assert made.list_auxiliary_states() == theirs.list_auxiliary_states()
        assert inside <= set(made.get_internals().list_outputs())
        block = SymbolBlock(made, DATA, params=net.collect_params())
        np.testing.assert_allclose(block(mx.nd.array(X)).asnumpy(), net(mx.nd.array(X)).asnumpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("before", [True, False])
def test_pretrained_parameters_before_or_after_conversion_and_other_numbers_of_devices(before, tmp_path):
    """A checkpoint of one device goes on with two, its own with three, and back to one."""
    file = str(tmp_path / "net.params")
    shards, heads = (random_shards([(1, *shape)] * 6, "float64", seed) for seed, shape in ((0, (3, 8, 8)), (1, (5,))))
    results = []
    for counts in ((1, 1, 1, 1), (1, 2, 3, 1)):
        mx.random.seed(0)
        for number, count in enumerate(counts):
            net = make_net(nn.BatchNorm, momentum=0.5)
            net.cast("float64")
            if before and number:
                net.load_parameters(file, ctx=cpus(count))
            if counts != (1, 1, 1, 1):
                convert_sync_batchnorm(net, num_devices=count)
            if not number:
                net.initialize(mx.init.Xavier())
            elif not before:
                net.load_parameters(file, ctx=cpus(count))
            trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.05}, kvstore="device")
            split = [[np.concatenate(part) for part in np.array_split(items, count)] for items in (shards, heads)]
            step(net, *split, cpus(count))
            trainer.step(6)
            mx.nd.waitall()
            net.save_parameters(file)
        convert_batchnorm(net)
        results.append({name: item.data(mx.cpu(0)).asnumpy() for name, item in net.collect_params().items()})
    for name, value in results[0].items():
        # MXNet's own BatchNorm has a momentum of 0.9 as a float32.
        np.testing.assert_allclose(results[1][name], value, rtol=1e-6, atol=1e-9, err_msg=name)


# A process that has only imported the package; files of jobs of several processes, which are not there

OTHERS = {"mpi": {"process_group": "mpi"}, "horovod": {"process_group": "horovod"}, "groups": {"group_size": 4}}
LOADED = """
import sys
sys.modules['mpi4py'] = None  # as where it is not installed
sys.modules['horovod.mxnet'] = None
import gluon_syncbn
import mxnet as mx, numpy as np
from mxnet import autograd

x = np.random.RandomState(0).standard_normal((2, 3, 4, 4)).astype('float32')
expected = x / np.sqrt(1 + 1e-3)

def predicted(y):
    print('PREDICTED', np.abs(y.asnumpy() - expected).max() < 1e-5)

def refused(name, train):
    try:
        train()
    except (RuntimeError, ValueError, mx.MXNetError) as error:
        print('REFUSED', name, str(error))
    gluon_syncbn.abandon_step()

for name, devices in FILES:
    file = FOLDER + '/' + name
    for load in (mx.sym.load, gluon_syncbn.symbol.load):
        symbol = load(file)
        assert gluon_syncbn.plain_symbol(symbol).tojson().count('"op": "BatchNorm"') == 1
        executor = symbol.simple_bind(mx.cpu(0), data=x.shape)
        executor.aux_dict['norm_moving_var'][:] = executor.arg_dict['norm_gamma'][:] = 1
        predicted(executor.forward(is_train=False, data=mx.nd.array(x))[0])
        executor.backward(mx.nd.array(x), is_train=False)
        predicted(executor.grad_dict['data'])
        refused(name, lambda: executor.forward(is_train=True, data=mx.nd.array(x))[0].asnumpy())
    block = mx.gluon.SymbolBlock.imports(file, ['data'])
    block.initialize(mx.init.One(), ctx=[mx.cpu(i) for i in range(devices)])
    for parameter in block.collect_params().values():
        parameter.set_data(mx.nd.full(3, float(parameter.name.endswith(('gamma', 'var')))))
    for options in ({}, {'static_alloc': True, 'static_shape': True}):
        block.hybridize(**options)
        predicted(block(mx.nd.array(x)))
    with autograd.record():
        refused(name, lambda: block(mx.nd.array(x)).asnumpy())
symbol = mx.sym.load(FOLDER + '/alone')
executors = [symbol.simple_bind(mx.cpu(i), data=x.shape) for i in range(2)]
for i, executor in enumerate(executors):
    executor.arg_dict['norm_gamma'][:] = 1
    executor.forward(is_train=True, data=mx.nd.array(np.load(FOLDER + '/x.npy')[i]))
np.save(FOLDER + '/y.npy', np.stack([executor.outputs[0].asnumpy() for executor in executors]))
"""


def test_files_load_where_only_the_package_was_imported(tmp_path):
    """Those of several processes predict where there are none: they are looked for when it first trains."""
    graph = gluon_syncbn.symbol.SyncBatchNorm(DATA, num_devices=2, name="norm", fix_gamma=False, timeout=60)
    graph.save(str(tmp_path / "alone"))
    files = []
    for other, options in OTHERS.items():
        for count in (1, 2):
            nodes = json.loads(graph.tojson())
            for attributes in (node.get("attrs", {}) for node in nodes["nodes"]):  # as it would have been written there
                for key in {"group", "__syncbn__"} & set(attributes):
                    attributes[key] = json.dumps({**json.loads(attributes[key]), **options, "num_devices": count})
            files.append((f"{other}{count}", count))
            (tmp_path / files[-1][0]).write_text(json.dumps(nodes))
    shards = random_shards([(2, 3, 4, 4)] * 2)
    np.save(tmp_path / "x.npy", np.stack(shards))
    done = run_python(f"FOLDER, FILES = {str(tmp_path)!r}, {files}" + LOADED)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert done.stdout.count("PREDICTED True") == 6 * 6 and "PREDICTED False" not in done.stdout, done.stdout
    found = re.findall(r"REFUSED (\w+)\d (.*)", done.stdout)
    words = {"groups": "does not divide", "mpi": "mpi4py cannot be imported", "horovod": "Horovod cannot be imported"}
    assert len(found) == 3 * 6, done.stdout
    assert all(words[name] in text and "SyncBatchNorm 'norm'" in text for name, text in found), done.stdout
    expected = norm_of(3)
    expected.gamma, expected.beta = np.ones(3), np.zeros(3)
    check_all("output", np.load(tmp_path / "y.npy"), expected.step(shards).outputs, units=64, roundings=3)


# Files of version 0.1.0

DATA_FOLDER = Path(__file__).parent / "data"
OLD_SHAPES = [(2, 3, 4, 5), (1, 3, 4, 5)]
FILES = ["native", "portable", "portable, nothing compiled"]


@pytest.fixture
def file(request, tmp_path):
    if request.param != FILES[2]:
        return path_of(request.param)
    text = Path(path_of("portable")).read_text(encoding="utf-8")
    assert text.count("gluon_syncbn_all_reduce_wrapped") == 2  # there it was the operator itself
    made = tmp_path / "net-symbol.json"
    made.write_text(text.replace("gluon_syncbn_all_reduce_wrapped", "gluon_syncbn_all_reduce"), encoding="utf-8")
    return str(made)


def path_of(name):
    return str(DATA_FOLDER / f"{name}-0.1.0-symbol.json")


old_files = pytest.mark.parametrize("file", FILES, indirect=True)


def old_network():
    """What they are: with one device, and MXNet's own operators."""
    x = mx.sym.BatchNorm(DATA, fix_gamma=False, eps=1e-4, momentum=0.8, name="first")
    x = mx.sym.Convolution(mx.sym.relu(x), kernel=(1, 1), num_filter=4, no_bias=True, name="conv")
    return mx.sym.BatchNorm(x, name="second")


def old_values() -> dict:
    values = {"first_gamma": [0.5, 1.5, -1], "first_beta": [0.1, 0, -0.2], "second_beta": [0.3, 0, 1, -1]}
    values.update(second_gamma=np.ones(4), conv_weight=np.random.RandomState(3).standard_normal((4, 3, 1, 1)))
    for name, size in (("first", 3), ("second", 4)):
        values.update({f"{name}_moving_mean": np.arange(size), f"{name}_moving_var": np.arange(1, size + 1)})
    return values


def old_data(seed):
    return random_shards(OLD_SHAPES, seed=seed), random_shards([(n, 4, 4, 5) for n, *_ in OLD_SHAPES], seed=seed + 9)


def train_symbol(symbol, count) -> dict:
    found = train_executors(symbol, count, old_data, old_values())
    return {name: value for name, value in found.items() if name != "second_gamma"}  # which is fixed


def check_old(seen):
    check_net(seen, train_symbol(old_network(), 1), "float32", units=128)


@old_files
def test_an_old_symbol_trains_as_mxnet_loads_it_and_on_a_back_end(file, backend):
    symbol = mx.sym.load(file)
    check_old(train_symbol(symbol, 2))
    assert symbol.attr_dict()["second"]["__lr_mult__"] == "0.5"
    if backend == "portable" and file == path_of("native"):
        with pytest.raises(
            RuntimeError, match="'first': backend='portable' cannot run.*only the native back end has re"
        ):
            gluon_syncbn.symbol.load(file)
        return
    check_old(train_symbol(gluon_syncbn.symbol.load(file), 2))


@old_files
@modes
def test_an_old_block(file, mode):
    block = set_mode(gluon.SymbolBlock.imports(file, ["data"]), mode)
    first, second = layers_of(block)
    block.initialize(ctx=cpus(2))
    for name, value in old_values().items():
        block.collect_params()[name].set_data(mx.nd.array(value))
    check_old(train_block(block, 2, old_data))
    of_first = {"num_devices": 2, "group_size": 2, "timeout": 30.0, "process_group": "none"}
    of_first.update({"renorm": ((0.0, 1.0, 0.0),)} if "native" in Path(file).name else {})
    assert of_first.items() <= options_of(first).items()
    assert options_of(first)["activation"] is None  # the block's symbol has it
    assert options_of(second).items() >= {"num_devices": 2, "group_size": None, "renorm": None}.items()


@old_files
def test_an_old_symbol_can_be_made_plain_or_for_more_devices(file, backend):
    plain = plain_symbol(mx.sym.load(file))
    assert "syncbn" not in plain.tojson()
    seen, expected = train_symbol(plain, 1), train_symbol(old_network(), 1)
    assert all(np.array_equal(seen[name], value) for name, value in expected.items())
    if backend == "portable" and file == path_of("native"):
        return  # refused, as above
    again = convert_symbol(mx.sym.load(file), 4, timeout=9)
    # Its first norm keeps its pairs, which are of two; with the same data on both pairs that is one batch for both.
    block = SymbolBlock(again, DATA)
    of_first, of_second = map(options_of, layers_of(block))
    assert (of_first["num_devices"], of_first["group_size"], of_first["timeout"]) == (4, 2, 9)
    assert (of_second["num_devices"], of_second["group_size"], of_second["timeout"]) == (4, None, 9)


@pytest.mark.parametrize("load", [mx.sym.load, gluon_syncbn.symbol.load])
@pytest.mark.parametrize("name", ["native", "portable"])
def test_an_old_symbol_that_does_not_know_its_devices_predicts(name, load):
    """Its number of devices was written as 0."""
    shards = random_shards(OLD_SHAPES[:1])
    norm = norm_of(3, "portable", scale=False)
    executors = bind(load(path_of(f"{name}-without-number")), shards, {"first": norm})
    check_executors(executors, norm, shards, shards, "first", is_train=False)
    with pytest.raises(mx.MXNetError, match="'first': its graph does not say on how many devices it trains"):
        run(executors, shards)
    gluon_syncbn.abandon_step()


def test_an_old_portable_symbol_with_a_native_option_does_not_train_without_it():
    """Version 0.1.0 had renorm on the portable back end, too."""
    symbol = gluon_syncbn.symbol.SyncBatchNorm(DATA, num_devices=2, name="x", backend="portable", fix_gamma=False)
    graph = json.loads(symbol.tojson())
    (custom,) = (node for node in graph["nodes"] if node["op"] == "Custom")
    custom["attrs"]["group"] = json.dumps({**json.loads(custom["attrs"]["group"]), "renorm": [[0, 3, 5]]})
    shards, norm = random_shards(OLD_SHAPES), norm_of(3, "portable", group_size=1)
    executors = bind(mx.sym.load_json(json.dumps(graph)), shards, {"x": norm})
    check_executors(executors, norm, shards, shards, "x", is_train=False)
    words = "'x': it runs on the portable back end, which has no renorm. Load its symbol with gluon_syncbn.symbol.load"
    with pytest.raises(mx.MXNetError, match=words):  # the second forward() raises it, if the first has failed by then
        run(executors, shards)
    gluon_syncbn.abandon_step()


@modes
def test_an_old_layer_that_was_plain_for_now_synchronizes_in_a_block(mode):
    """It was on one device when its symbol was made."""
    block = gluon.SymbolBlock.imports(path_of("plain-for-now"), ["data"])
    (layer,) = layers_of(block)
    assert (options_of(layer)["group_size"], options_of(layer)["timeout"]) == (2, 30.0)
    block.initialize(ctx=cpus(2))
    block(mx.nd.ones(OLD_SHAPES[0]))
    set_mode(block, mode)
    for name, value in (("gamma", 2), ("beta", 0.5), ("running_mean", 0), ("running_var", 1)):
        block.collect_params()[f"first_{name}"].set_data(mx.nd.arange(value, value + 3))
    norm = reference_of(layer, activation="relu")
    check_step(block, norm, random_shards(OLD_SHAPES), random_shards(OLD_SHAPES, seed=1), layer=layer)


def test_the_files_are_in_the_old_form():
    """Or nothing here would show anything."""
    texts = [path.read_text(encoding="utf-8") for path in DATA_FOLDER.glob("*-0.1.0-symbol.json")]
    marks = [json.loads(json.loads(mark)) for text in texts for mark in re.findall('"__syncbn__": (".*")', text)]
    assert [sorted(set(mark) - {"is_plain"}) for mark in marks] == 7 * [
        ["axis", "eps", "fix_gamma", "momentum", "options", "relu"]
    ]
    groups = [json.loads(json.loads(group)) for text in texts for group in re.findall('"group": (".*")', text)]
    words = "name num_devices group_size timeout kvstore dtype momentum epsilon scale process_group renorm"
    assert [list(group) for group in groups] == 6 * [words.split()]
