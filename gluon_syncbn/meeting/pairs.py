"""The reduction over many processes, in pairs: log₂ P meetings of two in place of P − 1 messages for each.

Of 2^k processes, each meets in round r the one whose position differs in bit r, and both go on with the same: what the
two have, the lower position first. After k rounds all have the same bits. Processes beyond the largest power of two
hand what they bring to one of the others first, and are given the result at the end.

This is recursive doubling (Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in
MPICH", 2005), with the merging of moments as its operation. What comes out differs from the sum in rank order by
rounding only.
"""

from typing import Callable, Iterable, List, Sequence

import numpy as np

from gluon_syncbn.distributed.process_group import MissingProcesses

# Of two rows to one vector, and what two processes bring to each other under a key.
Combine = Callable[[np.ndarray], np.ndarray]
Meet = Callable[[str, np.ndarray, int], np.ndarray]


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

    def meet_at(key: str, partner: int, arrived: Iterable[int], suspects: Iterable[int]) -> np.ndarray:
        try:
            return meet(key, vector, members[partner])
        except MissingProcesses as problem:
            ranks = ([members[item] for item in items] for items in (arrived, suspects))
            raise MissingProcesses(problem.waited, *ranks) from None

    def behind(first: int, bit: int) -> List[int]:
        """Whose vectors a process of the core has before the round of this bit: positions of the core and of guests."""
        block = range(first // bit * bit, first // bit * bit + bit)
        return [item for start in (0, core) for item in range(start + block.start, min(start + block.stop, size))]

    others = [item for item in range(size) if item != position]
    if position >= core:
        partner = position - core
        meet_at("first", partner, [position], [partner])
        return meet_at("last", partner, [position], others)[0]
    guest = position + core
    if guest < size:
        vector = combine(meet_at("first", guest, [position], [guest]))
    bit = 1
    while bit < core:
        partner = position ^ bit
        vector = combine(meet_at(str(bit), partner, behind(position, bit), behind(partner, bit)))
        bit *= 2
    if guest < size:
        meet_at("last", guest, set(range(size)) - {guest}, [guest])
    return vector
