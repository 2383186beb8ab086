"""Which devices take part in synchronization now: everyone, or those that `gluon_syncbn.devices` has named.

A list of devices has a number; 0 is everyone. A forward pass reads the number in force when it *runs*, which is some
time after Python has started it, and hands it to its backward pass. So that it runs under the list that it was started
under, the list changes only while nothing runs: `devices` waits for all pending work on its way in and out.
"""

from typing import Dict, FrozenSet, Iterable, List, Optional

import mxnet as mx

EVERYONE = 0

_lists: List[Optional[FrozenSet[mx.Context]]] = [None]
_numbers: Dict[FrozenSet[mx.Context], int] = {}
_current = EVERYONE


def current() -> int:
    """The number of the list in force."""
    return _current


def number_of(devices: Iterable[mx.Context]) -> int:
    """The number of this list of devices; the same for the same devices."""
    members = frozenset(devices)
    if members not in _numbers:
        _lists.append(members)
        _numbers[members] = len(_lists) - 1
    return _numbers[members]


def is_known(number: float) -> bool:
    """Whether there is such a list; ``number`` may be anything."""
    return number in range(len(_lists))


def takes_part(device: mx.Context, number: int) -> bool:
    """Whether ``device`` is in list ``number``."""
    return number == EVERYONE or device in _lists[number]


def change(number: int) -> None:
    """Put list ``number`` in force in Python; `native.take_part` does in the compiled operator."""
    global _current
    _current = number


def names_of(number: int) -> List[str]:
    """The devices of list ``number``; none for everyone."""
    return sorted(str(device) for device in _lists[number] or ())
