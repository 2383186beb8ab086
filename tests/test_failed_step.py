"""A failed step changes nothing: failed_step.py draws steps at random; what can be said of one step in particular."""

import contextlib
import logging
import re
import time

import mxnet as mx
import numpy as np
import pytest
from failed_step import FAULTS, Passage, arrays_of, make, same, states_of, trouble
from harness import HANG, MODES, cpus, random_shards, run_program, run_python, set_mode
from mxnet import autograd, gluon
from mxnet.gluon import nn

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm, SyncBatchNormError
from gluon_syncbn.mxnet_engine import failures
from gluon_syncbn.step.abandon import failing_what_cannot_be_read

modes = pytest.mark.parametrize("mode", list(MODES))
DEVICES = cpus(2)
NOT_SINCE = "A step was given up. No weight has been updated since it failed."
GIVEN_UP = "A step was given up. Weights and optimizer states are as they were before it."


@pytest.mark.portable_with(mode="static")
@modes
@pytest.mark.parametrize("backend", ["native", "portable"])
def test_each_fault(backend, mode, seed):
    """Read at random times, with random optimizers and KVStores; the seed of each run is another."""
    program = ["tests/failed_step.py", "--backend", backend, "--mode", mode, "--each-fault"]
    done = run_program([*program, "--seed", seed])
    assert done.returncode == 0, f"seed {seed}\n{done.stdout[-3000:]}{done.stderr[-1000:]}"
    assert f"0 of {len(FAULTS)} cases wrong" in done.stdout


def small_net(mode, timeout=1, **options):
    net = nn.HybridSequential()
    net.add(nn.Conv2D(4, 3), SyncBatchNorm(timeout=timeout, **options), nn.Activation("relu"), nn.Dense(2))
    net.initialize(ctx=DEVICES)
    return set_mode(net, mode)


def parts(count=2):
    shards = random_shards([(2, 3, 8, 8)] * count)
    return [mx.nd.array(shard, ctx=device) for shard, device in zip(shards, DEVICES)]


def step(net, trainer, count=2):
    with autograd.record():
        losses = [net(part).sum() for part in parts(count)]
    autograd.backward(losses)
    trainer.step(4, ignore_stale_grad=count < 2)
    return losses


def wait_until_failed():
    """Without reading anything, which is what MXNet forgets errors by."""
    from gluon_syncbn.mxnet_engine import failures

    while not failures.failure():
        mx.nd.ones(1).wait_to_read()


def test_who_reads_no_loss_learns_of_it_at_the_next_record():
    net = small_net("hybridize")
    trainer = gluon.Trainer(net.collect_params(), "adam")
    step(net, trainer)
    step(net, trainer, count=1)
    wait_until_failed()
    with pytest.raises(SyncBatchNormError, match="A step has failed.*waited 1 s for 1 of 2 devices"):
        step(net, trainer)
    step(net, trainer)[0].asnumpy()


def test_who_has_read_it_is_not_told_again(caplog):
    """As in a notebook: the cell ends by the error, and is run again."""
    net = small_net("hybridize")
    trainer = gluon.Trainer(net.collect_params(), "sgd")
    step(net, trainer)
    before = arrays_of(net)
    for _ in range(2):
        with pytest.raises(mx.MXNetError, match="waited 1 s for 1 of 2 devices"):
            step(net, trainer, count=1)[0].asnumpy()
    with autograd.record():
        pass
    assert caplog.messages == [GIVEN_UP] * 2
    after = arrays_of(net)
    assert all(same(before[name], after[name]) for name in before)
    step(net, trainer)[0].asnumpy()
    mx.nd.waitall()


def test_to_give_up_where_nothing_is_under_way_says_nothing(caplog):
    net = small_net("hybridize")
    trainer = gluon.Trainer(net.collect_params(), "sgd")
    gluon_syncbn.abandon_step()
    step(net, trainer)
    mx.nd.waitall()
    gluon_syncbn.abandon_step()
    step(net, trainer)[0].asnumpy()
    assert not caplog.messages


@modes
def test_the_first_step(mode):
    """The Trainer would copy all parameters into its KVStore, and back."""
    net = small_net(mode)
    net(parts()[0])
    before = arrays_of(net)
    for kvstore in ("device", None):
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"momentum": 0.9}, kvstore=kvstore)
        with pytest.raises(mx.MXNetError, match="waited 1 s for 1 of 2 devices"):
            step(net, trainer, count=1)
        gluon_syncbn.abandon_step()
        after = arrays_of(net)
        assert all(same(before[name], after[name]) for name in before if "running" not in name)
    step(net, trainer)[0].asnumpy()


@modes
def test_reduction_and_update_apart(mode):
    net = small_net(mode)
    trainer = gluon.Trainer(net.collect_params(), "adam", kvstore="local", update_on_kvstore=False)
    step(net, trainer)[0].asnumpy()
    before, states = arrays_of(net), states_of(trainer)
    with autograd.record():
        loss = net(parts()[0]).sum()
    loss.backward()
    trainer.allreduce_grads()
    trainer.update(2, ignore_stale_grad=True)
    with pytest.raises(mx.MXNetError):
        loss.asnumpy()
    gluon_syncbn.abandon_step()
    after, states_after = arrays_of(net), states_of(trainer)
    assert all(same(before[name], after[name]) for name in before if "running" not in name)
    assert all(same(states[key], states_after[key]) for key in states)


def hold_back(device):
    """What ``device`` is given next begins in some tenths of a second."""
    matrix = mx.nd.ones((2000, 2000), ctx=device)
    for _ in range(3):
        matrix = mx.nd.dot(matrix, matrix)


def read_slowly(array):
    """Read it as ``asnumpy`` does, on a thread that stops, when MXNet has forgotten the error, until nothing runs."""

    def read(array):
        try:
            return mx.nd.NDArray.asnumpy.__wrapped__(array)
        finally:
            with contextlib.suppress(mx.MXNetError):
                mx.nd.waitall.__wrapped__()

    return failing_what_cannot_be_read(read)(array)


@modes
@pytest.mark.parametrize("what", ["label", "input"])
def test_what_is_read_before_the_step_has_used_it(what, mode):
    """A label that failed is given to no net; the loss is yet to wait for the net."""
    net = small_net(mode, timeout=60)
    trainer = gluon.Trainer(net.collect_params(), "adam", kvstore=None)
    step(net, trainer)[0].asnumpy()
    before = arrays_of(net)
    inputs, labels = parts(), [mx.nd.ones(2, ctx=device) for device in DEVICES]
    failing = labels if what == "label" else inputs
    failing[1] = failing[1] + mx.nd.random.normal(0, -1, shape=(1,), ctx=DEVICES[1])
    hold_back(DEVICES[1])
    with autograd.record():
        losses = [((net(part) - label) ** 2).sum() for part, label in zip(inputs, labels)]
    autograd.backward(losses)
    trainer.step(4)
    with pytest.raises(mx.MXNetError, match="scale parameter"):
        read_slowly(failing[1])
    gluon_syncbn.abandon_step()
    after = arrays_of(net)
    assert all(same(before[name], after[name]) for name in before if what == "input" or "running" not in name)


def test_arrays_of_each_kind_are_read_as_before():
    """In a process that has synchronized layers; an array without memory may be waited for."""
    small_net("imperative")(parts()[0])
    assert failures.is_in_use()
    dense = mx.nd.array([[0, 1], [0, 0]], ctx=DEVICES[1])
    assert (dense[0:1].asnumpy() == [[0, 1]]).all() and dense[0, 1].asscalar() == 1
    for stype in ("row_sparse", "csr"):
        sparse = dense.tostype(stype)
        sparse.wait_to_read()
        assert (sparse.asnumpy() == dense.asnumpy()).all()
    mx.nd.NDArray(mx.nd.ndarray._new_empty_handle()).wait_to_read()
    with mx.util.np_shape():
        empty = mx.nd.random.normal(0, -1, shape=(1,)) * mx.nd.zeros((0, 3))
        assert empty.asnumpy().shape == (0, 3)  # MXNet does not look for its error
    assert not failures.failure()


def test_who_reads_after_another_has_got_the_error():
    """MXNet has forgotten it, and would return memory that nobody has written."""
    small_net("imperative")(parts()[0])
    array = mx.nd.random.normal(0, -1, shape=(1,))

    def read_second(array):
        with pytest.raises(mx.MXNetError, match="scale parameter"):
            array.asnumpy()
        return mx.nd.NDArray.asnumpy.__wrapped__(array)

    with pytest.raises(SyncBatchNormError, match="could not compute this array"):
        failing_what_cannot_be_read(read_second)(array)
    assert "scale parameter" in failures.failure()
    gluon_syncbn.abandon_step()


FORK = """
import os
from test_failed_step import *

net = small_net("hybridize")
trainer = gluon.Trainer(net.collect_params(), "sgd", kvstore=None)
step(net, trainer)[0].asnumpy()
before = arrays_of(net)
failing = [part + mx.nd.random.normal(0, -1, shape=(1,), ctx=part.context) for part in parts()]
with autograd.record():
    losses = [net(part).sum() for part in failing]
autograd.backward(losses)
child = os.fork()
if not child:
    os._exit(0)
os.waitpid(child, 0)
trainer.step(4)
gluon_syncbn.abandon_step()
after = arrays_of(net)
assert all(same(before[name], after[name]) for name in before)
"""


def test_a_fork_between_backward_and_update():
    """Before it, MXNet waits for all work, and forgets the errors."""
    done = run_python(FORK)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "When the process forked, pending work had failed" in done.stderr and "scale parameter" in done.stderr


def test_counts_of_the_optimizer_are_put_back():
    net = small_net("static")
    trainer = gluon.Trainer(net.collect_params(), "adam", kvstore=None)
    step(net, trainer)
    step(net, trainer)
    with pytest.raises(mx.MXNetError):
        step(net, trainer, count=1)[0].asnumpy()
    assert trainer.optimizer.num_update == 3
    gluon_syncbn.abandon_step()
    assert trainer.optimizer.num_update == 2
    counts = trainer.optimizer._all_index_update_counts  # the only place
    assert {count for some in counts.values() for count in some.values()} == {2}


def test_gradients_that_are_added_up_are_cleared():
    net = small_net("imperative")
    net.collect_params().setattr("grad_req", "add")
    trainer = gluon.Trainer({k: p for k, p in net.collect_params().items() if "running" not in k}, "sgd")
    step(net, trainer)[0].asnumpy()
    with pytest.raises(mx.MXNetError):
        step(net, trainer, count=1)[0].asnumpy()
    gluon_syncbn.abandon_step()
    for parameter in net.collect_params().values():
        if parameter.grad_req == "add":
            assert all(not item.asnumpy().any() for item in parameter.list_grad()), parameter.name


@modes
def test_a_loop_of_its_own(mode):
    net = small_net(mode)
    with autograd.record():
        losses = [net(part).sum() for part in parts()]
    autograd.backward(losses)

    def update():
        with gluon_syncbn.guard_update(net.collect_params()):
            for parameter in net.collect_params().values():
                if parameter.grad_req != "null":
                    for weight, gradient in zip(parameter.list_data(), parameter.list_grad()):
                        mx.nd.sgd_update(weight, gradient, lr=0.1, out=weight)

    before = arrays_of(net)
    update()
    updated = arrays_of(net)
    assert any(not same(before[name], updated[name]) for name in before if "running" not in name)
    with autograd.record():
        loss = net(parts()[0]).sum()
    loss.backward()
    update()
    with pytest.raises(mx.MXNetError):
        loss.asnumpy()
    gluon_syncbn.abandon_step()
    after = arrays_of(net)
    assert all(same(updated[name], after[name]) for name in before if "running" not in name)


UNCOMPILED = """
import pathlib
exists = pathlib.Path.exists
pathlib.Path.exists = lambda path: path.suffix != '.so' and exists(path)
from harness import *
from gluon_syncbn.base import library
from gluon_syncbn import SyncBatchNorm
from mxnet import gluon
assert library.core is None
net = gluon.nn.HybridSequential()
for _ in range(4):
    net.add(gluon.nn.Conv2D(8, 3, padding=1), SyncBatchNorm(timeout=1), gluon.nn.Activation('relu'))
net.add(gluon.nn.Dense(2))
net.initialize(ctx=cpus(2))
set_mode(net, 'hybridize')
trainer = gluon.Trainer(net.collect_params(), 'adam', kvstore={kvstore!r})

def step(count=2, broken=()):
    inputs = [mx.nd.random.normal(shape=(2, 3, 8, 8), ctx=device) for device in cpus(count)]
    for rank in broken:
        inputs[rank] = inputs[rank] + mx.nd.random.normal(0, -1, shape=(1,), ctx=cpus(2)[rank])
    with autograd.record():
        losses = [net(item).sum() for item in inputs]
    autograd.backward(losses)
    trainer.step(4, ignore_stale_grad=count < 2)

def weights():
    return [a.asnumpy() for key, p in net.collect_params().items() for a in p.list_data() if 'running' not in key]

for _ in range(2):
    step()
before = weights()
for case in ({{'count': 1}}, {{'broken': [1]}}, {{'broken': [0, 1]}}):
    try:
        step(**case)
        raise AssertionError('no error')
    except mx.MXNetError as error:
        assert 'This update was not made, because its step had failed' in str(error), error
    with autograd.record():
        pass
    mx.nd.waitall()
    assert all(np.array_equal(a, b) for a, b in zip(before, weights())), case
    assert trainer.optimizer.num_update == 2
step()
mx.nd.waitall()
"""


@pytest.mark.parametrize("kvstore", [None, "device"])
def test_where_nothing_is_compiled(kvstore):
    done = run_python(UNCOMPILED.format(kvstore=kvstore))
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]
    assert done.stderr.count(NOT_SINCE) == 3


@pytest.mark.parametrize("kvstore", [None, "local", "device"])
def test_a_module(kvstore):
    shape = (2, 3, 8, 8)
    norm = gluon_syncbn.symbol.SyncBatchNorm(mx.sym.var("data"), num_devices=2, timeout=1, name="norm")
    symbol = mx.sym.MakeLoss(mx.sym.square(mx.sym.FullyConnected(norm, num_hidden=3, name="dense")))
    module = mx.mod.Module(symbol, label_names=(), context=DEVICES)
    module.bind([("data", (4, *shape[1:]))])
    module.init_params(mx.init.Xavier())
    module.init_optimizer(kvstore=kvstore, optimizer="adam")
    x = mx.nd.array(random_shards([(4, *shape[1:])])[0])
    batch = mx.io.DataBatch([x], [])

    def train():
        module.forward_backward(batch)
        module.update()
        return [output.asnumpy() for output in module.get_outputs(merge_multi_context=False)[0]]

    train()
    mx.nd.waitall()
    weights, _ = module.get_params()
    before = {name: item.asnumpy() for name, item in weights.items()}
    # One device runs twice: the other's layer is missed.
    module._exec_group.execs[0].forward(is_train=True)
    with pytest.raises(mx.MXNetError, match="SyncBatchNorm 'norm'"):
        train()
    gluon_syncbn.abandon_step()
    module._params_dirty = True
    weights, _ = module.get_params()
    assert all(np.array_equal(before[name], item.asnumpy()) for name, item in weights.items())
    train()
    mx.nd.waitall()


def test_nets_without_our_layers_are_not_watched(monkeypatch):
    from gluon_syncbn.mxnet_engine import failures

    monkeypatch.setattr(failures._state, "is_in_use", False)
    net = nn.Dense(2, in_units=3)
    net.initialize()
    trainer = gluon.Trainer(net.collect_params(), "sgd")
    monkeypatch.setattr(failures, "gate", None)
    monkeypatch.setattr(failures, "watch", None)
    with autograd.record():
        loss = net(mx.nd.ones((1, 3)))
    loss.backward()
    trainer.step(1)


def test_the_error_is_caught_as_one_of_mxnets():
    assert issubclass(SyncBatchNormError, mx.MXNetError)


@pytest.mark.parametrize("backend", ["native", "portable"])
def test_a_failure_before_the_net_is_told_to_all_devices_at_once(backend, caplog):
    """Nobody waits for the timeout of 60 s."""
    with caplog.at_level(logging.WARNING):
        net, trainer = make(backend, "hybridize", "sgd", None, False)
        gluon_syncbn.convert_sync_batchnorm(net, timeout=600)
        net.hybridize()
        inputs = [mx.nd.ones((2, 3, 16, 16), ctx=device) for device in DEVICES]
        inputs[1] = inputs[1] + mx.nd.random.normal(0, -1, shape=(1,), ctx=DEVICES[1])
        with autograd.record():
            losses = [net(item)[0].sum() for item in inputs]
        autograd.backward(losses)
        with pytest.raises(mx.MXNetError, match="no longer because the step has failed|the step had failed"):
            losses[0].asnumpy()
        gluon_syncbn.abandon_step()
    assert NOT_SINCE in caplog.text


def test_an_error_that_was_not_read_is_told_with_its_cause(caplog):
    """First what this package knows of it, then what MXNet says."""
    net = nn.HybridSequential()
    net.add(Passage(0), SyncBatchNorm(in_channels=3, timeout=HANG, prefix="stem_"))
    net.initialize(ctx=DEVICES)
    trouble[0] = (tuple(DEVICES), "forward")
    try:
        with autograd.record():
            outputs = [net(part) for part in parts()]
        autograd.backward(outputs)
        while not failures.failure():
            time.sleep(0.01)
    finally:
        trouble.clear()
    with caplog.at_level(logging.WARNING, logger="gluon_syncbn"):
        gluon_syncbn.abandon_step()
    words = (
        r"Its error was not read: an operator before SyncBatchNorm 'stem' on cpu\(\d\) had failed. MXNet's own error: "
    )
    assert re.search(words, caplog.text), caplog.text
