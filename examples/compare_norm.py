"""The gain of synchronization: the same detector, data and steps with three normalizations, three seeds each.

    python examples/compare_norm.py

``bn``         nn.BatchNorm on 4 devices with 1 image each: the statistics of one image.
``syncbn``     SyncBatchNorm on the same 4 devices: the statistics of 4 images.
``reference``  nn.BatchNorm on one device with all 4 images: syncbn should equal it.

Every run is one process of train_detection.py; complete runs are not repeated. Draws the mean over seeds, with a band
from the lowest to the highest of them, and prints the table of docs/studies.md.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402

RUNS = {
    "bn": ("nn.BatchNorm, 4 devices × 1 image", ["--norm", "bn", "--devices", "cpu:4", "--batch-per-device", "1"]),
    "syncbn": (
        "SyncBatchNorm, 4 devices × 1 image",
        ["--norm", "syncbn", "--devices", "cpu:4", "--batch-per-device", "1"],
    ),
    "reference": (
        "nn.BatchNorm, 1 device × 4 images",
        ["--norm", "bn", "--devices", "cpu:1", "--batch-per-device", "4"],
    ),
}
IMAGES = 1000  # fewer than a training that is to detect well: the differences show early
STYLES = {"bn": ("tab:red", "-"), "syncbn": ("tab:blue", "-"), "reference": ("black", "--")}


def run(name: str, seed: int, epochs: int, output: Path) -> list:
    folder = output / f"{name}-{seed}"
    history = folder / "history.json"
    if not history.exists() or len(json.loads(history.read_text(encoding="utf-8"))) < epochs:
        script = Path(__file__).with_name("train_detection.py")
        images = ["--images", str(IMAGES), "--root", str(output / "digits")]
        arguments = [*RUNS[name][1], *images, "--seed", str(seed), "--epochs", str(epochs), "--output", str(folder)]
        print(f"{name}, seed {seed}", flush=True)
        subprocess.run([sys.executable, str(script), *arguments], check=True)
    return json.loads(history.read_text(encoding="utf-8"))


def spread(values) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def draw(histories: dict, path: Path) -> None:
    figure, axis = plt.subplots(figsize=(6.5, 4.2), layout="constrained")
    for name, runs in histories.items():
        colour, line = STYLES[name]
        curves = list(zip(*([epoch["map"] for epoch in history] for history in runs)))
        epochs = range(1, len(curves) + 1)
        axis.fill_between(epochs, list(map(min, curves)), list(map(max, curves)), color=colour, alpha=0.2, linewidth=0)
        axis.plot(epochs, list(map(statistics.mean, curves)), line, color=colour, marker="o", label=RUNS[name][0])
    axis.set(xlabel="epoch", ylabel="VOC07 mAP on held-out images", ylim=(0, 1))
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set_title(f"The same detector, images and steps; {len(runs)} seeds, mean and range", fontsize=11)
    axis.grid(alpha=0.3)
    axis.legend(loc="lower right")
    figure.savefig(path, dpi=130)


def table(histories: dict) -> str:
    epochs = range(1, 1 + min(len(history) for runs in histories.values() for history in runs))
    names = " | ".join(f"epoch {epoch}" for epoch in epochs)
    lines = [f"| VOC07 mAP, mean ± s.d. | {names} | last, each seed |", f"| --- | {'--- | ' * len(epochs)}--- |"]
    for name, runs in histories.items():
        curves = zip(*([epoch["map"] for epoch in history] for history in runs))
        means = " | ".join(f"{statistics.mean(values):.3f} ± {spread(values):.3f}" for values in curves)
        each = ", ".join(f"{history[-1]['map']:.3f}" for history in runs)
        lines.append(f"| {RUNS[name][0]} | {means} | {each} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("runs/compare_norm"))
    options = parser.parse_args()
    histories = {name: [] for name in RUNS}
    for seed in range(options.seeds):
        for name in RUNS:
            histories[name].append(run(name, seed, options.epochs, options.output))
    draw(histories, options.output / "compare_norm.png")
    print(table(histories))


if __name__ == "__main__":
    main()
