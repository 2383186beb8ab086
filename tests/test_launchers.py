"""In a job of several processes, which do not synchronize with each other yet, a layer says so once."""

import pytest
from harness import run_python

LAYERS = """
import warnings
import mxnet as mx, gluon_syncbn
warnings.simplefilter("always")
for _ in range(2):
    gluon_syncbn.SyncBatchNorm(prefix="stem_")
gluon_syncbn.symbol.SyncBatchNorm(mx.sym.var("data"), num_devices=2)
"""
WORDS = "SyncBatchNorm 'stem': this is one of {} Synchronized layers synchronize the devices of each process only"


@pytest.mark.parametrize(
    "variables, told",
    [
        ({"OMPI_COMM_WORLD_SIZE": 4, "HOROVOD_SIZE": 4}, "4 processes of Horovod."),
        ({"PMI_SIZE": 2}, "2 processes of MPI."),
        ({"OMPI_COMM_WORLD_SIZE": 1, "PMI_SIZE": ""}, None),
    ],
)
def test_it_warns_once_where_there_are_several(variables, told):
    done = run_python(LAYERS, **variables)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("this is one of") == (told is not None)
    if told is not None:
        assert WORDS.format(told) in done.stderr and "<string>:6: UserWarning" in done.stderr
