"""The kernels as machine code: needs no GPU, but NVRTC, ptxas and nvdisasm (the toolkit's, or Triton's).

    python benchmarks/gpu_code.py [--bin FOLDER] [--architectures 70 80 90] [FILE.ptx ...]

A line for each kernel: loads of 16 bytes under way before the first of them is used; registers, and bytes of them that
are spilled; barriers; instructions in the loop over the tensor, for each value. Without files it compiles the kernels
of a layer with a ReLU, in float32 and float16. These numbers are only a hint of speed; benchmarks/gpu.py measures.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from gpu_kernels import KernelKind, compile_ptx, options

PACKS = {"moments": 8, "normalize": 8, "gradient_sums": 4, "input_gradient": 4}  # of a tensor, in a turn of the loop
_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\d+ )?\s*([A-Z0-9_.]+)\s*(.*?) ;")


def read_kernels(ptx: Path, architecture: str, tools: Path) -> dict:
    """By kernel: loads under way, registers, spilled bytes, barriers, instructions in the loop."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "cubin"
        command = [tools / "ptxas", "-v", f"-arch=sm_{architecture}", ptx, "-o", cubin]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
        code = subprocess.run([tools / "nvdisasm", "-c", cubin], check=True, capture_output=True, text=True).stdout
    found = {}
    for name, about in re.findall(r"entry function '(\w+)'(.*?Used.*?)\n", said, flags=re.DOTALL):
        spilled = int(re.search(r"(\d+) bytes spill stores", about)[1])
        registers = int(re.search(r"Used (\d+) registers", about)[1])
        (text,) = re.findall(rf"^\.text\.{name}:\n(.*?)(?=^\.text\.|\Z)", code, flags=re.DOTALL | re.MULTILINE)
        found[name] = (loads_under_way(text), registers, spilled, text.count("BAR.SYNC"), loop_over_packs(text))
    return found


def loads_under_way(text: str) -> int:
    """The most loads of a pack in a row before one of their registers is read."""
    most = count = 0
    pending = set()
    for _, name, operands in _INSTRUCTION.findall(text):
        numbers = [int(number) for number in re.findall(r"\bR(\d+)", operands)]
        is_load = name.startswith("LDG") and "128" in name
        if pending & set(numbers if name.startswith(("ST", "BRA")) else numbers[1:]):
            count, pending = 0, set()
        if is_load:
            count += 1
            pending |= set(range(numbers[0], numbers[0] + 4))
            most = max(most, count)
    return most


def loop_over_packs(text: str) -> int:
    """Instructions of the smallest loop that loads packs."""
    labels, lines = {}, []
    for line in text.splitlines():
        label = re.match(r"^(\.L_x?_?\d+):", line)
        if label:
            labels[label[1]] = len(lines)
        found = _INSTRUCTION.search(line)
        if found:
            lines.append(found.groups())
    sizes = []
    for end, (_, name, operands) in enumerate(lines):
        target = re.search(r"`\((\.L_x?_?\d+)\)", operands)
        if not name.startswith("BRA") or not target or labels.get(target[1], end) >= end:
            continue
        body = lines[labels[target[1]] : end + 1]
        if sum(item[1].startswith("LDG") and "128" in item[1] for item in body) >= 4:
            sizes.append(len(body))
    return min(sizes, default=0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, help="PTX, float16 if the name says so")
    parser.add_argument("--bin", type=Path, default=Path("/usr/local/cuda/bin"), help="where ptxas and nvdisasm are")
    parser.add_argument("--architectures", nargs="+", default=["70", "80", "90"])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        files = arguments.files
        for dtype in () if files else ("float32", "float16"):
            (Path(folder) / f"{dtype}.ptx").write_bytes(compile_ptx(options(KernelKind(dtype, "relu"))))
            files = sorted(Path(folder).iterdir(), reverse=True)
        for file in files:
            pack = 8 if "float16" in file.name else 4
            print(f"\n{file.stem}, for " + ", ".join(f"sm_{number}" for number in arguments.architectures))
            print("| kernel | loads under way | registers | spilled | barriers | instructions per value |")
            print("|" + " --- |" * 6)
            by_architecture = [read_kernels(file, number, arguments.bin) for number in arguments.architectures]
            for kernel in by_architecture[0]:
                columns = list(zip(*(found[kernel] for found in by_architecture)))
                values = pack * PACKS[kernel.rsplit("_", 1)[0]]
                columns[-1] = [f"{size / values:.1f}" for size in columns[-1]]
                print(f"| {kernel} | {' | '.join(', '.join(map(str, column)) for column in columns)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
