"""A block that passes its input on, late: for tests in which devices must arrive in another order."""

import time

import mxnet as mx
from mxnet.gluon import HybridBlock

_delays = []


class Late(HybridBlock):
    """Sleeps ``seconds(device)`` in the forward and the backward pass, on a thread of MXNet's for custom operators."""

    def __init__(self, seconds):
        super().__init__()
        _delays.append(seconds)
        self._number = len(_delays) - 1

    def hybrid_forward(self, F, x):
        return F.Custom(x, op_type="late", number=self._number)


class _Late(mx.operator.CustomOp):
    def __init__(self, seconds, device):
        super().__init__()
        self._seconds, self._device = seconds, device

    def forward(self, is_train, req, in_data, out_data, aux):
        time.sleep(self._seconds(self._device))
        self.assign(out_data[0], req[0], in_data[0])

    def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
        time.sleep(self._seconds(self._device))
        self.assign(in_grad[0], req[0], out_grad[0])


@mx.operator.register("late")
class _LateProp(mx.operator.CustomOpProp):
    def __init__(self, number):
        super().__init__()
        self._seconds = _delays[int(number)]

    def create_operator(self, ctx, shapes, dtypes):
        return _Late(self._seconds, ctx)
