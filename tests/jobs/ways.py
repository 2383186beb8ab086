"""What users do with a job of several processes beside training a net on all of them.

mpirun -np N python tests/jobs/ways.py mpi WAY
"""

import json
import os
import sys

import job
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

import gluon_syncbn

ENGINE, WAY = sys.argv[1:3]
SHAPE = (2, 4, 3, 3)


def data(number: int, images: int = 2) -> np.ndarray:
    return np.random.RandomState(number).standard_normal((images, *SHAPE[1:])).astype("float32")


def normalized(parts: list) -> list:
    """Each part as Batch Normalization of all parts gives it."""
    whole = np.concatenate(parts).astype("float64")
    mean, var = (function(whole, axis=(0, 2, 3), keepdims=True) for function in (np.mean, np.var))
    return [(part - mean) / np.sqrt(var + 1e-5) for part in parts]


def make(devices, **options):
    layer = gluon_syncbn.SyncBatchNorm(in_channels=4, timeout=60, **options)
    layer.initialize(ctx=devices)
    return layer


def run(layer, parts, devices):
    with autograd.record():
        outputs = [layer(mx.nd.array(part, ctx=device)) for part, device in zip(parts, devices)]
    autograd.backward(outputs)
    return [output.asnumpy() for output in outputs]


def close(seen, expected) -> bool:
    return np.abs(seen - expected).max() < 1e-5


def groups():
    """2 devices each; groups of 1, 2, 4 and all devices, which may end within a process."""
    group = job.join(ENGINE)
    devices, total = job.cpus(2), 2 * group.size
    for backend in ("native", "portable"):
        for size in [size for size in (1, 2, 3, 4, 6) if total % size == 0]:
            parts = [data(number) for number in range(total)]
            expected = [item for first in range(0, total, size) for item in normalized(parts[first : first + size])]
            layer = make(devices, group_size=size, backend=backend)
            mine = slice(2 * group.rank, 2 * group.rank + 2)
            for seen, right in zip(run(layer, parts[mine], devices), expected[mine]):
                assert close(seen, right), (backend, size)


def some_of_the_processes():
    """Odd and even processes synchronize among themselves, in groups that the user has made."""
    group = job.join(ENGINE)
    colour = group.rank % 2
    if ENGINE == "mpi":
        from mpi4py import MPI

        mine = MPI.COMM_WORLD.Split(colour)
    else:
        import horovod.mxnet as hvd

        sets = [hvd.add_process_set(range(start, group.size, 2)) for start in range(2)]
        mine = sets[colour]
    parts = [data(rank) for rank in range(group.size)]
    layer = make([mx.cpu(0)], process_group=mine)
    (seen,) = run(layer, [parts[group.rank]], [mx.cpu(0)])
    assert close(seen, normalized(parts[colour::2])[group.rank // 2])
    (seen,) = run(make([mx.cpu(0)]), [parts[group.rank]], [mx.cpu(0)])
    assert close(seen, normalized(parts)[group.rank])
    (seen,) = run(make([mx.cpu(0)], process_group="none"), [parts[group.rank]], [mx.cpu(0)])
    assert close(seen, normalized(parts[group.rank : group.rank + 1])[0])


def last_batch():
    """Fewer images than devices, and none in the last process: it takes part with nothing."""
    group = job.join(ENGINE)
    devices = job.cpus(2)
    for backend in ("native", "portable"):
        layer = make(devices, backend=backend)
        run(layer, [data(2 * group.rank + number) for number in range(2)], devices)
        counts = [1 if rank < group.size - 1 else 0 for rank in range(group.size)]
        parts = [data(50 + rank) for rank in range(group.size) if counts[rank]]
        used = devices[: counts[group.rank]]
        with gluon_syncbn.devices(used):
            if used:
                (seen,) = run(layer, [parts[group.rank]], used)
                assert close(seen, normalized(parts)[group.rank]), backend
        for device in devices:
            assert job.same_everywhere(group, layer.running_var.data(device).asnumpy())
        parts = [data(100 + number) for number in range(2 * group.size)]
        mine = slice(2 * group.rank, 2 * group.rank + 2)
        for seen, right in zip(run(layer, parts[mine], devices), normalized(parts)[mine]):
            assert close(seen, right), backend
    for empty in ([], devices if group.rank else []):
        try:
            with gluon_syncbn.devices(empty):
                assert empty or group.rank == 0
        except ValueError as error:
            assert "at least one must take part" in str(error)
        else:
            assert any([group.size > 1, empty])


def module():
    """A symbol that is bound by a Module in each process."""
    group = job.join(ENGINE)
    for backend in ("native", "portable"):
        plain = mx.sym.BatchNorm(mx.sym.var("data"), name="norm", fix_gamma=False, eps=1e-5)
        symbol = gluon_syncbn.convert_symbol(plain, num_devices=1, backend=backend, timeout=60)
        symbol = mx.sym.load_json(symbol.tojson())
        bound = mx.mod.Module(symbol, label_names=None, context=mx.cpu(0))
        bound.bind([("data", SHAPE)])
        bound.init_params(mx.init.One())
        parts = [data(rank) for rank in range(group.size)]
        for _ in range(2):
            bound.forward(mx.io.DataBatch([mx.nd.array(parts[group.rank])]), is_train=True)
            assert close(bound.get_outputs()[0].asnumpy(), normalized(parts)[group.rank]), backend
            bound.backward([mx.nd.ones(SHAPE)])
            mx.nd.waitall()


def expander():
    """As in GluonCV's detectors: base weights on the CPU, then a symbol of the base with norms behind it as a block."""
    group = job.join(ENGINE)
    mx.random.seed(1)
    base = nn.HybridSequential(prefix="base_")
    with base.name_scope():
        base.add(nn.Conv2D(4, 1, in_channels=4), gluon_syncbn.SyncBatchNorm(in_channels=4, num_devices=1, timeout=60))
    base.initialize(ctx=mx.cpu(0))
    data_in = mx.sym.var("data")
    out = mx.sym.BatchNorm(base(data_in), name="behind", fix_gamma=False, eps=1e-5)
    net = gluon.SymbolBlock(out, data_in, params=base.collect_params())
    net.collect_params().initialize(ctx=mx.cpu(0))
    net.collect_params().reset_ctx([mx.cpu(1)])
    for name, value in (("gamma", 1), ("beta", 0)):  # a symbol's have no initializer of their own
        net.collect_params()[f"behind_{name}"].set_data(mx.nd.full(4, value))
    net.hybridize(static_alloc=True, static_shape=True)
    for step in range(3):
        (seen,) = run(net, [data(10 * step + group.rank)], [mx.cpu(1)])
    statistics = {name: item for name, item in net.collect_params().items() if name.endswith(("mean", "var"))}
    assert len(statistics) == 4
    for name, item in statistics.items():
        assert job.same_everywhere(group, item.data(mx.cpu(1)).asnumpy()), name
    parts = [data(20 + rank) for rank in range(group.size)]
    conv = base[0].weight.data(mx.cpu(1)).asnumpy()[:, :, 0, 0]
    parts = normalized([np.einsum("oc,nchw->nohw", conv, part) for part in parts])
    assert np.abs(seen - normalized(parts)[group.rank]).max() < 1e-4


def alone_in_the_middle():
    """The first process predicts, saves and exports between steps, as for an evaluation."""
    group = job.join(ENGINE)
    net = nn.HybridSequential()
    net.add(nn.Conv2D(4, 1, in_channels=4), gluon_syncbn.SyncBatchNorm(in_channels=4, timeout=60))
    net.initialize(ctx=mx.cpu(0))
    net.hybridize(static_alloc=True, static_shape=True)
    whole = nn.HybridSequential()
    whole.add(net, nn.Activation("tanh"))
    for step in range(3):
        if group.rank == 0:
            net(mx.nd.array(data(1))).wait_to_read()  # makes a graph of the net alone, in one process
            net.export(os.path.join(os.environ["JOB_FOLDER"], "net"))
        run(whole, [data(10 * step + group.rank)], [mx.cpu(0)])
    assert job.same_everywhere(group, net[1].running_mean.data().asnumpy())


def losses():
    """The losses of 20 steps on 4 devices in all; the launcher's test compares jobs of other shapes."""
    from processes import WithHorovod, WithMPI

    devices = job.cpus(int(sys.argv[3]))
    group = {"mpi": WithMPI, "horovod": WithHorovod}[ENGINE]()
    rank, size = group.rank, group.size
    mx.random.seed(1)
    net = nn.HybridSequential()
    for _ in range(3):
        net.add(nn.Conv2D(8, 3, padding=1), gluon_syncbn.SyncBatchNorm(timeout=60), nn.Activation("relu"))
    net.add(nn.Dense(5))
    net.initialize(mx.init.Xavier(), ctx=mx.cpu(0))
    net(mx.nd.zeros((1, 3, 8, 8)))
    net.cast("float64")
    net.collect_params().reset_ctx(devices)
    net.hybridize(static_alloc=True, static_shape=True)
    options = {"learning_rate": 0.1, "momentum": 0.9}
    if ENGINE == "horovod":  # its own Trainer, which reads no layouts of oneDNN's; float64 has none
        import horovod.mxnet as hvd

        trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", options)
    else:
        trainer = group.make_trainer(net.collect_params(), "sgd", options)
    loss_of, told = gluon.loss.SoftmaxCrossEntropyLoss(), []
    for step in range(20):
        rng = np.random.RandomState(step)
        images, labels = rng.standard_normal((8, 3, 8, 8)), rng.randint(5, size=8)
        mine = slice(rank * 8 // size, (rank + 1) * 8 // size)
        shards = zip(np.split(images[mine], len(devices)), np.split(labels[mine], len(devices)), devices)
        with autograd.record():
            parts = [
                loss_of(net(mx.nd.array(x, ctx=device, dtype="float64")), mx.nd.array(y, ctx=device)).sum()
                for x, y, device in shards
            ]
        autograd.backward(parts)
        trainer.step(8 // size)
        told.append(sum(float(part.asscalar()) for part in parts))
    job.say("LOSSES", rank, json.dumps(told))


def soak():
    """Memory and threads, while a small net trains for long."""
    import psutil

    group, process = job.join(ENGINE), psutil.Process()
    net = nn.HybridSequential()
    for _ in range(3):
        net.add(nn.Conv2D(4, 1, in_channels=4), gluon_syncbn.SyncBatchNorm(in_channels=4, timeout=60))
    net.initialize(ctx=mx.cpu(0))
    net.hybridize(static_alloc=True, static_shape=True)
    x, seen = mx.nd.array(data(group.rank)), []
    steps = int(sys.argv[3])
    for step in range(steps):
        with autograd.record():
            y = net(x)
        y.backward()
        y.wait_to_read()
        if step + 1 in (steps // 4, steps):
            mx.nd.waitall()
            seen.append((process.memory_info().rss / 2**20, process.num_threads()))
    job.say("SOAK", group.rank, json.dumps(seen))


def train_for_ever():
    """Until something happens to a process; `test_process_faults` kills one."""
    group = job.join(ENGINE)
    layer = make([mx.cpu(0)])
    job.say("PID", group.rank, os.getpid())
    while True:
        run(layer, [data(group.rank)], [mx.cpu(0)])


globals()[WAY]()
job.say("RIGHT", WAY)
