"""Runs GluonCV's own training scripts with ``--horovod``, unedited, in several processes of one device each.

    git clone --branch v0.10.0 https://github.com/dmlc/gluon-cv
    OMP_NUM_THREADS=1 python benchmarks/gluoncv_processes.py gluon-cv/scripts

As `horovodrun -np 2 python -m gluon_syncbn.run SCRIPT --horovod ...`, with the data and base weights of
gluoncv_scripts.py. A row shows how the job ended, how many layers synchronized with the other processes, how many of
those whose running statistics have moved have the same ones everywhere, and seconds per batch. The scripts of SSD and
YOLOv3 make plain BatchNorm in a process with one device, with any options, so they run with ``--convert``.
(Without DALI all processes read the same images.) ``--hosts`` makes so many hosts for the processes (tests/hosts).
"""

import argparse
import contextlib
import hashlib
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from gluoncv_scripts import MARKER, run_script, write_base_weights, write_data

CONVERTED = ("SSD", "YOLOv3")
COMMON = "--horovod --num-workers 0 --log-interval 1"
SCRIPTS = {
    "SSD": (
        "detection/ssd/train_ssd.py",
        f"--network mobilenet0.25 --batch-size 4 --epochs 2 {COMMON} --syncbn",
        "mobilenet0.25",
    ),
    "YOLOv3": (
        "detection/yolo/train_yolo3.py",
        f"--network mobilenet0.25 --batch-size 4 --epochs 2 --data-shape 128 --no-random-shape {COMMON} --syncbn",
        "mobilenet0.25",
    ),
    "Faster R-CNN": (
        "detection/faster_rcnn/train_faster_rcnn.py",
        f"--network resnet50_v1b --dataset coco --use-fpn --kv-store device --batch-size 2 --epochs 1 {COMMON} "
        "--norm-layer syncbn",
        "resnet50_v1b",
    ),
}


def play(layer: str, digests: dict, name: str, script: str, arguments: list) -> None:
    """Run ``script`` as ``python script arguments`` would, and measure it."""
    if layer == "ours":
        import gluon_syncbn  # noqa: F401
    import mxnet as mx
    from gluoncv.model_zoo import model_store

    model_store._model_sha1.update(digests)
    if mx.context.num_gpus() == 0:
        mx.gpu = lambda number=0: mx.cpu()
    stamps, start, found = [], {}, {}
    step = mx.gluon.Trainer.step

    def stamped_step(self, *args, **kwargs):
        now = {
            item.name: item.list_data()[0].asnumpy()
            for item in self._params
            if item.name.endswith(("running_mean", "moving_mean"))
        }
        if not stamps:
            start.update(now)
        elif len(stamps) == 2:
            moved = [values for name, values in sorted(now.items()) if (values != start[name]).any()]
            found["digests"] = [hashlib.sha1(values.tobytes()).hexdigest()[:12] for values in moved]
            found["met"] = count_meetings() if layer == "ours" else 0
        stamps.append(time.monotonic())
        return step(self, *args, **kwargs)

    mx.gluon.Trainer.step = stamped_step
    try:
        run_script(layer, script, arguments, ("--convert",) if name in CONVERTED else ())
    finally:
        gaps = [b - a for a, b in zip(stamps[2:], stamps[3:])]
        result = {**found, "steps": len(stamps), "seconds": statistics.median(gaps) if gaps else None}
        sys.stdout.write(MARKER + json.dumps(result) + "\n")
        sys.stdout.flush()


def count_meetings() -> int:
    """Layers that have synchronized with the other processes."""
    from gluon_syncbn.step.steps import steps

    return sum(layer._sync.link is not None and layer._sync.link.place is not None for layer in steps.layers.blocks())


def run(scripts: Path, home: Path, digests: dict, name: str, layer: str, size: int, seconds: float, hosts=None) -> str:
    from common import launcher, path_of_launchers  # here, as it imports MXNet, and a worker chooses when to

    path, words, _ = SCRIPTS[name]
    play_it = [sys.executable, os.path.abspath(__file__), "--play", layer, json.dumps(digests), name]
    variables = {**os.environ, "HOME": str(home), "MXNET_HOME": str(home / ".mxnet"), "PATH": path_of_launchers()}
    with tempfile.TemporaryDirectory() as place:
        start = launcher("horovod", size, hosts, folder=place)
        # In a shell of its own: horovodrun takes a script's --network for one of its own options.
        command = [*start, "sh", "-c", shlex.join([*play_it, str(scripts / path), *words.split()])]
        limited = {"cwd": place, "env": variables, "timeout": seconds, "encoding": "utf-8", "errors": "replace"}
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **limited)
    found = [json.loads(text) for text in re.findall(re.escape(MARKER) + "(.*)", done.stdout)]
    lists = [item.get("digests", []) for item in found]
    same = sum(len(set(column)) == 1 for column in zip(*lists))
    met = min((item.get("met", 0) for item in found), default=0)
    row = f"{name}, {layer}: exit {done.returncode}; {met} layers met; statistics of {same} of "
    row += f"{max(map(len, lists), default=0)} layers are the same"
    if found and found[0]["seconds"] is not None:
        row += f"; {found[0]['steps']} steps of {found[0]['seconds']:.2f} s"
    if done.returncode:
        row += "\n" + done.stdout[-6000:]
    return row


def main() -> None:
    if sys.argv[1:2] == ["--play"]:
        return play(sys.argv[2], json.loads(sys.argv[3]), sys.argv[4], sys.argv[5], sys.argv[6:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scripts", type=Path, help="the folder of GluonCV's repository")
    parser.add_argument("--only", nargs="*", default=list(SCRIPTS), choices=list(SCRIPTS))
    parser.add_argument("--layer", choices=["ours", "plain"], default="ours")
    parser.add_argument("--size", type=int, default=2, help="processes")
    parser.add_argument("--hosts", type=int, default=1, help="made for the processes, as root")
    parser.add_argument("--seconds", type=float, default=900, help="limit of each run")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
        home = Path(place)
        os.environ["MXNET_HOME"] = str(home / ".mxnet")
        write_data(home / ".mxnet")
        names = {SCRIPTS[name][2] for name in options.only}
        digests = {name: write_base_weights(home / ".mxnet" / "models", name) for name in names}
        hosts = None
        if options.hosts > 1:
            from common import module_of_hosts

            hosts = stack.enter_context(module_of_hosts().Hosts(options.hosts))
        for name in options.only:
            chosen = (options.layer, options.size, options.seconds, hosts)
            print(run(options.scripts.resolve(), home, digests, name, *chosen), flush=True)


if __name__ == "__main__":
    main()
