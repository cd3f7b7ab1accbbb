"""The report of a campaign: what was measured, how, how sure it is and what limits it; as Markdown and as one HTML file."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ..cache import write_atomically
from ..printable import one_line
from . import results
from .blocks import (
    Block,
    Bullets,
    Code,
    Command,
    Figure,
    Figures,
    Heading,
    Image,
    Paragraph,
    Strong,
    Table,
    Text,
    Verdict,
    markdown,
    page,
)
from .plots import PICTURES, missing
from .records import BEST, PLOTS, REPORT_HTML, REPORT_MD, RUN, SUMMARY, TRIALS, Row
from .results import mapping, metrics_of
from .values import (
    NONE,
    SIDES,
    Side,
    activations,
    by_trial,
    count,
    counted,
    duration,
    finite,
    metric_name,
    middle,
    number,
    percent,
    pick,
    seconds,
    size,
    wanted,
    with_unit,
)

_HEADLINES = (
    "activation_ratio",
    "activation_ratio_reused",
    "end_to_end_ratio_2",
    "end_to_end_ratio_8",
    "fork_share_of_memcpy",
    "restore_share_of_memcpy",
)
"""Figures that are shown first, with the share of their bound that was reached."""


def write_report(summary: Mapping[str, Any], rows: Sequence[Row], folder: Path, drawn: Sequence[Path]) -> None:
    """Write `report.md` and `report.html` into a campaign's folder.

    Parameters
    ----------
    summary, rows
        See `summary.summarise`; parts that are not there are told to be missing.
    folder : Path
    drawn : sequence of Path
        The pictures that `plots.draw` has written to the folder's `plots`; empty without matplotlib.

    Raises
    ------
    OSError
    """
    svgs = {path.stem: path.read_bytes() for path in drawn if path.suffix == ".svg"}
    title, blocks = report(summary, rows, svgs)
    write_atomically(folder / REPORT_MD, markdown(blocks, PLOTS).encode())
    write_atomically(folder / REPORT_HTML, page(title, blocks, svgs).encode())


def report(summary: Mapping[str, Any], rows: Sequence[Row], drawn: Collection[str]) -> tuple[str, list[Block]]:
    """Its title and blocks, with the pictures named in `drawn`."""
    run = _Run(summary, rows, drawn)
    title = f"swarmkv bench: {run.model}"
    parts = (_answer, _method, _machine, _results, _peers, _certainty, _limits, _left_out, _files)
    return title, [Heading(title, 1), *(block for part in parts for block in part(run))]


@dataclass(frozen=True)
class _Run:
    """What all parts of the report are written from."""

    summary: Mapping[str, Any]
    rows: Sequence[Row]
    drawn: Collection[str]

    @property
    def model(self) -> str:
        return one_line(mapping(self.summary, "model").get("name") or "a model without a name", 120)

    @property
    def settings(self) -> Mapping[str, Any]:
        return mapping(self.summary, "settings")

    @property
    def noise(self) -> Mapping[str, Any]:
        return mapping(self.summary, "noise")

    @property
    def targets(self) -> list[_Target]:
        metrics, found = metrics_of(self.summary), list[_Target]()
        for target in self.summary.get("targets") or []:
            name, share = str(target.get("metric")), target.get("of") == "share_of_bound"
            unit = "" if share else metrics.get(name, {}).get("unit", "×")
            told = f"≥ {wanted(target.get('wanted'), unit)}" + " of the bound" * share
            measured = _told_apart(target.get("measured"), target.get("wanted"), unit)
            found.append(_Target(name, told, measured, Verdict(str(target.get("verdict")))))
        return found

    def picture(self, name: str) -> Iterator[Block]:
        """It, if it was drawn."""
        if name in self.drawn:
            yield Image(name, PICTURES[name].title, PICTURES[name].shows)


@dataclass(frozen=True)
class _Target:
    """What was wanted of a metric, what came, and the verdict."""

    metric: str
    wanted: str
    measured: str
    verdict: Verdict


def _told_apart(measured: Any, goal: Any, unit: str) -> str:
    """What was measured, with as many digits as it takes to tell it from what was wanted."""
    found = [with_unit(measured, unit, digits) for digits in (3, 4, 5, 6)]
    return next((told for n, told in enumerate(found, 3) if told != with_unit(goal, unit, n)), found[0])


# ── the answer ───────────────────────────────────────────────────────────────────────────────────────


def _answer(run: _Run) -> Iterator[Block]:
    settings, machine = run.settings, mapping(run.summary, "machine")
    facts = [f"{count(settings['n_document'])} tokens"] if finite(settings.get("n_document")) else []
    facts += [counted(settings["trials"], "trial")] if isinstance(settings.get("trials"), int) else []
    facts += [one_line(machine.get("cpu") or "unknown processor", 80)]
    facts += [counted(settings["n_threads"], "thread")] if isinstance(settings.get("n_threads"), int) else []
    facts += [one_line(run.summary["created_at"])[:10]] if run.summary.get("created_at") else []
    yield Paragraph(f"{', '.join(facts)}.")
    yield Paragraph(
        "Several branches go on from one document. It can be computed anew for each of them; or once, its KV state kept, and "
        "each branch starts from there. This report tells what the second way is worth on this machine, and beside every "
        "figure its bound: what it would be if only the engine's own work took time. The share of the bound that was reached "
        "is the result."
    )
    told = [*_gains(run), *_beside_others(run), _judged(run)]
    # What is not to be relied on says so first.
    yield Bullets([*told, _quiet(run)] if run.noise.get("conclusive") else [_quiet(run), *told])
    figures = list(_headlines(run))
    yield Figures(figures) if figures else Paragraph("No figure of this run has a bound to be put beside.")
    if any((figure.share or 0) > 1 for figure in figures):
        yield Paragraph(
            "A bound is made of times that were measured too: a share a little above 100 % is how far they vary."
        )
    if run.targets:
        lines = [(metric_name(target.metric), target.wanted, target.measured, target.verdict) for target in run.targets]
        yield Table("Targets, and what came of them", (" figure", " wanted", "measured", " verdict"), lines)


def _gains(run: _Run) -> Iterator[Text]:
    """What a second branch, and two and eight of them, gained."""
    again, holding, reused = SIDES[0], _side("holding"), _side("reused")
    article, eight = (pick(run.rows, experiment=experiment) for experiment in ("article", "eight"))
    ours = holding if activations(article, holding) else reused
    first = (activations(article, ours), activations(article, again))
    two, of_eight = (
        (by_trial(part, ours, name="end_to_end_s"), by_trial(part, again, name="end_to_end_s"))
        for part in (article, eight)
    )
    for name, told, (took, before) in (
        ("activation_ratio" if ours is holding else "activation_ratio_reused", "A second branch's first logits", first),
        ("end_to_end_ratio_2", "Two branches, end to end", two),
        ("end_to_end_ratio_8", "Eight branches, end to end", of_eight),
    ):
        if metric := metrics_of(run.summary).get(name):
            said = f"{told}: {seconds(middle(took.values()))} instead of {seconds(middle(before.values()))}, "
            n_document = metric.get("n_document")
            if n_document and n_document != run.settings.get("n_document"):
                said = f"{told} ({count(n_document)} tokens): {said.partition(': ')[2]}"
            ratio, share = Strong(f"{number(metric.get('median'))} ×"), Strong(percent(metric.get("share_of_bound")))
            yield [said, ratio, " as fast; ", share, f" of the bound of {with_unit(metric.get('bound'), '×')}."]


def _side(contexts: str) -> Side:
    return next(side for side in SIDES if side.contexts == contexts)


def _beside_others(run: _Run) -> Iterator[Text]:
    compared = results.comparisons(run.summary)
    behind = [f"{name} ({number(one.get('ratio'))} ×)" for name, one in compared if (finite(one.get("ratio")) or 1) < 1]
    if compared:
        said = (
            f"Beside other programs: ahead in {len(compared) - len(behind)} of {counted(len(compared), 'comparison')}"
        )
        yield f"{said}{'; behind ' if behind else ''}{', '.join(behind)}."


_FEW = 3
"""Names that a sentence can hold."""


def _judged(run: _Run) -> Text:
    if not run.targets:
        quick = run.settings.get("mode") == "quick"
        return (
            "A quick run is not judged: with short documents fixed costs show."
            if quick
            else "There was nothing to judge."
        )
    met = sum(target.verdict.text == "met" for target in run.targets)
    said: list[Any] = [f"Of {counted(len(run.targets), 'target')}, {met} met"]
    for verdict in ("missed", "not concluded"):
        names = [f"{metric_name(t.metric)} {t.wanted}" for t in run.targets if t.verdict.text == verdict]
        told = ", ".join(names) if len(names) <= _FEW else str(len(names))
        said += ["; ", Verdict(verdict), f": {told}"] if names else []
    return [*said, "."]


def _quiet(run: _Run) -> Text:
    if all(finite(run.noise.get(key)) is None for key in _NOISE):
        return "How quiet the machine was is not known."
    if run.noise["conclusive"]:
        return "The machine was quiet enough to conclude from."
    reasons = "; ".join(one_line(reason, 400) for reason in run.noise.get("reasons") or ["no reason was kept"])
    return [
        Strong("The machine was too noisy to conclude from"),
        f": {reasons}. Only what all trials put further from its target than that is judged.",
    ]


def _headlines(run: _Run) -> Iterator[Figure]:
    metrics = metrics_of(run.summary)
    for name in _HEADLINES:
        metric = metrics.get(name, {})
        share, unit = finite(metric.get("share_of_bound")), metric.get("unit", "×")
        if share is not None:
            value, bound = (with_unit(metric.get(key), unit) for key in ("median", "bound"))
            small = f"{value} measured, {bound} possible" if unit else "np.copyto of as many bytes is 100 %"
            verdicts = [(f"wanted {t.wanted}", t.verdict) for t in run.targets if t.metric == name]
            yield Figure(metric_name(name), share, percent(share), small, verdicts)


# ── the method ───────────────────────────────────────────────────────────────────────────────────────

_WAYS = {
    ("reprefill", ""): "the baseline: a context for each branch, and each computes the whole document",
    ("snapshot", "fresh"): "the state is forked, and restored into a context that is made for the branch",
    ("snapshot", "reused"): "the state is forked, and restored into a context that is there",
    ("snapshot", "holding"): "the context still holds the document, and what the last branch added is dropped",
    ("shared", ""): "each branch is a sequence over the document's cells, and one batch decodes all prompts",
}


_TERMS = {
    "Prefill": "computing a document's tokens, which fills the KV cache.",
    "KV cache, state": "the keys and values of every token and layer that later tokens look back to; what is moved here.",
    "Cell": "the place of one token in it.",
    "Logits": "a model's score for every token that could come next; equal bits give equal answers.",
    "Snapshot, fork, restore": "a state copied out of a context into host memory; a copy of that; and back into a context.",
    "Arena": "the host memory that snapshots lie in: page-locked where that is allowed, touched when it is made.",
}


def _method(run: _Run) -> Iterator[Block]:
    settings = run.settings
    yield Heading("How it was measured")
    document, prompts, trials, rounds = (
        f"{count(settings[key])} " if finite(settings.get(key)) else otherwise
        for key, otherwise in (
            ("n_document", "some "),
            ("n_question", "some "),
            ("trials", "several "),
            ("rounds", "several "),
        )
    )
    yield Paragraph(
        "By the method of the article that this library grew from: a deterministic document (one text over and over) of "
        f"{document}tokens, two branches with prompts of {prompts}tokens, {trials}trials; then eight branches, longer "
        "answers, and sweeps. Figures are medians of the trials; a ratio is taken within each trial, and its median need not be "
        "the ratio of two medians. A spread is the largest value less the smallest one, as a share of the median."
    )
    measured = [(side, told) for side in SIDES if (told := _WAYS.get((side.strategy, side.contexts)))]
    lines = [(side.name, told) for side, told in measured if pick(run.rows, side)]
    yield Table("Ways to a branch", (" way", " what a branch does"), lines)
    said = {
        "Activation": "from the second branch's start to its first logits, in place of the time to its first token (TTFT). "
        f"With the document held, and by fork and restore: the median of {rounds}rounds, in turns with the bound.",
        "End to end": "from the first context made to the last branch's first logits; contexts made and closed included.",
        "Prefill removed": "what the baseline computes of the document after the first branch.",
        "TTFT_pct, E2E_pct": "by how many per cent activation and end to end are shorter than with re-prefilling. The "
        "article's best trial is the one with the largest 2·TTFT_pct + E2E_pct; everything else here goes by medians.",
        "Bounds": "of activation, the decode of the same prompt and nothing else (B). Of N branches end to end, one context, "
        "one prefill and N such decodes (C + P + N·B, against N·(C + P + B)); one decode where all are in one batch. Of a copy, np.copyto of as many bytes. Each "
        "trial is put beside its own.",
        "In turns": "both sides of a comparison compute 128 tokens at a time, always the one that is further behind, "
        "so that a slow minute falls on both. First trials of everything come first, then all second ones.",
        "Warm": "a short document was decoded several times before anything was measured. " + _pinned(run),
        "Same answers": "each branch's first logits were compared with the baseline's, bit for bit. "
        + _identical(run.rows),
        "Verdicts": "by the median, where all trials fall on one side of the target and the machine was quiet; otherwise "
        "nothing is concluded.",
    }
    yield Bullets([[Strong(name), ": ", told] for name, told in said.items()])
    yield Bullets([[Strong(name), ": ", told] for name, told in _TERMS.items()])


def _pinned(run: _Run) -> str:
    pinned = run.settings.get("pinned_threads")
    if pinned is None:
        return "Whether threads were bound to processors was not kept."
    return "Each thread was bound to a processor of its own." if pinned else "Threads were not bound to processors."


def _identical(rows: Sequence[Row]) -> str:
    said = ""
    for strategy, name in (("snapshot", "Snapshots"), ("shared", "Shared cells")):
        found = [row.value for row in pick(rows, name="identical", strategy=strategy)]
        off = [row.value for row in pick(rows, name="logits_off", strategy=strategy)]
        same = sum(value == 1 for value in found)
        if found:
            said += f"{name}: the same bits in {same} of {counted(len(found), 'case')}"
            said += f", off by {number(max(off))} at most. " if same < len(found) and off else ". "
        if strategy == "snapshot" and same < len(found):
            said += "That is a fault: a snapshot's branch is promised the same bits. "
        if strategy == "shared" and same < len(found):
            said += "Beside other sequences the engine sums in another order."
    return said.strip() or "Nothing of that was kept."


_LABELS = {
    "cpu": "processor",
    "cpus": "processors in use",
    "flash_attn": "flash attention",
    "memory_bytes": "memory",
    "memory_available_bytes": "of it free at the start",
    "pinned": "page locking",
    "python": "Python",
    "stamp": "engine's stamp",
    "waiting": "how threads wait",
    "name": "file",
    "n_bytes": "size",
    "n_params": "parameters",
    "n_layer": "layers",
    "n_ctx_train": "context it was trained on (tokens)",
    "kv_bytes_per_token": "state per token",
    "state_bytes_per_token": "state per token",
}


def _machine(run: _Run) -> Iterator[Block]:
    yield Heading("Machine and model")
    threads = {"threads of the engine": run.settings["n_threads"]} if run.settings.get("n_threads") else {}
    for title, more in (("machine", threads), ("model", {})):
        known = {**mapping(run.summary, title), **more}
        lines = [
            (_LABELS.get(key, one_line(key.replace("_", " "), 60)), _shown(key, value)) for key, value in known.items()
        ]
        caption = f"The {title}"
        yield Table(caption, (" ", " "), lines) if lines else Paragraph(f"{caption} is not known.")


def _shown(key: str, value: Any) -> str:
    if finite(value) is not None:
        return size(value) if "bytes" in key else count(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return one_line(", ".join(map(str, value)), 1000) or "none"
    return one_line(NONE if value in (None, "") else value, 1000)


# ── results, and how far to trust them ───────────────────────────────────────────────────────────────


def _results(run: _Run) -> Iterator[Block]:
    yield Heading("Results")
    if not run.drawn:
        yield Paragraph(["No pictures were drawn: that takes matplotlib (", Code("pip install matplotlib"), ")."])
    yield from results.all_figures(run.summary)
    rows = run.rows
    for title, picture, tables in (
        ("Activation of the second branch", "activation", [results.article(run.summary)]),
        ("End to end", "end_to_end", []),
        ("Prefill and copies", "prefill_breakdown", [results.copies(rows)]),
        ("More branches", "branches", [results.branches(rows)]),
        ("Longer documents", "lengths", [results.lengths(rows)]),
        ("Memory", "memory", [results.memory(rows)]),
        ("Other settings of the context", "", [results.options(rows)]),
        ("Whole answers", "", [results.generation(rows), results.documents(rows)]),
    ):
        found = [*run.picture(picture), *(block for table in tables for block in table)]
        if found:
            yield from (Heading(title, 3), *found)


def _peers(run: _Run) -> Iterator[Block]:
    yield Heading("Beside other programs")
    yield from results.peers(run.summary)


_NOISE = {
    "decode_spread": "spread of a decode that is always the same (slow tenth less fast tenth, as a share of the median)",
    "copy_spread": "spread of a copy that is always the same",
    "others_cpu": "processors' time that other processes took, mean",
    "steal": "processors' time that a hypervisor took, mean",
}

_SWEEPS = ("branches", "lengths", "options", "memory", "documents")


def _certainty(run: _Run) -> Iterator[Block]:
    yield Heading("How sure it is")
    yield Paragraph(_quiet(run))
    yield from run.picture("consistency")
    lines = [
        (told, percent(run.noise.get(key))) for key, told in _NOISE.items() if finite(run.noise.get(key)) is not None
    ]
    if lines:
        yield Table("Noise, over all of the run", (" what", "share"), lines)
    items: list[Text] = []
    if unsure := [f"{metric_name(t.metric)} {t.wanted}" for t in run.targets if t.verdict.text == "not concluded"]:
        items.append(f"Not concluded, for trials fall on both sides or the machine was noisy: {', '.join(unsure)}.")
    spreads = {name: s for name, m in metrics_of(run.summary).items() if (s := finite(m.get("spread"))) is not None}
    if spreads:
        widest = max(spreads, key=lambda name: spreads[name])
        said = f"Spread over the trials: {percent(median(spreads.values()))} in the median of all figures"
        items.append(f"{said}, {percent(spreads[widest])} at most ({metric_name(widest)}).")
    once = [name for name in _SWEEPS if {row.trial for row in pick(run.rows, experiment=name)} == {1}]
    if once:
        items.append(f"Measured once, so without a spread: {', '.join(once)}.")
    items.append(
        "Seconds are this machine's in that hour. Shares and ratios are of times taken in turns, and carry over better."
    )
    yield Bullets(items)


def _limits(run: _Run) -> Iterator[Block]:
    yield Heading("What limits it")
    lines = []
    for name, metric in metrics_of(run.summary).items():
        share = finite(metric.get("share_of_bound"))
        left = NONE if share is None else "not measurable" if share >= 1 else percent(1 - share)
        lines.append((metric_name(name), percent(share), left, one_line(metric.get("limited_by") or NONE, 300)))
    if lines:
        yield Table("Bounds", (" figure", "share reached", "left to gain", " what decides it"), lines)
    yield Paragraph(
        "llama.cpp has no public interface by which host memory could become a context's KV cache, so a restore is a copy "
        "where the context does not still hold the document. Prefill and decode are the engine's own."
    )


def _left_out(run: _Run) -> Iterator[Block]:
    yield Heading("What was left out")
    lines = [one_line(line, 600) for line in run.summary.get("skipped") or []]
    lines += [why for name in PICTURES if (why := missing(name, run.rows))]
    yield Bullets(lines) if lines else Paragraph("Nothing.")


def _files(run: _Run) -> Iterator[Block]:
    yield Heading("Files, and how to do it again")
    files = {
        TRIALS: "the values of every case, a line each; of rounds their median",
        SUMMARY: "medians, bounds, shares, verdicts, noise, machine",
        BEST: "the article's best trial",
        RUN: "settings and state of the run",
        **({f"{PLOTS}/": "the pictures, as PNG and SVG"} if run.drawn else {}),
        REPORT_HTML: "this report, in one file",
        REPORT_MD: "the same as text",
    }
    yield Bullets([[Code(name), f": {told}"] for name, told in files.items()])
    options = " --quick" * (run.settings.get("mode") == "quick") + " --peers" * bool(run.settings.get("peers"))
    yield Command(str(run.summary.get("command") or f"swarmkv bench{options}"))
    begun, took = run.summary.get("created_at"), finite(run.summary.get("seconds"))
    said = f"Begun {one_line(begun, 40)}" if begun else "When it began was not kept"
    yield Paragraph(said + (f"; it took {duration(took)}." if took else "."))
