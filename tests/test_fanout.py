"""One document, N prompts: three strategies, the same answers, and nothing left behind."""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import numpy as np
import pytest
from helpers import KINDS, Models, new_context, text_tokens
from tiny_models import BOS, IM_END, IM_START

from swarmkv_ll import Arena, Context, Model, Sampler, fan_out
from swarmkv_ll.errors import ContextBudgetError, InvalidArgumentError
from swarmkv_ll.fanout import HEADROOM, STRATEGIES, FanOut, chat_tokens, prefill

DOCUMENT = "the kv cache holds one row of keys and one row of values for each token that was read. " * 3
PROMPTS = ["what is it?", "how many rows are there for each token, and why so?", "who", "and then ", "no."]


def run(model: Model, prompts: Any = PROMPTS, **options: Any) -> FanOut:
    return fan_out(model, DOCUMENT, prompts, **{"max_tokens": 8, "n_threads": 1, **options})


def answers(result: FanOut) -> list[list[int]]:
    return [branch.tokens for branch in result.branches]


# ── the same answers ─────────────────────────────────────────────────────────────────────────────────


def by_hand(model: Model, prompt: str, max_tokens: int = 8) -> list[int]:
    with new_context(model, 1024, n_batch=512, n_ubatch=512) as ctx:
        prefill(ctx, model.tokenize(DOCUMENT, add_special=True, parse_special=False))
        ctx.decode(model.tokenize(prompt, add_special=False, parse_special=False))
        return list(ctx.generate(Sampler(), max_tokens))


@pytest.mark.parametrize("kind", KINDS)
def test_three_strategies_one_answer(models: Models, kind: str) -> None:
    """Token for token where batches are split alike; and the answers are those of plain decoding."""
    results = {strategy: run(models[kind], strategy=strategy, n_parallel=1) for strategy in STRATEGIES}
    expected = [by_hand(models[kind], prompt) for prompt in PROMPTS]
    assert len({tuple(tokens) for tokens in expected}) > 1
    for strategy, result in results.items():
        assert answers(result) == expected, strategy
        assert [branch.prompt for branch in result.branches] == PROMPTS
        assert [branch.text for branch in result.branches] == [b.text for b in results["shared"].branches]


@pytest.mark.requires_model
def test_three_strategies_one_answer_of_the_default_model(default_model: Model) -> None:
    document = "Alice has a red car. Bob has a blue boat. Carol has a green house. " * 4
    prompts = ["What does Alice have?", "What colour is the boat?"]
    results = [
        fan_out(default_model, document, prompts, max_tokens=6, strategy=strategy, n_parallel=1, chat=True)
        for strategy in STRATEGIES
    ]
    assert answers(results[0]) == answers(results[1]) == answers(results[2])
    first, second = answers(results[0])
    assert first != second
    assert all(branch.text for branch in results[0].branches)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_parallel", [2, 3, 5, 100, None])
def test_waves_and_batches_choose_what_is_likely(models: Models, kind: str, n_parallel: int | None) -> None:
    """A batch of another shape rounds differently: each token is the most likely one, within rounding."""
    model = models[kind]
    result = run(model, strategy="shared", n_parallel=n_parallel)
    for branch in result.branches:
        assert len(branch.tokens) == 8
        text = [
            model.tokenize(DOCUMENT, add_special=True, parse_special=False),
            model.tokenize(branch.prompt, add_special=False, parse_special=False),
        ]
        with new_context(model, 1024) as ctx:
            ctx.decode(np.concatenate(text))
            first = ctx.logits().copy()
            ctx.decode(branch.tokens, logits="all")
            rows = [first, *ctx.logits()[:-1]]
        for row, token in zip(rows, branch.tokens, strict=True):
            assert row.max() - row[token] < 0.05
        assert not all(row.max() - row[0] < 0.05 for row in rows)  # a control: not any token would do


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_parallel", [1, 3, 100])
def test_contexts_in_threads_answer_alike(models: Models, kind: str, n_parallel: int) -> None:
    expected = run(models[kind], strategy="reprefill")
    for _ in range(2):
        assert answers(run(models[kind], strategy="snapshot", n_parallel=n_parallel)) == answers(expected)


def test_a_seed_gives_the_same_draws_whatever_the_strategy(models: Models) -> None:
    def drawn(seed: int, strategy: Any = "shared") -> list[list[int]]:
        sampler = Sampler(1.0, top_k=40, seed=seed)
        return answers(run(models["llama"], strategy=strategy, n_parallel=1, sampler=sampler))

    expected = drawn(1)
    assert drawn(1) == expected
    assert drawn(1, "snapshot") == expected
    assert drawn(1, "reprefill") == expected
    assert drawn(2) != expected
    assert expected != answers(run(models["llama"]))


def test_equal_prompts_are_drawn_differently(models: Models) -> None:
    first, second = answers(run(models["llama"], ["why", "why"], n_parallel=1, sampler=Sampler(1.0, seed=1)))
    assert first != second
    first, second = answers(run(models["llama"], ["why", "why"], n_parallel=1))
    assert first == second


def test_the_sampler_given_is_left_as_it_was(models: Models) -> None:
    sampler = Sampler(1.0, seed=1)
    first = answers(run(models["llama"], n_parallel=1, sampler=sampler))
    assert answers(run(models["llama"], n_parallel=1, sampler=sampler)) == first


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_answers_end_where_the_model_ends_them(models: Models, strategy: Any) -> None:
    model = models["ends"]
    result = run(model, strategy=strategy, max_tokens=300)
    assert [branch.finished for branch in result.branches] == [len(branch.tokens) < 300 for branch in result.branches]
    assert any(branch.finished for branch in result.branches)
    assert not any(model.is_end(token) for tokens in answers(result) for token in tokens)
    one = run(model, strategy=strategy, max_tokens=1)
    assert [len(tokens) for tokens in answers(one)] == [1] * len(PROMPTS)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_prompts_and_documents_as_tokens(models: Models, strategy: Any) -> None:
    model = models["bos"]
    as_text = run(model, strategy=strategy, n_parallel=1)
    document = model.tokenize(DOCUMENT, add_special=True, parse_special=False)
    assert document[0] == BOS
    assert as_text.document_tokens == len(document)
    prompts = [model.tokenize(prompt, add_special=False, parse_special=False) for prompt in PROMPTS]
    as_tokens = fan_out(model, document, prompts, max_tokens=8, strategy=strategy, n_parallel=1, n_threads=1)
    assert answers(as_tokens) == answers(as_text)
    assert [branch.prompt for branch in as_tokens.branches] == PROMPTS
    with_bos = fan_out(model, document, [[BOS, *p] for p in prompts], max_tokens=8, strategy=strategy, n_threads=1)
    assert answers(with_bos) != answers(as_text)  # a control: a special token slipped in is another answer


# ── text as it comes ─────────────────────────────────────────────────────────────────────────────────


class Dictated:
    """A sampler that says what it was told, byte by byte (a byte's token is its value)."""

    def __init__(self, text: bytes) -> None:
        self.text, self.at = text, 0

    def for_branch(self, _index: int) -> Dictated:
        return Dictated(self.text)

    def sample(self, _: Any) -> int:
        self.at += 1
        return self.text[self.at - 1]

    def close(self) -> None:
        pass


def test_branches_of_one_prompt_draw_differently(models: Models) -> None:
    for sampler in (Sampler(1.0, seed=7), Sampler(1.0)):
        drawn = answers(run(models["llama"], ["same"] * 3, sampler=sampler, max_tokens=12))
        assert len({tuple(tokens) for tokens in drawn}) == 3


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_text_comes_in_whole_characters(models: Models, strategy: Any) -> None:
    said = "né€👩‍👩‍👧!"
    pieces: list[tuple[int, str]] = []
    result = run(
        models["llama"],
        strategy=strategy,
        max_tokens=len(said.encode()),
        sampler=Dictated(said.encode()),
        on_token=lambda index, text: pieces.append((index, text)),
    )
    assert [branch.text for branch in result.branches] == [said] * len(PROMPTS)
    for index in range(len(PROMPTS)):
        assert [text for i, text in pieces if i == index] == list(said)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_half_a_character_at_the_end_is_told_too(models: Models, strategy: Any) -> None:
    pieces: list[str] = []
    result = run(
        models["llama"],
        ["one"],
        strategy=strategy,
        max_tokens=3,
        sampler=Dictated("a€".encode()),
        on_token=lambda _, text: pieces.append(text),
    )
    assert result.branches[0].text == "".join(pieces) == "a\ufffd"


@pytest.mark.parametrize(
    ("strategy", "n_parallel"), [("shared", 3), ("snapshot", 3), ("snapshot", 1), ("reprefill", None)]
)
def test_callbacks_tell_all_of_it_one_at_a_time(models: Models, strategy: Any, n_parallel: int | None) -> None:
    told = [""] * len(PROMPTS)
    inside = threading.Lock()
    progress: list[tuple[int, int]] = []

    def on_token(index: int, text: str) -> None:
        assert inside.acquire(blocking=False)
        told[index] += text
        inside.release()

    result = fan_out(
        models["llama"],
        text_tokens(1100),
        PROMPTS,
        max_tokens=20,
        strategy=strategy,
        n_parallel=n_parallel,
        on_token=on_token,
        on_prefill=lambda done, total: progress.append((done, total)),
        n_threads=1,
    )
    assert told == [branch.text for branch in result.branches]
    assert all(told)
    once = [(512, 1100), (1024, 1100), (1100, 1100)]
    assert progress == once * (len(PROMPTS) if strategy == "reprefill" else 1)


# ── a chat ───────────────────────────────────────────────────────────────────────────────────────────


def test_a_chat_is_the_template_cut_between_document_and_prompt(models: Models) -> None:
    for name in ("llama", "bos"):
        model = models[name]
        prefix, (question,) = chat_tokens(model, DOCUMENT, ["why?"])
        text = model.apply_chat_template([{"role": "user", "content": DOCUMENT.rstrip() + "\n\nwhy?"}])
        assert model.detokenize([*prefix, *question], remove_special=True) == text
        assert (prefix[0] == BOS) == (name == "bos")
        assert [t for t in (*prefix, *question) if t in (IM_START, IM_END)] == [IM_START, IM_END, IM_START]


def test_control_tokens_in_the_texts_stay_text(models: Models) -> None:
    model = models["llama"]
    prefix, (question,) = chat_tokens(model, "a <|im_end|> b", ["<|im_start|>system"])
    assert prefix.tolist().count(IM_END) == 0
    assert question.tolist().count(IM_START) == 1
    result = run(model, ["<|im_end|>"], n_parallel=1)
    assert answers(result) != answers(run(model, [[IM_END]], n_parallel=1))


def test_chat_needs_text(models: Models) -> None:
    for document, prompts in (([1, 2], ["a"]), ("a", [[1, 2]])):
        with pytest.raises(InvalidArgumentError, match="chat"):
            fan_out(models["llama"], document, prompts, chat=True)


# ── what is refused, before anything is made ─────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "fastest"},
        {"max_tokens": 0},
        {"max_tokens": -1},
        {"n_parallel": 0},
        {"prompts": []},
        {"prompts": ["a", ""]},
        {"prompts": "one prompt instead of a list"},
        {"prompts": [[384]]},
        {"prompts": [[1.5]]},
        {"document": ""},
        {"document": []},
        {"document": [-1]},
    ],
    ids=str,
)
def test_bad_arguments_are_refused(models: Models, made: list[Any], options: dict[str, Any]) -> None:
    arguments = {"document": DOCUMENT, "prompts": PROMPTS, **options}
    with pytest.raises(InvalidArgumentError):
        fan_out(models["llama"], **arguments)
    assert made == []


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_budget_is_checked_first(models: Models, made: list[Any], strategy: Any) -> None:
    model = models["llama"]
    prompts = [text_tokens(10), text_tokens(30), text_tokens(20)]
    exact = 100 + 30 + 8 + HEADROOM
    for n_ctx in (exact - 1, 1):
        with pytest.raises(ContextBudgetError) as caught:
            fan_out(model, text_tokens(100), prompts, max_tokens=8, strategy=strategy, n_ctx=n_ctx)
        error = caught.value
        assert (error.prefix_tokens, error.branch_tokens, error.headroom, error.n_ctx) == (100, 38, HEADROOM, n_ctx)
    with pytest.raises(ContextBudgetError) as caught:
        fan_out(model, text_tokens(16384 - 38 - HEADROOM + 1), prompts, max_tokens=8, strategy=strategy)
    assert caught.value.n_ctx == model.n_ctx_train
    with pytest.raises(InvalidArgumentError, match="n_ctx should be 1 to 16384, what the model was trained on"):
        fan_out(model, text_tokens(100), prompts, max_tokens=8, strategy=strategy, n_ctx=16385)
    assert made == []
    result = fan_out(model, text_tokens(100), prompts, max_tokens=8, strategy=strategy, n_ctx=exact, n_threads=1)
    assert [len(tokens) for tokens in answers(result)] == [8, 8, 8]


# ── what it reports, and leaves behind ───────────────────────────────────────────────────────────────


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_report(models: Models, strategy: Any) -> None:
    result = run(models["llama"], strategy=strategy)
    data = json.loads(json.dumps(result.to_dict()))
    names = {"model", "strategy", "document_tokens", "prefill_ms", "snapshot_bytes", "end_to_end_ms", "branches"}
    assert data.keys() >= names
    assert (data["model"], data["strategy"]) == ("llama.gguf", strategy)
    assert data["document_tokens"] == len(models["llama"].tokenize(DOCUMENT, add_special=True, parse_special=False))
    assert (data["snapshot_bytes"] > 0) == (strategy == "snapshot")
    assert 0 < data["prefill_ms"] <= data["end_to_end_ms"]
    for branch, prompt in zip(data["branches"], PROMPTS, strict=True):
        assert branch.keys() >= {"prompt", "text", "tokens", "fork_ms", "restore_ms", "first_token_ms", "decode_ms"}
        assert branch["prompt"] == prompt
        assert 0 <= branch["fork_ms"] + branch["restore_ms"] <= branch["first_token_ms"]
        assert branch["decode_ms"] >= 0


def test_a_context_that_holds_the_document_needs_no_restore(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    from swarmkv_ll import Snapshot

    restores: list[Any] = []
    true = Snapshot.restore

    def restore(self: Snapshot, ctx: Context, seq: int = 0) -> int:
        restores.append(ctx)
        return true(self, ctx, seq)

    monkeypatch.setattr(Snapshot, "restore", restore)
    run(models["llama"], strategy="snapshot", n_parallel=1)
    assert restores == []
    run(models["llama"], strategy="snapshot", n_parallel=2)
    assert len(restores) <= 1  # the second context, once
    for kind in KINDS[1:]:
        restores.clear()
        run(models[kind], strategy="snapshot", n_parallel=1)
        assert len(restores) == len(PROMPTS)


class StopError(Exception):
    pass


@pytest.mark.parametrize("error", [StopError, KeyboardInterrupt])
@pytest.mark.parametrize("when", ["prefill", "token"])
@pytest.mark.parametrize(
    ("strategy", "n_parallel"), [("shared", 2), ("snapshot", 1), ("snapshot", 3), ("reprefill", None)]
)
def test_a_callback_that_raises_leaves_nothing_behind(
    models: Models, made: list[Any], strategy: Any, n_parallel: int | None, when: str, error: type[BaseException]
) -> None:
    calls: Iterator[int] = iter(range(1000))

    def stop(*_: Any) -> None:
        if next(calls) == (10 if when == "token" else 0):
            raise error

    for _ in range(2):
        calls = iter(range(1000))
        with pytest.raises(error):
            run(models["llama"], strategy=strategy, n_parallel=n_parallel, **{f"on_{when}": stop})
        assert made
        assert all(thing.closed for thing in made)
    assert not [thread for thread in threading.enumerate() if "ThreadPool" in thread.name]
    expected = run(models["llama"], strategy="reprefill")
    assert answers(run(models["llama"], strategy=strategy, n_parallel=1)) == answers(expected)


@pytest.mark.parametrize(
    ("strategy", "n_parallel"), [("shared", 2), ("snapshot", 1), ("snapshot", 3), ("reprefill", None)]
)
def test_all_is_closed_afterwards(models: Models, made: list[Any], strategy: Any, n_parallel: int | None) -> None:
    run(models["llama"], strategy=strategy, n_parallel=n_parallel)
    n_contexts = sum(isinstance(thing, Context) for thing in made)
    assert n_contexts == (n_parallel if strategy == "snapshot" else 1)
    assert sum(isinstance(thing, Arena) for thing in made) == (strategy == "snapshot")
    assert all(thing.closed for thing in made)
    made.clear()
    gc.collect()
    live = [type(thing).__name__ for thing in gc.get_objects() if isinstance(thing, Context | Arena)]
    assert {name: len(list(group)) for name, group in groupby(sorted(live))} == {}
