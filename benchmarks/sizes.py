"""The sizes that operations are measured at: real states of so many tokens, and synthetic ones of so many bytes."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from swarmkv_ll import Arena, Context, Snapshot
from swarmkv_ll.blob import MAGIC, Parts, StateBlob, parse
from swarmkv_ll.fanout import prefill
from swarmkv_ll.identity import Identity, Rope, SavedModel
from swarmkv_ll.pipeline_measure import N_DOCUMENT
from swarmkv_ll.record import Record
from swarmkv_ll.skv import Allocate, Contents

BYTES = {"1KiB": 1 << 10, "16KiB": 16 << 10, "256KiB": 256 << 10, "4MiB": 4 << 20, "64MiB": 64 << 20, "1GiB": 1 << 30}
"""A synthetic state's name, and the most bytes it has."""

TOKENS = (64, 512, 2048, N_DOCUMENT, 8000)
"""Lengths of real states of the default model, which was trained on 8,192."""

SLACK = 65536
"""Bytes by which a state can grow when it is converted, and be rounded up in an arena."""


def _name(size: str | int) -> str:
    return f"{size}-tokens" if isinstance(size, int) else size


def _parametrize(name: str, sizes: Iterable[str | int]) -> Any:
    return pytest.mark.parametrize(name, sizes, ids=_name, indirect=name == "place")


at_any_size = _parametrize("place", [*BYTES, *TOKENS])
synthetic = _parametrize("place", BYTES)
real = _parametrize("place", TOKENS)
by_tokens = _parametrize("n_tokens", TOKENS)


@dataclass(frozen=True)
class Place:
    """A state, and an arena with room for two more like it."""

    size: str | int
    snapshot: Snapshot
    arena: Arena

    @property
    def sizes(self) -> dict[str, int]:
        """For `extra_info`."""
        return {"n_bytes": self.snapshot.n_bytes, "n_tokens": self.snapshot.n_tokens}


# ── real states ──────────────────────────────────────────────────────────────────────────────────────


class Prefill:
    """The session's prefill of the longest document that a selected benchmark needs: made once, shorter states are cut."""

    def __init__(self, ctx: Context, tokens: npt.NDArray[np.int32]) -> None:
        self.ctx, self.tokens, self.seconds = ctx, tokens, 0.0

    def run(self) -> None:
        if not self.seconds:
            begin = perf_counter()
            prefill(self.ctx, self.tokens)
            self.seconds = perf_counter() - begin


# ── synthetic states ─────────────────────────────────────────────────────────────────────────────────

PARTS = Parts(n_attention=1, recurrent=False, cell_extension=False)
_IDENTITY = Identity(SavedModel("", "synthetic"), "", "f16", "f16", True, (False, False), Rope(), ())


def make_snapshot(size: str, arena: Arena) -> Snapshot:
    """An attention state of as many cells as fit into that size: f16, V as it is with flash attention."""

    def receive(allocate: Allocate) -> Contents:
        blob = write_state(BYTES[size], allocate=allocate)
        return Record(blob.layout, _IDENTITY, {}, {}).contents(blob.data)

    return Snapshot._received(arena, receive, None)


def write_state(most: int, *, allocate: Allocate, arch: str = "") -> StateBlob:
    """A blob of at most `most` bytes: of a sequence, or, with `arch`, of a whole context whose cells are all sequence 0's.

    30 layers and rows of 384 bytes, as the default model has them; one layer and rows of 32 bytes where that is too much.
    """
    n_layer, row_bytes = (30, 384) if most >= 1 << 16 else (1, 32)
    head = struct.pack("<I", len(arch)) + arch.encode() if arch else struct.pack("<Ii", MAGIC, 0)
    n_cells = (most - len(head) - 16 - 24 * n_layer) // (12 + 2 * n_layer * row_bytes)
    cells = np.zeros((n_cells, 3), "<i4")
    cells[:, 0], cells[:, 1] = np.arange(n_cells), 1
    pieces = [head, struct.pack("<II", 1, n_cells), cells.tobytes(), struct.pack("<II", 0, n_layer)]
    tensor = struct.pack("<iQ", 1, row_bytes)
    data = allocate(sum(map(len, pieces)) + 2 * n_layer * (len(tensor) + row_bytes * n_cells))
    values = np.random.default_rng(0).random(row_bytes * n_cells // 2).astype(np.float16).view(np.uint8)
    at = 0
    for piece in [*pieces, *(2 * n_layer * [tensor, values])]:
        data[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
        at += len(piece)
    return parse(data, PARTS)
