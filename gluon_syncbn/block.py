"""SyncBatchNorm, the block that a user sees."""

import sys
import threading
import weakref
from typing import List, Optional, Tuple, Union

import mxnet as mx
import numpy as np
from mxnet.gluon import HybridBlock, nn

from gluon_syncbn import _participants, native, portable
from gluon_syncbn._backend import BACKENDS, choose
from gluon_syncbn._group import Group, Options, absent_text, check_devices, check_timeout, neighbourhoods
from gluon_syncbn._transport import check_kvstore
from gluon_syncbn._writes import declare_writes

_layers = weakref.WeakSet()


def live_layers() -> List["SyncBatchNorm"]:
    """Every layer of this process that has synchronized."""
    return list(_layers)


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
    all devices that wait (see ``timeout``); after you have caught it, call ``mx.nd.waitall()`` before the next step.
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
        'native' is one compiled operator, on CPU contexts; 'portable' is made of MXNet's own operators and runs
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
    NotImplementedError
        Several devices under ``mx.npx.set_np()``.
    RuntimeError
        Several devices with ``MXNET_ENGINE_TYPE=NaiveEngine``, or ``backend='native'`` where it cannot run.
    MXNetError
        Where an output is read, if a device did not come. The text names the layer, the direction, who arrived and
        who did not. (On the portable back end the operator that failed prints it as a `SyncBatchNormError`, too; and
        only prints it where nothing is compiled.)

    Inputs: **data** with at least 2 dimensions; float32, float64 (after ``cast('float64')``), or float16 or bfloat16
    with parameters and statistics in float32.

    Outputs: **out**, shape and dtype of data.

    Notes
    -----
    Running statistics are updated in the forward pass in training mode, and only there. `nn.BatchNorm` on a CPU
    updates them in the backward pass, which differs for a layer that is called several times in a step.

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
        for option, value in (("num_devices", num_devices), ("group_size", group_size)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{where}: {option} must be a positive integer or None, not {value!r}.")
        if timeout is not None:
            timeout = check_timeout(timeout, where)
        if backend not in BACKENDS:
            raise ValueError(f"{where}: backend must be one of {', '.join(BACKENDS)}, not {backend!r}.")
        if activation not in (None, "relu"):
            raise ValueError(f"{where}: activation must be 'relu' or None, not {activation!r}.")
        check_kvstore(kvstore, where)
        if backend == "native":
            choose(where, backend, [], kvstore)
        self._requested_backend = backend
        self._activation = activation
        self._options = Options(num_devices, group_size, timeout, kvstore)
        self._group = None
        self._group_lock = threading.Lock()
        self._last_call = None

    @property
    def backend(self) -> str:
        """The back end that the layer takes on its devices: 'native' or 'portable'."""
        where = f"SyncBatchNorm '{self.name}'"
        return choose(where, self._requested_backend, self._devices(), self._options.kvstore).name

    def _alias(self):
        # Files written by collect_params().save() carry full names: keep those of nn.BatchNorm.
        return "batchnorm"

    def hybrid_forward(self, F, x, gamma, beta, running_mean, running_var):
        devices = self._devices()
        is_array = F is mx.nd
        if is_array:
            self._check_input(x)
        if devices:
            check_devices(self.name, devices, self._options)
        alone = len(devices) <= 1 or self._options.group_size == 1 or self._kwargs["use_global_stats"]
        if alone or (is_array and not mx.autograd.is_training()):
            out = super().hybrid_forward(F, x, gamma, beta, running_mean, running_var)
            return F.relu(out) if self._activation else out
        if is_array and not _participants.takes_part(x.context, _participants.current()):
            raise ValueError(absent_text(self.name, x.context))
        if mx.util.is_np_array():
            raise NotImplementedError(
                f"SyncBatchNorm '{self.name}': MXNet's NumPy interface is not supported on several devices yet; "
                f"call mx.npx.reset_np()."
            )
        group = self._group_on(devices)
        arrays = (x, gamma, beta, running_mean, running_var)
        axis = self._kwargs["axis"]
        net, trace = (None, None) if is_array else _static_trace()
        after = self._call_before(trace)
        if net is not None:
            declare_writes(net, trace, self)
        if isinstance(group, native.NativeGroup):
            relu, static = self._activation is not None, trace is not None
            out, call = native.normalize(F, *arrays, group, axis, relu=relu, static=static, after=after)
        else:
            cast_input = not is_array or _name_of(x.dtype) != group.dtype
            out, call = portable.normalize(F, *arrays, group, axis, cast_input, after)
            out = F.relu(out) if self._activation else out  # Activation would turn NaN into 0
        self._last_call = None if trace is None else (trace, call)
        return out

    def _call_before(self, trace):
        """The last call of this layer in the same static graph, or None.

        A static graph does not count what a call does to the running statistics as writing, so calls of a layer on
        parallel branches have no order, neither on one device nor the same on all. Each is therefore made to depend on
        the one before. Elsewhere the engine orders them by the running statistics.
        """
        before = self._last_call
        return before[1] if trace is not None and before is not None and before[0] is trace else None

    def _devices(self) -> List[mx.Context]:
        """The contexts of the parameters in rank order; none before ``initialize``."""
        parameter = self.running_mean
        initialized = parameter._data is not None or parameter._deferred_init
        return parameter.list_ctx() if initialized else []

    def _group_on(self, devices: List[mx.Context]) -> Union[Group, native.NativeGroup]:
        with self._group_lock:  # threads of several devices may come here for the first time together
            dtype = np.dtype(self.running_mean.dtype).name
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
                _layers.add(self)
            return self._group

    def groups(self) -> List[List[mx.Context]]:
        """The devices, in the groups that synchronize among themselves, in rank order."""
        return neighbourhoods(self._devices(), self._options)

    def synchronized_passes(self, participants: int) -> int:
        """How many forward passes were met by exactly the devices of this list (`gluon_syncbn._participants`)."""
        return 0 if self._group is None else self._group.rounds(participants)

    def _check_input(self, x) -> None:
        where = f"SyncBatchNorm '{self.name}'"
        axis = self._kwargs["axis"]
        if x.ndim < 2 or not -x.ndim <= axis < x.ndim:
            raise ValueError(f"{where}: axis={axis} does not fit an input of shape {x.shape}; it takes 2 or more axes.")
        if x.size == 0:
            raise ValueError(
                f"{where}: the input of shape {x.shape} on {x.context} is empty. A device without images cannot take "
                f"part; leave it out with gluon_syncbn.devices(...)."
            )
        channels = self.gamma.shape[0]
        if channels > 0 and x.shape[axis] != channels:
            raise ValueError(
                f"{where}: it has {channels} channels, but axis {axis} of the input of shape {x.shape} has "
                f"{x.shape[axis]}."
            )
        dtype, expected = _name_of(x.dtype), _name_of(self.running_mean.dtype)
        if dtype != expected and not (dtype in ("float16", "bfloat16") and expected == "float32"):
            raise ValueError(
                f"{where}: the input is {dtype}, parameters and statistics are {expected}; "
                f"call cast({dtype!r}) on the net."
            )

    def __repr__(self):
        options = {**self._options._asdict(), "activation": self._activation}
        chosen = ", ".join(f"{name}={value!r}" for name, value in options.items() if value is not None)
        return super().__repr__()[:-1] + (f", {chosen})" if chosen else ")")


def _name_of(dtype) -> str:
    """MXNet's name of a dtype; it stands in for bfloat16, which NumPy does not have, with a structure of that name."""
    dtype = np.dtype(dtype)
    return dtype.name if dtype.names is None else dtype.names[0]


def _static_trace() -> Tuple[Optional[HybridBlock], Optional[mx.sym.Symbol]]:
    """If a net is traced for a graph with ``static_alloc`` and ``static_shape``: it, and a symbol that names the trace.

    The flags that count are those of the block that owns the graph, and MXNet does not tell its children. They may have
    other flags of their own, and what is safe in a static graph is not in another, so the owner is looked up on the
    stack. A trace that does not come from a hybridized block's first call counts as not static, which is always safe.

    The symbol is the graph's first input, which is a new object in each trace.
    """
    frame, trace = sys._getframe(), None
    while frame is not None:
        if frame.f_code is HybridBlock._get_graph.__code__:
            trace = frame.f_locals["symbol_inputs"][0]
        if frame.f_code is HybridBlock._build_cache.__code__:
            flags = dict(frame.f_locals["self"]._flags)
            static = flags.get("static_alloc") and flags.get("static_shape")
            return (frame.f_locals["self"], trace) if static and trace is not None else (None, None)
        frame = frame.f_back
    return None, None
