"""Which devices synchronize now: everyone, or those that `gluon_syncbn.devices` has named.

In a job of several processes a set also says which processes have devices in it. A set of devices has an id; 0 is
everyone. A forward pass reads the id in force when it *runs*, which is some time after Python has started it, and hands
it to its backward pass. So that it runs under the set that it was started under, the set changes only while nothing
runs: `gluon_syncbn.devices` waits for all pending work on its way in and out.
"""

from typing import Dict, FrozenSet, Iterable, List, Mapping, Optional, Sequence, Tuple

import mxnet as mx

from gluon_syncbn.base import library
from gluon_syncbn.distributed.process_group import ProcessGroup

EVERYONE = 0

_Ranks = FrozenSet[Tuple[ProcessGroup, Tuple[int, ...]]]
_sets: List[Optional[FrozenSet[mx.Context]]] = [None]
_ranks: List[Dict[ProcessGroup, Tuple[int, ...]]] = [{}]
_ids: Dict[Tuple[FrozenSet[mx.Context], _Ranks], int] = {}
_current = EVERYONE
_changes = 0


def current() -> int:
    """The id of the set in force."""
    return _current


def changes() -> int:
    """How often another set has been put in force."""
    return _changes


def id_of(devices: Iterable[mx.Context], ranks: Mapping[ProcessGroup, Sequence[int]]) -> int:
    """The id of the set of these devices, with these processes of each group; the same for the same."""
    members = frozenset(devices)
    key = members, frozenset((group, tuple(some)) for group, some in ranks.items())
    if key not in _ids:
        _sets.append(members)
        _ranks.append(dict(key[1]))
        _ids[key] = len(_sets) - 1
    return _ids[key]


def active_ranks(group: ProcessGroup, set_id: int, members: Sequence[int]) -> Sequence[int]:
    """Those of ``members`` that have devices in this set."""
    chosen = _ranks[set_id].get(group)
    return members if chosen is None else [rank for rank in members if rank in chosen]


def includes(device: mx.Context, set_id: int) -> bool:
    """Whether ``device`` is in this set."""
    members = _sets[set_id]
    return members is None or device in members


def use(set_id: int) -> None:
    """Put this set in force, on both back ends. No operator may be running."""
    global _current, _changes
    _current = set_id
    _changes += 1
    if library.core is not None:
        names = sorted(str(device) for device in _sets[set_id] or ())
        library.core.gluon_syncbn_use_active_set(set_id, library.strings(names), len(names))
