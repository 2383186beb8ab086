"""A GPU through CuPy, with the interface that `gpu_kernels.Passes` needs: the kernels without MXNet.

CuPy has the memory, the streams and the clocks. Kernels are compiled, loaded and launched by the package's own code, as
in the operator.
"""

import concurrent.futures
import contextlib
import ctypes
import os
from types import SimpleNamespace
from typing import Dict, Optional, Tuple

import numpy as np
from gpu_kernels import KERNELS, KernelKind, Passes, address_of, compile_ptx, load, options, standalone

# CUfunction_attribute
_ATTRIBUTES = {"shared_bytes": 1, "local_bytes": 3, "registers": 4, "ptx_version": 5, "binary_version": 6}
_MARGIN, _PATTERN = 512, 0xA5  # bytes around an array that must not be written, and their pattern


def open_gpu() -> Optional["CupyGpu"]:
    """The first GPU; or None, after printing why."""
    try:
        import cupy
        import cupyx

        properties = cupy.cuda.runtime.getDeviceProperties(0)
    except Exception as problem:
        print(f"NOT RUN: this needs CuPy and a GPU ({problem})")
        return None
    return CupyGpu(cupy, cupyx, properties["name"].decode(), properties["multiProcessorCount"])


class Placed:
    """Values on the GPU, with guarded memory around them."""

    def __init__(self, cupy, values: np.ndarray, offset: int):
        self._cupy = cupy
        start = _MARGIN + offset * values.itemsize
        self._whole = cupy.full(2 * _MARGIN + start + values.nbytes, _PATTERN, "uint8")
        self.array = self._whole[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
        self.array[...] = cupy.asarray(values)
        self._parts = [self._whole[:start], self._whole[start + values.nbytes :]]

    def numpy(self) -> np.ndarray:
        return self._cupy.asnumpy(self.array)

    def check(self) -> None:
        written = any((self._cupy.asnumpy(part) != _PATTERN).any() for part in self._parts)
        assert not written, "memory beside an array was written"


class CupyGpu:
    def __init__(self, cupy, cupyx, name: str, multiprocessors: int):
        self.cupy, self._cupyx, self.multiprocessors = cupy, cupyx, multiprocessors
        self._functions: Dict[Tuple[str, ...], Dict[str, int]] = {}
        self.ptx: Dict[Tuple[str, ...], bytes] = {}  # by the options of the compiler
        runtime = cupy.cuda.runtime.runtimeGetVersion()
        self.description = f"{name}, CuPy {cupy.__version__}, CUDA {runtime}, NumPy {np.__version__}"

    def zeros(self, size, dtype):
        return self.cupy.zeros(size, dtype)

    def pinned(self, size):
        return self._cupyx.zeros_pinned(size, "float64")

    def place(self, values: np.ndarray, offset: int = 0) -> Placed:
        return Placed(self.cupy, values, offset)

    def synchronize(self):
        self.cupy.cuda.Device().synchronize()

    def launch(self, kernel: str, kind: KernelKind, blocks, arguments: ctypes.Structure) -> None:
        shape = (ctypes.c_uint * 3)(*blocks)
        stream = ctypes.c_void_p(self.cupy.cuda.get_current_stream().ptr)
        function = ctypes.c_void_p(self.functions(kind)[kernel])
        standalone.checked("gluon_syncbn_launch", function, shape, ctypes.byref(arguments), stream, fails=bool)

    def attributes(self, kind: KernelKind) -> Dict[str, Dict[str, int]]:
        """Registers, memory and versions of each kernel, as the driver has compiled it."""
        attribute = standalone.library().gluon_syncbn_attribute
        return {
            kernel: {name: attribute(ctypes.c_void_p(function), number) for name, number in _ATTRIBUTES.items()}
            for kernel, function in self.functions(kind).items()
        }

    def compile(self, kinds) -> None:
        """Compile and load, several at a time. A failure is tried again, and its error told, at the first use."""

        def make(kind):
            with contextlib.suppress(RuntimeError):
                self.functions(kind)

        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(make, kinds))

    def functions(self, kind: KernelKind) -> Dict[str, int]:
        """Handles of the kernels by name, compiled and loaded at first use."""
        words = options(kind)
        if words not in self._functions:
            self.ptx[words] = ptx = compile_ptx(words)
            module = load(ptx)
            self._functions[words] = {
                name: standalone.checked("gluon_syncbn_function", module, name.encode(), returns=ctypes.c_void_p)
                for name in KERNELS
            }
        return self._functions[words]


def measure_latencies(gpu: CupyGpu, kind: KernelKind, layout, rounds: int) -> Dict[str, np.ndarray]:
    """The parts of a thread's wait in a forward pass of a layer, in microseconds, for each of ``rounds`` passes.

    y lies in pinned memory, where the host sees the first value that the second kernel writes.
    """
    x, real = gpu.cupy.ones(layout, kind.dtype), "float64" if kind.dtype == "float64" else "float32"
    y = gpu.pinned(int(np.prod(layout))).view(kind.dtype)[: int(np.prod(layout))]
    passes = Passes(gpu, kind.dtype, layout, x, x)
    vectors = [gpu.cupy.ones(layout[1], real) for _ in range(4)]
    launches = []
    recorded = SimpleNamespace(launch=lambda *told: launches.append(told))
    passes.device = recorded
    passes.moments(x)
    passes.normalize(x, y, *vectors, count=layout[0] * layout[2])
    (first, _, some, moments), (second, _, others, normalize) = launches
    names = (
        "launch",
        "to the last number",
        "to the stream's end",
        "put and launch",
        "to the first value",
        "to the end",
    )
    shapes = [(ctypes.c_uint * 3)(*blocks) for blocks in (some, others)]
    handles = [ctypes.c_void_p(gpu.functions(kind)[name]) for name in (first, second)]
    times = np.zeros((rounds, len(names)))
    message = ctypes.c_void_p(address_of(passes.message))
    # The second kernel begins with the last image.
    watched = ctypes.c_void_p(address_of(y) + (layout[0] - 1) * layout[1] * layout[2] * y.itemsize)
    gpu.synchronize()
    standalone.checked(
        "gluon_syncbn_latencies",
        *handles,
        *shapes,
        ctypes.byref(moments),
        ctypes.byref(normalize),
        message,
        watched,
        y.itemsize,
        rounds,
        times.ctypes.data_as(ctypes.c_void_p),
        fails=bool,
    )
    return dict(zip(names, times.T))
