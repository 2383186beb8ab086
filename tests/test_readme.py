"""The README's example runs as it stands, with what its install line installs."""

import re
from pathlib import Path

from testing import ROOT, run_python

CHECK = """
import sys
for name, parameter in net.collect_params().items():
    a, b = (parameter.data(device).asnumpy() for device in devices)
    assert (a == b).all(), name
vision.resnet18_v1(classes=10, prefix=net.prefix).load_parameters('net.params')
assert 'gluoncv' not in sys.modules
"""


def test_example(tmp_path):
    text = Path(ROOT, "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert "range(10)" in code
    code = code.replace("range(10)", "range(100)")
    done = run_python(f"import os; os.chdir({str(tmp_path)!r})\n{code}{CHECK}")
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+)$", done.stdout, re.MULTILINE)]
    assert len(losses) == 100 and losses[-1] < losses[0], done.stdout
