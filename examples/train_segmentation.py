"""Train a segmentation network (GluonCV's PSPNet, on its ResNet-18) on several devices of one host.

    python examples/train_segmentation.py --norm syncbn --devices cpu:4 --batch-per-device 1

PSPNet has a branch that pools the whole image to one pixel and normalizes that. With one image per device,
`nn.BatchNorm` sees one value per channel there. It returns β for every image, and its running variance goes to 0,
so the branch explodes in evaluation. Compare ``--norm bn``. The script makes its data set (digits_voc.py). Writes to
``--output``: last.params, masks.png with held-out images, and history.json.
"""

import argparse
import json
import time
from pathlib import Path

import matplotlib
import mxnet as mx
import numpy as np
from digits_voc import DigitsSegmentation, write_digits_voc
from gluoncv.model_zoo.fcn import _FCNHead
from gluoncv.model_zoo.pspnet import _PyramidPooling
from gluoncv.model_zoo.segbase import SegBaseModel
from gluoncv.utils.metrics.segmentation import SegmentationMetric
from mxnet import gluon
from mxnet.gluon import nn
from mxnet.gluon.data.vision import transforms
from training import add_options, make_trainer, set_seeds, train_epoch

import gluon_syncbn

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402

SIDE = 128  # of the images, in pixels
STRIDE = 8  # of GluonCV's dilated backbones
AUXILIARY = 0.2  # weight of the loss of the branch after the third stage, as in GluonCV
NORMALIZE = transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])


def parse_arguments(arguments=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--root", type=Path, default=Path("runs/digits_voc"), help="where to write the data set")
    parser.add_argument("--output", type=Path, default=Path("runs/segmentation"))
    return parser.parse_args(arguments)


class PSPNet(SegBaseModel):
    """GluonCV's PSPNet with heads that fit ResNet-18; its own are made for ResNet-50 and larger."""

    def __init__(self, nclass: int):
        super().__init__(nclass, aux=True, backbone="resnet18", pretrained_base=False, crop_size=SIDE)
        with self.name_scope():
            self.head = nn.HybridSequential()
            side = SIDE // STRIDE
            self.head.add(
                _PyramidPooling(512, side, side, norm_layer=nn.BatchNorm, norm_kwargs=None),
                nn.Conv2D(128, 3, padding=1, use_bias=False),
                nn.BatchNorm(),
                nn.Activation("relu"),
                nn.Conv2D(nclass, 1),
            )
            self.auxlayer = _FCNHead(256, nclass)

    def hybrid_forward(self, F, x):
        c3, c4 = self.base_forward(x)
        return tuple(F.contrib.BilinearResize2D(y, **self._up_kwargs) for y in (self.head(c4), self.auxlayer(c3)))


def make_loaders(options):
    root = str(write_digits_voc(options.root))
    prepare = transforms.Compose([transforms.ToTensor(), NORMALIZE])
    train, test = (DigitsSegmentation(root, split, "testval", prepare) for split in ("train", "val"))
    batch = options.batch_per_device * len(options.devices)
    return (
        gluon.data.DataLoader(train, batch, shuffle=True, last_batch="discard", num_workers=options.workers),
        gluon.data.DataLoader(test, 10),
    )


def evaluate(net, loader, device) -> float:
    """Mean intersection over union of all classes, background included, on held-out images."""
    metric = SegmentationMetric(net.nclass)
    for images, masks in loader:
        metric.update([masks], [net(images.as_in_context(device))[0].as_in_context(mx.cpu())])
    return float(metric.get()[1])


def draw_masks(net, dataset, device, path: Path, columns: int = 6) -> None:
    figure, axes = plt.subplots(3, columns, figsize=(2 * columns, 6))
    for column, title in enumerate(("image", "truth", "predicted")):
        axes[column, 0].set_ylabel(title)
    for number, column in enumerate(axes.T):
        picture, mask = dataset[number]
        predicted = net(picture.expand_dims(0).as_in_context(device))[0][0].argmax(axis=0)
        mean, std = (np.array(values).reshape(3, 1, 1) for values in (NORMALIZE._mean, NORMALIZE._std))
        column[0].imshow((picture.asnumpy() * std + mean).transpose(1, 2, 0).clip(0, 1))
        for axis, labels in zip(column[1:], (mask, predicted)):
            drawn = axis.imshow(labels.asnumpy(), cmap="nipy_spectral", vmin=0, vmax=10, interpolation="nearest")
        for axis in column:
            axis.set(xticks=[], yticks=[])
    figure.tight_layout(rect=(0, 0, 0.93, 1))
    bar = figure.colorbar(drawn, cax=figure.add_axes((0.94, 0.1, 0.01, 0.5)), ticks=range(11))
    bar.ax.set_yticklabels(["none", *map(str, range(10))], fontsize=7)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def train(options) -> list:
    """Run the whole training; returns one dict per epoch with loss, mIoU and seconds."""
    set_seeds(options.seed)
    options.output.mkdir(parents=True, exist_ok=True)
    parameters = str(options.output / "last.params")
    train_loader, test_loader = make_loaders(options)

    net = PSPNet(DigitsSegmentation.NUM_CLASS)
    if options.norm == "syncbn":
        gluon_syncbn.convert_sync_batchnorm(net)
    net.initialize(mx.init.Xavier(magnitude=2), ctx=options.devices)
    trainer = make_trainer(net, options.lr, options.epochs * len(train_loader))
    net.hybridize(static_alloc=True, static_shape=True)
    softmax_loss = gluon.loss.SoftmaxCrossEntropyLoss(axis=1)  # GluonCV's is slower: it cannot be hybridized
    # Evaluation sees the results of the saved file, through a plain net with plain BatchNorm.
    plain = PSPNet(DigitsSegmentation.NUM_CLASS)
    plain.hybridize(static_alloc=True, static_shape=True)

    def loss_of(image, mask):
        main, auxiliary = net(image)
        return (softmax_loss(main, mask) + AUXILIARY * softmax_loss(auxiliary, mask)).sum()

    history = []
    for epoch in range(1, options.epochs + 1):
        started = time.perf_counter()
        label, to_come = f"epoch {epoch}/{options.epochs}", options.epochs - epoch + 1
        loss = train_epoch(loss_of, train_loader, trainer, options.devices, label, to_come)
        seconds = time.perf_counter() - started
        net.save_parameters(parameters)
        plain.load_parameters(parameters, ctx=options.devices[0])
        score = evaluate(plain, test_loader, options.devices[0])
        history.append({"loss": loss, "miou": score, "seconds": seconds})
        (options.output / "history.json").write_text(json.dumps(history, indent=1))
        print(f"epoch {epoch}: loss {loss:.3f}, mIoU {score:.3f}, {seconds:.0f} s", flush=True)
        draw_masks(plain, test_loader._dataset, options.devices[0], options.output / "masks.png")
        print(f"  masks.png and {parameters} are in {options.output}", flush=True)
    return history


if __name__ == "__main__":
    train(parse_arguments())
