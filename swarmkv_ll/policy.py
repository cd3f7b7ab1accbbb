"""Who goes into the next engine batch, and with how many tokens. Pure Python: a policy sees names, kinds and counts."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Literal, Protocol
from weakref import WeakKeyDictionary

from .errors import InvalidArgumentError

Kind = Literal["decode", "prompt", "prefill"]
KINDS: tuple[Kind, ...] = ("decode", "prompt", "prefill")

TILE = 64
"""Tokens from which on the engine's flash attention on the CPU computes in tiles, and cells in one of those.

(`use_tiled` in `ggml-cpu/ops.cpp`, GGML_FA_TILE_Q and GGML_FA_TILE_KV in `ggml-cpu/common.h` of the pinned source.)

A document's K and V come out the same, bit for bit, however it is cut, as long as no batch has fewer.
"""


class Work(Protocol):
    """What one sequence wants to have computed. The same object from step to step.

    Attributes
    ----------
    name : str
    kind : {"decode", "prompt", "prefill"}
        The next token of a running branch, the prompt of one that is joining, or a document.
    n_tokens : int
        How many tokens could go into this batch: 1 of a running branch.
    priority : float
        Above 0.
    """

    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> Kind: ...
    @property
    def priority(self) -> float: ...
    @property
    def n_tokens(self) -> int: ...


class Policy(Protocol):
    """Decides who goes into a batch."""

    def choose(self, work: Sequence[Work], room: int) -> Sequence[int]:
        """How many tokens of each go into the next batch: each 0 to its `n_tokens`, together 1 to `room`."""


class FairShare:
    """Every running branch gets a token in every batch; prompts and documents share one chunk beside them.

    Where there is not room for all, those go first that have had least, measured by their priority: with twice the
    priority a branch gets twice the tokens, and none gets nothing. Prompts and documents, as far as they have use for
    it, get at least half of a batch, and running branches the other half, so that neither waits for the other to end.
    Of the chunk, prompts come first; documents after a batch in which they got nothing.

    Parameters
    ----------
    chunk : int
        Tokens of prompts and documents in one batch, all together. It bounds the gap that a running branch sees.
    cap : int, optional
        Tokens of one branch or document in a batch at most.
    max_branches : int, optional
        Running branches in one batch at most.
    """

    def __init__(self, chunk: int = 128, *, cap: int | None = None, max_branches: int | None = None) -> None:
        for name, value in (("chunk", chunk), ("cap", cap), ("max_branches", max_branches)):
            if value is not None and operator.index(value) < 1:
                raise InvalidArgumentError(f"{name} should be at least 1, is {value}")
        self.chunk, self.cap, self.max_branches = chunk, cap, max_branches
        # By kind: tokens had, divided by the priority; and what each would have had, had all had the same.
        self._had: dict[Kind, WeakKeyDictionary[Work, float]] = {kind: WeakKeyDictionary() for kind in KINDS}
        self._fair: dict[Kind, float] = dict.fromkeys(KINDS, 0.0)
        self._documents_first = False
        self._one = itertools.cycle((0, 1))  # of batches of one token, running branches get every second

    def choose(self, work: Sequence[Work], room: int) -> list[int]:
        grants = [0] * len(work)
        running, prompts, documents = (self._in_turn(work, kind) for kind in KINDS)
        others = [*documents, *prompts] if self._documents_first else [*prompts, *documents]
        cap = self.cap or room
        half = room // 2 if room > 1 or not (running and others) else next(self._one)
        most = room - min(room - half, self.chunk, sum(min(work[i].n_tokens, cap) for i in others))
        for i in running[: min(most, self.max_branches or most)]:
            grants[i] = 1
        left = min(self.chunk, room - sum(grants))
        whole = min(left, cap)
        for i in others:
            n, limit = work[i].n_tokens, min(left, cap)
            grants[i] = _piece(n, limit, whole) if work[i].kind == "prefill" else min(n, limit)
            left -= grants[i]
        self._documents_first = any(grants[i] for i in prompts) and not any(grants[i] for i in documents)
        for indices in filter(None, (running, prompts, documents)):
            kind = work[indices[0]].kind
            for i in indices:
                self._had[kind][work[i]] += grants[i] / work[i].priority
            self._fair[kind] += sum(grants[i] for i in indices) / sum(work[i].priority for i in indices)
        return grants

    def _in_turn(self, work: Sequence[Work], kind: Kind) -> list[int]:
        """Those of a kind, who had least first. A newcomer is as if it had had what is fair.

        That also moves on with what those had that have left: else one that had something would wait behind ever new
        ones, if these come as fast as they leave.
        """
        indices, had = [i for i, w in enumerate(work) if w.kind == kind], self._had[kind]
        known = [had[work[i]] for i in indices if work[i] in had]
        if known:
            self._fair[kind] = min(max(self._fair[kind], min(known)), max(known))
        for i in indices:
            had.setdefault(work[i], self._fair[kind])
        return sorted(indices, key=lambda i: had[work[i]])


def _piece(wanted: int, limit: int, whole: int) -> int:
    """How many of a document's next `wanted` tokens to take, so that no piece of it is smaller than a tile.

    Up to `limit` may be taken now; another time it may be `whole`. 0 if it is better to wait for that.
    """
    if wanted <= limit:
        return wanted
    piece = min(limit, -(-wanted // -(-wanted // max(whole, 1))))
    return piece if limit == whole or min(piece, wanted - piece) >= TILE else 0
