"""One contract for the rendezvous of both back ends: threads and vectors, no MXNet."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from harness import HANG
from meeting_points import KINDS

from gluon_syncbn.backends.portable.rendezvous import Rendezvous
from gluon_syncbn.base.errors import SyncBatchNormError


@pytest.fixture(params=list(KINDS))
def rendezvous(request):
    made = []

    def make(*arguments, **options):
        made.append(KINDS[request.param](*arguments, **options))
        return made[-1]

    yield make
    for item in made:
        item.close()


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_everyone_gets_everything(rendezvous, ranks):
    place = rendezvous(ranks)
    for number in range(1, 50):
        values = [[rank, number, 1.0] for rank in range(ranks)]
        expected = (number, [sum(range(ranks)), ranks * number, ranks])
        assert place.all(values) == [expected] * ranks


def test_the_sum_is_taken_in_rank_order_whoever_arrives_first(rendezvous):
    place = rendezvous(3)
    values = [[1e16], [1.0], [-1e16]]  # 1e16 + 1 = 1e16: another order gives another sum
    for last in range(3):
        first = [place.meet(rank, values[rank]) for rank in range(3) if rank != last]
        time.sleep(0.02)
        results = [place.meet(last, values[last])] + first
        assert {result.result(timeout=HANG)[1][0] for result in results} == {0.0}


def test_many_rounds_with_random_delays_do_not_mix(rendezvous):
    ranks, rounds = 4, 300
    place = rendezvous(ranks)

    def work(rank):
        rng = random.Random(rank)
        for number in range(1, rounds + 1):
            if rng.random() < 0.1:
                time.sleep(rng.random() * 2e-3)
            assert place._meet(rank, np.array([rank + 100.0 * number]), 0) == (number, [6.0 + 400 * number])

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
    texts = [item.result(timeout=HANG) for item in [place.meet(rank, [1.0]) for rank in range(1, ranks)]]
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


# The portable one reduces what the ranks bring, through a KVStore perhaps.


def exchanging(exchange, timeout):
    place = Rendezvous("layer 'a': forward pass", ["cpu(0)", "cpu(1)"], timeout, exchange)
    pool = ThreadPoolExecutor(2)
    return [pool.submit(place.all_reduce, rank, np.zeros(1)) for rank in range(2)]


def test_an_error_in_the_exchange_reaches_everyone():
    def broken(contributions):
        raise OSError("no route")

    for future in exchanging(broken, timeout=60.0):
        with pytest.raises(
            SyncBatchNormError, match="^layer 'a': forward pass: the exchange between devices failed: no route$"
        ):
            future.result(timeout=HANG)


def test_an_exchange_that_does_not_return_releases_the_others():
    release = threading.Event()

    def stuck(contributions):
        release.wait(HANG)
        return np.stack(contributions)

    futures = exchanging(stuck, timeout=0.2)
    try:
        deadline = time.monotonic() + HANG
        while not any(future.done() for future in futures) and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        release.set()
    for future in futures:
        with pytest.raises(SyncBatchNormError, match="the exchange between them did not return"):
            future.result(timeout=HANG)
