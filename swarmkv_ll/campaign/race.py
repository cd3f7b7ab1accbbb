"""Sides that run in turns, step by step, so that the machine's changes of mind fall on all of them alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from time import perf_counter

Lap = tuple[str, int]
"""What a step's time counts as, and the tokens it computed (for the order of turns, and for progress)."""


class Side:
    """Work done in steps: a generator that yields, after each, what its time counts as.

    Parameters
    ----------
    steps : iterator of (str, int)
        The name of the time since the last yield, and tokens computed in it. What comes after the last one counts as
        "end".
    n_tokens : int
        Tokens it will compute in all.
    """

    def __init__(self, steps: Iterator[Lap], n_tokens: int) -> None:
        self.steps, self.n_tokens, self.n_done = steps, n_tokens, 0
        self.ended = False
        self.laps: list[tuple[str, float]] = []

    def advance(self) -> int:
        """Take a step. Returns the tokens computed."""
        begin = perf_counter()
        lap = next(self.steps, None)
        self.ended = lap is None
        name, n_tokens = lap or ("end", 0)
        self.laps.append((name, perf_counter() - begin))
        self.n_done += n_tokens
        return n_tokens

    def seconds(self, *names: str) -> float:
        """Time of all steps that count as one of `names`."""
        return sum(seconds for name, seconds in self.laps if name in names)

    def times(self, name: str) -> list[float]:
        """Of each step that counts as `name`."""
        return [seconds for lap, seconds in self.laps if lap == name]


def race(sides: Sequence[Side], tell: Callable[[int], None]) -> None:
    """Run all sides to their ends: always the one that has done the smallest share of its work goes on.

    So a side with one prefill is spread over the whole time in which another makes eight, and a slow minute is no side's
    bad luck. `tell` is told the tokens computed by each step.
    """
    try:
        while running := [side for side in sides if not side.ended]:
            tell(min(running, key=lambda side: side.n_done / side.n_tokens).advance())
    finally:
        for side in sides:
            close = getattr(side.steps, "close", None)  # a generator frees its contexts
            if close:
                close()
