"""Faults in states as data, files and contexts of other bindings that were found by trying to break them."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import ATTENTION, KINDS, SLIDING, Files, Models, address, close, new_context, run_ok, text_tokens

from swarmkv_ll import Arena, Context, Rope, Snapshot, blob, skv
from swarmkv_ll.adapter import Adapter
from swarmkv_ll.errors import InvalidArgumentError, LiveViewsError, ModelLoadError, NoLogitsError

# ── the answers are right ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", [ATTENTION, SLIDING])
def test_a_delta_begins_where_the_sequence_has_a_token(models: Models, arena: Arena, kind: str) -> None:
    """Else it said that it begins elsewhere, and its file could not be read again."""
    with new_context(models[kind]) as ctx:
        ctx.decode(text_tokens(10), pos=20)
        with ctx.snapshot(arena) as later:
            for begin in (1, 19):
                with pytest.raises(InvalidArgumentError, match="position of the sequence"):
                    later.delta(begin)
            with later.delta(25) as tail, Snapshot.from_bytes(tail.to_bytes(), arena) as back:
                assert back.begin == 25
                with pytest.raises(InvalidArgumentError, match="position of the sequence"):
                    tail.delta(22)
                with later.slice(25) as base:
                    assert base.n_tokens == 25


def test_a_prefix_that_ends_in_a_hole(models: Models, arena: Arena) -> None:
    """It has the tokens up to the last one that it holds; else its file could not be read again."""
    tokens = text_tokens(40)
    with new_context(models[ATTENTION]) as ctx:
        ctx.decode(tokens)
        ctx.remove(0, 10, 20)
        with ctx.snapshot(arena, tokens=tokens) as snapshot:
            with pytest.raises(InvalidArgumentError, match="position of the sequence"):
                snapshot.delta(15)
            with snapshot.slice(15) as cut, Snapshot.from_bytes(cut.to_bytes(), arena) as back:
                assert back.n_tokens == 10
                np.testing.assert_array_equal(back.tokens, tokens[:10])
            assert snapshot.restore(ctx, n_tokens=15) == ctx.position() == 10


def test_logits_of_a_borrowed_context_in_which_its_owner_has_decoded(models: Models, arena: Arena) -> None:
    """A row that came with a restore, or from a decode of ours, is not what a snapshot after the owner's decode has."""
    model = models[ATTENTION]
    with (
        new_context(model, n_seq_max=2) as owner,
        Context.adopt(address(owner), owner=owner, model_path=model.path) as ctx,
    ):
        ctx.decode(text_tokens(10))
        row = ctx.logits(0).copy()
        with ctx.snapshot(arena) as snapshot:
            assert close(snapshot.last_logits, row)  # type: ignore[arg-type]
            owner.decode(text_tokens(20, 1))
            with ctx.snapshot(arena) as after:
                assert after.last_logits is None
            snapshot.restore(ctx)
            np.testing.assert_array_equal(ctx.logits(0), row)
            owner.decode([1], seq=1)
            with pytest.raises(NoLogitsError):
                ctx.logits(0)
            snapshot.restore(ctx)
            owner.decode(text_tokens(20, 2))
            with ctx.snapshot(arena) as after:
                assert after.last_logits is None
            ctx.decode([5])
            assert ctx.logits(0).shape == (model.n_vocab,)


def test_a_sequence_named_by_a_truth_value(models: Models, arena: Arena) -> None:
    with new_context(models[ATTENTION], n_seq_max=2) as ctx:
        ctx.decode(text_tokens(8), seq=1)
        with (
            ctx.snapshot(arena, seq=True, tokens=text_tokens(8)) as one,
            Snapshot.from_bytes(one.to_bytes(), arena) as back,
        ):
            assert back.sequences == {1: 8}
        with (
            ctx.snapshot(arena, seq=None, tokens={True: text_tokens(8)}) as whole,
            Snapshot.from_bytes(whole.to_bytes(), arena) as back,
        ):
            assert list(back.tokens) == [1]  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [*KINDS, "hybrid-swa", "mla", "mrope"])
def test_contexts_of_every_memory_are_adopted(models: Models, arena: Arena, kind: str) -> None:
    model = models[kind]
    with new_context(model) as owner, Context.adopt(address(owner), owner=owner, model_path=model.path) as ctx:
        owner.decode(text_tokens(40))
        with ctx.snapshot(arena) as snapshot:
            assert snapshot.restore(ctx) == 40


# ── nothing is lost ──────────────────────────────────────────────────────────────────────────────────


def test_ctrl_c_while_a_snapshot_is_read_does_not_keep_its_memory(files: Files) -> None:
    """Who was interrupted before it could say that it is done was counted for ever."""
    printed = run_ok(
        """
        import gc, random, signal, sys
        from helpers import *
        from swarmkv_ll import Arena, Model
        rng, armed = random.Random(1), False
        def interrupt(*_):
            if armed:
                raise KeyboardInterrupt
        signal.signal(signal.SIGALRM, interrupt)
        ctx = new_context(Model(sys.argv[1]))
        ctx.decode(text_tokens(20))
        arena = Arena.for_branches(ctx, 3)
        interrupted = 0
        for _ in range(60):
            snapshot = ctx.snapshot(arena)
            for _ in range(20):
                try:
                    signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-6, 8e-5))
                    armed = True
                    for _ in range(10):
                        snapshot.can_restore(ctx)
                        snapshot.share().release()
                    armed = False
                except KeyboardInterrupt:
                    armed = False
                    interrupted += 1
                signal.setitimer(signal.ITIMER_REAL, 0)
            gc.collect()
            snapshot.release()
            assert arena.stats().n_leases == 0
        arena.close()
        print(interrupted)
        """,
        files["llama"],
    )
    assert int(printed) > 300


def test_a_dropped_share_does_not_keep_the_bytes(models: Models, arena: Arena) -> None:
    with new_context(models[ATTENTION]) as ctx:
        ctx.decode(text_tokens(20))
        snapshot = ctx.snapshot(arena)
        snapshot.share()
        gc.collect()
        view = snapshot.array
        with pytest.raises(LiveViewsError):
            snapshot.release()
        del view
        snapshot.release()
        assert arena.stats().n_leases == 0


# ── what is no file, or no argument ──────────────────────────────────────────────────────────────────


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[Path]:
    def stop(*_: object) -> None:
        raise AssertionError("it waits for ever")

    os.mkfifo(tmp_path / "pipe")
    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(20)
    yield tmp_path / "pipe"
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def test_a_pipe_is_not_waited_for(models: Models, arena: Arena, pipe: Path) -> None:
    with new_context(models[ATTENTION]) as ctx:
        ctx.decode(text_tokens(8))
        with ctx.snapshot(arena) as snapshot:
            for call in (
                lambda: Snapshot.import_llama(pipe, ctx, arena),
                lambda: Snapshot.load(pipe, arena),
                lambda: snapshot.save(pipe),
                lambda: snapshot.export_llama(pipe),
            ):
                with pytest.raises(OSError, match="Not a regular file"):
                    call()
        with pytest.raises(ModelLoadError, match="Not a regular file"):
            Adapter(models[ATTENTION], pipe)


@pytest.mark.parametrize("name", ["a\0b", "\ud800"])
def test_what_no_file_can_be_called(models: Models, arena: Arena, name: str) -> None:
    with new_context(models[ATTENTION]) as ctx:
        ctx.decode(text_tokens(8))
        with ctx.snapshot(arena) as snapshot:
            for call in (
                lambda: Snapshot.import_llama(name, ctx, arena),
                lambda: Snapshot.load(name, arena),
                lambda: skv.peek(name),
                lambda: snapshot.save(name),
                lambda: snapshot.export_llama(name),
            ):
                with pytest.raises(InvalidArgumentError, match="cannot be a file name"):
                    call()
        with pytest.raises(ModelLoadError, match="cannot be a file name"):
            Adapter(models[ATTENTION], name)


def test_what_is_no_argument(models: Models, files: Files, arena: Arena) -> None:
    model = models[ATTENTION]
    wrong: Any
    with new_context(model) as ctx:
        for wrong in ([1], ["ab"], "ab", 5, None, [(Adapter(model, files["lora"]), "x")]):
            with pytest.raises(InvalidArgumentError, match="adapter"):
                ctx.set_adapters(wrong)
        with pytest.raises(InvalidArgumentError, match="expected Model"):
            Adapter(None, files["lora"])  # type: ignore[arg-type]
        ctx.decode(text_tokens(8))
        given: dict[str, Any]
        for given in ({"rope": 5}, {"adapters": 5}, {"adapters": {files["lora"]: float("nan")}}):
            with pytest.raises(InvalidArgumentError):
                Context.adopt(address(ctx), owner=None, model_path=model.path, **given)
        Context.adopt(address(ctx), owner=None, model_path=model.path, rope=Rope(), adapters={}).close()
        with ctx.snapshot(arena) as snapshot:
            for wrong in (None, 5, "x"):
                with pytest.raises(InvalidArgumentError, match="write"):
                    snapshot.write_to(wrong)
                with pytest.raises(InvalidArgumentError, match="read"):
                    Snapshot.read_from(wrong, arena)
                if wrong is not None:
                    with pytest.raises(InvalidArgumentError, match="Parts"):
                        blob.parse(snapshot.to_bytes(), wrong)
    assert arena.stats().n_leases == 0


# ── beside llama-cpp-python ──────────────────────────────────────────────────────────────────────────


def test_one_cache_at_a_time(files: Files) -> None:
    printed = run_ok(
        """
        import sys
        from swarmkv_ll import Arena
        from swarmkv_ll.errors import InvalidArgumentError
        try:
            from swarmkv_ll.interop import SnapshotCache
        except ImportError:
            print("none")
            sys.exit()
        from llama_cpp import Llama
        llm, arena = Llama(sys.argv[1], n_ctx=512, n_threads=1, verbose=False), Arena(8 << 20, pin=False)
        first, second = SnapshotCache(arena).attach(llm), SnapshotCache(arena)
        try:
            second.attach(llm)
        except InvalidArgumentError as error:
            print(error)
        llm.create_completion("hello", max_tokens=2)
        first.detach()
        second.attach(llm)
        llm.create_completion("hello", max_tokens=2)
        second.detach()
        arena.close()
        for wrong in (None, 5):
            try:
                SnapshotCache(wrong)
            except InvalidArgumentError as error:
                print(error)
        """,
        files["llama"],
    )
    assert printed == "none" or printed.splitlines() == [
        "another SnapshotCache is attached to this Llama: detach() that first",
        "expected Arena, got NoneType",
        "expected Arena, got int",
    ]
