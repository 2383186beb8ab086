"""What goes wrong ends within the timeout, says what it was, and harms nothing: endings.py, each in its own process.

The back ends run side by side, each in one mode, as most of the time is spent waiting on purpose; those that
failures.py does, too, and all modes of all are `long`. benchmarks/reliability.py measures them.
"""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Tuple

import pytest
from endings import FAULTS, MODES
from testing import GRACE, LONG, run_program, run_python

TIMEOUT = 3  # seconds; a full step is done in hundredths of one
AT_MOST = 60  # until a program has settled what it might have waited for
RIGHT = "RIGHT AFTERWARDS"
WHO = "Arrived: cpu(0). Missing: cpu(1). Usual reasons:\n(1)"
MISSING = "SyncBatchNorm '{}': {} pass waited 3 s for 1 of 2 devices. " + WHO
FORWARD, BACKWARD = MISSING.format("first", "forward"), MISSING.format("third", "backward")
CUT_SHORT = " s for 1 of 2 devices, because the process ends. Arrived: cpu(0). Missing: cpu(1). To go on,"
ENDED, FORKED = (f"When the process {word}, pending work had failed" for word in ("ended", "forked"))
ERROR = "ERROR: MXNetError: "
GIVEN_UP = "backward() of the last step was called for cpu(0) only"


class Outcome(NamedTuple):
    """What a fault must end in: what is said (on stdout or stderr), the least number of seconds, and the exit code."""

    said: Tuple[str, ...]
    seconds: float = GRACE
    code: int = 0
    timeout: float = LONG  # of the layers, which nobody reaches


def times_out(*said, seconds=TIMEOUT):
    return Outcome((*said, RIGHT), seconds, 0, TIMEOUT)


EXPECTED = {
    "missing_forward": times_out(ERROR + FORWARD),
    "missing_backward": times_out(ERROR + BACKWARD),
    "read_early": times_out(ERROR + FORWARD),
    # The other device is told at once.
    "operator_fails_between_layers": Outcome(
        ("OSError: the disk is full", ERROR + "SyncBatchNorm 'second': ", RIGHT), 0
    ),
    "exception_between_devices": Outcome(("could not be broadcast together", RIGHT)),
    "exception_between_backward_passes": Outcome(("the log file is full", GIVEN_UP, RIGHT)),
    "interrupts_between_backward_passes": Outcome(("INTERRUPTED", GIVEN_UP, RIGHT)),
    "called_twice": times_out(ERROR + "SyncBatchNorm 'first': forward pass", "cpu(1)"),
    "keyboard_interrupt": Outcome(("KeyboardInterrupt",), code=-signal.SIGINT),
    "keyboard_interrupt_caught": Outcome(("INTERRUPTED", RIGHT)),
    "sigterm": Outcome((), 0, -signal.SIGTERM),
    "sigterm_with_handler": Outcome((), code=3),
    "exit_while_waiting": Outcome((ENDED, CUT_SHORT), code=5),
    "exception_while_waiting": Outcome(("RuntimeError: something else", ENDED, CUT_SHORT), code=1),
    "fork_between_devices": times_out(ERROR + FORWARD),
    "fork_after_a_failed_step": times_out(FORKED, FORWARD),
    "fork_while_a_step_runs": Outcome((RIGHT,), 0),
    "os_fork": Outcome((RIGHT,), 0),
    "exit_in_a_backward_pass": Outcome((ENDED, CUT_SHORT), code=5),
    "sigint_in_a_backward_pass": Outcome(("INTERRUPTED", RIGHT)),
    "fork_in_a_backward_pass": times_out(FORKED, BACKWARD),
    "child_trains": times_out(ERROR + FORWARD, "THE CHILD TOO", seconds=2 * TIMEOUT),
    "net_dropped_while_waiting": times_out(ERROR + FORWARD),
    "subprocess_while_a_step_runs": Outcome((RIGHT,), 0),
}
# In one process with many others: failures.py, and test_failures.py for the texts.
ELSEWHERE = ("missing_forward", "missing_backward", "operator_fails_between_layers", "called_twice")
ELSEWHERE += ("exception_between_devices", "exception_between_backward_passes")
HERE = [name for name in EXPECTED if name not in ELSEWHERE]
PROGRAM = os.path.join("tests", "endings.py")


def run_and_judge(fault, ways, program=PROGRAM, devices=("cpu(0)", "cpu(1)")):
    """Run ``program`` with the fault in these ways, (layer, mode), and compare with what is expected on the devices."""
    expected = EXPECTED[fault]

    def run(way):
        command = [program, fault, "--layer", way[0], "--mode", way[1], "--grace", GRACE]
        return run_program(command, status=expected.code, GLUON_SYNCBN_TIMEOUT=expected.timeout)

    started = time.perf_counter()
    with ThreadPoolExecutor(len(ways)) as pool:
        ended = dict(zip(ways, pool.map(run, ways)))
    assert expected.seconds < time.perf_counter() - started
    for way, done in ended.items():
        output, errors = done.stdout, done.stderr
        if RIGHT in output:
            assert float(output.split("TOOK ")[1].split()[0]) < AT_MOST, way
        for words in expected.said:
            for number, device in enumerate(devices):
                words = words.replace(f"cpu({number})", device)
            assert words in output + errors, (way, words, output[-2000:] + errors[-2000:])
        assert "terminate called" not in errors and "core dumped" not in errors, way


def test_every_fault_has_an_outcome():
    assert set(EXPECTED) == set(FAULTS)


@pytest.mark.parametrize("fault", HERE)
def test_fault(fault):
    turn = HERE.index(fault)
    run_and_judge(fault, [(layer, list(MODES)[(turn + i) % 3]) for i, layer in enumerate(("native", "portable"))])


@pytest.mark.long
@pytest.mark.parametrize("layer", ["native", "portable"])
@pytest.mark.parametrize("fault", list(FAULTS))
def test_fault_in_each_mode(fault, layer):
    run_and_judge(fault, [(layer, mode) for mode in MODES])


UNREAD = """
from testing import *
net = initialized(sequential(*[lambda: SyncBatchNorm(in_channels=64, timeout=LONG)] * 20), 4, {mode!r})
shards = random_shards([(2, 64, 32, 32)] * 4)
step(net, shards, shards, cpus(4))
"""


def test_a_script_may_end_without_reading_its_last_gradients(mode, backend):
    """MXNet stops the threads of custom operators at exit; what is pending must have ended before."""
    done = run_python(UNREAD.format(mode=mode))
    assert "Error" not in done.stdout + done.stderr


SIGNALS = """
import faulthandler
import pytest
from endings import *
from testing import GRACE, shorten_grace

shorten_grace()
net = build(synchronized({backend!r}), DEVICES, True)
net.hybridize()

def right_step(late=0):
    arrays = [mx.nd.array(shard, ctx=device) for shard, device in zip(shards, DEVICES)]  # inputs() waits
    with autograd.record():
        outputs = [net(arrays[0]), time.sleep(late), net(arrays[1])]
    backward(outputs[::2])
    check_full_step(net, True)

def raises(kind, action, least=0):
    "It takes at least so long, and not until the timeout."
    started = time.perf_counter()
    with pytest.raises(kind):
        action()
    assert least < time.perf_counter() - started < 60

def interrupted(seconds, action=lambda: time.sleep(100)):
    send(signal.SIGINT, seconds)
    action()

right_step()
# The user's own handler is called, once the wait has ended, and stays.
calls = []
signal.signal(signal.SIGINT, lambda *_: calls.append(1))
raises(mx.MXNetError, lambda: interrupted(1, waiting_output(net).asnumpy), GRACE + 0.9)
assert len(calls) == 1
gluon_syncbn.abandon_step()
right_step()
os.kill(os.getpid(), signal.SIGINT)
assert len(calls) == 2
# Who ignores Ctrl-C goes on waiting.
signal.signal(signal.SIGINT, signal.SIG_IGN)
interrupted(0.5, lambda: right_step(GRACE + 1))
# A signal ends no wait that begins later.
signal.signal(signal.SIGINT, signal.default_int_handler)
raises(KeyboardInterrupt, lambda: interrupted(0))
right_step(GRACE + 1)
# Ctrl-C is afterwards what it was, and the next step may follow at once, though nobody gives this one up.
raises(KeyboardInterrupt, lambda: interrupted(1, waiting_output(net).asnumpy), GRACE + 0.9)
right_step()
raises(KeyboardInterrupt, lambda: interrupted(0))
# A handler that is set while a device waits, as a notebook does for each cell.
signal.signal(signal.SIGINT, signal.SIG_IGN)
output = waiting_output(net)
time.sleep(0.5)
signal.signal(signal.SIGINT, signal.default_int_handler)
raises(KeyboardInterrupt, lambda: interrupted(1, output.asnumpy), GRACE + 0.9)
right_step()
# One in C, which calls the handler that it has found: ours.
signal.signal(signal.SIGTERM, lambda *_: calls.append(2))
output = waiting_output(net)
time.sleep(0.5)
faulthandler.register(signal.SIGTERM, open(os.devnull, "w"), chain=True)
send(signal.SIGTERM, 1)
raises(mx.MXNetError, output.asnumpy, GRACE + 0.9)
assert calls == [1, 1, 2]
right_step()
# It is taken back while a device waits.
output = waiting_output(net)
time.sleep(0.5)
faulthandler.unregister(signal.SIGTERM)
send(signal.SIGTERM, 1)
raises(mx.MXNetError, output.asnumpy, GRACE + 0.9)
os.kill(os.getpid(), signal.SIGTERM)
assert calls == [1, 1, 2, 2, 2]
right_step()
# An exception leaves a step of some devices.
def leave():
    with gluon_syncbn.devices(DEVICES):
        with autograd.train_mode():
            net(inputs()[0])
        raise ValueError("a bad batch")
raises(ValueError, leave, GRACE - 0.1)
right_step()
# An exception where nothing waits costs nothing: 200 times the grace would be more than the limit.
shorten_grace(2)
def stop():
    with autograd.record():
        backward([net(item) for item in inputs()])
        raise StopIteration
started = time.perf_counter()
for _ in range(40):
    raises(StopIteration, stop)
assert time.perf_counter() - started < 60
"""


def test_signals_and_exceptions_end_the_waits_that_they_should(backend):
    run_python(SIGNALS.format(backend=backend), GLUON_SYNCBN_TIMEOUT=LONG)


HOOK = """
import os, sys, threading, time, warnings
from testing import *
inside = threading.Event()

def show(text, *more, **told):
    inside.set()
    time.sleep({seconds})

warnings.showwarning = show
layer = initialized(SyncBatchNorm(in_channels=3, in_place=True, gamma_initializer=mx.init.Constant(1e-12)), 2)
layer.hybridize()
shards, heads = shards_and_heads([(2, 3, 4, 4), (2, 3, 4, 4)])
with mx.autograd.record():
    outputs = [layer(mx.nd.array(shard, ctx=device)) for shard, device in zip(shards, cpus(2))]
mx.autograd.backward(outputs)
assert inside.wait({limit})
if {forks}:
    child = os.fork()
    if child == 0:
        sys.exit(7)
    assert os.waitpid(child, 0)[1] == 7 << 8
    print('THE CHILD HAS ENDED')
sys.exit(3)
"""


@pytest.mark.parametrize("forks, seconds", [(True, 3), (False, 1000)])
def test_a_hook_in_which_the_operator_calls_python_keeps_no_process(forks, seconds):
    """A child that was forked meanwhile has no such call; a hook that never returns is waited for for ten seconds."""
    done = run_python(HOOK.format(seconds=seconds, forks=forks, limit=AT_MOST), status=3)
    assert ("THE CHILD HAS ENDED" in done.stdout) == forks
