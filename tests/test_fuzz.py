"""Hypothesis looks for a case in which the layer differs from the oracle: rank, axis, shape, dtype, shards, options."""

import hypothesis
import numpy as np
import oracle
import pytest
from harness import MODES, cpus, random_affine, set_mode, step
from hypothesis import strategies as st
from mxnet.gluon import nn

from gluon_syncbn import SyncBatchNorm

pytestmark = pytest.mark.usefixtures("backend")

EXAMPLES = 150
TOLERANCES = {"float32": (2e-5, 2e-4), "float64": (1e-11, 1e-10), "float16": (4e-3, 8e-3)}
# Of the type in which statistics are kept.
EPSILON = {name: np.finfo(np.result_type(name, "float32")).eps for name in TOLERANCES}


PLAIN = {"epsilon": 1e-5, "momentum": 0.0, "center": False, "scale": False, "group_size": 1}


@st.composite
def cases(draw):
    """Shapes of the shards with the axis of their channels, and how the layer is made."""
    rank = draw(st.integers(2, 5))
    axis = draw(st.integers(-rank, rank - 1))
    channels = draw(st.integers(1, 17))
    devices = draw(st.integers(2, 4))
    group_size = draw(st.sampled_from([size for size in (None, 1, 2, 4) if size is None or devices % size == 0]))
    shapes = []
    for _ in range(devices):
        shape = [draw(st.integers(1, 7)) for _ in range(rank)]
        shape[axis] = channels
        shapes.append(tuple(shape))
    options = {
        "epsilon": draw(st.sampled_from([1e-5, 1e-3, 0.1])),
        "momentum": draw(st.sampled_from([0.0, 0.9, 0.99])),
        "center": draw(st.booleans()),
        "scale": draw(st.booleans()),
        "group_size": group_size,
    }
    return shapes, axis, options


@pytest.mark.parametrize("mode", list(MODES))
@hypothesis.settings(max_examples=EXAMPLES, deadline=None, database=None)
@hypothesis.given(
    case=cases(),
    dtype=st.sampled_from(list(TOLERANCES)),
    relu=st.booleans(),
    mean=st.sampled_from([0.0, 2.0, -30.0]),
    seed=st.integers(0, 2**31),
)
# Two values at -30 whose mean is not a float32: a difference that nn.BatchNorm makes alone.
@hypothesis.example(case=([(2, 11), (1, 11), (1, 11)], 1, PLAIN), dtype="float32", relu=False, mean=-30.0, seed=2)
def test_against_the_oracle(mode, case, dtype, relu, mean, seed):
    shapes, axis, options = case
    devices, rng = cpus(len(shapes)), np.random.RandomState(seed)
    activation = "relu" if relu else None
    layer = SyncBatchNorm(axis=axis, in_channels=shapes[0][axis], timeout=20, activation=activation, **options)
    net = nn.HybridSequential()
    net.add(layer)
    net.cast(dtype)
    net.initialize(ctx=devices)
    gamma, beta = random_affine(layer, shapes[0][axis])
    gamma = gamma if options["scale"] else np.ones_like(gamma)
    set_mode(net, mode)
    shards = [(rng.standard_normal(shape) + mean).astype(dtype) for shape in shapes]
    heads = [rng.standard_normal(shape).astype(dtype) for shape in shapes]
    outputs, inputs = step(net, shards, heads, devices)

    size = options["group_size"] or len(devices)
    forward, backward = TOLERANCES[dtype]
    for start in range(0, len(devices), size):
        part = slice(start, start + size)
        flat = [np.moveaxis(item, axis, -1).reshape(-1, item.shape[axis]) for item in shards[part]]
        flat_heads = [np.moveaxis(item, axis, -1).reshape(-1, item.shape[axis]) for item in heads[part]]
        expected = oracle.batch_norm(flat, gamma, beta, -1, options["epsilon"])
        if relu:
            # An output within rounding of 0 may be cut or not; the gradient is compared for what was cut here.
            seen = [np.moveaxis(item.asnumpy(), axis, -1).reshape(-1, item.shape[axis]) for item in outputs[part]]
            flat_heads = [head * (value > 0) for head, value in zip(flat_heads, seen)]
        answers = oracle.batch_norm(flat, gamma, beta, -1, options["epsilon"], heads=flat_heads)
        for rank, device in enumerate(devices[part]):
            y = np.moveaxis(outputs[start + rank].asnumpy(), axis, -1).reshape(-1, gamma.size).astype(np.float64)
            dx = np.moveaxis(inputs[start + rank].grad.asnumpy(), axis, -1).reshape(-1, gamma.size)
            right = np.maximum(expected.outputs[rank], 0) if relu else expected.outputs[rank]
            scale = max(np.abs(item).max() for item in expected.outputs)
            std = np.sqrt(expected.var + options["epsilon"])
            # nn.BatchNorm, which computes groups of one device, rounds their mean.
            lost = 2 * EPSILON[dtype] * np.abs(expected.mean) / std if size == 1 else np.zeros_like(std)
            assert np.all(np.abs(y - right) <= forward * scale + np.abs(gamma) * lost)
            # dx is what is left when mean parts are taken out; with few values next to nothing may be left.
            left = np.abs(gamma / std) * max(np.abs(item).max() for item in heads)
            assert np.all(np.abs(dx - answers.input_gradients[rank]) <= (backward + lost) * left)
            if size > 1 or mode == "imperative":
                running = layer.running_mean.data(device).asnumpy()
                np.testing.assert_allclose(running, expected.mean * (1 - options["momentum"]), rtol=1e-3, atol=1e-4)
    assert all(np.isfinite(item.asnumpy()).all() for item in outputs)
