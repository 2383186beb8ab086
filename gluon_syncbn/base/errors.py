"""The error of this package's own."""

import mxnet as mx


class SyncBatchNormError(mx.MXNetError):
    """A synchronized layer could not complete a forward or backward pass on every device of its group.

    Raised where an array is read (``asnumpy``, ``wait_to_read``, ``mx.nd.waitall``) that the layer, or an operator
    after it, should have computed. A subclass of `mxnet.base.MXNetError`.
    """
