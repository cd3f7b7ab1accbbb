"""Moving states: fork, share, export, restore; each beside `np.copyto` of as many bytes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from statistics import median
from time import perf_counter
from typing import Any

import pytest
from sizes import N_DOCUMENT, Place, at_any_size, real
from turns import copyto, rounds_for, warmed

from swarmkv_ll import Arena, Context, Lease, Model, Snapshot
from swarmkv_ll.measure import Times, copies

InTurns = Callable[..., Times]

# ── fork and share: no engine takes part, so states can be of any size ───────────────────────────────


@pytest.mark.benchmark(group="fork")
@at_any_size
def bench_fork(in_turns: InTurns, ratio: Any, place: Place, target: Lease) -> None:
    state, n_bytes = place.snapshot, place.snapshot.n_bytes
    times = in_turns(lambda: state.fork(place.arena), copyto(target, state), rounds=rounds_for(n_bytes), **place.sizes)
    if place.size == N_DOCUMENT:
        ratio("fork, warm, as a share of np.copyto", times.ratio("yardstick", "step"), 0.95)


@pytest.mark.benchmark(group="fork")
@at_any_size
def bench_first_fork(in_turns: InTurns, ratio: Any, place: Place, target: Lease) -> None:
    """Into an arena that was just made: it has faulted its pages in, so this one costs what later ones do."""
    state, warm = place.snapshot, []

    def fresh() -> Arena:
        begin = perf_counter()
        fork = state.fork(place.arena)
        warm.append(perf_counter() - begin)
        fork.release()
        return Arena(state.n_bytes)

    times = in_turns(
        state.fork, copyto(target, state), rounds=rounds_for(state.n_bytes, most=25), prepare=fresh, **place.sizes
    )
    if place.size == N_DOCUMENT:
        share = median(a / b for a, b in zip(warm[-len(times["step"]) :], times["step"], strict=True))
        ratio("first fork in a new arena, as a share of a warm one", share, 0.75)


@pytest.mark.benchmark(group="share")
@at_any_size
def bench_share(request: pytest.FixtureRequest, in_turns: InTurns, ratio: Any, place: Place, target: Lease) -> None:
    """No copy: as long at any size, in warm caches. The target is for one after a restore, which leaves them colder."""
    state = place.snapshot
    in_turns(
        lambda _: state.share(),
        copyto(target, state),
        rounds=rounds_for(state.n_bytes),
        prepare=lambda: warmed(lambda: state.share().release()),
        **place.sizes,
    )
    if place.size == N_DOCUMENT:
        ctx = request.getfixturevalue("ctx")
        state.restore(ctx)
        ratio("share(), µs", 1e6 * copies(ctx, state).median("share"), 20, at_most=True)


@pytest.mark.benchmark(group="share")
@at_any_size
def bench_release(in_turns: InTurns, place: Place, target: Lease) -> None:
    """Of one of two that share: nothing is given back, at any size; in warm caches."""
    state = place.snapshot

    def warm() -> Snapshot:
        warmed(lambda: state.share().release())
        return state.share()

    in_turns(
        lambda shared: shared.release(),
        copyto(target, state),
        rounds=rounds_for(state.n_bytes),
        prepare=warm,
        **place.sizes,
    )


# ── export and restore: by the engine ────────────────────────────────────────────────────────────────


@pytest.mark.benchmark(group="export")
@real
def bench_export(in_turns: InTurns, ratio: Any, ctx: Context, place: Place, target: Lease) -> None:
    state, n_bytes = place.snapshot, place.snapshot.n_bytes
    state.restore(ctx)
    times = in_turns(
        lambda: ctx.snapshot(place.arena), copyto(target, state), rounds=rounds_for(n_bytes), **place.sizes
    )
    if place.size == N_DOCUMENT:
        ratio("export, as a share of np.copyto", times.ratio("yardstick", "step"), 0.85)


@pytest.mark.benchmark(group="export")
@real
def bench_export_context(in_turns: InTurns, ctx: Context, place: Place, target: Lease) -> None:
    """The whole context, which holds one sequence."""
    state, n_bytes = place.snapshot, place.snapshot.n_bytes
    ctx.clear()
    state.restore(ctx)
    in_turns(
        lambda: ctx.snapshot(place.arena, seq=None), copyto(target, state), rounds=rounds_for(n_bytes), **place.sizes
    )


@pytest.mark.benchmark(group="restore")
@real
def bench_restore(in_turns: InTurns, ratio: Any, ctx: Context, place: Place, target: Lease) -> None:
    state = place.snapshot
    times = in_turns(lambda: state.restore(ctx), copyto(target, state), rounds=rounds_for(state.n_bytes), **place.sizes)
    if place.size == N_DOCUMENT:
        ratio("restore, as a share of np.copyto", times.ratio("yardstick", "step"), 0.85)


@pytest.mark.benchmark(group="restore")
@real
def bench_restore_context(in_turns: InTurns, ctx: Context, place: Place, target: Lease) -> None:
    """The whole context, which holds one sequence."""
    ctx.clear()
    place.snapshot.restore(ctx)
    with ctx.snapshot(place.arena, seq=None) as state:
        in_turns(lambda: state.restore(ctx), copyto(target, state), rounds=rounds_for(state.n_bytes), **place.sizes)


@pytest.mark.benchmark(group="restore")
@real
def bench_restore_prefix(in_turns: InTurns, ctx: Context, place: Place, target: Lease) -> None:
    """Half of the tokens, cut on the way, which is a copy more; beside a copy of half as many bytes."""
    state, n_tokens = place.snapshot, place.snapshot.n_tokens // 2
    in_turns(
        lambda: state.restore(ctx, n_tokens=n_tokens),
        copyto(target, state, state.n_bytes // 2),
        rounds=rounds_for(state.n_bytes),
        n_bytes=state.n_bytes // 2,
        n_tokens=n_tokens,
    )


@pytest.mark.benchmark(group="restore")
@real
def bench_restore_into_stream(in_turns: InTurns, model: Model, place: Place, target: Lease) -> None:
    """Into a context whose sequences have cells of their own, converted on the way, which is a copy more."""
    state = place.snapshot
    n_cells = -(-state.n_tokens // 256) * 256
    with model.context(2 * n_cells, 2, kv_unified=False) as other:
        in_turns(
            lambda: state.restore(other, 1), copyto(target, state), rounds=rounds_for(state.n_bytes), **place.sizes
        )


@pytest.mark.benchmark(group="restore")
@pytest.mark.parametrize("flash_attn", [True, False], ids=["flash", "no-flash"])
@pytest.mark.parametrize("gap", [1, 8])
def bench_fragmented_restore(
    in_turns: InTurns, ratio: Any, model: Model, snapshot: Snapshot, flash_attn: bool, gap: int
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
        begin = perf_counter()
        first = state.restore(ctx)
        first_ms = 1e3 * (perf_counter() - begin)
        times = in_turns(
            lambda: state.restore(ctx),
            lambda: state.restore(other),
            beside="restore into an empty context",
            rounds=15,
            n_bytes=state.n_bytes,
            n_tokens=n,
            first_ms=first_ms,
            moved=first.moved,
        )
        ratio(
            f"restore among holes of {gap}{'' if flash_attn else ', V transposed'}, times a contiguous one",
            times.ratio("step", "yardstick"),
            1.5,
            at_most=True,
        )


def scatter(ctx: Context, state: Snapshot, gap: int) -> None:
    """Sequences 1 and 2 hold every other `gap` cells of the cache's first half."""
    for seq in (1, 2):
        state.restore(ctx, seq)
    for seq in (1, 2):
        for begin in range(0, state.n_tokens, 2 * gap):
            ctx.remove(seq, begin, min(begin + gap, state.n_tokens))
