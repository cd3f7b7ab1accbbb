"""How many KV cells each sequence holds, and how many are free. The engine does not tell, so the context keeps count.

A cell holds one token's K and V rows. In a unified cache all sequences share one pool, and a copied sequence shares
its cells with the original until one of them is removed; otherwise each sequence has a pool of its own.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


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
        self._owners = [np.zeros(n_cells, np.int32) for _ in range(1 if unified else n_seq_max)]
        empty = np.empty((0, 2), np.int32)
        self._held = [empty] * n_seq_max  # rows of (position, cell)

    def _pool(self, seq: int) -> npt.NDArray[np.int32]:
        return self._owners[0 if self.unified else seq]

    def free(self, seq: int) -> int:
        """Free cells in the pool that `seq` draws from."""
        return int(np.count_nonzero(self._pool(seq) == 0))

    def free_without(self, seq: int) -> int:
        """Free cells there would be if `seq` were removed."""
        cells = self._held[seq][:, 1]
        return self.free(seq) + int(np.count_nonzero(self._pool(seq)[cells] == 1))

    def positions(self, seq: int) -> npt.NDArray[np.int32]:
        """Position of each cell that `seq` holds."""
        return self._held[seq][:, 0]

    def add(self, seq: int, positions: npt.NDArray[np.int32]) -> None:
        """`seq` takes a new cell for each position; the caller has made sure that they are free."""
        pool = self._pool(seq)
        cells = np.flatnonzero(pool == 0)[: len(positions)].astype(np.int32)
        pool[cells] = 1
        self._held[seq] = np.concatenate([self._held[seq], np.stack([positions, cells], axis=1)])

    def remove(self, seq: int, begin: int, end: int) -> None:
        """`seq` lets go of its cells at positions begin … end−1."""
        held = self._held[seq]
        inside = (held[:, 0] >= begin) & (held[:, 0] < end)
        self._pool(seq)[held[inside, 1]] -= 1
        self._held[seq] = held[~inside]

    def share(self, source: int, target: int, end: int) -> None:
        """`target`, which is empty, takes the cells of `source` at positions below `end` (unified only)."""
        held = self._held[source]
        taken = held[held[:, 0] < end]
        self._pool(target)[taken[:, 1]] += 1
        self._held[target] = taken

    def clear(self) -> None:
        """Nobody holds anything."""
        for pool in self._owners:
            pool[:] = 0
        self._held = [self._held[0][:0]] * len(self._held)
