"""Small NDArrays as NumPy arrays and back, from within a custom operator.

MXNet's own ways to read and fill an NDArray ask for its shape, type and context each time, and wait for the engine to
hand it over: up to 50 µs and a thread switch per vector. A custom operator has its inputs ready and owns its outputs
until it returns, so on a CPU context it may go to their memory directly.
"""

import ctypes
from typing import Tuple

import mxnet as mx
import numpy as np

from gluon_syncbn.base.library import LIBMXNET, check_call

# The same library, called without letting go of the interpreter lock: to take it back costs more than the call.
_LIBMXNET_LOCKED = ctypes.PyDLL(None, handle=LIBMXNET._handle)


class HostArrays:
    """Reads and writes the arrays of one device.

    No one else may be writing an array that is read, or using one that is written, now or in an operation that the
    engine still has to run.
    """

    def __init__(self, device: mx.Context):
        self._direct = device.device_type != "gpu"

    def read(self, array: mx.nd.NDArray, shape: Tuple[int, ...], dtype) -> np.ndarray:
        """The values in float64; ``shape`` and ``dtype`` are the array's own."""
        values = _memory(array, shape, dtype) if self._direct else array.asnumpy()
        return values.astype(np.float64)

    def write(self, array: mx.nd.NDArray, shape: Tuple[int, ...], dtype, value, add: bool = False) -> None:
        """Store ``value``, or add it to what is there."""
        if not self._direct:
            value = np.broadcast_to(np.asarray(value, dtype=np.float64), shape)
            array[:] = (array.asnumpy() + value if add else value).astype(dtype)
        elif add:
            _memory(array, shape, dtype)[...] += value
        else:
            _memory(array, shape, dtype)[...] = value


def _memory(array: mx.nd.NDArray, shape: Tuple[int, ...], dtype) -> np.ndarray:
    address = ctypes.c_void_p()
    check_call(_LIBMXNET_LOCKED.MXNDArrayGetData(array.handle, ctypes.byref(address)))
    dtype = np.dtype(dtype)
    size = int(np.prod(shape)) * dtype.itemsize
    return np.frombuffer((ctypes.c_char * size).from_address(address.value), dtype=dtype).reshape(shape)
