"""What a campaign measures: each function measures one case and gives its rows."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np

from ..arena import Arena, lease_size
from ..context import Context
from ..fanout import N_BATCH, FanOut, Strategy, fan_out, prefill
from ..measure import Times, activation, copies
from ..model import Model, Tokens
from ..outputs import Logits
from ..snapshot import Snapshot
from .race import Lap, Side, race
from .records import Case, Row, rows_of
from .warm import warm

Tell = Callable[[int], None]
"""Told the tokens that were computed since it was told last."""


@dataclass(frozen=True)
class Bench:
    """What all cases share.

    Attributes
    ----------
    model : Model
    n_threads : int
    text : array of int32
        What deterministic documents are beginnings of, again and again.
    questions : list of arrays of int32
        All of one length.
    """

    model: Model
    n_threads: int
    text: Tokens
    questions: list[Tokens]

    def document(self, n_tokens: int) -> Tokens:
        """The deterministic document of that many tokens."""
        return np.resize(self.text, n_tokens)

    def question(self, index: int) -> Tokens:
        """A branch's."""
        return self.questions[index % len(self.questions)]

    def context(self, case: Case, n_ctx: int, n_seq_max: int = 1) -> Context:
        """A context with the case's settings."""
        options: dict[str, Any] = {}
        if case.kv_type:
            options = {"type_k": case.kv_type, "type_v": case.kv_type}
        if case.flash_attn:
            options["flash_attn"] = case.flash_attn == "on"
        return self.model.context(n_ctx, n_seq_max, n_batch=N_BATCH, n_threads=self.n_threads, **options)


# ── branches of one document, against re-prefilling it ───────────────────────────────────────────────


@dataclass
class _Answers:
    """First logits of each branch, of each way to them."""

    of: dict[tuple[str, str], list[Logits]] = field(default_factory=dict)

    def add(self, way: tuple[str, str], row: Logits) -> None:
        self.of.setdefault(way, []).append(row.copy())


REPREFILL, SHARED = ("reprefill", "fresh"), ("shared", "")
HOLDING, REUSED, FRESH = (("snapshot", contexts) for contexts in ("holding", "reused", "fresh"))

PARTS = {
    SHARED: ("fork", "branch"),
    HOLDING: ("restore", "branch"),
    REUSED: ("fork", "restore", "branch"),
    FRESH: ("context", "fork", "restore", "branch"),
}
"""What a branch consists of, each way."""


PIECE = 128
"""Tokens of a document that are computed at a time: as fast as more, and the sides change places every second."""


def _pieces(ctx: Context, document: Tokens) -> Iterator[int]:
    """Decode a document piece by piece; gives the tokens of each."""
    edges = [*range(0, len(document), PIECE), len(document)]
    for begin, end in pairwise(edges):
        ctx.decode(document[begin:end], logits="last" if end == len(document) else "none")
        yield end - begin


def _reprefill(bench: Bench, case: Case, n_ctx: int, answers: _Answers) -> Iterator[Lap]:
    """The article's baseline: a context a branch, and each computes everything. The last one's laps are called so."""
    document, n = bench.document(case.n_document or 0), case.n_branches or 0
    for i in range(n):
        last = "last " * (i == n - 1)
        with bench.context(case, n_ctx) as ctx:
            yield f"{last}context", 0
            for n_tokens in _pieces(ctx, document):
                yield f"{last}prefill", n_tokens
            ctx.decode(bench.question(i))
            answers.add(REPREFILL, ctx.logits(0))
            yield f"{last}branch", 0
        yield "close", 0


def _once(
    bench: Bench, case: Case, n_ctx: int, answers: _Answers, after: Callable[[Context, Snapshot], None]
) -> Iterator[Lap]:
    """The document once, its snapshot, and then all branches in each of the ways there are."""
    n, document = case.n_branches or 0, bench.document(case.n_document or 0)
    with ExitStack() as stack:
        ctx = stack.enter_context(bench.context(case, n_ctx + n * len(bench.question(0)), 1 + n))
        yield "context", 0
        for n_tokens in _pieces(ctx, document):
            yield "prefill", n_tokens
        snapshot = stack.enter_context(ctx.snapshot(stack.enter_context(Arena.for_branches(ctx, 0))))
        yield "export", 0
        forks = stack.enter_context(Arena.for_branches(ctx, 0))
        yield "arena", 0
        after(ctx, snapshot)
        yield "besides", 0
        for way in ways(bench.model):
            if way is SHARED:
                yield from _shared(bench, ctx, n, answers)
                continue
            for i in range(n):
                yield from _branch(bench, case, n_ctx, ctx, snapshot, forks, way, bench.question(i), answers)


def ways(model: Model) -> list[tuple[str, str]]:
    """Ways to a branch: a memory that cannot go back to where the document ended cannot hold it for the next one."""
    return [SHARED, *([HOLDING] if model.capabilities.attention_only else []), REUSED, FRESH]


def _shared(bench: Bench, ctx: Context, n: int, answers: _Answers) -> Iterator[Lap]:
    """Sequences over the document's cells, and one batch of all prompts."""
    for seq in range(1, n + 1):
        ctx.copy_sequence(0, seq)
    yield "shared fork", 0
    ctx.decode_batch([(bench.question(i), 1 + i) for i in range(n)])
    yield "shared branch", 0
    for seq in range(1, n + 1):
        answers.add(SHARED, ctx.logits(seq))
        ctx.remove(seq)
    yield "besides", 0


def _branch(
    bench: Bench,
    case: Case,
    n_ctx: int,
    ctx: Context,
    snapshot: Snapshot,
    forks: Arena,
    way: tuple[str, str],
    question: Tokens,
    answers: _Answers,
) -> Iterator[Lap]:
    """One branch from the snapshot, to its first logits."""
    contexts = way[1]
    with ExitStack() as stack:
        if contexts == "fresh":
            ctx = stack.enter_context(bench.context(case, n_ctx))
            yield "fresh context", 0
        if contexts == "holding":
            ctx.remove(0, snapshot.n_tokens)
            yield "holding restore", 0
        else:
            with snapshot.fork(forks) as fork:
                yield f"{contexts} fork", 0
                fork.restore(ctx)
                yield f"{contexts} restore", 0
        ctx.decode(question)
        answers.add(way, ctx.logits(0))
        yield f"{contexts} branch", 0
    yield f"{contexts} close", 0


def fan(bench: Bench, case: Case, tell: Tell, *, rounds: int = 15) -> list[Row]:
    """Branches of one deterministic document in every way there is, against re-prefilling it for each; and the copies.

    The two sides run in turns, piece by piece (`race`). `rounds` are those of copies and activations.
    """
    n, n_document = case.n_branches or 0, case.n_document or 0
    n_ctx = n_document + len(bench.question(0)) + 64
    answers, rows = _Answers(), list[Row]()

    def besides(ctx: Context, snapshot: Snapshot) -> None:
        rows.extend(_moved(case, copies(ctx, snapshot, rounds), snapshot.n_bytes))
        if bench.model.capabilities.attention_only:
            rows.extend(_activated(case, activation(ctx, snapshot, bench.question(1), rounds)))
        snapshot.restore(ctx)

    baseline = Side(_reprefill(bench, case, n_ctx, answers), n * n_document)
    ours = Side(_once(bench, case, n_ctx, answers, besides), n_document)
    race([baseline, ours], tell)

    whole = {f"{name}_s": baseline.seconds(name, f"last {name}") for name in ("context", "prefill", "branch")}
    whole["end_to_end_s"] = sum(whole.values()) + baseline.seconds("close")
    whole["activation_s"] = baseline.seconds("last context", "last prefill", "last branch")
    rows += rows_of(case, whole, *REPREFILL)
    for way in ways(bench.model):
        told = way[1] or "shared"
        once = ("context", "prefill") if way is SHARED else ("context", "prefill", "export")
        values = {f"{name}_s": ours.seconds(name) for name in once}
        for part in PARTS[way]:
            values[f"{part}_s"] = values.get(f"{part}_s", 0.0) + ours.seconds(f"{told} {part}")
        arena = ours.seconds("arena") if way in (REUSED, FRESH) else 0.0  # that forks lie in
        values["end_to_end_s"] = sum(values.values()) + arena + ours.seconds(f"{told} close", "end")
        values["activation_s"] = sum(ours.times(f"{told} {part}")[-1] for part in PARTS[way])
        values |= _compared(answers, way)
        rows += rows_of(case, values, *way)
    return rows


def _compared(answers: _Answers, way: tuple[str, str]) -> dict[str, float]:
    """Whether a way's logits are the baseline's, bit for bit; and how far they are off, and their best tokens."""
    pairs = list(zip(answers.of[way], answers.of[REPREFILL], strict=True))
    return {
        "identical": float(all(a.tobytes() == b.tobytes() for a, b in pairs)),
        "same_token": float(np.mean([a.argmax() == b.argmax() for a, b in pairs])),
        "logits_off": float(max(np.abs(a - b).max() for a, b in pairs)),
    }


def _moved(case: Case, times: Times, n_bytes: int) -> list[Row]:
    """What `measure.copies` found: medians, and shares that were taken round by round."""
    found = {f"{name}_s": times.median(name) for name in times}
    found |= {f"{name}_share": times.ratio("copyto", name) for name in ("fork", "export", "restore")}
    found |= {"first_fork_share": times.ratio("fork", "first_fork"), "state_bytes": float(n_bytes)}
    return rows_of(case, found)


def _activated(case: Case, times: Times) -> list[Row]:
    """What `measure.activation` found."""
    rows = rows_of(case, {"bound_s": times.median("bound")})
    for name, way in (("held", HOLDING), ("forked", REUSED)):
        values = {"activation_median_s": times.median(name), "bound_share": times.ratio("bound", name)}
        rows += rows_of(case, values, *way)
    return rows


# ── more and more branches ───────────────────────────────────────────────────────────────────────────


def scaling(bench: Bench, case: Case, tell: Tell, counts: Sequence[int]) -> list[Row]:
    """End to end for each number of branches: re-prefilled, out of a context that holds the document, and shared.

    Both sides do all branches once, in turns; of re-prefills, n times the mean counts as n.
    """
    most, n_document = max(counts), case.n_document or 0
    n_question = len(bench.question(0))
    n_ctx = n_document + n_question + 64
    answers = _Answers()

    def ours() -> Iterator[Lap]:
        with bench.context(case, n_document + (most + 1) * n_question + 64, 1 + most) as ctx:
            yield "context", 0
            for n in _pieces(ctx, bench.document(n_document)):
                yield "prefill", n
            for n in counts:
                for lap, _ in _shared(bench, ctx, n, answers):
                    yield f"{lap} {n}", 0
            for i in range(most if bench.model.capabilities.attention_only else 0):
                ctx.remove(0, n_document)
                ctx.decode(bench.question(i))
                answers.add(HOLDING, ctx.logits(0))
                yield "branch", 0
                ctx.remove(0, n_document)
                yield "besides", 0
                ctx.decode(bench.question(i))
                yield "bound", 0

    baseline = Side(_reprefill(bench, case, n_ctx, answers), most * n_document)
    once = Side(ours(), n_document)
    race([baseline, once], tell)
    each = baseline.seconds(*(f"{last}{name}" for last in ("", "last ") for name in ("context", "prefill", "branch")))
    each = (each + baseline.seconds("close")) / most
    made = once.seconds("context", "prefill", "end")
    alone = once.times("bound")
    rows = rows_of(case, {"bound_s": median(alone)}) if alone else []
    for n in counts:
        told = replace(case, n_branches=n)
        rows += rows_of(told, {"end_to_end_s": n * each}, *REPREFILL)
        took = made + once.seconds(f"shared fork {n}", f"shared branch {n}")
        rows += rows_of(told, {"end_to_end_s": took, "prefill_s": once.seconds("prefill")}, *SHARED)
        if branches := once.times("branch"):
            rows += rows_of(told, {"end_to_end_s": made + sum(branches[:n]), "branch_s": sum(branches[:n])}, *HOLDING)
    return rows


def generation(bench: Bench, case: Case, tell: Tell) -> list[Row]:
    """Answers of `n_answer` tokens, none ends before: all branches in one batch, against one after another."""
    n, n_answer, n_document = case.n_branches or 0, case.n_answer or 0, case.n_document or 0
    n_ctx = n_document + 1 + n * (n_answer + len(bench.question(0)) + 8) + 64
    questions = [bench.question(i) for i in range(n)]
    with bench.context(case, n_ctx, 2 + n) as ctx:
        answered = warm(ctx, bench.document(n_document), n_answer)
        tell(n_document)
        alone, together = sum(answered([question]).seconds for question in questions), answered(questions)
    return rows_of(case, {"one_at_a_time_s": alone, "together_s": together.seconds, "engine_s": together.engine_s})


# ── memory ───────────────────────────────────────────────────────────────────────────────────────────


def memory(bench: Bench, case: Case, tell: Tell, counts: Sequence[int]) -> list[Row]:
    """What a process holds with n branches ready to go on, each way: resident bytes beyond those before.

    ``reprefill`` holds a context a branch. Their states are restored, not computed, so that scratch memory which only a
    long batch touches is missing: to the baseline's advantage.
    """
    n_document, n_question = case.n_document or 0, len(bench.question(0))
    n_ctx = n_document + n_question + 64
    document, rows = bench.document(n_document), list[Row]()
    with ExitStack() as stack:
        with bench.context(case, n_ctx) as ctx:
            prefill(ctx, document)
            kept = stack.enter_context(Arena.for_branches(ctx, 0))
            snapshot = stack.enter_context(ctx.snapshot(kept))
        tell(n_document)

        def begun(n_seq_max: int, held: ExitStack) -> Context:
            made = held.enter_context(bench.context(case, n_ctx + n_seq_max * n_question, n_seq_max))
            snapshot.restore(made)
            return made

        for n in counts:
            before = _resident()
            with ExitStack() as held:
                for i in range(n):
                    begun(1, held).decode(bench.question(i))
                found = {"reprefill": _resident() - before}
            before = _resident()
            with ExitStack() as held:
                begun(1, held).decode(bench.question(0))
                arena = held.enter_context(Arena(n * lease_size(snapshot.n_bytes)))
                for _ in range(n):
                    held.enter_context(snapshot.fork(arena))
                found["snapshot"] = _resident() - before
            before = _resident()
            with ExitStack() as held:
                ctx = begun(1 + n, held)
                for seq in range(1, n + 1):
                    ctx.copy_sequence(0, seq)
                ctx.decode_batch([(bench.question(i), 1 + i) for i in range(n)])
                found["shared"] = _resident() - before
            for strategy, n_bytes in found.items():
                rows += rows_of(replace(case, n_branches=n), {"memory_bytes": max(0, n_bytes)}, strategy)
    return rows


def _resident() -> int:
    """Bytes of this process that are in memory now, without what malloc keeps for later."""
    gc.collect()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc has it
        trim(0)
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# ── real documents ───────────────────────────────────────────────────────────────────────────────────


def answers_of(bench: Bench, case: Case, tell: Tell, text: str | Tokens, prompts: Sequence[str | Tokens]) -> list[Row]:
    """A real document's answers through `fan_out`: shared, re-prefilled, and shared again."""
    chat = isinstance(text, str) and bench.model.chat_template is not None
    runs: list[FanOut] = []
    turns: tuple[Strategy, ...] = ("shared", "reprefill", "shared")
    for strategy in turns:
        before = [0]

        def on_prefill(done: int, total: int, before: list[int] = before) -> None:
            tell(done - before[0])
            before[0] = 0 if done == total else done

        runs.append(
            fan_out(
                bench.model,
                text,
                prompts,
                max_tokens=case.n_answer or 1,
                strategy=strategy,
                on_prefill=on_prefill,
                chat=chat,
                n_threads=bench.n_threads,
            )
        )
    first, baseline, second = runs
    same = np.mean([a.tokens == b.tokens for a, b in zip(first.branches, baseline.branches, strict=True)])
    values = {
        name: (getattr(first, f"{name}_ms") + getattr(second, f"{name}_ms")) / 2e3 for name in ("end_to_end", "prefill")
    }
    rows = rows_of(
        case,
        {f"{name}_s": value for name, value in values.items()} | {"same_answers": float(same)},
        *SHARED,
    )
    known = {"end_to_end_s": baseline.end_to_end_ms / 1e3, "prefill_s": baseline.prefill_ms / 1e3}
    return rows + rows_of(case, known, *REPREFILL)
