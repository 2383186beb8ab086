"""A device that never arrives ends in an error on all that wait, in time; afterwards a full step is right."""

import textwrap

import pytest
from harness import LONG, MODES, run_python

pytestmark = pytest.mark.usefixtures("backend")

PROLOGUE = """
import time, warnings
import numpy as np
import oracle
from harness import *
from gluon_syncbn import SyncBatchNorm

mode, count = {mode!r}, {count}
devices = cpus(count)
layer = SyncBatchNorm(in_channels=3, timeout=1.5, prefix='stem_')
layer.initialize(ctx=devices)
net = mx.gluon.nn.HybridSequential()
net.add(layer)
set_mode(net, mode)
shapes = [(2, 3, 4, 4)] * count
shards, heads = random_shards(shapes), random_shards(shapes, seed=1)
inputs = [mx.nd.array(shard, ctx=device) for shard, device in zip(shards, devices)]
for item in inputs:
    item.attach_grad()

def failures(arrays):
    count = 0
    for array in arrays:
        try:
            array.asnumpy()
        except mx.MXNetError as error:
            print(error)
            count += 1
    return count
"""

EPILOGUE = """
seconds = time.perf_counter() - started
try:
    mx.nd.waitall()
except mx.MXNetError:
    pass
outputs, inputs = step(net, shards, heads, devices)
expected = oracle.batch_norm(shards, np.ones(3), np.zeros(3), heads=heads)
assert oracle.distance([item.asnumpy() for item in outputs], expected.outputs) < 1e-5
assert oracle.distance([item.grad.asnumpy() for item in inputs], expected.input_gradients) < 1e-4
print(f'RIGHT AFTERWARDS; WAITED {{seconds:.2f}}')
"""

MISSING_IN_FORWARD = """
started = time.perf_counter()
with autograd.record():
    outputs = [net(item) for item in inputs[:-1]]
assert failures(outputs) == count - 1
"""

MISSING_IN_BACKWARD = """
with autograd.record():
    outputs = [net(item) for item in inputs]
mx.nd.waitall()
started = time.perf_counter()
autograd.backward(outputs[:-1], [mx.nd.array(h, ctx=d) for h, d in zip(heads[:-1], devices)])
assert failures([item.grad for item in inputs[:-1]]) == count - 1
"""


@pytest.mark.parametrize("count", [4])
@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("body, direction", [(MISSING_IN_FORWARD, "forward"), (MISSING_IN_BACKWARD, "backward")])
def test_a_device_never_arrives(body, direction, mode, count):
    done = run_python(textwrap.dedent((PROLOGUE + body + EPILOGUE).format(mode=mode, count=count)))
    assert done.returncode == 0, done.stdout + done.stderr
    waited = float(done.stdout.split("RIGHT AFTERWARDS; WAITED")[1])
    assert 1.4 < waited < 15
    arrived = ", ".join(f"cpu({i})" for i in range(count - 1))
    message = (
        f"MXNetError: SyncBatchNorm 'stem': {direction} pass waited 1.5 s for 1 of {count} devices. "
        f"Arrived: {arrived}. Missing: cpu({count - 1}). Usual reasons:"
    )
    assert done.stdout.count(message) == count - 1


@pytest.mark.parametrize("mode", list(MODES))
def test_a_script_may_end_without_reading_its_last_gradients(mode):
    """MXNet stops the threads of custom operators at exit; what is pending must have ended before."""
    code = """
from harness import *
from gluon_syncbn import SyncBatchNorm
net = mx.gluon.nn.HybridSequential()
for _ in range(20):
    net.add(SyncBatchNorm(in_channels=64, timeout={timeout}))
net.initialize(ctx=cpus(4))
set_mode(net, {mode!r})
shards = random_shards([(2, 64, 32, 32)] * 4)
step(net, shards, shards, cpus(4))
"""
    done = run_python(code.format(mode=mode, timeout=LONG))
    assert done.returncode == 0
    assert "Error" not in done.stdout + done.stderr


def test_without_the_compiled_library_the_error_says_why():
    code = """
import pathlib
exists = pathlib.Path.exists
pathlib.Path.exists = lambda path: path.suffix != '.so' and exists(path)
from harness import *
from gluon_syncbn import SyncBatchNorm
layer = SyncBatchNorm(in_channels=3, timeout=1, prefix='stem_')
layer.initialize(ctx=cpus(2))
with autograd.record():
    output = layer(mx.nd.ones((2, 3)))
try:
    output.asnumpy()
except gluon_syncbn.SyncBatchNormError as error:
    print('FAILED', layer.backend, error)
"""
    done = run_python(code, GLUON_SYNCBN_BACKEND="auto")
    assert done.returncode == 0, done.stderr
    assert "FAILED portable SyncBatchNorm 'stem': forward pass waited 1 s for 1 of 2 devices" in done.stdout
