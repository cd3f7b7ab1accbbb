"""How many KV cells each sequence holds, and how many are free. The engine does not tell, so the context keeps count.

A cell holds one token's K and V rows. In a unified cache all sequences share one pool, and a copied sequence shares
its cells with the original until one of them is removed; otherwise each sequence has a pool of its own.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .blob import Cells

_Array = npt.NDArray[np.int32]
_State = tuple[tuple[_Array, ...], tuple[_Array, ...]]


class CellLedger:
    """Counts cells per sequence, shared ones once.

    Parameters
    ----------
    n_cells : int
        Cells of the pool (unified), or of each sequence's own pool.
    n_seq_max : int
    unified : bool
    """

    def __init__(self, n_cells: int, n_seq_max: int, *, unified: bool) -> None:
        self.n_cells, self.unified = n_cells, unified
        n_pools = 1 if unified else n_seq_max
        # Owners of each cell in each pool, and each sequence's rows of (position, cell). Arrays are never changed in
        # place, and both are replaced by one assignment: a Ctrl-C finds the old count or the new one.
        self._state: _State = ((np.zeros(n_cells, np.int32),) * n_pools, (np.empty((0, 2), np.int32),) * n_seq_max)

    def _pool(self, seq: int) -> _Array:
        return self._state[0][0 if self.unified else seq]

    def _held(self, seq: int) -> _Array:
        return self._state[1][seq]

    def _commit(self, seq: int, pool: _Array, held: _Array) -> None:
        pools, rows = list(self._state[0]), list(self._state[1])
        pools[0 if self.unified else seq], rows[seq] = pool, held
        self._state = tuple(pools), tuple(rows)

    def free(self, seq: int) -> int:
        """Free cells in the pool that `seq` draws from."""
        return int(np.count_nonzero(self._pool(seq) == 0))

    def free_without(self, seq: int) -> int:
        """Free cells there would be if `seq` were removed."""
        cells = self._held(seq)[:, 1]
        return self.free(seq) + int(np.count_nonzero(self._pool(seq)[cells] == 1))

    def positions(self, seq: int) -> _Array:
        """Position of each cell that `seq` holds."""
        return self._held(seq)[:, 0]

    def add(self, seq: int, positions: _Array) -> None:
        """`seq` takes a new cell for each position; the caller has made sure that they are free."""
        pool, held = _take(self._pool(seq).copy(), positions)
        self._commit(seq, pool, np.concatenate([self._held(seq), held]))

    def replace(self, seq: int, positions: _Array) -> None:
        """`seq` lets go of all its cells and takes a new one for each position."""
        pool = self._pool(seq).copy()
        pool[self._held(seq)[:, 1]] -= 1
        self._commit(seq, *_take(pool, positions))

    def remove(self, seq: int, begin: int, end: int) -> None:
        """`seq` lets go of its cells at positions begin … end−1."""
        pool, held = self._pool(seq).copy(), self._held(seq)
        inside = (held[:, 0] >= begin) & (held[:, 0] < end)
        pool[held[inside, 1]] -= 1
        self._commit(seq, pool, held[~inside])

    def share(self, source: int, target: int, end: int) -> None:
        """`target`, which is empty, takes the cells of `source` at positions below `end` (unified only)."""
        pool, held = self._pool(target).copy(), self._held(source)
        taken = held[held[:, 0] < end]
        pool[taken[:, 1]] += 1
        self._commit(target, pool, taken)

    def load(self, pools: list[Cells | None]) -> None:
        """Each pool holds a whole context's cells, from its first cell on, and nothing else."""
        owners, held = list(self._state[0]), [np.empty((0, 2), np.int32)] * len(self._state[1])
        for i, cells in enumerate(pools):
            owners[i] = np.zeros_like(owners[i])
            if cells is None:
                continue
            owners[i][: len(cells)] = cells.n_owners
            for seq in np.unique(cells.owners).tolist():
                index = cells.held_by(seq)
                held[seq] = np.stack([cells.pos[index], index.astype(np.int32)], axis=1)
        self._state = tuple(owners), tuple(held)

    def clear(self) -> None:
        """Nobody holds anything."""
        pools, rows = self._state
        self._state = (np.zeros_like(pools[0]),) * len(pools), (rows[0][:0],) * len(rows)


def _take(pool: _Array, positions: _Array) -> tuple[_Array, _Array]:
    """Free cells of `pool` for `positions`: the pool with them taken, and rows of (position, cell)."""
    held = np.empty((len(positions), 2), np.int32)
    held[:, 0] = positions
    held[:, 1] = np.flatnonzero(pool == 0)[: len(positions)]
    pool[held[:, 1]] = 1
    return pool, held
