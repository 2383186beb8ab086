"""bfloat16 input where MXNet's own BatchNorm cannot take it.

On a CPU that operator is oneDNN's, which has bfloat16 kernels for AVX-512 and newer alone; on other processors it ends
in "could not create a primitive descriptor iterator". There, every layer that is `nn.BatchNorm` itself computes in
float32 between two casts instead, which rounds once at the end, as oneDNN's kernels do. The compiled operator takes
bfloat16 on any processor; the portable back end refuses it there.

In a graph the dtype of x is inferred from the graph and from the inputs that it is traced with. A user's symbol has no
such inputs; where nothing in it names bfloat16 either, it is left to MXNet.
"""

import functools
from typing import Any, Callable, Dict, Tuple

import mxnet as mx
import numpy as np
from mxnet import autograd

from gluon_syncbn.base.library import LIBMXNET

# MXNet's stand-in for a type that NumPy does not have.
BFLOAT16 = np.dtype([("bfloat16", np.uint16)])


@functools.lru_cache(maxsize=None)
def mxnet_takes_bfloat16() -> bool:
    """Whether MXNet's BatchNorm takes bfloat16 on this CPU; the first call tries it."""
    try:
        with autograd.pause(), mx.cpu(0):
            x, vector = mx.nd.zeros((1, 1, 1, 1)), mx.nd.ones(1)
            x = mx.nd.cast(x, dtype=BFLOAT16)  # an error in MXNet 1.6, which does not know it
            out = mx.nd.BatchNorm(x, vector, vector, vector, vector)
    except mx.MXNetError:
        return False
    # Not by wait_to_read: an array that cannot be read there fails the step, and this is no array of a step.
    return LIBMXNET.MXNDArrayWaitToRead(out.handle) == 0


def widened(x: mx.nd.NDArray) -> Tuple[mx.nd.NDArray, Callable]:
    """The input of MXNet's BatchNorm in place of ``x``, and a function for its result. Both change nothing, unless
    ``x`` is bfloat16 and MXNet cannot take it.
    """
    if not is_bfloat16(x.dtype) or mxnet_takes_bfloat16():
        return x, lambda out: out
    # Not cast, which truncates, and so do the gradients that come back through it.
    return mx.nd.amp_cast(x, dtype="float32"), lambda out: mx.nd.amp_cast(out, dtype=BFLOAT16)


def inferred_dtypes(sym: mx.sym.Symbol, inputs: Dict[str, Any]) -> Dict[str, Any]:
    """The dtypes of all outputs of nodes in ``sym``, by the names of ``sym.get_internals().list_outputs()``.

    They are None where they are not known, or there is no bfloat16 at all. ``inputs`` has the known dtypes of variables
    by name.
    """
    names = sym.get_internals().list_outputs()
    unknown = dict.fromkeys(names)
    # Inference asks every portable layer of the graph, which takes time.
    if not any(map(is_bfloat16, inputs.values())) and "bfloat16" not in sym.debug_str():
        return unknown
    typed = {name: _variable(name, dtype) for name, dtype in inputs.items() if name in sym.list_inputs()}
    try:
        if sym.get_children() is None:  # a variable itself
            sym = typed.get(sym.name, sym)
        elif typed:
            sym = sym(**typed)
        dtypes = sym.get_internals().infer_type_partial()[1]
    except mx.MXNetError:  # such a graph cannot run, and MXNet will say why
        return unknown
    return dict(zip(names, dtypes))


def _variable(name: str, dtype) -> mx.sym.Symbol:
    """A variable that knows its dtype; infer_type would not accept bfloat16 for an input."""
    return mx.sym.var(name, attr={"__dtype__": "12"}) if is_bfloat16(dtype) else mx.sym.var(name, dtype=dtype)


def is_bfloat16(dtype) -> bool:
    return dtype is not None and np.dtype(dtype) == BFLOAT16


def dtype_name(dtype) -> str:
    """MXNet's name of a dtype. For bfloat16, which NumPy does not have, MXNet uses a structure of that name."""
    dtype = np.dtype(dtype)
    return dtype.name if dtype.names is None else dtype.names[0]
