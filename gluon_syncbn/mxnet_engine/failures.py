"""Failed steps: operations for MXNet's engine by which they are noticed, and change no weight.

csrc/mxnet/engine.h has the protocol, csrc/meeting/step.h the states of a step. Python only says where: it watches the
outputs of nets (`graphs.calls`, `block`) and the heads of backward passes, and puts a gate before each optimizer
(`step.updates`).

The watch after a call of a graph also writes the running statistics of its layers. The engine orders operators by the
arrays that they write, and a graph with ``static_alloc`` and ``static_shape`` counts running statistics as only read.
The next read would not wait: ``save_parameters``, or the first ``Trainer.step``, which copies every parameter and
writes the copy back, so that an update was lost. And while the outputs of one call are in use, the next call of the net
runs in memory of its own, and nothing would order the two: a layer would meet the second call of one device with the
first of another. (`graphs.lower` puts several calls of a layer within one graph in order.) The call itself would not
wait for earlier reads, as of a prediction by another net with these statistics: so they are sealed before it.

Where nothing is compiled, nothing is watched, and a gate waits until all gradients are there.
"""

import ctypes
import os
import threading
import time
from typing import Callable, Iterable, List, NoReturn, Sequence

import mxnet as mx

from gluon_syncbn.base import library
from gluon_syncbn.base.errors import ADVICE, LAYER, TO_GO_ON, text_of
from gluon_syncbn.base.library import LIBMXNET, check_call
from gluon_syncbn.base.mxnet_private import device_of

_ENDED = " has ended"  # a process
_SECONDS_TO_FAIL = 0.05
_EXCEPTIONS = 1024  # for which MXNet is given memory; a failed step throws some per net and gate
_OF_NO_ACCOUNT = "gluon_syncbn: this error is of no account."


class _Failure:
    """The state of the step in Python. Error, time and generation are the compiled library's, where there is one."""

    def __init__(self) -> None:
        self.is_in_use = self.has_memory = False
        self.error, self.failed_at, self.generation = "", 0.0, 1
        self.is_told = False  # whether the user has been told: an array could not be read, or its error was raised
        self.lock = threading.Lock()
        self.turn_to_fail = threading.Lock()  # where nothing is compiled
        self.turn_to_give_memory = threading.Lock()


_state = _Failure()


def begin_use() -> None:
    """There are synchronized layers in this process: steps are watched from now on.

    MXNet's NaiveEngine raises each error where it happens.
    """
    _state.is_in_use = os.environ.get("MXNET_ENGINE_TYPE") != "NaiveEngine"


def is_in_use() -> bool:
    return _state.is_in_use


def end_use() -> None:
    """The process ends, and MXNet's engine with it, which then skips everything."""
    _state.is_in_use = False


# The state of the step


def fail(error: str) -> None:
    """The step has failed; its first error stays."""
    if library.core is not None:
        return library.core.gluon_syncbn_fail_step(error.encode())
    with _state.lock:
        if not _state.error:
            _state.error, _state.failed_at = error, time.monotonic()


def fail_by_reading(error: str) -> None:
    """The step counts as failed: an array could not be read, perhaps one that no layer has to do with."""
    tell()
    if library.core is None:
        return fail(error)
    library.core.gluon_syncbn_fail_step_by_reading(error.encode())


def is_readable(array: mx.nd.NDArray) -> bool:
    """Wait until ``array`` is computed. If it has an error instead, the step has failed, before MXNet can forget that.

    An empty array is readable: MXNet does not look for its error.
    """
    if library.core is None:
        return True
    try:
        is_computed = library.core.gluon_syncbn_is_readable(array.handle) != 0
    except KeyboardInterrupt:  # it may have ended this wait by failing the step
        if failure():
            tell()
        raise
    if is_computed or not array.size:
        return True
    library.core.gluon_syncbn_fail_step_by_reading(b"an array was read that MXNet could not compute.")
    return False


def is_by_reading() -> bool:
    """Whether nothing but `fail_by_reading` tells of the failure. Where nothing is compiled, nobody asks."""
    return library.core is not None and bool(library.core.gluon_syncbn_step_is_by_reading())


def failure() -> str:
    """The first error of the step; empty if it has not failed."""
    return _state.error if library.core is None else library.core.gluon_syncbn_step_failure().decode()


def failed_at() -> float:
    """Return when the step failed, on the clock of `time.monotonic`."""
    return _state.failed_at if library.core is None else library.core.gluon_syncbn_step_failed_at()


def generation() -> int:
    """Count abandoned steps, from 1: a backward pass must have the number of its forward pass."""
    return _state.generation if library.core is None else library.core.gluon_syncbn_step_generation()


def reset() -> None:
    """The step was abandoned; nothing runs."""
    _state.error, _state.generation = "", _state.generation + 1
    _state.is_told = False
    if library.core is not None:
        library.core.gluon_syncbn_reset_step()


# Whether somebody has seen the error. MXNet keeps the text of the last error that it has thrown to a thread.


def last_error() -> str:
    """The last error that this thread has seen, or ""."""
    return LIBMXNET.MXGetLastError().decode(errors="replace")


def was_seen() -> bool:
    """Whether the user knows of the failure: the error was raised, or this thread has seen one since `forget_seen`.

    Where a layer has failed, only an error of a layer counts: another may be of the step or not.
    """
    seen = last_error()
    is_ours = LAYER in seen or (library.core is None and "potrf" in seen)  # see poison
    return _state.is_told or (is_ours if failure().startswith(LAYER) else bool(seen))


def tell() -> None:
    """Note that the error of the failure is about to be raised."""
    _state.is_told = True


def set_last_error(error: str) -> None:
    LIBMXNET.NNAPISetLastError(ctypes.c_char_p(error.encode()))


def forget_seen() -> None:
    if last_error():
        set_last_error("")


# Operations for the engine


def _handles(arrays: Sequence[mx.nd.NDArray]):
    return (ctypes.c_void_p * len(arrays))(*(array.handle for array in arrays))


def _distinct(arrays: Iterable[mx.nd.NDArray]) -> List[mx.nd.NDArray]:
    """The engine waits for ever for an array that an operation writes twice."""
    return list({array.handle.value: array for array in arrays}.values())


def watch(
    arrays: Sequence[mx.nd.NDArray], error: str, statistics: Iterable[mx.nd.NDArray] = (), are_heads: bool = False
) -> None:
    """Notice if MXNet skips operators that compute ``arrays``, of one device: the step fails with this ``error``.

    The same call writes these running ``statistics``: every read comes after it, and if the step has failed, nothing
    writes them any more. The ``arrays`` may be the heads of a backward pass.
    """
    if library.core is None or not arrays:
        return
    distinct = _distinct(statistics)
    thread = device_of(arrays[0]).device_id  # a CPU's own; several GPUs have several
    check_call(
        library.core.gluon_syncbn_watch(
            _handles(arrays), len(arrays), _handles(distinct), len(distinct), are_heads, thread, error.encode()
        )
    )


def wait_to_write(array: mx.nd.NDArray) -> None:
    """Wait until all that reads or writes this array has run."""
    check_call(LIBMXNET.MXNDArrayWaitToWrite(array.handle))


def gate(gradients: Sequence[Sequence[mx.nd.NDArray]], others: Sequence[Sequence[mx.nd.NDArray]]) -> int:
    """Skip updates that read these gradients if the step has failed. Those in a list are updated together or not.

    For each list there is a list of ``others``, which the update writes: weights and the optimizer's arrays. Some
    optimizers write these without a look at the gradient, as AdaMax, which first multiplies its moments.

    Returns the number of the first list's gate; the others follow. MXNetError where nothing is compiled, and the step
    has failed.
    """
    if library.core is None:
        try:
            for array in (array for some in gradients for array in some):
                array.wait_to_read()
        except mx.MXNetError as problem:
            fail(text_of(problem))
        if failure():
            refuse_update()
        return 0
    _give_memory()
    gradients = [_distinct(some) for some in gradients]  # a Trainer takes a parameter twice
    all_arrays = [_distinct([*some, *written]) for some, written in zip(gradients, others)]
    counts = [len(some) for some in gradients]
    others_counts = [len(some) - count for some, count in zip(all_arrays, counts)]
    first = ctypes.c_int64()
    skipped = b"an operator had failed, so that MXNet did not compute all gradients."
    check_call(
        library.core.gluon_syncbn_gate(
            _handles([array for some in all_arrays for array in some]),
            library.integers(counts),
            library.integers(others_counts),
            len(gradients),
            skipped,
            ADVICE.encode(),
            ctypes.byref(first),
        )
    )
    return first.value


def seal(arrays: Iterable[mx.nd.NDArray]) -> None:
    """Let every read of one of these arrays, from now on, wait for all operations on any of them."""
    distinct = _distinct(arrays)
    if library.core is not None and distinct:
        thread = device_of(distinct[0]).device_id
        check_call(library.core.gluon_syncbn_seal(_handles(distinct), len(distinct), thread))


def _give_memory() -> None:
    """Reserve memory for MXNet's list of exceptions before the first gate, or MXNet may crash.

    Waits until nothing runs, and so raises pending errors.
    """
    if _state.has_memory:
        return
    mx.nd.waitall()
    with _state.turn_to_give_memory:
        if _state.has_memory:
            return
        seen = last_error()
        check_call(library.core.gluon_syncbn_reserve(_EXCEPTIONS, _OF_NO_ACCOUNT.encode()))
        LIBMXNET["MXNDArrayWaitAll"]()  # which fails; not the function that `_hooks` extends
        set_last_error(seen)
        _state.has_memory = True


def check_all_work(wait_for_all: Callable[[], int]) -> None:
    """Call ``MXNDArrayWaitAll``. MXNetError if work has failed, but not work of `_give_memory` in another thread."""
    code = wait_for_all()
    while code != 0 and _OF_NO_ACCOUNT in last_error():
        code = wait_for_all()
    check_call(code)


def poison(array: mx.nd.NDArray, error: str) -> None:
    """Give ``array``, of float32 or float64, this error: every read of it raises the error.

    Where nothing is compiled, the engine copies into the array an array that an operator of MXNet's could not compute,
    and `explained` has the error's text. MXNet's list of exceptions has no lock, so devices that fail together take
    turns: all consequences of an error are in the list when the next one comes.
    """
    if library.core is not None:
        check_call(library.core.gluon_syncbn_poison(array.handle, error.encode()))
        return
    values = array.as_nd_ndarray()  # of mx.np, reshape would copy
    with _state.turn_to_fail, mx.autograd.pause():
        time.sleep(_SECONDS_TO_FAIL)
        cpu = mx.cpu(device_of(values).device_id)  # a GPU computes NaN, and no error
        root = mx.nd.linalg.potrf(mx.nd.full((1, 1), -1, ctx=cpu, dtype=values.dtype))
        root.reshape(-1).copyto(values.reshape(-1)[:1])


def explained(error: mx.MXNetError) -> mx.MXNetError:
    """The error of an array; of one that `poison` has given an error without its text, the text."""
    is_poison = library.core is None and "potrf" in str(error)
    return mx.MXNetError(failure()) if is_poison and failure() else error


def with_advice(error: str) -> str:
    """The error with advice at its end, once."""
    if _ENDED in error:
        return f"{error} Start the job again. Give all processes equally many batches."
    return error if TO_GO_ON in error else f"{error} {ADVICE}"


def refuse_update() -> NoReturn:
    """Raise the error of an update whose step has failed. If it was not a layer's, its cause is yet to be told."""
    if library.core is None or failure().startswith(LAYER):
        tell()
    raise mx.MXNetError(with_advice(f"This update was not made, because its step had failed: {failure()}"))


def has_opened(gate_number: int) -> bool:
    return library.core is None or bool(library.core.gluon_syncbn_gate_has_opened(gate_number))


def forget_gates() -> None:
    """Forget all gates. Nothing may be running."""
    if library.core is not None:
        library.core.gluon_syncbn_forget_gates()
