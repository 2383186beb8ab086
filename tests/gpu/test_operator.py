"""The compiled operator inside MXNet, on GPUs and on groups of a CPU and a GPU, against the reference.

Nothing here needs a kernel of MXNet's own: arrays are filled on the CPU and copied, head gradients are given.
"""

import itertools

import mxnet as mx
import numpy as np
import psutil
import pytest
import testing
from mxnet import autograd, gluon
from reference import Norm, check_all, check_tensors, total
from testing import check_affine, check_running, initialized, random_shards, reference_of, set_mode, shards_and_heads

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm

GROUPS = {
    "cpu, gpu": [mx.cpu(0), mx.gpu(0)],
    "gpu, cpu": [mx.gpu(0), mx.cpu(0)],
    "gpu, gpu": [mx.gpu(0), mx.gpu(1)],
    "gpu, cpu, gpu": [mx.gpu(1), mx.cpu(0), mx.gpu(0)],
}
groups = pytest.mark.parametrize(
    "devices",
    [pytest.param(group, id=name, marks=pytest.mark.gpus(name.count("gpu"))) for name, group in GROUPS.items()],
)
alone = pytest.mark.parametrize("devices", [pytest.param(GROUPS["gpu, gpu"], id="gpu, gpu", marks=pytest.mark.gpus(2))])
hybridized = pytest.mark.parametrize("mode", ["hybridize", "static"])
SHAPES = [(3, 5, 7, 9), (2, 5, 7, 9), (4, 5, 7, 9), (1, 5, 7, 9)]  # of the first devices
UNITS = 32  # of rounding


def make(devices, dtype="float32", channels=5, mode="imperative", timeout=20, prefix="stem_", **options):
    layer = SyncBatchNorm(in_channels=channels, backend="native", timeout=timeout, prefix=prefix, **options)
    testing.random_affine(initialized(layer, devices, mode, dtype), channels)
    return layer


def place(arrays, devices):
    return [mx.nd.array(array, dtype=array.dtype).copyto(device) for array, device in zip(arrays, devices)]


def with_gradients(arrays, devices):
    """Placed, and places for their gradients."""
    inputs, gradients = place(arrays, devices), place([np.zeros_like(array) for array in arrays], devices)
    autograd.mark_variables(inputs, gradients)
    return inputs, gradients


def step(block, arrays, heads, devices, skips=(), train_mode=True):
    """Outputs and input gradients as NumPy arrays, behind them those of the skips."""
    inputs, gradients = with_gradients([*arrays, *skips], devices * 2)
    with autograd.record(train_mode=train_mode):
        outputs = [block(*inputs[i :: len(devices)]) for i in range(len(devices))]
    autograd.backward(outputs, place(heads, devices), train_mode=train_mode)
    return [output.asnumpy() for output in outputs], [gradient.asnumpy() for gradient in gradients]


_numbers = itertools.count()


def check(layer, devices, shapes=SHAPES, dtype="float32", *, block=None, norm=None, has_skip=False, used=None):
    """One training step, with other numbers each time. ``norm``: the layer's reference in several of them."""
    norm, number = norm or reference_of(layer), next(_numbers)
    arrays, heads, skips = (random_shards(shapes[: len(devices)], dtype, 3 * number + more) for more in range(3))
    skips = skips if has_skip else []
    outputs, gradients = step(block or layer, arrays, heads, devices, skips)
    expected = norm.step(arrays, heads, skips or None, used=used, seen=outputs)
    how = {"dtype": dtype, "axis": norm.axis, "units": UNITS}
    check_all("output", outputs, expected.outputs, **how, roundings=2 if norm.activation == "leaky" else 1)
    check_all("input gradient", gradients[: len(devices)], expected.input_gradients, **how)
    check_all("gradient of the skip", gradients[len(devices) :], expected.skip_gradients if skips else [], **how)
    check_affine(layer, devices, expected, testing.vector_dtype(dtype), units=UNITS)
    if used is None:
        check_running(layer, norm, dtype)


@groups
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("shape", [(3, 5, 7, 9), (2, 5, 16, 20), (3, 5, 3, 3), (6, 5)], ids=str)
def test_uneven_shards_give_what_the_reference_says(devices, dtype, shape):
    layer = make(devices, dtype)
    assert layer.backend == "native"
    check(layer, devices, [(shape[0] + i, *shape[1:]) for i in range(len(devices))], dtype)


OPTIONS = {
    "channels last": ({"axis": -1, "channels": 16}, {}, [(2, 4, 5, 16), (3, 4, 5, 16), (1, 4, 5, 16)]),
    "fused ReLU": ({"activation": "relu"}, {"activation": "relu"}, SHAPES),
    "no scale": ({"scale": False}, {}, SHAPES),
}


@groups
@pytest.mark.parametrize("case", list(OPTIONS))
def test_an_option(devices, case):
    options, own, shapes = OPTIONS[case]
    layer = make(devices, **options)
    check(layer, devices, shapes, norm=reference_of(layer, **own))


@groups
def test_many_steps_stay_right(devices):
    """Memory of one step is used again by the next, and layers of a net share it."""
    layers = [make(devices, channels=channels) for channels in (5, 5, 3)]
    norms = [reference_of(layer) for layer in layers]
    for _ in range(15):
        for layer, norm in zip(layers, norms):
            check(layer, devices, [(3 + i, norm.channels, 7, 9) for i in range(len(devices))], norm=norm)


class Followed(gluon.HybridBlock):
    """A layer and what follows it; hybridized, the layer computes all of it."""

    def __init__(self, layer, behind):
        super().__init__()
        self.layer, self._behind = layer, behind
        set_mode(self, "static")

    def hybrid_forward(self, F, x, *skip):
        y = self.layer(x)
        if self._behind == "leaky":
            return F.LeakyReLU(y, slope=0.125)
        return F.relu(skip[0] + y) if skip else y


@alone
@pytest.mark.parametrize("renorm", [None, (1.25, 0.5)])
@pytest.mark.parametrize("behind, in_place", [("leaky", False), ("skip", False), ("nothing", True), ("leaky", True)])
def test_what_follows_in_place_and_renormalized(devices, behind, in_place, renorm):
    """In float32: of MXNet's own kernels the stand-in has those that a graph of this kind needs."""
    layer = make(devices, in_place=in_place, renorm=renorm)
    own = {"activation": {"skip": "relu", "leaky": "leaky"}.get(behind), "slope": 0.125, "renorm": renorm}
    norm, net = reference_of(layer, **own, in_place="float32" if in_place else None), Followed(layer, behind)
    for _ in range(3):
        check(layer, devices, block=net, norm=norm, has_skip=behind == "skip")


@alone
@pytest.mark.parametrize("requested", ["neither", "input", "skip"])
def test_a_skip_whose_gradients_are_not_all_asked_for(devices, requested):
    """A net on data, or after frozen layers."""
    layer = make(devices)
    norm, net = reference_of(layer, activation="relu"), Followed(layer, "skip")
    arrays, heads, skips = (random_shards(SHAPES[:2], seed=seed) for seed in (0, 50, 100))
    inputs, added = place(arrays, devices), place(skips, devices)
    gradients = place([np.zeros_like(array) for array in arrays], devices)
    wanted = {"neither": [], "input": inputs, "skip": added}[requested]
    autograd.mark_variables(wanted, gradients[: len(wanted)])
    with autograd.record():
        outputs = [net(x, skip) for x, skip in zip(inputs, added)]
    autograd.backward(outputs, place(heads, devices))
    seen = [output.asnumpy() for output in outputs]
    expected = norm.step(arrays, heads, skips, seen=seen)
    check_all("output", seen, expected.outputs, units=UNITS)
    check_affine(layer, devices, expected, units=UNITS)
    if wanted:
        results = expected.input_gradients if requested == "input" else expected.skip_gradients
        check_all("gradient", [gradient.asnumpy() for gradient in gradients], results, units=UNITS)


@alone
def test_a_gamma_near_zero_is_told_in_place(devices):
    layer = make(devices, in_place=True)
    layer.gamma.set_data(mx.nd.array([1, 0, 1, -1, 1]))
    with pytest.warns(UserWarning, match="cannot recover the input where .gamma. is this small; channel 1"):
        check(layer, devices, norm=reference_of(layer, in_place="float32"))


@alone
@hybridized
def test_hybridized_with_prediction_between_steps(devices, mode):
    layer = make(devices, activation="relu", mode=mode)
    norm = reference_of(layer, activation="relu")
    for seed in range(3):
        check(layer, devices, norm=norm)
        (array,) = random_shards([(2, 5, 7, 9)], seed=seed)
        expected = norm.step([array], training=False)
        for device in devices:
            check_all("prediction", [layer(*place([array], [device])).asnumpy()], expected.outputs, units=UNITS)
        check_running(layer, norm)  # prediction leaves it as it was


@alone
def test_gradients_can_be_added(devices):
    layer = make(devices)
    layer.collect_params().setattr("grad_req", "add")
    arrays, heads = shards_and_heads(SHAPES[:2])
    expected = reference_of(layer).step(arrays, heads)
    for times in (1, 2, 3):
        step(layer, arrays, heads, devices)
        check_affine(layer, devices, expected, times=times, units=UNITS)


@groups
def test_a_device_that_does_not_come_is_named(devices):
    layer = make(devices, timeout=0.5)
    norm = reference_of(layer)
    arrays = place(random_shards(SHAPES[: len(devices)]), devices)
    with autograd.record():
        outputs = [layer(item) for item in arrays[:-1]]
    text = rf"'stem': forward pass.*Missing: {devices[-1].device_type}\({devices[-1].device_id}\)"
    with pytest.raises(mx.MXNetError, match=text):
        outputs[0].asnumpy()
    for output in outputs[1:]:
        with pytest.raises(mx.MXNetError):
            output.asnumpy()
    gluon_syncbn.abandon_step()
    for output in outputs:  # MXNet has forgotten the error by now; what a GPU has there must not look like a result
        assert output.context.device_type == "cpu" or np.isnan(output.asnumpy()).all()
    norm.gamma = np.full(5, 1.5)
    layer.gamma.set_data(mx.nd.array(norm.gamma))
    check(layer, devices, norm=norm)


@alone
@hybridized
def test_a_backward_pass_whose_forward_pass_failed(devices, mode):
    """In a static graph the memory still holds the step before; the backward pass must not compute with it."""
    layer = make(devices, timeout=2, mode=mode)
    norm = reference_of(layer)
    check(layer, devices, norm=norm)
    (array,) = random_shards(SHAPES[:1])
    (x,), (gradient,) = with_gradients([array], devices)
    with autograd.record():
        out = layer(x)
    with pytest.raises(mx.MXNetError, match="forward pass waited 2 s for 1 of 2 devices"):
        out.wait_to_read()
    autograd.backward([out], place([array], devices))
    with pytest.raises(mx.MXNetError, match="the step had failed|cannot be run"):
        gradient.wait_to_read()
    gluon_syncbn.abandon_step()
    check(layer, devices, norm=norm)


@pytest.mark.gpus(1)
def test_cpu_devices_beside_gpus_have_temporary_space_of_their_own():
    kinds = lambda: gluon.nn.Conv2D(4, 3, padding=1), lambda: SyncBatchNorm(timeout=60)
    net = initialized(
        testing.sequential(*kinds * 4), 2
    )  # with MXNet's four buffers for both, this waits until the timeout
    for _ in range(3):
        with autograd.record():
            outputs = [net(mx.nd.ones((2, 3, 8, 8), ctx=mx.cpu(i))) for i in range(2)]
        autograd.backward(outputs)
        assert all(np.isfinite(output.asnumpy()).all() for output in outputs)


class Head(gluon.HybridBlock):
    def __init__(self, layer):
        super().__init__()
        self.norm = layer

    def hybrid_forward(self, F, small, large):
        return self.norm(small), self.norm(large)


@alone
@pytest.mark.mxnet_kernels
@pytest.mark.parametrize("mode", list(testing.MODES))
def test_a_layer_that_is_called_twice_in_a_step(devices, mode):
    """As a head that pyramid levels share: on the way back the calls come in the other order."""
    layer = make(devices)
    norm, head = reference_of(layer), set_mode(Head(layer), mode)
    shapes = [[(3, 5, 4, 4), (2, 5, 4, 4)], [(3, 5, 8, 8), (2, 5, 8, 8)]]
    for number in range(3):
        levels, heads = zip(*(shards_and_heads(one, seed=7 * number + i) for i, one in enumerate(shapes)))
        inputs, gradients = zip(*(with_gradients(level, devices) for level in levels))
        with autograd.record():
            outputs = [head(small, large) for small, large in zip(*inputs)]
        head_gradients = zip(*(place(item, devices) for item in heads))
        autograd.backward([y for pair in outputs for y in pair], [h for pair in head_gradients for h in pair])
        steps = [norm.step(*level) for level in zip(levels, heads)]
        for i, expected in enumerate(steps):
            seen = [pair[i].asnumpy() for pair in outputs], [item.asnumpy() for item in gradients[i]]
            check_tensors(*seen, expected, units=UNITS)
        names = "gamma_gradient", "beta_gradient"
        sums = {name: total([getattr(one, name) for one in steps]) for name in names}
        check_affine(layer, devices, steps[0]._replace(**sums), units=UNITS)
        check_running(layer, norm)


@pytest.mark.gpus(2)
def test_neighbours_synchronize_where_a_group_is_smaller():
    devices = [mx.cpu(0), mx.gpu(0), mx.cpu(1), mx.gpu(1)]
    layer = make(devices, group_size=2)
    check(layer, devices, norm=reference_of(layer, group_size=2))


@pytest.mark.gpus(2)
def test_a_smaller_last_batch():
    devices = GROUPS["gpu, cpu, gpu"]
    layer = make(devices)
    norm = reference_of(layer)
    check(layer, devices, norm=norm)
    for used in ([0, 1], [2, 1]):
        with gluon_syncbn.devices([devices[number] for number in used]):
            check(layer, [devices[number] for number in used], norm=norm, used=used)
    layer.gamma.set_data(layer.gamma.data(devices[1]))


@pytest.mark.gpus(1)
def test_nothing_is_allocated_in_a_training_step():
    """Neither memory nor threads grow with steps."""
    devices = GROUPS["cpu, gpu"]
    layers = [make(devices, channels=channels) for channels in (5, 64, 200)]
    process = psutil.Process()

    def train(steps):
        for _ in range(steps):
            for layer in layers:
                step(layer, *shards_and_heads([(2, layer.gamma.shape[0], 4, 4)] * 2), devices)
        return process.num_threads(), process.memory_info().rss

    train(20)
    threads, memory = train(20)
    more_threads, more_memory = train(60)
    assert more_threads <= threads + 2  # MXNet adds one whenever more custom operators wait than ever before
    assert more_memory - memory < 8 << 20


@alone
@hybridized
def test_in_place_gradients_of_prediction_mode(devices, mode):
    """Both passes take one γ, also where it is nearly 0; where no gradient can follow, it is γ itself."""
    layer = make(devices, channels=4, mode=mode, in_place=True)
    gamma, beta = np.array([0.0, 1e-9, 0.5, -1e-9]), np.array([0.0, 0.5, -0.5, 1.0])
    layer.gamma.set_data(mx.nd.array(gamma))
    layer.beta.set_data(mx.nd.array(beta))
    arrays, heads = shards_and_heads([(2, 4, 3, 3)] * 2)
    predicted = [layer(x).asnumpy() for x in place(arrays, devices)]
    check_all("prediction", predicted, Norm(gamma, beta).step(arrays, training=False).outputs, units=UNITS)
    outputs, gradients = step(layer, arrays, heads, devices, train_mode=False)
    expected = Norm(gamma, beta, in_place="float32").step(arrays, heads, training=False)
    check_tensors(outputs, gradients, expected, units=UNITS)
    check_affine(layer, devices, expected, units=UNITS)
