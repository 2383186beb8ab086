"""Writes the numbers measured on a GPU as the tables of docs/gpu.md.

    python benchmarks/gpu_table.py OUT/results-*.tar.gz                        # print them
    python benchmarks/gpu_table.py OUT/results-*.tar.gz --page docs/gpu.md     # put them there

`run.sh` of the folder for GPUs has filled OUT. Parts of one machine make one table; several machines' tables
follow each other.
"""

import argparse
import json
import statistics
import sys
import tarfile
from pathlib import Path

BEGIN, END = "<!-- numbers -->", "<!-- end of numbers -->"
DIRECTIONS = ("forward", "backward")
KERNELS = ("moments", "normalize", "gradient_sums", "input_gradient")


def describe(results: dict) -> list:
    """Lines of Markdown."""
    machine, bundle = results["machine"], results["bundle"]
    gpu = (machine["nvidia_smi"] or "a GPU of which nvidia-smi told nothing").splitlines()[0]
    name, driver = (word.strip() for word in (gpu + ",").split(",")[:2])
    device = results.get("kernels", results.get("speed", {})).get("device", "")
    software = "; ".join(
        filter(
            None, [device, f"NVRTC {str(machine['nvrtc']).split()[-1]}", bundle["mxnet"], f"commit {bundle['commit']}"]
        )
    )
    lines = [f"### {name}", "", f"Driver {driver}; {machine['cores']} cores; {software}; {machine['date']} UTC.", ""]
    lines += describe_steps(results)
    if "speed" in results:
        lines += describe_speed(results["speed"])
    if "latency" in results:
        lines += describe_latency(results["latency"])
    if "meeting" in results:
        lines += describe_meeting(results["meeting"])
    return lines


def describe_steps(results: dict) -> list:
    lines = ["| step | ended | seconds |", "| --- | --- | --- |"]
    for step in results["steps"]:
        more = f": {step['last_line'].strip('= ')}" if "passed" in step["last_line"] else ""
        if step["name"] == "kernels" and "kernels" in results:
            cases, wrong = results["kernels"]["cases"], len(results["kernels"]["failures"])
            more = f": right on {cases - wrong} of {cases} random cases"
        if step["name"] == "soak" and "soak" in results:
            more = f": {results['soak']['steps']} steps on {', '.join(results['soak']['devices'])}"
        lines.append(f"| {step['name']} | {step['ended']}{more} | {step['seconds']:.0f} |")
    if results["machine"]["gpus"] == 1:
        lines += ["", "There was one GPU; where two are named, gpu(1) is the same once more, with streams of its own."]
    return [*lines, ""]


def describe_speed(speed: dict) -> list:
    """The kernels' table; benchmarks/gpu.py describes the numbers."""
    names = ("copy", *KERNELS, *(f"{way} | of copy | × PyTorch" for way in DIRECTIONS))
    lines = [f"| | {' | '.join(names)} |", "|" + " --- |" * 12]
    for result in speed["results"]:
        shape = "×".join(map(str, result["shape"]))
        row = [f"{result['dtype']} {result['layout']} {shape}", f"{result['copy_TB_per_s']:.2f} TB/s"]
        row += [f"{result['microseconds'][f'ours, {name}']:.1f} µs" for name in KERNELS]
        for direction in DIRECTIONS:
            key = f"ours, {direction}"
            ratio = result.get("times_as_fast_as_pytorch", {}).get(direction)
            row += [
                f"{result['microseconds'][key]:.0f} µs",
                f"{result['of_copy'][key]:.2f}",
                f"{ratio:.2f}" if ratio else "",
            ]
        lines.append(f"| {' | '.join(row)} |")
    return [*lines, ""]


def describe_latency(latency: dict) -> list:
    lines = ["| from one to the next | median | 99 of 100 |", "| --- | --- | --- |"]
    for part, times in latency["found"].items():
        most = sorted(times)[int(0.99 * (len(times) - 1))]
        lines.append(f"| {part} | {statistics.median(times):.1f} µs | {most:.1f} µs |")
    return [*lines, ""]


def describe_meeting(meeting: dict) -> list:
    lines = ["| devices | direction | training | prediction | more |", "| --- | --- | --- | --- | --- |"]
    for result in meeting["results"]:
        for direction in DIRECTIONS:
            took = [f"{result[direction][kind]:.0f} µs" for kind in ("training", "prediction", "more")]
            lines.append(f"| {result['devices']} | {direction} | {' | '.join(took)} |")
    return [*lines, ""]


def load(file: Path) -> dict:
    with tarfile.open(file) as archive:
        return json.load(archive.extractfile("results/results.json"))


def merge(runs: list) -> list:
    """Parts that one machine has run of one commit are one."""
    merged = {}
    for results in runs:
        key = results["machine"]["nvidia_smi"], results["bundle"]["commit"]
        known = merged.setdefault(key, {**results, "steps": []})
        known.update({name: value for name, value in results.items() if name not in ("steps", "machine")})
        known["steps"] += results["steps"]
    return list(merged.values())


def put(lines: list, page: Path) -> None:
    """Between the two marks of ``page``."""
    text = page.read_text(encoding="utf-8")
    before, mark, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not mark or not end:
        raise SystemExit(f"{page} has no {BEGIN} with {END} after it")
    page.write_text(before + BEGIN + "\n\n" + "\n".join(lines) + END + after, encoding="utf-8")


def main(words=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, nargs="+", help="archives of runs")
    parser.add_argument("--page", type=Path, help="Markdown file that has the numbers")
    arguments = parser.parse_args(words)
    runs = merge([load(file) for file in arguments.results])
    lines = [line for results in runs for line in describe(results)]
    if arguments.page is None:
        print("\n".join(lines))
        return 0
    if any(results["machine"]["stands_in"] or not results["machine"]["gpus"] for results in runs):
        print("These numbers are not of a GPU, so they are not for that page.", file=sys.stderr)
        return 1
    put(lines, arguments.page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
