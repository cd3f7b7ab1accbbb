"""The benchmark campaign: its folder, its plan, its sums, and cases measured with tiny models. Their values are for benchmarks."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from time import sleep
from typing import Any

import pytest
from helpers import KINDS, Models, text_tokens

from swarmkv_ll.campaign.plan import FULL, HEADROOM, QUICK, fitting, tasks
from swarmkv_ll.campaign.race import Side, race
from swarmkv_ll.campaign.records import (
    RUN,
    TRIALS,
    Case,
    Row,
    case_of,
    opened,
    read_rows,
    read_run,
    rows_of,
    write_rows,
)
from swarmkv_ll.campaign.summary import best_run, summarise
from swarmkv_ll.errors import CampaignError

CASE = Case("article", 1, "deterministic", 3501, 2, None, "on", "f16")
SETTINGS = {"mode": "full", "n_document": 3501, "branches": (1, 2)}


# ── rows and folder ──────────────────────────────────────────────────────────────────────────────────


def test_rows_survive_a_file() -> None:
    rows = rows_of(CASE, {"a_s": 0.1, "b_s": 1 / 3}, "snapshot", "holding")
    rows += rows_of(replace(CASE, document='a "name", with\nall of it', n_document=None), {"c": 1e-300})
    text = write_rows(rows)
    again = read_rows(text)
    assert again == rows
    assert again[2].n_document is None
    assert case_of(again[0]) == CASE
    assert write_rows(again) == text


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "columns"),
        ("a,b\n", "columns a, b"),
        (write_rows([]) + "article,1\n", "line 2: 2 values, expected 12"),
        (write_rows([]) + "article,x,,,,,,,,,a,1\n", "line 2"),
        (write_rows([]) + "article,1,,,,,,,,,a,fast\n", "line 2"),
        (write_rows([]) + "article,1,,,,,,,,,a,nan\n", "line 2: a is nan"),
        (write_rows([]) + "article,1,,,,,,,,,a,inf\n", "line 2: a is inf"),
        (write_rows(rows_of(CASE, {"a_s": 12.5}))[:-2], "it was cut"),
    ],
)
def test_damaged_rows_are_refused(text: str, told: str) -> None:
    with pytest.raises(CampaignError, match=told):
        read_rows(text)


def test_an_unfinished_run_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "new" / "folder"
    with opened(out, SETTINGS) as folder:
        folder.add(rows_of(CASE, {"a_s": 1.0}))
        assert folder.done() == {CASE}
    with opened(out, SETTINGS) as folder:
        assert folder.done() == {CASE}
        assert [row.value for row in folder.rows] == [1.0]
        assert folder.run["settings"]["branches"] == [1, 2]
        folder.add(rows_of(replace(CASE, trial=2), {"a_s": 2.0}))
    assert [row.value for row in read_run(out).rows] == [1.0, 2.0]


def test_other_settings_are_told_one_by_one(tmp_path: Path) -> None:
    with opened(tmp_path, SETTINGS) as folder:
        folder.add(rows_of(CASE, {"a_s": 1.0}))
    with (
        pytest.raises(CampaignError, match=r"n_document 3501 there, 512 asked for\)"),
        opened(tmp_path, {**SETTINGS, "n_document": 512}),
    ):
        pass
    assert read_run(tmp_path).rows == rows_of(CASE, {"a_s": 1.0})


def test_a_finished_run_is_kept_unless_asked(tmp_path: Path) -> None:
    with opened(tmp_path, SETTINGS) as folder:
        folder.add(rows_of(CASE, {"a_s": 1.0}))
        folder.note(finished=True)
    (tmp_path / "plots").mkdir()
    for name in ("summary.json", "plots/activation.png", "plots/holiday.png", "plots/notes.txt", "mine.txt"):
        (tmp_path / name).write_text("x")
    with pytest.raises(CampaignError, match="finished run"), opened(tmp_path, SETTINGS):
        pass
    with opened(tmp_path, SETTINGS, overwrite=True) as folder:
        assert folder.rows == []
        assert not folder.run["finished"]
    left = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file())
    assert left == ["mine.txt", "plots/holiday.png", "plots/notes.txt", "run.json"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_of_something_else_is_left_alone(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "thesis.tex").write_text("all of it")
    with pytest.raises(CampaignError, match=r"thesis\.tex"), opened(tmp_path, SETTINGS, overwrite=overwrite):
        pass
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    with opened(tmp_path, SETTINGS), pytest.raises(CampaignError, match="another run"), opened(tmp_path, SETTINGS):
        pass
    with opened(tmp_path, SETTINGS):
        pass


@pytest.mark.parametrize("text", ["{", "[]", '{"finished": false}', "\udcff"])
def test_a_damaged_run_is_told(tmp_path: Path, text: str) -> None:
    (tmp_path / RUN).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(CampaignError, match=r"run\.json"), opened(tmp_path, SETTINGS):
        pass
    with pytest.raises(CampaignError, match=r"run\.json"), opened(tmp_path, SETTINGS, overwrite=True):
        pass
    assert os.listdir(tmp_path) == [RUN]


def test_pictures_elsewhere_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/activation.png").write_text("mine")
    with opened(tmp_path / "out", SETTINGS):
        pass
    (tmp_path / "out/plots").symlink_to(tmp_path / "mine")
    with pytest.raises(CampaignError, match="is a link"), opened(tmp_path / "out", SETTINGS, overwrite=True):
        pass
    assert (tmp_path / "mine/activation.png").read_text() == "mine"


def test_a_folder_that_is_removed_is_not_made_anew(tmp_path: Path) -> None:
    with opened(tmp_path / "out", SETTINGS) as folder:
        shutil.rmtree(tmp_path / "out")
        with pytest.raises(CampaignError, match="was removed"):
            folder.add(rows_of(CASE, {"a_s": 1.0}))
    assert not (tmp_path / "out").exists()


def test_no_run_is_told(tmp_path: Path) -> None:
    with pytest.raises(CampaignError, match="holds no run"):
        read_run(tmp_path)
    with opened(tmp_path, SETTINGS):
        pass
    with pytest.raises(CampaignError, match=TRIALS):
        read_run(tmp_path)


# ── plan ─────────────────────────────────────────────────────────────────────────────────────────────


def test_every_case_is_there_once() -> None:
    found = tasks(FULL, [("a.txt", 900)], ["llama-server"])
    cases = [task.case for task in found]
    assert len(cases) == len(set(cases))
    assert {case.experiment for case in cases} == {
        "article", "eight", "generation", "peers", "branches", "lengths", "options", "memory", "documents",
    }  # fmt: skip
    assert all(task.cost > 0 for task in found)
    assert [case.trial for case in cases if case.experiment in ("article", "peers")] == [1, 1, 2, 2, 3, 3]
    assert max(FULL.branches) == 64
    assert set(FULL.lengths) | {FULL.n_document} >= {512, 8000}


def test_a_plan_fits_its_model() -> None:
    sizes, left_out = fitting(FULL, 2048, None)
    assert (sizes.n_document, sizes.n_eight, sizes.n_short) == (2048 - HEADROOM, 2048 - HEADROOM, 1000)
    assert sizes.lengths == (512, 1000)
    assert left_out == [
        "an article's document of 3,501 tokens: 1,792 instead, of 2,048 trained on",
        "documents of 2,000, 8,000 tokens: the model was trained on 2,048",
    ]
    assert fitting(FULL, 8192, None) == (FULL, [])
    sizes, left_out = fitting(QUICK, 8192, 128)
    assert (sizes.n_document, sizes.n_eight, sizes.n_short, sizes.lengths) == (128, 64, 64, ())


# ── turns ────────────────────────────────────────────────────────────────────────────────────────────


def test_sides_take_turns_by_their_share_of_the_work() -> None:
    order: list[str] = []

    def work(name: str, n: int) -> Iterator[tuple[str, int]]:
        for _ in range(n):
            order.append(name)
            yield "prefill", 10
        order.append(name.upper())
        yield "branch", 0

    sides, told = [Side(work("a", 8), 80), Side(work("b", 2), 20)], []
    race(sides, told.append)
    first, second = (i for i, name in enumerate(order) if name == "b")
    assert first <= 1
    assert order[:second].count("a") in (4, 5)
    assert sum(told) == 100
    assert [len(side.times("prefill")) for side in sides] == [8, 2]
    assert len(sides[0].times("branch")) == 1


def test_a_side_that_fails_has_the_others_closed() -> None:
    closed = []

    def fine() -> Iterator[tuple[str, int]]:
        try:
            while True:
                yield "prefill", 1
        finally:
            closed.append(True)

    def fails() -> Iterator[tuple[str, int]]:
        yield "prefill", 1
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        race([Side(fine(), 1000), Side(fails(), 2)], lambda _: None)
    assert closed == [True]


def test_a_step_is_timed_and_waiting_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("swarmkv_ll.campaign.race.perf_counter", lambda: clock[0])

    def slow() -> Iterator[tuple[str, int]]:
        clock[0] += 2
        yield "prefill", 1
        clock[0] += 3
        yield "branch", 0
        clock[0] += 5

    side = Side(slow(), 1)
    for _ in range(3):
        assert not side.ended
        side.advance()
        clock[0] += 100
    assert side.ended
    assert side.laps == [("prefill", 2), ("branch", 3), ("end", 5)]
    assert side.seconds("prefill", "end") == 7
    assert side.times("branch") == [3]


# ── sums ─────────────────────────────────────────────────────────────────────────────────────────────


def article(
    trial: int, *, again: float = 24.0, alone: float = 0.125, experiment: str = "article", n: int = 2
) -> list[Row]:
    """A trial with round figures: a prefill of `again` seconds, a branch's decode of `alone`."""
    case = replace(CASE, experiment=experiment, trial=trial, n_branches=n)
    rows = rows_of(case, {"bound_s": alone, "copyto_s": 0.008, "fork_share": 0.96 + 0.01 * trial})
    rows += rows_of(
        case,
        {
            "prefill_s": n * again,
            "branch_s": n * alone,
            "activation_s": again + alone,
            "end_to_end_s": n * (again + alone),
        },
        "reprefill",
        "fresh",
    )
    values = {"prefill_s": again, "activation_s": 2 * alone, "end_to_end_s": again + 2 * n * alone, "identical": 1.0}
    rows += rows_of(case, values | {"activation_median_s": alone / 0.99, "bound_share": 0.99}, "snapshot", "holding")
    return rows


def quiet(trial: int, decode: float = 1.0, copy: float = 1.0, others: float = 0.01, seconds: float = 60.0) -> list[Row]:
    values = {"decode_s": decode, "copy_s": copy, "others_cpu": others, "steal": 0.0, "case_s": seconds}
    return rows_of(Case("noise", trial), values)


def summed(rows: list[Row], trials: int = 3, **run: Any) -> dict[str, Any]:
    settings = {"mode": "full", "n_document": 3501, "trials": trials}
    return summarise({"settings": settings, **run}, rows)


def test_metrics_are_medians_beside_their_bounds() -> None:
    found = summed([row for trial in (1, 2, 3) for row in article(trial, again=20.0 + trial)])
    metric = found["metrics"]["activation_ratio"]
    assert metric["median"] == pytest.approx(22.125 / 0.125 * 0.99)
    assert metric["bound"] == pytest.approx(22.125 / 0.125)
    assert metric["share_of_bound"] == 0.99
    assert metric["n"] == 3
    assert metric["best"] == pytest.approx(23.125 / 0.125 * 0.99)
    assert metric["spread"] == pytest.approx(2 / 22.125)
    ends = found["metrics"]["end_to_end_ratio_2"]
    assert ends["median"] == pytest.approx(2 * 22.125 / 22.5)
    assert ends["bound"] == pytest.approx(2 * 22.125 / (22.125 + 0.125))
    assert found["metrics"]["fork_share_of_memcpy"]["median"] == pytest.approx(0.98)
    assert found["metrics"]["bit_identical"]["median"] == 1
    assert "end_to_end_ratio_8" not in found["metrics"]


def test_the_articles_best_trial() -> None:
    rows = [*article(1, again=20.0), *article(2, again=24.0), *article(3, again=22.0)]
    found = summed(rows)
    trials = found["article"]["trials"]
    assert found["article"]["best_trial"] == 2
    assert trials[1]["ttft_pct"] == pytest.approx(100 * (1 - 0.25 / 24.125))
    assert trials[1]["e2e_pct"] == pytest.approx(100 * (1 - 24.5 / 48.25))
    assert trials[1]["score"] == pytest.approx(2 * trials[1]["ttft_pct"] + trials[1]["e2e_pct"])
    assert trials[1]["redundant_prefill_s"] == 24
    assert trials[1]["redundant_prefill_tokens"] == 3501
    best = best_run(found, rows)
    assert best["trial"] == trials[1]
    assert {"strategy": "", "contexts": "", "name": "bound_s", "value": 0.125} in best["rows"]


def test_verdicts_need_all_trials_on_one_side() -> None:
    def verdicts(*agains: float) -> dict[tuple[str, str], str]:
        rows = [row for i, again in enumerate(agains, start=1) for row in (*article(i, again=again), *quiet(i))]
        return {(t["metric"], t["of"]): t["verdict"] for t in summed(rows)["targets"]}

    found = verdicts(24, 24, 24)
    assert found["activation_ratio", "median"] == "met"
    assert found["activation_ratio", "share_of_bound"] == "met"
    assert found["end_to_end_ratio_2", "median"] == "missed" if 2 * 24.125 / 24.5 < 1.97 else "met"
    assert verdicts(12, 12, 12)["activation_ratio", "median"] == "missed"
    assert verdicts(12, 24, 24)["activation_ratio", "median"] == "not concluded"
    assert verdicts(24, 24)["activation_ratio", "median"] == "not concluded"  # a trial is missing
    for settings in ({"mode": "quick", "n_document": 3501}, {"mode": "full", "n_document": 2999}):
        assert summarise({"settings": {**settings, "trials": 1}}, [*article(1), *quiet(1)])["targets"] == []


@pytest.mark.parametrize(
    ("noise", "told"),
    [
        ([quiet(1), quiet(2, 1.2), quiet(3, 1.1, 1.3, 0.1)], None),
        ([quiet(1), quiet(2, decode=2.0), quiet(3)], "short decode took 1000.0 to 2000.0 ms"),
        ([quiet(1), quiet(2, copy=9.0), quiet(3)], "copy of 32 MiB took"),
        ([quiet(1, others=0.5), quiet(2), quiet(3)], "took 17% of the processors"),
        ([quiet(1, others=0.5, seconds=0.1), quiet(2), quiet(3)], None),  # that it lasted a moment only
        ([], "is not known"),
    ],
)
def test_a_noisy_machine_concludes_nothing(noise: list[list[Row]], told: str | None) -> None:
    found = summed([*article(1), *(row for rows in noise for row in rows)], trials=1)
    assert found["noise"]["conclusive"] is (told is None)
    assert (told or "") in " ".join(found["noise"]["reasons"])
    verdicts = {t["verdict"] for t in found["targets"]}
    assert ("not concluded" in verdicts) is (told is not None)
    assert noise or verdicts == {"not concluded"}
    assert len(found["targets"]) == 4


def test_what_is_far_from_its_target_is_concluded_in_noise_too() -> None:
    noise = [*quiet(1), *quiet(2, decode=1.7), *quiet(3)]

    def verdict(again: float) -> str:
        found = summed([*article(1, again=again), *noise], trials=1)
        assert not found["noise"]["conclusive"]
        assert 0.5 < found["noise"]["decode_spread"] < 0.6
        return next(t["verdict"] for t in found["targets"] if (t["metric"], t["of"]) == ("activation_ratio", "median"))

    assert [verdict(again) for again in (30, 20, 16, 8)] == ["met", "not concluded", "not concluded", "missed"]


def test_peers_are_set_beside_us() -> None:
    told = {"what": "the same", "call": "tool -x", "ours": "fan_out", "unit": "s"}
    known = {
        "llama-cpp-python": {"reason": None, "version": "0.3.36", "comparisons": {"save_load": told}},
        "llama-server": {"reason": "not built", "version": None, "comparisons": {}},
    }
    rows = article(1)
    for trial, theirs in enumerate((0.3, 0.4, 0.5), start=1):
        case = Case("peers", trial, "llama-cpp-python")
        rows += rows_of(case, {"save_load_s": theirs}, "llama-cpp-python")
        rows += rows_of(case, {"save_load_s": 0.02}, "swarmkv_ll")
    found = summed(rows, peers=known)
    metric = found["metrics"]["save_load_vs_llama_cpp_python"]
    assert (metric["median"], metric["best"], metric["n"]) == (pytest.approx(20), pytest.approx(25), 3)
    assert metric["bound"] == pytest.approx(0.4 / 0.016)
    peer = found["peers"]["llama-cpp-python"]["comparisons"][0]
    assert (peer["peer_value"], peer["our_value"], peer["call"]) == (0.4, 0.02, "tool -x")
    assert found["peers"]["llama-server"] == {
        "status": "skipped",
        "reason": "not built",
        "version": None,
        "comparisons": [],
    }


def test_nothing_measured_is_an_empty_summary() -> None:
    found = summarise({}, [])
    assert found["metrics"] == {}
    assert found["article"] == {"trials": [], "best_trial": None}
    assert best_run(found, [])["trial"] is None
    assert found["noise"]["conclusive"] is False
    json.dumps(found, allow_nan=False)


# ── measured with tiny models ────────────────────────────────────────────────────────────────────────


def tiny_bench(models: Models, kind: str) -> Any:
    from swarmkv_ll.campaign.experiments import Bench

    questions = [text_tokens(5, seed=seed) for seed in range(3)]
    return Bench(models[kind], 1, text_tokens(150), questions)


def values(rows: list[Row], name: str) -> dict[tuple[str, str], float]:
    return {(row.strategy, row.contexts): row.value for row in rows if row.name == name}


@pytest.mark.parametrize("kind", KINDS)
def test_branches_are_measured_and_answer_as_re_prefilled(models: Models, kind: str) -> None:
    from swarmkv_ll.campaign.experiments import fan

    told: list[int] = []
    case = replace(CASE, n_document=200, n_branches=2)
    rows = fan(tiny_bench(models, kind), case, told.append, rounds=2)
    holding = [("snapshot", "holding")] if kind == "llama" else []  # the others have no way back
    ours = {("shared", ""), *holding, ("snapshot", "reused"), ("snapshot", "fresh")}
    assert set(values(rows, "end_to_end_s")) == {("reprefill", "fresh"), *ours}
    assert {way: value for way, value in values(rows, "identical").items() if way[0] == "snapshot"} == {
        way: 1.0 for way in ours if way[0] == "snapshot"
    }
    assert values(rows, "same_token") == dict.fromkeys(ours, 1.0)
    assert max(values(rows, "logits_off").values()) < 0.05
    assert sum(told) == 3 * 200
    assert {case_of(row) for row in rows} == {case}
    for row in rows:
        assert row.value > 0 or row.name in ("logits_off", "identical")
    whole, part = values(rows, "end_to_end_s"), values(rows, "prefill_s")
    assert all(whole[way] > part[way] for way in whole)
    found = summed(rows)["metrics"]
    assert found["activation_ratio_reused"]["n"] == found["end_to_end_ratio_2"]["n"] == 1
    assert ("activation_ratio" in found) is bool(holding)


def test_every_step_is_counted_where_it_belongs(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock by which each step takes a second: a document of 200 tokens is computed in two."""
    from itertools import count

    from swarmkv_ll.campaign import experiments

    clock = count()
    monkeypatch.setattr("swarmkv_ll.campaign.race.perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr(experiments, "PIECE", 100)
    rows = experiments.fan(
        tiny_bench(models, "llama"), replace(CASE, n_document=200, n_branches=3), lambda _: None, rounds=1
    )
    found: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        if row.strategy and row.name.endswith("_s") and "median" not in row.name:
            found.setdefault((row.strategy, row.contexts), {})[row.name] = row.value
    # Of each branch a context, two pieces, the prompt, and the closing.
    assert found["reprefill", "fresh"] == {
        "context_s": 3,
        "prefill_s": 6,
        "branch_s": 3,
        "activation_s": 4,
        "end_to_end_s": 3 * 5,
    }
    once = {"context_s": 1, "prefill_s": 2}
    assert found["shared", ""] == {**once, "fork_s": 1, "branch_s": 1, "activation_s": 2, "end_to_end_s": 3 + 2 + 1}
    once["export_s"] = 1
    assert found["snapshot", "holding"] == {
        **once, "restore_s": 3, "branch_s": 3, "activation_s": 2, "end_to_end_s": 4 + 3 * 3 + 1,
    }  # fmt: skip
    assert found["snapshot", "reused"] == {
        **once, "fork_s": 3, "restore_s": 3, "branch_s": 3, "activation_s": 3, "end_to_end_s": 4 + 3 * 4 + 2,
    }  # fmt: skip
    assert found["snapshot", "fresh"] == {
        **once, "context_s": 4, "fork_s": 3, "restore_s": 3, "branch_s": 3, "activation_s": 4,
        "end_to_end_s": 4 + 3 * 5 + 2,
    }  # fmt: skip
    rows = experiments.scaling(
        tiny_bench(models, "llama"), replace(CASE, n_document=200, n_branches=4), lambda _: None, (1, 4)
    )
    took = {(row.strategy, row.n_branches): row.value for row in rows if row.name == "end_to_end_s"}
    assert took == {
        ("reprefill", 1): 5, ("reprefill", 4): 20, ("shared", 1): 3 + 2 + 1, ("shared", 4): 3 + 2 + 1,
        ("snapshot", 1): 3 + 1 + 1, ("snapshot", 4): 3 + 4 + 1,
    }  # fmt: skip


def test_scaling_generation_and_memory_are_measured(models: Models) -> None:
    from swarmkv_ll.campaign.experiments import generation, memory, scaling

    bench = tiny_bench(models, "llama")
    rows = scaling(bench, replace(CASE, experiment="branches", n_document=100, n_branches=4), lambda _: None, (1, 2, 4))
    assert {row.n_branches for row in rows} == {1, 2, 4}
    took = {(row.strategy, row.n_branches): row.value for row in rows if row.name == "end_to_end_s"}
    assert took["reprefill", 4] == pytest.approx(4 * took["reprefill", 1])
    assert took["snapshot", 1] < took["snapshot", 2] < took["snapshot", 4]
    case = replace(CASE, experiment="generation", n_document=100, n_branches=2, n_answer=4)
    rows = generation(bench, case, lambda _: None)
    known = {row.name: row.value for row in rows}
    assert 0 < known["engine_s"] < known["together_s"]
    rows = memory(
        tiny_bench(models, "large"), replace(CASE, experiment="memory", n_document=100), lambda _: None, (1, 4)
    )
    held = {(row.strategy, row.n_branches): row.value for row in rows}
    size = held["snapshot", 4] - held["snapshot", 1]
    assert size > 0
    assert held["reprefill", 4] > held["reprefill", 1] > 0


def test_a_real_documents_answers(models: Models) -> None:
    from swarmkv_ll.campaign.experiments import answers_of

    case = Case("documents", 1, "a", 60, 2, 4)
    bench = tiny_bench(models, "llama")
    told: list[int] = []
    rows = answers_of(bench, case, told.append, text_tokens(60), [text_tokens(5, seed=i) for i in (1, 2)])
    assert values(rows, "same_answers") == {("shared", ""): 1.0}
    assert set(values(rows, "end_to_end_s")) == {("shared", ""), ("reprefill", "fresh")}
    assert sum(told) == 60 * 4


# ── the machine ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", KINDS)
def test_a_yardstick_goes_back_in_every_memory(models: Models, kind: str) -> None:
    from swarmkv_ll.campaign.machine import yardstick

    with yardstick(models[kind], text_tokens(60), text_tokens(5), 1) as stick:
        for _ in range(2):
            assert set(stick.measure()) == {"decode_s", "copy_s"}
            assert stick.ctx.position() == 65


def test_threads_are_pinned_and_let_go(models: Models) -> None:
    from swarmkv_ll.campaign.machine import CPUS, pinned_threads

    n = min(2, len(CPUS))
    with models["llama"].context(512, n_threads=n) as ctx:

        def work() -> None:
            ctx.clear()
            ctx.decode(text_tokens(300))

        with pinned_threads(n, work) as pinned:
            assert pinned
            masks = [os.sched_getaffinity(int(tid)) for tid in os.listdir("/proc/self/task")]
            assert os.sched_getaffinity(threading.get_native_id()) in masks
            alone = {next(iter(mask)) for mask in masks if len(mask) == 1}
            assert len(alone) == n
        assert all(os.sched_getaffinity(int(tid)) == CPUS for tid in os.listdir("/proc/self/task"))
        with pinned_threads(len(CPUS) + 1, work) as pinned:
            assert not pinned


def test_the_machine_is_described_without_paths() -> None:
    from swarmkv_ll.campaign.machine import describe

    found = describe()
    assert found["cpus"] >= 1
    assert found["memory_bytes"] > found["memory_available_bytes"] > 0
    assert "/" not in json.dumps({k: v for k, v in found.items() if k not in ("compiler", "pinned", "stamp")})


def test_load_sees_others() -> None:
    import subprocess
    import sys

    from swarmkv_ll.campaign.machine import Load

    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        load = Load()
        sleep(0.5)
        found = load.measure()
        other.kill()
    assert found["others_cpu"] > 0.5 / (os.cpu_count() or 1) * 0.5
    assert 0 <= found["steal"] < 1
