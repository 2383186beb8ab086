"""Giving up a step that cannot be finished, so that the next one begins clean.

When an exception ends a step between the forward passes of two devices, the first of them waits for the second, and
what it has brought would meet the second device's next step. So such a step is given up: whoever waits is released with
an error, and nothing runs any more. This happens by itself where an exception leaves ``autograd.record()``, and at the
beginning of a step if the one before broke off between the ```backward()`` of two devices.
"""

import functools
import logging

import mxnet as mx

from gluon_syncbn.base.mxnet_private import is_record
from gluon_syncbn.meeting import waiting
from gluon_syncbn.meeting.processes import abandon_on_all_processes
from gluon_syncbn.process.lifecycle import finish_pending_work
from gluon_syncbn.process.live_layers import live_layers
from gluon_syncbn.process.passes import forget_passes

_log = logging.getLogger("gluon_syncbn")


def abandon_step() -> None:
    """Give up what is left of a step, and return when nothing runs any more: the next step is right.

    To be called before the next step by whoever has caught an exception (a bad batch, Ctrl-C, an error of this package)
    and goes on, or saves the net. Where the exception has left ``with autograd.record()`` or
    ``with gluon_syncbn.devices(...)`` it has been called already; to call it twice does no harm.

    A device that waits for others in a synchronized layer waits for two seconds more, in case they are on their way.
    Errors of synchronized layers that no one has read are dropped, others are logged, and the step's outputs are not to
    be used. Parameters and running statistics keep what completed passes have made of them.

    In a job of several processes, those that wait for this one in the step get an error, and call this too; then the
    next step is right. Through Horovod, which cannot take a step back, the job has ended.

    Examples
    --------
    >>> for images, labels in loader:
    ...     try:
    ...         step(images, labels)
    ...     except (ValueError, mx.MXNetError) as error:
    ...         print("batch skipped:", error)
    ...         gluon_syncbn.abandon_step()
    """
    with waiting.cut_short("the step was abandoned"):
        finish_pending_work("When a step was abandoned", expected="SyncBatchNorm '")
    abandon_on_all_processes()
    forget_passes()


def begin_forward(layer: mx.gluon.nn.BatchNorm, device: mx.Context) -> None:
    """Python starts a forward pass of a `SyncBatchNorm`; in training, abandons the step before if that broke off."""
    if not (mx.autograd.is_recording() and mx.autograd.is_training()):
        return
    passes = layer._passes
    if passes.is_unfinished():
        started = ", ".join(map(str, passes.started()))
        _log.warning(
            "SyncBatchNorm '%s': backward() of the last step was called for %s only, and is given up now. (Did an "
            "exception come in between?) Its gradients are undefined.",
            layer.name,
            started,
        )
        abandon_step()
    passes.begin_forward(device)


def abandoning_what_raises(leave):
    """The end of ``autograd.record()``: an exception that leaves it abandons the step. MXNet has no hook for that."""

    @functools.wraps(leave)
    def __exit__(self, kind, value, trace):
        leave(self, kind, value, trace)
        if kind is not None and is_record(self) and live_layers():
            abandon_step()

    return __exit__
