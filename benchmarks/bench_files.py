"""Snapshots in files: saved and loaded; each beside the system calls that move as many bytes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from swarmkv_ll import Arena, Lease, Snapshot
from swarmkv_ll.measure import Times

InTurns = Callable[..., Times]


@pytest.fixture
def memory(snapshot: Snapshot) -> Iterator[Lease]:
    """Faulted-in memory to read into, or write from, with the state's bytes in it."""
    with Arena(snapshot.n_bytes) as arena, arena.lease(snapshot.n_bytes) as lease:
        lease.array[:] = snapshot.array
        yield lease


@pytest.mark.benchmark(group="files")
def bench_load(in_turns: InTurns, ratio: Any, snapshot: Snapshot, memory: Lease, tmp_path: Path) -> None:
    """From the page cache into a lease, checksums verified, beside one `preadv` of as many bytes."""
    path, n_bytes = tmp_path / "document.skv", snapshot.n_bytes
    snapshot.save(path)
    with open(path, "rb") as file, Arena(n_bytes) as arena:

        def preadv() -> None:
            at = 0
            while at < n_bytes:
                at += os.preadv(file.fileno(), [memory.array[at:]], 4096 + at)

        times = in_turns(
            lambda: Snapshot.load(path, arena), preadv, beside="preadv of as many bytes", rounds=25, n_bytes=n_bytes
        )
    ratio("load, verified, as a share of preadv", times.ratio("yardstick", "step"), 0.5)


@pytest.mark.benchmark(group="files")
def bench_save(in_turns: InTurns, ratio: Any, snapshot: Snapshot, memory: Lease, tmp_path: Path) -> None:
    """Onto the disk, beside writing and flushing as many bytes."""

    def plain() -> None:
        with open(tmp_path / "plain", "wb", buffering=0) as file, memory.array.data as view:
            file.write(view)
            os.fsync(file.fileno())

    times = in_turns(
        lambda: snapshot.save(tmp_path / "document.skv"),
        plain,
        beside="write and fsync of as many bytes",
        rounds=7,
        n_bytes=snapshot.n_bytes,
    )
    ratio("save, as a share of write and fsync", times.ratio("yardstick", "step"), 0.5)
