"""A wait ends early where it can no longer succeed, and nowhere else: no timeout here is ever reached.

test_endings.py has what a net meets; here are the rendezvous of both back ends by themselves."""

import time

import pytest
from meeting_points import KINDS, cut_short
from testing import GRACE, HANG

from gluon_syncbn.meeting import waiting


@pytest.fixture(autouse=True)
def grace(monkeypatch):
    """Of the portable back end; the library of these tests has it in standalone.cpp."""
    monkeypatch.setattr(waiting, "GRACE_SECONDS", GRACE)


@pytest.fixture(params=list(KINDS))
def rendezvous(request):
    with KINDS[request.param](2) as place:
        yield place
        cut_short("")


def test_a_limit_ends_a_wait_that_has_begun_and_says_why(rendezvous):
    pending = rendezvous.meet(0, [1.0])
    time.sleep(0.5)
    cut_short("of a reason")
    started = time.monotonic()
    text = pending.result(timeout=HANG)
    assert time.monotonic() - started > GRACE - 0.1
    assert text.startswith("here waited ")
    assert " s for 1 of 2 devices, because of a reason. Arrived: rank 0. Missing: rank 1." in text


def test_a_limit_ends_a_wait_that_begins_later(rendezvous):
    cut_short("of a reason")
    time.sleep(GRACE)
    started = time.monotonic()
    assert "because of a reason" in rendezvous.meet(0, [1.0]).result(timeout=HANG)
    assert time.monotonic() - started > GRACE - 0.1


def test_under_a_limit_those_who_come_still_meet(rendezvous):
    cut_short("of a reason")
    first = rendezvous.meet(0, [1.0])
    time.sleep(GRACE / 2)
    assert [rendezvous.meet(1, [2.0]).result(timeout=HANG), first.result(timeout=HANG)] == [(1, [3.0])] * 2


def test_a_limit_that_is_lifted_ends_nothing(rendezvous):
    first = rendezvous.meet(0, [1.0])
    cut_short("of a reason")
    time.sleep(GRACE / 2)
    cut_short("")
    time.sleep(GRACE)
    assert [rendezvous.meet(1, [2.0]).result(timeout=HANG), first.result(timeout=HANG)] == [(1, [3.0])] * 2


def test_a_limit_of_one_thread_is_not_lifted_by_another():
    """Two threads abandon a step; the one that is ready first leaves the other its limit."""
    with KINDS["portable"](2) as rendezvous, waiting.cut_short("of a reason"):
        with waiting.cut_short("of another reason"):
            pass
        assert "because of another reason" in rendezvous.meet(0, [1.0]).result(timeout=HANG)
    assert waiting._cut.now[0] == ""
