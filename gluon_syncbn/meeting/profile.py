"""Notes for `gluon_syncbn.profile`: when each device came to a meeting of a layer, and when it went on.

The compiled operator keeps the notes (csrc/meeting/profile.cpp), by the clock of `time.monotonic`. Off, it costs a look
at a flag.
"""

from typing import List, NamedTuple

from gluon_syncbn.base import library


class Pass(NamedTuple):
    """One pass of one layer on one device; times in seconds.

    ``meeting`` and ``round_id`` say with which other passes it met.
    """

    layer: str
    device: str
    direction: str
    meeting: str
    round_id: int
    started: float
    arrived: float
    left: float
    ended: float


def start() -> None:
    """RuntimeError if it is on already, or nothing is compiled."""
    if library.core is None:
        raise RuntimeError(f"gluon_syncbn.profile needs the compiled operator: {library.unavailable_reason}.")
    if not library.core.gluon_syncbn_start_profile():
        raise RuntimeError("gluon_syncbn.profile: another profile is under way; there can be one at a time.")


def is_on() -> bool:
    return library.core is not None and bool(library.core.gluon_syncbn_is_profiling())


def stop() -> List[Pass]:
    """Stop, and return the passes since `start`."""
    return [_pass_of(line) for line in library.core.gluon_syncbn_stop_profile().decode().splitlines()]


def _pass_of(line: str) -> Pass:
    layer, device, direction, meeting, round_id, *times = line.split("\t")
    return Pass(layer, device, direction, meeting, int(round_id), *map(float, times))
