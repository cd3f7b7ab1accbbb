"""Host memory for snapshots: one slab, page-locked where it can be, leased out in pieces that numpy sees.

The arena owns the memory. A :class:`Lease` is a piece of it; `lease.array` is a view, never a copy. Memory is faulted
in once, when the arena is made, so that no export or fork pays for it later (a first fork into cold memory costs
about six times a warm one).
"""

from __future__ import annotations

import contextlib
import operator
import os
import warnings
import weakref
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from . import runtime
from .errors import (
    ArenaExhaustedError,
    ClosedError,
    HostMemoryError,
    IntegrityError,
    InvalidArgumentError,
    LiveViewsError,
)
from .exclusive import alone, new_lock
from .ffi import C, ffi
from .skv import peek

ALIGNMENT = 4096
"""Leases begin at multiples of this (bytes), and their size is rounded up to it: pages, O_DIRECT, ggml buffers."""

_HUGE_PAGE = 2 << 20


class HasState(Protocol):
    """What `Arena.for_branches` asks of a context."""

    def state_size(self, seq: int = 0) -> int:
        """Bytes the engine needs to export sequence `seq`."""

    def position(self, seq: int = 0) -> int:
        """Its next position; 0 if it is empty."""


@dataclass(frozen=True)
class ArenaStats:
    """What an arena holds at one moment. All sizes in bytes.

    Attributes
    ----------
    n_bytes, used, free, largest_free : int
        Size of the slab, leased, free in all, and in the largest free block.
    n_leases, n_viewed : int
        Leases held, and how many of them have live numpy views.
    pinned : {"device", "mlock", None}
        As of `Arena`.
    huge_page_bytes : int
        How much of the slab the kernel backs with huge pages (at most: it counts whole mappings).
    buffer_type : str
        The engine's name of the buffer type.
    """

    n_bytes: int
    used: int
    free: int
    largest_free: int
    n_leases: int
    n_viewed: int
    pinned: str | None
    huge_page_bytes: int
    buffer_type: str


class Arena:
    """A slab of host memory that leases are cut from.

    Parameters
    ----------
    n_bytes : int
        Usable size, rounded up to 4096.
    device : str, optional
        Engine device whose memory to use, by name (`swarmkv doctor` lists them). By default the first GPU, in its
        host buffer type (page-locked by its driver), else ``"CPU"``.
    prefault : bool
        Touch every page now, so that nothing written later has to wait for a page fault.
    huge_pages : bool
        Ask the kernel for 2 MiB pages; `stats().huge_page_bytes` tells what it gave.
    pin : bool
        Lock the pages in memory. With a GPU by its driver, else, or where the driver has no more to give, with `mlock`
        as far as the limit (`ulimit -l`) allows. `pinned` tells what was obtained; not getting it is no error.

    Attributes
    ----------
    n_bytes : int
    pinned : {"device", "mlock", None}
        How the pages are locked. "device": by the GPU's driver, so that it copies straight from and to them; with
        "mlock" they only stay in memory.
    buffer_type : str
        The engine's name of the memory's kind.
    pin_error : str or None
        Why they are not, when asked for.

    Raises
    ------
    HostMemoryError
        The machine has less memory available than asked for; nothing was taken.
    InvalidArgumentError
        `n_bytes` below 1, or no such device.
    """

    def __init__(
        self,
        n_bytes: int,
        *,
        device: str | None = None,
        prefault: bool = True,
        huge_pages: bool = True,
        pin: bool = True,
    ) -> None:
        runtime.start()
        self.n_bytes = lease_size(_positive(n_bytes, "n_bytes"))
        available = available_memory()
        if self.n_bytes > available:
            raise HostMemoryError(self.n_bytes, available)

        slack = _HUGE_PAGE if huge_pages else ALIGNMENT
        buffer, driver_locked = _allocate(self.n_bytes + slack, device, pin)
        if buffer == ffi.NULL:
            raise HostMemoryError(self.n_bytes + slack, available)
        # Owned from here on: whatever goes wrong or is interrupted below gives the memory back.
        locked: list[Any] = []
        self._slab = weakref.finalize(self, _free_slab, buffer, self.n_bytes, locked)
        self._slab.atexit = False
        self.buffer_type = ffi.string(C.ggml_backend_buft_name(C.ggml_backend_buffer_get_type(buffer))).decode()
        self._address = _round_up(int(ffi.cast("uintptr_t", C.ggml_backend_buffer_get_base(buffer))), slack)
        pointer = ffi.cast("void *", self._address)
        if huge_pages and not driver_locked:
            C.skv_advise_huge(pointer, self.n_bytes)
        if prefault and not driver_locked and (error := C.skv_prefault(pointer, self.n_bytes)):
            self._slab()
            raise HostMemoryError(self.n_bytes, available) from OSError(error, os.strerror(error))
        self.pinned: Literal["device", "mlock"] | None = "device" if driver_locked else None
        self.pin_error: str | None = None
        if pin and not driver_locked:
            if error := C.skv_lock(pointer, self.n_bytes):
                self.pin_error = f"mlock: {os.strerror(error)}"
            else:
                self.pinned = "mlock"
                locked.append(pointer)
        # What is free is what no living lease covers: one account, that an interrupt or a lost lease cannot split.
        self._leases: weakref.WeakSet[Lease] = weakref.WeakSet()
        self._lock = new_lock()

    @classmethod
    def for_branches(cls, ctx: HasState, n_branches: int, *, seq: int = 0, **options: Any) -> Arena:
        """An arena with room for a snapshot of sequence `seq` of `ctx` as it is now, and for `n_branches` forks.

        The size comes from the engine (`llama_state_seq_get_size`), not from a formula. `options` as for `Arena`.
        """
        n_snapshots = _positive(1 + operator.index(n_branches), "1 + n_branches")
        if not ctx.position(seq):
            raise InvalidArgumentError(f"sequence {seq} is empty: there is no state to size an arena by")
        return cls(n_snapshots * lease_size(ctx.state_size(seq)), **options)

    @classmethod
    def for_file(cls, path: str | os.PathLike[str], n_branches: int = 0, **options: Any) -> Arena:
        """An arena with room for what a `.skv` file holds, and for `n_branches` forks of it. `options` as for `Arena`."""
        n_snapshots = _positive(1 + operator.index(n_branches), "1 + n_branches")
        return cls(n_snapshots * lease_size(peek(path).state_bytes), **options)

    def lease(self, n_bytes: int) -> Lease:
        """Take a piece of at least `n_bytes`; its bytes are whatever was there before.

        Raises
        ------
        ArenaExhaustedError
            No free block is large enough; nothing was taken.
        """
        n_bytes = _positive(n_bytes, "n_bytes")
        size = lease_size(n_bytes)
        with alone(self._lock, "arena"):
            self._check_open()
            gaps = self._gaps()
            fitting = [gap for gap in gaps if gap[1] >= size]
            if not fitting:
                sizes = [free for _, free in gaps]
                raise ArenaExhaustedError(size, sum(sizes), max(sizes, default=0))
            offset, _ = min(fitting, key=operator.itemgetter(1))
            lease = Lease(self, offset, n_bytes, size)
            self._leases.add(lease)
            return lease

    def _blocks(self) -> list[tuple[int, int]]:
        """(offset, size) of each lease, in order."""
        return sorted((lease.offset, lease.capacity) for lease in self._held())

    def _held(self) -> list[Lease]:
        return [lease for lease in self._leases if not lease.released]

    def _gaps(self) -> list[tuple[int, int]]:
        """(offset, size) of each free block, in order."""
        gaps, at = [], 0
        for offset, size in self._blocks():
            if offset > at:
                gaps.append((at, offset - at))
            at = offset + size
        if at < self.n_bytes:
            gaps.append((at, self.n_bytes - at))
        return gaps

    def stats(self) -> ArenaStats:
        """Sizes and counts at this moment."""
        with alone(self._lock, "arena"):
            self._check_open()
            leases = self._held()
            sizes = [size for _, size in self._gaps()]
        return ArenaStats(
            n_bytes=self.n_bytes,
            used=self.n_bytes - sum(sizes),
            free=sum(sizes),
            largest_free=max(sizes, default=0),
            n_leases=len(leases),
            n_viewed=sum(lease.viewed for lease in leases),
            pinned=self.pinned,
            huge_page_bytes=_huge_page_bytes(self._address, self.n_bytes),
            buffer_type=self.buffer_type,
        )

    def check_integrity(self) -> None:
        """Check that the leases lie in the slab, at their alignment, and that no two overlap.

        Raises
        ------
        IntegrityError
            They do not.
        """
        with alone(self._lock, "arena"):
            self._check_open()
            blocks = self._blocks()
        end = 0
        for offset, size in blocks:
            if offset < end or size <= 0 or offset % ALIGNMENT or size % ALIGNMENT or offset + size > self.n_bytes:
                raise IntegrityError(f"arena: a lease of {size} bytes at {offset}, the one before ends at {end}")
            end = offset + size

    def close(self) -> None:
        """Give the memory back. Does nothing the second time.

        Raises
        ------
        LiveViewsError
            Leases are held, or views of them alive; the arena stays open.
        """
        with alone(self._lock, "arena"):
            if not self._slab.alive:
                return
            leases = self._held()
            if leases:
                raise LiveViewsError("arena", sum(lease.viewed for lease in leases), len(leases))
            self._slab()

    @property
    def closed(self) -> bool:
        """Whether `close` has given the memory back."""
        return not self._slab.alive

    def _check_open(self) -> None:
        if not self._slab.alive:
            raise ClosedError("arena")

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        # An exception on its way out keeps views alive in its frames; it says more than the refusal to close would.
        with contextlib.suppress(*([LiveViewsError] if kind else [])):
            self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"pinned={self.pinned!r}"
        return f"<Arena {self.n_bytes:,} bytes in {self.buffer_type}, {state}>"


class Lease:
    """A piece of an arena. Made by `Arena.lease`; keeps its arena alive.

    Attributes
    ----------
    arena : Arena
    offset, n_bytes, capacity : int
        Where it begins in the slab, the size asked for, and the size taken (a multiple of 4096).
    """

    def __init__(self, arena: Arena, offset: int, n_bytes: int, capacity: int) -> None:
        self.arena, self.offset, self.n_bytes, self.capacity = arena, offset, n_bytes, capacity
        self._owner: str | None = None  # who alone may give it back
        self._root: weakref.ref[npt.NDArray[np.uint8]] | None = None
        self._buffer: Any = None
        self._unreleased = weakref.finalize(self, _warn_of_lost_lease, capacity)
        self._unreleased.atexit = False

    @property
    def _ptr(self) -> Any:
        self._check_held()
        return ffi.cast("uint8_t *", self.arena._address + self.offset)

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """The bytes as a writable uint8 array of shape (n_bytes,): a view, not a copy.

        The view keeps the lease alive. It must be dropped before `release`, which refuses otherwise.
        """
        self._check_held()
        root = self._root() if self._root else None
        if root is None:
            root = np.asarray(_ArrayInterface(self))
            self._root = weakref.ref(root)
        return root[:]

    @property
    def ggml_buffer(self) -> Any:
        """The same bytes as a `ggml_backend_buffer_t` of the CPU device (cffi pointer). Valid until `release`."""
        if self._buffer is None:
            cpu = C.ggml_backend_dev_by_type(C.GGML_BACKEND_DEVICE_TYPE_CPU)
            buffer = C.ggml_backend_dev_buffer_from_host_ptr(cpu, self._ptr, self.n_bytes, self.n_bytes)
            self._buffer = ffi.gc(buffer, C.ggml_backend_buffer_free)
        self._check_held()
        return self._buffer

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """What numpy makes of a lease: `array`, copied only if it has to be."""
        return self.array.copy() if copy else self.array if dtype is None else self.array.astype(dtype, copy=False)

    def __dlpack__(self, **options: Any) -> Any:
        """Export to another array library without a copy; counts as a live view for as long as it is held there."""
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()

    @property
    def viewed(self) -> bool:
        """Whether a numpy view of these bytes (or a slice, or a DLPack export of one) is alive."""
        # numpy makes every slice refer to the first array over a buffer, so that one's life is all slices' life.
        return self._root is not None and self._root() is not None

    @property
    def released(self) -> bool:
        """Whether the bytes have gone back to the arena."""
        return not self._unreleased.alive

    def release(self) -> None:
        """Give the bytes back to the arena.

        Raises
        ------
        ClosedError
            Released before.
        LiveViewsError
            A view is alive; the lease stays as it is.
        InvalidArgumentError
            It belongs to a snapshot, which gives it back when released itself.
        """
        if self._owner:
            self._check_held()
            raise InvalidArgumentError(f"this lease belongs to a {self._owner}: release that instead")
        self._give_back()

    def _give_back(self) -> None:
        with alone(self.arena._lock, "arena"):
            self._check_held()
            if self.viewed:
                raise LiveViewsError(self._owner or "lease", 1)
            if self._buffer is not None:
                ffi.release(self._buffer)
            self._unreleased.detach()
            self.arena._leases.discard(self)

    def _check_held(self) -> None:
        if not self._unreleased.alive:
            raise ClosedError("lease")

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        with contextlib.suppress(*([LiveViewsError] if kind else [])):  # as in Arena
            if not self.released:
                self.release()

    def __repr__(self) -> str:
        return f"<Lease {self.n_bytes:,} bytes at {self.offset:,}{', released' if self.released else ''}>"


class _ArrayInterface:
    """Base object of a lease's arrays: what numpy keeps alive, and with it the lease."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        address = lease.arena._address + lease.offset
        self.__array_interface__ = {"shape": (lease.n_bytes,), "typestr": "|u1", "data": (address, False), "version": 3}


def lease_size(n_bytes: int) -> int:
    """Bytes of an arena that a lease of `n_bytes` takes."""
    return _round_up(n_bytes, ALIGNMENT)


def available_memory() -> int:
    """Bytes this process may still take without swapping, by the kernel's own estimate and the cgroup's limit."""
    with open("/proc/meminfo", encoding="ascii") as meminfo:
        free = next(int(line.split()[1]) * 1024 for line in meminfo if line.startswith("MemAvailable:"))
    for limit, usage in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            with open(limit, encoding="ascii") as maximum, open(usage, encoding="ascii") as current:
                free = min(free, int(maximum.read()) - int(current.read()))
        except (OSError, ValueError):  # no such cgroup, or "max"
            continue
    return max(free, 0)


def _allocate(n_bytes: int, device: str | None, pin: bool) -> tuple[Any, bool]:
    """A buffer of the engine's, or NULL, and whether a driver has page-locked it."""
    if device is None:
        chosen = runtime.gpu_device() if pin else None
    else:
        known = isinstance(device, str) and device.isprintable()
        chosen = C.ggml_backend_dev_by_name(device.encode()) if known else ffi.NULL
        if chosen == ffi.NULL:
            names = ", ".join(found.name for found in runtime.devices())
            raise InvalidArgumentError(f"no device named {device!r}; there are {names}")
    if chosen is not None and pin:
        host = C.ggml_backend_dev_host_buffer_type(chosen)
        if host != ffi.NULL:
            with runtime.engine_log():
                buffer = C.ggml_backend_buft_alloc_buffer(host, n_bytes)
            if buffer != ffi.NULL:
                # CUDA's gives ordinary memory where it can lock no more, and only its type tells.
                return buffer, C.ggml_backend_buffer_get_type(buffer) == host
    cpu = C.ggml_backend_dev_by_type(C.GGML_BACKEND_DEVICE_TYPE_CPU)
    with runtime.engine_log():
        return C.ggml_backend_buft_alloc_buffer(C.ggml_backend_dev_buffer_type(cpu), n_bytes), False


def _free_slab(buffer: Any, n_bytes: int, locked: list[Any]) -> None:
    for pointer in locked:  # the allocator may keep the pages, and would keep them locked
        C.skv_unlock(pointer, n_bytes)
    C.ggml_backend_buffer_free(buffer)


def _warn_of_lost_lease(capacity: int) -> None:
    warnings.warn(f"a lease of {capacity:,} bytes was dropped without release()", ResourceWarning, stacklevel=2)


def _huge_page_bytes(address: int, n_bytes: int) -> int:
    """Bytes of a range in huge pages. The kernel tells it by mapping, so a larger mapping's count is capped."""
    total, overlap = 0, 0
    with open("/proc/self/smaps", encoding="utf-8", errors="replace") as smaps:
        for line in smaps:
            head = line.split(maxsplit=1)[0]
            if not head.endswith(":"):
                begin, end = (int(part, 16) for part in head.split("-"))
                overlap = max(0, min(end, address + n_bytes) - max(begin, address))
            elif overlap and head == "AnonHugePages:":
                total += min(overlap, int(line.split()[1]) * 1024)
    return total


def _positive(value: int, name: str) -> int:
    number = operator.index(value)
    if number < 1:
        raise InvalidArgumentError(f"{name} should be at least 1, is {number}")
    return number


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
