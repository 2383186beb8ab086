"""Thousands of steps: memory and threads stay what they are, and every step gives the same bits for the same batch.

The long versions are in docs/: 20,000 steps of benchmarks/long_run.py, 6,000 of benchmarks/soak.py.
"""

import os
import subprocess
import sys

from harness import HANG, ROOT, lean_environment


def run(script, backend, *arguments):
    environment = {**lean_environment(), "GLUON_SYNCBN_BACKEND": backend}
    command = [sys.executable, os.path.join(ROOT, "benchmarks", script), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, encoding="utf-8", timeout=HANG)


def test_memory_and_threads(backend):
    steps = {"native": 1000, "portable": 500}[backend]
    done = run("long_run.py", backend, "--steps", str(steps))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"step {steps}: " in done.stdout
    assert f"back end {backend}: memory grew by" in done.stdout
