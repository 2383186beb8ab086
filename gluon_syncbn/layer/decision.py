"""Whether a layer synchronizes: one decision for arrays, the graphs of nets, and symbols."""

from typing import Optional, Sequence

import mxnet as mx

from gluon_syncbn.distributed.default import find, is_connected
from gluon_syncbn.layer.spec import LayerSpec


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
    return not spec.is_plain and (spec.has_groups or synchronizes(spec, spec.num_devices))


def check_devices(spec: LayerSpec, devices: Sequence[mx.Context], does_synchronize: bool) -> None:
    """Raise an error if the layer could not be on these devices, or, where they are not known, on ``num_devices``."""
    if does_synchronize:
        spec.check_dtype()
    if devices:
        spec.check_devices(devices)
        if mx.autograd.is_training():
            check_groups(spec, len(devices))
    elif does_synchronize:
        spec.check_engine(spec.num_devices)
        check_groups(spec, spec.num_devices)


def check_groups(spec: LayerSpec, num_devices: Optional[int]) -> None:
    """ValueError unless its groups fit this many devices in each process, as far as the processes are known."""
    if spec.has_groups and is_connected(spec.process_group):
        group = find(spec.process_group, spec.where)
        spec.check_total((num_devices or 0) * (1 if group is None else group.size))
