"""The CPU in place of a GPU: see gpu_threads.h for what that shows and what not."""

import ctypes
import mmap
import subprocess
from pathlib import Path
from typing import Optional

import numpy as np
from gpu_kernels import FLAGS, Tuning, options

HERE = Path(__file__).parent
COMPILER = ["g++", "-std=c++17", "-O2", "-g", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror", "-pthread"]
# Packs of 16 bytes at other addresses are an error on a GPU, and one here.
_CHECKED = ["-Wno-unknown-pragmas", "-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"]
# A template's shared memory would be that of the library that was loaded first, whatever its number of threads.
_CHECKED += ["-fno-gnu-unique"]


def build_kernels(folder: Path, tuning: Optional[Tuning] = None) -> dict:
    """kernels.cu as a library for the CPU, for each dtype."""
    files = {dtype: folder / f"kernels_{dtype}.so" for dtype in FLAGS}
    source = str(HERE / "kernels_on_cpu.cpp")
    builds = [
        subprocess.Popen([*COMPILER, *_CHECKED, *options(dtype, tuning)[1:], source, "-o", str(file)])
        for dtype, file in files.items()
    ]
    if any(build.wait() != 0 for build in builds):
        raise RuntimeError("kernels.cu does not compile for the CPU")
    return files


class StandInGpu:
    """A device for `gpu_kernels.Passes`."""

    def __init__(self, libraries: dict, tuning: Optional[Tuning] = None):
        self.tuning = tuning
        self._libraries = {dtype: ctypes.CDLL(str(file)) for dtype, file in libraries.items()}

    def zeros(self, size: int, dtype: str) -> np.ndarray:
        return Fenced(np.zeros(size, dtype)).array

    def pinned(self, size: int) -> np.ndarray:
        return Fenced(np.full(size, np.nan)).array

    def place(self, values: np.ndarray, offset: int = 0) -> "Fenced":
        return Fenced(values, offset)

    def synchronize(self) -> None:
        pass

    def launch(self, kernel: str, dtype: str, grid, block, arguments) -> None:
        values = [ctypes.c_void_p(item.ctypes.data) if isinstance(item, np.ndarray) else item for item in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        shape = [(ctypes.c_uint * 2)(*pair) for pair in (grid, block)]
        if self._libraries[dtype].launch_on_cpu(kernel.encode(), *shape, pointers) != 0:
            raise ValueError(f"there is no kernel {kernel}")


class Fenced:
    """An array with memory around it that must not be touched: none after it, and a known pattern before it."""

    _PATTERN = 0xA5

    def __init__(self, values: np.ndarray, offset: int = 0):
        """The array ends ``offset`` values before memory that does not exist."""
        size = values.nbytes + offset * values.itemsize
        pages = -(-size // mmap.PAGESIZE) + 1
        self._memory = mmap.mmap(-1, (pages + 1) * mmap.PAGESIZE)
        whole = np.frombuffer(self._memory, np.uint8)
        whole[:] = self._PATTERN
        start = pages * mmap.PAGESIZE - size
        self.array = whole[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
        self.array[...] = values
        self._parts = [whole[:start], whole[start + values.nbytes : pages * mmap.PAGESIZE]]
        none = ctypes.c_void_p(whole.ctypes.data + pages * mmap.PAGESIZE)
        if ctypes.CDLL(None, use_errno=True).mprotect(none, ctypes.c_size_t(mmap.PAGESIZE), 0) != 0:
            raise OSError(ctypes.get_errno(), "mprotect")

    def numpy(self) -> np.ndarray:
        return self.array

    def check(self) -> None:
        assert all((part == self._PATTERN).all() for part in self._parts), "memory beside an array was written"
