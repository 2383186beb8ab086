"""What synchronizing over processes costs on this machine: one exchange, and a training step.

    OMP_NUM_THREADS=1 python benchmarks/processes.py [--engines mpi,horovod] [--sizes 2,4,8] [--rounds 3]

An exchange is timed on a thread of its own, as in an operator, while the main thread waits. With Horovod, its own
``allreduce`` of that size is also timed, from the main thread. A step is that of ResNet-50, forward and backward, with
2 processes of one device each, and with 2 devices in one process; the two take turns.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time

MARK = "MEASURED "
LENGTHS = (129, 513, 4097)
EXCHANGES, STEPS, WARM_UP = 600, 12, 4
IMAGES = (4, 3, 128, 128)


def launch(engine: str, size: int, *arguments) -> list:
    """What the first process measured."""
    from common import launcher, path_of_launchers

    variables = {**os.environ, "PATH": path_of_launchers()}
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        command = [
            *launcher(engine, size),
            sys.executable,
            os.path.abspath(__file__),
            "--worker",
            engine,
            *map(str, arguments),
        ]
        subprocess.run(command, env=variables, check=True, stdout=output, stderr=subprocess.STDOUT, timeout=1800)
        output.seek(0)
        (line,) = [line for line in output if MARK in line]
    return json.loads(line.split(MARK)[1])


def join(engine: str):
    import gluon_syncbn

    if engine == "horovod":
        import horovod.mxnet as hvd

        hvd.init()
    return gluon_syncbn.init_process_group(engine)


def on_a_thread(work) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def measure_exchanges(engine: str) -> dict:
    """Milliseconds by length: median and 90th percentile of an exchange, and Horovod's own."""
    import mxnet as mx
    import numpy as np

    from gluon_syncbn.meeting.pairs import reduce_in_pairs

    group = join(engine)
    everyone = range(group.size)
    found = {}
    for length in LENGTHS:
        vector, seconds, in_pairs = np.full(length, group.rank + 1.0), [], []

        def in_rows(number, length=length, vector=vector):
            return group.all_gather(f"rows{length}", number, vector, everyone, lambda: None).sum(axis=0)

        def by_pairs(number, length=length, vector=vector):
            def meet(part, brought, partner):
                pair = sorted((group.rank, partner))
                return group.all_gather(f"pairs{length}.{part}", number, brought, pair, lambda: None)

            return reduce_in_pairs(vector, group.rank, everyone, lambda rows: rows.sum(axis=0), meet)

        def exchange(seconds=seconds, in_pairs=in_pairs, runs=(in_rows, by_pairs)):
            for number in range(1, EXCHANGES + 1):
                for run, times in zip(runs, (seconds, in_pairs)):
                    if times is in_pairs and not group.meets_in_pairs:
                        continue
                    started = time.perf_counter()
                    total = run(number)
                    times.append(time.perf_counter() - started)
                    assert (total == group.size * (group.size + 1) / 2).all()

        on_a_thread(exchange)
        found[length] = summary(seconds)
        if in_pairs:
            found[f"{length} in pairs"] = summary(in_pairs)
        if engine == "horovod":
            import horovod.mxnet as hvd

            array, own = mx.nd.zeros((group.size, length), dtype="float64"), []
            for _ in range(EXCHANGES):
                started = time.perf_counter()
                hvd.allreduce(array, name=f"own{length}", op=hvd.Sum).asnumpy()
                own.append(time.perf_counter() - started)
            found[f"{length} by hvd.allreduce on the main thread"] = summary(own)
    return found


def summary(seconds: list) -> list:
    ordered = sorted(seconds[len(seconds) // 10 :])
    return [1e3 * statistics.median(ordered), 1e3 * ordered[int(0.9 * len(ordered))]]


def measure_steps(engine: str, devices: int) -> list:
    """Seconds of each step of ResNet-50 on this process's devices."""
    import mxnet as mx
    import numpy as np
    from gluoncv import model_zoo
    from mxnet import autograd

    import gluon_syncbn

    if engine != "none":
        join(engine)
    contexts = [mx.cpu(number) for number in range(devices)]
    net = model_zoo.get_model("resnet50_v1b", classes=10)
    gluon_syncbn.convert_sync_batchnorm(net)
    net.initialize(mx.init.Xavier(), ctx=contexts)
    net.hybridize(static_alloc=True, static_shape=True)
    inputs = [mx.nd.array(np.random.standard_normal(IMAGES), ctx=context) for context in contexts]
    seconds = []
    for _ in range(WARM_UP + STEPS):
        mx.nd.waitall()
        started = time.perf_counter()
        with autograd.record():
            outputs = [net(item).sum() for item in inputs]
        autograd.backward(outputs)
        mx.nd.waitall()
        seconds.append(time.perf_counter() - started)
    return seconds[WARM_UP:]


def work(engine: str, what: str, devices: str = "1") -> None:
    found = measure_exchanges(engine) if what == "exchange" else measure_steps(engine, int(devices))
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("HOROVOD_RANK", 0)))
    if rank == 0:
        sys.stdout.write(MARK + json.dumps(found) + "\n")
        sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default="mpi,horovod")
    parser.add_argument("--sizes", default="2,4,8")
    parser.add_argument("--rounds", type=int, default=3, help="how often the two kinds of a step take turns")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return work(*options.worker)
    from common import machine

    print(machine())
    engines = options.engines.split(",")
    print("\none exchange, ms: median, 90th percentile")
    for engine in engines:
        for size in options.sizes.split(","):
            for name, (median, ninety) in launch(engine, int(size), "exchange").items():
                print(f"{engine}, {size} processes, {name} float64: {median:.3f}, {ninety:.3f}", flush=True)
    print("\nResNet-50, ms a step: 2 devices in one process; 2 processes with one each; ratio of throughput")
    for engine in engines:
        pairs = [(launch("none", 1, "step", 2), launch(engine, 2, "step", 1)) for _ in range(options.rounds)]
        medians = [[1e3 * statistics.median(seconds) for seconds in pair] for pair in pairs]
        together, apart = (statistics.median(column) for column in zip(*medians))
        shown = statistics.median(one / other for one, other in medians)
        print(f"{engine}: {together:.0f}, {apart:.0f}, {shown:.2f}", flush=True)


if __name__ == "__main__":
    main()
