"""`DistributedTrainer`: trains one set of weights in several processes, which MPI connects."""

import pickle
import threading
import zlib
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, TypeVar

import mxnet as mx
import numpy as np
from mxnet import gluon

from gluon_syncbn.backends.bfloat16 import dtype_name
from gluon_syncbn.base.mxnet_private import (
    has_fresh_gradient,
    is_sparse,
    optimizer_of,
    parameters_of,
    updaters_of,
)
from gluon_syncbn.distributed.default import find
from gluon_syncbn.distributed.mpi import MPIProcessGroup
from gluon_syncbn.distributed.process_group import ProcessGroupLike
from gluon_syncbn.layer.spec import Facts
from gluon_syncbn.meeting import waiting
from gluon_syncbn.meeting.processes import processes_of
from gluon_syncbn.mxnet_engine import failures
from gluon_syncbn.step.held import counts_of, numbers_of
from gluon_syncbn.step.steps import steps

_T = TypeVar("_T")
_NAME = "DistributedTrainer"
_UPDATES = "the number of updates"
_BROADCAST = (
    "Call broadcast_parameters() in every process: before the first step, after one process alone has loaded or set "
    "parameters or states, and where an update was interrupted."
)


class DistributedTrainer(gluon.Trainer):
    """A `mxnet.gluon.Trainer` whose gradients are averaged over the processes of an MPI job.

    The interface is the same as in ``horovod.mxnet.DistributedTrainer``: the gradients are the mean over processes of
    the sums over each process's devices, and ``step`` takes the batch size of its process. The gradients are divided by
    the mean of these batch sizes, which may differ. In a process that is alone it is `mxnet.gluon.Trainer`.

    Every process makes it, with the same parameters in the same order (names may differ), and calls ``step`` equally
    often, from one thread. Before the gradients are added up, the processes meet as in a `SyncBatchNorm`: if one does
    not come, has ended, or has abandoned the step, the others get an error that names it. At the first step, when other
    parameters learn than before, after ``Parameter.set_data`` (which ``load_parameters`` calls), and after a step that
    was abandoned, the values of the parameters are compared.

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
        parameters that learn, their values, or the learning rates differ, or only some processes have new gradients.
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
        self._batch_size: Optional[float] = None  # of this process, within step()
        self._updated_with: Optional[float] = None  # the batch size of the last update()
        steps.progress.under_way.trainers.add(self)

    def broadcast_parameters(self) -> None:
        """Give all processes the parameters, statistics and optimizer state of the first process. All of them call it.

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
        facts = {_parameter(i): f"{value.shape} {value.dtype}" for i, value in enumerate(values)}
        progress = np.frombuffer(self._progress(), np.uint8)
        size = np.array([progress.size])

        def broadcast() -> bytes:
            for _ in range(2):
                self._agree("broadcast of parameters", facts)
            for value in (*values, size):
                self._group.broadcast(value)
            received = np.resize(progress, size)
            self._group.broadcast(received)
            return received.tobytes()

        received = _uninterrupted(broadcast)
        for parameter, value in zip(self._in_order, values):
            for array in parameter.list_data():
                _write(array, value)
        self._take_progress(received)
        self._compared = None

    def _progress(self) -> bytes:
        """The optimizer's numbers, its schedule's state, and its counts and states by the numbers of parameters."""
        optimizer, updater, keys = optimizer_of(self), updaters_of(self)[0], self._keys()
        numbers = {"lr": optimizer.lr, **numbers_of(optimizer)}
        schedule = {} if optimizer.lr_scheduler is None else vars(optimizer.lr_scheduler)
        counts = max(counts_of(optimizer).values(), key=len)  # a device may have none
        states = {key: updater.sync_state_context(state, mx.cpu()) for key, state in updater.states.items()}
        by_number = [{i: values[key] for i, key in enumerate(keys) if key in values} for values in (counts, states)]
        return pickle.dumps((numbers, _picklable(schedule), *by_number))

    def _take_progress(self, progress: bytes) -> None:
        optimizer, keys = optimizer_of(self), self._keys()
        for updater in updaters_of(self):
            numbers, schedule, counts, states = pickle.loads(progress)
            updater.states = {keys[i]: state for i, state in states.items()}
            updater.states_synced = dict.fromkeys(updater.states, False)  # with their devices, as after load_states
        vars(optimizer).update(numbers)
        if optimizer.lr_scheduler is not None:
            vars(optimizer.lr_scheduler).update(schedule)
        for device in {device for parameter in self._in_order for device in parameter.list_ctx()}:
            of_device = counts_of(optimizer).setdefault(device.device_id, {})
            of_device.clear()
            of_device.update({keys[i]: count for i, count in counts.items()})

    def _keys(self) -> List[int]:
        """The numbers of the parameters for the optimizer."""
        numbers = {id(parameter): i for i, parameter in enumerate(parameters_of(self))}
        return [numbers[id(parameter)] for parameter in self._in_order]

    def load_states(self, fname):
        """Load as `mxnet.gluon.Trainer` does. The file may come from other devices than those of this process."""
        super().load_states(fname)
        if not self.is_alone:
            self._take_progress(self._progress())

    def step(self, batch_size, ignore_stale_grad=False):
        """Update as `mxnet.gluon.Trainer` does; ``batch_size`` is the batch size of this process, and may be 0."""
        self._check_stale(ignore_stale_grad)
        if self.is_alone:
            return super().step(batch_size, ignore_stale_grad)
        self._batch_size = batch_size
        try:
            super().step(batch_size or 1, ignore_stale_grad)
        finally:
            self._batch_size = None

    def update(self, batch_size, ignore_stale_grad=False):
        """Update as `mxnet.gluon.Trainer` does, after ``allreduce_grads``. All processes give the same batch size."""
        self._check_stale(ignore_stale_grad)
        super().update(batch_size, ignore_stale_grad)
        if not self.is_alone and batch_size != self._updated_with:
            self._updated_with, self._compared = batch_size, None  # values differ where it differs

    def _check_stale(self, ignore_stale_grad: bool) -> None:
        if ignore_stale_grad and not self.is_alone:
            raise ValueError(
                f"{_NAME}: with ignore_stale_grad each process would update other parameters. Freeze the parameters "
                f"that are not to learn (grad_req='null'), in all processes."
            )

    def note_set_data(self, parameter: gluon.Parameter) -> None:
        """Note that the program has written the parameter."""
        if any(parameter is one for one in self._in_order):
            self._compared = None

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
        learning = [parameter for parameter in self._in_order if parameter.grad_req != "null"]
        facts = self._facts()
        now = learning, failures.generation()
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

        def add_up() -> float:
            rows = self._agree("update", facts, was_compared, self._batch_size or 0)
            self._compare_values([] if rows[:, 1].all() else learning)
            self._group.add_up(self._values)
            return float(rows[:, 2].sum())

        batch_size = _uninterrupted(add_up) / self._group.size
        if self._batch_size is not None:
            optimizer_of(self).rescale_grad = self._scale / batch_size
        self._values /= self._group.size
        for parameter, part in zip(learning, parts):
            for gradient in parameter.list_grad():
                _write(gradient, part.reshape(parameter.shape))
        self._compared = now
        steps.progress.under_way.has_new_gradients = False

    def _facts(self) -> Facts:
        """The values that must be the same in all processes for an update."""
        is_step = self._batch_size is not None
        facts = {"the method": "step" if is_step else "allreduce_grads", "the scale of gradients": str(self._scale)}
        facts.update({"the learning rate": str(self.learning_rate), "the weight decay": str(optimizer_of(self).wd)})
        facts[_UPDATES] = optimizer_of(self).num_update
        for i, parameter in enumerate(self._in_order):
            is_frozen = parameter.grad_req == "null"
            facts[_parameter(i)] = "frozen" if is_frozen else f"{parameter.shape} {dtype_name(parameter.dtype)}"
            if is_step and not is_frozen and not all(map(has_fresh_gradient, parameter.list_data())):
                facts[_parameter(i)] += " without a new gradient"
        return facts

    # The processes meet twice before a call of MPI, which takes nothing back: the first meeting may end well in some
    # processes and with an error in others, and then the second one ends with an error in all.

    def _agree(self, occasion: str, facts: Facts, *numbers: float) -> np.ndarray:
        """Wait for the other processes, and compare facts. Return a row for each process: a checksum, its numbers."""
        with processes_of(self._group).together(f"{_NAME}: the {occasion}") as all_of_them:
            key = f"{_NAME}.{self._number}.{occasion}"
            rows = all_of_them.gather(key, np.array([zlib.crc32(repr(facts).encode()), *numbers], dtype=np.float64))
            if (rows[:, 0] == rows[0, 0]).all():
                return rows
            first, *others = all_of_them.gather_json(f"{key}.facts", facts)
        for rank, other in enumerate(others, start=1):
            for key in sorted(first.keys() | other.keys()):
                if first.get(key) != other.get(key):
                    raise ValueError(
                        f"{_NAME}: {key} is {first.get(key)} in process 0, and {other.get(key)} in process {rank}. "
                        f"{_BROADCAST if key == _UPDATES else 'Do the same in every process.'}"
                    )
        return rows

    def _compare_values(self, parameters: Sequence[gluon.Parameter]) -> None:
        """Wait for the other processes, and compare the values of parameters."""
        values = np.array([zlib.crc32(one.list_data()[0].asnumpy().tobytes()) for one in parameters], dtype=np.float64)
        with processes_of(self._group).together(f"{_NAME}: the comparison of parameters") as all_of_them:
            rows = all_of_them.gather(f"{_NAME}.{self._number}.values.{values.size}", values)
        for rank, column in np.argwhere(rows != rows[0]):
            name = parameters[column].name
            raise ValueError(f"{_NAME}: '{name}' has other values in process {rank} than in process 0. {_BROADCAST}")


def _picklable(values: Dict[str, Any]) -> Dict[str, Any]:
    """The values; none if a schedule of the user's cannot be pickled."""
    try:
        pickle.dumps(values)
    except Exception:
        return {}
    return values


def _parameter(number: int) -> str:
    return f"parameter {number}"  # names may differ


def _uninterrupted(work: Callable[[], _T]) -> _T:
    """Do the work of all processes on a thread, so that a signal ends it only while it waits for the others.

    Else one process could leave the others alone within a call of MPI, which cannot be taken back.
    """
    results: List[_T] = []
    errors: List[BaseException] = []
    is_over = threading.Event()  # after an interrupt, Python 3.11 takes a thread that runs for one that has ended

    def run() -> None:
        try:
            results.append(work())
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
    return results[0]


def _write(array: mx.nd.NDArray, values: np.ndarray) -> None:
    with mx.util.np_shape(True), mx.autograd.pause():
        mx.nd.array(values, dtype=array.dtype).copyto(array.as_nd_ndarray())
