"""The kernels on a GPU, without MXNet: how fast they are, beside PyTorch's and a plain copy.

    pip install cupy-cuda12x torch numpy   # and this package, compiled
    python tests/check_kernels.py          # whether they are right
    python benchmarks/gpu.py [--json FILE]
    python benchmarks/gpu.py --code FOLDER # registers and memory of each kernel; its PTX
    python benchmarks/gpu.py --latency     # from a launch to its last number, and so on

The kernels are compiled and launched by the package's own code. The result is the number of bytes that a direction must
move (forward reads x twice and writes y; backward reads x and dy twice and writes dx), divided by its time, as a share
of the rate of a device-to-device copy in the same run. Kernels on small tensors are judged by the time that they take
beyond a kernel that does nothing and a copy's time for their bytes. PyTorch does the same work with the primitives of
its SyncBatchNorm. All take turns. Times are medians of CUDA events; the file has all of them. Tensors take turns, too,
so that none is found in the cache.

Without CuPy or a GPU it says so and ends with status 3.
"""

import argparse
import glob
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
from cupy_gpu import measure_latencies, open_gpu
from gpu_kernels import KINDS, KernelKind, Passes, options

# ResNet-50's from the stem to the last stage; a detector's: the stem at full size, a level of its pyramid; two whose
# channels are no power of two.
SHAPES = [(32, 64, 112, 112), (32, 256, 56, 56), (32, 512, 28, 28), (32, 1024, 14, 14), (32, 2048, 7, 7)]
SHAPES += [(2, 64, 800, 1333), (2, 256, 100, 168), (32, 144, 24, 24), (32, 272, 28, 28)]
LAYOUTS = ["NCHW", "NHWC"]
DTYPES = ["float32", "float16"]
FOLLOWED = {"relu": ("relu", False, False), "skip": ("relu", True, False), "leaky in place": ("leaky", False, True)}
ROTATE = 1 << 30  # bytes of tensors that take turns
SMALL = 30 << 20  # bytes; smaller tensors are judged by time
DIRECTIONS = {"forward": 3, "backward": 5}  # how often each must read or write as many bytes as a tensor has
KERNELS = {"moments": 1, "normalize": 2, "gradient_sums": 2, "input_gradient": 3}  # likewise
BEYOND = 6.0  # microseconds: the goal for kernels on small tensors
OF_COPY, OF_PYTORCH = 0.85, 1.2


class Ours:
    """Forward and backward of one device, without the exchange through the host, which is the same for all."""

    def __init__(self, gpu, layout, x, y, dy, dx, kind=("none", False, False)):
        batch, (channels, size) = x.shape[0], split(x.shape, layout)
        shape = (batch, channels, size) if layout == "NCHW" else (batch * size, channels, 1)
        self._x, self._y, self._dy, self._dx = (item.reshape(shape) for item in (x, y, dy, dx))
        activation, self._has_residual, in_place = kind
        told = {"activation": activation, "has_residual": self._has_residual, "in_place": in_place}
        self._forward = Passes(gpu, x.dtype.name, shape, self._x, self._y, **told)
        self._backward = Passes(gpu, x.dtype.name, shape, self._x, self._dy, self._dx, **told)
        self._backward.saved = self._forward.saved
        real = self._forward.real
        ones = gpu.cupy.ones
        self._vectors, self._running, self._gradients = ([ones(channels, real) for _ in range(2)] for _ in range(3))
        self._count = batch * size

    def moments(self):
        self._forward.moments(self._x)

    def normalize(self):
        added = {"residual": self._dx} if self._has_residual else {}
        self._forward.normalize(self._x, self._y, *self._vectors, *self._running, self._count, **added)

    def forward(self):
        self.moments()
        self.normalize()

    def gradient_sums(self):
        added = {"y": self._y, "d_residual": self._dx} if self._has_residual else {}
        self._backward.gradient_sums(self._x, self._dy, *self._vectors, *self._gradients, **added)

    def input_gradient(self):
        self._backward.input_gradient(self._x, self._dy, self._dx, *self._vectors)

    def backward(self):
        self.gradient_sums()
        self.input_gradient()


class Torch:
    """The same with the primitives of torch.nn.SyncBatchNorm."""

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
    cupy.copyto(*busy)
    start.record()
    run()
    end.record()
    end.synchronize()
    return 1e3 * cupy.cuda.get_elapsed_time(start, end)


def compare(gpu, torch, shape, layout: str, dtype: str, rounds: int, others=()) -> dict:
    """Medians in microseconds, and the numbers that they are shares of; ``others`` are kinds of layers by name."""
    cupy = gpu.cupy
    if layout == "NHWC":
        shape = (shape[0], *shape[2:], shape[1])
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    sets = max(2, -(-ROTATE // (4 * size))) if size > 1 << 20 else 2
    rng = cupy.random.default_rng(0)
    busy = [cupy.zeros(ROTATE if size > 1 << 20 else 1024, "uint8") for _ in range(2)]
    tensors = [[rng.standard_normal(shape, np.float32).astype(dtype) for _ in range(4)] for _ in range(sets)]
    nets = {"ours": [Ours(gpu, layout, *item) for item in tensors]}
    for name, told in dict(others).items():
        try:
            nets[name] = [Ours(gpu, layout, *item, **told) for item in tensors]
            nets[name][0].forward()
            nets[name][0].backward()
        except RuntimeError as problem:  # more shared memory, say, than a block may have
            print(f"without {name}: {problem}")
            del nets[name]
    if torch is not None:
        nets["PyTorch"] = [Torch(torch, layout, *item) for item in tensors]

    nothing = cupy.zeros(1, "uint8")

    def runs(here):
        yield "empty", lambda: nothing.fill(0)
        yield "copy", lambda: cupy.copyto(tensors[here][3], tensors[here][0])
        for name, items in nets.items():
            for part in (*DIRECTIONS, *(KERNELS if name != "PyTorch" else ())):
                yield f"{name}, {part}", getattr(items[here], part)

    times = {name: [] for name, _ in runs(0)}
    for i in range(rounds + 3):
        for name, run in runs(i % sets):
            took = microseconds(cupy, busy, run)
            if i >= 3:  # the first compile and allocate
                times[name].append(round(took, 2))
    medians = {name: statistics.median(values) for name, values in times.items()}
    bandwidth = 2 * size / medians["copy"]  # bytes per microsecond
    result = {"dtype": dtype, "layout": layout, "shape": shape, "rounds": rounds, "copy_TB_per_s": bandwidth / 1e6}
    result.update(bytes=size, microseconds=medians, times=times)
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
    result["missed"] = missed(result)
    return result


def beyond(result: dict, name: str, kernel: str) -> float:
    """Microseconds of a kernel beside an empty one's, and of its bytes at a copy's rate."""
    took = result["microseconds"]
    return took[f"{name}, {kernel}"] - took["empty"] - KERNELS[kernel] / 2 * (took["copy"] - took["empty"])


def missed(result: dict) -> list:
    """Which goals: the time of kernels on small tensors, the share of a copy of large ones; the ratio to PyTorch."""
    if result["bytes"] < SMALL:
        times = [(kernel, beyond(result, "ours", kernel)) for kernel in KERNELS]
        goals = [(f"{kernel} {time:.1f} µs beyond", time > BEYOND) for kernel, time in times]
    else:
        shares = [(way, result["of_copy"][f"ours, {way}"]) for way in DIRECTIONS]
        goals = [(f"{way} {share:.2f} of copy", share < OF_COPY) for way, share in shares]
    for way, ratio in result.get("times_as_fast_as_pytorch", {}).items():
        goals.append((f"{way} {ratio:.2f} times PyTorch", ratio < OF_PYTORCH))
    return [what for what, is_missed in goals if is_missed]


def say(result: dict) -> None:
    took, shares = result["microseconds"], result["of_copy"]
    print(f"\n{result['dtype']} {result['layout']} {result['shape']}: copy {result['copy_TB_per_s']:.2f} TB/s, "
          f"{took['copy']:.1f} µs; an empty kernel {took['empty']:.1f} µs")  # fmt: skip
    for name in dict.fromkeys(key.rsplit(",", 1)[0] for key in shares):
        ways = [f"{way} {took[f'{name}, {way}']:.0f} µs, {shares[f'{name}, {way}']:.2f} of copy" for way in DIRECTIONS]
        if name != "PyTorch":
            ways += [f"{kernel} {took[f'{name}, {kernel}']:.1f}" for kernel in KERNELS]
        print(f"{name}: {'; '.join(ways)}")
    for way, ratio in result.get("times_as_fast_as_pytorch", {}).items():
        print(f"{way}: {ratio:.2f} times as fast as PyTorch")
    print(f"goals missed: {', '.join(result['missed']) or 'none'}", flush=True)


def find_torch():
    try:
        import torch

        torch.ones(1, device="cuda")
        print(f"PyTorch {torch.__version__}")
        return torch
    except Exception as problem:  # with any error of PyTorch's, ours can be measured
        print(f"No comparison with PyTorch: {problem}")
        return None


def compare_all(gpu, torch, arguments) -> None:
    kinds = {name: {"kind": kind} for name, kind in FOLLOWED.items()}
    results = []
    told = [("none", False, False), *FOLLOWED.values()]
    gpu.compile([KernelKind(dtype, *kind) for dtype in DTYPES for kind in told])
    for shape, dtype, layout in itertools.product(arguments.shapes or SHAPES, DTYPES, LAYOUTS):
        others = kinds if shape == (arguments.shapes or SHAPES)[-1] else {}
        try:
            result = compare(gpu, torch, shape, layout, dtype, arguments.rounds, others)
        except Exception as problem:
            if torch is None:
                raise
            print(f"Without PyTorch from here on: {type(problem).__name__}: {problem}")
            torch = None
            result = compare(gpu, None, shape, layout, dtype, arguments.rounds, others)
        say(result)
        results.append(result)
        if arguments.json:  # after each shape: the run may be cut off
            with open(arguments.json, "w", encoding="utf-8") as output:
                json.dump({"device": gpu.description, "results": results}, output)


def show_code(gpu, folder: Path) -> dict:
    """Print the driver's numbers of each kernel, and keep its PTX."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    gpu.compile(KINDS)
    for kind in KINDS:
        name = kind.mark()
        found[name] = gpu.attributes(kind)
        for kernel, numbers in found[name].items():
            print(f"{name} {kernel}: {', '.join(f'{number} {key}' for key, number in numbers.items())}", flush=True)
    architectures = {numbers["binary_version"] for kernels in found.values() for numbers in kernels.values()}
    for kind in KINDS:
        file = folder / f"kernels_{kind.mark()}.ptx"
        file.write_bytes(gpu.ptx[options(kind)])
        if not disassemble(file, max(architectures)):
            print(f"{file.name}: no machine code; ptxas and nvdisasm of the toolkit make it")
    return found


def disassemble(file: Path, architecture: int) -> bool:
    """Machine code for this GPU beside the file, as the toolkit makes it, if there is one that can."""
    paths = os.pathsep.join([os.environ.get("PATH", ""), *sorted(glob.glob("/usr/local/cuda*/bin"))])
    ptxas, nvdisasm = (shutil.which(tool, path=paths) for tool in ("ptxas", "nvdisasm"))
    if not ptxas or not nvdisasm:
        return False
    cubin = file.with_suffix(".cubin")
    done = subprocess.run([ptxas, f"-arch=sm_{architecture}", file, "-o", cubin], capture_output=True)
    if done.returncode != 0:
        return False
    with open(file.with_suffix(".sass"), "w") as code:
        subprocess.run([nvdisasm, "-c", cubin], stdout=code, check=False)
    cubin.unlink()
    return True


def show_latencies(gpu, rounds: int) -> dict:
    """Of a small layer: the parts of a direction beside the two kernels' own time, in microseconds."""
    found = {}
    for shape in ((2, 64, 4), (32, 2048, 49)):
        for part, times in measure_latencies(gpu, KernelKind("float32"), shape, rounds).items():
            low, middle, high = np.percentile(times, [0, 50, 99])
            print(f"{shape} {part}: {low:.1f} µs at least, {middle:.1f} median, {high:.1f} in 99 of 100", flush=True)
            found[f"{shape} {part}"] = [round(float(item), 2) for item in np.sort(times)]
    return found


def parse_shape(text: str) -> tuple:
    return tuple(int(word) for word in text.split(","))


def main(words=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--shapes", type=parse_shape, nargs="+", help="N,C,H,W in place of the usual ones")
    parser.add_argument("--json", help="file for the results")
    parser.add_argument("--code", type=Path, metavar="FOLDER", help="registers, memory and PTX, instead of speed")
    parser.add_argument("--latency", action="store_true", help="of launches, instead of speed")
    arguments = parser.parse_args(words)
    gpu = open_gpu()
    if gpu is None:
        return 3
    print(gpu.description)
    if arguments.code or arguments.latency:
        found = show_code(gpu, arguments.code) if arguments.code else show_latencies(gpu, 20 * arguments.rounds)
        if arguments.json:
            with open(arguments.json, "w", encoding="utf-8") as output:
                json.dump({"device": gpu.description, "found": found}, output)
        return 0
    compare_all(gpu, find_torch(), arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
