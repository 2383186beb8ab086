"""The reduction over many processes, in pairs: log₂ P meetings of two in place of P − 1 messages for each.

Of 2^k processes, each meets in round r the one whose position differs in bit r, and both go on with the same: what the
two have, the lower position first. After k rounds all have the same bits. Processes beyond the largest power of two
hand what they bring to one of the others first, and are given the result at the end.

This is recursive doubling (Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in
MPICH", 2005), with the merging of moments as its operation. What comes out differs from the sum in rank order by
rounding only.
"""

from typing import Callable, Sequence

import numpy as np

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
    """
    position = list(members).index(rank)
    core = 1 << (len(members).bit_length() - 1)  # the largest power of two
    if position >= core:
        partner = members[position - core]
        meet("first", vector, partner)
        return meet("last", vector, partner)[0]
    has_guest = position + core < len(members)
    if has_guest:
        vector = combine(meet("first", vector, members[position + core]))
    bit = 1
    while bit < core:
        vector = combine(meet(str(bit), vector, members[position ^ bit]))
        bit *= 2
    if has_guest:
        meet("last", vector, members[position + core])
    return vector
