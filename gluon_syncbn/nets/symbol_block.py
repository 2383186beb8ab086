"""A SymbolBlock whose Batch Normalizations synchronize.

SSD's ``FeatureExpander``, `SymbolBlock.imports` and checkpoints that are loaded as a block have a symbol inside where
other nets have layers. The symbol stays as it is, with plain BatchNorm nodes, and is what ``export`` writes. Whenever
MXNet makes a graph of the block, each of those nodes is made by a `SyncBatchNorm` that has the block's Parameters, so
that all that holds for layers holds here: devices, groups, timeouts, order of calls, frozen statistics.
"""

import copy
import functools
from typing import Any, Dict, List, Optional, Tuple

import mxnet as mx
from mxnet.gluon import SymbolBlock

from gluon_syncbn.backends.bfloat16 import inferred_dtype, inferred_dtypes
from gluon_syncbn.backends.choose import BACKENDS
from gluon_syncbn.base.mxnet_private import drop_graph, flatten, graph_of, regroup, set_graph, set_name, set_parameter
from gluon_syncbn.block import SyncBatchNorm
from gluon_syncbn.graphs.calls import order_tokens
from gluon_syncbn.graphs.fuse import fusing_graphs
from gluon_syncbn.graphs.graph import Graph
from gluon_syncbn.graphs.norms import Norm, find_norms, is_marked, replace_norms
from gluon_syncbn.graphs.trace import Trace, find_trace
from gluon_syncbn.layer.spec import OPTIONS, LayerSpec
from gluon_syncbn.symbol import plain_symbol


class _Norms:
    """The Batch Normalizations of the block's symbol, and a layer for each that synchronizes. In an object of their
    own, since Gluon would take layers in an attribute for children that were not registered."""

    def __init__(self, norms: List[Norm], layers: Dict[Tuple[str, ...], SyncBatchNorm]):
        self.norms = norms
        self.layers = layers

    def layer_of(self, norm: Norm) -> Optional[SyncBatchNorm]:
        """The layer for this node, if it synchronizes."""
        return self.layers.get(_key(norm))


class SynchronizedSymbolBlock(SymbolBlock):
    """A SymbolBlock whose Batch Normalizations synchronize; made by `synchronize`."""

    def hidden_blocks(self) -> List[SyncBatchNorm]:
        """The layers for the nodes that synchronize, which Gluon does not know as children."""
        return list(self._norms.layers.values())

    def plain_norms(self) -> List[Norm]:
        """The nodes of the block's symbol that do not synchronize."""
        return [norm for norm in self._norms.norms if self._norms.layer_of(norm) is None]

    def count_nodes(self) -> int:
        """How many nodes synchronize."""
        return len(self._norms.norms) - len(self.plain_norms())

    def forward(self, x, *args):
        if isinstance(x, mx.nd.NDArray):
            return super().forward(x, *args)
        flat, in_format = flatten([x, *args], "input")
        assert in_format == self._in_format, "Invalid input format"
        trace = find_trace()
        tokens = order_tokens(trace)
        layers = {norm.running_mean: self._norms.layer_of(norm) for norm in self._norms.norms}
        running_means = {name: layer.running_mean for name, layer in layers.items() if layer is not None}
        before = {name: tokens[parameter] for name, parameter in running_means.items() if parameter in tokens}
        variables = {running_mean: f"{running_mean}_order_token" for running_mean in before}
        known = trace.dtypes() if trace else {}
        inputs = {data.name: item.as_nd_ndarray() for data, item in zip(graph_of(self)[0], flat)}
        dtypes = {name: inferred_dtype(item, known) for name, item in inputs.items()}
        out, last = self._synchronized(trace, dtypes, variables)
        everything = mx.sym.Group([*out.as_nd_ndarray(), *last.values()])
        everything._compose(**inputs, **{variables[running_mean]: token for running_mean, token in before.items()})
        size = len(out.list_outputs())
        tokens.update({running_means[name]: token for name, token in zip(last, list(everything)[size:])})
        outputs = list(everything)[:size]
        if mx.util.is_np_array():
            outputs = [item.as_np_ndarray() for item in outputs]
        return regroup(outputs, self._out_format)

    @fusing_graphs
    def _get_graph(self, *args):
        # New objects (`Trace.symbol`), under the name that `is_making_graph` knows.
        symbol_inputs = [copy.copy(item) for item in graph_of(self)[0]]
        trace = find_trace()
        return symbol_inputs, self._synchronized(trace, trace.dtypes(), {})[0]

    def _synchronized(self, trace: Optional[Trace], dtypes: Dict[str, Any], before: Dict[str, str]):
        """The graph with synchronized nodes, and the last order tokens (see `replace_norms`).

        ``dtypes`` are those of the block's inputs, as far as they are known.
        """
        known = inferred_dtypes(graph_of(self)[1], dtypes)

        def make(norm: Norm, inputs, after):
            layer = self._norms.layer_of(norm)
            if layer is None:
                return None
            return layer._as_node(inputs, trace, norm.name, {inputs[0].name: known.get(norm.data)}, norm.hidden, after)

        return replace_norms(Graph(graph_of(self)[1]), make, before)


def synchronize(block: SymbolBlock, **options) -> None:
    """Make a SymbolBlock's Batch Normalizations synchronize; without ``options``, with those that its nodes have.

    A node that has none (GluonCV appends such to what a net has computed) takes over those of the others.

    Raises
    ------
    ValueError
        The others have different ones.
    """
    data, symbol = graph_of(block)
    # A gamma that is computed, say, has no Parameter.
    norms = [
        norm for norm in find_norms(Graph(symbol)) if all(name in block.params for name in norm.parameters.values())
    ]
    common = options or _common_options(block, norms)
    layers = {
        _key(norm): _layer_of(block, norm, norm.spec.but(**({} if norm.is_marked and not options else common)))
        for norm in norms
    }
    plain = plain_symbol(symbol)
    set_graph(block, (data, plain))
    block._norms = _Norms(find_norms(Graph(plain)), layers)
    block._converted_from = type(block)
    block.__class__ = SynchronizedSymbolBlock
    drop_graph(block)


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
    """Undo `synchronize`."""
    block.__class__ = block.__dict__.pop("_converted_from")
    del block._norms
    drop_graph(block)


def _key(norm: Norm) -> Tuple[str, ...]:
    """Nodes may have one name, and are then one layer if they have the same parameters, too."""
    return (norm.name, *norm.parameters.values())


def _layer_of(block: SymbolBlock, norm: Norm, spec: LayerSpec) -> SyncBatchNorm:
    # Of a marked node with a ReLU, a plain BatchNorm and a node for the ReLU stay.
    spec = spec.but(activation=None if norm.is_marked else spec.activation).checked()
    if spec.backend != "auto" and BACKENDS[spec.backend].unavailable_reason(spec, []):
        spec = spec.but(backend="auto")  # a file may come from a machine where that could run
    layer = SyncBatchNorm(
        axis=spec.axis,
        momentum=spec.momentum,
        epsilon=spec.epsilon,
        scale=spec.scale,
        use_global_stats=spec.use_global_stats,
        prefix=norm.name + "_",
    )
    layer._take_options(spec)
    # Within a name_scope(), where SSD makes its FeatureExpander, the prefix has come on top of that of the scope.
    set_name(layer, norm.name)
    for name, variable in norm.parameters.items():
        set_parameter(layer, name, block.params[variable])
    return layer


def synchronizing_what_is_marked(make):
    """``SymbolBlock.__init__``: one that is made of synchronized nodes is a `SynchronizedSymbolBlock`.

    gluoncv's FeatureExpander calls a net with a symbol and makes a block of what it returns: without this, the nodes
    would train, but `gluon_syncbn.devices`, ``num_devices=None`` and the order of calls would not reach them.
    """

    @functools.wraps(make)
    def __init__(self, *args, **kwargs):
        make(self, *args, **kwargs)
        if is_marked(graph_of(self)[1]):
            synchronize(self)

    return __init__
