"""`profile`: measures which layers wait, how long, and for which device."""

import contextlib
import gc
import json
import time
from collections import Counter, defaultdict
from typing import Any, Dict, Iterator, List, NamedTuple, Sequence, Tuple

import mxnet as mx
import numpy as np

from gluon_syncbn.base import library
from gluon_syncbn.step.steps import steps

_SHOWN = 30  # rows of a printed table, and bars of a picture


class Pass(NamedTuple):
    """One pass of one layer on one device, as csrc/meeting/profile.cpp notes it; times by `time.monotonic`.

    ``meeting`` and ``round_id`` say with which other passes it met.
    """

    layer: str
    device: str
    direction: str
    meeting: str
    round_id: int
    started: float
    arrived: float
    left: float
    ended: float


class Row(NamedTuple):
    """One direction of one layer. Times are in seconds, shares are fractions of the profiled time."""

    layer: str
    direction: str  # 'forward' or 'backward'
    calls: int  # how often the devices met
    spread: float  # time from the first to the last device's arrival, median
    spread_90: float  # the same, 90th percentile
    last: Dict[str, int]  # how often each device was the last to arrive
    kernels: float  # kernel time of one device in one call, median
    waiting_share: float  # share of a device's time that it waited for others, mean over devices
    kernel_share: float  # share of a device's time in the layer's kernels, mean over devices


class Report:
    """The result of `profile`. Empty until the ``with`` block ends.

    Attributes
    ----------
    seconds : float
        The duration of the block, including all pending work.
    devices : list of str
        The devices of this process that synchronized, for example ``['gpu(0)', 'gpu(1)']``.
    rows : list of Row
        One row for each direction of each layer, in the order of their first calls. A row has the attributes ``layer``,
        ``direction``, ``calls``, ``spread``, ``spread_90``, ``last``, ``kernels``, ``waiting_share`` and
        ``kernel_share``.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.devices: List[str] = []
        self.rows: List[Row] = []

    def _fill(self, passes: Sequence[Pass], seconds: float) -> None:
        self.seconds = seconds
        self.devices = sorted({item.device for item in passes}, key=lambda name: (name.split("(")[0], len(name), name))
        layers: Dict[Tuple[str, str], List[Pass]] = defaultdict(list)
        for item in sorted(passes, key=lambda item: item.arrived):
            layers[item.layer, item.direction].append(item)
        self.rows = [_row(*key, seen, seconds * len(self.devices)) for key, seen in layers.items()]

    def _longest_first(self) -> List[Row]:
        return sorted(self.rows, key=lambda row: -row.waiting_share)

    @property
    def waiting_share(self) -> float:
        """Share of a device's time that it waited for others, from 0 to 1; mean over devices."""
        return sum(row.waiting_share for row in self.rows)

    @property
    def kernel_share(self) -> float:
        """Share of a device's time in the layers' own kernels, from 0 to 1; mean over devices."""
        return sum(row.kernel_share for row in self.rows)

    def last(self) -> Dict[str, int]:
        """Return how often each device was the last to arrive, summed over all layers and directions."""
        return {device: sum(row.last.get(device, 0) for row in self.rows) for device in self.devices}

    def __str__(self) -> str:
        if not self.rows:
            return "No layer met another device while the profile was on."
        rows = self._longest_first()
        width = max(len("layer"), *(len(row.layer) for row in rows[:_SHOWN]))
        head = f"{'layer':{width}}  direction  calls    spread       90%   kernels  waiting  last"
        lines = [head, "-" * len(head)]
        for row in rows[:_SHOWN]:
            lines.append(
                f"{row.layer:{width}}  {row.direction:9}  {row.calls:5d}  {1e3 * row.spread:5.2f} ms  "
                f"{1e3 * row.spread_90:5.2f} ms  {1e3 * row.kernels:5.2f} ms  {row.waiting_share:7.1%}  "
                f"{_shares(row.last)}"
            )
        if len(rows) > _SHOWN:
            rest = sum(row.waiting_share for row in rows[_SHOWN:])
            lines.append(f"... and {len(rows) - _SHOWN} more, {rest:.1%} in all")
        end = f"{self.seconds:.2f} s on {', '.join(self.devices)}: {self._summary()}."
        return "\n".join([*lines, "", f"{end} Last to come: {_shares(self.last())}."])

    def _summary(self) -> str:
        return f"waiting {self.waiting_share:.1%}, the layers' kernels {self.kernel_share:.1%} of a device's time"

    def to_json(self) -> str:
        """Return the report as JSON text.

        It has the keys ``seconds``, ``devices``, ``waiting_share``, ``kernel_share``, ``last`` and ``rows``.
        """
        values = {name: getattr(self, name) for name in ("seconds", "devices", "waiting_share", "kernel_share")}
        return json.dumps({**values, "last": self.last(), "rows": [row._asdict() for row in self.rows]})

    def plot(self, path) -> None:
        """Plot to a file how long devices wait at each layer, and which device was the last to arrive.

        Parameters
        ----------
        path : str or os.PathLike
            The file; its extension determines the format, as in ``matplotlib``'s ``savefig``.

        Raises
        ------
        ImportError
            matplotlib is not installed.
        ValueError
            No layer met another device while the profile was on.
        """
        if not self.rows:
            raise ValueError("the profile is empty: no layer met another device while it was on.")
        from matplotlib.figure import Figure

        chosen = self._longest_first()[:_SHOWN]
        rows = [row for row in self.rows if row in chosen][::-1]  # in the order of the net, the first on top
        figure = Figure(figsize=(10, 1.6 + 0.22 * len(rows)), layout="constrained")
        waits, lasts = figure.subplots(1, 2, sharey=True, gridspec_kw={"width_ratios": [2, 1]})
        places = np.arange(len(rows))
        for direction, colour in (("forward", "tab:blue"), ("backward", "tab:orange")):
            mine = [i for i, row in enumerate(rows) if row.direction == direction]
            if mine:
                medians, most = (1e3 * np.array([(rows[i].spread, rows[i].spread_90) for i in mine])).T
                errors = [np.zeros(len(mine)), most - medians]
                waits.barh(places[mine], medians, xerr=errors, color=colour, label=direction, ecolor="gray")
        waits.set_yticks(places, [row.layer for row in rows], fontsize=7)
        waits.set_ylim(-0.7, len(rows) - 0.3)
        waits.set_xlabel("from the first to the last device's arrival: median and 90% (ms)")
        above = {"loc": "lower left", "bbox_to_anchor": (0, 1), "frameon": False, "fontsize": 8}  # and not on a bar
        waits.legend(ncol=2, **above)
        before = np.zeros(len(rows))
        for number, device in enumerate(self.devices):
            shares = np.array([row.last.get(device, 0) / row.calls for row in rows])
            gray = str(0.3 + 0.55 * number / max(len(self.devices) - 1, 1))
            lasts.barh(places, 100 * shares, left=100 * before, label=device, color=gray)
            before += shares
        lasts.set_xlabel("was the last to come (%)")
        lasts.set_xlim(0, 100)
        lasts.legend(ncol=4, **above)
        few = f"; the {_SHOWN} of {len(self.rows)} rows that wait longest" if len(self.rows) > _SHOWN else ""
        figure.suptitle(self._summary() + few, fontsize=10)
        figure.savefig(path, dpi=110)


@contextlib.contextmanager
def profile() -> Iterator[Report]:
    """Measure in the ``with`` block when each device arrives at each synchronized layer.

    One slow GPU, or one with larger images, makes all others wait. The report shows where they wait, how long, and for
    which device. Profile some steps after the first ones, which are slower. Entering and leaving the block waits for
    all pending work. Only the devices of this process are measured; waiting times include the exchange with other
    processes. On GPUs the kernel time ends with the second kernel. Nothing is recorded outside of the
    block.

    Yields
    ------
    Report
        The report, filled when the block ends: ``print(report)``, ``report.plot('waiting.png')``,
        ``report.to_json()``.

    Raises
    ------
    RuntimeError
        Another profile is active, the compiled operator is missing, or a layer of this process runs on the portable
        back end, which cannot be profiled.

    Examples
    --------
    >>> with gluon_syncbn.profile() as report:
    ...     for batch in itertools.islice(batches, 20):
    ...         train(batch)
    >>> print(report)
    """
    if library.core is None:
        raise RuntimeError(f"gluon_syncbn.profile needs the compiled operator: {library.unavailable_reason}.")
    report = Report()
    mx.nd.waitall()
    gc.collect()  # a net that the program has dropped may still exist
    for layer in steps.layers.blocks():
        if layer.backend == "portable":
            raise RuntimeError(
                f"gluon_syncbn.profile: {layer.name} runs on the portable back end, which keeps no notes."
            )
    if not library.core.gluon_syncbn_start_profile():
        raise RuntimeError("gluon_syncbn.profile: another profile is under way; there can be one at a time.")
    started = time.monotonic()
    try:
        yield report
        mx.nd.waitall()
    finally:
        lines = library.core.gluon_syncbn_stop_profile().decode().splitlines()
        report._fill(list(map(_pass_of, lines)), time.monotonic() - started)


def _pass_of(line: str) -> Pass:
    layer, device, direction, meeting, round_id, *times = line.split("\t")
    return Pass(layer, device, direction, meeting, int(round_id), *map(float, times))


def _row(layer: str, direction: str, passes: Sequence[Pass], device_seconds: float) -> Row:
    """Compute the row of some passes, which are sorted by their time of arrival."""
    meetings: Dict[Any, List[Pass]] = defaultdict(list)
    for item in passes:
        meetings[item.meeting, item.round_id].append(item)
    spreads = [met[-1].arrived - met[0].arrived for met in meetings.values()]
    last = Counter(dict.fromkeys(sorted({item.device for item in passes}), 0))
    last.update(met[-1].device for met in meetings.values())
    kernels = [item.arrived - item.started + item.ended - item.left for item in passes]
    return Row(
        layer,
        direction,
        len(meetings),
        float(np.median(spreads)),
        float(np.percentile(spreads, 90)),
        dict(last),
        float(np.median(kernels)),
        sum(item.left - item.arrived for item in passes) / device_seconds,
        sum(kernels) / device_seconds,
    )


def _shares(last: Dict[str, int]) -> str:
    total = max(sum(last.values()), 1)
    counts = sorted(last.items(), key=lambda item: -item[1])
    return ", ".join(f"{device} {count / total:.0%}" for device, count in counts)
