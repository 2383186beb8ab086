"""The gain of Batch Renormalization if a step has 1 image in all: scikit-learn's digits, a small net, three seeds.

    python examples/compare_renorm.py

``bn``         nn.BatchNorm, 1 image per step: trained with the statistics of an image, used with the running ones.
``renorm``     SyncBatchNorm(renorm=(1, 0)), 1 image per step; r_max and d_max grow to (3, 5).
``reference``  nn.BatchNorm, 16 images per step, the same number of epochs.

Prints the accuracy on held-out digits in prediction mode: the table of docs/studies.md. Some minutes on a CPU.
"""

import argparse
import statistics

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn
from sklearn.datasets import load_digits

import gluon_syncbn

RUNS = {"bn": 1, "renorm": 1, "reference": 16}  # images per step


def make_net(has_renorm):
    net = nn.HybridSequential()
    for channels in (16, 32, 32):
        net.add(nn.Conv2D(channels, 3, padding=1), nn.BatchNorm(), nn.Activation("relu"))
    net.add(nn.GlobalAvgPool2D(), nn.Dense(10))
    if has_renorm:
        gluon_syncbn.convert_sync_batchnorm(net, renorm=(1, 0))
    return net


def run(name: str, seed: int, epochs: int) -> float:
    """The accuracy in percent."""
    mx.random.seed(seed)
    rng = np.random.RandomState(seed)
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 1, 8, 8).astype("float32") / 16
    order = rng.permutation(len(images))
    train, held_out = order[:1400], order[1400:]
    size, steps = RUNS[name], epochs * 1400
    net, step = make_net(name == "renorm"), 0
    net.initialize(mx.init.Xavier())
    net.hybridize(static_alloc=True, static_shape=True)
    trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 1e-3})
    loss = gluon.loss.SoftmaxCrossEntropyLoss()
    for _ in range(epochs):
        shuffled = rng.permutation(train)
        for begin in range(0, len(shuffled) - size + 1, size):
            if name == "renorm" and step % 50 == 0:
                share = np.interp(step, [steps // 8, steps // 3], [0, 1])
                gluon_syncbn.set_renorm(net, r_max=1 + 2 * share, d_max=5 * share)
            step += 1
            chosen = shuffled[begin : begin + size]
            with autograd.record():
                value = loss(net(mx.nd.array(images[chosen])), mx.nd.array(labels[chosen]))
            value.backward()
            trainer.step(size)

    predicted = net(mx.nd.array(images[held_out])).asnumpy().argmax(axis=1)
    return 100 * float(np.mean(predicted == labels[held_out]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    print(f"{options.epochs} epochs of 1,400 digits, {options.seeds} seeds")
    print("| run | images per step | held-out accuracy | each seed |\n| --- | --- | --- | --- |")
    for name, size in RUNS.items():
        accuracies = [run(name, seed, options.epochs) for seed in range(options.seeds)]
        shown = ", ".join(f"{value:.1f}" for value in accuracies)
        print(f"| {name} | {size} | {statistics.mean(accuracies):.1f} % | {shown} |", flush=True)


if __name__ == "__main__":
    main()
