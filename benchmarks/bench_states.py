"""A document's state as data: looked into, cut, converted, saved and loaded; each beside copying as many bytes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pytest

from swarmkv_ll import Arena, Context, Lease, Model, Snapshot
from swarmkv_ll.blob import StateBlob, convert, parse
from swarmkv_ll.blob import slice as slice_blob
from swarmkv_ll.measure import Times, interleaved


@pytest.fixture(scope="module")
def places(snapshot: Snapshot) -> Iterator[tuple[Lease, Lease]]:
    """The state's bytes in memory of their own, and a little more faulted-in memory to write to."""
    n_bytes = snapshot.n_bytes
    with Arena(2 * n_bytes + 131072) as arena, arena.lease(n_bytes) as source, arena.lease(n_bytes + 65536) as target:
        source.array[:] = snapshot.array
        yield source, target


def beside_copyto(places: tuple[Lease, Lease], n_bytes: int, step: Callable[[], object]) -> Times:
    """Time a step in turns with `np.copyto` of as many bytes as it writes."""
    source, target = places
    return interleaved(25, copyto=lambda: np.copyto(target.array[:n_bytes], source.array[:n_bytes]), step=step)


@pytest.mark.benchmark(group="blob")
def bench_parse(benchmark: Any, ratio: Any, snapshot: Snapshot, model: Model) -> None:
    with snapshot.fork() as fork:
        parts = model.capabilities.blob_parts
        benchmark.pedantic(lambda: parse(fork.array, parts), rounds=50)
    ratio("parse, ms", 1e3 * benchmark.stats.stats.median, 2, at_most=True)


@pytest.mark.benchmark(group="blob")
@pytest.mark.parametrize("share", [1.0, 0.5])
def bench_slice(benchmark: Any, ratio: Any, places: tuple[Lease, Lease], snapshot: Snapshot, share: float) -> None:
    blob, n_tokens = parse(places[0].array), int(share * snapshot.n_tokens) - 1

    def cut() -> StateBlob:
        return slice_blob(blob, n_tokens).write(places[1].array)

    times = beside_copyto(places, cut().n_bytes, cut)
    benchmark.pedantic(cut, rounds=10)
    ratio(f"slice to {n_tokens:,} tokens, as a share of np.copyto", times.ratio("copyto", "step"), 0.5)


@pytest.mark.benchmark(group="blob")
def bench_convert_streams(benchmark: Any, ratio: Any, places: tuple[Lease, Lease]) -> None:
    blob = parse(places[0].array)

    def spread() -> StateBlob:
        return convert(blob, n_stream=8).write(places[1].array)

    times = beside_copyto(places, blob.n_bytes, spread)
    benchmark.pedantic(spread, rounds=10)
    ratio("convert 1 → 8 streams, as a share of np.copyto", times.ratio("copyto", "step"), 0.5)


@pytest.mark.benchmark(group="blob")
@pytest.mark.parametrize("transposed", [True, False], ids=["transpose", "back"])
def bench_transpose_v(benchmark: Any, ratio: Any, places: tuple[Lease, Lease], transposed: bool) -> None:
    blob = convert(parse(places[0].array), v_transposed=not transposed).write()

    def turn() -> StateBlob:
        return convert(blob, v_transposed=transposed).write(places[1].array)

    times = beside_copyto(places, blob.n_bytes, turn)
    benchmark.pedantic(turn, rounds=10)
    how = "transpose V" if transposed else "transpose V back"
    ratio(f"{how}, as a share of np.copyto", times.ratio("copyto", "step"), 0.2)


@pytest.mark.benchmark(group="files")
def bench_load(
    benchmark: Any,
    ratio: Any,
    snapshot: Snapshot,
    places: tuple[Lease, Lease],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """From the page cache into a lease, checksums verified, beside one `preadv` of as many bytes."""
    path: Path = tmp_path_factory.mktemp("files") / "document.skv"
    snapshot.save(path)
    with open(path, "rb") as file, Arena(snapshot.n_bytes + 65536) as arena:

        def preadv() -> None:
            at = 0
            while at < snapshot.n_bytes:
                at += os.preadv(file.fileno(), [places[1].array[at : snapshot.n_bytes]], 4096 + at)

        def load() -> Snapshot:
            return Snapshot.load(path, arena)

        times = interleaved(25, preadv=preadv, load=load)
        benchmark.pedantic(lambda: load().release(), rounds=10)
    ratio("load, verified, as a share of preadv", times.ratio("preadv", "load"), 0.5)


@pytest.mark.benchmark(group="files")
def bench_save(benchmark: Any, ratio: Any, snapshot: Snapshot, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Onto the disk, beside writing and flushing as many bytes."""
    folder = tmp_path_factory.mktemp("files")

    def plain() -> None:
        with open(folder / "plain", "wb", buffering=0) as file, snapshot.array.data as view:
            file.write(view)
            os.fsync(file.fileno())

    times = interleaved(7, plain=plain, save=lambda: snapshot.save(folder / "document.skv"))
    benchmark.pedantic(lambda: snapshot.save(folder / "document.skv"), rounds=3)
    ratio("save, as a share of write and fsync", times.ratio("plain", "save"), 0.5)


@pytest.mark.benchmark(group="restore")
@pytest.mark.parametrize("flash_attn", [True, False], ids=["flash", "no-flash"])
@pytest.mark.parametrize("gap", [1, 8])
def bench_fragmented_restore(
    benchmark: Any, ratio: Any, model: Model, snapshot: Snapshot, flash_attn: bool, gap: int
) -> None:
    """Between another sequence's cells with holes of `gap`: the first moves them together, as those after find them."""
    n = 1500
    with ExitStack() as stack:
        ctx = stack.enter_context(model.context(4 * n, 3, flash_attn=flash_attn))
        arena = stack.enter_context(Arena(2 * snapshot.n_bytes))
        with snapshot.slice(n, arena) as document:
            document.restore(ctx, allow_inexact=True)
        state = stack.enter_context(ctx.snapshot(arena))
        other = stack.enter_context(model.context(4 * n, 3, flash_attn=flash_attn))
        ctx.clear()
        scatter(ctx, state, gap)
        first = benchmark.pedantic(lambda: state.restore(ctx), rounds=1)
        times = interleaved(
            15,
            contiguous=lambda: seconds(lambda: state.restore(other)),
            fragmented=lambda: seconds(lambda: state.restore(ctx)),
        )
        ratio(
            f"restore among holes of {gap}{'' if flash_attn else ', V transposed'}, times a contiguous one",
            times.ratio("fragmented", "contiguous"),
            1.5,
            at_most=True,
            first_ms=1e3 * benchmark.stats.stats.median,
            contiguous_ms=1e3 * times.median("contiguous"),
            moved=first.moved,
        )


def scatter(ctx: Context, state: Snapshot, gap: int) -> None:
    """Sequences 1 and 2 hold every other `gap` cells of the cache's first half."""
    for seq in (1, 2):
        state.restore(ctx, seq)
    for seq in (1, 2):
        for begin in range(0, state.n_tokens, 2 * gap):
            ctx.remove(seq, begin, min(begin + gap, state.n_tokens))


def seconds(step: Callable[[], object]) -> float:
    """Time of a step whose result is not to be looked at."""
    begin = perf_counter()
    step()
    return perf_counter() - begin
