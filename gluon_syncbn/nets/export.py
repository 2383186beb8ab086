"""Exports that load without this package.

The graph of a hybridized net that trains on several devices has synchronized nodes, which only this package can load.
``HybridBlock.export`` therefore writes plain ``BatchNorm`` nodes in their place; other graphs it writes as ever.
"""

import functools

from gluon_syncbn.base.mxnet_private import graph_of, set_graph
from gluon_syncbn.graphs.norms import is_marked
from gluon_syncbn.symbol import plain_symbol


def exporting_plain_graphs(export):
    """``HybridBlock.export`` does so."""

    @functools.wraps(export)
    def plain_export(self, *args, **kwargs):
        graph = graph_of(self)
        if not graph or not is_marked(graph[1]):
            return export(self, *args, **kwargs)
        set_graph(self, (graph[0], plain_symbol(graph[1])))
        try:
            return export(self, *args, **kwargs)
        finally:
            set_graph(self, graph)

    return plain_export
