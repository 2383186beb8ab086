"""What follows a synchronized layer in a graph, computed by the compiled operator in its own two passes.

Three patterns (norm stands for the nodes of a layer that has no activation yet)::

    relu(norm(x))        leaky_relu(norm(x))        relu(norm(x) + skip), in either order

Each is taken only where nobody else reads what lies between: no other node, and not the user, for whom it would be an
output. A sum must be one of equal shapes (``elemwise_add``), since the operator does not broadcast.

It is done to a copy of the graph, as late as can be: when MXNet makes something to run of it (`fusing_graphs`,
`fusing_bind`). So whoever looks at the graph, exports it, or takes it apart finds the plain nodes. The node that
computes all takes over the name of the last one, and so the names of outputs stay. Blocks with an operator hook, which
wants to see every node, are left alone, and those with a partitioner (``optimize_for``), whose result MXNet keeps and
exports. Results are the same: the operator rounds after each step, as the nodes would.

A norm that is fused with a sum runs after the other summand. Where that depends on another call with the same running
statistics (a shared head), the two calls would change places; or, with order tokens, form a circle. So such a norm is
not fused with a sum.
"""

import functools
import json
import logging
import sys
import threading
from collections import Counter, OrderedDict, defaultdict
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import mxnet as mx

from gluon_syncbn.base.mxnet_private import (
    graph_of,
    has_operator_hook,
    has_partitioner,
    json_of,
    owner_of_graph,
    set_graph,
)
from gluon_syncbn.graphs.mark import MARK, read_mark
from gluon_syncbn.graphs.rewrite import is_numpy, needed_for, parse, without_dead_nodes
from gluon_syncbn.step.steps import steps

OPERATOR = "gluon_syncbn_native"  # the compiled operator's name among MXNet's custom operators
RELU, LEAKY_RELU, SKIP = "ReLU", "leaky ReLU", "sum and ReLU"

_log = logging.getLogger("gluon_syncbn")


class _Activation(NamedTuple):
    """Its kind, and what the operator is told of it."""

    kind: str
    told: Dict[str, str]


class _Pattern(NamedTuple):
    """Nodes by index: the activation, the last one of the norm; and the other summand of a sum between them."""

    node: int
    activation: _Activation
    norm: int
    skip: Optional[List[int]] = None

    @property
    def kind(self) -> str:
        return self.activation.kind if self.skip is None else SKIP


def fuse(symbol: mx.sym.Symbol, sums: bool = True) -> Tuple[mx.sym.Symbol, Counter]:
    """A copy in which the patterns are one node each, and how many of each kind there were.

    ``symbol`` itself, and nothing, if there is none. ``sums`` says whether to look for the pattern with a sum.
    """
    text = json_of(symbol)
    if MARK not in text:
        return symbol, Counter()
    graph = parse(text)
    patterns = _Finder(graph).find(sums)
    if not patterns:
        return symbol, Counter()
    kinds = Counter(pattern.kind for pattern in patterns)
    made = mx.sym.load_json(json.dumps(without_dead_nodes(_rewritten(graph, patterns))))
    return (made.as_np_ndarray() if is_numpy(symbol) else made), kinds


class _Finder:
    def __init__(self, graph: Dict[str, Any]):
        self._nodes = graph["nodes"]
        self._readers: Dict[Tuple[int, int], List[Optional[int]]] = defaultdict(list)
        for index, node in enumerate(self._nodes):
            for entry in node["inputs"]:
                self._readers[entry[0], entry[1]].append(index)
        for entry in graph["heads"]:
            self._readers[entry[0], entry[1]].append(None)

    def find(self, sums: bool) -> List[_Pattern]:
        found: List[_Pattern] = []
        for index, node in enumerate(self._nodes):
            activation = _activation_of(node)
            if activation is None:
                continue
            (before, output, *_), *_ = node["inputs"]
            if output or self._readers[before, 0] != [index]:
                continue
            if self._is_norm(before):
                found.append(_Pattern(index, activation, before))
            elif sums and activation.kind == RELU and self._nodes[before]["op"] == "elemwise_add":
                # The second summand first: it leaves the graph's inputs in their order.
                left, right = self._nodes[before]["inputs"]
                for norm, skip in ((right, left), (left, right)):
                    if self._readers[norm[0], norm[1]] == [before] and self._is_summand(norm[0], skip):
                        found.append(_Pattern(index, activation, norm[0], skip))
                        break
        return found

    def _is_summand(self, index: int, skip: List[int]) -> bool:
        """Whether this is the last node of a layer that may be fused with a sum, the other summand of which is
        ``skip``."""
        if not self._is_norm(index):
            return False
        custom = self._nodes[index]["inputs"][0][0]
        running_mean = self._nodes[custom]["inputs"][-2]
        others = {reader for reader in self._readers[running_mean[0], running_mean[1]] if reader != custom}
        is_shared = others and not others.isdisjoint(needed_for(self._nodes, [skip[0]]))
        return not self._readers[custom, 1] and not is_shared

    def _is_norm(self, index: int) -> bool:
        """Whether this is the last node of a layer that may be fused."""
        attributes = self._nodes[index].get("attrs", {})
        if MARK not in attributes or not self._nodes[index]["inputs"]:
            return False
        told = read_mark(attributes[MARK])
        custom = self._nodes[self._nodes[index]["inputs"][0][0]]
        return (
            custom["op"] == "Custom"
            and custom["attrs"].get("op_type") == OPERATOR
            and custom["attrs"].get("activation") == "none"
            and told["options"].get("fuse", True)
        )


def _activation_of(node) -> Optional[_Activation]:
    attributes = node.get("attrs", {})
    operator = node["op"].replace("_npx_", "")
    if operator == "relu" or (operator in ("Activation", "activation") and attributes.get("act_type") == "relu"):
        return _Activation(RELU, {"activation": "relu", "in_place": "0"})  # there is no way back from a ReLU
    if operator in ("LeakyReLU", "leaky_relu") and attributes.get("act_type", "leaky") == "leaky":
        slope = float(attributes.get("slope", 0.25))
        return _Activation(LEAKY_RELU, {"activation": "leaky", "slope": repr(slope)}) if slope > 0 else None
    return None


def _rewritten(graph: Dict[str, Any], patterns: List[_Pattern]) -> Dict[str, Any]:
    """The patterns' nodes are left behind without readers."""
    old = graph["nodes"]
    by_activation = {pattern.node: pattern for pattern in patterns}
    nodes: List[Dict[str, Any]] = []
    places: Dict[int, int] = {}

    def new(entry):
        return [places[entry[0]], *entry[1:]]

    for index, node in enumerate(old):
        pattern = by_activation.get(index)
        if pattern is None:
            kept = {**node, "inputs": [new(entry) for entry in node["inputs"]]}
            if "control_deps" in node:
                kept["control_deps"] = [places[other] for other in node["control_deps"]]
            nodes.append(kept)
        else:
            last = old[pattern.norm]
            custom = old[last["inputs"][0][0]]
            told = {**custom["attrs"], **pattern.activation.told}
            if pattern.skip is None:  # it stays where it is: others may read its order token
                place = places[last["inputs"][0][0]]
                nodes[place]["attrs"] = told
            else:
                dense = old[custom["inputs"][0][0]]  # what x passes, the skip must pass, too
                nodes.append({**dense, "name": dense["name"] + "_skip", "inputs": [new(pattern.skip)]})
                inputs = [[len(nodes) - 1, 0, 0], *map(new, custom["inputs"])]
                nodes.append({**custom, "attrs": {**told, "skip": "1"}, "inputs": inputs})
                place = len(nodes) - 1
            hidden = {key: value for key, value in node.get("attrs", {}).items() if key.startswith("__")}
            attrs = {**last["attrs"], **hidden}
            nodes.append({**last, "name": node["name"], "attrs": attrs, "inputs": [[place, 0, 0]]})
        places[index] = len(nodes) - 1
    return {**graph, "nodes": nodes, "heads": [new(entry) for entry in graph["heads"]]}


def _say(name: str, kinds: Counter) -> None:
    if kinds:
        counts = ", ".join(f"{count} × {kind}" for kind, count in kinds.items())
        _log.info("%s: its norms compute what follows them in their own passes (%s).", name, counts)


def _loses_marks(symbol: mx.sym.Symbol) -> bool:
    """Whether a mark is on an operator that partitioners take out, as `gluon_syncbn.backends.native` explains."""
    return any(node["op"] == "_copy" and MARK in node.get("attrs", {}) for node in parse(symbol)["nodes"])


def fusing_graphs(get_graph):
    """``HybridBlock._get_graph``: what is made to run of it is fused; what is kept, and exported, is not."""

    @functools.wraps(get_graph)
    def _get_graph(self, *args):
        is_to_run = owner_of_graph(sys._getframe(1)) is self
        if is_to_run and has_partitioner(self) and graph_of(self) and _loses_marks(graph_of(self)[1]):
            set_graph(self, ())  # it was made before the partitioner was chosen
        inputs, out = get_graph(self, *args)
        if not is_to_run or has_operator_hook(self) or has_partitioner(self):
            return inputs, out
        fused, kinds = fuse(out)
        _say(self.name, kinds)
        return inputs, fused

    return _get_graph


class _BoundSymbols:
    """What symbols have become, by their handles.

    Each device's executor is bound by itself, and all must be bound to one symbol: its nodes are where devices meet. So
    the last few are kept, and with them what they were made of, or another symbol could come to have that handle.
    """

    _MOST = 16

    def __init__(self):
        self._kept = OrderedDict()  # by handle: the symbol, its text, and what it has become
        self._lock = threading.Lock()

    def fused(self, symbol: mx.sym.Symbol) -> Optional[mx.sym.Symbol]:
        """None if it has no synchronized layers."""
        text = json_of(symbol)
        if MARK not in text:
            return None
        key = symbol.handle.value
        with self._lock:
            kept = self._kept.get(key)
            if kept is None or kept[1] != text:
                made, kinds = fuse(symbol)
                if _inputs_of(made) != _inputs_of(symbol):
                    made, kinds = fuse(symbol, sums=False)
                _say(symbol.name or "symbol", kinds)
                kept = symbol, text, made
            self._kept[key] = kept
            self._kept.move_to_end(key)
            while len(self._kept) > self._MOST:
                self._kept.popitem(last=False)
        return kept[2]


_bound_symbols = _BoundSymbols()


def fusing_bind(bind):
    """``Symbol.bind`` and ``simple_bind``, as a Module calls them: arguments and states stay in their order."""

    @functools.wraps(bind)
    def fused_bind(self, *args, **kwargs):
        fused = _bound_symbols.fused(self)
        if fused is None:
            return bind(self, *args, **kwargs)
        executor = bind(fused, *args, **kwargs)
        steps.executors.add(executor)
        return executor

    return fused_bind


def _inputs_of(symbol: mx.sym.Symbol):
    return symbol.list_arguments(), symbol.list_auxiliary_states()
