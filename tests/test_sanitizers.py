"""Rendezvous and kernels run clean under the compiler's sanitizers."""

import os
import subprocess

from harness import ROOT

CSRC = os.path.join(ROOT, "gluon_syncbn", "csrc")
COMMON = ["g++", "-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-I" + CSRC]


def build_and_run(tmp_path, flags, sources, arguments=()):
    program = str(tmp_path / "program")
    built = subprocess.run([*COMMON, *flags, *sources, "-o", program], capture_output=True, text=True, timeout=280)
    assert built.returncode == 0, built.stderr
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


RENDEZVOUS = [os.path.join(ROOT, "tests/csrc/stress_rendezvous.cpp"), os.path.join(CSRC, "rendezvous.cpp")]
KERNELS = [os.path.join(ROOT, "tests/csrc/exercise_kernels.cpp"), os.path.join(CSRC, "kernels.cpp")]
ADDRESS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


def test_rendezvous_under_thread_sanitizer(tmp_path):
    told = build_and_run(tmp_path, ["-fsanitize=thread", "-pthread"], RENDEZVOUS, ["100000"])
    assert told.startswith("100000 generations") and told.endswith(" 0 failures\n")


def test_rendezvous_under_address_and_undefined_behaviour_sanitizer(tmp_path):
    told = build_and_run(tmp_path, [*ADDRESS, "-pthread"], RENDEZVOUS, ["20000"])
    assert told.startswith("20000 generations") and told.endswith(" 0 failures\n")


def test_kernels_under_address_and_undefined_behaviour_sanitizer(tmp_path):
    flags = ["-O3", "-fopenmp", *ADDRESS]
    assert build_and_run(tmp_path, flags, KERNELS).endswith(": 80 cases, 0 failures\n")


def test_kernels_of_several_devices_under_thread_sanitizer(tmp_path):
    """Without OpenMP, whose runtime library the sanitizer cannot see into."""
    flags = ["-O2", "-fsanitize=thread", "-pthread", "-Wno-unknown-pragmas"]
    assert build_and_run(tmp_path, flags, KERNELS, ["4"]).endswith(": 320 cases, 0 failures\n")


def test_everything_compiles_without_warnings(tmp_path):
    sources = [os.path.join(CSRC, name) for name in os.listdir(CSRC) if name.endswith(".cpp")]
    library = str(tmp_path / "library.so")
    flags = ["-O2", "-fPIC", "-shared", "-fopenmp", "-fvisibility=hidden", "-ffp-contract=off"]
    built = subprocess.run([*COMMON, *flags, *sources, "-o", library], capture_output=True, text=True, timeout=280)
    assert built.returncode == 0, built.stderr
