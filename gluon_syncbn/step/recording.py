"""Follows a step through the methods of MXNet's that it calls: ``record()``, ``backward()``, those of an ``Executor``.

Each function but `begin_forward` makes the extended one of a method (`gluon_syncbn._hooks`). What is noted is explained
in `step.steps`.
"""

import functools
import logging
from typing import Iterable, List, Optional

import mxnet as mx

from gluon_syncbn.base.mxnet_private import device_of, has_fresh_gradient, is_record, trains
from gluon_syncbn.mxnet_engine import cpu_resources, failures
from gluon_syncbn.step.abandon import abandon_step, leave_failed_step
from gluon_syncbn.step.steps import steps, take_fresh_gradient
from gluon_syncbn.step.unmet import check_met, note_record

_log = logging.getLogger("gluon_syncbn")
# Whether autograd has ever recorded a copy from one CPU device to another. In a backward pass, what one device computes
# may then wait for another device.
_copies_in_graphs = False


def noticing_record(enter):
    """The beginning of ``autograd.record()``, and so of a step."""

    @functools.wraps(enter)
    def __enter__(self):
        if is_record(self):
            leave_failed_step()
            steps.close_if_balanced()
            check_met()
            note_record(trains(self))
            steps.begin_record()
        enter(self)  # last: Ctrl-C behind it would leave autograd recording

    return __enter__


def begin_forward(layer: mx.gluon.nn.BatchNorm, device: mx.Context) -> None:
    """Begin a forward pass of a `SyncBatchNorm`; in training, abandon the step before if that broke off."""
    if not mx.autograd.is_training():
        return
    passes = layer._sync.passes
    if mx.autograd.is_recording() and passes.is_unfinished(device, steps.begins_record()):
        started = ", ".join(map(str, passes.started()))
        _log.warning(
            "SyncBatchNorm '%s': backward() of the last step was called for %s only, and is abandoned now. (Did an "
            "exception come in between?) Its gradients are undefined.",
            layer.name,
            started,
        )
        abandon_step()
    if not mx.autograd.is_recording():
        steps.close_if_balanced()
    steps.begin_forward(passes, device)
    cpu_resources.open_step()


def noticing_end_of_record(leave):
    """The end of ``autograd.record()``: an exception that leaves it abandons the step."""

    @functools.wraps(leave)
    def __exit__(self, kind, value, trace):
        try:
            if is_record(self):
                steps.end_record()
        finally:
            leave(self, kind, value, trace)
        if kind is not None and is_record(self) and steps.layers():
            abandon_step()

    return __exit__


def counting_backward(backward):
    """``backward()`` of an array, and of several with ``autograd.backward``: counts the passes that it starts."""

    @functools.wraps(backward)
    def counted_backward(*args, **kwargs):
        heads = _listed(args[0] if args else kwargs.get("heads"))
        if failures.is_in_use():
            for head in heads:
                failures.watch(
                    [head], f"an operator before backward() on {device_of(head)} had failed.", are_heads=True
                )
        steps.count_heads(heads)
        steps.begin_backward()
        try:
            done = _in_one_backward(backward, *args, **kwargs)
        finally:
            reached = steps.end_backward()
        steps.note_backward(reached)
        return done

    return counted_backward


def _in_one_backward(backward, *args, **kwargs):
    """Call it, as one call if it cannot go from device to device."""
    if failures.is_in_use():
        cpu_resources.open_step()
    if _copies_in_graphs:
        return backward(*args, **kwargs)
    return cpu_resources.in_one_call(None, None, backward, *args, **kwargs)


def noticing_copies(copyto):
    """``copyto`` of an array, which ``as_in_context`` calls: may backward passes go from device to device now?"""

    @functools.wraps(copyto)
    def noticed_copyto(self, other):
        global _copies_in_graphs
        if not (_copies_in_graphs or cpu_resources.shared_because) and mx.autograd.is_recording():
            devices = device_of(self), device_of(other) if isinstance(other, mx.nd.NDArray) else other
            are_cpus = all(getattr(device, "device_type", "") == "cpu" for device in devices)
            if are_cpus and devices[0] != devices[1]:
                # Whether autograd has computed this array, or computes its gradient.
                _copies_in_graphs = has_fresh_gradient(self) or take_fresh_gradient(self)
        return copyto(self, other)

    return noticed_copyto


def _listed(heads) -> List[mx.nd.NDArray]:
    """Without what MXNet will refuse."""
    listed = heads if isinstance(heads, (list, tuple)) else [heads]
    return [head for head in listed if isinstance(head, mx.nd.NDArray)]


def noticing_grad(grad):
    """``autograd.grad``: what it returns is the end of the step, unless more is to be done with its graph."""

    @functools.wraps(grad)
    def noticed_grad(heads, variables, head_grads=None, retain_graph=None, create_graph=False, train_mode=True):
        steps.count_heads(_listed(heads))
        options = head_grads, retain_graph, create_graph, train_mode
        done = _in_one_backward(grad, heads, variables, *options)
        if not create_graph and not retain_graph:
            steps.end_grad()
        return done

    return noticed_grad


def noticing_forward_of_symbols(forward):
    """``Executor.forward``; in training a step of symbols and Modules begins with it.

    MXNet gives operators that are pending the mode of the next call. So what was called in the other mode runs first.
    And it does not know that the call writes running statistics: ``Module.get_params`` would read those from before.
    """

    @functools.wraps(forward)
    def noticed_forward(self, is_train=False, **kwargs):
        if self in steps.executors:
            if steps.executors[self] not in (None, bool(is_train)):
                for output in self.outputs:
                    output.wait_to_read()
            steps.executors[self] = bool(is_train)
        if is_train:
            leave_failed_step()
            if self in steps.executors:
                steps.close_if_balanced()
                cpu_resources.open_step()
            steps.begin_executor(self)
        outputs = forward(self, is_train, **kwargs)
        if is_train:
            _watch_statistics(self, outputs)
        return outputs

    return noticed_forward


def _watch_statistics(executor: mx.executor.Executor, computed: Iterable[Optional[mx.nd.NDArray]]) -> None:
    """The call that computes these arrays writes running statistics, MXNet's own BatchNorm in the backward pass."""
    arrays = [array for array in computed if array is not None]
    if arrays and executor in steps.executors and failures.is_in_use():
        device = device_of(arrays[0])
        error = f"an operator of a symbol, or one before it, had failed on {device}."
        failures.watch([array for array in arrays if device_of(array) == device], error, executor.aux_arrays)


def noticing_backward_of_symbols(backward):
    """``Executor.backward``."""

    @functools.wraps(backward)
    def noticed_backward(self, *args, **kwargs):
        done = backward(self, *args, **kwargs)
        _watch_statistics(self, self.grad_arrays or ())
        steps.end_executor(self)
        return done

    return noticed_backward
