"""One layer: against contrib SyncBatchNorm, its kernels against memory, the rendezvous, and 1 to 8 devices.

    OMP_NUM_THREADS=1 python benchmarks/layer.py

Kernels: bytes that a pass must move (forward reads x twice and writes y; backward reads x and dy twice and writes dx)
divided by its time, against a triad a = b + s·c compiled and timed in the same run. The arrays together are several
times the last-level cache, and take turns, so that nothing is found in the cache.
"""

import argparse
import ctypes
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import mxnet as mx
import numpy as np
from common import interleaved, machine, milliseconds, ratio
from mxnet import gluon
from mxnet.gluon import contrib
from step_time import Bordered, random_images, step

from gluon_syncbn import SyncBatchNorm
from gluon_syncbn.backends import native

sys.path.append(str(Path(__file__).parents[1] / "tests"))
import standalone  # noqa: E402

TRIAD = """
extern "C" void triad(float* a, const float* b, const float* c, float s, long n) {
  for (long i = 0; i < n; ++i) a[i] = b[i] + s * c[i];
}
"""


def make(layer, devices, shape):
    layer = Bordered(layer)
    layer.initialize(ctx=devices)
    layer.hybridize(static_alloc=True, static_shape=True)
    inputs = random_images(shape, devices)
    for (item,) in inputs:
        item.attach_grad()
    return lambda: step(layer, inputs)


def against_contrib(rounds: int) -> None:
    devices, shape = [mx.cpu(0), mx.cpu(1)], (8, 64, 56, 56)
    layers = {
        "native": SyncBatchNorm(),
        "portable": SyncBatchNorm(backend="portable"),
        "contrib": contrib.nn.SyncBatchNorm(num_devices=2),
        "nn.BatchNorm": gluon.nn.BatchNorm(),
    }
    seconds = interleaved({name: make(layer, devices, shape) for name, layer in layers.items()}, rounds)
    print(f"\nOne layer forward and backward, 2 CPU contexts, {shape} each")
    print("| layer | median step | times as fast as contrib |\n| --- | --- | --- |")
    for name, values in seconds.items():
        print(f"| {name} | {milliseconds(values):.1f} ms | {ratio(seconds, name, 'contrib'):.1f} |")


def against_triad(rounds: int) -> None:
    outer, channels, inner = shape = (8, 64, 56 * 56)
    size, sets = outer * channels * inner, 8
    with tempfile.TemporaryDirectory() as folder:
        source, built = Path(folder) / "triad.cpp", Path(folder) / "triad.so"
        source.write_text(TRIAD)
        subprocess.run(["g++", "-O3", "-march=native", "-shared", "-fPIC", source, "-o", built], check=True)
        triad = ctypes.CDLL(str(built)).triad
    core, dims = standalone.library(), [ctypes.c_int64(number) for number in shape]
    arrays = [[np.random.RandomState(i).rand(size).astype("float32") for i in range(3)] for _ in range(sets)]
    vectors = [np.ones(channels) for _ in range(7)]
    turn = iter(range(10**9))

    def pointer(array):
        return array.ctypes.data_as(ctypes.c_void_p)

    def timed(run):
        x, dy, out = (pointer(array) for array in arrays[next(turn) % sets])
        started = time.perf_counter()
        run(x, dy, out)
        return time.perf_counter() - started

    mean, scale, beta, *rest = (pointer(vector) for vector in vectors)

    no_activation = 0, ctypes.c_double(0)

    def forward(x, dy, out):
        core.gluon_syncbn_moments(0, x, *dims, 1, rest[0], rest[1])
        core.gluon_syncbn_normalize(0, x, None, *dims, mean, scale, beta, *no_activation, out, 1)

    def backward(x, dy, out):
        of_x = [0, x, dy, None, 0, *dims, mean, scale, beta, *no_activation]
        core.gluon_syncbn_gradient_sums(*of_x, None, 0, 1, rest[0], rest[1])
        core.gluon_syncbn_input_gradient(*of_x, beta, beta, out, 0, 1)

    runs = {
        "triad": (3, lambda x, dy, out: triad(out, x, dy, ctypes.c_float(3), ctypes.c_long(size))),
        "forward": (3, forward),
        "backward": (5, backward),
    }
    seconds = interleaved({name: lambda run=run: timed(run) for name, (_, run) in runs.items()}, 10 * rounds)
    print(f"\nKernels on one core ({native.instruction_set()}), float32 {shape}")
    print("| pass | median | bytes it must move ÷ time | of the triad's |\n| --- | --- | --- | --- |")
    speed = {name: 4 * size * runs[name][0] / statistics.median(values) for name, values in seconds.items()}
    for name, values in seconds.items():
        share = speed[name] / speed["triad"]
        print(f"| {name} | {milliseconds(values):.2f} ms | {speed[name] / 1e9:.1f} GB/s | {share:.2f} |")


def rendezvous(rounds: int) -> None:
    """From the arrival of the last of 2 threads until both are released, with 4,097 float64 each."""
    size, meetings = 4097, 100 * rounds
    new, meet = standalone.library().gluon_syncbn_rendezvous_new, standalone.library().gluon_syncbn_rendezvous_bench
    new.restype = ctypes.c_void_p
    place = ctypes.c_void_p(new(b"bench", 2, ctypes.c_double(60)))
    times = [np.zeros((meetings, 2)) for _ in range(2)]  # seconds of arrival and release
    threads = [
        threading.Thread(
            target=meet,
            args=(
                place,
                rank,
                ctypes.c_int64(size),
                ctypes.c_int64(meetings),
                times[rank].ctypes.data_as(ctypes.c_void_p),
            ),
        )
        for rank in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    arrived, released = (np.maximum(times[0][:, i], times[1][:, i]) for i in range(2))
    micro = 1e6 * (released - arrived)
    standalone.library().gluon_syncbn_rendezvous_free(place)
    print(f"\nRendezvous of 2 threads with {size} float64: last arrival to all released, {meetings} meetings")
    print(f"median {np.median(micro):.1f} µs, 90% within {np.percentile(micro, 90):.1f} µs")


def more_devices(rounds: int) -> None:
    """The same total batch on 1 to 8 devices."""
    total, shape = 8, (64, 56, 56)
    layers = {}
    for count in (1, 2, 4, 8):
        devices = [mx.cpu(i) for i in range(count)]
        for name, layer in (("native", SyncBatchNorm()), ("nn.BatchNorm", gluon.nn.BatchNorm())):
            layers[f"{count} {name}"] = make(layer, devices, (total // count, *shape))
    seconds = interleaved(layers, rounds)
    print(f"\nOne layer forward and backward, a total batch of {(total, *shape)}")
    print("| devices | native | nn.BatchNorm |\n| --- | --- | --- |")
    for count in (1, 2, 4, 8):
        shown = (f"{milliseconds(seconds[f'{count} {name}']):.1f} ms" for name in ("native", "nn.BatchNorm"))
        print(f"| {count} | {' | '.join(shown)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    print(machine())
    against_triad(options.rounds)
    rendezvous(options.rounds)
    against_contrib(options.rounds)
    more_devices(options.rounds)


if __name__ == "__main__":
    main()
