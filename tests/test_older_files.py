"""Symbols that version 0.1.0 has saved still load and train: tests/data, written by the compiled operator's version of
each back end. Their marks and descriptions of groups are not those that are written today."""

import json
import re
from pathlib import Path

import mxnet as mx
import numpy as np
import oracle
import pytest
from harness import cpus, random_shards
from mxnet import autograd, gluon

import gluon_syncbn
from gluon_syncbn.graphs.graph import Graph
from gluon_syncbn.graphs.norms import find_norms

DATA = Path(__file__).parent / "data"
SHAPES = [(2, 3, 4, 5)] * 2
STEPS = 3


def path_of(name):
    return str(DATA / f"{name}-0.1.0-symbol.json")


def plain_network():
    x = mx.sym.BatchNorm(mx.sym.var("data"), fix_gamma=False, eps=1e-4, momentum=0.8, name="first")
    x = mx.sym.Convolution(mx.sym.relu(x), kernel=(1, 1), num_filter=4, no_bias=True, name="conv")
    return mx.sym.BatchNorm(x, name="second")


def parameters():
    rng = np.random.RandomState(3)
    values = {"first_gamma": [0.5, 1.5, -1], "first_beta": [0.1, 0, -0.2], "second_beta": [0.3, 0, 1, -1]}
    values.update(second_gamma=np.ones(4), conv_weight=rng.standard_normal((4, 3, 1, 1)))
    statistics = {f"{name}_moving_mean": np.zeros(size) for name, size in (("first", 3), ("second", 4))}
    statistics.update({f"{name}_moving_var": np.ones(size) for name, size in (("first", 3), ("second", 4))})
    return values, statistics


def data(count):
    """Shards and heads of a step for so many devices: the same batch."""
    shards, heads = random_shards(SHAPES), random_shards([(2, 4, 4, 5)] * 2, seed=1)
    return (shards, heads) if count == 2 else ([np.concatenate(shards)], [np.concatenate(heads)])


def train_symbol(sym, devices):
    """Outputs, gradients of the input, gradients of parameters summed over devices, and statistics, by name."""
    shards, heads = data(len(devices))
    executors = [sym.simple_bind(device, data=shard.shape) for device, shard in zip(devices, shards)]
    for executor in executors:
        for values, arrays in zip(parameters(), (executor.arg_dict, executor.aux_dict)):
            for name, value in values.items():
                arrays[name][:] = mx.nd.array(value)
    for _ in range(STEPS):
        for executor, shard in zip(executors, shards):
            executor.forward(is_train=True, data=mx.nd.array(shard))
        for executor, head, device in zip(executors, heads, devices):
            executor.backward([mx.nd.array(head, ctx=device)])
        mx.nd.waitall()
    return (
        np.concatenate([executor.outputs[0].asnumpy() for executor in executors]),
        np.concatenate([executor.grad_dict["data"].asnumpy() for executor in executors]),
        {name: sum(item.grad_dict[name].asnumpy() for item in executors) for name in parameters()[0]},
        [{name: item.aux_dict[name].asnumpy() for name in parameters()[1]} for item in executors],
    )


def train_block(block, devices):
    shards, heads = data(len(devices))
    block.initialize(ctx=devices)
    for values in parameters():
        for name, value in values.items():
            block.collect_params()[name].set_data(mx.nd.array(value))
    for _ in range(STEPS):
        inputs = [mx.nd.array(shard, ctx=device) for shard, device in zip(shards, devices)]
        for item in inputs:
            item.attach_grad()
        with autograd.record():
            outputs = [block(item) for item in inputs]
        autograd.backward(outputs, [mx.nd.array(head, ctx=device) for head, device in zip(heads, devices)])
        mx.nd.waitall()
    known = block.collect_params()
    return (
        np.concatenate([item.asnumpy() for item in outputs]),
        np.concatenate([item.grad.asnumpy() for item in inputs]),
        {name: sum(known[name].grad(device).asnumpy() for device in devices) for name in parameters()[0]},
        [{name: known[name].data(device).asnumpy() for name in parameters()[1]} for device in devices],
    )


@pytest.fixture(scope="module")
def expected():
    return train_symbol(plain_network(), cpus(1))


def compare(seen, expected):
    outputs, inputs, gradients, statistics = seen
    assert oracle.distance([outputs], [expected[0]]) < 1e-5
    assert oracle.distance([inputs], [expected[1]]) < 1e-4
    for name, value in expected[2].items():
        if name != "second_gamma":  # which is fixed
            assert np.abs(gradients[name] - value).max() < 1e-4 * max(np.abs(value).max(), 1), name
    for of_device in statistics:
        for name, value in expected[3][0].items():
            assert oracle.distance([of_device[name]], [value]) < 1e-5, name


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


@pytest.mark.parametrize("file", FILES, indirect=True)
def test_a_symbol_as_mxnet_loads_it(file, expected):
    sym = mx.sym.load(file)
    compare(train_symbol(sym, cpus(2)), expected)
    assert sym.attr_dict()["second"]["__lr_mult__"] == "0.5"


@pytest.mark.parametrize("file", FILES, indirect=True)
def test_a_symbol_that_is_put_on_a_back_end(file, expected, backend):
    words = r"'first': backend='portable' cannot run here: only the native back end has renorm"
    if backend == "portable" and file == path_of("native"):
        with pytest.raises(RuntimeError, match=words):
            gluon_syncbn.symbol.load(file)
        return
    sym = gluon_syncbn.symbol.load(file)
    assert ("gluon_syncbn_native" in sym.tojson()) == (backend == "native")
    compare(train_symbol(sym, cpus(2)), expected)


@pytest.mark.parametrize("file", FILES, indirect=True)
@pytest.mark.parametrize("flags", [{}, {"static_alloc": True, "static_shape": True}], ids=["hybridize", "static"])
def test_a_block(file, flags, expected):
    block = gluon.SymbolBlock.imports(file, ["data"])
    block.hybridize(**flags)
    compare(train_block(block, cpus(2)), expected)
    first, second = block.hidden_blocks()
    of_first = {"num_devices": 2, "group_size": 2, "timeout": 30.0, "process_group": "none"}
    if "native" in Path(file).name:
        of_first["renorm"] = ((0.0, 1.0, 0.0),)
    assert of_first.items() <= first._sync.options.options().items()
    assert first._sync.options.activation is None  # the block's symbol has it
    assert second._sync.options.options().items() >= {"num_devices": 2, "group_size": None, "renorm": None}.items()


@pytest.mark.parametrize("file", FILES, indirect=True)
def test_what_its_marks_say(file):
    first, second = find_norms(Graph(Path(file).read_text(encoding="utf-8")))
    assert (first.name, first.spec.epsilon, first.spec.momentum, first.spec.scale) == ("first", 1e-4, 0.8, True)
    assert (second.name, second.spec.epsilon, second.spec.momentum, second.spec.scale) == ("second", 1e-3, 0.9, False)
    assert first.parameters == {
        "gamma": "first_gamma",
        "beta": "first_beta",
        "running_mean": "first_moving_mean",
        "running_var": "first_moving_var",
    }
    assert second.hidden == {"__lr_mult__": "0.5"}


@pytest.mark.parametrize("file", FILES, indirect=True)
def test_it_can_be_made_plain_or_for_more_devices(file, expected):
    plain = gluon_syncbn.plain_symbol(mx.sym.load(file))
    assert "syncbn" not in plain.tojson()
    compare(train_symbol(plain, cpus(1)), expected)
    again = gluon_syncbn.convert_symbol(mx.sym.load(file), 4, timeout=9)
    assert [norm.spec.num_devices for norm in find_norms(Graph(again))] == [4, 4]
    assert [norm.spec.group_size for norm in find_norms(Graph(again))] == [2, None]


@pytest.mark.parametrize("load", [mx.sym.load, gluon_syncbn.symbol.load])
@pytest.mark.parametrize("name", ["native", "portable"])
def test_one_that_does_not_know_its_devices_predicts(name, load):
    """Its number of devices was written as 0."""
    executor = load(path_of(f"{name}-without-number")).simple_bind(mx.cpu(0), data=SHAPES[0])
    executor.aux_dict["first_moving_var"][:] = 1
    shard = random_shards(SHAPES)[0]
    executor.forward(is_train=False, data=mx.nd.array(shard))
    assert np.abs(executor.outputs[0].asnumpy() - shard / np.sqrt(1 + 1e-3)).max() < 1e-5
    executor.forward(is_train=True, data=mx.nd.array(shard))
    with pytest.raises(mx.MXNetError, match="'first': its graph does not say on how many devices it trains"):
        executor.outputs[0].asnumpy()
    gluon_syncbn.abandon_step()


def test_a_layer_that_was_plain_for_now_synchronizes_in_a_block(backend):
    """It was on one device when its symbol was made."""
    block = gluon.SymbolBlock.imports(path_of("plain-for-now"), ["data"])
    (norm,) = block.hidden_blocks()
    assert (norm._sync.options.group_size, norm._sync.options.timeout) == (2, 30.0)
    block.initialize(ctx=cpus(2))
    for name, value in (("gamma", 1), ("beta", 0), ("running_mean", 0), ("running_var", 1)):
        block.collect_params()[f"first_{name}"].set_data(mx.nd.full(3, value))
    shards = random_shards(SHAPES)
    with autograd.record():
        outputs = [block(mx.nd.array(shard, ctx=device)) for shard, device in zip(shards, cpus(2))]
    made = oracle.batch_norm(shards, np.ones(3), np.zeros(3))
    assert oracle.distance([item.asnumpy() for item in outputs], [np.maximum(item, 0) for item in made.outputs]) < 1e-5
    running_mean = block.collect_params()["first_running_mean"].data(mx.cpu(1)).asnumpy()
    assert oracle.distance([running_mean], [0.2 * made.mean]) < 1e-5


def test_the_files_are_in_the_old_form():
    """Or nothing here would show anything."""
    marks, groups = [], []
    for path in DATA.glob("*-0.1.0-symbol.json"):
        for node in json.loads(path.read_text(encoding="utf-8"))["nodes"]:
            attributes = node.get("attrs", {})
            marks += [json.loads(attributes["__syncbn__"])] if "__syncbn__" in attributes else []
            groups += [json.loads(attributes["group"])] if "group" in attributes else []
    assert len(marks) == 7 and len(groups) == 6
    old = {"axis", "eps", "momentum", "fix_gamma", "relu", "options"}
    assert all(set(mark) - {"is_plain"} == old for mark in marks)
    words = "name num_devices group_size timeout kvstore dtype momentum epsilon scale process_group renorm"
    assert all(list(group) == re.findall(r"\w+", words) for group in groups)
