"""Replaces MXNet's own synchronized Batch Normalization by this package's, for scripts that are not to be edited.

``gluon.contrib.nn.SyncBatchNorm`` and ``mx.sym.contrib.SyncBatchNorm`` are names in MXNet's modules, and in every
module that has imported them from there (such as gluoncv's ``nn.feature``). `install` replaces them in all these
modules, and `uninstall` restores them.
"""

import sys
from typing import Any, List, Tuple

import mxnet as mx
from mxnet.gluon.contrib import nn as contrib_nn

from gluon_syncbn import symbol
from gluon_syncbn.block import SyncBatchNorm

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


def install() -> None:
    """Replace ``gluon.contrib.nn.SyncBatchNorm`` and ``mx.sym.contrib.SyncBatchNorm`` by this package's.

    They are replaced in every module that has imported them. Call it before the net is built. Layers that exist already
    do not change; `convert_sync_batchnorm` converts them. A second call does nothing more.

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
                _replaced.append((module, attribute, value))
                setattr(module, attribute, ours[id(value)])


def uninstall() -> None:
    """Undo `install`. Layers that were made in between remain `SyncBatchNorm` layers."""
    while _replaced:
        module, attribute, value = _replaced.pop()
        setattr(module, attribute, value)
