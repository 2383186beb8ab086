"""One Python thread per device, as gluoncv's DataParallelModel runs a net."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import mxnet as mx
import numpy as np
import oracle
import pytest
from gluoncv.utils.parallel import DataParallelModel
from harness import MODES, cpus, random_shards, run_python, set_mode
from mxnet import autograd
from mxnet.gluon import nn

from gluon_syncbn import SyncBatchNorm
from gluon_syncbn.meeting.positions import Nets
from gluon_syncbn.step import steps
from gluon_syncbn.step.recording import counting_backward

pytestmark = pytest.mark.usefixtures("backend")
THREADS = ThreadPoolExecutor(4)  # for all tests: in each thread MXNet leaves 88 MB


@pytest.mark.parametrize("mode", list(MODES))
def test_data_parallel_model(mode):
    devices, shapes = cpus(2), [(2, 4, 5, 5)] * 2
    net = nn.HybridSequential()
    for _ in range(3):
        net.add(SyncBatchNorm(in_channels=4, timeout=30))
    net.initialize(ctx=devices)
    set_mode(net, mode)
    model = DataParallelModel(net, devices, sync=True)
    expected_mean = np.zeros(4)
    for seed in range(2):  # each time new threads, in which MXNet leaves 88 MB
        shards = random_shards(shapes, seed=seed)
        with autograd.record():
            # Splits the batch over the devices; returns a tuple for each.
            outputs = [item for (item,) in model(mx.nd.array(np.concatenate(shards)))]
        autograd.backward(outputs)
        mx.nd.waitall()
        first = oracle.batch_norm(shards, np.ones(4), np.zeros(4))
        second = oracle.batch_norm(first.outputs, np.ones(4), np.zeros(4))
        third = oracle.batch_norm(second.outputs, np.ones(4), np.zeros(4))
        assert oracle.distance([item.asnumpy() for item in outputs], third.outputs) < 1e-5
        expected_mean = 0.9 * expected_mean + 0.1 * first.mean
        for device in devices:
            assert oracle.distance([net[0].running_mean.data(device).asnumpy()], [expected_mean]) < 1e-5


@pytest.mark.portable_with(mode="hybridize")
@pytest.mark.parametrize("mode", list(MODES))
def test_a_first_call_from_several_threads(mode):
    """Each with its own ``record()`` and ``backward()``; the shapes are known, so MXNet has no parameter to make."""
    devices = cpus(4)
    for _ in range(5):
        net = nn.HybridSequential()
        for _ in range(3):
            net.add(nn.Conv2D(4, 1, in_channels=4), SyncBatchNorm(in_channels=4, timeout=30))
        net.initialize(ctx=devices)
        set_mode(net, mode)
        shards = random_shards([(2, 4, 5, 5)] * 4)
        results, start = {}, threading.Barrier(4)

        def work(rank, net=net, results=results, start=start, shards=shards):
            x = mx.nd.array(shards[rank], ctx=devices[rank])
            try:
                for _ in range(2):  # a Trainer would keep them together in its place
                    start.wait()
                    with autograd.record():
                        y = net(x)
                    y.backward()
                results[rank] = y.asnumpy()
            except Exception as error:
                results[rank] = error
                start.abort()  # nobody waits for this one

        list(THREADS.map(work, range(4)))
        mx.nd.waitall()
        assert all(isinstance(result, np.ndarray) for result in results.values()), results
        parts = shards
        for conv in net[::2]:
            weight = conv.weight.data(devices[0]).asnumpy()[:, :, 0, 0]
            parts = [np.einsum("oc,nchw->nohw", weight, part) for part in parts]
            parts = oracle.batch_norm(parts, np.ones(4), np.zeros(4)).outputs
        assert oracle.distance([results[rank] for rank in range(4)], parts) < 1e-4


def test_a_backward_pass_that_waits_for_another_thread():
    """It returns when its work is done, which needs the other device's, whose thread calls ``backward()`` later."""
    devices = cpus(2)
    layer = SyncBatchNorm(in_channels=4, timeout=30)
    layer.initialize(ctx=devices)
    waits = threading.Event()

    started, took = [], {}

    def work(rank):
        with autograd.record():
            y = layer(mx.nd.ones((2, 4, 5, 5), ctx=devices[rank]))
        began = time.monotonic()
        if rank == 0:
            original = mx.nd.NDArray.backward.__wrapped__

            def slow(*args, **kwargs):  # MXNet's own, and it waits for what it has started
                done = original(*args, **kwargs)
                waits.set()
                layer.gamma.grad(devices[0]).wait_to_read()
                return done

            counting_backward(slow)(y)
        else:
            assert waits.wait(30)
            y.backward()
        started.append(rank)
        took[rank] = time.monotonic() - began

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(started) == [0, 1] and max(took.values()) < 20, took


def test_backward_passes_that_overlap_are_all_counted(caplog):
    """The second is called, as by another thread, when the first has reached the layer and is yet to return."""
    layer = SyncBatchNorm(in_channels=4, timeout=30)
    layer.initialize(ctx=cpus(2))
    for _ in range(2):
        with autograd.record():
            first, second = ([layer(mx.nd.ones((2, 4, 5, 5), ctx=device)) for device in cpus(2)] for _ in range(2))

        def overlapped(head, other=second[0]):
            mx.nd.NDArray.backward.__wrapped__(head, retain_graph=True)
            other.backward()

        counting_backward(overlapped)(first[0])
        first[1].backward(retain_graph=True)
        second[1].backward()
    mx.nd.waitall()
    assert not caplog.messages


def test_a_device_that_finishes_a_step_before_another_has_begun_it(monkeypatch):
    """Between the two looks of the other at what has been counted, which is too short a time to wait for."""
    layer = SyncBatchNorm(in_channels=4)
    layer.initialize(ctx=cpus(2))
    passes, look = layer._sync.passes, steps._is_even
    for device in cpus(2):
        passes.begin_forward(device)
    for device in cpus(2):
        passes.end_backward(device)

    def overtaken(*counts):
        is_even = look(*counts)
        passes.begin_forward(mx.cpu(1))
        passes.end_backward(mx.cpu(1))
        return is_even

    monkeypatch.setattr(steps, "_is_even", overtaken)
    assert not passes.is_unfinished()
    monkeypatch.undo()
    passes.begin_forward(mx.cpu(0))
    assert passes.is_unfinished()


# Four threads with a device each, which take turns in Python all the time.
OFTEN = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
import gluon_syncbn, mxnet as mx
from mxnet import autograd
from mxnet.gluon import nn

sys.setswitchinterval(1e-5)
devices = [mx.cpu(number) for number in range(4)]

def work(rank):
    x = mx.nd.ones((2, 4, 5, 5), ctx=devices[rank])
    try:
        for _ in range(2):
            start.wait()
            with autograd.record():
                y = net(x)
            y.backward()
        y.wait_to_read()
    except Exception:
        start.abort()
        raise

with ThreadPoolExecutor(4) as pool:
    for _ in range(80):
        net = nn.HybridSequential()
        for _ in range(3):
            net.add(nn.Conv2D(4, 1, in_channels=4), gluon_syncbn.SyncBatchNorm(in_channels=4, timeout=60))
        net.initialize(ctx=devices)
        net.hybridize()
        start = threading.Barrier(4)
        list(pool.map(work, range(4)))
print("RIGHT")
"""


def test_what_threads_ask_and_note_is_not_lost_where_they_change():
    """Shapes that MXNet reads while another thread asks for some; backward passes that are counted at a time."""
    done = run_python(OFTEN)
    assert done.stdout == "RIGHT\n" and "given up" not in done.stderr, done.stdout + done.stderr


def test_threads_that_first_train_a_net_at_a_time_give_it_one_number():
    """Asked of the table itself, as the time between two looks at it is short elsewhere."""
    nets, first, second = Nets(), SyncBatchNorm(in_channels=4), SyncBatchNorm(in_channels=4)

    def slow(block):
        time.sleep(0.05)
        return "a layer"

    one, other = THREADS.map(lambda _: nets.place_of(first, slow), range(2))
    assert one is other and one.net == "net0"
    assert nets.place_of(second, slow).net == "net1"
