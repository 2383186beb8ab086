"""The examples do what the README says, at the smallest size that shows it."""

import itertools
import json
import re
import shutil

import mxnet as mx
import numpy as np
import pytest
from digits_voc import CLASSES, IMAGE_SIZE, DigitsDetection, DigitsSegmentation, write_digits_voc
from mxnet import autograd
from PIL import Image
from processes import SummingTrainer
from testing import run_python
from train_detection import PadBoxes, parse_arguments


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    return write_digits_voc(tmp_path_factory.mktemp("digits"), train=8, test=10)


# Runs the example in a process of its own, on a set that is small enough for a test.
CODE = """
import sys
sys.path.insert(0, 'examples')
import digits_voc
digits_voc.write_digits_voc.__defaults__ = (8, 10, 0)
import train_detection, training
training.SETTLED, training.TIMED = 0, 2
train_detection.train(train_detection.parse_arguments({arguments}))
"""


def test_the_tree_is_pascal_voc_for_gluoncv(tree):
    train = DigitsDetection(str(tree), splits=[(2007, "trainval")])
    test = DigitsDetection(str(tree), splits=[(2007, "test")])
    assert (len(train), len(test)) == (8, 10)
    for image, label in [*train, *test]:
        assert image.shape == (IMAGE_SIZE, IMAGE_SIZE, 3)
        assert len(label) >= 1
        assert (label[:, :2] >= 0).all() and (label[:, 2:4] < IMAGE_SIZE).all()
        assert (label[:, 2:4] - label[:, :2] >= 4).all()
        assert set(label[:, 4]) <= set(range(len(CLASSES)))


def test_boxes_lie_around_the_bright_ink(tree):
    """Twice as bright inside as outside: boxes and pixels agree."""
    dataset = DigitsDetection(str(tree), splits=[(2007, "trainval")])
    for image, label in dataset:
        brightness = image.asnumpy().mean(axis=2)
        inside = np.zeros_like(brightness, dtype=bool)
        for x1, y1, x2, y2 in label[:, :4].astype(int):
            inside[y1 : y2 + 1, x1 : x2 + 1] = True
            assert brightness[y1 : y2 + 1, x1 : x2 + 1].max() > 150
        assert brightness[~inside].max() < brightness[inside].max()


def test_masks_lie_on_the_ink_inside_the_boxes(tree):
    images = DigitsDetection(str(tree), splits=[(2007, "trainval")])
    masks = DigitsSegmentation(str(tree), "train", "testval")
    assert (len(masks), len(DigitsSegmentation(str(tree), "val", "testval"))) == (8, 10)
    for (_, label), (image, mask) in zip(images, masks):
        mask, brightness = mask.asnumpy(), image.asnumpy().mean(axis=2)
        assert brightness[mask > 0].mean() > brightness[mask == 0].mean() + 50
        assert set(np.unique(mask)) == {0, *(label[:, 4].astype(int) + 1)}
        for x1, y1, x2, y2, kind in label[:, :5].astype(int):
            inside = mask[y1 : y2 + 1, x1 : x2 + 1]
            assert (inside == kind + 1).sum() > 20
            mask[y1 : y2 + 1, x1 : x2 + 1] = 0
        assert not mask.any()


def test_the_same_seed_writes_the_same_images(tree, tmp_path):
    again = write_digits_voc(tmp_path, train=8, test=10)
    for file in sorted(tree.rglob("*.jpg")):
        assert file.read_bytes() == (again / file.relative_to(tree)).read_bytes()


def test_it_is_written_once(tree):
    file = next(tree.rglob("*.jpg"))
    stamp = file.stat().st_mtime_ns
    write_digits_voc(tree, train=8, test=10)
    assert file.stat().st_mtime_ns == stamp


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("cpu:2", ["cpu(0)", "cpu(1)"]),
        ("cpu:1,3", ["cpu(1)", "cpu(3)"]),
        ("gpu:0", ["gpu(0)"]),
        ("gpu:2,0", ["gpu(2)", "gpu(0)"]),
    ],
)
def test_devices(text, devices):
    assert [str(device) for device in parse_arguments(["--devices", text]).devices] == devices


@pytest.mark.parametrize("arguments", [["--devices", "tpu:1"], ["--devices", "cpu"], ["--dataset", "voc"]])
def test_wrong_arguments(arguments, capsys):
    with pytest.raises(SystemExit):
        parse_arguments(arguments)
    assert "error:" in capsys.readouterr().err


def test_too_many_boxes_are_not_dropped():
    with pytest.raises(ValueError, match="has 3 objects, more than 2"):
        PadBoxes(2)([mx.nd.ones((3, 4))])


def test_gradients_of_processes_while_layers_are_unfrozen():
    """One message, of the widest dtype of those who learn now: here of two processes that see the same."""
    net = mx.gluon.nn.HybridSequential()
    net.add(mx.gluon.nn.Dense(2, in_units=3), mx.gluon.nn.Dense(1, in_units=2, dtype="float64"))
    devices, messages = [mx.cpu(0), mx.cpu(1)], []
    net.initialize(ctx=devices)

    def add_up(values):
        messages.append((values.size, values.dtype))
        values *= 2

    trainer = SummingTrainer(add_up, 2, net.collect_params(), "sgd", {"learning_rate": 1.0})
    for frozen in (1, None, 0):
        for number, layer in enumerate(net):
            layer.collect_params().setattr("grad_req", "null" if number == frozen else "write")
        before = [parameter.data(mx.cpu(0)).asnumpy() for parameter in net.collect_params().values()]
        with autograd.record():
            heads = [net[1](net[0](mx.nd.ones((1, 3), ctx=device)).astype("float64")) for device in devices]
        autograd.backward(heads)
        gradients = [
            0 if parameter.grad_req == "null" else sum(part.asnumpy() for part in parameter.list_grad())
            for parameter in net.collect_params().values()
        ]
        trainer.step(1)
        for parameter, old, gradient in zip(net.collect_params().values(), before, gradients):
            for device in devices:
                np.testing.assert_allclose(parameter.data(device).asnumpy(), old - gradient, rtol=1e-6, atol=1e-6)
    assert messages == [(8, np.float32), (11, np.float64), (3, np.float64)]


@pytest.mark.parametrize("norm", ["syncbn", "bn"])
def test_trains_resumes_and_leaves_its_files(norm, tmp_path):
    root, output = tmp_path / "digits", tmp_path / "run"
    arguments = ["--norm", norm, "--devices", "cpu:2", "--root", str(root), "--output", str(output)]
    for epochs, resume in ((1, []), (2, ["--resume"]))[: 2 if norm == "syncbn" else 1]:
        code = CODE.format(arguments=[*arguments, "--epochs", str(epochs), *resume])
        done = run_python(code)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"epoch {epochs}: loss" in done.stdout
        assert f"epoch {epochs}/{epochs}: 100%" in done.stderr
        assert re.search(r"the first steps say: \d+ min for 1 epochs", done.stdout)
        assert ", loss=" in done.stderr
    if norm == "syncbn":
        assert "epoch 1:" not in done.stdout  # resumed, not repeated
    history = json.loads((output / "history.json").read_text(encoding="utf-8"))
    assert len(history) == epochs
    assert all(np.isfinite(entry["loss"]) and 0 <= entry["map"] <= 1 for entry in history)
    for name in ("curve.png", "detections.png"):
        assert np.asarray(Image.open(output / name)).std() > 5
    assert (output / "last.params").stat().st_size > 1e6


def test_segmentation_trains_and_leaves_its_files(tmp_path):
    options = ["--devices", "cpu:2", "--epochs", "1", "--root", str(tmp_path / "digits")]
    code = CODE.replace("train_detection", "train_segmentation")
    done = run_python(code.format(arguments=[*options, "--output", str(tmp_path / "run")]))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "epoch 1: loss" in done.stdout and ", loss=" in done.stderr
    (entry,) = json.loads((tmp_path / "run" / "history.json").read_text(encoding="utf-8"))
    assert np.isfinite(entry["loss"]) and 0 <= entry["miou"] <= 1
    assert np.asarray(Image.open(tmp_path / "run" / "masks.png")).std() > 5


def test_reads_a_real_pascal_voc_tree(tree, tmp_path):
    """The same pictures under names of Pascal VOC's classes, with gluoncv's own random transform."""
    root = tmp_path / "VOCdevkit"
    shutil.copytree(tree, root)
    for file, name in zip(root.rglob("*.xml"), itertools.cycle(["dog", "cat", "car"])):
        file.write_text(re.sub(r"<name>\w+<", f"<name>{name}<", file.read_text(encoding="utf-8")), encoding="utf-8")
    arguments = ["--dataset", "voc", "--root", str(root), "--devices", "cpu:2", "--epochs", "1", "--data-shape", "128"]
    done = run_python(CODE.format(arguments=[*arguments, "--output", str(tmp_path / "run")]))
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(json.loads((tmp_path / "run" / "history.json").read_text(encoding="utf-8"))) == 1
