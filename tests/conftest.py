import os
import sys
from concurrent.futures import ThreadPoolExecutor

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, *(os.path.join(os.path.dirname(HERE), name) for name in ("examples", "benchmarks"))]

import harness  # noqa: E402, F401  (imports gluon_syncbn before MXNet computes anything)
import pytest  # noqa: E402

_running = {}


@pytest.fixture
def side_by_side(request):
    """``side_by_side(run)`` returns ``run(**parameters)`` of this case, for tests that wait for a process of their own.

    The cases of a test that were chosen run two at a time from the first on, which saves the suite minutes.
    """

    def result(run):
        if request.function not in _running:
            cases = [item.callspec.params for item in request.session.items if item.function is request.function]
            pool = ThreadPoolExecutor(2)
            _running[request.function] = [(case, pool.submit(run, **case)) for case in cases]
        mine = request.node.callspec.params
        return next(future for case, future in _running[request.function] if case == mine).result()

    return result


@pytest.fixture(params=["native", "portable"])
def backend(request, monkeypatch):
    """What 'auto' means in this test, and in the processes that it starts."""
    monkeypatch.setenv("GLUON_SYNCBN_BACKEND", request.param)
    return request.param
