"""Documents and branches in one context, a batch a step: the answers of plain decoding, and nothing left behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from helpers import (
    ATTENTION,
    HYBRID,
    KINDS,
    RECURRENT,
    SLIDING,
    Files,
    Models,
    new_context,
    run_ok,
    text_tokens,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmkv_ll import Arena, Model, Sampler
from swarmkv_ll.batching import BatchedDecoder, Branch, Job, Prefix
from swarmkv_ll.errors import (
    ContextFullError,
    InvalidArgumentError,
    NodeCancelledError,
    NodeTimeoutError,
    PartialRemovalError,
    ReentrantCallError,
    UpstreamError,
)
from swarmkv_ll.policy import FairShare, Work

Tokens = npt.NDArray[np.int32]

DOCUMENT = text_tokens(200)


def prompt(i: int) -> Tokens:
    """A prompt of its own for each branch, some long, most short."""
    return text_tokens(40 if i % 7 == 3 else 3 + i % 5, seed=100 + i)


@cache
def _plain(model: Model, before: bytes, max_tokens: int) -> list[int]:
    with new_context(model, 1024) as ctx:
        ctx.decode(np.frombuffer(before, np.int32))
        return list(ctx.generate(Sampler(), max_tokens))


def plain(model: Model, *parts: npt.ArrayLike, max_tokens: int = 8) -> list[int]:
    """The answer after these tokens, decoded in a context of its own."""
    before = np.concatenate([np.asarray(part, np.int32) for part in parts])
    return _plain(model, before.tobytes(), max_tokens)


def is_plain(model: Model, answer: list[int], *parts: npt.ArrayLike) -> bool:
    """Whether plain decoding gives this answer.

    Batches of another shape round otherwise: where it first differs, both tokens have to be as likely within that.
    """
    before = np.concatenate([np.asarray(part, np.int32) for part in parts])
    expected = plain(model, before, max_tokens=len(answer))
    for i, (is_, should) in enumerate(zip(answer, expected, strict=True)):
        if is_ != should:
            with new_context(model, 1024) as ctx:
                ctx.decode(np.concatenate([before, np.array(expected[:i], np.int32)]))
                row = ctx.logits()
                return bool(row[should] - row[is_] < 0.05)
    return True


def idle(decoder: BatchedDecoder) -> bool:
    """Whether all cells and sequences are free, and nobody waits."""
    ctx = decoder.ctx
    assert sorted(decoder._free) == list(range(ctx.n_seq_max))
    assert not any(ctx.position(seq) for seq in range(ctx.n_seq_max))
    assert ctx.cells_free() == ctx.n_ctx
    assert decoder._running == decoder._waiting == []
    return True


def answer(job: Branch) -> list[int]:
    """What a branch that is done has answered."""
    assert job.future.result(0) is job
    return job.answer.tokens


def failure(job: Job) -> BaseException | None:
    """Why a job that is done has failed."""
    return job.future.exception(0)


@contextmanager
def decoding(
    model: Model, n_ctx: int = 2048, n_seq_max: int = 16, policy: Any = None, **options: Any
) -> Iterator[BatchedDecoder]:
    """A decoder that is idle again at the end."""
    with new_context(model, n_ctx, n_seq_max, **options) as ctx:
        decoder = BatchedDecoder(ctx, policy)
        yield decoder
        assert idle(decoder)


def test_the_comparison_can_fail(models: Models) -> None:
    """A text that differs, or one token of the answer, is another answer."""
    for kind in KINDS:
        right = plain(models[kind], DOCUMENT, prompt(0))
        assert is_plain(models[kind], right, DOCUMENT, prompt(0))
        changed = DOCUMENT.copy()
        changed[:150] ^= 1
        assert not is_plain(models[kind], right, changed, prompt(0))
        assert not is_plain(models[kind], right, DOCUMENT, prompt(0)[:-1])
        assert not is_plain(models[kind], right, DOCUMENT, prompt(1))
        assert not is_plain(models[kind], [*right[:-1], right[-1] ^ 1], DOCUMENT, prompt(0))


# ── the answers of plain decoding ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("chunk", [16, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_branches_answer_as_if_each_were_alone(models: Models, kind: str, chunk: int) -> None:
    """Two documents, branches from borders while the documents go on, and from their ends."""
    model, other = models[kind], text_tokens(150, seed=1)
    with decoding(model, policy=FairShare(chunk)) as decoder:
        first = decoder.prefill(DOCUMENT, name="first", uses=7, borders=[64, 90])
        second = decoder.prefill(other, name="second", uses=3)
        jobs = []
        for i, n in enumerate([64, 64, 90, None, 200, None, 90]):
            job = decoder.branch(prompt(i), after=first, n_prefix=n, name=f"{i}", max_tokens=4 + 3 * i)
            jobs.append((DOCUMENT[:n], i, job))
        jobs += [(other, i, decoder.branch(prompt(i), after=second, max_tokens=8)) for i in (7, 8, 9)]
        decoder.run()
        assert (first.watermark, second.watermark) == (200, 150)
    for document, i, job in jobs:
        assert is_plain(model, answer(job), document, prompt(i))
        assert len(job.answer.tokens) == len(job.answer.times) == (4 + 3 * i if i < 7 else 8)
        assert job.begun > 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_branch_on_a_border_begins_while_the_document_goes_on(models: Models, kind: str) -> None:
    """As if only its own part had ever been there, though others run, and more of the document is in the cache."""
    model, document = models[kind], text_tokens(500)
    with decoding(model, policy=FairShare(32)) as decoder:
        early = decoder.prefill(DOCUMENT[:50], uses=2)
        running = [decoder.branch(prompt(i), after=early, max_tokens=60) for i in range(2)]
        long = decoder.prefill(document, name="long", uses=3, borders=[33, 100])
        marks = []
        jobs = {
            n: decoder.branch(
                prompt(7), after=long, n_prefix=n, max_tokens=6, on_begin=lambda job: marks.append(long.watermark)
            )
            for n in (33, 100, 500)
        }
        ended = {}
        while decoder.step():
            for n, job in jobs.items():
                if job.future.done():
                    ended.setdefault(n, long.watermark)
        assert marks == [33, 100, 500]
        assert ended[33] < 500  # it had its whole answer before the document was there
        assert long.future.result() is long
    for n, job in jobs.items():
        assert is_plain(model, answer(job), document[:n], prompt(7))
    for i, job in enumerate(running):
        assert is_plain(model, answer(job), DOCUMENT[:50], prompt(i))


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_end_at_borders(models: Models, kind: str) -> None:
    progress: list[int] = []
    with decoding(models[kind], policy=FairShare(64)) as decoder:
        decoder.prefill(DOCUMENT, uses=0, borders=[150, 10, 64, 200, 10], on_progress=progress.append)
        decoder.run()
    assert {10, 64, 150, 200} <= set(progress)
    assert progress == sorted(progress)
    prefills = [part.n_tokens for step in decoder.steps for part in step.parts]
    assert np.cumsum(prefills).tolist() == progress
    assert max(prefills) <= 64


@pytest.mark.parametrize("uses", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_going_on_from_a_branch_is_going_on_with_its_text(models: Models, kind: str, uses: int) -> None:
    """With one child it takes the sequence over, with two both copy it; each begins with the pending token."""
    model = models[kind]
    with decoding(model) as decoder:
        document = decoder.prefill(DOCUMENT, uses=1)
        parent = decoder.branch(prompt(0), after=document, max_tokens=6, uses=uses)
        decoder.run()
        assert parent.pending == parent.answer.tokens[-1]
        assert decoder.ctx.position(parent._seq) == 200 + len(prompt(0)) + 5  # the pending token is not in it
        rest = [decoder.branch([parent.pending, *prompt(1 + i)], after=parent, max_tokens=7) for i in range(uses)]
        decoder.run()
        for i, child in enumerate(rest):
            before = [DOCUMENT, prompt(0), parent.answer.tokens, prompt(1 + i)]
            assert is_plain(model, answer(child), *before)
            assert answer(child) != plain(model, *before[:2], before[2][:-1], before[3], max_tokens=7)


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_cut_in_two_is_the_answer(models: Models, kind: str) -> None:
    with decoding(models[kind]) as decoder:
        document = decoder.prefill(DOCUMENT, uses=1)
        first = decoder.branch(prompt(0), after=document, max_tokens=5, uses=1)
        decoder.run()
        second = decoder.branch([first.pending], after=first, max_tokens=11)
        decoder.run()
    assert is_plain(models[kind], answer(first) + answer(second), DOCUMENT, prompt(0))


def test_an_answer_that_the_model_has_ended_has_nothing_pending(models: Models) -> None:
    """The token that ended it is neither in the answer nor in the cache."""
    model = models["ends"]
    with decoding(model) as decoder:
        document = decoder.prefill(DOCUMENT, uses=8)
        jobs = [decoder.branch(prompt(i), after=document, max_tokens=300, uses=1) for i in range(8)]
        decoder.run()
        ended = [job for job in jobs if job.answer.finished]
        assert len(ended) >= 4
        for job in jobs:
            assert (job.pending is None) == (job.answer.finished or not job.answer.tokens)
            assert len(job.answer.times) == len(job.answer.tokens) + job.answer.finished
        children = [(job, decoder.branch(prompt(9), after=job, max_tokens=1)) for job in ended]
        for job in jobs:
            if job not in ended:
                decoder.release(job)
        decoder.run()
    for job, child in children:
        i = jobs.index(job)
        if child.answer.tokens:
            assert is_plain(model, answer(child), DOCUMENT, prompt(i), answer(job), prompt(9))


def test_each_branch_draws_with_its_own_sampler(models: Models) -> None:
    """What others draw does not matter; the same seed draws the same."""
    drawn = []
    for others in (0, 3):
        with decoding(models[ATTENTION]) as decoder:
            document = decoder.prefill(DOCUMENT, uses=2 + others)
            seeds = [1, 2, *range(10, 10 + others)]
            jobs = [
                decoder.branch(prompt(0), after=document, max_tokens=20, sampler=Sampler(1.0, seed=seed))
                for seed in seeds
            ]
            decoder.run()
        drawn.append([answer(job) for job in jobs[:2]])
    assert drawn[0] == drawn[1]
    assert drawn[0][0] != drawn[0][1] != plain(models[ATTENTION], DOCUMENT, prompt(0), max_tokens=20)


@pytest.mark.parametrize("kind", KINDS)
def test_every_running_branch_is_in_every_batch(models: Models, kind: str) -> None:
    """While a document is computed too: none waits for more than one chunk."""
    with decoding(models[kind], policy=FairShare(32)) as decoder:
        document = decoder.prefill(DOCUMENT[:20], uses=5)
        jobs = [decoder.branch(prompt(i), after=document, max_tokens=30, name=f"b{i}") for i in range(5)]
        decoder.prefill(text_tokens(400, seed=3), name="long", uses=0)
        decoder.run()
    n_others = []
    for job in jobs:
        at = [i for i, step in enumerate(decoder.steps) if any(part.name == job.name for part in step.parts)]
        decode = [i for i in at if any(p.name == job.name and p.kind == "decode" for p in decoder.steps[i].parts)]
        assert len(decode) == 29
        assert decode == list(range(decode[0], decode[0] + 29))
    for step in decoder.steps:
        n_others.append(sum(part.n_tokens for part in step.parts if part.kind != "decode"))
        assert step.begin <= step.decode_begin <= step.decode_end <= step.end
        assert 0 <= step.sample_s <= step.end - step.decode_end
    assert max(n_others) == 32


# ── a document's K and V ─────────────────────────────────────────────────────────────────────────────


def states(model: Model, document: Tokens, *, filler: bool = True, second: bool = False, **options: Any) -> list[bytes]:
    """A document's K and V: computed alone, and while branches ran."""
    given = {"flash_attn": True, "n_batch": 512, "n_ubatch": 512, **options}
    with Arena(64 << 20) as arena:
        with new_context(model, 2048, 8, **given) as ctx:
            for at in range(0, len(document), 100):
                ctx.decode(document[at : at + 100], logits="none")
            assert len(document) % 100 in (0, *range(64, 100))  # no piece that is not computed in tiles
            with ctx.snapshot(arena) as snapshot:
                found = [_rows(snapshot)]
        with new_context(model, 2048, 8, **given) as ctx:
            decoder = BatchedDecoder(ctx)
            decoder._tiled &= filler
            if second:
                decoder.prefill(text_tokens(32, seed=5), uses=1)
            job = decoder.prefill(document, uses=4, borders=[64])
            jobs = [decoder.branch([i + 1, i + 2], after=job, n_prefix=64, max_tokens=20) for i in range(3)]
            decoder.run()
            assert all(branch.future.result() for branch in jobs)
            kinds = [{part.kind for part in step.parts} for step in decoder.steps]
            assert {"prefill", "decode"} in kinds  # they did run meanwhile
            with ctx.snapshot(arena, job._seq) as snapshot:
                return [*found, _rows(snapshot)]


def _rows(snapshot: Any) -> bytes:
    layers = snapshot.blob.layers
    return b"".join(rows.tobytes() for layer in layers for rows in (layer.k, layer.v))


@pytest.mark.parametrize("second", [False, True], ids=["first", "second"])
def test_a_document_is_bit_for_bit_what_it_is_alone_though_branches_run(models: Models, second: bool) -> None:
    """The second one's cells begin where a tile of the engine's does, though the first has 32."""
    alone, among = states(models[ATTENTION], text_tokens(570), second=second)
    assert alone == among
    alone, among = states(models[ATTENTION], text_tokens(570), second=second, filler=False)
    assert alone != among  # a control: what its cells are kept free for


@pytest.mark.requires_model
def test_a_document_of_the_default_model_is_bit_for_bit_what_it_is_alone(default_model: Model) -> None:
    alone, among = states(default_model, text_tokens(264) + 1000, n_threads=2)
    assert alone == among


# ── more than fits ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", KINDS)
def test_300_branches_take_turns_on_16_sequences(models: Models, kind: str) -> None:
    model, order, n = models[kind], [], 300 if kind == ATTENTION else 60
    with decoding(model) as decoder:
        document = decoder.prefill(DOCUMENT[:40], uses=n)
        jobs = [
            decoder.branch(
                prompt(i % 20), after=document, name=f"{i}", max_tokens=3, on_begin=lambda job: order.append(job.name)
            )
            for i in range(n)
        ]
        most = 0
        while decoder.step():
            most = max(most, len(decoder._running))
        assert most >= 14
    assert order == [f"{i}" for i in range(n)]
    for i, job in enumerate(jobs):
        assert is_plain(model, answer(job), DOCUMENT[:40], prompt(i % 20))


def test_40_branches_take_turns_on_too_few_cells(models: Models) -> None:
    """64 of the document, and room for four of 47: no batch is refused for want of cells."""
    order: list[str] = []
    with decoding(models[ATTENTION], 256, 40) as decoder:
        document = decoder.prefill(DOCUMENT[:64], uses=40)
        jobs = [
            decoder.branch(
                text_tokens(40, seed=i), after=document, name=f"{i}", max_tokens=8,
                on_begin=lambda job: order.append(job.name),
            )
            for i in range(40)
        ]  # fmt: skip
        most = 0
        while decoder.step():
            most = max(most, len(decoder._running))
            assert decoder._cells_left() >= 0
        assert most == (256 - 64) // 47
    assert order == [f"{i}" for i in range(40)]
    for i, job in enumerate(jobs):
        assert is_plain(models[ATTENTION], answer(job), DOCUMENT[:64], text_tokens(40, seed=i))


def test_a_small_branch_does_not_pass_a_large_one_by(models: Models) -> None:
    """It would have to wait for ever, if small ones kept coming."""
    order: list[str] = []

    def begin(job: Job) -> None:
        order.append(job.name)

    with decoding(models[ATTENTION], 256, 10) as decoder:
        document = decoder.prefill(DOCUMENT[:60], uses=6)
        for name, n in (("a", 60), ("large", 120), ("b", 10), ("c", 10), ("d", 10), ("e", 10)):
            decoder.branch(text_tokens(n), after=document, name=name, max_tokens=20, on_begin=begin)
        decoder.run()
    assert order == ["a", "large", "b", "c", "d", "e"]


def test_those_with_priority_begin_first(models: Models) -> None:
    order: list[str] = []
    with decoding(models[ATTENTION], n_seq_max=3) as decoder:
        document = decoder.prefill(DOCUMENT[:60], uses=4)
        for name, priority in (("low", 1.0), ("lower", 0.5), ("high", 2.0), ("low too", 1.0)):
            decoder.branch(
                [1, 2], after=document, name=name, priority=priority, max_tokens=2,
                on_begin=lambda job: order.append(job.name),
            )  # fmt: skip
        decoder.run()
    assert order == ["high", "low", "low too", "lower"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_chain_of_300_needs_three_sequences(models: Models, kind: str) -> None:
    """Each takes over the sequence of the one before; the text is one."""
    model, n = models[kind], 300 if kind == ATTENTION else 60
    with decoding(model, 2048, 3) as decoder:
        document = decoder.prefill(DOCUMENT[:40], uses=1)
        job: Prefix | Branch = document
        text = [DOCUMENT[:40]]
        for i in range(n):
            own = text_tokens(1, seed=i)
            tokens = own if isinstance(job, Prefix) else [job.pending, *own]
            job = decoder.branch(tokens, after=job, max_tokens=2, uses=int(i < n - 1))
            decoder.run()
            if i in (1, 20, n - 1):
                assert is_plain(model, answer(job), *text, own)
            text += [own, np.array(answer(job), np.int32)]
            assert len(decoder._free) >= 2


def test_what_is_too_large_for_the_context_fails_and_the_others_do_not(models: Models) -> None:
    """Two that were too large left the second, and what depended on it, waiting for ever."""
    with decoding(models[ATTENTION], 256, 8) as decoder:
        document = decoder.prefill(DOCUMENT[:100], uses=5)
        large = [decoder.branch(text_tokens(150), after=document, name="large", max_tokens=8) for _ in range(2)]
        fits = [decoder.branch(prompt(i), after=document, max_tokens=8) for i in range(3)]
        decoder.run()
    for job in large:
        error = failure(job)
        assert isinstance(error, ContextFullError)
        assert (error.required, error.available, error.n_ctx) == (157, 156, 256)
    for i, job in enumerate(fits):
        assert is_plain(models[ATTENTION], answer(job), DOCUMENT[:100], prompt(i))
    with decoding(models[ATTENTION], 256, 8) as decoder:
        documents = [decoder.prefill(text_tokens(257), name=f"d{i}", uses=1) for i in range(3)]
        small = decoder.prefill(DOCUMENT[:50], uses=0)
        child = decoder.branch([1], after=documents[2], name="child", uses=1)
        grandchild = decoder.branch([1], after=child, priority=9)  # stands before what it waits for
        decoder.run()
        assert all(isinstance(failure(job), ContextFullError) for job in documents)
        assert small.future.result() is small
        for job in (child, grandchild):
            error = failure(job)
            assert isinstance(error, UpstreamError)
            assert (error.node, error.cause) == ("d2", failure(documents[2]))


def test_a_branch_of_exactly_the_cells_that_are_left_fits(models: Models) -> None:
    with decoding(models[ATTENTION], 256, 8) as decoder:
        document = decoder.prefill(DOCUMENT[:100], uses=1)
        job = decoder.branch(text_tokens(149), after=document, max_tokens=8)  # the last token takes none
        decoder.run()
    assert is_plain(models[ATTENTION], answer(job), DOCUMENT[:100], text_tokens(149))


def test_too_few_sequences_are_named(models: Models) -> None:
    """It was said that 60 cells were too few, with 512 of 512 free."""
    with decoding(models[ATTENTION], 512, 1) as decoder:
        document = decoder.prefill(DOCUMENT[:60], borders=[30])
        decoder.run()
        with pytest.raises(InvalidArgumentError, match="2 sequences; 1 of 1"):
            document.future.result()
    with decoding(models[RECURRENT], 512, 3) as decoder:
        document = decoder.prefill(DOCUMENT[:60], borders=[10, 20, 30])
        decoder.run()
        with pytest.raises(InvalidArgumentError, match="4 sequences; 3 of 3"):
            document.future.result()


# ── cancel, at every moment ──────────────────────────────────────────────────────────────────────────


def scene(decoder: BatchedDecoder, **options: Any) -> tuple[Prefix, dict[str, Branch]]:
    """Three branches: from a border, from the document's end, and from the first's end."""
    document = decoder.prefill(DOCUMENT, name="document", uses=2, borders=[70])
    early = decoder.branch(prompt(0), after=document, n_prefix=70, name="early", max_tokens=9, uses=1, **options)
    late = decoder.branch(prompt(3), after=document, name="late", max_tokens=9, **options)
    child = decoder.branch(prompt(1), after=early, name="child", max_tokens=9, **options)
    return document, {"early": early, "late": late, "child": child}


EXPECTED = {
    "early": lambda jobs: (DOCUMENT[:70], prompt(0)),
    "late": lambda jobs: (DOCUMENT, prompt(3)),
    "child": lambda jobs: (DOCUMENT[:70], prompt(0), jobs["early"].answer.tokens[:-1], prompt(1)),
}

DEPEND_ON = {"document": {"early", "late", "child"}, "early": {"child"}, "late": set(), "child": set()}


def check_scene(model: Model, document: Prefix, jobs: dict[str, Branch], cancelled: str) -> None:
    """The one cancelled has failed, if it was not done; those that wait for it too; the others' answers are whole."""
    everything = {"document": document, **jobs}
    error = failure(everything[cancelled])
    assert error is None or (isinstance(error, NodeCancelledError) and error.node == cancelled)
    for name, job in jobs.items():
        if name == cancelled and error is not None:
            continue
        other = failure(job)
        if other is None:
            assert is_plain(model, job.answer.tokens, *EXPECTED[name](jobs))
            assert len(job.answer.tokens) == 9
        else:
            assert isinstance(other, UpstreamError)
            assert name in DEPEND_ON[cancelled]
            assert (other.node, other.cause) == (cancelled, error)


@pytest.mark.parametrize("who", ["document", "early", "late", "child"])
@pytest.mark.parametrize("kind", KINDS)
def test_cancel_after_any_number_of_steps(models: Models, kind: str, who: str) -> None:
    """Before it begins, during its prompt, its chunks, its answer, with others waiting for it; and when it is done."""
    model, outcomes, stride = models[kind], set(), 1 if kind == ATTENTION else 7
    for n_steps in range(0, 40, stride):
        with decoding(model, policy=FairShare(32)) as decoder:
            document, jobs = scene(decoder)
            worked = [decoder.step() for _ in range(n_steps)]
            job = {"document": document, **jobs}[who]
            was_done, seq = job.future.done(), job._seq
            outcomes.add((job.kind, job.begun > 0, was_done))
            decoder.cancel(job)
            assert job.future.done()
            if not was_done:
                assert job._seq is None
                assert seq is None or (decoder.ctx.position(seq) == 0 and seq in decoder._free)
            after = decoder.ctx.cells_free()
            decoder.cancel(job)
            assert decoder.ctx.cells_free() == after
            decoder.run()
            check_scene(model, document, jobs, who)
        if worked and not worked[-1]:
            break
    assert {begun for _, begun, _ in outcomes} == {False, True}
    assert {done for _, _, done in outcomes} == {False, True}
    assert stride > 1 or who == "document" or {kind for kind, _, _ in outcomes} == {"prompt", "decode"}


@pytest.mark.parametrize("who", ["document", "early", "late", "child"])
@pytest.mark.parametrize("by", ["tell", "on_progress", "on_begin", "future"])
@pytest.mark.parametrize("kind", [ATTENTION, HYBRID])
def test_cancel_from_a_callback(models: Models, kind: str, by: str, who: str) -> None:
    """It takes effect when the batch is done; a branch may cancel itself."""
    model = models[kind]
    for nth in (0, 5):
        with decoding(model, policy=FairShare(32)) as decoder:
            calls, everything = iter(range(10**6)), {}

            def call(*_: Any, calls: Any = calls, nth: int = nth, everything: Any = everything) -> None:
                if next(calls) == nth:
                    decoder.cancel(everything[who])

            def told(*_: Any) -> None:
                if by == "tell":
                    call()

            document = decoder.prefill(
                DOCUMENT, name="document", uses=2, borders=[70], on_progress=call if by == "on_progress" else None
            )
            options: dict[str, Any] = {"tell": told, "on_begin": call if by == "on_begin" else None, "max_tokens": 9}
            early = decoder.branch(prompt(0), after=document, n_prefix=70, name="early", uses=1, **options)
            jobs = {
                "early": early,
                "late": decoder.branch(prompt(3), after=document, name="late", **options),
                "child": decoder.branch(prompt(1), after=early, name="child", **options),
            }
            everything |= {"document": document, **jobs}
            if by == "future":
                for job in everything.values():
                    job.future.add_done_callback(call)
            while decoder.step():
                assert not decoder._commands
            check_scene(model, document, jobs, who)
            if next(calls) <= nth:
                decoder.cancel(everything[who])


def test_cancel_from_another_thread_while_it_runs(models: Models) -> None:
    """Each time at another moment; the others' answers are unchanged."""
    model, n_cancelled = models[ATTENTION], 0
    for i in range(30):
        with decoding(model, policy=FairShare(32)) as decoder:
            reached = threading.Event()

            def told(_: str, i: int = i, reached: threading.Event = reached) -> None:
                if len(decoder.steps) >= i:
                    reached.set()

            document, jobs = scene(decoder, tell=told)
            who = ("document", "early", "late", "child")[i % 4]
            job = {"document": document, **jobs}[who]

            def cancel(reached: threading.Event = reached, job: Any = job) -> None:
                reached.wait(30)
                decoder.cancel(job)

            thread = threading.Thread(target=cancel)
            thread.start()
            if i == 0:
                reached.set()
            decoder.run()
            reached.set()
            thread.join()
            decoder.run()
            check_scene(model, document, jobs, who)
            n_cancelled += failure(job) is not None
    assert n_cancelled > 3


def test_jobs_and_cancels_from_many_threads(models: Models) -> None:
    """While another thread steps, and while none does."""
    model, jobs = models[ATTENTION], {}
    with decoding(model) as decoder:
        document = decoder.prefill(DOCUMENT[:64], uses=8 * 12)
        stop = threading.Event()

        def steps() -> None:
            while not stop.is_set():
                decoder.wake.clear()
                if not decoder.step():
                    decoder.wake.wait(30)

        def work(n: int) -> None:
            rng = np.random.default_rng(n)
            for i in range(12):
                job = decoder.branch(prompt(i), after=document, max_tokens=5, name=f"{n}.{i}")
                jobs[n, i] = job
                if rng.random() < 0.4:
                    decoder.cancel(job)
                elif rng.random() < 0.3:
                    job.future.exception(60)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        stepping = threading.Thread(target=steps)
        for thread in (*threads, stepping):
            thread.start()
        for thread in threads:
            thread.join(60)
        for job in jobs.values():
            job.future.exception(60)
        stop.set()
        decoder.wake.set()
        stepping.join(60)
        assert not stepping.is_alive()
    assert len(jobs) == 96
    for (_, i), job in jobs.items():
        if failure(job) is None:
            assert is_plain(model, answer(job), DOCUMENT[:64], prompt(i))
        else:
            assert isinstance(failure(job), NodeCancelledError)
    assert len({failure(job) is None for job in jobs.values()}) == 2


def test_a_future_cannot_be_cancelled_past_the_decoder(models: Models) -> None:
    """It could, and then the job's end was an error, and its cells were never free."""
    with decoding(models[ATTENTION]) as decoder:
        document = decoder.prefill(DOCUMENT, uses=1)
        job = decoder.branch(prompt(0), after=document, max_tokens=4)
        assert not document.future.cancel()
        decoder.step()
        assert not job.future.cancel()
        decoder.run()
        assert is_plain(models[ATTENTION], answer(job), DOCUMENT, prompt(0))


def test_fail_all_ends_everything(models: Models) -> None:
    for n_steps in (0, 1, 4, 9):
        with decoding(models[ATTENTION], policy=FairShare(32)) as decoder:
            document, jobs = scene(decoder)
            for _ in range(n_steps):
                decoder.step()
            error = RuntimeError("the end")
            done = [job for job in (document, *jobs.values()) if job.future.done()]
            decoder.fail_all(error)
            for job in (document, *jobs.values()):
                assert failure(job) is (None if job in done else error)
            assert not decoder.step()


# ── what goes wrong with one job ─────────────────────────────────────────────────────────────────────


class WrongError(Exception):
    pass


class Failing:
    """A sampler that takes the most likely token some times, and then raises."""

    def __init__(self, n_times: int, error: type[BaseException] = WrongError) -> None:
        self.n_times, self.error, self.closed = n_times, error, 0

    def sample(self, logits: npt.NDArray[np.float32]) -> int:
        self.n_times -= 1
        if self.n_times < 0:
            raise self.error
        return int(logits.argmax())

    def close(self) -> None:
        self.closed += 1


def after(n_times: int, error: type[BaseException] = WrongError) -> Callable[..., None]:
    """A callback that raises after so many calls."""
    calls = iter(range(10**6))

    def call(*_: Any) -> None:
        if next(calls) >= n_times:
            raise error

    return call


@pytest.mark.parametrize("n_times", [0, 1, 5])
@pytest.mark.parametrize("what", ["sampler", "tell", "on_begin"])
@pytest.mark.parametrize("kind", [ATTENTION, RECURRENT])
def test_what_a_branch_raises_is_its_own_failure(models: Models, kind: str, what: str, n_times: int) -> None:
    model = models[kind]
    with decoding(model) as decoder:
        document = decoder.prefill(DOCUMENT, uses=3)
        options: dict[str, Any] = {what: Failing(n_times) if what == "sampler" else after(n_times)}
        if what == "on_begin":
            options = {what: after(0)}
        jobs = [
            decoder.branch(prompt(i), after=document, max_tokens=12, uses=int(i == 1), **(options if i == 1 else {}))
            for i in range(3)
        ]
        child = decoder.branch(prompt(5), after=jobs[1], name="child")
        decoder.run()
    assert isinstance(failure(jobs[1]), WrongError)
    error = failure(child)
    assert isinstance(error, UpstreamError)
    assert (error.node, error.cause) == ("branch", failure(jobs[1]))
    for i in (0, 2):
        assert is_plain(model, answer(jobs[i]), DOCUMENT, prompt(i))
    if what == "sampler":
        assert options[what].closed == 1


@pytest.mark.parametrize("what", ["on_begin", "on_progress"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_document_raises_is_its_own_failure(models: Models, kind: str, what: str) -> None:
    """Branches that have begun from a border go on; the others fail with it."""
    model = models[kind]
    with decoding(model, policy=FairShare(40)) as decoder:
        bad = decoder.prefill(
            DOCUMENT, name="bad", uses=2, borders=[40], **{what: after(2 if what == "on_progress" else 0)}
        )
        good = decoder.prefill(DOCUMENT, name="good", uses=1)
        early = decoder.branch(prompt(0), after=bad, n_prefix=40, max_tokens=12)
        late = decoder.branch(prompt(1), after=bad, max_tokens=12)
        other = decoder.branch(prompt(2), after=good, max_tokens=12)
        decoder.run()
    assert isinstance(failure(bad), WrongError)
    assert is_plain(model, answer(other), DOCUMENT, prompt(2))
    for job in (late,) if what == "on_progress" else (early, late):
        error = failure(job)
        assert isinstance(error, UpstreamError)
        assert (error.node, error.cause) == ("bad", failure(bad))
    if what == "on_progress":
        assert is_plain(model, answer(early), DOCUMENT[:40], prompt(0))


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("what", ["sampler", "tell", "on_begin", "on_progress"])
def test_what_ends_a_program_ends_the_batch_s_jobs_and_no_more(
    models: Models, what: str, error: type[BaseException]
) -> None:
    """A callback that raised KeyboardInterrupt left its branch in a state in which each further step failed."""
    model = models[ATTENTION]
    with decoding(model, policy=FairShare(32)) as decoder:
        options: dict[str, Any] = {what: Failing(2, error) if what == "sampler" else after(2, error)}
        if what == "on_begin":
            options = {what: after(0, error)}
        first = decoder.prefill(DOCUMENT, uses=2, **({} if what != "on_progress" else options))
        job = decoder.branch(prompt(0), after=first, max_tokens=8, **(options if what != "on_progress" else {}))
        with pytest.raises(error):
            decoder.run()
        ended = first if what == "on_progress" else job
        assert isinstance(failure(ended), error)
        decoder.run()
        second = decoder.prefill(DOCUMENT[:90], uses=1)
        again = decoder.branch(prompt(1), after=second, max_tokens=8)
        decoder.release(first)
        decoder.run()
    assert is_plain(model, answer(again), DOCUMENT[:90], prompt(1))


def test_a_time_limit_ends_a_branch_that_runs(models: Models) -> None:
    with decoding(models[ATTENTION]) as decoder:
        document = decoder.prefill(DOCUMENT, uses=3)
        limited = decoder.branch(prompt(0), after=document, name="limited", max_tokens=300, time_limit=1e-9)
        generous = decoder.branch(prompt(1), after=document, max_tokens=8, time_limit=100)
        other = decoder.branch(prompt(2), after=document, max_tokens=8)
        decoder.run()
        error = failure(limited)
        assert isinstance(error, NodeTimeoutError)
        assert (error.node, error.time_limit) == ("limited", 1e-9)
        assert len(limited.answer.tokens) < 3
    for i, job in ((1, generous), (2, other)):
        assert is_plain(models[ATTENTION], answer(job), DOCUMENT, prompt(i))


def test_a_time_limit_counts_from_the_beginning_not_from_the_queue(models: Models) -> None:
    """Nor is one that is complete late: it is looked at before each batch."""
    with decoding(models[ATTENTION]) as decoder:
        document = decoder.prefill(DOCUMENT, uses=1)
        job = decoder.branch(prompt(0), after=document, max_tokens=1, time_limit=0.05)
        time.sleep(0.1)
        decoder.run()
        assert is_plain(models[ATTENTION], answer(job), DOCUMENT, prompt(0))


# ── policies of others ───────────────────────────────────────────────────────────────────────────────


class Fixed:
    """A policy that gives what it is told to."""

    def __init__(self, grants: Any) -> None:
        self.grants = grants

    def choose(self, work: Any, room: int) -> Any:
        return self.grants(work, room) if callable(self.grants) else self.grants


NONSENSE: dict[str, Any] = {
    "nobody": lambda work, room: [0] * len(work),
    "negative": lambda work, room: [-1, *[1] * (len(work) - 1)],
    "too much of one": lambda work, room: [w.n_tokens + 1 for w in work],
    "too much for the batch": lambda work, room: [w.n_tokens for w in work],
    "too few": lambda work, room: [1] * (len(work) - 1),
    "too many": lambda work, room: [1] * (len(work) + 1),
    "none at all": [],
    "halves": lambda work, room: [0.5] * len(work),
    "floats": lambda work, room: [1.0] * len(work),
    "not a number": lambda work, room: [float("nan")] * len(work),
    "words": lambda work, room: ["1"] * len(work),
    "None": lambda work, room: [None] * len(work),
}


@pytest.mark.parametrize("nonsense", NONSENSE.values(), ids=list(NONSENSE))
@pytest.mark.parametrize("n_steps", [0, 5])
def test_a_policy_that_gives_nonsense_changes_nothing(models: Models, nonsense: Any, n_steps: int) -> None:
    with decoding(models[ATTENTION], n_batch=64) as decoder:
        document = decoder.prefill(DOCUMENT, uses=2, borders=[64])
        jobs = [decoder.branch(prompt(i), after=document, n_prefix=n, max_tokens=8) for i, n in enumerate((64, None))]
        decoder.prefill(text_tokens(100), uses=0)
        for _ in range(n_steps):
            decoder.step()
        good, decoder.policy = decoder.policy, Fixed(nonsense)
        for _ in range(2):
            with pytest.raises(InvalidArgumentError, match="policy"):
                decoder.step()
        before = (decoder.ctx.cells_free(), [decoder.ctx.position(seq) for seq in range(16)])
        with pytest.raises(InvalidArgumentError, match="policy"):
            decoder.step()
        assert (decoder.ctx.cells_free(), [decoder.ctx.position(seq) for seq in range(16)]) == before
        assert not any(job.future.done() for job in jobs)
        decoder.policy = good
        decoder.run()
        for i, n in enumerate((64, 200)):
            assert is_plain(models[ATTENTION], answer(jobs[i]), DOCUMENT[:n], prompt(i))


def test_what_comes_in_while_a_policy_fails_takes_effect(models: Models) -> None:
    """It was left until the next step."""
    with decoding(models[ATTENTION]) as decoder:
        document = decoder.prefill(DOCUMENT, uses=0)

        def choose(work: list[Work], room: int) -> list[int]:
            decoder.cancel(document)
            raise WrongError

        decoder.policy = Fixed(choose)
        with pytest.raises(WrongError):
            decoder.step()
        assert isinstance(failure(document), NodeCancelledError)


@pytest.mark.parametrize("kind", KINDS)
def test_one_token_at_a_time_in_any_order_gives_the_same_answers(models: Models, kind: str) -> None:
    rng = np.random.default_rng(1)

    def choose(work: list[Work], room: int) -> list[int]:
        grants = [int(rng.integers(0, min(w.n_tokens, 5) + 1)) for w in work]
        grants[int(rng.integers(len(work)))] = 1
        return grants

    with decoding(models[kind], policy=Fixed(choose)) as decoder:
        document, jobs = scene(decoder)
        decoder.run()
        check_scene(models[kind], document, jobs, "late")


# ── what is refused ──────────────────────────────────────────────────────────────────────────────────


def test_a_context_that_is_not_empty_or_not_unified_is_refused(models: Models) -> None:
    with new_context(models[ATTENTION], 512, 4) as ctx:
        ctx.decode([1, 2], seq=2)
        with pytest.raises(InvalidArgumentError, match="sequence 2 holds"):
            BatchedDecoder(ctx)
        ctx.clear()
        assert idle(BatchedDecoder(ctx))
    with (
        new_context(models[ATTENTION], 1024, 4, kv_unified=False) as ctx,
        pytest.raises(InvalidArgumentError, match="kv_unified"),
    ):
        BatchedDecoder(ctx)


@pytest.mark.parametrize(
    "options",
    [
        {"tokens": []},
        {"tokens": [384]},
        {"tokens": [0.5]},
        {"max_tokens": 0},
        {"priority": 0},
        {"priority": -1},
        {"priority": float("nan")},
        {"priority": float("inf")},
        {"time_limit": 0},
        {"time_limit": -1},
        {"time_limit": float("nan")},
    ],
    ids=str,
)
def test_branches_that_make_no_sense_are_refused(models: Models, options: dict[str, Any]) -> None:
    """A priority of 0 made each further step fail."""
    with decoding(models[ATTENTION]) as decoder:
        document = decoder.prefill(DOCUMENT, uses=1)
        with pytest.raises(InvalidArgumentError):
            decoder.branch(**{"tokens": [1], "after": document, **options})
        decoder.run()
        decoder.release(document)


def test_documents_that_make_no_sense_are_refused(models: Models) -> None:
    with decoding(models[ATTENTION]) as decoder:
        for options in ({"tokens": []}, {"tokens": [-1]}, {"borders": [0]}, {"borders": [201]}, {"borders": [-1]}):
            with pytest.raises(InvalidArgumentError):
                decoder.prefill(**{"tokens": DOCUMENT, **options})
        assert not decoder.step()


def test_a_part_of_a_branch_is_refused(models: Models) -> None:
    """Taken over by its one child, it was the whole, without a word."""
    with decoding(models[ATTENTION]) as decoder:
        document = decoder.prefill(DOCUMENT, uses=1)
        parent = decoder.branch(prompt(0), after=document, max_tokens=4, uses=1)
        with pytest.raises(InvalidArgumentError, match="n_prefix"):
            decoder.branch([1], after=parent, n_prefix=1)
        decoder.run()
        decoder.release(parent)


def test_what_was_let_go_of_cannot_be_gone_on_from(models: Models) -> None:
    with decoding(models[ATTENTION]) as decoder:
        document = decoder.prefill(DOCUMENT, name="document", uses=1)
        first = decoder.branch(prompt(0), after=document, max_tokens=4)
        second = decoder.branch(prompt(1), after=document, max_tokens=4)
        decoder.run()
        assert is_plain(models[ATTENTION], answer(first), DOCUMENT, prompt(0))
        with pytest.raises(InvalidArgumentError, match="document was let go of"):
            second.future.result()


@pytest.mark.parametrize("kind", [SLIDING, RECURRENT, HYBRID])
def test_where_a_cache_cannot_be_cut_only_borders_will_do(models: Models, kind: str) -> None:
    with decoding(models[kind]) as decoder:
        document = decoder.prefill(DOCUMENT, uses=2, borders=[64])
        wrong = decoder.branch(prompt(0), after=document, n_prefix=63, max_tokens=4)
        right = decoder.branch(prompt(0), after=document, n_prefix=64, max_tokens=4)
        decoder.run()
        assert isinstance(failure(wrong), PartialRemovalError)
        assert is_plain(models[kind], answer(right), DOCUMENT[:64], prompt(0))


def test_a_step_inside_a_step_is_an_error_and_no_deadlock(models: Models) -> None:
    with decoding(models[ATTENTION]) as decoder:
        document = decoder.prefill(DOCUMENT, uses=2)
        caught: list[BaseException] = []

        def again(*_: Any) -> None:
            try:
                decoder.step()
            except ReentrantCallError as error:
                caught.append(error)

        job = decoder.branch(prompt(0), after=document, max_tokens=3, on_begin=again)
        waiting = decoder.branch(prompt(0), after=document, max_tokens=3)
        waiting.future.add_done_callback(again)
        worker = threading.Thread(target=lambda: (decoder.cancel(waiting), decoder.run()), daemon=True)
        worker.start()
        worker.join(60)
        assert not worker.is_alive()
        assert len(caught) == 2
        assert is_plain(models[ATTENTION], answer(job), DOCUMENT, prompt(0))


def test_a_release_frees_what_nobody_goes_on_from(models: Models) -> None:
    for kind in KINDS:
        with decoding(models[kind]) as decoder:
            document = decoder.prefill(DOCUMENT, uses=2, borders=[64])
            decoder.run()
            decoder.release(document)
            assert document._seq is not None
            decoder.release(document)
            assert idle(decoder)
        with decoding(models[kind]) as decoder:  # before it has begun
            document = decoder.prefill(DOCUMENT, uses=1)
            decoder.release(document)
            decoder.run()
            assert document.watermark == 200


def test_a_context_that_was_closed_fails_what_is_running(models: Models) -> None:
    from swarmkv_ll.errors import ClosedError

    ctx = new_context(models[ATTENTION], 512, 4)
    decoder = BatchedDecoder(ctx)
    document = decoder.prefill(DOCUMENT, uses=1, borders=[10])
    decoder.step()
    ctx.close()
    decoder.run()
    assert isinstance(failure(document), ClosedError)
    assert sorted(decoder._free) == list(range(4))


# ── Ctrl-C, and many times over ──────────────────────────────────────────────────────────────────────

INTERRUPT = """
    import os, signal, sys, threading
    from helpers import *
    from swarmkv_ll import Model, Sampler
    from swarmkv_ll.batching import BatchedDecoder
    from swarmkv_ll.policy import FairShare
    model, ready = Model(sys.argv[1]), []
    with new_context(model, 16384, 4, n_batch=16384, n_ubatch=512) as ctx:
        decoder = BatchedDecoder(ctx, FairShare(16384))
        short = decoder.prefill(text_tokens(100), uses=3)
        held = decoder.branch([1, 2, 3], after=short, max_tokens=3)
        decoder.run()
        before = ctx.cells_free()
        long = decoder.prefill(text_tokens(7000), uses=1, on_begin=lambda _: ready.append(threading.Timer(
            float(sys.argv[2]), os.kill, (os.getpid(), signal.SIGINT))) or ready[-1].start())
        after = decoder.branch([1], after=long)
        try:
            decoder.run()
            print("not interrupted")
        except KeyboardInterrupt:
            print(repr(long.future.exception()), len(decoder._running))
        decoder.run()
        print(type(after.future.exception()).__name__, ctx.cells_free() == before, len(decoder._free))
        jobs = [decoder.branch([7, i], after=short, max_tokens=5) for i in (1, 2)]
        decoder.run()
        for i, job in enumerate(jobs, 1):
            with new_context(model, 1024) as other:
                other.decode([*text_tokens(100), 7, i])
                print(job.answer.tokens == list(other.generate(Sampler(), 5)))
        print(ctx.cells_free() == ctx.n_ctx, len(decoder._free))
"""


@pytest.mark.parametrize("kind", [ATTENTION, HYBRID])
def test_ctrl_c_in_a_long_batch_fails_its_jobs_and_leaves_the_rest(files: Files, kind: str) -> None:
    printed = run_ok(INTERRUPT, files[kind], 0.1)
    assert printed.splitlines() == [
        "KeyboardInterrupt() 0",
        "UpstreamError True 3",
        "True",
        "True",
        "True 4",
    ]


GROWTH = """
    import sys
    from helpers import *
    from swarmkv_ll import Model
    from swarmkv_ll.batching import BatchedDecoder
    model = Model(sys.argv[1])
    ctx = new_context(model, 1024, 8)
    decoder, kept = BatchedDecoder(ctx), []

    def act():
        document = decoder.prefill(text_tokens(100), uses=3, borders=[40])
        jobs = [decoder.branch([i, 1], after=document, n_prefix=n, max_tokens=4) for i, n in enumerate((40, None, None))]
        decoder.step()
        decoder.cancel(jobs[2])
        decoder.run()
        decoder.steps.clear()
        if len(sys.argv) > 2:
            kept.append(bytearray(b"x" * 65536))

    for _ in range(40):
        act()
    growth = []
    for _ in range(2):
        before = resident_bytes()
        for _ in range(100 if len(sys.argv) == 2 else 20):
            act()
        growth.append(resident_bytes() - before)
    print(min(growth), len(decoder._free), ctx.cells_free())
"""


def test_memory_does_not_grow(files: Files) -> None:
    growth, *rest = map(int, run_ok(GROWTH, files[ATTENTION]).split())
    assert growth < 1 << 20
    assert rest == [8, 1024]


def test_growth_would_be_seen(files: Files) -> None:
    assert int(run_ok(GROWTH, files[ATTENTION], "leak").split()[0]) > 1 << 20


# ── any schedule ─────────────────────────────────────────────────────────────────────────────────────

ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["prefill", "branch", "branch", "cancel", "release", "step", "step", "step"]),
        st.integers(0, 999),
        st.integers(0, 999),
    ),
    min_size=5,
    max_size=40,
)


@pytest.mark.parametrize("kind", KINDS)
def test_any_schedule_leaks_nothing_and_answers_right(models: Models, kind: str) -> None:
    model = models[kind]

    @settings(max_examples=25, deadline=None)
    @given(actions=ACTIONS, n_seq_max=st.integers(4, 9), chunk=st.sampled_from([8, 32, 128]))
    def check(actions: list[tuple[str, int, int]], n_seq_max: int, chunk: int) -> None:
        with decoding(model, 512, n_seq_max, FairShare(chunk)) as decoder:
            jobs: list[Prefix | Branch] = []
            texts: dict[Branch, tuple[Any, ...]] = {}
            left: dict[Job, int] = {}  # how many may still go on from it
            cancelled = set()
            for what, a, b in actions:
                if what == "prefill":
                    n = (20, 70, 100)[a % 3]
                    job = decoder.prefill(
                        DOCUMENT[:n], name=f"{len(jobs)}", uses=b % 3, borders=[20, n // 2][: a % 2 + 1]
                    )
                    left[job] = b % 3
                    jobs.append(job)
                elif what == "branch" and (parents := [job for job in jobs if left[job]]):
                    parent = parents[a % len(parents)]
                    left[parent] -= 1
                    n_prefix = 20 if isinstance(parent, Prefix) and a % 2 else None
                    own = prompt(b % 6)
                    before = (DOCUMENT[: n_prefix or len(parent._tokens)],) if isinstance(parent, Prefix) else (parent,)
                    job = decoder.branch(
                        own, after=parent, n_prefix=n_prefix, name=f"{len(jobs)}", max_tokens=1 + b % 6, uses=b % 2
                    )
                    left[job] = b % 2
                    texts[job] = (*before, own)
                    jobs.append(job)
                elif what == "cancel" and jobs:
                    if not jobs[a % len(jobs)].future.done():
                        cancelled.add(jobs[a % len(jobs)])
                    decoder.cancel(jobs[a % len(jobs)])
                elif what == "release" and (held := [job for job in jobs if left[job]]):
                    left[held[a % len(held)]] -= 1
                    decoder.release(held[a % len(held)])
                elif what == "step":
                    decoder.step()
            # Who is never gone on from is let go of before the rest runs: nothing then waits for cells for ever.
            for job in jobs:
                for _ in range(left[job]):
                    decoder.release(job)
            decoder.run()
            for job in jobs:
                error = failure(job)
                assert isinstance(error, NodeCancelledError) == (job in cancelled)
                if isinstance(error, UpstreamError):
                    roots = [other for other in jobs if failure(other) is error.cause]
                    assert [error.node] == [root.name for root in roots]
                    assert not isinstance(error.cause, UpstreamError)
                elif isinstance(error, InvalidArgumentError):
                    assert "sequences" in str(error)  # others were held for those to come
                else:
                    assert error is None or isinstance(error, NodeCancelledError | ContextFullError)
                if error is None and isinstance(job, Branch):
                    assert is_plain(model, answer(job), *text_of(job, texts))

    def text_of(job: Branch, texts: dict[Branch, tuple[Any, ...]]) -> list[Any]:
        first, own = texts[job]
        if isinstance(first, Branch):  # the pending token was left out
            return [*text_of(first, texts), first.answer.tokens[:-1], own]
        return [first, own]

    check()
