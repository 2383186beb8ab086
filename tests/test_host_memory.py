"""Memory that the processes of a host share: who takes it, who cannot, and what becomes of it when one of them stops,
continues, or ends without a word.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hosts import missing
from launching import PIPES, command_of_job, run_job
from testing import HANG, ROOT, lean_environment

SIZE, TIMEOUT = 3, 6
GONE = r"ERROR (\d) (\S+) MXNetError: SyncBatchNorm 'first': forward pass: process 1 has ended\."
NO_NAMESPACES = missing()
alone = pytest.mark.skipif(bool(NO_NAMESPACES), reason=f"NOT RUN: no namespaces can be made: {NO_NAMESPACES}")

TOLD = """
import sys
import gluon_syncbn, job
from gluon_syncbn.meeting.processes import processes_of
group = job.join(sys.argv[1])
try:
    with processes_of(group).together("here", 20):
        pass
    job.say("SHARES", group.rank, group.shares_memory, processes_of(group).way())
except gluon_syncbn.SyncBatchNormError as error:
    job.say("ERROR", group.rank, error)
"""


def told(tmp_path, before, engine="mpi"):
    """What two processes say of the memory, each of which has run some lines before."""
    script = tmp_path / "told.py"
    script.write_text(before + TOLD)
    command, chosen = command_of_job(engine, 2, script)
    done = subprocess.run(command, cwd=ROOT, env=chosen, timeout=HANG, **PIPES)
    assert done.returncode == 0, done.stdout
    return done.stdout


def run_fault(engine, fault):
    return run_job(engine, SIZE, "faults.py", fault, "forward", JOB_TIMEOUT=TIMEOUT).stdout


@pytest.mark.parametrize("engine", ["mpi", pytest.param("horovod", marks=pytest.mark.long)])
def test_a_process_that_is_stopped_and_continued_in_time_does_no_harm(engine):
    said = run_fault(engine, "paused")
    assert said.count("ENDS") == SIZE and "ERROR" not in said, said


@pytest.mark.parametrize("engine", ["horovod", pytest.param("mpi", marks=pytest.mark.long)])
def test_a_process_that_is_stopped_for_too_long_goes_on_with_the_others(engine):
    said = run_fault(engine, "paused_for_long")
    assert said.count("RIGHT AFTERWARDS") == said.count("ENDS") == SIZE, said
    assert len(re.findall(rf"ERROR [02] \S+ .*waited {TIMEOUT} s for 1 of 3", said)) == 2, said


def test_a_process_that_ends_without_a_word_is_missed_at_once():
    """Also if a child that it has forked lives on. (`mpirun` would end the job.)"""
    said = run_fault("horovod", "vanishing")
    seconds = {int(rank): float(waited) for rank, waited in re.findall(GONE, said)}
    assert set(seconds) == {0, 2} and max(seconds.values()) < TIMEOUT, said


def test_it_can_be_turned_off_in_one_process(tmp_path):
    off = "import os\nif os.environ['OMPI_COMM_WORLD_RANK'] == '1': os.environ['GLUON_SYNCBN_HOST_MEMORY'] = '0'\n"
    said = told(tmp_path, before=off)
    why = r"not through memory that they share. process 1 \(\S+\): GLUON_SYNCBN_HOST_MEMORY=0\n"
    assert len(re.findall(rf"SHARES \d False through mpi, {why}", said)) == 2, said


def test_another_build_on_the_other_side_is_an_error_that_names_both(tmp_path):
    copy = tmp_path / "other" / "gluon_syncbn"
    shutil.copytree(Path(ROOT) / "gluon_syncbn", copy, ignore=shutil.ignore_patterns("__pycache__"))
    with open(copy / "libgluon_syncbn.so", "ab") as library:
        library.write(b"\0")
    other = f"import os, sys\nif os.environ['OMPI_COMM_WORLD_RANK'] == '1': sys.path.insert(0, {str(copy.parent)!r})\n"
    said = told(tmp_path, before=other)
    words = r"ERROR \d here: the builds of gluon_syncbn differ: process 0 \(\S+\) has (build \w+), "
    words += r"process 1 \(\S+\) has (build \w+)\. Install the same in all processes\."
    found = re.findall(words, said)
    assert len(found) == 2 and all(mine != theirs for mine, theirs in found), said


@alone
@pytest.mark.parametrize("options", ["size=64k", pytest.param("ro", marks=pytest.mark.long)])
def test_it_needs_no_dev_shm(options, tmp_path):
    before = f"""
import ctypes, subprocess
assert ctypes.CDLL(None).unshare(0x00020000) == 0  # CLONE_NEWNS
subprocess.run("mount --make-rprivate / && mount -t tmpfs -o {options} none /dev/shm", shell=True, check=True)
"""
    assert told(tmp_path, before=before, engine="horovod").count("True") == 2


@alone
def test_a_container_with_the_same_host_name_shares_none(tmp_path):
    """Numbers of processes and files in it are others'; what they name there is looked at, and not opened."""
    code = """
import ctypes, subprocess, sys
import gluon_syncbn.base.library as library
core = library.core
make = lambda rank: core.gluon_syncbn_make_processes(rank, 2, b"", 1)
if len(sys.argv) > 1:
    print(core.gluon_syncbn_join_memory(make(1), sys.argv[1].encode(), (ctypes.c_int * 2)(0, 1), 2).decode())
else:
    where = core.gluon_syncbn_offer_memory(make(0), 2, ctypes.byref(ctypes.c_char_p()))
    for words in ([], ["unshare", "--pid", "--fork", "--mount-proc"]):
        subprocess.run([*words, sys.executable, __file__, where], check=True)
"""
    script = tmp_path / "container.py"
    script.write_text(code)
    done = subprocess.run([sys.executable, script], env=lean_environment(), timeout=HANG, **PIPES)
    assert done.stdout == "\nthe memory is of another host, or of another container\n", done.stdout
