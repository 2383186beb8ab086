"""Thousands of steps: memory and threads stay what they are, and every step gives the same bits for the same batch.

The long versions are in docs/: 20,000 steps of benchmarks/long_run.py, 6,000 of benchmarks/soak.py.
"""

from harness import run_program


def test_memory_and_threads(backend):
    steps = {"native": 1000, "portable": 500}[backend]
    done = run_program(["benchmarks/long_run.py", "--steps", steps], GLUON_SYNCBN_BACKEND=backend)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"step {steps}: " in done.stdout
    assert f"back end {backend}: memory grew by" in done.stdout
