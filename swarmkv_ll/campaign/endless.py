"""Answers as long as asked for, so that what is measured is as long on all sides."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..model import Model
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
