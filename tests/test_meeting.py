"""Devices meet: the rendezvous of both back ends, a thread for each device, and several nets that keep apart."""

import contextlib
import random
import threading
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

import mxnet as mx
import numpy as np
import pytest
import testing
from gluoncv.utils.parallel import DataParallelModel
from meeting_points import KINDS, Portable
from mxnet import autograd
from reference import check_all
from testing import HANG, LONG, cpus, initialized, on_devices, run_python, shards_and_heads, step

from gluon_syncbn import SyncBatchNorm

THREADS = ThreadPoolExecutor(4)  # for all tests: in each thread MXNet leaves 88 MB

# The rendezvous: threads and vectors, no MXNet


@pytest.fixture(params=list(KINDS))
def rendezvous(request):
    with contextlib.ExitStack() as stack:
        yield lambda *arguments, **options: stack.enter_context(KINDS[request.param](*arguments, **options))


def test_the_sum_is_taken_in_rank_order_whoever_arrives_first(rendezvous):
    place = rendezvous(3)
    values = [[1e16], [1.0], [-1e16]]  # 1e16 + 1 = 1e16: another order gives another sum
    for last in range(3):
        first = [place.meet(rank, values[rank]) for rank in range(3) if rank != last]
        time.sleep(0.02)
        results = [place.meet(last, values[last])] + first
        assert {result.result(timeout=HANG)[1][0] for result in results} == {0.0}


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_everyone_gets_everything_and_rounds_with_random_delays_do_not_mix(rendezvous, ranks, seed):
    place = rendezvous(ranks)

    def work(rank):
        rng = random.Random(seed + rank)
        for number in range(1, 201):
            if rng.random() < 0.1:
                time.sleep(rng.random() * 2e-3)
            expected = (number, [sum(range(ranks)), ranks * number, ranks])
            assert place._meet(rank, np.array([rank, number, 1.0]), 0) == expected, seed

    with ThreadPoolExecutor(ranks) as pool:
        for future in [pool.submit(work, rank) for rank in range(ranks)]:
            future.result(timeout=HANG)


def test_rounds_of_different_keys_meet_in_any_order(rendezvous):
    place = rendezvous(2)
    early = [place.meet(0, [1.0], key=5), place.meet(1, [10.0], key=6)]
    late = [place.meet(0, [2.0], key=6), place.meet(1, [20.0], key=5)]
    assert [item.result(timeout=HANG)[1] for item in early + late] == [[21.0], [12.0], [12.0], [21.0]]


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_missing_rank_fails_everyone_who_waits_and_the_next_round_is_clean(rendezvous, ranks):
    place = rendezvous(ranks, timeout=0.3)
    started = time.perf_counter()
    texts = place.all([[1.0]] * (ranks - 1), first=1)
    assert time.perf_counter() - started > 0.25
    names = ", ".join(f"rank {rank}" for rank in range(1, ranks))
    expected = f"here waited 0.3 s for 1 of {ranks} devices. Arrived: {names}. Missing: rank 0."
    assert texts == [expected] * (ranks - 1)
    assert place.all([[1.0]] * ranks) == [(2, [float(ranks)])] * ranks


def test_the_deadline_is_that_of_the_first_arrival(rendezvous):
    place = rendezvous(3, timeout=6)
    first = place.meet(0, [0.0])
    time.sleep(3)  # seconds less than the timeout, however busy the machine
    started = time.monotonic()
    texts = [item.result(timeout=HANG) for item in (first, place.meet(1, [0.0]))]
    assert texts[0] == texts[1] and texts[0].startswith("here waited 6 s for 1 of 3 devices.")
    assert time.monotonic() - started < 5.9  # 3 s, or the whole timeout if it had one of its own


def test_a_rank_that_arrives_twice_fails_the_round(rendezvous):
    place = rendezvous(2)
    texts = [item.result(timeout=HANG) for item in (place.meet(1, [1.0]), place.meet(1, [1.0]))]
    assert texts[0] == texts[1]
    assert texts[0].startswith("here: rank 1 arrived twice before rank 0 arrived. Every device must run")
    assert place.all([[1.0], [2.0]]) == [(2, [3.0])] * 2


def test_vectors_of_different_lengths(rendezvous):
    place = rendezvous(2)
    texts = place.all([[1.0], [2.0, 3.0]])
    assert texts[0] == texts[1] and "vectors of different lengths (rank 0: 1, rank 1: 2)" in texts[0]
    assert [result[1] for result in place.all([[1.0], [2.0]])] == [[3.0], [3.0]]


def test_an_error_in_the_exchange_or_one_that_does_not_return_reaches_everyone():
    def broken(parts):
        raise OSError("no route")

    with Portable(2, exchange=broken) as place:
        assert place.all([[0.0]] * 2) == ["here: the exchange between devices failed: no route"] * 2
    release = threading.Event()
    with Portable(2, timeout=0.2, exchange=lambda parts: release.wait(HANG)) as place:
        meetings = [place.meet(rank, [0.0]) for rank in range(2)]
        wait(meetings, HANG, FIRST_COMPLETED)
        release.set()
        text = "here: all devices arrived, but the exchange between them did not return."
        assert [item.result(timeout=HANG) for item in meetings] == [text] * 2


# Nets and threads


class Halves(mx.gluon.HybridBlock):
    """Two layers, each for half of the 6 channels: each has a reference of its own."""

    def __init__(self, devices, mode):
        super().__init__(prefix="net_")
        with self.name_scope():
            self.first, self.second = (SyncBatchNorm(in_channels=3, timeout=60) for _ in range(2))
        initialized(self, devices, mode)
        for number, layer in enumerate((self.first, self.second)):
            testing.random_affine(layer, 3, seed=number)
        self.norms = {layer: testing.reference_of(layer) for layer in (self.first, self.second)}

    def hybrid_forward(self, F, x):
        one, other = F.split(x, num_outputs=2, axis=1)
        return F.concat(self.second(other), self.first(one), dim=1)

    def check(self, shards, heads, outputs, gradients=None):
        """What a step has given is what it must be; ``gradients`` of the inputs where they are known."""
        for number, (layer, norm) in enumerate(self.norms.items()):
            mine, back = slice(3 * number, 3 * number + 3), slice(3 - 3 * number, 6 - 3 * number)
            expected = norm.step([item[:, mine] for item in shards], [item[:, back] for item in heads])
            how = testing.precision(layer)
            check_all("output", [item.asnumpy()[:, back] for item in outputs], expected.outputs, **how)
            if gradients is not None:
                seen = [item.asnumpy()[:, mine] for item in gradients]
                check_all("input gradient", seen, expected.input_gradients, **how)
            testing.check_affine(layer, layer.gamma.list_ctx(), expected, units=how["units"])
            testing.check_running(layer, norm)


SHAPES = [(2, 6, 4, 4), (1, 6, 4, 4), (2, 6, 4, 4), (3, 6, 4, 4)]


def test_nets_with_the_same_names_and_on_different_devices_keep_apart(mode, backend):
    """Interleaved in every order; the devices do not even come to the two in the same one. A third is on 3 devices."""
    teacher, student, triple = Halves(2, mode), Halves(2, mode), Halves(3, mode)
    assert list(teacher.collect_params()) == list(student.collect_params())
    nets = (teacher, student)
    for seed in range(4):
        parts = {net: shards_and_heads(SHAPES[:2], seed=seed + 10 * number) for number, net in enumerate(nets)}
        inputs = {net: on_devices(parts[net][0], learn=True) for net in nets}
        outputs = {net: [None] * 2 for net in nets}
        with autograd.record():
            for net, rank in ((teacher, 0), (student, 0), (student, 1), (teacher, 1)):
                outputs[net][rank] = net(inputs[net][rank])
        heads = {net: on_devices(parts[net][1]) for net in nets}
        autograd.backward([*outputs[student], *outputs[teacher]], [*heads[student], *heads[teacher]])
        for net in nets:
            net.check(*parts[net], outputs[net], [item.grad for item in inputs[net]])
        shards, heads = shards_and_heads(SHAPES[:3], seed=seed)
        outputs, inputs = step(triple, shards, heads, cpus(3))
        triple.check(shards, heads, outputs, [item.grad for item in inputs])


def test_data_parallel_model(mode, backend):
    """One Python thread per device, as gluoncv's DataParallelModel runs a net."""
    net = Halves(2, mode)
    model = DataParallelModel(net, cpus(2), sync=True)
    for seed in range(2):  # each time new threads, in which MXNet leaves 88 MB
        shards, heads = shards_and_heads([SHAPES[0]] * 2, seed=seed)
        with autograd.record():
            # Splits the batch over the devices; returns a tuple for each.
            outputs = [item for (item,) in model(mx.nd.array(np.concatenate(shards)))]
        autograd.backward(outputs, on_devices(heads))
        net.check(shards, heads, outputs)


def test_a_first_call_from_several_threads(mode, backend):
    """Each with its own ``record()`` and ``backward()``; the shapes are known, so MXNet has no parameter to make."""
    for _ in range(5 if backend == "native" or mode == "hybridize" else 2):
        net, start = Halves(4, mode), threading.Barrier(4)
        for seed in range(2):  # a Trainer would keep them together in place of the barrier
            shards, heads = shards_and_heads(SHAPES, seed=seed)

            def work(rank, net=net, start=start, shards=shards, heads=heads):
                start.wait(HANG)
                try:
                    outputs, inputs = step(net, shards[rank:], heads[rank:], [mx.cpu(rank)])
                except Exception:
                    start.abort()  # nobody waits for this one
                    raise
                return outputs[0], inputs[0].grad

            outputs, gradients = zip(*THREADS.map(work, range(4)))
            net.check(shards, heads, outputs, gradients)


def layer_on_two_devices(monkeypatch, when_called):
    """``when_called()`` runs when MXNet's own backward pass has been called, and is yet to return to the package."""
    own = mx.nd.ndarray._LIB.MXAutogradBackwardEx

    def backward(*given):
        done = own(*given)
        when_called()
        return done

    monkeypatch.setattr(mx.nd.ndarray._LIB, "MXAutogradBackwardEx", backward)
    return initialized(SyncBatchNorm(in_channels=4, timeout=LONG), 2)


def test_a_backward_pass_that_waits_for_another_thread(monkeypatch, backend):
    """It returns when its work is done, which needs the other device's, whose thread calls ``backward()`` later."""
    waits = threading.Event()

    def when_called():
        if not waits.is_set():
            waits.set()
            layer.gamma.grad(mx.cpu(0)).wait_to_read()

    layer = layer_on_two_devices(monkeypatch, when_called)

    def work(rank):
        with autograd.record():
            y = layer(mx.nd.ones((2, 4, 5, 5), ctx=mx.cpu(rank)))
        assert rank == 0 or waits.wait(HANG)
        y.backward()

    list(THREADS.map(work, range(2)))


def test_backward_passes_that_overlap_are_all_counted(monkeypatch, caplog, backend):
    """The second is called, as by another thread, when the first has reached the layer and is yet to return."""
    waiting = []

    def when_called():
        if waiting:
            waiting.pop().backward()

    layer = layer_on_two_devices(monkeypatch, when_called)
    for _ in range(2):
        with autograd.record():
            first, second = ([layer(mx.nd.ones((2, 4, 5, 5), ctx=device)) for device in cpus(2)] for _ in range(2))
        waiting.append(second[0])
        first[0].backward(retain_graph=True)
        first[1].backward(retain_graph=True)
        second[1].backward()
    mx.nd.waitall()
    assert not caplog.messages


# Four threads with a device each, which take turns in Python all the time.
OFTEN = """
import random, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from testing import *

sys.setswitchinterval(1e-5)
own = mx.Context.__hash__

def slow(context):  # where counts are looked up: another thread may run a whole step meanwhile
    if random.random() < 0.02:
        time.sleep(0.005)
    return own(context)

mx.Context.__hash__ = slow

def work(rank):
    x = mx.nd.ones((2, 4, 5, 5), ctx=mx.cpu(rank))
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

threads = ThreadPoolExecutor(4)
for _ in range(80):
    kinds = lambda: nn.Conv2D(4, 1, in_channels=4), lambda: SyncBatchNorm(in_channels=4, timeout=60)
    net = initialized(sequential(*kinds * 3), 4, "hybridize")
    start = threading.Barrier(4)
    list(threads.map(work, range(4)))
print("RIGHT")
"""


def test_what_threads_ask_and_note_is_not_lost_where_they_change():
    """Shapes that MXNet reads while another thread asks for some; backward passes that are counted at a time."""
    done = run_python(OFTEN)
    assert done.stdout == "RIGHT\n" and "abandoned" not in done.stderr, done.stdout + done.stderr
