"""The error of this package's own."""

import mxnet as mx


class SyncBatchNormError(mx.MXNetError):
    """A synchronized layer could not complete a forward or backward pass on every device of its group.

    Raised where an array is read (``asnumpy``, ``wait_to_read``, ``mx.nd.waitall``) that the layer, or an operator
    after it, should have computed. A subclass of `mxnet.base.MXNetError`.
    """


def own_error(error: mx.MXNetError) -> mx.MXNetError:
    """A `SyncBatchNormError` with the same text if MXNet's error is of a synchronized layer; else the error itself."""
    is_ours = "SyncBatchNorm '" in str(error) and not isinstance(error, SyncBatchNormError)
    return SyncBatchNormError(str(error)) if is_ours else error
