"""A program goes its own way: it calls ``MPI.Finalize()``, raises SystemExit where nets are compared, leaves
``init_process_group`` by Ctrl-C in one process, before the other has come, and calls it again, leaves
``gluon_syncbn.devices`` by Ctrl-C, or abandons or skips a step when gradients of the other process wait for its own.

mpirun -np 2 python tests/jobs/ways_out.py mpi finalize|finalize_soon|without_the_other|leave|again|interrupt
horovodrun -np 2 python tests/jobs/ways_out.py horovod gradients|skipped
"""

import contextlib
import os
import signal
import sys
import threading
import time

import job
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

import gluon_syncbn

ENGINE, WAY = sys.argv[1:3]
if ENGINE == "mpi":
    from mpi4py import MPI

is_second = os.environ["OMPI_COMM_WORLD_RANK" if ENGINE == "mpi" else "HOROVOD_RANK"] == "1"
if WAY == "again":
    if is_second:
        time.sleep(2)
    else:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with contextlib.suppress(KeyboardInterrupt):
            sys.exit(f"nothing has interrupted {job.join('mpi')}")
group = job.join(ENGINE)
layer = gluon_syncbn.SyncBatchNorm(in_channels=3, prefix="stem_", timeout=4 if WAY == "skipped" else None)
layer.initialize()


def step(between=lambda: None):
    with autograd.record():
        out = layer(mx.nd.random.normal(shape=(2, 3, 4, 4)))
    between()
    out.backward()
    mx.nd.waitall()
    print("TRAINED", flush=True)


def leave(*_):
    raise SystemExit(5)


step()
if WAY == "finalize":
    MPI.Finalize()
    for _ in range(2):
        try:
            step()
        except mx.MXNetError as error:
            print(f"REFUSED {'MPI_Finalize has been called' in str(error)}", flush=True)
        gluon_syncbn.abandon_step()
elif WAY == "finalize_soon":  # the other has come before, and waits for a message that is yet to be sent
    if not is_second:
        send = group._send
        group._send = lambda message: (time.sleep(1), send(message))
        type(group)._is_busy = property(lambda self: True)
    step(lambda: time.sleep(0 if is_second else 3))
    MPI.Finalize()
elif WAY == "without_the_other":  # which never comes
    if not is_second:
        with contextlib.suppress(gluon_syncbn.SyncBatchNormError):
            group.all_gather("more", np.ones(3), seconds=1)
        began = time.monotonic()
        group.leave()
        print(f"LEFT {MPI.Is_finalized()} after {time.monotonic() - began:.1f}", flush=True)
        os._exit(0)
    time.sleep(8)
    os._exit(0)
elif WAY == "leave":
    if is_second:
        group.all_gather = leave
    layer = gluon_syncbn.SyncBatchNorm(in_channels=3, prefix="head_")  # which is compared at its first step
    layer.initialize()
    try:
        step()
    except mx.MXNetError as error:
        print(f"ERROR {group.rank} {error}".splitlines()[0], flush=True)
elif WAY in ("gradients", "skipped"):
    import horovod.mxnet as hvd

    net = gluon.nn.Sequential()
    net.add(layer, gluon.nn.Dense(3, in_units=3))
    net[1].initialize()
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    threading.Timer(60, lambda: (job.say("HANGS"), os._exit(9))).start()
    for number in range(4):
        try:
            with autograd.record():
                out = net(mx.nd.random.normal(shape=(4, 3)))
                if number == 1 and is_second and WAY == "gradients":
                    time.sleep(0.5)  # the other begins to add up the gradients of what comes behind the layer
                    raise ValueError("a bad batch")
            out.backward()
            if number == 1 and is_second and WAY == "skipped":
                mx.nd.waitall()
                gluon_syncbn.abandon_step()  # as where the loss is not finite
                continue
            trainer.step(4)
            mx.nd.waitall()
        except Exception as error:
            job.say(
                "ERROR", group.rank, f"{type(error).__name__}: {error}".split("\nStack trace")[0].replace("\n", " ")
            )
            gluon_syncbn.abandon_step()
    job.say("GIVES UP")
    os._exit(0)
elif WAY == "interrupt":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if is_second:
        time.sleep(1)
    else:
        threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    for _ in range(2):
        try:
            with gluon_syncbn.devices([mx.cpu(0)], layer):
                step()
        except (mx.MXNetError, KeyboardInterrupt) as error:
            job.say("ERROR", group.rank, f"{type(error).__name__}: {error}".splitlines()[0])
            gluon_syncbn.abandon_step()
sys.exit(3 if WAY in ("finalize", "again") else 0)
