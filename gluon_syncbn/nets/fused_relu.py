"""A ReLU after a norm in a `nn.HybridSequential` is computed by the norm, in the same pass."""

from collections import Counter
from typing import List

import mxnet as mx
from mxnet.gluon import Block, nn

from gluon_syncbn.base.mxnet_private import children, has_forward_hooks, is_relu
from gluon_syncbn.base.walk import blocks_in
from gluon_syncbn.block import SyncBatchNorm
from gluon_syncbn.synchronization import synchronization_of


class BatchNormReLU(nn.BatchNorm):
    """The plain form of a `SyncBatchNorm` with ``activation='relu'``."""

    def hybrid_forward(self, F, x, gamma, beta, running_mean, running_var):
        out = super().hybrid_forward(F, x, gamma, beta, running_mean, running_var)
        return F.npx.relu(out) if mx.util.is_np_array() else F.relu(out)  # Activation would turn NaN into 0


class FusedReLU(nn.Activation):
    """A ReLU that the `SyncBatchNorm` before it has taken over: passes its input on."""

    def hybrid_forward(self, F, x):
        return x


def fuse_relus(blocks: List[Block]) -> int:
    """Let each norm compute the ReLU that always follows it; returns how many did."""
    places = Counter(id(item) for block in blocks for item in blocks_in(vars(block), set()))
    fused = 0
    for block in blocks:
        if type(block) is not nn.HybridSequential:
            continue
        items = children(block)
        for norm, relu in zip(items, items[1:]):
            is_pair = type(norm) is SyncBatchNorm and is_relu(relu)
            is_private = all(places[id(item)] == 1 and not has_forward_hooks(item) for item in (norm, relu))
            if is_pair and is_private and norm._sync.options.fuse and norm._sync.options.activation is None:
                norm._sync.options = norm._sync.options.but(activation="relu")
                relu.__class__ = FusedReLU
                norm._sync.fused_relu = relu
                fused += 1
    return fused


def separate_relus(blocks: List[Block]) -> None:
    """Undo `fuse_relus`: what is left of the norms' activations is the user's own."""
    for block in blocks:
        sync = synchronization_of(block)
        if sync is not None and sync.fused_relu is not None:
            sync.options = sync.options.but(activation=None)
            sync.fused_relu.__class__ = nn.Activation
            sync.fused_relu = None
