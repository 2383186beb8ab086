"""Calls the kernels of ``gluon_syncbn/csrc/cuda`` without MXNet, as the operator does: for benchmarks and tests.

`Passes` needs a device: something that makes arrays and launches kernels, a GPU through CuPy (gpu.py) or the CPU
standing in for one (tests/stand_in.py). What a kernel is given as its grid is asked of the package's own library.
"""

import ctypes
import runpy
from pathlib import Path
from typing import NamedTuple, Optional, Tuple

import numpy as np

CSRC = Path(__file__).parents[1] / "gluon_syncbn" / "csrc"
# The package itself cannot be imported where there is no MXNet.
SOURCE = runpy.run_path(str(CSRC.parent / "base" / "cuda_source.py"))["cuda_source"]()
LIBRARY = CSRC.parent / "libgluon_syncbn.so"
# MXNet's type flags, which are also the source's VALUE_TYPE.
FLAGS = {"float32": 0, "float64": 1, "float16": 2}
KERNELS = [
    f"{kernel}_{layout}"
    for kernel in ("moments", "normalize", "gradient_sums", "input_gradient")
    for layout in ("rows", "columns")
]
REQUEST_NULL, REQUEST_WRITE, REQUEST_ADD = 0, 1, 3


class Tuning(NamedTuple):
    """Other numbers than the operator's; see launch.h."""

    threads: int
    unroll: int
    blocks: int


def options(dtype: str, tuning: Optional[Tuning] = None) -> Tuple[str, ...]:
    """For NVRTC, as the operator passes them."""
    threads, unroll = (tuning.threads, tuning.unroll) if tuning else default_tuning()
    return ("--std=c++11", f"-DVALUE_TYPE={FLAGS[dtype]}", f"-DTHREADS={threads}", f"-DUNROLL={unroll}")


def default_tuning() -> Tuple[int, int]:
    """Threads and unroll that the operator takes."""
    numbers = (ctypes.c_int64 * 2)()
    ctypes.CDLL(str(LIBRARY)).gluon_syncbn_default_tuning(numbers)
    return tuple(numbers)


class Launch(NamedTuple):
    rows: bool
    aligned: bool
    grid: Tuple[int, int]
    block: Tuple[int, int]
    partials: int
    counters: int


def launch_for(dtype: str, layout: Tuple[int, int, int], *addresses: int, tuning: Optional[Tuning] = None) -> Launch:
    """What the operator would choose for tensors (outer, channels, inner) at these addresses, at most three."""
    numbers = (ctypes.c_int64 * 8)()
    sizes = [ctypes.c_int64(size) for size in layout]
    pointers = [ctypes.c_void_p(address) for address in (*addresses, *addresses[:1] * 2)[:3]]
    tuned = (ctypes.c_int64 * 3)(*tuning) if tuning else None
    ctypes.CDLL(str(LIBRARY)).gluon_syncbn_launch_for(FLAGS[dtype], *sizes, *pointers, tuned, numbers)
    rows, aligned, *rest = numbers
    return Launch(bool(rows), bool(aligned), tuple(rest[:2]), tuple(rest[2:4]), *rest[4:])


def address_of(array) -> int:
    """Of a NumPy or CuPy array."""
    return array.data.ptr if hasattr(array.data, "ptr") else array.ctypes.data


class Passes:
    """The four passes of one device over tensors of one dtype and one layout (outer, channels, inner).

    Parameters
    ----------
    device
        Has ``tuning``, by default None, ``zeros(size, dtype)`` for memory of the device, ``pinned(size)`` for float64
        numbers that device and host share, ``launch(kernel, dtype, grid, block, arguments)`` and ``synchronize()``.
    tensors
        x, and for the backward passes dy and dx, or other arrays that are aligned as they are.
    """

    def __init__(self, device, dtype: str, layout, *tensors, relu=False, has_scale=True, epsilon=1e-5, momentum=0.9):
        self.device, self.dtype, self.layout = device, dtype, layout
        self.relu, self.has_scale, self.epsilon, self.momentum = relu, has_scale, epsilon, momentum
        self.launch = launch_for(dtype, layout, *(address_of(tensor) for tensor in tensors), tuning=device.tuning)
        self.real = "float64" if dtype == "float64" else "float32"
        self.partials = device.zeros(self.launch.partials, "float64")
        self.counters = device.zeros(self.launch.counters, "int32")
        self.message = device.pinned(4 + 2 * layout[1])
        self.saved = device.zeros(2 * layout[1] + 3, "float64")
        self._ticket = 0.0

    def moments(self, x) -> None:
        """Leave mean and M2 of this device in ``received``."""
        self._ticket += 1
        self._run(
            "moments", x, self.partials, self.counters, self.message, *self._sizes(), ctypes.c_double(self._ticket)
        )

    def normalize(self, x, y, gamma, beta, running_mean, running_var, count, training=True, wants_y=True) -> None:
        """After ``send(mean, var)`` of all devices, which hold ``count`` values per channel."""
        numbers = [ctypes.c_double(number) for number in (self.epsilon, self.momentum, count, 7, 0)]
        flags = [ctypes.c_int(flag) for flag in (training, self.has_scale, self.relu, wants_y, True)]
        vectors = (gamma, beta, running_mean, running_var, self.saved, self.message)
        self._run("normalize", x, y, *vectors, *self._sizes(), *numbers, *flags)

    def gradient_sums(self, x, dy, gamma, beta, d_gamma, d_beta, gamma_request=1, beta_request=1) -> None:
        """Leave S1 and S2 of this device in ``received``, and what `normalize` was told of the call behind them."""
        self._ticket += 1
        flags = [ctypes.c_int(flag) for flag in (self.has_scale, self.relu, gamma_request, beta_request)]
        vectors = (gamma, beta, self.saved, self.partials, self.counters, self.message, d_gamma, d_beta)
        self._run("gradient_sums", x, dy, *vectors, *self._sizes(), ctypes.c_double(self._ticket), *flags)

    def input_gradient(self, x, dy, dx, gamma, beta, add=False) -> None:
        """After ``send(S1, S2)`` of all devices."""
        flags = [ctypes.c_int(flag) for flag in (self.has_scale, self.relu, add)]
        self._run("input_gradient", x, dy, dx, gamma, beta, self.saved, self.message, *self._sizes(), *flags)

    def received(self) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The two vectors that a pass has left for the host, and what is behind them."""
        self.device.synchronize()
        if self.message[0] != self._ticket:
            raise AssertionError(f"the kernel left ticket {self.message[0]}, not {self._ticket}")
        channels = self.layout[1]
        first, second, rest = np.split(np.array(self.message[1:]), [channels, 2 * channels])
        return first, second, rest

    def send(self, first, second) -> None:
        """Two vectors of all devices, for the pass that comes next."""
        channels = self.layout[1]
        self.message[1 : 1 + channels] = first
        self.message[1 + channels : 1 + 2 * channels] = second

    def _sizes(self):
        return [*(ctypes.c_longlong(size) for size in self.layout), ctypes.c_int(self.launch.aligned)]

    def _run(self, kernel: str, *arguments) -> None:
        name = f"{kernel}_{'rows' if self.launch.rows else 'columns'}"
        self.device.launch(name, self.dtype, self.launch.grid, self.launch.block, arguments)
