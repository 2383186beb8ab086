"""Stands in for CuPy as far as this project calls it.

Arrays are NumPy's, and kernels those of the CPU (kernels_on_cpu.cpp), in the folder that STAND_IN_KERNELS names. It
shows that programs run and that numbers are right.
"""

import ctypes
import os
import re
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


class RawModule:
    def __init__(self, code, options):
        others = [word for word in options if "-DTHREADS" in word or "-DUNROLL" in word]
        if others not in ([], ["-DTHREADS=256", "-DUNROLL=4"]):
            raise ValueError(f"the stand-in has no kernels with {' '.join(others)}")
        (value_type,) = (re.fullmatch("-DVALUE_TYPE=(.)", word).group(1) for word in options if "VALUE_TYPE" in word)
        name = f"kernels_{['float32', 'float64', 'float16'][int(value_type)]}.so"
        self._library = ctypes.CDLL(os.path.join(os.environ["STAND_IN_KERNELS"], name))

    def get_function(self, name):
        def launch(grid, block, arguments):
            values = [np.uint64(item.ctypes.data) if isinstance(item, ndarray) else item for item in arguments]
            held = [np.array([value]) for value in values]
            pointers = (ctypes.c_void_p * len(held))(*(item.ctypes.data for item in held))
            shape = [(ctypes.c_uint * 2)(*pair) for pair in (grid, block)]
            if self._library.launch_on_cpu(name.encode(), *shape, pointers) != 0:
                raise ValueError(f"there is no kernel {name}")

        return launch


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
    get_elapsed_time=lambda start, end: 1e3 * (end.time - start.time),
    runtime=SimpleNamespace(getDeviceProperties=lambda _: {"name": b"stand-in for a GPU"}, runtimeGetVersion=lambda: 0),
    set_allocator=lambda _: None,
)
