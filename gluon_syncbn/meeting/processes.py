"""Agreements of the processes of a job, before their first exchange and again after they have abandoned a step.

The compiled core makes the exchanges, and ends them if a process does not come (csrc/processes/processes.h). Before the
first exchange of each channel, and the first after an abandoned step, the core asks Python to prepare it, on a thread
that may wait. Python does this, in this order:

1. After an abandoned step, wait until all processes have abandoned it, and keep the agreements that all have made.
2. Find out whether the processes of each host can exchange through memory that they share. All do, or none. Hosts then
   exchange with each other by leaders, where a message can go to one process alone.
3. Compare the net of the layer: its class, the names of its parameters within it, and its layers with their channels,
   dtypes and options. Nets have numbers, in the order in which they first train. Their first rounds may come in another
   order on each process, so several nets are compared at once, and a thread holds only the lock of its net. But where
   the communicator must make sets of processes that meet without the others (`needs_subsets`), they are made net after
   net, in the order of numbers, since all processes may have to make them in the same order.

Each of these is an exchange of all processes, and ends as any exchange does. It may have ended well on some processes
only: 1. finds out.
"""

import contextlib
import json
import logging
import os
import socket
import threading
import time
import weakref
from collections import defaultdict
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple

import numpy as np

from gluon_syncbn.base import library
from gluon_syncbn.base.errors import SyncBatchNormError
from gluon_syncbn.distributed.process_group import CommunicatorError, ExchangeError, ProcessGroup
from gluon_syncbn.layer.spec import Facts, different_facts
from gluon_syncbn.meeting import waiting
from gluon_syncbn.meeting.positions import Place

FORWARD, BACKWARD = "forward", "backward"
HOST_MEMORY = "GLUON_SYNCBN_HOST_MEMORY"
_ORDER = "Every process must make the same nets, and first train them in the same order"
_log = logging.getLogger("gluon_syncbn")


class _Occasion(NamedTuple):
    """The cause of an exchange: the beginning of its errors, and how long the processes wait for each other."""

    where: str
    seconds: float


class Processes:
    """The agreements of the processes of one group."""

    def __init__(self, group: ProcessGroup):
        self.group = group
        self._why_no_memory = ""
        self._hosts: List[str] = []
        self._lock = threading.Lock()  # of `_net_locks` and `_layers`
        self._resume_lock = threading.Lock()  # of the thread that prepares 1. and 2.
        self._net_locks: Dict[str, threading.Lock] = defaultdict(threading.Lock)  # of the thread that compares a net
        self._subset_order = threading.Condition()
        self._awaited_subsets: List[str] = []  # nets that have trained and have subsets, until these are made
        self._has_met = False  # 2. has ended here
        self._compared: Set[str] = set()  # nets
        self._layers: Dict[str, int] = defaultdict(int)  # how many have no place in a net, by name
        self._seen: Dict[str, Tuple[Sequence[Facts], List[str]]] = {}  # layers of nets, and their name in each process

    def way(self) -> str:
        """The way of their exchanges, and the reason for it, once they have met."""
        if not self.group.shares_memory:
            return f"through {self.group.name}, not through memory that they share. {self._why_no_memory}"
        within = "through memory that the processes share"
        several = len(set(self._hosts)) > 1
        return f"{within} within hosts, through {self.group.name} between them" if several else within

    # All processes call the next five together. Errors start with ``where``. SyncBatchNormError if a process does not
    # come within so many seconds, if the net differs there, or if the step has been abandoned.

    def prepare(self, where: str, place: Optional[Place], seconds: float) -> None:
        """Let exchanges of the layer at this place, or outside of layers, begin."""
        with self._exchanging(where, place, seconds):
            pass

    def gather(self, where: str, key: str, vector: np.ndarray, seconds: float) -> np.ndarray:
        """The vectors of all processes, in rank order; the n-th calls with this key belong together."""
        with self._exchanging(where, None, seconds) as occasion:
            return self._gather(key, vector, occasion)

    def gather_each(self, where: str, key: str, vector: np.ndarray, seconds: float) -> List[np.ndarray]:
        """As `gather`, where the vectors may differ in length."""
        with self._exchanging(where, None, seconds) as occasion:
            return self._gather_each(key, vector, occasion)

    def catch_up(
        self, where: str, layers: Dict[str, int], vector: np.ndarray, seconds: float
    ) -> Tuple[List[Dict[str, int]], List[np.ndarray]]:
        """Let all processes number rounds alike from here on, after rounds of some of them.

        ``layers`` has the channels of each layer by its key. Returns the layers of each process, and its vector, of any
        length.
        """
        with self._exchanging(where, None, seconds) as occasion:
            told = self._gather_json("catch_up", [self.group.state.highest_round, layers], occasion)
            rows = self._gather_each("catch_up.rows", vector, occasion)
        self.group.go_to_round(max(highest for highest, _ in told) + 1)
        return [theirs for _, theirs in told], rows

    def find_active(self, where: str, num_devices: int, seconds: float) -> List[int]:
        """The ranks that have devices now. They can meet without the others from here on."""
        with self._exchanging(where, None, seconds) as occasion:
            counts = self._gather("active", np.array([num_devices], dtype=np.float64), occasion)[:, 0]
            active = counts.nonzero()[0].tolist()
            if active and len(active) < self.group.size and self.group.needs_subsets:
                self.group.add_subsets([tuple(active)], seconds)
        return active

    @contextlib.contextmanager
    def _exchanging(self, where: str, place: Optional[Place], seconds: float) -> Iterator[_Occasion]:
        """Prepare exchanges of a layer, or outside of layers. An error lets the step fail in all processes."""
        occasion = _Occasion(where, seconds)
        try:
            self._prepare(place, occasion)
            yield occasion
        except ExchangeError as problem:
            self.group.fail(str(problem))  # as the core has done, if it could
            raise
        except (CommunicatorError, SyncBatchNormError) as problem:
            error = f"{where}: {problem}."
            self.group.fail(error)
            raise SyncBatchNormError(error) from None
        except BaseException as problem:  # as Ctrl-C: the others may go on
            self.group.fail(f"{where}: {problem!r}")
            raise

    def _prepare(self, place: Optional[Place], occasion: _Occasion) -> None:
        with self._resume_lock:
            failure = self.group.failure
            if failure:
                raise SyncBatchNormError(
                    f"the step had failed before ({failure.rstrip('.')}). Call gluon_syncbn.abandon_step() before the "
                    f"next step"
                )
            if self.group.state.is_resuming:
                self.group.resume(occasion.where, occasion.seconds)
                self._align(occasion)
                with self._subset_order:
                    self._awaited_subsets.clear()  # some of these nets may never come
            if not self._has_met:
                self._meet(occasion)
                self._has_met = True
        if place is None:
            return
        with self._lock:
            lock = self._net_locks[place.net]
        with lock:
            if place.net not in self._compared:
                self._compare(place, occasion)

    def _meet(self, occasion: _Occasion) -> None:
        """Find out whether the processes of each host can share memory, and exchange through it from then on."""
        if self.group.shares_memory:  # all processes agreed on it, and then this one was interrupted
            return
        is_off = os.environ.get(HOST_MEMORY) == "0"
        mine = [socket.gethostname(), library.build(), f"{HOST_MEMORY}=0" if is_off else ""]
        hosts, builds, problems = zip(*self._gather_json("meet", mine, occasion))
        self._hosts = list(hosts)
        self.group.name_processes(self._hosts)
        near = [rank for rank, host in enumerate(hosts) if host == hosts[self.group.rank]]
        found = _first(problems)
        if len(set(hosts)) == len(hosts) or not self.group.sends_to_each:
            found = found or _first(["it is on another host" if host != hosts[0] else "" for host in hosts])
        for rank, build in enumerate(builds) if found is None else ():
            first = hosts.index(hosts[rank])
            if build != builds[first]:
                raise SyncBatchNormError(
                    f"the builds of gluon_syncbn differ: {self._name(first)} has {builds[first]}, "
                    f"{self._name(rank)} has {build}. Install the same in all processes"
                )
        found = found or _first([f"it has another build, {build}" if build != builds[0] else "" for build in builds])
        if found is None:  # several containers may have the same name
            offer = self.group.offer_memory(len(near)) if self.group.rank == near[0] else ("", "")
            addresses, problems = zip(*self._gather_json("memory", offer, occasion))
            found = _first(problems)
        if found is None:
            problem = self.group.join_memory(addresses[near[0]], near)
            found = _first(self._gather_json("votes", problem, occasion))
        self.group.use_memory(found is None)
        if found is not None:
            self._why_no_memory = f"{self._name(found[0])}: {found[1]}"
            if self.group.rank == 0:
                _log.info("Processes exchange %s.", self.way())

    def _compare(self, place: Place, occasion: _Occasion) -> None:
        """Compare the net of each process with the net of the first process."""
        mine = [place.kind, place.name, place.layers]
        kinds, names, lists = zip(*self._gather_json(f"{place.net}.layers", mine, occasion))
        first = lists[0]
        for rank, layers in enumerate(lists):
            if len(layers) != len(first):
                raise SyncBatchNormError(
                    f"the nets differ: {self._name(0)} has {len(first)} synchronized layers, {self._name(rank)} has "
                    f"{len(layers)}. {_ORDER}"
                )
            for number, (theirs, expected) in enumerate(zip(layers, first)):
                different = different_facts(theirs, expected)
                if different:
                    here, there = (
                        f"'{facts['name']}' has " + ", ".join(f"{key}={facts.get(key)!r}" for key in different)
                        for facts in (expected, theirs)
                    )
                    raise SyncBatchNormError(
                        f"layer {number + 1} of {len(first)} differs: {here} in {self._name(0)}, {there} in "
                        f"{self._name(rank)}. {_ORDER}"
                    )
            if kinds[rank] != kinds[0]:
                raise SyncBatchNormError(
                    f"the nets differ: '{names[0]}' is a {kinds[0]} in {self._name(0)}, '{names[rank]}' a "
                    f"{kinds[rank]} in {self._name(rank)}. {_ORDER}"
                )
        self._check_names(place, list(names))
        self._make_subsets(place, occasion)

    def _check_names(self, place: Place, names: List[str]) -> None:
        """Refuse nets that are alike and train in another order, as their names show.

        Gluon counts names in each process, so one net may be 'dense3' here and 'dense4' there. But two processes that
        have trained nets of the same names must have done so in the same order.
        """
        kinds = [{**facts, "name": ""} for facts in place.layers]
        alike = [seen for others, seen in self._seen.values() if [{**facts, "name": ""} for facts in others] == kinds]
        orders = list(zip(*alike, names))  # of each process, the names in the order in which they have trained
        for rank, order in enumerate(orders):
            if order != orders[0] and sorted(order) == sorted(orders[0]):
                mine, theirs = (", ".join(map(repr, names)) for names in (orders[0], order))
                raise SyncBatchNormError(
                    f"nets that are alike have changed places: {self._name(0)} has trained {mine}, and "
                    f"{self._name(rank)} {theirs}. {_ORDER}; give each the same prefix= in all of them"
                )
        self._seen[place.net] = place.layers, names

    def count_layers(self, name: str) -> int:
        """How many layers of this name, without a place in a net, came before this one."""
        with self._lock:
            self._layers[name] += 1
            return self._layers[name] - 1

    def _align(self, occasion: _Occasion) -> None:
        """Keep the agreements that all processes know of."""
        all_compared, have_met = zip(*self._gather_json("agreed", [list(self._compared), self._has_met], occasion))
        self._has_met = all(have_met)
        self._compared.intersection_update(*all_compared)
        for net in self._seen.keys() - self._compared:
            del self._seen[net]

    def announce_subsets(self, net: str) -> None:
        """Note that a layer of this net, which has subsets, is about to train. All processes do so in one order."""
        with self._subset_order:
            if net not in self._compared and net not in self._awaited_subsets:
                self._awaited_subsets.append(net)

    def _make_subsets(self, place: Place, occasion: _Occasion) -> None:
        """Make the subsets of a net, after the subsets of nets that were announced before."""
        awaited = self._awaited_subsets
        with self._subset_order:
            if self.group.needs_subsets:
                waited = waiting.wait(
                    self._subset_order,
                    time.monotonic(),
                    occasion.seconds,
                    lambda: place.net not in awaited or awaited[0] == place.net,
                )
                if waited is not None:
                    raise SyncBatchNormError(waited.text("another net to be compared"))
                self.group.add_subsets(place.subsets, occasion.seconds)
            self._compared.add(place.net)
            if place.net in awaited:
                awaited.remove(place.net)
            self._subset_order.notify_all()

    def _gather_json(self, key: str, value: Any, occasion: _Occasion) -> List[Any]:
        """The values of all processes, in rank order."""
        rows = self._gather_each(key, np.frombuffer(json.dumps(value).encode(), dtype=np.uint8), occasion)
        return [json.loads(row.astype(np.uint8).tobytes()) for row in rows]

    def _gather_each(self, key: str, vector: np.ndarray, occasion: _Occasion) -> List[np.ndarray]:
        """The vectors of all processes, which may differ in length."""
        sizes = self._gather(f"{key}.size", np.array([vector.size], dtype=np.float64), occasion)[:, 0].astype(int)
        padded = np.zeros(sizes.max())
        padded[: vector.size] = vector
        return [row[:size] for row, size in zip(self._gather(key, padded, occasion), sizes)]

    def _gather(self, key: str, vector: np.ndarray, occasion: _Occasion) -> np.ndarray:
        return self.group.all_gather(key, vector, occasion.where, occasion.seconds)

    def _name(self, rank: int) -> str:
        return f"process {rank} ({self._hosts[rank]})" if self._hosts else f"process {rank}"


def _first(texts: Sequence[str]) -> Optional[Tuple[int, str]]:
    """The rank of the first text that is not empty, and the text."""
    return next(((rank, text) for rank, text in enumerate(texts) if text), None)


_all: "weakref.WeakKeyDictionary[ProcessGroup, Processes]" = weakref.WeakKeyDictionary()
_all_lock = threading.Lock()


def processes_of(group: ProcessGroup) -> Processes:
    """The agreements of this group, which all its layers share."""
    with _all_lock:
        if group not in _all:
            _all[group] = Processes(group)
        return _all[group]


def abandon_on_all_processes(is_under_way: bool) -> None:
    """Abandon the step, so that no process waits for this one."""
    with _all_lock:
        groups = list(_all)
    for group in groups:
        group.abandon(is_under_way)
