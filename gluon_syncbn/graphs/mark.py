"""The mark of a synchronized layer in a graph: a hidden attribute of its last node.

It tells what the layer is, so that it can be found, replaced by a plain BatchNorm, or made anew for another number of
devices.
"""

import json
from typing import Any, Dict

import mxnet as mx

from gluon_syncbn.meeting.spec import GroupSpec

MARK = "__syncbn__"


def mark(spec: GroupSpec, axis: int, relu: bool, is_plain: bool = False) -> Dict[str, str]:
    """The attribute.

    ``relu`` says whether the marked node computes one. ``is_plain`` is for a node that is a plain BatchNorm as long as
    nobody makes it anew: its layer was on one device.
    """
    told = {"axis": axis, "eps": spec.epsilon, "momentum": spec.momentum, "fix_gamma": not spec.scale, "relu": relu}
    is_plain_too = {"is_plain": True} if is_plain else {}
    return {MARK: json.dumps({**told, "options": spec.shared_options(), **is_plain_too})}


def read_mark(text: str) -> Dict[str, Any]:
    """What it tells: ``axis``, ``eps``, ``momentum``, ``fix_gamma``, ``relu``, ``options``, perhaps ``is_plain``."""
    return json.loads(text)


def is_marked(symbol: mx.sym.Symbol) -> bool:
    """Whether it has synchronized layers."""
    return MARK in symbol.tojson()
