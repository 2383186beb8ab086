"""Each code block of the documentation runs. (That it builds without a warning is shown by `make docs`, in CI.)"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness import HANG, ROOT

DOCS = Path(ROOT) / "docs"
BLOCK = re.compile(r"^```(python|console)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
PAGES = [page.name for page in sorted(DOCS.glob("*.md")) if BLOCK.search(page.read_text(encoding="utf-8"))]


def run(command, folder):
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ROOT}
    return subprocess.run(command, cwd=folder, env=variables, timeout=HANG, capture_output=True, encoding="utf-8")


@pytest.mark.parametrize("page", PAGES)
def test_code_blocks(page, tmp_path):
    """Python blocks in the order of the page, as one program; then its commands, with the output that it shows."""
    blocks = BLOCK.findall((DOCS / page).read_text(encoding="utf-8"))
    program = "\n".join(text for kind, text in blocks if kind == "python")
    (tmp_path / "page.py").write_text(program, encoding="utf-8")
    done = run([sys.executable, "page.py"], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for text in (text for kind, text in blocks if kind == "console"):
        command, *shown = text.splitlines()
        assert command.startswith("$ python ")
        done = run([sys.executable, *command.split()[2:]], tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "\n".join(shown) in done.stdout


def test_the_tutorial_as_a_notebook(tmp_path):
    """Its code cells are the blocks of the page, which run below."""
    file = str(tmp_path / "tutorial.ipynb")
    done = run(
        [sys.executable, "-m", "jupytext", "--to", "ipynb", "--output", file, str(DOCS / "tutorial.md")], tmp_path
    )
    assert done.returncode == 0, done.stderr
    cells = json.loads(Path(file).read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    blocks = BLOCK.findall((DOCS / "tutorial.md").read_text(encoding="utf-8"))
    assert [text.strip() for text in code] == [text.strip() for _, text in blocks]


def test_every_page_is_in_the_contents():
    contents = (DOCS / "index.md").read_text(encoding="utf-8").split("```{toctree}", 1)[1]
    assert {page.stem for page in DOCS.glob("*.md")} - {"index"} <= set(contents.split())
