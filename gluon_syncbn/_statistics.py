"""`update_statistics`: estimates the running statistics of a trained net anew."""

import contextlib
import itertools
from collections import defaultdict
from typing import Any, Dict, Iterable, Iterator, List, Optional, Tuple

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import Block, HybridBlock, SymbolBlock, nn

from gluon_syncbn._devices import devices
from gluon_syncbn.backends.bfloat16 import widened
from gluon_syncbn.base.mxnet_private import (
    PlainBatchNorm,
    arrays_of,
    contexts_of,
    graph_of,
    operator_options,
    without_graphs,
)
from gluon_syncbn.base.walk import all_blocks, watching_calls
from gluon_syncbn.distributed.default import find
from gluon_syncbn.distributed.process_group import ProcessGroup
from gluon_syncbn.meeting.processes import processes_of
from gluon_syncbn.meeting.statistics import Moments, merge
from gluon_syncbn.step.abandon import abandon_step
from gluon_syncbn.step.steps import steps
from gluon_syncbn.synchronization import processes_of_layers

_NAME = "update_statistics"


def update_statistics(
    net: Block, batches: Iterable[Any], ctx: Optional[List[mx.Context]] = None, count: Optional[int] = None
) -> Block:
    """Estimate the running statistics of a trained net anew, from some batches of its training data.

    The running statistics of training are averages over the last few hundred steps, in which the weights changed. This
    function lets the net see ``batches`` in training mode, with the weights that it has now, and replaces the running
    mean and variance of every BatchNorm, synchronized or not, by the mean and the biased variance of all values that
    the layer has seen; each batch has the same weight, large or small. Known as PreciseBN (Wu and Johnson,
    "Rethinking 'Batch' in BatchNorm", 2021) and as ``torch.optim.swa_utils.update_bn``. Use it after training, after
    weights have been averaged, or before you freeze statistics.

    Nothing else of the net changes. Frozen layers (``use_global_stats``) keep their statistics, as does a layer that no
    batch has reached. The net is called layer by layer, hybridized or not. In a job of several processes all of them
    call the function, each with its own batches, equally many, and all get the same statistics.

    Parameters
    ----------
    net : Block
        It is called with one argument, in training mode; for a net that needs more, pass a Block that calls it.
    batches : iterable
        Batches of images, NDArrays of shape (N, ...). Of a list or tuple, such as a DataLoader's, the first item is
        taken. 100 to 200 batches are usual.
    ctx : list of Context, optional
        The devices, over which each batch is split. Default: the devices of the net's parameters.
    count : int, optional
        Take so many batches, if there are more.

    Returns
    -------
    Block
        ``net`` itself.

    Raises
    ------
    TypeError
        ``net`` is no Gluon block, or a batch is no array.
    ValueError
        There are no batches; a batch has fewer images than there are devices; no layer learns statistics, or none was
        called; a SymbolBlock has BatchNorms, which cannot be seen; or a step is under way.

    After an error the net has the statistics that it had before.

    Examples
    --------
    >>> gluon_syncbn.update_statistics(net, train_loader, count=200)
    >>> net.save_parameters("net.params")
    """
    blocks = all_blocks(net)
    layers = _layers_of(net, blocks)
    steps.progress.refuse_within_step(_NAME)
    own = contexts_of(layers[0].running_mean)
    contexts = [ctx] if isinstance(ctx, mx.Context) else list(ctx or own)
    if not contexts:
        raise ValueError(f"{_NAME}: '{net.name}' is not initialized.")
    if count is not None and count < 1:
        raise ValueError(f"{_NAME}: count must be at least 1, not {count!r}.")
    if count is not None and count != int(count):
        raise ValueError(f"{_NAME}: count must be a whole number, not {count!r}.")
    statistics = [parameter for layer in layers for parameter in (layer.running_mean, layer.running_var)]
    before = [(array, array.asnumpy()) for parameter in statistics for array in arrays_of(parameter)]
    group = processes_of_layers(layers, _NAME) or find(None, _NAME)  # the layers' own processes, or the default
    try:
        with contextlib.nullcontext() if contexts == own else devices(contexts):
            seen = _observe(net, blocks, layers, batches, contexts, None if count is None else int(count))
        mx.nd.waitall()  # the last layer may have failed
        for layer, moments in _over_processes(group, seen).items():
            for parameter, vector in ((layer.running_mean, moments.mean), (layer.running_var, moments.var)):
                for array in arrays_of(parameter):
                    array[:] = vector
    except BaseException as problem:
        if group is not None:
            group.fail(f"{_NAME}: {problem!r}")  # so that the others do not wait
        abandon_step()
        for array, values in before:
            array[:] = values
        raise
    return net


def _layers_of(net: Block, blocks: List[Block]) -> List[nn.BatchNorm]:
    norms = [block for block in blocks if isinstance(block, PlainBatchNorm)]
    for block in blocks:
        if isinstance(block, SymbolBlock) and graph_of(block)[1].list_auxiliary_states():
            raise ValueError(
                f"{_NAME}: the BatchNorms of the SymbolBlock '{block.name}' are nodes of its graph. Build the net from "
                f"layers, and load the parameters into it."
            )
    layers = [norm for norm in norms if not operator_options(norm)["use_global_stats"]]
    if not layers:
        raise ValueError(f"{_NAME}: all BatchNorms of '{net.name}' are frozen." if norms else f"{_NAME}: no BatchNorm.")
    return layers


def _observe(net, blocks, layers, batches, contexts, count) -> Dict[nn.BatchNorm, List[Moments]]:
    """Return the moments that each layer sees, by batch."""
    from tqdm import tqdm

    seen: Dict[nn.BatchNorm, List[Moments]] = {layer: [] for layer in layers}
    total = count if count is not None else len(batches) if hasattr(batches, "__len__") else None
    is_empty = True
    with _watching(layers) as calls, without_graphs([item for item in blocks if isinstance(item, HybridBlock)]):
        some = tqdm(itertools.islice(batches, count), total=total, desc="statistics", unit="batch", disable=None)
        for batch in some:
            is_empty = False
            with autograd.pause(train_mode=True):
                outputs = [net(shard) for shard in _shards(batch, contexts)]
            # Not before all devices are called: the first waits for the last in its first synchronized layer.
            for layer, parts in calls.items():
                rows = [np.concatenate([[size], *(vector.asnumpy() for vector in vectors)]) for size, *vectors in parts]
                seen[layer].append(merge(np.stack(rows)))
            calls.clear()
            del outputs
    if is_empty:
        raise ValueError(f"{_NAME}: there are no batches.")
    return seen


def _shards(batch: Any, contexts: List[mx.Context]) -> List[mx.nd.NDArray]:
    data = batch[0] if isinstance(batch, (list, tuple)) and batch else batch
    if not isinstance(data, (mx.nd.NDArray, np.ndarray)) or not data.ndim:
        raise TypeError(f"{_NAME}: a batch must be an array, or a list or tuple that begins with one.")
    if len(data) < len(contexts):
        raise ValueError(
            f"{_NAME}: a batch has {len(data)} images for {len(contexts)} devices. Leave it out, for example with "
            f"last_batch='discard' of the DataLoader, or pass fewer devices as ctx."
        )
    return gluon.utils.split_and_load(data, contexts, even_split=False)


@contextlib.contextmanager
def _watching(layers: List[nn.BatchNorm]) -> Iterator[Dict[nn.BatchNorm, List[Tuple]]]:
    """Yield, for each layer, the number of values per channel, their mean and M2 in each call within the block."""
    calls: Dict[nn.BatchNorm, List[Tuple]] = defaultdict(list)
    owners: Dict[gluon.Parameter, nn.BatchNorm] = {}  # several layers may share statistics
    for layer in layers:
        owners.setdefault(layer.running_mean, layer)

    def watch(layer, inputs):
        if not autograd.is_training():
            return
        x = inputs[0].as_nd_ndarray()
        with mx.util.np_array(False), mx.util.np_shape(False):
            x = widened(x)[0].astype("float64")
            axis = operator_options(layer)["axis"] % x.ndim
            channels = [-1 if place == axis else 1 for place in range(x.ndim)]
            mean = mx.nd.mean(x, axis=axis, exclude=True)
            m2 = mx.nd.square(mx.nd.broadcast_sub(x, mean.reshape(channels))).sum(axis=axis, exclude=True)
        calls[owners[layer.running_mean]].append((x.size / x.shape[axis], mean, m2))

    with watching_calls(layers, watch):
        yield calls


def _over_processes(
    group: Optional[ProcessGroup], seen: Dict[nn.BatchNorm, List[Moments]]
) -> Dict[nn.BatchNorm, Moments]:
    """Return one estimate per layer, in which each batch of each process has the same weight."""
    packed = {
        layer: merge(np.stack([Moments(1.0, batch.mean, batch.var).pack() for batch in batches])).pack()
        for layer, batches in seen.items()
        if batches
    }
    if not packed:
        raise ValueError(f"{_NAME}: the net has called none of its BatchNorms.")
    vectors = list(packed.values())
    rows = np.concatenate(vectors)[np.newaxis]
    if group is not None:
        with processes_of(group).together(_NAME) as all_of_them:
            rows = all_of_them.gather(_NAME, rows[0])
    parts = np.split(rows, np.cumsum([item.size for item in vectors])[:-1], axis=1)
    return {layer: merge(part) for layer, part in zip(packed, parts)}
