"""Training steps over all processes, each compared with `nn.BatchNorm` on the whole batch on one device.

    mpirun -np 2 python tests/jobs/numerics.py mpi DEVICES MODE,... CASE ...

Prints ``RIGHT case mode`` on each process. A process builds a few layers more than those before it, so that
Gluon's names differ.
"""

import os
import sys

import delay
import harness
import job
import mxnet as mx
import numpy as np
import oracle
from gluoncv import model_zoo
from mxnet import autograd
from mxnet.gluon import HybridBlock, nn

import gluon_syncbn

ENGINE, DEVICES, MODES, CASES = sys.argv[1], int(sys.argv[2]), sys.argv[3].split(","), sys.argv[4:]
TIMEOUT = 120
group = job.join(ENGINE)
devices = job.cpus(DEVICES)
total = group.size * DEVICES
# Some processes, and some only, make layers that never train.
extra = [gluon_syncbn.SyncBatchNorm() for _ in range(group.rank)]


class Branches(HybridBlock):
    """Parallel branches with a head that they share; which branch is late differs from process to process."""

    def __init__(self, norm):
        super().__init__()
        with self.name_scope():
            self.norms = [norm() for _ in range(4)]
            for layer in self.norms:
                self.register_child(layer)
            self.head = norm()
            self.conv = nn.Conv2D(3, 3, padding=1, in_channels=3)
            self.late = [delay.Late(lambda device, i=i: 5e-3 * (i == group.rank % 2)) for i in range(2)]
            for block in self.late:
                self.register_child(block)

    def hybrid_forward(self, F, x):
        x = F.cast(x, "float64")
        ends = []
        for i, norm in enumerate(self.norms):
            y = self.head(self.conv(norm(self.late[i % 2](x))))
            ends.append(F.tanh(y) * (i + 1))
        return F.cast(F.add_n(*ends), "float64")


def layer(norm):
    return norm(in_channels=3)


def branches(norm):
    return Branches(lambda: norm(in_channels=3))


def resnet18(norm):
    return model_zoo.get_model("resnet18_v1b", classes=5, norm_layer=norm)


def detector(norm):
    sys.path[:] = [folder for folder in sys.path if not folder.endswith("lean")]  # it draws scikit-learn's digits
    from train_detection import make_detector

    net = make_detector(["a", "b"])
    if norm is not nn.BatchNorm:
        gluon_syncbn.convert_sync_batchnorm(net, timeout=TIMEOUT)
    return net


class Predictions(HybridBlock):
    """The detector up to its predictions: all of its layers, without boxes and targets."""

    def __init__(self, net):
        super().__init__()
        with self.name_scope():
            self.net = net

    def hybrid_forward(self, F, x):
        routes = []
        for stage in self.net.stages:
            x = stage(x)
            routes.insert(0, x)
        predictions = []
        for number, (block, output) in enumerate(zip(self.net.yolo_blocks, self.net.yolo_outputs)):
            x, tip = block(x)
            predictions.append(F.flatten(output.prediction(tip)))
            if number < len(routes) - 1:
                up = F.repeat(F.repeat(self.net.transitions[number](x), axis=-1, repeats=2), axis=-2, repeats=2)
                x = F.concat(up, routes[number + 1], dim=1)
        return F.concat(*predictions, dim=1)


SHAPES = {"layer": (3, 5, 2), "branches": (3, 4, 4), "resnet18": (3, 32, 32), "detector": (3, 64, 64)}
TOLERANCES = {"layer": 1e-5, "branches": 1e-9, "resnet18": 1e-6, "detector": 1e-6}


def train(net, shards, heads, contexts, steps=2):
    """Outputs, input gradients, and sums over these devices of the parameters' gradients, of the last of some steps."""
    for _ in range(steps):
        arrays = [mx.nd.array(shard, ctx=context, dtype=shard.dtype) for shard, context in zip(shards, contexts)]
        for array in arrays:
            array.attach_grad()
        with autograd.record():
            outputs = [net(array) for array in arrays]
        given = [mx.nd.array(head, ctx=context, dtype=head.dtype) for head, context in zip(heads, contexts)]
        autograd.backward(outputs, given)
        mx.nd.waitall()
    gradients = [
        sum(parameter.grad(context).asnumpy() for context in contexts)
        for parameter in net.collect_params().values()
        if parameter.grad_req != "null"
    ]
    statistics = [
        parameter.data(contexts[0]).asnumpy() for name, parameter in net.collect_params().items() if "running" in name
    ]
    return (
        np.concatenate([item.asnumpy() for item in outputs]),
        np.concatenate([item.grad.asnumpy() for item in arrays]),
        gradients,
        statistics,
    )


def build(make, norm, contexts, dtype, file=None):
    net = make(norm)
    if make is detector:
        net = Predictions(net)
    net.cast(dtype)
    net.initialize(mx.init.Xavier(), ctx=contexts)
    if file is None:
        net(mx.nd.zeros((1, *SHAPES[make.__name__]), dtype=dtype))
    else:
        net.load_parameters(file, ctx=contexts)
    return net


def gathered_sum(arrays):
    """Over all processes, of a list of arrays."""
    job.same_everywhere.calls += 1
    flat = np.concatenate([array.astype("float64").ravel() for array in arrays])
    rows = group.all_gather("test.sum", job.same_everywhere.calls, flat, range(group.size), job.never)
    return rows.sum(axis=0)


def check(case: str, mode: str) -> None:
    make, dtype = globals()[case], "float32" if case == "layer" else "float64"
    shapes = [(1 + number % 2 if case != "resnet18" else 2, *SHAPES[case]) for number in range(total)]
    mx.random.seed(3)
    np.random.seed(3)
    folder = os.environ["JOB_FOLDER"]
    file = os.path.join(folder, f"{case}.{group.rank}.params")
    reference = build(make, nn.BatchNorm, [mx.cpu(0)], dtype)
    reference.save_parameters(file)
    shards = harness.random_shards(shapes, dtype, 0)
    with autograd.train_mode():
        out_shape = reference(mx.nd.zeros((1, *SHAPES[case]), dtype=dtype)).shape[1:]
    reference.load_parameters(file)
    heads = harness.random_shards([(shape[0], *out_shape) for shape in shapes], dtype, 1)
    expected = train(reference, [np.concatenate(shards)], [np.concatenate(heads)], [mx.cpu(0)])

    def norm(**options):
        return gluon_syncbn.SyncBatchNorm(**options, timeout=TIMEOUT)

    net = harness.set_mode(build(make, norm, devices, dtype, file), mode)
    mine = [job.shares(group, items, DEVICES) for items in (shards, heads)]
    seen = train(net, *mine, devices)
    rows = job.rows_of(group, shards, DEVICES)
    tolerance = TOLERANCES[case]
    assert oracle.distance([seen[0]], [expected[0][rows]]) < tolerance, "outputs"
    assert oracle.distance([seen[1]], [expected[1][rows]]) < tolerance, "input gradients"
    sums, whole = gathered_sum(seen[2]), np.concatenate([item.ravel() for item in expected[2]])
    assert np.abs(sums - whole).max() < tolerance * np.abs(whole).max(), "gradients"
    if case != "branches":  # nn.BatchNorm averages the calls of a shared layer in the opposite order
        assert oracle.distance(seen[3], expected[3]) < tolerance, "statistics"
    assert job.same_everywhere(group, np.concatenate(seen[3])), "statistics differ between processes"
    job.say("RIGHT", case, mode)


for case in CASES:
    for mode in MODES:
        check(case, mode)
