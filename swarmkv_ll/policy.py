"""Who goes into the next engine batch, and with how many tokens. Pure Python: a policy sees names, kinds and counts."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Literal, Protocol
from weakref import WeakKeyDictionary, WeakSet

from .errors import InvalidArgumentError

Kind = Literal["decode", "prompt", "prefill"]

TILE = 64
"""Tokens from which on the engine's flash attention on the CPU computes in tiles (`ops.cpp`, GGML_FA_TILE_Q).

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
        # Tokens had, divided by the priority; apart for tokens of running branches and for the others.
        self._had: tuple[WeakKeyDictionary[Work, float], ...] = (WeakKeyDictionary(), WeakKeyDictionary())
        self._passed: WeakSet[Work] = WeakSet()  # who got nothing last time, but prompts did
        self._one = itertools.cycle((0, 1))  # of batches of one token, running branches get every second

    def choose(self, work: Sequence[Work], room: int) -> list[int]:
        grants = dict.fromkeys(range(len(work)), 0)
        running = self._in_turn(work, [i for i, w in enumerate(work) if w.kind == "decode"])
        others = self._in_turn(work, [i for i, w in enumerate(work) if w.kind != "decode"])
        cap = self.cap or room
        half = room // 2 if room > 1 or not (running and others) else next(self._one)
        wanted = sum(min(work[i].n_tokens, cap) for i in others)
        most = room - min(room - half, self.chunk, wanted)
        for i in running[: min(most, self.max_branches or most)]:
            grants[i] = 1
        left = min(self.chunk, room - sum(grants.values()))
        whole = min(left, cap)
        for i in others:
            n, limit = work[i].n_tokens, min(left, cap)
            grants[i] = _piece(n, limit, whole) if work[i].kind == "prefill" else min(n, limit)
            left -= grants[i]
        joined = any(work[i].kind == "prompt" and grants[i] for i in others)
        self._passed = WeakSet(work[i] for i in others if joined and not grants[i])
        for i, n in grants.items():
            self._had[work[i].kind == "decode"][work[i]] += n / work[i].priority
        return list(grants.values())

    def _in_turn(self, work: Sequence[Work], indices: list[int]) -> list[int]:
        """Those that have had least come first; a newcomer is as if it had had what the least of them has had.

        Of equals, prompts come before documents, but not twice in a row before one that then got nothing: with a
        newcomer in every batch it would never go on.
        """
        if not indices:
            return []
        had = self._had[work[indices[0]].kind == "decode"]
        least = min((had[work[i]] for i in indices if work[i] in had), default=0.0)
        for i in indices:
            had.setdefault(work[i], least)
        return sorted(indices, key=lambda i: (had[work[i]], work[i].kind == "prefill" and work[i] not in self._passed))


def _piece(wanted: int, limit: int, whole: int) -> int:
    """How many of a document's next `wanted` tokens to take, so that no piece of it is smaller than a tile.

    Up to `limit` may be taken now; another time it may be `whole`. 0 if it is better to wait for that.
    """
    if wanted <= limit:
        return wanted
    piece = min(limit, -(-wanted // -(-wanted // max(whole, 1))))
    return piece if limit == whole or min(piece, wanted - piece) >= TILE else 0
