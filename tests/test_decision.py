"""What a layer computes where it is called: `layer.decision.decide`, one table for arrays, nets and symbols.

The ways are written by hand, from what the layer promises: it is `nn.BatchNorm` in prediction mode, with frozen
statistics, on one device and where ``group_size=1`` leaves each device by itself; with ``renorm`` it never is in
training. A symbol may be used on other devices later, so a layer that is on one device now is only plain for now.
"""

import dataclasses
import json

import mxnet as mx
import numpy as np
import pytest
from harness import cpus
from mxnet import autograd

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm
from gluon_syncbn.graphs.graph import Graph
from gluon_syncbn.graphs.norms import find_norms
from gluon_syncbn.layer.decision import Site, Way, decide
from gluon_syncbn.layer.spec import LayerSpec

PLAIN, FOR_NOW, OPEN, SYNCHRONIZED = Way.PLAIN, Way.PLAIN_FOR_NOW, Way.OPEN, Way.SYNCHRONIZED

# By ``num_devices``, the devices that there are: 0, 1 and 2. Arrays are always on some.
NET = {
    # group_size, renorm
    (None, False): {
        None: (OPEN, PLAIN, SYNCHRONIZED),
        1: (PLAIN, PLAIN, SYNCHRONIZED),  # on 2 devices that is an error, which is not decided here
        2: (OPEN, PLAIN, SYNCHRONIZED),
    },
    (1, False): {
        None: (PLAIN, PLAIN, PLAIN),
        1: (PLAIN, PLAIN, PLAIN),
        2: (PLAIN, PLAIN, PLAIN),
    },
    (None, True): {
        None: (OPEN, SYNCHRONIZED, SYNCHRONIZED),
        1: (OPEN, SYNCHRONIZED, SYNCHRONIZED),
        2: (OPEN, SYNCHRONIZED, SYNCHRONIZED),
    },
    (1, True): {
        None: (OPEN, SYNCHRONIZED, SYNCHRONIZED),
        1: (OPEN, SYNCHRONIZED, SYNCHRONIZED),
        2: (OPEN, SYNCHRONIZED, SYNCHRONIZED),
    },
}
SYMBOL = {
    (None, False): {
        None: (OPEN, FOR_NOW, OPEN),
        1: (PLAIN, PLAIN, OPEN),
        2: (OPEN, FOR_NOW, OPEN),
    },
    (1, False): {
        None: (FOR_NOW, FOR_NOW, FOR_NOW),
        1: (PLAIN, PLAIN, FOR_NOW),
        2: (FOR_NOW, FOR_NOW, FOR_NOW),
    },
    (None, True): {
        None: (OPEN, FOR_NOW, OPEN),
        1: (OPEN, FOR_NOW, OPEN),
        2: (OPEN, FOR_NOW, OPEN),
    },
    (1, True): {
        None: (OPEN, FOR_NOW, OPEN),
        1: (OPEN, FOR_NOW, OPEN),
        2: (OPEN, FOR_NOW, OPEN),
    },
}
# A file with a ``group_size`` may come from a job of several processes: even where it is for one device, it is kept.
LOADED = {
    **SYMBOL,
    (1, False): {**SYMBOL[1, False], 1: (FOR_NOW, FOR_NOW, FOR_NOW)},
}
CASES = [
    (group_size, renorm, num_devices, count)
    for group_size in (None, 1)
    for renorm in (False, True)
    for num_devices in (None, 1, 2)
    for count in (0, 1, 2)
]


def spec_of(group_size, renorm, num_devices, **more):
    options = {"group_size": group_size, "num_devices": num_devices, "renorm": (2, 1) if renorm else None}
    return LayerSpec.of("x", **options, **more)


@pytest.mark.parametrize("group_size, renorm, num_devices, count", CASES)
def test_what_a_layer_computes(group_size, renorm, num_devices, count):
    spec, devices = spec_of(group_size, renorm, num_devices), cpus(count)
    for is_training in (False, True):
        with autograd.train_mode() if is_training else autograd.predict_mode():
            # A graph is made once, for training and prediction.
            assert decide(spec, devices, Site.NET) is NET[group_size, renorm][num_devices][count]
            assert decide(spec, devices, Site.SYMBOL) is SYMBOL[group_size, renorm][num_devices][count]
            loaded = decide(spec, devices, Site.SYMBOL, is_loaded=True)
            assert loaded is LOADED[group_size, renorm][num_devices][count]
            # Called with arrays, but without parameters on a device, there is nobody to meet.
            expected = NET[group_size, renorm][num_devices][count] if is_training and count else PLAIN
            assert decide(spec, devices, Site.ARRAYS) is expected


@pytest.mark.parametrize("group_size, renorm, num_devices, count", CASES)
def test_frozen_statistics_are_batchnorm_everywhere(group_size, renorm, num_devices, count):
    spec = spec_of(group_size, renorm, num_devices, use_global_stats=True)
    with autograd.train_mode():
        for site in Site:
            assert decide(spec, cpus(count), site) is PLAIN


class Several:
    """A job of two processes."""

    size = 2


@pytest.mark.parametrize("group_size, renorm, num_devices, count", CASES)
def test_with_other_processes_one_device_is_not_alone(group_size, renorm, num_devices, count, monkeypatch):
    monkeypatch.setattr("gluon_syncbn.layer.decision.find", lambda process_group, where: Several())
    spec, devices = spec_of(group_size, renorm, num_devices), cpus(count)
    is_by_itself = group_size == 1 and not renorm
    with autograd.train_mode():
        in_a_net = PLAIN if is_by_itself else SYNCHRONIZED if count else OPEN
        assert decide(spec, devices, Site.NET) is in_a_net
        if count:
            assert decide(spec, devices, Site.ARRAYS) is in_a_net
        assert decide(spec, devices, Site.SYMBOL) is (FOR_NOW if is_by_itself or count == 1 else OPEN)


def test_a_loaded_layer_of_a_job_that_is_not_connected_is_not_alone():
    """`mx.sym.load` of such a file looks for nobody: it may only be to predict."""
    spec = LayerSpec.of("x", num_devices=1, process_group="mpi")
    assert decide(spec, [], Site.SYMBOL, is_loaded=True) is OPEN
    assert decide(spec, cpus(1), Site.NET) is SYNCHRONIZED
    assert decide(spec.but(process_group="none"), [mx.cpu(0)], Site.NET) is PLAIN


def test_what_is_saved_says_every_option():
    """A default that changes some day does not change what a file means."""
    text = LayerSpec.of("x", kvstore="local", renorm=(3, 5)).to_json()
    saved = json.loads(text)
    missing = {field.name for field in dataclasses.fields(LayerSpec)} - set(saved)
    assert missing == {"num_devices", "group_size", "timeout", "activation", "process_group"}  # which are None
    assert LayerSpec.from_json(text) == LayerSpec.of("x", kvstore="local", renorm=(3, 5))


def test_numbers_of_numpys_are_saved():
    """What JSON does not know was once left out, and a file with the default loaded in its place."""
    given = {"axis": np.int64(3), "dtype": np.dtype("float64"), "num_devices": np.int32(2)}
    spec = LayerSpec.of("x", **given)
    assert (spec.axis, spec.dtype, spec.num_devices) == (3, "float64", 2)
    assert LayerSpec.from_json(spec.to_json()) == spec
    symbol = gluon_syncbn.symbol.SyncBatchNorm(mx.sym.var("x"), use_global_stats=np.bool_(False), **given)
    (norm,) = find_norms(Graph(symbol))
    assert norm.spec.but(name="x") == spec.but(scale=False, epsilon=1e-3)
    for dtype in (None, "bfloat16", "int32", ["float32"]):
        with pytest.raises(ValueError, match="dtype must be 'float32' or 'float64', not"):
            LayerSpec.of("x", dtype=dtype)
    with pytest.raises(TypeError, match="axis must be an integer, not 1.5"):
        LayerSpec.of("x", axis=1.5)


def test_an_axis_of_numpys_is_exported(tmp_path):
    layer = SyncBatchNorm(axis=np.int64(-1), in_channels=3)
    layer.initialize(ctx=cpus(2))
    layer.hybridize()
    for device in cpus(2):
        layer(mx.nd.ones((2, 4, 3), ctx=device))
    layer.export(str(tmp_path / "net"))
    (norm,) = find_norms(Graph((tmp_path / "net-symbol.json").read_text(encoding="utf-8")))
    assert norm.spec.axis == -1
