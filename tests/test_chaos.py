"""The step after an exception or Ctrl-C, at whatever moment, is right: chaos.py, some seconds of it."""

import os
import subprocess
import sys

import pytest
from harness import MODES, ROOT


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("backend", ["native", "portable"])
def test_chaos(backend, mode, side_by_side):
    def run(backend, mode):
        command = [sys.executable, os.path.join("tests", "chaos.py"), "--backend", backend, "--mode", mode]
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": ROOT}
        return subprocess.run(
            [*command, "--seconds", "8"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
        )

    done = side_by_side(run)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert "RIGHT AFTER" in done.stdout
