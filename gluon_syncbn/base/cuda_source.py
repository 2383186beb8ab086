"""The text of the CUDA kernels. This file imports nothing of the package, so benchmarks can run it without MXNet."""

from pathlib import Path

_FOLDER = Path(__file__).parents[1] / "csrc" / "cuda"


def cuda_source() -> str:
    """Return ``kernels.cu`` with its included files in place, because NVRTC reads no files.

    Errors and warnings of the compiler name the file and the line.
    """
    lines = ['#line 1 "kernels.cu"']
    for number, line in enumerate((_FOLDER / "kernels.cu").read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("#include "):
            name = line.split('"')[1]
            text = (_FOLDER / name).read_text(encoding="utf-8")
            lines += [f'#line 1 "{name}"', text, f'#line {number + 1} "kernels.cu"']
        else:
            lines.append(line)
    return "\n".join(lines) + "\n"
