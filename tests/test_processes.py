"""Layers synchronize over processes: a step of several processes is a step of one device with the whole batch."""

import pytest
from harness import MODES
from launching import ENGINES, need, run_job

SMALL, LARGE = ["layer", "branches"], ["layer", "branches", "resnet18", "detector"]
ALL = list(MODES)
# Engine, processes, devices of each, modes, cases.
JOBS = [
    ("mpi", 2, 2, ALL, SMALL),
    ("mpi", 4, 1, ["static"], SMALL),
    ("mpi", 2, 1, ["static"], ["resnet18"]),
    ("horovod", 2, 1, ["static", "imperative"], SMALL),
]
LONG = [
    (engine, size, devices, ALL, LARGE if size == 2 or (engine, size, devices) == ("mpi", 4, 1) else SMALL)
    for engine in ENGINES
    for size in (2, 3, 4)
    for devices in (1, 2)
]


@pytest.mark.parametrize(
    "engine, size, devices, modes, cases", [*JOBS, *(pytest.param(*job, marks=pytest.mark.long) for job in LONG)]
)
def test_a_step_is_that_of_one_device(engine, size, devices, modes, cases, tmp_path):
    check_steps(engine, size, devices, modes, cases, JOB_FOLDER=tmp_path)


@pytest.mark.parametrize("size", [3, pytest.param(4, marks=pytest.mark.long), pytest.param(5, marks=pytest.mark.long)])
def test_a_step_in_which_processes_meet_in_pairs_is_the_same(size, tmp_path):
    """As with more than 32 processes."""
    check_steps("mpi", size, 1, ["static"], SMALL, JOB_FOLDER=tmp_path, JOB_MOST_ROWS=1)


def check_steps(engine, size, devices, modes, cases, **variables):
    need(engine)
    done = run_job(engine, size, "numerics.py", devices, ",".join(modes), *cases, **variables)
    assert done.returncode == 0, done.text
    for case in cases:
        for mode in modes:
            assert done.text.count(f"RIGHT {case} {mode}") == size, done.text
