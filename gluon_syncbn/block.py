"""SyncBatchNorm, the block that a user sees."""

import copy
import threading
import warnings
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

import mxnet as mx
from mxnet.gluon import Block, nn

from gluon_syncbn.backends.bfloat16 import dtype_name, is_bfloat16, widened
from gluon_syncbn.backends.choose import Choice, choose
from gluon_syncbn.backends.interface import Backend, Node
from gluon_syncbn.backends.options import check_options
from gluon_syncbn.base.mxnet_private import contexts_of
from gluon_syncbn.distributed.default import find, is_connected
from gluon_syncbn.distributed.process_group import ProcessGroup, ProcessGroupLike
from gluon_syncbn.graphs.calls import order_tokens, remember
from gluon_syncbn.graphs.mark import Form, mark
from gluon_syncbn.graphs.trace import Trace, find_trace
from gluon_syncbn.meeting import active_set
from gluon_syncbn.meeting.group import absent_text
from gluon_syncbn.meeting.link import Link, count_processes, describe
from gluon_syncbn.meeting.processes import Place
from gluon_syncbn.meeting.renorm import RenormLike
from gluon_syncbn.meeting.spec import GroupSpec, LayerGroup, Options, check_devices, check_group_size, subgroups
from gluon_syncbn.mxnet_engine import failures
from gluon_syncbn.step.exits import end_before_engines
from gluon_syncbn.step.recording import begin_forward
from gluon_syncbn.step.steps import Passes, steps
from gluon_syncbn.symbol import check_names, checked_spec, make_node, plain_node


class SyncBatchNorm(nn.BatchNorm):
    r"""Batch Normalization with the statistics of the whole mini-batch, over all devices of a host, or of a job.

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
    process_group : str, ProcessGroup, mpi4py.MPI.Comm or horovod.mxnet.ProcessSet, optional
        The processes to synchronize with, as in `gluon_syncbn.init_process_group`; by default what that, or the
        environment variable ``GLUON_SYNCBN_PROCESS_GROUP``, has chosen for all layers. ``group_size`` then counts the
        devices of all processes in rank order, and ``num_devices`` those of this process.
    in_place : bool, default False
        Let the backward pass go by the output, so that MXNet need not keep the input: less memory for activations,
        where no ReLU follows (a leaky one may). On the native back end, in training on several devices. See
        docs/memory.md for what it costs in precision.
    renorm : (float, float) or list of (int, float, float), optional
        Batch Renormalization (Ioffe, 2017) with these ``(r_max, d_max)``, or a schedule of ``(step, r_max, d_max)``,
        on straight lines from one to the next; steps count the layer's training passes from 0. Takes effect in
        training, on one device too.
    fuse : bool, default True
        Let a hybridized net compute what follows the layer (ReLU, leaky ReLU, a sum and ReLU) in the layer's own
        passes. Only on the native back end, and where nobody else reads what lies between.
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
        process_group: Optional[ProcessGroupLike] = None,
        in_place: bool = False,
        renorm: Optional[RenormLike] = None,
        fuse: bool = True,
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
        self._synchronize(
            backend,
            activation,
            in_place,
            fuse,
            num_devices=num_devices,
            group_size=group_size,
            timeout=timeout,
            kvstore=kvstore,
            process_group=process_group,
            renorm=renorm,
        )

    def _synchronize(self, backend="auto", activation=None, in_place=False, fuse=True, **group) -> None:
        """Take over the options that `nn.BatchNorm` does not have; `convert_sync_batchnorm` calls this too.

        ``group`` are those of `Options`.
        """
        self._options = self.checked_options(backend, activation, in_place, fuse, **group)
        self._requested_backend = backend
        self._activation, self._in_place, self._fuse = activation, in_place, fuse
        self._first_step = self._next_step()  # of the schedule of renorm, for the next group
        self._group: Optional[Tuple[Backend, LayerGroup]] = None
        self._group_lock = threading.Lock()
        self._passes = Passes(self)

    def checked_options(self, backend="auto", activation=None, in_place=False, fuse=True, **group) -> Options:
        """Those of its group, or an error if the layer cannot have one of these; nothing changes."""
        where = f"SyncBatchNorm '{self.name}'"
        options = check_options(where, backend, activation, in_place, fuse, **group)
        find(options.process_group, where)  # one that cannot connect shows at once
        if backend != "auto":
            choose(where, backend, [], options.kvstore)  # one that cannot run here shows at once
        return options

    def chosen_options(self) -> Dict[str, Any]:
        """All that `nn.BatchNorm` does not have, by the names that it has in ``__init__``."""
        chosen = {"backend": self._requested_backend, "activation": self._activation, "in_place": self._in_place}
        return {**chosen, "fuse": self._fuse, **self._options._asdict()}

    def _stop_synchronizing(self) -> None:
        """Undo `_synchronize`; `convert_batchnorm` calls this before the layer is of another class."""
        steps.remove_layer(self)
        for name in (
            "_options",
            "_first_step",
            "_group",
            "_group_lock",
            "_passes",
            "_requested_backend",
            "_activation",
            "_in_place",
            "_fuse",
        ):
            del self.__dict__[name]

    @property
    def backend(self) -> str:
        """The back end that the layer takes on its devices: 'native' or 'portable'."""
        return self._choice().name

    def _choice(self) -> Choice:
        where = f"SyncBatchNorm '{self.name}'"
        return choose(where, self._requested_backend, self._devices(), self._options.kvstore)

    def cast(self, dtype):
        """As `nn.BatchNorm` does for float16, parameters and statistics stay in float32 for bfloat16 too."""
        super().cast("float32" if is_bfloat16(dtype) else dtype)

    # A copy is a layer of its own, with a group of its own; the parameters are copied as those of `nn.BatchNorm`.

    def __getstate__(self) -> Dict[str, Any]:
        state = {**self.__dict__, "_group": None, "_first_step": self._next_step()}
        del state["_group_lock"], state["_passes"]
        return state

    def __setstate__(self, state: Dict[str, Any]) -> None:
        self.__dict__.update(state, _group_lock=threading.Lock())
        self._passes = Passes(self)

    def __deepcopy__(self, memo) -> "SyncBatchNorm":
        for given in (self._options.kvstore, self._options.process_group):  # the user's own, which nothing can copy
            if given is not None:
                memo[id(given)] = given
        made = memo[id(self)] = type(self).__new__(type(self))
        made.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return made

    def _alias(self):
        # Files written by collect_params().save() carry full names: keep those of nn.BatchNorm.
        return "batchnorm"

    def hybrid_forward(self, F, x, gamma, beta, running_mean, running_var):
        arrays = (x, gamma, beta, running_mean, running_var)
        if mx.util.is_np_array():
            with mx.util.np_array(False):
                plain_arrays = (item.as_nd_ndarray() for item in arrays)
                return self.hybrid_forward(F, *plain_arrays).as_np_ndarray()
        if F is mx.nd:
            return self._imperative(arrays)
        trace = find_trace()
        dtypes, tokens = trace.dtypes() if trace else {}, order_tokens(trace)
        out, token = self.as_node(arrays, trace, "fwd", dtypes, after=tokens.get(self.running_mean))
        if token is not None:
            tokens[self.running_mean] = token
        return out

    def _imperative(self, arrays):
        x, gamma = arrays[:2]
        self._check_input(x, gamma.shape[0])
        devices = self._devices()
        if devices:
            self._check_devices(devices)
        if self._is_alone(devices) or self._never_synchronizes() or not mx.autograd.is_training():
            x, lowered = widened(mx.nd, x, {})
            out = super().hybrid_forward(mx.nd, x, *arrays[1:])
            return lowered(mx.nd.relu(out) if self._activation else out)
        if not active_set.includes(x.context, active_set.current()):
            raise ValueError(absent_text(self.name, x.context))
        begin_forward(self, x.context)
        out = self._on_backend(mx.nd, arrays)[0]
        failures.watch([out], f"an operator before SyncBatchNorm '{self.name}' on {x.context} had failed.", arrays[3:])
        return out

    def as_node(self, inputs, trace: Optional[Trace], name: str, dtypes: Dict[str, Any], hidden=None, after=None):
        """The layer as a node of a graph, and its order token or None (see `Node` for the arguments).

        ``trace`` is the graph of a net that is being made; without one, it is a symbol of the user's, which may be
        saved, bound by a Module or put into a SymbolBlock.
        """
        devices, relu = self._devices(), self._activation is not None
        if trace is not None and trace.net is not None:
            remember(trace.net, trace.symbol, self)
        is_for_one = self._options.num_devices == 1 and self._is_alone(devices)
        is_moving = len(devices) == 1 or self._is_for_itself()
        if trace is None and is_moving and not (is_for_one or self._kwargs["use_global_stats"]):
            # The parameters are on one device, where base weights are loaded, and most move before they train. Or it
            # synchronizes with nobody, but is to do so if its symbol is converted again. So this tells what it is, and
            # a SymbolBlock, or `symbol.load`, makes a layer of it.
            spec = check_names(self._spec(self._options.num_devices))
            told = mark(spec, self._form(), relu=False, is_plain=True)
            return plain_node(inputs, name, relu, {**(hidden or {}), **told}, **self._kwargs), None
        if devices:
            self._check_devices(devices)
        if (devices and self._is_alone(devices)) or self._never_synchronizes():
            x, lowered = widened(mx.sym, inputs[0], dtypes)
            return lowered(plain_node([x, *inputs[1:]], name, relu, hidden, **self._kwargs)), None
        if trace is None or not devices:
            spec = checked_spec(self._spec(len(devices) or self._options.num_devices))
            node = Node(name, spec, hidden, after)
            return make_node(inputs, self._form(), node)
        flags = trace.is_static, trace.is_partitioned
        node = Node(name, self._spec(self._options.num_devices), hidden, after, *flags, dtypes)
        return self._on_backend(mx.sym, inputs, node)

    def _is_alone(self, devices: Sequence[mx.Context]) -> bool:
        """Whether it is `nn.BatchNorm`: no device to meet, here or in another process, or none known; no renorm."""
        if len(devices) > 1 or (devices and self._options.renorm is not None):
            return False
        return not devices or (self._is_connected() and self.process_group() is None)

    def _never_synchronizes(self) -> bool:
        return self._is_for_itself() or self._kwargs["use_global_stats"]

    def _is_for_itself(self) -> bool:
        """Whether it has no device to meet by its ``group_size``."""
        return self._options.group_size == 1 and self._options.renorm is None

    def _on_backend(self, F, arrays, node: Optional[Node] = None):
        backend, group = self._group_on(self._devices())
        if mx.autograd.is_training():
            self.take_place()
        return backend.normalize(F, arrays, group.reference, self._form(), node)

    def _form(self) -> Form:
        return Form(self._kwargs["axis"], self._activation, self._in_place, self._fuse, self._requested_backend)

    def _spec(self, num_devices: Optional[int]) -> GroupSpec:
        options, kwargs = self._options._replace(num_devices=num_devices), self._kwargs
        scale = not kwargs["fix_gamma"]
        return GroupSpec.of(self.name, options, self._dtype(), kwargs["momentum"], kwargs["eps"], scale)

    def _devices(self) -> List[mx.Context]:
        """The contexts of the parameters in rank order; none before ``initialize``."""
        return contexts_of(self.running_mean)

    def _dtype(self) -> str:
        """Of parameters and statistics."""
        name = dtype_name(self.running_mean.dtype)
        if name not in ("float32", "float64"):
            raise ValueError(
                f"SyncBatchNorm '{self.name}': its parameters and statistics are {name}; they must be float32, or "
                f"float64 for an input of float64. Call cast('float32') on the layer."
            )
        return name

    def _group_on(self, devices: List[mx.Context]) -> Tuple[Backend, LayerGroup]:
        with self._group_lock:  # threads of several devices may come here for the first time together
            now = self._group
            if now is None or (now[1].devices, now[1].spec.dtype) != (devices, self._dtype()):
                backend = self._choice().backend
                if self._in_place and not backend.works_in_place:
                    warnings.warn(
                        f"SyncBatchNorm '{self.name}' runs on the {backend.name} back end, which cannot work in place: "
                        f"in_place=True saves no memory here.",
                        stacklevel=2,
                    )
                self._first_step = self._next_step()
                self._group = now = backend, backend.make_group(self._spec(len(devices)), devices)
                self._group[1].go_to_step(self._first_step)
                steps.add_layer(self)
            return now

    def _next_step(self) -> int:
        """Of the schedule of renorm. It goes on where the layer moves, is copied, or is converted again."""
        group = self.__dict__.get("_group")
        return self.__dict__.get("_first_step", 0) if group is None else group[1].go_to_step(0)

    def groups(self) -> List[List[mx.Context]]:
        """The devices, in the groups that synchronize among themselves, in rank order."""
        link = self._link()
        first = 0 if link is None else link.first_device
        return list(subgroups(self._devices(), self._options.group_size, first).values())

    def process_group(self) -> Optional[ProcessGroup]:
        """The processes that the layer synchronizes with; None if there are none."""
        return find(self._options.process_group, f"SyncBatchNorm '{self.name}'")

    def connect_later(self, process_group: Optional[ProcessGroupLike]) -> None:
        """Synchronize with these processes, which are found when the layer first trains."""
        self._options = self._options._replace(process_group=process_group)

    def _is_connected(self) -> bool:
        """Whether those processes are known. A layer of a symbol that was loaded from a file finds them when it trains:
        who loads it may only want to predict, where there are none."""
        return is_connected(self._options.process_group)

    def _check_devices(self, devices: Sequence[mx.Context]) -> None:
        """Raises as `check_devices`, and in training as `check_group_size`."""
        check_devices(self.name, devices, self._options)
        if mx.autograd.is_training():
            self._check_group_size(devices)

    def _check_group_size(self, devices: Sequence[mx.Context]) -> None:
        if self._options.group_size is not None and self._is_connected():
            where = f"SyncBatchNorm '{self.name}'"
            num_processes = count_processes(self._options.process_group, where)
            check_group_size(self._options.group_size, len(devices), num_processes, where)

    def _link(self) -> Optional[Link]:
        """To the other processes, once the layer has trained."""
        return None if self._group is None else self._group[1].link

    def peers(self) -> Sequence[int]:
        """Their ranks, where they share its statistics."""
        link = self._link()
        return [] if link is None else link.peers()

    def place(self) -> Optional[Place]:
        """Where it stands in its net, once it has trained with other processes."""
        link = self._link()
        return None if link is None else link.place

    def take_place(self) -> None:
        """Find out where the layer stands in the net that is being called to train, if other processes must know."""
        if self._group is None:  # it is on one device; its graph may have been made for a prediction
            return self._check_group_size(self._devices())
        link = self._group[1].connect()
        if link is not None and link.place is None:
            end_before_engines()
            net = steps.nets.net_of(self, _description)
            link.take(Place(net.name, net.key_of(self), net.kind, net.own_name, net.described, []))

    def description(self) -> str:
        """What must be the same in all processes; nothing if it does not synchronize."""
        if self._never_synchronizes():
            return ""
        shape = self.running_mean.shape  # None in a SymbolBlock, before anything is known of its input
        return describe(self._spec(len(self._devices())), shape[0] if shape else None)

    def synchronized_passes(self, set_id: int) -> int:
        """How many forward passes were met by exactly the devices of this set (`gluon_syncbn.meeting.active_set`)."""
        return 0 if self._group is None else self._group[1].rounds(set_id)

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
        dtype, expected = dtype_name(x.dtype), self._dtype()
        if dtype != expected and not (dtype in ("float16", "bfloat16") and expected == "float32"):
            raise ValueError(
                f"{where}: the input is {dtype}, parameters and statistics are {expected}; "
                f"call cast({dtype!r}) on the net."
            )

    def __repr__(self):
        options = {**self._options._asdict(), "activation": self._activation}
        options.update(in_place=self._in_place or None, fuse=None if self._fuse else False)
        chosen = ", ".join(f"{name}={value!r}" for name, value in options.items() if value is not None)
        if self.gamma.shape is None:  # a SymbolBlock's, before anything is known of its input; there is no super() then
            kwargs = ", ".join(f"{name}={value!r}" for name, value in self._kwargs.items())
            plain = f"{type(self).__name__}({kwargs}, in_channels=None)"
        else:
            plain = super().__repr__()
        return plain[:-1] + (f", {chosen})" if chosen else ")")


def _description(block: Block) -> str:
    return block.description() if isinstance(block, SyncBatchNorm) else ""
