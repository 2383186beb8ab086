"""Rendezvous and kernels run clean under the compiler's sanitizers."""

import os
import re
import subprocess

import pytest
from harness import HANG, ROOT

CSRC = os.path.join(ROOT, "gluon_syncbn", "csrc")
COMMON = ["g++", "-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-I" + CSRC]


MEETING = [
    os.path.join(CSRC, f"meeting/{name}.cpp") for name in ("rendezvous", "step", "threads", "waiting", "watchdog")
]
RENDEZVOUS = [os.path.join(ROOT, "tests/csrc/stress_rendezvous.cpp"), *MEETING]
ROUNDS = [os.path.join(ROOT, "tests/csrc/stress_rounds.cpp"), *MEETING]
KERNELS = [
    os.path.join(ROOT, "tests/csrc/exercise_kernels.cpp"),
    *(os.path.join(CSRC, name) for name in ("cpu/kernels.cpp", "meeting/statistics.cpp")),
]
ADDRESS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
THREAD = ["-fsanitize=thread", "-pthread"]
# What is built, how, the program's argument, and what it says if all is well. For addresses it is not optimized, which
# compiles in a sixth of the time.
PROGRAMS = {
    "rendezvous, threads": (RENDEZVOUS, THREAD, "6000", r"6000 generations.* 0 failures\n"),
    "rendezvous, addresses": (RENDEZVOUS, ["-O0", *ADDRESS, "-pthread"], "6000", r"6000 generations.* 0 failures\n"),
    "rounds, threads": (ROUNDS, THREAD, "2000", r"2000 rounds.* 0 failures\n"),
    "rounds, addresses": (ROUNDS, ["-O0", *ADDRESS, "-pthread"], "2000", r"2000 rounds.* 0 failures\n"),
    "kernels, addresses": (KERNELS, ["-O0", "-fopenmp", *ADDRESS], "", r".*: 240 cases, 0 failures\n"),
    # Without OpenMP, whose runtime library the sanitizer cannot see into; 2 devices at once.
    "kernels, threads": (KERNELS, [*THREAD, "-Wno-unknown-pragmas"], "2", r".*: 480 cases, 0 failures\n"),
}


@pytest.mark.parametrize("program", list(PROGRAMS))
def test_clean_under(program, tmp_path):
    sources, flags, argument, expected = PROGRAMS[program]
    file = str(tmp_path / "program")
    built = subprocess.run([*COMMON, *flags, *sources, "-o", file], capture_output=True, encoding="utf-8", timeout=HANG)
    assert built.returncode == 0, built.stderr
    done = subprocess.run([file, *argument.split()], capture_output=True, encoding="utf-8", timeout=HANG)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert re.fullmatch(expected, done.stdout, flags=re.DOTALL), done.stdout
