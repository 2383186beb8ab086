"""Synchronized Batch Normalization for MXNet Gluon."""

from gluon_syncbn.engine.cpu_resources import set_cpu_rings

set_cpu_rings()

from gluon_syncbn import symbol  # noqa: E402
from gluon_syncbn._devices import devices  # noqa: E402
from gluon_syncbn._install import install, uninstall  # noqa: E402
from gluon_syncbn.block import SyncBatchNorm  # noqa: E402
from gluon_syncbn.convert import convert_batchnorm, convert_sync_batchnorm, freeze_statistics  # noqa: E402
from gluon_syncbn.graphs.calls import watch_graphs  # noqa: E402
from gluon_syncbn.meeting.rendezvous import SyncBatchNormError  # noqa: E402
from gluon_syncbn.nets.export import export_plain_graphs  # noqa: E402
from gluon_syncbn.nets.left_plain import warn_of_plain_norms  # noqa: E402
from gluon_syncbn.nets.symbol_block import watch_symbol_blocks  # noqa: E402
from gluon_syncbn.process.abandon import abandon_step, abandon_steps_that_raise  # noqa: E402
from gluon_syncbn.process.lifecycle import watch  # noqa: E402
from gluon_syncbn.process.passes import count_backward_passes  # noqa: E402
from gluon_syncbn.symbol import convert_symbol, plain_symbol  # noqa: E402

watch()
abandon_steps_that_raise()
warn_of_plain_norms()
count_backward_passes()
watch_graphs()
watch_symbol_blocks()
export_plain_graphs()

__version__ = "0.1.0"
__all__ = [
    "SyncBatchNorm",
    "SyncBatchNormError",
    "abandon_step",
    "convert_batchnorm",
    "convert_symbol",
    "convert_sync_batchnorm",
    "devices",
    "freeze_statistics",
    "install",
    "plain_symbol",
    "symbol",
    "uninstall",
]
