"""Faults at random moments of steps; when all processes have abandoned the step, the next ones are right.

    mpirun -np 3 python tests/jobs/recovery.py mpi SEED FAULTS

All processes draw the same from the seed: how many of them a fault comes to, which it is, and when: in the user's own
code before, within or after a step, or at one of the exchanges in Python that a step begins with, in which nets are
compared and processes go on together. Faults come to the steps of which each episode consists, and to the first step
after one, which then begins anew. A process that had nothing to abandon (its part of the step was over) may hear of it
in its next step; it gives that up and begins it anew, too. Each prints ``RIGHT`` at the end.
"""

import os
import random
import signal
import sys
import time

import job
import mxnet as mx
import testing
from mxnet import autograd, gluon

import gluon_syncbn

SEED, FAULTS = map(int, sys.argv[2:4])
TIMEOUT, LATE = 4, 5  # seconds
SHAPE, DEVICE = (4, 3, 3), mx.cpu(0)
draw = random.Random(SEED)
group = job.join(sys.argv[1])
signal.signal(signal.SIGINT, signal.default_int_handler)


def norm(**options):
    return gluon_syncbn.SyncBatchNorm(timeout=TIMEOUT, **options)


class Fault:
    """What comes to this process in one step, if anything does."""

    def __init__(self, kind="none", number=0, is_before=True):
        self.kind, self.number, self.is_before = kind, number, is_before
        self.calls = 0
        self.has_come = False

    def perhaps(self, now: bool) -> None:
        if self.has_come or not now:
            return
        self.has_come = self.kind != "operator"
        if self.kind == "raise":
            raise RuntimeError("drawn")
        if self.kind == "late":
            time.sleep(LATE)
        if self.kind == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)


fault = Fault()


class Between(gluon.Block):
    """The user's code between two layers."""

    def forward(self, x):
        fault.perhaps(fault.number == -5)
        if fault.kind == "operator" and not fault.has_come:
            fault.has_come = True
            return x + mx.nd.random.normal(
                0, -1, shape=(1,), dtype="float64", ctx=x.context
            )  # which cannot be computed
        return x


def build(norm):
    first, second = (norm(prefix=name + "_", in_channels=4) for name in ("first", "second"))
    net = gluon.nn.Sequential()
    net.add(first, Between(), second)
    return net


def failing(call):
    """An exchange of the process group's, in which the fault may come."""

    def call_and_fail(*arguments):
        fault.calls += 1
        now = fault.kind != "none" and fault.calls == fault.number
        fault.perhaps(now and fault.is_before)
        found = call(*arguments)
        fault.perhaps(now)
        return found

    return call_and_fail


group.all_gather = failing(group.all_gather)


def attempt(net) -> None:
    """A step in which faults come, also to the user's own code."""
    x = mx.nd.array(testing.random_shards([(2, *SHAPE)], seed=group.rank)[0], ctx=DEVICE, dtype="float64")
    x.attach_grad()
    with autograd.record():
        fault.perhaps(fault.number == -1)
        y = net(x)
        fault.perhaps(fault.number == -2)
    fault.perhaps(fault.number == -3)
    y.backward()
    fault.perhaps(fault.number == -4)
    y.wait_to_read()
    x.grad.wait_to_read()


def draw_faults(share: float, *late: str) -> dict:
    """Of the processes that a fault comes to: its kind, when it comes, and whether before what it comes to."""
    if draw.random() >= share:
        return {}
    kinds = ["raise", "raise", "interrupt", "interrupt", "operator", *late]
    some = draw.sample(range(group.size), 1 if draw.random() < 0.7 else 2)
    return {
        rank: (draw.choice(kinds), draw.choice([*range(-5, 0), *range(1, 9)]), draw.random() < 0.5) for rank in some
    }


def make():
    net, twin = job.twins(build, [DEVICE], (1, *SHAPE), norm)
    if draw.random() < 0.5:
        net.hybridize()
    return net, twin


net, twin = make()
if group.name == "horovod":  # whose jobs end if the first step fails, before the processes share memory
    job.check_like(net, twin, 0, [DEVICE], shape=SHAPE, is_alone=True)
for episode in range(FAULTS):
    if draw.random() < 0.3:
        net, twin = make()
    # A Horovod job ends if a process is late for going on together.
    drawn, drawn_again, said = draw_faults(1, "late"), draw_faults(0.4, *["late"][: group.name == "mpi"]), ""
    for faults in (drawn, drawn_again) if drawn_again else (drawn,):
        fault = Fault(*faults.get(group.rank, ()))
        for work, *told in ((attempt, net), (time.sleep, 0.05)):  # an interrupt may come when the step is over
            try:
                work(*told)
            except (Exception, KeyboardInterrupt) as problem:
                said += f" {type(problem).__name__}: {problem}".split("Usual reasons")[0].replace("\n", " ")
        fault = Fault()
        gluon_syncbn.abandon_step()
        job.gathered([0])  # or the next step could wait for longer than its timeout
    for may_fail in (True, True, False):
        try:
            job.check_like(net, twin, episode, [DEVICE], shape=SHAPE, is_alone=True)
            break
        except Exception as problem:
            if not may_fail or "abandoned the step" not in str(problem):
                job.say(
                    f"WRONG in episode {episode} of seed {SEED} on process {group.rank}: {drawn}, {drawn_again};{said}"
                )
                raise
            gluon_syncbn.abandon_step()
job.say("RIGHT", group.rank)
