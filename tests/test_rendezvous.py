"""The rendezvous alone: threads and vectors, no MXNet."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from harness import HANG, LONG

from gluon_syncbn.backends.portable.rendezvous import Rendezvous
from gluon_syncbn.base.errors import SyncBatchNormError


def stacked(contributions):
    return np.stack(contributions)


def make(size, timeout=float(LONG), exchange=stacked):
    return Rendezvous("layer 'a': forward pass", [f"cpu({i})" for i in range(size)], timeout, exchange)


def all_meet(rendezvous, size, contribution=lambda rank: np.array([rank]), key=0, ranks=None):
    """The outcome per rank: a RoundResult or the error."""

    def meet(rank):
        try:
            return rendezvous.all_reduce(rank, contribution(rank), key)
        except SyncBatchNormError as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(meet, rank) for rank in (range(size) if ranks is None else ranks)]
        return [future.result(timeout=HANG) for future in futures]


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_everyone_takes_home_the_same_result_in_rank_order(size):
    rendezvous = make(size)
    for number in range(1, 4):
        meetings = all_meet(rendezvous, size)
        assert [meeting.round_id for meeting in meetings] == [number] * size
        for meeting in meetings:
            np.testing.assert_array_equal(meeting.result.ravel(), np.arange(size))


def test_many_rounds_with_random_delays_do_not_mix():
    size, rounds = 4, 300
    rendezvous = make(size)

    def work(rank):
        rng = random.Random(rank)
        for number in range(1, rounds + 1):
            if rng.random() < 0.1:
                time.sleep(rng.random() * 2e-3)
            meeting = rendezvous.all_reduce(rank, np.array([rank + 100 * number]))
            assert meeting.round_id == number
            np.testing.assert_array_equal(meeting.result.ravel(), np.arange(size) + 100 * number)

    with ThreadPoolExecutor(size) as pool:
        for future in [pool.submit(work, rank) for rank in range(size)]:
            future.result(timeout=HANG)
    assert not rendezvous._rounds


def test_rounds_of_different_keys_meet_in_any_order():
    rendezvous = make(2)
    orders = [[1, 2, 3, 4], [4, 2, 1, 3]]

    def work(rank):
        with ThreadPoolExecutor(4) as pool:  # as MXNet runs the callbacks of one device
            futures = {key: pool.submit(rendezvous.all_reduce, rank, np.array([key]), key) for key in orders[rank]}
            return {key: future.result(timeout=HANG).result for key, future in futures.items()}

    with ThreadPoolExecutor(2) as pool:
        for results in pool.map(work, range(2)):
            for key, result in results.items():
                np.testing.assert_array_equal(result, [[key], [key]])


def test_a_missing_rank_fails_everyone_who_waits_and_the_next_round_is_clean():
    rendezvous = make(3, timeout=0.3)
    started = time.monotonic()
    outcomes = all_meet(rendezvous, 3, ranks=[0, 2])
    assert time.monotonic() - started > 0.25
    texts = {str(outcome) for outcome in outcomes}
    assert texts == {
        "layer 'a': forward pass waited 0.3 s for 1 of 3 devices. Arrived: cpu(0), cpu(2). Missing: cpu(1)."
    }
    assert [meeting.result.tolist() for meeting in all_meet(rendezvous, 3)] == [[[0], [1], [2]]] * 3


def test_the_deadline_is_that_of_the_first_arrival():
    rendezvous = make(3, timeout=3)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(rendezvous.all_reduce, 0, np.zeros(1))
        time.sleep(2.5)
        started = time.monotonic()
        second = pool.submit(rendezvous.all_reduce, 1, np.zeros(1))
        for future in (first, second):
            with pytest.raises(SyncBatchNormError):
                future.result(timeout=HANG)
        assert time.monotonic() - started < 2.9  # half a second, or the whole timeout if it had one of its own


def test_a_rank_that_arrives_twice_fails_the_round():
    rendezvous = make(2)
    outcomes = all_meet(rendezvous, 2, ranks=[0, 0])
    (text,) = {str(outcome) for outcome in outcomes}
    assert text.startswith("layer 'a': forward pass: cpu(0) arrived twice before cpu(1) arrived. Every device must run")
    assert all(outcome.round_id == 2 for outcome in all_meet(rendezvous, 2))


def test_vectors_of_different_lengths():
    outcomes = all_meet(make(2), 2, contribution=lambda rank: np.zeros(rank + 1))
    assert all("vectors of different lengths (cpu(0): 1, cpu(1): 2)" in str(outcome) for outcome in outcomes)


def test_an_error_in_the_exchange_reaches_everyone():
    def broken(contributions):
        raise OSError("no route")

    outcomes = all_meet(make(3, exchange=broken), 3)
    assert {str(outcome) for outcome in outcomes} == {
        "layer 'a': forward pass: the exchange between devices failed: no route"
    }


def test_an_exchange_that_does_not_return_releases_the_others():
    release = threading.Event()

    def stuck(contributions):
        release.wait(HANG)
        return np.stack(contributions)

    rendezvous = make(2, timeout=0.2, exchange=stuck)
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(rendezvous.all_reduce, rank, np.zeros(1)) for rank in range(2)]
        try:
            deadline = time.monotonic() + HANG
            while not any(future.done() for future in futures) and time.monotonic() < deadline:
                time.sleep(0.01)
        finally:
            release.set()
        for future in futures:
            with pytest.raises(SyncBatchNormError, match="the exchange between them did not return"):
                future.result(timeout=HANG)
