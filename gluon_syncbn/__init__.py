"""Synchronized Batch Normalization for MXNet Gluon."""

from gluon_syncbn.mxnet_engine.cpu_resources import set_cpu_resources

set_cpu_resources()  # before anything computes

from gluon_syncbn import symbol  # noqa: E402
from gluon_syncbn._devices import devices  # noqa: E402
from gluon_syncbn._hooks import install_hooks  # noqa: E402
from gluon_syncbn._install import install, uninstall  # noqa: E402
from gluon_syncbn._profile import Report, profile  # noqa: E402
from gluon_syncbn.base.errors import SyncBatchNormError  # noqa: E402
from gluon_syncbn.block import SyncBatchNorm  # noqa: E402
from gluon_syncbn.convert import convert_batchnorm, convert_sync_batchnorm, freeze_statistics  # noqa: E402
from gluon_syncbn.distributed.default import init_process_group  # noqa: E402
from gluon_syncbn.distributed.process_group import ProcessGroup  # noqa: E402
from gluon_syncbn.step.abandon import abandon_step  # noqa: E402
from gluon_syncbn.step.exits import watch_exits_and_forks  # noqa: E402
from gluon_syncbn.step.updates import guard_update  # noqa: E402
from gluon_syncbn.symbol import convert_symbol, plain_symbol  # noqa: E402

watch_exits_and_forks()
install_hooks()

__version__ = "0.1.0"
__all__ = [
    "ProcessGroup",
    "Report",
    "SyncBatchNorm",
    "SyncBatchNormError",
    "abandon_step",
    "convert_batchnorm",
    "convert_symbol",
    "convert_sync_batchnorm",
    "devices",
    "freeze_statistics",
    "guard_update",
    "init_process_group",
    "install",
    "plain_symbol",
    "profile",
    "symbol",
    "uninstall",
]
