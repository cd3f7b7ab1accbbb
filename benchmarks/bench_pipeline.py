"""Pipelines: the rows of `swarmkv run --measure`."""

from __future__ import annotations

from typing import Any

import pytest

from swarmkv_ll import Model
from swarmkv_ll.pipeline_measure import measure


@pytest.mark.benchmark(group="pipeline")
def bench_pipeline(benchmark: Any, ratio: Any, model: Model) -> None:
    """Branches against re-prefills, streaming prefill, batched generation, fairness, overhead, memory."""
    rows = benchmark.pedantic(lambda: measure(model, lambda _: None), rounds=1)
    for row in rows:
        ratio(row.name, row.value, row.target, at_most=row.at_most)
    benchmark.extra_info["rows"] = [row.to_dict() for row in rows]
