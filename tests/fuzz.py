"""Fuzz state blobs, `.skv` files and llama.cpp's sequence files, up to a restore into a living context.

    python tests/fuzz.py --cases 20000 --seed 1 --jobs 2

docs/fuzz.md tells what is done to the inputs (`fuzz_inputs`) and what has to hold afterwards. A seed and a case number
say everything: ``--only CASE`` repeats one case, ``--only A-B`` some in a row. The engine runs in worker processes, so
that an abort, a crash or a hang of one is a finding like any other.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import io
import json
import mmap
import os
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import fuzz_inputs as inputs
import numpy as np
import numpy.typing as npt
import tiny_models
from fuzz_inputs import Bytewise

from swarmkv_ll import Arena, Context, Model, Sampler, Snapshot, blob, inspection
from swarmkv_ll.blob import Layout, Parts, StateBlob
from swarmkv_ll.errors import (
    ArenaExhaustedError,
    BlobError,
    ContextFullError,
    IncompatibleSnapshotError,
    InvalidArgumentError,
    NoLogitsError,
    PartialRemovalError,
    SnapshotCorruptError,
    SnapshotFileError,
    SwarmKVError,
)
from swarmkv_ll.ffi import C, ffi

BATCH = 64
"""Cases between two resets of a context, and between two full checks of it."""

MEASURED = 16
"""One batch of so many runs under `tracemalloc`, which in CPython 3.11 leaks some 100 KB each time it is stopped."""

SPARE = 96 << 20
"""Bytes of address space that a worker may take beyond what it has when a batch begins (`RLIMIT_AS`)."""

ALLOWED = 96 << 10, 48
"""Bytes that reading may take at its peak: so many, and so many times the size of the input.

The factor is what Python objects take for JSON (an empty list is 2 bytes there and 64 here) and for a table's entries;
a count that is believed asks for a thousand times as much.
"""

READ = (SnapshotFileError, ArenaExhaustedError)
IMPORT = (*READ, IncompatibleSnapshotError)
EDIT = (InvalidArgumentError, PartialRemovalError)
RESTORE = (IncompatibleSnapshotError, SnapshotCorruptError)

WORDS = (3, 141, 59)
"""A branch."""

OTHERS = (1, 2)
"""Sequences that hold something else while snapshots go into 0 and 3."""


class FindingError(Exception):
    """Something that must not happen has happened."""


def text(n: int, seed: int) -> npt.NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, 256, n).astype(np.int32)


# ── what is fuzzed ───────────────────────────────────────────────────────────────────────────────────

WRITERS: dict[str, Callable[[Path], None]] = {
    "llama": lambda path: tiny_models.write_llama(path, n_layer=2, n_head_kv=1),
    "uneven": lambda path: tiny_models.write_deci(path, n_head_kv=(2, 1)),
    "mrope": lambda path: tiny_models.write_qwen2vl(path, n_layer=2),
    "mla": lambda path: tiny_models.write_deepseek2(path, n_layer=2),
    "window": lambda path: tiny_models.write_gemma2(path, n_layer=2),
    "recurrent": lambda path: tiny_models.write_mamba(path, n_layer=2),
    "hybrid": lambda path: tiny_models.write_jamba(path, n_layer=2),
    "hybrid-window": lambda path: tiny_models.write_lfm2(path, n_layer=2),
    "shortconv": lambda path: tiny_models.write_lfm2(path, n_layer=2, window=0),
}


@dataclass(frozen=True)
class Target:
    """A model and a kind of context."""

    model: str
    flash_attn: bool = True
    unified: bool = True
    type_k: str = "f16"
    type_v: str = "f16"
    swa_full: bool = True

    def __str__(self) -> str:
        parts = [self.model, self.type_k, self.type_v, "flash" if self.flash_attn else "plain"]
        parts.append("unified" if self.unified else "streams")
        return " ".join(parts) + ("" if self.swa_full else ", window only")


TARGETS = [
    Target("llama"),
    Target("llama", flash_attn=False),
    Target("llama", unified=False),
    Target("llama", flash_attn=False, unified=False),
    Target("llama", type_k="f32", type_v="f32", flash_attn=False),
    Target("llama", type_k="bf16", type_v="bf16"),
    Target("llama", type_k="q8_0", type_v="q8_0"),
    Target("llama", type_k="q4_0", type_v="q4_0", unified=False),
    Target("llama", type_k="q8_0", flash_attn=False),
    Target("uneven"),
    Target("uneven", flash_attn=False, unified=False),
    Target("mrope"),
    Target("mrope", flash_attn=False, unified=False),
    Target("mla"),
    Target("mla", flash_attn=False, unified=False),
    Target("window"),
    Target("window", swa_full=False),
    Target("window", flash_attn=False, unified=False, swa_full=False),
    Target("recurrent"),
    Target("recurrent", unified=False),
    Target("hybrid"),
    Target("hybrid", flash_attn=False, unified=False),
    Target("hybrid-window", swa_full=False),
    Target("hybrid-window", flash_attn=False, unified=False),
    Target("shortconv"),
]


@dataclass
class Item:
    """A good state, in every form."""

    name: str
    whole: bool
    sequences: dict[int, int]
    plain: inputs.Plain
    parts: Parts
    shape: Any
    blob: Bytewise
    meta: dict[str, Any]
    arrays: dict[str, npt.NDArray[Any]]
    file: Bytewise
    llama: Bytewise | None
    identity: Any


def make_item(name: str, snapshot: Snapshot) -> Item:
    data, layout = snapshot.array.tobytes(), snapshot._record.layout
    contents = snapshot._record.contents(np.frombuffer(data, np.uint8))
    file = snapshot.to_bytes()
    fields = inputs.fields_of_blob(data, layout)
    llama = None
    if not layout.whole and not snapshot.begin:
        tokens = snapshot.tokens if isinstance(snapshot.tokens, np.ndarray) else np.empty(0, np.int32)
        n = 4 * len(tokens)
        llama = fields.shifted(n + 4, inputs.llama_file(tokens, data), [(0, 4), (4, 4), (8, 4), (12, n)])
    arrays = {key: np.array(array) for key, array in contents.arrays.items()}
    whole, sequences = layout.whole, dict(layout.sequences)
    plain = inputs.take_apart(data, layout)
    return Item(
        name,
        whole,
        sequences,
        plain,
        layout.parts,
        layout.shape,
        fields,
        contents.meta,
        arrays,
        inputs.fields_of_file(file),
        llama,
        snapshot.identity,
    )


# ── a context under fire ─────────────────────────────────────────────────────────────────────────────


class Place:
    """A context with three texts: 0 is where most snapshots go, 1 and 2 must never notice. 3 is empty."""

    def __init__(self, target: Target, model: Model, arena: Arena) -> None:
        self.ctx: Context = model.context(
            512 if target.unified else 1024,
            4,
            kv_unified=target.unified,
            flash_attn=target.flash_attn,
            type_k=target.type_k,
            type_v=target.type_v,
            swa_full=target.swa_full,
            n_batch=64,
            n_ubatch=32,
            n_threads=1,
        )
        self.texts = {1: text(10, 1), 2: text(11, 2), 0: text(12, 3)}
        self.buffer = np.empty(1 << 18, np.uint8)
        self.pristine = True
        self.truth: dict[int, bytes] = {}
        self.reset()
        self.truth = {seq: self.export(seq) for seq in self.texts}
        self.good = self.ctx.snapshot(arena, 0, tokens=self.texts[0])
        assert self.good.last_logits is not None
        self.row = np.array(self.good.last_logits)
        self.branches = {seq: self.branch(seq) for seq in self.texts}

    def reset(self) -> None:
        """Everything anew."""
        self.ctx.clear()
        for seq, tokens in self.texts.items():
            self.ctx.decode(tokens, seq=seq)
        self.pristine = True

    def export(self, seq: int) -> bytes:
        """A sequence's state, by the engine alone."""
        pointer = self.ctx._ptr
        data = ffi.from_buffer("uint8_t[]", self.buffer)
        n = C.llama_state_seq_get_data(pointer, data, len(self.buffer), seq)
        return self.buffer[:n].tobytes()

    def branch(self, seq: int) -> npt.NDArray[np.float32]:
        """Logits of a branch of a sequence, which stays as it is. Sequence 3 is empty afterwards."""
        self.ctx.copy_sequence(seq, 3)
        self.ctx.decode(WORDS, seq=3)
        row: npt.NDArray[np.float32] = self.ctx.logits(3).copy()
        self.ctx.remove(3)
        return row

    def ends(self) -> tuple[int, ...]:
        memory = self.ctx._memory
        pairs = [(C.llama_memory_seq_pos_min(memory, s), C.llama_memory_seq_pos_max(memory, s)) for s in range(4)]
        return tuple(int(end) for pair in pairs for end in pair)

    def now(self) -> dict[str, Any]:
        """All that a refused call must not change, as far as it costs little."""
        cells, outputs = self.ctx._cells, self.ctx._outputs
        return {
            "positions": self.ends(),
            "the ledger": cells and (cells._state, cells.exact),  # which is replaced, never changed
            "logits": (dict(outputs._row_of), {seq: id(row) for seq, row in outputs._restored.items()}),
        }

    def changed(self, before: dict[str, Any]) -> str:
        """What is no longer as it was."""
        now = self.now()
        same = {
            what: now[what] is was or (now[what][0] is was[0] and now[what][1] == was[1])
            if what == "the ledger"
            else now[what] == was
            for what, was in before.items()
        }
        return ", ".join(what for what, ok in same.items() if not ok)

    def check_bytes(self, seqs: tuple[int, ...]) -> None:
        for seq in seqs:
            if self.export(seq) != self.truth[seq]:
                raise FindingError(f"sequence {seq} no longer holds what it held")

    def check(self) -> None:
        """The whole truth, and the logits of every text."""
        if self.ctx.position(3):
            self.ctx.remove(3)
        self.check_bytes((1, 2, 0))
        for seq in self.texts:
            row, wanted = self.branch(seq), self.branches[seq]
            # Where cells lie elsewhere, sums are taken in another order.
            same = np.array_equal(row, wanted) if self.pristine else bool(np.abs(row - wanted).max() < 0.05)
            if not same:
                off = float(np.nanmax(np.abs(row - wanted))) if not np.isnan(row).all() else np.nan
                raise FindingError(f"a branch of sequence {seq} has other logits than before, off by {off:g}")


class Bench:
    """A target, its good states, and a context for what is restored.

    Without flash attention the engine multiplies also what it leaves out, by zero: infinities and NaN in one sequence's
    cells reach all that share the cache. It empties a recurrent state by multiplying it by zero, too, so that NaN stays.
    Such values are the file's own business, but they go into a context of their own.
    """

    def __init__(self, target: Target, model: Model, arena: Arena) -> None:
        self.target, self.model, self.arena = target, model, arena
        self.place = Place(target, model, arena)
        kinds = model.capabilities
        mixes = not target.flash_attn or kinds.recurrent or kinds.hybrid
        self.wild = Place(target, model, arena) if mixes else self.place
        self.items = list(self._items())

    def _items(self) -> Iterator[Item]:
        place, arena, kinds = self.place, self.arena, self.model.capabilities
        ctx = place.ctx
        with ctx.snapshot(arena, 0, tokens=place.texts[0]) as named:
            yield make_item("named", named)
        ctx.clear()
        ctx.decode(place.texts[0], seq=2, logits="none")
        with ctx.snapshot(arena, 2) as bare:
            yield make_item("bare", bare)
        long = text(50, 4)
        ctx.decode(long, seq=0)
        with ctx.snapshot(arena, 0, tokens=long) as snapshot:
            yield make_item("long", snapshot)
            if not (kinds.recurrent or kinds.hybrid):
                with snapshot.delta(30) as tail:
                    yield make_item("delta", tail)
        if kinds.attention_only:
            ctx.remove(0, 10, 20)
            with ctx.snapshot(arena, 0) as holes:
                yield make_item("holes", holes)
        place.reset()
        ctx.copy_sequence(1, 3)
        with ctx.snapshot(arena, None, tokens={1: place.texts[1], 3: place.texts[1]}) as whole:
            yield make_item("context", whole)
        place.reset()
        with ctx.snapshot(arena, None) as whole:
            yield make_item("bare context", whole)


# ── one case ─────────────────────────────────────────────────────────────────────────────────────────


class OddStream:
    """Gives the first bytes a few at a time, the others in some pieces; by `readinto` or by `read`."""

    def __init__(self, data: bytes, rng: Random) -> None:
        self.file, self.left = io.BytesIO(data), rng.choice((0, 10, 200))
        self.few, self.many = rng.choice((1, 3, 7)), rng.choice((len(data) // 10 + 1, 4096, 1 << 30))

    def most(self, n: int) -> int:
        if self.left > 0:
            self.left -= min(n, self.few)
            return min(n, self.few)
        return min(n, self.many)

    def read(self, n: int) -> bytes:
        return self.file.read(self.most(n))


class OddStreamInto(OddStream):
    def readinto(self, buffer: memoryview) -> int:
        return self.file.readinto(buffer[: self.most(len(buffer))])


BLOCKS = {kind.name: kind.n_bytes for kind in blob.GGML_TYPES.values()}


def wildness(state: StateBlob) -> bool:
    """Whether a state holds numbers that no decode leaves behind."""

    def wild(values: npt.NDArray[Any], name: str) -> bool:
        if name == "bf16":
            values = (values.astype(np.uint32) << 16).view(np.float32)
        elif values.dtype == np.uint8:  # each block begins with its scale
            values = values.reshape(-1, BLOCKS[name])[:, :2].copy().view(np.float16)
        with np.errstate(invalid="ignore"):
            return bool(values.size) and not bool((np.abs(values.astype(np.float32)) < 1e6).all())

    for cache in state.caches:
        for stream in cache:
            for layer in stream.layers:
                if wild(layer.k, layer.k_type) or (layer.v is not None and wild(layer.v, layer.v_type)):
                    return True
    memory = state.recurrent
    return memory is not None and any(wild(values, "f32") for values in (*memory.r, *memory.s))


class Fuzzer:
    """Runs cases, and says what came of them."""

    def __init__(self, seed: str, folder: Path, broken: str = "") -> None:
        self.seed, self.folder, self.broken = seed, folder, broken
        self.outcomes: Counter[str] = Counter()
        self.peak = (0, 0.0)  # bytes, and share of what is allowed
        self.arena = Arena(4 << 20)
        models = {name: Model(folder / f"{name}.gguf") for name in WRITERS}
        self.benches = [Bench(target, models[target.model], self.arena) for target in TARGETS]
        self.items = [item for bench in self.benches for item in bench.items]
        self.kin: dict[str, list[Item]] = {}  # by model
        for bench in self.benches:
            self.kin.setdefault(bench.target.model, []).extend(bench.items)
        self.samplers = [Sampler(), Sampler(0.8, top_k=40, top_p=0.9, min_p=0.05, seed=1), Sampler(1.0, seed=2)]
        self.n_leases = len(self.arena._leases)
        self.guarded = np.empty(8 << 20, np.uint8)
        self.notes: list[str] = []
        self.unchecked: list[int] = []

    # ── batches ──────────────────────────────────────────────────────────────────────────────────────

    def batch(self, first: int, stop: int, begin: Callable[[int], None]) -> Iterator[dict[str, Any]]:
        """Run cases of one batch, from a context made anew; yields findings."""
        bench = self.bench = self.benches[first // BATCH % len(self.benches)]
        bench.place.reset()
        if bench.wild is not bench.place:
            bench.wild.ctx.clear()
        self.unchecked = []
        if first // BATCH % MEASURED == 0:
            tracemalloc.start(1)
        for case in range(first, stop):
            begin(case)
            self.unchecked.append(case)
            last = case == stop - 1
            try:
                self.run(case)
                if last or case % BATCH == BATCH - 1:
                    bench.place.check()
                    self.arena.check_integrity()
                elif case % 8 == 7:
                    bench.place.check_bytes(OTHERS)
            except Exception as error:
                yield self.report(case, error)
                bench.place.reset()
                self.unchecked = []
                gc.collect()
                self.n_leases = len(self.arena._leases)
        tracemalloc.stop()

    def report(self, case: int, error: Exception) -> dict[str, Any]:
        of_many = any(words in str(error) for words in ("than before", "what it held"))
        cases = f"{self.unchecked[0]}-{case}" if of_many else str(case)
        return {
            "event": "finding",
            "case": case,
            "only": cases,
            "target": str(self.bench.target),
            "notes": self.notes,
            "error": f"{type(error).__name__}: {error}"[:1000],
            "traceback": "".join(traceback.format_exception(error))[-6000:],
        }

    def count(self, door: str, outcome: str) -> None:
        self.outcomes[f"{door}: {outcome}"] += 1

    # ── a case ───────────────────────────────────────────────────────────────────────────────────────

    def run(self, case: int) -> None:
        rng = self.rng = Random(f"{self.seed}:{case}")
        self.notes = []
        bench = self.bench
        item = rng.choice(rng.choices((bench.items, self.kin[bench.target.model], self.items), (65, 20, 15))[0])
        other = rng.choice(bench.items) if rng.random() < 0.5 else rng.choice(self.items)
        if self.broken in ("abort", "hang") and case % BATCH == BATCH // 2:
            os.abort() if self.broken == "abort" else threading.Event().wait()
        doors = (self.state, self.beside, self.file, self.table, self.llama, self.tampered, self.sweep, self.intact)
        (door,) = rng.choices(doors, (92, 32, 20, 12, 24, 12, 1, 5))
        self.notes.append(f"{door.__name__} of {item.name}")
        door(item, other)
        if len(self.arena._leases) != self.n_leases:
            raise FindingError(f"{len(self.arena._leases) - self.n_leases} leases were kept")

    def state(self, item: Item, other: Item) -> None:
        """A damaged or an odd state, bare and in a file whose checksums are right."""
        rng = self.rng
        parts = item.parts
        if rng.random() < 0.5:
            data, note = inputs.mutate(rng, item.blob, other.blob)
        else:
            data, parts, note = inputs.rebuild(rng, item.plain)
        self.notes.append(note)
        if rng.random() < 0.05:
            parts = Parts(rng.randrange(3), rng.random() < 0.5, rng.random() < 0.5, rng.random() < 0.5)
        parsed = self.parsed(data, parts)
        if rng.random() < 0.25:
            self.parsed(data, None)
        if parsed is not None:
            self.edited(parsed)
        self.restored(item, self.wrapped(item, data, parts, parsed), "state")

    def wrapped(self, item: Item, data: bytes, parts: Parts, parsed: StateBlob | None) -> bytes:
        """A file around a state, which says of it what it is, so far as it can be told."""
        meta = item.meta | {"parts": asdict(parts)}
        if parsed is not None:
            layout = parsed.layout
            meta["sequences"] = {str(seq): end for seq, end in layout.sequences.items()}
            meta["kind"] = "context" if layout.whole else "sequence"
            if meta["begin"]:
                meta["begin"] = int(layout.positions.min(initial=2**31 - 1))
        if self.rng.random() < 0.9:
            meta["identity"] = self.bench.items[0].meta["identity"]  # so that only the layout is against it
        arrays = {}
        if parsed is not None:
            for name, array in item.arrays.items():
                seq = int(name.partition(".")[2])
                end = parsed.layout.sequences.get(seq, -1)
                if end >= 0 if name.startswith("logits") else end == len(array):
                    arrays[name] = array
        return inputs.seal(inputs.sections_of(meta, arrays, data))

    def beside(self, item: Item, other: Item) -> None:
        """What stands beside a good state."""
        rng = self.rng
        meta: Any = item.meta
        arrays = item.arrays
        kind = rng.random()
        if kind < 0.55:
            meta, note = inputs.mutate_meta(rng, meta)
            self.notes.append(note)
        elif kind < 0.7:
            meta, note = inputs.mutate_text(rng, json.dumps(meta).encode("ascii"))
            self.notes.append(note)
        if kind > 0.7 or rng.random() < 0.2:
            arrays, note = inputs.mutate_arrays(rng, arrays, list(item.sequences), self.bench.model.n_vocab)
            self.notes.append(note)
        data = item.blob.data if rng.random() < 0.95 else other.blob.data
        self.restored(item, inputs.seal(inputs.sections_of(meta, arrays, data)), "beside")

    def file(self, item: Item, other: Item) -> None:
        """A damaged file: its checksums are to tell."""
        data, note = inputs.mutate(self.rng, item.file, other.file)
        self.notes.append(note)
        self.restored(item, data, "file")

    def table(self, item: Item, other: Item) -> None:
        """A damaged head or table, with checksums that are right."""
        sections = inputs.sections_of(item.meta, item.arrays, item.blob.data)
        data, note = inputs.damaged_table(self.rng, sections)
        self.notes.append(note)
        self.restored(item, data, "table")

    def intact(self, item: Item, other: Item) -> None:
        """Nothing is wrong."""
        parsed = self.parsed(item.blob.data, item.parts)
        if parsed is None:
            raise FindingError("a good blob was refused")
        self.edited(parsed)
        self.restored(item, item.file.data, "intact")

    def llama(self, item: Item, other: Item) -> None:
        """llama.cpp's file, which has no checksum at all."""
        rng = self.rng
        of = item.llama or next(one.llama for one in self.bench.items if one.llama)
        if rng.random() < 0.7:
            data, note = inputs.mutate(rng, of, other.llama or of)
        else:
            found, _, note = inputs.rebuild(rng, item.plain)
            data = inputs.llama_file(text(rng.choice((0, 12)), 3), found)
        self.notes.append(note)
        path = self.folder / f"{os.getpid()}.bin"
        path.write_bytes(data)
        with self.bounded(len(data)):
            made = self.attempt(IMPORT, lambda: Snapshot.import_llama(path, self.bench.place.ctx, self.arena))
        self.count("llama", "read" if isinstance(made, Snapshot) else type(made).__name__)
        if rng.random() < 0.05:
            self.looked_at(path, len(data))
        if isinstance(made, Snapshot):
            with made:
                self.into_context(made, "llama")

    def tampered(self, item: Item, other: Item) -> None:
        """Bytes that change in memory, after all was checked."""
        rng = self.rng
        try:
            made = Snapshot.from_bytes(item.file.data, self.arena)
        except SwarmKVError as error:
            raise FindingError(f"a good file was refused: {error}") from error
        with made:
            view = made.lease.array
            for _ in range(rng.choice((1, 1, 3))):
                at, n = item.blob.field(rng) if rng.random() < 0.8 else (rng.randrange(len(view)), 1)
                view[at + rng.randrange(n)] ^= rng.randrange(1, 256)
            del view
            done = self.attempt(RESTORE, lambda: self._other_of(made, rng), (BlobError, *EDIT, *READ, *RESTORE))
            if isinstance(done, Snapshot):
                done.release()
            self.into_context(made, "tampered")

    def sweep(self, item: Item, other: Item) -> None:
        """Cut at every border of fields, and beside it."""
        borders = item.blob.borders
        for border in self.rng.sample(borders, min(len(borders), 20)):
            for at in (border - 1, border, border + 1):
                if not 0 <= at < len(item.blob.data):
                    continue
                found = self.parsed(item.blob.data[:at], item.parts)
                # How many layers have a recurrent state is not written: half of them are as many R as S as well.
                if found is not None and found.layout.shape == item.shape:
                    raise FindingError(f"a blob cut at {at} was taken")
        borders = item.file.borders
        for border in self.rng.sample(borders, min(len(borders), 20)):
            for at in (border - 1, border, border + 1):
                if 0 <= at < len(item.file.data):
                    cut = item.file.data[:at]
                    made = self.attempt(READ, lambda cut=cut: Snapshot.from_bytes(cut, self.arena))
                    if isinstance(made, Snapshot):
                        raise FindingError(f"a file cut at {at} was taken")
        self.count("sweep", "refused")

    # ── what is done with an input ───────────────────────────────────────────────────────────────────

    def attempt(
        self, allowed: tuple[type[Exception], ...], call: Callable[[], Any], more: tuple[type[Exception], ...] = ()
    ) -> Any:
        """What a call gives, or the exception by which it may refuse."""
        try:
            return call()
        except (*allowed, *more) as error:
            return error.with_traceback(None)

    @contextlib.contextmanager
    def bounded(self, n_bytes: int) -> Iterator[None]:
        """Reading takes little more memory than what is read has."""
        if not tracemalloc.is_tracing():
            yield
            return
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        yield
        peak = tracemalloc.get_traced_memory()[1] - before
        allowed = ALLOWED[0] + ALLOWED[1] * n_bytes
        self.peak = max(self.peak[0], peak), max(self.peak[1], peak / allowed)
        if peak > allowed:
            raise FindingError(f"{peak:,} bytes were allocated to read {n_bytes:,}")

    def parsed(self, data: bytes, parts: Parts | None) -> StateBlob | None:
        with self.bounded(len(data)):
            found = self.attempt((BlobError,), lambda: blob.parse(data, parts))
        self.count("parse", "taken" if isinstance(found, StateBlob) else "BlobError")
        if not isinstance(found, StateBlob):
            return None
        layout: Layout = found.layout
        if layout.n_bytes != len(data) or sum(len(had) for _, had, _ in layout.bookkeeping) > len(data):
            raise FindingError("a layout of another size")
        if self.rng.random() < 0.3:
            for cache in found.caches:
                for stream in cache:
                    for layer in stream.layers:
                        assert len(layer.k) == len(stream.pos)
                        assert layer.v is None or len(layer.v) == len(stream.pos)
                    assert len(stream.seq_id) == len(stream.pos)
            if (memory := found.recurrent) is not None:
                assert all(len(rows) == len(memory.pos) for rows in (*memory.r, *memory.s))
            layout.check(memoryview(data))
        return found

    def edited(self, state: StateBlob) -> None:
        """An edit of it, written between guards."""
        rng = self.rng
        window = rng.choice((0, 0, 32, 1, 2**31 - 1, rng.randrange(60)))
        end = max(state.sequences.values(), default=0)
        number = rng.choice((0, 1, -1, 2**31, end, end - 1, rng.randint(0, max(end, 1)), rng.randint(0, 20)))
        edits: dict[str, Callable[[], blob.Edit]] = {
            "slice": lambda: blob.slice(state, number, window=window),
            "delta": lambda: blob.delta(state, number),
            "convert": lambda: blob.convert(
                state,
                n_stream=rng.choice((None, 1, 1, 4, 256, 0, -1, 2**40)),
                v_transposed=rng.choice((None, True, False)),
            ),
            "extract": lambda: blob.extract(state, rng.choice((0, 1, 3, -1, *state.sequences)), window=window),
            "append": lambda: blob.append(
                self._cut(state, number), self._cut(state, number, after=True), window=window
            ),
            "append wrong": lambda: blob.append(state, self._cut(state, number, after=True), window=window),
        }
        name = rng.choice(list(edits))
        with self.bounded(state.n_bytes + 8192):  # 256 streams are asked for by the caller
            edit = self.attempt(EDIT, edits[name])
        self.count(name, "planned" if isinstance(edit, blob.Edit) else type(edit).__name__)
        if not isinstance(edit, blob.Edit):
            return
        before = state.data.tobytes()
        if edit.n_bytes > len(self.guarded) - 8192:
            return
        front = rng.choice((64, 65, 1, 4096))
        region = self.guarded[: front + edit.n_bytes + 256]
        region[:] = 0xA5
        more = rng.choice((0, 0, 7))
        made = edit.write(region[front : front + edit.n_bytes + more])
        if (region[:front] != 0xA5).any() or (region[front + edit.n_bytes :] != 0xA5).any():
            raise FindingError(f"{name} wrote beyond its {edit.n_bytes} bytes")
        if state.data.tobytes() != before:
            raise FindingError(f"{name} changed what it read")
        if made.n_bytes != edit.n_bytes:
            raise FindingError(f"{name} is {made.n_bytes} bytes, not {edit.n_bytes}")

    @staticmethod
    def _cut(state: StateBlob, at: int, *, after: bool = False) -> StateBlob:
        edit = blob.delta(state, at) if after else blob.slice(state, at)
        return edit.write() if edit.n_bytes < 4 << 20 else state

    def restored(self, item: Item, data: bytes, door: str) -> None:
        """Read a file, in one way or two, and put what it holds into the context."""
        rng = self.rng
        path = self.folder / f"{os.getpid()}.bin"

        def load() -> Snapshot:
            path.write_bytes(data)
            return Snapshot.load(path, self.arena)

        readers: dict[str, Callable[[], Snapshot]] = {
            "bytes": lambda: Snapshot.from_bytes(data, self.arena),
            "stream": lambda: Snapshot.read_from(OddStreamInto(data, rng), self.arena),
            "read": lambda: Snapshot.read_from(OddStream(data, rng), self.arena),
            "file": load,
        }
        names = rng.sample(list(readers), rng.choice((1, 1, 1, 1, 2)))
        found = []
        for name in names:
            with self.bounded(len(data)):
                made = self.attempt(READ, readers[name])
            self.count(door, "read" if isinstance(made, Snapshot) else type(made).__name__)
            found.append(made)
        if rng.random() < 0.05:
            path.write_bytes(data)
            self.looked_at(path, len(data))
        taken = [made for made in found if isinstance(made, Snapshot)]
        if len({isinstance(made, Snapshot) for made in found}) > 1 and "stream" not in names and "read" not in names:
            raise FindingError(f"{names}: one takes it and the other does not")
        for made in taken[1:]:
            made.release()
        if taken:
            with taken[0] as made:
                if rng.random() < 0.15:
                    self.copied(made, data)
                self.into_context(made, door)

    def looked_at(self, path: Path, n_bytes: int) -> None:
        """What `swarmkv snapshot info` and `diff` do with a file."""
        for read in (inspection.glance, inspection.read):
            with self.bounded(n_bytes):
                opened = self.attempt((SnapshotFileError,), lambda read=read: read(str(path)))
            self.count("inspection", "read" if isinstance(opened, inspection.Opened) else type(opened).__name__)
            if isinstance(opened, inspection.Opened):
                rows, grids = inspection.measure(opened, grids=True)
                json.dumps(inspection.describe(opened, rows))
                for grid in grids:
                    grid.map(0)

    def copied(self, made: Snapshot, data: bytes) -> None:
        """What was taken can be written and taken again; what is made of it can be restored like it."""
        rng = self.rng
        try:
            again = Snapshot.from_bytes(made.to_bytes(), self.arena)
        except ArenaExhaustedError:
            return
        except SwarmKVError as error:
            raise FindingError(f"what was read can't be read again once written: {error}") from error
        with again:
            if again.array.tobytes() != made.array.tobytes():
                raise FindingError("a copy differs")
        repr(made), made.n_tokens, made.tokens, made.last_logits, str(made.identity)
        done = self.attempt((*EDIT, *READ, *RESTORE), lambda: self._other_of(made, rng))
        self.count("made of it", "made" if isinstance(done, Snapshot) else type(done).__name__)
        if isinstance(done, Snapshot):
            with done:
                self.into_context(done, "made of it")

    @staticmethod
    def _other_of(made: Snapshot, rng: Random) -> Snapshot:
        end = made.n_tokens
        number = rng.choice((0, 1, end, end - 1, rng.randint(0, max(end, 1)), rng.randint(0, 30)))
        kind = rng.randrange(6)
        if kind == 0:
            return made.slice(number)
        if kind == 1:
            return made.convert(n_stream=rng.choice((None, 1, 4)), v_transposed=rng.choice((None, True, False)))
        if kind == 2:
            return made.delta(number)
        if kind == 3:
            return made.extract(rng.choice((0, 1, *made.sequences)))
        if kind == 4:
            return made.fork()
        with made.slice(number) as base, made.delta(number) as tail:
            return base.append(tail)

    # ── into a context ───────────────────────────────────────────────────────────────────────────────

    def into_context(self, made: Snapshot, door: str) -> None:
        rng = self.rng
        wild = self.bench.wild is not self.bench.place and wildness(made.blob)
        place = self.bench.wild if wild else self.bench.place
        ctx = place.ctx
        seq = (
            rng.choice((None, None, None, 0, 3, 3)) if rng.random() < 0.9 else rng.choice((1, -1, 4, 255, 2**31, 2**64))
        )
        if made.whole and rng.random() < 0.9:
            seq = None
        end = made.n_tokens
        n_tokens = None
        if rng.random() < 0.2:
            n_tokens = rng.choice(
                (0, 1, end, end - 1, -1, 2**31, 2**64, rng.randint(0, max(end, 1)), rng.randint(0, 20))
            )
        inexact = rng.random() < 0.5
        options = {"n_tokens": n_tokens, "allow_inexact": inexact}
        self.notes.append(f"restore {'wildly ' * wild}into {seq}, {n_tokens} tokens{', inexactly' * inexact}")
        before = place.now()
        can = made.can_restore(ctx, seq, **options)
        str(can)
        if (changed := place.changed(before)) != "":
            raise FindingError(f"can_restore changed {changed}")
        done = self.attempt(RESTORE, lambda: made.restore(ctx, seq, **options))
        if isinstance(done, Exception):
            self.count(f"{door}, restore", type(done).__name__)
            if (changed := place.changed(before)) != "":
                raise FindingError(f"a refused restore changed {changed} ({type(done).__name__})")
            if can and not isinstance(done, SnapshotCorruptError):
                raise FindingError(f"can_restore said yes, restore: {done}")
            return
        if not can:
            raise FindingError(f"can_restore said no, and it was restored: {can}")
        self.count(f"{door}, restore", "restored")
        try:
            self.after(made, place, seq, int(done), wild)
        finally:
            place.pristine = False

    def after(self, made: Snapshot, place: Place, seq: int | None, end: int, wild: bool) -> None:
        """A restored state is as it says, can be gone on from and be replaced, and nobody else has noticed."""
        rng, ctx = self.rng, place.ctx
        target = None if made.whole else seq or 0
        seqs = [target] if target is not None else list(made.sequences)
        ends = [ctx.position(s) for s in seqs]
        if sum(ends) != end:
            raise FindingError(f"restored up to {end}, but positions are {ends}")
        if rng.random() < 0.5:
            self.exported(place, seqs)
        one = rng.choice(seqs)
        self.sampled(ctx, one)
        if rng.random() < 0.6:
            self.attempt((ContextFullError, InvalidArgumentError), lambda: ctx.decode(WORDS, seq=one))
            self.sampled(ctx, one)
            if rng.random() < 0.3:
                self.exported(place, seqs)
        if wild:
            if target is None or target in OTHERS:
                ctx.clear()
            return
        if target is None or target in OTHERS:
            place.reset()
            place.check_bytes((1, 2, 0))
            return
        ctx.remove(target)
        if ctx.position(target):
            raise FindingError("it can't be removed")
        if target == 0:
            place.good.restore(ctx)
            if not np.array_equal(ctx.logits(0), place.row):
                raise FindingError("another row than the good snapshot's")
            place.check_bytes((0,))
        if rng.random() < 0.2:
            place.pristine = False
            place.check()

    def sampled(self, ctx: Context, seq: int) -> None:
        """Choose a token from what came with a snapshot, or was decoded behind it, whatever numbers those are."""
        row = self.attempt((NoLogitsError,), lambda: ctx.logits(seq))
        if not isinstance(row, Exception):
            self.attempt((InvalidArgumentError,), lambda: self.rng.choice(self.samplers).sample(row))

    def exported(self, place: Place, seqs: list[int]) -> None:
        """The engine holds cells where the ledger has them, and writes a state that can be read."""
        ctx = place.ctx
        for seq in seqs:
            data = place.export(seq)
            try:
                layout = blob.parse(data, self.bench.model.capabilities.blob_parts).layout
            except BlobError as error:
                raise FindingError(f"sequence {seq} is now exported as something else: {error}") from error
            if ctx._cells is None:
                continue
            counted = np.sort(ctx._cells.positions(seq))
            if layout.caches and not np.array_equal(np.sort(layout.positions), counted):
                raise FindingError(f"sequence {seq} holds {len(layout.positions)} cells, {len(counted)} are counted")


# ── checks taken away, to see that it is noticed ─────────────────────────────────────────────────────


def break_check(name: str) -> None:
    """Take a check of the library away, or put a fault into it. For `test_fuzz` only."""
    from swarmkv_ll import fit, skv, snapshot
    from swarmkv_ll.blob import layout, recast

    def ignore(*_: object) -> list[Any]:
        return []

    patched: Any
    if name == "shape":
        patched, fit.shape_reasons = fit.shape_reasons, ignore
    elif name == "bookkeeping":
        layout.Layout.check = ignore  # type: ignore[assignment, method-assign]
    elif name == "typed":
        patched = skv._parse_meta

        def parse(data: bytes) -> dict[str, Any]:
            try:
                return patched(data)
            except ValueError as error:
                raise ArithmeticError(str(error)) from None

        skv._parse_meta = parse  # type: ignore[assignment]
    elif name == "huge":
        patched = skv._Source.take

        def take_all(self: Any, n_bytes: int, *rest: Any) -> bytearray:
            np.empty(n_bytes << 20, np.uint8)
            return patched(self, n_bytes, *rest)  # type: ignore[no-any-return]

        skv._Source.take = take_all  # type: ignore[method-assign]
    elif name == "overrun":
        patched = recast.Edit.write

        def write(self: Any, out: Any = None) -> Any:
            made = patched(self, out)
            if isinstance(out, np.ndarray) and isinstance(out.base, np.ndarray):
                out.base[out.ctypes.data - out.base.ctypes.data + self.n_bytes] ^= 1
            return made

        recast.Edit.write = write  # type: ignore[method-assign]
    elif name == "touched":
        patched = snapshot.Snapshot.restore

        def restore(self: Any, ctx: Context, *args: Any, **options: Any) -> Any:
            try:
                return patched(self, ctx, *args, **options)
            except IncompatibleSnapshotError:
                C.llama_memory_seq_rm(ctx._memory, 1, -1, -1)
                raise

        snapshot.Snapshot.restore = restore  # type: ignore[method-assign]
    elif name == "leak":
        patched = snapshot.record.Record.of

        def of(contents: Any, path: Any = None) -> Any:
            try:
                return patched(contents, path)
            except SnapshotFileError:
                KEPT.append(contents.state)
                raise

        snapshot.record.Record.of = of  # type: ignore[method-assign, assignment]
        snapshot._leased = _leaking  # type: ignore[assignment]
    elif name not in ("abort", "hang"):
        raise SystemExit(f"nothing to break is called {name}")


KEPT: list[Any] = []


@contextlib.contextmanager
def _leaking(arena: Arena) -> Iterator[tuple[list[Any], Any]]:
    leases: list[Any] = []

    def allocate(n_bytes: int) -> Any:
        leases.append(arena.lease(n_bytes))
        KEPT.append(leases[0])
        return np.frombuffer(ffi.buffer(leases[0]._ptr, n_bytes), np.uint8)

    yield leases, allocate


# ── workers ──────────────────────────────────────────────────────────────────────────────────────────


def memory() -> Mapping[str, int]:
    """Address space now and at most, and memory in use at most, in bytes."""
    found = {}
    with open("/proc/self/status", encoding="ascii") as file:
        for line in file:
            key, _, value = line.partition(":")
            if key in ("VmSize", "VmPeak", "VmHWM"):
                found[key] = int(value.split()[0]) * 1024
    return found


def work(options: argparse.Namespace) -> None:
    """A worker: its share of the batches, one JSON object a line."""
    faulthandler.enable()
    with open(options.progress, "r+b") as file, mmap.mmap(file.fileno(), 8) as progress:

        def tell(**event: Any) -> None:
            sys.stdout.write(json.dumps(event) + "\n")
            sys.stdout.flush()

        def begin(case: int) -> None:
            progress[:] = struct.pack("<q", case)

        if options.broken:
            break_check(options.broken)
        fuzzer = Fuzzer(options.seed, Path(options.folder), options.broken)
        tell(event="ready", **memory())
        told = time.monotonic()
        done = 0

        def stats() -> None:
            tell(event="stats", done=done, outcomes=fuzzer.outcomes, peak=fuzzer.peak, **memory())

        first, stop = options.range
        for batch in range(first // BATCH, -(-stop // BATCH)):
            if not options.together and batch % options.jobs != options.job:
                continue
            a, b = max(first, batch * BATCH), min(stop, (batch + 1) * BATCH)
            resource.setrlimit(resource.RLIMIT_AS, (memory()["VmSize"] + SPARE, resource.RLIM_INFINITY))
            for finding in fuzzer.batch(a, b, begin):
                tell(**finding)
            done += b - a
            if time.monotonic() - told > 5:
                told = time.monotonic()
                stats()
        stats()
        if options.together:
            tell(event="notes", notes=fuzzer.notes)
        sys.stdout.flush()
        os._exit(0)  # nothing is to be tidied up, under a limit that was made for cases


class Worker:
    """A worker process, started again behind the case that killed it."""

    def __init__(self, run: Run, job: int) -> None:
        self.run, self.job = run, job
        self.progress = run.folder / f"progress.{job}"
        self.progress.write_bytes(struct.pack("<q", -1))
        self.done, self.outcomes, self.peak, self.peaks = 0, Counter[str](), (0, 0.0), Counter[str]()
        self.alive_stats: dict[str, Any] = {}
        self.process: subprocess.Popen[bytes] | None = None
        self.seen, self.waited, self.hung = b"", 0.0, False
        self.thread = threading.Thread(target=self._follow, daemon=True)
        self.thread.start()

    def _follow(self) -> None:
        first, stop = self.run.range
        while first < stop and not self.run.stopping.is_set():
            died_at = self._once(first, stop)
            if died_at is None:
                return
            first = died_at + 1

    def _once(self, first: int, stop: int) -> int | None:
        """Run it; the case that it died of, or None."""
        run = self.run
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", f"--seed={run.seed}"]
        command += [f"--jobs={run.jobs}", f"--job={self.job}", f"--folder={run.folder}", f"--range={first}-{stop}"]
        command += [f"--progress={self.progress}", f"--break={run.broken}"]
        command += ["--together"] * run.together
        self.progress.write_bytes(struct.pack("<q", -1))
        self.hung = False
        errors = (run.folder / f"errors.{self.job}").open("w+b")
        environment = {**os.environ, "XDG_CACHE_HOME": str(run.folder), "MALLOC_ARENA_MAX": "2"}
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=environment) as process:
            self.process = process
            assert process.stdout is not None
            self.alive_stats = {}
            for line in process.stdout:
                self._event(json.loads(line))
            code = process.wait()
        self._settle()
        if code == 0 or run.stopping.is_set():
            return None
        (case,) = struct.unpack("<q", self.progress.read_bytes())
        errors.seek(0)
        said = errors.read().decode(errors="replace")
        what = f"no end after {run.hang_after} s" if self.hung else f"the process died: {_died(code)}"
        found = {"event": "finding", "case": case, "only": str(case), "error": what, "traceback": said[-6000:]}
        run.found({**found, "kind": "hang" if self.hung else "abort"})
        if case < 0:
            run.stopping.set()  # it did not get as far as the first case
            return None
        return int(case)

    def watch(self, seconds: float) -> None:
        """Stop a process that has been at one case for too long; called so often. What was stopped meanwhile is not."""
        process, now = self.process, self.progress.read_bytes()
        if process is None or process.poll() is not None or now != self.seen or _stopped(process.pid):
            self.seen, self.waited = now, 0.0
            return
        self.waited += seconds
        most = self.run.hang_after + 60 * now.startswith(b"\xff")  # -1: it is making its contexts
        if self.waited > most:
            self.hung = True
            process.send_signal(signal.SIGABRT if self.waited < most + 3 else signal.SIGKILL)  # tells where it was

    def _event(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "finding":
            self.run.found(event)
        elif kind == "stats":
            self.alive_stats = event
        elif kind == "notes":
            self.run.notes = event["notes"]

    def _settle(self) -> None:
        """Add what the process that has ended had counted."""
        last, self.alive_stats = self.alive_stats, {}
        if last:
            self.done += last["done"]
            self.outcomes.update(last["outcomes"])
            self.peak = max(self.peak[0], last["peak"][0]), max(self.peak[1], last["peak"][1])
            for key in ("VmPeak", "VmHWM"):
                self.peaks[key] = max(self.peaks[key], last[key])


def _stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] == "T"
    except OSError:
        return True


def _died(code: int) -> str:
    return f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}"


@dataclass
class Run:
    """A run of all workers."""

    seed: str
    range: tuple[int, int]
    jobs: int
    folder: Path
    hang_after: float
    broken: str
    together: bool
    most_findings: int

    def __post_init__(self) -> None:
        self.findings: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self.stopping = threading.Event()
        self.lock = threading.Lock()

    def found(self, event: dict[str, Any]) -> None:
        event.setdefault("kind", "finding")
        event["reproduce"] = f"python tests/fuzz.py --seed {self.seed} --only {event['only']}"
        with self.lock:
            self.findings.append(event)
            if len(self.findings) >= self.most_findings:
                self.stopping.set()
        print(f"case {event['case']}: {event['error']}\n  {event['reproduce']}", file=sys.stderr, flush=True)

    def go(self, *, seconds: float = 0, every: float = 0) -> dict[str, Any]:
        began = told = time.monotonic()
        for name, write in WRITERS.items():
            write(self.folder / f"{name}.gguf")
        workers = [Worker(self, job) for job in range(self.jobs)]
        while any(worker.thread.is_alive() for worker in workers):
            time.sleep(0.1)
            for worker in workers:
                worker.watch(0.1)
            if seconds and time.monotonic() - began > seconds:
                self.stopping.set()
            if self.stopping.is_set():
                break
            if every and time.monotonic() - told > every:
                told = time.monotonic()
                print(json.dumps(self._summary(workers, began)), file=sys.stderr, flush=True)
        if self.stopping.is_set():
            for worker in workers:
                if worker.process is not None:
                    worker.process.kill()
        for worker in workers:
            worker.thread.join()
        return self._summary(workers, began)

    def _summary(self, workers: list[Worker], began: float) -> dict[str, Any]:
        outcomes: Counter[str] = Counter()
        for worker in workers:
            outcomes.update(worker.outcomes)
            outcomes.update(worker.alive_stats.get("outcomes", {}))

        def most(key: str) -> int:
            return max(max(worker.peaks[key], worker.alive_stats.get(key, 0)) for worker in workers)

        peaks = [worker.alive_stats.get("peak", worker.peak) for worker in workers] + [w.peak for w in workers]
        kinds = Counter(str(found["kind"]) for found in self.findings)
        return {
            "seed": self.seed,
            "cases": sum(worker.done + worker.alive_stats.get("done", 0) for worker in workers),
            "seconds": round(time.monotonic() - began, 1),
            "jobs": self.jobs,
            "aborts": kinds["abort"],
            "hangs": kinds["hang"],
            "findings": self.findings,
            "outcomes": dict(sorted(outcomes.items())),
            "most_allocated_to_read": max(peak[0] for peak in peaks),
            "share_of_allowed": round(max(peak[1] for peak in peaks), 3),
            "most_memory": most("VmHWM"),
            "most_address_space": most("VmPeak"),
        }


# ── the command ──────────────────────────────────────────────────────────────────────────────────────


def _range(value: str) -> tuple[int, int]:
    first, _, last = value.partition("-")
    return int(first), int(last or int(first) + 1)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seed", default="1")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", metavar="CASE", help="one case, or A-B: some of one batch, in one context")
    parser.add_argument("--seconds", type=float, default=0, help="stop after so long")
    parser.add_argument("--every", type=float, default=0, help="figures on stderr, every so many seconds")
    parser.add_argument("--hang-after", type=float, default=60, help="seconds that a case may take")
    parser.add_argument("--most-findings", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--break", dest="broken", default="", help=argparse.SUPPRESS)
    for hidden in ("--worker", "--together"):
        parser.add_argument(hidden, action="store_true", help=argparse.SUPPRESS)
    for hidden in ("--folder", "--progress"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--job", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--range", type=_range, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    if options.worker:
        work(options)
    cases = options.first, options.first + options.cases
    if options.only:
        first, last = _range(options.only)
        cases = first, last + 1 if "-" in options.only else last
    memory_disk = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="swarmkv-fuzz-", dir=memory_disk) as folder:
        run = Run(
            options.seed,
            cases,
            1 if options.only else options.jobs,
            Path(folder),
            options.hang_after,
            options.broken,
            bool(options.only),
            options.most_findings,
        )
        summary = run.go(seconds=options.seconds, every=options.every)
    if options.json:
        print(json.dumps(summary, indent=1))
    else:
        for found in summary["findings"]:
            print(f"\ncase {found['case']} ({found.get('target')}): {found['error']}")
            print(*(f"  {note}" for note in found.get("notes", [])), sep="\n")
            print(found["traceback"])
            print(found["reproduce"])
        if options.only:
            print(*run.notes, sep="\n")
        for outcome, n in summary["outcomes"].items():
            print(f"{n:>10,}  {outcome}")
        print(
            f"{summary['cases']:,} cases in {summary['seconds']:,} s, {len(summary['findings'])} findings; at most "
            f"{summary['most_allocated_to_read']:,} bytes to read an input ({summary['share_of_allowed']:.0%} of what "
            f"is allowed), {summary['most_memory'] >> 20:,} MiB of memory in all"
        )
    return 1 if summary["findings"] or not summary["cases"] else 0


if __name__ == "__main__":
    sys.exit(main())
