"""Each code block of the documentation runs, and the README's example.

That the documentation builds without a warning is shown by `make docs`, in CI.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launching import need, run_job
from testing import HANG, ROOT, lean_environment, run_python

DOCS = Path(ROOT) / "docs"
BLOCK = re.compile(r"^```(python|console)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
PAGES = [page.name for page in sorted(DOCS.glob("*.md")) if BLOCK.search(page.read_text(encoding="utf-8"))]


def run(folder, *arguments) -> str:
    """What Python prints, in a process of its own."""
    variables = lean_environment()
    how = {"cwd": folder, "env": variables, "timeout": HANG, "capture_output": True, "encoding": "utf-8"}
    done = subprocess.run([sys.executable, *arguments], **how)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("page", PAGES)
def test_code_blocks(page, tmp_path):
    """Python blocks in the order of the page, as one program; then its commands, with the output that it shows."""
    blocks = BLOCK.findall((DOCS / page).read_text(encoding="utf-8"))
    program = "\n".join(text for kind, text in blocks if kind == "python")
    (tmp_path / "page.py").write_text(program.replace("mx.gpu", "mx.cpu"), encoding="utf-8")
    run(tmp_path, "page.py")
    for command, *shown in (text.splitlines() for kind, text in blocks if kind == "console"):
        assert command.startswith("$ python ")
        assert "\n".join(shown) in run(tmp_path, *command.split()[2:])


CHECK_WEIGHTS = """
from mpi4py import MPI

comm = MPI.COMM_WORLD
for name, parameter in net.collect_params().items():
    everyone = comm.allgather(parameter.data().asnumpy())
    assert all((values == everyone[0]).all() for values in everyone), name
print("EQUAL WEIGHTS")
"""


@pytest.mark.parametrize("trainer", ["of the page", "of one process"])
def test_the_example_with_mpi(trainer, tmp_path):
    """Its processes train the same weights; with a plain Trainer they do not, and a warning says so."""
    need("mpi")
    text = (DOCS / "processes.md").read_text(encoding="utf-8")
    programs = re.findall(r"^```py\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    (program,) = (text for text in programs if "gluon_syncbn.DistributedTrainer" in text)
    if trainer == "of one process":
        program = program.replace("gluon_syncbn.DistributedTrainer", "gluon.Trainer")
        program = program.replace("trainer.broadcast_parameters()", "")
    script = tmp_path / "train.py"
    script.write_text(f"import os; os.chdir({str(tmp_path)!r})\n{program}{CHECK_WEIGHTS}", encoding="utf-8")
    done = run_job("mpi", 2, str(script))
    warned = "does not add up their gradients, so each process trains weights of its own" in done.stdout
    if trainer == "of the page":
        assert done.returncode == 0 and done.stdout.count("EQUAL WEIGHTS") == 2 and not warned, done.stdout
        assert "loss" in done.stdout and (tmp_path / "net.params").exists()
    else:
        assert done.returncode != 0 and "AssertionError" in done.stdout and warned, done.stdout


def test_the_tutorial_as_a_notebook(tmp_path):
    """Its code cells are the blocks of the page, which run above."""
    file = tmp_path / "tutorial.ipynb"
    run(tmp_path, "-m", "jupytext", "--to", "ipynb", "--output", str(file), str(DOCS / "tutorial.md"))
    cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]).strip() for cell in cells if cell["cell_type"] == "code"]
    blocks = BLOCK.findall((DOCS / "tutorial.md").read_text(encoding="utf-8"))
    assert code == [text.strip() for _, text in blocks]


def test_every_page_is_in_the_contents():
    contents = (DOCS / "index.md").read_text(encoding="utf-8").split("```{toctree}", 1)[1]
    assert {page.stem for page in DOCS.glob("*.md")} - {"index"} <= set(contents.split())


CHECK_README = """
import sys
for name, parameter in net.collect_params().items():
    a, b = (parameter.data(device).asnumpy() for device in devices)
    assert (a == b).all(), name
vision.resnet18_v1(classes=10, prefix=net.prefix).load_parameters('net.params')
assert 'gluoncv' not in sys.modules
"""


def test_the_example_of_the_readme(tmp_path):
    """As it stands, with what its install line installs."""
    text = Path(ROOT, "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert "range(10)" in code
    code = code.replace("range(10)", "range(30)")
    done = run_python(f"import os; os.chdir({str(tmp_path)!r})\n{code}{CHECK_README}")
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+)$", done.stdout, re.MULTILINE)]
    assert len(losses) == 30 and min(losses[-5:]) < losses[0], done.stdout
