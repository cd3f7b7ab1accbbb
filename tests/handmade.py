"""State blobs by hand: what a memory holds, cell by cell, and a writer that is slow and obviously right.

Nothing here is shared with `swarmkv_ll.blob`: numbers of types and the order of fields are written down once more.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from swarmkv_ll.blob import Parts

MAGIC = 0xAF143CD8

TYPES = {
    "f32": (0, 1, 4),
    "f16": (1, 1, 2),
    "q4_0": (2, 32, 18),
    "q4_1": (3, 32, 20),
    "q5_0": (6, 32, 22),
    "q5_1": (7, 32, 24),
    "q8_0": (8, 32, 34),
    "iq4_nl": (20, 32, 18),
    "bf16": (30, 1, 2),
}
"""Number, values a block, bytes a block."""

Shape = Sequence[tuple[str, int]]
"""Type and values a row, for each layer."""


def row_bytes(kind: str, n_embd: int) -> int:
    _, block, n_bytes = TYPES[kind]
    return n_embd // block * n_bytes


@dataclass
class Cell:
    pos: int
    owners: list[int]
    k: list[bytes]
    v: list[bytes]
    ext: tuple[int, int, int] = (0, 0, 0)


@dataclass
class Cache:
    streams: list[list[Cell]]
    k: Shape
    v: Shape
    v_trans: bool = False


@dataclass
class RecurrentCell:
    pos: int
    owners: list[int]
    r: list[bytes]
    s: list[bytes]


@dataclass
class RecurrentMemory:
    cells: list[RecurrentCell]
    r: list[int]  # bytes a row, of each layer that has one
    s: list[int]
    n_layer: int = 7


@dataclass
class State:
    """Of one sequence, or with `arch` of a whole context."""

    caches: list[Cache] = field(default_factory=list)
    recurrent: RecurrentMemory | None = None
    seq_id: int = 3
    arch: str | None = None
    extension: bool = False
    has_v: bool = True

    @property
    def parts(self) -> Parts:
        return Parts(len(self.caches), self.recurrent is not None, self.extension, self.has_v)

    def chunks(self) -> list[tuple[str, bytes]]:
        """Every field in order, with a name; those that end in "data" are tensors'."""
        out: list[tuple[str, bytes]] = []

        def put(name: str, code: str, *values: int) -> None:
            out.append((name, struct.pack("<" + code, *values)))

        if self.arch is None:
            put("magic", "I", MAGIC)
            put("seq_id", "i", self.seq_id)
        else:
            put("arch length", "I", len(self.arch))
            out.append(("arch", self.arch.encode()))
        for c, cache in enumerate(self.caches):
            put(f"c{c} n_stream", "I", len(cache.streams))
            for s, cells in enumerate(cache.streams):
                at = f"c{c} s{s}"
                put(f"{at} cell_count", "I", len(cells))
                if not cells:
                    continue
                for i, cell in enumerate(cells):
                    put(f"{at} cell {i} pos", "i", cell.pos)
                    put(f"{at} cell {i} n_seq_id", "I", len(cell.owners))
                    if self.extension:
                        put(f"{at} cell {i} ext", "iii", *cell.ext)
                    for j, owner in enumerate(cell.owners):
                        put(f"{at} cell {i} seq_id {j}", "i", owner)
                put(f"{at} v_trans", "I", cache.v_trans)
                put(f"{at} n_layer", "I", len(cache.k))
                for layer, (kind, n_embd) in enumerate(cache.k):
                    put(f"{at} K{layer} type", "i", TYPES[kind][0])
                    put(f"{at} K{layer} size", "Q", row_bytes(kind, n_embd))
                    out.append((f"{at} K{layer} data", b"".join(cell.k[layer] for cell in cells)))
                for layer, (kind, n_embd) in enumerate(cache.v if self.has_v else ()):
                    put(f"{at} V{layer} type", "i", TYPES[kind][0])
                    if not cache.v_trans:
                        put(f"{at} V{layer} size", "Q", row_bytes(kind, n_embd))
                        out.append((f"{at} V{layer} data", b"".join(cell.v[layer] for cell in cells)))
                        continue
                    size = TYPES[kind][2]
                    put(f"{at} V{layer} el_size", "I", size)
                    put(f"{at} V{layer} n_embd", "I", n_embd)
                    data = b"".join(cell.v[layer][size * j : size * (j + 1)] for j in range(n_embd) for cell in cells)
                    out.append((f"{at} V{layer} data", data))
        if self.recurrent:
            memory = self.recurrent
            put("r cell_count", "I", len(memory.cells))
            for i, cell in enumerate(memory.cells):
                owners = cell.owners if self.arch else []
                put(f"r cell {i} pos", "i", cell.pos)
                put(f"r cell {i} n_seq_id", "I", len(owners))
                for j, owner in enumerate(owners):
                    put(f"r cell {i} seq_id {j}", "i", owner)
            put("r s_trans", "I", 0)
            put("r n_layer", "I", memory.n_layer)
            for name, sizes in (("R", memory.r), ("S", memory.s)):
                for layer, size in enumerate(sizes):
                    put(f"r {name}{layer} type", "i", 0)
                    put(f"r {name}{layer} size", "Q", size)
                    rows = [cell.r[layer] if name == "R" else cell.s[layer] for cell in memory.cells]
                    out.append((f"r {name}{layer} data", b"".join(rows)))
        return out

    def encode(self) -> bytes:
        return b"".join(data for _, data in self.chunks())

    def offsets(self) -> dict[str, int]:
        """Where each field begins."""
        found, at = {}, 0
        for name, data in self.chunks():
            found[name] = at
            at += len(data)
        return found

    def is_data(self) -> np.ndarray:
        """Of each byte, whether it is a tensor's."""
        return np.concatenate([np.full(len(data), name.endswith("data")) for name, data in self.chunks()])


SMALL: Shape = (("f16", 4), ("f16", 3))


def make_cell(rng: np.random.Generator, pos: int, owners: Sequence[int], k: Shape, v: Shape) -> Cell:
    """A cell of random bytes: any bits, infinities and NaN among them."""
    rows = [[rng.bytes(row_bytes(kind, n)) for kind, n in shape] for shape in (k, v)]
    ext = tuple(int(n) for n in rng.integers(0, 1000, 3))
    return Cell(int(pos), list(owners), *rows, ext)


def make_cache(
    rng: np.random.Generator,
    streams: Sequence[Sequence[int | tuple[int, Sequence[int]]]],
    *,
    owner: int | None = 3,
    k: Shape = SMALL,
    v: Shape | None = None,
    v_trans: bool = False,
) -> Cache:
    """A cache whose cells are given as positions, all of `owner` (None: of their stream), or as (position, owners)."""
    v = k if v is None else v
    made = []
    for s, cells in enumerate(streams):
        pairs = [cell if isinstance(cell, tuple) else (cell, [s if owner is None else owner]) for cell in cells]
        made.append([make_cell(rng, pos, owners, k, v) for pos, owners in pairs])
    return Cache(made, k, v, v_trans)


def make_recurrent(
    rng: np.random.Generator,
    cells: Sequence[tuple[int, Sequence[int]]] = ((5, ()),),
    *,
    r: Sequence[int] = (12, 12),
    s: Sequence[int] = (20, 20),
) -> RecurrentMemory:
    """A recurrent memory whose cells are given as (position, owners)."""
    made = [
        RecurrentCell(pos, list(owners), [rng.bytes(n) for n in r], [rng.bytes(n) for n in s]) for pos, owners in cells
    ]
    return RecurrentMemory(made, list(r), list(s))


def every_layout() -> dict[str, State]:
    """A small state of every layout there is, by name."""
    rng = np.random.default_rng(1)
    some = [0, 1, 2, 5, 4]
    shared: list[int | tuple[int, Sequence[int]]] = [(0, [0, 1, 2]), (1, [0]), (1, [1, 2]), (2, [2]), (3, [0])]
    f32, mixed = (("f32", 2), ("f32", 1)), (("q8_0", 64), ("q4_0", 32), ("bf16", 5), ("iq4_nl", 32))

    def cache(*streams: Sequence[int | tuple[int, Sequence[int]]], **options: object) -> Cache:
        return make_cache(rng, streams, **options)

    return {
        "attention": State([cache(some)]),
        "transposed": State([cache(some, v_trans=True)]),
        "f32 transposed": State([cache(some, k=SMALL, v=f32, v_trans=True)]),
        "mixed types": State([cache(some, k=mixed, v=mixed[::-1])]),
        "one cell": State([cache([7])]),
        "streams": State([cache([], some, [])]),
        "empty": State([cache([])]),
        "empty streams": State([cache([], [])]),
        "extension": State([cache(some)], extension=True),
        "without V": State([cache(some, v=())], has_v=False),
        "without V, transposed": State([cache(some, v=(), v_trans=True)], has_v=False),
        "window": State([cache(some), cache([5, 4], k=f32)]),
        "window empty": State([cache([]), cache([])]),
        "window, streams": State([cache([], some, []), cache([], [5, 4], [], k=f32)]),
        "window on all layers": State([cache(some, k=()), cache([5, 4])]),
        "window on no layer": State([cache(some), cache([5, 4], k=())]),
        "recurrent": State([], make_recurrent(rng)),
        "recurrent empty": State([], make_recurrent(rng, [])),
        "recurrent without S": State([], make_recurrent(rng, s=(0, 0))),
        "recurrent empty without S": State([], make_recurrent(rng, [], s=(0, 0))),
        "hybrid": State([cache(some, v_trans=True)], make_recurrent(rng)),
        "hybrid, streams": State([cache([], [], [], some)], make_recurrent(rng)),
        "hybrid, window": State([cache(some, k=()), cache([5, 4])], make_recurrent(rng, s=(0, 0))),
        "whole": State([cache(shared)], arch="llama"),
        "whole unshared": State([cache([(0, [1]), (0, [0]), (1, [0])])], arch="a"),
        "whole transposed": State([cache(shared, v_trans=True)], arch="gpt-oss_20b.x"),
        "whole empty": State([cache([])], arch="llama"),
        "whole streams": State([cache(some, [], [3, 0], owner=None)], arch="llama"),
        "whole extension": State([cache(shared)], extension=True, arch="llama"),
        "whole without V": State([cache(shared, v=())], has_v=False, arch="llama"),
        "whole window": State([cache(shared), cache(shared[2:], k=f32)], arch="llama"),
        "whole recurrent": State([], make_recurrent(rng, [(4, [0, 2]), (7, [1])]), arch="llama"),
        "whole hybrid": State([cache(shared)], make_recurrent(rng, [(3, [0]), (2, [1, 2])]), arch="llama"),
        "whole hybrid, streams": State(
            [cache(some, [], [3, 0], owner=None)],
            make_recurrent(rng, [(5, [0]), (3, [2])]),
            arch="llama",
        ),
    }


def random_state(rng: np.random.Generator, *, whole: bool | None = None) -> State:
    """Any state: kind of memory, types, streams, order of cells, sharing."""
    whole = bool(rng.integers(2)) if whole is None else whole
    n_attention = int(rng.integers(0, 3))
    recurrent = n_attention == 0 or bool(rng.integers(4) == 0)
    n_stream = int(rng.choice([1, 1, 3]))
    extension, has_v, v_trans = bool(rng.integers(4) == 0), bool(rng.integers(4)), bool(rng.integers(2))
    n_seq = n_stream if n_stream > 1 else 3
    seq_id = int(rng.integers(n_seq))
    home = seq_id if n_stream > 1 else 0
    plain = ["f32", "f16", "bf16"]
    quantized = plain if v_trans else [*plain, "q8_0", "q4_1"]

    def shape(kinds: list[str]) -> Shape:
        drawn = [str(rng.choice(kinds)) for _ in range(int(rng.integers(1, 4)))]
        return [(kind, int(rng.integers(1, 6)) if kind in plain else 32 * int(rng.integers(1, 3))) for kind in drawn]

    def positions() -> list[int]:
        found = rng.choice(40, int(rng.integers(1, 30)), replace=False)
        return [int(pos) for pos in (found if rng.integers(2) else np.sort(found))]

    last = {}
    firsts: list[list[int | tuple[int, Sequence[int]]]] = []
    if not whole:
        firsts = [positions() if s == home else [] for s in range(n_stream)]
        last[seq_id] = max(firsts[home])
    elif n_stream > 1:
        firsts = [positions() if rng.integers(4) else [] for _ in range(n_stream)]
        last = {s: max(cells) for s, cells in enumerate(firsts) if cells}
    else:
        cells: list[int | tuple[int, Sequence[int]]] = []
        for pos in positions():
            owners = rng.permutation(n_seq)[: int(rng.integers(1, n_seq + 1))].tolist()
            groups = [sorted(owners)] if rng.integers(2) else [[owner] for owner in owners]
            cells += [(pos, group) for group in groups]
            last.update({owner: max(pos, last.get(owner, 0)) for owner in owners})
        firsts = [cells]
    caches = []
    for c in range(n_attention):
        k = shape([*plain, "q8_0"])
        v = [] if not has_v else [(kind, n) for kind, n in (shape(quantized) * 3)[: len(k)]]
        first = 0 if c == 0 else int(rng.integers(0, 20))
        streams = [
            [cell for cell in stream if (cell if isinstance(cell, int) else cell[0]) >= first] for stream in firsts
        ]
        caches.append(
            make_cache(rng, streams, owner=None if whole and n_stream > 1 else seq_id, k=k, v=v, v_trans=v_trans)
        )
    memory = None
    if recurrent:
        sizes = [4 * int(n) for n in rng.integers(0, 5, 2)]
        of = [(pos, [owner]) for owner, pos in last.items()] if whole else [(last[seq_id], [])]
        memory = make_recurrent(rng, of, r=[sizes[0]] * 2, s=[sizes[1]] * 2)
    extension, has_v = extension and n_attention > 0, has_v or n_attention == 0
    return State(caches, memory, seq_id, "any" if whole else None, extension, has_v)
