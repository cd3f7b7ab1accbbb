"""Contexts of other bindings: made here by raw calls, as another binding on the same library would, then adopted."""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import (
    ATTENTION,
    BRANCH,
    CUDA_FILES,
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

from swarmkv_ll import Arena, Context, Rope
from swarmkv_ll.errors import ClosedError, IncompatibleSnapshotError, InvalidArgumentError
from swarmkv_ll.ffi import LIB_DIR

SHAPES: list[dict[str, Any]] = [
    {},
    {"flash_attn": False},
    {"type_k": "q8_0", "type_v": "f32"},
    {"n_ctx": 2048, "n_seq_max": 4, "kv_unified": False},
    {"n_ctx": 2048, "n_seq_max": 4},
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(shape) or "plain")
@pytest.mark.parametrize("kind", KINDS)
def test_what_the_engine_does_not_tell_is_learnt(
    models: Models, arena: Arena, kind: str, shape: dict[str, Any]
) -> None:
    model, truth = models[kind], uninterrupted(models[kind], TOKENS, BRANCH, **shape)
    with new_context(model, **shape) as foreign:
        empty = Context.adopt(address(foreign), owner=foreign, model_path=model.path)
        assert [empty.position(seq) for seq in range(foreign.n_seq_max)] == [0] * foreign.n_seq_max
        empty.close()
        foreign.decode(TOKENS)
        with Context.adopt(address(foreign), owner=foreign, model_path=model.path) as ctx:
            if kind != RECURRENT:
                for name in ("type_k", "type_v", "flash_attn", "v_transposed", "kv_unified"):
                    assert getattr(ctx, name) == getattr(foreign, name), name
                assert ctx.cells_free() == foreign.cells_free()
            assert ctx.position() == 96
            with ctx.snapshot(arena) as snapshot:
                assert identical(all_logits(ctx, BRANCH), truth)
                assert snapshot.restore(ctx) == 96
                assert identical(all_logits(ctx, BRANCH), truth)
                with new_context(model, **shape) as own:
                    snapshot.restore(own)
                    assert identical(all_logits(own, BRANCH), truth)
        assert foreign.position() == 105  # it is not freed


def test_what_the_other_binding_does_meanwhile_is_seen(models: Models, arena: Arena) -> None:
    model = models[ATTENTION]
    with new_context(model) as foreign, Context.adopt(address(foreign), owner=foreign, model_path=model.path) as ctx:
        foreign.decode(TOKENS)
        assert ctx.position() == 96
        assert ctx.cells_free() == foreign.n_ctx - 96
        with ctx.snapshot(arena) as snapshot:
            foreign.decode(text_tokens(foreign.n_ctx - 96, seed=1), logits="none")
            assert ctx.cells_free() == 0
            assert snapshot.can_restore(ctx)
            ctx.remove(0, 96)
            foreign._replaced(0, np.arange(96, dtype=np.int32), None)  # as the other binding's own count would
            assert identical(all_logits(foreign, BRANCH), uninterrupted(model, TOKENS, BRANCH))


def test_its_settings_are_declared(models: Models, files: Files, arena: Arena) -> None:
    model, rope = models[ATTENTION], Rope(freq_base=20000.0)
    with new_context(model, rope=rope) as foreign:
        foreign.decode(TOKENS)
        options = {"owner": foreign, "model_path": model.path, "rope": rope, "adapters": {files["lora"]: 0.5}}
        with Context.adopt(address(foreign), **options) as ctx, ctx.snapshot(arena) as snapshot:
            assert snapshot.identity.rope == rope
            assert [adapter.scale for adapter in snapshot.identity.adapters] == [0.5]
            with pytest.raises(IncompatibleSnapshotError, match="adapters"):
                snapshot.restore(foreign)


def test_pointers_of_every_binding(models: Models) -> None:
    model = models[ATTENTION]
    with new_context(model) as foreign:
        value = address(foreign)
        for pointer in (value, ctypes.c_void_p(value), ctypes.cast(value, ctypes.POINTER(ctypes.c_int)), foreign._ptr):
            with Context.adopt(pointer, owner=None, model_path=model.path) as ctx:
                assert ctx.n_ctx == foreign.n_ctx
        for wrong in (
            0,
            None,
            ctypes.c_void_p(),
            "0x1234",
            1.5,
            True,
            -8,
            value + 1,
            2**64,
            0x1000,
            id(Context) // 2**40,
        ):
            with pytest.raises(InvalidArgumentError):
                Context.adopt(wrong, owner=None, model_path=model.path)
        with pytest.raises(InvalidArgumentError, match="model_path"):
            Context.adopt(value, owner=None)
        for other in ("gemma2", "mamba"):
            with pytest.raises(InvalidArgumentError, match="not the file of that context's model"):
                Context.adopt(value, owner=None, model_path=models[other].path)
        ctx.close()
        with pytest.raises(ClosedError):
            ctx.position()


def test_whole_contexts_of_a_window_are_not_guessed_at(models: Models, arena: Arena) -> None:
    """How many cells a borrowed context's windowed layers have is not known."""
    model = models[SLIDING]
    with new_context(model) as foreign, Context.adopt(address(foreign), owner=foreign, model_path=model.path) as ctx:
        foreign.decode(TOKENS)
        with ctx.snapshot(arena, seq=None) as whole:
            (reason,) = whole.can_restore(ctx).reasons
            assert "borrowed" in str(reason)
            whole.restore(foreign)


# ── the real llama-cpp-python ────────────────────────────────────────────────────────────────────────

needs_package = pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None,
    reason="llama-cpp-python is not installed (docs/interop.md tells how, without a second engine)",
)

COMMON = """
    import sys, os, gc, weakref
    import numpy as np
    from helpers import text_tokens
    from swarmkv_ll import Arena, Context, Model
    from swarmkv_ll.errors import ClosedError, EngineConflictError, InvalidArgumentError
    from swarmkv_ll.interop import SnapshotCache, SnapshotState, adopt
    from llama_cpp import Llama, LlamaRAMCache
    def new(**options):
        return Llama(sys.argv[1], **{"n_ctx": 512, "n_batch": 64, "n_threads": 1, "verbose": False, **options})
    def complete(llm, text, n=12):
        return llm.create_completion(text, max_tokens=n, temperature=0, seed=1)["choices"][0]["text"]
    texts = ["The quick brown fox " * 5 + end for end in ("jumps", "sleeps", "sings")]
    """


@needs_package
@pytest.mark.parametrize("kind", KINDS)
def test_its_context_is_snapshot_forked_and_restored(files: Files, kind: str) -> None:
    run_ok(
        COMMON
        + """
    llm = new(flash_attn=True)
    llm.eval(text_tokens(90).tolist())
    with Arena(4 << 20) as arena, adopt(llm) as ctx, ctx.snapshot(arena) as snapshot, snapshot.fork() as fork:
        llm.eval([1, 2, 3])
        truth = llm.scores[0].copy() if not llm._logits_all else None
        ctx.clear()
        assert fork.restore(ctx) == 90
        llm.n_tokens = 90
        llm.eval([1, 2, 3])
        assert ctx.position() == 93
        with Model(sys.argv[1]) as model, model.context(512, n_threads=1, n_batch=64, flash_attn=True) as own:
            fork.restore(own)
            own.decode([1, 2, 3])
            import llama_cpp
            theirs = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(llm.ctx, -1), (own.model.n_vocab,))
            assert theirs.tobytes() == own.logits(0).tobytes()
    llm.close()
    try:
        adopt(llm)
    except ClosedError:
        print("closed")
    """,
        files[kind],
    )


@needs_package
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("logits_all", [False, True])
def test_the_cache_answers_as_its_own_one_does(files: Files, kind: str, logits_all: bool) -> None:
    run_ok(
        COMMON
        + """
    options = {"logits_all": sys.argv[2] == "True"}
    plain = new(**options)
    plain.set_cache(LlamaRAMCache())
    wanted = [complete(plain, text) for text in texts + texts]
    with Arena(16 << 20) as arena:
        llm = new(**options)
        cache = SnapshotCache(arena).attach(llm)
        got = [complete(llm, text) for text in texts + texts]
        if "llama" in sys.argv[1] or "gemma2" in sys.argv[1]:
            assert got == wanted, (got, wanted)
            assert cache.hits > 0
        else:  # states that cannot be cut to the prompt's beginning: its own cache restores them all the same
            assert cache.hits == 0
        assert cache.cache_size == arena.stats().used - sum(-s.snapshot.n_bytes % 4096 for s in cache._states.values())
        state = llm.save_state()
        assert isinstance(state, SnapshotState)
        a = complete(llm, texts[0] + " again", 5)
        llm.load_state(state)
        assert llm.n_tokens == state.n_tokens
        state.snapshot.release()
        try:
            cache.attach(llm)
            raise AssertionError
        except InvalidArgumentError:
            pass
        cache.detach()
        cache.detach()
        assert arena.stats().n_leases == 0
        assert "save_state" not in vars(llm)
        complete(llm, texts[0])
    """,
        files[kind],
        logits_all,
    )


@needs_package
def test_a_small_arena_forgets_the_oldest_and_loses_no_answer(files: Files) -> None:
    run_ok(
        COMMON
        + """
    for room in (4096, 1 << 18):
        with Arena(room) as arena:
            llm = new()
            cache = SnapshotCache(arena).attach(llm)
            answers = [complete(llm, text) for text in texts + texts]
            assert all(answers)
            assert cache.dropped == (6 if room == 4096 else 0), cache.dropped
            assert len(cache._states) == arena.stats().n_leases < 3
            gone = weakref.ref(llm)
            del llm
            gc.collect()
            assert gone() is None
            try:
                cache._save()
                raise AssertionError
            except ClosedError:
                pass
            cache.detach()
    """,
        files[ATTENTION],
    )


@needs_package
def test_another_library_in_the_process_is_refused(files: Files, tmp_path: Path) -> None:
    """llama-cpp-python on a copy of the library: the same bytes, another engine."""
    copy = tmp_path / "lib"
    shutil.copytree(LIB_DIR, copy, ignore=shutil.ignore_patterns(*CUDA_FILES))
    env = {"LLAMA_CPP_LIB_PATH": str(copy)}
    after = run_python("import llama_cpp, swarmkv_ll.interop", env=env)
    before = run_python("import swarmkv_ll.interop", env=env)
    late = run_python(
        """
        import sys
        from swarmkv_ll import Context, Model
        from swarmkv_ll.ffi import ffi
        with Model(sys.argv[1]) as model, model.context(256) as ctx:
            import llama_cpp
            Context.adopt(int(ffi.cast("uintptr_t", ctx._ptr)), owner=ctx, model_path=model.path)
        """,
        files[ATTENTION],
        env=env,
    )
    for done in (after, before, late):
        assert done.returncode != 0
        assert "EngineConflictError" in done.stderr
        assert str(copy) in done.stderr


@needs_package
def test_both_ways_round_and_whose_log_it_is(files: Files) -> None:
    """llama-cpp-python routes the engine's log to itself; what we read from it is ours while our calls run."""
    for imports in ("import swarmkv_ll.interop, llama_cpp", "import os; import llama_cpp, swarmkv_ll.interop"):
        run_ok(
            f"""
            import sys
            {imports}
            from swarmkv_ll import Model
            with Model(sys.argv[1]) as model:
                with model.context(512, type_k="q8_0") as ctx:
                    assert ctx._rotation == (True, False), ctx._rotation
                llm = llama_cpp.Llama(sys.argv[1], n_ctx=256, verbose=False)
                llm.eval([1, 2, 3])
            """,
            files["head64"],
            env={"LLAMA_CPP_LIB_PATH": str(LIB_DIR)},
        )
