"""The kernels on a GPU, without MXNet, against the reference: random shapes, types, alignments and options.

    python tests/check_kernels.py     # needs CuPy and this package, compiled

Each case runs twice and must give the same bits. Without CuPy or a GPU it says so and ends with status 3.
"""

import argparse
import json
import os
import random
import sys
import time
from typing import List, Tuple

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(os.path.dirname(HERE), "benchmarks")]

import numpy as np  # noqa: E402
from cupy_gpu import open_gpu  # noqa: E402
from gpu_kernels import KINDS  # noqa: E402
from kernel_cases import BEHIND, DATA, DTYPES, Case, draw_case, what_is_wrong  # noqa: E402

MOST_FAILURES = 20


def draw_any(rng, values: int) -> Case:
    """With a layout of which the larger device has at most about ``values`` values."""
    inner = int(rng.choice([1, 1, 1, 4, 49, 196, 3136, rng.randint(2, 20000)]))
    channels = int(rng.choice([1, 3, 16, 64, 257, 2048, rng.randint(1, 600)]))
    size = int(np.exp(rng.uniform(np.log(64), np.log(values))))
    inner = min(inner, size)
    channels = max(1, min(channels, size // inner))
    layout = max(1, size // (2 * channels * inner)), channels, inner
    return draw_case(rng, layout, *(str(rng.choice(choices)) for choices in (DTYPES, list(BEHIND), DATA)))


def check(gpu, cases: int, values: int, seconds: float, seed: int) -> Tuple[int, List[str]]:
    """How many cases were tried within that time, at least one, and what was wrong; at most `MOST_FAILURES`."""
    started, failures = time.monotonic(), []
    for number in range(cases):
        problem = what_is_wrong(draw_any(np.random.RandomState([seed, number]), values), gpu)
        failures += [f"case {number} of seed {seed}: {problem}"] if problem else []
        if time.monotonic() - started > seconds or len(failures) == MOST_FAILURES:
            break
    return number + 1, failures


def main(words=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=300, help="at most that many (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=120, help="no new case after that time (default: %(default)s)")
    parser.add_argument("--values", type=int, default=4_000_000, help="of a tensor, at most (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="of the cases; without it another in each run")
    parser.add_argument("--exact-memory", action="store_true", help="no memory pool, which hides what is out of bounds")
    parser.add_argument("--json", help="file for the result")
    arguments = parser.parse_args(words)
    seed = random.SystemRandom().randrange(1 << 30) if arguments.seed is None else arguments.seed
    gpu = open_gpu()
    if gpu is None:
        return 3
    if arguments.exact_memory:
        gpu.cupy.cuda.set_allocator(None)
    print(f"{gpu.description}; --seed {seed} draws the same again", flush=True)
    gpu.compile(KINDS)
    done, failures = check(gpu, arguments.cases, arguments.values, arguments.seconds, seed)
    print("\n".join(failures))
    print(f"right on {done - len(failures)} of {done} random cases, and the same bits twice")
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as output:
            result = {"device": gpu.description, "seed": seed, "cases": done, "values": arguments.values}
            json.dump({**result, "failures": failures}, output)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
