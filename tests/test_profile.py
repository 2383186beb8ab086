"""`gluon_syncbn.profile` says who waits for whom."""

import json
import time

import mxnet as mx
import numpy as np
import pytest
from matplotlib.figure import Figure
from test_layer import make
from testing import check_steps, cpus, initialized, on_devices, random_shards, sequential, shards_and_heads, step

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm

SHAPES = [(2, 4, 3, 5), (1, 4, 3, 5)]


def train(net, steps):
    for _ in range(steps):
        step(net, *shards_and_heads(SHAPES), cpus(2))


def test_a_table_by_layer_and_direction(mode):
    layer, norm = make(SHAPES, mode=mode, prefix="layer_")
    with gluon_syncbn.profile() as report:
        check_steps(layer, norm, lambda seed: shards_and_heads(SHAPES, seed=seed), 5)
    passes = [("layer", "forward", 5), ("layer", "backward", 5)]
    assert [(row.layer, row.direction, row.calls) for row in report.rows] == passes
    assert report.devices == ["cpu(0)", "cpu(1)"]
    for row in report.rows:
        assert sum(row.last.values()) == row.calls and set(row.last) == {"cpu(0)", "cpu(1)"}
        assert 0 < row.spread <= row.spread_90 < report.seconds
        assert 0 < row.kernels < report.seconds
        assert row.kernel_share > 0 and row.waiting_share > 0
    assert sum(report.last().values()) == 10
    for name in ("waiting_share", "kernel_share"):
        assert getattr(report, name) == sum(getattr(row, name) for row in report.rows) < 1
    text = str(report)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    for line, row in zip(lines[2:], sorted(report.rows, key=lambda row: -row.waiting_share)):
        spread, most, kernels = (f"{1e3 * seconds:.2f} ms" for seconds in (row.spread, row.spread_90, row.kernels))
        lasts = sorted(row.last.items(), key=lambda item: -item[1])
        last = ", ".join(f"{name} {count / row.calls:.0%}" for name, count in lasts)
        assert line == f"layer {row.direction} {row.calls} {spread} {most} {kernels} {row.waiting_share:.1%} {last}"
    shares = f"waiting {report.waiting_share:.1%}, the layers' kernels {report.kernel_share:.1%} of a device's time"
    assert f"{report.seconds:.2f} s on cpu(0), cpu(1): {shares}. Last to come: cpu(" in text


def test_the_late_device_is_named():
    layer, _ = make(SHAPES)
    train(layer, 1)
    with gluon_syncbn.profile() as report:
        for _ in range(4):
            inputs = on_devices(random_shards(SHAPES))
            with mx.autograd.record():
                outputs = [layer(inputs[0])]
                time.sleep(0.2)
                outputs.append(layer(inputs[1]))
            mx.autograd.backward(outputs)
            mx.nd.waitall()
    forward = report.rows[0]
    assert forward.last == {"cpu(0)": 0, "cpu(1)": 4}
    assert "Last to come: cpu(" in str(report) and "cpu(1) 100%" in str(report)
    assert 0.15 < forward.spread < 5
    # Of two devices one waits nearly all the time.
    assert 0.25 < report.waiting_share < 0.55


def test_nothing_is_noted_outside_and_one_at_a_time():
    layer, _ = make(SHAPES)
    train(layer, 2)
    with gluon_syncbn.profile() as report:
        pass
    train(layer, 2)
    assert report.rows == [] and "No layer met" in str(report)
    with pytest.raises(ValueError, match="profile is empty"):
        report.plot("nowhere.png")
    with gluon_syncbn.profile(), pytest.raises(RuntimeError, match="another profile"), gluon_syncbn.profile():
        pass
    with pytest.raises(KeyError), gluon_syncbn.profile() as second:
        train(layer, 2)
        mx.nd.waitall()
        raise KeyError  # passes, and what was seen stays
    assert [row.calls for row in second.rows] == [2, 2]


def test_json_and_picture(tmp_path, monkeypatch):
    net = initialized(sequential(*(SyncBatchNorm(in_channels=4, prefix=f"layer{i}_") for i in range(20))), 2)
    with gluon_syncbn.profile() as report:
        train(net, 2)
    told = json.loads(report.to_json())
    assert told["rows"] == [json.loads(json.dumps(row._asdict())) for row in report.rows]
    assert [row["layer"] for row in told["rows"][:20]] == [f"layer{i}" for i in range(20)]
    assert told["rows"][0]["calls"] == 2
    for name in ("seconds", "devices", "waiting_share", "kernel_share"):
        assert told[name] == getattr(report, name)
    assert told["last"] == report.last() and "... and 10 more" in str(report)
    figures, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **how: (figures.append(self), save(self, *args, **how)))
    report.plot(tmp_path / "waiting.png")
    assert (tmp_path / "waiting.png").read_bytes().startswith(b"\x89PNG")
    waits, lasts = figures[0].axes
    assert lasts.get_xlim() == (0, 100)
    shown = sorted(report.rows, key=lambda row: -row.waiting_share)[:30]
    shown = {(row.layer, row.direction): row for row in reversed(report.rows) if row in shown}
    assert [label.get_text() for label in waits.get_yticklabels()] == [layer for layer, _ in shown]
    by_place = {round(bar.get_y() + bar.get_height() / 2): bar.get_width() for bar in waits.patches}
    np.testing.assert_allclose([by_place[i] for i in range(30)], [1e3 * row.spread for row in shown.values()])
    for place, row in enumerate(shown.values()):
        bars = [bar for bar in lasts.patches if round(bar.get_y() + bar.get_height() / 2) == place]
        expected = [100 * row.last[name] / row.calls for name in report.devices]
        np.testing.assert_allclose([bar.get_width() for bar in bars], expected)
        np.testing.assert_allclose([bar.get_x() for bar in bars], [0, expected[0]])
