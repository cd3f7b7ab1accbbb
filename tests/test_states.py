"""States that are cut, converted and put together, and whole contexts: the answers, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import (
    ATTENTION,
    BRANCH,
    HYBRID,
    KINDS,
    RECURRENT,
    SLIDING,
    TOKENS,
    Files,
    Models,
    all_logits,
    close,
    identical,
    new_context,
    run_ok,
    taken,
    text_tokens,
    uninterrupted,
)

from swarmkv_ll import Adapter, Arena, Context, Model, Rope, Snapshot
from swarmkv_ll.errors import (
    ArenaExhaustedError,
    IncompatibleSnapshotError,
    InvalidArgumentError,
    ModelLoadError,
    PartialRemovalError,
    SnapshotError,
)

STREAMS = {"n_ctx": 2048, "n_seq_max": 4, "kv_unified": False}


def others_stay(ctx: Context, seq: int) -> Any:
    """Logits of a sequence that a restore elsewhere must not touch; to be called before and after."""
    ctx.remove(seq, 40)
    return all_logits(ctx, BRANCH, seq)


# ── conversions on the way ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("flash_attn", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_streams_are_converted_there_and_back(models: Models, arena: Arena, kind: str, flash_attn: bool) -> None:
    model, truth = models[kind], uninterrupted(models[kind], TOKENS, BRANCH, flash_attn=flash_attn)
    streams = new_context(model, **STREAMS, flash_attn=flash_attn)
    with taken(model, arena, flash_attn=flash_attn) as snapshot, streams as ctx:
        done = snapshot.restore(ctx, 2)
        assert [str(change) for change in done.conversions] == ["n_stream 1 → 4"] * (kind != RECURRENT)
        assert done == 96
        with ctx.snapshot(arena, 2) as back, new_context(model, flash_attn=flash_attn) as alone:
            assert identical(all_logits(ctx, BRANCH, 2), truth)
            assert back.restore(alone) == 96
            assert identical(all_logits(alone, BRANCH), truth)


@pytest.mark.parametrize("flash_attn", [True, False])
def test_a_restore_of_a_prefix_is_a_prefill_of_it(models: Models, arena: Arena, flash_attn: bool) -> None:
    model = models[ATTENTION]
    with taken(model, arena, flash_attn=flash_attn) as snapshot:
        for place in ({}, STREAMS):
            with new_context(model, flash_attn=flash_attn, **place) as ctx:
                assert snapshot.restore(ctx, n_tokens=64) == 64
                with pytest.raises(Exception, match="no logits"):  # the stored row is another position's
                    ctx.logits(0)
                truth = uninterrupted(model, TOKENS[:64], BRANCH, flash_attn=flash_attn)
                assert identical(all_logits(ctx, BRANCH), truth)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("flash_attn", [True, False])
def test_v_is_transposed_on_request_only(models: Models, arena: Arena, kind: str, flash_attn: bool) -> None:
    model = models[kind]
    with taken(model, arena, flash_attn=flash_attn) as snapshot, new_context(model, flash_attn=not flash_attn) as ctx:
        if kind != RECURRENT:  # which knows neither
            refused = snapshot.can_restore(ctx)
            assert [reason.field for reason in refused.reasons] == ["flash_attn"]
            assert "allow_inexact=True" in str(refused)
            with pytest.raises(IncompatibleSnapshotError, match="allow_inexact=True"):
                snapshot.restore(ctx)
            assert ctx.position() == 0
        allowed = snapshot.can_restore(ctx, allow_inexact=True)
        assert allowed
        assert all(not change.exact for change in allowed.conversions)
        assert len(allowed.conversions) == 2 * (kind != RECURRENT)
        assert snapshot.restore(ctx, allow_inexact=True).conversions == allowed.conversions
        truth = uninterrupted(model, TOKENS, BRANCH, flash_attn=not flash_attn)
        assert close(all_logits(ctx, BRANCH), truth)


@pytest.mark.parametrize("flash_attn", [True, False])
@pytest.mark.parametrize("name", ["mrope", "mla", "uneven", "shortconv", "hybrid-swa"])
def test_the_other_memories(models: Models, arena: Arena, name: str, flash_attn: bool) -> None:
    """M-RoPE's cell extensions, a cache without V, layers of different sizes, hybrids without and with a window."""
    model, truth = models[name], uninterrupted(models[name], TOKENS, BRANCH, flash_attn=flash_attn)
    with taken(model, arena, flash_attn=flash_attn) as snapshot:
        loaded = Snapshot.from_bytes(snapshot.to_bytes(), arena)
        with loaded, new_context(model, **STREAMS, flash_attn=flash_attn) as ctx:
            assert loaded.restore(ctx, 2) == 96
            assert identical(all_logits(ctx, BRANCH, 2), truth)
        if model.capabilities.attention_only:
            prefix = uninterrupted(model, TOKENS[:64], BRANCH, flash_attn=flash_attn)
            with snapshot.slice(64) as some, snapshot.delta(64) as rest, some.append(rest) as whole:
                assert whole.array.tobytes() == snapshot.array.tobytes()
                with new_context(model, flash_attn=flash_attn) as ctx:
                    some.restore(ctx)
                    assert identical(all_logits(ctx, BRANCH), prefix)
        else:
            with pytest.raises(PartialRemovalError):
                snapshot.slice(64)
        with new_context(model, flash_attn=not flash_attn) as ctx:
            assert not snapshot.can_restore(ctx)
            snapshot.restore(ctx, allow_inexact=True)
            assert close(all_logits(ctx, BRANCH), uninterrupted(model, TOKENS, BRANCH, flash_attn=not flash_attn))


def test_all_conversions_at_once(models: Models, arena: Arena) -> None:
    model = models[ATTENTION]
    with taken(model, arena) as snapshot, new_context(model, **STREAMS, flash_attn=False) as ctx:
        ctx.decode(TOKENS[:40], seq=0)
        before = others_stay(ctx, 0)
        done = snapshot.restore(ctx, 3, n_tokens=64, allow_inexact=True)
        assert {c.field for c in done.conversions} == {"n_stream", "v_transposed", "flash_attn", "n_tokens"}
        truth = uninterrupted(model, TOKENS[:64], BRANCH, flash_attn=False)
        assert close(all_logits(ctx, BRANCH, 3), truth)
        assert identical(others_stay(ctx, 0), before)


def test_a_full_arena_does_not_stop_a_conversion(models: Models) -> None:
    model = models[ATTENTION]
    with new_context(model) as ctx, Arena(106496) as small:
        ctx.decode(TOKENS)
        with ctx.snapshot(small) as snapshot, new_context(model, **STREAMS) as other:
            assert small.stats().free < snapshot.n_bytes
            snapshot.restore(other, 1)
            assert identical(all_logits(other, BRANCH, 1), uninterrupted(model, TOKENS, BRANCH))
            with pytest.raises(ArenaExhaustedError):
                snapshot.slice(50)


@pytest.mark.parametrize("seq", [0, 1, 77, 254, 255])
def test_any_of_256_sequences(models: Models, arena: Arena, seq: int) -> None:
    """In a unified cache; every one of them in `test_every_sequence_of_a_full_context`."""
    with taken(models[ATTENTION], arena) as snapshot, new_context(models[ATTENTION], 512, 256, n_batch=256) as ctx:
        assert snapshot.restore(ctx, seq) == 96
        assert identical(all_logits(ctx, BRANCH, seq), uninterrupted(models[ATTENTION], TOKENS, BRANCH))


def test_every_sequence_of_a_full_context(models: Models, arena: Arena) -> None:
    model, tokens = models[ATTENTION], TOKENS[:16]
    truth = uninterrupted(model, tokens, BRANCH)
    with taken(model, arena, tokens) as snapshot:
        with new_context(model, 256 * 32, 256, n_batch=256) as ctx:
            for seq in range(256):
                assert snapshot.restore(ctx, seq) == 16
            for seq in range(256):
                assert identical(all_logits(ctx, BRANCH, seq), truth), seq
                ctx.remove(seq, 16)
        with new_context(model, 256 * 256, 256, n_batch=256, kv_unified=False) as ctx:
            for seq in range(256):
                assert snapshot.restore(ctx, seq) == 16
            for seq in range(0, 256, 15):
                assert identical(all_logits(ctx, BRANCH, seq), truth), seq


# ── slices, deltas, whole contexts ───────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("flash_attn", [True, False])
def test_a_conversation_ships_only_its_new_cells(models: Models, arena: Arena, flash_attn: bool) -> None:
    model = models[ATTENTION]
    with taken(model, arena, flash_attn=flash_attn) as turn2, turn2.slice(64) as turn1, turn2.delta(64) as new:
        assert new.n_bytes < turn2.n_bytes / 2
        assert (new.begin, new.n_tokens) == (64, 96)
        with turn1.append(new) as again, new_context(model, flash_attn=flash_attn) as ctx:
            assert again.array.tobytes() == turn2.array.tobytes()
            assert np.array_equal(again.tokens, TOKENS)
            assert identical(again.last_logits, turn2.last_logits)
            again.restore(ctx)
            assert identical(all_logits(ctx, BRANCH), uninterrupted(model, TOKENS, BRANCH, flash_attn=flash_attn))
            (reason,) = new.can_restore(ctx).reasons
            assert (reason.field, reason.expected, reason.actual) == ("first position", 0, 64)
            with pytest.raises(IncompatibleSnapshotError):
                new.restore(ctx)


def test_a_delta_of_another_text_is_refused(models: Models, arena: Arena) -> None:
    model, other = models[ATTENTION], TOKENS.copy()
    other[10] ^= 1
    with taken(model, arena) as a, taken(model, arena, other) as b, a.slice(64) as base, b.delta(64) as wrong:
        with pytest.raises(InvalidArgumentError, match="token 10 is"):
            base.append(wrong)
        with a.delta(70) as later, pytest.raises(InvalidArgumentError, match=r"a delta from 64 on is needed.*70"):
            base.append(later)
        with pytest.raises(InvalidArgumentError, match="begins at 0"):
            base.append(a)
        with taken(model, arena, named=False) as unknown, unknown.slice(64) as nameless, a.delta(64) as new:
            assert nameless.tokens is None
            with pytest.raises(InvalidArgumentError, match="tokens of both"):
                nameless.append(new)
    both = taken(model, arena), taken(model, arena, type_k="f32")
    with both[0] as a, both[1] as b, a.slice(64) as base, b.delta(64) as wrong:
        with pytest.raises(IncompatibleSnapshotError, match="type_k"):
            base.append(wrong)
        assert base.n_tokens == 64


@pytest.mark.parametrize("kind", [RECURRENT, HYBRID])
def test_recurrent_states_cannot_be_cut(models: Models, arena: Arena, kind: str) -> None:
    with taken(models[kind], arena) as snapshot, new_context(models[kind]) as ctx:
        ctx.decode(TOKENS[:50])
        for cut in (lambda: snapshot.slice(64), lambda: snapshot.delta(64)):
            with pytest.raises(PartialRemovalError, match="96 tokens"):
                cut()
        with pytest.raises(IncompatibleSnapshotError, match="cannot be cut to 64"):
            snapshot.restore(ctx, n_tokens=64)
        assert identical(all_logits(ctx, BRANCH), uninterrupted(models[kind], TOKENS[:50], BRANCH))
        with snapshot.slice(96) as same:
            assert same.array.tobytes() == snapshot.array.tobytes()


def test_a_window_that_has_moved_on_cannot_be_cut(models: Models, arena: Arena) -> None:
    model = models[SLIDING]
    moved_on = pytest.raises(PartialRemovalError, match=r"no longer holds 31 positions \(33 to 63\)")
    with taken(model, arena) as snapshot, moved_on:
        snapshot.slice(64)
    with taken(model, arena, TOKENS[:30]) as short, short.slice(20) as cut, new_context(model) as ctx:
        cut.restore(ctx)
        assert identical(all_logits(ctx, BRANCH), uninterrupted(model, TOKENS[:20], BRANCH))


@pytest.mark.parametrize("full", [True, False])
def test_a_whole_context_keeps_what_left_the_window_if_its_cache_is_full(
    models: Models, arena: Arena, full: bool
) -> None:
    model = models[SLIDING]
    tokens = text_tokens(400)
    with new_context(model, swa_full=full) as ctx:
        ctx.decode(tokens)
        with ctx.snapshot(arena, seq=None) as whole:
            assert len(whole.blob.caches[1][0].pos) == (400 if full else 256)
            with whole.extract(0) as one, ctx.snapshot(arena) as exported:
                assert one.array.tobytes() == exported.array.tobytes()
            with new_context(model, swa_full=not full) as other:
                if full:
                    (reason,) = whole.can_restore(other).reasons
                    assert (reason.field, reason.actual) == ("cells of the sliding window", 256)
                else:
                    whole.restore(other)
                    assert close(all_logits(other, BRANCH), uninterrupted(model, tokens, BRANCH))


@pytest.mark.parametrize("flash_attn", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_whole_contexts_unified_and_in_streams(models: Models, arena: Arena, kind: str, flash_attn: bool) -> None:
    """Every sequence comes back with its text, positions, last logits and cells, in contexts of either shape."""
    model, other = models[kind], text_tokens(64, seed=5)
    options = {"n_ctx": 2048, "n_seq_max": 4, "flash_attn": flash_attn}
    shapes = [{**options, "kv_unified": True}, {**options, "kv_unified": False}]
    truths = [uninterrupted(model, tokens, BRANCH, flash_attn=flash_attn) for tokens in (TOKENS, other)]
    for shape in shapes:
        with new_context(model, **shape) as ctx:
            ctx.decode(TOKENS, seq=1)
            ctx.decode(other, seq=3)
            ctx.copy_sequence(1, 2)
            with ctx.snapshot(arena, seq=None, tokens={1: TOKENS, 3: other}) as whole:
                assert whole.whole
                assert whole.sequences == {1: 96, 2: 96, 3: 64}
                assert whole.n_tokens == 256
                assert set(whole.tokens) == {1, 3}
                assert set(whole.last_logits) == {3}  # the last decode's
                row = whole.last_logits[3]
                for target in shapes:
                    with new_context(model, **target) as second:
                        second.decode(other, seq=0)
                        done = whole.restore(second)
                        assert done == 256
                        assert [second.position(seq) for seq in range(4)] == [0, 96, 96, 64]
                        assert identical(second.logits(3), row)
                        used = 2048 - second.cells_free() if target["kv_unified"] else 512 - second.cells_free(2)
                        shared = shape["kv_unified"] and target["kv_unified"]
                        assert used == (
                            0 if kind == RECURRENT else 96 if not target["kv_unified"] else 160 if shared else 256
                        )
                        # Beside other sequences, and in a window's reused cells, sums are taken in another order.
                        apart = not shape["kv_unified"] and not target["kv_unified"] and kind != SLIDING
                        same = identical if apart else close
                        assert same(all_logits(second, BRANCH, 2), truths[0])
                        assert same(all_logits(second, BRANCH, 1), truths[0])
                        assert same(all_logits(second, BRANCH, 3), truths[1])
                with whole.extract(3) as one, new_context(model, flash_attn=flash_attn) as alone:
                    assert np.array_equal(one.tokens, other)
                    one.restore(alone)
                    same = close if shape["kv_unified"] else identical
                    assert same(all_logits(alone, BRANCH), truths[1])


def test_a_whole_context_is_refused_where_it_does_not_fit(models: Models, arena: Arena) -> None:
    model = models[ATTENTION]
    with new_context(model, 1024, 4) as ctx:
        ctx.decode(TOKENS, seq=3)
        for seq in range(3):
            ctx.decode(text_tokens(100, seed=seq), seq=seq)
        with ctx.snapshot(arena, seq=None) as whole:
            for place, field in (
                ({"n_ctx": 1024, "n_seq_max": 3}, "n_seq_max"),
                ({"n_ctx": 256, "n_seq_max": 4}, "KV cells"),
            ):
                with new_context(model, **place) as small:
                    small.decode(TOKENS[:50])
                    assert field in [reason.field for reason in whole.can_restore(small).reasons]
                    with pytest.raises(IncompatibleSnapshotError, match=field):
                        whole.restore(small)
                    assert identical(all_logits(small, BRANCH), uninterrupted(model, TOKENS[:50], BRANCH))
            with pytest.raises(IncompatibleSnapshotError, match=r"extract\(\)"):
                whole.restore(ctx, 1)
            with pytest.raises(IncompatibleSnapshotError, match="n_tokens"):
                whole.restore(ctx, n_tokens=10)
            for cut in (lambda: whole.slice(10), lambda: whole.delta(10), lambda: whole.extract(7)):
                with pytest.raises(InvalidArgumentError):
                    cut()
    with new_context(model, 512, 2) as empty, pytest.raises(SnapshotError, match="the context is empty"):
        empty.snapshot(arena, seq=None)
    assert arena.stats().n_leases == 0


def test_tokens_are_checked_by_sequence(models: Models, arena: Arena) -> None:
    with new_context(models[ATTENTION], 512, 3) as ctx:
        ctx.decode(TOKENS[:10], seq=1)
        for wrong in ({0: TOKENS[:10]}, {1: TOKENS[:9]}, {7: []}, {1: [-1] * 10}):
            with pytest.raises(InvalidArgumentError):
                ctx.snapshot(arena, seq=None, tokens=wrong)
        assert arena.stats().n_leases == 0


# ── what a state depends on ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "rope", [Rope(freq_base=20000.0), Rope(freq_scale=0.5), Rope(scaling="yarn", freq_scale=0.25, yarn_orig_ctx=4096)]
)
def test_rope_settings_are_part_of_it(models: Models, arena: Arena, rope: Rope) -> None:
    model = models[ATTENTION]
    with taken(model, arena, rope=rope) as snapshot:
        with new_context(model) as plain:
            (reason,) = snapshot.can_restore(plain, allow_inexact=True).reasons
            assert reason.field == "RoPE"
            assert str(rope) in str(reason)
        with new_context(model, rope=rope) as same:
            snapshot.restore(same)
            got = all_logits(same, BRANCH)
    assert identical(got, uninterrupted(model, TOKENS, BRANCH, rope=rope))
    assert not np.allclose(got, uninterrupted(model, TOKENS, BRANCH))


@pytest.mark.parametrize(
    "wrong",
    [
        {"freq_base": -1.0},
        {"freq_base": float("nan")},
        {"freq_scale": float("inf")},
        {"scaling": "bent"},
        {"yarn_orig_ctx": -1},
        {"yarn_orig_ctx": 1.5},
        {"yarn_ext_factor": -2.0},
        {"freq_base": "10000"},
        {"freq_base": True},
    ],
)
def test_rope_settings_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=next(iter(wrong))):
        Rope(**wrong)


def test_adapters_and_their_scales_are_part_of_it(files: Files, arena: Arena) -> None:
    model = Model(files[ATTENTION])
    lora = Adapter(model, files["lora"])
    truths = []
    for scale in (1.0, 0.5):
        with new_context(model) as ctx:
            ctx.set_adapters([(lora, scale)])
            ctx.decode(TOKENS)
            truths.append(all_logits(ctx, BRANCH))
    assert not np.allclose(*truths)
    with new_context(model) as ctx:
        ctx.set_adapters([(lora, 1.0)])
        assert ctx.adapters[0].fingerprint == lora.fingerprint
        ctx.decode(TOKENS)
        with ctx.snapshot(arena) as snapshot:
            for pairs in ([], [(lora, 0.5)], [(lora, 0.0)]):
                with new_context(model) as other:
                    other.set_adapters(pairs)
                    (reason,) = snapshot.can_restore(other, allow_inexact=True).reasons
                    assert reason.field == "adapters"
                    assert lora.fingerprint[:16] in str(reason)
            with new_context(model) as same:
                same.set_adapters([(Adapter(model, files["lora"]), 1.0)])  # loaded again, the same file
                snapshot.restore(same)
                assert identical(all_logits(same, BRANCH), truths[0])
        with pytest.raises(InvalidArgumentError, match=r"clear\(\) first"):
            ctx.set_adapters([])
        ctx.clear()
        ctx.set_adapters([])
        ctx.decode(TOKENS)
        assert identical(all_logits(ctx, BRANCH), uninterrupted(model, TOKENS, BRANCH))


def test_adapters_are_checked(files: Files, models: Models, tmp_path: Any) -> None:
    lora = Adapter(models[ATTENTION], files["lora"])
    with new_context(models[ATTENTION]) as ctx:
        for wrong in ([(lora, float("nan"))], [(lora, 1.0), (lora, 2.0)], [("lora", 1.0)]):
            with pytest.raises(InvalidArgumentError):
                ctx.set_adapters(wrong)  # type: ignore[arg-type]
        assert ctx.adapters == ()
    with new_context(models["deeper"]) as other, pytest.raises(InvalidArgumentError, match="this context's model"):
        other.set_adapters([(lora, 1.0)])
    noise = tmp_path / "noise.gguf"
    noise.write_bytes(b"GGUF" + bytes(100))
    for path in (tmp_path, tmp_path / "none", noise, files[ATTENTION]):
        with pytest.raises(ModelLoadError):
            Adapter(models[ATTENTION], path)
    with pytest.raises(ModelLoadError):
        Adapter(models[RECURRENT], files["lora"])


def test_rotation_is_part_of_it(files: Files, tmp_path: Any) -> None:
    """Saved with rotated rows, read where LLAMA_ATTN_ROT_DISABLE switches rotation off."""
    code = """
        import sys
        from helpers import TESTS, new_context, text_tokens
        from swarmkv_ll import Arena, Model, Snapshot
        step, gguf, file = sys.argv[1:]
        with Model(gguf) as model, new_context(model, type_k="q8_0") as ctx, Arena(4 << 20) as arena:
            if step == "save":
                ctx.decode(text_tokens(50))
                with ctx.snapshot(arena) as snapshot:
                    snapshot.save(file)
            else:
                with Snapshot.load(file, arena) as snapshot:
                    print(snapshot.can_restore(ctx))
        """
    path, env = tmp_path / "rotated.skv", {"LLAMA_ATTN_ROT_DISABLE": "1"}
    run_ok(code, "save", files["head64"], path)
    assert run_ok(code, "load", files["head64"], path) == "yes, as it is"
    assert "rotation of K, V should be (True, False), is (False, False)" in run_ok(
        code, "load", files["head64"], path, env=env
    )


def test_what_auto_came_to_is_recorded(models: Models, arena: Arena) -> None:
    with taken(models[ATTENTION], arena, flash_attn="auto") as snapshot:
        assert snapshot.identity.flash_attn is True
        with new_context(models[ATTENTION], flash_attn=True) as ctx:
            assert str(snapshot.can_restore(ctx)) == "yes, as it is"


def test_another_build_of_the_engine_is_inexact_and_another_pin_is_refused(
    models: Models, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    from swarmkv_ll import runtime

    with taken(models[ATTENTION], arena) as snapshot, new_context(models[ATTENTION]) as ctx:
        pin = runtime.STAMP.split("/")[0]
        monkeypatch.setattr(runtime, "STAMP", f"{pin}/{'0' * 16}")
        assert [c.field for c in snapshot.can_restore(ctx, allow_inexact=True).conversions] == ["engine build"]
        (reason,) = snapshot.can_restore(ctx).reasons
        assert reason.field == "engine build"
        monkeypatch.setattr(runtime, "STAMP", "feedfacefeed-12345678/0123456789abcdef")
        (reason,) = snapshot.can_restore(ctx, allow_inexact=True).reasons
        assert (reason.field, reason.actual) == ("engine", "feedfacefeed")


# ── fragmented caches ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("flash_attn", [True, False])
def test_scattered_cells_are_moved_together(models: Models, flash_attn: bool) -> None:
    """Holes of one cell between another sequence's: it says so, moves them, and nobody's answers change."""
    model, n = models[ATTENTION], 1200
    tokens = text_tokens(n, seed=8)
    with Arena(16 << 20) as arena, new_context(model, 4096, 3, flash_attn=flash_attn) as ctx:
        ctx.decode(tokens)
        with ctx.snapshot(arena) as snapshot:
            ctx.clear()
            assert (snapshot.restore(ctx, 0).runs, ctx.position()) == (1, n)
            snapshot.restore(ctx, 1)
            ctx.remove(0)
            for begin in range(0, 400, 2):
                ctx.remove(1, begin, begin + 1)
            ctx.remove(1, 400)
            kept = np.arange(1, 400, 2)
            with ctx.snapshot(arena, 1) as other:
                before = other.blob.layers[0].k.copy()
                ctx.decode(text_tokens(500, seed=3), seq=2, logits="none")  # takes the cells before the holes' end
                ctx.remove(2, 0, 0)
                done = snapshot.restore(ctx, 0)
            assert done.runs == 1
            assert ctx.position(2) == 500
            with ctx.snapshot(arena, 1) as other:
                assert other.blob.pos.tolist() == kept.tolist()
                assert np.array_equal(other.blob.layers[0].k, before)
            assert close(all_logits(ctx, BRANCH, 0), uninterrupted(model, tokens, BRANCH, 2048, flash_attn=flash_attn))


def test_a_few_runs_stay_as_they_are(models: Models, arena: Arena) -> None:
    model = models[ATTENTION]
    with new_context(model, 512, 3) as ctx:
        ctx.decode(TOKENS, seq=1)
        with ctx.snapshot(arena, 1) as snapshot:
            ctx.decode(text_tokens(50), seq=2)
            ctx.remove(1, 10, 50)
            done = snapshot.restore(ctx, 0)
            assert (done.runs, done.moved) == (2, False)


def test_where_cells_lie_is_not_claimed_after_a_failed_decode(models: Models, arena: Arena) -> None:
    model = models[ATTENTION]
    with new_context(model, 512, 2) as ctx:
        ctx.decode(TOKENS)
        with ctx.snapshot(arena) as snapshot:
            ctx._cells.exact = False  # type: ignore[union-attr]  # what a failed decode leaves
            assert snapshot.restore(ctx, 1).runs is None
            ctx.clear()
            assert snapshot.restore(ctx, 1).runs == 1
