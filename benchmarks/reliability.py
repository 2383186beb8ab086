"""How each fault of tests/endings.py ends, for our layer on both back ends and for the one that MXNet ships.

    OMP_NUM_THREADS=1 python benchmarks/reliability.py [faults]

Every fault runs in a process of its own, in the three modes side by side, with a timeout of 6 s for our layer, and is
killed after 20 s. Prints a Markdown table; the seconds are from the fault until the process could go on, or ended.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from endings import FAULTS, MODES  # noqa: E402

LAYERS = ["native", "portable", "contrib"]
TIMEOUT, LIMIT = 6, 20


def start(fault: str, layer: str, mode: str, output) -> subprocess.Popen:
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "GLUON_SYNCBN_TIMEOUT": str(TIMEOUT), "PYTHONPATH": str(ROOT)}
    environment.pop("MXNET_CPU_TEMP_COPY", None)
    command = [sys.executable, str(ROOT / "tests" / "endings.py"), fault, "--layer", layer, "--mode", mode]
    return subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)


def outcomes(fault: str, layer: str) -> list:
    """For each mode: how the process ended, and the seconds since the fault began."""
    with tempfile.TemporaryDirectory() as folder:
        files = {mode: Path(folder, mode) for mode in MODES}
        running = {mode: start(fault, layer, mode, files[mode].open("w")) for mode in MODES}
        begun, seen, started = {}, {}, time.perf_counter()
        while len(seen) < len(MODES):
            time.sleep(0.02)
            now = time.perf_counter()
            for mode, process in running.items():
                if mode in seen:
                    continue
                code, output = process.poll(), files[mode].read_text(encoding="utf-8")
                if "BEGIN" in output:
                    begun.setdefault(mode, now)
                seconds = now - begun.get(mode, now)
                if code is not None:
                    seen[mode] = (outcome(code, output), seconds_told(output, seconds))
                elif seconds > LIMIT or now - started > 2 * LIMIT:
                    process.kill()
                    seen[mode] = ("hung" if mode in begun else "hung before the fault", None)
        return [seen[mode] for mode in MODES]


def outcome(code: int, output: str) -> str:
    if "RIGHT AFTERWARDS" in output:
        return "right afterwards"
    if "WRONG AFTERWARDS" in output:
        return "wrong afterwards"
    if "terminate called" in output:
        return "terminate called"
    return f"exit {code}" if code >= 0 else f"ended by signal {-code}"


def seconds_told(output: str, seconds: float) -> float:
    return float(output.split("TOOK ")[1].split()[0]) if "TOOK " in output else seconds


def summary(seen: list) -> str:
    """The same in all modes in one word, else one for each mode."""
    names = [name for name, _ in seen]
    seconds = [value for _, value in seen if value is not None]
    took = f", {max(seconds):.1f} s" if seconds else ""
    if len(set(names)) == 1:
        return names[0] + took
    return "; ".join(f"{mode}: {name}" for mode, name in zip(MODES, names)) + took


def main() -> None:
    print("| fault | " + " | ".join(LAYERS) + " |")
    print("| --- |" + " --- |" * len(LAYERS))
    for fault in sys.argv[1:] or FAULTS:
        function = FAULTS[fault]
        told = " | ".join(summary(outcomes(fault, layer)) for layer in LAYERS)
        print(f"| {function.__doc__.strip().rstrip('.')} | {told} |", flush=True)


if __name__ == "__main__":
    main()
