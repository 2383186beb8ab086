"""The Batch Normalizations of a graph: found, marked, and replaced.

A synchronized layer is several nodes, the last of which is marked: a hidden attribute has the layer's `LayerSpec`, so
that it can be found, replaced by a plain BatchNorm, or made anew for another number of devices. A plain BatchNorm is
marked, too, if its layer was on one device and is to synchronize once it has moved.

Each Batch Normalization is replaced by a small symbol of its own, whose last node takes over the name and the hidden
attributes (``__lr_mult__`` and the like), so that ``sym.get_internals()['bn0_output']`` finds it as before.
"""

import json
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import mxnet as mx

from gluon_syncbn.base.mxnet_private import json_of
from gluon_syncbn.graphs.graph import Entry, Graph, Node
from gluon_syncbn.layer.spec import LayerSpec

MARK = "__syncbn__"

# What MXNet calls Batch Normalization, and what it ends in.
_PLAIN = {
    "BatchNorm": None,
    "BatchNorm_v1": None,
    "_npx_batch_norm": None,
    "_contrib_SyncBatchNorm": None,
    "_contrib_BatchNormWithReLU": "relu",
}
_PARAMETERS = ("gamma", "beta", "running_mean", "running_var")


def mark(spec: LayerSpec, is_plain: bool = False) -> Dict[str, str]:
    """The attribute that marks a layer's last node; ``is_plain`` if that is a plain BatchNorm, for now."""
    return {MARK: spec.to_json(**({"is_plain": True} if is_plain else {}))}


def is_marked(symbol: mx.sym.Symbol) -> bool:
    """Whether it has synchronized layers."""
    return MARK in json_of(symbol)


def _read_mark(node: Node) -> Tuple[LayerSpec, bool]:
    """The layer that ends in this node, and whether it is a plain BatchNorm for now."""
    try:
        values = dict(json.loads(node.attrs[MARK]))
        is_plain = values.pop("is_plain", False)
        if "options" in values:  # as version 0.1.0 wrote it
            options = values.pop("options")
            relu, scale = values.pop("relu"), not values.pop("fix_gamma")
            values = {"epsilon": values.pop("eps"), "scale": scale, "activation": "relu" if relu else None, **values}
            values.update(options)
    except (KeyError, TypeError, ValueError) as problem:
        raise ValueError(f"the mark of node '{node.name}' is damaged: {node.attrs[MARK]!r} ({problem!r}).") from None
    return LayerSpec.from_json(json.dumps({**values, "name": node.name})), is_plain


def spec_of(node: Node) -> LayerSpec:
    """The layer that ends in this node, which is marked."""
    return _read_mark(node)[0]


class Norm(NamedTuple):
    """One Batch Normalization of a graph, plain or synchronized; ``inputs`` are data, gamma, beta and statistics."""

    node: Node
    spec: LayerSpec
    is_marked: bool
    inputs: List[Entry]

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def hidden(self) -> Dict[str, str]:
        """The attributes that MXNet keeps for others."""
        return {key: value for key, value in self.node.attrs.items() if key.startswith("__") and key != MARK}

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


def find_norms(graph: Graph) -> List[Norm]:
    """The Batch Normalizations that can be replaced, inputs first."""
    readers = graph.readers()
    found = []
    for node in graph.nodes:
        if MARK in node.attrs:
            spec, is_plain = _read_mark(node)
            found.append(Norm(node, spec, True, node.inputs if is_plain else _inputs_of_marked(node, spec)))
        elif node.op in _PLAIN and not (readers.get((node, 1)) or readers.get((node, 2))):
            found.append(Norm(node, _spec_of_plain(node), False, node.inputs))
    return found


def count_others(graph: Graph) -> int:
    """How many Batch Normalizations cannot be replaced: their mean or variance is an output too."""
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


def _inputs_of_marked(last: Node, spec: LayerSpec) -> List[Entry]:
    """Data, gamma, beta, running mean and variance of the synchronized layer that ends in this node.

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


# ``make(norm, inputs, after)`` returns what takes the place of a norm, or None to leave it: ``out``, a symbol of the
# symbols ``inputs`` (data, gamma, beta, moving mean, moving variance), and its order token. That is handed as ``after``
# to the next norm with the same running mean; None if that need not know.
Make = Callable[[Norm, List[mx.sym.Symbol], Optional[mx.sym.Symbol]], Optional[Tuple[mx.sym.Symbol, Any]]]


def replace_norms(
    graph: Graph, make: Make, after: Optional[Dict[str, str]] = None
) -> Tuple[mx.sym.Symbol, Dict[str, mx.sym.Symbol]]:
    """Replace Batch Normalizations; ``graph`` is of no use afterwards.

    Parameters
    ----------
    graph : Graph
    make : callable
        See `Make`.
    after : dict, optional
        Names of variables that stand for the order token before the first one, by the name of the running mean.

    Returns
    -------
    Symbol, dict
        The new symbol, and the last order tokens by the name of the running mean.
    """
    tokens = {running_mean: Entry(Node("null", name, {})) for running_mean, name in (after or {}).items()}
    replaced: Dict[Node, Entry] = {}
    for norm in find_norms(graph):
        inputs = [mx.sym.var(f"input{i}") for i in range(5)]
        before = mx.sym.var("after") if norm.running_mean in tokens else None
        with _Names(norm.name):
            made = make(norm, inputs, before)
        if made is None:
            continue
        out, token = made
        entries = {f"input{i}": entry for i, entry in enumerate(norm.inputs)}
        if before is not None:
            entries["after"] = tokens[norm.running_mean]
        heads = graph.insert(mx.sym.Group([out] if token is None else [out, token]), entries)
        replaced[norm.node] = heads[0]
        if token is not None:
            tokens[norm.running_mean] = heads[1]
    outputs = len(graph.heads)
    graph.heads += tokens.values()
    graph.replace(replaced)
    result = graph.symbol()
    if not tokens:
        return result, {}
    everything = list(result.as_nd_ndarray())
    chosen = mx.sym.Group(everything[:outputs])
    last_tokens = dict(zip(tokens, everything[outputs:]))
    return (chosen.as_np_ndarray() if graph.is_numpy else chosen), last_tokens


class _Names(mx.name.NameManager):
    """Names that are given stay as they are, without the prefix of a block that is being traced; others begin with
    ``prefix``."""

    def __init__(self, prefix: str):
        super().__init__()
        self._prefix = prefix

    def get(self, name, hint):
        return name or f"{self._prefix}_{super().get(None, hint)}"
