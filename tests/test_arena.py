"""The arena: leases of one slab, who keeps what alive, and memory that is there before it is needed."""

from __future__ import annotations

import gc
import resource
import textwrap
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from helpers import RECURRENT, Models, new_context, run_ok, text_tokens
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmkv_ll import Arena, Lease, runtime
from swarmkv_ll.arena import ALIGNMENT, available_memory
from swarmkv_ll.errors import (
    ArenaExhaustedError,
    ClosedError,
    HostMemoryError,
    IntegrityError,
    InvalidArgumentError,
    LiveViewsError,
)
from swarmkv_ll.ffi import C, ffi

MiB = 1 << 20


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena(8 * ALIGNMENT) as arena:
        yield arena
        arena.check_integrity()
        assert arena.stats().n_leases == 0


# ── leases ───────────────────────────────────────────────────────────────────────────────────────────


def test_a_lease_is_the_bytes_asked_for_and_no_others(arena: Arena) -> None:
    first, second = arena.lease(5000), arena.lease(1)
    assert (first.n_bytes, first.capacity, first.offset) == (5000, 8192, 0)
    assert (second.n_bytes, second.capacity, second.offset) == (1, 4096, 8192)
    assert first.array.shape == (5000,)
    assert first.array.dtype == np.uint8
    assert first.array.ctypes.data % ALIGNMENT == 0
    first.array[:] = 1
    second.array[:] = 2
    assert first.array.sum() == 5000
    assert first.array is not second.array
    assert np.shares_memory(first.array, first.array)
    assert "5,000 bytes" in repr(first)
    first.release()
    second.release()


def test_stats_add_up(arena: Arena) -> None:
    with arena.lease(5000) as lease, arena.lease(100):
        view = lease.array
        stats = arena.stats()
        assert (stats.n_bytes, stats.used, stats.free) == (32768, 12288, 20480)
        assert (stats.largest_free, stats.n_leases, stats.n_viewed) == (20480, 2, 1)
        del view
    assert arena.stats().used == 0


def test_size_is_rounded_up() -> None:
    with Arena(1) as arena:
        assert arena.n_bytes == ALIGNMENT
        arena.lease(ALIGNMENT).release()


@pytest.mark.parametrize("n_bytes", [0, -1])
def test_sizes_below_one_are_refused(arena: Arena, n_bytes: int) -> None:
    for make in (Arena, arena.lease):
        with pytest.raises(InvalidArgumentError):
            make(n_bytes)
    for make in (Arena, arena.lease):
        with pytest.raises(TypeError):
            make(1.5)  # type: ignore[arg-type]


def test_exhausted_with_exact_numbers_and_nothing_lost(arena: Arena) -> None:
    leases = [arena.lease(ALIGNMENT) for _ in range(8)]
    with pytest.raises(ArenaExhaustedError) as caught:
        arena.lease(1)
    assert (caught.value.requested, caught.value.available, caught.value.largest_free) == (4096, 0, 0)
    for i in (1, 2, 5):
        leases[i].release()
    before = arena.stats()
    with pytest.raises(ArenaExhaustedError) as caught:
        arena.lease(2 * ALIGNMENT + 1)
    assert (caught.value.requested, caught.value.available, caught.value.largest_free) == (12288, 12288, 8192)
    assert "12,288 bytes requested, 12,288 free, largest free block 8,192" in str(caught.value)
    assert isinstance(caught.value, MemoryError)
    assert arena.stats() == before
    arena.lease(2 * ALIGNMENT).release()
    for i in (0, 3, 4, 6, 7):
        leases[i].release()


def test_the_smallest_block_that_fits_is_taken(arena: Arena) -> None:
    leases = [arena.lease(ALIGNMENT) for _ in range(6)]
    for i in (0, 1, 3):  # free: two pages, one page, and two behind
        leases[i].release()
    one = arena.lease(1)
    assert one.offset == 3 * ALIGNMENT
    for lease in (one, leases[2], leases[4], leases[5]):
        lease.release()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)])
def test_free_neighbours_merge(arena: Arena, order: tuple[int, ...]) -> None:
    leases = [arena.lease(2 * ALIGNMENT) for _ in range(3)]
    for i in order:
        leases[i].release()
        arena.check_integrity()
    arena.lease(arena.n_bytes).release()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40), st.integers(1, 5 * ALIGNMENT)), max_size=60))
def test_any_sequence_of_leases_and_releases(steps: list[tuple[bool, int, int]]) -> None:
    """Against a model: a page is either free or belongs to one lease, whose bytes nobody else writes."""
    with Arena(16 * ALIGNMENT, huge_pages=False, pin=False) as arena:
        held: list[tuple[Lease, int]] = []
        pages = np.zeros(16, int)
        for number, (take, which, n_bytes) in enumerate(steps, start=1):
            if take:
                n_pages = -(-n_bytes // ALIGNMENT)
                free_runs = "".join(" " if page else "." for page in pages).split()
                longest = max(map(len, free_runs), default=0)
                if n_pages > longest:
                    with pytest.raises(ArenaExhaustedError) as caught:
                        arena.lease(n_bytes)
                    assert caught.value.available == ALIGNMENT * int((pages == 0).sum())
                    assert caught.value.largest_free == ALIGNMENT * longest
                else:
                    lease = arena.lease(n_bytes)
                    lease.array[:] = number
                    at = slice(lease.offset // ALIGNMENT, (lease.offset + lease.capacity) // ALIGNMENT)
                    assert at.stop - at.start == n_pages
                    assert not pages[at].any()
                    pages[at] = number
                    held.append((lease, number))
            elif held:
                lease, owner = held.pop(which % len(held))
                assert (lease.array == owner).all()
                lease.release()
                pages[pages == owner] = 0
            arena.check_integrity()
        while held:
            held.pop()[0].release()
        assert arena.stats().largest_free == arena.n_bytes


def test_the_integrity_check_can_fail(arena: Arena) -> None:
    first, second = arena.lease(ALIGNMENT), arena.lease(ALIGNMENT)
    good = second.offset, second.capacity
    for broken in ((0, ALIGNMENT), (ALIGNMENT, 0), (ALIGNMENT + 1, ALIGNMENT), (ALIGNMENT, arena.n_bytes)):
        second.offset, second.capacity = broken
        with pytest.raises(IntegrityError):
            arena.check_integrity()
    second.offset, second.capacity = good
    arena.check_integrity()
    first.release()
    second.release()


def test_threads_leasing_at_once_get_different_bytes() -> None:
    with Arena(64 * ALIGNMENT) as arena:
        failures = []

        def work(number: int) -> None:
            rng = np.random.default_rng(number)
            for _ in range(200):
                with arena.lease(int(rng.integers(1, 6 * ALIGNMENT))) as lease:
                    lease.array[:] = number
                    if (lease.array != number).any():
                        failures.append(number)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        arena.check_integrity()
        assert arena.stats().largest_free == arena.n_bytes


# ── lifetimes ────────────────────────────────────────────────────────────────────────────────────────


def test_released_once_and_unusable_afterwards(arena: Arena) -> None:
    lease = arena.lease(10)
    lease.release()
    assert lease.released
    uses: list[Callable[[], Any]] = [
        lease.release,
        lambda: lease.array,
        lambda: lease.ggml_buffer,
        lambda: np.from_dlpack(lease),
    ]
    for use in uses:
        with pytest.raises(ClosedError, match="lease"):
            use()


def test_leaving_a_with_block_releases_at_most_once(arena: Arena) -> None:
    with arena.lease(10) as lease:
        lease.release()
    assert lease.released


def test_a_view_stops_the_release(arena: Arena) -> None:
    lease = arena.lease(100)
    view = lease.array[10:20].reshape(2, 5).T
    assert lease.viewed
    with pytest.raises(LiveViewsError) as caught:
        lease.release()
    assert (caught.value.n_views, caught.value.n_leases) == (1, 0)
    assert isinstance(caught.value, BufferError)
    view[0, 0] = 7
    assert lease.array[10] == 7
    assert not lease.released
    del view
    assert not lease.viewed
    lease.release()


def test_close_with_leases_or_views_says_how_many() -> None:
    arena = Arena(8 * ALIGNMENT)
    leases = [arena.lease(1) for _ in range(3)]
    view = leases[0].array
    with pytest.raises(LiveViewsError, match=r"3 lease\(s\) of it are held.* numpy views of it are alive") as caught:
        arena.close()
    assert (caught.value.n_views, caught.value.n_leases) == (1, 3)
    view[0] = 9
    assert leases[0].array[0] == 9
    assert not arena.closed
    arena.lease(1).release()
    del view
    for lease in leases:
        lease.release()
    arena.close()
    arena.close()
    assert arena.closed
    assert "closed" in repr(arena)


def test_use_after_close() -> None:
    arena = Arena(ALIGNMENT)
    arena.close()
    uses: list[Callable[[], Any]] = [lambda: arena.lease(1), arena.stats, arena.check_integrity]
    for use in uses:
        with pytest.raises(ClosedError, match="arena"):
            use()


def test_a_dropped_lease_warns_and_its_bytes_come_back(arena: Arena) -> None:
    held = [arena.lease(arena.n_bytes)]
    with pytest.warns(ResourceWarning, match=r"a lease of 32,768 bytes was dropped without release\(\)"):
        held.clear()
    arena.check_integrity()
    arena.lease(arena.n_bytes).release()


def test_a_view_keeps_the_lease_and_the_arena_alive() -> None:
    arena = Arena(ALIGNMENT)
    view = arena.lease(100).array[3:]
    slab = arena._slab
    del arena
    gc.collect()
    view[:] = 5
    assert view.sum() == 5 * 97
    assert slab.alive
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        del view
        gc.collect()
    assert not slab.alive


def test_an_arena_that_is_dropped_gives_its_memory_back() -> None:
    arena = Arena(ALIGNMENT)
    slab = arena._slab
    del arena
    gc.collect()
    assert not slab.alive


# ── other libraries ──────────────────────────────────────────────────────────────────────────────────


def test_numpy_takes_a_lease_as_an_array(arena: Arena) -> None:
    with arena.lease(100) as lease:
        lease.array[:] = 3
        assert np.shares_memory(np.asarray(lease), lease.array)
        copy, wider = np.array(lease), np.asarray(lease, np.int64)
        assert not np.shares_memory(copy, lease.array)
        assert copy.sum() == wider.sum() == 300
        assert wider.dtype == np.int64


def test_dlpack_shares_the_bytes_and_counts_as_a_view(arena: Arena) -> None:
    lease = arena.lease(100)
    assert lease.__dlpack_device__() == (1, 0)  # kDLCPU
    array = np.from_dlpack(lease)
    assert array.ctypes.data == lease.array.ctypes.data
    lease.array[:] = 3
    assert array.sum() == 300
    with pytest.raises(LiveViewsError):
        lease.release()
    part = array[2:4]
    del array
    gc.collect()
    assert lease.viewed
    del part
    gc.collect()
    lease.release()


def test_dlpack_alone_keeps_the_lease(arena: Arena) -> None:
    array = np.from_dlpack(arena.lease(100))
    gc.collect()
    assert arena.stats().n_leases == 1
    array[:] = 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        del array
        gc.collect()
    assert arena.stats().n_leases == 0


def test_ggml_buffer_is_the_same_memory(arena: Arena) -> None:
    with arena.lease(5000) as lease:
        buffer = lease.ggml_buffer
        assert int(ffi.cast("uintptr_t", C.ggml_backend_buffer_get_base(buffer))) == lease.array.ctypes.data
        assert C.ggml_backend_buffer_get_size(buffer) == 5000
        assert C.ggml_backend_buffer_is_host(buffer)
        assert lease.ggml_buffer is buffer


# ── memory ───────────────────────────────────────────────────────────────────────────────────────────


def page_faults(action: Callable[[], Any]) -> int:
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    action()
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def fill(arena: Arena) -> None:
    with arena.lease(arena.n_bytes) as lease:
        lease.array.fill(1)


@pytest.mark.parametrize("huge_pages", [True, False])
def test_no_page_faults_after_the_arena_is_made(huge_pages: bool) -> None:
    n_pages = 32 * MiB // resource.getpagesize()
    with Arena(32 * MiB, huge_pages=huge_pages, pin=False) as arena:
        assert page_faults(lambda: fill(arena)) < n_pages / 100
        assert page_faults(lambda: fill(arena)) < n_pages / 100


FIRST_WRITE = """
import resource
from swarmkv_ll import Arena


def page_faults(arena: Arena) -> int:
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    with arena.lease(arena.n_bytes) as lease:
        lease.array.fill(1)
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


with Arena(64 << 20, prefault=False, huge_pages=False, pin=False) as arena:
    print(page_faults(arena), page_faults(arena))
"""


def test_without_prefault_the_first_write_faults_and_reuse_does_not() -> None:
    # In a process of its own: where others ran before, malloc may give memory that it had already, and none faults.
    first, second = map(int, run_ok(FIRST_WRITE).split())
    n_pages = 64 * MiB // resource.getpagesize()
    assert first > n_pages * 0.9
    assert second < n_pages / 100


def test_says_what_it_got() -> None:
    with Arena(4 * MiB) as arena:
        assert arena.pinned in ("device", "mlock", None)
        assert (arena.pin_error is None) == (arena.pinned is not None)
        assert arena.stats().pinned == arena.pinned
        assert 0 <= arena.stats().huge_page_bytes <= arena.n_bytes
        assert arena.buffer_type
        assert f"pinned={arena.pinned!r}" in repr(arena)
    with Arena(4 * MiB, pin=False, huge_pages=False) as arena:
        assert arena.pinned is None
        assert arena.pin_error is None
        # Huge pages may come unasked: from the kernel's setting "always", or in memory the allocator had before.
        assert arena.stats().huge_page_bytes <= arena.n_bytes


LOCKED = textwrap.dedent("""
    import ctypes, os, resource, sys
    if sys.argv[1] == "first":  # take the right to ignore the limit away, where there is one to take
        ctypes.CDLL(None).prctl(24, 14, 0, 0, 0)  # PR_CAPBSET_DROP, CAP_IPC_LOCK; in force after the exec
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (int(sys.argv[2]), int(sys.argv[2])))
        os.execv(sys.executable, [sys.executable, "-c", sys.argv[3], "second", "", ""])
    from swarmkv_ll import Arena
    def locked():
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmLck:"))
    before = locked()
    arena = Arena(4 << 20, device="CPU")
    print(arena.pinned, "|", arena.pin_error, "|", locked() - before)
    lease = arena.lease(4 << 20)
    lease.array[:] = 1
    lease.release()
    arena.close()
    for _ in range(3):  # so small that the allocator keeps the pages
        Arena(64 << 10, device="CPU", huge_pages=False).close()
    print(locked() - before)
""")


def run_locked(limit: int) -> list[str]:
    return run_ok(LOCKED, "first", limit, LOCKED).splitlines()


def test_locks_its_pages_as_far_as_the_limit_allows() -> None:
    try:
        soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    except OSError as error:
        pytest.skip(f"the limit cannot be read: {error}")
    if hard != resource.RLIM_INFINITY and hard < 6 * MiB:
        pytest.skip(f"the limit of locked memory is {hard} bytes ({soft} now), too low to lock anything")
    assert run_locked(6 * MiB) == ["mlock | None | 4096", "0"]


def test_goes_without_locked_pages_below_the_limit() -> None:
    assert run_locked(64 << 10) == ["None | mlock: Cannot allocate memory | 0", "0"]


def test_more_than_the_machine_has_is_refused() -> None:
    with pytest.raises(HostMemoryError) as caught:
        Arena(1 << 50)
    assert caught.value.required == 1 << 50
    assert 0 < caught.value.available < 1 << 50
    assert isinstance(caught.value, MemoryError)
    assert available_memory() > 0


def test_what_the_allocator_refuses_is_said_too() -> None:
    """The machine would have it, this process may not."""
    printed = run_ok(
        """
        import resource
        from swarmkv_ll import Arena
        from swarmkv_ll.errors import HostMemoryError
        Arena(4096).close()
        limit = 2 << 30
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        import swarmkv_ll.arena
        swarmkv_ll.arena.available_memory = lambda: 1 << 40
        try:
            Arena(4 << 30)
        except HostMemoryError as error:
            print(error.required >= 4 << 30)
        Arena(4096).close()
        """
    )
    assert printed == "True"


def test_an_unknown_device_is_named_with_the_known_ones() -> None:
    with pytest.raises(InvalidArgumentError, match=r"no device named 'GPU9'; there are .*CPU"):
        Arena(ALIGNMENT, device="GPU9")
    for device in runtime.devices():
        with Arena(ALIGNMENT, device=device.name) as arena:
            assert arena.lease(1).release() is None  # type: ignore[func-returns-value]


def test_for_branches_has_room_for_the_snapshot_and_its_forks(models: Models) -> None:
    for kind in ("llama", "gemma2", RECURRENT, "jamba"):
        with new_context(models[kind], n_seq_max=2) as ctx:
            ctx.decode(text_tokens(100), seq=1)
            with Arena.for_branches(ctx, 3, seq=1, pin=False) as arena:
                with ctx.snapshot(arena, 1) as snapshot, snapshot.fork(), snapshot.fork(), snapshot.fork():
                    assert arena.stats().free < snapshot.n_bytes
                    with pytest.raises(ArenaExhaustedError):
                        snapshot.fork()
                assert arena.pinned is None
            with Arena.for_branches(ctx, 0, seq=1) as arena, ctx.snapshot(arena, 1) as snapshot, snapshot.share():
                assert arena.stats().free == 0
            with pytest.raises(InvalidArgumentError):
                Arena.for_branches(ctx, -1)
