"""Timings as ratios, taken side by side in one run: this machine's own copy speed and decode are the yardsticks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from .arena import Arena, lease_size
from .context import Context
from .model import Tokens
from .sampling import Sampler
from .snapshot import Snapshot


@dataclass(frozen=True)
class Ratio:
    """A measured ratio beside what it should reach; `target` is None where there is none.

    `details` are what it was made of: seconds, bytes, other ways to take it.
    """

    name: str
    value: float
    target: float | None
    unit: str = ""
    at_most: bool = False
    details: Mapping[str, float] = field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        """Whether it reaches its target."""
        if self.target is None:
            return None
        return self.value <= self.target if self.at_most else self.value >= self.target

    def to_dict(self) -> dict[str, Any]:
        """As plain data for JSON."""
        return {**asdict(self), "met": self.met}


class Times(dict[str, list[float]]):
    """Seconds of each step, round by round."""

    def median(self, name: str) -> float:
        """A step's median, in seconds."""
        return median(self[name])

    def ratio(self, a: str, b: str) -> float:
        """How many times as long as `b` step `a` takes: the median over rounds, so that drift falls on both alike."""
        return median(x / y for x, y in zip(self[a], self[b], strict=True))


def interleaved(rounds: int, **steps: Callable[[], object]) -> Times:
    """Time steps in turns (A B C A B C …), so that noise falls on all alike.

    A step that gives a snapshot has it released outside the timing; one that gives a float has timed itself.
    """
    times = Times({name: [] for name in steps})
    for _ in range(rounds):
        for name, step in steps.items():
            begin = perf_counter()
            result = step()
            seconds = perf_counter() - begin
            times[name].append(result if isinstance(result, float) else seconds)
            if isinstance(result, Snapshot):
                result.release()
    return times


def copies(ctx: Context, snapshot: Snapshot, rounds: int = 15) -> Times:
    """Time what moves a state: `fork`, `export`, `restore`, `share`, beside `copyto`, np.copyto of as many bytes.

    `first_fork` is the first one in an arena just made. `ctx` can take `snapshot` and holds it in sequence 0.
    """
    n_bytes = snapshot.n_bytes

    def first_fork() -> float:
        with Arena(n_bytes) as fresh:
            begin = perf_counter()
            fork = snapshot.fork(fresh)
            seconds = perf_counter() - begin
            fork.release()
        return seconds

    with Arena(3 * (n_bytes + 4096)) as arena, arena.lease(n_bytes) as source, arena.lease(n_bytes) as target:
        source.array[:] = snapshot.array
        return interleaved(
            rounds,
            copyto=partial(np.copyto, target.array, source.array),
            fork=lambda: snapshot.fork(arena),
            export=lambda: ctx.snapshot(arena),
            restore=lambda: snapshot.restore(ctx),
            share=snapshot.share,
            first_fork=first_fork,
        )


def activation(ctx: Context, snapshot: Snapshot, question: Tokens, rounds: int = 9) -> Times:
    """Time the ways to a branch's first logits in sequence 0 of `ctx`.

    ``forked`` by fork, restore and prompt in a reused context; ``held`` by dropping the last branch's suffix from a
    context that still holds the document; ``bound`` for the prompt's decode alone.
    """

    def forked() -> None:
        with snapshot.fork(arena) as fork:
            fork.restore(ctx)
            ctx.decode(question)

    def held() -> None:
        ctx.remove(0, snapshot.n_tokens)
        ctx.decode(question)

    def bound() -> float:
        ctx.remove(0, snapshot.n_tokens)
        begin = perf_counter()
        ctx.decode(question)
        return perf_counter() - begin

    with Arena(lease_size(snapshot.n_bytes)) as arena:
        forked()
        return interleaved(rounds, bound=bound, forked=forked, held=held)


def batched_generation(
    ctx: Context, question: Tokens, n_branches: int = 8, n_tokens: int = 32, rounds: int = 1
) -> Times:
    """Time generating for `n_branches`, `one_at_a_time` and `together` in one batch.

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
        return interleaved(rounds, one_at_a_time=one_at_a_time, together=lambda: generate(range(1, 1 + n_branches)))


def copy_ratios(copies: Times) -> list[Ratio]:
    """What `copies` took, against its bound, `np.copyto`."""
    return [
        Ratio("fork ÷ np.copyto of as many bytes", copies.ratio("copyto", "fork"), 0.95),
        Ratio("first fork in a new arena ÷ a warm one", copies.ratio("fork", "first_fork"), 0.75),
        Ratio("export ÷ np.copyto", copies.ratio("copyto", "export"), 0.85),
        Ratio("restore ÷ np.copyto", copies.ratio("copyto", "restore"), 0.85),
        Ratio("share()", 1e6 * copies.median("share"), 20, "µs", at_most=True),
    ]


def branch_ratios(prefill_s: float, copies: Times, active: Times) -> list[Ratio]:
    """What `activation` took, against a prefill of `prefill_s` seconds and against its bound."""
    bound, forked, held = (active.median(name) for name in ("bound", "forked", "held"))

    def end_to_end(n: int) -> float:
        return n * (prefill_s + bound) / (prefill_s + copies.median("export") + n * forked)

    return [
        Ratio("re-prefill ÷ (fork + restore + branch)", (prefill_s + bound) / forked, 100, "×"),
        Ratio("… as a share of its bound, branch alone", active.ratio("bound", "forked"), 0.85),
        Ratio("re-prefill ÷ branch, context holds document", (prefill_s + bound) / held, 100, "×"),
        Ratio("… as a share of its bound, branch alone", active.ratio("bound", "held"), 0.98),
        Ratio("2 branches, one token each, end to end (computed)", end_to_end(2), 1.95, "×"),
        Ratio("8 branches, one token each, end to end (computed)", end_to_end(8), 7.5, "×"),
    ]
