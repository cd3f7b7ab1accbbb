"""The report's tables: every figure, the trials, the sweeps, and other programs. Without the pictures; needs no engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..printable import one_line
from .blocks import Block, Bullets, Code, Paragraph, Strong, Table, Text
from .records import Row
from .values import (
    NONE,
    SIDES,
    activations,
    by_trial,
    count,
    finite,
    metric_name,
    metric_order,
    middle,
    number,
    one_prefill,
    percent,
    pick,
    ratios,
    seconds,
    side_of,
    sides_of,
    size,
    with_unit,
)

Rows = Sequence[Row]
Lines = list[Sequence[Text]]

_REPREFILL = SIDES[0]


def mapping(data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A part of the summary; empty where it is not there."""
    found = data.get(key)
    return found if isinstance(found, Mapping) else {}


def metrics_of(summary: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """All metrics, in the order in which they are told."""
    found = mapping(summary, "metrics")
    return {name: mapping(found, name) for name in sorted(found, key=metric_order)}


# ── this library's own ───────────────────────────────────────────────────────────────────────────────


def all_figures(summary: Mapping[str, Any]) -> Iterator[Block]:
    """Every metric with its bound, share, spread and trials."""
    lines: Lines = []
    for name, metric in metrics_of(summary).items():
        unit = metric.get("unit", "×")
        value, bound, worst, best = (with_unit(metric.get(key), unit) for key in ("median", "bound", "worst", "best"))
        of = f" ({count(metric['n_document'])} tokens)" if metric.get("n_document") else ""
        told: Text = [Strong(metric_name(name)), ": ", one_line(metric.get("what") or "", 300) + of]
        share = Strong(percent(metric.get("share_of_bound")))
        lines.append(
            (told, value, bound, share, f"{worst} … {best}", percent(metric.get("spread")), count(metric.get("n")))
        )
    if lines:
        head = (" figure", "median", "bound", "share of the bound", "worst … best", "spread", "trials")
        yield Table("Every figure; more is better in all of them", head, lines)
    else:
        yield Paragraph("Nothing was measured to its end.")


def article(summary: Mapping[str, Any]) -> Iterator[Block]:
    """The article's figures, trial by trial."""
    data, lines = mapping(summary, "article"), Lines()
    for trial in data.get("trials") or []:
        again, ours, n = mapping(trial, "reprefill"), mapping(trial, "ours"), trial.get("trial")
        told: Text = [count(n), " ", Strong("best")] if n == data.get("best_trial") else count(n)
        lines.append(
            (
                told,
                *(f"{seconds(again.get(key))} → {seconds(ours.get(key))}" for key in ("activation_s", "end_to_end_s")),
                *(f"{number(trial.get(key), 4)} %" for key in ("ttft_pct", "e2e_pct")),
                number(trial.get("score"), 4),
                f"{seconds(trial.get('redundant_prefill_s'))}, {count(trial.get('redundant_prefill_tokens'))} tokens",
            )
        )
    if lines:
        head = (" trial", "activation", "end to end", "TTFT_pct", "E2E_pct", "2·TTFT_pct + E2E_pct", "prefill removed")
        how = "out of a context that still holds the document"
        yield Table(f"The article's figures: single times, re-prefilling → {how}", head, lines)


def copies(rows: Rows) -> Iterator[Block]:
    """What moving the state takes."""
    part = pick(rows, experiment="article", strategy="")
    n_bytes, lines = middle(by_trial(part, name="state_bytes").values()), Lines()
    told = {"copyto": "np.copyto (bound)", "fork": "fork", "first_fork": "first fork in a new arena"}
    for name, what in {
        **told,
        "export": "export",
        "restore": "restore",
        "share": "share(): counts, copies nothing",
    }.items():
        took = middle(by_trial(part, name=f"{name}_s").values())
        if took:
            speed = f"{number(n_bytes / took / 1e9)} GB/s" if n_bytes and name != "share" else NONE
            shares = by_trial(part, name=f"{name}_share")
            if name == "first_fork":  # its own share is that of a warm fork
                shares = ratios(by_trial(part, name="copyto_s"), by_trial(part, name="first_fork_s"))
            lines.append((what, seconds(took), speed, percent(middle(shares.values()))))
    if lines:
        state = f"A state of {size(n_bytes)}" if n_bytes else "The state"
        first = middle(by_trial(pick(rows, experiment="article", contexts="reused"), name="export_s").values())
        head = (" copy", "time", "speed", "share of np.copyto")
        yield Table(f"{state}, moved again and again: medians of rounds", head, lines)
        if first:
            yield Paragraph(
                f"The first export of a run, which makes the arena and touches its pages, takes {seconds(first)}; it is "
                "part of every end-to-end time here."
            )


def branches(rows: Rows) -> Iterator[Block]:
    """The sweep of the number of branches."""
    yield from _sweep(
        pick(rows, experiment="branches", name="end_to_end_s"), seconds, "End to end, × as fast as re-prefilling"
    )
    if pick(rows, experiment="branches"):
        yield Paragraph(
            "Of re-prefills, N times the mean of all counts as N. Shared cells decode all prompts in one batch, which costs "
            "less than one after another: they can pass the bound."
        )


def memory(rows: Rows) -> Iterator[Block]:
    """The sweep of what is held at once."""
    part = pick(rows, experiment="memory", name="memory_bytes")
    yield from _sweep(
        part, size, "Memory added to the process; after the dot, how many times that re-prefilling's contexts add"
    )


def _sweep(part: Rows, told: Callable[[Any], str], caption: str) -> Iterator[Block]:
    """For each number of branches the sides' medians, and how many times as large the baseline's is."""
    sides, lines = sides_of(part), Lines()
    for n in sorted({row.n_branches for row in part if row.n_branches}):
        values = {
            side: middle(row.value for row in part if row.n_branches == n and side_of(row) == side) for side in sides
        }
        whole = values.get(_REPREFILL)
        cells: list[Text] = [count(n)]
        for side, value in values.items():
            times = f" · {number(whole / value)} ×" if whole and value and side != _REPREFILL else ""
            cells.append(told(value) + times)
        lines.append(cells)
    if lines:
        yield Table(caption, ("branches", *(side.name for side in sides)), lines)


_SETTING = (
    "state",
    "prefill",
    "activation: re-prefill",
    "fork + restore",
    "still held",
    "decode alone (bound)",
    "fork",
    "export",
    "restore",
)


def _setting(part: Rows, *first: str) -> Sequence[Text]:
    """What there is of two branches in one setting, as `_SETTING` says."""
    again = activations(part, _REPREFILL)
    cells = [*first, size(middle(by_trial(part, name="state_bytes").values())), seconds(one_prefill(part))]
    cells.append(seconds(middle(again.values())))
    for side in SIDES:
        if side.contexts in ("reused", "holding"):
            took = activations(part, side)
            times = middle(ratios(again, took).values())
            cells.append(seconds(middle(took.values())) + (f" · {number(times)} ×" if times else ""))
    for name in ("bound_s", "fork_s", "export_s", "restore_s"):
        cells.append(seconds(middle(by_trial(part, name=name, strategy="").values())))
    return cells


def lengths(rows: Rows) -> Iterator[Block]:
    """The sweep of the document's length, with the article's document."""
    if pick(rows, experiment="lengths"):
        part = pick(rows, experiment=("lengths", "article"))
        found = sorted({row.n_document for row in part if row.n_document})
        lines = [_setting([row for row in part if row.n_document == n], count(n)) for n in found]
        yield Table("Documents of several lengths, 2 branches", ("tokens", *_SETTING), lines)


def options(rows: Rows) -> Iterator[Block]:
    """Other settings of the context, beside the usual ones at the same length."""
    sizes = {row.n_document for row in pick(rows, experiment="options") if row.n_document}
    part = [row for row in pick(rows, experiment=("options", "lengths")) if row.n_document in sizes]
    lines = Lines()
    for flash, kv in sorted({(row.flash_attn, row.kv_type) for row in part}, reverse=True):
        some = [row for row in part if (row.flash_attn, row.kv_type) == (flash, kv)]
        lines.append(_setting(some, one_line(flash or NONE, 400), one_line(kv or NONE, 400)))
    if lines:
        told = ", ".join(map(count, sorted(sizes)))
        head = (" flash attention", " KV", *_SETTING)
        yield Table(f"Flash attention and types of the KV cache, {told} tokens, 2 branches", head, lines)


def documents(rows: Rows) -> Iterator[Block]:
    """Real ones, with whole answers."""
    part, lines = pick(rows, experiment="documents"), Lines()
    for name, n, n_branches, n_answer in dict.fromkeys(
        (r.document, r.n_document, r.n_branches, r.n_answer) for r in part
    ):
        some = [row for row in part if row.document == name]
        again, ours = (by_trial(some, strategy=who, name="end_to_end_s") for who in ("reprefill", "shared"))
        times, same = (middle(v.values()) for v in (ratios(again, ours), by_trial(some, name="same_answers")))
        took = (seconds(middle(v.values())) for v in (again, ours))
        numbers = map(count, (n, n_branches, n_answer))
        lines.append((one_line(name, 80), *numbers, *took, f"{number(times)} ×" if times else NONE, percent(same)))
    if lines:
        head = (
            " document",
            "tokens",
            "branches",
            "tokens an answer, at most",
            "re-prefill",
            "shared cells",
            "ratio",
            "same answers",
        )
        yield Table("Real documents, to the last answer's end", head, lines)


def generation(rows: Rows) -> Iterator[Block]:
    """Longer answers, in one batch and one after another."""
    found = pick(rows, experiment="generation")
    for n, n_answer, n_document in sorted({(r.n_branches or 0, r.n_answer or 0, r.n_document or 0) for r in found}):
        lines = Lines()
        told = {"one_at_a_time_s": "one after another", "together_s": "in one batch"}
        for name, what in {**told, "engine_s": "the engine's part of that (bound)"}.items():
            took = middle(by_trial(found, name=name, n_branches=n, n_answer=n_answer).values())
            if took:
                lines.append((what, seconds(took), f"{number(n * n_answer / took)} tok/s"))
        caption = f"{n} answers of {n_answer} tokens each, after {count(n_document)} shared ones"
        yield Table(caption, (" how", "time", "speed"), lines)


# ── other programs ───────────────────────────────────────────────────────────────────────────────────


def comparisons(summary: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """What was compared, with the peer's name."""
    peers = mapping(summary, "peers")
    return [(one_line(name, 60), one) for name in peers for one in mapping(peers, name).get("comparisons") or []]


def ahead(summary: Mapping[str, Any]) -> list[Text]:
    """Where a peer was ahead, by how much, and why."""
    found: list[Text] = []
    for name, one in comparisons(summary):
        ratio = finite(one.get("ratio"))
        if ratio is not None and 0 < ratio < 1:
            why = one_line(one.get("why") or "this run does not tell why", 600)
            what = one_line(one.get("what") or one.get("name"), 300)
            found.append([Strong(name), f" was ahead by {number(1 / ratio)} × in “{what}”. What decides it: {why}."])
    return found


def peers(summary: Mapping[str, Any]) -> Iterator[Block]:
    """What each took, how each was called, where one was ahead, and which were not measured."""
    known = mapping(summary, "peers")
    if not known:
        yield Paragraph(["No other program was measured; ", Code("swarmkv bench --peers"), " does that too."])
        return
    yield Paragraph(
        "On the same engine's libraries, model, document, prompts, threads and flash attention, in turns. A ratio above 1 "
        "says that swarmkv_ll was better by that factor."
    )
    figures, calls = Lines(), Lines()
    for name, one in comparisons(summary):
        ratio, unit = finite(one.get("ratio")), str(one.get("unit") or "s")
        what = one_line(one.get("what") or one.get("name"), 300)
        values = (with_unit(one.get(key), unit) for key in ("peer_value", "our_value"))
        better = NONE if ratio is None else "even" if ratio == 1 else "swarmkv_ll" if ratio > 1 else name
        figures.append((name, what, *values, Strong(f"{number(ratio)} ×"), better, count(one.get("n"))))
        calls.append((name, what, Code(str(one.get("call") or NONE)), Code(str(one.get("ours") or NONE))))
    if figures:
        head = (" program", " what was done", "it", "swarmkv_ll", "ratio", " ahead", "trials")
        yield Table("What each took; medians", head, figures)
        won = ahead(summary)
        yield Bullets(won) if won else Paragraph("No other program was ahead.")
        yield Table("How each was called", (" program", " what was done", " its call", " ours"), calls)
    items: list[Text] = []
    for name in known:
        peer = mapping(known, name)
        if peer.get("comparisons"):
            items.append([Strong(one_line(name, 60)), f": version {one_line(peer.get('version') or 'not known', 60)}"])
        else:
            reason = one_line(peer.get("reason") or "no reason was kept", 400)
            items.append([Strong(one_line(name, 60)), f" was not measured: {reason}"])
    yield Bullets(items)
