"""Replaces MXNet's own synchronized Batch Normalization by this package's, for scripts that are not to be edited.

``gluon.contrib.nn.SyncBatchNorm`` and ``mx.sym.contrib.SyncBatchNorm`` are names in MXNet's modules, and in every
module that has imported them from there (such as gluoncv's ``nn.feature``). `install` replaces them in all these
modules, and `uninstall` restores them. A script that makes plain layers has its nets converted where it makes its
Trainer.
"""

import functools
import gc
import logging
import sys
from typing import Any, List, Tuple

import mxnet as mx
from mxnet.gluon import Block, Parameter, Trainer
from mxnet.gluon.contrib import nn as contrib_nn

from gluon_syncbn import symbol
from gluon_syncbn.base.walk import all_blocks
from gluon_syncbn.block import SyncBatchNorm
from gluon_syncbn.convert import convert_sync_batchnorm, is_plain
from gluon_syncbn.nets.symbol_block import SynchronizedSymbolBlock

_log = logging.getLogger(__name__)

_CONTRIB_LAYER = contrib_nn.SyncBatchNorm
_CONTRIB_SYMBOL = mx.sym.contrib.SyncBatchNorm
_replaced: List[Tuple[Any, str, Any]] = []


class ContribSyncBatchNorm(SyncBatchNorm):
    """`SyncBatchNorm` with the signature of ``gluon.contrib.nn.SyncBatchNorm``, whose first argument is in_channels."""

    def __init__(self, in_channels=0, num_devices=None, momentum=0.9, epsilon=1e-5, center=True, scale=True, **kwargs):
        super().__init__(
            in_channels=in_channels,
            num_devices=num_devices,
            momentum=momentum,
            epsilon=epsilon,
            center=center,
            scale=scale,
            **kwargs,
        )


def _contrib_symbol(
    data,
    gamma=None,
    beta=None,
    moving_mean=None,
    moving_var=None,
    ndev=None,
    key=None,
    output_mean_var=False,
    **options,
):
    """`gluon_syncbn.symbol.SyncBatchNorm` with the signature of ``mx.sym.contrib.SyncBatchNorm``.

    gluoncv omits ``ndev`` where it does not know the number of devices; a SymbolBlock finds it out then.
    """
    if output_mean_var:
        raise ValueError(f"SyncBatchNorm '{key}': output_mean_var is not supported.")
    return symbol.SyncBatchNorm(data, gamma, beta, moving_mean, moving_var, num_devices=ndev, **options)


def install(convert: bool = False) -> None:
    """Replace ``gluon.contrib.nn.SyncBatchNorm`` and ``mx.sym.contrib.SyncBatchNorm`` by this package's.

    They are replaced in every module that has imported them. Call it before the net is built. Layers that exist already
    do not change; `convert_sync_batchnorm` converts them. A second call does nothing more.

    Parameters
    ----------
    convert : bool, default False
        From now on, also convert every net with plain BatchNorm when a `gluon.Trainer` (or Horovod's
        ``DistributedTrainer``) is made for its parameters, as `convert_sync_batchnorm` does. This is for scripts that
        make plain layers, whatever their options say. Logs at level INFO which nets it converted, and warns where a
        Trainer's nets have no BatchNorm at all.

    Examples
    --------
    >>> gluon_syncbn.install()
    >>> net = gluoncv.model_zoo.get_model('yolo3_darknet53_voc', norm_layer=mx.gluon.contrib.nn.SyncBatchNorm,
    ...                                   norm_kwargs={'num_devices': 4})
    """
    ours = {id(_CONTRIB_LAYER): ContribSyncBatchNorm, id(_CONTRIB_SYMBOL): _contrib_symbol}
    for name, module in list(sys.modules.items()):
        # Not in the module that defines contrib's layer, whose methods need the name.
        if module is None or name.split(".")[0] == "gluon_syncbn" or name == _CONTRIB_LAYER.__module__:
            continue
        for attribute, value in list(getattr(module, "__dict__", {}).items()):
            if id(value) in ours:
                _replace(module, attribute, ours[id(value)])
    if convert and all(owner is not Trainer for owner, _, _ in _replaced):
        _replace(Trainer, "__init__", _converting(Trainer.__init__))


def uninstall() -> None:
    """Undo `install`. Layers that were made in between remain `SyncBatchNorm` layers."""
    while _replaced:
        module, attribute, value = _replaced.pop()
        setattr(module, attribute, value)


def _replace(owner: Any, attribute: str, value: Any) -> None:
    _replaced.append((owner, attribute, getattr(owner, attribute)))
    setattr(owner, attribute, value)


def _converting(original):
    """Trainer's constructor, which first converts the nets that it is made for."""

    @functools.wraps(original)
    def convert_and_make(self, params, *args, **kwargs):
        parameters = list(params.values()) if hasattr(params, "values") else list(params)
        nets = _nets_of(parameters)
        for net in nets:
            if any(map(is_plain, all_blocks(net))):
                convert_sync_batchnorm(net)
                _log.info("%s, a %s, was converted for its Trainer.", net.name, type(net).__name__)
        if not any(
            isinstance(block, (SyncBatchNorm, SynchronizedSymbolBlock)) for net in nets for block in all_blocks(net)
        ):
            _log.warning("A Trainer was made for a net without BatchNorm layers: nothing synchronizes.")
        original(self, params, *args, **kwargs)

    return convert_and_make


def _nets_of(parameters: List[Parameter]) -> List[Block]:
    """The outermost blocks that have any of these parameters."""
    wanted = set(map(id, parameters))
    found = []
    for block in [item for item in gc.get_objects() if isinstance(item, Block)]:
        blocks = all_blocks(block)
        if any(id(item) in wanted for part in blocks for item in part.params.values()):
            found.append(blocks)
    inner = {id(part) for first, *others in found for part in others}
    return [first for first, *_ in found if id(first) not in inner]
