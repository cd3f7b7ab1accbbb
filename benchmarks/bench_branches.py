"""From a document to answers: prefill, one branch's first logits, several branches end to end, batched generation."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import mean, median
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from sizes import N_DOCUMENT, TOKENS, Place, Prefill, by_tokens, real
from turns import copyto, rounds_for

from swarmkv_ll import Context, FanOut, Lease, Model, Snapshot, fan_out
from swarmkv_ll.fanout import Strategy, prefill
from swarmkv_ll.measure import Times, activation, batched_generation

InTurns = Callable[..., Times]
Tokens = npt.NDArray[np.int32]

# ── the document ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.benchmark(group="reprefill")
@by_tokens
def bench_reprefill(
    request: pytest.FixtureRequest,
    benchmark: Any,
    in_turns: InTurns,
    note: Any,
    ratio: Any,
    ctx: Context,
    prefilled: Prefill,
    document: Tokens,
    question: Tokens,
    n_tokens: int,
) -> None:
    """The baseline: the document from the beginning, beside a restore of its state.

    The longest is the session's only prefill of that length, and its restores come after it.
    """
    beside = "restore of as many tokens"
    if n_tokens == max(TOKENS):
        benchmark.pedantic(prefilled.run)
        state = request.getfixturevalue("states")[n_tokens]
        restores = [timed(partial(state.restore, ctx)) for _ in range(10)]
        times = Times(yardstick=[median(restores)], step=[prefilled.seconds])
        note(times, beside, n_tokens=n_tokens, n_bytes=state.n_bytes)
        return
    state = request.getfixturevalue("states")[n_tokens]

    def reprefill() -> None:
        ctx.clear()
        prefill(ctx, document[:n_tokens])

    times = in_turns(
        reprefill,
        lambda: state.restore(ctx),
        beside=beside,
        rounds=10 if n_tokens < 100 else 3 if n_tokens < 1000 else 2,
        warmup=0,
        n_tokens=n_tokens,
        n_bytes=state.n_bytes,
    )
    if n_tokens == N_DOCUMENT:
        state.restore(ctx)
        active = activation(ctx, state, question, rounds=15)
        whole = times.median("step") + active.median("bound")
        ratio("re-prefill ÷ (fork + restore + branch)", whole / active.median("forked"), 100)
        ratio("re-prefill ÷ branch, where the context holds the document", whole / active.median("held"), 120)


def timed(step: Callable[[], object]) -> float:
    """Seconds that a step takes."""
    begin = perf_counter()
    step()
    return perf_counter() - begin


# ── a branch's first logits ──────────────────────────────────────────────────────────────────────────

ALONE = "the branch's decode alone"


def activated(
    in_turns: InTurns, ctx: Context, state: Snapshot, question: Tokens, branch: Callable[[], object], rounds: int = 0
) -> Times:
    """Measure a way to a branch's first logits, beside the decode of its prompt where the document is there already."""

    def alone() -> float:
        ctx.remove(0, state.n_tokens)
        return timed(lambda: ctx.decode(question))

    ctx.clear()
    state.restore(ctx)
    rounds = rounds or (25 if state.n_tokens == N_DOCUMENT else 15 if state.n_tokens < N_DOCUMENT else 7)
    return in_turns(branch, alone, beside=ALONE, rounds=rounds, n_tokens=state.n_tokens, n_bytes=state.n_bytes)


@pytest.mark.benchmark(group="activation")
@by_tokens
def bench_fork_restore_branch(
    in_turns: InTurns, ratio: Any, ctx: Context, states: dict[int, Snapshot], question: Tokens, n_tokens: int
) -> None:
    state = states[n_tokens]

    def branch() -> None:
        with state.fork() as fork:
            fork.restore(ctx)
            ctx.decode(question)

    times = activated(in_turns, ctx, state, question, branch)
    if n_tokens == N_DOCUMENT:
        ratio("fork + restore + branch, as a share of the branch alone", times.ratio("yardstick", "step"), 0.85)


@pytest.mark.benchmark(group="activation")
@by_tokens
def bench_restore_branch(
    in_turns: InTurns, ctx: Context, states: dict[int, Snapshot], question: Tokens, n_tokens: int
) -> None:
    """From shared bytes: no fork."""
    state = states[n_tokens]

    def branch() -> None:
        with state.share() as shared:
            shared.restore(ctx)
            ctx.decode(question)

    activated(in_turns, ctx, state, question, branch)


@pytest.mark.benchmark(group="activation")
@by_tokens
def bench_held_branch(
    in_turns: InTurns, ratio: Any, ctx: Context, states: dict[int, Snapshot], question: Tokens, n_tokens: int
) -> None:
    """The context still holds the document: only the last branch's suffix is dropped."""

    def branch() -> None:
        ctx.remove(0, n_tokens)
        ctx.decode(question)

    times = activated(in_turns, ctx, states[n_tokens], question, branch)
    if n_tokens == N_DOCUMENT:
        ratio("… where the context still holds the document", times.ratio("yardstick", "step"), 0.98)


@pytest.mark.benchmark(group="activation")
@by_tokens
def bench_sequence_branch(
    in_turns: InTurns, ctx: Context, states: dict[int, Snapshot], question: Tokens, n_tokens: int
) -> None:
    """In a sequence of its own over the document's cells, as strategy "shared" does."""

    def branch() -> None:
        ctx.copy_sequence(0, 1, n_tokens)
        ctx.decode(question, seq=1)
        ctx.remove(1)

    activated(in_turns, ctx, states[n_tokens], question, branch)


@pytest.mark.benchmark(group="activation")
@by_tokens
def bench_new_context_branch(
    in_turns: InTurns, model: Model, ctx: Context, states: dict[int, Snapshot], question: Tokens, n_tokens: int
) -> None:
    """In a context that is made for it."""
    state = states[n_tokens]

    def branch() -> Context:
        made = model.context(n_tokens + 64)
        state.restore(made)
        made.decode(question)
        return made

    activated(in_turns, ctx, state, question, branch, rounds=7)


@pytest.mark.benchmark(group="activation")
def bench_busy_neighbour(in_turns: InTurns, ratio: Any, ctx: Context, snapshot: Snapshot, question: Tokens) -> None:
    """A branch's decode while another process keeps one core busy, beside the same decode while that one is stopped."""
    core = min(os.sched_getaffinity(0))
    spin = f"import os; os.sched_setaffinity(0, [{core}])\nwhile True: pass"

    def branch() -> None:
        ctx.remove(0, snapshot.n_tokens)
        ctx.decode(question)

    ctx.clear()
    snapshot.restore(ctx)
    with subprocess.Popen([sys.executable, "-c", spin]) as neighbour:
        try:
            time.sleep(0.5)

            def idle() -> float:
                neighbour.send_signal(signal.SIGSTOP)
                try:
                    return timed(branch)
                finally:
                    neighbour.send_signal(signal.SIGCONT)

            times = in_turns(
                branch,
                idle,
                beside="the same decode while the other process is stopped",
                rounds=15,
                n_tokens=N_DOCUMENT,
            )
        finally:
            neighbour.kill()
    ratio("branch beside a busy core, times as long as idle", times.ratio("step", "yardstick"), 3, at_most=True)


# ── several branches ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.benchmark(group="fanout")
@real
def bench_copy_sequence(in_turns: InTurns, ctx: Context, place: Place, target: Lease) -> None:
    """The document's cells given to one more sequence of a unified cache: bookkeeping only."""
    state = place.snapshot
    ctx.clear()
    state.restore(ctx)
    in_turns(
        lambda _: ctx.copy_sequence(0, 1),
        copyto(target, state),
        rounds=rounds_for(state.n_bytes),
        prepare=lambda: ctx.remove(1),
        **place.sizes,
    )
    ctx.clear()


@pytest.mark.benchmark(group="fanout")
@pytest.mark.parametrize("strategy", ["shared", "snapshot"])
@pytest.mark.parametrize(
    ("n_document", "n_branches"),
    [pytest.param(*sizes, id="{}-tokens-{}-branches".format(*sizes)) for sizes in ((64, 2), (64, 8), (512, 8))],
)
def bench_fan_out(
    in_turns: InTurns,
    model: Model,
    ctx: Context,
    document: Tokens,
    question: Tokens,
    n_document: int,
    n_branches: int,
    strategy: Strategy,
) -> None:
    """Branches of one answer token, beside what cannot be left out: the document's prefill and each branch's decode."""
    text, prompts = document[:n_document], [question] * n_branches

    def bound() -> float:
        ctx.clear()
        seconds = timed(lambda: prefill(ctx, text))
        for _ in prompts:
            ctx.remove(0, n_document)
            seconds += timed(lambda: ctx.decode(question))
        return seconds

    in_turns(
        lambda: fan_out(model, text, prompts, max_tokens=1, strategy=strategy),
        bound,
        beside="prefill + branches, one after another, nothing else",
        rounds=5 if n_document < 100 else 2,
        warmup=0,
        n_tokens=n_document,
        n_branches=n_branches,
    )


@pytest.mark.benchmark(group="fanout")
@pytest.mark.parametrize(("n_branches", "target"), [(2, 1.95), (8, 7.5)], ids=["2-branches", "8-branches"])
def bench_end_to_end(
    benchmark: Any,
    note: Any,
    ratio: Any,
    model: Model,
    document: Tokens,
    question: Tokens,
    n_branches: int,
    target: float,
) -> None:
    """Branches of one answer token at 3,501 shared tokens: document computed once, against once a branch.

    Both sides are nearly all prefill, whose speed drifts by a tenth on a shared machine. So there are two figures: the
    times as they came, and with this run's median prefill in the place of each.
    """
    text, prompts = document[:N_DOCUMENT], [question] * n_branches

    def once() -> FanOut:
        return fan_out(model, text, prompts, max_tokens=1, strategy="snapshot")

    shared = [once()]
    baseline = fan_out(model, text, prompts, max_tokens=1, strategy="reprefill")
    shared.append(benchmark.pedantic(once, rounds=1))
    times = Times(yardstick=[baseline.end_to_end_ms / 1e3], step=[mean(run.end_to_end_ms for run in shared) / 1e3])
    note(times, f"{n_branches} re-prefills", n_tokens=N_DOCUMENT, n_branches=n_branches)
    came = times.ratio("yardstick", "step")
    prefill_ms = median([*(run.prefill_ms for run in shared), *[baseline.prefill_ms / n_branches] * n_branches])
    rest_ms = mean(run.end_to_end_ms - run.prefill_ms for run in shared)
    evened = (n_branches * prefill_ms + baseline.end_to_end_ms - baseline.prefill_ms) / (prefill_ms + rest_ms)
    ratio(f"{n_branches} branches end to end, against {n_branches} re-prefills, as it came", came, target)
    ratio(f"{n_branches} branches end to end, prefills taken as equally fast", evened, target)


@pytest.mark.benchmark(group="fanout")
def bench_batched_generation(
    benchmark: Any, note: Any, ratio: Any, ctx: Context, snapshot: Snapshot, question: Tokens
) -> None:
    """8 branches of 32 tokens: in one batch, against one after another."""
    ctx.clear()
    snapshot.restore(ctx)
    found = benchmark.pedantic(lambda: batched_generation(ctx, question, rounds=3), rounds=1)
    times = Times(yardstick=found["one_at_a_time"], step=found["together"])
    note(times, "one branch at a time", n_tokens=N_DOCUMENT, n_branches=8)
    ratio("8 × 32 tokens in one batch, against one at a time", times.ratio("yardstick", "step"), 1.3)
