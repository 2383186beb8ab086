"""Merging by counts and centred sums of squares, without MXNet."""

import numpy as np
import pytest

from gluon_syncbn.meeting.statistics import Moments, merge


def local_moments(values):
    values = np.asarray(values, dtype=np.float64)
    shift = values.mean(axis=0) + 1e-3  # near the mean is enough
    return Moments.from_shifted_sums(
        len(values), shift, (values - shift).sum(axis=0), np.square(values - shift).sum(axis=0)
    )


@pytest.mark.parametrize("counts", [(5,), (1, 1), (3, 1), (1, 2, 30, 4), (7,) * 8])
@pytest.mark.parametrize("mean", [0, 1e4, -1e8])
def test_merge_is_the_moments_of_everything(counts, mean):
    rng = np.random.RandomState(0)
    parts = [rng.standard_normal((count, 3)) + mean for count in counts]
    merged = merge(np.stack([local_moments(part).pack() for part in parts]))
    everything = np.concatenate(parts)
    assert merged.count == sum(counts)
    np.testing.assert_allclose(merged.mean, everything.mean(axis=0), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(merged.var, everything.var(axis=0), rtol=1e-6)


def test_constant_values_have_no_variance():
    merged = merge(np.stack([local_moments(np.full((4, 2), 3.0)).pack()] * 3))
    assert (merged.var >= 0).all()
    np.testing.assert_allclose(merged.var, 0, atol=1e-15)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bad_numbers_stay_in_their_channel_and_are_not_hidden(bad):
    values = np.ones((4, 2))
    values[0, 0] = bad
    with np.errstate(invalid="ignore"):
        merged = merge(np.stack([local_moments(values).pack(), local_moments(np.ones((4, 2))).pack()]))
    assert not np.isfinite(merged.mean[0])
    assert not np.isfinite(merged.var[0])
    assert merged.mean[1] == 1
    assert merged.var[1] == pytest.approx(0)
