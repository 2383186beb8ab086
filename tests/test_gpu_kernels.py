"""The GPU's kernels against the reference, with the CPU standing in for the GPU (stand_in/gpu_threads.h).

The source is the one that a GPU gets. What only a GPU can show is in check_kernels.py, gpu/ and benchmarks/gpu.py.
"""

import re

import check_kernels
import gpu as benchmark
import kernel_cases
import numpy as np
import pytest
from gpu_kernels import REQUEST_NULL, Passes
from kernel_cases import DTYPES, LAYOUTS, SLOPE, UNITS, Case, check_moments, dealt, draw, what_is_wrong
from reference import Norm, check
from stand_in import Fenced, StandInGpu

COUNT = 40
GPU = StandInGpu()


def vectors(channels, real="float32"):
    """γ, β and running statistics."""
    return np.random.RandomState(3).uniform(0.5, 2, (4, channels)).astype(real)


@pytest.mark.parametrize("number", range(COUNT))
def test_two_devices_give_what_the_reference_says(number, seed):
    """Forward and backward on two "GPUs" of different sizes, which bring their messages to a host. The same bits twice,
    though gpu_threads.h draws the orders of blocks and threads anew for each launch."""
    assert what_is_wrong(dealt(seed, COUNT)[number], GPU) == ""


@pytest.mark.parametrize("layout", [(4, 300, 4100), (5, 300, 4100), (7, 300, 4100), (2700, 2048, 1)], ids=str)
def test_blocks_that_have_more_than_one_turn(layout):
    """Rows and columns, with several blocks to a tile, each of which has more than it takes at a time."""
    x = draw(layout, "float64")
    passes = Passes(GPU, "float64", layout, x)
    passes.moments(x)
    check_moments(x, *passes.received()[:2], "float64")


@pytest.mark.parametrize("layout", [(4, 3, 20001), (2000, 20, 1)], ids=str)
def test_blocks_that_share_a_channel_leave_their_counters_as_they_were(layout):
    """The operator uses them again for the next pass."""
    x = Fenced(draw(layout, "float32"))
    passes = Passes(GPU, "float32", layout, x.array)
    assert passes.blocks.blocks[1] > 1
    results = []
    for _ in range(3):
        passes.moments(x.array)
        results.append(np.array(passes.received()[:2]))
    check_moments(x.array.astype(np.float64), *results[0])
    assert (results[0] == results[1:]).all()


@pytest.mark.parametrize("layout", [(2, 2, 1024), (70, 64, 1)], ids=str)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_a_number_stays_so_and_in_its_channel(layout, value):
    x = draw(layout, "float32")
    x[-1, 1, -1] = value
    passes = Passes(GPU, "float32", layout, x, activation="relu")
    passes.moments(x)
    assert np.isfinite(passes.received()[1]).tolist() == [c != 1 for c in range(layout[1])]
    passes.send(np.zeros(layout[1]), np.ones(layout[1]))
    y = np.zeros(layout, "float32")
    passes.normalize(x, y, *vectors(layout[1]), 1)
    assert np.isnan(y[-1, 1, -1]) if np.isnan(value) else y[-1, 1, -1] == np.inf
    assert np.isfinite(y).sum() == y.size - 1


def test_every_number_for_the_host_arrives():
    """Also one that has the bits of a number that is not there; whatever it is, it is a NaN."""
    x = draw((3, 5, 49), "float64")
    not_there = np.array([0xFFF4C0DEC0DEC0DE], "uint64").view("float64")
    running = np.ones(5), np.ones(5)
    running[1][2:3] = not_there
    passes = Passes(GPU, "float64", x.shape, x)
    passes.moments(x, running)
    told = passes.received()[2][5:10]
    assert np.isnan(told).tolist() == [False, False, True, False, False]
    assert told[2:3].tobytes() != not_there.tobytes()


@pytest.mark.parametrize("layout", [(3, 5, 49), (70, 64, 1)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["none", "leaky"])
def test_prediction(layout, dtype, activation):
    x, dy = draw(layout, dtype), draw(layout, dtype, 1)
    y, dx = np.zeros_like(x), np.zeros_like(x)
    passes = Passes(GPU, dtype, layout, x, y, activation=activation, slope=SLOPE)
    gamma, beta, mean, var = vectors(layout[1], passes.real)
    before = mean.copy(), var.copy()
    passes.normalize(x, y, gamma, beta, mean, var, count=0, training=False)
    assert (mean == before[0]).all() and (var == before[1]).all()
    # The backward pass of such a call does not see statistics that depend on x.
    d_gamma, d_beta = np.zeros((2, layout[1]), passes.real)
    passes.gradient_sums(x, dy, gamma, beta, d_gamma, d_beta, beta_request=REQUEST_NULL)
    assert passes.received()[2][:3].tolist() == [0, 7, 0]
    passes.input_gradient(x, dy, dx, gamma, beta)
    norm = Norm(gamma, beta, activation=None if activation == "none" else activation, slope=SLOPE)
    norm.set_running(mean, var)
    expected, units = norm.step([x], [dy], seen=[y], training=False), UNITS[passes.real]
    check("y", y, expected.outputs[0], dtype, units=units, roundings=1 if activation == "none" else 2)
    check("dx", dx, expected.input_gradients[0], dtype, units=units)
    check("gradient of gamma", d_gamma, expected.gamma_gradient, passes.real, units=units)
    assert (d_beta == 0).all()


def test_outputs_that_nobody_wants_are_not_written():
    x = draw((3, 5, 49), "float32")
    y = np.zeros_like(x)
    passes = Passes(GPU, "float32", x.shape, x, y)
    passes.send(np.zeros(5), np.ones(5))
    passes.normalize(x, None, *vectors(5), count=147)
    assert (y == 0).all()
    assert (passes.saved[:5] == 0).all() and passes.saved[20] == 147


def test_what_runs_on_a_gpu_first(monkeypatch, seed):
    """check_kernels.py draws cases that the kernels do right, and sees when they do not."""
    assert check_kernels.check(GPU, 15, 20_000, np.inf, seed) == (15, [])
    monkeypatch.setattr(kernel_cases, "UNITS", {"float32": 1e-3, "float64": 1e-3})
    monkeypatch.setattr(check_kernels, "MOST_FAILURES", 3)
    done, failures = check_kernels.check(GPU, 15, 20_000, np.inf, seed)
    assert done < 15 and len(failures) == 3
    said = rf"case [0-9]+ of --seed {seed} --share 0/1: .* is off by .*, not .* \(Case\(layout=.*"
    assert all(re.fullmatch(said, failure) for failure in failures)


@pytest.mark.parametrize("multiprocessors", [1, 8])
def test_a_small_gpu(multiprocessors, seed):
    """It takes larger parts, more of them one after the other."""
    for case in dealt(seed, len(LAYOUTS)):
        assert what_is_wrong(case, StandInGpu(multiprocessors)) == ""


def test_a_channel_that_hundreds_of_blocks_share():
    """What they have left does not fit into the registers of those that add it up."""
    assert what_is_wrong(Case((1, 1, 280_001), "float32"), GPU) == ""


@pytest.mark.parametrize("program", [check_kernels, benchmark])
def test_without_a_gpu_they_say_so(program, capsys):
    assert program.main([]) == 3
    assert "NOT RUN: this needs CuPy and a GPU" in capsys.readouterr().out
