"""One process of a job is killed, stopped, ends, raises or does not come: the others say so in time, and end."""

import itertools
import os
import random
import re
import signal
import subprocess
import time

import pytest
from launching import ENGINES, PIPES, command_of_job, run_job
from testing import HANG, ROOT

SIZE, VICTIM, TIMEOUT = 3, 1, 6
LAYERS = {"forward": "first", "backward": "third"}  # that meets the others next
WAITED = (
    f"waited {TIMEOUT} s for 1 of 3 processes. "
    rf"Arrived: process 0 \(.+\), process 2 \(.+\). Missing: process {VICTIM} \(.+\). Usual reasons:"
)
# What the others say where messages tell them, and where Horovod alone connects them.
ENDED = {
    True: f": process {VICTIM} has ended",
    False: f": (another process has ended the job. process {VICTIM}: it has ended|Horovod was shut down: )",
}
GAVE_UP = {
    True: f": process {VICTIM} abandoned the step",
    False: f": another process has ended the job. process {VICTIM}: ",
}
BOTH_WAYS = itertools.product(("killed", "stopped", "raising", "ending", "absent", "caught"), LAYERS)
FAULTS = [*BOTH_WAYS, *((fault, "forward") for fault in ("interrupted", "one_step_more", "bad_input"))]
WAYS = {
    **{engine: {} for engine in ENGINES},
    **{f"{engine} without memory": {"GLUON_SYNCBN_HOST_MEMORY": 0} for engine in ENGINES},
    "mpi behind a leader": {"JOB_HOSTS": "0 0 1"},
    "mpi as a leader": {"JOB_HOSTS": "0 1 1"},
}
ALL = [(way, *fault) for way in WAYS for fault in FAULTS]
SHORT = """
mpi killed backward, mpi stopped forward, mpi raising backward, mpi bad_input forward,
horovod caught backward, horovod ending forward,
mpi without memory absent backward,
horovod without memory absent backward, horovod without memory caught backward
mpi behind a leader ending forward, mpi as a leader caught backward
"""
CASES = [pytest.param(*case, marks=[] if " ".join(case) in SHORT else [pytest.mark.long]) for case in ALL]
KILLS = [("mpi", 1), *(pytest.param(name, 25, marks=pytest.mark.long) for name in ENGINES)]


def run_fault(way, size, fault, direction):
    """The job's end, and of each process that has an error after how many seconds, and its text."""
    done = run_job(way.split()[0], size, "faults.py", fault, direction, JOB_TIMEOUT=TIMEOUT, **WAYS[way])
    assert "terminate called" not in done.stdout and "WRONG" not in done.stdout, done.stdout
    told = re.findall(r"ERROR (\d) (\S+) ?(.*)", done.stdout)
    return done, {int(rank): (float(seconds), text) for rank, seconds, text in told}


def what_others_say(are_told, fault, direction) -> str:
    of_fault = {
        "stopped": " " + WAITED,
        "absent": " " + WAITED,
        "caught": GAVE_UP[are_told],
        "bad_input": GAVE_UP[are_told],
    }
    return f"SyncBatchNorm '{LAYERS[direction]}': {direction} pass" + of_fault.get(fault, ENDED[are_told])


@pytest.mark.parametrize("way, fault, direction", CASES)
def test_the_others_say_so_in_time(way, fault, direction):
    done, errors = run_fault(way, SIZE, fault, direction)
    are_told = way != "horovod without memory"
    survivors, words = {0, 2}, what_others_say(are_told, fault, direction)
    if fault in ("caught", "bad_input") and (are_told or (fault, direction) == ("caught", "forward")):
        # They go on. Before the others' first round of the step nothing is lost: they meet its next step.
        told = survivors if direction == "backward" or fault == "bad_input" else set()
        assert done.returncode == 0 and set(errors) == {*told, VICTIM}, done.stdout
        assert fault == "caught" or "scale parameter in gaussian" in errors[VICTIM][1], done.stdout
        assert all(re.search(words, errors[rank][1]) for rank in told), done.stdout
        assert all(f"RIGHT AFTERWARDS {rank}" in done.stdout for rank in errors), done.stdout
        return
    assert done.returncode != 0, done.stdout
    if fault == "killed":  # then the launcher kills whoever is left, so that what the others say may be lost
        assert not re.search(r"ENDS \d", done.stdout), done.stdout
    elif fault == "one_step_more":
        assert set(errors) == {VICTIM} and re.search("has ended", errors[VICTIM][1]), done.stdout
    else:
        assert set(errors) >= survivors, done.stdout
        # A slow machine takes longer; and `waitall` waits for Horovod itself, which ends after 30 s.
        most = TIMEOUT + (60 if fault == "stopped" and not are_told else 20)
        for seconds, text in (errors[rank] for rank in survivors):
            assert seconds < most, done.stdout
            assert re.search(words, text) or (not are_told and re.search(ENDED[False], text)), text
        # Whoever comes first to its timeout ends a Horovod job, which the other may see before its own.
        assert any(re.search(words, errors[rank][1]) for rank in survivors), done.stdout


RECOVERIES = [("horovod", 3, 6, {}), ("mpi", 3, 4, {"GLUON_SYNCBN_HOST_MEMORY": 0})]
RECOVERIES += [("mpi", 3, 6, {"JOB_HOSTS": "0 1 1"})]
LONG = [("mpi", {}), ("horovod", {}), ("mpi", {"GLUON_SYNCBN_HOST_MEMORY": 0}), ("mpi", {"JOB_HOSTS": "0 1 0 1"})]
RECOVERIES += [
    pytest.param(engine, size, 25, variables, marks=pytest.mark.long)
    for engine, variables in LONG
    for size in (2, 3, 4)
]


@pytest.mark.parametrize("engine, size, faults, variables", RECOVERIES)
def test_when_all_have_given_a_step_up_the_next_is_right(engine, size, faults, variables, seed):
    """Exceptions, Ctrl-C, lateness and operators that fail, at random moments of steps and of what they begin with."""
    done = run_job(engine, size, "recovery.py", seed % (1 << 30), faults, **variables)
    assert done.returncode == 0 and done.stdout.count("RIGHT") == size, done.stdout


@pytest.mark.parametrize("engine, kills", KILLS)
def test_no_survivor_hangs_when_a_process_is_killed_at_any_moment(engine, kills, seed):
    draw = random.Random(seed)
    for _ in range(kills):
        command, chosen = command_of_job(engine, SIZE, "ways.py", "train_for_ever")
        with subprocess.Popen(command, cwd=ROOT, env=chosen, **PIPES) as running:
            pids = []
            while len(pids) < SIZE:
                line = running.stdout.readline()
                assert line, "the job ended by itself"
                pids += [int(pid) for pid in re.findall(r"PID \d (\d+)", line)]
            time.sleep(draw.uniform(0, 2))
            os.kill(draw.choice(pids), signal.SIGKILL)
            assert running.wait(timeout=HANG) != 0
            running.stdout.read()
        deadline = time.monotonic() + 30  # the launcher has signalled them
        while any(os.path.exists(f"/proc/{pid}") for pid in pids):
            assert time.monotonic() < deadline, "a survivor hangs"
            time.sleep(0.1)
