"""A GPU on which the kernels cannot run gets the portable back end, and a warning; one that fails later, an error."""

import re
import time

import pytest
from conftest import STANDS_IN
from testing import run_python

LAYER = """
import gluon_syncbn, mxnet as mx
layer = gluon_syncbn.SyncBatchNorm(in_channels=3, prefix='stem_', timeout=1)
layer.collect_params().setattr('grad_req', 'null')
layer.initialize(ctx=[mx.cpu(0), mx.gpu(0)])
print('BACK END', layer.backend)
"""


def run(code, **environment):
    done = run_python(code, **environment)
    return done.stdout + done.stderr


def test_native_where_all_is_well():
    said = run(LAYER)
    assert "BACK END native" in said and "portable" not in said


@pytest.mark.skipif(not STANDS_IN, reason="only a stand-in refuses on request")
def test_a_driver_that_does_not_know_the_compilers_language():
    said = run(LAYER, STAND_IN_REFUSE_PTX="1")
    assert "BACK END portable" in said
    assert "UserWarning: SyncBatchNorm runs on the portable back end, which is slower" in said
    assert "the CUDA kernels cannot run on gpu(0)" in said and "error 218" in said


def test_kernels_that_do_not_compile_show_the_compilers_log():
    broken = "import pathlib\npathlib.Path.read_text = lambda self, encoding: 'this is not CUDA'\n"
    said = run(broken + LAYER)
    assert "BACK END portable" in said
    assert "the CUDA kernels could not be compiled at run time" in said and "kernels.cu(1): error:" in said


def test_the_doctor_knows():
    said = run("import runpy\nrunpy.run_module('gluon_syncbn', run_name='__main__')")
    assert "native on GPU: compiled kernels, CUDA on gpu(0)" in said


STEP = """
with mx.autograd.record():
    outputs = [layer(mx.nd.ones((2, 3, 4, 4)).copyto(device)) for device in (mx.gpu(0), mx.cpu(0))]
for output in outputs:
    try:
        output.asnumpy()
        print('FINE')
    except mx.MXNetError as error:
        print('ERROR', str(error).replace(chr(10), ' '))
"""


@pytest.mark.skipif(not STANDS_IN, reason="only a stand-in fails on request")
@pytest.mark.parametrize("launches, kernel", [(1, "moments"), (2, "normalize")])
def test_a_kernel_that_fails_is_an_error_that_names_the_layer(launches, kernel):
    """The first launch is the one that tries the GPU."""
    gpu, cpu = re.findall("^(?:ERROR|FINE).*", run(LAYER + STEP, STAND_IN_LAUNCHES=launches), re.MULTILINE)
    assert gpu.startswith("ERROR") and "error 700" in gpu
    assert f"SyncBatchNorm 'stem': forward pass on gpu(0): CUDA kernel {kernel} could not be launched" in gpu
    if kernel == "moments":
        waited = "forward pass waited 1 s for 1 of 2 devices. Arrived: cpu(0). Missing: gpu(0)."
        came_later = "forward pass on cpu(0) was not run, because the step had failed: SyncBatchNorm 'stem': forward"
        assert cpu.startswith("ERROR") and (waited in cpu or came_later in cpu)
    else:  # they have met
        assert cpu == "FINE" or "the step had failed" in cpu


@pytest.mark.skipif(not STANDS_IN, reason="only a stand-in hangs on request")
@pytest.mark.parametrize("launch, kernel", [(2, "moments"), (3, "normalize")])
def test_a_kernel_that_does_not_end_is_an_error_in_time(launch, kernel):
    started = time.monotonic()
    said = run(f"{LAYER}{STEP}gluon_syncbn.abandon_step(){STEP}print('ENDED', flush=True)", STAND_IN_HANGS=launch)
    assert time.monotonic() - started < 60 and "ENDED" in said
    assert re.search(rf"ERROR.*'stem': forward pass on gpu.0.: CUDA kernel {kernel} has not ended within 1 s", said)
    # It may still write to what MXNet would use again.
    assert f"CUDA kernel {kernel} of an earlier call still runs" in said
