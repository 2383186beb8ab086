"""Another thread of the process computes, and neither disturbs the training nor is disturbed by it."""

import pytest
from testing import run_python

PRELUDE = """
import threading
from testing import *

def make(devices, norm=SyncBatchNorm):
    net = sequential(lambda: nn.Dense(6, in_units=5), lambda: norm(in_channels=6), lambda: nn.Dense(2, in_units=6))
    net.initialize(mx.init.Xavier(), ctx=devices)
    return net

def train(net, devices, steps, **told):
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01}, update_on_kvstore=False)
    for _ in range(steps):
        parts = mx.gluon.utils.split_and_load(mx.nd.random.normal(shape=(8, 5)), devices)
        with autograd.record():
            losses = [(net(part) ** 2).sum() for part in parts]
        autograd.backward(losses)
        trainer.step(8, **told)
    return [loss.asnumpy() for loss in losses]

def in_threads(*works):
    errors = []
    def run(work):
        try:
            work()
        except BaseException as error:
            errors.append(f"{type(error).__name__}: {error}")
    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    mx.nd.waitall()
    assert not errors, errors
"""

OTHER_NET = """
for told in ({}, {"ignore_stale_grad": True}):
    net, other = make(cpus(2)), make([mx.cpu(2)], nn.BatchNorm)
    train(net, cpus(2), 2)
    train(other, [mx.cpu(2)], 2)
    in_threads(lambda: train(net, cpus(2), 200, **told), lambda: train(other, [mx.cpu(2)], 300, **told))
    for parameter in net.collect_params().values():
        assert (parameter.data(mx.cpu(0)).asnumpy() == parameter.data(mx.cpu(1)).asnumpy()).all(), parameter.name
"""

FIRST_UPDATES = """
stop = threading.Event()
def wait():
    while not stop.is_set():
        mx.nd.waitall()
waiting = threading.Thread(target=wait)
waiting.start()
pairs = [[mx.cpu(2 * i), mx.cpu(2 * i + 1)] for i in range(3)]
in_threads(*(lambda pair=pair: train(make(pair), pair, 3) for pair in pairs))
stop.set()
waiting.join()
"""


@pytest.mark.parametrize("program", [OTHER_NET, FIRST_UPDATES], ids=["another net", "first updates"])
def test_nothing_is_disturbed(program):
    run_python(PRELUDE + program)
