"""`swarmkv run --measure`: what its rows are made of. Their values are for benchmarks."""

from __future__ import annotations

import pytest
from helpers import Models

from swarmkv_ll.batching import Part, Step
from swarmkv_ll.pipeline_measure import end_to_end, generation, overhead, streaming, texts, unfairness


def step(*names: str, kind: str = "decode", engine: float = 8.0, sample: float = 1.0) -> Step:
    parts = tuple(Part(name, kind, 1) for name in names)  # type: ignore[arg-type]
    return Step(0.0, 1.0, 1.0 + engine, 10.0, sample, parts)


def test_unfairness_is_that_of_the_worst_window() -> None:
    fair = [step("a", "b")] * 100
    assert unfairness(fair, 2) == 1
    assert unfairness([*fair, *[step("a")] * 100], 2) == 1  # alone is not in company
    lopsided = [Step(*step("a", "b")[:5], (Part("a", "decode", 3), Part("b", "decode", 1)))] * 8
    assert unfairness([*fair, *lopsided, *fair], 2) == (24 + 3 * 8) / 32


def test_overhead_is_what_is_neither_engine_nor_sampling() -> None:
    assert overhead([step("a"), step("b", engine=6.0), step("c", kind="prefill", engine=0.0)]) == pytest.approx(0.2)


def test_rows_are_measured(models: Models) -> None:
    model = models["llama"]
    document, question = texts(model)
    assert (len(document), len(question)) == (3501, 5)
    rows = generation(model, document[:200], question, rounds=1)
    streamed, prefills = streaming(model, document, question)
    rows += [*streamed, *end_to_end(model, document[:600], question, list(prefills), lambda _: None)]
    assert len(prefills) == 2
    assert [row.target for row in rows] == [1.6, 1.1, 0.03, 1.1, 1.1, 1.97, 7.6, 42]
    for row in rows:
        data = row.to_dict()
        assert data["value"] > 0
        assert data["met"] in (True, False)
        assert all(value > 0 for value in data["details"].values())
