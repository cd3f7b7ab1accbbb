"""One document, N prompts: compute the document once, answer every prompt from it.

Three strategies, the same answers (token for token where batches are split alike):

==============  ===================================================================================================
``"shared"``    one unified cache; each branch shares the document's cells, all branches of a wave decode in one batch
``"snapshot"``  the document's state is forked and restored into contexts of a small pool; branches are isolated
``"reprefill"`` the baseline: each branch computes the document again
==============  ===================================================================================================
"""

from __future__ import annotations

import operator
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any, Literal

import numpy.typing as npt

from .answer import Answer
from .arena import Arena
from .budget import HEADROOM, validate_context_budget
from .chat import Chat
from .context import Context
from .errors import InvalidArgumentError
from .model import Model, Tokens
from .sampling import Sampler
from .snapshot import Snapshot

Strategy = Literal["shared", "snapshot", "reprefill"]
STRATEGIES: tuple[Strategy, ...] = ("shared", "snapshot", "reprefill")

N_BATCH = 512
"""Tokens a decode call gets at most: how often progress is told and Ctrl-C is seen at the latest."""


@dataclass
class Branch:
    """One prompt's answer, and where its time went.

    Attributes
    ----------
    prompt, text : str
    tokens : list of int
        The answer's tokens.
    fork_ms : float
        Copying the document's state for this branch: a memmove ("snapshot"), metadata ("shared"), 0 if not needed.
    restore_ms : float
        Putting it into the branch's context; with a context that still holds the document, dropping what follows it.
    first_token_ms : float
        From the branch's start to its first token: fork, restore (or re-prefill), prompt.
    decode_ms : float
        From the first token to the last.
    finished : bool
        Whether the model ended the answer itself.
    """

    prompt: str
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    fork_ms: float = 0.0
    restore_ms: float = 0.0
    first_token_ms: float = 0.0
    decode_ms: float = 0.0
    finished: bool = False


@dataclass
class FanOut:
    """What `fan_out` gives.

    Attributes
    ----------
    model, strategy : str
    document_tokens : int
    prefill_ms : float
        Computing the document: once, or, with "reprefill", all times together.
    snapshot_bytes : int
        Size of the document's state; 0 if none was exported.
    end_to_end_ms : float
        All of it, contexts made and closed included; without loading the model.
    branches : list of Branch
        In the order of the prompts.
    """

    model: str
    strategy: Strategy
    document_tokens: int
    prefill_ms: float = 0.0
    snapshot_bytes: int = 0
    end_to_end_ms: float = 0.0
    branches: list[Branch] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """As plain data for JSON."""
        return asdict(self)


def fan_out(
    model: Model,
    document: str | npt.ArrayLike,
    prompts: Sequence[str | npt.ArrayLike],
    *,
    max_tokens: int = 64,
    strategy: Strategy = "shared",
    sampler: Sampler | None = None,
    on_token: Callable[[int, str], None] | None = None,
    on_prefill: Callable[[int, int], None] | None = None,
    chat: bool = False,
    n_ctx: int | None = None,
    n_parallel: int | None = None,
    n_threads: int | None = None,
) -> FanOut:
    """Answer every prompt from one document.

    Parameters
    ----------
    model : Model
    document : str, or array of token ids
        Tokenized with the special tokens the model wants at a beginning.
    prompts : sequence of str, or of arrays of token ids
        Each continues the document: tokenized without special tokens, at positions from `document_tokens` on.
    max_tokens : int
        Longest answer.
    strategy : {"shared", "snapshot", "reprefill"}
    sampler : Sampler, optional
        Greedy by default. Each branch gets one of its kind, with seed + index (`Sampler.for_branch`).
    on_token : callable, optional
        ``on_token(index, text)`` as an answer grows; whole characters. One call at a time.
    on_prefill : callable, optional
        ``on_prefill(done, total)`` tokens, as the document is computed.
    chat : bool
        Wrap document and prompt into one user turn of the model's chat template.
    n_ctx : int, optional
        Size of each context; by default what is needed: document, longest prompt, answer, and 128 tokens of headroom.
    n_parallel : int, optional
        Branches at once: in one batch ("shared": by default as many as fit, at most 64), or contexts in threads
        ("snapshot": 1 by default). More prompts than that run in waves.
    n_threads : int, optional
        As for `Model.context`.

    Returns
    -------
    FanOut
        Its `branches` (each a `Branch` with `prompt`, `text`, `tokens` and times) stand in the order of the prompts.

    Raises
    ------
    ContextBudgetError
        Document, longest prompt and answer do not fit a context, or what the model was trained on. Raised before
        a context or buffer is made.
    InvalidArgumentError
        A parameter is out of range.
    """
    if not isinstance(strategy, str) or strategy not in STRATEGIES:
        raise InvalidArgumentError(f"strategy should be one of {', '.join(STRATEGIES)}, is {strategy!r}")
    if isinstance(prompts, str):
        raise InvalidArgumentError("prompts should be a sequence of prompts, is one text")
    if not len(prompts):
        raise InvalidArgumentError("there should be at least one prompt")
    max_tokens = operator.index(max_tokens)
    n_parallel = None if n_parallel is None else operator.index(n_parallel)
    n_ctx = None if n_ctx is None else operator.index(n_ctx)
    for name, value, most in (
        ("max_tokens", max_tokens, 2**31),
        ("n_parallel", n_parallel, 2**31),
        ("n_ctx", n_ctx, model.n_ctx_train),
    ):
        if value is not None and not 1 <= value <= most:
            trained = ", what the model was trained on" if name == "n_ctx" else ""
            raise InvalidArgumentError(f"{name} should be 1 to {most}{trained}, is {value}")
    if sampler is not None and not hasattr(sampler, "for_branch"):
        raise InvalidArgumentError(f"sampler should be a Sampler, is {type(sampler).__name__}")
    prefix, questions = document_and_prompts(model, document, prompts, chat)
    branch_tokens = max(len(question) for question in questions) + max_tokens
    validate_context_budget(len(prefix), branch_tokens, n_ctx or model.n_ctx_train)

    result = FanOut(model.path.name, strategy, len(prefix))
    result.branches = [Branch(_shown(model, prompt)) for prompt in prompts]
    run = _Run(
        model,
        prefix,
        questions,
        result,
        max_tokens,
        sampler or Sampler(),
        on_token,
        on_prefill,
        branch_tokens,
        n_threads,
    )
    begin = perf_counter()
    if strategy == "shared":
        run.shared(n_ctx, n_parallel)
    elif strategy == "snapshot":
        run.snapshot(n_ctx, n_parallel or 1)
    else:
        run.reprefill(n_ctx)
    result.end_to_end_ms = _ms(begin)
    return result


def prefill(
    ctx: Context,
    tokens: Tokens,
    *,
    seq: int = 0,
    on_progress: Callable[[int, int], None] | None = None,
) -> int:
    """Decode a long text in calls of at most 512 tokens, with logits for its last token. Returns the next position."""
    for begin in range(0, len(tokens), N_BATCH):
        end = min(begin + N_BATCH, len(tokens))
        ctx.decode(tokens[begin:end], seq=seq, logits="last" if end == len(tokens) else "none")
        if on_progress:
            on_progress(end, len(tokens))
    return ctx.position(seq)


class _Answer(Answer):
    """A branch while it is being answered, with its times."""

    def __init__(self, run: _Run, index: int) -> None:
        self.run, self.branch, self.index = run, run.result.branches[index], index
        super().__init__(run.model, run.sampler.for_branch(index), run.max_tokens, self._tell_run)
        self.begin = perf_counter()

    def next(self, ctx: Context, seq: int) -> int | None:
        """The next token; None when the answer is complete, or the whole run is being stopped."""
        if self.run.stopping.is_set():
            return None
        token, branch = self.step(ctx.logits(seq)), self.branch
        branch.tokens, branch.text, branch.finished = self.tokens, self.text, self.finished
        branch.first_token_ms = 1e3 * (self.times[0] - self.begin)
        branch.decode_ms = 1e3 * (self.times[-1] - self.times[0])
        return token

    def _tell_run(self, text: str) -> None:
        if self.run.on_token:
            with self.run.telling:
                self.run.on_token(self.index, text)


@dataclass
class _Run:
    """One call of `fan_out`."""

    model: Model
    prefix: Tokens
    questions: list[Tokens]
    result: FanOut
    max_tokens: int
    sampler: Sampler
    on_token: Callable[[int, str], None] | None
    on_prefill: Callable[[int, int], None] | None
    branch_tokens: int
    n_threads: int | None
    telling: threading.Lock = field(default_factory=threading.Lock)
    stopping: threading.Event = field(default_factory=threading.Event)

    def shared(self, n_ctx: int | None, n_parallel: int | None) -> None:
        n_parallel = min(n_parallel or 64, len(self.questions), 255)
        spare = (n_ctx or 2**31) - len(self.prefix) - HEADROOM
        n_parallel = min(n_parallel, spare // self.branch_tokens)
        n_ctx = n_ctx or len(self.prefix) + n_parallel * self.branch_tokens + HEADROOM
        with self._context(n_ctx, 1 + n_parallel) as ctx:
            self._prefill(ctx)
            for wave in range(0, len(self.questions), n_parallel):
                self._wave(ctx, range(wave, min(wave + n_parallel, len(self.questions))))

    def _wave(self, ctx: Context, indices: range) -> None:
        """Answer some branches together: sequences 1, 2, … over the document in sequence 0."""
        answers = {}
        for seq, index in enumerate(indices, start=1):
            answers[seq] = _Answer(self, index)
            begin = perf_counter()
            ctx.copy_sequence(0, seq)
            answers[seq].branch.fork_ms = _ms(begin)
        batch: list[tuple[npt.ArrayLike, int]] = [(self.questions[a.index], seq) for seq, a in answers.items()]
        while batch:
            ctx.decode_batch(batch)
            tokens = {seq: answers[seq].next(ctx, seq) for _, seq in batch}
            for seq in (seq for seq, token in tokens.items() if token is None):
                ctx.remove(seq)
            batch = [([token], seq) for seq, token in tokens.items() if token is not None]

    def snapshot(self, n_ctx: int | None, n_parallel: int) -> None:
        n_parallel = min(n_parallel, len(self.questions))
        n_ctx = n_ctx or len(self.prefix) + self.branch_tokens + HEADROOM
        with ExitStack() as stack:
            first = stack.enter_context(self._context(n_ctx, 1))
            self._prefill(first)
            # One context that can drop a branch's suffix needs no fork at all.
            n_forks = 0 if n_parallel == 1 and self.model.capabilities.attention_only else n_parallel
            arena = stack.enter_context(Arena.for_branches(first, n_forks))
            document = stack.enter_context(first.snapshot(arena, tokens=self.prefix))
            self.result.snapshot_bytes = document.n_bytes
            pool: queue.SimpleQueue[tuple[Context, bool]] = queue.SimpleQueue()
            pool.put((first, True))
            for _ in range(n_parallel - 1):
                pool.put((stack.enter_context(self._context(n_ctx, 1)), False))
            if n_parallel == 1:
                for index in range(len(self.questions)):
                    self._branch(index, document, pool)
                return
            with ThreadPoolExecutor(n_parallel) as workers:
                jobs = [workers.submit(self._branch, i, document, pool) for i in range(len(self.questions))]
                try:
                    for job in as_completed(jobs):
                        job.result()
                except BaseException:  # one failed, or Ctrl-C: the others end at their next token
                    self.stopping.set()
                    workers.shutdown(wait=False, cancel_futures=True)
                    raise

    def _branch(self, index: int, document: Snapshot, pool: queue.SimpleQueue[tuple[Context, bool]]) -> None:
        """Answer one branch in a context of the pool; a context that still holds the document only drops the rest."""
        ctx, holds_document = pool.get()
        try:
            answer = _Answer(self, index)
            branch, begin = answer.branch, perf_counter()
            if holds_document and self.model.capabilities.attention_only:
                ctx.remove(0, document.n_tokens)
            else:
                with document.fork() as fork:
                    branch.fork_ms, begin = _ms(begin), perf_counter()
                    fork.restore(ctx)
            branch.restore_ms = _ms(begin)
            self._continue(ctx, answer)
        finally:
            pool.put((ctx, True))

    def reprefill(self, n_ctx: int | None) -> None:
        with self._context(n_ctx or len(self.prefix) + self.branch_tokens + HEADROOM, 1) as ctx:
            for index in range(len(self.questions)):
                answer = _Answer(self, index)
                ctx.clear()
                self._prefill(ctx)
                self._continue(ctx, answer)

    def _continue(self, ctx: Context, answer: _Answer) -> None:
        ctx.decode(self.questions[answer.index])
        while (token := answer.next(ctx, 0)) is not None:
            ctx.decode([token])

    def _prefill(self, ctx: Context) -> None:
        begin = perf_counter()
        prefill(ctx, self.prefix, on_progress=self.on_prefill)
        self.result.prefill_ms += _ms(begin)

    def _context(self, n_ctx: int, n_seq_max: int) -> Context:
        return self.model.context(n_ctx, n_seq_max, n_batch=max(N_BATCH, n_seq_max), n_threads=self.n_threads)


def document_and_prompts(
    model: Model, document: str | npt.ArrayLike, prompts: Sequence[str | npt.ArrayLike], chat: bool
) -> tuple[Tokens, list[Tokens]]:
    """The document's tokens, and each prompt's that continue it."""
    if chat:
        if not isinstance(document, str) or not all(isinstance(prompt, str) for prompt in prompts):
            raise InvalidArgumentError("with chat=True, document and prompts should be text")
        return chat_tokens(model, document, [str(prompt) for prompt in prompts])
    prefix = (
        model.tokenize(document, add_special=True, parse_special=False)
        if isinstance(document, str)
        else model.check_tokens(document)
    )
    questions = [
        model.tokenize(prompt, add_special=False, parse_special=False)
        if isinstance(prompt, str)
        else model.check_tokens(prompt)
        for prompt in prompts
    ]
    empty = [i for i, question in enumerate(questions, start=1) if not len(question)]
    if empty or not len(prefix):
        raise InvalidArgumentError(
            f"{'document' if not len(prefix) else f'prompt {empty[0]} of {len(prompts)}'} holds no tokens"
        )
    return prefix, questions


def chat_tokens(model: Model, document: str, prompts: Sequence[str]) -> tuple[Tokens, list[Tokens]]:
    """Document and prompts as one user turn: the turn's opening and the document, then each prompt and the closing."""
    empty = ["document"] * (not document.strip()) + [
        f"prompt {i} of {len(prompts)}" for i, p in enumerate(prompts, start=1) if not p.strip()
    ]
    if empty:
        raise InvalidArgumentError(f"{empty[0]} holds no text")
    turns = Chat(model)
    return turns.document(document), [turns.prompt(prompt) for prompt in prompts]


def _shown(model: Model, prompt: str | npt.ArrayLike) -> str:
    return prompt if isinstance(prompt, str) else model.detokenize(prompt)


def _ms(begin: float) -> float:
    return 1e3 * (perf_counter() - begin)
