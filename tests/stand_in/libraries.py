"""The shared libraries that a CUDA build of MXNet wants, where they are not there.

Without a GPU these are stand-ins for CUDA's driver and runtime (driver.cpp, runtime.cpp), the kernels for the CPU, and
stubs for all else but NVRTC; with one, only the stubs: driver and runtime must be real then. A stub returns success
from what MXNet calls when it starts a thread for a GPU, and ends the process with its own name from anything else.
"""

import re
import subprocess
from pathlib import Path

from stand_in import COMPILER, build_kernels

HERE = Path(__file__).parent
_AT_START = "GetVersion|Create|Destroy|SetStream|SetMathMode|GetMathMode|SetPointerMode|GroupStart|GroupEnd|nvtxRange"
_STUBS = """
#include <cstdio>
#include <cstdlib>
#define DOES_NOTHING(name) extern "C" int name(void** handle) { (void)handle; return 0; }
#define MAKES(name) extern "C" int name(void** handle) { static int made; *handle = &made; return 0; }
#define STOPS(name) extern "C" int name() { std::fputs("stub: " #name " was called\\n", stderr); std::abort(); }
"""


def _lines(*command) -> list:
    return subprocess.run(
        [str(item) for item in command], capture_output=True, text=True, check=True
    ).stdout.splitlines()


def needed_symbols(libmxnet: Path) -> dict:
    """By library, what libmxnet takes from CUDA's libraries."""
    found = {}
    for line in _lines("nm", "-D", "--undefined-only", libmxnet):
        name, _, version = line.split()[-1].partition("@")
        if version.startswith(("libcu", "libnv")):
            found.setdefault(version.lstrip("@"), []).append(name)
        elif not version and re.match("cu[A-Z]", name):
            found.setdefault("libcuda.so.1", []).append(name)
        elif not version and name.startswith("nccl"):
            found.setdefault("libnccl.so.2", []).append(name)
    for line in _lines("readelf", "-d", libmxnet):
        wanted = re.search(r"NEEDED.*\[(lib(cu|nv|nccl).*)\]", line)
        if wanted:
            found.setdefault(wanted.group(1), [])
    return found


def _stub(name: str) -> str:
    if not re.search(_AT_START, name):
        return f"STOPS({name})"
    return f"MAKES({name})" if name.endswith(("Create", "Create_v2", "CreateGenerator")) else f"DOES_NOTHING({name})"


def _build(folder: Path, library: str, names: list, sources=(), flags=()) -> None:
    text = "".join(Path(source).read_text() for source in sources)
    missing = [name for name in names if not re.search(rf"\b{name}\(", text)]
    stubs, versions = folder / f"{library}.stubs.cpp", folder / f"{library}.map"
    stubs.write_text(_STUBS + "\n".join(map(_stub, missing)) + "\n")
    versions.write_text(f"{library} {{ global: *; }};\n")
    versioned = [] if library in ("libcuda.so.1", "libnccl.so.2") else [f"-Wl,--version-script={versions}"]
    output = ["-o", str(folder / library), f"-Wl,-soname,{library}"]
    subprocess.run([*COMPILER, str(stubs), *map(str, sources), *versioned, *output, *flags], check=True)


def build(folder: Path, libmxnet: Path, has_gpu: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for library, names in sorted(needed_symbols(libmxnet).items()):
        if library.startswith("libnvrtc"):
            continue
        if library == "libcuda.so.1":
            if not has_gpu:
                _build(folder, library, names, [HERE / "driver.cpp"], ["-ldl"])
        elif library.startswith("libcudart"):
            if not has_gpu:
                _build(folder, library, names, [HERE / "runtime.cpp"], [f"-L{folder}", "-l:libcuda.so.1"])
        else:
            _build(folder, library, names)
    if not has_gpu:
        build_kernels(folder)
