"""Which devices synchronize now: everyone, or those that `gluon_syncbn.devices` has named.

A set of devices has an id; 0 is everyone. A forward pass reads the id in force when it *runs*, which is some time after
Python has started it, and hands it to its backward pass. So that it runs under the set that it was started under, the
set changes only while nothing runs: `gluon_syncbn.devices` waits for all pending work on its way in and out.
"""

from typing import Dict, FrozenSet, Iterable, List, Optional

import mxnet as mx

from gluon_syncbn.base import library

EVERYONE = 0

_sets: List[Optional[FrozenSet[mx.Context]]] = [None]
_ids: Dict[FrozenSet[mx.Context], int] = {}
_current = EVERYONE


def current() -> int:
    """The id of the set in force."""
    return _current


def id_of(devices: Iterable[mx.Context]) -> int:
    """The id of the set of these devices; the same for the same devices."""
    members = frozenset(devices)
    if members not in _ids:
        _sets.append(members)
        _ids[members] = len(_sets) - 1
    return _ids[members]


def is_known(set_id: float) -> bool:
    """Whether there is such a set; ``set_id`` may be anything."""
    return set_id in range(len(_sets))


def includes(device: mx.Context, set_id: int) -> bool:
    """Whether ``device`` is in this set."""
    members = _sets[set_id]
    return members is None or device in members


def use(set_id: int) -> None:
    """Put this set in force, on both back ends. No operator may be running."""
    global _current
    _current = set_id
    if library.core is not None:
        names = sorted(str(device) for device in _sets[set_id] or ())
        library.core.gluon_syncbn_use_active_set(set_id, library.strings(names), len(names))
