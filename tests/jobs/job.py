"""What the scripts that run in several processes share."""

import os
import socket
import sys

import mxnet as mx
import numpy as np

import gluon_syncbn
from gluon_syncbn.meeting import processes


def join(engine: str):
    """The process group of this process; Horovod is initialized as users do.

    JOB_MOST_ROWS and JOB_MOST_BYTES let few processes with short vectors meet in pairs, as large jobs do.
    """
    processes.MOST_ROWS = int(os.environ.get("JOB_MOST_ROWS", processes.MOST_ROWS))
    processes.MOST_BYTES = int(os.environ.get("JOB_MOST_BYTES", processes.MOST_BYTES))
    if engine == "horovod":
        import horovod.mxnet as hvd

        hvd.init()
    return gluon_syncbn.init_process_group(engine)


def cpus(count: int) -> list:
    return [mx.cpu(number) for number in range(count)]


def shares(group, items: list, devices: int) -> list:
    """Of one item per device of the whole job, those of this process."""
    return items[group.rank * devices : (group.rank + 1) * devices]


def rows_of(group, shards: list, devices: int) -> slice:
    """Where this process's shards lie in the whole batch."""
    sizes = [len(shard) for shard in shards]
    return slice(sum(sizes[: group.rank * devices]), sum(sizes[: (group.rank + 1) * devices]))


def say(*words) -> None:
    """One line, in one piece; also to a file in the folder JOB_SAID, as a host may have lost its launcher."""
    line = " ".join(map(str, words)) + "\n"
    if "JOB_SAID" in os.environ:
        name = f"{socket.gethostname()}.{os.getpid()}"
        with open(os.path.join(os.environ["JOB_SAID"], name), "a", encoding="utf-8") as file:
            file.write(line)
    sys.stdout.write(line)
    sys.stdout.flush()


def same_everywhere(group, array: np.ndarray) -> bool:
    """Whether all processes have the same bits."""
    rows = group.all_gather(
        "test.same", same_everywhere.calls, array.astype(np.float64).ravel(), range(group.size), never
    )
    same_everywhere.calls += 1
    return bool((rows == rows[0]).all())


same_everywhere.calls = 1 << 40  # above all rounds of steps that are given up


def never():
    """Ends no wait."""
