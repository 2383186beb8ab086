"""``python -m gluon_syncbn`` tells what runs here, whether it works, and what to change."""

import re
import subprocess
import sys

import pytest
from harness import HANG, run_python

DOCTOR = "import runpy; runpy.run_module('gluon_syncbn', run_name='__main__')"


def test_a_healthy_installation(backend):
    done = run_python(DOCTOR)
    assert done.returncode == 0, done.stdout + done.stderr
    for words in ("MXNet        1.", "CPU cores", "CPU devices  each has", "compiled     yes", "all is well"):
        assert words in done.stdout
    assert f"back end     {backend} on CPU" in done.stdout
    assert "all-reduce   right on cpu(0), cpu(1); " in done.stdout
    words = r"waiting      first to last device: forward [\d.]+ ms, backward [\d.]+ ms"
    assert bool(re.search(words, done.stdout)) == (backend == "native")  # portable keeps no notes


@pytest.mark.parametrize(
    "environment, words",
    [
        ({"MXNET_CPU_TEMP_COPY": 64}, "warning      MXNET_CPU_TEMP_COPY=64 may be too few for several CPU devices."),
        ({"MXNET_ENGINE_TYPE": "NaiveEngine"}, "CPU devices  all share "),
        ({"MXNET_ENGINE_TYPE": "NaiveEngine"}, "warning      MXNET_ENGINE_TYPE=NaiveEngine"),
    ],
)
def test_settings_that_harm_are_named(environment, words):
    assert words in run_python(DOCTOR, **environment).stdout


def test_without_the_compiled_operator():
    code = """
import pathlib
exists = pathlib.Path.exists
pathlib.Path.exists = lambda path: path.suffix != '.so' and exists(path)
"""
    done = run_python(code + DOCTOR)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "compiled     no: it was not compiled when the package was installed" in done.stdout
    assert "CPU devices  all share MXNET_CPU_TEMP_COPY=16384, MXNET_CPU_PARALLEL_RAND_COPY=16" in done.stdout
    assert "back end     portable on CPU" in done.stdout
    assert "warning      the compiled operator is missing" in done.stdout


def test_a_layer_that_cannot_run_is_an_error_code():
    done = run_python(DOCTOR, MXNET_ENGINE_TYPE="NaiveEngine")
    assert done.returncode == 1
    assert "all-reduce   FAILED" in done.stdout


def test_as_a_command():
    done = subprocess.run([sys.executable, "-m", "gluon_syncbn"], capture_output=True, encoding="utf-8", timeout=HANG)
    assert done.returncode == 0, done.stdout + done.stderr


def test_where_no_back_end_can_run_the_report_is_made_all_the_same():
    """As in a job of several processes where nothing is compiled."""
    code = """
from gluon_syncbn.backends import choose
for backend in choose.BACKENDS.values():
    type(backend).unavailable_reason = lambda self, spec, devices: f"{self.name} cannot"
"""
    done = run_python(code + DOCTOR)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert (
        "back end     none on CPU: SyncBatchNorm 'doctor': backend='auto' cannot run here: native cannot" in done.stdout
    )
    assert "all-reduce   FAILED: " in done.stdout
