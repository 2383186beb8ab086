"""Processes that have MXNet imported when they start, forked from one that has done this and nothing else.

The import takes half a second of a processor (tests/lean), and the tests start hundreds of processes.

Each worker of pytest has a server, with one thread. It never lets MXNet compute, so there is no engine in it. It reads
requests, a line of JSON each, from its standard input, and answers on its standard output: first with the number of its
threads, then with the exit code of each process that has ended. When its standard input ends, so do its child and the
server.

A child is forked by glibc's ``_Fork``, which runs no handlers for forks: MXNet's would start an engine with a single
thread, as for the workers of a DataLoader. So the child is as a new process is after ``import mxnet``: without an
engine, whose environment variables it is yet to read. A process that needs other variables from its very start is
started in the usual way. So are all where there is no ``_Fork`` (before glibc 2.34), or where the import has started
threads, as OpenBLAS does with ``OMP_NUM_THREADS=2``. All children of a server share its hash seed and addresses.
"""

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import types
from typing import Dict, List, Optional

HANG = 600  # seconds for what takes one
# Variables that are read later than `import mxnet`.
LATE = ("GLUON_SYNCBN_", "MXNET_CPU_TEMP_COPY", "MXNET_CPU_PARALLEL_RAND_COPY", "MXNET_ENGINE_TYPE", "PYTEST_")


def run(arguments: List[str], cwd: str, env: dict, timeout: float, usual: Optional[dict], merged: bool):
    """``subprocess.run`` of a Python program, ``["-c", code]`` or a script's path and its arguments; captures text.

    ``usual`` is the environment of most programs, which they share with the server; None for no server. ``merged``:
    what the program says on its standard error is in ``stdout``.
    """
    if usual is not None and _early(env) == _early(usual) and hasattr(ctypes.PyDLL(None), "_Fork"):
        server = _idle.pop() if _idle else Server(usual)
        if server.has_one_thread:
            done = server.run(arguments, cwd, env, timeout, merged)
            _idle.append(server)  # not where that failed: its answers would be taken for those to another request
            return done
    errors = subprocess.STDOUT if merged else subprocess.PIPE
    options = {"cwd": cwd, "env": env, "timeout": timeout, "encoding": "utf-8", "errors": "replace"}
    return subprocess.run([sys.executable, *arguments], stdout=subprocess.PIPE, stderr=errors, **options)


def _early(env: Dict[str, str]) -> Dict[str, str]:
    return {name: value for name, value in env.items() if not name.startswith(LATE)}


class Server:
    """It runs one program at a time; there are as many servers as there have been programs at a time."""

    def __init__(self, env: Dict[str, str]):
        command, pipe = [sys.executable, os.path.abspath(__file__)], subprocess.PIPE
        self._process = subprocess.Popen(command, env=_early(env), stdin=pipe, stdout=pipe, bufsize=0)
        self.has_one_thread = self._answer(HANG) == 1

    def run(self, arguments, cwd, env, timeout, merged) -> subprocess.CompletedProcess:
        with tempfile.NamedTemporaryFile() as out, tempfile.NamedTemporaryFile() as errors:
            names = [out.name, out.name if merged else errors.name]
            request = {"arguments": arguments, "cwd": cwd, "env": env, "files": names}
            try:
                self._process.stdin.write(json.dumps(request).encode() + b"\n")
                code = self._answer(timeout)
            except BaseException:
                self._process.stdin.close()  # ends the child, too
                self._process.wait()
                raise
            texts = [file.read().decode(errors="replace") for file in (out, errors)]
        return subprocess.CompletedProcess(arguments, code, *texts)

    def _answer(self, timeout: float) -> int:
        if not select.select([self._process.stdout], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("a process of a test", timeout)
        return int(self._process.stdout.readline())


_idle: List[Server] = []


def serve(requests: int, answers: int) -> dict:
    """Fork a child for each request; returns in the child, with the request."""
    fork = ctypes.PyDLL(None)._Fork
    say(answers, len(os.listdir("/proc/self/task")))
    lines = os.fdopen(os.dup(requests), "rb", buffering=0)
    while True:
        line = lines.readline()
        if not line:
            os._exit(0)
        ctypes.pythonapi.PyOS_BeforeFork()
        child = fork()
        if child == 0:
            ctypes.pythonapi.PyOS_AfterFork_Child()
            os.setsid()
            lines.close()
            return json.loads(line)
        ctypes.pythonapi.PyOS_AfterFork_Parent()
        say(answers, exit_code(child, requests))


def say(answers: int, number: int) -> None:
    os.write(answers, f"{number}\n".encode())


def exit_code(child: int, requests: int) -> int:
    """Wait for a child; end it, and this process, where nobody wants to know any more."""
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        if select.select([requests], [], [], 0.01)[0]:  # no request comes before this one is answered
            os.killpg(child, signal.SIGKILL)
            os._exit(1)


def become(request: dict) -> types.CodeType:
    """Take over the environment, the files and the arguments; returns the program, to run as ``__main__``."""
    import numpy as np

    out, errors = (os.open(name, os.O_WRONLY | os.O_APPEND) for name in request["files"])
    for descriptor, number in ((os.open(os.devnull, os.O_RDONLY), 0), (out, 1), (errors, 2)):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    np.random.seed()  # Python's own generator has a new seed after forks already
    first, *rest = request["arguments"]
    if first == "-c":
        sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
        return compile(rest[0], "<string>", "exec")
    sys.argv, sys.path[0] = [first, *rest], os.path.dirname(os.path.abspath(first))
    with open(first, encoding="utf-8") as file:
        return compile(file.read(), os.path.abspath(first), "exec")


if __name__ == "__main__":
    import mxnet  # noqa: F401

    program = become(serve(0, 1))
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = sys.argv[0]
    exec(program, main.__dict__)
