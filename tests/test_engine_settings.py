"""Where the compiled core cannot give CPU devices their own resources, the package has MXNet make many, on import."""

import pytest
from harness import run_python

from gluon_syncbn.mxnet_engine.cpu_resources import CPU_RESOURCES

NAMES = list(CPU_RESOURCES)
OURS = " ".join(str(value) for value, _ in CPU_RESOURCES.values())
SHOW = f"import os; print(*[os.environ.get(name) for name in {NAMES}])"
NOT_COMPILED = """
import pathlib
exists = pathlib.Path.exists
pathlib.Path.exists = lambda path: path.suffix != '.so' and exists(path)
"""


def test_import_sets_the_variables():
    done = run_python(NOT_COMPILED + "import gluon_syncbn\n" + SHOW)
    assert done.stdout.strip() == OURS
    assert "UserWarning" not in done.stderr


def test_import_after_mxnet_alone_is_early_enough():
    done = run_python(NOT_COMPILED + "import mxnet, gluon_syncbn\n" + SHOW)
    assert done.stdout.strip() == OURS
    assert "UserWarning" not in done.stderr


def test_a_value_of_the_user_is_left_alone():
    code = NOT_COMPILED + "import gluon_syncbn\n" + SHOW
    done = run_python(code, MXNET_CPU_TEMP_COPY=7, MXNET_CPU_PARALLEL_RAND_COPY=3)
    assert done.stdout.strip() == "7 3"


def test_nothing_is_set_where_there_is_a_gpu():
    code = (
        "import os, mxnet\n"
        "mxnet.runtime.Features.is_enabled = lambda self, name: name == 'CUDA'\n"
        "os.listdir = lambda folder: ['null', 'nvidia0', 'nvidiactl'] if folder == '/dev' else []\n"
        "import gluon_syncbn\n"
    )
    assert run_python(NOT_COMPILED + code + SHOW).stdout.strip() == "None None"
    assert run_python(NOT_COMPILED + code + SHOW, CUDA_VISIBLE_DEVICES="").stdout.strip() == OURS


LATE = """
import time
import mxnet as mx
{early}
began = time.monotonic()
import gluon_syncbn
from gluon_syncbn.mxnet_engine.cpu_resources import settings_in_force
print(settings_in_force())
layer = gluon_syncbn.SyncBatchNorm(in_channels=3, prefix='late_')
for devices in ([mx.cpu(0)], [mx.cpu(0), mx.cpu(1)]):
    layer.initialize(ctx=devices, force_reinit=True)
    try:
        with mx.autograd.record():
            {train}
        mx.nd.waitall()
        print('TRAINED on', len(devices))
    except RuntimeError as error:
        print(error)
"""
TRAIN = "[layer(mx.nd.ones((2, 3), ctx=device)) for device in devices]"
TRAIN_SYMBOL = "gluon_syncbn.symbol.SyncBatchNorm(mx.sym.var('data'), num_devices=len(devices), name='late')"
AS_MXNET = "MXNET_CPU_TEMP_COPY=4, MXNET_CPU_PARALLEL_RAND_COPY=1"
CHOSEN = " and ".join(f"{name}={value}" for name, value in zip(NAMES, OURS.split()))


@pytest.mark.parametrize("train", [TRAIN, TRAIN_SYMBOL])
@pytest.mark.parametrize("early", ["mx.nd.ones(3).sum().wait_to_read()", "mx.random.seed(1)"])
def test_several_cpu_contexts_are_refused_where_the_import_came_late(early, train):
    """At once, and with the number that MXNet has taken, which the environment does not tell any more."""
    done = run_python(NOT_COMPILED + LATE.format(early=early, train=train))
    assert "UserWarning: gluon_syncbn was imported after MXNet had begun to compute" in done.stderr
    in_force, one, several = done.stdout.splitlines()
    assert (in_force, one) == (AS_MXNET, "TRAINED on 1")
    assert several.startswith("SyncBatchNorm 'late': gluon_syncbn was imported after") and AS_MXNET in several
    assert f"set {CHOSEN} before the program starts" in several


@pytest.mark.parametrize("early", ["", "mx.nd.ones(3).wait_to_read()", "mx.nd.array([1]).asnumpy()"])
def test_operators_that_take_no_slot_may_run_before_the_import(early):
    done = run_python(NOT_COMPILED + LATE.format(early=early, train=TRAIN))
    assert "TRAINED on 2" in done.stdout, done.stdout + done.stderr
    assert "16384" in done.stdout and "UserWarning" not in done.stderr


def test_a_late_import_where_the_user_chose_the_slots():
    done = run_python(NOT_COMPILED + LATE.format(early="mx.random.seed(1)", train=TRAIN), MXNET_CPU_TEMP_COPY=64)
    assert "too late for it to set MXNET_CPU_PARALLEL_RAND_COPY=16: MXNet has taken" in done.stderr
    assert "TRAINED on 2" in done.stdout


STARVED = """
import gluon_syncbn
from harness import *
net = mx.gluon.nn.HybridSequential()
for _ in range(4):
    net.add({before}, gluon_syncbn.SyncBatchNorm(in_channels=8))
net.initialize(ctx=cpus({devices}))
set_mode(net, {mode!r})
shards = random_shards([(1, 8, 8, 8)] * {devices})
try:
    for _ in range(5):
        step(net, shards, shards, cpus({devices}))
        mx.nd.waitall()
    print('RAN')
except mx.MXNetError as error:
    print(error)
    print('FAILED')
"""


@pytest.mark.parametrize(
    "name, before, devices, mode",
    [
        ("MXNET_CPU_TEMP_COPY", "mx.gluon.nn.Conv2D(8, 3, padding=1, in_channels=8)", 2, "static"),
        ("MXNET_CPU_PARALLEL_RAND_COPY", "mx.gluon.nn.Dropout(0.5)", 4, "imperative"),
    ],
)
def test_ours_prevent_the_deadlock_that_mxnet_has_by_default(name, before, devices, mode):
    """The reason for all of this: with too few this net cannot run, and says so; with ours it does."""
    code = STARVED.format(before=before, devices=devices, mode=mode)
    ours = run_python(NOT_COMPILED + code)
    starved = run_python(NOT_COMPILED + code, GLUON_SYNCBN_TIMEOUT=3, **{name: 1})
    assert ours.stdout.strip().endswith("RAN")
    assert starved.stdout.strip().endswith("FAILED")
    assert "ran out of temp-space slots or random generators (now MXNET_CPU" in starved.stdout
    assert f"{name}=1" in starved.stdout
