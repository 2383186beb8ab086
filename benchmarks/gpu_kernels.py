"""Calls the kernels of ``gluon_syncbn/csrc/cuda`` without MXNet, as the operator does: for benchmarks and tests.

`Passes` needs a device that makes arrays and launches kernels: a GPU through CuPy (gpu.py), or a CPU that stands in
for one (tests/stand_in). The operator's own code chooses the grid of each kernel.
"""

import ctypes
import re
import runpy
import sys
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional, Tuple

import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "tests"))
import standalone  # noqa: E402

CSRC = Path(__file__).parents[1] / "gluon_syncbn" / "csrc"
# The package itself cannot be imported where there is no MXNet.
SOURCE = runpy.run_path(str(CSRC.parent / "base" / "cuda_source.py"))["cuda_source"]()
# MXNet's type flags, which are also the source's VALUE_TYPE.
FLAGS = {"float32": 0, "float64": 1, "float16": 2}


def _read_kernels() -> Dict[str, List[Tuple[str, str]]]:
    """By the name of each kernel, type and name of what it takes; of arrays the type is "array".

    They are the lists of arguments.cuh.
    """
    text = (CSRC / "cuda" / "kernels" / "arguments.cuh").read_text(encoding="utf-8").replace("\\\n", " ")
    lists = dict(re.findall(r"#define (\w+)\([A-Z, ]*\) +(.*)", text))

    def arguments_of(name):
        for macro, first, second in re.findall(r"(READ|WRITE|NUMBER)\((\w+), (\w+)\)", expanded(name)):
            yield ("array" if macro in ("READ", "WRITE") else first), second

    def expanded(name):
        return re.sub(r"([A-Z_]{7,})\([A-Z, ]*\)", lambda found: expanded(found[1]), lists[name])

    kernels = re.findall(r"KERNEL\((\w+), \w+, (\w+), \w+\)", lists["KERNELS"])
    found = {
        f"{kernel}_{layout}": list(arguments_of(name)) for kernel, name in kernels for layout in ("rows", "columns")
    }
    return {**found, "fill_nan": list(arguments_of("FILL_NAN_ARGUMENTS"))}


KERNELS = _read_kernels()
REQUEST_NULL, REQUEST_WRITE, REQUEST_ADD = 0, 1, 3
NUMBERS = {"int": ctypes.c_int, "int64": ctypes.c_longlong, "double": ctypes.c_double}
ACTIVATIONS = ("none", "relu", "leaky")  # as the kernels number them


class Tuning(NamedTuple):
    """Other numbers than the operator's; see launch.h."""

    threads: int
    unroll: int
    blocks: int


def options(dtype: str, tuning: Optional[Tuning] = None) -> Tuple[str, ...]:
    """For NVRTC, as the operator passes them."""
    threads, unroll = (tuning.threads, tuning.unroll) if tuning else default_tuning()
    return ("--std=c++11", f"-DVALUE_TYPE={FLAGS[dtype]}", f"-DTHREADS={threads}", f"-DUNROLL={unroll}")


def default_tuning() -> Tuple[int, int]:
    """Threads and unroll that the operator takes."""
    numbers = (ctypes.c_int64 * 2)()
    standalone.library().gluon_syncbn_default_tuning(numbers)
    return tuple(numbers)


class Launch(NamedTuple):
    rows: bool
    aligned: bool
    grid: Tuple[int, int]
    block: Tuple[int, int]
    partials: int
    counters: int


def launch_for(dtype: str, layout: Tuple[int, int, int], *addresses: int, tuning: Optional[Tuning] = None) -> Launch:
    """What the operator would choose for tensors (outer, channels, inner) at these addresses."""
    numbers = (ctypes.c_int64 * 8)()
    sizes = [ctypes.c_int64(size) for size in layout]
    pointers = (ctypes.c_void_p * len(addresses))(*addresses)
    tuned = (ctypes.c_int64 * 3)(*tuning) if tuning else None
    standalone.library().gluon_syncbn_launch_for(FLAGS[dtype], *sizes, pointers, len(addresses), tuned, numbers)
    rows, aligned, *rest = numbers
    return Launch(bool(rows), bool(aligned), tuple(rest[:2]), tuple(rest[2:4]), *rest[4:])


def address_of(array) -> int:
    """Of a NumPy or CuPy array."""
    return array.data.ptr if hasattr(array.data, "ptr") else array.ctypes.data


class Passes:
    """The four passes of one device over tensors of one dtype and one layout (outer, channels, inner).

    Parameters
    ----------
    device
        Has ``tuning``, by default None, ``zeros(size, dtype)`` for memory of the device, ``pinned(size)`` for float64
        numbers that device and host share, ``launch(kernel, dtype, grid, block, arguments)`` and ``synchronize()``.
    tensors
        x, and for the backward passes dy and dx, or other arrays that are aligned as they are.
    activation, slope, in_place
        What stands behind the norm, and whether the backward passes are given y in place of x.
    """

    def __init__(
        self,
        device,
        dtype: str,
        layout,
        *tensors,
        activation="none",
        slope=0.1,
        in_place=False,
        has_scale=True,
        epsilon=1e-5,
        momentum=0.9,
    ):
        self.device, self.dtype, self.layout = device, dtype, layout
        self.activation, self.slope, self.in_place = ACTIVATIONS.index(activation), slope, in_place
        self.has_scale, self.epsilon, self.momentum = has_scale, epsilon, momentum
        self.launch = launch_for(dtype, layout, *(address_of(tensor) for tensor in tensors), tuning=device.tuning)
        self.real = "float64" if dtype == "float64" else "float32"
        self.partials = device.zeros(self.launch.partials, "float64")
        self.counters = device.zeros(self.launch.counters, "int32")
        self.message = device.pinned(4 + 4 * layout[1])
        self.saved = device.zeros(4 * layout[1] + 3, "float64")
        self._no_running = device.zeros(1, self.real), device.zeros(1, self.real)
        self._ticket = 0.0

    def moments(self, x, running=None) -> None:
        """Leave mean and M2 of this device in ``received``, and the ``running`` mean and variance, if there are any."""
        running_mean, running_var = running or self._no_running
        self._run("moments", x=x, running_mean=running_mean, running_var=running_var, wants_running=running is not None)

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
        wants_y=True,
        residual=None,
        renorm=False,
    ) -> None:
        """After ``send(mean, var)`` of all devices, which hold ``count`` values per channel; with ``renorm`` after
        ``send(mean, var, r, d)``."""
        call = {"count": count, "round_id": 7, "active_set": 0}
        vectors = {"gamma": gamma, "beta": beta, "running_mean": running_mean, "running_var": running_var}
        wants = {"training": training, "renorm": renorm, "wants_y": wants_y, "wants_saved": True}
        kernel = "normalize" if residual is None else "normalize_residual"
        self._run(kernel, x=x, y=y, residual=residual, **vectors, **call, **wants)

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

        With y and d_residual it is the pass where there is a residual.
        """
        vectors = {"gamma": gamma, "beta": beta, "d_gamma": d_gamma, "d_beta": d_beta}
        requests = {"gamma_request": gamma_request, "beta_request": beta_request, "residual_request": residual_request}
        kernel = "gradient_sums" if d_residual is None else "gradient_sums_residual"
        self._run(kernel, x=x, dy=dy, y=y, d_residual=d_residual, **vectors, **requests)

    def input_gradient(self, x, dy, dx, gamma, beta, add=False, y=None, is_passed=False) -> None:
        """After ``send(S1, S2)`` of all devices. With y it is the pass with a residual; ``is_passed``
        says that dy has been through the activation already."""
        kernel = "input_gradient" if y is None else "input_gradient_residual"
        activation = ACTIVATIONS.index("none") if is_passed else self.activation
        self._run(kernel, x=x, dy=dy, y=y, dx=dx, gamma=gamma, beta=beta, add=add, activation=activation)

    def received(self) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The two vectors that a pass has left for the host, and what is behind them."""
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
        name = f"{kernel}_{'rows' if self.launch.rows else 'columns'}"
        if ("double", "ticket") in KERNELS[name]:
            self._ticket += 1
        known = {
            **dict(zip(("outer", "channels", "inner"), self.layout)),
            **{"aligned": self.launch.aligned, "ticket": self._ticket, "has_scale": self.has_scale},
            **{"activation": self.activation, "slope": self.slope, "in_place": self.in_place},
            **{"partials": self.partials, "counters": self.counters, "message": self.message, "saved": self.saved},
            **{"epsilon": self.epsilon, "momentum": self.momentum},
            **arguments,
        }
        values = [known[item] if kind == "array" else NUMBERS[kind](known[item]) for kind, item in KERNELS[name]]
        self.device.launch(name, self.dtype, self.launch.grid, self.launch.block, values)
