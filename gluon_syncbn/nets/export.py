"""Exports that are those of the plain net.

The graph that a net keeps is that of the plain net, but for marks (`gluon_syncbn.graphs.trace`) and what was frozen
since. ``HybridBlock.export`` writes it without these. Of a net that a partitioner took apart (``optimize_for``) it
writes the whole: the parts have nodes that only this package can load.
"""

import functools

from gluon_syncbn.base.mxnet_private import exporting
from gluon_syncbn.graphs.calls import plain_graph_of, unmarked_graph_of
from gluon_syncbn.graphs.norms import is_marked


def exporting_plain_graphs(export):
    """``HybridBlock.export`` does so."""

    @functools.wraps(export)
    def plain_export(self, *args, **kwargs):
        kept = plain_graph_of(self)
        if not kept or not is_marked(kept[1]):
            return export(self, *args, **kwargs)
        with exporting(self, unmarked_graph_of(self)):
            return export(self, *args, **kwargs)

    return plain_export
