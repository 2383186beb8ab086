"""What users do with a job of several processes beside training a net on all of them.

mpirun -np N python tests/jobs/ways.py mpi WAY[,WAY,...]
"""

import contextlib
import json
import os
import sys
import time
import types

import job
import live
import mxnet as mx
import numpy as np
from delay import Late
from mxnet import autograd, gluon
from mxnet.gluon import nn

import gluon_syncbn

ENGINE, WAYS = sys.argv[1:3]
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
    for size in [size for size in (1, 2, 3, 4, 6) if total % size == 0]:
        parts = [data(number) for number in range(total)]
        expected = [item for first in range(0, total, size) for item in normalized(parts[first : first + size])]
        layer = make(devices, group_size=size)
        mine = slice(2 * group.rank, 2 * group.rank + 2)
        for seen, right in zip(run(layer, parts[mine], devices), expected[mine]):
            assert close(seen, right), size


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
    layer = make(devices)
    run(layer, [data(2 * group.rank + number) for number in range(2)], devices)
    counts = [1 if rank < group.size - 1 else 0 for rank in range(group.size)]
    parts = [data(50 + rank) for rank in range(group.size) if counts[rank]]
    used = devices[: counts[group.rank]]
    with gluon_syncbn.devices(used):
        if used:
            (seen,) = run(layer, [parts[group.rank]], used)
            assert close(seen, normalized(parts)[group.rank])
    for device in devices:
        assert job.same_everywhere(group, layer.running_var.data(device).asnumpy())
    parts = [data(100 + number) for number in range(2 * group.size)]
    mine = slice(2 * group.rank, 2 * group.rank + 2)
    for seen, right in zip(run(layer, parts[mine], devices), normalized(parts)[mine]):
        assert close(seen, right)
    absent = int(os.environ.get("JOB_ABSENT", 0))
    for empty in ([], [] if group.rank == absent else devices):
        try:
            with gluon_syncbn.devices(empty):
                assert empty or group.rank == absent
        except ValueError as error:
            assert "at least one must take part" in str(error)
        else:
            assert any([group.size > 1, empty])


def module():
    """A symbol that is bound by a Module in each process."""
    group = job.join(ENGINE)
    plain = mx.sym.BatchNorm(mx.sym.var("data"), name="norm", fix_gamma=False, eps=1e-5)
    symbol = gluon_syncbn.convert_symbol(plain, num_devices=1, timeout=60)
    symbol = mx.sym.load_json(symbol.tojson())
    bound = mx.mod.Module(symbol, label_names=None, context=mx.cpu(0))
    bound.bind([("data", SHAPE)])
    bound.init_params(mx.init.One())
    parts = [data(rank) for rank in range(group.size)]
    for _ in range(2):
        bound.forward(mx.io.DataBatch([mx.nd.array(parts[group.rank])]), is_train=True)
        assert close(bound.get_outputs()[0].asnumpy(), normalized(parts)[group.rank])
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
    """The losses of some of 20 steps on 4 devices in all; the launcher's test compares jobs of other shapes.

    Of all steps, or of those until a checkpoint, which the first process writes, or of those after it.
    """
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
    first, last = (int(word) for word in sys.argv[4:6] or (0, 20))
    checkpoint = os.path.join(os.environ.get("JOB_FOLDER", ""), "checkpoint")
    if first:
        net.load_parameters(checkpoint, ctx=devices)
        trainer.load_states(checkpoint + ".states")
    loss_of, told = gluon.loss.SoftmaxCrossEntropyLoss(), []
    for step in range(first, last):
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
    if last < 20 and rank == 0:
        net.save_parameters(checkpoint)
        trainer.save_states(checkpoint + ".states")


def soak():
    """What is alive while a small net trains for long: layers of 4 channels, or of those that are given."""
    group = job.join(ENGINE)
    net = nn.HybridSequential()
    before = 4
    for channels in map(int, sys.argv[4:] or [4] * 3):
        net.add(
            nn.Conv2D(channels, 1, in_channels=before), gluon_syncbn.SyncBatchNorm(in_channels=channels, timeout=60)
        )
        before = channels
    net.initialize(ctx=mx.cpu(0))
    net.hybridize(static_alloc=True, static_shape=True)
    x, seen, began = mx.nd.array(data(group.rank)), [], time.monotonic()
    steps = int(sys.argv[3])
    for step in range(steps):
        with autograd.record():
            y = net(x)
        y.backward()
        y.wait_to_read()
        if (step + 1) % (steps // 4) == 0:
            seen.append(live.count())
    assert job.same_everywhere(group, np.concatenate([layer.running_var.data().asnumpy() for layer in net[1::2]]))
    job.say("SOAK", group.rank, json.dumps(seen), f"{1e3 * (time.monotonic() - began) / steps:.1f} ms a step")


late = Late(lambda device: 1.0)  # what comes behind it arrives later at its layer


def two_nets():
    """Teacher and student, which have no order between them; their first rounds come in another one in each process."""
    group = job.join(ENGINE)
    for size in (None, 1):
        nets = []
        for _ in range(3):
            nets.append(nn.HybridSequential())
            nets[-1].add(make([mx.cpu(0)], group_size=size, renorm=(1, 0)), nn.Activation("relu"))
            nets[-1].add(make([mx.cpu(0)], group_size=size, renorm=(1, 0)))
        for step in range(2):
            outputs = []
            with autograd.record():
                for number, net in enumerate(nets):
                    x = mx.nd.array(data(10 * step + 3 * group.rank + number))
                    is_late = step == 0 and number == group.rank
                    outputs.append(net(late(x) if is_late else x))
            autograd.backward(outputs)
            for number, seen in enumerate(outputs):
                parts = [data(10 * step + 3 * rank + number) for rank in range(group.size)]
                for layer in range(2):
                    parts = [normalized([part])[0] for part in parts] if size else normalized(parts)
                    parts = parts if layer else [np.maximum(part, 0).astype("float32") for part in parts]
                assert close(seen.asnumpy(), parts[group.rank]), (size, step, number)


def branches_of_a_module():
    """Each layer of a symbol is compared by itself; the first rounds of two branches come in any order."""
    group = job.join(ENGINE)
    x = mx.sym.var("data")
    names = ["left", "right", "middle"]
    parts = [late(x) if group.rank == number else x for number in range(3)]
    norms = [mx.sym.BatchNorm(part, name=name, fix_gamma=False, eps=1e-5) for part, name in zip(parts, names)]
    symbol = gluon_syncbn.convert_symbol(mx.sym.Group(norms), num_devices=1, timeout=60)
    bound = mx.mod.Module(symbol, label_names=None, context=mx.cpu(0))
    bound.bind([("data", SHAPE)])
    bound.init_params(mx.init.One())
    bound.forward(mx.io.DataBatch([mx.nd.array(data(group.rank))]), is_train=True)
    bound.backward([mx.nd.ones(SHAPE)] * 3)
    for seen in bound.get_outputs():
        assert close(seen.asnumpy(), normalized([data(rank) for rank in range(group.size)])[group.rank])


class Other(nn.HybridBlock):
    """As a layer alone, but another class."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.norm = gluon_syncbn.SyncBatchNorm(in_channels=4, timeout=30)

    def hybrid_forward(self, F, x):
        return self.norm(x)


def nets_in_another_order():
    """Of one architecture they cannot be told apart but by name; statistics of two nets must never be mixed."""
    group = job.join(ENGINE)
    kind = sys.argv[3]
    if kind == "classes":
        nets = [Other(), make([mx.cpu(0)])]
    elif kind == "prefixes":
        nets = [Other(prefix="teacher_"), Other(prefix="student_")]
    else:
        nets = [Other(), Other()]
    for net in nets:
        net.initialize(ctx=mx.cpu(0), force_reinit=True)
    if kind == "one more":  # in one process, before: that is no other order
        if group.rank:
            Other()
        nets = [Other(), Other(), Other()]
        for net in nets:
            net.initialize(ctx=mx.cpu(0))
    elif kind == "own prefix":
        nets = [Other(prefix=f"rank{'ab'[group.rank]}_")]
        nets[0].initialize(ctx=mx.cpu(0))
    elif group.rank == 1:
        nets.reverse()
    try:
        with autograd.record():
            outputs = [net(mx.nd.array(data(group.rank))) for net in nets]
        for output in outputs:
            output.asnumpy()
    except mx.MXNetError as error:
        job.say("REFUSED", str(error).split("\n")[0])
    else:
        job.say("TRAINED")


def without_backward():
    """Passes that nobody answers; then, in one process, an exception before a layer has run, and one that has to do
    with no layer. The others go on.
    """
    group = job.join(ENGINE)
    for number, kind in enumerate(("not recorded", "recorded", "kept", "frozen", "retained", "predicted", "module")):
        layer = make([mx.cpu(0)])
        x = mx.nd.array(data(group.rank))
        x.attach_grad()
        kept = None
        if kind == "not recorded":
            with autograd.train_mode():
                layer(x)
        elif kind in ("recorded", "kept"):
            with autograd.record():
                kept = layer(x)
            kept = kept if kind == "kept" else None
        elif kind == "frozen":
            layer.collect_params().setattr("grad_req", "null")
            head = nn.Dense(2, in_units=36)
            head.initialize(ctx=mx.cpu(0))
            with autograd.record():
                kept = head(layer(mx.nd.array(data(group.rank))))
            kept.backward()
            layer.collect_params(".*gamma|.*beta").setattr("grad_req", "write")
        elif kind == "retained":
            with autograd.record():
                out = layer(x)
            out.backward(retain_graph=True)
            first = x.grad.asnumpy()
            out.backward()
            assert close(x.grad.asnumpy(), first)
        elif kind == "predicted":
            with autograd.record(train_mode=False):
                kept = layer(x)
        else:
            symbol = gluon_syncbn.symbol.SyncBatchNorm(mx.sym.var("data"), num_devices=1, timeout=60, name=f"n{number}")
            bound = mx.mod.Module(symbol, label_names=None, context=mx.cpu(0))
            bound.bind([("data", SHAPE)], for_training=False)
            bound.init_params()
            bound.forward(mx.io.DataBatch([mx.nd.array(data(group.rank))]), is_train=True)
        mx.nd.waitall()
        if group.rank == 0:
            try:
                with autograd.record():
                    raise StopIteration("the loader is at its end")
            except StopIteration:
                gluon_syncbn.abandon_step()
            try:
                mx.nd.random.normal(0, -1, shape=(1,)).asnumpy()  # has to do with no layer
            except mx.MXNetError:
                gluon_syncbn.abandon_step()
            else:
                raise AssertionError("nothing has failed")
        (seen,) = run(layer, [data(100 + group.rank)], [mx.cpu(0)])
        parts = [data(100 + rank) for rank in range(group.size)]
        assert close(seen, normalized(parts)[group.rank]), kind
        mx.nd.waitall()
    if ENGINE == "mpi":  # with Horovod the job would end, as is documented
        given_up(group)


def breaks_off(group, kind, layer, other, outside):
    """A step of two layers, in which the first process raises ValueError at a moment that ``kind`` tells."""

    def perhaps(now):
        if kind == now and group.rank == 0:
            raise ValueError("a bad batch")

    x, label = mx.nd.array(data(group.rank)), mx.nd.ones(1)
    if kind == "a label that failed" and group.rank == 0:
        label = mx.nd.random.normal(0, -1, shape=(1,))
    with autograd.record():
        out = layer(x) * label
        perhaps("in record")
        if kind != "in the next record":
            more = other(x)
    with autograd.record():
        perhaps("in the next record")
        if kind == "in the next record":
            more = other(x)
        unrelated = outside(x)
    unrelated.backward()
    perhaps("after another backward")
    out.backward()
    perhaps("between two backward")
    more.backward()
    try:
        label.asnumpy()
    except mx.MXNetError:
        perhaps("a label that failed")
    for item in (layer, other):
        if item.gamma.grad_req != "null":
            item.gamma.grad().asnumpy()
    mx.nd.waitall()


def fails_at_once():
    """What needs all processes, in a step that has failed here and was not given up."""
    with contextlib.suppress(mx.MXNetError):
        mx.nd.waitall()
    try:
        with gluon_syncbn.devices(mx.cpu(0)):
            pass
    except gluon_syncbn.SyncBatchNormError as error:
        assert "the step had failed before" in str(error) and "process 0" in str(error), error
    else:
        raise AssertionError("the step had not failed")


def given_up(group):
    """What is under way in one process is given up in all, and goes on with the next step."""
    layer, other, outside = make([mx.cpu(0)]), make([mx.cpu(0)]), nn.Dense(2, in_units=36)
    outside.initialize(ctx=mx.cpu(0))
    moments = [
        "in record",
        "after another backward",
        "between two backward",
        "in the next record",
        "a label that failed",
    ]
    breaks_off(group, "never", layer, other, outside)
    breaks_off(types.SimpleNamespace(rank=1), "in the next record", layer, other, outside)  # so that it is known
    for kind in moments * 2:
        began = time.monotonic()
        try:
            breaks_off(group, kind, layer, other, outside)
        except ValueError:
            assert group.rank == 0
            gluon_syncbn.abandon_step()
        except mx.MXNetError as error:
            assert group.rank and "process 0" in str(error) and "gave the step up" in str(error), error
            fails_at_once()
            assert time.monotonic() - began < 30, kind  # and not after the timeout
            gluon_syncbn.abandon_step()
        else:
            raise AssertionError(f"nobody told this process ({kind})")
        (seen,) = run(layer, [data(100 + group.rank)], [mx.cpu(0)])
        assert close(seen, normalized([data(100 + rank) for rank in range(group.size)])[group.rank])


def dropped_net():
    """A net that is gone, but not yet collected in one process, does not count in a short step."""
    import gc

    group = job.join(ENGINE)
    devices = job.cpus(2)
    gc.disable()
    own = None
    if ENGINE == "mpi":
        from mpi4py import MPI

        own = MPI.COMM_WORLD
    for channels in (7, 4):
        dropped = nn.HybridSequential()
        dropped.add(gluon_syncbn.SyncBatchNorm(in_channels=channels, timeout=60, process_group=own))
        dropped.initialize(ctx=devices)
        run(dropped, [np.ones((2, channels, 3, 3), dtype="float32")] * 2, devices)
        mx.nd.waitall()
        del dropped
        if group.rank == 0:
            gc.collect()
    layer = make(devices)
    run(layer, [data(number) for number in range(2)], devices)
    used = devices if group.rank == 0 else []
    with gluon_syncbn.devices(used):
        if used:
            run(layer, [data(100), data(101)], used)
    for device in devices:
        assert job.same_everywhere(group, layer.running_mean.data(device).asnumpy())
    parts = [data(200 + number) for number in range(2 * group.size)]
    mine = slice(2 * group.rank, 2 * group.rank + 2)
    for seen, right in zip(run(layer, parts[mine], devices), normalized(parts)[mine]):
        assert close(seen, right)
    gc.enable()


def steps_of_a_schedule():
    """One number for a layer, whatever others do, after steps that some left out, and after one that was given up."""
    group = job.join(ENGINE)
    devices = job.cpus(2)
    for size in (None, 2, 1):
        options = {"group_size": size, "renorm": [(0, 1, 0), (20, 21, 20)]}
        layer, head = make(devices, **options), make(devices)
        far = [np.random.RandomState(1).standard_normal(SHAPE).astype("float32") + 1000] * 2
        count = 0
        for kind in ("all", "some", "all", "failed", "all"):
            used = devices[:1] if kind == "some" and group.rank == 0 else [] if kind == "some" else devices
            if kind == "failed":
                if ENGINE == "horovod":
                    continue
                used = devices[:1] if group.rank == 0 else devices
                try:
                    with autograd.record():
                        outputs = [layer(mx.nd.array(part, ctx=device)) for part, device in zip(far, used)]
                        if group.rank:
                            outputs[0].asnumpy()
                        raise ValueError("a bad batch, on all processes")
                except (ValueError, mx.MXNetError):
                    gluon_syncbn.abandon_step()
                if size is None:
                    continue  # it was done nowhere
            else:
                with gluon_syncbn.devices(used):
                    if used:
                        run(layer, far[: len(used)], used)
                        for _ in range(3):
                            run(head, far[: len(used)], used)
            count += 1
        for parameter in (layer.running_mean, layer.running_var):
            parameter.set_data(mx.nd.ones(4))
        for seen in run(layer, far, devices):
            whole = far[0].astype("float64")
            mean, var = (function(whole, axis=(0, 2, 3), keepdims=True) for function in (np.mean, np.var))
            r = np.clip(np.sqrt(var + 1e-5) / np.sqrt(1 + 1e-5), 1 / (1 + count), 1 + count)
            expected = (whole - mean) / np.sqrt(var + 1e-5) * r + np.clip(mean - 1, -count, count)
            assert np.abs(seen - expected).max() < 1e-3, (size, count, float(seen.mean()))


def loader():
    """With worker processes of a data loader, which are forked in the middle of the job."""
    group = job.join(ENGINE)
    layer = make([mx.cpu(0)])
    images = gluon.data.ArrayDataset(np.stack([data(number, 1)[0] for number in range(16)]))
    mine = gluon.data.SimpleDataset([images[number] for number in range(group.rank, 16, group.size)])
    steps = 0
    for _ in range(2):
        batches = gluon.data.DataLoader(mine, batch_size=2, num_workers=2)
        for number, batch in enumerate(batches):
            (seen,) = run(layer, [batch.asnumpy()], [mx.cpu(0)])
            first = 2 * group.size * number
            parts = [np.stack([images[first + rank + group.size * i] for i in range(2)]) for rank in range(group.size)]
            assert close(seen, normalized(parts)[group.rank])
            steps += 1
    assert steps == 2 * (16 // group.size // 2)


def unfreezing():
    """Parts of a net are frozen for some epochs, and it grows: who synchronizes is not the same from step to step."""
    group = job.join(ENGINE)
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        for _ in range(3):
            net.add(gluon_syncbn.SyncBatchNorm(in_channels=4, timeout=60))
    net.initialize(ctx=mx.cpu(0))
    parameters = net[:2].collect_params(".*gamma|.*beta")
    for epoch, mode in enumerate(({}, {"static_alloc": True, "static_shape": True}) * 2):
        frozen = epoch < 2
        gluon_syncbn.freeze_statistics(net[:2], frozen)
        parameters.setattr("grad_req", "null" if frozen else "write")
        if epoch == 3:
            with net.name_scope():
                net.add(gluon_syncbn.SyncBatchNorm(in_channels=4, timeout=60))
            net[-1].initialize(ctx=mx.cpu(0))
        net.hybridize(**mode)
        for step in range(2):
            parts = [data(10 * step + rank) for rank in range(group.size)]
            begin = [[layer.running_mean.data().asnumpy(), layer.running_var.data().asnumpy()] for layer in net[:2]]
            (seen,) = run(net, [parts[group.rank]], [mx.cpu(0)])
            for number in range(len(net)):
                if frozen and number < 2:
                    mean, var = (item.reshape((4, 1, 1)) for item in begin[number])
                    parts = [(part - mean) / np.sqrt(var + 1e-5) for part in parts]
                else:
                    parts = normalized(parts)
            assert close(seen, parts[group.rank]), (epoch, step)


def as_horovod_tests_its_own():
    """The cases in which Horovod tests its SyncBatchNorm for PyTorch: rows of 4 channels, with and without a width.

    test_horovod_sync_batch_norm of Horovod's test/parallel/test_torch.py. Its statistics are compared as MXNet's are
    defined: with the biased variance, and momentum 0.9 for PyTorch's 0.1.
    """
    group = job.join(ENGINE)
    channel = np.arange(1, 5.0)
    wide = np.stack([np.stack([channel * rank, channel * rank + 1], axis=1) for rank in range(group.size)])
    narrow = np.stack([(channel * rank + 1)[:, None] for rank in range(group.size)])
    for values in (wide, narrow):
        found = []
        for norm, shard in (
            (gluon_syncbn.SyncBatchNorm(in_channels=4, timeout=60), values[group.rank : group.rank + 1]),
            (nn.BatchNorm(in_channels=4), values),
        ):
            norm.initialize()
            x = mx.nd.array(shard, dtype="float32")
            x.attach_grad()
            with autograd.record():
                y = norm(x)
                loss = y.sum()
            loss.backward()
            mx.nd.waitall()
            found.append((norm, y.asnumpy(), x.grad.asnumpy()))
        (ours, y, gradient), (whole, expected, expected_gradient) = found
        assert close(y[0], expected[group.rank]) and close(gradient[0], expected_gradient[group.rank])
        for name in ("running_mean", "running_var"):
            assert close(getattr(ours, name).data().asnumpy(), getattr(whole, name).data().asnumpy())
        for name in ("gamma", "beta"):  # of this process: a Trainer adds them up
            job.same_everywhere.calls += 1
            mine = getattr(ours, name).grad().asnumpy().astype("float64")
            rows = group.all_gather("test.grad", job.same_everywhere.calls, mine, range(group.size), job.never)
            assert close(rows.sum(axis=0), getattr(whole, name).grad().asnumpy())


def copies():
    """Of a layer with a group of its own."""
    import copy

    group = job.join(ENGINE)
    if ENGINE == "mpi":
        from mpi4py import MPI

        groups = [MPI.COMM_WORLD, group, "mpi"]
    else:
        import horovod.mxnet as hvd

        groups = [hvd.global_process_set, group, "horovod"]
    for own in groups:
        layer = make([mx.cpu(0)], process_group=own)
        for _ in range(2):
            (seen,) = run(layer, [data(group.rank)], [mx.cpu(0)])
            assert close(seen, normalized([data(rank) for rank in range(group.size)])[group.rank])
            layer = copy.deepcopy(layer)
            layer.initialize(ctx=mx.cpu(0), force_reinit=True)  # MXNet copies no gradients


def portable():
    """One clear error where a layer is made, or at its first call; nobody waits for anybody."""
    portable = {"backend": "portable"}

    def refuse(call, *arguments, error=RuntimeError, **options):
        try:
            call(*arguments, **options)
        except error as problem:
            job.say("REFUSED", str(problem).split("\n")[0])
        else:
            raise AssertionError("it was not refused")

    def forward():
        bound.forward(mx.io.DataBatch([mx.nd.array(data(0))]), is_train=True)
        bound.get_outputs()[0].asnumpy()

    layers = [make([mx.cpu(0)], prefix="before_", **portable) for _ in range(3)]
    layers[1].hybridize()
    layers[2].hybridize(static_alloc=True, static_shape=True)
    plain = mx.sym.BatchNorm(mx.sym.var("data"), name="symbol")
    bound = mx.mod.Module(gluon_syncbn.convert_symbol(plain, 2, **portable), label_names=None)
    bound.bind([("data", SHAPE)])
    bound.init_params()
    group = job.join(ENGINE)
    for layer in layers:
        refuse(run, layer, [data(group.rank)], [mx.cpu(0)])
    refuse(forward, error=mx.MXNetError)
    gluon_syncbn.abandon_step()
    refuse(make, [mx.cpu(0)], prefix="after_", **portable)
    norm = nn.BatchNorm(prefix="converted_")
    refuse(gluon_syncbn.convert_sync_batchnorm, norm, **portable)
    assert type(norm) is nn.BatchNorm
    refuse(gluon_syncbn.convert_symbol, plain, 2, **portable)
    refuse(gluon_syncbn.convert_symbol, plain, 2, kvstore="local")  # 'auto' takes portable then
    refuse(run, make([mx.cpu(0)], kvstore="local", prefix="stored_"), [data(group.rank)], [mx.cpu(0)])
    (seen,) = run(make([mx.cpu(0)], process_group="none", **portable), [data(group.rank)], [mx.cpu(0)])
    assert close(seen, normalized([data(group.rank)])[0])
    (seen,) = run(make([mx.cpu(0)]), [data(group.rank)], [mx.cpu(0)])
    assert close(seen, normalized([data(rank) for rank in range(group.size)])[group.rank])


def trainers_that_step_alone():
    """A warning for each that adds up no gradients of a net that synchronizes with other processes, and no other."""
    import warnings

    from processes import SummingTrainer

    group, devices = job.join(ENGINE), [mx.cpu(0)]
    other = nn.Dense(2, in_units=3)
    other.initialize(ctx=devices)

    class Own(mx.optimizer.SGD):
        pass

    def warned(trainer, net, update="step"):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):  # once
                with autograd.record():
                    y = net(mx.nd.array(data(group.rank))) if net is not other else net(mx.nd.ones((1, 3)))
                y.backward()
                getattr(trainer, update)(*([1] if update == "step" else []))
        found = [item for item in caught if "does not add up their gradients" in str(item.message)]
        assert all(item.filename.endswith("ways.py") for item in found)
        return len(found)

    def trainer(net, optimizer="sgd", **options):
        return mx.gluon.Trainer(net.collect_params(), optimizer, **options)

    net = make(devices, process_group="none")
    assert warned(trainer(net), net) == 0
    for options in ({}, {"kvstore": None}, {"optimizer": Own()}):
        net = make(devices)
        assert warned(trainer(net, **options), net) == 1, options
    net = make(devices)
    assert warned(trainer(net, update_on_kvstore=False), net, "allreduce_grads") == 1
    resumed, folder = trainer(net), os.environ["JOB_FOLDER"]
    resumed.save_states(f"{folder}/states-{group.rank}")
    resumed.load_states(f"{folder}/states-{group.rank}")
    assert warned(resumed, net) == 1
    assert warned(trainer(other), other) == 0
    summing = SummingTrainer(lambda values: None, group.size, net.collect_params(), "sgd", {})
    assert warned(summing, net) == 0


def train_for_ever():
    """Until something happens to a process; `test_process_faults` kills one."""
    group = job.join(ENGINE)
    layer = make([mx.cpu(0)])
    job.say("PID", group.rank, os.getpid())
    while True:
        run(layer, [data(group.rank)], [mx.cpu(0)])


for way in WAYS.split(","):
    globals()[way]()
    job.say("RIGHT", way)
