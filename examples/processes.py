"""What training in several processes needs besides the layers: each process's images, gradients, and equal weights.

``mpirun`` or ``horovodrun`` starts one process per device. With Horovod, gradients go through Horovod's own Trainer;
with MPI, through one that adds them up.
"""

import time

import mxnet as mx
import numpy as np
from mxnet import gluon

import gluon_syncbn


class Alone:
    """Training in one process."""

    rank, size, local_rank = 0, 1, 0

    def make_trainer(self, parameters, optimizer: str, options: dict) -> gluon.Trainer:
        return gluon.Trainer(parameters, optimizer, options)

    def broadcast(self, parameters) -> None:
        """Give all processes the weights of the first."""

    def barrier(self) -> None:
        """Return when all processes are here."""


class WithHorovod(Alone):
    def __init__(self):
        import horovod.mxnet as hvd

        hvd.init()
        self._hvd = hvd
        self.rank, self.size, self.local_rank = hvd.rank(), hvd.size(), hvd.local_rank()
        gluon_syncbn.init_process_group("horovod")

    def make_trainer(self, parameters, optimizer, options):
        return self._hvd.DistributedTrainer(parameters, optimizer, options)

    def broadcast(self, parameters):
        # Not broadcast_parameters: a prediction may leave weights in a oneDNN layout, which Horovod cannot read.
        for name, parameter in sorted(parameters.items()):
            array = mx.nd.array(parameter.data(parameter.list_ctx()[0]).asnumpy(), ctx=mx.cpu())
            parameter.set_data(self._hvd.broadcast(array, root_rank=0, name=name))

    def barrier(self):
        self._hvd.allreduce(mx.nd.zeros(1), name="barrier").wait_to_read()


class WithMPI(Alone):
    def __init__(self):
        from mpi4py import MPI

        self._comm = MPI.COMM_WORLD
        self.rank, self.size = self._comm.rank, self._comm.size
        self.local_rank = self._comm.Split_type(MPI.COMM_TYPE_SHARED).rank
        gluon_syncbn.init_process_group("mpi")

    def make_trainer(self, parameters, optimizer, options):
        return SummingTrainer(self._add_up, self.size, parameters, optimizer, options)

    def _add_up(self, values):
        from mpi4py import MPI

        everyone_is_here = self._comm.Ibarrier()
        while not everyone_is_here.Test():  # Allreduce would take a processor from those for whom it waits
            time.sleep(5e-4)
        self._comm.Allreduce(MPI.IN_PLACE, values)

    def broadcast(self, parameters):
        for parameter in parameters.values():
            values = parameter.data(parameter.list_ctx()[0]).asnumpy()
            self._comm.Bcast(values)
            parameter.set_data(mx.nd.array(values, dtype=values.dtype))

    def barrier(self):
        self._comm.Barrier()


class SummingTrainer(gluon.Trainer):
    """A Trainer whose gradients are the mean over processes of the sums over each process's devices.

    ``add_up`` replaces a NumPy array by its sum over processes.
    """

    def __init__(self, add_up, size, parameters, optimizer, options):
        super().__init__(parameters, optimizer, options, kvstore=None)
        self._add_up = add_up
        self._values = None
        self._scale /= size

    def _allreduce_grads(self):
        learning = [parameter for parameter in self._params if parameter.grad_req != "null"]
        ends = np.cumsum([int(np.prod(parameter.shape)) for parameter in learning])
        dtype = np.result_type(np.float32, *(parameter.dtype for parameter in learning))
        # One message for all gradients, in memory that is asked for anew only when others learn than before.
        if self._values is None or (self._values.size, self._values.dtype) != (ends[-1], dtype):
            self._values = np.empty(ends[-1], dtype)
        parts = np.split(self._values, ends[:-1])
        for parameter, part in zip(learning, parts):
            first, *others = parameter.list_grad()
            part[:] = first.asnumpy().ravel()
            for gradient in others:
                part += gradient.asnumpy().ravel()
        self._add_up(self._values)
        for parameter, part in zip(learning, parts):
            for gradient in parameter.list_grad():
                gradient[:] = part.reshape(parameter.shape)


def join(name) -> Alone:
    """The job that ``--processes`` selects; None is training in one process."""
    return {None: Alone, "horovod": WithHorovod, "mpi": WithMPI}[name]()
