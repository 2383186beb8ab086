"""Refuses options of a synchronized layer that could not work, where the layer is made."""

from typing import Optional

from gluon_syncbn.distributed.process_group import ProcessGroupLike, check_process_group
from gluon_syncbn.meeting.renorm import RenormLike, check_renorm
from gluon_syncbn.meeting.spec import Options, check_count, check_kvstore, check_timeout

# What a user may ask for; gluon_syncbn.backends.choose has what stands behind it.
REQUESTS = ("auto", "native", "portable")


def check_options(
    where: str,
    backend: str = "auto",
    activation: Optional[str] = None,
    in_place: bool = False,
    fuse: bool = True,
    num_devices: Optional[int] = None,
    group_size: Optional[int] = None,
    timeout: Optional[float] = None,
    kvstore=None,
    process_group: Optional[ProcessGroupLike] = None,
    renorm: Optional[RenormLike] = None,
) -> Options:
    """The options of a group, or an error whose text starts with ``where``.

    Raises
    ------
    ValueError, TypeError
        An option has an impossible value.
    """
    if num_devices is not None:
        num_devices = check_count(num_devices, where, "num_devices")
    if group_size is not None:
        group_size = check_count(group_size, where, "group_size")
    if timeout is not None:
        timeout = check_timeout(timeout, where)
    if backend not in REQUESTS:
        raise ValueError(f"{where}: backend must be one of {', '.join(REQUESTS)}, not {backend!r}.")
    if activation not in (None, "relu"):
        raise ValueError(f"{where}: activation must be 'relu' or None, not {activation!r}.")
    for option, flag in (("in_place", in_place), ("fuse", fuse)):
        if not isinstance(flag, bool):
            raise TypeError(f"{where}: {option} must be True or False, not {flag!r}.")
    if in_place and backend == "portable":
        raise ValueError(f"{where}: in_place=True needs the native back end, and backend='portable' was asked for.")
    if kvstore == "horovod" and process_group in (None, "horovod"):  # MXNet's own name for it
        kvstore, process_group = None, "horovod"
    check_kvstore(kvstore, where)
    check_process_group(process_group, where)
    return Options(num_devices, group_size, timeout, kvstore, process_group, check_renorm(renorm, where))
