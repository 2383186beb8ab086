"""Whether this process is one of several of a job, and who started it."""

import functools
import os
import warnings
from typing import NamedTuple, Optional

from gluon_syncbn.base.walk import users_line

# Of the two variables, ...SIZE and ...RANK, in which a launcher gives the number of processes and that of this one.
# (Slurm's are also set where only one was started.)
_PREFIXES = {"HOROVOD_": "Horovod", "OMPI_COMM_WORLD_": "MPI", "PMI_": "MPI", "MV2_COMM_WORLD_": "MPI"}


class Job(NamedTuple):
    launcher: str  # 'Horovod' or 'MPI'
    size: int  # in processes
    rank: int


@functools.lru_cache(maxsize=None)  # each imperative call of a layer may ask
def job_of_launcher() -> Optional[Job]:
    """The job of several processes that this one belongs to, as its launcher says; None if it is alone."""
    for prefix, launcher in _PREFIXES.items():
        size = os.environ.get(f"{prefix}SIZE", "")
        if size.isdigit() and int(size) > 1:
            return Job(launcher, int(size), int(os.environ.get(f"{prefix}RANK", "0")))
    return None


def is_first_of_job() -> bool:
    """Whether this process, of its job, is to say what concerns all; True if it is alone."""
    job = job_of_launcher()
    return job is None or job.rank == 0


def warn_of_several_processes(where: str) -> None:
    """Warn (UserWarning) where a layer of such a job synchronizes within its process; starts with ``where``."""
    job = job_of_launcher()
    if job is None:
        return
    warnings.warn(
        f"{where}: this is one of {job.size} processes of {job.launcher}, and no process group was chosen. Layers "
        f"synchronize the devices of each process only, so that one process per device is plain Batch "
        f"Normalization. gluon_syncbn.init_process_group('{job.launcher.lower()}') before the net is made, or the "
        f"environment variable GLUON_SYNCBN_PROCESS_GROUP={job.launcher.lower()}, makes them synchronize over all "
        f"processes; 'none' silences this.",
        stacklevel=users_line(),
    )
