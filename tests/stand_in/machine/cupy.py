"""Stands in for CuPy as far as this project calls it.

Arrays are NumPy's; kernels run on the driver's stand-in, which the loader must find as libcuda.so.1 (driver.cpp). It
shows that programs run and that numbers are right.
"""

import ctypes
import time
from types import SimpleNamespace

import numpy as np
from numpy import array as asarray
from numpy import array as asnumpy  # both copy
from numpy import copyto, full, ones, zeros

__all__ = ["asarray", "asnumpy", "copyto", "full", "ones", "zeros"]
__version__ = "(a stand-in)"
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


random = SimpleNamespace(default_rng=np.random.default_rng)
cuda = SimpleNamespace(
    Device=lambda: SimpleNamespace(synchronize=lambda: None),
    Event=_Event,
    get_current_stream=lambda: SimpleNamespace(ptr=0),
    get_elapsed_time=lambda start, end: 1e3 * (end.time - start.time),
    runtime=SimpleNamespace(
        getDeviceProperties=lambda _: {"name": b"stand-in for a GPU", "multiProcessorCount": 4},
        runtimeGetVersion=lambda: 0,
    ),
    set_allocator=lambda _: None,
)
