"""One training step of a whole net on 2 devices is one step on 1 device with the concatenated batch.

In float64: the gradients of a deep net magnify rounding, and at a random start those of float32 hang on it. There the
loss and the running statistics are compared.
"""

import mxnet as mx
import numpy as np
import pytest
from gluoncv import model_zoo
from gluoncv.loss import YOLOV3Loss
from mxnet import autograd, gluon
from testing import MODES, cpus, set_mode, total
from train_detection import DigitsTrainTransform, make_detector

from gluon_syncbn import convert_sync_batchnorm

pytestmark = pytest.mark.usefixtures("backend")
# All modes in the type that compares closely; the other in the mode that people train in.
CASES = [
    ("static", "float64"),
    *(pytest.param(mode, "float64", marks=pytest.mark.long) for mode in MODES if mode != "static"),
    pytest.param("static", "float32", marks=pytest.mark.long),
]


class InFloat64:
    """mx.nd or mx.sym for gluoncv's loss, which casts its counts to float32 whatever the net's type."""

    def __init__(self, F):
        self.F = F

    def __getattr__(self, name):
        return getattr(self.F, name)

    def cast(self, x, dtype):
        return self.F.cast(x, "float64")


def resnet18(net):
    """A batch of 4 images, and the loss."""
    loss, rng = gluon.loss.SoftmaxCrossEntropyLoss(), np.random.RandomState(0)
    images = rng.standard_normal((4, 3, 64, 64))
    net(mx.nd.array(images))  # now it knows its shapes
    return [images, rng.randint(10, size=4)], lambda net, x, y: loss(net(x), y)


def detector(net, side=96):
    """A batch of 2 images with two boxes each, others on each, and the losses."""
    transform, rng = DigitsTrainTransform(side, side, net), np.random.RandomState(0)
    np.random.seed(0)
    boxes = np.float32([[[10, 10, 60, 50, 1], [20, 40, 90, 90, 2]], [[30, 5, 80, 70, 0], [15, 20, 50, 90, 1]]])
    samples = [transform(mx.nd.array(rng.randint(0, 255, (side, side, 3)), dtype="uint8"), box) for box in boxes]
    image, *targets, truth = (mx.nd.stack(*parts).asnumpy() for parts in zip(*samples))
    return [image, truth, *targets], lambda net, *data: sum(net(*data))


# With the place where the batch is divided, and the tolerance of gradients in float64: MXNet's own leaky ReLU computes
# in float32, and the one that is computed in the layer's passes does not.
NETS = {
    "resnet18": (lambda: model_zoo.get_model("resnet18_v1b", classes=10), resnet18, 3, 1e-10),
    "detector": (lambda: make_detector(["a", "b", "c"], "voc"), detector, 1, 2.0**-22),
}


def observe(net, arrays, devices, border, loss, dtype):
    """Loss, gradients summed over devices, and running statistics per device, after one forward and backward."""
    parts = zip(*(np.split(array.astype(dtype), border) for array in arrays))
    with autograd.record():
        losses = [
            loss(net, *(mx.nd.array(array, ctx=device, dtype=dtype) for array in part))
            for part, device in zip(parts, devices)
        ]
    autograd.backward(losses)
    gradients, statistics = {}, {}
    for name, parameter in net._collect_params_with_prefix().items():
        if parameter.grad_req != "null":
            gradients[name] = total(parameter.list_grad())
        elif "running" in name:
            statistics[name] = [item.asnumpy() for item in parameter.list_data()]
    return sum(float(item.sum().asscalar()) for item in losses), gradients, statistics


@pytest.mark.parametrize("name", list(NETS))
@pytest.mark.parametrize("mode, dtype", CASES)
def test_a_step_on_two_devices_is_one_on_one(name, mode, dtype, tmp_path, monkeypatch):
    if dtype == "float64":
        forward = YOLOV3Loss.hybrid_forward
        monkeypatch.setattr(YOLOV3Loss, "hybrid_forward", lambda self, F, *args: forward(self, InFloat64(F), *args))
    mx.random.seed(3)
    make, prepare, border, of_gradients = NETS[name]
    plain, net = make(), make()
    plain.initialize(mx.init.Xavier())
    arrays, loss = prepare(plain)
    plain.cast(dtype)
    plain.save_parameters(str(tmp_path / "start.params"))
    convert_sync_batchnorm(net, timeout=60)
    net.cast(dtype)
    net.load_parameters(str(tmp_path / "start.params"), ctx=cpus(2))
    set_mode(net, mode)
    seen = observe(net, arrays, cpus(2), [border], loss, dtype)
    expected = observe(plain, arrays, cpus(1), [], loss, dtype)
    tolerance = 1e-6 if dtype == "float64" else 1e-5  # nn.BatchNorm has a momentum of float32
    assert seen[0] == pytest.approx(expected[0], rel=of_gradients if dtype == "float64" else tolerance)
    # A convolution's bias before BatchNorm has gradient 0, so compare with the net's largest gradient there.
    least = 1e-2 * max(np.abs(gradient).max() for gradient in expected[1].values())
    for name, gradient in expected[1].items() if dtype == "float64" else []:
        assert np.abs(seen[1][name] - gradient).max() <= of_gradients * max(np.abs(gradient).max(), least), name
    for name, (value,) in expected[2].items():
        assert all(np.array_equal(seen[2][name][0], copy) for copy in seen[2][name]), name
        assert np.abs(seen[2][name][0] - value).max() < tolerance * np.abs(value).max(), name
