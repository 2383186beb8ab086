"""The error of this package's own."""


class SyncBatchNormError(RuntimeError):
    """A synchronized layer could not complete a forward or backward pass on every device of its group."""
