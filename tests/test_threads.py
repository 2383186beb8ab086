"""One Python thread per device, as gluoncv's DataParallelModel runs a net."""

import mxnet as mx
import numpy as np
import oracle
import pytest
from gluoncv.utils.parallel import DataParallelModel
from harness import MODES, cpus, random_shards, set_mode
from mxnet import autograd
from mxnet.gluon import nn

from gluon_syncbn import SyncBatchNorm

pytestmark = pytest.mark.usefixtures("backend")


@pytest.mark.parametrize("mode", list(MODES))
def test_data_parallel_model(mode):
    devices, shapes = cpus(2), [(2, 4, 5, 5)] * 2
    net = nn.HybridSequential()
    for _ in range(3):
        net.add(SyncBatchNorm(in_channels=4, timeout=30))
    net.initialize(ctx=devices)
    set_mode(net, mode)
    for device in devices:  # builds the graph: several threads must not
        net(mx.nd.ones(shapes[0], ctx=device)).wait_to_read()
    model = DataParallelModel(net, devices, sync=True)
    expected_mean = np.zeros(4)
    for seed in range(2):  # each time new threads, in which MXNet leaves 88 MB
        shards = random_shards(shapes, seed=seed)
        with autograd.record():
            # Splits the batch over the devices; returns a tuple for each.
            outputs = [item for (item,) in model(mx.nd.array(np.concatenate(shards)))]
        autograd.backward(outputs)
        mx.nd.waitall()
        first = oracle.batch_norm(shards, np.ones(4), np.zeros(4))
        second = oracle.batch_norm(first.outputs, np.ones(4), np.zeros(4))
        third = oracle.batch_norm(second.outputs, np.ones(4), np.zeros(4))
        assert oracle.distance([item.asnumpy() for item in outputs], third.outputs) < 1e-5
        expected_mean = 0.9 * expected_mean + 0.1 * first.mean
        for device in devices:
            assert oracle.distance([net[0].running_mean.data(device).asnumpy()], [expected_mean]) < 1e-5
