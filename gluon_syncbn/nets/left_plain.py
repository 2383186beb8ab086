"""Warns of BatchNorm layers that stay plain in a net that synchronizes others.

A net may be built with ``norm_layer=SyncBatchNorm`` and put plain ones into its heads all the same: GluonCV's
YOLOv3Estimator synchronizes 27 of 47. Nothing shows it; so a net is looked through when its first training step on
several devices has been called, at the end of ``autograd.record()``.
"""

import warnings
import weakref
from typing import List

import mxnet as mx
from mxnet.gluon import Block, SymbolBlock
from mxnet.gluon.contrib.nn import SyncBatchNorm as ContribSyncBatchNorm

from gluon_syncbn.block import SyncBatchNorm
from gluon_syncbn.convert import all_blocks, plain_base
from gluon_syncbn.graphs.rewrite import norms_of
from gluon_syncbn.nets.symbol_block import SynchronizedSymbolBlock
from gluon_syncbn.process.passes import take_net_of_scope

_SHOWN = 3
_seen = weakref.WeakSet()


def warn_of_plain_norms() -> None:
    """From now on each net that holds both is warned of (UserWarning), once."""
    scope = mx.autograd._RecordingStateScope
    end = scope.__exit__

    def __exit__(self, kind, value, trace):
        end(self, kind, value, trace)
        net = take_net_of_scope() if self._enter_is_record else None
        if net is not None and net not in _seen:
            _seen.add(net)
            _warn(net)

    scope.__exit__ = __exit__


def _warn(net: Block) -> None:
    blocks = all_blocks(net)
    layers = [item for item in blocks if isinstance(item, SyncBatchNorm) and not item._kwargs["use_global_stats"]]
    plain = [name for item in blocks for name in _plain_norms(item)]
    if not plain:
        return
    shown = ", ".join(plain[:_SHOWN]) + (", ..." if len(plain) > _SHOWN else "")
    warnings.warn(
        f"{len(plain)} of the {len(plain) + len(layers)} BatchNorm layers of {net.name} are not synchronized "
        f"({shown}): each device normalizes with its own images there. Before training, "
        f"gluon_syncbn.convert_sync_batchnorm(net) makes all of them synchronize.",
        stacklevel=3,
    )


def _plain_norms(block: Block) -> List[str]:
    """Names of Batch Normalizations in ``block`` itself that learn their statistics, each device for itself."""
    if isinstance(block, SymbolBlock):
        norms = [norm for norm in norms_of(block._cached_graph[1]) if not norm.use_global_stats]
        is_synchronized = isinstance(block, SynchronizedSymbolBlock)
        return [norm.name for norm in norms if not (is_synchronized and block.is_synchronized(norm))]
    is_plain = isinstance(block, plain_base) and not isinstance(block, (SyncBatchNorm, ContribSyncBatchNorm))
    return [block.name] if is_plain and not block._kwargs["use_global_stats"] else []
