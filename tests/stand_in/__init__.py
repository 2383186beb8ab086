"""The CPU in place of a GPU. gpu_threads.h says which defects this finds."""

import concurrent.futures
import ctypes
import mmap
import os
import shutil
from pathlib import Path

import numpy as np
from gpu_kernels import H200, KINDS, KernelKind, options, standalone

HERE = Path(__file__).parent
FLAGS = ["-std=c++17", "-Og", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror", "-pthread"]
COMPILER = ["g++", *FLAGS]
# Packs of 16 bytes at other addresses are an error on a GPU, and one here.
_CHECKED = ["-Wno-unknown-pragmas", "-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"]
# Without this, all libraries would share a template's static memory, although their numbers of threads differ.
_CHECKED += ["-fno-gnu-unique"]


def library_of(kind: KernelKind) -> Path:
    """kernels.cu as a library for the CPU."""
    words = [*FLAGS, *_CHECKED, *options(kind)[1:]]
    return standalone.compiled("kernels.so", [HERE / "kernels_on_cpu.cpp"], words)


def build_kernels(folder: Path) -> None:
    """Fill ``folder`` with the libraries for all kinds of layers, under the names that driver.cpp looks for."""
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for kind, library in zip(KINDS, pool.map(library_of, KINDS)):
            shutil.copy(library, folder / f"kernels_{kind.mark()}.so")


class StandInGpu:
    """A device for `gpu_kernels.Passes`."""

    def __init__(self, multiprocessors: int = H200):
        self.multiprocessors = multiprocessors
        self._libraries = {}

    def zeros(self, size: int, dtype: str) -> np.ndarray:
        return Fenced(np.zeros(size, dtype)).array

    def pinned(self, size: int) -> np.ndarray:
        return Fenced(np.full(size, np.nan)).array

    def place(self, values: np.ndarray, offset: int = 0) -> "Fenced":
        return Fenced(values, offset)

    def synchronize(self) -> None:
        pass

    def launch(self, kernel: str, kind: KernelKind, blocks, arguments: ctypes.Structure) -> None:
        if kind not in self._libraries:
            self._libraries[kind] = ctypes.CDLL(str(library_of(kind)))
        shape = (ctypes.c_uint * 3)(*blocks)
        if self._libraries[kind].launch_on_cpu(kernel.encode(), shape, ctypes.byref(arguments)) != 0:
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
