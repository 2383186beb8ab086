"""What leaves the process with ``net.export`` needs nothing of ours.

The graph of a hybridized net that trains on several devices has synchronized nodes, which only this package can load.
``HybridBlock.export`` therefore writes plain ``BatchNorm`` nodes in their place; other graphs it writes as ever.
"""

import functools

from mxnet.gluon import HybridBlock

from gluon_syncbn.graphs.rewrite import MARK
from gluon_syncbn.symbol import plain_symbol


def export_plain_graphs() -> None:
    """From now on ``HybridBlock.export`` does so."""
    export = HybridBlock.export

    @functools.wraps(export)
    def plain_export(self, *args, **kwargs):
        graph = self._cached_graph
        if not graph or MARK not in graph[1].tojson():
            return export(self, *args, **kwargs)
        self._cached_graph = graph[0], plain_symbol(graph[1])
        try:
            return export(self, *args, **kwargs)
        finally:
            self._cached_graph = graph

    HybridBlock.export = plain_export
