"""`DistributedTrainer`: one set of weights in several processes, which MPI connects."""

import zlib
from typing import Any, Dict, List, Optional

import mxnet as mx
import numpy as np
from mxnet import gluon

from gluon_syncbn.base.mxnet_private import parameters_of
from gluon_syncbn.distributed.default import find
from gluon_syncbn.distributed.mpi import MPIProcessGroup
from gluon_syncbn.distributed.process_group import ProcessGroupLike
from gluon_syncbn.meeting.link import seconds_for_processes
from gluon_syncbn.meeting.processes import processes_of
from gluon_syncbn.step.steps import steps

_NAME = "DistributedTrainer"


class DistributedTrainer(gluon.Trainer):
    """A `mxnet.gluon.Trainer` whose gradients are averaged over the processes of an MPI job.

    The interface is that of ``horovod.mxnet.DistributedTrainer``: the gradients are the mean over processes of the sums
    over each process's devices, and ``step`` takes the batch size of one process. In a process that is alone it is
    `mxnet.gluon.Trainer`.

    Every process makes it, with the same parameters in the same order, and calls ``step`` equally often. Before the
    gradients are added up, the processes meet as those of a `SyncBatchNorm` do: if one does not come, has ended, or has
    given up the step, the others get an error that names it.

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
        The processes are connected by Horovod, which has a Trainer of its own; a gradient is sparse; or, by ``step`` on
        all processes, the parameters that learn differ.
    SyncBatchNormError
        By ``step``: another process did not come, has ended, or gave the step up.

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
        self._group: Optional[MPIProcessGroup] = None
        if group is None:
            super().__init__(params, optimizer, optimizer_params)
            return
        if not isinstance(group, MPIProcessGroup):
            raise ValueError(
                f"{_NAME}: these processes are connected by {group.name}. Use horovod.mxnet.DistributedTrainer, or "
                f"init_process_group('mpi')."
            )
        super().__init__(params, optimizer, optimizer_params, kvstore=None)
        self._group = group
        steps.trainers_of_jobs.add(self)
        self._scale /= group.size
        self._number = processes_of(group).count_layers(_NAME)
        self._values = np.empty(0, np.float32)  # all gradients, in memory that is asked for anew where others learn
        self._compared = 0  # a checksum of what learns; its values were the same in all processes

    def broadcast_parameters(self) -> None:
        """Give all processes the parameters and statistics of the first process. All of them call it.

        Raises
        ------
        DeferredInitializationError
            A parameter has no shape yet: call the net once, as a prediction.
        SyncBatchNormError
            As ``step``.
        """
        if self._group is None:
            return
        values = [parameter.data(parameter.list_ctx()[0]).asnumpy() for parameter in parameters_of(self)]
        self._meet("broadcast of parameters", [_checksum([(value.shape, str(value.dtype)) for value in values])])
        for parameter, value in zip(parameters_of(self), values):
            self._group.broadcast(value)
            parameter.set_data(mx.nd.array(value, dtype=value.dtype))

    def _allreduce_grads(self):
        if self._group is None:
            return super()._allreduce_grads()
        learning = [parameter for parameter in parameters_of(self) if parameter.grad_req != "null"]
        if not learning:
            return None
        self._check(learning)
        ends = np.cumsum([int(np.prod(parameter.shape)) for parameter in learning])
        dtype = np.result_type(np.float32, *(parameter.dtype for parameter in learning))
        if (self._values.size, self._values.dtype) != (ends[-1], dtype):
            self._values = np.empty(ends[-1], dtype)
        parts = np.split(self._values, ends[:-1])
        for parameter, part in zip(learning, parts):
            first, *others = parameter.list_grad()
            part[:] = first.asnumpy().ravel()
            for gradient in others:
                part += gradient.asnumpy().ravel()
        self._meet("update", [])
        self._group.add_up(self._values)
        for parameter, part in zip(learning, parts):
            for gradient in parameter.list_grad():
                gradient[:] = part.reshape(parameter.shape)

    def _check(self, learning: List[gluon.Parameter]) -> None:
        """Compare the parameters that learn with those of the other processes, where they are others than before."""
        facts = [(parameter.shape, str(parameter.dtype)) for parameter in learning]
        checksum = _checksum([facts, [place for place, one in enumerate(parameters_of(self)) if one in learning]])
        if checksum == self._compared:
            return
        sparse = next((one.name for one in learning if one.list_grad()[0].stype != "default"), None)
        if sparse is not None:
            raise ValueError(f"{_NAME}: the gradient of '{sparse}' is sparse, which cannot be added up over processes.")
        values = 0
        for parameter in learning:
            values = zlib.crc32(parameter.data(parameter.list_ctx()[0]).asnumpy().tobytes(), values)
        self._meet("comparison of parameters", [checksum, values])
        self._compared = checksum

    def _meet(self, occasion: str, facts: List[int]) -> None:
        """Wait for the other processes, whose facts must be the same."""
        assert self._group is not None
        vector, seconds = np.array([0, *facts], dtype=np.float64), seconds_for_processes(None)
        key = f"{_NAME}.{self._number}.{occasion}"
        rows = processes_of(self._group).gather(f"{_NAME}: the {occasion}", key, vector, seconds)
        other = next((rank for rank, row in enumerate(rows) if (row != rows[0]).any()), None)
        if other is not None:
            raise ValueError(
                f"{_NAME}: process {other} trains other parameters than process 0, or from other values. Every process "
                f"must make the same net, freeze the same parameters, and call broadcast_parameters() before the first "
                f"step."
            )


def _checksum(facts: Any) -> int:
    return zlib.crc32(repr(facts).encode())
