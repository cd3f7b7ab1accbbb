"""A branch's answer as it grows: the next token chosen, whole characters told, the moment of each token kept."""

from __future__ import annotations

import codecs
from collections.abc import Callable
from time import perf_counter

import numpy as np
import numpy.typing as npt

from .model import Model
from .sampling import Sampler

Tell = Callable[[str], None]


class Answer:
    """One branch's answer.

    Parameters
    ----------
    model : Model
    sampler : Sampler
        The branch's own; closed when the answer is complete.
    max_tokens : int
        Longest answer.
    tell : callable, optional
        ``tell(text)`` as it grows, in whole characters.

    Attributes
    ----------
    tokens : list of int
    text : str
    finished : bool
        Whether the model ended the answer itself.
    times : list of float
        `perf_counter` when each token was chosen; one more than `tokens` if the model ended the answer.
    """

    def __init__(self, model: Model, sampler: Sampler, max_tokens: int, tell: Tell | None = None) -> None:
        self._model, self._sampler, self._tell, self._max_tokens = model, sampler, tell, max_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.tokens: list[int] = []
        self.times: list[float] = []
        self.text, self.finished = "", False

    @property
    def pending(self) -> int | None:
        """The last token, where no cache holds it: it was cut short there. What goes on from here begins with it."""
        return self.tokens[-1] if self.tokens and not self.finished else None

    def step(self, logits: npt.NDArray[np.float32]) -> int | None:
        """Choose the next token from a row of logits; None when the answer is complete."""
        token = self._sampler.sample(logits)
        self.times.append(perf_counter())
        self.finished = self._model.is_end(token)
        if not self.finished:
            self.tokens.append(token)
            self._add(self._decoder.decode(self._model.piece(token)))
            if len(self.tokens) < self._max_tokens:
                return token
        self.close()
        return None

    def close(self) -> None:
        """Tell what is left of a character that was never completed, and let go of the sampler."""
        try:
            self._add(self._decoder.decode(b"", final=True))
        finally:
            self._decoder.reset()
            self._sampler.close()

    def _add(self, text: str) -> None:
        self.text += text
        if text and self._tell:
            self._tell(text)
