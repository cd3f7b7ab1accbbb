"""Who goes into a batch: everybody where there is room, equal shares where there is not, and nobody waits for ever."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmkv_ll.errors import InvalidArgumentError
from swarmkv_ll.policy import TILE, FairShare, Kind

ROOM = 512


@dataclass(eq=False)
class Want:
    """One sequence's work."""

    kind: Kind
    n_tokens: int = 1
    priority: float = 1.0
    name: str = "some"
    had: int = 0


def branches(n: int) -> list[Want]:
    return [Want("decode", name=f"branch {i}") for i in range(n)]


def step(policy: FairShare, work: list[Want], room: int = ROOM) -> list[int]:
    """One batch: what was granted is computed. A document or prompt that is complete leaves the list."""
    grants = list(policy.choose(work, room))
    assert len(grants) == len(work)
    assert all(0 <= n <= w.n_tokens for n, w in zip(grants, work, strict=True))
    assert 1 <= sum(grants) <= room
    for n, w in zip(grants, work, strict=True):
        w.had += n
        if w.kind != "decode":
            w.n_tokens -= n
    work[:] = [w for w in work if w.n_tokens]
    return grants


# ── running branches ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("n", "room"), [(1, 1), (8, 8), (64, 512), (512, 512)])
def test_where_there_is_room_every_running_branch_is_in_every_batch(n: int, room: int) -> None:
    policy, work = FairShare(), branches(n)
    for _ in range(10):
        assert step(policy, work, room) == [1] * n


@pytest.mark.parametrize("other", [Want("prompt", 5), Want("prefill", 5), Want("prompt", 28), Want("prefill", 28)])
def test_a_little_prompt_takes_no_room_that_it_has_no_use_for(other: Want) -> None:
    """Half of the batch was kept for it, and half of the branches had to wait."""
    work = [*branches(100), Want(other.kind, other.n_tokens)]
    assert step(FairShare(), work, 128) == [1] * 100 + [other.n_tokens]
    work = [*branches(100), Want("prefill", 5000)]
    assert step(FairShare(chunk=10), work, 128) == [1] * 100 + [10]
    work = [*branches(100), Want("prefill", 5000)]
    assert step(FairShare(cap=12), work, 128) == [1] * 100 + [12]


@pytest.mark.parametrize("n_at_once", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("by", ["max_branches", "room"])
def test_equal_branches_get_equal_shares(n_at_once: int, by: str) -> None:
    policy = FairShare(max_branches=n_at_once) if by == "max_branches" else FairShare()
    work = branches(8)
    batches = [step(policy, work, n_at_once if by == "room" else ROOM) for _ in range(200)]
    assert {sum(batch) for batch in batches} == {n_at_once}
    for begin in range(len(batches) - 32):
        shares = [sum(column) for column in zip(*batches[begin : begin + 32], strict=True)]
        assert max(shares) - min(shares) <= 1
        assert min(shares) < 10 or max(shares) / min(shares) <= 1.1
    longest = math.ceil(8 / n_at_once)  # batches from one token of a branch to its next
    for column in zip(*batches, strict=True):
        gaps = "".join(map(str, column)).strip("0").split("1")
        assert max(map(len, gaps)) < longest


def test_twice_the_priority_gets_twice_the_tokens() -> None:
    policy = FairShare(max_branches=3)
    work = [Want("decode", priority=2.0 if i < 3 else 1.0) for i in range(9)]
    for _ in range(300):
        step(policy, work)
    high, low = [w.had for w in work[:3]], [w.had for w in work[3:]]
    assert sum(high) + sum(low) == 900
    assert all(abs(had - 150) <= 2 for had in high)
    assert all(abs(had - 75) <= 2 for had in low)
    work = [Want("decode", priority=1000.0), Want("decode", priority=1.0)]
    policy = FairShare(max_branches=1)
    for _ in range(3000):
        step(policy, work)
    assert 2 <= work[1].had <= 4  # nobody gets nothing


def test_priority_counts_for_prompts_and_documents_too() -> None:
    policy = FairShare()
    work = [Want("prefill", 10**6, priority=2.0), Want("prefill", 10**6)]
    first, second = work
    for _ in range(300):
        step(policy, work)
    assert first.had / second.had == pytest.approx(2, rel=0.03)


@pytest.mark.parametrize("n_before", [1, 30, 1000])
def test_a_newcomer_is_neither_ahead_nor_behind(n_before: int) -> None:
    """Had it all to catch up, the others would stand still; had it to wait for its turn among theirs, it would."""
    policy, work = FairShare(max_branches=4), branches(8)
    for _ in range(n_before):
        step(policy, work)
    newcomer = Want("decode")
    work.append(newcomer)
    before = [w.had for w in work]
    for _ in range(36):
        step(policy, work)
    shares = [w.had - n for w, n in zip(work, before, strict=True)]
    assert sum(shares) == 36 * 4
    assert max(shares) - min(shares) <= 2
    assert abs(newcomer.had - 16) <= 1


def test_one_that_has_left_leaves_no_trace() -> None:
    policy, work = FairShare(max_branches=1), branches(2)
    for _ in range(100):
        step(policy, work[:1])  # alone for long
    for _ in range(100):
        step(policy, work)
    assert [w.had for w in work] == [150, 50]


# ── prompts and documents ────────────────────────────────────────────────────────────────────────────


@settings(max_examples=60, deadline=None)
@given(
    chunk=st.integers(1, 300),
    running=st.integers(0, 40),
    wants=st.lists(st.tuples(st.sampled_from(["prompt", "prefill"]), st.integers(1, 600)), min_size=1, max_size=6),
)
def test_prompts_and_documents_never_exceed_a_chunk(chunk: int, running: int, wants: list[tuple[Kind, int]]) -> None:
    """So the gap of a running branch is bounded; and what is granted is never nothing."""
    policy = FairShare(chunk)
    work = [*branches(running), *[Want(kind, n) for kind, n in wants]]
    for _ in range(sum(n for _, n in wants) + 1):
        if len(work) == running:
            break
        total, documents = sum(w.n_tokens for w in work[running:]), any(w.kind == "prefill" for w in work)
        grants = step(policy, work)
        assert grants[:running] == [1] * running
        assert 1 <= sum(grants[running:]) <= chunk
        assert documents or sum(grants[running:]) == min(total, chunk)
    assert len(work) == running


def test_the_chunk_is_128_unless_said_otherwise() -> None:
    assert step(FairShare(), [Want("prompt", 1000)]) == [128]
    assert step(FairShare(), [Want("prefill", 1280), *branches(3)]) == [128, 1, 1, 1]
    assert step(FairShare(17), [Want("prompt", 1000), *branches(3)]) == [17, 1, 1, 1]


@pytest.mark.parametrize("cap", [1, 10, 32, 63, 64, 65, 100, 127, 128, 1000])
@pytest.mark.parametrize("n_tokens", [1, 50, 100, 120, 129, 300])
@pytest.mark.parametrize("kind", ["prompt", "prefill"])
def test_a_cap_holds_for_each_and_stops_none(cap: int, n_tokens: int, kind: Kind) -> None:
    """A document whose next piece would have been smaller than a tile got nothing, for ever."""
    policy, work = FairShare(cap=cap), [Want(kind, n_tokens), *branches(2)]
    for _ in range(n_tokens):
        grants = step(policy, work)
        if len(grants) == 2:
            return
        assert 1 <= grants[0] <= cap
    assert len(work) == 2


def test_a_cap_lets_several_share_a_chunk() -> None:
    work = [Want("prompt", 500) for _ in range(6)]
    assert step(FairShare(cap=50), work) == [50, 50, 28, 0, 0, 0]
    assert step(FairShare(cap=10), work) == [10] * 6


# ── nobody waits for ever ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("n_prompt", [1, 10, 64, 65, 100, 128, 200])
@pytest.mark.parametrize("n_joining", [1, 2, 5])
@pytest.mark.parametrize("n_documents", [1, 3])
def test_with_endless_newcomers_documents_come_on(n_prompt: int, n_joining: int, n_documents: int) -> None:
    """Prompts that left less than a tile of the chunk stopped a document as long as they kept coming."""
    policy, documents = FairShare(), [Want("prefill", 10**6) for _ in range(n_documents)]
    work, n_steps, n_done = [*documents, *branches(4)], 300, 0
    for _ in range(n_steps):
        joining = sum(w.kind == "prompt" for w in work)
        n_done += n_joining - joining
        work += [Want("prompt", n_prompt) for _ in range(n_joining - joining)]
        step(policy, work)
    assert sum(document.had for document in documents) >= 64 * n_steps
    assert max(document.had for document in documents) - min(document.had for document in documents) <= 128
    assert n_done * n_prompt >= n_steps * min(45, n_joining * n_prompt / 2)


def test_a_prompt_comes_on_though_more_keep_joining() -> None:
    """As long as each that had joined counted as the least, one that had been given a part got no more."""
    policy, work, waiting = FairShare(), [Want("prompt", 100) for _ in range(5)], 0
    for _ in range(100):
        first = work[0]
        waiting = waiting + 1 if step(policy, work)[0] == 0 else 0
        assert waiting <= 5
        waiting *= first in work
        work += [Want("prompt", 100) for _ in range(5 - len(work))]


def test_a_newcomer_gets_its_prompt_at_once_though_a_document_is_long() -> None:
    policy, document = FairShare(), Want("prefill", 10**6)
    work = [document, *branches(4)]
    for n in (1, 50, 100, 128):
        for _ in range(7):
            step(policy, work)
        newcomer = Want("prompt", n)
        work.append(newcomer)
        step(policy, work)
        assert newcomer.had == n
    longer = Want("prompt", 400)
    work.append(longer)
    for _ in range(8):  # it shares with the document
        step(policy, work)
    assert longer.had == 400


def test_a_newcomer_waits_for_one_chunk_of_many_documents_at_most() -> None:
    policy, work = FairShare(), [Want("prefill", 10**5) for _ in range(10)]
    for _ in range(15):
        step(policy, work)
    for _ in range(5):
        newcomer = Want("prompt", 100)
        work.append(newcomer)
        step(policy, work)
        step(policy, work)
        assert newcomer.had == 100


@pytest.mark.parametrize("kind", ["prompt", "prefill"])
@pytest.mark.parametrize("room", [1, 2, 3, 7, 64, 100])
def test_branches_and_a_document_that_do_not_fit_get_half_each(room: int, kind: Kind) -> None:
    """In a batch of one token the document took it, each time."""
    policy, other = FairShare(), Want(kind, 10**6)
    work = [other, *branches(3 * room)]
    for _ in range(60):
        step(policy, work, room)
    decoded = [w.had for w in work[1:]]
    assert other.had >= 30 * room
    assert sum(decoded) >= 30 * (room // 2 if room > 1 else 1)
    assert max(decoded) - min(decoded) <= 1
    assert other.had + sum(decoded) == 60 * room


# ── pieces of documents ──────────────────────────────────────────────────────────────────────────────


@settings(max_examples=200, deadline=None)
@given(
    documents=st.lists(st.integers(1, 1500), min_size=1, max_size=4),
    arrivals=st.lists(st.lists(st.integers(1, 300), max_size=3), max_size=40),
    running=st.integers(0, 64),
)
def test_no_piece_of_a_document_is_smaller_than_a_tile(
    documents: list[int], arrivals: list[list[int]], running: int
) -> None:
    """Unless all of it is: neither what is taken nor what is left."""
    policy = FairShare()
    work = [*[Want("prefill", n, name="document") for n in documents], *branches(running)]
    pieces: dict[int, list[int]] = {}
    for i in range(2000):
        if i < len(arrivals):
            work += [Want("prompt", n) for n in arrivals[i]]
        if len(work) == running:
            break
        before = list(work)
        for w, n in zip(before, step(policy, work), strict=True):
            if n and w.kind == "prefill":
                pieces.setdefault(id(w), []).append(n)
    assert len(work) == running
    assert sorted(sum(some) for some in pieces.values()) == sorted(documents)
    for some in pieces.values():
        assert len(some) == 1 or min(some) >= TILE


def test_a_document_is_cut_into_pieces_as_equal_as_can_be() -> None:
    policy, work = FairShare(), [Want("prefill", 130)]
    assert [step(policy, work), step(policy, work)] == [[65], [65]]


# ── whatever the work is ─────────────────────────────────────────────────────────────────────────────

WANTS = st.one_of(
    st.builds(Want, st.just("decode"), st.just(1), st.floats(0.001, 1000)),
    st.builds(Want, st.sampled_from(["prompt", "prefill"]), st.integers(1, 400), st.floats(0.001, 1000)),
)


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(st.lists(WANTS, max_size=4), min_size=1, max_size=20),
    rooms=st.lists(st.integers(1, 300), min_size=1, max_size=8),
    chunk=st.integers(1, 200),
    cap=st.none() | st.integers(1, 200),
    max_branches=st.none() | st.integers(1, 6),
)
def test_grants_are_within_what_is_wanted_and_what_there_is(
    steps: list[list[Want]], rooms: list[int], chunk: int, cap: int | None, max_branches: int | None
) -> None:
    """And any work that stops coming is done some time."""
    policy, work = FairShare(chunk, cap=cap, max_branches=max_branches), []
    for i, new in enumerate(steps):
        # A piece of work is used by one list only: hypothesis may give the same object twice.
        work += [Want(w.kind, w.n_tokens, w.priority) for w in new]
        if not work:
            continue
        before, room = list(work), rooms[i % len(rooms)]
        grants = step(policy, work, room)
        by_kind: Counter[str] = Counter()
        for w, n in zip(before, grants, strict=True):
            by_kind[w.kind] += n
            assert w.kind == "decode" or n <= (cap or room)
        assert by_kind["prompt"] + by_kind["prefill"] <= chunk
        assert by_kind["decode"] <= (max_branches or room)
    for i in range(80 * 400):
        if all(w.kind == "decode" for w in work):
            break
        step(policy, work, rooms[i % len(rooms)])
    assert all(w.kind == "decode" for w in work)


@pytest.mark.parametrize("options", [{"chunk": 0}, {"chunk": -1}, {"cap": 0}, {"max_branches": 0}], ids=str)
def test_what_makes_no_sense_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(InvalidArgumentError, match=next(iter(options))):
        FairShare(**options)
