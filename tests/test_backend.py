"""Which back end a layer takes, that it says so, and what stands around the compiled operator in which graph."""

import gc
import json
import logging

import mxnet as mx
import pytest
from harness import cpus, run_python
from mxnet import autograd
from mxnet.gluon import nn

from gluon_syncbn import SyncBatchNorm
from gluon_syncbn.backends import choose, native
from gluon_syncbn.layer.spec import LayerSpec


@pytest.fixture
def said(caplog, monkeypatch):
    """The log, with no choice made before."""
    monkeypatch.setattr(choose, "_said", set())
    caplog.set_level(logging.INFO, logger="gluon_syncbn")
    return caplog


def make(**options):
    layer = SyncBatchNorm(in_channels=3, **options)
    layer.initialize(ctx=cpus(2))
    return layer


def test_auto_is_native_on_cpu_and_says_so_once(said):
    for _ in range(3):
        assert make().backend == "native"
    assert said.messages == [f"back end native: compiled kernels, {native.instruction_set()}."]


def test_portable_when_asked_for(said):
    assert make(backend="portable").backend == "portable"
    assert said.messages == ["back end portable: it was asked for."]


def test_portable_where_a_store_is_given(said):
    assert make(kvstore="local").backend == "portable"
    assert said.messages == ["back end portable: a kvstore was given, and only the portable back end uses one."]


def test_portable_with_a_warning_where_mxnet_was_built_without_cuda(said):
    """What runs on GPUs is in tests/gpu."""
    with pytest.warns(UserWarning, match="SyncBatchNorm 'here' runs on the portable back end.*USE_CUDA=1"):
        assert choose.choose(LayerSpec("here"), [mx.gpu(0), mx.gpu(1)]).name == "portable"
    assert "the CUDA kernels cannot run on gpu(0)" in said.text
    with pytest.raises(RuntimeError, match=r"'here': backend='native' cannot run here: .*gpu\(0\)"):
        choose.choose(LayerSpec("here", backend="native"), [mx.gpu(0)])


def test_no_warning_where_portable_was_asked_for(said, recwarn):
    assert choose.choose(LayerSpec("here", backend="portable"), [mx.gpu(0)]).name == "portable"
    assert said.messages == ["back end portable: it was asked for."] and not recwarn.list


def test_portable_where_nothing_was_compiled(said, monkeypatch):
    monkeypatch.setattr(native, "unavailable_reason", "no compiler")
    assert make().backend == "portable"
    assert said.messages == ["back end portable: the compiled operator is not available: no compiler."]
    with pytest.raises(RuntimeError, match="SyncBatchNorm 'stem': backend='native' cannot run here.*no compiler"):
        SyncBatchNorm(backend="native", prefix="stem_")


def test_the_environment_says_what_auto_means(monkeypatch):
    monkeypatch.setenv("GLUON_SYNCBN_BACKEND", "portable")
    assert make().backend == "portable"
    assert make(backend="native").backend == "native"
    monkeypatch.setenv("GLUON_SYNCBN_BACKEND", "fast")
    with pytest.raises(ValueError, match="GLUON_SYNCBN_BACKEND must be one of auto, native, portable, not 'fast'"):
        _ = make().backend


def operators_of(net):
    """The operators of the traced graph around the compiled one."""
    net.initialize(ctx=cpus(2))
    net(mx.nd.ones((2, 3, 4, 4)))
    nodes = json.loads(net._cached_graph[1].tojson())["nodes"]
    return {node["op"] for node in nodes} & {"Reshape", "_copy", "slice_axis", "Custom"}


STATIC = {"static_alloc": True, "static_shape": True}
SAFE_EVERYWHERE = {"slice_axis", "Custom"}


@pytest.mark.parametrize(
    "outer, inner, expected",
    [
        (STATIC, None, {"Reshape", "_copy", "Custom"}),
        ({}, None, SAFE_EVERYWHERE),
        ({"static_alloc": True}, None, SAFE_EVERYWHERE),
        ({}, STATIC, SAFE_EVERYWHERE),
        (STATIC, {}, {"Reshape", "_copy", "Custom"}),
    ],
    ids=["static", "hybridize", "static_alloc only", "static flags inside a graph that is not", "the other way round"],
)
def test_what_is_safe_in_static_graphs_only_is_used_in_those_only(outer, inner, expected, monkeypatch):
    """The flags that count are those of the block that owns the graph."""
    monkeypatch.setenv("GLUON_SYNCBN_BACKEND", "native")
    net = nn.HybridSequential()
    net.add(SyncBatchNorm(in_channels=3))
    net.hybridize(**outer)
    if inner is not None:
        net[0].hybridize(**inner)
    assert operators_of(net) == expected


def test_a_dropped_layer_leaves_nothing_behind():
    layer = make(backend="native")
    x = mx.nd.ones((2, 3))
    vectors = [mx.nd.ones(3) for _ in range(4)]
    with autograd.record():
        outputs = [layer(mx.nd.ones((2, 3), ctx=device)) for device in cpus(2)]
    autograd.backward(outputs)
    mx.nd.waitall()
    number = layer._sync._group[1].id
    call = {"op_type": "gluon_syncbn_native", "group": number, "axis": 1, "relu": 0}
    mx.nd.Custom(x, *vectors, **call)[0].wait_to_read()  # in prediction mode it meets no one
    del layer, outputs
    gc.collect()
    with pytest.raises(mx.MXNetError, match=f"no SyncBatchNorm layer number {number} in this process"):
        mx.nd.Custom(x, *vectors, **call)


def test_the_error_carries_its_own_text():
    layer = make(backend="native", timeout=0.3, prefix="stem_")
    with autograd.record():
        output = layer(mx.nd.ones((2, 3)))
    with pytest.raises(mx.MXNetError) as caught:
        output.wait_to_read()
    text = str(caught.value)
    assert (
        "SyncBatchNorm 'stem': forward pass waited 0.3 s for 1 of 2 devices. Arrived: cpu(0). Missing: cpu(1)" in text
    )
    assert "Usual reasons:\n(1)" in text


@pytest.mark.parametrize("mode", ["imperative", "hybridize", "static"])
def test_many_steps_give_the_same_bits(mode):
    """A short run of the soak whose log is docs/soak.log."""
    steps = 25 if mode == "static" else 12
    code = f"import sys, runpy; sys.argv[1:] = ['--mode', '{mode}', '--steps', '{steps}']; " + (
        "runpy.run_path('benchmarks/soak.py', run_name='__main__')"
    )
    done = run_python(code, GLUON_SYNCBN_BACKEND="native")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "back end native" in done.stdout and done.stdout.strip().endswith("RIGHT")
