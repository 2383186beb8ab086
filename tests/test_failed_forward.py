"""The backward pass of a forward pass that was never run says so, and computes nothing of what lay in memory.

MXNet does not run an operator whose input has failed. Once someone has read that error, it runs what comes next: so
the backward pass of a program that goes on. What it would compute with may lie in memory that still holds the step
before, always in a static graph.
"""

import textwrap

import pytest
from harness import run_python

PROGRAM = """
    import sys
    sys.argv.append("--layer")
    from faults import *

    net = nn.HybridSequential()
    net.add(Passage(), synchronized({backend!r})("first_"))
    net.initialize(ctx=DEVICES)
    if MODES[{mode!r}] is not None:
        net.hybridize(**MODES[{mode!r}])
    for _ in range({steps}):
        full_step(net)
    trouble.update(DEVICES)
    arrays = inputs()
    outputs = forward(net, arrays)
    for output in outputs:
        say_error(output)
    settle()
    trouble.clear()
    print("BACKWARD")
    backward(outputs)
    for array in arrays:
        say_error(array.grad)
"""


@pytest.mark.parametrize("mode", ["imperative", "hybridize", "static"])
@pytest.mark.parametrize("steps", [0, 2])
def test_it_says_so(backend, mode, steps):
    code = textwrap.dedent(PROGRAM).format(backend=backend, mode=mode, steps=steps)
    done = run_python(code, GLUON_SYNCBN_TIMEOUT=3)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "OSError: the disk is full" in done.stdout + done.stderr
    told = done.stdout.split("BACKWARD\n")[1].splitlines()
    assert len(told) == 2
    for device, line in enumerate(told):
        assert f"the backward pass on cpu({device})" in line
        assert "its forward pass never ran" in line
