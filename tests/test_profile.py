"""`gluon_syncbn.profile` says who waits for whom."""

import json
import time

import mxnet as mx
import pytest
from harness import MODES, cpus, random_shards, set_mode, step

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm

SHAPES = [(2, 4, 3, 5)] * 2


def make(mode="imperative"):
    layer = SyncBatchNorm(in_channels=4, prefix="layer_")
    layer.initialize(ctx=cpus(2))
    set_mode(layer, mode)
    return layer


def train(layer, steps):
    for _ in range(steps):
        step(layer, random_shards(SHAPES), random_shards(SHAPES), cpus(2))


@pytest.mark.parametrize("mode", list(MODES))
def test_a_table_by_layer_and_direction(mode):
    layer = make(mode)
    train(layer, 1)
    with gluon_syncbn.profile() as report:
        train(layer, 5)
    assert [(row.layer, row.direction, row.calls) for row in report.rows] == [
        ("layer", "forward", 5),
        ("layer", "backward", 5),
    ]
    assert report.devices == ["cpu(0)", "cpu(1)"]
    for row in report.rows:
        assert sum(row.last.values()) == row.calls and set(row.last) == {"cpu(0)", "cpu(1)"}
        assert 0 < row.spread <= row.spread_90 < report.seconds
        assert 0 < row.kernels < report.seconds
    assert sum(report.last().values()) == 10
    assert 0 < report.waiting_share < 1 and 0 <= report.kernel_share < 1
    text = str(report)
    assert "layer  forward" in text and "layer  backward" in text and "Last to come: cpu(" in text


def test_the_late_device_is_named():
    layer = make()
    train(layer, 1)
    with gluon_syncbn.profile() as report:
        for _ in range(4):
            inputs = [mx.nd.array(x, ctx=device) for x, device in zip(random_shards(SHAPES), cpus(2))]
            with mx.autograd.record():
                outputs = [layer(inputs[0])]
                time.sleep(0.2)
                outputs.append(layer(inputs[1]))
            mx.autograd.backward(outputs)
            mx.nd.waitall()
    forward = report.rows[0]
    assert forward.last == {"cpu(0)": 0, "cpu(1)": 4}
    assert 0.15 < forward.spread < 5
    # Of two devices one waits nearly all the time.
    assert 0.25 < report.waiting_share < 0.55


def test_nothing_is_noted_outside():
    layer = make()
    train(layer, 2)
    with gluon_syncbn.profile() as report:
        pass
    train(layer, 2)
    assert report.rows == [] and "No layer met" in str(report)
    with pytest.raises(ValueError, match="profile is empty"):
        report.plot("nowhere.png")
    with gluon_syncbn.profile() as second:
        train(layer, 1)
    assert [row.calls for row in second.rows] == [1, 1]


def test_one_at_a_time():
    with gluon_syncbn.profile(), pytest.raises(RuntimeError, match="another profile"), gluon_syncbn.profile():
        pass
    with gluon_syncbn.profile():
        pass


def test_an_exception_passes_and_what_was_seen_stays():
    layer = make()
    with pytest.raises(KeyError), gluon_syncbn.profile() as report:
        train(layer, 2)
        mx.nd.waitall()
        raise KeyError
    assert [row.calls for row in report.rows] == [2, 2]


def test_json_and_picture(tmp_path):
    layers = [SyncBatchNorm(in_channels=4, prefix=f"layer{i}_") for i in range(20)]
    net = mx.gluon.nn.HybridSequential()
    net.add(*layers)
    net.initialize(ctx=cpus(2))
    with gluon_syncbn.profile() as report:
        train(net, 2)
    told = json.loads(report.to_json())
    assert told["devices"] == ["cpu(0)", "cpu(1)"]
    assert [row["layer"] for row in told["rows"][:20]] == [f"layer{i}" for i in range(20)]
    assert told["rows"][0]["calls"] == 2 and told["seconds"] == report.seconds
    assert "... and 10 more" in str(report)
    report.plot(tmp_path / "waiting.png")
    assert (tmp_path / "waiting.png").read_bytes().startswith(b"\x89PNG")
