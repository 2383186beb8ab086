"""The GPU's kernels against the oracle, with the CPU standing in for the GPU (stand_in/gpu_threads.h).

The source is the one that a GPU gets. What only a GPU can show is in check_kernels.py, gpu/ and benchmarks/gpu.py.
"""

import re

import check_kernels
import gpu as benchmark
import kernel_cases
import numpy as np
import oracle
import pytest
from gpu_kernels import REQUEST_NULL, Passes, Tuning
from harness import LONG
from kernel_cases import BEHIND, PRECISION, draw, draw_vectors, run_two_devices
from stand_in import Fenced, StandInGpu

# (outer, channels, inner): rows as in NCHW, columns as in NHWC and (N, C); runs that end beside packs of 16 bytes,
# fewer and more channels than a block takes, channels that several blocks share.
LAYOUTS = [
    (1, 1, 1),
    (1, 1, 3),
    (2, 3, 2),
    (3, 5, 49),
    (2, 40, 8),
    (2, 9, 5),
    (3, 20, 9),
    (2, 7, 25),
    (17, 2, 63),
    (2, 2, 1024),
    (2, 3, 4097),
    (2, 3, 9001),
    (4, 70, 36),
    (2, 2048, 1),
    (130, 257, 1),
    (600, 3, 1),
    (70, 64, 1),
    (999, 16, 1),
]
DTYPES = ["float32", "float64", "float16"]


@pytest.fixture(scope="module")
def gpu():
    return StandInGpu()


def moments(gpu, x, offset=0):
    x = Fenced(x, offset)
    passes = Passes(gpu, x.array.dtype.name, x.array.shape, x.array)
    passes.moments(x.array)
    x.check()
    return passes.received()[:2]


@pytest.mark.parametrize("behind", list(BEHIND))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_two_devices_give_what_the_oracle_says(gpu, layout, dtype, behind):
    """Forward and backward on two "GPUs" of different sizes, which bring their messages to a host."""
    run_two_devices(gpu, [layout, (2 * layout[0] + 1, *layout[1:])], dtype, behind)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", [(2, 3, 8), (3, 5, 49), (2, 2, 1024), (70, 64, 1)], ids=str)
@pytest.mark.parametrize("offsets", [(1, 1, 1, 1), (3, 3, 3, 3), (0, 1, 0, 0), (0, 0, 1, 0)], ids=str)
@pytest.mark.parametrize("behind", ["nothing", "skip", "leaky in place"])
def test_tensors_that_are_not_aligned(gpu, layout, dtype, offsets, behind):
    """All by the same number of values, or one of x, y, dy and dx."""
    run_two_devices(gpu, [layout, layout], dtype, behind, offsets=offsets)


@pytest.mark.parametrize("behind", list(BEHIND))
@pytest.mark.parametrize("has_scale", [True, False])
@pytest.mark.parametrize("layout", [(3, 5, 49), (70, 64, 1)], ids=str)
def test_gradients_are_added_where_asked(gpu, layout, has_scale, behind):
    run_two_devices(gpu, [layout, layout], "float32", behind, add=True, has_scale=has_scale)


@pytest.mark.parametrize("behind", ["relu", "leaky in place"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", [(3, 5, 49), (70, 64, 1)], ids=str)
def test_batch_renormalization(gpu, layout, dtype, behind):
    run_two_devices(gpu, [layout, layout], dtype, behind, renorm=(1.5, 0.5))


@pytest.mark.parametrize("layout", [(20, 5, 49), (300, 64, 1)], ids=str)
def test_both_directions_where_the_mean_is_large(gpu, layout):
    """What float32 cannot hold of the mean must not be lost on the way."""
    run_two_devices(gpu, [layout, layout], "float32", mean=3e4, std=0.5)


@pytest.mark.parametrize("layout", [(4, 300, 4100), (5, 300, 4100), (7, 300, 4100), (2700, 2048, 1)], ids=str)
def test_blocks_that_have_more_than_one_turn(gpu, layout):
    """Rows: 4 blocks per channel, 3 pieces per run, so that a block steps over the ends of runs in all ways. Columns: 8
    blocks share 2,700 rows, of which they take 1,024 at a time."""
    x = draw(layout, "float64")
    mean, m2 = moments(gpu, x)
    assert oracle.distance([mean], [x.mean(axis=(0, 2))]) < 1e-13
    assert oracle.distance([m2 / x[:, 0].size], [x.var(axis=(0, 2))]) < 1e-13


@pytest.mark.parametrize("inner", [1, 100])
def test_a_mean_that_is_large_against_the_deviation(gpu, inner):
    x = draw((500, 3, inner), "float32", mean=3e4, std=0.5)
    wide = x.astype(np.float64)
    mean, m2 = moments(gpu, x)
    assert oracle.distance([mean], [wide.mean(axis=(0, 2))]) < 1e-9
    assert oracle.distance([m2 / (500 * inner)], [wide.var(axis=(0, 2))]) < 1e-5


@pytest.mark.parametrize("inner", [1, 5000])
def test_where_the_first_values_are_not_like_the_rest(gpu, inner):
    """A padded border: the value from which a channel counts is far from all others."""
    x = draw((300, 2, inner) if inner == 1 else (6, 2, inner), "float32", mean=1000, std=1)
    x[:2] = 0
    x[0, :, : inner // 2] = -5
    wide = x.astype(np.float64)
    mean, m2 = moments(gpu, x)
    assert oracle.distance([mean], [wide.mean(axis=(0, 2))]) < 1e-7
    assert oracle.distance([m2 / wide[:, 0].size], [wide.var(axis=(0, 2))]) < 1e-5


@pytest.mark.parametrize("layout", [(2, 2, 1024), (70, 64, 1)], ids=str)
def test_constant_channels_have_no_variance(gpu, layout):
    mean, m2 = moments(gpu, np.full(layout, 0.1, "float32"))
    assert (mean == np.float32(0.1)).all()
    assert (m2 == 0).all()


@pytest.mark.parametrize("layout", [(2, 2, 1024), (70, 64, 1)], ids=str)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_a_number_stays_so_and_in_its_channel(gpu, layout, value):
    x = draw(layout, "float32")
    x[-1, 1, -1] = value
    mean, m2 = moments(gpu, x)
    assert not np.isfinite(m2[1])
    assert np.isfinite(np.delete(m2, 1)).all()
    passes = Passes(gpu, "float32", layout, x, activation="relu")
    passes.send(np.zeros(layout[1]), np.ones(layout[1]))
    y, running = np.zeros(layout, "float32"), np.ones((2, layout[1]), "float32")
    passes.normalize(x, y, *draw_vectors(passes, 3, 4), *running, 1)
    assert np.isnan(y[-1, 1, -1]) if np.isnan(value) else y[-1, 1, -1] == np.inf
    assert np.isfinite(y).sum() == y.size - 1


@pytest.mark.parametrize("layout", [(3, 5, 49), (70, 64, 1)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_prediction(gpu, layout, dtype):
    x = draw(layout, dtype)
    y = np.zeros_like(x)
    passes = Passes(gpu, dtype, layout, x, y)
    gamma, beta, mean, var = draw_vectors(passes, 3, 4, 5, 6)
    before = mean.copy(), var.copy()
    passes.normalize(x, y, gamma, beta, mean, var, count=0, training=False)
    shape = (1, -1, 1)
    wide = [item.astype(np.float64).reshape(shape) for item in (gamma, beta, mean, var)]
    expected = (x.astype(np.float64) - wide[2]) / np.sqrt(wide[3] + 1e-5) * wide[0] + wide[1]
    assert oracle.distance([y], [expected]) < PRECISION[dtype]
    assert (mean == before[0]).all() and (var == before[1]).all()
    # The backward pass of such a call does not see statistics that depend on x.
    dy, dx = draw(layout, dtype, 1), np.zeros_like(x)
    d_gamma, d_beta = np.zeros((2, layout[1]), passes.real)
    passes.gradient_sums(x, dy, gamma, beta, d_gamma, d_beta, beta_request=REQUEST_NULL)
    assert passes.received()[2][:3].tolist() == [0, 7, 0]
    assert (d_beta == 0).all() and (d_gamma != 0).all()
    passes.input_gradient(x, dy, dx, gamma, beta)
    assert oracle.distance([dx], [dy.astype(np.float64) * wide[0] / np.sqrt(wide[3] + 1e-5)]) < PRECISION[dtype]


def test_outputs_that_nobody_wants_are_not_written(gpu):
    x = draw((3, 5, 49), "float32")
    y = np.zeros_like(x)
    passes = Passes(gpu, "float32", x.shape, x, y)
    gamma, beta, mean, var = draw_vectors(passes, 3, 4, 5, 6)
    passes.send(np.zeros(5), np.ones(5))
    passes.normalize(x, None, gamma, beta, mean, var, count=147)
    assert (y == 0).all()
    assert (passes.saved[:5] == 0).all() and passes.saved[20] == 147


@pytest.mark.parametrize("layout", [(4, 3, 20001), (2000, 20, 1)], ids=str)
def test_results_are_the_same_bits_in_any_order_of_blocks_and_threads(gpu, layout):
    """gpu_threads.h draws the orders anew for each launch. The counters are used again, as by the operator."""
    x = draw(layout, "float32")
    passes = Passes(gpu, "float32", layout, x)
    results = []
    for _ in range(3):
        passes.moments(x)
        results.append(np.array(passes.received()[:2]))
    assert passes.launches[True].grid[1] > 1
    assert (results[0] == results[1]).all() and (results[0] == results[2]).all()


def test_what_runs_on_a_gpu_first(gpu, monkeypatch):
    """check_kernels.py draws cases that the kernels do right, and sees when they do not."""
    assert check_kernels.check(gpu, cases=25, values=20_000, seconds=LONG) == (25, [])
    monkeypatch.setitem(kernel_cases.PRECISION, "float32", 1e-9)
    monkeypatch.setattr(check_kernels, "MOST_FAILURES", 3)
    done, failures = check_kernels.check(gpu, cases=25, values=20_000, seconds=LONG)
    assert done < 25 and len(failures) == 3
    assert all(re.match(r"case [0-9]+, {'layouts'.*: .* off by .* at \(", failure) for failure in failures)


@pytest.mark.parametrize(
    "tuning",
    [
        Tuning(threads=512, unroll=2, blocks=256, reducing_blocks=64),
        Tuning(defines=("-DSHARE=0", "-DBACKWARDS=0", "-DPREFETCH=0")),
    ],
    ids=["threads", "without"],
)
def test_what_a_benchmark_compares_is_right_too(tuning):
    """What benchmarks/gpu.py tries on a GPU."""
    assert check_kernels.check(StandInGpu(tuning), cases=25, values=20_000, seconds=LONG) == (25, [])


@pytest.mark.parametrize("program", [check_kernels, benchmark])
def test_without_a_gpu_they_say_so(program, capsys):
    assert program.main([]) == 3
    assert "NOT RUN: this needs CuPy and a GPU" in capsys.readouterr().out
