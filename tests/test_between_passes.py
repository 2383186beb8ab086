"""What comes between the passes of two devices neither waits for them nor takes what they need.

A pass on cpu(0) waits until the same pass of cpu(1) is called. Until then nothing may wait for cpu(0), and no buffer of
its operators may be given away. And when all devices have been called, the step must be known to be closed: in a loop
whose steps never close, each step takes more buffers.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

import mxnet as mx
import pytest
import testing
from endings import Late
from mxnet import autograd, gluon
from mxnet.gluon import nn
from reference import check
from testing import cpus, initialized, on_devices, random_shards, reference_of, sequential

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm
from gluon_syncbn.step.steps import steps

pytestmark = [
    pytest.mark.usefixtures("backend"),
    pytest.mark.filterwarnings("ignore:All children of this Sequential layer"),  # a detector is one, with other blocks
]
CHANNELS = 5
DEVICES = cpus(2)
SHARDS = random_shards([(2, CHANNELS), (1, CHANNELS)])


@pytest.fixture(autouse=True)
def no_step_is_under_way():
    gluon_syncbn.abandon_step()  # of tests before
    yield
    gluon_syncbn.abandon_step()


def make(mode, layers=1, late=0.0, **options):
    """Layers, each with a net of its own, in a block that is not hybridized; and the first layer."""
    net = nn.Sequential()
    for _ in range(layers):
        before = [Late(lambda device: late)] if late else []
        layer = SyncBatchNorm(in_channels=CHANNELS, timeout=10, **options)
        net.add(sequential(*before, layer, nn.Dense(CHANNELS, in_units=CHANNELS)))
    return initialized(net, 2, mode), net[0][-2]


def freeze(net):
    net.collect_params(".*gamma|.*beta").setattr("grad_req", "null")


def losses_of(net, inputs):
    with autograd.record():
        return [(net(x) ** 2).sum() for x in inputs]


def check_statistics(layer, norm):
    mx.nd.waitall()
    for name, wanted in zip(("running_mean", "running_var"), norm.running()):
        for device in DEVICES:
            check(name, getattr(layer, name).data(device).asnumpy(), wanted, **testing.precision(layer))


@pytest.mark.parametrize(
    "how", ["backward", "frozen", "as of a prediction", "through a retained graph", "grad", "after another update"]
)
def test_a_prediction_between_two_backward_passes(how, mode):
    net, layer = make(mode, layers=2 if how == "through a retained graph" else 1)
    if how in ("frozen", "as of a prediction", "after another update"):
        freeze(net)
    other = initialized(nn.Dense(1, in_units=1), DEVICES)
    trainer = gluon.Trainer(other.collect_params(), "sgd", {"learning_rate": 0.0})
    norm, inputs = reference_of(layer), on_devices(SHARDS, learn=True)
    for _ in range(3):
        losses = losses_of(net, inputs)
        if how in ("through a retained graph", "grad"):
            autograd.backward(losses, retain_graph=True)
        if how == "after another update":  # as of a discriminator
            autograd.backward(losses_of(other, [mx.nd.ones((1, 1), ctx=device) for device in DEVICES]))
            trainer.step(1)
        for loss, x in zip(losses, inputs):
            autograd.grad(loss, [x]) if how == "grad" else loss.backward(train_mode=how != "as of a prediction")
            net(x)
        norm.step(SHARDS)
    check_statistics(layer, norm)


@pytest.mark.parametrize("how", ["another net's loss", "a loss without a net", "the gradient of a prediction"])
def test_what_one_device_alone_computes_leaves_the_modes_of_calls(how, mode):
    """A static net must wait for its calls in the other mode, which are late."""
    net, layer = make(mode, late=0.1)
    other, (x,) = initialized(nn.Dense(1, in_units=CHANNELS)), on_devices(SHARDS[:1], learn=True)
    norm = reference_of(layer)
    for number in range(4):
        if how == "the gradient of a prediction":
            saliency(net, x, train_mode=number > 1)  # either, on `native`
        losses = losses_of(net, on_devices(SHARDS))
        with autograd.record():
            more = {"another net's loss": other(x).sum, "a loss without a net": (x**2).sum}.get(how, x.sum)()
        more.backward()
        autograd.backward(losses)
        del losses
        for each in on_devices(SHARDS):
            net(each)
        norm.step(SHARDS)
    check_statistics(layer, norm)


@pytest.mark.parametrize("threads", ["a new one for each epoch", "a pool, and then the main thread"])
def test_another_thread_takes_over(threads, mode):
    net, layer = make(mode)
    norm, inputs = reference_of(layer), on_devices(SHARDS)

    def forward(x):
        with autograd.record():
            loss = (net(x) ** 2).sum()
        net(x)
        return loss

    def epoch():
        for _ in range(2):
            autograd.backward([forward(x) for x in inputs])
            norm.step(SHARDS)

    if threads == "a new one for each epoch":
        for _ in range(2):
            thread = threading.Thread(target=epoch)
            thread.start()
            thread.join()
    else:
        with ThreadPoolExecutor(2) as pool:
            autograd.backward(list(pool.map(forward, inputs)))
            norm.step(SHARDS)
            epoch()
    check_statistics(layer, norm)


@pytest.mark.parametrize("where", ["here", "on a third device"])
def test_a_label_between_two_backward_passes_takes_no_buffer_of_theirs(where, mode):
    """cpu(0) computes it when its own backward pass waits: of a generator whose layers learn nothing, say."""
    layer = SyncBatchNorm(in_channels=8, timeout=10, scale=False, center=False)
    net = sequential(nn.Conv2D(8, 3, in_channels=3), layer, nn.Conv2D(3, 3, in_channels=8))
    initialized(net, DEVICES, mode)
    other = initialized(nn.Dense(1, in_units=1), DEVICES)
    trainer = gluon.Trainer(other.collect_params(), "sgd", {"learning_rate": 0.0})
    soft = mx.nd.random.uniform(0.8, 1.0, shape=(4, 8))
    for _ in range(3):
        with autograd.record():
            outputs = [net(mx.nd.ones((4, 3, 16, 16), ctx=device)) for device in DEVICES]
            if where != "here":
                outputs = [output.as_in_context(mx.cpu(2)) for output in outputs]
        autograd.backward(losses_of(other, [mx.nd.ones((1, 1), ctx=device) for device in DEVICES]))
        trainer.step(1)
        for output in outputs:
            with autograd.record():
                label = soft.mean(axis=1) / soft.max(axis=1).mean()
                loss = (output**2).mean(axis=(1, 2, 3)) * label.as_in_context(output.context)
            loss.backward()
        mx.nd.waitall()


LOOPS = {
    "a loss for each device": lambda net, inputs: autograd.backward(losses_of(net, inputs)),
    "gradients of inputs": lambda net, inputs: [
        autograd.grad(loss, [x]) for loss, x in zip(losses_of(net, inputs), inputs)
    ],
    "gradients of predictions": lambda net, inputs: [
        saliency(net, inputs[0], train_mode=mode) for mode in (False, True)
    ],
    "threads": lambda net, inputs: list(POOL.map(lambda x: losses_of(net, [x])[0].backward(), inputs)),
}
POOL = ThreadPoolExecutor(2)


def saliency(net, x, **how):
    with autograd.record(train_mode=False):
        loss = net(x).sum()
    loss.backward(**how)


@pytest.mark.parametrize("what", list(LOOPS))
def test_a_step_is_closed_before_the_next_where_nobody_updates_weights(what, mode):
    net, _ = make(mode, layers=3)
    inputs = on_devices(SHARDS, learn=True)
    autograd.backward(losses_of(net, inputs))
    for _ in range(30 if what == "threads" else 3):
        LOOPS[what](net, inputs)
        assert steps.progress.is_balanced()


@pytest.mark.parametrize("what", ["one loss of all devices", "another net on one device"])
def test_a_step_is_closed_within_the_next(what, mode, monkeypatch):
    """Where one cannot tell before: a backward pass on cpu(0) may have reached layers there."""
    net, _ = make(mode, layers=2)
    other = initialized(nn.Dense(1, in_units=CHANNELS))
    inputs = on_devices(SHARDS, learn=True)
    if what == "one loss of all devices":
        freeze(net)
    closed = []
    monkeypatch.setattr("gluon_syncbn.mxnet_engine.cpu_resources.close_step", lambda: closed.append(1))
    for number in range(4):
        with autograd.record():
            losses = [(net(x) ** 2).sum() for x in inputs]
            if what == "one loss of all devices":
                losses = [losses[0] + losses[1].as_in_context(mx.cpu(0))]
        autograd.backward(losses)
        with autograd.record():
            loss = other(inputs[0]).sum()
        loss.backward()
        assert len(closed) > number


def test_a_layer_that_becomes_the_first_of_a_net_while_a_backward_pass_is_to_come(mode, caplog):
    """Each device has a thread, and accumulates the gradients of a net and of its last part; cpu(1) is late."""
    net, _ = make(mode, layers=2)
    called = threading.Event()

    def work(rank, x):
        for number in range(2):
            (loss,) = losses_of(net if number == 0 else net[1], [x])
            if number == 1:
                called.set() if rank == 0 else None
            elif rank == 1:
                assert called.wait(testing.HANG)
            loss.backward()

    for _ in range(3):
        called.clear()
        list(POOL.map(work, range(2), on_devices(SHARDS)))
        mx.nd.waitall()
    assert not caplog.messages
