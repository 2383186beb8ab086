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
ENDED = {
    "mpi": f": process {VICTIM} has ended",
    "horovod": f": (another process has ended the job. process {VICTIM}: it has ended|Horovod was shut down: )",
}
GAVE_UP = {
    "mpi": f": process {VICTIM} gave the step up",
    "horovod": f": another process has ended the job. process {VICTIM}: ",
}
BOTH_WAYS = itertools.product(("killed", "stopped", "raising", "ending", "absent", "caught"), LAYERS)
FAULTS = [*BOTH_WAYS, *((fault, "forward") for fault in ("interrupted", "one_step_more", "bad_input"))]
ALL = [(engine, *fault) for engine in ENGINES for fault in FAULTS]
SHORT = """
mpi killed backward, mpi stopped forward, mpi raising backward, mpi absent backward, mpi caught backward,
mpi bad_input forward, horovod ending forward, horovod absent backward, horovod caught backward
"""
CASES = [pytest.param(*case, marks=[] if " ".join(case) in SHORT else [pytest.mark.long]) for case in ALL]
KILLS = [("mpi", 2), *(pytest.param(name, 25, marks=pytest.mark.long) for name in ENGINES)]


def run_fault(engine, size, fault, direction, **variables):
    """The job's end, and of each process that has an error after how many seconds, and its text."""
    done = run_job(engine, size, "faults.py", fault, direction, JOB_TIMEOUT=TIMEOUT, **variables)
    assert "terminate called" not in done.stdout and "WRONG" not in done.stdout, done.stdout
    told = re.findall(r"ERROR (\d) (\S+) ?(.*)", done.stdout)
    return done, {int(rank): (float(seconds), text) for rank, seconds, text in told}


def what_others_say(engine, fault, direction) -> str:
    of_fault = {
        "stopped": " " + WAITED,
        "absent": " " + WAITED,
        "caught": GAVE_UP[engine],
        "bad_input": GAVE_UP[engine],
    }
    return f"SyncBatchNorm '{LAYERS[direction]}': {direction} pass" + of_fault.get(fault, ENDED[engine])


@pytest.mark.parametrize("engine, fault, direction", CASES)
def test_the_others_say_so_in_time(engine, fault, direction):
    done, errors = run_fault(engine, SIZE, fault, direction)
    survivors, words = {0, 2}, what_others_say(engine, fault, direction)
    if fault in ("caught", "bad_input") and (engine == "mpi" or (fault, direction) == ("caught", "forward")):
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
        for seconds, text in (errors[rank] for rank in survivors):
            assert seconds < TIMEOUT + 20, done.stdout  # of a slow machine; who hangs takes minutes
            assert re.search(words, text), text


def test_pairs_suspect_only_whom_they_can():
    """Each process knows who came with what it was given, and who may have kept the others; process 1 is absent.

    Process 4 has handed its vector to process 0, which misses process 1 itself; 2 and 3 wait for these two.
    """
    _, errors = run_fault("mpi", 5, "absent", "forward", JOB_MOST_ROWS=1)
    several = "Missing one or more of these"
    for rank, arrived, count, whom, missing in (
        (0, "04", "1", "Missing", "1"),
        (2, "23", "1 or more of 3", several, "014"),
        (3, "23", "1 or more of 3", several, "014"),
        (4, "4", "1 or more of 4", several, "0123"),
    ):
        names = [", ".join(rf"process {other} \(\S+\)" for other in others) for others in (arrived, missing)]
        words = f"'first': forward pass waited 6 s for {count} of 5 processes. Arrived: {names[0]}. {whom}: {names[1]}"
        assert re.search(words + r"\. " + (r"|process \d has ended" if rank else ""), errors[rank][1]), errors


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
