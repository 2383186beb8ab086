"""Stands in for CuPy as far as this project calls it.

Arrays are NumPy's; kernels run on the driver's stand-in, which the loader must find as libcuda.so.1 (driver.cpp). It
shows that programs run and that numbers are right.
"""

import ctypes
import time
from types import SimpleNamespace

import numpy as np

__version__ = "(a stand-in)"


class ndarray(np.ndarray):
    """Its memory is the host's."""


def asarray(values):
    return np.array(values).view(ndarray)


def asnumpy(values):
    return np.array(values, subok=False)


def zeros(shape, dtype):
    return np.zeros(shape, dtype).view(ndarray)


def ones(shape, dtype):
    return np.ones(shape, dtype).view(ndarray)


def full(shape, value, dtype):
    return np.full(shape, value, dtype).view(ndarray)


copyto = np.copyto


_driver = ctypes.CDLL("libcuda.so.1")
_context = ctypes.c_void_p()
_driver.cuInit(0)
_driver.cuDevicePrimaryCtxRetain(ctypes.byref(_context), 0)
_driver.cuCtxSetCurrent(_context)


class _Event:
    def record(self):
        self.time = time.perf_counter()

    def synchronize(self):
        pass


class _Generator:
    def __init__(self, seed):
        self._generator = np.random.default_rng(seed)

    def standard_normal(self, shape, dtype):
        return self._generator.standard_normal(shape, dtype).view(ndarray)


random = SimpleNamespace(default_rng=_Generator)
cuda = SimpleNamespace(
    Device=lambda: SimpleNamespace(synchronize=lambda: None),
    Event=_Event,
    get_current_stream=lambda: SimpleNamespace(ptr=0),
    get_elapsed_time=lambda start, end: 1e3 * (end.time - start.time),
    runtime=SimpleNamespace(getDeviceProperties=lambda _: {"name": b"stand-in for a GPU"}, runtimeGetVersion=lambda: 0),
    set_allocator=lambda _: None,
)
