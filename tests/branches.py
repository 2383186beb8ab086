"""Random networks with parallel branches on several CPU devices, each compared with one device and the whole batch.

    python tests/branches.py --backend native --mode static --first 0 --count 500

A graph has 2 to 6 branches of different depth, joined by add or concat, made of synchronized layers, convolutions,
pooling, Dropout, and a head (convolution and synchronized layer) that branches share and may call several times. It
runs one training step on 2 to 4 devices. The reference is the same graph with `nn.BatchNorm` on one device, and with
the masks that Dropout drew. float64 graphs may have ReLU and maximum pooling; float32 ones, whose convolutions work in
oneDNN's layouts, are smooth, so that rounding cannot flip a decision.
"""

import argparse
import random
import time

import harness
import mxnet as mx
import numpy as np
import oracle
from mxnet import autograd
from mxnet.gluon import HybridBlock, nn

import gluon_syncbn

CHANNELS = 4
TOLERANCES = {"float32": 2e-4, "float64": 1e-9}


class Plan:
    """What a random graph looks like."""

    def __init__(self, seed: int):
        draw = random.Random(seed)
        self.dtype = draw.choice(["float32", "float64"])
        self.devices = draw.randint(2, 4)
        self.images = [draw.randint(1, 2) for _ in range(self.devices)]
        self.side = draw.choice([4, 6, 8])
        smooth = ["norm", "norm", "conv", "shared", "shared", "avg", "dropout", "tanh"]
        steps = smooth + (["relu", "max"] if self.dtype == "float64" else [])
        self.branches = []
        for _ in range(draw.randint(2, 6)):
            body = [draw.choice(steps) for _ in range(draw.randint(1, 5))]
            self.branches.append(["shrink", *body, "enlarge"] if draw.random() < 0.3 else body)
        self.join = draw.choice(["add", "concat"])
        self.dropouts = sum(branch.count("dropout") for branch in self.branches)


class Net(HybridBlock):
    """The graph of a plan. Returns its output and the masks that Dropout drew, or uses the masks that it is given."""

    def __init__(self, plan: Plan, norm):
        super().__init__()
        self.plan = plan
        with self.name_scope():
            self.head_conv, self.head_norm = self._conv(), norm()
            self.branches = []
            for steps in plan.branches:
                blocks = [{"norm": norm, "conv": self._conv}.get(step, lambda: None)() for step in steps]
                for block in filter(None, blocks):
                    self.register_child(block)
                self.branches.append(list(zip(steps, blocks)))
            width = CHANNELS * (len(plan.branches) if plan.join == "concat" else 1)
            self.last_conv = nn.Conv2D(CHANNELS, 1, in_channels=width)
            self.last_norm = norm()

    @staticmethod
    def _conv():
        return nn.Conv2D(CHANNELS, 3, padding=1, in_channels=CHANNELS)

    def hybrid_forward(self, F, x, *given):
        given, masks = list(given), []
        ends = [self._run(F, x, branch, given, masks) for branch in self.branches]
        joined = sum(ends[1:], ends[0]) if self.plan.join == "add" else F.concat(*ends, dim=1)
        y = self.last_norm(self.last_conv(joined))
        return [y, *masks]

    def _run(self, F, x, branch, given, masks):
        for step, block in branch:
            if block is not None:
                x = block(x)
            elif step == "shared":
                x = self.head_norm(self.head_conv(x))
            elif step == "dropout":
                masks.append(given[len(masks)] if given else F.Dropout(F.ones_like(x), p=0.3))
                x = x * masks[-1]
            elif step in ("relu", "tanh"):
                x = F.Activation(x, act_type=step)
            elif step in ("avg", "max"):
                x = F.Pooling(x, kernel=(3, 3), pad=(1, 1), pool_type=step)
            elif step == "shrink":
                x = F.Pooling(x, kernel=(2, 2), stride=(2, 2), pool_type="avg")
            elif step == "enlarge":
                x = F.UpSampling(x, scale=2, sample_type="nearest")
        return x


def run(seed: int, mode: str) -> float:
    """One step of graph ``seed``; the largest difference to the reference, as a share of its tolerance."""
    plan = Plan(seed)
    devices = harness.cpus(plan.devices)
    layers = []

    def synchronized():
        layers.append(gluon_syncbn.SyncBatchNorm(in_channels=CHANNELS, timeout=20, epsilon=1e-3))
        return layers[-1]

    net = Net(plan, synchronized)
    reference = Net(plan, lambda: nn.BatchNorm(in_channels=CHANNELS, epsilon=1e-3))
    for block, contexts in ((net, devices), (reference, [mx.cpu(0)])):
        block.cast(plan.dtype)
        block.initialize(mx.init.Xavier(), ctx=contexts)
    pairs = list(zip(net.collect_params().values(), reference.collect_params().values()))
    for ours, theirs in pairs:
        ours.set_data(theirs.data())
    harness.set_mode(net, mode)
    shapes = [(images, CHANNELS, plan.side, plan.side) for images in plan.images]
    shards, heads = (harness.random_shards(shapes, plan.dtype, seed + extra, 0.3, 1) for extra in (0, 10**6))

    arrays = [mx.nd.array(shard, ctx=device, dtype=plan.dtype) for shard, device in zip(shards, devices)]
    results = step(net, [(array,) for array in arrays], heads)
    masks = [mx.nd.array(np.concatenate(parts), dtype=plan.dtype) for parts in list(zip(*results))[1:]]
    whole = mx.nd.array(np.concatenate(shards), dtype=plan.dtype)
    ((expected, *_),) = step(reference, [(whole, *masks)], [np.concatenate(heads)])

    differences = [
        oracle.distance([np.concatenate([result[0] for result in results])], [expected]),
        oracle.distance([np.concatenate([array.grad.asnumpy() for array in arrays])], [whole.grad.asnumpy()]),
    ]
    gradients = [
        (sum(ours.grad(device).asnumpy() for device in devices), theirs.grad().asnumpy())
        for ours, theirs in pairs
        if theirs.grad_req != "null"
    ]
    differences.append(oracle.distance(*zip(*gradients)))
    for layer in layers:
        for parameter in (layer.running_mean, layer.running_var):
            copies = [parameter.data(device).asnumpy() for device in devices]
            assert all(np.array_equal(copies[0], copy) for copy in copies), "running statistics differ"
    return max(differences) / TOLERANCES[plan.dtype]


def step(block, inputs, heads):
    """Outputs of a training step as NumPy arrays; gradients are left in the first input of each device."""
    for first, *_ in inputs:
        first.attach_grad()
    with autograd.record():
        results = [block(*arrays) for arrays in inputs]
    results = [result if isinstance(result, (list, tuple)) else [result] for result in results]
    autograd.backward(
        [result[0] for result in results],
        [mx.nd.array(head, ctx=result[0].context, dtype=head.dtype) for head, result in zip(heads, results)],
    )
    return [[item.asnumpy() for item in result] for result in results]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=["native", "portable"], required=True)
    parser.add_argument("--mode", choices=[*harness.MODES, "in turn"], default="in turn")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=500)
    options = parser.parse_args()
    harness.os.environ["GLUON_SYNCBN_BACKEND"] = options.backend
    started, worst = time.perf_counter(), 0.0
    for seed in range(options.first, options.first + options.count):
        mode = list(harness.MODES)[seed % 3] if options.mode == "in turn" else options.mode
        print(f"graph {seed}, {mode}", flush=True)
        difference = run(seed, mode)
        assert difference < 1, f"graph {seed}, {mode}: {difference} times the tolerance"
        worst = max(worst, difference)
    print(f"RIGHT: {options.count} graphs, {time.perf_counter() - started:.0f} s, worst {worst:.2g} of its tolerance")


if __name__ == "__main__":
    main()
