"""The promise this library is for: a restored prefix answers bit for bit like a context that was never interrupted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import pytest
from helpers import (
    ATTENTION,
    BRANCH,
    HYBRID,
    KINDS,
    N_BATCH,
    N_UBATCH,
    RECURRENT,
    SLIDING,
    Models,
    all_logits,
    close,
    differs,
    identical,
    new_context,
    text_tokens,
    uninterrupted,
)
from tiny_models import BOS

from swarmkv_ll import Arena, Context, Model, Sampler, Snapshot
from swarmkv_ll.errors import IncompatibleSnapshotError, InvalidArgumentError, NoLogitsError, SnapshotCorruptError

BORDERS = [1, N_UBATCH - 1, N_UBATCH, N_BATCH + 1, 3501]


@pytest.fixture(scope="module")
def truth(models: Models) -> Callable[..., Any]:
    """The branch's logits in an uninterrupted context; computed once for each setting."""

    @cache
    def compute(kind: str, n_prefix: int, n_ctx: int = 512, **options: Any) -> Any:
        return uninterrupted(models[kind], text_tokens(n_prefix), BRANCH, n_ctx, **options)

    return compute


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena(32 << 20) as arena:
        yield arena
        arena.check_integrity()


# ── ways for a prefix to get into a sequence ─────────────────────────────────────────────────────────
# Each takes a context whose sequence 0 holds the prefix and a snapshot of it, and gives where to go on.

Place = tuple[Context, int]


def uncut(ctx: Context, _: Snapshot) -> Place:
    return ctx, 0


def restore_in_place(ctx: Context, snapshot: Snapshot) -> Place:
    ctx.decode(text_tokens(20, seed=5))  # another branch has gone on here meanwhile
    snapshot.restore(ctx, 0)
    return ctx, 0


def restore_elsewhere(ctx: Context, snapshot: Snapshot) -> Place:
    snapshot.restore(ctx, 2)
    return ctx, 2


def fork(ctx: Context, snapshot: Snapshot) -> Place:
    with snapshot.fork() as twin:
        twin.restore(ctx, 1)
    return ctx, 1


def share(ctx: Context, snapshot: Snapshot) -> Place:
    with snapshot.share() as twin:
        twin.restore(ctx, 1)
    return ctx, 1


def copy_sequence(ctx: Context, _: Snapshot) -> Place:
    ctx.copy_sequence(0, 1)
    return ctx, 1


def copy_restored(ctx: Context, snapshot: Snapshot) -> Place:
    snapshot.restore(ctx, 2)
    ctx.copy_sequence(2, 1)
    return ctx, 1


def snapshot_of_restored(ctx: Context, snapshot: Snapshot) -> Place:
    snapshot.restore(ctx, 2)
    with ctx.snapshot(snapshot.lease.arena, 2) as second:
        second.restore(ctx, 1)
    return ctx, 1


def snapshot_of_a_copy(ctx: Context, snapshot: Snapshot) -> Place:
    ctx.copy_sequence(0, 2)  # with a unified cache, each cell now belongs to two sequences
    with ctx.snapshot(snapshot.lease.arena, 2) as second:
        second.restore(ctx, 1)
    return ctx, 1


WAYS = [
    uncut,
    restore_in_place,
    restore_elsewhere,
    fork,
    share,
    copy_sequence,
    copy_restored,
    snapshot_of_restored,
    snapshot_of_a_copy,
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("streams", [False, True], ids=["unified", "streams"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_way_gives_the_same_bits(
    models: Models, truth: Any, arena: Arena, kind: str, streams: bool, way: Any
) -> None:
    for n_prefix in (5, N_UBATCH + 1):
        with new_context(models[kind], 1536, 3, kv_unified=not streams) as ctx:
            ctx.decode(text_tokens(n_prefix))
            with ctx.snapshot(arena) as snapshot:
                place, seq = way(ctx, snapshot)
                assert place.position(seq) == n_prefix
                assert identical(all_logits(place, BRANCH, seq), truth(kind, n_prefix, 1536))


@pytest.mark.parametrize("n_prefix", BORDERS)
def test_prefixes_around_batch_borders(models: Models, truth: Any, arena: Arena, n_prefix: int) -> None:
    model, expected = models[ATTENTION], truth(ATTENTION, n_prefix, 4096)
    with new_context(model, 4096) as ctx, new_context(model, 4096) as other:
        ctx.decode(text_tokens(n_prefix))
        with ctx.snapshot(arena) as snapshot, snapshot.fork() as twin:
            for place, source in ((ctx, snapshot), (other, snapshot), (other, twin)):
                assert source.restore(place) == n_prefix
                assert identical(all_logits(place, BRANCH), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_prefix", [1, N_BATCH + 1, 300])
def test_another_context_and_another_thread(models: Models, truth: Any, arena: Arena, kind: str, n_prefix: int) -> None:
    model = models[kind]
    with new_context(model) as ctx, new_context(model) as other, ThreadPoolExecutor(1) as thread:
        ctx.decode(text_tokens(n_prefix))
        with ctx.snapshot(arena) as snapshot:
            ctx.close()

            def answer() -> Any:
                assert threading.current_thread() is not threading.main_thread()
                snapshot.restore(other)
                return all_logits(other, BRANCH)

            assert identical(thread.submit(answer).result(), truth(kind, n_prefix))


@pytest.mark.parametrize(
    ("type_k", "type_v", "flash_attn"),
    [
        (type_k, type_v, flash_attn)
        for type_k in ("f16", "f32", "q8_0")
        for type_v in ("f16", "f32", "q8_0")
        for flash_attn in (True, False)
        if flash_attn or type_v != "q8_0"  # the engine has no quantized V without flash attention
    ],
)
def test_kv_types_and_flash_attention(
    models: Models, truth: Any, arena: Arena, type_k: str, type_v: str, flash_attn: bool
) -> None:
    model = models[ATTENTION]
    options: dict[str, Any] = {"type_k": type_k, "type_v": type_v, "flash_attn": flash_attn}
    expected = truth(ATTENTION, 100, **options)
    with new_context(model, n_seq_max=2, **options) as ctx, new_context(model, **options) as other:
        ctx.decode(text_tokens(100))
        with ctx.snapshot(arena) as snapshot:
            for place, seq in ((other, 0), (ctx, 0), (ctx, 1)):
                snapshot.restore(place, seq)
                answer = all_logits(place, BRANCH, seq)
                # Beside a sibling the cells lie elsewhere; without flash attention sums are then rounded differently.
                assert close(answer, expected, 0.01) if seq and not flash_attn else identical(answer, expected)


@pytest.mark.parametrize("kind", [ATTENTION, HYBRID])
def test_two_threads_of_the_engine(models: Models, truth: Any, arena: Arena, kind: str) -> None:
    with new_context(models[kind], n_seq_max=2, n_threads=2) as ctx:
        ctx.decode(text_tokens(100))
        with ctx.snapshot(arena) as snapshot:
            snapshot.restore(ctx, 1)
        assert identical(all_logits(ctx, BRANCH, 1), truth(kind, 100, n_threads=2))


@pytest.mark.parametrize("kind", KINDS)
def test_ten_restores_are_ten_times_the_same(models: Models, truth: Any, arena: Arena, kind: str) -> None:
    with new_context(models[kind]) as ctx:
        ctx.decode(text_tokens(100))
        with ctx.snapshot(arena) as snapshot:
            for _ in range(10):
                assert snapshot.restore(ctx) == 100
                assert identical(all_logits(ctx, BRANCH), truth(kind, 100))


@pytest.mark.parametrize("kind", KINDS)
def test_sampling_right_after_a_restore_needs_no_decode(models: Models, arena: Arena, kind: str) -> None:
    with new_context(models[kind]) as ctx, new_context(models[kind], n_seq_max=2) as other:
        ctx.decode(text_tokens(100))
        row = ctx.logits().copy()
        with ctx.snapshot(arena) as snapshot:
            expected = list(ctx.generate(Sampler(), 12))
            other.decode(text_tokens(7, seed=3))
            snapshot.restore(other)
            assert identical(other.logits(0), row)
            other.copy_sequence(0, 1)
            assert identical(other.logits(1), row)
            assert list(other.generate(Sampler(), 12)) == expected
            assert len(set(expected)) > 1
            snapshot.restore(other)
            other.decode(BRANCH, logits="none")  # a control: a row that no longer holds is not given out
            with pytest.raises(NoLogitsError):
                other.logits(0)


# ── where the promise of equal bits ends ─────────────────────────────────────────────────────────────
# The engine's sums run over cells, and in blocks of cells once a batch has 64 tokens. In the same places the bits are
# the same; elsewhere they are up to rounding, whether a restore or a plain decode has put the cells there.


@pytest.mark.parametrize("kind", [ATTENTION, RECURRENT, HYBRID])
def test_long_branches_in_a_context_or_stream_of_their_own(models: Models, arena: Arena, kind: str) -> None:
    model, branch = models[kind], text_tokens(200, seed=6)
    expected = uninterrupted(model, text_tokens(100), branch)
    with new_context(model) as other, new_context(model, 1536, 3, kv_unified=False) as streams:
        streams.decode(text_tokens(100))
        assert identical(all_logits(streams, branch), expected)
        streams.remove(0)
        streams.decode(text_tokens(100))
        with streams.snapshot(arena) as snapshot:
            snapshot.restore(streams, 2)
        assert identical(all_logits(streams, branch, 2), expected)
        with new_context(model) as ctx:
            ctx.decode(text_tokens(100))
            with ctx.snapshot(arena) as snapshot:
                snapshot.restore(other)
        assert identical(all_logits(other, branch), expected)


@pytest.mark.parametrize("kind", [ATTENTION, SLIDING, HYBRID])
def test_long_branches_elsewhere_are_equal_up_to_rounding(models: Models, arena: Arena, kind: str) -> None:
    model, branch = models[kind], text_tokens(200, seed=6)
    expected = uninterrupted(model, text_tokens(100), branch)
    with new_context(model, 1024, 2) as ctx:
        ctx.decode(text_tokens(100))
        with ctx.snapshot(arena) as snapshot:
            for seq in (1, 0):
                snapshot.restore(ctx, seq)
                assert close(all_logits(ctx, branch, seq), expected)
                assert differs(all_logits(ctx, branch, seq), expected)  # a control: the same branch once more


def test_cells_out_of_order_are_equal_up_to_rounding(models: Models, arena: Arena) -> None:
    with new_context(models[ATTENTION], 256, 2) as ctx:
        ctx.decode(text_tokens(50, seed=7), seq=1)
        ctx.decode(text_tokens(100))
        with ctx.snapshot(arena) as snapshot:
            ctx.remove(1)
            expected = uninterrupted(models[ATTENTION], text_tokens(100), BRANCH, 256)
            assert close(all_logits(ctx, BRANCH), expected)  # the branch's cells stand before the prefix's
            ctx.remove(0, 100)
            snapshot.restore(ctx, 1)  # its cells fill the hole and go on behind
            assert close(all_logits(ctx, BRANCH, 1), expected)


# ── the traps: what must not give the same answer ────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", KINDS)
def test_a_branch_at_position_0_answers_something_else(models: Models, truth: Any, arena: Arena, kind: str) -> None:
    with new_context(models[kind], n_seq_max=2) as ctx:
        ctx.decode(text_tokens(100))
        with ctx.snapshot(arena) as snapshot:
            snapshot.restore(ctx, 1)
        with pytest.raises(InvalidArgumentError, match="position should be 100"):
            ctx.decode(BRANCH, pos=0, seq=1)
        ctx.remove(1)
        ctx.decode(BRANCH, pos=0, seq=1, logits="all")
        assert differs(ctx.logits(), truth(kind, 100))


def test_the_right_position_alone_is_not_enough(models: Models, truth: Any) -> None:
    with new_context(models[ATTENTION]) as ctx:
        ctx.decode(BRANCH, pos=100, logits="all")
        assert differs(ctx.logits(), truth(ATTENTION, 100))


@pytest.mark.parametrize("kind", KINDS)
def test_a_special_token_slipped_in_changes_the_answer(models: Models, truth: Any, arena: Arena, kind: str) -> None:
    with new_context(models[kind]) as ctx:
        ctx.decode(text_tokens(100))
        with ctx.snapshot(arena) as snapshot:
            snapshot.restore(ctx)
            slipped = all_logits(ctx, [BOS, *BRANCH])[1:]
            assert differs(slipped, truth(kind, 100))
            snapshot.restore(ctx)
            assert identical(all_logits(ctx, BRANCH), truth(kind, 100))


def test_a_branch_is_tokenized_without_special_tokens(models: Models) -> None:
    model = models["bos"]
    document = model.tokenize("the document ", add_special=True, parse_special=False)
    branch = model.tokenize("asks on", add_special=False, parse_special=False)
    assert document[0] == BOS
    assert BOS not in branch
    with_bos = model.tokenize("asks on", add_special=True, parse_special=False)
    assert with_bos.tolist() == [BOS, *branch]
    right, wrong = (uninterrupted(model, document, tokens)[-1] for tokens in (branch, with_bos))
    assert differs(right, wrong)


# ── siblings ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("streams", [False, True], ids=["unified", "streams"])
@pytest.mark.parametrize("outcome", ["good", "damaged", "refused"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_restore_leaves_the_siblings_alone(
    models: Models, arena: Arena, kind: str, outcome: str, streams: bool
) -> None:
    """Good, damaged or refused: the other sequences keep positions and answers."""
    sibling = text_tokens(70, seed=8)
    expected = uninterrupted(models[kind], sibling, BRANCH, 768)
    with new_context(models[kind], 768, 3, kv_unified=not streams) as ctx, new_context(models[kind]) as other:
        ctx.decode(sibling, seq=1)
        ctx.copy_sequence(1, 2)
        ctx.decode(text_tokens(30))
        with ctx.snapshot(arena) as snapshot, other:
            if outcome == "damaged":
                snapshot.lease.array[0] ^= 1
                with pytest.raises(SnapshotCorruptError):
                    snapshot.restore(ctx, 0)
            elif outcome == "refused":
                with pytest.raises(IncompatibleSnapshotError):
                    snapshot.restore(ctx, 3)
            else:
                snapshot.restore(ctx, 0)
        assert [ctx.position(seq) for seq in range(3)] == [30, 70, 70]
        for seq in (1, 2):
            assert identical(all_logits(ctx, BRANCH, seq), expected)


# ── the default model ────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def document(default_model: Model) -> Any:
    text = "The KV cache holds one row of keys and one row of values for every token that was read. " * 12
    return default_model.tokenize(text, add_special=True, parse_special=False)[:200]


@pytest.mark.requires_model
def test_default_model_restored_against_uninterrupted(default_model: Model, document: Any, arena: Arena) -> None:
    question = default_model.tokenize("What does it hold?", add_special=False, parse_special=False)
    expected = uninterrupted(default_model, document, question, 768)
    with new_context(default_model, 768, 3) as ctx:
        ctx.decode(document)
        with ctx.snapshot(arena, tokens=document) as snapshot, snapshot.fork() as twin:
            assert snapshot.n_tokens == 200
            snapshot.restore(ctx, 1)
            assert identical(all_logits(ctx, question, 1), expected)
            twin.restore(ctx, 2)
            assert identical(all_logits(ctx, question, 2), expected)
            ctx.remove(1)
            ctx.decode(question, pos=0, seq=1, logits="all")
            assert differs(ctx.logits(), expected)


@pytest.mark.requires_model
def test_default_model_batched_siblings_agree_with_separate_ones(default_model: Model, document: Any) -> None:
    questions = [
        default_model.tokenize(text, add_special=False, parse_special=False)
        for text in ("What is a row?", "How many tokens were read, and when?", "Why?")
    ]
    with new_context(default_model, 1024, 4) as ctx:
        ctx.decode(document)
        for seq in (1, 2, 3):
            ctx.copy_sequence(0, seq)
        assert ctx.decode_batch([(q, seq) for seq, q in enumerate(questions, 1)]) == [200 + len(q) for q in questions]
        batched = [ctx.logits(seq).copy() for seq in (1, 2, 3)]
        for seq, question in enumerate(questions, 1):
            ctx.remove(seq, 200)
            ctx.decode(question, seq=seq)
            alone = ctx.logits()
            # Another batch shape rounds differently; the answer stays, and stays with its own sequence.
            assert np.abs(batched[seq - 1] - alone).max() < 0.5
            assert min(np.abs(other - alone).max() for i, other in enumerate(batched, 1) if i != seq) > 2
