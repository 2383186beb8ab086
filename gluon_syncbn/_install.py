"""Replaces MXNet's own synchronized Batch Normalization by this package's, for scripts that are not to be edited.

``gluon.contrib.nn.SyncBatchNorm`` and ``mx.sym.contrib.SyncBatchNorm`` are names in MXNet's modules, and in every
module that has imported them from there (such as gluoncv's ``nn.feature``). `install` replaces them in all these
modules, and `uninstall` restores them, also in modules that were imported in between. A script that makes plain layers
has its nets converted where it makes its Trainer.
"""

import gc
import logging
import sys
from typing import List, Set, Tuple

import mxnet as mx
from mxnet.gluon import Block, Parameter, Trainer
from mxnet.gluon.contrib import nn as contrib_nn

from gluon_syncbn import symbol
from gluon_syncbn._symbol_block import SynchronizedSymbolBlock
from gluon_syncbn.base.mxnet_private import parameters_of
from gluon_syncbn.base.walk import all_blocks
from gluon_syncbn.block import SyncBatchNorm
from gluon_syncbn.convert import convert_sync_batchnorm, is_plain
from gluon_syncbn.step.steps import steps

_log = logging.getLogger(__name__)


class ContribSyncBatchNorm(SyncBatchNorm):
    """`SyncBatchNorm` with the signature of ``gluon.contrib.nn.SyncBatchNorm``, whose first argument is in_channels."""

    def __init__(
        self,
        in_channels=0,
        num_devices=None,
        momentum=0.9,
        epsilon=1e-5,
        center=True,
        scale=True,
        use_global_stats=False,
        beta_initializer="zeros",
        gamma_initializer="ones",
        running_mean_initializer="zeros",
        running_variance_initializer="ones",
        **kwargs,
    ):
        super().__init__(
            in_channels=in_channels,
            num_devices=num_devices,
            momentum=momentum,
            epsilon=epsilon,
            center=center,
            scale=scale,
            use_global_stats=use_global_stats,
            beta_initializer=beta_initializer,
            gamma_initializer=gamma_initializer,
            running_mean_initializer=running_mean_initializer,
            running_variance_initializer=running_variance_initializer,
            **kwargs,
        )


def _contrib_symbol(*arrays, ndev=None, key=None, output_mean_var=False, **options):
    """`gluon_syncbn.symbol.SyncBatchNorm` with the signature of ``mx.sym.contrib.SyncBatchNorm``.

    gluoncv omits ``ndev`` where it does not know the number of devices; a SymbolBlock finds it out then.
    """
    if output_mean_var:
        raise ValueError(f"SyncBatchNorm '{key}': output_mean_var is not supported.")
    return symbol.SyncBatchNorm(*arrays, num_devices=ndev, **options)


_THEIRS = contrib_nn.SyncBatchNorm, mx.sym.contrib.SyncBatchNorm
_OURS = ContribSyncBatchNorm, _contrib_symbol


def install(convert: bool = False) -> None:
    """Replace ``gluon.contrib.nn.SyncBatchNorm`` and ``mx.sym.contrib.SyncBatchNorm`` by this package's.

    They are replaced in every module that has imported them. Call it before the net is built. Layers that exist already
    do not change; `convert_sync_batchnorm` converts them. A second call does nothing more.

    Parameters
    ----------
    convert : bool, default False
        From now on, when a `gluon.Trainer` (or Horovod's ``DistributedTrainer``) is made, also convert the nets of its
        parameters, as `convert_sync_batchnorm` does. This is for scripts that make plain layers in spite of their
        options. A net is the outermost block that has any of the parameters, so that a teacher that shares a block with
        its student is converted, too. Logs at level INFO which nets it converted; warns if there is nothing to convert.

    Examples
    --------
    >>> gluon_syncbn.install()
    >>> net = gluoncv.model_zoo.get_model('yolo3_darknet53_voc', norm_layer=mx.gluon.contrib.nn.SyncBatchNorm,
    ...                                   norm_kwargs={'num_devices': 4})
    """
    _replace(_THEIRS, _OURS)
    if convert:
        steps.updates.when_trainer_is_made = _convert_nets_of


def uninstall() -> None:
    """Undo `install`. Layers that were made in between remain `SyncBatchNorm` layers."""
    _replace(_OURS, _THEIRS)
    steps.updates.when_trainer_is_made = None


def _replace(old: Tuple, new: Tuple) -> None:
    others = dict(zip(map(id, old), new))
    for name, module in list(sys.modules.items()):
        # Not in the module that defines contrib's layer, whose methods need the name.
        if module is None or name.split(".")[0] == "gluon_syncbn" or name == _THEIRS[0].__module__:
            continue
        for attribute, value in list(getattr(module, "__dict__", {}).items()):
            if id(value) in others:
                setattr(module, attribute, others[id(value)])


def _convert_nets_of(trainer: Trainer) -> None:
    """Convert the nets of the Trainer's parameters."""
    nets = _nets_of(parameters_of(trainer))
    names = ", ".join(f"{net.name} ({type(net).__name__})" for net in nets)
    together = Block(prefix="")  # they may share layers, and all of them must drop their graphs
    together.nets = nets
    blocks = all_blocks(together)
    if any(map(is_plain, blocks)):
        convert_sync_batchnorm(together)
        _log.info("converted for a Trainer: %s.", names)
    elif not any(isinstance(block, (SyncBatchNorm, SynchronizedSymbolBlock)) for block in blocks):
        _log.warning(
            "a Trainer was made, and the blocks that have its parameters (%s) have no BatchNorm layer that can be "
            "converted: nothing synchronizes.",
            names or "none was found",
        )
    else:
        _log.info("a Trainer was made, and its nets have nothing to convert: %s.", names)


def _nets_of(parameters: List[Parameter]) -> List[Block]:
    """Return the outermost blocks that have any of these parameters."""
    gc.collect()  # some processes would find a net that is no longer used, and others would not
    wanted = set(map(id, parameters))
    found = []
    for item in gc.get_objects():
        # By type, as `isinstance` may run code of a proxy's. A block whose constructor has failed has no _children.
        if issubclass(type(item), Block) and "_children" in vars(item):
            blocks = all_blocks(item)
            if any(id(parameter) in wanted for block in blocks for parameter in block.params.values()):
                found.append(blocks)
    nets: List[Block] = []
    covered: Set[int] = set()
    for blocks in sorted(found, key=len, reverse=True):  # an outer block has at least as many as an inner one
        if id(blocks[0]) not in covered:
            nets.append(blocks[0])
            covered.update(map(id, blocks))
    return nets
