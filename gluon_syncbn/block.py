"""SyncBatchNorm, the block that a user sees."""

import copy
import sys
import threading
from typing import Any, Dict, List, NamedTuple, Optional, Union

import mxnet as mx
import numpy as np
from mxnet.gluon import HybridBlock, nn
from mxnet.gluon.block import _flatten

from gluon_syncbn.backends import native, portable
from gluon_syncbn.backends.bfloat16 import is_bfloat16, widened
from gluon_syncbn.backends.choose import choose
from gluon_syncbn.backends.options import check_options
from gluon_syncbn.graphs.calls import declare_writes, remember
from gluon_syncbn.graphs.rewrite import MARK, mark
from gluon_syncbn.meeting import active_set
from gluon_syncbn.meeting.group import Group, absent_text, check_devices, neighbourhoods
from gluon_syncbn.process.abandon import begin_forward
from gluon_syncbn.process.live_layers import add_live, remove_live
from gluon_syncbn.process.passes import Passes
from gluon_syncbn.symbol import describe, make_node, plain_node


class SyncBatchNorm(nn.BatchNorm):
    r"""Batch Normalization with the statistics of the whole mini-batch, over all devices of a host.

    With :math:`N` values per channel on all devices together,

    .. math::
        y = \gamma\,\frac{x - \mathrm{mean}}{\sqrt{\mathrm{var} + \epsilon}} + \beta, \qquad
        \mathrm{mean} = \tfrac1N \sum x, \quad \mathrm{var} = \tfrac1N \sum (x - \mathrm{mean})^2

    and the backward pass sends the gradient through mean and variance to every device (Ioffe and Szegedy, 2015,
    algorithm 1, summed over devices). Takes the place of `mxnet.gluon.nn.BatchNorm`: same parameter names, same
    ``.params`` files, same gradients as one device would compute on the concatenated batch. In prediction mode, with
    ``use_global_stats``, and on one device it *is* `nn.BatchNorm` and meets no one.

    Every device must run the layer the same number of times per step. One that does not come ends in an error on
    all devices that wait (see ``timeout``); after you have caught it, call `gluon_syncbn.abandon_step` before the next
    step.
    For a step with fewer images than devices see `gluon_syncbn.devices`.

    Parameters
    ----------
    axis : int, default 1
        The axis of the channels; 1 for NCHW, -1 or 3 for NHWC.
    momentum : float, default 0.9
        Share of the old value that the running statistics keep at each training step.
    epsilon : float, default 1e-5
        Added to the variance.
    center, scale : bool, default True
        Whether :math:`\beta` and :math:`\gamma` are learned.
    use_global_stats : bool, default False
        Normalize with the running statistics in training too (frozen BatchNorm).
    beta_initializer, gamma_initializer, running_mean_initializer, running_variance_initializer : str or Initializer
        As in `nn.BatchNorm`.
    in_channels : int, default 0
        Channels of the input; 0 finds out at the first call.
    num_devices : int, optional
        How many devices the parameters must be initialised on; anything else is an error at the first call. By
        default the layer takes the contexts that its parameters were initialised on.
    group_size : int, optional
        Synchronize neighbours in groups of this many devices instead of all. Running statistics then differ from
        group to group.
    timeout : float, optional
        Seconds that devices wait for one that does not come. Default: the environment variable
        ``GLUON_SYNCBN_TIMEOUT``, or 60.
    backend : {'auto', 'native', 'portable'}
        'native' is one compiled operator, on CPUs and GPUs; 'portable' is made of MXNet's own operators and runs
        wherever MXNet does. 'auto' takes the first that can run here; see the property ``backend``.
    activation : {'relu'}, optional
        Return max(out, 0), computed in the same pass where the back end can.
    kvstore : str or mx.kv.KVStore, optional
        For the portable back end. Carries the per-channel vectors: 'local' (default with a CPU context) or 'device'
        (default on GPUs), or a store made with ``mx.kv.create`` that has no optimizer.

    Raises
    ------
    ValueError, TypeError
        For options that cannot work, when the layer is made; for devices, channels or a dtype that do not fit, at the
        first call that shows them. Within a hybridized net MXNet turns a wrong channel count into `MXNetError`.
    RuntimeError
        Several devices with ``MXNET_ENGINE_TYPE=NaiveEngine``, or ``backend='native'`` where it cannot run.
    MXNetError
        Where an output is read, if a device did not come. The text names the layer, the direction, who arrived and
        who did not. (On the portable back end the operator that failed prints it as a `SyncBatchNormError`, too; and
        only prints it where nothing is compiled.)

    Inputs: **data** (``mx.nd.NDArray``, ``mx.np.ndarray`` or a symbol) with at least 2 dimensions; float32, float64
    (after ``cast('float64')``), or float16 or bfloat16 with parameters and statistics in float32.

    Outputs: **out**, shape, dtype and kind of data.

    Notes
    -----
    Running statistics are updated in the forward pass in training mode, and only there. `nn.BatchNorm` on a CPU
    updates them in the backward pass, which differs for a layer that is called several times in a step.

    `copy.deepcopy` and `pickle` make a layer of its own, which meets no other; as with `nn.BatchNorm`, not of a
    hybridized net that has run (MXNet cannot copy its graph).

    Examples
    --------
    >>> net = nn.HybridSequential()
    >>> net.add(nn.Conv2D(16, 3), SyncBatchNorm(), nn.Activation('relu'))
    >>> net.initialize(ctx=[mx.gpu(0), mx.gpu(1)])
    """

    def __init__(
        self,
        axis: int = 1,
        momentum: float = 0.9,
        epsilon: float = 1e-5,
        center: bool = True,
        scale: bool = True,
        use_global_stats: bool = False,
        beta_initializer="zeros",
        gamma_initializer="ones",
        running_mean_initializer="zeros",
        running_variance_initializer="ones",
        in_channels: int = 0,
        num_devices: Optional[int] = None,
        group_size: Optional[int] = None,
        timeout: Optional[float] = None,
        backend: str = "auto",
        activation: Optional[str] = None,
        kvstore: Union[str, mx.kv.KVStore, None] = None,
        **kwargs,
    ):
        super().__init__(
            axis=axis,
            momentum=momentum,
            epsilon=epsilon,
            center=center,
            scale=scale,
            use_global_stats=use_global_stats,
            beta_initializer=beta_initializer,
            gamma_initializer=gamma_initializer,
            running_mean_initializer=running_mean_initializer,
            running_variance_initializer=running_variance_initializer,
            in_channels=in_channels,
            **kwargs,
        )
        self._synchronize(num_devices, group_size, timeout, backend, activation, kvstore)

    def _synchronize(
        self, num_devices=None, group_size=None, timeout=None, backend="auto", activation=None, kvstore=None
    ) -> None:
        """Take over the options that `nn.BatchNorm` does not have; `convert_sync_batchnorm` calls this too."""
        where = f"SyncBatchNorm '{self.name}'"
        self._options = check_options(where, num_devices, group_size, timeout, backend, activation, kvstore)
        self._requested_backend = backend
        self._activation = activation
        self._group = None
        self._group_lock = threading.Lock()
        self._last_call = None
        self._passes = Passes(self)

    def _stop_synchronizing(self) -> None:
        """Undo `_synchronize`; `convert_batchnorm` calls this before the layer is of another class."""
        remove_live(self)
        for name in ("_options", "_group", "_group_lock", "_last_call", "_passes", "_requested_backend", "_activation"):
            del self.__dict__[name]

    @property
    def backend(self) -> str:
        """The back end that the layer takes on its devices: 'native' or 'portable'."""
        where = f"SyncBatchNorm '{self.name}'"
        return choose(where, self._requested_backend, self._devices(), self._options.kvstore).name

    def cast(self, dtype):
        """As `nn.BatchNorm` does for float16, parameters and statistics stay in float32 for bfloat16 too."""
        super().cast("float32" if is_bfloat16(dtype) else dtype)

    # A copy is a layer of its own, with a group of its own; the parameters are copied as those of `nn.BatchNorm`.

    def __getstate__(self) -> Dict[str, Any]:
        state = {**self.__dict__, "_group": None, "_last_call": None}
        del state["_group_lock"], state["_passes"]
        return state

    def __setstate__(self, state: Dict[str, Any]) -> None:
        self.__dict__.update(state, _group_lock=threading.Lock())
        self._passes = Passes(self)

    def __deepcopy__(self, memo) -> "SyncBatchNorm":
        store = self._options.kvstore
        if isinstance(store, mx.kv.KVStore):  # the user's own, which nothing can copy
            memo[id(store)] = store
        made = memo[id(self)] = type(self).__new__(type(self))
        made.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return made

    def _alias(self):
        # Files written by collect_params().save() carry full names: keep those of nn.BatchNorm.
        return "batchnorm"

    def hybrid_forward(self, F, x, gamma, beta, running_mean, running_var):
        if mx.util.is_np_array():
            return self._under_numpy(F, x, gamma, beta, running_mean, running_var)
        devices = self._devices()
        is_array = F is mx.nd
        trace = None if is_array else find_trace()
        if is_array:
            self._check_input(x, gamma.shape[0])
        elif trace is not None and trace.net is not None:
            remember(trace.net, trace.symbol, self)
        elif trace is None and self._may_move():
            return self._plain_for_now((x, gamma, beta, running_mean, running_var), "fwd", None)
        if devices:
            check_devices(self.name, devices, self._options)
        if self._is_alone(is_array) or (is_array and not mx.autograd.is_training()):
            return self._plain(F, x, gamma, beta, running_mean, running_var)
        if is_array and not active_set.takes_part(x.context, active_set.current()):
            raise ValueError(absent_text(self.name, x.context))
        arrays = (x, gamma, beta, running_mean, running_var)
        if is_array:
            begin_forward(self, x.context)
            return self.synchronized(F, arrays, None, {})[0]
        if not devices or trace is None:
            return self._as_symbol(arrays)[0]
        out, call = self.synchronized(F, arrays, trace, trace.dtypes(), self.call_before(trace))
        self.remember_call(trace, call)
        return out

    def _plain(self, F, x, *vectors):
        """`nn.BatchNorm` itself."""
        trace = find_trace() if F is mx.sym else None
        x, lowered = widened(F, x, trace.dtypes() if trace else {})
        out = super().hybrid_forward(F, x, *vectors)
        return lowered(F.relu(out) if self._activation else out)

    def as_node(self, inputs, trace: Optional["Trace"], after, name: str, hidden, dtype):
        """The layer for a node of a symbol, as `graphs.rewrite` wants it; ``dtype`` is that of data."""
        dtypes = {inputs[0].name: dtype}
        if trace is not None and trace.net is not None:
            remember(trace.net, trace.symbol, self)
        elif trace is None and self._may_move():
            return self._plain_for_now(inputs, name, hidden), None
        if self._devices():
            check_devices(self.name, self._devices(), self._options)
        if self._is_alone(is_array=False):
            x, lowered = widened(mx.sym, inputs[0], dtypes)
            relu = self._activation is not None
            return lowered(plain_node([x, *inputs[1:]], name, relu=relu, attr=hidden, **self._kwargs)), None
        if trace is None or not self._devices():
            return self._as_symbol(inputs, after, name, hidden)
        return self.synchronized(mx.sym, inputs, trace, dtypes, after, name, hidden)

    def _may_move(self) -> bool:
        """Whether a symbol of the user's, made now, should not settle on how many devices the layer runs.

        The parameters are on one, where base weights are loaded; most move before they train.
        """
        settled = self._options.num_devices == 1 or self._options.group_size == 1 or self._kwargs["use_global_stats"]
        return len(self._devices()) == 1 and not settled

    def _plain_for_now(self, arrays, name: str, hidden):
        """A plain BatchNorm that tells what it is, so that a SymbolBlock, or `symbol.load`, makes a layer of it."""
        attr = {**(hidden or {}), MARK: self._mark(relu=False, is_plain=True)}
        return plain_node(arrays, name, relu=self._activation is not None, attr=attr, **self._kwargs)

    def _is_alone(self, is_array: bool) -> bool:
        """Whether the layer is `nn.BatchNorm` here. A symbol may be made before its devices are known."""
        devices = self._devices()
        alone = len(devices) <= 1 and (is_array or bool(devices))
        return alone or self._options.group_size == 1 or self._kwargs["use_global_stats"]

    def synchronized(self, F, arrays, trace: Optional["Trace"], dtypes, after=None, name: str = "fwd", hidden=None):
        """The layer on several devices: what it returns, and its call (see `native.normalize`).

        ``arrays`` are the five of ``hybrid_forward``; ``trace`` tells of the graph that is being made, if F makes
        symbols, ``dtypes`` of its inputs, and ``name`` and ``hidden`` are the last node's name and attributes in it.
        """
        group = self._group_on(self._devices())
        axis, relu = self._kwargs["axis"], self._activation is not None
        is_native = isinstance(group, native.NativeGroup)
        node = {}
        if trace is not None:
            if trace.is_static:
                declare_writes(trace.net, self)
            node = {"name": name, "attr": {**(hidden or {}), MARK: self._mark(relu and is_native)}}
        if is_native:
            is_static = trace is not None and trace.is_static
            return native.normalize(F, *arrays, group, axis, relu=relu, static=is_static, after=after, **node)
        x, lowered = widened(F, arrays[0], dtypes)
        cast_input = trace is not None or _name_of(x.dtype) != group.dtype
        out, call = portable.normalize(F, x, *arrays[1:], group, axis, cast_input, after, **node)
        return lowered(F.relu(out) if relu else out), call  # Activation would turn NaN into 0

    def _under_numpy(self, F, *arrays):
        """The same for ``mx.np.ndarray``, or symbols of that kind."""
        with mx.util.np_array(False):
            return self.hybrid_forward(F, *(item.as_nd_ndarray() for item in arrays)).as_np_ndarray()

    def _mark(self, relu: bool, is_plain: bool = False) -> str:
        options = {**self._options._asdict(), "dtype": self._dtype()}
        if not isinstance(options["kvstore"], str):
            options["kvstore"] = None
        kwargs = self._kwargs
        return mark(kwargs["axis"], kwargs["eps"], kwargs["momentum"], kwargs["fix_gamma"], relu, options, is_plain)

    def _as_symbol(self, arrays, after=None, name: str = "fwd", hidden=None):
        """The layer in a symbol of the user's, which may be saved, bound by a Module or put into a SymbolBlock."""
        options, kwargs = self._options, self._kwargs
        described = describe(
            self.name,
            kwargs["eps"],
            kwargs["momentum"],
            kwargs["fix_gamma"],
            len(self._devices()) or options.num_devices,
            options.group_size,
            options.timeout,
            self._requested_backend,
            options.kvstore,
            self._dtype(),
        )
        relu = self._activation is not None
        return make_node(arrays, self._requested_backend, described, kwargs["axis"], relu, after, name, hidden)

    def remember_call(self, trace: "Trace", call) -> None:
        """Of the last call in a static graph; `call_before` returns it in the same graph."""
        self._last_call = (trace.symbol, call) if trace.is_static else None

    def call_before(self, trace: "Trace"):
        """The last call of this layer in the same static graph, or None.

        A static graph does not count what a call does to the running statistics as writing, so calls of a layer on
        parallel branches have no order, neither on one device nor the same on all. Each is therefore made to depend on
        the one before. Elsewhere the engine orders them by the running statistics.
        """
        before = self._last_call
        return before[1] if trace.is_static and before is not None and before[0] is trace.symbol else None

    def _devices(self) -> List[mx.Context]:
        """The contexts of the parameters in rank order; none before ``initialize``."""
        parameter = self.running_mean
        initialized = parameter._data is not None or parameter._deferred_init
        return parameter.list_ctx() if initialized else []

    def _dtype(self) -> str:
        """Of parameters and statistics."""
        name = _name_of(self.running_mean.dtype)
        if name not in ("float32", "float64"):
            raise ValueError(
                f"SyncBatchNorm '{self.name}': its parameters and statistics are {name}; they must be float32, or "
                f"float64 for an input of float64. Call cast('float32') on the layer."
            )
        return name

    def _group_on(self, devices: List[mx.Context]) -> Union[Group, native.NativeGroup]:
        with self._group_lock:  # threads of several devices may come here for the first time together
            dtype = self._dtype()
            if self._group is None or (self._group.devices, self._group.dtype) != (devices, dtype):
                make = native.NativeGroup if self.backend == "native" else Group
                self._group = make(
                    self.name,
                    devices,
                    self._options,
                    dtype,
                    momentum=self._kwargs["momentum"],
                    epsilon=self._kwargs["eps"],
                    scale=not self._kwargs["fix_gamma"],
                )
                add_live(self)
            return self._group

    def groups(self) -> List[List[mx.Context]]:
        """The devices, in the groups that synchronize among themselves, in rank order."""
        return neighbourhoods(self._devices(), self._options)

    def synchronized_passes(self, participants: int) -> int:
        """How many forward passes were met by exactly the devices of this list (`gluon_syncbn.meeting.active_set`)."""
        return 0 if self._group is None else self._group.rounds(participants)

    def _check_input(self, x, channels: int) -> None:
        """``channels`` are those of the arrays; a Parameter may have no shape, as in GluonCV's pruned networks."""
        where = f"SyncBatchNorm '{self.name}'"
        axis = self._kwargs["axis"]
        if x.ndim < 2 or not -x.ndim <= axis < x.ndim:
            raise ValueError(f"{where}: axis={axis} does not fit an input of shape {x.shape}; it takes 2 or more axes.")
        if x.size == 0:
            raise ValueError(
                f"{where}: the input of shape {x.shape} on {x.context} is empty. A device without images cannot take "
                f"part; leave it out with gluon_syncbn.devices(...)."
            )
        if x.shape[axis] != channels:
            raise ValueError(
                f"{where}: it has {channels} channels, but axis {axis} of the input of shape {x.shape} has "
                f"{x.shape[axis]}."
            )
        dtype, expected = _name_of(x.dtype), self._dtype()
        if dtype != expected and not (dtype in ("float16", "bfloat16") and expected == "float32"):
            raise ValueError(
                f"{where}: the input is {dtype}, parameters and statistics are {expected}; "
                f"call cast({dtype!r}) on the net."
            )

    def __repr__(self):
        options = {**self._options._asdict(), "activation": self._activation}
        chosen = ", ".join(f"{name}={value!r}" for name, value in options.items() if value is not None)
        if self.gamma.shape is None:  # a SymbolBlock's, before anything is known of its input; there is no super() then
            kwargs = ", ".join(f"{name}={value!r}" for name, value in self._kwargs.items())
            plain = f"{type(self).__name__}({kwargs}, in_channels=None)"
        else:
            plain = super().__repr__()
        return plain[:-1] + (f", {chosen})" if chosen else ")")


def _name_of(dtype) -> str:
    """MXNet's name of a dtype; it stands in for bfloat16, which NumPy does not have, with a structure of that name."""
    dtype = np.dtype(dtype)
    return dtype.name if dtype.names is None else dtype.names[0]


class Trace(NamedTuple):
    """A graph of Gluon's that is being made: of which net, its inputs, what it is called with, and of which kind."""

    net: Optional[HybridBlock]
    inputs: List[mx.sym.Symbol]
    arguments: tuple
    is_static: bool

    @property
    def symbol(self) -> mx.sym.Symbol:
        """It names the graph, since each has new ones."""
        return self.inputs[0]

    def dtypes(self) -> Dict[str, Any]:
        """Of the inputs, by name."""
        given = [item for item in _flatten(self.arguments, "input")[0] if item is not None]
        return {symbol.name: item.dtype for symbol, item in zip(self.inputs, given)}


# Where graphs are made; each has a list ``symbol_inputs`` of the graph's inputs, which are new objects each time.
_TRACERS = [HybridBlock._get_graph.__code__]


def traces_graphs(method):
    """Decorates a method ``_get_graph`` that is not HybridBlock's."""
    _TRACERS.append(method.__code__)
    return method


def find_trace() -> Optional[Trace]:
    """The graph that is being made now; None if a user calls blocks with symbols.

    It is static if it is for ``static_alloc`` and ``static_shape``. The flags that count are those of the block that
    owns the graph, and MXNet does not tell its children. They may have other flags of their own, and what is safe in a
    static graph is not in another, so the owner is looked up on the stack. A trace that does not come from a hybridized
    block's first call counts as not static, which is always safe.
    """
    frame, tracer, net, is_static = sys._getframe(), None, None, False
    while frame is not None and net is None:
        if frame.f_code in _TRACERS:
            tracer = frame.f_locals
        if frame.f_code is HybridBlock._build_cache.__code__:
            net = frame.f_locals["self"]
            flags = dict(net._flags)
            is_static = bool(flags.get("static_alloc") and flags.get("static_shape"))
        frame = frame.f_back
    return None if tracer is None else Trace(net, tracer["symbol_inputs"], tracer["args"], is_static)
