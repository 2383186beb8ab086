"""Which devices take part in synchronization now: everyone, or those that `gluon_syncbn.devices` has named.

A list of devices has a number; 0 is everyone. A forward pass reads the number in force when it *runs*, which is some
time after Python has started it, and hands it to its backward pass. So that it runs under the list that it was started
under, the list changes only while nothing runs: `devices` waits for all pending work on its way in and out.
"""

from typing import Callable, Dict, FrozenSet, List, Optional, Sequence

import mxnet as mx

EVERYONE = 0

_lists: List[Optional[FrozenSet[mx.Context]]] = [None]
_numbers: Dict[FrozenSet[mx.Context], int] = {}
_listeners: List[Callable[[int, Sequence[str]], None]] = []
_current = EVERYONE


def current() -> int:
    """The number of the list in force."""
    return _current


def number_of(devices: Sequence[mx.Context]) -> int:
    """The number of this list of devices; the same for the same devices."""
    members = frozenset(devices)
    if members not in _numbers:
        _lists.append(members)
        _numbers[members] = len(_lists) - 1
    return _numbers[members]


def takes_part(device: mx.Context, number: int) -> bool:
    """Whether ``device`` is in list ``number``."""
    return number == EVERYONE or device in _lists[number]


def change(number: int) -> None:
    """Put list ``number`` in force. No operator may be running."""
    global _current
    _current = number
    names = sorted(str(device) for device in _lists[number] or ())
    for listener in _listeners:
        listener(number, names)


def on_change(listener: Callable[[int, Sequence[str]], None]) -> None:
    """Call ``listener(number, names of its devices)`` at every change."""
    _listeners.append(listener)
