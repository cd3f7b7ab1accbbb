"""Many branches in one context, as sequences of one cache: each engine batch takes a token of every running branch.

Documents are computed in the same batches, in chunks; branches join and leave at any step. Who goes into a batch, and
with how many tokens, is for a policy to say (`swarmkv_ll.policy`).
"""

from __future__ import annotations

import math
import operator
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from . import state
from .answer import Answer, Tell
from .context import Context
from .errors import (
    ClosedError,
    ContextFullError,
    InvalidArgumentError,
    NodeCancelledError,
    NodeTimeoutError,
    ReentrantCallError,
    SwarmKVError,
    UpstreamError,
)
from .model import Tokens
from .policy import TILE, FairShare, Kind, Policy
from .sampling import Sampler

OnBegin = Callable[[Any], None]

_J = TypeVar("_J", "Prefix", "Branch")


class Part(NamedTuple):
    """One sequence's share of a step: who, what kind of work, how many tokens."""

    name: str
    kind: Kind
    n_tokens: int


class Step(NamedTuple):
    """One engine batch. Moments are `perf_counter`'s.

    Attributes
    ----------
    begin, decode_begin, decode_end, end : float
        Of the whole step, and of the engine's part in it.
    sample_s : float
        Seconds spent in choosing tokens.
    parts : tuple of Part
    """

    begin: float
    decode_begin: float
    decode_end: float
    end: float
    sample_s: float
    parts: tuple[Part, ...]

    @property
    def n_tokens(self) -> int:
        """Tokens of all parts."""
        return sum(part.n_tokens for part in self.parts)

    @property
    def engine_s(self) -> float:
        """Seconds in the engine."""
        return self.decode_end - self.decode_begin

    @property
    def overhead_s(self) -> float:
        """Seconds that are neither the engine's nor choosing tokens."""
        return self.end - self.begin - self.engine_s - self.sample_s


class Job:
    """Something a `BatchedDecoder` computes in a sequence: a document or a branch.

    Attributes
    ----------
    name : str
    kind : {"decode", "prompt", "prefill"}
    priority : float
    future : Future
        Gives this job when it is complete, or raises why it is not.
    begun : float
        `perf_counter` when it got its sequence, 0 before.
    fork_s : float
        Seconds that making its sequence from another's took.
    """

    kind: Kind

    def __init__(
        self,
        name: str,
        tokens: Tokens,
        priority: float,
        uses: int,
        time_limit: float | None,
        on_begin: OnBegin | None,
    ) -> None:
        self.name, self.priority, self.future = name, priority, Future[Any]()
        self.future.set_running_or_notify_cancel()  # `BatchedDecoder.cancel` ends a job, not `Future.cancel`
        self._time_limit, self._on_begin = time_limit, on_begin
        self.begun = self.fork_s = 0.0
        self._tokens, self._at, self._uses = tokens, 0, uses
        self._seq: int | None = None

    @property
    def n_tokens(self) -> int:
        """Tokens it could have in the next batch."""
        return len(self._tokens) - self._at


class Prefix(Job):
    """A document."""

    kind: Kind = "prefill"

    def __init__(
        self,
        name: str,
        tokens: Tokens,
        uses: int,
        borders: Iterable[int],
        time_limit: float | None,
        on_begin: OnBegin | None,
        on_progress: Callable[[int], None] | None,
    ) -> None:
        super().__init__(name, tokens, 1.0, uses, time_limit, on_begin)
        self._borders = sorted({*borders, len(tokens)})
        self._on_progress = on_progress
        self._parked: dict[int, int] = {}  # where the memory cannot be cut later: a sequence for each border
        self._filler: int | None = None  # sequence that keeps its cells free

    @property
    def n_tokens(self) -> int:
        return next((border for border in self._borders if border > self._at), self._at) - self._at

    @property
    def watermark(self) -> int:
        """How many of its tokens have been computed."""
        return self._at

    @property
    def _n_needed(self) -> int:
        """Cells it may still take."""
        return len(self._tokens) - self._at if self._filler is None else 0


class Branch(Job):
    """A branch: its prompt, then its answer token by token.

    Attributes
    ----------
    answer : Answer
    """

    kind: Kind = "prompt"

    def __init__(
        self,
        name: str,
        tokens: Tokens,
        priority: float,
        uses: int,
        after: Prefix | Branch,
        n_prefix: int | None,
        answer: Answer,
        max_tokens: int,
        time_limit: float | None,
        on_begin: OnBegin | None,
    ) -> None:
        super().__init__(name, tokens, priority, uses, time_limit, on_begin)
        self.answer = answer
        self._after, self._n_prefix, self._max_tokens = after, n_prefix, max_tokens

    @property
    def pending(self) -> int | None:
        """The answer's last token where the cache does not hold it: what goes on from here has to begin with it."""
        return self.answer.pending

    @property
    def _n_needed(self) -> int:
        """Cells it may still take."""
        left = self._max_tokens - max(1, len(self.answer.tokens))  # the answer's last token takes none
        return left + (self.n_tokens if self.kind == "prompt" else 0)


class BatchedDecoder:
    """Computes documents and branches in the sequences of one context.

    Parameters
    ----------
    ctx : Context
        With a unified cache, empty. It is not to be used by others meanwhile, and not closed here.
    policy : Policy, optional
        By default `FairShare()`.
    n_parallel : int, optional
        Branches that run at the same time, at most; by default as many as there are sequences and cells for.

    Attributes
    ----------
    steps : list of Step
        Of all batches so far; clear it where that is not wanted.

    Notes
    -----
    `step` is called by one thread at a time. `prefill`, `branch`, `cancel` and `release` may be called from any, and
    take effect at once, or, while a batch is being computed, when it is done.
    """

    def __init__(self, ctx: Context, policy: Policy | None = None, n_parallel: int | None = None) -> None:
        if not ctx.kv_unified:
            raise InvalidArgumentError("branches share cells: make the context with kv_unified=True")
        held = [seq for seq in range(ctx.n_seq_max) if ctx.position(seq)]
        if held:
            raise InvalidArgumentError(f"the context should be empty; sequence {held[0]} holds tokens")
        if n_parallel is not None and operator.index(n_parallel) < 1:
            raise InvalidArgumentError(f"n_parallel should be at least 1, is {n_parallel}")
        self.ctx, self.policy, self.n_parallel = ctx, policy or FairShare(), n_parallel
        self.steps: list[Step] = []
        self.wake = threading.Event()  # set when there may be something to do
        self._free = list(range(ctx.n_seq_max))[::-1]
        self._waiting: list[Prefix | Branch] = []
        self._running: list[Prefix | Branch] = []
        self._commands: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        self._inside: int | None = None  # thread that holds it
        self._later: list[int | None] = []  # sequences to be freed when no document's cells are held any more
        self._cuttable = ctx.model.capabilities.attention_only
        self._tiled = ctx.flash_attn and not state.parts(ctx).cell_extension

    # ── what to compute ──────────────────────────────────────────────────────────────────────────────

    def prefill(
        self,
        tokens: npt.ArrayLike,
        *,
        name: str = "document",
        uses: int = 1,
        borders: Iterable[int] = (),
        time_limit: float | None = None,
        on_begin: OnBegin | None = None,
        on_progress: Callable[[int], None] | None = None,
    ) -> Prefix:
        """Compute a document.

        Parameters
        ----------
        tokens : array of integers, shape (n,)
        uses : int
            How many branches will go on from it. Its cells are held until they have begun, or were given up (`release`).
        borders : iterable of int
            Lengths at which a chunk has to end, because a branch begins there.
        time_limit : float, optional
            Seconds from when it gets its sequence.
        on_begin, on_progress : callable, optional
            ``on_begin(job)`` when it gets its sequence, ``on_progress(watermark)`` after each chunk; from the thread
            that calls `step`.
        """
        checked = self.ctx.model.check_tokens(tokens)
        borders = list(borders)
        if not len(checked) or any(not 1 <= border <= len(checked) for border in borders):
            raise InvalidArgumentError(
                f"there should be tokens, and borders within their number of {len(checked)}: {borders}"
            )
        _check_positive(time_limit=time_limit)
        return self._post(Prefix(name, checked, uses, borders, time_limit, on_begin, on_progress))

    def branch(
        self,
        tokens: npt.ArrayLike,
        *,
        after: Prefix | Branch,
        n_prefix: int | None = None,
        name: str = "branch",
        max_tokens: int = 64,
        sampler: Sampler | None = None,
        tell: Tell | None = None,
        priority: float = 1.0,
        uses: int = 0,
        time_limit: float | None = None,
        on_begin: OnBegin | None = None,
    ) -> Branch:
        """Go on from a document, or from where another branch has ended, with a prompt; then generate.

        Parameters
        ----------
        tokens : array of integers, shape (n,)
            The prompt. Where `after` is a branch with a `pending` token, begin with that.
        n_prefix : int, optional
            Only the document's first so many tokens. Of a recurrent or hybrid model, or one with a sliding window, one
            of its `borders`.
        sampler : Sampler, optional
            The branch's own, greedy by default.
        tell : callable, optional
            ``tell(text)`` as the answer grows, from the thread that calls `step`.
        uses : int
            How many branches will go on from its end.
        time_limit : float, optional
            Seconds from when it gets its sequence.
        """
        checked = self.ctx.model.check_tokens(tokens)
        if not len(checked) or max_tokens < 1:
            raise InvalidArgumentError(
                f"there should be a prompt and an answer: {len(checked)} and {max_tokens} tokens"
            )
        _check_positive(priority=priority, time_limit=time_limit)
        if n_prefix is not None:
            if not isinstance(after, Prefix):
                raise InvalidArgumentError(f"n_prefix is of a document; {after.name} is a branch")
            if not 1 <= operator.index(n_prefix) <= len(after._tokens):
                raise InvalidArgumentError(f"n_prefix should be 1 to {len(after._tokens)}, is {n_prefix}")
        answer = Answer(self.ctx.model, sampler or Sampler(), max_tokens, tell)
        return self._post(
            Branch(name, checked, priority, uses, after, n_prefix, answer, max_tokens, time_limit, on_begin)
        )

    def cancel(self, job: Prefix | Branch) -> None:
        """Stop a job: its cells are free when this returns, or, if a batch is being computed, when that is done."""
        self._do(lambda: self._fail(job, NodeCancelledError(job.name)))

    def release(self, job: Prefix | Branch) -> None:
        """One branch less will go on from this job."""
        self._do(lambda: self._let_go(job))

    def _post(self, job: _J) -> _J:
        self._do(lambda: self._queue(job))
        return job

    def fail_all(self, error: Exception) -> None:
        """End every job with this error."""
        for job in [*self._running, *self._waiting]:
            self._do(partial(self._fail, job, error))

    def _queue(self, job: Prefix | Branch) -> None:
        if not job.future.done():
            self._waiting.append(job)
            # Documents go before branches; those by priority, then in order.
            self._waiting.sort(key=lambda job: (not isinstance(job, Prefix), -job.priority))

    def _do(self, command: Callable[[], None]) -> None:
        """Carry out a change between two steps: now, or by the thread that is in one."""
        self._commands.append(command)
        self._drain()
        self.wake.set()

    def _drain(self) -> None:
        while self._commands and self._lock.acquire(blocking=False):
            try:
                self._inside = threading.get_ident()
                self._obey()
            finally:
                self._inside = None
                self._lock.release()

    def _obey(self) -> None:
        while self._commands:
            self._commands.popleft()()

    # ── steps ────────────────────────────────────────────────────────────────────────────────────────

    def run(self) -> None:
        """Step until there is nothing to do."""
        while self.step():
            pass

    def step(self) -> bool:
        """Compute one engine batch. False if there was nothing to compute.

        What goes wrong with a job is told by its `future`; others go on.

        Raises
        ------
        InvalidArgumentError
            The policy gave what it should not. Nothing was computed.
        ReentrantCallError
            Called by a callback of a step.
        """
        if self._inside == threading.get_ident():
            raise ReentrantCallError("decoder")
        try:
            with self._lock:
                try:
                    self._inside = threading.get_ident()
                    self._obey()
                    return self._step()
                finally:
                    self._inside = None
        finally:
            self._drain()  # what came in meanwhile

    def _step(self) -> bool:
        begin = perf_counter()
        self._check_time(begin)
        self._admit()
        work = list(self._running)
        if not work:
            return False
        grants = self._choose(work)
        chosen = [(job, n) for job, n in zip(work, grants, strict=True) if n]
        chosen.sort(key=lambda pair: pair[0].kind != "prefill")  # documents first: see `_begin_prefix`
        batch = [(job._tokens[job._at : job._at + n], _seq_of(job)) for job, n in chosen]
        parts = tuple(Part(job.name, job.kind, n) for job, n in chosen)
        decode_begin = perf_counter()
        try:
            for job, n in chosen:
                if isinstance(job, Prefix) and job._filler is not None:
                    self.ctx.remove(job._filler, job._at, job._at + n)
            self.ctx.decode_batch(batch)
            decode_end = perf_counter()
            sample_s = self._take_in(chosen)
        except BaseException as error:
            for job, _ in chosen:
                self._fail(job, error)
            if not isinstance(error, SwarmKVError):
                raise
            return True
        self.steps.append(Step(begin, decode_begin, decode_end, perf_counter(), sample_s, parts))
        return True

    def _take_in(self, chosen: list[tuple[Prefix | Branch, int]]) -> float:
        """What a batch gave; seconds spent in choosing tokens."""
        sample_s = 0.0
        for job, n in chosen:
            job._at += n
            try:
                if isinstance(job, Prefix):
                    self._advance(job)
                elif not job.n_tokens:
                    sample_begin = perf_counter()
                    self._sample(job)
                    sample_s += perf_counter() - sample_begin
            except BaseException as error:  # of a sampler or a callback of the caller's
                self._fail(job, error)
                if _is_interrupt(error):
                    raise
        return sample_s

    def _choose(self, work: list[Prefix | Branch]) -> list[int]:
        room = self.ctx._n_piece
        given = self.policy.choose(work, room)
        try:
            grants = [operator.index(n) for n in given]
        except TypeError:  # no list, or not of whole numbers
            grants = []
        wrong = len(grants) != len(work) or any(not 0 <= n <= w.n_tokens for n, w in zip(grants, work, strict=False))
        if wrong or not 0 < sum(grants) <= room:
            raise InvalidArgumentError(
                f"a policy should give 1 to {room} tokens in all, of {[w.n_tokens for w in work]}; it gave {given!r}"
            )
        return grants

    def _advance(self, job: Prefix) -> None:
        """A document's chunk is done."""
        if job._at in job._parked:
            self.ctx.copy_sequence(_seq_of(job), job._parked[job._at])
        if job._on_progress:
            job._on_progress(job._at)
        if job._at == len(job._tokens):
            self._finish(job)

    def _sample(self, job: Branch) -> None:
        job.kind = "decode"
        token = job.answer.step(self.ctx.logits(_seq_of(job)))
        if token is None:
            self._finish(job)
        else:
            job._tokens, job._at = np.array([token], np.int32), 0

    def _check_time(self, now: float) -> None:
        for job in list(self._running):
            if job._time_limit and now - job.begun > job._time_limit:
                self._fail(job, NodeTimeoutError(job.name, job._time_limit))

    # ── sequences and cells ──────────────────────────────────────────────────────────────────────────

    def _admit(self) -> None:
        """Let those that wait begin, in order, as far as there are sequences and cells."""
        while True:
            n_waiting = len(self._waiting)
            self._admit_once()
            if self._running or len(self._waiting) == n_waiting:
                return
            # All that came of it were failures: others may have waited for that.

    def _admit_once(self) -> None:
        blocked = None
        for job in list(self._waiting):
            if not self._ready(job):
                continue
            if self._fits(job):
                self._waiting.remove(job)
                try:
                    self._begin(job)
                except BaseException as error:  # a callback's, too
                    self._fail(job, error)
                    if _is_interrupt(error):
                        raise
            elif self._running:
                return  # nobody passes by
            else:
                blocked = blocked or job
        if blocked and not self._running:  # nothing will ever make room
            n_seqs, n_free = self._n_seqs(blocked), len(self._free)
            self._fail(
                blocked,
                ContextFullError(blocked._n_needed, self._cells_left(), self.ctx.n_ctx)
                if n_seqs <= n_free
                else InvalidArgumentError(
                    f"{blocked.name} takes {n_seqs} sequences; {n_free} of {self.ctx.n_seq_max} are free"
                ),
            )

    def _ready(self, job: Prefix | Branch) -> bool:
        """Whether what a branch goes on from has come so far."""
        if isinstance(job, Prefix):
            return True
        after = job._after
        if after.future.done():
            error = after.future.exception()
            if error:
                root = error if isinstance(error, UpstreamError) else UpstreamError(after.name, error)
                self._fail(job, root)
            return error is None
        return isinstance(after, Prefix) and job._n_prefix is not None and after.watermark >= job._n_prefix

    def _fits(self, job: Prefix | Branch) -> bool:
        n_running = sum(isinstance(other, Branch) for other in self._running)
        if isinstance(job, Branch) and self.n_parallel is not None and n_running >= self.n_parallel:
            return False
        return self._n_seqs(job) <= len(self._free) and job._n_needed <= self._cells_left()

    def _n_seqs(self, job: Prefix | Branch) -> int:
        """Sequences it takes."""
        if isinstance(job, Branch):
            return 0 if self._takes_over(job) else 1
        return 1 + self._kept_together(job) if self._cuttable else len(job._borders)

    def _kept_together(self, job: Prefix) -> bool:
        """Whether a sequence of zeros has to hold this document's cells, because branches may run meanwhile."""
        others = any(isinstance(other, Prefix) and other is not job for other in self._waiting)
        return self._tiled and bool(len(job._borders) > 1 or self._running or others)

    def _cells_left(self) -> int:
        """Cells that nobody holds or was promised."""
        if self.ctx._cells is None:
            return 2**31
        return self.ctx.cells_free() - sum(job._n_needed for job in self._running)

    def _takes_over(self, job: Branch) -> bool:
        """Whether nobody else will go on from where this branch begins, so that it can have the sequence itself."""
        after = job._after
        if isinstance(after, Prefix) and self._guarding:
            return False  # see `_free_sequences`
        return after._uses == 1 and after.future.done() and job._n_prefix in (None, len(after._tokens))

    def _begin(self, job: Prefix | Branch) -> None:
        begin = perf_counter()
        if isinstance(job, Prefix):
            self._begin_prefix(job)
        else:
            self._begin_branch(job)
            job.fork_s = perf_counter() - begin
        job.begun = begin
        self._running.append(job)
        if job._on_begin:
            job._on_begin(job)

    def _begin_prefix(self, job: Prefix) -> None:
        job._seq = self._free.pop()
        if not self._cuttable:
            job._parked = {border: self._free.pop() for border in job._borders[:-1]}
        elif self._kept_together(job):
            # The engine gives a token the first free cell, and its flash attention sums over tiles of cells: with
            # another's cells between a document's own, its K and V would come out rounded otherwise. So a sequence of
            # zeros holds the document's cells until its own tokens, which stand first in each batch, take them. It
            # lies there as if it were alone, if it begins where a tile does: the next one will, by what is held here.
            n_cells = len(job._tokens)
            padded = n_cells + -n_cells % TILE
            job._filler = self._free.pop()
            state.occupy(self.ctx, job._filler, padded if padded <= self._cells_left() else n_cells)

    def _begin_branch(self, job: Branch) -> None:
        after, n = job._after, job._n_prefix
        if after._seq is None:
            raise InvalidArgumentError(f"{after.name} was let go of: {job.name} cannot go on from it")
        if self._takes_over(job):
            job._seq, after._seq = after._seq, None
        else:
            job._seq = self._free.pop()
            if isinstance(after, Prefix) and n in after._parked:
                self.ctx.copy_sequence(after._parked[n], job._seq)
            else:
                self.ctx.copy_sequence(after._seq, job._seq, n)
        self._let_go(after)

    def _finish(self, job: Prefix | Branch) -> None:
        self._running.remove(job)
        job.future.set_result(job)
        self._free_sequences(job)

    def _fail(self, job: Prefix | Branch, error: BaseException) -> None:
        if job.future.done():
            return
        for jobs in (self._waiting, self._running):
            with suppress(ValueError):
                jobs.remove(job)
        if isinstance(job, Branch) and not job.begun:
            self._let_go(job._after)
        job._uses = 0
        job.future.set_exception(error)
        self._free_sequences(job)
        if isinstance(job, Branch):
            try:
                job.answer.close()
            except BaseException as closing:  # of a sampler or callback of the caller's
                if _is_interrupt(closing):
                    raise

    def _let_go(self, job: Prefix | Branch) -> None:
        job._uses -= 1
        self._free_sequences(job)

    def _free_sequences(self, job: Prefix | Branch) -> None:
        """Free what a job that is done holds: all of it if nobody will go on from it."""
        if not job.future.done():
            return
        seqs = []
        if job._uses <= 0:
            seqs, job._seq = [job._seq], None
        if isinstance(job, Prefix):
            seqs, job._filler = [*seqs, job._filler], None
            if job._uses <= 0:
                seqs, job._parked = [*seqs, *job._parked.values()], {}
            self._later += seqs
            if self._guarding:  # a document that came after it would come to lie in its cells
                return
            seqs, self._later = self._later, []
        for seq in seqs:
            if seq is not None:
                with suppress(ClosedError):  # with its context the cells are gone too
                    self.ctx.remove(seq)
                self._free.append(seq)

    @property
    def _guarding(self) -> bool:
        """Whether cells are held for a document that is being computed."""
        return any(isinstance(job, Prefix) and job._filler is not None for job in self._running)


def _is_interrupt(error: BaseException) -> bool:
    """Whether it is meant for the whole program: in other threads than the main one nobody would see it."""
    return not isinstance(error, Exception) and threading.current_thread() is threading.main_thread()


def _check_positive(**values: float | None) -> None:
    for name, value in values.items():
        if value is not None and not 0 < value < math.inf:
            raise InvalidArgumentError(f"{name} should be above 0, is {value}")


def _seq_of(job: Job) -> int:
    assert job._seq is not None
    return job._seq
