"""The reduction in pairs alone: threads in place of processes."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from harness import HANG

from gluon_syncbn.distributed.process_group import MissingProcesses
from gluon_syncbn.meeting.pairs import reduce_in_pairs
from gluon_syncbn.meeting.statistics import Moments, add_ranks, merge


class Place:
    """Where two meet: a mailbox by key and pair. Whoever waits alone for so long has waited in vain."""

    def __init__(self, members, seconds=HANG):
        self._members, self._seconds = members, seconds
        self._changed = threading.Condition()
        self._boxes = {}
        self.meetings = 0

    def meet(self, rank, key, vector, partner):
        pair = tuple(sorted((rank, partner), key=self._members.index))
        with self._changed:
            self.meetings += 1
            box = self._boxes.setdefault((key, pair), {})
            assert rank not in box
            box[rank] = vector
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: len(box) == 2, self._seconds):
                raise MissingProcesses(self._seconds)
            return np.stack([box[item] for item in pair])


def reduce_all(vectors, members, combine, absent=None):
    """What comes out for each member, or the error that it has."""
    place = Place(members, HANG if absent is None else 0.3)

    def work(rank):
        def meet(key, vector, partner):
            return place.meet(rank, key, vector, partner)

        try:
            return reduce_in_pairs(vectors[rank], rank, members, combine, meet)
        except MissingProcesses as problem:
            return problem

    present = [rank for rank in members if rank != absent]
    with ThreadPoolExecutor(len(members)) as pool:
        return dict(zip(present, pool.map(work, present))), place.meetings


@pytest.mark.parametrize("size", [*range(1, 18), 31, 32, 33])
def test_all_have_the_same_bits_of_what_all_brought(size):
    rng = np.random.RandomState(size)
    members = [int(rank) for rank in rng.permutation(2 * size)[:size]]
    parts = [rng.standard_normal((int(rng.randint(1, 9)), 5)) * 3 + 100 for _ in members]
    vectors = {
        rank: Moments(len(part), part.mean(0), ((part - part.mean(0)) ** 2).sum(0)).pack()
        for rank, part in zip(members, parts)
    }
    results, meetings = reduce_all(vectors, members, lambda rows: merge(rows).pack())
    whole = np.concatenate(parts)
    expected = [len(whole), *whole.mean(0), *((whole - whole.mean(0)) ** 2).sum(0)]
    for result in results.values():
        np.testing.assert_array_equal(result, results[members[0]])
        np.testing.assert_allclose(result, expected, rtol=1e-12)
    assert meetings <= size * (np.ceil(np.log2(size)) + 2)
    assert not any(isinstance(result, Exception) for result in results.values())
    sums, _ = reduce_all(vectors, members, add_ranks)
    np.testing.assert_allclose(sums[members[-1]], sum(vectors.values()), rtol=1e-12)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8, 13])
def test_errors_suspect_who_is_absent_and_nobody_who_is_known_to_have_come(size):
    members = list(range(10, 10 + size))
    vectors = {rank: np.ones(3) for rank in members}
    for absent in members[:: max(1, size // 4)]:
        results, _ = reduce_all(vectors, members, add_ranks, absent)
        for rank, problem in results.items():
            assert isinstance(problem, MissingProcesses), f"{rank} went on without {absent}"
            assert absent in problem.suspects and absent not in problem.arrived
            assert rank in problem.arrived and not set(problem.arrived) & set(problem.suspects)
        assert [absent] in [list(problem.suspects) for problem in results.values()]
