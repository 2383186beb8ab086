"""The state of a process's steps, in one object, `steps`: its layers, how far a step has come, and held updates."""

import threading
import weakref
from typing import Any, Dict, List, NamedTuple, Optional, Protocol, Set

import mxnet as mx
import numpy as np

from gluon_syncbn.base.mxnet_private import contexts_of
from gluon_syncbn.layer.spec import LayerSpec
from gluon_syncbn.meeting.link import Link
from gluon_syncbn.step.held import Updates
from gluon_syncbn.step.passes import Passes
from gluon_syncbn.step.progress import Progress


class LastLook:
    """The state of a layer when `step.unmet` last looked at it."""

    def __init__(self, may_have_trained: bool) -> None:
        self.may_have_trained = may_have_trained  # on these devices, before it was made
        self.means: Optional[List[np.ndarray]] = None  # on all devices, when they differed first


class LayerInStep(Protocol):
    """The part of a layer's `Synchronization` that the modules of ``step`` use."""

    passes: Passes
    last_look: LastLook

    @property
    def layer(self) -> Any: ...

    @property
    def layer_or_none(self) -> Optional[Any]: ...

    @property
    def has_group(self) -> bool: ...

    @property
    def link(self) -> Optional[Link]: ...

    def spec(self) -> LayerSpec: ...

    def devices(self) -> List[mx.Context]: ...

    def groups(self) -> List[List[mx.Context]]: ...

    def trains_here(self) -> bool: ...


class SynchronizedLayers:
    """The layers that were made in this process, in `steps.layers`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: weakref.WeakSet[LayerInStep] = weakref.WeakSet()
        self._used_gpus = False  # when work was last waited for
        self._lost_gpus = False

    def add(self, sync: LayerInStep) -> None:
        with self._lock:
            self._made.add(sync)

    def made(self) -> List[LayerInStep]:
        """All layers, synchronized yet or not."""
        with self._lock:
            return list(self._made)

    def in_use(self) -> Dict[LayerInStep, Any]:
        """The layers that have synchronized, and were not converted back since."""
        found = {sync: sync.layer_or_none for sync in self.made() if sync.has_group}
        return {sync: layer for sync, layer in found.items() if layer is not None}

    def blocks(self) -> List[Any]:
        return list(self.in_use().values())

    def devices_in_use(self) -> Set[mx.Context]:
        """The devices of all layers; no GPUs in a process forked by one that had used them, where CUDA fails."""
        layers = [layer for layer in (sync.layer_or_none for sync in self.made()) if layer is not None]
        devices = {device for layer in layers for device in contexts_of(layer.running_mean)}
        gpus = {device for device in devices if device.device_type == "gpu"}
        self._used_gpus = bool(gpus)
        return devices - gpus if self._lost_gpus else devices

    def lose_gpus(self) -> None:
        """Use no GPU any more in a process that was just forked, if its parent has used some."""
        self._lost_gpus = self._lost_gpus or self._used_gpus


class Steps(NamedTuple):
    layers: SynchronizedLayers
    progress: Progress
    updates: Updates


steps = Steps(SynchronizedLayers(), Progress(), Updates())
