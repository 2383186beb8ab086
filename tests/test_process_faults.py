"""One process of a job is killed, stopped, ends, raises or does not come: the others say so in time, and end."""

import os
import random
import re
import signal
import subprocess
import time

import pytest
from launching import command_of_job, need, run_job
from testing import HANG, ROOT

SIZE, VICTIM, TIMEOUT = 3, 1, 6
# After it the launcher kills whoever is left, so that what the others say may be lost.
KILLED = {"killed"}
NAMES = {"forward": "first", "backward": "third"}


def waited(direction: str) -> str:
    return (
        rf"SyncBatchNorm '{NAMES[direction]}': {direction} pass waited {TIMEOUT} s for 1 of 3 processes. "
        rf"Arrived: process 0 \(.+\), process 2 \(.+\). Missing: process {VICTIM} \(.+\). Usual reasons:"
    )


def ended(engine: str, direction: str) -> str:
    how = {
        "mpi": f"process {VICTIM} has ended",
        "horovod": f"(another process has ended the job. process {VICTIM}: it has ended|Horovod was shut down: )",
    }
    return f"SyncBatchNorm '{NAMES[direction]}': {direction} pass: {how[engine]}"


def gave_up(engine: str, direction: str) -> str:
    how = {"mpi": f"process {VICTIM} gave the step up", "horovod": "another process has ended the job. process 1: "}
    return f"SyncBatchNorm '{NAMES[direction]}': {direction} pass: {how[engine]}"


FAULTS = [
    (fault, direction)
    for fault in ("killed", "stopped", "raising", "ending", "absent", "caught")
    for direction in ("forward", "backward")
] + [(fault, "forward") for fault in ("interrupted", "one_step_more", "bad_input")]
SHORT = """
mpi killed backward, mpi stopped forward, mpi raising backward, mpi absent backward, mpi caught backward,
mpi bad_input forward, horovod ending forward, horovod absent backward, horovod caught backward
"""
ALL = [(engine, *fault) for engine in ("mpi", "horovod") for fault in FAULTS]


def run_fault(engine, size, fault, direction, **variables):
    """The job's end, and of each process that has an error after how many seconds, and its text."""
    need(engine)
    done = run_job(engine, size, "faults.py", fault, direction, JOB_TIMEOUT=TIMEOUT, **variables)
    assert "terminate called" not in done.text and "WRONG" not in done.text, done.text
    told = re.findall(r"ERROR (\d) (\S+) ?(.*)", done.text)
    return done, {int(rank): (float(seconds), text) for rank, seconds, text in told}


@pytest.mark.parametrize(
    "engine, fault, direction",
    [pytest.param(*case, marks=[] if " ".join(case) in SHORT else [pytest.mark.long]) for case in ALL],
)
def test_the_others_say_so_in_time(engine, fault, direction):
    done, errors = run_fault(engine, SIZE, fault, direction)
    survivors = set(range(SIZE)) - {VICTIM}
    if fault in ("caught", "bad_input") and (engine == "mpi" or (fault, direction) == ("caught", "forward")):
        # They go on. Before the others' first round of the step nothing is lost: they meet its next step.
        told = survivors if direction == "backward" or fault == "bad_input" else set()
        assert done.returncode == 0 and set(errors) == {*told, VICTIM}, done.text
        assert fault == "caught" or "scale parameter in gaussian" in errors[VICTIM][1], done.text
        assert all(re.search(gave_up(engine, direction), errors[rank][1]) for rank in told), done.text
        assert all(f"RIGHT AFTERWARDS {rank}" in done.text for rank in errors), done.text
        return
    assert done.returncode != 0, done.text
    if fault in KILLED:
        assert not re.search(r"ENDS \d", done.text), done.text
        return
    if fault == "one_step_more":
        assert set(errors) == {VICTIM} and re.search("has ended", errors[VICTIM][1]), done.text
        return
    how = {"stopped": waited(direction), "absent": waited(direction)}
    how.update(dict.fromkeys(("caught", "bad_input"), gave_up(engine, direction)))
    assert set(errors) >= survivors, done.text
    for rank in survivors:
        seconds, text = errors[rank]
        assert seconds < TIMEOUT + 20, done.text  # of a slow machine; who hangs takes minutes
        assert re.search(how.get(fault, ended(engine, direction)), text), text


def test_pairs_suspect_only_whom_they_can():
    """Each process knows who came with what it was given, and who may have kept the others; process 1 is absent.

    Process 4 has handed its vector to process 0, which misses process 1 itself; 2 and 3 wait for these two.
    """
    _, errors = run_fault("mpi", 5, "absent", "forward", JOB_MOST_ROWS=1)
    for rank, arrived, missing in ((0, "04", "1"), (2, "23", "014"), (3, "23", "014"), (4, "4", "0123")):
        names = [", ".join(rf"process {other} \(\S+\)" for other in others) for others in (arrived, missing)]
        count, whom = (
            ("1", "Missing") if rank == 0 else (f"1 or more of {len(missing)}", "Missing one or more of these")
        )
        words = (
            rf"'first': forward pass waited 6 s for {count} of 5 processes. Arrived: {names[0]}. {whom}: {names[1]}\. "
        )
        assert re.search(words + ("" if rank == 0 else r"|process \d has ended"), errors[rank][1]), errors


@pytest.mark.parametrize(
    "engine, kills", [("mpi", 2), *(pytest.param(name, 25, marks=pytest.mark.long) for name in ("mpi", "horovod"))]
)
def test_no_survivor_hangs_when_a_process_is_killed_at_any_moment(engine, kills, seed):
    need(engine)
    draw = random.Random(seed)
    for _ in range(kills):
        command, chosen = command_of_job(engine, SIZE, "ways.py", "train_for_ever")
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "encoding": "utf-8", "errors": "replace"}
        with subprocess.Popen(command, cwd=ROOT, env=chosen, **pipes) as running:
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
