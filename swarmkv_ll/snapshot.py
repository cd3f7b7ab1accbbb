"""A sequence's KV state in host memory: taken once, forked by one memmove, restored anywhere it fits."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from . import runtime
from .arena import Arena, Lease
from .blob import Layout, parse
from .context import Context
from .errors import (
    BlobError,
    ClosedError,
    IncompatibleSnapshotError,
    InvalidArgumentError,
    LiveViewsError,
    NoLogitsError,
    SnapshotError,
)
from .exclusive import alone, new_lock
from .ffi import C
from .model import Tokens
from .modelfile import ModelFile
from .outputs import Logits


@dataclass(frozen=True)
class Reason:
    """One reason why a snapshot cannot go into a context: what it needs, and what the context has."""

    field: str
    expected: object
    actual: object

    def __str__(self) -> str:
        hint = " (1 with kv_unified=True, else n_seq_max)" if self.field == "n_stream" else ""
        return f"{self.field} should be {self.expected}, is {self.actual}{hint}"


@dataclass(frozen=True)
class Compatibility:
    """Whether a snapshot can be restored into a context. True if it can.

    Attributes
    ----------
    reasons : tuple of Reason
        Everything that is against it.
    """

    reasons: tuple[Reason, ...]

    @property
    def ok(self) -> bool:
        """Whether there is no reason against it."""
        return not self.reasons

    def __bool__(self) -> bool:
        return self.ok


@dataclass(frozen=True)
class _Origin:
    """What a state depends on: a context that differs in any of it cannot take it as it is."""

    model: ModelFile
    type_k: str
    type_v: str
    flash_attn: bool
    v_transposed: bool
    n_stream: int

    @classmethod
    def of(cls, ctx: Context) -> _Origin:
        n_stream = 1 if ctx.kv_unified else ctx.n_seq_max
        return cls(ctx.model.file, ctx.type_k, ctx.type_v, ctx.flash_attn, ctx.v_transposed, n_stream)


_LAYOUT_FIELDS = ("type_k", "type_v", "flash_attn", "v_transposed", "n_stream")


class _Holders:
    """How many hold one lease: the snapshots that share it, and calls that are reading it just now."""

    def __init__(self) -> None:
        self.count = 1
        self.lock = new_lock()


class Snapshot:
    """The state of one sequence, as the engine exported it, in a lease of an arena.

    Made by `Context.snapshot`, `fork` and `share`.

    Attributes
    ----------
    n_tokens : int
        Position at which a branch goes on.
    n_bytes : int
        Size of the state.
    tokens : ndarray of int32, shape (n_tokens,), or None
        The tokens it was computed from, if they were given.
    last_logits : ndarray of float32, shape (n_vocab,), or None
        The row after the last token (a copy), if the context still had it: an exact hit can be sampled at once.
    lease : Lease
        Where the bytes are.
    """

    def __init__(
        self,
        lease: Lease,
        holders: _Holders,
        layout: Layout,
        origin: _Origin,
        n_tokens: int,
        tokens: Tokens | None,
        last_logits: Logits | None,
    ) -> None:
        self.lease, self._holders, self._layout, self._origin = lease, holders, layout, origin
        self.n_tokens, self.tokens, self.last_logits = n_tokens, tokens, last_logits
        self.n_bytes = lease.n_bytes
        self._held = True
        lease._owner = "snapshot"

    @classmethod
    def take(cls, ctx: Context, arena: Arena, seq: int = 0, *, tokens: npt.ArrayLike | None = None) -> Snapshot:
        """Export sequence `seq` of `ctx` into a lease of `arena`: one copy, by the engine, straight into it.

        Raises
        ------
        SnapshotError
            The sequence is empty, or the engine's bytes are not what was expected. The lease is given back.
        ArenaExhaustedError
            The arena has no room for it.
        InvalidArgumentError
            `tokens` are not `n_tokens` many.
        """
        if not isinstance(arena, Arena):
            raise InvalidArgumentError(f"expected an Arena, got {type(arena).__name__}")
        with ctx._changing() as pointer:
            n_tokens = ctx.position(seq)
            if n_tokens == 0:
                raise SnapshotError(f"sequence {seq} is empty")
            known = None
            if tokens is not None:
                known = ctx.model.check_tokens(tokens).copy()
                known.flags.writeable = False
                if len(known) != n_tokens:
                    raise InvalidArgumentError(f"{len(known)} tokens were given for positions 0 to {n_tokens - 1}")
            n_bytes = ctx.state_size(seq)
            lease = arena.lease(n_bytes)
            try:
                with runtime.engine_log() as log:
                    written = C.llama_state_seq_get_data(pointer, lease._ptr, n_bytes, seq)
                if written != n_bytes:
                    reason = runtime.last_reason(log, "no reason given")
                    raise SnapshotError(f"the engine wrote {written:,} of {n_bytes:,} bytes: {reason}")
                try:
                    with lease.array.data as state:  # released, so that a traceback's frames keep no live view
                        layout = parse(state, ctx.model.capabilities.blob_parts)
                except BlobError as error:
                    raise SnapshotError(f"the state of this architecture has an unknown layout: {error}") from error
                try:
                    last_logits = ctx.logits(seq).copy()
                    last_logits.flags.writeable = False
                except NoLogitsError:
                    last_logits = None
            except BaseException:
                lease.release()
                raise
            origin = _Origin.of(ctx)
            if layout.v_transposed is not None:
                origin = replace(origin, v_transposed=layout.v_transposed)
            return cls(lease, _Holders(), layout, origin, n_tokens, known, last_logits)

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """The state's bytes, uint8 of shape (n_bytes,): a read-only view. Drop it before `release`."""
        with self._using():
            view = self.lease.array[:]
        view.flags.writeable = False
        return view

    def fork(self, arena: Arena | None = None) -> Snapshot:
        """A copy in a lease of its own: one memmove, without the GIL.

        Parameters
        ----------
        arena : Arena, optional
            By default the one this snapshot is in.

        Raises
        ------
        ArenaExhaustedError
            No room; nothing was taken.
        """
        if arena is not None and not isinstance(arena, Arena):
            raise InvalidArgumentError(f"expected an Arena, got {type(arena).__name__}")
        with self._using():
            lease = (self.lease.arena if arena is None else arena).lease(self.n_bytes)
            C.skv_memmove(lease._ptr, self.lease._ptr, self.n_bytes)
        return self._twin(lease, _Holders())

    def share(self) -> Snapshot:
        """Another snapshot over the same bytes: no copy, for branches that only read. Each is released by itself."""
        with alone(self._holders.lock, "snapshot"):
            self._check_held()
            self._holders.count += 1
        return self._twin(self.lease, self._holders)

    def _twin(self, lease: Lease, holders: _Holders) -> Snapshot:
        return Snapshot(lease, holders, self._layout, self._origin, self.n_tokens, self.tokens, self.last_logits)

    def can_restore(self, ctx: Context, seq: int = 0) -> Compatibility:
        """Every reason against restoring into sequence `seq` of `ctx`, as data. Changes nothing."""
        if not isinstance(ctx, Context):
            raise InvalidArgumentError(f"expected a Context, got {type(ctx).__name__}")
        with ctx._lock:
            ctx._ptr  # noqa: B018 - raises after close
            mine, theirs = self._origin, _Origin.of(ctx)
            reasons = []
            if mine.model is not theirs.model and not mine.model.same_as(theirs.model):
                reasons.append(Reason("model", mine.model.fingerprint[:16], theirs.model.fingerprint[:16]))
            for field in _LAYOUT_FIELDS:
                expected, actual = getattr(mine, field), getattr(theirs, field)
                if expected != actual:
                    reasons.append(Reason(field, expected, actual))
            seq = operator.index(seq)
            if not 0 <= seq < ctx.n_seq_max:
                reasons.append(Reason("seq", f"0 to {ctx.n_seq_max - 1}", seq))
            elif ctx._cells and (free := ctx._cells.free_without(seq)) < len(self._layout.positions):
                reasons.append(Reason("free KV cells", f"at least {len(self._layout.positions)}", free))
            return Compatibility(tuple(reasons))

    def restore(self, ctx: Context, seq: int = 0) -> int:
        """Put this state into sequence `seq` of `ctx`, in place of what it held.

        The context needs the same model, KV types, flash attention and number of streams, and as many free cells;
        `can_restore` tells. The state's structure is checked first; K and V values are taken as they are.

        Returns
        -------
        int
            The next position: a branch goes on there.

        Raises
        ------
        IncompatibleSnapshotError, SnapshotCorruptError, ClosedError
            Refused before the engine saw anything; the context is as it was.
        SnapshotError
            The engine refused it all the same: sequence `seq` is empty, the others are as they were.

        Notes
        -----
        Logits that follow are bit-identical to those of an uninterrupted context for equal batch splits, KV types,
        threads and engine, in a context or stream of the sequence's own. The engine sums over cells; where they come to
        lie elsewhere (beside other sequences in a unified cache; in a sliding window, whose passed cells are left out)
        the bits are still the same with flash attention for batches of fewer than 64 tokens and cells in order, and
        the values equal up to rounding otherwise.

        When this returns, the engine no longer reads the snapshot's bytes.
        """
        if not isinstance(ctx, Context):
            raise InvalidArgumentError(f"expected a Context, got {type(ctx).__name__}")
        with ctx._changing() as pointer, self._using():
            compatible = self.can_restore(ctx, seq)
            if not compatible:
                raise IncompatibleSnapshotError(compatible.reasons)
            with self.lease.array.data as state:  # released, so that a traceback's frames keep no live view
                self._layout.check(state)
            bind_contiguous_cache(ctx, self.lease)
            try:
                with runtime.engine_log() as log:
                    read = C.llama_state_seq_set_data(pointer, self.lease._ptr, self.n_bytes, seq)
                C.llama_synchronize(pointer)
                if read != self.n_bytes:
                    reason = runtime.last_reason(log, "no reason given")
                    raise SnapshotError(f"the engine read {read:,} of {self.n_bytes:,} bytes: {reason}")
                ctx._replaced(seq, self._layout.positions, self.last_logits)
                return ctx.position(seq)
            except BaseException:
                ctx._replaced(seq, None, None)
                raise

    def release(self) -> None:
        """Let go of the bytes; the last snapshot that shares them gives them back to the arena.

        Raises
        ------
        ClosedError
            Released before.
        LiveViewsError
            It was the last one, and a numpy view is alive; nothing changed.
        """
        with alone(self._holders.lock, "snapshot"):
            self._check_held()
            if self._holders.count == 1:
                self.lease._give_back()
            self._holders.count -= 1
            self._held = False

    @property
    def released(self) -> bool:
        """Whether `release` was called."""
        return not self._held

    def _check_held(self) -> None:
        if not self._held:
            raise ClosedError("snapshot")

    @contextmanager
    def _using(self) -> Iterator[None]:
        """Keep the bytes while they are read, should another thread release this snapshot meanwhile."""
        with alone(self._holders.lock, "snapshot"):
            self._check_held()
            self._holders.count += 1
        try:
            yield
        finally:
            with alone(self._holders.lock, "snapshot"):
                self._holders.count -= 1
                if self._holders.count == 0:
                    with suppress(LiveViewsError):  # then the lease goes back when the view does
                        self.lease._give_back()

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        with suppress(*([LiveViewsError] if kind else [])):  # as in Arena
            if self._held:
                self.release()

    def __repr__(self) -> str:
        return f"<Snapshot {self.n_tokens:,} tokens, {self.n_bytes:,} bytes{', released' if self.released else ''}>"


def bind_contiguous_cache(ctx: Context, lease: Lease) -> None:
    """Do nothing, after checking the arguments: the engine cannot attach host memory as its KV cache.

    A restore copies, because llama.cpp has no public interface that makes a context read its KV cache from memory
    of ours. Every restore passes through here, so that if upstream offers one, this is the one place to use it.

    Parameters
    ----------
    ctx : Context
    lease : Lease
        Memory that holds a sequence's state.

    Raises
    ------
    InvalidArgumentError
        Other types.
    ClosedError
        The context is closed or the lease released.
    """
    if not isinstance(ctx, Context) or not isinstance(lease, Lease):
        raise InvalidArgumentError(
            f"expected a Context and a Lease, got {type(ctx).__name__} and {type(lease).__name__}"
        )
    ctx._ptr  # noqa: B018 - raises after close
    lease._ptr  # noqa: B018 - raises after release
