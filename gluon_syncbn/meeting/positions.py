"""The position of a synchronized layer in its net, by which the processes of a job know it.

Names of Gluon's may differ between processes: they count what was made before. So a layer is known by its position
among the synchronized layers of its net, and a net by its number among those that have trained. What else nets differ
in is compared (`meeting.processes`). The net is the outermost block that Python is calling when the layer first trains;
the program that does so is the same in all processes. (A graph may have been made before, for prediction, and in one
process only.)
"""

import hashlib
import re
import threading
import weakref
from typing import Callable, Dict, List

from mxnet.gluon import Block

from gluon_syncbn.base.mxnet_private import names_within
from gluon_syncbn.base.walk import all_blocks, outermost_block


class Net:
    """A net as it was when it first trained with other processes."""

    def __init__(self, number: int, root: Block, layers: List[Block], describe: Callable[[Block], str]):
        self.name = f"net{number}"
        # Those of a SymbolBlock have numbers of Gluon's in them.
        names = "\n".join(sorted(re.sub(r"\d+", "", name) for name in names_within(root)))
        self.kind = f"{type(root).__name__} ({hashlib.blake2b(names.encode(), digest_size=4).hexdigest()})"
        self.own_name = root.name
        self.described = [describe(layer) for layer in layers]
        self._positions: Dict[int, int] = {id(layer): number for number, layer in enumerate(layers)}
        self._layers = [weakref.ref(layer) for layer in layers]  # an id may be given to another

    def has(self, layer: Block) -> bool:
        position = self._positions.get(id(layer))
        return position is not None and self._layers[position]() is layer

    def key_of(self, layer: Block) -> str:
        """The name of one of its layers: the same in all processes."""
        return f"{self.name}.{self._positions[id(layer)]}"


class Nets:
    """The nets of this process that have trained with others."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._nets: weakref.WeakKeyDictionary[Block, Net] = weakref.WeakKeyDictionary()
        self._count = 0  # of all that ever were

    def net_of(self, layer: Block, describe: Callable[[Block], str]) -> Net:
        """The net of a layer that trains for the first time, on the thread that calls it.

        ``describe`` returns of each block of the net what must be the same in all processes; nothing if it does not
        synchronize.
        """
        with self._lock:
            root = outermost_block() or layer
            if root not in self._nets or not self._nets[root].has(layer):
                layers = [item for item in all_blocks(root) if describe(item)]
                if layer not in layers:
                    root, layers = layer, [layer]
                self._nets[root] = Net(self._count, root, layers, describe)
                self._count += 1
            return self._nets[root]
