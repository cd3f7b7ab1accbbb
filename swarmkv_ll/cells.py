"""Which KV cells each sequence holds, and which are free. The engine does not tell, so the context keeps count.

A cell holds one token's K and V rows. In a unified cache all sequences share one pool, and a copied sequence shares
its cells with the original until one of them is removed; otherwise each sequence has a pool of its own.

Cells are taken as the engine takes them (`find_slot`, `apply_ubatch` and `seq_rm` of `llama-kv-cache.cpp`): the first
free ones from a head on, which moves behind what was taken and back to what was freed. So the ledger also tells how
scattered a restore would lie. Counts are always right; where cells lie is known until a decode fails half-way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .blob import StreamLayout

_Array = npt.NDArray[np.int32]


class _Pool(NamedTuple):
    """Owners of each cell, and where the search for free ones begins."""

    owners: _Array
    head: int

    def find(self, n: int) -> _Array:
        """The free cells that `n` tokens take."""
        n_used = int(np.count_nonzero(self.owners))
        head = 0 if self.head > n_used + 2 * n else self.head
        free = np.flatnonzero(self.owners == 0)
        return np.roll(free, -int(np.searchsorted(free, head)))[:n].astype(np.int32)

    def take(self, cells: _Array) -> _Pool:
        owners = self.owners.copy()
        owners[cells] = 1
        return _Pool(owners, int(cells[-1]) + 1 if len(cells) else self.head)

    def drop(self, cells: _Array) -> _Pool:
        owners = self.owners.copy()
        owners[cells] -= 1
        freed = cells[owners[cells] == 0]
        return _Pool(owners, min(self.head, int(freed.min())) if len(freed) else self.head)


class CellLedger:
    """Counts cells per sequence, shared ones once.

    Parameters
    ----------
    n_cells : int
        Cells of the pool (unified), or of each sequence's own pool.
    n_seq_max : int
    unified : bool
    n_ubatch : int
        Tokens that the engine takes cells for at once.

    Attributes
    ----------
    exact : bool
        Whether it is known where cells lie.
    """

    def __init__(self, n_cells: int, n_seq_max: int, *, unified: bool, n_ubatch: int = 2**31) -> None:
        self.unified, self.n_ubatch, self.exact = unified, n_ubatch, True
        self._empty = _Pool(np.zeros(n_cells, np.int32), 0)
        # The pools, and each sequence's rows of (position, cell). Arrays are never changed in place, and both are
        # replaced by one assignment: a Ctrl-C finds the old count or the new one.
        self._state: tuple[tuple[_Pool, ...], tuple[_Array, ...]] = (
            (self._empty,) * (1 if unified else n_seq_max),
            (np.empty((0, 2), np.int32),) * n_seq_max,
        )

    def _pool(self, seq: int) -> _Pool:
        return self._state[0][0 if self.unified else seq]

    def _held(self, seq: int) -> _Array:
        return self._state[1][seq]

    def _commit(self, seq: int, pool: _Pool, held: dict[int, _Array]) -> None:
        pools, rows = list(self._state[0]), list(self._state[1])
        pools[0 if self.unified else seq] = pool
        for holder, some in held.items():
            rows[holder] = some
        self._state = tuple(pools), tuple(rows)

    def free(self, seq: int) -> int:
        """Free cells in the pool that `seq` draws from."""
        return int(np.count_nonzero(self._pool(seq).owners == 0))

    def free_without(self, seq: int) -> int:
        """Free cells there would be if `seq` were removed."""
        cells = self._held(seq)[:, 1]
        return self.free(seq) + int(np.count_nonzero(self._pool(seq).owners[cells] == 1))

    def positions(self, seq: int) -> _Array:
        """Position of each cell that `seq` holds, in order of cells."""
        held = self._held(seq)
        ordered: _Array = held[np.argsort(held[:, 1]), 0]
        return ordered

    def runs(self, seq: int) -> tuple[int, ...]:
        """Lengths of the runs of neighbouring cells that `seq` holds, in order of cells."""
        cells = np.sort(self._held(seq)[:, 1])
        ends = np.flatnonzero(np.diff(cells) != 1) + 1
        return tuple(np.diff([0, *ends, len(cells)]).tolist())

    def runs_of(self, n: int, seq: int) -> int:
        """Into how many runs of neighbouring cells `n` tokens would go in the place of what `seq` holds."""
        return _n_runs(self._pool(seq).drop(self._held(seq)[:, 1]).find(n))

    def others(self, seq: int) -> tuple[int, int]:
        """How many cells are held without those of `seq`, and in how many runs."""
        used = np.flatnonzero(self._pool(seq).drop(self._held(seq)[:, 1]).owners)
        return len(used), _n_runs(used)

    def add(self, parts: Sequence[tuple[int, _Array]]) -> None:
        """Each (sequence, positions) takes new cells, in one batch; the caller has made sure that they are free."""
        if not self.unified:
            for seq, positions in parts:
                self._add(seq, [(seq, positions)])
        elif parts:
            self._add(parts[0][0], parts)

    def _add(self, seq: int, parts: Sequence[tuple[int, _Array]]) -> None:
        """Parts that draw from one pool."""
        pool, taken, n = self._pool(seq), [], sum(len(positions) for _, positions in parts)
        for begin in range(0, n, self.n_ubatch):
            taken.append(pool.find(min(self.n_ubatch, n - begin)))
            pool = pool.take(taken[-1])
        cells, held, at = np.concatenate([np.empty(0, np.int32), *taken]), {}, 0
        for owner, positions in parts:
            mine = np.stack([positions, cells[at : at + len(positions)]], axis=1)
            held[owner] = np.concatenate([self._held(owner), mine])
            at += len(positions)
        self._commit(seq, pool, held)

    def replace(self, seq: int, positions: _Array) -> None:
        """`seq` lets go of all its cells and takes a new one for each position."""
        pool = self._pool(seq).drop(self._held(seq)[:, 1])
        cells = pool.find(len(positions))
        self._commit(seq, pool.take(cells), {seq: np.stack([positions, cells], axis=1)})

    def remove(self, seq: int, begin: int, end: int) -> None:
        """`seq` lets go of its cells at positions begin … end−1."""
        held = self._held(seq)
        inside = (held[:, 0] >= begin) & (held[:, 0] < end)
        self._commit(seq, self._pool(seq).drop(held[inside, 1]), {seq: held[~inside]})

    def share(self, source: int, target: int, end: int) -> None:
        """`target`, which is empty, takes the cells of `source` at positions below `end` (unified only)."""
        pool, held = self._pool(target), self._held(source)
        owners, taken = pool.owners.copy(), held[held[:, 0] < end]
        owners[taken[:, 1]] += 1
        self._commit(target, _Pool(owners, pool.head), {target: taken})

    def load(self, streams: Sequence[StreamLayout | None]) -> None:
        """The pools hold a whole context's streams, each from its first cell on, and nothing else."""
        loaded, held = [], [np.empty((0, 2), np.int32)] * len(self._state[1])
        for stream in streams:
            owners = np.zeros_like(self._empty.owners)
            if stream is not None:
                cells = stream.cells
                owners[: len(cells)] = cells.n_owners
                for seq in np.unique(cells.owners).tolist():
                    index = cells.held_by(seq).astype(np.int32)
                    held[seq] = np.stack([cells.pos[index], index], axis=1)
            loaded.append(_Pool(owners, 0))
        self._state = tuple(loaded), tuple(held)
        self.exact = True

    def clear(self) -> None:
        """Nobody holds anything."""
        pools, rows = self._state
        self._state = (self._empty,) * len(pools), (rows[0][:0],) * len(rows)
        self.exact = True


def _n_runs(cells: npt.NDArray[np.integer]) -> int:
    return int(np.count_nonzero(np.diff(cells) != 1)) + 1 if len(cells) else 0
