"""The error of this package's own."""

import mxnet as mx


class SyncBatchNormError(mx.MXNetError):
    """A synchronized layer could not complete a forward or backward pass on every device of its group."""
