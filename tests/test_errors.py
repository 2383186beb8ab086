"""Bad input gets a clear error, at the earliest point that can know, with the layer's name."""

import re

import mxnet as mx
import pytest
from mxnet import autograd
from mxnet.gluon import nn
from testing import cpus, initialized, options_of, run_python, sequential

from gluon_syncbn import SyncBatchNorm, convert_batchnorm, convert_symbol, convert_sync_batchnorm, symbol

COUNT, SECONDS = "{} must be a positive integer, not {}.", "the timeout must be a positive number of seconds, not {1}."
OPTIONS = [
    ({"num_devices": 0}, ValueError, COUNT),
    ({"num_devices": 2.0}, ValueError, COUNT),
    ({"num_devices": True}, ValueError, COUNT),
    ({"group_size": -1}, ValueError, COUNT),
    ({"timeout": 0}, ValueError, SECONDS),
    ({"timeout": "soon"}, ValueError, SECONDS),
    ({"timeout": float("nan")}, ValueError, SECONDS),
    ({"backend": "fast"}, ValueError, "backend must be one of auto, native, portable"),
    ({"backend": "native", "kvstore": "local"}, RuntimeError, "only the portable back end uses one"),
    ({"activation": "tanh"}, ValueError, "activation must be 'relu' or None"),
    ({"kvstore": "dist_sync"}, ValueError, "there are process_group='horovod' and process_group='mpi'"),
    ({"kvstore": 3}, TypeError, "kvstore must be a name or an mxnet KVStore"),
]


@pytest.mark.parametrize("options, error, words", OPTIONS)
def test_options(options, error, words):
    (name, value), *_ = options.items()
    words = re.escape(words.format(name, repr(value)))
    with pytest.raises(error, match=f"^SyncBatchNorm 'stem': .*{words}"):
        SyncBatchNorm(prefix="stem_", **options)
    net = nn.BatchNorm()
    if name == "activation":
        error, words = TypeError, "activation is no option of a conversion"
    with pytest.raises(error, match=words):
        convert_sync_batchnorm(net, **options)
    assert type(net) is nn.BatchNorm


def test_kvstore_with_an_optimizer():
    store = mx.kv.create("local")
    store.set_optimizer(mx.optimizer.SGD())
    test_options({"kvstore": store}, ValueError, "this KVStore has an optimizer")


MISSPELT = {"tiemout": "timeout", "groupsize": "group_size", "in_plce": "in_place", "kv_store": "kvstore", "q": None}


@pytest.mark.parametrize("name, meant", MISSPELT.items())
def test_a_misspelt_option(name, meant):
    words = re.escape(f"unknown option '{name}'. " + (f"Did you mean '{meant}'?" if meant else "There are "))
    with pytest.raises(TypeError, match=f"SyncBatchNorm: {words}"):
        SyncBatchNorm(**{name: 2})
    net = sequential(nn.BatchNorm(), SyncBatchNorm(timeout=7))
    with pytest.raises(TypeError, match=f"convert_sync_batchnorm: {words}"):
        convert_sync_batchnorm(net, **{name: 2})
    assert type(net[0]) is nn.BatchNorm and options_of(net[1])["timeout"] == 7
    with pytest.raises(TypeError, match=f"convert_symbol: {words}"):
        convert_symbol(mx.sym.BatchNorm(mx.sym.var("data")), 2, **{name: 2})
    with pytest.raises(TypeError, match=f"SyncBatchNorm 'stem': {words}"):
        symbol.SyncBatchNorm(mx.sym.var("data"), name="stem", **{name: 2})


def test_options_that_batchnorm_has_itself_are_known_by_name():
    with pytest.raises(TypeError, match="SyncBatchNorm: unknown option 'epsilom'. Did you mean 'epsilon'"):
        SyncBatchNorm(epsilom=1e-3)
    assert SyncBatchNorm(in_channels=3, prefix="stem_", params=None, gamma_initializer="zeros").name == "stem"
    with pytest.raises(ValueError, match="axis=64 is no axis .* contrib's .* write in_channels=64"):
        SyncBatchNorm(64)


@pytest.mark.parametrize("convert", [convert_sync_batchnorm, convert_batchnorm])
def test_what_is_no_net(convert):
    with pytest.raises(TypeError, match="expected a Gluon block, not str"):
        convert("net")


# Options, devices, shape of the input, its dtype; the error, and that of a graph where it is another.
NUMBER = r"num_devices=3, but its parameters live on 2 \(cpu\(0\), cpu\(1\)\)"
CHANNELS = (
    r"it has 5 channels, but axis 1 of the input of shape \(2, 3, 4, 4\) has 3",
    dict.fromkeys(["native", "portable"], "the input has 3 channels, gamma has 5"),
)
CAST = r"the input is float64, parameters and statistics are float32; call cast\(%s\)"
MXNETS_OWN = "Expected 'float64' v.s. given 'float32' at 'gamma'"
DTYPES = CAST % "'float64'", {"native": CAST % "", "portable": MXNETS_OWN}
TRAINING = {
    "more devices": ({"num_devices": 3}, cpus(2), (2, 3, 4, 4), "float32", NUMBER, None),
    "twice": ({}, [mx.cpu(0)] * 2, (2, 3, 4, 4), "float32", r"name one device twice \(cpu\(0\), cpu\(0\)\)", None),
    "groups": ({"group_size": 2}, cpus(3), (2, 3, 4), "float32", "group_size=2 does not divide its 3 devices", None),
    "channels": ({"in_channels": 5}, cpus(2), (2, 3, 4, 4), "float32", *CHANNELS),
    "dtype": ({}, cpus(2), (2, 3, 4, 4), "float64", *DTYPES),
    "1 axis": ({}, cpus(2), (4,), "float32", "axis=1 does not fit an input of shape", {}),
    "axis 2": ({"axis": 2}, cpus(2), (4, 3), "float32", "axis=2 does not fit an input of shape", {}),
    "axis -3": ({"axis": -3}, cpus(2), (4, 3), "float32", "axis=-3 does not fit an input of shape", {}),
}


@pytest.mark.parametrize("hybridized", [False, True], ids=["imperative", "hybridized"])
@pytest.mark.parametrize("case", list(TRAINING))
def test_a_first_step_that_cannot_be(case, hybridized, backend, capfd):
    options, devices, shape, dtype, words, in_graph = TRAINING[case]
    net = initialized(sequential(SyncBatchNorm(**{"in_channels": 3, "prefix": "stem_", **options})), devices)
    kind, where = ValueError, "SyncBatchNorm 'stem': .*"
    if hybridized:
        net.hybridize()
        if in_graph is not None:
            kind, words, where = mx.MXNetError, in_graph.get(backend, ""), "stem.*"
    for _ in range(2):  # the second call has the same error
        with pytest.raises(kind) as caught:
            with autograd.record():
                net(mx.nd.ones(shape, dtype=dtype))
            mx.nd.waitall()
        # Where MXNet loses the text of an error, the operator has printed it.
        told = str(caught.value) + capfd.readouterr().out
        assert re.search(where + words, told, re.DOTALL), told


NAIVE = """
from testing import *
def forward(count):
    layer = initialized(SyncBatchNorm(in_channels=3, prefix='stem_'), count)
    with mx.autograd.record():
        layer(mx.nd.ones((2, 3))).wait_to_read()
forward(1)
sym = gluon_syncbn.symbol.SyncBatchNorm(mx.sym.var('data'), num_devices=1, name='alone', backend='native')
executor = sym.simple_bind(mx.cpu(), data=(2, 3))
executor.forward(is_train=True, data=mx.nd.ones((2, 3)))
executor.backward(mx.nd.ones((2, 3)))
assert executor.outputs[0].asnumpy().sum() == 0 == executor.grad_dict['data'].asnumpy().sum()
print('ONE DEVICE WORKS')
forward(2)
"""


def test_naive_engine_and_a_timeout_of_the_environment(backend):
    done = run_python(NAIVE, status=1, MXNET_ENGINE_TYPE="NaiveEngine")
    assert done.stdout.strip() == "ONE DEVICE WORKS", done.stdout + done.stderr
    assert "RuntimeError: SyncBatchNorm 'stem': MXNET_ENGINE_TYPE=NaiveEngine" in done.stderr
    words = "GLUON_SYNCBN_TIMEOUT: the timeout must be a positive number of seconds, not 'tomorrow'"
    assert words in run_python(NAIVE, status=1, GLUON_SYNCBN_TIMEOUT="tomorrow").stderr


MANY = """
from gluon_syncbn.base import library
print([library.core.gluon_syncbn_make_processes(0, 1, b"", 1) for _ in range(1026)][1022:])
"""


def test_too_many_groups_of_processes():
    """Which are never dropped; the id -1 is an error in Python."""
    assert run_python(MANY).stdout == "[1022, 1023, -1, -1]\n"
