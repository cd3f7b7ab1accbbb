"""From a document to answers: one branch's first logits, several branches end to end, batched generation."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from statistics import mean, median
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from swarmkv_ll import Context, FanOut, Model, Snapshot, fan_out
from swarmkv_ll.fanout import prefill
from swarmkv_ll.measure import Times, batched_generation, interleaved

Tokens = npt.NDArray[np.int32]


@pytest.mark.benchmark(group="activation")
def bench_reprefill(
    benchmark: Any, ratio: Any, ctx: Context, snapshot: Snapshot, document: Tokens, question: Tokens, active: Times
) -> None:
    """The baseline: the document and the prompt, from the beginning."""

    def reprefill() -> None:
        ctx.clear()
        prefill(ctx, document)
        ctx.decode(question)

    benchmark.pedantic(reprefill, rounds=2)
    snapshot.restore(ctx)
    seconds = benchmark.stats.stats.median
    ratio("re-prefill ÷ (fork + restore + branch)", seconds / active.median("forked"), 100)
    benchmark.extra_info["bound"] = seconds / active.median("bound")


@pytest.mark.benchmark(group="activation")
def bench_fork_restore_branch(
    benchmark: Any, ratio: Any, ctx: Context, snapshot: Snapshot, question: Tokens, active: Times
) -> None:
    def branch() -> None:
        with snapshot.fork() as fork:
            fork.restore(ctx)
            ctx.decode(question)

    benchmark.pedantic(branch, rounds=15)
    ratio("… as a share of its bound, the branch's decode alone", active.ratio("bound", "forked"), 0.85)


@pytest.mark.benchmark(group="activation")
def bench_held_branch(
    benchmark: Any, ratio: Any, ctx: Context, snapshot: Snapshot, question: Tokens, active: Times
) -> None:
    """The context still holds the document: only the last branch's suffix is dropped."""

    def branch() -> None:
        ctx.remove(0, snapshot.n_tokens)
        ctx.decode(question)

    snapshot.restore(ctx)
    benchmark.pedantic(branch, rounds=15)
    ratio("… where the context still holds the document", active.ratio("bound", "held"), 0.98)


@pytest.mark.benchmark(group="activation")
def bench_busy_neighbour(benchmark: Any, ratio: Any, ctx: Context, snapshot: Snapshot, question: Tokens) -> None:
    """A branch's decode while another process keeps one core busy, against the same decode before and after."""

    def branch() -> None:
        ctx.remove(0, snapshot.n_tokens)
        ctx.decode(question)

    snapshot.restore(ctx)
    core = min(os.sched_getaffinity(0))
    spin = f"import os; os.sched_setaffinity(0, [{core}])\nwhile True: pass"
    idle = [interleaved(9, branch=branch).median("branch")]
    with subprocess.Popen([sys.executable, "-c", spin]) as neighbour:
        time.sleep(0.5)
        benchmark.pedantic(branch, rounds=15)
        neighbour.kill()
    idle.append(interleaved(9, branch=branch).median("branch"))
    ratio("branch beside a busy core, times as long as idle", benchmark.stats.stats.median / min(idle), 3, at_most=True)


@pytest.mark.benchmark(group="fanout")
@pytest.mark.parametrize(("n_branches", "target"), [(2, 1.95), (8, 7.5)])
def bench_end_to_end(
    benchmark: Any, ratio: Any, model: Model, document: Tokens, question: Tokens, n_branches: int, target: float
) -> None:
    """Branches of one answer token: document computed once, against once a branch.

    Both sides are nearly all prefill, whose speed drifts by a tenth on a shared machine. So there are two figures: the
    times as they came, and with this run's median prefill in the place of each.
    """
    prompts = [question] * n_branches

    def once() -> FanOut:
        return fan_out(model, document, prompts, max_tokens=1, strategy="snapshot")

    shared = [once()]
    baseline = fan_out(model, document, prompts, max_tokens=1, strategy="reprefill")
    shared.append(benchmark.pedantic(once, rounds=1))
    came = baseline.end_to_end_ms / mean(run.end_to_end_ms for run in shared)
    prefill_ms = median([*(run.prefill_ms for run in shared), *[baseline.prefill_ms / n_branches] * n_branches])
    rest_ms = mean(run.end_to_end_ms - run.prefill_ms for run in shared)
    evened = (n_branches * prefill_ms + baseline.end_to_end_ms - baseline.prefill_ms) / (prefill_ms + rest_ms)
    ratio(f"{n_branches} branches end to end, against {n_branches} re-prefills, as it came", came, target)
    ratio(f"{n_branches} branches end to end, prefills taken as equally fast", evened, target, as_it_came=came)


@pytest.mark.benchmark(group="fanout")
def bench_batched_generation(benchmark: Any, ratio: Any, ctx: Context, snapshot: Snapshot, question: Tokens) -> None:
    """8 branches of 32 tokens: in one batch, against one after another."""
    snapshot.restore(ctx)
    times = benchmark.pedantic(lambda: batched_generation(ctx, question, rounds=3), rounds=1)
    ratio("8 × 32 tokens in one batch, against one at a time", times.ratio("one_at_a_time", "together"), 1.3)
