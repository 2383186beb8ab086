"""The package's error, and texts that errors share."""

import mxnet as mx


class SyncBatchNormError(mx.MXNetError):
    """A synchronized layer could not complete a forward or backward pass on every device of its group.

    Raised where an array is read (``asnumpy``, ``wait_to_read``, ``mx.nd.waitall``) that the layer, or an operator
    after it, should have computed. A subclass of `mxnet.base.MXNetError`.
    """


LAYER = "SyncBatchNorm '"  # the beginning of a layer's error
# The beginning of the advice at the end of an error, here and in the core (csrc/mxnet/engine.cpp).
TO_GO_ON = "To go on, "
ADVICE = f"{TO_GO_ON}call gluon_syncbn.abandon_step(), or begin the next step."
STEP_IS_UNDER_WAY = "a step is under way. Call it between two steps, or abandon_step() first if one broke off."


def text_of(error: BaseException) -> str:
    """The text of an error, without the stack trace that MXNet appends."""
    return str(error).split("\nStack trace")[0].strip()


def listed_reasons(*reasons: str, end: str) -> str:
    """The end of an error, with the usual reasons on a line each, the likeliest first."""
    # MXNet takes lines that begin with spaces for a stack trace.
    lines = "".join(f"\n({number}) {reason}" for number, reason in enumerate(reasons, start=1))
    return f"Usual reasons:{lines}\n{end}"
