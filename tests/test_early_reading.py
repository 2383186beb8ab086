"""A result that is read before all devices have been called: an error at once where nobody else could call them."""

import itertools

import pytest
from testing import MODES, run_python

PROGRAM = """
import concurrent.futures, threading, time
import mxnet as mx, numpy as np, pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn
import gluon_syncbn

MODE, LONG = {mode!r}, 900


def build(count=2):
    net = nn.HybridSequential()
    with net.name_scope():
        net.add(nn.Dense(6, flatten=False), gluon_syncbn.SyncBatchNorm(axis=-1, timeout=LONG), nn.Dense(2))
    net.initialize(ctx=[mx.cpu(i) for i in range(count)])
    if MODE is not None:
        net.hybridize(**MODE)
    return net


def parts(count=2):
    found = [mx.nd.random.normal(shape=(3, 5), ctx=mx.cpu(i)) for i in range(count)]
    mx.nd.waitall()
    return found


def right_step(net, inputs, between=lambda: None):
    with autograd.record():
        outputs = []
        for x in inputs:
            outputs.append((net(x) ** 2).sum())
            between()
    autograd.backward(outputs)
    mx.nd.waitall()
    means = [net[1].running_mean.data(x.context).asnumpy() for x in inputs]
    assert all((item == means[0]).all() for item in means)


def refused(action, *words):
    "It ends long before the timeout, with a short text; the next step is right."
    started = time.perf_counter()
    with pytest.raises(gluon_syncbn.SyncBatchNormError) as error:
        action()
    assert time.perf_counter() - started < 20
    text = str(error.value).split("Stack trace")[0]
    for word in ("waited only ", "because a result of ", "and then read", *words):
        assert word in text, text
    assert "Usual reasons" not in text and text.count("abandon_step") == 1
    gluon_syncbn.abandon_step()
"""

REFUSED = """
net, inputs = build(), parts()
right_step(net, inputs)

def loop(read):
    for x in inputs:
        with autograd.record():
            loss = (net(x) ** 2).sum()
        loss.backward()
        read(loss)

forward = "a result of cpu(0) is read before the net has been called on cpu(1). Call it on all devices, outputs = ["
for read in (lambda x: x.asscalar(), lambda x: x.wait_to_read(), lambda x: mx.nd.waitall(), print):
    refused(lambda: loop(read), forward)
    right_step(net, inputs)

def one_backward():
    with autograd.record():
        losses = [(net(x) ** 2).sum() for x in inputs]
    losses[0].backward()
    net[0].weight.grad(mx.cpu(0)).asnumpy()

words = "backward pass waited only ", "before backward() has been called for cpu(1)", "autograd.backward(losses)"
refused(one_backward, *words)
right_step(net, inputs)

def move():  # it copies the statistics, which the waiting call writes
    with autograd.record():
        net(inputs[0])
        net.collect_params().reset_ctx([mx.cpu(1), mx.cpu(0)])
statistics = [item.asnumpy() for item in net[1].running_mean.list_data()]
refused(move, forward)
net.collect_params().reset_ctx([mx.cpu(0), mx.cpu(1)])
for item, before in zip(net[1].running_mean.list_data(), statistics):
    assert (item.asnumpy() == before).all()
right_step(net, inputs)

# In the first step of a net, and of three devices.
net, inputs = build(3), parts(3)
net(inputs[0])
def two():
    with autograd.record():
        outputs = [net(x) for x in inputs[:2]]
        outputs[1].asnumpy()
refused(two, "a result of cpu(0), cpu(1) is read before the net has been called on cpu(2)")
right_step(net, inputs)

# A DataLoader's processes, and a progress bar, call nothing.
from tqdm import tqdm
data = gluon.data.DataLoader(gluon.data.ArrayDataset(np.ones((60, 5), "float32")), 6, num_workers=2)
def train():
    for batch in tqdm(data):
        for x in gluon.utils.split_and_load(batch, [mx.cpu(i) for i in range(3)]):
            with autograd.record():
                net(x).asnumpy()
refused(train, "the net has been called on cpu(1), cpu(2)")
print("RIGHT")
"""

WAITED_FOR = """
net, inputs = build(), parts()
right_step(net, inputs)

# The thread of another device comes late, also in the first step of a net; and one of a pool.
def device(net, i, late, barrier):
    time.sleep(late)
    with autograd.record():
        loss = (net(inputs[i]) ** 2).sum()
    loss.asscalar()
    barrier.wait()
    loss.backward()
    mx.nd.waitall()

for some in (net, build()):
    some(inputs[0])
    barrier = threading.Barrier(2)
    threads = [threading.Thread(target=device, args=(some, i, 2 * i, barrier)) for i in range(2)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    right_step(some, inputs)
barrier = threading.Barrier(2)
with concurrent.futures.ThreadPoolExecutor(1) as pool:
    other = pool.submit(device, net, 1, 2, barrier)
    device(net, 0, 0, barrier)
    other.result()
right_step(net, inputs)

# The main thread reads much that another net computes, or little that is there, between two devices.
def teach():
    x = mx.nd.ones((600, 600))
    started = time.perf_counter()
    while time.perf_counter() - started < 2:
        y = x
        for _ in range(100):
            y = mx.nd.dot(y, x) * 1e-3
        y.asnumpy()
right_step(net, inputs, teach)
right_step(net, inputs, lambda: inputs[0].asnumpy())

# A slow device: its input takes long, and no processor.
class Sleep(mx.operator.CustomOp):
    def forward(self, is_train, req, in_data, out_data, aux):
        time.sleep(2)
        self.assign(out_data[0], req[0], in_data[0])

    def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
        self.assign(in_grad[0], req[0], out_grad[0])

@mx.operator.register("sleep_here")
class SleepProp(mx.operator.CustomOpProp):
    def create_operator(self, ctx, shapes, dtypes):
        return Sleep()

with autograd.record():
    outputs = [net(inputs[0]), net(mx.nd.Custom(inputs[1], op_type="sleep_here"))]
    first = outputs[0].asnumpy()
autograd.backward(outputs)
mx.nd.waitall()

# An operator that waits for something, and is read between two devices.
right_step(net, inputs, lambda: mx.nd.Custom(inputs[0], op_type="sleep_here").asnumpy())

# A thread that Python's own list does not have.
import _thread
done, answers = threading.Event(), []
def other():
    time.sleep(1.5)
    answers.append(net(inputs[1]))
    done.set()
with autograd.train_mode():
    first = net(inputs[0])
    def raw():
        with autograd.train_mode():
            other()
    _thread.start_new_thread(raw, ())
    first.asnumpy()
done.wait()
mx.nd.waitall()

# A prediction whose gradient was asked for, on one device, before.
with autograd.record(train_mode=False):
    score = net(inputs[0]).sum()
score.backward(train_mode=False)
mx.nd.waitall()
other_net = build()
right_step(other_net, inputs)
with autograd.record():
    slow = mx.nd.Custom(inputs[1], op_type="sleep_here")
    losses = [(other_net(x) ** 2).sum() for x in (inputs[0], slow)]
    losses[0].asscalar()
autograd.backward(losses)
mx.nd.waitall()

# Generators, whose devices take turns; and some of the devices only.
def one(x):
    with autograd.record():
        loss = (net(x) ** 2).sum()
    yield
    yield loss.asscalar()
    loss.backward()
running = [one(x) for x in inputs]
[next(item) for item in running]
assert len([next(item) for item in running]) == 2
[list(item) for item in running]
right_step(net, inputs)
with gluon_syncbn.devices(mx.cpu(0)):
    with autograd.record():
        loss = net(inputs[0]).sum()
    time.sleep(1)
    loss.asscalar()
    loss.backward()
right_step(net, inputs)
print("RIGHT")
"""


SHORT = [
    *(("REFUSED", *how) for how in (("imperative", "native"), ("static", "portable"))),
    *(("WAITED_FOR", *how) for how in (("hybridize", "native"), ("imperative", "portable"))),
]
ALL = itertools.product(("REFUSED", "WAITED_FOR"), MODES, ("native", "portable"))


@pytest.mark.parametrize(
    "what, mode, backend", [pytest.param(*case, marks=[] if case in SHORT else [pytest.mark.long]) for case in ALL]
)
def test_a_result_that_is_read_too_early(what, mode, backend):
    code = PROGRAM.format(mode=MODES[mode]) + {"REFUSED": REFUSED, "WAITED_FOR": WAITED_FOR}[what]
    assert "RIGHT\n" in run_python(code, GLUON_SYNCBN_BACKEND=backend).stdout
