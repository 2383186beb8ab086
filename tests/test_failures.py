"""A failed step changes nothing, and the next one is right: failures.py draws steps; what one step promises besides.

A step that broke off between two ``backward()`` is abandoned, too, and no other is taken for one.
"""

import contextlib
import pickle
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mxnet as mx
import pytest
import testing
from endings import Passage, forward, trouble
from failures import FAULTS, LATE, Decaying, OwnLoop, arrays_of, break_off, learning, same, wait_until_failed
from mxnet import autograd, gluon
from mxnet.contrib.amp.loss_scaler import LossScaler
from mxnet.gluon import nn
from testing import HANG, LONG, cpus, guarded, has_failed, initialized, on_devices, random_shards, sequential

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm, SyncBatchNormError

DEVICES = cpus(2)
NOT_SINCE = "A step was abandoned. No weight has been updated since it failed."
GIVEN_UP = "A step was abandoned. Weights and optimizer states are as they were before it."
SKIPPED = "waited 0.5 s for 1 of 2 devices"


@pytest.fixture(autouse=True)
def untroubled():
    """Also after a test that has failed. Devices on their way get little time, as all are."""
    testing.shorten_grace()
    yield
    testing.shorten_grace(2)
    trouble.clear()
    gluon_syncbn.abandon_step()


@pytest.mark.parametrize("rounds", [1, pytest.param(10, marks=pytest.mark.long)])
def test_each_fault(rounds, backend, seed):
    """In modes that take turns; on the native back end in two. They run side by side, since much of it is waiting."""
    cases, first = rounds * len(FAULTS), seed % (1 << 30)
    seeds = [first, first + 1000] if backend == "native" else [first]

    def run(seed):
        command = ["tests/failures.py", "--backend", backend, "--cases", cases, "--seed", seed]
        return testing.run_program(command, limit=HANG * rounds)

    with ThreadPoolExecutor(len(seeds)) as pool:
        for done in pool.map(run, seeds):
            assert f"0 of {cases} cases wrong" in done.stdout


def small_net(mode, count=2):
    norms = [SyncBatchNorm(timeout=LONG) for _ in range(2)]
    net = sequential(nn.Conv2D(4, 3), norms[0], nn.Activation("relu"), norms[1], nn.Dense(2))
    return initialized(net, count, mode)


def parts(count=2):
    return on_devices(random_shards([(2, 3, 8, 8)] * count))


def train(net, trainer, inputs=None, timeout=LONG):
    """Nobody waits long for a device that is missing, and the others are waited for until they come."""
    inputs = inputs or parts()
    gluon_syncbn.convert_sync_batchnorm(net, timeout=0.5 if len(inputs) < 2 else timeout)
    losses = forward(net, inputs)
    autograd.backward(losses)
    trainer.step(4, ignore_stale_grad=len(inputs) < 2)
    return losses


def learned(net):
    return {name: arrays for name, arrays in arrays_of(net).items() if "running" not in name}


def unchanged(before, net):
    return all(same(arrays, arrays_of(net)[name]) for name, arrays in before.items())


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_all_who_wait_for_a_missing_device_are_told_who_it_is(direction, mode, backend):
    """In time, and afterwards a full step is right."""
    shapes = [(2, 3, 4, 4), (1, 3, 4, 4), (3, 3, 4, 4), (2, 3, 4, 4)]
    layer = SyncBatchNorm(in_channels=3, timeout=1, prefix="stem_")
    net = initialized(sequential(layer), 4, mode)
    testing.random_affine(layer, 3)
    norm = testing.reference_of(layer)
    testing.check_step(net, norm, *testing.shards_and_heads(shapes), layer=layer)
    shards = random_shards(shapes, seed=1)
    inputs = on_devices(shards, learn=True)
    started = time.monotonic()
    outputs = waiting = forward(net, inputs[: 3 if direction == "forward" else 4])
    if direction == "backward":
        mx.nd.waitall()
        norm.step(shards)
        autograd.backward(outputs[:3])
        waiting = [item.grad for item in inputs[:3]]
    for array in waiting:
        with pytest.raises(SyncBatchNormError) as error:
            array.asnumpy()
        text = f"SyncBatchNorm 'stem': {direction} pass waited 1 s for 1 of 4 devices. Arrived: cpu(0), cpu(1), "
        assert text + "cpu(2). Missing: cpu(3). Usual reasons:\n(1)" in str(error.value)
        assert isinstance(error.value, mx.MXNetError)
    assert 0.9 < time.monotonic() - started < 60
    gluon_syncbn.abandon_step()
    testing.check_step(net, norm, *testing.shards_and_heads(shapes, seed=2), layer=layer)


@pytest.mark.parametrize("told", [{"ignore_stale_grad": True}, [True]], ids=["by name", "in its place"])
def test_a_step_on_some_devices_updates_a_weight_on_all_or_none(told, mode, backend):
    """The Trainer leaves out the other devices, whose gradients are old; the Dense layer has its new one early."""
    layer = SyncBatchNorm(in_channels=4, timeout=LONG)
    net = initialized(sequential(nn.Conv2D(4, 3), Passage(0), layer, nn.Dense(2)), 2, mode)
    trainer = gluon.Trainer(net.collect_params(), "sgd", update_on_kvstore=False)
    for fails in (False, True):
        mx.nd.waitall()
        before = learned(net) if fails else {}
        trouble[0] = (DEVICES[:1] if fails else [], "backward")
        used = 1 if fails else 2
        with contextlib.suppress(mx.MXNetError), gluon_syncbn.devices(DEVICES[:used]):
            autograd.backward(forward(net, parts()[:used]))
            trainer.step(4, **told) if isinstance(told, dict) else trainer.step(4, *told)
        with contextlib.suppress(mx.MXNetError):
            mx.nd.waitall()
        gluon_syncbn.abandon_step()
    assert unchanged(before, net)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_an_update_that_reads_gradients_on_its_way_changes_nothing_either(direction, mode, backend):
    """The loss scaler of AMP does so when the KVStore has been asked for all updates, and has yet to make them."""
    net = small_net(mode)
    trainer = gluon.Trainer(net.collect_params(), "sgd", kvstore="device", update_on_kvstore=True)
    trainer._amp_loss_scaler = LossScaler()
    train(net, trainer)
    for _ in range(4):
        before = learned(net)
        gluon_syncbn.convert_sync_batchnorm(net, timeout=0.2)
        losses = forward(net, parts()[: 1 if direction == "forward" else 2])
        autograd.backward(losses[:1])
        with pytest.raises(mx.MXNetError, match=f"had failed: .*{direction} pass waited 0.2 s for 1 of 2 devices"):
            trainer.step(4)
        gluon_syncbn.abandon_step()
        assert unchanged(before, net)


def test_gradients_that_are_added_are_cleared_before_the_first_update_too(mode, backend):
    net = small_net(mode)
    for parameter in learning(net.collect_params()):
        parameter.grad_req = "add"
    trainer = gluon.Trainer(net.collect_params(), "sgd")  # noqa: F841 (it has not updated yet)
    autograd.backward(forward(net, parts()))

    def gradients():
        return [array.asnumpy() for parameter in learning(net.collect_params()) for array in parameter.list_grad()]

    assert any(array.any() for array in gradients())
    gluon_syncbn.convert_sync_batchnorm(net, timeout=0.5)
    autograd.backward(forward(net, parts()[:1]))
    with pytest.raises(SyncBatchNormError, match=SKIPPED):
        mx.nd.waitall()
    gluon_syncbn.abandon_step()
    assert not any(array.any() for array in gradients())


@pytest.mark.parametrize("steps", [0, 2])
def test_the_backward_pass_of_a_forward_pass_that_never_ran_says_so(steps, mode, backend):
    """MXNet runs what comes next once someone has read the error; memory may still hold the step before."""
    net = initialized(sequential(Passage(0), SyncBatchNorm(in_channels=3, timeout=LONG)), 2, mode)
    for number in range(steps + 1):
        trouble[0] = (DEVICES if number == steps else [], "forward")
        inputs = on_devices(random_shards([(2, 3, 8, 8)] * 2), learn=True)
        outputs = forward(net, inputs)
        if number < steps:
            autograd.backward(outputs)
            mx.nd.waitall()
    for output in outputs:
        with pytest.raises(mx.MXNetError):
            output.asnumpy()
    gluon_syncbn.abandon_step()
    trouble.clear()
    autograd.backward(outputs)
    for number, item in enumerate(inputs):
        words = rf"the backward pass on cpu\({number}\)[^\n]*its forward pass never ran"
        with pytest.raises(mx.MXNetError, match=words):
            item.grad.asnumpy()


def test_who_has_read_it_is_not_told_again_and_who_reads_no_loss_learns_of_it_at_the_next_record(caplog):
    """As in a notebook: the cell ends by the error, and is run again. Where nothing is under way nothing is said."""
    net = small_net("hybridize")
    trainer = gluon.Trainer(net.collect_params(), "adam")
    gluon_syncbn.abandon_step()
    train(net, trainer)[0].asnumpy()
    gluon_syncbn.abandon_step()
    assert not caplog.messages
    for _ in range(2):
        with pytest.raises(mx.MXNetError, match=SKIPPED):
            train(net, trainer, parts(1))[0].asnumpy()
    train(net, trainer)[0].asnumpy()
    assert caplog.messages == [GIVEN_UP] * 2
    train(net, trainer, parts(1))
    wait_until_failed()
    with pytest.raises(SyncBatchNormError, match="A step has failed.*" + SKIPPED):
        train(net, trainer)
    train(net, trainer)[0].asnumpy()


def test_the_first_update_raises_the_error_and_copies_nothing(mode):
    """The Trainer would copy all parameters into its KVStore, and back."""
    net = small_net(mode)
    net(parts()[0])
    before = learned(net)
    for kvstore in ("device", None):
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"momentum": 0.9}, kvstore=kvstore)
        with pytest.raises(mx.MXNetError, match=SKIPPED):
            train(net, trainer, parts(1))
        gluon_syncbn.abandon_step()
        assert unchanged(before, net)
    train(net, trainer)[0].asnumpy()


def hold_back(device):
    """What ``device`` is given next begins in some tenths of a second."""
    matrix = mx.nd.ones((2000, 2000), ctx=device)
    for _ in range(3):
        matrix = mx.nd.dot(matrix, matrix)


@guarded
def read_slowly(array):
    """Read it as ``asnumpy`` does, on a thread that stops, when MXNet has forgotten the error, until nothing runs."""
    try:
        return mx.nd.NDArray.asnumpy.__wrapped__(array)
    finally:
        mx.base._LIB.MXNDArrayWaitAll.__wrapped__()


@pytest.mark.parametrize("what", ["label", "input"])
def test_what_is_read_before_the_step_has_used_it(what, mode):
    """A label that failed is given to no net; the loss is yet to wait for the net."""
    net = small_net(mode)
    trainer = gluon.Trainer(net.collect_params(), "adam", kvstore=None)
    train(net, trainer)[0].asnumpy()
    before = arrays_of(net) if what == "input" else learned(net)
    inputs, labels = parts(), [mx.nd.ones(2, ctx=device) for device in DEVICES]
    failing = labels if what == "label" else inputs
    failing[1] = break_off(failing[1])
    hold_back(DEVICES[1])
    with autograd.record():
        losses = [((net(part) - label) ** 2).sum() for part, label in zip(inputs, labels)]
    autograd.backward(losses)
    trainer.step(4)
    with pytest.raises(mx.MXNetError, match="scale parameter"):
        read_slowly(failing[1])
    gluon_syncbn.abandon_step()
    assert unchanged(before, net)


def test_arrays_of_each_kind_are_read_as_before():
    """In a process that has synchronized layers; an array without memory may be waited for."""
    small_net("imperative")(parts()[0])
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
    assert not has_failed()


def test_an_array_that_is_moved_hides_no_error():
    """Whether autograd knows an array, MXNet tells by an error."""
    net = small_net("imperative")
    net(parts(1)[0])
    gluon_syncbn.convert_sync_batchnorm(net, timeout=0.5)
    with autograd.record():
        net(parts(1)[0])
        mx.nd.ones(3).as_in_context(mx.cpu(1))
    wait_until_failed()
    with pytest.raises(SyncBatchNormError, match="A step has failed, and its error was not read."), autograd.record():
        pass


def test_an_error_that_has_nothing_to_do_with_the_step_hides_none():
    """A loop catches an error of MXNet's in a step whose layer waits in vain."""
    net = small_net("imperative")
    net(parts(1)[0])
    gluon_syncbn.convert_sync_batchnorm(net, timeout=0.5)
    with autograd.record():
        net(parts(1)[0])
    wait_until_failed()
    with pytest.raises(mx.MXNetError, match="dot shape error"):
        mx.nd.dot(mx.nd.ones((1, 2)), mx.nd.ones((1, 2)))
    for is_new in (True, False):
        with pytest.raises(mx.MXNetError, match="dot shape error"):
            mx.nd.dot(mx.nd.ones((1, 2)), mx.nd.ones((1, 2)))
        match = "its error was not read. SyncBatchNorm '"
        with pytest.raises(SyncBatchNormError, match=match) if is_new else contextlib.nullcontext(), autograd.record():
            pass


def test_an_error_that_came_before_does_not_hide_that_of_the_layer():
    """Of all errors MXNet's ``waitall`` raises that which was first in its list."""
    net = small_net("imperative")
    net(parts(1)[0])
    gluon_syncbn.convert_sync_batchnorm(net, timeout=0.5)
    array = mx.nd.random.normal(0, -1, shape=(1,))  # noqa: F841 (it fails)
    with autograd.record():
        net(parts(1)[0])
    with pytest.raises(SyncBatchNormError, match=f"(?s)^SyncBatchNorm '.*{SKIPPED}.*MXNet's own error: .*scale"):
        mx.nd.waitall()


def test_who_reads_after_another_has_got_the_error():
    """MXNet has forgotten it, and would return memory that nobody has written."""
    small_net("imperative")(parts()[0])
    array = mx.nd.random.normal(0, -1, shape=(1,))

    @guarded
    def read_second(array):
        with pytest.raises(mx.MXNetError, match="scale parameter"):
            array.asnumpy()
        return mx.nd.NDArray.asnumpy.__wrapped__(array)

    with pytest.raises(SyncBatchNormError, match="could not compute this array"):
        read_second(array)
    assert has_failed()


UNCOMPILED = """
from test_failures import *
from testing import *

net = small_net('hybridize')
trainer = gluon.Trainer(net.collect_params(), 'adam', kvstore={kvstore!r})
for _ in range(2):
    train(net, trainer)
before = learned(net)
assert net[1].backend == 'portable'
for broken in ((), (1,), (0, 1)):
    inputs = [break_off(part) if rank in broken else part for rank, part in enumerate(parts(2 if broken else 1))]
    words = 'This update was not made, because its step had failed: ' + ('' if broken else
        '(?s:.*)forward pass ' + SKIPPED)
    with pytest.raises(mx.MXNetError, match=words):
        train(net, trainer, inputs, timeout=0.5)
    with autograd.record():
        pass
    mx.nd.waitall()
    assert unchanged(before, net), broken
    assert trainer.optimizer.num_update == 2
train(net, trainer)
mx.nd.waitall()
assert not unchanged(before, net)
"""


@pytest.mark.parametrize("kvstore", [None, "device"])
def test_where_nothing_is_compiled(kvstore):
    done = testing.run_python(testing.NOT_COMPILED + UNCOMPILED.format(kvstore=kvstore), GLUON_SYNCBN_BACKEND="auto")
    assert done.stderr.count(NOT_SINCE) == 3


@pytest.mark.parametrize("kvstore", [None, "local", "device"])
def test_a_module(kvstore):
    norm = gluon_syncbn.symbol.SyncBatchNorm(mx.sym.var("data"), num_devices=2, timeout=1, name="norm")
    symbol = mx.sym.MakeLoss(mx.sym.square(mx.sym.FullyConnected(norm, num_hidden=3, name="dense")))
    module = testing.module_of(symbol, DEVICES, (4, 3, 8, 8), optimizer={"kvstore": kvstore, "optimizer": "adam"})
    batch = mx.io.DataBatch([mx.nd.array(random_shards([(4, 3, 8, 8)])[0])], [])

    def train_module():
        module.forward_backward(batch)
        module.update()
        return [output.asnumpy() for output in module.get_outputs(merge_multi_context=False)[0]]

    def weights():
        return [item.asnumpy() for items in module._exec_group.param_arrays for item in items]

    train_module()
    mx.nd.waitall()
    before, counts = weights(), {**module._optimizer._index_update_count}
    # One device runs twice: the other's layer is missed.
    module._exec_group.execs[0].forward(is_train=True)
    with pytest.raises(mx.MXNetError, match="SyncBatchNorm 'norm'"):
        train_module()
    gluon_syncbn.abandon_step()
    assert same(before, weights())
    assert module._optimizer._index_update_count == counts  # by which Adam corrects its means
    train_module()
    mx.nd.waitall()
    assert not same(before, weights())
    # Parameters that it gets before it is abandoned would be lost.
    module._exec_group.execs[0].forward(is_train=True)
    with pytest.raises(mx.MXNetError, match="SyncBatchNorm 'norm'"):
        train_module()
    with pytest.raises(SyncBatchNormError, match="nothing was written, because the step has failed: "):
        module.set_params({"dense_bias": mx.nd.array([7, 8, 9])}, {}, allow_missing=True, force_init=True)
    gluon_syncbn.abandon_step()
    module.set_params({"dense_bias": mx.nd.array([7, 8, 9])}, {}, allow_missing=True, force_init=True)
    assert sum(array.tolist() == [7, 8, 9] for array in weights()) == 2


def test_a_parameter_without_a_shape_is_mxnets_own_error(backend):
    net = small_net("imperative")
    unused = initialized(nn.Dense(2), DEVICES)
    parameters = {**net.collect_params(), **unused.collect_params()}
    with pytest.raises(gluon.parameter.DeferredInitializationError):
        train(net, gluon.Trainer(parameters, "sgd"))


NO_LAYERS = """
from test_failures import *
from testing import *

net = initialized(nn.Dense(2, in_units=3))
trainer = gluon.Trainer(net.collect_params(), "sgd")
for _ in range(2):
    with autograd.record():
        loss = net(break_off(mx.nd.ones((1, 3))))
    with pytest.raises(mx.MXNetError, match="scale parameter") as error:
        loss.asnumpy()
    assert not isinstance(error.value, SyncBatchNormError) and not has_failed()
    with autograd.record():
        loss = net(mx.nd.ones((1, 3)))
    loss.backward()
    trainer.step(1)
    loss.asnumpy()
"""


def test_nets_without_our_layers_are_not_watched():
    assert "abandoned" not in testing.run_python(NO_LAYERS).stderr


def test_a_failure_before_the_net_is_told_to_all_devices_at_once_and_with_its_cause(backend, caplog):
    """Nobody waits for the timeout, which would end this test. First what this package knows, then what MXNet says."""
    net = initialized(sequential(Passage(0), SyncBatchNorm(in_channels=3, timeout=LONG, prefix="stem_")), 2)
    for failing in (DEVICES[1:], DEVICES):
        trouble[0] = failing, "forward"
        losses = forward(net, parts())
        autograd.backward(losses)
        if len(failing) == 1:
            with pytest.raises(mx.MXNetError, match="because the step has failed|the step had failed"):
                losses[0].asnumpy()
        else:
            wait_until_failed()
        trouble.clear()
        gluon_syncbn.abandon_step()
    told, unread = caplog.messages
    assert told == NOT_SINCE
    before = r"an operator before SyncBatchNorm 'stem' on cpu\(\d\) had failed. MXNet's own error: "
    assert re.match(re.escape(f"{NOT_SINCE} Its error was not read: ") + before, unread)


class Ways:
    """Complete steps, as users write them."""

    def in_one_scope(net, inputs):
        for loss in forward(net, inputs):
            loss.backward()

    def together(net, inputs):
        autograd.backward(forward(net, inputs))

    def one_head_for_all(net, inputs):
        with autograd.record():
            total = sum(net(part).sum().as_in_context(mx.cpu(0)) for part in inputs)
        total.backward()

    def a_scope_per_device(net, inputs):
        for part in inputs:
            Ways.in_one_scope(net, [part])

    def in_the_other_order(net, inputs):
        Ways.in_one_scope(net, inputs[::-1])

    def several_passes_per_device(net, inputs):
        """As adversarial training does: two forward passes and a backward pass, then one of each, device by device."""
        for part in inputs:
            with autograd.record():
                loss = net(part) + net(-part)
            loss.backward()
            Ways.in_one_scope(net, [part])

    def all_forward_passes_first(net, inputs):
        Ways.together(net, [factor * part for factor in (1, 2) for part in inputs])

    def twice_backward(net, inputs):
        losses = forward(net, inputs)
        for keeps in (True, False):
            for loss in losses:
                loss.backward(retain_graph=keeps)

    def prediction_in_between(net, inputs):
        for loss, part in zip(forward(net, inputs), inputs):
            loss.backward()
            net(part)

    def a_thread_per_device_that_adds_gradients_up(net, inputs):
        """The first device begins its second pass before the other has called ``backward()``."""
        Ways.in_one_scope(net, inputs)  # MXNet initializes parameters in one thread

        def run(rank):
            for part in (inputs[rank], -inputs[rank]):
                losses = forward(net, [part])
                time.sleep(0.03 * rank)
                losses[0].backward()

        with ThreadPoolExecutor(len(inputs)) as pool:
            list(pool.map(run, range(len(inputs))))

    def no_backward_pass(net, inputs):
        forward(net, inputs)


def test_a_complete_step_is_not_taken_for_one_that_broke_off(mode, caplog):
    """Each way twice and after each other; then a step on some devices, and moves to one device and back."""
    for way in (item for name, item in vars(Ways).items() if not name.startswith("_")):
        net = small_net(mode)
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1e-3})
        for number in range(4):
            way(net, parts())
            if number % 2 and way is not Ways.no_backward_pass:
                trainer.step(1)
        mx.nd.waitall()
        assert LATE not in caplog.text, way
    net = small_net(mode)
    Ways.in_one_scope(net, parts())
    with gluon_syncbn.devices(mx.cpu(0), net):
        Ways.in_one_scope(net, parts(1))
    for count in (2, 1, 2):
        net.collect_params().reset_ctx(cpus(count))
        Ways.in_one_scope(net, parts(count))
    mx.nd.waitall()
    assert LATE not in caplog.text


def test_a_step_that_broke_off_is_given_up_with_the_devices_that_had_begun(mode, caplog):
    """After a move to more devices, too."""
    net = small_net(mode)
    Ways.in_one_scope(net, parts())
    net.collect_params().reset_ctx(cpus(3))
    Ways.in_one_scope(net, parts(3))
    for begun, told in (([2, 0], "cpu(0), cpu(2)"), ([0], "cpu(0)")):
        losses = forward(net, parts(3))
        for rank in begun:
            losses[rank].backward()
        caplog.clear()
        Ways.in_one_scope(net, parts(3))
        mx.nd.waitall()
        assert f"SyncBatchNorm '{net[1].name}': {LATE} {told} only, and is abandoned now." in caplog.text


@pytest.mark.parametrize("before", ["a teacher", "a frozen layer", "a discriminator's real images"])
def test_a_step_that_broke_off_is_noticed_where_another_layer_comes_first(before, mode, caplog):
    net, other = small_net(mode), small_net(mode)
    if before == "a frozen layer":
        net[1].gamma.grad_req = net[1].beta.grad_req = "null"

    def losses_of(inputs):
        with autograd.record():
            first = [] if before == "a frozen layer" else [other(part) for part in inputs]
            seen = [item.detach() for item in first] if before == "a teacher" else first
            ends = [net(part) for part in inputs]
            return [a + b for a, b in zip(ends, seen)] if before == "a teacher" else ends

    Ways.together(net, parts())
    autograd.backward(losses_of(parts()))
    losses = losses_of(parts())
    losses[0].backward()
    autograd.backward(losses_of(parts()))
    mx.nd.waitall()
    assert caplog.text.count(LATE) == 1 and "called for cpu(0) only, and is abandoned now" in caplog.text


@pytest.mark.parametrize("how", ["on some devices", "behind a layer that is frozen now"])
def test_a_step_that_broke_off_is_noticed_wherever_it_was(how, mode, caplog):
    net = small_net(mode, 3)
    Ways.in_one_scope(net, parts(3))
    if how != "on some devices":
        net[1].gamma.grad_req = net[1].beta.grad_req = "null"
        Ways.in_one_scope(net, parts(3))
    used = 2 if how == "on some devices" else 3
    with gluon_syncbn.devices(cpus(used), net):
        forward(net, parts(used))[0].backward()
        Ways.in_one_scope(net, parts(used))
    mx.nd.waitall()
    assert caplog.text.count(LATE) == 1 and "called for cpu(0) only, and is abandoned now" in caplog.text


def test_a_group_that_has_trained_by_itself_hides_no_step_that_broke_off(mode, caplog):
    net = small_net(mode, 4)
    gluon_syncbn.convert_sync_batchnorm(net, group_size=2)
    for begun, told in (([0], "cpu(0)"), ([1, 0, 3], "cpu(3)")):
        Ways.in_one_scope(net, parts(4)[2:])
        mx.nd.waitall()
        assert LATE not in caplog.text
        losses = forward(net, parts(4))
        for rank in begun:
            losses[rank].backward()
        Ways.in_one_scope(net, parts(4))
        mx.nd.waitall()
        assert f"SyncBatchNorm '{net[1].name}': {LATE} {told} only, and is abandoned now." in caplog.text
        caplog.clear()


def test_groups_that_train_in_a_thread_each_are_not_taken_for_steps_that_broke_off(mode, caplog):
    """One is between its two backward passes, again and again, when the other begins a step."""
    net = small_net(mode, 4)
    gluon_syncbn.convert_sync_batchnorm(net, group_size=2)
    Ways.in_one_scope(net, parts(4))

    def train_pair(first):
        for _ in range(20):
            losses = forward(net, parts(4)[first : first + 2])
            for loss in losses:
                loss.backward()
                time.sleep(0.001)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(train_pair, (0, 2)))
    mx.nd.waitall()
    assert not caplog.text


@pytest.mark.parametrize("how", ["one thread", "a thread per device"])
def test_two_nets_whose_passes_alternate_are_not_taken_for_steps_that_broke_off(how, mode, caplog):
    """Each device goes back through two stages; or its thread records both nets before it calls ``backward()``."""
    first, second = small_net(mode), small_net(mode)
    for net in (first, second):
        Ways.in_one_scope(net, parts())

    def go_back(rank):
        forward(second, [2 * inputs[rank]])[0].backward()  # MXNet takes an array in one graph alone
        losses[rank].backward()

    def record_both(rank):
        time.sleep(0.1 * rank)
        both = forward(first, [inputs[rank]]) + forward(second, [2 * inputs[rank]])
        for loss in both:
            loss.backward()

    for _ in range(3):
        inputs = parts()
        if how == "one thread":
            losses = forward(first, inputs)
            for rank in range(2):
                go_back(rank)
        else:
            with ThreadPoolExecutor(2) as pool:
                list(pool.map(record_both, range(2)))
    mx.nd.waitall()
    assert not caplog.text


def test_a_step_that_broke_off_is_noticed_where_threads_live_on(mode, caplog):
    """Each device has a thread for its forward passes, and the main thread calls ``backward()``."""
    net = small_net(mode)
    Ways.in_one_scope(net, parts())
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:

        def losses():
            return [pool.submit(forward, net, [part]).result()[0] for pool, part in zip((one, other), parts())]

        autograd.backward(losses())
        losses()[0].backward()
        autograd.backward(losses())
        mx.nd.waitall()
    assert caplog.text.count(LATE) == 1


@pytest.mark.parametrize("lag", [(0, 0), (0, 0.1), (0.1, 0)], ids=["together", "cpu(1) late", "cpu(0) late"])
@pytest.mark.parametrize("which", ["the same threads", "new threads"])
def test_a_step_that_broke_off_on_threads_and_is_not_abandoned(which, lag, mode):
    """Between the passes of cpu(1). Whoever notices it first, the next step is right or says why, and all later are."""
    layer = SyncBatchNorm(in_channels=2, timeout=5, momentum=0.0)
    net = initialized(sequential(layer, nn.Dense(1, in_units=2)), DEVICES, mode)
    pools = [ThreadPoolExecutor(1) for _ in DEVICES]

    def work(rank, number, is_bad):
        time.sleep(lag[rank])
        with autograd.record():
            loss = (net(mx.nd.array([[number, 2], [3, 5 + rank]], ctx=DEVICES[rank])) ** 2).sum()
        if is_bad and rank == 1:
            raise ValueError("a bad label")
        loss.backward()

    def step(number, is_bad=False):
        workers = pools if which == "the same threads" else [ThreadPoolExecutor(1) for _ in DEVICES]
        futures = [pool.submit(work, rank, number, is_bad) for rank, pool in enumerate(workers)]
        errors = [error for error in [future.exception() for future in futures] if error is not None]
        if errors:
            raise errors[0]
        mx.nd.waitall()
        means = [layer.running_mean.data(device).asnumpy() for device in DEVICES]
        assert all(mean.tolist() == [(number + 3) / 2, 3.75] for mean in means)

    step(1)
    for _ in range(2):
        with pytest.raises(ValueError, match="a bad label"):
            step(2, is_bad=True)
        try:
            step(3)
        except SyncBatchNormError as error:
            assert "That step is abandoned, and so is this one" in str(error)  # it has not waited in vain
        step(4)


def test_a_device_that_is_on_its_way_while_another_abandons_the_step(mode):
    """It still comes, and its thread has no error."""
    net = initialized(sequential(SyncBatchNorm(in_channels=2, timeout=10), nn.Dense(1, in_units=2)), DEVICES, mode)
    testing.shorten_grace(2)

    def work(rank, is_bad):
        time.sleep(0.2 * rank)
        with autograd.record():
            loss = (net(mx.nd.ones((2, 2), ctx=DEVICES[rank])) ** 2).sum()
            if is_bad and rank == 0:
                raise ValueError("a bad label")
        if not is_bad:
            loss.backward()
        return loss.asscalar()

    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        for is_bad in (False, True, False):
            futures = [pool.submit(work, rank, is_bad) for rank, pool in enumerate((one, other))]
            errors = [future.exception() for future in futures]
            assert [type(error) for error in errors] == [ValueError if is_bad else type(None), type(None)]
            gluon_syncbn.abandon_step()


CHECKPOINT = """
from testing import *
import gluon_syncbn

block = initialized(sequential(nn.Dense(4, in_units=4), SyncBatchNorm(in_channels=4, timeout=10)), 2)

class Checkpoint(autograd.Function):
    def forward(self, x):
        self.x = x.detach()
        with autograd.pause(train_mode=False):
            return block(x)

    def backward(self, gradient):
        self.x.attach_grad()
        with autograd.record():
            y = block(self.x)
        y.backward(gradient)
        return self.x.grad

def step(is_bad):
    losses, late = [], mx.nd.ones((1000, 1000))
    for x in on_devices([np.ones((3, 4), "float32")] * 2, learn=True):
        with autograd.record():
            losses.append((Checkpoint()(x) ** 2).sum())
    for _ in range(20):
        late = mx.nd.dot(late, late) / 1000
    losses[0].backward(late[0, :1])
    if is_bad:
        raise ValueError("a bad label")
    losses[1].backward()
    mx.nd.waitall()

step(is_bad=False)
try:
    step(is_bad=True)
except ValueError:
    gluon_syncbn.abandon_step()
step(is_bad=False)
print("RIGHT")
"""


def test_a_step_is_abandoned_while_an_operator_records():
    """In its backward pass it computes again what its forward pass has not kept, and waits for the other device."""
    assert testing.run_python(CHECKPOINT).stdout == "RIGHT\n"


def test_groups_that_take_turns_in_one_thread_are_not_taken_for_steps_that_broke_off(mode, caplog):
    net = small_net(mode, 4)
    gluon_syncbn.convert_sync_batchnorm(net, group_size=2)
    for _ in range(3):
        inputs = parts(4)
        with autograd.record():
            losses = [net(x) for x in inputs[:2]]
            losses[0].backward()
            losses.append(net(inputs[2]))
            losses[1].backward()
            losses.append(net(inputs[3]))
        autograd.backward(losses[2:])
    mx.nd.waitall()
    assert not caplog.text


def test_an_array_that_fails_in_an_update_tells_its_own_error():
    net = small_net("imperative")
    Ways.in_one_scope(net, parts())
    with pytest.raises(mx.MXNetError, match="scale"), gluon_syncbn.guard_update(net.collect_params()):
        mx.nd.random.normal(0, -1, shape=(1,)).asnumpy()


def test_the_trainer_still_notices_a_gradient_that_is_not_fresh():
    net = small_net("imperative")
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1e-3}, kvstore=None)
    Ways.in_one_scope(net, parts())
    trainer.step(1)
    mx.nd.waitall()
    with pytest.raises(UserWarning, match="has not been updated by backward since last"):
        trainer.step(1)
    Ways.in_one_scope(net, parts())
    x = mx.nd.ones(1)
    x.attach_grad()
    with autograd.record():
        other = x * 2
    other.backward()  # of something else, which leaves the note at the net's parameters
    trainer.step(1)
    mx.nd.waitall()


class OwnStep(gluon.Trainer):
    """Its ``step`` does not call that of its base."""

    def step(self, batch_size, ignore_stale_grad=False):
        self._check_and_rescale_grad(self._scale / batch_size)
        if not self._kv_initialized:
            self._init_kvstore()
            self._init_params()
        self._allreduce_grads()
        self._update(ignore_stale_grad)


@pytest.mark.parametrize("kind", [gluon.Trainer, OwnStep])
def test_ctrl_c_in_an_update_comes_after_all_devices(kind, mode):
    net, optimizer = small_net(mode), Decaying(learning_rate=0.01)
    trainer = kind(net.collect_params(), optimizer, kvstore="device", update_on_kvstore=False)
    train(net, trainer)
    before, optimizer.is_interrupted = learned(net), True
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            train(net, trainer)
    finally:
        signal.signal(signal.SIGINT, usual)
    optimizer.is_interrupted = False
    mx.nd.waitall()
    gluon_syncbn.abandon_step()
    after = learned(net)
    assert all(same(arrays[:1], arrays[1:]) and not same(arrays, before[name]) for name, arrays in after.items())


WATCHED = """
import os, signal, threading, time
from testing import *
signal.signal(signal.SIGINT, signal.default_int_handler)
layer, dense = initialized(SyncBatchNorm(in_channels=3), 2), initialized(nn.Dense(1, in_units=2), 1)
trainer = mx.gluon.Trainer(dense.collect_params(), 'sgd', kvstore=None)
def update():
    with autograd.record():
        loss = dense(mx.nd.ones((1, 2)))
    loss.backward()
    trainer.step(1)
with autograd.record():
    [layer(mx.nd.ones((2, 3), ctx=device)) for device in cpus(2)]
update()  # the first waits for all
with autograd.record():
    layer(mx.nd.ones((2, 3)))
time.sleep(1)  # from here on Ctrl-C is watched for
update()
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
began = time.monotonic()
try:
    mx.nd.waitall()
except (KeyboardInterrupt, mx.MXNetError):
    print('ENDED', time.monotonic() - began < 30)
"""


def test_ctrl_c_ends_a_wait_after_an_update_too(backend):
    assert "ENDED True" in testing.run_python(WATCHED, GLUON_SYNCBN_TIMEOUT=60).stdout


@pytest.mark.parametrize("kind", [gluon.Trainer, OwnStep])
@pytest.mark.parametrize("kvstore", [None, "device"])
def test_no_trainer_and_no_optimizer_changes_a_weight_in_a_failed_step(kvstore, kind, mode):
    net = small_net(mode)
    trainer = kind(net.collect_params(), Decaying(learning_rate=0.1), kvstore=kvstore, update_on_kvstore=False)
    train(net, trainer)
    mx.nd.waitall()
    before = learned(net)
    with contextlib.suppress(mx.MXNetError):
        train(net, trainer, parts(1))
    gluon_syncbn.abandon_step()
    assert all(same(arrays, before[name]) for name, arrays in learned(net).items())
    with pytest.raises(UserWarning, match="has not been updated by backward since last"):
        trainer.step(4)  # its gradients are of the step that failed
    train(net, trainer)
    mx.nd.waitall()
    assert all(not same(arrays, before[name]) for name, arrays in learned(net).items())


def test_gradients_that_are_added_outside_a_trainer_are_cleared_too(backend):
    net = small_net("hybridize")
    net.collect_params().setattr("grad_req", "add")
    loop = OwnLoop(net.collect_params())
    train(net, loop)
    losses = forward(net, parts())
    losses[0].backward()
    gluon_syncbn.abandon_step()
    gradients = [parameter.list_grad() for parameter in net.collect_params().values() if parameter.grad_req == "add"]
    assert all((gradient.asnumpy() == 0).all() for some in gradients for gradient in some)


@pytest.mark.parametrize("kvstore", [None, "device"])
def test_states_that_a_failed_update_has_moved_to_their_devices_are_as_before(kvstore, mode, tmp_path):
    """MXNet does so in the first update after ``load_states``, whose arrays are all on one device."""
    net, file = small_net(mode), str(tmp_path / "states")

    def make_trainer():
        options = {"learning_rate": 0.01, "momentum": 0.9}
        return gluon.Trainer(net.collect_params(), "sgd", options, kvstore=kvstore, update_on_kvstore=False)

    trainer = make_trainer()
    inputs = parts()
    for _ in range(2):  # with gradients that are alike, since nothing adds them up without a store
        train(net, trainer, inputs)
    mx.nd.waitall()
    trainer.save_states(file)
    trainer = make_trainer()
    trainer.load_states(file)
    before = learned(net)
    with contextlib.suppress(mx.MXNetError):
        train(net, trainer, inputs[:1])
    gluon_syncbn.abandon_step()
    assert all(same(arrays, before[name]) for name, arrays in learned(net).items())
    train(net, trainer, inputs)
    mx.nd.waitall()
    for name, arrays in learned(net).items():
        assert all(abs(array).max() < 100 for array in arrays), name
        assert kvstore is None or same(arrays[:1], arrays[1:]), name


@pytest.mark.parametrize("update_on_kvstore", [False, True])
def test_a_checkpoint_is_loaded_when_a_failed_step_was_abandoned(update_on_kvstore, mode, backend, tmp_path):
    """Before that, MXNet would skip what is copied into weights, so it is refused. Optimizer states are loaded."""
    net, files = small_net(mode), [str(tmp_path / name) for name in ("weights", "states", "again")]
    trainer = gluon.Trainer(net.collect_params(), "adam", update_on_kvstore=update_on_kvstore)
    train(net, trainer)
    mx.nd.waitall()
    net.save_parameters(files[0])
    trainer.save_states(files[1])
    before, count = learned(net), trainer._optimizer.num_update
    train(net, trainer)
    gluon_syncbn.convert_sync_batchnorm(net, timeout=0.5)
    losses = forward(net, parts()[:1])
    with pytest.raises(mx.MXNetError, match=SKIPPED):
        autograd.backward(losses)
        trainer.step(4, ignore_stale_grad=True)
        mx.nd.waitall()
    with pytest.raises(SyncBatchNormError, match=f"(?s)nothing was written, .*{SKIPPED}.*abandon_step"):
        net.load_parameters(files[0], ctx=DEVICES)
    trainer.load_states(files[1])
    gluon_syncbn.abandon_step()
    trainer.save_states(files[2])
    saved, loaded = (pickle.loads(Path(file).read_bytes())[0] for file in files[1:])
    assert saved.keys() == loaded.keys()
    for key, pair in saved.items():
        assert same([array.asnumpy() for array in pair], [array.asnumpy() for array in loaded[key]])
    for load in (lambda: net.load_parameters(files[0], ctx=DEVICES), lambda: trainer.load_states(files[1])):
        load()
        assert all(same(arrays, before[name]) for name, arrays in learned(net).items())
        assert trainer._optimizer.num_update == count


@pytest.mark.parametrize("is_read", [True, False])
@pytest.mark.parametrize(
    "copy",
    [
        lambda net: net.collect_params().reset_ctx(DEVICES[0]),
        lambda net: net.collect_params().reset_ctx(DEVICES[::-1]),
        lambda net: (net.cast("float64"), net.cast("float32")),
    ],
)
def test_weights_that_are_copied_after_a_failed_step(copy, is_read, mode, backend):
    """The copies are of the weights from before it, as an error of the step advises a user who moves the net."""
    net = small_net(mode)
    trainer = gluon.Trainer(net.collect_params(), "sgd")
    train(net, trainer)
    mx.nd.waitall()
    before = learned(net)
    if is_read:
        with pytest.raises(mx.MXNetError, match="waited"):
            train(net, trainer, parts()[:1])[0].asnumpy()
            mx.nd.waitall()
    else:
        train(net, trainer, parts()[:1])
        with pytest.raises(mx.MXNetError, match="waited"):
            copy(net)
    copy(net)
    found = learned(net)
    assert all(same(found[name], arrays[: len(found[name])]) for name, arrays in before.items())


@pytest.mark.parametrize("between", [autograd.pause, autograd.predict_mode])
def test_a_static_net_in_both_modes_waits_for_no_device_that_is_yet_to_be_called(between):
    """Its input may wait for the device, in another net."""
    maker, judge = small_net("imperative"), small_net("static")
    gluon_syncbn.convert_sync_batchnorm(maker, timeout=5)
    maker, judge = sequential(*maker[:4]), initialized(sequential(SyncBatchNorm(timeout=5), nn.Dense(2)), 2, "static")
    for _ in range(3):
        with autograd.record():
            losses = []
            for part in parts():
                made = maker(part)
                with between():
                    kept = judge(made)
                losses.append(judge(made).sum())
                del kept  # else both calls would be in one mode, where the package cannot wait
        autograd.backward(losses)
        mx.nd.waitall()
