"""Which back end a layer runs on, and why."""

import logging
import os
import warnings
from typing import List, NamedTuple, Optional, Sequence

import mxnet as mx

from gluon_syncbn.backends import native

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

    Warns (UserWarning), once, where the compiled kernels cannot run on a GPU: a slow layer should not go unnoticed. The
    environment variable ``GLUON_SYNCBN_BACKEND`` says what 'auto' means.

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
    obstacle = _obstacle(devices, kvstore) if requested != "portable" else None
    if requested == "native" and obstacle:
        raise RuntimeError(f"{where}: backend='native' cannot run here: {obstacle}.")
    if requested == "portable":
        choice = Choice("portable", "it was asked for")
    elif obstacle:
        choice = Choice("portable", obstacle)
    else:
        choice = Choice("native", f"compiled kernels, {_kernels_of(devices)}")
    if choice not in _said:
        _said.add(choice)
        _log.info("back end %s: %s.", choice.name, choice.reason)
        if obstacle and kvstore is None and _gpus(devices):
            warnings.warn(f"{where} runs on the portable back end, which is slower: {obstacle}.", stacklevel=2)
    return choice


def _obstacle(devices: Sequence[mx.Context], kvstore) -> Optional[str]:
    """Why the native back end cannot run, or None."""
    if native.why_missing:
        return f"the compiled operator is not available: {native.why_missing}"
    if kvstore is not None:
        return "a kvstore was given, and only the portable back end uses one"
    for device in _gpus(devices):
        problem = native.why_not_on_gpu(device.device_id)
        if problem:
            return f"the CUDA kernels cannot run on {device}: {problem.rstrip()}"
    return None


def _gpus(devices: Sequence[mx.Context]) -> List[mx.Context]:
    return [device for device in devices if device.device_type == "gpu"]


def _kernels_of(devices: Sequence[mx.Context]) -> str:
    gpus = [str(device) for device in _gpus(devices)]
    cpus = [] if gpus and len(gpus) == len(devices) else [native.instruction_set()]
    return " and ".join([*cpus, *([f"CUDA on {', '.join(gpus)}"] if gpus else [])])
