"""What describes the group of devices that share one layer's statistics, and what could never work."""

import json
import math
import numbers
import os
import threading
from abc import ABC, abstractmethod
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Union

import mxnet as mx

from gluon_syncbn.base.mxnet_private import has_optimizer
from gluon_syncbn.distributed.process_group import ProcessGroupLike, check_process_group
from gluon_syncbn.meeting.renorm import Schedule, check_renorm

_KVSTORES = ("local", "local_update_cpu", "local_allreduce_cpu", "device", "local_allreduce_device")


DEFAULT_TIMEOUT = 60.0
TIMEOUT_VARIABLE = "GLUON_SYNCBN_TIMEOUT"


def default_timeout() -> float:
    """Seconds from the environment variable ``GLUON_SYNCBN_TIMEOUT``, else 60."""
    return check_timeout(os.environ.get(TIMEOUT_VARIABLE, DEFAULT_TIMEOUT), TIMEOUT_VARIABLE)


def check_timeout(value, where: str) -> float:
    """``value`` as seconds; ValueError, starting with ``where``, unless it is a positive finite number."""
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = float("nan")
    if not 0 < seconds <= threading.TIMEOUT_MAX:
        raise ValueError(f"{where}: the timeout must be a positive number of seconds, not {value!r}.")
    return seconds


def check_count(value, where: str, option: str, least: int = 1) -> int:
    """``value``, an integer of Python's or NumPy's; ValueError, starting with ``where``, if it is below ``least``."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise ValueError(f"{where}: {option} must be a positive integer, not {value!r}.")
    return int(value)


def check_kvstore(kvstore: Union[str, mx.kv.KVStore, None], where: str) -> None:
    """Refuse at once what could not reduce within one process, or would update weights with what is pushed.

    Raises
    ------
    TypeError
        ``kvstore`` is neither a name nor a KVStore.
    ValueError
        A KVStore of another type than local or device, or one that an optimizer is attached to.
    """
    if kvstore is None:
        return
    if not isinstance(kvstore, (str, mx.kv.KVStore)):
        raise TypeError(f"{where}: kvstore must be a name or an mxnet KVStore, not {type(kvstore).__name__}.")
    kind = kvstore if isinstance(kvstore, str) else kvstore.type
    if kind == "nccl":
        _check_nccl(where)
    elif kind not in _KVSTORES:
        raise ValueError(
            f"{where}: kvstore '{kind}' is not supported; use one of {', '.join(_KVSTORES)}. For several "
            f"processes there are process_group='horovod' and process_group='mpi'. A distributed KVStore would not "
            f"do: its server may apply the optimizer to statistics, rounds them to float32, and does not notice a "
            f"worker that is gone."
        )
    if not isinstance(kvstore, str) and has_optimizer(kvstore):
        raise ValueError(
            f"{where}: this KVStore has an optimizer, which would be applied to the layer's statistics; "
            f"create one for the layer alone, for example kvstore=mx.kv.create('{kind}')."
        )


def _check_nccl(where: str) -> None:
    """ValueError unless MXNet can make such a store here."""
    try:
        mx.kv.create("nccl")
    except mx.MXNetError as problem:
        reason = str(problem).strip().splitlines()[-1]
        raise ValueError(f"{where}: kvstore 'nccl' cannot be made here ({reason}); use 'device'.") from None


class Options(NamedTuple):
    """What a layer's user chose of its group."""

    num_devices: Optional[int] = None
    group_size: Optional[int] = None
    timeout: Optional[float] = None
    kvstore: Union[str, mx.kv.KVStore, None] = None
    process_group: Optional[ProcessGroupLike] = None
    renorm: Optional[Schedule] = None


class GroupSpec(NamedTuple):
    """All that describes a group, but for which devices it has.

    A graph that no layer owns carries it as text, which makes the same group in another process. It does not say which
    devices there are, only how many: 0 if that is not known either, and then the graph cannot train. ``dtype`` is that
    of parameters and statistics; ``momentum``, ``epsilon`` and ``scale`` are as in `nn.BatchNorm`.
    """

    name: str
    num_devices: int
    group_size: Optional[int]
    timeout: Optional[float]
    kvstore: Union[str, mx.kv.KVStore, None]
    dtype: str
    momentum: float
    epsilon: float
    scale: bool
    process_group: Optional[ProcessGroupLike] = None  # last, for texts of graphs that do not have these
    renorm: Optional[Schedule] = None

    @classmethod
    def of(cls, name: str, options: Options, dtype: str, momentum: float, epsilon: float, scale: bool) -> "GroupSpec":
        num_devices, group_size, timeout, kvstore, processes, renorm = options
        averaging = float(momentum), float(epsilon)
        return cls(name, num_devices or 0, group_size, timeout, kvstore, dtype, *averaging, scale, processes, renorm)

    @property
    def where(self) -> str:
        """How errors begin."""
        return f"SyncBatchNorm '{self.name}'"

    @property
    def seconds(self) -> float:
        """The timeout, or its default."""
        return default_timeout() if self.timeout is None else self.timeout

    def shared_options(self) -> Dict[str, Any]:
        """What is alike for all layers that were made with the same options, as a node of a graph tells it."""
        told = {name: getattr(self, name) for name in ("kvstore", "process_group")}
        named = {name: value for name, value in told.items() if isinstance(value, str)}
        counts = {"num_devices": self.num_devices or None, "group_size": self.group_size}
        renorm = {} if self.renorm is None else {"renorm": self.renorm}
        return {**counts, "timeout": self.timeout, "dtype": self.dtype, **named, **renorm}

    def to_json(self) -> str:
        return json.dumps(self._asdict())

    @classmethod
    def from_json(cls, text: str) -> "GroupSpec":
        """The group that a text describes; the text may come from any file.

        Raises
        ------
        ValueError
            It describes none, or one that could not work.
        """
        try:
            spec = cls(**json.loads(text))
        except (TypeError, ValueError) as problem:
            raise ValueError(f"a SyncBatchNorm node describes its group as {text!r}: {problem}.") from None
        spec.check()
        return spec._replace(renorm=check_renorm(spec.renorm, spec.where))  # with tuples again

    def check(self) -> None:
        """ValueError for numbers that could not work, whoever wrote them."""
        where = self.where
        check_count(self.num_devices, where, "num_devices", least=0)
        if self.group_size is not None:
            check_count(self.group_size, where, "group_size")
        if self.timeout is not None:
            check_timeout(self.timeout, where)
        if self.dtype not in ("float32", "float64"):
            raise ValueError(f"{where}: dtype must be 'float32' or 'float64', not {self.dtype!r}.")
        for option, value in (("momentum", self.momentum), ("eps", self.epsilon)):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise ValueError(f"{where}: {option} must be a number, not {value!r}.")
        if not isinstance(self.scale, bool):
            raise ValueError(f"{where}: scale must be true or false, not {self.scale!r}.")
        check_kvstore(self.kvstore, where)
        check_process_group(self.process_group, where)


class GroupReference(NamedTuple):
    """A group as a graph names it. ``devices`` are those that are known before they come."""

    text: str
    spec: GroupSpec
    devices: Sequence[mx.Context] = ()


class LayerGroup(ABC):
    """The synchronization of one layer over its devices. Lives as long as the layer has these devices."""

    spec: GroupSpec
    devices: Sequence[mx.Context]
    link: Any = None  # a `gluon_syncbn.meeting.link.Link`, once it is connected with other processes

    @property
    @abstractmethod
    def reference(self) -> GroupReference:
        """How a graph, or a call, names this group."""

    @abstractmethod
    def connect(self) -> Any:
        """Find the other processes, if there are some, and return the link to them. The layer is about to train."""

    @abstractmethod
    def go_to_step(self, least: int) -> int:
        """Have the schedule of Batch Renormalization go on from the step ``least``, if it is not further; returns the
        latest step of all devices. Nothing may be running."""

    @abstractmethod
    def rounds(self, set_id: int) -> int:
        """How many forward passes were met by exactly the devices of this active set."""


def subgroups(devices: Sequence[mx.Context], group_size: Optional[int], first: int = 0) -> Dict[int, List[mx.Context]]:
    """The devices in groups of this many neighbours, in rank order, by number of the group.

    ``first`` is the number of the first of them among those of all processes.
    """
    groups: Dict[int, List[mx.Context]] = {}
    for number, device in enumerate(devices, first):
        groups.setdefault(number // group_size if group_size else 0, []).append(device)
    return groups


def check_group_size(group_size: Optional[int], num_devices: int, num_processes: int, where: str) -> None:
    """ValueError, starting with ``where``, unless it divides the devices of all processes."""
    total = num_devices * num_processes
    if group_size is not None and total % group_size:
        raise ValueError(f"{where}: group_size={group_size} does not divide its {total} devices.")


def check_devices(name: str, devices: Sequence[mx.Context], options: Options) -> None:
    """Refuse a group that could never meet; ``devices`` are those of this process.

    Raises
    ------
    ValueError
        A device is given twice, or their number is not ``num_devices``.
    RuntimeError
        MXNet runs on its NaiveEngine, where no device could ever wait for another.
    """
    shown = ", ".join(str(device) for device in devices)
    if len(set(devices)) != len(devices):
        raise ValueError(f"SyncBatchNorm '{name}': its parameters name one device twice ({shown}).")
    if options.num_devices is not None and options.num_devices != len(devices):
        raise ValueError(
            f"SyncBatchNorm '{name}': num_devices={options.num_devices}, but its parameters live on {len(devices)} "
            f"({shown}). Initialize the net on the devices that train, or leave num_devices out."
        )
    check_engine(name, len(devices))


def check_engine(name: str, num_devices: int) -> None:
    """RuntimeError if MXNet runs on its NaiveEngine, where no device could ever wait for another."""
    if num_devices > 1 and os.environ.get("MXNET_ENGINE_TYPE") == "NaiveEngine":
        raise RuntimeError(
            f"SyncBatchNorm '{name}': MXNET_ENGINE_TYPE=NaiveEngine runs one operator at a time, so {num_devices} "
            f"devices could never meet. Unset it, or debug on one device."
        )
