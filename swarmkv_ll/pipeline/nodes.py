"""What a pipeline is made of: documents, branches that go on from them, and the user's own nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy.typing as npt

from ..sampling import Sampler


@runtime_checkable
class Node(Protocol):
    """A node of the user's own: anything with these two. `time_limit` and `max_tokens`, as of a `FunctionNode`, are
    heeded if there are such.
    """

    @property
    def depends_on(self) -> Sequence[str]:
        """Names of the nodes whose results it takes."""

    def run(self, results: Mapping[str, Any]) -> Any:
        """Make its result of theirs: of a branch the answer's text, of a document its number of tokens.

        Called in a thread of its own, once all of them are there. What it returns is put, as `str`, in the place of
        ``{name}`` in prompts.
        """


@dataclass(frozen=True)
class PrefillNode:
    """A document, computed once, in chunks.

    Attributes
    ----------
    document : str, or array of token ids
        Text is tokenized with the special tokens the model wants at a beginning.
    time_limit : float, optional
        Seconds from when it begins.
    """

    document: str | npt.ArrayLike
    time_limit: float | None = None

    @property
    def depends_on(self) -> tuple[str, ...]:
        """Nothing."""
        return ()


@dataclass(frozen=True)
class BranchNode:
    """A prompt that goes on from a document, or from where another branch has ended; and its answer.

    Attributes
    ----------
    prompt : str, or array of token ids
        In a text, ``{name}`` stands for what that node gave, ``{{name}}`` for itself; other braces are plain text.
    depends_on : str or sequence of str
        First the document or branch whose KV state it goes on from: no text is fed again. Then nodes that the prompt
        names.
    required_prefix_tokens : int, optional
        Begin as soon as so many of the document's tokens have been computed, and see only those.
    max_tokens : int
        Longest answer.
    sampler : Sampler, optional
        Greedy by default. Each run draws anew from one of its kind (`Sampler.for_branch`).
    priority : float
        Where there is not room for all, those with more get more, in proportion, and begin first.
    time_limit : float, optional
        Seconds from when it begins.
    """

    prompt: str | npt.ArrayLike
    depends_on: str | Sequence[str]
    required_prefix_tokens: int | None = None
    max_tokens: int = 64
    sampler: Sampler | None = None
    priority: float = 1.0
    time_limit: float | None = None


@dataclass(frozen=True)
class FunctionNode:
    """A Python function between other nodes.

    Attributes
    ----------
    function : callable
        Called with the results of `depends_on`, in that order: of a branch its text.
    depends_on : str or sequence of str
    time_limit : float, optional
        Seconds. The function cannot be stopped; past the limit what it returns is not used.
    max_tokens : int
        Tokens that room is planned for where a prompt names it; a longer text may not fit.
    """

    function: Callable[..., Any]
    depends_on: str | Sequence[str] = ()
    time_limit: float | None = None
    max_tokens: int = 256

    def run(self, results: Mapping[str, Any]) -> Any:
        """Call the function."""
        names = (self.depends_on,) if isinstance(self.depends_on, str) else self.depends_on
        return self.function(*(results[name] for name in names))
