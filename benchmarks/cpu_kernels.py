"""How fast one core goes through a tensor, in each of the four passes: gigabytes that must be moved, by seconds.

    python benchmarks/cpu_kernels.py [LIBRARY]

With the file of another build of tests/csrc/standalone.cpp (tests/standalone.py makes it), both take turns, that one
first. Numbers are medians.
"""

import ctypes
import statistics
import sys
import time

import numpy as np
from gpu_kernels import FLAGS, standalone

# Images, channels, values per row of a channel.
LAYOUTS = [(32, 64, 12544), (32, 256, 3136), (32, 512, 784), (32, 1024, 196), (32, 2048, 49), (4, 2048, 49)]
LAYOUTS += [(64, 2048, 4)]
MOVED = {"moments": 1, "normalize": 2, "gradient_sums": 2, "input_gradient": 3}  # as many bytes as a tensor has
ROUNDS, VALUES = 15, 20_000_000  # of a measurement, at least


def passes_of(library, dtype: str, layout) -> dict:
    """Each pass as a function, on tensors of its own."""
    rng = np.random.default_rng(0)
    x, dy, to = (rng.standard_normal(layout, np.float32).astype(dtype) for _ in range(3))
    vectors = np.ones((8, layout[1]))
    sizes, flag, no_activation = [ctypes.c_int64(size) for size in layout], FLAGS[dtype], (0, ctypes.c_double(0))
    a, b, *others = (ctypes.c_void_p(vector.ctypes.data) for vector in vectors)
    X, DY, TO = (ctypes.c_void_p(tensor.ctypes.data) for tensor in (x, dy, to))
    kept = x, dy, to, vectors

    def call(name, *arguments):
        return lambda: (kept, getattr(library, f"gluon_syncbn_{name}")(flag, *arguments))

    behind = (X, DY, None, False, *sizes, *others[:3], *no_activation)
    return {
        "moments": call("moments", X, *sizes, 1, a, b),
        "normalize": call("normalize", X, None, *sizes, *others[:3], *no_activation, TO, 1),
        "gradient_sums": call("gradient_sums", *behind, None, False, 1, a, b),
        "input_gradient": call("input_gradient", *behind, *others[3:6], TO, False, 1),
    }


def main() -> None:
    libraries = [ctypes.CDLL(file) for file in sys.argv[1:2]] + [standalone.library()]
    print(f"| | {' | '.join(MOVED)} |\n| --- |{' --- |' * len(MOVED)}")
    for dtype in ("float32", "float16"):
        for layout in LAYOUTS:
            made = [passes_of(library, dtype, layout) for library in libraries]
            size, times = int(np.prod(layout)), max(1, VALUES // int(np.prod(layout)))
            cells = []
            for name, moved in MOVED.items():
                seconds = [[] for _ in made]
                for _ in range(ROUNDS):
                    for passes, own in zip(made, seconds):
                        began = time.perf_counter()
                        for _ in range(times):
                            passes[name]()
                        own.append((time.perf_counter() - began) / times)
                speeds = [moved * size * np.dtype(dtype).itemsize / statistics.median(own) / 1e9 for own in seconds]
                cells.append(", ".join(f"{speed:.1f}" for speed in speeds))
            print(f"| {dtype} {'×'.join(map(str, layout))} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
