"""Rewrites the Batch Normalizations of a symbol, and leaves everything else in it as it was.

A symbol is edited as the JSON text that MXNet itself writes and reads, so that every other node keeps its name, its
attributes and its place, whatever operator it is. Each Batch Normalization is replaced by a small symbol of its own (a
*fragment*), whose last node takes over the name and the hidden attributes (``__lr_mult__`` and the like), so that
``sym.get_internals()['bn0_output']`` finds it as before.

A synchronized layer is several nodes, the last of which is marked (`gluon_syncbn.graphs.mark`).
"""

import json
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Set, Tuple, Union

import mxnet as mx

from gluon_syncbn.base.mxnet_private import json_of
from gluon_syncbn.graphs.mark import MARK, read_mark

# What MXNet calls Batch Normalization, and whether it ends in a ReLU.
_PLAIN = {
    "BatchNorm": False,
    "BatchNorm_v1": False,
    "_npx_batch_norm": False,
    "_contrib_SyncBatchNorm": False,
    "_contrib_BatchNormWithReLU": True,
}

Entry = Tuple[int, int, int]  # an output of a node, as JSON names it: index of the node, index of the output, version


class Norm(NamedTuple):
    """One Batch Normalization of a graph, plain or synchronized.

    ``options`` are those of the synchronized layer (``num_devices``, ``group_size``, ``timeout``, ``kvstore``,
    ``dtype``); None if it is plain. ``hidden`` are the attributes that MXNet keeps for others, ``data`` the name under
    which the graph's internals list its data.
    """

    name: str
    operator: str
    axis: int
    epsilon: float
    momentum: float
    fix_gamma: bool
    use_global_stats: bool
    relu: bool
    options: Optional[Dict[str, Any]]
    hidden: Dict[str, str]
    inputs: List[Entry]
    data: str
    parameters: List[str]  # names of the variables gamma, beta, moving mean and variance

    @property
    def running_mean(self) -> str:
        return self.parameters[2]


Make = Callable[[Norm, List[mx.sym.Symbol], Optional[mx.sym.Symbol]], Optional[Tuple[mx.sym.Symbol, Any]]]


class Graph:
    """A symbol, parsed once.

    Parameters
    ----------
    source : Symbol or str
        Stays as it is. A str is the JSON text of one, which this process may not be able to load as it is.
    """

    def __init__(self, source: Union[mx.sym.Symbol, str]):
        self._json = parse(source)
        self._norms = _find_norms(self._json)
        self._is_numpy = isinstance(source, mx.sym.Symbol) and is_numpy(source)

    def norms(self) -> List[Norm]:
        """The Batch Normalizations that can be rewritten, inputs first."""
        return list(self._norms.values())

    def count_others(self) -> int:
        """How many Batch Normalizations cannot be rewritten: their mean or variance is an output too."""
        nodes = self._json["nodes"]
        return sum(node["op"] in _PLAIN and index not in self._norms for index, node in enumerate(nodes))

    def rewrite(
        self, make: Make, after: Optional[Dict[str, str]] = None
    ) -> Tuple[mx.sym.Symbol, Dict[str, mx.sym.Symbol]]:
        """Replace Batch Normalizations.

        Parameters
        ----------
        make : callable
            ``make(norm, inputs, after)`` returns what is to take the place of ``norm``, or None to leave it: ``out``, a
            symbol of the symbols ``inputs`` (data, gamma, beta, moving mean, moving variance), and its order token,
            which is handed as ``after`` to the next one with the same running mean; None if that need not know.
        after : dict, optional
            Names of variables that stand for the order token before the first one, by the name of the running mean.

        Returns
        -------
        Symbol, dict
            The new symbol, and the last order tokens by the name of the running mean.
        """
        builder = _Builder(self._json)
        tokens = {running_mean: builder.variable(name) for running_mean, name in (after or {}).items()}
        for index, node in enumerate(self._json["nodes"]):
            norm = self._norms.get(index)
            if norm is None:
                builder.keep(index, node)
                continue
            inputs = [mx.sym.var(f"input{i}") for i in range(5)]
            before = mx.sym.var("after") if norm.running_mean in tokens else None
            with _Names(norm.name):
                made = make(norm, inputs, before)
            if made is None:
                builder.keep(index, node)
                continue
            out, token = made
            entries = {f"input{i}": builder.new(entry) for i, entry in enumerate(norm.inputs)}
            if before is not None:
                entries["after"] = tokens[norm.running_mean]
            heads = builder.insert(mx.sym.Group([out] if token is None else [out, token]), entries)
            builder.replace(index, heads[0])
            if token is not None:
                tokens[norm.running_mean] = heads[1]
        outputs = len(self._json["heads"])
        result = builder.finish(list(tokens.values()))
        chosen = mx.sym.Group([result[i] for i in range(outputs)]) if tokens else result
        last_tokens = {running_mean: result[outputs + i] for i, running_mean in enumerate(tokens)}
        return (chosen.as_np_ndarray() if self._is_numpy else chosen), last_tokens


def parse(source: Union[mx.sym.Symbol, str]) -> Dict[str, Any]:
    """A symbol as MXNet's JSON has it."""
    return json.loads(source if isinstance(source, str) else json_of(source))


def is_numpy(symbol: mx.sym.Symbol) -> bool:
    """Whether it is of MXNet's NumPy interface."""
    return isinstance(symbol, mx.sym.numpy._Symbol)


def _find_norms(graph) -> Dict[int, Norm]:
    nodes = graph["nodes"]
    used = [entry for node in nodes for entry in node["inputs"]] + graph["heads"]
    with_statistics = {entry[0] for entry in used if entry[1] > 0}
    found = {}
    for index, node in enumerate(nodes):
        attributes = node.get("attrs", {})
        hidden = {key: value for key, value in attributes.items() if key.startswith("__") and key != MARK}
        if MARK in attributes:
            told = read_mark(attributes[MARK])
            options, relu = told["options"], told["relu"]
            inputs = node["inputs"] if told.get("is_plain") else _inputs_of_marked(nodes, node, relu)
        elif node["op"] in _PLAIN and index not in with_statistics:
            told, options, relu, inputs = attributes, None, _PLAIN[node["op"]], node["inputs"]
        else:
            continue
        found[index] = Norm(
            name=node["name"],
            operator=node["op"],
            axis=int(told.get("axis", 1)),
            epsilon=float(told.get("eps", 1e-3)),
            momentum=float(told.get("momentum", 0.9)),
            fix_gamma=_is_true(told.get("fix_gamma", True)),
            use_global_stats=_is_true(told.get("use_global_stats", False)),
            relu=relu,
            options=options,
            hidden=hidden,
            inputs=inputs,
            data=_output_name(nodes[inputs[0][0]]),
            parameters=[nodes[entry[0]]["name"] for entry in inputs[1:]],
        )
    return found


def _output_name(node) -> str:
    """Of a variable, or an operator that has one output."""
    return node["name"] if node["op"] == "null" else f"{node['name']}_output"


def _inputs_of_marked(nodes, last, relu: bool) -> List[Entry]:
    """Data, gamma, beta, running mean and variance of the synchronized layer that ends in this node.

    Raises
    ------
    ValueError
        The node computes more than the layer with ``relu`` or without.
    """
    if last["op"] == "BatchNorm":  # the portable one: this node has x, and a weight from the custom operator
        data, custom = last["inputs"][0], nodes[nodes[last["inputs"][1][0]]["inputs"][0][0]]
        gamma, beta = custom["inputs"][2:4]
    else:  # one node, with one before it and one behind
        custom = nodes[last["inputs"][0][0]]
        is_relu = custom["attrs"].get("activation") == "relu" or custom["attrs"].get("relu") == "1"  # the older name
        if "skip" in custom["attrs"] or is_relu != relu or custom["attrs"].get("activation") == "leaky":
            raise ValueError(
                f"the node '{last['name']}' computes a SyncBatchNorm and what follows it (fuse=True), and cannot be "
                f"taken apart. Take the symbol from before it was bound or partitioned."
            )
        dense, gamma, beta = custom["inputs"][:3]
        data = nodes[dense[0]]["inputs"][0]
    return [data, gamma, beta, *custom["inputs"][-2:]]


def _is_true(value) -> bool:
    return str(value) in ("True", "true", "1")


class _Names(mx.name.NameManager):
    """Given names as they are, without the prefix of a block that is being traced; others begin with ``prefix``."""

    def __init__(self, prefix: str):
        super().__init__()
        self._prefix = prefix

    def get(self, name, hint):
        return name or f"{self._prefix}_{super().get(None, hint)}"


class _Builder:
    """The new graph while it grows; nodes of the old one are named by their old indices."""

    def __init__(self, graph: Dict[str, Any]):
        self._graph = graph
        self._nodes: List[Dict[str, Any]] = []
        self._places: Dict[int, int] = {}  # of kept nodes, by old index
        self._replaced: Dict[int, Entry] = {}

    def new(self, entry: Entry) -> Entry:
        """What an entry of the old graph has become."""
        if entry[0] in self._replaced:
            return self._replaced[entry[0]]
        return (self._places[entry[0]], *entry[1:])

    def variable(self, name: str) -> Entry:
        self._nodes.append({"op": "null", "name": name, "inputs": []})
        return (len(self._nodes) - 1, 0, 0)

    def keep(self, index: int, node) -> None:
        kept = {**node, "inputs": [self.new(entry) for entry in node["inputs"]]}
        if "control_deps" in node:
            kept["control_deps"] = [self.new((other, 0, 0))[0] for other in node["control_deps"]]
        self._places[index] = len(self._nodes)
        self._nodes.append(kept)

    def replace(self, index: int, entry: Entry) -> None:
        self._replaced[index] = entry

    def insert(self, fragment: mx.sym.Symbol, inputs: Dict[str, Entry]) -> List[Entry]:
        """Add a fragment's nodes, with entries for its variables; returns what its outputs have become."""
        graph = parse(fragment)
        places: Dict[int, Entry] = {}

        def moved(entry):
            node, output, version = places[entry[0]]
            return (node, output or entry[1], version)

        for index, node in enumerate(graph["nodes"]):
            if node["op"] == "null":
                places[index] = inputs[node["name"]]
            else:
                self._nodes.append({**node, "inputs": [moved(entry) for entry in node["inputs"]]})
                places[index] = (len(self._nodes) - 1, 0, 0)
        return [moved(entry) for entry in graph["heads"]]

    def finish(self, more_heads: List[Entry]) -> mx.sym.Symbol:
        heads = [self.new(entry) for entry in self._graph["heads"]] + more_heads
        return mx.sym.load_json(json.dumps(without_dead_nodes({**self._graph, "nodes": self._nodes, "heads": heads})))


def needed_for(nodes: List[Dict[str, Any]], indices: List[int]) -> Set[int]:
    """These nodes, and all that must run before them."""
    needed: Set[int] = set()
    waiting = list(indices)
    while waiting:
        index = waiting.pop()
        if index not in needed:
            needed.add(index)
            waiting += [entry[0] for entry in nodes[index]["inputs"]] + nodes[index].get("control_deps", [])
    return needed


def without_dead_nodes(graph):
    """Only what the outputs need: MXNet would set up every node of the text, also one whose layer is gone."""
    nodes = graph["nodes"]
    needed = needed_for(nodes, [entry[0] for entry in graph["heads"]])
    order = {old: new for new, old in enumerate(sorted(needed))}
    kept = []
    for old in sorted(needed):
        node = {**nodes[old], "inputs": [(order[entry[0]], *entry[1:]) for entry in nodes[old]["inputs"]]}
        if "control_deps" in node:
            node["control_deps"] = [order[other] for other in node["control_deps"]]
        kept.append(node)
    return {
        "nodes": kept,
        "arg_nodes": [index for index, node in enumerate(kept) if node["op"] == "null"],
        "heads": [(order[entry[0]], *entry[1:]) for entry in graph["heads"]],
        "attrs": graph.get("attrs", {}),
    }
