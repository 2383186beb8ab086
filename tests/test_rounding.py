"""Low precision and numbers at its edges: nothing is lost, nothing is made up.

Against float64 the error is no larger than that of `nn.BatchNorm` on the whole batch. float16 and bfloat16, by
themselves and by amp, with parameters and statistics in float32; NaN, infinity, constant channels, huge means, empty
shards, and a decimal comma.

MXNet's own BatchNorm is oneDNN's, which has bfloat16 from AVX-512 on. Tests that need it say what must happen without
it; `make older-cpus` plays such a machine.
"""

import functools
import json
import subprocess

import mxnet as mx
import numpy as np
import pytest
import testing
from executors import bind, norm_of, run
from mxnet import autograd
from mxnet.contrib.amp.amp import bfloat16
from mxnet.gluon import nn
from reference import Norm, check, check_all, check_tensors
from test_layer import make
from testing import (
    MODES,
    check_step,
    cpus,
    initialized,
    observe,
    random_affine,
    random_shards,
    set_mode,
    shards_and_heads,
)

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm

TAKES_IT = testing.takes_bfloat16()
# On several devices portable takes bfloat16 only where MXNet's own BatchNorm does.
COUNTS = [(1, "native"), (1, "portable"), (2, "native"), *([(2, "portable")] if TAKES_IT else [])]
COUNTS = pytest.mark.parametrize("count, backend", COUNTS, indirect=["backend"])


# The error against float64

BATCHES = 15  # whose errors are averaged: in one alone, which of two rounds more luckily is chance
# The portable back end normalizes with nn.BatchNorm's own operator, so it rounds as that does, and then once more.
LARGEST_RATIO = {"native": 1.0, "portable": 1.4}
VALUES = {"many values": [(3, 4, 16, 16)] * 2, "few values": [(1, 4, 3, 3), (2, 4, 3, 3)], "vectors": [(5, 4), (3, 4)]}


def squared_error(seen, expected) -> float:
    """Mean of all values, as shares of the size of their channels."""
    parts = [np.moveaxis(a - e.value, min(1, a.ndim - 1), -1) / e.size for a, e in zip(seen, expected)]
    return np.mean(np.square(np.concatenate([part.ravel() for part in parts])))


def errors_of(kind, count, mode, dtype, case, mean, std) -> np.ndarray:
    """Root mean square over batches, of outputs and of the gradients of input, γ and β."""
    devices = cpus(count)
    layer = initialized(kind(in_channels=4), devices, mode, dtype)
    vectors = random_affine(layer, 4)
    squares = []
    for seed in range(BATCHES):
        shards, heads = shards_and_heads(VALUES[case], dtype, seed, mean=mean, std=std)
        if count == 1:
            shards, heads = [np.concatenate(shards)], [np.concatenate(heads)]
        expected, seen = Norm(*vectors).step(shards, heads), observe(layer, shards, heads, devices)
        wanted = expected.outputs, expected.input_gradients, [expected.gamma_gradient], [expected.beta_gradient]
        given = seen.outputs, seen.input_gradients, [seen.gamma_gradient], [seen.beta_gradient]
        squares.append([squared_error(*pair) for pair in zip(given, wanted)])
    assert {item.data(devices[0]).dtype for item in layer.collect_params().values()} == {np.float32}
    return np.sqrt(np.mean(squares, axis=0))


errors_of_batchnorm = functools.lru_cache(maxsize=None)(functools.partial(errors_of, nn.BatchNorm, 1, "imperative"))


MEANS = {0: 1, 1.5: 2, 30: 0.5}  # and deviations
# Each two of a mean, a kind of values, a dtype and a mode come together.
CASES = [
    (dtype, case, mean, list(MODES)[(i + j + k) % 3])
    for i, dtype in enumerate(["float16", "float32"])
    for j, case in enumerate(VALUES)
    for k, mean in enumerate(MEANS)
]


@pytest.mark.parametrize("dtype, case, mean, mode", CASES)
def test_error_against_float64_is_no_larger_than_that_of_batchnorm(dtype, case, mean, mode, backend):
    """After ``cast(dtype)``. γ, β and statistics stay in float32."""
    std = MEANS[mean]
    ours = errors_of(SyncBatchNorm, 2, mode, dtype, case, mean, std)
    theirs = errors_of_batchnorm(dtype, case, mean, std)
    assert np.all(ours <= LARGEST_RATIO[backend] * theirs), (ours, theirs)


# bfloat16


class Low(mx.gluon.HybridBlock):
    """A net whose input comes in a low precision, and which outside is one of float32."""

    def __init__(self, net, dtype=bfloat16):
        super().__init__()
        self.net, self.dtype = net, dtype

    def hybrid_forward(self, F, x):
        return F.amp_cast(self.net(F.amp_cast(x, dtype=self.dtype)), dtype="float32")


def rounded(arrays, dtype=bfloat16) -> list:
    """Float32 arrays of the nearest numbers that the dtype has. mx.nd.cast would truncate."""
    return [mx.nd.amp_cast(mx.nd.array(item), dtype=dtype).astype("float32").asnumpy() for item in arrays]


def draw_rounded(count=2, axis=1, seed=0, dtype=bfloat16):
    """Shards and heads; numbers above 0 in the shards."""
    shapes = [(images, 5, 4, 6) if axis == 1 else (images, 4, 6, 5) for images in (3, 1)[:count]]
    shards, heads = shards_and_heads(shapes, seed=seed)
    return rounded([np.abs(item) + 2.0**-6 for item in shards], dtype), rounded(heads, dtype)


def check_low(block, norm, shards, heads, layer, dtype="bfloat16", **how):
    """As `check_step`, of a block that is in a low precision inside."""
    tensors = check_step(block, norm, shards, heads, layer=layer, dtype=dtype, **how)[: 2 * len(shards)]
    assert {item.dtype for vector in (layer.gamma, layer.beta) for item in vector.list_grad()} == {np.float32}
    if "take_step" not in how:  # amp may have the layer give float32
        np.testing.assert_equal(tensors, rounded(tensors))


WAYS = ["as it is", "cast inside", "cast net", "in a symbol", "mx.np"]


def make_low(way, mode, count, axis=1, activation=None, **options):
    """A block for `check_low`, its layer and the reference."""
    if way == "in a symbol":
        data = mx.sym.var("data")
        out = mx.sym.BatchNorm(mx.sym.relu(data), axis=axis, eps=1e-5, fix_gamma=False, name="norm")
        net = mx.gluon.SymbolBlock([mx.sym.relu(out) if activation else out], [data])
        gluon_syncbn.convert_sync_batchnorm(net, timeout=60)
    else:
        net = testing.sequential(SyncBatchNorm(in_channels=5, axis=axis, activation=activation, timeout=60, **options))
    net.initialize(ctx=cpus(count))
    if way == "cast net":
        net.cast(bfloat16)
        assert {np.dtype(item.dtype) for item in net.collect_params().values()} == {np.dtype("float32")}
    block = Low(net)
    set_mode(block if way == "cast inside" else net, mode)
    if way == "in a symbol":  # which makes its layer when it first knows the shape
        block(mx.nd.ones((1, 5, 1, 1) if axis == 1 else (1, 1, 1, 5)))
    (layer,) = testing.layers_of(net) if way == "in a symbol" else net
    random_affine(layer, 5)
    layer.running_mean.set_data(mx.nd.array(np.linspace(-1, 1, 5)))
    layer.running_var.set_data(mx.nd.array(np.linspace(0.5, 2, 5)))

    def by_numpy(x):
        with mx.util.np_array(True):
            out = net(mx.nd.amp_cast(x, dtype=bfloat16).as_np_ndarray())
        return mx.nd.amp_cast(out.as_nd_ndarray(), dtype="float32")

    return (by_numpy if way == "mx.np" else block), layer, testing.reference_of(layer, activation=activation)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("axis, activation", [(1, None), (-1, "relu")])
@COUNTS
def test_bfloat16_has_the_numbers_of_the_reference(count, backend, axis, activation, way, mode):
    """On one device too, where the layer is nn.BatchNorm, on every processor."""
    block, layer, norm = make_low(way, mode, count, axis, activation)
    for seed in range(2):
        check_low(block, norm, *draw_rounded(count, axis, seed), layer)


@pytest.mark.parametrize("way", ["as it is", "cast inside"])
@pytest.mark.parametrize("frozen", [False, True])
def test_bfloat16_in_prediction_and_with_frozen_statistics(frozen, way, mode, backend):
    if backend == "portable" and not (TAKES_IT or frozen or mode == "imperative"):
        return  # its graph is refused
    block, layer, norm = make_low(way, mode, 2, use_global_stats=frozen)
    norm.frozen = True
    check_low(block, norm, *draw_rounded(), layer, train_mode=frozen)


def test_bfloat16_on_one_device_is_batchnorm_to_the_last_bit(mode, backend):
    """Where MXNet's BatchNorm cannot take bfloat16, it is that of float32, rounded."""
    block, layer, _ = make_low("as it is", mode, 1)
    plain = initialized(nn.BatchNorm(in_channels=5))
    random_affine(plain, 5)
    results = []
    for net, norm in ((block, layer), (Low(plain) if TAKES_IT else plain, plain)):
        seen = observe(net, *draw_rounded(1), cpus(1), norm)
        results.append(rounded([*seen.outputs, *seen.input_gradients]))
    np.testing.assert_equal(*results)


def test_parameters_of_bfloat16_are_refused(mode, backend):
    """Of a net that was cast before it was converted; nn.BatchNorm itself can do nothing with them either."""
    words = r"'stem': its parameters and statistics are bfloat16.*cast\('float32'\)"
    for count in (1, 2) if mode == "imperative" else (2,):  # in a graph of one device it is nn.BatchNorm alone
        net = initialized(testing.sequential(nn.BatchNorm(in_channels=5, prefix="stem_")), count)
        net.cast(bfloat16)
        gluon_syncbn.convert_sync_batchnorm(net, timeout=60)
        set_mode(net, mode)
        with pytest.raises(ValueError, match=words), autograd.record():
            Low(net)(mx.nd.ones((2, 5, 3, 3)))
    if backend == "native" or TAKES_IT:
        net[0].cast("float32")
        set_mode(net, mode)
        check_low(Low(net), testing.reference_of(net[0]), *draw_rounded(), net[0])


@COUNTS
def test_a_symbol_that_says_bfloat16(count, backend):
    shards, heads = draw_rounded(count)
    data = mx.sym.amp_cast(mx.sym.cast(mx.sym.var("data"), dtype="float32"), dtype=bfloat16)
    out = gluon_syncbn.symbol.SyncBatchNorm(data, num_devices=count, timeout=60, eps=1e-5, fix_gamma=False, name="norm")
    out = mx.sym.amp_cast(out, dtype="float32")
    norm = norm_of(5, epsilon=1e-5)
    executors = bind(out, shards, {"norm": norm})
    outputs = [items[0] for items in run(executors, shards, heads)]
    expected = norm.step(shards, heads)
    how = {"units": 16} if (count, backend) == (2, "native") else {"units": 64, "roundings": 3}
    gradients = [item.grad_dict["data"].asnumpy() for item in executors]
    check_tensors(outputs, gradients, expected, "bfloat16", **how)


@COUNTS
def test_an_exported_net_of_bfloat16_is_plain(count, backend, tmp_path):
    block, layer, norm = make_low("cast inside", "hybridize", count)
    shards, heads = draw_rounded(count)
    check_low(block, norm, shards, heads, layer)
    prefix = str(tmp_path / "net")
    block.export(prefix)
    nodes = json.loads(mx.sym.load(f"{prefix}-symbol.json").tojson())["nodes"]
    # MXNet leaves out the casts of amp, but not one whose result is an output.
    assert [node["op"] for node in nodes if node["op"] not in ("null", "amp_cast")] == ["BatchNorm"]
    plain = mx.gluon.SymbolBlock.imports(f"{prefix}-symbol.json", ["data"], f"{prefix}-0000.params", mx.cpu(0))
    norm.frozen = True
    (expected,) = norm.step(shards[:1]).outputs
    check("output", plain(mx.nd.array(shards[0])).asnumpy(), expected, "bfloat16", units=64)


AMP = """
from mxnet.contrib import amp
amp.init({dtype!r})
from test_rounding import *
from testing import *
dtype = bfloat16 if {dtype!r} == 'bfloat16' else 'float16'

for mode in MODES:
    layer = SyncBatchNorm(in_channels=5, timeout=60)
    net = initialized(Low(layer, dtype), 2, mode)  # as behind a convolution under amp
    random_affine(layer, 5)
    trainer = mx.gluon.Trainer(net.collect_params(), 'sgd', {{'learning_rate': 0.1}})
    amp.init_trainer(trainer)

    def scaled_step(block, shards, heads, devices, _):
        scale = trainer._amp_loss_scaler.loss_scale  # a power of 2
        inputs = on_devices(shards, devices, learn=True)
        with autograd.record():
            outputs = [block(item) for item in inputs]
            losses = [(out * mx.nd.array(head / scale, ctx=out.ctx)).sum() for out, head in zip(outputs, heads)]
            with amp.scale_loss(losses, trainer) as scaled:
                autograd.backward(scaled)
        return outputs, inputs

    for seed in range(2):
        norm = reference_of(layer)
        check_low(net, norm, *draw_rounded(seed=seed, dtype=dtype), layer, {dtype!r}, take_step=scaled_step)
        trainer.step(4)
        mx.nd.waitall()
    print('RIGHT')
"""


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_amp(dtype, backend):
    """Statistics and parameters stay in float32. (MXNet has no float16 convolution on CPU, so the input is cast.)"""
    is_refused = dtype == "bfloat16" and backend == "portable" and not TAKES_IT
    done = testing.run_python(AMP.format(dtype=dtype), status=int(is_refused))
    assert done.stdout.count("RIGHT") == (0 if is_refused else len(testing.MODES)), done.stdout
    assert not is_refused or "MXNet's own BatchNorm, which takes no bfloat16" in done.stderr, done.stderr


# Numbers at the edges

SHAPE = (2, 3, 4, 5)
BAD = [("x", value, name) for value in (np.nan, np.inf, -np.inf) for name in (None, "relu")]


@pytest.mark.parametrize("where, value, activation", [("dy", np.nan, None), *BAD])
def test_nan_and_infinity_on_one_device_reach_every_device(where, value, activation, mode, backend):
    """In the channel where they are, as with nn.BatchNorm on the whole batch. The other channels are as ever."""
    layer, norm = make([SHAPE] * 3, mode=mode, activation=activation)
    shards, heads = shards_and_heads([SHAPE] * 3, mean=0.3)
    {"x": shards, "dy": heads}[where][1][0, 1, 2, 2] = value
    plain = initialized(nn.BatchNorm(in_channels=3))
    expected = observe(plain, [np.concatenate(shards)], [np.concatenate(heads)], cpus(1))
    assert np.isnan(expected.input_gradients[0][:, 1]).all()
    seen = observe(layer, shards, heads, cpus(3))
    for ours, theirs in (
        (np.concatenate(seen.outputs), expected.outputs[0]),
        (np.concatenate(seen.input_gradients), expected.input_gradients[0]),
        (seen.gamma_gradient, expected.gamma_gradient),
        *([] if activation else [(seen.beta_gradient, expected.beta_gradient)]),
    ):
        np.testing.assert_array_equal(np.isnan(ours), np.isnan(theirs))
    # nn.BatchNorm's running mean becomes infinite where ours becomes NaN; neither can be mistaken for a number.
    for name in ("running_mean", "running_var"):
        theirs = getattr(plain, name).data().asnumpy()
        for ours in getattr(layer, name).list_data():
            np.testing.assert_array_equal(np.isfinite(ours.asnumpy()), np.isfinite(theirs))
    others = [0, 2]
    norm = Norm(norm.gamma[others], norm.beta[others], activation=activation, mean_is_rounded=norm.mean_is_rounded)
    outputs, gradients, shards, heads = (
        [item[:, others] for item in items] for items in (seen.outputs, seen.input_gradients, shards, heads)
    )
    check_tensors(outputs, gradients, norm.step(shards, heads, seen=outputs), **testing.precision(layer))


@pytest.mark.parametrize("count", [2, 3, 5, 7])
def test_constant_channels(count, mode, backend):
    """With a shorter last shard; their mean is that constant on any number of devices, and their variance 0."""
    shapes = [SHAPE] * (count - 1) + [(1, *SHAPE[1:])]
    layer, norm = make(shapes, mode=mode, momentum=0)
    check_step(layer, norm, [np.full(shape, 0.7, np.float32) for shape in shapes], random_shards(shapes, seed=1))
    assert all((item.asnumpy() == 0).all() for item in layer.running_var.list_data())
    assert all((item.asnumpy() == np.float32(0.7)).all() for item in layer.running_mean.list_data())


def test_one_value_in_all(mode, backend):
    """N = 1: one device with one image of one pixel. As with nn.BatchNorm the output is β, the gradient 0."""
    layer, _ = make([SHAPE] * 2, mode=mode, momentum=0)
    shard, head = np.float32([[[[4]], [[5]], [[6]]]]), np.float32([[[[1]], [[-2]], [[3]]]])
    with gluon_syncbn.devices(mx.cpu(1)):
        seen = observe(layer, [shard], [head], [mx.cpu(1)])
    np.testing.assert_array_equal(seen.outputs[0].ravel(), layer.beta.data(mx.cpu(1)).asnumpy())
    np.testing.assert_array_equal(seen.input_gradients[0].ravel(), np.zeros(3))
    np.testing.assert_array_equal(seen.gamma_gradient, np.zeros(3))
    np.testing.assert_array_equal(seen.beta_gradient, head.ravel())
    assert all((item.asnumpy() == 0).all() for item in layer.running_var.list_data())
    assert all((item.asnumpy() == [4, 5, 6]).all() for item in layer.running_mean.list_data())


def test_a_mean_of_a_million_with_a_deviation_of_a_hundredth(mode, backend):
    """In float32, whose numbers are 0.06 apart there. nn.BatchNorm's result has no right digit."""
    shapes = [(4, 3, 16, 16), (2, 3, 16, 16)]
    shards, heads = random_shards(shapes, mean=1e6, std=1e-2), random_shards(shapes, seed=1, mean=0, std=1)
    layer, norm = make(shapes, mode=mode, momentum=0)
    norm.mean_is_rounded = False
    seen, expected = observe(layer, shards, heads, cpus(2)), norm.step(shards, heads)
    testing.check_running(layer, norm)
    # The portable back end normalizes with MXNet's own BatchNorm, whose rounding it corrects only in the statistics.
    forward, backward = (16, 16) if backend == "native" else (2**17, 2**19)
    check_all("output", seen.outputs, expected.outputs, units=forward)
    check_all("input gradient", seen.input_gradients, expected.input_gradients, units=backward)
    plain = initialized(nn.BatchNorm(in_channels=3))
    random_affine(plain, 3)
    (theirs,) = observe(plain, [np.concatenate(shards)], [np.concatenate(heads)], cpus(1)).outputs
    wanted = np.concatenate([item.value for item in expected.outputs])
    assert np.abs(theirs - wanted).max() > 0.5 * np.abs(wanted).max()


def test_an_empty_shard_is_refused(mode, backend):
    """MXNet has arrays of 0 images only with NumPy shapes.

    On portable it is refused where Python sees it, which is not in a graph: there MXNet itself divides by zero when it
    reshapes an empty array, as docs/limits.md tells.
    """
    if backend == "portable" and mode != "imperative":
        return
    layer, _ = make([SHAPE] * 2, mode=mode, prefix="stem_", timeout=1)
    told = r"'stem': the input.* on cpu\(1\) is empty. A device without images cannot take part; leave it out with "
    told += r"gluon_syncbn.devices\(...\)."
    with pytest.raises((ValueError, mx.MXNetError), match=told), mx.util.np_shape(True), autograd.record():
        layer(mx.nd.ones(SHAPE, ctx=mx.cpu(0)))
        layer(mx.nd.ones((0, *SHAPE[1:]), ctx=mx.cpu(1))).asnumpy()
    gluon_syncbn.abandon_step()


# In place of de_DE, which not every machine has.
COMMA = """
LC_NUMERIC
decimal_point ","
thousands_sep "."
grouping 3;3
END LC_NUMERIC
"""

WITH_A_COMMA = """
import contextlib, ctypes, locale, os, warnings
from testing import *

locale.setlocale(locale.LC_NUMERIC, 'comma')
libc = ctypes.CDLL(None)
libc.strtod.restype = ctypes.c_double
assert libc.strtod(b'0,5', None) == 0.5

if os.environ['GLUON_SYNCBN_BACKEND'] == 'native':
    options = {'in_place': True, 'renorm': (1.75, 0.25)}
    known = {'renorm': options['renorm'], 'in_place': 'float32'}
    least_gamma, profile = 0.0, gluon_syncbn.profile  # in_place moves it, and says so
else:
    options, known, least_gamma, profile = {}, {}, 2.0**-20, contextlib.nullcontext

net = sequential(lambda: nn.BatchNorm(in_channels=2, epsilon=0.25, momentum=0.75), nn.LeakyReLU(0.125), prefix='net_')
initialized(gluon_syncbn.convert_sync_batchnorm(net, **options), 2, "static")
net[0].gamma.set_data(mx.nd.array([1.0, least_gamma]))
norm = reference_of(net[0], activation='leaky', slope=0.125, **known)
with warnings.catch_warnings(record=True) as told, profile() as report:
    warnings.simplefilter('always')
    check_steps(net, norm, lambda seed: shards_and_heads([(2, 2, 3, 5), (1, 2, 3, 5)], seed=seed), 3, layer=net[0])
    mx.nd.waitall()
print(report)
print('TOLD', *[str(item.message) for item in told])
layer = initialized(gluon_syncbn.SyncBatchNorm(in_channels=2, timeout=0.5, prefix='lone_'), 2)
with autograd.record():
    out = layer(mx.nd.ones((2, 2, 3, 5)))
try:
    out.wait_to_read()
except mx.MXNetError as error:
    print('TIMEOUT', str(error).split(' s for')[0])
"""


def test_a_decimal_comma_changes_nothing(backend, tmp_path):
    """Numbers cross between Python, MXNet and the compiled core with a decimal point, whatever the locale."""
    source = tmp_path / "comma.txt"
    source.write_text(COMMA)
    # With warnings, and status 1, about all that it does not say.
    subprocess.run(["localedef", "-c", "-i", str(source), str(tmp_path / "comma")], capture_output=True, check=False)
    assert (tmp_path / "comma" / "LC_NUMERIC").exists()
    done = testing.run_python(WITH_A_COMMA, LOCPATH=tmp_path, GLUON_SYNCBN_BACKEND=backend)
    assert done.stdout.split("TIMEOUT")[1].strip().endswith("waited 0.5")
    assert backend == "portable" or "9.5e-07" in done.stdout.split("TOLD")[1]
