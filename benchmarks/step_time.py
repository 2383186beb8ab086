"""Time of a full training step with SyncBatchNorm against the same net with nn.BatchNorm.

    OMP_NUM_THREADS=1 python benchmarks/step_time.py --net chain      # also resnet50, detector; --devices 4
    OMP_NUM_THREADS=1 python benchmarks/step_time.py --net resnet50 --update --only native "native, unguarded"

With --update a step includes a Trainer's update; `native, unguarded` neither watches a step nor guards its update. In
`native, no exchange` each device normalizes with its own moments at once; the difference to `native` is the cost
of synchronization.

All nets are static hybridized and take turns step by step in one process; the ratio is the median over pairs of steps.
`chain` is 8 × (conv 3×3 with 64 channels, norm, relu) and also runs MXNet's contrib layer, which is possible only
because gluon_syncbn gives each CPU device temporary space of its own: by itself it hangs.
"""

import argparse
import functools
import sys
import time
from pathlib import Path

import mxnet as mx
import numpy as np
from common import interleaved, machine, milliseconds, ratio
from gluoncv import model_zoo
from mxnet import autograd, gluon
from mxnet.gluon import contrib, nn

from gluon_syncbn import SyncBatchNorm, convert_sync_batchnorm
from gluon_syncbn.mxnet_engine import failures

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))  # first: it has a module `processes`, too
from train_detection import DigitsTrainTransform, make_detector  # noqa: E402

CHANNELS = 64


def chain(norm):
    net = nn.HybridSequential()
    for _ in range(8):
        net.add(nn.Conv2D(CHANNELS, 3, padding=1), norm(), nn.Activation("relu"))
    net.add(nn.Conv2D(16, 1))  # so that the graph's outputs are small
    return net


def resnet50(norm):
    return model_zoo.get_model("resnet50_v1b", classes=100)


def detector(norm):
    return make_detector([str(digit) for digit in range(10)], "voc")


def random_images(shape, devices):
    return [(mx.nd.random.normal(shape=shape, ctx=device),) for device in devices]


def labelled_images(shape, devices):
    """One image with one box for each device, with the targets of gluoncv's YOLOv3."""
    net = make_detector([str(digit) for digit in range(10)], "voc")
    net.initialize()
    transform = DigitsTrainTransform(*shape[2:], net)
    image = mx.nd.random.uniform(0, 255, shape=(*shape[2:], 3)).astype("uint8")
    image, *targets, boxes = transform(image, np.array([[10, 10, 90, 90, 1]], dtype="float32"))
    return [tuple(item.expand_dims(0).as_in_context(device) for item in (image, boxes, *targets)) for device in devices]


# (make the net, make its inputs, shape of the image on each device)
NETS = {
    "chain": (chain, random_images, (8, CHANNELS, 56, 56)),
    "resnet50": (resnet50, random_images, (4, 3, 128, 128)),
    "detector": (detector, labelled_images, (1, 3, 128, 128)),
}


def wait_for_nobody(layer) -> None:
    """Each device of a group meets only itself, on the same path; no option does this."""
    if isinstance(layer, SyncBatchNorm):
        sync = layer._sync
        make_group = sync._group_on
        sync._group_on = lambda spec, devices: make_group(spec.but(group_size=1), devices)


def build(make, devices, backend=None, contrib_norm=False, fuse=True, waits=True):
    count = len(devices)
    norm = (lambda: contrib.nn.SyncBatchNorm(num_devices=count)) if contrib_norm else nn.BatchNorm
    net = make(norm)
    if backend:
        convert_sync_batchnorm(net, backend=backend, fuse=fuse)
    if not waits:
        net.apply(wait_for_nobody)
    net.initialize(mx.init.Xavier(), ctx=devices)
    net.hybridize(static_alloc=True, static_shape=True)
    return net


def step(net, inputs, trainer=None, guarded=True) -> float:
    failures._state.is_in_use = guarded  # no option does this
    started = time.perf_counter()
    with autograd.record():
        outputs = [net(*items) for items in inputs]
    heads = [output if isinstance(output, (list, tuple)) else [output] for output in outputs]
    autograd.backward([head for some in heads for head in some])
    if trainer is not None:
        trainer.step(len(inputs))
    mx.nd.waitall()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--net", choices=list(NETS), default="chain")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--update", action="store_true", help="with a Trainer's step")
    parser.add_argument("--only", nargs="*", help="layers to run beside nn.BatchNorm")
    options = parser.parse_args()
    devices = [mx.cpu(i) for i in range(options.devices)]
    make, make_inputs, shape = NETS[options.net]
    inputs = make_inputs(shape, devices)
    kinds = {
        "nn.BatchNorm": {},
        "native": {"backend": "native"},
        "native, not fused": {"backend": "native", "fuse": False},
        "native, no exchange": {"backend": "native", "waits": False},
        "portable": {"backend": "portable"},
    }
    if options.net == "chain":
        kinds["contrib"] = {"contrib_norm": True}
    if options.update:
        kinds["native, unguarded"] = kinds["native"]
    if options.only is not None:
        kinds = {name: kind for name, kind in kinds.items() if name in ["nn.BatchNorm", *options.only]}
    nets = {name: build(make, devices, **kind) for name, kind in kinds.items()}
    runs = {}
    for name, net in nets.items():
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"momentum": 0.9, "learning_rate": 1e-3})
        arguments = net, inputs, trainer if options.update else None, name != "native, unguarded"
        runs[name] = functools.partial(step, *arguments)
    seconds = interleaved(runs, options.steps)
    print(f"{machine()}; {options.net}, {options.devices} CPU contexts, {shape} each, {options.steps} steps")
    print("| layer | median step | throughput against nn.BatchNorm |\n| --- | --- | --- |")
    for name, values in seconds.items():
        print(f"| {name} | {milliseconds(values):.0f} ms | {ratio(seconds, name, 'nn.BatchNorm'):.2f} |")


if __name__ == "__main__":
    main()
