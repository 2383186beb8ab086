"""What the scripts that run in several processes share: how they join, and training steps that they compare.

Each process compares what it has of a step with the whole batch of all processes: `check_step` that of a layer with
the reference, `check_like` that of a net with a twin of `nn.BatchNorm` on one device.
"""

import contextlib
import functools
import os
import socket
import sys

import mxnet as mx
import numpy as np
import testing
from mxnet.gluon import nn
from reference import check, check_all

import gluon_syncbn

TIMEOUT = 120
OURS = functools.partial(gluon_syncbn.SyncBatchNorm, timeout=TIMEOUT)
group = None  # once this process has joined


def join(engine: str):
    """The process group of this process; Horovod is initialized as users do.

    JOB_HOSTS, "0 1 1" say, are the hosts on which the processes seem to be.
    """
    global group
    if "JOB_HOSTS" in os.environ:
        name = "host" + os.environ["JOB_HOSTS"].split()[int(os.environ["OMPI_COMM_WORLD_RANK"])]
        socket.gethostname = lambda: name
    if engine == "horovod":
        import horovod.mxnet as hvd

        hvd.init()
    group = gluon_syncbn.init_process_group(engine)
    return group


def say(*words) -> None:
    """One line, in one piece; also to a file in the folder JOB_SAID, as a host may have lost its launcher."""
    line = " ".join(map(str, words)) + "\n"
    if "JOB_SAID" in os.environ:
        with open(f"{os.environ['JOB_SAID']}/{socket.gethostname()}.{os.getpid()}", "a", encoding="utf-8") as file:
            file.write(line)
    sys.stdout.write(line)
    sys.stdout.flush()


def gathered(*arrays) -> np.ndarray:
    """What all processes have in place of these arrays, a row each."""
    vector = np.concatenate([np.ravel(array) for array in arrays]).astype(np.float64)
    if group.name == "mpi":
        from mpi4py import MPI

        return np.stack(MPI.COMM_WORLD.allgather(vector))
    import horovod.mxnet as hvd

    rows = np.zeros((group.size, vector.size))
    rows[group.rank] = vector
    return hvd.allreduce(mx.nd.array(rows, dtype="float64"), name="test", op=hvd.Sum).asnumpy()


def check_same(arrays) -> None:
    """All processes have the same bits."""
    rows = gathered(*arrays)
    assert (rows == rows[0]).all(), "processes differ"


def check_step(net, norm, shards, heads, devices, *, layer=None, used=None, members=None) -> None:
    """One training step of the processes ``members``, by default of all, compared with the reference of a layer.

    Outputs, input gradients and running statistics of this process, and gradients of γ and β, added over processes.
    ``shards``, ``heads``: of all devices of all members; where there are numbers ``used``, of these alone.
    """
    layer, members = layer or net, list(range(group.size) if members is None else members)
    numbers = list(range(len(shards)) if used is None else used)
    first = members.index(group.rank) * len(devices)
    mine = [place for place, number in enumerate(numbers) if 0 <= number - first < len(devices)]
    own = [devices[numbers[place] - first] for place in mine]
    outputs, inputs = [], []
    with contextlib.nullcontext() if used is None else gluon_syncbn.devices(own, net):
        if own:
            outputs, inputs = testing.step(net, *([items[i] for i in mine] for items in (shards, heads)), own)
    expected = norm.step(shards, heads, used=numbers)
    how = testing.precision(layer, norm.mean_is_rounded)
    check_all("output", [item.asnumpy() for item in outputs], [expected.outputs[i] for i in mine], **how)
    gradients = [item.grad.asnumpy() for item in inputs]
    check_all("input gradient", gradients, [expected.input_gradients[i] for i in mine], **how)
    sums = [testing.total(vector.grad(device) for device in devices) for vector in (layer.gamma, layer.beta)]
    totals = np.split(gathered(sums)[members].sum(axis=0), 2)
    for name, total, wanted in zip(("gamma", "beta"), totals, (expected.gamma_gradient, expected.beta_gradient)):
        check(f"gradient of {name}", total, wanted, units=how["units"])
    testing.check_running(layer, norm, first=first, units=32)


def twins(make, devices, shape, norm=OURS) -> list:
    """A net of float64 on these devices, and its twin with `nn.BatchNorm` and the same numbers on one.

    γ, β and variances are some that a mistake could not hide behind.
    """
    mx.random.seed(3)
    nets = [make(norm), make(nn.BatchNorm)]
    for net, contexts in zip(nets, (devices, [mx.cpu(0)])):
        testing.initialized(net, contexts, dtype="float64")
        net.collect_params().reset_ctx(contexts)  # of those that were there already
        net(mx.nd.zeros(shape, ctx=contexts[0], dtype="float64"))
    for ours, other in zip(*(net.collect_params().values() for net in nets)):
        if other.name.endswith(("gamma", "beta", "var")):
            other.set_data(mx.nd.random.uniform(0.5, 2, other.shape, dtype="float64"))
        ours.set_data(other.data(mx.cpu(0)))
    return nets


def check_like(net, twin, seed, devices, *, shape, members=None, is_alone=False, statistics=True, tolerance=1e-9):
    """A training step of a net in the processes ``members`` is that of its twin, to which the whole batch is given.

    ``is_alone``: only outputs and input gradients, for which nobody is asked. ``statistics``: whether running
    statistics are those of the twin, too, and not only the same in all processes.
    """
    members = list(range(group.size) if members is None else members)
    first = members.index(group.rank) * len(devices)
    shapes = [(2 + (number + seed) % 2, *shape) for number in range(len(members) * len(devices))]
    shards = testing.random_shards(shapes, "float64", seed)
    whole = np.concatenate(shards)
    out = twin(mx.nd.array(whole[:1], dtype="float64")).shape[1:]
    heads = testing.random_shards([(len(shard), *out) for shard in shards], "float64", seed + 100)
    (expected,), (x,) = testing.step(twin, [whole], [np.concatenate(heads)], [mx.cpu(0)])
    mine = slice(first, first + len(devices))
    outputs, inputs = testing.step(net, shards[mine], heads[mine], devices)
    rows = slice(sum(map(len, shards[:first])), sum(map(len, shards[: mine.stop])))
    near("output", np.concatenate([item.asnumpy() for item in outputs]), expected.asnumpy()[rows], tolerance)
    gradients = np.concatenate([item.grad.asnumpy() for item in inputs])
    near("input gradient", gradients, x.grad.asnumpy()[rows], tolerance)
    if is_alone:
        return
    mx.nd.waitall()
    sums, wanted, kept = [], [], []
    for ours, other in zip(*(item.collect_params().values() for item in (net, twin))):
        if other.grad_req != "null":
            sums.append(sum(ours.grad(device).asnumpy() for device in devices))
            wanted.append(other.grad().asnumpy())
            continue
        kept += [ours.data(device).asnumpy() for device in devices]
        for item in kept[-len(devices) :] if statistics else []:
            near(ours.name, item, other.data().asnumpy(), max(tolerance, 1e-6), axis=0)  # its momentum is a float
    if len(members) > 1:
        check_same(kept)
    totals = gathered(*sums)[members].sum(axis=0)
    most = max(np.abs(item).max() for item in wanted)
    for total, item in zip(np.split(totals, np.cumsum([item.size for item in wanted])[:-1]), wanted):
        near("gradient", total.reshape(item.shape), item, tolerance, axis=0, most=most)


def near(what, seen, expected, tolerance, axis=1, most=None) -> None:
    """In each channel; ``most`` is the size of what rounding errors are proportional to where the result is 0."""
    assert seen.shape == expected.shape, what
    others = tuple(place for place in range(seen.ndim) if place != axis)
    errors, sizes = np.abs(seen - expected).max(axis=others), np.abs(expected).max(axis=others)
    allowed = tolerance * (sizes + 1e-3 * (sizes.max() if most is None else most))
    assert (errors <= allowed).all(), f"{what}: wrong by {(errors / allowed).max():.2g} of what is allowed"
