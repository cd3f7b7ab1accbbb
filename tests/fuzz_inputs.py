"""Hostile inputs for `fuzz`: damaged bytes, odd but consistent states, files whose checksums are right all the same.

Needs no engine. Everything is drawn from a `random.Random` that the caller gives, so that a seed says all. Files are
put together here by hand, not by the library, which refuses to write what its readers should refuse.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128

from swarmkv_ll.blob import Layout, Parts
from swarmkv_ll.blob.layout import Tensor

Bytes = npt.NDArray[np.uint8]
Field = tuple[int, int]
"""Offset and size, in bytes."""

Section = tuple[bytes, bytes, bytes]
"""Name, type and data of a section of a `.skv` file."""

MAGIC = 0xAF143CD8
EXTREMES = (0, 1, -1, 2, 255, 256, 2**15, 2**16, 2**31 - 2, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63, 2**64 - 1)


# ── bytes ────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Bytewise:
    """Bytes, with what is known of them.

    Attributes
    ----------
    data : bytes
    few, many : list of (offset, size)
        Fields: those that stand once or a few times, and those of each cell.
    """

    data: bytes
    few: list[Field]
    many: list[Field]

    @property
    def borders(self) -> list[int]:
        """Where a field begins or ends."""
        fields = self.few + self.many
        return sorted({at for at, _ in fields} | {at + n for at, n in fields} | {0, len(self.data)})

    def field(self, rng: Random) -> Field:
        some = self.many if self.many and (not self.few or rng.random() < 0.4) else self.few
        return rng.choice(some) if some else (0, min(4, len(self.data)))

    def shifted(self, by: int, data: bytes, few: Iterable[Field] = ()) -> Bytewise:
        """The same fields in other bytes, in which they begin later."""
        moved = [[(at + by, n) for at, n in fields if at + by >= 0] for fields in (self.few, self.many)]
        return Bytewise(data, [*few, *moved[0]], moved[1])


def fields_of_blob(data: bytes, layout: Layout) -> Bytewise:
    """A blob's bookkeeping, number by number."""
    few: list[Field] = []
    many: list[Field] = []
    for at, found, name in layout.bookkeeping:
        if name.endswith("cells"):
            many += [(at + i, 4) for i in range(0, len(found), 4)]
        elif name.endswith("type and size"):
            few += [(at, 4), (at + 4, 8), (at + 4, 4), (at + 8, 4)]
        elif "recurrent cell " in name:
            many.append((at, len(found)))
        else:
            few.append((at, len(found)))
    return Bytewise(data, few, many)


def fields_of_file(data: bytes) -> Bytewise:
    """Head and table of a `.skv` file."""
    few = [(0, 8), (8, 4), (12, 4), (16, 8), (24, 8), (32, 8)]
    (n_sections,) = struct.unpack_from("<Q", data, 32)
    for i in range(n_sections):
        at = 40 + 72 * i
        few += [(at, 32), (at + 32, 8), (at + 40, 8), (at + 48, 8), (at + 56, 16)]
        few.append((*struct.unpack_from("<QQ", data, at + 40),))
    few.append((40 + 72 * n_sections, 16))
    return Bytewise(data, few, [])


def put(data: bytearray, at: Field, value: int) -> None:
    offset, n = at
    data[offset : offset + n] = (value % 2 ** (8 * n)).to_bytes(n, "little")


def _flip(rng: Random, data: bytearray, of: Bytewise, _: Bytewise) -> str:
    n = rng.choice((1, 1, 1, 2, 8))
    anywhere = rng.random() < 0.4
    for _i in range(n):
        at, size = (0, len(data)) if anywhere else of.field(rng)
        if at < len(data) and size:
            where = min(at + rng.randrange(size), len(data) - 1)
            data[where] ^= 1 << rng.randrange(8) if rng.random() < 0.7 else rng.randrange(1, 256)
    return f"{n} bytes flipped {'anywhere' if anywhere else 'in fields'}"


def _extreme(rng: Random, data: bytearray, of: Bytewise, _: Bytewise) -> str:
    at, n = of.field(rng)
    n = min(n, 8)
    now = int.from_bytes(data[at : at + n], "little")
    value = rng.choice((*EXTREMES, now + 1, now - 1, 2 * now, -now, now ^ 1, now << 8))
    put(data, (at, n), value)
    return f"{n} bytes at {at}: {now} → {value}"


def _truncate(rng: Random, data: bytearray, of: Bytewise, _: Bytewise) -> str:
    at = max(0, rng.choice(of.borders) + rng.choice((-3, -1, 0, 0, 1, 2)))
    del data[at:]
    return f"cut at {at}"


def _extend(rng: Random, data: bytearray, of: Bytewise, _: Bytewise) -> str:
    n = rng.choice((1, 4, 12, 4096, 64))
    data += rng.randbytes(n) if rng.random() < 0.5 else bytes(n)
    return f"{n} bytes more"


def _range(rng: Random, of: Bytewise) -> tuple[int, int]:
    if rng.random() < 0.6:
        a, b = sorted(rng.choices(of.borders, k=2))
        return a, b
    a = rng.randrange(len(of.data) + 1)
    return a, a + rng.choice((1, 2, 4, 8, 12, 64))


def _duplicate(rng: Random, data: bytearray, of: Bytewise, _: Bytewise) -> str:
    a, b = _range(rng, of)
    data[b:b] = data[a:b]
    return f"{a} to {b} twice"


def _delete(rng: Random, data: bytearray, of: Bytewise, _: Bytewise) -> str:
    a, b = _range(rng, of)
    del data[a:b]
    return f"{a} to {b} left out"


def _insert(rng: Random, data: bytearray, of: Bytewise, _: Bytewise) -> str:
    at, n = rng.choice(of.borders), rng.choice((1, 4, 8, 12, 72))
    data[at:at] = rng.randbytes(n)
    return f"{n} bytes put in at {at}"


def _splice(rng: Random, data: bytearray, of: Bytewise, other: Bytewise) -> str:
    a, b = rng.choice(of.borders), rng.choice(other.borders)
    data[a:] = other.data[b:]
    return f"spliced: to {a}, from {b} of another"


def _swap(rng: Random, data: bytearray, of: Bytewise, _: Bytewise) -> str:
    a, b, c, d = sorted(rng.choices(of.borders, k=4))
    data[a:d] = data[c:d] + data[b:c] + data[a:b]
    return f"{a} to {b} and {c} to {d} swapped"


_BYTEWISE = (_flip, _flip, _flip, _extreme, _extreme, _extreme, _truncate, _extend, _duplicate, _delete, _insert)
_BYTEWISE += (_splice, _swap)


def mutate(rng: Random, of: Bytewise, other: Bytewise) -> tuple[bytes, str]:
    """Some damage, and what was done."""
    data, notes = bytearray(of.data), []
    for _ in range(rng.choice((1, 1, 1, 1, 2, 3))):
        notes.append(rng.choice(_BYTEWISE)(rng, data, of, other))
    return bytes(data), "; ".join(notes)


# ── states, cell by cell ─────────────────────────────────────────────────────────────────────────────


@dataclass
class Plane:
    """One layer's K, V, R or S: `rows` has a row of bytes a cell."""

    type: int
    rows: Bytes


def _copies(planes: list[Plane]) -> list[Plane]:
    return [Plane(plane.type, plane.rows) for plane in planes]


@dataclass
class PlainStream:
    pos: list[int]
    ext: list[tuple[int, ...]]
    owners: list[list[int]]
    v_trans: int
    k: list[Plane]
    v: list[Plane]

    def copy(self) -> PlainStream:
        owners, (k, v) = [list(some) for some in self.owners], (_copies(self.k), _copies(self.v))
        return PlainStream(list(self.pos), list(self.ext), owners, self.v_trans, k, v)


@dataclass
class PlainRecurrent:
    pos: list[int]
    owners: list[list[int]]
    s_trans: int
    n_layer: int
    planes: list[Plane]

    def copy(self) -> PlainRecurrent:
        owners = [list(some) for some in self.owners]
        return PlainRecurrent(list(self.pos), owners, self.s_trans, self.n_layer, _copies(self.planes))


@dataclass
class Plain:
    """A state taken apart, to be changed and put together again: consistent in its sizes, whatever it says."""

    head: bytes
    caches: list[list[PlainStream | None]]
    recurrent: PlainRecurrent | None
    extension: bool

    @property
    def parts(self) -> Parts:
        has_v = any(stream.v for cache in self.caches for stream in cache if stream)
        return Parts(len(self.caches), self.recurrent is not None, self.extension, has_v or not self.caches)

    @property
    def whole(self) -> bool:
        return self.head[:4] != struct.pack("<I", MAGIC)

    def copy(self) -> Plain:
        """All but the rows, which are replaced and never changed."""
        memory = self.recurrent
        caches = [[stream and stream.copy() for stream in cache] for cache in self.caches]
        return Plain(self.head, caches, memory and memory.copy(), self.extension)

    def streams(self) -> list[PlainStream]:
        return [stream for cache in self.caches for stream in cache if stream]

    def encode(self) -> bytes:
        out = [self.head]
        for cache in self.caches:
            out.append(_u32(len(cache)))
            for stream in cache:
                out.append(_u32(len(stream.pos) if stream else 0))
                if stream and stream.pos:
                    out += self._stream(stream)
        if (memory := self.recurrent) is not None:
            out.append(_u32(len(memory.pos)))
            for pos, owners in zip(memory.pos, memory.owners, strict=True):
                out.append(_i32(pos) + _u32(len(owners)) + b"".join(map(_i32, owners)))
            out.append(_u32(memory.s_trans) + _u32(memory.n_layer))
            out += [_plain_head(plane) + plane.rows.tobytes() for plane in memory.planes]
        return b"".join(out)

    def _stream(self, stream: PlainStream) -> Iterable[bytes]:
        for pos, ext, owners in zip(stream.pos, stream.ext, stream.owners, strict=True):
            yield _i32(pos) + _u32(len(owners))
            if self.extension:
                yield struct.pack("<3i", *ext)
            yield b"".join(map(_i32, owners))
        yield _u32(stream.v_trans) + _u32(len(stream.k))
        for plane in stream.k:
            yield _plain_head(plane) + plane.rows.tobytes()
        for plane in stream.v:
            if not stream.v_trans:
                yield _plain_head(plane) + plane.rows.tobytes()
                continue
            size = _ELEMENT.get(plane.type, 2)
            n, n_embd = len(plane.rows), plane.rows.shape[1] // size
            turned = plane.rows[:, : n_embd * size].reshape(n, n_embd, size).transpose(1, 0, 2)
            yield struct.pack("<iII", plane.type, size, n_embd) + turned.tobytes()


_ELEMENT = {0: 4, 1: 2, 30: 2}
_BLOCK = {0: (1, 4), 1: (1, 2), 30: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34)}


def _u32(value: int) -> bytes:
    return struct.pack("<I", value % 2**32)


def _i32(value: int) -> bytes:
    return struct.pack("<I", value % 2**32)


def _plain_head(plane: Plane) -> bytes:
    return struct.pack("<iQ", plane.type, plane.rows.shape[1])


def take_apart(data: bytes, layout: Layout) -> Plain:
    flat = np.frombuffer(data, np.uint8)

    def plane(tensor: Tensor, n: int) -> Plane:
        found = flat[tensor.offset : tensor.offset + n * tensor.row_bytes]
        if tensor.n_embd and n:
            turned = found.reshape(tensor.n_embd, n, -1).transpose(1, 0, 2)
            return Plane(tensor.type, turned.reshape(n, tensor.row_bytes))
        return Plane(
            tensor.type, found.reshape(n, tensor.row_bytes) if n else np.empty((0, tensor.row_bytes), np.uint8)
        )

    def owners_of(cells: Any) -> list[list[int]]:
        ends = np.cumsum(cells.n_owners)
        return [cells.owners[end - n : end].tolist() for end, n in zip(ends, cells.n_owners, strict=True)]

    caches: list[list[PlainStream | None]] = []
    for cache in layout.caches:
        caches.append([])
        for stream in cache:
            if stream is None:
                caches[-1].append(None)
                continue
            cells, n = stream.cells, len(stream.cells)
            ext = [(0, 0, 0)] * n if cells.extension is None else [tuple(row) for row in cells.extension.tolist()]
            k, v = ([plane(tensor, n) for tensor in tensors] for tensors in (stream.k, stream.v))
            caches[-1].append(PlainStream(cells.pos.tolist(), ext, owners_of(cells), int(stream.v_transposed), k, v))
    memory = None
    if (part := layout.recurrent) is not None:
        n = len(part.cells)
        planes = [plane(tensor, n) for tensor in (*part.r, *part.s)]
        at = next(at for at, _, name in layout.bookkeeping if name == "recurrent n_layer")
        (n_layer,) = struct.unpack_from("<I", data, at)
        memory = PlainRecurrent(part.cells.pos.tolist(), owners_of(part.cells), 0, n_layer, planes)
    end = 8 if layout.seq_id is not None else 4 + len(layout.arch or "")
    return Plain(data[:end], caches, memory, layout.parts.cell_extension)


def _only(stream: PlainStream, index: Sequence[int]) -> None:
    """Keep these cells, in this order."""
    stream.pos = [stream.pos[i] for i in index]
    stream.ext = [stream.ext[i] for i in index]
    stream.owners = [list(stream.owners[i]) for i in index]
    for plane in (*stream.k, *stream.v):
        plane.rows = plane.rows[list(index)]


def _cells(rng: Random, plain: Plain) -> str:
    streams = plain.streams()
    if not streams:
        return ""
    stream, n_before = (some := rng.choice(streams)), len(some.pos)
    kind = rng.choice(("some", "none", "one", "shuffled", "reversed", "twice", "many"))
    index = list(range(n_before))
    index = {
        "some": sorted(rng.sample(index, rng.randint(0, n_before))),
        "none": [],
        "one": rng.sample(index, min(1, n_before)),
        "shuffled": rng.sample(index, n_before),
        "reversed": index[::-1],
        "twice": index * 2,
        "many": index * rng.choice((8, 30)),
    }[kind]
    index = index[:2000]
    if kind == "many" and rng.random() < 0.5:
        rng.shuffle(index)
    _only(stream, index)
    if kind in ("twice", "many") and rng.random() < 0.8:
        stream.pos = list(range(len(stream.pos)))
        if rng.random() < 0.3:
            rng.shuffle(stream.pos)
    return f"cells: {kind}"


def _positions(rng: Random, plain: Plain) -> str:
    holders: list[Any] = [*plain.streams(), *([plain.recurrent] if plain.recurrent else [])]
    if not holders:
        return ""
    holder = rng.choice(holders)
    by = rng.choice((1, -1, 5, 40, 1000, 2**30, 2**31 - 2 - max(holder.pos, default=0)))
    kind = rng.choice(("all", "all", "last", "one", "gap", "random", "everywhere"))
    if kind == "everywhere":  # in every memory, so that they still agree
        for one in holders:
            one.pos = [pos + by for pos in one.pos]
    elif kind == "all":
        holder.pos = [pos + by for pos in holder.pos]
    elif kind == "gap":
        middle = sorted(holder.pos)[len(holder.pos) // 2] if holder.pos else 0
        holder.pos = [pos + by if pos >= middle else pos for pos in holder.pos]
    elif kind == "random":
        holder.pos = rng.sample(range(2**31 - 1), len(holder.pos))
    elif holder.pos:
        at = -1 if kind == "last" else rng.randrange(len(holder.pos))
        holder.pos[at] = rng.choice((holder.pos[at] + by, *EXTREMES))
    return f"positions of {kind} by {by}"


def _owners(rng: Random, plain: Plain) -> str:
    holders: list[Any] = [*plain.streams(), *([plain.recurrent] if plain.recurrent else [])]
    if not holders:
        return ""
    holder = rng.choice(holders)
    kind = rng.choice(("all", "one", "two", "many", "none", "odd"))
    new = {
        "all": [rng.randrange(5)],
        "one": [rng.randrange(256)],
        "two": rng.sample(range(4), 2),
        "many": list(range(rng.choice((3, 4, 5, 256, 300)))),
        "none": [],
        "odd": [rng.choice(EXTREMES)],
    }[kind]
    if kind == "all":
        holder.owners = [list(new) for _ in holder.pos]
    elif holder.pos:
        holder.owners[rng.randrange(len(holder.pos))] = new
    return f"owners: {kind}"


def _streams(rng: Random, plain: Plain) -> str:
    if not all(plain.caches) or not plain.caches:
        return ""
    kind = rng.choice(("more", "fewer", "empty", "moved", "copied", "many", "none"))
    some = rng.sample(plain.caches, rng.randint(1, len(plain.caches)))
    n = rng.choice((1, 3, 4, 255, 256))
    for cache in some:
        if kind == "more":
            cache.extend([None] * n)
        elif kind == "fewer":
            cache[:] = cache[: max(1, len(cache) - n)]
        elif kind == "empty":
            cache[:] = [None] * len(cache)
        elif kind == "moved":
            cache[:] = [*cache[-1:], *cache[:-1]]
        elif kind == "copied":
            cache[:] = [cache[0], *(stream and stream.copy() for stream in cache)]
        elif kind == "many":
            cache[:] = [stream and stream.copy() for stream in cache[:1] * (1 + n % 5)]
        else:
            cache[:] = []
    return f"streams: {kind}, {n}"


def _layers(rng: Random, plain: Plain) -> str:
    planes: list[list[Plane]] = [planes for stream in plain.streams() for planes in (stream.k, stream.v) if planes]
    if plain.recurrent:
        planes.append(plain.recurrent.planes)
    if not planes:
        return ""
    some = rng.choice(planes)
    kind = rng.choice(("fewer", "twice", "swapped", "wider", "narrower", "type", "empty", "count", "none"))
    plane = rng.choice(some) if some else None
    if kind == "fewer":
        del some[-1:]
    elif kind == "twice":
        some += _copies(some)
    elif kind == "swapped":
        some.reverse()
    elif kind == "none":
        some.clear()
    elif kind == "count" and plain.recurrent:
        plain.recurrent.n_layer = rng.choice((0, 1, plain.recurrent.n_layer + 1, 512, 513, 2**32 - 1))
    elif plane and kind == "wider":
        plane.rows = np.concatenate([plane.rows, plane.rows], axis=1)
    elif plane and kind == "narrower":
        plane.rows = plane.rows[:, : plane.rows.shape[1] // 2]
    elif plane and kind == "empty":
        plane.rows = plane.rows[:, :0]
    elif plane and kind == "type":  # and rows as long as as many values of that type are
        values = plane.rows.shape[1] // _BLOCK.get(plane.type, (1, 2))[1] * _BLOCK.get(plane.type, (1, 2))[0]
        plane.type = rng.choice((*_BLOCK, 4, -1, 2**31 - 1))
        block, n_bytes = _BLOCK.get(plane.type, (1, 2))
        if rng.random() < 0.7:
            plane.rows = np.resize(plane.rows, (len(plane.rows), values // block * n_bytes))
    return f"layers: {kind}"


def _memories(rng: Random, plain: Plain) -> str:
    kind = rng.choice(("transposed", "extension", "without V", "recurrent", "cache", "swap", "cells", "alone"))
    if kind == "transposed":
        for stream in plain.streams():
            stream.v_trans ^= 1
    elif kind == "extension":
        plain.extension = not plain.extension
        for stream in plain.streams():
            stream.ext = [(rng.choice(EXTREMES[:9]), 1, rng.randrange(3)) for _ in stream.pos]
    elif kind == "without V":
        for stream in plain.streams():
            stream.v = []
    elif kind == "recurrent":
        plain.recurrent = None
    elif kind == "cache":
        plain.caches = plain.caches[1:] if len(plain.caches) > 1 or rng.random() < 0.5 else plain.copy().caches * 2
    elif kind == "swap":
        plain.caches.reverse()
    elif kind == "alone":
        plain.caches = []
    elif plain.recurrent:
        n = rng.choice((0, 0, 1, 2, 3, 5))
        index = [i % len(plain.recurrent.pos) for i in range(n)] if plain.recurrent.pos else []
        memory = plain.recurrent
        memory.pos, memory.owners = [memory.pos[i] for i in index], [list(memory.owners[i]) for i in index]
        for plane in memory.planes:
            plane.rows = plane.rows[index]
    return f"memories: {kind}"


def _head(rng: Random, plain: Plain) -> str:
    kind = rng.choice(("sequence", "number", "architecture", "other"))
    if kind == "number" and not plain.whole:
        plain.head = struct.pack("<II", MAGIC, rng.choice((0, 1, 3, 255, 256, 2**31, 2**32 - 1)))
    elif kind in ("number", "architecture"):
        name = rng.choice((b"llama", b"mamba", b"x", b"gemma2 ", b"a" * 64, b"a" * 65, b"\0abc", b"\xff\xfe", b""))
        plain.head = _u32(len(name)) + name
    else:  # the other kind of state
        plain.head = _u32(5) + b"llama" if kind == "other" and not plain.whole else struct.pack("<II", MAGIC, 0)
    return f"head: {kind}"


def _values(rng: Random, plain: Plain) -> str:
    planes = [plane for stream in plain.streams() for plane in (*stream.k, *stream.v)]
    planes += plain.recurrent.planes if plain.recurrent else []
    if not planes:
        return ""
    plane, kind = rng.choice(planes), rng.choice(("random", "NaN", "one"))
    rows = plane.rows.copy()
    if kind == "random":
        rows[:] = np.frombuffer(rng.randbytes(rows.size), np.uint8).reshape(rows.shape)
    elif kind == "NaN":
        rows[:] = 0xFF
    elif rows.size:
        rows.flat[rng.randrange(rows.size)] ^= 1 << rng.randrange(8)
    plane.rows = rows
    return f"values: {kind}"


_PLAIN: tuple[Callable[[Random, Plain], str], ...] = (
    _cells,
    _cells,
    _positions,
    _positions,
    _owners,
    _streams,
    _layers,
    _memories,
    _head,
    _values,
)


def rebuild(rng: Random, plain: Plain) -> tuple[bytes, Parts, str]:
    """An odd state whose sizes are right: its bytes, what it is made of, and what was done."""
    plain = plain.copy()
    notes = [rng.choice(_PLAIN)(rng, plain) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
    return plain.encode(), plain.parts, "; ".join(notes)


# ── files ────────────────────────────────────────────────────────────────────────────────────────────


def _up(value: int, step: int) -> int:
    return -(-value // step) * step


def header_bytes(sections: Sequence[Section]) -> int:
    return 40 + 72 * len(sections) + 16


def seal(sections: Sequence[Section], damage: Callable[[bytearray], None] | None = None) -> bytes:
    """A `.skv` file around sections, each checksum right. `damage` may change the header before its own is made."""
    at = header_bytes(sections)
    offsets = []
    for i, (_, _, data) in enumerate(sections):
        at = _up(at, 4096 if i == len(sections) - 1 else 64)
        offsets.append(at)
        at += len(data)
    out = bytearray(_up(at, 4096))
    header = bytearray(
        struct.pack("<8sIIQQQ", b"\x89SKV\r\n\x1a\n", 1, 0, header_bytes(sections), len(out), len(sections))
    )
    for (name, kind, data), offset in zip(sections, offsets, strict=True):
        header += struct.pack("<32s8sQQ16s", name, kind, offset, len(data), xxh3_128(data).digest())
        out[offset : offset + len(data)] = data
    if damage:
        damage(header)
    header += xxh3_128(header).digest()
    out[: len(header)] = header
    return bytes(out)


def sections_of(meta: Any, arrays: dict[str, npt.NDArray[Any]], state: bytes) -> list[Section]:
    """As a snapshot has them. `meta` is text, or what JSON can hold."""
    text = meta if isinstance(meta, bytes) else json.dumps(meta).encode("ascii")
    some = [(name.encode(), _dtype(array), array.tobytes()) for name, array in arrays.items()]
    return [(b"meta", b"json", text), *some, (b"state", b"u1", state)]


def _dtype(array: npt.NDArray[Any]) -> bytes:
    return f"{array.dtype.kind}{array.dtype.itemsize}".encode()


def damaged_table(rng: Random, sections: Sequence[Section]) -> tuple[bytes, str]:
    """A file whose head or table is wrong but whose checksums are right."""
    notes = []

    def damage(header: bytearray) -> None:
        if rng.random() < 0.1:  # a table that is promised, and not there
            n = rng.choice((len(sections) + 1, 100, 10_000, 65_535, 65_536, 2**40))
            header[16:24], header[32:40] = struct.pack("<Q", 56 + 72 * n), struct.pack("<Q", n)
            notes.append(f"{n} sections promised")
            return
        of = fields_of_file(bytes(header) + bytes(16))
        for _ in range(rng.choice((1, 1, 2))):
            at = rng.choice([found for found in of.few if found[0] + found[1] <= len(header)])
            if at[1] > 8:  # a name, or a checksum
                header[at[0] : at[0] + at[1]] = (rng.choice(_NAMES) + bytes(32))[: at[1]]
                notes.append(f"name at {at[0]}")
            else:
                notes.append(_extreme(rng, header, Bytewise(bytes(header), [at], []), of))

    return seal(sections, damage), "; ".join(notes)


_NAMES = (b"meta", b"state", b"tokens.0", b"tokens.7", b"logits.0", b"", b"\xff" * 32, b"a\0b", b".x", b"x" * 32)


# ── what a snapshot's file says beside its state ─────────────────────────────────────────────────────

ODD: tuple[Any, ...] = (
    *EXTREMES,
    10**400,
    -(10**400),
    1e308,
    -0.0,
    0.5,
    True,
    False,
    None,
    "",
    "0",
    "sequence",
    "context",
    "\ud800",
    "\0",
    "Ω" * 1001,
    "x" * 5000,
    [],
    {},
    [[]],
    [None] * 300,
    [True, True],
    {"": ""},
    {"0": 12},
    {"fingerprint": "x", "scale": 1.0},
    [{"fingerprint": "x", "scale": 1.0}],
    [{"fingerprint": "x", "scale": 10**400}],
)


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += _paths(inner, (*path, key))
    return found


def mutate_meta(rng: Random, meta: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Keys missing, more, of another kind."""
    meta, notes = deepcopy(meta), []
    for _ in range(rng.choice((1, 1, 1, 2))):
        path = rng.choice(_paths(meta) or [()])
        holder: Any = meta
        for key in path[:-1]:
            holder = holder[key]
        kind = rng.choice(("odd", "odd", "odd", "gone", "more", "near", "deep"))
        if not path or kind == "more":
            holder = holder if isinstance(holder, dict) else meta
            holder[rng.choice(("n_attention", "x", "0", "7", "identity", "Ω", ""))] = deepcopy(rng.choice(ODD))
        elif kind == "gone":
            del holder[path[-1]]
        elif kind == "near":
            now = holder[path[-1]]
            holder[path[-1]] = (
                not now
                if isinstance(now, bool)
                else now + rng.choice((1, -1))
                if isinstance(now, int | float)
                else f"{now}x"
            )
        elif kind == "deep":
            deep: Any = 0
            for _i in range(rng.choice((10, 300))):
                deep = [deep] if rng.random() < 0.5 else {"a": deep}
            holder[path[-1]] = deep
        else:
            holder[path[-1]] = deepcopy(rng.choice(ODD))
        notes.append(f"meta {'.'.join(map(str, path))}: {kind}")
    return meta, "; ".join(notes)


def mutate_text(rng: Random, text: bytes) -> tuple[bytes, str]:
    """What is no JSON object, or hardly one."""
    kind = rng.choice(("twice", "nan", "huge", "digits", "bom", "bytes", "nested", "long", "other", "empty", "damaged"))
    at = text.find(b":") + 1
    made = {
        "twice": text[:-1] + b',"kind":"sequence"}',
        "nan": text[:at] + rng.choice((b"NaN", b"-Infinity")) + b',"q":' + text[at:],
        "huge": text[:-1] + b',"begin2":1e999}',
        "digits": text[:-1] + b',"x":' + b"9" * rng.choice((4000, 4301, 40000)) + b"}",
        "bom": b"\xef\xbb\xbf" + text,
        "bytes": text.replace(b"sequence", b"\xff\xc0\x80"),
        "nested": b'{"a":' * (n := rng.choice((500, 5000, 50000))) + b"1" + b"}" * n,
        "long": text[:-1] + b',"x":[' + b",".join([b"[]"] * 5000) + b"]}",
        "other": rng.choice((b"[]", b"null", b'"x"', b"1", b"{}", b"{", b"\0", b" {} x", b"[" * 100000)),
        "empty": b"",
    }
    if kind in made:
        return made[kind], f"meta text: {kind}"
    data = bytearray(text)
    for _ in range(rng.choice((1, 2, 5))):
        data[rng.randrange(len(data))] = rng.choice(b'{}[]",:0919eE+-.\\u\xff ')
    return bytes(data), "meta text: damaged"


def mutate_arrays(
    rng: Random, arrays: dict[str, Any], sequences: Sequence[int], n_vocab: int
) -> tuple[dict[str, Any], str]:
    """Tokens and logits of wrong lengths, types, values and names."""
    arrays = dict(arrays)
    names = [*arrays, *(f"{what}.{seq}" for what in ("tokens", "logits") for seq in sequences)]
    name = rng.choice(names) if names else "tokens.0"
    now = np.asarray(arrays.get(name, np.zeros(12, np.int32) if name.startswith("t") else np.ones(n_vocab, np.float32)))
    kind = rng.choice(("shorter", "longer", "empty", "type", "value", "gone", "name", "many", "all", "long", "given"))
    if kind == "shorter":
        now = now[:-1]
    elif kind == "longer":
        now = np.concatenate([now, now[:1]])
    elif kind == "empty":
        now = now[:0]
    elif kind == "type":
        with np.errstate(all="ignore"):
            now = now.astype(rng.choice(("i1", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "i4")))
    elif kind == "value" and len(now):
        odd: tuple[float, ...] = (-1, 2**31 - 1, n_vocab, n_vocab - 1, -(2**31))
        odd = odd if now.dtype.kind == "i" else (np.nan, np.inf, -np.inf, 3e38, -0.0)
        now = now.copy()
        now[rng.randrange(len(now))] = rng.choice(odd)
    elif kind == "all" and now.dtype.kind == "f":
        now = np.full_like(now, rng.choice((np.nan, np.inf, -np.inf, 0.0, -3e38)))
    elif kind == "long":
        now = np.resize(now, rng.choice((100_000, 2 * max(1, len(now)))))
    arrays[name] = now
    if kind == "gone":
        del arrays[name]
    elif kind == "name":
        new = ("tokens.9", "tokens.-1", "tokens.00", "tokens.", "logits", "logits.1e0", "x", "tokens.0.0", "_", "meta")
        arrays[rng.choice(new)] = arrays.pop(name)
    elif kind == "many":
        arrays |= {f"a{i}": now[:1] for i in range(rng.choice((3, 400)))}
    return arrays, f"array {name}: {kind}"


def llama_file(tokens: npt.NDArray[np.int32], blob: bytes) -> bytes:
    """A sequence file of llama.cpp's: magic, version, tokens, and the blob without its head."""
    return struct.pack("<III", 0x67677371, 3, len(tokens)) + tokens.tobytes() + blob[8:]
