"""Several nets in one process keep apart, even under the same names; what is dropped is gone."""

import gc
import time
import weakref

import mxnet as mx
import numpy as np
import oracle
import pytest
from harness import HANG, LATE_THREADS, MODES, cpus, random_shards, run_python, set_mode, step
from mxnet import autograd
from mxnet.gluon import nn

from gluon_syncbn import SyncBatchNorm

pytestmark = [pytest.mark.usefixtures("backend"), pytest.mark.parametrize("mode", list(MODES))]

SHAPES = [(2, 3, 4, 4), (1, 3, 4, 4)]


def make(mode, **options):
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        for _ in range(2):
            net.add(SyncBatchNorm(in_channels=3, timeout=60, **options))
    net.initialize(ctx=cpus(2))
    return set_mode(net, mode)


def expected_outputs(shards):
    first = oracle.batch_norm(shards, np.ones(3), np.zeros(3)).outputs
    return oracle.batch_norm(first, np.ones(3), np.zeros(3)).outputs


def test_teacher_and_student_with_the_same_prefix(mode):
    """Interleaved in every order; the devices do not even come to the two nets in the same one."""
    teacher, student = make(mode), make(mode)
    assert list(teacher.collect_params()) == list(student.collect_params())
    for seed in range(5):
        parts = {teacher: random_shards(SHAPES, seed=seed), student: random_shards(SHAPES, seed=seed + 100)}
        outputs = {teacher: [None] * 2, student: [None] * 2}
        with autograd.record():
            for net, rank in ((teacher, 0), (student, 0), (student, 1), (teacher, 1)):
                outputs[net][rank] = net(mx.nd.array(parts[net][rank], ctx=mx.cpu(rank)))
        autograd.backward([*outputs[student], *outputs[teacher]])
        for net, seen in outputs.items():
            assert oracle.distance([item.asnumpy() for item in seen], expected_outputs(parts[net])) < 1e-5


def test_nets_on_different_devices(mode):
    pair, triple = make(mode), make(mode)
    triple.collect_params().reset_ctx(cpus(3))
    set_mode(triple, mode)
    for net, shapes in ((pair, SHAPES), (triple, [*SHAPES, SHAPES[0]]), (pair, SHAPES)):
        shards = random_shards(shapes)
        outputs, _ = step(net, shards, shards, cpus(len(shapes)))
        assert oracle.distance([item.asnumpy() for item in outputs], expected_outputs(shards)) < 1e-5


def test_what_a_layer_holds_goes_with_it(mode):
    """Its groups do."""
    net = make(mode)
    shards = random_shards(SHAPES)
    outputs, inputs = step(net, shards, shards, cpus(2))
    mx.nd.waitall()
    groups = [weakref.ref(layer._sync._group[1]) for layer in net]
    gc.collect()
    assert all(group() is not None for group in groups)
    del net, outputs, inputs
    deadline = time.monotonic() + HANG  # MXNet's threads drop what they have run a moment later
    while any(group() is not None for group in groups) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert all(group() is None for group in groups)


HUNDREDS = """
import gc, os
import psutil
from harness import *
from gluon_syncbn import SyncBatchNorm
from gluon_syncbn.backends import native
devices = cpus(2)
shards = random_shards([(1, 8, 3, 3)] * 2)

def once():
    net = mx.gluon.nn.HybridSequential(prefix='net_')
    with net.name_scope():
        net.add(SyncBatchNorm(in_channels=8, timeout=20), SyncBatchNorm(in_channels=8, timeout=20))
    net.initialize(ctx=devices)
    set_mode(net, {mode!r})
    outputs, inputs = step(net, shards, shards, devices)
    for item in inputs:
        item.grad.wait_to_read()

def resident():
    gc.collect()
    mx.nd.waitall()
    groups = len(native._groups.specs)  # an entry goes when the compiled operator frees its group
    return psutil.Process().memory_info().rss, len(os.listdir('/proc/self/task')), groups

for number in range(1, 501):
    once()
    if number % 100 == 0:
        print('MEMORY', *resident())
"""


@pytest.mark.portable_with(mode="static")
def test_hundreds_of_nets_leave_no_memory_and_no_threads(mode):
    """500 of two layers each, so that what is left of a group, of arrays or of a thread would show."""
    done = run_python(HUNDREDS.format(mode=mode))
    assert done.returncode == 0, done.stdout + done.stderr
    memory, threads, groups = np.array([line.split()[1:] for line in done.stdout.splitlines()], dtype=int).T
    # What is left behind by each net shows in every window; what an allocator does now and then, in one or two.
    assert min(np.diff(memory)) / 100 < 2048, f"bytes per net: {np.diff(memory) / 100}"
    assert threads[-1] <= threads[0] + LATE_THREADS
    assert groups[-1] <= 2 * 2  # in the compiled operator: of a net or two that the last collection has just dropped
