"""Runs GluonCV's own training scripts, unedited, with base weights: ours, plain BatchNorm, and MXNet's SyncBatchNorm.

    git clone --branch v0.10.0 https://github.com/dmlc/gluon-cv
    OMP_NUM_THREADS=1 python benchmarks/gluoncv_scripts.py gluon-cv/scripts

GluonCV's wheel does not have the scripts. Each runs on two devices in a process of its own, with a time limit, on a
small VOC and COCO tree that is made here. Two things are replaced so that the scripts need no network and no GPU: base
weights are random, in a file that GluonCV's own look-up finds and checks; and ``mx.gpu(i)`` is ``mx.cpu(i)`` where
there is no GPU. Faster and Mask R-CNN's scripts need ``pip install pycocotools``.

A row shows how the script ended; how many BatchNorms were synchronized, that is, have running statistics that have
moved and are the same on both devices; seconds per batch, the median between two steps of the Trainer without the first
two; and the most memory.
"""

import argparse
import hashlib
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple, Tuple

MARKER = "MEASURED "
IMAGES, SIZE = 24, (160, 120)
LAYERS = ("ours", "plain", "contrib")
RCNN = "--image-short 96 --image-max-size 128 --anchor-alloc-size 48,48 --rpn-train-pre-nms 200 --rpn-train-post-nms 50"
RCNN += " --rpn-test-pre-nms 100 --rpn-test-post-nms 20 --rcnn-num-samples 16 --num-fpn-filters 32 --rpn-channel 32"
RCNN += " --num-box-head-conv-filters 32 --num_box_head_dense_filters 32"


class Script(NamedTuple):
    """``synchronized`` are the words that ask for synchronized BatchNorm; ``more`` come last.

    ``resume`` matches the weights that a run writes: a second run, which is the one measured, resumes from them.
    """

    path: str
    options: str
    synchronized: str
    base: Tuple[str, ...]
    more: str = ""
    resume: str = ""


ESTIMATOR = str(Path(__file__).resolve().with_name("gluoncv_estimator.py"))
COMMON = "--num-workers 0 --log-interval 1"
SCRIPTS = {
    "SSD": Script(
        "detection/ssd/train_ssd.py",
        f"--network mobilenet0.25 --gpus 0,1 --batch-size 4 --epochs 2 {COMMON}",
        "--syncbn",
        ("mobilenet0.25",),
    ),
    "YOLOv3": Script(
        "detection/yolo/train_yolo3.py",
        f"--network mobilenet1.0 --gpus 0,1 --batch-size 4 --epochs 2 --data-shape 128 --no-random-shape {COMMON}",
        "--syncbn",
        ("mobilenet1.0",),
    ),
    "YOLOv3, random shapes, 2 workers": Script(
        "detection/yolo/train_yolo3.py",
        "--network mobilenet0.25 --gpus 0,1 --batch-size 4 --epochs 1 --data-shape 128 --num-workers 2 "
        "--log-interval 1",
        "--syncbn",
        ("mobilenet0.25",),
    ),
    "SSD, --amp": Script(
        "detection/ssd/train_ssd.py",
        f"--network mobilenet0.25 --gpus 0,1 --batch-size 4 --epochs 1 --amp {COMMON}",
        "--syncbn",
        ("mobilenet0.25",),
    ),
    "YOLOv3, --amp": Script(
        "detection/yolo/train_yolo3.py",
        "--network mobilenet0.25 --gpus 0,1 --batch-size 4 --epochs 1 --data-shape 128 --no-random-shape --amp "
        f"{COMMON}",
        "--syncbn",
        ("mobilenet0.25",),
    ),
    "SSD, --resume": Script(
        "detection/ssd/train_ssd.py",
        f"--network mobilenet0.25 --gpus 0,1 --batch-size 4 --epochs 1 {COMMON}",
        "--syncbn",
        ("mobilenet0.25",),
        resume="ssd_*.params",
    ),
    "YOLOv3, --resume": Script(
        "detection/yolo/train_yolo3.py",
        f"--network mobilenet0.25 --gpus 0,1 --batch-size 4 --epochs 1 --data-shape 128 --no-random-shape {COMMON}",
        "--syncbn",
        ("mobilenet0.25",),
        resume="yolo3_*.params",
    ),
    "SSDEstimator": Script(ESTIMATOR, "SSD", "--syncbn", ("ssd_512_mobilenet1.0_coco",)),
    "YOLOv3Estimator": Script(ESTIMATOR, "YOLOv3", "--syncbn", ("mobilenet1.0",)),
    "PSPNet": Script(
        "segmentation/train.py",
        "--dataset pascal_voc --model psp --backbone resnet50 --ngpus 2 --batch-size 4 --test-batch-size 2 --epochs 1 "
        "--crop-size 64 --base-size 72 --workers 0 --kvstore local",
        "--syncbn",
        ("resnet50_v1s",),
    ),
    "Faster R-CNN": Script(
        "detection/faster_rcnn/train_faster_rcnn.py",
        "--network resnet50_v1b --dataset coco --use-fpn --gpus 0,1 --batch-size 2 --epochs 1 --kv-store local "
        f"{COMMON}",
        "--norm-layer syncbn",
        ("resnet50_v1b",),
    ),
    "Mask R-CNN": Script(
        "instance/mask_rcnn/train_mask_rcnn.py",
        f"--network resnet18_v1b --dataset coco --gpus 0,1 --batch-size 2 --epochs 1 --kv-store local {COMMON}",
        "--norm-layer bn",
        ("resnet18_v1b",),
        f"custom-model {RCNN}",
    ),
}
SCRIPTS["PSPNet, --resume"] = SCRIPTS["PSPNet"]._replace(resume="**/epoch_*.params")


# ---------------------------------------------------------------------------------------------------------------------
# The scripts' files in MXNET_HOME and HOME


def write_data(home: Path) -> None:
    """A VOC and a COCO tree with the same images: coloured boxes on noise."""
    import numpy as np
    from gluoncv.data import COCODetection, VOCDetection
    from PIL import Image

    rng = np.random.RandomState(0)
    voc, coco = home / "datasets" / "voc", home / "datasets" / "coco"
    names = [f"{number:012d}" for number in range(IMAGES)]
    folders = ("JPEGImages", "Annotations", "SegmentationClass", "ImageSets/Main", "ImageSets/Segmentation")
    for year in ("VOC2007", "VOC2012"):
        for folder in folders:
            (voc / year / folder).mkdir(parents=True)
    for folder in ("train2017", "val2017", "annotations"):
        (coco / folder).mkdir(parents=True)
    annotations = []
    for number, name in enumerate(names):
        pixels = rng.randint(0, 80, (SIZE[1], SIZE[0], 3)).astype("uint8")
        classes = np.zeros((SIZE[1], SIZE[0]), dtype="uint8")
        objects = ""
        for _ in range(2):
            kind, width, height = rng.randint(20), *rng.randint(30, 70, 2)
            left, top = rng.randint(1, SIZE[0] - width - 1), rng.randint(1, SIZE[1] - height - 1)
            pixels[top : top + height, left : left + width] = rng.randint(100, 255, 3)
            classes[top : top + height, left : left + width] = kind + 1
            right, bottom = left + width, top + height
            objects += (
                f"<object><name>{VOCDetection.CLASSES[kind]}</name><difficult>0</difficult><bndbox><xmin>{left}</xmin>"
                f"<ymin>{top}</ymin><xmax>{right}</xmax><ymax>{bottom}</ymax></bndbox></object>"
            )
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": number,
                    "category_id": int(kind) + 1,
                    "bbox": [int(left), int(top), int(width), int(height)],
                    "area": int(width * height),
                    "iscrowd": 0,
                    "segmentation": [[int(v) for v in (left, top, right, top, right, bottom, left, bottom)]],
                }
            )
        size = f"<size><width>{SIZE[0]}</width><height>{SIZE[1]}</height><depth>3</depth></size>"
        targets = [(voc / year / "JPEGImages") for year in ("VOC2007", "VOC2012")]
        for folder in (*targets, coco / "train2017", coco / "val2017"):
            Image.fromarray(pixels).save(folder / f"{name}.jpg")
        for year in ("VOC2007", "VOC2012"):
            Image.fromarray(classes).save(voc / year / "SegmentationClass" / f"{name}.png")
            told = f"<annotation><filename>{name}.jpg</filename>{size}{objects}</annotation>"
            (voc / year / "Annotations" / f"{name}.xml").write_text(told)
    half, quarter = names[: IMAGES // 2], names[: IMAGES // 4]
    for year, kind, split, listed in (
        ("VOC2007", "Main", "trainval", half),
        ("VOC2007", "Main", "test", quarter),
        ("VOC2012", "Main", "trainval", names[IMAGES // 2 :]),
        ("VOC2012", "Segmentation", "trainval", names),
        ("VOC2012", "Segmentation", "val", quarter),
    ):
        (voc / year / "ImageSets" / kind / f"{split}.txt").write_text("\n".join(listed) + "\n")
    images = [
        {"id": number, "file_name": f"{name}.jpg", "width": SIZE[0], "height": SIZE[1]}
        for number, name in enumerate(names)
    ]
    categories = [{"id": number + 1, "name": name} for number, name in enumerate(COCODetection.CLASSES)]
    for split, count in (("train2017", IMAGES // 2), ("val2017", 2)):
        chosen = [
            {**image, "coco_url": f"http://images.cocodataset.org/{split}/{image['file_name']}"}
            for image in images[:count]
        ]
        kept = [item for item in annotations if item["image_id"] < count]
        told = {"images": chosen, "annotations": kept, "categories": categories}
        (coco / "annotations" / f"instances_{split}.json").write_text(json.dumps(told))


def write_base_weights(models: Path, name: str) -> str:
    """Random weights of a network of the zoo, where GluonCV looks for its base weights; returns their SHA-1."""
    import mxnet as mx
    from common import Start
    from gluoncv import model_zoo

    models.mkdir(parents=True, exist_ok=True)
    mx.random.seed(0)
    is_ssd = name.startswith("ssd_512")
    net = model_zoo.get_model(name, pretrained=False, **({"pretrained_base": False} if is_ssd else {}))
    net.initialize(Start())
    size = 512 if is_ssd else 224
    net(mx.nd.zeros((1, 3, size, size)))
    file = models / "new.params"
    net.save_parameters(str(file))
    digest = hashlib.sha1(file.read_bytes()).hexdigest()
    file.rename(models / f"{name}-{digest[:8]}.params")
    return digest


# ---------------------------------------------------------------------------------------------------------------------
# One script, in a process of its own


def run_script(layer: str, script: str, arguments: list, options: tuple = ()) -> None:
    """As ``python script arguments`` would, with our layer through `gluon_syncbn.run` with these options."""
    sys.argv[:] = ["gluon_syncbn.run", *options, script, *arguments] if layer == "ours" else [script, *arguments]
    if layer == "ours":
        runpy.run_module("gluon_syncbn.run", run_name="__main__")
    else:
        sys.path.insert(0, os.path.dirname(script))
        runpy.run_path(script, run_name="__main__")


def play(layer: str, digests: dict, script: str, arguments: list) -> None:
    """Run ``script`` as ``python script arguments`` would, and measure it."""
    if layer == "ours":
        import gluon_syncbn  # noqa: F401
    elif layer == "contrib":
        os.environ.setdefault("MXNET_CPU_TEMP_COPY", "4096")  # with MXNet's 4 its layer hangs
    import mxnet as mx
    from gluoncv.model_zoo import model_store

    model_store._model_sha1.update(digests)
    if mx.context.num_gpus() == 0:
        mx.gpu = mx.cpu
    stamps, start, counts = [], {}, {"norms": 0, "same": 0}
    step = mx.gluon.Trainer.step

    def stamped_step(self, *args, **kwargs):
        if not stamps:
            start.update({item: _statistics(item) for item in _running_means()})
        elif len(stamps) == 2:  # not at the end: an estimator loads the best weights there
            now = {item: _statistics(item) for item in start}
            moved = [values for item, values in now.items() if (values != start[item]).any()]
            counts.update(norms=len(moved), same=sum(bool((values == values[0]).all()) for values in moved))
        stamps.append(time.monotonic())
        return step(self, *args, **kwargs)

    mx.gluon.Trainer.step = stamped_step
    try:
        run_script(layer, script, arguments)
    finally:
        mx.nd.waitall()
        gaps = [b - a for a, b in zip(stamps[2:], stamps[3:])]
        result = {
            "steps": len(stamps),
            **counts,
            "seconds": statistics.median(gaps) if gaps else None,
            "gib": most_memory() / 2**30,
        }
        print(MARKER + json.dumps(result), flush=True)


def most_memory() -> int:
    """The most bytes that this process has had resident. (``ru_maxrss`` also counts the process that started it.)"""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def _running_means():
    """The Parameters that live on several devices."""
    import gc

    import mxnet as mx

    found = [item for item in gc.get_objects() if isinstance(item, mx.gluon.Parameter)]
    wanted = ("running_mean", "moving_mean")
    return [item for item in found if item.name.endswith(wanted) and item._data is not None and len(item._data) > 1]


def _statistics(parameter):
    import numpy as np

    return np.stack([array.asnumpy() for array in parameter.list_data()])


def run(folder: Path, home: Path, digests: dict, name: str, layer: str, seconds: float) -> dict:
    script = SCRIPTS[name]
    words = script.options.split() + (script.synchronized.split() if layer != "plain" else []) + script.more.split()
    command = [sys.executable, __file__, "--play", layer, json.dumps(digests), str(folder / script.path), *words]
    variables = {**os.environ, "HOME": str(home), "MXNET_HOME": str(home / ".mxnet")}
    with tempfile.TemporaryDirectory() as place:
        try:
            limited = {"cwd": place, "env": variables, "capture_output": True, "text": True, "timeout": seconds}
            if script.resume:
                subprocess.run(command, **limited)
                left = sorted(Path(place).glob(script.resume))
                if not left:
                    return {"exit": "the first run left no weights to resume from"}
                command += ["--resume", str(left[-1])]
            done = subprocess.run(command, **limited)
        except subprocess.TimeoutExpired as cut:
            lines = (cut.stderr or b"").decode(errors="replace").splitlines()
            return {"exit": f"did not end in {seconds:g} s", "error": " | ".join(lines[-3:])[-400:]}
    measured = next((line for line in done.stdout.splitlines() if line.startswith(MARKER)), MARKER + "{}")
    result = {"exit": str(done.returncode), **json.loads(measured[len(MARKER) :])}
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        result["error"] = next((line for line in lines[::-1] if "Error" in line), lines[-1] if lines else "")[:200]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scripts", type=Path, help="the folder of GluonCV's repository")
    parser.add_argument("--only", nargs="*", default=list(SCRIPTS), choices=list(SCRIPTS))
    parser.add_argument("--layers", nargs="*", default=list(LAYERS), choices=LAYERS)
    parser.add_argument("--log", type=Path, help="one line of JSON per run")
    parser.add_argument("--seconds", type=float, default=600, help="limit of each run")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        home = Path(place)
        os.environ["MXNET_HOME"] = str(home / ".mxnet")
        write_data(home / ".mxnet")
        wanted = {base for name in options.only for base in SCRIPTS[name].base}
        digests = {base: write_base_weights(home / ".mxnet" / "models", base) for base in sorted(wanted)}
        for name in options.only:
            for layer in options.layers:
                folder = options.scripts.resolve()
                result = {"script": name, "layer": layer, **run(folder, home, digests, name, layer, options.seconds)}
                print(json.dumps(result), flush=True)
                if options.log:
                    with options.log.open("a") as log:
                        log.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--play"]:
        play(sys.argv[2], json.loads(sys.argv[3]), sys.argv[4], sys.argv[5:])
    else:
        main()
