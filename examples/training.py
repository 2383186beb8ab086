"""Shared by the training examples: options, seeds, the optimizer, and one pass over the training images."""

import argparse
import random
import time

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from processes import Alone
from tqdm import tqdm

WARM_UP_STEPS = 50
ALONE = Alone()
# The first steps build graphs; the next ones predict how long the training will take.
SETTLED, TIMED = 5, 25


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--norm", choices=["syncbn", "bn"], default="syncbn", help="normalization layer")
    parser.add_argument(
        "--devices", type=parse_devices, default="cpu:4", help="cpu:4 for four CPU devices, gpu:0,1 for those GPUs"
    )
    parser.add_argument("--batch-per-device", type=int, default=1, help="images per device and step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=1e-3, help="peak learning rate of Adam; 0.003 to detect digits")
    parser.add_argument("--workers", type=int, default=1, help="processes that prepare training images")


def parse_devices(text: str) -> list:
    """``cpu:4`` is cpu(0) to cpu(3); ``cpu:0,2`` and ``gpu:0,1`` list devices."""
    kind, _, numbers = text.partition(":")
    try:
        make = {"cpu": mx.cpu, "gpu": mx.gpu}[kind]
        ids = [int(number) for number in numbers.split(",")]
    except (KeyError, ValueError):
        raise argparse.ArgumentTypeError(f"{text!r} is not like cpu:4 or gpu:0,1") from None
    ids = list(range(ids[0])) if kind == "cpu" and len(ids) == 1 else ids
    if not ids or min(ids) < 0 or len(set(ids)) < len(ids):
        raise argparse.ArgumentTypeError(f"{text!r} names no device, or one twice; cpu:4 is cpu(0) to cpu(3)")
    return [make(i) for i in ids]


def set_seeds(seed: int) -> None:
    for set_seed in (random.seed, np.random.seed, mx.random.seed):
        set_seed(seed)


def make_trainer(net, lr: float, steps: int, job: Alone = ALONE) -> gluon.Trainer:
    """Adam, whose learning rate rises to ``lr`` in the first steps and falls to 0 along a cosine until the last."""
    schedule = mx.lr_scheduler.CosineScheduler(steps, lr, final_lr=0, warmup_steps=WARM_UP_STEPS)
    return job.make_trainer(net.collect_params(), "adam", {"learning_rate": lr, "lr_scheduler": schedule})


def train_epoch(loss_of, loader, trainer, devices, label: str, epochs_to_come: int, shows=True) -> float:
    """One pass over the training images; returns the mean loss per image.

    ``loss_of`` gets a device's part of each array of a batch, and returns one number, the sum of its images' losses.
    After some steps it prints how long ``epochs_to_come`` will take, this one included.
    """
    total, images, waiting, stamps = 0.0, 0, [], []
    with tqdm(total=len(loader) * loader._batch_sampler._batch_size, desc=label, unit="img", disable=not shows) as bar:
        for batch in loader:
            size = batch[0].shape[0]
            shards = zip(*(gluon.utils.split_and_load(part, devices, even_split=False) for part in batch))
            with autograd.record():
                losses = [loss_of(*shard) for shard in shards]
            autograd.backward(losses)
            trainer.step(size)
            waiting.append((losses, size))
            if len(waiting) > 1:  # read one step late, so that MXNet always has the next step at hand
                total, images = add_loss(total, images, *waiting.pop(0))
                bar.set_postfix(loss=f"{total / images:.3f}", refresh=False)
            bar.update(size)
            stamps.append(time.perf_counter())
            if len(stamps) == TIMED and shows:
                seconds = (stamps[-1] - stamps[SETTLED]) / (TIMED - 1 - SETTLED) * len(loader) * epochs_to_come
                bar.write(f"the first steps say: {max(seconds / 60, 1):.0f} min for {epochs_to_come} epochs")
    for step in waiting:
        total, images = add_loss(total, images, *step)
    return total / images


def add_loss(total: float, images: int, losses, size: int):
    return total + sum(float(loss.asnumpy()) for loss in losses), images + size
