"""Turns the BatchNorm layers of a whole net into SyncBatchNorm, and back.

A layer is converted in place: the object stays, and its class changes. So every reference to it remains valid, whether
it is a child, an attribute, an element of a list, or held by a closure. Its Parameters, hooks, names and position in
``.params`` files do not change either.
"""

import logging
import warnings
from typing import Any, Dict, List, Optional, Type

import mxnet as mx
from mxnet.gluon import Block, HybridBlock, SymbolBlock, nn
from mxnet.gluon.contrib.nn import SyncBatchNorm as ContribSyncBatchNorm

from gluon_syncbn._symbol_block import SynchronizedSymbolBlock, class_of_both, plain_norms, restore, synchronize
from gluon_syncbn.base.mxnet_private import PlainBatchNorm, drop_graph, operator_options
from gluon_syncbn.base.walk import all_blocks, users_line
from gluon_syncbn.block import BatchNormReLU, SyncBatchNorm
from gluon_syncbn.graphs.calls import note_changes, plain_graph_of
from gluon_syncbn.graphs.graph import Graph
from gluon_syncbn.graphs.norms import count_others, is_frozen
from gluon_syncbn.layer.spec import OPTIONS, LayerSpec, check_option_names, check_renorm
from gluon_syncbn.step.steps import steps
from gluon_syncbn.synchronization import Synchronization, options_of

_log = logging.getLogger(__name__)


class _AsItIs:
    """The default of an option: the layer keeps its own value. Signatures show the repr."""

    def __repr__(self) -> str:
        return "<as it is>"


_AS_IT_IS: Any = _AsItIs()
_NAMES_SHOWN = 3


def convert_sync_batchnorm(block: Block, num_devices=_AS_IT_IS, fuse=_AS_IT_IS, **options) -> Block:
    """Make every BatchNorm of a net synchronize, in place.

    Converts `nn.BatchNorm`, its subclasses, ``contrib.nn.SyncBatchNorm``, and the BatchNorm nodes of every SymbolBlock
    (gluoncv's FeatureExpander, `SymbolBlock.imports`), wherever they are in the net. Call it before or after
    ``initialize``, and before or after ``hybridize`` (cached graphs are dropped, and built again with the same flags).
    Layers that are `SyncBatchNorm` already take the new options and keep their others. A layer of a subclass
    remains one, and keeps all of the subclass's attributes.

    Logs at level INFO how many layers it converted. Warns (logger ``gluon_syncbn.convert``) of BatchNorm layers that it
    leaves as they are: layers whose class overrides ``forward``, ``hybrid_forward`` or ``__call__``, or how they are
    copied; `nn.BatchNormReLU`; and nodes of a symbol whose mean or variance is an output.

    Parameters
    ----------
    block : Block
        The net; it is changed in place.
    num_devices : int, optional
        As in `SyncBatchNorm`, like all further ``options``. These are the options that `SyncBatchNorm` has and
        `nn.BatchNorm` has not, except ``activation``.
    fuse : bool, default True
        In a hybridized net, let a BatchNorm compute a ReLU, a leaky ReLU, or a sum and a ReLU after it in its own
        passes, wherever nothing else in the graph reads the values in between. A line of the log (INFO, logger
        ``gluon_syncbn``) counts them when the graph is made.

    Returns
    -------
    Block
        ``block`` itself.

    Raises
    ------
    TypeError
        ``block`` is not a Gluon block, or an option is unknown. (``activation`` is not accepted: no conversion changes
        the function of a layer.)
    ValueError
        An option has an impossible value. Nothing has been converted then.
    RuntimeError
        The chosen back end, or process group, cannot be had here, or lacks an option. Nothing has been converted then.

    Examples
    --------
    >>> net = gluoncv.model_zoo.get_model('resnet50_v1b')
    >>> convert_sync_batchnorm(net)
    >>> net.initialize(ctx=[mx.gpu(0), mx.gpu(1)])
    """
    blocks = all_blocks(block)
    for name, value in (("num_devices", num_devices), ("fuse", fuse)):
        if value is not _AS_IT_IS:
            options[name] = value
    _check(block, blocks, options)
    symbol_blocks = [item for item in blocks if _is_convertible_symbol(item)]
    for item in symbol_blocks:
        synchronize(item, **options)
        blocks += item.layers_of_nodes()
    layers = [item for item in blocks if _can_convert(item)]
    for layer in layers:
        chosen = _options_for(layer, options)
        if not isinstance(layer, SyncBatchNorm):
            layer._converted_from = type(layer)
            layer.__class__ = _synchronized(type(layer))
            if issubclass(layer._converted_from, ContribSyncBatchNorm):
                operator_options(layer).update(axis=1)  # the only one it knows
                for name in ("ndev", "key"):
                    del operator_options(layer)[name]
        layer._sync = Synchronization(layer, chosen)
    drop_graphs(blocks)
    _log.info("%d BatchNorm layers converted to SyncBatchNorm%s.", len(layers), _whereabouts(layers))
    if not layers:
        warnings.warn(f"{block.name} has no BatchNorm layer that can be converted.", stacklevel=users_line())
    _warn_of_others(blocks)
    return block


def convert_batchnorm(block: Block) -> Block:
    """Make every `SyncBatchNorm` of a net the plain BatchNorm that it was, for deployment.

    A layer that was made as `SyncBatchNorm` becomes `nn.BatchNorm`, with its activation if it has one; so does one of
    contrib's. Its options are lost. A layer of your own class with a forward pass of its own stays as it is, and is
    logged. Parameters stay the same objects, and cached graphs are dropped. ``export`` does not need this function,
    since it writes plain BatchNorm nodes anyway.

    Parameters
    ----------
    block : Block
        The net; it is changed in place.

    Returns
    -------
    Block
        ``block`` itself.

    Raises
    ------
    TypeError
        ``block`` is not a Gluon block.
    """
    blocks = all_blocks(block)
    layers = [item for item in blocks if isinstance(item, SyncBatchNorm)]
    for layer in filter(_has_own_forward, layers):
        _log.warning(f"{type(layer).__name__} '{layer.name}' is not converted: it has a forward pass of its own.")
    layers = [layer for layer in layers if not _has_own_forward(layer)]
    for layer in layers:
        made_as = BatchNormReLU if layer._sync.options.activation else nn.BatchNorm
        del layer._sync
        original = getattr(layer, "_converted_from", made_as)
        layer.__dict__.pop("_converted_from", None)
        layer.__class__ = nn.BatchNorm if issubclass(original, ContribSyncBatchNorm) else original
    for item in blocks:
        if isinstance(item, SynchronizedSymbolBlock):
            restore(item)
    drop_graphs(blocks)
    _log.info("%d SyncBatchNorm layers converted back to BatchNorm.", len(layers))
    return block


def freeze_statistics(block: Block, frozen: bool = True) -> Block:
    """Normalize with the running statistics in training too, or with the statistics of the batch again.

    Sets ``use_global_stats`` of every BatchNorm of a net, synchronized or not (in a SymbolBlock only if it has been
    converted). It may be called in the middle of training: cached graphs are dropped, and built again with the same
    flags. γ and β are still learned unless their ``grad_req`` is ``'null'``.

    Parameters
    ----------
    block : Block
        The net; it is changed in place.
    frozen : bool, default True
        True to normalize with the running statistics, False to normalize with the batch's own in training.

    Returns
    -------
    Block
        ``block`` itself.

    Raises
    ------
    TypeError
        ``block`` is not a Gluon block.

    Examples
    --------
    >>> freeze_statistics(net)
    >>> net.collect_params('.*gamma|.*beta').setattr('grad_req', 'null')  # as fixed as in a pretrained backbone
    """
    blocks = all_blocks(block)
    for item in blocks:
        if isinstance(item, PlainBatchNorm):
            operator_options(item)["use_global_stats"] = frozen
    drop_graphs(blocks)
    return block


def set_renorm(block: Block, r_max: float, d_max: float) -> Block:
    """Set the limits of Batch Renormalization in every layer of a net that has the option ``renorm``.

    The limits of a schedule are set in the training loop, between two steps. The function waits for all pending work,
    so call it every 100 steps, say. In a job of several processes, all of them call it with the same limits.

    Parameters
    ----------
    block : Block
        The net; it is changed in place.
    r_max : float
        At least 1. With 1 and a ``d_max`` of 0 it is Batch Normalization.
    d_max : float
        At least 0.

    Returns
    -------
    Block
        ``block`` itself.

    Raises
    ------
    TypeError
        ``block`` is not a Gluon block, or a limit is no number.
    ValueError
        A limit is too small, no layer of the net has the option, or a step is under way.
    MXNetError
        A step has failed, and nothing has raised its error yet. The limits are set.

    Examples
    --------
    >>> convert_sync_batchnorm(net, renorm=(1, 0))
    >>> for step, batch in enumerate(batches):
    ...     if step % 100 == 0:
    ...         set_renorm(net, r_max=1 + 2 * min(1, step / 40000), d_max=5 * min(1, step / 25000))
    """
    where = "set_renorm"
    limits = check_renorm((r_max, d_max), where)
    layers = [item for item in all_blocks(block) if isinstance(item, SyncBatchNorm) and item._sync.options.renorm]
    if not layers:
        raise ValueError(f"{where}: no layer of '{block.name}' has the option renorm. Convert it with renorm=(1, 0).")
    steps.progress.refuse_within_step(where)
    try:
        mx.nd.waitall()
    finally:
        for layer in layers:
            layer._sync.set_limits(limits)
    return block


def _check(block: Block, blocks: List[Block], options: Dict[str, Any]) -> None:
    """Raise an error for wrong options, before anything has changed."""
    if "activation" in options:
        raise TypeError(
            "convert_sync_batchnorm: activation is no option of a conversion, which keeps each layer's function. "
            "Pass it to SyncBatchNorm where the layers are made."
        )
    check_option_names(options, OPTIONS, "convert_sync_batchnorm")
    options_of(block, **options)
    for layer in blocks:
        if _can_convert(layer):
            _options_for(layer, options)
            if not isinstance(layer, SyncBatchNorm):
                _synchronized(type(layer))  # which may be refused


def _whereabouts(layers: List[SyncBatchNorm]) -> str:
    """Return the end of a sentence: the devices of the layers, and the number of frozen ones."""
    found = ", ".join(map(str, layers[0]._sync.devices())) if layers else ""
    frozen = sum(layer._sync.spec().use_global_stats for layer in layers)
    return (f" on {found}" if found else "") + (f", {frozen} of them frozen" if frozen else "")


def _options_for(layer: Block, options: Dict[str, Any]) -> LayerSpec:
    """Return the options for a layer: its own, replaced by these."""
    own = {"activation": "relu"} if isinstance(layer, BatchNormReLU) else {}
    if isinstance(layer, SyncBatchNorm):
        own = layer._sync.options.options()
    return options_of(layer, **{**own, **options})


def is_plain(block: Block) -> bool:
    """Whether the block does not synchronize, and `convert_sync_batchnorm` would make it."""
    return (_can_convert(block) and not isinstance(block, SyncBatchNorm)) or _is_convertible_symbol(block)


def _can_convert(block: Block) -> bool:
    return isinstance(block, PlainBatchNorm) and not _own(block)


# Names that a user's class may not define: its computation, copies and pickles, and the names of `SyncBatchNorm`.
_OURS = {"forward", "hybrid_forward", "__call__", "__new__", "__slots__", "__getstate__", "__setstate__"}
_OURS |= {"__copy__", "__deepcopy__", "__reduce__", "__reduce_ex__", "backend"}
_OURS |= {name for name in vars(SyncBatchNorm) if name.startswith("_") and not name.startswith("__")} - {"_alias"}


def _has_own_forward(layer: SyncBatchNorm) -> bool:
    """Whether it is of a user's class that computes something else."""
    names = "forward", "hybrid_forward", "__call__"
    return any(getattr(type(layer), name) is not getattr(SyncBatchNorm, name) for name in names)


def _base_of(kind: Type[Block]) -> Optional[Type[Block]]:
    """The class whose forward pass is known; gluoncv's BatchNormCudnnOff only turns cuDNN off."""
    if issubclass(kind, SyncBatchNorm):
        return SyncBatchNorm
    known = (ContribSyncBatchNorm, BatchNormReLU, nn.BatchNorm)
    return next((base for base in kind.__mro__ if base in known or base.__name__ == "BatchNormCudnnOff"), None)


def _own(block: Block) -> List[str]:
    """Return the names that a BatchNorm defines itself, so that it cannot be converted."""
    kind = type(block)
    base = _base_of(kind)
    if base is SyncBatchNorm:
        return []
    if base is None or getattr(block, "fuse_relu", False):
        return ["fuse_relu"]  # as MXNet's BatchNormReLU
    classes = kind.__mro__[: kind.__mro__.index(base)]
    own = {name for part in classes for name, value in vars(part).items() if name != "__slots__" or value}
    return sorted(_OURS & (own | {"backend"} & vars(block).keys()))


def _synchronized(kind: Any) -> Any:
    """Return the class that layers of this class get. It keeps the attributes of a user's class."""
    return SyncBatchNorm if kind is _base_of(kind) else class_of_both(kind, SyncBatchNorm, "hybrid_forward")


def _is_convertible_symbol(block: Block) -> bool:
    """Whether ``block`` is a SymbolBlock with plain BatchNorm nodes that does not override ``forward``."""
    return isinstance(block, SymbolBlock) and type(block).forward is SymbolBlock.forward and bool(plain_norms(block))


def drop_graphs(blocks: List[Block]) -> None:
    """Drop the graphs of blocks; the next call of each makes it anew."""
    note_changes()  # in nets that contain these blocks
    for block in blocks:
        if isinstance(block, HybridBlock):
            drop_graph(block)


def _warn_of_others(blocks: List[Block]) -> None:
    """Log which BatchNorm layers of a net stay unsynchronized."""
    for block in blocks:
        where = f"{type(block).__name__} '{block.name}'"
        if isinstance(block, SymbolBlock):
            count = count_others(Graph(plain_graph_of(block)[1])) + len(plain_norms(block))
            if count:
                _log.warning(
                    f"{count} BatchNorm nodes inside {where} stay unsynchronized: their mean or variance is an output "
                    f"of the graph, their inputs are no parameters, or the block has a forward pass of its own."
                )
        elif isinstance(block, PlainBatchNorm) and not _can_convert(block):
            names = ", ".join(_own(block))
            _log.warning(f"{where} stays unsynchronized: its {names} is not that of nn.BatchNorm.")


def warn_of_plain_norms(net: Block) -> None:
    """UserWarning if the net also has layers that synchronize. Called when its first ``record()`` ends.

    A net that is built with ``norm_layer=SyncBatchNorm`` may still put plain ones into its heads: GluonCV's
    YOLOv3Estimator synchronizes 27 of 47.
    """
    blocks = all_blocks(net)
    layers = [item for item in blocks if isinstance(item, SyncBatchNorm) and not is_frozen(item)]
    plain = [name for item in blocks for name in names_left_plain(item)]
    if not plain:
        return
    shown = ", ".join(plain[:_NAMES_SHOWN]) + (", ..." if len(plain) > _NAMES_SHOWN else "")
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
