"""The kernels on a GPU, without MXNet, against the reference: random shapes, types, alignments and options.

    python tests/check_kernels.py     # needs CuPy and this package, compiled

Each case runs twice and must give the same bits. Several processes share out the kinds of layers, each of which takes
seconds to compile. Without CuPy or a GPU it says so and ends with status 3.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from typing import List, Tuple

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(os.path.dirname(HERE), "benchmarks")]

import numpy as np  # noqa: E402
from cupy_gpu import open_gpu  # noqa: E402
from kernel_cases import BEHIND, DATA, DTYPES, Case, draw_case, what_is_wrong  # noqa: E402

MOST_FAILURES = 20
SPARE = 10  # seconds that a process may take for its last case


KINDS = [(dtype, behind) for dtype in DTYPES for behind in BEHIND]


def draw_any(rng, values: int, kinds) -> Case:
    """Of one of these kinds, with a layout of which the larger device has at most about ``values`` values."""
    inner = int(rng.choice([1, 1, 1, 4, 49, 196, 3136, rng.randint(2, 20000)]))
    channels = int(rng.choice([1, 3, 16, 64, 257, 2048, rng.randint(1, 600)]))
    size = int(np.exp(rng.uniform(np.log(64), np.log(values))))
    inner = min(inner, size)
    channels = max(1, min(channels, size // inner))
    layout = max(1, size // (2 * channels * inner)), channels, inner
    return draw_case(rng, layout, *kinds[rng.randint(len(kinds))], str(rng.choice(DATA)))


def check(gpu, cases: int, values: int, until: float, seed: int, share=(0, 1)) -> Tuple[int, List[str]]:
    """How many cases, at least one, were tried until that time (monotonic), and at most `MOST_FAILURES` failures."""
    job, jobs = share
    failures = []
    for number in range(cases):
        case = draw_any(np.random.RandomState([seed, job, number]), values, KINDS[job::jobs])
        problem = what_is_wrong(case, gpu)
        failures += [f"case {number} of --seed {seed} --share {job}/{jobs}: {problem}"] if problem else []
        if time.monotonic() > until or len(failures) == MOST_FAILURES:
            break
    return number + 1, failures


def check_in_processes(words: List[str], jobs: int, until: float) -> Tuple[int, List[str]]:
    """The same, by so many processes, each with its own kinds."""
    command = [sys.executable, __file__, *words, "--seconds", str(until - time.monotonic()), "--share"]
    running = [subprocess.Popen([*command, f"{job}/{jobs}"], stdout=subprocess.PIPE, text=True) for job in range(jobs)]
    done, failures = 0, []
    for process in running:
        try:
            said = process.communicate(timeout=max(until + SPARE - time.monotonic(), 0.1))[0]
        except subprocess.TimeoutExpired:
            process.kill()
            said = process.communicate()[0]
        whole = process.returncode == 0
        found = (
            json.loads(said.splitlines()[-1]) if whole else [1, [f"a process ended with {process.returncode}: {said}"]]
        )
        done, failures = done + found[0], failures + found[1]
    return done, failures


def main(words=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=300, help="of a process, at most (default: %(default)s)")
    limit = "no new case when the program is so old (default: %(default)s)"
    parser.add_argument("--seconds", type=float, default=120, help=limit)
    parser.add_argument("--values", type=int, default=4_000_000, help="of a tensor, at most (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="of the cases; without it another in each run")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: %(default)s)")
    parser.add_argument("--exact-memory", action="store_true", help="no memory pool, which hides what is out of bounds")
    parser.add_argument("--json", help="file for the result")
    parser.add_argument("--share", help="I/N: only number I of N processes, which says what it found")
    arguments = parser.parse_args(words)
    until = time.monotonic() + arguments.seconds
    seed = random.SystemRandom().randrange(1 << 30) if arguments.seed is None else arguments.seed
    gpu = open_gpu()
    if gpu is None:
        return 3
    if arguments.exact_memory:
        gpu.cupy.cuda.set_allocator(None)
    told = arguments.cases, arguments.values
    if arguments.share:
        print(json.dumps(check(gpu, *told, until, seed, tuple(map(int, arguments.share.split("/"))))))
        return 0
    jobs = min(arguments.jobs, len(KINDS))
    print(f"{gpu.description}; --seed {seed} --jobs {jobs} draws the same again", flush=True)
    if jobs > 1:
        words = ["--cases", str(told[0]), "--values", str(told[1]), "--seed", str(seed)]
        done, failures = check_in_processes(words + ["--exact-memory"] * arguments.exact_memory, jobs, until)
    else:
        done, failures = check(gpu, *told, until, seed)
    if arguments.json:
        result = {"device": gpu.description, "seed": seed, "cases": done, "values": told[1], "failures": failures}
        with open(arguments.json, "w", encoding="utf-8") as output:
            json.dump(result, output)
    print("\n".join(failures))
    print(f"right on {done - len(failures)} of {done} random cases, and the same bits twice")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
