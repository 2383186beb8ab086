"""One process of a job is killed, stopped, ends, raises or does not come: the others say so in time, and end."""

import os
import random
import re
import signal
import subprocess
import sys
import time

import pytest
from common import launcher
from harness import HANG, ROOT
from launching import SCRIPTS, environment, need, run_job

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
] + [(fault, "forward") for fault in ("interrupted", "one_step_more", "other_net", "bad_input")]
SHORT = {
    ("mpi", "killed", "backward"),
    ("mpi", "stopped", "forward"),
    ("mpi", "raising", "backward"),
    ("mpi", "absent", "backward"),
    ("mpi", "caught", "backward"),
    ("mpi", "bad_input", "forward"),
    ("mpi", "other_net", "forward"),
    ("horovod", "ending", "forward"),
    ("horovod", "absent", "backward"),
    ("horovod", "caught", "backward"),
}
ALL = [(engine, *fault) for engine in ("mpi", "horovod") for fault in FAULTS]


@pytest.mark.parametrize(
    "engine, fault, direction",
    [pytest.param(*case, marks=[] if case in SHORT else [pytest.mark.long]) for case in ALL],
)
def test_the_others_say_so_in_time(engine, fault, direction):
    need(engine)
    done = run_job(engine, SIZE, "faults.py", fault, direction, JOB_TIMEOUT=TIMEOUT)
    errors = {
        int(rank): (float(seconds), text) for rank, seconds, text in re.findall(r"ERROR (\d) (\S+) ?(.*)", done.text)
    }
    survivors = set(range(SIZE)) - {VICTIM}
    assert "terminate called" not in done.text and "WRONG" not in done.text
    if fault == "bad_input" and engine == "mpi":
        assert done.returncode == 0 and set(errors) == {*survivors, VICTIM}, done.text
        assert "scale parameter in gaussian" in errors[VICTIM][1], done.text
        for rank in range(SIZE):
            assert f"RIGHT AFTERWARDS {rank}" in done.text, done.text
            assert rank == VICTIM or re.search(gave_up(engine, direction), errors[rank][1]), done.text
        return
    if fault == "caught" and (engine == "mpi" or direction == "forward"):
        # Before the others' first round of the step nothing is lost: they meet its next step.
        assert done.returncode == 0 and f"RIGHT AFTERWARDS {VICTIM}" in done.text, done.text
        assert set(errors) - {VICTIM} == (survivors if direction == "backward" else set()), done.text
        for rank in set(errors) - {VICTIM}:
            assert re.search(gave_up(engine, direction), errors[rank][1]) and f"RIGHT AFTERWARDS {rank}" in done.text
        return
    assert done.returncode != 0, done.text
    if fault in KILLED:
        assert not re.search(r"ENDS \d", done.text), done.text
        return
    if fault == "one_step_more":
        assert set(errors) == {VICTIM} and re.search("has ended", errors[VICTIM][1]), done.text
        return
    assert set(errors) >= survivors, done.text
    for rank in survivors:
        seconds, text = errors[rank]
        assert seconds < TIMEOUT + 20, done.text  # of a slow machine; who hangs takes minutes
        if fault in ("stopped", "absent"):
            assert re.search(waited(direction), text), text
        elif fault in ("caught", "bad_input"):
            assert re.search(gave_up(engine, direction), text), text
        elif fault == "other_net":
            assert re.search(
                r"the nets differ: process 0 \(.+\) has 3 synchronized layers, process 1 \(.+\) has 4", text
            )
        else:
            assert re.search(ended(engine, direction), text), text


def test_pairs_suspect_only_whom_they_can():
    """Process 0 misses process 1 itself. Process 2 has handed its vector to process 0, and knows nothing of 1."""
    need("mpi")
    done = run_job("mpi", SIZE, "faults.py", "absent", "forward", JOB_TIMEOUT=TIMEOUT, JOB_MOST_ROWS=1)
    errors = dict(re.findall(r"ERROR (\d) \S+ ?(.*)", done.text))
    assert re.search(waited("forward"), errors["0"]), done.text
    suspected = (
        r"waited 6 s for 1 or more of 2 of 3 processes. Arrived: process 2 \(.+\). Missing one or more of these: "
    )
    assert re.search(suspected + r"process 0 \(.+\), process 1|process 0 has ended", errors["2"]), done.text


@pytest.mark.parametrize(
    "engine, kills", [("mpi", 2), *(pytest.param(name, 25, marks=pytest.mark.long) for name in ("mpi", "horovod"))]
)
def test_no_survivor_hangs_when_a_process_is_killed_at_any_moment(engine, kills, seed):
    need(engine)
    draw = random.Random(seed)
    for _ in range(kills):
        command = [*launcher(engine, SIZE), sys.executable, os.path.join(SCRIPTS, "ways.py"), engine, "train_for_ever"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "encoding": "utf-8", "errors": "replace"}
        with subprocess.Popen(command, cwd=ROOT, env=environment(), **pipes) as running:
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
