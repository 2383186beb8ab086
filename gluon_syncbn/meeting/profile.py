"""When each device came to a meeting of a layer, and when it went on: what `gluon_syncbn.profile` shows.

The compiled operator keeps its own notes (csrc/meeting/profile.cpp), by the same clock. Off, it costs a look at a flag.
"""

import threading
from typing import Any, List, NamedTuple, Optional

from gluon_syncbn.base import library


class Pass(NamedTuple):
    """One pass of one layer on one device; times in seconds of ``time.monotonic()``.

    ``place`` and ``round_id`` say with which other passes it met. ``started`` and ``ended`` are None where what the
    layer computes before and behind the meeting is MXNet's own.
    """

    layer: str
    device: str
    direction: str
    place: Any
    round_id: int
    started: Optional[float]
    arrived: float
    left: float
    ended: Optional[float]


_lock = threading.Lock()
_passes: List[Pass] = []
_is_on = False


def is_on() -> bool:
    return _is_on


def note(seen: Pass) -> None:
    """Keep it, if the profile is on."""
    with _lock:
        if _is_on:
            _passes.append(seen)


def start() -> None:
    """RuntimeError if it is on already."""
    global _is_on
    with _lock:
        if _is_on:
            raise RuntimeError("gluon_syncbn.profile: another profile is under way; there can be one at a time.")
        _is_on = True
        _passes.clear()
    if library.core is not None:
        library.core.gluon_syncbn_start_profile()


def stop() -> List[Pass]:
    """What was seen since `start`."""
    global _is_on
    with _lock:
        _is_on = False
        seen = list(_passes)
        _passes.clear()
    if library.core is not None:
        seen += map(_pass_of, library.core.gluon_syncbn_stop_profile().decode().splitlines())
    return seen


def _pass_of(line: str) -> Pass:
    layer, device, direction, place, round_id, *times = line.split("\t")
    return Pass(layer, device, direction, place, int(round_id), *map(float, times))
