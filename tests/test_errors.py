"""Bad input gets a clear error, at the earliest point that can know, with the layer's name."""

import re

import mxnet as mx
import pytest
from harness import cpus, run_python
from mxnet import autograd
from mxnet.gluon import nn

from gluon_syncbn import SyncBatchNorm, convert_batchnorm, convert_symbol, convert_sync_batchnorm

pytestmark = pytest.mark.usefixtures("backend")


def train_on(layer, *shapes, dtype="float32"):
    with autograd.record():
        outputs = [layer(mx.nd.ones(shape, ctx=mx.cpu(i), dtype=dtype)) for i, shape in enumerate(shapes)]
    mx.nd.waitall()
    return outputs


@pytest.mark.parametrize(
    "options, error, words",
    [
        ({"num_devices": 0}, ValueError, "num_devices must be a positive integer"),
        ({"num_devices": 2.0}, ValueError, "num_devices must be a positive integer"),
        ({"num_devices": True}, ValueError, "num_devices must be a positive integer"),
        ({"group_size": -1}, ValueError, "group_size must be a positive integer"),
        ({"timeout": 0}, ValueError, "positive number of seconds"),
        ({"timeout": "soon"}, ValueError, "positive number of seconds"),
        ({"timeout": float("nan")}, ValueError, "positive number of seconds"),
        ({"backend": "fast"}, ValueError, "backend must be one of auto, native, portable"),
        ({"backend": "native", "kvstore": "local"}, RuntimeError, "only the portable back end uses one"),
        ({"activation": "tanh"}, ValueError, "activation must be 'relu' or None"),
        ({"kvstore": "dist_sync"}, ValueError, "'dist_sync' is not supported"),
        ({"kvstore": 3}, TypeError, "kvstore must be a name or an mxnet KVStore"),
    ],
)
def test_options(options, error, words):
    with pytest.raises(error, match=words) as caught:
        SyncBatchNorm(prefix="stem_", **options)
    assert "SyncBatchNorm 'stem'" in str(caught.value)
    net = nn.BatchNorm()
    if "activation" in options:
        error, words = TypeError, "activation is no option of a conversion"
    with pytest.raises(error, match=words):
        convert_sync_batchnorm(net, **options)
    assert type(net) is nn.BatchNorm


def test_kvstore_with_an_optimizer():
    store = mx.kv.create("local")
    store.set_optimizer(mx.optimizer.SGD())
    with pytest.raises(ValueError, match="has an optimizer"):
        SyncBatchNorm(kvstore=store)


@pytest.mark.parametrize(
    "given, words",
    [
        ({"tiemout": 3}, "unknown option 'tiemout'. Did you mean 'timeout'?"),
        ({"groupsize": 2}, "unknown option 'groupsize'. Did you mean 'group_size'?"),
        ({"in_plce": True}, "unknown option 'in_plce'. Did you mean 'in_place'?"),
        ({"kv_store": "local"}, "unknown option 'kv_store'. Did you mean 'kvstore'?"),
        ({"q": 1}, "unknown option 'q'. There are "),
    ],
)
def test_a_misspelt_option(given, words):
    with pytest.raises(TypeError, match=re.escape(f"SyncBatchNorm: {words}")):
        SyncBatchNorm(**given)
    net = nn.HybridSequential()
    net.add(nn.BatchNorm(), SyncBatchNorm(timeout=7))
    with pytest.raises(TypeError, match=re.escape(f"convert_sync_batchnorm: {words}")):
        convert_sync_batchnorm(net, **given)
    assert type(net[0]) is nn.BatchNorm and net[1]._sync.options.timeout == 7
    with pytest.raises(TypeError, match=re.escape(f"convert_symbol: {words}")):
        convert_symbol(mx.sym.BatchNorm(mx.sym.var("data")), 2, **given)


def test_options_that_batchnorm_has_itself_are_known_by_name():
    with pytest.raises(TypeError, match="SyncBatchNorm: unknown option 'epsilom'. Did you mean 'epsilon'"):
        SyncBatchNorm(epsilom=1e-3)
    assert SyncBatchNorm(in_channels=3, prefix="stem_", params=None, gamma_initializer="zeros").name == "stem"


def test_what_is_no_net():
    for convert in (convert_sync_batchnorm, convert_batchnorm):
        with pytest.raises(TypeError, match="expected a Gluon block"):
            convert("net")


@pytest.mark.parametrize("hybridize", [False, True])
@pytest.mark.parametrize("num_devices", [1, 3])
def test_num_devices_that_disagrees_with_the_parameters(num_devices, hybridize):
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(SyncBatchNorm(num_devices=num_devices))
    net.initialize(ctx=cpus(2))
    if hybridize:
        net.hybridize()
    with pytest.raises(ValueError, match=rf"'net_batchnorm0'.*num_devices={num_devices}.*cpu\(0\), cpu\(1\)"):
        train_on(net, (2, 3, 4, 4), (2, 3, 4, 4))


@pytest.mark.parametrize("hybridize", [False, True])
def test_one_context_given_twice(hybridize):
    layer = SyncBatchNorm(in_channels=3)
    layer.initialize(ctx=[mx.cpu(0), mx.cpu(0)])
    if hybridize:
        layer.hybridize()
    with pytest.raises(ValueError, match=r"one device twice \(cpu\(0\), cpu\(0\)\)"):
        train_on(layer, (2, 3, 4, 4))


def test_group_size_that_does_not_divide():
    layer = SyncBatchNorm(group_size=2)
    layer.initialize(ctx=cpus(3))
    with pytest.raises(ValueError, match="group_size=2 does not divide its 3 devices"):
        train_on(layer, (2, 3, 4, 4))


def test_wrong_channel_count():
    layer = SyncBatchNorm(in_channels=5, prefix="stem_")
    layer.initialize(ctx=cpus(2))
    with pytest.raises(ValueError, match="'stem': it has 5 channels, but axis 1 of the input of shape"):
        train_on(layer, (2, 3, 4, 4))


def test_wrong_channel_count_in_a_graph(backend, capfd):
    net = nn.HybridSequential()
    net.add(SyncBatchNorm(in_channels=5, prefix="stem_"))
    net.initialize(ctx=cpus(2))
    net.hybridize()
    with pytest.raises(mx.MXNetError, match="stem") as caught:
        train_on(net, (2, 3, 4, 4))
    # Where MXNet loses the text of an error, the operator has printed it.
    told = str(caught.value) if backend == "native" else capfd.readouterr().out
    assert "'stem': the input has 3 channels, gamma has 5" in told


def test_wrong_dtype():
    layer = SyncBatchNorm(in_channels=3, prefix="stem_")
    layer.initialize(ctx=cpus(2))
    with pytest.raises(ValueError, match=r"'stem': the input is float64.*call cast\('float64'\)"):
        train_on(layer, (2, 3, 4, 4), dtype="float64")


@pytest.mark.parametrize("shape, axis", [((4,), 1), ((4, 3), 2), ((4, 3), -3)])
def test_wrong_rank(shape, axis):
    layer = SyncBatchNorm(in_channels=3, axis=axis)
    layer.initialize(ctx=cpus(2))
    with pytest.raises(ValueError, match=f"axis={axis} does not fit"):
        train_on(layer, shape)


def test_naive_engine():
    code = """
import gluon_syncbn, mxnet as mx
def forward(count):
    layer = gluon_syncbn.SyncBatchNorm(in_channels=3, prefix='stem_')
    layer.initialize(ctx=[mx.cpu(i) for i in range(count)])
    with mx.autograd.record():
        layer(mx.nd.ones((2, 3))).wait_to_read()
forward(1)
sym = gluon_syncbn.symbol.SyncBatchNorm(mx.sym.var('data'), num_devices=1, name='alone', backend='native')
executor = sym.simple_bind(mx.cpu(), data=(2, 3))
executor.forward(is_train=True, data=mx.nd.ones((2, 3)))
executor.backward(mx.nd.ones((2, 3)))
print(executor.outputs[0].asnumpy().sum(), executor.grad_dict['data'].asnumpy().sum())
try:
    forward(2)
except RuntimeError as error:
    print(error)
"""
    done = run_python(code, MXNET_ENGINE_TYPE="NaiveEngine")
    assert done.returncode == 0, done.stderr
    assert "SyncBatchNorm 'stem': MXNET_ENGINE_TYPE=NaiveEngine" in done.stdout


def test_timeout_from_the_environment():
    code = """
import gluon_syncbn, mxnet as mx
layer = gluon_syncbn.SyncBatchNorm(in_channels=3)
layer.initialize(ctx=[mx.cpu(0), mx.cpu(1)])
with mx.autograd.record():
    layer(mx.nd.ones((2, 3)))
"""
    done = run_python(code, GLUON_SYNCBN_TIMEOUT="tomorrow")
    assert done.returncode == 1
    assert "GLUON_SYNCBN_TIMEOUT: the timeout must be a positive number of seconds, not 'tomorrow'" in done.stderr


def test_wrong_dtype_in_a_graph():
    net = nn.HybridSequential()
    net.add(SyncBatchNorm(in_channels=3, prefix="stem_"))
    net.initialize(ctx=cpus(2))
    net.hybridize()
    with pytest.raises(mx.MXNetError, match="stem"):
        train_on(net, (2, 3, 4, 4), dtype="float64")
