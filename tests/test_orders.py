"""In every order of calls a net synchronizes, or says why not."""

import mxnet as mx
import numpy as np
import pytest
import testing
from launching import run_job
from mxnet import autograd, gluon
from mxnet.gluon import nn
from testing import check_step, cpus, initialized, layers_of, module_of, on_devices, random_shards, sequential, step

import gluon_syncbn

DEVICES = cpus(2)
SHAPES = [(2, 3, 6, 6), (3, 3, 6, 6)]


@pytest.mark.parametrize("what", [[], ["--symbols"]], ids=["nets", "symbols"])
@pytest.mark.parametrize("count", [60, pytest.param(5000, marks=pytest.mark.long)])
def test_random_orders(count, what, backend, seed):
    """tests/orders.py; others in each run."""
    count //= 1 if backend == "native" else 4
    done = testing.run_program(["tests/orders.py", "--seed", seed, "--count", count, "--backend", backend, *what])
    assert f"0 of {count} orders wrong" in done.stdout


@pytest.mark.parametrize("count", [15, pytest.param(1000, marks=pytest.mark.long)])
def test_random_orders_of_processes(count, seed):
    """The same, of nets that synchronize two processes."""
    done = run_job("mpi", 2, "../orders.py", "--seed", seed, "--count", count)
    assert done.returncode == 0 and done.stdout.count(f"0 of {count} orders wrong") == 2, done.stdout[-3000:]


class Apart:
    """A net whose graph something else runs than Gluon, and so unsynchronized."""

    def __init__(self, **options):
        gluon_syncbn.abandon_step()  # what other tests have left under way
        net = sequential(nn.Conv2D(4, 3, in_channels=3), nn.BatchNorm(in_channels=4))
        initialized(gluon_syncbn.convert_sync_batchnorm(net, **options), DEVICES)
        symbol = net(mx.sym.var("data"))
        self.names, self.parameters = symbol.list_inputs(), net.collect_params()
        self.operator, self.net = mx.nd.CachedOp(symbol), net
        self.trainer = gluon.Trainer(self.parameters, "sgd", {"learning_rate": 0.1})

    def __call__(self, x):
        inputs = [x if name == "data" else self.parameters[name].data(x.context) for name in self.names]
        return self.operator(*inputs)

    def step(self, call=None, devices=DEVICES, update=True, **mode):
        shards = on_devices(random_shards(SHAPES), devices)
        with autograd.record(**mode):
            losses = [((call or self)(shard) ** 2).sum() for shard in shards]
        autograd.backward(losses, **mode)
        if update:
            self.trainer.step(5, ignore_stale_grad=len(devices) < 2)

    def weights(self):
        mx.nd.waitall()
        return [parameter.data(DEVICES[1]).asnumpy().tolist() for parameter in self.parameters.values()]


@pytest.mark.parametrize("update", [True, False], ids=["Trainer.step", "record"])
def test_layers_that_train_apart_are_an_error_before_the_weights_change(update, backend):
    apart = Apart()
    weights = apart.weights()[:2]
    error = pytest.raises(gluon_syncbn.SyncBatchNormError, match="'batchnorm[0-9]+' trained on cpu.0., cpu.1. and did")
    if update:
        with error:
            apart.step()
    else:
        apart.step(update=False)
        with error:
            apart.step(update=False)
    assert apart.weights()[:2] == weights
    for _ in range(2):
        apart.step(apart.net)  # is right


@pytest.mark.parametrize(
    "options, how",
    [({}, {"train_mode": False}), ({}, {"devices": DEVICES[:1]}), ({"group_size": 1}, {}), ({}, {"freeze": True})],
)
def test_layers_that_need_not_synchronize_are_no_error(options, how, backend):
    apart, how = Apart(**options), dict(how)
    if how.pop("freeze", False):
        apart.parameters.setattr("grad_req", "null")
        apart.parameters[apart.names[1]].grad_req = "write"
    for _ in range(2):
        apart.step(**how)


def test_a_module_with_more_devices_than_its_symbol_is_for_is_an_error(backend):
    layer = initialized(gluon_syncbn.SyncBatchNorm(prefix="bn_"))
    symbol = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(layer(mx.sym.var("data")), num_hidden=2), name="softmax")
    for count in (2, 1):
        module = module_of(symbol, DEVICES[:count], (4, 3), softmax_label=(4,))
        module.forward_backward(mx.io.DataBatch([mx.nd.array(random_shards([(4, 3)])[0])], [mx.nd.zeros(4)]))
        if count == 1:
            module.update()
            break
        words = r"'bn_fwd' of the symbol is for one device, and the Module has 2.*convert_symbol\(symbol, 2\)"
        with pytest.raises(gluon_syncbn.SyncBatchNormError, match=words):
            module.update()
        gluon_syncbn.abandon_step()


def test_a_module_with_fewer_devices_than_its_symbol_is_for_is_an_error_at_once(backend):
    made = gluon_syncbn.symbol.SyncBatchNorm(mx.sym.var("data"), num_devices=3, timeout=testing.LONG, name="bn")
    symbol = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(made, num_hidden=2), name="softmax")
    for count in (1, 2):
        module = module_of(symbol, DEVICES[:count], (4, 3), softmax_label=(4,))
        module.forward_backward(mx.io.DataBatch([mx.nd.array(random_shards([(4, 3)])[0])], [mx.nd.zeros(4)]))
        words = rf"'bn' of the symbol is for 3 devices, and the Module has {count}.*convert_symbol\(symbol, {count}\)"
        with pytest.raises(gluon_syncbn.SyncBatchNormError, match=words):
            module.update()
        gluon_syncbn.abandon_step()


def test_an_executor_that_is_called_in_both_modes(backend):
    """MXNet gives operators that are pending the mode of the next call."""
    data = mx.sym.Convolution(mx.sym.var("data"), kernel=(3, 3), num_filter=4)
    symbol = gluon_syncbn.symbol.SyncBatchNorm(data, num_devices=2, timeout=60)
    executors = [symbol.simple_bind(device, data=shape) for device, shape in zip(DEVICES, SHAPES)]
    for _ in range(20):
        for is_train in (False, True):
            for executor in executors:
                executor.forward(is_train=is_train)
        for executor in executors:
            executor.backward(executor.outputs)
    mx.nd.waitall()


# Meetings that readers have found wrong


class Twins(gluon.HybridBlock):
    """Two layers with the same Parameters, of which one is plain and frozen."""

    def __init__(self):
        super().__init__()
        self.a = gluon_syncbn.SyncBatchNorm(in_channels=3, momentum=1, timeout=60)
        self.b = nn.BatchNorm(in_channels=3, use_global_stats=True, epsilon=0.21, params=self.a.params)

    def hybrid_forward(self, F, x):
        return F.concat(self.a(x), self.b(x), dim=1)


def test_a_plain_twin_stays_plain(mode, backend):
    net, shards = initialized(Twins(), DEVICES, mode), random_shards(SHAPES)
    with autograd.record():
        outputs = [net(x) for x in on_devices(shards)]
    for shard, output in zip(shards, outputs):
        np.testing.assert_allclose(output.asnumpy()[:, 3:], shard / 1.1, rtol=1e-5)


def block_of_a_symbol(devices=DEVICES):
    symbol = mx.sym.BatchNorm(mx.sym.var("data") * 2, fix_gamma=False, eps=1e-5, name="bn")
    block = gluon.SymbolBlock(symbol, mx.sym.var("data"))
    for name, value in (("gamma", 2), ("beta", 0.5), ("moving_mean", 0), ("moving_var", 1)):
        block.params[f"bn_{name}"].shape = (3,)
        block.params[f"bn_{name}"].initialize(mx.init.Constant(value), ctx=devices)
    return block


@pytest.mark.parametrize("is_converted", [True, False])
@pytest.mark.parametrize("kind", ["layer", "symbol"])
def test_what_is_frozen_stays_so(kind, is_converted, tmp_path, backend):
    """In a net around it, converted back, exported, and called with a symbol."""
    if kind == "symbol" and not is_converted:
        return  # its nodes are frozen once they have been converted
    part = block_of_a_symbol() if kind == "symbol" else nn.BatchNorm(in_channels=3)
    net = sequential(part, nn.BatchNorm(in_channels=3, use_global_stats=True))
    if is_converted:
        gluon_syncbn.convert_sync_batchnorm(net, timeout=60)
    part.initialize(ctx=DEVICES) if kind == "layer" else None
    net[1].initialize(ctx=DEVICES)
    net.hybridize()

    def train():
        step(net, random_shards(SHAPES), random_shards(SHAPES), DEVICES)
        mx.nd.waitall()
        return {name: item.data(DEVICES[1]).asnumpy().tolist() for name, item in net.collect_params(".*mean").items()}

    before = train()
    gluon_syncbn.freeze_statistics(part)
    assert train() == before != 0
    net.export(str(tmp_path / "net"))
    assert (tmp_path / "net-symbol.json").read_text().count('"use_global_stats": "True"') == 2
    executor = part(mx.sym.var("data")).simple_bind(DEVICES[0], data=SHAPES[0])
    executor.aux_arrays[0][:] = 5
    executor.forward(is_train=True, data=mx.nd.ones(SHAPES[0]))
    mx.nd.waitall()
    assert (executor.aux_arrays[0].asnumpy() == 5).all()
    gluon_syncbn.convert_batchnorm(part)
    assert train() == before


@pytest.mark.skipif(not hasattr(gluon.HybridBlock, "optimize_for"), reason="MXNet has it since 1.8")
@pytest.mark.parametrize("first", ["converted", "taken apart"])
def test_a_symbol_block_that_was_taken_apart(first, backend):
    block = block_of_a_symbol()
    x = mx.nd.array(random_shards(SHAPES)[0])
    for action in ("converted", "taken apart") if first == "converted" else ("taken apart", "converted"):
        if action == "converted":
            gluon_syncbn.convert_sync_batchnorm(block, timeout=60)
        else:
            block.optimize_for(x, backend="MKLDNN")
    net = testing.set_mode(sequential(block), "hybridize")
    (layer,) = layers_of(block)
    for devices in (DEVICES, cpus(4)):
        net.collect_params().reset_ctx(devices)
        shards = random_shards(SHAPES * (len(devices) // 2))
        check_step(lambda x: net(x / 2), testing.reference_of(layer), shards, shards, devices, layer=layer)
    gluon_syncbn.convert_batchnorm(block)
    assert net(x).shape == x.shape


def test_a_copy_of_a_nets_graph_synchronizes(backend):
    """AMP makes such: a SymbolBlock of the graph that a net keeps, with Parameters of its own."""
    layer = gluon_syncbn.SyncBatchNorm(in_channels=3, group_size=2, timeout=60)
    net = initialized(sequential(layer), DEVICES, "hybridize")
    net(mx.nd.ones(SHAPES[0]))
    data, symbol = net._cached_graph
    block = initialized(gluon.SymbolBlock(symbol, data), DEVICES)
    block(mx.nd.ones(SHAPES[0]))
    (layer,) = layers_of(block)
    shards = random_shards(SHAPES)
    check_step(block, testing.reference_of(layer), shards, shards, layer=layer)


@pytest.mark.parametrize("kvstore", ["device", None])
def test_statistics_of_a_time_when_layers_were_plain_are_no_error(kvstore, backend):
    """Nor is a net that learns in prediction mode then, or a block that is made of the net."""
    apart = Apart()
    net = gluon_syncbn.convert_batchnorm(apart.net)
    apart.trainer = gluon.Trainer(apart.parameters, "sgd", kvstore=kvstore)
    for _ in range(2):
        apart.step(net)
    gluon_syncbn.convert_sync_batchnorm(net, timeout=60)
    for _ in range(3):
        apart.step(net, train_mode=False)
    block = gluon.SymbolBlock(net(mx.sym.var("data")), mx.sym.var("data"), params=apart.parameters)
    for _ in range(3):
        apart.step(block)
    with pytest.raises(gluon_syncbn.SyncBatchNormError, match="did not synchronize"):
        gluon_syncbn.convert_sync_batchnorm(block)
        for _ in range(3):  # the first shows only what statistics it begins with
            apart.step()


def test_a_frozen_symbol_may_be_for_one_device(backend):
    layer = initialized(gluon_syncbn.SyncBatchNorm(prefix="bn_", use_global_stats=True))
    module = module_of(mx.sym.MakeLoss(layer(mx.sym.var("data"))), DEVICES, (4, 3))
    module.forward_backward(mx.io.DataBatch([mx.nd.ones((4, 3))], []))
    module.update()


def test_norms_in_the_body_of_a_loop_are_converted_and_made_plain():
    def body(x, state):
        return mx.sym.BatchNorm(x, name="bn", fix_gamma=False), state

    plain, _ = mx.sym.contrib.foreach(body, mx.sym.var("data"), [mx.sym.var("state")])
    converted = gluon_syncbn.convert_symbol(plain, 2)
    assert converted.tojson().count("__syncbn__") == 1
    assert gluon_syncbn.plain_symbol(converted).tojson() == gluon_syncbn.plain_symbol(plain).tojson()


def test_a_symbol_block_with_parameters_of_float16_is_refused_where_it_trains(backend):
    """Not where it is converted: it may be cast before that."""
    block = gluon.SymbolBlock(mx.sym.BatchNorm(mx.sym.var("data"), name="bn"), mx.sym.var("data"))
    for parameter in block.params.values():
        parameter.cast("float16")
    initialized(gluon_syncbn.convert_sync_batchnorm(block), DEVICES)
    with pytest.raises(ValueError, match="'bn': its parameters and statistics are float16"), autograd.record():
        block(mx.nd.ones((2, 3), dtype="float16"))
