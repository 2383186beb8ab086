"""Calls of graphs: one whose layers have moved is made anew, and the engine learns what each call writes.

On how many devices a layer runs is known when it trains. A hybridized net, or a block with a symbol inside, keeps the
graph of its first call, and that may have been on one device: base weights are loaded on cpu(0), shapes are found out
there, and then the net moves (``reset_ctx``). On one device a layer is plain Batch Normalization, so a graph that
stayed would never synchronize, and nobody would notice.

MXNet gives a Parameter a new list of contexts whenever it is initialized, loaded or moved; that is what is compared
before each call of a graph. After the call, its outputs are watched, and the engine learns what it has written
(`engine.failures`).

The method that calls graphs is extended for both. Forward hooks would do for the second, but MXNet warns of them, with
the whole net in print, whenever a net is hybridized again, and cannot copy a net whose hook holds a function.
"""

import functools
import threading
import weakref
from collections import ChainMap
from typing import Any, Dict, List, MutableMapping, Optional

import mxnet as mx
from mxnet.gluon import Block, Parameter

from gluon_syncbn.base.mxnet_private import (
    arrays_of,
    context_list,
    drop_graph,
    flatten,
    has_operator,
    has_operator_hook,
    make_operator,
)
from gluon_syncbn.graphs.trace import Trace
from gluon_syncbn.mxnet_engine import cpu_resources, failures
from gluon_syncbn.step.recording import begin_forward
from gluon_syncbn.step.steps import is_followed, steps

_making = threading.RLock()
_graphs: "weakref.WeakKeyDictionary[Block, _Graph]" = weakref.WeakKeyDictionary()


OrderTokens = MutableMapping[Parameter, mx.sym.Symbol]  # by running mean


class _Graph:
    """The layers in the graph that a net has now, each with the contexts for which it was made."""

    def __init__(self, trace: mx.sym.Symbol, has_hook: bool):
        self.trace = trace
        self.order_tokens: Dict[str, OrderTokens] = {}  # by the body of a loop or branch; until it is made
        self.has_hook = has_hook  # what operators compute must show then (`graphs.fuse`)
        self._contexts: weakref.WeakKeyDictionary[Block, Any] = weakref.WeakKeyDictionary()
        self._is_placed = False

    def add(self, layer: Block) -> None:
        self._contexts[layer] = context_list(layer.running_mean)

    def _layers(self) -> List[Block]:
        """The layers that have not been converted back since."""
        return [layer for layer in list(self._contexts) if "_sync" in vars(layer)]

    def begin_forward(self, device: Optional[mx.Context]) -> None:
        """The graph is about to be called with arrays on this device."""
        if not self._is_placed and mx.autograd.is_training():
            self._is_placed = True
            for layer in self._layers():
                layer._sync.take_place()
        first = next(iter(self._layers()), None)
        if device is not None and first is not None and len(context_list(first.running_mean) or ()) > 1:
            begin_forward(first, device)
        if first is not None and is_followed():
            learns = (layer for layer in self._layers() if layer._sync.passes.arrays())
            steps.note_forward(next(learns, first)._sync.passes)

    def statistics(self, device: mx.Context) -> List[mx.nd.NDArray]:
        """The running statistics that its synchronized layers have on this device."""
        found = []
        for layer in self._layers():
            contexts = context_list(layer.running_mean) if layer._sync.has_group else None
            if contexts and device in contexts:
                rank = contexts.index(device)
                found += [arrays_of(layer.running_mean)[rank], arrays_of(layer.running_var)[rank]]
        return found

    def is_out_of_date(self, net: Block) -> bool:
        """Whether it must be made anew."""
        return self._has_moved() or self.has_hook != has_operator_hook(net)

    def _has_moved(self) -> bool:
        for layer, made_for in list(self._contexts.items()):
            now = context_list(layer.running_mean)
            if now is not made_for:
                if made_for is not None and now != made_for:
                    return True
                self._contexts[layer] = now
        return False


def remember(net: Block, trace: mx.sym.Symbol, layer: Block) -> None:
    """``layer`` is in the graph of ``net`` that is being made; ``trace`` names it."""
    _graph_of(net, trace).add(layer)


def order_tokens(trace: Optional[Trace]) -> OrderTokens:
    """The order tokens of the last calls in the graph that is being made; callers add theirs.

    Calls on parallel branches that share running statistics (one layer, or several that have its Parameters) would have
    the order in which MXNet sorts the nodes, which depends on what is fused; and in a static graph none at all, since
    it does not count what a call does to the statistics as writing. So each call is made to depend on the one before.

    The body of a loop or branch (``F.contrib.foreach``) is a graph of its own: what it computes is of no use outside.
    """
    if trace is None or trace.net is None:
        return {}
    all_tokens = _graph_of(trace.net, trace.symbol).order_tokens
    body = mx.sym.var("any").attr("__subgraph_name__") or ""
    return ChainMap(all_tokens.setdefault(body, {}), all_tokens.get("", {}))


def _graph_of(net: Block, trace: mx.sym.Symbol) -> _Graph:
    if net not in _graphs or _graphs[net].trace is not trace:
        _graphs[net] = _Graph(trace, has_operator_hook(net))
    return _graphs[net]


def _device_of(inputs) -> Optional[mx.Context]:
    given = flatten(inputs, "input")[0]
    return next((item.context for item in given if isinstance(item, mx.nd.NDArray)), None)


def _make(net: Block, args) -> Optional[_Graph]:
    """Make the graph, one thread at a time: threads of several devices may call it for the first time together, and
    MXNet, which keeps the names of what it makes in the blocks, does not expect that."""
    with _making:
        graph = _graphs.get(net)
        if graph is not None and graph.is_out_of_date(net):
            del _graphs[net]
            drop_graph(net)
        if not has_operator(net):
            cpu_resources.give_buffers(net, cpu_resources.GraphsBuffers())
            make_operator(net, args)
        graph = _graphs.get(net)
        if graph is not None:
            graph.order_tokens.clear()
        return graph


def following_moves(call):
    """Extend the call of a graph: one whose layers have moved is made anew, and the engine learns what it writes."""

    @functools.wraps(call)
    def _call_cached_op(self, *args):
        is_made = has_operator(self)  # before the graph, which another thread may be making
        graph = _graphs.get(self)
        if not is_made or (graph is not None and graph.is_out_of_date(self)):
            graph = _make(self, args)
        buffers = cpu_resources.buffers_of(self)
        device = _device_of(args)
        if graph is None:
            return cpu_resources.in_one_call(buffers, device, call, self, *args)
        graph.begin_forward(device)
        out = cpu_resources.in_one_call(buffers, device, call, self, *args)
        if device is not None and mx.autograd.is_training() and failures.is_in_use():
            error = f"an operator of '{self.name}', or one before it, had failed on {device}."
            outputs = [item for item in flatten(out, "output")[0] if item is not None]
            failures.watch(outputs, error, graph.statistics(device))
        return out

    return _call_cached_op
