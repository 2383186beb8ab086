"""Runs layers and nets over several CPU devices the way a Gluon user does, and compares them with the reference.

Here is all that the tests know of the inside of the package; they import `gluon_syncbn`, `reference` and this.
"""

import os
import re
import subprocess
import threading
from collections import namedtuple
from typing import Optional

import mxnet as mx
import numpy as np
import prepared
import reference
from mxnet import autograd, gluon
from mxnet.gluon import nn

import gluon_syncbn  # noqa: F401  (before MXNet computes anything)
from gluon_syncbn import SyncBatchNorm
from gluon_syncbn._hooks import extended
from gluon_syncbn.backends import choose, native
from gluon_syncbn.backends.bfloat16 import mxnet_takes_bfloat16
from gluon_syncbn.backends.portable import operator as portable
from gluon_syncbn.base import library
from gluon_syncbn.meeting import waiting
from gluon_syncbn.mxnet_engine import failures
from gluon_syncbn.mxnet_engine.cpu_resources import CPU_RESOURCES, may_have_gpus
from gluon_syncbn.step.abandon import failing_what_cannot_be_read

MODES = {
    "imperative": None,
    "hybridize": {},
    "static": {"static_alloc": True, "static_shape": True},
}
# Seconds after which a process of a test counts as hung. Limits are for hangs, not for slow machines: what ends by
# itself takes a tenth of this where two cores are idle. A timeout of LONG is never reached: who waits for it, hangs.
HANG, LONG = 600, 900
# MXNet keeps a thread for each callback of custom operators that was ever queued at once with others, and adds one when
# there is one more. How many depends on timing: at most as many as branches and devices allow, most of them at once.
# A thread left behind by each call, step or net would be 80 or more in every test that counts them.
LATE_THREADS = 8
# Seconds that devices on their way get when waits are cut short, in place of 2, for which many tests would sleep.
GRACE = 0.5
# What a program begins with, before it imports the package, to run as where nothing was compiled.
NOT_COMPILED = """
import pathlib
exists = pathlib.Path.exists
pathlib.Path.exists = lambda path: path.suffix != '.so' and exists(path)
"""
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def have_another_thread() -> None:
    """Have one that might call nets, as far as anybody knows.

    So a result that is read before all devices have been called is waited for, which most tests of waits begin with.
    (test_early_reading.py has what happens where there is no such thread.)
    """
    threading.Thread(target=threading.Event().wait, name="of a test", daemon=True).start()


have_another_thread()
os.register_at_fork(after_in_child=have_another_thread)  # of a process that is prepared

# Of a step: lists of arrays, one for each device, and two sums over devices.
Observed = namedtuple("Observed", "outputs input_gradients gamma_gradient beta_gradient")


def cpus(count: int) -> list:
    return [mx.cpu(i) for i in range(count)]


def set_mode(block, mode: str):
    if MODES[mode] is not None:
        block.hybridize(**MODES[mode])
    return block


def random_shards(shapes, dtype="float32", seed=0, mean=1.5, std=2.0) -> list:
    rng = np.random.RandomState(seed)
    return [(rng.standard_normal(shape) * std + mean).astype(dtype) for shape in shapes]


def shards_and_heads(shapes, dtype="float32", seed=0, **how) -> tuple:
    """What a step takes; ``how`` is that of the shards."""
    return random_shards(shapes, dtype, seed, **how), random_shards(shapes, dtype, seed + 100)


def random_affine(layer, channels: int, seed=1):
    """Give γ and β values that a mistake could not hide behind; returns them."""
    rng = np.random.RandomState(seed)
    gamma, beta = rng.uniform(0.5, 2, channels), rng.uniform(-1, 1, channels)
    layer.gamma.set_data(mx.nd.array(gamma, dtype=layer.gamma.dtype))
    layer.beta.set_data(mx.nd.array(beta, dtype=layer.beta.dtype))
    return [layer.gamma.data(layer.gamma.list_ctx()[0]).asnumpy(), layer.beta.data(layer.beta.list_ctx()[0]).asnumpy()]


def sequential(*blocks, prefix=None, kind=nn.HybridSequential):
    """A net of these blocks; what is none yet is called for one within the net's name scope."""
    net = kind(prefix=prefix)
    with net.name_scope():
        net.add(*[block if isinstance(block, gluon.Block) else block() for block in blocks])
    return net


def initialized(block, devices=1, mode="imperative", dtype=None, **how):
    """The block, cast if a dtype is given, with parameters on these devices or on so many CPU devices, in a mode."""
    if dtype is not None:
        block.cast(dtype)
    block.initialize(ctx=cpus(devices) if isinstance(devices, int) else devices, **how)
    return set_mode(block, mode)


def on_devices(arrays, devices=None, learn=False) -> list:
    """As MXNet's arrays, by default on as many CPU devices; ``learn``: with gradients."""
    places = devices or cpus(len(arrays))
    made = [mx.nd.array(array, ctx=device, dtype=array.dtype) for array, device in zip(arrays, places)]
    for item in made if learn else []:
        item.attach_grad()
    return made


def total(arrays) -> np.ndarray:
    """The sum of gradients over devices, in float64."""
    return sum(array.asnumpy().astype(np.float64) for array in arrays)


def step(block, shards, heads, devices, train_mode=True) -> list:
    """Forward and backward, by default in training mode; returns outputs and inputs, which have gradients."""
    inputs = on_devices(shards, devices, learn=True)
    with autograd.record(train_mode=train_mode):
        outputs = [block(item) for item in inputs]
    autograd.backward(outputs, on_devices(heads, devices), train_mode=train_mode)
    return outputs, inputs


def observe(block, shards, heads, devices, layer=None) -> Observed:
    """One training step; gradients of the layer's parameters are added over devices, as Trainer does."""
    outputs, inputs = step(block, shards, heads, devices)
    layer = layer or block
    return Observed(
        [item.asnumpy() for item in outputs],
        [item.grad.asnumpy() for item in inputs],
        *(total(vector.grad(device) for device in devices) for vector in (layer.gamma, layer.beta)),
    )


def precision(layer, is_plain=False) -> dict:
    """What `reference.check` allows it: units of rounding, and how often a tensor is rounded.

    The compiled kernels add up at most 128 values in the precision of the vectors, and those sums in float64; the
    portable back end and `nn.BatchNorm` all of them in the precision of the vectors, and gradients in parts.
    """
    is_native = not is_plain and layer.backend == "native"
    return {"units": 32} if is_native else {"units": 64, "roundings": 3}


def is_plain(layer, norm=None) -> bool:
    """Whether it computes as `nn.BatchNorm` does, by itself on each device."""
    options = layer._kwargs  # of `nn.BatchNorm`
    is_alone = len(layer.gamma.list_ctx()) == 1 or (norm is not None and norm.group_size == 1)
    is_renormalized = norm is not None and norm.renorm is not None
    is_plain_class = not isinstance(layer, SyncBatchNorm)
    return is_plain_class or options["use_global_stats"] or (is_alone and not is_renormalized)


def reference_of(layer, **options) -> reference.Norm:
    """The reference of a layer that has parameters: with its numbers, and what it is given of `reference.Norm`."""
    gamma, beta, mean, var = (
        getattr(layer, name).data(layer.gamma.list_ctx()[0]).asnumpy()
        for name in ("gamma", "beta", "running_mean", "running_var")
    )
    told = layer._kwargs
    own = {"axis": told["axis"], "epsilon": told["eps"], "momentum": told["momentum"], "scale": not told["fix_gamma"]}
    norm = reference.Norm(gamma, beta, **{**own, **options})
    # To float64 there is nothing wider.
    norm.mean_is_rounded = gamma.dtype == np.float64 or is_plain(layer, norm) or layer.backend == "portable"
    for device in range(len(layer.gamma.list_ctx())):
        norm.set_running(mean, var, device)
    return norm


def check_step(
    block,
    norm,
    shards,
    heads,
    devices=None,
    *,
    layer=None,
    used=None,
    times=1,
    train_mode=True,
    running=True,
    dtype=None,
    take_step=step,
) -> list:
    """One training step of ``block``, compared with its reference: outputs, gradients and running statistics.

    ``layer``: the one whose parameters they are, by default the block itself. ``used``: the numbers of the devices, for
    the reference. ``times``: how many such gradients have been added up. ``running``: compare the statistics now.
    ``dtype``: in which the block computes, by default that of the shards. ``take_step``: in place of `step`.
    Returns what was seen, for all that is exact.
    """
    layer, devices = layer or block, devices or cpus(len(shards))
    how = precision(layer, is_plain(layer, norm) or norm.frozen or not train_mode)
    dtype = dtype or str(shards[0].dtype)
    outputs, inputs = take_step(block, shards, heads, devices, train_mode)
    seen, gradients = [item.asnumpy() for item in outputs], [item.grad.asnumpy() for item in inputs]
    assert [item.dtype for item in outputs] == [item.dtype for item in shards]
    expected = norm.step(shards, heads, used=used, seen=seen if norm.activation else None)
    reference.check_tensors(seen, gradients, expected, dtype, axis=norm.axis, **how)
    gradients += check_affine(layer, devices, expected, vector_dtype(dtype), times, **of_vectors(how, dtype, times))
    return [*seen, *gradients, *(check_running(layer, norm, dtype) if running else [])]


def check_steps(block, norm, draw, count=2, **how) -> None:
    """`check_step` so many times, with the shards and heads of ``draw(seed)``."""
    for seed in range(count):
        check_step(block, norm, *draw(seed), **how)


def check_affine(layer, devices, expected, dtype="float32", times=1, **how) -> list:
    """Gradients of γ and β that are learned, added up over devices, and over so many ``times``; returns them."""
    found = []
    for name in ("gamma", "beta"):
        parameter, wanted = getattr(layer, name), getattr(expected, f"{name}_gradient")
        if parameter.grad_req != "null":
            found.append(total(parameter.grad(device) for device in devices))
            wanted = reference.Sized(times * wanted.value, times * wanted.size)
            reference.check(f"gradient of {name}", found[-1], wanted, dtype, **how)
    return found


def of_vectors(how: dict, dtype: str, times=1) -> dict:
    """What `reference.check` allows gradients of γ and β, if it allows tensors of ``dtype`` what `precision` says."""
    if "roundings" in how and dtype == "float16":  # `nn.BatchNorm` multiplies with an x̂ of float16
        return {"units": times, "real": dtype}
    return {"units": times * how["units"]}


def vector_dtype(dtype: str) -> str:
    """The dtype of γ, β and statistics where tensors have ``dtype``."""
    return "float64" if dtype == "float64" else "float32"


def check_running(layer, norm, dtype="float32", first=0, units=None) -> list:
    """Running statistics on all devices of a layer are those of its reference, where the first has this number."""
    plain = is_plain(layer, norm)
    how = {"dtype": vector_dtype(dtype), "units": units or precision(layer, plain)["units"]}
    if plain:
        mx.nd.waitall()  # it may write them in the backward pass, untold to the engine
        how["real"] = "float16" if dtype == "float16" else "float32"  # as it does
    found = []
    for number, device in enumerate(layer.running_mean.list_ctx(), start=first):
        for name, wanted in zip(("running_mean", "running_var"), norm.running(number)):
            found.append(getattr(layer, name).data(device).asnumpy())
            reference.check(f"{name} on {device}", found[-1], wanted, **how)
    return found


def module_of(symbol, devices, shape, optimizer=None, for_training=True, **labels) -> mx.mod.Module:
    """A Module that is ready to train, with the shape of its data, and those of its labels by name."""
    module = mx.mod.Module(symbol, label_names=list(labels), context=devices)
    module.bind([("data", shape)], list(labels.items()) or None, for_training)
    module.init_params(mx.init.Xavier())
    if for_training:
        module.init_optimizer(**(optimizer or {}))
    return module


def options_of(layer) -> dict:
    """All options of a layer, as they are."""
    return layer._sync.options.options()


def layers_of(block) -> list:
    """The layers that stand for nodes of a SymbolBlock's symbol."""
    return block.layers_of_nodes()


def has_failed() -> bool:
    """Whether the package knows that a step has failed, without reading anything, by which MXNet forgets errors."""
    return bool(failures.failure())


def number_of_groups() -> int:
    """Layers that the compiled core knows; an entry goes when it frees the layer's group."""
    return len(native.groups.compiled)


def play_not_compiled(monkeypatch, reason="no compiler") -> None:
    """As where nothing was compiled, for layers that are made from now on."""
    monkeypatch.setattr(native, "UNAVAILABLE_REASON", reason)


def instruction_set() -> str:
    """Of the compiled kernels."""
    return native.instruction_set()


def takes_bfloat16() -> bool:
    """Whether MXNet's own BatchNorm does, on this processor."""
    return mxnet_takes_bfloat16()


def guarded(read):
    """``read`` of an array, guarded as the package guards ``asnumpy``."""
    return extended(read, failing_what_cannot_be_read)


def play_gpus(monkeypatch) -> None:
    """The portable back end takes the operators, and the way for vectors, that it takes on GPUs; none needs one."""
    monkeypatch.setattr(portable, "_is_gpu", lambda device: True)


def note_what_runs(monkeypatch) -> list:
    """The operators of each graph that MXNet makes to run for a net from now on."""
    found, make = [], mx.nd.CachedOp

    def noting(symbol, flags=()):
        found.append(set(re.findall(r'"op": "(\w+)"', symbol.tojson())))
        return make(symbol, flags)

    monkeypatch.setattr(mx.nd, "CachedOp", noting)
    return found


def forget_choices() -> None:
    """What was said of back ends is said again."""
    choose._say.cache_clear()


def shorten_grace(seconds: float = GRACE) -> None:
    """Of all waits in this process."""
    waiting.GRACE_SECONDS = seconds
    if library.core is not None:
        library.core.gluon_syncbn_set_waiting_times(seconds, 0.05)


def lean_environment() -> dict:
    """For processes that need nothing of MXNet's that takes long to import (tests/lean); there are hundreds of them.

    So one writes the bytecode of the package for all, also where the environment would have it made anew by each.
    """
    folders = [os.path.join(ROOT, "tests", "lean"), ROOT, os.path.join(ROOT, "tests")]
    chosen = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    chosen.pop("PYTHONDONTWRITEBYTECODE", None)
    return chosen


def run_program(arguments, merged=False, limit=HANG, status=0, **environment) -> subprocess.CompletedProcess:
    """Run a script in a process of its own with a hard limit of seconds, so that a hang is a failed test.

    ``merged``: what it says on its standard error is in ``stdout``. ``status``: with which it must end, or None.
    """
    env = {**lean_environment(), **{name: str(value) for name, value in environment.items()}}
    return _run([str(word) for word in arguments], env, limit, merged, status)


def run_python(code: str, status=0, **environment) -> subprocess.CompletedProcess:
    """Run ``code`` in a process of its own, as `run_program` does, with our defaults for MXNet's engine."""
    variables = lean_environment()
    if "examples" in code:  # they draw scikit-learn's digits
        variables["PYTHONPATH"] = variables["PYTHONPATH"].split(os.pathsep, 1)[1]
    for name in CPU_RESOURCES:
        variables.pop(name, None)
    variables.update({name: str(value) for name, value in environment.items()})
    return _run(["-c", code], variables, HANG, False, status)


def _run(arguments, env, limit, merged, status) -> subprocess.CompletedProcess:
    done = prepared.run(arguments, ROOT, env, limit, _usual_environment(), merged)
    if status is not None and done.returncode != status:
        words = " ".join(arguments if arguments[0] != "-c" else ["the program"])
        said = done.stdout[-6000:], (done.stderr or "")[-3000:]
        raise AssertionError("\n".join([f"{words} ended with {done.returncode}:", *said]))
    return done


def _usual_environment() -> Optional[dict]:
    """Of processes that may be forked; none where there are GPUs, since a fork cannot use CUDA after its parent."""
    return None if may_have_gpus() else lean_environment()
