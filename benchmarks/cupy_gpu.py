"""A GPU through CuPy, with the interface that `gpu_kernels.Passes` needs: the kernels without MXNet."""

from typing import Optional

import numpy as np
from gpu_kernels import KERNELS, SOURCE, Tuning, options

_NUMBERS = {"c_int": np.int32, "c_long": np.int64, "c_longlong": np.int64, "c_double": np.float64}
_MARGIN, _PATTERN = 512, 0xA5  # bytes around an array that must not be written, and what is in them


def open_gpu() -> Optional["CupyGpu"]:
    """The first GPU; or None, after printing why."""
    try:
        import cupy
        import cupyx

        properties = cupy.cuda.runtime.getDeviceProperties(0)
    except Exception as problem:
        print(f"NOT RUN: this needs CuPy and a GPU ({problem})")
        return None
    return CupyGpu(cupy, cupyx, properties["name"].decode())


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
    def __init__(self, cupy, cupyx, name: str):
        self.cupy, self._cupyx = cupy, cupyx
        self._kernels = {}
        self.tuning: Optional[Tuning] = None
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

    def launch(self, kernel, dtype, grid, block, arguments):
        self._kernel(kernel, dtype)(grid, block, tuple(self._argument(item) for item in arguments))

    def _kernel(self, kernel, dtype):
        words = options(dtype, self.tuning)
        if words not in self._kernels:
            module = self.cupy.RawModule(code=SOURCE, options=words)
            self._kernels[words] = {name: module.get_function(name) for name in KERNELS}
        return self._kernels[words][kernel]

    def _argument(self, item):
        if isinstance(item, self.cupy.ndarray):
            return item
        if isinstance(item, np.ndarray):  # pinned, which a GPU sees at the same address
            return np.uint64(item.ctypes.data)
        return _NUMBERS[type(item).__name__](item.value)
