"""The whole chain once, in some seconds: what is here, what the compiler and the driver take, and one layer's steps.

    python tests/gpu/smoke.py [--json FILE]

A layer on a CPU and a GPU trains for two steps in each type, against the reference. Says how long it took to compile
the kernels, to load them (which is where a driver compiles), to make the first step, and to make the second. Exits with
1 if something is wrong, and with 3 if MXNet sees no GPU.
"""

import argparse
import json
import os
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.dirname(HERE), os.path.join(HERE, "..", "..", "benchmarks")]

import gpu_kernels  # noqa: E402
import mxnet as mx  # noqa: E402
import numpy as np  # noqa: E402
import soak  # noqa: E402
from conftest import GPUS, zeros_by_copy  # noqa: E402

from gluon_syncbn.backends import native  # noqa: E402


def timed(action):
    started = time.perf_counter()
    result = action()
    return time.perf_counter() - started, result


def compile_and_load(kind) -> dict:
    """Seconds; raises what the compiler or the driver says."""
    compiled, ptx = timed(lambda: gpu_kernels.compile_ptx(gpu_kernels.options(kind)))
    loaded, _ = timed(lambda: gpu_kernels.load(ptx))
    return {"compile": compiled, "load": loaded}


def train(number: int, devices) -> dict:
    """Two steps of a layer of soak.py, whose results are right and the same."""
    case, rng = soak.Case(number, devices), np.random.RandomState(0)
    first, (results,) = timed(lambda: soak.step([case], rng))
    case.check(results)
    second, (again,) = timed(lambda: soak.step([case], rng))
    assert all(np.array_equal(a, b) for a, b in zip(results, again)), "two steps differ in their bits"
    return {"first step": first, "second step": second}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="file for the result")
    arguments = parser.parse_args()
    if GPUS == 0:
        print("NOT RUN: MXNet sees no GPU")
        return 3
    mx.nd.zeros = zeros_by_copy(mx.nd.zeros)
    seconds, why = timed(lambda: native.unavailable_reason_on_gpu(0))
    print(f"the check of gpu(0): {why or 'all is well'} ({seconds:.2f} s)", flush=True)
    found, failed = {"check": {"all": seconds}}, bool(why)
    for number, dtype in ((0, "float32"), (5, "float64"), (1, "float16")):  # of soak.py
        found[dtype] = {}
        for action in (
            lambda: compile_and_load(gpu_kernels.KernelKind(dtype)),  # noqa: B023
            lambda: train(number, [mx.cpu(0), mx.gpu(0)]),  # noqa: B023
        ):
            try:
                found[dtype].update(action())
            except Exception as problem:
                failed = True
                print(f"{dtype}: {type(problem).__name__}: {problem}", flush=True)
        print(f"{dtype}: {', '.join(f'{what} {took:.3f} s' for what, took in found[dtype].items())}", flush=True)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as output:
            json.dump({"failed": failed, "seconds": found}, output)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
