"""The position of a synchronized layer in its net, by which the processes of a job know it.

Gluon counts names in each process, so they may differ. A layer is known by its position among the synchronized layers
of its net, and a net by its number among the nets that have trained with these processes. All other differences are
compared (`meeting.processes`). The net is the outermost block that Python is calling when the layer first trains; the
program that does so is the same in all processes. (A graph may have been made before, for prediction, and in one
process only.)
"""

import hashlib
import re
import threading
import weakref
from typing import Callable, MutableMapping, NamedTuple, Sequence, Tuple

from mxnet.gluon import Block

from gluon_syncbn.base.mxnet_private import names_within
from gluon_syncbn.base.walk import all_blocks, outermost_block
from gluon_syncbn.layer.spec import Facts


class Place(NamedTuple):
    """The position of a layer in its net: the same on all processes, although its layers may have other names there.

    ``net`` is what is compared at once, ``key`` names the layer in it, ``kind`` must be the same everywhere, ``name``
    tells it apart from others of its kind, and ``layers`` has the facts of each layer. ``subsets`` are the ranks that
    meet without the others, in this process or another.
    """

    net: str
    key: str
    kind: str
    name: str
    layers: Sequence[Facts]
    subsets: Sequence[Tuple[int, ...]]


class Nets:
    """The nets of this process that have trained with the others of a process group."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # As they first trained, each with its layers.
        self._nets: MutableMapping[Block, MutableMapping[Block, Place]] = weakref.WeakKeyDictionary()
        self._count = 0  # of all nets, also of those that are gone

    def place_of(self, layer: Block, describe: Callable[[Block], Facts]) -> Place:
        """The position of a layer that trains for the first time, on the thread that calls it; without its subsets.

        ``describe`` returns the properties of a block that must be the same in all processes; nothing if the block does
        not synchronize with these processes.
        """
        with self._lock:
            root = outermost_block() or layer
            if root not in self._nets or layer not in self._nets[root]:
                layers = [item for item in all_blocks(root) if describe(item)]
                if layer not in layers:
                    root, layers = layer, [layer]
                # Names in a SymbolBlock have numbers of Gluon's in them.
                names = "\n".join(sorted(re.sub(r"\d+", "", name) for name in names_within(root)))
                kind = f"{type(root).__name__} ({hashlib.blake2b(names.encode(), digest_size=4).hexdigest()})"
                net, described = f"net{self._count}", [describe(item) for item in layers]
                places = [Place(net, f"{net}.{i}", kind, root.name, described, []) for i in range(len(layers))]
                self._nets[root] = weakref.WeakKeyDictionary(zip(layers, places))
                self._count += 1
            return self._nets[root][layer]
