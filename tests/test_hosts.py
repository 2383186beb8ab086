"""Jobs over several hosts, which are made here, with a network that is slow, lossy, and breaks; hosts that do, too."""

import contextlib
import re
import subprocess
import time

import pytest
from hosts import CLUSTER, GIGABIT, LOSSY, Hosts, missing
from launching import command_of_job, need, run_job
from test_process_ways import check_soak
from testing import HANG, ROOT

REASON = missing()
pytestmark = pytest.mark.skipif(bool(REASON), reason=f"NOT RUN: hosts cannot be made here: {REASON}")

SMALL = ["layer", "branches"]
# Engine, hosts, processes of each, devices of each, network, cases.
JOBS = [
    ("mpi", 2, 1, 1, GIGABIT, SMALL),
    *(
        pytest.param(engine, *job, marks=pytest.mark.long)
        for engine in ("mpi", "horovod")
        for job in (
            (2, 1, 2, CLUSTER, [*SMALL, "resnet18"]),
            (2, 2, 1, LOSSY, SMALL),
            (4, 1, 1, GIGABIT, SMALL),
            (4, 1, 2, CLUSTER, SMALL),
        )
    ),
]


@pytest.mark.parametrize("engine, count, per_host, devices, network, cases", JOBS, ids=str)
def test_a_step_is_that_of_one_device(engine, count, per_host, devices, network, cases, tmp_path):
    need(engine)
    with Hosts(count, network) as hosts:
        size = count * per_host
        # Through the slow network, more than two meet in pairs, as larger jobs do.
        chosen = {"JOB_FOLDER": tmp_path, "JOB_MOST_BYTES": 64 if network == GIGABIT else 1 << 20}
        done = run_job(engine, size, "numerics.py", devices, "static", *cases, hosts=hosts, **chosen)
    assert done.returncode == 0, done.text
    for case in cases:
        assert done.text.count(f"RIGHT {case} static") == size, done.text


@pytest.mark.long
@pytest.mark.parametrize("engine", ["mpi", "horovod"])
@pytest.mark.parametrize("way", ["groups", "last_batch", "two_nets"])
def test_ways_over_hosts(engine, way):
    """Groups of devices that end within a host and groups that span two; a short batch; two nets.

    Horovod cannot make a process set of processes 1, 2 and 3 there (docs/processes.md), so that process 3 is absent.
    """
    need(engine)
    chosen = {"HOROVOD_DYNAMIC_PROCESS_SETS": 1, "JOB_ABSENT": 3 if engine == "horovod" else 0}
    with Hosts(2, GIGABIT) as hosts:
        done = run_job(engine, 4, "ways.py", way, hosts=hosts, **chosen)
    assert done.returncode == 0 and done.text.count(f"RIGHT {way}") == 4, done.text


RESNET18 = [64] * 5 + [128] * 5 + [256] * 5 + [512] * 5  # the channels of its 20 layers


@pytest.mark.long
@pytest.mark.parametrize(
    "engine, network, steps",
    [("mpi", CLUSTER, 2000), ("mpi", GIGABIT, 500), ("mpi", LOSSY, 100), ("horovod", CLUSTER, 200)],
    ids=str,
)
def test_thousands_of_exchanges_of_the_size_of_resnet18(engine, network, steps):
    """Memory and threads stay what they are, and both hosts have the same statistics at the end."""
    need(engine)
    with Hosts(2, network) as hosts:
        done = run_job(engine, 2, "ways.py", "soak", steps, *RESNET18, hosts=hosts)
        packets, sent, lost = hosts.counts()
    assert done.returncode == 0, done.text
    check_soak(done.text, steps)
    speed = re.findall(r"\S+ ms a step", done.text)[0]
    sizes = f"{sent / 1e6 / steps:.2f} MB a step, {lost} of {packets} packets lost"
    print(f"{engine}, {network}: {steps} steps, {speed}, {sizes}")
    assert lost or not network.lost


# ---------------------------------------------------------------------------------------------------------------------
# Hosts and networks that break

TIMEOUT, VICTIM = 6, "host2"
WAITED = rf"SyncBatchNorm '\w+': (forward|backward) pass waited {TIMEOUT} s for 1 of 3 processes\. "
SEEN_BY_OTHERS = WAITED + r"Arrived: process 0 \(host1\), process 2 \(host3\)\. Missing: process 1 \(host2\)\. "
# Of a job of three hosts: what is done to the second, and what comes of it. None: the job goes on, and is right.
FAULTS = {
    "freezes": (lambda hosts: hosts.freeze(VICTIM), SEEN_BY_OTHERS),
    "loses its link": (lambda hosts: hosts.cut(VICTIM), SEEN_BY_OTHERS),
    "is shut down": (lambda hosts: hosts.shut_down(VICTIM), SEEN_BY_OTHERS),
    "loses its link for 3 s": (lambda hosts: (hosts.cut(VICTIM), time.sleep(3), hosts.join(VICTIM)), None),
    "is ten times slower": (lambda hosts: hosts.slow_down(VICTIM), None),
}
FAULT_CASES = [
    (engine, fault)
    if (engine, fault) == ("mpi", "loses its link")
    else pytest.param(engine, fault, marks=pytest.mark.long)
    for engine in ("mpi", "horovod")
    for fault in FAULTS
]


def said(folder) -> str:
    """What the job's processes have said until now; a host without a link cannot tell its launcher."""
    return "".join(file.read_text(encoding="utf-8") for file in folder.iterdir())


def wait_for(is_so, seconds: float, what) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, what()
        time.sleep(0.05)


@pytest.mark.parametrize("engine, fault", FAULT_CASES)
def test_a_host(engine, fault, tmp_path):
    """Errors come in time and name the host, and whoever can end does."""
    need(engine)
    break_it, expected = FAULTS[fault]
    goes_on = expected is None
    with Hosts(3, CLUSTER) as hosts, contextlib.ExitStack() as stack:
        chosen = {
            "JOB_SAID": tmp_path,
            "JOB_TIMEOUT": 60 if goes_on else TIMEOUT,
            "JOB_STEPS": 200 if goes_on else 100000,
        }
        command, environment = command_of_job(engine, 3, "faults.py", "outside", "forward", hosts=hosts, **chosen)
        job = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
        stack.callback(job.wait)
        stack.callback(job.kill)
        wait_for(lambda: said(tmp_path).count("READY") == 3, HANG, lambda: said(tmp_path))
        time.sleep(0.3)
        break_it(hosts)
        if goes_on:
            assert job.poll() is None, "it had ended before its host was broken"
            assert job.wait(HANG) == 0, said(tmp_path)
            assert said(tmp_path).count("RIGHT AFTERWARDS") == 3, said(tmp_path)
            return
        survivors = [name for name in hosts.names if name != VICTIM]
        wait_for(lambda: not any(map(hosts.processes, survivors)), HANG, lambda: "a survivor hangs: " + said(tmp_path))
        if (engine, fault) == ("mpi", "is shut down"):  # mpirun ends the job, before anybody has waited for long
            assert job.wait(HANG) != 0 and "ERROR" not in said(tmp_path), said(tmp_path)
            return
    errors = re.findall(r"ERROR (\d) (\S+) (.*)", said(tmp_path))
    told = [(float(seconds), text) for rank, seconds, text in errors if rank != "1"]
    assert len(told) == 2, said(tmp_path)
    for seconds, text in told:
        assert re.search(expected, text), text
        assert seconds < TIMEOUT + 20, text  # of a slow machine; who hangs takes minutes
