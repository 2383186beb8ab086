"""The NumPy oracle agrees with its own finite differences, so that agreeing with it means something."""

import numpy as np
import oracle
import pytest

SHAPES = [([(2, 3), (3, 3)], 1), ([(1, 2, 2, 2), (2, 2, 2, 2)], 1), ([(1, 2, 3), (2, 2, 3)], -1), ([(3, 1), (3, 2)], 0)]


@pytest.mark.parametrize("shapes, axis", SHAPES)
def test_gradients_are_finite_differences(shapes, axis):
    rng = np.random.RandomState(0)
    shards = [rng.standard_normal(shape) for shape in shapes]
    heads = [rng.standard_normal(shape) for shape in shapes]
    channels = shards[0].shape[axis]
    gamma, beta = rng.uniform(0.5, 2, channels), rng.uniform(-1, 1, channels)

    def loss():
        outputs = oracle.batch_norm(shards, gamma, beta, axis).outputs
        return sum((output * head).sum() for output, head in zip(outputs, heads))

    expected = oracle.batch_norm(shards, gamma, beta, axis, heads=heads)
    pairs = [*zip(shards, expected.input_gradients), (gamma, expected.gamma_gradient), (beta, expected.beta_gradient)]
    for values, gradient in pairs:
        for index in np.ndindex(values.shape):
            original = values[index]
            values[index] = original + 1e-6
            above = loss()
            values[index] = original - 1e-6
            slope = (above - loss()) / 2e-6
            values[index] = original
            assert slope == pytest.approx(gradient[index], rel=1e-5, abs=1e-6)
