"""`swarmkv bench`, as a user runs it: in a process of its own, with a tiny model. Its values are for benchmarks."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from helpers import Files

COMMAND = [sys.executable, "-m", "swarmkv_ll.cli", "bench"]
DOCS = Path(__file__).resolve().parents[1] / "docs"
FILES = {"all_trials.csv", "best_run.json", "report.html", "report.md", "run.json", "summary.json"}

WITHOUT = """
import sys
sys.modules["matplotlib"] = None
from swarmkv_ll.cli import main
main(["bench", *sys.argv[1:]])
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, files: Files) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    (folder / "tiny.gguf").symlink_to(files["llama"])
    return folder


def bench(folder: Path, *args: str, command: list[str] | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*(command or COMMAND), "--model", "tiny.gguf", *args],
        check=False,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, **env},
    )


@pytest.fixture(scope="module")
def done(folder: Path) -> Path:
    """A finished quick run, made without a display."""
    ran = bench(folder, "--quick", "--out", "out", "--json", DISPLAY="", MPLBACKEND="TkAgg")
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == json.loads((folder / "out/summary.json").read_text())
    return folder / "out"


def rows_in(out: Path) -> list[dict[str, str]]:
    with open(out / "all_trials.csv", newline="") as file:
        return list(csv.DictReader(file))


def summary_in(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return found


def test_one_command_makes_the_whole_folder(done: Path) -> None:
    assert {p.name for p in done.iterdir()} == {*FILES, "plots"}
    summary = summary_in(done)
    jsonschema.validate(summary, json.loads((DOCS / "summary.schema.json").read_text()))
    assert set(summary["metrics"]) >= {
        "activation_ratio",
        "end_to_end_ratio_2",
        "end_to_end_ratio_8",
        "fork_share_of_memcpy",
        "export_share_of_memcpy",
        "restore_share_of_memcpy",
        "batched_generation_ratio_8x32",
        "bit_identical",
    }
    assert summary["metrics"]["bit_identical"]["worst"] == 1
    assert summary["targets"] == []
    assert summary["command"] == "swarmkv bench --quick --model tiny.gguf"
    best = json.loads((done / "best_run.json").read_text())
    assert best["trial"]["trial"] == summary["article"]["best_trial"]
    assert {int(row["trial"]) for row in rows_in(done) if row["experiment"] == "article"} == {1, 2, 3}
    plots = sorted(p.name for p in (done / "plots").iterdir())
    assert {Path(name).stem for name in plots} >= {"end_to_end", "activation", "consistency", "lengths", "memory"}
    assert len(plots) == 2 * len({Path(name).stem for name in plots})
    page = (done / "report.html").read_text()
    assert "data:image/svg+xml" in page
    for text in (page, (done / "report.md").read_text(), (done / "summary.json").read_text()):
        assert str(done.parent) not in text
        assert "tiny.gguf" in text


def test_the_schema_refuses_what_is_not_a_summary(done: Path) -> None:
    schema, summary = json.loads((DOCS / "summary.schema.json").read_text()), summary_in(done)
    jsonschema.Draft202012Validator.check_schema(schema)
    del summary["metrics"]["activation_ratio"]["bound"]
    with pytest.raises(jsonschema.ValidationError, match="bound"):
        jsonschema.validate(summary, schema)


def test_a_finished_run_is_not_overwritten_unasked(done: Path) -> None:
    before = {p: p.read_bytes() for p in done.rglob("*") if p.is_file()}
    ran = bench(done.parent, "--quick", "--out", "out")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "holds a finished run" in ran.stderr
    assert ran.stderr.count("\n") == 1
    assert {p: p.read_bytes() for p in done.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_run_goes_on(folder: Path, how: signal.Signals) -> None:
    out = folder / f"out-{how.name}"
    command = [*COMMAND, "--model", "tiny.gguf", "--quick", "--out", out.name]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 120
        while not (out / "all_trials.csv").exists():
            assert process.poll() is None, process.stderr and process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(how)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == (130 if how is signal.SIGINT else -signal.SIGKILL)
    if how is signal.SIGINT:
        assert "the same command goes on from there\nswarmkv: interrupted\n" in stderr
    held = rows_in(out)
    assert 0 < len(held) < 400
    ran = bench(folder, "--out", out.name)
    assert ran.returncode == 2
    assert 'mode "quick" there, "full" asked for' in ran.stderr
    ran = bench(folder, "--quick", "--out", out.name)
    assert ran.returncode == 0, ran.stderr
    assert rows_in(out)[: len(held)] == held
    assert not list(out.rglob("*.tmp")) or how is signal.SIGKILL


def test_without_matplotlib_only_the_pictures_are_missing(folder: Path) -> None:
    ran = bench(folder, "--quick", "--out", "plain", command=[sys.executable, "-c", WITHOUT])
    assert ran.returncode == 0, ran.stderr
    assert {p.name for p in (folder / "plain").iterdir()} == FILES
    assert "matplotlib is not installed" in ran.stdout
    assert "matplotlib is not installed" in (folder / "plain/report.html").read_text()


def test_a_real_document_and_a_length_of_ones_own(folder: Path) -> None:
    (folder / "mine <b>.txt").write_text("The pump starts at six. " * 8)
    ran = bench(folder, "--quick", "--tokens", "100", "--doc", "mine <b>.txt", "--out", "own")
    assert ran.returncode == 0, ran.stderr
    found = rows_in(folder / "own")
    assert {row["document"] for row in found if row["experiment"] == "documents"} == {"mine <b>.txt"}
    assert {row["n_document"] for row in found if row["experiment"] == "article"} == {"100"}
    assert "mine <b>" not in (folder / "own/report.html").read_text()


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--model", "none.gguf"], "none.gguf"),
        (["--tokens", "999999"], "999,999"),
        (["--tokens", "10"], "64"),
        (["--doc", "long.txt"], "long.txt: prefix"),
        (["--doc", "empty.txt"], "holds no t"),
        (["--doc", "none.txt"], "none.txt"),
        (["--doc", "long.txt", "--doc", "long.txt"], "same name"),
        (["--out", "taken"], "notes.txt"),
        (["--out", "long.txt"], "long.txt"),
        (["--out", "/proc/none"], "/proc/none"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_made(folder: Path, args: list[str], told: str) -> None:
    (folder / "long.txt").write_text("word " * 40_000)
    (folder / "empty.txt").write_text(" \n")
    (folder / "taken").mkdir(exist_ok=True)
    (folder / "taken/notes.txt").write_text("mine")
    ran = bench(folder, "--quick", *(args if "--out" in args else ["--out", "refused", *args]))
    assert (ran.returncode, ran.stdout) == (2, "")
    assert told in ran.stderr
    assert ran.stderr.count("\n") == 1
    assert not (folder / "refused").exists()
    assert os.listdir(folder / "taken") == ["notes.txt"]
