"""Warns of BatchNorm layers that stay plain in a net that synchronizes others.

A net that is built with ``norm_layer=SyncBatchNorm`` may still put plain ones into its heads: GluonCV's YOLOv3Estimator
synchronizes 27 of 47. So a net is looked through when its first training step on several devices has been called, at
the end of ``autograd.record()``.
"""

import functools
import warnings
from typing import List

from mxnet.gluon import Block, SymbolBlock
from mxnet.gluon.contrib.nn import SyncBatchNorm as ContribSyncBatchNorm

from gluon_syncbn.base.mxnet_private import PlainBatchNorm, is_record
from gluon_syncbn.base.walk import all_blocks, users_line
from gluon_syncbn.block import SyncBatchNorm
from gluon_syncbn.convert import is_plain
from gluon_syncbn.graphs.norms import is_frozen
from gluon_syncbn.nets.symbol_block import plain_norms
from gluon_syncbn.step.steps import steps

_SHOWN = 3


def warning_of_plain_norms(leave):
    """``autograd.record()``, when it ends: warns once of each net that holds both (UserWarning)."""

    @functools.wraps(leave)
    def __exit__(self, kind, value, trace):
        leave(self, kind, value, trace)
        net = steps.take_new_net() if is_record(self) else None
        if net is not None:
            _warn(net)

    return __exit__


def _warn(net: Block) -> None:
    blocks = all_blocks(net)
    layers = [item for item in blocks if isinstance(item, SyncBatchNorm) and not is_frozen(item)]
    plain = [name for item in blocks for name in names_left_plain(item)]
    if not plain:
        return
    shown = ", ".join(plain[:_SHOWN]) + (", ..." if len(plain) > _SHOWN else "")
    if any(is_plain(item) for item in blocks):
        advice = "Before training, gluon_syncbn.convert_sync_batchnorm(net) makes them synchronize."
    else:
        advice = "They have a forward pass of their own, and cannot be converted."
    warnings.warn(
        f"{len(plain)} of the {len(plain) + len(layers)} BatchNorm layers of {net.name} are not synchronized "
        f"({shown}): each device normalizes with its own images there. {advice}",
        stacklevel=users_line(),
    )


def names_left_plain(block: Block) -> List[str]:
    """Names of Batch Normalizations in ``block`` itself that learn their statistics, each device for itself."""
    if isinstance(block, SymbolBlock):
        return [norm.name for norm in plain_norms(block) if not norm.spec.use_global_stats]
    is_left = isinstance(block, PlainBatchNorm) and not isinstance(block, (SyncBatchNorm, ContribSyncBatchNorm))
    return [block.name] if is_left and not is_frozen(block) else []
