"""Batch Renormalization: how far a step's statistics may pull the result away from the running ones.

Ioffe, "Batch Renormalization: Towards Reducing Minibatch Dependence in Batch-Normalized Models", 2017. With few images
per step even the statistics of all devices are noisy, and prediction mode, which has the running ones, computes
something else than training mode. So x̂·r + d takes the place of x̂, with σ = √(var + ε) and ::

    r = σ/σ_running, held between 1/r_max and r_max        d = (mean − running mean)/σ_running, held within ±d_max

Both count as constants in the backward pass. Without limits the result would be that of prediction mode; with
r_max = 1 and d_max = 0 it is Batch Normalization.
"""

import math
from typing import Any, List, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np

# (step, r_max, d_max), by step.
Schedule = Tuple[Tuple[float, float, float], ...]
# What a user may give: (r_max, d_max), or such a schedule.
RenormLike = Union[Tuple[float, float], Sequence[Tuple[float, float, float]]]


class Limits(NamedTuple):
    """Of one step."""

    r_max: float = 1.0
    d_max: float = 0.0


def check_renorm(renorm: Optional[RenormLike], where: str) -> Optional[Schedule]:
    """The schedule that a user means.

    Raises
    ------
    TypeError, ValueError
        It is none; the text starts with ``where``.
    """
    if renorm is None:
        return None
    told = f"{where}: renorm must be (r_max, d_max), or a list of (step, r_max, d_max), not {renorm!r}."
    try:
        items: List[Any] = list(renorm)
        rows = [(0, *items)] if len(items) == 2 and not isinstance(items[0], (tuple, list)) else items
        points = [tuple(float(number) for number in row) for row in rows]
    except (TypeError, ValueError):
        raise TypeError(told) from None
    if not points or any(len(point) != 3 for point in points):
        raise ValueError(told)
    for step, r_max, d_max in points:
        if not (math.isfinite(step) and math.isfinite(r_max) and math.isfinite(d_max) and r_max >= 1 and d_max >= 0):
            raise ValueError(f"{where}: renorm takes r_max of at least 1 and d_max of at least 0, not {renorm!r}.")
    steps = [point[0] for point in points]
    if any(after <= before for before, after in zip(steps, steps[1:])):
        raise ValueError(f"{where}: the steps of renorm must grow, not {renorm!r}.")
    return tuple((step, r_max, d_max) for step, r_max, d_max in points)


def limits_at(schedule: Optional[Schedule], step: int) -> Limits:
    """Between two points on the line that joins them; before the first and behind the last as there."""
    if schedule is None:
        return Limits()
    steps, r_max, d_max = zip(*schedule)
    return Limits(float(np.interp(step, steps, r_max)), float(np.interp(step, steps, d_max)))


def r_and_d(limits: Limits, epsilon: float, mean, var, running_mean, running_var) -> Tuple[np.ndarray, np.ndarray]:
    """Of each channel, from vectors of shape (C,)."""
    if limits == Limits():  # Batch Normalization, whatever the running statistics are
        return np.ones_like(mean), np.zeros_like(mean)
    running_std = np.sqrt(running_var + epsilon)
    r = np.clip(np.sqrt(var + epsilon) / running_std, 1 / limits.r_max, limits.r_max)
    d = np.clip((mean - running_mean) / running_std, -limits.d_max, limits.d_max)
    return r, d
