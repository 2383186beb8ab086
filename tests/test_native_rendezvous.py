"""The compiled rendezvous alone: what a rank gets, and what it is told when another one fails it."""

import ctypes
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from harness import HANG, LONG
from standalone import library


class Rendezvous:
    def __init__(self, ranks, timeout=float(LONG)):
        new, self._meet = library().gluon_syncbn_rendezvous_new, library().gluon_syncbn_rendezvous_meet
        new.restype, self._meet.restype = ctypes.c_void_p, ctypes.c_int64
        self.ranks = ranks
        self._handle = ctypes.c_void_p(new(b"here", ranks, ctypes.c_double(timeout)))
        self._threads = ThreadPoolExecutor(ranks + 1)

    def meet(self, rank, values, key=0):
        """In a thread: (number of the round, sum over ranks), or the text of the error."""

        def run():
            total, error = np.array(values, np.float64), ctypes.create_string_buffer(1000)
            address = total.ctypes.data_as(ctypes.c_void_p)
            size, place = ctypes.c_int64(total.size), ctypes.c_int64(key)
            number = self._meet(self._handle, rank, address, size, place, error, ctypes.c_int64(1000))
            return (number, total.tolist()) if number else error.value.decode()

        return self._threads.submit(run)

    def all(self, values, key=0):
        meetings = [self.meet(rank, values[rank], key) for rank in range(self.ranks)]
        return [item.result(timeout=HANG) for item in meetings]


@pytest.fixture
def rendezvous():
    made = []

    def make(*arguments, **options):
        made.append(Rendezvous(*arguments, **options))
        return made[-1]

    yield make
    for item in made:
        item._threads.shutdown()
        library().gluon_syncbn_rendezvous_free(item._handle)


@pytest.mark.parametrize("ranks", [1, 2, 8])
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


def test_keys_are_met_in_any_order(rendezvous):
    place = rendezvous(2)
    early = [place.meet(0, [1.0], key=5), place.meet(1, [10.0], key=6)]
    late = [place.meet(0, [2.0], key=6), place.meet(1, [20.0], key=5)]
    assert [item.result(timeout=HANG)[1] for item in early + late] == [[21.0], [12.0], [12.0], [21.0]]


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_missing_rank(rendezvous, ranks):
    place = rendezvous(ranks, timeout=0.3)
    started = time.perf_counter()
    texts = [item.result(timeout=HANG) for item in [place.meet(rank, [1.0]) for rank in range(1, ranks)]]
    assert time.perf_counter() - started > 0.25
    names = ", ".join(f"rank {rank}" for rank in range(1, ranks))
    expected = f"here waited 0.3 s for 1 of {ranks} devices. Arrived: {names}. Missing: rank 0. "
    assert texts == [expected] * (ranks - 1)
    assert place.all([[1.0]] * ranks) == [(2, [float(ranks)])] * ranks


def test_a_rank_that_arrives_twice(rendezvous):
    place = rendezvous(2)
    texts = [item.result(timeout=HANG) for item in (place.meet(1, [1.0]), place.meet(1, [1.0]))]
    assert texts[0] == texts[1]
    assert texts[0].startswith("here: rank 1 arrived twice before rank 0 arrived. Every device must run")
    assert [result[1] for result in place.all([[1.0], [2.0]])] == [[3.0], [3.0]]


def test_vectors_of_different_lengths(rendezvous):
    place = rendezvous(2)
    text = "here: the devices brought vectors of different lengths (rank 0: 1, rank 1: 2)."
    assert place.all([[1.0], [2.0, 3.0]]) == [text] * 2
    assert [result[1] for result in place.all([[1.0], [2.0]])] == [[3.0], [3.0]]
