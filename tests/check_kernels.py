"""The kernels on a GPU, without MXNet, against the oracle: random shapes, types, alignments and options.

    python tests/check_kernels.py     # needs CuPy and this package, compiled

Each case runs twice and must give the same bits. Without CuPy or a GPU it says so and ends with status 3.
"""

import argparse
import json
import os
import sys
import time
from typing import List, Tuple

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(os.path.dirname(HERE), "benchmarks")]

import numpy as np  # noqa: E402
from cupy_gpu import open_gpu  # noqa: E402
from gpu_kernels import KINDS  # noqa: E402
from kernel_cases import BEHIND, PRECISION, run_two_devices  # noqa: E402

MOST_FAILURES = 20


def draw_case(rng, values: int) -> dict:
    """What `run_two_devices` takes; the larger device has at most about ``values`` values."""
    inner = int(rng.choice([1, 1, 1, 4, 49, 196, 3136, rng.randint(2, 20000)]))
    channels = int(rng.choice([1, 3, 16, 64, 257, 2048, rng.randint(1, 600)]))
    size = int(np.exp(rng.uniform(np.log(64), np.log(values))))
    inner = min(inner, size)
    channels = max(1, min(channels, size // inner))
    outer = max(1, size // (2 * channels * inner))
    layout = (outer, channels, inner)
    offset = int(rng.choice([0, 0, 1, 3]))
    large_mean = rng.rand() < 0.2
    dtype = str(rng.choice(list(PRECISION)))
    return {
        "layouts": [layout, (2 * outer + 1, channels, inner)],
        "dtype": dtype,
        "behind": "nothing" if large_mean else str(rng.choice(list(BEHIND))),
        # All alike, or one that differs.
        "offsets": tuple(np.roll([offset, 0, 0, 0], rng.randint(4)).tolist()) if rng.rand() < 0.3 else (offset,) * 4,
        "add": bool(rng.rand() < 0.3),
        "has_scale": bool(rng.rand() < 0.8),
        "renorm": (2.0, 1.0) if rng.rand() < 0.2 and not large_mean else None,
        **({"mean": 3e4, "std": 0.5} if large_mean and dtype == "float32" else {}),
    }


def check(gpu, cases: int, values: int, seconds: float, seed: int = 0) -> Tuple[int, List[str]]:
    """How many cases were tried within that time, at least one, and what was wrong; at most `MOST_FAILURES`."""
    started, failures = time.monotonic(), []
    for number in range(cases):
        case = draw_case(np.random.RandomState(1000 * seed + number), values)
        try:
            first, second = run_two_devices(gpu, **case), run_two_devices(gpu, **case)
            assert all(np.array_equal(a, b) for a, b in zip(first, second)), "two runs differ in their bits"
        except AssertionError as problem:
            failures.append(f"case {number}, {case}: {problem}")
        if time.monotonic() - started > seconds or len(failures) == MOST_FAILURES:
            break
    return number + 1, failures


def main(words=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=300, help="at most that many (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=120, help="no new case after that time (default: %(default)s)")
    parser.add_argument("--values", type=int, default=4_000_000, help="of a tensor, at most (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the cases (default: %(default)s)")
    parser.add_argument("--exact-memory", action="store_true", help="no memory pool, which hides what is out of bounds")
    parser.add_argument("--json", help="file for the result")
    arguments = parser.parse_args(words)
    gpu = open_gpu()
    if gpu is None:
        return 3
    if arguments.exact_memory:
        gpu.cupy.cuda.set_allocator(None)
    print(gpu.description, flush=True)
    gpu.compile(KINDS)
    done, failures = check(gpu, arguments.cases, arguments.values, arguments.seconds, arguments.seed)
    print("\n".join(failures))
    print(f"right on {done - len(failures)} of {done} random cases, and the same bits twice")
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as output:
            result = {"device": gpu.description, "cases": done, "values": arguments.values, "failures": failures}
            json.dump(result, output)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
