"""The arithmetic of synchronized Batch Normalization on per-channel vectors, in float64 NumPy.

Nothing here knows of devices or of MXNet. All vectors have shape (C,).

Merging counts n_d, means m_d and centred sums of squares M2_d = Σ (x − m_d)² is the pairwise formula of Chan, Golub
and LeVeque ("Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979), for many parts at
once. It never forms E[x²] − E[x]², so a mean that is large against the deviation costs no digits. Ranks are added in
order: the same contributions give the same bits, whoever arrived first.
"""

from typing import NamedTuple, Tuple

import numpy as np


class Moments(NamedTuple):
    """How many values per channel, their mean, and their centred sum of squares."""

    count: float  # type: ignore[assignment]  # a tuple has a method of this name
    mean: np.ndarray
    m2: np.ndarray

    @property
    def var(self) -> np.ndarray:
        """Biased variance, as in `nn.BatchNorm`."""
        return self.m2 / self.count

    def std(self, epsilon: float) -> np.ndarray:
        """√(var + epsilon)."""
        return np.sqrt(self.var + epsilon)

    def pack(self) -> np.ndarray:
        """One vector of 2C + 1 numbers: the whole forward message of a rank."""
        return np.concatenate([[self.count], self.mean, self.m2])

    @classmethod
    def from_shifted_sums(cls, count: float, shift: np.ndarray, total: np.ndarray, squares: np.ndarray) -> "Moments":
        """Moments from Σ (x − shift) and Σ (x − shift)². ``shift`` is near the mean, so the correction is tiny."""
        correction = total / count
        return cls(count, shift + correction, np.maximum(squares - total * correction, 0.0))


def merge(gathered: np.ndarray) -> Moments:
    """Moments of the whole mini-batch from packed moments, one row per rank."""
    counts = gathered[:, :1]
    means, m2s = np.split(gathered[:, 1:], 2, axis=1)
    count = counts.sum()
    mean = (means * (counts / count)).sum(axis=0)
    mean += ((means - mean) * (counts / count)).sum(axis=0)  # what rounding has taken: equal means stay what they are
    m2 = (m2s + counts * np.square(means - mean)).sum(axis=0)
    return Moments(count, mean, m2)


class BatchView(NamedTuple):
    """How one device sees the whole mini-batch: all that its backward pass must remember of the forward pass.

    ``offset`` is the device's mean minus the mean of the mini-batch, ``std`` the device's √(var + ε), ``invstd`` the
    mini-batch's (var + ε)^−½. With ẑ the values normalized by their device alone, x̂ = (ẑ·std + offset)·invstd.
    """

    offset: np.ndarray
    std: np.ndarray
    invstd: np.ndarray

    @classmethod
    def of(cls, local: Moments, merged: Moments, epsilon: float) -> "BatchView":
        return cls(local.mean - merged.mean, local.std(epsilon), 1 / merged.std(epsilon))

    def weight_and_bias(self, gamma: np.ndarray, beta: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
        """Factors that make γ·x̂ + β of ẑ."""
        scale = gamma * self.invstd
        return scale * self.std, beta + scale * self.offset

    def sums(self, d_weight: np.ndarray, d_bias: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
        """Return this device's S1 = Σ dy and S2 = Σ dy·x̂ from Σ dy·ẑ and Σ dy."""
        return d_bias, self.invstd * (self.std * d_weight + self.offset * d_bias)

    def correction(
        self,
        gamma: np.ndarray,
        d_weight: np.ndarray,
        d_bias: np.ndarray,
        count: float,
        s1: np.ndarray,
        s2: np.ndarray,
        total_count: float,
    ) -> Tuple[np.ndarray, np.ndarray]:
        """The correction to dx of a BatchNorm on this device alone, as (constant, slope) of x − (the device's mean).

        Alone it is γ·invstd·(dy − Σ_d dy/n_d − ẑ·Σ_d dy·ẑ/n_d); with S1, S2 and N of the whole mini-batch it
        must be γ·invstd·(dy − S1/N − x̂·S2/N). The difference is affine in x.
        """
        scale = gamma * self.invstd
        mean_s2 = self.invstd * s2 / total_count
        constant = scale * (d_bias / count - s1 / total_count - self.offset * mean_s2)
        slope = scale * (d_weight / (self.std * count) - mean_s2)
        return constant, slope
