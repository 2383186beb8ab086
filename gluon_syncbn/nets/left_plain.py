"""Warns of BatchNorm layers that stay plain in a net that synchronizes others.

A net that is built with ``norm_layer=SyncBatchNorm`` may still put plain ones into its heads: GluonCV's YOLOv3Estimator
synchronizes 27 of 47. So a net is looked through when its first training step on several devices has been called, at
the end of ``autograd.record()``.
"""

import warnings
from typing import List

from mxnet.gluon import Block, SymbolBlock
from mxnet.gluon.contrib.nn import SyncBatchNorm as ContribSyncBatchNorm

from gluon_syncbn.base.mxnet_private import PlainBatchNorm
from gluon_syncbn.base.walk import all_blocks, users_line
from gluon_syncbn.block import SyncBatchNorm
from gluon_syncbn.convert import is_plain
from gluon_syncbn.graphs.norms import is_frozen
from gluon_syncbn.nets.symbol_block import plain_norms

_SHOWN = 3


def warn_of_plain_norms(net: Block) -> None:
    """UserWarning if the net holds both."""
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
