"""A process that was forked by one that has used CUDA cannot use it: no reason to lose the child."""

import pytest
from testing import run_python

IMPORTED = """
import os
import gluon_syncbn
import mxnet as mx

child = os.fork()
if child == 0:
    print("GPUS", mx.context.num_gpus() > 0, flush=True)
    print(mx.nd.array([1, 2, 3], ctx=mx.gpu(0)).asnumpy().tolist(), flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


def test_importing_the_package_does_not_start_cuda():
    """So a program may import it, fork, and train in the child."""
    assert run_python(IMPORTED).stdout.splitlines() == ["GPUS True", "[1.0, 2.0, 3.0]"]


USED = """
import os, subprocess, sys
import endings
import mxnet as mx
sys.path.insert(0, "tests/gpu")
from conftest import zeros_by_copy

endings.DEVICES[:] = [mx.gpu(0), mx.gpu(1)]
mx.nd.zeros = zeros_by_copy(mx.nd.zeros)
net = endings.build(endings.synchronized("native"), endings.DEVICES, False)
before = endings.full_step(net)
child = os.fork()
if child == 0:
    {what}
assert os.waitpid(child, 0)[1] == 7 << 8
after = endings.full_step(net)
print("RIGHT", all((a == b).all() for a, b in zip(before, after)))
"""
ENDS = {
    "exits": "sys.exit(7)",
    "forks again": "assert os.waitpid(os.fork() or sys.exit(3), 0)[1] == 3 << 8; sys.exit(7)",
    "starts a program": "assert subprocess.run(['true']).returncode == 0; sys.exit(7)",
}


@pytest.mark.gpus(2)
@pytest.mark.parametrize("what", list(ENDS))
def test_a_child_of_a_process_that_has_trained(what):
    assert "RIGHT True" in run_python(USED.format(what=ENDS[what])).stdout
