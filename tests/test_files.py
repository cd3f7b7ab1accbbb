"""Snapshots in files and streams: our own, and llama.cpp's, which its own functions write and read."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import skv_reader
from helpers import (
    ATTENTION,
    BRANCH,
    HYBRID,
    KINDS,
    TOKENS,
    Files,
    Models,
    all_logits,
    identical,
    new_context,
    run_ok,
    taken,
    uninterrupted,
)

from swarmkv_ll import Arena, Context, Snapshot
from swarmkv_ll.errors import (
    ArenaExhaustedError,
    EndOfStreamError,
    IncompatibleSnapshotError,
    InvalidArgumentError,
    SnapshotFileError,
)
from swarmkv_ll.ffi import LIB_DIR, ffi


@pytest.fixture
def arena(arena: Arena) -> Iterator[Arena]:
    yield arena
    assert arena.stats().n_leases == 0


# ── our own ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("flash_attn", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_saved_here_resumes_in_another_process(files: Files, tmp_path: Path, kind: str, flash_attn: bool) -> None:
    code = """
        import sys
        import numpy as np
        from helpers import BRANCH, all_logits, new_context, text_tokens, uninterrupted
        from swarmkv_ll import Arena, Model, Snapshot
        step, gguf, file, flash_attn = sys.argv[1:]
        tokens, options = text_tokens(96), {"flash_attn": flash_attn == "True"}
        with Model(gguf) as model, Arena(4 << 20) as arena, new_context(model, **options) as ctx:
            if step == "save":
                ctx.decode(tokens)
                with ctx.snapshot(arena, tokens=tokens) as snapshot:
                    snapshot.save(file)
                    print(snapshot.last_logits.tobytes().hex())
                    print(all_logits(ctx, BRANCH).tobytes().hex())
            else:
                with Snapshot.load(file, arena) as snapshot:
                    assert np.array_equal(snapshot.tokens, tokens)
                    assert snapshot.restore(ctx) == 96
                    print(ctx.logits(0).tobytes().hex())
                    print(all_logits(ctx, BRANCH).tobytes().hex())
        """
    path = tmp_path / "state.skv"
    saved, loaded = (run_ok(code, step, files[kind], path, flash_attn) for step in ("save", "load"))
    assert saved == loaded
    assert len(saved) > 10_000


def test_every_way_in_and_out_gives_the_same_bytes(models: Models, arena: Arena, tmp_path: Path) -> None:
    path = tmp_path / "state.skv"
    with taken(models[ATTENTION], arena) as snapshot:
        snapshot.save(path)
        data = snapshot.to_bytes()
        assert path.read_bytes() == data
        ours, theirs = socket.socketpair()
        with ours, theirs, ours.makefile("wb") as out, theirs.makefile("rb") as into:

            def send() -> None:
                for _ in range(2):
                    assert snapshot.write_to(out) == len(data)
                out.flush()
                ours.shutdown(socket.SHUT_WR)

            with Arena(8 << 20) as far:
                sender = threading.Thread(target=send)
                sender.start()
                received = [Snapshot.read_from(into, far) for _ in range(2)]
                sender.join()
                with pytest.raises(EndOfStreamError):
                    Snapshot.read_from(into, far)
                received += [Snapshot.from_bytes(data, far), Snapshot.load(path, far)]
                for one in received:
                    assert one.array.tobytes() == snapshot.array.tobytes()
                    assert np.array_equal(one.tokens, snapshot.tokens)
                    assert identical(one.last_logits, snapshot.last_logits)
                    assert one.identity.to_meta() == snapshot.identity.to_meta()
                    assert one.to_bytes() == data
                    one.release()
        with pytest.raises(SnapshotFileError, match="7 bytes more"):
            Snapshot.from_bytes(data + bytes(7), arena)


def test_the_reader_that_was_written_from_the_page_reads_it(models: Models, arena: Arena, tmp_path: Path) -> None:
    path = tmp_path / "state.skv"
    with taken(models[ATTENTION], arena) as snapshot:
        snapshot.save(path)
        meta, arrays, state = skv_reader.read(path)
        assert bytes(state) == snapshot.array.tobytes()
        assert np.array_equal(arrays["tokens.0"], TOKENS)
        assert identical(arrays["logits.0"], snapshot.last_logits)
        assert meta["identity"]["model"]["fingerprint"] == models[ATTENTION].fingerprint
        assert meta["sequences"] == {"0": 96}


def test_a_delta_and_a_whole_context_travel(models: Models, arena: Arena, tmp_path: Path) -> None:
    model, path = models[HYBRID], tmp_path / "whole.skv"
    with new_context(model, 512, 3) as ctx:
        ctx.decode(TOKENS, seq=0)
        ctx.decode(TOKENS[:40], seq=2)
        with ctx.snapshot(arena, seq=None, tokens={2: TOKENS[:40]}) as whole:
            whole.save(path)
            with Snapshot.load(path, arena) as again, new_context(model, 512, 3) as second:
                assert again.sequences == {0: 96, 2: 40}
                assert again.restore(second) == 136
                assert identical(second.logits(2), whole.last_logits[2])
    with taken(models[ATTENTION], arena) as snapshot, snapshot.delta(64) as new, snapshot.slice(64) as base:
        far = Snapshot.from_bytes(new.to_bytes(), arena)
        with far, base.append(far) as joined:
            assert far.begin == 64
            assert joined.array.tobytes() == snapshot.array.tobytes()


def test_a_full_arena_and_a_missing_file_take_nothing(models: Models, arena: Arena, tmp_path: Path) -> None:
    with taken(models[ATTENTION], arena) as snapshot:
        snapshot.save(tmp_path / "state.skv")
        with Arena(4096) as small:
            with pytest.raises(ArenaExhaustedError):
                Snapshot.load(tmp_path / "state.skv", small)
            assert small.stats().n_leases == 0
    with pytest.raises(FileNotFoundError):
        Snapshot.load(tmp_path / "none.skv", arena)


def damaged(snapshot: Snapshot, change: Any, arena: Arena) -> Any:
    """Load a file whose meta or arrays were changed and which is right otherwise, checksums included."""
    import io

    from swarmkv_ll import skv

    with snapshot._using():
        contents = snapshot._record.contents(snapshot._bytes().copy())
    meta, arrays, state = change(contents.meta, dict(contents.arrays), contents.state)
    file = io.BytesIO()
    skv.dump(skv.Contents(meta, arrays, state), file)
    return Snapshot.from_bytes(file.getvalue(), arena)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m, a, s: ({}, a, s), "no 'identity'"),
        (lambda m, a, s: ({**m, "begin": "0"}, a, s), "another kind"),
        (lambda m, a, s: ({**m, "begin": 64}, a, s), "begin"),
        (lambda m, a, s: ({**m, "begin": -1}, a, s), "begin"),
        (lambda m, a, s: ({**m, "window": -1}, a, s), "window"),
        (lambda m, a, s: ({**m, "kind": "context"}, a, s), "kind"),
        (lambda m, a, s: ({**m, "sequences": {"0": 95}}, a, s), "sequences"),
        (lambda m, a, s: ({**m, "parts": {**m["parts"], "n_attention": 2}}, a, s), "state"),
        (lambda m, a, s: ({**m, "parts": {**m["parts"], "n_attention": 3}}, a, s), "another kind"),
        (lambda m, a, s: ({**m, "parts": {**m["parts"], "more": 1}}, a, s), "more"),
        (lambda m, a, s: ({**m, "parts": [1, 2]}, a, s), "meta"),
        (lambda m, a, s: ({**m, "identity": {**m["identity"], "rope": {"freq_base": -5.0}}}, a, s), "freq_base"),
        (lambda m, a, s: ({**m, "identity": {**m["identity"], "adapters": [{}]}}, a, s), "fingerprint"),
        (lambda m, a, s: ({**m, "identity": {**m["identity"], "rotation": [True]}}, a, s), "rotation"),
        (lambda m, a, s: (m, {**a, "tokens.0": a["tokens.0"][:-1]}, s), "96 tokens"),
        (lambda m, a, s: (m, {**a, "tokens.0": -a["tokens.0"]}, s), "not negative"),
        (lambda m, a, s: (m, {**a, "tokens.1": a["tokens.0"]}, s), "section name"),
        (lambda m, a, s: (m, {**a, "other": a["tokens.0"]}, s), "section name"),
        (lambda m, a, s: (m, {**a, "logits.0": a["logits.0"] * np.float32("nan")}, s), "float32 numbers"),
        (lambda m, a, s: (m, {**a, "logits.0": a["logits.0"].astype(np.float64)}, s), "float64"),
        (lambda m, a, s: (m, a, s[:-1]), "state"),
        (lambda m, a, s: (m, a, s[:0].copy()), "state"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(models: Models, arena: Arena, change: Any, says: str) -> None:
    with taken(models[ATTENTION], arena) as snapshot:
        with pytest.raises(SnapshotFileError, match=says):
            damaged(snapshot, change, arena)
        assert arena.stats().n_leases == 1


def test_a_forged_identity_does_not_get_a_foreign_state_past(models: Models, arena: Arena) -> None:
    """A state of another model that claims to be this one's: refused by its layers, and nothing is touched."""
    with new_context(models[ATTENTION]) as ctx:
        ctx.decode(TOKENS[:50])
        with ctx.snapshot(arena) as mine:
            claim = mine._record.contents(mine._bytes().copy()).meta["identity"]
        for name in ("deeper", "head48"):
            with taken(models[name], arena) as other:
                forged = damaged(other, lambda m, a, s: ({**m, "identity": claim}, a, s), arena)
                with forged, pytest.raises(IncompatibleSnapshotError, match=r"layers of K|row size of layer 0's K"):
                    forged.restore(ctx)
        assert identical(all_logits(ctx, BRANCH), uninterrupted(models[ATTENTION], TOKENS[:50], BRANCH))


def test_logits_of_another_vocabulary_are_refused(models: Models, arena: Arena) -> None:
    with taken(models[ATTENTION], arena) as snapshot, new_context(models[ATTENTION]) as ctx:
        short = damaged(snapshot, lambda m, a, s: (m, {**a, "logits.0": a["logits.0"][:-1]}, s), arena)
        with short, pytest.raises(IncompatibleSnapshotError, match="384, is 383"):
            short.restore(ctx)


# ── llama.cpp's ──────────────────────────────────────────────────────────────────────────────────────


class Engine:
    """The engine's own functions for sequence files, which the binding does not use."""

    def __init__(self) -> None:
        library = ctypes.CDLL(str(LIB_DIR / "libllama.so"))
        self.save_file, self.load_file = library.llama_state_seq_save_file, library.llama_state_seq_load_file
        self.save_file.restype = self.load_file.restype = ctypes.c_size_t
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self.save_file.argtypes = [pointer, ctypes.c_char_p, ctypes.c_int32, pointer, size]
        self.load_file.argtypes = [pointer, ctypes.c_char_p, ctypes.c_int32, pointer, size, ctypes.POINTER(size)]

    def save(self, ctx: Context, path: Path, seq: int, tokens: Any) -> int:
        data = np.ascontiguousarray(tokens, np.int32)
        return int(self.save_file(_address(ctx), os.fsencode(path), seq, data.ctypes.data, len(data)))

    def load(self, ctx: Context, path: Path, seq: int) -> Any:
        tokens, n = np.empty(4096, np.int32), ctypes.c_size_t()
        read = self.load_file(_address(ctx), os.fsencode(path), seq, tokens.ctypes.data, 4096, ctypes.byref(n))
        assert read == path.stat().st_size
        return tokens[: n.value]


def _address(ctx: Context) -> int:
    return int(ffi.cast("uintptr_t", ctx._ptr))


@pytest.mark.parametrize("flash_attn", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_llama_cpp_reads_ours_and_we_read_its(
    models: Models, arena: Arena, tmp_path: Path, kind: str, flash_attn: bool
) -> None:
    model, engine = models[kind], Engine()
    truth = uninterrupted(model, TOKENS, BRANCH, flash_attn=flash_attn)
    ours, its = tmp_path / "ours.bin", tmp_path / "its.bin"
    with new_context(model, flash_attn=flash_attn) as ctx:
        ctx.decode(TOKENS)
        assert engine.save(ctx, its, 0, TOKENS) == its.stat().st_size
        with ctx.snapshot(arena, tokens=TOKENS) as snapshot:
            snapshot.export_llama(ours)
    assert ours.read_bytes() == its.read_bytes()

    with new_context(model, flash_attn=flash_attn) as ctx:
        assert np.array_equal(engine.load(ctx, ours, 0), TOKENS)
        assert ctx.position() == 96
        assert identical(all_logits(ctx, BRANCH), truth)

    with new_context(model, flash_attn=flash_attn) as ctx, Snapshot.import_llama(its, ctx, arena) as snapshot:
        assert np.array_equal(snapshot.tokens, TOKENS)
        assert snapshot.restore(ctx) == 96
        assert identical(all_logits(ctx, BRANCH), truth)


def test_an_imported_file_is_converted_like_any_other(models: Models, arena: Arena, tmp_path: Path) -> None:
    """Written by the engine from a context of streams, as llama-server without a unified cache has them."""
    path = tmp_path / "slot.bin"
    with new_context(models[ATTENTION], 2048, 4, kv_unified=False) as ctx:
        ctx.decode(TOKENS, seq=3)
        Engine().save(ctx, path, 3, TOKENS)
    with new_context(models[ATTENTION]) as ctx, Snapshot.import_llama(path, ctx, arena) as snapshot:
        assert str(snapshot.can_restore(ctx)) == "yes, with n_stream 4 → 1"
        snapshot.restore(ctx)
        assert identical(all_logits(ctx, BRANCH), uninterrupted(models[ATTENTION], TOKENS, BRANCH))


def test_tokens_that_are_not_its_text_are_left_out(models: Models, arena: Arena, tmp_path: Path) -> None:
    for name, tokens in (("none", []), ("short", TOKENS[:-1]), ("strange", np.full(96, 5000))):
        path = tmp_path / name
        with new_context(models[ATTENTION]) as ctx:
            ctx.decode(TOKENS)
            Engine().save(ctx, path, 0, tokens)
            with Snapshot.import_llama(path, ctx, arena) as snapshot:
                assert snapshot.tokens is None
                snapshot.export_llama(path)
            assert path.read_bytes()[:12] == struct.pack("<III", 0x67677371, 3, 0)


def test_foreign_and_cut_sequence_files_are_refused(models: Models, arena: Arena, tmp_path: Path) -> None:
    path = tmp_path / "slot.bin"
    with new_context(models[ATTENTION]) as ctx:
        ctx.decode(TOKENS[:20])
        before = ctx.position()
        with ctx.snapshot(arena, tokens=TOKENS[:20]) as snapshot:
            snapshot.export_llama(path)
        good = path.read_bytes()
        cases = [(good[:n], None) for n in range(0, len(good), 37)]
        cases += [(b"gguf" + good[4:], "not a llama.cpp sequence file"), (good + b"x", "end of blob")]
        cases += [(good[:4] + struct.pack("<I", 2) + good[8:], "version should be 3, is 2")]
        cases += [(good[:8] + struct.pack("<I", n) + good[12:], None) for n in (21, 2**31, 2**32 - 1)]
        for data, says in cases:
            path.write_bytes(data)
            with pytest.raises(SnapshotFileError, match=says):
                Snapshot.import_llama(path, ctx, arena)
        path.write_bytes(good)
        with new_context(models["deeper"]) as other, pytest.raises(IncompatibleSnapshotError, match="layers of K"):
            Snapshot.import_llama(path, other, arena)
        assert ctx.position() == before
        with ctx.snapshot(arena, seq=None) as whole, pytest.raises(InvalidArgumentError):
            whole.export_llama(path)
        with ctx.snapshot(arena) as one, one.delta(5) as new, pytest.raises(InvalidArgumentError):
            new.export_llama(path)
    assert path.read_bytes() == good


# ── over 2 GiB ───────────────────────────────────────────────────────────────────────────────────────


def test_a_state_over_2_gib_goes_every_way(files: Files, tmp_path: Path) -> None:
    """Exported, forked, saved, loaded, cut and restored; every length is 64 bits wide."""
    from swarmkv_ll.arena import available_memory

    disk = os.statvfs(tmp_path)
    if available_memory() < 9 << 30 or disk.f_bavail * disk.f_frsize < 3 << 30:
        pytest.skip(f"needs 9 GiB of memory and 3 GiB in {tmp_path}")
    code = """
        import sys
        import numpy as np
        from helpers import BRANCH, all_logits, close, identical, text_tokens
        from swarmkv_ll import Arena, Model, Snapshot
        gguf, file = sys.argv[1:]
        options = {"type_k": "f32", "type_v": "f32", "n_batch": 1024, "n_ubatch": 256, "flash_attn": True}
        tokens = text_tokens(1024)
        with Model(gguf) as model, Arena(4400 << 20) as arena, model.context(1280, **options) as ctx:
            ctx.decode(tokens)
            with ctx.snapshot(arena, tokens=tokens) as snapshot, snapshot.fork() as fork:
                assert snapshot.n_bytes == ctx.state_size() > 2**31
                truth = all_logits(ctx, BRANCH)
                assert np.array_equal(fork.array[-4096:], snapshot.array[-4096:])
                assert fork.blob.layers[-1].v.shape[0] == 1024
                fork.save(file)
            with Snapshot.load(file, arena) as loaded, loaded.slice(1023) as most:
                assert loaded.restore(ctx) == 1024
                assert identical(all_logits(ctx, BRANCH), truth)
                assert most.n_bytes > 2**31 - 2**22
                ctx.clear()
                assert most.restore(ctx) == 1023
                ctx.decode(tokens[-1:])
                assert close(all_logits(ctx, BRANCH), truth)
        """
    run_ok(code, files["large"], tmp_path / "large.skv", timeout=400)
    (tmp_path / "large.skv").unlink()
