"""What users do with a job of several processes beside training a net on all of them.

mpirun -np N python tests/jobs/ways.py mpi WAY[,WAY,...]

A way is a function here, or one of `NETS`. Each step is compared with the whole batch of all processes: outputs,
gradients and running statistics (`job`). Every process but the first makes blocks that the others do not, so that
Gluon's names differ. Each process prints ``RIGHT WAY``.
"""

import concurrent.futures
import contextlib
import copy
import functools
import gc
import os
import re
import signal
import sys
import time
import warnings
from unittest import mock

import endings
import job
import live
import mxnet as mx
import numpy as np
import pytest
import testing
from endings import Late
from mxnet import autograd, gluon
from mxnet.gluon import nn
from mxnet.gluon.model_zoo.vision import resnet
from processes import WithHorovod, WithMPI
from reference import Norm, check, check_all, total
from testing import MODES, cpus, initialized, random_shards, reference_of, sequential, set_mode, shards_and_heads

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm

ENGINE, WAYS = sys.argv[1:3]
TOLD = "HOROVOD_" if ENGINE == "horovod" else "OMPI_COMM_WORLD_"  # by the launcher
RANK, SIZE = (int(os.environ[TOLD + word]) for word in ("RANK", "SIZE"))
SHAPE = (2, 4, 3, 3)
JOINS_ITSELF = ("by_environment", "portable")
late = Late(lambda device: 1.0)  # what comes behind it arrives later at its layer


def make(devices, mode="imperative", timeout=60, **options):
    """A layer and its reference."""
    layer = initialized(SyncBatchNorm(in_channels=4, timeout=timeout, **options), devices)
    testing.random_affine(layer, 4)
    size = options.get("group_size")
    norm = reference_of(layer, group_size=size, renorm=options.get("renorm"))
    norm.mean_is_rounded = size == 1 and norm.renorm is None  # it is nn.BatchNorm
    return set_mode(layer, mode), norm


def draw(seed, count, images=None):
    """Of so many devices: images, of which they have different numbers, and gradients of outputs."""
    return shards_and_heads([(images or 1 + (number + seed) % 3, *SHAPE[1:]) for number in range(count)], seed=seed)


def train(net, norm, devices, seed, used=None, members=None, layer=None):
    """A step, of the devices with the numbers ``used`` among those of all ``members``."""
    count = len(devices) * (SIZE if members is None else len(members))
    first = 0 if members is None else members[0]  # other members have other images
    arrays = draw(seed + 10 * first, count if used is None else len(used))
    job.check_step(net, norm, *arrays, devices, used=used, members=members, layer=layer)


def own_step(net, shards, heads):
    """With this process's share of what all have; its output and input gradient."""
    (y,), (x,) = testing.step(net, [shards[RANK]], [heads[RANK]], cpus(1))
    return y, x.grad


def check_own(expected, y, gradient):
    check("output", y.asnumpy(), expected.outputs[RANK], units=16)
    check("input gradient", gradient.asnumpy(), expected.input_gradients[RANK], units=16)


class Branches(gluon.HybridBlock):
    """Parallel branches with a head that they share; which branch is late differs from process to process."""

    def __init__(self, norm):
        super().__init__()
        with self.name_scope():
            self.norms = [norm(in_channels=3) for _ in range(4)]
            self.head = norm(in_channels=3)
            self.conv = nn.Conv2D(3, 3, padding=1, in_channels=3)
            self.late = [Late(lambda device, i=i: 5e-3 * (i == job.group.rank % 2)) for i in range(2)]
            for block in (*self.norms, *self.late):
                self.register_child(block)

    def hybrid_forward(self, F, x):
        ends = [self.head(self.conv(norm(self.late[i % 2](x)))) for i, norm in enumerate(self.norms)]
        return F.add_n(*[F.tanh(y) * (i + 1) for i, y in enumerate(ends)])


def resnet18(norm):
    net = gluon.model_zoo.vision.resnet18_v1(classes=5)
    return net if norm is nn.BatchNorm else gluon_syncbn.convert_sync_batchnorm(net, timeout=job.TIMEOUT)


def thin_resnet18(norm):
    """The same layers with a quarter of the channels, so that processes exchange and compare fewer gradients."""
    net = resnet.ResNetV1(resnet.BasicBlockV1, [2, 2, 2, 2], [16, 16, 32, 64, 128], classes=5)
    return net if norm is nn.BatchNorm else gluon_syncbn.convert_sync_batchnorm(net, timeout=job.TIMEOUT)


# How it is made, the shape of an image, and the tolerance, of float64; deep nets enlarge errors of rounding.
NETS = {
    "layer": (lambda norm: norm(in_channels=3), (3, 5, 2), 1e-10),
    "branches": (Branches, (3, 4, 4), 1e-9),
    "wide": (lambda norm: norm(in_channels=2048), (2048, 2, 1), 1e-10),
    "thin_resnet18": (thin_resnet18, (3, 32, 32), 1e-6),
    "resnet18": (resnet18, (3, 32, 32), 1e-6),
}


def check_net(case: str) -> None:
    """Two steps of it in each of JOB_MODES, with JOB_DEVICES devices in each process."""
    make, shape, tolerance = NETS[case]
    devices = cpus(int(os.environ.get("JOB_DEVICES", 1)))
    for mode in os.environ.get("JOB_MODES", "static").split():
        net, twin = job.twins(make, devices, (1, *shape))
        set_mode(net, mode)
        for seed in range(2):
            # nn.BatchNorm averages the calls of a shared layer in the opposite order.
            job.check_like(net, twin, seed, devices, shape=shape, tolerance=tolerance, statistics=case != "branches")


def by_environment():
    """GLUON_SYNCBN_PROCESS_GROUP=auto is all that a script needs, beside hvd.init()."""
    if ENGINE == "horovod":
        import horovod.mxnet as hvd

        hvd.init()
    layer, norm = make(cpus(1))
    arrays = draw(0, SIZE)
    check_own(norm.step(*arrays), *own_step(layer, *arrays))
    job.join(ENGINE)
    train(layer, norm, cpus(1), 1)


def groups():
    """Groups of 1, 2, 3, ... devices, which end within a process or span some of them; also where some are absent."""
    for count in (1, 2):
        devices, total = cpus(count), count * SIZE
        for number, size in enumerate(size for size in range(1, total + 1) if total % size == 0):
            layer, norm = make(devices, list(MODES)[number % 3], group_size=size)
            train(layer, norm, devices, 0)
            if ENGINE == "mpi":  # Horovod has to make a set of processes for each
                if size % count == 0:  # else those of the absent process get another group's statistics
                    train(layer, norm, devices, 1, used=range(total - count))
                train(layer, norm, devices, 2, used=range(1, total))
            train(layer, norm, devices, 3)


def own_groups():
    """Layers with processes of their own, by name, communicator or process set, and copies of these layers."""
    colour = RANK % 2
    if ENGINE == "mpi":
        from mpi4py import MPI

        everyone, some = MPI.COMM_WORLD, MPI.COMM_WORLD.Split(colour)
    else:
        import horovod.mxnet as hvd

        sets = [hvd.add_process_set(range(start, SIZE, 2)) for start in range(2)]
        everyone, some = hvd.global_process_set, sets[colour]
    alike = range(colour, SIZE, 2)
    devices, all_of_them = cpus(2), ((everyone, None), (job.group, None), (ENGINE, None), ("auto", None))
    for own, members in ((some, alike), *all_of_them, ("none", [RANK])):
        layer, norm = make(devices, process_group=own)
        for seed in range(2):
            train(layer, norm, devices, seed, members=members)
            layer = copy.deepcopy(layer)
            layer.collect_params().reset_ctx(devices)  # MXNet copies no gradients
    layer, norm = make(devices, process_group=some, group_size=len(alike))
    train(layer, norm, devices, 0, members=alike)
    # Processes of which some have trained more nets train one together.
    for _ in range(1 + colour):
        testing.step(make(devices, process_group=some)[0], *draw(0, 2), devices)
    layer, norm = make(devices)
    train(layer, norm, devices, 0)


def last_batch():
    """Fewer images than devices, and none in the last process, which takes part with nothing; then all again."""
    devices, others = cpus(2), 2 * SIZE - 2
    for mode in ("imperative", "static"):
        layer, norm = make(devices, mode)
        for seed, used in enumerate((None, range(0, others, 2), range(others), None)):
            train(layer, norm, devices, seed, used=used)
    with pytest.raises(ValueError, match="at least one must take part"), gluon_syncbn.devices([]):
        pass
    absent = int(os.environ.get("JOB_ABSENT", 0))
    with gluon_syncbn.devices([] if absent == RANK else devices):
        pass
    train(layer, norm, devices, 9)


def idle_processes():
    """The last process has no devices in the first step of a net, which is an error; or where an exception comes."""
    from mpi4py import MPI

    last, everyone = SIZE - 1, range(SIZE)
    is_idle = last == RANK

    def some(layer, raising=()):
        with gluon_syncbn.devices([] if is_idle else cpus(1), layer):
            if not is_idle:
                with autograd.record():
                    y = layer(mx.nd.array(draw(0, 1)[0][0]))
                y.backward()
                mx.nd.waitall()
            if raising == everyone:
                MPI.COMM_WORLD.Barrier()  # so that none hears of another's exception before its own
            if RANK in raising:
                raise ValueError("a bad batch")

    layer, norm = make(cpus(1))
    words = "process 0 abandoned|process 1 abandoned" if is_idle else f"for the first time.*gives process {SIZE - 1} no"
    with pytest.raises(mx.MXNetError, match=words):
        some(layer)
    gluon_syncbn.abandon_step()
    start_again(layer, norm, cpus(1))
    train(layer, norm, cpus(1), 0)
    for raising in ([0], [last], everyone):
        heard = mx.MXNetError, f"process {raising[0]} abandoned the step"
        error, words = (ValueError, "bad batch") if RANK in raising else heard
        with pytest.raises(error, match=words):
            some(layer, raising)
        gluon_syncbn.abandon_step()
        start_again(layer, norm, cpus(1))
        train(layer, norm, cpus(1), 1)


def cut_groups():
    """Groups of three processes, of which the first is without its last process for a step."""
    layer, norm = make(cpus(1), group_size=3)
    for seed, used in enumerate((None, [0, 1, *range(3, SIZE)], None)):
        train(layer, norm, cpus(1), seed, used=used)


def abandoned_in_another_group():
    """Processes that do not synchronize with the process that abandons the step hear of it, too."""
    layer, norm = make(cpus(1), group_size=2)
    train(layer, norm, cpus(1), 0)
    x, is_last = mx.nd.array(draw(0, 1)[0][0]), RANK == SIZE - 1
    error, words = (ValueError, "a bad batch") if is_last else (mx.MXNetError, f"process {SIZE - 1} abandoned the step")
    with pytest.raises(error, match=words):
        for _ in range(200):
            with autograd.record():
                y = layer(x)
                if is_last:
                    raise ValueError("a bad batch")
            y.backward()
            mx.nd.waitall()
            time.sleep(0.05)
    gluon_syncbn.abandon_step()
    start_again(layer, norm, cpus(1))
    train(layer, norm, cpus(1), 1)


def check_skips(step, net, expected, words="bad batch|process 0 abandoned the step", all_abandon=True):
    """Each process has trained the steps ``expected``, and left the others for one of these reasons. All stay alike."""
    trained = []
    for number in range(expected[-1] + 1):
        try:
            step(number)
            trained.append(number)
        except (ValueError, mx.MXNetError) as error:
            assert re.search(words, str(error)), error
            if all_abandon or RANK == 0:
                gluon_syncbn.abandon_step()  # else they begin the next step
    assert trained == expected, trained
    job.check_same([net[0].weight.data().asnumpy()])


def skipped_updates():
    """One process leaves a step before its update. All go on with the next, and stay alike."""
    net = sequential(lambda: nn.Conv2D(4, 1, in_channels=4), lambda: SyncBatchNorm(in_channels=4, timeout=60))
    net = initialized(net, 1, init=mx.init.Xavier())
    trainer = averaging_trainer(net)
    x = mx.nd.array(draw(0, SIZE)[0][RANK])

    def step(number):
        with autograd.record():
            y = net(x)
        y.backward(y)
        if RANK == 0 and number == 1:
            raise ValueError("a bad batch")
        trainer.step(2)

    check_skips(step, net, [0, 2, 3], all_abandon=False)


def skipped_in_a_row():
    """One process leaves several steps before any of its layers meets the others. All skip the same steps."""
    for number_of_devices, group_size in ((2, None), (1, 1)):
        devices = cpus(number_of_devices)
        net = sequential(
            lambda: nn.Conv2D(4, 1, in_channels=4), lambda size=group_size: SyncBatchNorm(group_size=size, timeout=60)
        )
        net = initialized(net, devices, init=mx.init.Xavier())
        net(mx.nd.ones(SHAPE))
        trainer = averaging_trainer(net)
        x = mx.nd.array(draw(0, SIZE)[0][RANK])

        def step(number, net=net, trainer=trainer, devices=devices, x=x):
            losses, is_bad = [], RANK == 0 and number in (1, 2)
            with autograd.record():
                for device in devices:
                    losses.append(net(x.as_in_context(device)).sum())
                    if is_bad and len(devices) == 2:
                        raise ValueError("a bad batch")
            autograd.backward(losses)
            if is_bad:
                raise ValueError("a bad batch")
            trainer.step(2)

        check_skips(step, net, [0, 3, 4])
    skipped_by_threads()


def skipped_by_threads():
    """Each device has a thread, and several of them abandon one step."""
    devices = cpus(2)
    net = sequential(lambda: nn.Conv2D(4, 1, in_channels=4), lambda: SyncBatchNorm(timeout=60))
    net = initialized(net, devices, init=mx.init.Xavier())
    for device in devices:
        net(mx.nd.ones(SHAPE, ctx=device))
    trainer = averaging_trainer(net)

    def passes(device, raising):
        with autograd.record():
            loss = net(mx.nd.ones(SHAPE, ctx=device) * (1 + RANK)).sum()
            if device in raising:
                raise ValueError("a bad batch")
        loss.backward()
        loss.asnumpy()

    with concurrent.futures.ThreadPoolExecutor(2) as pool:

        def step(number):
            raising = {1: devices, 2: devices[:1]}.get(number, []) if RANK == 0 else []
            parts = [pool.submit(passes, device, raising) for device in devices]
            errors = [error for error in (part.exception() for part in parts) if error is not None]
            if errors:
                raise errors[0]
            trainer.step(2)

        check_skips(step, net, [0, 3, 4], "bad batch|process 0 abandoned the step|step was abandoned")


def abandoned_in_turns():
    """One process fails before the step. All abandon it, meet, and abandon it once more: the next step is right."""
    from mpi4py import MPI

    layer, norm = make(cpus(1))
    train(layer, norm, cpus(1), 0)
    with pytest.raises(ValueError, match="a bad file"), autograd.record():
        if RANK != 1:
            layer(mx.nd.ones(SHAPE))
        raise ValueError("a bad file")
    MPI.COMM_WORLD.Barrier()
    gluon_syncbn.abandon_step()
    MPI.COMM_WORLD.Barrier()
    start_again(layer, norm, cpus(1))
    train(layer, norm, cpus(1), 1)


def backward_after_a_short_step():
    """The last process has no images; the others' backward passes come when all have left `gluon_syncbn.devices`."""
    layer, norm = make(cpus(1))
    used = range(SIZE - 1)
    for seed in range(2):
        train(layer, norm, cpus(1), seed)
        shards, heads = draw(seed, SIZE - 1)
        x = mx.nd.array(shards[min(RANK, SIZE - 2)])
        x.attach_grad()
        with gluon_syncbn.devices(cpus(1) if RANK in used else [], layer), autograd.record():
            y = layer(x) if RANK in used else None
        if y is not None:
            y.backward(mx.nd.array(heads[RANK]))
        expected = norm.step(shards, heads, used=list(used))
        if y is not None:
            check_own(expected, y, x.grad)


def nets_in_turns():
    """The first device calls one net, both call another, which is read, and only then the second calls the first."""
    devices = cpus(2)
    nets = [initialized(SyncBatchNorm(in_channels=4, timeout=20, group_size=2, prefix=name), devices) for name in "ab"]
    x = [mx.nd.ones(SHAPE, ctx=device) for device in devices]
    with autograd.record():
        first = nets[0](x[0])
        both = [nets[1](item) for item in x]
        for item in both:
            item.wait_to_read()
        second = nets[0](x[1])
    autograd.backward([first, second, *both])
    mx.nd.waitall()


def a_device_behind_a_late_process():
    """A device waits for another, which waits for another process: longer than a device may take."""
    devices = cpus(2)
    (pair, norm), (everyone, its_norm) = make(devices, timeout=1, group_size=2), make(devices)
    train(everyone, its_norm, devices, 1)
    shards, heads = draw(0, 2 * SIZE)
    mine = slice(2 * RANK, 2 * RANK + 2)
    time.sleep(4 if RANK == SIZE - 1 else 0)
    inputs = testing.on_devices(shards[mine], devices)
    with autograd.train_mode():
        first = pair(inputs[0])
        after = [everyone(x) for x in inputs]
        outputs = [first, pair(inputs[1] + 0 * after[1])]
    expected = norm.step(shards, heads)
    check_all("output", [item.asnumpy() for item in outputs], expected.outputs[mine], units=16)


def forked_child():
    """A child of one process is none of the job: it abandons a step of its own, and may fork again."""
    layer, norm = make(cpus(1))
    train(layer, norm, cpus(1), 0)
    child = os.fork()
    if child == 0:
        try:
            with contextlib.suppress(ValueError), autograd.record():
                raise ValueError("a bad batch")
            pipes = [os.pipe() for _ in range(8)]  # numbers of files that were closed among them
            grandchild = os.fork()
            if grandchild == 0:
                os._exit(0 if all(os.write(to, b".") for _, to in pipes) else 1)
            os._exit(os.waitpid(grandchild, 0)[1])
        except BaseException:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    train(layer, norm, cpus(1), 1)


def values():
    """Those with which Horovod tests its SyncBatchNorm for PyTorch; a large mean; one value in all; bad numbers.

    test_horovod_sync_batch_norm of Horovod's test/parallel/test_torch.py. Here the running variance is the biased one.
    """
    channel = np.arange(1, 5.0)
    wide = [np.stack([channel * rank, channel * rank + 1], axis=1)[None] for rank in range(SIZE)]
    narrow = [(channel * rank + 1)[None, :, None] for rank in range(SIZE)]
    far = [item * 10 + 1e4 for item in random_shards([SHAPE] * SIZE, "float64")]
    for parts in (wide, narrow, far, [np.full(SHAPE, 3.0)] * SIZE):
        shards = [part.astype("float32") for part in parts]
        layer, norm = make(cpus(1))
        for seed in range(2):
            job.check_step(layer, norm, shards, random_shards([part.shape for part in parts], seed=seed), cpus(1))
    for bad in (np.nan, np.inf):
        arrays = draw(0, SIZE)
        arrays[0][1][0, 0] = bad
        layer, norm = make(cpus(1))
        seen = own_step(layer, *arrays)
        assert all(np.isnan(array.asnumpy()[:, 0]).all() for array in seen)
        norm = Norm(norm.gamma[1:], norm.beta[1:])
        others = [[array[:, 1:] for array in items] for items in (*arrays, seen)]
        check_own(norm.step(*others[:2]), *others[2])
        check("running_var", layer.running_var.data().asnumpy()[1:], norm.running()[1], units=16)


def module():
    """A symbol that is bound by a Module; the first rounds of its layers come in another order in each process."""
    x, names = mx.sym.var("data"), ["left", "right", "middle"]
    parts = [Late(lambda device, i=i: 0.3 * (i == RANK))(x) for i in range(3)]  # the same graph in all processes
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
        shards, heads = draw(seed, SIZE, images=2)
        several = [[head * (number + 1) for head in heads] for number in range(3)]
        bound.forward(mx.io.DataBatch([mx.nd.array(shards[RANK])]), is_train=True)
        bound.backward([mx.nd.array(part[RANK]) for part in several])
        steps = [norm.step(shards, part) for norm, part in zip(references, several)]
        expected = total([step.input_gradients[RANK] for step in steps])
        check("input gradient", bound.get_input_grads()[0].asnumpy(), expected, units=16)
        for name, norm, step, y in zip(names, references, steps, bound.get_outputs()):
            check("output", y.asnumpy(), step.outputs[RANK], units=16)
            for end, wanted in (("gamma", step.gamma_gradient), ("beta", step.beta_gradient)):
                check(end, job.gathered(bound_arrays.grad_dict[f"{name}_{end}"].asnumpy()).sum(0), wanted, units=16)
            for end, wanted in zip(("mean", "var"), norm.running()):
                check(end, bound_arrays.aux_dict[f"{name}_moving_{end}"].asnumpy(), wanted, units=16)


def expander():
    """As in GluonCV's detectors: base weights on the CPU, then a symbol of the base with norms behind it as a block."""

    def build(norm):
        base = initialized(sequential(nn.Conv2D(4, 1, in_channels=4), norm(in_channels=4)))
        out = mx.sym.BatchNorm(base(mx.sym.var("data")), name="behind", fix_gamma=False, eps=1e-5)
        return initialized(gluon.SymbolBlock(out, mx.sym.var("data"), params=base.collect_params()))

    net, twin = job.twins(build, [mx.cpu(1)], SHAPE, functools.partial(job.OURS, num_devices=1))
    set_mode(net, "static")
    for seed in range(3):
        job.check_like(net, twin, seed, [mx.cpu(1)], shape=SHAPE[1:])


def alone_in_the_middle():
    """The first process predicts, saves and exports between steps, as for an evaluation."""

    def build(norm):
        net = sequential(nn.Conv2D(4, 1, in_channels=4), norm(in_channels=4))
        return sequential(set_mode(net, "static"), nn.Activation("tanh"))

    whole, twin = job.twins(build, cpus(1), SHAPE)
    for seed in range(3):
        if RANK == 0:
            # This makes a graph of the net alone, in one process.
            whole[0](mx.nd.ones(SHAPE, dtype="float64")).wait_to_read()
            whole[0].export(os.path.join(os.environ["JOB_FOLDER"], "net"))
        job.check_like(whole, twin, seed, cpus(1), shape=SHAPE[1:])


class Several(nn.Sequential):
    """Nets that train in one step, each on channels of its own: the script calls them, and not a block."""

    late = None  # the number of one whose first layer is reached later

    def __init__(self, norm):
        super().__init__()
        self.add(*(sequential(norm(in_channels=4), nn.Activation("relu"), norm(in_channels=4)) for _ in range(3)))

    def __call__(self, x):
        parts = enumerate(zip(self, mx.nd.split(x, 3, axis=1)))
        return mx.nd.concat(*[net(late(x) if number == self.late else x) for number, (net, x) in parts], dim=1)


def two_nets():
    """Teacher and student, which have no order between them; their first rounds come in another one in each process."""
    for size in (None, 1):
        norm = functools.partial(job.OURS, group_size=size, renorm=(1, 0))
        nets, twin = job.twins(Several, cpus(1), (1, 12, 3, 3), norm)
        for seed in range(2):
            nets.late = None if seed else RANK
            members = [RANK] if size else None
            job.check_like(nets, twin, seed + (members or [0])[0], cpus(1), shape=(12, 3, 3), members=members)


class Other(nn.HybridSequential):
    """As a layer alone, but another class."""

    def __init__(self, channels, layers=1, **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.add(*(SyncBatchNorm(in_channels=channels, timeout=30) for _ in range(layers)))


def nets_in_another_order():
    """Of one architecture they cannot be told apart but by name; statistics of two nets must never be mixed."""
    places = r"process 0 .* has trained '(\w+)', '(\w+)', and process 1 .* '\2', '\1'\. "
    lists = r"process 0 \(.+\) has 4 synchronized layers, process 1 \(.+\) has 3\. "
    facts = r"'\w+' has momentum=0.9 in process 0 \(.+\), '\w+' has momentum=0.8 in process 1 \(.+\)\. "
    refused = [
        ("the nets differ: '.+' is a .+ in process 0", lambda n: [Other(n), SyncBatchNorm(in_channels=n, timeout=30)]),
        (places, lambda n: [Other(n, prefix="teacher_"), Other(n, prefix="student_")]),
        (places, lambda n: [Other(n), Other(n)]),
        ("the nets differ: " + lists, lambda n: [Other(n, 4 - RANK), Other(n, 4 - RANK)]),
        (
            "layer 1 of 1 differs: " + facts,
            lambda n: [SyncBatchNorm(in_channels=n, timeout=30, momentum=0.9 - RANK / 10)],
        ),
    ]
    for channels, (words, build) in enumerate(refused, start=5):
        nets = build(channels)
        for net in nets:
            net.initialize()
        with pytest.raises(mx.MXNetError) as caught:
            with autograd.record():
                outputs = [net(mx.nd.ones((2, channels, 3, 3))) for net in nets[:: -1 if RANK else 1]]
            for output in outputs:
                output.asnumpy()
        gluon_syncbn.abandon_step()
        # One of them is refused, perhaps, because the other had left the step.
        is_told = re.search(words + ".*first train them in the same order", str(caught.value))
        assert job.gathered([bool(is_told)]).any(), caught.value
    # A prefix of its own, and one more that was made before, are no other order.
    for net in [Other(4, prefix=f"rank{'ab'[RANK]}_"), *[Other(4) for _ in range(3 + RANK)][RANK:]]:
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
        shards, heads = draw(0, SIZE)
        x, head = (mx.nd.array(items[RANK]) for items in (shards, heads))
        layer.collect_params().setattr("grad_req", "null" if kind == "frozen" else "write")
        if kind in ("recorded", "kept", "retained"):
            x.attach_grad()
        if kind == "module":
            symbol = gluon_syncbn.symbol.SyncBatchNorm(mx.sym.var("data"), num_devices=1, timeout=60, name="alone")
            bound = testing.module_of(symbol, cpus(1), x.shape, for_training=False)
            bound.forward(mx.io.DataBatch([x]), is_train=True)
        else:
            is_recorded, in_training = kind != "not recorded", kind != "predicted"
            with autograd.record(in_training) if is_recorded else autograd.train_mode():
                kept = layer(x) * mx.nd.ones(1)
            expected = norm.step(shards, heads, training=in_training).input_gradients[RANK]
        if kind == "retained":
            for retain in (True, False):
                kept.backward(head, retain_graph=retain)
                check("input gradient", x.grad.asnumpy(), expected, units=16)
        layer.collect_params(".*gamma|.*beta").setattr("grad_req", "write")
        kept = kept if kind == "kept" else None
        mx.nd.waitall()
        if RANK == 0:
            with pytest.raises(StopIteration), autograd.record():
                raise StopIteration("the loader is at its end")
            gluon_syncbn.abandon_step()
            with pytest.raises(mx.MXNetError):
                mx.nd.random.normal(0, -1, shape=(1,)).asnumpy()  # has to do with no layer
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


def given_up():
    """What is under way in one process is abandoned in all, and goes on with the next step."""
    (layer, norm), (other, _), outside = make(cpus(1)), make(cpus(1)), initialized(nn.Dense(2, in_units=36))
    moments = "in record", "after another backward", "between two backward", "in the next record", "a label that failed"
    is_first = RANK == 0
    breaks_off(is_first, "never", layer, other, outside)
    breaks_off(False, "in the next record", layer, other, outside)  # so that it is known
    for kind in moments * 2:
        began = time.monotonic()
        error, words = (ValueError, "bad batch") if is_first else (mx.MXNetError, "process 0 .*abandoned the step")
        with pytest.raises(error, match=words):
            breaks_off(is_first, kind, layer, other, outside)
        if not is_first:
            with contextlib.suppress(mx.MXNetError):
                mx.nd.waitall()
            words = "the step had failed before .*process 0"
            # What needs all processes fails at once, and not after the timeout.
            with pytest.raises(gluon_syncbn.SyncBatchNormError, match=words), gluon_syncbn.devices(mx.cpu(0)):
                pass
            assert time.monotonic() - began < 30, kind
        gluon_syncbn.abandon_step()
        start_again(layer, norm, cpus(1))
        train(layer, norm, cpus(1), 2)


def start_again(layer, norm, devices):
    """Other running statistics, where those of a step that was abandoned may have come in some processes only."""
    layer.running_mean.set_data(mx.nd.arange(4))
    layer.running_var.set_data(mx.nd.arange(1, 5))
    for number in range(len(devices) * SIZE):
        norm.set_running(np.arange(4.0), np.arange(1.0, 5), number)


def dropped_net():
    """A net that is gone, but not yet collected in one process, does not count in a short step."""
    devices, own = cpus(2), None
    gc.disable()
    if ENGINE == "mpi":
        from mpi4py import MPI

        own = MPI.COMM_WORLD
    for channels in (7, 4):
        dropped = initialized(sequential(SyncBatchNorm(in_channels=channels, timeout=60, process_group=own)), devices)
        testing.step(dropped, *[[np.ones((2, channels, 3, 3), np.float32)] * 2] * 2, devices)
        mx.nd.waitall()
        del dropped
        if RANK == 0:
            gc.collect()
    layer, norm = make(devices)
    for seed, used in enumerate((None, [0, 1], None)):
        train(layer, norm, devices, seed, used=used)
    gc.enable()


def limits():
    """Of Batch Renormalization, which each process sets between steps."""
    devices = cpus(2)
    for size in (None, 2, 1):
        layer, norm = make(devices, group_size=size, renorm=(1, 0))
        for seed, norm.renorm in enumerate([(1, 0), (1.5, 0.5), (3, 2)]):
            gluon_syncbn.set_renorm(layer, *norm.renorm)
            train(layer, norm, devices, seed)


def loader():
    """With worker processes of a data loader, which are forked in the middle of the job."""
    layer, norm = make(cpus(1))
    (images,) = random_shards([(16, *SHAPE[1:])])
    mine = gluon.data.SimpleDataset([images[number] for number in range(RANK, 16, SIZE)])
    for _ in range(2):
        for number, batch in enumerate(gluon.data.DataLoader(mine, batch_size=2, num_workers=2)):
            shards = [images[2 * SIZE * number + rank :: SIZE][:2] for rank in range(SIZE)]
            np.testing.assert_array_equal(batch.asnumpy(), shards[RANK])
            job.check_step(layer, norm, shards, random_shards([SHAPE] * SIZE, seed=number), cpus(1))
        assert number + 1 == 16 // SIZE // 2


def unfreezing():
    """Parts of a net are frozen for some epochs, and it grows: who synchronizes is not the same from step to step."""
    net, twin = job.twins(lambda norm: sequential(*(norm(in_channels=4) for _ in range(3))), cpus(1), SHAPE)
    for epoch, mode in enumerate(["hybridize", "static"] * 2):
        frozen = epoch < 2
        gluon_syncbn.freeze_statistics(net[:2], frozen)
        for layer in twin[:2]:
            layer._kwargs["use_global_stats"] = frozen
        for item in (net, twin):
            item[:2].collect_params(".*gamma|.*beta").setattr("grad_req", "null" if frozen else "write")
        if epoch == 3:
            for item, norm in ((net, job.OURS), (twin, nn.BatchNorm)):
                item.add(norm(in_channels=4))
                initialized(item[3], dtype="float64")
        set_mode(net, mode)
        for seed in range(2):
            job.check_like(net, twin, seed, cpus(1), shape=SHAPE[1:])


def portable():
    """One clear error where a layer is made, or at its first call; nobody waits for anybody."""
    options, devices, convert_symbol = {"backend": "portable"}, cpus(1), gluon_syncbn.convert_symbol
    early = [make(devices, mode, prefix="before_", **options)[0] for mode in MODES]
    plain, norm = mx.sym.BatchNorm(mx.sym.var("data"), name="symbol"), nn.BatchNorm(prefix="converted_")
    bound = mx.mod.Module(convert_symbol(plain, 2, **options), label_names=None)
    bound.bind([("data", SHAPE)])
    bound.init_params()
    job.join(ENGINE)
    stored, _ = make(devices, kvstore="local", prefix="stored_")  # 'auto' takes portable then
    for words, call in (
        *(("'before': backend='portable'", lambda layer=layer: own_step(layer, *draw(0, SIZE))) for layer in early),
        ("'after': backend='portable'", lambda: make(devices, prefix="after_", **options)),
        ("'converted': backend='portable'", lambda: gluon_syncbn.convert_sync_batchnorm(norm, **options)),
        ("'symbol': backend='portable'", lambda: convert_symbol(plain, 2, **options)),
        ("'symbol': backend='auto'", lambda: convert_symbol(plain, 2, kvstore="local")),
        ("'stored': backend='auto'", lambda: own_step(stored, *draw(0, SIZE))),
    ):
        reason = "cannot run here: .*only the native back end synchronizes several processes"
        with pytest.raises(RuntimeError, match=f"SyncBatchNorm {words} {reason}"):
            call()
    assert type(norm) is nn.BatchNorm
    words = "'symbol': it runs on the portable back end, which does not synchronize several processes"
    with pytest.raises(mx.MXNetError, match=words):
        bound.forward(mx.io.DataBatch([mx.nd.ones(SHAPE)]), is_train=True)
        bound.get_outputs()[0].asnumpy()
    gluon_syncbn.abandon_step()
    layer, norm = make(cpus(2), process_group="none", **options)
    norm.mean_is_rounded = True
    train(layer, norm, cpus(2), 0, members=[RANK])
    train(*make(devices), devices, 0)


class Own(mx.optimizer.SGD):
    """An optimizer of the user."""


def trainers_that_step_alone():
    """A warning for each that adds up no gradients of a net that synchronizes with other processes, and no other."""

    def trainer(net, optimizer="sgd", **options):
        return gluon.Trainer(net.collect_params(), optimizer, **options)

    def resumed(net):
        made, file = trainer(net), f"{os.environ['JOB_FOLDER']}/states-{RANK}"
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
        (0, averaging_trainer, {}, {}),
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


def averaging_trainer(net):
    made = gluon_syncbn.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 1.0})
    made.broadcast_parameters()
    return made


def one_set_of_weights():
    """`DistributedTrainer`: weights of the first process, mean gradients of who learns now, steps that break off."""
    if ENGINE == "horovod":
        with pytest.raises(ValueError, match="connected by horovod. Use horovod.mxnet.DistributedTrainer"):
            gluon_syncbn.DistributedTrainer(nn.Dense(1).collect_params(), "sgd")
        return
    devices = cpus(2)
    mx.random.seed(RANK)
    layers = nn.Dense(2), SyncBatchNorm(timeout=20), nn.Dense(1, dtype="float64")
    net = sequential(*layers[:2], nn.HybridLambda(lambda F, x: F.cast(x, "float64")), layers[2])
    initialized(net, devices)
    parameters = net.collect_params()

    def passes(number):
        x = np.random.RandomState(10 * number + RANK).standard_normal((4, 3)).astype(np.float32)
        with autograd.record():
            losses = [net(mx.nd.array(part, ctx=device)).sum() for part, device in zip(np.split(x, 2), devices)]
        autograd.backward(losses)

    net(mx.nd.ones((1, 3), ctx=mx.cpu(0)))
    passes(0)
    apart = gluon_syncbn.DistributedTrainer(parameters, "sgd")
    with pytest.raises(ValueError, match=r"has other values in process 1 than in process 0.*broadcast_parameters\(\)"):
        apart.step(1)
    trainer = averaging_trainer(net)
    for number, frozen in enumerate((0, None, 2, None)):
        for place, layer in enumerate(layers):
            layer.collect_params(".*(weight|bias|gamma|beta)").setattr(
                "grad_req", "null" if place == frozen else "write"
            )
        passes(number)
        learning = [parameter for parameter in parameters.values() if parameter.grad_req != "null"]
        before = [parameter.data(devices[0]).asnumpy() for parameter in learning]
        sums = [sum(item.asnumpy() for item in parameter.list_grad()) for parameter in learning]
        totals = np.split(job.gathered(*sums).mean(axis=0), np.cumsum([item.size for item in sums])[:-1])
        trainer.step(1)
        for parameter, old, gradient in zip(learning, before, totals):
            for array in parameter.list_data():
                np.testing.assert_allclose(array.asnumpy(), old - gradient.reshape(old.shape), rtol=1e-5, atol=1e-5)
        job.check_same([array.asnumpy() for item in parameters.values() for array in item.list_data()])
    if RANK == 0:  # who abandons has backward passes behind it, and the others wait for it in their update
        passes(4)
        mx.nd.waitall()
        time.sleep(1)
        gluon_syncbn.abandon_step()
    else:
        passes(4)
        with pytest.raises(gluon_syncbn.SyncBatchNormError, match="Trainer: the update: process 0 abandoned"):
            trainer.step(1)
        gluon_syncbn.abandon_step()
    passes(5)
    trainer.step(1)
    job.check_same([array.asnumpy() for item in parameters.values() for array in item.list_data()])
    if RANK == 0:
        layers[0].collect_params().setattr("grad_req", "null")
    passes(6)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"parameter 0 is frozen in process 0, and \(2, 3\) float32 in process 1"):
            trainer.step(1)
    layers[0].collect_params().setattr("grad_req", "write")
    # Ctrl-C, or a handler that exits, in a process that waits for the others in its update; they come in the time in
    # which it still waits.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    for sent, raised in ((signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)):
        passes(7)
        if RANK == 0:
            endings.send(sent, 1)
            with pytest.raises(raised):
                trainer.step(1)
        else:
            time.sleep(1.8)
            trainer.step(1)
        passes(8)
        with pytest.raises(ValueError, match="where an update was interrupted"):
            trainer.step(1)
        trainer.broadcast_parameters()
        passes(9)
        trainer.step(1)
    passes(10)  # and one of two updates fails
    how = {"side_effect": OSError} if RANK == 0 else {"wraps": trainer.optimizer.update_multi_precision}
    with mock.patch.object(trainer.optimizer, "update_multi_precision", **how):
        if RANK == 0:
            with pytest.raises(OSError):
                trainer.step(1)
        else:
            trainer.step(1)
    passes(11)
    with pytest.raises(ValueError, match="where an update was interrupted"):
        trainer.step(1)
    trainer.broadcast_parameters()
    passes(12)
    trainer.step(1)
    job.check_same([array.asnumpy() for item in parameters.values() for array in item.list_data()])
    with pytest.raises(ValueError, match="ignore_stale_grad"):
        trainer.step(1, ignore_stale_grad=True)
    short_batch(net, trainer, devices)
    names_in_another_order()
    nothing_learns()
    done_in_one_process()


def nothing_learns():
    """In the first process, which comes to the meeting nevertheless."""
    dense = initialized(nn.Dense(1, in_units=2), 1)
    trainer = averaging_trainer(dense)
    if RANK == 0:
        dense.collect_params().setattr("grad_req", "null")
    with pytest.raises(ValueError, match=r"parameter 0 is frozen in process 0, and \(1, 2\) float32 without a new"):
        trainer.step(1)


def done_in_one_process():
    """The first process does what the others do not: the next update is an error in all, and changes no weight."""
    net = initialized(nn.Dense(1, in_units=2), 1)
    trainer = averaging_trainer(net)

    def passes():
        with autograd.record():
            loss = net(mx.nd.ones((1 + RANK, 2)) * (1 + RANK)).sum()
        loss.backward()

    def check_refused(words, update=lambda: trainer.step(1)):
        before = net.weight.data().asnumpy()
        with pytest.raises(ValueError, match=words):
            update()
        np.testing.assert_array_equal(net.weight.data().asnumpy(), before)

    if RANK == 0:
        passes()
    check_refused("without a new gradient in process 1")
    passes()
    if RANK == 0:
        trainer.set_learning_rate(0.5)
    check_refused("the learning rate is 0.5 in process 0, and 1.0 in process 1")
    trainer.set_learning_rate(0.5)
    trainer.step(1)
    passes()
    check_refused("the method is allreduce_grads in", trainer.allreduce_grads if RANK == 0 else lambda: trainer.step(1))
    if RANK == 0:
        net.weight.set_data(net.weight.data() + 1)
    check_refused(r"_weight' has other values in process 1.*after one process alone has loaded or")
    trainer.broadcast_parameters()
    # Batches of different sizes are divided by the size of all; this process's gradient is (1 + RANK)² for each weight.
    before = net.weight.data().asnumpy()
    trainer.step(1 + RANK)
    ranks = np.arange(SIZE)
    step = 0.5 * ((1 + ranks) ** 2).sum() / (1 + ranks).sum()
    np.testing.assert_allclose(net.weight.data().asnumpy(), before - step, rtol=1e-6)
    for size in (4, 4, 1 + RANK):
        passes()
        trainer.allreduce_grads()
        trainer.update(size)
    passes()
    check_refused("_weight' has other values in process 1", trainer.allreduce_grads)
    trainer.broadcast_parameters()
    with autograd.record():  # the last process has no images
        loss = net(mx.nd.ones((1, 2))).sum() * (RANK < SIZE - 1)
    loss.backward()
    before = net.weight.data().asnumpy()
    trainer.step(int(RANK < SIZE - 1))
    np.testing.assert_allclose(net.weight.data().asnumpy(), before - 0.5, rtol=1e-6)
    states_of_one_process()


def states_of_one_process():
    """The optimizer of the first process goes on from other states than the others, until they get them from it."""
    devices = cpus(2) if RANK else [mx.cpu(2)]
    for optimizer, options in (("adam", {}), ("sgd", {"momentum": 0.9, "multi_precision": True}), ("lamb", {})):
        dtype = "float16" if "multi_precision" in options else "float32"
        weight = gluon.Parameter("weight", shape=(3,), dtype=dtype, init="ones")
        weight.initialize(ctx=devices)
        schedule = mx.lr_scheduler.FactorScheduler(step=2, factor=0.5, base_lr=0.1)
        told = {"learning_rate": 0.1, "lr_scheduler": schedule, **options}
        other = gluon.Parameter("weight", shape=(2,), dtype=dtype, init="ones")  # MXNet allows another of the same name
        other.initialize(ctx=devices)
        trainer = gluon_syncbn.DistributedTrainer([weight, other], optimizer, told)
        trainer.broadcast_parameters()

        def steps(count, weight=weight, other=other, trainer=trainer):
            for number in range(count):
                with autograd.record():
                    weights = ((weight.data(device), other.data(device)) for device in devices)
                    losses = [(a**2).sum() * (number + 1) + (b**2).sum() for a, b in weights]
                autograd.backward(losses)
                trainer.step(2)

        def check_same(weight=weight, other=other):
            for parameter in (weight, other):
                first, *others = (array.asnumpy() for array in parameter.list_data())
                job.check_same([first])
                assert all((array == first).all() for array in others)

        steps(3)
        file = f"{os.environ['JOB_FOLDER']}/{optimizer}-{RANK}"
        trainer.save_states(file)
        steps(2)
        if RANK == 0:
            trainer.load_states(file)
        with pytest.raises(ValueError, match="the learning rate is 0.05 in process 0, and 0.025 in process 1"):
            steps(1)
        trainer.broadcast_parameters()
        steps(2)
        check_same()
        trainer.load_states(f"{os.environ['JOB_FOLDER']}/{optimizer}-0")  # which knows one device, of another number
        steps(2)
        check_same()


def short_batch(net, trainer, devices):
    """One image in each process, on one of its devices; and an error between two steps."""
    with gluon_syncbn.devices(devices[:1], net):
        with autograd.record():
            loss = net(mx.nd.ones((2, 3), ctx=devices[0]) * (1 + RANK)).sum()
        loss.backward()
    trainer.step(1)
    if RANK == 0:
        gluon_syncbn.abandon_step()
    with autograd.record():
        losses = [net(mx.nd.ones((2, 3), ctx=device)).sum() for device in devices]
    autograd.backward(losses)
    trainer.step(1)
    job.check_same([array.asnumpy() for item in net.collect_params().values() for array in item.list_data()])


def names_in_another_order():
    """Gluon numbers names by what was made before, and its Trainer sorts them as texts."""
    for _ in range(0 if RANK else 9):
        nn.Dense(1)
    with mx.name.NameManager():
        net = nn.HybridSequential(prefix="")
        net.add(*(nn.Dense(3, in_units=3, prefix=f"dense{9 + number if RANK else number}_") for number in (0, 1)))
    net.initialize(mx.init.Constant(RANK))
    for number, layer in enumerate(net):
        layer.weight.set_data(mx.nd.ones((3, 3)) * (1 + number + 10 * RANK))
    trainer = averaging_trainer(net)
    assert [float(layer.weight.data().mean().asscalar()) for layer in net] == [1, 2]
    with autograd.record():
        loss = net[0](mx.nd.ones((1, 3))).sum() + net[1](mx.nd.ones((1, 3)) * 4).sum()
    loss.backward()
    trainer.step(1)
    assert [float(layer.weight.data().mean().asscalar()) for layer in net] == [0, -2]


def statistics_anew():
    """Of all batches of all processes, each of which counts alike; where one fails, the others need not wait."""
    layer, _ = make(cpus(2))
    batches = random_shards([(size, *SHAPE[1:]) for size in (2, 5, 3)] * SIZE, seed=1)
    gluon_syncbn.update_statistics(layer, batches[3 * RANK : 3 * RANK + 3])
    means = np.mean([batch.astype(np.float64).mean((0, 2, 3)) for batch in batches], axis=0)
    squares = np.mean([np.square(batch.astype(np.float64)).mean((0, 2, 3)) for batch in batches], axis=0)
    first, second = cpus(2)
    job.check_same([layer.running_mean.data(second).asnumpy(), layer.running_var.data(first).asnumpy()])
    np.testing.assert_allclose(layer.running_mean.data(first).asnumpy(), means, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(layer.running_var.data(second).asnumpy(), squares - means**2, rtol=1e-6, atol=1e-6)
    before = layer.running_mean.data(first).asnumpy()
    error = ValueError if RANK == 0 else gluon_syncbn.SyncBatchNormError
    with pytest.raises(error, match="for 2 devices" if RANK == 0 else "process 0 abandoned the step"):
        gluon_syncbn.update_statistics(layer, [batches[0], batches[1][: 1 if RANK == 0 else 2]])
    assert (layer.running_mean.data(first).asnumpy() == before).all()
    gluon_syncbn.update_statistics(layer, batches[:1])
    assert (layer.running_mean.data(first).asnumpy() != before).any()


def is_checked():
    """A net over all processes, of which each has another number of images; and one within each process."""
    for group, whom in ((None, f"cpu(0), cpu(1) of {SIZE} processes"), ("none", "cpu(0), cpu(1)")):
        mx.random.seed(7)
        net = sequential(nn.Conv2D(4, 3, in_channels=3), SyncBatchNorm(process_group=group), nn.Dense(2))
        initialized(net, 2, "hybridize")
        images = mx.nd.array(random_shards([(2 + RANK, 3, 6, 5)], seed=RANK)[0])
        result = gluon_syncbn.check(net, images)
        assert result.is_synchronized and result.layers[0].text == whom, str(result)
        assert all(item.found < 1e-5 for item in result.differences.values()), str(result)
    net[0].weight.set_data(net[0].weight.data(mx.cpu(0)) + RANK)
    gluon_syncbn.convert_sync_batchnorm(net, process_group=None)
    result = gluon_syncbn.check(net, images)
    assert "weights of the processes differ" in str(result) and not result.is_synchronized
    grouped = initialized(SyncBatchNorm(in_channels=3, group_size=2 * SIZE), 2)
    assert gluon_syncbn.check(grouped, images).layers[0].state == "synchronized"
    error = ValueError if RANK == 0 else gluon_syncbn.SyncBatchNormError
    with pytest.raises(error, match="too few images" if RANK == 0 else "process 0 abandoned the step"):
        gluon_syncbn.check(grouped, images[: 1 if RANK == 0 else 2])
    with pytest.raises(ValueError, match="images of one size, not"):
        gluon_syncbn.check(grouped, mx.nd.array(random_shards([(2, 3, 6 + RANK, 5)])[0]))
    layer, norm = make(cpus(2))
    for seed in range(2):
        job.check_step(layer, norm, *draw(seed, 2 * SIZE), cpus(2))


def training():
    """Weights stay those of one device, step by step; either goes on from a checkpoint of the other."""
    processes = {"mpi": WithMPI, "horovod": WithHorovod}[ENGINE]()
    devices = cpus(1 if ENGINE == "horovod" else 2)  # its Trainer adds up those of the first device
    file = os.path.join(os.environ["JOB_FOLDER"], "checkpoint")

    def build(norm):
        synchronized = norm(in_channels=8, momentum=0.875)
        return sequential(nn.Conv2D(8, 3, in_channels=3), synchronized, nn.Activation("relu"), nn.Dense(5))

    nets, options = job.twins(build, devices, (1, 3, 8, 8)), {"learning_rate": 0.1, "momentum": 0.9}
    set_mode(nets[0], "static")
    makers = processes.make_trainer, gluon.Trainer
    trainers = [maker(net.collect_params(), "sgd", options) for maker, net in zip(makers, nets)]
    for step in range(12):
        job.check_like(*nets, step, devices, shape=(3, 8, 8))
        for parameter in nets[1].collect_params().values():
            if parameter.grad_req != "null":
                parameter.grad()[:] /= SIZE  # as the mean over processes; `step` would round 1/SIZE to float32
        for trainer in trainers:
            trainer.step(4)
        if step in (3, 7):
            if RANK == 0:
                nets[step == 3].save_parameters(file)
                trainers[step == 3].save_states(file + ".states")
            job.gathered([0])  # all wait for the file
            for net, trainer, contexts in zip(nets, trainers, (devices, cpus(1))):
                net.load_parameters(file, ctx=contexts)
                trainer.load_states(file + ".states")
            job.gathered([0])


def soak():
    """Nothing that is alive grows while a small net trains: layers of 4 channels, or of those that are given."""
    blocks, before = [], 4
    for channels in map(int, sys.argv[4:] or [4] * 3):
        blocks += [nn.Conv2D(channels, 1, in_channels=before), SyncBatchNorm(in_channels=channels, timeout=60)]
        before = channels
    net = initialized(sequential(*blocks), 1, "static")
    x, steps, began = mx.nd.array(draw(RANK, 1, 2)[0][0]), int(sys.argv[3]) // 3, time.monotonic()

    def step():
        with autograd.record():
            y = net(x)
        y.backward()
        y.wait_to_read()

    live.watch(step, 2, steps, 256, testing.LATE_THREADS, lambda grows: job.gathered([bool(grows)]).any())
    job.check_same([layer.running_var.data().asnumpy() for layer in net[1::2]])
    job.say(f"{1e3 * (time.monotonic() - began) / (3 * steps):.1f} ms a step")


def last_step():
    """The first process ends while its last step waits for the others, which come later than devices ever would."""
    layer, norm = make(cpus(1))
    train(layer, norm, cpus(1), 0)
    if RANK:
        time.sleep(5)
    arrays = draw(1, SIZE)
    seen = own_step(layer, *arrays)
    if RANK:
        check_own(norm.step(*arrays), *seen)


def train_for_ever():
    """Until something happens to a process; `test_process_faults` kills one."""
    layer, _ = make(cpus(1))
    job.say("PID", RANK, os.getpid())
    while True:
        own_step(layer, *draw(0, SIZE))[0].wait_to_read()


for way in WAYS.split(","):
    if job.group is None and way not in JOINS_ITSELF:
        job.join(ENGINE)
    others = [] if job.group is None else [SyncBatchNorm, nn.HybridSequential, lambda: nn.Conv2D(2, 1)] * RANK
    extra = [block() for block in others]
    check_net(way) if way in NETS else globals()[way]()
    job.say("RIGHT", way)
