"""Networks with parallel branches, shared heads and Dropout: equal to one device with the whole batch, and none hangs.

Random graphs of branches.py, others in each run, with the three modes in turn, in a process with a hard time limit.
(500 in each mode: ``python tests/branches.py --backend native --mode static``, and so on.)
"""

import mxnet as mx
import numpy as np
import oracle
import pytest
from delay import Late
from harness import MODES, cpus, random_shards, run_program, set_mode
from mxnet import autograd
from mxnet.gluon import nn

from gluon_syncbn import SyncBatchNorm

GRAPHS = {"native": 100, "portable": 30}


def test_random_graphs(backend, seed):
    count = GRAPHS[backend]
    program = ["tests/branches.py", "--backend", backend, "--first", seed, "--count", count]
    done = run_program(program)
    assert done.returncode == 0, done.stdout[-200:] + done.stderr[-3000:]
    assert f"RIGHT: {count} graphs" in done.stdout


@pytest.mark.parametrize("mode", list(MODES))
def test_a_net_that_runs_twice_per_step_on_each_device(mode, backend):
    """As a head on pyramid levels, or a discriminator. On one device the input of the second run is ready first."""
    net = nn.HybridSequential()
    net.add(SyncBatchNorm(in_channels=3, timeout=60), SyncBatchNorm(in_channels=3, timeout=60))
    net.initialize(ctx=cpus(2))
    set_mode(net, mode)
    late = Late(lambda device: 0.02 * device.device_id)
    mean = np.zeros(3)
    for seed in range(10):
        runs = [random_shards([(2, 3, 8, 8)] * 2, seed=2 * seed + run) for run in range(2)]
        outputs = [[], []]
        with autograd.record():
            for rank, device in enumerate(cpus(2)):
                first, second = (mx.nd.array(run[rank], ctx=device) for run in runs)
                outputs[0].append(net(late(first)))
                outputs[1].append(net(second))
        autograd.backward(outputs[0] + outputs[1])
        for run, seen in zip(runs, outputs):
            inner = oracle.batch_norm(run, np.ones(3), np.zeros(3))
            expected = oracle.batch_norm(inner.outputs, np.ones(3), np.zeros(3))
            assert oracle.distance([item.asnumpy() for item in seen], expected.outputs) < 1e-5
            mean = 0.9 * mean + 0.1 * inner.mean
        for device in cpus(2):
            assert oracle.distance([net[0].running_mean.data(device).asnumpy()], [mean]) < 1e-5
