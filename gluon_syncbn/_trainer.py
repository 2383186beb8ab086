"""`DistributedTrainer`: trains one set of weights in several processes, which MPI connects."""

import threading
import zlib
from typing import Any, Callable, Dict, List, Optional, Tuple

import mxnet as mx
import numpy as np
from mxnet import gluon

from gluon_syncbn.backends.bfloat16 import dtype_name
from gluon_syncbn.base.mxnet_private import is_sparse
from gluon_syncbn.distributed.default import find
from gluon_syncbn.distributed.mpi import MPIProcessGroup
from gluon_syncbn.distributed.process_group import ProcessGroupLike
from gluon_syncbn.meeting import waiting
from gluon_syncbn.meeting.processes import processes_of
from gluon_syncbn.mxnet_engine import failures
from gluon_syncbn.step.steps import steps

_NAME = "DistributedTrainer"


class DistributedTrainer(gluon.Trainer):
    """A `mxnet.gluon.Trainer` whose gradients are averaged over the processes of an MPI job.

    The interface is the same as in ``horovod.mxnet.DistributedTrainer``: the gradients are the mean over processes of
    the sums over each process's devices, and ``step`` takes the batch size of one process. In a process that is alone
    it is `mxnet.gluon.Trainer`.

    Every process makes it, with the same parameters in the same order (names may differ), and calls ``step`` equally
    often, from one thread. Before the gradients are added up, the processes meet as in a `SyncBatchNorm`: if one does
    not come, has ended, or has abandoned the step, the others get an error that names it. At the first step, when other
    parameters learn than before, and after a step that was abandoned, the values of the parameters are compared.

    Parameters
    ----------
    params : ParameterDict, dict or list of Parameter
        As ``net.collect_params()``.
    optimizer : str or Optimizer
    optimizer_params : dict, optional
        The options of the optimizer.
    process_group : str, ProcessGroup or mpi4py.MPI.Comm, optional
        As in `gluon_syncbn.init_process_group`. Default: the processes that this function has chosen.

    Raises
    ------
    ValueError
        The processes are connected by Horovod, which has a Trainer of its own; a parameter or gradient is sparse;
        ``ignore_stale_grad``, by which each process would update others; or, by ``step`` on all processes, the
        parameters that learn, or their values, differ.
    SyncBatchNormError
        By ``step``: another process did not come, has ended, or abandoned the step.

    Examples
    --------
    >>> gluon_syncbn.init_process_group("mpi")
    >>> net.initialize(ctx=mx.gpu(local_rank))
    >>> net(images)  # so that all parameters have their shapes
    >>> trainer = gluon_syncbn.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.01})
    >>> trainer.broadcast_parameters()
    """

    def __init__(
        self,
        params,
        optimizer,
        optimizer_params: Optional[Dict[str, Any]] = None,
        process_group: Optional[ProcessGroupLike] = None,
    ):
        group = find(process_group, _NAME)
        self.is_alone = group is None
        if group is None:
            super().__init__(params, optimizer, optimizer_params)
            return
        if not isinstance(group, MPIProcessGroup):
            raise ValueError(
                f"{_NAME}: these processes are connected by {group.name}. Use horovod.mxnet.DistributedTrainer, or "
                f"init_process_group('mpi')."
            )
        # Trainer sorts them by name, and names may differ from process to process.
        self._in_order: List[gluon.Parameter] = list(params.values() if hasattr(params, "values") else params)
        sparse = next((one.name for one in self._in_order if is_sparse(one)), None)
        if sparse is not None:
            raise ValueError(f"{_NAME}: '{sparse}' is sparse, and cannot be added up over processes.")
        super().__init__(params, optimizer, optimizer_params, kvstore=None)
        self._group = group
        self._number = processes_of(group).count_layers(_NAME)
        self._values = np.empty(0, np.float32)  # all gradients
        self._compared: Optional[Tuple] = None  # the facts for which values were compared, and the step's generation
        steps.progress.under_way.trainers.add(self)

    def broadcast_parameters(self) -> None:
        """Give all processes the parameters and statistics of the first process. All of them call it.

        Raises
        ------
        DeferredInitializationError
            A parameter has no shape yet: call the net once, as a prediction.
        ValueError, SyncBatchNormError
            As ``step``.
        """
        if self.is_alone:
            return
        values = [parameter.list_data()[0].asnumpy() for parameter in self._in_order]
        facts = [_checksum([(value.shape, str(value.dtype)) for value in values])]

        def broadcast():
            for _ in range(2):
                self._check_same(self._meet("broadcast of parameters", facts))
            for value in values:
                self._group.broadcast(value)

        _uninterrupted(broadcast)
        for parameter, value in zip(self._in_order, values):
            for array in parameter.list_data():
                _write(array, value)
        self._compared = None

    def step(self, batch_size, ignore_stale_grad=False):
        """Update as `mxnet.gluon.Trainer` does; ``batch_size`` is the batch size of one process."""
        self._check_stale(ignore_stale_grad)
        super().step(batch_size, ignore_stale_grad)

    def update(self, batch_size, ignore_stale_grad=False):
        """Update as `mxnet.gluon.Trainer` does, after ``allreduce_grads``."""
        self._check_stale(ignore_stale_grad)
        super().update(batch_size, ignore_stale_grad)

    def _check_stale(self, ignore_stale_grad: bool) -> None:
        if ignore_stale_grad and not self.is_alone:
            raise ValueError(
                f"{_NAME}: with ignore_stale_grad each process would update other parameters. Freeze the parameters "
                f"that are not to learn (grad_req='null'), in all processes."
            )

    def _allreduce_grads(self):
        if self.is_alone:
            return super()._allreduce_grads()
        try:
            return self._average_gradients()
        except BaseException:
            steps.updates.drop_last()
            raise

    def _update(self, ignore_stale_grad=False):
        try:
            super()._update(ignore_stale_grad)
        except BaseException:
            self._compared = None  # other processes may have updated their parameters
            raise

    def _average_gradients(self) -> None:
        numbered = [(i, parameter) for i, parameter in enumerate(self._in_order) if parameter.grad_req != "null"]
        learning = [parameter for _, parameter in numbered]
        facts = [(i, parameter.shape, dtype_name(parameter.dtype)) for i, parameter in numbered]
        now = facts, failures.generation()
        was_compared, self._compared = self._compared == now, None  # until the update has ended well
        sizes = [int(np.prod(parameter.shape)) for parameter in learning]
        dtype = np.result_type(np.float32, *(parameter.dtype for parameter in learning))
        if (self._values.size, self._values.dtype) != (sum(sizes), dtype):
            self._values = np.empty(sum(sizes), dtype)
        parts = np.split(self._values, np.cumsum(sizes)[:-1])
        for parameter, part in zip(learning, parts):
            first, *others = parameter.list_grad()
            part[:] = first.asnumpy().ravel()
            for gradient in others:
                part += gradient.asnumpy().ravel()

        def add_up():
            rows = self._meet("update", [_checksum(facts), was_compared])
            self._check_same(rows[:, :1])
            is_known = bool(rows[:, 1].all())
            self._check_same(self._meet("comparison of parameters", [0 if is_known else _checksum_of_values(learning)]))
            self._group.add_up(self._values)

        _uninterrupted(add_up)
        self._values /= self._group.size
        for parameter, part in zip(learning, parts):
            for gradient in parameter.list_grad():
                _write(gradient, part.reshape(parameter.shape))
        self._compared = now
        steps.progress.under_way.has_new_gradients = False

    def _meet(self, occasion: str, facts: List[int]) -> np.ndarray:
        """Wait for the other processes. Return the facts of all of them, one row each.

        They meet twice before a call of MPI, which takes nothing back: the first meeting may end well in some processes
        and with an error in others, and then the second one ends with an error in all.
        """
        with processes_of(self._group).together(f"{_NAME}: the {occasion}") as all_of_them:
            return all_of_them.gather(f"{_NAME}.{self._number}.{occasion}", np.array(facts, dtype=np.float64))

    def _check_same(self, rows: np.ndarray) -> None:
        other = next((rank for rank, row in enumerate(rows) if (row != rows[0]).any()), None)
        if other is not None:
            raise ValueError(
                f"{_NAME}: process {other} trains other parameters than process 0, or from other values. Every process "
                f"must make the same net, freeze the same parameters, and call broadcast_parameters() before the first "
                f"step, and where an update was interrupted."
            )


def _uninterrupted(work: Callable[[], None]) -> None:
    """Do the work of all processes on a thread, so that a signal ends it only while it waits for the others.

    Else one process could leave the others alone within a call of MPI, which cannot be taken back.
    """
    errors: List[BaseException] = []
    is_over = threading.Event()  # after an interrupt, Python 3.11 takes a thread that runs for one that has ended

    def run() -> None:
        try:
            work()
        except BaseException as problem:
            errors.append(problem)
        is_over.set()

    threading.Thread(target=run).start()
    try:
        is_over.wait()
    except BaseException:  # Ctrl-C, or an exception of another signal's handler
        with waiting.cut_short("it was interrupted"):
            is_over.wait()
        raise
    if errors:
        raise errors[0]


def _write(array: mx.nd.NDArray, values: np.ndarray) -> None:
    with mx.util.np_shape(True), mx.autograd.pause():
        mx.nd.array(values, dtype=array.dtype).copyto(array.as_nd_ndarray())


def _checksum(facts: Any) -> int:
    return zlib.crc32(repr(facts).encode())


def _checksum_of_values(parameters: List[gluon.Parameter]) -> int:
    return _checksum([zlib.crc32(parameter.list_data()[0].asnumpy().tobytes()) for parameter in parameters])
