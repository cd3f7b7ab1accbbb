"""The steps of `device_check.py` that need the engine. Each runs in a process of its own, which may abort or be stopped:

    python device_steps.py STEP --size gpu|cpu --model FILE --work FOLDER --out FILE.json

`--out` is written again after every finding, so that what was found is there however the process ends. The same code
runs for a GPU and in a rehearsal on the CPU; whether there is a GPU is all that differs, and the sizes.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.int32]

ROOT = Path(__file__).resolve().parent.parent

N_QUESTION, N_SINGLE = 24, 24
"""Of a branch: tokens decoded in one batch, then one by one. A GPU computes the two with different kernels."""

MOST_ERROR = 0.02
"""How much logits may differ where other arithmetic is allowed, as a share of their variance: see docs/device-check.md."""


@dataclass(frozen=True)
class Size:
    """How much is computed.

    Attributes
    ----------
    n_short : int
        Tokens of the document that answers are compared after.
    n_document : int
        Tokens of the document that times are taken with.
    rounds, slow_rounds : int
        Of what takes milliseconds, and of what takes seconds.
    transfer : tuple of int
        MiB that are copied at once.
    """

    n_short: int
    n_document: int
    n_branches: int
    n_answer: int
    rounds: int
    slow_rounds: int
    transfer: tuple[int, ...]


SIZES = {
    "gpu": Size(1536, 8192, 8, 16, 15, 5, (1, 16, 64, 256)),
    "cpu": Size(576, 640, 4, 6, 7, 2, (1, 16)),
}


# ── what is noted ────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Notes:
    """A step's findings, in a file that is whole at any time."""

    out: Path
    checks: list[dict[str, Any]] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    def check(self, name: str, passed: object, **details: Any) -> None:
        """A check that the whole result depends on."""
        self.checks.append({"name": name, "passed": bool(passed), **details})
        self.write()

    def figure(self, name: str, value: Any) -> None:
        """Something to know; nothing depends on it."""
        self.figures[name] = value
        self.write()

    def write(self) -> None:
        part = self.out.with_name(f".{self.out.name}.part")
        part.write_text(json.dumps({"checks": self.checks, "figures": self.figures}), encoding="utf-8")
        part.replace(self.out)


def spread(values: Sequence[float], n_bytes: int = 0) -> dict[str, float]:
    """Median and quartiles of seconds; with `n_bytes` also the median's GB/s."""
    low, middle, high = (float(q) for q in np.quantile(values, [0.25, 0.5, 0.75]))
    made = {"median_s": middle, "q1_s": low, "q3_s": high, "rounds": len(values)}
    return {**made, "gb_per_s": n_bytes / middle / 1e9} if n_bytes else made


# ── comparing logits ─────────────────────────────────────────────────────────────────────────────────


def identical(found: Rows, wanted: Rows) -> bool:
    """Bit for bit, and not all the same number, which would prove nothing."""
    return found.shape == wanted.shape and found.tobytes() == wanted.tobytes() and bool(np.ptp(wanted) > 0)


def nearness(found: Rows, wanted: Rows) -> dict[str, Any]:
    """How far logits of other arithmetic are from `wanted`, row by row.

    The error of a row is the mean square of the difference as a share of the row's variance: 0 for equal ones, 2 for
    rows that have nothing to do with each other. Logits that are no numbers are only counted.
    """
    told: dict[str, Any] = {"n_positions": len(wanted)}
    if n_wrong := int((~np.isfinite(found)).sum()):
        return {**told, "not_finite": n_wrong}
    found, wanted = found.astype(np.float64), wanted.astype(np.float64)
    errors = ((found - wanted) ** 2).mean(axis=1) / np.maximum(wanted.var(axis=1), 1e-30)
    largest = float(np.abs(found - wanted).max())
    return {
        **told,
        "error_mean": float(errors.mean()),
        "error_worst": float(errors.max()),
        "max_abs": largest,
        "max_relative": largest / float(wanted.std()),
        "top1_same": float((found.argmax(axis=1) == wanted.argmax(axis=1)).mean()),
    }


def near(told: dict[str, Any]) -> bool:
    """Whether `nearness` found them equal up to rounding."""
    return "not_finite" not in told and told["error_worst"] <= MOST_ERROR


def far(told: dict[str, Any]) -> bool:
    """Whether `nearness` found what rounding cannot explain."""
    return "not_finite" not in told and told["error_mean"] > 5 * MOST_ERROR


# ── what steps share ─────────────────────────────────────────────────────────────────────────────────


class Rig:
    """The model and the texts of a run."""

    def __init__(self, size: Size, model: Any, work: Path) -> None:
        self.size, self.model, self.work = size, model, work
        text = "".join(
            path.read_text(encoding="utf-8") for path in [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
        )
        self._text: Tokens = model.tokenize(text, add_special=False, parse_special=False)
        room = model.n_ctx_train - size.n_branches * (N_QUESTION + size.n_answer) - 512
        if room < 600:
            raise SystemExit(
                f"the model was trained on {model.n_ctx_train} tokens, {model.n_ctx_train - room + 600} are needed"
            )
        self.document = np.resize(self._text, min(size.n_document, room))
        self.short = self.document[: min(size.n_short, room)]
        self.other = np.random.default_rng(0).integers(0, model.n_vocab, len(self.short)).astype(np.int32)
        self.branch = np.resize(self._text[::-1], N_QUESTION + N_SINGLE)

    def question(self, index: int) -> Tokens:
        """Of branch `index`: other tokens, as many."""
        return np.roll(self._text, -1000 * (index + 1))[:N_QUESTION].copy()

    def context(self, n_tokens: int = 0, n_seq_max: int = 1, **options: Any) -> Any:
        """With room for so many tokens a sequence, and a branch."""
        n_tokens = n_tokens or len(self.short)
        n_ctx = n_seq_max * -(-(n_tokens + len(self.branch) + self.size.n_answer) // 256) * 256
        return self.model.context(n_ctx, n_seq_max, **options)

    def rows(self, ctx: Any, seq: int = 0) -> Rows:
        """Decode the branch and give all its logits, shape (n, n_vocab): a batch, then token by token."""
        ctx.decode(self.branch[:N_QUESTION], seq=seq, logits="all")
        found = [np.array(ctx.logits()).reshape(N_QUESTION, -1)]
        for token in self.branch[N_QUESTION:]:
            ctx.decode([token], seq=seq)
            found.append(np.array(ctx.logits()).reshape(1, -1))
        return np.concatenate(found)

    def uninterrupted(self, document: Tokens, **options: Any) -> Rows:
        """The branch's logits right after the document's prefill, in a context of its own."""
        from swarmkv_ll.fanout import prefill

        with self.context(**options) as ctx:
            prefill(ctx, document)
            return self.rows(ctx)


def has_gpu() -> bool:
    from swarmkv_ll.runtime import gpu_device

    return gpu_device() is not None


def n_free(kind: str = "gpu") -> int:
    """Bytes that are free on all devices of a kind."""
    from swarmkv_ll.runtime import devices

    return sum(device.memory_free for device in devices() if device.kind == kind)


# ── the steps ────────────────────────────────────────────────────────────────────────────────────────


def devices(rig: Rig, notes: Notes, *, gpu: bool) -> None:
    """What is used: the device, where weights and KV lie, how host memory is locked, who waits for whom."""
    import swarmkv_ll.runtime as runtime
    from swarmkv_ll import Arena, LlamaGuard
    from swarmkv_ll.ffi import LIB_DIR

    notes.figure("devices", [vars(device) for device in runtime.devices()])
    notes.figure("backends", runtime.backends())
    notes.figure("stamp", runtime.STAMP)
    for name in ("build-info.json", "cuda-info.json"):
        if (LIB_DIR / name).exists():
            told = json.loads((LIB_DIR / name).read_text(encoding="utf-8"))
            notes.figure(name.removesuffix(".json"), {key: told[key] for key in told if key != "files"})
    notes.check("the device is what was asked for", has_gpu() == gpu, wanted="gpu" if gpu else "cpu")
    with Arena(1 << 20) as arena:
        notes.figure("arena", {"pinned": arena.pinned, "buffer_type": arena.buffer_type, "pin_error": arena.pin_error})
        notes.check("the arena is page-locked by the GPU's driver" if gpu else "the arena is not a GPU's",
                    (arena.pinned == "device") == gpu)  # fmt: skip
    policy = LlamaGuard().policy
    notes.check("the guard's policy is the device's", policy == ("global" if gpu else "context"), policy=policy)
    notes.figure("obstacle", runtime.cuda_obstacle())
    names = {device.name for device in runtime.devices() if device.kind == "gpu"}
    with rig.context(len(rig.document)) as ctx:
        notes.figure("kv_memory", dict(ctx.kv_memory))
        there = {name for name, n_bytes in ctx.kv_memory.items() if n_bytes}
        notes.check(
            "the KV cache is on the device", there and there <= (names if gpu else {"CPU"}), where=sorted(there)
        )
    notes.figure("model", {
        "name": rig.model.path.name, "description": rig.model.description, "n_bytes": rig.model.n_bytes,
        "n_params": rig.model.n_params, "fingerprint": rig.model.fingerprint,
    })  # fmt: skip


def reference(rig: Rig, notes: Notes, *, gpu: bool) -> None:
    """On the CPU, whatever there is: logits that `accuracy` compares with, into a file."""
    notes.check("no GPU takes part", not has_gpu())
    begin = perf_counter()
    np.savez(rig.work / "reference.npz", **_logits(rig))
    notes.figure("seconds", perf_counter() - begin)


def accuracy(rig: Rig, notes: Notes, *, gpu: bool) -> None:
    """The device's logits against the CPU's, up to rounding; and that a wrong answer would have been seen."""
    with np.load(rig.work / "reference.npz") as file:
        wanted = {name: file[name] for name in file.files}
    found = _logits(rig)
    for name in ("prefill", "batch", "single", "no flash attention"):
        told = nearness(found[name], wanted[name])
        notes.check(f"{name}: as on the CPU", near(told), tolerance=MOST_ERROR, **told)
    told = nearness(found["another document"], wanted["batch"])
    notes.check("control: another document is told apart", far(told), **told)


def _logits(rig: Rig) -> dict[str, Rows]:
    """Logits of a document's last 256 tokens, of a branch's batch and single tokens, and of some that have to differ."""
    from swarmkv_ll.fanout import prefill

    document, other = rig.short[:512], rig.other[:512]  # the CPU of a GPU machine may be a small one
    found: dict[str, Rows] = {}
    for name, options in (("", {}), ("no flash attention", {"flash_attn": False})):
        with rig.context(**options) as ctx:
            prefill(ctx, document[:256])
            ctx.decode(document[256:], logits="all")
            ending = np.array(ctx.logits()).reshape(256, -1)
            rows = rig.rows(ctx)
        if name:
            found[name] = np.concatenate([ending, rows])
        else:
            found |= {"prefill": ending, "batch": rows[:N_QUESTION], "single": rows[N_QUESTION:]}
    return {**found, "another document": rig.uninterrupted(other)[:N_QUESTION]}


def identity(rig: Rig, notes: Notes, *, gpu: bool) -> None:
    """A restored document against an uninterrupted context: bit for bit, whichever way the state took."""
    from swarmkv_ll import Arena, Snapshot
    from swarmkv_ll.arena import lease_size
    from swarmkv_ll.fanout import prefill

    def compare(name: str, found: Rows, wanted: Rows) -> None:
        same = identical(found, wanted)
        told: dict[str, Any] = {"n_positions": len(wanted), "n_logits": wanted.size}
        notes.check(f"{name}: bit-identical", same, **told, **({} if same else nearness(found, wanted)))

    def restored(state: Any, ctx: Any, seq: int | None = None, **options: Any) -> Rows:
        state.restore(ctx, seq, **options)
        return rig.rows(ctx, seq or 0)

    for setting, options in (
        ("flash attention", {"flash_attn": True}),
        ("V transposed", {"flash_attn": False}),
        ("q8_0 KV", {"flash_attn": True, "type_k": "q8_0", "type_v": "q8_0"}),
    ):
        truth = rig.uninterrupted(rig.short, **options)
        compare(f"{setting}, uninterrupted twice", rig.uninterrupted(rig.short, **options), truth)
        with ExitStack() as stack:
            ctx = stack.enter_context(rig.context(**options))
            prefill(ctx, rig.short)
            arena = stack.enter_context(Arena(6 * (lease_size(ctx.state_size(0)) + 65536)))
            state = stack.enter_context(ctx.snapshot(arena, tokens=rig.short))
            compare(f"{setting}, after the export", rig.rows(ctx), truth)
            compare(f"{setting}, restored", restored(state, ctx), truth)
            with rig.context(**options) as other:
                compare(f"{setting}, in another context", restored(state, other), truth)
            with state.fork() as fork:
                ctx.clear()
                compare(f"{setting}, of a fork", restored(fork, ctx), truth)
            with rig.context(n_seq_max=2, kv_unified=False, **options) as streams:
                compare(f"{setting}, in a stream", restored(state, streams, 1), truth)
            if setting != "flash attention":
                continue
            with Arena(2 * (lease_size(state.n_bytes) + 65536), pin=False) as pageable:
                with state.fork(pageable) as fork:
                    compare("from pageable memory", restored(fork, ctx), truth)
                file = rig.work / "state.skv"
                state.save(file)
                with Snapshot.load(file, pageable) as loaded:
                    compare("from a file", restored(loaded, ctx), truth)
                file.unlink()
            half = (len(rig.short) - 1) // 512 * 512  # where a decode call of the prefill ends
            with state.slice(half) as prefix:
                compare("a prefix", restored(prefix, ctx), rig.uninterrupted(rig.short[:half], **options))
            with state.slice(half) as prefix, state.delta(half) as tail, prefix.append(tail) as joined:
                compare("a prefix and a delta, joined", restored(joined, ctx), truth)
            ctx.clear()
            state.restore(ctx)
            with ctx.snapshot(arena, seq=None) as whole:
                whole.restore(ctx)
                compare("a whole context", rig.rows(ctx), truth)
            with rig.context(n_seq_max=3, **options) as shared:
                state.restore(shared)
                shared.copy_sequence(0, 1)
                found = rig.rows(shared, 1)
                told = nearness(found, truth)
                # Cells lie elsewhere than in the truth once another branch has been there: equal up to rounding.
                shared.copy_sequence(0, 2)
                beside = nearness(rig.rows(shared, 2), truth)
                notes.check("a sequence over shared cells: up to rounding", near(told) and near(beside),
                            bit_identical=identical(found, truth), first=told, second=beside)  # fmt: skip
            wrong = rig.uninterrupted(rig.other, **options)
            told = nearness(wrong, truth)
            notes.check("control: another document is told apart", far(told) and not identical(wrong, truth), **told)


def on_device(rig: Rig, notes: Notes, *, gpu: bool) -> None:
    """Snapshots that stay in device memory."""
    from swarmkv_ll.fanout import prefill

    truth = rig.uninterrupted(rig.short)
    with rig.context() as ctx, rig.context() as other:
        prefill(ctx, rig.short)
        with ctx.snapshot(where="device") as state:
            for name in ("once", "twice"):
                rig.rows(ctx)
                state.restore(ctx)
                found = rig.rows(ctx)
                notes.check(f"restored {name}: bit-identical", identical(found, truth), n_positions=len(truth))
            _refused(notes, "in another context", partial(state.restore, other))
            with ctx.snapshot(where="device"):
                _refused(notes, "once the next one was taken", partial(state.restore, ctx))


def _refused(notes: Notes, when: str, step: Callable[[], object]) -> None:
    from swarmkv_ll.errors import SwarmKVError

    try:
        step()
    except SwarmKVError as error:
        notes.check(f"refused {when}", True, message=str(error))
    else:
        notes.check(f"refused {when}", False)


def guard(rig: Rig, notes: Notes, *, gpu: bool) -> None:
    """Two threads, a context each, at the same time: the same logits as one after the other."""
    documents = [rig.short, np.roll(rig.short, 7)]
    wanted = [rig.uninterrupted(document) for document in documents]
    found: list[list[Rows]] = [[], []]

    def work(index: int) -> None:
        for _ in range(2):
            found[index].append(rig.uninterrupted(documents[index]))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in range(2):
        same = [identical(rows, wanted[index]) for rows in found[index]]
        notes.check(f"thread {index + 1}: bit-identical", len(same) == 2 and all(same), n_positions=len(wanted[index]))


def fan_out(rig: Rig, notes: Notes, *, gpu: bool) -> None:
    """One document, several branches, each strategy: the same answers; and how long each takes."""
    import swarmkv_ll
    from swarmkv_ll.fanout import STRATEGIES
    from swarmkv_ll.measure import interleaved

    size = rig.size
    prompts = [rig.question(i) for i in range(size.n_branches)]
    last: dict[str, Any] = {}

    def run(document: Tokens, strategy: Any) -> None:
        last[strategy] = swarmkv_ll.fan_out(rig.model, document, prompts, max_tokens=size.n_answer, strategy=strategy)

    for strategy in STRATEGIES:
        run(rig.short, strategy)
    answers = {strategy: [branch.tokens for branch in last[strategy].branches] for strategy in STRATEGIES}
    notes.check("snapshot: the tokens of reprefill", answers["snapshot"] == answers["reprefill"],
                n_branches=len(prompts), n_tokens=sum(map(len, answers["reprefill"])))  # fmt: skip
    gaps = [
        _gap(rig, prompts[i], a, b)
        for i, (a, b) in enumerate(zip(answers["shared"], answers["reprefill"], strict=True))
        if a != b
    ]
    # A batch of another shape rounds differently, so that two tokens that are as likely can change places.
    notes.check("shared: the tokens of reprefill, but for ties", all(gap <= 4 * MOST_ERROR**0.5 for gap in gaps),
                same=len(prompts) - len(gaps), n_branches=len(prompts), gaps=gaps)  # fmt: skip
    notes.check("branches differ", len({tuple(tokens) for tokens in answers["reprefill"]}) > 1)

    times = interleaved(2, **{s: partial(run, rig.document, s) for s in STRATEGIES})
    prefills = {strategy: last[strategy].prefill_ms / 1e3 for strategy in STRATEGIES}
    notes.figure("n_document", len(rig.document))
    notes.figure("n_branches", len(prompts))
    notes.figure("n_answer", size.n_answer)
    notes.figure("seconds", {strategy: spread(times[strategy]) for strategy in STRATEGIES})
    notes.figure("prefill_s", prefills)
    notes.figure("speedup", {s: times.ratio("reprefill", s) for s in STRATEGIES if s != "reprefill"})


def _gap(rig: Rig, question: Tokens, a: list[int], b: list[int]) -> float:
    """How far apart the first two tokens that differ are, in the row's standard deviations."""
    from swarmkv_ll.fanout import prefill

    eos = int(rig.model.metadata["tokenizer.ggml.eos_token_id"])
    a, b = [*a, eos], [*b, eos]  # one of them may have ended
    n_same = next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    with rig.context() as ctx:
        prefill(ctx, rig.short)
        ctx.decode(question)
        for token in b[:n_same]:
            ctx.decode([token])
        row = np.array(ctx.logits()).reshape(-1)
    return float(abs(row[a[n_same]] - row[b[n_same]]) / row.std())


def transfer(rig: Rig, notes: Notes, *, gpu: bool) -> None:
    """Raw copies between host and device, page-locked and pageable: the bound of every export and restore."""
    from swarmkv_ll import Arena
    from swarmkv_ll.measure import interleaved

    for n_mib in rig.size.transfer:
        n_bytes = n_mib << 20
        with ExitStack() as stack:
            device = stack.enter_context(device_memory(n_bytes))
            places = {}
            for name, pin in (("pinned", True), ("pageable", False)):
                arena = stack.enter_context(Arena(n_bytes, pin=pin))
                places[name] = stack.enter_context(arena.lease(n_bytes))
                notes.figure(name, {"pinned": arena.pinned, "buffer_type": arena.buffer_type})
            sent = np.random.default_rng(n_mib).integers(0, 256, n_bytes, np.uint8)
            places["pinned"].array[:] = sent
            places["pageable"].array[:] = 0
            device.put(places["pinned"])
            device.get(places["pageable"])
            same = bool(np.array_equal(places["pageable"].array, sent))
            notes.check(f"{n_mib} MiB there and back: the same bytes", same)
            steps = {
                f"{name} {way}": partial(getattr(device, way), place)
                for name, place in places.items()
                for way in ("put", "get")
            }
            interleaved(1, **steps)
            times = interleaved(rig.size.rounds, **steps)
            notes.figure(f"{n_mib} MiB", {step: spread(times[step], n_bytes) for step in steps})


@dataclass
class DeviceMemory:
    """A tensor in device memory, and the engine's copies to and from it."""

    base: ctypes.CDLL
    tensor: int
    n_bytes: int

    def put(self, lease: Any) -> None:
        self.base.ggml_backend_tensor_set(self.tensor, self._address(lease), 0, self.n_bytes)

    def get(self, lease: Any) -> None:
        self.base.ggml_backend_tensor_get(self.tensor, self._address(lease), 0, self.n_bytes)

    def _address(self, lease: Any) -> int:
        if lease.n_bytes < self.n_bytes:
            raise ValueError(f"{lease.n_bytes} bytes cannot take {self.n_bytes}")
        return int(lease.array.ctypes.data)


class _InitParams(ctypes.Structure):
    """`struct ggml_init_params`."""

    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


@contextmanager
def device_memory(n_bytes: int) -> Iterator[DeviceMemory]:
    """Memory of the GPU, or of the CPU where there is none. The binding declares no tensors: nothing else needs them."""
    from swarmkv_ll.ffi import LIB_DIR, C, ffi
    from swarmkv_ll.runtime import gpu_device

    base = ctypes.CDLL(str(LIB_DIR / "libggml-base.so"))  # the one that is loaded already
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    for name, result, arguments in (
        ("ggml_init", pointer, [_InitParams]),
        ("ggml_free", None, [pointer]),
        ("ggml_new_tensor_1d", pointer, [pointer, ctypes.c_int, ctypes.c_int64]),
        ("ggml_backend_tensor_alloc", ctypes.c_int, [pointer, pointer, pointer]),
        ("ggml_backend_tensor_set", None, [pointer, pointer, size, size]),
        ("ggml_backend_tensor_get", None, [pointer, pointer, size, size]),
    ):
        getattr(base, name).restype, getattr(base, name).argtypes = result, arguments
    device = gpu_device() or C.ggml_backend_dev_by_type(C.GGML_BACKEND_DEVICE_TYPE_CPU)
    buffer = C.ggml_backend_buft_alloc_buffer(C.ggml_backend_dev_buffer_type(device), n_bytes + 4096)
    if buffer == ffi.NULL:
        raise MemoryError(f"the device has no {n_bytes:,} bytes")
    ctx = base.ggml_init(_InitParams(4096, None, True))
    try:
        i8 = 24  # GGML_TYPE_I8
        tensor = base.ggml_new_tensor_1d(ctx, i8, n_bytes)
        at = [int(ffi.cast("uintptr_t", p)) for p in (buffer, C.ggml_backend_buffer_get_base(buffer))]
        if base.ggml_backend_tensor_alloc(at[0], tensor, at[1]):
            raise MemoryError("the engine could not place a tensor")
        yield DeviceMemory(base, tensor, n_bytes)
    finally:
        base.ggml_free(ctx)
        C.ggml_backend_buffer_free(buffer)


def copies(rig: Rig, notes: Notes, *, gpu: bool) -> None:
    """Export and restore of a real state, page-locked and pageable, beside raw copies of as many bytes; fork; np.copyto."""
    from swarmkv_ll import Arena
    from swarmkv_ll.arena import lease_size
    from swarmkv_ll.fanout import prefill
    from swarmkv_ll.measure import interleaved

    with ExitStack() as stack:
        ctx = stack.enter_context(rig.context(len(rig.document)))
        prefill(ctx, rig.document)
        n_bytes = ctx.state_size(0)
        device = stack.enter_context(device_memory(n_bytes))
        room = lease_size(n_bytes)
        pinned = stack.enter_context(Arena(3 * room))
        pageable = stack.enter_context(Arena(3 * room, pin=False))
        state = stack.enter_context(ctx.snapshot(pinned))
        copy = stack.enter_context(state.fork(pageable))
        raw = {
            name: stack.enter_context(arena.lease(n_bytes))
            for name, arena in (("pinned", pinned), ("pageable", pageable))
        }
        source = np.empty(n_bytes, np.uint8)
        source[:] = 1
        steps: dict[str, Callable[[], object]] = {"copyto": lambda: np.copyto(raw["pageable"].array, source)}
        for name, arena, taken in (("pinned", pinned, state), ("pageable", pageable, copy)):
            steps |= {
                f"{name} fork": partial(taken.fork, arena),
                f"{name} export": partial(ctx.snapshot, arena),
                f"{name} get": partial(device.get, raw[name]),
                f"{name} restore": partial(taken.restore, ctx),
                f"{name} put": partial(device.put, raw[name]),
            }
        interleaved(1, **steps)
        times = interleaved(rig.size.rounds, **steps)
        notes.figure("n_tokens", state.n_tokens)
        notes.figure("n_bytes", n_bytes)
        notes.figure("times", {step: spread(times[step], n_bytes) for step in steps})
        shares = {}
        for name in ("pinned", "pageable"):
            shares[f"{name} export ÷ raw copy"] = times.ratio(f"{name} get", f"{name} export")
            shares[f"{name} restore ÷ raw copy"] = times.ratio(f"{name} put", f"{name} restore")
            shares[f"{name} fork ÷ np.copyto"] = times.ratio("copyto", f"{name} fork")
        for way in ("export", "restore"):
            shares[f"{way}: pinned ÷ pageable"] = times.ratio(f"pageable {way}", f"pinned {way}")
        notes.figure("speed", shares)
        with ctx.snapshot(pageable) as again:  # of what was restored last
            notes.check("two exports: the same bytes", np.array_equal(state.array, again.array), n_bytes=n_bytes)


def activation(rig: Rig, notes: Notes, *, gpu: bool) -> None:
    """A branch's first logits: the document again, or its state restored, or kept in the context; with their bound."""
    from swarmkv_ll import Arena
    from swarmkv_ll.arena import lease_size
    from swarmkv_ll.fanout import prefill
    from swarmkv_ll.measure import interleaved

    question = rig.question(0)
    with ExitStack() as stack:
        ctx = stack.enter_context(rig.context(len(rig.document)))
        prefill(ctx, rig.document)
        n_tokens = ctx.position(0)
        arena = stack.enter_context(Arena(2 * lease_size(ctx.state_size(0))))
        state = stack.enter_context(ctx.snapshot(arena))

        def first_logits() -> None:
            ctx.decode(question)
            ctx.logits()

        def reprefill() -> None:
            ctx.clear()
            prefill(ctx, rig.document)
            first_logits()

        def forked() -> None:
            with state.fork() as fork:
                fork.restore(ctx)
                first_logits()

        def restored() -> None:
            state.restore(ctx)
            first_logits()

        def held() -> None:
            ctx.remove(0, n_tokens)
            first_logits()

        def bound() -> float:
            ctx.remove(0, n_tokens)
            begin = perf_counter()
            first_logits()
            return perf_counter() - begin

        steps: dict[str, Callable[[], object]] = {
            "forked": forked, "restored": restored, "held": held, "bound": bound,
        }  # fmt: skip
        kept = stack.enter_context(ctx.snapshot(where="device"))

        def from_device() -> None:
            kept.restore(ctx)
            first_logits()

        steps["from device memory"] = from_device
        interleaved(1, **steps)
        times = interleaved(rig.size.slow_rounds, reprefill=reprefill, **steps)
    notes.figure("n_document", n_tokens)
    notes.figure("n_question", len(question))
    notes.figure("times", {step: spread(seconds) for step, seconds in times.items()})
    notes.figure("reprefill_tokens_per_s", (n_tokens + len(question)) / times.median("reprefill"))
    notes.figure("speedup", {step: times.ratio("reprefill", step) for step in steps})


STEPS: dict[str, Callable[..., None]] = {
    "devices": devices,
    "reference": reference,
    "accuracy": accuracy,
    "identity": identity,
    "on-device": on_device,
    "guard": guard,
    "fan-out": fan_out,
    "transfer": transfer,
    "copies": copies,
    "activation": activation,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("step", choices=STEPS)
    parser.add_argument("--size", choices=SIZES, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    notes = Notes(args.out)
    notes.write()
    sys.path.append(str(ROOT))  # after what PYTHONPATH says
    from swarmkv_ll import Model

    before = n_free()
    with Model(args.model) as model:
        if args.step == "devices" and args.size == "gpu":
            taken = before - n_free()
            notes.check("the weights are on the device", taken > model.n_bytes // 2,
                        n_bytes=model.n_bytes, device_bytes_taken=taken)  # fmt: skip
        STEPS[args.step](Rig(SIZES[args.size], model, args.work), notes, gpu=args.size == "gpu")


if __name__ == "__main__":
    main()
