"""Forward and backward of two devices by the kernels for GPUs, against the oracle: what runs on the stand-in
(test_gpu_kernels.py) and on a GPU (check_kernels.py).

A device is as `gpu_kernels.Passes` wants it, and has ``place(values, offset)``: ``values`` in its memory, moved by
``offset`` of them against packs of 16 bytes, as an object with ``array``, ``numpy()``, and ``check()``, which raises
AssertionError if memory beside the array was written.
"""

import numpy as np
import oracle
from gpu_kernels import REQUEST_ADD, Passes

PRECISION = {"float32": 2e-6, "float64": 1e-13, "float16": 2e-3}
VECTORS = {"float32": 2e-6, "float64": 1e-13, "float16": 2e-6}  # per-channel results, which are not rounded to half


def draw(layout, dtype, seed=0, mean=1.5, std=2.0):
    rng = np.random.RandomState(seed)
    return (rng.standard_normal(layout) * std + mean).astype(dtype)


def draw_vectors(passes, *seeds):
    return [np.random.RandomState(seed).uniform(0.5, 2, passes.layout[1]).astype(passes.real) for seed in seeds]


def run_two_devices(
    gpu, layouts, dtype, relu, offsets=(0, 0, 0, 0), add=False, has_scale=True, mean=1.5, std=2.0
) -> list:
    """Compare with the oracle, and return all results, whose bits must be the same every time.

    ``offsets`` are those of x, y, dy and dx; with ``add``, gradients are added to what is there.
    """
    xs = [gpu.place(draw(layout, dtype, seed, mean, std), offsets[0]) for seed, layout in enumerate(layouts)]
    dys = [gpu.place(draw(layout, dtype, 10 + seed, mean=0.3), offsets[2]) for seed, layout in enumerate(layouts)]
    ys = [gpu.place(np.zeros(layout, dtype), offsets[1]) for layout in layouts]
    dxs = [gpu.place(np.full(layout, 0.25, dtype), offsets[3]) for layout in layouts]
    channels = layouts[0][1]
    devices = [
        Passes(gpu, dtype, layout, x.array, dy.array, dx.array, relu=relu, has_scale=has_scale)
        for layout, x, dy, dx in zip(layouts, xs, dys, dxs)
    ]
    forwards = [
        Passes(gpu, dtype, layout, x.array, y.array, relu=relu, has_scale=has_scale)
        for layout, x, y in zip(layouts, xs, ys)
    ]
    real = devices[0].real
    gamma, beta = draw_vectors(devices[0], 3, 4)
    beta -= 1
    affine = [gpu.place(vector) for vector in (gamma, beta)]
    counts = [layout[0] * layout[2] for layout in layouts]

    for forward, x in zip(forwards, xs):
        forward.moments(x.array)
    received = [forward.received() for forward in forwards]
    merged = sum(count * part[0] for count, part in zip(counts, received)) / sum(counts)
    m2 = sum(part[1] + count * (part[0] - merged) ** 2 for count, part in zip(counts, received))
    running = [[gpu.place(np.full(channels, 0.5, real)) for _ in range(2)] for _ in layouts]
    for forward, x, y, own in zip(forwards, xs, ys, running):
        forward.send(merged, m2 / sum(counts))
        forward.normalize(x.array, y.array, *(item.array for item in (*affine, *own)), sum(counts))

    sums = []
    before = (0.25, 2.0) if add else (0, 0)
    gradients = [[gpu.place(np.full(channels, 2.0, real)) for _ in range(2)] for _ in layouts]
    request = REQUEST_ADD if add else 1
    for device, forward, x, dy, own in zip(devices, forwards, xs, dys, gradients):
        device.saved[:] = forward.saved
        vectors = [item.array for item in (*affine, *own)]
        device.gradient_sums(x.array, dy.array, *vectors, request, request)
        sums.append(device.received())
    for device, x, dy, dx in zip(devices, xs, dys, dxs):
        device.send(*(sum(part[i] for part in sums) for i in (0, 1)))
        device.input_gradient(x.array, dy.array, dx.array, *(item.array for item in affine), add)
    gpu.synchronize()

    placed = [*xs, *dys, *ys, *dxs, *affine, *(item for own in (*running, *gradients) for item in own)]
    for item in placed:
        item.check()
    scale = gamma if has_scale else np.ones(channels)
    x64 = [x.numpy().astype(np.float64) for x in xs]
    plain = oracle.batch_norm(x64, scale, beta)
    passed = [dy.numpy().astype(np.float64) for dy in dys]
    if relu:  # where rounding decides whether an output is positive, either answer is right
        got = [y.numpy() > 0 for y in ys]
        positive = [np.where(np.abs(y) < 1e-5, mine, y > 0) for y, mine in zip(plain.outputs, got)]
        passed = [part * mask for part, mask in zip(passed, positive)]
    expected = oracle.batch_norm(x64, scale, beta, heads=passed)
    outputs = [np.maximum(y, 0) if relu else y for y in expected.outputs]
    _compare("y", [y.numpy() for y in ys], outputs, PRECISION[dtype])
    input_gradients = [dx + before[0] for dx in expected.input_gradients]
    _compare("dx", [dx.numpy() for dx in dxs], input_gradients, 4 * PRECISION[dtype])
    for own in running:
        wanted = [0.45 + 0.1 * expected.mean, 0.45 + 0.1 * expected.var]
        _compare("running statistics", [item.numpy() for item in own], wanted, VECTORS[dtype])
    d_gamma = expected.gamma_gradient * has_scale + 2 * before[1]
    got = sum(np.array([item.numpy() for item in own], np.float64) for own in gradients)
    magnitude = max(np.abs(np.sum([np.abs(part).sum(axis=(0, 2)) for part in passed], axis=0)).max(), 1)
    worst = np.abs(got - [d_gamma, expected.beta_gradient + 2 * before[1]]).max() / magnitude
    assert worst < VECTORS[dtype], f"parameter gradients are off by {worst:.1e}, more than {VECTORS[dtype]:.1e}"
    assert all(part[2].tolist() == [sum(counts), 7, 0] for part in sums), "what forward told backward was lost"
    return [item.numpy() for item in placed]


def _compare(name, actual, expected, limit) -> None:
    worst = oracle.distance(actual, expected)
    assert worst < limit, f"{name}: off by {worst:.1e} of the largest, more than {limit:.1e}"
