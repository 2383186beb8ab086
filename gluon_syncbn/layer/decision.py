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
    SYMBOL = "a symbol that is bound, or will be"


class Way(enum.Enum):
    """The function that a layer computes in a call."""

    PLAIN = "`nn.BatchNorm`"
    OPEN = "synchronized; the devices are those that come to train"
    SYNCHRONIZED = "synchronized over the devices of the parameters"


def decide(spec: LayerSpec, devices: Sequence[mx.Context], site: Site) -> Way:
    """Decide what a layer computes.

    Parameters
    ----------
    spec : LayerSpec
    devices : sequence of mx.Context
        Of its parameters; empty if they are not known.
    site : Site
    """
    if spec.use_global_stats or spec.is_by_itself or (site is Site.ARRAYS and not mx.autograd.is_training()):
        return Way.PLAIN
    if site is Site.SYMBOL:
        # Whether the groups of a symbol fit its processes shows when it trains.
        return Way.PLAIN if spec.group_size is None and _is_alone(spec, spec.num_devices) else Way.OPEN
    if _is_alone(spec, len(devices) or spec.num_devices):
        return Way.PLAIN
    if devices:
        return Way.SYNCHRONIZED
    return Way.PLAIN if site is Site.ARRAYS else Way.OPEN


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
