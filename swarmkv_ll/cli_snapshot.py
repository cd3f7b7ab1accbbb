"""`swarmkv snapshot`: files of KV state, made, looked into, tried and changed.

`info`, `slice` and `convert` need neither the engine nor a model.
"""

from __future__ import annotations

import json
import os
import textwrap
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click
from rich import box
from rich.table import Table

from .errors import (
    ContextFullError,
    IncompatibleSnapshotError,
    PartialRemovalError,
    SnapshotError,
    SnapshotFileError,
)
from .printable import clean
from .terminal import (
    check_target,
    duration,
    extra_named,
    loaded_model,
    out,
    progress_bar,
    read_text,
    sample,
    show,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .arena import Arena
    from .context import Context
    from .inspection import Format, LayerRow
    from .record import Bytes, Record
    from .snapshot import Snapshot

KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
"""Keys of `limits.KV_TYPES`, which cannot be asked without the engine."""

_F = TypeVar("_F", bound="Callable[..., Any]")

_FORMATS = {"skv": "a .skv file", "llama": "a sequence file of llama.cpp's"}

_model = click.option("--model", "model_path", metavar="GGUF", help="Model; by default $SWARMKV_MODEL, or a small one.")

_out = click.option(
    "-o", "--out", "out_path", metavar="OUT", required=True, help="File to write; replaced in one step."
)
_file = click.argument("path", metavar="FILE")

_FLASH_ATTN: dict[str, Literal["auto"] | bool] = {"auto": "auto", "on": True, "off": False}


def _flash_attn(default: str) -> Callable[[_F], _F]:
    return click.option(
        "--flash-attn", type=click.Choice([*_FLASH_ATTN]), help=f"Flash attention; by default {default}."
    )


def _kv_type(kind: str, default: str) -> Callable[[_F], _F]:
    what = f"Type of the {kind} cache (f16, q8_0, …); by default {default}."
    return click.option(f"--type-{kind.lower()}", type=click.Choice(KV_TYPES), metavar="TYPE", help=what)


@click.group()
def snapshot() -> None:
    """Save, inspect, try and change files of KV state.

    For example: swarmkv snapshot save --doc report.txt -o report.skv
    """


# ── save ─────────────────────────────────────────────────────────────────────────────────────────────


@snapshot.command(short_help="Prefill a document and save its state.")
@click.option(
    "--doc",
    type=click.Path(),
    help="Document to prefill, - for standard input; by default a sample of some 3,000 tokens.",
)
@_model
@click.option("--n-ctx", type=click.IntRange(1), help="Context size; by default what the document needs.")
@_flash_attn("auto")
@_kv_type("K", "f16")
@_kv_type("V", "f16")
@click.option("--llama", is_flag=True, help="Write a sequence file as llama.cpp's own instead: without logits.")
@_out
def save(
    doc: str | None,
    model_path: str | None,
    n_ctx: int | None,
    flash_attn: str | None,
    type_k: str | None,
    type_v: str | None,
    llama: bool,
    out_path: str,
) -> None:
    """Prefill a document and save its state, with tokens and last logits.

    For example: swarmkv snapshot save --doc report.txt --type-k q8_0 -o report.skv
    """
    document = read_text(doc) if doc else sample("sample_spec.md")
    _check_target(out_path)
    with loaded_model(model_path) as model:
        from .arena import Arena
        from .fanout import N_BATCH, document_and_prompts, prefill

        tokens, _ = document_and_prompts(model, document, [], chat=False)
        room = model.n_ctx_train if n_ctx is None else n_ctx
        if n_ctx is not None and n_ctx > model.n_ctx_train:
            raise click.UsageError(f"--n-ctx {n_ctx} is more than the {model.n_ctx_train} the model was trained on")
        if len(tokens) > room:
            raise click.UsageError(f"the document's {len(tokens):,} tokens do not fit a context of {room:,}")
        with model.context(
            n_ctx or len(tokens),
            flash_attn=_FLASH_ATTN[flash_attn or "auto"],
            type_k=type_k or "f16",
            type_v=type_v or "f16",
            n_batch=N_BATCH,
        ) as ctx:
            begin = perf_counter()
            with progress_bar() as progress:
                task = progress.add_task("prefilling", total=len(tokens))
                if len(tokens) > 1:
                    prefill(ctx, tokens[:-1], on_progress=lambda done, _: progress.update(task, completed=done))
                # By itself, as `restore-check` decodes it again: in another batch it would round differently.
                ctx.decode(tokens[-1:])
            prefilled = perf_counter()
            with Arena.for_branches(ctx, 0) as arena, ctx.snapshot(arena, tokens=tokens) as taken:
                exported = perf_counter()
                if llama:
                    taken.export_llama(out_path)
                else:
                    taken.save(out_path)
                saved = perf_counter()
    times = f"prefilled in {_seconds(begin, prefilled)}, saved in {_seconds(exported, saved)}"
    click.echo(f"{clean(out_path)}: {len(tokens):,} tokens, {_size(os.path.getsize(out_path))}; {times}")


def _check_target(path: str) -> None:
    if path == "-":
        raise click.UsageError("-o -: a file is written whole and takes its name then, which standard output cannot")
    check_target(path)


# ── info ─────────────────────────────────────────────────────────────────────────────────────────────


@snapshot.command(short_help="Tell what is in a file, layer by layer.")
@_file
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
@click.option("--layers/--no-layers", default=True, help="Norms of every layer's keys and values, or header only.")
@click.option("--plot", metavar="PNG|SVG", help="Draw the norms by layer and position.")
def info(path: str, as_json: bool, layers: bool, plot: str | None) -> None:
    """Tell what is in a file: ours (.skv), or a sequence file of llama.cpp's.

    With layers, the state is read into memory once, every checksum is compared, and the norms are computed layer by
    layer. With --no-layers only header and bookkeeping are read, however large the file is.

    For example: swarmkv snapshot info report.skv --plot report.png
    """
    from . import inspection

    if plot and not plot.lower().endswith((".png", ".svg")):
        raise click.UsageError(f"--plot {plot}: a picture should end in .png or .svg")
    rows = None
    with extra_named():
        if layers or plot:
            opened = inspection.read(path)
            with progress_bar() as progress:
                task = progress.add_task("measuring layers", total=None)
                rows, grids = inspection.measure(
                    opened,
                    grids=plot is not None,
                    on_progress=lambda done, total: progress.update(task, completed=done, total=total),
                )
            if plot:
                inspection.draw(rows, grids, plot, _title(opened.record, path, [grid.seq for grid in grids]))
        else:
            opened = inspection.glance(path)
    found = inspection.describe(opened, rows if layers else None)
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    for name, value in _header(found):
        _tell(name, value)
    if rows is None and opened.format == "skv":
        _tell(
            "checked", "header and bookkeeping; the checksum of the state was not compared (without --no-layers it is)"
        )
    if rows and layers:
        click.echo()
        _show_layers(rows)


def _title(record: Record, path: str, drawn: list[int]) -> str:
    """Above a picture: file, model, and which sequences."""
    names = [os.path.basename(path), getattr(record.identity.model, "name", "")]
    short = [name if len(name) <= 70 else f"{name[:45]}…{name[-24:]}" for name in map(clean, names) if name]
    n = len(record.layout.sequences)
    if n > len(drawn):
        what = f"the {len(drawn)} longest of {n} sequences" if len(drawn) > 1 else f"the longest of {n} sequences"
    elif n > 1:
        what = f"{n} sequences"
    else:
        what = f"{record.layout.n_tokens - record.begin:,} tokens"
    return "\n".join([short[0], ", ".join([*short[1:], what])])


def _header(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Names and values for people."""
    identity, sizes = found["identity"], found["bytes"]
    yield "file", f"{clean(found['file'])}, {_size(sizes['file'])}, {_FORMATS[found['format']]}"
    sequences = found["sequences"]
    if found["kind"] == "context":
        n = len(sequences)
        yield "kind", f"a whole context of {clean(found['architecture'])}: {n} sequence{'s' * (n > 1)}"
    elif found["kind"] == "delta":
        yield "kind", f"a delta: one sequence from position {found['begin']:,} on, to be appended to what comes before"
    else:
        yield "kind", "one sequence"
    untold = "not told by this kind of file"
    types = ", ".join(f"{kind.upper()} {' and '.join(names)}" for kind, names in found["types"].items() if names)
    if identity:
        model = identity["model"]
        yield "model", f"{clean(model['name'])}, fingerprint {clean(model['fingerprint'])[:16]}…"
        yield "engine", clean(identity["engine"])
        context = f"K {clean(identity['type_k'])}, V {clean(identity['type_v'])}"
        yield "types", types or f"none kept (of a context with {context})"
        yield "attention", "flash attention" if identity["flash_attn"] else "without flash attention"
        rotated = " and ".join(kind for kind, on in zip("KV", identity["rotation"], strict=True) if on)
        yield "rotation", f"{rotated} rows" if rotated else "none"
        yield "RoPE", _rope(identity["rope"])
        adapters = (f"{clean(a['fingerprint'])[:16]}… × {a['scale']:g}" for a in identity["adapters"])
        yield "adapters", ", ".join(adapters) or "none"
    else:
        yield "model", f"{untold}, nor is the engine, flash attention, RoPE or adapters"
        yield "types", types or "no keys or values"
    if found["v_transposed"] is not None:
        yield "V layout", "transposed, as without flash attention" if found["v_transposed"] else "by rows"
    if found["n_stream"]:
        unified = found["n_stream"] == 1
        yield "streams", "1: one cache for all sequences" if unified else f"{found['n_stream']}: one a sequence"
    if found["window"]:
        yield "window", f"{found['window']:,} tokens that windowed layers look back"
    for at, (seq, of) in enumerate(sequences.items()):
        if at == _MOST_SEQUENCES:
            yield "", f"… and {len(sequences) - at} more; --json has all"
            break
        yield ("sequences" if len(sequences) > 1 else "sequence") if at == 0 else "", _sequence(seq, of, found["begin"])
    parts = [
        f"{name} {_size(sizes[name])}"
        for name in ("keys", "values", "recurrent", "bookkeeping", "tokens", "logits")
        if sizes[name]
    ]
    yield "sizes", f"state {_size(sizes['state'])}; {', '.join(parts)}"
    damaged = sum(
        of["norm"]["not_finite"] for layer in found["layers"] or () for of in layer.values() if isinstance(of, dict)
    )
    if damaged:
        yield "not finite", f"{damaged:,} rows hold infinities or what is no number; norms are of the others"


_MOST_SEQUENCES = 8


def _sequence(seq: str, of: dict[str, Any], begin: int) -> str:
    end = of["next_position"]
    held = [f"{n:,}" for n in of["cells"]]
    cells = f", {' and '.join(held)} KV cells" if held else ""
    known = [name for name in ("tokens", "logits") if of[name]]
    kept = f"; {' and '.join(known)} kept" if known else "; tokens not kept"
    likely = f", most likely next token id {of['most_likely_next']}" if of["most_likely_next"] is not None else ""
    return f"{seq}: positions {begin:,} to {end - 1:,}{cells}{kept}{likely}"


def _rope(rope: dict[str, Any]) -> str:
    from .identity import Rope

    return clean(str(Rope(**rope)))


def _show_layers(rows: list[LayerRow]) -> None:
    """One table for the layers with keys and values, one for the recurrent ones."""
    kept = [row for row in rows if row.memory != "recurrent"]
    recurrent = [row for row in rows if row.memory == "recurrent"]
    if kept:
        show(_table(kept, "K", "V", "L2 norms of key and value rows, over all cells"))
    if recurrent:
        show(_table(recurrent, "R", "S", "L2 norms of recurrent rows, one of each a sequence"))


def _table(rows: list[LayerRow], first: str, second: str, title: str) -> Table:
    both = any(row.second for row in rows)
    table = Table(box=box.SIMPLE_HEAD, padding=0, title=title, title_justify="left")
    table.add_column("layer", no_wrap=True, justify="right")
    for name in (first, second)[: 1 + both]:
        table.add_column(f" {name}", no_wrap=True)
        for column in ("B/row", "mean", "min", "max"):
            table.add_column(column, no_wrap=True, justify="right", min_width=5 if column == "B/row" else 6)
    for row in rows:
        label = {"full": "full ", "windowed": "win "}.get(row.memory, "")
        cells = [f"{label}{row.layer}"]
        for measured in (row.first, row.second)[: 1 + both]:
            if measured is None:
                cells += [" –", "", "", "", ""]
                continue
            norm = measured.norm.to_dict()
            cells += [f" {measured.type}", str(measured.row_bytes)]
            cells += [_number(norm[name]) for name in ("mean", "min", "max")]
        table.add_row(*cells)
    return table


def _number(value: float | None) -> str:
    """Four digits or so."""
    if value is None:
        return "–"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.2f}" if abs(value) < 100 else f"{value:.4g}"


def _size(n_bytes: int) -> str:
    for unit, step in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n_bytes >= step:
            return f"{n_bytes / step:,.1f} {unit}"
    return f"{n_bytes} bytes"


def _seconds(begin: float, end: float) -> str:
    return duration(1e3 * (end - begin))


# ── restore-check ────────────────────────────────────────────────────────────────────────────────────


@snapshot.command("restore-check", short_help="Tell whether a file can be restored.")
@_file
@_model
@click.option("--n-ctx", type=click.IntRange(1), help="Context size; by default as small as fits.")
@click.option("--n-seq-max", type=click.IntRange(1), help="Sequences of the context; by default as few as fit.")
@click.option(
    "--streams/--unified", default=None, help="A cache a sequence, or one for all; by default as in the file."
)
@_flash_attn("as in the file")
@_kv_type("K", "as in the file")
@_kv_type("V", "as in the file")
@click.option("--n-tokens", type=click.IntRange(1), help="Restore only so many tokens.")
@click.option("--allow-inexact", is_flag=True, help="Also where what follows would only be equal up to rounding.")
@click.option("--quick", is_flag=True, help="Do not decode the last token again to compare logits.")
@click.pass_context
def restore_check(
    command: click.Context,
    path: str,
    model_path: str | None,
    n_ctx: int | None,
    n_seq_max: int | None,
    streams: bool | None,
    flash_attn: str | None,
    type_k: str | None,
    type_v: str | None,
    n_tokens: int | None,
    allow_inexact: bool,
    quick: bool,
) -> None:
    """Tell whether a file can be restored into a context, by doing so.

    The context is what the file wants, except for what is given here. Prints every conversion on the way and every
    reason against it. Exit code 0 if it can be restored, 1 if not.

    For example: swarmkv snapshot restore-check report.skv --n-seq-max 4 --streams
    """
    from . import inspection

    opened = inspection.glance(path)
    record, form, n_bytes = opened.record, opened.format, opened.record.layout.n_bytes
    del opened  # of llama.cpp's files, with the state in memory
    asked = {"n_ctx": n_ctx, "n_seq_max": n_seq_max, "kv_unified": None if streams is None else not streams}
    given = {"flash_attn": flash_attn and _FLASH_ATTN[flash_attn], "type_k": type_k, "type_v": type_v}
    with loaded_model(model_path) as model:
        from .arena import Arena

        with model.context(**_wanted(record, n_tokens, {**asked, **given})) as ctx, Arena(n_bytes) as arena:
            _tell("context", f"{clean(model.path.name)}: {_context(ctx)}")
            ok = _try(lambda: _load(path, form, ctx, arena), form == "llama", ctx, n_tokens, allow_inexact, quick)
    command.exit(0 if ok else 1)


def _wanted(record: Record, n_tokens: int | None, asked: dict[str, Any]) -> dict[str, Any]:
    """Arguments of the smallest context that is as the file wants it, but for what was asked for."""
    import numpy as np

    from .blob import GGML_TYPES
    from .fanout import N_BATCH
    from .record import UNKNOWN

    layout, identity = record.layout, record.identity
    if identity is UNKNOWN:
        held = [stream for cache in layout.caches for stream in cache if stream and stream.k]
        type_k = GGML_TYPES[held[0].k[0].type].name if held else "f16"
        type_v = GGML_TYPES[held[0].v[0].type].name if held and held[0].v else type_k
        flash_attn: Literal["auto"] | bool = False if layout.v_transposed else "auto"
    else:
        type_k, type_v, flash_attn = identity.type_k, identity.type_v, identity.flash_attn
        if not flash_attn and not layout.v_transposed:
            flash_attn = "auto"  # which came to "off" there
    unified = asked["kv_unified"]
    if unified is None:
        unified = layout.n_stream <= 1
    n_seq_max = asked["n_seq_max"]
    if n_seq_max is None:
        least = max(layout.sequences) + 1 if layout.whole else 1
        n_seq_max = least if unified else max(least, layout.n_stream)
    cells = [stream.cells for stream in layout.caches[0] if stream] if layout.caches else []
    owners = np.concatenate([some.owners for some in cells]) if cells else np.empty(0, int)
    n_cells = sum(map(len, cells)) if unified or not layout.whole else int(np.bincount(owners).max(initial=0))
    if n_tokens is not None:
        n_cells = min(n_cells, n_tokens)
    if layout.whole:
        n_cells += len(layout.sequences)  # a token more each, to compare logits
    wanted = {
        "n_ctx": max(n_cells * (1 if unified else n_seq_max), n_seq_max),
        "n_seq_max": n_seq_max,
        "kv_unified": unified,
        "flash_attn": flash_attn,
        "type_k": type_k,
        "type_v": type_v,
        "n_batch": max(N_BATCH, n_seq_max),
        "rope": identity.rope,
    }
    return wanted | {name: value for name, value in asked.items() if value is not None}


def _load(path: str, form: Format, ctx: Context, arena: Arena) -> Snapshot:
    from .snapshot import Snapshot

    return Snapshot.load(path, arena) if form == "skv" else Snapshot.import_llama(path, ctx, arena)


def _try(
    load: Callable[[], Snapshot], guessed: bool, ctx: Context, n_tokens: int | None, allow_inexact: bool, quick: bool
) -> bool:
    """Restore, telling about it; whether that went well. `guessed`: the file was read without knowing its model."""
    try:
        held = load()
    except IncompatibleSnapshotError as error:  # of a file that only tells its layout
        _tell("restore", click.style("not possible", fg="red"))
        _tell_all("against", error.reasons)
        return False
    except SnapshotFileError as error:
        if not guessed:
            raise
        _tell("restore", f"{click.style('not possible', fg='red')}: not a state of such a model")
        _tell("against", error)
        return False
    with held:
        if held.whole:
            what = f"{len(held.sequences)} sequences, {held.n_tokens:,} tokens"
        else:
            what = f"{held.n_tokens:,} tokens"
        found = held.can_restore(ctx, n_tokens=n_tokens, allow_inexact=allow_inexact)
        if not found:
            _tell("restore", f"{click.style('not possible', fg='red')}: {what}, {_size(held.n_bytes)}")
            _tell_all("against", found.reasons)
            return False
        begin = perf_counter()
        try:
            held.restore(ctx, n_tokens=n_tokens, allow_inexact=allow_inexact)
        except SnapshotError as error:
            _tell("restore", f"{click.style('failed', fg='red')}: {error}")
            return False
        took = _seconds(begin, perf_counter())
        done = f"{what}, {_size(held.n_bytes)}, in {took}"
        _tell("restore", f"{click.style('done', fg='green')}: {done}")
        _tell_all("conversions", found.conversions or ["none"])
        if not quick:
            _tell_all("logits", _compared(held, ctx))
    return True


def _compared(held: Snapshot, ctx: Context) -> Iterator[str]:
    """Decode each sequence's last token again, and compare the row it gives with the one that was saved."""
    tokens, logits = (
        by_sequence if isinstance(by_sequence, dict) else {0: by_sequence} if by_sequence is not None else {}
        for by_sequence in (held.tokens, held.last_logits)
    )
    if not tokens or not logits:
        yield f"not compared: the file keeps no {'logits' if tokens else 'tokens'}"
    elif not tokens.keys() & logits.keys():
        yield "not compared: the file keeps both tokens and logits of no sequence"
    for seq in sorted(tokens.keys() & logits.keys()):
        of, n = f"sequence {seq}: " if held.whole else "", len(tokens[seq])
        if ctx.position(seq) != n:
            yield "not compared: the saved ones are those after the last token, which was not restored"
            return
        try:
            ctx.remove(seq, n - 1)
            ctx.decode(tokens[seq][n - 1 :], seq=seq)
        except (PartialRemovalError, ContextFullError) as error:
            yield f"{of}not compared: {error}"
            continue
        row = ctx.logits(seq)
        if row.tobytes() == logits[seq].tobytes():
            yield f"{of}the last token, decoded again, gives the saved ones bit for bit"
        else:
            yield f"{of}the last token, decoded again by itself, gives others: {_difference(row, logits[seq])}"
            yield "(as it has to if the saved ones came from a larger batch, which sums in another order, or inexactly)"


def _difference(row: Any, saved: Any) -> str:
    import numpy as np

    with np.errstate(invalid="ignore"):
        apart = float(np.nanmax(np.abs(row - saved)))
    span = float(np.ptp(saved[np.isfinite(saved)]))
    same = "same" if row.argmax() == saved.argmax() else "another"
    return f"at most {apart:.2g} apart, of a span of {span:.3g}; {same} most likely token"


def _context(ctx: Context) -> str:
    caches = "one cache for all" if ctx.kv_unified else "a cache each"
    seqs = f"{ctx.n_seq_max} sequence{'s' * (ctx.n_seq_max > 1)}" + (f" ({caches})" if ctx.n_seq_max > 1 else "")
    return f"n_ctx {ctx.n_ctx}, {seqs}, K {ctx.type_k}, V {ctx.type_v}, flash attention {'on' if ctx.flash_attn else 'off'}"


def _tell(name: str, value: object) -> None:
    """A name and what belongs to it; on a terminal wrapped between words, in a pipe on one line."""
    lines = [str(value)]
    if out.is_terminal:
        lines = textwrap.wrap(lines[0], max(out.width - 14, 20), break_long_words=False, break_on_hyphens=False)
    for line in lines or [""]:
        click.echo(f"{click.style(f'{name:<12}', bold=True)}  {line}".rstrip())
        name = ""


def _tell_all(name: str, values: Any) -> None:
    for value in values:
        _tell(name, clean(value).replace("allow_inexact=True", "--allow-inexact"))
        name = ""


# ── slice, convert ───────────────────────────────────────────────────────────────────────────────────


@snapshot.command("slice", short_help="Write the state of the first N tokens.")
@_file
@click.argument("n_tokens", metavar="N", type=click.IntRange(1))
@_out
def slice_(path: str, n_tokens: int, out_path: str) -> None:
    """Write the state of a file's first N tokens: their cells as they are, nothing computed again.

    OUT is of the same kind as FILE, and may be FILE. State and prefix are in memory at the same time.

    For example: swarmkv snapshot slice report.skv 512 -o intro.skv
    """
    from . import inspection

    _check_target(out_path)
    opened = inspection.read(path)
    before = opened.record.layout.n_tokens
    if n_tokens > before:
        raise click.UsageError(f"N should be 1 to {before}, the tokens in {path}; is {n_tokens}")
    record, state = opened.record.slice(opened.state, n_tokens).write()
    _write(record, state, opened.format, out_path)
    click.echo(f"{clean(out_path)}: {n_tokens:,} of {before:,} tokens, {_size(os.path.getsize(out_path))}")


@snapshot.command(short_help="Write the same state for another shape of context.")
@_file
@_out
@click.option("--n-stream", type=click.IntRange(1), help="Streams: 1 for a unified cache, else one a sequence. Exact.")
@click.option(
    "--v-transposed/--no-v-transposed",
    default=None,
    help="V as contexts without flash attention keep it, or with. What follows is then equal up to rounding.",
)
@click.option("--to", "kind", type=click.Choice(["skv", "llama"]), help="Kind of file to write; by default as FILE.")
def convert(path: str, out_path: str, n_stream: int | None, v_transposed: bool | None, kind: Format | None) -> None:
    """Write the same state for a context of another shape, or as another kind of file.

    OUT may be FILE. A restore does the same conversions by itself; here they are done once, for all restores, and for
    llama.cpp's own tools, which do not. Only one sequence's state can become a file of llama.cpp's, and none can come
    back, as such a file does not tell what it was computed with.

    For example: swarmkv snapshot convert report.skv --to llama -o report.bin
    """
    from . import inspection

    _check_target(out_path)
    if n_stream is None and v_transposed is None and kind is None:
        raise click.UsageError("nothing to convert: give --n-stream, --v-transposed, --no-v-transposed or --to")
    opened = inspection.read(path)
    record, state = opened.record, opened.state
    same = os.path.exists(out_path) and os.path.samefile(path, out_path)
    if same and opened.format == "skv" and kind == "llama":
        raise click.UsageError(f"{path} would be replaced by a file that tells less and cannot come back: name another")
    if opened.format == "llama" and kind == "skv":
        raise click.UsageError(
            f"{path} does not tell what it was computed with, as a .skv file has to; "
            "Snapshot.import_llama reads it into a context and can then save it"
        )
    if n_stream is not None or v_transposed is not None:
        record, state = record.convert(state, n_stream=n_stream, v_transposed=v_transposed).write()
    kind = kind or opened.format
    _write(record, state, kind, out_path)
    layout = record.layout
    with_v = layout.parts.has_v and layout.v_transposed is not None
    laid_out = f", V {'transposed' if layout.v_transposed else 'by rows'}" if with_v else ""
    streams = f", {layout.n_stream} stream{'s' * (layout.n_stream > 1)}" if layout.n_stream else ""
    click.echo(
        f"{clean(out_path)}: {_FORMATS[kind]}, {layout.n_tokens:,} tokens{streams}{laid_out}, {_size(os.path.getsize(out_path))}"
    )


def _write(record: Record, state: Bytes, kind: Format, path: str) -> None:
    from . import skv

    if kind == "llama":
        record.save_llama(path, state)
    else:
        skv.save(path, record.contents(state))
