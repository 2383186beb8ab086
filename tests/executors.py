"""Symbols on executors, one for each device as a Module has them, and nets of several layers, made of symbols.

One node is compared with the reference, a net with MXNet's own operators on one device and the concatenated batch.
"""

import mxnet as mx
import numpy as np
from reference import Norm, Sized, check, check_all
from testing import cpus, step

ROLES = {"gamma": "arg_dict", "beta": "arg_dict", "mean": "aux_dict", "var": "aux_dict"}


def norm_of(channels, backend="native", seed=1, **options) -> Norm:
    """A reference with γ, β and statistics that differ between channels."""
    rng = np.random.RandomState(seed)
    gamma, beta, mean = rng.uniform(0.5, 2, channels), rng.uniform(-1, 1, channels), rng.uniform(-1, 1, channels)
    vectors = [vector.astype("float32") for vector in (gamma, beta, mean, rng.uniform(1, 3, channels))]
    norm = Norm(*vectors[:2], **{"epsilon": 1e-3, "mean_is_rounded": backend != "native", **options})
    for device in range(16):
        norm.set_running(*vectors[2:], device)
    return norm


def vectors_of(names, prefix) -> dict:
    """The names of a node's vectors, by role: they end in ``moving_mean``, or ``running_mean`` as a layer's do."""
    return {role: name for role in ROLES for name in names if name.startswith(prefix) and name.endswith(role)}


def bind(sym, shards, norms) -> list:
    """Executors with the numbers of references, by the names of the nodes."""
    made = []
    for number, (shard, device) in enumerate(zip(shards, cpus(len(shards)))):
        executor = sym.simple_bind(device, data=shard.shape, type_dict={"data": shard.dtype})
        for prefix, norm in norms.items():
            values = dict(zip(ROLES, [norm.gamma, norm.beta, *(item.value for item in norm.running(number))]))
            for role, name in vectors_of({**executor.arg_dict, **executor.aux_dict}, prefix).items():
                getattr(executor, ROLES[role])[name][:] = mx.nd.array(values[role], dtype="float64")
        made.append(executor)
    return made


def run(executors, shards, heads=None, is_train=True) -> list:
    """Forward, and backward if there are heads; returns the outputs of each device."""
    arrays = [mx.nd.array(shard, dtype=shard.dtype) for shard in shards]
    for executor, data in zip(executors, arrays):
        executor.forward(is_train=is_train, data=data)
    for executor, head, device in zip(executors, heads or [], cpus(len(executors))):
        executor.backward([mx.nd.array(head, ctx=device, dtype=head.dtype)], is_train=is_train)
    return [[item.asnumpy() for item in executor.outputs] for executor in executors]


def check_executors(executors, norm, shards, heads, prefix="bn", *, is_train=True) -> None:
    """One step of a symbol with one synchronized node."""
    seen = [outputs[0] for outputs in run(executors, shards, heads, is_train)]
    expected = norm.step(shards, heads, training=is_train, seen=seen if norm.activation else None)
    how = {"units": 64, "roundings": 3} if norm.mean_is_rounded or not is_train else {"units": 16}
    dtype, axis = str(shards[0].dtype), norm.axis
    check_all("output", seen, expected.outputs, dtype, axis=axis, **how)
    gradients = [executor.grad_dict["data"].asnumpy() for executor in executors]
    check_all("input gradient", gradients, expected.input_gradients, dtype, axis=axis, **how)
    check_vectors(executors, norm, expected, prefix, "float64" if dtype == "float64" else "float32", how["units"])


def check_vectors(executors, norm, expected, prefix, dtype="float32", units=16) -> None:
    """Gradients of γ and β, added over the devices, and the statistics of each."""
    mx.nd.waitall()  # `BatchNorm` may write statistics in the backward pass, untold to the engine
    names = vectors_of({**executors[0].arg_dict, **executors[0].aux_dict}, prefix)
    for role, wanted in (("gamma", expected.gamma_gradient), ("beta", expected.beta_gradient)):
        if role == "beta" or norm.scale:
            total = sum(item.grad_dict[names[role]].asnumpy().astype("float64") for item in executors)
            check(f"gradient of {role}", total, wanted, dtype, units=units)
    for number, executor in enumerate(executors):
        for role, wanted in zip(("mean", "var"), norm.running(number)):
            what = f"running {role} on device {number}"
            check(what, executor.aux_dict[names[role]].asnumpy(), wanted, dtype, units=units, real="float32")


def data_of(draw, seed, count):
    """Shards and heads of a step for so many devices: the same batch. ``draw(seed)`` has those for several."""
    shards, heads = draw(seed)
    return (shards, heads) if count > 1 else ([np.concatenate(shards)], [np.concatenate(heads)])


def train_executors(symbol, count, draw, values, steps=3) -> dict:
    """Results of the last of some steps, by name: ``values`` are the parameters at first."""
    executors = None
    for seed in range(steps):
        shards, heads = data_of(draw, seed, count)
        executors = executors or bind(symbol, shards, {})
        for executor in executors if seed == 0 else []:
            for name, value in values.items():
                {**executor.arg_dict, **executor.aux_dict}[name][:] = mx.nd.array(value)
        outputs = [items[0] for items in run(executors, shards, heads)]
        mx.nd.waitall()
    return results_of(outputs, [dict(item.grad_dict) for item in executors], [item.aux_dict for item in executors])


def train_block(block, count, draw, steps=3) -> dict:
    """The same of a Gluon block, which has its parameters."""
    for seed in range(steps):
        outputs, inputs = step(block, *data_of(draw, seed, count), cpus(count))
        mx.nd.waitall()
    parameters, trained, states = block.collect_params().items(), [], []
    for device, x in zip(cpus(count), inputs):
        trained.append({name: item.grad(device) for name, item in parameters if item.grad_req != "null"})
        trained[-1]["data"] = x.grad
        states.append({name: item.data(device) for name, item in parameters if item.grad_req == "null"})
    return results_of([item.asnumpy() for item in outputs], trained, states)


def results_of(outputs, gradients, states) -> dict:
    """Gradients are added over the devices, and the states must be the same on all."""
    found = {"output": np.concatenate(outputs)}
    found["dx"] = np.concatenate([item.pop("data").asnumpy() for item in gradients])
    found.update({name: sum(item[name].asnumpy() for item in gradients) for name in gradients[0]})
    for name, first in states[0].items():
        if name.endswith(("mean", "var")):
            found[name] = first.asnumpy()
            assert all((item[name].asnumpy() == found[name]).all() for item in states), name
    return found


def check_net(seen, expected, dtype="float64", units=1e7) -> None:
    """In float64, to more digits than float32 has, in every channel."""
    for name, value in expected.items():
        axis = 1 if value.ndim > 1 and "weight" not in name else 0
        size = np.abs(np.moveaxis(value, axis, -1).reshape(-1, value.shape[axis])).max(0)
        if name in seen:
            wanted = Sized(value, np.maximum(size, 0.1 * max(size.max(), 0.1)))
            check(name, seen[name], wanted, dtype, axis=axis, units=units)
    assert expected.keys() - seen.keys() <= {name for name in expected if "gamma" in name}  # fixed ones have none
