"""The processes that a layer synchronizes with: its own choice, or the choice that the process makes for all layers."""

import functools
import os
import threading
import warnings
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from gluon_syncbn.base.walk import users_line
from gluon_syncbn.distributed.horovod import HorovodProcessGroup
from gluon_syncbn.distributed.mpi import MPIProcessGroup
from gluon_syncbn.distributed.process_group import (
    NAMES,
    CommunicatorError,
    ProcessGroup,
    ProcessGroupLike,
    check_process_group,
    is_process_set,
)

VARIABLE = "GLUON_SYNCBN_PROCESS_GROUP"
_NOT_CHOSEN = object()
# The prefixes of the variables ...SIZE and ...RANK, in which a launcher gives the number of processes and the number of
# this process. (Slurm's variables are not here: it also sets them if it starts only one process.)
_PREFIXES = {"HOROVOD_": "Horovod", "OMPI_COMM_WORLD_": "MPI", "PMI_": "MPI", "MV2_COMM_WORLD_": "MPI"}


class _Groups:
    """The process groups of this process."""

    def __init__(self) -> None:
        self.default: Any = _NOT_CHOSEN
        self.has_warned = False  # that nothing was chosen
        # With the user's choice, in the order in which they were made; by name of the communicator, or by id of the
        # user's object.
        self.made: Dict[Any, Tuple[Any, ProcessGroup]] = {}
        self.lock = threading.RLock()
        self.process = os.getpid()


_groups = _Groups()


def init_process_group(process_group: Optional[ProcessGroupLike] = "auto") -> Optional[ProcessGroup]:
    """Synchronize layers over the processes of a job from now on, not only over the devices of this process.

    Call it in every process, before the net is made. For scripts that nobody edits there are `gluon_syncbn.run` and the
    environment variable ``GLUON_SYNCBN_PROCESS_GROUP``, with the same names.

    Parameters
    ----------
    process_group : str, ProcessGroup, mpi4py.MPI.Comm or horovod.mxnet.ProcessSet
        'horovod' (after ``hvd.init()``) or 'mpi' for all processes of the job; 'auto' for the launcher's own, and
        'mpi' where both are possible, which is faster; 'none' for this process alone. Or some of the processes, as a
        communicator, which is collective among them, or a process set.

    Returns
    -------
    ProcessGroup or None
        With ``name``, ``rank`` and ``size``; None where this process is alone.

    Raises
    ------
    RuntimeError
        The communicator is not installed, or not initialized, or the other processes did not come within 5 minutes.
    ValueError, TypeError
        ``process_group`` is something else.

    Examples
    --------
    >>> hvd.init()
    >>> gluon_syncbn.init_process_group("horovod")
    >>> net.initialize(ctx=mx.gpu(hvd.local_rank()))
    """
    with _groups.lock:
        _groups.default = None  # an error leaves no group
        _groups.default = find(process_group, "gluon_syncbn.init_process_group")
        return _groups.default


def find(process_group: Optional[ProcessGroupLike], where: str) -> Optional[ProcessGroup]:
    """The processes that a layer with this option synchronizes with; None if that is this process alone.

    Without an option, `init_process_group` or the environment variable has chosen. If neither has, in a job of several
    processes, this warns once. Raises as `init_process_group`. All texts start with ``where``.
    """
    with _groups.lock:
        if process_group is not None:
            return _made(process_group, where)
        if _groups.default is _NOT_CHOSEN:
            name = os.environ.get(VARIABLE)
            if not name:
                if not _groups.has_warned:
                    _groups.has_warned = True
                    _warn_of_several_processes(where)
                return None
            if name not in NAMES:
                raise ValueError(f"{VARIABLE} must be one of {', '.join(NAMES)}, not {name!r}.")
            _groups.default = _made(name, VARIABLE)
        return _groups.default


def is_connected(process_group: Optional[ProcessGroupLike]) -> bool:
    """Whether `find` has connected these processes already, or has nothing to connect."""
    if not isinstance(process_group, str) or process_group == "none":
        return True
    name = name_of_communicator() if process_group == "auto" else process_group
    with _groups.lock:
        return name == "none" or name in _groups.made


def has_groups() -> bool:
    return bool(_groups.made)


def groups_in_use() -> List[ProcessGroup]:
    """All groups of several processes, in the order in which they were made, which is the same on all processes.

    A group is never dropped. A net that has one may be, at another time on each process: when Python's collector runs.
    """
    return [group for group in _all_groups() if group.size > 1]


def _all_groups() -> List[ProcessGroup]:
    """All groups, each once: a user may pass a group that has a name, too."""
    with _groups.lock:
        return list(dict.fromkeys(group for _, group in _groups.made.values()))


def leave_processes() -> None:
    """Leave all groups: this process ends. A forked child does not belong to the job."""
    if os.getpid() == _groups.process:
        for group in _all_groups():
            group.leave()


def _made(process_group, where: str) -> Optional[ProcessGroup]:
    """The group of these processes, which is made once; None if it is this process alone."""
    check_process_group(process_group, where)
    if process_group == "auto":
        process_group = name_of_communicator()
    if process_group == "none":
        return None
    is_name = isinstance(process_group, str)
    key, some = (process_group, None) if is_name else (id(process_group), process_group)
    try:
        if key not in _groups.made:
            is_horovod = process_group == "horovod" or is_process_set(process_group)
            kind = HorovodProcessGroup if is_horovod else MPIProcessGroup
            group = process_group if isinstance(process_group, ProcessGroup) else kind(some)
            _groups.made[key] = process_group, group
        group = _groups.made[key][1]
    except CommunicatorError as problem:
        raise RuntimeError(f"{where}: {problem}.") from None
    job = job_of_launcher()
    if is_name and group.size == 1 and job is not None:
        raise RuntimeError(
            f"{where}: {job.launcher} has started {job.size} processes, but '{process_group}' knows this process only. "
            f"Choose '{job.launcher.lower()}', or 'none' if each process is to synchronize its own devices only."
        )
    return group if group.size > 1 else None


class Job(NamedTuple):
    launcher: str  # 'Horovod' or 'MPI'
    size: int  # in processes
    rank: int


@functools.lru_cache(maxsize=None)  # each imperative call of a layer may ask
def job_of_launcher() -> Optional[Job]:
    """The job of several processes that the launcher has started; None if this process is alone."""
    for prefix, launcher in _PREFIXES.items():
        size = os.environ.get(f"{prefix}SIZE", "")
        if size.isdigit() and int(size) > 1:
            return Job(launcher, int(size), int(os.environ.get(f"{prefix}RANK", "0")))
    return None


def is_first_of_job() -> bool:
    """Whether this process reports on behalf of all processes of its job; True if it is alone."""
    job = job_of_launcher()
    return job is None or job.rank == 0


def _warn_of_several_processes(where: str) -> None:
    """Warn, in a job of several processes, that layers synchronize within their process only."""
    job = job_of_launcher()
    if job is not None:
        name = job.launcher.lower()
        warnings.warn(
            f"{where}: this is one of {job.size} processes of {job.launcher}, and no process group was chosen. Layers "
            f"synchronize the devices of each process only, so that one process per device is plain Batch "
            f"Normalization. gluon_syncbn.init_process_group('{name}') before the net is made, or the environment "
            f"variable {VARIABLE}={name}, makes them synchronize over all processes; 'none' silences this.",
            stacklevel=users_line(),
        )


def name_of_communicator() -> str:
    job = job_of_launcher()
    if job is None:
        return "none"
    if job.launcher == "Horovod":
        return "horovod"
    try:
        import mpi4py.MPI  # noqa: F401
    except (ImportError, RuntimeError):
        return "horovod"
    return "mpi"
