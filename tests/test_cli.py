"""The `swarmkv` command, as a user runs it: in a process of its own."""

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
import tiny_models

COMMAND = [sys.executable, "-m", "swarmkv_ll.cli"]
DOCUMENT = "The pump starts at six. It stops at seven. " * 40


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    tiny_models.write_llama(folder / "tiny.gguf")
    (folder / "doc.txt").write_text(DOCUMENT)
    (folder / "prompts.txt").write_text("When?\n\n  Why?  \nHow long?\n")
    (folder / "binary.txt").write_bytes(b"\xff\xfe\x00")
    (folder / "empty.txt").write_text("\n \n")
    return folder


def run(folder: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *args],
        check=False,
        cwd=folder,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=120,
    )


def fanout(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return run(folder, "fanout", "--model", "tiny.gguf", "--doc", "doc.txt", "--max-tokens", "6", *args)


@pytest.mark.parametrize("strategy", ["shared", "snapshot", "reprefill"])
def test_json_is_one_object(files: Path, strategy: str) -> None:
    done = fanout(files, "--prompts", "prompts.txt", "--prompt", "Who?", "--strategy", strategy, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert set(report) == {
        "model", "strategy", "document_tokens", "prefill_ms", "snapshot_bytes", "end_to_end_ms", "branches",
    }  # fmt: skip
    assert (report["model"], report["strategy"]) == ("tiny.gguf", strategy)
    assert (report["snapshot_bytes"] > 0) == (strategy == "snapshot")
    assert [branch["prompt"] for branch in report["branches"]] == ["Who?", "When?", "Why?", "How long?"]
    for branch in report["branches"]:
        assert len(branch["tokens"]) == 6
        assert branch["text"]
        assert branch["first_token_ms"] > 0
        assert branch["decode_ms"] > 0
        assert {"fork_ms", "restore_ms"} <= set(branch)


def test_strategies_print_the_same_answer(files: Path) -> None:
    texts = {
        json.loads(fanout(files, "--prompt", "When?", "--strategy", strategy, "--json").stdout)["branches"][0]["text"]
        for strategy in ("shared", "snapshot", "reprefill")
    }
    assert len(texts) == 1


def test_table_says_where_the_baseline_comes_from(files: Path) -> None:
    done = fanout(files, "--prompts", "prompts.txt")
    assert (done.returncode, done.stderr) == (0, "")
    for word in ("When?", "first token", "restore", "prefilled once", "computed; --compare measures it"):
        assert word in done.stdout
    done = fanout(files, "--prompts", "prompts.txt", "--compare")
    assert (done.returncode, done.stderr) == (0, "")
    assert "measured in this run" in done.stdout
    assert "fork ÷ np.copyto" in done.stdout


def test_a_document_from_standard_input(files: Path) -> None:
    command = [*COMMAND, "fanout", "--model", "tiny.gguf", "--doc", "-", "--prompt", "A", "--max-tokens", "2", "--json"]
    done = subprocess.run(command, cwd=files, input=DOCUMENT, capture_output=True, text=True, timeout=60, check=True)
    same = fanout(files, "--prompt", "A", "--json").stdout
    assert json.loads(done.stdout)["document_tokens"] == json.loads(same)["document_tokens"]


def test_a_pipe_gets_no_padding_and_no_broken_lines(files: Path) -> None:
    lines = fanout(files, "--prompt", "Which " * 40, "--max-tokens", "60").stdout.splitlines()
    assert lines[0] == "1 " + "Which " * 39 + "Which"
    assert all(line == line.rstrip() for line in lines)


def test_compare_in_json(files: Path) -> None:
    report = json.loads(fanout(files, "--prompt", "When?", "--compare", "--json").stdout)
    assert report["compare"]["reprefill"]["strategy"] == "reprefill"
    assert all({"name", "value", "target"} <= set(ratio) for ratio in report["compare"]["ratios"])


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["fanout", "--doc", "none.txt"], "none.txt: No such file"),
        (["fanout", "--doc", "binary.txt", "--prompt", "?"], "not UTF-8"),
        (["fanout", "--doc", "doc.txt"], "no prompt"),
        (["fanout", "--prompts", "empty.txt"], "empty.txt holds no prompt"),
        (["fanout", "--prompts", "none.txt"], "none.txt"),
        (["fanout", "--model", "none.gguf"], "none.gguf: No such file"),
        (["fanout", "--model", "doc.txt"], "not a GGUF file"),
        (["fanout", "--model", "."], "Is a directory"),
        (["fanout", "--strategy", "fast"], "--strategy"),
        (["fanout", "--max-tokens", "0"], "--max-tokens"),
        (["fanout", "--n-ctx", "-1"], "--n-ctx"),
        (["fanout", "--model", "tiny.gguf", "--n-ctx", "600"], "do not fit a context of 600"),
        (["fanout", "--model", "tiny.gguf", "--doc", "empty.txt", "--prompt", "?"], "document holds no text"),
        (["nonsense"], "No such command"),
        (["model", "too", "many"], "unexpected extra argument"),
    ],
)
def test_error_is_one_line_and_exit_2(files: Path, args: list[str], words: str) -> None:
    done = run(files, *args)
    assert done.returncode == 2
    assert done.stdout == ""
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_offline_without_a_model(files: Path, tmp_path: Path) -> None:
    links = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": "/dev/null"}
    for args in (["fanout"], ["model"]):
        done = run(files, *args, SWARMKV_MODEL="", XDG_CACHE_HOME=str(tmp_path), **links)
        assert done.returncode == 2
        assert "--model or SWARMKV_MODEL" in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_model_prints_its_path_only(files: Path) -> None:
    done = run(files, "model", SWARMKV_MODEL=str(files / "tiny.gguf"))
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{files / 'tiny.gguf'}\n", "")


def test_doctor(files: Path) -> None:
    done = run(files, "doctor", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert "CPU" in found["backends"]
    assert found["devices"][0]["name"] == "CPU"
    assert found["engine"]["stamp"].startswith(found["engine"]["commit"][:7])
    assert {"module", "used", "reason", "architectures", "libraries", "toolkit", "driver", "gpus"} <= set(found["cuda"])
    assert {"pinned", "pin_error", "lock_limit", "huge_pages", "huge_page_share"} <= set(found["memory"])
    text = run(files, "doctor").stdout
    for word in ("stamp", "library", "device", "page locking", "huge pages", "lock limit", "model", "CUDA", "threads"):
        assert word in text


@pytest.mark.parametrize("variable", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_doctor_tells_whose_waiting_policy(files: Path, variable: str) -> None:
    clean = {key: value for key, value in os.environ.items() if key not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    ours = subprocess.run([*COMMAND, "doctor", "--json"], env=clean, capture_output=True, check=True).stdout
    assert "set by swarmkv_ll" in json.loads(ours)["threads"]["waiting"]
    value = "passive" if variable == "OMP_WAIT_POLICY" else "77"
    theirs = run(files, "doctor", "--json", **{variable: value})
    assert json.loads(theirs.stdout)["threads"]["waiting"] == f"{variable}={value} (set by the user)"


def test_interrupt_is_one_line(files: Path) -> None:
    (files / "long.txt").write_text(DOCUMENT * 8)
    process = subprocess.Popen(
        [*COMMAND, "fanout", "--model", "tiny.gguf", "--doc", "long.txt", "--prompt", "?", "--max-tokens", "2000"],
        cwd=files, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    time.sleep(2.5)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == "swarmkv: interrupted\n"


def test_reader_that_stops_reading(files: Path) -> None:
    command = f"{sys.executable} -m swarmkv_ll.cli fanout --model tiny.gguf --doc doc.txt --prompt A --max-tokens 4"
    done = subprocess.run(
        f"{command} | head -c 1", check=False, shell=True, cwd=files, capture_output=True, text=True, timeout=60
    )
    assert done.stderr == ""


def on_a_terminal(folder: Path, *args: str) -> tuple[int, str]:
    """Run the command on a terminal of its own; gives its exit code and all that was drawn."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.environ.update(TERM="xterm", COLUMNS="80", LINES="40")
        os.execv(sys.executable, [*COMMAND, *args])
    shown = b""
    while True:
        try:
            shown += os.read(terminal, 65536)
        except OSError:
            break
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    return os.waitstatus_to_exitcode(status), shown.decode(errors="replace")


def test_answers_grow_on_a_terminal(files: Path) -> None:
    args = ["fanout", "--model", "tiny.gguf", "--doc", "doc.txt", "--prompt", "When?", "--max-tokens", "200"]
    code, shown = on_a_terminal(files, *args)
    assert code == 0
    assert shown.count("When?") > 2  # drawn again as the answer grew
    assert "prefilled once" in shown


@pytest.mark.parametrize(("eos_gain", "cut"), [(0.01, True), (3, False)])
def test_only_an_answer_cut_short_is_marked_so(files: Path, eos_gain: float, cut: bool) -> None:
    tiny_models.write_llama(files / "ends.gguf", eos_gain=eos_gain)
    args = ["fanout", "--model", "ends.gguf", "--doc", "doc.txt", "--prompt", "When?", "--max-tokens", "40"]
    report = json.loads(run(files, *args, "--json").stdout)
    assert report["branches"][0]["finished"] is not cut
    last = on_a_terminal(files, *args)[1].split("When?")[-1]
    assert ("…" in last.split("strategy")[0]) is cut
    assert ("…" in run(files, *args).stdout) is cut


def test_version_needs_no_engine(files: Path) -> None:
    code = "import sys; sys.modules['swarmkv_ll._llama'] = None; from swarmkv_ll.cli import main; main(['--version'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("swarmkv, version ")


def test_lib_dir_is_where_the_library_is(files: Path) -> None:
    folder = Path(run(files, "lib-dir").stdout.strip())
    assert (folder / "libllama.so").is_file()
