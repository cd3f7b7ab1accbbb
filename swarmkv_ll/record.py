"""What a snapshot is besides its bytes, what becomes of it when they are edited, and how both go into files: our own,
and llama.cpp's. Needs no engine.
"""

from __future__ import annotations

import operator
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from . import blob
from .blob import MAGIC, Edit, Layout, Parts, StateBlob, read_layout
from .cache import atomic_file, open_regular, write_all
from .errors import BlobError, IncompatibleSnapshotError, InvalidArgumentError, SnapshotFileError
from .identity import Identity, Reason, Rope, SavedModel
from .skv import Contents

Bytes = npt.NDArray[np.uint8]
Tokens = npt.NDArray[np.int32]
Logits = npt.NDArray[np.float32]

UNKNOWN = Identity(SavedModel("", ""), "", "", "", False, (False, False), Rope(), ())
"""Of a state whose file does not tell what it was computed with."""


@dataclass(frozen=True)
class Record:
    """What is known of a state.

    Attributes
    ----------
    layout : Layout
        Where everything stands in its bytes.
    identity : Identity
        What it was computed with.
    tokens : mapping of int to ndarray of int32
        By sequence, the tokens it was computed from, where they were given. Read-only.
    logits : mapping of int to ndarray of float32, shape (n_vocab,)
        By sequence, the row after its last token, where it was there. Read-only.
    window : int
        Tokens that windowed layers look back, 0 without any.
    begin : int
        Position of its first token if it is a delta, which needs what comes before; else 0.
    """

    layout: Layout
    identity: Identity
    tokens: Mapping[int, Tokens]
    logits: Mapping[int, Logits]
    window: int = 0
    begin: int = 0

    # ── other states made of this one: `state` is its bytes, and nothing is copied before `Planned.write` ────────────

    def slice(self, state: Bytes, n_tokens: int) -> Planned:
        """The prefix of `n_tokens` tokens. Exact; raises as `swarmkv_ll.blob.slice`."""
        n_tokens = operator.index(n_tokens)
        whole = n_tokens == self.layout.n_tokens
        edit = blob.slice(self._blob(state), n_tokens, window=self.window)
        kept = self.layout.positions[self.layout.positions < n_tokens]  # a sequence can have lost tokens in its middle
        tokens = {seq: ids[: int(kept.max()) + 1] for seq, ids in self.tokens.items()}
        return Planned(edit, replace(self, tokens=tokens, logits=self.logits if whole else {}))

    def convert(self, state: Bytes, *, n_stream: int | None = None, v_transposed: bool | None = None) -> Planned:
        """The same for contexts of another shape; raises as `swarmkv_ll.blob.convert`."""
        return Planned(blob.convert(self._blob(state), n_stream=n_stream, v_transposed=v_transposed), self)

    def delta(self, state: Bytes, begin: int) -> Planned:
        """Only the tokens from position `begin` on; raises as `swarmkv_ll.blob.delta`."""
        begin = operator.index(begin)
        return Planned(blob.delta(self._blob(state), begin), replace(self, begin=begin))

    def append(self, state: Bytes, tail: Record, tail_state: Bytes) -> Planned:
        """This and a delta that goes on where it ends, as one.

        Raises
        ------
        InvalidArgumentError
            `tail` is no delta of this length, or of other tokens, or tokens are not known.
        IncompatibleSnapshotError
            They were computed with different models, types or settings.
        PartialRemovalError
            As `swarmkv_ll.blob.append`.
        """
        n_tokens = self.layout.n_tokens
        if tail.begin == 0 or tail.begin != n_tokens or self.layout.whole:
            raise InvalidArgumentError(f"a delta from {n_tokens} on is needed, this one begins at {tail.begin}")
        mine, theirs = (next(iter(record.tokens.values()), None) for record in (self, tail))
        if mine is None or theirs is None:
            raise InvalidArgumentError("tokens of both have to be known, to tell that they belong together")
        if not np.array_equal(mine, theirs[: len(mine)]):
            at = int(np.argmax(mine != theirs[: len(mine)]))
            raise InvalidArgumentError(f"the delta is of another text: token {at} is {theirs[at]}, not {mine[at]}")
        reasons, conversions = self.identity.compare(tail.identity)
        if reasons or conversions:
            raise IncompatibleSnapshotError(reasons + [Reason(c.field, c.before, c.after) for c in conversions])
        edit = blob.append(self._blob(state), tail._blob(tail_state), window=self.window)
        return Planned(edit, replace(self, tokens=tail.tokens, logits=tail.logits))

    def extract(self, state: Bytes, seq: int) -> Planned:
        """One sequence of a whole context; raises as `swarmkv_ll.blob.extract`."""
        seq = operator.index(seq)
        tokens = {s: ids for s, ids in self.tokens.items() if s == seq}
        logits = {s: row for s, row in self.logits.items() if s == seq}
        edit = blob.extract(self._blob(state), seq, window=self.window)
        return Planned(edit, replace(self, tokens=tokens, logits=logits))

    def _blob(self, state: Bytes) -> StateBlob:
        return StateBlob(self.layout, state)

    # ── files ────────────────────────────────────────────────────────────────────────────────────────

    def contents(self, state: Bytes) -> Contents:
        """As a `.skv` file has it, around the state's bytes.

        Raises
        ------
        InvalidArgumentError
            It is not known what it was computed with.
        """
        if self.identity is UNKNOWN:
            raise InvalidArgumentError("a .skv file tells what its state was computed with, which is not known of this")
        arrays: dict[str, npt.NDArray[Any]] = {f"tokens.{seq}": tokens for seq, tokens in self.tokens.items()}
        arrays |= {f"logits.{seq}": row for seq, row in self.logits.items()}
        meta = {
            "kind": "context" if self.layout.whole else "sequence",
            "sequences": {str(seq): end for seq, end in self.layout.sequences.items()},
            "begin": self.begin,
            "window": self.window,
            "parts": asdict(self.layout.parts),
            "identity": self.identity.to_meta(),
        }
        return Contents(meta, arrays, state)

    @classmethod
    def of(cls, contents: Contents, path: str | None = None) -> Record:
        """What a file holds, everything checked against its state's bytes.

        Raises
        ------
        SnapshotFileError
            Meta, arrays or state are not what they should be, or do not belong together.
        """

        def check(ok: bool, field: str, expected: object, actual: object) -> None:
            if not ok:
                raise SnapshotFileError(path, 0, field, expected, actual)

        meta = contents.meta
        try:
            identity, begin, found = Identity.from_meta(meta["identity"]), meta["begin"], meta["parts"]
            parts = Parts(**found)
            window = meta["window"]
            kinds = [type(getattr(parts, name)) for name in ("n_attention", "recurrent", "cell_extension", "has_v")]
            if (
                kinds != [int, bool, bool, bool]
                or not 0 <= parts.n_attention <= 2
                or [type(begin), type(window)] != [int, int]
            ):
                raise TypeError("parts, begin or window are of another kind")
            kind, sequences = meta["kind"], meta["sequences"]
        except (KeyError, TypeError, ValueError, AttributeError, InvalidArgumentError) as error:
            detail = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise SnapshotFileError(path, 0, "meta", "as docs/format.md tells", detail) from None
        try:
            layout = read_layout(contents.state, parts)
        except BlobError as error:
            raise SnapshotFileError(path, error.offset, f"state: {error.field}", error.expected, error.actual) from None
        check(kind == ("context" if layout.whole else "sequence"), "meta kind", "what the state is of", kind)
        inside = {str(seq): end for seq, end in layout.sequences.items()}
        check(sequences == inside and len(inside) > 0, "meta sequences", inside or "not none", sequences)
        first = int(layout.positions.min(initial=2**31 - 1))
        delta_ok = begin == first and not layout.whole if begin else True
        check(0 <= window < 2**31, "meta window", "0 or more", window)
        check(delta_ok and begin >= 0, "meta begin", f"0, or {first} of a sequence", begin)
        tokens: dict[int, Tokens] = {}
        logits: dict[int, Logits] = {}
        for name, array in contents.arrays.items():
            what, _, seq = name.partition(".")
            check(
                what in ("tokens", "logits") and seq in inside, "section name", "tokens or logits of a sequence", name
            )
            array.flags.writeable = False
            if what == "tokens":
                n = layout.sequences[int(seq)]
                ok = array.dtype == np.int32 and len(array) == n and bool((array >= 0).all())
                check(ok, name, f"{n} tokens, int32, not negative", f"{len(array)} of {array.dtype}")
                tokens[int(seq)] = array
            else:
                ok = array.dtype == np.float32 and len(array) > 0 and not (np.isnan(array) | np.isposinf(array)).any()
                check(ok, name, "float32 numbers", f"{len(array)} of {array.dtype}")
                logits[int(seq)] = array
        return cls(layout, identity, tokens, logits, window, begin)

    def save_llama(self, path: str | os.PathLike[str], state: Bytes) -> None:
        """Write a sequence file of llama.cpp's; tokens that are not known are left out.

        Raises
        ------
        InvalidArgumentError
            A whole context's state, or a delta.
        DiskFullError, OSError
        """
        if self.layout.whole or self.begin:
            raise InvalidArgumentError("only one sequence's whole state can be a sequence file")
        write_llama(path, next(iter(self.tokens.values()), np.empty(0, np.int32)), state)

    @classmethod
    def of_llama(
        cls,
        path: str,
        ids: Tokens,
        state: Bytes,
        *,
        parts: Parts | None = None,
        identity: Identity = UNKNOWN,
        window: int = 0,
        n_vocab: int = 2**31,
    ) -> Record:
        """What `read_llama` has read. Tokens are kept if there are as many as positions, and all of the vocabulary.

        Parameters
        ----------
        path : str
            For errors.
        parts : Parts, optional
            What such a model's state is made of; else the first kind that explains every byte is taken.

        Raises
        ------
        SnapshotFileError
            Its state is none of that kind, or empty.
        """
        first = _HEAD.size + 4 * len(ids) - _BLOB_HEAD  # where the blob's first byte would be
        try:
            layout = read_layout(state, parts)
        except BlobError as error:
            del state  # so that the traceback keeps no view of it alive
            raise SnapshotFileError(path, first + error.offset, error.field, error.expected, error.actual) from None
        if not layout.sequences:
            raise SnapshotFileError(path, first + _BLOB_HEAD, "state", "a sequence with tokens", "empty")
        fits = len(ids) == layout.sequences[0] and bool(((ids >= 0) & (ids < n_vocab)).all())
        ids.flags.writeable = False
        return cls(layout, identity, {0: ids} if fits else {}, {}, window)


@dataclass(frozen=True)
class Planned:
    """A state made of others that is yet to be written, and what will be known of it.

    Attributes
    ----------
    edit : Edit
    record : Record
        All but its layout, which is still that of what it is made of.
    """

    edit: Edit
    record: Record

    @property
    def n_bytes(self) -> int:
        """Size of the state, in bytes."""
        return self.edit.n_bytes

    def write(self, out: Bytes | None = None) -> tuple[Record, Bytes]:
        """Write it into `out`, by default new memory: its record and its bytes. Raises as `Edit.write`."""
        made = self.edit.write(out)
        return replace(self.record, layout=made.layout), made.data


# ── llama.cpp's sequence files ───────────────────────────────────────────────────────────────────────

SEQ_MAGIC, SEQ_VERSION = 0x67677371, 3
"""`LLAMA_STATE_SEQ_MAGIC` ("ggsq") and `LLAMA_STATE_SEQ_VERSION`."""

_HEAD = struct.Struct("<III")
_BLOB_HEAD = 8  # magic and seq_id of the state in memory, which the file leaves out


def write_llama(path: str | os.PathLike[str], tokens: Tokens, state: Bytes) -> None:
    """Write what `llama_state_seq_save_file` writes: magic, version, number of tokens, tokens, state; atomically."""
    head = _HEAD.pack(SEQ_MAGIC, SEQ_VERSION, len(tokens)) + tokens.astype("<i4").tobytes()
    with atomic_file(path, len(head) + len(state) - _BLOB_HEAD) as file, state[_BLOB_HEAD:].data as view:
        write_all(file, head)
        write_all(file, view)


def read_llama(path: str | os.PathLike[str], allocate: Callable[[int], Bytes]) -> Tokens:
    """Read such a file: its tokens, and its state into the memory that `allocate` gives, as a blob of sequence 0.

    Raises
    ------
    SnapshotFileError
        Another kind or version of file, or shorter than it says.
    """
    name = os.fspath(path)
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(_HEAD.size)
        if len(head) < _HEAD.size:
            raise SnapshotFileError(name, len(head), "header", f"{_HEAD.size} bytes", f"{len(head)} bytes to the end")
        magic, version, n_tokens = _HEAD.unpack(head)
        if magic != SEQ_MAGIC:
            hint = "a .skv file, which Snapshot.load reads" if head[1:4] == b"SKV" else "not a llama.cpp sequence file"
            raise SnapshotFileError(name, 0, "magic", f"{SEQ_MAGIC:#x}", f"{magic:#x}", hint)
        if version != SEQ_VERSION:
            raise SnapshotFileError(name, 4, "version", SEQ_VERSION, version)
        n_state = size - _HEAD.size - 4 * n_tokens
        if n_state < 4:
            raise SnapshotFileError(
                name, 8, "number of tokens", f"at most {(size - _HEAD.size) // 4:,}", f"{n_tokens:,}"
            )
        tokens = np.frombuffer(file.read(4 * n_tokens), "<i4").astype(np.int32)
        state = allocate(_BLOB_HEAD + n_state)
        state[:_BLOB_HEAD] = np.frombuffer(struct.pack("<Ii", MAGIC, 0), np.uint8)
        with state[_BLOB_HEAD:].data as view:
            at = 0
            while at < n_state:
                with view[at : at + (8 << 20)] as piece:
                    n_bytes = file.readinto(piece)
                if not n_bytes:
                    raise SnapshotFileError(name, size - n_state + at, "state", f"{n_state:,} bytes", f"{at:,} bytes")
                at += n_bytes
        return tokens
