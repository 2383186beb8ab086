"""The folder for machines with a GPU and no network: its steps end and are told, whatever happens in them, and their
numbers find their way to the page. What it holds is tried as a whole by `.ci/gpu.py --rehearse`, in CI."""

import ctypes
import json
import os
import shutil
import subprocess
import sys
import tarfile
import textwrap
import zipfile
from pathlib import Path

import gpu_table
import pytest
from stand_in import FLAGS, HERE, build_kernels, standalone
from test_gpu_compile import nvrtc_of
from testing import HANG, ROOT, run_program

BUNDLE = os.path.join(ROOT, ".ci", "bundle")
sys.path[:0] = [os.path.dirname(BUNDLE), BUNDLE]

import fatbin  # noqa: E402
import steps  # noqa: E402


@pytest.fixture
def stand_in(tmp_path_factory):
    """The environment of a machine whose CuPy and driver stand in for a GPU's."""
    folder = tmp_path_factory.mktemp("stand_in")
    build_kernels(folder)
    shutil.copy(standalone.compiled("libcuda.so.1", [HERE / "driver.cpp"], [*FLAGS, "-ldl"]), folder / "libcuda.so.1")
    paths = {"PYTHONPATH": HERE / "machine", "LD_LIBRARY_PATH": folder, "STAND_IN_KERNELS": folder}
    return {**paths, "GLUON_SYNCBN_NVRTC": nvrtc_of("11")}


def measured_by(program, environment, file, *words):
    run_program([program, "--json", file, *words], **environment)
    return json.loads(file.read_text(encoding="utf-8"))


MACHINE = {
    "gpus": 1,
    "stands_in": False,
    "cores": 16,
    "nvrtc": "libnvrtc.so.13 13.0",
    "date": "2026-11-22 12:00",
    "nvidia_smi": "NVIDIA H200, 580.159.04, 143771 MiB, 9.0, 1980 MHz, 3201 MHz",
}


@pytest.fixture
def results(stand_in, tmp_path_factory):
    """As run.sh leaves them, with the numbers of the stand-in under the name of a GPU."""
    folder = tmp_path_factory.mktemp("measured")
    words = ["--rounds", 2, "--shapes", "2,8,5,5", "1,16,3,3"]
    speed = measured_by("benchmarks/gpu.py", stand_in, folder / "speed", *words)
    drawn = ["--cases", 1, "--values", 999, "--seconds", HANG, "--jobs", 2]  # what compiles them counts
    kernels = measured_by("tests/check_kernels.py", stand_in, folder / "kernels", *drawn)
    took = {"training": 61.4, "prediction": 40.2, "more": 21.2}
    return {
        "machine": MACHINE,
        "bundle": {"commit": "0123abc", "mxnet": "mxnet-cu117 1.9.1"},
        "steps": [
            {"name": "kernels", "ended": "ok", "seconds": 12.3, "last_line": "right on 3 random cases"},
            {"name": "speed", "ended": "OUT OF TIME", "seconds": 130.2, "last_line": ""},
            {"name": "operator", "ended": "ok", "seconds": 30, "last_line": "=== 39 passed in 27.87s ==="},
        ],
        "kernels": kernels,
        "speed": speed,
        "meeting": {"results": [{"devices": "cpu:0,gpu:0", "forward": took, "backward": took}]},
    }


def check_what_is_measured(results):
    assert results["kernels"]["cases"] == 2
    measured = results["speed"]["results"]
    names = [(item["dtype"], item["layout"], item["shape"]) for item in measured]
    assert names[:2] == [("float32", "NCHW", [2, 8, 5, 5]), ("float32", "NHWC", [2, 5, 5, 8])]
    assert [name[:2] for name in names[2:4]] == [("float16", "NCHW"), ("float16", "NHWC")] and len(names) == 8
    for item in measured:
        took = item["microseconds"]
        # Forward reads x twice and writes y, backward both tensors twice and writes one; a copy reads and writes.
        for way, moved in (("forward", 3), ("backward", 5)):
            share = moved / 2 * took["copy"] / took[f"ours, {way}"]
            assert item["of_copy"][f"ours, {way}"] == pytest.approx(share)


def packed(results, file):
    """As run.sh leaves them."""
    text = file.with_suffix(".json")
    text.write_text(json.dumps(results))
    with tarfile.open(file, "w:gz") as archive:
        archive.add(text, "results/results.json")


def unpacked(file):
    with tarfile.open(file) as archive:
        return {name: archive.extractfile(name).read().decode() for name in archive.getnames() if "." in name}


def test_the_page_gets_what_is_measured_and_keeps_the_rest(results, tmp_path):
    """One test: the stand-in takes half a minute to measure."""
    check_what_is_measured(results)
    file, page = tmp_path / "results-1.tar.gz", tmp_path / "page.md"
    packed(results, file)
    times = {"found": {"(2, 64, 4) launch": [2.5, 3.5, 30.0]}}
    second = {"steps": [{"name": "latency", "ended": "ok", "seconds": 9, "last_line": ""}], "latency": times}
    packed({"machine": MACHINE, "bundle": results["bundle"], **second}, tmp_path / "results-2.tar.gz")
    page.write_text("# GPUs\n\n<!-- numbers -->\nold\n<!-- end of numbers -->\n\nmore\n", encoding="utf-8")
    for _ in range(2):
        assert gpu_table.main([str(file), str(tmp_path / "results-2.tar.gz"), "--page", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert text.startswith("# GPUs\n\n<!-- numbers -->\n") and text.endswith("<!-- end of numbers -->\n\nmore\n")
    assert "old" not in text and text.count("### NVIDIA H200") == 1
    assert "| kernels | ok: right on 2 of 2 random cases | 12 |" in text and "| speed | OUT OF TIME | 130 |" in text
    assert "| operator | ok: 39 passed in 27.87s | 30 |" in text
    assert "| float32 NHWC 2×5×5×8 |" in text and "| cpu:0,gpu:0 | forward | 61 µs | 40 µs | 21 µs |" in text
    assert "gpu(1) is the same once more" in text
    assert "| (2, 64, 4) launch | 3.5 µs | 3.5 µs |" in text and "| latency | ok | 9 |" in text


def test_numbers_of_a_stand_in_are_not_for_the_page(tmp_path, capsys):
    file, page = tmp_path / "results.tar.gz", tmp_path / "page.md"
    page.write_text(f"{gpu_table.BEGIN}\n{gpu_table.END}\n", encoding="utf-8")
    packed({"machine": {**MACHINE, "stands_in": True}, "bundle": {"commit": "0123abc", "mxnet": ""}, "steps": []}, file)
    assert gpu_table.main([str(file), "--page", str(page)]) == 1
    assert "not of a GPU" in capsys.readouterr().err
    assert page.read_text(encoding="utf-8") == f"{gpu_table.BEGIN}\n{gpu_table.END}\n"
    text = Path(ROOT, "docs", "gpu.md").read_text(encoding="utf-8")
    assert text.count(gpu_table.BEGIN) == text.count(gpu_table.END) == 1  # there is a place for others


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """One without MXNet, for steps of this test's."""
    made = tmp_path / "folder"
    for name in ("tests", "benchmarks"):
        (made / name).mkdir(parents=True)
    (made / "pyproject.toml").touch()
    (made / "bundle.json").write_text(json.dumps({"python": "2.7"}))
    with zipfile.ZipFile(made / "gluon_syncbn-0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("here.txt", "unpacked")
    monkeypatch.setattr(steps, "HERE", made)
    return made


def in_python(code):
    return lambda run, seconds: [sys.executable, "-c", textwrap.dedent(code.format(run=run))]


def run_steps(monkeypatch, out, commands, *words) -> int:
    made = [steps.Step(1, name, "", 12, 12, name == "needs_mxnet", command) for name, command in commands.items()]
    monkeypatch.setattr(steps, "STEPS", made)
    monkeypatch.setattr(sys, "argv", ["steps.py", str(out), *words])
    return steps.main()


def test_a_cut_off_run_leaves_what_it_has(folder, tmp_path):
    """SIGKILL, and no time to clean up."""
    code = f"""
import os, sys
sys.path.insert(0, {BUNDLE!r})
import pathlib, steps
steps.HERE = pathlib.Path({str(folder)!r})
steps.STEPS = [steps.Step(1, "first", "", 20, 20, False, lambda *_: ["echo", "right"]),
               steps.Step(1, "second", "", 20, 20, False, lambda run, _: ["kill", "-9", str(os.getpid())])]
steps.main()
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "out")], capture_output=True, timeout=HANG)
    assert done.returncode == -9
    files = unpacked(tmp_path / "out" / "results-1.tar.gz")
    assert "right" in files["results/first.txt"]
    assert [step["name"] for step in json.loads(files["results/results.json"])["steps"]] == ["first"]


def test_a_step_that_fails_or_hangs_does_not_stop_the_next(folder, tmp_path, monkeypatch, capsys):
    # Its child would go on for long; nothing of it may stay.
    hangs = """
        import subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(900)"])
        print("CHILD", child.pid, flush=True)
        time.sleep(900)
    """

    def cannot_start(run, seconds):
        raise FileNotFoundError("there is no such tool")

    write = "open('{{run.work}}/{}.json', 'w').write('{}'); print(open('here.txt').read())"
    made = {  # and how it ends
        "fails": (in_python("raise SystemExit(7)"), "FAILED with status 7"),
        "hangs": (in_python(hangs), "OUT OF TIME"),
        "talks": (in_python("print('word ' * 100000)"), "ok"),
        "missing": (cannot_start, "not started: there is no such tool"),
        "needs_mxnet": (in_python("pass"), "not started: this folder was made for Python 2.7, and "),
        "not_run": (in_python("print('NOT RUN: no GPU'); raise SystemExit(3)"), "NOT RUN"),
        "breaks_off": (in_python(write.format("breaks_off", "[1, ") + "; raise SystemExit(1)"), "FAILED with status 1"),
        "measures": (in_python(write.format("measures", "[1, 2]")), "ok"),
    }
    assert run_steps(monkeypatch, tmp_path / "out", {name: command for name, (command, _) in made.items()}) == 1
    (archive,) = (tmp_path / "out").iterdir()
    files = unpacked(archive)
    results = json.loads(files["results/results.json"])
    assert [step["name"] for step in results["steps"]] == list(made)
    for step in results["steps"]:
        ended = made[step["name"]][1]
        assert step["ended"].startswith(ended) if step["name"] == "needs_mxnet" else step["ended"] == ended
    assert results["measures"] == [1, 2] and "breaks_off" not in results
    assert results["steps"][-1]["last_line"] == "unpacked"
    assert "unpacked" in files["results/measures.txt"]
    assert archive.name == "results-1.tar.gz" and archive.stat().st_size < 1_000_000
    child = int(files["results/hangs.txt"].split("CHILD ")[1].split()[0])
    # Where it was: threads in the kernel, and Python's own word for it.
    stacks = files["results/hangs-stacks.txt"]
    assert f"== process {child}: " in stacks and stacks.count("== process") == 2
    assert 'File "<string>", line 5 in <module>' in files["results/hangs.txt"]
    status = Path(f"/proc/{child}/stat")
    assert not status.exists() or status.read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0] == "Z"
    assert "fails: FAILED with status 7" in capsys.readouterr().out


def test_when_no_time_is_left_that_is_said(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(steps, "TOTAL", {False: 5, True: 5})
    assert run_steps(monkeypatch, tmp_path / "out", {"late": in_python("pass")}, "--short") == 1
    (step,) = json.loads(unpacked(tmp_path / "out" / "results-1.tar.gz")["results/results.json"])["steps"]
    assert step["ended"] == "no time left"


def test_steps_that_do_not_exist_are_refused(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["steps.py", str(tmp_path / "out"), "--steps", "kernels,spede"])
    with pytest.raises(SystemExit):
        steps.main()
    assert "there is no step spede; there are smoke, kernels," in capsys.readouterr().err


def library_of(folder, text):
    library, source = folder / "library.so", f"{text}\nint seven() {{ return 7; }}\n"
    subprocess.run(["gcc", "-shared", "-fPIC", "-xc", "-", "-o", library], input=source, text=True, check=True)
    return library


def test_machine_code_is_blanked_and_nothing_else(tmp_path):
    """A library whose section has two containers, each with PTX (kind 1) and machine code (kind 2)."""
    container = """
        .long 0xBA55ED50; .short 1, 16; .quad 2 * 16 + 24 + 40
        .short 1, 0; .long 16; .quad 24; .fill 24, 1, 0x11
        .short 2, 0; .long 16; .quad 40; .fill 40, 1, 0x22
    """
    lines = ";".join(line.strip() for line in container.strip().splitlines())
    section = f'__asm__(".section .nv_fatbin, \\"a\\"; .balign 8; {lines}; {lines}; .previous");'
    library = library_of(tmp_path, section)
    before = library.read_bytes()
    assert before.count(b"\x22" * 40) == before.count(b"\x11" * 24) == 2
    assert fatbin.blank(library) == 80
    assert library.read_bytes() == before.replace(b"\x22" * 40, bytes(40))
    assert ctypes.CDLL(str(library)).seven() == 7


def test_a_library_without_machine_code_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no section .nv_fatbin"):
        fatbin.blank(library_of(tmp_path, ""))
