"""The methods of MXNet that this package extends, because MXNet has no hook there. The table lists all of them.

Each row has an owner, some of its methods, a function, and the reason. The function is called with the original method
and its arguments; it calls the original, and does some work of its own. A function of MXNet's library is extended in
place of several methods that call it.
"""

import functools

import mxnet as mx
from mxnet.gluon import HybridBlock, SymbolBlock

from gluon_syncbn._symbol_block import synchronizing_what_is_marked
from gluon_syncbn.base.library import LIBMXNET
from gluon_syncbn.base.mxnet_private import RecordingScope
from gluon_syncbn.convert import warn_of_plain_norms
from gluon_syncbn.graphs.bind import lowering_bind, lowering_partition
from gluon_syncbn.graphs.calls import exporting_plain_graphs, following_changes, lowering_what_runs
from gluon_syncbn.graphs.norms import noting_layers
from gluon_syncbn.step.abandon import (
    copying_after_a_failure,
    failing_what_cannot_be_read,
    failing_with_all_work,
    noting_set_data,
)
from gluon_syncbn.step.recording import (
    counting_backward,
    noticing_copies,
    noticing_end_of_record,
    noticing_record,
)
from gluon_syncbn.step.steps import steps
from gluon_syncbn.step.updates import finishing_update, guarding_module, guarding_trainer, noting_trainer

_EXTENSIONS = [
    (RecordingScope, "__enter__", noticing_record),  # a step begins: the one before may have failed
    (RecordingScope, "__exit__", noticing_end_of_record),  # an exception ends a step
    (LIBMXNET, "MXAutogradBackwardEx", counting_backward),  # some devices may have no backward()
    (mx.nd.NDArray, "copyto", noticing_copies),  # backward passes may go from one CPU device to another
    (mx.np.ndarray, "copyto", noticing_copies),  # it has a method of its own
    (mx.nd.NDArray, "asnumpy wait_to_read", failing_what_cannot_be_read),  # MXNet drops an error when it is read
    (LIBMXNET, "MXNDArrayWaitAll", failing_with_all_work),  # nd.waitall and npx.waitall
    (mx.gluon.Parameter, "set_data", noting_set_data),  # nothing is lost that a failed step would skip
    (mx.gluon.Parameter, "reset_ctx cast", copying_after_a_failure),  # nor is a copy that was never made
    (mx.gluon.Trainer, "__init__", noting_trainer),  # a step may fail before the first update
    (mx.gluon.Trainer, "step allreduce_grads update", guarding_trainer),  # a failed step must update no weight
    (mx.gluon.Trainer, "_update _allreduce_grads", finishing_update),  # Ctrl-C between devices; a subclass's own step
    (mx.mod.Module, "update", guarding_module),  # nor without a Trainer
    (HybridBlock, "_get_graph", noting_layers),  # a graph has nodes, and no layers
    (HybridBlock, "_build_cache", lowering_what_runs),  # in the graph that runs, the operator replaces plain nodes
    (HybridBlock, "_call_cached_op", following_changes),  # layers may have moved or changed since
    (HybridBlock, "export", exporting_plain_graphs),  # files must load without this package
    (mx.sym.Symbol, "bind simple_bind", lowering_bind),  # as _build_cache, for symbols
    (mx.sym.Symbol, "optimize_for", lowering_partition),  # a partitioner must see the operator
    (SymbolBlock, "__init__", synchronizing_what_is_marked),  # a saved symbol says that it synchronizes
]


def install_hooks() -> None:
    """Extend the methods, when the package is imported; again does nothing (``importlib.reload``)."""
    if steps.progress.when_net_is_new is warn_of_plain_norms:
        return
    steps.progress.when_net_is_new = warn_of_plain_norms
    for owner, names, function in _EXTENSIONS:
        for name in names.split():
            setattr(owner, name, extended(getattr(owner, name), function))


def extended(original, function):
    """The method that calls ``function`` with the original and its arguments."""

    @functools.wraps(original)
    def call(*args, **kwargs):
        return function(original, *args, **kwargs)

    return call
