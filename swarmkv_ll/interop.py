"""llama-cpp-python on this library: its contexts adopted, and a prompt cache of snapshots for it.

    from swarmkv_ll.interop import SnapshotCache, adopt     # before llama_cpp is imported
    from llama_cpp import Llama

    llm = Llama("model.gguf", n_ctx=4096)
    ctx = adopt(llm)                                        # snapshots, forks, restores at memcpy speed
    cache = SnapshotCache(arena).attach(llm)                # or: its own prompt cache, kept in an arena

Importing this makes llama-cpp-python load our libllama (`LLAMA_CPP_LIB_PATH`, if it is not set) and loads the engine's
backends, which it does not find by itself. With a library of its own in the process, adopting is refused.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from . import runtime
from .arena import Arena
from .context import ROPE_SCALING, Context
from .errors import (
    ArenaExhaustedError,
    ClosedError,
    EngineConflictError,
    EngineLoadError,
    InvalidArgumentError,
    SwarmKVError,
)
from .ffi import LIB_DIR, ffi, foreign_engines
from .identity import Rope
from .snapshot import Snapshot

os.environ.setdefault("LLAMA_CPP_LIB_PATH", str(LIB_DIR))
runtime.start()

try:
    import llama_cpp
    from llama_cpp.llama import Llama
    from llama_cpp.llama_cache import BaseLlamaCache
except ImportError as error:
    raise ImportError(
        "llama-cpp-python is not installed: see docs/interop.md for how, without a second engine"
    ) from error

if foreign := foreign_engines():
    raise EngineConflictError(foreign)
for _name in ("llama_context_params", "llama_model_params", "llama_batch"):
    _theirs, _ours = ctypes.sizeof(getattr(llama_cpp, _name)), ffi.sizeof(f"struct {_name}")
    if _theirs != _ours:
        raise EngineLoadError(
            f"llama-cpp-python {llama_cpp.__version__} is for another engine: its {_name} has {_theirs} bytes, ours {_ours}"
        )


def adopt(llm: Any, *, owner: object = None) -> Context:
    """The context of a `Llama`, with what it was made with; see `Context.adopt`.

    Parameters
    ----------
    llm : llama_cpp.Llama
    owner : object, optional
        What the context keeps alive; by default `llm`.

    Raises
    ------
    ClosedError
        The Llama is closed.
    """
    if not isinstance(llm, Llama):
        raise InvalidArgumentError(
            f"expected a llama_cpp.Llama, got {type(llm).__name__}; Context.adopt takes an address"
        )
    made = llm.context_params
    rope = Rope(
        freq_base=float(made.rope_freq_base),
        freq_scale=float(made.rope_freq_scale),
        scaling=cast("Any", next(name for name, number in ROPE_SCALING.items() if number == made.rope_scaling_type)),
        yarn_ext_factor=float(made.yarn_ext_factor),
        yarn_attn_factor=float(made.yarn_attn_factor),
        yarn_beta_fast=float(made.yarn_beta_fast),
        yarn_beta_slow=float(made.yarn_beta_slow),
        yarn_orig_ctx=int(made.yarn_orig_ctx),
    )
    return Context.adopt(
        _address(llm),
        owner=llm if owner is None else owner,
        model_path=llm.model_path,
        rope=rope,
        adapters={llm.lora_path: llm.lora_scale} if llm.lora_path else {},
        swa_full=bool(made.swa_full),
    )


def _address(llm: Any) -> Any:
    """The `llama_context *` of a living Llama: a closed one's would be freed memory."""
    inner = getattr(llm, "_ctx", None)
    if inner is None or not inner.ctx:
        raise ClosedError("Llama")
    return inner.ctx


class SnapshotState:
    """What `Llama.save_state` gives while a `SnapshotCache` is attached, and `Llama.load_state` takes.

    Attributes
    ----------
    snapshot : Snapshot
    input_ids : ndarray of int32, shape (n_tokens,)
    n_tokens, seed : int
    scores : ndarray of float32, shape (n_tokens, n_vocab), or None
        Every token's logits, for a Llama with ``logits_all``.
    """

    def __init__(self, snapshot: Snapshot, llm: Any) -> None:
        self.snapshot = snapshot
        self.n_tokens = snapshot.n_tokens
        self.input_ids: npt.NDArray[np.int32] = next(iter(snapshot._record.tokens.values()))
        self.seed = llm._seed
        self.scores = llm.scores[: self.n_tokens].copy() if llm._logits_all else None


class SnapshotCache(BaseLlamaCache):  # type: ignore[misc]  # the package has no types
    """A prompt cache for one `Llama`, whose states are snapshots in an arena instead of copies of everything.

    `attach` puts it in place (`Llama.set_cache`) and has the Llama save and load its state through snapshots. Where the
    arena is full, the states that were not used for longest make room; the arena must not be closed before `detach`.

    Parameters
    ----------
    arena : Arena
        Where the states are kept. `Arena.n_bytes` is the cache's capacity.

    Attributes
    ----------
    hits, misses, dropped : int
        Prompts that began with a kept state, or did not; states that the arena had no room for.
    """

    def __repr__(self) -> str:
        return f"<SnapshotCache {len(self._states)} states, {self.cache_size:,} bytes>"

    # No __len__: Llama asks `if self.cache`, and an empty cache would never be filled.

    def __init__(self, arena: Arena) -> None:
        if not isinstance(arena, Arena):
            raise InvalidArgumentError(f"expected Arena, got {type(arena).__name__}")
        super().__init__(arena.n_bytes)
        self.arena = arena
        self.hits = self.misses = self.dropped = 0
        self._states: OrderedDict[bytes, SnapshotState] = OrderedDict()
        self._llm: weakref.ref[Any] | None = None
        self._ctx: Context | None = None

    def attach(self, llm: Any) -> SnapshotCache:
        """Use it for `llm`, until `detach`. The Llama is not kept alive, and stays what it is otherwise.

        Raises
        ------
        InvalidArgumentError
            It is attached already, or another one is to this Llama.
        """
        if self._llm is not None:
            raise InvalidArgumentError("this cache is attached already: detach() first, or make another")
        if isinstance(getattr(llm, "cache", None), SnapshotCache):
            raise InvalidArgumentError("another SnapshotCache is attached to this Llama: detach() that first")
        # The Llama frees its model when its last reference goes: it must not be in a cycle with what is set on it here.
        self._ctx, self._llm = adopt(llm, owner=self), weakref.ref(llm)
        llm.save_state, llm.load_state = self._save, self._load
        llm.set_cache(self)
        return self

    def detach(self) -> None:
        """Give the Llama its own functions back and the states' memory to the arena. Does nothing the second time."""
        llm = self._llm() if self._llm is not None else None
        if llm is not None:
            for name in ("save_state", "load_state"):
                vars(llm).pop(name, None)
            llm.set_cache(None)
        if self._ctx is not None:
            self._ctx.close()
        self._llm = self._ctx = None
        while self._states:
            self._states.popitem()[1].snapshot.release()

    # ── what Llama asks of a cache ───────────────────────────────────────────────────────────────────

    @property
    def cache_size(self) -> int:
        """Bytes of the states that are kept."""
        return sum(state.snapshot.n_bytes for state in self._states.values())

    def __contains__(self, key: Sequence[int]) -> bool:
        return self._best(key) is not None

    def __getitem__(self, key: Sequence[int]) -> SnapshotState:
        state = self._best(key)
        if state is None:
            self.misses += 1
            raise KeyError("no state that this prompt begins with")
        self.hits += 1
        self._states.move_to_end(state.input_ids.tobytes())
        return state

    def __setitem__(self, key: Sequence[int], value: Any) -> None:
        # The key ends in a token that was sampled and not evaluated: what a state holds is its own input_ids.
        if not isinstance(value, SnapshotState):
            self.dropped += 1
            return
        before = self._states.pop(value.input_ids.tobytes(), None)
        if before is not None and before is not value:
            before.snapshot.release()
        self._states[value.input_ids.tobytes()] = value

    def _best(self, key: Sequence[int]) -> SnapshotState | None:
        """The state with the longest beginning in common with a prompt, of those that can be cut to that."""
        prompt = np.asarray(key, np.int32)
        best, most = None, 0
        for state in reversed(self._states.values()):
            n = min(len(prompt), state.n_tokens)
            differ = np.flatnonzero(prompt[:n] != state.input_ids[:n])
            common = int(differ[0]) if len(differ) else n
            if common > most and self._can_go_back(state, min(common, len(prompt) - 1)):
                best, most = state, common
        return best

    def _can_go_back(self, state: SnapshotState, n_tokens: int) -> bool:
        """Whether a context that has `state` can drop all but its first tokens: the last of a prompt is always computed."""
        assert self._ctx is not None
        kinds = self._ctx.model.capabilities
        if kinds.recurrent or kinds.hybrid:
            return n_tokens == state.n_tokens
        # A sequence's state leaves out what has left the window; a whole context's has it, if its cache is full-size.
        return not kinds.sliding_window or state.snapshot.whole or n_tokens >= state.n_tokens - 1

    # ── in the place of Llama.save_state and Llama.load_state ────────────────────────────────────────

    def _attached(self) -> tuple[Any, Context]:
        llm = self._llm() if self._llm is not None else None
        if llm is None or self._ctx is None:
            raise ClosedError("cache")
        _address(llm)
        return llm, self._ctx

    def _save(self) -> Any:
        llm, ctx = self._attached()
        tokens = llm.input_ids[: llm.n_tokens].astype(np.int32)
        full_window = ctx.model.capabilities.sliding_window and ctx._window_cells
        try:
            ctx.remove(0, llm.n_tokens)  # as eval() does first: what a reset or a shorter prompt has left behind
            while True:
                try:
                    if full_window:
                        return SnapshotState(ctx.snapshot(self.arena, None, tokens={0: tokens}), llm)
                    return SnapshotState(ctx.snapshot(self.arena, tokens=tokens), llm)
                except ArenaExhaustedError:
                    if not self._states:
                        raise
                    self._states.popitem(last=False)[1].snapshot.release()
        except SwarmKVError:  # too large, or a memory that cannot go back: an answer must not be lost for that
            return Llama.save_state(llm)

    def _load(self, state: Any) -> None:
        llm, ctx = self._attached()
        if not isinstance(state, SnapshotState):
            Llama.load_state(llm, state)
            return
        try:
            state.snapshot.restore(ctx)
        except BaseException:
            llm.reset()
            raise
        llm.input_ids[: state.n_tokens] = state.input_ids
        llm.n_tokens = state.n_tokens
        llm._requires_eval = True  # the engine's logits are those of its last decode, not of this state
        llm._seed = state.seed
        if state.scores is not None:
            llm.scores[: state.n_tokens] = state.scores
