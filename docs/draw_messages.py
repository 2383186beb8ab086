"""Draws messages.png, the two messages that a layer sends per step: python docs/draw_messages.py"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402

DEVICES = 3
BOX = {"boxstyle": "round,pad=0.5", "facecolor": "white", "edgecolor": "0.3"}
MEETING = {**BOX, "facecolor": "#fff3d6", "edgecolor": "#b8860b"}
FORWARD, BACKWARD = "#1f77b4", "#d62728"


def draw_direction(axes, title, colour, before, message, meeting, result, after):
    axes.set(xlim=(0, 6), ylim=(0, 5.2))
    axes.axis("off")
    axes.set_title(title, color=colour, fontsize=13, weight="bold")
    axes.text(3, 2.6, meeting, ha="center", va="center", bbox=MEETING, fontsize=10)
    for rank in range(DEVICES):
        x = 1 + 2 * rank
        axes.text(x, 4.7, before.format(d=rank), ha="center", va="center", bbox=BOX, fontsize=10)
        axes.text(x, 0.5, after.format(d=rank), ha="center", va="center", bbox=BOX, fontsize=10)
        to, back = (3 + 0.75 * (rank - 1), 3.15), (3 + 0.75 * (rank - 1), 2.05)
        arrow = {"arrowstyle": "-|>", "color": colour, "linewidth": 1.8}
        axes.annotate("", to, (x, 4.25), arrowprops=arrow)
        axes.annotate("", (x, 0.95), back, arrowprops=arrow)
    axes.text(5.9, 3.75, message, ha="right", va="center", color=colour, fontsize=10)
    axes.text(5.9, 1.5, result, ha="right", va="center", color=colour, fontsize=10)


def main() -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5))
    draw_direction(
        left,
        "forward",
        FORWARD,
        "device {d}\n$x_{d}$: moments",
        "$n_d,\\ m_d,\\ M_d$\n$2C+1$ numbers",
        "all have arrived:\nmerge by counts, in rank order\n$mean = \\Sigma n_d m_d / N$",
        "$N,\\ mean,\\ var$",
        "$y_{d} = \\gamma\\hat{{x}}_{d} + \\beta$\nrunning statistics",
    )
    draw_direction(
        right,
        "backward",
        BACKWARD,
        "device {d}\n$dy_{d}$: sums",
        "$\\Sigma dy,\\ \\Sigma dy\\,\\hat{x}$\n$2C$ numbers",
        "all have arrived:\nadd, in rank order\n$S_1,\\ S_2$",
        "$S_1,\\ S_2$",
        "$dx_{d}$, and this device's\nown $d\\gamma,\\ d\\beta$",
    )
    figure.tight_layout()
    figure.savefig(Path(__file__).with_name("messages.png"), dpi=100)


if __name__ == "__main__":
    main()
