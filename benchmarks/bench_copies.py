"""Moving a document's state: fork, export, restore, share; each beside `np.copyto` of as many bytes."""

from __future__ import annotations

from typing import Any

import pytest

from swarmkv_ll import Arena, Context, Snapshot
from swarmkv_ll.measure import Times


@pytest.mark.benchmark(group="fork")
def bench_fork(benchmark: Any, ratio: Any, snapshot: Snapshot, copied: Times) -> None:
    forks: list[Snapshot] = []

    def release() -> None:
        while forks:
            forks.pop().release()

    benchmark.pedantic(lambda: forks.append(snapshot.fork()), setup=release, rounds=25)
    release()
    ratio("fork, warm, as a share of np.copyto", copied.ratio("copyto", "fork"), 0.95, n_bytes=snapshot.n_bytes)


@pytest.mark.benchmark(group="fork")
def bench_first_fork(benchmark: Any, ratio: Any, snapshot: Snapshot, copied: Times) -> None:
    kept: list[Any] = []

    def fresh() -> tuple[tuple[Arena], dict[str, Any]]:
        close()
        kept.append(Arena(snapshot.n_bytes))
        return (kept[0],), {}

    def close() -> None:
        while kept:
            last = kept.pop()
            (last.release if isinstance(last, Snapshot) else last.close)()

    benchmark.pedantic(lambda arena: kept.append(snapshot.fork(arena)), setup=fresh, rounds=5)
    close()
    ratio("first fork in a new arena, as a share of a warm one", copied.ratio("fork", "first_fork"), 0.75)


@pytest.mark.benchmark(group="export")
def bench_export(benchmark: Any, ratio: Any, ctx: Context, arena: Arena, copied: Times) -> None:
    taken: list[Snapshot] = []

    def release() -> None:
        while taken:
            taken.pop().release()

    benchmark.pedantic(lambda: taken.append(ctx.snapshot(arena)), setup=release, rounds=25)
    release()
    ratio("export, as a share of np.copyto", copied.ratio("copyto", "export"), 0.85)


@pytest.mark.benchmark(group="restore")
def bench_restore(benchmark: Any, ratio: Any, ctx: Context, snapshot: Snapshot, copied: Times) -> None:
    benchmark.pedantic(lambda: snapshot.restore(ctx), rounds=25)
    ratio("restore, as a share of np.copyto", copied.ratio("copyto", "restore"), 0.85)


@pytest.mark.benchmark(group="share")
def bench_share(benchmark: Any, ratio: Any, snapshot: Snapshot, copied: Times) -> None:
    shared: list[Snapshot] = []

    def release() -> None:
        while shared:
            shared.pop().release()

    benchmark.pedantic(lambda: shared.append(snapshot.share()), setup=release, rounds=200)
    release()
    ratio("share(), µs", 1e6 * copied.median("share"), 20, at_most=True)
