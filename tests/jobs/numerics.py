"""Training steps of nets over all processes, each compared with `nn.BatchNorm` on the whole batch on one device.

    mpirun -np 2 python tests/jobs/numerics.py mpi DEVICES MODE,... CASE ...

Prints ``RIGHT case mode`` on each process. A process builds a few layers more than those before it, so that Gluon's
names differ.
"""

import sys

import delay
import job
import testing
from mxnet.gluon import HybridBlock, nn

import gluon_syncbn


class Branches(HybridBlock):
    """Parallel branches with a head that they share; which branch is late differs from process to process."""

    def __init__(self, norm):
        super().__init__()
        with self.name_scope():
            self.norms = [norm(in_channels=3) for _ in range(4)]
            for layer in self.norms:
                self.register_child(layer)
            self.head = norm(in_channels=3)
            self.conv = nn.Conv2D(3, 3, padding=1, in_channels=3)
            self.late = [delay.Late(lambda device, i=i: 5e-3 * (i == job.group.rank % 2)) for i in range(2)]
            for block in self.late:
                self.register_child(block)

    def hybrid_forward(self, F, x):
        ends = [self.head(self.conv(norm(self.late[i % 2](x)))) for i, norm in enumerate(self.norms)]
        return F.add_n(*[F.tanh(y) * (i + 1) for i, y in enumerate(ends)])


def resnet18(norm):
    from gluoncv import model_zoo  # takes long, and most jobs do without

    net = model_zoo.get_model("resnet18_v1b", classes=5)
    return net if norm is nn.BatchNorm else gluon_syncbn.convert_sync_batchnorm(net, timeout=job.TIMEOUT)


# How it is made, the shape of an image, and the tolerance, of float64; deep nets enlarge errors of rounding.
CASES = {
    "layer": (lambda norm: norm(in_channels=3), (3, 5, 2), 1e-10),
    "branches": (Branches, (3, 4, 4), 1e-9),
    "resnet18": (resnet18, (3, 32, 32), 1e-6),
}


def check(case: str, mode: str, devices: list) -> None:
    """Two steps of one case."""
    make, shape, tolerance = CASES[case]
    net, twin = job.twins(make, devices, (1, *shape))
    testing.set_mode(net, mode)
    for seed in range(2):
        # nn.BatchNorm averages the calls of a shared layer in the opposite order.
        job.check_like(net, twin, seed, devices, shape=shape, tolerance=tolerance, statistics=case != "branches")
    job.say("RIGHT", case, mode)


def main(engine, count, modes, *cases) -> None:
    job.join(engine)
    extra = [gluon_syncbn.SyncBatchNorm() for _ in range(job.group.rank)]  # they never train
    for case in cases:
        for mode in modes.split(","):
            check(case, mode, testing.cpus(int(count)))
    del extra


if __name__ == "__main__":
    main(*sys.argv[1:])
