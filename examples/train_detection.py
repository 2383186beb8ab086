"""Train a GluonCV detector (YOLOv3 on a ResNet) on several devices of one host, or in several processes.

    python examples/train_detection.py --norm syncbn --devices cpu:4 --batch-per-device 1
    mpirun -np 4 python examples/train_detection.py --devices cpu:1 --processes mpi
    horovodrun -np 4 python examples/train_detection.py --devices cpu:1 --processes horovod

Without ``--dataset voc --root DIR`` it makes its own data set (digits_voc.py). Writes to ``--output``: last.params, a
curve of loss and mAP, held-out images with detections, and history.json.
"""

import argparse
import json
import random
import time
from pathlib import Path

import matplotlib
import mxnet as mx
import numpy as np
from digits_voc import DigitsDetection, write_digits_voc
from gluoncv.data import VOCDetection
from gluoncv.data.batchify import Pad, Stack, Tuple
from gluoncv.data.sampler import SplitSampler
from gluoncv.data.transforms.presets.yolo import YOLO3DefaultTrainTransform, YOLO3DefaultValTransform
from gluoncv.model_zoo.yolo.yolo3 import get_yolov3
from gluoncv.utils.metrics.voc_detection import VOC07MApMetric
from gluoncv.utils.viz import plot_bbox
from mxnet import gluon
from mxnet.gluon.model_zoo.vision.resnet import BasicBlockV1, ResNetV1
from processes import join
from training import add_options, make_trainer, set_seeds, train_epoch

import gluon_syncbn

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402

SHOWN_SCORE = 0.3
MOST_OBJECTS = {"digits": 8, "voc": 64}  # in one image
# Width and height in pixels for each stride: gluoncv's YOLOv3 has the same. The digits fit the first two.
_SMALL = [[10, 13, 16, 30, 33, 23], [30, 61, 62, 45, 59, 119]]
ANCHORS = {"digits": _SMALL, "voc": [*_SMALL, [116, 90, 156, 198, 373, 326]]}
STRIDES = [8, 16, 32]
# The ResNet's blocks per stage and channels, and those of YOLOv3's outputs. For voc it is ResNet-18.
BLOCKS = {"digits": [1, 1, 1], "voc": [2, 2, 2, 2]}
CHANNELS = {"digits": [32, 32, 64, 128], "voc": [64, 64, 128, 256, 512]}
FILTERS = {"digits": [64, 32], "voc": [256, 128, 64]}
LEARNING_RATES = {"digits": 3e-3, "voc": 1e-3}
ANCHORS_PER_CELL, OBJECTNESS = 3, 4  # the layout of gluoncv's YOLOv3 output: x, y, w, h, objectness, classes


def parse_arguments(arguments=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.set_defaults(lr=None)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument(
        "--processes",
        choices=["horovod", "mpi"],
        help="synchronize the processes that horovodrun or mpirun has started; --devices are then one process's",
    )
    parser.add_argument("--data-shape", type=int, help="side of the network's input in pixels; else 96, for voc 416")
    parser.add_argument("--dataset", choices=["digits", "voc"], default="digits")
    parser.add_argument("--root", type=Path, help="Pascal VOC tree to read, or where to write the digits")
    parser.add_argument("--images", type=int, help="number of training images to write; else 1,500")
    parser.add_argument("--output", type=Path, default=Path("runs/detection"))
    parser.add_argument("--resume", action="store_true", help="go on from --output after an interruption")
    options = parser.parse_args(arguments)
    if options.epochs < 1 or options.batch_per_device < 1:
        parser.error("--epochs and --batch-per-device must be at least 1")
    if options.images is not None and options.images < options.batch_per_device * len(options.devices):
        parser.error("--images must be enough for one batch on all --devices")
    if options.dataset == "voc" and options.root is None:
        parser.error("--dataset voc needs --root, the folder that holds VOC2007")
    options.data_shape = options.data_shape or {"digits": 96, "voc": 416}[options.dataset]
    options.lr = LEARNING_RATES[options.dataset] if options.lr is None else options.lr
    return options


def load_datasets(options, job):
    if options.dataset == "voc":
        years = [year for year in (2007, 2012) if (options.root / f"VOC{year}").is_dir()]
        train = VOCDetection(str(options.root), splits=[(year, "trainval") for year in years])
        return train, VOCDetection(str(options.root), splits=[(2007, "test")])
    root = options.root or Path("runs/digits_voc")
    if job.rank == 0:
        write_digits_voc(root, **({"train": options.images} if options.images else {}))
    job.barrier()
    return DigitsDetection(str(root), splits=[(2007, "trainval")]), DigitsDetection(str(root), splits=[(2007, "test")])


class DigitsTrainTransform(YOLO3DefaultTrainTransform):
    """gluoncv's transform without its random changes: a mirrored digit is another, a shrunk one cannot be read."""

    def __call__(self, src, label):
        scale = np.tile([self._width / src.shape[1], self._height / src.shape[0]], 2)
        image = mx.nd.image.to_tensor(mx.image.imresize(src, self._width, self._height))
        image = mx.nd.image.normalize(image, mean=self._mean, std=self._std)
        boxes, ids = mx.nd.array(label[None, :, :4] * scale), mx.nd.array(label[None, :, 4:5])
        targets = self._target_generator(self._fake_x, self._feat_maps, self._anchors, self._offsets, boxes, ids, None)
        return (image, *(target[0] for target in targets), boxes[0])


class PadBoxes:
    """Stacks boxes of shape (n, 4) as (images, count, 4), filled with -1.

    A fixed count, not the largest n of the batch: each new shape makes MXNet set up a static graph anew.
    """

    def __init__(self, count: int):
        self._count = count

    def __call__(self, boxes):
        padded = np.full((len(boxes), self._count, 4), -1, dtype="float32")
        for row, box in zip(padded, boxes):
            if len(box) > self._count:
                raise ValueError(f"an image has {len(box)} objects, more than {self._count}; raise MOST_OBJECTS.")
            row[: len(box)] = box.asnumpy()
        return mx.nd.array(padded, ctx=mx.Context("cpu_shared", 0))


def make_loaders(net, train, test, options, job):
    side = options.data_shape
    transform = DigitsTrainTransform if options.dataset == "digits" else YOLO3DefaultTrainTransform
    batch = options.batch_per_device * len(options.devices)
    targets = Tuple(*[Stack() for _ in range(6)], PadBoxes(MOST_OBJECTS[options.dataset]))
    return (
        gluon.data.DataLoader(
            train.transform(transform(side, side, net)),
            batch,
            **({"sampler": SplitSampler(len(train), job.size, job.rank)} if job.size > 1 else {"shuffle": True}),
            batchify_fn=targets,
            last_batch="discard",
            num_workers=options.workers,
        ),
        gluon.data.DataLoader(
            test.transform(YOLO3DefaultValTransform(side, side)), 10, batchify_fn=Tuple(Stack(), Pad(pad_val=-1))
        ),
    )


def make_detector(classes, dataset: str = "digits"):
    """gluoncv's YOLOv3 on a ResNet, which learns from scratch in far fewer steps than a small MobileNet.

    For digits the ResNet is small, and has no last stage, whose boxes are larger.
    """
    anchors = ANCHORS[dataset]
    layers = ResNetV1(BasicBlockV1, BLOCKS[dataset], CHANNELS[dataset]).features
    stages = [layers[:6], layers[6], layers[7]][: len(anchors)]
    return get_yolov3("resnet", stages, FILTERS[dataset], anchors, STRIDES[: len(anchors)], classes, dataset="")


def build_net(classes, norm: str, devices, dataset: str = "digits"):
    net = make_detector(classes, dataset)
    if norm == "syncbn":
        gluon_syncbn.convert_sync_batchnorm(net)
    net.initialize(mx.init.Xavier(magnitude=2.24), ctx=devices)
    for output in net.yolo_outputs:
        start_without_objects(output.prediction)
    return net


def start_without_objects(prediction) -> None:
    """Let every anchor begin at 1% objectness. With 50%, the first steps would only lower it everywhere.

    The prior of RetinaNet (Lin et al., "Focal Loss for Dense Object Detection", 2017, section 4.1).
    """
    bias = np.zeros((ANCHORS_PER_CELL, prediction.bias.shape[0] // ANCHORS_PER_CELL))
    bias[:, OBJECTNESS] = -np.log(99)
    prediction.bias.set_data(mx.nd.array(bias.ravel()))


def evaluate(net, loader, classes, device) -> float:
    """VOC07 mAP at IoU 0.5 on held-out images."""
    metric = VOC07MApMetric(iou_thresh=0.5, class_names=classes)
    for images, labels in loader:
        ids, scores, boxes = (item.asnumpy() for item in net(images.as_in_context(device)))
        labels = labels.asnumpy()
        boxes = boxes.clip(0, images.shape[2])
        metric.update(boxes, ids, scores, labels[:, :, :4], labels[:, :, 4:5], labels[:, :, 5:6])
    return float(metric.get()[1][-1])


def draw_curve(history, path: Path) -> None:
    epochs = range(1, len(history) + 1)
    figure, left = plt.subplots(figsize=(6, 4))
    left.plot(epochs, [entry["loss"] for entry in history], color="tab:blue", marker="o")
    left.set(xlabel="epoch", title="training loss and mAP on held-out images")
    left.set_ylabel("loss per image", color="tab:blue")
    right = left.twinx()
    right.plot(epochs, [entry["map"] for entry in history], color="tab:orange", marker="s")
    right.set_ylabel("VOC07 mAP", color="tab:orange")
    right.set_ylim(0, 1)
    left.xaxis.get_major_locator().set_params(integer=True)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw_detections(net, dataset, options, path: Path, rows: int = 3, columns: int = 4) -> None:
    transform = YOLO3DefaultValTransform(options.data_shape, options.data_shape)
    figure, axes = plt.subplots(rows, columns, figsize=(3 * columns, 3 * rows))
    for axis, (picture, label) in zip(axes.flat, (dataset[i] for i in range(min(len(dataset), rows * columns)))):
        image, _ = transform(picture, label)
        ids, scores, boxes = (item[0].asnumpy() for item in net(image.expand_dims(0).as_in_context(options.devices[0])))
        boxes = boxes * np.tile([picture.shape[1], picture.shape[0]], 2) / options.data_shape
        plot_bbox(
            picture,
            boxes,
            scores,
            ids,
            class_names=dataset.classes,
            ax=axis,
            linewidth=1.5,
            fontsize=7,
            thresh=SHOWN_SCORE,
        )
        axis.axis("off")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def finish_initialization(net, options) -> None:
    """Run the net once, so that weights whose shapes were not known exist."""
    for device in options.devices:
        net(mx.nd.zeros((1, 3, options.data_shape, options.data_shape), ctx=device))


def train(options) -> list:
    """Run the whole training; returns one dict per epoch with loss, mAP (in the first process) and seconds."""
    job = join(options.processes)
    set_seeds(options.seed)
    options.output.mkdir(parents=True, exist_ok=True)
    parameters, states = options.output / "last.params", options.output / "last.states"
    log = options.output / "history.json"
    train_set, test_set = load_datasets(options, job)

    net = build_net(train_set.classes, options.norm, options.devices, options.dataset)
    train_loader, test_loader = make_loaders(net, train_set, test_set, options, job)
    trainer = make_trainer(net, options.lr, options.epochs * len(train_loader), job)
    # Evaluation sees the results of the saved file, through a plain net with plain BatchNorm.
    plain = make_detector(train_set.classes, options.dataset)
    plain.hybridize(static_alloc=True, static_shape=True)

    def loss_of(image, *targets_and_boxes):
        *targets, boxes = targets_and_boxes
        return sum(loss.sum() for loss in net(image, boxes, *targets))

    history = []
    if options.resume and log.exists():
        history = json.loads(log.read_text(encoding="utf-8"))
        net.load_parameters(str(parameters), ctx=options.devices)
        plain.load_parameters(str(parameters), ctx=options.devices[0])
        schedule = trainer.optimizer.lr_scheduler
        trainer.load_states(str(states))
        trainer.optimizer.lr_scheduler = schedule  # the states have the schedule that ends with the --epochs of then
        random.seed(options.seed + len(history))
        np.random.seed(options.seed + len(history))
    elif job.size > 1:
        finish_initialization(net, options)
        job.broadcast(trainer)
    net.hybridize(static_alloc=True, static_shape=True)  # now that all calls to come have targets, too
    while len(history) < options.epochs:
        started = time.perf_counter()
        label = f"epoch {len(history) + 1}/{options.epochs}"
        to_come = options.epochs - len(history)
        loss = train_epoch(loss_of, train_loader, trainer, options.devices, label, to_come, job.rank == 0)
        seconds = time.perf_counter() - started
        if job.rank > 0:  # the first process evaluates, draws and saves; the others wait for it at their first layer
            history.append({"loss": loss, "seconds": seconds})
            continue
        net.save_parameters(str(parameters))
        trainer.save_states(str(states))
        plain.load_parameters(str(parameters), ctx=options.devices[0])
        score = evaluate(plain, test_loader, test_set.classes, options.devices[0])
        history.append({"loss": loss, "map": score, "seconds": seconds})
        log.write_text(json.dumps(history, indent=1))
        print(f"epoch {len(history)}: loss {loss:.3f}, VOC07 mAP {score:.3f}, {seconds:.0f} s", flush=True)
        draw_curve(history, options.output / "curve.png")
        draw_detections(plain, test_set, options, options.output / "detections.png")
        print(f"  curve.png, detections.png and {parameters.name} are in {options.output}", flush=True)
    return history


if __name__ == "__main__":
    train(parse_arguments())
