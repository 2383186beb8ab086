"""Refuses options of a synchronized layer that could not work, where the layer is made."""

from typing import Optional

from gluon_syncbn.backends.choose import REQUESTS, choose
from gluon_syncbn.meeting.spec import Options, check_count, check_timeout
from gluon_syncbn.meeting.transport import check_kvstore


def check_options(
    where: str,
    num_devices: Optional[int] = None,
    group_size: Optional[int] = None,
    timeout: Optional[float] = None,
    backend: str = "auto",
    activation: Optional[str] = None,
    kvstore=None,
) -> Options:
    """The options of a group, or an error whose text starts with ``where``.

    Raises
    ------
    ValueError, TypeError
        An option has an impossible value.
    RuntimeError
        ``backend='native'`` where it cannot run.
    """
    for option, value in (("num_devices", num_devices), ("group_size", group_size)):
        if value is not None:
            check_count(value, where, option)
    if timeout is not None:
        timeout = check_timeout(timeout, where)
    if backend not in REQUESTS:
        raise ValueError(f"{where}: backend must be one of {', '.join(REQUESTS)}, not {backend!r}.")
    if activation not in (None, "relu"):
        raise ValueError(f"{where}: activation must be 'relu' or None, not {activation!r}.")
    check_kvstore(kvstore, where)
    if backend != "auto":
        choose(where, backend, [], kvstore)
    return Options(num_devices, group_size, timeout, kvstore)
