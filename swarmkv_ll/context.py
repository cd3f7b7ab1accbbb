"""A context: KV memory for one or more sequences, decode in batches, logits, operations on sequences."""

from __future__ import annotations

import math
import operator
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
import numpy.typing as npt

from . import runtime
from .adapter import Adapter
from .arena import Arena
from .cells import CellLedger
from .errors import (
    ClosedError,
    ContextCreateError,
    ContextFullError,
    DecodeError,
    InvalidArgumentError,
    PartialRemovalError,
    ReentrantCallError,
)
from .ffi import C, ffi
from .identity import AdapterId, Rope, in_order
from .limits import KV_TYPES, check_context, default_n_threads
from .model import Model, Tokens
from .outputs import Batch, ContextHandle, Logits, Outputs
from .sampling import Sampler

if TYPE_CHECKING:
    from .blob import Layout
    from .borrowed import Watch
    from .on_device import DeviceSnapshot
    from .snapshot import Snapshot

_MAX_POSITION = 2**31 - 2

ROPE_SCALING = {
    "model": C.LLAMA_ROPE_SCALING_TYPE_UNSPECIFIED,
    "none": C.LLAMA_ROPE_SCALING_TYPE_NONE,
    "linear": C.LLAMA_ROPE_SCALING_TYPE_LINEAR,
    "yarn": C.LLAMA_ROPE_SCALING_TYPE_YARN,
    "longrope": C.LLAMA_ROPE_SCALING_TYPE_LONGROPE,
}


@dataclass(frozen=True)
class Settings:
    """What the engine does not tell of a context afterwards."""

    kv_unified: bool
    type_k: str
    type_v: str
    flash_attn: bool
    v_transposed: bool
    rotation: tuple[bool, bool]
    rope: Rope
    window_cells: int | None  # cells of the windowed layers' cache, where that is known
    kv_memory: Mapping[str, int]


class Context:
    """KV memory on a model. Made by `Model.context`.

    Parameters
    ----------
    n_ctx : int
        KV cells in all, one a token; 0 for the length the model was trained on. The engine rounds up to 256.
    n_seq_max : int
        Sequences, numbered 0 to n_seq_max − 1.
    kv_unified : bool
        One pool of cells that sequences can share (`copy_sequence` then copies no data), or a pool of
        ``n_ctx / n_seq_max`` cells for each ("streams").
    flash_attn : "auto", True or False
        What it came to is in `flash_attn` afterwards.
    type_k, type_v : str
        Types of the K and V cache: a key of `limits.KV_TYPES`.
    n_batch, n_ubatch : int
        Tokens handed to the engine at once, and computed at once.
    n_threads : int, optional
        By default the physical cores this process may run on.
    swa_full : bool
        Give the windowed layers of a sliding-window model as many cells as the others, or (False) only what the
        window needs. A whole context's snapshot then holds, or lacks, what has left the window.
    rope : Rope, optional
        By default the model's own settings.

    Attributes
    ----------
    model : Model
    n_ctx, n_ctx_seq, n_seq_max, n_batch, n_ubatch, n_threads : int
        As the engine has them; `n_ctx_seq` is what one sequence may hold.
    kv_unified, flash_attn, v_transposed : bool
    type_k, type_v : str
    rope : Rope
    adapters : tuple of AdapterId
        LoRA adapters in force (`set_adapters`).
    kv_memory : mapping of str to int
        Where the KV cache lies: bytes (the engine tells them in steps of 10 KiB) by device, "CPU" being the host. Empty
        for a borrowed context.

    Raises
    ------
    InvalidArgumentError, HostMemoryError, ContextCreateError
        Nothing was made.

    Notes
    -----
    A context may be used from any thread, by one at a time: calls wait for each other (`LlamaGuard`). But each decode
    drops the logits of the one before, so threads that share a context need a lock around decode and `logits`. A signal
    handler or callback inside a call may ask (`position`), not change: `ReentrantCallError`.
    """

    def __init__(
        self,
        model: Model,
        n_ctx: int,
        n_seq_max: int = 1,
        *,
        kv_unified: bool = True,
        flash_attn: Literal["auto"] | bool = "auto",
        type_k: str = "f16",
        type_v: str = "f16",
        n_batch: int = 2048,
        n_ubatch: int = 512,
        n_threads: int | None = None,
        swa_full: bool = True,
        rope: Rope | None = None,
    ) -> None:
        rope = Rope() if rope is None else rope
        if not isinstance(rope, Rope):
            raise InvalidArgumentError(f"rope should be a Rope, is {type(rope).__name__}")
        parent = model._handle
        n_ctx, n_seq_max = operator.index(n_ctx) or model.n_ctx_train, operator.index(n_seq_max)
        n_batch, n_ubatch = operator.index(n_batch), operator.index(n_ubatch)
        n_threads = operator.index(n_threads) if n_threads is not None else default_n_threads()
        kv_unified = bool(kv_unified)
        kinds = model.capabilities
        check_context(
            model,
            n_ctx,
            n_seq_max,
            kv_unified=kv_unified,
            flash_attn=flash_attn,
            type_k=type_k,
            type_v=type_v,
            n_batch=n_batch,
            n_ubatch=n_ubatch,
            n_threads=n_threads,
        )
        flash_attn = flash_attn if isinstance(flash_attn, str) else bool(flash_attn)
        params = C.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.kv_unified = n_ctx, n_seq_max, kv_unified
        params.n_batch, params.n_ubatch = n_batch, min(n_ubatch, n_batch)
        params.n_threads = params.n_threads_batch = n_threads
        params.type_k, params.type_v, params.swa_full = KV_TYPES[type_k], KV_TYPES[type_v], bool(swa_full)
        params.rope_freq_base, params.rope_freq_scale = rope.freq_base, rope.freq_scale
        params.rope_scaling_type = ROPE_SCALING[rope.scaling]
        params.yarn_ext_factor, params.yarn_attn_factor = rope.yarn_ext_factor, rope.yarn_attn_factor
        params.yarn_beta_fast, params.yarn_beta_slow = rope.yarn_beta_fast, rope.yarn_beta_slow
        params.yarn_orig_ctx = rope.yarn_orig_ctx
        params.flash_attn_type = {
            "auto": C.LLAMA_FLASH_ATTN_TYPE_AUTO,
            True: C.LLAMA_FLASH_ATTN_TYPE_ENABLED,
            False: C.LLAMA_FLASH_ATTN_TYPE_DISABLED,
        }[flash_attn]
        # A recurrent memory reorders the states of all its sequences before a graph moves their data: left half-way, it
        # would spoil the others. Ctrl-C then waits for the end of an engine batch.
        whole_batches = (kinds.recurrent or kinds.hybrid) and n_seq_max > 1
        poll = "skv_poll_stop" if whole_batches else "skv_poll_interrupt"
        params.abort_callback = ffi.addressof(C, poll)
        owned = ContextHandle(parent)
        lock = model.guard.lock()
        with lock, runtime.engine_log() as log:
            C.skv_context_init(parent.pointer, params, owned.slot)
        if owned.pointer == ffi.NULL:
            raise ContextCreateError(runtime.last_reason(log, "the engine could not make this context"))
        # The engine tells in its log only that it has overruled what was asked for. "auto" is settled after V's layout
        # was (llama_kv_cache is made first), so that only what is off from the start transposes V.
        v_transposed = flash_attn is False or any("forcing off" in line for line in log)
        rotation = tuple(any(f"attn_rot_{x} = 1" in line for line in log) for x in "kv")
        window = [int(found[1]) for line in log if (found := re.search(r"SWA KV cache, size = (\d+)", line))]
        settings = Settings(
            kv_unified or n_seq_max == 1,
            type_k,
            type_v,
            not v_transposed and not any("Flash Attention not supported" in line for line in log),
            v_transposed,
            (rotation[0], rotation[1]),
            rope,
            window[-1] if window else None,
            _kv_memory(log),
        )
        self._begin(model, owned, lock, settings)

    def _begin(self, model: Model, owned: ContextHandle, lock: Any, settings: Settings) -> None:
        pointer = owned.pointer
        self._lock, self._changing_now = lock, False
        self._owned: ContextHandle | None = owned
        self._memory = C.llama_get_memory(pointer)
        self.model = model
        self.n_ctx = int(C.llama_n_ctx(pointer))
        self.n_ctx_seq = int(C.llama_n_ctx_seq(pointer))
        self.n_seq_max = int(C.llama_n_seq_max(pointer))
        self.n_batch = int(C.llama_n_batch(pointer))
        self.n_ubatch = int(C.llama_n_ubatch(pointer))
        self.n_threads = int(C.llama_n_threads(pointer))
        self.kv_unified = settings.kv_unified
        self.type_k, self.type_v = settings.type_k, settings.type_v
        self.flash_attn, self.v_transposed = settings.flash_attn, settings.v_transposed
        self.rope, self._rotation, self._window_cells = settings.rope, settings.rotation, settings.window_cells
        self.kv_memory = settings.kv_memory
        self._on_device: dict[int, Any] = {}  # what the engine keeps on the device, by sequence: see `on_device`
        self.adapters: tuple[AdapterId, ...] = ()
        kinds = model.capabilities
        # A purely recurrent model has one state a sequence and no cells to run out of.
        self._cells = (
            None
            if kinds.blob_parts.n_attention == 0
            else CellLedger(
                self.n_ctx_seq if not self.kv_unified else self.n_ctx,
                self.n_seq_max,
                unified=self.kv_unified,
                n_ubatch=self.n_ubatch,
            )
        )
        # For a sliding window the engine prepares all parts of a batch before it computes the first, and in that lets
        # later parts take cells that earlier ones still look back to: give it one part at a time.
        self._n_piece = self.n_ubatch if kinds.sliding_window else self.n_batch
        self._batch = Batch(self._n_piece)
        self._outputs = Outputs(owned, model.n_vocab, self.n_seq_max)
        self._watch: Watch | None = None  # of a borrowed context

    @classmethod
    def adopt(
        cls,
        address: object,
        *,
        owner: object,
        model_path: str | os.PathLike[str] | None = None,
        rope: Rope | None = None,
        adapters: Mapping[str | os.PathLike[str], float] | None = None,
        swa_full: bool = False,
    ) -> Context:
        """A context that another binding on this same library has made: borrowed, never freed.

        Its snapshots, forks and restores are then those of any other. What the other binding has decoded is there; it
        must not call into the context while a call of ours runs. Logits are only known of what is decoded here.

        Parameters
        ----------
        address : int, ctypes pointer or cffi pointer
            The `llama_context *`. It cannot be checked: a wrong one crashes the process.
        owner : object
            Kept alive as long as this context is open (`Llama` of llama-cpp-python). It must not free the context
            before.
        model_path : path-like, optional
            The model's file, which is what identifies it; by default ``owner.model_path``.
        rope, adapters, swa_full
            What the context was made with, if not the model's own: the engine does not tell. `adapters` maps files of
            LoRA adapters in force to their scales. Only with `swa_full` a whole context's snapshot of a sliding-window
            model can be restored: else it is not known how many cells the window has.

        Raises
        ------
        EngineConflictError
            The other binding has loaded a library of its own.
        InvalidArgumentError
            No address, or no file of the model.

        Notes
        -----
        The types of K and V and the V layout are read from the state of a sequence. If there is none, one token is
        decoded into sequence 0 and removed again.
        """
        from .borrowed import adopt  # points downward: a state is read to learn what the context is

        return adopt(
            cls,
            address,
            owner=owner,
            model_path=model_path,
            rope=rope,
            adapters={} if adapters is None else adapters,
            swa_full=bool(swa_full),
        )

    # ── decode ───────────────────────────────────────────────────────────────────────────────────────

    def decode(
        self,
        tokens: npt.ArrayLike,
        *,
        pos: int | None = None,
        seq: int = 0,
        logits: Literal["last", "all", "none"] = "last",
    ) -> int:
        """Append tokens to a sequence and compute them.

        Parameters
        ----------
        tokens : array of integers, shape (n,)
            At least one. Handed to the engine in pieces of `n_batch` (with a sliding window, of `n_ubatch`).
        pos : int, optional
            Position of the first; by default, and for a sequence that is not empty always, `position(seq)`.
        seq : int
        logits : {"last", "all", "none"}
            For which of the tokens `logits()` gives rows afterwards.

        Returns
        -------
        int
            The sequence's next position. A GPU is done with the tokens then.

        Raises
        ------
        InvalidArgumentError, ContextFullError
            Refused before the engine saw anything.
        DecodeError, KeyboardInterrupt
            The engine failed, or Ctrl-C was pressed (it is noticed within one batch). The sequence is put back to
            what it was before the call. A recurrent model's memory has no way back, nor has a sliding window that
            has moved on: the sequence is then empty.
        """
        if not isinstance(logits, str) or logits not in ("last", "all", "none"):
            raise InvalidArgumentError(f'logits should be "last", "all" or "none", is {logits!r}')
        return self._decode([(tokens, seq)], pos=pos, want=logits)[0]

    def decode_batch(self, parts: Sequence[tuple[npt.ArrayLike, int]]) -> list[int]:
        """Append tokens to several sequences at once, in as few engine batches as they fit into.

        Parameters
        ----------
        parts : sequence of (tokens, seq)
            Each sequence once. Each part's last token gets a logits row: `logits(seq)`.

        Returns
        -------
        list of int
            Each sequence's next position.

        Raises
        ------
        As `decode`; on failure every sequence is put back.
        """
        try:
            pairs = [(tokens, operator.index(seq)) for tokens, seq in parts]
        except (TypeError, ValueError):
            raise InvalidArgumentError("parts should be (tokens, seq) pairs") from None
        if not pairs:
            raise InvalidArgumentError("parts should hold at least one (tokens, seq)")
        return self._decode(pairs, pos=None, want="last")

    def _decode(
        self, parts: Sequence[tuple[npt.ArrayLike, int]], *, pos: int | None, want: Literal["last", "all", "none"]
    ) -> list[int]:
        with self._changing() as pointer:
            work = [(self.model.check_tokens(tokens), self._check_seq(seq)) for tokens, seq in parts]
            seqs = [seq for _, seq in work]
            if len(set(seqs)) != len(seqs):
                raise InvalidArgumentError(f"each sequence can stand in a batch once, got {seqs}")
            starts = [self._check_start(seq, pos) for seq in seqs]
            for (tokens, seq), start in zip(work, starts, strict=True):
                if not len(tokens):
                    raise InvalidArgumentError("tokens should hold at least one token")
                if start + len(tokens) - 1 > _MAX_POSITION:
                    raise InvalidArgumentError(f"position {start + len(tokens) - 1} is above {_MAX_POSITION}")
                self._check_room(seq, len(tokens))
            if self.kv_unified:
                self._check_room(seqs[0], sum(len(tokens) for tokens, _ in work))

            token = np.concatenate([tokens for tokens, _ in work])
            position = np.concatenate(
                [np.arange(s, s + len(t), dtype=np.int32) for (t, _), s in zip(work, starts, strict=True)]
            )
            seq_of = np.repeat(np.array(seqs, np.int32), [len(tokens) for tokens, _ in work])
            output = np.full(len(token), want == "all", np.int8)
            lasts = np.cumsum([len(tokens) for tokens, _ in work]) - 1
            if want == "last":
                output[lasts] = 1
            self._outputs.begin(output, self._n_piece)
            try:
                for begin in range(0, len(token), self._n_piece):
                    piece = slice(begin, begin + self._n_piece)
                    self._run(pointer, token[piece], position[piece], seq_of[piece], output[piece])
                    self._outputs.collect(int(output[piece].sum()), last=piece.stop >= len(token))
                C.llama_synchronize(pointer)  # a GPU has only been given the work
                if self._cells:
                    # A recurrent memory has batches of several sequences cut in another way.
                    self._cells.exact &= len(work) == 1 or not self.model.capabilities.hybrid
                    self._cells.add(
                        [
                            (seq, np.arange(start, start + len(tokens), dtype=np.int32))
                            for (tokens, seq), start in zip(work, starts, strict=True)
                        ]
                    )
                for seq, row in zip(seqs, np.cumsum(output)[lasts] - 1, strict=True):
                    self._outputs.advance(seq, None if want == "none" else int(row))
                return [start + len(tokens) for (tokens, _), start in zip(work, starts, strict=True)]
            except BaseException:
                if self._cells:
                    self._cells.exact = False
                self._outputs.forget_decode()
                for seq, start in zip(seqs, starts, strict=True):
                    self._roll_back(seq, start)
                raise

    def _run(self, pointer: Any, token: Any, position: Any, seq: Any, output: Any) -> None:
        """One engine batch. In the main thread, Ctrl-C stops it between two graph nodes."""
        batch = self._batch.fill(token, position, seq, output)
        with runtime.engine_log() as log:
            code = C.llama_decode(pointer, batch)
        if _interrupts and threading.current_thread() is threading.main_thread():
            raise _interrupts.pop()
        if code == 1:
            available = self._cells.free(int(seq[0])) if self._cells else 0
            raise ContextFullError(len(token), available, self.n_ctx_seq)
        if code:
            raise DecodeError(code, runtime.last_reason(log, "the engine gave no reason"))

    def _roll_back(self, seq: int, start: int) -> None:
        if self._next(seq) > start:
            _, lost, needed = self._window(seq, start)
            if lost > needed or not C.llama_memory_seq_rm(self._memory, seq, start, -1):
                C.llama_memory_seq_rm(self._memory, seq, -1, -1)
                self._outputs.drop(seq)
                start = 0
        if self._cells:
            self._cells.remove(seq, start, 2**31 - 1)

    def logits(self, seq: int | None = None) -> Logits:
        """Logits of the last decode: the engine's memory, not a copy.

        Parameters
        ----------
        seq : int, optional
            Give the row after that sequence's last token, from the last decode, or from the snapshot it was
            restored from. By default everything the last decode gave.

        Returns
        -------
        ndarray of float32, read-only
            Shape (n_vocab,) for a sequence, or after ``logits="last"`` of one sequence; else (n_rows, n_vocab).

        Notes
        -----
        Valid until the next decode, which writes new values into the same memory: copy what must last. The array
        stays readable after `close` (the engine's context is freed when the last view is gone). Only for
        ``logits="all"`` of more than `n_batch` tokens are the rows gathered by a copy.

        Raises
        ------
        NoLogitsError
            The last decode gave none.
        """
        with self._looking():
            if seq is not None:
                return self._outputs.row(self._check_seq(seq))
            return self._outputs.everything()

    def generate(self, sampler: Sampler, max_tokens: int, *, seq: int = 0) -> Iterator[int]:
        """Sample and decode, token by token, from where the sequence stands.

        Yields
        ------
        int
            Each token, before it is decoded; the last one is left undecoded. Ends after `max_tokens`, or when the
            model ends its answer (that token is not yielded).

        Raises
        ------
        NoLogitsError
            Nothing to sample from: decode with logits, or restore a snapshot that carries them, first.
        """
        if operator.index(max_tokens) < 0:
            raise InvalidArgumentError(f"max_tokens should be 0 or more, is {max_tokens}")
        for i in range(max_tokens):
            token = sampler.sample(self.logits(seq))
            if self.model.is_end(token):
                return
            yield token
            if i + 1 < max_tokens:
                self.decode([token], seq=seq)

    # ── sequences ────────────────────────────────────────────────────────────────────────────────────

    def position(self, seq: int = 0) -> int:
        """The sequence's next position: one past its last token, 0 if it is empty."""
        with self._lock:
            self._ptr  # noqa: B018 - raises after close
            return self._next(self._check_seq(seq))

    def cells_free(self, seq: int = 0) -> int:
        """KV cells that sequence `seq` can still take; with a unified cache, that all can take together."""
        with self._looking():
            return self._cells.free(self._check_seq(seq)) if self._cells else self.n_ctx_seq

    def copy_sequence(self, source: int, target: int, n_tokens: int | None = None) -> None:
        """Make `target` hold what `source` holds; what `target` held is dropped.

        With a unified cache no KV data is copied: both share the cells. With streams the state is copied through
        host memory. (The engine's own copy between streams only takes place at the next decode, so that an export
        before it would read stale bytes, and a restore would be overwritten.)

        Parameters
        ----------
        n_tokens : int, optional
            Only positions below this; not possible for recurrent and hybrid models, for sliding windows, or
            between streams.
        """
        with self._changing() as pointer:
            source, target = self._check_seq(source), self._check_seq(target)
            held = self._next(source)
            end = held if n_tokens is None else operator.index(n_tokens)
            if end != held and not (self.model.capabilities.attention_only and self.kv_unified):
                raise PartialRemovalError(f"only the whole sequence of {held} tokens can be copied here")
            if not 0 <= end <= held:
                raise InvalidArgumentError(f"n_tokens should be 0 to {held}, is {n_tokens}")
            if source == target:
                self._remove(source, end, held)
                return
            try:
                self._remove(target, 0, self._next(target))
                if self.kv_unified or not self._cells:
                    C.llama_memory_seq_cp(self._memory, source, target, -1, end)
                    if self._cells:
                        self._cells.share(source, target, end)
                else:
                    self._copy_between_streams(pointer, source, target)
                if end == held:
                    self._outputs.copy(source, target)
            except BaseException:
                self._replaced(target, None, None)
                raise

    def _copy_between_streams(self, pointer: Any, source: int, target: int) -> None:
        assert self._cells is not None
        positions = self._cells.positions(source)
        if not len(positions):
            return
        state = np.empty(C.llama_state_seq_get_size(pointer, source), np.uint8)
        data = ffi.from_buffer("uint8_t[]", state)
        n = C.llama_state_seq_get_data(pointer, data, len(state), source)
        copied = n == len(state) and C.llama_state_seq_set_data(pointer, data, n, target) == n
        C.llama_synchronize(pointer)
        if not copied:
            raise ContextFullError(len(positions), self._cells.free(target), self.n_ctx_seq, "copy")
        self._cells.replace(target, positions)

    def remove(self, seq: int, begin: int = 0, end: int | None = None) -> None:
        """Remove the tokens at positions begin … end−1 from a sequence; by default all.

        Raises
        ------
        PartialRemovalError
            The memory cannot give up a part of this sequence; it is as it was.
        """
        with self._changing():
            seq, n, begin = self._check_seq(seq), self._next(seq), operator.index(begin)
            end = n if end is None else operator.index(end)
            if begin < 0 or end < 0:
                raise InvalidArgumentError(f"begin and end should be 0 or more, are {begin} and {end}")
            end = min(end, n)
            if begin >= end:
                return
            kept = self.model.capabilities
            if (begin, end) != (0, n):
                if kept.recurrent or kept.hybrid:
                    raise PartialRemovalError(
                        f"a recurrent state of {n} tokens cannot lose tokens {begin} to {end - 1}"
                    )
                window, lost, needed = self._window(seq, begin)
                if window and end < n:
                    raise PartialRemovalError(f"a sliding window of {window} tokens can only lose its end")
                if lost > needed:
                    raise PartialRemovalError(
                        f"the sliding window of {window} tokens no longer holds positions {needed} to {lost - 1}, "
                        f"which going back to {begin} needs"
                    )
            self._remove(seq, begin, end)

    def _remove(self, seq: int, begin: int, end: int) -> None:
        if begin < end:
            whole = begin == 0 and end >= self._next(seq)
            self._twice_if_interrupted(lambda: self._remove_now(seq, begin, end, whole))

    def _remove_now(self, seq: int, begin: int, end: int, whole: bool) -> None:
        C.llama_memory_seq_rm(self._memory, seq, -1 if whole else begin, -1 if whole else end)
        if self._cells:
            self._cells.remove(seq, begin, end)
        self._outputs.drop(seq)

    @staticmethod
    def _twice_if_interrupted(change: Callable[[], None]) -> None:
        """Make a change to engine and ledger whole, should Ctrl-C come in its middle: a second time changes no more."""
        try:
            change()
        except BaseException:
            change()
            raise

    def _window(self, seq: int, begin: int) -> tuple[int, int, int]:
        """Sliding window in tokens (0: none), the first position it still holds, and the first that `begin` looks to."""
        window = self.model.capabilities.sliding_window
        if not window:
            return 0, 0, 0
        assert self._cells is not None
        first = int(self._cells.positions(seq).min(initial=begin))  # a sequence need not begin at 0
        return window, int(C.llama_memory_seq_pos_min(self._memory, seq)), max(first, begin - window + 1)

    def clear(self) -> None:
        """Remove every sequence."""
        with self._changing():
            self._twice_if_interrupted(self._clear_now)

    def _clear_now(self) -> None:
        C.llama_memory_clear(self._memory, False)
        if self._cells:
            self._cells.clear()
        self._outputs.clear()

    # ── state ────────────────────────────────────────────────────────────────────────────────────────

    def state_size(self, seq: int | None = 0) -> int:
        """Bytes the engine needs to export a sequence as it is now, or, with None, all of them."""
        with self._lock:
            pointer = self._ptr
            if seq is None:
                return int(C.llama_state_get_size(pointer))
            return int(C.llama_state_seq_get_size(pointer, self._check_seq(seq)))

    @overload
    def snapshot(
        self,
        arena: Arena,
        seq: int | None = 0,
        *,
        tokens: npt.ArrayLike | Mapping[int, npt.ArrayLike] | None = None,
        where: Literal["host"] = "host",
    ) -> Snapshot: ...

    @overload
    def snapshot(
        self, arena: None = None, seq: int = 0, *, tokens: npt.ArrayLike | None = None, where: Literal["device"]
    ) -> DeviceSnapshot: ...

    def snapshot(
        self,
        arena: Arena | None = None,
        seq: int | None = 0,
        *,
        tokens: Any = None,
        where: Literal["host", "device"] = "host",
    ) -> Snapshot | DeviceSnapshot:
        """Export a sequence's state, or, with ``seq=None``, every sequence's, straight into a lease of `arena`.

        With ``where="device"`` one sequence's state is copied where the KV cache lies, on the GPU if there is one, and no
        arena is needed. It can only go back into this context, and ends with the next one of the same sequence.

        See :class:`Snapshot` and :class:`DeviceSnapshot`.

        Raises
        ------
        InvalidArgumentError
            Another `where`, an arena missing, or one given for the device.
        """
        # These point downward: snapshots are taken of a context.
        if where == "device":
            from .on_device import DeviceSnapshot

            if arena is not None:
                raise InvalidArgumentError('where="device" needs no arena: give seq by its name')
            return DeviceSnapshot.take(self, seq, tokens=tokens)
        from .snapshot import Snapshot

        if where != "host":
            raise InvalidArgumentError(f'where should be "host" or "device", is {where!r}')
        if arena is None:
            raise InvalidArgumentError('a snapshot in host memory needs an arena (where="device" does not)')
        return Snapshot.take(self, arena, seq, tokens=tokens)

    def set_adapters(self, adapters: Sequence[tuple[Adapter, float]]) -> None:
        """Put LoRA adapters into force, each with its scale, in place of those before. Nothing may be held yet.

        Raises
        ------
        InvalidArgumentError
            A sequence holds tokens, whose state other adapters have made (`clear` first); an adapter of another model,
            given twice, or with a scale that is no number. Nothing was changed.
        """
        with self._changing() as pointer:
            assert self._owned is not None
            held = [seq for seq in range(self.n_seq_max) if self._next(seq)]
            if held:
                raise InvalidArgumentError(
                    f"sequence {held[0]} holds tokens that other adapters have made: clear() first"
                )
            try:
                pairs = [(adapter, float(scale)) for adapter, scale in adapters]
            except (TypeError, ValueError, OverflowError) as error:
                raise InvalidArgumentError(f"adapters should be (adapter, scale) pairs: {error}") from None
            for adapter, scale in pairs:
                if not isinstance(adapter, Adapter) or adapter._parent is not self._owned.parent:
                    raise InvalidArgumentError(f"{adapter!r} is not an Adapter of this context's model")
                if not math.isfinite(scale) or abs(scale) > 1e6:
                    raise InvalidArgumentError(f"an adapter's scale should be a number, is {scale}")
            if len({id(adapter) for adapter, _ in pairs}) != len(pairs):
                raise InvalidArgumentError("each adapter can be in force once")
            pointers = ffi.new("struct llama_adapter_lora *[]", [adapter._pointer for adapter, _ in pairs])
            scales = ffi.new("float[]", [scale for _, scale in pairs])
            known = in_order(AdapterId(adapter.fingerprint, scale) for adapter, scale in pairs)

            def put() -> None:
                C.llama_set_adapters_lora(pointer, pointers, len(pairs), scales)
                self.adapters = known

            self._twice_if_interrupted(put)

    def _replaced_all(self, layout: Layout, rows: Mapping[int, Logits]) -> None:
        """A restore has put a whole context's cells in the place of everything."""
        if self._cells:
            self._cells.load(layout.caches[0])
        self._outputs.clear()
        for seq, row in rows.items():
            self._outputs.restore(seq, row)

    def _replaced(self, seq: int, positions: Tokens | None, row: Logits | None) -> None:
        """A restore has put cells at `positions` into a sequence, or, with None, failed and left it empty."""
        if positions is None:
            C.llama_memory_seq_rm(self._memory, seq, -1, -1)
        if self._cells:
            self._cells.replace(seq, np.empty(0, np.int32) if positions is None else positions)
        self._outputs.restore(seq, row)

    # ── checks and life ──────────────────────────────────────────────────────────────────────────────

    def _check_seq(self, seq: int) -> int:
        seq = operator.index(seq)
        if not 0 <= seq < self.n_seq_max:
            raise InvalidArgumentError(
                f"sequence should be 0 to {self.n_seq_max - 1} (n_seq_max={self.n_seq_max}), is {seq}"
            )
        return seq

    def _check_start(self, seq: int, pos: int | None) -> int:
        at = self._next(seq)
        start = at if pos is None else operator.index(pos)
        if start < 0 or (at and start != at):
            raise InvalidArgumentError(f"position should be {at if at else '0 or more'} for sequence {seq}, is {pos}")
        return start

    def _check_room(self, seq: int, n_tokens: int) -> None:
        if self._cells and n_tokens > self._cells.free(seq):
            raise ContextFullError(n_tokens, self._cells.free(seq), self.n_ctx_seq)

    def _next(self, seq: int) -> int:
        return int(C.llama_memory_seq_pos_max(self._memory, seq)) + 1

    @property
    def _ptr(self) -> Any:
        if self._owned is None:
            raise ClosedError("context")
        runtime.check_process()
        return self._owned.pointer

    @contextmanager
    def _looking(self) -> Iterator[None]:
        """Hold the lock for a call that asks for more than the engine itself knows of a borrowed context."""
        with self._lock:
            self._ptr  # noqa: B018 - raises after close
            if self._watch and not self._changing_now:
                self._watch.catch_up(self)
            yield

    @contextmanager
    def _changing(self, *, sync: bool = True) -> Iterator[Any]:
        """Hold the lock for a call that changes the context, and refuse one from a signal handler inside another.

        The lock is re-entrant so that a callback may ask for a position; a change inside a change would find, or leave,
        engine and ledger apart.
        """
        with self._lock:
            handle = self._owned
            if handle is None:
                raise ClosedError("context")
            if self._changing_now:
                raise ReentrantCallError("context")
            runtime.check_process()
            try:
                self._changing_now = True
                watch = self._watch if sync else None
                if watch:
                    watch.catch_up(self)
                yield handle.pointer
                if watch:
                    watch.leave(self)
            finally:
                self._changing_now = False

    def close(self) -> None:
        """Free the KV memory, once no view of its logits is left. Does nothing the second time."""
        if self._owned is None:
            return
        with self._changing(sync=False):  # a borrowed context may be gone already
            handle, self._owned = self._owned, None
            if not self._outputs.viewed:
                handle.free()
            self._outputs = None  # type: ignore[assignment]  # it holds the handle too

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._owned is None

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Context n_ctx={self.n_ctx} n_seq_max={self.n_seq_max} of {self.model!r}{', closed' if self.closed else ''}>"


def _kv_memory(log: Sequence[str]) -> dict[str, int]:
    """Bytes of KV cache and of recurrent states by the device that holds them, as the engine logs them."""
    found: dict[str, int] = {}
    for line in log:
        if match := re.search(r"(\S+) (?:KV|RS) buffer size = +([\d.]+) MiB", line):
            found[match[1]] = found.get(match[1], 0) + round(float(match[2]) * 2**20)
    return found


# ── Ctrl-C ───────────────────────────────────────────────────────────────────────────────────────────

_interrupts: list[BaseException] = []


def _keep_interrupt(_: Any, error: BaseException, __: Any) -> None:
    _interrupts.append(error)


@ffi.def_extern(error=True, onerror=_keep_interrupt)  # type: ignore[untyped-decorator]
def skv_on_interrupt(_data: Any) -> bool:
    """Give Python the chance to run its signal handlers; what they raise stops the decode."""
    return False
