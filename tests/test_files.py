"""Files: what is saved, exported and loaded computes what the net did, wherever it is loaded.

Exports need nothing of this package.
"""

import json
import re

import mxnet as mx
import numpy as np
import onnx
import onnxruntime
import pytest
import testing
from mxnet.gluon import SymbolBlock, nn
from testing import check_step, cpus, initialized, layers_of, random_shards, run_python, shards_and_heads, step

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm, convert_batchnorm, convert_sync_batchnorm, plain_symbol

pytestmark = pytest.mark.usefixtures("backend")
DATA = mx.sym.var("data")
PLAIN = {"null", "Convolution", "BatchNorm", "Activation", "relu", "FullyConnected"}  # operators
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
    train(initialized(net, 2, mode, init=mx.init.Xavier()))
    return net


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
    """In a process that knows only MXNet; so do symbols that were made plain, or for one device. Layers train on."""
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
        files = f"{prefix}/{mode}-symbol.json", f"{prefix}/{mode}-0003.params"
        file = mx.onnx.export_model(*files, [X.shape], np.float32, f"{prefix}/net.onnx")
        assert [node.op_type for node in onnx.load(file).graph.node].count("BatchNormalization") == 2
        session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
        (y,) = session.run(None, {session.get_inputs()[0].name: X})
        np.testing.assert_allclose(y, expected[mode], rtol=1e-4, atol=1e-5)
    net.collect_params().reset_ctx(mx.cpu(0))
    for name in ("moved", "back"):
        net.hybridize()
        expected[name] = net(x).asnumpy()
        net.export(f"{prefix}/{name}", epoch=3)
        symbol = net(DATA)  # plain, for its weights are on one device
        assert {node["op"] for node in json.loads(symbol.tojson())["nodes"]} <= PLAIN
        symbol.save(f"{prefix}/{name}-symbol.json")
        convert_batchnorm(net)
    np.testing.assert_array_equal(expected["back"], expected["moved"])
    layer = SyncBatchNorm(axis=np.int64(-1), in_channels=8, prefix="one_")
    layer.hybridize()
    block = convert_sync_batchnorm(SymbolBlock(mx.sym.BatchNorm(DATA, fix_gamma=False, name="bn"), DATA), timeout=60)
    for name, net in (("one", layer), ("block", block)):
        net.initialize(ctx=cpus(2))
        step(net, *shards_and_heads(SHAPES), cpus(2))
        net.export(f"{prefix}/{name}", epoch=3)
        expected[name] = net(x).asnumpy()
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
    for net, of_net in ((layer, layer), (block, *layers_of(block)), (again, *layers_of(again))):
        check_step(net, testing.reference_of(of_net), *shards_and_heads(SHAPES, seed=3), layer=of_net)


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


@pytest.mark.parametrize("full_names", [True, False])
@pytest.mark.parametrize("before", [True, False])
def test_pretrained_parameters_before_or_after_conversion_and_other_numbers_of_devices(before, full_names, tmp_path):
    """A checkpoint of one device goes on with two, its own with three, and back to one."""
    file = str(tmp_path / "net.params")
    shards, heads = (random_shards([(1, *shape)] * 6, "float64", seed) for seed, shape in ((0, (3, 8, 8)), (1, (5,))))
    results = []
    for counts in ((1, 1, 1, 1), (1, 2, 3, 1)):
        mx.random.seed(0)
        for number, count in enumerate(counts):
            net = make_net(nn.BatchNorm, momentum=0.5)
            net.cast("float64")
            load = net.collect_params().load if full_names else net.load_parameters
            if before and number:
                load(file, ctx=cpus(count))
            if counts != (1, 1, 1, 1):
                convert_sync_batchnorm(net, num_devices=count)
            if not number:
                net.initialize(mx.init.Xavier())
            elif not before:
                load(file, ctx=cpus(count))
            trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.05}, kvstore="device")
            split = [[np.concatenate(part) for part in np.array_split(items, count)] for items in (shards, heads)]
            step(net, *split, cpus(count))
            trainer.step(6)
            mx.nd.waitall()
            (net.collect_params().save if full_names else net.save_parameters)(file)
        convert_batchnorm(net)
        results.append({name: item.data(mx.cpu(0)).asnumpy() for name, item in net.collect_params().items()})
    for name, value in results[0].items():
        # MXNet's own BatchNorm has a momentum of 0.9 as a float32.
        np.testing.assert_allclose(results[1][name], value, rtol=1e-6, atol=1e-9, err_msg=name)


# A process that has only imported the package; files of jobs of several processes, which are not there

OTHERS = {  # what was written, and the error
    "mpi": ({"process_group": "mpi"}, "mpi4py cannot be imported"),
    "horovod": ({"process_group": "horovod"}, "Horovod cannot be imported"),
    "groups": ({"group_size": 4}, "does not divide"),
}
LOADED = """
import os, sys
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
    symbol = mx.sym.load(file)
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
alone, shape = mx.sym.load(FOLDER + '/alone'), x.shape
from executors import *
from testing import shards_and_heads
shards, heads = shards_and_heads([shape] * 2)
norm = norm_of(3, os.environ['GLUON_SYNCBN_BACKEND'])
check_executors(bind(alone, shards, {'norm': norm}), norm, shards, heads, 'norm')
print('TRAINED')
"""


def test_files_load_where_only_the_package_was_imported(tmp_path):
    """Those of several processes predict where there are none: they are looked for when it first trains."""
    graph = gluon_syncbn.symbol.SyncBatchNorm(DATA, num_devices=2, name="norm", fix_gamma=False, timeout=60)
    graph.save(str(tmp_path / "alone"))
    files = [(f"{other}{count}", count) for other in OTHERS for count in (1, 2)]
    for name, count in files:
        written = {**OTHERS[name[:-1]][0], "num_devices": count}
        nodes = json.loads(graph.tojson())
        for attributes in (node.get("attrs", {}) for node in nodes["nodes"]):
            if "__syncbn__" in attributes:
                attributes["__syncbn__"] = json.dumps({**json.loads(attributes["__syncbn__"]), **written})
        (tmp_path / name).write_text(json.dumps(nodes))
    done = run_python(f"FOLDER, FILES = {str(tmp_path)!r}, {files}" + LOADED)
    assert done.stdout.count("PREDICTED True") == 4 * 6 and "PREDICTED False" not in done.stdout, done.stdout
    found = re.findall(r"REFUSED (\w+)\d (.*)", done.stdout)
    assert len(found) == 2 * 6 and "TRAINED" in done.stdout, done.stdout
    assert all(OTHERS[name][1] in text and "SyncBatchNorm 'norm'" in text for name, text in found), done.stdout


def test_an_export_before_the_first_call(tmp_path):
    """Of a graph that `infer_shape` has made; as MXNet does it, without Parameters, which may have no shapes yet."""
    net = initialized(make_net(), 2, "hybridize")
    net.infer_shape(mx.nd.array(X))
    net.export(str(tmp_path / "net"))
    nodes = json.loads((tmp_path / "net-symbol.json").read_text())["nodes"]
    assert {node["op"] for node in nodes} <= PLAIN
    assert len(mx.nd.load(str(tmp_path / "net-0000.params"))) == 0
