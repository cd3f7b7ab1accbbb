"""`swarmkv run`, as a user runs it: in a process of its own."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import Files

COMMAND = [sys.executable, "-m", "swarmkv_ll.cli", "run"]

PIPELINE = """
model = "tiny.gguf"
chat = false
max_tokens = 5

[documents.report]
text = "The pump starts at six. It stops at seven. The pump starts at six. It stops at seven."

[agents.early]
depends_on = "report"
prompt = " When?"
required_prefix_tokens = 20

[agents.later]
depends_on = ["report"]
prompt = " Why?"
max_tokens = 7

[agents.last]
depends_on = ["later", "early"]
prompt = " And {early}?"
"""


@pytest.fixture
def folder(tmp_path: Path, files: Files) -> Path:
    (tmp_path / "tiny.gguf").symlink_to(files["llama"])
    (tmp_path / "pipeline.toml").write_text(PIPELINE)
    return tmp_path


def run(folder: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *args],
        check=False,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **env},
    )


def test_json_tells_each_node(folder: Path) -> None:
    done = run(folder, "pipeline.toml", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert (report["model"], report["strategy"]) == ("tiny.gguf", "shared")
    nodes = {node["name"]: node for node in report["nodes"]}
    assert list(nodes) == ["report", "early", "later", "last"]
    assert [len(node["tokens"]) for node in nodes.values()] == [0, 5, 7, 5]
    assert nodes["early"]["n_prefix_tokens"] == 20
    assert nodes["report"]["value"] == nodes["report"]["n_tokens"] == 61
    assert nodes["report"]["time_ms"] > 0  # also a document's time is told
    assert all(node["state"] == "done" and node["first_token_ms"] > 0 for node in list(nodes.values())[1:])
    assert report["generated_tokens"] == 17
    assert sum(report["time_shares"].values()) == pytest.approx(1)


def test_strategies_give_the_same_answers(folder: Path) -> None:
    answers = []
    for strategy in ("shared", "snapshot"):
        report = json.loads(run(folder, "pipeline.toml", "--json", "--strategy", strategy).stdout)
        assert report["strategy"] == strategy
        answers.append([node["tokens"] for node in report["nodes"]])
    assert answers[0] == answers[1]


def test_text_has_answers_and_times(folder: Path) -> None:
    done = run(folder, "pipeline.toml")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert all(line == line.rstrip() for line in lines)
    assert [line for line in lines if line in ("early", "later", "last")] == ["early", "later", "last"]
    assert any(line.startswith("end to end") and "17 tokens generated" in line for line in lines)
    assert any(line.startswith("batches") for line in lines)
    assert "goes on from" in done.stdout


def test_trace_and_picture_are_written(folder: Path) -> None:
    done = run(folder, "pipeline.toml", "--trace", "trace.json", "--plot", "run.svg")
    assert (done.returncode, done.stderr) == (0, "")
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    kinds = {event.get("cat") for event in events}
    assert {"prefill", "prompt", "decode", "fork"} <= kinds
    lanes = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"report", "early", "later", "last"} <= lanes
    assert (folder / "run.svg").read_text().lstrip().startswith("<?xml")
    assert sorted(path.name for path in folder.iterdir()) == ["pipeline.toml", "run.svg", "tiny.gguf", "trace.json"]


@pytest.mark.parametrize(
    ("change", "lines"),
    [
        (("prompt = ", "promt = "), ["line 9: agents.early: ", "line 11: agents.early.promt: "]),
        (
            ('depends_on = "report"', 'depends_on = "last"'),
            ["agents.early.required_prefix_tokens: ", "agents.last.depends_on: "],
        ),
        (("= 20", "= 2000"), ["line 12: agents.early.required_prefix_tokens: "]),
        (("max_tokens = 7", "max_tokens = 700000"), ["line 17: agents.later.max_tokens: "]),
    ],
)
def test_problems_stand_with_their_lines(folder: Path, change: tuple[str, str], lines: list[str]) -> None:
    """Each on a line of its own, and nothing else is printed."""
    (folder / "pipeline.toml").write_text(PIPELINE.replace(*change, 1))
    done = run(folder, "pipeline.toml", "--json")
    assert (done.returncode, done.stdout) == (2, "")
    told = done.stderr.splitlines()
    assert all(line.startswith("swarmkv: pipeline.toml, line ") for line in told)
    for wanted in lines:
        assert any(wanted in line for line in told), (wanted, told)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "give a TOML FILE, or --measure"),
        (["none.toml"], "none.toml"),
        (["pipeline.toml", "--plot", "run.gif"], ".png, .svg, .pdf"),
        (["pipeline.toml", "--measure"], "--measure goes with"),
        (["pipeline.toml", "--model", "none.gguf"], "none.gguf"),
        (["pipeline.toml", "--trace", "none/trace.json"], "'none/trace.json' cannot be written"),
        (["pipeline.toml", "--trace", ""], "'' cannot be written"),
        (["pipeline.toml", "--trace", "./pipeline.toml"], "named twice"),
        (["pipeline.toml", "--trace", "same.svg", "--plot", "same.svg"], "named twice"),
    ],
)
def test_bad_calls_are_one_line(folder: Path, args: list[str], words: str) -> None:
    done = run(folder, *args)
    assert done.returncode == 2
    assert done.stderr.startswith("swarmkv: ")
    assert done.stderr.count("\n") == 1
    assert words in done.stderr


def test_without_matplotlib_it_is_told_before_anything_runs(folder: Path) -> None:
    (folder / "without").mkdir()
    (folder / "without" / "matplotlib.py").write_text("raise ModuleNotFoundError(name='matplotlib')")
    done = run(folder, "pipeline.toml", "--plot", "run.svg", PYTHONPATH=str(folder / "without"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "swarmkv: this needs matplotlib: pip install matplotlib\n"


def test_a_terminal_that_knows_only_ascii(folder: Path) -> None:
    done = run(folder, "pipeline.toml", PYTHONIOENCODING="ascii", PYTHONUTF8="0", LC_ALL="C")
    assert (done.returncode, done.stderr) == (0, "")
    assert "end to end" in done.stdout


def test_what_would_steer_a_terminal_is_not_printed(folder: Path) -> None:
    (folder / "pipeline.toml").write_text(PIPELINE.replace("[agents.last]", '[agents."\\u001b[31m"]'))
    done = run(folder, "pipeline.toml")
    assert done.returncode == 2
    assert "\x1b" not in done.stderr


def test_a_failed_agent_is_told_and_the_others_answer(folder: Path) -> None:
    text = PIPELINE.replace("[agents.later]", "[agents.later]\ntime_limit = 1e-9")
    (folder / "pipeline.toml").write_text(text)
    done = run(folder, "pipeline.toml", "--json")
    assert done.returncode == 1
    assert (
        done.stderr
        == "swarmkv: node 'later': NodeTimeoutError: node 'later' took longer than its time limit of 1e-09 s\n"
    )
    states = {node["name"]: node["state"] for node in json.loads(done.stdout)["nodes"]}
    assert states == {"report": "done", "early": "done", "later": "failed", "last": "skipped"}


def in_terminal(folder: Path, text: str, *, interrupt: bool) -> tuple[int, str]:
    """Exit code and what a terminal of 100 columns gets."""
    (folder / "pipeline.toml").write_text(text)
    main, side = pty.openpty()
    command = [*COMMAND, "pipeline.toml"]
    size = {"COLUMNS": "100", "LINES": "30", "TERM": "xterm-256color"}
    with subprocess.Popen(
        command, cwd=folder, stdin=side, stdout=side, stderr=side, env={**os.environ, **size}, start_new_session=True,
    ) as process:  # fmt: skip
        os.close(side)
        printed = b""
        until = time.monotonic() + 60
        while time.monotonic() < until:
            try:
                printed += os.read(main, 65536)
            except OSError:
                break
            if interrupt and b"running" in printed:
                process.send_signal(signal.SIGINT)
                interrupt = False
        code = process.wait(60)
    os.close(main)
    return code, printed.decode()


def test_a_terminal_sees_it_grow(folder: Path) -> None:
    text = PIPELINE.replace("max_tokens = 7", "max_tokens = 600")
    code, printed = in_terminal(folder, text, interrupt=False)
    assert code == 0
    for word in ("report", "running", "waiting", "tokens", "end to end"):
        assert word in printed


def test_interrupt_ends_it(folder: Path) -> None:
    text = PIPELINE.replace("max_tokens = 7", "max_tokens = 1500")
    code, printed = in_terminal(folder, text, interrupt=True)
    assert code == 130
    assert printed.rstrip().endswith("swarmkv: interrupted")
    assert "Traceback" not in printed
