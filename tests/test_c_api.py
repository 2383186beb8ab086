"""What csrc/mxnet declares of MXNet by hand is what its headers say; `make wheels` asks other versions."""

import os
import subprocess
from pathlib import Path

import mxnet as mx
from testing import HANG, ROOT

CHECK = Path(ROOT, "tests", "csrc", "check_c_api.cpp")
OURS = Path(ROOT, "gluon_syncbn", "csrc", "mxnet", "c_api.h")


def compile_check(file):
    headers = os.path.join(os.path.dirname(mx.__file__), "include")
    command = ["g++", "-std=c++17", "-fsyntax-only", "-fno-access-control", f"-I{headers}", file]
    return subprocess.run(command, capture_output=True, encoding="utf-8", timeout=HANG)


def test_it_is_what_the_headers_say():
    done = compile_check(CHECK)
    assert done.returncode == 0, done.stderr


def test_a_difference_would_be_seen(tmp_path):
    text, declared = (file.read_text(encoding="utf-8") for file in (CHECK, OURS))
    wrong = declared.replace("const int* requests, int is_train", "const int* requests, long is_train")
    wrong = wrong.replace("kPinned = 3", "kPinned = 5")
    wrong = wrong.replace("  void* engine;\n  void* operation;", "  void* operation;\n  void* engine;")
    (tmp_path / "c_api.h").write_text(wrong, encoding="utf-8")
    text = text.replace("../../gluon_syncbn/csrc/mxnet/c_api.h", "c_api.h").replace("../..", ROOT)
    (tmp_path / "check.cpp").write_text(text, encoding="utf-8")
    words = compile_check(tmp_path / "check.cpp").stderr
    assert "static assertion failed: CustomOpFBFunc" in words and "kCPUPinned" in words
    assert words.count("static assertion failed") == 4  # two members have changed places
