"""The undocumented parts of MXNet that this package uses, in one place. Tried with MXNet 1.6.0 to 1.9.1.

`gluon_syncbn._hooks` lists the methods of MXNet's that are extended.
"""

import contextlib
import ctypes
import inspect
from collections import defaultdict
from typing import Any, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Tuple

import mxnet as mx
from mxnet.gluon import Block, HybridBlock, Parameter, nn
from mxnet.gluon import block as gluon_block
from mxnet.gluon.nn import basic_layers

from gluon_syncbn.base.library import LIBMXNET, check_call

# The base of all BatchNorm layers; before MXNet 1.8 there was only one.
PlainBatchNorm = getattr(basic_layers, "_BatchNorm", nn.BatchNorm)

# From nested lists of arrays to a flat list and the format, and back.
flatten, regroup = gluon_block._flatten, gluon_block._regroup

# The class of ``autograd.record()`` and ``pause()``.
RecordingScope = mx.autograd._RecordingStateScope


def trains(scope) -> bool:
    """Whether layers are in training mode within this `RecordingScope`."""
    return bool(scope._enter_train_mode)


def is_record(scope) -> bool:
    """Whether this `RecordingScope` is ``autograd.record()``."""
    return bool(scope._enter_is_record)


# Blocks


def operator_options(layer: Block) -> Dict[str, Any]:
    """The layer's own dict of its operator's arguments: axis, eps, momentum, fix_gamma, use_global_stats."""
    return layer._kwargs


def graph_of(block: HybridBlock) -> Tuple:
    """The inputs and the symbol of a hybridized block, or of a SymbolBlock; () before the first call."""
    return block._cached_graph


def make_graph(block: HybridBlock, *inputs: Any) -> Tuple:
    """As `graph_of`; MXNet makes the graph if there is none."""
    return block._get_graph(*inputs)


def set_graph(block: HybridBlock, graph: Tuple) -> None:
    block._cached_graph = graph


@contextlib.contextmanager
def exporting(block: HybridBlock, graph: Tuple) -> Iterator[None]:
    """Let ``export`` write this graph, with all of its parameters: a partitioned graph may have others."""
    inputs = graph[1].list_inputs()
    kept = kept_graph(block)
    block._cached_graph = graph
    if block._cached_op_args:  # else nothing has run, and they may have no shapes yet
        parameters = block.collect_params().items()
        block._cached_op_args = [(False, parameter) for name, parameter in parameters if name in inputs]
    try:
        yield
    finally:
        block._cached_graph, block._cached_op_args = kept


def drop_graph(block: HybridBlock) -> None:
    """Drop the graph; the next call makes another."""
    block._clear_cached_op()


def kept_graph(block: HybridBlock) -> Tuple:
    """The graph and the parameters of its operator, for `put_graph_back`."""
    return block._cached_graph, block._cached_op_args


def put_graph_back(block: HybridBlock, kept: Tuple) -> None:
    """Let the block have its former graph. The next call makes the operator that runs it."""
    block._cached_op = None
    block._cached_graph, block._cached_op_args = kept


def drop_operator(block: HybridBlock) -> None:
    """Drop the operator that runs the graph; the next call makes another of the same graph."""
    block._cached_op, block._cached_op_args = None, []


def find_shapes(block: HybridBlock, symbol: mx.sym.Symbol, arguments: Tuple) -> None:
    """Initialize parameters that wait for their shapes, in the order of the graph ``symbol``, of random draws."""
    parameters = block.collect_params()
    used = [parameters[name] for name in symbol.list_inputs() if name in parameters]
    if any(item._deferred_init for item in used):
        block._deferred_infer_shape(*arguments)
        for item in used:
            item._finish_deferred_init()


@contextlib.contextmanager
def without_graphs(blocks: List[HybridBlock]) -> Iterator[None]:
    """Let hybridized blocks call their children one by one, and keep their graphs."""
    active = [block for block in blocks if block._active]
    for block in active:
        block._active = False
    try:
        yield
    finally:
        for block in active:
            block._active = True


def has_operator(block: HybridBlock) -> bool:
    return block._cached_op is not None


def make_operator(block: HybridBlock, arguments: Tuple) -> None:
    """Make the graph, its operator, and parameters whose shapes show now, as the first call does."""
    block._build_cache(*arguments)


def is_static(block: HybridBlock) -> bool:
    """Whether it was hybridized with ``static_alloc`` and ``static_shape``."""
    flags = dict(block._flags)
    return bool(flags.get("static_alloc") and flags.get("static_shape"))


def names_within(block: Block) -> List[str]:
    """Names of all parameters by attribute (``features.0.weight``), which do not depend on blocks made before."""
    return list(block._collect_params_with_prefix())


def has_operator_hook(block: Block) -> bool:
    """Whether the user monitors the operators of the block's graph; since MXNet 1.7."""
    return getattr(block, "_callback", None) is not None


def has_partitioner(block: Block) -> bool:
    """Whether ``optimize_for`` or ``hybridize(backend=...)`` partitions the graph; since MXNet 1.7."""
    return bool(getattr(block, "_backend", None))


def set_name(block: Block, name: str) -> None:
    """Set the name, also within a ``name_scope()``, whose prefix would come on top."""
    block._prefix, block._name = name + "_", name


def set_dropout(block: nn.Dropout, rate: float) -> float:
    """Set the rate of a Dropout, and return the former rate."""
    before, block._rate = block._rate, rate
    return before


def set_parameter(block: Block, attribute: str, parameter: Parameter) -> None:
    """Replace a parameter that the block has made for itself."""
    del block._reg_params[attribute]
    setattr(block, attribute, parameter)


def unique_name(name: Optional[str], hint: str) -> str:
    """The name that MXNet gives a symbol that is made now."""
    return mx.name.NameManager._current.value.get(name, hint)


# MXNet 1.6 never removes casts here.
_AS_IT_IS = (
    {"remove_amp_cast": False} if "remove_amp_cast" in inspect.signature(mx.sym.Symbol.tojson).parameters else {}
)


def json_of(symbol: mx.sym.Symbol) -> str:
    """The whole symbol. `Symbol.tojson` removes the casts of AMP, in a copy that MXNet never frees."""
    return symbol.tojson(**_AS_IT_IS)


def set_attributes(symbol: mx.sym.Symbol, attributes: Dict[str, str]) -> None:
    symbol._set_attr(**attributes)


def is_numpy(symbol: mx.sym.Symbol) -> bool:
    """Whether it is of MXNet's NumPy interface."""
    return isinstance(symbol, mx.sym.numpy._Symbol)


# Parameters and arrays


def device_of(array: mx.nd.NDArray) -> mx.Context:
    """Its context. MXNet 1.6 has no ``ctx``, and mx.np's arrays warn of ``context``."""
    return array.ctx if hasattr(array, "ctx") else array.context


def device_of_handle(handle: int) -> mx.Context:
    """The context of an array that MXNet's library knows by this handle."""
    kind, number = ctypes.c_int(), ctypes.c_int()
    check_call(LIBMXNET.MXNDArrayGetContext(ctypes.c_void_p(handle), ctypes.byref(kind), ctypes.byref(number)))
    return mx.Context(mx.Context.devtype2str[kind.value], number.value)


def contexts_of(parameter: Parameter) -> List[mx.Context]:
    """The contexts in rank order; none before ``initialize``."""
    initialized = parameter._data is not None or parameter._deferred_init
    return parameter.list_ctx() if initialized else []


def context_list(parameter: Parameter) -> Optional[List[mx.Context]]:
    return parameter._ctx_list


def array_list(parameter: Parameter) -> Optional[List[mx.nd.NDArray]]:
    """Another object whenever the parameter is initialized, moved or cast."""
    return parameter._data


def is_deferred(parameter: Parameter) -> bool:
    return bool(parameter._deferred_init)


@contextlib.contextmanager
def on_copies(parameters: Iterable[Parameter], contexts: List[mx.Context]) -> Iterator[None]:
    """Let parameters have copies of their first arrays on these contexts, with other gradients, for a while."""
    names = ("_data", "_grad", "_ctx_list", "_ctx_map")
    kept = [(item, [getattr(item, name) for name in names]) for item in parameters if item._data is not None]
    try:
        with mx.autograd.pause():
            for parameter, _ in kept:
                parameter._init_impl(parameter._data[0], contexts)
        yield
    finally:
        for parameter, own in kept:
            for name, value in zip(names, own):
                setattr(parameter, name, value)


def arrays_of(parameter: Parameter) -> List[mx.nd.NDArray]:
    """One per context; none before ``initialize``."""
    return list(parameter._data or ())


def is_sparse(parameter: Parameter) -> bool:
    return parameter._stype != "default" or parameter._grad_stype != "default"


def has_gradient(parameter: Parameter) -> bool:
    return parameter.grad_req != "null" and parameter._grad is not None


def has_fresh_gradient(array: mx.nd.NDArray) -> bool:
    """Whether a backward pass has written the gradient of this Parameter's array since Trainer has used it."""
    return array._fresh_grad


def set_fresh_gradient(array: mx.nd.NDArray, is_fresh: bool) -> None:
    """MXNetError for an array of which autograd does not know."""
    array._fresh_grad = is_fresh


# Trainers and Modules


def parameters_of(trainer: mx.gluon.Trainer) -> List[Parameter]:
    return trainer._params


def optimizer_of(trainer) -> mx.optimizer.Optimizer:
    return trainer._optimizer


def is_first_update(trainer: mx.gluon.Trainer) -> bool:
    """Whether it is about to copy parameters into its KVStore."""
    return not trainer._kv_initialized or any(not item._deferred_init for item in trainer._params_to_init)


class Update(NamedTuple):
    """Arrays that an optimizer updates together or not at all: of one parameter, or of several."""

    keys: List[Any]  # in the optimizer: its number or name, for a Module also a number for each device
    gradients: List[mx.nd.NDArray]
    written: List[mx.nd.NDArray]  # its weights, and the arrays in the state of the optimizer


def joined(updates: List[Update]) -> List[Update]:
    """All of them as one; none if there is none."""
    return [Update(*([one for some in field for one in some] for field in zip(*updates)))] if updates else []


def updates_of(parameters: Iterable[Parameter], states: Mapping[Any, List[mx.nd.NDArray]] = {}) -> List[Update]:
    """One for each parameter that learns, on all devices; the key is its number."""
    learning = [(i, item) for i, item in enumerate(parameters) if has_gradient(item)]
    return [Update([i], list(item._grad), [*arrays_of(item), *states.get(i, ())]) for i, item in learning]


def updates_of_trainer(trainer: mx.gluon.Trainer) -> List[Update]:
    return updates_of(trainer._params, _states_of(trainer))


def _states_of(trainer) -> Dict[Any, List[mx.nd.NDArray]]:
    """The arrays in the state of the optimizer of a Trainer or a Module, by key. In MXNet's own optimizers no state is
    a view of another."""
    found: Dict[Any, List[mx.nd.NDArray]] = defaultdict(list)
    is_known = type(trainer._optimizer).__module__.startswith("mxnet.")
    for updater in updaters_of(trainer) if is_known else ():
        for key, state in updater.states.items():
            found[key] += _arrays_in(state)
    return found


def updaters_of(trainer) -> List[mx.optimizer.Updater]:
    """The updaters that have the states of the optimizer of a Trainer or a Module: its KVStore's, or its own."""
    if trainer._update_on_kvstore:
        updaters = [getattr(trainer._kvstore, "_updater", None)]
    else:
        updaters = trainer._updaters if isinstance(trainer, mx.gluon.Trainer) else [trainer._updater]
    return [updater for updater in updaters or () if isinstance(updater, mx.optimizer.Updater)]


def _arrays_in(state) -> List[mx.nd.NDArray]:
    """All arrays in nested lists, tuples and dicts."""
    if isinstance(state, mx.nd.NDArray):
        return [state]
    if isinstance(state, dict):
        state = state.values()
    elif not isinstance(state, (list, tuple)):
        return []
    return [array for item in state for array in _arrays_in(item)]


def is_for_one_process(trainer: mx.gluon.Trainer) -> bool:
    """Whether it adds up no gradients of other processes: neither itself, nor its KVStore or Horovod's optimizer."""
    kvstore = trainer._kvstore_params["kvstore"]
    name = kvstore.type if isinstance(kvstore, mx.kvstore.KVStore) else kvstore
    if getattr(trainer, "is_alone", False):  # of `gluon_syncbn.DistributedTrainer`
        return True
    return (
        type(trainer)._allreduce_grads is mx.gluon.Trainer._allreduce_grads
        and (name is None or (isinstance(name, str) and "dist" not in name and name != "horovod"))
        and not any(base.__module__.startswith("horovod") for base in type(trainer._optimizer).__mro__)
    )


def reduces_gradients(trainer: mx.gluon.Trainer) -> bool:
    """Whether it adds them up over devices, or processes, before it updates."""
    return trainer._kvstore is not None or type(trainer)._allreduce_grads is not mx.gluon.Trainer._allreduce_grads


def updates_of_module(module: mx.mod.Module) -> List[Update]:
    """One for each parameter that learns; one for all where there is no KVStore, as for a Trainer."""
    group, count, states = module._exec_group, len(contexts_of_module(module)), _states_of(module)
    found = []
    for i, (name, gradients, weights) in enumerate(zip(group.param_names, group.grad_arrays, group.param_arrays)):
        keys = [name, *range(i * count, (i + 1) * count)]
        written = _arrays_in([weights, *(states[key] for key in keys if key in states)])
        found.append(Update(keys, _arrays_in(gradients), written))
    found = [item for item in found if item.gradients]
    return found if module._kvstore else joined(found)


def added_gradients_of_module(module: mx.mod.Module) -> List[mx.nd.NDArray]:
    """The gradients of its parameters with the grad_req 'add', on all devices."""
    group = module._exec_group
    named = zip(group.param_names, group.grad_arrays) if group is not None else ()
    return [array for name, some in named if group.grad_req.get(name) == "add" for array in _arrays_in(some)]


def contexts_of_module(module: mx.mod.Module) -> List[mx.Context]:
    return module._context


def outputs_of_module(module: mx.mod.Module) -> List[List[mx.nd.NDArray]]:
    return [execution.outputs for execution in module._exec_group.execs]


# Custom operators and KVStores


def last_registered_operator() -> ctypes.c_void_p:
    """The creator of the custom operator that Python has registered last. MXNet's table keeps it alive."""
    creators = mx.operator._registry.ref_holder
    return ctypes.cast(creators[max(creators)], ctypes.c_void_p)


def has_optimizer(store: mx.kv.KVStore) -> bool:
    return store._updater is not None
