"""What will be measured on a GPU runs."""

import pytest
from testing import run_program


@pytest.mark.parametrize(
    "devices", ["cpu:0,gpu:0", pytest.param("gpu:0,gpu:1", marks=pytest.mark.gpus(2))], ids=["cpu, gpu", "gpu, gpu"]
)
def test_gpu_rendezvous(devices):
    done = run_program(["benchmarks/gpu_rendezvous.py", "--rounds", 3, "--devices", devices])
    assert f"{devices}, forward: " in done.stdout and f"{devices}, backward: " in done.stdout
