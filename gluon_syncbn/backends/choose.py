"""Which back end a layer runs on, and why."""

import functools
import logging
import os
import warnings
from typing import Dict, List, Sequence, Tuple

import mxnet as mx

from gluon_syncbn.backends.interface import Backend
from gluon_syncbn.backends.native import NativeBackend
from gluon_syncbn.backends.portable.operator import PortableBackend
from gluon_syncbn.base.walk import users_line
from gluon_syncbn.layer import spec as layer_spec
from gluon_syncbn.layer.spec import LayerSpec

# 'auto' takes the first that can run.
BACKENDS: Dict[str, Backend] = {backend.name: backend for backend in (NativeBackend(), PortableBackend())}
_VARIABLE = "GLUON_SYNCBN_BACKEND"
_log = logging.getLogger("gluon_syncbn")


def find_backend(spec: LayerSpec, devices: Sequence[mx.Context]) -> Tuple[Backend, List[str]]:
    """The back end for a layer on ``devices``, and for each back end before it the reason why it cannot run.

    The environment variable ``GLUON_SYNCBN_BACKEND`` chooses a back end for 'auto'; ValueError if it names none.
    RuntimeError if no back end can run the layer here, or the requested one cannot.
    """
    requested = spec.backend
    if requested == "auto":
        requested = os.environ.get(_VARIABLE, "auto")
        if requested not in layer_spec.BACKENDS:
            raise ValueError(f"{_VARIABLE} must be one of {', '.join(layer_spec.BACKENDS)}, not {requested!r}.")
    candidates = list(BACKENDS.values()) if requested == "auto" else [BACKENDS[requested]]
    reasons: List[str] = []
    for candidate in candidates:
        reason = candidate.unavailable_reason(spec, devices)
        if not reason:
            return candidate, reasons
        reasons.append(reason)
    raise RuntimeError(f"{spec.where}: backend={requested!r} cannot run here: {'; and '.join(reasons)}.")


def choose(spec: LayerSpec, devices: Sequence[mx.Context]) -> Backend:
    """The back end for a layer on ``devices``; logs each different choice once (INFO, logger ``gluon_syncbn``).

    Warns (UserWarning), once, where the compiled kernels cannot run on a GPU: a slow layer should not go unnoticed.
    Raises as `find_backend`.
    """
    backend, reasons = find_backend(spec, devices)
    has_gpu = any(device.device_type == "gpu" for device in devices)
    _say(backend.name, why(backend, reasons, devices), bool(reasons) and spec.kvstore is None and has_gpu)
    return backend


@functools.lru_cache(maxsize=None)
def _say(name: str, reason: str, is_slow: bool) -> None:
    """Log a choice, once."""
    _log.info("back end %s: %s.", name, reason)
    if is_slow:
        warnings.warn(f"SyncBatchNorm runs on the {name} back end, which is slower: {reason}.", stacklevel=users_line())


def why(backend: Backend, reasons: List[str], devices: Sequence[mx.Context]) -> str:
    """Why a back end was taken, after these `reasons` against others."""
    return "; and ".join(reasons) or backend.description(devices)
