"""The compiled core (``csrc/``) and MXNet's own library, as Python calls them.

The core uses no Python ABI and does not link to MXNet: Python passes it the libmxnet that it has loaded. Where it is
missing, `core` is None, `unavailable_reason` says why, and everything runs on the portable back end.
"""

import ctypes
import functools
import hashlib
from ctypes import POINTER, c_char_p, c_double, c_int, c_int64, c_uint64, c_void_p
from pathlib import Path
from typing import Any, Sequence

from mxnet.base import _LIB as LIBMXNET
from mxnet.base import check_call

__all__ = ["LIBMXNET", "check_call"]

LIBRARY = Path(__file__).parents[1] / "libgluon_syncbn.so"

_NUMBERS = POINTER(c_double)
_STRINGS, _HANDLES, _INTEGERS = POINTER(c_char_p), POINTER(c_void_p), POINTER(c_int)
_LIMITS = c_double, c_double  # of Batch Renormalization


class PythonFunctions(ctypes.Structure):
    """The functions that the core calls, as long as the struct lives (csrc/mxnet/python.h)."""

    _fields_ = [
        ("make_group", ctypes.CFUNCTYPE(c_int64, c_char_p)),
        ("connect", ctypes.CFUNCTYPE(c_int, c_int64, _NUMBERS)),
        ("prepare", ctypes.CFUNCTYPE(c_int, c_int64, c_int64, c_int64, POINTER(c_int64), POINTER(c_int))),
        ("drop", ctypes.CFUNCTYPE(None, c_int64)),
        ("warn", ctypes.CFUNCTYPE(None, c_char_p)),
    ]

    def __init__(self, *functions):
        super().__init__(*(kind(function) for (_, kind), function in zip(self._fields_, functions)))


class Task(ctypes.Structure):
    """The next task of the thread that carries messages (csrc/processes/all.cpp)."""

    NOTHING, SEND, ASK_WHO_CAME, ABANDON, END = range(5)
    _fields_ = [
        ("what", c_int),
        ("kind", c_int64),
        ("key", c_int64),
        ("round_id", c_int64),
        ("numbers", _NUMBERS),
        ("num_numbers", c_int64),
        ("ranks", _INTEGERS),
        ("num_ranks", c_int64),
        ("text", c_char_p),
    ]


class State(ctypes.Structure):
    """Where processes stand with each other (csrc/processes/processes.h)."""

    _fields_ = [
        ("is_resuming", c_int),
        ("shares_memory", c_int),
        ("has_lost_some", c_int),
        ("open_tasks", c_int),
        ("seconds_failed", c_double),
        ("epoch", c_int64),
    ]


# The types of each function's result and arguments, by its name without the prefix ``gluon_syncbn_``.
_PROTOTYPES = {
    "connect": (c_int, [c_void_p]),
    "separate_cpu_devices": (c_char_p, [c_void_p, c_int]),
    "open_step": (None, []),
    "close_step": (None, []),
    "new_graph": (c_void_p, []),
    "drop_graph": (None, [c_void_p]),
    "begin_call": (c_uint64, [c_void_p, c_int]),
    "end_call": (None, [c_uint64]),
    "use_python": (None, [POINTER(PythonFunctions)]),
    "register": (c_int, [c_char_p]),
    "make_group": (None, [c_int64, _STRINGS, *[c_char_p] * 2, *[c_int] * 2, *[c_double] * 3, *[c_int] * 2, *_LIMITS]),
    "drop_group": (None, [c_int64]),
    "set_limits": (None, [c_int64, *_LIMITS]),
    "use_active_set": (None, [c_int64, _STRINGS, c_int]),
    "check_gpu": (c_char_p, [c_int]),
    "watch": (c_int, [_HANDLES, c_int, _HANDLES, c_int, c_int, c_int, c_char_p]),
    "is_readable": (c_int, [c_void_p]),
    "gate": (c_int, [_HANDLES, _INTEGERS, _INTEGERS, c_int, c_char_p, c_char_p, POINTER(c_int64)]),
    "seal": (c_int, [_HANDLES, c_int, c_int]),
    "reserve": (c_int, [c_int, c_char_p]),
    "gate_has_opened": (c_int, [c_int64]),
    "forget_gates": (None, []),
    "poison": (c_int, [c_void_p, c_char_p]),
    "fail_step": (None, [c_char_p]),
    "fail_step_by_reading": (None, [c_char_p]),
    "step_is_by_reading": (c_int, []),
    "step_failure": (c_char_p, []),
    "step_failed_at": (c_double, []),
    "step_generation": (c_int64, []),
    "reset_step": (None, []),
    "wrap_python_operator": (c_int, [c_char_p, c_char_p, c_void_p]),
    "leave_error": (None, [c_char_p]),
    "stop_calling_python": (None, []),
    "set_waiting_times": (None, [c_double, c_double]),
    "cut_waits_short": (None, [c_char_p, c_double, c_double]),
    "wait_for_exchanges": (None, [c_double]),
    "make_processes": (c_int64, [c_int, c_int, c_char_p, c_int]),
    "next_task": (None, [c_int64, c_double, c_int, POINTER(Task)]),
    "receive": (None, [c_int64, c_int, c_int64, c_int64, c_int64, _NUMBERS, c_int64]),
    "hear_who_came": (None, [c_int64, c_int64, c_int64, _INTEGERS, c_int]),
    "lose_transport": (None, [c_int64, c_char_p]),
    "end_processes": (None, [c_int64, c_char_p]),
    "exchange": (c_char_p, [c_int64, c_char_p, c_int64, c_double, _NUMBERS, c_int64, _NUMBERS]),
    "time_exchanges": (c_char_p, [c_int64, c_int64, c_int64, c_int, _NUMBERS]),
    "fail_processes": (None, [c_int64, c_char_p]),
    "failure_of_processes": (c_char_p, [c_int64]),
    "state_of_processes": (None, [c_int64, POINTER(State)]),
    "abandon": (c_char_p, [c_int64, c_int, c_int64]),
    "resume": (c_char_p, [c_int64, c_char_p, c_double]),
    "leave": (None, [c_int64, c_double]),
    "name_processes": (None, [c_int64, _STRINGS, c_int]),
    "offer_memory": (c_char_p, [c_int64, c_int, POINTER(c_char_p)]),
    "join_memory": (c_char_p, [c_int64, c_char_p, POINTER(c_int), c_int]),
    "use_memory": (None, [c_int64, c_int]),
    "before_fork": (None, []),
    "after_fork": (None, [c_int]),
    "try_engine": (c_int, []),
    "begin_watch": (None, []),
    "renew_watch": (None, []),
    "end_watch": (None, []),
    "signalled_at": (c_double, []),
    "instruction_set": (c_char_p, [POINTER(c_char_p)]),
    "start_profile": (c_int, []),
    "is_profiling": (c_int, []),
    "stop_profile": (c_char_p, []),
}


def _load() -> ctypes.CDLL:
    if not LIBRARY.exists():
        raise OSError("it was not compiled when the package was installed (pip install needs a C++17 compiler)")
    library = ctypes.CDLL(str(LIBRARY))
    for name, (result, arguments) in _PROTOTYPES.items():
        function = getattr(library, f"gluon_syncbn_{name}")
        function.restype, function.argtypes = result, arguments
    if library.gluon_syncbn_connect(LIBMXNET._handle) != 0:
        raise OSError("this MXNet lacks a function of its C interface")
    return library


core: Any = None  # a ctypes.CDLL
unavailable_reason = ""
try:
    core = _load()
except (OSError, AttributeError) as problem:  # not there, or older than this file
    unavailable_reason = str(problem)


@functools.lru_cache(maxsize=None)
def build() -> str:
    """Return a text that is another for each build of the compiled core."""
    return f"build {hashlib.blake2b(LIBRARY.read_bytes(), digest_size=4).hexdigest()}"


def strings(texts: Sequence[str]):
    return (c_char_p * len(texts))(*(text.encode() for text in texts))


def integers(values: Sequence[int]):
    return (c_int * len(values))(*values)


def numbers(array):
    """The numbers of a float64 array as ``const double*``; keep the array alive while the core reads them."""
    return array.ctypes.data_as(_NUMBERS)


def set_last_error(text: str) -> None:
    """Set the text of the error with which this thread's callback ends."""
    if core is not None:
        core.gluon_syncbn_leave_error(text.encode(errors="replace"))
