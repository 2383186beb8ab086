"""Starts jobs of several processes, as `mpirun` and `horovodrun` do, with a hard limit."""

import importlib.util
import os
import subprocess
import sys

import pytest
from common import launcher, path_of_launchers
from testing import HANG, ROOT, lean_environment

ENGINES = ["mpi", "horovod"]
SCRIPTS = os.path.join(ROOT, "tests", "jobs")
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "encoding": "utf-8", "errors": "replace"}


def need(engine: str) -> None:
    """Fail the test where the engine is not there."""
    module, program = {"mpi": "mpi4py", "horovod": "horovod"}[engine], launcher(engine, 1)[0]
    if importlib.util.find_spec(module) is None or not os.path.exists(program):
        pytest.fail(f"NOT RUN: there is no {module}, or no {program}; `make .venv/horovod` installs Horovod")


def command_of_job(engine: str, size: int, script: str, *arguments, hosts=None, **variables) -> tuple:
    """The command that runs a script of ``tests/jobs`` in so many processes, and its environment.

    Each process is told the engine first. ``hosts`` are `hosts.Hosts`; else all processes are on this one.
    """
    need(engine)
    chosen = {**lean_environment(), "PATH": path_of_launchers(), "OMP_NUM_THREADS": "1"}
    chosen["PYTHONPATH"] = os.pathsep.join([chosen["PYTHONPATH"], SCRIPTS, os.path.join(ROOT, "examples")])
    chosen.update({name: str(value) for name, value in variables.items()})
    kinds = ("GLUON_SYNCBN_", "HOROVOD_", "JOB_", "MXNET_", "OMP_", "PYTHONPATH")
    ours = [name for name in chosen if name.startswith(kinds)]
    words = launcher(engine, size, hosts, variables=ours, folder=ROOT)
    return [*words, sys.executable, os.path.join(SCRIPTS, script), engine, *map(str, arguments)], chosen


def run_job(engine: str, size: int, script: str, *arguments, hosts=None, **variables) -> subprocess.CompletedProcess:
    """Run it to its end; ``stdout`` is what all of its processes have printed."""
    command, chosen = command_of_job(engine, size, script, *arguments, hosts=hosts, **variables)
    return subprocess.run(command, cwd=ROOT, env=chosen, timeout=HANG, **PIPES)


def run_ways(engine: str, size: int, ways: str, *arguments, hosts=None, **variables) -> str:
    """Run ways of jobs/ways.py in one job, one after the other, all of which must be right; what it has said."""
    done = run_job(engine, size, "ways.py", ",".join(ways.split()), *arguments, hosts=hosts, **variables)
    assert done.returncode == 0 and "pending work had failed" not in done.stdout, done.stdout
    for way in ways.split():
        assert done.stdout.count(f"RIGHT {way}\n") == size, (way, done.stdout)
    return done.stdout
