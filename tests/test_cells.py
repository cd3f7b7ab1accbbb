"""The count of KV cells, against a plain model of it and against the engine, which does not tell but refuses."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pytest
from helpers import ATTENTION, HYBRID, SLIDING, WITH_CELLS, Models, new_context, text_tokens
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmkv_ll import Arena, Context
from swarmkv_ll.cells import CellLedger
from swarmkv_ll.errors import ContextFullError, IncompatibleSnapshotError, PartialRemovalError

N_CELLS, N_SEQ = 24, 3

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "remove", "share", "clear"]),
        *[st.integers(0, N_SEQ - 1)] * 2,
        *[st.integers(0, 20)] * 2,
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(STEPS, st.booleans())
def test_any_steps_count_like_sets_of_cells(steps: list[tuple[str, int, int, int, int]], unified: bool) -> None:
    """Model: each sequence holds a set of (position, cell); a cell is free if nobody holds it."""
    ledger = CellLedger(N_CELLS, N_SEQ, unified=unified)
    held: list[set[tuple[int, int]]] = [set() for _ in range(N_SEQ)]
    fresh = 0

    def used(without: int | None = None, *, seq: int) -> int:
        owners = range(N_SEQ) if unified else [seq]
        return len({cell for owner in owners if owner != without for _, cell in held[owner]})

    for step, seq, other, begin, n in steps:
        if step == "add" and n <= ledger.free(seq):
            start = max((position for position, _ in held[seq]), default=-1) + 1
            ledger.add([(seq, np.arange(start, start + n, dtype=np.int32))])
            held[seq] |= {(start + i, fresh + i) for i in range(n)}
            fresh += n
        elif step == "remove":
            ledger.remove(seq, begin, begin + n)
            held[seq] = {(p, cell) for p, cell in held[seq] if not begin <= p < begin + n}
        elif step == "share" and unified and seq != other:
            ledger.remove(other, 0, 1000)
            ledger.share(seq, other, begin)
            held[other] = {(p, cell) for p, cell in held[seq] if p < begin}
        elif step == "clear":
            ledger.clear()
            held = [set() for _ in range(N_SEQ)]
        for s in range(N_SEQ):
            assert ledger.free(s) == N_CELLS - used(seq=s)
            assert ledger.free_without(s) == N_CELLS - used(without=s, seq=s)
            assert sorted(ledger.positions(s)) == sorted(p for p, _ in held[s])


def fill_to_the_last_cell(ctx: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine takes exactly as many tokens as the count says are free, and not one more."""
    for seq in range(ctx.n_seq_max):
        with monkeypatch.context() as patch:
            patch.setattr(ctx, "_check_room", lambda *_: None)  # the engine is to answer, not the count
            free = ctx.cells_free(seq)
            if free:
                ctx.decode(text_tokens(free), seq=seq, logits="none")
            assert ctx.cells_free(seq) == 0
            with pytest.raises(ContextFullError):
                ctx.decode([1], seq=seq, logits="none")
        assert ctx.cells_free(seq) == 0


@pytest.mark.parametrize("streams", [False, True], ids=["unified", "streams"])
@pytest.mark.parametrize("kind", WITH_CELLS)
@pytest.mark.parametrize("seed", range(8))
def test_the_count_is_the_engine_s_after_any_operations(
    models: Models, monkeypatch: pytest.MonkeyPatch, kind: str, streams: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    n_seq = 3

    def part() -> tuple[int, int, int]:
        begin = int(rng.integers(0, 60))
        return int(rng.integers(n_seq)), begin, begin + int(rng.integers(1, 30))

    with (
        Arena(4 << 20) as arena,
        new_context(models[kind], 256 * (n_seq if streams else 1), n_seq, kv_unified=not streams) as ctx,
    ):
        ctx.decode(text_tokens(30))
        with ctx.snapshot(arena) as snapshot:
            operations: list[Callable[[], object]] = [
                lambda: ctx.decode(text_tokens(int(rng.integers(1, 70))), seq=int(rng.integers(n_seq)), logits="none"),
                lambda: ctx.decode_batch([(text_tokens(int(rng.integers(1, 20))), seq) for seq in range(n_seq)]),
                lambda: ctx.remove(int(rng.integers(n_seq))),
                lambda: ctx.remove(*part()),
                lambda: ctx.remove(*part()[:2]),
                lambda: ctx.copy_sequence(*map(int, rng.integers(n_seq, size=2))),
                lambda: ctx.copy_sequence(*part()),
                lambda: snapshot.restore(ctx, int(rng.integers(n_seq))),
            ]
            for _ in range(60):
                with suppress(ContextFullError, PartialRemovalError, IncompatibleSnapshotError, ValueError):
                    operations[rng.integers(len(operations))]()
        fill_to_the_last_cell(ctx, monkeypatch)
        ctx.clear()
        assert all(ctx.cells_free(seq) == 256 for seq in range(n_seq))


def test_the_check_above_can_fail(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in (-1, 1):
        with new_context(models[ATTENTION], 256) as ctx:
            ctx.decode(text_tokens(100))
            true = ctx.cells_free()
            monkeypatch.setattr(ctx, "cells_free", lambda *_, n=true + wrong: n)
            with pytest.raises((AssertionError, ContextFullError, pytest.fail.Exception)):
                fill_to_the_last_cell(ctx, monkeypatch)


@pytest.mark.parametrize("kind", [SLIDING, HYBRID])
def test_a_restore_takes_the_cells_its_state_has(models: Models, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Windowed layers keep fewer tokens than the others; the others decide."""
    with Arena(4 << 20) as arena, new_context(models[kind], 256, 2) as ctx:
        ctx.decode(text_tokens(100))
        with ctx.snapshot(arena) as snapshot:
            snapshot.restore(ctx, 1)
        assert ctx.cells_free() == 56
        fill_to_the_last_cell(ctx, monkeypatch)
