"""Ratios of two runs side by side, also of two machines: `python benchmarks/compare_ratios.py BEFORE.json AFTER.json`.

`pytest-benchmark compare` compares times, which only say something on one machine in one hour.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

FEW = 5
"""Rounds below which quartiles say nothing."""


def read(path: str) -> dict[str, dict[str, Any]]:
    """`extra_info` by benchmark, of those that have a ratio."""
    benchmarks = json.loads(Path(path).read_text(encoding="utf-8"))["benchmarks"]
    found = {each["fullname"].rpartition("/")[2]: each["extra_info"] for each in benchmarks}
    return {name: info for name, info in found.items() if "ratio" in info}


def verdict(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Whether the middle halves of their rounds lie apart."""
    if min(before["rounds"], after["rounds"]) < FEW:
        return "few rounds"
    (low, high), (other_low, other_high) = before["ratio_quartiles"], after["ratio_quartiles"]
    return "" if low <= other_high and other_low <= high else "apart"


def main(before: str, after: str) -> None:
    """Print a line for each benchmark that is in both files."""
    old, new = read(before), read(after)
    both = [name for name in old if name in new]
    print(f"{'':<66} {'before':>10} {'after':>10} {'change':>8}")
    for name in both:
        a, b = old[name], new[name]
        change = f"{b['ratio'] / a['ratio'] - 1:+8.1%}"
        print(f"{name:<66} {a['ratio']:>10.4g} {b['ratio']:>10.4g} {change}  {verdict(a, b)}".rstrip())
    print(f"{len(both)} in both, {len(old) - len(both)} only before, {len(new) - len(both)} only after")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
