"""Calls and exports of nets' graphs: lowered copies run, and are made anew when a layer changes.

The number of a layer's devices is known when it trains. A hybridized net, or a block with a symbol inside, keeps the
graph of its first call, and that may have been on one device: base weights are loaded on cpu(0), shapes are found out
there, and then the net moves (``reset_ctx``). So Gluon keeps the graph of the plain net. A lowered copy of it runs
(`gluon_syncbn.graphs.lower`), which is made from the layers as they are, and made anew when a Parameter has moved or
has got new arrays, when a layer has been converted or frozen, or has got other options, and when an operator hook has
been set or removed.

After the call, its outputs are watched, and the engine learns which arrays it has written (`mxnet_engine.failures`).
Forward hooks would do for that, but MXNet warns of them, with the whole net in print, whenever a net is hybridized
again, and cannot copy a net whose hook holds a function.
"""

import contextlib
import weakref
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import mxnet as mx
from mxnet.gluon import Block, HybridBlock

from gluon_syncbn.base.mxnet_private import (
    PlainBatchNorm,
    array_list,
    arrays_of,
    context_list,
    device_of,
    drop_graph,
    drop_operator,
    exporting,
    find_shapes,
    flatten,
    graph_of,
    has_operator,
    has_operator_hook,
    has_partitioner,
    is_static,
    kept_graph,
    make_graph,
    make_operator,
    put_graph_back,
    set_graph,
)
from gluon_syncbn.base.walk import all_blocks
from gluon_syncbn.graphs.graph import Graph, Kind
from gluon_syncbn.graphs.lower import Lowering, say
from gluon_syncbn.graphs.norms import (
    Norm,
    is_frozen,
    is_marked,
    layers_of,
    making,
    replace_norms,
    set_layers,
    take_frozen,
)
from gluon_syncbn.meeting.active_set import active_sets
from gluon_syncbn.mxnet_engine import cpu_resources, failures
from gluon_syncbn.step.passes import Passes
from gluon_syncbn.step.recording import begin_forward
from gluon_syncbn.step.steps import steps
from gluon_syncbn.synchronization import Synchronization, synchronization_of

_graphs: "weakref.WeakKeyDictionary[Block, _NetGraph]" = weakref.WeakKeyDictionary()


def note_changes() -> None:
    """Layers have been converted or frozen, or have got other options."""
    with making.lock:  # a graph that another thread is making may have been made of the old ones
        for graph in list(_graphs.values()):
            graph.may_have_changed = True


class _NetGraph:
    """The state of a net's layers when its lowered copy was made.

    MXNet keeps the graph that a partitioner has made, ``partitioned``; ``plain`` is the graph that was taken apart.
    """

    def __init__(self, net: Block, is_lowered: bool):
        layers = layers_of(net).all()
        self.is_lowered = is_lowered
        self.partitioned: Tuple = ()
        self.plain: Tuple = ()
        self._has_hook = has_operator_hook(net)
        self.may_have_changed = False
        self._arrays = weakref.WeakKeyDictionary({layer: array_list(layer.running_mean) for layer in layers})
        self._states = _states(net)
        self._is_placed = False
        self.is_static = is_static(net)
        self._modes: Dict[mx.Context, bool] = {}  # of the last call: training or prediction

    def _layers(self) -> List[Synchronization]:
        """The layers that have not been converted back."""
        return [sync for sync in map(synchronization_of, list(self._arrays)) if sync is not None]

    def begin_forward(self, device: Optional[mx.Context]) -> None:
        """The graph is about to be called with arrays on this device."""
        if not self._is_placed and mx.autograd.is_training():
            for layer in self._layers():
                layer.take_place()
            self._is_placed = True
        layers = self._layers()
        free = [sync for sync in layers if not is_frozen(sync.layer)]
        if mx.autograd.is_training():
            active_sets.note(sync.layer for sync in free)
        # A backward pass shows at a layer that learns.
        first = next((sync for sync in free if sync.passes.arrays()), free[0] if free else None)
        if device is not None and layers and self.is_static:
            self._end_other_mode(device, None if first is None else first.passes)
        if device is not None and first is not None and len(context_list(first.layer.running_mean) or ()) > 1:
            begin_forward(first, device)
        if first is not None:
            steps.progress.under_way.note_call(first.passes)

    def _end_other_mode(self, device: mx.Context, passes: Optional[Passes]) -> None:
        """Let the calls before run first if they were in the other mode: where nobody has their outputs any more, MXNet
        gives the mode of a call of a static graph to all that are pending. Their operators read or write running
        statistics. If these calls may wait for a device that is yet to be called, nothing is done."""
        is_training = mx.autograd.is_training()
        before, self._modes[device] = self._modes.get(device, is_training), is_training
        if before != is_training and not steps.progress.is_ahead(device, passes):
            for array in self.statistics(device):
                failures.wait_to_write(array)

    def statistics(self, device: mx.Context) -> List[mx.nd.NDArray]:
        """The running statistics that its synchronized layers have on this device."""
        found = []
        for sync in self._layers():
            layer = sync.layer
            contexts = context_list(layer.running_mean) if sync.has_group else None
            if contexts and device in contexts:
                rank = contexts.index(device)
                found += [arrays_of(layer.running_mean)[rank], arrays_of(layer.running_var)[rank]]
        return found

    def is_out_of_date(self, net: Block) -> bool:
        """Whether the lowered copy must be made anew."""
        if self.has_changed(net):
            return True
        has_moved = any(array_list(layer.running_mean) is not made for layer, made in list(self._arrays.items()))
        return has_moved or (self.is_lowered and self._has_hook != has_operator_hook(net))

    def has_changed(self, net: Block) -> bool:
        """Whether a Batch Normalization of the net has changed since the graph was made."""
        self.may_have_changed = self.may_have_changed and _states(net) != self._states
        return self.may_have_changed


def _states(net: Block) -> Dict[int, Tuple[Any, ...]]:
    """The values that conversions and `freeze_statistics` change, by the layers' ids."""
    layers = [block for block in all_blocks(net) if isinstance(block, PlainBatchNorm)]
    found = {}
    for layer in [*layers, *layers_of(net).all()]:
        sync = synchronization_of(layer)
        found[id(layer)] = sync and weakref.ref(sync), is_frozen(layer)
    return found


def _is_complete(net: Block) -> bool:
    """Whether the graph that the net keeps, if any, was traced with all layers that synchronize now."""
    if not graph_of(net):
        return True
    traced = set(layers_of(net).all())
    left = [block for block in all_blocks(net) if synchronization_of(block) and block not in traced]
    inputs = graph_of(net)[1].list_inputs() if left else ()
    return all(layer.running_mean.name not in inputs for layer in left)


def _device_of(inputs) -> Optional[mx.Context]:
    given = flatten(inputs, "input")[0]
    return next((device_of(item) for item in given if isinstance(item, mx.nd.NDArray)), None)


def _make(net: Block, args) -> Optional[_NetGraph]:
    """Make the lowered copy, one thread at a time: threads of several devices may call the net for the first time
    together, and MXNet, which keeps the names of new arrays and symbols in the blocks, does not expect that."""
    with making.lock:
        graph = _graphs.get(net)
        if graph is None or graph.is_out_of_date(net):
            if graph is not None and graph.has_changed(net):
                drop_graph(net)
            drop_operator(net)
        if not has_operator(net):
            cpu_resources.give_buffers(net, cpu_resources.GraphsBuffers())
            make_operator(net, args)
        return _graphs.get(net)


def _has_fixed_shapes(net: Block, symbol: mx.sym.Symbol, arrays: Dict[str, mx.nd.NDArray]) -> bool:
    """Whether all shapes follow from the shapes of the inputs. If not (``boolean_mask``), MXNet runs even a static
    graph one operator at a time."""
    known = {name: item.shape for name, item in {**net.collect_params(), **arrays}.items()}
    known = {name: tuple(known[name]) for name in symbol.list_arguments() if known.get(name) is not None}
    found = symbol.get_internals().infer_shape_partial(**known)[1]
    if mx.util.is_np_shape():
        return all(shape is not None and -1 not in shape for shape in found)
    return all(shape and 0 not in shape for shape in found)


def plain_graph_of(net: Block) -> Tuple:
    """The graph that the net keeps, as it was before a partitioner took it apart."""
    graph = _graphs.get(net)
    if graph is not None and graph.partitioned and graph_of(net) is graph.partitioned:
        return graph.plain
    return graph_of(net)


def unmarked_graph_of(net: Block, attributes: Callable[[Block], Dict[str, str]] = lambda layer: {}) -> Tuple:
    """`plain_graph_of` without marks, and frozen as its layers are now. Each layer's node gets its ``attributes``."""
    inputs, symbol = plain_graph_of(net)
    graph = Graph(symbol)

    def change(norm: Norm) -> None:
        layer = layers_of(net).of(norm)
        norm.unmark()
        if layer is not None:
            take_frozen(norm, layer)
            norm.node.attrs.update(attributes(layer))

    replace_norms(graph, change)
    return inputs, graph.symbol()


@contextlib.contextmanager
def keeping_graphs(blocks: List[Block]) -> Iterator[None]:
    """Let blocks have their present graphs again afterwards."""
    nets = [block for block in blocks if isinstance(block, HybridBlock)]
    kept = [(net, kept_graph(net), layers_of(net), _graphs.get(net)) for net in nets]
    try:
        yield
    finally:
        for net, graph, layers, made in kept:
            put_graph_back(net, graph)
            set_layers(net, layers)
            _graphs.pop(net, None)
            if made is not None:
                _graphs[net] = made


def lowering_what_runs(build, net, *args):
    """``HybridBlock._build_cache``: it makes an operator of the lowered copy of the graph; the net keeps the graph."""
    with making.lock:
        set_graph(net, plain_graph_of(net))
        _graphs.pop(net, None)
        if not _is_complete(net):
            drop_graph(net)
        inputs, plain = kept = make_graph(net, *args)
        is_lowered, is_partitioned = bool(layers_of(net).all()) or is_marked(plain), has_partitioner(net)
        if is_lowered:
            flat = flatten(args, "input")[0]
            find_shapes(net, plain, flat)
            given = zip(inputs, (item for item in flat if item is not None))
            arrays = {data.name: x for data, x in given if isinstance(x, mx.nd.NDArray)}
            dtypes = {name: x.dtype for name, x in arrays.items()}
            runs_statically = is_static(net) and _has_fixed_shapes(net, plain, arrays)
            kind = Kind(runs_statically, is_partitioned, not has_operator_hook(net) and not is_partitioned)
            lowering = Lowering(plain, layers_of(net), dtypes, kind)
            say(net.name, lowering.fused)
            set_graph(net, (inputs, lowering.symbol))
        made = _NetGraph(net, is_lowered)
        try:
            build(net, *args)
            if is_partitioned:
                made.partitioned, made.plain = graph_of(net), kept
        finally:
            if not made.partitioned:
                set_graph(net, kept)
        _graphs[net] = made


def following_changes(call, net, *args):
    """``HybridBlock._call_cached_op``: makes the lowered copy anew if layers have changed, and watches the outputs."""
    is_made = has_operator(net)  # before the graph, which another thread may be making
    graph = _graphs.get(net)
    if not is_made or graph is None or graph.is_out_of_date(net):
        graph = _make(net, args)
    buffers = cpu_resources.buffers_of(net)
    device = _device_of(args)
    if graph is None or not graph.is_lowered:
        return cpu_resources.in_one_call(buffers, device, call, net, *args)
    graph.begin_forward(device)
    is_followed = device is not None and mx.autograd.is_training() and failures.is_in_use()
    statistics = graph.statistics(device) if is_followed else []
    if graph.is_static:
        failures.seal(statistics)
    try:
        out = cpu_resources.in_one_call(buffers, device, call, net, *args)
    except mx.MXNetError:
        with making.lock:
            drop_operator(net)  # it would raise another error from now on, about itself
        raise
    if is_followed:
        error = f"an operator of '{net.name}', or one before it, had failed on {device}."
        outputs = [item for item in flatten(out, "output")[0] if item is not None]
        failures.watch(outputs, error, statistics)
    return out


def exporting_plain_graphs(export, net, /, *args, **kwargs):
    """``HybridBlock.export`` writes the graph of the plain net, frozen as its layers are now.

    Of a net that a partitioner took apart (``optimize_for``) it writes the whole: the parts have nodes that only this
    package can load.
    """
    kept = plain_graph_of(net)
    if not kept or not is_marked(kept[1]):
        return export(net, *args, **kwargs)
    with exporting(net, unmarked_graph_of(net)):
        return export(net, *args, **kwargs)
