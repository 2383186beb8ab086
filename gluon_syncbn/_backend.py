"""Which back end a layer runs on, and why."""

import logging
import os
from typing import NamedTuple, Optional, Sequence

import mxnet as mx

from gluon_syncbn import native

BACKENDS = ("auto", "native", "portable")
_VARIABLE = "GLUON_SYNCBN_BACKEND"
_log = logging.getLogger("gluon_syncbn")
_said = set()


class Choice(NamedTuple):
    """``name`` is 'native' or 'portable'."""

    name: str
    reason: str


def choose(where: str, requested: str, devices: Sequence[mx.Context], kvstore) -> Choice:
    """The back end for a layer on ``devices``; logs each different choice once (INFO, logger ``gluon_syncbn``).

    The environment variable ``GLUON_SYNCBN_BACKEND`` says what 'auto' means.

    Raises
    ------
    RuntimeError
        'native' is requested and cannot run here; starts with ``where``.
    ValueError
        The environment variable has another value.
    """
    if requested == "auto":
        requested = os.environ.get(_VARIABLE, "auto")
        if requested not in BACKENDS:
            raise ValueError(f"{_VARIABLE} must be one of {', '.join(BACKENDS)}, not {requested!r}.")
    obstacle = _obstacle(devices, kvstore)
    if requested == "native" and obstacle:
        raise RuntimeError(f"{where}: backend='native' cannot run here: {obstacle}.")
    if requested == "portable":
        choice = Choice("portable", "it was asked for")
    elif obstacle:
        choice = Choice("portable", obstacle)
    else:
        choice = Choice("native", f"compiled kernels, {native.instruction_set()}")
    if choice not in _said:
        _said.add(choice)
        _log.info("back end %s: %s.", choice.name, choice.reason)
    return choice


def _obstacle(devices: Sequence[mx.Context], kvstore) -> Optional[str]:
    """Why the native back end cannot run, or None."""
    if native.why_missing:
        return f"the compiled operator is not available: {native.why_missing}"
    if kvstore is not None:
        return "a kvstore was given, and only the portable back end uses one"
    others = [str(device) for device in devices if device.device_type != "cpu"]
    if others:
        return f"the compiled kernels run on CPU contexts, and the layer is on {', '.join(others)}"
    return None
