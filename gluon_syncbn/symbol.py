"""Synchronized Batch Normalization as a symbol, for ``mx.mod.Module`` and for graphs that are loaded from files.

A symbol does not know on which devices it will be bound, only on how many: ``num_devices``. The devices that train it
find each other at their first forward pass. One symbol serves one Module at a time, and synchronizes the devices of
that Module; for a second Module load or make the symbol again. Its nodes are plain ``BatchNorm`` nodes with an
attribute that says what is to synchronize. They do when the symbol is bound, or put into a SymbolBlock, in a process
that has imported this package. So saved files load anywhere.
"""

from typing import Dict, Optional, Tuple

import mxnet as mx

from gluon_syncbn.backends.choose import choose
from gluon_syncbn.base.mxnet_private import set_attributes, unique_name
from gluon_syncbn.distributed.default import find
from gluon_syncbn.graphs.graph import Entry, Graph
from gluon_syncbn.graphs.norms import Norm, count_others, mark, refuse_what_runs, replace_norms
from gluon_syncbn.layer.decision import check_groups, symbol_synchronizes
from gluon_syncbn.layer.spec import OPTIONS, LayerSpec, check_option_names
from gluon_syncbn.mxnet_engine.cpu_resources import refuse_late_import

__all__ = ["SyncBatchNorm", "convert_symbol", "plain_symbol"]

# The options of `convert_symbol`, without the number of devices.
_OPTIONS = {*OPTIONS, "dtype"} - {"num_devices", "activation"}


def SyncBatchNorm(
    data: mx.sym.Symbol,
    gamma: Optional[mx.sym.Symbol] = None,
    beta: Optional[mx.sym.Symbol] = None,
    moving_mean: Optional[mx.sym.Symbol] = None,
    moving_var: Optional[mx.sym.Symbol] = None,
    eps: float = 1e-3,
    momentum: float = 0.9,
    fix_gamma: bool = True,
    use_global_stats: bool = False,
    axis: int = 1,
    num_devices: Optional[int] = None,
    group_size: Optional[int] = None,
    timeout: Optional[float] = None,
    backend: str = "auto",
    activation: Optional[str] = None,
    kvstore: Optional[str] = None,
    process_group: Optional[str] = None,
    in_place: bool = False,
    renorm: Optional[Tuple[float, float]] = None,
    fuse: bool = True,
    dtype: str = "float32",
    name: Optional[str] = None,
    attr: Optional[Dict[str, str]] = None,
) -> mx.sym.Symbol:
    """``mx.sym.BatchNorm`` with the statistics of the whole mini-batch, over all devices of a Module.

    Names, defaults and variables (``<name>_gamma``, ``_beta``, ``_moving_mean``, ``_moving_var``) are those of
    ``mx.sym.BatchNorm``. The node computes what `gluon_syncbn.SyncBatchNorm` does.

    Parameters
    ----------
    data : Symbol
        The input, of any shape with at least 2 dimensions and of dtype ``dtype``, or float16 or bfloat16 with float32
        parameters. On a CPU without AVX-512, a symbol for one device must find bfloat16 in the graph: cast to it there,
        since the dtype of the arrays that are bound does not show.
    gamma, beta, moving_mean, moving_var : Symbol, optional
        Of shape (C,). Missing ones are created as variables.
    eps, momentum, fix_gamma, use_global_stats, axis :
        As in ``mx.sym.BatchNorm``. As there, ``fix_gamma`` is True by default.
    num_devices : int
        The number of devices that train the symbol: ``len(context)`` of the Module. With 1 the node is
        ``mx.sym.BatchNorm`` itself. Without it the symbol can be used in prediction only; training it is an error.
    group_size, timeout, backend, activation :
        As in `gluon_syncbn.SyncBatchNorm`. 'auto' takes 'native' where it is compiled and MXNet sees no GPU.
    kvstore, process_group : str, optional
        As in `gluon_syncbn.SyncBatchNorm`, but by name only. In a job of several processes ``num_devices`` counts the
        devices of one process.
    in_place, renorm, fuse :
        As in `gluon_syncbn.SyncBatchNorm`; the limits of ``renorm`` stay what they are. What follows the node is fused
        when the symbol is bound; the symbol itself does not change.
    dtype : {'float32', 'float64'}
        The dtype of parameters and statistics.
    name : str, optional
        The name of the node, by default ``syncbatchnorm0`` and so on.
    attr : dict of str, optional
        Hidden attributes of the node, such as ``__lr_mult__``.

    Returns
    -------
    Symbol
        The output, with the shape and dtype of data.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        An option cannot work.
    """
    name = unique_name(name, "syncbatchnorm")
    if not isinstance(data, mx.sym.Symbol):
        raise TypeError(f"SyncBatchNorm '{name}': data must be a Symbol, not {type(data).__name__}.")
    spec = LayerSpec.of(
        name,
        axis=axis,
        epsilon=float(eps),
        momentum=float(momentum),
        scale=not fix_gamma,
        use_global_stats=bool(use_global_stats),
        dtype=dtype,
        num_devices=num_devices,
        group_size=group_size,
        timeout=timeout,
        backend=backend,
        activation=activation,
        kvstore=kvstore,
        process_group=process_group,
        in_place=in_place,
        renorm=renorm,
        fuse=fuse,
    )
    find(process_group, spec.where)  # one that cannot connect shows at once
    options = {"eps": spec.epsilon, "momentum": spec.momentum, "fix_gamma": fix_gamma, "axis": spec.axis}
    with mx.name.NameManager():
        out = mx.sym.BatchNorm(
            data, gamma, beta, moving_mean, moving_var, use_global_stats=use_global_stats, name=name, **options
        )
        set_attributes(out, {**(attr or {}), **_mark(spec)})
        return mx.sym.relu(out, name=f"{name}_relu") if activation else out


def convert_symbol(sym: mx.sym.Symbol, num_devices: int, **options) -> mx.sym.Symbol:
    """Return a copy of a symbol in which every Batch Normalization synchronizes.

    Nodes keep their names, attributes and variables, so that the checkpoints of either symbol load into the other.
    Converts ``BatchNorm``, ``contrib.SyncBatchNorm`` and ``contrib.BatchNormWithReLU``. Nodes that already synchronize
    take the new options and keep their others. Nodes with ``use_global_stats`` do not change. For blocks see
    `gluon_syncbn.convert_sync_batchnorm`.

    Parameters
    ----------
    sym : Symbol
        The symbol, for example from ``mx.model.load_checkpoint``.
    num_devices : int
        The number of devices that will train the symbol: ``len(context)`` of the Module.
    **options
        ``group_size``, ``timeout``, ``backend``, ``kvstore``, ``process_group``, ``in_place``, ``renorm``, ``fuse`` and
        ``dtype``, as in `SyncBatchNorm`.

    Returns
    -------
    Symbol
        A new symbol; ``sym`` does not change.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        ``sym`` is not a Symbol, or an option is unknown or cannot work.
    ValueError
        The mean or variance of a Batch Normalization is used in the graph or is an output of it. Synchronized nodes do
        not return these.

    Examples
    --------
    >>> sym, arg_params, aux_params = mx.model.load_checkpoint('resnet', 0)
    >>> context = [mx.gpu(0), mx.gpu(1)]
    >>> module = mx.mod.Module(convert_symbol(sym, len(context)), context=context)
    """
    if not isinstance(sym, mx.sym.Symbol):
        raise TypeError(f"expected a Symbol, not {type(sym).__name__}; for a block use convert_sync_batchnorm.")
    if num_devices is None:
        raise ValueError("convert_symbol: num_devices must be given, since a symbol does not know its devices.")
    refuse_what_runs(sym, "convert_symbol")
    graph = Graph(sym)
    if count_others(graph):
        raise ValueError(
            f"convert_symbol: the mean or variance of {count_others(graph)} BatchNorm nodes is used as an output, "
            f"but synchronized nodes do not return them."
        )
    check_option_names(options, _OPTIONS, "convert_symbol")
    if "process_group" in options:
        find(options["process_group"], "convert_symbol")  # one that cannot connect shows at once

    def change(norm: Norm) -> Optional[Entry]:
        if norm.spec.use_global_stats:
            return None
        return norm.plain(**_mark(norm.spec.but(num_devices=num_devices, **options).checked()))

    replace_norms(graph, change)
    return graph.symbol()


def plain_symbol(sym: mx.sym.Symbol) -> mx.sym.Symbol:
    """Return a copy of a symbol with plain ``BatchNorm`` nodes that do not synchronize.

    Raises
    ------
    ValueError
        ``Symbol.optimize_for`` has taken the symbol apart.
    """
    refuse_what_runs(sym, "plain_symbol")
    graph = Graph(sym)

    def change(norm: Norm) -> Optional[Entry]:
        return norm.plain() if norm.is_marked or norm.node.op == "_contrib_SyncBatchNorm" else None

    replace_norms(graph, change)
    return graph.symbol()


def _mark(spec: LayerSpec) -> Dict[str, str]:
    """The mark of a node that no block owns; ``spec`` has been checked.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        A symbol cannot have these options, or cannot run with them here.
    """
    spec.check_names()
    spec.check_engine(spec.num_devices)
    check_groups(spec, spec.num_devices)
    if symbol_synchronizes(spec):
        if spec.group_size != 1:
            refuse_late_import(spec.where, spec.num_devices or 1)
        choose(spec, [mx.gpu(0)] if mx.context.num_gpus() else [])
    return {} if spec.use_global_stats else mark(spec)
