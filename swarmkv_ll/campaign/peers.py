"""What a user would take instead, on the same library, model, tokens and threads: both sides in turns, in one minute."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import mean
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from ..budget import HEADROOM
from ..cache import cache_dir
from ..errors import InvalidArgumentError, PeerError
from ..ffi import LIB_DIR
from ..model import Model, Tokens
from ..runtime import STAMP
from .processes import Server, run, shown
from .summary import times_as_good
from .warm import Answered, warm

PEERS = LLAMA_CPP_PYTHON, BATCHED_BENCH, SERVER = ("llama-cpp-python", "llama-batched-bench", "llama-server")

VERSION = "0.3.36"
"""Of llama-cpp-python: the one whose ctypes structures are the pinned engine's."""

ROUNDS = 11
"""Of what takes milliseconds."""

ATTEMPTS = 8
"""Of llama-batched-bench to print what it has measured, see `_printed`."""

Tell = Callable[[str], None]
"""Told what is being measured."""


@dataclass(frozen=True)
class Case:
    """What both sides are given.

    Attributes
    ----------
    model : path
        The model's file.
    document, question : array of int32
        llama-cpp-python keeps all of the document; the others its first `n_short` tokens.
    n_threads, n_short, n_branches, n_answer : int
        `n_branches` branches answer `n_answer` tokens each, ends of text left out.
    """

    model: Path
    document: Tokens
    question: Tokens
    n_threads: int
    n_short: int = 1000
    n_branches: int = 8
    n_answer: int = 32

    def __post_init__(self) -> None:
        for name, value in (
            ("document", len(self.document)),
            ("question", len(self.question)),
            ("n_threads", self.n_threads),
            ("n_short", self.n_short),
            ("n_branches", self.n_branches),
            ("n_answer", self.n_answer),
        ):
            if value < 1:
                raise InvalidArgumentError(f"{name} should be at least 1, is {value}")

    @property
    def short(self) -> Tokens:
        """The first tokens of the document."""
        return self.document[: self.n_short]

    def questions(self, turn: int) -> list[Tokens]:
        """A prompt for each branch, all as long as `question` and of different first tokens; others each turn."""
        begin, end = turn * self.n_branches, (turn + 1) * self.n_branches
        firsts = list(dict.fromkeys([*self.document[1:].tolist(), *range(end)]))
        return [np.array([first, *self.question[1:]], np.int32) for first in firsts[begin:end]]


@dataclass(frozen=True)
class Comparison:
    """One trial: what a peer needed and what we needed.

    Attributes
    ----------
    peer, name : str
    what, call, ours : str
        What was measured; how the peer was called, and what was done here for the same.
    peer_value, our_value : float
    unit : {"s", "tok/s"}
    """

    peer: str
    name: str
    what: str
    call: str
    ours: str
    peer_value: float
    our_value: float
    unit: str = "s"

    @property
    def ratio(self) -> float:
        """How many times as fast we were."""
        return times_as_good(self.peer_value, self.our_value, self.unit)


def version(peer: str) -> str | None:
    """A peer's version, if it is known: its package's, or the commit it was built from, which is our engine's."""
    if peer != LLAMA_CPP_PYTHON:
        return STAMP.split("-")[0]
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(peer)
    return None


def missing(peer: str) -> str | None:
    """Why a peer cannot be measured here and what to do about it, in a line; None if it can."""
    if peer != LLAMA_CPP_PYTHON:
        found = _tool(peer).is_file()
        return (
            None if found else f"{peer} is not built for this engine: run build_llama.sh --tools in the source folder"
        )
    how = f"pip install --no-cache-dir -C wheel.cmake=false {peer}=={VERSION}"
    if find_spec("llama_cpp") is None:
        return f"{peer} is not installed: {how}"
    if version(peer) != VERSION:
        return f"{peer} {version(peer) or 'of unknown version'} may be for another engine: {how}"
    return None


def compare(peer: str, case: Case, model: Model, tell: Tell) -> list[Comparison]:
    """Measure a peer and us once, in turns.

    Parameters
    ----------
    peer : str
        One of `PEERS`.
    model : Model
        The case's, loaded.
    tell : callable
        ``tell(what)`` when another thing begins.

    Raises
    ------
    PeerError
        It is missing, or did not do what it was asked for.
    """
    if why := missing(peer):
        raise PeerError(why)
    measure = {LLAMA_CPP_PYTHON: _llama_cpp_python, BATCHED_BENCH: _batched_bench, SERVER: _server}[peer]
    return measure(case, model, tell)


def _tool(name: str) -> Path:
    return cache_dir() / "tools" / STAMP / name


# ── llama-cpp-python ─────────────────────────────────────────────────────────────────────────────────


def _llama_cpp_python(case: Case, model: Model, tell: Tell) -> list[Comparison]:
    """In a process of its own, where llama-cpp-python holds the document; both sides there."""
    tell("llama-cpp-python: states saved and loaded")
    asked = {
        "model": str(case.model),
        "document": case.document.tolist(),
        "question": case.question.tolist(),
        "n_threads": case.n_threads,
        "rounds": ROUNDS,
    }
    package = Path(__file__).resolve().parents[2]  # so that Python finds this very package first
    command = [sys.executable, "-m", f"{__package__}.peer_llama_cpp"]
    found = _last_json(run(LLAMA_CPP_PYTHON, command, package, stdin=json.dumps(asked)))
    n = f"{len(case.document):,} tokens"
    made = f"Llama(n_batch={{:,}}, flash_attn=True, n_threads={case.n_threads}); "
    comparisons = [
        Comparison(
            LLAMA_CPP_PYTHON,
            name,
            f"a context's state of {n} taken and put back, median of {ROUNDS} rounds in turns",
            made.format(n_batch) + "state = llm.save_state(); llm.load_state(state)",
            "ctx = adopt(llm); snapshot = ctx.snapshot(arena); snapshot.restore(ctx)",
            seconds["peer_s"],
            seconds["our_s"],
        )
        for name, n_batch, seconds in zip(
            ("save_load", "save_load_n_batch_2048"), (512, 2048), found["save_load"], strict=True
        )
    ]
    comparisons.append(
        Comparison(
            LLAMA_CPP_PYTHON,
            "ram_cache",
            f"back to a cached document of {n} with a new question of {len(case.question)}, while the context holds "
            f"something else, to the first token; the same token in {found['same_token']} of {ROUNDS} rounds",
            made.format(512) + "llm.load_state(ram_cache[prompt]); next(llm.generate(prompt, temp=0))",
            "snapshot.restore(ctx); ctx.decode(question); sampler.sample(ctx.logits(0))",
            found["ram_cache"]["peer_s"],
            found["ram_cache"]["our_s"],
        )
    )
    return comparisons


def _last_json(printed: str) -> dict[str, Any]:
    """What its process has printed last."""
    last = printed.strip().rpartition("\n")[2]
    try:
        found = json.loads(last)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise PeerError(f"the process of {LLAMA_CPP_PYTHON} did not print its seconds: {last[-300:]!r}")
    return found


# ── llama-batched-bench ──────────────────────────────────────────────────────────────────────────────


def _batched_bench(case: Case, model: Model, tell: Tell) -> list[Comparison]:
    """A B A B A, its document computed anew each time."""
    n_document, n, n_answer = len(case.short), case.n_branches, case.n_answer
    command: list[str | Path] = [_tool(BATCHED_BENCH), "-m", case.model]
    command += ["-c", str(n_document + n * n_answer), "-npp", str(n_document), "-ntg", str(n_answer), "-npl", str(n)]
    command += ["-pps", "-kvu", "-fa", "on", "-t", str(case.n_threads), "--output-format", "jsonl"]
    # A branch's prompt is one token: as there, it takes n_answer batches of a token a branch.
    prompts = [question[:1] for question in case.questions(0)]
    theirs = []
    tell("llama-batched-bench: the document here")
    with _warm(case, model, 1) as fan_out:
        ours = [fan_out(prompts)]
        for _ in range(2):
            tell("llama-batched-bench: its run")
            theirs.append(_bench_seconds(_printed(command), n_document, n_answer, n))
            tell("llama-batched-bench: branches here")
            ours.append(fan_out(prompts))
    in_engine = sum(found.engine_s for found in ours) / sum(found.seconds for found in ours)
    return [
        Comparison(
            BATCHED_BENCH,
            "fan_out_vs_llama_batched_bench",
            f"{n} branches of {n_answer} tokens after {n_document:,} shared ones, in batches of {n}; it decodes random "
            "tokens and chooses none",
            shown(command),
            "BatchedDecoder.branch() for each and run(): sequences made, tokens chosen and turned into text; "
            f"{100 * in_engine:.1f} % of the time in the engine",
            n * n_answer / mean(theirs),
            n * n_answer / mean(_between(a, b) for a, b in pairwise(ours)),
            "tok/s",
        )
    ]


def _printed(command: Sequence[str | Path]) -> str:
    """What it prints. A thread of its own does that, which it doesn't wait for: after a short run it may be nothing."""
    printed = ""
    for _ in range(ATTEMPTS):
        printed = run(BATCHED_BENCH, command, LIB_DIR)
        if printed.strip():
            break
    return printed


def _bench_seconds(printed: str, n_document: int, n_answer: int, n_branches: int) -> float:
    """Seconds of its generation."""
    for line in printed.splitlines():
        try:
            row = json.loads(line)
            seconds = float(row["t_tg"])
            if (row["pp"], row["tg"], row["pl"]) == (n_document, n_answer, n_branches) and seconds > 0:
                return seconds
        except (ValueError, KeyError, TypeError):  # of its log
            continue
    raise PeerError(
        f"{BATCHED_BENCH} printed no result for {n_branches} × {n_answer} tokens: {printed.strip()[-300:]!r}"
    )


# ── llama-server ─────────────────────────────────────────────────────────────────────────────────────


class _Way(NamedTuple):
    """How the branches of one warm document are brought to it.

    Attributes
    ----------
    suffix : str
        Of the comparison's name.
    how, called : str
    options : dict
        Of each request.
    restored : bool
        Whether each slot's state is read from a file first.
    """

    suffix: str
    how: str
    called: str = ""
    options: dict[str, Any] = {}  # noqa: RUF012  # never changed
    restored: bool = False


_WAYS = (
    _Way("", "one slot is warm, and each may have any slot"),
    _Way("_one_slot", "all wait for one warm slot", ', "id_slot": 0', {"id_slot": 0}),
    _Way("_kept", "every slot holds a copy of the document from questions before"),
    _Way(
        "_slots",
        "a copy of the document is read into every slot first",
        " after /slots/…?action=restore",
        restored=True,
    ),
)
"""In this order, in one server: the first leaves the document in every slot.

Its other cache, `--cache-ram` (8 GiB by default), helps none of them: an entry moves into the one slot that loads it.
"""


def _server(case: Case, model: Model, tell: Tell) -> list[Comparison]:
    """A server with a slot for each branch, and the document warm in slot 0; each way with other questions.

    A way is compared with our fan-out of its questions just before, and of the next way's just after.
    """
    n, document = case.n_branches, case.short.tolist()
    n_slot = -(-(len(document) + len(case.question) + case.n_answer + 16) // 256) * 256
    comparisons = []
    with tempfile.TemporaryDirectory(prefix="swarmkv-") as folder, _warm(case, model, len(case.question)) as fan_out:
        slots = Path(folder) / "slots"
        slots.mkdir()
        command: list[str | Path] = [_tool(SERVER), "-m", case.model, "-c", str(n * n_slot), "-np", str(n)]
        command += ["-fa", "on", "-t", str(case.n_threads), "--slot-save-path", slots, "--no-cache-idle-slots"]
        tell("llama-server: its document")
        with Server(SERVER, command, LIB_DIR) as server:
            _complete(server, [_request(case, document, id_slot=0, n_predict=0)])
            server.ask("/slots/0?action=save", {"filename": "document"})
            tell("llama-server: branches here")
            before = fan_out(case.questions(0))
            for turn, way in enumerate(_WAYS):
                tell(f"llama-server: its branches, {way.how}")
                requests = [_request(case, [*document, *q.tolist()], **way.options) for q in case.questions(turn)]
                begin = perf_counter()
                for slot in range(n if way.restored else 0):
                    server.ask(f"/slots/{slot}?action=restore", {"filename": "document"})
                replies = _complete(server, requests)
                seconds = perf_counter() - begin
                tell("llama-server: branches here")
                after = fan_out(case.questions(turn + 1))
                again = sum(reply["timings"]["cache_n"] < len(document) for reply in replies)
                same = sum(reply["tokens"] == answer for reply, answer in zip(replies, before.answers, strict=True))
                comparisons.append(
                    Comparison(
                        SERVER,
                        f"fan_out_vs_llama_server{way.suffix}",
                        f"{n} questions of {len(case.question)} tokens on a document of {len(document):,} arrive together, "
                        f"until {case.n_answer} tokens of each are answered; {way.how}: {again} of {n} computed it again; "
                        f"the same answers in {same} of {n} (batches of other shapes round otherwise)",
                        f'{shown(command)}; {n} × POST /completion "cache_prompt": true, "top_k": 1{way.called}',
                        "document warm in a context; BatchedDecoder.branch() for each and run(); no HTTP",
                        seconds,
                        _between(before, after),
                    )
                )
                before = after
    return comparisons


def _request(case: Case, prompt: list[int], **options: Any) -> dict[str, Any]:
    """Greedy, by the cheapest chain that it has; ends of text left out; no more in the answer than is read."""
    return {
        "prompt": prompt,
        "n_predict": case.n_answer,
        "cache_prompt": True,
        "samplers": ["top_k"],
        "top_k": 1,
        "ignore_eos": True,
        "return_tokens": True,
        "response_fields": ["tokens", "timings"],
        **options,
    }


def _complete(server: Server, requests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Completions of requests that arrive together."""
    replies = server.ask_together("/completion", requests)
    for request, reply in zip(requests, replies, strict=True):
        try:
            n, _ = len(reply["tokens"]), reply["timings"]["cache_n"] + 0
        except (KeyError, TypeError):
            raise PeerError(f"{SERVER} answered without tokens or timings: {str(reply)[:300]}") from None
        if n < request["n_predict"]:
            raise PeerError(f"{SERVER} gave {n} of {request['n_predict']} tokens: {str(reply)[:300]}")
    return replies


# ── our side ─────────────────────────────────────────────────────────────────────────────────────────


def _between(before: Answered, after: Answered) -> float:
    """Seconds of ours to stand beside what a peer did between the two."""
    return mean((before.seconds, after.seconds))


@contextmanager
def _warm(case: Case, model: Model, n_prompt: int) -> Iterator[Callable[[Sequence[Tokens]], Answered]]:
    """Our fan-out, with the document warm in a context."""
    n_ctx = len(case.short) + case.n_branches * (n_prompt + case.n_answer) + HEADROOM
    with model.context(n_ctx, 1 + case.n_branches, flash_attn=True, n_threads=case.n_threads) as ctx:
        yield warm(ctx, case.short, case.n_answer)
