"""The step after an exception or Ctrl-C, at whatever moment, is right: chaos.py, some seconds of it."""

import pytest
from harness import MODES, run_python

CODE = """
import sys
sys.argv[1:] = ['--backend', {backend!r}, '--mode', {mode!r}, '--seconds', '5', '--seed', '{seed}']
import chaos
chaos.main()
"""


@pytest.mark.portable_with(mode="imperative")
@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("backend", ["native", "portable"])
def test_chaos(backend, mode, seed):
    done = run_python(CODE.format(backend=backend, mode=mode, seed=seed))
    assert done.returncode == 0, f"--seed {seed}\n" + done.stdout[-2000:] + done.stderr[-3000:]
    assert "RIGHT AFTER" in done.stdout
