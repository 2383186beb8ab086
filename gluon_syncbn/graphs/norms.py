"""The Batch Normalizations of a graph: found, marked, and made plain.

A graph that a user can see has plain ``BatchNorm`` nodes. A node that is to synchronize is marked: a hidden attribute
has its `LayerSpec`.

Gluon makes a graph of a net by calling its blocks with symbols, once, and keeps it. Meanwhile the layers are noted in
the order of their calls: the layer of a node is found again by the name of its running mean and by the number of the
call, another hidden attribute.
"""

import json
import threading
from collections import defaultdict
from typing import Callable, Dict, List, NamedTuple, Optional, Tuple

import mxnet as mx
from mxnet.gluon import Block

from gluon_syncbn.base.mxnet_private import graph_of, json_of, operator_options
from gluon_syncbn.graphs.graph import Entry, Graph, Node
from gluon_syncbn.layer.spec import LayerSpec

MARK = "__syncbn__"
CALL = "__syncbn_call__"  # in the graph of a net: the number of the call, among those with the same running mean

# MXNet's operators of Batch Normalization, and the activation in each.
_PLAIN = {
    "BatchNorm": None,
    "BatchNorm_v1": None,
    "_npx_batch_norm": None,
    "_contrib_SyncBatchNorm": None,
    "_contrib_BatchNormWithReLU": "relu",
}
_PARAMETERS = ("gamma", "beta", "running_mean", "running_var")


def mark(spec: LayerSpec, bound_for: Optional[int] = None) -> Dict[str, str]:
    """The attribute that marks a BatchNorm; ``bound_for`` is the number of devices that its layer has now."""
    more = {"bound_for": bound_for} if bound_for else {}
    return {MARK: spec.but(activation=None).to_json(**more)}


def is_marked(symbol: mx.sym.Symbol) -> bool:
    """Whether it has nodes that are to synchronize."""
    return MARK in json_of(symbol)


def has_what_runs(symbol: mx.sym.Symbol) -> bool:
    """Whether it has nodes that synchronize: it is a lowered copy, or such a copy that a partitioner took apart."""
    return '"op_type": "gluon_syncbn_' in json_of(symbol)


def refuse_what_runs(symbol: mx.sym.Symbol, where: str) -> None:
    """ValueError if the symbol is a lowered copy, whose nodes cannot be made plain, or be given other options."""
    if has_what_runs(symbol):
        raise ValueError(
            f"{where}: Symbol.optimize_for has made this symbol the graph that runs, which has no BatchNorm any more. "
            f"Take the symbol from before, and call optimize_for last."
        )


class Norm(NamedTuple):
    """One Batch Normalization of a graph.

    ``bound_for`` is the number of devices that its layer had when a user's symbol was made of it.
    """

    node: Node
    spec: LayerSpec
    is_marked: bool
    bound_for: Optional[int] = None

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def call(self) -> Optional[int]:
        return int(self.node.attrs[CALL]) if CALL in self.node.attrs else None

    @property
    def num_devices(self) -> Optional[int]:
        """How many devices of a process train it, if that is known."""
        return self.bound_for or self.spec.num_devices

    @property
    def activation(self) -> Optional[str]:
        """The activation that this node computes, too."""
        return _PLAIN[self.node.op]

    @property
    def inputs(self) -> List[Entry]:
        """Data, gamma, beta, running mean and running variance."""
        return self.node.inputs

    @property
    def hidden(self) -> Dict[str, str]:
        return {key: value for key, value in self.own_attributes().items() if key.startswith("__")}

    def own_attributes(self) -> Dict[str, str]:
        return {key: value for key, value in self.node.attrs.items() if key not in (MARK, CALL)}

    def unmark(self) -> None:
        """Take this package's attributes from the node."""
        self.node.attrs = self.own_attributes()

    @property
    def data(self) -> str:
        """The name under which the graph's internals list its data."""
        node = self.inputs[0].node
        return node.name if node.is_variable else f"{node.name}_output"

    @property
    def parameters(self) -> Dict[str, str]:
        """The names of its variables, by the layer's names for them."""
        return {name: entry.node.name for name, entry in zip(_PARAMETERS, self.inputs[1:])}

    @property
    def running_mean(self) -> str:
        return self.parameters["running_mean"]

    def plain(self, **marks: str) -> Entry:
        """A plain BatchNorm in its place, with a ReLU if it has one, and with these marks."""
        attrs = self.own_attributes()
        if self.node.op != "BatchNorm":
            spec = self.spec
            options = {"axis": spec.axis, "eps": spec.epsilon, "momentum": spec.momentum, "fix_gamma": not spec.scale}
            options["use_global_stats"] = spec.use_global_stats
            attrs = {**{name: str(value) for name, value in options.items()}, **self.hidden}
        name = f"{self.name}_norm" if self.activation else self.name
        out = Entry(Node("BatchNorm", name, {**attrs, **marks}, self.inputs))
        return Entry(Node("relu", self.name, self.hidden, [out])) if self.activation else out


def find_norms(graph: Graph) -> List[Norm]:
    """The Batch Normalizations that can synchronize, inputs first."""
    readers = graph.readers()
    found = []
    for node in graph.nodes:
        if node.op not in _PLAIN or readers.get((node, 1)) or readers.get((node, 2)):
            continue
        spec, bound_for = _read_mark(node) if MARK in node.attrs else (_spec_of_plain(node), None)
        found.append(Norm(node, spec, MARK in node.attrs, bound_for))
    return found


def replace_norms(graph: Graph, change: Callable[[Norm], Optional[Entry]]) -> None:
    """Replace each Batch Normalization by the result of ``change``, also in bodies of loops and branches."""
    made = [(norm.node, change(norm)) for norm in find_norms(graph)]
    graph.replace({node: entry for node, entry in made if entry is not None})
    for node in graph.nodes:
        for number, body in enumerate(node.more.get("subgraphs", ())):
            inside = Graph(body)
            replace_norms(inside, change)
            node.more["subgraphs"][number] = inside.text()


def take_frozen(norm: Norm, layer: Block) -> None:
    """Bring the attribute up to date that `freeze_statistics` changes."""
    if _is_true(norm.node, "use_global_stats", False) != is_frozen(layer):
        norm.node.attrs["use_global_stats"] = str(is_frozen(layer))


def is_frozen(layer: Block) -> bool:
    """Whether a BatchNorm layer normalizes with its running statistics in training, too."""
    return bool(operator_options(layer)["use_global_stats"])


def count_others(graph: Graph) -> int:
    """How many Batch Normalizations cannot synchronize: their mean or variance is an output too."""
    found = {norm.node for norm in find_norms(graph)}
    return sum(node.op in _PLAIN and node not in found for node in graph.nodes)


def _read_mark(node: Node) -> Tuple[LayerSpec, Optional[int]]:
    try:
        values = dict(json.loads(node.attrs[MARK]))
    except (TypeError, ValueError) as problem:
        raise ValueError(f"the mark of node '{node.name}' is damaged: {node.attrs[MARK]!r} ({problem!r}).") from None
    bound_for = values.pop("bound_for", None)
    return LayerSpec.from_json(json.dumps({**values, "name": node.name})), bound_for


def _is_true(node: Node, name: str, default: bool) -> bool:
    return node.attrs.get(name, str(default)) in ("True", "true", "1")


def _spec_of_plain(node: Node) -> LayerSpec:
    return LayerSpec(
        node.name,
        axis=int(node.attrs.get("axis", 1)),
        epsilon=float(node.attrs.get("eps", 1e-3)),
        momentum=float(node.attrs.get("momentum", 0.9)),
        scale=not _is_true(node, "fix_gamma", True),
        use_global_stats=_is_true(node, "use_global_stats", False),
        activation=_PLAIN[node.op],
    )


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


class _Making(threading.local):
    """The making of graphs."""

    # One thread at a time: MXNet keeps names of new arrays and symbols in blocks, and reads a variable.
    lock = threading.RLock()
    # In the graph that this thread is making for a net; None if a user calls blocks with symbols.
    layers: Optional[Layers] = None


making = _Making()
_ATTRIBUTE = "_syncbn_layers"  # of a net; so it is copied with the graph, and goes with it


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
    outer, making.layers = making.layers, Layers()
    try:
        made = get_graph(net, *args)
        set_layers(net, making.layers)
    finally:
        making.layers = outer
    return made
