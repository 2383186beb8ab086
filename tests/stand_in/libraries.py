"""Makes the shared libraries that a CUDA build of MXNet needs and a machine lacks.

`build_stubs` makes the libraries that neither the package nor its tests use (cuDNN, cuBLAS and the like). A stub
returns success from functions that MXNet calls when it starts a thread for a GPU. Any other function prints its name
and ends the process.
`build_stand_in` makes CUDA's driver and runtime (driver.cpp, runtime.cpp) and the kernels for the CPU, where there is
no GPU. `build_forwarder` makes an NVRTC that calls the machine's own, of another version.
"""

import re
import subprocess
import tempfile
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
_FORWARDER = """
#include <dlfcn.h>
#include <cstdio>
#include <cstdlib>
static void* real() {
  static void* const library = [] {
    const char* name = std::getenv("GLUON_SYNCBN_NVRTC");
    void* found = dlopen(name ? name : "libnvrtc.so", RTLD_NOW | RTLD_LOCAL);
    if (!found) std::fprintf(stderr, "NVRTC: %s\\n", dlerror()), std::abort();
    return found;
  }();
  return library;
}
#define FORWARDS(name)                                                                \\
  extern "C" void* name(void* a, void* b, void* c, void* d, void* e, void* f) {       \\
    using Function = void* (*)(void*, void*, void*, void*, void*, void*);             \\
    static const auto next = reinterpret_cast<Function>(dlsym(real(), #name));        \\
    return next(a, b, c, d, e, f);                                                    \\
  }
"""


def _lines(*command) -> list:
    return subprocess.check_output(command, encoding="utf-8").splitlines()


def needed_symbols(libmxnet: Path) -> dict:
    """Return the names that libmxnet takes from each of CUDA's libraries."""
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


def _build(folder: Path, library: str, names: list, sources=(), flags=(), text=_STUBS, make=_stub) -> None:
    """Build ``library`` of ``sources``, and of ``text`` with the result of ``make`` for each name that these lack."""
    folder.mkdir(parents=True, exist_ok=True)
    there = "".join(source.read_text(encoding="utf-8") for source in sources)
    missing = [name for name in names if not re.search(rf"\b{name}\(", there)]
    with tempfile.TemporaryDirectory() as temporary:
        made, versions = Path(temporary) / "made.cpp", Path(temporary) / "versions"
        made.write_text(text + "\n".join(map(make, missing)) + "\n", encoding="utf-8")
        versions.write_text(f"{library} {{ global: *; }};\n")
        versioned = [] if library in ("libcuda.so.1", "libnccl.so.2") else [f"-Wl,--version-script={versions}"]
        output = ["-o", folder / library, f"-Wl,-soname,{library}"]
        subprocess.run([*COMPILER, made, *sources, *versioned, *output, *flags], check=True)


def build_stubs(folder: Path, libmxnet: Path) -> None:
    for library, names in needed_symbols(libmxnet).items():
        if not library.startswith(("libnvrtc", "libcuda.so", "libcudart")):
            _build(folder, library, names)


def build_stand_in(folder: Path, libmxnet: Path) -> None:
    needed = needed_symbols(libmxnet)
    (runtime,) = (library for library in needed if library.startswith("libcudart"))
    _build(folder, "libcuda.so.1", needed["libcuda.so.1"], [HERE / "driver.cpp"], ["-ldl"])
    _build(folder, runtime, needed[runtime], [HERE / "runtime.cpp"], [f"-L{folder}", "-l:libcuda.so.1"])
    build_kernels(folder)


def build_forwarder(folder: Path, libmxnet: Path) -> None:
    """NVRTC's interface is the same from CUDA 11 on; at most six arguments, all of them integers or pointers."""
    ((library, names),) = (item for item in needed_symbols(libmxnet).items() if item[0].startswith("libnvrtc"))
    _build(folder, library, names, flags=["-ldl"], text=_FORWARDER, make=lambda name: f"FORWARDS({name})")


def build_one_as_two(folder: Path) -> None:
    command = [*COMPILER, HERE / "one_gpu_as_two.cpp", "-o", folder / "one_gpu_as_two.so", "-ldl"]
    subprocess.run(command, check=True)
