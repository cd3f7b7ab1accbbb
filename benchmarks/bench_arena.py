"""Memory for states: made, leased, written for the first time, given back; each beside `np.copyto` of as many bytes."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np
import pytest
from sizes import Place, synthetic
from turns import copyto, rounds_for, warmed

from swarmkv_ll import Arena, Lease
from swarmkv_ll.measure import Times

InTurns = Callable[..., Times]

MAKINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "small-pages": {"huge_pages": False},
    "untouched": {"prefault": False, "pin": False},
}
"""Ways to make an arena. Locking the pages touches them too."""

PAGES = {"huge-pages": True, "small-pages": False}


@pytest.mark.benchmark(group="arena")
@pytest.mark.parametrize("how", MAKINGS)
@synthetic
def bench_make(in_turns: InTurns, place: Place, target: Lease, how: str) -> None:
    n_bytes, options = place.snapshot.n_bytes, MAKINGS[how]
    in_turns(
        lambda: Arena(n_bytes, **options),
        copyto(target, place.snapshot),
        rounds=rounds_for(n_bytes, most=25),
        n_bytes=n_bytes,
    )


@pytest.mark.benchmark(group="arena")
@pytest.mark.parametrize("pages", PAGES)
@synthetic
def bench_first_touch(in_turns: InTurns, place: Place, target: Lease, pages: str) -> None:
    """The same copy into memory that nobody has touched: what `prefault` takes out of the first fork."""
    source, n_bytes = place.snapshot.array, place.snapshot.n_bytes

    def untouched() -> Lease:
        return Arena(n_bytes, prefault=False, pin=False, huge_pages=PAGES[pages]).lease(n_bytes)

    in_turns(
        lambda lease: np.copyto(lease.array, source),
        copyto(target, place.snapshot),
        rounds=rounds_for(n_bytes, most=25),
        prepare=untouched,
        n_bytes=n_bytes,
    )


@pytest.mark.benchmark(group="arena")
@synthetic
def bench_close(in_turns: InTurns, place: Place, target: Lease) -> None:
    n_bytes = place.snapshot.n_bytes
    in_turns(
        lambda arena: arena.close(),
        copyto(target, place.snapshot),
        rounds=rounds_for(n_bytes, most=25),
        prepare=lambda: Arena(n_bytes),
        n_bytes=n_bytes,
    )


@pytest.mark.benchmark(group="arena")
@synthetic
def bench_lease(in_turns: InTurns, place: Place, target: Lease) -> None:
    """Bookkeeping: as long at any size, in warm caches; so are the next two."""
    n_bytes = place.snapshot.n_bytes
    in_turns(
        lambda _: place.arena.lease(n_bytes),
        copyto(target, place.snapshot),
        rounds=rounds_for(n_bytes),
        prepare=lambda: warmed(lambda: place.arena.lease(n_bytes).release()),
        n_bytes=n_bytes,
    )


@pytest.mark.benchmark(group="arena")
@synthetic
def bench_release_lease(in_turns: InTurns, place: Place, target: Lease) -> None:
    n_bytes = place.snapshot.n_bytes

    def warm() -> Lease:
        warmed(lambda: place.arena.lease(n_bytes).release())
        return place.arena.lease(n_bytes)

    in_turns(
        lambda lease: lease.release(),
        copyto(target, place.snapshot),
        rounds=rounds_for(n_bytes),
        prepare=warm,
        n_bytes=n_bytes,
    )


@pytest.mark.benchmark(group="arena")
@synthetic
def bench_view(in_turns: InTurns, place: Place, target: Lease) -> None:
    """A lease's bytes as an array."""
    n_bytes = place.snapshot.n_bytes
    with place.arena.lease(n_bytes) as lease:
        in_turns(
            lambda _: lease.array,
            copyto(target, place.snapshot),
            rounds=rounds_for(n_bytes),
            prepare=lambda: warmed(lambda: lease.array),
            n_bytes=n_bytes,
        )


@pytest.mark.benchmark(group="arena")
@pytest.mark.parametrize("n_leases", [16, 256])
def bench_lease_among(in_turns: InTurns, n_leases: int) -> None:
    """Beside others with a hole after each, every one of which is looked at."""
    page = 4096
    with Arena((2 * n_leases + 1) * page) as arena, Arena(page) as empty:
        leases = [arena.lease(page) for _ in range(2 * n_leases)]
        for lease in leases[1::2]:
            lease.release()

        def alone() -> float:
            begin = perf_counter()
            lease = empty.lease(page)
            seconds = perf_counter() - begin
            lease.release()
            return seconds

        in_turns(lambda: arena.lease(page), alone, beside="a lease in an empty arena", rounds=200, n_leases=n_leases)
        for lease in leases[::2]:
            lease.release()
