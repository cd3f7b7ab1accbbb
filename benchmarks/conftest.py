"""Shared state of the benchmarks: the default model, one document, its states of all lengths; and the closing tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import turns
from sizes import BYTES, N_DOCUMENT, SLACK, TOKENS, Place, Prefill, make_snapshot
from turns import COPYTO, Row

import swarmkv_ll.arena
from swarmkv_ll import Arena, Context, Lease, Model, Snapshot
from swarmkv_ll.default_model import fetch_default_model
from swarmkv_ll.errors import ModelUnavailableError
from swarmkv_ll.measure import Times
from swarmkv_ll.pipeline_measure import texts

Tokens = npt.NDArray[np.int32]

N_CTX = 8192

_rows: list[Row] = []
_targets: list[tuple[str, float, str, bool]] = []


def pytest_xdist_auto_num_workers() -> int:
    """None: nothing else is to run beside what is measured."""
    return 0


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Put the longest prefill first: it is the one that all real states are cut from, and takes minutes."""
    items.sort(key=lambda item: item.name != f"bench_reprefill[{max(TOKENS)}-tokens]")


# ── what is recorded ─────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def note(benchmark: Any) -> Callable[..., None]:
    """Record an operation's times and its yardstick's, in this benchmark's `extra_info` and in the closing table."""

    def record(times: Times, yardstick: str, **sizes: float) -> None:
        _rows.append(turns.note(benchmark, times, yardstick, **sizes))

    return record


@pytest.fixture
def in_turns(benchmark: Any, note: Callable[..., None]) -> Callable[..., Times]:
    """Measure an operation and its yardstick in turns, and record them; gives the seconds of both, round by round."""

    def measure(
        step: Callable[..., object],
        yardstick: Callable[[], object],
        *,
        rounds: int,
        beside: str = COPYTO,
        warmup: int = 1,
        prepare: Callable[[], object] | None = None,
        **sizes: float,
    ) -> Times:
        times = turns.in_turns(benchmark, step, yardstick, rounds=rounds, warmup=warmup, prepare=prepare)
        note(times, beside, **sizes)
        return times

    return measure


@pytest.fixture
def ratio(benchmark: Any) -> Callable[..., None]:
    """Record a figure beside its target, in this benchmark's `extra_info` and in the closing table."""

    def record(name: str, value: float, target: float, *, at_most: bool = False, **details: float) -> None:
        met = value <= target if at_most else value >= target
        wanted = f"{'≤' if at_most else '≥'} {target:g}"
        told = {"name": name, "value": value, "wanted": wanted, "met": met, **details}
        benchmark.extra_info.setdefault("targets", []).append(told)
        _targets.append((name, value, wanted, met))

    return record


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print every ratio to a yardstick, and every figure that has a target."""
    if _rows:
        terminalreporter.section("times, and speed as a multiple of the yardstick's")
        for line in turns.table(_rows):
            terminalreporter.line(line)
    if _targets:
        terminalreporter.section("figures with targets")
        for name, value, wanted, met in _targets:
            terminalreporter.line(f"{name:<62} {value:>9.3f}   {wanted:>8}   {'met' if met else 'missed'}")


# ── synthetic and real states ────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="session")
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """A state of the size that is asked for, synthetic if that is in bytes, and an arena with room for two more."""
    size = request.param
    if isinstance(size, int):
        taken = request.getfixturevalue("states")[size]
        with Arena(2 * (taken.n_bytes + SLACK)) as arena:
            yield Place(size, taken, arena)
        return
    needed, there = 4 * (BYTES[size] + SLACK), swarmkv_ll.arena.available_memory()  # the fourth: arenas made meanwhile
    if needed > there:
        pytest.skip(f"{size} needs {needed / 2**30:.2f} GiB of memory, {there / 2**30:.2f} are available")
    with Arena(3 * (BYTES[size] + SLACK)) as arena, make_snapshot(size, arena) as made:
        yield Place(size, made, arena)


@pytest.fixture
def target(place: Place) -> Iterator[Lease]:
    """Memory to copy to, a little larger than the state."""
    with place.arena.lease(place.snapshot.n_bytes + SLACK // 2) as lease:
        yield lease


# ── the model ────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="session")
def model() -> Iterator[Model]:
    """The default model."""
    try:
        path = fetch_default_model()
    except ModelUnavailableError as error:
        pytest.skip(str(error))
    with Model(path) as loaded:
        yield loaded


@pytest.fixture(scope="session")
def document(model: Model) -> Tokens:
    """8,000 tokens: the sample specification, over and over."""
    return np.resize(texts(model)[0], max(TOKENS))


@pytest.fixture(scope="session")
def question(model: Model) -> Tokens:
    """A branch's prompt of 5 tokens."""
    return texts(model)[1]


@pytest.fixture(scope="session")
def ctx(model: Model) -> Iterator[Context]:
    """A context of 9 sequences in one unified cache. Each benchmark restores into it what it needs."""
    with model.context(N_CTX, 9) as context:
        yield context


@pytest.fixture(scope="session")
def lengths(request: pytest.FixtureRequest) -> list[int]:
    """Of the real states that the selected benchmarks need, in tokens."""
    asked = {N_DOCUMENT for item in request.session.items if "snapshot" in item.fixturenames}
    for item in request.session.items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        asked |= {size for name in ("place", "n_tokens") if isinstance(size := params.get(name), int)}
    return sorted(asked)


@pytest.fixture(scope="session")
def prefilled(ctx: Context, document: Tokens, lengths: list[int]) -> Prefill:
    """The session's prefill, not yet run."""
    return Prefill(ctx, document[: lengths[-1]])


@pytest.fixture(scope="session")
def states(ctx: Context, prefilled: Prefill, lengths: list[int]) -> Iterator[dict[int, Snapshot]]:
    """Real states by their lengths, in an arena with room for one more of the longest."""
    prefilled.run()
    longest = ctx.state_size()
    n_bytes = sum(longest * n // lengths[-1] + SLACK for n in lengths) + longest + SLACK
    with Arena(n_bytes) as arena:
        made = {lengths[-1]: ctx.snapshot(arena, tokens=prefilled.tokens)}
        made |= {n: made[lengths[-1]].slice(n) for n in lengths[:-1]}
        yield made
        for snapshot in made.values():
            snapshot.release()


@pytest.fixture(scope="session")
def snapshot(states: dict[int, Snapshot]) -> Snapshot:
    """The state of 3,501 tokens, which figures with targets are taken at."""
    return states[N_DOCUMENT]
