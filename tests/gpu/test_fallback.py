"""A GPU on which the kernels cannot run gets the portable back end, and a warning that says why."""

import os
import subprocess
import sys

import pytest
from conftest import STANDS_IN

LAYER = """
import mxnet as mx
from gluon_syncbn import SyncBatchNorm
layer = SyncBatchNorm(in_channels=3, prefix='stem_')
layer.collect_params().setattr('grad_req', 'null')
layer.initialize(ctx=[mx.cpu(0), mx.gpu(0)])
print('BACK END', layer.backend)
"""


def run(code, **environment):
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_native_where_all_is_well():
    said = run(LAYER)
    assert "BACK END native" in said and "portable" not in said


@pytest.mark.skipif(not STANDS_IN, reason="only a stand-in refuses on request")
def test_a_driver_that_does_not_know_the_compilers_language():
    said = run(LAYER, STAND_IN_REFUSE_PTX="1")
    assert "BACK END portable" in said
    assert "UserWarning: SyncBatchNorm 'stem' runs on the portable back end, which is slower" in said
    assert "the CUDA kernels cannot run on gpu(0)" in said and "error 218" in said


def test_kernels_that_do_not_compile_show_the_compilers_log():
    broken = "import pathlib\npathlib.Path.read_bytes = lambda self: b'this is not CUDA'\n"
    said = run(broken + LAYER)
    assert "BACK END portable" in said
    assert "the CUDA kernels could not be compiled at run time" in said and "source.cu(1): error:" in said


def test_the_doctor_knows(capfd):
    said = run("import runpy\nrunpy.run_module('gluon_syncbn', run_name='__main__')", OMP_NUM_THREADS="1")
    assert "native on GPU: compiled kernels, CUDA on gpu(0)" in said
