"""Snapshots: what they carry, where they may go, what a refusal leaves behind, who holds the bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import (
    ATTENTION,
    BRANCH,
    KINDS,
    RECURRENT,
    SLIDING,
    WITH_CELLS,
    Models,
    all_logits,
    close,
    differs,
    identical,
    new_context,
    text_tokens,
    uninterrupted,
)

from swarmkv_ll import Arena, Context, Model, Snapshot, bind_contiguous_cache
from swarmkv_ll.errors import (
    ArenaExhaustedError,
    ClosedError,
    IncompatibleSnapshotError,
    InvalidArgumentError,
    LiveViewsError,
    NoLogitsError,
    SnapshotCorruptError,
    SnapshotError,
)
from swarmkv_ll.identity import Compatibility, Reason

PREFIX = text_tokens(40)


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena(4 << 20) as arena:
        yield arena
        arena.check_integrity()


@pytest.fixture
def ctx(llama: Model) -> Iterator[Context]:
    """Two sequences; 0 holds the prefix."""
    with new_context(llama, n_seq_max=2) as ctx:
        ctx.decode(PREFIX)
        yield ctx


@pytest.fixture
def snapshot(ctx: Context, arena: Arena) -> Iterator[Snapshot]:
    with ctx.snapshot(arena, tokens=PREFIX) as snapshot:
        yield snapshot


# ── taking one ───────────────────────────────────────────────────────────────────────────────────────


def test_carries_what_it_says(ctx: Context, snapshot: Snapshot) -> None:
    assert snapshot.n_tokens == ctx.position() == 40
    assert snapshot.n_bytes == ctx.state_size() == snapshot.lease.n_bytes == len(snapshot.array)
    assert snapshot.tokens is not None
    assert snapshot.last_logits is not None
    assert np.array_equal(snapshot.tokens, PREFIX)
    assert not snapshot.tokens.flags.writeable
    assert identical(snapshot.last_logits, ctx.logits())
    assert not snapshot.last_logits.flags.writeable
    assert "40 tokens" in repr(snapshot)


def test_its_row_and_tokens_are_copies(ctx: Context, arena: Arena) -> None:
    mine = PREFIX.copy()
    with ctx.snapshot(arena, tokens=mine) as snapshot:
        row = ctx.logits().copy()
        mine[:] = 0
        ctx.decode(BRANCH)
        assert snapshot.last_logits is not None
        assert identical(snapshot.last_logits, row)
        assert np.array_equal(np.asarray(snapshot.tokens), PREFIX)


def test_without_a_row_or_tokens(ctx: Context, arena: Arena) -> None:
    ctx.decode(BRANCH, logits="none")
    with ctx.snapshot(arena) as snapshot:
        assert snapshot.tokens is None
        assert snapshot.last_logits is None
        snapshot.restore(ctx, 1)
        with pytest.raises(NoLogitsError):
            ctx.logits(1)


def test_refuses_an_empty_sequence_wrong_tokens_or_a_sequence_there_is_not(ctx: Context, arena: Arena) -> None:
    with pytest.raises(SnapshotError, match="sequence 1 is empty"):
        ctx.snapshot(arena, 1)
    for tokens in (PREFIX[:-1], [*PREFIX, 1], [-1] * 40, [384] * 40, PREFIX.astype(float)):
        with pytest.raises(InvalidArgumentError):
            ctx.snapshot(arena, tokens=tokens)
    for seq in (-1, 2):
        with pytest.raises(InvalidArgumentError):
            ctx.snapshot(arena, seq)
    assert arena.stats().n_leases == 0


def test_an_exhausted_arena_leaves_everything_as_it_was(ctx: Context, snapshot: Snapshot) -> None:
    small = Arena(8192)
    before = small.stats()
    takes: list[Callable[[], Snapshot]] = [lambda: ctx.snapshot(small), lambda: snapshot.fork(small)]
    for take in takes:
        with pytest.raises(ArenaExhaustedError) as caught:
            take()
        assert caught.value.requested >= snapshot.n_bytes
        assert caught.value.available == 8192
    assert small.stats() == before
    small.close()
    assert identical(ctx.logits(), np.asarray(snapshot.last_logits))
    assert identical(all_logits(ctx, BRANCH), uninterrupted(ctx.model, PREFIX, BRANCH))


def test_a_sequence_with_gaps(ctx: Context, arena: Arena) -> None:
    """Positions are kept, also where a part was removed or the first ones are missing."""
    ctx.remove(0, 10, 20)
    ctx.decode(PREFIX, seq=1, pos=100)
    with new_context(ctx.model, n_seq_max=2) as other:
        for seq, n_tokens, n_cells in ((0, 40, 30), (1, 140, 40)):
            with ctx.snapshot(arena, seq) as snapshot:
                free = other.cells_free()
                assert snapshot.restore(other, seq) == snapshot.n_tokens == n_tokens
                assert free - other.cells_free() == n_cells
            assert close(all_logits(other, BRANCH, seq), all_logits(ctx, BRANCH, seq))


def test_fork_into_another_arena(ctx: Context, snapshot: Snapshot) -> None:
    with Arena(1 << 20) as other:
        with snapshot.fork(other) as twin:
            assert twin.lease.arena is other
            assert np.array_equal(twin.array, snapshot.array)
            assert np.array_equal(np.asarray(twin.tokens), PREFIX)
            assert twin.restore(ctx, 1) == 40
        assert other.stats().n_leases == 0


@pytest.mark.parametrize("kind", KINDS)
def test_forks_are_copies_and_shares_are_not(models: Models, arena: Arena, kind: str) -> None:
    with new_context(models[kind]) as ctx:
        ctx.decode(PREFIX)
        with ctx.snapshot(arena) as snapshot, snapshot.fork() as fork, snapshot.share() as share:
            assert share.lease is snapshot.lease
            assert fork.lease is not snapshot.lease
            assert np.array_equal(fork.array, snapshot.array)
            snapshot.lease.array[:4] ^= 255
            with pytest.raises(SnapshotCorruptError):
                share.restore(ctx)
            assert fork.restore(ctx) == 40


# ── damage ───────────────────────────────────────────────────────────────────────────────────────────


def blobs(models: Models, arena: Arena) -> Iterator[tuple[Context, Snapshot]]:
    """A small snapshot of every layout: each kind of memory, transposed V, streams, quantized rows."""
    settings: list[tuple[str, dict[str, Any]]] = [(kind, {}) for kind in KINDS]
    settings += [
        (ATTENTION, {"flash_attn": False}),
        (ATTENTION, {"n_seq_max": 3, "kv_unified": False}),
        (ATTENTION, {"type_k": "q8_0", "type_v": "q4_0"}),
        (SLIDING, {"n_seq_max": 3, "kv_unified": False}),
    ]
    for kind, options in settings:
        with new_context(models[kind], **options) as ctx:
            ctx.decode(PREFIX[:6])
            with ctx.snapshot(arena) as snapshot:
                yield ctx, snapshot


def test_damage_to_any_bookkeeping_byte_is_found(models: Models, arena: Arena) -> None:
    for ctx, snapshot in blobs(models, arena):
        expected = uninterrupted_from(ctx, snapshot)
        for offset, data, field in snapshot._record.layout.bookkeeping:
            steps = range(len(data)) if len(data) < 256 else range(0, len(data), len(data) // 61)
            for at in (offset + step for step in steps):
                for flip in (1, 128):
                    snapshot.lease.array[at] ^= flip
                    with pytest.raises(SnapshotCorruptError) as caught:
                        snapshot.restore(ctx)
                    snapshot.lease.array[at] ^= flip
                    assert (caught.value.offset, caught.value.field) == (at, field)
        assert ctx.position() == 6
        assert identical(all_logits(ctx, BRANCH), expected)


def uninterrupted_from(ctx: Context, snapshot: Snapshot) -> Any:
    """What the branch gives after a good restore; checked against the truth in test_answers.py."""
    snapshot.restore(ctx)
    expected = all_logits(ctx, BRANCH)
    snapshot.restore(ctx)
    return expected


def test_every_byte_is_bookkeeping_or_tensor_data_and_data_may_change(models: Models, arena: Arena) -> None:
    """The K and V values are the caller's to change; a restore takes them as they are."""
    for ctx, snapshot in blobs(models, arena):
        expected = uninterrupted_from(ctx, snapshot)
        data = np.ones(snapshot.n_bytes, bool)
        for offset, kept, _ in snapshot._record.layout.bookkeeping:
            assert data[offset : offset + len(kept)].all()
            data[offset : offset + len(kept)] = False
        if models[RECURRENT] is not ctx.model:
            assert data.any()
        original = snapshot.lease.array.copy()
        snapshot.lease.array[data] = 0
        assert snapshot.restore(ctx) == 6
        answer = all_logits(ctx, BRANCH)
        assert identical(answer, expected) == (not data.any())
        snapshot.lease.array[:] = original
        snapshot.restore(ctx)
        assert identical(all_logits(ctx, BRANCH), expected)


def test_a_failed_restore_or_export_does_not_hold_on_to_the_bytes(
    ctx: Context, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception refers to the frames it passed through; a view in one of them would stop the release."""
    from swarmkv_ll.blob import reading

    with ctx.snapshot(arena) as snapshot:
        snapshot.lease.array[0] ^= 1
        with pytest.raises(SnapshotCorruptError) as caught:
            snapshot.restore(ctx)
    assert caught.value.offset == 0
    assert arena.stats().n_leases == 0
    monkeypatch.setattr(reading, "MAGIC", 1)
    with pytest.raises(SnapshotError, match=r"unknown layout.* magic"):
        ctx.snapshot(arena)
    assert arena.stats().n_leases == 0


# ── where it may go ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("place", "field", "expected", "actual"),
    [
        ({"model": "changed"}, "model", None, None),
        ({"model": "deeper"}, "model", None, None),
        ({"model": SLIDING}, "model", None, None),
        ({"type_k": "f32"}, "type_k", "f16", "f32"),
        ({"type_v": "q8_0"}, "type_v", "f16", "q8_0"),
        ({"flash_attn": False}, "flash_attn", True, False),
        ({"seq": 1}, "seq", "0 to 0", 1),
        ({"seq": -1}, "seq", "0 to 0", -1),
        ({"seq": -2}, "seq", "0 to 0", -2),
    ],
)
def test_refuses_what_does_not_fit_with_both_values(
    models: Models, snapshot: Snapshot, place: dict[str, Any], field: str, expected: object, actual: object
) -> None:
    options = dict(place)
    model, seq = models[options.pop("model", ATTENTION)], options.pop("seq", 0)
    with new_context(model, **options) as other:
        other.decode(text_tokens(30, seed=2))
        compatible = snapshot.can_restore(other, seq)
        assert not compatible
        assert not compatible.ok
        (reason,) = (reason for reason in compatible.reasons if reason.field == field)
        if expected is None:
            assert snapshot.identity.model.fingerprint[:16] in str(reason.expected)
            assert model.fingerprint[:16] in str(reason.actual)
            assert model.path.name in str(reason)
        else:
            assert (reason.expected, reason.actual) == (expected, actual)
        assert str(reason.actual) in str(reason)

        with pytest.raises(IncompatibleSnapshotError) as caught:
            snapshot.restore(other, seq)
        assert caught.value.reasons == compatible.reasons
        assert field in str(caught.value)
        assert other.position() == 30
        expected_logits = uninterrupted(model, text_tokens(30, seed=2), BRANCH, **options)
        assert identical(all_logits(other, BRANCH), expected_logits)


def test_all_reasons_are_told_at_once(models: Models, snapshot: Snapshot) -> None:
    with new_context(models["changed"], 768, 3, kv_unified=False, type_k="f32", flash_attn=False) as other:
        fields = {reason.field for reason in snapshot.can_restore(other, 9).reasons}
    assert fields == {"model", "type_k", "flash_attn", "seq"}


def test_fits_where_it_should(ctx: Context, models: Models, snapshot: Snapshot, files: Any, tmp_path: Path) -> None:
    """The same file loaded twice, an equal copy of it, more room, more sequences of a unified cache, other batches."""
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(files[ATTENTION].read_bytes())
    for model in (ctx.model, Model(files[ATTENTION]), Model(copy)):
        for options in ({}, {"n_ctx": 1024}, {"n_seq_max": 5}, {"n_batch": 32, "n_ubatch": 16}, {"n_threads": 2}):
            with new_context(model, **options) as other:
                assert snapshot.can_restore(other) == Compatibility(())
                assert snapshot.restore(other) == 40


@pytest.mark.parametrize("kind", WITH_CELLS)
def test_room_is_counted_to_the_cell(models: Models, arena: Arena, kind: str) -> None:
    sibling = text_tokens(216, seed=4)
    with new_context(models[kind], 256, 2) as ctx:
        ctx.decode(PREFIX)
        with ctx.snapshot(arena) as snapshot:
            ctx.clear()
            ctx.decode(sibling, seq=1)
            assert snapshot.restore(ctx, 0) == 40  # 216 + 40 = 256
            assert ctx.cells_free() == 0
            assert snapshot.restore(ctx, 0) == 40  # its own cells count as free
            ctx.remove(0)
            ctx.decode([7], seq=1)
            assert snapshot.can_restore(ctx).reasons == (Reason("free KV cells", "at least 40", 39),)
            with pytest.raises(IncompatibleSnapshotError):
                snapshot.restore(ctx, 0)
            assert [ctx.position(seq) for seq in (0, 1)] == [0, 217]
            assert snapshot.restore(ctx, 1) == 40  # in place of the sibling


def test_a_refused_restore_keeps_even_the_destination(ctx: Context, arena: Arena) -> None:
    with ctx.snapshot(arena) as snapshot:
        ctx.decode(BRANCH)
        row = ctx.logits().copy()
        snapshot.lease.array[20] ^= 1
        with pytest.raises(SnapshotCorruptError):
            snapshot.restore(ctx)
        assert ctx.position() == 49
        assert identical(ctx.logits(0), row)
        expected = uninterrupted(ctx.model, [*PREFIX, *BRANCH], [1, 2])
        assert close(all_logits(ctx, [1, 2]), expected, 0.01)  # another batch split than the reference's


def test_what_the_engine_refuses_empties_the_destination_only(
    ctx: Context, snapshot: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No known input gets that far, so the checks are taken away: the engine then says no itself."""
    monkeypatch.setattr(type(snapshot._record.layout), "check", lambda *_: None)
    ctx.decode(text_tokens(30, seed=3), seq=1)
    snapshot.lease.array[0] ^= 255
    with pytest.raises(SnapshotError, match=r"the engine read 0 of"):
        snapshot.restore(ctx, 0)
    snapshot.lease.array[0] ^= 255
    assert [ctx.position(seq) for seq in (0, 1)] == [0, 30]
    assert ctx.cells_free() == 512 - 30
    assert close(all_logits(ctx, BRANCH, 1), uninterrupted(ctx.model, text_tokens(30, seed=3), BRANCH))
    assert snapshot.restore(ctx, 0) == 40


# ── who holds the bytes ──────────────────────────────────────────────────────────────────────────────


def test_released_once_and_unusable_afterwards(ctx: Context, arena: Arena) -> None:
    snapshot = ctx.snapshot(arena)
    assert not snapshot.released
    snapshot.release()
    assert snapshot.released
    assert arena.stats().n_leases == 0
    for use in (snapshot.release, snapshot.fork, snapshot.share, lambda: snapshot.restore(ctx), lambda: snapshot.array):
        with pytest.raises(ClosedError, match="snapshot"):
            use()
    assert ctx.position() == 40


def test_shares_are_counted(ctx: Context, arena: Arena) -> None:
    snapshot = ctx.snapshot(arena)
    shares = [snapshot.share() for _ in range(3)]
    shares.append(shares[0].share())
    snapshot.release()
    with pytest.raises(ClosedError):
        snapshot.share()
    for share in shares[:-1]:
        assert share.restore(ctx, 1) == 40
        share.release()
        assert arena.stats().n_leases == 1
    with pytest.raises(ClosedError):
        shares[0].release()
    shares[-1].release()
    assert arena.stats().n_leases == 0


def test_a_live_view_stops_the_last_release_only(ctx: Context, arena: Arena) -> None:
    snapshot = ctx.snapshot(arena)
    share = snapshot.share()
    view = snapshot.array[8:16]
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1
    snapshot.release()
    with pytest.raises(LiveViewsError):
        share.release()
    assert share.restore(ctx, 1) == 40
    del view
    share.release()
    assert arena.stats().n_leases == 0


def test_many_threads_share_and_release(ctx: Context, arena: Arena) -> None:
    snapshot = ctx.snapshot(arena)

    def work(_: int) -> int:
        with snapshot.share() as share:
            return share.restore(ctx, 1)

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(work, range(200))) == {40}
    snapshot.release()
    assert arena.stats().n_leases == 0


def test_release_while_another_thread_restores(ctx: Context, arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes stay until the restore is done with them, then they go back."""
    from swarmkv_ll import snapshot as module

    inside, go_on = threading.Event(), threading.Event()

    def wait(*_: object) -> None:
        inside.set()
        assert go_on.wait(10)

    monkeypatch.setattr(module, "bind_contiguous_cache", wait)
    snapshot = ctx.snapshot(arena)
    with ThreadPoolExecutor(1) as pool:
        restored = pool.submit(snapshot.restore, ctx, 1)
        assert inside.wait(10)
        snapshot.release()
        assert snapshot.released
        assert arena.stats().n_leases == 1
        go_on.set()
        assert restored.result() == 40
    assert arena.stats().n_leases == 0
    assert identical(all_logits(ctx, BRANCH, 1), uninterrupted(ctx.model, PREFIX, BRANCH))


def test_a_snapshots_lease_is_not_released_underneath(ctx: Context, arena: Arena) -> None:
    snapshot = ctx.snapshot(arena)
    with pytest.raises(InvalidArgumentError, match="belongs to a snapshot"):
        snapshot.lease.release()
    assert snapshot.restore(ctx, 1) == 40
    snapshot.release()
    with pytest.raises(ClosedError, match="lease"):
        snapshot.lease.release()
    assert arena.stats().n_leases == 0


def test_an_exception_on_its_way_out_is_not_hidden_by_live_views(ctx: Context) -> None:
    def fail() -> None:
        with Arena.for_branches(ctx, 0) as arena, ctx.snapshot(arena) as snapshot:
            view = snapshot.array
            raise KeyError(len(view))

    with pytest.raises(KeyError):
        fail()


def test_a_closed_context_is_noticed(llama: Model, snapshot: Snapshot, arena: Arena) -> None:
    other = new_context(llama)
    other.close()
    for use in (
        lambda: snapshot.restore(other),
        lambda: snapshot.can_restore(other),
        lambda: other.snapshot(arena),
        lambda: bind_contiguous_cache(other, snapshot.lease),
    ):
        with pytest.raises(ClosedError, match="context"):
            use()


def test_bind_contiguous_cache_does_nothing_but_check(
    ctx: Context, snapshot: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    from swarmkv_ll import snapshot as module

    before = snapshot.array.tobytes()
    assert bind_contiguous_cache(ctx, snapshot.lease) is None  # type: ignore[func-returns-value]
    assert snapshot.array.tobytes() == before
    assert [ctx.position(seq) for seq in (0, 1)] == [40, 0]
    for wrong in ((ctx, snapshot), (snapshot.lease, ctx), (None, snapshot.lease), (ctx, None)):
        with pytest.raises(InvalidArgumentError, match="expected a Context and a Lease"):
            bind_contiguous_cache(*wrong)
    lease = snapshot.lease.arena.lease(10)
    lease.release()
    with pytest.raises(ClosedError, match="lease"):
        bind_contiguous_cache(ctx, lease)

    calls = []
    monkeypatch.setattr(module, "bind_contiguous_cache", lambda *args: calls.append(args))
    with snapshot.fork() as fork, snapshot.share() as share:
        for source in (snapshot, fork, share):
            source.restore(ctx, 1)
            assert calls[-1] == (ctx, source.lease)


def test_lives_on_after_its_context_and_model(files: Any, llama: Model, arena: Arena) -> None:
    model = Model(files[ATTENTION])
    ctx = new_context(model)
    ctx.decode(PREFIX)
    snapshot = ctx.snapshot(arena)
    ctx.close()
    model.close()
    del ctx, model
    with new_context(llama) as other:
        snapshot.restore(other)
        assert identical(all_logits(other, BRANCH), uninterrupted(llama, PREFIX, BRANCH))
        assert differs(all_logits(other, BRANCH), uninterrupted(llama, PREFIX, BRANCH))
    snapshot.release()
