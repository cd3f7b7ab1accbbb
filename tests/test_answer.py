"""An answer as it grows, and documents, prompts and replies as turns of a chat template."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from helpers import Models, new_context
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import BOS, EOS, IM_END, IM_START

from swarmkv_ll import Sampler
from swarmkv_ll.answer import Answer
from swarmkv_ll.batching import BatchedDecoder
from swarmkv_ll.chat import Chat
from swarmkv_ll.errors import ClosedError

NOTHING = np.zeros(384, np.float32)


class WrongError(Exception):
    pass


class Dictated:
    """A sampler that says what it was told; a byte's token is its value."""

    def __init__(self, tokens: Any) -> None:
        self.tokens, self.closed = iter(tokens), 0

    def sample(self, _: npt.NDArray[np.float32]) -> int:
        return int(next(self.tokens))

    def close(self) -> None:
        self.closed += 1


# ── an answer ────────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=60, deadline=None)
@given(said=st.text(min_size=1, max_size=12), cut=st.integers(0, 40))
def test_text_grows_in_whole_characters(models: Models, said: str, cut: int) -> None:
    """However it is cut; half a character at the end is told as one that is not known."""
    data = said.encode()[: cut or None]
    told: list[str] = []
    sampler = Dictated(data)
    answer = Answer(models["llama"], sampler, len(data), told.append)  # type: ignore[arg-type]
    for i, byte in enumerate(data):
        assert answer.text == "".join(told) == data[:i].decode(errors="ignore")
        token = answer.step(NOTHING)
        assert token == (byte if i + 1 < len(data) else None)
    assert answer.tokens == list(data)
    assert answer.text == "".join(told) == data.decode(errors="replace")
    assert all(told)
    assert len(answer.times) == len(data)
    assert answer.times == sorted(answer.times)
    assert not answer.finished
    assert sampler.closed == 1


def test_bytes_that_are_no_text_are_told_and_do_not_stop_it(models: Models) -> None:
    told: list[str] = []
    answer = Answer(models["llama"], Dictated(b"a\xff\xe2b\xe2"), 5, told.append)  # type: ignore[arg-type]
    while answer.step(NOTHING) is not None:
        pass
    assert answer.text == "".join(told) == "a\ufffd\ufffdb\ufffd"


@pytest.mark.parametrize("end", [EOS, IM_END])
@pytest.mark.parametrize("n", [0, 3])
def test_the_token_that_ends_an_answer_is_not_in_it(models: Models, end: int, n: int) -> None:
    told: list[str] = []
    sampler = Dictated([*b"abc"[:n], end])
    answer = Answer(models["llama"], sampler, n + 1, told.append)  # type: ignore[arg-type]
    given = [answer.step(NOTHING) for _ in range(n + 1)]
    assert given == [*b"abc"[:n], None]
    assert (answer.tokens, answer.text, "".join(told)) == (list(b"abc"[:n]), "abc"[:n], "abc"[:n])
    assert answer.finished
    assert len(answer.times) == n + 1
    assert sampler.closed == 1


def test_close_tells_the_rest_once_and_lets_go_of_the_sampler(models: Models) -> None:
    told: list[str] = []
    sampler = Sampler()
    answer = Answer(models["llama"], sampler, 9, told.append)
    answer._sampler = Dictated("a€".encode()[:3])  # type: ignore[assignment]
    for _ in range(3):
        answer.step(NOTHING)
    answer._sampler = sampler
    assert told == ["a"]
    answer.close()
    answer.close()
    assert told == ["a", "\ufffd"]
    assert answer.text == "a\ufffd"
    with pytest.raises(ClosedError):
        sampler.sample(NOTHING)


def test_a_sampler_is_let_go_of_though_telling_fails(models: Models) -> None:
    """It was not, and a second close told the rest again."""

    def tell(text: str) -> None:
        if text == "\ufffd":
            raise WrongError

    sampler = Dictated("€".encode()[:2])
    answer = Answer(models["llama"], sampler, 9, tell)  # type: ignore[arg-type]
    answer.step(NOTHING)
    answer.step(NOTHING)
    with pytest.raises(WrongError):
        answer.close()
    assert sampler.closed == 1
    answer.close()
    assert answer.text == "\ufffd"


# ── a chat ───────────────────────────────────────────────────────────────────────────────────────────

DOCUMENT = "alice has a red car.\nbob has a blue boat.  "
TURNS = (" what has alice?\n", "  and of which colour is the boat, € or ß?\n")


def conversation(document: str, first: str, said: str, second: str) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": f"{document.rstrip()}\n\n{first.strip()}"},
        {"role": "assistant", "content": said},
        {"role": "user", "content": second.strip()},
    ]


@pytest.mark.parametrize("name", ["llama", "bos"])
@pytest.mark.parametrize("said", ["a car.", "the red one, i think\nor €", ""])
def test_a_second_turn_is_the_template_s_own(models: Models, name: str, said: str) -> None:
    """Document, prompt, answer and reply make up the conversation as the template renders it, to the token."""
    model = models[name]
    chat = Chat(model)
    parts = [
        chat.document(DOCUMENT),
        chat.prompt(TURNS[0]),
        model.tokenize(said, add_special=False, parse_special=False) if said else np.empty(0, np.int32),
        chat.reply(TURNS[1]),
    ]
    tokens = np.concatenate(parts)
    rendered = model.apply_chat_template(conversation(DOCUMENT, TURNS[0], said, TURNS[1]))
    assert model.detokenize(tokens, remove_special=True) == rendered
    assert (tokens[0] == BOS) == (name == "bos")
    assert tokens.tolist().count(BOS) == (name == "bos")
    assert [t for t in tokens.tolist() if t in (IM_START, IM_END)] == [IM_START, IM_END] * 3 + [IM_START]
    first = model.apply_chat_template(conversation(DOCUMENT, TURNS[0], said, "")[:1])
    assert model.detokenize(np.concatenate(parts[:2]), remove_special=True) == first


def test_a_real_second_turn_goes_on_from_a_branch(models: Models) -> None:
    """The cache holds the whole conversation: the reply's answer is that of the conversation, decoded at once."""
    model = models["llama"]
    chat = Chat(model)
    with new_context(model, 1024, 4) as ctx:
        decoder = BatchedDecoder(ctx)
        document = decoder.prefill(chat.document(DOCUMENT), uses=1)
        first = decoder.branch(chat.prompt(TURNS[0]), after=document, max_tokens=6, uses=1)
        decoder.run()
        second = decoder.branch([first.pending, *chat.reply(TURNS[1])], after=first, max_tokens=6)
        decoder.run()
        text = [chat.document(DOCUMENT), chat.prompt(TURNS[0]), first.answer.tokens, chat.reply(TURNS[1])]
        rendered = model.apply_chat_template(conversation(DOCUMENT, TURNS[0], "<answer>", TURNS[1]))
        assert model.detokenize(np.concatenate(text[:2])) == rendered.split("<answer>")[0]
        assert model.detokenize(text[3]) == rendered.split("<answer>")[1]
    with new_context(model, 1024) as ctx:
        ctx.decode(np.concatenate(text))
        assert second.answer.tokens == list(ctx.generate(Sampler(), 6))


def test_control_tokens_in_texts_stay_text(models: Models) -> None:
    chat = Chat(models["llama"])
    for tokens, n in (
        (chat.document("a <|im_end|> b"), [IM_START]),
        (chat.prompt("<|im_start|>system"), [IM_END, IM_START]),
        (chat.reply("<|im_end|>"), [IM_END, IM_START, IM_END, IM_START]),
    ):
        assert [t for t in tokens.tolist() if t in (IM_START, IM_END)] == n
