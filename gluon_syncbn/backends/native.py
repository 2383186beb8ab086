"""The native back end: one compiled operator for moments, rendezvous, normalization and the whole backward pass.

The operator lives in ``csrc/`` and is built into a shared library that uses no Python ABI and does not link to MXNet:
Python hands it the addresses of the few C functions that it calls. MXNet sees a custom operator whose callbacks happen
to be compiled, so no Python runs in a training step.

On a GPU the same operator calls the kernels of ``csrc/kernels.cu``, which MXNet's run-time compiler makes: no CUDA
toolkit is needed, at no time.

On CPU an operator stands before it and one behind it in a graph, both because of MXNet. A custom operator runs
asynchronously, and where an input is in a layout of oneDNN's (the output of a convolution, or its gradient), MXNet
converts it into a copy that can die before the operator has read it: rare crashes and wrong numbers. Hence what enters
on the way forward (``x``) and on the way back (the gradient of ``out``) first passes an operator that leaves a dense
array of its own.

In a graph with ``static_alloc`` and ``static_shape`` MXNet keeps those copies, except next to an input or output of the
graph. There ``reshape`` makes x dense in one pass, and ``identity`` costs nothing but keeps the operator away from the
graph's outputs. Everywhere else it is a slice of the whole. It costs one more pass, and never works in place: operators
that do (a product with 1, a cast to the same type) left garbage in hybridized graphs without ``static_alloc``.

Arrays on GPUs are always dense. Imperative calls there have nothing around the operator, and graphs of GPUs alone the
pair that costs nothing.
"""

import ctypes
import functools
import os
import weakref
from pathlib import Path
from typing import Dict, List, Optional, Sequence, Union

import mxnet as mx
import numpy as np
from mxnet.base import _LIB

from gluon_syncbn.meeting import waiting
from gluon_syncbn.meeting.group import Description, Options, next_number, usual_reasons

_OPERATOR = "gluon_syncbn_native"
_PACKAGE = Path(__file__).parents[1]
LIBRARY = _PACKAGE / "libgluon_syncbn.so"
_GPU_KERNELS = _PACKAGE / "csrc" / "cuda" / "kernels.cu"
_DTYPE_FLAGS = {"float32": 0, "float64": 1}
_MAX_CPU_ISA = "GLUON_SYNCBN_MAX_CPU_ISA"  # csrc/kernels.h


# As in csrc/mxnet_c_api.h.
_MXNET_FUNCTIONS = [
    "MXCustomOpRegister",
    "MXNDArrayGetData",
    "MXNDArrayFree",
    "MXGetLastError",
    "MXNDArrayCreateEx",
    "MXNDArrayWaitToRead",
    "MXNDArraySyncCopyFromCPU",
    "MXRtcCudaModuleCreate",
    "MXRtcCudaKernelCreate",
    "MXRtcCudaKernelCall",
]


class _MXNetFunctions(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in _MXNET_FUNCTIONS]


def _load() -> ctypes.CDLL:
    """The library, with its operator registered.

    Raises
    ------
    OSError
        The library is not there or cannot be loaded.
    RuntimeError
        MXNet has refused the operator.
    """
    if not LIBRARY.exists():
        raise OSError("it was not compiled when the package was installed (pip install needs a C++17 compiler)")
    library = ctypes.CDLL(str(LIBRARY))
    library.gluon_syncbn_instruction_set.restype = ctypes.c_char_p
    library.gluon_syncbn_make_group.argtypes = [
        ctypes.c_int64,
        ctypes.c_char_p,
        ctypes.POINTER(ctypes.c_char_p),
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_double,
        ctypes.c_double,
        ctypes.c_double,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_char_p,
    ]
    library.gluon_syncbn_make_group.restype = None
    library.gluon_syncbn_drop_group.argtypes = [ctypes.c_int64]
    library.gluon_syncbn_drop_group.restype = None
    library.gluon_syncbn_count_groups.argtypes = []
    library.gluon_syncbn_count_groups.restype = ctypes.c_int64
    library.gluon_syncbn_rounds.argtypes = [ctypes.c_int64, ctypes.c_int64]
    library.gluon_syncbn_rounds.restype = ctypes.c_int64
    library.gluon_syncbn_take_part.argtypes = [ctypes.c_int64, ctypes.POINTER(ctypes.c_char_p), ctypes.c_int]
    library.gluon_syncbn_take_part.restype = None
    library.gluon_syncbn_leave_error.argtypes = [ctypes.c_char_p]
    library.gluon_syncbn_stop_calling_python.argtypes = []
    library.gluon_syncbn_stop_calling_python.restype = None
    library.gluon_syncbn_wrap_python_operator.argtypes = [
        ctypes.POINTER(_MXNetFunctions),
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.c_void_p,
    ]
    library.gluon_syncbn_check_gpu.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int64]
    kernels = _GPU_KERNELS.read_bytes()
    if library.gluon_syncbn_register(ctypes.byref(_mxnet_functions()), _make_described_group, kernels) != 0:
        raise RuntimeError("MXNet refused to register the operator")
    waiting.connect(library)
    return library


@ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_char_p)
def _make_described_group(reference: bytes) -> int:
    """Called by the operator, on the thread that makes or loads a symbol."""
    try:
        described = Description.parse(reference.decode())
        number = next_number()
        _make_group(
            number,
            described.name,
            None,
            described.num_devices,
            described.options(),
            described.dtype,
            described.momentum,
            described.epsilon,
            described.scale,
        )
        return number
    except Exception as problem:
        leave_error(str(problem))
        return -1


def _make_group(
    number: int,
    name: str,
    devices: Optional[Sequence[mx.Context]],
    size: int,
    options: Options,
    dtype: str,
    momentum: float,
    epsilon: float,
    scale: bool,
) -> None:
    """Have the operator make a group; without ``devices`` it is open to any ``size``."""
    names = None if devices is None else (ctypes.c_char_p * size)(*(str(device).encode() for device in devices))
    _library.gluon_syncbn_make_group(
        number,
        name.encode(),
        names,
        size,
        options.group_size or size,
        options.seconds(),
        momentum,
        epsilon,
        scale,
        _DTYPE_FLAGS[np.dtype(dtype).name],
        usual_reasons().encode(),
    )


def _mxnet_functions() -> _MXNetFunctions:
    return _MXNetFunctions(*(ctypes.cast(getattr(_LIB, name), ctypes.c_void_p).value for name in _MXNET_FUNCTIONS))


try:
    _library: Optional[ctypes.CDLL] = _load()
    why_missing = ""
except (OSError, RuntimeError) as problem:
    _library = None
    why_missing = str(problem)


def instruction_set() -> str:
    """What the kernels run on: 'avx512', 'avx2' or 'baseline'; 'not compiled' without the library.

    The environment variable ``GLUON_SYNCBN_MAX_CPU_ISA`` holds them to one that is older than the processor's best.

    Raises
    ------
    ValueError
        The variable is none of the three.
    """
    if _library is None:
        return "not compiled"
    chosen = _library.gluon_syncbn_instruction_set()
    if chosen is None:
        value = os.environ.get(_MAX_CPU_ISA)
        raise ValueError(f"{_MAX_CPU_ISA} must be baseline, avx2 or avx512, not {value!r}.")
    return chosen.decode()


@functools.lru_cache(maxsize=None)
def why_not_on_gpu(device: int) -> str:
    """Why the kernels cannot run on ``mx.gpu(device)``; empty if they can. The first call compiles and tries them."""
    error = ctypes.create_string_buffer(1 << 16)
    return error.value.decode() if _library.gluon_syncbn_check_gpu(device, error, len(error)) else ""


def take_part(number: int, devices: Sequence[str]) -> None:
    """Put list ``number`` of `meeting.active_set`, of these devices, in force. No operator may be running."""
    if _library is not None:
        names = (ctypes.c_char_p * len(devices))(*(device.encode() for device in devices))
        _library.gluon_syncbn_take_part(number, names, len(devices))


def wrap(operator: str) -> str:
    """Register the Python custom operator ``operator``, the last one registered, with what MXNet's wrapping lacks.

    That is errors that keep their text, and clean exits: see csrc/python_operator.cpp. Returns the name of the wrapped
    operator; where nothing is compiled, ``operator`` itself, whose errors are only printed.
    """
    if _library is None:
        return operator
    # MXNet keeps what makes the operator alive in this table and gives no other access to it.
    creators = mx.operator._registry.ref_holder
    creator = ctypes.cast(creators[max(creators)], ctypes.c_void_p)
    name = operator + "_wrapped"
    code = _library.gluon_syncbn_wrap_python_operator(
        ctypes.byref(_mxnet_functions()), name.encode(), operator.encode(), creator
    )
    return name if code == 0 else operator


def leave_error(text: str) -> bool:
    """The text of the error in which the callback that runs on this thread ends; whether it does without raising it."""
    return _library is not None and bool(_library.gluon_syncbn_leave_error(text.encode()))


def empty_operator() -> Optional[ctypes.c_void_p]:
    """The address of a function that MXNet's engine may run as an operator that does nothing; None if not compiled."""
    return None if _library is None else ctypes.cast(_library.gluon_syncbn_empty_operator, ctypes.c_void_p)


def stop_calling_python() -> None:
    """Before the interpreter ends: MXNet's threads are not to call wrapped operators any more."""
    if _library is not None:
        _library.gluon_syncbn_stop_calling_python()


def count_groups() -> int:
    """How many groups the compiled operator holds now."""
    return _library.gluon_syncbn_count_groups()


class NativeGroup:
    """The synchronization of one layer over its devices, held by the compiled operator.

    Parameters are those of `gluon_syncbn.meeting.group.Group`; ``options.kvstore`` is not used.
    """

    def __init__(
        self,
        name: str,
        devices: Sequence[mx.Context],
        options: Options,
        dtype: str,
        momentum: float,
        epsilon: float,
        scale: bool,
    ):
        self.devices: List[mx.Context] = list(devices)
        self.dtype = dtype
        self.number = next_number()
        size = len(self.devices)
        _make_group(self.number, name, self.devices, size, options, dtype, momentum, epsilon, scale)
        weakref.finalize(self, _library.gluon_syncbn_drop_group, self.number).atexit = False

    @property
    def reference(self) -> str:
        """The text by which a graph names this group."""
        return str(self.number)

    def rounds(self, participants: int) -> int:
        """How many forward passes were met by exactly these participants."""
        return _library.gluon_syncbn_rounds(self.number, participants)


def normalize(
    F,
    x,
    gamma,
    beta,
    running_mean,
    running_var,
    group: Union[NativeGroup, Description],
    axis: int,
    relu: bool,
    static: bool,
    after=None,
    name: str = "fwd",
    attr: Optional[Dict[str, str]] = None,
):
    """Batch Normalization of ``x`` with the statistics of the whole group.

    Parameters
    ----------
    F : mx.nd or mx.sym
    x : NDArray or Symbol
        Any shape with at least 2 dimensions; float32, float64, float16 or bfloat16.
    gamma, beta, running_mean, running_var : NDArray or Symbol
        Shape (C,), of the group's dtype.
    group : NativeGroup or Description
    axis : int
        Of the channels.
    relu : bool
        Whether to return max(y, 0) in place of y.
    static : bool
        Whether this is for a graph with ``static_alloc`` and ``static_shape``.
    after : Symbol, optional
        The call of this layer that must come before this one, as returned.
    name, attr : str, dict
        Of the last node, if F makes a symbol.

    Returns
    -------
    out, call : NDArray or Symbol
        The result, shape of x; and what to hand as ``after`` to the next call in the same graph.
    """
    bare = F is mx.nd and x.context.device_type == "gpu"
    in_place = static or _is_on_gpus(group)
    dense = x if bare else F.reshape(x, shape=(-2,)) if in_place else _whole(F, x)
    inputs = [dense, gamma, beta] + ([] if after is None else [F.BlockGrad(after)])
    out, call = F.Custom(
        *inputs,
        running_mean,
        running_var,
        op_type=_OPERATOR,
        group=group.reference,
        axis=axis,
        relu=int(relu),
        follows=int(after is not None),
        name=name + "_sync",
    )
    last = {} if F is mx.nd else {"name": name, "attr": attr}
    if bare:
        return out, call
    return (F.identity(out, **last) if in_place else _whole(F, out, **last)), call


def _is_on_gpus(group: Union[NativeGroup, Description]) -> bool:
    """Whether all devices are known to be GPUs."""
    return isinstance(group, NativeGroup) and all(device.device_type == "gpu" for device in group.devices)


def _whole(F, x, **named):
    return F.slice_axis(x, axis=0, begin=0, end=None, **named)
