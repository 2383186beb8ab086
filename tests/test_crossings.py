"""What a layer can meet, two and three at a time, drawn at random in each run (tests/crossings.py)."""

import re

import crossings
import pytest
from testing import run_program


@pytest.mark.parametrize("part", range(2))
def test_random_crossings(seed, part):
    done = run_program(["tests/crossings.py", "--seed", seed + part, "--cases", 80], merged=True)
    assert int(re.search(r"(\d+) pairs", done.stdout).group(1)) > 900


def test_every_feature_is_drawn():
    """A feature that the exclusions have made impossible would be missed by nobody."""
    found = set()
    for number in range(2000):
        found |= crossings.Case(1, number).features()
    assert found >= {f"mode={mode}" for mode in crossings.MODES_OF_CALL}
    assert found >= {f"maker={maker}" for maker in crossings.MAKERS} | {f"behind={item}" for item in crossings.BEHIND}
    assert found >= set(crossings.EVENTS) | {"twins", "renorm", "in_place", "fuse", "group_size", "gamma=0.0"}


# Cases that were wrong once.
FOUND = [(617491044, number) for number in (513, 544, 808, 2418)]
FOUND += [(1, 2), (1, 10), (1, 25), (967152765, 3), (533347805, 45)]


@pytest.mark.parametrize("seed, number", FOUND)
def test_what_was_found(seed, number):
    assert crossings.try_case(seed, number) == ""
