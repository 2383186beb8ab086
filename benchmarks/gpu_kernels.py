"""Calls the kernels of ``gluon_syncbn/csrc/cuda`` without MXNet, as the operator does: for benchmarks and tests.

`Passes` needs a device that makes arrays and launches kernels: a GPU through CuPy (gpu.py), or a CPU that stands in
for one (tests/stand_in). The operator's own code chooses the grid of each kernel.
"""

import ctypes
import re
import runpy
import sys
from pathlib import Path
from typing import Dict, NamedTuple, Tuple

import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "tests"))
import standalone  # noqa: E402

CSRC = Path(__file__).parents[1] / "gluon_syncbn" / "csrc"
# The package itself cannot be imported where there is no MXNet.
SOURCE = runpy.run_path(str(CSRC.parent / "base" / "cuda_source.py"))["cuda_source"]()
# MXNet's type flags, which are also the source's VALUE_TYPE.
FLAGS = {"float32": 0, "float64": 1, "float16": 2}
ACTIVATIONS = ("none", "relu", "leaky")  # as the kernels number them
PASSES = ("moments", "normalize", "gradient_sums", "input_gradient")
KERNELS = [f"{kernel}_{layout}" for kernel in PASSES for layout in ("rows", "columns")]
H200 = 132  # multiprocessors
REQUEST_NULL, REQUEST_WRITE, REQUEST_ADD = 0, 1, 3


class KernelKind(NamedTuple):
    """A kind of layer that kernels.cu is compiled for; see program.h."""

    dtype: str
    activation: str = "none"
    has_residual: bool = False
    in_place: bool = False

    def numbers(self) -> Tuple[int, int, bool, bool]:
        return FLAGS[self.dtype], ACTIVATIONS.index(self.activation), self.has_residual, self.in_place

    def mark(self) -> str:
        """The mark of this kind in the compiled kernels (kernels.cu)."""
        return "_".join(str(int(number)) for number in self.numbers())


_LAYERS = (("none",), ("relu",), ("leaky",), ("relu", True), ("none", False, True), ("leaky", False, True))
KINDS = [KernelKind(dtype, *layer) for dtype in FLAGS for layer in _LAYERS]


def _read_structs() -> Dict[str, type]:
    """The structs of arguments.h, by name."""
    text = (CSRC / "cuda" / "kernels" / "arguments.h").read_text(encoding="utf-8")
    types = {"int": ctypes.c_int, "int64": ctypes.c_longlong, "double": ctypes.c_double}
    for name, body in re.findall(r"struct (\w+) \{(.*?)\};", text, flags=re.DOTALL):
        fields = []
        for kind, names in re.findall(r"^ +(?:const )?(\w+)([ *].*?);", body, flags=re.MULTILINE):
            for field in names.split(","):
                is_pointer = "*" in field
                fields.append((field.strip(" *"), ctypes.c_void_p if is_pointer else types[kind]))
        types[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    return types


STRUCTS = _read_structs()


def options(kind: KernelKind) -> Tuple[str, ...]:
    """For NVRTC, as the operator passes them."""
    text = ctypes.create_string_buffer(1000)
    standalone.library().gluon_syncbn_kernel_options((ctypes.c_int * 4)(*kind.numbers()), text, len(text))
    return tuple(text.value.decode().split())


def compile_ptx(words: Tuple[str, ...]) -> bytes:
    """Compile with these options, by the operator's own code; RuntimeError with the compiler's log."""
    given = (ctypes.c_char_p * len(words))(*(word.encode() for word in words))
    returns = ctypes.c_char_p
    return standalone.checked("gluon_syncbn_compile", SOURCE.encode(), given, len(words), returns=returns)


def load(ptx: bytes) -> ctypes.c_void_p:
    """A module on the first GPU; RuntimeError with the driver's message."""
    return ctypes.c_void_p(standalone.checked("gluon_syncbn_load", ptx, returns=ctypes.c_void_p))


class Launch(NamedTuple):
    """As launch.h has it; ``blocks`` is tiles, parts, threads."""

    rows: bool
    aligned: bool
    tile: int
    width: int
    thread_rows: int
    blocks: Tuple[int, int, int]
    partials: int
    counters: int


def launch_for(dtype: str, layout: Tuple[int, int, int], *addresses: int, multiprocessors=H200) -> Launch:
    """The launch that the operator would choose for tensors (outer, channels, inner) at these addresses."""
    numbers = (ctypes.c_int64 * 10)()
    sizes = [ctypes.c_int64(size) for size in layout]
    pointers = (ctypes.c_void_p * len(addresses))(*addresses)
    told = FLAGS[dtype], *sizes, pointers, len(addresses), ctypes.c_int64(multiprocessors), numbers
    standalone.checked("gluon_syncbn_launch_for", *told, fails=bool)
    rows, aligned, tile, width, thread_rows, tiles, parts, threads, *sizes = numbers
    return Launch(bool(rows), bool(aligned), tile, width, thread_rows, (tiles, parts, threads), *sizes)


def address_of(array) -> int:
    """Of a NumPy or CuPy array."""
    return array.data.ptr if hasattr(array.data, "ptr") else array.ctypes.data


class Passes:
    """The four passes of one device over tensors of one dtype and one layout (outer, channels, inner).

    Parameters
    ----------
    device
        Has ``multiprocessors``, ``zeros(size, dtype)`` for memory of the device, ``pinned(size)`` for float64 numbers
        that device and host share, ``launch(kernel, kind, blocks, arguments)`` and ``synchronize()``.
    tensors
        x, and for the backward passes dy and dx, or other arrays that are aligned as they are.
    activation, slope, has_residual, in_place
        The activation after the norm, and whether the backward passes are given y in place of x.
    """

    def __init__(
        self,
        device,
        dtype: str,
        layout,
        *tensors,
        activation="none",
        slope=0.1,
        has_residual=False,
        in_place=False,
        has_scale=True,
        epsilon=1e-5,
        momentum=0.9,
    ):
        self.device, self.layout = device, layout
        self.kind, self.slope = KernelKind(dtype, activation, has_residual, in_place), slope
        self.has_scale, self.epsilon, self.momentum = has_scale, epsilon, momentum
        self.blocks = launch_for(dtype, layout, *map(address_of, tensors), multiprocessors=device.multiprocessors)
        self.real = "float64" if dtype == "float64" else "float32"
        self._partials = device.zeros(max(1, self.blocks.partials), "float64")
        self._partials[:] = np.nan  # as the operator has them: with anything in them
        self._counters = device.zeros(max(1, self.blocks.counters), "int32")
        self.message = device.pinned(3 + 4 * layout[1])
        self.saved = device.zeros(4 * layout[1] + 3, "float64")

    def moments(self, x, running=None) -> None:
        """Leave mean and M2 of this device in ``received``, and the ``running`` mean and variance, if there are any."""
        running_mean, running_var = running or (None, None)
        self._run("moments", x=x, running_mean=running_mean, running_var=running_var)

    def normalize(
        self,
        x,
        y,
        gamma,
        beta,
        running_mean,
        running_var,
        count,
        training=True,
        residual=None,
        renorm=False,
    ) -> None:
        """After ``send(mean, var)`` of all devices, which hold ``count`` values per channel; with ``renorm`` after
        ``send(mean, var, r, d)``. With y=None only the vectors are computed."""
        call = {"count": count, "round_id": 7, "active_set": 0, "saved": self.saved}
        vectors = {"gamma": gamma, "beta": beta, "running_mean": running_mean, "running_var": running_var}
        numbers = {"epsilon": self.epsilon, "momentum": self.momentum, "training": training, "renorm": renorm}
        self._run("normalize", x=x, y=y, residual=residual, **vectors, **call, **numbers)

    def gradient_sums(
        self,
        x,
        dy,
        gamma,
        beta,
        d_gamma,
        d_beta,
        gamma_request=1,
        beta_request=1,
        y=None,
        d_residual=None,
        residual_request=1,
    ) -> None:
        """Leave S1 and S2 of this device in ``received``, and the arguments of `normalize` after them.

        Where there is a residual it needs y, and d_residual unless that is not requested.
        """
        vectors = {"gamma": gamma, "beta": beta, "d_gamma": d_gamma, "d_beta": d_beta, "saved": self.saved}
        requests = {"gamma_request": gamma_request, "beta_request": beta_request, "residual_request": residual_request}
        self._run("gradient_sums", x=x, dy=dy, y=y, d_residual=d_residual, **vectors, **requests)

    def input_gradient(self, x, dy, dx, gamma, beta, add=False, y=None) -> None:
        """After ``send(S1, S2)`` of all devices. With y there is a residual, whose ReLU dy has yet to pass."""
        self._run("input_gradient", x=x, dy=dy, y=y, dx=dx, gamma=gamma, beta=beta, saved=self.saved, add=add)

    def received(self) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The two vectors that a pass has left for the host, and the numbers after them."""
        self.device.synchronize()
        channels = self.layout[1]
        first, second, rest = np.split(np.array(self.message), [channels, 2 * channels])
        return first, second, rest[: max(3 + channels, 2 * channels)]

    def send(self, *vectors) -> None:
        """Vectors of all devices, for the pass that comes next."""
        channels = self.layout[1]
        for number, vector in enumerate(vectors):
            self.message[number * channels : (number + 1) * channels] = vector

    def _run(self, kernel: str, **arguments) -> None:
        blocks = self.blocks
        memory = map(address_of, (self._partials, self._counters, self.message))
        known = {
            **{name: value for name, value in arguments.items() if name != "gamma" or self.has_scale},
            "shape": STRUCTS["Shape"](*self.layout, blocks.aligned, blocks.tile, blocks.width, blocks.thread_rows),
            "memory": STRUCTS["BlockMemory"](*memory),
            "slope": self.slope,
        }
        struct = STRUCTS[f"{kernel.title().replace('_', '')}Arguments"]
        fields = {name for name, _ in struct._fields_}
        values = {
            name: address_of(value) if hasattr(value, "dtype") else value
            for name, value in known.items()
            if name in fields and value is not None
        }
        name = f"{kernel}_{'rows' if blocks.rows else 'columns'}"
        self.device.launch(name, self.kind, blocks.blocks, struct(**values))
