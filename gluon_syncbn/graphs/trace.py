"""The layers of the graph that Gluon is making.

Gluon makes a graph of a net by calling its blocks with symbols, once, and keeps it. A synchronized layer is a plain
``BatchNorm`` node there, as in a net that was never converted. Meanwhile the layers are noted in the order of their
calls: the layer of a node is found again by the name of its running mean and by the number of the call, a hidden
attribute. The node is marked, too, so that a SymbolBlock that is made of the graph synchronizes.
"""

import threading
from collections import defaultdict
from typing import Dict, List, Optional

from mxnet.gluon import Block

from gluon_syncbn.base.mxnet_private import graph_of
from gluon_syncbn.graphs.norms import CALL, Norm


class Layers:
    """The synchronized layers in a graph, in the order of their calls."""

    def __init__(self) -> None:
        self._calls: Dict[str, List[Block]] = defaultdict(list)  # by running mean

    def add(self, layer: Block) -> Dict[str, str]:
        """Note a call of the layer; returns a hidden attribute for its node."""
        calls = self._calls[layer.running_mean.name]
        calls.append(layer)
        return {CALL: str(len(calls) - 1)}

    def of(self, norm: Norm) -> Optional[Block]:
        """The layer of a node, which may have been converted back since; None if it has none."""
        calls = self._calls.get(norm.running_mean, [])
        return calls[norm.call] if norm.call is not None and norm.call < len(calls) else None

    def all(self) -> List[Block]:
        """Each layer once, also if it has been converted back."""
        return list(dict.fromkeys(layer for calls in self._calls.values() for layer in calls))


_tracing = threading.local()  # `layers`: of the graph that a thread is making
_ATTRIBUTE = "_syncbn_layers"  # of a net; so it is copied with the graph, and goes with it


def tracing() -> Optional[Layers]:
    """The layers of the graph that this thread is making for a net; None if a user calls blocks with symbols."""
    return getattr(_tracing, "layers", None)


def layers_of(net: Block) -> Layers:
    """The layers in the graph that the net keeps, if it keeps one."""
    return (vars(net).get(_ATTRIBUTE) if graph_of(net) else None) or Layers()


def set_layers(net: Block, layers: Layers) -> None:
    """Set the layers in the graph that the net keeps."""
    vars(net).pop(_ATTRIBUTE, None)
    if layers.all():
        vars(net)[_ATTRIBUTE] = layers


def noting_layers(get_graph, net, *args):
    """``HybridBlock._get_graph``: the layers of a graph that is made are noted."""
    if graph_of(net):
        return get_graph(net, *args)
    outer, _tracing.layers = tracing(), Layers()
    try:
        made = get_graph(net, *args)
        set_layers(net, _tracing.layers)
    finally:
        _tracing.layers = outer
    return made
