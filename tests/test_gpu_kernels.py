"""The GPU's kernels against the oracle, with the CPU standing in for the GPU (stand_in/gpu_threads.h).

The source is the one that a GPU gets. What only a GPU can show is in tests/gpu and benchmarks/gpu.py.
"""

import ctypes
from types import SimpleNamespace

import gpu as benchmark
import numpy as np
import oracle
import pytest
from gpu_kernels import REQUEST_ADD, REQUEST_NULL, Passes
from stand_in import Fenced, StandInGpu, build_kernels

# (outer, channels, inner): rows as in NCHW, columns as in NHWC and (N, C); runs that end beside packs of 16 bytes,
# fewer and more channels than a block takes, channels that several blocks share.
LAYOUTS = [
    (1, 1, 1),
    (1, 1, 3),
    (2, 3, 2),
    (3, 5, 49),
    (2, 40, 8),
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
PRECISION = {"float32": 2e-6, "float64": 1e-13, "float16": 2e-3}
VECTORS = {"float32": 2e-6, "float64": 1e-13, "float16": 2e-6}  # per-channel results, which are not rounded to half


@pytest.fixture(scope="module")
def gpu(tmp_path_factory):
    return StandInGpu(build_kernels(tmp_path_factory.mktemp("kernels")))


def draw(layout, dtype, seed=0, mean=1.5, std=2.0):
    rng = np.random.RandomState(seed)
    return (rng.standard_normal(layout) * std + mean).astype(dtype)


def vectors(passes, *seeds):
    return [np.random.RandomState(seed).uniform(0.5, 2, passes.layout[1]).astype(passes.real) for seed in seeds]


def moments(gpu, x, offset=0):
    x = Fenced(x, offset)
    passes = Passes(gpu, x.array.dtype.name, x.array.shape, x.array)
    passes.moments(x.array)
    x.check()
    return passes.received()[:2]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_two_devices_give_what_the_oracle_says(gpu, layout, dtype):
    """Forward and backward on two "GPUs" of different sizes, which bring their messages to a host, with ReLU."""
    run_two_devices(gpu, [layout, (2 * layout[0] + 1, *layout[1:])], dtype, relu=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", [(3, 5, 49), (2, 2, 1024), (70, 64, 1)], ids=str)
@pytest.mark.parametrize("offsets", [(1, 1, 1, 1), (3, 3, 3, 3), (0, 1, 0, 0), (0, 0, 1, 0)], ids=str)
def test_tensors_that_are_not_aligned(gpu, layout, dtype, offsets):
    """All by the same number of values, or one of x, y, dy and dx."""
    run_two_devices(gpu, [layout, layout], dtype, relu=False, offsets=offsets)


@pytest.mark.parametrize("has_scale", [True, False])
@pytest.mark.parametrize("layout", [(3, 5, 49), (70, 64, 1)], ids=str)
def test_gradients_are_added_where_asked(gpu, layout, has_scale):
    run_two_devices(gpu, [layout, layout], "float32", relu=True, add=True, has_scale=has_scale)


@pytest.mark.parametrize("layout", [(20, 5, 49), (300, 64, 1)], ids=str)
def test_both_directions_where_the_mean_is_large(gpu, layout):
    """What float32 cannot hold of the mean must not be lost on the way."""
    run_two_devices(gpu, [layout, layout], "float32", relu=False, mean=3e4, std=0.5)


def run_two_devices(gpu, layouts, dtype, relu, offsets=(0, 0, 0, 0), add=False, has_scale=True, mean=1.5, std=2.0):
    xs = [Fenced(draw(layout, dtype, seed, mean, std), offsets[0]) for seed, layout in enumerate(layouts)]
    dys = [Fenced(draw(layout, dtype, 10 + seed, mean=0.3), offsets[2]) for seed, layout in enumerate(layouts)]
    ys = [Fenced(np.zeros(layout, dtype), offsets[1]) for layout in layouts]
    dxs = [Fenced(np.full(layout, 0.25, dtype), offsets[3]) for layout in layouts]
    channels = layouts[0][1]
    devices = [
        Passes(gpu, dtype, layout, x.array, dy.array, dx.array, relu=relu, has_scale=has_scale)
        for layout, x, dy, dx in zip(layouts, xs, dys, dxs)
    ]
    forwards = [
        Passes(gpu, dtype, layout, x.array, y.array, relu=relu, has_scale=has_scale)
        for layout, x, y in zip(layouts, xs, ys)
    ]
    gamma, beta = vectors(devices[0], 3, 4)
    beta -= 1
    counts = [layout[0] * layout[2] for layout in layouts]

    for forward, x in zip(forwards, xs):
        forward.moments(x.array)
    received = [forward.received() for forward in forwards]
    mean = sum(count * part[0] for count, part in zip(counts, received)) / sum(counts)
    m2 = sum(part[1] + count * (part[0] - mean) ** 2 for count, part in zip(counts, received))
    running = [np.full(channels, 0.5, devices[0].real) for _ in range(2)]
    for i, (forward, x, y) in enumerate(zip(forwards, xs, ys)):
        forward.send(mean, m2 / sum(counts))
        mine = running if i == 0 else [item.copy() for item in running]
        forward.normalize(x.array, y.array, gamma, beta, *mine, sum(counts))

    sums = []
    gradients = [np.full((2, channels), 2.0, devices[0].real) for _ in devices]
    request = REQUEST_ADD if add else 1
    for device, forward, x, dy, gradient in zip(devices, forwards, xs, dys, gradients):
        device.saved[:] = forward.saved
        device.gradient_sums(x.array, dy.array, gamma, beta, *gradient, request, request)
        sums.append(device.received())
    for device, x, dy, dx in zip(devices, xs, dys, dxs):
        device.send(*(sum(part[i] for part in sums) for i in (0, 1)))
        device.input_gradient(x.array, dy.array, dx.array, gamma, beta, add)

    for fenced in [*xs, *dys, *ys, *dxs]:
        fenced.check()
    scale = gamma if has_scale else np.ones(channels)
    x64 = [x.array.astype(np.float64) for x in xs]
    plain = oracle.batch_norm(x64, scale, beta)
    passed = [dy.array.astype(np.float64) for dy in dys]
    if relu:  # where rounding decides whether an output is positive, either answer is right
        positive = [np.where(np.abs(y) < 1e-5, got.array > 0, y > 0) for y, got in zip(plain.outputs, ys)]
        passed = [part * mask for part, mask in zip(passed, positive)]
    expected = oracle.batch_norm(x64, scale, beta, heads=passed)
    outputs = [np.maximum(y, 0) if relu else y for y in expected.outputs]
    before = (0.25, 2.0) if add else (0, 0)
    assert oracle.distance([y.array for y in ys], outputs) < PRECISION[dtype]
    input_gradients = [dx + before[0] for dx in expected.input_gradients]
    assert oracle.distance([dx.array for dx in dxs], input_gradients) < 4 * PRECISION[dtype]
    assert oracle.distance(running, [0.45 + 0.1 * expected.mean, 0.45 + 0.1 * expected.var]) < VECTORS[dtype]
    d_gamma = expected.gamma_gradient * has_scale + 2 * before[1]
    got = sum(gradient.astype(np.float64) for gradient in gradients)
    magnitude = max(np.abs(np.sum([np.abs(part).sum(axis=(0, 2)) for part in passed], axis=0)).max(), 1)
    assert np.abs(got - [d_gamma, expected.beta_gradient + 2 * before[1]]).max() < VECTORS[dtype] * magnitude
    assert all(part[2].tolist() == [sum(counts), 7, 0] for part in sums)


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
    passes = Passes(gpu, "float32", layout, x)
    passes.relu = True
    passes.send(np.zeros(layout[1]), np.ones(layout[1]))
    y, running = np.zeros(layout, "float32"), np.ones((2, layout[1]), "float32")
    passes.normalize(x, y, *vectors(passes, 3, 4), *running, 1)
    assert np.isnan(y[-1, 1, -1]) if np.isnan(value) else y[-1, 1, -1] == np.inf
    assert np.isfinite(y).sum() == y.size - 1


@pytest.mark.parametrize("layout", [(3, 5, 49), (70, 64, 1)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_prediction(gpu, layout, dtype):
    x = draw(layout, dtype)
    y = np.zeros_like(x)
    passes = Passes(gpu, dtype, layout, x, y)
    gamma, beta, mean, var = vectors(passes, 3, 4, 5, 6)
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
    assert passes.received()[2].tolist() == [0, 7, 0]
    assert (d_beta == 0).all() and (d_gamma != 0).all()
    passes.input_gradient(x, dy, dx, gamma, beta)
    assert oracle.distance([dx], [dy.astype(np.float64) * wide[0] / np.sqrt(wide[3] + 1e-5)]) < PRECISION[dtype]


def test_outputs_that_nobody_wants_are_not_written(gpu):
    x = draw((3, 5, 49), "float32")
    y = np.zeros_like(x)
    passes = Passes(gpu, "float32", x.shape, x, y)
    gamma, beta, mean, var = vectors(passes, 3, 4, 5, 6)
    passes.send(np.zeros(5), np.ones(5))
    passes.normalize(x, y, gamma, beta, mean, var, count=147, wants_y=False)
    assert (y == 0).all()
    assert (passes.saved[:5] == 0).all() and passes.saved[10] == 147


def test_an_output_can_be_lost(gpu):
    values = Fenced(np.zeros(1000, "float16"))
    gpu.launch("lose", "float16", (2, 1), (256, 1), [values.array, ctypes.c_longlong(999)])
    values.check()
    assert np.isnan(values.array[:999]).all() and values.array[999] == 0


@pytest.mark.parametrize("layout", [(4, 3, 20001), (2000, 20, 1)], ids=str)
def test_results_are_the_same_bits_in_any_order_of_blocks_and_threads(gpu, layout):
    """gpu_threads.h draws the orders anew for each launch. The counters are used again, as by the operator."""
    x = draw(layout, "float32")
    passes = Passes(gpu, "float32", layout, x)
    results = []
    for _ in range(3):
        passes.moments(x)
        results.append(np.array(passes.received()[:2]))
    assert passes.launch.grid[1] > 1
    assert (results[0] == results[1]).all() and (results[0] == results[2]).all()


def test_the_benchmarks_own_check(gpu):
    """benchmarks/gpu.py, with arrays of NumPy's in place of CuPy's; and it says so where it cannot run."""
    arrays = SimpleNamespace(asarray=np.array, asnumpy=np.asarray, ones=np.ones)
    benchmark.check(gpu, arrays, 6)
    with pytest.raises(AssertionError, match="y is off by"):
        benchmark.check(gpu, SimpleNamespace(**{**vars(arrays), "ones": np.zeros}), 1)
    assert benchmark.main([]) == 3
