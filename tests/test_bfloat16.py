"""bfloat16 input gives right numbers on every CPU, also where MXNet's own BatchNorm cannot take it.

MXNet's is oneDNN's, which has bfloat16 from AVX-512 on. Tests that need it say what must happen without it, and
the last one plays such a machine.
"""

import json
import os
import subprocess
import sys

import mxnet as mx
import numpy as np
import oracle
import pytest
from harness import HANG, MODES, ROOT, cpus, random_affine, random_shards, set_mode
from mxnet import autograd
from mxnet.contrib.amp.amp import bfloat16
from mxnet.gluon import nn

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm

ROUNDING = 2.0**-8  # of a bfloat16, as a share of the value
SHAPES = {1: [(3, 5, 4, 6), (1, 5, 4, 6)], -1: [(3, 4, 6, 5), (1, 4, 6, 5)]}


def low(array) -> mx.nd.NDArray:
    return mx.nd.amp_cast(array, dtype=bfloat16)  # to nearest; mx.nd.cast truncates


def high(array) -> np.ndarray:
    assert np.dtype(array.dtype) == bfloat16
    return mx.nd.cast(array, dtype="float32").asnumpy()


def rounded(values) -> list:
    """Float32 arrays of numbers that bfloat16 has."""
    return [high(low(mx.nd.array(item))) for item in values]


def mxnet_takes_it() -> bool:
    try:
        result = mx.nd.BatchNorm(low(mx.nd.ones((2, 3, 4, 4))), *(mx.nd.ones(3) for _ in range(4)))
        result.wait_to_read()
    except mx.MXNetError as error:
        assert "primitive descriptor" in str(error)
        return False
    return True


# On several devices portable takes it only where MXNet's own BatchNorm does; that it is refused elsewhere is in
# test_portable.py.
TAKES_IT = mxnet_takes_it()
BACKENDS = pytest.mark.parametrize("backend", ["native", *(["portable"] if TAKES_IT else [])], indirect=True)
COUNTS = [(1, "native"), (1, "portable"), (2, "native"), *([(2, "portable")] if TAKES_IT else [])]
COUNTS = pytest.mark.parametrize("count, backend", COUNTS, indirect=["backend"])


class CastsInside(nn.HybridSequential):
    """The input comes as float32, as to the nets of mx.contrib.amp."""

    def hybrid_forward(self, F, x):
        return super().hybrid_forward(F, F.amp_cast(x, dtype=bfloat16))


class FromASymbol(mx.gluon.HybridBlock):
    """A net that is a symbol inside."""

    def __init__(self, options):
        super().__init__()
        data = mx.sym.var("data")
        plain = mx.sym.BatchNorm(mx.sym.relu(-data), axis=options["axis"], eps=1e-5, fix_gamma=False, name="norm")
        with self.name_scope():
            self.block = mx.gluon.SymbolBlock([plain], [data])
        kept = {key: value for key, value in options.items() if key in ("timeout", "backend")}
        gluon_syncbn.convert_sync_batchnorm(self, **kept)

    def hybrid_forward(self, F, x):
        return self.block(-F.amp_cast(x, dtype=bfloat16))


def make(how, mode, devices, axis=1, **options):
    net = CastsInside() if how == "cast inside" else nn.HybridSequential()
    net.add(SyncBatchNorm(in_channels=5, axis=axis, timeout=30, **options))
    net.initialize(ctx=devices)
    set_mode(net, mode)
    return net, net[0], random_affine(net[0], 5)


def feed(how, shards, devices):
    """Inputs with room for a gradient."""
    inputs = [mx.nd.array(shard, ctx=device) for shard, device in zip(shards, devices)]
    inputs = inputs if how == "cast inside" else [low(item) for item in inputs]
    for item in inputs:
        item.attach_grad()
    return inputs


def gradients_of(how, inputs):
    return [item.grad.asnumpy() if how == "cast inside" else high(item.grad) for item in inputs]


def flatten(arrays, axis):
    return [np.moveaxis(item, axis, -1).reshape(-1, 5) for item in arrays]


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("how", ["as it is", "cast inside"])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("axis", list(SHAPES))
@COUNTS
def test_training(count, backend, axis, relu, how, mode):
    """On one device, the layer is nn.BatchNorm."""
    devices = cpus(count)
    net, layer, (gamma, beta) = make(how, mode, devices, axis, activation="relu" if relu else None)
    shards = rounded(random_shards(SHAPES[axis][:count]))
    heads = rounded(random_shards(SHAPES[axis][:count], seed=4))
    inputs = feed(how, shards, devices)
    with autograd.record():
        outputs = [net(item) for item in inputs]
    autograd.backward(outputs, [low(mx.nd.array(head, ctx=device)) for head, device in zip(heads, devices)])

    plain = oracle.batch_norm(flatten(shards, axis), gamma, beta, -1)
    passed = flatten(heads, axis)
    if relu:
        passed = [head * (output > 0) for head, output in zip(passed, plain.outputs)]
    expected = oracle.batch_norm(flatten(shards, axis), gamma, beta, -1, heads=passed)
    wanted = [np.maximum(item, 0) for item in plain.outputs] if relu else plain.outputs
    assert oracle.distance(flatten([high(item) for item in outputs], axis), wanted) < 1.01 * ROUNDING
    # Where MXNet takes bfloat16, portable adds up two gradients that are rounded.
    actual = flatten(gradients_of(how, inputs), axis)
    assert oracle.distance(actual, expected.input_gradients) < 3 * ROUNDING
    d_gamma, d_beta = (sum(item.grad(device).asnumpy() for device in devices) for item in (layer.gamma, layer.beta))
    assert oracle.distance([d_gamma], [expected.gamma_gradient]) < 1e-5
    assert oracle.distance([d_beta], [expected.beta_gradient]) < 1e-5
    for device in devices:
        assert oracle.distance([layer.running_mean.data(device).asnumpy()], [0.1 * expected.mean]) < 1e-5
        assert oracle.distance([layer.running_var.data(device).asnumpy()], [0.9 + 0.1 * expected.var]) < 1e-5


@pytest.mark.parametrize("how", ["as it is", "cast inside"])
@pytest.mark.parametrize(
    "frozen, mode, backend",
    [
        (frozen, mode, backend)
        for frozen in (False, True)
        for mode in MODES
        for backend in ("native", "portable")
        # Elsewhere it is nn.BatchNorm itself.
        if backend == "native" or TAKES_IT or frozen or mode == "imperative"
    ],
    indirect=["backend"],
)
def test_prediction_and_frozen_statistics(frozen, how, mode, backend):
    net, layer, (gamma, beta) = make(how, mode, cpus(2), use_global_stats=frozen)
    mean, var = np.linspace(-1, 1, 5), np.linspace(0.5, 2, 5)
    layer.running_mean.set_data(mx.nd.array(mean))
    layer.running_var.set_data(mx.nd.array(var))
    shards, shape = rounded(random_shards(SHAPES[1])), (1, 5, 1, 1)
    inputs = feed(how, shards, cpus(2))
    with autograd.record(train_mode=frozen):
        outputs = [net(item) for item in inputs]
    scale = (gamma / np.sqrt(var + 1e-5)).reshape(shape)
    expected = [(shard - mean.reshape(shape)) * scale + beta.reshape(shape) for shard in shards]
    assert oracle.distance([high(item) for item in outputs], expected) < 1.01 * ROUNDING
    if frozen:
        autograd.backward(outputs, [low(mx.nd.ones_like(item)) for item in inputs])
        expected = [np.broadcast_to(scale, shard.shape) for shard in shards]
        assert oracle.distance(gradients_of(how, inputs), expected) < 1.01 * ROUNDING


@pytest.mark.parametrize("mode", list(MODES))
def test_one_device_is_batchnorm_to_the_last_bit(mode, backend):
    """Where MXNet's BatchNorm cannot take bfloat16, it is that of float32, rounded."""
    net, layer, affine = make("as it is", mode, cpus(1))
    plain = nn.BatchNorm(in_channels=5)
    plain.initialize()
    random_affine(plain, 5)
    shard, head = (
        mx.nd.array(item[0]) for item in (random_shards(SHAPES[1][:1]), random_shards(SHAPES[1][:1], seed=4))
    )
    results = []
    for block in (net, plain):
        x, dy = low(shard), low(head)
        if block is plain and not TAKES_IT:
            x, dy = (mx.nd.cast(item, dtype="float32") for item in (x, dy))
        x.attach_grad()
        with autograd.record():
            y = block(x)
        y.backward(dy)
        results.append([high(low(item)) for item in (y, x.grad)])
    for actual, expected in zip(*results):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("mode", list(MODES))
@COUNTS
def test_a_net_that_is_a_symbol_inside(count, backend, mode):
    net = FromASymbol({"axis": 1, "timeout": 30})
    net.initialize(ctx=cpus(count))
    set_mode(net, mode)
    shards = rounded(random_shards(SHAPES[1][:count]))
    inputs = feed("cast inside", shards, cpus(count))
    with autograd.record():
        outputs = [net(item) for item in inputs]
    (layer,) = net.block.hidden_blocks()
    affine = [item.data(mx.cpu(0)).asnumpy() for item in (layer.gamma, layer.beta)]
    expected = oracle.batch_norm([np.maximum(shard, 0) for shard in shards], *affine)
    assert oracle.distance([high(item) for item in outputs], expected.outputs) < 1.01 * ROUNDING


@BACKENDS
@pytest.mark.parametrize("mode", list(MODES))
def test_numpy_interface(mode, backend):
    net, layer, (gamma, beta) = make("as it is", mode, cpus(2))
    shards = rounded(random_shards(SHAPES[1]))
    inputs = feed("as it is", shards, cpus(2))
    with mx.util.np_array(True), autograd.record():
        outputs = [layer(item.as_np_ndarray()) for item in inputs]
    expected = oracle.batch_norm(shards, gamma, beta)
    assert oracle.distance([high(item.as_nd_ndarray()) for item in outputs], expected.outputs) < 1.01 * ROUNDING


@BACKENDS
@pytest.mark.parametrize("mode", list(MODES))
def test_a_net_that_is_cast_keeps_parameters_in_float32(mode, backend):
    net = nn.HybridSequential()
    net.add(SyncBatchNorm(in_channels=5, timeout=30))
    net.initialize(ctx=cpus(2))
    net.cast(bfloat16)
    assert {np.dtype(item.dtype) for item in net.collect_params().values()} == {np.dtype("float32")}
    set_mode(net, mode)
    shards = rounded(random_shards(SHAPES[1]))
    with autograd.record():
        outputs = [net(item) for item in feed("as it is", shards, cpus(2))]
    expected = oracle.batch_norm(shards, np.ones(5), np.zeros(5))
    assert oracle.distance([high(item) for item in outputs], expected.outputs) < 1.01 * ROUNDING


@pytest.mark.parametrize("mode", list(MODES))
def test_parameters_of_bfloat16_are_refused(mode, backend):
    """Of a net that was cast before it was converted; nn.BatchNorm itself can do nothing with them either."""
    net = nn.HybridSequential()
    net.add(nn.BatchNorm(in_channels=5, prefix="stem_"))
    net.initialize(ctx=cpus(2))
    net.cast(bfloat16)
    gluon_syncbn.convert_sync_batchnorm(net, timeout=30)
    set_mode(net, mode)
    words = r"'stem': its parameters and statistics are bfloat16.*cast\('float32'\)"
    with pytest.raises(ValueError, match=words), autograd.record():
        net(low(mx.nd.ones((2, 5, 3, 3))))
    if backend == "portable" and not TAKES_IT:
        return
    net[0].cast("float32")
    set_mode(net, mode)
    with autograd.record():
        outputs = [net(low(mx.nd.ones((2, 5, 3, 3), ctx=device))) for device in cpus(2)]
    assert (high(outputs[0]) == 0).all()


@BACKENDS
def test_a_symbol_that_says_bfloat16(backend):
    shards = rounded(random_shards(SHAPES[1]))
    data = mx.sym.amp_cast(mx.sym.cast(mx.sym.var("data"), dtype="float32"), dtype=bfloat16)
    out = gluon_syncbn.symbol.SyncBatchNorm(data, num_devices=2, timeout=30, eps=1e-5, name="norm")
    executors = [out.simple_bind(device, data=shard.shape) for shard, device in zip(shards, cpus(2))]
    for executor, shard in zip(executors, shards):
        executor.arg_dict["norm_gamma"][:] = 1
        executor.forward(is_train=True, data=mx.nd.array(shard))
    expected = oracle.batch_norm(shards, np.ones(5), np.zeros(5))
    outputs = [high(executor.outputs[0]) for executor in executors]
    assert oracle.distance(outputs, expected.outputs) < 1.01 * ROUNDING


@COUNTS
def test_an_exported_net_is_plain(count, backend, tmp_path):
    net, _, _ = make("cast inside", "hybridize", cpus(count))
    inputs = feed("cast inside", rounded(random_shards(SHAPES[1][:count])), cpus(count))
    with autograd.record():
        outputs = [net(item) for item in inputs]
    autograd.backward(outputs)
    net.export(str(tmp_path / "net"))
    nodes = json.loads((tmp_path / "net-symbol.json").read_text(encoding="utf-8"))["nodes"]
    # MXNet leaves out the casts of amp, but not one whose result is an output.
    assert [node["op"] for node in nodes if node["op"] not in ("null", "amp_cast")] == ["BatchNorm"]
    plain = mx.gluon.SymbolBlock.imports(
        str(tmp_path / "net-symbol.json"), ["data"], str(tmp_path / "net-0000.params"), mx.cpu(0)
    )
    assert oracle.distance([high(low(plain(inputs[0])))], [high(net(inputs[0]))]) < 1.01 * ROUNDING


def test_all_of_this_on_a_machine_without_avx512(backend):
    command = [
        sys.executable,
        "-m",
        "pytest",
        __file__,
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        f"{backend} and not avx512",
    ]
    environment = {**os.environ, "DNNL_MAX_CPU_ISA": "AVX2", "GLUON_SYNCBN_MAX_CPU_ISA": "avx2"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, encoding="utf-8", timeout=HANG)
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout and "failed" not in done.stdout
