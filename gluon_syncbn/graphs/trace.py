"""Finds the graph that Gluon is making now.

Gluon calls the blocks of a hybridized net with symbols, and gives them no information about the net. What a layer must
know is looked up on the stack: which block owns the graph, the inputs, and whether the graph is static.
"""

import sys
from types import FrameType
from typing import Any, Dict, List, NamedTuple, Optional

import mxnet as mx
from mxnet.gluon import HybridBlock

from gluon_syncbn.base.mxnet_private import flatten, has_partitioner, is_making_graph, is_static, owner_of_graph


class Trace(NamedTuple):
    """A graph of Gluon's that is being made: of which net, its inputs, what it is called with, and of which kind."""

    net: Optional[HybridBlock]
    inputs: List[mx.sym.Symbol]
    arguments: tuple
    is_static: bool

    @property
    def is_partitioned(self) -> bool:
        """Whether MXNet takes the graph apart when it is made, and removes what it holds for superfluous."""
        return self.net is not None and has_partitioner(self.net)

    @property
    def symbol(self) -> mx.sym.Symbol:
        """The first input. It names the graph, since each has new ones."""
        return self.inputs[0]

    def dtypes(self) -> Dict[str, Any]:
        """The dtypes of the inputs, by name."""
        given = [item for item in flatten(self.arguments, "input")[0] if item is not None]
        return {symbol.name: item.dtype for symbol, item in zip(self.inputs, given)}


def find_trace() -> Optional[Trace]:
    """The graph that is being made now; None if a user calls blocks with symbols.

    It is static if it is for ``static_alloc`` and ``static_shape``. The flags that count are those of the block that
    owns the graph, and its children do not have them. They may have other flags of their own, and what is safe in a
    static graph is not in another, so the owner is looked up on the stack. A trace that does not come from a hybridized
    block's first call counts as not static, which is always safe.
    """
    frame: Optional[FrameType] = sys._getframe()
    maker, owner = None, None
    while frame is not None and owner is None:
        if is_making_graph(frame):
            maker = frame.f_locals
        owner = owner_of_graph(frame)
        frame = frame.f_back
    if maker is None:
        return None
    return Trace(owner, maker["symbol_inputs"], maker["args"], owner is not None and is_static(owner))
