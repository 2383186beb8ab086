"""Where a synchronized layer stands in its net, which is how the processes of a job know it.

Names of Gluon's may differ between processes: they count what was made before. So a layer is known by its position
among the synchronized layers of its net, and a net by its number among those that have trained. What else tells nets
apart is compared (`meeting.processes`). The net is the outermost block that Python is calling when the layer first
trains; the program that does so is the same in all processes. (A graph may have been made before, for prediction, and
in one process only.)
"""

import hashlib
import re
import threading
import weakref
from typing import Callable, Dict, List

from mxnet.gluon import Block

from gluon_syncbn.base.mxnet_private import names_within
from gluon_syncbn.base.walk import all_blocks
from gluon_syncbn.meeting.processes import Place
from gluon_syncbn.step.steps import outermost_block

_nets: "weakref.WeakKeyDictionary[Block, _Net]" = weakref.WeakKeyDictionary()
_lock = threading.Lock()
_count = 0


class _Net:
    def __init__(self, number: int, root: Block, layers: List[Block], describe: Callable[[Block], str]):
        self.name = f"net{number}"
        # Those of a SymbolBlock have numbers of Gluon's in them.
        names = "\n".join(sorted(re.sub(r"\d+", "", name) for name in names_within(root)))
        self.kind = f"{type(root).__name__} ({hashlib.blake2b(names.encode(), digest_size=4).hexdigest()})"
        self.own_name = root.name
        self.described = [describe(layer) for layer in layers]
        self.positions: Dict[int, int] = {id(layer): number for number, layer in enumerate(layers)}
        self._layers = [weakref.ref(layer) for layer in layers]  # an id may be given to another

    def has(self, layer: Block) -> bool:
        position = self.positions.get(id(layer))
        return position is not None and self._layers[position]() is layer


def place_of(layer: Block, describe: Callable[[Block], str]) -> Place:
    """Of a layer that trains for the first time, on the thread that calls it.

    ``describe`` tells of each block of the net what must be the same in all processes; nothing if it does not
    synchronize.
    """
    global _count
    with _lock:
        root = outermost_block() or layer
        if root not in _nets or not _nets[root].has(layer):
            layers = [item for item in all_blocks(root) if describe(item)]
            if layer not in layers:
                root, layers = layer, [layer]
            _nets[root] = _Net(_count, root, layers, describe)
            _count += 1
        net = _nets[root]
        key = f"{net.name}.{net.positions[id(layer)]}"
        return Place(net.name, key, net.kind, net.own_name, net.described, [])
