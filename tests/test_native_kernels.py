"""The compiled kernels for CPUs alone, without MXNet, against the reference: with one thread and with three."""

import numpy as np
import pytest
from kernel_cases import FLAGS, Case, Cpu, CpuPasses, dealt, narrow, what_is_wrong, widen
from stand_in import Fenced

CPUS = Cpu(1, Fenced), Cpu(3, Fenced)
# Work enough for several threads.
LARGE = [Case((8, 64, 900), "float32", "skip"), Case((4000, 130, 1), "float16", "leaky in place")]


def normalize(x, factor=1.0, dtype="float16"):
    """x·factor, by the kernel, for one channel."""
    passes = CpuPasses(CPUS[0], dtype, x.shape, activation="none", slope=0, has_scale=True, in_place=False)
    y = np.empty_like(x)
    passes.send(np.zeros(1), np.full(1, 1 - 1e-5))
    passes.normalize(x, y, np.full(1, factor), np.zeros(1), np.zeros(1), np.zeros(1), x.size)
    return y


@pytest.mark.parametrize("number", range(76))
def test_two_devices_give_what_the_reference_says(number, seed):
    """Forward and backward, with the same bits on one and three threads."""
    assert what_is_wrong(dealt(seed, 76, list(FLAGS))[number], *CPUS) == ""


@pytest.mark.parametrize("case", LARGE, ids=str)
def test_threads_do_not_change_a_bit(case):
    assert what_is_wrong(case, *CPUS, Cpu(5, Fenced)) == ""


def test_every_number_of_two_bytes_survives():
    """The kernels convert by hand; NumPy knows all 65,536 of float16."""
    bits = np.arange(65536, dtype=np.uint16).reshape(1, 1, -1)
    np.testing.assert_array_equal(normalize(bits.view(np.float16)), bits.view(np.float16))
    np.testing.assert_array_equal(widen(normalize(bits, dtype="bfloat16")), widen(bits))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("factor", [0.5, 1.5, 3.0, 0.0009765625])
def test_rounding_to_two_bytes(dtype, factor):
    """Halfway cases, subnormal results, and what overflows."""
    rng = np.random.RandomState(0)
    magnitudes = 2.0 ** rng.uniform(-26, 17, 50000)
    x = narrow((magnitudes * rng.choice([-1, 1], magnitudes.size)).reshape(1, 1, -1), dtype)
    x = x[np.isfinite(widen(x))].reshape(1, 1, -1)
    with np.errstate(over="ignore"):
        expected = narrow(widen(x).astype(np.float32) * np.float32(factor), dtype)
    np.testing.assert_array_equal(normalize(x, factor, dtype), expected)
