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
   the communicator must make sets of processes that meet without the others (`needs_subsets`), nets are compared in the
   order of their numbers, where the program calls them, since all processes must make the sets in the same order.

Each of these is an exchange of all processes, and ends as any exchange does. It may have ended well on some processes
only: 1. finds out.
"""

import contextlib
import json
import logging
import os
import socket
import threading
from collections import defaultdict
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from gluon_syncbn.base import library
from gluon_syncbn.base.errors import SyncBatchNormError
from gluon_syncbn.distributed.default import groups_in_use
from gluon_syncbn.distributed.process_group import CommunicatorError, ExchangeError, ProcessGroup
from gluon_syncbn.layer.spec import TIMEOUT_VARIABLE, Facts, default_timeout, different_facts
from gluon_syncbn.meeting.positions import Nets, Place

HOST_MEMORY = "GLUON_SYNCBN_HOST_MEMORY"
# Processes wait for longer than the devices of one: for one that evaluates, or writes a file, while the others train.
DEFAULT_SECONDS = 600.0
_ORDER = "Every process must make the same nets, and first train them in the same order"
_log = logging.getLogger("gluon_syncbn")


def seconds_for_processes(timeout: Optional[float]) -> float:
    """How long processes wait for each other, if a layer has this ``timeout``."""
    if timeout is not None:
        return timeout
    return default_timeout() if TIMEOUT_VARIABLE in os.environ else DEFAULT_SECONDS


class Occasion(NamedTuple):
    """What all processes exchange together: the beginning of its errors, and how long they wait for each other."""

    group: ProcessGroup
    where: str
    seconds: float

    def gather(self, key: str, vector: np.ndarray) -> np.ndarray:
        """The vectors of all processes, in rank order; the n-th calls with this key belong together."""
        return self.group.all_gather(key, vector, self.where, self.seconds)

    def gather_each(self, key: str, vector: np.ndarray) -> List[np.ndarray]:
        """As `gather`, where the vectors may differ in length."""
        sizes = self.gather(f"{key}.size", np.array([vector.size], dtype=np.float64))[:, 0].astype(int)
        padded = np.zeros(sizes.max())
        padded[: vector.size] = vector
        return [row[:size] for row, size in zip(self.gather(key, padded), sizes)]

    def gather_json(self, key: str, value: Any) -> List[Any]:
        """The values of all processes, in rank order."""
        rows = self.gather_each(key, np.frombuffer(json.dumps(value).encode(), dtype=np.uint8))
        return [json.loads(row.astype(np.uint8).tobytes()) for row in rows]


class Processes:
    """The agreements of the processes of one group."""

    def __init__(self, group: ProcessGroup):
        self.group = group
        self.nets = Nets()
        self._why_no_memory = ""
        self._hosts: List[str] = []
        self._lock = threading.Lock()  # of `_net_locks`, `_layers` and `_seen`
        self._resume_lock = threading.Lock()  # of the thread that prepares 1. and 2.
        self._net_locks: Dict[str, threading.Lock] = defaultdict(threading.Lock)  # of the thread that compares a net
        self.in_order = threading.RLock()  # of the thread that has sets of processes made
        self._has_met = False  # 2. has ended here
        self.has_raised = False  # the error of the step, outside of layers
        self._compared: Dict[str, Sequence[Tuple[int, ...]]] = {}  # the subsets of each net
        self._layers: Dict[str, int] = defaultdict(int)  # how many have no place in a net, by name
        self._seen: Dict[str, Tuple[Sequence[Facts], List[str]]] = {}  # layers of nets, and their name in each process

    def way(self) -> str:
        """The way of their exchanges, and the reason for it, once they have met."""
        if not self.group.shares_memory:
            return f"through {self.group.name}, not through memory that they share. {self._why_no_memory}"
        within = "through memory that the processes share"
        several = len(set(self._hosts)) > 1
        return f"{within} within hosts, through {self.group.name} between them" if several else within

    @contextlib.contextmanager
    def together(
        self, where: str, timeout: Optional[float] = None, place: Optional[Place] = None
    ) -> Iterator[Occasion]:
        """Prepare exchanges of the layer at this place, or outside of layers. All processes do so together.

        Errors start with ``where``, and let the step fail in all processes. SyncBatchNormError if a process does not
        come within the timeout, or 600 s, if the net differs there, or if the step has been abandoned.
        """
        occasion = Occasion(self.group, where, seconds_for_processes(timeout))
        epoch = self.group.state.epoch
        try:
            self._prepare(place, occasion)
            yield occasion
        except ExchangeError as problem:
            self._fail(str(problem), epoch, place)  # as the core has done, if it could
            raise
        except (CommunicatorError, SyncBatchNormError) as problem:
            error = f"{where}: {problem}."
            self._fail(error, epoch, place)
            raise SyncBatchNormError(error) from None
        except BaseException as problem:  # as Ctrl-C: the others may go on
            self._fail(f"{where}: {problem!r}", epoch, place)
            raise

    def _fail(self, error: str, epoch: int, place: Optional[Place]) -> None:
        """Let the step fail, unless it has been abandoned since, by another thread."""
        if self.group.state.epoch == epoch:
            self.group.fail(error)
            self.has_raised = self.has_raised or place is None

    def knows(self, place: Place) -> bool:
        """Whether the processes have compared the net of this layer."""
        return place.net in self._compared

    def let_meet(self, active: Sequence[int], seconds: float) -> None:
        """Let these ranks, and those of each layer's groups that are among them, meet without the others."""
        if self.group.needs_subsets and 0 < len(active) < self.group.size:
            groups = [subset for net in sorted(self._compared) for subset in self._compared[net]]
            cut = [tuple(rank for rank in group if rank in active) for group in (range(self.group.size), *groups)]
            with self.in_order:
                self.group.add_subsets(list(dict.fromkeys(filter(None, cut))), seconds)

    def _prepare(self, place: Optional[Place], occasion: Occasion) -> None:
        with self._resume_lock:
            failure = self.group.failure
            if failure:
                raise SyncBatchNormError(
                    f"the step had failed before ({failure.rstrip('.')}). Call gluon_syncbn.abandon_step() before the "
                    f"next step"
                )
            if self.group.state.is_resuming:
                while self.group.state.is_resuming:  # it has abandoned several steps
                    self.group.resume(occasion.where, occasion.seconds)
                self._align(occasion)
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

    def _meet(self, occasion: Occasion) -> None:
        """Find out whether the processes of each host can share memory, and exchange through it from then on."""
        if self.group.shares_memory:  # all processes agreed on it, and then this one was interrupted
            return
        is_off = os.environ.get(HOST_MEMORY) == "0"
        mine = [socket.gethostname(), library.build(), f"{HOST_MEMORY}=0" if is_off else ""]
        hosts, builds, problems = zip(*occasion.gather_json("meet", mine))
        self._hosts = list(hosts)
        self.group.name_processes(self._hosts)
        near = [rank for rank, host in enumerate(hosts) if host == hosts[self.group.rank]]
        found = _first(problems)
        if len(set(hosts)) == len(hosts) or not self.group.can_resume:
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
            addresses, problems = zip(*occasion.gather_json("memory", offer))
            found = _first(problems)
        if found is None:
            problem = self.group.join_memory(addresses[near[0]], near)
            found = _first(occasion.gather_json("votes", problem))
        self.group.use_memory(found is None)
        if found is not None:
            self._why_no_memory = f"{self._name(found[0])}: {found[1]}"
            if self.group.rank == 0:
                _log.info("Processes exchange %s.", self.way())

    def _compare(self, place: Place, occasion: Occasion) -> None:
        """Compare the net of each process with the net of the first process."""
        mine = [place.kind, place.name, place.layers]
        kinds, names, lists = zip(*occasion.gather_json(f"{place.net}.layers", mine))
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
        with self._lock:
            self._check_names(place, list(names))
        if self.group.needs_subsets:
            with self.in_order:
                self.group.add_subsets(place.subsets, occasion.seconds)
        self._compared[place.net] = place.subsets

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

    def _align(self, occasion: Occasion) -> None:
        """Keep the agreements that all processes know of."""
        all_compared, have_met = zip(*occasion.gather_json("agreed", [list(self._compared), self._has_met]))
        self._has_met = all(have_met)
        agreed = set.intersection(*map(set, all_compared))
        self._compared = {net: subsets for net, subsets in self._compared.items() if net in agreed}
        self._seen = {net: seen for net, seen in self._seen.items() if net in agreed}

    def _name(self, rank: int) -> str:
        return f"process {rank} ({self._hosts[rank]})" if self._hosts else f"process {rank}"


def _first(texts: Sequence[str]) -> Optional[Tuple[int, str]]:
    """The rank of the first text that is not empty, and the text."""
    return next(((rank, text) for rank, text in enumerate(texts) if text), None)


def processes_of(group: ProcessGroup) -> Processes:
    """The agreements of this group, which all its layers share."""
    return vars(group).get("_agreements") or vars(group).setdefault("_agreements", Processes(group))


def _that_have_met() -> List[Processes]:
    return [processes_of(group) for group in groups_in_use() if "_agreements" in vars(group)]


def have_raised() -> bool:
    """Whether the step has failed outside of layers, as in an update, and the user has got the error."""
    return any(processes.has_raised for processes in _that_have_met())


def abandon_on_all_processes(is_under_way: bool, step: int) -> None:
    """As `ProcessGroup.abandon`, in all groups whose processes have met."""
    for processes in _that_have_met():
        processes.has_raised = False
        processes.group.abandon(is_under_way, step)
