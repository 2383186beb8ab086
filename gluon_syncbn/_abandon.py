"""Giving up a step that cannot be finished, so that the next one begins clean.

When an exception ends a step between the forward passes of two devices, the first of them waits for the second, and
what it has brought would meet the second device's next step. So such a step is given up: whoever waits is released with
an error, and nothing runs any more. Where an exception leaves ``autograd.record()`` this happens by itself.
"""

import mxnet as mx

from gluon_syncbn import _patience
from gluon_syncbn._lifecycle import finish_pending_work
from gluon_syncbn.block import live_layers


def abandon_step() -> None:
    """Give up what is left of a step, and return when nothing runs any more: the next step is right.

    To be called before the next step by whoever has caught an exception (a bad batch, Ctrl-C, an error of this package)
    and goes on, or saves the net. Where the exception has left ``with autograd.record()`` or
    ``with gluon_syncbn.devices(...)`` it has been called already; to call it twice does no harm.

    A device that waits for others in a synchronized layer waits for two seconds more, in case they are on their way.
    Errors of synchronized layers that no one has read are dropped, others are logged, and the step's outputs are not to
    be used. Parameters and running statistics keep what completed passes have made of them.

    Examples
    --------
    >>> for images, labels in loader:
    ...     try:
    ...         step(images, labels)
    ...     except (ValueError, mx.MXNetError) as error:
    ...         print("batch skipped:", error)
    ...         gluon_syncbn.abandon_step()
    """
    try:
        _patience.limit("the step was abandoned")
        finish_pending_work("When a step was abandoned", expected="SyncBatchNorm '")
    finally:
        _patience.limit("")


def abandon_steps_that_raise() -> None:
    """From now on an exception that leaves ``autograd.record()`` abandons the step.

    MXNet has no hook for that, so the method that ends such a scope is extended.
    """
    scope = mx.autograd._RecordingStateScope
    end = scope.__exit__

    def __exit__(self, kind, value, trace):
        end(self, kind, value, trace)
        if kind is not None and self._enter_is_record and live_layers():
            abandon_step()

    scope.__exit__ = __exit__
