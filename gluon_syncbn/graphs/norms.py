"""The Batch Normalizations of a graph: found, marked, and made plain.

A graph that a user can see has plain ``BatchNorm`` nodes. One of a symbol that is to synchronize is marked: a hidden
attribute has its `LayerSpec`. A node of a net's graph also has the number of its call (`gluon_syncbn.graphs.trace`).
What runs, and what files of older versions have, is several nodes, the last of which is marked.
"""

import json
from typing import Callable, Dict, List, NamedTuple, Optional, Tuple

import mxnet as mx

from gluon_syncbn.base.mxnet_private import json_of, operator_options
from gluon_syncbn.graphs.graph import Entry, Graph, Node
from gluon_syncbn.layer.spec import LayerSpec

MARK = "__syncbn__"
CALL = "__syncbn_call__"  # in the graph of a net: the number of the call, among those with the same running mean

# What MXNet calls Batch Normalization, and what it ends in.
_PLAIN = {
    "BatchNorm": None,
    "BatchNorm_v1": None,
    "_npx_batch_norm": None,
    "_contrib_SyncBatchNorm": None,
    "_contrib_BatchNormWithReLU": "relu",
}
_PARAMETERS = ("gamma", "beta", "running_mean", "running_var")


def mark(spec: LayerSpec, bound_for: Optional[int] = None) -> Dict[str, str]:
    """The attribute that marks a plain BatchNorm; ``bound_for`` is the number of devices that its layer has now."""
    more = {"bound_for": bound_for} if bound_for else {}
    return {MARK: spec.but(activation=None).to_json(is_plain=True, **more)}


def mark_of_last(spec: LayerSpec) -> Dict[str, str]:
    """The attribute that marks the last of the nodes that synchronize."""
    return {MARK: spec.to_json()}


def is_marked(symbol: mx.sym.Symbol) -> bool:
    """Whether it has nodes that are to synchronize, or that do."""
    return MARK in json_of(symbol)


def read_mark(node: Node) -> Tuple[LayerSpec, bool, Optional[int]]:
    """The layer that ends in this node; whether that is a plain BatchNorm; and how many devices the layer had."""
    try:
        values = dict(json.loads(node.attrs[MARK]))
        is_plain, bound_for = values.pop("is_plain", False), values.pop("bound_for", None)
        if "options" in values:  # as version 0.1.0 wrote it
            options = values.pop("options")
            relu, scale = values.pop("relu"), not values.pop("fix_gamma")
            values = {"epsilon": values.pop("eps"), "scale": scale, "activation": "relu" if relu else None, **values}
            values.update(options)
    except (KeyError, TypeError, ValueError) as problem:
        raise ValueError(f"the mark of node '{node.name}' is damaged: {node.attrs[MARK]!r} ({problem!r}).") from None
    return LayerSpec.from_json(json.dumps({**values, "name": node.name})), is_plain, bound_for


class Norm(NamedTuple):
    """One Batch Normalization of a graph; ``inputs`` are data, gamma, beta and statistics.

    ``is_plain`` says whether it is one node, MXNet's own. ``bound_for`` is the number of devices that its layer had
    when a user's symbol was made of it. ``activation`` is what this node computes after it.
    """

    node: Node
    spec: LayerSpec
    is_marked: bool
    is_plain: bool
    inputs: List[Entry]
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
        return _PLAIN[self.node.op] if self.is_plain else self.spec.activation

    @property
    def hidden(self) -> Dict[str, str]:
        """The attributes that MXNet keeps for others."""
        return {key: value for key, value in self._others().items() if key.startswith("__")}

    def _others(self) -> Dict[str, str]:
        """The attributes that are not this package's."""
        return {key: value for key, value in self.node.attrs.items() if key not in (MARK, CALL)}

    def unmark(self) -> None:
        """Take what is this package's from the node."""
        self.node.attrs = self._others()

    @property
    def data(self) -> str:
        """The name under which the graph's internals list its data."""
        node = self.inputs[0].node
        return node.name if node.is_variable else f"{node.name}_output"

    @property
    def parameters(self) -> Dict[str, str]:
        """The names of its variables, by what they are for the layer."""
        return {name: entry.node.name for name, entry in zip(_PARAMETERS, self.inputs[1:])}

    @property
    def running_mean(self) -> str:
        return self.parameters["running_mean"]

    def plain(self, **marks: str) -> Entry:
        """A plain BatchNorm in its place, with a ReLU if it has one, and with these marks."""
        attrs = self._others()
        if self.node.op != "BatchNorm" or not self.is_plain:
            spec = self.spec
            options = {"axis": spec.axis, "eps": spec.epsilon, "momentum": spec.momentum, "fix_gamma": not spec.scale}
            options["use_global_stats"] = spec.use_global_stats
            attrs = {**{name: str(value) for name, value in options.items()}, **self.hidden}
        out = Entry(Node("BatchNorm", self.name, {**attrs, **marks}, self.inputs))
        return Entry(Node("relu", f"{self.name}_relu", {}, [out])) if self.activation else out


def find_norms(graph: Graph) -> List[Norm]:
    """The Batch Normalizations that can synchronize, inputs first."""
    readers = graph.readers()
    found = []
    for node in graph.nodes:
        if node.op in _PLAIN and (readers.get((node, 1)) or readers.get((node, 2))):
            continue
        if MARK in node.attrs:
            spec, is_plain, bound_for = read_mark(node)
            if not is_plain or node.op in _PLAIN:  # not a cast of AMP's
                inputs = node.inputs if is_plain else _inputs_of(node, spec)
                found.append(Norm(node, spec, True, is_plain, inputs, bound_for))
        elif node.op in _PLAIN:
            found.append(Norm(node, _spec_of_plain(node), False, True, node.inputs))
    return found


def replace_norms(graph: Graph, change: Callable[[Norm], Optional[Entry]]) -> None:
    """Put what ``change`` returns in the place of each Batch Normalization, also in bodies of loops and branches."""
    made = [(norm.node, change(norm)) for norm in find_norms(graph)]
    graph.replace({node: entry for node, entry in made if entry is not None})
    for node in graph.nodes:
        for number, body in enumerate(node.more.get("subgraphs", ())):
            inside = Graph(body)
            replace_norms(inside, change)
            node.more["subgraphs"][number] = inside.text()


def take_frozen(norm: Norm, layer) -> bool:
    """Bring the attribute up to date that `freeze_statistics` changes; returns whether it was not."""
    is_frozen = bool(operator_options(layer)["use_global_stats"])
    if (norm.node.attrs.get("use_global_stats", "False") in ("True", "1")) == is_frozen:
        return False
    norm.node.attrs["use_global_stats"] = str(is_frozen)
    return True


def count_others(graph: Graph) -> int:
    """How many Batch Normalizations cannot synchronize: their mean or variance is an output too."""
    found = {norm.node for norm in find_norms(graph)}
    return sum(node.op in _PLAIN and node not in found for node in graph.nodes)


def _spec_of_plain(node: Node) -> LayerSpec:
    def is_true(name: str, default: bool) -> bool:
        return node.attrs.get(name, str(default)) in ("True", "true", "1")

    return LayerSpec(
        node.name,
        axis=int(node.attrs.get("axis", 1)),
        epsilon=float(node.attrs.get("eps", 1e-3)),
        momentum=float(node.attrs.get("momentum", 0.9)),
        scale=not is_true("fix_gamma", True),
        use_global_stats=is_true("use_global_stats", False),
        activation=_PLAIN[node.op],
    )


def _inputs_of(last: Node, spec: LayerSpec) -> List[Entry]:
    """Data, gamma, beta, running mean and variance of the layer that ends in this node, the last of several.

    Raises
    ------
    ValueError
        The node computes more than the layer.
    """
    if last.op == "BatchNorm":  # the portable one: this node has x, and a weight from the custom operator
        data, custom = last.inputs[0], last.inputs[1].node.inputs[0].node
        gamma, beta = custom.inputs[2:4]
    else:  # one node, with one before it and one after it
        custom = last.inputs[0].node
        is_relu = custom.attrs.get("activation") == "relu" or custom.attrs.get("relu") == "1"  # the older name
        is_more = "skip" in custom.attrs or custom.attrs.get("activation") == "leaky"
        if is_more or is_relu != (spec.activation == "relu"):
            raise ValueError(
                f"the node '{last.name}' computes a SyncBatchNorm and what follows it (fuse=True), and cannot be "
                f"taken apart. Take the symbol from before it was bound or partitioned."
            )
        dense, gamma, beta = custom.inputs[:3]
        data = dense.node.inputs[0]
    return [data, gamma, beta, *custom.inputs[-2:]]
