"""Converts every network of GluonCV's model zoo, and compares one training step with one device.

For each classification, detection, segmentation and pose network that builds without a download: two images on two CPU
contexts, one each, with the net converted by `convert_sync_batchnorm`, against both images on one context with
`nn.BatchNorm`. Outputs, the gradients of all parameters and of the images, and the running statistics must agree, in
float64 to 1e-6 of the largest value of each array; where a network has operators without float64, in float32 to 1e-2.
If a net magnifies rounding more, the limit is ten times the change of `nn.BatchNorm` on one device when the images are
exchanged. Dropout drops nothing, and R-CNN's sampler takes the same regions every time. The input is the smallest of
several sizes that the network accepts.

    OMP_NUM_THREADS=1 python benchmarks/zoo.py --log zoo.jsonl --table docs/gluoncv.md

Each network runs in a process of its own; the log is appended to, and networks that are in it are not run again.
"""

import argparse
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import gluon_syncbn  # before MXNet computes anything

# Not of these families: video, depth, tracking, and quantized networks, which have no BatchNorm left.
OTHERS = re.compile(
    "kinetics|ucf101|hmdb51|sthsthv2|int8|monodepth|siamrpn|_custom$|^custom_.*|^(vgg16|resnet)_.*_custom"
)
SIZES = (32, 64, 96, 128, 192, 224, 256, 320, 512)
# Smaller ones leave two values per channel, whose gradients magnify rounding.
SMALLEST = {"detection": 128, "classification": 64, "segmentation": 64, "pose": 64}
TOLERANCE = {"float64": 1e-6, "float32": 1e-2}
MARKER = "RESULT "
REASON = re.compile(r"Check failed|\w+Error: (?!Traceback)")


def names():
    from gluoncv import model_zoo

    # Those with the largest images last.
    found = [name for name in model_zoo.get_model_list() if not OTHERS.search(name)]
    return sorted(found, key=lambda name: "vgg16_atrous" in name)


def family(name: str) -> str:
    if re.search("rcnn|ssd|yolo|center_net", name):
        return "detection"
    if re.search("^(fcn|psp|deeplab|icnet|fastscnn|danet)|hrnet.*_s$", name):
        return "segmentation"
    return "pose" if "pose" in name else "classification"


def build(name: str, size: int, images: int, **options):
    """A net of the zoo with random weights, for ``images`` images of this size per device."""
    from gluoncv import model_zoo
    from mxnet.gluon import nn

    options["pretrained"] = False
    takes_options = "hrnet" not in name  # it hands them to its head, which does not
    if family(name) in ("detection", "segmentation", "pose") and takes_options:
        options.setdefault("pretrained_base", False)
    if family(name) == "segmentation" and takes_options:
        options["crop_size"] = size
    if "rcnn" in name:
        options["per_device_batch_size"] = images
    net = model_zoo.get_model(name, **options)

    def without_chance(block):
        if isinstance(block, nn.Dropout):
            block._rate = 0
        if hasattr(block, "drop_prob"):  # DropBlock
            block.drop_prob = 0

    net.apply(without_chance)
    getattr(net, "target_generator", None)  # R-CNN makes it when it is asked for, and its parameters with it
    return net


def inputs_of(name: str, net, size: int, count: int):
    """Images, and for nets that compute their loss or choose proposals, targets: a list of NumPy arrays."""
    import mxnet as mx
    import numpy as np

    rng = np.random.RandomState(0)
    images = rng.standard_normal((count, 3, size, size))
    boxes = np.array([[[0.1, 0.1, 0.6, 0.5], [0.2, 0.4, 0.9, 0.9]], [[0.3, 0.2, 0.9, 0.7], [0, 0, 0.5, 0.5]]]) * size
    labels = np.array([[[1], [2]], [[3], [0]]], dtype="float64")
    if "rcnn" in name:
        return [images, boxes, labels]
    if "yolo" in name:
        from gluoncv.data.transforms.presets.yolo import YOLO3DefaultTrainTransform

        transform = YOLO3DefaultTrainTransform(size, size, net)
        transform._target_generator._label_smooth = False
        samples = []
        for box, label in zip(boxes, labels):
            # Only the targets: the transform changes the image at random.
            fake = transform._fake_x
            boxes_nd, labels_nd = mx.nd.array(box[None]), mx.nd.array(label[None])
            targets = transform._target_generator(
                fake, transform._feat_maps, transform._anchors, transform._offsets, boxes_nd, labels_nd, None
            )
            samples.append([boxes_nd[0].asnumpy(), *(target[0].asnumpy() for target in targets)])
        return [images, *(np.stack(arrays) for arrays in zip(*samples))]
    return [images]


def count_layers(net) -> int:
    """How many SyncBatchNorm a net has, also those that stand for nodes of a SymbolBlock."""
    from gluon_syncbn.convert import all_blocks

    return sum(isinstance(block, gluon_syncbn.SyncBatchNorm) for block in all_blocks(net))


def arrays_in(outputs):
    import mxnet as mx

    if isinstance(outputs, mx.nd.NDArray):
        return [outputs]
    if isinstance(outputs, (list, tuple)):
        return [array for item in outputs for array in arrays_in(item)]
    return []


def step(net, inputs, devices, dtype, expected=None, exchanged=False):
    """One forward and backward pass; its results, as NumPy arrays by name, of the same outputs as ``expected``.

    ``exchanged`` computes the same with the images in the opposite order.
    """
    import mxnet as mx
    import numpy as np

    count = len(inputs[0]) // len(devices)
    order = slice(None, None, -1) if exchanged else slice(None)
    shards = []
    for rank, device in enumerate(devices):
        part = slice(rank * count, (rank + 1) * count)
        shards.append([mx.nd.array(item[part], ctx=device, dtype=dtype) for item in (item[order] for item in inputs)])
        shards[-1][0].attach_grad()
    found, losses = {}, [0] * len(devices)
    with mx.autograd.record():
        outputs = [arrays_in(net(*shard)) for shard in shards]
        for number, arrays in enumerate(zip(*outputs)):
            shape = (len(inputs[0]), *arrays[0].shape[1:])
            if expected is None and arrays[0].shape != shape or expected and f"output {number}" not in expected:
                continue  # the same for all images, as anchors are
            head = np.random.RandomState(number).standard_normal(shape) / np.sqrt(np.prod(shape[1:]))
            for rank, (array, part) in enumerate(zip(arrays, np.split(head[order], len(devices)))):
                product = array * mx.nd.array(part, ctx=array.context, dtype=array.dtype)
                losses[rank] = losses[rank] + product.sum().astype(dtype)
            found[f"output {number}"] = arrays
    mx.autograd.backward(losses)
    found = {name: np.concatenate([item.asnumpy() for item in arrays])[order] for name, arrays in found.items()}
    found["input gradient"] = np.concatenate([shard[0].grad.asnumpy() for shard in shards])[order]
    for name, parameter in net.collect_params().items():
        if parameter.grad_req != "null":
            found[f"gradient {name}"] = sum(parameter.grad(device).asnumpy().astype("f8") for device in devices)
        elif "running" in name or "moving" in name:
            values = [parameter.data(device).asnumpy() for device in devices]
            found[name] = values[0] if all(np.array_equal(values[0], value) for value in values) else np.nan * values[0]
    mx.nd.waitall()
    return found


def distances(actual, expected):
    """The largest difference of each kind of array, relative to the largest value of that array."""
    import numpy as np

    scale = max(np.abs(value).max() for name, value in expected.items() if name.startswith("gradient"))
    worst = {"outputs": 0.0, "gradients": 0.0, "statistics": 0.0}
    for (name, value), other in zip(expected.items(), actual.values()):
        kind = "outputs" if name.startswith("output") else "gradients" if "gradient" in name else "statistics"
        # A convolution bias before BatchNorm has gradient 0, so gradients also compare with the net's largest; and a
        # mean may be 0, so it also compares with the deviation.
        floor = {"outputs": 1e-300, "gradients": 1e-2 * scale, "statistics": 1e-300}[kind]
        if name.endswith("mean"):
            floor = np.sqrt(expected[name[: -len("mean")] + "var"].max())
        size = max(np.abs(value).max(), floor)
        difference = np.abs(value - other).max() / size if value.size else 0.0
        worst[kind] = max(worst[kind], float(np.nan_to_num(difference, nan=np.inf)))
    return worst


def compare(name: str, size: int, dtype: str, build_synchronized=None, always_both=True):
    """How far a step on two devices is from one on one device, with SyncBatchNorm and with nn.BatchNorm.

    The latter only if the former is not equal, unless ``always_both``.
    """
    import mxnet as mx
    import numpy as np
    from common import Start
    from gluoncv.loss import YOLOV3Loss
    from gluoncv.model_zoo.rcnn.faster_rcnn import DoubleHeadRCNN, FasterRCNN
    from gluoncv.model_zoo.rcnn.faster_rcnn.rcnn_target import RCNNTargetSampler
    from gluoncv.model_zoo.rcnn.mask_rcnn import MaskRCNN
    from gluoncv.model_zoo.rcnn.rpn.anchor import RPNAnchorGenerator
    from gluoncv.nn.bbox import BBoxClipToImage
    from gluoncv.nn.coder import NormalizedPerClassBoxCenterEncoder as Encoder

    mx.random.seed(0)
    np.random.seed(0)
    RCNNTargetSampler.hybrid_forward = _fixed_sample
    if dtype == "float64":
        for kind in (YOLOV3Loss, BBoxClipToImage, FasterRCNN, MaskRCNN, DoubleHeadRCNN, Encoder, RPNAnchorGenerator):
            _compute_in_float64(kind)
    one, two = [mx.cpu(0)], [mx.cpu(0), mx.cpu(1)]
    gluon_syncbn.install()  # contrib's layer, in networks that have it, knows no float64
    reference = gluon_syncbn.convert_batchnorm(build(name, size, images=2))
    reference.initialize(Start(), ctx=one, force_reinit=True)
    inputs = inputs_of(name, reference, size, 2)
    reference.cast(dtype)
    with mx.autograd.record():  # for the shapes
        reference(*[mx.nd.array(item, dtype=dtype) for item in inputs])
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("gluon_syncbn.convert")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "start.params")
        reference.save_parameters(file)
        start = {key: value.data(one[0]).asnumpy() for key, value in reference.collect_params().items()}

        def on_two_devices(net):
            net.cast(dtype)
            net.initialize(Start(), ctx=two, force_reinit=True)  # some heads come initialized, on one device
            net.load_parameters(file, ctx=two)
            return net

        expected = step(reference, inputs, one, dtype)
        if build_synchronized is None:
            net = gluon_syncbn.convert_sync_batchnorm(build(name, size, images=1), timeout=100)
        else:
            net = build_synchronized(name, size, images=1)
        layers = count_layers(net)
        synchronized = step(on_two_devices(net), inputs, two, dtype, expected)
        result = {
            "layers": layers,
            "dtype": dtype,
            "size": size,
            "notes": [message for message in messages if "unsynchronized" in message],
            "frozen": all("running" not in key or np.array_equal(expected[key], value) for key, value in start.items()),
            **distances(synchronized, expected),
        }
        if always_both or not is_equal(result):
            net = gluon_syncbn.convert_batchnorm(build(name, size, images=1))
            unsynchronized = step(on_two_devices(net), inputs, two, dtype, expected)
            result["nn.BatchNorm"] = max(distances(unsynchronized, expected).values())
            reference.load_parameters(file, ctx=one)
            exchanged = step(reference, inputs, one, dtype, expected, exchanged=True)
            result["exchanged"] = max(distances(exchanged, expected).values())
    return result


def _fixed_sample(self, F, rois, scores, gt_boxes):
    """Replaces R-CNN's sampler: the same regions every time, not some of those that this pass proposes."""
    box = gt_boxes.slice_axis(axis=1, begin=0, end=1)
    scale = F.arange(self._num_sample, dtype=box.dtype).reshape((1, -1, 1)) / (2 * self._num_sample) + 0.5
    regions = F.broadcast_mul(box, scale)
    number = F.arange(self._num_sample, dtype=box.dtype).reshape((1, -1))
    number = F.broadcast_like(number, regions, lhs_axes=(0,), rhs_axes=(0,))
    samples = F.where(number < self._max_pos, F.ones_like(number), -F.ones_like(number))
    return regions, samples, F.zeros_like(number)


def _compute_in_float64(kind) -> None:
    """GluonCV has hard-coded float32 in some blocks of nets of any type."""
    forward = kind.hybrid_forward
    kind.hybrid_forward = lambda self, F, *args, **kwargs: forward(self, _InFloat64(F), *args, **kwargs)


class _InFloat64:
    """mx.nd, but arrays are float64 where float32 is passed, or no type."""

    def __init__(self, F):
        self.F = F

    def __getattr__(self, name):
        return getattr(self.F, name)

    def cast(self, x, dtype):
        return self.F.cast(x, "float64" if dtype == "float32" else dtype)

    def arange(self, *args, **kwargs):
        return self.F.arange(*args, **{"dtype": "float64", **kwargs})


def is_equal(result) -> bool:
    worst = max(result["outputs"], result["gradients"], result["statistics"])
    same_as_unsynchronized = result["frozen"] and worst <= result.get("nn.BatchNorm", 0)
    rounding = worst <= 10 * result.get("exchanged", 0)
    return not result["notes"] and (worst < TOLERANCE[result["dtype"]] or same_as_unsynchronized or rounding)


def run(name: str, seconds: float):
    """The smallest size and the best type that work, each in a process of its own."""
    deadline, reasons, best = time.monotonic() + seconds, [], None
    for dtype in ("float64", "float32"):
        for size in (size for size in SIZES if size >= SMALLEST[family(name)] or "cifar" in name):
            left = deadline - time.monotonic()
            if left < 1:
                return best or {"error": f"stopped after {seconds:g} s; before that: {' | '.join(reasons[-1:])}"}
            command = [sys.executable, __file__, "--one", name, "--size", str(size), "--dtype", dtype]
            # oneDNN has no float64, and some operators forget to ask.
            variables = {**os.environ, "MXNET_MKLDNN_ENABLED": "1" if dtype == "float32" else "0"}
            try:
                done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=left)
            except subprocess.TimeoutExpired:
                reasons.append(f"did not end at {size}×{size} in {dtype}")
                break
            for line in done.stdout.splitlines():
                if line.startswith(MARKER):
                    result = json.loads(line[len(MARKER) :])
                    if is_equal(result) or dtype == "float32":
                        return result
                    best = result
            if best is not None:
                break
            lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
            reasons.append(next((line for line in lines[::-1] if REASON.search(line)), lines[-1]).strip()[:200])
            if "download" in done.stderr or "No such file" in reasons[-1]:
                return {"error": "needs a download"}
        if best is not None:
            return best
    common = Counter(reasons).most_common(1)[0][0]
    return best or {"error": common}


def write_table(log: Path, table: Path) -> None:
    """The table, in which the rows of the log replace the same networks' rows."""
    text = table.read_text(encoding="utf-8") if table.exists() else ""
    head, _, body = text.partition("<!-- table -->")
    rows = {line.split("|")[1].strip(): line for line in body.splitlines() if line.count("|") == 9}
    results = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    rows.update({result["name"]: _row(result) for result in results})
    lines = []
    for title in ("classification", "detection", "segmentation", "pose"):
        wanted = [name for name in names() if family(name) == title]
        found = [rows[name] for name in wanted if name in rows]
        equal = sum("| yes |" in row for row in found)
        lines += [f"## {title.capitalize()}: {equal} of {len(found)} equal", ""]
        lines += ["| network | layers | input | equal | outputs | gradients | statistics | |", "|" + " --- |" * 8]
        lines += found
        missing = [name for name in wanted if name not in rows]
        if missing:
            lines += ["", f"Not run yet ({len(missing)}): {', '.join(missing)}."]
        lines.append("")
    table.write_text(head + "<!-- table -->\n\n" + "\n".join(lines), encoding="utf-8")


def _row(result) -> str:
    if "error" in result:
        return f"| {result['name']} | | | not run | | | | {result['error'].replace('|', '/')} |"
    numbers = " | ".join(f"{result[kind]:.0e}" for kind in ("outputs", "gradients", "statistics"))
    notes = [*(["float32"] if result["dtype"] == "float32" else []), *result["notes"]]
    if result.get("exchanged", 0) > TOLERANCE[result["dtype"]] / 10:
        notes.append(f"nn.BatchNorm on one device changes by {result['exchanged']:.0e} with the images exchanged")
    size = f"{result['size']}×{result['size']}"
    verdict = "yes" if is_equal(result) else "**no**"
    return f"| {result['name']} | {result['layers']} | {size} | {verdict} | {numbers} | {'; '.join(notes)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log", type=Path, default=Path("zoo.jsonl"), help="one line of JSON per network")
    parser.add_argument("--table", type=Path, help="Markdown file whose table is written anew")
    parser.add_argument("--only", default="", help="regular expression of names")
    parser.add_argument("--seconds", type=float, default=300, help="per network")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--dtype", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(MARKER + json.dumps(compare(options.one, options.size, options.dtype, always_both=False)), flush=True)
        return
    done = (
        {json.loads(line)["name"] for line in options.log.read_text(encoding="utf-8").splitlines()}
        if options.log.exists()
        else set()
    )
    for name in names():
        if name in done or not re.search(options.only, name):
            continue
        started = time.monotonic()
        result = {"name": name, **run(name, options.seconds)}
        with options.log.open("a") as log:
            log.write(json.dumps(result) + "\n")
        print(f"{time.monotonic() - started:5.0f} s  {json.dumps(result)}", flush=True)
    if options.table:
        write_table(options.log, options.table)


if __name__ == "__main__":
    main()
