"""In a job of several processes of which none was chosen to synchronize with the others, a layer says so once."""

import pytest
from launching import need
from testing import run_python

LAYERS = """
import warnings
import mxnet as mx, gluon_syncbn
warnings.simplefilter("always")
for _ in range(2):
    gluon_syncbn.SyncBatchNorm(prefix="stem_")
gluon_syncbn.symbol.SyncBatchNorm(mx.sym.var("data"), num_devices=2)
"""
STEM = "SyncBatchNorm 'stem': "
WARNED = [
    ({"OMPI_COMM_WORLD_SIZE": 4, "HOROVOD_SIZE": 4}, "4 processes of Horovod"),
    ({"PMI_SIZE": 2}, "2 processes of MPI"),
    ({"OMPI_COMM_WORLD_SIZE": 1, "PMI_SIZE": ""}, ""),
    ({"OMPI_COMM_WORLD_SIZE": 4, "GLUON_SYNCBN_PROCESS_GROUP": "none"}, ""),
]
REFUSED = [
    ("layer(process_group='horovod')", f"RuntimeError: {STEM}Horovod is not initialized: call hvd.init()"),
    ("layer(process_group='nccl')", f"ValueError: {STEM}process_group must be one of auto, horovod, mpi"),
    ("layer(process_group=3)", f"TypeError: {STEM}process_group must be a name, what init_process_group"),
    ("layer(kvstore='nccl')", f"ValueError: {STEM}kvstore 'nccl' cannot be made here"),
    ("layer(kvstore='horovod')", f"RuntimeError: {STEM}Horovod is not initialized: call hvd.init()"),
    # 'auto' is what has started the process, whether it is installed or not, and although MPI is there.
    ("os.environ.update(HOROVOD_SIZE='2'); layer(process_group='auto')", f"RuntimeError: {STEM}Horovod "),
    (
        "os.environ.update(HOROVOD_SIZE='2'); layer(process_group='mpi')",
        f"RuntimeError: {STEM}Horovod has started 2 processes, but 'mpi' knows this process only. Choose 'horovod', or",
    ),
    ("init_process_group('x')", "ValueError: gluon_syncbn.init_process_group: process_group must be one of"),
    (
        "os.environ.update(GLUON_SYNCBN_PROCESS_GROUP='gloo'); layer()",
        "ValueError: GLUON_SYNCBN_PROCESS_GROUP must be one of auto, horovod, mpi, none, not 'gloo'.",
    ),
]


@pytest.mark.parametrize("variables, told", WARNED)
def test_it_warns_once_where_there_are_several(variables, told):
    done = run_python(LAYERS, **variables)
    assert done.stderr.count("this is one of") == bool(told), done.stderr
    if told:
        words = f"{told}, and no process group was chosen. Layers synchronize the devices of each process only"
        assert f"{STEM}this is one of {words}" in done.stderr and "<string>:6: UserWarning" in done.stderr


@pytest.mark.parametrize("code, words", REFUSED)
def test_what_cannot_connect_is_refused_at_once(code, words):
    for name in ("horovod", "mpi"):
        if f"'{name}'" in code:
            need(name)
    layer = "def layer(**options): SyncBatchNorm(prefix='stem_', **options)"
    imports = "import os\nfrom gluon_syncbn import SyncBatchNorm, init_process_group\n"
    assert words in run_python(f"{imports}{layer}\n{code}", status=1).stderr
