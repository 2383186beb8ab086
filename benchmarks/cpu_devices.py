"""Memory and time of the ordinary training loop on 2 CPU devices, beside nn.BatchNorm in plain MXNet.

    OMP_NUM_THREADS=1 python benchmarks/cpu_devices.py --net resnet18          # also yolo3; --modes static
    OMP_NUM_THREADS=1 python benchmarks/cpu_devices.py --net resnet18 --other FOLDER

The loop has its loss outside the net's graph, a Trainer, and reads the loss in every step. `nn.BatchNorm` runs in a
process without this package, and so with MXNet's own settings. `--other` adds another checkout of this package, which
must be compiled. Each layer has a process of its own for each mode; the processes take turns, step by step, and the
ratio is the median over pairs of steps. Memory is resident memory (VmRSS).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

MODES = {"imperative": None, "hybridize": {}, "static": {"static_alloc": True, "static_shape": True}}
PLAIN, BESIDE, OURS = "nn.BatchNorm", "nn.BatchNorm, package imported", "SyncBatchNorm"
OTHER = "SyncBatchNorm, other checkout"
EARLY = 5  # the step after which memory should not grow


def resnet18():
    import mxnet as mx
    from mxnet.gluon.model_zoo import vision

    softmax_loss = mx.gluon.loss.SoftmaxCrossEntropyLoss()
    net = vision.resnet18_v1(classes=10)
    return net, (mx.nd.random.normal(shape=(8, 3, 96, 96)), mx.nd.arange(8)), lambda x, y: softmax_loss(net(x), y).sum()


def yolo3():
    """GluonCV's YOLOv3 on Darknet-53, with a box in each of two images."""
    import mxnet as mx
    import numpy as np
    from gluoncv import model_zoo
    from gluoncv.data.transforms.presets.yolo import YOLO3DefaultTrainTransform

    net = model_zoo.get_model("yolo3_darknet53_voc", pretrained_base=False)
    net.initialize()
    transform = YOLO3DefaultTrainTransform(224, 224, net)
    samples = []
    for seed in range(2):
        image = mx.nd.array(np.random.RandomState(seed).randint(0, 255, (224, 224, 3)), dtype="uint8")
        image, *targets, boxes = transform(image, np.array([[10, 20, 150, 120, 3]], dtype="float32"))
        samples.append([image, mx.nd.array(boxes, dtype="float32"), *targets])
    batch = [mx.nd.stack(*items) for items in zip(*samples)]
    return net, batch, lambda *shard: sum(loss.sum() for loss in net(*shard))


NETS = {"resnet18": resnet18, "yolo3": yolo3}


def child(name: str, mode: str, layer: str) -> None:
    """Make the net; then a step for each line of standard input, and a line of JSON for each step."""
    if layer != PLAIN:
        import gluon_syncbn
    import mxnet as mx
    from mxnet import autograd, gluon

    devices = [mx.cpu(0), mx.cpu(1)]
    mx.random.seed(0)
    net, batch, loss_of = NETS[name]()
    if layer in (OURS, OTHER):
        gluon_syncbn.convert_sync_batchnorm(net)
    net.initialize(mx.init.Xavier(), force_reinit=True, ctx=devices)
    if MODES[mode] is not None:
        net.hybridize(**MODES[mode])
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1e-4})
    for _ in sys.stdin:
        started = time.perf_counter()
        shards = zip(*(gluon.utils.split_and_load(data, devices) for data in batch))
        with autograd.record():
            losses = [loss_of(*shard) for shard in shards]
        autograd.backward(losses)
        trainer.step(len(batch[0]))
        loss = sum(loss.asscalar() for loss in losses)
        mx.nd.waitall()
        seconds = time.perf_counter() - started
        with open("/proc/self/statm", encoding="utf-8") as file:
            resident = int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20
        print(json.dumps([seconds, resident, float(loss)]), flush=True)


class Child:
    def __init__(self, options, mode: str, layer: str):
        folder = Path(options.other) if layer == OTHER else Path(__file__).parent.parent
        command = [sys.executable, __file__, "--net", options.net, "--child", mode, layer]
        self._process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": str(folder), "PYTHONWARNINGS": "ignore"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.seconds, self.megabytes = [], []

    def step(self) -> None:
        print(file=self._process.stdin, flush=True)
        seconds, megabytes, _ = json.loads(self._process.stdout.readline())
        self.seconds.append(seconds)
        self.megabytes.append(megabytes)

    def end(self) -> None:
        self._process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--net", choices=list(NETS), default="resnet18")
    parser.add_argument("--modes", nargs="*", default=list(MODES), choices=list(MODES))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--other", help="folder of another checkout")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.net, *options.child)
        return
    from common import machine

    print(f"{machine()}; {options.net}, 2 CPU devices, {options.steps} steps")
    columns = f"memory at step {EARLY} | at step {options.steps} | ratio | time of a step | against nn.BatchNorm"
    print(f"| mode | layer | {columns} |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    layers = [PLAIN, BESIDE, OURS, *([OTHER] if options.other else [])]
    for mode in options.modes:
        children = {layer: Child(options, mode, layer) for layer in layers}
        for _ in range(options.steps):
            for one in children.values():
                one.step()
        plain = children[PLAIN].seconds[EARLY:]
        for layer, one in children.items():
            one.end()
            early, late = one.megabytes[EARLY - 1], one.megabytes[-1]
            seconds = one.seconds[EARLY:]
            times = statistics.median(a / b for a, b in zip(seconds, plain))
            print(
                f"| {mode} | {layer} | {early:.0f} MiB | {late:.0f} MiB | {late / early:.2f} | "
                f"{1e3 * statistics.median(seconds):.0f} ms | {times:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
