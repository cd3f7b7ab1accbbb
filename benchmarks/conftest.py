"""Shared state of the benchmarks: the default model, a document of 3,501 tokens computed once, and its snapshot."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from swarmkv_ll import Arena, Context, Model, Snapshot
from swarmkv_ll.default_model import fetch_default_model
from swarmkv_ll.fanout import prefill
from swarmkv_ll.measure import Times, activation, copies
from swarmkv_ll.pipeline_measure import texts

N_CTX = 4608

_ratios: list[tuple[str, float, str, bool]] = []


def pytest_xdist_auto_num_workers() -> int:
    """None: nothing else is to run beside what is measured."""
    return 0


@pytest.fixture
def ratio(benchmark: Any) -> Any:
    """Record a ratio beside its target, in this benchmark's `extra_info` and in the closing table."""

    def record(name: str, value: float, target: float, *, at_most: bool = False, **details: float) -> None:
        met = value <= target if at_most else value >= target
        wanted = f"{'≤' if at_most else '≥'} {target:g}"
        benchmark.extra_info.update({"ratio": name, "value": value, "wanted": wanted, "met": met, **details})
        _ratios.append((name, value, wanted, met))

    return record


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print every ratio with its target."""
    if _ratios:
        terminalreporter.section("ratios measured in this run")
        for name, value, wanted, met in _ratios:
            terminalreporter.line(f"{name:<62} {value:>9.3f}   {wanted:>8}   {'met' if met else 'missed'}")


@pytest.fixture(scope="session")
def model() -> Iterator[Model]:
    """The default model."""
    with Model(fetch_default_model()) as loaded:
        yield loaded


@pytest.fixture(scope="session")
def document(model: Model) -> npt.NDArray[np.int32]:
    """3,501 tokens of the sample specification, which begins anew at its end."""
    return texts(model)[0]


@pytest.fixture(scope="session")
def question(model: Model) -> npt.NDArray[np.int32]:
    """A branch's prompt of 5 tokens."""
    return texts(model)[1]


@pytest.fixture(scope="session")
def ctx(model: Model, document: npt.NDArray[np.int32]) -> Iterator[Context]:
    """A context that holds the document in sequence 0, and has eight more sequences."""
    with model.context(N_CTX, 9) as context:
        prefill(context, document)
        yield context


@pytest.fixture(scope="session")
def arena(ctx: Context) -> Iterator[Arena]:
    """Room for the document's snapshot and two forks."""
    with Arena.for_branches(ctx, 2) as made:
        yield made


@pytest.fixture(scope="session")
def snapshot(ctx: Context, arena: Arena) -> Iterator[Snapshot]:
    """The document's state."""
    with ctx.snapshot(arena) as taken:
        yield taken


@pytest.fixture(scope="session")
def copied(ctx: Context, snapshot: Snapshot) -> Times:
    """Fork, export, restore and share beside `np.copyto`, in turns."""
    return copies(ctx, snapshot, rounds=40)


@pytest.fixture(scope="session")
def active(ctx: Context, snapshot: Snapshot, question: npt.NDArray[np.int32]) -> Times:
    """The ways to a branch's first logits, in turns."""
    return activation(ctx, snapshot, question, rounds=41)
