"""Hosts that are made on this machine: namespaces of Linux with names and addresses of their own, and a network.

    with Hosts(2, network=GIGABIT) as hosts:
        subprocess.run([*hosts.launcher("mpi", 4), sys.executable, "train.py"])

A host is a process that waits for the end of its standard input (`cat`), in namespaces of its own for the network, the
host name, processes and mounts. Whatever runs on the host is killed when that process ends. network.cpp forwards what
hosts send to each other. One host more, the head, runs the launchers, which reach the others through a script in place
of ssh; that starts commands with a bare environment, as ssh does.

Nothing outlives the process that made the hosts, however that ends: all of them read from pipes that it holds.
It needs root, for namespaces and TUN devices; `missing` says why hosts cannot be made. They share the file system, the
processors and the clock.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Dict, Iterable, List, NamedTuple, Tuple

from standalone import compiled

NET, DEVICE = "10.77.0", "net0"
NAMESPACES = ["--net", "--uts", "--ipc", "--mount", "--pid"]
# Of unshare: the host's first process is its number 1, and takes all others with it.
OWN_PROCESSES = ["--fork", "--mount-proc", "--kill-child"]
PROGRAMS = os.path.dirname(sys.executable)
_READY_SECONDS = 30.0


class Network(NamedTuple):
    """What the links of all hosts are like."""

    microseconds: float  # from one host to another
    megabits: float  # per second, of each host
    mtu: int
    lost: float = 0.0  # share of the packets

    def __str__(self) -> str:
        lost = f", {100 * self.lost:g}% lost" if self.lost else ""
        return f"{self.microseconds / 1000:g} ms, {self.megabits / 1000:g} Gbit/s{lost}"


CLUSTER = Network(50, 10000, 9000)
GIGABIT = Network(1000, 1000, 1500)
LOSSY = Network(1000, 1000, 1500, lost=0.01)


def missing() -> str:
    """Why hosts cannot be made here; empty if they can."""
    programs = [name for name in ("unshare", "nsenter", "ip", "g++") if shutil.which(name) is None]
    if programs:
        return f"there is no {programs[0]}"
    script = f"mount -t tmpfs tmpfs /dev/shm && ip link set lo up && ip tuntap add dev {DEVICE} mode tun"
    try:
        _run("unshare", *NAMESPACES, *OWN_PROCESSES, "sh", "-c", script)
    except (AssertionError, subprocess.TimeoutExpired) as problem:
        return f"namespaces, for which root is needed, or TUN devices cannot be made ({problem})"
    return ""


class Hosts:
    """``count`` hosts, host1 and so on, and a head."""

    def __init__(self, count: int, network: Network = CLUSTER):
        self.names = [f"host{number + 1}" for number in range(count)]
        self._mtu = network.mtu
        self._pids: Dict[str, int] = {}
        self._spaces: Dict[str, str] = {}  # the namespace of each host's processes
        self._keepers: Dict[str, subprocess.Popen] = {}
        with contextlib.ExitStack() as stack:
            self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            names = [*self.names, "head"]
            source = Path(__file__).with_name("network.cpp")
            program = compiled("network", [source], ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror"])
            links = [network.microseconds, network.megabits, 1e6 * network.lost]
            command = [program, len(names), f"hosts{os.getpid()}_", *links]
            self._network = stack.enter_context(_process(map(str, command)))
            assert self._network.stdout.readline() == "ready\n"
            lines = [f"{NET}.{number + 1} {name}\n" for number, name in enumerate(names)]
            (self._folder / "hosts").write_text("".join(["127.0.0.1 localhost\n", *lines]))
            for number, name in enumerate(names):
                stack.enter_context(self._make(name, number + 1))
            (self._folder / "ssh").write_text(self._agent())
            (self._folder / "ssh").chmod(0o755)
            self._ended = stack.pop_all()

    def __enter__(self) -> "Hosts":
        return self

    def __exit__(self, *problem) -> None:
        self._ended.close()

    def launcher(self, engine: str, size: int, variables: Iterable[str] = (), folder: str = "") -> List[str]:
        """Words to put before a command so that it runs in ``size`` processes, equally many on each host.

        ``variables`` are names in the environment that the processes shall have, too; they start in ``folder``, by
        default the one that this process is in.
        """
        per_host, rest = divmod(size, len(self.names))
        assert not rest, "equally many processes per host"
        places = ",".join(f"{name}:{per_host}" for name in self.names)
        if engine == "horovod":
            options = ["--gloo", "-np", str(size), "-H", places, "--network-interfaces", DEVICE]
            return self._on("head", [f"{PROGRAMS}/horovodrun", *options], folder or os.getcwd())
        options = ["--allow-run-as-root", "--bind-to", "none", "--host", places, "-np", str(size)]
        options += ["--prtemca", "plm_ssh_agent", f"{self._folder}/ssh"]
        options += ["--prtemca", "prte_if_include", f"{NET}.0/24", "--mca", "btl_tcp_if_include", f"{NET}.0/24"]
        options += ["--mca", "mpi_yield_when_idle", "1"]  # processes of all hosts share this machine's cores
        for variable in variables:
            options += ["-x", variable]
        return self._on("head", [f"{PROGRAMS}/mpirun", *options], folder or os.getcwd())

    def cut(self, name: str) -> None:
        """Nothing passes the host's link from now on."""
        self._tell(f"cut {self.names.index(name) + 1}")

    def join(self, name: str) -> None:
        """The link is there again."""
        self._tell(f"join {self.names.index(name) + 1}")

    def counts(self) -> List[int]:
        """Packets, bytes and lost packets between all hosts until now."""
        self._tell("counts")
        return list(map(int, self._network.stdout.readline().split()))

    def shut_down(self, name: str) -> None:
        """All processes of the host are killed at once, and nothing answers there any more."""
        self.cut(name)
        os.kill(self._pids[name], signal.SIGKILL)
        self._keepers[name].wait(_READY_SECONDS)
        self._spaces[name] = ""  # another process may have its number from now on

    def freeze(self, name: str) -> None:
        """The host's processes run no more."""
        self._signal(name, signal.SIGSTOP)

    def slow_down(self, name: str) -> None:
        """The host's processes run for a tenth of the time only."""
        stop = threading.Event()

        def alternate() -> None:
            while not stop.wait(0.005):
                self._signal(name, signal.SIGSTOP)
                stop.wait(0.045)
                self._signal(name, signal.SIGCONT)

        thread = threading.Thread(target=alternate, daemon=True)
        thread.start()
        self._ended.callback(thread.join)
        self._ended.callback(stop.set)

    def processes(self, name: str) -> List[int]:
        """Numbers, outside of the host, of its processes but for the one that it consists of."""
        first, wanted = self._pids[name], self._spaces[name]  # the head has none: all of the machine's would be its
        numbers = map(int, filter(str.isdigit, os.listdir("/proc")))
        return [pid for pid in numbers if wanted and pid != first and _namespace(pid) == wanted]

    def _signal(self, name: str, number: int) -> None:
        inside = self.processes(name)
        for pid in inside:
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # it has ended
                parent = _status(pid)[1]
                os.kill(pid, number)
                # nsenter stops when its child does, and goes on only when it is told to.
                if parent not in inside and number == signal.SIGCONT:
                    os.kill(parent, number)

    @contextlib.contextmanager
    def _make(self, name: str, number: int):
        """A host, and its end."""
        own = OWN_PROCESSES if name != "head" else []
        device = f"hosts{os.getpid()}_{number}"
        (self._folder / name).mkdir()
        mounts = f"mount --bind {self._folder}/hosts /etc/hosts && mount -t tmpfs tmpfs /dev/shm"
        script = f"hostname {name} && {mounts} && ip link set lo up && echo ready; exec cat"
        with _process(["unshare", *_kinds(name), *own, "sh", "-c", script]) as keeper:
            assert keeper.stdout.readline() == "ready\n", f"{name} could not be made"
            self._keepers[name] = keeper
            self._pids[name] = pid = keeper.pid
            if own:
                children = Path(f"/proc/{pid}/task/{pid}/children").read_text()
                self._pids[name] = pid = int(children.split()[0])
                self._spaces[name] = _namespace(pid)
            _run("ip", "link", "set", device, "netns", str(pid), "name", DEVICE)
            _run(*self._on(name, ["ip", "address", "add", f"{NET}.{number}/24", "dev", DEVICE]))
            _run(*self._on(name, ["ip", "link", "set", DEVICE, "mtu", str(self._mtu), "txqueuelen", "10000", "up"]))
            yield

    def _on(self, name: str, command: List[str], folder: str = "/") -> List[str]:
        """The command on a host, in a folder. ``ssh`` is the script that stands in for it."""
        path = f"PATH={self._folder}:{PROGRAMS}:{os.environ['PATH']}"
        place = ["-C", folder, f"TMPDIR={self._folder}/{name}", path]
        return ["nsenter", "-t", str(self._pids[name]), *_kinds(name), "env", *place, *command]

    def _agent(self) -> str:
        """The script in place of ssh: ``ssh HOST COMMAND ...``, with options before the host or after it."""
        cases = "\n".join(
            f"  {name}|{NET}.{number}) name={name} pid={self._pids[name]};;"
            for number, name in enumerate(self.names, 1)
        )
        bare = f"TMPDIR={self._folder}/$name PATH={PROGRAMS}:{os.environ['PATH']} HOME={os.environ.get('HOME', '/')}"
        return f"""#!/bin/sh
host=
while :; do
  case "$1" in
    -o|-p|-i|-l) shift 2;;
    -*) shift;;
    *) [ -z "$host" ] || break; host=$1; shift;;
  esac
done
case "$host" in
{cases}
  *) echo "ssh: there is no host $host" >&2; exit 255;;
esac
nsenter -t $pid {" ".join(NAMESPACES)} env -i {bare} sh -c "$*"
code=$?
[ $code -lt 128 ] || code=255  # the host is gone
exit $code
"""

    def _tell(self, line: str) -> None:
        self._network.stdin.write(line + "\n")
        self._network.stdin.flush()


def _kinds(name: str) -> List[str]:
    return [kind for kind in NAMESPACES if name != "head" or kind != "--pid"]


@contextlib.contextmanager
def _process(command: Iterable[str]):
    """A process that ends when its standard input does."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "encoding": "utf-8"}
    with subprocess.Popen(list(command), start_new_session=True, **pipes) as process:  # Ctrl-C reaches us alone
        try:
            yield process
        finally:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            try:
                process.wait(_READY_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=60)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


def _namespace(pid: int) -> str:
    """Which host's processes this one belongs to; empty if it has ended."""
    try:
        return "" if _status(pid)[0] == "Z" else os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return ""


def _status(pid: int) -> Tuple[str, int]:
    """A process's state, and its parent."""
    state, parent = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
    return state, int(parent)
