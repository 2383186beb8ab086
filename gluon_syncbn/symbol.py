"""Synchronized Batch Normalization as a symbol, for ``mx.mod.Module`` and for graphs that are loaded from files.

A symbol does not know on which devices it will be bound, only on how many: ``num_devices``. The devices that train it
find each other at their first forward pass. One symbol serves one Module at a time, and synchronizes the devices of
that Module; for a second Module load or make the symbol again. Its nodes are plain ``BatchNorm`` nodes with an
attribute that describes the layer. They synchronize when the symbol is bound, or put into a SymbolBlock, in a process
that has imported this package. So saved files load anywhere.
"""

from typing import Dict, Optional

import mxnet as mx
import numpy as np

from gluon_syncbn.backends.choose import choose
from gluon_syncbn.base.mxnet_private import set_attributes, unique_name
from gluon_syncbn.distributed.default import find
from gluon_syncbn.graphs.graph import Entry, Graph
from gluon_syncbn.graphs.norms import Norm, count_others, mark, refuse_what_runs, replace_norms
from gluon_syncbn.layer.spec import OPTIONS, LayerSpec, check_groups, check_option_names, symbol_synchronizes
from gluon_syncbn.mxnet_engine.cpu_resources import refuse_late_import

__all__ = ["SyncBatchNorm", "convert_symbol", "plain_symbol"]

_BATCH_NORM = ("eps", "momentum", "fix_gamma", "use_global_stats", "axis", "name", "attr")
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
    *,
    dtype: str = "float32",
    name: Optional[str] = None,
    attr: Optional[Dict[str, str]] = None,
    **options,
) -> mx.sym.Symbol:
    """``mx.sym.BatchNorm`` with the statistics of the whole mini-batch, over all devices of a Module.

    Names, defaults and variables (``<name>_gamma``, ``_beta``, ``_moving_mean``, ``_moving_var``) are the same as in
    ``mx.sym.BatchNorm``. The node computes the same as `gluon_syncbn.SyncBatchNorm`.

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
    dtype : {'float32', 'float64'}
        The dtype of parameters and statistics.
    name : str, optional
        The name of the node, by default ``syncbatchnorm0`` and so on.
    attr : dict of str, optional
        Hidden attributes of the node and of variables that are created for it, such as ``__lr_mult__``.
    **options
        The other options of `gluon_syncbn.SyncBatchNorm`. ``kvstore`` and ``process_group`` must be names. In a job of
        several processes ``num_devices`` counts the devices of one process. The limits of Batch Renormalization cannot
        be changed later. The ``backend`` 'auto' takes 'native' where it is compiled and, if MXNet sees a GPU, its
        kernels run there. The nodes that follow are fused when the symbol is bound; the symbol itself does not change.

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
    check_option_names(options, [*OPTIONS, *_BATCH_NORM, "dtype"], f"SyncBatchNorm '{name}'")
    for option, value in (("fix_gamma", fix_gamma), ("use_global_stats", use_global_stats)):
        if not isinstance(value, (int, np.bool_)):  # MXNet reads 'False' as False, and Python as True
            raise TypeError(f"SyncBatchNorm '{name}': {option} must be True or False, not {value!r}.")
    spec = LayerSpec(
        name,
        axis=axis,
        epsilon=float(eps),
        momentum=float(momentum),
        scale=not fix_gamma,
        use_global_stats=bool(use_global_stats),
        dtype=dtype,
        num_devices=num_devices,
        **options,
    ).checked()
    find(spec.process_group, spec.where)  # raises an error at once if it cannot connect
    plain = {"eps": spec.epsilon, "momentum": spec.momentum, "fix_gamma": fix_gamma, "axis": spec.axis}
    plain["use_global_stats"] = use_global_stats
    with mx.name.NameManager():
        out = mx.sym.BatchNorm(data, gamma, beta, moving_mean, moving_var, name=name, attr=attr, **plain)
        set_attributes(out, _mark(spec))
        return mx.sym.relu(out, name=f"{name}_relu") if spec.activation else out


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
        The further options of `SyncBatchNorm`, except ``activation``, and ``dtype``.

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
        find(options["process_group"], "convert_symbol")  # raises an error at once if it cannot connect

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
    """The mark of a node that no block owns. Raises an error if a symbol cannot have its options, or run with them."""
    spec.check_names()
    spec.check_engine(spec.num_devices)
    check_groups(spec, spec.num_devices)
    if symbol_synchronizes(spec):
        if not spec.has_groups_of_one:
            refuse_late_import(spec.where, spec.num_devices or 1)
        choose(spec, [mx.gpu(0)] if mx.context.num_gpus() else [])
    return {} if spec.use_global_stats else mark(spec)
