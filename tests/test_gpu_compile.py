"""kernels.cu compiles without a word, with the compilers that MXNet's GPU builds carry and with the newest.

No GPU is needed: NVRTC comes from PyPI. CUDA 10.1, whose NVRTC is not there, was tried by hand.
"""

import ctypes
import itertools
import re
from pathlib import Path

import gpu_kernels
import nvidia
import pytest

VERSIONS = {"11": "cuda_nvrtc/lib/libnvrtc.so.11.2", "newest": "cu[0-9]*/lib/libnvrtc.so.*[0-9]"}
# What MXNet's compiler makes by itself of each kind of layer, in float16, which has the most of its own: the oldest GPU
# that this NVRTC knows can run that, and all newer ones. Then one kind for each architecture, in all dtypes. The
# stand-in compiles every kind in every dtype (test_gpu_kernels.py).
ARCHITECTURES = [*(("11", f"compute_{number}") for number in (60, 70, 80, 86)), ("newest", "compute_90")]
CASES = [("11", None, kind) for kind in gpu_kernels.KINDS if kind.dtype == "float16"]
CASES += [
    (*architecture, gpu_kernels.KernelKind(dtype, "relu", True))
    for architecture, dtype in zip(ARCHITECTURES, itertools.cycle(gpu_kernels.FLAGS))
]


def nvrtc_of(version) -> str:
    (file,) = (file for root in nvidia.__path__ for file in Path(root).glob(VERSIONS[version]))
    return str(file)


def compile_kernels(version, options):
    """PTX and what the compiler had to say."""
    nvrtc, program, size = ctypes.CDLL(nvrtc_of(version)), ctypes.c_void_p(), ctypes.c_size_t()
    source = gpu_kernels.SOURCE.encode()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"kernels.cu", 0, None, None) == 0
    words = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    failed = nvrtc.nvrtcCompileProgram(program, len(options), words)

    def told(what) -> str:
        nvrtc[f"nvrtcGet{what}Size"](program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        nvrtc[f"nvrtcGet{what}"](program, text)
        return text.value.decode()

    return "" if failed else told("PTX"), told("ProgramLog")


@pytest.mark.parametrize("version, architecture, kind", CASES)
def test_it_compiles_without_warnings(version, architecture, kind):
    options = [*gpu_kernels.options(kind), *([f"--gpu-architecture={architecture}"] if architecture else [])]
    ptx, log = compile_kernels(version, options)
    assert log.strip() == ""
    assert sorted(re.findall(r"\.entry (\w+)\(", ptx)) == sorted(gpu_kernels.KERNELS)
    # Each pack is read and written at once, eight of them in a row; 16-bit values are converted by the GPU.
    residual = 4 * kind.has_residual
    for kernel, loads, stores in (
        ("moments", 8, 0),
        ("normalize", 8, 8 - residual),
        ("gradient_sums", 8 + residual, residual),
        ("input_gradient", 8 + residual, 4),
    ):
        for layout in ("rows", "columns"):
            (code,) = re.findall(rf"\.entry {kernel}_{layout}\((.*?)^}}", ptx, flags=re.DOTALL | re.MULTILINE)
            assert len(re.findall(r"ld\.global(?:\.nc)?\.v4\.u32", code)) >= loads
            assert len(re.findall(r"st\.global\.v4\.u32", code)) >= stores
    assert ("cvt.rn.f16.f32" in ptx) == (kind.dtype == "float16")
    assert (".f32" in ptx) == (kind.dtype != "float64")


def test_a_warning_names_file_and_line(monkeypatch):
    line = "KERNEL(moments, MomentsArguments)"
    broken = gpu_kernels.SOURCE.replace(line, "__device__ void unused() { int i; } " + line)
    monkeypatch.setattr(gpu_kernels, "SOURCE", broken)
    log = compile_kernels("11", gpu_kernels.options(gpu_kernels.KernelKind("float32")))[1]
    path = gpu_kernels.CSRC / "cuda" / "kernels.cu"
    (number,) = (i for i, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1) if text.startswith(line))
    assert f"kernels.cu({number}): warning" in log
