"""What the environment and the order of imports do to CPU devices, and what ``python -m gluon_syncbn`` says of it.

The compiled core gives each CPU device its own temporary space and random generators. Where it cannot, the package has
MXNet make many of both, on import, or says that it is too late.
"""

import re
import subprocess
import sys

import pytest
from testing import HANG, LONG, NOT_COMPILED, lean_environment, run_python

NAMES = ["MXNET_CPU_TEMP_COPY", "MXNET_CPU_PARALLEL_RAND_COPY"]
OURS = "16384 16"
SHOW = f"\nimport os; print(*[os.environ.get(name) for name in {NAMES}])"
GPU = """
import os, mxnet
mxnet.runtime.Features.is_enabled = lambda self, name: name == 'CUDA'
os.listdir = lambda folder: ['null', 'nvidia0', 'nvidiactl'] if folder == '/dev' else []
"""
IMPORT = "import gluon_syncbn"
IMPORTS = [
    (IMPORT, {}, "None None"),
    (IMPORT, {NAMES[0]: 70, NAMES[1]: 3}, "70 3"),
    (NOT_COMPILED + IMPORT, {}, OURS),
    (NOT_COMPILED + "import mxnet, gluon_syncbn", {}, OURS),
    (NOT_COMPILED + IMPORT, {NAMES[0]: 7, NAMES[1]: 3}, "7 3"),
    (NOT_COMPILED + IMPORT, {NAMES[0]: 7}, "7 16"),
    (NOT_COMPILED + GPU + IMPORT, {}, "None None"),
    (NOT_COMPILED + GPU + IMPORT, {"CUDA_VISIBLE_DEVICES": ""}, OURS),
]


@pytest.mark.parametrize("code, environment, expected", IMPORTS)
def test_import_sets_variables_only_where_nothing_is_compiled_and_no_gpu_is_there(code, environment, expected):
    """A value of the user's is left alone."""
    done = run_python(code + SHOW, **environment)
    assert done.stdout.strip() == expected and "Warning" not in done.stderr, done.stdout + done.stderr


@pytest.mark.parametrize("value", ["0", "-4", "many"])
def test_a_number_of_buffers_that_is_none(value):
    words = f"ValueError: MXNET_CPU_TEMP_COPY must be a positive whole number, not '{value}'."
    assert words in run_python(IMPORT, status=1, MXNET_CPU_TEMP_COPY=value).stderr


# Trains on one device and on four, compared with the reference; with many operators that need a slot, or a generator.
TRAIN = """
import threading, mxnet as mx
def make_threads():
    threads = [threading.Thread(target=lambda: mx.nd.random.normal(shape=9).sum().asscalar()) for _ in range(3)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
{early}
import gluon_syncbn
from testing import *
for count in (1, {devices}):
    try:
        {symbol}
        layer = initialized(gluon_syncbn.SyncBatchNorm(in_channels=3, prefix='late_'), count)
        arrays = shards_and_heads([(2, 3, 4, 4)] * count)
        check_step(layer, reference_of(layer), *arrays)
        conv, norm = lambda: nn.Conv2D(3, 3, padding=1, in_channels=3), lambda: SyncBatchNorm(in_channels=3)
        net = initialized(sequential(*(conv, lambda: nn.Dropout({rate}), norm) * 4), count)
        for mode in {modes}:
            set_mode(net, mode)
            for _ in range(3):
                step(net, *arrays, cpus(count))
                mx.nd.waitall()
        print('TRAINED on', count)
    except RuntimeError as error:
        print(error)
"""
ALL = {"devices": 4, "modes": ["imperative", "static"], "symbol": ""}
SYMBOL = "gluon_syncbn.symbol.SyncBatchNorm(mx.sym.var('data'), num_devices=count, name='late')"
SUM, SEED = "mx.nd.ones(3).sum().wait_to_read()", "mx.random.seed(1)"
TRAINS = [
    *((NOT_COMPILED, early, {}) for early in ("", "mx.nd.ones(3).wait_to_read()", "mx.nd.array([1]).asnumpy()")),
    *(("", early, {}) for early in (SUM, SEED, "make_threads()")),
    (NOT_COMPILED, SEED, {"MXNET_CPU_TEMP_COPY": 16384}),
]


@pytest.mark.parametrize("symbol", ["", SYMBOL])
@pytest.mark.parametrize("early", [SUM, SEED])
def test_several_cpu_contexts_are_refused_where_the_import_came_late(early, symbol):
    """At once, and with the number that MXNet has taken, which the environment does not tell any more."""
    done = run_python(NOT_COMPILED + TRAIN.format(early=early, rate=0.5, **{**ALL, "symbol": symbol}))
    assert "UserWarning: gluon_syncbn was imported after MXNet had begun to compute" in done.stderr
    *one, several = done.stdout.splitlines()
    assert one == ["TRAINED on 1"], done.stdout + done.stderr
    assert several.startswith("SyncBatchNorm 'late': gluon_syncbn was imported after")
    assert "MXNET_CPU_TEMP_COPY=4, MXNET_CPU_PARALLEL_RAND_COPY=1" in several
    chosen = " and ".join(f"{name}={value}" for name, value in zip(NAMES, OURS.split()))
    assert f"set {chosen} before the program starts" in several and "CPU contexts would wait for each other" in several


@pytest.mark.parametrize("before, early, environment", TRAINS)
def test_several_cpu_contexts_train(before, early, environment):
    """Where operators that take no slot run before the import, any if it is compiled, or where the user chose slots."""
    rate = 0 if environment else 0.5  # one generator is too few for Dropout
    done = run_python(before + TRAIN.format(early=early, rate=rate, **ALL), **environment)
    assert done.stdout == "TRAINED on 1\nTRAINED on 4\n", done.stdout + done.stderr
    words = "too late for it to set MXNET_CPU_PARALLEL_RAND_COPY=16: MXNet has taken"
    assert words in done.stderr if environment else "Warning" not in done.stderr


ALONE = """
from testing import *
layer = initialized(gluon_syncbn.SyncBatchNorm(in_channels=3, timeout=0.3), 2)
with autograd.record():
    layer(mx.nd.ones((2, 3))).asnumpy()
"""


@pytest.mark.parametrize("before, is_told", [("", False), (NOT_COMPILED, True)])
def test_a_device_that_waits_in_vain_is_told_of_slots_where_they_are_shared(before, is_told):
    done = run_python(before + ALONE, status=1, MXNET_CPU_TEMP_COPY=300)
    assert re.search(r"SyncBatchNormError: .* waited 0\.3 s for 1 of 2 devices", done.stderr), done.stderr
    reason = "CPU contexts ran out of temp-space slots or random generators (now MXNET_CPU_TEMP_COPY=300, MXNET_CPU_PAR"
    assert (reason in done.stderr) == is_told


@pytest.mark.parametrize("buffers, advised", [(1, 1024), (4, 1024), (900, None)])
def test_too_few_buffers_are_named_with_a_number(buffers, advised):
    timeout = 3 if buffers == 1 else LONG
    code = TRAIN.format(early="", rate=0, devices=2, modes=["imperative"], symbol="")
    done = run_python(code, MXNET_CPU_TEMP_COPY=buffers, GLUON_SYNCBN_TIMEOUT=timeout)
    words = rf"cpu\([01]\) needs more temporary buffers .* of {buffers}, .* MXNET_CPU_TEMP_COPY={advised} "
    assert bool(re.search(words, done.stderr)) == (advised is not None), done.stderr
    assert buffers == 1 or done.stdout.endswith("TRAINED on 2\n"), done.stdout


# The doctor

DOCTOR = "\nimport runpy, sys; sys.argv[1:] = {}; runpy.run_module('gluon_syncbn', run_name='__main__')"
NO_BACK_END = """
from gluon_syncbn.backends import choose
for backend in choose.BACKENDS.values():
    type(backend).unavailable_reason = lambda self, spec, devices: f"{self.name} cannot"
"""
NO_LIBRARY = """
from importlib import metadata
def version(name): raise metadata.PackageNotFoundError(name)
metadata.version = version
"""
RIGHT = "all-reduce   right on cpu(0), cpu(1); "
HEALTHY = f"MXNet        1.|CPU cores|CPU devices  each has|compiled     yes|all is well|{RIGHT}|"
FEW = "warning      MXNET_CPU_TEMP_COPY=64 may be too few for several CPU devices."
NAIVE = "CPU devices  all share |warning      MXNET_ENGINE_TYPE=NaiveEngine|all-reduce   FAILED"
PLAIN = (
    "compiled     no: it was not compiled when the package was installed|back end     portable on CPU|CPU devices  all "
    "share MXNET_CPU_TEMP_COPY=16384, MXNET_CPU_PARALLEL_RAND_COPY=16|warning      the compiled operator is missing|"
)
# As in a job of several processes where nothing is compiled.
NONE = "back end     none on CPU: SyncBatchNorm 'doctor': backend='auto' cannot run here: native cannot"
DOCTORS = [
    ("", {"GLUON_SYNCBN_BACKEND": "native"}, 0, HEALTHY + "back end     native on CPU"),
    ("", {"GLUON_SYNCBN_BACKEND": "portable"}, 0, HEALTHY + "back end     portable on CPU"),
    ("", {NAMES[0]: 64}, 0, FEW),
    ("", {"MXNET_ENGINE_TYPE": "NaiveEngine"}, 1, NAIVE),
    (NOT_COMPILED, {}, 0, PLAIN + RIGHT),
    (NO_LIBRARY, {}, 0, HEALTHY + "one only: neither mpi4py nor horovod is installed"),
    ("", {"GLUON_SYNCBN_TIMEOUT": "abc"}, 1, "warning      GLUON_SYNCBN_TIMEOUT: the timeout must be a positive"),
    ("", {"GLUON_SYNCBN_BACKEND": "abc"}, 1, "warning      GLUON_SYNCBN_BACKEND must be one of auto, native, portable"),
    ("", {"GLUON_SYNCBN_MAX_CPU_ISA": "abc"}, 1, "warning      GLUON_SYNCBN_MAX_CPU_ISA must be baseline, avx2 or"),
    ("", {"GLUON_SYNCBN_PROCESS_GROUP": "abc"}, 1, "warning      GLUON_SYNCBN_PROCESS_GROUP: process_group must"),
    (NO_BACK_END, {}, 1, NONE + "|all-reduce   FAILED: "),
]


@pytest.mark.parametrize("before, environment, status, words", DOCTORS)
def test_the_doctor_tells_what_runs_here_whether_it_works_and_what_to_change(before, environment, status, words):
    done = run_python(before + DOCTOR.format([]), status, **environment)
    assert "Traceback" not in done.stderr, done.stdout + done.stderr
    assert [item for item in words.split("|") if item not in done.stdout] == [], done.stdout
    assert ("all is well" in done.stdout) == ("all is well" in words)
    times = r"waiting      first to last device: forward [\d.]+ ms, backward [\d.]+ ms"
    assert bool(re.search(times, done.stdout)) == ("back end     native" in done.stdout and not status)


def test_the_doctor_prints_its_usage():
    """That it is a command is shown by the pages, where it runs."""
    assert run_python(DOCTOR.format(["--help"])).stdout.startswith("usage: python -m gluon_syncbn")


NO_MXNET = """
import builtins, sys
assert "mxnet" not in sys.modules
imported = builtins.__import__

def importing(name, *how, **more):
    if name.split(".")[0] == "mxnet":
        raise {error}
    return imported(name, *how, **more)

builtins.__import__ = importing
import gluon_syncbn
"""
WITHOUT = [
    (AttributeError("no numpy.bool"), "cannot be imported with NumPy 1.*pip install 'numpy<1.24'"),
    (ModuleNotFoundError("no mxnet", name="mxnet"), "MXNet is not installed. Run: pip install 'mxnet==1.9.1'"),
    (ModuleNotFoundError("no requests", name="requests"), "^ModuleNotFoundError: no requests"),
]


@pytest.mark.parametrize("error, words", WITHOUT, ids=["new NumPy", "no MXNet", "another"])
def test_an_installation_that_cannot_work_names_the_command_that_repairs_it(error, words):
    """As MXNet fails with a newer NumPy, and where it is not there."""
    made = f"ModuleNotFoundError({error.msg!r}, name={error.name!r})" if isinstance(error, ImportError) else repr(error)
    command = [sys.executable, "-c", NO_MXNET.format(error=made)]
    done = subprocess.run(command, env=lean_environment(), timeout=HANG, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1 and re.search(words, done.stderr.splitlines()[-1]), done.stderr
