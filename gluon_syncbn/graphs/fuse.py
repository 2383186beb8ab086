"""Fusion: the compiled operator computes the activation after a layer, or a sum and a ReLU, in its own two passes.

Three patterns, where ``norm`` is a layer that has no activation yet::

    relu(norm(x))        leaky_relu(norm(x))        relu(norm(x) + skip), in either order

Each is fused only where nothing else reads the values in between: no other node, and not the user, as an output. A sum
must be one of equal shapes (``elemwise_add``), since the operator does not broadcast.

Only the graph that runs is fused (`gluon_syncbn.graphs.lower`). The node that computes all takes over the name of the
last one, and so the names of outputs stay. Results are the same: the operator rounds after each step, as the nodes do.
Blocks with an operator hook, which sees every node, and blocks with a partitioner (``optimize_for``), which fuses in
its own way, are left alone.

A norm that is fused with a sum runs after the other summand. Where that depends on another call with the same running
statistics (a shared head), the two calls would change places; or, with order tokens, form a circle. So such a norm is
not fused with a sum.
"""

from collections import Counter
from typing import Dict, Iterator, NamedTuple, Optional, Set, Tuple

from gluon_syncbn.graphs.graph import Entry, Graph, Node, Readers, in_order

OPERATOR = "gluon_syncbn_native"  # the compiled operator's name among MXNet's custom operators
RELU, LEAKY_RELU, SKIP = "ReLU", "leaky ReLU", "sum and ReLU"


class _Pattern(NamedTuple):
    """An activation, the last node of the norm before it, and the other summand of a sum between them.

    With ``attrs`` the operator computes the activation.
    """

    kind: str
    node: Node
    attrs: Dict[str, str]
    norm: Node
    skip: Optional[Entry] = None


def fuse(graph: Graph, norms: Set[Node], sums: bool) -> Counter:
    """Make each pattern one node, with ``sums`` also the pattern with a sum; returns how many of each kind there were.

    ``norms`` are the last nodes of the layers that may be fused.
    """
    patterns = list(_patterns(graph, set(filter(_is_ours, norms)), sums))
    graph.replace({pattern.node: Entry(_fused(pattern)) for pattern in patterns})
    return Counter(pattern.kind for pattern in patterns)


def _patterns(graph: Graph, norms: Set[Node], sums: bool) -> Iterator[_Pattern]:
    readers = graph.readers()
    for node in graph.nodes:
        activation = _activation_of(node)
        if activation is None:
            continue
        kind, attrs = activation
        before = node.inputs[0]
        if before.output or readers[before.node, 0] != [node]:
            continue
        if before.node in norms:
            yield _Pattern(kind, node, attrs, before.node)
        elif sums and kind == RELU and before.node.op == "elemwise_add":
            # The second summand first: it leaves the graph's inputs in their order.
            left, right = before.node.inputs
            for norm, skip in ((right, left), (left, right)):
                is_read_here = norm.node in norms and readers[norm.node, norm.output] == [before.node]
                if is_read_here and _can_be_last(norm.node, skip, readers):
                    yield _Pattern(SKIP, node, attrs, norm.node, skip)
                    break


def _can_be_last(norm: Node, skip: Entry, readers: Readers) -> bool:
    """Whether this norm may run after the other summand: the order of calls with its running statistics stays."""
    custom = norm.inputs[0].node
    running_mean = custom.inputs[-2]
    others = set(readers[running_mean.node, running_mean.output]) - {custom}
    is_shared = others and not others.isdisjoint(in_order([skip.node]))
    return not readers.get((custom, 1)) and not is_shared


def _is_ours(node: Node) -> bool:
    """Whether a layer that ends in this node is the compiled operator, without an activation."""
    custom = node.inputs[0].node
    is_ours = custom.op == "Custom" and custom.attrs.get("op_type") == OPERATOR
    return is_ours and custom.attrs.get("activation") == "none"


def _activation_of(node: Node) -> Optional[Tuple[str, Dict[str, str]]]:
    """The kind of the activation that a node is, and the attributes with which the operator computes it."""
    operator = node.op.replace("_npx_", "")
    if operator == "relu" or (operator in ("Activation", "activation") and node.attrs.get("act_type") == "relu"):
        return RELU, {"activation": "relu"}
    if operator in ("LeakyReLU", "leaky_relu") and node.attrs.get("act_type", "leaky") == "leaky":
        slope = float(node.attrs.get("slope", 0.25))
        is_exact = slope > 1e-4  # else float16 has too few digits of the output to recover the input from
        return (LEAKY_RELU, {"activation": "leaky", "slope": repr(slope)}) if is_exact else None
    return None


def _fused(pattern: _Pattern) -> Node:
    """The node that takes the place of the activation."""
    last = pattern.norm
    custom, hidden = last.inputs[0].node, {k: v for k, v in pattern.node.attrs.items() if k.startswith("__")}
    if pattern.skip is None:  # the same operator: others may read its order token
        custom.attrs.update(pattern.attrs)
    else:
        dense = custom.inputs[0].node  # the skip must pass the same operator as x
        skip = Node(dense.op, dense.name + "_skip", dense.attrs, [pattern.skip])
        attrs = {**custom.attrs, **pattern.attrs, "skip": "1"}
        custom = Node(custom.op, custom.name, attrs, [Entry(skip), *custom.inputs])
    return Node(last.op, pattern.node.name, {**last.attrs, **hidden}, [Entry(custom)])
