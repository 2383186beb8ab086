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
from pathlib import Path

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


def compile_and_load(dtype: str) -> dict:
    """Seconds; raises what the compiler or the driver says."""
    options = gpu_kernels.options(gpu_kernels.KernelKind(dtype))
    compiled, ptx = timed(lambda: gpu_kernels.compile_ptx(options))
    loaded, _ = timed(lambda: gpu_kernels.load(ptx))
    return {"compile": compiled, "load": loaded}


def train(dtype: str) -> dict:
    """Two steps of a layer of soak.py, whose results are right and the same."""
    number = [layer[1] for layer in soak.LAYERS].index(dtype)
    case, rng = soak.Case(number, [mx.cpu(0), mx.gpu(0)]), np.random.RandomState(0)
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
    for dtype in ("float32", "float64", "float16"):
        found[dtype] = {}
        for action in (compile_and_load, train):
            try:
                found[dtype].update(action(dtype))
            except Exception as problem:
                failed = True
                print(f"{dtype}: {type(problem).__name__}: {problem}", flush=True)
        print(f"{dtype}: {', '.join(f'{what} {took:.3f} s' for what, took in found[dtype].items())}", flush=True)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"failed": failed, "seconds": found}))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
