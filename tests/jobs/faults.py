"""One fault, done on purpose to one process of a job; the others say what they see.

    mpirun -np 3 python tests/jobs/faults.py mpi FAULT forward|backward

Each survivor prints ``ERROR rank seconds text`` and exits with 9, or goes on and prints ``RIGHT AFTERWARDS``.
"""

import os
import signal
import sys
import time

import job
import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.gluon import nn

import gluon_syncbn

ENGINE, FAULT, DIRECTION = sys.argv[1:4]
TIMEOUT = float(os.environ.get("JOB_TIMEOUT", 6))
VICTIM, GOOD_STEPS = 1, 3
group = job.join(ENGINE)
is_victim = group.rank == VICTIM
device = mx.cpu(0)
shards = [np.random.RandomState(rank).standard_normal((2, 4, 3, 3)) for rank in range(group.size)]


def build(norm, prefix=""):
    net = nn.HybridSequential()
    for name in ("first", "second", "third"):
        net.add(norm(prefix=name + "_", in_channels=4))
    net.initialize(ctx=device)
    return net


def killed():
    """It is killed."""
    os.kill(os.getpid(), signal.SIGKILL)


def stopped():
    """It is stopped."""
    os.kill(os.getpid(), signal.SIGSTOP)


def raising():
    """It ends by an exception."""
    raise RuntimeError("a bad batch")


def ending():
    """It ends by sys.exit(0), as if its data were over."""
    sys.exit(0)


def absent():
    """It does not come, and does something else."""
    time.sleep(600)


def interrupted():
    """Ctrl-C."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.kill(os.getpid(), signal.SIGINT)


class Passed(Exception):
    """What `caught` raises and catches."""


def caught():
    """An exception leaves its step; it catches that and begins the next step, and so do the others."""
    raise Passed


def bad_input():
    """An operator of MXNet's before its net fails, and nobody looks until the weights are updated."""


def one_step_more():
    """It runs a step more than the others."""


def outside():
    """Whoever started the job breaks a host, or its network, and not the process."""


def other_net():
    """Its net has other layers from the start."""


def step(net, fault=None):
    x = mx.nd.array(shards[group.rank], ctx=device, dtype="float32")
    x.attach_grad()
    if fault is not None and DIRECTION == "forward":
        mx.nd.waitall()
        fault()
    with autograd.record():
        y = net(x)
        if fault is not None:
            y.wait_to_read()
            if FAULT == "caught":
                fault()
    if fault is not None:
        fault()
    y.backward()
    return y.asnumpy(), x.grad.asnumpy()


def failing_step(net):
    """Everyone updates; the victim's input cannot be computed. No process's arrays may change."""
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9}, kvstore=None)
    trainer.step(1)  # of the step before, so that there are states
    before = [item.data().asnumpy() for item in net.collect_params().values()]
    x = mx.nd.array(shards[group.rank], ctx=device, dtype="float32")
    if is_victim:
        x = x + mx.nd.random.normal(0, -1, shape=(1,))
    with autograd.record():
        y = net(x)
    y.backward()
    trainer.step(1)
    try:
        y.asnumpy()
    finally:
        gluon_syncbn.abandon_step()
        after = [item.data().asnumpy() for item in net.collect_params().values()]
        if not all(np.array_equal(a, b) for a, b in zip(before, after)):
            job.say("WRONG: an array has changed", group.rank)
        for item, good in zip(net.collect_params().values(), START):
            item.set_data(good)


START = []


def expected():
    reference = build(lambda **options: nn.BatchNorm(**options))
    whole = mx.nd.array(np.concatenate(shards), dtype="float32")
    with autograd.record():
        return reference(whole).asnumpy()[2 * group.rank : 2 * group.rank + 2]


def main():
    norm = gluon_syncbn.SyncBatchNorm
    net = build(lambda **options: norm(**options, timeout=TIMEOUT))
    if FAULT == "other_net" and is_victim:
        net.add(norm(in_channels=4, timeout=TIMEOUT))
        net.initialize(ctx=device)
    fault = globals()[FAULT]
    began = time.monotonic()
    START.extend(item.data().copy() for item in net.collect_params().values())
    try:
        for _ in range(GOOD_STEPS):
            step(net)
        mx.nd.waitall()
        began = time.monotonic()
        if FAULT == "one_step_more":
            for _ in range(1 + is_victim):
                step(net)
        elif FAULT == "bad_input":
            failing_step(net)
        elif FAULT == "outside":
            right = expected()
            job.say("READY", group.rank)
            for _ in range(int(os.environ["JOB_STEPS"])):
                began = time.monotonic()
                seen, _ = step(net)
                assert np.abs(seen - right).max() < 1e-4, "WRONG"
                time.sleep(0.01)
            job.say("RIGHT AFTERWARDS", group.rank)
        else:
            step(net, fault if is_victim else None)
    except (mx.MXNetError, Passed) as error:
        text = str(error).split("\nStack trace")[0].strip().replace("\n", " ")
        job.say("ERROR", group.rank, f"{time.monotonic() - began:.1f}", text)
        if FAULT not in ("caught", "bad_input"):
            sys.exit(9)
        gluon_syncbn.abandon_step()
        seen, _ = step(net)
        assert np.abs(seen - expected()).max() < 1e-4, "WRONG AFTERWARDS"
        job.say("RIGHT AFTERWARDS", group.rank, f"{time.monotonic() - began:.1f}")
    job.say("ENDS", group.rank)


if __name__ == "__main__":
    main()
