"""How few temp-space slots (MXNET_CPU_TEMP_COPY) are enough for several CPU contexts, and what they cost in memory.

    OMP_NUM_THREADS=1 python benchmarks/slots.py

Each line is a process of its own: 30 static steps of a net of step_time.py on 2 CPU contexts. HUNG means that a layer
waited 10 s for a device that could not come.
"""

import argparse
import os
import subprocess
import sys

SLOTS = [64, 128, 256, 512, 1024, 16384]


def child(net_name: str, backend: str) -> None:
    import mxnet as mx
    import psutil
    from step_time import NETS, build, step

    devices = [mx.cpu(0), mx.cpu(1)]
    make, make_inputs, shape = NETS[net_name]
    net = build(make, devices, backend=None if backend == "nn.BatchNorm" else backend)
    inputs = make_inputs(shape, devices)
    try:
        for _ in range(30):
            step(net, inputs)
        print(f"{psutil.Process().memory_info().rss / 2**20:.0f} MiB")
    except mx.MXNetError:
        print("HUNG")
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(*options.child)
        return
    print("| net | layer | " + " | ".join(f"{slots} slots" for slots in SLOTS) + " |")
    print("| --- | --- |" + " --- |" * len(SLOTS))
    for net in ("resnet50", "detector"):
        for backend in ("nn.BatchNorm", "native", "portable"):
            told = []
            for slots in SLOTS:
                environment = {**os.environ, "MXNET_CPU_TEMP_COPY": str(slots), "GLUON_SYNCBN_TIMEOUT": "10"}
                command = [sys.executable, __file__, "--child", net, backend]
                done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
                told.append((done.stdout.strip().splitlines() or ["FAILED"])[-1])
            print(f"| {net} | {backend} | " + " | ".join(told) + " |", flush=True)


if __name__ == "__main__":
    main()
