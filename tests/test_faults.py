"""What goes wrong ends within the timeout, says what it was, and harms nothing: faults.py, each in its own process.

The three modes of a fault run side by side, as most of the time is spent waiting on purpose. For the suite's time the
portable back end takes them in turn; benchmarks/reliability.py does every fault in every mode on both.
"""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Tuple

import pytest
from faults import FAULTS, MODES
from harness import GRACE, LONG, run_program

TIMEOUT = 3
RIGHT = "RIGHT AFTERWARDS"
WHO = "Arrived: cpu(0). Missing: cpu(1). Usual reasons:\n(1)"
MISSING = "SyncBatchNorm '{}': {} pass waited 3 s for 1 of 2 devices. " + WHO
CUT_SHORT = " s for 1 of 2 devices, and no longer because {}. " + WHO
FORWARD, BACKWARD = MISSING.format("first", "forward"), MISSING.format("third", "backward")


class Outcome(NamedTuple):
    """What a fault must end in: the exit code, what is said (on stdout or stderr), and the least number of seconds."""

    code: int
    said: Tuple[str, ...]
    seconds: float
    timeout: float = TIMEOUT


EXPECTED = {
    "missing_forward": Outcome(0, ("ERROR: MXNetError: " + FORWARD, RIGHT), TIMEOUT),
    "missing_backward": Outcome(0, ("ERROR: MXNetError: " + BACKWARD, RIGHT), TIMEOUT),
    "read_early": Outcome(0, ("ERROR: MXNetError: " + FORWARD, RIGHT), TIMEOUT),
    # The other device waits, or is told at once.
    "operator_fails_between_layers": Outcome(
        0, ("OSError: the disk is full", "ERROR: MXNetError: SyncBatchNorm 'second': ", RIGHT), 0
    ),
    "exception_between_devices": Outcome(0, ("could not be broadcast together", RIGHT), GRACE, LONG),
    "exception_between_backward_passes": Outcome(
        0,
        ("the log file is full", "backward() of the last step was called for cpu(0) only", RIGHT),
        GRACE,
        LONG,
    ),
    "interrupts_between_backward_passes": Outcome(
        0, ("INTERRUPTED", "backward() of the last step was called for cpu(0) only", RIGHT), GRACE, LONG
    ),
    "called_twice": Outcome(0, ("ERROR: MXNetError: SyncBatchNorm 'first': forward pass", "cpu(1)", RIGHT), 0),
    "keyboard_interrupt": Outcome(-signal.SIGINT, ("KeyboardInterrupt",), GRACE, LONG),
    "keyboard_interrupt_caught": Outcome(0, ("INTERRUPTED", RIGHT), GRACE, LONG),
    "sigterm": Outcome(-signal.SIGTERM, (), 0, LONG),
    "sigterm_with_handler": Outcome(3, (), GRACE, LONG),
    "exit_while_waiting": Outcome(
        5,
        ("When the process ended, pending work had failed", CUT_SHORT.format("the process ends")),
        GRACE,
        LONG,
    ),
    "exception_while_waiting": Outcome(
        1,
        ("RuntimeError: something else", "When the process ended", CUT_SHORT.format("the process ends")),
        GRACE,
        LONG,
    ),
    "fork_between_devices": Outcome(0, ("ERROR: MXNetError: " + FORWARD, RIGHT), TIMEOUT),
    "fork_after_a_failed_step": Outcome(
        0, ("When the process forked, pending work had failed", FORWARD, RIGHT), TIMEOUT
    ),
    "fork_while_a_step_runs": Outcome(0, (RIGHT,), 0),
    "os_fork": Outcome(0, (RIGHT,), 0),
    "exit_in_a_backward_pass": Outcome(
        5,
        ("When the process ended, pending work had failed", CUT_SHORT.format("the process ends")),
        GRACE,
        LONG,
    ),
    "sigint_in_a_backward_pass": Outcome(0, ("INTERRUPTED", RIGHT), GRACE, LONG),
    "fork_in_a_backward_pass": Outcome(
        0, ("When the process forked, pending work had failed", BACKWARD, RIGHT), TIMEOUT
    ),
    "child_trains": Outcome(0, ("ERROR: MXNetError: " + FORWARD, "THE CHILD TOO", RIGHT), 2 * TIMEOUT),
    "net_dropped_while_waiting": Outcome(0, ("ERROR: MXNetError: " + FORWARD, RIGHT), TIMEOUT),
    "subprocess_while_a_step_runs": Outcome(0, (RIGHT,), 0),
}


def test_every_fault_has_an_outcome():
    assert set(EXPECTED) == set(FAULTS)


def run_and_judge(fault, layer, modes, program, devices=("cpu(0)", "cpu(1)")):
    """Run ``program`` with the fault in these modes, and compare with what is expected on these devices."""
    expected = EXPECTED[fault]

    def run(mode):
        command = [program, fault, "--layer", layer, "--mode", mode, "--grace", GRACE]
        return run_program(command, GLUON_SYNCBN_TIMEOUT=expected.timeout)

    started = time.perf_counter()
    with ThreadPoolExecutor(len(modes)) as pool:
        ended = dict(zip(modes, pool.map(run, modes)))
    assert time.perf_counter() - started > expected.seconds
    for mode, done in ended.items():
        output, errors = done.stdout, done.stderr
        assert done.returncode == expected.code, (mode, output[-2000:] + errors[-2000:])
        if RIGHT in output:  # a straggler may wait once more, alone, after the others have given up
            assert float(output.split("TOOK ")[1].split()[0]) < 2 * max(TIMEOUT, GRACE) + 10, mode
        for words in expected.said:
            for number, device in enumerate(devices):
                words = words.replace(f"cpu({number})", device)
            assert words in output + errors, (mode, words, output[-2000:] + errors[-2000:])
        assert "terminate called" not in errors, mode
        assert "core dumped" not in errors, mode


@pytest.mark.parametrize("layer", ["native", "portable"])
@pytest.mark.parametrize("fault", list(FAULTS))
def test_fault(fault, layer):
    modes = list(MODES) if layer == "native" else [list(MODES)[list(FAULTS).index(fault) % len(MODES)]]
    run_and_judge(fault, layer, modes, os.path.join("tests", "faults.py"))
