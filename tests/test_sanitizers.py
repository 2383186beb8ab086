"""Rendezvous, processes, groups, temporary space and kernels run clean under the compiler's sanitizers."""

import itertools
import re
import subprocess

import pytest
import standalone
from testing import HANG, instruction_set

TESTS, CSRC = standalone.HERE / "csrc", standalone.CSRC
COMMON = ["-std=c++17", "-g1", "-Wall", "-Wextra", "-Werror", f"-I{CSRC}", "-pthread"]
# For addresses nothing is optimized, which compiles in a sixth of the time. OpenMP's runtime library the sanitizer of
# threads cannot see into.
SANITIZERS = {
    "addresses": ["-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fopenmp"],
    "threads": ["-O1", "-fsanitize=thread", "-Wno-unknown-pragmas"],
}
MEETING = [f"meeting/{name}.cpp" for name in ("rendezvous", "step", "waiting", "watchdog")]
PROCESSES = ["meeting/statistics.cpp", *(f"processes/{name}.cpp" for name in ("processes", "hosts", "host_memory"))]
# The program and what it is built with, its arguments, and what it says if all is well.
PROGRAMS = {
    "stress_rendezvous": (MEETING, {"all": "2000"}, r"2000 generations.* 0 failures\n"),
    "stress_rounds": (MEETING, {"all": "2000"}, r"2000 rounds.* 0 failures\n"),
    "stress_processes": (
        [*MEETING, *PROCESSES],
        {"addresses": "200", "threads": "100"},
        r"[12]00 steps, .* 0 failures\n",
    ),
    "kill_process": (["processes/host_memory.cpp"], {"addresses": "10", "threads": "5"}, r"\d+ times, 0 failures\n"),
    "stress_groups": (
        [*MEETING, *PROCESSES, *(f"meeting/{name}.cpp" for name in ("all_reduce", "group", "profile"))],
        {"all": "60"},
        r"60 steps, .* 0 failures\n",
    ),
    "stress_space": (["mxnet/temporary_space.cpp"], {"all": "20000"}, r"60000 requests, .* 0 failures\n"),
    # As many devices at once.
    "exercise_kernels": (
        [*(f"{name}.cpp" for name in standalone.KERNELS), "meeting/statistics.cpp"],
        {"addresses": "1", "threads": "2"},
        r".*: (240|480) cases\n",
    ),
}
# The kernels share nothing, and take long to compile.
ALL = [item for item in itertools.product(PROGRAMS, SANITIZERS) if item != ("exercise_kernels", "threads")]
ALL.append(pytest.param("exercise_kernels", "threads", marks=pytest.mark.long))


@pytest.mark.parametrize("program, sanitizer", ALL)
def test_clean_under(program, sanitizer):
    parts, arguments, expected = PROGRAMS[program]
    words = [*COMMON, *SANITIZERS[sanitizer]]

    def object_of(source):
        is_used = source.parent.name != "kernels" or source.stem == instruction_set()
        ready = None if is_used else standalone.object_of(source)
        return ready or standalone.compiled(f"{source.stem}.o", [source], [*words, "-c"])

    objects = [object_of(source) for source in (TESTS / f"{program}.cpp", *(CSRC / part for part in parts))]
    file = standalone.compiled(program, objects, words)
    argument = arguments.get(sanitizer) or arguments["all"]
    done = subprocess.run([file, argument], capture_output=True, encoding="utf-8", timeout=HANG)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert re.fullmatch(expected, done.stdout, flags=re.DOTALL), done.stdout
