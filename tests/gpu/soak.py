"""Six layers on groups of GPUs and CPUs for some minutes: every step gives the bits of the first, and nothing grows.

    python tests/gpu/soak.py --seconds 300

Layers of several shapes, types and layouts are called on each device in an order drawn anew at every step, with small
random delays, so that they meet in ever new ways. The first step is compared with the reference. Parameters and batches
stay as they are; a missed wait, or memory that is used too early again, would show as another number. Exits with 1 at
the first difference, and with 3 if MXNet sees no GPU.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.dirname(HERE)]

import mxnet as mx  # noqa: E402
import numpy as np  # noqa: E402
import psutil  # noqa: E402
from conftest import GPUS, zeros_by_copy  # noqa: E402
from mxnet import autograd  # noqa: E402
from reference import check_all  # noqa: E402
from test_operator import UNITS, make, place, with_gradients  # noqa: E402
from testing import check_affine, reference_of, shards_and_heads, vector_dtype  # noqa: E402

# Shape on the first device (each further one has one image more), type, axis of the channels.
LAYERS = [
    ((2, 64, 7, 7), "float32", 1),
    ((2, 32, 5, 5), "float16", 1),
    ((1, 3, 31, 33), "float32", 1),
    ((3, 9, 5, 32), "float32", -1),
    ((2, 3, 3, 128), "float16", -1),
    ((4, 50, 3), "float64", 1),
]


class Case:
    """A layer with its batch."""

    def __init__(self, number: int, devices):
        shape, self.dtype, self.axis = LAYERS[number]
        self.devices, prefix = devices, f"layer{number}_"
        self.layer = make(devices, self.dtype, shape[self.axis], timeout=60, prefix=prefix, axis=self.axis)
        shapes = [(shape[0] + i, *shape[1:]) for i in range(len(devices))]
        self.batch, self.heads = shards_and_heads(shapes, self.dtype, seed=number)

    def start(self) -> None:
        self.inputs, self.gradients = with_gradients(self.batch, self.devices)
        self.head_gradients = place(self.heads, self.devices)
        self.outputs = [None] * len(self.devices)

    def call(self, rank: int) -> None:
        self.outputs[rank] = self.layer(self.inputs[rank])

    def results(self) -> list:
        affine = [*self.layer.gamma.list_grad(), *self.layer.beta.list_grad()]
        return [array.asnumpy() for array in (*self.outputs, *self.gradients, *affine)]

    def check(self, results) -> None:
        """After the step that gave these."""
        count, name = len(self.devices), self.layer.name
        expected = reference_of(self.layer).step(self.batch, self.heads)
        how = {"dtype": self.dtype, "axis": self.axis, "units": UNITS}
        check_all(f"output of {name}", results[:count], expected.outputs, **how)
        check_all(f"input gradient of {name}", results[count : 2 * count], expected.input_gradients, **how)
        check_affine(self.layer, self.devices, expected, vector_dtype(self.dtype), units=UNITS)


def step(cases, rng) -> list:
    for case in cases:
        case.start()
    calls = [(rank, number) for rank in range(len(cases[0].devices)) for number in rng.permutation(len(cases))]
    with autograd.record():
        for rank, number in calls:
            cases[number].call(rank)
            if rng.rand() < 0.1:
                time.sleep(rng.uniform(0, 3e-4))
    order = [(case, rank) for case in cases for rank in range(len(case.devices))]
    order = [order[i] for i in rng.permutation(len(order))]
    autograd.backward([case.outputs[rank] for case, rank in order], [case.head_gradients[rank] for case, rank in order])
    return [case.results() for case in cases]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--json", help="file for the result")
    arguments = parser.parse_args()
    if GPUS == 0:
        print("NOT RUN: MXNet sees no GPU")
        return 3
    mx.nd.zeros = zeros_by_copy(mx.nd.zeros)
    devices = [mx.gpu(1), mx.cpu(0), mx.gpu(0)] if GPUS > 1 else [mx.cpu(0), mx.gpu(0)]
    cases = [Case(number, devices) for number in range(len(LAYERS))]
    rng = np.random.RandomState(0)
    process, started, steps, told = psutil.Process(), time.monotonic(), 0, []
    first = step(cases, rng)
    for case, results in zip(cases, first):
        case.check(results)
    while steps == 0 or time.monotonic() - started < arguments.seconds:
        seen = step(cases, rng)
        steps += 1
        for case, mine, expected in zip(cases, seen, first):
            if not all(np.array_equal(a, b) for a, b in zip(mine, expected)):
                print(f"step {steps}: WRONG NUMBER in {case.layer.name}")
                return 1
        # Doubling, and every ten seconds.
        if steps & (steps - 1) == 0 or not told or time.monotonic() - started - told[-1]["seconds"] > 10:
            free, total = mx.context.gpu_memory_info(0)
            now = {
                "step": steps,
                "seconds": round(time.monotonic() - started, 1),
                "host_MiB": process.memory_info().rss >> 20,
                "threads": process.num_threads(),
                "gpu_MiB": (total - free) >> 20,
            }
            told.append(now)
            print(", ".join(f"{key} {value}" for key, value in now.items()), flush=True)
    print(f"RIGHT: {steps} steps on {', '.join(map(str, devices))}, each with the bits of the first")
    if arguments.json:
        found = {"devices": [str(device) for device in devices], "steps": steps, "told": told[-40:]}
        Path(arguments.json).write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
