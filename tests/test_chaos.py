"""The step after an exception or Ctrl-C, at whatever moment, is right: chaos.py, some seconds of it."""

import pytest
from harness import MODES, run_python

CODE = """
import sys
sys.argv[1:] = ['--backend', {backend!r}, '--mode', {mode!r}, '--seconds', '5']
import chaos
chaos.main()
"""


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("backend", ["native", "portable"])
def test_chaos(backend, mode):
    done = run_python(CODE.format(backend=backend, mode=mode))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert "RIGHT AFTER" in done.stdout
