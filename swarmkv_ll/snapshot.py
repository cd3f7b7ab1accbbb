"""A context's KV state in host memory: taken once, forked by one memmove, restored anywhere it fits."""

from __future__ import annotations

import io
import operator
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from . import fit, record, skv, state
from .arena import Arena, Lease
from .blob import StateBlob, convert
from .blob import slice as slice_blob
from .context import Context
from .errors import (
    ArenaExhaustedError,
    ClosedError,
    IncompatibleSnapshotError,
    InvalidArgumentError,
    LiveViewsError,
    NoLogitsError,
    SnapshotError,
    SnapshotFileError,
)
from .exclusive import alone, new_lock
from .ffi import C, ffi
from .identity import Compatibility, Conversion, Identity
from .model import Tokens
from .outputs import Logits
from .record import Planned, Record

_T = TypeVar("_T")


class Restored(int):
    """What `Snapshot.restore` gives: the next position, as an int, and what the restore did.

    Attributes
    ----------
    conversions : tuple of Conversion
        What was changed on the way.
    runs : int or None
        Runs of neighbouring KV cells that the state went into; 1 is fastest. None where that is not known.
    moved : bool
        Whether other sequences' cells were moved together first, because the state would have lain in many runs. What
        they hold is the same.
    """

    conversions: tuple[Conversion, ...]
    runs: int | None
    moved: bool

    @classmethod
    def at(cls, position: int, conversions: tuple[Conversion, ...], runs: int | None, moved: bool) -> Restored:
        made = cls(position)
        made.conversions, made.runs, made.moved = conversions, runs, moved
        return made


class _Holders:
    """How many hold one lease: the snapshots that share it, and calls that are reading it just now."""

    def __init__(self) -> None:
        # By weak references: what a Ctrl-C keeps from saying that it is done still ends with its frame.
        self._known: list[weakref.ref[_Hold]] = []
        self.lock = new_lock()

    def add(self, hold: _Hold) -> None:
        """Under the lock."""
        self._known = [*self._alive(), weakref.ref(hold)]

    def without(self, hold: _Hold | None) -> bool:
        """Whether nobody but `hold` holds it."""
        return all(known() is hold for known in self._alive())

    def _alive(self) -> list[weakref.ref[_Hold]]:
        return [known for known in self._known if known() is not None]


class _Hold:
    """One of them."""


class Snapshot:
    """The state of one sequence, or of a whole context, as the engine exported it, in a lease of an arena.

    Made by `Context.snapshot`, `fork`, `share`, `load` and the functions that make one of another.

    Attributes
    ----------
    n_bytes : int
        Size of the state.
    identity : Identity
        What it was computed with: model, engine, KV types, flash attention, RoPE, adapters.
    lease : Lease
        Where the bytes are.
    """

    def __init__(self, lease: Lease, holders: _Holders, known: Record) -> None:
        self.lease, self._holders, self._record = lease, holders, known
        self.n_bytes = lease.n_bytes
        self.identity: Identity = known.identity
        lease._owner = "snapshot"
        self._hold: _Hold | None = _Hold()
        holders.add(self._hold)

    @property
    def whole(self) -> bool:
        """Whether it is a whole context's, with every sequence, or one sequence's."""
        return self._record.layout.whole

    @property
    def sequences(self) -> dict[int, int]:
        """Each sequence inside, and its next position."""
        return dict(self._record.layout.sequences)

    @property
    def n_tokens(self) -> int:
        """Position at which a branch goes on; of a whole context the sum over its sequences."""
        return self._record.layout.n_tokens

    @property
    def begin(self) -> int:
        """Position of the first token if this is a `delta`, else 0."""
        return self._record.begin

    @property
    def tokens(self) -> Tokens | dict[int, Tokens] | None:
        """The tokens it was computed from, int32 of shape (n_tokens,), if they were given. Of a whole context by sequence."""
        return self._one(self._record.tokens)

    @property
    def last_logits(self) -> Logits | dict[int, Logits] | None:
        """The row after the last token, float32 of shape (n_vocab,), if the context still had it: an exact hit can be
        sampled at once. Of a whole context by sequence.
        """
        return self._one(self._record.logits)

    def _one(self, by_sequence: Mapping[int, _T]) -> _T | dict[int, _T] | None:
        return dict(by_sequence) if self.whole else next(iter(by_sequence.values()), None)

    # ── from a context, and copies ───────────────────────────────────────────────────────────────────

    @classmethod
    def take(
        cls,
        ctx: Context,
        arena: Arena,
        seq: int | None = 0,
        *,
        tokens: npt.ArrayLike | Mapping[int, npt.ArrayLike] | None = None,
    ) -> Snapshot:
        """Export a sequence of `ctx`, or, with None, all of them: one copy, by the engine, straight into a lease.

        Parameters
        ----------
        seq : int or None
        tokens : array of integers, shape (n_tokens,), or of a whole context a mapping of sequences to those, optional
            What the state was computed from, kept beside it.

        Raises
        ------
        SnapshotError
            The sequence, or the context, is empty, or the engine's bytes are not what was expected. The lease is given
            back.
        ArenaExhaustedError
            The arena has no room for it.
        InvalidArgumentError
            `tokens` are not as many as the sequence holds.
        """
        _expect(arena, Arena)
        with ctx._changing() as pointer:
            seqs = range(ctx.n_seq_max) if seq is None else [int(operator.index(seq))]  # True is an index
            ends = {s: end for s in seqs if (end := ctx.position(s))}
            if not ends:
                raise SnapshotError("the context is empty" if seq is None else f"sequence {seq} is empty")
            if tokens is not None and not isinstance(tokens, Mapping):
                if seq is None:
                    raise InvalidArgumentError("tokens of a whole context should be a mapping of sequences to tokens")
                tokens = {seq: tokens}
            given = tokens or {}
            known = {int(operator.index(s)): checked_tokens(ctx, ends, s, ids) for s, ids in given.items()}
            logits = {}
            for s in ends:
                with suppress(NoLogitsError):
                    logits[s] = ctx.logits(s).copy()
                    logits[s].flags.writeable = False
            lease = arena.lease(ctx.state_size(seq))
            try:
                layout = state.write(ctx, pointer, seq, lease._ptr, lease.n_bytes)
                window = ctx.model.capabilities.sliding_window
                return cls(lease, _Holders(), Record(layout, state.identity(ctx), known, logits, window))
            except BaseException:
                lease._give_back()
                raise

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """The state's bytes, uint8 of shape (n_bytes,): a read-only view. Drop it before `release`."""
        with self._using():
            view = self.lease.array[:]
        view.flags.writeable = False
        return view

    @property
    def blob(self) -> StateBlob:
        """The state seen as arrays (cells, keys and values by layer): read-only views. Drop it before `release`."""
        return StateBlob(self._record.layout, self.array)

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
        with self._using():
            lease = self._arena(arena).lease(self.n_bytes)
            C.skv_memmove(lease._ptr, self.lease._ptr, self.n_bytes)
        return Snapshot(lease, _Holders(), self._record)

    def share(self) -> Snapshot:
        """Another snapshot over the same bytes: no copy, for branches that only read. Each is released by itself."""
        with alone(self._holders.lock, "snapshot"):
            self._check_held()
            return Snapshot(self.lease, self._holders, self._record)

    # ── other snapshots made of this one ─────────────────────────────────────────────────────────────

    def slice(self, n_tokens: int, arena: Arena | None = None) -> Snapshot:
        """The prefix of `n_tokens` tokens, in a lease of its own. Exact; see `swarmkv_ll.blob.slice`.

        Raises
        ------
        PartialRemovalError
            A recurrent state cannot be cut, or the sliding window has moved on.
        InvalidArgumentError, ArenaExhaustedError
        """
        return self._made(lambda state: self._record.slice(state, n_tokens), arena)

    def convert(
        self, *, n_stream: int | None = None, v_transposed: bool | None = None, arena: Arena | None = None
    ) -> Snapshot:
        """The same state laid out for other contexts, in a lease of its own; see `swarmkv_ll.blob.convert`."""
        return self._made(
            lambda state: self._record.convert(state, n_stream=n_stream, v_transposed=v_transposed), arena
        )

    def delta(self, begin: int, arena: Arena | None = None) -> Snapshot:
        """Only the tokens from position `begin` on: what the next turn of a conversation has added.

        It cannot be restored by itself; `append` puts it behind a snapshot of the first `begin` tokens.

        Raises
        ------
        PartialRemovalError
            A recurrent state has no such part.
        InvalidArgumentError, ArenaExhaustedError
        """
        return self._made(lambda state: self._record.delta(state, begin), arena)

    def append(self, tail: Snapshot, arena: Arena | None = None) -> Snapshot:
        """This state and a `delta` that goes on where it ends, as one, in a lease of its own.

        Both have to know their tokens, and the delta's have to begin with this one's.

        Raises
        ------
        InvalidArgumentError
            `tail` is no delta of this length, or of other tokens, or tokens are not known.
        IncompatibleSnapshotError
            They were computed with different models, types or settings.
        PartialRemovalError, ArenaExhaustedError
        """
        _expect(tail, Snapshot)
        with tail._using():
            return self._made(lambda state: self._record.append(state, tail._record, tail._bytes()), arena)

    def extract(self, seq: int, arena: Arena | None = None) -> Snapshot:
        """One sequence of a whole context's snapshot, in a lease of its own."""
        return self._made(lambda state: self._record.extract(state, seq), arena)

    def _made(self, plan: Callable[[npt.NDArray[np.uint8]], Planned], arena: Arena | None) -> Snapshot:
        with self._using():
            planned = plan(self._bytes())
            lease = self._arena(arena).lease(planned.n_bytes)
            try:
                known, _ = planned.write(_view(lease))
                return Snapshot(lease, _Holders(), known)
            except BaseException:
                lease._give_back()
                raise

    def _arena(self, arena: Arena | None) -> Arena:
        return self.lease.arena if arena is None else _expect(arena, Arena)

    def _bytes(self) -> npt.NDArray[np.uint8]:
        """The bytes for use within `_using`: not counted as a live view."""
        return _view(self.lease)

    # ── into a context ───────────────────────────────────────────────────────────────────────────────

    def can_restore(
        self, ctx: Context, seq: int | None = None, *, n_tokens: int | None = None, allow_inexact: bool = False
    ) -> Compatibility:
        """What `restore` with the same arguments would do: every conversion, and every reason against. Changes nothing.

        Where this model's state was never seen in this process with these KV types, a small context decodes one token
        to learn what the engine demands.
        """
        _expect(ctx, Context)
        with ctx._looking(), self._using():
            return fit.compare(self._record, self._bytes(), ctx, seq, n_tokens, allow_inexact)

    def restore(
        self, ctx: Context, seq: int | None = None, *, n_tokens: int | None = None, allow_inexact: bool = False
    ) -> Restored:
        """Put this state into sequence `seq` of `ctx`, in place of what it held; a whole context's, in place of all.

        The context needs the same model, engine, KV types and settings, and free cells; `can_restore` tells what is
        against it, and what is converted on the way. The state's structure is checked first; K and V values are taken as
        they are.

        Parameters
        ----------
        seq : int, optional
            By default sequence 0. Not for a whole context's.
        n_tokens : int, optional
            Only the first so many tokens: their cells as they are. There is no row of logits then: decode a token, for
            example the prefix's last one (restore n − 1, decode 1), before sampling.
        allow_inexact : bool
            Also from a context with flash attention into one without or the other way round, and from another build of
            the same engine. What follows then equals what such a context would have computed up to rounding.

        Returns
        -------
        Restored
            The next position, an int: a branch goes on there. Of a whole context the sum over its sequences. It also
            tells what was converted, and how the state lies in the cache.

        Raises
        ------
        IncompatibleSnapshotError, SnapshotCorruptError, ClosedError
            Refused before the engine saw anything; the context is as it was.
        SnapshotError
            The engine refused it all the same: what was to be replaced is empty, other sequences are as they were.
            It does where the smaller cache of a sliding window (without `swa_full`) is full of cells that sequences share:
            which of them it still has, it does not tell, so that `can_restore` says yes.

        Notes
        -----
        Logits that follow are bit-identical to those of an uninterrupted context for equal batch splits, KV types,
        threads and engine, in a context or stream of the sequence's own. The engine sums over cells; where they come to
        lie elsewhere (beside other sequences in a unified cache; in a sliding window, whose passed cells are left out)
        the bits are still the same with flash attention for batches of fewer than 64 tokens and cells in order, and
        the values equal up to rounding otherwise.

        When this returns, the engine no longer reads the snapshot's bytes.
        """
        _expect(ctx, Context)
        with ctx._changing() as pointer, self._using():
            found = self.can_restore(ctx, seq, n_tokens=n_tokens, allow_inexact=allow_inexact)
            if not found:
                raise IncompatibleSnapshotError(found.reasons)
            with self._bytes().data as bytes_now:
                self._record.layout.check(bytes_now)
            bind_contiguous_cache(ctx, self.lease)
            target = None if self.whole else seq or 0
            rows = {} if "n_tokens" in {change.field for change in found.conversions} else dict(self._record.logits)
            if target is not None and rows:
                rows = {target: rows.popitem()[1]}
            with self._fitted(found.conversions, ctx.model.capabilities.sliding_window) as (data, layout):
                runs, moved = (1, False) if target is None else state.make_room(ctx, pointer, target, layout)
                state.read(ctx, pointer, target, data, layout, rows)
            return Restored.at(layout.n_tokens, found.conversions, runs, moved)

    @contextmanager
    def _fitted(self, conversions: tuple[Conversion, ...], window: int) -> Iterator[tuple[Any, Any]]:
        """The state as it is, or converted into memory of the arena, or, where that is full, of the process."""
        after: dict[str, Any] = {change.field: change.after for change in conversions}
        blob, edit = StateBlob(self._record.layout, self._bytes()), None
        if "n_tokens" in after:
            edit = slice_blob(blob, after["n_tokens"], window=window)
        if shape := {name: after[name] for name in ("n_stream", "v_transposed") if name in after}:
            edit = convert(edit.write() if edit else blob, **shape)
        if edit is None:
            yield self.lease._ptr, self._record.layout
            return
        try:
            lease = self.lease.arena.lease(edit.n_bytes)
        except ArenaExhaustedError:
            fitted = edit.write()
            yield ffi.from_buffer("uint8_t[]", fitted.data), fitted.layout
            return
        try:
            yield lease._ptr, edit.write(_view(lease)).layout
        finally:
            lease._give_back()

    # ── files and streams ────────────────────────────────────────────────────────────────────────────

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a `.skv` file, whole or not at all; it is on the disk when this returns. docs/format.md tells how.

        The state must not change meanwhile.

        Raises
        ------
        DiskFullError, OSError
            What stood there before is as it was.
        """
        with self._using():
            skv.save(path, self._record.contents(self._bytes()))

    def write_to(self, file: Any) -> int:
        """Write the same bytes to anything with `write`: a pipe, `socket.makefile("wb")`. Gives their number.

        A buffered file is flushed, so that who reads at the other end has all of them.
        """
        with self._using():
            n_bytes = skv.dump(self._record.contents(self._bytes()), file)
        if hasattr(file, "flush"):
            file.flush()
        return n_bytes

    def to_bytes(self) -> bytes:
        """The same bytes in memory: a copy."""
        file = io.BytesIO()
        self.write_to(file)
        return file.getvalue()

    @classmethod
    def load(cls, path: str | os.PathLike[str], arena: Arena) -> Snapshot:
        """Read a `.skv` file straight into a lease, every checksum verified.

        The snapshot knows which model it belongs to by its fingerprint; `can_restore` compares.

        Raises
        ------
        SnapshotFileError
            Not such a file, damaged, or not consistent. Nothing was taken.
        ArenaExhaustedError
            No room. Nothing was taken.
        OSError
            The system's own reason.
        """
        return cls._received(arena, lambda allocate: skv.load(path, allocate), os.fspath(path))

    @classmethod
    def read_from(cls, file: Any, arena: Arena) -> Snapshot:
        """Read from anything with `readinto` or `read`, in order, and not a byte further than the snapshot's end.

        Raises as `load`; `EndOfStreamError` if there was nothing.
        """
        return cls._received(arena, lambda allocate: skv.read(file, allocate), None)

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview, arena: Arena) -> Snapshot:
        """Read what `to_bytes` gave. Raises as `load`."""
        file = io.BytesIO(data)
        made = cls.read_from(file, arena)
        left = len(file.read())
        if left:
            made.release()
            raise SnapshotFileError(None, len(data) - left, "end", "nothing more", f"{left:,} bytes more")
        return made

    @classmethod
    def _received(cls, arena: Arena, receive: Callable[[skv.Allocate], skv.Contents], path: str | None) -> Snapshot:
        with _leased(arena) as (leases, allocate):
            known = Record.of(receive(allocate), path)
            return cls(leases[0], _Holders(), known)

    def export_llama(self, path: str | os.PathLike[str]) -> None:
        """Write a sequence file of llama.cpp's, byte by byte what `llama_state_seq_save_file` writes; atomically.

        llama.cpp's loaders and llama-server's slots read it into a context of the same model, KV types, flash attention
        and number of streams, none of which it holds. Tokens that are not known are left out.

        Raises
        ------
        InvalidArgumentError
            A whole context's state, or a delta.
        DiskFullError, OSError
        """
        with self._using():
            self._record.save_llama(path, self._bytes())

    @classmethod
    def import_llama(cls, path: str | os.PathLike[str], ctx: Context, arena: Arena) -> Snapshot:
        """Read a sequence file of llama.cpp's straight into a lease.

        The file does not tell what it was computed with: it is taken to be what `ctx` is, and only its layout can be
        compared with that. Tokens are kept if there are as many as positions.

        Raises
        ------
        SnapshotFileError
            Another kind of file, cut short, or not a state of this kind of model.
        IncompatibleSnapshotError
            Its layers, types or row sizes are not those of `ctx`.
        ArenaExhaustedError, OSError
        """
        _expect(ctx, Context)
        name = os.fspath(path)
        with _leased(arena) as (leases, allocate):
            ids = record.read_llama(path, allocate)
            wanted = state.shape(ctx)
            known = Record.of_llama(
                name,
                ids,
                _view(leases[0]),
                parts=state.parts(ctx),
                identity=state.identity(ctx),
                window=ctx.model.capabilities.sliding_window,
                n_vocab=ctx.model.n_vocab,
            )
            reasons = fit.shape_reasons(known.layout.shape, wanted)
            if reasons:
                raise IncompatibleSnapshotError(reasons)
            return cls(leases[0], _Holders(), known)

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
            if self._holders.without(self._hold) and not self.lease.released:
                self.lease._give_back()
            self._hold = None

    @property
    def released(self) -> bool:
        """Whether `release` was called."""
        return self._hold is None

    def _check_held(self) -> None:
        if self._hold is None:
            raise ClosedError("snapshot")

    @contextmanager
    def _using(self) -> Iterator[None]:
        """Keep the bytes while they are read, should another thread release this snapshot meanwhile."""
        hold = _Hold()
        try:
            with alone(self._holders.lock, "snapshot"):
                self._check_held()
                self._holders.add(hold)
            yield
        finally:
            del hold
            with alone(self._holders.lock, "snapshot"):
                if self._holders.without(None) and not self.lease.released:
                    with suppress(LiveViewsError):  # then the lease goes back when the view does
                        self.lease._give_back()

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        with suppress(*([LiveViewsError] if kind else [])):  # as in Arena
            if not self.released:
                self.release()

    def __repr__(self) -> str:
        what = f"{len(self.sequences)} sequences, " if self.whole else f"from {self.begin:,} on, " if self.begin else ""
        return (
            f"<Snapshot {what}{self.n_tokens:,} tokens, {self.n_bytes:,} bytes{', released' if self.released else ''}>"
        )


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


def _expect(value: Any, kind: type[_T]) -> _T:
    if not isinstance(value, kind):
        raise InvalidArgumentError(f"expected {kind.__name__}, got {type(value).__name__}")
    return value


def checked_tokens(ctx: Context, ends: Mapping[int, int], seq: int, ids: npt.ArrayLike) -> Tokens:
    """A copy of a sequence's tokens, checked."""
    known: Tokens = ctx.model.check_tokens(ids).copy()
    known.flags.writeable = False
    if seq not in ends:
        raise InvalidArgumentError(f"tokens were given for sequence {seq}, which is empty or not there")
    if len(known) != ends[seq]:
        raise InvalidArgumentError(f"{len(known)} tokens were given for positions 0 to {ends[seq] - 1}")
    return known


def _view(lease: Lease) -> npt.NDArray[np.uint8]:
    """A lease's bytes, for as long as the caller holds it: not counted as a live view."""
    return np.frombuffer(ffi.buffer(lease._ptr, lease.n_bytes), np.uint8)


@contextmanager
def _leased(arena: Arena) -> Iterator[tuple[list[Lease], skv.Allocate]]:
    """An `allocate` for readers: takes one lease, which is given back if the block fails."""
    _expect(arena, Arena)
    leases: list[Lease] = []

    def allocate(n_bytes: int) -> npt.NDArray[np.uint8]:
        if not n_bytes:
            raise SnapshotFileError(None, 0, "state", "not empty", "0 bytes")
        leases.append(arena.lease(n_bytes))
        return _view(leases[0])

    try:
        yield leases, allocate
    except BaseException:
        for lease in leases:
            lease._give_back()
        raise
