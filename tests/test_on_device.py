"""Snapshots that stay where the KV cache lies: what they give back, and what has to be refused before the engine sees it.

Here that is the CPU's memory, where the engine does the same; test_gpu.py has them on a device.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from helpers import (
    ATTENTION,
    BRANCH,
    KINDS,
    RECURRENT,
    SLIDING,
    TOKENS,
    Files,
    Models,
    address,
    all_logits,
    identical,
    new_context,
    run_ok,
    run_python,
    text_tokens,
    uninterrupted,
)

from swarmkv_ll import Arena, Context, DeviceSnapshot, Model, Snapshot, on_device, runtime, state
from swarmkv_ll.adapter import Adapter
from swarmkv_ll.errors import (
    ClosedError,
    HostMemoryError,
    IncompatibleSnapshotError,
    InvalidArgumentError,
    NoLogitsError,
    NotOnDeviceError,
    SnapshotError,
)

PREFIX = text_tokens(40)


@pytest.fixture
def ctx(llama: Model) -> Iterator[Context]:
    """Three sequences; 0 holds the prefix."""
    with new_context(llama, n_seq_max=3) as ctx:
        ctx.decode(PREFIX)
        yield ctx


# ── what it gives back ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n_seq_max": 3},
        {"n_seq_max": 3, "kv_unified": False},
        {"n_seq_max": 3, "flash_attn": False},
        {"n_seq_max": 3, "type_k": "f32", "type_v": "f32"},
        {"n_seq_max": 3, "swa_full": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", [*KINDS, "uneven", "mrope", "mla", "hybrid-swa", "shortconv"])
def test_restores_are_bit_identical(models: Models, kind: str, options: dict[str, Any]) -> None:
    """Into its own sequence and another, again and again, whatever the context did meanwhile."""
    with new_context(models[kind], **options) as ctx:
        last = ctx.n_seq_max - 1
        ctx.decode(TOKENS)
        with ctx.snapshot(where="device", tokens=TOKENS) as snapshot:
            truth = all_logits(ctx, BRANCH)
            for seq in (0, last, 0):
                before = ctx.kv_memory
                assert snapshot.restore(ctx, seq) == ctx.position(seq) == len(TOKENS)
                assert ctx.kv_memory == before
                assert identical(all_logits(ctx, BRANCH, seq), truth)
            ctx.clear()
            ctx.decode(text_tokens(70, seed=3), seq=last)
            assert snapshot.restore(ctx) == len(TOKENS)
            assert snapshot.valid
            if not ctx.kv_unified or not last:  # else its cells lie elsewhere
                assert identical(all_logits(ctx, BRANCH), truth)


def test_carries_what_it_says(ctx: Context, arena: Arena) -> None:
    with ctx.snapshot(where="device", tokens=PREFIX) as snapshot, ctx.snapshot(arena) as host:
        assert isinstance(snapshot, DeviceSnapshot)
        assert (snapshot.ctx, snapshot.seq, snapshot.n_tokens) == (ctx, 0, 40)
        assert snapshot.n_bytes == 4 * 2 * 40 * 128 < host.n_bytes  # layers, K and V, cells, bytes a row
        assert snapshot.tokens is not None
        assert np.array_equal(snapshot.tokens, PREFIX)
        assert snapshot.last_logits is not None
        assert identical(snapshot.last_logits, ctx.logits())
        assert not snapshot.last_logits.flags.writeable
        assert snapshot.identity == host.identity
        assert "sequence 0, 40 tokens, 40,960 bytes" in repr(snapshot)
        ctx.decode(BRANCH)
        snapshot.restore(ctx, 2)
        assert identical(ctx.logits(2), snapshot.last_logits)
        ctx.remove(2, 39)
        with ctx.snapshot(seq=2, where="device") as shorter:
            assert (shorter.seq, shorter.n_tokens, shorter.tokens, shorter.last_logits) == (2, 39, None, None)
            shorter.restore(ctx)
            with pytest.raises(NoLogitsError):
                ctx.logits(2)


def test_contexts_tell_where_the_cache_lies(models: Models) -> None:
    for kind in (ATTENTION, SLIDING):  # one cache of four layers, and two of two
        with new_context(models[kind]) as ctx:
            assert ctx.kv_memory == {"CPU": 512 * 4 * 2 * 128}
    with new_context(models[RECURRENT]) as ctx:
        ctx.decode(PREFIX)
        assert ctx.kv_memory["CPU"] == pytest.approx(ctx.snapshot(where="device").n_bytes, abs=10_500)


def test_tells_the_runs_it_went_into(llama: Model, ctx: Context) -> None:
    """Among other cells it is restored in pieces, unlike those it was taken in; also with V transposed, cell by cell."""
    assert ctx.snapshot(where="device").restore(ctx, 1).runs == 1
    for options in ({}, {"flash_attn": False}):
        truth = uninterrupted(llama, PREFIX, BRANCH, **options)
        with new_context(llama, 128, n_seq_max=2, **options) as scattered:
            scattered.decode(PREFIX)
            snapshot = scattered.snapshot(where="device")
            scattered.clear()
            for token in range(60):
                scattered.decode([token], seq=0)
                scattered.decode([token], seq=1)
            assert snapshot.restore(scattered) == 40
            assert scattered._cells is not None
            assert len(scattered._cells.runs(0)) > 1
            assert np.abs(all_logits(scattered, BRANCH) - truth).max() < 0.05
            again = scattered.snapshot(where="device")  # taken in pieces, and of another length
            scattered.clear()
            assert again.restore(scattered, 1).runs == 1
            assert scattered.position(1) == 49


HISTORY = """
rng = np.random.default_rng(7)
pairs, restored, overwritten, padding = {}, 0, 0, 0
with Model(path) as model, Arena(4 << 20) as arena, new_context(model, 256, 3, **options) as ctx:
    for _ in range(n_steps):
        seq, what = int(rng.integers(3)), rng.choice(["decode", "remove", "copy", "take", "restore", "clear"],
                                                     p=[0.35, 0.1, 0.05, 0.25, 0.24, 0.01])
        n = ctx.position(seq)
        if what == "decode" and n < 60:
            ctx.decode(rng.integers(0, 256, int(rng.integers(1, 20))), seq=seq)
        elif what == "remove" and n > 1:
            ctx.remove(seq, int(rng.integers(1, n)))
        elif what == "copy" and n:
            ctx.copy_sequence(seq, (seq + 1) % 3)
        elif what == "clear":
            ctx.clear()
        elif what == "take" and n:
            host = ctx.snapshot(arena, seq)
            try:
                device = ctx.snapshot(seq=seq, where="device")
            except SnapshotError as error:
                assert "in other pieces" in str(error) and ctx.v_transposed
                host.release()
                padding += 1
                continue
            old = pairs.pop(seq, None)
            if old:
                old[0].release()
                assert not old[1].valid and not old[1].can_restore(ctx)
                overwritten += 1
            pairs[seq] = host, device
        elif what == "restore" and seq in pairs:
            host, device = pairs[seq]
            target = int(rng.integers(3))
            if not device.can_restore(ctx, target):
                continue
            assert device.restore(ctx, target) == host.n_tokens
            with ctx.snapshot(arena, target) as snapshot:
                found = snapshot.to_bytes()
            ctx.remove(target)
            host.restore(ctx, target)
            with ctx.snapshot(arena, target) as snapshot:
                assert snapshot.to_bytes() == found
            restored += 1
    for host, device in pairs.values():
        host.release()
assert restored > 30 and overwritten > 30, (restored, overwritten)
print(padding > 0)
"""
"""Of the model at `path`, with `options`; says at its end whether any device snapshot was refused for want of padding."""


@pytest.mark.parametrize(
    "options", [{}, {"kv_unified": False}, {"flash_attn": False}, {"type_k": "f32", "type_v": "bf16"}], ids=str
)
def test_as_a_host_snapshot_would_in_any_order_of_calls(files: Files, options: dict[str, Any]) -> None:
    """Snapshots of both kinds, taken and restored at the same places of random histories, leave the same bytes."""
    before = """
        import json, sys
        from helpers import *
        from swarmkv_ll import Arena, Model
        from swarmkv_ll.errors import SnapshotError
        path, options, n_steps = sys.argv[1], json.loads(sys.argv[2]), 600
    """
    printed = run_ok(textwrap.dedent(before) + HISTORY, files["llama"], json.dumps(options))
    assert printed == str("flash_attn" in options)


# ── what ends it ─────────────────────────────────────────────────────────────────────────────────────


def test_the_next_one_of_the_sequence_ends_it(ctx: Context) -> None:
    first = ctx.snapshot(where="device")
    ctx.copy_sequence(0, 1)
    other = ctx.snapshot(seq=1, where="device")
    assert first.valid
    assert other.valid
    second = ctx.snapshot(where="device")  # as many bytes: the engine would take them for the first's
    assert (first.valid, second.valid, other.valid) == (False, True, True)
    assert "overwritten" in repr(first)
    assert str(first.can_restore(ctx)) == (
        "no: device snapshot of sequence 0 should be the last, number 2, is number 1, overwritten"
    )
    before = ctx.position()
    with pytest.raises(IncompatibleSnapshotError, match="number 2, is number 1, overwritten"):
        first.restore(ctx)
    assert ctx.position() == before
    assert second.restore(ctx) == other.restore(ctx) == 40


def test_a_refused_one_leaves_the_earlier_valid(ctx: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    first = ctx.snapshot(where="device")
    with pytest.raises(InvalidArgumentError, match="39 tokens were given for positions 0 to 39"):
        ctx.snapshot(where="device", tokens=PREFIX[1:])
    ctx.decode(BRANCH)
    monkeypatch.setattr(on_device, "available_memory", lambda: 1000)
    with pytest.raises(HostMemoryError) as caught:
        ctx.snapshot(where="device")
    assert caught.value.available == 1000
    assert caught.value.required > 4 * 2 * 49 * 128
    assert first.restore(ctx) == 40


def test_ctrl_c_while_one_is_taken(ctx: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """The earlier one may be overwritten or not, and is not used any more."""
    first = ctx.snapshot(where="device")
    truth = all_logits(ctx, BRANCH)
    ctx.remove(0, 40)

    @contextmanager
    def stopped(*_: object) -> Iterator[None]:
        yield
        raise KeyboardInterrupt

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    for place, name, interrupt in ((runtime, "engine_log", stopped), (DeviceSnapshot, "__init__", stop)):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, interrupt)
            with pytest.raises(KeyboardInterrupt):
                ctx.snapshot(where="device")
        assert not first.valid
        assert "overwritten" in str(first.can_restore(ctx))
    again = ctx.snapshot(where="device")
    ctx.clear()
    assert again.restore(ctx) == 40
    assert identical(all_logits(ctx, BRANCH), truth)


def test_an_engine_that_refuses_leaves_the_sequence_empty(ctx: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = ctx.snapshot(where="device")
    ctx.copy_sequence(0, 1)

    def refuse(*_: object) -> None:
        raise SnapshotError("no")

    monkeypatch.setattr(state, "put", refuse)
    with pytest.raises(SnapshotError, match="no"):
        snapshot.restore(ctx, 0)
    assert (ctx.position(0), ctx.position(1)) == (0, 40)
    monkeypatch.undo()
    assert snapshot.restore(ctx, 0) == 40


def test_released_and_closed(llama: Model, ctx: Context) -> None:
    with ctx.snapshot(where="device") as snapshot:
        assert not snapshot.released
    assert snapshot.released
    assert not snapshot.valid
    assert "released" in repr(snapshot)
    for call in (snapshot.release, lambda: snapshot.restore(ctx), lambda: snapshot.can_restore(ctx)):
        with pytest.raises(ClosedError):
            call()
    closed = new_context(llama)
    closed.decode(PREFIX)
    snapshot = closed.snapshot(where="device")
    closed.close()
    assert not snapshot.valid
    for call in (lambda: snapshot.restore(closed), lambda: snapshot.can_restore(closed)):
        with pytest.raises(ClosedError):
            call()


# ── what is refused ──────────────────────────────────────────────────────────────────────────────────


def test_another_context(llama: Model, ctx: Context) -> None:
    snapshot = ctx.snapshot(where="device")
    with new_context(llama, n_seq_max=3) as other:
        other.decode(BRANCH)
        found = snapshot.can_restore(other)  # that restore asks it, is tested where the engine may abort
        assert [reason.field for reason in found.reasons] == ["context"]
        assert "context should be the one it was taken of, is another" in str(found)


def test_arguments(ctx: Context, arena: Arena) -> None:
    any_ctx: Any = ctx
    for call, text in (
        (lambda: any_ctx.snapshot(arena, where="disk"), '"host" or "device"'),
        (lambda: any_ctx.snapshot(arena, where="device"), "needs no arena"),
        (any_ctx.snapshot, "needs an arena"),
        (lambda: any_ctx.snapshot(seq=None, where="device"), "a whole context"),
        (lambda: any_ctx.snapshot(seq=3, where="device"), "sequence should be 0 to 2"),
        (lambda: any_ctx.snapshot(seq=-1, where="device"), "sequence should be 0 to 2"),
    ):
        with pytest.raises(InvalidArgumentError, match=text):
            call()
    with pytest.raises(SnapshotError, match="sequence 1 is empty"):
        ctx.snapshot(seq=1, where="device")
    snapshot = ctx.snapshot(where="device")
    for seq in (3, -1, 2**40):
        assert str(snapshot.can_restore(ctx, seq)) == f"no: seq should be 0 to 2, is {seq}"
    for call in (snapshot.restore, snapshot.can_restore):
        with pytest.raises(InvalidArgumentError, match="expected Context, got int"):
            call(any_ctx.position())
        with pytest.raises(TypeError):
            call(any_ctx, "0")
    assert arena.stats().n_leases == 0
    assert ctx.position() == 40


def test_what_needs_the_bytes_is_refused_by_name(ctx: Context) -> None:
    snapshot: Any = ctx.snapshot(where="device")
    names = (
        {name for name in dir(Snapshot) if not name.startswith("_")} - set(dir(DeviceSnapshot)) - set(vars(snapshot))
    )
    assert {"fork", "share", "save", "slice", "array", "blob", "to_bytes", "export_llama", "whole"} <= names
    for name in names:
        with pytest.raises(NotOnDeviceError, match=f"has no {name}: its bytes stay there"):
            getattr(snapshot, name)
        assert not hasattr(snapshot, name)
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        snapshot.nonsense  # noqa: B018


@pytest.mark.parametrize("options", [{"type_k": "q8_0"}, {"type_v": "q4_0"}], ids=str)
def test_quantized_types(models: Models, options: dict[str, Any]) -> None:
    """The engine takes their blocks for values: what it gives back afterwards is something else, without a word."""
    with new_context(models["head64"], **options) as ctx:
        ctx.decode(TOKENS)
        with pytest.raises(InvalidArgumentError, match=f"of type {next(iter(options.values()))} on the device"):
            ctx.snapshot(where="device")
    with new_context(models[RECURRENT], **options) as ctx:  # which has no such cache
        ctx.decode(TOKENS)
        assert ctx.snapshot(where="device").restore(ctx) == len(TOKENS)


def test_adapters_that_have_changed(files: Files) -> None:
    with Model(files["llama"]) as model, new_context(model) as ctx:
        adapter = Adapter(model, files["lora"])
        ctx.decode(PREFIX)
        snapshot = ctx.snapshot(where="device")
        ctx.clear()
        ctx.set_adapters([(adapter, 1.0)])
        assert not snapshot.can_restore(ctx)
        with pytest.raises(IncompatibleSnapshotError, match="adapters should be none"):
            snapshot.restore(ctx)
        ctx.set_adapters([])
        assert snapshot.restore(ctx) == 40


def test_no_free_cells(llama: Model) -> None:
    with new_context(llama, 256, n_seq_max=2) as ctx:
        ctx.decode(TOKENS)
        snapshot = ctx.snapshot(where="device")
        ctx.clear()
        ctx.decode(text_tokens(200), seq=1)
        assert str(snapshot.can_restore(ctx)) == "no: free KV cells should be at least 96, is 56"
        with pytest.raises(IncompatibleSnapshotError, match="free KV cells"):
            snapshot.restore(ctx)
        assert (ctx.position(0), ctx.position(1)) == (0, 200)
        assert snapshot.restore(ctx, 1) == 96  # in the place of those


def test_a_borrowed_context(models: Models) -> None:
    model = models["llama"]
    with new_context(model) as owner:
        owner.decode(PREFIX)
        with Context.adopt(address(owner), owner=owner, model_path=model.path) as borrowed:
            with pytest.raises(InvalidArgumentError, match="borrowed"):
                borrowed.snapshot(where="device")
            assert borrowed.kv_memory == {}


def test_windows_are_as_wide_as_before(models: Models) -> None:
    """Past the window, where cells have been passed by, and beside another sequence."""
    with new_context(models[SLIDING], n_seq_max=2, swa_full=False) as ctx:
        ctx.decode(text_tokens(200))
        snapshot = ctx.snapshot(where="device")
        truth = all_logits(ctx, BRANCH)
        ctx.decode(text_tokens(50), seq=1)
        snapshot.restore(ctx)
        assert np.abs(all_logits(ctx, BRANCH) - truth).max() < 0.05
        assert snapshot.restore(ctx, 1) == 200


def test_a_window_full_of_shared_cells(models: Models, arena: Arena) -> None:
    """The engine alone knows that: it refuses, of host and device alike, and nothing but the target is lost."""
    with new_context(models[SLIDING], 1024, n_seq_max=3, swa_full=False) as ctx:
        ctx.decode(text_tokens(100))
        with ctx.snapshot(arena) as host, ctx.snapshot(where="device") as device:
            ctx.clear()
            ctx.decode(text_tokens(240))
            ctx.copy_sequence(0, 1)
            for snapshot in (host, device):
                with pytest.raises(SnapshotError, match="the engine read 0 of"):
                    snapshot.restore(ctx, 2)
                assert [ctx.position(seq) for seq in range(3)] == [240, 240, 0]
            ctx.remove(1)  # now those that have been passed by are free
            for snapshot in (host, device):
                assert snapshot.restore(ctx, 2) == 100


# ── what would abort the process ─────────────────────────────────────────────────────────────────────

BEFORE = """
import os, sys
from helpers import *
from swarmkv_ll import Arena, Model, on_device
from swarmkv_ll.errors import IncompatibleSnapshotError, SnapshotError
from swarmkv_ll.ffi import C, ffi
unchecked = sys.argv[2] == "unchecked"

def put(ctx, snapshot):
    if not unchecked:
        try:
            snapshot.restore(ctx)
        except IncompatibleSnapshotError as error:
            print("refused", error)
        return
    meta = snapshot._meta
    C.llama_state_seq_set_data_ext(ctx._ptr, ffi.from_buffer("uint8_t[]", meta), len(meta), 0, 2)
"""

ABORTS = {
    "another size": """
        with Model(sys.argv[1]) as model, new_context(model) as ctx:
            ctx.decode(TOKENS)
            first = ctx.snapshot(where="device")
            ctx.decode(BRANCH)
            ctx.snapshot(where="device")
            put(ctx, first)
            """,
    "another context": """
        with Model(sys.argv[1]) as model, new_context(model) as ctx, new_context(model) as other:
            ctx.decode(TOKENS)
            put(other, ctx.snapshot(where="device"))
            """,
    "more padding": """
        with Model(sys.argv[1]) as model, new_context(model, n_seq_max=2, flash_attn=False) as ctx:
            ctx.decode(TOKENS[:30])
            ctx.snapshot(where="device")
            ctx.clear()
            for token in TOKENS[:30]:
                ctx.decode([token], seq=0)
                ctx.decode([token], seq=1)
            if unchecked:
                on_device._unpadded = lambda ctx: True
            try:
                ctx.snapshot(where="device")
            except SnapshotError as error:
                print("refused", error)
            ctx.decode([1])
            ctx.snapshot(where="device").restore(ctx)  # another length is another allocation
            """,
}


@pytest.mark.parametrize("case", ABORTS)
def test_what_aborts_in_the_engine_is_refused(files: Files, case: str) -> None:
    code = BEFORE + textwrap.dedent(ABORTS[case])
    done = run_python(code, files["llama"], "checked")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("refused ")
    # The control: without the check it aborts. Should it not any more, the check can go.
    aborted = run_python(code, files["llama"], "unchecked", env={"GGML_NO_BACKTRACE": "1"})
    assert aborted.returncode == -6, (aborted.returncode, aborted.stdout, aborted.stderr)
