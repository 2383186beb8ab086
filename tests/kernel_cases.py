"""Forward and backward of two devices by the kernels alone, against the reference: on a CPU (test_native_kernels.py),
on the stand-in for a GPU (test_gpu_kernels.py), and on a GPU (check_kernels.py).

A device is as `gpu_kernels.Passes` wants it, and has ``place(values, offset)``: ``values`` in its memory, moved by
``offset`` of them against packs of 16 bytes, as an object with ``array``, ``numpy()``, and ``check()``, which raises
AssertionError if memory beside the array was written. `Cpu` is one, with `CpuPasses` in place of `Passes`.
"""

import ctypes
from typing import NamedTuple, Optional, Tuple

import numpy as np
from gpu_kernels import ACTIVATIONS, REQUEST_ADD, Passes, standalone
from reference import UNIT, Norm, Sized, check, check_all

# MXNet's type flags. NumPy has no bfloat16, which only CPUs know: it is the upper half of a float32, as uint16.
FLAGS = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 12}
DTYPES = ["float32", "float64", "float16"]
# (outer, channels, inner): rows as in NCHW, columns as in NHWC and (N, C); around the sizes at which loops change; runs
# that end beside packs of 16 bytes, fewer and more channels than a block takes, channels that several blocks share.
LAYOUTS = [(1, 1, 1), (1, 1, 3), (2, 3, 2), (3, 5, 49), (2, 40, 8), (2, 9, 5), (3, 20, 9), (2, 7, 25), (17, 2, 63)]
LAYOUTS += [(2, 2, 1024), (2, 3, 4097), (2, 3, 9001), (4, 70, 36), (5, 64, 64)]
LAYOUTS += [(130, 3, 2), (70, 3, 49), (40, 2, 127), (40, 2, 128)]
LAYOUTS += [(4, 2048, 1), (130, 257, 1), (1000, 3, 1), (70, 64, 1), (999, 16, 1)]
# What stands behind the norm: activation, whether a skip is added, whether the backward passes go by the output.
BEHIND = {
    "nothing": (None, False, False),
    "relu": ("relu", False, False),
    "leaky": ("leaky", False, False),
    "skip": ("relu", True, False),
    "in place": (None, False, True),
    "leaky in place": ("leaky", False, True),
}
# "far": a mean that is large against the deviation, where E[x²] − E[x]² would leave nothing of the variance. "border":
# the value from which a channel counts is far from all others. "first": the first image is. "constant": one channel,
# which has no variance at all.
DATA = ["usual", "usual", "usual", "far", "border", "first", "constant"]
SLOPE = 0.1
# Units of rounding that the kernels may be off; in float64 NumPy is itself off by some. Variances may be off by 1e-5,
# as up to 128 values are added up in float32; and with a "border" what is computed from them.
UNITS = {"float32": 16, "float64": 64}
VARIANCE_UNITS = {"float32": 160, "float64": 64}


class Case(NamedTuple):
    layout: Tuple[int, int, int]  # of the first device; the second has one image more than twice as many
    dtype: str
    behind: str = "nothing"
    data: str = "usual"
    offsets: Tuple[int, ...] = (0, 0, 0, 0)  # of x, y, dy and dx
    add: bool = False  # gradients are added to what is there
    has_scale: bool = True
    renorm: Optional[Tuple[float, float]] = None
    seed: int = 0


def draw_case(rng, layout, dtype, behind, data="usual") -> Case:
    """Draw the rest. Tensors are moved by the same number of values, or one of them is."""
    offset = int(rng.choice([0, 0, 1, 3]))
    offsets = tuple(np.roll([offset, 0, 0, 0], rng.randint(4)).tolist()) if rng.rand() < 0.3 else (offset,) * 4
    renorm = (1.5, 0.5) if rng.rand() < 0.3 else None
    rest = offsets, bool(rng.rand() < 0.3), bool(rng.rand() < 0.8), renorm, int(rng.randint(1 << 30))
    return Case(layout, dtype, behind, data, *rest)


def dealt(seed: int, count: int, dtypes=DTYPES) -> list:
    """As many cases, in which every layout, dtype, kind of data and of what stands behind comes as often as another."""
    rng = np.random.RandomState(seed)
    hands = [[choices[i] for i in rng.permutation(np.arange(count) % len(choices))] for choices in
             (LAYOUTS, dtypes, list(BEHIND), DATA)]  # fmt: skip
    return [draw_case(rng, *hand) for hand in zip(*hands)]


def what_is_wrong(case: Case, *devices) -> str:
    """On the first device, and whether all of these, or it once more, give the same bits; "" if all is well."""
    try:
        results = [run_two_devices(device, case) for device in (devices if len(devices) > 1 else devices * 2)]
        for others in results[1:]:
            assert all(np.array_equal(a, b) for a, b in zip(results[0], others)), "two runs differ in their bits"
        return ""
    except AssertionError as problem:
        return f"{problem} ({case})"


def narrow(values, dtype: str) -> np.ndarray:
    """To the nearest, ties to even."""
    if dtype != "bfloat16":
        return np.asarray(values).astype(dtype)
    bits = np.asarray(values).astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def widen(array) -> np.ndarray:
    if array.dtype == np.uint16:
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float64)


def draw(layout, dtype, seed=0, mean=1.5, std=2.0, data="usual") -> np.ndarray:
    rng = np.random.RandomState(seed)
    if data == "far":
        mean, std = {"float32": (3e4, 0.5), "float64": (3e6, 0.5), "float16": (300, 4), "bfloat16": (30, 4)}[dtype]
    x = rng.standard_normal(layout) * std + mean
    if data == "border":
        x[: (layout[0] + 5) // 6] += 1000 if dtype in ("float32", "float64") else 20
        x[0, :, : layout[2] // 2] = -5
    if data == "first":
        x[0] += 1000 if dtype in ("float32", "float64") else 20
    if data == "constant":
        x[:, 0] = np.float32(0.1)  # so that NumPy adds up without rounding
    return narrow(x, dtype)


def run_two_devices(device, case: Case) -> list:
    """Compare with the reference, and return all results, whose bits must be the same every time."""
    activation, has_skip, in_place = BEHIND[case.behind]
    dtype, channels, add = case.dtype, case.layout[1], case.add
    layouts = [case.layout, (2 * case.layout[0] + 1, *case.layout[1:])]
    rng = np.random.RandomState(case.seed)
    real = "float64" if dtype == "float64" else "float32"

    def place(offset, data="usual", mean=0.3):
        drawn = [draw(layout, dtype, rng.randint(1 << 30), mean, data=data) for layout in layouts]
        return [device.place(values, case.offsets[offset]) for values in drawn]

    def place_full(offset, value):
        return [device.place(narrow(np.full(layout, value), dtype), case.offsets[offset]) for layout in layouts]

    def place_vectors(low, high, count=2):
        return [device.place(rng.uniform(low, high, channels).astype(real)) for _ in range(count)]

    xs, dys, skips = place(0, case.data, 1.5), place(2), place(0)
    ys, dxs, d_skips = place_full(1, 0), place_full(3, 0.25), place_full(3, 0.25)
    (gamma,), (beta,) = place_vectors(0.5, 2, 1), place_vectors(-1, 1, 1)
    # A channel that is small beside the others; in place, one whose x̂ is not to be found in the output.
    gamma.array[-1] = 1e-9 if in_place else 1e-3
    running, gradients = place_vectors(0.5, 2), [place_vectors(0.5, 2) for _ in layouts]
    before = [item.numpy().copy() for item in running]
    running = [[device.place(values) for values in before] for _ in layouts]
    there = [[item.numpy().astype(np.float64) for item in own] for own in gradients]

    options = {"activation": activation or "none", "slope": SLOPE, "has_scale": case.has_scale}
    options.update(has_residual=has_skip, in_place=in_place)
    values = ys if in_place else xs  # that the backward passes read
    make = getattr(device, "passes", Passes)

    def make_passes(*tensors):
        return [
            make(device, dtype, shape, *(t.array for t in own), **options) for shape, *own in zip(layouts, *tensors)
        ]

    forwards = make_passes(xs, ys, *([skips] if has_skip else []))
    backwards = make_passes(values, dys, dxs, *([ys, d_skips] if has_skip else []))
    counts = [layout[0] * layout[2] for layout in layouts]

    for forward, x, own in zip(forwards, xs, running):
        forward.moments(x.array, *([[item.array for item in own]] if case.renorm else []))
    received = [forward.received() for forward in forwards]
    merged = sum(count * part[0] for count, part in zip(counts, received)) / sum(counts)
    m2 = sum(part[1] + count * (part[0] - merged) ** 2 for count, part in zip(counts, received))
    message = [merged, m2 / sum(counts)]
    if case.renorm:
        told = np.concatenate(before)
        assert all((part[2][: 2 * channels] == told).all() for part in received), "running statistics were lost"
        deviation = np.sqrt(before[1].astype(np.float64) + 1e-5)
        message.append(np.clip(np.sqrt(message[1] + 1e-5) / deviation, 1 / case.renorm[0], case.renorm[0]))
        message.append(np.clip((merged - before[0]) / deviation, -case.renorm[1], case.renorm[1]))
    for forward, x, y, skip, own in zip(forwards, xs, ys, skips, running):
        forward.send(*message)
        vectors = [item.array for item in (gamma, beta, *own)]
        added = {"residual": skip.array} if has_skip else {}
        forward.normalize(x.array, y.array, *vectors, sum(counts), renorm=case.renorm is not None, **added)

    sums, request = [], REQUEST_ADD if add else 1
    for backward, forward, v, y, dy, d_skip, own in zip(backwards, forwards, values, ys, dys, d_skips, gradients):
        backward.saved[:] = forward.saved
        vectors = [item.array for item in (gamma, beta, *own)]
        added = {"y": y.array, "d_residual": d_skip.array, "residual_request": request} if has_skip else {}
        backward.gradient_sums(v.array, dy.array, *vectors, request, request, **added)
        sums.append(backward.received())
    assert all(part[2][:3].tolist() == [sum(counts), 7, 0] for part in sums), "what forward told backward was lost"
    for backward, v, y, dy, dx, d_skip in zip(backwards, values, ys, dys, dxs, d_skips):
        backward.send(*(sum(part[i] for part in sums) for i in (0, 1)))
        lies_there = has_skip and not add  # dz, in d_skip
        behind = {"y": y.array} if has_skip and not lies_there else {}
        from_dy = d_skip.array if lies_there else dy.array
        backward.input_gradient(v.array, from_dy, dx.array, gamma.array, beta.array, add, **behind)
    device.synchronize()
    placed = [*xs, *skips, *dys, *ys, *dxs, *d_skips, gamma, beta]
    placed += [item for own in (*running, *gradients) for item in own]
    for item in placed:
        item.check()

    x, dy, skip, y, dx, d_skip = ([widen(t.numpy()) for t in own] for own in (xs, dys, skips, ys, dxs, d_skips))
    for part, one in zip(received, x):
        check_moments(one, *part[:2], real)
    norm = Norm(gamma.numpy(), beta.numpy(), scale=case.has_scale, renorm=case.renorm, activation=activation,
                slope=SLOPE, in_place=dtype if in_place else None, mean_is_rounded=dtype == "float64")  # fmt: skip
    norm.set_running(*before)
    expected = norm.step(x, dy, skip if has_skip else None, seen=y)
    units = (VARIANCE_UNITS if case.data in ("border", "first") else UNITS)[real]
    how = {"dtype": dtype, "units": units}

    def on_top(items):
        return [Sized(one.value + 0.25 * add, one.size + 0.25 * add) for one in items]

    # With a skip or a leaky ReLU each step is rounded, as if it were an operator of its own.
    check_all("y", y, expected.outputs, **how, roundings=2 if has_skip or activation == "leaky" else 1)
    check_all("dx", dx, on_top(expected.input_gradients), **how)
    if has_skip:
        check_all("d_skip", d_skip, on_top(expected.skip_gradients), **how)
    for own in running:
        for name, vector, wanted in zip(("mean", "variance"), own, norm.running()):
            allowed = units if name == "mean" else VARIANCE_UNITS[real]
            if case.data == "first" and real == "float64":  # a device counts from it, and loses units of its distance
                lost = 4 / allowed if name == "mean" else np.abs(expected.means[0].value)
                wanted = Sized(wanted.value, wanted.size + lost * (1 - norm.momentum) * 1000)
            check(f"running {name}", vector.numpy(), wanted, real, units=allowed)
    for i, wanted in enumerate((expected.gamma_gradient, expected.beta_gradient)):
        own = [there[n][i] * add for n in (0, 1)]
        total = sum(pair[i].numpy().astype(np.float64) for pair in gradients)
        most = Sized(wanted.value + sum(own), wanted.size + sum(np.abs(one) for one in own))
        check(f"gradient of {('gamma', 'beta')[i]}", total, most, real, units=units, roundings=2)
    return [item.numpy() for item in placed]


def check_moments(x, mean, m2, real="float32") -> None:
    """Of float64 values; their errors are in proportion to the deviation, however large the mean is."""
    if real == "float64":
        x = x.astype(np.longdouble)  # NumPy's own sums along the first axis are off by up to 150 units
    first = x[:1, :, :1]  # from which NumPy is exact, too
    rest = x - first
    found = first[0, :, 0] + rest.mean((0, 2)), rest.var((0, 2)), np.abs(rest).max((0, 2))
    exact, var, spread = (item.astype(np.float64) for item in found)
    lost = np.abs(exact) * (real == "float64")  # to which there is nothing wider
    check("mean of a device", mean, Sized(exact, spread + lost), "float64", units=UNITS[real], real=real)
    # Counted from the first value, the mean of the rest loses a unit of its distance.
    size = var + spread * (16 * UNIT[real] * spread + lost)
    check("M2 of a device", m2 / x[:, 0].size, Sized(var, size), "float64", units=VARIANCE_UNITS[real], real=real)
    still = spread == 0
    assert (mean[still] == x[0, still, 0]).all() and (m2[still] == 0).all(), "a constant channel has a variance"


class Cpu:
    """A device for `run_two_devices`, whose kernels run on so many threads."""

    def __init__(self, threads: int, place):
        self.threads, self.place, self.passes = threads, place, CpuPasses

    def synchronize(self) -> None:
        pass


class CpuPasses:
    """The kernels for CPUs as `Passes`; what csrc/cpu/operator.cpp does between them is done here."""

    def __init__(self, device, dtype, layout, *_, **options):
        self._dtype, self._threads, self._options, self._channels = dtype, device.threads, options, layout[1]
        self._sizes = [ctypes.c_int64(size) for size in layout]
        self._behind = ACTIVATIONS.index(options["activation"]), ctypes.c_double(options["slope"])
        self.saved = np.zeros((7, self._channels))

    def moments(self, x, running=()) -> None:
        mean, m2 = np.empty((2, self._channels))
        self._call("moments", x, *self._sizes, self._threads, mean, m2)
        self._left = mean, m2, np.ravel(running)

    def received(self) -> tuple:
        return self._left

    def send(self, *vectors) -> None:
        self._message = vectors

    def normalize(self, x, y, gamma, beta, running_mean, running_var, count, residual=None, renorm=False) -> None:
        mean, var, r, d = (*self._message, np.ones(self._channels), np.zeros(self._channels))[:4]
        gamma = gamma.astype(np.float64) if self._options["has_scale"] else np.ones(self._channels)
        beta, gamma, invstd, center = beta + gamma * d, gamma * r, 1 / np.sqrt(var + 1e-5), mean
        if self._options["in_place"]:
            least = 16 * UNIT[self._dtype] * np.maximum(1, np.abs(beta))
            gamma, center = np.where(np.abs(gamma) < least, np.copysign(least, gamma), gamma), beta
        to_hat = 1 / gamma if self._options["in_place"] else invstd
        self.saved[:] = center, to_hat, gamma * invstd, beta, r, d, np.full(self._channels, count)
        for running, now in ((running_mean, mean), (running_var, var)):
            running[:] = 0.9 * running.astype(np.float64) + 0.1 * now
        arrays = x, residual, *self._sizes, mean, gamma * invstd, beta
        self._call("normalize", *arrays, *self._behind, y, self._threads)

    def gradient_sums(self, v, dy, gamma, beta, d_gamma, d_beta, request, _, y=None, d_residual=None, **__) -> None:
        center, to_hat, factor, bias, r, d, count = self.saved
        add, (sums, centred) = request == REQUEST_ADD, np.empty((2, self._channels))
        arrays = v, dy, y, self._options["in_place"], *self._sizes, center, factor, bias, *self._behind
        self._call("gradient_sums", *arrays, d_residual, add, self._threads, sums, centred)
        s2 = to_hat * (centred - self._lost(center) * sums)
        d_beta[:] = d_beta * np.float64(add) + sums
        d_gamma[:] = d_gamma * np.float64(add) + (r * s2 + d * sums) * self._options["has_scale"]
        self._left = sums, s2, np.array([count[0], 7, 0])

    def input_gradient(self, v, dy, dx, gamma, beta, add=False, y=None) -> None:
        center, to_hat, factor, bias, _, _, count = self.saved
        m1, m2 = self._message / count
        slope = -factor * to_hat * m2
        constant = -factor * m1 - slope * self._lost(center)
        behind = (0, ctypes.c_double(0)) if self._options["has_residual"] and y is None else self._behind
        arrays = v, dy, y, self._options["in_place"], *self._sizes, center, factor, bias, *behind
        self._call("input_gradient", *arrays, slope, constant, dx, add, self._threads)

    def _lost(self, center):
        """To the kernels it is a number of their own precision."""
        return center - center.astype("float64" if self._dtype == "float64" else "float32")

    def _call(self, name, *arguments) -> None:
        # Vectors are rows of `saved`, or made here; tensors are dense.
        told = [item.ctypes.data_as(ctypes.c_void_p) if isinstance(item, np.ndarray) else item for item in arguments]
        getattr(standalone.library(), f"gluon_syncbn_{name}")(FLAGS[self._dtype], *told)
