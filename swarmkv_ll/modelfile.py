"""A model's file: that it is one the engine can take, and what identifies it. Needs no engine."""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import stat
import struct
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from blake3 import blake3

from .cache import cache_dir, write_atomically
from .errors import ModelLoadError


class ModelFile:
    """Which file a model is, without keeping the model alive.

    Two of them are equal if they are the same unchanged file; for different files the fingerprint decides.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            if not stat.S_ISREG(os.stat(self.path).st_mode):
                raise ModelLoadError(f"{self.path}: {'Is a directory' if self.path.is_dir() else 'not a regular file'}")
            with open(self.path, "rb") as file:
                magic = file.read(4)
        except OSError as error:
            raise ModelLoadError(f"{self.path}: {error.strerror}") from None
        except ValueError as error:  # a NUL or half a surrogate in the name
            raise ModelLoadError(f"{str(self.path)!a} cannot be a file name: {error}") from None
        if magic != b"GGUF":
            raise ModelLoadError(f"{self.path}: not a GGUF file (begins with {magic!r})")
        _check_metadata(self.path)
        self.parts = self._parts()
        self.stats = tuple(_stat(part) for part in self.parts)
        self._lock = threading.Lock()
        self._fingerprint: str | None = None

    def __repr__(self) -> str:
        return f"<ModelFile {self.path.name}>"

    def _parts(self) -> tuple[Path, ...]:
        split = re.fullmatch(r"(.*)-00001-of-(\d{5})\.gguf", self.path.name)
        if not split:
            return (self.path,)
        name, count = split.groups()
        parts = tuple(self.path.with_name(f"{name}-{i:05d}-of-{count}.gguf") for i in range(1, int(count) + 1))
        missing = [part.name for part in parts if not part.is_file()]
        if missing:
            raise ModelLoadError(f"{self.path}: part(s) of this split model are missing: {', '.join(missing)}")
        return parts

    @property
    def fingerprint(self) -> str:
        """BLAKE3 over all parts, hex; kept on disk by device, inode, size and time of change."""
        with self._lock:
            if self._fingerprint is None:
                try:
                    if tuple(_stat(part) for part in self.parts) != self.stats:
                        raise ModelLoadError(f"{self.path}: the file has changed since the model was loaded")
                    self._fingerprint = self._read_kept() or self._hash()
                except OSError as error:
                    raise ModelLoadError(f"{self.path}: {error.strerror}") from None
            return self._fingerprint

    @property
    def _kept(self) -> Path:
        key = blake3(repr(self.stats).encode()).hexdigest(length=16)
        return cache_dir() / "fingerprints" / key

    def _read_kept(self) -> str | None:
        try:
            kept = self._kept.read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            return None
        return kept if re.fullmatch(r"[0-9a-f]{64}", kept) else None

    def _hash(self) -> str:
        hasher = blake3(max_threads=blake3.AUTO)
        for part in self.parts:
            hasher.update_mmap(part)
        digest: str = hasher.hexdigest()
        with contextlib.suppress(OSError):  # a cache that cannot be written only costs time
            write_atomically(self._kept, digest.encode())
        return digest

    def same_as(self, other: ModelFile) -> bool:
        """Whether both are the same model; hashes only if it has to."""
        return self.stats == other.stats or self.fingerprint == other.fingerprint


def _stat(path: Path) -> tuple[int, int, int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9


_ROPE_SCALING = (b"none", b"linear", b"yarn", b"longrope")


def _check_metadata(path: Path) -> None:
    """Refuse what the engine aborts on: two tokens of the same text (`src/llama-vocab.cpp`), an unknown RoPE scaling
    (`src/llama-model.cpp`).

    What is damaged in another way is left to the engine, which says so.
    """
    seen: set[bytes] = set()
    for key, i, text in _texts(path):
        if key.endswith(b".rope.scaling.type") and text not in _ROPE_SCALING:
            raise ModelLoadError(f"{path}: RoPE scaling {text!r} is none that the engine knows")
        if key == b"tokenizer.ggml.tokens":
            if text in seen:
                raise ModelLoadError(f"{path}: token {i} has the text {text!r}, as an earlier one has")
            if text:
                seen.add(text)


def difference(path: Path, metadata: Mapping[str, str], n_bytes: int) -> str | None:
    """What tells a GGUF from the model with this metadata and this size of all tensors; None if nothing does.

    Texts are compared and, as quantized siblings have the same, sizes. Only that: the file may be split, or have changed.
    """
    for key, i, text in _texts(path):
        there = metadata.get(key.decode(errors="replace"))
        if i == 0 and there is not None and there != text.decode(errors="replace"):
            return f"{key.decode(errors='replace')} is {text.decode(errors='replace')!r:.60}, not {there!r:.60}"
    size = path.stat().st_size
    if not (n_bytes <= size <= n_bytes + (64 << 20)) and "-of-" not in path.name:
        return f"it has {size:,} bytes, the model's tensors {n_bytes:,}"
    return None


def _texts(path: Path) -> Iterator[tuple[bytes, int, bytes]]:
    """Key, index and value of each text in a GGUF's metadata, as far as it can be read."""
    with open(path, "rb") as file, contextlib.suppress(struct.error, ValueError, KeyError, OSError):
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        _, version, _, n_fields = struct.unpack_from("<IIQQ", data)
        if version not in (2, 3):
            return
        at = 24
        for _ in range(n_fields):
            key, at = _string(data, at)
            (kind,) = struct.unpack_from("<I", data, at)
            at += 4
            count = 1
            if kind == _ARRAY:
                kind, count = struct.unpack_from("<IQ", data, at)
                at += 12
            if kind != _STRING:
                at += count * _SCALAR_BYTES[kind]
                continue
            for i in range(count):
                text, at = _string(data, at)
                yield key, i, text


def _string(data: mmap.mmap, at: int) -> tuple[bytes, int]:
    (length,) = struct.unpack_from("<Q", data, at)
    begin, end = at + 8, at + 8 + length
    if end > len(data):
        raise ValueError("text reaches beyond the file")
    return data[begin:end], end
