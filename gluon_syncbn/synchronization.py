"""The part of a `SyncBatchNorm` that `nn.BatchNorm` lacks: its options, its group of devices, its place in its net."""

import contextlib
import threading
import weakref
from typing import Any, Iterator, List, Optional, Sequence, Tuple

import mxnet as mx
from mxnet.gluon import Block, nn

from gluon_syncbn.backends.bfloat16 import dtype_name
from gluon_syncbn.backends.choose import choose, find_backend
from gluon_syncbn.backends.interface import Backend, LayerGroup
from gluon_syncbn.base.mxnet_private import contexts_of, operator_options
from gluon_syncbn.distributed.default import find
from gluon_syncbn.distributed.process_group import ProcessGroup
from gluon_syncbn.graphs.graph import Entry, Kind
from gluon_syncbn.graphs.norms import Norm
from gluon_syncbn.layer.decision import check_devices, check_groups, synchronizes
from gluon_syncbn.layer.spec import LayerSpec
from gluon_syncbn.meeting.link import Link
from gluon_syncbn.mxnet_engine.cpu_resources import refuse_late_import
from gluon_syncbn.step.exits import end_before_communicators
from gluon_syncbn.step.passes import Passes
from gluon_syncbn.step.steps import steps
from gluon_syncbn.step.unmet import follow


class Synchronization:
    """How one layer synchronizes.

    Parameters
    ----------
    layer : nn.BatchNorm
    options : LayerSpec
        `options_of` has checked them. Name, dtype and what `nn.BatchNorm` knows are the layer's own, see `spec`.
    """

    def __init__(self, layer: nn.BatchNorm, options: LayerSpec):
        self.options = options
        self.passes = Passes(layer, options.groups_of)
        self._layer = weakref.ref(layer)
        self._spec: Tuple[Tuple, LayerSpec] = (), options  # what the latest was made of, and that
        self._group: Optional[Tuple[Backend, LayerGroup]] = None
        self._group_is_for: Optional[LayerSpec] = None
        self._group_lock = threading.Lock()
        self._trained_on: List[mx.Context] = []
        follow(self)

    @property
    def layer_or_none(self) -> Optional[nn.BatchNorm]:
        """The layer; None when it is gone, or has been converted."""
        layer = self._layer()
        return layer if layer is not None and synchronization_of(layer) is self else None

    @property
    def layer(self) -> nn.BatchNorm:
        layer = self._layer()
        assert layer is not None
        return layer

    def spec(self) -> LayerSpec:
        """Return the record of the layer as it is now; the same object as long as nothing changes."""
        layer = self.layer
        kwargs = operator_options(layer)
        source = self.options, layer.name, layer.running_mean.dtype, *kwargs.values()
        latest, spec = self._spec
        if latest != source:
            spec = self.options.but(
                name=layer.name,
                axis=int(kwargs["axis"]),
                epsilon=float(kwargs["eps"]),
                momentum=float(kwargs["momentum"]),
                scale=not kwargs["fix_gamma"],
                use_global_stats=bool(kwargs["use_global_stats"]),
                dtype=dtype_name(layer.running_mean.dtype),
            )
            self._spec = source, spec
        return spec

    def devices(self) -> List[mx.Context]:
        """The contexts of the parameters in rank order; none before ``initialize``."""
        return contexts_of(self.layer.running_mean)

    def synchronizes(self, spec: LayerSpec, devices: Sequence[mx.Context], predicts: bool = False) -> bool:
        """Whether the layer synchronizes on its devices; raise an error if it could not on these."""
        does = bool(devices) and not predicts and synchronizes(spec, len(devices))
        check_devices(spec, devices, does)
        if does and spec.group_size != 1:
            refuse_late_import(spec.where, len(devices))
        return does

    def normalize(self, arrays: Sequence[mx.nd.NDArray], spec: LayerSpec, devices: List[mx.Context]) -> mx.nd.NDArray:
        """The layer on its back end."""
        backend, group = self._group_on(spec, devices)
        if mx.autograd.is_training():
            self.take_place()
        return backend.normalize(arrays, spec, str(group.id), devices)

    def nodes(self, norm: Norm, spec: LayerSpec, devices: List[mx.Context], kind: Kind, dtype, after: Optional[Entry]):
        """The layer as nodes of a graph (`Backend.nodes`)."""
        backend, group = self._group_on(spec, devices)
        return backend.nodes(norm, spec, str(group.id), devices, kind, dtype, after)

    def _group_on(self, spec: LayerSpec, devices: List[mx.Context]) -> Tuple[Backend, LayerGroup]:
        with self._group_lock:  # threads of several devices may come here for the first time together
            now = self._group
            if now is None or now[1].devices != devices or self._group_is_for != spec:
                backend = choose(spec, devices).backend
                self._group = now = backend, backend.make_group(spec.but(num_devices=len(devices)), devices)
                self._group_is_for = spec
            return now

    def set_renorm(self, limits: Tuple[float, float]) -> None:
        """Set r_max and d_max of Batch Renormalization. Nothing may be running."""
        with self._group_lock:
            self.options = self.options.but(renorm=limits)
            if self._group is not None and self._group_is_for is not None:
                self._group_is_for = self._group_is_for.but(renorm=limits)
                self._group[1].set_renorm(limits)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Let each device compute by itself within the block, and then restore the group, which other graphs know."""
        kept = self.options, self._group, self._group_is_for
        self.options = self.options.but(num_devices=None, group_size=1, process_group="none")
        self._group = self._group_is_for = None
        try:
            yield
        finally:
            self.options, self._group, self._group_is_for = kept

    # With whom it synchronizes

    @property
    def has_group(self) -> bool:
        """Whether it has synchronized."""
        return self._group is not None

    def groups(self) -> List[List[mx.Context]]:
        """The devices, in the groups that synchronize among themselves, in rank order."""
        first = 0 if self.link is None else self.link.first_device
        return list(self.options.groups_of(self.devices(), first).values())

    def process_group(self) -> Optional[ProcessGroup]:
        """The processes that the layer synchronizes with; None if there are none."""
        return find(self.options.process_group, f"SyncBatchNorm '{self.layer.name}'")

    def synchronized_passes(self, set_id: int) -> int:
        """How many forward passes were met by exactly the devices of this set (`gluon_syncbn.meeting.active_set`)."""
        return 0 if self._group is None else self._group[1].rounds(set_id)

    def trains_here(self) -> bool:
        """Whether it was called to train, synchronized, on the devices that it has now."""
        return self._trained_on == self.devices()

    @property
    def link(self) -> Optional[Link]:
        """The link to the other processes, once the layer has trained with them."""
        return None if self._group is None else self._group[1].link

    def take_place(self) -> None:
        """Find the layer's position in the net that is being called to train, if other processes must know it."""
        if self._group is None:  # it is on one device; its graph may have been made for a prediction
            return check_groups(self.spec(), len(self.devices()))
        self._trained_on = self._group[1].devices
        link = self._group[1].connect()
        if link is not None and link.place is None:
            end_before_communicators()
            link.take(steps.layers.nets.place_of(self.layer, _description))


def options_of(layer: Block, **options: Any) -> LayerSpec:
    """The options that a user gives a layer.

    Raises
    ------
    ValueError, TypeError, RuntimeError
        The layer cannot have one of these.
    """
    spec = LayerSpec.of(layer.name, **options)
    find(spec.process_group, spec.where)  # one that cannot connect shows at once
    if spec.backend != "auto" or (spec.kvstore is not None and spec.native_options()):
        find_backend(spec, [])  # one that cannot run here, or anywhere, shows at once
    return spec


def synchronization_of(block: Any) -> Optional[Synchronization]:
    """Return that of a `SyncBatchNorm`; None for other blocks, and for a layer that has been converted back."""
    return vars(block).get("_sync")


def processes_of_layers(layers: Sequence[Block], where: str) -> Optional[ProcessGroup]:
    """The processes that layers synchronize with, if they do. ValueError, starting with ``where``, if with several."""
    found = [sync.process_group() for sync in map(synchronization_of, layers) if sync is not None]
    groups = {group for group in found if group is not None}
    if len(groups) > 1:
        raise ValueError(f"{where}: the layers of the net synchronize with different processes.")
    return groups.pop() if groups else None


def _description(block: Block) -> str:
    """Describe what must be the same in all processes; empty if the block does not synchronize."""
    sync = synchronization_of(block)
    if sync is None:
        return ""
    spec = sync.spec().but(num_devices=len(sync.devices()))
    if spec.is_plain:
        return ""
    shape = sync.layer.running_mean.shape  # None in a SymbolBlock, before anything is known of its input
    return spec.describe(shape[0] if shape else None)
