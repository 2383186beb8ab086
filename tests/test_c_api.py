"""What csrc/mxnet declares of MXNet by hand is what its headers say; `make wheels` asks other versions."""

import os
import subprocess
from pathlib import Path

import mxnet as mx
from testing import HANG, ROOT, run_python

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


OTHER_ENGINE = """
import ctypes
import logging
from testing import *
from gluon_syncbn.base import library

logging.basicConfig(level=logging.INFO)
assert library.core.gluon_syncbn_connect(ctypes.c_void_p(ctypes.CDLL({other!r})._handle)) == 0
for mode in MODES:
    layer, norm = SyncBatchNorm(in_channels=3, backend="native"), reference.Norm(np.ones(3), np.zeros(3))
    set_mode(initialized(layer, 2), mode)
    for seed in range(3):
        check_step(layer, norm, *shards_and_heads([(2, 3, 4, 4), (1, 3, 4, 4)], seed=seed))
"""


def test_an_engine_with_another_interface(tmp_path):
    """Passes then wait on the threads of MXNet's custom operators, and nothing crashes."""
    (libmxnet,) = mx.libinfo.find_lib_path()
    other = str(tmp_path / "other.so")
    source = os.path.join(ROOT, "tests", "csrc", "other_engine.cpp")
    command = ["g++", "-std=c++17", "-shared", "-fPIC", source, "-Wl,--no-as-needed", libmxnet, "-o", other, "-ldl"]
    subprocess.run(command, check=True)
    assert "engine completes no operations of others" in run_python(OTHER_ENGINE.format(other=other)).stderr
