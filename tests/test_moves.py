"""Weights may be there before the devices are.

Whatever the order of building, loading, tracing, moving and hybridizing, a net that trains on several devices
synchronizes.
"""

import json

import mxnet as mx
import numpy as np
import oracle
import pytest
from gluoncv import model_zoo
from gluoncv.model_zoo import model_store
from gluoncv_scripts import write_base_weights
from harness import MODES, cpus, random_affine, random_shards, set_mode, step
from mxnet import gluon
from mxnet.gluon import nn

from gluon_syncbn import SyncBatchNorm

DEVICES = cpus(2)
SHAPE = (2, 3, 4, 5)
modes = pytest.mark.parametrize("mode", list(MODES))


def net_of(layer):
    net = nn.HybridSequential()
    net.add(layer)
    return net


def loaded_on_one(backend, **options):
    """A net with weights, on cpu(0), as GluonCV loads base weights."""
    layer = SyncBatchNorm(in_channels=3, backend=backend, **options)
    net = net_of(layer)
    net.initialize(ctx=mx.cpu(0))
    random_affine(layer, 3)
    return net, layer


def check(block, parameters, devices=DEVICES, count=2):
    """``count`` steps on these devices give what one device would compute on the whole batch."""
    gamma, beta, mean, var = parameters
    for seed in range(count):
        shards, heads = (random_shards([SHAPE] * len(devices), seed=seed + more) for more in (0, 50))
        before = mean.data(devices[0]).asnumpy()
        outputs, inputs = step(block, shards, heads, devices)
        affine = (gamma.data(devices[0]).asnumpy(), beta.data(devices[0]).asnumpy())
        expected = oracle.batch_norm(shards, *affine, heads=heads)
        assert oracle.distance([item.asnumpy() for item in outputs], expected.outputs) < 4e-6
        assert oracle.distance([item.grad.asnumpy() for item in inputs], expected.input_gradients) < 2e-5
        for device in devices:
            assert oracle.distance([mean.data(device).asnumpy()], [0.9 * before + 0.1 * expected.mean]) < 4e-6
    assert len({var.data(device).asnumpy().tobytes() for device in devices}) == 1


def parameters_of(layer):
    return [layer.gamma, layer.beta, layer.running_mean, layer.running_var]


def run_on_one(block):
    """Once in prediction mode and once in training mode, on cpu(0)."""
    array = mx.nd.array(random_shards([SHAPE])[0])
    block(array).wait_to_read()
    with mx.autograd.record():
        block(array)
    mx.nd.waitall()


@modes
@pytest.mark.parametrize("hybridized_first", [True, False])
def test_a_net_that_has_run_on_one_device_moves_to_two(backend, mode, hybridized_first):
    net, layer = loaded_on_one(backend)
    if hybridized_first:
        set_mode(net, mode)
    run_on_one(net)
    if not hybridized_first:
        set_mode(net, mode)
    net.collect_params().reset_ctx(DEVICES)
    check(net, parameters_of(layer))


@modes
def test_there_and_back(backend, mode):
    """One device, two, others, one again: the graph is always that of the devices that train."""
    net, layer = loaded_on_one(backend)
    set_mode(net, mode)
    for devices in (cpus(1), cpus(2), [mx.cpu(1), mx.cpu(2), mx.cpu(3)], cpus(1), cpus(2)):
        net.collect_params().reset_ctx(devices)
        check(net, parameters_of(layer), devices)


@modes
def test_weights_that_are_loaded_before_the_move(backend, mode, tmp_path):
    net, layer = loaded_on_one(backend)
    set_mode(net, mode)
    run_on_one(net)
    net.save_parameters(str(tmp_path / "net.params"))
    net.load_parameters(str(tmp_path / "net.params"))
    net.collect_params().reset_ctx(DEVICES)
    check(net, parameters_of(layer))


@modes
@pytest.mark.parametrize("num_devices", [None, 2])
@pytest.mark.parametrize("has_run", [False, True])
def test_a_symbol_that_is_made_of_weights_on_one_device(backend, mode, num_devices, has_run):
    """As SSD's FeatureExpander does with a pretrained base."""
    net, _ = loaded_on_one(backend, num_devices=num_devices)
    data = mx.sym.var("data")
    block = gluon.SymbolBlock(net(data), data, params=net.collect_params())
    (norm,) = block.hidden_blocks()
    assert norm._sync.options.num_devices == num_devices
    set_mode(block, mode)
    if has_run and num_devices is None:
        run_on_one(block)
    block.collect_params().reset_ctx(DEVICES)
    check(block, parameters_of(norm))


def test_such_a_symbol_is_a_plain_graph_for_everyone_else(backend):
    """What is saved of it needs nothing of ours, and computes the same."""
    net, layer = loaded_on_one(backend, activation="relu")
    array = mx.nd.array(random_shards([SHAPE])[0])
    out = net(mx.sym.var("data"))
    operators = {node["op"] for node in json.loads(out.tojson())["nodes"]}
    assert operators == {"null", "BatchNorm", "relu"}
    arguments = {name: parameter.data() for name, parameter in net.collect_params().items()}
    auxiliary = {name: arguments.pop(name) for name in out.list_auxiliary_states()}
    bound = out.bind(mx.cpu(0), {"data": array, **arguments}, aux_states=auxiliary)
    (result,) = bound.forward()
    assert np.array_equal(result.asnumpy(), net(array).asnumpy())


def test_num_devices_still_counts_where_it_trains(backend):
    net, _ = loaded_on_one(backend, num_devices=2)
    data = mx.sym.var("data")
    block = gluon.SymbolBlock(net(data), data, params=net.collect_params())
    with pytest.raises(ValueError, match="num_devices=2, but its parameters live on 1"):
        run_on_one(block)


def test_norms_without_options_take_over_their_neighbours(backend):
    data = mx.sym.var("data")
    net, _ = loaded_on_one(backend, num_devices=2, timeout=7)
    out = mx.sym.BatchNorm(net(data), name="added", fix_gamma=False)
    block = gluon.SymbolBlock(out, data, params=net.collect_params())
    assert [(norm._sync.options.num_devices, norm._sync.options.timeout) for norm in block.hidden_blocks()] == [
        (2, 7)
    ] * 2


def test_neighbours_that_differ_are_an_error(backend):
    data = mx.sym.var("data")
    first, _ = loaded_on_one(backend, timeout=7)
    second, _ = loaded_on_one(backend, timeout=8)
    out = mx.sym.BatchNorm(second(first(data)), name="added")
    with pytest.raises(ValueError, match="different options, so 'added', a BatchNorm without any"):
        gluon.SymbolBlock(out, data)


@pytest.mark.parametrize("num_devices", [None, 2])
def test_gluoncvs_ssd_with_base_weights(tmp_path, monkeypatch, num_devices):
    """Built as train_ssd.py does: base weights by GluonCV's own look-up, on cpu(0), then the move."""
    digest = write_base_weights(tmp_path, "mobilenet0.25")
    monkeypatch.setitem(model_store._model_sha1, "mobilenet0.25", digest)
    net = model_zoo.get_model(
        "ssd_300_mobilenet0.25_voc",
        pretrained_base=True,
        root=str(tmp_path),
        norm_layer=SyncBatchNorm,
        norm_kwargs={"num_devices": num_devices},
    )
    for parameter in net.collect_params().values():
        if parameter._data is None:
            parameter.initialize()
    net.hybridize(static_alloc=True, static_shape=True)
    net.collect_params().reset_ctx(DEVICES)
    inputs = [mx.nd.random.normal(shape=(2, 3, 300, 300), ctx=device) for device in DEVICES]
    with mx.autograd.record():
        outputs = [net(item) for item in inputs]
        loss = sum(item.sum().as_in_context(mx.cpu(0)) for output in outputs for item in output[:2])
    loss.backward()
    statistics = net.collect_params(".*(running|moving)_(mean|var)")
    assert len(statistics.keys()) == 2 * 35
    for name, parameter in statistics.items():
        first, second = (parameter.data(device).asnumpy() for device in DEVICES)
        assert (first == second).all(), name
