"""What the tests compare with: Batch Normalization of the concatenated batch in NumPy float64.

It shares no code with the package and is itself checked by finite differences (test_oracle.py).
"""

from typing import NamedTuple

import numpy as np


class Expected(NamedTuple):
    outputs: list
    input_gradients: list
    gamma_gradient: np.ndarray
    beta_gradient: np.ndarray
    mean: np.ndarray
    var: np.ndarray


def batch_axis(axis: int) -> int:
    """Along which devices share a batch: 0, unless the channels are there."""
    return 1 if axis == 0 else 0


def batch_norm(shards, gamma, beta, axis=1, epsilon=1e-5, heads=None) -> Expected:
    """Forward, and backward from the output gradients ``heads`` (by default zero), one array per device."""
    join = batch_axis(axis)
    x = np.concatenate([np.asarray(shard, np.float64) for shard in shards], axis=join)
    heads = [np.zeros(shard.shape) for shard in shards] if heads is None else heads
    dy = np.concatenate([np.asarray(head, np.float64) for head in heads], axis=join)
    others = tuple(i for i in range(x.ndim) if i != axis % x.ndim)
    shape = [1] * x.ndim
    shape[axis] = -1
    gamma, beta = (np.asarray(item, np.float64) for item in (gamma, beta))
    mean, var = x.mean(axis=others), x.var(axis=others)
    std = np.sqrt(var + epsilon).reshape(shape)
    normalized = (x - mean.reshape(shape)) / std
    y = normalized * gamma.reshape(shape) + beta.reshape(shape)
    d_normalized = dy * gamma.reshape(shape)
    dx = (
        d_normalized
        - d_normalized.mean(axis=others, keepdims=True)
        - normalized * (d_normalized * normalized).mean(axis=others, keepdims=True)
    ) / std
    borders = np.cumsum([shard.shape[join] for shard in shards])[:-1]
    return Expected(
        np.split(y, borders, axis=join),
        np.split(dx, borders, axis=join),
        (dy * normalized).sum(axis=others),
        dy.sum(axis=others),
        mean,
        var,
    )


def distance(actual, expected) -> float:
    """Largest absolute difference, as a share of the largest expected magnitude over all arrays."""
    actual, expected = ([np.asarray(item, np.float64) for item in items] for items in (actual, expected))
    scale = max(np.abs(item).max() for item in expected)
    worst = max(np.abs(a - b).max() for a, b in zip(actual, expected))
    return worst / scale if scale > 0 else worst
