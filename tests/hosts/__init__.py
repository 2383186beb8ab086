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
import time
from typing import Dict, Iterable, List, NamedTuple, Tuple

HERE = os.path.dirname(os.path.abspath(__file__))
NET, DEVICE = "10.77.0", "net0"
NAMESPACES = ["--net", "--uts", "--ipc", "--mount", "--pid"]
# Of unshare: the host's first process is its number 1, and takes all others with it.
OWN_PROCESSES = ["--fork", "--mount-proc", "--kill-child"]
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
    if os.geteuid() != 0:
        return "root is needed for namespaces"
    try:
        os.close(os.open("/dev/net/tun", os.O_RDWR))
    except OSError as problem:
        return f"/dev/net/tun cannot be opened ({problem.strerror})"
    script = f"mount -t tmpfs tmpfs /dev/shm && ip link set lo up && ip tuntap add dev {DEVICE} mode tun"
    try:
        _run("unshare", *NAMESPACES, *OWN_PROCESSES, "sh", "-c", script)
    except (AssertionError, subprocess.TimeoutExpired) as problem:
        return f"namespaces cannot be made ({problem})"
    return ""


class Hosts:
    """``count`` hosts, host1 and so on, and a head."""

    def __init__(self, count: int, network: Network = CLUSTER):
        self.names = [f"host{number + 1}" for number in range(count)]
        self._mtu = network.mtu
        self._ended = contextlib.ExitStack()
        self._pids: Dict[str, int] = {}
        self._spaces: Dict[str, str] = {}  # the namespace of each host's processes
        self._keepers: Dict[str, subprocess.Popen] = {}
        self._slowed: Dict[str, threading.Event] = {}
        with contextlib.ExitStack() as stack:
            self._folder = stack.enter_context(tempfile.TemporaryDirectory())
            names = [*self.names, "head"]
            self._network = stack.enter_context(_process([_build(), str(len(names)), f"hosts{os.getpid()}_"]))
            assert self._network.stdout is not None and self._network.stdout.readline() == "ready\n"
            self.set_network(network)
            lines = [f"{NET}.{number + 1} {name}" for number, name in enumerate(names)]
            self._write("hosts", "\n".join(["127.0.0.1 localhost", *lines, ""]))
            for number, name in enumerate(names):
                stack.enter_context(self._make(name, number + 1))
            self._write("ssh", self._agent())
            self._ended = stack.pop_all()

    def __enter__(self) -> "Hosts":
        return self

    def __exit__(self, *problem) -> None:
        for name in list(self._slowed):
            self.go_on(name)
        self._ended.close()

    def launcher(self, engine: str, size: int, variables: Iterable[str] = (), folder: str = "") -> List[str]:
        """Words to put before a command so that it runs in ``size`` processes, equally many on each host.

        ``variables`` are names in the environment that the processes shall have, too; they start in ``folder``, by
        default the one that this process is in.
        """
        per_host, rest = divmod(size, len(self.names))
        assert not rest, "equally many processes per host"
        places = ",".join(f"{name}:{per_host}" for name in self.names)
        folder, programs = folder or os.getcwd(), os.path.dirname(sys.executable)
        if engine == "horovod":
            options = ["--gloo", "-np", str(size), "-H", places, "--network-interfaces", DEVICE]
            return self._on("head", [os.path.join(programs, "horovodrun"), *options], folder)
        options = ["--allow-run-as-root", "--bind-to", "none", "--host", places, "-np", str(size)]
        options += ["--prtemca", "plm_ssh_agent", os.path.join(self._folder, "ssh")]
        options += ["--prtemca", "prte_if_include", f"{NET}.0/24", "--mca", "btl_tcp_if_include", f"{NET}.0/24"]
        options += ["--mca", "mpi_yield_when_idle", "1"]  # processes of all hosts share this machine's cores
        for variable in variables:
            options += ["-x", variable]
        return self._on("head", [os.path.join(programs, "mpirun"), *options], folder)

    def set_network(self, network: Network) -> None:
        """Change delay, rate and loss for all; what is under way stays as it is."""
        self._tell(f"network {network.microseconds} {network.megabits} {1e6 * network.lost}")

    def cut(self, name: str) -> None:
        """Nothing passes the host's link from now on."""
        self._tell(f"cut {self._number(name)}")

    def join(self, name: str) -> None:
        """The link is there again."""
        self._tell(f"join {self._number(name)}")

    def counts(self) -> List[int]:
        """Packets, bytes and lost packets between all hosts until now."""
        self._tell("counts")
        assert self._network.stdout is not None
        return list(map(int, self._network.stdout.readline().split()))

    def shut_down(self, name: str) -> None:
        """All processes of the host are killed at once, and nothing answers there any more."""
        self.cut(name)
        os.kill(self._pids[name], signal.SIGKILL)
        self._keepers[name].wait(_READY_SECONDS)
        self._spaces[name] = ""  # another process may have its number from now on

    def freeze(self, name: str) -> None:
        """The host's processes run no more, until `go_on`."""
        self._signal(name, signal.SIGSTOP)

    def slow_down(self, name: str, times: float = 10, period: float = 0.05) -> None:
        """The host's processes run for a part of the time only, until `go_on`."""
        self._slowed[name] = stop = threading.Event()

        def alternate() -> None:
            while not stop.wait(period / times):
                self._signal(name, signal.SIGSTOP)
                stop.wait(period * (1 - 1 / times))
                self._signal(name, signal.SIGCONT)

        threading.Thread(target=alternate, daemon=True).start()

    def go_on(self, name: str) -> None:
        """End `freeze` or `slow_down`."""
        if name in self._slowed:
            self._slowed.pop(name).set()
            time.sleep(0.1)
        self._signal(name, signal.SIGCONT)

    def processes(self, name: str) -> List[int]:
        """Numbers, outside of the host, of its processes but for the one that it consists of."""
        first, wanted = self._pids[name], self._spaces[name]  # the head has none: all of the machine's would be its
        found = []
        for entry in filter(str.isdigit, os.listdir("/proc")):
            if wanted and int(entry) != first and _namespace(int(entry)) == wanted:
                found.append(int(entry))
        return found

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
        kinds = NAMESPACES if name != "head" else [kind for kind in NAMESPACES if kind != "--pid"]
        own = OWN_PROCESSES if name != "head" else []
        device = f"hosts{os.getpid()}_{number}"
        os.mkdir(os.path.join(self._folder, name))
        mounts = f"mount --bind {self._folder}/hosts /etc/hosts && mount -t tmpfs tmpfs /dev/shm"
        script = f"hostname {name} && {mounts} && ip link set lo up && echo ready; exec cat"
        with _process(["unshare", *kinds, *own, "sh", "-c", script]) as keeper:
            assert keeper.stdout is not None and keeper.stdout.readline() == "ready\n", f"{name} could not be made"
            self._keepers[name] = keeper
            self._pids[name] = pid = _child(keeper.pid) if own else keeper.pid
            if own:
                self._spaces[name] = _namespace(pid)
            _run("ip", "link", "set", device, "netns", str(pid), "name", DEVICE)
            _run(*self._on(name, ["ip", "address", "add", f"{NET}.{number}/24", "dev", DEVICE]))
            _run(*self._on(name, ["ip", "link", "set", DEVICE, "mtu", str(self._mtu), "txqueuelen", "10000", "up"]))
            yield

    def _on(self, name: str, command: List[str], folder: str = "/") -> List[str]:
        """The command on a host, in a folder. ``ssh`` is the script that stands in for it."""
        path = f"PATH={self._folder}:{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
        kinds = NAMESPACES if name != "head" else [kind for kind in NAMESPACES if kind != "--pid"]
        place = ["-C", folder, f"TMPDIR={self._folder}/{name}", path]
        return ["nsenter", "-t", str(self._pids[name]), *kinds, "env", *place, *command]

    def _agent(self) -> str:
        """The script in place of ssh: ``ssh HOST COMMAND ...``, with options before the host or after it."""
        kinds = " ".join(NAMESPACES)
        cases = "\n".join(
            f"  {name}|{NET}.{self._number(name)}) name={name} pid={self._pids[name]};;" for name in self.names
        )
        path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
        bare = f"TMPDIR={self._folder}/$name PATH={path} HOME={os.environ.get('HOME', '/')}"
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
nsenter -t $pid {kinds} env -i {bare} sh -c "$*"
code=$?
[ $code -lt 128 ] || code=255  # the host is gone
exit $code
"""

    def _number(self, name: str) -> int:
        return self.names.index(name) + 1

    def _tell(self, line: str) -> None:
        assert self._network.stdin is not None
        self._network.stdin.write(line + "\n")
        self._network.stdin.flush()

    def _write(self, name: str, text: str) -> None:
        path = os.path.join(self._folder, name)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(path, 0o755)


def _build() -> str:
    """Compile the network, once for each version of it."""
    source = os.path.join(HERE, "network.cpp")
    program = os.path.join(os.path.dirname(os.path.dirname(HERE)), "build", "hosts", "network")
    if not os.path.exists(program) or os.path.getmtime(program) < os.path.getmtime(source):
        os.makedirs(os.path.dirname(program), exist_ok=True)
        new = f"{program}.{os.getpid()}"
        _run("g++", "-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", source, "-o", new)
        os.replace(new, program)
    return program


@contextlib.contextmanager
def _process(command: List[str]):
    """A process that ends when its standard input does."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "encoding": "utf-8"}
    with subprocess.Popen(command, start_new_session=True, **pipes) as process:  # Ctrl-C reaches us alone
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


def _child(pid: int) -> int:
    with open(f"/proc/{pid}/task/{pid}/children", encoding="utf-8") as file:
        return int(file.read().split()[0])


def _namespace(pid: int) -> str:
    """Which host's processes this one belongs to; empty if it has ended."""
    try:
        return "" if _status(pid)[0] == "Z" else os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return ""


def _status(pid: int) -> Tuple[str, int]:
    """A process's state, and its parent."""
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        state, parent = file.read().rpartition(")")[2].split()[:2]
    return state, int(parent)
