"""The interface of a back end. A new one is a subclass of `Backend`, named in `gluon_syncbn.backends.choose`."""

import itertools
import weakref
from abc import ABC, abstractmethod
from typing import Any, Dict, List, Optional, Sequence, Tuple, Type

import mxnet as mx

from gluon_syncbn.graphs.graph import Entry, Kind
from gluon_syncbn.graphs.norms import Norm
from gluon_syncbn.layer.spec import LayerSpec
from gluon_syncbn.mxnet_engine import failures


class LayerGroups:
    """The groups of this process, by the ids by which graphs name them; no two share one."""

    def __init__(self) -> None:
        self._ids = itertools.count()
        self.of_layers: weakref.WeakValueDictionary[int, LayerGroup] = weakref.WeakValueDictionary()
        self.compiled: Dict[int, Any] = {}  # until the compiled core drops them; for its callbacks (`backends.native`)

    def next_id(self) -> int:
        """Return the id of a new group, with which this process begins to look for failures."""
        failures.begin_use()
        return next(self._ids)


groups = LayerGroups()


class LayerGroup(ABC):
    """The synchronization of one layer over its devices. It lives as long as the layer has these devices.

    ``num_devices`` of the ``spec`` is known. The ``devices`` are in rank order, in which the parameters were
    initialized.
    """

    link: Any = None  # a `gluon_syncbn.meeting.link.Link`, once it is connected with other processes

    def __init__(self, spec: LayerSpec, devices: Sequence[mx.Context]):
        self.spec = spec
        self.devices: List[mx.Context] = list(devices)
        self.id = groups.next_id()
        groups.of_layers[self.id] = self

    @abstractmethod
    def connect(self) -> Any:
        """Find the other processes, if there are some, and return the link to them. The layer is about to train."""

    def set_limits(self, limits: Tuple[float, float]) -> None:  # noqa: B027
        """Set r_max and d_max of Batch Renormalization, where the back end has it. Nothing may be running."""


class Backend(ABC):
    """How a layer on several devices is computed."""

    name: str
    group: Type[LayerGroup]

    @abstractmethod
    def unavailable_reason(self, spec: LayerSpec, devices: Sequence[mx.Context]) -> str:
        """The reason why it cannot run this layer on these devices; empty if it can."""

    @abstractmethod
    def description(self, devices: Sequence[mx.Context]) -> str:
        """Logged when this back end is chosen as the first choice."""

    @abstractmethod
    def normalize(self, arrays: Sequence[mx.nd.NDArray], spec: LayerSpec, group: str, devices: Sequence[mx.Context]):
        """Batch Normalization with the statistics of the whole group, as an NDArray of the shape and dtype of x.

        ``arrays`` are x, of at least 2 dimensions, in float32, float64, float16 or bfloat16; and gamma, beta, running
        mean and running variance, of shape (C,) and ``spec.dtype``. ``group`` is its id. NaN stays NaN after the
        activation.
        """

    @abstractmethod
    def nodes(
        self,
        norm: Norm,
        spec: LayerSpec,
        group: str,
        devices: Sequence[mx.Context],
        kind: Kind,
        dtype: Any,
        after: Optional[Entry],
    ) -> Tuple[Entry, Entry]:
        """The same as nodes of a graph: the last node, and the order token for the layer's next call in the graph.

        The nodes replace ``norm``, and the last has its name, hidden attributes and activation. ``group`` is the id of
        the group; or the JSON text of the spec, of which the node makes an open group. ``devices`` are those that are
        known before they come, and ``dtype`` is x's, if it is known. ``after`` is the previous call's order token.
        """
