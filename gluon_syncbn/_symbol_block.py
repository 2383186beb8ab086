"""A SymbolBlock whose Batch Normalizations synchronize.

SSD's ``FeatureExpander``, `SymbolBlock.imports` and checkpoints that are loaded as a block have a symbol inside where
other nets have layers. The symbol stays as it is, with plain BatchNorm nodes, and ``export`` writes it. Each node has
a `SyncBatchNorm` with the block's Parameters, so that devices, groups, timeouts, the order of calls and frozen
statistics work as for layers.
"""

import functools
from typing import Any, Dict, List, Tuple

import mxnet as mx
from mxnet.gluon import Block, SymbolBlock

from gluon_syncbn.backends.choose import BACKENDS
from gluon_syncbn.base.mxnet_private import drop_graph, flatten, graph_of, regroup, set_graph, set_name, set_parameter
from gluon_syncbn.block import SyncBatchNorm
from gluon_syncbn.graphs.calls import plain_graph_of, unmarked_graph_of
from gluon_syncbn.graphs.graph import Graph
from gluon_syncbn.graphs.norms import Layers, Norm, find_norms, is_marked, layers_of, refuse_what_runs, set_layers
from gluon_syncbn.layer.spec import OPTIONS, LayerSpec
from gluon_syncbn.symbol import plain_symbol
from gluon_syncbn.synchronization import Synchronization


class SynchronizedSymbolBlock(SymbolBlock):
    """A SymbolBlock whose Batch Normalizations synchronize; made by `synchronize`."""

    def layers_of_nodes(self) -> List[SyncBatchNorm]:
        """The layers for the nodes that synchronize, which Gluon does not know as children."""
        return layers_of(self).all()

    def forward(self, x, *args):
        if isinstance(x, mx.nd.NDArray):
            return super().forward(x, *args)
        flat, in_format = flatten([x, *args], "input")
        assert in_format == self._in_format, "Invalid input format"
        inputs, symbol = unmarked_graph_of(self, SyncBatchNorm._node_attributes)
        out = symbol.as_nd_ndarray()
        out._compose(**{data.name: item.as_nd_ndarray() for data, item in zip(inputs, flat)})
        outputs = list(out)
        if mx.util.is_np_array():
            outputs = [item.as_np_ndarray() for item in outputs]
        return regroup(outputs, self._out_format)


def plain_norms(block: SymbolBlock) -> List[Norm]:
    """The nodes of the block's symbol that do not synchronize, but could: nobody reads their mean or variance."""
    layers = layers_of(block)
    return [norm for norm in find_norms(Graph(plain_graph_of(block)[1])) if layers.of(norm) is None]


def synchronize(block: SymbolBlock, **options) -> None:
    """Make a SymbolBlock's Batch Normalizations synchronize; without ``options``, with the options of its nodes.

    A node without options (GluonCV appends such nodes to a net's outputs) takes over the options of the others;
    ValueError if these differ.
    """
    data, symbol = plain_graph_of(block)
    # A gamma that is computed, say, has no Parameter.
    norms = [
        norm for norm in find_norms(Graph(symbol)) if all(name in block.params for name in norm.parameters.values())
    ]
    common = options or _common_options(block, norms)
    layers = {
        _key(norm): _layer_of(block, norm, norm.spec.but(**({} if norm.is_marked and not options else common)))
        for norm in norms
    }
    graph, noted = Graph(plain_symbol(symbol)), Layers()
    for norm in find_norms(graph):
        layer = layers.get(_key(norm))
        if layer is not None:
            norm.node.attrs.update(layer._note_in(noted))
    set_graph(block, (data, graph.symbol()))
    set_layers(block, noted)
    if not isinstance(block, SynchronizedSymbolBlock):
        kind: Any = type(block)
        ours = SynchronizedSymbolBlock
        block._converted_from, block.__class__ = kind, ours if kind is SymbolBlock else class_of_both(kind, ours)
    drop_graph(block)


@functools.lru_cache(maxsize=None)
def class_of_both(kind: Any, ours: Any, *names: str) -> Any:
    """A user's class that is one of ours, too: of the user's methods it has all but ``names``."""

    def reduce(self, _):
        """As `object.__reduce_ex__`, for a class that pickle cannot import."""
        return (_remake, (kind, ours, *names), *object.__reduce_ex__(self, 2)[2:])

    own = {"__module__": kind.__module__, "__reduce_ex__": reduce, **{name: getattr(ours, name) for name in names}}
    return type(f"Sync{kind.__name__}", (kind, ours), own)


def _remake(*classes) -> Block:
    """An empty block, for pickle."""
    made = class_of_both(*classes)
    return made.__new__(made)


def _common_options(block: SymbolBlock, norms: List[Norm]) -> Dict[str, Any]:
    """Return the options for a node that has none of its own."""
    shared = [*(name for name in OPTIONS if name != "activation"), "dtype"]
    found = [{name: getattr(norm.spec, name) for name in shared} for norm in norms if norm.is_marked]
    plain = [norm.name for norm in norms if not norm.is_marked]
    if plain and any(options != found[0] for options in found):
        raise ValueError(
            f"{block.name}: its layers synchronize with different options, so '{plain[0]}', a BatchNorm without any, "
            f"cannot take them over. Call convert_sync_batchnorm on the block with the options that all are to have."
        )
    return found[0] if found else {}


def restore(block: SynchronizedSymbolBlock) -> None:
    """Undo `synchronize`. Statistics that are frozen stay so."""
    set_graph(block, unmarked_graph_of(block))
    block.__class__ = block.__dict__.pop("_converted_from")
    set_layers(block, Layers())
    drop_graph(block)


def _key(norm: Norm) -> Tuple[str, ...]:
    """Nodes may have one name, and are then one layer if they have the same parameters, too."""
    return (norm.name, *norm.parameters.values())


def _layer_of(block: SymbolBlock, norm: Norm, spec: LayerSpec) -> SyncBatchNorm:
    spec = spec.checked()
    if spec.backend != "auto" and BACKENDS[spec.backend].unavailable_reason(spec, []):
        spec = spec.but(backend="auto")  # a file may come from a machine where that could run
    plain = {name: getattr(spec, name) for name in ("axis", "momentum", "epsilon", "scale", "use_global_stats")}
    layer = SyncBatchNorm(**plain, prefix=norm.name + "_")
    # Within a name_scope(), where SSD makes its FeatureExpander, the prefix has come on top of the scope's.
    set_name(layer, norm.name)
    for name, variable in norm.parameters.items():
        set_parameter(layer, name, block.params[variable])
    layer._sync = Synchronization(layer, spec)
    return layer


def synchronizing_what_is_marked(make, block, /, *args, **kwargs):
    """``SymbolBlock.__init__``: a block of synchronized nodes becomes a `SynchronizedSymbolBlock`.

    gluoncv's FeatureExpander calls a net with a symbol and makes a block of the result: without this, the nodes would
    train, but `gluon_syncbn.devices`, ``num_devices=None`` and the order of calls would not reach them.
    """
    make(block, *args, **kwargs)
    symbol = graph_of(block)[1]
    refuse_what_runs(symbol, block.name)
    if is_marked(symbol):
        synchronize(block)
