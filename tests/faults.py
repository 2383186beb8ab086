"""Puts one-line faults into copies of the package, one at a time, and prints the share that the tests catch.

    .venv/bin/python tests/faults.py --count 120 --cpp 40 [--seed N] [part ...]
    .venv/bin/python tests/faults.py --known

A fault is drawn at random: another sign or comparison, a condition that is negated or dropped or loses a part, two
arguments swapped, an option left out, a lock not taken, a statement not run. ``--known`` tries those that once went
unnoticed. Each is tried by the tests of the part that it is in (TESTS) until the first fails, and not by the whole
suite, which would catch more. What only a GPU runs is left alone. Prints a table of Markdown. Look at what was not
caught by hand: some faults change nothing that anybody can see. Needs Python 3.9, and what `make test` installs.
"""

import argparse
import ast
import copy
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Iterator, NamedTuple, Optional

ROOT = Path(__file__).resolve().parent.parent
# Seconds for all tests of one fault, of which those that are left then do not run; and for one test, which then hangs.
ALL, ONE = 400, 150
LIMIT = 700  # for what should have ended by then
LAYER = "layer groups changes_between_steps conversion errors renorm in_place rounding back_ends crossings"
PROCESSES = "processes process_ways launchers process_faults host_memory"
FAILING = "failures waiting endings"
# The tests of each part, in the order in which they run, after those that are named after the file. The first part that
# a path begins with counts.
TESTS = {
    "distributed": f"{PROCESSES} install settings",
    "meeting/waiting": f"waiting process_faults {FAILING} {PROCESSES}",
    "meeting": f"{PROCESSES} {LAYER} waiting meeting failures",
    "step": f"between_passes failures groups endings waiting docs cpu_devices {LAYER} {PROCESSES}",
    "mxnet_engine": f"cpu_devices settings {FAILING} {LAYER}",
    "graphs": f"graphs symbols files {LAYER} cpu_devices between_passes",
    "_symbol_block.py": f"symbols conversion files graphs install changes_between_steps {LAYER}",
    "backends/portable": f"back_ends meeting {LAYER} failures",
    "backends": f"back_ends {LAYER} symbols files graphs in_place",
    "layer": f"errors {LAYER} symbols files {PROCESSES}",
    "base": f"house conversion failures endings settings cpu_devices symbols {LAYER}",
    "csrc/cuda": "gpu_kernels gpu_launch gpu_compile gpu_bundle",
    "csrc/cpu": f"native_kernels layer in_place renorm rounding graphs failures instruction_sets {LAYER}",
    "csrc/processes": f"sanitizers {PROCESSES}",
    "csrc/meeting": f"sanitizers renorm meeting waiting groups layer profile failures {PROCESSES} endings errors",
    "csrc/mxnet/cpu_resources": "cpu_devices settings leaks failures",
    "csrc/mxnet/temporary_space": "cpu_devices leaks failures",
    "csrc": f"layer errors failures graphs in_place symbols c_api endings cpu_devices leaks {LAYER} {PROCESSES}",
    "run.py": "install launchers process_ways",
    "_install.py": "install process_ways",
    "_profile.py": "profile",
    "__main__.py": "settings",
    "symbol.py": f"symbols files {LAYER}",
    "_devices.py": f"groups process_ways {LAYER} failures",
    "": f"{LAYER} symbols install graphs {FAILING} settings house",
}
KEPT = ("__init__.py", "cuda_source.py")  # lists of names, and text
# Only `make gpu` runs what calls CUDA.
FOR_GPUS = re.compile(r"csrc/cuda/(driver|operator|program|scratch)\.")


# Faults that change nothing that anybody can see: path, the line, and the kind.
EQUIVALENT = {
    # Whoever asks next finds out the same, by more memory.
    ("mxnet_engine/cpu_resources.py", "mx.nd.waitall()", "statement_not_run"),
    # It may be as well.
    (
        "csrc/cpu/kernels/body.h",
        "const int64_t width = layout.inner - i < kBlock ? layout.inner - i : kBlock;",
        "changed_comparison",
    ),
    ("csrc/cpu/kernels/forward.h", "over_tiles<A, 0, Rows::kGrowing>(", "number_one_more"),  # copied, not used
    ("mxnet_engine/cpu_resources.py", "before = 0", "number_one_more"),  # it is set before it is read
    ("meeting/processes.py", "different = different_facts(theirs, expected)", "swapped_arguments"),  # either way round
    # There is one device at least.
    ("backends/portable/group.py", "if len(self.devices) < (spec.num_devices or 0):", "number_one_more"),
    ("graphs/bind.py", "if MARK not in text:", "condition_never_true"),  # it becomes a copy of itself
    ("__main__.py", "values = np.random.RandomState(0).standard_normal((4 * size, 64, 2, 2))", "number_one_more"),
    ("csrc/meeting/group.cpp", "std::lock_guard<std::mutex> lock(mutex);", "forgotten_lock"),  # of what is only read
    # dz is computed again, and is the same.
    (
        "csrc/cpu/operator.cpp",
        "if (requests_.skip != Request::kNull && requests_.skip != Request::kAdd) {",
        "condition_never_true",
    ),
}


class Fault(NamedTuple):
    path: str  # in the package
    line: int
    kind: str
    code: str  # the line
    before: str
    after: str
    text: str  # of the whole file


# Python: what to do with one node of the syntax tree, or None.

OPPOSITE = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


def changed_comparison(node):
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        node.ops = [OPPOSITE[type(node.ops[0])]()]
        return node


def changed_operator(node):
    if isinstance(node, (ast.BinOp, ast.BoolOp)) and type(node.op) in OPPOSITE:
        node.op = OPPOSITE[type(node.op)]()
        return node


def dropped_not(node):
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return node.operand


def dropped_option(node):
    if isinstance(node, ast.Call) and node.keywords:
        node.keywords.pop()
        return node


def swapped_arguments(node):
    if isinstance(node, ast.Call) and len(node.args) > 1 and not any(isinstance(a, ast.Starred) for a in node.args):
        node.args[:2] = node.args[1::-1]
        return node


def forgotten_lock(node):
    if isinstance(node, ast.With) and "lock" in ast.unparse(node.items[0]):
        return ast.If(test=ast.Constant(value=True), body=node.body, orelse=[])


def statement_not_run(node):
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return ast.Pass()


def condition_never_true(node):
    if isinstance(node, ast.If) and not node.orelse:
        node.test = ast.Constant(value=False)
        return node


def part_of_condition_dropped(node):
    if isinstance(node, ast.BoolOp):
        node.values.pop()
        return node.values[0] if len(node.values) == 1 else node


def number_one_more(node):
    if isinstance(node, ast.Constant) and type(node.value) is int:
        node.value += 1
        return node


PYTHON = [
    changed_comparison,
    changed_operator,
    dropped_not,
    dropped_option,
    swapped_arguments,
    forgotten_lock,
    statement_not_run,
    condition_never_true,
    part_of_condition_dropped,
    number_one_more,
]


def faults_of_python(path: Path, text: str) -> Iterator[Fault]:
    lines = text.encode().splitlines(keepends=True)
    starts = [sum(map(len, lines[:number])) for number in range(len(lines))]
    for node in ast.walk(ast.parse(text)):
        for change in PYTHON:
            new = change(copy.deepcopy(node))
            if new is None:
                continue
            begin = starts[node.lineno - 1] + node.col_offset
            end = starts[node.end_lineno - 1] + node.end_col_offset
            before = text.encode()[begin:end].decode()
            after = ast.unparse(new).replace("\n", "\n" + " " * node.col_offset)
            after = (
                f"({after})" if isinstance(new, ast.expr) and not isinstance(new, (ast.Constant, ast.Call)) else after
            )
            whole = text.encode()[:begin].decode() + after + text.encode()[end:].decode()
            code = lines[node.lineno - 1].decode().strip()
            yield Fault(str(path), node.lineno, change.__name__, code, before, after, whole)


# C++: a pattern in a line of code, and its replacement.
CPP = {
    "changed_comparison": [(" < ", " <= "), (" <= ", " < "), (" > ", " >= "), (" >= ", " > "), (" == ", " != ")],
    "changed_operator": [(" + ", " - "), (" - ", " + "), (" * ", " / "), (" && ", " || "), (" || ", " && ")],
    "dropped_not": [("(!", "(")],
    "part_of_condition_dropped": [(r"(?<=[\w)]) (?:&&|\|\|) [^&|]+(?=\)[ ;]| \?|;)", "")],
    "condition_never_true": [(r"(?<=\bif )\([^;]*\)(?= [^;]*;$| \{$)", "(false)")],
    "forgotten_lock": [(r"^\s*std::lock_guard<std::mutex> .*;$", "")],
    "statement_not_run": [(r"^\s+[\w.>-]+\([^{}]*\);$", "")],
    "number_one_more": [(r"(?<![\w.])1(?![\w.])", "2"), (r"(?<![\w.])0(?![\w.])", "1")],
}


def faults_of_cpp(path: Path, text: str) -> Iterator[Fault]:
    lines = text.splitlines()
    for number, line in enumerate(lines):
        code = line.split("//")[0].rstrip()
        if re.match(r"\s*(#|template|static_assert|inline constexpr|using)", code):
            continue
        for kind, changes in CPP.items():
            for pattern, replacement in changes:
                found = re.finditer(pattern if pattern.startswith(("^", "(?")) else re.escape(pattern), code)
                for match in found:
                    if code[: match.start()].count('"') % 2:  # within a text
                        continue
                    new = code[: match.start()] + replacement + code[match.end() :]
                    whole = "\n".join([*lines[:number], new, *lines[number + 1 :], ""])
                    yield Fault(
                        str(path), number + 1, kind, code.strip(), code.strip(), new.strip() or "(nothing)", whole
                    )


def all_faults(parts) -> list:
    found = []
    for file in sorted((ROOT / "gluon_syncbn").rglob("*")):
        path = file.relative_to(ROOT / "gluon_syncbn")
        if file.name in KEPT or FOR_GPUS.match(str(path)) or not str(path).startswith(tuple(parts)):
            continue
        if file.suffix == ".py":
            found += faults_of_python(path, file.read_text(encoding="utf-8"))
        elif file.suffix in (".cpp", ".h", ".cuh"):
            found += faults_of_cpp(path, file.read_text(encoding="utf-8"))
    return [fault for fault in found if (fault.path, fault.code, fault.kind) not in EQUIVALENT]


# Faults that the tests did not catch once: path, what stands there, and the fault.
KNOWN = [
    ("synchronization.py", " or made.spec != spec", ""),
    ("convert.py", "        blocks += item.layers_of_nodes()\n", ""),
    ("convert.py", '_OURS = {"forward", "hybrid_forward",', '_OURS = {"hybrid_forward",'),
    ("csrc/meeting/group.cpp", "make_tuple(a.substr(0, a.find('(')), a.size(), a)", "make_tuple(a, a.size(), a)"),
    ("csrc/meeting/waiting.cpp", "sigismember(&a.sa_mask, number) != sigismember(&b.sa_mask, number)", "false"),
    (
        "csrc/meeting/waiting.cpp",
        "is_for_processes ? waits.process_grace :",
        "is_for_processes ? waiting_times().grace :",
    ),
    ("meeting/positions.py", 're.sub(r"\\d+", "", name)', "name"),
    (
        "distributed/default.py",
        'if job.launcher == "Horovod":\n        return "horovod"',
        'if job.launcher == "Horovod":\n        return "none"',
    ),
    ("step/updates.py", ' or any(args if update.__name__ == "_update" else args[1:])', ""),
]


def known_faults() -> Iterator[Fault]:
    for path, before, after in KNOWN:
        text = (ROOT / "gluon_syncbn" / path).read_text(encoding="utf-8")
        if text.count(before) != 1:
            raise ValueError(f"{path} has {before!r} {text.count(before)} times, not once")
        line = text[: text.index(before)].count("\n") + 1
        yield Fault(path, line, "known", "", before.strip(), after.strip(), text.replace(before, after))


def room_of(fault: Fault) -> str:
    """The folder of its file; what lies beside the folders is one room."""
    return str(Path(fault.path).parent)


def draw(faults, rng) -> Iterator[Fault]:
    """One of each room in turn, as far as there are some; never two in one line."""
    rooms = {}
    for fault in faults:
        rooms.setdefault(room_of(fault), []).append(fault)
    for some in rooms.values():
        rng.shuffle(some)
    seen = set()
    while any(rooms.values()):
        for some in rooms.values():
            while some:
                fault = some.pop()
                if fault[:2] not in seen:
                    seen.add(fault[:2])
                    yield fault
                    break


def not_copied(folder: str, names) -> set:
    """Of ``build``, only what the compiler has made is of use."""
    if Path(folder) == ROOT / "build":
        return {name for name in names if not name.startswith(("temp", "compiled"))}
    return {name for name in names if name in (".git", ".venv", "runs", "__pycache__") or name.endswith("_cache")}


class Copy:
    """A copy of the project, whose tests import its own package."""

    def __init__(self, folder: Path):
        self.root, self._compiled = folder / "project", folder / "compiled"
        shutil.copytree(ROOT, self.root, ignore=not_copied, symlinks=True)
        self.compile()
        self._copy_compiled(self.root, self._compiled)

    @staticmethod
    def _copy_compiled(source: Path, target: Path) -> None:
        """Objects and library, with their times, so that nothing is compiled again that has not changed."""
        for name in ("build", "gluon_syncbn"):
            for file in [*(source / name).rglob("*.o"), *(source / name).glob("*.so")]:
                copy = target / file.relative_to(source)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(file, copy)

    def run(self, command, limit: int):
        """Exit code and text; None as the code where it did not end."""
        variables = {**os.environ, "PYTHONPATH": str(self.root), "OMP_NUM_THREADS": "1", "CI_NEEDS_ALL": "1"}
        process = subprocess.Popen(
            command,
            cwd=self.root,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        try:
            text, _ = process.communicate(timeout=limit)
            return process.returncode, text
        except subprocess.TimeoutExpired:
            return None, ""
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def compile(self) -> bool:
        code, text = self.run([sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"], LIMIT)
        return code == 0 and "could not compile" not in text

    def tried(self, fault: Fault) -> Optional[str]:
        """The first test that fails with this fault; "" if none does; None if it cannot be compiled."""
        file = self.root / "gluon_syncbn" / fault.path
        whole, times = file.read_text(encoding="utf-8"), file.stat()
        is_compiled = file.suffix != ".py" and not fault.path.startswith("csrc/cuda/kernels")
        try:
            file.write_text(fault.text, encoding="utf-8")
            if is_compiled and not self.compile():
                return None
            return self._first_failure(fault)
        finally:
            file.write_text(whole, encoding="utf-8")
            os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
            if is_compiled:
                self._copy_compiled(self._compiled, self.root)

    def _first_failure(self, fault: Fault) -> str:
        tests = next(names for part, names in TESTS.items() if fault.path.startswith(part)).split()
        files = [f"tests/test_{name}.py" for name in dict.fromkeys([Path(fault.path).stem.strip("_"), *tests])]
        files = [file for file in files if (self.root / file).exists()]
        options = ["-x", "-q", "-p", "no:cacheprovider", "--tb=no", "-m", "not long"]
        options += ["--seed", str(fault.line), f"--timeout={ONE}", f"--session-timeout={ALL}"]
        code, text = self.run([sys.executable, "-m", "pytest", *options, *files], LIMIT)
        if code in (3, 4, 5):  # of pytest: it has run no test
            raise RuntimeError(text)
        failed = re.search(r"^(?:FAILED|ERROR) (?:tests/)?(\S+)", text, re.MULTILINE)
        if failed:
            return failed.group(1)
        if code == 0 or "session-timeout" in text:
            return ""
        return "a test hangs" if code is None or "Timeout" in text else f"pytest ended with {code}"


def drawn_faults(options) -> Iterator[Fault]:
    """Of C++ and of Python, in the proportion that is asked for."""
    rng, faults = random.Random(options.seed), all_faults(options.parts)
    cpp, python = (draw([item for item in faults if item.path.endswith(".py") == flag], rng) for flag in (False, True))
    due = 0.0
    while True:
        due += options.cpp / options.count
        fault = next(cpp if due >= 1 else python, None) or next(python, None) or next(cpp, None)
        due -= due >= 1
        if fault is None:
            return
        yield fault


def row_of(fault: Fault, caught: str, seconds: float) -> str:
    before, after = (" ".join(part.split())[:90] for part in (fault.before, fault.after))
    columns = [f"{fault.path}:{fault.line}", fault.kind.replace("_", " "), f"`{before}`", f"`{after}`"]
    return f"| {' | '.join(columns)} | {caught or '**not caught**'} | {seconds:.0f} s |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--cpp", type=int, default=20, help="how many of them are in C++")
    parser.add_argument("--known", action="store_true", help="those that were not caught once")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    parser.add_argument("--copies", type=int, default=2, help="faults that are tried at a time")
    parser.add_argument("parts", nargs="*", default=[""], help="what the paths in the package begin with")
    options = parser.parse_args()
    print("known faults" if options.known else f"--seed {options.seed}", flush=True)
    waiting = known_faults() if options.known else drawn_faults(options)
    count = len(KNOWN) if options.known else options.count
    lock, results = threading.Lock(), []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.copies) as pool:
        copies = list(pool.map(lambda number: Copy(Path(folder) / str(number)), range(options.copies)))

        def work(some: Copy) -> None:
            while len(results) < count:
                with lock:
                    fault = next(waiting, None)
                if fault is None:
                    return
                began = time.monotonic()
                caught = some.tried(fault)
                if caught is not None:
                    results.append((fault, caught))
                    print(row_of(fault, caught, time.monotonic() - began), flush=True)

        list(pool.map(work, copies))
    for name, some in (
        ("all", results),
        ("C++", [item for item in results if not item[0].path.endswith(".py")]),
    ):
        print(f"{name}: {sum(bool(caught) for _, caught in some)} of {len(some)} faults were caught.")
    return int(options.known and not all(caught for _, caught in results))


if __name__ == "__main__":
    sys.exit(main())
