"""A layer that trains on several devices must synchronize: if not, that is an error, never silence.

A layer is looked at when weights are about to be updated, and at the next ``record()``, without its graph: γ or β have
fresh gradients on several devices, something was recorded in training mode, and the layer was never asked to
synchronize over these devices in training. If its running statistics differ from device to device, each device has
normalized with its own images. They may also differ from a time when the layer was plain, or had other groups. So a
layer whose Parameters were on these devices when it was made is an error only when they have changed once more.
"""

from typing import Iterable, List, Optional

import mxnet as mx
import numpy as np
from mxnet.gluon import Parameter

from gluon_syncbn.base.errors import SyncBatchNormError
from gluon_syncbn.base.mxnet_private import (
    arrays_of,
    context_list,
    contexts_of_module,
    device_of,
    has_fresh_gradient,
    has_gradient,
    set_fresh_gradient,
)
from gluon_syncbn.graphs.graph import Graph
from gluon_syncbn.graphs.norms import find_norms, is_marked
from gluon_syncbn.step.steps import LastLook, LayerInStep, steps

_SHOWN = 5


def first_look(sync: LayerInStep) -> LastLook:
    """Look at a layer that was just made."""
    for array in _fresh(sync):
        set_fresh_gradient(array, False)  # of a time when the layer was plain
    return LastLook(may_have_trained=len(arrays_of(sync.layer.running_mean)) > 1)


def check_met(parameters: Optional[Iterable[Parameter]] = None) -> None:
    """SyncBatchNormError if layers have trained, and met nobody.

    ``parameters`` are those that are about to be updated: only their layers are looked at. By default all layers are,
    if nothing waits for a pass that is yet to begin.
    """
    if not steps.progress.has_trained:
        return
    chosen = None if parameters is None else set(map(id, parameters))
    layers = {sync: sync.layer_or_none for sync in steps.layers.made()}  # which are not collected meanwhile
    suspects = [sync for sync in layers if _is_suspect(sync, chosen)]
    if suspects:  # a base net and the SymbolBlock that was made of it have the same Parameters
        met = {id(layer.running_mean) for sync, layer in layers.items() if layer is not None and sync.trains_here()}
        suspects = [sync for sync in suspects if id(sync.layer.running_mean) not in met]
    if chosen is None:
        if not steps.progress.is_balanced():
            return
        steps.progress.has_trained = False
    unmet = [sync for sync in suspects if _has_learned_apart(sync)]
    if unmet:
        for array in (array for sync in unmet for array in _fresh(sync)):
            set_fresh_gradient(array, False)  # it is not to be used
        raise SyncBatchNormError(
            f"{_listed([sync.layer.name for sync in unmet])} trained on {_listed(unmet[0].devices(), '')} and did not "
            f"synchronize: each device has normalized with its own images. Does something else than Gluon, a Module or "
            f"an executor run the graph? Call the net itself. If you do, call net.hybridize() again before you train."
        )


def check_module(module: mx.mod.Module) -> None:
    """SyncBatchNormError if a Module trains a symbol on another number of devices than it is for.

    A symbol of a net on one device, or made for one, is plain there; a symbol for more devices would wait for them.
    """
    if module in steps.updates.checked_modules:
        return
    count = len(contexts_of_module(module))
    norms = find_norms(Graph(module.symbol)) if is_marked(module.symbol) else []
    trained = (norm for norm in norms if norm.is_marked and not norm.spec.is_plain)
    others = [norm for norm in trained if norm.num_devices not in (None, count)]
    if others:
        made_for = "one device" if others[0].num_devices == 1 else f"{others[0].num_devices} devices"
        raise SyncBatchNormError(
            f"{_listed([norm.name for norm in others])} of the symbol is for {made_for}, and the Module has {count}. "
            f"Make the symbol for them: gluon_syncbn.convert_symbol(symbol, {count})."
        )
    steps.updates.checked_modules.add(module)


def _listed(items, kind: str = "SyncBatchNorm ") -> str:
    shown = ", ".join(f"'{item}'" if kind else str(item) for item in items[:_SHOWN])
    return f"{kind}{shown}" + (f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else "")


def _learning(sync: LayerInStep) -> List[Parameter]:
    return [item for item in (sync.layer.gamma, sync.layer.beta) if has_gradient(item)]


def _fresh(sync: LayerInStep) -> List[mx.nd.NDArray]:
    """γ and β where a backward pass has written their gradient, and no Trainer has used it."""
    return [array for item in _learning(sync) for array in arrays_of(item) if has_fresh_gradient(array)]


def _is_suspect(sync: LayerInStep, chosen) -> bool:
    """Whether the layer has gradients on several devices that should have met, and it was never asked to."""
    layer = sync.layer_or_none
    if layer is None or len(context_list(layer.running_mean) or ()) < 2 or sync.trains_here():
        return False
    if chosen is not None and not any(id(item) in chosen for item in _learning(sync)):
        return False
    if sync.spec().is_plain:
        return False
    fresh = {device_of(array) for array in _fresh(sync)}
    return any(len(fresh.intersection(group)) > 1 for group in sync.groups())


def _has_learned_apart(sync: LayerInStep) -> bool:
    """Whether devices of one group have different running statistics, which they have not had before."""
    means = {device: sync.layer.running_mean.data(device).asnumpy() for device in sync.devices()}
    if all(np.array_equal(means[device], means[group[0]]) for group in sync.groups() for device in group):
        return False
    look = sync.last_look
    if not look.may_have_trained:
        return True
    before, look.means = look.means, list(means.values())
    return before is not None and not np.array_equal(before, look.means)
