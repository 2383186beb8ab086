"""These tests need a CUDA build of MXNet and a GPU; `make gpu` gives them what of it is not there (README.md)."""

import functools
import os
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.dirname(HERE)]

import mxnet as mx  # noqa: E402
import pytest  # noqa: E402

import gluon_syncbn  # noqa: E402, F401  (before MXNet computes anything)

GPUS = mx.context.num_gpus()
STANDS_IN = "STAND_IN_KERNELS" in os.environ


@functools.lru_cache(maxsize=None)
def _has_kernels() -> bool:
    """Whether MXNet's own kernels run on this GPU; those of 1.9.1 were compiled for capability 5.0 to 8.6."""
    code = "import mxnet as mx\nassert mx.nd.ones(1, ctx=mx.gpu(0)).asscalar() == 1"
    return subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def pytest_report_header(config):
    if STANDS_IN:
        return "GPUs: none. CUDA is a stand-in, kernels run on the CPU: this shows that numbers are right, not speed."
    return f"GPUs: {GPUS}"


def pytest_collection_modifyitems(items):
    for item in items:
        if os.path.dirname(str(item.fspath)) != HERE:
            continue
        if item.get_closest_marker("mxnet_kernels") and GPUS and not _has_kernels():
            item.add_marker(pytest.mark.skip(reason="MXNet has no kernels for this GPU"))
        needed = getattr(item.get_closest_marker("gpus"), "args", (1,))[0]
        if needed > 1:
            item.add_marker("several_gpus")
        if needed > GPUS:
            reason = "MXNet sees no GPU; `make gpu` runs this" if GPUS == 0 else f"needs {needed} GPUs"
            item.add_marker(pytest.mark.skip(reason=reason))


def zeros_by_copy(made):
    """In place of ``made``, `mx.nd.zeros`, which on a GPU takes a kernel of MXNet's own.

    Neither a stand-in has that, nor a GPU that is newer than MXNet.
    """

    def zeros(shape, ctx=None, dtype=None, **kwargs):
        if ctx is None or ctx.device_type != "gpu":
            return made(shape, ctx=ctx, dtype=dtype, **kwargs)
        return made(shape, ctx=mx.cpu(), dtype=dtype).copyto(ctx)

    return zeros


@pytest.fixture(autouse=True)
def without_kernels_of_mxnet(monkeypatch):
    monkeypatch.setattr(mx.nd, "zeros", zeros_by_copy(mx.nd.zeros))
