"""Layers synchronize over processes: a step of several processes is a step of one device with the whole batch."""

import pytest
from launching import ENGINES, need, run_job
from testing import MODES

SMALL, LARGE = ["layer", "branches"], ["layer", "branches", "resnet18"]
# Engine, processes, devices of each. Other sizes, and Horovod, are in test_process_ways.py.
LONG = [(engine, size, devices) for engine in ENGINES for size in (2, 3, 4) for devices in (1, 2)]


@pytest.mark.parametrize(
    "engine, size, devices, cases",
    [
        ("mpi", 2, 2, SMALL),
        *(
            pytest.param(*job, LARGE if job[1] == 2 or job == ("mpi", 4, 1) else SMALL, marks=pytest.mark.long)
            for job in LONG
        ),
    ],
)
def test_a_step_is_that_of_one_device(engine, size, devices, cases):
    need(engine)
    done = run_job(engine, size, "numerics.py", devices, ",".join(MODES), *cases)
    assert done.returncode == 0, done.text
    for case in cases:
        for mode in MODES:
            assert done.text.count(f"RIGHT {case} {mode}\n") == size, done.text
