"""What a snapshot is besides its bytes, and how both go into files: our own, and llama.cpp's. Needs no engine."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .blob import MAGIC, Layout, Parts, read_layout
from .cache import atomic_file, write_all
from .errors import BlobError, InvalidArgumentError, SnapshotFileError
from .identity import Identity
from .skv import Contents

Bytes = npt.NDArray[np.uint8]
Tokens = npt.NDArray[np.int32]
Logits = npt.NDArray[np.float32]


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

    def contents(self, state: Bytes) -> Contents:
        """As a `.skv` file has it, around the state's bytes."""
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
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(_HEAD.size)
        if len(head) < _HEAD.size:
            raise SnapshotFileError(name, len(head), "header", f"{_HEAD.size} bytes", f"{len(head)} bytes to the end")
        magic, version, n_tokens = _HEAD.unpack(head)
        if magic != SEQ_MAGIC:
            raise SnapshotFileError(name, 0, "magic", f"{SEQ_MAGIC:#x}", f"{magic:#x}", "not a llama.cpp sequence file")
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
