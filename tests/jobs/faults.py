"""One fault, done on purpose to one process of a job; the others say what they see.

    mpirun -np 3 python tests/jobs/faults.py mpi FAULT forward|backward

Each survivor prints ``ERROR rank seconds text`` and exits with 9, or goes on and prints ``RIGHT AFTERWARDS``.
"""

import functools
import os
import signal
import subprocess
import sys
import time

import job
import mxnet as mx
import testing
from mxnet import autograd

import gluon_syncbn

ENGINE, FAULT, DIRECTION = sys.argv[1:4]
TIMEOUT = float(os.environ.get("JOB_TIMEOUT", 6))
group = job.join(ENGINE)
is_victim = group.rank == 1
device, SHAPE = mx.cpu(0), (4, 3, 3)


class Passed(Exception):
    """An exception leaves the step of one process; it catches that and begins the next step, and so do the others."""


def raises(error):
    raise error


def pause(seconds):
    """The process is stopped, and goes on after so long."""
    subprocess.Popen(["sh", "-c", f"kill -STOP {os.getpid()}; sleep {seconds}; kill -CONT {os.getpid()}"])
    time.sleep(0.5)


def vanish():
    """The process ends without a word; a child that it has forked lives on for a while."""
    if os.fork() == 0:
        time.sleep(TIMEOUT)
    os._exit(0)


def interrupt():
    """Ctrl-C."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.kill(os.getpid(), signal.SIGINT)


# What the victim does before or after its forward pass.
FAULTS = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "raising": lambda: raises(RuntimeError("a bad batch")),
    "ending": lambda: sys.exit(0),  # as if its data were over
    "absent": lambda: time.sleep(600),  # it does something else
    "interrupted": interrupt,
    "paused": lambda: pause(TIMEOUT / 3),
    "paused_for_long": lambda: pause(TIMEOUT + 2),
    "vanishing": vanish,
    "caught": lambda: raises(Passed()),
}


def build(norm):
    return testing.sequential(*(norm(prefix=name + "_", in_channels=4) for name in ("first", "second", "third")))


def break_off():
    if is_victim:
        mx.nd.waitall()
        time.sleep(0.3)  # until its messages of the step before have left, too
        FAULTS[FAULT]()


def forward(net):
    """The output, which may come later."""
    x = mx.nd.array(testing.random_shards([(2, *SHAPE)], seed=group.rank)[0], ctx=device, dtype="float64")
    if FAULT == "bad_input" and is_victim:
        x = x + mx.nd.random.normal(0, -1, shape=(1,), dtype="float64")
    with autograd.record():
        y = net(x)
        if FAULT == "caught":  # in what is recorded
            break_off()
    return y


def failing_step(net):
    """Everyone updates; the victim's input cannot be computed. No process's arrays may change."""
    parameters = net.collect_params().values()
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9}, kvstore=None)
    start = [item.data().copy() for item in parameters]
    trainer.step(1)  # of the step before, so that there are states
    before = [item.data().asnumpy() for item in parameters]
    y = forward(net)
    y.backward()
    trainer.step(1)
    try:
        y.asnumpy()
    finally:
        gluon_syncbn.abandon_step()
        if any((item.data().asnumpy() != old).any() for item, old in zip(parameters, before)):
            job.say("WRONG: an array has changed", group.rank)
        for item, good in zip(parameters, start):
            item.set_data(good)


nets = job.twins(build, [device], (1, *SHAPE), functools.partial(gluon_syncbn.SyncBatchNorm, timeout=TIMEOUT))


def good_step(seed=0):
    job.check_like(*nets, seed, [device], shape=SHAPE, is_alone=True)


def broken_step():
    if DIRECTION == "forward":
        break_off()
        return good_step()  # that of the others, which the next step of a victim that goes on may meet
    y = forward(nets[0])
    break_off()
    y.backward()
    mx.nd.waitall()


began = time.monotonic()
try:
    for seed in range(3):
        good_step(seed)
    mx.nd.waitall()
    began = time.monotonic()
    if FAULT == "one_step_more":
        for _ in range(1 + is_victim):
            good_step()
    elif FAULT == "bad_input":  # an operator before the net fails; nobody looks until the weights are updated
        failing_step(nets[0])
    elif FAULT == "outside":  # whoever has started the job breaks a host, or its network
        job.say("READY", group.rank)
        for _ in range(int(os.environ["JOB_STEPS"])):
            began = time.monotonic()
            good_step()
            time.sleep(0.01)
        job.say("RIGHT AFTERWARDS", group.rank)
    else:
        broken_step()
except (mx.MXNetError, Passed) as error:
    text = str(error).split("\nStack trace")[0].strip().replace("\n", " ")
    job.say("ERROR", group.rank, f"{time.monotonic() - began:.1f}", text)
    if FAULT not in ("caught", "bad_input", "paused_for_long"):
        time.sleep(1)  # the others may wait in vain for somebody else, and say so
        sys.exit(9)
    gluon_syncbn.abandon_step()
    good_step()
    job.say("RIGHT AFTERWARDS", group.rank)
job.say("ENDS", group.rank)
