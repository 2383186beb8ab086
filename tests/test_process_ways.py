"""Jobs of several processes: groups of devices, last batches, symbols, what one process does alone, equal losses."""

import json
import re

import live
import numpy as np
import pytest
from harness import LATE_THREADS
from launching import need, run_job


def run_way(engine, size, way, *arguments, **variables):
    need(engine)
    done = run_job(engine, size, "ways.py", way, *arguments, **variables)
    assert done.returncode == 0 and done.text.count(f"RIGHT {way}") == size, done.text
    return done


@pytest.mark.parametrize("size", [2, 3])
def test_groups_count_the_devices_of_all_processes(size):
    run_way("mpi", size, "groups")


@pytest.mark.parametrize("engine", ["mpi", pytest.param("horovod", marks=pytest.mark.long)])
def test_communicators_and_process_sets_of_the_user(engine):
    run_way(engine, 4, "some_of_the_processes", HOROVOD_DYNAMIC_PROCESS_SETS=1)


def test_trainers_that_step_alone(tmp_path):
    run_way("mpi", 2, "trainers_that_step_alone", JOB_FOLDER=tmp_path)


@pytest.mark.long
def test_groups_through_process_sets_of_horovod():
    run_way("horovod", 2, "groups")
    run_way("horovod", 3, "groups", HOROVOD_DYNAMIC_PROCESS_SETS=1)


@pytest.mark.long
def test_horovod_says_how_some_processes_can_meet():
    need("horovod")
    done = run_job("horovod", 3, "ways.py", "groups")
    assert done.returncode != 0 and "HOROVOD_DYNAMIC_PROCESS_SETS=1" in done.text, done.text


@pytest.mark.parametrize("engine", ["mpi", "horovod"])
def test_a_process_without_images_is_left_out(engine):
    run_way(engine, 3, "last_batch", HOROVOD_DYNAMIC_PROCESS_SETS=1)


@pytest.mark.parametrize("engine", ["mpi", "horovod"])
@pytest.mark.parametrize("way", ["two_nets", "branches_of_a_module"])
def test_first_rounds_of_nets_come_in_any_order(way, engine):
    """Nobody holds what another waits for."""
    run_way(engine, 2, way)
    if engine == "mpi":
        run_way(engine, 3, way)


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


@pytest.mark.parametrize("engine", ["mpi", "horovod"])
def test_passes_without_a_backward_pass_harm_nobody_later(engine):
    run_way(engine, 2, "without_backward")


@pytest.mark.parametrize("engine", ["mpi", "horovod"])
def test_a_dropped_net_does_not_count_in_a_short_step(engine):
    run_way(engine, 2, "dropped_net")


def test_a_schedule_has_one_step_on_all_processes():
    run_way("mpi", 2, "steps_of_a_schedule")


def test_workers_of_a_data_loader():
    run_way("mpi", 2, "loader")


@pytest.mark.parametrize("engine", ["mpi", "horovod"])
def test_copies_of_a_layer_with_a_group_of_its_own(engine):
    run_way(engine, 2, "copies")


def test_the_portable_back_end_is_refused():
    done = run_way("mpi", 2, "portable")
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


@pytest.mark.parametrize("way", ["module", "expander", "alone_in_the_middle"])
def test_ways_to_train(way, tmp_path):
    run_way("mpi", 2, way, JOB_FOLDER=tmp_path)


def losses(engine, size, devices, *steps, **variables):
    done = run_way(engine, size, "losses", devices, *steps, **variables)
    found = dict(re.findall(r"LOSSES (\d) (\[.*\])", done.text))
    return np.sum([json.loads(text) for text in found.values()], axis=0)


def test_jobs_of_all_shapes_give_the_same_losses():
    expected = losses("mpi", 1, 4)
    assert len(expected) == 20 and np.ptp(expected) > 1
    for engine, size, devices in (("mpi", 2, 2), ("mpi", 4, 1), ("horovod", 4, 1)):
        np.testing.assert_allclose(losses(engine, size, devices), expected, rtol=1e-7)


def test_a_job_goes_on_with_another_number_of_processes(tmp_path):
    """From what the first process has saved."""
    expected = losses("mpi", 1, 4)
    seen = [
        *losses("mpi", 2, 2, 0, 10, JOB_FOLDER=tmp_path),
        *losses("mpi", 4, 1, 10, 20, JOB_FOLDER=tmp_path),
    ]
    np.testing.assert_allclose(seen, expected, rtol=1e-7)


@pytest.mark.parametrize("engine", ["mpi", pytest.param("horovod", marks=pytest.mark.long)])
@pytest.mark.parametrize("way", ["unfreezing", "as_horovod_tests_its_own"])
def test_layers_that_come_and_go_and_horovods_own_cases(way, engine):
    run_way(engine, 3, way)


@pytest.mark.parametrize("engine, steps", [("mpi", 2000), pytest.param("horovod", 2000, marks=pytest.mark.long)])
def test_memory_and_threads_stay_flat(engine, steps):
    check_soak(run_way(engine, 2, "soak", steps).text, steps)


def check_soak(text, steps):
    told = re.findall(r"SOAK \d (\[.*\])", text)
    assert len(told) == 2, text
    for counts in map(json.loads, told):
        live.check(counts[1:], steps / 4, 256, LATE_THREADS)
