"""`swarmkv bench`: the campaign from the command line, with its progress, its headline and its folder."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from .printable import clean
from .terminal import lines_of, loaded_model, progress_bar, read_text, sample, show

_DEFAULT_OUT = "swarmkv-bench"


@click.command()
@click.option("--quick", is_flag=True, help="Short documents, few cases: under a minute.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(_DEFAULT_OUT),
    show_default=True,
    help="Folder for results; an interrupted run there goes on.",
)
@click.option("--model", "model_path", metavar="GGUF", help="Model; by default $SWARMKV_MODEL, or a small one.")
@click.option("--peers", is_flag=True, help="Measure llama-cpp-python and llama.cpp's own tools too.")
@click.option("--tokens", "n_document", type=click.IntRange(64), metavar="N", help="Tokens of the document.")
@click.option("--doc", "docs", type=click.Path(), multiple=True, help="A real document to measure too; repeat it.")
@click.option("--overwrite", is_flag=True, help="Remove an earlier run's files from the folder.")
@click.option("--json", "as_json", is_flag=True, help="Print summary.json instead of tables.")
def bench(
    quick: bool,
    out: Path,
    model_path: str | None,
    peers: bool,
    n_document: int | None,
    docs: tuple[str, ...],
    overwrite: bool,
    as_json: bool,
) -> None:
    """Measure this library on this machine: every figure beside its bound, in a folder with a report.

    For example: swarmkv bench --peers --out results
    """
    texts = [(clean(Path(path).name) if path != "-" else "standard input", read_text(path)) for path in docs]
    spec, prompts = sample("sample_spec.md"), lines_of(sample("sample_prompts.txt"))
    with loaded_model(model_path) as model:
        from .campaign.run import GENERAL_PROMPTS, RealDocument, campaign, engine_header

        documents = [RealDocument(name, text, GENERAL_PROMPTS) for name, text in texts]
        if not quick:
            documents += _ours(model, RealDocument("sample_spec.md", spec, prompts), engine_header(model, 2000))
        with progress_bar(width=36) as progress:
            task = progress.add_task("warming up", total=None)

            def tell(what: str, done: float, total: float) -> None:
                progress.update(task, description=what, completed=done, total=total)

            try:
                summary = campaign(
                    model,
                    out,
                    text=spec,
                    documents=documents,
                    quick=quick,
                    with_peers=peers,
                    n_document=n_document,
                    overwrite=overwrite,
                    command=_command(quick, peers, n_document, texts, model_path),
                    on_progress=tell,
                )
            except KeyboardInterrupt:
                progress.stop()
                click.echo(f"swarmkv: {out} keeps what was measured; the same command goes on from there", err=True)
                raise
    if as_json:
        click.echo(json.dumps(summary, indent=2, ensure_ascii=False))
        return
    show(Group(_headline(summary), _closing(summary, out)))


def _ours(model: Any, *documents: Any) -> list[Any]:
    """Of the documents that come with the package, those that fit the model."""
    from .campaign.plan import HEADROOM

    return [
        d
        for d in documents
        if len(model.tokenize(d.text, add_special=True, parse_special=False)) + HEADROOM <= model.n_ctx_train
    ]


def _command(quick: bool, peers: bool, n_document: int | None, texts: list[tuple[str, str]], model: str | None) -> str:
    """How to do it again, without this machine's paths."""
    parts = ["swarmkv", "bench", *["--quick"] * quick, *["--peers"] * peers]
    if n_document:
        parts += ["--tokens", str(n_document)]
    for name, _ in texts:
        parts += ["--doc", "-" if name == "standard input" else name]
    if model:
        parts += ["--model", clean(Path(model).name)]
    return shlex.join(parts)


def _headline(summary: dict[str, Any]) -> Table:
    from .campaign.values import metric_name

    table = Table(box=box.SIMPLE_HEAD, title=Text(_title(summary)), title_justify="left")
    judged = bool(summary["targets"])
    for name in ("metric", "median", "bound", "share", "spread", *(["wanted", ""] if judged else [])):
        table.add_column(name, justify="left" if name in ("metric", "") else "right", no_wrap=name != "metric")
    wanted: dict[str, list[dict[str, Any]]] = {}
    for target in summary["targets"]:
        wanted.setdefault(target["metric"], []).append(target)
    for name, metric in summary["metrics"].items():
        unit = f" {metric['unit']}" if metric["unit"] else ""
        told = wanted.get(name, [])
        verdicts = (
            "\n".join(f"{t['wanted']:g}{' of bound' if t['of'] == 'share_of_bound' else unit}" for t in told),
            Text("\n").join(Text(t["verdict"], _STYLES[t["verdict"]]) for t in told),
        )
        table.add_row(
            metric_name(name),
            f"{_digits(metric['median'])}{unit}",
            "" if metric["bound"] is None else f"{_digits(metric['bound'])}{unit}",
            "" if metric["share_of_bound"] is None else f"{metric['share_of_bound']:.1%}",
            "" if metric["spread"] is None or metric["n"] < 2 else f"{metric['spread']:.1%}",
            *(verdicts if judged else ()),
        )
    return table


_STYLES = {"met": "green", "missed": "yellow", "not concluded": "magenta"}


def _title(summary: dict[str, Any]) -> str:
    settings = summary["settings"]
    return f"{summary['model']['name']}, {settings['n_document']:,} tokens, {settings['n_threads']} threads"


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _beside(out: Path) -> list[str]:
    return [path.name for path in out.iterdir() if path.name != "report.html"]


def _closing(summary: dict[str, Any], out: Path) -> Text:
    noise = summary["noise"]
    lines = [f"too noisy to conclude: {reason}" for reason in noise["reasons"]]
    lines += [f"left out: {line}" for line in summary["skipped"]]
    lines.append(f"written: {out / 'report.html'}, and beside it {', '.join(sorted(_beside(out)))}")
    if noise["conclusive"] and noise["decode_spread"] is not None:
        lines.append(
            f"noise: the same decode varied by {noise['decode_spread']:.0%}, others took "
            f"{noise['others_cpu']:.0%} of the processors"
        )
    return Text("\n".join(lines))
