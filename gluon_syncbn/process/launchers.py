"""Whether this process is one of several of a job, started by Horovod or MPI, which do not synchronize yet."""

import os
import warnings
from typing import Optional

# What each launcher tells a process of how many there are. (Slurm's variables are also set where only one was started.)
_SIZES = {"HOROVOD_SIZE": "Horovod", "OMPI_COMM_WORLD_SIZE": "MPI", "PMI_SIZE": "MPI", "MV2_COMM_WORLD_SIZE": "MPI"}
_has_warned = False


def _job() -> Optional[str]:
    """ "4 processes of Horovod", if it is a job of several."""
    for variable, launcher in _SIZES.items():
        size = os.environ.get(variable, "")
        if size.isdigit() and int(size) > 1:
            return f"{size} processes of {launcher}"
    return None


def warn_of_several_processes(where: str) -> None:
    """Warn (UserWarning), once, where a synchronized layer is made in such a job; the text starts with ``where``."""
    global _has_warned
    job = None if _has_warned else _job()
    if job is None:
        return
    _has_warned = True
    warnings.warn(
        f"{where}: this is one of {job}. Synchronized layers synchronize the devices of each process only, so that one "
        f"process per device is plain Batch Normalization. Use one process with several devices.",
        stacklevel=4,
    )
