import os
import random
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
# In place of 16384, with which the buffers of all tests grow to 8 GB. Processes that tests start have our default.
os.environ.setdefault("MXNET_CPU_TEMP_COPY", "1024")
sys.path[:0] = [HERE, *(os.path.join(os.path.dirname(HERE), name) for name in ("examples", "benchmarks"))]

import harness  # noqa: E402, F401  (imports gluon_syncbn before MXNet computes anything)
import pytest  # noqa: E402

from gluon_syncbn.backends import native  # noqa: E402


def pytest_addoption(parser):
    parser.addoption("--seed", type=int, help="of tests that draw at random; else another in each run")


@pytest.fixture
def seed(request):
    given = request.config.getoption("--seed")
    return random.SystemRandom().randrange(1 << 30) if given is None else given


def pytest_report_header(config):
    return f"kernels: {native.instruction_set()}; oneDNN: at most {os.environ.get('DNNL_MAX_CPU_ISA', 'what there is')}"


@pytest.fixture(params=["native", "portable"])
def backend(request, monkeypatch):
    """What 'auto' means in this test, and in the processes that it starts."""
    monkeypatch.setenv("GLUON_SYNCBN_BACKEND", request.param)
    return request.param
