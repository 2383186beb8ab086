"""What goes wrong on GPUs ends as it does on CPUs: in time, with an error that says what it was, and without harm."""

import os

import pytest
import test_faults
from faults import FAULTS, MODES

# Not those in which an operator in Python runs between the layers, or a child process computes.
CHOSEN = [name for name in FAULTS if "operator" not in name and name not in ("os_fork", "fork_while_a_step_runs")]
PROGRAM = os.path.join("tests", "gpu", "faults_on_gpus.py")


@pytest.mark.gpus(2)
@pytest.mark.parametrize("fault", CHOSEN)
def test_fault(fault):
    test_faults.run_and_judge(fault, "native", list(MODES), PROGRAM, "gpu")
