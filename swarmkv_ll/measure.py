"""Timings as ratios, taken side by side in one run: this machine's own copy speed and decode are the yardsticks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter

import numpy as np
import numpy.typing as npt

from .arena import Arena
from .context import Context
from .model import Tokens
from .sampling import Sampler
from .snapshot import Snapshot


def interleaved(rounds: int, **steps: Callable[[], object]) -> dict[str, float]:
    """Median seconds of each step, taken in turns (A B C A B C …) so that noise falls on all alike.

    What a step returns is closed or released outside the timing if it has a `release`.
    """
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            begin = perf_counter()
            result = step()
            seconds[name].append(perf_counter() - begin)
            if isinstance(result, Snapshot):
                result.release()
    return {name: median(values) for name, values in seconds.items()}


@dataclass(frozen=True)
class Copies:
    """Seconds for moving one sequence's state, beside `np.copyto` of as many bytes."""

    n_bytes: int
    copyto: float
    fork: float
    export: float
    restore: float
    share: float
    first_fork: float


def copies(ctx: Context, snapshot: Snapshot, rounds: int = 15) -> Copies:
    """Time fork, export, restore and share of `snapshot`, which `ctx` can take and holds in sequence 0."""
    n_bytes = snapshot.n_bytes

    def first_fork() -> float:
        with Arena(n_bytes) as arena:
            begin = perf_counter()
            fork = snapshot.fork(arena)
            seconds = perf_counter() - begin
            fork.release()
        return seconds

    cold = [first_fork() for _ in range(5)]
    with Arena(3 * (n_bytes + 4096)) as arena, arena.lease(n_bytes) as source, arena.lease(n_bytes) as target:
        source.array[:] = snapshot.array
        steps = interleaved(
            rounds,
            copyto=partial(np.copyto, target.array, source.array),
            fork=lambda: snapshot.fork(arena),
            export=lambda: ctx.snapshot(arena),
            restore=lambda: snapshot.restore(ctx),
            share=snapshot.share,
        )
    return Copies(n_bytes, **steps, first_fork=median(cold))


@dataclass(frozen=True)
class Activation:
    """Seconds until a branch has its first logits.

    `forked` by fork, restore and prompt in a reused context; `held` by dropping the last branch's suffix from a
    context that still holds the document; `bound` for the prompt's decode alone.
    """

    bound: float
    forked: float
    held: float


def activation(ctx: Context, snapshot: Snapshot, question: Tokens, rounds: int = 9) -> Activation:
    """Time the ways to a branch's first logits in sequence 0 of `ctx`."""

    def rewind() -> None:
        ctx.remove(0, snapshot.n_tokens)

    def forked() -> None:
        with snapshot.fork() as fork:
            fork.restore(ctx)
            ctx.decode(question)

    def held() -> None:
        rewind()
        ctx.decode(question)

    def bound() -> float:
        rewind()
        begin = perf_counter()
        ctx.decode(question)
        return perf_counter() - begin

    snapshot.restore(ctx)
    ctx.decode(question)
    alone: list[float] = []
    times = interleaved(rounds, bound=lambda: alone.append(bound()), forked=forked, held=held)
    return Activation(median(alone), times["forked"], times["held"])


def batched_generation(
    ctx: Context, question: Tokens, n_branches: int = 8, n_tokens: int = 32, rounds: int = 1
) -> tuple[float, float]:
    """Seconds to generate for `n_branches`, one after another and all in one batch.

    `ctx` holds the document in sequence 0 and has at least 1 + n_branches sequences.
    """

    def generate(seqs: range) -> None:
        for seq in seqs:
            ctx.copy_sequence(0, seq)
        batch: list[tuple[npt.ArrayLike, int]] = [(question, seq) for seq in seqs]
        for _ in range(n_tokens):
            ctx.decode_batch(batch)
            batch = [([greedy.sample(ctx.logits(seq))], seq) for seq in seqs]
        for seq in seqs:
            ctx.remove(seq)

    def one_at_a_time() -> None:
        for _ in range(n_branches):
            generate(range(1, 2))

    with Sampler() as greedy:
        times = interleaved(rounds, one_at_a_time=one_at_a_time, together=lambda: generate(range(1, 1 + n_branches)))
    return times["one_at_a_time"], times["together"]
