"""Fusion: the compiled operator computes what follows a layer in a graph in its own two passes.

Three patterns, where ``norm`` is a layer that has no activation yet::

    relu(norm(x))        leaky_relu(norm(x))        relu(norm(x) + skip), in either order

Each is fused only where nobody else reads the values in between: no other node, and not the user, for whom they would
be an output. A sum must be one of equal shapes (``elemwise_add``), since the operator does not broadcast.

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
import logging
import sys
import threading
from collections import Counter, OrderedDict
from typing import Dict, List, NamedTuple, Optional, Tuple

import mxnet as mx

from gluon_syncbn.base.mxnet_private import (
    graph_of,
    has_operator_hook,
    has_partitioner,
    json_of,
    owner_of_graph,
    set_graph,
)
from gluon_syncbn.graphs.graph import Entry, Graph, Node, needed_for
from gluon_syncbn.graphs.norms import MARK, is_marked, spec_of
from gluon_syncbn.mxnet_engine import cpu_resources
from gluon_syncbn.step.steps import steps

OPERATOR = "gluon_syncbn_native"  # the compiled operator's name among MXNet's custom operators
RELU, LEAKY_RELU, SKIP = "ReLU", "leaky ReLU", "sum and ReLU"

_log = logging.getLogger("gluon_syncbn")


class _Activation(NamedTuple):
    """The kind of an activation, and the attributes with which the operator computes it."""

    kind: str
    attrs: Dict[str, str]


class _Pattern(NamedTuple):
    """An activation, the last node of the norm before it, and the other summand of a sum between them."""

    node: Node
    activation: _Activation
    norm: Node
    skip: Optional[Entry] = None

    @property
    def kind(self) -> str:
        return self.activation.kind if self.skip is None else SKIP


def fuse(symbol: mx.sym.Symbol, sums: bool = True) -> Tuple[mx.sym.Symbol, Counter]:
    """A copy in which the patterns are one node each, and how many of each kind there were.

    ``symbol`` itself, and nothing, if there is none. ``sums`` says whether to look for the pattern with a sum.
    """
    if not is_marked(symbol):
        return symbol, Counter()
    graph = Graph(symbol)
    patterns = _Finder(graph).find(sums)
    if not patterns:
        return symbol, Counter()
    graph.replace({pattern.node: Entry(_fused(pattern)) for pattern in patterns})
    return graph.symbol(), Counter(pattern.kind for pattern in patterns)


class _Finder:
    def __init__(self, graph: Graph):
        self._graph = graph
        self._readers = graph.readers()

    def find(self, sums: bool) -> List[_Pattern]:
        found: List[_Pattern] = []
        for node in self._graph.nodes:
            activation = _activation_of(node)
            if activation is None:
                continue
            before = node.inputs[0]
            if before.output or self._readers[before.node, 0] != [node]:
                continue
            if _is_norm(before.node):
                found.append(_Pattern(node, activation, before.node))
            elif sums and activation.kind == RELU and before.node.op == "elemwise_add":
                # The second summand first: it leaves the graph's inputs in their order.
                left, right = before.node.inputs
                for norm, skip in ((right, left), (left, right)):
                    if self._readers[norm.node, norm.output] == [before.node] and self._is_summand(norm.node, skip):
                        found.append(_Pattern(node, activation, norm.node, skip))
                        break
        return found

    def _is_summand(self, node: Node, skip: Entry) -> bool:
        """Whether this is the last node of a layer that may be fused with a sum, the other summand of which is
        ``skip``."""
        if not _is_norm(node):
            return False
        custom = node.inputs[0].node
        running_mean = custom.inputs[-2]
        others = set(self._readers[running_mean.node, running_mean.output]) - {custom}
        is_shared = others and not others.isdisjoint(needed_for([skip.node]))
        return not self._readers.get((custom, 1)) and not is_shared


def _is_norm(node: Node) -> bool:
    """Whether this is the last node of a layer that may be fused."""
    if MARK not in node.attrs or not node.inputs:
        return False
    custom = node.inputs[0].node
    is_ours = custom.op == "Custom" and custom.attrs.get("op_type") == OPERATOR
    return is_ours and custom.attrs.get("activation") == "none" and spec_of(node).fuse


def _activation_of(node: Node) -> Optional[_Activation]:
    operator = node.op.replace("_npx_", "")
    if operator == "relu" or (operator in ("Activation", "activation") and node.attrs.get("act_type") == "relu"):
        return _Activation(RELU, {"activation": "relu"})
    if operator in ("LeakyReLU", "leaky_relu") and node.attrs.get("act_type", "leaky") == "leaky":
        slope = float(node.attrs.get("slope", 0.25))
        return _Activation(LEAKY_RELU, {"activation": "leaky", "slope": repr(slope)}) if slope > 0 else None
    return None


def _fused(pattern: _Pattern) -> Node:
    """The node that takes the place of the activation."""
    last = pattern.norm
    custom, hidden = last.inputs[0].node, {k: v for k, v in pattern.node.attrs.items() if k.startswith("__")}
    if pattern.skip is None:  # the same operator: others may read its order token
        custom.attrs.update(pattern.activation.attrs)
    else:
        dense = custom.inputs[0].node  # what x passes, the skip must pass, too
        skip = Node(dense.op, dense.name + "_skip", dense.attrs, [pattern.skip])
        attrs = {**custom.attrs, **pattern.activation.attrs, "skip": "1"}
        custom = Node(custom.op, custom.name, attrs, [Entry(skip), *custom.inputs])
    return Node(last.op, pattern.node.name, {**last.attrs, **hidden}, [Entry(custom)])


def _say(name: str, kinds: Counter) -> None:
    if kinds:
        counts = ", ".join(f"{count} × {kind}" for kind, count in kinds.items())
        _log.info("%s: its norms compute what follows them in their own passes (%s).", name, counts)


def _loses_marks(symbol: mx.sym.Symbol) -> bool:
    """Whether a mark is on an operator that partitioners take out, as `gluon_syncbn.backends.native` explains."""
    return any(node.op == "_copy" and MARK in node.attrs for node in Graph(symbol).nodes)


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
    """Fused copies of symbols, by the handles of the originals.

    Each device's executor is bound by itself, and all must be bound to one symbol: its nodes are where devices meet. So
    the last few are kept, and with them what they were made of, or another symbol could come to have that handle.
    """

    _MOST = 16

    def __init__(self):
        self._kept = OrderedDict()  # by handle: the symbol, its text, and what it has become
        self._lock = threading.Lock()

    def fused(self, symbol: mx.sym.Symbol) -> Optional[mx.sym.Symbol]:
        """Return the fused copy; None if the symbol has no synchronized layers."""
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
        bound = self if fused is None else fused
        return _bind(bind, bound, fused is not None, args, kwargs)

    return fused_bind


def following_reshape(reshape):
    """``Executor.reshape``, which binds another executor; a Module calls it for a batch of another size."""

    @functools.wraps(reshape)
    def followed_reshape(self, *args, **kwargs):
        return _bind(reshape, self, self in steps.executors, args, kwargs)

    return followed_reshape


def _bind(bind, bound, synchronizes: bool, args, kwargs) -> mx.executor.Executor:
    buffers = cpu_resources.GraphsBuffers()
    executor = cpu_resources.in_one_call(buffers, None, bind, bound, *args, **kwargs)
    cpu_resources.give_buffers(executor, buffers)
    if synchronizes:
        steps.executors.add(executor)
    return executor


def _inputs_of(symbol: mx.sym.Symbol):
    return symbol.list_arguments(), symbol.list_auxiliary_states()
