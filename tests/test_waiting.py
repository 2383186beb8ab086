"""A wait ends early where it can no longer succeed, and nowhere else: no timeout here is ever reached.

test_faults.py has the cases that a net meets; here is what must not change beside them."""

import time

import pytest
from harness import GRACE, HANG, run_python
from meeting_points import KINDS, cut_short

from gluon_syncbn.meeting import waiting


@pytest.fixture(autouse=True)
def grace(monkeypatch):
    """Of the portable back end; the library of these tests has it in standalone.cpp."""
    monkeypatch.setattr(waiting, "GRACE_SECONDS", GRACE)


@pytest.fixture(params=list(KINDS))
def rendezvous(request):
    place = KINDS[request.param](2)
    yield place
    cut_short("")
    place.close()


def test_a_limit_ends_a_wait_that_has_begun_and_says_why(rendezvous):
    pending = rendezvous.meet(0, [1.0])
    time.sleep(0.5)
    cut_short("of a reason")
    started = time.monotonic()
    text = pending.result(timeout=HANG)
    assert time.monotonic() - started > GRACE - 0.1
    assert text.startswith("here waited ")
    assert " s for 1 of 2 devices, and no longer because of a reason. Arrived: rank 0. Missing: rank 1." in text


def test_a_limit_ends_a_wait_that_begins_later(rendezvous):
    cut_short("of a reason")
    time.sleep(GRACE)
    started = time.monotonic()
    assert "because of a reason" in rendezvous.meet(0, [1.0]).result(timeout=HANG)
    assert time.monotonic() - started > GRACE - 0.1


def test_under_a_limit_those_who_come_still_meet(rendezvous):
    cut_short("of a reason")
    first = rendezvous.meet(0, [1.0])
    time.sleep(GRACE / 2)
    assert [rendezvous.meet(1, [2.0]).result(timeout=HANG), first.result(timeout=HANG)] == [(1, [3.0])] * 2


def test_a_limit_that_is_lifted_ends_nothing(rendezvous):
    first = rendezvous.meet(0, [1.0])
    cut_short("of a reason")
    time.sleep(GRACE / 2)
    cut_short("")
    time.sleep(GRACE)
    assert [rendezvous.meet(1, [2.0]).result(timeout=HANG), first.result(timeout=HANG)] == [(1, [3.0])] * 2


PROLOGUE = """
import os, signal, threading, time
import oracle
from harness import *
from gluon_syncbn import SyncBatchNorm, abandon_step
shorten_grace()
devices = cpus(2)
layer = SyncBatchNorm(in_channels=3, timeout=LONG, prefix='stem_')
layer.initialize(ctx=devices)
layer.hybridize()
shapes = [(2, 3, 4, 4)] * 2
shards, heads = random_shards(shapes), random_shards(shapes, seed=1)
expected = oracle.batch_norm(shards, np.ones(3), np.zeros(3), heads=heads)

def right_step(late=0):
    inputs = [mx.nd.array(shard, ctx=device) for shard, device in zip(shards, devices)]
    with autograd.record():
        first = layer(inputs[0])
        time.sleep(late)
        outputs = [first, layer(inputs[1])]
    assert oracle.distance([item.asnumpy() for item in outputs], expected.outputs) < 1e-5

def run_one_device():
    with autograd.record():
        return layer(mx.nd.array(shards[0], ctx=devices[0]))

def send(number, delay):
    threading.Timer(delay, os.kill, (os.getpid(), number)).start()

def raises(kind, action):
    "How long it took."
    started = time.perf_counter()
    try:
        action()
    except kind as error:
        print(type(error), error)
        return time.perf_counter() - started
    assert False, 'nothing was raised'

signal.signal(signal.SIGINT, signal.default_int_handler)
right_step()
"""

CASES = {
    "the user's own handler is called, once the wait has ended, and stays": """
calls = []
signal.signal(signal.SIGINT, lambda *_: calls.append(time.perf_counter()))
send(signal.SIGINT, 1.0)
out = run_one_device()
assert GRACE + 0.9 < raises(mx.MXNetError, out.asnumpy)
assert len(calls) == 1
abandon_step()
right_step()
os.kill(os.getpid(), signal.SIGINT)
assert len(calls) == 2
""",
    "who ignores Ctrl-C goes on waiting": """
signal.signal(signal.SIGINT, signal.SIG_IGN)
send(signal.SIGINT, 0.5)
right_step(late=GRACE + 1)
""",
    "a signal ends no wait that begins later": """
assert raises(KeyboardInterrupt, lambda: (send(signal.SIGINT, 0), time.sleep(100))) < 50
right_step(late=GRACE + 1)
""",
    "Ctrl-C is afterwards what it was, and the next step may follow at once": """
for gives_up in (True, False):
    out = run_one_device()
    send(signal.SIGINT, 1.0)
    assert GRACE + 0.9 < raises(KeyboardInterrupt, out.asnumpy)
    if gives_up:
        abandon_step()
    right_step()
assert raises(KeyboardInterrupt, lambda: (send(signal.SIGINT, 0), time.sleep(100))) < 50
""",
    "an exception leaves a step of some devices": """
def step():
    with gluon_syncbn.devices(devices):
        with autograd.train_mode():
            layer(mx.nd.array(shards[0], ctx=devices[0]))
        raise ValueError('a bad batch')
assert GRACE - 0.1 < raises(ValueError, step)
right_step()
""",
    "an exception where nothing waits costs nothing": """
def step():
    with autograd.record():
        right_step()
        raise StopIteration
assert sum(raises(StopIteration, step) for _ in range(10)) < 5 * GRACE
""",
}


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("backend", ["native", "portable"])
def test_in_a_process_of_its_own(backend, case):
    result = run_python(PROLOGUE + CASES[case], GLUON_SYNCBN_BACKEND=backend)
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_limit_of_one_thread_is_not_lifted_by_another():
    """Two threads abandon a step; the one that is ready first leaves the other its limit."""
    layer = KINDS["portable"](2)
    with waiting.cut_short("of a reason"):
        with waiting.cut_short("of another reason"):
            pass
        assert "and no longer because of another reason" in layer.meet(0, [1.0]).result(timeout=HANG)
    assert waiting._cut.now[0] == ""
