"""Tens of thousands of steps of the loop that everyone writes, on 4 CPU devices: no wait, no growth.

    MXNET_CPU_TEMP_COPY=256 OMP_NUM_THREADS=1 python benchmarks/long_run.py --mode static --steps 50000

A small net, its loss outside the net's graph, a Trainer, and now and then a prediction. Logs resident memory, threads
and the loss. Ends with 1 if memory grows by 1% or more after the first 1,000 steps (3% after the first half of a run
shorter than 10,000), if more threads are added after them than there are layers on all devices, or if the loss is not
finite. (MXNet adds a thread, and memory for it, when more custom operators are pending at once than ever before.)
"""

import argparse
import os
import sys
import time

import mxnet as mx
import numpy as np
import psutil
from mxnet import autograd, gluon
from mxnet.gluon import nn

import gluon_syncbn

MODES = {"imperative": None, "hybridize": {}, "static": {"static_alloc": True, "static_shape": True}}


def make_net(devices, mode: str):
    net = nn.HybridSequential()
    for width in (8, 16):
        net.add(nn.Conv2D(width, 3, padding=1), gluon_syncbn.SyncBatchNorm(), nn.Activation("relu"))
    net.add(nn.GlobalAvgPool2D(), nn.Dense(4))
    net.initialize(mx.init.Xavier(), ctx=devices)
    if MODES[mode] is not None:
        net.hybridize(**MODES[mode])
    return net


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=list(MODES), default="static")
    parser.add_argument("--steps", type=int, default=20000)
    options = parser.parse_args()
    mx.random.seed(0)
    devices = [mx.cpu(i) for i in range(4)]
    net, loss_of = make_net(devices, options.mode), gluon.loss.SoftmaxCrossEntropyLoss()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01})
    rng = np.random.RandomState(0)
    images, labels = mx.nd.array(rng.standard_normal((64, 3, 12, 12))), mx.nd.array(rng.randint(0, 4, 64))
    process, started = psutil.Process(), time.perf_counter()
    settled, every = min(1000, options.steps // 2), max(1, options.steps // 20)
    for number in range(1, options.steps + 1):
        batch = slice(8 * (number % 8), 8 * (number % 8) + 8)
        shards = [gluon.utils.split_and_load(data[batch], devices) for data in (images, labels)]
        with autograd.record():
            losses = [loss_of(net(x), y) for x, y in zip(*shards)]
        autograd.backward(losses)
        trainer.step(8)
        loss = sum(float(item.sum().asscalar()) for item in losses)
        if number % 100 == 0:
            [net(x) for x in shards[0]]
        if number == settled or number % every == 0:
            resident, threads = process.memory_info().rss, len(os.listdir("/proc/self/task"))
            if number == settled:
                first = resident, threads
            print(
                f"step {number}: {resident / 2**20:.1f} MiB, {threads} threads, loss {loss:.4f}, "
                f"{time.perf_counter() - started:.0f} s",
                flush=True,
            )
        if not np.isfinite(loss):
            sys.exit(f"step {number}: the loss is {loss}")
    grown, added = resident / first[0] - 1, threads - first[1]
    print(
        f"{options.mode}, back end {net[1].backend}: memory grew by {100 * grown:.2f}%, {added} threads were added "
        f"after step {settled}"
    )
    sys.exit(0 if grown < (0.01 if options.steps >= 10000 else 0.03) and added <= 2 * len(devices) else 1)


if __name__ == "__main__":
    main()
