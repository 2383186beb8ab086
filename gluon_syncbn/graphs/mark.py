"""The mark of a synchronized layer in a graph: a hidden attribute of its last node.

It tells what the layer is, so that it can be found, replaced by a plain BatchNorm, or made anew for another number of
devices.
"""

import json
from typing import Any, Dict, NamedTuple, Optional

import mxnet as mx

from gluon_syncbn.base.mxnet_private import json_of
from gluon_syncbn.meeting.spec import GroupSpec

MARK = "__syncbn__"


class Form(NamedTuple):
    """What a layer computes on each device, beside what its `GroupSpec` says.

    ``axis`` is that of the channels. ``activation`` is 'relu' or None; graphs also have 'leaky' (`graphs.fuse`). With
    ``in_place`` the backward pass goes by the output, if the activation is none or leaky. ``fuse`` says whether a graph
    may compute what follows the layer in the layer's own passes. ``backend`` is the one that the user asked for.
    """

    axis: int
    activation: Optional[str] = None
    in_place: bool = False
    fuse: bool = True
    backend: str = "auto"

    @property
    def is_in_place(self) -> bool:
        """Whether there is a way back from the output."""
        return self.in_place and self.activation != "relu"

    def shared_options(self) -> Dict[str, Any]:
        """Like `GroupSpec.shared_options`."""
        return {"in_place": self.in_place, "fuse": self.fuse, "backend": self.backend}


def mark(spec: GroupSpec, form: Form, relu: bool, is_plain: bool = False) -> Dict[str, str]:
    """The attribute.

    ``relu`` says whether the marked node computes one. ``is_plain`` is for a node that is a plain BatchNorm as long as
    nobody makes it anew: its layer was on one device.
    """
    told = {
        "axis": form.axis,
        "eps": spec.epsilon,
        "momentum": spec.momentum,
        "fix_gamma": not spec.scale,
        "relu": relu,
    }
    is_plain_too = {"is_plain": True} if is_plain else {}
    options = {**spec.shared_options(), **form.shared_options()}
    return {MARK: json.dumps({**told, "options": options, **is_plain_too})}


def read_mark(text: str) -> Dict[str, Any]:
    """What it tells: ``axis``, ``eps``, ``momentum``, ``fix_gamma``, ``relu``, ``options``, perhaps ``is_plain``."""
    return json.loads(text)


def is_marked(symbol: mx.sym.Symbol) -> bool:
    """Whether it has synchronized layers."""
    return MARK in json_of(symbol)
