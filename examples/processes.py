"""Training in several processes, besides the layers: each process's images, gradients, and equal weights.

``mpirun`` or ``horovodrun`` starts one process per device. Gradients go through Horovod's own Trainer, or with MPI
through gluon_syncbn's.
"""

import mxnet as mx
from mxnet import gluon

import gluon_syncbn


class Alone:
    """Training in one process."""

    rank, size, local_rank = 0, 1, 0

    def make_trainer(self, parameters, optimizer: str, options: dict) -> gluon.Trainer:
        return gluon.Trainer(parameters, optimizer, options)

    def broadcast(self, trainer: gluon.Trainer) -> None:
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

    def broadcast(self, trainer):
        # Not broadcast_parameters: a prediction may leave weights in a oneDNN layout, which Horovod cannot read.
        for number, parameter in enumerate(trainer._params):
            array = mx.nd.array(parameter.data(parameter.list_ctx()[0]).asnumpy(), ctx=mx.cpu())
            parameter.set_data(self._hvd.broadcast(array, root_rank=0, name=str(number)))

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
        return gluon_syncbn.DistributedTrainer(parameters, optimizer, options)

    def broadcast(self, trainer):
        trainer.broadcast_parameters()

    def barrier(self):
        self._comm.Barrier()


def join(name) -> Alone:
    """The job that ``--processes`` selects; None is training in one process."""
    return {None: Alone, "horovod": WithHorovod, "mpi": WithMPI}[name]()
