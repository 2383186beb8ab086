"""The package's rooms: imports run downwards only, and MXNet's private parts are used in one module."""

import ast
import re
from pathlib import Path

import pytest
from harness import ROOT, run_python

PACKAGE = Path(ROOT) / "gluon_syncbn"
FILES = {path: ".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in PACKAGE.rglob("*.py")}
# From the ground up. Above them stand synchronization.py, block.py and symbol.py, then nets, then what users call.
FOLDERS = ["base", "mxnet_engine", "distributed", "layer", "meeting", "step", "graphs", "backends"]


def imports_of(path):
    """The modules of the package that a file imports when it is imported itself, without the package's name."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "gluon_syncbn":
            inside = node.module[len("gluon_syncbn.") :]
            for name in (alias.name for alias in node.names):
                deeper = f"{inside}.{name}".lstrip(".")
                found.add(deeper if deeper in FILES.values() else inside)
    return found - {""}


def levels(imports):
    """By module: 0 if it imports nothing of the package, else one more than the highest that it imports."""
    known = {}
    while len(known) < len(imports):
        ready = [name for name in imports if name not in known and imports[name] <= set(known)]
        assert ready, f"a circle of imports among {sorted(set(imports) - set(known))}"
        known.update({name: 1 + max((known[item] for item in imports[name]), default=-1) for name in ready})
    return known


MODULES = {name: imports_of(path) for path, name in FILES.items() if name != "__init__"}


def test_imports_have_no_circle_and_few_levels():
    assert max(levels(MODULES).values()) <= 11


def test_a_circle_would_be_seen():
    with pytest.raises(AssertionError, match=r"a circle of imports among \['a', 'b'\]"):
        levels({"a": {"b"}, "b": {"a"}, "c": set()})


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_imports_only_from_those_below_it(folder):
    below = FOLDERS[: FOLDERS.index(folder) + 1]
    for name, imported in MODULES.items():
        if name.startswith(folder + "."):
            assert {item.split(".")[0] for item in imported} <= set(below), name


def test_every_module_is_used():
    used = set().union(*MODULES.values(), imports_of(PACKAGE / "__init__.py"))
    started = {"__main__", "run"}
    assert {name for name in MODULES if not name.endswith("__init__")} - used - started == set()


def test_what_the_interpreter_holds_for_forks_leads_to_nothing():
    tree = ast.parse((PACKAGE / "base" / "forks.py").read_text(encoding="utf-8"))
    assert not [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    code = """
import atexit
atexit.register(lambda: print("at exit:", forks.before, forks.after))  # the last handler to run
import gluon_syncbn
from gluon_syncbn.base import forks
assert forks.before and forks.after
"""
    done = run_python(code)
    assert done.stdout == "at exit: [] []\n", done.stderr


# Of our own classes, used by their neighbours.
OURS = {"_as_node", "_asdict", "_converted_from", "_norms", "_sync", "_take_options"}
OURS |= {"_fill", "_replace", "_stop_synchronizing", "_compose", "_handle", "_getframe"}


def private_names(path):
    """What a file uses as ``object._name``, but for what a class has or inherits itself, or imports as ``_name``."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id == "self"):
            found.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mxnet"):
            found |= {alias.name for alias in node.names}
    return {name for name in found if re.match("_[a-zA-Z]", name)}


def test_private_parts_of_mxnet_are_in_one_module():
    allowed = {"base.mxnet_private": None, "base.library": {"_LIB"}}
    allowed["distributed.horovod"] = {"_exit"}  # of the C library
    allowed["distributed.mpi"] = {"_addressof", "_sizeof"}  # which mpi4py documents
    for path, name in FILES.items():
        if allowed.get(name, set()) is not None:
            assert private_names(path) <= OURS | allowed.get(name, set()), name


def test_every_room_is_a_package():
    """Or a wheel leaves it out."""
    assert [folder for folder in {path.parent for path in FILES} if not (folder / "__init__.py").exists()] == []
