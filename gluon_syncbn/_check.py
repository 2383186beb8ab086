"""`check`: whether a net is really synchronized, by one training pass on copies of its parameters."""

import contextlib
import zlib
from collections import defaultdict
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

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
    is_numpy_array,
    on_copies,
    operator_options,
    set_dropout,
)
from gluon_syncbn.base.walk import all_blocks
from gluon_syncbn.convert import drop_graphs, is_plain
from gluon_syncbn.graphs.calls import keeping_graphs
from gluon_syncbn.meeting.link import seconds_for_processes
from gluon_syncbn.meeting.processes import processes_of
from gluon_syncbn.nets.left_plain import names_left_plain
from gluon_syncbn.step.abandon import abandon_step
from gluon_syncbn.step.steps import steps
from gluon_syncbn.synchronization import processes_of_layers, synchronization_of

_NAME = "gluon_syncbn.check"
_SHOWN = 3  # names of layers in a line
# A difference counts if it is more than this share, and so many units of the dtype, and times what rounding makes.
_SHARE, _UNITS, _TIMES_USUAL = 1e-3, 16, 30
_RANDOM = 0.1  # two passes that differ by this share are of a net that draws random numbers
_UNIT = {"float64": 2.0**-23, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}  # momentum is a float32
_CONVERT = "plain; convert_sync_batchnorm(net) makes them synchronize"
_INPUT = "gradients of the input"


class Difference(NamedTuple):
    """How far the devices are from one device with the whole batch: the root of the mean square, as a share."""

    found: float
    usual: float  # between passes on one device, of images in another order and changed in their last bits


class CheckedLayer(NamedTuple):
    """A BatchNorm of the net."""

    name: str
    state: str  # 'synchronized', 'not synchronized', 'frozen', or 'not called'
    text: str  # with whom, or why not


class Check:
    """The result of `check`. Its text is the table.

    Attributes
    ----------
    layers : list of CheckedLayer
        The BatchNorm layers of the net, with the attributes ``name``, ``state`` and ``text``.
    differences : dict of str to Difference
        Of outputs, gradients and running statistics, each with ``found`` and ``usual``. Empty if the layers have
        different groups, or groups over several processes: no one device is comparable then.
    notes : list of str
        What else there is to know, for example that the net draws random numbers.
    is_synchronized : bool
        Whether all layers synchronize that were called and are not frozen, at least one, and no difference is far more
        than rounding makes.
    """

    def __init__(self, title: str, unit: float) -> None:
        self.layers: List[CheckedLayer] = []
        self.differences: Dict[str, Difference] = {}
        self._title, self._unit = title, unit
        self.notes: List[str] = []

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
        if {layer.state for layer in self.layers} <= {"frozen", "not called"}:
            return "nothing to synchronize"
        return "synchronized" if self.is_synchronized else "NOT synchronized"


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
            result = _compare(_Passes(net, blocks, norms, arrays, group), norms)
    except BaseException as problem:
        if group is not None:
            group.fail(f"{_NAME}: {problem!r}")  # so that the others do not wait
        with on_copies(_parameters_of(blocks), _contexts_of(net)):  # its gradients are not of a failed step
            abandon_step()
        raise
    steps.progress.forget()
    for block in blocks:
        if isinstance(block, SymbolBlock):
            result.layers += [CheckedLayer(name, "not synchronized", _CONVERT) for name in names_left_plain(block)]
    if group is None or group.rank == 0:
        print(result)
    return result


def _checked(net: Block, inputs: Sequence[Any]) -> List[mx.nd.NDArray]:
    """The inputs as arrays."""
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
    arrays = [item if isinstance(item, mx.nd.NDArray) else _array(item) for item in inputs]
    if len(arrays[0]) > 1 and all((item == item[:1]).min() for item in (array.asnumpy() for array in arrays)):
        raise ValueError(f"{_NAME}: the images are all alike, so their order cannot matter. Pass random or real ones.")
    return arrays


def _array(item: np.ndarray) -> mx.nd.NDArray:
    dtype = item.dtype if np.issubdtype(item.dtype, np.integer) else "float32"
    return (mx.np if mx.util.is_np_array() else mx.nd).array(item, dtype=dtype)


def _in_numpy(array: mx.nd.NDArray) -> np.ndarray:
    """In NumPy, which has no bfloat16."""
    return (array.astype("float32") if is_bfloat16(array.dtype) else array).asnumpy()


def _parameters_of(blocks: List[Block]) -> List[Parameter]:
    """Also those of blocks that Gluon does not know as children."""
    return list({id(item): item for block in blocks for item in block.params.values()}.values())


def _contexts_of(net: Block) -> List[mx.Context]:
    """The devices of most parameters: a head may have been left on one."""
    return max(map(contexts_of, net.collect_params().values()), key=len, default=[])


def _find_shapes(net: Block, inputs: List[mx.nd.NDArray]) -> None:
    """Let parameters have shapes. In training one device would wait for the others, so this is a prediction."""
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
    """Dropout would draw another mask on each device."""
    rates = {block: set_dropout(block, 0.0) for block in blocks if isinstance(block, nn.Dropout)}
    try:
        yield
    finally:
        for block, rate in rates.items():
            set_dropout(block, rate)


class _Part(NamedTuple):
    """Devices of this process, and images of the whole batch by their numbers."""

    contexts: List[mx.Context]
    images: np.ndarray


class _Numbers(NamedTuple):
    """What a training pass computes."""

    images: np.ndarray  # in ascending order, as in the rows of the next two
    outputs: List[np.ndarray]  # those whose first axis is the batch
    inputs: List[np.ndarray]  # gradients
    parameters: List[np.ndarray]  # gradients of γ and β, summed over devices
    statistics: List[Dict[mx.Context, np.ndarray]]  # of each layer: running mean and variance, of shape (2, C)


class _Passes:
    """Training passes of a net on copies of its parameters."""

    def __init__(self, net: Block, blocks: List[Block], norms: List[nn.BatchNorm], inputs: List[mx.nd.NDArray], group):
        self._net, self._inputs, self._group, self._blocks = net, inputs, group, blocks
        self._changed = False  # whether images are changed in their last bits
        self._syncs = [sync for sync in map(synchronization_of, norms) if sync is not None]
        self._parameters = _parameters_of(self._blocks)
        self.contexts = _contexts_of(net)
        called = [norm for norm in norms if arrays_of(norm.running_mean)]  # others have no shape
        self.learning = [norm for norm in called if not operator_options(norm)["use_global_stats"]]
        self.batch = [np.concatenate(self._of_all(_in_numpy(item))) for item in inputs]
        sizes = self._of_all(np.array([len(inputs[0])]))
        first = 0 if group is None else int(np.concatenate(sizes)[: group.rank].sum())
        own = np.array_split(np.arange(first, first + len(inputs[0])), len(self.contexts))
        self._shards = [_Part([context], images) for context, images in zip(self.contexts, own)]
        self._kept: Optional[List[int]] = None  # outputs whose first axis is the batch
        self.unit = 0.0  # of rounding of these
        where = ", ".join(map(str, self.contexts)) + (f" of {group.size} processes" if group is not None else "")
        self.title = f"{net.name}: {len(self.batch[0])} images on {where}"

    def _of_all(self, array: np.ndarray) -> List[np.ndarray]:
        """The arrays of all processes, which may differ in their first axis."""
        if self._group is None:
            return [array]
        rows = processes_of(self._group).gather_each(_NAME, _NAME, array.ravel(), seconds_for_processes(None))
        return [row.astype(array.dtype).reshape(-1, *array.shape[1:]) for row in rows]

    def have_same_weights(self) -> bool:
        """Whether all processes have the same γ, β and other weights."""
        weights = [item for item in self._parameters if item.grad_req != "null" and arrays_of(item)]
        mine = np.array([[zlib.crc32(arrays_of(item)[0].asnumpy().tobytes()) for item in weights]], dtype=np.float64)
        return all(np.array_equal(row, mine) for row in self._of_all(mine))

    def parts(self) -> List[_Part]:
        """The groups of devices that synchronize; none if layers have different ones, or they lie in processes."""
        groups = [sync.groups() for sync in self._syncs if not sync.spec().is_plain] or [[self.contexts]]
        if self._group is not None:
            is_one = all(sync.options.group_size is None for sync in self._syncs)
            return [_Part(self.contexts, np.arange(len(self.batch[0])))] if is_one else []
        if any(some != groups[0] for some in groups):
            return []
        images = {part.contexts[0]: part.images for part in self._shards}
        return [_Part(some, np.concatenate([images[context] for context in some])) for some in groups[0]]

    @contextlib.contextmanager
    def _copies(self, contexts: List[mx.Context]) -> Iterator[None]:
        """Within the block the net has copies of its parameters on these contexts, and graphs that are made for them:
        a plain static one would write into the arrays that it has been made for."""
        drop_graphs(self._blocks)
        try:
            with on_copies(self._parameters, contexts):
                yield
        finally:
            drop_graphs(self._blocks)

    def on_one_device(self, parts: List[_Part], step: int = 1) -> _Numbers:
        """The numbers of each part on its first device alone, with its images in this order: 1, or -1, in which they
        are changed in their last bits, too."""
        found = []
        self._changed = step < 0
        for part in parts:
            with contextlib.ExitStack() as stack:
                for sync in self._syncs:
                    stack.enter_context(sync.alone())
                stack.enter_context(self._copies(part.contexts[:1]))
                found.append(self._train([_Part(part.contexts[:1], part.images[::step])]))
        self._changed = False
        order = np.argsort(np.concatenate([item.images for item in found]))
        return _Numbers(
            np.concatenate([item.images for item in found])[order],
            [np.concatenate(rows)[order] for rows in zip(*(item.outputs for item in found))],
            [np.concatenate(rows)[order] for rows in zip(*(item.inputs for item in found))],
            [np.sum(items, axis=0) for items in zip(*(item.parameters for item in found))],
            [
                {context: item[part.contexts[0]] for part, item in zip(parts, items) for context in part.contexts}
                for items in zip(*(item.statistics for item in found))
            ],
        )

    def on_all_devices(self) -> Tuple[List[Dict[mx.Context, np.ndarray]], _Numbers]:
        """The statistics before, and the numbers of all devices; gradients are summed over processes, too."""
        with self._copies(self.contexts):
            before = self._statistics()
            found = self._train(self._shards)
        return before, found._replace(parameters=[np.sum(self._of_all(item), axis=0) for item in found.parameters])

    def _train(self, shards: List[_Part]) -> _Numbers:
        given = [[self._input(i, part) for i in range(len(self.batch))] for part in shards]
        with autograd.record():
            outputs = [
                [item for item in flatten(self._net(*items), "output")[0] if item is not None] for items in given
            ]
            if self._kept is None:
                size, floats = len(shards[0].images), [dtype_name(item.dtype) in _UNIT for item in outputs[0]]
                sized = [item.ndim > 0 and len(item) == size for item in outputs[0]]
                self._kept = [i for i, both in enumerate(zip(floats, sized)) if all(both)]
                if not self._kept:
                    raise ValueError(f"{_NAME}: '{self._net.name}' returns no floats whose first axis is the batch.")
                self.unit = max(_UNIT[dtype_name(outputs[0][i].dtype)] for i in self._kept)
            sums = [self._weighted_sum(items, part) for items, part in zip(outputs, shards)]
        autograd.backward(sums)
        images = np.concatenate([part.images for part in shards])
        order = np.argsort(images)
        has_gradients = [i for i, item in enumerate(given[0]) if item.grad is not None]
        learned = [item for norm in self.learning for item in (norm.gamma, norm.beta) if has_gradient(item)]
        return _Numbers(
            images[order],
            [np.concatenate([_in_numpy(items[i]) for items in outputs])[order] for i in self._kept],
            [np.concatenate([_in_numpy(items[i].grad) for items in given])[order] for i in has_gradients],
            [np.sum([array.asnumpy() for array in item.list_grad()], axis=0, dtype=np.float64) for item in learned],
            self._statistics(),
        )

    def _input(self, number: int, part: _Part) -> mx.nd.NDArray:
        like, values = self._inputs[number], self.batch[number][part.images]
        are_images = values.ndim > 2 and np.issubdtype(values.dtype, np.floating)  # and no labels, and no indices
        if are_images and self._changed:
            up = np.random.RandomState(number).uniform(size=values.shape) < 0.5
            values = np.nextafter(values, np.where(up, np.inf, -np.inf).astype(values.dtype))
        made = mx.nd.array(values, ctx=part.contexts[0], dtype=values.dtype).astype(like.dtype, copy=False)
        made = made.as_np_ndarray() if is_numpy_array(like) else made
        if are_images:
            made.attach_grad()
        return made

    def _weighted_sum(self, outputs: List[mx.nd.NDArray], part: _Part) -> mx.nd.NDArray:
        """Of all that depends on the images, each number with its own weight: a loss for any net."""
        sums = []
        for i in self._kept or ():
            out = outputs[i].as_nd_ndarray().astype("float32")
            drawn = np.random.RandomState(i).standard_normal((len(self.batch[0]), *out.shape[1:]))
            sums.append((out * mx.nd.array(drawn[part.images], ctx=part.contexts[0])).sum())
        return mx.nd.add_n(*sums)

    def _statistics(self) -> List[Dict[mx.Context, np.ndarray]]:
        found = []
        for norm in self.learning:
            pairs = zip(arrays_of(norm.running_mean), arrays_of(norm.running_var))
            found.append({device_of(mean): np.stack([mean.asnumpy(), var.asnumpy()]) for mean, var in pairs})
        return found


def _compare(passes: _Passes, norms: List[nn.BatchNorm]) -> Check:
    parts = passes.parts()
    expected = passes.on_one_device(parts) if parts else None
    again = passes.on_one_device(parts, -1) if parts else None
    before, found = passes.on_all_devices()
    result = Check(passes.title, passes.unit)
    learned = dict(zip(passes.learning, zip(before, found.statistics)))
    result.layers = [CheckedLayer(norm.name, *_state(norm, passes.contexts, learned.get(norm))) for norm in norms]
    if expected is not None and again is not None:
        both = _differences(found, expected), _differences(again, expected)
        result.differences = {name: Difference(both[0][name], both[1][name]) for name in both[0]}
        if any(item.usual > _RANDOM for item in result.differences.values()):
            result.notes.append("The net draws random numbers: two passes on one device differ, too.")
    else:
        result.notes.append("Not compared with one device: the groups are not the same devices of one process.")
    if not passes.have_same_weights():
        result.notes.append("The weights of the processes differ: see DistributedTrainer.broadcast_parameters.")
    return result


def _state(norm: nn.BatchNorm, contexts: List[mx.Context], learned) -> Tuple[str, str]:
    """The state of a layer, and with whom it synchronizes, or why it does not."""
    if learned is None:
        return ("not called", "") if arrays_of(norm.running_mean) == [] else ("frozen", "use_global_stats")
    before, after = learned
    if operator_options(norm)["momentum"] != 1 and all(np.array_equal(before[item], after[item]) for item in after):
        return "not called", ""
    sync = synchronization_of(norm)
    if sync is None:
        return "not synchronized", _CONVERT if is_plain(norm) else "its class has a forward pass of its own"
    group, groups = sync.process_group(), sync.groups()
    if sync.options.group_size == 1:
        return "not synchronized", "group_size=1"
    if group is None and len(contexts) == 1:
        return "not synchronized", f"the net is on one device, {contexts[0]}"
    if any(not np.array_equal(after[item], after[some[0]]) for some in groups for item in some):
        return "not synchronized", "its devices have different statistics"
    size = sync.options.group_size
    whom = "" if group is None else f" of {group.size} processes"
    return "synchronized", f"groups of {size} devices{whom}" if size else f"{', '.join(map(str, contexts))}{whom}"


def _differences(found: _Numbers, expected: _Numbers) -> Dict[str, float]:
    """How far the numbers are from those expected; the largest of what is of one kind."""
    rows = np.searchsorted(expected.images, found.images)
    shares: Dict[str, List[float]] = defaultdict(list)

    def compare(name: str, numbers: np.ndarray, right: np.ndarray, scale: Any = None) -> None:
        right = right.astype(np.float64)
        scale = np.sqrt(np.mean(right**2)) if scale is None else scale
        apart = (numbers.astype(np.float64) - right) / np.where(scale > 0, scale, 1.0)
        shares[name].append(float(np.sqrt(np.mean(apart**2))))

    for name, some, right in (("outputs", found.outputs, expected.outputs), (_INPUT, found.inputs, expected.inputs)):
        for item, its in zip(some, right):
            compare(name, item, its[rows])
    if expected.parameters:
        gradients = (np.concatenate(items) for items in (found.parameters, expected.parameters))
        compare("gradients of gamma and beta", *gradients)
    for layer, its_layer in zip(found.statistics, expected.statistics):
        for context, item in layer.items():
            its, var = its_layer[context], np.max(its_layer[context][1])
            compare("running statistics", item, its, np.array([[np.sqrt(var)], [var]]))
    return {name: float(np.max(items)) for name, items in shares.items()}
