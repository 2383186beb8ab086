"""Runs step_time.py and peers.py and draws the chart of docs/performance.md: docs/step_time.png.

    OMP_NUM_THREADS=1 python benchmarks/chart.py

Flax and Keras run if they are installed (pip install '.[peers]') here, or for the interpreter that --peers names.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402

HERE = Path(__file__).parent
COLOURS = {"native": "tab:blue", "portable": "tab:cyan", "contrib": "tab:red", "flax": "tab:gray", "keras": "tab:gray"}


def run(*command) -> str:
    done = subprocess.run([str(word) for word in command], cwd=HERE, capture_output=True, text=True, timeout=900)
    if done.returncode:
        print(f"{' '.join(str(word) for word in command)} failed:\n{done.stderr[-500:]}", file=sys.stderr)
    return done.stdout


def throughputs(net: str) -> dict:
    """Layer: throughput against nn.BatchNorm."""
    told = run(sys.executable, "step_time.py", "--net", net)
    print(told, flush=True)
    rows = re.findall(r"^\| (native|portable|contrib) \| \d+ ms \| ([\d.]+) \|", told, re.MULTILINE)
    return {name: float(value) for name, value in rows}


def peer(python: str, framework: str, net: str) -> dict:
    """The same of another framework; nothing where it is not installed."""
    told = run(python, "peers.py", framework, "--net", net)
    print(told, flush=True)
    found = re.search(r"unsynchronized layer ([\d.]+)", told)
    return {framework: float(found.group(1))} if found else {}


def draw(groups: dict, path: Path) -> None:
    """Bars of throughput, one group per net: {net: {layer: throughput}}."""
    figure, axes = plt.subplots(figsize=(8, 3.6), layout="constrained")
    axes.axhline(1, color="black", linewidth=0.8, linestyle=":", zorder=0)
    place, ticks = 0, []
    for values in groups.values():
        first = place
        for name, value in sorted(values.items(), key=lambda item: -item[1]):
            bar = axes.bar(place, value, color=COLOURS[name], width=0.8)
            label = {"native": "gluon_syncbn\nnative", "portable": "gluon_syncbn\nportable"}.get(name, name)
            behind = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
            axes.bar_label(bar, [f"{value:.2f}\n{label}"], fontsize=7.5, padding=2, bbox=behind)
            place += 1
        ticks.append((first + place - 1) / 2)
        place += 0.7
    axes.set_xticks(ticks, list(groups))
    axes.set_ylim(0, 1.2)
    axes.set_ylabel("throughput of a training step\n(the framework's own layer\nwithout synchronization = 1)")
    axes.set_title("What synchronization costs on 2 CPU devices (medians of interleaved steps)", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default=sys.executable, help="Python with flax and keras")
    options = parser.parse_args()
    groups = {"8 × (conv, norm, ReLU)": throughputs("chain")}
    for framework in ("flax", "keras"):
        groups["8 × (conv, norm, ReLU)"].update(peer(options.peers, framework, "chain"))
    groups["ResNet-50"] = throughputs("resnet50")
    groups["ResNet-50"].update(peer(options.peers, "flax", "resnet50"))
    groups["YOLOv3 on ResNet-18"] = throughputs("detector")
    draw(groups, HERE.parent / "docs" / "step_time.png")


if __name__ == "__main__":
    main()
