"""Runs step_time.py and peers.py and draws the chart of docs/performance.md: docs/step_time.png.

    OMP_NUM_THREADS=1 python benchmarks/chart.py

Flax and Keras run if they are installed (pip install '.[peers]') here, or for the interpreter that --peers names.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path
from typing import List, NamedTuple

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402

HERE = Path(__file__).parent
NAMES = {"native": "gluon_syncbn", "portable": "gluon_syncbn, portable", "contrib": "MXNet's contrib layer"}
COLOURS = {"gluon_syncbn": "tab:blue", "MXNet's contrib layer": "tab:red"}


class Bar(NamedTuple):
    layer: str
    milliseconds: float
    throughput: float  # against the layer of the same framework that does not synchronize; 1 for that one itself


def run(*command) -> str:
    done = subprocess.run([str(word) for word in command], cwd=HERE, capture_output=True, text=True, timeout=900)
    if done.returncode:
        print(f"{' '.join(str(word) for word in command)} failed:\n{done.stderr[-500:]}", file=sys.stderr)
    print(done.stdout, flush=True)
    return done.stdout


def layers(net: str) -> List[Bar]:
    rows = re.findall(
        r"^\| ([\w.]+) \| (\d+) ms \| ([\d.]+) \|", run(sys.executable, "step_time.py", "--net", net), re.M
    )
    return [Bar(NAMES.get(name, name), float(time), float(throughput)) for name, time, throughput in rows]


def peer(python: str, framework: str, net: str) -> List[Bar]:
    """Another framework's layers; none where it is not installed."""
    text = run(python, "peers.py", framework, "--net", net)
    times = dict(re.findall(r"(alone|synchronized) (\d+) ms", text))
    if not times:
        return []
    (throughput,) = re.findall(r"unsynchronized layer ([\d.]+)", text)
    name = framework.capitalize()
    return [
        Bar(f"{name}, not synchronized", float(times["alone"]), 1),
        Bar(f"{name}, synchronized", float(times["synchronized"]), float(throughput)),
    ]


def draw(nets: dict, path: Path) -> None:
    """One panel per net, {its title: its bars}, as high as it has bars."""
    heights = [len(bars) for bars in nets.values()]
    figure, panels = plt.subplots(
        len(nets), figsize=(8, 1.2 + 0.3 * sum(heights)), height_ratios=heights, layout="constrained"
    )
    for axis, (title, bars) in zip(panels, nets.items()):
        colours = [COLOURS.get(bar.layer, "tab:cyan" if "portable" in bar.layer else "tab:gray") for bar in bars]
        drawn = axis.barh([bar.layer for bar in bars], [bar.milliseconds for bar in bars], color=colours, height=0.7)
        texts = [
            f"{bar.milliseconds:.0f} ms" + (f"  ({bar.throughput:.2f})" if bar.throughput != 1 else "") for bar in bars
        ]
        axis.bar_label(drawn, texts, padding=3, fontsize=9)
        axis.invert_yaxis()
        axis.set_xlim(0, 1.2 * max(bar.milliseconds for bar in bars))
        axis.set_title(title, fontsize=10, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel(
        "milliseconds of a training step; in brackets the throughput against\n"
        "the layer of the same framework that does not synchronize"
    )
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default=sys.executable, help="Python with flax and keras")
    options = parser.parse_args()
    nets = {
        "8 × (convolution, norm, ReLU), 8×64×56×56 on each of 2 CPU devices": layers("chain")
        + peer(options.peers, "flax", "chain")
        + peer(options.peers, "keras", "chain"),
        "ResNet-50, 4×3×128×128 on each": layers("resnet50") + peer(options.peers, "flax", "resnet50"),
        "YOLOv3 on ResNet-18, 1×3×128×128 on each": layers("detector"),
    }
    draw({title: bars for title, bars in nets.items() if bars}, HERE.parent / "docs" / "step_time.png")


if __name__ == "__main__":
    main()
