"""The methods of MXNet that this package extends, because MXNet has no hook there. The table lists all of them.

Each entry names a method and a decorator. The decorated method does what the original does, and some work of its own.
Where a method has two entries, the later one is the outer: it calls the earlier one.
"""

import mxnet as mx
from mxnet.gluon import HybridBlock, SymbolBlock

from gluon_syncbn.base.mxnet_private import RecordingScope
from gluon_syncbn.graphs.bind import following_reshape, lowering_bind, lowering_partition
from gluon_syncbn.graphs.calls import exporting_plain_graphs, following_changes, lowering_what_runs
from gluon_syncbn.graphs.trace import dropping_layers, noting_layers
from gluon_syncbn.nets.left_plain import warning_of_plain_norms
from gluon_syncbn.nets.symbol_block import synchronizing_what_is_marked
from gluon_syncbn.step.abandon import failing_what_cannot_be_read
from gluon_syncbn.step.recording import (
    counting_backward,
    noticing_backward_of_symbols,
    noticing_copies,
    noticing_end_of_record,
    noticing_forward_of_symbols,
    noticing_grad,
    noticing_record,
)
from gluon_syncbn.step.updates import guarding_module, guarding_trainer, noting_trainer

_EXTENSIONS = [
    (RecordingScope, "__enter__", noticing_record),
    (RecordingScope, "__exit__", noticing_end_of_record),
    (RecordingScope, "__exit__", warning_of_plain_norms),
    (mx.nd.NDArray, "backward", counting_backward),
    (mx.autograd, "backward", counting_backward),
    (mx.autograd, "grad", noticing_grad),
    (mx.nd.NDArray, "copyto", noticing_copies),
    (mx.np.ndarray, "copyto", noticing_copies),
    (mx.nd.NDArray, "asnumpy", failing_what_cannot_be_read),
    (mx.nd.NDArray, "wait_to_read", failing_what_cannot_be_read),
    (mx.nd, "waitall", failing_what_cannot_be_read),
    (mx.npx, "waitall", failing_what_cannot_be_read),
    (mx.executor.Executor, "forward", noticing_forward_of_symbols),
    (mx.executor.Executor, "backward", noticing_backward_of_symbols),
    (mx.gluon.Trainer, "__init__", noting_trainer),
    (mx.gluon.Trainer, "step", guarding_trainer),
    (mx.gluon.Trainer, "allreduce_grads", guarding_trainer),
    (mx.gluon.Trainer, "update", guarding_trainer),
    (mx.mod.Module, "update", guarding_module),
    (HybridBlock, "_get_graph", noting_layers),
    (HybridBlock, "_clear_cached_op", dropping_layers),
    (HybridBlock, "_build_cache", lowering_what_runs),
    (HybridBlock, "_call_cached_op", following_changes),
    (mx.sym.Symbol, "bind", lowering_bind),
    (mx.sym.Symbol, "simple_bind", lowering_bind),
    (mx.sym.Symbol, "optimize_for", lowering_partition),
    (mx.executor.Executor, "reshape", following_reshape),
    (HybridBlock, "export", exporting_plain_graphs),
    (SymbolBlock, "__init__", synchronizing_what_is_marked),
]
_are_installed = False


def install_hooks() -> None:
    """Extend the methods, when the package is imported; again does nothing (``importlib.reload``)."""
    global _are_installed
    if _are_installed:
        return
    _are_installed = True
    for owner, name, extended in _EXTENSIONS:
        setattr(owner, name, extended(getattr(owner, name)))
