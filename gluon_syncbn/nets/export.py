"""Exports that are those of the plain net.

The graph that a net keeps is that of the plain net, but for marks (`gluon_syncbn.graphs.trace`) and what was frozen
since. A partitioner's graph has nodes that synchronize, which only this package can load. ``HybridBlock.export`` writes
neither.
"""

import functools

from gluon_syncbn.base.mxnet_private import graph_of, set_graph
from gluon_syncbn.graphs.graph import Graph
from gluon_syncbn.graphs.norms import find_norms, is_marked, take_frozen
from gluon_syncbn.graphs.trace import layers_of
from gluon_syncbn.symbol import plain_symbol


def exporting_plain_graphs(export):
    """``HybridBlock.export`` does so."""

    @functools.wraps(export)
    def plain_export(self, *args, **kwargs):
        graph = graph_of(self)
        if not graph or not is_marked(graph[1]):
            return export(self, *args, **kwargs)
        plain = Graph(graph[1])
        for norm in find_norms(plain):
            layer = layers_of(self).of(norm)
            if layer is not None and norm.is_plain:
                take_frozen(norm, layer)
        set_graph(self, (graph[0], plain_symbol(plain.symbol())))
        try:
            return export(self, *args, **kwargs)
        finally:
            set_graph(self, graph)

    return plain_export
