"""No step leaves anything behind: of a layer, or of the example in the mode in which it trains."""

import live
import pytest
from harness import LATE_THREADS, run_python

DETECTOR = """
import sys
sys.path.insert(0, 'examples')
import gluon_syncbn
import mxnet as mx, numpy as np
from train_detection import build_net, DigitsTrainTransform

devices = [mx.cpu(0), mx.cpu(1)]
side = 64
net = build_net(['a', 'b'], 'syncbn', devices)
transform = DigitsTrainTransform(side, side, net)
net.hybridize(static_alloc=True, static_shape=True)
trainer = mx.gluon.Trainer(net.collect_params(), 'adam')
image = mx.nd.array(np.random.RandomState(0).randint(0, 255, (side, side, 3)), dtype='uint8')
image, *targets, boxes = transform(image, np.array([[10, 10, 40, 50, 1]], dtype='float32'))

def step():
    batches = [[item.expand_dims(0).as_in_context(device) for item in (image, boxes, *targets)] for device in devices]
    with mx.autograd.record():
        losses = [sum(loss.sum() for loss in net(*batch)) for batch in batches]
    mx.autograd.backward(losses)
    trainer.step(2)
    return sum(float(loss.asnumpy()) for loss in losses)
"""

SMALL = """
import harness
from harness import *
from gluon_syncbn import SyncBatchNorm
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
import live
for number in range(1, {windows} * {steps} + 1):
    step()
    if number % {steps} == 0:
        print('LIVE', *live.count())
"""


def check(code, backend, steps, bytes_per_step, windows=5):
    """So many windows of so many steps, of which the first is left out: there graphs and pools are made."""
    done = run_python(code + MEASURE.format(steps=steps, windows=windows), GLUON_SYNCBN_BACKEND=backend)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = [list(map(int, line.split()[1:])) for line in done.stdout.splitlines() if line.startswith("LIVE")]
    live.check(counts[1:], steps, bytes_per_step, LATE_THREADS)


def test_a_leak_would_be_seen():
    code = "kept = []\ndef step():\n    kept.append('a text of each step: ' + str(len(kept)))\n"
    with pytest.raises(AssertionError, match="blocks per step"):
        check("import harness\n" + code, "native", 100, bytes_per_step=256)


def test_the_example():
    """With nn.BatchNorm, too, MXNet leaves some 5 kB a step."""
    check(DETECTOR, "native", 20, bytes_per_step=10 << 10)


@pytest.mark.parametrize("mode", ["imperative", "hybridize", "static"])
def test_the_layer_alone_in_every_mode(mode, backend):
    """Three layers on two devices, forward and backward: nothing of a call may be left."""
    check(SMALL.format(mode=mode), backend, 100, bytes_per_step=256, windows=10)  # MXNet's pools grow for some of them
