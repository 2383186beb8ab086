"""Layers synchronize over processes: a step of several processes is a step of one device with the whole batch."""

import pytest
from launching import ENGINES, run_ways
from testing import MODES

SMALL, LARGE = "layer branches", "layer branches resnet18"
# Engine, processes, devices of each. Other sizes, and Horovod, are in test_process_ways.py.
LONG = [(engine, size, devices) for engine in ENGINES for size in (2, 3, 4) for devices in (1, 2)]


def cases_of(engine, size, devices):
    return LARGE if size == 2 or (engine, size, devices) == ("mpi", 4, 1) else SMALL


JOBS = [("mpi", 2, 2, SMALL), *(pytest.param(*job, cases_of(*job), marks=pytest.mark.long) for job in LONG)]


@pytest.mark.parametrize("engine, size, devices, cases", JOBS)
def test_a_step_is_that_of_one_device(engine, size, devices, cases):
    run_ways(engine, size, cases, JOB_DEVICES=devices, JOB_MODES=" ".join(MODES))
