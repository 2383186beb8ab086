"""Builds one wheel and tries it with every MXNet that it supports (tests/smoke.py); `make wheels` calls this.

The package declares MXNet's C interface by hand; the declarations are compared with the headers of each MXNet.

Interpreters are looked for on the PATH and among pyenv's. If one is missing, its line says NOT RUN; in CI that is a
failure.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Optional

ROOT = Path(__file__).resolve().parent.parent
NOT_SOURCE = (".git", ".venv", "build", "runs", "__pycache__", "*_cache", ".hypothesis", "*.egg-info", "*.so")
MATRIX = [("1.6.0", "3.8"), ("1.7.0.post2", "3.8"), ("1.8.0.post0", "3.8"), ("1.9.1", "3.11")]


def find_python(version: str) -> Optional[str]:
    """The path of a CPython of that version that has venv."""
    candidates = [shutil.which(f"python{version}")]
    for pyenv in (Path.home() / ".pyenv", Path("/root/.pyenv"), Path("/opt/pyenv"), Path("/usr/local/pyenv")):
        if pyenv.is_dir():
            candidates += sorted(str(path) for path in pyenv.glob(f"versions/{version}.*/bin/python"))
    check = f"import sys, venv, ensurepip; sys.exit('%d.%d' % sys.version_info[:2] != '{version}')"
    for candidate in candidates:
        if candidate and subprocess.run([candidate, "-c", check], capture_output=True).returncode == 0:
            return candidate
    return None


def run(*command) -> str:
    done = subprocess.run(
        [str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1200
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(str(word) for word in command)}\n{done.stdout[-3000:]}")
    return done.stdout


def build_wheel(folder: Path) -> Path:
    source = folder / "source"  # a copy: nothing of an earlier build gets in, and nothing is left over
    shutil.rmtree(source, ignore_errors=True)
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*NOT_SOURCE))
    run(sys.executable, "-m", "pip", "wheel", source, "--no-deps", "--wheel-dir", folder)
    (wheel,) = folder.glob("*.whl")
    if "-py3-none-" not in wheel.name:
        raise RuntimeError(f"{wheel.name} should be tagged py3-none")
    return wheel


def smoke(wheel: Path, mxnet: str, python: str, folder: Path) -> str:
    environment = folder / f"venv-{mxnet}"
    run(python, "-m", "venv", environment)
    in_it = environment / "bin" / "python"
    run(in_it, "-m", "pip", "install", "--quiet", wheel, f"mxnet=={mxnet}")
    (headers,) = environment.glob("lib/python*/site-packages/mxnet/include")
    run(
        "g++",
        "-std=c++17",
        "-fsyntax-only",
        "-fno-access-control",
        f"-I{headers}",
        ROOT / "tests" / "csrc" / "check_c_api.cpp",
    )
    # Not in the checkout, whose package would be found first.
    return run("env", "-C", folder, "OMP_NUM_THREADS=1", in_it, ROOT / "tests" / "smoke.py").splitlines()[-1]


def main() -> int:
    failed, lines = 0, []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel = build_wheel(folder)
        for mxnet, version in MATRIX:
            python = find_python(version)
            if python is None:
                lines.append(f"mxnet {mxnet}: NOT RUN, no Python {version} with venv was found")
                failed += "CI_NEEDS_ALL" in os.environ
                continue
            try:
                lines.append(f"mxnet {mxnet}: {smoke(wheel, mxnet, python, folder)}")
            except (RuntimeError, subprocess.TimeoutExpired) as problem:
                failed += 1
                lines.append(f"mxnet {mxnet}: FAILED\n{problem}")
        print(f"{wheel.name}\n" + "\n".join(lines))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
