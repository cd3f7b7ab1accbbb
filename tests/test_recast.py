"""Blobs made of blobs: against a slow reference on hand-made states (handmade.py), and against the engine itself."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tiny_models
from handmade import Cell, State, every_layout, make_cache, random_state
from helpers import (
    ATTENTION,
    BRANCH,
    KINDS,
    RECURRENT,
    SLIDING,
    Models,
    all_logits,
    close,
    differs,
    identical,
    new_context,
    text_tokens,
    uninterrupted,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmkv_ll.blob import Edit, StateBlob, append, convert, delta, extract, parse, slice
from swarmkv_ll.errors import BlobError, InvalidArgumentError, PartialRemovalError, SwarmKVError

if TYPE_CHECKING:
    from swarmkv_ll import Context, Model

EVERY = every_layout()


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def see(state: State) -> StateBlob:
    return parse(state.encode(), state.parts)


def written(edit: Edit) -> bytes:
    blob = edit.write()
    assert blob.n_bytes == edit.n_bytes == len(blob.data)
    return blob.data.tobytes()


# ── the reference: the same edits on lists of cells ──────────────────────────────────────────────────


Streams = list[list[Cell]]


def changed(state: State, change: Callable[[int, Streams], Streams], **others: Any) -> State:
    """The state with each cache's streams changed, given the cache's number; nothing of the original is touched."""
    caches = [replace(cache, streams=change(c, cache.streams)) for c, cache in enumerate(state.caches)]
    return replace(state, caches=caches, **others)


def keep(state: State, wanted: Callable[[int], bool], first_windowed: int = 0) -> State:
    """The cells at wanted positions; of a windowed cache, those from `first_windowed` on."""

    def kept(c: int, streams: Streams) -> Streams:
        return [
            [cell for cell in cells if wanted(cell.pos) and (c == 0 or cell.pos >= first_windowed)] for cells in streams
        ]

    return changed(state, kept)


def sliced(state: State, n_tokens: int, window: int = 0) -> State:
    return keep(state, lambda pos: pos < n_tokens, n_tokens - window if window else 0)


def tail_of(state: State, begin: int) -> State:
    return keep(state, lambda pos: pos >= begin)


def joined(base: State, tail: State, window: int = 0) -> State:
    """Behind each other, in the stream that the state stands in."""
    last = max(cell.pos for cells in tail.caches[0].streams for cell in cells) + 1
    first = last - window if window else 0
    more = keep(tail, lambda pos: True, first)
    home = next(s for s, cells in enumerate(base.caches[0].streams) if cells)

    def both(c: int, streams: Streams) -> Streams:
        behind = [replace(cell, owners=[base.seq_id]) for cells in more.caches[c].streams for cell in cells]
        return [cells + behind if s == home else cells for s, cells in enumerate(streams)]

    return changed(keep(base, lambda pos: True, first), both)


def restreamed(state: State, n_stream: int) -> State:
    def moved(c: int, streams: Streams) -> Streams:
        if n_stream == len(streams):
            return streams
        cells = [cell for stream in streams for cell in stream]
        if state.arch is not None and n_stream > 1:
            return [[replace(cell, owners=[s]) for cell in cells if s in cell.owners] for s in range(n_stream)]
        home = state.seq_id if state.arch is None and state.seq_id < n_stream else 0
        return [cells if s == home else [] for s in range(n_stream)]

    return changed(state, moved)


def turned(state: State, v_trans: bool) -> State:
    return replace(state, caches=[replace(cache, v_trans=v_trans) for cache in state.caches])


def extracted(state: State, seq_id: int, window: int = 0) -> State:
    everyone = [(cell.pos, cell.owners) for cache in state.caches for cells in cache.streams for cell in cells]
    everyone += [(cell.pos, cell.owners) for cell in (state.recurrent.cells if state.recurrent else [])]
    end = max(pos for pos, owners in everyone if seq_id in owners) + 1

    def its_own(c: int, streams: Streams) -> Streams:
        first = end - window if c and window else 0
        return [
            [replace(cell, owners=[seq_id]) for cell in cells if seq_id in cell.owners and cell.pos >= first]
            for cells in streams
        ]

    memory = state.recurrent
    if memory:
        memory = replace(memory, cells=[cell for cell in memory.cells if seq_id in cell.owners])
    return changed(state, its_own, recurrent=memory, seq_id=seq_id, arch=None)


# ── on states made by hand ───────────────────────────────────────────────────────────────────────────

ORDERS = {
    "in order": list(range(150)),
    "shuffled": rng(3).permutation(150).tolist(),  # many runs
    "two halves": [*range(80, 150), *range(80)],  # two runs
    "swapped pairs": [pos ^ 1 for pos in range(150)],
    "every other": [*range(0, 150, 2), *range(149, 0, -2)],
}

SHAPES = {
    "f16": (("f16", 6), ("f16", 2)),
    "f32": (("f32", 3), ("f32", 5)),
    "bf16": (("bf16", 1),),
    "quantized": (("q8_0", 64), ("q4_0", 32)),
    "differing": (("f32", 1), ("f16", 7), ("q5_1", 32)),
}


def one(
    positions: Sequence[int], *, shape: str = "f16", v_trans: bool = False, seq_id: int = 3, **options: Any
) -> State:
    """An attention model's sequence."""
    k = SHAPES[shape]
    v = [(kind if kind in ("f32", "f16", "bf16") else "f16", n) for kind, n in k] if v_trans else k
    return State([make_cache(rng(), [positions], owner=seq_id, k=k, v=v, v_trans=v_trans)], seq_id=seq_id, **options)


def windowed(end: int, first: int, *, n_stream: int = 1, **options: Any) -> State:
    """A sequence of `end` tokens, of which the windowed layers hold those from `first` on."""
    full, part = ([[]] * (n_stream - 1) + [list(range(begin, end))] for begin in (0, first))
    return State([make_cache(rng(), full), make_cache(rng(1), part, k=(("f16", 3),))], **options)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("v_trans", [False, True])
def test_a_prefix_and_the_rest(order: str, shape: str, v_trans: bool) -> None:
    state = one(ORDERS[order], shape=shape, v_trans=v_trans)
    blob = see(state)
    for n_tokens in (1, 65, 149, 150):
        assert written(slice(blob, n_tokens)) == sliced(state, n_tokens).encode()
        if n_tokens < 150:
            assert written(delta(blob, n_tokens)) == tail_of(state, n_tokens).encode()
    again = written(append(slice(blob, 65).write(), delta(blob, 65).write()))
    assert again == joined(sliced(state, 65), tail_of(state, 65)).encode()
    assert (again == state.encode()) == (order == "in order")


def test_gaps_stay() -> None:
    state = one([*range(5), *range(9, 20)])
    blob = see(state)
    for n_tokens in (4, 5, 6, 9, 10, 19):
        assert written(slice(blob, n_tokens)) == sliced(state, n_tokens).encode()
        if n_tokens in (5, 6):
            with pytest.raises(InvalidArgumentError, match=f"a position of the sequence, it has none at {n_tokens}"):
                delta(blob, n_tokens)
            continue
        assert written(delta(blob, n_tokens)) == tail_of(state, n_tokens).encode()
    assert slice(blob, 9).write().sequences == {3: 5}  # there is nothing from 5 to 8
    with pytest.raises(InvalidArgumentError, match="should begin at position 5, begins at 9"):
        append(slice(blob, 9).write(), delta(blob, 9).write())
    assert written(append(slice(blob, 12).write(), delta(blob, 12).write())) == state.encode()


def test_the_whole_is_a_slice_of_itself() -> None:
    for name in ("attention", "transposed", "mixed types", "streams", "extension", "without V", "recurrent", "hybrid"):
        blob = see(EVERY[name])
        assert written(slice(blob, blob.sequences[3])) == EVERY[name].encode()


@pytest.mark.parametrize("name", [n for n, s in EVERY.items() if s.arch is None and s.caches and not s.recurrent])
def test_every_kind_of_sequence(name: str) -> None:
    """M-RoPE's x, y and token go with their cell; without V nothing is missed; streams stay."""
    state = EVERY[name]
    blob = see(state)
    end = max(blob.sequences.values(), default=0)
    for n_tokens in range(1, 9):
        if "window" not in name and "empty" not in name and min(blob.pos) < n_tokens <= end:
            assert written(slice(blob, n_tokens)) == sliced(state, n_tokens).encode()
        else:
            with pytest.raises((InvalidArgumentError, PartialRemovalError)):
                slice(blob, n_tokens)
        if n_tokens in blob.pos:
            assert written(delta(blob, n_tokens)) == tail_of(state, n_tokens).encode()
        else:
            with pytest.raises(InvalidArgumentError):
                delta(blob, n_tokens)


def test_streams_are_kept() -> None:
    state = windowed(40, 0, n_stream=4)
    prefix, rest = slice(see(state), 30).write(), delta(see(state), 30).write()
    assert prefix.n_stream == rest.n_stream == 4
    assert [len(stream.pos) for cache in prefix.caches for stream in cache] == [0, 0, 0, 30] * 2
    assert written(append(prefix, rest)) == state.encode()


@pytest.mark.parametrize("begin", [1, 30, 59])
def test_a_delta_of_another_context_is_appended(begin: int) -> None:
    """Of another sequence, another stream, unordered: what comes out stands where the state stood."""
    base = sliced(one(range(60), seq_id=1), begin)
    for other in (one(range(60), seq_id=2), one([*range(30), *range(59, 29, -1)], seq_id=2)):
        tail = tail_of(restreamed(other, 4), begin)
        found = append(see(base), see(tail)).write()
        assert found.data.tobytes() == joined(base, tail).encode()
        assert found.n_stream == 1
        assert found.caches[0][0].seq_id.tolist() == [1] * 60
        found = append(see(restreamed(base, 3)), see(tail)).write()
        assert found.data.tobytes() == joined(restreamed(base, 3), tail).encode()
        assert [len(stream.pos) for stream in found.caches[0]] == [0, 60, 0]


def test_pictures_stay_together() -> None:
    """Cells that share a position are on the same side of the cut."""
    state = one([0, 1, 1, 1, 2, 3], extension=True)
    for n_tokens in (1, 2, 3):
        assert written(slice(see(state), n_tokens)) == sliced(state, n_tokens).encode()
        assert written(delta(see(state), n_tokens)) == tail_of(state, n_tokens).encode()
    assert written(append(slice(see(state), 2).write(), delta(see(state), 2).write())) == state.encode()


# ── windows ──────────────────────────────────────────────────────────────────────────────────────────


def test_a_window_keeps_what_the_engine_would() -> None:
    """Of 100 tokens the windowed layers hold the last 32; of a longer reach all; cells are dropped at the cut."""
    for first in (68, 40, 0):
        state = windowed(100, first)
        for n_tokens in (*range(1, 101, 7), *range(60, 80), 98, 99, 100):
            needed = range(max(0, n_tokens - 31), n_tokens)
            missing = [pos for pos in needed if pos < first]
            if missing:
                with pytest.raises(PartialRemovalError) as caught:
                    slice(see(state), n_tokens, window=32)
                assert str(caught.value) == (
                    f"the sliding window of 32 tokens no longer holds {len(missing)} positions "
                    f"({missing[0]} to {missing[-1]}) that a prefix of {n_tokens} tokens looks back to"
                )
                continue
            found = slice(see(state), n_tokens, window=32).write()
            assert found.data.tobytes() == sliced(state, n_tokens, 32).encode()
            assert found.caches[1][0].pos.tolist() == [pos for pos in range(first, n_tokens) if pos >= n_tokens - 32]


def test_without_a_known_window_every_cell_has_to_be_there() -> None:
    with pytest.raises(PartialRemovalError) as caught:
        slice(see(windowed(100, 68)), 100)
    assert "the sliding window no longer holds 68 positions (0 to 67)" in str(caught.value)
    state = windowed(100, 0)
    for n_tokens in (1, 50, 100):
        assert written(slice(see(state), n_tokens)) == sliced(state, n_tokens).encode()


def test_gaps_of_the_sequence_are_not_missed_in_its_window() -> None:
    """What was removed from every layer need not be in the windowed ones."""
    pos = [*range(60), *range(80, 100)]
    state = State([make_cache(rng(), [pos]), make_cache(rng(), [pos[50:]])])
    assert written(slice(see(state), 100, window=50)) == sliced(state, 100, 50).encode()
    assert written(slice(see(state), 90, window=41)) == sliced(state, 90, 41).encode()
    with pytest.raises(PartialRemovalError, match=r"no longer holds 1 positions \(49 to 49\)"):
        slice(see(state), 90, window=42)


def test_an_empty_window_is_noticed() -> None:
    """A windowed cache that holds nothing at all."""
    state = State([make_cache(rng(), [range(10)]), make_cache(rng(), [[]])])
    with pytest.raises(PartialRemovalError, match=r"of 4 tokens no longer holds 3 positions \(7 to 9\)"):
        slice(see(state), 10, window=4)
    assert written(slice(see(state), 10, window=1)) == state.encode()  # it looks at itself only


def test_appending_moves_the_window_on() -> None:
    base, tail = windowed(64, 32), tail_of(windowed(100, 68), 64)
    assert written(append(see(base), see(tail), window=32)) == joined(base, tail, 32).encode()
    found = append(see(base), see(tail)).write()
    assert found.caches[1][0].pos.tolist() == [*range(32, 64), *range(68, 100)]
    short = tail_of(windowed(70, 38), 64)
    found = append(see(base), see(short), window=32).write()
    assert found.caches[1][0].pos.tolist() == list(range(38, 70))
    empty = State([tail.caches[0], make_cache(rng(), [[]])])
    found = append(see(base), see(empty), window=100).write()
    assert found.caches[1][0].pos.tolist() == list(range(32, 64))
    nothing = State([base.caches[0], make_cache(rng(), [[]])])
    found = append(see(nothing), see(tail), window=32).write()
    assert found.caches[1][0].pos.tolist() == list(range(68, 100))


# ── V the other way round ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["f16", "f32", "bf16"])
@pytest.mark.parametrize(
    ("n_cells", "n_embd"), [(1, 1), (1, 513), (129, 1), (129, 513), (128, 512), (7, 3), (64, 64), (300, 20)]
)
def test_transposed_and_back(kind: str, n_cells: int, n_embd: int) -> None:
    state = State([make_cache(rng(), [range(n_cells)], k=((kind, 2),), v=((kind, n_embd),))])
    there = convert(see(state), v_transposed=True).write()
    assert there.v_transposed is True
    assert there.data.tobytes() == turned(state, True).encode()
    back = convert(there, v_transposed=False).write()
    assert back.v_transposed is False
    assert back.data.tobytes() == state.encode()
    for same, blob in ((True, there), (False, back), (None, there), (None, back)):
        assert written(convert(blob, v_transposed=same)) == blob.data.tobytes()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("shape", ["f16", "f32", "bf16"])
def test_transposed_cells_of_several_streams(order: str, shape: str) -> None:
    """From two streams into one and turned at once, in runs long and short."""
    cells = [ORDERS[order], [0, 2, 1]]
    k = SHAPES[shape]
    state = State([make_cache(rng(), cells, owner=None, k=k)], arch="a")
    for before in (False, True):
        blob = see(turned(state, before))
        for after in (False, True):
            wanted = turned(restreamed(state, 1), after)
            merged = convert(blob, n_stream=1, v_transposed=after).write()
            assert merged.data.tobytes() == wanted.encode()
            assert written(convert(merged, n_stream=2, v_transposed=before)) == blob.data.tobytes()


@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl"])
def test_quantized_values_cannot_be_turned(kind: str) -> None:
    state = State([make_cache(rng(), [[0, 1]], k=(("f16", 4), (kind, 32)), v=(("f16", 4), (kind, 32)))])
    with pytest.raises(InvalidArgumentError, match=f"V of type {kind} cannot be transposed"):
        convert(see(state), v_transposed=True)
    assert written(convert(see(state), v_transposed=False, n_stream=2)) == restreamed(state, 2).encode()
    state.caches[0].v = state.caches[0].k = (("f16", 4), (kind, 32))
    keys_only = State([make_cache(rng(), [[0, 1]], k=((kind, 32),), v=(("f32", 2),))])
    assert written(convert(see(keys_only), v_transposed=True)) == turned(keys_only, True).encode()


def test_without_v_the_field_is_turned_all_the_same() -> None:
    """The engine compares it, whether or not there is a V."""
    state = EVERY["without V"]
    assert written(convert(see(state), v_transposed=True)) == turned(state, True).encode()
    assert convert(see(state), v_transposed=True).write().v_transposed is True


# ── streams ──────────────────────────────────────────────────────────────────────────────────────────


SAME_AGAIN = (
    "attention",
    "transposed",
    "extension",
    "window",
    "hybrid",
    "hybrid, streams",
    "hybrid, window",
    "without V",
)
"""As every engine writes them: a sequence in its own stream."""


@pytest.mark.parametrize("name", EVERY)
def test_streams_there_and_back(name: str) -> None:
    state = EVERY[name]
    blob = see(state)
    n_before = max(1, blob.n_stream)
    assert written(convert(blob)) == state.encode()
    for n_stream in (1, 3, 4, 256):
        found = convert(blob, n_stream=n_stream).write()
        assert found.data.tobytes() == restreamed(state, n_stream).encode()
        assert found.n_stream == (n_stream if state.caches else 0)
        assert found.sequences == blob.sequences
        back = convert(found, n_stream=n_before).write()
        assert back.data.tobytes() == restreamed(restreamed(state, n_stream), n_before).encode()
        if name in SAME_AGAIN:
            assert back.data.tobytes() == state.encode()


def test_a_sequence_goes_to_its_own_stream() -> None:
    """As the engine writes it; a sequence beyond the streams to the first (it can be restored into any)."""
    for seq_id, at in ((0, 0), (2, 2), (3, 3), (4, 0), (255, 0)):
        found = convert(see(one(range(5), seq_id=seq_id)), n_stream=4).write()
        assert [len(stream.pos) for stream in found.caches[0]] == [5 if s == at else 0 for s in range(4)]
        assert found.seq_id == seq_id


def test_shared_cells_are_copied_to_each_of_their_sequences() -> None:
    state = State([make_cache(rng(), [[(0, [0, 1, 2]), (1, [0]), (1, [1, 2]), (2, [2])]])], arch="a")
    found = convert(see(state), n_stream=3).write()
    assert [stream.pos.tolist() for stream in found.caches[0]] == [[0, 1], [0, 1], [0, 1, 2]]
    assert [stream.seq_id.tolist() for stream in found.caches[0]] == [[0, 0], [1, 1], [2, 2, 2]]
    assert found.data.tobytes() == restreamed(state, 3).encode()
    back = convert(found, n_stream=1).write()
    assert len(back.pos) == 7
    assert back.caches[0][0].cells.n_owners.tolist() == [1] * 7
    for seq_id in range(3):
        wanted = extracted(state, seq_id).encode()
        assert written(extract(see(state), seq_id)) == written(extract(back, seq_id)) == wanted


@pytest.mark.parametrize("n_stream", [0, -1, 257, 2**31])
def test_streams_out_of_range_are_refused(n_stream: int) -> None:
    with pytest.raises(InvalidArgumentError, match=f"n_stream should be 1 to 256, is {n_stream}"):
        convert(see(EVERY["attention"]), n_stream=n_stream)


def test_sequences_that_have_no_stream_are_refused() -> None:
    for name, n_stream, seq_id in (("whole", 2, 2), ("whole streams", 2, 2), ("whole hybrid", 2, 2)):
        with pytest.raises(InvalidArgumentError, match=f"sequence {seq_id} has no stream among {n_stream}"):
            convert(see(EVERY[name]), n_stream=n_stream)
    assert convert(see(EVERY["whole recurrent"]), n_stream=2).n_bytes == len(EVERY["whole recurrent"].encode())


# ── one sequence of many ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", [name for name, state in EVERY.items() if state.arch and name != "whole empty"])
def test_each_sequence_is_extracted(name: str) -> None:
    state = EVERY[name]
    blob = see(state)
    for seq_id, end in blob.sequences.items():
        for window in (0, 1, 2, 100):
            found = extract(blob, seq_id, window=window).write()
            assert found.data.tobytes() == extracted(state, seq_id, window).encode()
            assert (found.seq_id, found.sequences) == (seq_id, {seq_id: end})
        assert found.n_stream == blob.n_stream
    for seq_id in (-1, max(blob.sequences) + 1, 256):
        with pytest.raises(InvalidArgumentError, match=rf"one of \[.*\], is {seq_id}"):
            extract(blob, seq_id)


def test_the_window_is_counted_from_the_sequences_own_end() -> None:
    """Whole blobs hold cells that a sequence has moved on from."""
    shared = [(pos, [0, 1]) for pos in range(20)] + [(pos, [1]) for pos in range(20, 60)]
    state = State([make_cache(rng(), [shared]), make_cache(rng(1), [shared])], arch="a")
    for seq_id, first in ((0, 12), (1, 52)):
        found = extract(see(state), seq_id, window=8).write()
        assert found.caches[1][0].pos.tolist() == list(range(first, first + 8))
        assert found.pos.tolist() == list(range(first + 8))
    everything = extract(see(state), 1).write()
    assert written(slice(everything, 20, window=8)) == written(
        slice(extract(see(state), 1, window=60).write(), 20, window=8)
    )


# ── what is refused ──────────────────────────────────────────────────────────────────────────────────


def test_numbers_out_of_range_are_refused() -> None:
    blob = see(one(range(10, 50)))
    for n_tokens in (0, -1, 51, 2**40):
        with pytest.raises(InvalidArgumentError, match=f"n_tokens should be 1 to 50, is {n_tokens}"):
            slice(blob, n_tokens)
    for n_tokens in (1, 10):
        with pytest.raises(InvalidArgumentError, match=f"above 10, the sequence's first position, is {n_tokens}"):
            slice(blob, n_tokens)
    assert slice(blob, 11).write().pos.tolist() == [10]
    for begin in (0, -1, 50, 51):
        with pytest.raises(InvalidArgumentError, match=f"begin should be 1 to 49, is {begin}"):
            delta(blob, begin)
    assert delta(blob, 49).write().pos.tolist() == [49]
    for edit in (
        lambda: slice(blob, 20, window=-1),
        lambda: append(slice(blob, 20).write(), delta(blob, 20).write(), window=-1),
        lambda: extract(see(EVERY["whole"]), 0, window=-1),
    ):
        with pytest.raises(InvalidArgumentError, match="window should be 0 or more, is -1"):
            edit()
    for wrong in (1.5, "3", None):
        with pytest.raises(TypeError):
            slice(blob, wrong)
        with pytest.raises(TypeError):
            delta(blob, wrong)


def test_numpy_numbers_will_do() -> None:
    state = windowed(50, 0)
    blob = see(state)
    assert written(slice(blob, np.int32(20), window=np.int64(5))) == sliced(state, 20, 5).encode()
    assert written(delta(blob, np.int32(20))) == tail_of(state, 20).encode()


@pytest.mark.parametrize("name", [name for name, state in EVERY.items() if state.arch])
def test_a_whole_context_is_not_cut(name: str) -> None:
    blob = see(EVERY[name])
    for what, edit in (
        ("slice", lambda: slice(blob, 1)),
        ("delta", lambda: delta(blob, 1)),
        ("append to", lambda: append(blob, blob)),
        ("append", lambda: append(see(EVERY["attention"]), blob)),
    ):
        with pytest.raises(InvalidArgumentError, match=f"cannot {what} a whole context: extract a sequence first"):
            edit()


@pytest.mark.parametrize("name", ["empty", "empty streams", "window empty", "recurrent empty"])
def test_an_empty_sequence_is_not_cut(name: str) -> None:
    blob = see(EVERY[name])
    for what, edit in (
        ("slice", lambda: slice(blob, 1)),
        ("delta", lambda: delta(blob, 1)),
        ("append to", lambda: append(blob, see(EVERY["attention"]))),
        ("append", lambda: append(see(EVERY["attention"]), blob)),
    ):
        with pytest.raises(InvalidArgumentError, match=f"cannot {what} an empty sequence"):
            edit()


def test_an_empty_context_has_nothing_to_extract() -> None:
    with pytest.raises(InvalidArgumentError, match=r"one of \[\], is 0"):
        extract(see(EVERY["whole empty"]), 0)


def test_a_sequence_is_not_extracted_again() -> None:
    with pytest.raises(InvalidArgumentError, match="this is sequence 3 alone"):
        extract(see(EVERY["attention"]), 3)


@pytest.mark.parametrize("name", ["recurrent", "recurrent without S", "hybrid", "hybrid, streams"])
def test_a_recurrent_state_is_not_cut(name: str) -> None:
    state = EVERY[name]
    blob = see(state)
    assert written(slice(blob, 6)) == state.encode()
    for n_tokens in (1, 5):
        with pytest.raises(PartialRemovalError, match=f"a recurrent state of 6 tokens cannot be cut to {n_tokens}"):
            slice(blob, n_tokens)
        with pytest.raises(PartialRemovalError, match=f"of 6 tokens has no cells of its own from {n_tokens} on"):
            delta(blob, n_tokens)
    for base, tail in ((blob, blob), (blob, see(EVERY["attention"])), (see(EVERY["attention"]), blob)):
        with pytest.raises(PartialRemovalError, match="nothing can be appended"):
            append(base, tail)


def test_what_does_not_go_on_is_not_appended() -> None:
    base = see(one(range(20)))
    for positions, begins in (([21, 22], 21), ([19, 20], 19), ([30, 20, 10], 10)):
        with pytest.raises(InvalidArgumentError, match=f"should begin at position 20, begins at {begins}"):
            append(base, see(one(positions)))


@pytest.mark.parametrize(
    "tail",
    [
        one([20, 21], v_trans=True),
        one([20, 21], shape="f32"),
        one([20, 21], shape="bf16"),
        one([20, 21], extension=True),
        State([make_cache(rng(), [[20, 21]], k=SHAPES["f16"], v=())], has_v=False),
        State([make_cache(rng(), [[20, 21]], k=SHAPES["f16"][:1])]),
        State([make_cache(rng(), [[20, 21]], k=SHAPES["f16"], v=(("f16", 6), ("f16", 3)))]),
        State([make_cache(rng(), [[20, 21]], k=SHAPES["f16"])] * 2),
    ],
)
def test_what_has_other_layers_is_not_appended(tail: State) -> None:
    with pytest.raises(InvalidArgumentError, match="layers, types or V layout of the delta are not those of the state"):
        append(see(one(range(20))), see(tail))


def test_the_windowed_layers_are_compared_too() -> None:
    base = windowed(20, 10)
    tail = State([base.caches[0], make_cache(rng(), [[20, 21]], k=(("bf16", 3),))])
    tail.caches[0] = make_cache(rng(), [[20, 21]])
    with pytest.raises(InvalidArgumentError, match="layers, types or V layout"):
        append(see(base), see(tail))
    tail.caches[1] = make_cache(rng(), [[20, 21]], k=(("f16", 3),))
    assert written(append(see(base), see(tail))) == joined(base, tail).encode()


def test_without_v_the_layouts_are_compared_too() -> None:
    base, tail = (State([make_cache(rng(), [pos], v=())], has_v=False) for pos in ([0, 1], [2, 3]))
    assert written(append(see(base), see(tail))) == joined(base, tail).encode()
    with pytest.raises(InvalidArgumentError, match="V layout"):
        append(see(base), see(turned(tail, True)))


# ── writing ──────────────────────────────────────────────────────────────────────────────────────────


def edits_of(state: State) -> list[Edit]:
    """Edits of every sort that a state allows."""
    blob = see(state)
    found: list[Edit] = []
    for make in (
        lambda: slice(blob, 3),
        lambda: delta(blob, 3),
        lambda: append(slice(blob, 3).write(), delta(blob, 3).write()),
        lambda: convert(blob),
        lambda: convert(blob, n_stream=4),
        lambda: convert(blob, v_transposed=not blob.v_transposed),
        lambda: extract(blob, 0),
        lambda: extract(blob, 2, window=1),
    ):
        with suppress(InvalidArgumentError, PartialRemovalError):
            found.append(make())
    return found


@pytest.mark.parametrize("name", EVERY)
def test_writes_the_same_wherever_and_however_often(name: str) -> None:
    """Bytes of `out` behind the blob are not touched; what comes back is a view of it."""
    for edit in edits_of(EVERY[name]):
        first = written(edit)
        for more in (0, 1, 100):
            out = np.full(edit.n_bytes + more, 0xEE, np.uint8)
            found = edit.write(out)
            assert out[: edit.n_bytes].tobytes() == first
            assert set(out[edit.n_bytes :].tolist()) <= {0xEE}
            assert np.shares_memory(found.data, out)
            assert len(found.data) == found.n_bytes == edit.n_bytes
        unaligned = np.full(edit.n_bytes + 3, 0xEE, np.uint8)
        edit.write(unaligned[1:-2])
        assert unaligned[1:-2].tobytes() == first
        assert unaligned[[0, -2, -1]].tolist() == [0xEE] * 3


@pytest.mark.parametrize("name", ["attention", "transposed", "hybrid", "whole", "whole recurrent"])
def test_out_is_checked_before_anything_is_written(name: str) -> None:
    for edit in edits_of(EVERY[name]):
        n = edit.n_bytes
        fixed = np.full(n, 0xEE, np.uint8)
        fixed.setflags(write=False)
        for out, why in (
            (np.full(n - 1, 0xEE, np.uint8), f"should be {n:,} bytes to write into, is {n - 1:,}"),
            (np.full(0, 0xEE, np.uint8), "is 0"),
            (fixed, "bytes to write into"),
            (np.full(n, 0xEE, np.uint8).view(np.int8), "contiguous array of uint8"),
            (np.full(2 * n, 0xEE, np.uint8).view(np.uint16), "contiguous array of uint8"),
            (np.full((n, 1), 0xEE, np.uint8), "one dimension"),
            (np.full(2 * n, 0xEE, np.uint8)[::2], "contiguous array of uint8"),
            (np.full(n, 0xEE, np.uint8)[::-1], "contiguous array of uint8"),
            (bytearray(b"\xee" * n), "array of uint8"),
            (memoryview(bytearray(b"\xee" * n)), "array of uint8"),
        ):
            with pytest.raises(InvalidArgumentError, match=why):
                edit.write(out)
            assert set(np.asarray(out).view(np.uint8).ravel().tolist() if len(out) else []) <= {0xEE}


@pytest.mark.parametrize("name", ["attention", "hybrid", "whole", "recurrent"])
def test_out_must_not_overlap_what_is_read(name: str) -> None:
    state = EVERY[name]
    source = state.encode()
    for more in (0, 5):
        memory = np.zeros(3 * len(source), np.uint8)
        memory[len(source) : 2 * len(source)] = np.frombuffer(source, np.uint8)
        blob = parse(memory[len(source) : 2 * len(source)], state.parts)
        edit = convert(blob)
        n = edit.n_bytes
        assert n == len(source)
        for at in (1, n // 2, n, n + 1, 2 * n - 1):
            before = memory.tobytes()
            with pytest.raises(InvalidArgumentError, match="overlaps the blob that is read from"):
                edit.write(memory[at : at + n + more])
            assert memory.tobytes() == before
        for at in (0, 2 * n):  # side by side is fine, also where `out` is larger than what is written
            found = edit.write(memory[at : at + n + (more if at == 0 else 0)])
            assert found.data.tobytes() == source
            memory[at : at + n] = 0


def test_out_must_not_overlap_the_delta_either() -> None:
    state = one(range(20))
    memory = np.zeros(10_000, np.uint8)
    tail = delta(see(state), 10).write(memory[5000:])
    edit = append(slice(see(state), 10).write(), tail)
    with pytest.raises(InvalidArgumentError, match="overlaps"):
        edit.write(memory[4999:])
    with pytest.raises(InvalidArgumentError, match="overlaps"):
        edit.write(memory[5000 + tail.n_bytes - 1 :])
    assert edit.write(memory).data.tobytes() == state.encode()


@pytest.mark.parametrize("name", ["attention", "transposed", "hybrid", "whole streams"])
def test_the_source_may_be_read_only_and_is_not_changed(name: str) -> None:
    data = np.frombuffer(EVERY[name].encode(), np.uint8).copy()
    for edit in edits_of(EVERY[name]):  # which are of bytes
        assert edit.write().data.flags.writeable
    blob = parse(data)
    written(convert(blob))
    assert data.tobytes() == EVERY[name].encode()


def test_values_are_read_when_written_and_bookkeeping_when_planned() -> None:
    """Nothing is copied by a plan: it keeps its source alive, and takes the values that it then has."""
    state = one(range(50))
    data = np.frombuffer(state.encode(), np.uint8).copy()
    edit = slice(parse(data), 20)
    data[state.is_data()] = 7
    data[~state.is_data()] ^= 255
    found = edit.write()
    wanted = sliced(state, 20)
    assert np.array_equal(found.data[~wanted.is_data()], np.frombuffer(wanted.encode(), np.uint8)[~wanted.is_data()])
    assert set(found.data[wanted.is_data()].tolist()) == {7}
    del data
    gc.collect()
    assert set(edit.write().data[wanted.is_data()].tolist()) == {7}


def test_a_recurrent_source_that_was_damaged_meanwhile_is_noticed() -> None:
    state = EVERY["recurrent"]
    data = np.frombuffer(state.encode(), np.uint8).copy()
    edit = convert(parse(data))
    data[state.offsets()["r s_trans"]] ^= 255
    with pytest.raises(BlobError):
        edit.write()


@pytest.mark.parametrize("v_trans", [False, True])
def test_no_second_copy_is_made(v_trans: bool) -> None:
    """Planning takes memory for the bookkeeping, writing for at most two layers, whatever the number of layers."""
    layer = 400 * 2 * 512
    state = State([make_cache(rng(), [range(400)], k=(("f16", 512),) * 4, v_trans=v_trans)])
    blob = see(state)
    for make, n_layers in (
        (lambda: slice(blob, 200), 0.0),
        (lambda: convert(blob, n_stream=4), 0.0),
        (lambda: convert(blob, v_transposed=not v_trans), 2.0),
    ):
        out = np.empty(make().n_bytes, np.uint8)
        tracemalloc.start()
        edit = make()
        planned = tracemalloc.get_traced_memory()[1]
        edit.write(out)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert planned < 200_000
        assert peak < 200_000 + n_layers * layer


# ── any state ────────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 40), st.integers(1, 4), st.integers(0, 40), st.booleans())
def test_any_edit_of_any_state(seed: int, n_tokens: int, n_stream: int, window: int, v_trans: bool) -> None:
    state = random_state(rng(seed))
    blob = see(state)
    plans: list[tuple[Callable[[], Edit], Callable[[], State]]] = [
        (lambda: convert(blob, n_stream=n_stream), lambda: restreamed(state, n_stream)),
        (lambda: convert(blob, v_transposed=v_trans), lambda: turned(state, v_trans)),
        (
            lambda: convert(blob, n_stream=n_stream, v_transposed=v_trans),
            lambda: turned(restreamed(state, n_stream), v_trans),
        ),
    ]
    if state.arch is None:
        plans += [
            (lambda: slice(blob, n_tokens, window=window), lambda: sliced(state, n_tokens, window)),
            (lambda: delta(blob, n_tokens), lambda: tail_of(state, n_tokens)),
            (
                lambda: append(
                    slice(blob, n_tokens, window=window).write(), delta(blob, n_tokens).write(), window=window
                ),
                lambda: joined(sliced(state, n_tokens, window), tail_of(state, n_tokens), window),
            ),
        ]
    else:
        for seq_id in blob.sequences:
            plans.append(
                (lambda s=seq_id: extract(blob, s, window=window), lambda s=seq_id: extracted(state, s, window))
            )
    for plan, wanted in plans:
        try:
            edit = plan()
        except (InvalidArgumentError, PartialRemovalError):
            continue
        assert written(edit) == wanted().encode()


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(list(EVERY)), st.integers(0, 2**20), st.integers(1, 255), st.integers(1, 6), st.integers(1, 4))
def test_damaged_blobs_are_edited_or_refused(name: str, at: int, flip: int, n_tokens: int, n_stream: int) -> None:
    """Whatever still parses is either edited into what parses, or refused; nothing else happens."""
    data = bytearray(EVERY[name].encode())
    data[at % len(data)] ^= flip
    try:
        blob = parse(data)
    except BlobError:
        return
    good = see(EVERY["attention"])
    for edit in (
        lambda: slice(blob, n_tokens),
        lambda: slice(blob, n_tokens, window=2),
        lambda: delta(blob, n_tokens),
        lambda: append(blob, good),
        lambda: append(good, blob),
        lambda: convert(blob, n_stream=n_stream, v_transposed=not blob.v_transposed),
        lambda: extract(blob, n_tokens - 1),
    ):
        with suppress(SwarmKVError):
            written(edit())


# ── what the engine makes ────────────────────────────────────────────────────────────────────────────

TOKENS = text_tokens(150)
FLASH = pytest.mark.parametrize("flash", [True, False])

OTHERS: dict[str, Callable[..., None]] = {
    "deci": tiny_models.write_deci,
    "qwen2vl": tiny_models.write_qwen2vl,
    "deepseek2": tiny_models.write_deepseek2,
    "lfm2": tiny_models.write_lfm2,
}
CUTTABLE = (ATTENTION, "deci", "qwen2vl", "deepseek2")
ALL = (*KINDS, *OTHERS)


@pytest.fixture(scope="module")
def load(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    """A tiny model by name, of `KINDS` or `OTHERS`."""
    from swarmkv_ll import Model

    folder, loaded = tmp_path_factory.mktemp("others"), dict[str, Model]()

    def get(name: str) -> Model:
        if name in KINDS:
            return models[name]
        if name not in loaded:
            OTHERS[name](folder / f"{name}.gguf")
            loaded[name] = Model(folder / f"{name}.gguf")
        return loaded[name]

    return get


def exported(ctx: Context, seq: int | None = 0) -> StateBlob:
    """A sequence's state as the engine writes it, or with None the whole context's."""
    from swarmkv_ll.ffi import C, ffi

    n = C.llama_state_get_size(ctx._ptr) if seq is None else C.llama_state_seq_get_size(ctx._ptr, seq)
    out = np.empty(n, np.uint8)
    memory = ffi.from_buffer("uint8_t[]", out)
    if seq is None:
        assert C.llama_state_get_data(ctx._ptr, memory, n) == n
    else:
        assert C.llama_state_seq_get_data(ctx._ptr, memory, n, seq) == n
    blob = parse(out, ctx.model.capabilities.blob_parts)
    assert parse(out).layout.parts == blob.layout.parts
    return blob


def restore(ctx: Context, blob: StateBlob, seq: int | None = 0) -> None:
    """Hand a blob to the engine, which takes every byte of it."""
    from swarmkv_ll.ffi import C, ffi

    memory = ffi.from_buffer("uint8_t[]", blob.data)
    if seq is None:
        assert C.llama_state_set_data(ctx._ptr, memory, blob.n_bytes) == blob.n_bytes
    else:
        assert C.llama_state_seq_set_data(ctx._ptr, memory, blob.n_bytes, seq) == blob.n_bytes


def same(a: StateBlob, b: StateBlob) -> bool:
    return a.data.tobytes() == b.data.tobytes()


def go_on(model: Model, blob: StateBlob, seq: int = 0, **options: Any) -> Any:
    """The branch's logits after a blob was restored into a new context."""
    with new_context(model, **options) as ctx:
        restore(ctx, blob, seq)
        assert ctx.position(seq) == next(iter(blob.sequences.values()))
        return all_logits(ctx, BRANCH, seq)


def prefilled(model: Model, *parts: Any, **options: Any) -> StateBlob:
    """The state after decoding the parts one after the other."""
    with new_context(model, **options) as ctx:
        for part in parts:
            ctx.decode(part)
        return exported(ctx)


@FLASH
@pytest.mark.parametrize("name", CUTTABLE)
def test_a_slice_is_what_a_prefill_of_the_prefix_leaves(load: Callable[[str], Model], name: str, flash: bool) -> None:
    """Byte for byte, at equal batch splits; and it goes on with the same bits."""
    model = load(name)
    full = prefilled(model, TOKENS, flash_attn=flash)
    assert full.v_transposed == (not flash)
    for n_tokens in (64, 128, 150):  # borders of engine batches
        prefix = slice(full, n_tokens).write()
        assert same(prefix, prefilled(model, TOKENS[:n_tokens], flash_attn=flash))
    full = prefilled(model, TOKENS[:37], TOKENS[37:], flash_attn=flash)
    prefix = slice(full, 37).write()
    assert same(prefix, prefilled(model, TOKENS[:37], flash_attn=flash))
    found = go_on(model, prefix, flash_attn=flash)
    assert identical(found, uninterrupted(model, TOKENS[:37], BRANCH, flash_attn=flash))
    assert differs(found, uninterrupted(model, TOKENS[:36], BRANCH, flash_attn=flash))


@FLASH
@pytest.mark.parametrize("name", CUTTABLE)
def test_a_state_and_a_delta_are_what_came_before(load: Callable[[str], Model], name: str, flash: bool) -> None:
    """Also where the state was computed by one context and the delta by another."""
    model = load(name)
    full = prefilled(model, TOKENS, flash_attn=flash)
    base, tail = prefilled(model, TOKENS[:64], flash_attn=flash), delta(full, 64).write()
    joint = append(base, tail).write()
    assert same(joint, full)
    assert identical(go_on(model, joint, flash_attn=flash), uninterrupted(model, TOKENS, BRANCH, flash_attn=flash))


@FLASH
def test_a_sliding_window_can_be_cut_as_far_as_it_reaches(models: Models, flash: bool) -> None:
    model = models[SLIDING]
    window = model.capabilities.sliding_window
    full = prefilled(model, TOKENS[:149], TOKENS[149:], flash_attn=flash)
    assert full.caches[1][0].pos.tolist() == list(range(150 - window, 150))
    assert same(slice(full, 150, window=window).write(), full)
    prefix = slice(full, 149, window=window).write()
    own = prefilled(model, TOKENS[:149], flash_attn=flash)
    # The engine keeps one more, which the next token no longer looks at.
    assert prefix.caches[1][0].pos.tolist() == own.caches[1][0].pos.tolist()[1:]
    expected = uninterrupted(model, TOKENS[:149], BRANCH, flash_attn=flash)
    assert identical(go_on(model, prefix, flash_attn=flash), expected)
    for n_tokens in (1, 64, 148):
        with pytest.raises(PartialRemovalError):
            slice(full, n_tokens, window=window)


@FLASH
def test_a_whole_contexts_window_can_be_cut_anywhere(models: Models, flash: bool) -> None:
    """It holds cells that no longer count, so a sequence extracted with all of them can be cut where it likes."""
    model = models[SLIDING]
    window = model.capabilities.sliding_window
    with new_context(model, flash_attn=flash) as ctx:
        ctx.decode(TOKENS)
        everything = extract(exported(ctx, None), 0).write()
        assert len(everything.caches[1][0].pos) == 150
        assert same(extract(exported(ctx, None), 0, window=window).write(), exported(ctx))
    for n_tokens in (20, 64, 128):
        prefix = slice(everything, n_tokens, window=window).write()
        own = prefilled(model, TOKENS[:n_tokens], flash_attn=flash)
        if n_tokens % 64 == 0:
            assert same(prefix, own)
            expected = uninterrupted(model, TOKENS[:n_tokens], BRANCH, flash_attn=flash)
            assert identical(go_on(model, prefix, flash_attn=flash), expected)
        else:
            assert [s.pos.tolist() for c in prefix.caches for s in c] == [s.pos.tolist() for c in own.caches for s in c]
    joint = append(prefilled(model, TOKENS[:64], flash_attn=flash), delta(everything, 64).write(), window=window)
    assert same(joint.write(), prefilled(model, TOKENS, flash_attn=flash))


@FLASH
@pytest.mark.parametrize("name", ALL)
def test_the_same_state_in_streams(load: Callable[[str], Model], name: str, flash: bool) -> None:
    """As contexts with streams write it themselves; and in each of their sequences it goes on with the same bits."""
    model = load(name)
    unified, streams = ({"n_seq_max": 3, "kv_unified": unified, "flash_attn": flash} for unified in (True, False))
    own = []
    for options in (unified, streams):
        with new_context(model, **options) as ctx:
            ctx.decode(TOKENS, seq=2)
            own.append(exported(ctx, 2))
    assert own[1].n_stream == (0 if name == RECURRENT else 3)
    assert same(convert(own[0], n_stream=3).write(), own[1])
    assert same(convert(own[1], n_stream=1).write(), own[0])
    expected = uninterrupted(model, TOKENS, BRANCH, flash_attn=flash)
    for seq in range(3):
        assert identical(go_on(model, convert(own[0], n_stream=3).write(), seq, **streams), expected)
        assert identical(go_on(model, convert(own[1], n_stream=1).write(), seq, **unified), expected)


@FLASH
@pytest.mark.parametrize("name", [ATTENTION, "deci", "qwen2vl"])
def test_v_the_other_way_round_is_as_the_engine_has_it(load: Callable[[str], Model], name: str, flash: bool) -> None:
    """The first layer's values do not depend on how attention is computed: the same numbers in both layouts."""
    mine, theirs = (prefilled(load(name), TOKENS, flash_attn=f) for f in (flash, not flash))
    found = convert(mine, v_transposed=flash).write()
    assert (mine.v_transposed, theirs.v_transposed, found.v_transposed) == (not flash, flash, flash)
    a, b, c = (blob.layers[0].v for blob in (mine, found, theirs))
    assert np.array_equal(a, b)
    assert np.array_equal(b, c)
    assert (a.flags.c_contiguous, b.flags.c_contiguous, c.flags.c_contiguous) == (flash, not flash, not flash)


@FLASH
@pytest.mark.parametrize("name", [name for name in ALL if name != RECURRENT])
def test_v_the_other_way_round_goes_on(load: Callable[[str], Model], name: str, flash: bool) -> None:
    model = load(name)
    mine = prefilled(model, TOKENS, flash_attn=flash)
    found = convert(mine, v_transposed=flash).write()
    expected = uninterrupted(model, TOKENS, BRANCH, flash_attn=not flash)
    assert close(go_on(model, found, flash_attn=not flash), expected)
    assert differs(expected, uninterrupted(model, TOKENS[::-1], BRANCH, flash_attn=not flash))
    assert same(convert(found, v_transposed=not flash).write(), mine)


def several(ctx: Context) -> None:
    """Three sequences: 0 and 1 begin alike (in a unified cache they share those cells), 2 is another."""
    ctx.decode(TOKENS[:64])
    ctx.copy_sequence(0, 1)
    ctx.decode(TOKENS[64:110], seq=1)
    ctx.decode(text_tokens(50, seed=5), seq=2)
    ctx.decode(TOKENS[110:], seq=0)


@FLASH
@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("name", ALL)
def test_one_sequence_of_a_whole_context(load: Callable[[str], Model], name: str, unified: bool, flash: bool) -> None:
    """Byte for byte what the engine writes of that sequence."""
    model = load(name)
    with new_context(model, n_seq_max=3, kv_unified=unified, flash_attn=flash) as ctx:
        several(ctx)
        whole = exported(ctx, None)
        assert whole.layout.arch == (name if name != ATTENTION else "llama")
        assert whole.sequences == {seq: ctx.position(seq) for seq in range(3)} == {0: 104, 1: 110, 2: 50}
        if unified and name != RECURRENT:
            assert len(whole.pos) == 64 + 46 + 50 + 40
        for seq in range(3):
            assert same(extract(whole, seq, window=model.capabilities.sliding_window).write(), exported(ctx, seq))


@FLASH
@pytest.mark.parametrize("name", ALL)
def test_a_whole_context_in_another_shape(load: Callable[[str], Model], name: str, flash: bool) -> None:
    """From streams to a unified cache and back: every sequence is the same, and goes on with the same bits."""
    model = load(name)
    window = model.capabilities.sliding_window
    equal = close if window else identical  # see test_shared_cells_in_streams
    unified, streams = ({"n_seq_max": 3, "kv_unified": unified, "flash_attn": flash} for unified in (True, False))
    with new_context(model, n_ctx=768, **streams) as ctx:
        several(ctx)
        whole = exported(ctx, None)
        one_pool = convert(whole, n_stream=1).write()
        assert same(convert(one_pool, n_stream=3).write(), whole)
        alone = [exported(ctx, seq) for seq in range(3)]
        with new_context(model, n_ctx=768, **unified) as other:
            restore(other, one_pool, None)
            for seq in range(3):
                assert same(exported(other, seq), convert(alone[seq], n_stream=1).write())
            again = convert(exported(other, None), n_stream=3).write()
        assert same(again, whole)
        with new_context(model, n_ctx=768, **streams) as other:
            restore(other, again, None)
            for seq in range(3):
                assert same(exported(other, seq), alone[seq])
                assert same(extract(again, seq, window=window).write(), alone[seq])
                assert equal(all_logits(other, BRANCH, seq), all_logits(ctx, BRANCH, seq))


@FLASH
@pytest.mark.parametrize("name", ALL)
def test_shared_cells_in_streams(load: Callable[[str], Model], name: str, flash: bool) -> None:
    """A unified context's, whose sequences share a prefix, restored into one with streams.

    With a sliding window up to rounding: after `llama_state_set_data` the engine puts new tokens into the first cells
    that have left the window, so that it sums in another order.
    """
    model = load(name)
    streams = {"n_ctx": 768, "n_seq_max": 3, "kv_unified": False, "flash_attn": flash}
    equal = close if model.capabilities.sliding_window else identical
    with new_context(model, n_seq_max=3, flash_attn=flash) as ctx:
        several(ctx)
        whole, alone = exported(ctx, None), [exported(ctx, seq) for seq in range(3)]
    with new_context(model, **streams) as other:
        restore(other, convert(whole, n_stream=3).write(), None)
        for seq in range(3):
            mine = convert(alone[seq], n_stream=3).write()
            assert same(exported(other, seq), mine)
            expected = go_on(model, mine, seq, **streams)
            assert equal(all_logits(other, BRANCH, seq), expected)


@pytest.mark.parametrize(
    ("type_k", "type_v"), [("f32", "f32"), ("bf16", "bf16"), ("q8_0", "q4_0"), ("q5_1", "iq4_nl"), ("q4_1", "q5_0")]
)
def test_other_types(models: Models, type_k: str, type_v: str) -> None:
    options = {"type_k": type_k, "type_v": type_v, "flash_attn": True}
    full = prefilled(models[ATTENTION], TOKENS, **options)
    assert {(layer.k_type, layer.v_type) for layer in full.layers} == {(type_k, type_v)}
    assert same(slice(full, 64).write(), prefilled(models[ATTENTION], TOKENS[:64], **options))
    assert same(append(slice(full, 64).write(), delta(full, 64).write()).write(), full)
    if type_v in ("f32", "bf16"):  # the engine rotates what it quantizes
        exact = prefilled(models[ATTENTION], TOKENS, flash_attn=True).layers[0].dequantize()[1]
        found = full.layers[0].dequantize()[1]
        assert np.allclose(found, exact, rtol=1 / 100, atol=1e-3)
        assert not np.array_equal(found, exact)


@FLASH
def test_cells_that_were_used_before_stand_out_of_order(models: Models, flash: bool) -> None:
    """Where a sequence went on in cells that another had left, a slice finds its own all the same."""
    with new_context(models[ATTENTION], n_ctx=256, n_seq_max=2, flash_attn=flash) as ctx:
        ctx.decode(TOKENS[:100], seq=1)
        ctx.decode(TOKENS[:100])
        before = exported(ctx)
        ctx.remove(1)
        ctx.decode(text_tokens(120, seed=6))
        after = exported(ctx)
        assert after.pos.tolist() != sorted(after.pos.tolist())
        assert same(slice(after, 100).write(), before)
        joint = append(before, delta(after, 100).write()).write()
        assert sorted(joint.pos.tolist()) == sorted(after.pos.tolist())
        expected = all_logits(ctx, BRANCH)
    assert close(go_on(models[ATTENTION], after, flash_attn=flash), expected)
    assert close(go_on(models[ATTENTION], joint, flash_attn=flash), expected)


@pytest.mark.parametrize("n_embd", [1, 2, 3, 64])
@pytest.mark.parametrize("el_size", [2, 4])
def test_many_runs_of_columns_whatever_order_numpy_takes_them_in(n_embd: int, el_size: int) -> None:
    """Found by the fuzzer: with 2 rows, an index in brackets gives memory in another order."""
    from swarmkv_ll.blob.recast import _gather_columns

    source = np.random.default_rng(0).integers(0, 255, (n_embd, 300 * el_size), dtype=np.uint8)
    index = np.arange(0, 300, 2)
    out = np.empty((n_embd, len(index) * el_size), np.uint8)
    _gather_columns(out, source, index, el_size)
    assert np.array_equal(out, source.reshape(n_embd, 300, el_size)[:, index].reshape(n_embd, -1))
