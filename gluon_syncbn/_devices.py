"""`devices`: trains on some of the devices only."""

import contextlib
from typing import Dict, Iterator, List, Optional, Sequence, Set, Union

import mxnet as mx
import numpy as np
from mxnet.gluon import Block, Parameter

from gluon_syncbn.base.mxnet_private import arrays_of, has_gradient, set_fresh_gradient
from gluon_syncbn.block import SyncBatchNorm
from gluon_syncbn.distributed.default import find, groups_in_use
from gluon_syncbn.distributed.process_group import ProcessGroup
from gluon_syncbn.meeting.active_set import active_sets
from gluon_syncbn.meeting.processes import abandon_on_all_processes, have_raised, processes_of
from gluon_syncbn.step.abandon import abandon_step
from gluon_syncbn.step.steps import steps

_WHERE = "gluon_syncbn.devices"


@contextlib.contextmanager
def devices(ctx_list: Union[mx.Context, Sequence[mx.Context]], net: Optional[Block] = None) -> Iterator[None]:
    """Train on these devices only within the ``with`` block; no layer waits for the others.

    Use it for a step with fewer images than devices, such as the last batch of an epoch. It applies to all layers of
    the process, hybridized or not. The backward passes may be called in the block or after it.
    Entering and leaving the block waits for all pending work. On leaving, the new running statistics are copied to the
    devices that did not take part, so that all devices have the same again.

    In a job of several processes all of them enter and leave the block, each with its own devices. A process without
    images passes an empty list, and the others do not wait for it.

    Parameters
    ----------
    ctx_list : mx.Context or sequence of mx.Context
        The devices that take part.
    net : Block, optional
        The net whose gradients on the other devices are set to zero and marked as fresh. One ``Trainer.step``, in the
        block or after it, then adds up the gradients of the devices that took part, updates all devices, and does not
        complain of stale gradients. (Parameters with ``grad_req='add'`` keep their accumulated gradients.)

    Raises
    ------
    ValueError
        The list is empty (in every process, if there are several), or has a device twice.
    TypeError
        ``ctx_list`` has something else than contexts, or ``net`` is not a Gluon block.
    MXNetError
        An operator has failed, in the block or in work that was pending before it.
    SyncBatchNormError
        A process did not come, or a process without devices cannot be left out.

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
        raise TypeError(f"{_WHERE}: net must be a Gluon block, not {type(net).__name__}.")
    mx.nd.waitall()
    if have_raised():  # this process may hear of the error in no layer
        abandon_step()
    cleared: Set[Parameter] = set()

    def clear_gradients():
        """Clear them again before the update, or else at the end: the first call may have made some."""
        if net is not None:
            _clear_gradients(net, chosen, cleared)

    def prepare_update(is_first: bool):
        clear_gradients()
        if is_first:  # the Trainer is about to copy all Parameters of the first device to the others
            mx.nd.waitall()
            for layer in active_sets.trained or ():
                _spread_statistics(layer, chosen)

    clear_gradients()
    ranks = _active_ranks(chosen)
    before = active_sets.current
    _put_in_force(active_sets.id_of(chosen, ranks))
    outer, steps.updates.before_update = steps.updates.before_update, prepare_update
    outer_trained, active_sets.trained = active_sets.trained, set()
    try:
        yield
        mx.nd.waitall()
        clear_gradients()
    except BaseException:
        abandon_step()
        if any(len(active) < group.size for group, active in ranks.items()):
            # Processes without devices wait below. Where the step has been abandoned, it has the same number.
            abandon_on_all_processes(is_under_way=True, step=steps.progress.end_step(is_over=True))
        raise
    finally:
        steps.updates.before_update = outer
        called, active_sets.trained = active_sets.trained, outer_trained
        _put_in_force(before)
    trained = [layer for layer in steps.layers.blocks() if layer in called]
    for layer in trained:
        _spread_statistics(layer, chosen)
    for group, active in ranks.items():
        if len(active) < group.size:
            _spread_to_processes(group, active, [layer for layer in trained if layer._sync.process_group() is group])


def _active_ranks(chosen: Set[mx.Context]) -> Dict[ProcessGroup, List[int]]:
    """Return, for each process group, the ranks that have devices now."""
    find(None, _WHERE)  # the group that the environment variable names may not have been made yet
    ranks = {}
    for group in groups_in_use():
        processes = processes_of(group)
        with processes.together(_WHERE) as all_of_them:
            counts = all_of_them.gather("active", np.array([len(chosen)], dtype=np.float64))[:, 0]
            ranks[group] = counts.nonzero()[0].tolist()
            processes.let_meet(ranks[group], all_of_them.seconds)
    if not chosen and not any(ranks.values()):
        raise ValueError(f"{_WHERE}: the list of devices is empty; at least one must take part.")
    return ranks


def _put_in_force(set_id: int) -> None:
    """Put a set of devices in force. No operator may be running."""
    steps.progress.forget()
    active_sets.use(set_id)


def _check(ctx_list) -> Set[mx.Context]:
    listed = [ctx_list] if isinstance(ctx_list, mx.Context) else list(ctx_list)
    for item in listed:
        if not isinstance(item, mx.Context):
            raise TypeError(f"{_WHERE}: expected contexts such as mx.gpu(0), not {item!r}.")
    if len(set(listed)) != len(listed):
        raise ValueError(f"{_WHERE}: one device is given twice ({', '.join(map(str, listed))}).")
    return set(listed)


def _clear_gradients(net: Block, chosen: Set[mx.Context], cleared: Set[Parameter]) -> None:
    """Set the gradients of the other devices to zero, as if they had been computed, once."""
    for parameter in net.collect_params().values():
        if parameter in cleared or not has_gradient(parameter):
            continue
        cleared.add(parameter)
        for device in set(parameter.list_ctx()) - chosen:
            gradient = parameter.grad(device)
            if parameter.grad_req == "write":
                gradient[slice(None) if gradient.shape else ()] = 0
            set_fresh_gradient(parameter.data(device), True)


def _spread_statistics(layer: SyncBatchNorm, chosen: Set[mx.Context]) -> None:
    """Copy the running statistics of a device that took part to the devices of its group that did not."""
    for members in layer._sync.groups():
        active = [device for device in members if device in chosen]
        if not active:
            continue
        for device in set(members) - chosen:
            for parameter in _statistics(layer):
                parameter.data(active[0]).copyto(parameter.data(device))


def _spread_to_processes(group: ProcessGroup, active: Sequence[int], trained: Sequence[SyncBatchNorm]) -> None:
    """Copy the statistics of the layers that trained to the processes that did not take part.

    A process takes them from a process of the layer's group that did. Each process sends the keys of its layers along.
    Other layers do not matter: a net that the program has dropped exists until Python's garbage collector runs.
    """
    sent = {key: layer for key, layer in ((_key(layer), layer) for layer in trained) if key is not None}
    arrays = [arrays_of(parameter)[0] for layer in sent.values() for parameter in _statistics(layer)]
    mine = np.concatenate([np.zeros(0), *(array.asnumpy().astype(np.float64) for array in arrays)])
    sizes = {key: layer.running_mean.shape[0] for key, layer in sent.items()}
    with processes_of(group).together(_WHERE) as all_of_them:
        all_sizes = all_of_them.gather_json("statistics", sizes)
        rows = all_of_them.gather_each("statistics.rows", mine)
    if group.rank in active:
        return
    received = {}
    for rank, (channels, row) in enumerate(zip(all_sizes, rows)):
        ends = np.cumsum([2 * size for size in channels.values()])
        received.update({(rank, key): part for key, part in zip(channels, np.split(row, ends))})
    for layer in steps.layers.blocks():
        link, key = layer._sync.link, _key(layer)
        if link is None or layer._sync.process_group() is not group or key is None:
            continue
        found = (received.get((rank, key)) for rank in link.peers() if rank in active)
        vectors = next((row for row in found if row is not None), None)
        if vectors is not None:
            for parameter, vector in zip(_statistics(layer), np.split(vectors, 2)):
                for array in arrays_of(parameter):
                    array[:] = vector


def _key(layer: SyncBatchNorm) -> Optional[str]:
    """Return the layer's name for all processes; None if it has not trained with others."""
    link = layer._sync.link
    return None if link is None or link.place is None else link.place.key


def _statistics(layer: SyncBatchNorm) -> List[Parameter]:
    return [layer.running_mean, layer.running_var]
