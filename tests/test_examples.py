"""The examples do what the README says, at the smallest size that shows it."""

import itertools
import json
import re
import shutil

import mxnet as mx
import numpy as np
import pytest
from digits_voc import CLASSES, IMAGE_SIZE, DigitsDetection, DigitsSegmentation, write_digits_voc
from PIL import Image
from testing import run_python
from train_detection import PadBoxes, parse_arguments


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    return write_digits_voc(tmp_path_factory.mktemp("digits"), train=8, test=10)


# On a set that is small enough for a test.
CODE = """
import sys
sys.path.insert(0, 'examples')
import digits_voc
digits_voc.write_digits_voc.__defaults__ = (8, 10, 0)
import {example}, training
training.SETTLED, training.TIMED = 0, 2
{example}.train({example}.parse_arguments({arguments}))
"""


def run_example(root, output, *more, example="train_detection", epochs=1):
    """In a process of its own; returns what it has said, and its history."""
    arguments = ["--devices", "cpu:2", "--root", str(root), "--output", str(output), "--epochs", str(epochs), *more]
    done = run_python(CODE.format(example=example, arguments=arguments))
    assert f"epoch {epochs}: loss" in done.stdout and ", loss=" in done.stderr
    assert re.search(r"the first steps say: \d+ min for 1 epochs", done.stdout)
    assert f"epoch {epochs}/{epochs}: 100%" in done.stderr
    history = json.loads((output / "history.json").read_text(encoding="utf-8"))
    assert len(history) == epochs and all(np.isfinite(entry["loss"]) for entry in history)
    return done, history


def test_the_tree_is_pascal_voc_for_gluoncv(tree):
    """Boxes lie around the ink, which is bright, and masks on it."""
    boxes = [DigitsDetection(str(tree), splits=[(2007, split)]) for split in ("trainval", "test")]
    masks = [DigitsSegmentation(str(tree), split, "testval") for split in ("train", "val")]
    assert [len(dataset) for dataset in (*boxes, *masks)] == [8, 10, 8, 10]
    for (image, label), (_, mask) in zip(itertools.chain(*boxes), itertools.chain(*masks)):
        assert image.shape == (IMAGE_SIZE, IMAGE_SIZE, 3) and len(label) >= 1
        assert (label[:, :2] >= 0).all() and (label[:, 2:4] < IMAGE_SIZE).all()
        assert (label[:, 2:4] - label[:, :2] >= 4).all()
        assert set(label[:, 4]) <= set(range(len(CLASSES)))
        mask, brightness = mask.asnumpy(), image.asnumpy().mean(axis=2)
        assert set(np.unique(mask)) == {0, *(label[:, 4].astype(int) + 1)}
        assert brightness[mask > 0].mean() > brightness[mask == 0].mean() + 50
        inside = np.zeros_like(mask, dtype=bool)
        for x1, y1, x2, y2, kind in label[:, :5].astype(int):
            box = slice(y1, y2 + 1), slice(x1, x2 + 1)
            inside[box] = True
            assert brightness[box].max() > 150 and (mask[box] == kind + 1).sum() > 20
        assert not mask[~inside].any() and brightness[~inside].max() < brightness[inside].max()


def test_the_same_seed_writes_the_same_images_and_once(tree, tmp_path):
    stamps = {file: file.stat().st_mtime_ns for file in tree.rglob("*.jpg")}
    write_digits_voc(tree, train=8, test=10)
    again = write_digits_voc(tmp_path, train=8, test=10)
    for file, stamp in stamps.items():
        assert file.stat().st_mtime_ns == stamp
        assert file.read_bytes() == (again / file.relative_to(tree)).read_bytes()


DEVICES = {"cpu:2": "cpu(0) cpu(1)", "cpu:1,3": "cpu(1) cpu(3)", "gpu:0": "gpu(0)", "gpu:2,0": "gpu(2) gpu(0)"}


def test_arguments(capsys):
    for text, devices in DEVICES.items():
        assert " ".join(map(str, parse_arguments(["--devices", text]).devices)) == devices
    devices = "tpu:1", "cpu", "cpu:0", "cpu:0,0", "cpu:1,-1"
    others = "--dataset voc", "--epochs 0", "--batch-per-device 0", "--devices cpu:2 --images 1"
    for wrong in [*(["--devices", text] for text in devices), *(text.split() for text in others)]:
        with pytest.raises(SystemExit):
            parse_arguments(wrong)
        assert "error:" in capsys.readouterr().err


def test_too_many_boxes_are_not_dropped():
    with pytest.raises(ValueError, match="has 3 objects, more than 2"):
        PadBoxes(2)([mx.nd.ones((3, 4))])


def test_trains_resumes_and_leaves_its_files(tmp_path):
    output = tmp_path / "run"
    where = tmp_path / "digits", output
    run_example(*where)
    before = mx.nd.load(str(output / "last.params"))
    done, history = run_example(*where, "--resume", epochs=2)
    after = mx.nd.load(str(output / "last.params"))
    assert all((before[name] != after[name]).asnumpy().any() for name in before if name.endswith("weight"))
    assert "epoch 1:" not in done.stdout  # resumed, not repeated
    assert all(0 <= entry["map"] <= 1 for entry in history)
    for name in ("curve.png", "detections.png"):
        assert np.asarray(Image.open(output / name)).std() > 5
    assert (output / "last.params").stat().st_size > 1e6


def test_segmentation_trains_and_leaves_its_files(tmp_path):
    _, (entry,) = run_example(tmp_path / "digits", tmp_path / "run", example="train_segmentation")
    assert 0 <= entry["miou"] <= 1
    assert np.asarray(Image.open(tmp_path / "run" / "masks.png")).std() > 5


def test_reads_a_real_pascal_voc_tree(tree, tmp_path):
    """The same pictures under names of Pascal VOC's classes, with gluoncv's own random transform, and plain layers."""
    root = shutil.copytree(tree, tmp_path / "VOCdevkit")
    for file, name in zip(root.rglob("*.xml"), itertools.cycle(["dog", "cat", "car"])):
        file.write_text(re.sub(r"<name>\w+<", f"<name>{name}<", file.read_text(encoding="utf-8")), encoding="utf-8")
    run_example(root, tmp_path / "run", "--dataset", "voc", "--data-shape", "128", "--norm", "bn")
