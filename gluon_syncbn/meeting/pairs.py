"""The reduction over many processes, in pairs: log₂ P meetings of two in place of P − 1 messages for each.

Of 2^k processes, each meets in round r the one whose position differs in bit r, and both go on with the same: what the
two have, the lower position first. After k rounds all have the same bits. Processes beyond the largest power of two
hand what they bring to one of the others first, and are given the result at the end.

This is recursive doubling (Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in
MPICH", 2005), with the merging of moments as its operation. What comes out differs from the sum in rank order by
rounding only.
"""

from typing import Callable, List, Sequence, Tuple

import numpy as np

from gluon_syncbn.distributed.process_group import MissingProcesses

# Of two rows to one vector, and what two processes bring to each other under a key.
Combine = Callable[[np.ndarray], np.ndarray]
Meet = Callable[[str, np.ndarray, int], np.ndarray]
# Asked where a partner does not come: the positions that are known to have come, and all whose absence may be why.
Known = Callable[[], Tuple[List[int], List[int]]]


def reduce_in_pairs(vector: np.ndarray, rank: int, members: Sequence[int], combine: Combine, meet: Meet) -> np.ndarray:
    """Combine what all members bring; the same bits for all.

    Parameters
    ----------
    vector : np.ndarray
        What this process brings, of shape (n,).
    rank : int
        Of this process.
    members : sequence of int
        Ranks, in the same order for all.
    combine : callable
        ``combine(rows)`` of an array of shape (2, n).
    meet : callable
        ``meet(key, vector, partner)`` returns the rows of both, that of the lower position first.

    Raises
    ------
    MissingProcesses
        A partner did not come. It may wait for others itself: the error has who is known to have come, and all whose
        absence may be the reason.
    """
    size = len(members)
    position = list(members).index(rank)
    core = 1 << (size.bit_length() - 1)  # the largest power of two

    def meet_at(key: str, partner: int, known: Known) -> np.ndarray:
        try:
            return meet(key, vector, members[partner])
        except MissingProcesses as problem:
            arrived, suspects = ([members[item] for item in items] for items in known())
            raise MissingProcesses(problem.waited, arrived, suspects) from None

    def all_but(one: int) -> List[int]:
        return [item for item in range(size) if item != one]

    def behind(first: int, bit: int) -> List[int]:
        """Whose vectors a process of the core has before the round of this bit: positions of the core and of guests."""
        block = range(first // bit * bit, (first // bit + 1) * bit)
        return [start + item for start in (0, core) for item in block if start + item < size]

    def meet_in_round(bit: int) -> np.ndarray:
        partner = position ^ bit
        return meet_at(str(bit), partner, lambda: (behind(position, bit), behind(partner, bit)))

    if position >= core:
        host = position - core
        meet_at("first", host, lambda: ([position], [host]))
        return meet_at("last", host, lambda: ([position], all_but(position)))[0]
    guest = position + core
    if guest < size:
        vector = combine(meet_at("first", guest, lambda: ([position], [guest])))
    bit = 1
    while bit < core:
        vector = combine(meet_in_round(bit))
        bit *= 2
    if guest < size:
        meet_at("last", guest, lambda: (all_but(guest), [guest]))
    return vector
