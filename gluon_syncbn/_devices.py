"""`devices`: a step on some of the devices only."""

import contextlib
from typing import Iterator, Optional, Sequence, Set, Union

import mxnet as mx
from mxnet.gluon import Block

from gluon_syncbn.base.mxnet_private import has_gradient, set_fresh_gradient
from gluon_syncbn.block import SyncBatchNorm
from gluon_syncbn.meeting import active_set
from gluon_syncbn.process.abandon import abandon_step
from gluon_syncbn.process.live_layers import live_layers
from gluon_syncbn.process.passes import forget_passes


@contextlib.contextmanager
def devices(ctx_list: Union[mx.Context, Sequence[mx.Context]], net: Optional[Block] = None) -> Iterator[None]:
    """Within the ``with`` block only these devices train, and no layer waits for the others.

    For a step with fewer images than devices, as the last batch of an epoch may have. It holds for all layers of the
    process, hybridized or not, and for backward passes of what was run in the block, wherever they are called. Entering
    and leaving waits for all pending work. On leaving, devices that did not take part are given the new running
    statistics, so that they are the same everywhere again.

    Parameters
    ----------
    ctx_list : mx.Context or sequence of mx.Context
        The devices that take part.
    net : Block, optional
        Its gradients on the other devices are set to zero and count as fresh, so that one ``Trainer.step`` in the block
        or behind it adds up what was computed, updates all devices, and does not complain of stale gradients.
        (Parameters with ``grad_req='add'`` keep what has been added up.)

    Raises
    ------
    ValueError
        No device, or one given twice.
    TypeError
        Something else than contexts, or ``net`` is not a Gluon block.
    MXNetError
        An operator has failed, in the block or in work that was pending before it.

    Examples
    --------
    >>> for images in loader:
    ...     used = ctx_list[: len(images)]
    ...     with gluon_syncbn.devices(used, net):
    ...         parts = gluon.utils.split_and_load(images, used, even_split=False)
    ...         with autograd.record():
    ...             losses = [loss(net(part)) for part in parts]
    ...         autograd.backward(losses)
    ...     trainer.step(len(images))
    """
    chosen = _check(ctx_list)
    if net is not None and not isinstance(net, Block):
        raise TypeError(f"gluon_syncbn.devices: net must be a Gluon block, not {type(net).__name__}.")
    mx.nd.waitall()
    if net is not None:
        _clear_gradients(net, chosen)
    before, set_id = active_set.current(), active_set.id_of(chosen)
    rounds = {layer: layer.synchronized_passes(set_id) for layer in live_layers()}
    _put_in_force(set_id)
    try:
        yield
        mx.nd.waitall()
    except BaseException:
        abandon_step()
        raise
    finally:
        _put_in_force(before)
    for layer in live_layers():
        if layer.synchronized_passes(set_id) > rounds.get(layer, 0):
            _spread_statistics(layer, chosen)


def _put_in_force(set_id: int) -> None:
    """No operator may be running."""
    forget_passes()
    active_set.use(set_id)


def _check(ctx_list) -> Set[mx.Context]:
    listed = [ctx_list] if isinstance(ctx_list, mx.Context) else list(ctx_list)
    for item in listed:
        if not isinstance(item, mx.Context):
            raise TypeError(f"gluon_syncbn.devices: expected contexts such as mx.gpu(0), not {item!r}.")
    shown = ", ".join(str(item) for item in listed)
    if not listed:
        raise ValueError("gluon_syncbn.devices: the list of devices is empty; at least one must take part.")
    if len(set(listed)) != len(listed):
        raise ValueError(f"gluon_syncbn.devices: one device is given twice ({shown}).")
    return set(listed)


def _clear_gradients(net: Block, chosen: Set[mx.Context]) -> None:
    for parameter in net.collect_params().values():
        if not has_gradient(parameter):
            continue
        for device in parameter.list_ctx():
            if device in chosen:
                continue
            gradient = parameter.grad(device)
            if parameter.grad_req == "write":
                mx.nd.zeros_like(gradient, out=gradient)
            set_fresh_gradient(parameter.data(device), True)


def _spread_statistics(layer: SyncBatchNorm, chosen: Set[mx.Context]) -> None:
    """From a device that took part to those of its group that did not."""
    for members in layer.groups():
        active = [device for device in members if device in chosen]
        for device in members:
            if active and device not in chosen:
                for parameter in (layer.running_mean, layer.running_var):
                    parameter.data(active[0]).copyto(parameter.data(device))
