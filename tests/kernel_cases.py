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


# What stands behind the norm: activation, whether a skip is added, whether the backward passes go by the output.
BEHIND = {
    "nothing": ("none", False, False),
    "relu": ("relu", False, False),
    "leaky": ("leaky", False, False),
    "skip": ("relu", True, False),
    "in place": ("none", False, True),
    "leaky in place": ("leaky", False, True),
}
SLOPE = 0.1


def run_two_devices(
    gpu,
    layouts,
    dtype,
    behind="nothing",
    offsets=(0, 0, 0, 0),
    add=False,
    has_scale=True,
    mean=1.5,
    std=2.0,
    renorm=None,
) -> list:
    """Compare with the oracle, and return all results, whose bits must be the same every time.

    ``offsets`` are those of x, y, dy and dx; with ``add``, gradients are added to what is there. ``renorm`` is
    (r_max, d_max).
    """
    activation, has_skip, in_place = BEHIND[behind]
    share = {"none": 1, "relu": 0, "leaky": SLOPE}[activation]
    xs = [gpu.place(draw(layout, dtype, seed, mean, std), offsets[0]) for seed, layout in enumerate(layouts)]
    dys = [gpu.place(draw(layout, dtype, 10 + seed, mean=0.3), offsets[2]) for seed, layout in enumerate(layouts)]
    skips = [gpu.place(draw(layout, dtype, 20 + seed, mean=0.3), offsets[0]) for seed, layout in enumerate(layouts)]
    ys = [gpu.place(np.zeros(layout, dtype), offsets[1]) for layout in layouts]
    dxs = [gpu.place(np.full(layout, 0.25, dtype), offsets[3]) for layout in layouts]
    d_skips = [gpu.place(np.full(layout, 0.25, dtype), offsets[3]) for layout in layouts]
    channels = layouts[0][1]
    options = {"activation": activation, "slope": SLOPE, "has_scale": has_scale}
    options.update(has_residual=has_skip, in_place=in_place)
    touched = [  # in the backward passes
        [ys[i] if in_place else xs[i], dys[i], dxs[i], *([ys[i], d_skips[i]] if has_skip else [])]
        for i in range(len(layouts))
    ]
    devices = [
        Passes(gpu, dtype, layout, *(item.array for item in tensors), **options)
        for layout, tensors in zip(layouts, touched)
    ]
    forwards = [
        Passes(gpu, dtype, layout, x.array, y.array, *([skip.array] if has_skip else []), **options)
        for layout, x, y, skip in zip(layouts, xs, ys, skips)
    ]
    real = devices[0].real
    gamma, beta = draw_vectors(devices[0], 3, 4)
    beta -= 1
    affine = [gpu.place(vector) for vector in (gamma, beta)]
    counts = [layout[0] * layout[2] for layout in layouts]
    running = [[gpu.place(np.full(channels, 0.5, real)) for _ in range(2)] for _ in layouts]

    for forward, x, own in zip(forwards, xs, running):
        forward.moments(x.array, *([[item.array for item in own]] if renorm else []))
    received = [forward.received() for forward in forwards]
    merged = sum(count * part[0] for count, part in zip(counts, received)) / sum(counts)
    m2 = sum(part[1] + count * (part[0] - merged) ** 2 for count, part in zip(counts, received))
    message = [merged, m2 / sum(counts)]
    r, d = np.ones(channels), np.zeros(channels)
    if renorm:
        assert all((part[2][: 2 * channels] == 0.5).all() for part in received), "running statistics were lost"
        r = np.clip(np.sqrt((message[1] + 1e-5) / (0.5 + 1e-5)), 1 / renorm[0], renorm[0])
        d = np.clip((merged - 0.5) / np.sqrt(0.5 + 1e-5), -renorm[1], renorm[1])
        message += [r, d]
    for forward, x, y, skip, own in zip(forwards, xs, ys, skips, running):
        forward.send(*message)
        vectors = [item.array for item in (*affine, *own)]
        added = {"residual": skip.array} if has_skip else {}
        forward.normalize(x.array, y.array, *vectors, sum(counts), renorm=renorm is not None, **added)

    sums = []
    before = (0.25, 2.0) if add else (0, 0)
    gradients = [[gpu.place(np.full(channels, 2.0, real)) for _ in range(2)] for _ in layouts]
    request = REQUEST_ADD if add else 1
    values = ys if in_place else xs
    for device, forward, v, y, dy, d_skip, own in zip(devices, forwards, values, ys, dys, d_skips, gradients):
        device.saved[:] = forward.saved
        vectors = [item.array for item in (*affine, *own)]
        added = {"y": y.array, "d_residual": d_skip.array, "residual_request": request} if has_skip else {}
        device.gradient_sums(v.array, dy.array, *vectors, request, request, **added)
        sums.append(device.received())
    for device, v, y, dy, dx, d_skip in zip(devices, values, ys, dys, dxs, d_skips):
        device.send(*(sum(part[i] for part in sums) for i in (0, 1)))
        vectors = [item.array for item in affine]
        if has_skip and not add:
            device.input_gradient(v.array, d_skip.array, dx.array, *vectors, add)
        else:
            device.input_gradient(v.array, dy.array, dx.array, *vectors, add, **({"y": y.array} if has_skip else {}))
    gpu.synchronize()

    placed = [*xs, *skips, *dys, *ys, *dxs, *d_skips, *affine]
    placed += [item for own in (*running, *gradients) for item in own]
    for item in placed:
        item.check()
    # Batch Renormalization is another gamma and beta, which count as constants.
    scale = gamma if has_scale else np.ones(channels)
    effective = scale * r, beta + scale * d
    x64 = [x.numpy().astype(np.float64) for x in xs]
    plain = oracle.batch_norm(x64, *effective)
    zs = [z + skip.numpy().astype(np.float64) * has_skip for z, skip in zip(plain.outputs, skips)]
    # Where rounding decides whether z is positive, either answer is right.
    got = [y.numpy() > 0 for y in ys]
    limit = 1e-2 if dtype == "float16" else 1e-5
    positive = [np.where(np.abs(z) < limit, mine, z > 0) for z, mine in zip(zs, got)]
    passed = [dy.numpy().astype(np.float64) * np.where(mask, 1, share) for dy, mask in zip(dys, positive)]
    expected = oracle.batch_norm(x64, *effective, heads=passed)
    _compare("y", [y.numpy() for y in ys], [np.where(z > 0, z, share * z) for z in zs], PRECISION[dtype])
    input_gradients = [dx + before[0] for dx in expected.input_gradients]
    _compare("dx", [dx.numpy() for dx in dxs], input_gradients, 4 * PRECISION[dtype])
    if has_skip:
        _compare("d_skip", [item.numpy() for item in d_skips], [item + before[0] for item in passed], PRECISION[dtype])
    for own in running:
        wanted = [0.45 + 0.1 * expected.mean, 0.45 + 0.1 * expected.var]
        _compare("running statistics", [item.numpy() for item in own], wanted, VECTORS[dtype])
    d_gamma = (r * expected.gamma_gradient + d * expected.beta_gradient) * has_scale + 2 * before[1]
    got = sum(np.array([item.numpy() for item in own], np.float64) for own in gradients)
    magnitude = max(np.abs(np.sum([np.abs(part).sum(axis=(0, 2)) for part in passed], axis=0)).max(), 1)
    worst = np.abs(got - [d_gamma, expected.beta_gradient + 2 * before[1]]).max() / magnitude
    limit = PRECISION[dtype] if in_place else VECTORS[dtype]  # z comes back rounded
    assert worst < limit, f"parameter gradients are off by {worst:.1e}, more than {limit:.1e}"
    assert all(part[2][:3].tolist() == [sum(counts), 7, 0] for part in sums), "what forward told backward was lost"
    return [item.numpy() for item in placed]


def _compare(name, actual, expected, limit) -> None:
    worst = oracle.distance(actual, expected)
    if worst < limit:
        return
    # Where, on which device.
    gaps = [np.nan_to_num(np.abs(a.astype(np.float64) - b), nan=np.inf) for a, b in zip(actual, expected)]
    device = int(np.argmax([gap.max() for gap in gaps]))
    at = tuple(int(i) for i in np.unravel_index(np.argmax(gaps[device]), gaps[device].shape))
    raise AssertionError(
        f"{name}: off by {worst:.1e} of the largest, more than {limit:.1e}; the most at {at} of device {device}: "
        f"{actual[device][at]}, not {expected[device][at]}"
    )
