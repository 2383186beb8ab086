"""Random networks on several CPU devices, each compared with one device that has the whole batch, in float64.

    python tests/graphs.py --backend native --mode static --first 0 --count 500

A graph has 2 to 6 branches of different depth, joined by a sum or concat. They have convolutions, pooling, Dropout,
sums with what other branches have computed, and norms: new ones, those of another place once more, twins that share
their Parameters, and a head (convolution and norm) that all branches share. Behind a norm is often what it could
compute in its own passes. It trains two steps on 2 to 4 devices.

The reference is the same graph with `Whole`, which shares no code with the package, and with the masks that Dropout
drew. float64 graphs may have ReLU and maximum pooling; float32 ones, whose convolutions work in oneDNN's layouts, are
smooth, so that rounding cannot flip a decision.
"""

import argparse
import copy
import logging
import os
import random
import re
from collections import Counter

import mxnet as mx
import numpy as np
import reference
import testing
from mxnet import autograd
from mxnet.gluon import HybridBlock, nn

from gluon_syncbn import convert_sync_batchnorm

CHANNELS = 4
# Units of rounding by which a random network may differ from its reference.
UNITS = 3000
# How many times as much as a second computation differs. (The portable back end rounds more: its mean is in a bias.)
LIKE_IT = {"float32": 16, "float64": 128}
# Gradients of parameters are compared as if they were at least this share of the largest of all: that of β before a
# norm is rounding alone, and in float32 the rounding of deep networks is much more than that of their outputs.
ROUNDING = {"float32": 10.0, "float64": 2.0**-10}


class Whole(nn.BatchNorm):
    """Batch Normalization of four axes written out. It learns in the forward pass, in the order of its calls."""

    def hybrid_forward(self, F, x, gamma, beta, running_mean, running_var):
        axis, share = self._kwargs["axis"] % 4, self._kwargs["momentum"]
        others = [other for other in range(4) if other != axis]
        gamma, beta, mean, var = (
            vector.reshape([1] * axis + [-1] + [1] * (3 - axis)) for vector in (gamma, beta, running_mean, running_var)
        )
        if autograd.is_training():
            mean = x.mean(axis=others, keepdims=True)
            var = F.square(x - mean).mean(axis=others, keepdims=True)
            with autograd.pause():
                for old, new in ((running_mean, mean), (running_var, var)):
                    old[:] = share * old + (1 - share) * new.reshape(-1)
        return gamma * (x - mean) / (var + self._kwargs["eps"]).sqrt() + beta


class Pair:
    """A net that has been converted, and its reference: the same net with `Whole` on one device.

    ``units``: of rounding that they may differ, as a share of the largest value in each channel. ``is_leaky``: the
    output is that of MXNet's leaky ReLU, which computes in float32, whatever the dtype.
    """

    def __init__(self, net, whole, devices, dtype="float64", mode="imperative", *, units=None, axis=1, is_leaky=False):
        self.net, self.whole, self.devices, self.dtype, self._axis = net, whole, testing.cpus(devices), dtype, axis
        usual = {"float16": {"roundings": 4}, "float32": {"units": 300}, "float64": {"units": 3000}}[dtype]
        self._how = {"units": units} if units else usual
        self._share = ROUNDING[dtype] if units else 2.0**-8
        self._of_output = {"units": 16, "real": "float32"} if is_leaky and dtype == "float64" else self._how
        for block, contexts, its_dtype in ((net, self.devices, dtype), (whole, [mx.cpu(0)], "float64")):
            block.cast(its_dtype)
            block.initialize(mx.init.Xavier(), ctx=contexts)
        ours, theirs = (list(block.collect_params().values()) for block in (net, whole))
        assert len(ours) == len(theirs)
        rng = np.random.RandomState(len(ours))
        for one, other in zip(ours, theirs):
            if one.name.endswith(("gamma", "beta")):
                one.set_data(mx.nd.array(rng.uniform(-1, 2, one.shape), dtype=one.dtype))
            other.set_data(one.data(mx.cpu(0)).astype("float64"))
        # A norm of small numbers enlarges their rounding: how much, the same in float32 shows, or with other last bits.
        self._rough = copy.deepcopy(whole) if units else None
        if self._rough:
            self._rough.cast(dtype)
            for one in self._rough.collect_params().values() if dtype == "float64" else ():
                signs = mx.nd.array(rng.choice([-1, 1], one.shape), dtype=dtype)
                one.set_data(one.data() * (1 + 8 * reference.UNIT[dtype] * signs))
        self._learned = [both for both in zip(ours, theirs) if both[1].grad_req != "null"]
        self._running = [both for both in zip(ours, theirs) if both[1].grad_req == "null"]
        testing.set_mode(net, mode)

    def inputs(self, shards, request="write") -> list:
        made = [mx.nd.array(shard, ctx=device, dtype=self.dtype) for shard, device in zip(shards, self.devices)]
        for item in made if request != "null" else []:
            item.attach_grad(request)
        return made

    def check_step(self, shards, heads, inputs=None, times=1) -> None:
        """One training step of both: outputs, gradients of inputs and parameters, running statistics.

        ``inputs``: to which ``times`` such gradients have been added then, if they have any.
        """
        inputs = inputs or self.inputs(shards)
        results = _train(self.net, [(item,) for item in inputs], heads)
        masks = [np.concatenate(parts) for parts in list(zip(*results))[1:]]
        output, gradient, wanted = _train_whole(self.whole, "float64", shards, heads, masks)
        least = self._share * max([np.abs(item).max() for item in wanted], default=0)
        of_output = of_input = 0.0
        if self._rough:
            rough = _train_whole(self._rough, self.dtype, shards, heads, masks)
            scale = LIKE_IT[self.dtype] / (self._how["units"] * reference.UNIT[self.dtype])
            of_output, of_input = (scale * np.abs(a - b).max() for a, b in zip(rough, (output, gradient)))
            least = max(least, scale * max(np.abs(a - b).max() for a, b in zip(rough[2], wanted)))

        outputs = np.concatenate([result[0] for result in results])
        self._check("output", outputs, output, self._axis, of_output, **self._of_output)
        if inputs[0].grad is not None:
            gradients = np.concatenate([item.grad.asnumpy() for item in inputs])
            self._check("input gradient", gradients, times * gradient, self._axis, of_input)
        if self.dtype == "float16":  # each value behind the norm was rounded before they were added up
            least = max(least, np.sqrt(sum(np.square(head).sum() for head in heads) / CHANNELS))
        for (ours, _), gradient in zip(self._learned, wanted):
            total = sum(ours.grad(device).asnumpy().astype("float64") for device in self.devices)
            self._check(f"gradient of {ours.name}", total, gradient, 0, least)
        variances = {theirs.name: theirs.data().asnumpy() for _, theirs in self._running}
        for ours, theirs in self._running:
            # A mean that is 0 by chance is as wrong as the numbers that it was computed from.
            is_mean = theirs.name.endswith("mean")
            least = np.sqrt(variances[theirs.name.replace("running_mean", "running_var")]) * is_mean
            for device in self.devices:
                self._check(f"{ours.name} on {device}", ours.data(device).asnumpy(), theirs.data().asnumpy(), 0, least)

    def check_steps(self, shapes, count=2, seed=0, **how) -> None:
        """Several, with other numbers each."""
        for number in range(seed, seed + count):
            self.check_step(
                *(testing.random_shards(shapes, self.dtype, number + more, 0.3, **how) for more in (0, 10**6))
            )

    def _check(self, what, seen, expected, axis, least=0.0, **how) -> None:
        size = np.abs(np.moveaxis(expected, axis, -1)).reshape(-1, expected.shape[axis]).max(0)
        wanted = reference.Sized(expected, np.maximum(size, least))
        reference.check(what, seen, wanted, self.dtype, axis=axis, **(how or self._how))


def _train_whole(block, dtype, shards, heads, masks) -> tuple:
    """Output and gradients of the input and of the parameters, in a step with the whole batch on one device."""
    batch, *masks = (mx.nd.array(item, dtype=dtype) for item in (np.concatenate(shards), *masks))
    batch.attach_grad()
    ((output, *_),) = _train(block, [(batch, *masks)], [np.concatenate(heads)])
    parameters = [item for item in block.collect_params().values() if item.grad_req != "null"]
    return output, batch.grad.asnumpy(), [item.grad().asnumpy() for item in parameters]


def _train(block, inputs, heads) -> list:
    """Outputs of a training step as NumPy arrays; gradients are left in the inputs and parameters."""
    with autograd.record():
        results = [block(*arrays) for arrays in inputs]
    results = [result if isinstance(result, (list, tuple)) else [result] for result in results]
    outputs = [result[0] for result in results]
    autograd.backward(outputs, [mx.nd.array(head, ctx=y.context, dtype=y.dtype) for head, y in zip(heads, outputs)])
    return [[item.asnumpy() for item in result] for result in results]


# What is behind a norm: y is what it gives, and x another value.
FOLLOWED = {
    "nothing": lambda F, y, x: y,
    "tanh": lambda F, y, x: F.tanh(y),
    "sum": lambda F, y, x: y + x,
    "relu": lambda F, y, x: F.relu(y),
    "skip": lambda F, y, x: F.relu(y + x),
    "skip first": lambda F, y, x: F.Activation(x + y, act_type="relu"),
    "read twice": lambda F, y, x: F.relu(y) + y,
}
SMOOTH = ["nothing", "tanh", "sum"]


class Plan:
    """What a random graph looks like."""

    def __init__(self, seed: int):
        self._draw = draw = random.Random(seed)
        self.dtype = draw.choice(["float32", "float64", "float64"])
        self.devices = draw.randint(2, 4)
        side = draw.choice([4, 6, 8])
        self.shapes = [(draw.randint(1, 2), CHANNELS, side, side) for _ in range(self.devices)]
        self.join = draw.choice(["add", "concat"])
        self.fuse, self.is_leaky = draw.random() < 0.9, draw.random() < 0.3
        self.blocks = [("conv", None), ("norm", None)]  # the head's; and of which other block it is a twin
        self._steps = ["norm"] * 5 + ["conv", "head", "head", "avg", "dropout"] + ["max"] * (self.dtype == "float64")
        self._follow = list(FOLLOWED) if self.dtype == "float64" else SMOOTH
        self.branches = [self._branch() for _ in range(draw.randint(2, 6))]

    def _branch(self) -> list:
        """Steps: what, which block, what follows, and the number of another value."""
        draw = self._draw
        body = [draw.choice(self._steps) for _ in range(draw.randint(1, 5))]
        names = ["shrink", *body, "enlarge"] if draw.random() < 0.3 else body
        return [(name, self._block(name), draw.choice(self._follow), draw.randrange(100)) for name in names]

    def _block(self, name: str) -> int:
        if name not in ("norm", "conv"):
            return 0
        others = [number for number, (kind, twin) in enumerate(self.blocks) if kind == name and twin is None]
        how = self._draw.choice(["new", "new", "new", "again", "twin"])
        if how == "again":
            return self._draw.choice(others)
        self.blocks.append((name, self._draw.choice(others) if how == "twin" and name == "norm" else None))
        return len(self.blocks) - 1


class Net(HybridBlock):
    """The graph of a plan. Returns its output and the masks that Dropout drew, or uses the masks that it is given."""

    def __init__(self, plan: Plan, norm):
        super().__init__()
        self._plan = plan
        with self.name_scope():
            self.blocks, made = nn.HybridSequential(), []
            for kind, twin in plan.blocks:
                shared = {} if twin is None else {"params": made[twin].params}
                made.append(norm(in_channels=CHANNELS, epsilon=1e-3, **shared) if kind == "norm" else self._conv(3))
                self.blocks.add(made[-1])
            self.last_conv = self._conv(1, len(plan.branches) if plan.join == "concat" else 1)
            self.last_norm = norm(in_channels=CHANNELS, epsilon=1e-3)

    @staticmethod
    def _conv(kernel, times=1):
        # A bias before a norm has no gradient but rounding.
        return nn.Conv2D(CHANNELS, kernel, padding=kernel // 2, in_channels=times * CHANNELS, use_bias=False)

    def hybrid_forward(self, F, x, *given):
        masks, values = [], [x]
        ends = [self._run(F, x, branch, given, masks, values) for branch in self._plan.branches]
        joined = sum(ends[1:], ends[0]) if self._plan.join == "add" else F.concat(*ends, dim=1)
        last = self.last_norm(self.last_conv(joined))
        return [F.LeakyReLU(last) if self._plan.is_leaky else last, *masks]

    def _run(self, F, x, branch, given, masks, values):
        """``values``: all of this size that branches have computed."""
        large = values
        for what, block, follow, number in branch:
            if what in ("norm", "head"):
                y = self.blocks[1](self.blocks[0](x)) if what == "head" else self.blocks[block](x)
                x = FOLLOWED[follow](F, y, values[number % len(values)])
            elif what == "conv":
                x = self.blocks[block](x)
            elif what == "dropout":
                masks.append(given[len(masks)] if given else F.Dropout(F.ones_like(x), p=0.3))
                x = x * masks[-1]
            elif what in ("avg", "max"):
                x = F.Pooling(x, kernel=(3, 3), pad=(1, 1), pool_type=what)
            elif what == "shrink":
                x = F.Pooling(x, kernel=(2, 2), stride=(2, 2), pool_type="avg")
                values = []
            elif what == "enlarge":
                x, values = F.UpSampling(x, scale=2, sample_type="nearest"), large
            values.append(x)
        return x


def run(seed: int, mode: str) -> None:
    """Two steps of graph ``seed``."""
    plan = Plan(seed)
    net = convert_sync_batchnorm(Net(plan, nn.BatchNorm), fuse=plan.fuse, timeout=60)
    how = {"units": UNITS, "is_leaky": plan.is_leaky}
    Pair(net, Net(plan, Whole), plan.devices, plan.dtype, mode, **how).check_steps(plan.shapes, seed=seed, std=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=["native", "portable"], required=True)
    parser.add_argument("--mode", choices=[*testing.MODES, "in turn"], default="in turn")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=500)
    options = parser.parse_args()
    os.environ["GLUON_SYNCBN_BACKEND"] = options.backend
    # MXNet cannot hybridize all nets in which more than 8 read one array: "control dep not found in graph".
    os.environ["MXNET_EXEC_INPLACE_GRAD_SUM_CAP"] = "1000"
    logger, fused = logging.getLogger("gluon_syncbn"), Counter()
    logger.setLevel(logging.INFO)
    logger.addFilter(lambda record: fused.update(re.findall(r"× ([\w ]+)", record.getMessage())) or record.levelno > 20)
    for seed in range(options.first, options.first + options.count):
        mode = list(testing.MODES)[seed % 3] if options.mode == "in turn" else options.mode
        print(f"graph {seed}, {mode}", flush=True)
        run(seed, mode)
    print(f"RIGHT: {options.count} graphs, fused {sorted(fused)}")


if __name__ == "__main__":
    main()
