"""Runs layers and nets over several CPU devices the way a Gluon user does."""

import os
import subprocess
from typing import NamedTuple, Optional

import mxnet as mx
import numpy as np
import prepared
from mxnet import autograd

import gluon_syncbn  # noqa: F401  (before MXNet computes anything)
from gluon_syncbn.base import library
from gluon_syncbn.meeting import waiting
from gluon_syncbn.mxnet_engine.cpu_resources import CPU_RESOURCES, may_have_gpus

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
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class Observed(NamedTuple):
    outputs: list
    input_gradients: list
    gamma_gradient: np.ndarray
    beta_gradient: np.ndarray


def cpus(count: int) -> list:
    return [mx.cpu(i) for i in range(count)]


def set_mode(block, mode: str):
    if MODES[mode] is not None:
        block.hybridize(**MODES[mode])
    return block


def random_shards(shapes, dtype="float32", seed=0, mean=1.5, std=2.0) -> list:
    rng = np.random.RandomState(seed)
    return [(rng.standard_normal(shape) * std + mean).astype(dtype) for shape in shapes]


def random_affine(layer, channels: int, seed=1):
    """Give γ and β values that a mistake could not hide behind; returns them."""
    rng = np.random.RandomState(seed)
    gamma, beta = rng.uniform(0.5, 2, channels), rng.uniform(-1, 1, channels)
    layer.gamma.set_data(mx.nd.array(gamma, dtype=layer.gamma.dtype))
    layer.beta.set_data(mx.nd.array(beta, dtype=layer.beta.dtype))
    return [layer.gamma.data(layer.gamma.list_ctx()[0]).asnumpy(), layer.beta.data(layer.beta.list_ctx()[0]).asnumpy()]


def step(block, shards, heads, devices) -> list:
    """Forward and backward in training mode; returns outputs and inputs as NDArrays, inputs with gradients."""
    inputs = [mx.nd.array(shard, ctx=device, dtype=shard.dtype) for shard, device in zip(shards, devices)]
    for item in inputs:
        item.attach_grad()
    with autograd.record():
        outputs = [block(item) for item in inputs]
    autograd.backward(
        outputs, [mx.nd.array(head, ctx=device, dtype=head.dtype) for head, device in zip(heads, devices)]
    )
    return outputs, inputs


def observe(layer, shards, heads, devices) -> Observed:
    """One training step of one layer; parameter gradients are added over devices, as Trainer does."""
    outputs, inputs = step(layer, shards, heads, devices)
    return Observed(
        [item.asnumpy() for item in outputs],
        [item.grad.asnumpy() for item in inputs],
        sum(layer.gamma.grad(device).asnumpy().astype(np.float64) for device in devices),
        sum(layer.beta.grad(device).asnumpy().astype(np.float64) for device in devices),
    )


def shorten_grace(seconds: float = GRACE) -> None:
    """Of all waits in this process."""
    waiting.GRACE_SECONDS = seconds
    if library.core is not None:
        library.core.gluon_syncbn_set_waiting_times(seconds, 0.05)


def lean_environment() -> dict:
    """For processes that need neither scikit-learn nor ONNX.

    MXNet imports them where they are, which takes a third of its start, and there are hundreds of processes.
    """
    folders = [os.path.join(ROOT, "tests", "lean"), ROOT, os.path.join(ROOT, "tests")]
    return {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(folders)}


def run_program(arguments, merged=False, limit=HANG, **environment) -> subprocess.CompletedProcess:
    """Run a script in a process of its own with a hard limit of seconds, so that a hang is a failed test.

    ``merged``: what it says on its standard error is in ``stdout``.
    """
    env = {**lean_environment(), **{name: str(value) for name, value in environment.items()}}
    return prepared.run([str(word) for word in arguments], ROOT, env, limit, _usual_environment(), merged)


def run_python(code: str, **environment) -> subprocess.CompletedProcess:
    """Run ``code`` in a process of its own with a hard limit, with our defaults for MXNet's engine."""
    variables = lean_environment()
    if "examples" in code:  # they draw scikit-learn's digits
        variables["PYTHONPATH"] = variables["PYTHONPATH"].split(os.pathsep, 1)[1]
    for name in CPU_RESOURCES:
        variables.pop(name, None)
    variables.update({name: str(value) for name, value in environment.items()})
    return prepared.run(["-c", code], ROOT, variables, HANG, _usual_environment(), False)


def _usual_environment() -> Optional[dict]:
    """Of processes that may be forked; none where there are GPUs, since a fork cannot use CUDA after its parent."""
    return None if may_have_gpus() else lean_environment()
