"""What a back end offers: all that the layer, symbols and the choice between back ends know of it.

A new one is a subclass of `Backend`, named in `gluon_syncbn.backends.choose`.
"""

from abc import ABC, abstractmethod
from typing import Any, Dict, NamedTuple, Optional, Sequence, Tuple

import mxnet as mx

from gluon_syncbn.graphs.mark import Form, mark
from gluon_syncbn.meeting.spec import GroupReference, GroupSpec, LayerGroup


class Node(NamedTuple):
    """A layer in a graph that is being made.

    ``name`` and ``hidden``, attributes that MXNet keeps for others, are those of the layer's last node, and ``spec`` is
    what its mark tells of the group. ``after`` is the order token of the call that must come before this one, if there
    is one; ``is_static`` says whether the graph is for ``static_alloc`` and ``static_shape``, and ``is_partitioned``
    whether MXNet takes it apart (``optimize_for``); ``dtypes`` are those of the graph's inputs, by name, as far as they
    are known.
    """

    name: str
    spec: GroupSpec
    hidden: Optional[Dict[str, str]] = None
    after: Optional[mx.sym.Symbol] = None
    is_static: bool = False
    is_partitioned: bool = False
    dtypes: Dict[str, Any] = {}

    def marked(self, form: Form, relu: bool) -> Dict[str, Any]:
        """Name and attributes of the last node; ``relu`` says whether it computes one."""
        return {"name": self.name, "attr": {**(self.hidden or {}), **mark(self.spec, form, relu)}}


class Backend(ABC):
    """How a layer on several devices is computed."""

    name: str
    works_in_place: bool  # whether it can do without x in the backward pass

    @abstractmethod
    def unavailable_reason(self, devices: Sequence[mx.Context], kvstore) -> str:
        """Why it cannot run on these devices with this ``kvstore`` of the user's; empty if it can."""

    @abstractmethod
    def description(self, devices: Sequence[mx.Context]) -> str:
        """What the log says of it where it can run, and nothing was preferred to it."""

    @abstractmethod
    def make_group(self, spec: GroupSpec, devices: Sequence[mx.Context]) -> LayerGroup:
        """Of a layer; ``devices`` in rank order."""

    @abstractmethod
    def normalize(
        self, F, arrays: Sequence, group: GroupReference, form: Form, node: Optional[Node] = None
    ) -> Tuple[Any, Any]:
        """Batch Normalization with the statistics of the whole group.

        Parameters
        ----------
        F : mx.nd or mx.sym
        arrays : five NDArrays or Symbols
            x, of any shape with at least 2 dimensions, in float32, float64, float16 or bfloat16; gamma, beta, running
            mean and running variance, of shape (C,) and the group's dtype.
        group : GroupReference
        form : Form
            Behind a ReLU, NaN stays NaN.
        node : Node
            If F makes symbols.

        Returns
        -------
        out, order_token : NDArray or Symbol
            The result, shape and dtype of x; and what the next call of the layer in the same graph is to have as
            ``after``.
        """
