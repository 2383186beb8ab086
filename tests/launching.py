"""Starts jobs of several processes, as `mpirun` and `horovodrun` do, with a hard limit; and what they run has in
common."""

import importlib.util
import os
import subprocess
import sys
from typing import NamedTuple

import pytest
from common import launcher, path_of_launchers
from testing import HANG, ROOT, lean_environment

ENGINES = ["mpi", "horovod"]
SCRIPTS = os.path.join(ROOT, "tests", "jobs")


class Done(NamedTuple):
    """How a job ended, and what all of its processes have printed."""

    returncode: int
    text: str


def missing(engine: str) -> str:
    """Why jobs with this engine cannot run here; empty if they can."""
    module = {"mpi": "mpi4py", "horovod": "horovod"}[engine]
    if importlib.util.find_spec(module) is None:
        return f"{module} is not installed"
    program = launcher(engine, 1)[0]
    return "" if os.path.exists(program) else f"there is no {program}"


def need(engine: str) -> None:
    """Fail the test where the engine is not there."""
    reason = missing(engine)
    if reason:
        pytest.fail(f"NOT RUN: {reason}; `make .venv/horovod` installs Horovod")


def environment(**variables) -> dict:
    """Without scikit-learn, which takes a part of every start (tests/lean)."""
    chosen = {**lean_environment(), "PATH": path_of_launchers(), "OMP_NUM_THREADS": "1"}
    chosen["PYTHONPATH"] = os.pathsep.join([chosen["PYTHONPATH"], SCRIPTS, os.path.join(ROOT, "examples")])
    return {**chosen, **{name: str(value) for name, value in variables.items()}}


def command_of_job(engine: str, size: int, script: str, *arguments, hosts=None, **variables) -> tuple:
    """The command that runs a script of ``tests/jobs`` in so many processes, and its environment.

    Each process is told the engine first. ``hosts`` are `hosts.Hosts`; else all processes are on this one.
    """
    chosen = environment(**variables)
    ours = [
        name
        for name in chosen
        if name.startswith(("GLUON_SYNCBN_", "HOROVOD_", "JOB_", "MXNET_", "OMP_", "PYTHONPATH"))
    ]
    words = launcher(engine, size, hosts, variables=ours, folder=ROOT)
    return [*words, sys.executable, os.path.join(SCRIPTS, script), engine, *map(str, arguments)], chosen


def run_job(engine: str, size: int, script: str, *arguments, limit=HANG, hosts=None, **variables) -> Done:
    """Run it to its end."""
    command, chosen = command_of_job(engine, size, script, *arguments, hosts=hosts, **variables)
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=chosen,
        timeout=limit,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    )
    return Done(done.returncode, done.stdout)
