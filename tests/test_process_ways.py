"""Jobs of several processes: groups, last batches, symbols, what one process does alone, equal weights.

Each job runs several ways, one after the other, since its start takes seconds. jobs/ways.py says what each is.
"""

import re

import pytest
from launching import run_job, run_ways

TURNS = "by_environment two_nets without_backward dropped_net training"
AROUND = "portable limits module loader expander alone_in_the_middle trainers_that_step_alone wide thin_resnet18"
GOING_ON = "skipped_updates skipped_in_a_row abandoned_in_turns"
OF_THREE = "groups last_batch values unfreezing two_nets module"
OF_FOUR = "groups last_batch branches two_nets nets_in_turns"
BY_ITSELF, NO_MEMORY = {"GLUON_SYNCBN_PROCESS_GROUP": "auto"}, {"GLUON_SYNCBN_HOST_MEMORY": 0}
SETS = {"HOROVOD_DYNAMIC_PROCESS_SETS": 1}  # two processes are all or one, which Horovod needs no sets for
JOBS = [
    ("mpi", 2, f"{TURNS} nets_in_another_order a_device_behind_a_late_process last_step", BY_ITSELF),
    ("mpi", 2, f"{AROUND} one_set_of_weights statistics_anew is_checked", {}),
    ("mpi", 3, f"{OF_THREE} backward_after_a_short_step nets_in_turns forked_child idle_processes {GOING_ON}", {}),
    ("mpi", 4, f"{OF_FOUR} own_groups is_checked abandoned_in_another_group", {"JOB_HOSTS": "0 1 0 0"}),
    ("horovod", 2, f"{TURNS} groups last_batch branches last_step one_set_of_weights is_checked", BY_ITSELF),
    # As over several hosts.
    ("mpi", 3, f"by_environment {OF_FOUR} one_set_of_weights", {**BY_ITSELF, **NO_MEMORY}),
    ("horovod", 4, "by_environment training branches last_batch own_groups", {**BY_ITSELF, **SETS, **NO_MEMORY}),
]
LONG = [("horovod", 3, OF_THREE, {**SETS, **NO_MEMORY}), ("horovod", 4, "groups training", {**SETS, **NO_MEMORY})]
LONG += [("horovod", 4, "groups last_batch statistics_anew", {})]
LONG += [("mpi", size, "groups branches training", {}) for size in (6, 9)]
LONG += [("horovod", 2, f"{TURNS} groups last_batch branches last_step", {**BY_ITSELF, **NO_MEMORY})]
LONG += [("mpi", 4, "groups own_groups branches", {}), ("horovod", 6, "cut_groups", {**SETS, **NO_MEMORY})]
LONG += [("mpi", size, f"{TURNS} groups branches", {**BY_ITSELF, **NO_MEMORY}) for size in (2, 4, 7)]
JOBS += [pytest.param(*job, marks=pytest.mark.long) for job in LONG]


@pytest.mark.parametrize("engine, size, ways, variables", JOBS)
def test_ways_to_train(engine, size, ways, variables, tmp_path):
    run_ways(engine, size, ways, JOB_FOLDER=tmp_path, **variables)


@pytest.mark.long
def test_horovod_says_how_some_processes_can_meet():
    done = run_job("horovod", 3, "ways.py", "groups", **NO_MEMORY)
    assert done.returncode != 0 and "HOROVOD_DYNAMIC_PROCESS_SETS=1" in done.stdout, done.stdout


@pytest.mark.parametrize(
    "engine, steps, variables",
    [
        *(("mpi", 600, variables) for variables in ({}, NO_MEMORY)),
        *(pytest.param("mpi", 2000, variables, marks=pytest.mark.long) for variables in ({}, NO_MEMORY)),
        pytest.param("horovod", 2000, NO_MEMORY, marks=pytest.mark.long),
    ],
)
def test_memory_and_threads_stay_flat(engine, steps, variables):
    run_ways(engine, 2, "soak", steps, **variables)


@pytest.mark.parametrize("way, variables", [("finalize", {}), ("finalize", NO_MEMORY), ("again", {})])
def test_a_program_may_finalize_mpi_itself_or_connect_again_after_an_interrupt(way, variables):
    """The job's exit code is the program's. Without MPI the memory remains."""
    done = run_job("mpi", 2, "ways_out.py", way, **variables)
    trained, refused = {"again": (2, 0), "finalize": (2, 4) if variables else (6, 0)}[way]
    assert done.returncode == 3 and done.stdout.count("TRAINED") == trained, done.stdout
    assert done.stdout.count("REFUSED True") == refused, done.stdout


def test_a_program_may_finalize_mpi_while_its_last_message_is_to_be_sent():
    """MPI_Finalize keeps Python's lock; the other process would wait for that message for ever."""
    done = run_job("mpi", 2, "ways_out.py", "finalize_soon", **NO_MEMORY)
    assert done.returncode == 0 and done.stdout.count("TRAINED") == 4, done.stdout


def test_mpi_is_finalized_without_a_process_that_did_not_come():
    """Its messages are not waited for again, which took 2 s, and as long is waited for MPI_Finalize to begin."""
    done = run_job("mpi", 2, "ways_out.py", "without_the_other", **NO_MEMORY)
    (seconds,) = re.findall(r"LEFT True after (\S+)", done.stdout)
    assert float(seconds) < 1.5, done.stdout


def test_an_exchange_that_the_program_leaves_is_an_error_on_all():
    done = run_job("mpi", 2, "ways_out.py", "leave")
    assert done.returncode == 0 and done.stdout.count("TRAINED") == 2, done.stdout
    assert "ERROR 1 MXNetError: SystemExit(5)" in done.stdout
    assert "ERROR 0 MXNetError: SyncBatchNorm 'head': forward pass: process 1 has ended." in done.stdout


def test_gradients_that_wait_for_a_step_that_was_given_up_end_the_job():
    """Horovod, which adds them up, cannot take them back; the program may wait for them anywhere."""
    done = run_job("horovod", 2, "ways_out.py", "gradients")
    assert done.stdout.count("TRAINED") == 2 and done.stdout.count("GIVES UP") == 2, done.stdout
    assert "ERROR 1 ValueError: a bad batch" in done.stdout, done.stdout
    assert re.search(r"ERROR 0 .*'stem': backward pass: process 1 abandoned the step", done.stdout), done.stdout
    assert "Start the job again from its last checkpoint" in done.stdout and "HANGS" not in done.stdout, done.stdout


def test_gradients_that_one_process_skips_end_the_job():
    """When it has waited in vain for a step, and again for the other to give that up."""
    done = run_job("horovod", 2, "ways_out.py", "skipped")
    assert done.stdout.count("TRAINED") == 2 and done.stdout.count("GIVES UP") == 2, done.stdout
    assert "waited 4 s for 1 of 2 processes" in done.stdout and "HANGS" not in done.stdout, done.stdout


def test_ctrl_c_ends_a_wait_of_the_main_thread_and_the_others_hear_of_it():
    done = run_job("mpi", 2, "ways_out.py", "interrupt")
    assert done.returncode == 0 and done.stdout.count("TRAINED") == 4, done.stdout
    assert "ERROR 0 KeyboardInterrupt" in done.stdout and "process 0 abandoned the step" in done.stdout, done.stdout
