"""Synchronized Batch Normalization as a symbol, for ``mx.mod.Module`` and for graphs that are loaded from files.

A symbol does not know on which devices it will be bound, only on how many: ``num_devices``. The devices that train it
find each other at their first forward pass. One symbol serves one Module at a time, and synchronizes the devices of
that Module; for a second Module load or make the symbol again. Files that were saved with such nodes load where this
package is imported. `plain_symbol` returns a symbol that loads anywhere.
"""

import os
from typing import Any, Dict, Optional, Sequence, Tuple

import mxnet as mx

from gluon_syncbn.backends.bfloat16 import widened
from gluon_syncbn.backends.choose import choose
from gluon_syncbn.backends.interface import NodeOptions
from gluon_syncbn.base.mxnet_private import unique_name
from gluon_syncbn.distributed.default import find
from gluon_syncbn.graphs.graph import Graph
from gluon_syncbn.graphs.norms import Norm, count_others, mark, replace_norms
from gluon_syncbn.layer.decision import Site, Way, check_groups, decide
from gluon_syncbn.layer.spec import OPTIONS, LayerSpec, RenormLike, check_option_names
from gluon_syncbn.mxnet_engine.cpu_resources import refuse_late_import

__all__ = ["SyncBatchNorm", "convert_symbol", "load", "plain_symbol"]

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
    renorm: Optional[RenormLike] = None,
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
        As in `gluon_syncbn.SyncBatchNorm`. What follows the node is fused when the symbol is bound; the symbol itself
        does not change.
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
    with mx.name.NameManager():
        # Only for its variables, and the initializers that MXNet gives them.
        plain = mx.sym.BatchNorm(data, gamma, beta, moving_mean, moving_var, name=name)
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
        return make_symbol(spec, plain.get_children(), NodeOptions(name, attr))[0]


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
    graph = Graph(sym)
    if count_others(graph):
        raise ValueError(
            f"convert_symbol: the mean or variance of {count_others(graph)} BatchNorm nodes is used as an output, "
            f"but synchronized nodes do not return them."
        )
    check_option_names(options, _OPTIONS, "convert_symbol")
    if "process_group" in options:
        find(options["process_group"], "convert_symbol")  # one that cannot connect shows at once

    def make(norm: Norm, inputs, after):
        if norm.spec.use_global_stats:
            return None
        spec = norm.spec.but(num_devices=num_devices, **options).checked()
        return make_symbol(spec, inputs, NodeOptions(norm.name, norm.hidden, after))

    return replace_norms(graph, make)[0]


def plain_symbol(sym: mx.sym.Symbol) -> mx.sym.Symbol:
    """Return a copy of a symbol with plain ``BatchNorm`` in place of synchronized nodes.

    The copy loads without this package.
    """

    def make(norm: Norm, inputs, _):
        if not norm.is_marked and norm.node.op != "_contrib_SyncBatchNorm":
            return None
        return plain_node(norm.spec, inputs, norm.name, norm.hidden), None

    return replace_norms(Graph(sym), make)[0]


def load(file: str, backend: str = "auto") -> mx.sym.Symbol:
    """Load a saved symbol, and put its synchronized nodes on a back end that runs here.

    ``mx.sym.load`` is enough where the back end that saved the symbol can run. This function also loads a symbol that
    was saved with the compiled operator on a host with GPUs, or on one without that operator.

    Parameters
    ----------
    file : str or os.PathLike
        A file written by ``sym.save`` or ``mx.model.save_checkpoint``.
    backend : {'auto', 'native', 'portable'}
        As in `SyncBatchNorm`.

    Returns
    -------
    Symbol
        The symbol, with the same names, attributes and variables.

    Raises
    ------
    RuntimeError
        The back end cannot run here.
    ValueError
        ``backend`` is none of these, or a node of the file is damaged.
    """
    with open(os.fspath(file), encoding="utf-8") as lines:
        text = lines.read()

    def make(norm: Norm, inputs, after):
        if not norm.is_marked:
            return None
        spec = norm.spec.but(backend=backend).checked()
        return make_symbol(spec, inputs, NodeOptions(norm.name, norm.hidden, after), is_loaded=True)

    return replace_norms(Graph(text), make)[0]


# The node of a layer: plain, plain for now, open, or synchronized (`layer.decision`)


def make_symbol(
    spec: LayerSpec, inputs: Sequence[mx.sym.Symbol], node: NodeOptions, is_loaded: bool = False
) -> Tuple[mx.sym.Symbol, Any]:
    """The last node of a layer that no block owns, and its order token, or None.

    Parameters
    ----------
    spec : LayerSpec
        It has been checked.
    inputs : five Symbols
        x, gamma, beta, running mean and running variance.
    node : NodeOptions
    is_loaded : bool
        The symbol comes from a file (`decide`).

    Raises
    ------
    TypeError, ValueError, RuntimeError
        A symbol cannot have these options, or cannot run with them here.
    """
    spec.check_names()
    spec.check_engine(spec.num_devices)
    if not is_loaded:
        check_groups(spec, spec.num_devices)
    way = decide(spec, [], Site.SYMBOL, is_loaded)
    if way is Way.OPEN and spec.group_size != 1:
        refuse_late_import(spec.where, spec.num_devices or 1)
    return make_node(way, spec, inputs, node)


def make_node(
    way: Way,
    spec: LayerSpec,
    inputs: Sequence[mx.sym.Symbol],
    node: NodeOptions,
) -> Tuple[mx.sym.Symbol, Any]:
    """The last node of a layer that has no group, and its order token, or None."""
    if way is Way.OPEN:
        devices = [mx.gpu(0)] if mx.context.num_gpus() else []
        return choose(spec, devices).backend.normalize(mx.sym, inputs, spec, spec.check_names().to_json(), [], node)
    hidden = dict(node.hidden or {})
    if way is Way.PLAIN_FOR_NOW:
        hidden.update(mark(spec.check_names().but(activation=None), is_plain=True))
    x, lowered = widened(mx.sym, inputs[0], node.dtypes)
    return lowered(plain_node(spec, [x, *inputs[1:]], node.name, hidden)), None


def plain_node(
    spec: LayerSpec, inputs: Sequence[mx.sym.Symbol], name: str, hidden: Optional[Dict[str, str]]
) -> mx.sym.Symbol:
    """``mx.sym.BatchNorm``, and a ReLU after it if the layer has one."""
    options = {"axis": spec.axis, "eps": spec.epsilon, "momentum": spec.momentum, "fix_gamma": not spec.scale}
    options["use_global_stats"] = spec.use_global_stats
    out = mx.sym.BatchNorm(*inputs, name=name, attr=hidden or None, **options)
    return mx.sym.relu(out, name=f"{name}_relu") if spec.activation == "relu" else out
