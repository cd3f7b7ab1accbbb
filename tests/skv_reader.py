"""A second reader of `.skv` files, written from docs/format.md alone: it shares nothing with the library."""

from __future__ import annotations

import json
import mmap
import os
import struct
from typing import Any

import numpy as np
from xxhash import xxh3_128

TYPES = ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")


def whole(path: str | os.PathLike[str], flags: int) -> memoryview:
    """All bytes of a file, read into page-aligned memory; the state is page-aligned in it too."""
    fd, done = os.open(path, os.O_RDONLY | flags), 0
    try:
        n_bytes = os.fstat(fd).st_size
        assert n_bytes >= 4096
        assert n_bytes % 4096 == 0
        data = memoryview(mmap.mmap(-1, n_bytes))
        while done < n_bytes:
            got = os.preadv(fd, [data[done:]], done)
            assert got, f"the file ends at {done}"
            done += got
    finally:
        os.close(fd)
    return data


def read(path: str | os.PathLike[str], flags: int = 0) -> tuple[Any, dict[str, Any], memoryview]:
    """Meta, arrays and state; AssertionError for what is not right. `flags`: `os.O_DIRECT`."""
    data = whole(path, flags)
    magic, version, zero, n_header, n_file, n = struct.unpack_from("<8sIIQQQ", data)
    assert magic == bytes.fromhex("89 53 4b 56 0d 0a 1a 0a")
    assert (version, zero, n_file) == (1, 0, len(data))
    assert 2 <= n <= 65535
    assert n_header == 56 + 72 * n <= n_file
    assert data[n_header - 16 : n_header] == xxh3_128(data[: n_header - 16]).digest()
    sections: dict[str, memoryview] = {}
    types: dict[str, str] = {}
    end = n_header
    for i, (name, kind, offset, length, checksum) in enumerate(struct.iter_unpack("<32s8sQQ16s", data[40:][: 72 * n])):
        step = 64 if i < n - 1 else 4096
        assert offset == -(-end // step) * step
        assert not any(data[end:offset])
        end = offset + length
        assert xxh3_128(data[offset:end]).digest() == checksum
        text = name.rstrip(b"\0").decode("ascii")
        sections[text], types[text] = data[offset:end], kind.rstrip(b"\0").decode("ascii")
    assert n_file == -(-end // 4096) * 4096
    assert not any(data[end:])
    names = list(sections)
    assert (len(names), names[0], types["meta"], names[-1], types["state"]) == (n, "meta", "json", "state", "u1")
    assert all(types[name] in TYPES for name in names[1:])
    arrays = {name: np.frombuffer(sections[name], f"<{types[name]}") for name in names[1:-1]}
    return json.loads(bytes(sections["meta"])), arrays, sections["state"]
