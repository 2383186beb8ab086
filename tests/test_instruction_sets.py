"""The kernels give the same bits on every instruction set, and can be held to one that is older than the processor."""

import ctypes
import hashlib

import numpy as np
import pytest
from harness import run_python
from test_native_kernels import LAYOUTS, bfloat16, core, draw, pointer, sizes, vectors

SETS = ["baseline", "avx2", "avx512"]  # from the oldest
# The processor's features that each needs, as Linux calls them.
FEATURES = {"baseline": [], "avx2": ["avx2", "fma"], "avx512": ["avx512f", "avx512bw", "avx512dq", "avx512vl"]}
VARIABLE = "GLUON_SYNCBN_MAX_CPU_ISA"


def newest() -> str:
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        found = next((line.split(":")[1].split() for line in lines if line.startswith("flags")), [])
    return max((name for name in SETS if set(FEATURES[name]) <= set(found)), key=SETS.index)


def digest() -> str:
    """Of the results of every pass over every layout and dtype, with and without ReLU."""
    seen = hashlib.sha256()
    for flag, dtype in ((0, "float32"), (1, "float64"), (2, "float16"), (12, "bfloat16")):
        for layout in [*LAYOUTS, (8, 64, 900), (4000, 130, 1)]:
            x, dy = (draw(layout, "float32", seed) for seed in (0, 1))
            x, dy = (bfloat16(item) if dtype == "bfloat16" else item.astype(dtype) for item in (x, dy))
            channels = layout[1]
            mean, m2, sums, centred = (np.empty(channels) for _ in range(4))
            y, dx = np.empty_like(x), np.zeros_like(x)
            core().gluon_syncbn_moments(flag, pointer(x), *sizes(layout), 1, pointer(mean), pointer(m2))
            scale, beta, *gradient = vectors(channels, 2, 3, 4, 5, 6)
            affine = [pointer(item) for item in (mean, scale, beta)]
            for activation, skip, in_place in ((0, 0, 0), (1, 0, 0), (2, 0, 0), (1, 1, 0), (0, 0, 1), (2, 0, 1)):
                behind = [activation, ctypes.c_double(0.1)]
                added, out = (pointer(dy), pointer(y)) if skip else (None, None)
                core().gluon_syncbn_normalize(flag, pointer(x), added, *sizes(layout), *affine, *behind, pointer(y), 1)
                arrays = [flag, pointer(x), pointer(dy), out, in_place, *sizes(layout), *affine, *behind]
                d_skip = np.zeros_like(x)
                core().gluon_syncbn_gradient_sums(
                    *arrays, pointer(d_skip) if skip else None, 0, 1, pointer(sums), pointer(centred)
                )
                seen.update(d_skip.tobytes())
                for add in (0, 1):
                    into = [*(pointer(item) for item in gradient), pointer(dx), add, 1]
                    core().gluon_syncbn_input_gradient(*arrays, *into)
                    seen.update(dx.tobytes())
                for item in (mean, m2, y, sums, centred):
                    seen.update(item.tobytes())
    return seen.hexdigest()


@pytest.mark.parametrize("limit", [*SETS, "AVX2"])
def test_the_same_bits_on_an_older_instruction_set(limit):
    """Where the processor has no newer one, the switch changes nothing."""
    code = """
from gluon_syncbn.backends import native
from test_instruction_sets import digest
print('ON', native.instruction_set(), digest())
"""
    done = run_python(code, **{VARIABLE: limit})
    assert done.returncode == 0, done.stderr
    expected = min(limit.lower(), newest(), key=SETS.index)
    assert done.stdout.split("ON ")[1].split() == [expected, digest()]


def test_without_the_switch_the_newest_is_taken():
    done = run_python(
        "from gluon_syncbn.backends import native; print('ON', native.instruction_set())", **{VARIABLE: ""}
    )
    assert done.stdout.split("ON ")[1].split() == [newest()]


def test_another_value_is_an_error_at_the_first_step():
    code = """
import gluon_syncbn, mxnet as mx
layer = gluon_syncbn.SyncBatchNorm(in_channels=3)
layer.initialize(ctx=[mx.cpu(0), mx.cpu(1)])
try:
    with mx.autograd.record():
        layer(mx.nd.ones((2, 3)))
except ValueError as error:
    print('ERROR', error)
"""
    done = run_python(code, **{VARIABLE: "sse4"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("ERROR ")[1].strip() == f"{VARIABLE} must be baseline, avx2 or avx512, not 'sse4'."
