"""The meeting of processes: when all devices of one have come to a layer, what they have brought is exchanged here.

Who waits for whom
------------------
Within a process the devices of a layer meet in memory (`rendezvous`). What they brought is merged into one vector, and
exchanged here with those of the other processes: on the portable back end by the last to arrive, while the others
sleep; on the compiled one by a thread of the round. Every process gets one row per process, in rank order, and reduces
them alike: the same bits everywhere.

A round across processes has a key (which layer of which net, which of its groups, which direction) and a number.
Forward passes of a layer are numbered as they come, and backward passes have the number of the forward pass that they
answer. A process is in one of three states:

``open``
    Rounds are exchanged. Each wait ends when the last process comes; when the timeout, or less (`waiting`), is over;
    or when a process that is missing has ended or given the step up.
``failed``
    A round has failed, here or among the devices of this process. Every further round fails at once, with the same
    text, until `abandon_step` is called. The other processes learn of it where they wait.
``resuming``
    `abandon_step` was called after a failure, or in the middle of a step. The next round first waits until all
    processes have done so; then all of them number their rounds from the same number on, so that nothing of the old
    step can be taken for a part of the new one.

Before a net's first round the processes compare it: its class, the names of its parameters within it, and its layers
with their channels, dtypes and options. Nets have numbers, in the order in which they first train. Their first rounds
may come in another order on each process, so a net is compared while others wait for the same. Nothing is held
meanwhile but the lock of that net. Only sets of processes that meet without the others are made one net after the
other, in the order of numbers, since a communicator may have to make them in one order on all processes.
"""

import contextlib
import json
import socket
import threading
import weakref
from collections import defaultdict
from typing import Any, Dict, Iterator, List, Optional, Sequence, Set, Tuple

import numpy as np

from gluon_syncbn.base.errors import SyncBatchNormError
from gluon_syncbn.distributed.process_group import CommunicatorError, MissingProcesses, ProcessGroup
from gluon_syncbn.layer.spec import agree, without_name
from gluon_syncbn.meeting.pairs import reduce_in_pairs
from gluon_syncbn.meeting.positions import Place
from gluon_syncbn.meeting.statistics import add_ranks, merge
from gluon_syncbn.meeting.waiting import Wait, listed_reasons

FORWARD, BACKWARD = "forward", "backward"
# More processes than these meet in pairs, where the communicator can; and on several hosts, those that would otherwise
# each send more bytes than these. docs/processes.md has what was measured.
MOST_ROWS, MOST_BYTES = 32, 256 << 10
_LOOK_SECONDS = 0.1  # between two looks whether a wait has ended
_ORDER = "Every process must make the same nets, and first train them in the same order"
_REASONS = listed_reasons(
    "the processes do not run equally many steps: give each equally many batches",
    "a process has ended, or an exception left its step: see gluon_syncbn.abandon_step",
    "a process was slower than the timeout, as one that evaluates while the others train: see timeout= and "
    "GLUON_SYNCBN_TIMEOUT",
    "the processes do not run the same layers",
    end="To go on, call gluon_syncbn.abandon_step() in every process, or begin the next step.",
)


class Processes:
    """The exchange of all layers with one process group."""

    def __init__(self, group: ProcessGroup):
        self.group = group
        self._hosts: Dict[int, str] = {}
        self._lock = threading.Lock()  # of the state
        self._resume_lock = threading.Lock()  # of the thread that resumes
        self._net_locks: Dict[str, threading.Lock] = defaultdict(threading.Lock)  # of the thread that compares a net
        self._subset_order = threading.Condition()
        self._awaited_subsets: List[str] = []  # nets that have trained and have subsets, until these are made
        self._failure = ""
        self._is_resuming = False
        self._rounds: Dict[str, int] = {}  # the last number by key
        self._floor = 0  # no round has a number below it any more
        self._compared: Set[str] = set()  # nets
        self._layers: Dict[str, int] = defaultdict(int)  # how many have no place in a net, by name
        self.links: weakref.WeakSet[Any] = weakref.WeakSet()  # of layers, whose steps are to be the same everywhere
        self._seen: List[Tuple[Sequence[str], List[str]]] = []  # of nets: their layers, and their name in each process

    def exchange(
        self,
        place: Place,
        chunk: int,
        direction: str,
        round_id: int,
        vector: np.ndarray,
        members: Sequence[int],
        seconds: float,
        where: str,
    ) -> Tuple[np.ndarray, int]:
        """The rows of all members, or one row that they add up to, and the number of the round.

        ``chunk`` says which of the layer's groups it is, and ``round_id`` which forward pass a backward pass answers.

        Raises
        ------
        SyncBatchNormError
            Processes did not come, or the layer differs there, or the step has been given up.
        """
        with self._exchanging(f"{where}: {direction} pass", place, members, seconds) as wait:
            key = f"{place.key}.{chunk}.{direction}"
            round_id = self._begin(key, direction, round_id)
            return self._meet(key, direction, round_id, vector, members, wait), round_id

    def _meet(
        self, key: str, direction: str, round_id: int, vector: np.ndarray, members: Sequence[int], wait: Wait
    ) -> np.ndarray:
        if len(members) == 1:
            return vector[None]
        if not self._meets_in_pairs(members, vector):
            return self.group.all_gather(key, round_id, vector, members, wait.ended)

        def meet(part: str, brought: np.ndarray, partner: int) -> np.ndarray:
            pair = sorted((self.group.rank, partner), key=list(members).index)
            return self.group.all_gather(f"{key}.{part}", round_id, brought, pair, wait.ended)

        combine = (lambda rows: merge(rows).pack()) if direction == FORWARD else add_ranks
        return reduce_in_pairs(vector, self.group.rank, members, combine, meet)[None]

    def _meets_in_pairs(self, members: Sequence[int], vector: np.ndarray) -> bool:
        """Whether to reduce in pairs. All members come to the same answer: they have compared their nets and hosts."""
        if not self.group.meets_in_pairs:
            return False
        hosts = {self._hosts.get(rank) for rank in members}
        sent = (len(members) - 1) * vector.nbytes
        return len(members) > MOST_ROWS or (len(hosts) > 1 and sent > MOST_BYTES)

    def fail(self, text: str) -> None:
        """A round has failed in this process."""
        with self._lock:
            self._failure = self._failure or text
        if not self.group.can_resume:
            self.group.abandon(text, 0)

    def abandon(self, is_under_way: bool) -> None:
        """`abandon_step` was called, of a step that ``is_under_way`` here or of none; nothing is running."""
        with self._lock:
            if not self._failure and not is_under_way:
                return
            text = self._failure or "gluon_syncbn.abandon_step() was called in the middle of a step"
            self._failure, self._is_resuming = "", True
            highest = self._highest_round()
        self.group.abandon(text, highest)

    def catch_up(
        self, what: str, layers: Dict[str, int], vector: np.ndarray, seconds: float
    ) -> Tuple[List[Dict[str, int]], List[np.ndarray]]:
        """Let all processes number rounds alike from here on, after rounds in which not all took part.

        ``layers`` has the channels of each layer by its key. Returns those of each process, and its vector, of any
        length. Raises as `find_active`.
        """
        with self._lock:
            highest = self._highest_round()
        text = json.dumps([highest, vector.size, layers])
        with self._exchanging(what, None, range(self.group.size), seconds) as wait:
            highests, sizes, all_layers = zip(*map(json.loads, self._gather_texts(what, text, wait)))
            padded = np.zeros(max(sizes))
            padded[: vector.size] = vector
            rows = self._gather(what, padded, wait)
            self._align_steps(wait)
        with self._lock:
            self._floor = max(self._floor, max(highests) + 1)
        return list(all_layers), [row[:size] for row, size in zip(rows, sizes)]

    def _highest_round(self) -> int:
        return max([self._floor, *self._rounds.values()])

    def find_active(self, what: str, num_devices: int, seconds: float) -> List[int]:
        """The ranks that have devices now, which can meet without the others from here on: all processes call it
        together, each with the number of its devices.

        Raises as `exchange`; the text starts with ``what``.
        """
        with self._exchanging(what, None, range(self.group.size), seconds) as wait:
            counts = self._gather(what, np.array([num_devices], dtype=np.float64), wait)[:, 0]
            active = counts.nonzero()[0].tolist()
            if active and len(active) < self.group.size:
                self.group.add_subsets([tuple(active)])
        return active

    @contextlib.contextmanager
    def _exchanging(self, what: str, place: Optional[Place], members: Sequence[int], seconds: float) -> Iterator[Wait]:
        """The context of an exchange, of a layer or outside of layers; the texts of its errors start with ``what``."""
        try:
            with Wait(seconds, is_for_processes=True) as wait:
                self._prepare(place, wait)
                yield wait
        except MissingProcesses as problem:
            raise self._failed(self._missing_text(what, problem, members)) from None
        except (CommunicatorError, SyncBatchNormError) as problem:
            raise self._failed(f"{what}: {problem}.") from None

    def _failed(self, text: str) -> SyncBatchNormError:
        self.fail(text)
        return SyncBatchNormError(text)

    def _prepare(self, place: Optional[Place], wait: Wait) -> None:
        is_compared = place is None or place.net in self._compared
        if is_compared and not self._is_resuming and not self._failure:
            return
        with self._resume_lock:
            if self._failure:
                raise SyncBatchNormError(
                    f"the step had failed before ({self._failure.rstrip('.')}). Call gluon_syncbn.abandon_step() "
                    f"before the next step"
                )
            if self._is_resuming:
                highest = self.group.resume(wait.ended)
                with self._lock:
                    self._floor, self._is_resuming = highest + 1, False
                self._align_steps(wait)
                with self._subset_order:
                    self._awaited_subsets.clear()  # some of them may never come
        if place is None:
            return
        with self._lock:
            lock = self._net_locks[place.net]
        with lock:
            if place.net not in self._compared:
                self._compare(place, wait)

    def _begin(self, key: str, direction: str, round_id: int) -> int:
        with self._lock:
            if direction == FORWARD:
                round_id = max(self._rounds.get(key, 0) + 1, self._floor)
                self._rounds[key] = round_id
            elif round_id < self._floor:
                raise SyncBatchNormError("its forward pass belongs to a step that was given up")
        return round_id

    def _compare(self, place: Place, wait: Wait) -> None:
        """The net's layers with those of the first process."""
        mine = json.dumps([socket.gethostname(), place.kind, place.name, *place.layers])
        texts = [json.loads(text) for text in self._gather_texts(f"{place.net}.layers", mine, wait)]
        hosts, kinds, names = zip(*(item[:3] for item in texts))
        self._hosts = dict(enumerate(hosts))
        lists = [item[3:] for item in texts]
        first = lists[0]
        for rank, layers in enumerate(lists):
            if len(layers) != len(first):
                raise SyncBatchNormError(
                    f"the nets differ: {self._name(0)} has {len(first)} synchronized layers, {self._name(rank)} has "
                    f"{len(layers)}. {_ORDER}"
                )
            for number, (theirs, expected) in enumerate(zip(layers, first)):
                if not agree(theirs, expected):
                    raise SyncBatchNormError(
                        f"layer {number + 1} of {len(first)} differs: {expected} in {self._name(0)}, {theirs} in "
                        f"{self._name(rank)}. {_ORDER}"
                    )
            if kinds[rank] != kinds[0]:
                raise SyncBatchNormError(
                    f"the nets differ: '{names[0]}' is a {kinds[0]} in {self._name(0)}, '{names[rank]}' a "
                    f"{kinds[rank]} in {self._name(rank)}. {_ORDER}"
                )
        self._check_names(place.layers, list(names))
        self._make_subsets(place, wait)

    def _check_names(self, layers: Sequence[str], names: List[str]) -> None:
        """Refuse nets that are alike and have changed places, as their names show.

        Gluon numbers names by what was made before, so one net may be 'dense3' here and 'dense4' there. But where two
        processes have trained nets of the same names, they must have done so in the same order.
        """
        kinds = list(map(without_name, layers))
        alike = [seen for others, seen in self._seen if list(map(without_name, others)) == kinds]
        orders = list(zip(*alike, names))  # of each process, the names in the order in which they have trained
        for rank, order in enumerate(orders):
            if order != orders[0] and sorted(order) == sorted(orders[0]):
                mine, theirs = (", ".join(map(repr, names)) for names in (orders[0], order))
                raise SyncBatchNormError(
                    f"nets that are alike have changed places: {self._name(0)} has trained {mine}, and "
                    f"{self._name(rank)} {theirs}. {_ORDER}; give each the same prefix= in all of them"
                )
        self._seen.append((layers, names))

    def count_layers(self, name: str) -> int:
        """How many layers of this name without a place in a net there have been before this one."""
        with self._lock:
            self._layers[name] += 1
            return self._layers[name] - 1

    def _align_steps(self, wait: Wait) -> None:
        """Layers go on from their latest step; some may have been left out of a step, or of a part of it."""
        links = {link.place.key: link for link in list(self.links) if link.place is not None}
        mine = {key: link.go_to_step(0) for key, link in links.items()}
        texts = self._gather_texts("steps", json.dumps(mine), wait)
        for steps in map(json.loads, texts):
            for key in links.keys() & steps.keys():
                links[key].go_to_step(steps[key])

    def announce_subsets(self, net: str) -> None:
        """A layer of this net, which has subsets, is about to train. All processes announce nets in one order."""
        with self._subset_order:
            if net not in self._compared and net not in self._awaited_subsets:
                self._awaited_subsets.append(net)

    def _make_subsets(self, place: Place, wait: Wait) -> None:
        """Make the subsets of a net, after those of nets that were announced before."""
        if self.group.meets_in_pairs:  # any processes can meet
            self._compared.add(place.net)
            return
        with self._subset_order:
            while place.net in self._awaited_subsets and self._awaited_subsets[0] != place.net:
                waited = wait.ended()
                if waited is not None:
                    raise MissingProcesses(waited, [self.group.rank])
                self._subset_order.wait(_LOOK_SECONDS)
            self.group.add_subsets(place.subsets)
            self._compared.add(place.net)
            if place.net in self._awaited_subsets:
                self._awaited_subsets.remove(place.net)
            self._subset_order.notify_all()

    def _gather_texts(self, key: str, text: str, wait: Wait) -> List[str]:
        """The texts of all processes, in rank order."""
        data = np.frombuffer(text.encode(), dtype=np.uint8)
        size = self._gather(f"{key}.size", np.array([data.size], dtype=np.float64), wait)[:, 0].astype(int)
        padded = np.zeros(size.max())
        padded[: data.size] = data
        rows = self._gather(f"{key}.text", padded, wait)
        return [row[:length].astype(np.uint8).tobytes().decode() for row, length in zip(rows, size)]

    def _gather(self, key: str, vector: np.ndarray, wait: Wait) -> np.ndarray:
        return self.group.all_gather(key, self._begin(key, FORWARD, 0), vector, range(self.group.size), wait.ended)

    def _name(self, rank: int) -> str:
        host = self._hosts.get(rank)
        return f"process {rank} ({host})" if host else f"process {rank}"

    def _missing_text(self, what: str, problem: MissingProcesses, members: Sequence[int]) -> str:
        if problem.arrived is None:
            whom = f"the other {len(members) - 1} processes"
            return f"{what} {problem.waited.text(whom)}; which of them came is not known. {_REASONS}"
        arrived = [rank for rank in members if rank in problem.arrived]
        missing = [rank for rank in problem.suspects or members if rank not in problem.arrived]
        is_known = problem.suspects is None or len(missing) == 1
        count = str(len(missing)) if is_known else f"1 or more of {len(missing)}"
        whom = f"{count} of {len(members)} processes"
        return (
            f"{what} {problem.waited.text(whom)}. Arrived: {', '.join(map(self._name, arrived))}. "
            f"{'Missing' if is_known else 'Missing one or more of these'}: "
            f"{', '.join(map(self._name, missing)) or 'none, any more'}. {_REASONS}"
        )


_all: "weakref.WeakKeyDictionary[ProcessGroup, Processes]" = weakref.WeakKeyDictionary()
_all_lock = threading.Lock()


def processes_of(group: ProcessGroup) -> Processes:
    """The one exchange that all layers with this process group share."""
    with _all_lock:
        if group not in _all:
            _all[group] = Processes(group)
        return _all[group]


def abandon_on_all_processes(is_under_way: bool) -> None:
    """Whoever waits for this process in the middle of a step need not wait any longer."""
    for processes in list(_all.values()):
        processes.abandon(is_under_way)
