"""``in_place=True``: the backward pass goes by the output, with the numbers of the plain layer."""

import os
import subprocess
import sys
import warnings

import mxnet as mx
import numpy as np
import oracle
import pytest
from harness import HANG, MODES, ROOT, cpus, lean_environment, random_shards, run_python, set_mode, step
from mxnet import autograd
from mxnet.gluon import nn

from gluon_syncbn import SyncBatchNorm, convert_batchnorm, convert_sync_batchnorm

SLOPE = 0.125  # the same in float32
IN_FLOAT32 = 1e-6  # MXNet's own leaky ReLU, in imperative mode, multiplies in float32
CHANNELS = 4
TOLERANCE = {"float32": 2e-5, "float64": 1e-12, "float16": 2e-2}


def make(leaky, gamma, dtype="float32", axis=1, **options):
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.BatchNorm(in_channels=len(gamma), axis=axis))
        if leaky:
            net.add(nn.LeakyReLU(SLOPE))
    convert_sync_batchnorm(net, backend="native", **{"in_place": True, **options})
    net.cast(dtype)
    net.initialize(ctx=cpus(2))
    net[0].gamma.set_data(mx.nd.array(gamma, dtype=net[0].gamma.dtype))
    net[0].beta.set_data(mx.nd.array(np.linspace(-1, 1, len(gamma)), dtype=net[0].beta.dtype))
    return net


def expect(shards, heads, gamma, beta, leaky, axis=1):
    share = SLOPE if leaky else 1
    plain = oracle.batch_norm(shards, gamma, beta, axis)
    passed = [head * np.where(z > 0, 1, share) for head, z in zip(heads, plain.outputs)]
    expected = oracle.batch_norm(shards, gamma, beta, axis, heads=passed)
    return expected, [np.where(z > 0, z, share * z) for z in expected.outputs]


@pytest.mark.parametrize("axis", [1, -1])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("leaky", [False, True])
def test_the_numbers_are_the_oracles(leaky, mode, dtype, axis):
    gamma = np.array([0.5, -1.5, 2.0, 0.8])
    net = make(leaky, gamma, dtype, axis)
    set_mode(net, mode)
    shapes = [(2, 3, 5, CHANNELS), (1, 3, 5, CHANNELS)] if axis == -1 else [(2, CHANNELS, 3, 5), (1, CHANNELS, 3, 5)]
    shards, heads = random_shards(shapes, dtype), random_shards(shapes, dtype, seed=1)
    outputs, inputs = step(net, shards, heads, cpus(2))
    beta = np.linspace(-1, 1, CHANNELS)
    expected, wanted = expect(shards, heads, gamma, beta, leaky, axis)
    least = IN_FLOAT32 if leaky and mode == "imperative" else 0
    assert oracle.distance([item.asnumpy() for item in outputs], wanted) < max(TOLERANCE[dtype], least)
    assert oracle.distance([item.grad.asnumpy() for item in inputs], expected.input_gradients) < TOLERANCE[dtype]
    for parameter, gradient in ((net[0].gamma, expected.gamma_gradient), (net[0].beta, expected.beta_gradient)):
        total = sum(parameter.grad(device).asnumpy().astype(np.float64) for device in cpus(2))
        size = max(np.abs(gradient).max(), sum(np.abs(head).astype(np.float64).sum() for head in heads) / 10)
        assert np.abs(total - gradient).max() / size < TOLERANCE[dtype]


@pytest.mark.parametrize("gamma", [0.0, 1e-9, -1e-9])
def test_a_gamma_near_zero_is_moved_away_and_told(gamma):
    """Its channel is computed with the least γ that leaves something of x̂; the others as ever."""
    net = make(True, [0.5, gamma, 1.0])
    shards, heads = random_shards([(2, 3, 4, 4)] * 2), random_shards([(2, 3, 4, 4)] * 2, seed=1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            outputs, inputs = step(net, shards, heads, cpus(2))
            mx.nd.waitall()
    texts = [str(item.message) for item in told if "in_place" in str(item.message)]
    assert len(texts) == 1
    assert "net_batchnorm0" in texts[0] and "|gamma| is this small; channel 1 on cpu(" in texts[0]
    assert f"uses {np.copysign(9.5e-07, gamma)} instead. Shown once per layer." in texts[0]
    taken = np.array([0.5, np.copysign(2.0**-20, gamma), 1.0])
    expected, wanted = expect(shards, heads, taken, np.linspace(-1, 1, 3), leaky=True)
    assert oracle.distance([item.asnumpy() for item in outputs], wanted) < 1e-5
    assert oracle.distance([item.grad.asnumpy() for item in inputs], expected.input_gradients) < 1e-4
    total = sum(net[0].gamma.grad(device).asnumpy() for device in cpus(2))
    assert oracle.distance([total], [expected.gamma_gradient]) < 1e-4
    assert abs(total[1]) > 0


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("mode", ["hybridize", "static"])
@pytest.mark.parametrize("leaky", [False, True])
def test_gradients_of_prediction_mode(leaky, mode, dtype):
    """``record(train_mode=False)``, as for adversarial examples: both passes take one γ, also where it is nearly 0."""
    gamma, beta = np.array([0.0, 1e-9, 0.5, -1e-9]), np.linspace(-1, 1, CHANNELS)
    net = make(leaky, gamma, dtype)
    set_mode(net, mode)
    shapes = [(2, CHANNELS, 3, 5), (1, CHANNELS, 3, 5)]
    shards, heads = random_shards(shapes, dtype, mean=0, std=1), random_shards(shapes, dtype, seed=1)
    inputs = [mx.nd.array(shard, ctx=device, dtype=dtype) for shard, device in zip(shards, cpus(2))]
    for item in inputs:
        item.attach_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with autograd.record(train_mode=False):
            outputs = [net(item) for item in inputs]
        autograd.backward(outputs, [mx.nd.array(h, ctx=d, dtype=dtype) for h, d in zip(heads, cpus(2))])
        mx.nd.waitall()
    unit = {"float32": 2.0**-20, "float64": 2.0**-49, "float16": 2.0**-7}[dtype]
    least = unit * np.maximum(1, np.abs(beta))
    taken = np.where(np.abs(gamma) < least, np.copysign(least, gamma), gamma)
    share = SLOPE if leaky else 1
    errors = []
    for rank, (shard, head) in enumerate(zip(shards, heads)):
        normalized = shard.astype(np.float64) / np.sqrt(1 + 1e-5)
        z = normalized * taken.reshape(1, -1, 1, 1) + beta.reshape(1, -1, 1, 1)
        dz = head.astype(np.float64) * np.where(z > 0, 1, share)
        # Each channel by itself: what is lost in one of 1e-9 must show.
        dx = inputs[rank].grad.asnumpy().astype(np.float64) * np.sqrt(1 + 1e-5) / taken.reshape(1, -1, 1, 1)
        errors.append(oracle.distance([outputs[rank].asnumpy()], [np.where(z > 0, z, share * z)]))
        errors.append(oracle.distance([dx], [dz]))
        total, d_gamma = net[0].gamma.grad(mx.cpu(rank)).asnumpy(), (dz * normalized).sum(axis=(0, 2, 3))
        errors.append(np.abs(total - d_gamma).max() / np.abs(dz * normalized).sum(axis=(0, 2, 3)).max())
    assert max(errors) < (0.1 if dtype == "float16" else 0.05)  # x̂ comes back to 1/16 at worst, see in_place.h
    assert max(errors[::3]) < TOLERANCE[dtype] and max(errors[1::3]) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("mode", ["hybridize", "static"])
def test_prediction_takes_gamma_as_it_is(mode):
    """Where no gradient can be asked for, it is `nn.BatchNorm` to the bit."""
    gamma = np.array([0.0, 1e-9, 0.5, -1e-9])
    net = make(False, gamma, "float16")
    set_mode(net, mode)
    x = mx.nd.array(random_shards([(2, CHANNELS, 3, 5)], "float16")[0], dtype="float16")
    seen = net(x).asnumpy()
    np.testing.assert_array_equal(seen, convert_batchnorm(net)(x).asnumpy())


@pytest.mark.parametrize("ratio", [1, 10, 100])
def test_the_error_grows_as_the_documentation_says(ratio):
    """x̂ comes back wrong by 2⁻²⁴·(|x̂| + |β/γ|), and the gradient of γ with it."""
    gamma, beta = np.full(CHANNELS, 1.0 / ratio), np.ones(CHANNELS)
    net = make(False, gamma)
    net[0].beta.set_data(mx.nd.array(beta))
    shards, heads = random_shards([(4, CHANNELS, 8, 8)] * 2), random_shards([(4, CHANNELS, 8, 8)] * 2, seed=1)
    _, inputs = step(net, shards, heads, cpus(2))
    expected, _ = expect(shards, heads, gamma, beta, leaky=False)
    error = oracle.distance([item.grad.asnumpy() for item in inputs], expected.input_gradients)
    assert error < 4 * 2**-24 * (4 + ratio)


def test_a_relu_keeps_the_input():
    """There is no way back from a ReLU: the layer works as without the option."""
    layer = SyncBatchNorm(in_channels=CHANNELS, activation="relu", in_place=True, backend="native")
    layer.initialize(ctx=cpus(2))
    shapes = [(2, CHANNELS, 3, 5)] * 2
    shards, heads = random_shards(shapes), random_shards(shapes, seed=1)
    _, inputs = step(layer, shards, heads, cpus(2))
    plain = oracle.batch_norm(shards, np.ones(CHANNELS), np.zeros(CHANNELS))
    passed = [head * (y > 0) for head, y in zip(heads, plain.outputs)]
    expected = oracle.batch_norm(shards, np.ones(CHANNELS), np.zeros(CHANNELS), heads=passed)
    assert oracle.distance([item.grad.asnumpy() for item in inputs], expected.input_gradients) < 1e-5


def test_where_it_cannot_work_that_is_said():
    with pytest.raises(TypeError, match="in_place must be True or False"):
        SyncBatchNorm(in_place="yes")
    assert "in_place=True" in repr(SyncBatchNorm(in_place=True))
    net = convert_batchnorm(make(True, [1.0] * CHANNELS))
    assert type(net[0]) is nn.BatchNorm


MEMORY = """
import mxnet as mx, sys, re
import gluon_syncbn
from gluon_syncbn import convert_sync_batchnorm
from mxnet.gluon import nn

def megabytes(what):
    return int(re.search(what + r":\\s+(\\d+)", open("/proc/self/status").read()).group(1)) / 1024

net = nn.HybridSequential()
for _ in range(10):
    net.add(nn.Conv2D(16, 1, in_channels=16), nn.BatchNorm(in_channels=16), nn.LeakyReLU(0.1))
convert_sync_batchnorm(net, backend="native", in_place=sys.argv[1] == "True")
devices = [mx.cpu(0), mx.cpu(1)]
net.initialize(ctx=devices)
net.hybridize(static_alloc=True, static_shape=True)
inputs = [mx.nd.ones((1, 16, 512, 512), ctx=device) for device in devices]
mx.nd.waitall()
before = megabytes("VmRSS")
with mx.autograd.record():
    losses = [net(item).mean() for item in inputs]
mx.autograd.backward(losses)
mx.nd.waitall()
print(megabytes("VmHWM") - before)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="asks Linux for the memory of a process")
def test_it_saves_memory():
    """10 inputs of 16 MB on each of 2 devices are not kept."""
    used = {}
    for flag in (False, True):
        done = subprocess.run(
            [sys.executable, "-c", MEMORY, str(flag)],
            cwd=ROOT, env=lean_environment(), timeout=HANG, capture_output=True, text=True, check=True,
        )  # fmt: skip
        used[flag] = float(done.stdout)
    assert used[False] - used[True] > 0.5 * 10 * 16 * 2, used


HOOK = """
import warnings
import mxnet as mx, gluon_syncbn
devices, seen = [mx.cpu(0), mx.cpu(1)], []
def hook(message, *rest):
    if "gamma" in str(message):
        seen.append([(mx.nd.ones(1, ctx=device) + 1).asscalar() for device in devices])
warnings.showwarning = hook
layer = gluon_syncbn.SyncBatchNorm(in_channels=3, in_place=True)
layer.initialize(ctx=devices)
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
    done = run_python(HOOK)
    assert done.returncode == 0 and "SEEN [[2.0, 2.0]]" in done.stdout, done.stdout + done.stderr
