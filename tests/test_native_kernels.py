"""The compiled kernels alone, without MXNet, against NumPy in float64."""

import ctypes

import numpy as np
import pytest
from standalone import library as core

# (outer, channels, inner): rows as in NCHW, columns as in NHWC and (N, C); around the sizes at which loops change.
LAYOUTS = [(1, 1, 1), (3, 5, 49), (2, 3, 4097), (17, 2, 63), (5, 64, 64), (130, 257, 1), (1000, 3, 1), (4, 2048, 1)]
FLAGS = {"float64": 1, "float32": 0, "float16": 2}
# Rounding of an input of this dtype, and of what is computed from it.
PRECISION = {"float64": 1e-13, "float32": 3e-6, "float16": 2e-3}


def pointer(array):
    return array.ctypes.data_as(ctypes.c_void_p)


def sizes(layout):
    return [ctypes.c_int64(size) for size in layout]


def moments(x, layout, threads=1):
    mean, m2 = np.empty(layout[1]), np.empty(layout[1])
    core().gluon_syncbn_moments(FLAGS[x.dtype.name], pointer(x), *sizes(layout), threads, pointer(mean), pointer(m2))
    return mean, m2


def draw(layout, dtype, seed=0, mean=1.5, std=2.0):
    rng = np.random.RandomState(seed)
    return (rng.standard_normal(layout) * std + mean).astype(dtype)


def distance(actual, expected):
    return np.abs(np.asarray(actual, np.float64) - expected).max() / max(np.abs(expected).max(), 1e-300)


def vectors(channels, *seeds):
    return [np.random.RandomState(seed).uniform(0.5, 2, channels) for seed in seeds]


@pytest.mark.parametrize("dtype", list(FLAGS))
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_moments(layout, dtype):
    x = draw(layout, dtype)
    mean, m2 = moments(x, layout)
    wide = x.astype(np.float64)
    assert distance(mean, wide.mean(axis=(0, 2))) < (1e-6 if dtype != "float64" else 1e-14)
    expected = ((wide - wide.mean(axis=(0, 2), keepdims=True)) ** 2).sum(axis=(0, 2))
    assert distance(m2, expected) < (1e-5 if dtype != "float64" else 1e-13)


@pytest.mark.parametrize("inner", [1, 100])
def test_moments_of_a_mean_that_is_large_against_the_deviation(inner):
    """E[x²] − E[x]² in float32 would leave nothing of this variance."""
    layout = (500, 3, inner)
    x = draw(layout, "float32", mean=3e4, std=0.5)
    wide = x.astype(np.float64)
    mean, m2 = moments(x, layout)
    assert distance(mean, wide.mean(axis=(0, 2))) < 1e-9
    assert distance(m2 / (500 * inner), wide.var(axis=(0, 2))) < 1e-5


@pytest.mark.parametrize("inner", [1, 5000])
def test_moments_where_the_first_values_are_not_like_the_rest(inner):
    layout = (300, 2, inner)
    x = draw(layout, "float32", mean=1000, std=1)
    x[:2] = 0
    x[0, :, : inner // 2] = -5
    wide = x.astype(np.float64)
    mean, m2 = moments(x, layout)
    assert distance(mean, wide.mean(axis=(0, 2))) < 1e-7
    assert distance(m2 / (300 * inner), wide.var(axis=(0, 2))) < 1e-5


def test_moments_of_constant_channels_are_exact():
    x = np.full((7, 3, 333), 0.1, np.float32)
    mean, m2 = moments(x, x.shape)
    np.testing.assert_array_equal(mean, np.float64(np.float32(0.1)))
    np.testing.assert_array_equal(m2, 0)


SLOPE = 0.1
ACTIVATIONS = {"none": 0, "relu": 1, "leaky": 2}
# What stands behind the norm, and whether the backward passes go by the output: (activation, skip, in place).
CASES = [
    ("none", False, False),
    ("relu", False, False),
    ("leaky", False, False),
    ("relu", True, False),
    ("none", False, True),
    ("leaky", False, True),
]


def normalize(x, skip, layout, affine, activation="none", y=None):
    y = np.empty_like(x) if y is None else y
    vectors = [pointer(item) for item in affine]
    behind = ACTIVATIONS[activation], ctypes.c_double(SLOPE)
    flag = 12 if x.dtype == np.uint16 else FLAGS[x.dtype.name]
    added = None if skip is None else pointer(skip)
    core().gluon_syncbn_normalize(flag, pointer(x), added, *sizes(layout), *vectors, *behind, pointer(y), 1)
    return y


@pytest.mark.parametrize("activation, has_skip, in_place", CASES)
@pytest.mark.parametrize("dtype", list(FLAGS))
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_normalize_and_gradients(layout, dtype, activation, has_skip, in_place):
    flag, channels, shape = FLAGS[dtype], layout[1], (1, layout[1], 1)
    x, dy, skip = (draw(layout, dtype, seed, mean) for seed, mean in ((0, 1.5), (1, 0), (2, 0)))
    mean, scale, beta = vectors(channels, 2, 3, 4)
    wide, gradient = x.astype(np.float64), dy.astype(np.float64)
    plain = (wide - mean.reshape(shape)) * scale.reshape(shape) + beta.reshape(shape)
    z = plain + skip.astype(np.float64) * has_skip
    share = {"none": 1, "relu": 0, "leaky": SLOPE}[activation]

    y = normalize(x, skip if has_skip else None, layout, (mean, scale, beta), activation)
    assert distance(y, np.where(z > 0, z, share * z)) < PRECISION[dtype]

    # Where rounding decides whether z was positive, either answer is right.
    positive = np.where(np.abs(z) < 1e-2 if dtype == "float16" else np.abs(z) < 1e-5, y > 0, z > 0)
    gradient = gradient * np.where(positive, 1, share)
    # In place v is z, about beta; else x, about the mean. Both are rounded to the tensor's precision.
    values, center = (plain, beta) if in_place else (wide, mean)
    rounded = center if dtype == "float64" else center.astype(np.float32).astype(np.float64)
    affine = [pointer(item) for item in ((center, scale, beta))]
    sums, centred = np.empty(channels), np.empty(channels)
    stored, out = y if in_place else x, pointer(y) if has_skip else None
    behind = ACTIVATIONS[activation], ctypes.c_double(SLOPE)
    arrays = [flag, pointer(stored), pointer(dy), out, in_place, *sizes(layout), *affine, *behind]
    d_skip = np.ones_like(x)
    for add in (0, 1):
        into = pointer(d_skip) if has_skip else None
        core().gluon_syncbn_gradient_sums(*arrays, into, add, 1, pointer(sums), pointer(centred))
    if has_skip:
        np.testing.assert_array_equal(d_skip, (2 * gradient).astype(dtype))  # written, then added
    size = np.abs(gradient).sum(axis=(0, 2)).max() + 1e-300
    expected = (gradient * (values - rounded.reshape(shape))).sum(axis=(0, 2))
    least = 2e-3 if in_place and dtype == "float16" else 1e-6  # z comes back rounded
    assert np.abs(sums - gradient.sum(axis=(0, 2))).max() / size < least
    assert np.abs(centred - expected).max() / (10 * size) < least

    factor, slope, constant = vectors(channels, 5, 6, 7)
    dx = np.empty_like(x)
    rest = [*(pointer(item) for item in (factor, slope, constant)), pointer(dx)]
    expected = (
        factor.reshape(shape) * gradient
        + slope.reshape(shape) * (values - rounded.reshape(shape))
        + constant.reshape(shape)
    )
    core().gluon_syncbn_input_gradient(*arrays, *rest, 0, 1)
    assert distance(dx, expected) < PRECISION[dtype]
    core().gluon_syncbn_input_gradient(*arrays, *rest, 1, 1)
    assert distance(dx, 2 * expected) < 2 * PRECISION[dtype]


def bfloat16(values):
    """Bits of the nearest bfloat16, ties to even."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bfloat16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def test_bfloat16():
    layout = (3, 4, 50)
    bits = bfloat16(draw(layout, "float32"))
    mean, m2 = np.empty(4), np.empty(4)
    core().gluon_syncbn_moments(12, pointer(bits), *sizes(layout), 1, pointer(mean), pointer(m2))
    wide = from_bfloat16(bits).astype(np.float64)
    assert distance(mean, wide.mean(axis=(0, 2))) < 1e-6
    assert distance(m2 / 150, wide.var(axis=(0, 2))) < 1e-5
    scale, beta = np.full(4, 0.5), np.full(4, 0.25)
    y = normalize(bits, None, layout, (mean, scale, beta))
    expected = (wide - mean.reshape(1, 4, 1)) * 0.5 + 0.25
    assert distance(from_bfloat16(y), expected) < 2**-8


def test_every_float16_survives():
    """The kernels convert by hand; NumPy knows all 65,536 of them."""
    x = np.arange(65536, dtype=np.uint16).view(np.float16).reshape(1, 1, -1)
    y = normalize(x, None, x.shape, (np.zeros(1), np.ones(1), np.zeros(1)))
    np.testing.assert_array_equal(y, x)


def test_rounding_to_float16():
    """Halfway cases, subnormal results, and what overflows."""
    rng = np.random.RandomState(0)
    magnitudes = 2.0 ** rng.uniform(-26, 17, 50000)
    x = (magnitudes * rng.choice([-1, 1], magnitudes.size)).astype(np.float16)
    x = x[np.isfinite(x)].reshape(1, 1, -1)
    for factor in (0.5, 1.5, 3.0, 0.0009765625):
        y = normalize(x, None, x.shape, (np.zeros(1), np.full(1, factor), np.zeros(1)))
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(y, (x.astype(np.float32) * np.float32(factor)).astype(np.float16))


@pytest.mark.parametrize("layout", [(8, 64, 900), (4000, 130, 1)], ids=str)
def test_threads_do_not_change_a_bit(layout):
    x = draw(layout, "float32")
    for one, other in zip(moments(x, layout, threads=1), moments(x, layout, threads=5)):
        np.testing.assert_array_equal(one, other)
