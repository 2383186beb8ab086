"""The kernels on a GPU, without MXNet: how fast they are, beside PyTorch's and a plain copy.

    pip install cupy-cuda12x torch numpy   # and this package, compiled
    python tests/check_kernels.py          # whether they are right
    python benchmarks/gpu.py [--json FILE]
    python benchmarks/gpu.py --tune        # a line per choice; its times, shape by shape, as shares of what is shipped

The kernels are compiled from ``gluon_syncbn/csrc/cuda/kernels.cu`` with CuPy's NVRTC and launched as the operator
launches them. The result is the number of bytes that a direction must move (forward reads x twice and writes y;
backward reads x and dy twice and writes dx), divided by its time, as a share of what a device-to-device copy moves in
the same run. PyTorch does the same work with the primitives of its SyncBatchNorm. All take turns. Times are medians of
CUDA events. Tensors take turns, too, so that none is found in the cache.

Without CuPy or a GPU it says so and ends with status 3.
"""

import argparse
import itertools
import json
import statistics
import sys

import numpy as np
from cupy_gpu import open_gpu
from gpu_kernels import Passes, Tuning

SHAPES = [(32, 256, 56, 56), (2, 64, 800, 1333)]  # a ResNet's, and a detector's at full size
LAYOUTS = ["NCHW", "NHWC"]
DTYPES = ["float32", "float16"]
ROTATE = 1 << 30  # bytes of tensors that take turns
TUNINGS = ([128, 256, 512], [2, 4, 8], [512, 1024, 2048, 4096])  # threads, packs, blocks
DIRECTIONS = {"forward": 3, "backward": 5}  # how often each must read or write as many bytes as a tensor has


class Ours:
    """Forward and backward of one device, without the exchange through the host, which is the same for all."""

    def __init__(self, gpu, layout, x, y, dy, dx):
        batch, (channels, size) = x.shape[0], split(x.shape, layout)
        shape = (batch, channels, size) if layout == "NCHW" else (batch * size, channels, 1)
        self._tensors = [item.reshape(shape) for item in (x, y, dy, dx)]
        x, y, dy, dx = self._tensors
        self._forward = Passes(gpu, x.dtype.name, shape, x, y)
        self._backward = Passes(gpu, x.dtype.name, shape, x, dy, dx)
        self._backward.saved = self._forward.saved
        real = self._forward.real
        ones = gpu.cupy.ones
        self._vectors, self._running, self._gradients = ([ones(channels, real) for _ in range(2)] for _ in range(3))
        self._count = batch * size

    def moments(self):
        self._forward.moments(self._tensors[0])

    def normalize(self):
        x, y = self._tensors[:2]
        self._forward.normalize(x, y, *self._vectors, *self._running, self._count)

    def forward(self):
        self.moments()
        self.normalize()

    def gradient_sums(self):
        x, _, dy, _ = self._tensors
        self._backward.gradient_sums(x, dy, *self._vectors, *self._gradients)

    def input_gradient(self):
        x, _, dy, dx = self._tensors
        self._backward.input_gradient(x, dy, dx, *self._vectors)

    def backward(self):
        self.gradient_sums()
        self.input_gradient()


class Torch:
    """The same with what torch.nn.SyncBatchNorm calls."""

    def __init__(self, torch, layout, x, y, dy, dx):
        self._torch = torch
        self._x, self._dy = (torch.as_tensor(item, device="cuda") for item in (x, dy))
        if layout == "NHWC":  # as PyTorch has it: strides of channels_last under the shape of NCHW
            self._x, self._dy = (item.permute(0, 3, 1, 2) for item in (self._x, self._dy))
        channels, _ = split(x.shape, layout)
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


def split(shape, layout):
    """Channels, and values of a channel in an image."""
    return (shape[1], shape[2] * shape[3]) if layout == "NCHW" else (shape[3], shape[1] * shape[2])


def microseconds(cupy, busy, run) -> float:
    """Of GPU time. The GPU is ``busy`` first, so Python has launched all of ``run`` before its first kernel begins."""
    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    for _ in range(4):
        cupy.copyto(*busy)
    start.record()
    run()
    end.record()
    end.synchronize()
    return 1e3 * cupy.cuda.get_elapsed_time(start, end)


def compare(gpu, torch, shape, layout: str, dtype: str, rounds: int) -> dict:
    """Medians in microseconds, and what they are shares of."""
    cupy = gpu.cupy
    if layout == "NHWC":
        shape = (shape[0], *shape[2:], shape[1])
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    sets = max(2, -(-ROTATE // (4 * size))) if size > 1 << 20 else 2
    rng = cupy.random.default_rng(0)
    busy = [cupy.zeros(ROTATE if size > 1 << 20 else 1024, "uint8") for _ in range(2)]
    tensors = [[rng.standard_normal(shape, np.float32).astype(dtype) for _ in range(4)] for _ in range(sets)]
    nets = {"ours": [Ours(gpu, layout, *item) for item in tensors]}
    if torch is not None:
        nets["PyTorch"] = [Torch(torch, layout, *item) for item in tensors]

    def runs(here):
        yield "copy", lambda: cupy.copyto(tensors[here][3], tensors[here][0])
        for name, items in nets.items():
            for direction in DIRECTIONS:
                yield f"{name}, {direction}", getattr(items[here], direction)
        for kernel in ("moments", "normalize", "gradient_sums", "input_gradient"):
            yield kernel, getattr(nets["ours"][here], kernel)

    times = {name: [] for name, _ in runs(0)}
    for i in range(rounds + 3):
        for name, run in runs(i % sets):
            took = microseconds(cupy, busy, run)
            if i >= 3:  # the first compile and allocate
                times[name].append(took)
    medians = {name: statistics.median(values) for name, values in times.items()}
    bandwidth = 2 * size / medians["copy"]  # bytes per microsecond
    result = {"dtype": dtype, "layout": layout, "shape": shape, "rounds": rounds, "copy_TB_per_s": bandwidth / 1e6}
    result["microseconds"] = medians
    result["of_copy"] = {
        f"{name}, {direction}": tensors_moved * size / medians[f"{name}, {direction}"] / bandwidth
        for name in nets
        for direction, tensors_moved in DIRECTIONS.items()
    }
    if torch is not None:
        pairs = {way: zip(times[f"PyTorch, {way}"], times[f"ours, {way}"]) for way in DIRECTIONS}
        result["times_as_fast_as_pytorch"] = {
            way: statistics.median(a / b for a, b in both) for way, both in pairs.items()
        }
    return result


def say(result: dict) -> None:
    took, shares = result["microseconds"], result["of_copy"]
    print(f"\n{result['dtype']} {result['layout']} {result['shape']}: copy {result['copy_TB_per_s']:.2f} TB/s")
    kernels = ("moments", "normalize", "gradient_sums", "input_gradient")
    print("ours: " + ", ".join(f"{name} {took[name]:.0f} µs" for name in kernels))
    for name in sorted({key.split(",")[0] for key in shares}):
        ways = (f"{way} {took[f'{name}, {way}']:.0f} µs, {shares[f'{name}, {way}']:.2f} of copy" for way in DIRECTIONS)
        print(f"{name}: {'; '.join(ways)}")
    for way, ratio in result.get("times_as_fast_as_pytorch", {}).items():
        print(f"{way}: {ratio:.2f} times as fast as PyTorch")
    sys.stdout.flush()


def find_torch():
    try:
        import torch

        torch.ones(1, device="cuda")
        print(f"PyTorch {torch.__version__}")
        return torch
    except Exception as problem:  # whatever is wrong with it, ours can be measured
        print(f"No comparison with PyTorch: {problem}")
        return None


def compare_all(gpu, torch, arguments) -> None:
    results = []
    for shape in arguments.shapes or SHAPES:
        for dtype in DTYPES:
            for layout in LAYOUTS:
                try:
                    result = compare(gpu, torch, shape, layout, dtype, arguments.rounds)
                except Exception as problem:
                    if torch is None:
                        raise
                    print(f"Without PyTorch from here on: {type(problem).__name__}: {problem}")
                    torch = None
                    result = compare(gpu, None, shape, layout, dtype, arguments.rounds)
                say(result)
                results.append(result)
                if arguments.json:  # after each shape: the run may be cut off
                    with open(arguments.json, "w", encoding="utf-8") as output:
                        json.dump({"device": gpu.description, "results": results}, output)


def tune(gpu, arguments) -> None:
    """Every combination of `TUNINGS`, our kernels only: forward plus backward, as a share of the shipped choice."""
    shipped = {}
    for tuning in (None, *(Tuning(*numbers) for numbers in itertools.product(*TUNINGS))):
        gpu.tuning = tuning
        shares = []
        for shape, dtype, layout in itertools.product(arguments.shapes or SHAPES, DTYPES, LAYOUTS):
            try:
                took = compare(gpu, None, shape, layout, dtype, arguments.rounds)["microseconds"]
            except Exception as problem:  # too many registers, say
                shares.append(f"{type(problem).__name__}: {problem}")
                break
            whole = took["ours, forward"] + took["ours, backward"]
            shares.append(f"{whole / shipped.setdefault((shape, dtype, layout), whole):.2f}")
        print(f"{tuning or 'as shipped'}: {' '.join(shares)}", flush=True)


def parse_shape(text: str) -> tuple:
    return tuple(int(word) for word in text.split(","))


def main(words=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--shapes", type=parse_shape, nargs="+", help="N,C,H,W in place of the usual ones")
    parser.add_argument("--json", help="file for the results")
    parser.add_argument("--tune", action="store_true", help="try other numbers of threads, of packs, and of blocks")
    arguments = parser.parse_args(words)
    gpu = open_gpu()
    if gpu is None:
        return 3
    print(gpu.description)
    if arguments.tune:
        tune(gpu, arguments)
    else:
        compare_all(gpu, find_torch(), arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
