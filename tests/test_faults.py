"""The tests catch the faults that once went unnoticed, and most that are drawn (faults.py, which takes long)."""

import re
import subprocess
import sys

import pytest
from testing import ROOT


def try_faults(*words):
    """How many were tried and caught, and the table."""
    command = [sys.executable, "tests/faults.py", *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, encoding="utf-8", timeout=4 * 3600)
    caught, tried = map(int, re.search(r"all: (\d+) of (\d+) faults", done.stdout).groups())
    return caught, tried, done.stdout


@pytest.mark.long
def test_faults_that_once_went_unnoticed_are_caught():
    caught, tried, told = try_faults("--known")
    assert caught == tried > 0, told


@pytest.mark.long
def test_most_of_some_drawn_faults_are_caught(seed):
    """Look at the others by hand: some change nothing that anybody can see."""
    caught, tried, told = try_faults("--count", 8, "--cpp", 3, "--seed", seed)
    assert tried >= 8 and caught >= tried - 2, told
