"""Jobs of several processes: groups, last batches, symbols, what one process does alone, equal weights.

Each job runs several ways, one after the other, since its start takes seconds. jobs/ways.py says what each is.
"""

import pytest
from launching import run_job, run_ways

TURNS = "by_environment two_nets without_backward dropped_net training"
AROUND = "portable steps_of_a_schedule module loader expander alone_in_the_middle trainers_that_step_alone resnet18"
OF_THREE = "groups last_batch values unfreezing two_nets module"
BY_ITSELF, PAIRS = {"GLUON_SYNCBN_PROCESS_GROUP": "auto"}, {"JOB_MOST_ROWS": 1}
SETS = {"HOROVOD_DYNAMIC_PROCESS_SETS": 1}  # two processes are all or one, which Horovod needs no sets for
JOBS = [
    ("mpi", 2, f"{TURNS} nets_in_another_order last_step", BY_ITSELF),
    ("mpi", 2, AROUND, {}),
    ("mpi", 3, OF_THREE, {}),
    ("mpi", 4, "groups own_groups branches", {}),
    ("mpi", 5, "groups values branches steps_of_a_schedule", PAIRS),  # as more than 32 processes meet
    ("horovod", 2, f"{TURNS} groups last_batch branches last_step", BY_ITSELF),
    ("horovod", 4, "last_batch own_groups", SETS),
]
LONG = [("horovod", 3, OF_THREE, SETS), ("horovod", 4, "groups training", SETS)]
LONG += [("mpi", size, "groups branches training", PAIRS) for size in (2, 3, 4, 6, 7, 9)]
JOBS += [pytest.param(*job, marks=pytest.mark.long) for job in LONG]


@pytest.mark.parametrize("engine, size, ways, variables", JOBS)
def test_ways_to_train(engine, size, ways, variables, tmp_path):
    run_ways(engine, size, ways, JOB_FOLDER=tmp_path, **variables)


@pytest.mark.long
def test_horovod_says_how_some_processes_can_meet():
    done = run_job("horovod", 3, "ways.py", "groups")
    assert done.returncode != 0 and "HOROVOD_DYNAMIC_PROCESS_SETS=1" in done.stdout, done.stdout


@pytest.mark.parametrize("engine", ["mpi", pytest.param("horovod", marks=pytest.mark.long)])
def test_memory_and_threads_stay_flat(engine):
    run_ways(engine, 2, "soak", 2000)
