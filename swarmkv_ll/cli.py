"""The `swarmkv` command."""

from __future__ import annotations

import json
import os
import sys
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click
from rich import box
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from . import __version__
from .cli_bench import bench
from .cli_run import run
from .cli_snapshot import snapshot
from .cuda import in_words
from .errors import SwarmKVError
from .printable import one_line
from .terminal import (
    duration,
    lines_of,
    loaded_model,
    out,
    path_of_model,
    progress_bar,
    ratio_table,
    read_text,
    sample,
    show,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .fanout import FanOut
    from .measure import Ratio
    from .model import Model


class _InterruptedError(Exception):
    """Ctrl-C, kept from click, which would print an empty line for it."""


class _Group(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise _InterruptedError from None


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="swarmkv")
def cli() -> None:
    """Prefill a document once, fork its KV state, answer from every branch."""


cli.add_command(bench)
cli.add_command(run)
cli.add_command(snapshot)


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command; an error is one line on standard error and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # what the terminal's encoding lacks becomes a question mark
            stream.reconfigure(errors="replace")
    try:
        code = cli.main(args, prog_name="swarmkv", standalone_mode=False)
        if sys.stdout:  # None if the shell closed it
            sys.stdout.flush()
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        code = 2
    except click.ClickException as error:
        code = _fail(error.format_message())
    except SwarmKVError as error:
        code = _fail(str(error))
    except BrokenPipeError:  # the reader had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except OSError as error:
        code = _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except _InterruptedError:
        code = _fail("interrupted", 130)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int = 2) -> int:
    print("swarmkv:", one_line(message), file=sys.stderr)
    return code


# ── swarmkv model ────────────────────────────────────────────────────────────────────────────────────


@cli.command()
def model() -> None:
    """Fetch the default model if needed, and print its path."""
    click.echo(path_of_model(None))


# ── swarmkv lib-dir ──────────────────────────────────────────────────────────────────────────────────


@cli.command("lib-dir")
def lib_dir() -> None:
    """Print the folder of the engine's libraries, for other bindings' LLAMA_CPP_LIB_PATH."""
    click.echo(Path(__file__).resolve().parent / "_lib")


# ── swarmkv fanout ───────────────────────────────────────────────────────────────────────────────────


@cli.command()
@click.option("--doc", type=click.Path(), help="Document to share, - for standard input; by default a sample.")
@click.option(
    "--prompt", "prompt", multiple=True, metavar="TEXT", help="A branch's prompt, needed with --doc; repeat it."
)
@click.option("--prompts", "prompts_file", type=click.Path(), help="File with one prompt a line, - for standard input.")
@click.option("--model", "model_path", metavar="GGUF", help="Model; by default $SWARMKV_MODEL, or a small one.")
@click.option("--strategy", type=click.Choice(["shared", "snapshot", "reprefill"]), default="shared", show_default=True)
@click.option("--max-tokens", type=click.IntRange(1), default=64, show_default=True, help="Longest answer.")
@click.option("--n-ctx", type=click.IntRange(1), help="Context size; by default what is needed.")
@click.option("--compare", is_flag=True, help="Measure re-prefilling too, and each step against its bound.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
def fanout(
    doc: str | None,
    prompt: tuple[str, ...],
    prompts_file: str | None,
    model_path: str | None,
    strategy: Any,
    max_tokens: int,
    n_ctx: int | None,
    compare: bool,
    as_json: bool,
) -> None:
    """Answer several prompts from one document that is computed once.

    For example: swarmkv fanout --doc report.txt --prompt "Who wrote it?" --prompt "What is it about?"
    """
    document = read_text(doc) if doc else sample("sample_spec.md")
    prompts = [*prompt, *(lines_of(read_text(prompts_file)) if prompts_file else [])]
    if not prompts:
        if prompts_file:
            raise click.UsageError(f"{prompts_file} holds no prompt; it should hold one a line")
        if doc:
            raise click.UsageError("no prompt: give --prompt TEXT, or --prompts FILE with one a line")
        prompts = lines_of(sample("sample_prompts.txt"))

    with loaded_model(model_path) as model:
        chat = model.chat_template is not None
        result = _answer(model, document, prompts, strategy, max_tokens, n_ctx, chat, quiet=as_json)
        report: dict[str, Any] = result.to_dict()
        baseline = None
        if compare:
            baseline = _answer(model, document, prompts, "reprefill", max_tokens, n_ctx, chat, quiet=True)
            ratios = _ratios(model, document, prompts, chat, result, baseline)
            report["compare"] = {"reprefill": baseline.to_dict(), "ratios": [ratio.to_dict() for ratio in ratios]}
    if as_json:
        click.echo(json.dumps(report, indent=2, ensure_ascii=False))
        return
    if not out.is_terminal:
        show(_answers(result))
    show(_times(result, baseline))
    if compare:
        show(Group("", _judged(ratios, result.document_tokens)))


def _answer(
    model: Model,
    document: str,
    prompts: list[str],
    strategy: Any,
    max_tokens: int,
    n_ctx: int | None,
    chat: bool,
    *,
    quiet: bool,
) -> FanOut:
    """Run `fan_out`, with a bar while the document is computed and, on a terminal, the answers as they grow."""
    from .fanout import Branch, FanOut, fan_out

    shown = FanOut("", strategy, 0, branches=[Branch(prompt) for prompt in prompts])
    progress = progress_bar()
    task = progress.add_task("re-prefilling" if strategy == "reprefill" else "prefilling", total=None)
    repeats = len(prompts) if strategy == "reprefill" else 1
    before = 0
    live = Live(console=out, refresh_per_second=12, get_renderable=lambda: _answers(shown))

    def on_prefill(done: int, total: int) -> None:
        nonlocal before
        progress.update(task, completed=before + done, total=repeats * total)
        if done == total:
            before += total
            if before >= repeats * total:
                progress.stop()
                if not quiet and out.is_terminal:
                    live.start()

    def on_token(index: int, text: str) -> None:
        shown.branches[index].text += text

    progress.start()
    try:
        result = fan_out(
            model,
            document,
            prompts,
            max_tokens=max_tokens,
            strategy=strategy,
            on_token=on_token,
            on_prefill=on_prefill,
            chat=chat,
            n_ctx=n_ctx,
        )
        shown.branches = result.branches  # the last picture also tells which answers were cut short
        return result
    finally:
        progress.stop()
        live.stop()


def _answers(result: FanOut) -> Group:
    blocks: list[Any] = []
    for i, branch in enumerate(result.branches, start=1):
        blocks.append(Text.assemble((f"{i} ", "bold cyan"), (branch.prompt, "bold")))
        blocks.append(Text.assemble(branch.text.strip(), ("" if branch.finished else " …", "dim")))
        blocks.append(Text())
    return Group(*blocks)


def _times(result: FanOut, baseline: FanOut | None) -> Group:
    """Where the time went, and what re-prefilling every branch costs or would have cost."""
    n = len(result.branches)
    table = Table(box=box.SIMPLE_HEAD, title=f"{result.model}, strategy {result.strategy}", title_justify="left")
    for name in ("branch", "fork", "restore", "first token", "decode", "total", "tokens"):
        table.add_column(name, justify="left" if name == "branch" else "right", no_wrap=True)
    for i, branch in enumerate(result.branches, start=1):
        total = branch.first_token_ms + branch.decode_ms
        times = (branch.fork_ms, branch.restore_ms, branch.first_token_ms, branch.decode_ms, total)
        table.add_row(str(i), *(duration(ms) for ms in times), str(len(branch.tokens)))
    lines = Table.grid(padding=(0, 2))
    if result.strategy == "reprefill":
        prefilled = f"{n} times in {duration(result.prefill_ms)}"
    else:
        prefilled = f"once in {duration(result.prefill_ms)}"
    state = f"; its state is {result.snapshot_bytes / 1e6:,.1f} MB" if result.snapshot_bytes else ""
    lines.add_row("document", f"{result.document_tokens:,} tokens, prefilled {prefilled}{state}")
    lines.add_row("end to end", f"{duration(result.end_to_end_ms)} for {n} branch{'es' * (n > 1)}")
    if result.strategy != "reprefill" and n > 1:
        if baseline:
            cost, how = baseline.end_to_end_ms, "measured in this run"
        else:
            cost, how = result.end_to_end_ms + (n - 1) * result.prefill_ms, "computed; --compare measures it"
        ratio = cost / result.end_to_end_ms
        lines.add_row(f"{n} re-prefills", f"{duration(cost)}, {ratio:.2f} times as long ({how})")
    return Group(table, lines)


# ── --compare ────────────────────────────────────────────────────────────────────────────────────────


_LEAST_TOKENS = 2000
"""Below this, a document's copies are so short that the cost of a call shows, and the targets do not apply."""


def _judged(ratios: list[Ratio], document_tokens: int) -> Table:
    if document_tokens >= _LEAST_TOKENS:
        return ratio_table(
            ratios,
            "wanted: for about 3,500 tokens, on a quiet machine; a bound is what the branch's own decode would give",
        )
    return ratio_table(
        ratios,
        f"not judged: the targets are for about 3,500 tokens; with {document_tokens:,} fixed costs show",
        judged=False,
    )


def _ratios(
    model: Model, document: str, prompts: list[str], chat: bool, result: FanOut, baseline: FanOut
) -> list[Ratio]:
    """Each step against its bound, measured now, in this process, on this document."""
    from . import measure
    from .arena import Arena
    from .fanout import document_and_prompts, prefill

    tokens, questions = document_and_prompts(model, document, prompts, chat)
    question = questions[0][-5:]
    n_ctx = len(tokens) + 8 * (len(question) + 32) + 256
    with progress_bar() as progress:
        task = progress.add_task("measuring", total=None)

        def tell(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total + 1)

        with model.context(n_ctx, 9) as ctx:
            prefill(ctx, tokens, on_progress=tell)
            with Arena.for_branches(ctx, 1) as arena, ctx.snapshot(arena) as snapshot:
                copies = measure.copies(ctx, snapshot, rounds=25)
                active = measure.activation(ctx, snapshot, question, rounds=21)
                snapshot.restore(ctx)
                generation = measure.batched_generation(ctx, question, rounds=2)
    prefill_s = baseline.prefill_ms / 1e3 / len(prompts)
    n = len(result.branches)
    return [
        *measure.copy_ratios(copies),
        *measure.branch_ratios(prefill_s, copies, active),
        measure.Ratio(f"these {n} answers, end to end", baseline.end_to_end_ms / result.end_to_end_ms, None, "×"),
        measure.Ratio(
            "8 × 32 tokens in one batch, against in turn", generation.ratio("one_at_a_time", "together"), 1.3, "×"
        ),
    ]


# ── swarmkv doctor ───────────────────────────────────────────────────────────────────────────────────


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
def doctor(as_json: bool) -> None:
    """Tell what is installed, loaded and obtained on this machine."""
    from .doctor import examine

    found = examine()
    if as_json:
        click.echo(json.dumps(found, indent=2, ensure_ascii=False))
        return
    engine, threads, memory = found["engine"], found["threads"], found["memory"]
    limit = memory["lock_limit"]
    rows = [
        ("engine", f"{engine['pin']}, llama.cpp {engine['version']} at {engine['commit'][:12]}"),
        ("stamp", engine["stamp"]),
        ("library", engine["library"]),
        ("built with", f"{engine['compiler']}, {' '.join(engine['instruction_sets'])}"),
        *_cuda_rows(found["cuda"]),
        ("backends", f"{', '.join(found['backends'])} ({', '.join(found['backend_files'])})"),
        *(
            (
                "device",
                f"{d['name']}: {d['description']}, {d['memory_free'] / 2**30:.1f} of "
                f"{d['memory_total'] / 2**30:.1f} GiB free",
            )
            for d in found["devices"]
        ),
        ("threads", f"{threads['default']} by default, {threads['cpus']} CPUs; {threads['waiting']}"),
        ("guard", f"one lock {'for all contexts' if threads['guard'] == 'global' else 'a context'}"),
        ("page locking", memory["pinned"] or f"none ({memory['pin_error']})"),
        ("lock limit", "none for this process" if limit is None else f"{limit / 2**20:,.0f} MiB"),
        ("huge pages", f"{memory['huge_pages']}; {memory['huge_page_share']:.0%} of a test arena"),
        ("memory", f"{memory['available'] / 2**30:.1f} GiB available"),
        ("model", found["model"] or "not in the cache; `swarmkv model` fetches it"),
    ]
    for name, value in rows:  # not in a table, which would break paths to fit
        click.echo(f"{click.style(f'{name:<12}', bold=True)}  {value}")


def _cuda_rows(cuda: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What `doctor` shows of the CUDA module: its code, whether it is used or why not, the driver and its GPUs."""
    if cuda["module"] is None:
        yield "CUDA", "not built; ./build_llama.sh --cuda builds it"
    else:
        code = {(each["kind"], each["architecture"]): each["n"] for each in cuda["architectures"]}
        yield "CUDA", f"{in_words(code) or cuda['damage']}, by toolkit {cuda['toolkit'] or 'unknown'}"
        yield "CUDA module", "used" if cuda["used"] else f"not used: {cuda['reason']}"
        for name, path in cuda["libraries"].items():
            yield "CUDA library", one_line(path or "") or f"{name} as the system's loader finds it, if it does"
    if cuda["driver"] is not None:
        yield "GPU driver", f"for CUDA {cuda['driver']}"
    elif cuda["module"] is not None and cuda["driver_error"] != cuda["reason"]:
        yield "GPU driver", cuda["driver_error"]
    fits = {"elf": "the module has code for it", "ptx": "runs the module's PTX", None: "the module has no code for it"}
    for gpu in cuda["gpus"]:
        what = f"{gpu['name']}, compute capability {gpu['compute_capability']}"
        if cuda["module"] is not None:
            what += f": {fits[gpu['runs_as']] if cuda['architectures'] else 'the module could not be read'}"
        yield "GPU", what


if __name__ == "__main__":
    main()
