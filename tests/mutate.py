"""A mutation trial: puts small faults into copies of the package, one at a time, and counts those that the tests find.

    .venv/bin/python tests/mutate.py --count 50

A fault is drawn at random: another sign or comparison, a condition that is negated or dropped, two arguments swapped,
an option left out, a lock not taken, a statement not run. Each is tried by the tests of the part that it is in (TESTS)
until the first fails, and not by the whole suite, which would find more. What only `make gpu` runs is left alone.
Prints a table of Markdown. Look at what was not found by hand: some faults change nothing that anybody can see. Needs
Python 3.9, and what `make test` installs.
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
ALL, ONE = 360, 120
LIMIT = 600  # for what should have ended by then
LAYERS = "oracle modes statistics groups fused_relu convert left_plain unfinished_step errors kvstore moves backend"
PROCESSES = "processes pairs process_ways two_nets process_faults launchers"
FAILING = "unfinished_step missing_device failed_step failed_forward faults"
# The tests of each part, in the order in which they run, after those that are named after the file. The first part that
# a path begins with counts.
TESTS = {
    "distributed": f"launchers {PROCESSES} install",
    "meeting/p": f"pairs {PROCESSES} rendezvous statistics",
    "meeting": f"rendezvous waiting {LAYERS} {PROCESSES} {FAILING}",
    "step": f"unfinished_step {FAILING} {LAYERS} two_nets",
    "mxnet_engine": f"engine_settings {FAILING}",
    "graphs": f"fused_graphs fused_relu moves modes symbol symbol_block {LAYERS} crossings",
    "nets": f"left_plain symbol_block deployment fused_relu older_files symbol {LAYERS}",
    "backends/portable": f"portable bfloat16 {LAYERS} {PROCESSES}",
    "csrc/cuda": "gpu_compile gpu_kernels gpu_launch gpu_bundle",
    "csrc/cpu": f"native_kernels bfloat16 in_place renorm bad_numbers precision freezing {LAYERS} crossings",
    "csrc/meeting": f"rendezvous sanitizers waiting {LAYERS} {FAILING} renorm profile {PROCESSES}",
    "csrc": f"modes errors missing_device c_api fused_graphs {LAYERS} threads {FAILING} crossings {PROCESSES}",
    "run.py": "install launchers process_ways",
    "_install.py": "install process_ways",
    "_profile.py": "profile",
    "__main__.py": "doctor",
    "symbol.py": "symbol symbol_block older_files deployment crossings",
    "": f"{LAYERS} engine_settings {FAILING} copies symbol symbol_block in_place renorm bfloat16 public crossings",
}
KEPT = ("__init__.py", "cuda_source.py")  # lists of names, and text
# Only `make gpu` runs what calls CUDA.
FOR_GPUS = re.compile(r"csrc/cuda/(driver|operator|scratch)\.")


class Fault(NamedTuple):
    path: str  # in the package
    line: int
    kind: str
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
            yield Fault(str(path), node.lineno, change.__name__, before, after, whole)


# C++: a pattern in a line of code, and its replacement.
CPP = {
    "changed_comparison": [(" < ", " <= "), (" <= ", " < "), (" > ", " >= "), (" >= ", " > "), (" == ", " != ")],
    "changed_operator": [(" + ", " - "), (" - ", " + "), (" * ", " / "), (" && ", " || "), (" || ", " && ")],
    "dropped_not": [("(!", "(")],
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
                    new = code[: match.start()] + replacement + code[match.end() :]
                    whole = "\n".join([*lines[:number], new, *lines[number + 1 :], ""])
                    yield Fault(str(path), number + 1, kind, code.strip(), new.strip() or "(nothing)", whole)


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
    return found


def draw(faults, rng) -> Iterator[Fault]:
    """In turn of each kind, as far as there are some; never two in one line."""
    kinds = {}
    for fault in faults:
        kinds.setdefault(fault.kind, []).append(fault)
    for some in kinds.values():
        rng.shuffle(some)
    seen = set()
    while any(kinds.values()):
        for some in kinds.values():
            while some:
                fault = some.pop()
                if fault[:2] not in seen:
                    seen.add(fault[:2])
                    yield fault
                    break


def not_copied(folder: str, names) -> set:
    """Of ``build``, only what the compiler has made is of use."""
    if Path(folder) == ROOT / "build":
        return {name for name in names if not name.startswith("temp")}
    return {name for name in names if name in (".git", ".venv", "runs", "__pycache__") or name.endswith("_cache")}


class Copy:
    """A copy of the project, whose tests import its own package."""

    def __init__(self, folder: Path):
        self.root = folder
        shutil.copytree(ROOT, folder, ignore=not_copied, symlinks=True)
        self.compile()

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
        whole = file.read_text(encoding="utf-8")
        is_compiled = file.suffix != ".py" and not fault.path.startswith("csrc/cuda/kernels")
        try:
            file.write_text(fault.text, encoding="utf-8")
            if is_compiled and not self.compile():
                return None
            tests = next(names for part, names in TESTS.items() if fault.path.startswith(part)).split()
            files = [f"tests/test_{name}.py" for name in dict.fromkeys([Path(fault.path).stem.strip("_"), *tests])]
            files = [file for file in files if (self.root / file).exists()]
            options = ["-x", "-q", "-p", "no:cacheprovider", "--tb=no", "-m", "not long"]
            options += ["--seed", "0", f"--timeout={ONE}", f"--session-timeout={ALL}"]
            code, text = self.run([sys.executable, "-m", "pytest", *options, *files], LIMIT)
            if code in (3, 4, 5):  # of pytest: it has run no test
                raise RuntimeError(text)
            failed = re.search(r"^(?:FAILED|ERROR) (?:tests/)?(\S+)", text, re.MULTILINE)
            if failed:
                return failed.group(1)
            if code == 0 or "session-timeout" in text:
                return ""
            return "a test hangs" if code is None or "Timeout" in text else f"pytest ended with {code}"
        finally:
            file.write_text(whole, encoding="utf-8")
            if is_compiled:
                self.compile()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    parser.add_argument("--copies", type=int, default=2, help="faults that are tried at a time")
    parser.add_argument("parts", nargs="*", default=[""], help="what the paths in the package begin with")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    waiting = draw(all_faults(options.parts), random.Random(options.seed))
    lock, results = threading.Lock(), []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.copies) as pool:
        copies = list(pool.map(lambda number: Copy(Path(folder) / str(number)), range(options.copies)))

        def work(some: Copy) -> None:
            while len(results) < options.count:
                with lock:
                    fault = next(waiting, None)
                if fault is None:
                    return
                began = time.monotonic()
                found = some.tried(fault)
                if found is not None:
                    results.append(found)
                    before, after = (" ".join(part.split())[:90] for part in (fault.before, fault.after))
                    kind, seconds = fault.kind.replace("_", " "), time.monotonic() - began
                    row = [f"{fault.path}:{fault.line}", kind, f"`{before}`", f"`{after}`", found or "**not found**"]
                    print(f"| {' | '.join(row)} | {seconds:.0f} s |", flush=True)

        list(pool.map(work, copies))
    print(f"{sum(map(bool, results))} of {len(results)} faults were found.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
