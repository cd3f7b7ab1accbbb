"""Write README.md's table of measurements from docs/results/summary.json, or, with --check, tell whether it is there."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from swarmkv_ll.campaign.values import metric_name

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- measured: benchmarks/readme.py writes this -->", "<!-- /measured -->"


def table(summary: dict[str, Any]) -> str:
    """The text between the markers."""
    settings, machine, model, noise = (summary[key] for key in ("settings", "machine", "model", "noise"))
    lines = [
        f"One run of `{summary['command']}` ({summary['created_at'][:10]}, {summary['seconds'] / 60:.0f} minutes) on "
        f"{machine['cpus']} cores of an {machine['cpu']}, no GPU, {machine['memory_bytes'] / 2**30:.0f} GiB, beside other "
        f"machines: {model['name']}, a document of {settings['n_document']:,} tokens, flash attention, "
        f"{settings['n_threads']} threads.",
        "Medians of trials that run in turns with what they are compared to. "
        f"The same short decode varied by {noise['decode_spread']:.0%} over the run, and other processes took "
        f"{noise['others_cpu']:.0%} of the processors"
        + ("." if noise["conclusive"] else ": **too noisy to conclude from**, but for what is far from its target."),
        "",
        "| what | measured (trials from … to) | bound | share of it | wanted | |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, metric in summary["metrics"].items():
        unit = f" {metric['unit']}" if metric["unit"] else ""
        wanted, verdicts = [], []
        for target in summary["targets"]:
            if target["metric"] == name:
                of_bound = target["of"] == "share_of_bound"
                wanted.append(f"{target['wanted']:.0%} of the bound" if of_bound else f"{target['wanted']:g}{unit}")
                verdicts.append(target["verdict"])
        share = metric["share_of_bound"]
        # Where the bound is 1, the figure is its own share.
        bound, share_told = (
            ("", "") if share is None or metric["bound"] == 1 else (digits(metric["bound"]) + unit, f"{share:.1%}")
        )
        trials = f" ({digits(metric['worst'])} … {digits(metric['best'])})" if metric["n"] > 1 else ""
        cells = [
            metric_name(name),
            digits(metric["median"]) + unit + trials,
            bound,
            share_told,
            ", ".join(wanted),
            ", ".join(verdicts),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def digits(value: float) -> str:
    """For people."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}" if value >= 10 else f"{value:.2f}"


def with_table(readme: str, summary: dict[str, Any]) -> str:
    """README.md with the table in its place."""
    before, _, rest = readme.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise SystemExit(f"README.md lacks {BEGIN} or {END}")
    return f"{before}{BEGIN}\n\n{table(summary)}\n\n{END}{after}"


def main() -> None:
    """Write, or check."""
    path = ROOT / "README.md"
    readme = path.read_text(encoding="utf-8")
    made = with_table(readme, json.loads((ROOT / "docs/results/summary.json").read_text(encoding="utf-8")))
    if "--check" not in sys.argv:
        path.write_text(made, encoding="utf-8")
    elif made != readme:
        raise SystemExit("README.md's table is not that of docs/results: run python benchmarks/readme.py")


if __name__ == "__main__":
    main()
