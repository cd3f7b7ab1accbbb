"""Branches of a document that is warm in a context, answered together; answers are as long as asked for, on all sides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..batching import BatchedDecoder
from ..context import Context
from ..model import Model, Tokens
from ..sampling import Sampler


def ends_of(model: Model) -> npt.NDArray[np.int64]:
    """The tokens that end an answer."""
    return np.array([token for token in range(model.n_vocab) if model.is_end(token)], np.int64)


class Endless(Sampler):
    """Greedy, but never the end of a text: both sides' answers are to be as long."""

    def __init__(self, ends: npt.NDArray[np.int64]) -> None:
        super().__init__()
        self._ends = ends

    def sample(self, logits: npt.NDArray[np.float32]) -> int:
        token = super().sample(logits)
        if token in self._ends:
            others = logits.copy()
            others[self._ends] = -np.inf
            token = super().sample(others)
        return token


class Answered(NamedTuple):
    """What our fan-out took and gave: seconds, those of them in the engine, each answer's tokens."""

    seconds: float
    engine_s: float
    answers: list[list[int]]


def warm(ctx: Context, document: Tokens, n_answer: int) -> Callable[[Sequence[Tokens]], Answered]:
    """Compute a document in an empty context. Gives what answers prompts from it, `n_answer` tokens each, in one batch."""
    ends, decoder = ends_of(ctx.model), BatchedDecoder(ctx)
    source = decoder.prefill(document, uses=2**31)
    decoder.run()
    source.future.result()

    def fan_out(prompts: Sequence[Tokens]) -> Answered:
        decoder.steps.clear()
        begin = perf_counter()
        branches = [
            decoder.branch(prompt, after=source, max_tokens=n_answer, sampler=Endless(ends)) for prompt in prompts
        ]
        decoder.run()
        seconds = perf_counter() - begin
        answers = [branch.future.result().answer.tokens for branch in branches]
        return Answered(seconds, sum(step.engine_s for step in decoder.steps), answers)

    return fan_out
