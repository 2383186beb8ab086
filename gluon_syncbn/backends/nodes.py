"""Makes the node of a layer in a graph: plain, plain for now, open, or synchronized (`layer.decision`)."""

from typing import Any, Dict, Optional, Sequence, Tuple

import mxnet as mx

from gluon_syncbn.backends.bfloat16 import widened
from gluon_syncbn.backends.choose import choose
from gluon_syncbn.backends.interface import GroupReference, NodeOptions
from gluon_syncbn.graphs.norms import mark
from gluon_syncbn.layer.decision import Site, Way, check_groups, decide
from gluon_syncbn.layer.spec import LayerSpec


def make_symbol(
    spec: LayerSpec, inputs: Sequence[mx.sym.Symbol], node: NodeOptions, is_loaded: bool = False
) -> Tuple[mx.sym.Symbol, Any]:
    """The last node of a layer that no block owns, and its order token, or None.

    Parameters
    ----------
    spec : LayerSpec
        It has been checked.
    inputs : five Symbols
        x, gamma, beta, running mean and running variance.
    node : NodeOptions
    is_loaded : bool
        The symbol comes from a file (`decide`).

    Raises
    ------
    TypeError, ValueError, RuntimeError
        A symbol cannot have these options, or cannot run with them here.
    """
    spec.check_names()
    spec.check_engine(spec.num_devices)
    if not is_loaded:
        check_groups(spec, spec.num_devices)
    return make_node(decide(spec, [], Site.SYMBOL, is_loaded), spec, inputs, node)


def make_node(
    way: Way,
    spec: LayerSpec,
    inputs: Sequence[mx.sym.Symbol],
    node: NodeOptions,
) -> Tuple[mx.sym.Symbol, Any]:
    """The last node of a layer that has no group, and its order token, or None."""
    if way is Way.OPEN:
        devices = [mx.gpu(0)] if mx.context.num_gpus() else []
        reference = GroupReference(spec.check_names().to_json())
        node = node._replace(num_devices=spec.num_devices)
        return choose(spec, devices).backend.normalize(mx.sym, inputs, spec, reference, node)
    hidden = dict(node.hidden or {})
    if way is Way.PLAIN_FOR_NOW:
        hidden.update(mark(spec.check_names().but(activation=None), is_plain=True))
    x, lowered = widened(mx.sym, inputs[0], node.dtypes)
    return lowered(plain_node(spec, [x, *inputs[1:]], node.name, hidden)), None


def plain_node(
    spec: LayerSpec, inputs: Sequence[mx.sym.Symbol], name: str, hidden: Optional[Dict[str, str]]
) -> mx.sym.Symbol:
    """``mx.sym.BatchNorm``, and a ReLU after it if the layer has one."""
    options = {"axis": spec.axis, "eps": spec.epsilon, "momentum": spec.momentum, "fix_gamma": not spec.scale}
    options["use_global_stats"] = spec.use_global_stats
    out = mx.sym.BatchNorm(*inputs, name=name, attr=hidden or None, **options)
    return mx.sym.relu(out, name=f"{name}_relu") if spec.activation == "relu" else out
