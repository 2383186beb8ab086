"""Memory stays what it is from the 20th step on: a layer, or the example in the mode in which it trains."""

import numpy as np
import pytest
from harness import LATE_THREADS, run_python

DETECTOR = """
import sys
sys.path.insert(0, 'examples')
import gluon_syncbn
import mxnet as mx, numpy as np, psutil
from train_detection import TrainingLoss, build_net, DigitsTrainTransform

devices = [mx.cpu(0), mx.cpu(1)]
side = 64
net = build_net(['a', 'b'], 'syncbn', devices)
transform = DigitsTrainTransform(side, side, net)
loss_of = TrainingLoss(net)
loss_of.hybridize(static_alloc=True, static_shape=True)
trainer = mx.gluon.Trainer(net.collect_params(), 'adam')
image = mx.nd.array(np.random.RandomState(0).randint(0, 255, (side, side, 3)), dtype='uint8')
image, *targets, boxes = transform(image, np.array([[10, 10, 40, 50, 1]], dtype='float32'))

def step():
    batches = [[item.expand_dims(0).as_in_context(device) for item in (image, boxes, *targets)] for device in devices]
    with mx.autograd.record():
        losses = [loss_of(*batch) for batch in batches]
    mx.autograd.backward(losses)
    trainer.step(2)
    return sum(float(loss.asnumpy()) for loss in losses)
"""

SMALL = """
import harness
from harness import *
from gluon_syncbn import SyncBatchNorm
import psutil
devices = cpus(2)
net = mx.gluon.nn.HybridSequential()
for _ in range(3):
    net.add(SyncBatchNorm(in_channels=4, timeout=30))
net.initialize(ctx=devices)
set_mode(net, {mode!r})
shards = random_shards([(2, 4, 3, 3)] * 2)

def step():
    harness.step(net, shards, shards, devices)
    mx.nd.waitall()
"""

MEASURE = """
import os
def resident():
    return psutil.Process().memory_info().rss, len(os.listdir('/proc/self/task'))

for number in range(1, {steps} + 1):
    step()
    if number >= 20 and number % 20 == 0:
        print('MEMORY', *resident())
"""


# What each step leaves behind shows in every 20 steps, what an allocator does now and then in one or two of them.
# The example leaves some 5 to 8 kB a step, with nn.BatchNorm as well.
BYTES_PER_STEP = 24 << 10


def check(code, backend, steps=100):
    done = run_python(code + MEASURE.format(steps=steps), GLUON_SYNCBN_BACKEND=backend)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("MEMORY")]
    memory, threads = np.array(lines, dtype=int).T
    assert min(np.diff(memory)) / 20 < BYTES_PER_STEP, f"bytes per step: {np.diff(memory) / 20}"
    assert memory[-1] <= 1.02 * memory[0]
    assert threads[-1] <= threads[0] + LATE_THREADS


def test_the_example(backend):
    check(DETECTOR, backend, steps=100)  # that some 20 of them leave little is the promise


@pytest.mark.parametrize("mode", ["imperative", "hybridize", "static"])
def test_the_layer_alone_in_every_mode(mode, backend):
    """Arrays of a few bytes: what grows here is what the layer itself leaves behind at each call."""
    check(SMALL.format(mode=mode), backend)
