"""`check`: finds out whether a net really synchronizes, by training passes on copies of its parameters."""

import contextlib
import zlib
from collections import Counter, defaultdict
from typing import Any, ContextManager, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.gluon import Block, Parameter, SymbolBlock, nn

from gluon_syncbn.backends.bfloat16 import dtype_name, is_bfloat16
from gluon_syncbn.base.errors import STEP_IS_UNDER_WAY, text_of
from gluon_syncbn.base.mxnet_private import (
    PlainBatchNorm,
    arrays_of,
    contexts_of,
    device_of,
    flatten,
    has_gradient,
    is_deferred,
    on_copies,
    operator_options,
    set_dropout,
)
from gluon_syncbn.base.walk import all_blocks, watching_calls
from gluon_syncbn.convert import drop_graphs, is_plain, names_left_plain
from gluon_syncbn.graphs.calls import keeping_graphs
from gluon_syncbn.meeting.processes import processes_of
from gluon_syncbn.step.abandon import abandon_step
from gluon_syncbn.step.steps import steps
from gluon_syncbn.synchronization import processes_of_layers, synchronization_of

_NAME = "gluon_syncbn.check"
_SHOWN = 3  # names of layers in a line
# A difference is too large if it exceeds this share, so many units of the dtype, and so many times the usual one.
_SHARE, _UNITS, _TIMES_USUAL = 1e-3, 16, 30
_RANDOM = 0.1  # a net draws random numbers if two passes on one device differ by more than this share
_UNIT = {"float64": 2.0**-23, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}  # momentum is a float32
_CONVERT = "plain; convert_sync_batchnorm(net) makes them synchronize"


class Difference(NamedTuple):
    """The difference from one device with the whole batch: the root of the mean square, as a share."""

    found: float
    usual: float  # between two passes on one device, the second with images in another order and other last bits


class CheckedLayer(NamedTuple):
    """A BatchNorm of the net."""

    name: str
    state: str  # 'synchronized', 'not synchronized', 'frozen', or 'not called'
    text: str  # its devices, or the reason why it does not synchronize


class Check:
    """The result of `check`. Its text is the table.

    Attributes
    ----------
    layers : list of CheckedLayer
        The BatchNorm layers of the net, with the attributes ``name``, ``state`` and ``text``.
    differences : dict of str to Difference
        Of outputs, gradients and running statistics, each with ``found`` and ``usual``. The statistics of a layer that
        the net calls twice are left out, since one device moves them in another order. Empty if the layers have
        different groups, or groups over several processes: no one device is comparable then.
    notes : list of str
        Remarks, for example that the net draws random numbers.
    is_synchronized : bool
        Whether all layers synchronize that were called and are not frozen, at least one, and no difference is far more
        than rounding makes.
    """

    def __init__(
        self, title: str, unit: float, layers: List[CheckedLayer], differences: Dict[str, Difference], notes: List[str]
    ) -> None:
        self._title, self._unit = title, unit
        self.layers, self.differences, self.notes = layers, differences, notes

    @property
    def is_synchronized(self) -> bool:
        states = {layer.state for layer in self.layers} - {"frozen", "not called"}
        return states == {"synchronized"} and not any(map(self._is_large, self.differences.values()))

    def _is_large(self, item: Difference) -> bool:
        return not item.found <= max(_SHARE, _UNITS * self._unit, _TIMES_USUAL * item.usual)  # NaN is

    def __str__(self):
        lines = [self._title]
        for state, text in dict.fromkeys((layer.state, layer.text) for layer in self.layers):
            names = [layer.name for layer in self.layers if (layer.state, layer.text) == (state, text)]
            shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
            which = "" if state == "synchronized" else f" ({shown})"
            lines.append(f"{len(names):6} {state}{text and ': '}{text}{which}")
        if self.differences:
            lines.append(f"  {'difference from one device':38}found    usual, by rounding")
        for name, item in self.differences.items():
            large = "  too large" if self._is_large(item) else ""
            lines.append(f"    {name:36}{item.found:.1e}  {item.usual:.1e}{large}")
        lines += [f"  ({note})" for note in self.notes]
        return "\n".join([*lines, f"  {self._verdict()}"])

    def __repr__(self):
        count = sum(layer.state == "synchronized" for layer in self.layers)
        return f"<Check: {self._verdict()}, {count} of {len(self.layers)} layers>"

    def _verdict(self) -> str:
        if self.is_synchronized:
            return "synchronized"
        learns = {layer.state for layer in self.layers} - {"frozen", "not called"}
        is_far = any(map(self._is_large, self.differences.values()))  # a block that calls F.BatchNorm itself, perhaps
        return "NOT synchronized" if learns or is_far else "nothing to synchronize"


def check(net: Block, *inputs: Any) -> Check:
    """Find out whether a net really synchronizes, on the devices that it is on.

    This function runs a training pass on all devices, and one on the first device with the whole batch. It compares
    outputs, gradients and running statistics, and prints a table: which BatchNorm layers synchronize with whom, which
    do not and why, and the differences beside those that rounding makes.

    The net is called as it is, hybridized or not, but with copies of its parameters and without its Dropout layers.
    Weights, running statistics and gradients do not change, nor do MXNet's random numbers, unless the net draws some
    itself. (Parameters that wait for their shapes get them, and hooks are called.) The whole batch must fit on the
    first device.

    In a job of several processes all of them call the function, each with its own images; the first one prints.

    Parameters
    ----------
    net : Block
        Initialized on the devices that train.
    inputs
        The net's inputs in training: arrays whose first axis is the batch, of images that differ. They are split over
        the devices. Two images per device are enough.

    Returns
    -------
    Check
        With ``is_synchronized``, ``layers`` and ``differences``.

    Raises
    ------
    TypeError
        ``net`` is no Gluon block, or an input is no array.
    ValueError
        The net is not initialized; inputs have different numbers of images, fewer than there are devices, or images
        that are all alike; the net returns no array whose first axis is the batch; or a step is under way.
    SyncBatchNormError
        Devices did not meet.

    Examples
    --------
    >>> gluon_syncbn.convert_sync_batchnorm(net)
    >>> assert gluon_syncbn.check(net, mx.nd.random.uniform(shape=(4, 3, 224, 224))).is_synchronized
    """
    blocks = all_blocks(net)
    norms = [block for block in blocks if isinstance(block, PlainBatchNorm)]
    group = processes_of_layers(norms, _NAME)
    try:
        arrays = _checked(net, inputs)
        if any(map(is_deferred, _parameters_of(blocks))):
            _find_shapes(net, arrays)
        with _without_dropout(blocks), keeping_graphs(blocks):
            result = _compare(_TrialPasses(net, blocks, norms, arrays, group), blocks)
    except BaseException as problem:
        if group is not None:
            group.fail(f"{_NAME}: {problem!r}")  # so that the others do not wait
        with on_copies(_parameters_of(blocks), _contexts_of(net)):  # abandon_step would clear the gradients of the net
            abandon_step()
        raise
    steps.progress.forget()
    if group is None or group.rank == 0:
        print(result)
    return result


def _checked(net: Block, inputs: Sequence[Any]) -> List[mx.nd.NDArray]:
    for item in inputs:
        if not isinstance(item, (mx.nd.NDArray, np.ndarray)) or not item.ndim:
            raise TypeError(f"{_NAME}: inputs must be arrays whose first axis is the batch, not {type(item).__name__}.")
    if not inputs:
        raise TypeError(f"{_NAME}: pass what the net is called with, for example check(net, images).")
    if autograd.is_recording() or steps.progress.is_under_way() or steps.progress.half_called() is not None:
        raise ValueError(f"{_NAME}: {STEP_IS_UNDER_WAY}")
    if len({len(item) for item in inputs}) > 1:
        raise ValueError(
            f"{_NAME}: inputs have different numbers of images ({', '.join(str(len(i)) for i in inputs)})."
        )
    contexts = _contexts_of(net)
    if not contexts:
        raise ValueError(f"{_NAME}: '{net.name}' is not initialized.")
    if len(inputs[0]) < len(contexts):
        raise ValueError(f"{_NAME}: too few images ({len(inputs[0])}) for {len(contexts)} devices.")
    elsewhere = [item.name for item in net.collect_params().values() if contexts_of(item) not in ([], contexts)]
    if elsewhere:
        raise ValueError(
            f"{_NAME}: {len(elsewhere)} parameters ({', '.join(elsewhere[:_SHOWN])}, ...) are on other devices than "
            f"{', '.join(map(str, contexts))}. Call net.collect_params().reset_ctx(devices)."
        )
    make = mx.np.array if mx.util.is_np_array() else mx.nd.array
    arrays = [
        item
        if isinstance(item, mx.nd.NDArray)
        else make(item, dtype=item.dtype if np.issubdtype(item.dtype, np.integer) else "float32")
        for item in inputs
    ]
    if len(arrays[0]) > 1 and all((item == item[:1]).min() for item in (array.asnumpy() for array in arrays)):
        raise ValueError(f"{_NAME}: the images are all alike, so their order cannot matter. Pass random or real ones.")
    return arrays


def _in_numpy(array: mx.nd.NDArray) -> np.ndarray:
    """Return the values as a NumPy array, of float32 for bfloat16, which NumPy does not have."""
    return (array.astype("float32") if is_bfloat16(array.dtype) else array).asnumpy()


def _parameters_of(blocks: List[Block]) -> List[Parameter]:
    """Return all parameters, also of blocks that Gluon does not know as children."""
    return list(dict.fromkeys(item for block in blocks for item in block.params.values()))


def _contexts_of(net: Block) -> List[mx.Context]:
    """Return the devices of most parameters: a head may have been left on one."""
    return max(map(contexts_of, net.collect_params().values()), key=len, default=[])


def _find_shapes(net: Block, inputs: List[mx.nd.NDArray]) -> None:
    """Give parameters their shapes by a prediction: in training the first device would wait for the others."""
    try:
        with autograd.pause(train_mode=False):
            net(*(item[:1].as_in_context(_contexts_of(net)[0]) for item in inputs))
    except (TypeError, ValueError, mx.MXNetError) as problem:
        raise ValueError(
            f"{_NAME}: parameters of '{net.name}' have no shapes yet, and a prediction with the first image did not "
            f"find them ({type(problem).__name__}: {text_of(problem)}). Call the net once before."
        ) from problem


@contextlib.contextmanager
def _without_dropout(blocks: List[Block]) -> Iterator[None]:
    """Turn Dropout off within the ``with`` block: it would draw another mask on each device."""
    rates = {block: set_dropout(block, 0.0) for block in blocks if isinstance(block, nn.Dropout)}
    try:
        yield
    finally:
        for block, rate in rates.items():
            set_dropout(block, rate)


_Shards = Dict[mx.Context, np.ndarray]  # the numbers of each device's images in the whole batch
_Statistics = Dict[mx.Context, np.ndarray]  # the running mean and variance of a layer, of shape (2, C), by device


class _Numbers(NamedTuple):
    """The numbers that a training pass computes. Outputs and gradients of inputs have a row for each of ``images``."""

    images: np.ndarray  # in ascending order
    outputs: List[np.ndarray]  # all outputs whose first axis is the batch
    input_gradients: List[np.ndarray]
    gradients: List[np.ndarray]  # of γ and β, summed over devices
    statistics: List[_Statistics]  # of each layer that learns them


class _TrialPasses:
    """Training passes of a net on copies of its parameters."""

    def __init__(self, net: Block, blocks: List[Block], norms: List[nn.BatchNorm], inputs: List[mx.nd.NDArray], group):
        self._net, self._blocks, self._inputs, self._group = net, blocks, inputs, group
        self._syncs = [sync for sync in map(synchronization_of, norms) if sync is not None]
        self._parameters = _parameters_of(blocks)
        self.contexts = _contexts_of(net)
        called = [norm for norm in norms if arrays_of(norm.running_mean)]  # the others have no shape
        self.learning = [norm for norm in called if not operator_options(norm)["use_global_stats"]]
        sizes = self._of_all(np.array([size for item in inputs for size in item.shape[1:]], dtype=np.float64))
        if any(not np.array_equal(size, sizes[0]) for size in sizes):
            given = ", ".join(str(tuple(map(int, size))) for size in sizes)
            raise ValueError(f"{_NAME}: all processes must give images of one size, not {given}.")
        parts = [self._of_all(_in_numpy(item)) for item in inputs]
        self._batch = [np.concatenate(some) for some in parts]
        first = 0 if group is None else sum(map(len, parts[0][: group.rank]))
        own = np.array_split(np.arange(first, first + len(inputs[0])), len(self.contexts))
        self._shards: _Shards = dict(zip(self.contexts, own))
        self._kept: Optional[List[int]] = None  # the numbers of the outputs that are compared
        self._scales: List[float] = []  # of these outputs: the root of their mean square, or 1
        self._calls: Counter = Counter()  # of layers on one device, by running mean, which layers may share
        self.unit = 0.0  # of rounding of these outputs
        where = ", ".join(map(str, self.contexts)) + (f" of {group.size} processes" if group is not None else "")
        self.title = f"{net.name}: {len(self._batch[0])} images on {where}"

    def _of_all(self, array: np.ndarray) -> List[np.ndarray]:
        """Return the arrays of all processes, which may differ in their first axis."""
        if self._group is None:
            return [array]
        with processes_of(self._group).together(_NAME) as all_of_them:
            rows = all_of_them.gather_each(_NAME, array.ravel())
        return [row.astype(array.dtype).reshape(-1, *array.shape[1:]) for row in rows]

    def have_same_weights(self) -> bool:
        """Whether all processes have the same γ, β and other weights."""
        weights = [item for item in self._parameters if item.grad_req != "null" and arrays_of(item)]
        mine = np.array([[zlib.crc32(arrays_of(item)[0].asnumpy().tobytes()) for item in weights]], dtype=np.float64)
        return all(np.array_equal(row, mine) for row in self._of_all(mine))

    def groups(self) -> List[List[mx.Context]]:
        """Return the groups of devices that synchronize; [] if these differ, or layers of a job have a group_size."""
        if self._group is not None:
            return [self.contexts] if all(sync.options.group_size is None for sync in self._syncs) else []
        groups = [sync.groups() for sync in self._syncs if not sync.spec().is_plain] or [[self.contexts]]
        return groups[0] if all(some == groups[0] for some in groups) else []

    def _copies(self, contexts: List[mx.Context]) -> ContextManager[None]:
        """Give the net copies of its parameters within the ``with`` block, and graphs that are made for them."""
        drop_graphs(self._blocks)  # a plain static graph would write into the arrays that it has been made for
        return on_copies(self._parameters, contexts)

    def on_one_device(self, groups: List[List[mx.Context]], is_changed: bool) -> _Numbers:
        """Run the images of each group on its first device alone.

        With ``is_changed`` they are in reverse order, and their last bits differ.
        """
        images = {some[0]: np.concatenate([self._shards[context] for context in some]) for some in groups}
        if self._group is not None:
            images = {self.contexts[0]: np.arange(len(self._batch[0]))}
        with contextlib.ExitStack() as stack:
            for sync in self._syncs:
                stack.enter_context(sync.alone())
            stack.enter_context(self._copies(list(images)))
            return self._train({first: some[:: -1 if is_changed else 1] for first, some in images.items()}, is_changed)

    def on_all_devices(self) -> Tuple[List[_Statistics], _Numbers]:
        """Return the statistics before the pass, and its numbers. Gradients are summed over processes, too."""
        with self._copies(self.contexts):
            before = self._statistics()
            found = self._train(self._shards)
        return before, found._replace(gradients=[np.sum(self._of_all(item), axis=0) for item in found.gradients])

    def _train(self, shards: _Shards, is_changed: bool = False) -> _Numbers:
        inputs = [[self._input(i, *shard, is_changed) for i in range(len(self._batch))] for shard in shards.items()]
        with autograd.record():
            made = [self._counting_calls(*inputs[0]), *(self._net(*items) for items in inputs[1:])]
            outputs = [[x for x in flatten(item, "output")[0] if x is not None] for item in made]
            if self._kept is None:
                size, dtypes = len(inputs[0][0]), [dtype_name(item.dtype) for item in outputs[0]]
                self._kept = [
                    i for i, item in enumerate(outputs[0]) if dtypes[i] in _UNIT and item.ndim and len(item) == size
                ]
                if not self._kept:
                    raise ValueError(f"{_NAME}: '{self._net.name}' returns no floats whose first axis is the batch.")
                self.unit = max(_UNIT[dtypes[i]] for i in self._kept)
                squares = [np.mean(_in_numpy(outputs[0][i]).astype(np.float64) ** 2) for i in self._kept]
                self._scales = [float(np.sqrt(square)) or 1.0 for square in squares]
            outputs = [[items[i] for i in self._kept] for items in outputs]
            losses = [self._loss(items, images) for items, images in zip(outputs, shards.values())]
        autograd.backward(losses)
        images = np.concatenate(list(shards.values()))
        order = np.argsort(images)
        gradients = [[item.grad for item in items if item.grad is not None] for items in inputs]
        learned = [item for norm in self.learning for item in (norm.gamma, norm.beta) if has_gradient(item)]
        return _Numbers(
            images[order],
            [np.concatenate(list(map(_in_numpy, parts)))[order] for parts in zip(*outputs)],
            [np.concatenate(list(map(_in_numpy, parts)))[order] for parts in zip(*gradients)],
            [np.sum([array.asnumpy() for array in item.list_grad()], axis=0, dtype=np.float64) for item in learned],
            self._statistics(),
        )

    def _counting_calls(self, *inputs: mx.nd.NDArray) -> Any:
        self._calls.clear()

        def count(layer, _):
            self._calls[layer.running_mean] += 1

        with watching_calls(self.learning, count):
            return self._net(*inputs)

    def not_comparable(self, before: List[_Statistics], found: _Numbers, alone: _Numbers) -> List[int]:
        """Return the numbers of the layers whose statistics one device moves otherwise: MXNet moves them in the
        backward pass, and so in another order where a layer is called twice, or not at all if nothing before it learns.
        """
        rows = enumerate(zip(self.learning, before, found.statistics, alone.statistics))
        return [
            i
            for i, (layer, old, new, of_one_device) in rows
            if self._calls[layer.running_mean] > 1 or (_are_equal(of_one_device, old) and not _are_equal(new, old))
        ]

    def _input(self, number: int, context: mx.Context, images: np.ndarray, is_changed: bool) -> mx.nd.NDArray:
        like, values = self._inputs[number], self._batch[number][images]
        are_images = values.ndim > 2 and np.issubdtype(values.dtype, np.floating)  # not labels, and not indices
        if are_images and is_changed:
            up = np.random.RandomState(number).uniform(size=values.shape) < 0.5
            values = np.nextafter(values, np.where(up, np.inf, -np.inf).astype(values.dtype))
        made = mx.nd.array(values, ctx=context, dtype=values.dtype).astype(like.dtype, copy=False)
        made = made.as_np_ndarray() if isinstance(like, mx.np.ndarray) else made
        if are_images:
            made.attach_grad()
        return made

    def _loss(self, outputs: List[mx.nd.NDArray], images: np.ndarray) -> mx.nd.NDArray:
        """Return a loss for any net: the sum of √(1 + (y/s)²) of outputs y of scale s, each with a weight of its own.

        Its gradient is small where y is: behind a ReLU, the gradient does not jump where rounding decides on which
        side of 0 a number is.
        """
        sums = []
        for seed, out in enumerate(outputs):
            out = out.as_nd_ndarray().astype("float32") / self._scales[seed]
            weights = np.random.RandomState(seed).standard_normal((len(self._batch[0]), *out.shape[1:]))
            sums.append(((1 + out * out).sqrt() * mx.nd.array(weights[images], ctx=out.context)).sum())
        return mx.nd.add_n(*sums)

    def _statistics(self) -> List[_Statistics]:
        return [
            {
                device_of(mean): np.stack([mean.asnumpy(), var.asnumpy()])
                for mean, var in zip(arrays_of(norm.running_mean), arrays_of(norm.running_var))
            }
            for norm in self.learning
        ]


def _are_equal(some: _Statistics, before: _Statistics) -> bool:
    return all(np.array_equal(array, before[device]) for device, array in some.items())


def _compare(passes: _TrialPasses, blocks: List[Block]) -> Check:
    groups = passes.groups()
    alone = [passes.on_one_device(groups, is_changed) for is_changed in (False, True)] if groups else []
    before, found = passes.on_all_devices()
    learned = dict(zip(passes.learning, zip(before, found.statistics)))
    layers = []
    for block in blocks:
        if isinstance(block, PlainBatchNorm):
            layers.append(CheckedLayer(block.name, *_state(block, passes.contexts, learned.get(block))))
        elif isinstance(block, SymbolBlock):
            layers += [CheckedLayer(name, "not synchronized", _CONVERT) for name in names_left_plain(block)]
    differences, notes = {}, []
    if alone:
        firsts = {context: some[0] for some in groups for context in some}
        others = passes.not_comparable(before, found, alone[0])
        usual = _differences(alone[1], alone[0], firsts, others)
        shares = _differences(found, alone[0], firsts, others)
        differences = {name: Difference(share, usual[name]) for name, share in shares.items()}
        if any(item.usual > _RANDOM for item in differences.values()):
            notes.append("The net draws random numbers: two passes on one device differ, too.")
        if others:
            names = ", ".join([passes.learning[i].name for i in others[:_SHOWN]] + ["..."] * (len(others) > _SHOWN))
            notes.append(f"The running statistics of {names} were not compared: one device moves them otherwise.")
    else:
        notes.append("Not compared with one device: the groups are not the same devices of one process.")
    if not passes.have_same_weights():
        notes.append("The weights of the processes differ: see DistributedTrainer.broadcast_parameters.")
    return Check(passes.title, passes.unit, layers, differences, notes)


def _state(norm: nn.BatchNorm, contexts: List[mx.Context], learned) -> Tuple[str, str]:
    """Return the state of a layer and its devices, or the reason why it does not synchronize.

    ``learned`` is its statistics before and after the pass; None if it learns none.
    """
    if learned is None:
        return ("not called", "") if arrays_of(norm.running_mean) == [] else ("frozen", "use_global_stats")
    before, after = learned
    if operator_options(norm)["momentum"] != 1 and all(np.array_equal(before[item], after[item]) for item in after):
        return "not called", ""
    sync = synchronization_of(norm)
    if sync is None:
        return "not synchronized", _CONVERT if is_plain(norm) else "its class has a forward pass of its own"
    group, size = sync.process_group(), sync.options.group_size
    if size == 1:
        return "not synchronized", "group_size=1"
    if group is None and len(contexts) == 1:
        return "not synchronized", f"the net is on one device, {contexts[0]}"
    if any(not np.array_equal(after[item], after[some[0]]) for some in sync.groups() for item in some):
        return "not synchronized", "its devices have different statistics"
    devices = f"groups of {size} devices" if size else ", ".join(map(str, contexts))
    return "synchronized", devices + ("" if group is None else f" of {group.size} processes")


def _differences(
    found: _Numbers, expected: _Numbers, firsts: Dict[mx.Context, mx.Context], others: List[int]
) -> Dict[str, float]:
    """Return the largest difference of each kind of numbers.

    ``expected`` is of the whole batch. ``firsts`` is the device that computed it for each device. The statistics of the
    layers ``others`` are left out.
    """
    shares: Dict[str, List[float]] = defaultdict(list)

    def compare(name: str, numbers: np.ndarray, right: np.ndarray, scale: Any = None) -> None:
        right = right.astype(np.float64)
        scale = np.sqrt(np.mean(right**2)) if scale is None else scale
        apart = (numbers.astype(np.float64) - right) / np.where(scale > 0, scale, 1.0)
        shares[name].append(float(np.sqrt(np.mean(apart**2))))

    for item, right in zip(found.outputs, expected.outputs):
        compare("outputs", item, right[found.images])
    for item, right in zip(found.input_gradients, expected.input_gradients):
        compare("gradients of the input", item, right[found.images])
    if expected.gradients:
        compare("gradients of gamma and beta", *map(np.concatenate, (found.gradients, expected.gradients)))
    for i, (layer, right_layer) in enumerate(zip(found.statistics, expected.statistics)):
        for context, item in layer.items() if i not in others else ():
            right = right_layer[firsts[context]]
            var = np.max(right[1])
            compare("running statistics", item, right, np.array([[np.sqrt(var)], [var]]))
    return {name: float(np.max(items)) for name, items in shares.items()}
