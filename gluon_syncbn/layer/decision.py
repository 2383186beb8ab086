"""Whether a layer synchronizes where it is called: one decision for arrays, the graphs of nets, and symbols."""

import enum
from typing import Optional, Sequence

import mxnet as mx

from gluon_syncbn.distributed.default import find, is_connected
from gluon_syncbn.distributed.process_group import ProcessGroupLike
from gluon_syncbn.layer.spec import LayerSpec


class Site(enum.Enum):
    """The kind of call."""

    ARRAYS = "arrays"
    NET = "the graph of a net, which is made anew when its layers move"
    SYMBOL = "a symbol, which may be saved, bound by a Module or put into a SymbolBlock"


class Way(enum.Enum):
    """The function that a layer computes in a call."""

    PLAIN = "`nn.BatchNorm`"
    PLAIN_FOR_NOW = "`nn.BatchNorm`, which a later conversion or a SymbolBlock may make a synchronized layer"
    OPEN = "synchronized; the devices are those that come to train"
    SYNCHRONIZED = "synchronized over the devices of the parameters"


def decide(spec: LayerSpec, devices: Sequence[mx.Context], site: Site, is_loaded: bool = False) -> Way:
    """Decide what a layer computes.

    Parameters
    ----------
    spec : LayerSpec
    devices : sequence of mx.Context
        Of its parameters; empty if they are not known.
    site : Site
    is_loaded : bool
        The symbol comes from a file: whether ``group_size`` fits the processes shows when it trains.
    """
    if spec.use_global_stats or (site is Site.ARRAYS and not mx.autograd.is_training()):
        return Way.PLAIN
    if site is not Site.SYMBOL:
        if spec.is_by_itself or _is_alone(spec, len(devices) or spec.num_devices):
            return Way.PLAIN
        if devices:
            return Way.SYNCHRONIZED
        return Way.PLAIN if site is Site.ARRAYS else Way.OPEN
    is_settled = not (is_loaded and spec.group_size is not None)
    if len(devices) <= 1 and is_settled and spec.num_devices == 1 and _is_alone(spec, 1):
        return Way.PLAIN
    # On one device base weights are loaded, and most layers move before they train.
    return Way.PLAIN_FOR_NOW if len(devices) == 1 or spec.is_by_itself else Way.OPEN


def _is_alone(spec: LayerSpec, num_devices: Optional[int]) -> bool:
    """Whether it is on one device, in one process, and so computes what `nn.BatchNorm` does."""
    return num_devices == 1 and spec.is_plain_alone and not has_other_processes(spec.process_group, spec.where)


def has_other_processes(process_group: Optional[ProcessGroupLike], where: str) -> bool:
    """Whether a layer with this option synchronizes with other processes, or will when it first trains.

    A layer of a symbol that was loaded from a file finds its processes when it trains: who loads it may only want to
    predict, where there are none.
    """
    return not is_connected(process_group) or find(process_group, where) is not None


def check_groups(spec: LayerSpec, num_devices: Optional[int]) -> None:
    """ValueError unless ``group_size`` fits this many devices in each process, as far as the processes are known."""
    if spec.group_size is not None and is_connected(spec.process_group):
        group = find(spec.process_group, spec.where)
        spec.check_groups(num_devices, 1 if group is None else group.size)
