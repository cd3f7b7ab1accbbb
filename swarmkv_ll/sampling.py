"""Choosing the next token, through the engine's own sampler chain."""

from __future__ import annotations

import math
import operator
import weakref
from copy import copy
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import ClosedError, InvalidArgumentError
from .ffi import C, ffi

_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
RANDOM_SEED = 0xFFFFFFFF
"""The engine's own value for "a new seed each time"."""


class Sampler:
    """A `llama_sampler` chain. Without arguments it is greedy.

    Parameters
    ----------
    temperature : float
        0 takes the most likely token always; the other parameters then have no effect.
    top_k : int
        Keep the k most likely tokens, 0 for all.
    top_p : float
        Keep the most likely tokens that together reach this probability, 1 for all.
    min_p : float
        Drop tokens less likely than this share of the most likely one, 0 for none.
    seed : int
        0 to 2³²−2 for a repeatable choice; by default a new one each time.

    Notes
    -----
    Order of the chain: top-k, top-p, min-p, temperature, draw. A sampler has a random state and a scratch buffer:
    use one in one thread at a time, and `clone` it for another branch.
    """

    def __init__(
        self,
        temperature: float = 0.0,
        *,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = RANDOM_SEED,
    ) -> None:
        temperature, top_p, min_p = float(temperature), float(top_p), float(min_p)
        top_k, seed = operator.index(top_k), operator.index(seed)
        for name, value, wanted, ok in (
            ("temperature", temperature, "a finite number, 0 or more", math.isfinite(temperature) and temperature >= 0),
            ("top_k", top_k, "0 to 2147483647", 0 <= top_k < 2**31),
            ("top_p", top_p, "above 0, at most 1", 0 < top_p <= 1),
            ("min_p", min_p, "0 to 1", 0 <= min_p <= 1),
            ("seed", seed, "0 to 4294967295", 0 <= seed <= RANDOM_SEED),
        ):
            if not ok:
                raise InvalidArgumentError(f"{name} should be {wanted}, is {value}")
        self.temperature, self.top_k, self.top_p, self.min_p, self.seed = temperature, top_k, top_p, min_p, seed
        self._own(C.llama_sampler_chain_init(C.llama_sampler_chain_default_params()))
        if temperature == 0:
            self._add(C.llama_sampler_init_greedy())
            return
        if top_k:
            self._add(C.llama_sampler_init_top_k(top_k))
        if top_p < 1:
            self._add(C.llama_sampler_init_top_p(top_p, 1))
        if min_p > 0:
            self._add(C.llama_sampler_init_min_p(min_p, 1))
        self._add(C.llama_sampler_init_temp(temperature))
        self._add(C.llama_sampler_init_dist(seed))

    def _add(self, link: Any) -> None:
        C.llama_sampler_chain_add(self._chain, link)

    def _own(self, chain: Any) -> None:
        self._chain = chain
        self._freed = weakref.finalize(self, C.llama_sampler_free, chain)
        self._freed.atexit = False
        self._candidates = np.empty(0, _CANDIDATE)

    def sample(self, logits: npt.NDArray[np.float32]) -> int:
        """Choose a token and remember it.

        Parameters
        ----------
        logits : ndarray of float32, shape (n_vocab,)
            Not changed.
        """
        if not isinstance(logits, np.ndarray):
            raise InvalidArgumentError(f"logits should be a numpy array, are {type(logits).__name__}")
        if logits.ndim != 1 or logits.dtype != np.float32 or not logits.size:
            raise InvalidArgumentError(
                f"logits should be float32 of shape (n_vocab,), are {logits.dtype} {logits.shape}"
            )
        pointer = self._ptr
        if self.temperature == 0:  # the engine would be handed a list of all tokens, for its first highest logit
            token = int(logits.argmax())
            if not np.isnan(logits[token]):
                return token
        if len(self._candidates) != len(logits):
            self._candidates = np.empty(len(logits), _CANDIDATE)
        self._candidates["id"] = np.arange(len(logits), dtype=np.int32)
        self._candidates["logit"] = logits
        self._candidates["p"] = 0
        array = ffi.new("llama_token_data_array *")
        array.data = ffi.from_buffer("llama_token_data[]", self._candidates)
        array.size, array.selected, array.sorted = len(logits), -1, False
        C.llama_sampler_apply(pointer, array)
        if not 0 <= array.selected < array.size:
            raise InvalidArgumentError("no token could be chosen from these logits (are they all NaN?)")
        token = int(array.data[array.selected].id)
        C.llama_sampler_accept(pointer, token)
        return token

    def for_branch(self, index: int) -> Sampler:
        """A sampler of the same kind for one of several branches: seeded with seed + index, or anew without a seed."""
        seed = self.seed if self.seed == RANDOM_SEED else (self.seed + index) % RANDOM_SEED
        return Sampler(self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p, seed=seed)

    def clone(self) -> Sampler:
        """Another sampler in the same state."""
        twin = copy(self)
        twin._own(C.llama_sampler_clone(self._ptr))
        return twin

    def reset(self) -> None:
        """Back to the state after construction."""
        C.llama_sampler_reset(self._ptr)

    def close(self) -> None:
        """Free the chain. Does nothing the second time."""
        self._freed()

    @property
    def _ptr(self) -> Any:
        if not self._freed.alive:
            raise ClosedError("sampler")
        return self._chain

    def __enter__(self) -> Sampler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
