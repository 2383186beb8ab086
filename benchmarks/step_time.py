"""Time of a full training step with SyncBatchNorm against nn.BatchNorm and MXNet's own contrib SyncBatchNorm.

    OMP_NUM_THREADS=1 python benchmarks/step_time.py

8 × (conv 3×3 with 64 channels, norm, relu), static hybridized, several CPU contexts, one process. The nets take turns
step by step, so that a machine that changes its speed changes it for all; the ratio is that of each pair of steps.
contrib's layer runs here only because gluon_syncbn has set MXNET_CPU_TEMP_COPY: by default it hangs.
"""

import argparse
import os
import platform
import statistics
import time

import mxnet as mx
from mxnet import autograd
from mxnet.gluon import contrib, nn

import gluon_syncbn

LAYERS = {
    "nn.BatchNorm": lambda devices: nn.BatchNorm(),
    "gluon_syncbn": lambda devices: gluon_syncbn.SyncBatchNorm(),
    "contrib": lambda devices: contrib.nn.SyncBatchNorm(num_devices=devices),
}


def build(make_layer, devices, depth: int = 8, channels: int = 64):
    net = nn.HybridSequential()
    for _ in range(depth):
        net.add(nn.Conv2D(channels, 3, padding=1), make_layer(len(devices)), nn.Activation("relu"))
    net.initialize(ctx=devices)
    net.hybridize(static_alloc=True, static_shape=True)
    return net


def step(net, inputs) -> float:
    started = time.perf_counter()
    with autograd.record():
        outputs = [net(item) for item in inputs]
    autograd.backward(outputs)
    mx.nd.waitall()
    return time.perf_counter() - started


def processor() -> str:
    with open("/proc/cpuinfo") as lines:
        return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--batch-per-device", type=int, default=8)
    parser.add_argument("--side", type=int, default=56)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    devices = [mx.cpu(i) for i in range(options.devices)]
    shape = (options.batch_per_device, 64, options.side, options.side)
    inputs = [mx.nd.random.normal(shape=shape, ctx=device) for device in devices]
    nets = {name: build(make_layer, devices) for name, make_layer in LAYERS.items()}
    for net in nets.values():
        for _ in range(3):
            step(net, inputs)
    times = {name: [] for name in nets}
    for _ in range(options.steps):
        for name, net in nets.items():
            times[name].append(step(net, inputs))
    print(
        f"{processor()}, {os.cpu_count()} cores; Python {platform.python_version()}, MXNet {mx.__version__}; "
        f"OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS')}, {options.devices} CPU contexts, {shape} each"
    )
    print("| layer | median step | throughput against nn.BatchNorm |\n| --- | --- | --- |")
    for name, seconds in times.items():
        ratio = statistics.median(a / b for a, b in zip(times["nn.BatchNorm"], seconds))
        print(f"| {name} | {1e3 * statistics.median(seconds):.0f} ms | {ratio:.2f} |")


if __name__ == "__main__":
    main()
