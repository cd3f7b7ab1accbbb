"""Peers: what they are given, how their processes are started, waited for and ended, and real ones on a tiny model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import TESTS, Models, text_tokens

from swarmkv_ll.campaign import peers, processes
from swarmkv_ll.campaign.peers import Case, Comparison, compare, missing
from swarmkv_ll.campaign.processes import CPUS, Server, run, shown
from swarmkv_ll.errors import InvalidArgumentError, PeerError
from swarmkv_ll.ffi import LIB_DIR, SPIN_COUNT

LLAMA_CPP_PYTHON, BATCHED_BENCH, SERVER = peers.PEERS

Program = Callable[[str], Path]


@pytest.fixture
def program(tmp_path: Path) -> Program:
    """Writes an executable Python script."""

    def write(code: str) -> Path:
        path = tmp_path / "program"
        path.write_text(f"#!{sys.executable}\n{textwrap.dedent(code)}", encoding="utf-8")
        path.chmod(0o755)
        return path

    return write


def case_of(path: Path, **options: Any) -> Case:
    sizes = {"n_threads": 1, "n_short": 150, "n_branches": 3, "n_answer": 4, **options}
    return Case(path, text_tokens(200), text_tokens(5, seed=1), **sizes)


def alive(pid: int) -> bool:
    """Whether a process is there, and no zombie."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def wait_for(true: Callable[[], object], seconds: float = 10) -> bool:
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.01)
    return bool(true())


# ── what is compared ─────────────────────────────────────────────────────────────────────────────────


def test_questions_have_one_length_and_other_beginnings_each_turn(tmp_path: Path) -> None:
    case = case_of(tmp_path, n_branches=8)
    made = [question for turn in range(5) for question in case.questions(turn)]
    assert {len(question) for question in made} == {5}
    assert len({int(question[0]) for question in made}) == 40
    assert all((question[1:] == case.question[1:]).all() for question in made)


def test_a_document_of_one_token_over_and_over_has_questions_too(tmp_path: Path) -> None:
    case = Case(tmp_path, np.full(50, 7, np.int32), text_tokens(1), 1)
    assert len({int(question[0]) for turn in range(5) for question in case.questions(turn)}) == 40


@pytest.mark.parametrize("name", ["document", "question", "n_threads", "n_short", "n_branches", "n_answer"])
def test_a_case_without_anything_is_refused(tmp_path: Path, name: str) -> None:
    values: dict[str, Any] = {"document": text_tokens(9), "question": text_tokens(5), "n_threads": 1}
    values[name] = text_tokens(0) if name in ("document", "question") else 0
    with pytest.raises(InvalidArgumentError, match=f"{name} should be at least 1, is 0"):
        Case(tmp_path, **values)


def test_above_1_we_are_faster_in_both_units() -> None:
    assert Comparison("peer", "x", "", "", "", 6.0, 2.0, "s").ratio == 3
    assert Comparison("peer", "x", "", "", "", 50.0, 100.0, "tok/s").ratio == 2


# ── what is missing ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("peer", [BATCHED_BENCH, SERVER])
def test_a_tool_that_is_not_built(peer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, models: Models) -> None:
    monkeypatch.setattr(peers, "cache_dir", lambda: tmp_path)
    why = missing(peer)
    assert why == f"{peer} is not built for this engine: run build_llama.sh --tools in the source folder"
    with pytest.raises(PeerError, match=r"run build_llama\.sh --tools"):
        compare(peer, case_of(tmp_path), models["llama"], lambda _: None)


def test_llama_cpp_python_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda _: None)
    why = missing(LLAMA_CPP_PYTHON) or ""
    assert "not installed: pip install --no-cache-dir -C wheel.cmake=false llama-cpp-python==" in why


@pytest.mark.parametrize(("found", "told"), [("0.3.16", "0.3.16"), (None, "of unknown version")])
def test_llama_cpp_python_of_another_version(found: str | None, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if found is None:
            raise metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(peers, "find_spec", lambda _: object())
    monkeypatch.setattr(metadata, "version", version)
    assert f"llama-cpp-python {told} may be for another engine: pip install " in (missing(LLAMA_CPP_PYTHON) or "")


def test_the_version_is_that_of_the_pin() -> None:
    lock = (TESTS.parent / "vendor" / "llama.cpp.lock").read_text(encoding="utf-8")
    assert f"llama_cpp_python-{peers.VERSION}.tar.gz" in lock


def test_every_peer_has_a_version_or_none() -> None:
    for peer in peers.PEERS:
        assert peers.version(peer) or missing(peer)


# ── a program that runs to its end ───────────────────────────────────────────────────────────────────


def test_a_program_gets_its_input_and_gives_its_output(program: Program, tmp_path: Path) -> None:
    path = program("import os, sys; print(sys.stdin.read(), sys.argv[1:], os.getcwd())")
    assert run("it", [path, "-x", tmp_path], tmp_path, stdin="in") == f"in ['-x', '{tmp_path}'] {tmp_path}\n"


def test_a_program_has_the_whole_machine_though_this_thread_is_pinned(program: Program, tmp_path: Path) -> None:
    path = program("import os; print(sorted(os.sched_getaffinity(0)))")
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert json.loads(run("it", [path], tmp_path)) == sorted(CPUS)
        assert os.sched_getaffinity(0) == {min(before)}
    finally:
        os.sched_setaffinity(0, before)


def test_a_program_has_our_libraries_and_none_of_the_users_options(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("LLAMA_ARG_THREADS", "1"), ("GGML_BACKEND_PATH", "x"), ("LD_LIBRARY_PATH", "/elsewhere")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    path = program("import json, os; print(json.dumps(dict(os.environ)))")
    found = json.loads(run("it", [path], tmp_path))
    assert not [name for name in found if name.startswith(("LLAMA_", "GGML_"))]
    assert found["LD_LIBRARY_PATH"] == f"{LIB_DIR}{os.pathsep}/elsewhere"
    assert found["GOMP_SPINCOUNT"] == SPIN_COUNT
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")  # the user's own choice
    assert "GOMP_SPINCOUNT" not in json.loads(run("it", [path], tmp_path))


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "import sys; print('first', 'then', 'why', sep=chr(10), file=sys.stderr); sys.exit(3)",
            "exit code 3: first / t",
        ),
        ("import sys; print('only here'); sys.exit(1)", "exit code 1: only here"),
        ("import os; os.kill(os.getpid(), 6)", "was ended by signal 6"),
        ("import sys; sys.stderr.buffer.write(bytes(range(256))); sys.exit(1)", "exit code 1: "),
    ],
)
def test_a_program_that_fails_is_quoted(program: Program, tmp_path: Path, code: str, message: str) -> None:
    with pytest.raises(PeerError, match=f"^it .*{message}"):
        run("it", [program(code)], tmp_path)


def test_a_program_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match=r"exit code 1: .*No such file"):
        run("it", [tmp_path / "none"], tmp_path)


def test_a_program_that_hangs_is_killed(program: Program, tmp_path: Path) -> None:
    path = program(
        """
        import os, signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open("pid", "w").write(str(os.getpid()))
        time.sleep(600)
        """
    )
    with pytest.raises(PeerError, match=r"it had not ended after 3 s"):
        run("it", [path], tmp_path, limit_s=3)
    assert not alive(int((tmp_path / "pid").read_text()))


def test_a_command_is_shown_without_folders() -> None:
    assert shown(["/a/b/llama-server", "-m", Path("/c/x.gguf"), "-fa", "on"]) == "llama-server -m x.gguf -fa on"


# ── a server ─────────────────────────────────────────────────────────────────────────────────────────

FAKE = """
import http.server, json, os, signal, sys, threading, time
mode = sys.argv[1]
open("pid", "w").write(str(os.getpid()))
print("loading", flush=True)
if mode == "ends":
    sys.exit("no such model")
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if mode == "never listens":
    time.sleep(600)

class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, status, body):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        self.answer(503 if mode == "never ready" else 200, b"{}")
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/echo" or self.path.startswith("/slots/"):
            self.answer(200, json.dumps(body).encode())
        elif self.path == "/meet":
            meeting.wait(20)
            self.answer(200, json.dumps(body).encode())
        elif self.path == "/refuse" or (self.path == "/refuse%202" and body == 2):
            self.answer(400, b'{"error": "why it is refused"}')
        elif self.path == "/garbage":
            self.answer(200, b"\\xff\\xfe no json")
        elif self.path.startswith(("/hang", "/refuse")):
            open("hanging", "w").close()
            time.sleep(600)
        elif self.path == "/die":
            print("assertion failed: 1 == 2", file=sys.stderr, flush=True)
            os._exit(7)
    def log_message(self, *_):
        pass

meeting = threading.Barrier(8)
host, port = (sys.argv[sys.argv.index(name) + 1] for name in ("--host", "--port"))
http.server.ThreadingHTTPServer((host, int(port)), Handler).serve_forever()
"""


@pytest.fixture
def fake(program: Program, tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """A server that does as it is told; no process of it is left when the test ends."""
    path = program(FAKE)

    def make(mode: str = "well", **options: Any) -> Server:
        return Server("it", [path, mode], tmp_path, **options)

    yield make
    pid = tmp_path / "pid"
    assert not (pid.exists() and alive(int(pid.read_text())))


def test_a_server_answers(fake: Callable[..., Server]) -> None:
    with fake() as server:
        assert server.ask("/echo", {"prompt": [1, 2]}) == {"prompt": [1, 2]}


def test_requests_are_under_way_together(fake: Callable[..., Server]) -> None:
    """Each is answered only when all eight have arrived; the answers stand in the order of the requests."""
    with fake() as server:
        assert server.ask_together("/meet", list(range(8))) == list(range(8))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/refuse", r"it answered /refuse with status 400: \{\"error\": \"why it is refused\"\}"),
        ("/garbage", "it answered /garbage with what is no JSON: .*no json"),
        ("/die", "it did not answer /die: .*; it ended with exit code 7: loading / assertion failed: 1 == 2"),
        ("/hang", "it did not answer /hang: timed out: loading"),
    ],
)
def test_an_answer_that_fails_is_told(fake: Callable[..., Server], path: str, message: str) -> None:
    with fake(request_limit_s=2.0) as server:
        with pytest.raises(PeerError, match=message):
            server.ask(path, {})
        if path != "/die":
            assert server.ask("/echo", 1) == 1  # it goes on


def test_one_of_several_that_fails_ends_the_wait(fake: Callable[..., Server]) -> None:
    begin = time.monotonic()
    with pytest.raises(PeerError, match="status 400"), fake() as server:
        server.ask_together("/refuse%202", [1, 2, 3])  # the others hang
    assert time.monotonic() - begin < 60


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("ends", "it did not start; it ended with exit code 1: loading / no such model"),
        ("never listens", "it did not say that it is ready within 2 s: loading"),
        ("never ready", "it did not say that it is ready within 2 s: loading"),
    ],
)
def test_a_server_that_does_not_come_up_is_one_error(fake: Callable[..., Server], mode: str, message: str) -> None:
    with pytest.raises(PeerError, match=message), fake(mode, start_limit_s=30 if mode == "ends" else 2):
        pytest.fail("it is not up")


def test_a_server_ends_with_an_error_in_its_block(fake: Callable[..., Server], tmp_path: Path) -> None:
    def fails() -> None:
        with fake():
            assert alive(int((tmp_path / "pid").read_text()))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()


def test_a_server_that_does_not_want_to_end_is_killed(
    fake: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "END_LIMIT_S", 0.2)
    with fake("stubborn"):
        pass


WAITING = """
    import signal, sys
    from pathlib import Path
    from swarmkv_ll.campaign.processes import Server
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with Server("it", [sys.argv[1], "well"], Path(sys.argv[2])) as server:
        server.ask_together("/hang", [1, 2, 3])
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_when_the_user_is_stopped(program: Program, tmp_path: Path, number: signal.Signals) -> None:
    """By Ctrl-C while it waits for answers; or killed, when nothing of ours can run any more."""
    command = [sys.executable, "-c", textwrap.dedent(WAITING), program(FAKE), tmp_path]
    home = Path(processes.__file__).parents[2]
    with subprocess.Popen(command, stderr=subprocess.PIPE, cwd=home, text=True) as user:
        assert wait_for((tmp_path / "hanging").exists, 30)
        server = int((tmp_path / "pid").read_text())
        assert alive(server)
        user.send_signal(number)
        _, told = user.communicate(timeout=30)
    assert user.returncode != 0
    assert number == signal.SIGKILL or "KeyboardInterrupt" in told
    assert wait_for(lambda: not alive(server))


# ── what tools print and answer ──────────────────────────────────────────────────────────────────────


def in_the_place_of(peer: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "missing", lambda _: None)
    monkeypatch.setattr(peers, "_tool", lambda name: {peer: path}[name])


@pytest.mark.parametrize(
    "printed",
    [
        "",
        "no json",
        "[1, 2]",
        '{"pp": 150}',
        '{"pp": 150, "tg": 4, "pl": 1, "t_tg": 0.5}',  # one branch
        '{"pp": 150, "tg": 4, "pl": 3, "t_tg": "much"}',
        '{"pp": 150, "tg": 4, "pl": 3, "t_tg": 0.0}',
    ],
)
def test_a_batched_bench_without_a_result(
    printed: str, program: Program, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the case does not fit its context: it says nothing then, and ends well."""
    in_the_place_of(BATCHED_BENCH, program(f"print({printed!r})"), monkeypatch)
    with pytest.raises(PeerError, match="llama-batched-bench printed no result for 3 × 4 tokens: "):
        compare(BATCHED_BENCH, case_of(models.files["llama"]), models["llama"], lambda _: None)


def test_a_batched_benchs_rate_is_of_the_generation(
    program: Program, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It prints nothing at times, when it ends before its log is written: then it runs again."""
    row = {"pp": 150, "tg": 4, "t_pp": 9.0, "t": 9.5}
    lines = ["log", *(json.dumps({**row, "pl": n, "t_tg": n / 2}) for n in (1, 3))]
    runs = tmp_path / "runs"
    code = f"""
        with open({str(runs)!r}, "a+") as runs:
            runs.write(".")
            runs.seek(0)
            print({chr(10).join(lines)!r} if len(runs.read()) > 2 else "")
    """
    in_the_place_of(BATCHED_BENCH, program(code), monkeypatch)
    (found,) = compare(BATCHED_BENCH, case_of(models.files["llama"]), models["llama"], lambda _: None)
    assert (found.peer_value, found.unit) == (3 * 4 / 1.5, "tok/s")
    assert runs.read_text() == 4 * "."


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"content": "x"}, "answered without tokens or timings"),
        ([], "answered without tokens or timings"),
        ({"tokens": [], "timings": {"cache_n": "x"}}, "answered without tokens or timings"),
        ({"tokens": [1], "timings": {"cache_n": 0}}, "gave 1 of 4 tokens"),
    ],
)
def test_a_server_that_answers_something_else(
    answer: Any, message: str, program: Program, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_the_place_of(SERVER, program(completing(answer, tmp_path)), monkeypatch)
    with pytest.raises(PeerError, match=f"llama-server {message}"):
        compare(SERVER, case_of(models.files["llama"]), models["llama"], lambda _: None)
    assert not alive(int((tmp_path / "pid").read_text()))


def completing(answer: Any, folder: Path) -> str:
    """A server that gives one and the same completion. It runs in another folder, so its files are named whole."""
    code = FAKE.replace("mode = sys.argv[1]", "mode = ''").replace('open("pid"', f"open({str(folder / 'pid')!r}")
    return code.replace(
        'if self.path == "/echo"', f'if self.path == "/completion":\n            body = {answer!r}\n        if True'
    )


@pytest.mark.parametrize(("cached", "again"), [(149, 3), (150, 0)])
def test_who_computed_the_document_again_is_counted(
    cached: int, again: int, program: Program, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = {"tokens": [-1] * 4, "timings": {"cache_n": cached}}
    in_the_place_of(SERVER, program(completing(answer, tmp_path)), monkeypatch)
    for found in compare(SERVER, case_of(models.files["llama"]), models["llama"], lambda _: None):
        assert f": {again} of 3 computed it again; the same answers in 0 of 3 " in found.what


@pytest.mark.parametrize("printed", ["", "no json", "[1]"])
def test_a_process_that_prints_something_else(printed: str, models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "missing", lambda _: None)
    monkeypatch.setattr(peers, "run", lambda *_, **__: printed)
    with pytest.raises(PeerError, match="llama-cpp-python did not print its seconds"):
        compare(LLAMA_CPP_PYTHON, case_of(models.files["llama"]), models["llama"], lambda _: None)


# ── the real ones ────────────────────────────────────────────────────────────────────────────────────


def measured(peer: str, models: Models, **options: Any) -> list[Comparison]:
    if why := missing(peer):
        pytest.skip(why)
    told: list[str] = []
    found = compare(peer, case_of(models.files["ends"], **options), models["ends"], told.append)
    assert told
    for comparison in found:
        assert comparison.peer == peer
        assert comparison.ratio > 0
        assert str(models.files.folder) not in comparison.call
    return found


def test_llama_cpp_python(models: Models) -> None:
    found = measured(LLAMA_CPP_PYTHON, models)
    assert [comparison.name for comparison in found] == ["save_load", "save_load_n_batch_2048", "ram_cache"]
    assert f"the same token in {peers.ROUNDS} of {peers.ROUNDS} rounds" in found[-1].what


def test_batched_bench(models: Models) -> None:
    (found,) = measured(BATCHED_BENCH, models)
    assert (found.name, found.unit) == ("fan_out_vs_llama_batched_bench", "tok/s")
    assert "llama-batched-bench -m ends.gguf -c 162 -npp 150 -ntg 4 -npl 3 -pps -kvu -fa on -t 1 " in found.call


def test_server(models: Models) -> None:
    """Where the slots were made ready, none computes the document again. Answers are as long as asked for, and ours.

    (How many slots the first way uses depends on whether a tiny model is through with one when the next arrives.)
    """
    found = measured(SERVER, models, n_answer=12)
    assert {comparison.name.removeprefix("fan_out_vs_llama_server"): comparison.unit for comparison in found} == {
        "": "s",
        "_one_slot": "s",
        "_kept": "s",
        "_slots": "s",
    }
    for comparison in found[1], found[3]:
        assert ": 0 of 3 computed it again; " in comparison.what
    assert all("the same answers in 3 of 3" in comparison.what for comparison in found)


def test_our_answers_do_not_end_early(models: Models) -> None:
    case = case_of(models.files["ends"], n_answer=40)
    model = models["ends"]
    with peers._warm(case, model, 5) as fan_out:
        first, again = fan_out(case.questions(0)), fan_out(case.questions(0))
    assert [len(answer) for answer in first.answers] == [40, 40, 40]
    assert not any(model.is_end(token) for answer in first.answers for token in answer)
    assert first.answers == again.answers
    assert 0 < first.engine_s < first.seconds
