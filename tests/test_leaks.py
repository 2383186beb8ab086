"""No step and no net leaves anything behind, and many steps give the same bits.

What is alive is counted (live.py), since the resident memory hides a small leak. That the same seed gives the same bits
in another process, whoever comes first, is proved with what users do in a loop (test_cpu_devices.py).
"""

import random

import pytest
from testing import run_program, run_python

LEAKS = """
import ctypes, threading, live
kept, never, libc = [], threading.Event(), ctypes.CDLL(None)
leaks = {
    'objects': lambda: kept.append([]),
    'blocks': lambda: kept.append(f'a text of each step: {len(kept)}'),
    'bytes': lambda: libc.malloc(1000) and None,
    'threads': lambda: threading.Thread(target=never.wait, daemon=True).start(),
}
for kind, leak in leaks.items():
    try:
        live.watch(leak, 2, 50, 256 if kind == 'bytes' else 1 << 20, 8)
        raise SystemExit(f'{kind} that are left behind were not seen')
    except AssertionError as error:
        assert str(error).startswith(kind), error
live.watch(lambda: None, 2, 50, 256, 8 + 150)
print('RIGHT')
"""


def test_a_leak_of_each_kind_would_be_seen():
    assert run_python(LEAKS).stdout == "RIGHT\n"


DETECTOR = """
import sys
sys.path.insert(0, 'examples')
import live
from testing import *
from train_detection import build_net, DigitsTrainTransform

devices, side = cpus(2), 64
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
    assert all(np.isfinite(loss.asnumpy()).all() for loss in losses)

live.watch(step, 4, 20, 10 << 10, 8)
print('RIGHT')
"""


def test_the_example():
    """In the mode in which it trains. With nn.BatchNorm, too, MXNet leaves some 5 kB a step."""
    assert run_python(DETECTOR).stdout.endswith("RIGHT\n")


# Steps of a net of three layers, and then nets that are made, trained and dropped, in every mode.
ALONE = """
import gc, time
import live
from testing import *

shards, heads = shards_and_heads([(2, 4, 3, 3), (1, 4, 3, 3)])

def make(mode, layers=3, **options):
    layers = [lambda: SyncBatchNorm(in_channels=4, timeout=60, **options)] * layers
    net = initialized(sequential(*layers, prefix='net_'), 2, mode)
    random_affine(net[0], 4)
    return net

def train(net):
    step(net, shards, heads, cpus(2))
    mx.nd.waitall()

for mode in MODES:
    net = make(mode)
    live.watch(lambda: train(net), 6, 60, 256, LATE_THREADS)
for mode in MODES:
    live.watch(lambda: train(make(mode, 2)), 4, 50, 2048, LATE_THREADS)
    net = make(mode, 1, activation='relu')  # the next is right
    check_step(net, reference_of(net[0], activation='relu'), shards, heads, layer=net[0])
    if net[0].backend == 'native':
        assert number_of_groups() > 0
    del net
deadline = time.monotonic() + HANG / 2  # MXNet's threads drop what they have run a moment later
while number_of_groups() and time.monotonic() < deadline:
    gc.collect()
    time.sleep(0.01)
assert number_of_groups() == 0
print('RIGHT')
"""


@pytest.mark.parametrize("backend", ["native", pytest.param("portable", marks=pytest.mark.long)])
def test_no_step_and_no_net_leaves_anything_behind(backend):
    """Neither objects nor memory, threads, or a group in the compiled core."""
    assert run_python(ALONE, GLUON_SYNCBN_BACKEND=backend).stdout.endswith("RIGHT\n")


def test_the_soak_in_short(seed):
    """A short run of benchmarks/soak.py, whose log is docs/soak.log: every step gives the bits of the first."""
    mode, steps = random.Random(seed).choice([("imperative", 12), ("hybridize", 12), ("static", 25)])
    done = run_program(["benchmarks/soak.py", "--mode", mode, "--steps", steps, "--backend", "native"])
    assert done.stdout.endswith("RIGHT\n"), done.stdout
