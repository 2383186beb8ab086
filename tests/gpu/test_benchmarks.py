"""What will be measured on a GPU runs."""

import os
import subprocess
import sys

import pytest

SCRIPT = os.path.join(os.path.dirname(__file__), "..", "..", "benchmarks", "gpu_rendezvous.py")


@pytest.mark.parametrize(
    "devices", ["cpu:0,gpu:0", pytest.param("gpu:0,gpu:1", marks=pytest.mark.gpus(2))], ids=["cpu, gpu", "gpu, gpu"]
)
def test_gpu_rendezvous(devices):
    command = [sys.executable, SCRIPT, "--rounds", "3", "--devices", devices]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=600)
    assert done.returncode == 0, done.stderr
    assert f"{devices}, forward: " in done.stdout and f"{devices}, backward: " in done.stdout
