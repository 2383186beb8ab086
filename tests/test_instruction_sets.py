"""The kernels give the same bits on every instruction set, and can be held to one that is older than the processor."""

import functools
import hashlib
import subprocess

import pytest
import standalone
from kernel_cases import FLAGS, Cpu, dealt, run_two_devices
from stand_in import Fenced
from testing import run_python

# From the oldest, with the processor's features that each needs, as Linux calls them.
FEATURES = {"baseline": [], "avx2": ["avx2", "fma"], "avx512": ["avx512f", "avx512bw", "avx512dq", "avx512vl"]}
SETS = list(FEATURES)
VARIABLE = "GLUON_SYNCBN_MAX_CPU_ISA"


def newest() -> str:
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        found = next((line.split(":")[1].split() for line in lines if line.startswith("flags")), [])
    return max((name for name in SETS if set(FEATURES[name]) <= set(found)), key=SETS.index)


@functools.lru_cache(maxsize=None)
def digest(seed: int) -> str:
    """Of the results of every pass, with every layout, dtype and what may follow the norm."""
    seen = hashlib.sha256()
    for case in dealt(seed, 76, list(FLAGS)):
        for array in run_two_devices(Cpu(1, Fenced), case):
            seen.update(array.tobytes())
    return seen.hexdigest()


@pytest.mark.parametrize("limit", ["", *SETS, "AVX2"])
def test_the_same_bits_on_an_older_instruction_set(limit, seed):
    """Where the processor has no newer one, the switch changes nothing; without it the newest is taken, as here."""
    code = f"import testing, test_instruction_sets as t; print('ON', testing.instruction_set(), t.digest({seed}))"
    done = run_python("import sys; sys.path.append('benchmarks')\n" + code, **{VARIABLE: limit})
    expected = min(limit.lower() or newest(), newest(), key=SETS.index)
    assert done.stdout.split("ON ")[1].split() == [expected, digest(seed)]


@pytest.mark.parametrize("name", SETS[1:])
def test_code_for_a_newer_processor_is_shared_with_nobody(name):
    """The linker may take any file's copy of a shared function, also for what an older processor runs."""
    source = standalone.CSRC / "cpu" / "kernels" / f"{name}.cpp"
    words = ["-std=c++17", "-O1", "-fopenmp", f"-I{standalone.CSRC}", "-c"]
    made = standalone.object_of(source) or standalone.compiled(f"{name}.o", [source], words)
    done = subprocess.run(["nm", "-C", "--defined-only", made], stdout=subprocess.PIPE, encoding="utf-8", check=True)
    visible = [line.split(maxsplit=2)[2] for line in done.stdout.splitlines() if line.split()[1] not in "tr"]
    assert visible == [f"gluon_syncbn::{name}::passes(gluon_syncbn::DType)"]


def test_another_value_is_an_error_at_the_first_step():
    code = """
from testing import *
layer = initialized(SyncBatchNorm(in_channels=3), 2)
try:
    with autograd.record():
        layer(mx.nd.ones((2, 3)))
except ValueError as error:
    print('ERROR', error)
"""
    told = run_python(code, **{VARIABLE: "sse4"}).stdout
    assert told == f"ERROR {VARIABLE} must be baseline, avx2 or avx512, not 'sse4'.\n"
