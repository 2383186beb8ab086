"""Calls the kernels of ``gluon_syncbn/csrc/cuda`` without MXNet, as the operator does: for benchmarks and tests.

`Passes` needs a device that makes arrays and launches kernels: a GPU through CuPy (gpu.py), or a CPU that stands in
for one (tests/stand_in). The operator's own code chooses the grid of each kernel.
"""

import ctypes
import re
import runpy
import sys
from pathlib import Path
from typing import Dict, NamedTuple, Optional, Tuple

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
REQUEST_NULL, REQUEST_WRITE, REQUEST_ADD = 0, 1, 3


class KernelKind(NamedTuple):
    """What kernels.cu is compiled for; see program.h."""

    dtype: str
    activation: str = "none"
    has_residual: bool = False
    in_place: bool = False

    def numbers(self) -> Tuple[int, int, bool, bool]:
        return FLAGS[self.dtype], ACTIVATIONS.index(self.activation), self.has_residual, self.in_place

    def mark(self) -> str:
        """As what was compiled says for what (entry_points.cuh)."""
        return "_".join(str(int(number)) for number in self.numbers())


_LAYERS = (("none",), ("relu",), ("leaky",), ("relu", True), ("none", False, True), ("leaky", False, True))
KINDS = [KernelKind(dtype, *layer) for dtype in FLAGS for layer in _LAYERS]


class Tuning(NamedTuple):
    """Other numbers than the operator's; see launch.h. ``defines`` are further options of kernels.cu."""

    threads: int = 256
    unroll: int = 4
    blocks: int = 1024
    reducing_blocks: int = 396
    defines: Tuple[str, ...] = ()


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


def options(kind: KernelKind, tuning: Optional[Tuning] = None) -> Tuple[str, ...]:
    """For NVRTC, as the operator passes them."""
    tuning = tuning or Tuning()
    text = ctypes.create_string_buffer(1000)
    numbers = (ctypes.c_int64 * 4)(*tuning[:4])
    standalone.library().gluon_syncbn_kernel_options((ctypes.c_int * 4)(*kind.numbers()), numbers, text, len(text))
    return (*text.value.decode().split(), *tuning.defines)


def compile_ptx(words: Tuple[str, ...]) -> bytes:
    """Compile with these options, by the operator's own code; RuntimeError with the compiler's log."""
    given = (ctypes.c_char_p * len(words))(*(word.encode() for word in words))
    returns = ctypes.c_char_p
    return standalone.checked("gluon_syncbn_compile", SOURCE.encode(), given, len(words), returns=returns)


def load(ptx: bytes) -> ctypes.c_void_p:
    """A module on the first GPU; RuntimeError with what the driver says."""
    return ctypes.c_void_p(standalone.checked("gluon_syncbn_load", ptx, returns=ctypes.c_void_p))


class Launch(NamedTuple):
    rows: bool
    aligned: bool
    images: int
    grid: Tuple[int, int]
    block: Tuple[int, int]
    partials: int
    counters: int
    tickets: int


def launch_for(
    dtype: str,
    layout: Tuple[int, int, int],
    *addresses: int,
    reduces: bool = True,
    tuning: Optional[Tuning] = None,
) -> Launch:
    """What the operator would choose for tensors (outer, channels, inner) at these addresses."""
    numbers = (ctypes.c_int64 * 10)()
    sizes = [ctypes.c_int64(size) for size in layout]
    pointers = (ctypes.c_void_p * len(addresses))(*addresses)
    tuned = (ctypes.c_int64 * 4)(*tuning[:4]) if tuning else None
    standalone.library().gluon_syncbn_launch_for(
        FLAGS[dtype], *sizes, pointers, len(addresses), reduces, tuned, numbers
    )
    rows, aligned, images, *rest = numbers
    return Launch(bool(rows), bool(aligned), images, tuple(rest[:2]), tuple(rest[2:4]), *rest[4:])


def address_of(array) -> int:
    """Of a NumPy or CuPy array."""
    return array.data.ptr if hasattr(array.data, "ptr") else array.ctypes.data


class Passes:
    """The four passes of one device over tensors of one dtype and one layout (outer, channels, inner).

    Parameters
    ----------
    device
        Has ``tuning``, by default None, ``zeros(size, dtype)`` for memory of the device, ``pinned(size)`` for float64
        numbers that device and host share, ``launch(kernel, kind, tuning, grid, block, arguments)`` and
        ``synchronize()``.
    tensors
        x, and for the backward passes dy and dx, or other arrays that are aligned as they are.
    activation, slope, has_residual, in_place
        What stands after the norm, and whether the backward passes are given y in place of x.
    tuning
        In place of the device's.
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
        tuning=None,
    ):
        self.device, self.layout, self._tuning = device, layout, tuning or device.tuning
        self.kind, self.slope = KernelKind(dtype, activation, has_residual, in_place), slope
        self.has_scale, self.epsilon, self.momentum = has_scale, epsilon, momentum
        addresses = [address_of(tensor) for tensor in tensors]
        self.launches = {
            reduces: launch_for(dtype, layout, *addresses, reduces=reduces, tuning=self._tuning)
            for reduces in (True, False)
        }
        self.real = "float64" if dtype == "float64" else "float32"
        self._partials, self._counters, self._tickets = (
            device.zeros(max(getattr(launch, name) for launch in self.launches.values()), number)
            for name, number in (("partials", "float64"), ("counters", "int32"), ("tickets", "float64"))
        )
        self._partials[:] = np.nan  # as the operator has them: with anything in them
        self.message = device.pinned(4 + 4 * layout[1])
        self.saved = device.zeros(4 * layout[1] + 3, "float64")
        self._ticket = 0.0

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
        """The two vectors that a pass has left for the host, and what comes after them."""
        self.device.synchronize()
        if self.message[0] != self._ticket:
            raise AssertionError(f"the kernel left ticket {self.message[0]}, not {self._ticket}")
        channels = self.layout[1]
        first, second, rest = np.split(np.array(self.message[1:]), [channels, 2 * channels])
        return first, second, rest[: max(3 + channels, 2 * channels)]

    def send(self, *vectors) -> None:
        """Vectors of all devices, for the pass that comes next."""
        channels = self.layout[1]
        for number, vector in enumerate(vectors):
            self.message[1 + number * channels : 1 + (number + 1) * channels] = vector

    def _run(self, kernel: str, **arguments) -> None:
        launch = self.launches[kernel in ("moments", "gradient_sums")]
        self._ticket += 1
        memory = (self._partials, self._counters, self._tickets, self.message)
        known = {
            **{name: value for name, value in arguments.items() if name != "gamma" or self.has_scale},
            "shape": STRUCTS["Shape"](*self.layout, launch.aligned, launch.images),
            "memory": STRUCTS["BlockMemory"](*map(address_of, memory), self._ticket),
            "slope": self.slope,
        }
        struct = STRUCTS[f"{kernel.title().replace('_', '')}Arguments"]
        fields = {name for name, _ in struct._fields_}
        values = {
            name: address_of(value) if hasattr(value, "dtype") else value
            for name, value in known.items()
            if name in fields and value is not None
        }
        name = f"{kernel}_{'rows' if launch.rows else 'columns'}"
        self.device.launch(name, self.kind, self._tuning, launch.grid, launch.block, struct(**values))
