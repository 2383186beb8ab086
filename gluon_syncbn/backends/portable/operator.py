"""The portable back end: MXNet's own operators, and one custom operator in which per-channel vectors cross devices.

The layer as a graph, for x with channels C and everything else flattened around them to (O, C, I)::

    shift = mean(x)                           about this device's mean; no gradient flows through it
    total = Σ (x − shift)                     (C,)
    squares = Σ (x − shift)²                  (C,)
    weight, bias, saved = AllReduce([shift, total, squares], size(x), γ, β; running statistics)
    y = BatchNorm(x, weight, bias; running statistics)

`BatchNorm` is MXNet's own, so that prediction mode is `nn.BatchNorm` to the last bit and float16 needs no care. In
training mode it normalizes with the statistics of its device, ẑ = (x − mean_d)/std_d, where std_d = √(var_d + ε);
`weight` and `bias` turn ẑ into the result for the whole mini-batch, because both are affine in x::

    γ·(x − mean)/std + β = (γ·std_d/std)·ẑ + (β + γ·(mean_d − mean)/std)

The momentum of `BatchNorm` is 1, which leaves the running statistics alone; `AllReduce` updates them.

Only `AllReduce` meets other devices, once in each direction, and only with vectors (`meeting.statistics.BatchView`).
Backward it gives `total` and `squares` the gradients that turn BatchNorm's dx, which knows one device, into the dx of
the whole mini-batch.

Activations never enter the custom operator, since on CPU its inputs may dangle (a converted copy of an array in
oneDNN's layout dies before the callback reads it); vectors are always plain. `shift` keeps the sums exact where the
mean is large against the deviation.
"""

import contextlib
import ctypes
from typing import Any, Iterable, Optional

import mxnet as mx
import numpy as np

from gluon_syncbn.backends.bfloat16 import dtype_name, is_bfloat16, mxnet_takes_bfloat16
from gluon_syncbn.backends.interface import Backend
from gluon_syncbn.backends.portable.group import Group, find_group
from gluon_syncbn.base import library
from gluon_syncbn.base.errors import SyncBatchNormError
from gluon_syncbn.base.library import check_call
from gluon_syncbn.base.mxnet_private import last_registered_operator
from gluon_syncbn.distributed.default import find, is_connected
from gluon_syncbn.graphs.graph import Names, inserted
from gluon_syncbn.meeting.active_set import active_sets
from gluon_syncbn.meeting.statistics import BatchView, Moments
from gluon_syncbn.mxnet_engine import failures

# The same library, called without letting go of the interpreter lock: to take it back costs more than the call.
_LIBMXNET_LOCKED = ctypes.PyDLL(None, handle=library.LIBMXNET._handle)
_OPERATOR = "gluon_syncbn_all_reduce"
_PREDICTION = -1.0  # all of ``saved``, of a forward pass in prediction mode


class PortableBackend(Backend):
    name = "portable"
    group = Group

    def unavailable_reason(self, spec, devices) -> str:
        if spec.native_options():
            return f"only the native back end has {' and '.join(spec.native_options())}"
        if is_connected(spec.process_group) and find(spec.process_group, spec.where) is not None:
            return "only the native back end synchronizes several processes"
        return ""

    def description(self, devices) -> str:
        return "it was asked for"

    def normalize(self, arrays, spec, group, devices):
        _check_dtype(arrays[0].dtype, spec)
        out = _compute(mx.nd, arrays, spec, group, devices, "fwd")[0]
        return mx.nd.relu(out) if spec.activation else out  # Activation would turn NaN into 0

    def nodes(self, norm, spec, group, devices, kind, dtype, after):
        _check_dtype(dtype, spec)
        entries = {f"input{i}": entry for i, entry in enumerate(norm.inputs)}
        order = None if after is None else mx.sym.var("after")
        with Names(norm.name):
            last = {"name": norm.name, "attr": norm.hidden}
            variables = [mx.sym.var(name) for name in entries]
            out, order_token = _compute(mx.sym, variables, spec, group, devices, norm.name, order, last)
            out = mx.sym.relu(out, name=f"{norm.name}_relu") if norm.activation else out
        made = inserted(mx.sym.Group([out, order_token]), entries if after is None else {**entries, "after": after})
        return made[0], made[1]


def _check_dtype(dtype, spec) -> None:
    if is_bfloat16(dtype) and not mxnet_takes_bfloat16():
        raise ValueError(
            f"{spec.where}: the portable back end is made of MXNet's own BatchNorm, which takes no bfloat16 on this "
            f"processor. Use the native back end, or cast the net to float16 or float32."
        )


def _compute(F, arrays, spec, group, devices, name, after=None, last=None):
    """The layer without its activation, of NDArrays or Symbols, and its order token."""
    x, gamma, beta, running_mean, running_var = arrays
    values = x if F is mx.nd and dtype_name(x.dtype) == spec.dtype else F.cast(x, dtype=spec.dtype)
    is_on_gpu = _is_gpu(devices[0]) if devices else mx.context.num_gpus() > 0
    total, shift, centred = _centre(F, _as_rows(F, values, spec.axis), is_on_gpu)
    # One array instead of three vectors in, of two out: each costs the custom operator several microseconds.
    sums = F.stack(F.reshape(shift, shape=(-1,)), total(centred), total(F.square(centred)), axis=0)
    affine, order_token = F.Custom(
        *[sums, F.size_array(x), gamma, beta, *([] if after is None else [F.BlockGrad(after)])],
        running_mean,
        running_var,
        op_type=_OPERATOR,
        group=group,
        follows=int(after is not None),
        name=name + "_all_reduce",
    )
    weight, bias = F.split(affine, num_outputs=2, axis=0, squeeze_axis=True)
    options = {"axis": spec.axis, "eps": spec.epsilon, "momentum": 1, "fix_gamma": False, **(last or {})}
    return F.BatchNorm(x, weight, bias, running_mean, running_var, **options), order_token


def _as_rows(F, x, axis: int):
    """``x`` as (O, C, I), whatever its rank: dimensions before the channels become O, those after them I."""
    if axis == 0:
        return F.reshape(F.expand_dims(x, axis=0), shape=(0, 0, -1))
    if axis > 0:
        for _ in range(axis - 1):
            x = F.reshape(x, shape=(-3, -2))
        return F.reshape(x, shape=(0, 0, -1))
    if axis == -1:
        return F.reshape(F.expand_dims(x, axis=-1), shape=(-1, 0, 1), reverse=True)
    for _ in range(-axis - 2):
        x = F.reshape(x, shape=(-2, -3), reverse=True)
    return F.reshape(x, shape=(-1, 0, 0), reverse=True)


def _centre(F, rows, is_on_gpu: bool):
    """How to sum (O, C, I) to (C,); the mean of ``rows``, (1, C, 1), without gradient; and ``rows`` minus that mean."""
    if is_on_gpu:
        # Not as products: cuBLAS may round the factors to TF32.
        shift = F.BlockGrad(F.mean(rows, axis=(0, 2), keepdims=True))
        return (lambda a: F.sum(a, axis=(0, 2))), shift, F.broadcast_sub(rows, shift)
    one_row = F.slice_axis(F.slice_axis(rows, axis=0, begin=0, end=1), axis=1, begin=0, end=1)
    ones = F.reshape(F.ones_like(one_row), shape=(-1, 1))
    row_means = F.dot(rows, F.broadcast_div(ones, F.sum(ones, axis=0, keepdims=True)))
    shift = F.BlockGrad(F.mean(row_means, axis=(0, 2), keepdims=True))
    shifts = F.BlockGrad(
        F.dot(F.broadcast_like(shift, row_means, lhs_axes=(0,), rhs_axes=(0,)), ones, transpose_b=True)
    )
    return (lambda a: F.sum(F.dot(a, ones), axis=(0, 2))), shift, F.elemwise_sub(rows, shifts)


class _AllReduce(mx.operator.CustomOp):
    """The operator of one node on one device.

    A custom operator has its inputs ready and owns its outputs until it returns. So on a CPU it reads and writes their
    memory: MXNet's own ways ask the engine each time, and a net of twenty layers takes twice as long.
    """

    def __init__(self, group: Group, device: mx.Context):
        super().__init__()
        self._group = group
        self._device = device
        self._is_on_gpu = _is_gpu(device)
        self._forward_generation = 0  # of the step in which the last forward pass was completed

    def forward(self, is_train, req, in_data, out_data, aux):
        self._forward_generation = 0
        try:
            self._train(in_data, out_data, aux) if is_train else self._predict(in_data, out_data)
            self._forward_generation = failures.generation()
        except Exception as problem:
            self._fail(problem, out_data[0], out_data)

    def _predict(self, in_data, out_data):
        self._write(out_data[0], [self._gamma(in_data), self._read(in_data[3])])
        self._write(out_data[1], _PREDICTION)

    def _train(self, in_data, out_data, aux):
        spec = self._group.spec
        set_id = active_sets.current
        (size,), (shift, total, squares) = self._read(in_data[1]), self._read(in_data[0])
        if not size:
            raise ValueError(
                f"{spec.where}: the input on {self._device} is empty. A device without images cannot "
                f"take part; leave it out with gluon_syncbn.devices(...)."
            )
        local = Moments.from_shifted_sums(size / len(shift), shift, total, squares)
        self._check_step("forward")
        rank, forward, _ = self._group.member(self._device, set_id)
        merged, round_number = forward.all_reduce(rank, local.pack())
        view = BatchView.of(local, merged, spec.epsilon)
        self._write(out_data[0], view.weight_and_bias(self._gamma(in_data), self._read(in_data[3])))
        self._write(out_data[1], np.concatenate([*view, [local.count, merged.count, round_number, set_id]]))
        for running, value in zip(aux, (merged.mean, merged.var)):
            self._write(running, spec.momentum * self._read(running) + (1 - spec.momentum) * value)

    def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
        try:
            gradients = self._gradients(out_grad, in_data, out_data)
            # Nobody requests the gradients of `size` and `after`.
            for i, gradient in zip((0, 2, 3), gradients):
                before = self._read(in_grad[i]) if req[i] == "add" else 0
                if req[i] != "null":
                    self._write(in_grad[i], before + gradient)
        except Exception as problem:
            self._fail(problem, out_grad[0], [array for array, how in zip(in_grad, req) if how != "null"])

    def _gradients(self, out_grad, in_data, out_data):
        """The gradients of the sums, of γ and of β."""
        spec = self._group.spec
        if self._forward_generation != failures.generation():
            raise SyncBatchNormError(
                f"{spec.where}: the backward pass on {self._device} cannot be run: its forward pass never ran, "
                f"because an operator before it had failed, or its step was abandoned."
            )
        self._check_step("backward")
        d_weight, d_bias = self._read(out_grad[0])
        saved = self._read(out_data[1])
        if (saved == _PREDICTION).all():  # BatchNorm's own gradients are complete
            return np.zeros((3, len(d_bias))), d_weight * spec.scale, d_bias
        view = BatchView(*saved[:-4].reshape(3, -1))
        count, total_count, round_number, set_id = saved[-4:]
        own_s1, own_s2 = view.sums(d_weight, d_bias)
        rank, _, backward = self._group.member(self._device, int(set_id))
        s1, s2 = np.split(backward.all_reduce(rank, np.concatenate([own_s1, own_s2]), int(round_number))[0], 2)
        constant, slope = view.correction(self._gamma(in_data), d_weight, d_bias, count, s1, s2, total_count)
        # The gradient of total reaches every x as it is, and the gradient of squares times 2·(x − shift); the constant
        # and the slope are about the mean, which lies total/count above shift.
        total = self._read(in_data[0])[1]
        return np.stack([0 * total, constant - slope * total / count, slope / 2]), own_s2 * spec.scale, own_s1

    def _check_step(self, direction):
        if failures.failure():
            raise SyncBatchNormError(
                f"{self._group.spec.where}: the {direction} pass on {self._device} was not run, because the step had "
                f"failed: {failures.failure()}"
            )

    def _read(self, array: mx.nd.NDArray) -> np.ndarray:
        return (array.asnumpy() if self._is_on_gpu else _memory(array)).astype(np.float64)

    def _write(self, array: mx.nd.NDArray, value) -> None:
        if self._is_on_gpu:
            array[:] = np.broadcast_to(value, array.shape).astype(array.dtype)
        else:
            _memory(array)[...] = value

    def _fail(self, problem: Exception, to_poison: mx.nd.NDArray, outputs: Iterable[mx.nd.NDArray]) -> None:
        """Fail the step: reading an output of the operator raises the error, through one of its arrays.

        The error is not raised: MXNet has one place for errors of custom operators, and loses one of two that come
        together. MXNet forgets an error once it is read, so no output may look like a result.
        """
        for array in outputs:
            self._write(array, np.nan)
        failures.fail(str(problem))
        failures.poison(to_poison, str(problem))

    def _gamma(self, in_data):
        gamma = self._read(in_data[2])
        return gamma if self._group.spec.scale else np.ones_like(gamma)


def _is_gpu(device: mx.Context) -> bool:
    return device.device_type == "gpu"


def _memory(array: mx.nd.NDArray) -> np.ndarray:
    address, dtype = ctypes.c_void_p(), np.dtype(array.dtype)
    check_call(_LIBMXNET_LOCKED.MXNDArrayGetData(array.handle, ctypes.byref(address)))
    shape = array.shape
    buffer: Any = (ctypes.c_char * (int(np.prod(shape)) * dtype.itemsize)).from_address(address.value or 0)
    return np.frombuffer(buffer, dtype=dtype).reshape(shape)


@contextlib.contextmanager
def _reporting_errors():
    """Let the text of an error reach the user, where MXNet asks for names or shapes and would only print it."""
    try:
        yield
    except Exception as problem:
        library.set_last_error(str(problem) or repr(problem))
        raise


class _AllReduceProp(mx.operator.CustomOpProp):
    def __init__(self, group, follows, **_):  # MXNet hands over a node's hidden attributes too
        super().__init__(need_top_grad=True)
        self._problem: Optional[Exception] = None
        try:
            self._group = find_group(group)
        except Exception as problem:  # an error that left this method would end in a segmentation fault of MXNet's
            self._problem = problem
        self._has_order_token = follows == "1"

    @_reporting_errors()
    def list_arguments(self):
        if self._problem is not None:
            raise self._problem
        return ["sums", "size", "gamma", "beta"] + ["after"] * self._has_order_token

    def list_auxiliary_states(self):
        return ["running_mean", "running_var"]

    def list_outputs(self):
        return ["affine", "saved"]

    @_reporting_errors()
    def infer_shape(self, in_shape):
        if not in_shape[0]:  # MXNet asks before it knows the input, too
            return in_shape, [[]] * 2, [[]] * 2
        channels = in_shape[0][1]
        for name, shape in zip(("gamma", "beta"), in_shape[2:]):
            if len(shape) == 1 and shape[0] not in (0, -1, channels):
                raise ValueError(f"{self._group.spec.where}: the input has {channels} channels, {name} has {shape[0]}.")
        # Saved for the backward pass: a `BatchView`, two counts, the number of the round, and the active set.
        vector, saved = [channels], [3 * channels + 4 if channels >= 0 else -1]  # -1: MXNet does not know them yet
        inputs = [[3, channels], [1], vector, vector] + [saved] * self._has_order_token
        return inputs, [[2, channels], saved], [vector] * 2

    def infer_type(self, in_type):
        dtype = np.dtype(self._group.spec.dtype).type
        inputs = [dtype, np.int64, dtype, dtype] + [np.float64] * self._has_order_token
        return inputs, [dtype, np.float64], [dtype] * 2

    def create_operator(self, ctx, in_shapes, in_dtypes):
        return _AllReduce(self._group, ctx)


def _register() -> None:
    """Make the operator known to MXNet; wrapped where there is a compiled core (csrc/mxnet/python_operator.cpp)."""
    if library.core is None:
        mx.operator.register(_OPERATOR)(_AllReduceProp)
        return
    inner = f"{_OPERATOR}_inside"
    mx.operator.register(inner)(_AllReduceProp)
    creator = last_registered_operator()
    check_call(library.core.gluon_syncbn_wrap_python_operator(_OPERATOR.encode(), inner.encode(), creator))


_register()
