"""An operation and its yardstick in turns: in pytest-benchmark's own rounds, so that noise falls on both alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from swarmkv_ll import Arena, Context, Lease, Snapshot
from swarmkv_ll.measure import Times

COPYTO = "np.copyto"
"""The usual yardstick: a copy of as many bytes, between two places that were written before."""


@dataclass(frozen=True)
class Row:
    """One benchmark's ratio, for the closing table."""

    group: str
    name: str
    step_s: float
    ratio: float
    yardstick: str


def rounds_for(n_bytes: int, *, most: int = 200) -> int:
    """So that 2 GiB are moved, in 3 to `most` rounds."""
    return max(3, min(most, (2 << 30) // n_bytes))


def warmed(step: Callable[[], object]) -> None:
    """Run a step that takes microseconds some times, so that it does not count that a copy has left the caches cold."""
    for _ in range(20):
        step()


def copyto(target: Lease, source: Lease | Snapshot, n_bytes: int | None = None) -> Callable[[], None]:
    """`np.copyto` of the first `n_bytes`, by default of all that `source` holds."""
    n_bytes = n_bytes or source.n_bytes
    return partial(np.copyto, target.array[:n_bytes], source.array[:n_bytes])


def in_turns(
    benchmark: Any,
    step: Callable[..., object],
    yardstick: Callable[[], object],
    *,
    rounds: int,
    warmup: int = 1,
    prepare: Callable[[], object] | None = None,
) -> Times:
    """Time `step` in rounds of pytest-benchmark, and `yardstick` before each.

    Between them `prepare` makes, outside the timing, what `step` is called with. What either gives is released or closed
    outside the timing too. A yardstick that gives a float has timed itself.
    """
    times = Times(yardstick=[], step=[])
    kept: list[object] = []

    def setup() -> tuple[tuple[object, ...], dict[str, object]]:
        let_go(kept)
        begin = perf_counter()
        found = yardstick()
        seconds = perf_counter() - begin
        times["yardstick"].append(found if isinstance(found, float) else seconds)
        if prepare:
            kept.append(prepare())
        return tuple(kept), {}

    def timed(*prepared: object) -> None:
        begin = perf_counter()
        made = step(*prepared)
        times["step"].append(perf_counter() - begin)
        kept.append(made)

    try:
        benchmark.pedantic(timed, setup=setup, rounds=rounds, warmup_rounds=warmup)
    finally:
        let_go(kept)
    return Times({name: seconds[-rounds:] for name, seconds in times.items()})


def let_go(kept: list[object]) -> None:
    """Give back what is left, the last first."""
    while kept:
        thing = kept.pop()
        if isinstance(thing, Snapshot | Lease):
            if not thing.released:
                thing.release()
        elif isinstance(thing, Arena | Context):
            thing.close()


def note(benchmark: Any, times: Times, yardstick: str, **sizes: float) -> Row:
    """Put the ratio into `extra_info`: the yardstick's time ÷ the step's, median and quartiles over the rounds."""
    ratios = [a / b for a, b in zip(times["yardstick"], times["step"], strict=True)]
    row = Row(benchmark.group or "", benchmark.name, times.median("step"), median(ratios), yardstick)
    benchmark.extra_info.update(
        {
            **sizes,
            "yardstick": yardstick,
            "yardstick_s": times.median("yardstick"),
            "step_s": row.step_s,
            "ratio": row.ratio,
            "rounds": len(ratios),
            "ratio_quartiles": [float(q) for q in np.quantile(ratios, [0.25, 0.75])],
        }
    )
    return row


def table(rows: Sequence[Row]) -> list[str]:
    """Lines of the closing table: group by group, in them one operation at all its sizes after the other."""
    lines = []
    for group in dict.fromkeys(row.group for row in rows):
        lines.append(group)
        of_group = [row for row in rows if row.group == group]
        operations = list(dict.fromkeys(_operation(row) for row in of_group))
        for row in sorted(of_group, key=lambda row: operations.index(_operation(row))):
            lines.append(f"  {row.name:<46} {duration(row.step_s):>11} {row.ratio:>10.4g} × {row.yardstick}")
    return lines


def _operation(row: Row) -> str:
    return row.name.partition("[")[0]


def duration(seconds: float) -> str:
    """With the unit that suits it."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:,.2f} {unit}"
    return f"{1e9 * seconds:,.0f} ns"
