"""Which back end a layer runs on, and why."""

import logging
import os
import warnings
from typing import Dict, NamedTuple, Sequence

import mxnet as mx

from gluon_syncbn.backends.interface import Backend
from gluon_syncbn.backends.native import NativeBackend
from gluon_syncbn.backends.options import REQUESTS
from gluon_syncbn.backends.portable import PortableBackend

# 'auto' takes the first that can run.
BACKENDS: Dict[str, Backend] = {backend.name: backend for backend in (NativeBackend(), PortableBackend())}
_VARIABLE = "GLUON_SYNCBN_BACKEND"
_log = logging.getLogger("gluon_syncbn")
_said = set()


class Choice(NamedTuple):
    """A back end's name, and why it was taken."""

    name: str
    reason: str

    @property
    def backend(self) -> Backend:
        return BACKENDS[self.name]


def runs_here(requested: str, kvstore) -> bool:
    """Whether this back end can run at all, or any where it is 'auto'."""
    return requested == "auto" or not BACKENDS[requested].unavailable_reason([], kvstore)


def choose(where: str, requested: str, devices: Sequence[mx.Context], kvstore) -> Choice:
    """The back end for a layer on ``devices``; logs each different choice once (INFO, logger ``gluon_syncbn``).

    Warns (UserWarning), once, where the compiled kernels cannot run on a GPU: a slow layer should not go unnoticed. The
    environment variable ``GLUON_SYNCBN_BACKEND`` says what 'auto' means.

    Raises
    ------
    RuntimeError
        A back end is requested and cannot run here; starts with ``where``.
    ValueError
        The environment variable has another value.
    """
    if requested == "auto":
        requested = os.environ.get(_VARIABLE, "auto")
        if requested not in REQUESTS:
            raise ValueError(f"{_VARIABLE} must be one of {', '.join(REQUESTS)}, not {requested!r}.")
    candidates = list(BACKENDS.values()) if requested == "auto" else [BACKENDS[requested]]
    obstacle = ""  # that the candidate before could not overcome
    for candidate in candidates:
        reason, obstacle = obstacle, candidate.unavailable_reason(devices, kvstore)
        if not obstacle:
            break
    else:
        raise RuntimeError(f"{where}: backend={requested!r} cannot run here: {obstacle}.")
    choice = Choice(candidate.name, reason or candidate.description(devices))
    if choice not in _said:
        _said.add(choice)
        _log.info("back end %s: %s.", choice.name, choice.reason)
        if reason and kvstore is None and any(device.device_type == "gpu" for device in devices):
            warnings.warn(f"{where} runs on the {choice.name} back end, which is slower: {reason}.", stacklevel=2)
    return choice
