"""What users do with a job of several processes beside training a net on all of them.

mpirun -np N python tests/jobs/ways.py mpi WAY[,WAY,...]

Each step is compared with the whole batch of all processes: outputs, gradients and running statistics (`job`). Every
process but the first makes blocks that the others do not, so that Gluon's names differ.
"""

import contextlib
import copy
import functools
import gc
import json
import os
import re
import sys
import time
import warnings

import job
import live
import mxnet as mx
import numerics
import numpy as np
import testing
from delay import Late
from mxnet import autograd, gluon
from mxnet.gluon import nn
from processes import SummingTrainer, WithHorovod, WithMPI
from reference import Norm, Sized, check, check_all
from testing import MODES, cpus, random_affine, random_shards, reference_of, set_mode

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm

ENGINE, WAYS = sys.argv[1:3]
SHAPE = (2, 4, 3, 3)
JOINS_ITSELF = ("by_environment", "portable")
late = Late(lambda device: 1.0)  # what comes behind it arrives later at its layer


def make(devices, mode="imperative", **options):
    """A layer and its reference."""
    layer = SyncBatchNorm(in_channels=4, timeout=60, **options)
    layer.initialize(ctx=devices)
    random_affine(layer, 4)
    size = options.get("group_size")
    norm = reference_of(layer, group_size=size, renorm=options.get("renorm"))
    norm.mean_is_rounded = size == 1 and norm.renorm is None  # it is nn.BatchNorm
    return set_mode(layer, mode), norm


def draw(seed, count, images=None):
    """Of so many devices: images, of which they have different numbers, and gradients of outputs."""
    shapes = [(images or 1 + (number + seed) % 3, *SHAPE[1:]) for number in range(count)]
    return random_shards(shapes, seed=seed), random_shards(shapes, seed=seed + 100)


def train(net, norm, devices, seed, used=None, members=None, layer=None):
    """A step, of the devices with the numbers ``used`` among those of all ``members``."""
    count = len(devices) * (job.group.size if members is None else len(members))
    first = 0 if members is None else members[0]  # other members have other images
    arrays = draw(seed + 10 * first, count if used is None else len(used))
    job.check_step(net, norm, *arrays, devices, used=used, members=members, layer=layer)


def some_step(net, seed=0, device=None):
    """With nobody's results compared."""
    shards, heads = draw(seed, 1)
    return testing.step(net, shards, heads, [device or mx.cpu(0)])


def sequence(*blocks):
    net = nn.HybridSequential()
    net.add(*blocks)
    return net


def by_environment():
    """GLUON_SYNCBN_PROCESS_GROUP=auto is all that a script needs, beside hvd.init()."""
    if ENGINE == "horovod":
        import horovod.mxnet as hvd

        hvd.init()
    rank, size = (
        int(os.environ[("HOROVOD_" if ENGINE == "horovod" else "OMPI_COMM_WORLD_") + word]) for word in ("RANK", "SIZE")
    )
    layer, norm = make(cpus(1))
    shards, heads = draw(0, size)
    testing.step(layer, [shards[rank]], [heads[rank]], cpus(1))
    norm.step(shards, heads)  # its statistics are compared below
    job.join(ENGINE)
    train(layer, norm, cpus(1), 1)


def groups():
    """Groups of 1, 2, 3, ... devices, which end within a process or span some of them; also where some are absent."""
    for count in (1, 2):
        devices, total = cpus(count), count * job.group.size
        for number, size in enumerate(size for size in range(1, total + 1) if total % size == 0):
            layer, norm = make(devices, list(MODES)[number % 3], group_size=size)
            train(layer, norm, devices, 0)
            if ENGINE == "mpi":  # Horovod has to make a set of processes for each
                if size % count == 0 or count == 1:  # else those of the absent process get another group's statistics
                    train(layer, norm, devices, 1, used=range(total - count))
                train(layer, norm, devices, 2, used=range(1, total))
            train(layer, norm, devices, 3)


def own_groups():
    """Layers with processes of their own, by name, communicator or process set, and copies of these layers."""
    colour = job.group.rank % 2
    if ENGINE == "mpi":
        from mpi4py import MPI

        everyone, some = MPI.COMM_WORLD, MPI.COMM_WORLD.Split(colour)
    else:
        import horovod.mxnet as hvd

        sets = [hvd.add_process_set(range(start, job.group.size, 2)) for start in range(2)]
        everyone, some = hvd.global_process_set, sets[colour]
    alike = range(colour, job.group.size, 2)
    devices, all_of_them = cpus(2), ((everyone, None), (job.group, None), (ENGINE, None), ("auto", None))
    for own, members in ((some, alike), *all_of_them, ("none", [job.group.rank])):
        layer, norm = make(devices, process_group=own)
        for seed in range(2):
            train(layer, norm, devices, seed, members=members)
            layer = copy.deepcopy(layer)
            layer.collect_params().reset_ctx(devices)  # MXNet copies no gradients
    layer, norm = make(devices, process_group=some, group_size=len(alike))
    train(layer, norm, devices, 0, members=alike)


def last_batch():
    """Fewer images than devices, and none in the last process, which takes part with nothing; then all again."""
    devices, size = cpus(2), job.group.size
    for mode in ("imperative", "static"):
        layer, norm = make(devices, mode)
        for seed, used in enumerate((None, range(0, 2 * size - 2, 2), range(2 * size - 2), None)):
            train(layer, norm, devices, seed, used=used)
    absent = int(os.environ.get("JOB_ABSENT", 0))
    for empty in ([], [] if job.group.rank == absent else devices):
        try:
            with gluon_syncbn.devices(empty):
                assert empty or job.group.rank == absent
        except ValueError as error:
            assert "at least one must take part" in str(error) and not any(empty)
        else:
            assert job.group.size > 1
    train(layer, norm, devices, 9)


def values():
    """Those with which Horovod tests its SyncBatchNorm for PyTorch; a large mean; one value in all; bad numbers.

    test_horovod_sync_batch_norm of Horovod's test/parallel/test_torch.py. Here the running variance is the biased one.
    """
    size, channel = job.group.size, np.arange(1, 5.0)
    wide = [np.stack([channel * rank, channel * rank + 1], axis=1)[None] for rank in range(size)]
    narrow = [(channel * rank + 1)[None, :, None] for rank in range(size)]
    far = [item * 10 + 1e4 for item in random_shards([SHAPE] * size, "float64")]
    for parts in (wide, narrow, far, [np.full(SHAPE, 3.0)] * size):
        shards = [part.astype("float32") for part in parts]
        layer, norm = make(cpus(1))
        for seed in range(2):
            job.check_step(layer, norm, shards, random_shards([part.shape for part in parts], seed=seed), cpus(1))
    for bad in (np.nan, np.inf):
        shards, heads = draw(0, size)
        shards[1][0, 0] = bad
        layer, norm = make(cpus(1))
        (y,), (x,) = testing.step(layer, [shards[job.group.rank]], [heads[job.group.rank]], cpus(1))
        assert np.isnan(y.asnumpy()[:, 0]).all() and np.isnan(x.grad.asnumpy()[:, 0]).all()
        norm = Norm(norm.gamma[1:], norm.beta[1:])
        expected = norm.step([shard[:, 1:] for shard in shards], [head[:, 1:] for head in heads])
        check("output", y.asnumpy()[:, 1:], expected.outputs[job.group.rank], units=16)
        check("input gradient", x.grad.asnumpy()[:, 1:], expected.input_gradients[job.group.rank], units=16)
        check("running_var", layer.running_var.data().asnumpy()[1:], norm.running()[1], units=16)


def module():
    """A symbol that is bound by a Module; the first rounds of its layers come in another order in each process."""
    x, names, rank = mx.sym.var("data"), ["left", "right", "middle"], job.group.rank
    parts = [Late(lambda device, i=i: 0.3 * (i == rank))(x) for i in range(3)]  # the same graph in all processes
    norms = [mx.sym.BatchNorm(part, name=name, fix_gamma=False, eps=1e-5) for part, name in zip(parts, names)]
    symbol = gluon_syncbn.convert_symbol(mx.sym.Group(norms), num_devices=1, timeout=60)
    bound = mx.mod.Module(mx.sym.load_json(symbol.tojson()), label_names=None, context=mx.cpu(0))
    bound.bind([("data", SHAPE)], inputs_need_grad=True)
    bound.init_params(mx.init.One())
    vectors = {f"{name}_{end}": np.arange(1.0, 5) + i for i, name in enumerate(names) for end in ("gamma", "beta")}
    bound.set_params({key: mx.nd.array(value) for key, value in vectors.items()}, bound.get_params()[1])
    references = [Norm(vectors[f"{name}_gamma"], vectors[f"{name}_beta"]) for name in names]
    bound_arrays = bound._exec_group.execs[0]  # of MXNet: a Module has no other way to gradients
    for seed in range(2):
        shards, heads = draw(seed, job.group.size, images=2)
        several = [[head * (number + 1) for head in heads] for number in range(3)]
        bound.forward(mx.io.DataBatch([mx.nd.array(shards[rank])]), is_train=True)
        bound.backward([mx.nd.array(part[rank]) for part in several])
        steps = [norm.step(shards, part) for norm, part in zip(references, several)]
        check_all(
            "output", [y.asnumpy() for y in bound.get_outputs()], [step.outputs[rank] for step in steps], units=16
        )
        total = Sized(*(sum(parts) for parts in zip(*(step.input_gradients[rank] for step in steps))))
        check("input gradient", bound.get_input_grads()[0].asnumpy(), total, units=16)
        for name, norm, step in zip(names, references, steps):
            for end, wanted in (("gamma", step.gamma_gradient), ("beta", step.beta_gradient)):
                check(end, job.gathered(bound_arrays.grad_dict[f"{name}_{end}"].asnumpy()).sum(0), wanted, units=16)
            for end, wanted in zip(("mean", "var"), norm.running()):
                check(end, bound_arrays.aux_dict[f"{name}_moving_{end}"].asnumpy(), wanted, units=16)


def expander():
    """As in GluonCV's detectors: base weights on the CPU, then a symbol of the base with norms behind it as a block."""
    nets = []
    for norm in (lambda: SyncBatchNorm(in_channels=4, num_devices=1, timeout=60), lambda: nn.BatchNorm(in_channels=4)):
        base = nn.HybridSequential()
        with base.name_scope():
            base.add(nn.Conv2D(4, 1, in_channels=4), norm())
        base.initialize(ctx=mx.cpu(0))
        out = mx.sym.BatchNorm(base(mx.sym.var("data")), name="behind", fix_gamma=False, eps=1e-5)
        nets.append(gluon.SymbolBlock(out, mx.sym.var("data"), params=base.collect_params()))
        nets[-1].cast("float64")
        nets[-1].collect_params().initialize(ctx=mx.cpu(0))
    mx.random.seed(3)
    net, twin = nets
    net.collect_params().reset_ctx([mx.cpu(1)])
    for item, device in ((net, mx.cpu(1)), (twin, mx.cpu(0))):
        item(mx.nd.zeros(SHAPE, ctx=device, dtype="float64"))  # now all shapes are known
    job.same_numbers(net, twin)
    net.hybridize(static_alloc=True, static_shape=True)
    for seed in range(3):
        job.check_like(net, twin, seed, [mx.cpu(1)], shape=SHAPE[1:])


def alone_in_the_middle():
    """The first process predicts, saves and exports between steps, as for an evaluation."""

    def build(norm):
        net = sequence(nn.Conv2D(4, 1, in_channels=4), norm(in_channels=4))
        net.hybridize(static_alloc=True, static_shape=True)
        return sequence(net, nn.Activation("tanh"))

    whole, twin = job.twins(build, cpus(1), SHAPE)
    for seed in range(3):
        if job.group.rank == 0:
            # This makes a graph of the net alone, in one process.
            whole[0](mx.nd.ones(SHAPE, dtype="float64")).wait_to_read()
            whole[0].export(os.path.join(os.environ["JOB_FOLDER"], "net"))
        job.check_like(whole, twin, seed, cpus(1), shape=SHAPE[1:])


class Several(nn.Sequential):
    """Nets that train in one step, each on channels of its own: the script calls them, and not a block."""

    late = None  # the number of one whose first layer is reached later

    def __init__(self, norm):
        super().__init__()
        self.add(*(sequence(norm(in_channels=4), nn.Activation("relu"), norm(in_channels=4)) for _ in range(3)))

    def __call__(self, x):
        parts = enumerate(zip(self, mx.nd.split(x, 3, axis=1)))
        return mx.nd.concat(*[net(late(x) if number == self.late else x) for number, (net, x) in parts], dim=1)


def two_nets():
    """Teacher and student, which have no order between them; their first rounds come in another one in each process."""
    for size in (None, 1):
        norm = functools.partial(job.OURS, group_size=size, renorm=(1, 0))
        nets, twin = job.twins(Several, cpus(1), (1, 12, 3, 3), norm)
        for seed in range(2):
            nets.late = None if seed else job.group.rank
            members = [job.group.rank] if size else None
            job.check_like(nets, twin, seed + (members or [0])[0], cpus(1), shape=(12, 3, 3), members=members)


class Other(nn.HybridSequential):
    """As a layer alone, but another class."""

    def __init__(self, channels, layers=1, **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.add(*(SyncBatchNorm(in_channels=channels, timeout=30) for _ in range(layers)))


def nets_in_another_order():
    """Of one architecture they cannot be told apart but by name; statistics of two nets must never be mixed."""
    rank, places = job.group.rank, r"process 0 .* has trained '(\w+)', '(\w+)', and process 1 .* '\2', '\1'\. "
    lists = r"process 0 \(.+\) has 4 synchronized layers, process 1 \(.+\) has 3\. "
    refused = [
        ("the nets differ: '.+' is a .+ in process 0", lambda n: [Other(n), SyncBatchNorm(in_channels=n, timeout=30)]),
        (places, lambda n: [Other(n, prefix="teacher_"), Other(n, prefix="student_")]),
        (places, lambda n: [Other(n), Other(n)]),
        ("the nets differ: " + lists, lambda n: [Other(n, 4 - rank), Other(n, 4 - rank)]),
    ]
    for channels, (words, build) in enumerate(refused, start=5):
        nets = build(channels)
        for net in nets:
            net.initialize()
        try:
            with autograd.record():
                outputs = [net(mx.nd.ones((2, channels, 3, 3))) for net in (reversed(nets) if rank else nets)]
            for output in outputs:
                output.asnumpy()
            text = ""
        except mx.MXNetError as error:
            text = str(error).split("\n")[0]
        gluon_syncbn.abandon_step()
        # One of them is refused, perhaps, because the other had left the step.
        is_told = re.search(words, text) and "first train them in the same order" in text
        assert text and job.gathered([bool(is_told)]).any(), text
    # A prefix of its own, and one more that was made before, are no other order.
    for net in [Other(4, prefix=f"rank{'ab'[rank]}_"), *[Other(4) for _ in range(3 + rank)][rank:]]:
        net.initialize()
        norm = reference_of(net[0])
        norm.mean_is_rounded = False
        train(net, norm, cpus(1), 0, layer=net[0])


def without_backward():
    """Passes that nobody answers; then, in one process, an exception before a layer has run, and one that has to do
    with no layer. The others go on.
    """
    for kind in ("not recorded", "recorded", "kept", "frozen", "retained", "predicted", "module"):
        layer, norm = make(cpus(1))
        shards, heads = draw(0, job.group.size)
        x, head = (mx.nd.array(items[job.group.rank]) for items in (shards, heads))
        layer.collect_params().setattr("grad_req", "null" if kind == "frozen" else "write")
        if kind in ("recorded", "kept", "retained"):
            x.attach_grad()
        if kind == "module":
            symbol = gluon_syncbn.symbol.SyncBatchNorm(mx.sym.var("data"), num_devices=1, timeout=60, name="alone")
            bound = mx.mod.Module(symbol, label_names=None, context=mx.cpu(0))
            bound.bind([("data", x.shape)], for_training=False)
            bound.init_params()
            bound.forward(mx.io.DataBatch([x]), is_train=True)
        else:
            is_recorded, in_training = kind != "not recorded", kind != "predicted"
            with autograd.record(in_training) if is_recorded else autograd.train_mode():
                kept = layer(x) * mx.nd.ones(1)
            expected = norm.step(shards, heads, training=in_training).input_gradients[job.group.rank]
        if kind == "retained":
            for retain in (True, False):
                kept.backward(head, retain_graph=retain)
                check("input gradient", x.grad.asnumpy(), expected, units=16)
        layer.collect_params(".*gamma|.*beta").setattr("grad_req", "write")
        kept = kept if kind == "kept" else None
        mx.nd.waitall()
        if job.group.rank == 0:
            with contextlib.suppress(StopIteration), autograd.record():
                raise StopIteration("the loader is at its end")
            gluon_syncbn.abandon_step()
            with contextlib.suppress(mx.MXNetError):
                mx.nd.random.normal(0, -1, shape=(1,)).asnumpy()  # has to do with no layer
                raise AssertionError("nothing has failed")
            gluon_syncbn.abandon_step()
        train(layer, norm, cpus(1), 1)
    if ENGINE == "mpi":  # with Horovod the job would end, as is documented
        given_up()


def breaks_off(is_first, kind, layer, other, outside):
    """A step of two layers, in which the first process raises ValueError at a moment that ``kind`` tells."""

    def perhaps(now):
        if kind == now and is_first:
            raise ValueError("a bad batch")

    x, label, is_next = mx.nd.array(draw(0, 1)[0][0]), mx.nd.ones(1), kind == "in the next record"
    if kind == "a label that failed" and is_first:
        label = mx.nd.random.normal(0, -1, shape=(1,))
    with autograd.record():
        out = layer(x) * label
        perhaps("in record")
        more = None if is_next else other(x)
    with autograd.record():
        perhaps("in the next record")
        more = other(x) if is_next else more
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


def given_up():
    """What is under way in one process is given up in all, and goes on with the next step."""
    (layer, norm), (other, _), outside = make(cpus(1)), make(cpus(1)), nn.Dense(2, in_units=36)
    outside.initialize()
    moments = ["in record", "after another backward", "between two backward", "in the next record"]
    is_first = job.group.rank == 0
    breaks_off(is_first, "never", layer, other, outside)
    breaks_off(False, "in the next record", layer, other, outside)  # so that it is known
    for kind in [*moments, "a label that failed"] * 2:
        began = time.monotonic()
        try:
            breaks_off(is_first, kind, layer, other, outside)
        except ValueError:
            assert is_first
        except mx.MXNetError as error:
            assert not is_first and "process 0" in str(error) and "gave the step up" in str(error), error
            fails_at_once()
            assert time.monotonic() - began < 30, kind  # and not after the timeout
        else:
            raise AssertionError(f"nobody told this process ({kind})")
        gluon_syncbn.abandon_step()
        start_again(layer, norm, cpus(1))
        train(layer, norm, cpus(1), 2)


def start_again(layer, norm, devices):
    """Other running statistics, where those of a step that was given up may have come in some processes only."""
    layer.running_mean.set_data(mx.nd.arange(4))
    layer.running_var.set_data(mx.nd.arange(1, 5))
    for number in range(len(devices) * job.group.size):
        norm.set_running(np.arange(4.0), np.arange(1.0, 5), number)


def dropped_net():
    """A net that is gone, but not yet collected in one process, does not count in a short step."""
    devices, own = cpus(2), None
    gc.disable()
    if ENGINE == "mpi":
        from mpi4py import MPI

        own = MPI.COMM_WORLD
    for channels in (7, 4):
        dropped = sequence(SyncBatchNorm(in_channels=channels, timeout=60, process_group=own))
        dropped.initialize(ctx=devices)
        testing.step(dropped, *[[np.ones((2, channels, 3, 3), np.float32)] * 2] * 2, devices)
        mx.nd.waitall()
        del dropped
        if job.group.rank == 0:
            gc.collect()
    layer, norm = make(devices)
    for seed, used in enumerate((None, [0, 1], None)):
        train(layer, norm, devices, seed, used=used)
    gc.enable()


def steps_of_a_schedule():
    """One number for a layer, whatever others do, after steps that some left out, and after one that was given up."""
    devices, total, rank = cpus(2), 2 * job.group.size, job.group.rank
    for size in (None, 2, 1):
        # The batch is so far off that the limits, which are those of the step, decide.
        layer, norm = make(devices, group_size=size, renorm=[(0, 1, 0), (20, 21, 20)], momentum=0.99)
        head, head_norm = make(devices)

        def far(count):
            return random_shards([SHAPE] * count, mean=100, std=9), random_shards([SHAPE] * count, seed=1)

        for kind in ("all", "some", "all", "failed", "all"):
            if kind != "failed":
                used = [0] if kind == "some" else None
                for seed in range(2):  # before: by what synchronizes with others a layer learns of their steps
                    train(head, head_norm, devices, seed, used=used)
                job.check_step(layer, norm, *far(1 if used else total), devices, used=used)
            elif ENGINE == "mpi":
                used = devices[:1] if rank == 0 else devices
                with contextlib.suppress(ValueError, mx.MXNetError), autograd.record():
                    outputs = [layer(mx.nd.array(part, ctx=device)) for part, device in zip(far(2)[0], used)]
                    if rank:
                        outputs[0].asnumpy()
                    raise ValueError("a bad batch, on all processes")
                gluon_syncbn.abandon_step()
                norm.passes += size is not None  # else it was done nowhere
                start_again(layer, norm, devices)


def loader():
    """With worker processes of a data loader, which are forked in the middle of the job."""
    (layer, norm), size = make(cpus(1)), job.group.size
    (images,) = random_shards([(16, *SHAPE[1:])])
    mine = gluon.data.SimpleDataset([images[number] for number in range(job.group.rank, 16, size)])
    steps = 0
    for _ in range(2):
        for number, batch in enumerate(gluon.data.DataLoader(mine, batch_size=2, num_workers=2)):
            shards = [images[2 * size * number + rank :: size][:2] for rank in range(size)]
            np.testing.assert_array_equal(batch.asnumpy(), shards[job.group.rank])
            job.check_step(layer, norm, shards, random_shards([SHAPE] * size, seed=number), cpus(1))
            steps += 1
    assert steps == 2 * (16 // size // 2)


def unfreezing():
    """Parts of a net are frozen for some epochs, and it grows: who synchronizes is not the same from step to step."""

    def build(norm):
        net = nn.HybridSequential(prefix="net_")
        with net.name_scope():
            net.add(*(norm(in_channels=4) for _ in range(3)))
        return net

    net, twin = job.twins(build, cpus(1), SHAPE)
    for epoch, mode in enumerate(({}, {"static_alloc": True, "static_shape": True}) * 2):
        frozen = epoch < 2
        gluon_syncbn.freeze_statistics(net[:2], frozen)
        for layer in twin[:2]:
            layer._kwargs["use_global_stats"] = frozen
        for item in (net, twin):
            item[:2].collect_params(".*gamma|.*beta").setattr("grad_req", "null" if frozen else "write")
        if epoch == 3:
            for item, norm in ((net, SyncBatchNorm(in_channels=4, timeout=60)), (twin, nn.BatchNorm(in_channels=4))):
                norm.cast("float64")
                norm.initialize()
                item.add(norm)
        net.hybridize(**mode)
        for seed in range(2):
            job.check_like(net, twin, seed, cpus(1), shape=SHAPE[1:])


def portable():
    """One clear error where a layer is made, or at its first call; nobody waits for anybody."""
    portable, devices = {"backend": "portable"}, cpus(1)

    def refuse(words, call, *arguments, error=RuntimeError, **options):
        reason = "cannot run here: .*only the native back end synchronizes several processes"
        try:
            call(*arguments, **options)
        except error as problem:
            assert re.search("SyncBatchNorm " + words.replace("REASON", reason), str(problem)), problem
        else:
            raise AssertionError("it was not refused")

    def forward():
        bound.forward(mx.io.DataBatch([mx.nd.ones(SHAPE)]), is_train=True)
        bound.get_outputs()[0].asnumpy()

    layers = [make(devices, mode, prefix="before_", **portable)[0] for mode in MODES]
    plain, norm = mx.sym.BatchNorm(mx.sym.var("data"), name="symbol"), nn.BatchNorm(prefix="converted_")
    bound = mx.mod.Module(gluon_syncbn.convert_symbol(plain, 2, **portable), label_names=None)
    bound.bind([("data", SHAPE)])
    bound.init_params()
    job.join(ENGINE)
    for layer in layers:
        refuse("'before': backend='portable' REASON", some_step, layer)
    words = "'symbol': it runs on the portable back end, which does not synchronize several processes"
    refuse(words, forward, error=mx.MXNetError)
    gluon_syncbn.abandon_step()
    refuse("'after': backend='portable' REASON", make, devices, prefix="after_", **portable)
    refuse("'converted': backend='portable' REASON", gluon_syncbn.convert_sync_batchnorm, norm, **portable)
    assert type(norm) is nn.BatchNorm
    for name, options in (("portable", portable), ("auto", {"kvstore": "local"})):  # which takes portable then
        refuse(f"'symbol': backend='{name}' REASON", gluon_syncbn.convert_symbol, plain, 2, **options)
    layer, _ = make(devices, kvstore="local", prefix="stored_")
    refuse("'stored': backend='auto' REASON", some_step, layer)
    layer, norm = make(cpus(2), process_group="none", **portable)
    norm.mean_is_rounded = True
    train(layer, norm, cpus(2), 0, members=[job.group.rank])
    train(*make(devices), devices, 0)


class Own(mx.optimizer.SGD):
    """An optimizer of the user."""


def trainers_that_step_alone():
    """A warning for each that adds up no gradients of a net that synchronizes with other processes, and no other."""
    file = f"{os.environ['JOB_FOLDER']}/states-{job.group.rank}"

    def trainer(net, optimizer="sgd", **options):
        return gluon.Trainer(net.collect_params(), optimizer, **options)

    def summing(net):
        return SummingTrainer(lambda values: None, job.group.size, net.collect_params(), "sgd", {})

    def resumed(net):
        made = trainer(net)
        made.save_states(file)
        made.load_states(file)
        return made

    for times, build, options, layer in (
        (1, trainer, {}, {}),
        (1, trainer, {"kvstore": None}, {}),
        (1, trainer, {"optimizer": Own()}, {}),
        (1, trainer, {"update_on_kvstore": False}, {}),
        (1, resumed, {}, {}),
        (0, trainer, {}, {"process_group": "none"}),
        (0, trainer, {}, None),  # a net without layers of ours
        (0, summing, {}, {}),
    ):
        net = nn.Dense(2, in_units=4 * 3 * 3) if layer is None else make(cpus(1), **layer)[0]
        net.initialize(force_reinit=True)
        made = build(net, **options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):  # it warns once
                with autograd.record():
                    y = net(mx.nd.ones(SHAPE))
                y.backward()
                made.allreduce_grads() if "update_on_kvstore" in options else made.step(1)
        found = [item for item in caught if "does not add up their gradients" in str(item.message)]
        assert len(found) == times and all(item.filename.endswith("ways.py") for item in found), (build, options)


def training():
    """Weights stay those of one device, step by step; either goes on from a checkpoint of the other."""
    processes = {"mpi": WithMPI, "horovod": WithHorovod}[ENGINE]()
    devices = cpus(1 if ENGINE == "horovod" else 2)  # its Trainer adds up those of the first device
    file = os.path.join(os.environ["JOB_FOLDER"], "checkpoint")

    def build(norm):
        return sequence(
            nn.Conv2D(8, 3, in_channels=3), norm(in_channels=8, momentum=0.875), nn.Activation("relu"), nn.Dense(5)
        )

    nets, options = job.twins(build, devices, (1, 3, 8, 8)), {"learning_rate": 0.1, "momentum": 0.9}
    nets[0].hybridize(static_alloc=True, static_shape=True)
    makers = processes.make_trainer, gluon.Trainer
    trainers = [maker(net.collect_params(), "sgd", options) for maker, net in zip(makers, nets)]
    for step in range(12):
        job.check_like(*nets, step, devices, shape=(3, 8, 8))
        for trainer, size in zip(trainers, (1, job.group.size)):
            trainer.step(4 * size)  # its gradients are the mean over processes
        if step in (3, 7):
            if job.group.rank == 0:
                nets[step == 3].save_parameters(file)
                trainers[step == 3].save_states(file + ".states")
            job.gathered([0])  # all wait for the file
            for net, trainer, contexts in zip(nets, trainers, (devices, cpus(1))):
                net.load_parameters(file, ctx=contexts)
                trainer.load_states(file + ".states")
            job.gathered([0])


def soak():
    """What is alive while a small net trains for long: layers of 4 channels, or of those that are given."""
    net, before = nn.HybridSequential(), 4
    for channels in map(int, sys.argv[4:] or [4] * 3):
        net.add(nn.Conv2D(channels, 1, in_channels=before), SyncBatchNorm(in_channels=channels, timeout=60))
        before = channels
    net.initialize()
    net.hybridize(static_alloc=True, static_shape=True)
    x, seen, steps, began = mx.nd.array(draw(job.group.rank, 1, 2)[0][0]), [], int(sys.argv[3]), time.monotonic()
    for step in range(steps):
        with autograd.record():
            y = net(x)
        y.backward()
        y.wait_to_read()
        if (step + 1) % (steps // 4) == 0:
            seen.append(live.count())
    job.check_same([layer.running_var.data().asnumpy() for layer in net[1::2]])
    job.say("SOAK", job.group.rank, json.dumps(seen), f"{1e3 * (time.monotonic() - began) / steps:.1f} ms a step")


def last_step():
    """The first process ends while its last step waits for the others, which come later than devices ever would."""
    rank, (layer, norm) = job.group.rank, make(cpus(1))
    train(layer, norm, cpus(1), 0)
    if rank:
        time.sleep(5)
    shards, heads = draw(1, job.group.size)
    (y,), (x,) = testing.step(layer, [shards[rank]], [heads[rank]], cpus(1))
    if rank:
        expected = norm.step(shards, heads)
        check("output", y.asnumpy(), expected.outputs[rank], units=16)
        check("input gradient", x.grad.asnumpy(), expected.input_gradients[rank], units=16)


def train_for_ever():
    """Until something happens to a process; `test_process_faults` kills one."""
    layer, _ = make(cpus(1))
    job.say("PID", job.group.rank, os.getpid())
    while True:
        some_step(layer)[0][0].wait_to_read()


for way in WAYS.split(","):
    if job.group is None and way not in JOINS_ITSELF:
        job.join(ENGINE)
    rank_of_job = 0 if job.group is None else job.group.rank
    extra = [block() for block in [SyncBatchNorm, nn.HybridSequential, lambda: nn.Conv2D(2, 1)] * rank_of_job]
    numerics.check(way, "static", cpus(1)) if way in numerics.CASES else globals()[way]()
    job.say("RIGHT", way)
