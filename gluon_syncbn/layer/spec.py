"""The record of a synchronized layer, made and checked once, and the decision whether a call synchronizes.

The same record is in the block, in the marks of graphs, in groups, in ``repr``, and in the facts that processes
compare; the compiled core has its numbers as a struct. A new option is a field here, a line in the signature of
`gluon_syncbn.SyncBatchNorm`, and the code that it is about.
"""

import dataclasses
import difflib
import json
import math
import numbers
import os
import threading
from typing import Any, Dict, Iterable, List, Optional, Sequence, Tuple, Union

import mxnet as mx
import numpy as np

from gluon_syncbn.base.mxnet_private import has_optimizer
from gluon_syncbn.distributed.default import find, is_connected
from gluon_syncbn.distributed.process_group import ProcessGroupLike, check_process_group

TIMEOUT_VARIABLE = "GLUON_SYNCBN_TIMEOUT"
DEFAULT_TIMEOUT = 60.0
BACKENDS = ("auto", "native", "portable")

_MOST_AXES = 8  # of an input; a larger axis must be a number of channels
_FACTS = ("name", "dtype", "momentum", "epsilon", "scale", "group_size", "renorm")
_KVSTORES = ("local", "local_update_cpu", "local_allreduce_cpu", "device", "local_allreduce_device")

Facts = Dict[str, Any]


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """A synchronized layer, but for its parameters and the devices that they are on.

    The first fields are as in `nn.BatchNorm`; ``scale`` says whether there is a gamma, and ``dtype`` is the dtype of
    parameters and statistics. The others are the options of `gluon_syncbn.SyncBatchNorm`, by the same names.
    """

    name: str
    axis: int = 1
    epsilon: float = 1e-5
    momentum: float = 0.9
    scale: bool = True
    use_global_stats: bool = False
    dtype: str = "float32"

    num_devices: Optional[int] = None
    group_size: Optional[int] = None
    timeout: Optional[float] = None
    backend: str = "auto"
    activation: Optional[str] = None
    kvstore: Union[str, mx.kv.KVStore, None] = None
    process_group: Optional[ProcessGroupLike] = None
    in_place: bool = False
    renorm: Optional[Tuple[float, float]] = None
    fuse: bool = True

    def but(self, **changes) -> "LayerSpec":
        return dataclasses.replace(self, **changes)

    def options(self) -> Dict[str, Any]:
        """The options of `gluon_syncbn.SyncBatchNorm`, by name."""
        return {name: getattr(self, name) for name in OPTIONS}

    @property
    def where(self) -> str:
        """The beginning of its errors."""
        return f"SyncBatchNorm '{self.name}'"

    @property
    def seconds(self) -> float:
        """The timeout, or its default."""
        return default_timeout() if self.timeout is None else self.timeout

    @property
    def has_groups_of_one(self) -> bool:
        """Whether each device normalizes with its own images."""
        return self.group_size == 1

    @property
    def renormalizes(self) -> bool:
        """Whether it is Batch Renormalization, which takes effect on one device, too."""
        return self.renorm is not None

    @property
    def is_plain(self) -> bool:
        """Whether it is plain Batch Normalization on any devices."""
        return self.use_global_stats or (self.has_groups_of_one and not self.renormalizes)

    def checked(self) -> "LayerSpec":
        """A copy with normalized values. TypeError or ValueError if an option has an impossible value."""
        where = self.where
        made: Dict[str, Any] = {
            "num_devices": _count(self.num_devices, where, "num_devices"),
            "group_size": _count(self.group_size, where, "group_size"),
            "timeout": None if self.timeout is None else check_timeout(self.timeout, where),
            "renorm": None if self.renorm is None else check_renorm(self.renorm, where),
        }
        if self.backend not in BACKENDS:
            raise ValueError(f"{where}: backend must be one of {', '.join(BACKENDS)}, not {self.backend!r}.")
        if self.activation not in (None, "relu"):
            raise ValueError(f"{where}: activation must be 'relu' or None, not {self.activation!r}.")
        for option in ("in_place", "fuse"):
            if not isinstance(getattr(self, option), bool):
                raise TypeError(f"{where}: {option} must be True or False, not {getattr(self, option)!r}.")
        if self.kvstore == "horovod" and self.process_group in (None, "horovod"):  # MXNet's own name for it
            made.update(kvstore=None, process_group="horovod")
        else:
            _check_kvstore(self.kvstore, where)
        check_process_group(self.process_group, where)
        made["dtype"] = _dtype(self.dtype, where)
        made["axis"] = check_axis(self.axis, where)
        for option, value in (("momentum", self.momentum), ("eps", self.epsilon)):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise ValueError(f"{where}: {option} must be a number, not {value!r}.")
        if not isinstance(self.scale, bool):
            raise ValueError(f"{where}: scale must be true or false, not {self.scale!r}.")
        return self.but(**made)

    def check_engine(self, num_devices: Optional[int]) -> None:
        """RuntimeError if MXNet runs on its NaiveEngine, where no device could ever wait for another."""
        if num_devices is not None and num_devices > 1 and os.environ.get("MXNET_ENGINE_TYPE") == "NaiveEngine":
            raise RuntimeError(
                f"{self.where}: MXNET_ENGINE_TYPE=NaiveEngine runs one operator at a time, so {num_devices} devices "
                f"could never meet. Unset it, or debug on one device."
            )

    def native_options(self) -> List[str]:
        """The given options that only the native back end has."""
        return [name for name in ("in_place", "renorm") if getattr(self, name)]

    def groups_of(self, devices: Sequence[mx.Context], first: int = 0) -> Dict[int, List[mx.Context]]:
        """The devices that synchronize among themselves, in rank order, by number of the group.

        ``first`` is the number of the first of these devices among the devices of all processes.
        """
        groups: Dict[int, List[mx.Context]] = {}
        for number, device in enumerate(devices, first):
            groups.setdefault(number // self.group_size if self.group_size else 0, []).append(device)
        return groups

    def check_dtype(self) -> None:
        """ValueError unless parameters and statistics are float32 or float64."""
        if self.dtype not in ("float32", "float64"):
            raise ValueError(
                f"{self.where}: its parameters and statistics are {self.dtype}; they must be float32, or float64 for "
                f"an input of float64. Call cast('float32') on the layer."
            )

    def check_names(self) -> None:
        """TypeError if it has an object that cannot be saved in a symbol."""
        for option in ("kvstore", "process_group"):
            value = getattr(self, option)
            if value is not None and not isinstance(value, str):
                raise TypeError(
                    f"{self.where}: a symbol can be saved, so {option} must be a name, not {type(value).__name__}."
                )

    def facts(self, channels: Optional[int]) -> Facts:
        """The values that must be the same in all processes, and the name, for errors."""
        values = {name: getattr(self, name) for name in _FACTS}
        return {**values, "num_devices": self.num_devices if self.group_size else None, "channels": channels}

    def to_json(self, **more) -> str:
        """All values but None, and the user's objects, which cannot be saved."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        of_user = [name for name in ("kvstore", "process_group") if not isinstance(values[name], str)]
        saved = {name: value for name, value in values.items() if value is not None and name not in of_user}
        return json.dumps({**saved, **more})

    @classmethod
    def from_json(cls, text: str) -> "LayerSpec":
        """The layer that a text describes, which may come from any file. ValueError if there can be no such layer."""
        try:
            made = cls(**json.loads(text))
        except (TypeError, ValueError) as problem:
            raise ValueError(f"a SyncBatchNorm node describes its group as {text!r}: {problem}.") from None
        try:
            return made.checked()
        except TypeError as problem:
            raise ValueError(str(problem)) from None


# The options of `gluon_syncbn.SyncBatchNorm` that `nn.BatchNorm` does not have.
OPTIONS = tuple(field.name for field in dataclasses.fields(LayerSpec))[7:]


def synchronizes(spec: LayerSpec, num_devices: Optional[int]) -> bool:
    """Whether a layer on this many devices of a process synchronizes when it trains, or is `nn.BatchNorm` there.

    A layer of a symbol that was loaded from a file finds its processes when it trains: the user may only want to
    predict, where there are none.
    """
    if spec.is_plain:
        return False
    if num_devices != 1 or spec.renormalizes:
        return True
    return not is_connected(spec.process_group) or find(spec.process_group, spec.where) is not None


def symbol_synchronizes(spec: LayerSpec) -> bool:
    """Whether a node of a symbol synchronizes. Whether its groups fit its processes shows when devices train it."""
    return not spec.is_plain and (spec.group_size is not None or synchronizes(spec, spec.num_devices))


def check_devices(spec: LayerSpec, devices: Sequence[mx.Context], does_synchronize: bool) -> None:
    """Raise an error if the layer could not be on these devices, or, where they are not known, on ``num_devices``."""
    if does_synchronize:
        spec.check_dtype()
    if devices:
        shown = ", ".join(map(str, devices))
        if len(set(devices)) != len(devices):
            raise ValueError(f"{spec.where}: its parameters name one device twice ({shown}).")
        if spec.num_devices not in (None, len(devices)):
            raise ValueError(
                f"{spec.where}: num_devices={spec.num_devices}, but its parameters live on {len(devices)} ({shown}). "
                f"Initialize the net on the devices that train, or leave num_devices out."
            )
        spec.check_engine(len(devices))
        if mx.autograd.is_training():
            check_groups(spec, len(devices))
    elif does_synchronize:
        spec.check_engine(spec.num_devices)
        check_groups(spec, spec.num_devices)


def check_groups(spec: LayerSpec, num_devices: Optional[int]) -> None:
    """ValueError unless its groups fit this many devices in each process, as far as the processes are known."""
    if spec.group_size is not None and is_connected(spec.process_group):
        group = find(spec.process_group, spec.where)
        total = (num_devices or 0) * (1 if group is None else group.size)
        if total % spec.group_size:
            raise ValueError(f"{spec.where}: group_size={spec.group_size} does not divide its {total} devices.")


def different_facts(a: Facts, b: Facts) -> List[str]:
    """The keys of two `LayerSpec.facts` that differ: not the name, nor channels that one does not know yet."""
    unknown = "channels" if None in (a["channels"], b["channels"]) else ""
    return [key for key in a if key not in ("name", unknown) and a[key] != b.get(key)]


def check_option_names(options: Iterable[str], allowed: Iterable[str], where: str) -> None:
    """TypeError, starting with ``where``, for an option that is not allowed; names the nearest that is."""
    allowed = sorted(allowed)
    for name in options:
        if name not in allowed:
            near = difflib.get_close_matches(name, allowed, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"There are {', '.join(allowed)}."
            raise TypeError(f"{where}: unknown option {name!r}. {hint}")


def default_timeout() -> float:
    """The seconds in the environment variable ``GLUON_SYNCBN_TIMEOUT``, else 60."""
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


def _dtype(dtype, where: str) -> str:
    """The name of a dtype; ValueError, starting with ``where``, if no layer can have it."""
    try:
        name = "" if dtype is None else np.dtype(dtype).name  # NumPy takes None for float64
    except (TypeError, ValueError):
        name = ""
    if name not in ("float32", "float64"):
        raise ValueError(f"{where}: dtype must be 'float32' or 'float64', not {dtype!r}.")
    return name


def check_axis(axis, where: str) -> int:
    """Return the axis as an int; TypeError or ValueError, starting with ``where``, if no input can have it."""
    if isinstance(axis, bool) or not isinstance(axis, numbers.Integral):
        raise TypeError(f"{where}: axis must be an integer, not {axis!r}.")
    if not -_MOST_AXES <= axis < _MOST_AXES:
        raise ValueError(
            f"{where}: axis={axis} is no axis of an input. The first argument is axis, as in nn.BatchNorm; the "
            f"first of contrib's SyncBatchNorm is in_channels: write in_channels={axis}."
        )
    return int(axis)


def _count(value, where: str, option: str) -> Optional[int]:
    """``value``, an integer of Python's or NumPy's, or None; ValueError, starting with ``where``, if it is below 1."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
        raise ValueError(f"{where}: {option} must be a positive integer, not {value!r}.")
    return int(value)


def check_renorm(renorm, where: str) -> Tuple[float, float]:
    """The limits of Batch Renormalization as floats; TypeError or ValueError, starting with ``where``, for others."""
    try:
        r_max, d_max = (float(number) for number in renorm)
    except (TypeError, ValueError):
        raise TypeError(f"{where}: renorm must be (r_max, d_max), not {renorm!r}.") from None
    if not (math.isfinite(r_max) and math.isfinite(d_max) and r_max >= 1 and d_max >= 0):
        raise ValueError(f"{where}: renorm takes r_max of at least 1 and d_max of at least 0, not {renorm!r}.")
    return r_max, d_max


def _check_kvstore(kvstore: Union[str, mx.kv.KVStore, None], where: str) -> None:
    """TypeError or ValueError for a store that cannot reduce within one process, or would update weights with sums."""
    if kvstore is None:
        return
    if not isinstance(kvstore, (str, mx.kv.KVStore)):
        raise TypeError(f"{where}: kvstore must be a name or an mxnet KVStore, not {type(kvstore).__name__}.")
    kind = kvstore if isinstance(kvstore, str) else kvstore.type
    if kind == "nccl":
        try:
            mx.kv.create("nccl")
        except mx.MXNetError as problem:
            reason = str(problem).strip().splitlines()[-1]
            raise ValueError(f"{where}: kvstore 'nccl' cannot be made here ({reason}); use 'device'.") from None
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
