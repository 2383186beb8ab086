"""``in_place=True``: the backward pass goes by the output, and x̂ comes back as well as the documentation says.

It comes back wrong by a unit of rounding times |x̂| + |β/γ|, which `reference.Norm` knows of as what is lost.
"""

import itertools
import warnings

import mxnet as mx
import numpy as np
import pytest
import test_layer
from mxnet.gluon import nn
from testing import (
    MODES,
    check_step,
    check_steps,
    cpus,
    initialized,
    observe,
    reference_of,
    run_python,
    sequential,
    shards_and_heads,
)

from gluon_syncbn import SyncBatchNorm, convert_batchnorm, convert_sync_batchnorm

SLOPE = 0.125  # the same in float32
CHANNELS = 4
GAMMA, BETA = [0.5, -1.5, 2.0, 0.8], np.linspace(-1, 1, CHANNELS)
DTYPES = ["float32", "float64", "float16"]
dtypes = pytest.mark.parametrize("dtype", DTYPES)
leakies = pytest.mark.parametrize("leaky", [False, True])


def make(leaky, gamma, mode="imperative", dtype="float32", axis=1, beta=BETA, renorm=None):
    """A net with a layer, and a leaky ReLU or not, and their reference."""
    blocks = [lambda: nn.BatchNorm(in_channels=CHANNELS, axis=axis), *([nn.LeakyReLU(SLOPE)] if leaky else [])]
    net = sequential(*blocks, prefix="net_")
    convert_sync_batchnorm(net, backend="native", in_place=True, renorm=renorm, timeout=60)
    initialized(net, 2, mode, dtype)
    net[0].gamma.set_data(mx.nd.array(gamma, dtype=net[0].gamma.dtype))
    net[0].beta.set_data(mx.nd.array(beta, dtype=net[0].beta.dtype))
    behind = {"activation": "leaky", "slope": SLOPE} if leaky else {}
    return net, reference_of(net[0], in_place=dtype, renorm=renorm, **behind)


def draw(dtype="float32", axis=1, seed=0, **how):
    shapes = [(images, 3, 5, CHANNELS) if axis == -1 else (images, CHANNELS, 3, 5) for images in (2, 1)]
    return shards_and_heads(shapes, dtype, seed, **how)


# MXNet's own leaky ReLU, which is by itself in imperative mode, multiplies float64 in float32.
CASES = [case for case in itertools.product([False, True], MODES, DTYPES) if case != (True, "imperative", "float64")]


@pytest.mark.parametrize("axis", [1, -1])
@pytest.mark.parametrize("leaky, mode, dtype", CASES)
def test_the_numbers_are_the_references(leaky, mode, dtype, axis):
    net, norm = make(leaky, GAMMA, mode, dtype, axis)
    check_steps(net, norm, lambda seed: draw(dtype, axis, seed), layer=net[0])


def test_a_slope_that_float16_rounds_to_0(mode):
    """The input could not be recovered from the output."""
    net = sequential(lambda: nn.BatchNorm(in_channels=CHANNELS), lambda: nn.LeakyReLU(1e-8))
    convert_sync_batchnorm(net, backend="native", in_place=True)
    shards, heads = draw("float16")
    seen = observe(initialized(net, 2, mode, "float16"), shards, heads, cpus(2), layer=net[0])
    assert all(np.isfinite(array).all() for array in (*seen.outputs, *seen.input_gradients))


def test_with_what_follows_it_and_renorm(mode):
    """r and d are part of what is undone."""
    net, norm = make(True, GAMMA, mode, renorm=(1.5, 0.5))
    check_steps(net, norm, lambda seed: draw(seed=seed), 3, layer=net[0])


@pytest.mark.parametrize("near_0", [0.0, 1e-9, -1e-9])
@leakies
def test_a_gamma_near_zero_is_moved_away_and_told(leaky, mode, near_0):
    """Its channel is computed with the least γ that leaves something of x̂; the others as ever."""
    net, norm = make(leaky, [0.5, near_0, 1.0, 0.25], mode)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for seed in range(2):
            check_step(net, norm, *draw(seed=seed), layer=net[0])
            mx.nd.waitall()
    texts = [str(item.message) for item in told if "in_place" in str(item.message)]
    assert len(texts) == 1
    assert "net_batchnorm0" in texts[0] and "|gamma| is this small; channel 1 on cpu(" in texts[0]
    assert f"uses {np.copysign(9.5e-07, near_0)} instead. Shown once per layer." in texts[0]


@dtypes
@pytest.mark.parametrize("mode", ["hybridize", "static"])
@leakies
def test_gradients_of_prediction_mode(leaky, mode, dtype):
    """``record(train_mode=False)``, as for adversarial examples: both passes take one γ, also where it is nearly 0."""
    net, norm = make(leaky, [0.0, 1e-9, 0.5, -1e-9], mode, dtype)
    norm.frozen = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_step(net, norm, *draw(dtype, mean=0, std=1), layer=net[0], train_mode=False)
        mx.nd.waitall()


def test_prediction_takes_gamma_as_it_is(mode):
    """Where no gradient can be asked for, it is `nn.BatchNorm` to the bit."""
    net, _ = make(False, [0.0, 1e-9, 0.5, -1e-9], mode, "float16")
    x = mx.nd.array(draw("float16")[0][0], dtype="float16")
    seen = net(x).asnumpy()
    np.testing.assert_array_equal(seen, convert_batchnorm(net)(x).asnumpy())


@dtypes
@pytest.mark.parametrize("ratio", [1, 10, 100])
def test_the_error_grows_as_the_documentation_says(ratio, dtype):
    net, norm = make(False, np.full(CHANNELS, 1.0 / ratio), dtype=dtype, beta=np.ones(CHANNELS))
    check_step(net, norm, *draw(dtype), layer=net[0])


def test_a_relu_keeps_the_input(mode):
    """There is no way back from a ReLU: the layer works as without the option."""
    shapes = [(2, CHANNELS, 3, 5), (1, CHANNELS, 3, 5)]
    layer, norm = test_layer.make(shapes, mode=mode, activation="relu", in_place=True, backend="native")
    check_step(layer, norm, *draw(mean=0.3))


def test_where_it_cannot_work_that_is_said():
    with pytest.raises(TypeError, match="in_place must be True or False"):
        SyncBatchNorm(in_place="yes")
    assert "in_place=True" in repr(SyncBatchNorm(in_place=True))
    net, _ = make(True, GAMMA)
    assert type(convert_batchnorm(net)[0]) is nn.BatchNorm


MEMORY = """
import re
from testing import *

def megabytes(what):
    return int(re.search(what + r":\\s+(\\d+)", open("/proc/self/status").read()).group(1)) / 1024

kinds = lambda: nn.Conv2D(16, 1, in_channels=16), lambda: nn.BatchNorm(in_channels=16), lambda: nn.LeakyReLU(0.1)
net = gluon_syncbn.convert_sync_batchnorm(sequential(*kinds * 10), backend="native", in_place={flag})
initialized(net, 2, "static")
inputs = [mx.nd.ones((1, 16, 256, 256), ctx=device) for device in cpus(2)]
mx.nd.waitall()
before = megabytes("VmRSS")
with mx.autograd.record():
    losses = [net(item).mean() for item in inputs]
mx.autograd.backward(losses)
mx.nd.waitall()
print(megabytes("VmHWM") - before)
"""


def test_it_saves_memory():
    """10 inputs of 4 MB on each of 2 devices are not kept."""
    used = [float(run_python(MEMORY.format(flag=flag)).stdout) for flag in (False, True)]
    assert used[False] - used[True] > 0.5 * 10 * 4 * 2, used


HOOK = """
import warnings
from testing import *
devices, seen = cpus(2), []
def hook(message, *rest):
    if "gamma" in str(message):
        seen.append([(mx.nd.ones(1, ctx=device) + 1).asscalar() for device in devices])
warnings.showwarning = hook
layer = initialized(SyncBatchNorm(in_channels=3, in_place=True), devices)
layer.gamma.set_data(mx.nd.zeros(3))
with mx.autograd.record():
    outputs = [layer(mx.nd.random.normal(shape=(4, 3, 5, 5), ctx=device)) for device in devices]
mx.nd.waitall()
while not seen:
    pass
print("SEEN", seen)
"""


def test_a_hook_for_warnings_may_use_the_devices():
    """It is called while the device's own thread computes, and waits for that thread."""
    assert "SEEN [[2.0, 2.0]]" in run_python(HOOK).stdout
