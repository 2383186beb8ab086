"""Nets that train over all processes, each step compared with `nn.BatchNorm` on the whole batch on one device."""

import os

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
            self.head = norm(in_channels=3)
            self.conv = nn.Conv2D(3, 3, padding=1, in_channels=3)
            self.late = [delay.Late(lambda device, i=i: 5e-3 * (i == job.group.rank % 2)) for i in range(2)]
            for block in (*self.norms, *self.late):
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


def check(case: str) -> None:
    """Two steps of it in each of JOB_MODES, with JOB_DEVICES devices in each process."""
    make, shape, tolerance = CASES[case]
    devices = testing.cpus(int(os.environ.get("JOB_DEVICES", 1)))
    for mode in os.environ.get("JOB_MODES", "static").split():
        net, twin = job.twins(make, devices, (1, *shape))
        testing.set_mode(net, mode)
        for seed in range(2):
            # nn.BatchNorm averages the calls of a shared layer in the opposite order.
            job.check_like(net, twin, seed, devices, shape=shape, tolerance=tolerance, statistics=case != "branches")
