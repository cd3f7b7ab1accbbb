"""Faults that were found by trying to break the library, each with its right value. What could kill runs apart."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import HYBRID, KINDS, Files, Models, close, identical, new_context, run_ok, run_python, text_tokens

from swarmkv_ll import Arena, Model, Sampler, fan_out, validate_context_budget
from swarmkv_ll.errors import (
    ClosedError,
    ContextBudgetError,
    InvalidArgumentError,
    ModelLoadError,
    PartialRemovalError,
)

# ── the process lives ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", KINDS)
def test_a_context_smaller_than_its_sequences_is_refused(models: Models, kind: str) -> None:
    for n_ctx, n_seq_max in ((1, 2), (3, 7), (255, 256)):
        with pytest.raises(InvalidArgumentError, match="at least n_seq_max"):
            models[kind].context(n_ctx, n_seq_max)


@pytest.mark.parametrize("call", ["ctx.close()", "ctx.decode([1], seq=1)", "ctx.clear()", "snapshot.restore(ctx, 1)"])
def test_a_signal_handler_inside_a_decode_cannot_change_the_context(files: Files, call: str) -> None:
    printed = run_ok(
        f"""
        import signal, sys
        from helpers import *
        from swarmkv_ll import Arena, Model
        from swarmkv_ll.errors import ReentrantCallError
        model = Model(sys.argv[1])
        ctx = model.context(8192, 2, n_threads=1)
        ctx.decode(text_tokens(20))
        arena = Arena.for_branches(ctx, 1)
        snapshot = ctx.snapshot(arena)
        signal.signal(signal.SIGALRM, lambda *_: {call})
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        try:
            ctx.decode(text_tokens(8000))
        except ReentrantCallError as error:
            print(error)
        print(ctx.position(0), ctx.position(1), ctx.cells_free())
        """,
        files["llama"],
    )
    assert printed.splitlines() == ["this context is in the middle of a call of this same thread", "20 0 8172"]


def test_a_model_closed_while_another_thread_reads_its_vocabulary(files: Files) -> None:
    run_ok(
        """
        import sys, threading, time
        from swarmkv_ll import Model
        for _ in range(5):
            model, done = Model(sys.argv[1]), []
            text = "hello world " * 100_000
            def read():
                done.append(len(model.tokenize(text, add_special=False, parse_special=False)))
            thread = threading.Thread(target=read)
            thread.start()
            time.sleep(0.01)
            model.close()
            thread.join()
            assert done and done[0] > 100_000
        """,
        files["llama"],
    )


def test_the_process_ends_while_daemon_threads_decode(files: Files) -> None:
    for _ in range(3):
        run_ok(
            """
            import sys, threading, time
            from helpers import *
            from swarmkv_ll import Model
            model = Model(sys.argv[1])
            def work():
                ctx = model.context(8192, n_threads=2)
                while True:
                    ctx.clear()
                    ctx.decode(text_tokens(3000))
            for _ in range(3):
                threading.Thread(target=work, daemon=True).start()
            time.sleep(0.4)
            """,
            files["llama"],
        )


def test_a_forked_child_is_told(files: Files) -> None:
    printed = run_ok(
        """
        import os, sys
        from swarmkv_ll import Model
        from swarmkv_ll.errors import EngineLoadError
        ctx = Model(sys.argv[1]).context(256)
        ctx.decode([1, 2, 3])
        if (child := os.fork()) == 0:
            for use in (lambda: ctx.decode([4]), lambda: Model(sys.argv[1])):
                try:
                    use()
                except EngineLoadError as error:
                    print("forked" in str(error), flush=True)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        print(ctx.decode([4]))
        """,
        files["llama"],
    )
    assert printed.split() == ["True", "True", "4"]


def test_two_tokens_of_one_text_are_refused(files: Files, tmp_path: Path) -> None:
    data = bytearray(files["llama"].read_bytes())
    at = data.index(b"tokenizer.ggml.tokens") + len("tokenizer.ggml.tokens") + 16
    texts = []
    while len(texts) < 100:
        length = int.from_bytes(data[at : at + 8], "little")
        texts.append((at + 8, length))
        at += 8 + length
    (first, _), (second, _) = [text for text in texts if text[1] == 1][:2]
    data[second] = data[first]
    path = tmp_path / "twice.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelLoadError, match=r"token \d+ has the text b'.+', as an earlier one has"):
        Model(path)


def test_a_model_file_that_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    for path in (tmp_path / "pipe.gguf", "a\0b", "\ud800"):
        with pytest.raises(ModelLoadError):
            Model(path)


def test_closed_standard_output() -> None:
    done = run_python("import sys; sys.stdout = None; from swarmkv_ll.cli import main; main(['--version'])")
    assert "Traceback" not in done.stderr


# ── the answers are right ────────────────────────────────────────────────────────────────────────────


def test_an_interrupted_batch_leaves_other_sequences_of_a_hybrid_model(files: Files) -> None:
    printed = run_ok(
        """
        import signal, sys
        from helpers import *
        from swarmkv_ll import Model
        model = Model(sys.argv[1])
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        def state():
            ctx = model.context(4096, 3, n_threads=1, n_ubatch=2048)
            for seq in range(3):
                ctx.decode(text_tokens(20 + seq, seed=seq), seq=seq)
            return ctx
        with state() as ctx:
            good = all_logits(ctx, BRANCH, 1)
        interrupted = 0
        for i in range(20):
            with state() as ctx:
                signal.setitimer(signal.ITIMER_REAL, 0.004 + 0.002 * i)
                try:
                    ctx.decode_batch([(text_tokens(900), 0), (text_tokens(900), 2)])
                except KeyboardInterrupt:
                    interrupted += 1
                signal.setitimer(signal.ITIMER_REAL, 0)
                assert close(all_logits(ctx, BRANCH, 1), good, 0.01)
        print(interrupted)
        """,
        files[HYBRID],
    )
    assert int(printed) > 0


@pytest.mark.parametrize(("n_batch", "n_ubatch"), [(256, 3), (256, 7), (256, 1), (3, 3)])
def test_a_sliding_window_beside_another_sequence(models: Models, n_batch: int, n_ubatch: int) -> None:
    a, b, x = text_tokens(31, 1), text_tokens(63, 2), text_tokens(100, 3)
    options = {"n_batch": n_batch, "n_ubatch": n_ubatch}
    with (
        new_context(models["gemma2"], 512, 2, **options) as ctx,
        new_context(models["gemma2"], 512, 1, **options) as alone,
    ):
        ctx.decode(a)
        ctx.decode(a, seq=1)
        ctx.remove(0)
        ctx.decode(a)
        ctx.decode(b)
        ctx.remove(1)
        ctx.decode(a, seq=1)
        ctx.decode(x)
        for tokens in (a, b, x):
            alone.decode(tokens)
        assert close(ctx.logits(0), alone.logits(0))


def test_a_sliding_window_that_begins_later_can_go_back(models: Models) -> None:
    with new_context(models["gemma2"]) as ctx:
        ctx.decode(text_tokens(10), pos=100)
        ctx.remove(0, 105)
        assert ctx.position() == 105


def test_small_numpy_integers_do_not_wrap(models: Models) -> None:
    with new_context(models["gemma2"], 1024) as ctx:
        ctx.decode(text_tokens(300))
        with Arena.for_branches(ctx, 1) as arena, ctx.snapshot(arena) as snapshot:
            snapshot.restore(ctx)
        with pytest.raises(PartialRemovalError):
            ctx.remove(0, np.uint32(20))  # type: ignore[arg-type]
    with new_context(models["llama"], 512) as ctx:
        assert ctx.decode(text_tokens(10), pos=np.uint8(250)) == 260  # type: ignore[arg-type]
    with pytest.raises(ContextBudgetError):
        validate_context_budget(10, 5, np.uint32(8), 0)  # type: ignore[arg-type]
    assert validate_context_budget(np.uint8(1), 1, 1000) == 870  # type: ignore[arg-type]
    assert len(fan_out(models["llama"], "abc", ["d"], max_tokens=np.uint8(2)).branches[0].tokens) == 2  # type: ignore[arg-type]


def test_false_in_any_form_turns_flash_attention_off(models: Models) -> None:
    tokens, no = text_tokens(40), np.False_
    for off in (0, no, False):
        with (
            new_context(models["llama"], flash_attn=off) as ctx,
            new_context(models["llama"], flash_attn=True) as other,
        ):
            ctx.decode(tokens)
            other.decode(tokens)
            before = other.logits().copy()
            assert (ctx.flash_attn, ctx.v_transposed) == (False, True)
            with Arena.for_branches(ctx, 1) as arena, ctx.snapshot(arena) as snapshot:
                assert not snapshot.can_restore(other).ok
            assert other.position() == 40
            assert identical(other.logits(), before)


# ── nothing is lost, nothing waits for ever ──────────────────────────────────────────────────────────


def test_a_branch_that_cannot_begin_does_not_keep_its_context(models: Models) -> None:
    sampler = Sampler(1.0)
    sampler.close()

    class Broken(Sampler):
        def for_branch(self, index: int) -> Sampler:
            raise ClosedError("sampler")

    with pytest.raises(ClosedError):
        fan_out(models["llama"], "abc", ["d"] * 8, max_tokens=4, strategy="snapshot", n_parallel=2, sampler=Broken())


LEAK = """
    import gc, signal, sys
    from helpers import *
    from swarmkv_ll import Arena, Model, Sampler
    model = Model(sys.argv[1])
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    def rss():
        gc.collect()
        return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS"))
    def round(i):
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.0002 + 0.00005 * (i % 60))
            {make}
        except KeyboardInterrupt:
            pass
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    for i in range(60):
        round(i)
    before = rss()
    for i in range(120):
        round(i)
    print((rss() - before) // 1024)
"""


@pytest.mark.parametrize("make", ["model.context(16384, n_threads=1).close()", "Arena(64 << 20, pin=False).close()"])
def test_ctrl_c_while_memory_is_taken_loses_none(files: Files, make: str) -> None:
    assert int(run_ok(LEAK.format(make=make), files["llama"])) < 48  # MiB; one context is 16, one arena 64


def test_samplers_are_freed_whole(files: Files) -> None:
    code = LEAK.format(make="[Sampler(0.8, top_k=5, seed=1).close() for _ in range(500)]")
    assert (
        int(
            run_ok(
                code.replace("setitimer(signal.ITIMER_REAL, 0.0002", "setitimer(signal.ITIMER_REAL, 60"), files["llama"]
            )
        )
        < 4
    )


def test_ctrl_c_at_any_moment_leaves_engine_and_ledger_together(files: Files) -> None:
    printed = run_ok(
        """
        import gc, random, signal, sys
        from helpers import *
        from swarmkv_ll import Arena, Model
        model, rng = Model(sys.argv[1]), random.Random(1)
        armed = False
        def interrupt(*_):
            if armed:
                raise KeyboardInterrupt
        signal.signal(signal.SIGALRM, interrupt)
        ctx = new_context(model, 512, 4)
        ctx.decode(text_tokens(60))
        arena = Arena.for_branches(ctx, 3)
        snapshot = ctx.snapshot(arena)
        calls = (
            lambda: ctx.copy_sequence(0, 1),
            lambda: ctx.copy_sequence(0, 2, 30),
            lambda: ctx.remove(1, 10),
            lambda: ctx.remove(2),
            lambda: snapshot.restore(ctx, 3),
            lambda: snapshot.restore(ctx, 1),
            lambda: snapshot.fork().release(),
            lambda: ctx.clear() or snapshot.restore(ctx, 0),
            lambda: ctx.decode([1, 2, 3], seq=rng.randrange(1, 4)),
        )
        interrupted = 0
        for i in range(2500):
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-6, 4e-4))
                armed = True
                calls[rng.randrange(len(calls))]()
                armed = False
            except KeyboardInterrupt:
                armed = False
                interrupted += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            arena.check_integrity()
            for seq in range(4):
                held = ctx._cells.positions(seq)
                assert ctx.position(seq) == len(held) == (held.max(initial=-1) + 1), (i, seq)
            if ctx.cells_free() < 150:
                ctx.clear()
            if not ctx.position(0):
                snapshot.restore(ctx, 0)
        gc.collect()
        assert arena.stats().n_leases == 1
        ctx.decode(text_tokens(ctx.cells_free()))
        print(interrupted, ctx.cells_free())
        """,
        files["llama"],
    )
    interrupted, free = map(int, printed.split())
    assert interrupted > 100
    assert free == 0


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_dropped_leases_do_not_confuse_the_integrity_check() -> None:
    with Arena(64 * 4096, pin=False) as arena:
        failed: list[Any] = []

        def work(seed: int) -> None:
            rng = np.random.default_rng(seed)
            try:
                for _ in range(300):
                    leases = [arena.lease(int(rng.integers(1, 8000))) for _ in range(2)]
                    arena.check_integrity()
                    leases.pop().release()
                    leases.clear()
            except Exception as error:
                failed.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failed == []
        assert arena.stats().free == arena.n_bytes
