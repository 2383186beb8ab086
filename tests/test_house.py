"""The package as a house, and as a user sees it.

Imports have no circle, MXNet's private parts are in one module; names, help and errors are those that are documented.
"""

import ast
import io
import pydoc
import re
import tokenize
from pathlib import Path

import mxnet as mx
import pytest
from mxnet import autograd
from mxnet.gluon import nn
from testing import ROOT, cpus, initialized, run_python

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm, SyncBatchNormError

PACKAGE = Path(ROOT) / "gluon_syncbn"
FILES = {path: ".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in PACKAGE.rglob("*.py")}


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


MODULES = {name: imports_of(path) for path, name in FILES.items() if name != "__init__"}


def in_a_circle(imports):
    """The modules that import, through others perhaps, themselves or one that does."""
    left = dict(imports)
    while True:
        ready = [name for name in left if not left[name] & set(left)]
        if not ready:
            return sorted(left)
        for name in ready:
            del left[name]


def test_imports_have_no_circle():
    assert in_a_circle({"a": {"b"}, "b": {"a"}, "c": set()}) == ["a", "b"]
    assert len(MODULES) > 20 and in_a_circle(MODULES) == []


def test_every_module_is_used_and_every_room_is_a_package():
    """Or a wheel leaves it out."""
    used = set().union(*MODULES.values(), imports_of(PACKAGE / "__init__.py"))
    started = {"__main__", "run"}
    assert {name for name in MODULES if not name.endswith("__init__")} - used - started == set()
    assert [folder for folder in {path.parent for path in FILES} if not (folder / "__init__.py").exists()] == []


def test_what_the_interpreter_holds_for_forks_leads_to_nothing():
    """Or a process whose last arrays remember a Python operator ends in a segmentation fault."""
    code = """
import atexit, gc, os
held = []
os.register_at_fork = lambda **handlers: held.extend(handlers.values())

def look():
    seen, front = {}, list(held)
    while front:
        new = [item for item in gc.get_referents(*front) if id(item) not in seen and not isinstance(item, type)]
        front = list({id(item): item for item in new}.values())
        seen.update((id(item), item) for item in front)
    print(len(held), len(seen) > 10, sorted({getattr(item, "__name__", "") for item in seen.values()} & {"mxnet"}))

atexit.register(look)  # the last to run
import gluon_syncbn
"""
    assert run_python(code).stdout == "3 True []\n"


def private_names(path):
    """What a file uses as ``object._name`` of things that are not the package's, or imports as ``_name`` from MXNet."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id == "self"):
            found.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mxnet"):
            found |= {alias.name for alias in node.names}
    return {name for name in found if re.match("_[a-zA-Z]", name)}


# Of our own classes, used by their neighbours.
OURS = {"_asdict", "_converted_from", "_node_attributes", "_note_in", "_sync"}
OURS |= {"_fill", "_replace", "_compose", "_handle", "_getframe", "_current_frames"}


def test_private_parts_of_mxnet_are_in_one_module():
    allowed = {"base.mxnet_private": None, "base.library": {"_LIB"}}
    allowed["distributed.horovod"] = {"_exit"}  # of the C library
    allowed["distributed.mpi"] = {"_addressof", "_sizeof"}  # which mpi4py documents
    allowed["_trainer"] = {"_allreduce_grads", "_update"}  # which every subclass of Trainer overrides
    for path, name in FILES.items():
        if allowed.get(name, set()) is not None:
            assert private_names(path) <= OURS | allowed.get(name, set()), name


def public(thing):
    return {name for name in dir(thing) if not name.startswith("_")}


def test_dir_and_help_show_what_is_documented():
    names = public(gluon_syncbn)
    documented = (Path(ROOT) / "docs" / "reference.md").read_text(encoding="utf-8")
    assert {"SyncBatchNorm", "convert_sync_batchnorm", "devices"} <= names
    assert [name for name in names if f"gluon_syncbn.{name}" not in documented] == []
    assert public(SyncBatchNorm()) - public(nn.BatchNorm()) == {"backend"}
    text = pydoc.render_doc(gluon_syncbn, renderer=pydoc.plaintext)
    assert len(text.splitlines()) < 80  # a table of contents
    assert [name for name in names - {"symbol"} if name not in text] == []


def test_repr_shows_the_options_that_were_chosen():
    layer = SyncBatchNorm(in_channels=3, num_devices=2, timeout=9, renorm=(3, 5), fuse=False, prefix="stem_")
    assert repr(layer) == repr(nn.BatchNorm(in_channels=3)).replace("BatchNorm(", "SyncBatchNorm(")[:-1] + (
        ", num_devices=2, timeout=9.0, renorm=(3.0, 5.0), fuse=False)"
    )


READS = {
    "asnumpy": lambda out: out.asnumpy(),
    "wait_to_read": lambda out: out.wait_to_read(),
    "waitall": lambda _: mx.nd.waitall(),
    "npx.waitall": lambda _: mx.npx.waitall(),
}


@pytest.mark.parametrize("read", list(READS))
def test_the_error_of_a_layer_arrives_as_ours_and_one_of_mxnets_own_stays_what_it_is(read, backend):
    layer = initialized(SyncBatchNorm(in_channels=3, timeout=0.3, prefix="stem_"), 2)
    with autograd.record():
        out = layer(mx.nd.ones((2, 3, 4, 4), ctx=mx.cpu(0)))
    with pytest.raises(SyncBatchNormError, match="SyncBatchNorm 'stem': forward pass waited 0.3 s for 1 of 2 devices"):
        READS[read](out)
    gluon_syncbn.abandon_step()
    with autograd.record():
        for device in cpus(2):
            layer(mx.nd.ones((2, 3, 4, 4), ctx=device))
    mx.nd.waitall()
    with pytest.raises(mx.MXNetError) as caught:
        READS[read](mx.nd.linalg.potrf(-mx.nd.ones((2, 2))))
    assert not isinstance(caught.value, SyncBatchNormError)
    gluon_syncbn.abandon_step()


# Words


CODE = [path for path in sorted(PACKAGE.rglob("*")) if path.suffix in (".py", ".cpp", ".h", ".cu", ".cuh")]
PAGES = [Path(ROOT) / "README.md", *sorted((Path(ROOT) / "docs").glob("*.md"))]
CPP_CLASS = r"^ *(?:template <.*> *)?(?:struct|class) (?:\w+\(.*?\)\) )?(\w+)(?: final)?(?: : [^{;]*)? \{"


def classes_of(path):
    """The names of the classes that a file defines, without an underscore."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return {node.name.lstrip("_") for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)}
    return set(re.findall(CPP_CLASS, text, re.MULTILINE))


# One thing each, which both languages, or CPU and GPU, compute or call.
SHARED = {"ActiveSets", "Affine", "Link", "Moments", "Saved"}
SHARED |= {"Group", "Message", "Processes", "PythonFunctions", "Rendezvous", "Round", "State", "Task", "Waited"}


def test_no_class_name_stands_for_two_things():
    """Of one language a name may stand twice nowhere, and of two languages only for the same thing."""
    places = {}
    for path in CODE:
        for name in classes_of(path):
            places.setdefault(name, []).append(path.relative_to(PACKAGE).as_posix())
    twice = {name: found for name, found in places.items() if len(found) > 1}
    assert {name: found for name, found in twice.items() if name not in SHARED} == {}
    for name, found in twice.items():
        assert sum(file.endswith(".py") for file in found) <= 1, (name, found)
    assert set(twice) == SHARED, "a name that stands once needs no leave to stand twice"


def glossary():
    """The terms of docs/development.md, and the words that are retired."""
    text = (Path(ROOT) / "docs" / "development.md").read_text(encoding="utf-8")
    terms, retired = text.split("\n## Words\n")[1].split("\n## ")[0].split("\nRetired words")
    return re.findall(r"^\| (.+?) \|", terms, re.MULTILINE)[2:], re.findall(r'"(.+?)"', retired)


def test_the_glossary_is_short_and_retired_words_do_not_come_back():
    terms, retired = glossary()
    assert 20 < len(terms) <= 40 and terms == sorted(terms) and "gave up" in retired
    one_of = "|".join(word.replace(" ", r"[\s_]") for word in retired)
    retired = re.compile(rf"(?<![a-z])({one_of})(?![a-z])", re.IGNORECASE)
    assert retired.findall("_gave_up_ given\nup, and chaotic") == ["gave_up", "given\nup"]
    for path in [*CODE, *PAGES]:
        text = re.sub(r"\nRetired words.*?\n\n.*?\n\n", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        assert retired.findall(text) == [], path


# Clauses without a noun: "what it reads", "whoever waits", "those of the layer". Name the thing.
HEADLESS = re.compile(
    r"\b(?:what(?:ever)?|whoever|whichever)\b|\b(?:that|those) of\b"
    r"|(?:^|[.,;:(] *|\b(?:of|for|to|by|and|or|is|says?|tells?|asks?|knows?|names?|sees?|shows?) )who\b",
    re.IGNORECASE,
)


def english_in(path):
    """The docstrings, comments and strings of a file, or the whole page, without blocks of code."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return re.sub(r"^ *```.*?^ *```|^    .*?$", "", text, flags=re.DOTALL | re.MULTILINE)
    if path.suffix == ".py":
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        return "\n".join(token.string for token in tokens if token.type in (tokenize.STRING, tokenize.COMMENT))
    return "\n".join(re.findall(r'//.*|"(?:[^"\\]|\\.)*"', text))


def test_clauses_have_nouns():
    assert len(HEADLESS.findall("What it reads, those of layers, and who waits; the device that waits")) == 3
    found = {path.name: HEADLESS.findall(english_in(path)) for path in [*CODE, *PAGES]}
    assert sum(map(len, found.values())) <= 30, {name: words for name, words in found.items() if words}


def state_of(path):
    """The module globals of a file that change: containers, objects that are made there, and names declared global."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    changed = {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
    found = set()
    for node in tree.body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if not isinstance(target, ast.Name) or target.id.strip("_").isupper() or target.id == "__all__":
                continue
            function = getattr(node.value, "func", None)
            made = getattr(function, "attr", getattr(function, "id", None))
            is_kept = isinstance(node.value, (ast.Dict, ast.List, ast.Set)) or made not in (
                None,
                "getLogger",
                "getattr",
            )
            found |= {target.id} if is_kept or target.id in changed else set()
    return found


def test_all_state_of_modules_is_listed():
    text = (
        (Path(ROOT) / "docs" / "development.md").read_text(encoding="utf-8").split("\n## State\n")[1].split("\n## ")[0]
    )
    rows = re.findall(r"^\| `.+?` \| (`.+?`) \|", text, re.MULTILINE)
    listed = set(re.findall(r"`(.+?)`", " ".join(rows)))
    found = {path.name: state_of(path) for path in FILES}
    assert set().union(*found.values()) == listed, found
