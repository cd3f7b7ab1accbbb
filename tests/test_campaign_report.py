"""Pictures and report of a campaign, from made-up rows of about the size that a machine with two cores gives."""

from __future__ import annotations

import base64
import copy
import random
import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any
from xml.etree import ElementTree

import pytest
from helpers import run_ok
from markdown_it import MarkdownIt
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from swarmkv_ll.campaign import plots
from swarmkv_ll.campaign.blocks import (
    Bullets,
    Code,
    Command,
    Heading,
    Paragraph,
    Strong,
    Table,
    Verdict,
    markdown,
    page,
)
from swarmkv_ll.campaign.records import Case, Row, rows_of
from swarmkv_ll.campaign.report import report, write_report
from swarmkv_ll.campaign.summary import summarise
from swarmkv_ll.campaign.values import count, duration, number, percent, seconds, size, wanted, with_unit

WAYS = (("shared", ""), ("snapshot", "holding"), ("snapshot", "reused"), ("snapshot", "fresh"))


class Machine:
    """Rows of a campaign on a machine that prefills 140 tokens a second, `faster` times as fast, and some noise."""

    def __init__(self, trials: int = 3, *, faster: float = 1.0, noise: float = 0.02, seed: int = 1) -> None:
        self.trials, self.faster, self.noise, self.random = trials, faster, noise, random.Random(seed)
        self.base = Case("", document="deterministic", flash_attn="on", kv_type="f16")

    def about(self, seconds: float) -> float:
        return seconds / self.faster * self.random.lognormvariate(0, self.noise)

    def prefill(self, n: int) -> float:
        return self.about(n / 170 * (1 + n / 16000))

    def branch(self, n: int) -> float:
        return self.about(0.04 + n * 2.6e-5)

    def fan(self, experiment: str, n_document: int, n: int, trial: int = 1, **known: Any) -> Iterator[Row]:
        """What `experiments.fan` gives."""
        case = replace(self.base, experiment=experiment, trial=trial, n_document=n_document, n_branches=n, **known)
        a_copy, alone, prefill = self.about(n_document * 2.3e-6), self.branch(n_document), self.prefill(n_document)
        copies = {"copyto_s": a_copy, "fork_s": a_copy * 1.02, "export_s": a_copy * 1.06, "restore_s": a_copy * 1.14}
        copies |= {"first_fork_s": a_copy * 1.01, "share_s": 1.1e-5, "state_bytes": 23_052.0 * n_document}
        copies |= {f"{name}_share": a_copy / copies[f"{name}_s"] for name in ("fork", "export", "restore")}
        yield from rows_of(case, copies | {"bound_s": alone, "first_fork_share": 1.01})
        again = [(self.about(0.03), self.prefill(n_document), self.branch(n_document)) for _ in range(n)]
        whole = dict(zip(("context_s", "prefill_s", "branch_s"), map(sum, zip(*again, strict=True)), strict=True))
        both = {"activation_s": sum(again[-1]), "end_to_end_s": sum(whole.values())}
        yield from rows_of(case, whole | both, "reprefill", "fresh")
        for strategy, contexts in WAYS:
            values = {"context_s": self.about(0.03), "prefill_s": prefill}
            if strategy == "shared":
                values |= {"fork_s": 2e-4, "branch_s": self.branch(n_document) * (0.6 + 0.4 * n)}
                active = sum(values[name] for name in ("fork_s", "branch_s"))
            else:
                values |= {"export_s": self.about(a_copy), "branch_s": n * self.branch(n_document)}
                values["restore_s"] = n * (3e-5 if contexts == "holding" else copies["restore_s"])
                if contexts != "holding":
                    values["fork_s"] = n * copies["fork_s"]
                active = sum(values.get(name, 0) for name in ("fork_s", "restore_s", "branch_s")) / n
                if contexts == "fresh":
                    values["context_s"] += n * 0.03
                    active += 0.03
            values |= {"activation_s": active, "end_to_end_s": sum(values.values())}
            values |= {"identical": float(strategy != "shared"), "same_token": 1.0, "logits_off": 0.0}
            yield from rows_of(case, values, strategy, contexts)
        for contexts, share in (("holding", 0.997), ("reused", 0.92)):
            reached = share * self.random.lognormvariate(0, self.noise / 4)
            values = {"activation_median_s": alone / reached, "bound_share": reached}
            yield from rows_of(case, values, "snapshot", contexts)

    def branches(self, n_document: int, counts: Iterable[int]) -> Iterator[Row]:
        case = replace(self.base, experiment="branches", n_document=n_document)
        prefill, alone = self.prefill(n_document), self.branch(n_document)
        for n in counts:
            told = replace(case, n_branches=n)
            yield from rows_of(told, {"end_to_end_s": n * (prefill + alone)}, "reprefill", "fresh")
            together = alone * (0.6 + 0.4 * n)
            yield from rows_of(told, {"end_to_end_s": prefill + together, "prefill_s": prefill}, "shared")
            yield from rows_of(
                told, {"end_to_end_s": prefill + n * alone + 0.03, "branch_s": n * alone}, "snapshot", "holding"
            )

    def memory(self, n_document: int, counts: Iterable[int]) -> Iterator[Row]:
        for n in counts:
            case = replace(self.base, experiment="memory", n_document=n_document, n_branches=n)
            for strategy, n_bytes in (
                ("reprefill", 59e6 * n),
                ("snapshot", 59e6 + 23.1e6 * n),
                ("shared", 62e6 + 3e5 * n),
            ):
                yield from rows_of(case, {"memory_bytes": n_bytes}, strategy)

    def peers(self, trial: int) -> Iterator[Row]:
        for peer, name, theirs, ours in PEERS_MEASURED:
            case = replace(self.base, experiment="peers", trial=trial, document=peer)
            for who, value in ((peer, theirs), ("swarmkv_ll", ours)):
                yield from rows_of(case, {name: value * self.random.lognormvariate(0, self.noise)}, who)

    def rows(self, *, n_document: int = 3501, sweeps: bool = True, peers: bool = True) -> list[Row]:
        """A whole campaign's, in its order."""
        found: list[Row] = []

        def begun(trial: int, more: Iterable[Row]) -> None:
            yardstick = {"decode_s": self.about(0.05), "copy_s": self.about(0.004)}
            load = {"others_cpu": 0.02 + 0.01 * self.random.random(), "steal": 0.004 * self.random.random()}
            found.extend(rows_of(Case("noise", trial), yardstick | load))
            found.extend(more)

        for trial in range(1, self.trials + 1):
            begun(trial, self.fan("article", n_document, 2, trial))
            begun(trial, self.fan("eight", n_document, 8, trial))
            case = replace(self.base, experiment="generation", trial=trial, n_document=1000, n_branches=8, n_answer=32)
            times = {"one_at_a_time_s": self.about(6.1), "together_s": self.about(3.9), "engine_s": self.about(3.85)}
            begun(trial, rows_of(case, times))
            if peers:
                begun(trial, self.peers(trial))
        if sweeps:
            begun(1, self.branches(1000, (1, 2, 4, 8, 16, 32, 64)))
            for n in (512, 1000, 2000, 8000):
                begun(1, self.fan("lengths", n, 2))
            begun(1, self.fan("options", 1000, 2, kv_type="q8_0"))
            begun(1, self.fan("options", 1000, 2, flash_attn="off"))
            begun(1, self.memory(1000, (1, 2, 4, 8, 16, 32)))
            case = replace(
                self.base, experiment="documents", document="sample_spec", n_document=2950, n_branches=3, n_answer=32
            )
            known = {"end_to_end_s": self.about(24.0), "prefill_s": self.about(20.0), "same_answers": 1.0}
            begun(1, rows_of(case, known, "shared"))
            found.extend(rows_of(case, {"end_to_end_s": self.about(66.0), "prefill_s": self.about(60.0)}, "reprefill"))
        return found


PEERS_MEASURED = (
    ("llama-cpp-python", "save_load_s", 0.46, 0.0231),
    ("llama-cpp-python", "ram_cache_s", 0.31, 0.152),
    ("llama-batched-bench", "fan_out_vs_llama_batched_bench_per_s", 79.0, 71.0),
    ("llama-server", "fan_out_vs_llama_server_per_s", 6.1, 61.0),
)
PEERS_TOLD = {
    "llama-cpp-python": {
        "version": "0.3.36",
        "comparisons": {
            "save_load": {
                "what": "one state saved and loaded",
                "call": "Llama.save_state(), Llama.load_state(state)",
                "ours": "Context.snapshot(arena), Snapshot.restore(ctx)",
                "unit": "s",
            },
            "ram_cache": {
                "what": "a second prompt after one document",
                "call": "Llama.set_cache(LlamaRAMCache())",
                "ours": "Snapshot.fork(), restore, decode",
                "unit": "s",
            },
        },
    },
    "llama-batched-bench": {
        "version": "0.5.0",
        "comparisons": {
            "fan_out_vs_llama_batched_bench": {
                "what": "8 branches of 32 tokens over 1,000 shared ones",
                "call": "llama-batched-bench -pps -npp 1000 -ntg 32 -npl 8",
                "ours": 'fan_out(strategy="shared")',
                "unit": "tok/s",
                "why": "it computes no sampler: each token is the next number",
            }
        },
    },
    "llama-server": {
        "version": "0.5.0",
        "comparisons": {
            "fan_out_vs_llama_server": {
                "what": "8 branches of one warm document that arrive together",
                "call": "llama-server -np 9 -kvu --cache-ram 0",
                "ours": 'fan_out(strategy="shared")',
                "unit": "tok/s",
            }
        },
    },
}
RUN = {
    "created_at": "2026-11-29T22:00:00+00:00",
    "seconds": 1834.2,
    "command": "swarmkv bench --peers --out results",
    "settings": {
        "mode": "full",
        "n_document": 3501,
        "n_question": 5,
        "trials": 3,
        "n_threads": 2,
        "peers": True,
        "documents": ["sample_spec"],
    },
    "pinned_threads": True,
    "machine": {
        "cpu": "AMD EPYC 7B13",
        "cpus": 2,
        "memory_bytes": 25_277_218_816,
        "memory_available_bytes": 23_100_000_000,
        "kernel": "Linux 6.1.0",
        "python": "3.11.2",
        "numpy": "2.3.5",
        "engine": "llama.cpp 0.5.0 at 0c1e57098bba",
        "stamp": "a1b2c3d4",
        "compiler": "GNU 12.2.0",
        "instruction_sets": ["AVX2", "FMA", "F16C", "BMI2"],
        "devices": [],
        "waiting": "spins, then sleeps",
        "pinned": "locked",
        "huge_pages": "madvise",
    },
    "model": {
        "name": "SmolLM2-135M-Instruct.Q4_1.gguf",
        "n_bytes": 98_000_000,
        "n_layer": 30,
        "n_ctx_train": 8192,
        "kv_bytes_per_token": 23040,
    },
    "peers": PEERS_TOLD,
    "skipped": [],
}


ODD = "<script>alert(1)</script>|*b*_i_`c`$x$&amp;[l](http://a.b)~\\ 審査\x01\n# h"
"""A name with all that HTML, Markdown, mathtext and XML could stumble over."""


def odd_run() -> dict[str, Any]:
    """Every text from outside is odd."""
    run = copy.deepcopy(RUN)
    run["model"]["name"] = ODD * 3
    run["machine"] |= {"cpu": ODD * 3, "kernel": ODD}
    run["skipped"] = [ODD, "1. not a list", "- nor this", "# nor a heading"]
    run["command"] = f"swarmkv bench --doc '{ODD}'"
    for peer in run["peers"].values():
        peer["version"] = ODD
        for one in peer["comparisons"].values():
            one |= {"what": ODD, "call": f"``{ODD}`", "ours": f"{ODD}`", "why": ODD}
    return run


# ── values ───────────────────────────────────────────────────────────────────────────────────────────


def test_numbers_have_three_digits_and_a_unit() -> None:
    assert [number(x) for x in (0.98349, 25.349, 163.5, 12_345.6, 9.996, 0.09996, 0, -1.5, 1e-7)] == [
        *("0.983", "25.3", "164", "12,300", "10.0", "0.100", "0", "-1.50", "1.00e-07")
    ]
    assert [number(x) for x in (None, float("nan"), float("inf"), "1", True)] == ["–"] * 5
    assert [seconds(x) for x in (25.34, 0.1304, 0.0081, 1.1e-5, 0, None)] == [
        *("25.3 s", "130 ms", "8.10 ms", "11.0 µs", "0 s", "–")
    ]
    assert [size(x) for x in (80_705_052, 1.5e9, 999, 23_040)] == ["80.7 MB", "1.50 GB", "999 B", "23.0 kB"]
    assert [percent(x) for x in (0.98349, 1, 1.1e-16)] == ["98.3 %", "100 %", "0 %"]
    assert [with_unit(0.5, unit) for unit in ("", "×", "s", "tok/s")] == ["50.0 %", "0.500 ×", "500 ms", "0.500 tok/s"]
    assert [wanted(0.98, ""), wanted(120.0, "×"), wanted(1.97, "×")] == ["98 %", "120 ×", "1.97 ×"]
    assert [duration(x) for x in (44.0, 750.0, 7265.0)] == ["44.0 s", "12 min 30 s", "2 h 1 min"]
    assert [count(3501), count(2.5), count(None)] == ["3,501", "2.50", "–"]


# ── pictures ─────────────────────────────────────────────────────────────────────────────────────────


def shapes() -> dict[str, tuple[list[Row], dict[str, Any]]]:
    """Rows and summary of runs that differ in what they hold."""
    rows = {
        "full": Machine(3).rows(),
        "ten noisy trials": Machine(10, noise=0.3).rows(sweeps=False),
        "tiny": Machine(3, faster=3e4).rows(n_document=64),
        "cannot go back": [
            row
            for row in Machine(1).rows()
            if row.contexts != "holding" and not row.name.startswith(("bound", "activation_m"))
        ],
        "baseline only": [row for row in Machine(2).rows() if row.strategy == "reprefill"],
    }
    return {name: (known, summarise(odd_run() if name == "tiny" else RUN, known)) for name, known in rows.items()}


SHAPES = shapes()
FULL, SUMMARY = SHAPES["full"]


@cache
def picture(name: str, shape: str = "full") -> Figure:
    rows, summary = SHAPES[shape]
    return plots.figure(name, summary, rows)


@cache
def texts(made: Figure) -> list[tuple[str, Bbox]]:
    """All that is written, and where."""
    made.draw_without_rendering()
    found = [text for text in made.findobj(Text) if text.get_visible() and text.get_text().strip()]
    for ax in made.axes:
        for axis in (ax.xaxis, ax.yaxis):
            low, high = sorted(axis.get_view_interval())
            for tick in axis.get_major_ticks():
                if not low <= tick.get_loc() <= high:
                    found = [text for text in found if text not in (tick.label1, tick.label2)]
    return [(text.get_text(), text.get_window_extent()) for text in found]


@pytest.mark.filterwarnings("ignore:Glyph")
@pytest.mark.parametrize(
    ("shape", "name"),
    [
        *(("full", name) for name in plots.PICTURES),
        *(("tiny", name) for name in plots.PICTURES),
        *(("ten noisy trials", name) for name in ("end_to_end", "activation", "consistency")),
        *(("cannot go back", name) for name in ("end_to_end", "lengths")),
        *(("baseline only", name) for name in ("activation", "branches", "lengths")),
    ],
)
def test_nothing_overlaps_or_is_cut_off(shape: str, name: str) -> None:
    assert plots.missing(name, SHAPES[shape][0]) is None
    made = picture(name, shape)
    found = texts(made)
    for text, box in found:
        assert min(box.x0, box.y0, made.bbox.x1 - box.x1, made.bbox.y1 - box.y1) >= 0, text
    for (a, one), (b, other) in combinations(found, 2):
        shared = Bbox.intersection(one, other)
        assert shared is None or min(shared.width, shared.height) <= 1, (a, b)
    for legend in made.legends:
        for ax in made.axes:
            assert not legend.get_window_extent().overlaps(ax.get_tightbbox()), "the legend lies over the axes"


@pytest.mark.parametrize("name", plots.PICTURES)
def test_titles_subtitles_and_units(name: str) -> None:
    made = picture(name)
    written = [text for text, _ in texts(made)]
    assert plots.PICTURES[name].title in written
    assert "SmolLM2-135M-Instruct.Q4_1.gguf on AMD EPYC 7B13, 2 threads" in written
    if name != "consistency":
        assert any("tokens" in text and "trial" in text for text in written)
        assert all(ax.get_xlabel() for ax in made.axes)
    for ax in made.axes:
        for label in (ax.get_xlabel(), ax.get_ylabel()):
            assert not label or re.search(
                r"\((s|ms|s, log scale|×|%|MB|GB|tokens)\)|% of|branches|in the order", label
            ), label


def test_files(tmp_path: Path) -> None:
    """A PNG and an SVG each, and twice the same."""
    rows = [row for row in FULL if row.experiment == "memory"]
    paths = plots.draw(SUMMARY, rows, tmp_path)
    assert [path.name for path in paths] == ["memory.png", "memory.svg"]
    assert struct.unpack(">II", paths[0].read_bytes()[16:24]) == (1600, 760)
    assert ElementTree.fromstring(paths[1].read_bytes()).tag == "{http://www.w3.org/2000/svg}svg"
    first = [path.read_bytes() for path in paths]
    assert [path.read_bytes() for path in plots.draw(SUMMARY, rows, tmp_path)] == first
    assert plots.missing("branches", rows) == (
        "Scaling with the number of branches: not drawn, for this run measured no sweep of the number of branches"
    )


def test_bars_are_medians_and_the_bound_is_a_prefill_and_the_decodes() -> None:
    def of(name: str, strategy: str, contexts: str = "fresh", experiment: str = "article") -> list[float]:
        return [
            r.value
            for r in FULL
            if (r.experiment, r.name, r.strategy, r.contexts) == (experiment, name, strategy, contexts)
        ]

    left, right = picture("end_to_end").axes
    widths = [bar.get_width() for bar in left.patches]
    assert widths == pytest.approx(
        [
            median(of("end_to_end_s", "reprefill")),
            *(median(of("end_to_end_s", "snapshot", contexts)) for contexts in ("fresh", "reused", "holding")),
            median(of("end_to_end_s", "shared", "")),
        ]
    )
    bounds = [
        again / 8 + 7 * alone
        for again, alone in zip(
            of("end_to_end_s", "reprefill", experiment="eight"), of("bound_s", "", "", experiment="eight"), strict=True
        )
    ]
    dashed = next(
        line for line in right.lines if len(line.get_xdata()) == 2 and line.get_xdata()[0] == line.get_xdata()[1]
    )
    assert dashed.get_xdata()[0] == pytest.approx(median(bounds))


def test_pictures_tell_the_summary_s_figures() -> None:
    """Ratios and shares of trials, in the middle: not those of the middles."""
    written = [text for text, _ in texts(picture("activation"))]
    for name in ("activation_ratio", "activation_ratio_reused", "activation_ratio_fresh"):
        metric = SUMMARY["metrics"][name]
        told = f" · {number(metric['median'])} × · {percent(metric['share_of_bound'])} of the bound"
        assert sum(text.endswith(told) for text in written) == 1
    written = [text for text, _ in texts(picture("end_to_end"))]
    for n in (2, 8):
        metric = SUMMARY["metrics"][f"end_to_end_ratio_{n}"]
        assert any(text.endswith(f" · {number(metric['median'])} ×") for text in written)
        titles = [text for text in written if text.startswith(f"{n} branches\nbound: ")]
        assert [title.rpartition(" · ")[2] for title in titles] == [f"{number(metric['bound'])} ×"]


def test_documents_that_differ_are_told_apart() -> None:
    rows = [replace(row, n_document=256) if row.experiment == "eight" else row for row in FULL]
    for name in ("end_to_end", "prefill_breakdown"):
        written = [text for text, _ in texts(plots.figure(name, SUMMARY, rows))]
        assert any(text.startswith("8 branches, 256 tokens") for text in written)
        assert any(text.startswith("2 branches, 3,501 tokens") for text in written)
        assert any(text.startswith("Documents of 256 to 3,501 tokens; median of 3 trials") for text in written)


# ── report ───────────────────────────────────────────────────────────────────────────────────────────


class Page(HTMLParser):
    """What a browser would make of it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.cells: list[list[str]] = []
        self.said = ""
        self.feed(text)
        assert not self.open, "a tag was not closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "br", "hr"):
            self.open.append(tag)
        if tag == "tr":
            self.cells.append([])
        elif tag in ("td", "th"):
            self.cells[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" in self.open:
            return
        self.said += data
        if {"td", "th"} & set(self.open):
            self.cells[-1][-1] += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.tags if name == tag]


def html_of(summary: dict[str, Any], rows: list[Row], drawn: dict[str, bytes] | None = None) -> Page:
    title, blocks = report(summary, rows, drawn or {})
    return Page(page(title, blocks, drawn or {}))


def spaced(text: str) -> str:
    return " ".join(text.split())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A full run's report with two of its pictures."""
    made = tmp_path_factory.mktemp("run")
    kept = [row for row in FULL if row.experiment in ("memory", "branches")]
    write_report(SUMMARY, FULL, made, plots.draw(SUMMARY, kept, made / "plots"))
    return made


def test_one_file_that_needs_nothing_else(folder: Path) -> None:
    text = (folder / "report.html").read_text(encoding="utf-8")
    read = Page(text)
    assert not read.all("script")
    assert not read.all("link")
    assert not read.all("iframe")
    ids = {attrs["id"] for _, attrs in read.tags if attrs.get("id")}
    assert {attrs["href"] for attrs in read.all("a")} == {f"#{name}" for name in ids}
    assert len(ids) == 8
    for image in read.all("img"):
        kind, _, data = str(image["src"]).partition(",")
        assert kind == "data:image/svg+xml;base64"
        assert ElementTree.fromstring(base64.b64decode(data)).tag.endswith("svg")
        assert image["alt"]
    assert [str(image["alt"]).partition(".")[0] for image in read.all("img")] == [
        "Scaling with the number of branches",
        "Memory against branches",
    ]
    assert "url(" not in text
    assert "@import" not in text
    assert "http" not in re.sub(r"base64,[^\"]*|http-equiv", "", text)
    policy = next(meta for meta in read.all("meta") if meta.get("http-equiv") == "Content-Security-Policy")
    assert str(policy["content"]).startswith("default-src 'none'")


def test_markdown_has_the_same_and_names_its_pictures(folder: Path) -> None:
    text = (folder / "report.md").read_text(encoding="utf-8")
    read = Page(MarkdownIt("commonmark").enable("table").render(text))
    assert [attrs["src"] for attrs in read.all("img")] == ["plots/branches.png", "plots/memory.png"]
    for attrs in read.all("img"):
        assert (folder / str(attrs["src"])).is_file()
    page_ = Page((folder / "report.html").read_text(encoding="utf-8"))
    tables = [[spaced(cell) for cell in row] for row in page_.cells]
    assert [row for row in tables if row not in [[spaced(cell) for cell in found] for found in read.cells]] == []


def test_every_figure_is_told_with_its_bound_share_and_verdict() -> None:
    read = html_of(SUMMARY, FULL)
    rows = [[spaced(cell) for cell in row] for row in read.cells]
    for metric in SUMMARY["metrics"].values():
        values = [with_unit(metric[key], metric["unit"]) for key in ("median", "bound")]
        values.append(percent(metric["share_of_bound"]))
        assert any(row[1:4] == values for row in rows), metric["what"]
        assert any(row[-1] == metric["limited_by"] for row in rows)
    verdicts = [row[3] for row in rows if len(row) == 4 and row[1].startswith("≥")]
    signs = {"met": "✓ met", "missed": "✗ missed", "not concluded": "? not concluded"}
    assert verdicts == [signs[target["verdict"]] for target in SUMMARY["targets"]]
    assert "missed" in {target["verdict"] for target in SUMMARY["targets"]}
    for part in ("medians of the trials", "bit for bit", "Each thread was bound", "P + N·B", "2·TTFT_pct + E2E_pct"):
        assert part in spaced(read.said)
    assert "swarmkv bench --peers --out results" in read.said


def test_where_a_peer_is_ahead_it_says_so_and_why() -> None:
    said = spaced(html_of(SUMMARY, FULL).said)
    ratio = SUMMARY["peers"]["llama-batched-bench"]["comparisons"][0]["ratio"]
    assert ratio < 1
    assert (
        f"llama-batched-bench was ahead by {number(1 / ratio)} × in “8 branches of 32 tokens over 1,000 shared ones”"
        in said
    )
    why = SUMMARY["peers"]["llama-batched-bench"]["comparisons"][0]["why"]
    assert f"What decides it: {why}." in said
    assert "llama-batched-bench -pps -npp 1000 -ntg 32 -npl 8" in said
    assert "No other program was ahead" not in said


def test_what_was_not_measured_is_told() -> None:
    run = copy.deepcopy(RUN)
    run["settings"]["mode"] = "quick"
    run["peers"]["llama-server"] = {"reason": "llama-server is not built", "version": None, "comparisons": {}}
    run["skipped"] = ["documents of 8,000 tokens: the model was trained on 2,048"]
    rows = [row for row in Machine(2).rows(sweeps=False) if row.document != "llama-server"]
    said = spaced(html_of(summarise(run, rows), rows).said)
    assert "llama-server was not measured: llama-server is not built" in said
    assert "documents of 8,000 tokens: the model was trained on 2,048" in said
    assert "Scaling with the document's length: not drawn" in said
    assert "Memory against branches: not drawn" in said
    assert "A quick run is not judged" in said
    assert "No pictures were drawn: that takes matplotlib" in said
    assert "✓ met" not in said


def test_a_noisy_machine_is_told() -> None:
    rows = [replace(row, value=0.4) if row.name == "others_cpu" else row for row in FULL]
    summary = summarise(RUN, rows)
    said = spaced(html_of(summary, rows).said)
    assert f"The machine was too noisy to conclude from: {summary['noise']['reasons'][0]}." in said
    verdicts = [target["verdict"] for target in summary["targets"]]
    assert f"{verdicts.count('met')} met" in said
    assert f"? not concluded: {verdicts.count('not concluded')}." in said
    assert verdicts.count("not concluded") > 4
    assert "quiet enough" not in said


def test_a_snapshot_that_differs_is_called_a_fault() -> None:
    rows = [replace(row, value=0.0) if row.name == "identical" and row.contexts == "reused" else row for row in FULL]
    assert "That is a fault" in html_of(SUMMARY, rows).said
    assert "That is a fault" not in html_of(SUMMARY, FULL).said


def test_what_missed_by_little_is_told_with_the_digits_it_takes() -> None:
    summary = copy.deepcopy(SUMMARY)
    summary["targets"] = [
        {
            "metric": "activation_ratio",
            "of": "share_of_bound",
            "wanted": 0.98,
            "measured": 0.97996,
            "verdict": "missed",
        },
        {"metric": "activation_ratio", "of": "median", "wanted": 120.0, "measured": 120.0, "verdict": "met"},
    ]
    rows = [[spaced(cell) for cell in row] for row in html_of(summary, FULL).cells]
    assert ["Activation, document still held", "≥ 98 % of the bound", "97.996 %", "✗ missed"] in rows
    assert ["Activation, document still held", "≥ 120 ×", "120 ×", "✓ met"] in rows


def test_whatever_a_name_holds_it_is_shown_and_not_obeyed() -> None:
    rows = [replace(row, document=ODD) if row.experiment == "documents" else row for row in FULL]
    run = odd_run()
    title, blocks = report(summarise(run, rows), rows, {"memory": b"<svg/>"})
    usual = report(SUMMARY, FULL, {"memory": b"<svg/>"})
    made = [Page(page(*both, {"memory": b"<svg/>"})) for both in ((title, blocks), usual)]
    rendered = [
        Page(MarkdownIt("commonmark").enable("table").render(markdown(found, "plots"))) for found in (blocks, usual[1])
    ]
    for odd, plain in (made, rendered):
        assert {tag for tag, _ in odd.tags} <= {tag for tag, _ in plain.tags} | {"ul", "li"}
        assert len(odd.all("table")) == len(plain.all("table"))
        assert len(odd.all("img")) == 1
        assert [len(row) for row in odd.cells] == [len(row) for row in plain.cells]
        assert [tag for tag, _ in odd.tags if tag[0] == "h"] == [tag for tag, _ in plain.tags if tag[0] == "h"]
        assert "<script>alert(1)</script>|*b*_i_`c`$x$&amp;[l](http://a.b)~\\ 審査\ufffd # h" in spaced(odd.said)
        for line in ("1. not a list", "- nor this", "# nor a heading"):
            assert line in odd.said


def test_blocks_of_markdown() -> None:
    blocks = [
        Heading("A_b", 1),
        Paragraph(["x ", Strong("y"), " ", Code("a`|b"), " ", Verdict("met"), Verdict("unknown")]),
        Bullets(["- a", ["b", Code("")], "3. c", "+"]),
        Table("T", (" a", "b"), [(Code("x|y"), "1|2")]),
        Command("run ``` it"),
    ]
    assert markdown(blocks, "p") == (
        "# A\\_b\n\nx **y** ``a`|b`` ✓ met\n\n- \\- a\n- b\n- 3\\. c\n- \\+\n\nT:\n\n"
        "| a | b |\n| --- | --: |\n| `x\\|y` | 1\\|2 |\n\n````sh\nrun ``` it\n````\n"
    )


def test_parts_that_are_missing_or_not_numbers() -> None:
    said = html_of({}, []).said
    assert "a model without a name" in said
    assert "The machine is not known" in said
    assert "Nothing was measured" in said
    summary = copy.deepcopy(SUMMARY)
    for metric in summary["metrics"].values():
        metric |= {"median": float("nan"), "bound": None, "share_of_bound": None, "spread": None}
    summary["article"] = {"trials": [{"trial": 1, "reprefill": {}, "ours": {}}], "best_trial": None}
    summary["peers"]["llama-server"] = {"comparisons": [{"name": "x", "ratio": None}]}
    summary["noise"] = summary["machine"] = summary["settings"] = None
    read = html_of(summary, [replace(row, value=float("nan")) for row in FULL])
    assert "nan" not in read.said.lower()
    assert "None" not in read.said
    for rows, known in SHAPES.values():
        assert "nan" not in html_of(known, rows).said.lower()


def test_without_matplotlib_and_without_the_engine() -> None:
    """Where matplotlib cannot be imported the report is written all the same; and neither loads the binding."""
    code = """
import sys, tempfile
from pathlib import Path
sys.modules["matplotlib"] = None
from swarmkv_ll.campaign.plots import draw
from swarmkv_ll.campaign.records import Row
from swarmkv_ll.campaign.report import write_report
from swarmkv_ll.campaign.summary import summarise
rows = [Row("memory", n_branches=n, strategy="shared", name="memory_bytes", value=1e6) for n in (1, 2)]
folder = Path(tempfile.mkdtemp())
try:
    draw({}, rows, folder)
except ImportError:
    write_report(summarise({}, rows), rows, folder, [])
assert "No pictures were drawn" in (folder / "report.md").read_text()
assert "<img" not in (folder / "report.html").read_text()
assert not [name for name in sys.modules if name.endswith("_llama") or name == "swarmkv_ll.ffi"]
print(sorted(path.name for path in folder.iterdir()))
"""
    assert run_ok(code).strip() == "['report.html', 'report.md']"
