"""Memory of a training step of gluoncv's YOLOv3 on Darknet-53: synchronized or not, fused, and in place.

    OMP_NUM_THREADS=1 python benchmarks/memory.py            # --devices 2 --size 416

Each variant runs in a process of its own: a static graph with random weights, one image with one box on each device,
forward and backward. The result is the most memory that the process had in the steps (VmHWM), less its memory when the
parameters and their gradients were allocated (VmRSS).
"""

import argparse
import os
import re
import subprocess
import sys

VARIANTS = {
    "nn.BatchNorm": None,
    "gluon_syncbn, fuse=False": {"fuse": False},
    "gluon_syncbn": {},
    "gluon_syncbn, in_place=True": {"in_place": True},
}


def megabytes(what: str) -> float:
    with open("/proc/self/status", encoding="utf-8") as lines:
        return int(re.search(rf"{what}:\s+(\d+) kB", lines.read()).group(1)) / 1024


def measure(options, devices: int, size: int, steps: int) -> float:
    import mxnet as mx
    import numpy as np
    from gluoncv import model_zoo
    from gluoncv.data.transforms.presets.yolo import YOLO3DefaultTrainTransform

    import gluon_syncbn

    contexts = [mx.cpu(i) for i in range(devices)]
    net = model_zoo.get_model("yolo3_darknet53_coco", pretrained_base=False)
    net.initialize()
    transform = YOLO3DefaultTrainTransform(size, size, net)
    image = mx.nd.random.uniform(0, 255, shape=(size, size, 3)).astype("uint8")
    image, *targets, boxes = transform(image, np.array([[10, 10, size // 2, size // 2, 1]], dtype="float32"))
    if options is not None:
        gluon_syncbn.convert_sync_batchnorm(net, backend="native", **options)
    net.collect_params().reset_ctx(contexts)
    net.hybridize(static_alloc=True, static_shape=True)
    inputs = [
        [mx.nd.array(item, dtype="float32").expand_dims(0).as_in_context(context) for item in (image, boxes, *targets)]
        for context in contexts
    ]
    mx.nd.waitall()
    before = megabytes("VmRSS")
    for _ in range(steps):
        with mx.autograd.record():
            losses = [sum(net(*items)) for items in inputs]
        mx.autograd.backward(losses)
        mx.nd.waitall()
    return megabytes("VmHWM") - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--size", type=int, default=416)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--variant", choices=list(VARIANTS), help="only this one, in this process")
    options = parser.parse_args()
    if options.variant:
        print(measure(VARIANTS[options.variant], options.devices, options.size, options.steps))
        return
    print(f"YOLOv3 on Darknet-53, {options.devices} CPU contexts, 1×3×{options.size}×{options.size} each")
    print("| layer | memory of the steps | against nn.BatchNorm |\n| --- | --- | --- |")
    plain = None
    for variant in VARIANTS:
        command = [sys.executable, __file__, "--variant", variant]
        for name in ("devices", "size", "steps"):
            command += [f"--{name}", str(getattr(options, name))]
        # Freed memory goes back to the system, so that it does not hide later allocations.
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
        used = float(done.stdout.split()[-1])
        plain = plain or used
        print(f"| {variant} | {used:.0f} MB | {used / plain:.2f} |", flush=True)


if __name__ == "__main__":
    main()
