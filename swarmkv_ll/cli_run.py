"""`swarmkv run`: a pipeline from its file, live, with its answers, times, trace and picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich import box
from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from .errors import PipelineError
from .printable import one_line
from .terminal import check_target, duration, err, extra_named, loaded_model, out, ratio_table, show

if TYPE_CHECKING:
    from .pipeline import NodeResult, Pipeline, PipelineResult, Run

_STYLES = {
    "waiting": "dim",
    "queued": "yellow",
    "running": "cyan",
    "done": "green",
    "failed": "red",
    "skipped": "red",
    "cancelled": "red",
}


@click.command()
@click.argument("file", type=click.Path(), required=False)
@click.option(
    "--model", "model_path", metavar="GGUF", help="Model; by default the file's, $SWARMKV_MODEL, or a small one."
)
@click.option(
    "--strategy",
    type=click.Choice(["shared", "snapshot"]),
    help="One context and one batch for all branches, or a context a branch; by default what the file says.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
@click.option("--plot", type=click.Path(dir_okay=False), help="Draw who did what when: a .png, .svg or .pdf.")
@click.option("--trace", type=click.Path(dir_okay=False), help="Write the same as a Chrome trace, for ui.perfetto.dev.")
@click.option("--measure", is_flag=True, help="Measure what pipelines are worth on this machine; takes no file.")
def run(
    file: str | None,
    model_path: str | None,
    strategy: Any,
    as_json: bool,
    plot: str | None,
    trace: str | None,
    measure: bool,
) -> int:
    """Run a graph of agents over shared documents, as a TOML file describes it.

    For example: swarmkv run examples/audit/pipeline.toml --plot timeline.png
    """
    if measure:
        if file or strategy or plot or trace:
            raise click.UsageError("--measure goes with --model and --json only")
        _measure(model_path, as_json)
        return 0
    if not file:
        raise click.UsageError("no pipeline: give a TOML FILE, or --measure")
    from .pipeline_file import read_pipeline
    from .timeline import check_picture

    if plot is not None:
        with extra_named():
            check_picture(plot)
    taken = {Path(file).resolve()}
    for path in (plot, trace):
        if path is None:
            continue
        try:
            target = check_target(path)
        except OSError:
            raise click.UsageError(f"{path!r} cannot be written") from None
        if target in taken:
            raise click.UsageError(f"{path} is named twice")
        taken.add(target)
    try:
        spec = read_pipeline(file)
        with loaded_model(model_path or spec.model) as model:
            from .pipeline import Pipeline

            pipeline = Pipeline.from_spec(spec, model, **({"strategy": strategy} if strategy else {}))
            result = _run(pipeline, live=not as_json and out.is_terminal)
    except PipelineError as error:
        if len(error.problems) < 2:
            raise
        for problem in error.problems:
            click.echo(f"swarmkv: {one_line(problem)}", err=True)
        return 2
    if as_json:
        click.echo(json.dumps(result.to_dict(), indent=2, ensure_ascii=False))
    else:
        show(Group(_answers(result), _times(result, wide=not out.is_terminal or out.width >= 100)))
    if trace:
        result.timeline().save_trace(trace)
    if plot:
        result.timeline().plot(plot)
    for name, failure in result.errors.items():
        if result[name].state != "skipped":
            click.echo(f"swarmkv: {one_line(f'node {name!r}: {type(failure).__name__}: {failure}')}", err=True)
    return 1 if result.errors else 0


def _run(pipeline: Pipeline, *, live: bool) -> PipelineResult:
    with pipeline.start() as run:
        if not live:
            return run.result()
        with Live(console=out, refresh_per_second=10, get_renderable=lambda: _progress(run), transient=True):
            return run.result()


# ── while it runs ────────────────────────────────────────────────────────────────────────────────────


def _progress(run: Run) -> Group:
    """Each node's state; of a document how far it has come, of an answer its end."""
    nodes = list(run.nodes.values())
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0), expand=True)
    table.add_column(no_wrap=True, max_width=24)
    table.add_column(no_wrap=True, width=9)
    table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    room = max(4, out.height - 3)
    for node in _most_telling(nodes, room):
        style = _STYLES[node.state]
        table.add_row(Text(node.name, "bold"), Text(node.state, style), _what(node, run))
    if len(nodes) > room:
        table.add_row("", "", Text(f"and {len(nodes) - room} more", "dim"))
    count = {state: sum(node.state == state and node.kind != "prefill" for node in nodes) for state in _STYLES}
    counted = "  ".join(f"{n} {state}" for state, n in count.items() if n)
    return Group(table, Text(), Text(counted, "dim"))


def _most_telling(nodes: list[NodeResult], room: int) -> list[NodeResult]:
    """All nodes, or, of more than there is room for, those first that something happens with; in their order."""
    rank = ["running", "queued", "failed", "cancelled", "waiting", "skipped", "done"]
    chosen = sorted(range(len(nodes)), key=lambda i: (nodes[i].kind != "prefill", rank.index(nodes[i].state)))[:room]
    return [nodes[i] for i in sorted(chosen)]


def _what(node: NodeResult, run: Run) -> Any:
    if node.kind == "prefill":
        bar = Table.grid(padding=(0, 1))
        bar.add_row(
            ProgressBar(total=max(1, node.n_tokens), completed=node.n_done, width=30),
            Text(f"{node.n_done:,} of {node.n_tokens:,} tokens"),
        )
        return bar
    if node.error is not None:
        return Text(str(node.error), "red")
    text = " ".join((run.text(node.name) if node.kind == "branch" else node.text).split())
    room = max(8, out.width - 38)
    return Text(f"…{text[-room:]}" if node.state == "running" and len(text) > room else text)


# ── at the end ───────────────────────────────────────────────────────────────────────────────────────


def _answers(result: PipelineResult) -> Group:
    blocks: list[Any] = []
    for node in result.values():
        if node.kind == "prefill":
            continue
        blocks.append(Text(node.name, "bold cyan"))
        if node.error is not None:
            blocks.append(Text(f"{node.state}: {node.error}", "red"))
        cut = "" if node.finished or node.kind != "branch" or node.error else " …"
        if node.text.strip():
            blocks.append(Text.assemble(node.text.strip(), (cut, "dim")))
        blocks.append(Text())
    return Group(*blocks)


def _times(result: PipelineResult, *, wide: bool) -> Group:
    """Where the time went, node by node, and what the batches held."""
    table = Table(box=box.SIMPLE_HEAD, title=f"{result.model}, strategy {result.strategy}", title_justify="left")
    columns = ["node", "goes on from", "fed", "waited", "first token", "gap p50", "p95", "total", "tokens"]
    shown = columns if wide else ["node", "waited", "first token", "total", "tokens"]
    for name in shown:
        table.add_column(name, justify="left" if name == "node" else "right", no_wrap=True)
    for node in result.values():
        gaps = node.gaps or {}
        branch = node.kind == "branch"
        cells = (
            node.name,
            f"{node.n_prefix_tokens:,}" if branch and node.begun_s is not None else "",
            f"{node.n_tokens:,}" if node.n_tokens else "",
            _duration(node.waited_ms),
            _duration(node.first_token_ms),
            _duration(gaps.get("p50")),
            _duration(gaps.get("p95")),
            _duration(node.time_ms),
            f"{len(node.tokens):,}" if branch else "",
        )
        table.add_row(*(cell for name, cell in zip(columns, cells, strict=True) if name in shown))
    lines = Table.grid(padding=(0, 2))
    n, seconds = result.n_generated, result.end_to_end_ms / 1e3
    lines.add_row(
        "end to end", f"{duration(result.end_to_end_ms)}, {n:,} tokens generated, {n / seconds:,.1f} a second"
    )
    if batches := result.batches():
        lines.add_row(
            "batches",
            f"{batches['n']:,}, of {batches['mean_tokens']:,.1f} tokens in the mean, {batches['max_tokens']:,} at most",
        )
        lines.add_row("time", ", ".join(f"{kind} {share:.1%}" for kind, share in result.shares().items()))
    return Group(table, lines)


def _duration(ms: float | None) -> str:
    return "" if ms is None else duration(ms)


# ── --measure ────────────────────────────────────────────────────────────────────────────────────────


def _measure(model_path: str | None, as_json: bool) -> None:
    with loaded_model(model_path) as model:
        from .pipeline_measure import measure

        with err.status("measuring") as status:
            rows = measure(model, lambda what: status.update(f"measuring: {what}"))
        if as_json:
            click.echo(
                json.dumps(
                    {"model": model.path.name, "rows": [row.to_dict() for row in rows]}, indent=2, ensure_ascii=False
                )
            )
            return
    show(
        ratio_table(rows, "wanted: on a quiet machine; end to end with this run's median prefill in the place of each")
    )
