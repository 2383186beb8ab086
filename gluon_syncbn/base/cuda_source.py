"""The text of the CUDA kernels. Imports nothing of the package, so that benchmarks can run this file without MXNet."""

import re
from pathlib import Path

_FOLDER = Path(__file__).parents[1] / "csrc" / "cuda"


def cuda_source() -> str:
    """``kernels.cu`` with the files that it includes in their places: NVRTC is given one text, and reads no files.

    Errors and warnings of the compiler name the file and the line.
    """
    lines = ['#line 1 "kernels.cu"']
    for number, line in enumerate((_FOLDER / "kernels.cu").read_text(encoding="utf-8").splitlines(), 1):
        included = re.fullmatch(r'#include "(.+)"', line)
        if included:
            text = (_FOLDER / included[1]).read_text(encoding="utf-8")
            lines += [f'#line 1 "{included[1]}"', text, f'#line {number + 1} "kernels.cu"']
        else:
            lines.append(line)
    return "\n".join(lines) + "\n"
