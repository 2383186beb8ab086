"""One fault of tests/endings.py on two GPUs, or with FIRST_DEVICE=cpu on a CPU and a GPU; the same arguments. Needs no
kernel of MXNet's own (see conftest.py)."""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.dirname(HERE)]
if "STAND_IN_KERNELS" in os.environ:
    os.environ["MXNET_USE_FUSION"] = "0"  # what MXNet compiles of the operators between two layers

import endings  # noqa: E402
import mxnet as mx  # noqa: E402
from conftest import zeros_by_copy  # noqa: E402

if __name__ == "__main__":
    endings.DEVICES[:] = [mx.Context(os.environ.get("FIRST_DEVICE", "gpu"), 0), mx.gpu(1)]
    mx.nd.zeros = zeros_by_copy(mx.nd.zeros)
    endings.main()
