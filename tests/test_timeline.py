"""Timelines: the trace's events by hand-computed values, spans merged, and what is in the pictures."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from itertools import pairwise, product
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from helpers import run_ok
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.collections import PolyCollection

from swarmkv_ll.errors import InvalidArgumentError
from swarmkv_ll.timeline import KINDS, Mark, Span, Step, Timeline, figure, merge, tallest

ODD = 'risk "A" \\ $x_1$ <&>\n審査 \x01 \ud800'
"""A name with all that JSON, XML, mathtext, fonts and UTF-8 could stumble over."""

SMALL = Timeline(
    lanes=("document", "terms"),
    spans=(
        Span("terms", "wait", 0.0, 0.5),
        Span("document", "prefill", 0.1, 0.5, 128),
        Span("terms", "decode", 0.5, 0.7500005, 1),
    ),
    marks=(Mark("document", 0.5, "128"),),
    steps=(Step(0.1, 0.5, 128, 1), Step(0.5, 0.7500005, 1, 1), Step(0.8, 0.9, 2, 2)),
)


def events(timeline: Timeline, kind: str) -> list[dict[str, Any]]:
    return [event for event in timeline.chrome_trace()["traceEvents"] if event["ph"] == kind]


def threads(timeline: Timeline) -> dict[int, str]:
    """Names in their sort order, by number."""
    meta = events(timeline, "M")
    index = {event["tid"]: event["args"]["sort_index"] for event in meta if event["name"] == "thread_sort_index"}
    names = {event["tid"]: event["args"]["name"] for event in meta if event["name"] == "thread_name"}
    assert len(set(index.values())) == len(names) == len(index)
    return {tid: names[tid] for tid in sorted(names, key=lambda tid: index[tid])}


# ── as a trace ───────────────────────────────────────────────────────────────────────────────────────


def test_a_thread_for_each_lane_in_order_and_one_for_the_batches() -> None:
    assert threads(SMALL) == {2: "document", 3: "terms", 4: "batches"}
    assert threads(Timeline(("b", "a"), ())) == {2: "b", 3: "a"}


def test_the_events_of_a_small_run() -> None:
    """In whole microseconds: 0.7500005 s are 750,000 of them (half to even)."""
    expected = [
        (2, "prefill", "prefill", 100_000, 400_000, {"n_tokens": 128}),
        (3, "wait", "wait", 0, 500_000, {"n_tokens": 0}),
        (3, "decode", "decode", 500_000, 250_000, {"n_tokens": 1}),
        (4, "batch", "batch", 100_000, 400_000, {"n_tokens": 128, "n_parts": 1}),
        (4, "batch", "batch", 500_000, 250_000, {"n_tokens": 1, "n_parts": 1}),
        (4, "batch", "batch", 800_000, 100_000, {"n_tokens": 2, "n_parts": 2}),
    ]
    keys = ("tid", "name", "cat", "ts", "dur", "args")
    assert [tuple(event[key] for key in keys) for event in events(SMALL, "X")] == expected
    assert events(SMALL, "i") == [
        {"ph": "i", "pid": 1, "tid": 2, "name": "128", "cat": "mark", "s": "t", "ts": 500_000}
    ]


def test_the_counter_falls_to_nothing_between_batches_only() -> None:
    counted = [(event["ts"], event["args"]["tokens"]) for event in events(SMALL, "C")]
    assert counted == [(100_000, 128), (500_000, 1), (750_000, 0), (800_000, 2), (900_000, 0)]
    assert {event["name"] for event in events(SMALL, "C")} == {"tokens in the batch"}


def test_neighbours_touch_and_do_not_overlap_after_rounding() -> None:
    """0.1 added up 2,000 times is not 200; each begin is the last end, to the microsecond."""
    moments = [0.0]
    for _ in range(2000):
        moments.append(moments[-1] + 0.1000003)
    pairs = pairwise(moments)
    found = events(Timeline(("a",), tuple(Span("a", "decode", *pair) for pair in pairs)), "X")
    assert len(found) == 2000
    for event, following in pairwise(found):
        assert event["ts"] + event["dur"] == following["ts"]


def test_spans_within_each_other_share_a_thread_and_the_outer_one_comes_first() -> None:
    spans = (Span("a", "decode", 1, 2), Span("a", "run", 0, 4), Span("a", "prompt", 0, 1), Span("a", "export", 2, 4))
    nested = Timeline(("a",), spans)
    assert threads(nested) == {2: "a"}
    assert [event["name"] for event in events(nested, "X")] == ["run", "prompt", "decode", "export"]


def test_spans_that_overlap_in_part_go_to_another_thread() -> None:
    spans = (Span("a", "run", 0, 2), Span("a", "decode", 1, 3), Span("a", "export", 2, 4), Span("b", "run", 0, 1))
    split = Timeline(("a", "b"), spans, (Mark("a", 1, "here"),))
    assert threads(split) == {2: "a", 3: "a (2)", 4: "b"}
    assert [(event["tid"], event["name"]) for event in events(split, "X")] == [
        (2, "run"),
        (2, "export"),
        (3, "decode"),
        (4, "run"),
    ]
    assert [event["tid"] for event in events(split, "i")] == [2]


MOMENTS = st.integers(0, 30).map(lambda n: n / 7)


@given(st.lists(st.tuples(MOMENTS, MOMENTS).map(sorted), max_size=30))
def test_events_of_a_thread_always_nest(pairs: list[list[float]]) -> None:
    timeline = Timeline(("a",), tuple(Span("a", "run", *pair) for pair in pairs))
    found = events(timeline, "X")
    ends = sorted((event["ts"], event["ts"] + event["dur"]) for event in found)
    assert ends == sorted((round(begin * 1e6), round(end * 1e6)) for begin, end in pairs)
    for one, other in product(found, found):
        if one["tid"] == other["tid"]:
            assert not one["ts"] < other["ts"] < one["ts"] + one["dur"] < other["ts"] + other["dur"]


def test_the_file_is_the_trace(tmp_path: Path) -> None:
    odd = Timeline((ODD, ""), (Span(ODD, "run", 0, 1),), (Mark(ODD, 1, ODD),))
    for timeline in (SMALL, odd, Timeline((), ())):
        timeline.save_trace(tmp_path / "trace.json")
        assert json.loads((tmp_path / "trace.json").read_bytes()) == timeline.chrome_trace()
    assert os.listdir(tmp_path) == ["trace.json"]
    assert threads(odd) == {2: ODD, 3: ""}


def test_the_trace_of_nothing() -> None:
    only = [{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "swarmkv"}}]
    assert Timeline((), ()).chrome_trace() == {"traceEvents": only, "displayTimeUnit": "ms"}


# ── files ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("write", [Timeline.save_trace, Timeline.plot])
def test_a_file_that_cannot_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Any
) -> None:
    missing = tmp_path / "missing" / "out.png"
    with pytest.raises(FileNotFoundError) as caught:
        write(SMALL, missing)
    assert caught.value.filename == str(missing)

    standing = tmp_path / "out.png"
    standing.write_bytes(b"as it was")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        write(SMALL, standing)
    assert os.listdir(tmp_path) == ["out.png"]
    assert standing.read_bytes() == b"as it was"


@pytest.mark.parametrize("write", [Timeline.save_trace, Timeline.plot])
def test_a_folder_is_not_replaced(tmp_path: Path, write: Any) -> None:
    folder = tmp_path / "out.png"
    folder.mkdir()
    with pytest.raises(IsADirectoryError) as caught:
        write(SMALL, folder)
    assert caught.value.filename == str(folder)
    assert os.listdir(tmp_path) == ["out.png"]


def test_names_without_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    SMALL.save_trace("trace.json")
    SMALL.plot("run.PNG")
    assert sorted(os.listdir()) == ["run.PNG", "trace.json"]


# ── what is refused ──────────────────────────────────────────────────────────────────────────────────

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: Timeline(("a", "b", "a"), ()), "two lanes are named 'a'"),
        (lambda: Timeline(("a",), (Span("b", "run", 0, 1),)), "no lane 'b'"),
        (lambda: Timeline(("a",), (), (Mark("b", 0, "x"),)), "no lane 'b'"),
        (lambda: Timeline(("a",), (Span("a", "sleep", 0, 1),)), "wait, prefill, prompt, decode"),
        (lambda: Timeline(("a",), (Span("a", "run", 1, 0),)), "in this order"),
        (lambda: Timeline(("a",), (Span("a", "run", NAN, 1),)), "in this order"),
        (lambda: Timeline(("a",), (Span("a", "run", 0, INF),)), "in this order"),
        (lambda: Timeline((), (), (), (Step(2, 1, 1, 1),)), "in this order"),
        (lambda: Timeline(("a",), (), (Mark("a", INF, "x"),)), "finite"),
    ],
)
def test_what_cannot_be_a_timeline(wrong: Any, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        wrong()


@pytest.mark.parametrize("name", ["run.jpg", "run", "png", "run.png.gz"])
def test_another_kind_of_picture(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"\.png, \.svg, \.pdf"):
        SMALL.plot(tmp_path / name)
    assert os.listdir(tmp_path) == []


def test_without_matplotlib(tmp_path: Path) -> None:
    """The trace needs none; a picture says what is missing, and writes nothing."""
    printed = run_ok(
        """
        import os, sys
        sys.modules["matplotlib"] = None
        from swarmkv_ll.timeline import Span, Timeline
        timeline = Timeline(("a",), (Span("a", "run", 0, 1),))
        os.chdir(sys.argv[1])
        timeline.save_trace("trace.json")
        try:
            timeline.plot("run.png")
        except ImportError as error:
            print(error.name, os.listdir())
        """,
        str(tmp_path),
    )
    assert printed == "matplotlib ['trace.json']"


# ── merging ──────────────────────────────────────────────────────────────────────────────────────────


def test_neighbours_are_merged_up_to_the_gap() -> None:
    spans = [Span("a", "decode", 10, 11, 1), Span("a", "decode", 0, 1, 1), Span("a", "decode", 1.5, 2, 2)]
    assert merge(spans, 0.25) == [spans[1], spans[2], spans[0]]
    assert merge(spans, 0.5) == [Span("a", "decode", 0, 2, 3), spans[0]]
    assert merge(spans, 8) == [Span("a", "decode", 0, 11, 4)]


def test_lanes_and_kinds_are_not_mixed_and_do_not_part_each_other() -> None:
    spans = [Span("b", "decode", 0, 1), Span("a", "decode", 0, 1), Span("a", "wait", 1, 2), Span("a", "decode", 2, 3)]
    assert merge(spans, 1) == [Span("a", "wait", 1, 2), Span("a", "decode", 0, 3), Span("b", "decode", 0, 1)]


def test_a_span_within_another_does_not_shorten_it() -> None:
    assert merge([Span("a", "run", 0, 10, 1), Span("a", "run", 1, 2, 1)], 0) == [Span("a", "run", 0, 10, 2)]
    assert merge([], 1) == []


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(KINDS[:2]), MOMENTS, st.integers(0, 9)), max_size=20),
    st.sampled_from([0.0, 0.2, 1.0]),
)
def test_merging_keeps_tokens_and_what_is_covered(drawn: list[tuple[str, str, float, int]], gap: float) -> None:
    spans = [Span(lane, kind, begin, begin + 0.3, n_tokens) for lane, kind, begin, n_tokens in drawn]
    merged = merge(spans, gap)
    assert sum(span.n_tokens for span in merged) == sum(span.n_tokens for span in spans)
    for span in spans:
        within = [m for m in merged if (m.lane, m.kind) == (span.lane, span.kind) and m.begin <= span.begin]
        assert sum(span.end <= m.end for m in within) == 1
    for one, other in pairwise(merged):
        if (one.lane, one.kind) == (other.lane, other.kind):
            assert other.begin - one.end > gap


def test_the_largest_batch_of_each_column() -> None:
    steps = [Step(0, 2, 8, 1), Step(2, 2.1, 5, 1), Step(2.1, 2.2, 7, 1), Step(9, 10, 1, 1)]
    assert tallest(steps, 0, 10, 10) == [8, 8, 7, 0, 0, 0, 0, 0, 0, 1]
    assert tallest(steps, 0, 10, 1) == [8]
    assert tallest([Step(10, 10, 3, 1), Step(5, 5, 4, 1)], 0, 10, 2) == [0, 4]


# ── as a picture ─────────────────────────────────────────────────────────────────────────────────────


def png_size(data: bytes) -> tuple[int, int]:
    assert data[:16] == b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"
    return struct.unpack(">II", data[16:24])


def lanes_of(n: int) -> Timeline:
    lanes = tuple(f"agent {i}" for i in range(n))
    return Timeline(lanes, tuple(Span(lane, "run", i, i + 1) for i, lane in enumerate(lanes)))


def test_a_png_grows_with_its_lanes_up_to_24_inches(tmp_path: Path) -> None:
    sizes = []
    for n in (3, 60, 300):
        lanes_of(n).plot(tmp_path / "run.png")
        sizes.append(png_size((tmp_path / "run.png").read_bytes()))
    assert sizes == [(1800, 288), (1800, 3195), (1800, 3600)]


def test_svg_and_pdf(tmp_path: Path) -> None:
    """Whatever the names; and twice the same file."""
    odd = Timeline((ODD, "b" * 500), (Span(ODD, "run", 0, 1e-4),), (Mark(ODD, 0, ODD),), (Step(0, 1, 3, 1),))
    for timeline in (odd, SMALL, Timeline((), ()), Timeline(("a",), ())):
        timeline.plot(tmp_path / "run.svg")
        first = (tmp_path / "run.svg").read_bytes()
        assert ElementTree.fromstring(first).tag == "{http://www.w3.org/2000/svg}svg"
        timeline.plot(tmp_path / "run.svg")
        assert (tmp_path / "run.svg").read_bytes() == first
        timeline.plot(tmp_path / "run.pdf")
        assert (tmp_path / "run.pdf").read_bytes().startswith(b"%PDF-")
        timeline.plot(tmp_path / "run.png")
        assert png_size((tmp_path / "run.png").read_bytes())[0] == 1800


def bars(timeline: Timeline) -> Iterator[tuple[float, float]]:
    """Left and right of each bar, in the axis's unit."""
    for collection in figure(timeline).axes[0].collections:
        assert isinstance(collection, PolyCollection)
        for path in collection.get_paths():
            yield path.vertices[:, 0].min(), path.vertices[:, 0].max()


def test_bars_stand_where_their_spans_are() -> None:
    """Seconds, or milliseconds in a run of less than one second."""
    assert list(bars(lanes_of(3))) == [(0, 1), (1, 2), (2, 3)]
    short = Timeline(("a",), (Span("a", "run", 0.25, 0.5),))
    assert list(bars(short)) == [(250, 500)]
    assert figure(short).axes[0].get_xlabel() == "time (ms)"
    assert figure(lanes_of(3)).axes[0].get_xlabel() == "time (s)"


def test_short_spans_do_not_vanish_and_gaps_that_cannot_be_seen_are_not_drawn() -> None:
    begins = [i / 1000 for i in range(3000)]
    dense = Timeline(("a",), tuple(Span("a", "decode", begin, begin + 1e-5, 1) for begin in begins))
    assert list(bars(dense)) == [(0, pytest.approx(2.99901))]
    sparse = Timeline(("a",), tuple(Span("a", "decode", begin, begin + 1e-5, 1) for begin in begins[::100]))
    widths = [right - left for left, right in bars(sparse)]
    assert widths == pytest.approx([3 / 1650] * 30, rel=0.1)  # a pixel, of those between names and edge


def test_the_legend_has_the_kinds_that_occur() -> None:
    legend = figure(SMALL).axes[0].get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["wait", "prefill", "decode"]
    assert figure(Timeline(("a",), ())).axes[0].get_legend() is None


def test_the_strip_of_batches_shares_the_time_axis() -> None:
    lanes, strip = figure(SMALL).axes
    assert lanes.get_xlim() == strip.get_xlim()
    assert strip.get_yscale() == "log"  # 1 beside 128
    assert strip.get_yticks().tolist() == [1, 10, 128]
    assert len(figure(lanes_of(2)).axes) == 1


def test_long_names_are_cut_in_the_middle_and_formulas_are_not_set() -> None:
    long = "extract the requirements of " + "every annex, and " * 5 + "number them"
    labels = figure(Timeline((long, "$x_1$", "two\nlines"), ())).axes[0].get_yticklabels()
    assert [label.get_text() for label in labels] == ["extract the requ…and number them", "$x_1$", "two lines"]
    assert not any(label.get_parse_math() for label in labels)


def test_texts_of_marks_where_there_is_room_and_always_the_last() -> None:
    marks = tuple(Mark("a", i / 100, f"watermark {i}") for i in range(1, 101))
    drawn = figure(Timeline(("a", "b"), (), (*marks, Mark("b", 0, "began"))))
    ax = drawn.axes[0]
    shown = {text.get_text() for text in ax.texts}
    assert {"watermark 100", "began"} < shown
    assert 5 < len(shown) < 30
    boxes = sorted(
        (text.get_window_extent().x0, text.get_window_extent().x1) for text in ax.texts if text.get_text() != "began"
    )
    assert all(right < left for (_, right), (left, _) in pairwise(boxes))
    assert boxes[-1][1] < drawn.bbox.x1
    triangles = [len(line.get_xdata()) for line in ax.lines]
    assert triangles == [100, 1]


def test_a_picture_leaves_pyplot_alone(tmp_path: Path) -> None:
    """Which would choose a backend for the whole process, and keep every figure."""
    printed = run_ok(
        """
        import sys
        from swarmkv_ll.timeline import Timeline
        Timeline(("a",), ()).plot(sys.argv[1])
        print("matplotlib.pyplot" in sys.modules, "matplotlib" in sys.modules)
        """,
        str(tmp_path / "run.png"),
    )
    assert printed == "False True"
