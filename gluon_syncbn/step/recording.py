"""Follows a step through the methods of MXNet that it calls: ``record()`` and ``backward()``.

Each function but `begin_forward` makes the extended form of a method (`gluon_syncbn._hooks`).
"""

import contextlib
import logging
from typing import NamedTuple

import mxnet as mx

from gluon_syncbn.base.errors import SyncBatchNormError
from gluon_syncbn.base.mxnet_private import device_of, device_of_handle, has_fresh_gradient, is_record, trains
from gluon_syncbn.mxnet_engine import cpu_resources, failures
from gluon_syncbn.step.abandon import abandon_step, leave_failed_step, leave_record
from gluon_syncbn.step.passes import Passes
from gluon_syncbn.step.reached import take_fresh_gradient
from gluon_syncbn.step.steps import LayerInStep, steps
from gluon_syncbn.step.unmet import check_met

_log = logging.getLogger("gluon_syncbn")


def noticing_record(enter, scope):
    """The beginning of ``autograd.record()``, and so of a step."""
    if is_record(scope):
        leave_failed_step()
        steps.progress.close_if_balanced()
        check_met()
        steps.progress.begin_record(trains(scope))
    enter(scope)  # last: Ctrl-C behind it would leave autograd recording


def begin_forward(sync: LayerInStep, device: mx.Context) -> None:
    """Begin a forward pass of a `SyncBatchNorm`; in training, abandon the step before if that broke off."""
    passes, progress = sync.passes, steps.progress
    if not mx.autograd.is_training():
        if mx.autograd.is_recording():
            progress.begin_recorded_prediction(passes, device)
        return
    is_recording = mx.autograd.is_recording()
    looks = is_recording and (progress.begins_record() or progress.broken_off(passes, device))
    # Another thread may be about to abandon the step before. It must know which devices have begun the next one.
    with progress.taking_turns() if looks else contextlib.nullcontext():
        broken = progress.broken_off(passes, device) if looks else None
        if broken is not None:
            _abandon_broken_step(broken, device)
        if not is_recording:
            progress.close_if_balanced()
        progress.begin_forward(passes, device)
    cpu_resources.open_step()


def _abandon_broken_step(broken: Passes, device: mx.Context) -> None:
    """Abandon the step that broke off at a layer; and the next one, with an error, if another device has begun it."""
    started = ", ".join(str(item) for subgroup in broken.subgroups for item in subgroup.ahead("backward"))
    subgroup = broken.subgroup(device)
    in_next_step = [] if subgroup is None else subgroup.ahead("forward")
    what = f"SyncBatchNorm '{broken.name}': backward() of the last step was called for {started} only"
    _log.warning("%s, and is abandoned now. (Did an exception come in between?) Its gradients are undefined.", what)
    abandon_step()
    steps.progress.begin_step()
    if in_next_step and device not in in_next_step:
        raise SyncBatchNormError(
            f"{what}. That step is abandoned, and so is this one, which {', '.join(map(str, in_next_step))} had begun. "
            f"Where each device has a thread, call gluon_syncbn.abandon_step() after an exception."
        )


def noticing_end_of_record(leave, scope, kind, value, trace):
    """The end of ``autograd.record()``: an exception that leaves it abandons the step."""
    leave(scope, kind, value, trace)
    if is_record(scope):
        if kind is not None and steps.layers.in_use():
            leave_record()
        steps.progress.end_record()


class _Head(NamedTuple):
    """An array that MXNet's library knows by this handle."""

    handle: int
    ctx: mx.Context


def counting_backward(
    backward, num_heads, heads, head_gradients, num_variables, variables, retain_graph, create_graph, *rest
):
    """``MXAutogradBackwardEx``: ``backward()`` of an array, and of several with ``autograd.backward``; and
    ``autograd.grad``, which ends the step unless more is to be done with its graph."""
    args = num_heads, heads, head_gradients, num_variables, variables, retain_graph, create_graph, *rest
    found = [_Head(handle, device_of_handle(handle)) for handle in heads[:num_heads]]
    devices = [head.ctx for head in found]
    is_grad = bool(num_variables)
    if failures.is_in_use():
        cpu_resources.open_step()
        for head in () if is_grad else found:
            failures.watch([head], f"an operator before backward() on {head.ctx} had failed.", are_heads=True)
    steps.progress.begin_backward(devices, writes_gradients=not is_grad)
    code = -1
    try:
        if steps.progress.has_copies_in_graphs:  # it may go from device to device, and so in several calls
            code = backward(*args)
        else:
            code = cpu_resources.in_one_call(None, None, backward, *args)
    finally:
        steps.progress.end_backward(devices, is_done=code == 0, writes_gradients=not is_grad)
        if is_grad and code == 0 and not retain_graph.value and not create_graph.value:
            steps.progress.under_way.end_grad()
    return code


def noticing_copies(copyto, array, other):
    """``copyto`` of an array, which ``as_in_context`` calls: backward passes may go from device to device then."""
    if not (steps.progress.has_copies_in_graphs or cpu_resources.shared_because()) and mx.autograd.is_recording():
        devices = device_of(array), device_of(other) if isinstance(other, mx.nd.NDArray) else other
        are_cpus = all(getattr(device, "device_type", "") == "cpu" for device in devices)
        if are_cpus and devices[0] != devices[1]:
            # Whether autograd has computed this array, or computes its gradient.
            steps.progress.has_copies_in_graphs = has_fresh_gradient(array) or take_fresh_gradient(array)
    return copyto(array, other)
