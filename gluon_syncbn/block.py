"""`SyncBatchNorm`, the Gluon block."""

import copy
from typing import Any, Dict, Optional, Tuple, Union

import mxnet as mx
from mxnet.gluon import nn

from gluon_syncbn.backends.bfloat16 import dtype_name, is_bfloat16, widened
from gluon_syncbn.backends.choose import choose
from gluon_syncbn.base.mxnet_private import set_attributes
from gluon_syncbn.distributed.process_group import ProcessGroupLike
from gluon_syncbn.graphs.norms import Layers, making, mark
from gluon_syncbn.layer.spec import (
    OPTIONS,
    LayerSpec,
    check_axis,
    check_devices,
    check_option_names,
    symbol_synchronizes,
)
from gluon_syncbn.meeting.active_set import absent_text, active_sets
from gluon_syncbn.mxnet_engine import failures
from gluon_syncbn.step.recording import begin_forward
from gluon_syncbn.synchronization import Synchronization, options_of


class BatchNormReLU(nn.BatchNorm):
    """The plain form of a `SyncBatchNorm` with ``activation='relu'``."""

    def hybrid_forward(self, F, x, gamma, beta, running_mean, running_var):
        out = super().hybrid_forward(F, x, gamma, beta, running_mean, running_var)
        return F.npx.relu(out) if mx.util.is_np_array() else F.relu(out)  # Activation would turn NaN into 0


class SyncBatchNorm(nn.BatchNorm):
    r"""Batch Normalization with the statistics of the whole mini-batch, over all devices of a host or of a job.

    With :math:`N` values per channel on all devices together,

    .. math::
        y = \gamma\,\frac{x - \mathrm{mean}}{\sqrt{\mathrm{var} + \epsilon}} + \beta, \qquad
        \mathrm{mean} = \tfrac1N \sum x, \quad \mathrm{var} = \tfrac1N \sum (x - \mathrm{mean})^2

    and the backward pass sends the gradient through mean and variance to every device (Ioffe and Szegedy, 2015,
    algorithm 1, summed over devices). The layer replaces `mxnet.gluon.nn.BatchNorm`: it has the same parameter names
    and the same ``.params`` files, and its gradients are those that one device would compute on the concatenated batch.
    In prediction mode, with ``use_global_stats``, and alone on one device (one process, without ``renorm``) it *is*
    `nn.BatchNorm` and does not synchronize.

    Every device must run the layer the same number of times per step. If a device does not come, all devices that wait
    for it fail with an error (see ``timeout``). After you have caught the error, call `gluon_syncbn.abandon_step`
    before the next step. For a step with fewer images than devices see `gluon_syncbn.devices`.

    Parameters
    ----------
    axis : int, default 1
        The axis of the channels; 1 for NCHW, -1 or 3 for NHWC.
    momentum : float, default 0.9
        The share of the old value that the running statistics keep at each training step.
    epsilon : float, default 1e-5
        Added to the variance.
    center, scale : bool, default True
        Whether :math:`\beta` and :math:`\gamma` are learned.
    use_global_stats : bool, default False
        Normalize with the running statistics in training too (frozen BatchNorm).
    beta_initializer, gamma_initializer, running_mean_initializer, running_variance_initializer : str or Initializer
        As in `nn.BatchNorm`.
    in_channels : int, default 0
        The number of channels of the input; 0 takes it from the first input.
    num_devices : int, optional
        The number of devices that the parameters must be initialized on; any other number is an error at the first
        call. By default the layer synchronizes over the contexts of its parameters, however many these are.
    group_size : int, optional
        Synchronize groups of this many neighbouring devices instead of all devices. Each group then has running
        statistics of its own.
    timeout : float, optional
        How many seconds devices wait for a device that does not come. Default: the environment variable
        ``GLUON_SYNCBN_TIMEOUT``, or 60 s for devices of the same process and 600 s for other processes.
    backend : {'auto', 'native', 'portable'}
        'native' is one compiled operator, for CPUs and GPUs. 'portable', the fallback, consists of MXNet's own
        operators, for the devices of one process. 'auto' takes the first of the two that can run here; the property
        ``backend`` says which.
    activation : {'relu'}, optional
        Return max(out, 0), computed in the same pass where the back end supports it.
    process_group : str, ProcessGroup, mpi4py.MPI.Comm or horovod.mxnet.ProcessSet, optional
        The processes to synchronize with, as in `gluon_syncbn.init_process_group`. Default: the processes that this
        function, or the environment variable ``GLUON_SYNCBN_PROCESS_GROUP``, has chosen for all layers. With several
        processes ``group_size`` counts the devices of all of them in rank order, and ``num_devices`` counts the devices
        of this one.
    in_place : bool, default False
        Recover x̂ from the output in backward, so that MXNet need not keep the input: less memory for activations. No
        effect where a ReLU follows (a leaky ReLU may follow). Needs the native back end, and works in training on
        several devices. docs/memory.md describes the loss of precision.
    renorm : (float, float), optional
        Batch Renormalization (Ioffe, 2017) with the limits ``(r_max, d_max)``; `gluon_syncbn.set_renorm` changes them.
        Needs the native back end. Takes effect in training, on one device too.
    fuse : bool, default True
        Let a hybridized net compute the next nodes (a ReLU, a leaky ReLU, or a sum and a ReLU) in the layer's own
        passes. Only on the native back end, and only where nothing else reads the values in between.
    kvstore : str or mx.kv.KVStore, optional
        For the portable back end: the KVStore through which devices exchange the per-channel vectors. A name, such as
        'local' or 'device', or a store made with ``mx.kv.create`` that has no optimizer. By default the vectors are
        exchanged in host memory, without a KVStore.

    Raises
    ------
    ValueError, TypeError
        An option cannot work: raised when the layer is made. Devices, channels or the dtype do not fit: raised by the
        first call that shows it. Within a hybridized net MXNet turns a wrong channel count into `MXNetError`.
    RuntimeError
        Several devices with ``MXNET_ENGINE_TYPE=NaiveEngine``; several CPU devices where the package was imported after
        MXNet had begun to compute; or a ``backend`` that cannot run here.
    SyncBatchNormError
        A device did not come: raised where an output is read. The text names the layer, the direction, the devices
        that arrived, and those that are missing.

    Inputs: **data** (``mx.nd.NDArray``, ``mx.np.ndarray`` or a symbol) with at least 2 dimensions; of dtype float32,
    float64 (after ``cast('float64')``), or float16 or bfloat16 with parameters and statistics in float32.

    Outputs: **out**, with the shape, dtype and type of data.

    Notes
    -----
    Running statistics are updated in the forward pass in training mode, and only there. `nn.BatchNorm` on a CPU
    updates them in the backward pass, which differs for a layer that is called several times in a step.

    `copy.deepcopy` and `pickle` make an independent layer, which does not synchronize with the original. As with
    `nn.BatchNorm`, they fail for a hybridized net that has run (MXNet cannot copy its graph).

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
        process_group: Optional[ProcessGroupLike] = None,
        in_place: bool = False,
        renorm: Optional[Tuple[float, float]] = None,
        fuse: bool = True,
        **kwargs,
    ):
        # The arguments, before there are other variables.
        given = {name: value for name, value in locals().items() if name not in ("self", "kwargs", "__class__")}
        check_option_names(kwargs, [*given, "prefix", "params"], type(self).__name__)
        check_axis(axis, type(self).__name__)
        options = {name: given.pop(name) for name in OPTIONS}
        super().__init__(**given, **kwargs)
        self._sync = Synchronization(self, options_of(self, **options))

    @property
    def backend(self) -> str:
        """The back end that the layer uses on its devices: 'native' or 'portable'."""
        return choose(self._sync.spec(), self._sync.devices()).name

    def cast(self, dtype):
        """Cast as `nn.BatchNorm`: parameters and statistics stay in float32 for float16, and for bfloat16, too."""
        super().cast("float32" if is_bfloat16(dtype) else dtype)

    # A copy is an independent layer, with a group of its own.

    def __getstate__(self) -> Dict[str, Any]:
        return {**self.__dict__, "_sync": self._sync.options}

    def __setstate__(self, state: Dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._sync = Synchronization(self, state["_sync"])

    def __deepcopy__(self, memo) -> "SyncBatchNorm":
        options = self._sync.options
        for given in (options.kvstore, options.process_group):  # the user's objects, which cannot be copied
            if given is not None:
                memo[id(given)] = given
        made = memo[id(self)] = type(self).__new__(type(self))
        made.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return made

    def _alias(self):
        # Files written by collect_params().save() contain full names: keep the same names as nn.BatchNorm.
        return "batchnorm"

    def hybrid_forward(self, F, x, gamma, beta, running_mean, running_var):
        arrays = (x, gamma, beta, running_mean, running_var)
        if mx.util.is_np_array():
            with mx.util.np_array(False):
                plain_arrays = (item.as_nd_ndarray() for item in arrays)
                return self.hybrid_forward(F, *plain_arrays).as_np_ndarray()
        if F is mx.nd:
            return self._imperative(arrays)
        out = super().hybrid_forward(F, *arrays)
        set_attributes(out, self._node_attributes())
        return F.relu(out, name="fwd_relu") if self._sync.options.activation else out

    def _node_attributes(self) -> Dict[str, str]:
        """The hidden attributes of the layer's plain node in the symbol that is being made.

        The layer is noted in the graph of a net. A user's symbol may be saved, bound by a Module or put into a
        SymbolBlock, so its node has a full description.
        """
        if making.layers is not None:
            return self._note_in(making.layers)
        spec, devices = self._sync.spec(), self._sync.devices()
        is_moving = len(devices) == 1  # most layers are on one device before they train
        does_synchronize = symbol_synchronizes(spec)
        if not is_moving:
            check_devices(spec, devices, does_synchronize)
        if does_synchronize:
            spec.check_names()
            choose(spec, devices)  # raises an error at once if it cannot run here
        return mark(spec, None if is_moving and spec.num_devices else len(devices))

    def _note_in(self, layers: Layers) -> Dict[str, str]:
        """Add the layer to the layers of a net's graph; returns the hidden attributes of its node there."""
        spec = self._sync.spec()
        can_be_read = spec.dtype in ("float32", "float64")  # else it is an error when it trains
        return {**(mark(spec) if can_be_read else {}), **layers.add(self)}

    def _imperative(self, arrays):
        x, gamma = arrays[:2]
        spec, devices = self._sync.spec(), self._sync.devices()
        self._check_input(x, gamma.shape[0], spec)
        predicts = not mx.autograd.is_training()
        if not self._sync.synchronizes(spec, devices, predicts):
            x, lowered = widened(x)
            options = self._kwargs
            if predicts and mx.autograd.is_recording():
                # If its backward pass is called for training, MXNet would take the gradient of another function.
                # And it reads the running statistics, which later passes may have moved by then.
                begin_forward(self._sync, x.context)
                options = {**options, "use_global_stats": True}
                with mx.autograd.pause():
                    arrays = [*arrays[:3], *(array.copy() for array in arrays[3:])]
            out = mx.nd.BatchNorm(x, *arrays[1:], name="fwd", **options)
            return lowered(mx.nd.relu(out) if spec.activation else out)
        if not active_sets.includes(x.context, active_sets.current):
            raise ValueError(absent_text(self.name, x.context))
        active_sets.note([self])
        begin_forward(self._sync, x.context)
        out = self._sync.normalize(arrays, spec, devices)
        failures.watch([out], f"an operator before {spec.where} on {x.context} had failed.", arrays[3:])
        return out

    @staticmethod
    def _check_input(x, channels: int, spec: LayerSpec) -> None:
        """ValueError unless the layer can take this input. (In GluonCV's pruned networks Parameters have no shape.)"""
        where, axis = spec.where, spec.axis
        spec.check_dtype()
        if x.ndim < 2 or not -x.ndim <= axis < x.ndim:
            raise ValueError(f"{where}: axis={axis} does not fit an input of shape {x.shape}; it takes 2 or more axes.")
        if 0 in x.shape:
            raise ValueError(
                f"{where}: the input of shape {x.shape} on {x.context} is empty. A device without images cannot take "
                f"part; leave it out with gluon_syncbn.devices(...)."
            )
        if x.shape[axis] != channels:
            raise ValueError(
                f"{where}: it has {channels} channels, but axis {axis} of the input of shape {x.shape} has "
                f"{x.shape[axis]}."
            )
        dtype, expected = dtype_name(x.dtype), spec.dtype
        if dtype != expected and not (dtype in ("float16", "bfloat16") and expected == "float32"):
            raise ValueError(
                f"{where}: the input is {dtype}, parameters and statistics are {expected}; "
                f"call cast({dtype!r}) on the net."
            )

    def __repr__(self):
        options = self._sync.options.options()
        defaults = LayerSpec("").options()
        chosen = ", ".join(f"{name}={value!r}" for name, value in options.items() if value != defaults[name])
        if self.gamma.shape is None:  # in a SymbolBlock before its first input; nn.BatchNorm's repr would fail
            kwargs = ", ".join(f"{name}={value!r}" for name, value in self._kwargs.items())
            plain = f"{type(self).__name__}({kwargs}, in_channels=None)"
        else:
            plain = super().__repr__()
        return plain[:-1] + (f", {chosen})" if chosen else ")")
