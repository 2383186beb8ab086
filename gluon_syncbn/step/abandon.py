"""Abandoning a step that cannot be finished, so that the next one begins clean.

When an exception ends a step between the forward passes of two devices, the first device waits for the second, and its
vectors would meet the second device's next step. So the step is abandoned: every waiting device gets an error, and
nothing runs any more. This happens by itself where an exception leaves ``autograd.record()``, and at the beginning of a
step if the step before broke off between the ``backward()`` of two devices. Where each device has a thread, the first
that begins the next step abandons the one before, and the others wait for that thread (`Progress.taking_turns`).

A step that has failed (`mxnet_engine.failures`) must be abandoned, too: until then no synchronized layer computes, and
no weight is updated. If the program does not do it, the next ``autograd.record()`` does, or raises the error of the
step if nobody has seen it.
"""

import logging
import sys

import mxnet as mx

from gluon_syncbn.base.errors import LAYER, SyncBatchNormError, text_of
from gluon_syncbn.base.mxnet_private import arrays_of
from gluon_syncbn.meeting import waiting
from gluon_syncbn.meeting.processes import abandon_on_all_processes, have_raised
from gluon_syncbn.mxnet_engine import cpu_resources, failures
from gluon_syncbn.step.early_reading import noticing_what_cannot_end
from gluon_syncbn.step.exits import finish_pending_work
from gluon_syncbn.step.steps import steps

_log = logging.getLogger("gluon_syncbn")
_ABANDONED = "the step was abandoned"


def abandon_step() -> None:
    """Abandon the rest of a step, and return when nothing runs any more: the next step is right.

    Call it after you have caught an exception (a bad batch, Ctrl-C, an error of this package), before the next step or
    before you save the net. Where the exception has left ``with autograd.record()`` or
    ``with gluon_syncbn.devices(...)`` it has been called already; to call it twice does no harm. Where each device has
    a thread, call it in any case, when all threads have ended their part of the step.

    Weights and the states of optimizers are then as they were before the step; states that were loaded since stay. If a
    backward pass has failed, some may be updated instead, with their whole gradient, on all devices; the log says which
    of the two holds. Running statistics are as they were before the step, or as its own forward passes have made them.
    Do not use its outputs and gradients: a Trainer does not take them for new ones, and gradients with
    ``grad_req='add'`` are set to zero.

    A device that waits for others in a synchronized layer waits for two seconds more, in case they are on their way.

    In a job of several processes, the processes that wait for this one in the step get an error, and call this too;
    then the next step is right. Where Horovod carries their vectors, which it cannot take back, the job has ended
    (docs/processes.md).

    Examples
    --------
    >>> for images, labels in loader:
    ...     try:
    ...         step(images, labels)
    ...     except (ValueError, mx.MXNetError) as error:
    ...         print("batch skipped:", error)
    ...         gluon_syncbn.abandon_step()
    """
    _abandon(is_over=True)


def leave_record() -> None:
    """As `abandon_step`, where an exception leaves ``record()``: other threads may be in the step yet."""
    _abandon(is_over=False)


def _abandon(is_over: bool) -> None:
    error, was_seen, was_under_way = failures.failure(), failures.was_seen(), steps.progress.is_under_way()
    with waiting.cut_short(_ABANDONED):
        pending = finish_pending_work()
    cpu_resources.close_step()
    has_failed = bool(failures.failure())
    updated = steps.updates.undo()
    number = steps.progress.end_step(is_over)
    abandon_on_all_processes(was_under_way or (has_failed and not failures.is_by_reading()), number)
    steps.progress.forget()
    failures.reset()
    failures.forget_seen()
    if has_failed:
        steps.updates.forget_gradients()
        # Devices that waited until now have an error that says no more than that the step is abandoned.
        is_known = was_seen or (not error and _ABANDONED in pending)
        unseen = "" if is_known else f" Its error was not read: {_with_cause(error or pending, pending)}"
        _log.warning("A step was abandoned. %s%s", updated, unseen)


def leave_failed_step() -> None:
    """Begin a step: abandon one that has failed before, or raise its error."""
    if failures.failure() or have_raised():
        with steps.progress.taking_turns():
            error = failures.failure()  # if another thread has not abandoned the step meanwhile
            if have_raised() or (error and failures.was_seen()):
                abandon_step()
            elif error:
                error = _with_cause(error, finish_pending_work())
                failures.tell()
                unseen = f"A step has failed, and its error was not read. {error}"
                raise SyncBatchNormError(failures.with_advice(unseen))
    elif failures.is_in_use():
        failures.forget_seen()  # errors that are not of the step that begins
    steps.progress.begin_step()


def refuse_after_a_failure(write: str) -> None:
    """SyncBatchNormError if the step has failed, for a method that writes where steps write.

    MXNet would skip the copy, as it has skipped the update: a checkpoint would be lost.
    """
    error = failures.failure()
    if error:
        failures.tell()
        refused = f"{write}: nothing was written, because the step has failed: {error}"
        raise SyncBatchNormError(failures.with_advice(refused))


def noting_set_data(set_data, parameter, /, *args, **kwargs):
    """``Parameter.set_data``: refuse it after a failure, and tell the Trainers that compare values with processes."""
    for trainer in list(steps.progress.under_way.trainers):
        trainer.note_set_data(parameter)
    if failures.failure() and _may_write(parameter):
        refuse_after_a_failure("Parameter.set_data")
    return set_data(parameter, *args, **kwargs)


def copying_after_a_failure(copy, parameter, /, *args, **kwargs):
    """``Parameter.reset_ctx`` and ``cast``: as the next step would, they abandon a step that has failed, or raise its
    error. MXNet would not compute the copies of arrays with an error, and the Parameter would have memory that nobody
    has written.
    """
    if failures.is_in_use() and _may_write(parameter):
        leave_failed_step()
        with noticing_what_cannot_end(sys._getframe(1).f_back):
            for array in arrays_of(parameter):
                array.wait_to_read()  # a step that is to fail may not have failed yet
    return copy(parameter, *args, **kwargs)


def _may_write(parameter: mx.gluon.Parameter) -> bool:
    """Whether a step that has failed may write the Parameter."""
    statistics = {item for layer in steps.layers.blocks() for item in (layer.running_mean, layer.running_var)}
    return parameter in statistics or parameter in steps.updates.parameters()


def _with_cause(error: str, pending: str) -> str:
    """The first error of a step may only say that MXNet skipped something; the one that is pending says why."""
    if error in pending:
        return pending[pending.index(error) :]
    return error if pending in error else f"{error} MXNet's own error: {pending}"


def failing_what_cannot_be_read(read, *array):
    """``asnumpy``, ``wait_to_read``, ``waitall``: when they raise, the step has failed, for any operator.

    MXNet then forgets the error for all arrays that share it, and runs the operators after them. So the step fails
    before an array is read; and within an update, which MXNet has yet to skip, it does not read the array at all (LARS
    and the loss scaler of AMP read gradients there). An error of a synchronized layer is raised as a
    `SyncBatchNormError`.
    """
    with noticing_what_cannot_end(sys._getframe(1).f_back):  # the caller of the extended method
        return _read(read, *array)


def failing_with_all_work(wait_for_all) -> int:
    """``MXNDArrayWaitAll``, which ``waitall`` calls under each of its names."""
    with noticing_what_cannot_end(sys._getframe(1).f_back):
        _read(lambda: failures.check_all_work(wait_for_all))
    return 0


def _read(read, *array):
    has_error = array and failures.is_in_use() and not failures.is_readable(*array)
    if has_error and steps.updates.here.updates and not failures.is_by_reading():
        failures.refuse_update()
    try:
        done = read(*array)
    except mx.MXNetError as error:
        if failures.is_in_use():
            error = failures.explained(error)
            text = text_of(error)
            failures.fail_by_reading(text)
            if not array and LAYER in failures.failure() and LAYER not in text:
                # It is the first of all errors that ``waitall`` raises.
                raise SyncBatchNormError(_with_cause(failures.failure(), text)) from None
        is_ours = LAYER in str(error) and not isinstance(error, SyncBatchNormError)
        raise (SyncBatchNormError(str(error)) if is_ours else error) from None
    if has_error:
        raise SyncBatchNormError(
            "MXNet could not compute this array. Its error was raised in another thread that read it, or it was "
            "dropped when the step was abandoned."
        )
    return done
