"""The kernels on a GPU, without MXNet: right on random shapes, then how fast, beside PyTorch's and a plain copy.

    pip install cupy-cuda12x torch numpy   # and this package, compiled
    python benchmarks/gpu.py

The kernels are compiled from ``gluon_syncbn/csrc/kernels.cu`` with CuPy's NVRTC and launched as the operator launches
them. Reported is how many bytes a direction must move (forward reads x twice and writes y; backward reads x and dy
twice and writes dx), divided by its time, as a share of what a device-to-device copy moves in the same run. PyTorch
does the same work with the primitives of its SyncBatchNorm. All take turns; times are CUDA events', medians; tensors
take turns, too, so that none is found in the cache.

Without CuPy or a GPU it says so and ends with status 3.
"""

import argparse
import statistics
import sys

import numpy as np
from gpu_kernels import KERNELS, LIBRARY, SOURCE, Passes, options

SHAPES = [(32, 256, 56, 56), (2, 64, 800, 1333)]
DTYPES = ["float32", "float16"]
ROTATE = 1 << 30  # bytes of tensors that take turns
PRECISION = {"float32": 4e-6, "float64": 1e-12, "float16": 4e-3}


class CupyGpu:
    """A device for `gpu_kernels.Passes`."""

    def __init__(self, cupy, cupyx):
        self._cupy, self._cupyx = cupy, cupyx
        self._kernels = {}

    def zeros(self, size, dtype):
        return self._cupy.zeros(size, dtype)

    def pinned(self, size):
        return self._cupyx.zeros_pinned(size, "float64")

    def synchronize(self):
        self._cupy.cuda.Device().synchronize()

    def launch(self, kernel, dtype, grid, block, arguments):
        self._kernel(kernel, dtype)(grid, block, tuple(self._argument(item) for item in arguments))

    def _kernel(self, kernel, dtype):
        if dtype not in self._kernels:
            module = self._cupy.RawModule(code=SOURCE.read_text(encoding="utf-8"), options=options(dtype))
            self._kernels[dtype] = {name: module.get_function(name) for name in KERNELS}
        return self._kernels[dtype][kernel]

    def _argument(self, item):
        if isinstance(item, self._cupy.ndarray):
            return item
        if isinstance(item, np.ndarray):  # pinned, which a GPU sees at the same address
            return np.uint64(item.ctypes.data)
        return {"c_int": np.int32, "c_long": np.int64, "c_longlong": np.int64, "c_double": np.float64}[
            type(item).__name__
        ](item.value)


class Ours:
    """Forward and backward of one device, with the messages' way through the host left out: it is the same for all."""

    def __init__(self, gpu, cupy, x, y, dy, dx):
        shape = x.shape
        layout = (shape[0], shape[1], int(np.prod(shape[2:])))
        self._tensors = [item.reshape(layout) for item in (x, y, dy, dx)]
        self._forward = Passes(gpu, x.dtype.name, layout, x, y)
        self._backward = Passes(gpu, x.dtype.name, layout, x, dy, dx)
        self._backward.saved = self._forward.saved
        channels, real = shape[1], self._forward.real
        self._vectors = [cupy.ones(channels, real) for _ in range(2)]
        self._running = [cupy.ones(channels, real) for _ in range(2)]
        self._gradients = [cupy.zeros(channels, real) for _ in range(2)]
        self._count = layout[0] * layout[2]

    def moments(self):
        self._forward.moments(self._tensors[0])

    def normalize(self):
        x, y = self._tensors[:2]
        self._forward.normalize(x, y, *self._vectors, *self._running, self._count)

    def forward(self):
        self.moments()
        self.normalize()

    def backward(self):
        x, _, dy, dx = self._tensors
        self._backward.gradient_sums(x, dy, *self._vectors, *self._gradients)
        self._backward.input_gradient(x, dy, dx, *self._vectors)


class Torch:
    """The same with what torch.nn.SyncBatchNorm calls."""

    def __init__(self, torch, x, y, dy, dx):
        self._torch = torch
        self._x, self._dy = (torch.as_tensor(item, device="cuda") for item in (x, dy))
        channels = x.shape[1]
        self._weight, self._bias, self._mean, self._var = (torch.ones(channels, device="cuda") for _ in range(4))
        size = self._x.numel() // channels
        self._counts = torch.full((1,), float(size), device="cuda")
        self._count = torch.full((1,), size, dtype=torch.int32, device="cuda")
        self._saved = torch.batch_norm_stats(self._x, 1e-5)

    def forward(self):
        torch = self._torch
        mean, invstd = torch.batch_norm_stats(self._x, 1e-5)
        all_means, all_invstds = mean.view(1, -1), invstd.view(1, -1)
        self._saved = torch.batch_norm_gather_stats_with_counts(
            self._x, all_means, all_invstds, self._mean, self._var, 0.1, 1e-5, self._counts.to(mean.dtype)
        )
        torch.batch_norm_elemt(self._x, self._weight, self._bias, *self._saved, 1e-5)

    def backward(self):
        torch = self._torch
        sums = torch.batch_norm_backward_reduce(self._dy, self._x, *self._saved, self._weight, True, True, True)
        torch.batch_norm_backward_elemt(self._dy, self._x, *self._saved, self._weight, *sums[:2], self._count)


def check(gpu, cupy, cases: int) -> None:
    """On random shapes, against NumPy in float64. Raises AssertionError."""
    rng = np.random.RandomState(0)
    for case in range(cases):
        dtype = str(rng.choice(list(PRECISION)))
        inner = int(rng.choice([1, 1, 4, 49, 196, 3136, rng.randint(2, 20000)]))
        layout = (int(rng.randint(1, 20)), int(rng.choice([1, 3, 64, 257, rng.randint(1, 600)])), inner)
        x, dy = (rng.standard_normal(layout).astype(dtype) for _ in range(2))
        on_gpu = [cupy.asarray(item) for item in (x, np.zeros_like(x), dy, np.zeros_like(x))]
        passes = Passes(gpu, dtype, layout, *on_gpu[:1], *on_gpu[2:])
        gamma, beta, mean, var, d_gamma, d_beta = (cupy.ones(layout[1], passes.real) for _ in range(6))
        count = layout[0] * inner
        passes.moments(on_gpu[0])
        local_mean, m2, _ = passes.received()
        passes.send(local_mean, m2 / count)
        passes.normalize(*on_gpu[:2], gamma, beta, mean, var, count)
        passes.gradient_sums(on_gpu[0], on_gpu[2], gamma, beta, d_gamma, d_beta)
        passes.send(*passes.received()[:2])
        passes.input_gradient(on_gpu[0], *on_gpu[2:], gamma, beta)
        gpu.synchronize()
        wide, head = x.astype(np.float64), dy.astype(np.float64)
        average = {"axis": (0, 2), "keepdims": True}
        std = np.sqrt(wide.var(**average) + 1e-5)
        normal = (wide - wide.mean(**average)) / std
        expected = (head - head.mean(**average) - normal * (head * normal).mean(**average)) / std
        for name, got, want in (("y", on_gpu[1], normal + 1), ("dx", on_gpu[3], expected)):
            worst = np.abs(cupy.asnumpy(got).astype(np.float64) - want).max()
            limit = PRECISION[dtype] * max(np.abs(want).max(), np.abs(1 / std).max(), 1)
            assert worst <= limit, f"case {case}, {dtype} {layout}: {name} is off by {worst:.1e}, more than {limit:.1e}"
    print(f"right on {cases} random shapes")


def microseconds(cupy, busy, run) -> float:
    """Of GPU time. The GPU is ``busy`` first: Python has launched all of ``run`` when its first kernel begins."""
    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    for _ in range(4):
        cupy.copyto(*busy)
    start.record()
    run()
    end.record()
    end.synchronize()
    return 1e3 * cupy.cuda.get_elapsed_time(start, end)


def compare(gpu, cupy, torch, shape, dtype: str, rounds: int) -> None:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    sets = max(2, -(-ROTATE // (4 * size)))
    rng = cupy.random.default_rng(0)
    busy = [cupy.zeros(ROTATE, "uint8") for _ in range(2)]
    tensors = [[rng.standard_normal(shape, "float32").astype(dtype) for _ in range(4)] for _ in range(sets)]
    runs = {"ours": [Ours(gpu, cupy, *item) for item in tensors]}
    if torch is not None:
        runs["PyTorch"] = [Torch(torch, *item) for item in tensors]
    times = {(name, direction): [] for name in runs for direction in ("forward", "backward")}
    copies, parts = [], {"moments": [], "normalize": []}
    for i in range(rounds + 3):
        here = i % sets
        copy = microseconds(cupy, busy, lambda item=tensors[here]: cupy.copyto(item[3], item[0]))
        took = {
            (name, direction): microseconds(cupy, busy, getattr(items[here], direction))
            for name, items in runs.items()
            for direction in ("forward", "backward")
        }
        alone = {name: microseconds(cupy, busy, getattr(runs["ours"][here], name)) for name in parts}
        if i < 3:  # the first compile and allocate
            continue
        copies.append(copy)
        for key, value in took.items():
            times[key].append(value)
        for key, value in alone.items():
            parts[key].append(value)
    bandwidth = 2 * size / statistics.median(copies)  # bytes per microsecond
    print(f"\n{dtype} {shape}: copy {bandwidth / 1e6:.2f} TB/s; {sets} sets of tensors, {rounds} rounds")
    moments, normalize = (statistics.median(parts[name]) for name in ("moments", "normalize"))
    print(f"ours, forward: moments {moments:.0f} µs, normalize {normalize:.0f} µs")
    print("| | forward | of copy | backward | of copy |\n| --- | --- | --- | --- | --- |")
    for name in runs:
        forward, backward = (statistics.median(times[name, direction]) for direction in ("forward", "backward"))
        shares = (3 * size / forward / bandwidth, 5 * size / backward / bandwidth)
        print(f"| {name} | {forward:.0f} µs | {shares[0]:.2f} | {backward:.0f} µs | {shares[1]:.2f} |")
    if torch is not None:
        for direction in ("forward", "backward"):
            pairs = zip(times["PyTorch", direction], times["ours", direction])
            print(f"{direction}: {statistics.median(a / b for a, b in pairs):.2f} times as fast as PyTorch")


def main(words=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=200, help="random shapes to check")
    parser.add_argument("--rounds", type=int, default=50)
    arguments = parser.parse_args(words)
    try:
        import cupy
        import cupyx

        properties = cupy.cuda.runtime.getDeviceProperties(0)
    except Exception as problem:
        print(f"NOT RUN: this needs CuPy and a GPU ({problem})")
        return 3
    if not LIBRARY.exists():
        print("NOT RUN: the package's library is not there; it tells how to launch (pip install -e .)")
        return 3
    try:
        import torch
    except ImportError:
        torch = None
        print("PyTorch is not here: no comparison with it")
    print(
        f"{properties['name'].decode()}, CuPy {cupy.__version__}, CUDA {cupy.cuda.runtime.runtimeGetVersion()}, "
        f"PyTorch {torch.__version__ if torch else 'none'}, NumPy {np.__version__}"
    )
    gpu = CupyGpu(cupy, cupyx)
    check(gpu, cupy, arguments.cases)
    for shape in SHAPES:
        for dtype in DTYPES:
            compare(gpu, cupy, torch, shape, dtype, arguments.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
