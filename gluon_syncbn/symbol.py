"""Synchronized Batch Normalization as a symbol, for ``mx.mod.Module`` and for graphs that are loaded from files.

A symbol does not know on which devices it will be bound, only on how many: ``num_devices``. The devices that train it
find each other at their first forward pass. One symbol serves one Module at a time, whose devices those are then; for a
second one load or make the symbol again. Files that were saved with such nodes load where this package is imported, and
`plain_symbol` gives what loads anywhere.
"""

import os
from typing import Dict, Optional

import mxnet as mx

from gluon_syncbn.backends import native, portable
from gluon_syncbn.backends.bfloat16 import widened
from gluon_syncbn.backends.choose import choose
from gluon_syncbn.backends.options import check_options
from gluon_syncbn.graphs.rewrite import MARK, Norm, count_others, mark, rewrite
from gluon_syncbn.meeting.group import Description, check_engine

__all__ = ["SyncBatchNorm", "convert_symbol", "load", "plain_symbol"]


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
    kvstore : str, optional
        As there, by name.
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
    name = mx.name.NameManager._current.value.get(name, "syncbatchnorm")
    if not isinstance(data, mx.sym.Symbol):
        raise TypeError(f"SyncBatchNorm '{name}': data must be a Symbol, not {type(data).__name__}.")
    with mx.name.NameManager():
        # For its variables, and the initializers that MXNet gives them.
        plain = mx.sym.BatchNorm(data, gamma, beta, moving_mean, moving_var, name=name)
        inputs = list(plain.get_children())
        return make_node(
            inputs,
            backend,
            describe(
                name, eps, momentum, fix_gamma, num_devices, group_size, timeout, backend, kvstore, dtype, activation
            ),
            axis,
            relu=activation is not None,
            use_global_stats=use_global_stats,
            attr=attr,
        )[0]


def convert_symbol(
    sym: mx.sym.Symbol,
    num_devices: int,
    group_size: Optional[int] = None,
    timeout: Optional[float] = None,
    backend: str = "auto",
    kvstore: Optional[str] = None,
    dtype: str = "float32",
) -> mx.sym.Symbol:
    """A copy of a symbol in which every Batch Normalization synchronizes.

    Nodes keep their names, attributes and variables, so that checkpoints fit both ways. Takes over ``BatchNorm``,
    ``contrib.SyncBatchNorm``, ``contrib.BatchNormWithReLU``, and nodes that synchronize already, which get the new
    options. Those with ``use_global_stats`` stay as they are. For blocks see `gluon_syncbn.convert_sync_batchnorm`.

    Parameters
    ----------
    sym : Symbol
        For example from ``mx.model.load_checkpoint``.
    num_devices : int
        How many devices will train it: ``len(context)`` of the Module.
    group_size, timeout, backend, kvstore, dtype :
        As in `SyncBatchNorm`.

    Returns
    -------
    Symbol
        A new one; ``sym`` stays as it is.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        ``sym`` is not a Symbol, or an option cannot work.
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
    others = count_others(sym)
    if others:
        raise ValueError(
            f"convert_symbol: the mean or variance of {others} BatchNorm nodes is used as an output, which "
            f"synchronized ones do not give."
        )

    def make(norm: Norm, inputs, after):
        if norm.use_global_stats:
            return None
        described = describe(
            norm.name,
            norm.epsilon,
            norm.momentum,
            norm.fix_gamma,
            num_devices,
            group_size,
            timeout,
            backend,
            kvstore,
            dtype,
        )
        return make_node(inputs, backend, described, norm.axis, norm.relu, after, attr=norm.hidden)

    return rewrite(sym, make)[0]


def plain_symbol(sym: mx.sym.Symbol) -> mx.sym.Symbol:
    """A copy of a symbol with plain ``BatchNorm`` in place of synchronized nodes, which loads without this package."""

    def make(norm: Norm, inputs, _):
        if norm.options is None and norm.operator != "_contrib_SyncBatchNorm":
            return None
        given = (norm.axis, norm.epsilon, norm.momentum, norm.fix_gamma, norm.use_global_stats, norm.relu, norm.hidden)
        return plain_node(inputs, norm.name, *given), None

    return rewrite(sym, make)[0]


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
        described = describe(norm.name, norm.epsilon, norm.momentum, norm.fix_gamma, backend=backend, **norm.options)
        return make_node(inputs, backend, described, norm.axis, norm.relu, after, attr=norm.hidden)

    return rewrite(text, make)[0]


def describe(
    name,
    eps,
    momentum,
    fix_gamma,
    num_devices=None,
    group_size=None,
    timeout=None,
    backend="auto",
    kvstore=None,
    dtype="float32",
    activation=None,
) -> Description:
    """What a node tells of its group; refuses options that cannot work, as `SyncBatchNorm` documents."""
    where = f"SyncBatchNorm '{name}'"
    options = check_options(where, num_devices, group_size, timeout, backend, activation, kvstore)
    if kvstore is not None and not isinstance(kvstore, str):
        raise TypeError(f"{where}: a symbol can be saved, so kvstore must be a name, not a KVStore.")
    check_engine(name, num_devices or 0)
    described = Description(
        name,
        num_devices or 0,
        options.group_size,
        options.timeout,
        kvstore,
        dtype,
        float(momentum),
        float(eps),
        not fix_gamma,
    )
    described.check()
    return described


def make_node(
    inputs,
    backend: str,
    described: Description,
    axis: int,
    relu: bool,
    after=None,
    name=None,
    attr=None,
    use_global_stats=False,
):
    """The last node of a synchronized layer, and its call (see `native.normalize`)."""
    name, fix_gamma = name or described.name, not described.scale
    x, lowered = widened(mx.sym, inputs[0], {})
    if use_global_stats or described.num_devices == 1 or described.group_size == 1:
        numbers = (axis, described.epsilon, described.momentum)
        out = plain_node([x, *inputs[1:]], name, *numbers, fix_gamma, use_global_stats, relu, attr)
        return lowered(out), None
    kvstore = described.kvstore
    devices = [mx.gpu(0)] if described.on_gpu else []
    choice = choose(f"SyncBatchNorm '{described.name}'", backend, devices, kvstore).name
    options = {
        "num_devices": described.num_devices or None,
        "group_size": described.group_size,
        "timeout": described.timeout,
        "kvstore": kvstore,
        "dtype": described.dtype,
    }
    is_native = choice == "native"
    text = mark(axis, described.epsilon, described.momentum, fix_gamma, relu and is_native, options)
    named = {"name": name, "attr": {**(attr or {}), MARK: text}}
    if is_native:
        return native.normalize(mx.sym, *inputs, described, axis, relu=relu, static=False, after=after, **named)
    out, call = portable.normalize(mx.sym, x, *inputs[1:], described, axis, cast_input=True, after=after, **named)
    return lowered(_with_relu(out, name, relu)), call


def plain_node(inputs, name, axis, eps, momentum, fix_gamma, use_global_stats, relu, attr) -> mx.sym.Symbol:
    """``mx.sym.BatchNorm``, with a ReLU behind it or not."""
    out = mx.sym.BatchNorm(
        *inputs,
        eps=eps,
        momentum=momentum,
        fix_gamma=fix_gamma,
        use_global_stats=use_global_stats,
        axis=axis,
        name=name,
        attr=attr or None,
    )
    return _with_relu(out, name, relu)


def _with_relu(out, name: str, relu: bool) -> mx.sym.Symbol:
    return mx.sym.relu(out, name=f"{name}_relu") if relu else out
