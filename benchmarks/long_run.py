"""Tens of thousands of steps of a small static net on 4 CPU contexts: memory and threads must not grow.

    OMP_NUM_THREADS=1 python benchmarks/long_run.py --steps 20000

Logs resident memory, threads and the loss; ends with 1 if memory after the first 1,000 steps (or the first half, if
that is less) grows by 1% or more, more threads are added after them than there are devices, or the loss is not finite.
(MXNet adds a thread when more custom operators are pending at once than ever before, which may happen late.)
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


class Loss(gluon.HybridBlock):
    """The net with its loss; the casts keep operators with temporary space away from the graph's borders."""

    def __init__(self):
        super().__init__()
        self.net = nn.HybridSequential()
        for width in (8, 16):
            self.net.add(nn.Conv2D(width, 3, padding=1), gluon_syncbn.SyncBatchNorm(), nn.Activation("relu"))
        self.net.add(nn.GlobalAvgPool2D(), nn.Dense(4))
        self.loss = gluon.loss.SoftmaxCrossEntropyLoss()

    def hybrid_forward(self, F, x, label):
        return F.cast(self.loss(self.net(F.cast(x, "float32")), F.cast(label, "float32")), "float32")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20000)
    options = parser.parse_args()
    mx.random.seed(0)
    devices = [mx.cpu(i) for i in range(4)]
    loss_of = Loss()
    loss_of.initialize(mx.init.Xavier(), ctx=devices)
    loss_of.hybridize(static_alloc=True, static_shape=True)
    trainer = gluon.Trainer(loss_of.collect_params(), "sgd", {"learning_rate": 0.01})
    rng = np.random.RandomState(0)
    batches = [
        [
            (
                mx.nd.array(rng.standard_normal((2, 3, 12, 12)), ctx=device),
                mx.nd.array(rng.randint(0, 4, 2), ctx=device),
            )
            for device in devices
        ]
        for _ in range(8)
    ]
    process, started = psutil.Process(), time.perf_counter()
    settled, every = min(1000, options.steps // 2), max(1, options.steps // 20)
    for number in range(1, options.steps + 1):
        with autograd.record():
            losses = [loss_of(*batch) for batch in batches[number % len(batches)]]
        autograd.backward(losses)
        trainer.step(8)
        loss = sum(float(item.asnumpy().sum()) for item in losses)
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
    layer = loss_of.net[1]
    print(
        f"back end {layer.backend}: memory grew by {100 * grown:.2f}%, {added} threads were added after step {settled}"
    )
    sys.exit(0 if grown < 0.01 and added <= len(devices) else 1)


if __name__ == "__main__":
    main()
