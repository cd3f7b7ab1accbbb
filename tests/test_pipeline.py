"""Pipelines: each answer is that of plain decoding, each problem is told before anything is made, each figure adds up."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from time import sleep
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from helpers import KINDS, Files, Models, identical, new_context, text_tokens

from swarmkv_ll import Arena, Context, LlamaGuard, Model, Sampler
from swarmkv_ll.budget import HEADROOM
from swarmkv_ll.chat import Chat
from swarmkv_ll.errors import (
    ArenaExhaustedError,
    ContextBudgetError,
    CycleError,
    DuplicateNodeError,
    InvalidArgumentError,
    NodeError,
    PipelineError,
    PipelineFileError,
    UnknownNodeError,
)
from swarmkv_ll.fanout import N_BATCH
from swarmkv_ll.pipeline import BranchNode, FunctionNode, Node, Pipeline, PipelineResult, PrefillNode, Run
from swarmkv_ll.policy import FairShare

STRATEGIES = ("shared", "snapshot")
LONG = 60
"""Seconds after which something hangs."""

DOCUMENT = "the kv cache holds one row of keys and one row of values for each token that was read. " * 2


def in_time(call: Callable[[], Any], timeout: float = LONG) -> Any:
    """What a call gives, or raises; a TimeoutError if it hangs."""
    future: Future[Any] = Future()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future.result(timeout)


def run(model: Model, nodes: Any, *, on_token: Any = None, **options: Any) -> PipelineResult:
    result: PipelineResult = in_time(
        Pipeline(model, nodes, **{"n_threads": 1, **options}).start(on_token=on_token).result
    )
    assert {node.state for node in result.values()} <= {"done", "failed", "skipped", "cancelled"}
    return result


class Recorder:
    """A sampler that keeps the rows it chooses from."""

    def __init__(self) -> None:
        self.rows: list[npt.NDArray[np.float32]] = []
        self.greedy = Sampler()
        self.n_closed = 0

    def for_branch(self, _index: int) -> Recorder:
        return self

    def sample(self, logits: npt.NDArray[np.float32]) -> int:
        self.rows.append(logits.copy())
        return self.greedy.sample(logits)

    def close(self) -> None:
        self.n_closed += 1


# ── by hand ──────────────────────────────────────────────────────────────────────────────────────────


class Answered(NamedTuple):
    """A branch, decoded by hand."""

    tokens: list[int]
    rows: list[npt.NDArray[np.float32]]
    finished: bool
    text: str


class Hand:
    """Every node of a pipeline worked out by itself: branches in a context of their own, from the document's first token.

    Documents are cut where the pipeline has to cut them.
    """

    def __init__(self, model: Model, nodes: Mapping[str, Any], *, chat: bool = False) -> None:
        self.model, self.nodes, self.chat = model, dict(nodes), Chat(model) if chat else None
        self.answered: dict[str, Answered] = {}

    def __getitem__(self, name: str) -> Answered:
        if name not in self.answered:
            self.answered[name] = self._answer(name)
        return self.answered[name]

    def names(self, name: str) -> list[str]:
        given = self.nodes[name].depends_on
        return [given] if isinstance(given, str) else list(given)

    def document(self, name: str) -> npt.NDArray[np.int32]:
        document = self.nodes[name].document
        if not isinstance(document, str):
            return np.asarray(document, np.int32)
        if self.chat:
            return self.chat.document(document)
        return self.model.tokenize(document, add_special=True, parse_special=False)

    def value(self, name: str) -> Any:
        node = self.nodes[name]
        if isinstance(node, PrefillNode):
            return len(self.document(name))
        if isinstance(node, BranchNode):
            return self[name].text
        return node.run({other: self.value(other) for other in self.names(name)})

    def prompt(self, name: str) -> list[int]:
        prompt: Any = self.nodes[name].prompt
        if not isinstance(prompt, str):
            return list(prompt)
        for other in self.names(name):
            if f"{{{other}}}" in prompt.replace(f"{{{{{other}}}}}", ""):
                prompt = prompt.replace(f"{{{{{other}}}}}", "\0").replace(f"{{{other}}}", str(self.value(other)))
                prompt = prompt.replace("\0", f"{{{other}}}")
        if self.chat:
            reply = isinstance(self.nodes[self.names(name)[0]], BranchNode)
            return list(self.chat.reply(prompt) if reply else self.chat.prompt(prompt))
        return list(self.model.tokenize(prompt, add_special=False, parse_special=False))

    def _answer(self, name: str) -> Answered:
        path = [name]
        while isinstance(self.nodes[path[0]], BranchNode):
            path.insert(0, self.names(path[0])[0])
        document, first = path[0], self.nodes[path[1]]
        tokens = self.document(document)
        end = first.required_prefix_tokens or len(tokens)
        borders = {
            node.required_prefix_tokens
            for other, node in self.nodes.items()
            if isinstance(node, BranchNode) and self.names(other)[0] == document and node.required_prefix_tokens
        }
        with new_context(self.model, 4096, n_batch=N_BATCH, n_ubatch=N_BATCH) as ctx:
            at = 0
            for border in sorted({*borders, len(tokens)}):
                for piece in np.array_split(tokens[at:border], -(-(border - at) // N_BATCH)) if border <= end else ():
                    ctx.decode(piece, logits="none")
                at = border
            pending: list[int] = []
            for branch in path[1:]:
                answered = self._branch(ctx, branch, pending)
                pending = answered.tokens[-1:] if not answered.finished else []
        return answered

    def _branch(self, ctx: Context, name: str, pending: list[int]) -> Answered:
        ctx.decode([*pending, *self.prompt(name)])
        rows: list[Any] = []
        tokens: list[int] = []
        for token in ctx.generate(Sampler(), self.nodes[name].max_tokens):
            rows.append(ctx.logits().copy())
            tokens.append(token)
        finished = len(tokens) < self.nodes[name].max_tokens
        if finished:
            rows.append(ctx.logits().copy())
        text = b"".join(map(self.model.piece, tokens)).decode(errors="replace")
        return Answered(tokens, rows, finished, text)

    def check(self, result: PipelineResult, *, exact: bool, skip: tuple[str, ...] = ()) -> None:
        """All answers are those by hand: token for token, or, in a batch of another shape, where two are as likely but for rounding."""
        unlike: set[str] = set()
        n = 0
        for name, node in self.nodes.items():
            if name in skip:
                continue
            assert (result[name].state, result[name].error) == ("done", None), name
            if not isinstance(node, BranchNode):
                if not unlike & set(self.names(name)):
                    assert result[name].value == self.value(name), name
                continue
            n += 1
            if unlike & set(self.names(name)):
                unlike.add(name)
                continue
            found, by_hand = result[name], self[name]
            if not exact and found.tokens != by_hand.tokens:
                at = next(i for i, (a, b) in enumerate(zip(found.tokens, by_hand.tokens, strict=False)) if a != b)
                assert by_hand.rows[at].max() - by_hand.rows[at][found.tokens[at]] < 0.05, name
                unlike.add(name)
                continue
            assert (found.tokens, found.finished, found.text) == (by_hand.tokens, by_hand.finished, by_hand.text), name
            before = result[(node.depends_on,)[0] if isinstance(node.depends_on, str) else node.depends_on[0]]
            lacks = bool(before.tokens) and not before.finished  # no cell holds the last token of that answer
            assert found.n_tokens == len(self.prompt(name)) + lacks
            if before.kind == "branch":
                held = before.n_prefix_tokens + before.n_tokens + len(before.tokens) - lacks
                assert found.n_prefix_tokens == held
        assert len(unlike) <= n // 2


def sampled(nodes: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Recorder]]:
    """The same nodes with a recorder in each branch."""
    recorders: dict[str, Recorder] = {}
    with_recorders = dict(nodes)
    for name, node in nodes.items():
        if isinstance(node, BranchNode):
            recorders[name] = Recorder()
            with_recorders[name] = BranchNode(**{**node.__dict__, "sampler": recorders[name]})
    return with_recorders, recorders


def branch(prompt: Any, depends_on: Any, w: int | None = None, *, n: int = 8, **options: Any) -> BranchNode:
    return BranchNode(prompt, depends_on, w, max_tokens=n, **options)


class Length:
    """A node of the user's own, with nothing of ours in it."""

    depends_on = ("last", "whole")

    def run(self, results: Mapping[str, Any]) -> int:
        return len(results["last"]) + 1000 * len(results["whole"])


def graph(n_document: int = 150) -> dict[str, Any]:
    """All there is: prefixes, hand-offs, fan-in, functions, two documents, texts and tokens. In no order."""
    nodes: dict[str, Any] = {
        "own": Length(),
        "sum": branch(
            "of {whole} and {other_one}: {count} {{whole}} {x y} {", ["from_63", "whole", "other_one", "count"]
        ),
        "after_sum": branch("so?", "sum"),
        "count": FunctionNode(lambda text, n: f"{len(text)}/{n}", ["whole", "doc"]),
        "doc": PrefillNode(text_tokens(n_document)),
        "other": PrefillNode(DOCUMENT),
        "whole": branch("what is it?", "doc"),
        "tokens": branch([1, 2, 3], "doc"),
        "other_one": branch("how many rows are there?", ("other",), n=5),
        "other_64": branch("and of these?", "other", 64),
        "child": branch("and then?", "whole"),
        "first_twin": branch("or else?", "child"),
        "second_twin": branch("or that?", "child", n=3),
        "c1": branch("go", "doc", n=1),
        **{f"c{i}": branch(f" on {i}", f"c{i - 1}", n=i) for i in range(2, 7)},
        "last": branch([7, 8], "c6"),
        "of_own": branch("{own}.", ["doc", "own"]),
    }
    for w in (1, 63, 64, 65, n_document - 1, n_document):
        nodes[f"from_{w}"] = branch(f"of {w}?", "doc", w)
    return nodes


# ── answers ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_plain_decoding(models: Models, kind: str, strategy: Any) -> None:
    """In contexts of their own, which no other's tokens share, their logits are bit for bit."""
    nodes = graph()
    by_hand = Hand(models[kind], nodes)
    assert isinstance(nodes["own"], Node)
    for n_parallel in (1, 4) if strategy == "snapshot" else (None, 1):
        with_recorders, recorders = sampled(nodes)
        result = run(models[kind], with_recorders, strategy=strategy, n_parallel=n_parallel)
        by_hand.check(result, exact=strategy == "snapshot")
        assert all(recorder.n_closed == 1 for recorder in recorders.values())
        if strategy == "snapshot":
            for name, recorder in recorders.items():
                assert identical(np.array(recorder.rows), np.array(by_hand[name].rows)), name
    answers = {tuple(by_hand[name].tokens) for name in nodes if name.startswith("from_")}
    assert len(answers) > 1  # a control: how much of the document is seen makes a difference
    assert by_hand["from_150"].tokens != by_hand["from_1"].tokens


@pytest.mark.parametrize("guard", ["global", "context"])
@pytest.mark.parametrize("kind", ["llama", "jamba"])
def test_bits_whatever_runs_beside(files: Files, kind: str, guard: Any) -> None:
    """Branches that begin while the document is computed, in five contexts; and the end of a document of several batches."""
    document = text_tokens(1300, seed=3)
    nodes: dict[str, Any] = {"doc": PrefillNode(document), "more": PrefillNode(text_tokens(400, seed=4))}
    for i, w in enumerate((1, 64, 65, 300, 601, 1299)):
        nodes[f"b{i}"] = branch(f"say {i}", "doc", w, n=20)
        nodes[f"a{i}"] = branch(f"and {i}", f"b{i}", n=6)
        nodes[f"m{i}"] = branch(f"no {i}", "more", n=6)
    nodes["end"] = branch("at the end", "doc")
    with Model(files[kind], guard=LlamaGuard(guard)) as model:
        by_hand = Hand(model, nodes)
        with_recorders, recorders = sampled(nodes)
        result = run(model, with_recorders, strategy="snapshot", n_parallel=5)
        by_hand.check(result, exact=True)
        for name, recorder in recorders.items():
            assert identical(np.array(recorder.rows), np.array(by_hand[name].rows)), name


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_hand_off_from_answers_that_ended_and_that_were_cut(models: Models, strategy: Any) -> None:
    """The state of the first lacks no token; that of the second lacks the last one."""
    nodes: dict[str, Any] = {"doc": PrefillNode(DOCUMENT)}
    for i, prompt in enumerate(("what is it?", "who", "how many rows are there for each token?", "no.")):
        nodes[f"b{i}"] = branch(prompt, "doc", n=300)
        nodes[f"cut{i}"] = branch(prompt, "doc", n=3)
        for parent in (f"b{i}", f"cut{i}"):
            nodes[f"{parent}_a"] = branch("and?", parent, n=12)
            nodes[f"{parent}_b"] = branch("or else {" + parent + "}", parent, n=12)
            nodes[f"{parent}_a_a"] = branch("so?", f"{parent}_a", n=12)
    by_hand = Hand(models["ends"], nodes)
    result = run(models["ends"], nodes, strategy=strategy, n_ctx=8192)
    by_hand.check(result, exact=strategy == "snapshot")
    ended = [name for name in nodes if name != "doc" and result[name].finished and f"{name}_a" in nodes]
    assert ended
    assert [name for name in nodes if name != "doc" and not result[name].finished and f"{name}_a" in nodes]
    for name in ended:
        assert len(result[name].token_s) == len(result[name].tokens) + 1
        assert result[f"{name}_a"].n_prefix_tokens > 0


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_chat(models: Models, strategy: Any) -> None:
    nodes = {
        "doc": PrefillNode(DOCUMENT),
        "one": branch(" why? ", "doc"),
        "two": branch("and {one}?", "one"),
        "part": branch("then?", "doc", 40),
        "three": branch("so?", "two"),
    }
    by_hand = Hand(models["bos"], nodes, chat=True)
    by_hand.check(run(models["bos"], nodes, strategy=strategy, chat=True), exact=strategy == "snapshot")
    plain = run(models["bos"], nodes, strategy=strategy)
    assert plain["two"].tokens != by_hand["two"].tokens


def test_seeds_give_the_same_draws_in_both_strategies(models: Models) -> None:
    def drawn(seed: int, strategy: Any) -> list[list[int]]:
        sampler = Sampler(1.0, top_k=40, seed=seed)
        nodes = {
            "late": branch("and?", "b", sampler=sampler),
            "doc": PrefillNode(text_tokens(100)),
            "a": branch("same", "doc", sampler=sampler),
            "b": branch("same", "doc", sampler=sampler),
            "c": branch("same", "doc", 60, sampler=sampler),
        }
        result = run(models["llama"], nodes, strategy=strategy, n_parallel=1).check()
        return [result[name].tokens for name in ("a", "b", "c", "late")]

    expected = drawn(1, "snapshot")
    assert drawn(1, "snapshot") == expected
    assert drawn(1, "shared") == expected
    assert drawn(2, "shared") != expected
    assert expected[0] != expected[1]  # each branch draws for itself


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_answers_that_break_a_character_off_may_be_longer_as_text(models: Models, strategy: Any) -> None:
    """What stands for such a byte is three bytes: the prompt they go into, and what goes on from there, are longer than planned."""
    nodes = {
        "doc": PrefillNode([1, 2]),
        "a": branch("x", "doc", n=30),
        "b": branch("y", "doc", n=30),
        "both": branch("{a}{b}", ["doc", "a", "b"], n=4),
        "then": branch("z", "both", n=4),
        "last": branch("z", "then", n=4),
    }

    class Broken(Recorder):
        def sample(self, logits: Any) -> int:
            return 0xC3

    broken = {**nodes, **{name: branch("x", "doc", n=30, sampler=Broken()) for name in "ab"}}
    result = run(models["llama"], broken, strategy=strategy).check()
    assert result["a"].text == "\ufffd" * 30
    assert result["both"].n_tokens == 2 * 30 * 3
    assert [len(result[name].tokens) for name in ("both", "then", "last")] == [4, 4, 4]
    assert result["last"].n_prefix_tokens == 2 + 180 + 4 + 1 + 4 - 1


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_pipeline_runs_many_times(models: Models, strategy: Any) -> None:
    nodes = graph()
    pipeline = Pipeline(models["llama"], nodes, strategy=strategy, n_threads=1)
    by_hand = Hand(models["llama"], nodes)
    for _ in range(2):
        by_hand.check(in_time(pipeline.run), exact=strategy == "snapshot")
    runs = [pipeline.start() for _ in range(3)]
    for started in runs:
        by_hand.check(in_time(started.result), exact=strategy == "snapshot")
    assert "nodes" in repr(pipeline)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nothing_but_documents_or_functions(models: Models, strategy: Any) -> None:
    result = run(models["llama"], {"doc": PrefillNode(text_tokens(600))}, strategy=strategy).check()
    assert (result["doc"].value, result["doc"].n_done) == (600, 600)
    result = run(models["llama"], [("f", FunctionNode(lambda: 1)), ("g", FunctionNode(lambda x: x + 1, "f"))]).check()
    assert (result["g"].value, result["g"].text) == (2, "2")
    assert list(result) == ["f", "g"]
    assert len(result) == 2


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_more_branches_than_sequences(models: Models, strategy: Any) -> None:
    """300 of them, and each kind of wait: for a sequence, for a context, for a worker."""
    doc = {"doc": PrefillNode(text_tokens(70))}
    nodes = {**doc, **{f"b{i}": branch([i % 256, 1], "doc", n=2) for i in range(300)}}
    result = run(models["llama"], nodes, strategy=strategy).check()
    by_hand = Hand(models["llama"], {**doc, **{f"b{i}": nodes[f"b{i}"] for i in range(0, 300, 37)}})
    by_hand.check(result, exact=strategy == "snapshot")
    result = run(models["llama"], nodes, strategy=strategy, n_parallel=200 if strategy == "shared" else 3).check()
    by_hand.check(result, exact=strategy == "snapshot")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_chain_of_hand_offs(models: Models, strategy: Any) -> None:
    """300 in "shared", where one takes over from the other; what "snapshot" keeps grows with the square."""
    n = 300 if strategy == "shared" else 80
    nodes: dict[str, Any] = {"doc": PrefillNode(text_tokens(70)), "b0": branch([1, 2], "doc", n=2)}
    nodes |= {f"b{i}": branch([i % 256], f"b{i - 1}", n=1) for i in range(1, n)}
    result = run(models["llama"], dict(reversed(nodes.items())), strategy=strategy).check()
    by_hand = Hand(models["llama"], nodes)
    for name in ("b1", "b20", f"b{n - 1}"):
        assert result[name].tokens == by_hand[name].tokens
    assert result[f"b{n - 1}"].n_prefix_tokens + 1 == 70 + 2 * n


# ── streaming ────────────────────────────────────────────────────────────────────────────────────────


def computed(result: PipelineResult, name: str, kind: str) -> int:
    """Tokens of one kind that a node had computed."""
    in_steps = sum(
        part.n_tokens for step in result.steps for part in step.parts if (part.name, part.kind) == (name, kind)
    )
    return in_steps + sum(span.n_tokens for span in result.spans if (span.lane, span.kind) == (name, kind))


class Slow:
    """From `w` of a document's tokens on, gives it one at a time until somebody else is there."""

    def __init__(self, w: int) -> None:
        self.w, self.done, self.fair, self.met = w, 0, FairShare(), False

    def choose(self, work: Any, room: int) -> list[int]:
        grants = self.fair.choose(work, room)
        self.met = self.met or len(work) > 1
        if not self.met:
            if self.done >= self.w:
                sleep(0.001)
                grants = [1]
            self.done += grants[0]
        return grants


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_branch_begins_before_its_document_is_done(models: Models, strategy: Any) -> None:
    n = 4000
    nodes: dict[str, Any] = {
        "doc": PrefillNode(text_tokens(n)),
        "early": branch("first?", "doc", 64, n=4),
        "next": branch("second?", "early", n=4),
        "late": branch("at last?", "doc", n=4),
    }
    policy = Slow(64) if strategy == "shared" else None
    result = run(models["llama"], nodes, strategy=strategy, policy=policy).check()
    doc, early, late = result["doc"], result["early"], result["late"]
    assert doc.ended_s is not None
    assert early.begun_s is not None
    assert early.begun_s < early.token_s[0] < doc.ended_s
    assert late.begun_s is not None
    assert doc.ended_s <= late.ready_s <= late.begun_s
    # It is computed once, in one go, with a border where the branch began.
    assert computed(result, "doc", "prefill") == n
    watermarks = [int(mark.text.replace(",", "")) for mark in result.marks if mark.lane == "doc"]
    assert watermarks == sorted(set(watermarks))
    assert (64 in watermarks, watermarks[-1], doc.n_done, doc.value) == (True, n, n, n)
    for name, prefix in (("early", 64), ("late", n)):
        assert result[name].n_prefix_tokens == prefix
        assert computed(result, name, "prompt") == result[name].n_tokens
        assert computed(result, name, "decode") == 3
    assert computed(result, "next", "prompt") == result["next"].n_tokens
    by_hand = Hand(models["llama"], {name: nodes[name] for name in ("doc", "early", "next")})
    by_hand.check(result, exact=strategy == "snapshot")


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_exported_that_nobody_goes_on_from(models: Models, kind: str) -> None:
    nodes = {
        "doc": PrefillNode(text_tokens(200)),
        "unread": PrefillNode(text_tokens(200)),
        "one": branch("a", "doc", 64),
        "two": branch("b", "doc", 64),
        "three": branch("c", "doc", 65),
        "four": branch("d", "three"),
        "five": branch("e {four}", ["three", "four"]),
    }
    pipeline = Pipeline(models[kind], nodes, strategy="snapshot", n_threads=1)
    with Arena(pipeline.arena_bytes) as arena:  # as much as is asked for is enough
        n_held: list[int] = []
        pipeline = Pipeline(models[kind], nodes, strategy="snapshot", n_threads=1, arena=arena)
        on_token = lambda *_: n_held.append(arena.stats().n_leases)  # noqa: E731
        result = in_time(pipeline.start(on_token=on_token).result).check()
        exports = Counter((span.lane, span.n_tokens) for span in result.spans if span.kind == "export")
        assert exports == {("doc", 64): 1, ("doc", 65): 1, ("three", 65 + 1 + 7): 1}
        assert 1 <= max(n_held) <= 3
        assert n_held[-1] == 0  # given back as soon as the last one has begun
        assert arena.stats().n_leases == 0
        arena.check_integrity()
        assert result["doc"].export_ms > 0
        assert result["three"].export_ms > 0
        assert [result[name].export_ms for name in ("unread", "one", "two", "four", "five")] == [0] * 5
        assert computed(result, "doc", "restore") == 0
        assert computed(result, "three", "restore") == 65
    assert not [
        span for span in run(models[kind], {"doc": nodes["doc"]}, strategy="snapshot").spans if span.kind == "export"
    ]


# ── what is refused, before anything is made ─────────────────────────────────────────────────────────


def problems(model: Model, nodes: Any, **options: Any) -> tuple[Any, ...]:
    with pytest.raises(PipelineError) as caught:
        Pipeline(model, nodes, **options)
    for problem in caught.value.problems:
        assert str(problem) in str(caught.value)
    return caught.value.problems


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_problems_are_told_at_once(models: Models, made: list[Any], strategy: Any) -> None:
    nodes = [
        ("b", branch("x", "doc", 50)),  # stands before its document: no problem of its own
        ("past", branch("x", "doc", 101)),
        ("none", branch("x", "doc", 0)),
        ("doc", PrefillNode(text_tokens(100))),
        ("a", branch("x", ["c"])),
        ("c", branch("x", "a")),
        ("lost", branch("x", "dok")),
        ("empty", PrefillNode(" \n")),
        ("no_tokens", PrefillNode([])),
        ("mute", branch("  ", "doc")),
        ("dumb", branch([], "doc")),
        ("long", branch("x", "doc", n=16384 - 100 - HEADROOM)),
        ("huge", PrefillNode(text_tokens(16384 - HEADROOM + 1))),
        ("doc", PrefillNode("again")),
        ("9", PrefillNode("x")),
        ("a b", PrefillNode("x")),
        (3, PrefillNode("x")),
        ("twice", branch("x", ["doc", "b", "b"])),
        ("reads", branch("{b} {doc}", ["doc"])),
        ("reads_document", branch("{doc}", ["b", "doc"])),
        ("of_function", branch("x", "f")),
        ("f", FunctionNode(len, "b", time_limit=-1)),
        ("uncalled", FunctionNode(3, "b")),  # type: ignore[arg-type]
        ("not_a_node", 3),
        ("of_nothing", branch("x", ())),
        ("part_of_branch", branch("x", "b", 3)),
        ("greedy", BranchNode("x", "doc", max_tokens=0, sampler=3, priority=0, time_limit=float("nan"))),  # type: ignore[arg-type]
        ("flags", BranchNode("x", "doc", True, max_tokens=True, priority=float("inf"))),
        ("bad_tokens", branch([384], "doc")),
        ("bad_text", branch("\ud800", "doc")),
        ("strange", FunctionNode(len, 5)),  # type: ignore[arg-type]
    ]
    found = problems(models["llama"], nodes, strategy=strategy)
    assert made == []
    told = [(p.node, p.key) if isinstance(p, NodeError) else type(p) for p in found]
    cycles = [p for p in found if isinstance(p, CycleError)]
    assert [(p.edge, p.cycle) for p in cycles] == [(("c", "a"), ("a", "c", "a"))]
    (lost,) = [p for p in found if isinstance(p, UnknownNodeError)]
    assert (lost.node, lost.missing) == ("lost", "dok")
    assert "'doc' is" in str(lost)
    assert [p.node for p in found if isinstance(p, DuplicateNodeError)] == ["doc", "twice"]
    assert [str(p) for p in found if type(p) is PipelineError] == [
        f"a node's name should be letters, digits, - and _, and begin with no digit: {name!r}"
        for name in ("9", "a b", 3)
    ]
    by_node = [pair for pair in told if isinstance(pair, tuple)]
    assert sorted(by_node) == sorted(
        [
            ("past", "required_prefix_tokens"),
            ("none", "required_prefix_tokens"),
            ("empty", "document"),
            ("no_tokens", "document"),
            ("mute", "prompt"),
            ("dumb", "prompt"),
            ("long", "max_tokens"),
            ("huge", "document"),
            ("reads", "prompt"),
            ("reads", "prompt"),
            ("reads_document", "prompt"),
            ("of_function", "depends_on"),
            ("f", "time_limit"),
            ("uncalled", "function"),
            ("not_a_node", "run"),
            ("of_nothing", "depends_on"),
            ("part_of_branch", "required_prefix_tokens"),
            ("greedy", "max_tokens"),
            ("greedy", "sampler"),
            ("greedy", "priority"),
            ("greedy", "time_limit"),
            ("flags", "required_prefix_tokens"),
            ("flags", "max_tokens"),
            ("flags", "priority"),
            ("bad_tokens", "prompt"),
            ("bad_text", "prompt"),
            ("strange", "depends_on"),
        ]
    )
    by_name = {p.node: p for p in found if isinstance(p, NodeError)}
    assert "should be 1 to 100, the length of 'doc', is 101" in str(by_name["past"])
    long, huge = by_name["long"].cause, by_name["huge"].cause
    assert isinstance(long, ContextBudgetError)
    own = 1 + 16384 - 100 - HEADROOM
    assert (long.prefix_tokens, long.branch_tokens, long.headroom, long.n_ctx) == (100, own, HEADROOM, 16384)
    assert isinstance(huge, ContextBudgetError)
    assert (huge.prefix_tokens, huge.branch_tokens, huge.n_ctx) == (16384 - HEADROOM + 1, 0, 16384)


def test_the_budget_is_of_the_whole_path(models: Models, made: list[Any]) -> None:
    """Document, prompts and answers, those put into prompts too."""
    chain = {"doc": PrefillNode(text_tokens(100)), "a": branch([1], "doc", 60, n=10), "b": branch([1, 2], "a", n=20)}
    fan_in = {**chain, "c": branch("{a}-{b}-{a}", ["b", "a"], n=7)}
    length = 60 + 1 + 10 + 2 + 20 + len("x-x-x") + 10 + 20 + 7  # the answers' own, then those put in; {a} counts once
    for n_ctx in (length + HEADROOM - 1, 200):
        found = problems(models["llama"], fan_in, n_ctx=n_ctx, strategy="snapshot")
        (error,) = [p.cause for p in found if p.node == "c"]
        assert (error.prefix_tokens, error.branch_tokens, error.n_ctx) == (93, length - 93, n_ctx)
    assert made == []
    Pipeline(models["llama"], fan_in, n_ctx=length + HEADROOM, strategy="snapshot")


def test_dependencies_that_are_no_names(models: Models, made: list[Any]) -> None:
    """What is read once or has no order would be other dependencies when it is read again."""

    class Raises:
        @property
        def depends_on(self) -> Any:
            raise ValueError("not now")

        def run(self, results: Any) -> Any:
            return None

    doc = PrefillNode("x")
    for given in ((name for name in ["doc"]), {"doc"}, {"doc": 1}, 5, None, [5], b"doc", [None], np.array(["doc"])):
        (problem,) = problems(models["llama"], {"doc": doc, "b": branch("x", given)})[:1]
        assert (problem.node, problem.key) == ("b", "depends_on")
        (problem,) = problems(models["llama"], {"doc": doc, "f": FunctionNode(print, given)})
        assert (problem.node, problem.key) == ("f", "depends_on")
    (problem,) = problems(models["llama"], {"doc": doc, "r": Raises(), "s": FunctionNode(print, "r")})
    assert (problem.node, problem.key) == ("r", "depends_on")
    assert "not now" in str(problem)
    assert made == []


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "reprefill"},
        {"strategy": None},
        {"n_ctx": 0},
        {"n_ctx": 2**31},
        {"n_parallel": 0},
        {"n_parallel": 256},
        {"n_workers": 0},
        {"n_threads": 0},
        {"n_threads": 513},
        {"policy": 3},
    ],
    ids=str,
)
def test_parameters_out_of_range(models: Models, made: list[Any], options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError):
        Pipeline(models["llama"], graph(), **options)
    assert made == []


def test_no_nodes(models: Models) -> None:
    for nodes in ({}, []):
        assert "at least one" in str(problems(models["llama"], nodes)[0])


def test_an_arena_that_is_too_small(models: Models, made: list[Any]) -> None:
    nodes = graph()
    needed = Pipeline(models["llama"], nodes, strategy="snapshot").arena_bytes
    made.clear()
    with Arena(needed - 1 - (needed - 1) % 4096) as arena:
        (error,) = problems(models["llama"], nodes, strategy="snapshot", arena=arena)
        assert isinstance(error, ArenaExhaustedError)
        assert (error.requested, error.largest_free) == (needed, arena.n_bytes)
        lease = arena.lease(4096)
        lease.release()
        run(models["llama"], {"doc": nodes["doc"], "c1": nodes["c1"]}, strategy="snapshot", arena=arena).check()
        assert all(context.closed for context in made if isinstance(context, Context))


def test_too_few_cells(models: Models, made: list[Any]) -> None:
    nodes = {
        "doc": PrefillNode(text_tokens(100)),
        "other": PrefillNode(text_tokens(150)),
        "parent": branch([1], "doc", n=10),
        "child": branch([1], "parent", n=20),
        "alone": branch([1], "doc", n=30),
    }
    held, longest = 250 + 11, 31
    for n_ctx in (held + longest - 1, 280):
        (error,) = problems(models["llama"], nodes, n_ctx=n_ctx)
        assert isinstance(error, ContextBudgetError)
        assert (error.prefix_tokens, error.branch_tokens, error.n_ctx) == (held, longest, n_ctx)
    assert made == []
    run(models["llama"], nodes, n_ctx=held + longest).check()


def test_more_sequences_than_there_are(models: Models, made: list[Any]) -> None:
    """Documents take two each, and each branch that several go on from one."""
    nodes = {f"d{i}": PrefillNode([1]) for i in range(128)}
    assert "are more than 256" in str(problems(models["llama"], {**nodes, "b": branch([1], "d0")})[0])
    twins = {"doc": PrefillNode([1]), **{f"b{i}": branch([1], "doc") for i in range(250)}}
    twins |= {f"{name}_{i}": branch([1], name) for name in list(twins)[1:] for i in range(2)}
    assert "are more than 256" in str(problems(models["llama"], twins, n_parallel=5)[0])
    assert made == []
    assert Pipeline(models["llama"], twins).n_seq_max == 256
    few = {"doc": PrefillNode([1]), "p": branch([1], "doc"), "a": branch([1], "p"), "b": branch([1], "p")}
    few |= {"a1": branch([1], "a"), "b1": branch([1], "b"), "a2": branch([1], "a1")}
    assert Pipeline(models["llama"], few).n_seq_max == 2 + 3 + 6  # "p", "a" and "b" hold one; all that run
    run(models["llama"], few, n_parallel=1).check()


# ── files ────────────────────────────────────────────────────────────────────────────────────────────

TOML = """\
max_tokens = 6
seed = 1
temperature = 1.0
chat = false

[documents.doc]
file = "doc.txt"

[documents.other]
text = "another one, which is short"

[agents.one]
depends_on = "doc"
prompt = "what is it?"

[agents.two]
depends_on = ["one", "of_other"]
prompt_file = "two.txt"
max_tokens = 4

[agents.of_other]
depends_on = "other"
prompt = "and?"
required_prefix_tokens = 5
temperature = 0
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "doc.txt").write_text(DOCUMENT)
    (tmp_path / "two.txt").write_text("so: {of_other}")
    (tmp_path / "p.toml").write_text(TOML)
    return tmp_path


def test_a_file(models: Models, folder: Path) -> None:
    pipeline = Pipeline.from_file(folder / "p.toml", models["llama"])
    assert pipeline.strategy == "shared"
    sampler = partial(Sampler, 1.0, seed=1)
    nodes = {
        "doc": PrefillNode(DOCUMENT),
        "other": PrefillNode("another one, which is short"),
        "one": branch("what is it?", "doc", n=6, sampler=sampler()),
        "of_other": branch("and?", "other", 5, n=6),
        "two": branch("so: {of_other}", ["one", "of_other"], n=4, sampler=sampler()),
    }
    for strategy in STRATEGIES:
        options: dict[str, Any] = {"strategy": strategy, "n_parallel": 1, "n_threads": 1}
        given = Pipeline.from_file(folder / "p.toml", models["llama"], **options)
        assert (given.strategy, given.n_threads) == (strategy, 1)
        found = in_time(given.run).check()
        expected = run(models["llama"], nodes, **options).check()
        for name in nodes:
            assert (found[name].value, found[name].tokens) == (expected[name].value, expected[name].tokens), name
    chat = in_time(Pipeline.from_file(folder / "p.toml", models["llama"], chat=True, n_threads=1).run).check()
    assert chat["doc"].value > found["doc"].value


def test_problems_of_a_file_tell_line_and_key(models: Models, folder: Path, made: list[Any]) -> None:
    def located(*replaced: tuple[str, str], **options: Any) -> list[tuple[int | None, str | None, Any]]:
        toml = TOML
        for old, new in replaced:
            assert old in toml
            toml = toml.replace(old, new)
        (folder / "p.toml").write_text(toml)
        found = problems_of_file(**options)
        assert all(p.path == str(folder / "p.toml") for p in found)
        return sorted((p.line, p.key, type(p.__cause__)) for p in found)

    def problems_of_file(**options: Any) -> Any:
        with pytest.raises(PipelineError) as caught:
            Pipeline.from_file(folder / "p.toml", models["llama"], **options)
        return caught.value.problems

    assert located(('depends_on = "doc"', 'depends_on = "two"')) == [(17, "agents.two.depends_on", CycleError)]
    assert located(
        ('depends_on = "doc"', 'depends_on = "dok"'),
        ("required_prefix_tokens = 5", "required_prefix_tokens = 500"),
        ("max_tokens = 4", "max_tokens = 40000"),
    ) == [
        (13, "agents.one.depends_on", UnknownNodeError),
        (19, "agents.two.max_tokens", NodeError),
        (24, "agents.of_other.required_prefix_tokens", NodeError),
    ]
    assert located(('"one", "of_other"', '"of_other", "of_other"')) == [
        (17, "agents.two.depends_on", DuplicateNodeError)
    ]
    assert located(('text = "another', 'text = "' + "x" * 17000 + " another")) == [
        (10, "documents.other.text", NodeError)
    ]
    (folder / "doc.txt").write_text("x" * 17000)
    assert located()[0] == (7, "documents.doc.file", NodeError)
    (folder / "doc.txt").write_text(DOCUMENT)
    assert located(("seed = 1\n", "sead = 1\n")) == [(2, "sead", type(None))]
    assert located(("seed", "seed"), n_ctx=100)[0][1] in ("documents.doc.file", "agents.one.max_tokens")
    assert made == []


def test_a_problem_of_the_whole_is_told_as_it_is(models: Models, folder: Path) -> None:
    (folder / "p.toml").write_text(TOML.replace("another one", DOCUMENT * 3))
    plan = Pipeline.from_file(folder / "p.toml", models["llama"]).plan
    n_ctx = plan.n_cells_held + plan.n_own[0]
    assert Pipeline.from_file(folder / "p.toml", models["llama"], n_ctx=n_ctx).n_ctx == n_ctx
    with pytest.raises(PipelineError, match="documents, branches that others go on from, and the longest") as caught:
        Pipeline.from_file(folder / "p.toml", models["llama"], n_ctx=n_ctx - 1)
    assert not isinstance(caught.value, PipelineFileError)
    assert isinstance(caught.value.problems[0], ContextBudgetError)


# ── results ──────────────────────────────────────────────────────────────────────────────────────────


class Custom:
    def __repr__(self) -> str:
        return "<custom>"

    def __str__(self) -> str:
        return "as text"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_report(models: Models, strategy: Any) -> None:
    nodes = {
        **graph(),
        "custom": FunctionNode(lambda _: Custom(), "whole"),
        "reads": branch("{custom}", ["doc", "custom"]),
        "fails": FunctionNode(lambda _: 1 // 0, "whole"),
        "skipped": branch("{fails}", ["doc", "fails"]),
    }
    result = run(models["llama"], nodes, strategy=strategy)
    Hand(models["llama"], nodes).check(result, exact=strategy == "snapshot", skip=("fails", "skipped", "custom"))
    data = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert (data["model"], data["strategy"]) == ("llama.gguf", strategy)
    by_name = {node["name"]: node for node in data["nodes"]}
    assert list(by_name) == list(result)
    assert (by_name["custom"]["value"], result["custom"].text) == ("<custom>", "as text")
    assert by_name["fails"]["error"].startswith("ZeroDivisionError: ")
    assert [by_name[name]["state"] for name in ("fails", "skipped", "whole")] == ["failed", "skipped", "done"]
    assert result.errors.keys() == {"fails", "skipped"}
    with pytest.raises(ZeroDivisionError):
        result.check()
    assert data["generated_tokens"] == result.n_generated == sum(len(node.tokens) for node in result.values())
    assert data["tokens_per_s"] == pytest.approx(result.n_generated / data["end_to_end_ms"] * 1e3)

    for name, node in result.items():
        if node.state != "done":
            continue
        told = by_name[name]
        assert node.ready_s is not None
        assert node.begun_s is not None
        assert node.ended_s is not None
        assert 0 <= node.ready_s <= node.begun_s <= node.ended_s <= result.end_to_end_ms / 1e3
        assert told["waited_ms"] == pytest.approx(1e3 * (node.begun_s - node.ready_s))
        assert told["time_ms"] == pytest.approx(1e3 * (node.ended_s - node.begun_s))
        assert node.kind == {PrefillNode: "prefill", BranchNode: "branch"}.get(type(nodes[name]), "function")
        if node.kind != "branch":
            assert (node.token_s, told["gaps_ms"], told["tokens_per_s"]) == ([], None, None)
            continue
        assert node.token_s == sorted(node.token_s)
        assert node.begun_s <= node.token_s[0] <= node.token_s[-1] <= node.ended_s
        assert node.first_token_ms == pytest.approx(1e3 * (node.token_s[0] - node.ready_s))
        assert told["first_token_at_ms"] == pytest.approx(1e3 * node.token_s[0])
        gaps = 1e3 * np.diff(node.token_s)
        if not len(gaps):
            assert (told["gaps_ms"], told["tokens_per_s"]) == (None, None)
            continue
        assert node.gaps_ms == pytest.approx(gaps.tolist())
        p50, p95, p99 = np.percentile(gaps, (50, 95, 99))
        expected = {"p50": p50, "p95": p95, "p99": p99, "max": gaps.max(), "jitter": gaps.std()}
        assert told["gaps_ms"] == pytest.approx(expected)
        assert told["tokens_per_s"] == pytest.approx(len(gaps) / (node.token_s[-1] - node.token_s[0]))

    if strategy == "shared":
        shares, batches = result.shares(), result.batches()
        assert sum(shares.values()) == pytest.approx(1)
        assert all(0 < share < 1 for share in shares.values())
        total = sum(step.end - step.begin for step in result.steps)
        engine = sum(step.decode_end - step.decode_begin for step in result.steps)
        assert shares["sample"] == pytest.approx(sum(step.sample_s for step in result.steps) / total)
        assert shares["prefill"] + shares["prompt"] + shares["decode"] == pytest.approx(engine / total)
        assert batches is not None
        fed = sum(node.n_tokens + max(0, len(node.tokens) - 1) for node in result.values())
        assert batches["n"] * batches["mean_tokens"] == pytest.approx(fed)
        assert batches["mean_tokens"] <= batches["max_tokens"] <= N_BATCH
    else:
        assert (result.batches(), data["batches"]) == (None, None)
        assert sum(result.shares().values()) == pytest.approx(1)
        assert set(result.shares()) <= {"prefill", "prompt", "decode", "export", "restore"}
        assert result["whole"].restore_ms >= 0
    check_timeline(result)


def check_timeline(result: PipelineResult) -> None:
    """It can be made, drawn and read, and lies within the run."""
    timeline = result.timeline()
    assert timeline.lanes == tuple(result)
    end = result.end_to_end_ms / 1e3
    for span in (*timeline.spans, *timeline.steps):
        assert 0 <= span.begin <= span.end <= end
    assert all(0 <= mark.at <= end for mark in timeline.marks)
    json.loads(json.dumps(timeline.chrome_trace(), allow_nan=False))
    for name, node in result.items():
        kinds = {span.kind for span in timeline.spans if span.lane == name}
        if node.state == "done":
            wanted = {"prefill": {"prefill"}, "branch": {"prompt"}, "function": {"run"}}[node.kind]
            assert wanted <= kinds, name
            inside = [span for span in timeline.spans if span.lane == name and span.kind != "wait"]
            assert node.begun_s is not None
            assert all(span.begin >= node.begun_s - 1e-9 for span in inside), name
        elif node.ready_s is None:
            assert kinds == set(), name
        if node.error is not None and node.ended_s is not None:
            assert node.state in [mark.text for mark in timeline.marks if mark.lane == name]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_run_that_was_cancelled_can_be_told(models: Models, strategy: Any) -> None:
    pipeline = Pipeline(models["llama"], graph(1500), strategy=strategy, n_threads=1)
    for name in ("whole", "from_1", "c3", "after_sum"):
        started: list[Run] = []

        def on_token(told: str, _: str, name: str = name, started: list[Run] = started) -> None:
            if told == name:
                started[0].cancel()

        begin = threading.Event()
        started.append(
            pipeline.start(on_token=lambda *told, on_token=on_token, begin=begin: begin.wait(LONG) and on_token(*told))
        )  # type: ignore[misc]
        begin.set()
        result = in_time(started[0].result)
        json.dumps(result.to_dict(), allow_nan=False)
        check_timeline(result)
    empty = in_time(lambda: cancelled_at_once(pipeline))
    json.dumps(empty.to_dict(), allow_nan=False)
    check_timeline(empty)
    assert {node.state for node in empty.values()} <= {"cancelled", "skipped", "done"}


def cancelled_at_once(pipeline: Pipeline) -> PipelineResult:
    started = pipeline.start()
    started.cancel()
    return started.result(LONG)


# ── asyncio ──────────────────────────────────────────────────────────────────────────────────────────


async def collect(started: Run) -> list[tuple[str, str]]:
    return [pair async for pair in started]


def joined(pairs: list[tuple[str, str]]) -> dict[str, str]:
    texts: dict[str, str] = {}
    for name, text in pairs:
        texts[name] = texts.get(name, "") + text
    return texts


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_texts_as_they_come(models: Models, strategy: Any) -> None:
    pipeline = Pipeline(models["llama"], graph(), strategy=strategy, n_threads=1)

    async def all_of_it() -> None:
        told: list[tuple[str, str]] = []
        inside = threading.Lock()

        def on_token(name: str, text: str) -> None:
            assert inside.acquire(blocking=False)
            told.append((name, text))
            inside.release()

        started = pipeline.start(on_token=on_token)
        first, second = await asyncio.wait_for(asyncio.gather(collect(started), collect(started)), LONG)
        result = started.result(0)
        expected = {name: node.text for name, node in result.check().items() if node.kind == "branch" and node.text}
        assert expected
        assert joined(first) == expected
        assert first == second == told
        assert await asyncio.wait_for(collect(started), LONG) == first  # from the beginning, though all is over
        assert started._listeners == []

    in_time(lambda: asyncio.run(all_of_it()))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_cancelled_while_it_is_read(models: Models, strategy: Any) -> None:
    nodes = {"doc": PrefillNode(text_tokens(30)), "long": branch("x", "doc", n=10_000), "next": branch("y", "long")}
    pipeline = Pipeline(models["llama"], nodes, strategy=strategy, n_threads=1)

    async def reads() -> None:
        started, n = pipeline.start(), 0
        async for name, _ in started:
            assert name == "long"
            n += 1
            if n == 3:
                started.cancel()
        result = started.result(0)
        assert [result[name].state for name in nodes] == ["done", "cancelled", "cancelled"]
        assert n >= 3
        assert 3 <= len(result["long"].tokens) < 10_000

        with pipeline.start() as other:  # whoever stops to read leaves nothing behind
            async for _ in other:
                break
        assert other.result(0)["long"].state == "cancelled"

    in_time(lambda: asyncio.run(reads()))


def test_a_loop_that_is_closed_meanwhile(models: Models) -> None:
    nodes = {"doc": PrefillNode(text_tokens(30)), "long": branch("x", "doc", n=400)}
    pipeline = Pipeline(models["llama"], nodes, n_threads=1)
    gate = threading.Event()

    async def one(started: Run) -> Any:
        return await anext(started.__aiter__())

    def on_token(*_: str) -> None:
        if len(seen) > 3:
            gate.wait(LONG)
        seen.append(None)

    seen: list[None] = []
    started = pipeline.start(on_token=on_token)
    loop = asyncio.new_event_loop()
    iterator = started.__aiter__()
    in_time(lambda: loop.run_until_complete(asyncio.wait_for(anext(iterator), LONG)))
    assert len(started._listeners) == 1
    loop.close()
    gate.set()
    result = in_time(started.result).check()
    assert len(result["long"].tokens) == 400
    assert joined(in_time(lambda: asyncio.run(collect(started)))) == {"long": result["long"].text}


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Threads of a pipeline end with it."""
    yield
    left = [thread for thread in threading.enumerate() if thread.name.startswith("swarmkv")]
    for thread in left:
        thread.join(LONG)
    assert not [thread.name for thread in left if thread.is_alive()]
