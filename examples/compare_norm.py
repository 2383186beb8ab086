"""What synchronization gains: the same detector, data and steps with three normalizations, three seeds each.

    python examples/compare_norm.py

``bn``         nn.BatchNorm on 4 devices with 1 image each: the statistics of one image.
``syncbn``     SyncBatchNorm on the same 4 devices: the statistics of 4 images.
``reference``  nn.BatchNorm on one device with all 4 images: what syncbn should equal.

Every run is one process of train_detection.py; complete runs are not repeated. Draws the mean and spread over seeds,
and prints the table of docs/studies.md.
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


def run(name: str, seed: int, epochs: int, output: Path) -> list:
    folder = output / f"{name}-{seed}"
    history = folder / "history.json"
    if not history.exists() or len(json.loads(history.read_text(encoding="utf-8"))) < epochs:
        script = Path(__file__).with_name("train_detection.py")
        arguments = [*RUNS[name][1], "--seed", str(seed), "--epochs", str(epochs), "--output", str(folder)]
        print(f"{name}, seed {seed}", flush=True)
        subprocess.run([sys.executable, str(script), *arguments], check=True)
    return json.loads(history.read_text(encoding="utf-8"))


def spread(values) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def draw(histories: dict, path: Path) -> None:
    figure, axis = plt.subplots(figsize=(6, 4))
    for number, (name, runs) in enumerate(histories.items()):
        curves = list(zip(*([epoch["map"] for epoch in history] for history in runs)))
        means = [statistics.mean(values) for values in curves]
        epochs = [epoch + 0.03 * (number - 1) for epoch in range(1, len(means) + 1)]  # side by side, to tell them apart
        axis.errorbar(epochs, means, yerr=[spread(values) for values in curves], capsize=4, label=RUNS[name][0])
    axis.set(xlabel="epoch", ylabel="VOC07 mAP on held-out images", ylim=(0, 1))
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set_title(f"mean and standard deviation of {len(runs)} seeds")
    axis.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def table(histories: dict) -> str:
    lines = ["| normalization | VOC07 mAP, mean ± s.d. | each seed | last loss |", "| --- | --- | --- | --- |"]
    for name, runs in histories.items():
        scores = [history[-1]["map"] for history in runs]
        loss = statistics.mean(history[-1]["loss"] for history in runs)
        each = ", ".join(f"{score:.3f}" for score in scores)
        lines.append(
            f"| {RUNS[name][0]} | {statistics.mean(scores):.3f} ± {spread(scores):.3f} | {each} | {loss:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("runs/compare"))
    options = parser.parse_args()
    histories = {name: [] for name in RUNS}
    for seed in range(options.seeds):
        for name in RUNS:
            histories[name].append(run(name, seed, options.epochs, options.output))
    draw(histories, options.output / "compare_norm.png")
    print(table(histories))


if __name__ == "__main__":
    main()
