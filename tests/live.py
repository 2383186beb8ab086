"""Counts what is alive in this process, where a small leak in each step shows that the resident memory hides.

Python's own objects and blocks of memory (text and numbers are no objects to the garbage collector), what `malloc` has
given out, and threads.
"""

import ctypes
import gc
import os
import sys

import mxnet as mx


class _MallocInfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc 2.33 and later."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "mapped", "usmblks", "fsmblks", "used", "free", "keepcost")
    ]


def count() -> tuple:
    """Python objects and blocks, allocated bytes and threads, when all that MXNet was asked for has ended."""
    mx.nd.waitall()
    gc.collect()
    return len(gc.get_objects()), sys.getallocatedblocks(), _allocated_bytes(), len(os.listdir("/proc/self/task"))


def _allocated_bytes() -> int:
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return 0  # an older glibc
    mallinfo.restype = _MallocInfo
    info = mallinfo()
    return info.used + info.mapped


def what_grows(counts, steps: int, bytes_per_step: int, late_threads: int) -> str:
    """What ``steps`` steps each have left behind, in each of the windows between two numbers of `count`; "" if nothing.

    A leak shows in every window, what an allocator or MXNet's pools take now and then, in some.
    """
    objects, blocks, memory, threads = zip(*counts)
    if threads[-1] > threads[0] + late_threads:
        return f"threads: {threads}"
    for name, values, most in (("objects", objects, 0), ("blocks", blocks, 0.7), ("bytes", memory, bytes_per_step)):
        grown = [(after - before) / steps for before, after in zip(values, values[1:])]
        if min(grown) > most:
            return f"{name} per step: {grown}"
    return ""


def watch(step, windows: int, steps: int, bytes_per_step: int, late_threads: int, any_grows=bool) -> None:
    """AssertionError if something grows in each of so many windows of so many steps, and of as many more.

    Behind a first window, in which graphs and pools are made. ``any_grows(what)``: whether to watch on; all processes
    of a job must run equally many steps.
    """
    counts, grows = [], ""
    for number in range(2 * windows + 1):
        for _ in range(steps):
            step()
        counts.append(count())
        if number >= windows:
            grows = what_grows(counts, steps, bytes_per_step, late_threads)
            if not any_grows(grows):
                return
    raise AssertionError(grows or "another process grows")
