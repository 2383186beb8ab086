"""Late lowering: a graph of plain Batch Normalizations becomes, in a copy, the graph that runs.

A graph that is kept, saved or shown is the graph of the plain net. When MXNet makes a net's `CachedOp` or an executor
of it, each node in a copy becomes its layer as the layer is *at that moment*: synchronized over the devices that its
Parameters are on, or plain. Then the activations after the layers are fused. After a layer has moved or changed,
another copy is made.

Several calls that share running statistics (one layer, or several that have its Parameters) would run in the order in
which MXNet sorts the nodes, which depends on fusion; and in a static graph in no order at all, since MXNet does not
know that a call writes the statistics. So each call is made to depend on the call before, by an order token.

The body of a loop or branch (``F.contrib.foreach``) is a graph of its own, and is lowered by itself. The parts that a
partitioner has taken out of a symbol run in the partitioner's own way: a norm in them cannot synchronize.
"""

import json
import logging
from ast import literal_eval
from collections import Counter
from functools import partial
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Set, Tuple

import mxnet as mx

from gluon_syncbn.backends.bfloat16 import BFLOAT16, dtype_name, inferred_dtypes, is_bfloat16, mxnet_takes_bfloat16
from gluon_syncbn.backends.choose import choose
from gluon_syncbn.graphs.fuse import fuse
from gluon_syncbn.graphs.graph import Entry, Graph, Kind, Node, in_order
from gluon_syncbn.graphs.norms import MARK, Layers, Norm, find_norms, take_frozen
from gluon_syncbn.layer.spec import symbol_synchronizes
from gluon_syncbn.synchronization import synchronization_of

_log = logging.getLogger("gluon_syncbn")


class _New(NamedTuple):
    """The replacement of a norm. ``make`` takes the order token of the call before, or None, and returns the last node
    and its own token; ``fuses`` is the layer's option."""

    norm: Norm
    make: Callable[[Optional[Entry]], Tuple[Entry, Optional[Entry]]]
    fuses: bool = False


class Lowering:
    """Makes the copy of a symbol that runs, ``symbol``, with ``fused`` patterns of each kind.

    ``layers`` are the layers of the symbol's net; a node without a layer is described by its mark. ``dtypes`` are the
    known dtypes of inputs by name.
    """

    def __init__(self, symbol: mx.sym.Symbol, layers: Layers, dtypes: Dict[str, Any], kind: Kind):
        self._layers, self._kind = layers, kind
        self._dtypes = inferred_dtypes(symbol, dtypes)
        self.fused: Counter = Counter()
        graph = Graph(symbol)
        self._lower(graph)
        self.symbol = graph.symbol()

    def _lower(self, graph: Graph) -> None:
        """Lower a graph in place."""
        norms = find_norms(graph)
        made = [self._new(norm) for norm in norms]
        fusible = _replace(graph, [new for new in made if new is not None])
        for norm in norms:  # or `Symbol.optimize_for`, which MXNet calls for a partitioner, would lower it again
            norm.unmark()
        for node in graph.nodes:
            for number, body in enumerate(node.more.get("subgraphs", ())):
                if node.op in _WITH_BODIES:
                    self._lower_body(node, number, body)
                elif node.op == "_CachedOp" or MARK in json.dumps(body):
                    raise ValueError(
                        f"The symbol cannot be bound: its BatchNorms synchronize, and get_backend_symbol has made the "
                        f"part '{node.name}' of it. To train, bind the symbol that get_backend_symbol has taken; to "
                        f"predict or to quantize, take gluon_syncbn.plain_symbol(symbol) first."
                    )
        if fusible and self._kind.fuses:
            self.fused += fuse(graph, fusible, self._kind.fuses_sums)

    def _lower_body(self, node: Node, number: int, body: Dict[str, Any]) -> None:
        graph = Graph(body)
        before = graph.inputs()
        self._lower(graph)
        after = graph.inputs()
        if after != before:
            _move_inputs(node, number, [after.index(name) for name in before])
        node.more["subgraphs"][number] = graph.text()

    def _new(self, norm: Norm) -> Optional[_New]:
        """The replacement of a norm; None if it stays."""
        layer = self._layers.of(norm)
        if layer is not None:
            take_frozen(norm, layer)
        dtype = self._dtypes.get(norm.data)
        sync = None if layer is None else synchronization_of(layer)  # None if it has been converted back, too
        if sync is not None:
            spec, devices = sync.spec(), sync.devices()
            if sync.synchronizes(spec, devices):
                return _New(norm, partial(sync.nodes, norm, spec, devices, self._kind, dtype), spec.fuse)
        elif layer is None and norm.is_marked:
            spec = norm.spec.but(num_devices=norm.num_devices)
            if symbol_synchronizes(spec):
                devices = [mx.gpu(0)] if mx.context.num_gpus() else []
                nodes = choose(spec, devices).nodes
                return _New(norm, partial(nodes, norm, spec, spec.to_json(), [], self._kind, dtype), spec.fuse)
        if is_bfloat16(dtype) and not mxnet_takes_bfloat16():
            return _New(norm, lambda _: (_in_float32(norm), None))
        return None


def say(name: str, fused: Counter) -> None:
    """Log how many patterns were fused in this net or symbol."""
    if fused:
        counts = ", ".join(f"{count} × {kind}" for kind, count in fused.items())
        _log.info("%s: fused into its norms (%s).", name, counts)


def _in_float32(norm: Norm) -> Entry:
    """Between two casts. Not ``cast``, which truncates, and so do the gradients that come back through it."""
    data = Entry(Node("amp_cast", f"{norm.name}_widened", {"dtype": "float32"}, [norm.inputs[0]]))
    inside = Node(norm.node.op, f"{norm.name}_float32", norm.own_attributes(), [data, *norm.inputs[1:]])
    return Entry(Node("amp_cast", norm.name, {"dtype": dtype_name(BFLOAT16), **norm.hidden}, [Entry(inside)]))


def _replace(graph: Graph, made: List[_New]) -> Set[Node]:
    """Put the new nodes in; returns the last node of each layer that may be fused.

    Nodes that share running statistics run in the order of the program, or, in a user's symbol, in MXNet's order.
    """
    several = {mean for mean, count in Counter(new.norm.running_mean for new in made).items() if count > 1}
    tokens: Dict[str, Entry] = {}
    replaced: Dict[Node, Entry] = {}
    for norm, make, _ in sorted(made, key=lambda new: new.norm.call or 0):
        replaced[norm.node], token = make(tokens.get(norm.running_mean))
        _place(norm, replaced[norm.node], tokens.get(norm.running_mean))
        if norm.running_mean in several and token is not None:
            tokens[norm.running_mean] = token
    graph.replace(replaced)
    return {replaced[new.norm.node].node for new in made if new.fuses}


def _place(norm: Norm, made: Entry, after: Optional[Entry]) -> None:
    """Put all new nodes on the norm's device, where a Module splits a net over devices (``group2ctxs``)."""
    if _PLACE in norm.hidden:
        old = set(in_order(entry.node for entry in [*norm.inputs, *([] if after is None else [after])]))
        for node in set(in_order([made.node])) - old:
            node.attrs[_PLACE] = norm.hidden[_PLACE]


_PLACE = "__ctx_group__"
_INPUTS_OF_BODIES = {
    "_while_loop": ("cond_input_locs", "func_input_locs"),
    "_cond": ("cond_input_locs", "then_input_locs", "else_input_locs"),
}
_WITH_BODIES = {"_foreach", *_INPUTS_OF_BODIES}


def _move_inputs(node: Node, number: int, new: List[int]) -> None:
    """Tell a loop or branch that input i of this body is now input ``new[i]``."""
    if node.op == "_foreach":  # lists places in the body
        for name in ("in_data_locs", "in_state_locs", "remain_locs"):
            node.attrs[name] = str([new[int(i)] for i in literal_eval(node.attrs[name])])
    else:  # lists places among the node's inputs, in the order of the body
        name = _INPUTS_OF_BODIES[node.op][number]
        old = [int(i) for i in literal_eval(node.attrs[name])]
        node.attrs[name] = str([old[new.index(i)] for i in range(len(new))])
