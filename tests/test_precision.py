"""Low precision: the error against a float64 oracle is no larger than that of `nn.BatchNorm` on the whole batch."""

import mxnet as mx
import numpy as np
import oracle
import pytest
from harness import MODES, cpus, random_affine, random_shards, run_python, set_mode, step
from mxnet.gluon import nn

from gluon_syncbn import SyncBatchNorm
from gluon_syncbn.backends.bfloat16 import mxnet_takes_bfloat16

pytestmark = [pytest.mark.usefixtures("backend"), pytest.mark.parametrize("mode", list(MODES))]

SHAPES = {"many values": [(3, 4, 16, 16)] * 2, "few values": [(1, 4, 3, 3), (2, 4, 3, 3)], "vectors": [(5, 4), (3, 4)]}
BATCHES = 15  # whose errors are averaged: in one alone, which of two rounds more luckily is chance
# The portable back end normalizes with nn.BatchNorm's own operator, so it rounds as that does, and then once more.
LARGEST_RATIO = {"native": 1.0, "portable": 1.4}


def squared_error(actual, expected) -> float:
    """Mean squared error as a share of the mean square."""
    actual, expected = (np.concatenate([np.ravel(item) for item in items]) for items in (actual, expected))
    return np.mean(np.square(actual.astype(np.float64) - expected)) / np.mean(np.square(expected))


def errors(norm, contexts, mode, dtype, shapes, mean, std) -> np.ndarray:
    """Root mean square over batches, of outputs and of the gradients of input, γ and β."""
    net = nn.HybridSequential()
    net.add(norm(in_channels=4))
    net.cast(dtype)
    net.initialize(ctx=contexts)
    gamma, beta = random_affine(net[0], 4)
    set_mode(net, mode)
    squares = []
    for seed in range(BATCHES):
        shards, heads = random_shards(shapes, dtype, seed, mean, std), random_shards(shapes, dtype, seed + 100)
        expected = oracle.batch_norm(shards, gamma, beta, heads=heads)
        if len(contexts) == 1:
            shards, heads = [np.concatenate(shards)], [np.concatenate(heads)]
        outputs, inputs = step(net, shards, heads, contexts)
        squares.append(
            [
                squared_error([item.asnumpy() for item in outputs], expected.outputs),
                squared_error([item.grad.asnumpy() for item in inputs], expected.input_gradients),
                squared_error([sum(net[0].gamma.grad(d).asnumpy() for d in contexts)], [expected.gamma_gradient]),
                squared_error([sum(net[0].beta.grad(d).asnumpy() for d in contexts)], [expected.beta_gradient]),
            ]
        )
    for name in ("gamma", "beta", "running_mean", "running_var"):
        assert getattr(net[0], name).data(contexts[0]).dtype == np.float32
    return np.sqrt(np.mean(squares, axis=0))


@pytest.mark.parametrize("mean, std", [(0, 1), (1.5, 2), (30, 0.5)])
@pytest.mark.parametrize("case", list(SHAPES))
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_error_against_float64_is_no_larger_than_that_of_batchnorm(dtype, case, mean, std, mode, backend):
    """After ``net.cast(dtype)``. γ, β and statistics stay in float32."""
    how = mode, dtype, SHAPES[case], mean, std
    ours, theirs = errors(SyncBatchNorm, cpus(2), *how), errors(nn.BatchNorm, [mx.cpu(0)], *how)
    assert np.all(ours <= LARGEST_RATIO[backend] * theirs), (ours, theirs)


AMP = """
from mxnet.contrib import amp
amp.init({dtype!r})
low = amp.amp.bfloat16 if {dtype!r} == 'bfloat16' else 'float16'
import oracle
from harness import *
from mxnet.gluon import nn
import gluon_syncbn

class Net(mx.gluon.HybridBlock):
    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def hybrid_forward(self, F, x):  # as behind a convolution under amp: a low precision input
        return F.cast(self.norm(F.amp_cast(x, dtype=low)), 'float32')

layer = gluon_syncbn.SyncBatchNorm(in_channels=4, timeout=20)
net = Net(layer)
net.initialize(ctx=cpus(2))
set_mode(net, {mode!r})
trainer = mx.gluon.Trainer(net.collect_params(), 'sgd', {{'learning_rate': 0.0}})
amp.init_trainer(trainer)
shapes = [(2, 4, 6, 6), (1, 4, 6, 6)]
shards = [np.round(item * 8) / 8 for item in random_shards(shapes)]  # the same numbers in every precision
inputs = [mx.nd.array(shard, ctx=device) for shard, device in zip(shards, cpus(2))]
for item in inputs:
    item.attach_grad()
with autograd.record():
    outputs = [net(item) for item in inputs]
    losses = [mx.nd.sum(mx.nd.square(output)) / 1e4 for output in outputs]
    with amp.scale_loss(losses, trainer) as scaled:
        autograd.backward(scaled)
expected = oracle.batch_norm(shards, np.ones(4), np.zeros(4))
heads = [2e-4 * output.asnumpy() * trainer._amp_loss_scaler.loss_scale for output in outputs]
gradients = oracle.batch_norm(shards, np.ones(4), np.zeros(4), heads=heads)
print('DTYPES', layer.gamma.data(mx.cpu(0)).dtype, layer.running_var.data(mx.cpu(1)).dtype)
print('ERRORS', oracle.distance([item.asnumpy() for item in outputs], expected.outputs),
      oracle.distance([layer.running_var.data(mx.cpu(1)).asnumpy()], [0.9 + 0.1 * expected.var]),
      oracle.distance([sum(layer.gamma.grad(d).asnumpy() for d in cpus(2))], [gradients.gamma_gradient]))
"""


@pytest.mark.parametrize("dtype, rounding", [("float16", 2.0**-10), ("bfloat16", 2.0**-7)])
def test_amp(dtype, rounding, mode, backend):
    """Statistics and parameters stay in float32. (MXNet has no float16 convolution on CPU, so the input is cast.)"""
    done = run_python(AMP.format(dtype=dtype, mode=mode))
    if dtype == "bfloat16" and backend == "portable" and not mxnet_takes_bfloat16():
        assert done.returncode != 0 and "MXNet's own BatchNorm, which takes no bfloat16" in done.stderr, done.stderr
        return
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-1500:]
    assert done.stdout.count("numpy.float32") == 2
    errors = [float(word) for word in done.stdout.split("ERRORS")[1].split()]
    assert errors[0] < rounding
    assert errors[1] < 1e-6
    assert errors[2] < 2 * rounding
