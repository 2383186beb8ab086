"""The cost of synchronization inside MXNet, if one or two of them are GPUs.

    python benchmarks/gpu_rendezvous.py [--devices cpu:0,gpu:0 gpu:0,gpu:1] [--json FILE]

A small layer's operator is called in training mode and in prediction mode, which launches one kernel less and does not
synchronize. The difference is the moments' kernel, the transfer of its numbers to the host, and the rendezvous. The
backward pass of a call in prediction mode lacks only the rendezvous. Times are medians, from the first call until all
results are there; the modes take turns. Needs none of MXNet's own kernels. Without a GPU it says so and ends with
status 3.
"""

import argparse
import json
import statistics
import sys
import time

import mxnet as mx
import numpy as np
from common import interleaved, machine
from mxnet import autograd

import gluon_syncbn
from gluon_syncbn.backends import native
from gluon_syncbn.layer.spec import LayerSpec

SHAPE = (1, 64, 2, 2)


def prepare(devices):
    """Both passes in both modes, as functions that return seconds."""
    backend = native.NativeBackend()
    spec = LayerSpec("layer", num_devices=len(devices))
    group = backend.group(spec, devices)

    def vectors(value):
        return [mx.nd.array(np.full(SHAPE[1], value)).copyto(device) for device in devices]

    gamma, beta, mean, var = vectors(1), vectors(0), vectors(0), vectors(1)
    random = np.random.RandomState(0).standard_normal(SHAPE)
    inputs, gradients, heads = ([mx.nd.array(random).copyto(device) for device in devices] for _ in range(3))
    autograd.mark_variables(inputs, gradients)

    def forward(train_mode):
        mx.nd.waitall()
        started = time.perf_counter()
        with autograd.record(train_mode=train_mode):
            outputs = [
                backend.normalize(arrays, spec, str(group.id), group.devices)
                for arrays in zip(inputs, gamma, beta, mean, var)
            ]
        mx.nd.waitall()
        return time.perf_counter() - started, outputs

    def backward(train_mode):
        outputs = forward(train_mode)[1]
        started = time.perf_counter()
        autograd.backward(outputs, heads)
        mx.nd.waitall()
        return time.perf_counter() - started

    return {
        "forward, training": lambda: forward(True)[0],
        "forward, prediction": lambda: forward(False)[0],
        "backward, training": lambda: backward(True),
        "backward, prediction": lambda: backward(False),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", nargs="+", default=["cpu:0,gpu:0"], help="groups, one after the other")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--json", help="file for the results")
    arguments = parser.parse_args()
    if mx.context.num_gpus() == 0:
        print("NOT RUN: MXNet sees no GPU")
        return 3
    print(f"{machine()}; gluon_syncbn {gluon_syncbn.__version__}; {SHAPE} each")
    results = [measure(group, arguments.rounds) for group in arguments.devices]
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as output:
            json.dump({"machine": machine(), "shape": SHAPE, "results": results}, output)
    return 0


def measure(group: str, rounds: int) -> dict:
    """Medians in microseconds."""
    devices = [mx.Context(kind, int(number)) for kind, number in (item.split(":") for item in group.split(","))]
    seconds = interleaved(prepare(devices), rounds, warm_up=20)
    result = {"devices": group, "rounds": rounds}
    for direction in ("forward", "backward"):
        training, prediction = (seconds[f"{direction}, {mode}"] for mode in ("training", "prediction"))
        took = {
            "training": 1e6 * statistics.median(training),
            "prediction": 1e6 * statistics.median(prediction),
            "more": 1e6 * statistics.median(a - b for a, b in zip(training, prediction)),
        }
        print(
            f"{group}, {direction}: {took['training']:.0f} µs in training, {took['prediction']:.0f} µs in prediction "
            f"mode, {took['more']:.0f} µs more"
        )
        result[direction] = took
    return result


if __name__ == "__main__":
    sys.exit(main())
