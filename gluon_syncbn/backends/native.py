"""The native back end: one compiled operator for moments, rendezvous, normalization and the whole backward pass.

The operator lives in ``csrc/`` (`gluon_syncbn.base.library`). MXNet sees a custom operator whose callbacks happen to be
compiled, so no Python runs in a training step. On a GPU the operator calls the kernels of ``csrc/cuda/kernels.cu``,
which MXNet's run-time compiler makes, without a CUDA toolkit.

On CPU a graph has an operator before it and one after it (its border), both because of MXNet. A custom operator runs
asynchronously. Where an input is in a layout of oneDNN's (the output of a convolution, or its gradient), MXNet converts
it into a copy that can die before the operator has read it: rare crashes and wrong numbers. Hence ``x`` on the way
forward, and the gradient of ``out`` on the way back, first pass an operator that leaves a dense array of its own. It is
a slice of the whole, which costs one more pass and never works in place. Operators that do work in place (a product
with 1, a cast to the same type) left garbage in hybridized graphs without ``static_alloc``.

In a graph with ``static_alloc`` and ``static_shape`` MXNet keeps those copies, except next to an input or output of the
graph. There ``reshape`` makes x dense in one pass, and ``identity`` costs nothing but keeps the operator away from the
graph's outputs. Graphs of GPUs alone, where arrays are always dense, have this pair, too, since it costs nothing there.
A partitioner would take ``identity`` out, so its graphs have slices. Imperative calls on a GPU need no border.
"""

import ctypes
import functools
import logging
import os
import threading
import warnings
import weakref
from typing import Dict, List, Optional, Sequence

import mxnet as mx

from gluon_syncbn.backends.interface import Backend, LayerGroup, groups
from gluon_syncbn.base import library
from gluon_syncbn.base.cuda_source import cuda_source
from gluon_syncbn.graphs.fuse import OPERATOR
from gluon_syncbn.graphs.graph import Entry, Node
from gluon_syncbn.layer.spec import LayerSpec
from gluon_syncbn.meeting.link import Link, link_of
from gluon_syncbn.meeting.waiting import usual_reasons

# The operators before and after the layer, with their attributes.
_SLICE = "slice_axis", {"axis": "0", "begin": "0", "end": "None"}
_BORDERS = {"copies": (_SLICE, _SLICE), "no copies": (("Reshape", {"shape": "(-2,)"}), ("_copy", {}))}
_DTYPE_FLAGS = {"float32": 0, "float64": 1}
_ALL = 2**31 - 1  # devices in a group
_log = logging.getLogger("gluon_syncbn")


class _CompiledGroup:
    """A compiled group in Python: its layer, and its link to other processes."""

    def __init__(self, spec: LayerSpec):
        self.spec = spec
        self._links: List[Optional[Link]] = []  # one when it is connected; None if there is no other process
        self._lock = threading.Lock()

    def link(self) -> Optional[Link]:
        """Connect the group, the first time."""
        with self._lock:
            if not self._links:
                self._links.append(link_of(self.spec))
            return self._links[0]


def _leaving_errors(function):
    """Leave the text of an error, never an empty one, for the core, and return -1.

    ctypes would print it, and return 0, also for SystemExit and KeyboardInterrupt.
    """

    @functools.wraps(function)
    def call(*arguments) -> int:
        try:
            return function(*arguments)
        except BaseException as problem:
            text = str(problem) if isinstance(problem, Exception) else ""
            library.set_last_error(text or repr(problem))
            return -1

    return call


@_leaving_errors
def _make_described_group(text: bytes) -> int:
    """Make the group of a symbol. Called by the operator, on the thread that makes or loads the symbol."""
    group_id = groups.next_id()
    _make_group(group_id, LayerSpec.from_json(text.decode()), None)
    return group_id


@functools.lru_cache(maxsize=None)
def _try_engine() -> None:
    """Find out whether passes can go on in MXNet's engine without a thread that waits (csrc/mxnet/pass.h)."""
    if os.environ.get("MXNET_ENGINE_TYPE") == "NaiveEngine":
        return  # it runs each operation at once, on the thread that pushes it
    if not library.core.gluon_syncbn_try_engine():
        _log.info("MXNet's engine completes no operations of others: passes on CPU devices wait in their callbacks.")


def _make_group(group_id: int, spec: LayerSpec, devices: Optional[Sequence[mx.Context]]) -> None:
    """Have the operator make a group; without ``devices`` it is open to any."""
    _try_engine()
    groups.compiled[group_id] = _CompiledGroup(spec)
    library.core.gluon_syncbn_make_group(
        group_id,
        None if devices is None else library.strings([str(device) for device in devices]),
        usual_reasons().encode(),
        # GroupSpec of csrc/meeting/group.h, which explains the fields.
        spec.name.encode(),
        spec.num_devices or 0,
        spec.group_size or _ALL,
        spec.seconds,
        spec.momentum,
        spec.epsilon,
        spec.scale,
        _DTYPE_FLAGS[spec.dtype],
        *(spec.renorm or (1, 0)),  # with these limits it is Batch Normalization
    )


@_leaving_errors
def _connect(group_id: int, answer) -> int:
    """Connect a group, and answer with the four numbers of its link. Called once, by the first pass that trains."""
    link = groups.compiled[group_id].link()
    found = (1, 0, 0, 0) if link is None else (link.size, link.first_device, link.seconds, link.processes_id)
    for place, number in enumerate(found):
        answer[place] = number
    return 0


@_leaving_errors
def _prepare(group_id: int, chunk: int, set_id: int, key, ranks) -> int:
    """Fill in the key and the ``ranks`` of a subgroup, and return how many. Called by a thread that may wait."""
    link = groups.compiled[group_id].link()
    assert link is not None
    key[0], members = link.prepare(chunk, set_id)
    for place, rank in enumerate(members):
        ranks[place] = rank
    return len(members)


def _warn(text: bytes) -> None:
    warnings.warn(text.decode(), stacklevel=1)


def _drop(group_id: int) -> None:
    groups.compiled.pop(group_id, None)


_CALLBACKS = library.PythonFunctions(_make_described_group, _connect, _prepare, _drop, _warn)


def _register() -> str:
    """Make the operator known to MXNet; returns the reason if it cannot be used, or an empty text."""
    if library.core is None:
        return library.unavailable_reason
    library.core.gluon_syncbn_use_python(_CALLBACKS)
    refused = library.core.gluon_syncbn_register(cuda_source().encode())
    return "MXNet refused to register the operator" if refused else ""


UNAVAILABLE_REASON = _register()


def instruction_set() -> str:
    """The instruction set of the kernels: 'avx512', 'avx2' or 'baseline'; 'not compiled' without the library.

    The environment variable ``GLUON_SYNCBN_MAX_CPU_ISA`` holds them to an older one than the processor's best.
    ValueError if it is none of the three.
    """
    if library.core is None:
        return "not compiled"
    problem = ctypes.c_char_p()
    chosen = library.core.gluon_syncbn_instruction_set(ctypes.byref(problem))
    if problem.value:
        raise ValueError(problem.value.decode())
    return chosen.decode()


@functools.lru_cache(maxsize=None)
def unavailable_reason_on_gpu(device: int) -> str:
    """Why the kernels cannot run on ``mx.gpu(device)``; empty if they can. The first call compiles and tries them."""
    return library.core.gluon_syncbn_check_gpu(device).decode()


class NativeGroup(LayerGroup):
    """The group of a layer in the compiled core. Graphs name it by its id."""

    def __init__(self, spec: LayerSpec, devices: Sequence[mx.Context]):
        super().__init__(spec, devices)
        _make_group(self.id, spec, self.devices)
        weakref.finalize(self, library.core.gluon_syncbn_drop_group, self.id).atexit = False

    def connect(self) -> Optional[Link]:
        self.link = groups.compiled[self.id].link()
        return self.link

    def set_limits(self, limits):
        groups.compiled[self.id].spec = groups.compiled[self.id].spec.but(renorm=limits)
        library.core.gluon_syncbn_set_limits(self.id, *limits)


class NativeBackend(Backend):
    name = "native"
    group = NativeGroup

    def unavailable_reason(self, spec, devices) -> str:
        if UNAVAILABLE_REASON:
            return f"the compiled operator is not available: {UNAVAILABLE_REASON}"
        if spec.kvstore is not None:
            return "a kvstore was given, and only the portable back end uses one"
        for device in _gpus(devices):
            problem = unavailable_reason_on_gpu(device.device_id)
            if problem:
                return (
                    f"the CUDA kernels cannot run on {device}: {problem.rstrip()} (The portable back end needs "
                    "MXNet's own kernels, which its wheels have for compute capability 8.9 and older)"
                )
        return ""

    def description(self, devices) -> str:
        gpus = ", ".join(map(str, _gpus(devices)))
        on_cpu = [] if _are_gpus(devices) else [instruction_set()]
        return "compiled kernels, " + " and ".join([*on_cpu, *([f"CUDA on {gpus}"] if gpus else [])])

    def normalize(self, arrays, spec, group, devices):
        x, gamma, beta, running_mean, running_var = arrays
        is_on_gpu = x.context.device_type == "gpu"
        out = mx.nd.Custom(
            *[x if is_on_gpu else _dense_copy(x), gamma, beta, running_mean, running_var],
            **_attributes(spec, group, spec.activation),
            name="fwd_sync",
        )[0]
        return out if is_on_gpu else _dense_copy(out)

    def nodes(self, norm, spec, group, devices, kind, dtype, after):
        needs_copies = kind.is_partitioned or not (kind.is_static or _are_gpus(devices))
        (before, before_attrs), (behind, behind_attrs) = _BORDERS["copies" if needs_copies else "no copies"]
        x, gamma, beta, *statistics = norm.inputs
        dense = Entry(Node(before, f"{norm.name}_dense", before_attrs, [x]))
        order = [] if after is None else [Entry(Node("BlockGrad", f"{norm.name}_after", {}, [after]))]
        attributes = _attributes(spec, group, norm.activation, follows=bool(order))
        custom = Node("Custom", f"{norm.name}_sync", attributes, [dense, gamma, beta, *order, *statistics])
        return Entry(Node(behind, norm.name, {**behind_attrs, **norm.hidden}, [Entry(custom)])), Entry(custom, 1)


def _attributes(spec: LayerSpec, group: str, activation: Optional[str], follows: bool = False) -> Dict[str, str]:
    """Attributes of the operator. It ``follows`` another call, whose order token is its last input but two."""
    return {
        "op_type": OPERATOR,
        "group": group,
        "axis": str(spec.axis),
        "activation": activation or "none",
        "in_place": str(int(spec.in_place)),
        "follows": str(int(follows)),
    }


def _gpus(devices: Sequence[mx.Context]) -> List[mx.Context]:
    return [device for device in devices if device.device_type == "gpu"]


def _are_gpus(devices: Sequence[mx.Context]) -> bool:
    """Whether all are known, and are GPUs."""
    return bool(devices) and len(_gpus(devices)) == len(devices)


def _dense_copy(x: mx.nd.NDArray) -> mx.nd.NDArray:
    return mx.nd.slice_axis(x, axis=0, begin=0, end=None)
