"""State blobs as data: looked into, cut, put together, converted; each beside copying as many bytes as it writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sizes import BYTES, N_DOCUMENT, SLACK, Place, at_any_size, synthetic, write_state
from turns import copyto, rounds_for

from swarmkv_ll import Lease
from swarmkv_ll.blob import Edit, StateBlob, append, convert, delta, extract, parse
from swarmkv_ll.blob import slice as slice_blob
from swarmkv_ll.measure import Times

InTurns = Callable[..., Times]


@pytest.fixture
def other(place: Place) -> Iterator[Lease]:
    """Memory for a blob to be made from, where that is not the state itself."""
    with place.arena.lease(place.snapshot.n_bytes + SLACK // 2) as lease:
        yield lease


def edited(in_turns: InTurns, place: Place, target: Lease, edit: Callable[[], Edit]) -> Times:
    """Plan an edit and write it."""
    n_bytes = edit().n_bytes
    return in_turns(
        lambda: edit().write(target.array),
        copyto(target, place.snapshot, min(n_bytes, place.snapshot.n_bytes)),
        rounds=rounds_for(n_bytes),
        n_bytes=n_bytes,
        n_tokens=place.snapshot.n_tokens,
    )


@pytest.mark.benchmark(group="blob")
@at_any_size
def bench_parse(in_turns: InTurns, ratio: Any, place: Place, target: Lease) -> None:
    """Passes over keys and values: takes as long as there are cells and layers."""
    data, parts = place.snapshot.array, place.snapshot.blob.layout.parts
    times = in_turns(
        lambda: parse(data, parts), copyto(target, place.snapshot), rounds=rounds_for(len(data)), **place.sizes
    )
    if place.size == N_DOCUMENT:
        ratio("parse, ms", 1e3 * times.median("step"), 2, at_most=True)


@pytest.mark.benchmark(group="blob")
@at_any_size
def bench_look(in_turns: InTurns, place: Place, target: Lease) -> None:
    """Every layer's keys and values as arrays: views."""
    blob = place.snapshot.blob

    def look() -> list[Any]:
        return [(layer.k, layer.v) for layer in blob.layers]

    in_turns(look, copyto(target, place.snapshot), rounds=rounds_for(blob.n_bytes), **place.sizes)


@pytest.mark.benchmark(group="blob")
@pytest.mark.parametrize("part", ["all-but-one", "half"])
@at_any_size
def bench_slice(in_turns: InTurns, ratio: Any, place: Place, target: Lease, part: str) -> None:
    blob, n = place.snapshot.blob, place.snapshot.n_tokens
    n_tokens = n - 1 if part == "all-but-one" else n // 2
    times = edited(in_turns, place, target, lambda: slice_blob(blob, n_tokens))
    if place.size == N_DOCUMENT:
        ratio(f"slice to {n_tokens:,} tokens, as a share of np.copyto", times.ratio("yardstick", "step"), 0.5)


@pytest.mark.benchmark(group="blob")
@at_any_size
def bench_delta(in_turns: InTurns, place: Place, target: Lease) -> None:
    """The second half of the tokens."""
    blob, begin = place.snapshot.blob, place.snapshot.n_tokens // 2
    edited(in_turns, place, target, lambda: delta(blob, begin))


@pytest.mark.benchmark(group="blob")
@at_any_size
def bench_append(in_turns: InTurns, place: Place, target: Lease, other: Lease) -> None:
    """Both halves, as one again."""
    blob, n_tokens = place.snapshot.blob, place.snapshot.n_tokens // 2
    half = slice_blob(blob, n_tokens).write(other.array)
    tail = delta(blob, n_tokens).write(other.array[half.n_bytes :])
    edited(in_turns, place, target, lambda: append(half, tail))


@pytest.mark.benchmark(group="blob")
@at_any_size
def bench_convert_streams(in_turns: InTurns, ratio: Any, place: Place, target: Lease) -> None:
    """For a context of 8 sequences with cells of their own."""
    blob = place.snapshot.blob
    times = edited(in_turns, place, target, lambda: convert(blob, n_stream=8))
    if place.size == N_DOCUMENT:
        ratio("convert 1 → 8 streams, as a share of np.copyto", times.ratio("yardstick", "step"), 0.5)


@pytest.mark.benchmark(group="blob")
@pytest.mark.parametrize("way", ["there", "back"])
@at_any_size
def bench_transpose_v(in_turns: InTurns, ratio: Any, place: Place, target: Lease, other: Lease, way: str) -> None:
    """V as contexts without flash attention keep it."""
    blob, transposed = place.snapshot.blob, way == "there"
    if not transposed:
        blob = convert(blob, v_transposed=True).write(other.array)
    times = edited(in_turns, place, target, lambda: convert(blob, v_transposed=transposed))
    if place.size == N_DOCUMENT:
        how = "transpose V" if transposed else "transpose V back"
        ratio(f"{how}, as a share of np.copyto", times.ratio("yardstick", "step"), 0.2)


@pytest.mark.benchmark(group="blob")
@synthetic
def bench_extract(in_turns: InTurns, place: Place, target: Lease, other: Lease) -> None:
    """A sequence out of a whole context's blob."""
    whole: StateBlob = write_state(BYTES[place.size], allocate=lambda n: other.array[:n], arch="llama")
    edited(in_turns, place, target, lambda: extract(whole, 0))
