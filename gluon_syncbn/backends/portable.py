"""The portable back end: MXNet's own operators, and one custom operator in which per-channel vectors cross devices.

The layer as a graph, for x with channels C and everything else flattened around them to (O, C, I)::

    shift = mean(x)                           about this device's mean; no gradient flows through it
    total = Σ (x − shift)                     (C,)
    squares = Σ (x − shift)²                  (C,)
    weight, bias, saved = AllReduce([shift, total, squares], size(x), γ, β; running statistics)
    y = BatchNorm(x, weight, bias; running statistics)

`BatchNorm` is MXNet's own, so that prediction mode is `nn.BatchNorm` to the last bit and float16 needs no care. In
training mode it normalizes with the statistics of its device, ẑ = (x − mean_d)/std_d, where std_d = √(var_d + ε);
`weight` and `bias` turn that into the result for the whole mini-batch, because both are affine in x::

    γ·(x − mean)/std + β = (γ·std_d/std)·ẑ + (β + γ·(mean_d − mean)/std)

Its momentum is 1, which leaves the running statistics alone; `AllReduce` updates them.

Only `AllReduce` meets other devices, once in each direction, and only with vectors:

forward
    sends this device's count, mean and M2; returns `weight` and `bias`. In prediction mode these are γ and β, and it
    meets no one.
backward
    receives Σ dy·ẑ and Σ dy as the gradients of `weight` and `bias`, sends S1 = Σ dy and S2 = Σ dy·x̂ of this device,
    and gives `total` and `squares` the gradients that turn BatchNorm's dx, which knows one device, into the dx of
    the whole mini-batch. γ and β receive this device's own sums, because Trainer adds those over devices.

Activations never enter the custom operator, since on CPU its inputs may dangle (a converted copy of an array in
oneDNN's layout dies before the callback reads it); vectors are always plain. On CPU, sums are taken as products with
ones, which BLAS does an order of magnitude faster than MXNet's reductions. `shift` keeps the sums exact where the mean
is large against the deviation.
"""

import contextlib
import threading
import time
from typing import Dict, Optional, Union

import mxnet as mx
import numpy as np

from gluon_syncbn.backends import native
from gluon_syncbn.meeting import active_set
from gluon_syncbn.meeting.group import Description, Group, find_group
from gluon_syncbn.meeting.host_arrays import HostAccess
from gluon_syncbn.meeting.rendezvous import SyncBatchNormError
from gluon_syncbn.meeting.statistics import BatchView, Moments, moving_average

_NAME = "gluon_syncbn_all_reduce"
# MXNet can lose the error of a custom operator; what it would then pass on must not look like a result.
_LOST = np.nan
# All that the backward pass is handed where the forward pass was in prediction mode, and met no one.
_PREDICTION = -1.0
_SECONDS_BETWEEN_FAILURES = 0.05
_turn = threading.Lock()
_last_failure = 0.0


def normalize(
    F,
    x,
    gamma,
    beta,
    running_mean,
    running_var,
    group: Union[Group, Description],
    axis: int,
    cast_input: bool,
    after=None,
    name: str = "fwd",
    attr: Optional[Dict[str, str]] = None,
):
    """Batch Normalization of ``x`` with the statistics of the whole group.

    Parameters
    ----------
    F : mx.nd or mx.sym
    x : NDArray or Symbol
        Any shape with at least 2 dimensions; float32, float64, float16, or bfloat16 where MXNet's BatchNorm takes it.
    gamma, beta, running_mean, running_var : NDArray or Symbol
        Shape (C,), of the group's dtype.
    group : Group or Description
    axis : int
        Of the channels.
    cast_input : bool
        Whether x may be of another dtype than the statistics.
    after : Symbol, optional
        The call of this layer that must come before this one, as returned.
    name, attr : str, dict
        Of the last node, if F makes a symbol.

    Returns
    -------
    out, call : NDArray or Symbol
        The result, shape and dtype of x; and what to hand as ``after`` to the next call in the same graph.
    """
    values = F.cast(x, dtype=group.dtype) if cast_input else x
    rows = _as_rows(F, values, axis)
    total, shift, centred = _centre(F, rows, on_gpu=group.on_gpu)
    # One array instead of three vectors in, of two out: each costs the custom operator several microseconds.
    sums = F.stack(F.reshape(shift, shape=(-1,)), total(centred), total(F.square(centred)), axis=0)
    inputs = [sums, F.size_array(x), gamma, beta] + ([] if after is None else [F.BlockGrad(after)])
    affine, call = F.Custom(
        *inputs,
        running_mean,
        running_var,
        op_type=_OPERATOR,
        group=group.reference,
        follows=int(after is not None),
        name=name + "_all_reduce",
    )
    weight, bias = F.split(affine, num_outputs=2, axis=0, squeeze_axis=True)
    out = F.BatchNorm(
        x,
        weight,
        bias,
        running_mean,
        running_var,
        axis=axis,
        eps=group.epsilon,
        momentum=1,
        fix_gamma=False,
        **({} if F is mx.nd else {"name": name, "attr": attr}),
    )
    return out, call


def _as_rows(F, x, axis: int):
    """``x`` as (O, C, I), whatever its rank: dimensions before the channels are merged into O, those behind into I."""
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


def _centre(F, rows, on_gpu: bool):
    """How to sum (O, C, I) to (C,); the mean of ``rows``, (1, C, 1), without gradient; and ``rows`` minus that mean."""
    if on_gpu:
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


@contextlib.contextmanager
def _keeping_the_text():
    """Let the text of an error reach whoever reads the output; MXNet alone would only print it.

    It prints what is raised in any case, with a traceback. Of a device that did not come that says nothing more, so
    that is not raised where its text gets there without.
    """
    try:
        yield
    except Exception as problem:
        _wait_for_turn_to_fail()
        if not (native.leave_error(str(problem)) and isinstance(problem, SyncBatchNormError)):
            raise


def _wait_for_turn_to_fail() -> None:
    """Returns when the last failure has been out for `_SECONDS_BETWEEN_FAILURES`; csrc/operator.cpp says why."""
    global _last_failure
    with _turn:
        turn = _last_failure = max(time.monotonic(), _last_failure + _SECONDS_BETWEEN_FAILURES)
    time.sleep(max(0.0, turn - time.monotonic()))


class _AllReduce(mx.operator.CustomOp):
    def __init__(self, group: Group, device: mx.Context, channels: int):
        super().__init__()
        self._group = group
        self._device = device
        self._channels = channels
        self._host = HostAccess(device)

    @_keeping_the_text()
    def forward(self, is_train, req, in_data, out_data, aux):
        group, host, channels = self._group, self._host, self._channels
        affine, saved = out_data
        gamma, beta = self._gamma(in_data), self._read(in_data[3])
        if not is_train:
            host.write(affine, (2, channels), group.dtype, [gamma, beta])
            host.write(saved, (_saved_size(channels),), np.float64, _PREDICTION)
            return
        participants = active_set.current()
        (size,) = host.read(in_data[1], (1,), np.int64)
        if not size:
            raise ValueError(
                f"SyncBatchNorm '{group.name}': the input on {self._device} is empty. A device without images cannot "
                f"take part; leave it out with gluon_syncbn.devices(...)."
            )
        local = Moments.from_shifted_sums(size / channels, *host.read(in_data[0], (3, channels), group.dtype))
        try:
            merged, number = group.meet_forward(self._device, local, participants)
        except Exception:
            host.write(affine, (2, channels), group.dtype, _LOST)
            host.write(saved, (_saved_size(channels),), np.float64, _LOST)
            raise
        view = BatchView.of(local, merged, group.epsilon)
        host.write(affine, (2, channels), group.dtype, view.weight_and_bias(gamma, beta))
        remembered = np.concatenate([*view, [local.count, merged.count, number, participants]])
        host.write(saved, (_saved_size(channels),), np.float64, remembered)
        for running, value in zip(aux, (merged.mean, merged.var)):
            average = moving_average(self._read(running), value, group.momentum)
            host.write(running, (channels,), group.dtype, average)

    @_keeping_the_text()
    def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
        group, host, channels = self._group, self._host, self._channels
        d_weight, d_bias = host.read(out_grad[0], (2, channels), group.dtype)
        saved = host.read(out_data[1], (_saved_size(channels),), np.float64)
        count, total_count, number, participants = saved[-4:]
        if (saved == _PREDICTION).all():  # BatchNorm's own gradients are complete
            self._write_gradients(in_grad, req, 0, d_weight, d_bias)
            return
        if not (count >= 1 and number >= 1 and active_set.is_known(participants)):
            self._write_gradients(in_grad, req, _LOST, _LOST, _LOST)
            raise SyncBatchNormError(
                f"SyncBatchNorm '{group.name}': the backward pass on {self._device} has nothing to go by, because its "
                f"forward pass was not run: something before it had failed. The first error tells what."
            )
        view = BatchView(*saved[:-4].reshape(3, channels))
        d_beta, d_gamma = view.sums(d_weight, d_bias)
        try:
            sums = np.concatenate([d_beta, d_gamma])
            s1, s2 = group.meet_backward(self._device, sums, int(number), int(participants)).reshape(2, -1)
        except Exception:
            self._write_gradients(in_grad, req, _LOST, _LOST, _LOST)
            raise
        constant, slope = view.correction(self._gamma(in_data), d_weight, d_bias, count, s1, s2, total_count)
        # The gradient of total reaches every x as it is, that of squares times 2·(x − shift); the constant and the
        # slope are about the mean, which lies total/count above shift.
        total = host.read(in_data[0], (3, channels), group.dtype)[1]
        d_sums = [np.zeros(channels), constant - slope * total / count, slope / 2]
        self._write_gradients(in_grad, req, d_sums, d_gamma, d_beta)

    def _gamma(self, in_data):
        return self._read(in_data[2]) if self._group.scale else np.ones(self._channels)

    def _read(self, vector):
        return self._host.read(vector, (self._channels,), self._group.dtype)

    def _write_gradients(self, in_grad, req, sums, gamma, beta):
        """Of size and after, no gradient is ever asked for."""
        vector = (self._channels,)
        gamma = gamma if self._group.scale else 0
        for i, shape, value in ((0, (3, self._channels), sums), (2, vector, gamma), (3, vector, beta)):
            if req[i] != "null":
                self._host.write(in_grad[i], shape, self._group.dtype, value, add=req[i] == "add")


@mx.operator.register(_NAME)
class _AllReduceProp(mx.operator.CustomOpProp):
    @_keeping_the_text()
    def __init__(self, group, follows, **_):  # MXNet hands over a node's hidden attributes too
        super().__init__(need_top_grad=True)
        self._group = find_group(group)
        self._follows = follows == "1"

    def list_arguments(self):
        return ["sums", "size", "gamma", "beta"] + ["after"] * self._follows

    def list_auxiliary_states(self):
        return ["running_mean", "running_var"]

    def list_outputs(self):
        return ["affine", "saved"]

    @_keeping_the_text()
    def infer_shape(self, in_shape):
        if not in_shape[0]:  # MXNet asks before it knows the input, too
            return in_shape, [[]] * 2, [[]] * 2
        channels = in_shape[0][1]
        for name, shape in zip(("gamma", "beta"), in_shape[2:]):
            if len(shape) == 1 and shape[0] not in (0, -1, channels):
                raise ValueError(
                    f"SyncBatchNorm '{self._group.name}': the input has {channels} channels, {name} has {shape[0]}."
                )
        vector, saved = [channels], [_saved_size(channels)]
        inputs = [[3, channels], [1], vector, vector] + [saved] * self._follows
        return inputs, [[2, channels], saved], [vector] * 2

    def infer_type(self, in_type):
        dtype = np.dtype(self._group.dtype).type
        inputs = [dtype, np.int64, dtype, dtype] + [np.float64] * self._follows
        return inputs, [dtype, np.float64], [dtype] * 2

    def create_operator(self, ctx, in_shapes, in_dtypes):
        return _AllReduce(self._group, ctx, in_shapes[0][1])


def _saved_size(channels: int) -> int:
    """Of what the backward pass is handed: a `BatchView`, two counts, the numbers of forward pass and participants.

    MXNet asks while it does not know the channels, too, which is -1.
    """
    return 3 * channels + 4 if channels >= 0 else -1


_OPERATOR = native.wrap(_NAME)
