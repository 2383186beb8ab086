"""Networks with parallel branches, shared heads and Dropout: equal to one device with the whole batch, and none hangs.

500 random graphs of branches.py on each back end, with the three modes in turn, in processes with a hard time limit.
(All 500 in each mode: ``python tests/branches.py --backend native --mode static``, and so on.)
"""

import os

import pytest
from harness import ROOT, run_python

CHUNK = 125
# Up to 6 branches with several Dropouts each on 4 devices are more generators in flight than our default serves.
GENERATORS = 128


@pytest.mark.parametrize("first", range(0, 500, CHUNK))
def test_random_graphs(first, backend):
    script = os.path.join(ROOT, "tests", "branches.py")
    arguments = [script, "--backend", backend, "--first", str(first), "--count", str(CHUNK)]
    code = f"import sys, runpy; sys.argv = {arguments}; runpy.run_path({script!r}, run_name='__main__')"
    done = run_python(code, seconds=200, MXNET_CPU_PARALLEL_RAND_COPY=GENERATORS)
    assert done.returncode == 0, done.stdout[-200:] + done.stderr[-3000:]
    assert f"RIGHT: {CHUNK} graphs" in done.stdout
