"""With a GPU: where things lie, and when they may be touched. The GPU is fake_gpu.cpp; the engine and the models are real.

Each test runs in a process of its own, in which the engine has that device. What a host does to device memory itself is
a segmentation fault there, and what it reads too early is wrong bytes.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import fake_gpu
import numpy as np
import pytest
import tiny_models
from fake_gpu import Call, out_of_order
from helpers import BRANCH, HYBRID, KINDS, TOKENS, Files, Models, all_logits, new_context, run_ok
from test_on_device import HISTORY

Run = Callable[..., str]

BEFORE = """
import os, sys
from pathlib import Path
import numpy as np
from fake_gpu import FAILS, GIVES_ORDINARY, PINS, FakeGpu, out_of_order
gpu = FakeGpu(sys.argv[1])
from helpers import *
from swarmkv_ll import *
from swarmkv_ll import errors, runtime
from swarmkv_ll.ffi import C, ffi
files, args = Files(Path(sys.argv[2])), sys.argv[3:]

def refused(kind, call, *texts):
    try:
        call()
    except kind as error:
        assert all(text in str(error) for text in texts), error
        return error.with_traceback(None)  # whose frames keep models alive
    raise AssertionError(f"no {kind.__name__}")
"""

AFTER = """
import gc
gc.collect()
assert gpu.used() == 0, gpu.used()  # no device memory is lost
"""


@pytest.fixture(scope="session")
def module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The device, compiled; skips with the reason where it cannot be."""
    built = fake_gpu.build(tmp_path_factory.mktemp("gpu"))
    if isinstance(built, str):
        pytest.skip(built)
    return built


@pytest.fixture
def run(module: Path, files: Files, tmp_path: Path) -> Run:
    """Run code in a process with the device; `gpu` is the device, `files` the tiny models, `args` what is given here."""

    def run(code: str, *args: object, after: str = AFTER) -> str:
        parts = (BEFORE, textwrap.dedent(code), after)
        env = {"XDG_CACHE_HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}  # no GPU but this one
        return run_ok("\n".join(parts), module, files.folder, *args, env=env)

    return run


# ── the device itself ────────────────────────────────────────────────────────────────────────────────


def test_the_check_of_the_order_can_fail() -> None:
    get, release, done = Call("get", 4096, 100), Call("release", 4096, 0), Call("synchronize", 0, 0)
    assert out_of_order([Call("compute", 0, 0), done, get, done, release], 4096, 100) == []
    assert out_of_order([get, release], 4096, 100) == ["released before the device was waited for"]
    assert out_of_order([get, done, release, get], 4096, 100) == []
    assert out_of_order([Call("compute", 0, 0), get, done, release], 4096, 100) == ["get while the device computes"]
    assert out_of_order([Call("get", 4000, 100), release], 4096, 100) == []


def test_the_device_is_late_and_its_memory_is_closed(run: Run, files: Files) -> None:
    """Controls: the engine's own decode comes back before the work is done, and a host read of device memory crashes."""
    printed = run(
        """
        with Model(files["llama"]) as model, new_context(model) as ctx:
            batch = ctx._batch.fill(TOKENS[:64], np.arange(64), np.zeros(64), np.zeros(64))
            assert C.llama_decode(ctx._ptr, batch) == 0
            assert gpu.pending() > 0
            C.llama_synchronize(ctx._ptr)
            assert gpu.pending() == 0 and gpu.calls()[-1].what == "synchronize, waited"
            gpu.delay(20_000)
            ctx.decode(TOKENS[:5], seq=0)
            assert gpu.pending() == 0  # ours comes back when it is
        device = C.ggml_backend_dev_by_name(b"FAKE0")
        buffer = C.ggml_backend_buft_alloc_buffer(C.ggml_backend_dev_buffer_type(device), 4096)
        if os.fork() == 0:
            ffi.cast("char *", C.ggml_backend_buffer_get_base(buffer))[0]
            os._exit(0)
        print(os.WTERMSIG(os.wait()[1]))
        C.ggml_backend_buffer_free(buffer)
        """
    )
    assert printed == "11"


# ── where things lie ─────────────────────────────────────────────────────────────────────────────────


def test_weights_and_cache_are_on_the_device_and_the_arena_is_its_host_memory(run: Run, files: Files) -> None:
    run(
        """
        assert [(d.name, d.kind) for d in runtime.devices()] == [("FAKE0", "gpu"), ("CPU", "cpu")]
        assert LlamaGuard().policy == "global"
        assert LlamaGuard("context").policy == "context"
        with Model(files["llama"]) as model:
            weights = gpu.used()
            assert weights > model.n_bytes / 2  # all but the token embeddings, which the engine keeps on the host
            with new_context(model) as ctx, new_context(model) as other:
                assert ctx.kv_memory == {"FAKE0": 512 * 4 * 2 * 2 * 64}  # cells, layers, K and V, f16, n_embd_k
                assert gpu.used() > weights + 2 * sum(ctx.kv_memory.values())
                assert ctx._lock is other._lock
        gpu.forget()
        with Arena(1 << 20) as arena:
            assert (arena.pinned, arena.pin_error, arena.buffer_type) == ("device", None, "FAKE_Host")
            assert arena.stats().pinned == "device" and "FAKE_Host" in repr(arena)
            call, = gpu.calls()
            assert call.what == "host alloc" and call.host <= arena._address
            assert arena._address + arena.n_bytes <= call.host + call.n_bytes
            with arena.lease(5000) as lease:
                lease.array[:] = 7
                assert C.ggml_backend_buffer_is_host(lease.ggml_buffer)
        assert gpu.calls()[-1] == ("host free", call.host, 0)
        gpu.forget()
        with Arena(1 << 20, pin=False) as arena, Arena(1 << 20, device="CPU") as cpu:
            assert (arena.pinned, arena.buffer_type) == (None, "CPU")
            assert cpu.pinned != "device" and cpu.buffer_type == "CPU"
        with Arena(1 << 20, device="FAKE0") as arena:
            assert arena.pinned == "device"
        assert len(gpu.calls()) == 2
        """
    )


def test_memory_that_the_driver_cannot_lock_is_not_called_locked(run: Run, files: Files) -> None:
    """CUDA's host buffer type then gives ordinary memory, without a word."""
    run(
        """
        for mode in (GIVES_ORDINARY, FAILS):
            gpu.pinning(mode)
            with Arena(1 << 20) as arena:
                assert arena.pinned in ("mlock", None) and arena.buffer_type == "CPU", arena
                assert (arena.pinned is None) == (arena.pin_error is not None)
                with arena.lease(1 << 20) as lease:
                    lease.array[:] = 7
        refused(errors.ModelLoadError, lambda: Model(files["llama"]), "FAKE_Host")  # the engine itself insists on it
        gpu.pinning(GIVES_ORDINARY)
        with Model(files["llama"]) as model, new_context(model) as ctx:
            ctx.decode(TOKENS)
        """
    )


def test_part_of_the_layers_on_the_device(run: Run, files: Files, models: Models) -> None:
    with new_context(models["llama"]) as ctx:
        expected = all_logits(ctx, TOKENS)
        np.save(files.folder / "expected.npy", expected)
    run(
        """
        expected, per_layer = np.load(files.folder / "expected.npy"), 512 * 2 * 2 * 64
        for n_gpu_layers, on_gpu in ((0, 0), (1, 0), (3, 2), (5, 4), (-1, 4)):
            with Model(files["llama"], n_gpu_layers=n_gpu_layers) as model, new_context(model, n_seq_max=2) as ctx:
                held = {"CPU": (4 - on_gpu) * per_layer, "FAKE0": on_gpu * per_layer}
                assert ctx.kv_memory == {name: n for name, n in held.items() if n}, ctx.kv_memory
                assert identical(all_logits(ctx, TOKENS), expected)
                truth = all_logits(ctx, BRANCH)
                ctx.remove(0, len(TOKENS))
                with Arena(1 << 20) as arena, ctx.snapshot(arena) as host, ctx.snapshot(where="device") as device:
                    for snapshot in (host, device):
                        assert snapshot.restore(ctx, 1) == len(TOKENS)
                        assert identical(all_logits(ctx, BRANCH, 1), truth)
        # A cache in host memory is measured against the host's, one on the device by the engine.
        with Model(files["llama"], n_gpu_layers=0) as model:
            error = refused(errors.HostMemoryError, lambda: model.context(2**31 - 256))
        assert error.required == (2**31 - 256) * 4 * 2 * 2 * 64
        with Model(files["llama"], n_gpu_layers=3) as model:
            error = refused(errors.HostMemoryError, lambda: model.context(2**31 - 256))
        assert error.required == (2**31 - 256) * 2 * 2 * 2 * 64
        """
    )


def test_too_little_device_memory_is_an_error_and_all_goes_on(run: Run, files: Files) -> None:
    run(
        """
        gpu.memory(1 << 16)
        refused(errors.ModelLoadError, lambda: Model(files["llama"]))
        gpu.memory(1 << 30)
        with Model(files["llama"]) as model:
            with new_context(model) as ctx:
                ctx.decode(TOKENS)
                gpu.memory(gpu.used() + 50_000)
                error = refused(errors.ContextCreateError, lambda: new_context(model, 4096))
                error = refused(errors.DeviceMemoryError, lambda: ctx.snapshot(where="device"), "FAKE0")
                assert error.required > 4 * 2 * 2 * 64 * len(TOKENS) and error.available == 50_000
                truth = all_logits(ctx, BRANCH)
                ctx.remove(0, len(TOKENS))
                gpu.memory(1 << 30)
                snapshot = ctx.snapshot(where="device")
                gpu.memory(gpu.used())
                again = ctx.snapshot(where="device")  # in the memory of the first
                assert again.restore(ctx) == len(TOKENS) and identical(all_logits(ctx, BRANCH), truth)
                refused(errors.DeviceMemoryError, lambda: ctx.snapshot(where="device"))
                assert again.valid
        """
    )


@pytest.mark.parametrize("options", [{"flash_attn": True}, {"flash_attn": False}], ids=str)
@pytest.mark.parametrize(
    ("kind", "n_gpu_layers"),
    [("llama", 3), ("gemma2", 4), ("jamba", -1), ("jamba of 3 layers", 2), ("uneven", 2), ("hybrid-swa", 3)],
)
def test_no_amount_of_device_memory_aborts(
    run: Run, files: Files, kind: str, n_gpu_layers: int, options: dict[str, bool]
) -> None:
    """Layers of many kinds on one device or two: refused, until there is enough of what the engine needs there."""
    path = files.folder / f"{kind}.gguf"
    if kind == "jamba of 3 layers":  # the last, a recurrent one, alone on the device
        tiny_models.write_jamba(path, n_layer=3)
    else:
        path = files[kind]
    run(
        f"""
        with Model("{path}", n_gpu_layers={n_gpu_layers}) as model:
            for n in (40, 65):
                with new_context(model, 8192, **{options}) as ctx:
                    ctx.decode(TOKENS[:n])
                    n_refused, room = 0, 0
                    while True:
                        gpu.memory(gpu.used() + room)
                        try:
                            snapshot = ctx.snapshot(where="device")
                            break
                        except errors.DeviceMemoryError:
                            n_refused, room = n_refused + 1, room + 512
                    assert n_refused
                    gpu.memory(1 << 30)
                    assert snapshot.restore(ctx) == n
        """
    )


def test_one_of_two_devices_holds_as_many_bytes_in_other_pieces(run: Run, files: Files) -> None:
    """A window's layers alone in host memory: as many bytes whatever the sequence's length, and more padding."""
    before = """
        def scattered(model, n):
            ctx = new_context(model, n_seq_max=2, swa_full=False, flash_attn=False)
            ctx.decode(TOKENS[:n])
            first = ctx.snapshot(where="device")
            ctx.clear()
            for _ in range(n // 2):
                ctx.decode([1, 2], seq=0)
                ctx.decode([2], seq=1)
            for _ in range(3):
                ctx.decode([1], seq=0)
                ctx.decode([1], seq=1)
            return ctx, first
    """
    code = """
        for n_gpu_layers, aborts in ((-1, False), (2, True), (3, True), (4, True)):
            with Model(files["gemma2"], n_gpu_layers=n_gpu_layers) as model:
                ctx, first = scattered(model, 90)
                with ctx:
                    if aborts:
                        refused(errors.SnapshotError, lambda: ctx.snapshot(where="device"), "in other pieces",
                                "as when it was last kept on one of ", ": use an arena")
                        assert first.valid and first.restore(ctx) == 90
                    else:
                        assert ctx.snapshot(where="device").restore(ctx, 1) == 93
        with Model(files["gemma2"], n_gpu_layers=4) as model:
            ctx, first = scattered(model, 20)  # within the window, more in both caches: more wherever they lie
            with ctx:
                assert ctx.snapshot(where="device").restore(ctx, 1) == 23
        with Model(files["llama"], n_gpu_layers=3) as model:  # no window: more on each
            ctx, first = scattered(model, 90)
            with ctx:
                assert ctx.snapshot(where="device").restore(ctx, 1) == 93
    """
    run(textwrap.dedent(before) + textwrap.dedent(code))


# ── the same answers ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", KINDS)
def test_snapshots_fork_restore_and_go_through_files(run: Run, files: Files, models: Models, kind: str) -> None:
    """Bit for bit what an uninterrupted context gives; here the CPU's too, as the device is one."""
    with new_context(models[kind]) as ctx:
        prefix, branch = all_logits(ctx, TOKENS), all_logits(ctx, BRANCH)
    np.savez(files.folder / f"truth-{kind}.npz", prefix=prefix, branch=branch)
    run(
        """
        kind = args[0]
        truth = np.load(files.folder / f"truth-{kind}.npz")
        with Model(files[kind]) as model, Arena(8 << 20) as arena:
            assert arena.pinned == "device"
            for options in ({}, {"n_seq_max": 3}, {"n_seq_max": 3, "kv_unified": False}):
                with new_context(model, **options) as ctx, new_context(model, **options) as other:
                    assert identical(all_logits(ctx, TOKENS), truth["prefix"])
                    snapshot, on_device = ctx.snapshot(arena, tokens=TOKENS), ctx.snapshot(where="device")
                    assert identical(all_logits(ctx, BRANCH), truth["branch"])
                    last = options.get("n_seq_max", 1) - 1
                    fork = snapshot.fork()
                    fork.save(files.folder / f"{kind}.skv")
                    loaded = Snapshot.load(files.folder / f"{kind}.skv", arena)
                    received = Snapshot.from_bytes(fork.to_bytes(), arena)
                    fork.export_llama(files.folder / f"{kind}.bin")
                    imported = Snapshot.import_llama(files.folder / f"{kind}.bin", ctx, arena)
                    shared = fork.share()
                    fork.release()
                    for some in (snapshot, shared, loaded, received, imported):
                        for target in (ctx, other):
                            assert some.restore(target, last) == len(TOKENS)
                            assert identical(all_logits(target, BRANCH, last), truth["branch"])
                    assert on_device.restore(ctx, last) == len(TOKENS)
                    assert identical(all_logits(ctx, BRANCH, last), truth["branch"])
                    if kind == "llama":
                        with snapshot.slice(64) as half:
                            assert half.restore(ctx) == 64
                            ctx.decode(TOKENS[64:])
                            assert identical(all_logits(ctx, BRANCH), truth["branch"])
                    if last:
                        snapshot.restore(ctx, 0)
                        ctx.copy_sequence(0, 1)
                        with ctx.snapshot(arena, None) as whole:
                            whole.restore(other)
                        for seq in (0, 1):  # in a sliding window, cells lie elsewhere: the same up to rounding
                            same = close if kind == "gemma2" else identical
                            assert same(all_logits(other, BRANCH, seq), truth["branch"])
                    for some in (snapshot, shared, loaded, received, imported, on_device):
                        some.release()
        """,
        kind,
    )


@pytest.mark.parametrize("options", [{}, {"kv_unified": False}, {"flash_attn": False}], ids=str)
def test_device_snapshots_in_any_order_of_calls(run: Run, files: Files, options: dict[str, bool]) -> None:
    printed = run(
        f"path, options, n_steps = files['llama'], {options}, 320\nfrom swarmkv_ll.errors import SnapshotError\n{HISTORY}"
    )
    assert printed == str("flash_attn" in options)


def test_what_decodes_many_at_once(run: Run, files: Files, models: Models) -> None:
    """Fan-out in all three ways, a pipeline and a batched decoder, against the same on the CPU alone."""
    code = """
        document, prompts = text_tokens(120), [text_tokens(7, seed=i) for i in range(5)]
        with Model(files["ends"]) as model:
            for strategy in ("reprefill", "snapshot", "shared"):
                found = fan_out(model, document, prompts, strategy=strategy, max_tokens=6, n_threads=1)
                print(strategy, [branch.tokens for branch in found.branches])
            nodes = {
                "document": PrefillNode(document),
                "early": BranchNode(prompts[0], "document", max_tokens=4, required_prefix_tokens=40),
                "late": BranchNode(prompts[1], "document", max_tokens=4),
                "next": BranchNode(prompts[2], "late", max_tokens=4),
            }
            for strategy in ("shared", "snapshot"):
                result = Pipeline(model, nodes, strategy=strategy, n_threads=1).run()
                print({name: result[name].tokens for name in ("early", "late", "next")})
    """
    here = run(code)
    before = BEFORE.replace("gpu = FakeGpu(sys.argv[1])\n", "")
    cpu = run_ok(before + textwrap.dedent(code), "", files.folder, env={"CUDA_VISIBLE_DEVICES": ""})
    assert here == cpu
    assert len(here.splitlines()) == 5


# ── the order of calls ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["llama", HYBRID])
def test_a_lease_is_used_again_only_after_the_device_is_done_with_it(run: Run, files: Files, kind: str) -> None:
    run(
        """
        import swarmkv_ll.arena
        give_back = swarmkv_ll.arena.Lease._give_back

        def noted(lease):
            gpu.note("release", lease.arena._address + lease.offset)
            give_back(lease)

        swarmkv_ll.arena.Lease._give_back = noted
        with Model(files[args[0]]) as model, Arena(8 << 20) as arena, new_context(model, n_seq_max=3) as ctx:
            def moved(what, lease):
                place = arena._address + lease.offset, lease.n_bytes
                calls = gpu.calls()
                assert sum(call.n_bytes for call in calls if call.what == what and call.within(*place)) > 0.9 * lease.n_bytes
                assert out_of_order(calls, *place) == []
                gpu.forget()

            for n in (64, 5):
                ctx.decode(TOKENS[:n])
                gpu.forget()
                snapshot = ctx.snapshot(arena)
                lease, kept = snapshot.lease, snapshot.array.copy()
                if n == 64:
                    ctx.decode(TOKENS[:n], seq=2)  # the device is at work in other cells
                snapshot.restore(ctx, 1)
                assert np.array_equal(kept, snapshot.array)
                place = arena._address + lease.offset, lease.n_bytes
                first, last = (next(i for i, c in enumerate(gpu.calls()) if c.what == w and c.within(*place)) for w in ("get", "set"))
                assert first < last
                snapshot.release()
                moved("get", lease)
                ctx.clear()
                # Restored, released and used for something else at once.
                ctx.decode(TOKENS[:n])
                snapshot = ctx.snapshot(arena)
                lease = snapshot.lease
                ctx.clear()
                gpu.forget()
                snapshot.restore(ctx)
                snapshot.release()
                with arena.lease(lease.n_bytes) as other:
                    assert other.offset == lease.offset
                    other.array[:] = 0xFF
                moved("set", lease)
                again = ctx.snapshot(arena)
                assert np.array_equal(kept, again.array)
                lease = again.lease
                again.release()
                moved("get", lease)
                ctx.clear()
        """,
        kind,
    )


def test_copies_through_the_host_that_are_not_in_leases(run: Run, files: Files) -> None:
    """Between streams, and of cells that are moved together: memory that is let go as soon as the call returns."""
    run(
        """
        with Model(files["llama"]) as model, Arena(8 << 20) as arena:
            truth = uninterrupted(model, TOKENS, BRANCH)
            with new_context(model, n_seq_max=2, kv_unified=False) as ctx:
                ctx.decode(TOKENS)
                gpu.forget()
                ctx.copy_sequence(0, 1)
                whats = [call.what for call in gpu.calls()]
                assert "get" in whats and "set" in whats and whats[-1].startswith("synchronize")
                assert identical(all_logits(ctx, BRANCH, 1), truth)
            with new_context(model, n_seq_max=2) as ctx:
                ctx.decode(TOKENS)
                snapshot = ctx.snapshot(arena)
                ctx.clear()
                for token in TOKENS[:90]:
                    ctx.decode([token], seq=0)
                    ctx.decode([token], seq=1)
                found = snapshot.restore(ctx, 1)
                assert found.moved and found.runs == 1, (found.moved, found.runs)
                assert identical(all_logits(ctx, BRANCH, 1), truth)
                snapshot.release()
        """
    )


# ── stopping ─────────────────────────────────────────────────────────────────────────────────────────


def test_ctrl_c_in_a_decode_on_the_device(run: Run, files: Files) -> None:
    run(
        """
        import signal
        with Model(files["llama"]) as model, new_context(model, n_batch=32, n_ubatch=32) as ctx:
            ctx.decode(TOKENS)
            truth = all_logits(ctx, BRANCH)
            ctx.remove(0, len(TOKENS))
            gpu.delay(50_000)
            signal.signal(signal.SIGALRM, signal.default_int_handler)
            signal.setitimer(signal.ITIMER_REAL, 0.12)
            refused(KeyboardInterrupt, lambda: ctx.decode(text_tokens(400)))
            gpu.delay(0)
            assert ctx.position() == len(TOKENS)
            assert identical(all_logits(ctx, BRANCH), truth)
        """
    )


def test_a_process_may_end_with_everything_open(run: Run, files: Files) -> None:
    printed = run(
        """
        model = Model(files["llama"])
        ctx, arena = new_context(model), Arena(1 << 20)
        ctx.decode(TOKENS)
        snapshot, on_device, view = ctx.snapshot(arena), ctx.snapshot(where="device"), ctx.logits()
        gpu.delay(100_000)
        C.llama_decode(ctx._ptr, ctx._batch.fill(TOKENS[:8], np.arange(96, 104), np.zeros(8), np.zeros(8)))
        print(gpu.pending() > 0)
        """,
        after="",
    )
    assert printed == "True"
