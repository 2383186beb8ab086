"""Synchronized Batch Normalization as a symbol, for ``mx.mod.Module`` and for graphs that are loaded from files.

A symbol does not know on which devices it will be bound, only on how many: ``num_devices``. The devices that train it
find each other at their first forward pass. One symbol serves one Module at a time, whose devices those are then; for a
second one load or make the symbol again. Files that were saved with such nodes load where this package is imported, and
`plain_symbol` gives what loads anywhere.
"""

import os
from typing import Any, Dict, Optional

import mxnet as mx

from gluon_syncbn.backends.bfloat16 import widened
from gluon_syncbn.backends.choose import choose
from gluon_syncbn.backends.interface import Node
from gluon_syncbn.backends.options import check_options
from gluon_syncbn.base.mxnet_private import unique_name
from gluon_syncbn.distributed.default import find, is_connected
from gluon_syncbn.graphs.mark import Form, mark
from gluon_syncbn.graphs.rewrite import Graph, Norm
from gluon_syncbn.meeting.link import count_processes
from gluon_syncbn.meeting.renorm import RenormLike
from gluon_syncbn.meeting.spec import GroupReference, GroupSpec, check_engine, check_group_size

__all__ = ["SyncBatchNorm", "convert_symbol", "load", "plain_symbol"]

# What `convert_symbol` takes, beside the number of devices.
_OPTIONS = {"group_size", "timeout", "backend", "kvstore", "process_group", "in_place", "renorm", "fuse", "dtype"}


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
    ``mx.sym.BatchNorm``; the mathematics is that of `gluon_syncbn.SyncBatchNorm`.

    Parameters
    ----------
    data : Symbol
        Any shape with at least 2 dimensions; of ``dtype``, or float16 or bfloat16 with float32 parameters. On a CPU
        without AVX-512, 'portable' and one device need to see bfloat16 in the graph: a cast in it, not only bound data.
    gamma, beta, moving_mean, moving_var : Symbol, optional
        Shape (C,). Variables are made for those that are not given.
    eps, momentum, fix_gamma, use_global_stats, axis :
        As in ``mx.sym.BatchNorm``. As there, ``fix_gamma`` is True by default.
    num_devices : int
        How many devices train the symbol: ``len(context)`` of the Module. 1 gives ``mx.sym.BatchNorm`` itself. Without
        it the symbol can be used in prediction only; training it is an error.
    group_size, timeout, backend, activation :
        As in `gluon_syncbn.SyncBatchNorm`. 'auto' takes 'native' where it is compiled and MXNet sees no GPU.
    kvstore, process_group : str, optional
        As there, by name. In a job of several processes ``num_devices`` counts those of one.
    in_place, renorm, fuse :
        As there. What follows the node is fused when the symbol is bound; the symbol itself stays as it is.
    dtype : {'float32', 'float64'}
        Of parameters and statistics.
    name : str, optional
        Of the node, by default ``syncbatchnorm0`` and so on.
    attr : dict of str, optional
        Hidden attributes of the node, such as ``__lr_mult__``.

    Returns
    -------
    Symbol
        Shape and dtype of data.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        For options that cannot work.
    """
    name = unique_name(name, "syncbatchnorm")
    if not isinstance(data, mx.sym.Symbol):
        raise TypeError(f"SyncBatchNorm '{name}': data must be a Symbol, not {type(data).__name__}.")
    with mx.name.NameManager():
        # For its variables, and the initializers that MXNet gives them.
        plain = mx.sym.BatchNorm(data, gamma, beta, moving_mean, moving_var, name=name)
        group: Dict[str, Any] = {
            "num_devices": num_devices,
            "group_size": group_size,
            "timeout": timeout,
            "kvstore": kvstore,
        }
        group.update(process_group=process_group, renorm=renorm)
        options = check_options(f"SyncBatchNorm '{name}'", backend, activation, in_place, fuse, **group)
        find(process_group, f"SyncBatchNorm '{name}'")  # one that cannot connect shows at once
        spec = checked_spec(GroupSpec.of(name, options, dtype, momentum, eps, not fix_gamma))
        form = Form(axis, activation, in_place, fuse, backend)
        return make_node(plain.get_children(), form, Node(name, spec, attr), use_global_stats)[0]


def convert_symbol(sym: mx.sym.Symbol, num_devices: int, **options) -> mx.sym.Symbol:
    """A copy of a symbol in which every Batch Normalization synchronizes.

    Nodes keep their names, attributes and variables, so that checkpoints fit both ways. Takes over ``BatchNorm``,
    ``contrib.SyncBatchNorm``, ``contrib.BatchNormWithReLU``, and nodes that synchronize already, which get the options
    that are given, and keep the others. Those with ``use_global_stats`` stay as they are. For blocks see
    `gluon_syncbn.convert_sync_batchnorm`.

    Parameters
    ----------
    sym : Symbol
        For example from ``mx.model.load_checkpoint``.
    num_devices : int
        How many devices will train it: ``len(context)`` of the Module.
    **options
        ``group_size``, ``timeout``, ``backend``, ``kvstore``, ``process_group``, ``in_place``, ``renorm``, ``fuse`` and
        ``dtype``, as in `SyncBatchNorm`.

    Returns
    -------
    Symbol
        A new one; ``sym`` stays as it is.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        ``sym`` is not a Symbol, or an option is unknown or cannot work.
    ValueError
        The mean or variance of a Batch Normalization is an output of the graph, which a synchronized one does not give.

    Examples
    --------
    >>> sym, arg_params, aux_params = mx.model.load_checkpoint('resnet', 0)
    >>> context = [mx.gpu(0), mx.gpu(1)]
    >>> module = mx.mod.Module(convert_symbol(sym, len(context)), context=context)
    """
    if not isinstance(sym, mx.sym.Symbol):
        raise TypeError(f"expected a Symbol, not {type(sym).__name__}; for blocks there is convert_sync_batchnorm.")
    if num_devices is None:
        raise ValueError("convert_symbol: num_devices must be given, since a symbol does not know its devices.")
    graph = Graph(sym)
    if graph.count_others():
        raise ValueError(
            f"convert_symbol: the mean or variance of {graph.count_others()} BatchNorm nodes is used as an output, "
            f"which synchronized ones do not give."
        )
    if options.keys() - _OPTIONS:
        unknown = ", ".join(sorted(options.keys() - _OPTIONS))
        raise TypeError(f"convert_symbol: unknown options: {unknown}. There are {', '.join(sorted(_OPTIONS))}.")

    if "process_group" in options:
        find(options["process_group"], "convert_symbol")  # one that cannot connect shows at once

    def make(norm: Norm, inputs, after):
        if norm.use_global_stats:
            return None
        return _make_again(norm, inputs, after, {**(norm.options or {}), "num_devices": num_devices, **options})

    return graph.rewrite(make)[0]


def plain_symbol(sym: mx.sym.Symbol) -> mx.sym.Symbol:
    """A copy of a symbol with plain ``BatchNorm`` in place of synchronized nodes, which loads without this package."""
    return without_synchronized_nodes(Graph(sym))


def without_synchronized_nodes(graph: Graph) -> mx.sym.Symbol:
    """The same of a symbol that is parsed already."""

    def make(norm: Norm, inputs, _):
        if norm.options is None and norm.operator != "_contrib_SyncBatchNorm":
            return None
        options = {"axis": norm.axis, "eps": norm.epsilon, "momentum": norm.momentum, "fix_gamma": norm.fix_gamma}
        options["use_global_stats"] = norm.use_global_stats
        return plain_node(inputs, norm.name, norm.relu, norm.hidden, **options), None

    return graph.rewrite(make)[0]


def load(file: str, backend: str = "auto") -> mx.sym.Symbol:
    """Load a saved symbol, and put its synchronized nodes on a back end that runs here.

    ``mx.sym.load`` does as well where the back end that saved it can run. This also loads, on a host with GPUs or
    without the compiled operator, what was saved by the compiled one.

    Parameters
    ----------
    file : str
        As written by ``sym.save`` or ``mx.model.save_checkpoint``.
    backend : {'auto', 'native', 'portable'}
        As in `SyncBatchNorm`.
    """
    with open(os.fspath(file), encoding="utf-8") as lines:
        text = lines.read()

    def make(norm: Norm, inputs, after):
        if norm.options is None:
            return None
        return _make_again(norm, inputs, after, {**norm.options, "backend": backend}, is_loaded=True)

    return Graph(text).rewrite(make)[0]


def _make_again(norm: Norm, inputs, after, chosen: Dict[str, Any], is_loaded: bool = False):
    """A synchronized layer for this node, with the options ``chosen``."""
    dtype = chosen.pop("dtype", "float32")
    options = check_options(f"SyncBatchNorm '{norm.name}'", **chosen)
    spec = GroupSpec.of(norm.name, options, dtype, norm.momentum, norm.epsilon, not norm.fix_gamma)
    checked_spec(spec, is_loaded)
    local = {name: chosen[name] for name in ("in_place", "fuse", "backend") if name in chosen}
    form = Form(norm.axis, "relu" if norm.relu else None, **local)
    return make_node(inputs, form, Node(norm.name, spec, norm.hidden, after), is_loaded=is_loaded)


def checked_spec(spec: GroupSpec, is_loaded: bool = False) -> GroupSpec:
    """The same, or an error if a symbol cannot have it, as `SyncBatchNorm` documents.

    Whether ``group_size`` fits the processes is checked when a symbol first trains, if it was loaded from a file or
    they are not connected.
    """
    check_names(spec)
    check_engine(spec.name, spec.num_devices)
    spec.check()
    if not is_loaded and is_connected(spec.process_group):
        num_processes = count_processes(spec.process_group, spec.where)
        check_group_size(spec.group_size, spec.num_devices, num_processes, spec.where)
    return spec


def check_names(spec: GroupSpec) -> GroupSpec:
    """The same, or TypeError if it has what cannot be saved in a symbol."""
    for option in ("kvstore", "process_group"):
        value = getattr(spec, option)
        if value is not None and not isinstance(value, str):
            raise TypeError(
                f"{spec.where}: a symbol can be saved, so {option} must be a name, not {type(value).__name__}."
            )
    return spec


def make_node(inputs, form: Form, node: Node, use_global_stats: bool = False, is_loaded: bool = False):
    """The last node of a synchronized layer that no layer object owns, and its order token.

    For ``is_loaded`` see `checked_spec`.
    """
    spec, relu = node.spec, form.activation == "relu"
    is_alone = (
        spec.num_devices == 1
        and is_connected(spec.process_group)
        and count_processes(spec.process_group, spec.where) == 1
        and not (is_loaded and spec.group_size is not None)  # whether that fits shows when it trains
    )
    if use_global_stats or (spec.renorm is None and (is_alone or spec.group_size == 1)):
        options = {"axis": form.axis, "eps": spec.epsilon, "momentum": spec.momentum, "fix_gamma": not spec.scale}
        x, lowered = widened(mx.sym, inputs[0], node.dtypes)
        options["use_global_stats"] = use_global_stats
        # Where only group_size keeps it to itself, the node tells what it is, for another conversion.
        told = {} if is_alone or use_global_stats else mark(spec, form, relu=False, is_plain=True)
        out = plain_node([x, *inputs[1:]], node.name, relu, {**(node.hidden or {}), **told}, **options)
        return lowered(out), None
    devices = [mx.gpu(0)] if mx.context.num_gpus() else []
    chosen = choose(spec.where, form.backend, devices, spec.kvstore).backend
    return chosen.normalize(mx.sym, inputs, GroupReference(spec.to_json(), spec), form, node)


def plain_node(inputs, name: str, relu: bool, attr: Optional[Dict[str, str]], **options) -> mx.sym.Symbol:
    """``mx.sym.BatchNorm``, with a ReLU behind it or not."""
    out = mx.sym.BatchNorm(*inputs, name=name, attr=attr or None, **options)
    return mx.sym.relu(out, name=f"{name}_relu") if relu else out
