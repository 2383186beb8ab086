"""Batch Normalization over several devices in NumPy float64: what every numeric test compares with.

It shares no code with the package. test_reference.py checks it by finite differences and by `nn.BatchNorm`.

A `Norm` is a layer with what follows it. `Norm.step` gives what one pass of all devices must give, and for each
result a size: the sum of the magnitudes that its rounding errors are proportional to, by channel. `check` allows a few
units of rounding of that size in each channel by itself, so that a small channel is not hidden by a large one.
"""

from typing import List, NamedTuple, Optional

import numpy as np

# Half the distance of two neighbouring numbers, as a share of their size.
UNIT = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
SMALLEST = {"float64": 0.0, "float32": 0.0, "float16": 2.0**-24, "bfloat16": 0.0}  # absolute, of subnormal numbers


class Sized(NamedTuple):
    """A result, and the size of what it was computed from: a number per channel."""

    value: np.ndarray
    size: np.ndarray


def total(parts) -> Sized:
    """The sum of such results."""
    return Sized(*(sum(items) for items in zip(*parts)))


class Step(NamedTuple):
    """What one pass of all devices must give; lists have an item for each device that takes part."""

    outputs: List[Sized]
    input_gradients: List[Sized]
    skip_gradients: List[Sized]
    gamma_gradient: Sized  # summed over all devices, as that of beta
    beta_gradient: Sized
    means: List[Sized]  # of the batch that the device is in
    variances: List[Sized]


class Norm:
    """A layer, with what follows it: ``activation(γ·(r·x̂ + d) + β + skip)``.

    ``gamma``, ``beta``: (C,). ``activation``: None, "relu" or "leaky", with ``slope``. ``group_size``: neighbours that
    share a batch; all devices by default. ``renorm``: (r_max, d_max). ``in_place``: the dtype whose x̂ is found in the
    output, which moves a γ near 0. ``mean_is_rounded``: the mean was rounded to the vectors' dtype before it was
    subtracted, as in `nn.BatchNorm`.
    """

    def __init__(
        self,
        gamma,
        beta,
        *,
        axis: int = 1,
        epsilon: float = 1e-5,
        momentum: float = 0.9,
        scale: bool = True,
        group_size: Optional[int] = None,
        renorm=None,
        activation: Optional[str] = None,
        slope: float = 0.25,
        in_place: Optional[str] = None,
        frozen: bool = False,
        mean_is_rounded: bool = False,
    ):
        self.gamma, self.beta = (np.asarray(vector, np.float64) for vector in (gamma, beta))
        self.axis, self.epsilon, self.momentum, self.scale = axis, epsilon, momentum, scale
        self.group_size, self.activation, self.slope, self.in_place = group_size, activation, slope, in_place
        self.frozen, self.mean_is_rounded = frozen, mean_is_rounded
        self.renorm = renorm
        self._statistics = {}  # by group

    @property
    def channels(self) -> int:
        return len(self.beta)

    def running(self, device: int = 0):
        """Running mean and variance of a device, with their sizes."""
        fresh = Sized(np.zeros(self.channels), np.zeros(self.channels)), Sized(*2 * [np.ones(self.channels)])
        return self._statistics.get(self._group_of(device), fresh)

    def set_running(self, mean, var, device: int = 0) -> None:
        """Set the running statistics of the group of ``device``."""
        values = (np.asarray(vector, np.float64) for vector in (mean, var))
        self._statistics[self._group_of(device)] = tuple(Sized(value, np.abs(value)) for value in values)

    def step(self, shards, heads=None, skips=None, *, used=None, training=True, seen=None) -> Step:
        """One pass of the devices ``used`` (all by default) with an array in ``shards`` for each.

        ``heads``: gradients of the outputs, by default zero. ``seen``: the outputs that the test has, which say on
        which side of the edge of the activation each value was; where that was wrong, the outputs differ.
        """
        used = list(range(len(shards)) if used is None else used)
        heads = [np.zeros(shard.shape) for shard in shards] if heads is None else heads
        is_in_batch = training and not self.frozen
        limits = self.renorm
        devices: list = [None] * len(used)
        d_gamma, d_beta = [], []
        for group in sorted({self._group_of(device) for device in used}):
            places = [place for place, device in enumerate(used) if self._group_of(device) == group]
            x, dy, skip, positive = (
                None if items is None else np.concatenate([self._flat(items[place]) for place in places])
                for items in (shards, heads, skips, seen)
            )
            first = used[places[0]]
            made = self._batch(x, dy, skip, positive, self.running(first), is_in_batch, limits)
            borders = np.cumsum([self._flat(shards[place]).shape[0] for place in places])[:-1]
            arrays = [np.split(item.value, borders) for item in made[:3]]
            for place, *parts in zip(places, *arrays):
                shape = shards[place].shape
                results = [Sized(self._shaped(part, shape), item.size) for part, item in zip(parts, made)]
                devices[place] = [*results, *made[5:]]
            d_gamma.append(made[3])
            d_beta.append(made[4])
            if is_in_batch:
                self._average(first, *made[5:])
        outputs, dx, d_skip, means, variances = zip(*devices)
        return Step(list(outputs), list(dx), list(d_skip), total(d_gamma), total(d_beta), list(means), list(variances))

    def _batch(self, x, dy, skip, seen, running, is_in_batch, limits):
        """Of one batch, as (values, C)."""
        mean, var = (x.mean(0), x.var(0)) if is_in_batch else (item.value for item in running)
        std = np.sqrt(var + self.epsilon)
        r, d, size_d = np.ones(self.channels), np.zeros(self.channels), np.zeros(self.channels)
        if is_in_batch and limits is not None:
            deviation = np.sqrt(running[1].value + self.epsilon)
            r = np.clip(std / deviation, 1 / limits[0], limits[0])
            d = np.clip((mean - running[0].value) / deviation, -limits[1], limits[1])
            size_d = (np.abs(mean) + np.abs(running[0].value)) / deviation
        hat = (x - mean) / std
        gamma, beta = (self.gamma if self.scale else np.ones(self.channels)), self.beta
        affine = r * gamma, beta + d * gamma
        if self.in_place is not None:
            least = 16 * UNIT[self.in_place] * np.maximum(1, np.abs(affine[1]))
            affine = np.where(np.abs(affine[0]) < least, np.copysign(least, affine[0]), affine[0]), affine[1]
        # What x̂ has lost, in units of rounding: to a mean that was rounded; on the way back, to an output that was.
        lost = lost_in_output = np.abs(mean) / std if self.mean_is_rounded else np.zeros(self.channels)
        if self.in_place is not None:
            units = UNIT[self.in_place] / UNIT["float64" if self.in_place == "float64" else "float32"]
            lost = lost + units * (np.abs(hat).max(0) + np.abs(affine[1] / affine[0]))
        z = affine[0] * hat + affine[1] + (0 if skip is None else skip)
        share = {None: 1.0, "relu": 0.0, "leaky": self.slope}[self.activation]
        slopes = np.where((z if seen is None else seen) > 0, 1.0, share)
        y = np.where(z > 0, z, share * z)

        dz = dy * slopes
        wide, most = np.abs(hat).max(0) + lost, np.abs(dz).max(0)
        m1, m2 = (dz.mean(0), (dz * hat).mean(0)) if is_in_batch else (0.0, 0.0)
        factor = affine[0] / std
        dx = factor * (dz - m1 - hat * m2)
        absolute = np.abs(dz)
        size_y = (
            np.abs(affine[0]) * (np.abs(hat).max(0) + lost_in_output)
            + np.abs(gamma) * size_d
            + np.abs(beta)
            + (0 if skip is None else np.abs(skip).max(0))
        )
        size_beta = absolute.sum(0)
        # A mean that is a unit of the widest distance off moves every x̂ alike.
        size_sum = (absolute * (np.abs(hat) + lost)).sum(0) + np.abs(dz.sum(0)) * np.abs(hat).max(0)
        size_gamma = np.abs(r) * size_sum + size_d * size_beta
        size_dx = np.abs(factor) * (most + (size_beta + wide * size_sum) / len(dz) * is_in_batch)
        d_gamma = (dz * (hat * r + d)).sum(0) * self.scale
        return (
            Sized(y, size_y),
            Sized(dx, size_dx),
            Sized(dz, most),
            Sized(d_gamma, size_gamma),
            Sized(dz.sum(0), size_beta),
            Sized(mean, np.abs(x).mean(0)),
            # `nn.BatchNorm` finds it in 1/√(var + ε).
            Sized(var, var * (1 + lost_in_output) + self.epsilon * self.mean_is_rounded),
        )

    def _average(self, device, mean: Sized, var: Sized) -> None:
        share = self.momentum
        self._statistics[self._group_of(device)] = tuple(
            Sized(share * old.value + (1 - share) * new.value, share * old.size + (1 - share) * new.size)
            for old, new in zip(self.running(device), (mean, var))
        )

    def _group_of(self, device: int) -> int:
        return device // self.group_size if self.group_size else 0

    def _flat(self, array) -> np.ndarray:
        """As (values, C), where NumPy adds up the values of a channel in pairs, as it does along a contiguous axis."""
        flat = np.moveaxis(np.asarray(array, np.float64), self.axis, -1).reshape(-1, self.channels)
        return np.asfortranarray(flat)

    def _shaped(self, flat, shape) -> np.ndarray:
        moved = np.moveaxis(np.empty(shape, np.bool_), self.axis, -1).shape
        return np.moveaxis(flat.reshape(moved), -1, self.axis)


def check(
    what: str, seen, expected, dtype: str = "float32", *, axis: int = 1, units=8.0, real=None, roundings=1
) -> None:
    """Compare one array with a `Sized`, channel by channel; raises AssertionError.

    ``dtype``: the array's, to which it was rounded ``roundings`` times. ``real``: that of the computation, by default
    ``dtype`` or float32. ``units``: how many units of rounding of it the result may be off, in proportion to its size.
    """
    real = real or ("float32" if dtype in ("float16", "bfloat16") else dtype)
    array = np.asarray(seen, np.float64)
    assert array.shape == expected.value.shape, f"{what}: the shape is {array.shape}, not {expected.value.shape}"
    moved = [np.moveaxis(item, axis, -1) if item.ndim > 1 else item for item in (array, expected.value)]
    seen_rows, rows = (item.reshape(-1, len(expected.size)) for item in moved)
    most = np.abs(rows).max(0) if roundings == 1 else roundings * np.maximum(np.abs(rows).max(0), expected.size)
    allowed = UNIT[dtype] * most * (1 + 2.0**-8) + units * UNIT[real] * expected.size + roundings * SMALLEST[dtype]
    errors = np.abs(seen_rows - rows).max(0)
    wrong = ~(errors <= allowed)  # also where it is not a number
    if wrong.any():
        with np.errstate(divide="ignore", invalid="ignore"):
            worst = int(np.nanargmax(np.where(wrong, np.nan_to_num(errors / allowed, nan=np.inf), -1)))
        at = int(np.nanargmax(np.nan_to_num(np.abs(seen_rows - rows)[:, worst], nan=np.inf)))
        raise AssertionError(
            f"{what}: {wrong.sum()} of {len(wrong)} channels are wrong; channel {worst} is off by {errors[worst]:.2g}, "
            f"of which {allowed[worst]:.2g} would be rounding: {seen_rows[at, worst]!r}, not {rows[at, worst]!r}"
        )


def check_all(what: str, seen, expected, *arguments, **options) -> None:
    """Compare a list of arrays, one for each device."""
    assert len(seen) == len(expected), f"{what}: {len(seen)} arrays, not {len(expected)}"
    for place, (one, other) in enumerate(zip(seen, expected)):
        check(f"{what} on device {place}", one, other, *arguments, **options)


def check_tensors(outputs, input_gradients, expected: Step, *arguments, **options) -> None:
    """Compare what a step gives on each device."""
    check_all("output", outputs, expected.outputs, *arguments, **options)
    check_all("input gradient", input_gradients, expected.input_gradients, *arguments, **options)
