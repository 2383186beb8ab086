"""The part of a `SyncBatchNorm` that `nn.BatchNorm` lacks: its options, its group of devices, its place in its net."""

import contextlib
import threading
import weakref
from typing import Any, Iterator, List, NamedTuple, Optional, Sequence, Tuple

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
from gluon_syncbn.layer.spec import Facts, LayerSpec, check_devices, check_groups, synchronizes
from gluon_syncbn.meeting.link import Link
from gluon_syncbn.mxnet_engine.cpu_resources import refuse_late_import
from gluon_syncbn.step.exits import end_before_communicators
from gluon_syncbn.step.passes import Passes
from gluon_syncbn.step.steps import steps
from gluon_syncbn.step.unmet import first_look


class _Made(NamedTuple):
    """A group, its back end, and the record that it was made for."""

    spec: LayerSpec
    backend: Backend
    group: LayerGroup


class Synchronization:
    """How one layer synchronizes.

    `options_of` has checked the ``options``. The name, the dtype and the values that `nn.BatchNorm` has are not taken
    from them, but from the layer, see `spec`.
    """

    def __init__(self, layer: nn.BatchNorm, options: LayerSpec):
        self.options = options
        self.passes = Passes(layer, options.groups_of)
        self._layer = weakref.ref(layer)
        self._spec: Tuple[Tuple, LayerSpec] = (), options  # the latest, after the values that it was made of
        self._made: Optional[_Made] = None
        self._making = threading.Lock()
        self._trained_on: List[mx.Context] = []
        self.last_look = first_look(self)
        steps.layers.add(self)

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
        if does and not spec.has_groups_of_one:
            refuse_late_import(spec.where, len(devices))
        return does

    def normalize(self, arrays: Sequence[mx.nd.NDArray], spec: LayerSpec, devices: List[mx.Context]) -> mx.nd.NDArray:
        backend, group = self._group_on(spec, devices)
        if mx.autograd.is_training():
            self.take_place()
        return backend.normalize(arrays, spec, str(group.id), devices)

    def nodes(self, norm: Norm, spec: LayerSpec, devices: List[mx.Context], kind: Kind, dtype, after: Optional[Entry]):
        backend, group = self._group_on(spec, devices)
        return backend.nodes(norm, spec, str(group.id), devices, kind, dtype, after)

    def _group_on(self, spec: LayerSpec, devices: List[mx.Context]) -> Tuple[Backend, LayerGroup]:
        with self._making:  # threads of several devices may come here for the first time together
            made = self._made
            if made is None or made.group.devices != devices or made.spec != spec:
                backend = choose(spec, devices)
                group = backend.group(spec.but(num_devices=len(devices)), devices)
                self._made = made = _Made(spec, backend, group)
            return made.backend, made.group

    def set_limits(self, limits: Tuple[float, float]) -> None:
        """Set r_max and d_max of Batch Renormalization. Nothing may be running."""
        with self._making:
            self.options = self.options.but(renorm=limits)
            if self._made is not None:
                self._made = self._made._replace(spec=self._made.spec.but(renorm=limits))
                self._made.group.set_limits(limits)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Let each device compute by itself within the block, and then restore the group, which other graphs know."""
        kept = self.options, self._made
        self.options, self._made = self.options.but(num_devices=None, group_size=1, process_group="none"), None
        try:
            yield
        finally:
            self.options, self._made = kept

    # The devices and processes that it synchronizes with

    @property
    def _group(self) -> Optional[LayerGroup]:
        return None if self._made is None else self._made.group

    @property
    def has_group(self) -> bool:
        """Whether it has synchronized."""
        return self._made is not None

    def groups(self) -> List[List[mx.Context]]:
        """The devices, in the groups that synchronize among themselves, in rank order."""
        first = 0 if self.link is None else self.link.first_device
        return list(self.options.groups_of(self.devices(), first).values())

    def process_group(self) -> Optional[ProcessGroup]:
        return find(self.options.process_group, self.spec().where)

    def trains_here(self) -> bool:
        """Whether it was called to train, synchronized, on the devices that it has now."""
        return self._trained_on == self.devices()

    @property
    def link(self) -> Optional[Link]:
        """The link to the other processes, once the layer has trained with them."""
        return None if self._group is None else self._group.link

    def take_place(self) -> None:
        """Find the layer's position in the net that is being called to train, if other processes must know it."""
        if self._group is None:  # it is on one device; its graph may have been made for a prediction
            return check_groups(self.spec(), len(self.devices()))
        self._trained_on = self._group.devices
        link = self._group.connect()
        if link is not None and link.place is None:
            end_before_communicators()
            link.take_place(self.layer, _facts)


def options_of(layer: Block, **options: Any) -> LayerSpec:
    """The options that a user gives a layer. ValueError, TypeError or RuntimeError if the layer cannot have them."""
    spec = LayerSpec(layer.name, **options).checked()
    find(spec.process_group, spec.where)  # raises an error at once if it cannot connect
    if spec.backend != "auto" or (spec.kvstore is not None and spec.native_options()):
        find_backend(spec, [])  # raises an error at once if it cannot run here, or anywhere
    return spec


def synchronization_of(block: Any) -> Optional[Synchronization]:
    """The `Synchronization` of a layer; None for other blocks, and for a layer that has been converted back."""
    found = vars(block).get("_sync")
    return found if isinstance(found, Synchronization) else None  # a user's block may have such a name


def processes_of_layers(layers: Sequence[Block], where: str) -> Optional[ProcessGroup]:
    """The processes that layers synchronize with. ValueError, starting with ``where``, if they differ."""
    found = [sync.process_group() for sync in map(synchronization_of, layers) if sync is not None]
    groups = {group for group in found if group is not None}
    if len(groups) > 1:
        raise ValueError(f"{where}: the layers of the net synchronize with different processes.")
    return groups.pop() if groups else None


def _facts(block: Block, group: ProcessGroup) -> Facts:
    """The facts that these processes compare; empty if the block does not synchronize with them."""
    sync = synchronization_of(block)
    if sync is None or sync.spec().is_plain or sync.process_group() is not group:
        return {}
    shape = sync.layer.running_mean.shape  # None in a SymbolBlock, before anything is known of its input
    channels = int(shape[0]) if shape and shape[0] > 0 else None
    return sync.spec().but(num_devices=len(sync.devices())).facts(channels)
