"""Values picked out of rows, and put for people: the same names, units and digits in pictures and report. No engine."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from ..printable import one_line
from .records import Row
from .summary import summarise

NONE = "–"
"""For a value that is not there."""


# ── who was measured ─────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Side:
    """A way to come to branches: its strategy and contexts as in the rows, its name, its colour in every picture."""

    strategy: str
    contexts: str
    name: str
    colour: str


SIDES = (
    Side("reprefill", "", "re-prefill", "#7a828c"),
    Side("snapshot", "fresh", "snapshot, fresh context", "#cc79a7"),
    Side("snapshot", "reused", "snapshot, fork + restore", "#e69f00"),
    Side("snapshot", "holding", "snapshot, still held", "#009e73"),
    Side("snapshot", "", "snapshot", "#e69f00"),
    Side("shared", "", "shared cells", "#0072b2"),
)
"""From the baseline to the fastest. The colours are told apart by the colour-blind (those of Okabe and Ito)."""


def side_of(row: Row) -> Side | None:
    """The side that a row belongs to; None if it is of a peer, or of none."""
    for side in SIDES:
        if row.strategy == side.strategy and (row.strategy != "snapshot" or row.contexts == side.contexts):
            return side
    return None


def sides_of(rows: Iterable[Row]) -> list[Side]:
    """The sides that rows are of, in the order of `SIDES`."""
    found = {side_of(row) for row in rows}
    return [side for side in SIDES if side in found]


NAMES = {
    "activation_ratio": "Activation, document still held",
    "activation_ratio_reused": "Activation, fork + restore",
    "activation_ratio_fresh": "Activation, fresh context",
    "activation_ratio_shared": "Activation, shared cells",
    "end_to_end_ratio_2": "2 branches, end to end",
    "end_to_end_ratio_2_shared": "2 branches, shared cells",
    "end_to_end_ratio_8": "8 branches, end to end",
    "end_to_end_ratio_8_shared": "8 branches, shared cells",
    "fork_share_of_memcpy": "Fork",
    "export_share_of_memcpy": "Export",
    "restore_share_of_memcpy": "Restore",
    "first_fork_share_of_warm": "First fork in a new arena",
    "bit_identical": "Bit-identical to re-prefilling",
    "save_load_vs_llama_cpp_python": "Save + load, against llama-cpp-python",
    "save_load_vs_llama_cpp_python_n_batch_2048": "Save + load, against llama-cpp-python with n_batch 2048",
    "ram_cache_vs_llama_cpp_python": "Against llama-cpp-python's RAM cache",
    "fan_out_vs_llama_batched_bench": "Fan-out, against llama-batched-bench",
    "fan_out_vs_llama_server": "Fan-out, against llama-server",
    "fan_out_vs_llama_server_one_slot": "Fan-out, against llama-server's one warm slot",
    "fan_out_vs_llama_server_kept": "Fan-out, against llama-server with the document in every slot",
    "fan_out_vs_llama_server_slots": "Fan-out, against llama-server with slots restored from a file",
}
"""Metrics, in the order in which they are told."""


def metric_order(name: str) -> tuple[float, str]:
    """Where a metric stands among others, to sort by."""
    known = [*NAMES]
    if name in NAMES:
        return known.index(name), name
    return (known.index("bit_identical") - 0.5 if name.startswith("batched_generation") else len(known)), name


def metric_name(name: str) -> str:
    """A metric's name for people."""
    if found := re.fullmatch(r"batched_generation_ratio_(\d+)x(\d+)", name):
        return f"{found[1]} answers of {found[2]} tokens, in one batch"
    return NAMES.get(name) or one_line(name.replace("_", " "), 60)


# ── picking ──────────────────────────────────────────────────────────────────────────────────────────


def pick(rows: Iterable[Row], side: Side | None = None, **columns: Any) -> list[Row]:
    """The rows whose `columns` have these values (a tuple: one of them), of `side` if one is given. Finite ones only."""
    wanted = {key: value if isinstance(value, tuple) else (value,) for key, value in columns.items()}
    return [
        row
        for row in rows
        if all(getattr(row, key) in values for key, values in wanted.items())
        and (side is None or side_of(row) == side)
        and math.isfinite(row.value)
    ]


def by_trial(rows: Iterable[Row], side: Side | None = None, **columns: Any) -> dict[int, float]:
    """The value of each trial, in order; the median where a trial has several."""
    found: dict[int, list[float]] = {}
    for row in pick(rows, side, **columns):
        found.setdefault(row.trial, []).append(row.value)
    return {trial: median(found[trial]) for trial in sorted(found)}


def activations(rows: Sequence[Row], side: Side) -> dict[int, float]:
    """Seconds that the second branch's activation took, by trial: the median of rounds where there were several."""
    known = [row for row in pick(rows, side, name=("activation_s", "activation_median_s")) if row.value > 0]
    return by_trial(known, name="activation_s") | by_trial(known, name="activation_median_s")


def middle(values: Iterable[float]) -> float | None:
    """Their median, if there are any."""
    known = list(values)
    return median(known) if known else None


def ratios(whole: Mapping[int, float], parts: Mapping[int, float]) -> dict[int, float]:
    """How many times as long as its part a whole took, in each trial that has both."""
    return {trial: whole[trial] / part for trial, part in parts.items() if trial in whole and part > 0}


def one_prefill(rows: Iterable[Row]) -> float | None:
    """Seconds that a prefill of the document took: the mean of a trial's re-prefills, where there are some."""
    known = [row for row in pick(rows, name="prefill_s") if side_of(row)]
    again = [row.value / row.n_branches for row in known if row.strategy == "reprefill" and row.n_branches]
    return middle(again or [row.value for row in known])


def branch_alone(rows: Iterable[Row]) -> float | None:
    """Seconds that the decode of a branch's prompt takes by itself; where that was not measured, in its context."""
    known = list(rows)
    alone = [row.value for row in pick(known, name="bound_s")]
    for strategy in ("reprefill", "snapshot"):
        found = pick(known, name="branch_s", strategy=strategy)
        alone = alone or [row.value / row.n_branches for row in found if row.n_branches]
    return middle(alone)


def end_to_end_bounds(rows: Iterable[Row], n: int) -> dict[int, tuple[float, float]]:
    """Of each trial of one document: seconds of a re-prefill and `n` − 1 decodes, and what `n` re-prefills are to them."""
    known, found = list(rows), {}
    for trial in sorted({row.trial for row in known}):
        part = [row for row in known if row.trial == trial]
        branch = branch_alone(part)
        again = middle(r.value for r in pick(part, strategy="reprefill", name="end_to_end_s", n_branches=n))
        if again and branch:
            whole = again / n + (n - 1) * branch
            found[trial] = (whole, again / whole)
    return found


def shares_by_trial(rows: Sequence[Row]) -> dict[str, dict[int, float]]:
    """Share of its bound of each metric that has one, trial by trial."""
    parts: dict[int, list[Row]] = {}
    for row in rows:
        if row.experiment in ("article", "eight", "generation"):
            parts.setdefault(row.trial, []).append(row)
    found: dict[str, dict[int, float]] = {}
    for trial in sorted(parts):
        for name, metric in summarise({}, parts[trial])["metrics"].items():
            if (share := finite(metric["share_of_bound"])) is not None:
                found.setdefault(name, {})[trial] = share
    return found


# ── for people ───────────────────────────────────────────────────────────────────────────────────────


def finite(value: Any) -> float | None:
    """A number, if it is one."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def number(value: Any, digits: int = 3) -> str:
    """With three significant digits: 0.983, 25.3, 164, 12,300."""
    x = finite(value)
    if x is None:
        return NONE
    if x == 0:
        return "0"
    x = float(f"{x:.{digits - 1}e}")
    exponent = math.floor(math.log10(abs(x)) + 1e-9)
    if not -5 < exponent < 12:
        return f"{x:.{digits - 1}e}"
    return f"{x:,.{max(0, digits - 1 - exponent)}f}"


def percent(value: Any, digits: int = 3) -> str:
    """Of a share: 98.3 %."""
    x = finite(value)
    return NONE if x is None else f"{number(100 * x if abs(x) > 1e-7 else 0, digits)} %"


def seconds(value: Any, digits: int = 3) -> str:
    """In s, ms or µs."""
    x = finite(value)
    if x is None:
        return NONE
    scale, unit = time_unit(abs(x))
    return f"{number(x * scale, digits)} {unit}"


def time_unit(longest: float) -> tuple[float, str]:
    """What to multiply seconds by, and the unit they are in then."""
    return (1.0, "s") if longest >= 1 or longest == 0 else (1e3, "ms") if longest >= 1e-3 else (1e6, "µs")


def size(value: Any) -> str:
    """Bytes, in decimal units."""
    x = finite(value)
    if x is None:
        return NONE
    scale, unit = size_unit(abs(x))
    return f"{number(x * scale)} {unit}"


def size_unit(largest: float) -> tuple[float, str]:
    """What to multiply bytes by, and the unit they are in then."""
    for scale, unit in ((1e-9, "GB"), (1e-6, "MB"), (1e-3, "kB")):
        if largest * scale >= 1:
            return scale, unit
    return 1.0, "B"


def with_unit(value: Any, unit: str, digits: int = 3) -> str:
    """A metric's value: "" is a share, "×" a ratio, "s" seconds."""
    if finite(value) is None:
        return NONE
    if unit == "s":
        return seconds(value, digits)
    return percent(value, digits) if unit == "" else f"{number(value, digits)} {unit}"


def wanted(value: Any, unit: str) -> str:
    """A round number in a metric's unit: 98 %, 120 ×."""
    x = finite(value)
    if x is None:
        return NONE
    return f"{100 * x:,.6g} %" if unit == "" else f"{x:,.6g} {unit}"


def duration(value: Any) -> str:
    """12 min 30 s."""
    x = finite(value)
    if x is None or x < 120:
        return seconds(x)
    hours, minutes = divmod(round(x / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{round(x) // 60} min {round(x) % 60} s"


def count(value: Any) -> str:
    """A whole number: 3,501."""
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else number(value)


def counted(n: int, what: str) -> str:
    """1 branch, 2 branches."""
    return f"{n:,} {what}" if n == 1 else f"{n:,} {what}{'es' if what.endswith('ch') else 's'}"
