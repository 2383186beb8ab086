"""The blocks of a net and their calls, the net that is being called, and the user's line that calls it."""

import contextlib
import sys
from types import FrameType
from typing import Callable, Iterator, List, Optional, Tuple

from mxnet.gluon import Block


def all_blocks(root: Block) -> List[Block]:
    """Every block that can be reached from ``root``, once."""
    if not isinstance(root, Block):
        raise TypeError(f"expected a Gluon block, not {type(root).__name__}.")
    found, waiting = {}, [root]
    while waiting:
        block = waiting.pop()
        if id(block) not in found:
            found[id(block)] = block
            waiting.extend(reversed(list(blocks_in(vars(block), set()))))
            if hasattr(block, "layers_of_nodes"):  # a `SynchronizedSymbolBlock`
                waiting.extend(block.layers_of_nodes())
    return list(found.values())


def blocks_in(value, seen: set) -> Iterator[Block]:
    """The blocks in the value of an attribute: itself, or in nested lists, tuples, sets and dicts."""
    if isinstance(value, Block):
        yield value
    elif isinstance(value, (list, tuple, set, frozenset, dict)) and id(value) not in seen:
        seen.add(id(value))
        for item in value.values() if isinstance(value, dict) else value:
            yield from blocks_in(item, seen)


def outermost_block() -> Optional[Block]:
    """The outermost block that this thread is calling now."""
    frame: Optional[FrameType] = sys._getframe()
    found = None
    while frame is not None:
        if frame.f_code is Block.__call__.__code__:
            found = frame
        frame = frame.f_back
    return None if found is None else found.f_locals["self"]


@contextlib.contextmanager
def watching_calls(blocks: List[Block], watch: Callable[[Block, Tuple], None]) -> Iterator[None]:
    """Call ``watch(block, inputs)`` before each call of these blocks, within the ``with`` block."""
    handles = [block.register_forward_pre_hook(watch) for block in blocks]
    try:
        yield
    finally:
        for handle in handles:
            handle.detach()


def users_line() -> int:
    """The ``stacklevel`` for `warnings.warn` that shows the user's own line, for the function that calls this one."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("gluon_syncbn", "mxnet"):
        level, frame = level + 1, frame.f_back
    return level
