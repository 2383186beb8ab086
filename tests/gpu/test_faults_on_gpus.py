"""What goes wrong on GPUs ends as it does on CPUs: in time, with an error that says what it was, and without harm."""

import os

import pytest
import test_endings
from endings import FAULTS, MODES

# Not those in which an operator in Python runs between the layers, a child process computes, or a Trainer updates.
LEFT_OUT = (
    "operator_fails_between_layers",
    "os_fork",
    "child_trains",
    "fork_while_a_step_runs",
    "interrupts_between_backward_passes",
)
CHOSEN = [name for name in FAULTS if name not in LEFT_OUT]
PROGRAM = os.path.join("tests", "gpu", "faults_on_gpus.py")


@pytest.mark.gpus(2)
@pytest.mark.parametrize("fault", CHOSEN)
def test_fault(fault):
    """In one mode each."""
    mode = list(MODES)[CHOSEN.index(fault) % 3]
    test_endings.run_and_judge(fault, [("native", mode)], PROGRAM, ["gpu(0)", "gpu(1)"])


@pytest.mark.gpus(2)
@pytest.mark.parametrize("fault", CHOSEN)
def test_fault_where_a_cpu_meets_a_gpu(fault, monkeypatch):
    """In one mode each; not hybridized without static memory, where a CPU in the group takes copies by an operator of
    MXNet's, which the stand-in does not have for a GPU."""
    monkeypatch.setenv("FIRST_DEVICE", "cpu")
    mode = ("imperative", "static")[CHOSEN.index(fault) % 2]
    test_endings.run_and_judge(fault, [("native", mode)], PROGRAM, ["cpu(0)", "gpu(1)"])
