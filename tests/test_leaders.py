"""Hosts exchange by leaders: what comes late, in another order, or not at all. The processes are in one here."""

import socket
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from gluon_syncbn.distributed.process_group import ExchangeError, ProcessGroup
from gluon_syncbn.meeting.processes import processes_of

VECTOR, ABANDONED, LEFT, BUNDLE, CAME = range(5)
PATIENCE, TIMEOUT = 30.0, 6.0


class Member(ProcessGroup):
    """A process of a `Job`. Messages outside of hosts are lists of Python's."""

    name = "here"
    can_resume = True

    def __init__(self, job, rank, size):
        self.job, self.rank, self.size = job, rank, size
        self.arriving = []
        self._begin()

    def _pause(self):
        return 1e-3

    _is_busy = False

    def _send(self, message):
        self.job.carry(self.rank, message)

    def _take_in(self):
        while self.arriving:
            rank, message = self.arriving.pop(0)
            self._receive(rank, message.kind, message.key, message.round_id, message.numbers)


class Asked(Member):
    """Messages do not show who has come, as with Horovod; it says that all have."""

    can_resume = False

    def _find_out_who_came(self, message):
        self._hear_who_came(message, range(self.size))


class Job:
    """Processes on hosts with these names, which have met. ``held`` has the kinds that a rank sends in vain."""

    def __init__(self, hosts, monkeypatch, kind):
        here = threading.local()
        monkeypatch.setattr(socket, "gethostname", lambda: here.name)
        self.sent, self.held, self.kept = Counter(), set(), []
        self.members = [kind(self, rank, len(hosts)) for rank in range(len(hosts))]

        def meet(member):
            here.name = f"host{hosts[member.rank]}"
            with processes_of(member).together("here", PATIENCE):
                pass

        self.pool = ThreadPoolExecutor(len(hosts))
        list(self.pool.map(meet, self.members))
        self.sent.clear()

    def carry(self, rank, message):
        self.sent[message.kind] += len(message.ranks)
        if (rank, message.kind) in self.held:
            self.kept.append((rank, message))
            return
        for to in message.ranks:
            self.members[to].arriving.append((rank, message))

    def let_go(self):
        self.held.clear()
        for rank, message in self.kept:
            self.carry(rank, message)

    def exchange(self, ranks=None, numbers=5, seconds=TIMEOUT):
        """The futures of what these bring, which is their rank, by rank."""
        some = [member for member in self.members if ranks is None or member.rank in ranks]
        bring = lambda one: one.all_gather("rows", np.full(numbers, float(one.rank)), "it", seconds)  # noqa: E731
        return {member.rank: self.pool.submit(bring, member) for member in some}


@pytest.fixture
def job_on(monkeypatch):
    return lambda hosts, kind=Member: Job(hosts.split(), monkeypatch, kind)


def error_of(future):
    with pytest.raises(ExchangeError) as caught:
        future.result(PATIENCE)
    return str(caught.value)


@pytest.mark.parametrize(
    "hosts, bundles", [("0 0 1 1", 2), ("0 1 0 1 1", 2), ("0 1 2 1", 6), ("2 2 1 0 0 0", 6), ("0 0 0", 0)]
)
def test_one_message_goes_from_host_to_host(job_on, hosts, bundles):
    job, size = job_on(hosts), len(hosts.split())
    # Large rows go one by one.
    for numbers, wanted in ((1, bundles), (5, bundles), (4097, size * (len(set(hosts.split())) - 1))):
        for rows in job.exchange(numbers=numbers).values():
            np.testing.assert_array_equal(rows.result(PATIENCE), np.repeat(np.arange(size), numbers).reshape(size, -1))
        assert job.sent[BUNDLE] == wanted and set(job.sent) <= {BUNDLE, CAME}, job.sent
        job.sent.clear()


@pytest.mark.parametrize("missing", range(4))
def test_errors_name_who_is_missing(job_on, missing):
    """Also where those of its host wait for their leader, which cannot tell that they have come."""
    job = job_on("0 1 1 0")
    others = [rank for rank in range(4) if rank != missing]
    for future in job.exchange(others, seconds=2).values():
        text = error_of(future)
        arrived = ", ".join(f"process {rank} (host{(rank in (1, 2)) * 1})" for rank in others)
        assert f"waited 2 s for 1 of 4 processes. Arrived: {arrived}. Missing: process {missing} (host" in text, text
    assert job.sent[CAME]


def test_nobody_is_missing_where_all_came_and_one_has_stopped_since(job_on):
    job = job_on("0 1 2", Asked)
    text = error_of(job.exchange([0, 1], seconds=1)[0])
    assert "waited 1 s for the other 2 processes; all of them have come, but not their vectors. Usual" in text, text


def test_an_exchange_ends_when_this_process_abandons_the_step(job_on):
    """On another thread; its error belongs to that step, and not to the next."""
    job = job_on("0 0")

    def gather():
        with processes_of(job.members[0]).together("it", timeout=PATIENCE) as both:
            both.gather("rows", np.ones(1))

    future = job.pool.submit(gather)
    time.sleep(0.3)
    for member in job.members:
        member.abandon(True)
    assert error_of(future) == "it: the step was abandoned."
    for resumed in [job.pool.submit(member.resume, "again", PATIENCE) for member in job.members]:
        resumed.result(PATIENCE)
    for rows in job.exchange().values():
        assert len(rows.result(PATIENCE)) == 2
    assert not job.members[0].state.has_lost_some


def test_a_leader_that_hands_nothing_on_is_missing(job_on):
    job = job_on("0 1 1")
    job.held = {(0, BUNDLE), (1, BUNDLE)}
    text = error_of(job.exchange(seconds=2)[0])
    assert "Arrived: process 0 (host0), process 2 (host1). Missing: process 1 (host1)" in text, text


@pytest.mark.parametrize("comes", [True, False])
def test_what_a_process_brought_before_it_ended_may_come_later(job_on, comes):
    """Its leader brings it, and it tells the others itself that it ends."""
    job = job_on("0 1 1")
    job.held = {(1, BUNDLE)}
    futures = job.exchange(seconds=PATIENCE)
    np.testing.assert_array_equal(futures[2].result(PATIENCE)[:, 0], [0, 1, 2])
    began = time.monotonic()
    job.members[2].leave()
    if comes:
        time.sleep(0.3)
        job.let_go()
        np.testing.assert_array_equal(futures[0].result(PATIENCE)[:, 0], [0, 1, 2])
    else:
        assert "process 2 has ended" in error_of(futures[0]) and 4 < time.monotonic() - began < PATIENCE / 2


def test_those_behind_a_leader_that_ends_do_not_wait(job_on):
    """Although what it brought itself has come."""
    job = job_on("0 1 1")
    job.held = {(0, BUNDLE)}
    futures = job.exchange(seconds=PATIENCE)
    time.sleep(0.3)
    job.members[1].leave()
    assert "process 1 has ended" in error_of(futures[2])


def test_a_leader_hands_on_what_comes_when_its_own_wait_has_ended(job_on):
    job = job_on("0 1 1")
    first = job.exchange([1], seconds=1.5)[1]
    time.sleep(1)
    second = job.exchange([2])[2]
    assert "Missing: process 0" in error_of(first)
    for future in (job.exchange([0])[0], second):
        np.testing.assert_array_equal(future.result(PATIENCE)[:, 0], [0, 1, 2])


def test_who_came_shortly_before_the_timeout_is_not_missing(job_on):
    """What a process brings waits at its leader, and it has not waited for long itself."""
    job = job_on("0 1 1 1")
    future = job.exchange([0, 1], seconds=3)[0]
    time.sleep(2.5)
    job.exchange([2], seconds=PATIENCE)
    text = error_of(future)
    assert "Arrived: process 0 (host0), process 1 (host1), process 2 (host1). Missing: process 3 (host1)" in text, text


def test_other_hosts_hear_of_a_process_that_ends_without_a_word(job_on):
    job = job_on("0 1 1 0")
    futures = job.exchange([0, 1, 3], seconds=PATIENCE)
    time.sleep(0.3)
    job.members[2].use_memory(False)  # and its lock goes, as if it was killed
    assert all("process 2 has ended" in error_of(future) for future in futures.values())
    assert all(job.members[rank].state.has_lost_some for rank in futures)


def test_errors_name_who_was_the_first_to_abandon_a_step(job_on):
    """Not who did so because of that one, and is heard of before."""
    job = job_on("0 1 2")
    job.held = {(1, ABANDONED)}
    futures = job.exchange([0, 2], seconds=PATIENCE)
    job.members[1].abandon(True)
    while not job.kept:
        time.sleep(0.01)
    job.members[0].arriving.append(job.kept[0])
    assert "process 1 abandoned the step" in error_of(futures[0])
    job.members[0].abandon(False)
    assert "process 1 abandoned the step" in error_of(futures[2])


def test_errors_name_who_was_the_first_to_end(job_on):
    """Not who ends because of that one, and counts at once, as a leader does."""
    job = job_on("0 0 1")
    futures = job.exchange([0, 2], seconds=PATIENCE)
    time.sleep(0.3)
    job.members[1].leave()
    assert "process 1 has ended" in error_of(futures[0])
    job.members[0].leave()
    assert "process 1 has ended" in error_of(futures[2])


def test_the_step_after_one_that_was_abandoned_meets_nothing_of_it(job_on):
    job = job_on("0 1 1 0")
    job.held = {(1, BUNDLE)}
    futures = job.exchange(seconds=PATIENCE)
    time.sleep(0.3)
    job.members[2].abandon(True)
    assert all("process 2 abandoned the step" in error_of(futures[rank]) for rank in (0, 3))
    for member in job.members:
        if not member.state.is_resuming:
            member.abandon(True)
    resumed = [job.pool.submit(member.resume, "again", PATIENCE) for member in job.members]
    for future in resumed:
        future.result(PATIENCE)
    job.let_go()
    for rows in job.exchange(numbers=3).values():
        np.testing.assert_array_equal(rows.result(PATIENCE)[:, 0], range(4))
