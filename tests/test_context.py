"""Contexts: what they accept, what decodes, what a failure leaves, and what each operation does to a sequence."""

from __future__ import annotations

import gc
import json
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from helpers import (
    ATTENTION,
    BRANCH,
    HYBRID,
    KINDS,
    N_UBATCH,
    RECURRENT,
    SLIDING,
    WITH_CELLS,
    Files,
    Models,
    all_logits,
    close,
    differs,
    identical,
    new_context,
    run_ok,
    text_tokens,
    uninterrupted,
)
from tiny_models import SLIDING_WINDOW

from swarmkv_ll import Arena, Context, LlamaGuard, Model, Sampler
from swarmkv_ll.errors import (
    ClosedError,
    ContextFullError,
    DecodeError,
    InvalidArgumentError,
    LiveViewsError,
    NoLogitsError,
    PartialRemovalError,
)
from swarmkv_ll.ffi import C
from swarmkv_ll.limits import KV_TYPES, default_n_threads

PREFIX = text_tokens(40)


@pytest.fixture
def ctx(llama: Model) -> Iterator[Context]:
    """Three sequences; 0 holds the prefix."""
    with new_context(llama, n_seq_max=3) as ctx:
        ctx.decode(PREFIX)
        yield ctx


# ── parameters ───────────────────────────────────────────────────────────────────────────────────────


def test_attributes_are_the_engine_s(llama: Model) -> None:
    with llama.context(1000, 4, kv_unified=False, n_batch=200, n_ubatch=100, n_threads=2) as ctx:
        assert (ctx.n_ctx, ctx.n_ctx_seq, ctx.n_seq_max) == (1024, 256, 4)
        assert (ctx.n_batch, ctx.n_ubatch, ctx.n_threads) == (200, 100, 2)
        assert (ctx.kv_unified, ctx.flash_attn, ctx.type_k, ctx.type_v) == (False, True, "f16", "f16")
        assert ctx.model is llama
        assert "n_ctx=1024" in repr(ctx)
    with llama.context(0) as ctx:
        assert ctx.n_ctx == llama.n_ctx_train
        assert ctx.n_threads == default_n_threads() >= 1


@pytest.mark.parametrize(
    "options",
    [
        {"n_ctx": 1},
        {"n_seq_max": C.llama_max_parallel_sequences(), "n_batch": C.llama_max_parallel_sequences()},
        {"n_batch": 1, "n_ubatch": 1},
        {"n_batch": 4, "n_ubatch": 2**24},
        {"n_batch": 2**24},
        {"n_threads": 512},
        {"n_ctx": 3, "n_seq_max": 3, "kv_unified": False},
        *({"type_k": name, "type_v": name} for name in KV_TYPES),
    ],
    ids=str,
)
def test_limits_are_accepted(llama: Model, options: dict[str, Any]) -> None:
    with new_context(llama, **{"n_ctx": 256, **options}) as ctx:
        if options.get("n_threads", 1) == 1:
            assert ctx.decode(BRANCH) == len(BRANCH)
            assert np.isfinite(ctx.logits()).all()


def test_beyond_the_limits_is_refused(files: Files) -> None:
    """In a process of its own: the engine would abort on most of these."""
    bad = [
        ({"n_threads": 0}, "InvalidArgumentError"),
        ({"n_threads": 513}, "InvalidArgumentError"),
        ({"n_threads": -1}, "InvalidArgumentError"),
        ({"n_seq_max": 0}, "InvalidArgumentError"),
        ({"n_seq_max": int(C.llama_max_parallel_sequences()) + 1}, "InvalidArgumentError"),
        ({"n_ctx": -1}, "InvalidArgumentError"),
        ({"n_ctx": 2**31}, "InvalidArgumentError"),
        ({"n_ctx": 2**40}, "InvalidArgumentError"),
        ({"n_ctx": 2**31 - 256}, "HostMemoryError"),
        ({"n_ctx": 2, "n_seq_max": 3, "kv_unified": False}, "InvalidArgumentError"),
        ({"n_batch": 0}, "InvalidArgumentError"),
        ({"n_batch": 2**31}, "InvalidArgumentError"),
        ({"n_batch": 4, "n_seq_max": 5}, "InvalidArgumentError"),
        ({"n_ubatch": 0}, "InvalidArgumentError"),
        ({"flash_attn": "on"}, "InvalidArgumentError"),
        ({"flash_attn": None}, "InvalidArgumentError"),
        ({"type_k": "q9_9"}, "InvalidArgumentError"),
        ({"type_v": "F16"}, "InvalidArgumentError"),
        ({"type_v": "q8_0", "flash_attn": False}, "InvalidArgumentError"),
        ({"model": "head48", "type_k": "q8_0"}, "InvalidArgumentError"),
        ({"model": "head48", "type_v": "q4_0"}, "InvalidArgumentError"),
        ({"n_ctx": 256.0}, "TypeError"),
        ({"n_threads": 1.0}, "TypeError"),
    ]
    printed = run_ok(
        """
        import json, sys
        from swarmkv_ll import Model
        models = {name: Model(path) for name, path in json.loads(sys.argv[1]).items()}
        for options in json.loads(sys.argv[2]):
            model = models[options.pop("model", "llama")]
            try:
                model.context(**{"n_ctx": 256, **options})
                print("accepted", flush=True)
            except Exception as error:
                print(type(error).__name__, flush=True)
        assert model.context(256).decode([1, 2, 3]) == 3
        """,
        json.dumps({name: str(files[name]) for name in ("llama", "head48")}),
        json.dumps([options for options, _ in bad]),
    )
    assert list(zip([o for o, _ in bad], printed.splitlines(), strict=True)) == bad


# ── decode: what is accepted ─────────────────────────────────────────────────────────────────────────


def test_bad_input_never_reaches_the_engine(files: Files) -> None:
    """In a process of its own: out of range, a token or sequence id aborts there. Afterwards all is as it was."""
    printed = run_ok(
        """
        import sys
        import numpy as np
        from helpers import *
        from swarmkv_ll import Model
        from swarmkv_ll.errors import InvalidArgumentError
        model = Model(sys.argv[1])
        ctx, free = new_context(model, n_seq_max=2), 2**31 - 2
        ctx.decode(text_tokens(40))
        bad = [dict(tokens=t) for t in (
            [], [[1, 2]], [-1], [1, 384], [2**31], [2**63], [-2**40], [2**70], [1.0], [float("nan")], ["1"], [None], None,
            "text", 5, [True], np.zeros((2, 1), np.int32), np.array([1 << 32], np.uint64), [b"x"], {1: 2},
        )]
        bad += [dict(tokens=[1], seq=seq) for seq in (-1, -2, 2, 255, 2**31, 2**40)]
        bad += [dict(tokens=[1], pos=pos) for pos in (-1, 0, 39, 41, free, 2**40)]
        bad += [dict(tokens=[1], seq=1, pos=pos) for pos in (-1, free + 1, 2**40)]
        bad += [dict(tokens=[1, 2], seq=1, pos=free), dict(tokens=[1], logits="some"), dict(tokens=[1], logits=None)]
        for call in bad:
            try:
                ctx.decode(**call)
                print("accepted", call)
            except InvalidArgumentError:
                pass
        for parts in ([], [([1], 0), ([2], 0)], [([1], 0), ([-1], 1)], [([1], 0), ([], 1)], [([1], 0), ([1], 2)]):
            try:
                ctx.decode_batch(parts)
                print("accepted", parts)
            except InvalidArgumentError:
                pass
        for call in (dict(tokens=[1], seq=0.0), dict(tokens=[1], seq=1, pos=1.5), dict(tokens=[1], seq="0")):
            try:
                ctx.decode(**call)
                print("accepted", call)
            except TypeError:
                pass
        print(ctx.position(0), ctx.position(1), ctx.cells_free())
        print(identical(all_logits(ctx, BRANCH), uninterrupted(model, text_tokens(40), BRANCH)))
        print(ctx.decode([1], seq=1, pos=free) == free + 1)  # the last position there is
        """,
        files[ATTENTION],
    )
    assert printed.splitlines() == ["40 0 472", "True", "True"]


@pytest.mark.parametrize("kind", [*WITH_CELLS])
@pytest.mark.parametrize("streams", [False, True], ids=["unified", "streams"])
def test_room_to_the_last_cell(models: Models, kind: str, streams: bool) -> None:
    with new_context(models[kind], 512 if streams else 256, 2, kv_unified=not streams, n_batch=16) as ctx:
        with pytest.raises(ContextFullError) as caught:
            ctx.decode(text_tokens(257))
        assert (caught.value.required, caught.value.available, caught.value.n_ctx) == (257, 256, 256)
        assert ctx.position() == 0
        assert ctx.decode(text_tokens(200)) == 200
        assert ctx.cells_free(0) == 56
        assert ctx.cells_free(1) == (256 if streams else 56)
        with pytest.raises(ContextFullError) as caught:
            ctx.decode_batch([(text_tokens(30), 0), (text_tokens(27 if not streams else 257), 1)])
        assert (caught.value.required, caught.value.available) == ((257, 256) if streams else (57, 56))
        assert [ctx.position(seq) for seq in (0, 1)] == [200, 0]  # nothing was begun, so nothing had to be taken back
        assert ctx.decode_batch([(text_tokens(30), 0), (text_tokens(26), 1)]) == [230, 26]
        assert ctx.cells_free(0) == (26 if streams else 0)
        with pytest.raises(ContextFullError):
            ctx.decode(text_tokens(27))
        ctx.remove(1)
        assert ctx.decode(text_tokens(26)) == 256
        assert ctx.cells_free(0) == 0


def test_a_recurrent_model_never_runs_out(models: Models) -> None:
    with new_context(models[RECURRENT], 256, 2) as ctx:
        assert ctx.decode(text_tokens(700)) == 700
        assert ctx.decode(text_tokens(700), seq=1) == 700
        assert ctx.cells_free() == 256


def test_tokens_of_any_integer_kind(llama: Model) -> None:
    expected = uninterrupted(llama, PREFIX, BRANCH)
    for tokens in (
        BRANCH.tolist(),
        tuple(BRANCH.tolist()),
        BRANCH.astype(np.uint8),
        BRANCH.astype(">i8"),
        list(BRANCH),
    ):
        assert identical(uninterrupted(llama, PREFIX, tokens), expected)
    strided = np.repeat(BRANCH, 3)[::3]
    assert identical(uninterrupted(llama, PREFIX, strided), expected)


# ── decode: what it gives ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", KINDS)
def test_any_split_at_the_engine_s_borders_gives_the_same_bits(models: Models, kind: str) -> None:
    tokens, n = text_tokens(150), N_UBATCH
    with new_context(models[kind], n_batch=1024) as ctx:
        expected = all_logits(ctx, tokens)
    assert expected.shape == (150, models[kind].n_vocab)
    for n_batch, borders in ((n, [0, 150]), (2 * n, [0, 150]), (n, [0, n, 2 * n, 150]), (1024, [0, n, 150])):
        with new_context(models[kind], n_batch=n_batch) as ctx:
            rows = [all_logits(ctx, tokens[begin:end]) for begin, end in pairwise(borders)]
            assert ctx.position() == 150
            assert identical(np.concatenate(rows), expected)
    with new_context(models[kind], n_batch=2 * n) as ctx:
        ctx.decode(tokens)
        assert ctx.logits().shape == (models[kind].n_vocab,)
        last = ctx.logits().copy()
        assert close(last, expected[-1], 1e-4)  # the output matrix times one row instead of many
    with new_context(models[kind], n_batch=n) as ctx:
        ctx.decode(tokens)
        assert identical(ctx.logits(), last)


def test_which_rows_there_are(ctx: Context) -> None:
    n_vocab = ctx.model.n_vocab
    ctx.decode(BRANCH, logits="all")
    assert ctx.logits().shape == (len(BRANCH), n_vocab)
    assert ctx.logits().dtype == np.float32
    assert identical(ctx.logits(0), ctx.logits()[-1])
    ctx.decode(BRANCH, logits="last")
    assert ctx.logits().shape == (n_vocab,)
    ctx.decode(BRANCH, logits="none")
    for which in (None, 0, 1):
        with pytest.raises(NoLogitsError):
            ctx.logits(which)
    for seq in (-1, 3):
        with pytest.raises(InvalidArgumentError):
            ctx.logits(seq)
    ctx.decode_batch([(BRANCH, 1), (BRANCH[:3], 2)])
    assert ctx.logits().shape == (2, n_vocab)
    assert identical(ctx.logits(2), ctx.logits()[1])
    with pytest.raises(NoLogitsError):
        ctx.logits(0)
    ctx.decode(BRANCH, seq=0)
    with pytest.raises(NoLogitsError):
        ctx.logits(1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("streams", [False, True], ids=["unified", "streams"])
@pytest.mark.parametrize("n_batch", [256, 8], ids=["one batch", "many batches"])
def test_decode_batch_is_separate_decodes(models: Models, kind: str, streams: bool, n_batch: int) -> None:
    """Within rounding, each row with its own sequence, whatever their order and lengths."""
    options: dict[str, Any] = {"kv_unified": not streams, "type_k": "f32", "type_v": "f32", "n_batch": n_batch}
    parts = [(text_tokens(n, seed=n), seq) for n, seq in ((11, 2), (1, 0), (30, 3))]
    with new_context(models[kind], 2048, 4, **options) as ctx:
        for seq in range(4):
            ctx.decode(text_tokens(20 + seq, seed=seq), seq=seq)
        assert ctx.decode_batch(parts) == [33, 21, 53]
        rows = {seq: ctx.logits(seq).copy() for _, seq in parts}
        assert np.array_equal(ctx.logits(), [rows[2], rows[0], rows[3]])
        assert [ctx.position(seq) for seq in range(4)] == [21, 21, 33, 53]
        assert not any(ctx.logits(seq).flags.writeable for seq in rows)
        for tokens, seq in parts:
            alone = uninterrupted(
                models[kind], text_tokens(20 + seq, seed=seq), tokens, **options | {"kv_unified": True}
            )
            assert close(rows[seq], alone[-1], 0.01)
            assert all(differs(rows[seq], row) for other, row in rows.items() if other != seq)


def test_logits_are_a_view_that_the_next_decode_writes(ctx: Context) -> None:
    first = ctx.logits()
    kept = first.copy()
    assert not first.flags.writeable
    ctx.decode(BRANCH)
    second = ctx.logits()
    assert second.ctypes.data == first.ctypes.data
    assert np.array_equal(first, second)
    assert differs(kept, second)


def test_a_live_view_refuses_a_larger_buffer(ctx: Context) -> None:
    """The engine would move its memory away under it. Nothing is decoded then."""
    view = ctx.logits()
    row = view.copy()
    with pytest.raises(LiveViewsError):
        ctx.decode(BRANCH, logits="all")
    assert ctx.position() == 40
    assert identical(view, row)
    assert identical(ctx.logits(0), row)
    del view
    ctx.decode(BRANCH, logits="all")
    rows = ctx.logits()
    ctx.decode(BRANCH[:3], logits="all")
    assert np.array_equal(rows[:3], ctx.logits())


def test_a_failed_decode_does_not_count_as_a_larger_buffer(ctx: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine had not made room for the rows yet, so a view taken now must keep them from being made."""
    with monkeypatch.context() as patch:
        unchecked(ctx, patch)
        ctx.decode(text_tokens(400), seq=1, logits="none")
        with pytest.raises(ContextFullError):
            ctx.decode(text_tokens(100), logits="all")
    ctx.decode([1])
    view = ctx.logits()
    with pytest.raises(LiveViewsError):
        ctx.decode(BRANCH, logits="all")
    assert np.array_equal(view, ctx.logits(0))


def test_a_view_outlives_its_context(llama: Model) -> None:
    ctx = new_context(llama)
    ctx.decode(PREFIX)
    view, row = ctx.logits(), ctx.logits().copy()
    ctx.close()
    del ctx
    gc.collect()
    with new_context(llama) as other:
        other.decode(BRANCH)
        assert np.array_equal(view, row)


# ── failures ─────────────────────────────────────────────────────────────────────────────────────────


def unchecked(ctx: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctx, "_check_room", lambda *_: None)


@pytest.mark.parametrize("kind", WITH_CELLS)
@pytest.mark.parametrize("n_prefix", [0, 40, 100])
def test_a_decode_that_fails_in_the_middle_is_taken_back(
    models: Models, monkeypatch: pytest.MonkeyPatch, kind: str, n_prefix: int
) -> None:
    """The room is counted beforehand, so the count is taken away: the engine then fails in its second or third batch."""
    prefix, sibling = text_tokens(n_prefix), text_tokens(30, seed=4)
    with new_context(models[kind], 256, 2, n_batch=64) as ctx:
        ctx.decode(sibling, seq=1)
        if n_prefix:
            ctx.decode(prefix)
        with monkeypatch.context() as patch:
            unchecked(ctx, patch)
            with pytest.raises(ContextFullError):
                ctx.decode(text_tokens(250, seed=9), logits="all")
        with pytest.raises(NoLogitsError):
            ctx.logits()
        # Recurrent memory has no way back, nor has a window that has moved on: those are empty, not wrong.
        left = ctx.position()
        assert left in ((0,) if kind == HYBRID else (0, n_prefix) if kind == SLIDING else (n_prefix,))
        assert ctx.position(1) == 30
        assert ctx.cells_free() == 256 - 30 - left
        with new_context(models[kind], 256, 2, n_batch=64) as other:
            other.decode(sibling, seq=1)
            if left:
                other.decode(prefix)
            for seq in (0, 1):
                assert identical(all_logits(ctx, BRANCH, seq), all_logits(other, BRANCH, seq))


def test_a_window_that_has_moved_on_is_not_gone_back_to(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine reuses cells that have left the window; what a branch at the old end would see is gone then."""
    with new_context(models[SLIDING], 256, 2, n_batch=64) as ctx:
        ctx.decode(text_tokens(30, seed=4), seq=1)
        ctx.decode(text_tokens(100))
        ctx.remove(1)
        with monkeypatch.context() as patch:
            unchecked(ctx, patch)
            with pytest.raises(ContextFullError):
                ctx.decode(text_tokens(250, seed=9))
        assert ctx.position() == 0
        assert ctx.cells_free() == 256
        with pytest.raises(NoLogitsError):
            ctx.logits(0)


@pytest.mark.parametrize("kind", [SLIDING, HYBRID])
def test_a_row_that_came_with_a_restore_goes_with_its_sequence(
    models: Models, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    with new_context(models[kind], 256, 2, n_batch=64) as ctx, Arena(1 << 20) as arena:
        ctx.decode(PREFIX)
        with ctx.snapshot(arena) as snapshot:
            snapshot.restore(ctx, 0)
        ctx.logits(0)
        unchecked(ctx, monkeypatch)
        with pytest.raises(ContextFullError):
            ctx.decode(text_tokens(250, seed=9))
        if ctx.position():
            assert identical(ctx.logits(0), np.asarray(snapshot.last_logits))
        else:
            with pytest.raises(NoLogitsError):
                ctx.logits(0)


def test_a_batch_that_fails_takes_every_sequence_back(ctx: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    ctx.decode(text_tokens(30, seed=1), seq=1)
    with monkeypatch.context() as patch:
        unchecked(ctx, patch)
        with pytest.raises(ContextFullError):
            ctx.decode_batch([(text_tokens(200, seed=seq), seq) for seq in range(3)])
    assert [ctx.position(seq) for seq in range(3)] == [40, 30, 0]
    assert ctx.cells_free() == 512 - 70
    assert close(all_logits(ctx, BRANCH), uninterrupted(ctx.model, PREFIX, BRANCH), 0.01)


def test_the_engine_s_code_is_told(ctx: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gap in the positions is refused by the engine itself, once the check here is taken away."""
    monkeypatch.setattr(ctx, "_check_start", lambda *_: 100)
    with pytest.raises(DecodeError) as caught:
        ctx.decode(BRANCH)
    assert caught.value.code == -1
    assert ctx.position() == 40


INTERRUPT = """
    import os, signal, sys, threading
    from helpers import *
    from swarmkv_ll import Model, context
    noticed = 0
    class Interrupts(list):  # what was noticed inside the engine, not after it
        def append(self, error):
            global noticed
            noticed += 1
            super().append(error)
    context._interrupts = Interrupts()
    model = Model(sys.argv[1])
    with new_context(model, 16384, 2, n_batch=16384, n_ubatch=512) as ctx:
        ctx.decode(text_tokens(20, seed=4), seq=1)
        ctx.decode(text_tokens(40))
        long = text_tokens(16000)
        for again in range(2):
            if not ctx.position():
                ctx.decode(text_tokens(40))
            try:
                threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
                ctx.decode(long)
                print("not interrupted")
            except KeyboardInterrupt:
                pass
        print(noticed)
        left = ctx.position()
        print(left, ctx.position(1), ctx.cells_free() + left * (sys.argv[2] != "mamba"))
        prefix = text_tokens(left)
        with new_context(model, 16384, 2, n_batch=16384, n_ubatch=512) as other:
            other.decode(text_tokens(20, seed=4), seq=1)
            if left:
                other.decode(prefix)
            for seq in (0, 1):
                print(identical(all_logits(ctx, BRANCH, seq), all_logits(other, BRANCH, seq)))
"""


@pytest.mark.parametrize(
    ("kind", "left", "free"), [(ATTENTION, 40, 16364), (SLIDING, 40, 16364), (RECURRENT, 0, 16384), (HYBRID, 0, 16364)]
)
def test_ctrl_c_stops_a_decode_and_takes_it_back(files: Files, kind: str, left: int, free: int) -> None:
    printed = run_ok(INTERRUPT, files[kind], kind)
    # The signal may come before the first batch, and then even recurrent memory is as it was.
    outcomes = [f"{left} 20 {free}"] if kind in (ATTENTION, SLIDING) else [f"{left} 20 {free}", f"40 20 {free}"]
    inside, state, *answers = printed.splitlines()
    # A recurrent memory of several sequences cannot be left half-way: the engine finishes its batch first.
    assert int(inside) in ((1, 2) if kind in (ATTENTION, SLIDING) else (0,))
    assert state in outcomes
    assert answers == ["True", "True"]


def test_ctrl_c_belongs_to_the_main_thread(files: Files) -> None:
    """Another thread's decode is not stopped by it, and nothing is left over for the next decode."""
    printed = run_ok(
        """
        import os, signal, sys, threading
        from helpers import *
        from swarmkv_ll import Model
        model = Model(sys.argv[1])
        ctx, done = new_context(model, 8192), []
        thread = threading.Thread(target=lambda: done.append(ctx.decode(text_tokens(6000))))
        thread.start()
        try:
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
            thread.join()
            while True:
                pass
        except KeyboardInterrupt:
            print("interrupted")
        thread.join()
        print(done, ctx.decode([1]))
        """,
        files[ATTENTION],
    )
    assert printed.splitlines() == ["interrupted", "[6000] 6001"]


# ── sequences ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("streams", [False, True], ids=["unified", "streams"])
def test_copy_sequence(models: Models, kind: str, streams: bool) -> None:
    with new_context(models[kind], 1536, 3, kv_unified=not streams) as ctx:
        ctx.decode(text_tokens(25, seed=5), seq=2)
        ctx.decode(PREFIX)
        ctx.copy_sequence(2, 1)
        ctx.remove(2)
        row = ctx.logits(0).copy()
        ctx.copy_sequence(0, 1)  # drops what 1 held
        assert [ctx.position(seq) for seq in range(3)] == [40, 40, 0]
        assert identical(ctx.logits(1), row)
        expected = uninterrupted(models[kind], PREFIX, BRANCH, 1536)
        for seq in (1, 0):
            # In a unified cache the branch's cells come to lie where 1's were, before the prefix's.
            answer = all_logits(ctx, BRANCH, seq)
            assert identical(answer, expected) if streams or kind == RECURRENT else close(answer, expected, 0.02)
            ctx.remove(1)  # and 0 keeps its own
        ctx.copy_sequence(2, 0)
        assert ctx.position(0) == 0
        with pytest.raises(NoLogitsError):
            ctx.logits(0)


def test_shared_cells_are_counted_once(ctx: Context) -> None:
    ctx.copy_sequence(0, 1)
    ctx.copy_sequence(1, 2)
    assert ctx.cells_free() == 512 - 40
    ctx.decode(BRANCH, seq=1)
    assert ctx.cells_free() == 512 - 49
    ctx.remove(0)
    assert ctx.cells_free() == 512 - 49
    ctx.remove(1)
    assert ctx.cells_free() == 512 - 40
    ctx.remove(2)
    assert ctx.cells_free() == 512


def test_copies_between_streams_take_cells_of_their_own(llama: Model) -> None:
    with new_context(llama, 768, 3, kv_unified=False) as ctx:
        ctx.decode(PREFIX)
        ctx.copy_sequence(0, 2)
        assert [ctx.cells_free(seq) for seq in range(3)] == [216, 256, 216]


def test_copy_of_a_part(ctx: Context) -> None:
    ctx.copy_sequence(0, 1, 25)
    assert ctx.position(1) == 25
    with pytest.raises(NoLogitsError):  # the row after token 40 says nothing about token 25
        ctx.logits(1)
    assert close(all_logits(ctx, BRANCH, 1), uninterrupted(ctx.model, PREFIX[:25], BRANCH), 0.01)
    ctx.copy_sequence(0, 0, 25)
    assert ctx.position(0) == 25
    ctx.copy_sequence(0, 2, 25)
    assert ctx.position(2) == 25
    ctx.copy_sequence(1, 2, 0)
    assert ctx.position(2) == 0
    for n_tokens in (-1, 35):
        with pytest.raises(InvalidArgumentError):
            ctx.copy_sequence(1, 2, n_tokens)
    for source, target in ((0, 3), (-1, 0), (3, 3)):
        with pytest.raises(InvalidArgumentError):
            ctx.copy_sequence(source, target)


@pytest.mark.parametrize("kind", [SLIDING, RECURRENT, HYBRID, "streams"])
def test_a_part_cannot_be_copied_everywhere(models: Models, kind: str) -> None:
    streams = kind == "streams"
    with new_context(models[ATTENTION if streams else kind], n_seq_max=2, kv_unified=not streams) as ctx:
        ctx.decode(PREFIX)
        for target in (1, 0):
            with pytest.raises(PartialRemovalError):
                ctx.copy_sequence(0, target, 25)
        assert [ctx.position(seq) for seq in range(2)] == [40, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_remove_and_clear_whole_sequences(models: Models, kind: str) -> None:
    with new_context(models[kind], n_seq_max=2) as ctx:
        for seq in (0, 1):
            ctx.decode(PREFIX, seq=seq)
        ctx.remove(0)
        assert [ctx.position(seq) for seq in range(2)] == [0, 40]
        ctx.remove(0)
        ctx.remove(1, 0, 40)
        assert ctx.position(1) == 0
        ctx.decode(PREFIX)
        ctx.clear()
        assert ctx.position(0) == 0
        assert ctx.cells_free() == 512
        with pytest.raises(NoLogitsError):
            ctx.logits(0)
        ctx.decode(PREFIX)
        assert identical(all_logits(ctx, BRANCH), uninterrupted(models[kind], PREFIX, BRANCH))


def test_remove_a_tail(ctx: Context) -> None:
    for begin in (40, 41, 100):
        ctx.remove(0, begin)
    assert ctx.position() == 40
    ctx.decode(text_tokens(30, seed=3))
    ctx.remove(0, 40)
    assert ctx.position() == 40
    assert ctx.cells_free() == 512 - 40
    with pytest.raises(NoLogitsError):
        ctx.logits(0)
    assert identical(all_logits(ctx, BRANCH), uninterrupted(ctx.model, PREFIX, BRANCH))
    with pytest.raises(InvalidArgumentError):
        ctx.remove(0, -1)
    for seq in (-1, 3):
        with pytest.raises(InvalidArgumentError):
            ctx.remove(seq)


def test_remove_a_middle_part(ctx: Context) -> None:
    """Later positions stay where they are; the engine allows it for plain attention."""
    ctx.remove(0, 10, 20)
    assert ctx.position() == 40
    assert ctx.cells_free() == 512 - 30
    ctx.remove(0, 0, 5)
    assert ctx.cells_free() == 512 - 25
    ctx.remove(0, 0, 1000)
    assert ctx.position() == 0
    assert ctx.cells_free() == 512


@pytest.mark.parametrize("kind", [RECURRENT, HYBRID])
def test_recurrent_memory_gives_up_nothing_or_all(models: Models, kind: str) -> None:
    with new_context(models[kind]) as ctx:
        ctx.decode(PREFIX)
        row = ctx.logits().copy()
        for part in ((39,), (0, 39), (5, 10)):
            with pytest.raises(PartialRemovalError, match="recurrent state of 40 tokens"):
                ctx.remove(0, *part)
        assert ctx.position() == 40
        assert identical(ctx.logits(0), row)
        assert identical(all_logits(ctx, BRANCH), uninterrupted(models[kind], PREFIX, BRANCH))


@pytest.mark.parametrize("n_prefix", [20, 33, 100, 300])
@pytest.mark.parametrize("n_tail", [1, 6, 31, 32, 33, 60, 100, 300])
@pytest.mark.parametrize("streams", [False, True], ids=["unified", "streams"])
def test_a_sliding_window_goes_back_rightly_or_not_at_all(
    models: Models, n_prefix: int, n_tail: int, streams: bool
) -> None:
    model, prefix = models[SLIDING], text_tokens(n_prefix)
    with new_context(model, 2048, 2, kv_unified=not streams) as ctx:
        ctx.decode(prefix)
        ctx.decode(text_tokens(n_tail, seed=7))
        for part in ((0, 5), (3, 7)):
            with pytest.raises(PartialRemovalError):
                ctx.remove(0, *part)
        try:
            ctx.remove(0, n_prefix)
        except PartialRemovalError:
            assert n_tail > SLIDING_WINDOW  # what the window itself cannot have lost has to be possible
            assert ctx.position() == n_prefix + n_tail
            prefix = np.concatenate([prefix, text_tokens(n_tail, seed=7)])
        else:
            assert ctx.position() == n_prefix
        assert close(all_logits(ctx, BRANCH), uninterrupted(model, prefix, BRANCH, 2048), 0.02)


@pytest.mark.parametrize("n_prefix", [20, 40, 100])
def test_a_sliding_window_goes_back_to_where_it_was_restored(models: Models, n_prefix: int) -> None:
    """A state leaves out what its last token no longer sees: one token before that can be gone back to, no more."""
    model, prefix = models[SLIDING], text_tokens(n_prefix)
    with new_context(model) as ctx, new_context(model) as other, Arena(1 << 20) as arena:
        ctx.decode(prefix)
        with ctx.snapshot(arena) as snapshot:
            snapshot.restore(other)
        for begin in (n_prefix, n_prefix, n_prefix - 1):
            other.remove(0, begin)
            assert identical(all_logits(other, BRANCH), uninterrupted(model, prefix[:begin], BRANCH))
        if n_prefix > SLIDING_WINDOW:
            first = n_prefix - SLIDING_WINDOW
            with pytest.raises(PartialRemovalError, match=f"no longer holds positions {first - 1} to {first - 1},"):
                other.remove(0, n_prefix - 2)


def test_copies_between_streams_count_the_cells_of_every_layer(models: Models) -> None:
    """Also where the windowed layers hold fewer than the others, or a part was removed."""
    with new_context(models[SLIDING], 512, 2, kv_unified=False) as ctx, Arena(1 << 20) as arena:
        ctx.decode(text_tokens(100))
        with ctx.snapshot(arena) as snapshot:
            snapshot.restore(ctx, 0)
        ctx.copy_sequence(0, 1)
        assert [ctx.cells_free(seq) for seq in (0, 1)] == [156, 156]
    with new_context(models[ATTENTION], 512, 2, kv_unified=False) as ctx:
        ctx.decode(text_tokens(100))
        ctx.remove(0, 10, 30)
        ctx.copy_sequence(0, 1)
        assert [ctx.cells_free(seq) for seq in (0, 1)] == [176, 176]
        ctx.decode(text_tokens(176), seq=1)
        with pytest.raises(ContextFullError):
            ctx.decode([1], seq=1)


# ── generate ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", KINDS)
def test_generate_is_argmax_and_decode_by_hand(models: Models, kind: str) -> None:
    with new_context(models[kind]) as ctx, new_context(models[kind]) as other:
        ctx.decode(PREFIX)
        other.decode(PREFIX)
        by_hand = []
        for _ in range(10):
            by_hand.append(int(np.argmax(other.logits())))
            other.decode([by_hand[-1]])
        assert list(ctx.generate(Sampler(), 10)) == by_hand
        assert ctx.position() == 49  # the last one is left to the caller
        assert list(ctx.generate(Sampler(), 0)) == []


def test_generate_stops_where_the_model_ends(models: Models) -> None:
    model = models["ends"]
    with new_context(model, 1024) as ctx:
        ctx.decode(PREFIX)
        tokens = list(ctx.generate(Sampler(), 500))
        assert 0 < len(tokens) < 500
        assert not any(model.is_end(token) for token in tokens)
        assert model.is_end(Sampler().sample(ctx.logits()))
        assert ctx.position() == 40 + len(tokens)


def test_generate_needs_logits(ctx: Context) -> None:
    with pytest.raises(NoLogitsError):
        next(ctx.generate(Sampler(), 1, seq=1))


# ── threads, guards, life ────────────────────────────────────────────────────────────────────────────


def test_one_context_from_several_threads(llama: Model) -> None:
    """Each thread works on its own sequence; calls wait for each other."""
    with new_context(llama, 8 * 256, 8, kv_unified=False) as ctx:

        def work(seq: int) -> None:
            for token in text_tokens(30, seed=seq):
                ctx.decode([token], seq=seq)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))
        for seq in range(8):
            with new_context(llama) as alone:
                for token in text_tokens(30, seed=seq):
                    alone.decode([token])
                assert identical(all_logits(ctx, BRANCH, seq), all_logits(alone, BRANCH))


@pytest.mark.parametrize("policy", ["context", "global"])
def test_two_contexts_at_once(files: Files, policy: Any) -> None:
    model = Model(files[ATTENTION], guard=LlamaGuard(policy))
    expected = [uninterrupted(model, text_tokens(300, seed=i), BRANCH) for i in range(2)]
    with new_context(model) as first, new_context(model) as second, ThreadPoolExecutor(2) as pool:

        def work(i: int) -> Any:
            ctx = (first, second)[i]
            answers = []
            for _ in range(5):
                ctx.clear()
                ctx.decode(text_tokens(300, seed=i))
                answers.append(all_logits(ctx, BRANCH))
            return answers

        for answers, truth in zip(pool.map(work, range(2)), expected, strict=True):
            assert all(identical(answer, truth) for answer in answers)

        # Who waits for whom: while one context is held, the other one is free or not.
        with first._lock:
            with first._lock:  # re-entrant
                waiting = pool.submit(second.decode, BRANCH)
            if policy == "context":
                waiting.result(timeout=30)
            else:
                assert not threading.Event().wait(0.2)
                assert not waiting.done()
        assert waiting.result(timeout=30) == 318
    model.close()


def test_the_default_guard() -> None:
    from swarmkv_ll import runtime

    assert LlamaGuard().policy == ("context" if runtime.gpu_device() is None else "global")
    with pytest.raises(InvalidArgumentError):
        LlamaGuard("none")  # type: ignore[arg-type]


def test_use_after_close(llama: Model) -> None:
    ctx = new_context(llama, n_seq_max=2)
    ctx.decode(PREFIX)
    generator = ctx.generate(Sampler(), 3)
    next(generator)
    ctx.close()
    ctx.close()
    assert ctx.closed
    assert "closed" in repr(ctx)
    uses: list[Callable[[], Any]] = [
        lambda: ctx.decode([1]),
        lambda: ctx.decode_batch([([1], 0)]),
        ctx.logits,
        lambda: ctx.logits(0),
        ctx.position,
        ctx.cells_free,
        ctx.clear,
        ctx.state_size,
        lambda: ctx.remove(0),
        lambda: ctx.copy_sequence(0, 1),
        lambda: next(generator),
        lambda: ctx.snapshot(Arena(4096)),
        lambda: Arena.for_branches(ctx, 1),
    ]
    for use in uses:
        with pytest.raises(ClosedError, match="context"):
            use()


def test_a_context_keeps_its_model_s_weights_alive(files: Files) -> None:
    model = Model(files[ATTENTION])
    expected = uninterrupted(model, PREFIX, BRANCH)
    ctx = new_context(model)
    weights = weakref.ref(model._handle)
    model.close()
    gc.collect()
    ctx.decode(PREFIX)
    assert identical(all_logits(ctx, BRANCH), expected)
    with pytest.raises(ClosedError, match="model"):
        new_context(model)
    assert weights() is not None
    ctx.close()
    gc.collect()
    assert weights() is None


def test_a_context_that_is_dropped_is_freed(llama: Model) -> None:
    ctx = new_context(llama)
    handle = weakref.ref(ctx._owned)
    ctx.decode(PREFIX)
    row = ctx.logits()
    del ctx
    gc.collect()
    assert handle() is not None  # the view's
    assert np.isfinite(row).all()
    del row
    gc.collect()
    assert handle() is None
