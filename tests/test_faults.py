"""What goes wrong ends within the timeout, says what it was, and harms nothing: faults.py, each in its own process.

The three modes of a fault run side by side, as most of the time is spent waiting on purpose. For the suite's time the
portable back end takes them in turn; benchmarks/reliability.py does every fault in every mode on both.
"""

import os
import signal
import subprocess
import sys
import time
from typing import NamedTuple, Tuple

import pytest
from faults import FAULTS, MODES
from harness import ROOT

TIMEOUT = 1.5
LIMIT = 60  # seconds after which a process counts as hung
RIGHT = "RIGHT AFTERWARDS"
MISSING = (
    "SyncBatchNorm '{}': {} pass waited 1.5 s for 1 of 2 devices. Arrived: cpu(0). Missing: cpu(1). Usual reasons: (1)"
)
FORWARD, BACKWARD = MISSING.format("first", "forward"), MISSING.format("third", "backward")


class Outcome(NamedTuple):
    """What a fault must end in: the exit code, what is said (on stdout or stderr), and whether it waits."""

    code: int
    said: Tuple[str, ...]
    waits: bool


EXPECTED = {
    "missing_forward": Outcome(0, ("ERROR: MXNetError: " + FORWARD, RIGHT), True),
    "missing_backward": Outcome(0, ("ERROR: MXNetError: " + BACKWARD, RIGHT), True),
    "read_early": Outcome(0, ("ERROR: MXNetError: " + FORWARD, RIGHT), True),
    # Either may miss the other: MXNet keeps the error of a custom operator in one slot per process, and may hand it to
    # another operator that ends in the same instant.
    "operator_fails_between_layers": Outcome(
        0, ("OSError: the disk is full", "': forward pass waited 1.5 s for 1 of 2 devices. Arrived: cpu(", RIGHT), True
    ),
    "exception_between_layers": Outcome(0, ("ERROR: MXNetError: " + FORWARD, RIGHT), True),
    "called_twice": Outcome(0, ("ERROR: MXNetError: SyncBatchNorm 'first': forward pass", "cpu(1)", RIGHT), False),
    "keyboard_interrupt": Outcome(-signal.SIGINT, ("KeyboardInterrupt",), True),
    "sigterm": Outcome(-signal.SIGTERM, (), False),
    "sigterm_with_handler": Outcome(3, (), True),
    "exit_while_waiting": Outcome(5, ("When the process ended, pending work had failed", FORWARD), True),
    "exception_while_waiting": Outcome(1, ("RuntimeError: something else", "When the process ended", FORWARD), True),
    "fork_between_devices": Outcome(0, ("ERROR: MXNetError: " + FORWARD, RIGHT), True),
    "fork_after_a_failed_step": Outcome(0, ("When the process forked, pending work had failed", FORWARD, RIGHT), True),
    "fork_while_a_step_runs": Outcome(0, (RIGHT,), False),
    "os_fork": Outcome(0, (RIGHT,), False),
    "subprocess_while_a_step_runs": Outcome(0, (RIGHT,), False),
}


def test_every_fault_has_an_outcome():
    assert set(EXPECTED) == set(FAULTS)


def start(fault, layer, mode):
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "GLUON_SYNCBN_TIMEOUT": str(TIMEOUT), "PYTHONPATH": ROOT}
    command = [sys.executable, os.path.join("tests", "faults.py"), fault, "--layer", layer, "--mode", mode]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.parametrize("layer", ["native", "portable"])
@pytest.mark.parametrize("fault", list(FAULTS))
def test_fault(fault, layer):
    started = time.perf_counter()
    modes = list(MODES) if layer == "native" else [list(MODES)[list(FAULTS).index(fault) % len(MODES)]]
    processes = {mode: start(fault, layer, mode) for mode in modes}
    try:
        told = {mode: process.communicate(timeout=LIMIT) for mode, process in processes.items()}
    finally:
        for process in processes.values():
            process.kill()
    expected = EXPECTED[fault]
    if expected.waits:
        assert time.perf_counter() - started > TIMEOUT
    for mode, (output, errors) in told.items():
        assert processes[mode].returncode == expected.code, (mode, output[-2000:] + errors[-2000:])
        if RIGHT in output:  # a straggler may wait once more, alone, after the others have given up
            assert float(output.split("TOOK ")[1].split()[0]) < 2 * TIMEOUT + 2, mode
        for words in expected.said:
            assert words in output + errors, (mode, words, output[-2000:] + errors[-2000:])
        assert "terminate called" not in errors, mode
        assert "core dumped" not in errors, mode
