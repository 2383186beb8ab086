"""Synchronized Batch Normalization for MXNet Gluon.

Layers and nets
    SyncBatchNorm            the layer, a replacement for ``mxnet.gluon.nn.BatchNorm``
    convert_sync_batchnorm   makes every BatchNorm of a net synchronize
    convert_batchnorm        makes them plain BatchNorm again, for deployment
    freeze_statistics        normalizes with the running statistics in training too
    set_renorm               sets the limits of Batch Renormalization, in a training loop
    update_statistics        estimates the running statistics of a trained net anew
    check, Check             finds out whether a net really synchronizes
    install, uninstall       replace ``gluon.contrib.nn.SyncBatchNorm`` by this layer, and undo that

Symbols and Modules
    symbol.SyncBatchNorm     the layer as a symbol
    convert_symbol           makes every BatchNorm of a symbol synchronize
    plain_symbol             makes them plain BatchNorm again

Training
    devices                  trains on some of the devices only
    abandon_step             abandons a failed step, before the next one
    guard_update             keeps a failed step from updating weights, in loops without a Trainer
    SyncBatchNormError       raised where an output of a failed step is read
    profile, Report          measure which layers wait, how long, and for which device

Several processes
    init_process_group       synchronizes over the processes of a job (MPI, Horovod)
    ProcessGroup             the processes of a job, as `init_process_group` returns them
    DistributedTrainer       a Trainer that averages gradients over the processes of an MPI job

``help(gluon_syncbn.SyncBatchNorm)`` and so on have the details. ``python -m gluon_syncbn`` checks the installation.
``python -m gluon_syncbn.run script.py`` runs a script with this layer in place of MXNet's.
"""

import types
from importlib import metadata

try:
    import mxnet
except AttributeError as problem:  # names that newer versions of NumPy lack
    raise ImportError(
        f"gluon_syncbn: MXNet cannot be imported with NumPy {metadata.version('numpy')} (another package may have "
        f"replaced an older one). Run: pip install 'numpy<1.24'"
    ) from problem
except ModuleNotFoundError as problem:
    if problem.name != "mxnet":
        raise
    raise ImportError(
        "gluon_syncbn: MXNet is not installed. Run: pip install 'mxnet==1.9.1' 'numpy<1.24', or for GPUs mxnet-cu117 "
        "or mxnet-cu112 in place of mxnet."
    ) from problem

from gluon_syncbn.mxnet_engine.cpu_resources import set_cpu_resources

set_cpu_resources()  # before anything computes, or it is too late for MXNet 1.6

from gluon_syncbn import symbol
from gluon_syncbn._check import Check, check
from gluon_syncbn._devices import devices
from gluon_syncbn._hooks import install_hooks
from gluon_syncbn._install import install, uninstall
from gluon_syncbn._profile import Report, profile
from gluon_syncbn._statistics import update_statistics
from gluon_syncbn._trainer import DistributedTrainer
from gluon_syncbn.base.errors import SyncBatchNormError
from gluon_syncbn.block import SyncBatchNorm
from gluon_syncbn.convert import convert_batchnorm, convert_sync_batchnorm, freeze_statistics, set_renorm
from gluon_syncbn.distributed.default import init_process_group
from gluon_syncbn.distributed.process_group import ProcessGroup
from gluon_syncbn.step.abandon import abandon_step
from gluon_syncbn.step.exits import watch_exits_and_forks
from gluon_syncbn.step.updates import guard_update
from gluon_syncbn.symbol import convert_symbol, plain_symbol

watch_exits_and_forks()
install_hooks()
del install_hooks, set_cpu_resources, watch_exits_and_forks

__version__ = "0.1.0"


def __dir__():
    """Return the public names. Of the package's modules, only ``symbol`` is public."""
    public = (name for name, value in globals().items() if name[0] != "_" and not isinstance(value, types.ModuleType))
    return [*public, "symbol", "__doc__", "__version__"]
