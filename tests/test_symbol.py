"""The Symbol and Module interface: several contexts train as one would with the concatenated batch."""

import contextlib
import json
import re

import mxnet as mx
import numpy as np
import oracle
import pytest
from harness import cpus, run_python

import gluon_syncbn
from gluon_syncbn import convert_symbol, plain_symbol
from gluon_syncbn.graphs.graph import Graph
from gluon_syncbn.graphs.norms import MARK, find_norms

pytestmark = pytest.mark.usefixtures("backend")

SHAPE = (6, 3, 8, 8)


def network(norm, **options):
    """Two norms, one behind a convolution and one next to the output; all that Module needs."""
    data = mx.sym.var("data")
    x = mx.sym.Convolution(data, num_filter=5, kernel=(3, 3), name="conv")
    x = norm(x, fix_gamma=False, name="bn0", **options)
    x = mx.sym.Activation(x, act_type="relu", name="relu")
    x = mx.sym.FullyConnected(x, num_hidden=4, name="fc")
    x = norm(x, fix_gamma=True, eps=1e-4, momentum=0.8, name="bn1", **options)
    return mx.sym.SoftmaxOutput(x, name="softmax")


def make_module(sym, devices, parameters=None):
    module = mx.mod.Module(sym, context=devices)
    module.bind([("data", SHAPE)], [("softmax_label", SHAPE[:1])], inputs_need_grad=True)
    mx.random.seed(0)
    module.init_params(mx.init.Xavier(), *(parameters or ()))
    module.init_optimizer(optimizer_params={"learning_rate": 0.1})
    return module


def train(module, steps=3):
    """Outputs, input gradients and parameters after a few steps of training on random batches."""
    rng = np.random.RandomState(0)
    for _ in range(steps):
        batch = mx.io.DataBatch(
            [mx.nd.array(rng.standard_normal(SHAPE) * 2 + 1)], [mx.nd.array(rng.randint(4, size=SHAPE[0]))]
        )
        module.forward_backward(batch)
        module.update()
    outputs = module.get_outputs()[0].asnumpy(), module.get_input_grads()[0].asnumpy()
    arguments, states = module.get_params()
    return outputs, {name: item.asnumpy() for name, item in {**arguments, **states}.items()}


def assert_close(actual, expected):
    for a, b in zip(actual[0], expected[0]):
        assert oracle.distance([a], [b]) < 1e-4
    assert actual[1].keys() == expected[1].keys()
    for name, value in expected[1].items():
        assert np.abs(actual[1][name] - value).max() < 1e-4 * max(np.abs(value).max(), 0.1), name


@pytest.fixture(scope="module")
def expected():
    return train(make_module(network(mx.sym.BatchNorm), cpus(1)))


@pytest.mark.parametrize("count", [2, 3])
def test_a_module_trains_as_on_one_device(count, expected):
    sym = network(gluon_syncbn.symbol.SyncBatchNorm, num_devices=count, timeout=20)
    assert_close(train(make_module(sym, cpus(count))), expected)


def test_a_converted_symbol_trains_as_on_one_device(expected):
    plain = network(mx.sym.BatchNorm)
    sym = convert_symbol(plain, num_devices=2, timeout=20)
    assert sym.list_arguments() == plain.list_arguments()
    assert sym.list_auxiliary_states() == plain.list_auxiliary_states()
    assert sym.list_outputs() == plain.list_outputs()
    assert {"conv_output", "bn0_output", "bn1_output"} <= set(sym.get_internals().list_outputs())
    assert_close(train(make_module(sym, cpus(2))), expected)


def test_without_conversion_the_devices_would_differ(expected):
    """That the tests above can fail."""
    with pytest.raises(AssertionError):
        assert_close(train(make_module(network(mx.sym.BatchNorm), cpus(2))), expected)


def test_fit_and_checkpoints(tmp_path):
    """`Module.fit`, a checkpoint, and training on with another number of devices than it was saved with."""
    rng = np.random.RandomState(0)
    labels = rng.randint(4, size=24)
    data = rng.standard_normal((24, *SHAPE[1:])) + labels[:, None, None, None]
    prefix = str(tmp_path / "net")
    sym = network(gluon_syncbn.symbol.SyncBatchNorm, num_devices=2, timeout=20)
    module = mx.mod.Module(sym, context=cpus(2))
    iterator = mx.io.NDArrayIter(data, labels, SHAPE[0])
    module.fit(iterator, num_epoch=8, initializer=mx.init.Xavier(), optimizer_params={"learning_rate": 0.1})
    accuracy = dict(module.score(iterator, "acc"))["accuracy"]
    assert accuracy > 0.6
    module.save_checkpoint(prefix, 1)
    sym, arguments, states = mx.model.load_checkpoint(prefix, 1)
    for loaded, devices in (
        (sym, cpus(2)),
        (convert_symbol(sym, num_devices=3, timeout=20), cpus(3)),
        (plain_symbol(sym), cpus(1)),
    ):
        again = mx.mod.Module(loaded, context=devices)
        again.bind(iterator.provide_data, iterator.provide_label)
        again.set_params(arguments, states)
        iterator.reset()
        assert dict(again.score(iterator, "acc"))["accuracy"] == pytest.approx(accuracy)
    assert "Custom" not in plain_symbol(sym).tojson()


def test_a_saved_symbol_loads_where_only_the_package_was_imported(tmp_path, expected):
    file = str(tmp_path / "net-symbol.json")
    network(gluon_syncbn.symbol.SyncBatchNorm, num_devices=2, timeout=20).save(file)
    code = f"""
import sys
sys.path.insert(0, 'tests')
import gluon_syncbn
import mxnet as mx
sym = mx.sym.load({file!r})
module = mx.mod.Module(sym, context=[mx.cpu(0), mx.cpu(1)])
module.bind([('data', {SHAPE})], [('softmax_label', {SHAPE[:1]})])
module.init_params()
module.forward_backward(mx.io.DataBatch([mx.nd.random.normal(shape={SHAPE})], [mx.nd.zeros({SHAPE[0]})]))
print('SUM', module.get_outputs()[0].sum().asscalar())
"""
    done = run_python(code)
    assert "SUM 6" in done.stdout or "SUM 5.99" in done.stdout, done.stdout + done.stderr
    assert_close(train(make_module(mx.sym.load(file), cpus(2))), expected)


def test_a_symbol_of_the_compiled_back_end_loads_on_the_portable_one(tmp_path, expected, backend):
    if backend == "portable":
        sym = network(gluon_syncbn.symbol.SyncBatchNorm, num_devices=2, timeout=20, backend="native", activation="relu")
        file = str(tmp_path / "net-symbol.json")
        sym.save(file)
        loaded = gluon_syncbn.symbol.load(file)
        assert "gluon_syncbn_native" in sym.tojson() and "gluon_syncbn_native" not in loaded.tojson()
        sym = loaded
    else:
        sym = network(gluon_syncbn.symbol.SyncBatchNorm, num_devices=2, timeout=20, activation="relu")
    reference = train(make_module(network(relu_norm), cpus(1)))
    assert_close(train(make_module(sym, cpus(2))), reference)


def relu_norm(*args, **kwargs):
    return mx.sym.relu(mx.sym.BatchNorm(*args, **kwargs))


def test_one_that_does_not_come_is_an_error():
    sym = network(gluon_syncbn.symbol.SyncBatchNorm, num_devices=3, timeout=1)
    module = make_module(sym, cpus(2))
    with pytest.raises(mx.MXNetError, match=r"'bn0': forward pass waited 1 s for 1 of 3 devices. Arrived"):
        train(module, 1)
    gluon_syncbn.abandon_step()


@pytest.mark.parametrize(
    "options, count, text",
    [({"num_devices": None}, 2, "does not say on how many devices"), ({"num_devices": 2}, 3, "was built for cpu")],
)
def test_wrong_numbers_of_devices(options, count, text):
    module = make_module(network(gluon_syncbn.symbol.SyncBatchNorm, timeout=20, **options), cpus(count))
    with pytest.raises(mx.MXNetError, match=text):
        train(module, 1)
    with contextlib.suppress(mx.MXNetError):
        mx.nd.waitall()


def test_groups_and_nodes_that_share_their_statistics(backend):
    """Pairs of four devices; the running mean that two nodes share sees both, in the order of the graph."""
    data = mx.sym.var("data")
    variables = [mx.sym.var(f"shared_{name}") for name in ("gamma", "beta", "moving_mean", "moving_var")]
    first, second = (mx.sym.BatchNorm(item, *variables, fix_gamma=False) for item in (data, data * 3))
    sym = convert_symbol(mx.sym.Group([first, second]), num_devices=4, group_size=2, timeout=20)
    executors = [sym.simple_bind(device, data=(2, 3)) for device in cpus(4)]
    for executor in executors:
        executor.arg_dict["shared_gamma"][:] = 1
    shards = np.random.RandomState(0).standard_normal((4, 2, 3)).astype("float32")
    for _ in range(2):
        for executor, shard in zip(executors, shards):
            executor.forward(is_train=True, data=mx.nd.array(shard))
        mx.nd.waitall()
    for pair in (slice(0, 2), slice(2, 4)):
        expected = oracle.batch_norm(list(shards[pair]), np.ones(3), np.zeros(3), 1, epsilon=1e-3)
        average = 0
        for value in (expected.mean, 3 * expected.mean) * 2:
            average = 0.9 * average + 0.1 * value
        for executor, output in zip(executors[pair], expected.outputs):
            assert oracle.distance([executor.outputs[0].asnumpy()], [output]) < 1e-5
            np.testing.assert_allclose(executor.aux_dict["shared_moving_mean"].asnumpy(), average, rtol=1e-5)


def test_hidden_attributes_and_frozen_nodes_stay():
    data = mx.sym.var("data")
    x = mx.sym.BatchNorm(data, name="a", attr={"__lr_mult__": "0.5"})
    x = mx.sym.BatchNorm(x, name="b", use_global_stats=True)
    sym = convert_symbol(x, num_devices=2)
    assert sym.attr_dict()["a"]["__lr_mult__"] == "0.5"
    assert sym.attr_dict()["b"]["use_global_stats"] == "True"
    assert plain_symbol(sym).attr_dict()["a"]["__lr_mult__"] == "0.5"
    assert plain_symbol(sym).tojson() == plain_symbol(plain_symbol(sym)).tojson()


def test_bad_input():
    data = mx.sym.var("data")
    norm = gluon_syncbn.symbol.SyncBatchNorm
    with pytest.raises(TypeError, match="data must be a Symbol, not NDArray"):
        norm(mx.nd.ones((1, 1)))
    with pytest.raises(ValueError, match="'x': num_devices must be a positive integer"):
        norm(data, num_devices=0, name="x")
    with pytest.raises(ValueError, match="'x': group_size=2 does not divide its 3 devices"):
        norm(data, num_devices=3, group_size=2, name="x")
    with pytest.raises(ValueError, match="'x': dtype must be"):
        norm(data, num_devices=2, dtype="float16", name="x")
    with pytest.raises(TypeError, match="'x': a symbol can be saved, so kvstore must be a name"):
        norm(data, num_devices=2, kvstore=mx.kv.create("local"), name="x")
    with pytest.raises(ValueError, match="num_devices must be given"):
        convert_symbol(norm(data), None)
    with pytest.raises(TypeError, match="expected a Symbol"):
        convert_symbol(mx.gluon.nn.BatchNorm(), 2)
    statistics = mx.sym.BatchNorm(data, name="x", output_mean_var=True)
    with pytest.raises(ValueError, match="mean or variance of 1 BatchNorm nodes"):
        convert_symbol(statistics, 2)


WRONG = {
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
}


@pytest.mark.parametrize("text", list(WRONG))
def test_a_loaded_symbol_whose_group_could_not_work_is_refused(backend, text, capfd):
    """Not read beyond, not waited for: it may come from any file."""
    sym = gluon_syncbn.symbol.SyncBatchNorm(mx.sym.var("data"), num_devices=2, name="x", backend=backend)
    graph = json.loads(sym.tojson())
    for node in graph["nodes"]:
        if node["op"] == "Custom":
            node["attrs"]["group"] = json.dumps({**json.loads(node["attrs"]["group"]), **WRONG[text]})
    with pytest.raises(mx.MXNetError) as caught:
        mx.sym.load_json(json.dumps(graph)).simple_bind(mx.cpu(0), data=(2, 3))
    # Where MXNet loses the text of an error, it has printed it.
    assert text in (str(caught.value) if backend == "native" else capfd.readouterr().out)


def test_a_group_text_that_is_none_is_refused(backend, capfd):
    sym = gluon_syncbn.symbol.SyncBatchNorm(mx.sym.var("data"), num_devices=2, name="x", backend=backend)
    graph = json.loads(sym.tojson())
    (custom,) = (node for node in graph["nodes"] if node["op"] == "Custom")
    custom["attrs"]["group"] = "{not a group"
    with pytest.raises(mx.MXNetError) as caught:
        mx.sym.load_json(json.dumps(graph)).simple_bind(mx.cpu(0), data=(2, 3))
    told = str(caught.value) if backend == "native" else capfd.readouterr().out
    assert "describes its group as '{not a group'" in told


@pytest.mark.parametrize("value", [{"axis": "3"}, {"in_place": 1}, {"kvstore": 5}, {"process_group": 7}, {"eps": 1}])
def test_a_damaged_mark_is_a_value_error(value, tmp_path):
    sym = gluon_syncbn.symbol.SyncBatchNorm(mx.sym.var("data"), num_devices=2, name="x")
    graph = json.loads(sym.tojson())
    (last,) = (node for node in graph["nodes"] if "__syncbn__" in node.get("attrs", {}))
    mark = {**json.loads(last["attrs"]["__syncbn__"]), **value}
    if "eps" in value:  # as version 0.1.0 wrote it, but without the rest
        mark = {"options": {}, **value}
    last["attrs"]["__syncbn__"] = json.dumps(mark)
    (tmp_path / "x.json").write_text(json.dumps(graph), encoding="utf-8")
    with pytest.raises(ValueError, match="'x'"):
        gluon_syncbn.symbol.load(tmp_path / "x.json")


def test_an_older_portable_symbol_with_a_native_option_does_not_train_without_it():
    """Version 0.1.0 had both on the portable back end."""
    sym = gluon_syncbn.symbol.SyncBatchNorm(mx.sym.var("data"), num_devices=2, name="x", backend="portable")
    graph = json.loads(sym.tojson())
    (custom,) = (node for node in graph["nodes"] if node["op"] == "Custom")
    described = {**json.loads(custom["attrs"]["group"]), "renorm": [[0, 3, 5]]}
    custom["attrs"]["group"] = json.dumps(described)
    loaded = mx.sym.load_json(json.dumps(graph))
    executors = [loaded.simple_bind(device, data=(2, 3)) for device in cpus(2)]
    for executor in executors:
        executor.forward(is_train=False)[0].wait_to_read()  # to predict needs nothing of it
    words = "'x': it runs on the portable back end, which has no renorm. Load its symbol with gluon_syncbn.symbol.load"
    with pytest.raises(mx.MXNetError, match=words):  # the second forward() raises it, if the first has failed by then
        for executor in executors:
            executor.forward(is_train=True)
        executors[0].outputs[0].wait_to_read()
    gluon_syncbn.abandon_step()


def test_a_block_before_its_devices_are_known_is_checked_as_a_symbol(monkeypatch):
    data = mx.sym.var("data")
    with pytest.raises(ValueError, match="group_size=3 does not divide its 4 devices"):
        gluon_syncbn.SyncBatchNorm(num_devices=4, group_size=3)(data)
    monkeypatch.setenv("MXNET_ENGINE_TYPE", "NaiveEngine")
    with pytest.raises(RuntimeError, match="2 devices could never meet"):
        gluon_syncbn.SyncBatchNorm(num_devices=2)(data)


def test_shapes_of_which_only_some_are_known():
    """`BatchNorm` says what it can, and so does the compiled layer, if the number of axes is known."""
    data = mx.sym.var("data")
    ours = gluon_syncbn.symbol.SyncBatchNorm(data, num_devices=2, name="x", backend="native")
    plain = mx.sym.BatchNorm(data, name="x")
    for shape in ((0, 3, 8, 8), (2, 0, 8, 8), (0, 0, 8, 8), (2, 3, 0, 0)):
        assert ours.infer_shape_partial(data=shape) == plain.infer_shape_partial(data=shape)


def test_a_symbol_for_one_device_is_plain():
    sym = network(gluon_syncbn.symbol.SyncBatchNorm, num_devices=1)
    assert "Custom" not in sym.tojson() and '"BatchNorm"' in sym.tojson()


def test_a_second_conversion_keeps_what_it_is_not_given(backend):
    data = mx.sym.var("data")
    options = {"group_size": 1, "timeout": 7.0, "process_group": "none", "fuse": False}
    options.update({"native": {"renorm": ((0.0, 2.0, 1.0),), "in_place": True}, "portable": {}}[backend])
    sym = gluon_syncbn.symbol.SyncBatchNorm(
        data, num_devices=2, activation="relu", dtype="float64", name="bn", **options
    )
    again = convert_symbol(sym, 4, timeout=9)
    (norm,) = find_norms(Graph(again))
    told = {**options, "num_devices": 4, "timeout": 9.0, "dtype": "float64"}
    assert {name: getattr(norm.spec, name) for name in told} == told
    assert norm.spec.activation == "relu" or again.name == "bn_relu"  # which portable has as a node of its own
    with pytest.raises(TypeError, match="convert_symbol: unknown option 'devices'. There are backend, dtype, "):
        convert_symbol(sym, 2, devices=3)
    with pytest.raises(TypeError, match="convert_symbol: unknown option 'activation'"):
        convert_symbol(sym, 2, activation="relu")


def test_a_layer_whose_option_cannot_be_saved_says_so():
    """A symbol that a net is called with may become a block; the option would be gone."""
    layer = gluon_syncbn.SyncBatchNorm(in_channels=3, kvstore=mx.kv.create("local"))
    layer.initialize(ctx=mx.cpu(0))
    with pytest.raises(TypeError, match="a symbol can be saved, so kvstore must be a name"):
        layer(mx.sym.var("data"))


def test_the_requested_back_end_reaches_a_block_of_the_symbol():
    layer = gluon_syncbn.SyncBatchNorm(in_channels=3, backend="portable")
    layer.initialize(ctx=mx.cpu(0))
    data = mx.sym.var("data")
    block = mx.gluon.SymbolBlock(layer(data), data, params=layer.collect_params())
    assert block.hidden_blocks()[0]._sync.options.options()["backend"] == "portable"


OTHERS = [{"process_group": "mpi"}, {"process_group": "horovod"}, {"group_size": 4}]
WITHOUT_ENGINES = """
import sys
sys.modules['mpi4py'] = None  # as where it is not installed
sys.modules['horovod.mxnet'] = None
import mxnet as mx, numpy as np
import gluon_syncbn
from mxnet import autograd

folder = FOLDER
x = np.random.RandomState(0).standard_normal((2, 3, 4, 4)).astype('float32')
for load in (mx.sym.load, gluon_syncbn.symbol.load):
    symbol = load(folder + '/net-symbol.json')
    assert gluon_syncbn.plain_symbol(symbol).tojson().count('"op": "BatchNorm"') == 1
    module = mx.mod.Module(symbol, label_names=None, context=mx.cpu(0))
    module.bind([('data', x.shape)], for_training=False)
    module.init_params(mx.init.One())
    module.forward(mx.io.DataBatch([mx.nd.array(x)]), is_train=False)
    print('PREDICTED', np.abs(module.get_outputs()[0].asnumpy() - x / np.sqrt(1 + 1e-3)).max() < 1e-5)
    module.forward(mx.io.DataBatch([mx.nd.array(x)]), is_train=True)
    try:
        module.get_outputs()[0].asnumpy()
    except mx.MXNetError as error:
        print('REFUSED', str(error))
    gluon_syncbn.abandon_step()
block = mx.gluon.SymbolBlock.imports(folder + '/net-symbol.json', ['data'])
block.initialize(mx.init.One(), ctx=[mx.cpu(i) for i in range(DEVICES)])
for name, parameter in block.collect_params().items():
    parameter.set_data(mx.nd.full(3, float(name.endswith(('gamma', 'var')))))
for options in ({}, {'static_alloc': True, 'static_shape': True}):
    block.hybridize(**options)
    print('PREDICTED', np.abs(block(mx.nd.array(x)).asnumpy() - x / np.sqrt(1 + 1e-3)).max() < 1e-5)
try:
    with autograd.record():
        block(mx.nd.array(x)).asnumpy()
except (RuntimeError, ValueError, mx.MXNetError) as error:
    print('REFUSED', str(error))
"""


@pytest.mark.parametrize("options", OTHERS, ids=["mpi", "horovod", "groups over processes"])
@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_symbol_of_several_processes_predicts_where_there_are_none(options, num_devices, tmp_path):
    """They are looked for when it first trains."""
    graph = json.loads(gluon_syncbn.symbol.SyncBatchNorm(mx.sym.var("data"), num_devices=2, name="norm").tojson())
    for node in graph["nodes"]:  # as it would have been written there
        attributes = node.get("attrs", {})
        if "group" in attributes:
            attributes["group"] = json.dumps({**json.loads(attributes["group"]), **options, "num_devices": num_devices})
        if MARK in attributes:
            told = json.loads(attributes[MARK])
            told.update(options, num_devices=num_devices)
            attributes[MARK] = json.dumps(told)
    (tmp_path / "net-symbol.json").write_text(json.dumps(graph))
    done = run_python(f"FOLDER, DEVICES = {str(tmp_path)!r}, {num_devices}\n" + WITHOUT_ENGINES)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert done.stdout.count("PREDICTED True") == 4
    refused = re.findall("REFUSED (.*)", done.stdout)
    words = (
        "does not divide"
        if "group_size" in options
        else f"{'mpi4py' if 'mpi' in str(options) else 'Horovod'} cannot be imported"
    )
    assert len(refused) == 3 and all(words in text and "SyncBatchNorm 'norm'" in text for text in refused), done.stdout


def test_gradients_of_a_prediction_ask_for_no_other_process():
    """A graph of a job of two processes; nobody meets in prediction mode, so nobody connects."""
    sym = gluon_syncbn.symbol.SyncBatchNorm(mx.sym.var("data"), num_devices=2, name="x", backend="native")
    graph = json.loads(sym.tojson())
    for node in graph["nodes"]:
        if node["op"] == "Custom":
            node["attrs"]["group"] = json.dumps({**json.loads(node["attrs"]["group"]), "group_size": 4})
    executor = mx.sym.load_json(json.dumps(graph)).simple_bind(mx.cpu(0), data=(2, 3))
    executor.forward(is_train=False, data=mx.nd.ones((2, 3)))
    executor.backward(mx.nd.ones((2, 3)))
    assert np.allclose(
        executor.grad_dict["data"].asnumpy(), 1 / np.sqrt(1e-3)
    )  # gamma is fixed, the running variance 0
