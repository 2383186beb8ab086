"""The graph of a symbol, to be edited: nodes, their readers, and their replacement.

A symbol is edited as the JSON text that MXNet itself writes and reads, so that every other node keeps its name, its
attributes and its place, of any operator. Nodes without a reader are left out in the end: MXNet would set up every node
of the text, also one whose layer is gone.
"""

import json
from collections import defaultdict
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple, Union

import mxnet as mx

from gluon_syncbn.base.mxnet_private import is_numpy, json_of


class Node:
    """An operator, or a variable (``op`` is 'null')."""

    def __init__(self, op: str, name: str, attrs: Dict[str, str], inputs: Sequence["Entry"] = ()):
        self.op = op
        self.name = name
        self.attrs = dict(attrs)
        self.inputs = list(inputs)
        self.control_deps: List[Node] = []  # nodes that must run before
        self.more: Dict[str, Any] = {}  # the bodies of a loop or branch, and other keys of MXNet's text

    @property
    def is_variable(self) -> bool:
        return self.op == "null"


class Entry(NamedTuple):
    """An output of a node."""

    node: Node
    output: int = 0
    version: int = 0


class Kind(NamedTuple):
    """A kind of graph that runs: with ``static_alloc`` and ``static_shape``; for a partitioner, which takes it apart;
    with fusion, and with fusion of sums, by which the graph's inputs may change places."""

    is_static: bool = False
    is_partitioned: bool = False
    fuses: bool = True
    fuses_sums: bool = True


Readers = Dict[Tuple[Node, int], List[Optional[Node]]]  # None: the user reads an output of the graph


class Graph:
    """A symbol that is parsed.

    Parameters
    ----------
    source : Symbol or dict
        A symbol stays as it is. A dict is the body of a loop or branch, and is used up.
    """

    def __init__(self, source: Union[mx.sym.Symbol, Dict[str, Any]]):
        self.is_numpy = is_numpy(source)
        text = source if isinstance(source, dict) else json.loads(json_of(source))
        self._attrs: Dict[str, Any] = text.get("attrs", {})
        self.nodes: List[Node] = []  # inputs first
        for item in text["nodes"]:
            inputs = [self._entry(entry) for entry in item.pop("inputs")]
            node = Node(item.pop("op"), item.pop("name"), item.pop("attrs", {}), inputs)
            node.control_deps = [self.nodes[index] for index in item.pop("control_deps", ())]
            node.more = item
            self.nodes.append(node)
        self.heads = [self._entry(entry) for entry in text["heads"]]

    def _entry(self, entry) -> Entry:
        return Entry(self.nodes[entry[0]], *entry[1:])

    def readers(self) -> Readers:
        """The readers of each output."""
        found: Readers = defaultdict(list)
        for node in self.nodes:
            for entry in node.inputs:
                found[entry.node, entry.output].append(node)
        for entry in self.heads:
            found[entry.node, entry.output].append(None)
        return found

    def replace(self, replaced: Dict[Node, Entry]) -> None:
        """Let all readers of the first output of these nodes read these entries instead."""

        def new(entry: Entry) -> Entry:
            while entry.node in replaced:
                entry = replaced[entry.node]
            return entry

        for node in in_order([entry.node for entry in [*self.heads, *replaced.values()]]):
            node.inputs = [new(entry) for entry in node.inputs]
            node.control_deps = [new(Entry(other)).node for other in node.control_deps]
        self.heads = [new(entry) for entry in self.heads]
        self.nodes = in_order(entry.node for entry in self.heads)

    def inputs(self) -> List[str]:
        """The names of its variables, in the order in which a symbol lists them."""
        return [node.name for node in self.nodes if node.is_variable]

    def symbol(self) -> mx.sym.Symbol:
        """Make a symbol of the graph as it is now."""
        made = mx.sym.load_json(json.dumps(self.text()))
        return made.as_np_ndarray() if self.is_numpy else made

    def text(self) -> Dict[str, Any]:
        """The graph as it is now, as MXNet writes it."""
        index = {node: number for number, node in enumerate(self.nodes)}

        def listed(entries: Sequence[Entry]):
            return [[index[entry.node], entry.output, entry.version] for entry in entries]

        nodes = []
        for node in self.nodes:
            item = {**node.more, "op": node.op, "name": node.name, "attrs": node.attrs, "inputs": listed(node.inputs)}
            item["control_deps"] = [index[other] for other in node.control_deps]
            nodes.append(item)
        arguments = [number for number, node in enumerate(self.nodes) if node.is_variable]
        return {"nodes": nodes, "arg_nodes": arguments, "heads": listed(self.heads), "attrs": self._attrs}


class Names(mx.name.NameManager):
    """For a small symbol: given names stay as they are, without the prefix of a block that is being traced; others
    begin with ``prefix``."""

    def __init__(self, prefix: str):
        super().__init__()
        self._prefix = prefix

    def get(self, name, hint):
        return name or f"{self._prefix}_{super().get(None, hint)}"


def inserted(fragment: mx.sym.Symbol, inputs: Dict[str, Entry]) -> List[Entry]:
    """The outputs of a small symbol, as parts of a graph: its variables are these entries of the graph.

    The casts that MXNet's functions put everywhere after ``amp.init()`` are taken out; the graph has the needed ones.
    """
    small = Graph(fragment)
    replaced = {node: inputs[node.name] for node in small.nodes if node.is_variable}
    small.replace({**replaced, **{node: node.inputs[0] for node in small.nodes if node.op == "amp_cast"}})
    return small.heads


def in_order(nodes: Iterable[Node]) -> List[Node]:
    """These nodes and all nodes that must run before them, inputs first, in MXNet's order."""
    done: Dict[Node, None] = {}
    for last in nodes:
        waiting = [last]
        while waiting:
            node = waiting[-1]
            before = [entry.node for entry in node.inputs] + node.control_deps
            missing = next((other for other in before if other not in done), None)
            if missing is not None:
                waiting.append(missing)
            else:
                done.setdefault(waiting.pop())
    return list(done)
