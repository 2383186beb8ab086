"""Jobs of several processes: groups of devices, last batches, symbols, what one process does alone, equal losses."""

import json
import re

import live
import numpy as np
import pytest
from harness import LATE_THREADS
from launching import need, run_job


def run_ways(engine, size, ways, *arguments, **variables):
    """Run them in one job, one after the other."""
    need(engine)
    done = run_job(engine, size, "ways.py", ",".join(ways.split()), *arguments, **variables)
    assert done.returncode == 0, done.text
    for way in ways.split():
        assert done.text.count(f"RIGHT {way}\n") == size, (way, done.text)
    return done


# ways.py says what each is.
WAYS = {
    # Nets that train in turn or at once, in another order on each process; that are given up, dropped, copied.
    "nets": "two_nets branches_of_a_module without_backward dropped_net copies",
    # What layers meet in a process beside other layers.
    "surroundings": "groups steps_of_a_schedule loader module expander alone_in_the_middle trainers_that_step_alone",
    "of_three": "branches_of_a_module two_nets groups last_batch unfreezing as_horovod_tests_its_own",
    "without_images": "last_batch",
    "groups": "groups",
}


@pytest.mark.parametrize(
    "engine, size, ways",
    [
        ("mpi", 2, "nets"),
        ("mpi", 2, "surroundings"),
        ("mpi", 3, "of_three"),
        ("horovod", 2, "nets"),
        ("horovod", 3, "without_images"),
        pytest.param("horovod", 2, "groups", marks=pytest.mark.long),
        pytest.param("horovod", 3, "of_three", marks=pytest.mark.long),
    ],
)
def test_ways_to_train(engine, size, ways, tmp_path):
    # Two processes are all or one, which Horovod needs no sets for.
    variables = {"HOROVOD_DYNAMIC_PROCESS_SETS": 1} if size > 2 else {}
    run_ways(engine, size, WAYS[ways], JOB_FOLDER=tmp_path, **variables)


@pytest.mark.parametrize("engine", ["mpi", pytest.param("horovod", marks=pytest.mark.long)])
def test_communicators_and_process_sets_of_the_user(engine):
    run_ways(engine, 4, "some_of_the_processes", HOROVOD_DYNAMIC_PROCESS_SETS=1)


@pytest.mark.long
def test_horovod_says_how_some_processes_can_meet():
    need("horovod")
    done = run_job("horovod", 3, "ways.py", "groups")
    assert done.returncode != 0 and "HOROVOD_DYNAMIC_PROCESS_SETS=1" in done.text, done.text


@pytest.mark.parametrize(
    "kind, words",
    [
        ("classes", "the nets differ: "),
        # The first rounds of two nets are exchanged at the same time.
        ("prefixes", r"process 0 .* has trained '(\w+)', '(\w+)', and process 1 .* '\2', '\1'"),
        ("numbers", r"process 0 .* has trained '(other\d)', '(other\d)', and process 1 .* '\2', '\1'"),
        ("one more", None),
        ("own prefix", None),
    ],
)
def test_nets_that_train_in_another_order_are_refused(kind, words):
    need("mpi")
    done = run_job("mpi", 2, "ways.py", "nets_in_another_order", kind)
    if words is None:
        assert done.text.count("TRAINED") == 2, done.text
    else:
        refused = [line for line in done.text.splitlines() if "REFUSED" in line]
        assert len(refused) == 2, done.text  # one of them, perhaps, because the other had left the step
        told = [line for line in refused if "first train them in the same order" in line]
        assert any(re.search(words, line) for line in told), done.text


def test_the_portable_back_end_is_refused():
    done = run_ways("mpi", 2, "portable")
    reason = "cannot run here: .*only the native back end synchronizes several processes"
    for words, times in (
        (f"'before': backend='portable' {reason}", 3),
        (f"'after': backend='portable' {reason}", 1),
        (f"'converted': backend='portable' {reason}", 1),
        (f"'symbol': backend='portable' {reason}", 1),
        (f"'symbol': backend='auto' {reason}", 1),
        (f"'stored': backend='auto' {reason}", 1),
        ("'symbol': it runs on the portable back end, which does not synchronize several processes", 1),
    ):
        found = re.findall(f"^REFUSED .*SyncBatchNorm {words}", done.text, re.MULTILINE)
        assert len(found) == 2 * times, (words, done.text)


def losses(engine, size, devices, *steps, **variables):
    done = run_ways(engine, size, "losses", devices, *steps, **variables)
    found = dict(re.findall(r"LOSSES (\d) (\[.*\])", done.text))
    return np.sum([json.loads(text) for text in found.values()], axis=0)


def test_jobs_of_all_shapes_give_the_same_losses(tmp_path):
    """Also one that goes on with another number of processes, from what the first process has saved."""
    expected = losses("mpi", 1, 4)
    assert len(expected) == 20 and np.ptp(expected) > 1
    seen = [
        *losses("mpi", 2, 2, 0, 10, JOB_FOLDER=tmp_path),
        *losses("mpi", 4, 1, 10, 20, JOB_FOLDER=tmp_path),
    ]
    np.testing.assert_allclose(seen, expected, rtol=1e-7)
    np.testing.assert_allclose(losses("horovod", 4, 1), expected, rtol=1e-7)


@pytest.mark.parametrize("engine, steps", [("mpi", 2000), pytest.param("horovod", 2000, marks=pytest.mark.long)])
def test_memory_and_threads_stay_flat(engine, steps):
    check_soak(run_ways(engine, 2, "soak", steps).text, steps)


def check_soak(text, steps):
    told = re.findall(r"SOAK \d (\[.*\])", text)
    assert len(told) == 2, text
    for counts in map(json.loads, told):
        live.check(counts[1:], steps / 4, 256, LATE_THREADS)
