"""What is exported from a net that trained on several devices needs nothing of this package."""

import json

import mxnet as mx
import numpy as np
import onnx
import onnxruntime
import pytest
from harness import cpus, random_shards, run_python, set_mode, step
from mxnet.gluon import nn

from gluon_syncbn import SyncBatchNorm, convert_batchnorm, convert_sync_batchnorm, plain_symbol

pytestmark = pytest.mark.usefixtures("backend")

SHAPES = [(2, 3, 8, 8), (1, 3, 8, 8)]


def make_net(norm=SyncBatchNorm):
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Conv2D(4, 3), norm(), nn.Activation("relu"), norm(scale=False), nn.Dense(5))
    return net


@pytest.fixture(params=["hybridize", "static"])
def trained(request):
    """After one step on two devices, with the graph of that step still in place."""
    net = make_net()
    if request.param == "static":
        convert_sync_batchnorm(net)  # with fused ReLU
    net.initialize(mx.init.Xavier(), ctx=cpus(2))
    set_mode(net, request.param)
    step(net, random_shards(SHAPES), random_shards([(2, 5), (1, 5)], seed=1), cpus(2))
    mx.nd.waitall()
    return net


def operators(file):
    return [node["op"] for node in json.loads(file.read_text(encoding="utf-8"))["nodes"]]


def test_export_is_plain_and_equal_to_the_last_bit(trained, tmp_path):
    x = mx.nd.array(random_shards([(4, 3, 8, 8)], seed=5)[0])
    trained.export(str(tmp_path / "net"), epoch=3)
    found = operators(tmp_path / "net-symbol.json")
    assert found.count("BatchNorm") == 2 and not any("Custom" in name or "syncbn" in name for name in found)
    # The same in a process that knows only MXNet, and by its own BatchNorm with the parameters of the trained net.
    np.save(tmp_path / "x.npy", x.asnumpy())
    code = f"""
import os, sys, mxnet as mx, numpy as np
os.chdir({str(tmp_path)!r})
net = mx.gluon.SymbolBlock.imports('net-symbol.json', ['data'], 'net-0003.params')
np.save('y.npy', net(mx.nd.array(np.load('x.npy'))).asnumpy())
assert 'gluon_syncbn' not in sys.modules
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    theirs = make_net(nn.BatchNorm)
    trained.save_parameters(str(tmp_path / "net.params"))
    theirs.load_parameters(str(tmp_path / "net.params"))
    theirs.hybridize()
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), theirs(x).asnumpy())
    # Exporting has not changed the net: it trains on.
    step(trained, random_shards(SHAPES), random_shards([(2, 5), (1, 5)], seed=1), cpus(2))
    mx.nd.waitall()


def test_onnx(trained, tmp_path):
    x = random_shards([(4, 3, 8, 8)], seed=5)[0]
    prefix = str(tmp_path / "net")
    trained.export(prefix)
    file = str(tmp_path / "net.onnx")
    mx.onnx.export_model(f"{prefix}-symbol.json", f"{prefix}-0000.params", [x.shape], np.float32, file)
    model = onnx.load(file)
    assert [node.op_type for node in model.graph.node].count("BatchNormalization") == 2
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    (y,) = session.run(None, {session.get_inputs()[0].name: x})
    np.testing.assert_allclose(y, trained(mx.nd.array(x)).asnumpy(), rtol=1e-4, atol=1e-5)


def test_a_symbol_that_a_user_makes_of_a_net(trained, tmp_path):
    """It can be saved and loaded by itself, and made plain; names are those of nn.BatchNorm."""
    trained.hybridize(False)
    sym = trained(mx.sym.var("data"))
    assert sym.attr_dict()  # it is synchronized, and marked as such
    plain = plain_symbol(sym)
    reference = make_net(nn.BatchNorm)(mx.sym.var("data"))
    assert plain.list_arguments() == reference.list_arguments()
    assert plain.list_auxiliary_states() == reference.list_auxiliary_states()
    assert {name for name in reference.get_internals().list_outputs() if "batchnorm" in name} <= set(
        plain.get_internals().list_outputs()
    )
    assert {name for name in reference.get_internals().list_outputs() if "batchnorm" in name} <= set(
        sym.get_internals().list_outputs()
    )
    sym.save(str(tmp_path / "net.json"))
    assert mx.sym.load(str(tmp_path / "net.json")).list_outputs() == sym.list_outputs()


@pytest.mark.parametrize("before", [True, False])
def test_pretrained_parameters_before_or_after_conversion_and_other_numbers_of_devices(before, tmp_path):
    """A checkpoint of one device goes on with two, its own with three, and back to one."""
    file = str(tmp_path / "net.params")
    shards, heads = random_shards([(1, 3, 8, 8)] * 6), random_shards([(1, 5)] * 6, seed=1)

    def train(net, count):
        """The same batch, spread over this many devices."""
        split = [np.concatenate(part) for part in np.array_split(shards, count)]
        trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.05}, kvstore="device")
        split_heads = [np.concatenate(part) for part in np.array_split(heads, count)]
        step(net, split, split_heads, cpus(count))
        trainer.step(6)
        mx.nd.waitall()
        net.save_parameters(file)

    results = []
    for counts in ((1, 1, 1, 1), (1, 2, 3, 1)):
        mx.random.seed(0)
        net = make_net(nn.BatchNorm)
        net.initialize(mx.init.Xavier())
        train(net, 1)
        for count in counts[1:]:
            net = make_net(nn.BatchNorm)
            if before:
                net.load_parameters(file, ctx=cpus(count))
            if counts != (1, 1, 1, 1):
                convert_sync_batchnorm(net, num_devices=count)
            if not before:
                net.load_parameters(file, ctx=cpus(count))
            train(net, count)
        convert_batchnorm(net)
        results.append({name: item.data(mx.cpu(0)).asnumpy() for name, item in net.collect_params().items()})
    for name, value in results[0].items():
        np.testing.assert_allclose(results[1][name], value, rtol=1e-3, atol=1e-5, err_msg=name)
