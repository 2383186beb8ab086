"""The layers of this process that have synchronized. Threads of several devices may add and list them together."""

import threading
import weakref
from typing import Any, List

_layers: "weakref.WeakSet[Any]" = weakref.WeakSet()
_lock = threading.Lock()


def add_live(layer) -> None:
    """``layer`` synchronizes from now on."""
    with _lock:
        _layers.add(layer)


def remove_live(layer) -> None:
    """``layer`` synchronizes no more."""
    with _lock:
        _layers.discard(layer)


def live_layers() -> List:
    """Every layer of this process that has synchronized."""
    with _lock:
        return list(_layers)
