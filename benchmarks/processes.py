"""The cost of synchronization over processes on this machine: one exchange, and a training step.

    OMP_NUM_THREADS=1 python benchmarks/processes.py [--engines mpi,horovod] [--sizes 2,4,8] [--rounds 3]
    OMP_NUM_THREADS=1 python benchmarks/processes.py --hosts 2,4 --sizes 4,8,16,32 [--lengths 513,4097]

Exchanges through memory that the processes share follow one another as layers' exchanges do. In other runs they go by
messages, on a thread of their own, and take turns with MPI's own collectives; with Horovod, its own ``allreduce`` of
that size is also timed, from the main thread. A step is ResNet-50's, forward and backward, with 2 processes of
one device each, and with 2 devices in one process; the two take turns.

With ``--loader`` an exchange of 4,097 numbers through MPI is timed while the main thread reads a data loader, whose 4
workers are processes, or threads of this process, and transform images in Python.

With ``--hosts`` only exchanges are timed, over so many hosts that are made here (tests/hosts, as root), with the
networks of that module: through the leaders of hosts and the memory that the processes of each share, and from each
process to each other.
"""

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time

MARK = "MEASURED "
LENGTHS = "513,4097"
EXCHANGES, STEPS, WARM_UP = 300, 12, 4
MANY = 8  # of more processes than these on this machine there are fewer exchanges
IMAGES = (4, 3, 128, 128)


def launch(engine: str, size: int, *arguments, hosts=None, memory=1) -> list:
    """The first process's measurements; with ``memory=0`` processes of a host share none."""
    from common import launcher, path_of_launchers

    variables = {**os.environ, "PATH": path_of_launchers(), "GLUON_SYNCBN_HOST_MEMORY": str(memory)}
    words = launcher(engine, size, hosts, variables=["OMP_NUM_THREADS", "GLUON_SYNCBN_HOST_MEMORY"])
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        command = [
            *words,
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


def measure_exchanges(engine: str, lengths: str) -> dict:
    """Milliseconds by length and way: median and 90th percentile of an exchange."""
    import numpy as np

    group = join_for_exchanges(engine)
    found = {}
    for length in map(int, lengths.split(",")):
        count = EXCHANGES if group.size <= MANY else EXCHANGES // 5
        way = "memory" if group.shares_memory else "messages"
        found[f"{length}, {way}, in a row"] = summary(
            group.time_exchanges(length, 10 * count if group.shares_memory else count) * 1e-6
        )
        if group.shares_memory:
            continue
        vector = np.full(length, group.rank + 1.0)
        ways = {"messages": ours(group, vector), **(ways_of_mpi(group, vector) if engine == "mpi" else {})}
        seconds = {name: [] for name in ways}

        def exchange(ways=ways, seconds=seconds, count=count):
            for number in range(1, count + 1):
                # In another order each time, the same in all processes: each way leaves them a bit apart.
                for name in random.Random(number).sample(list(ways), len(ways)):
                    started = time.perf_counter()
                    total = ways[name](number)
                    seconds[name].append(time.perf_counter() - started)
                    assert (total == group.size * (group.size + 1) / 2).all()

        on_a_thread(exchange)
        found.update({f"{length}, {name}": summary(times) for name, times in seconds.items()})
        if engine == "horovod":
            found[f"{length}, hvd.allreduce on the main thread"] = summary(horovods_own(group.size, length))
    return found


def join_for_exchanges(engine: str):
    """The group, whose processes have found out whether they share memory."""
    from gluon_syncbn.meeting.processes import processes_of

    group = join(engine)
    with processes_of(group).together("benchmark", 60):
        pass
    return group


def ours(group, vector):
    return lambda number: group.all_gather(f"rows{vector.size}", vector).sum(axis=0)


def ways_of_mpi(group, vector) -> dict:
    """MPI's own ways to the sum of all vectors: functions of the number of the exchange."""
    import numpy as np
    from mpi4py import MPI

    comm, rows, total = MPI.COMM_WORLD.Dup(), np.empty((group.size, vector.size)), np.empty_like(vector)

    def wait_for(request):
        while not request.Test():
            time.sleep(0)

    def by_gather(number):
        wait_for(comm.Iallgather(vector, rows))
        return rows.sum(axis=0)

    def by_reduce(number):
        wait_for(comm.Iallreduce(vector, total))
        return total

    return {"MPI_Iallgather": by_gather, "MPI_Iallreduce": by_reduce}


def horovods_own(size: int, length: int) -> list:
    """Seconds of Horovod's operation, from the main thread."""
    import horovod.mxnet as hvd
    import mxnet as mx

    array, seconds = mx.nd.zeros((size, length), dtype="float64"), []
    for _ in range(EXCHANGES):
        started = time.perf_counter()
        hvd.allreduce(array, name=f"own{length}", op=hvd.Sum).asnumpy()
        seconds.append(time.perf_counter() - started)
    return seconds


def measure_beside_a_loader() -> dict:
    """Milliseconds of an exchange by the work beside it."""
    import numpy as np
    from mxnet import gluon

    group = join_for_exchanges("mpi")
    run, found = ours(group, np.full(4097, group.rank + 1.0)), {}
    images = gluon.data.SimpleDataset(list(np.random.randint(0, 255, (64, 64, 64, 3)).astype("uint8")))
    for name, options in (
        ("no loader", None),
        ("4 processes", {"num_workers": 4}),
        ("4 threads", {"num_workers": 4, "thread_pool": True}),
        ("4 threads, sys.setswitchinterval(5e-4)", {"num_workers": 4, "thread_pool": True}),
    ):
        sys.setswitchinterval(5e-4 if "switch" in name else 5e-3)  # the second is Python's own
        seconds, is_over = [], threading.Event()

        def exchange(seconds=seconds, is_over=is_over):
            for _ in range(EXCHANGES):
                started = time.perf_counter()
                run(0)
                seconds.append(time.perf_counter() - started)
            is_over.set()

        thread = threading.Thread(target=exchange)
        loader = gluon.data.DataLoader(images.transform(in_python), 4, **options) if options else None
        thread.start()
        while not is_over.is_set():
            if loader is None:
                is_over.wait()
            else:
                for _ in loader:
                    if is_over.is_set():
                        break
        thread.join()
        found[name] = summary(seconds)
    return found


def in_python(image):
    """The time of an augmentation in Python: some milliseconds, most of them in the interpreter."""
    total = 0
    for value in image[::2, ::2].ravel().tolist():
        total += value * value
    return image.astype("float32") / (1 + total)


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


def work(engine: str, what: str, how: str = "") -> None:
    if what == "step":
        found = measure_steps(engine, int(how))
    else:
        found = measure_beside_a_loader() if what == "loader" else measure_exchanges(engine, how)
    from gluon_syncbn.distributed.default import is_first_of_job

    if is_first_of_job():
        sys.stdout.write(MARK + json.dumps(found) + "\n")
        sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default="mpi,horovod")
    parser.add_argument("--sizes", default="2,4,8")
    parser.add_argument("--lengths", default=LENGTHS, help="of exchanges, in float64 numbers")
    parser.add_argument("--rounds", type=int, default=3, help="how often the two kinds of a step take turns")
    parser.add_argument("--hosts", help="exchanges only, over so many hosts that are made here: 2,4")
    parser.add_argument("--loader", action="store_true", help="exchanges beside a data loader only")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return work(*options.worker)
    from common import machine

    print(machine())
    engines, sizes = options.engines.split(","), list(map(int, options.sizes.split(",")))
    print("\none exchange, ms: median, 90th percentile")
    if options.loader:
        for memory in (1, 0):
            show(f"mpi, 2 processes, {'memory' if memory else 'messages'}", launch("mpi", 2, "loader", memory=memory))
        return None
    if options.hosts:
        return measure_hosts(engines, sizes, list(map(int, options.hosts.split(","))), options.lengths)
    for engine in engines:
        for size in sizes:
            for memory in (1, 0):
                show(f"{engine}, {size} processes", launch(engine, size, "exchange", options.lengths, memory=memory))
    print("\nResNet-50, ms a step: 2 devices in one process; 2 processes with one each; ratio of throughput")
    for engine in engines:
        pairs = [(launch("none", 1, "step", 2), launch(engine, 2, "step", 1)) for _ in range(options.rounds)]
        medians = [[1e3 * statistics.median(seconds) for seconds in pair] for pair in pairs]
        together, apart = (statistics.median(column) for column in zip(*medians))
        shown = statistics.median(one / other for one, other in medians)
        print(f"{engine}: {together:.0f}, {apart:.0f}, {shown:.2f}", flush=True)


def show(what: str, found: dict) -> None:
    for name, (median, ninety) in found.items():
        print(f"{what}, {name}: {median:.3f}, {ninety:.3f}", flush=True)


def measure_hosts(engines: list, sizes: list, counts: list, lengths: str) -> None:
    from common import module_of_hosts

    made = module_of_hosts()
    for engine, count, network in itertools.product(engines, counts, (made.CLUSTER, made.GIGABIT)):
        for size, memory in itertools.product(sizes, (1, 0)):
            with made.Hosts(count, network) as hosts:
                show(
                    f"{engine}, {size} processes on {count} hosts, {network}",
                    launch(engine, size, "exchange", lengths, hosts=hosts, memory=memory),
                )


if __name__ == "__main__":
    main()
