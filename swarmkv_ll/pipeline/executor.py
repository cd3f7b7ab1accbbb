"""What the two ways to run a pipeline's branches have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..answer import Answer
from ..model import Tokens
from ..sampling import Sampler
from ..timeline import Span


@dataclass
class BranchJob:
    """A branch that is to begin."""

    name: str
    tokens: Tokens
    max_tokens: int
    sampler: Sampler
    priority: float
    time_limit: float | None

    def tokens_after(self, pending: int | None) -> Tokens:
        """The prompt, behind the last token of the answer it goes on from, if its state lacks that."""
        return self.tokens if pending is None else np.concatenate([np.array([pending], np.int32), self.tokens])


class Reports(Protocol):
    """Where an executor tells what happens; from any thread."""

    def begun(self, name: str, at: float) -> None:
        """A node got its sequence or context, at `perf_counter`."""

    def progress(self, name: str, watermark: int) -> None:
        """So many tokens of a document have been computed."""

    def tell(self, name: str, text: str) -> None:
        """An answer has grown."""

    def answered(self, name: str, answer: Answer, *, fork_ms: float = 0.0, restore_ms: float = 0.0) -> None:
        """An answer is complete, or is not going to be."""

    def span(self, span: Span) -> None:
        """A node did something, at moments of `perf_counter`."""

    def done(self, name: str, value: str | int) -> None:
        """A node has ended."""

    def failed(self, name: str, error: BaseException) -> None:
        """A node has failed."""


class Executor(Protocol):
    """Runs documents and branches. Calls come one at a time, also from threads that report, and return at once."""

    def prefill(self, name: str) -> None:
        """Begin a document."""

    def branch(self, job: BranchJob) -> None:
        """Begin a branch: what it goes on from is there."""

    def stop(self, name: str) -> None:
        """Cancel a node that has begun."""

    def skip(self, name: str) -> None:
        """A branch will never begin: what is kept for it can go."""

    def close(self) -> None:
        """End all threads, and give back all memory."""
