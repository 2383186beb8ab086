"""Symbols on executors, one for each device as a Module has them, and nets of several layers, made of symbols.

One node is compared with the reference, a net with MXNet's own operators on one device and the concatenated batch.
"""

import mxnet as mx
import numpy as np
from reference import Norm, Sized, check, check_tensors
from testing import cpus, on_devices, step, total

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
    for executor, head in zip(executors, on_devices(heads or [])):
        executor.backward([head], is_train=is_train)
    return [[item.asnumpy() for item in executor.outputs] for executor in executors]


def check_executors(executors, norm, shards, heads, prefix="bn", *, is_train=True) -> None:
    """One step of a symbol with one synchronized node."""
    seen = [outputs[0] for outputs in run(executors, shards, heads, is_train)]
    expected = norm.step(shards, heads, training=is_train, seen=seen if norm.activation else None)
    how = {"units": 64, "roundings": 3} if norm.mean_is_rounded or not is_train else {"units": 16}
    dtype = str(shards[0].dtype)
    gradients = [executor.grad_dict["data"].asnumpy() for executor in executors]
    check_tensors(seen, gradients, expected, dtype, axis=norm.axis, **how)
    check_vectors(executors, norm, expected, prefix, "float64" if dtype == "float64" else "float32", how["units"])


def check_vectors(executors, norm, expected, prefix, dtype="float32", units=16) -> None:
    """Gradients of γ and β, added over the devices, and the statistics of each."""
    mx.nd.waitall()  # `BatchNorm` may write statistics in the backward pass, untold to the engine
    names = vectors_of({**executors[0].arg_dict, **executors[0].aux_dict}, prefix)
    for role, wanted in (("gamma", expected.gamma_gradient), ("beta", expected.beta_gradient)):
        if role == "beta" or norm.scale:
            seen = total(item.grad_dict[names[role]] for item in executors)
            check(f"gradient of {role}", seen, wanted, dtype, units=units)
    for number, executor in enumerate(executors):
        for role, wanted in zip(("mean", "var"), norm.running(number)):
            what = f"running {role} on device {number}"
            check(what, executor.aux_dict[names[role]].asnumpy(), wanted, dtype, units=units, real="float32")


def train_block(block, count, draw, steps=3) -> dict:
    """Results of the last of some steps of a Gluon block, by name: on so many devices, with the same batch.

    ``draw(seed)``: shards and heads for several. Statistics must be the same on all devices.
    """
    for seed in range(steps):
        data = draw(seed) if count > 1 else [[np.concatenate(items)] for items in draw(seed)]
        outputs, inputs = step(block, *data, cpus(count))
        mx.nd.waitall()
    tensors = {"output": outputs, "dx": [item.grad for item in inputs]}
    found = {name: np.concatenate([item.asnumpy() for item in items]) for name, items in tensors.items()}
    for name, parameter in block.collect_params().items():
        if parameter.grad_req != "null":
            found[name] = total(parameter.list_grad())
        elif name.endswith(("mean", "var")):
            found[name], *others = (item.asnumpy() for item in parameter.list_data())
            assert all((item == found[name]).all() for item in others), name
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
