"""Thousands of steps of ResNet-18 on 2 CPU contexts: no crash, and no number that differs.

    OMP_NUM_THREADS=1 python benchmarks/soak.py --mode static --steps 2000

Parameters do not change and a few batches take turns, so every step must give the same bits as its batch gave the first
time; and the first time must agree with the portable back end. A dangling input, a copy that is freed too early or a
missed wait would show as another number. Exits with 1 at the first difference.
"""

import argparse
import os
import sys
import time

import mxnet as mx
import numpy as np
import psutil
from gluoncv import model_zoo
from mxnet import autograd, gluon

import gluon_syncbn

MODES = {"imperative": None, "hybridize": {}, "static": {"static_alloc": True, "static_shape": True}}


loss_of = gluon.loss.SoftmaxCrossEntropyLoss()


def make(backend: str, devices, parameters=None):
    net = gluon_syncbn.convert_sync_batchnorm(model_zoo.get_model("resnet18_v1b", classes=10), backend=backend)
    net.initialize(mx.init.Xavier(), ctx=devices)
    if parameters:
        net.load_parameters(parameters, ctx=devices)
    return net


def step(net, batches) -> list:
    """Losses and all gradients, as arrays."""
    with autograd.record():
        losses = [loss_of(net(x), y) for x, y in batches]
    autograd.backward(losses)
    gradients = [
        parameter.grad(device)
        for parameter in net.collect_params().values()
        if parameter.grad_req != "null"
        for device in parameter.list_ctx()
    ]
    return [item.asnumpy() for item in [*losses, *gradients]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=list(MODES), default="static")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--backend", default="auto")
    options = parser.parse_args()
    devices = [mx.cpu(0), mx.cpu(1)]
    rng = np.random.RandomState(0)
    batches = [
        [
            (mx.nd.array(rng.standard_normal((2, 3, 32, 32)), ctx=device), mx.nd.array([1, 7], ctx=device))
            for device in devices
        ]
        for _ in range(3)
    ]
    mx.random.seed(0)
    net = make(options.backend, devices)
    step(net, batches[0])  # parameters have their shapes now
    parameters = f"/tmp/soak-{os.getpid()}.params"
    net.save_parameters(parameters)
    reference = make("portable", devices, parameters)
    os.remove(parameters)
    expected = [step(reference, batch) for batch in batches]
    if MODES[options.mode] is not None:
        net.hybridize(**MODES[options.mode])
    backend = next(block.backend for block in blocks(net) if isinstance(block, gluon_syncbn.SyncBatchNorm))
    print(f"ResNet-18, {options.mode}, {options.steps} steps, 2 CPU contexts, back end {backend}")
    first, started = [], time.perf_counter()
    for number in range(options.steps):
        seen = step(net, batches[number % len(batches)])
        if number < len(batches):
            worst = max(np.abs(a - b).max() / np.abs(b).max() for a, b in zip(seen, expected[number]))
            print(f"step {number}: largest difference to portable {worst:.1e} of a parameter's largest gradient")
            if not worst < 1e-2:
                sys.exit(1)
            first.append(seen)
        elif not all(np.array_equal(a, b) for a, b in zip(seen, first[number % len(batches)])):
            print(f"step {number}: WRONG NUMBER")
            sys.exit(1)
        if number + 1 in (100, options.steps) or (number + 1) % 500 == 0:
            resident = psutil.Process().memory_info().rss / 2**20
            print(
                f"step {number + 1}: same bits, {resident:.0f} MiB, {time.perf_counter() - started:.0f} s", flush=True
            )
    print("RIGHT")


def blocks(block):
    yield block
    for child in block._children.values():
        yield from blocks(child)


if __name__ == "__main__":
    main()
