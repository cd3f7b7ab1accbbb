"""A pipeline's documents and branches in contexts of their own, each in a thread: isolated from each other.

States go from one context to another as snapshots: a document's first tokens where a branch needs them, its end, and
where a branch has ended that others go on from. Nothing is exported that nobody goes on from.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from time import perf_counter
from typing import NamedTuple

import numpy as np

from ..answer import Answer
from ..arena import Arena, lease_size
from ..budget import HEADROOM
from ..context import Context
from ..errors import NodeCancelledError, NodeTimeoutError
from ..fanout import N_BATCH
from ..model import Model, Tokens
from ..snapshot import Snapshot
from ..timeline import Span
from .executor import BranchJob, Reports
from .plan import Plan

PIECE = 128
"""Tokens of a document that are computed at once: larger pieces are not faster, and keep a cancelled one waiting."""

_Key = tuple[str, "int | None"]


class _State(NamedTuple):
    """Where a branch can go on from, and the answer's token that it lacks."""

    snapshot: Snapshot
    pending: int | None


def arena_bytes(model: Model, plan: Plan) -> int:
    """Bytes that the snapshots of a pipeline take, all at once.

    How many a token takes is measured on a small context: the engine decides sizes, not a formula.
    """
    with model.context(256, n_batch=N_BATCH) as probe:
        sizes = []
        for token in (0, 0):
            probe.decode([token])
            sizes.append(probe.state_size())
    a_token = sizes[1] - sizes[0]
    lengths, filled = [], plan.filled
    for name, n_prefix in plan.uses:
        if name in plan.documents:
            lengths.append(len(plan.documents[name]) if n_prefix is None else n_prefix)
        else:
            planned = plan.branches[name]
            lengths.append(planned.n_before + planned.n_own + (HEADROOM if name in filled else 0))
    return sum(lease_size(sizes[0] + (n - 1) * a_token) for n in lengths)


class IsolatedExecutor:
    """Runs each document and branch in one of several contexts, which are made here.

    Parameters
    ----------
    n_contexts : int
    n_ctx : int
    arena : Arena
        With room for `arena_bytes`.
    """

    def __init__(
        self,
        model: Model,
        plan: Plan,
        reports: Reports,
        arena: Arena,
        n_contexts: int,
        n_ctx: int,
        n_threads: int | None,
    ) -> None:
        self._model, self._plan, self._reports, self._arena = model, plan, reports, arena
        self._uses = dict(plan.uses)
        self._states: dict[_Key, _State] = {}
        self._lock = threading.Lock()
        self._cancelled: dict[str, threading.Event] = {}
        self._jobs: queue.PriorityQueue[tuple[float, int, Callable[[Context, _Held], None] | None]]
        self._jobs = queue.PriorityQueue()
        self._count = itertools.count()
        with ExitStack() as stack:
            contexts = [
                stack.enter_context(model.context(n_ctx, n_batch=N_BATCH, n_threads=n_threads))
                for _ in range(n_contexts)
            ]
            self._contexts = stack.pop_all()
        self._threads = [
            threading.Thread(target=self._work, args=(ctx,), name=f"swarmkv context {i}", daemon=True)
            for i, ctx in enumerate(contexts)
        ]
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:  # no thread left
            self.close()
            raise

    def prefill(self, name: str) -> None:
        """Begin a document."""
        self._put(name, float("-inf"), partial(self._prefill, name))

    def branch(self, job: BranchJob) -> None:
        """Begin a branch."""
        self._put(job.name, -job.priority, partial(self._branch, job))

    def stop(self, name: str) -> None:
        """Cancel a node: it ends at its next token or chunk."""
        self._cancelled[name].set()

    def skip(self, name: str) -> None:
        """A branch will never begin."""
        planned = self._plan.branches[name]
        self._let_go((planned.after, planned.n_prefix))

    def close(self) -> None:
        """End the threads, each after its next token or chunk, and give all memory back."""
        for event in self._cancelled.values():
            event.set()
        for _ in self._threads:
            self._jobs.put((float("inf"), next(self._count), None))
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        for state in self._states.values():
            state.snapshot.release()
        self._contexts.close()

    def _put(self, name: str, rank: float, work: Callable[[Context, _Held], None]) -> None:
        self._cancelled[name] = threading.Event()

        def run(ctx: Context, held: _Held) -> None:
            try:
                if self._cancelled[name].is_set() and name in self._plan.branches:
                    self.skip(name)
                self._check(name)
                self._reports.begun(name, perf_counter())
                work(ctx, held)
            except BaseException as error:
                self._reports.failed(name, error)

        self._jobs.put((rank, next(self._count), run))

    def _check(self, name: str, begin: float = 0.0, limit: float | None = None) -> None:
        """Whether a node that began then may go on."""
        if self._cancelled[name].is_set():
            raise NodeCancelledError(name)
        if limit and perf_counter() - begin > limit:
            raise NodeTimeoutError(name, limit)

    # ── in a context's thread ────────────────────────────────────────────────────────────────────────

    def _work(self, ctx: Context) -> None:
        held = _Held()
        while (run := self._jobs.get()[2]) is not None:
            run(ctx, held)

    def _prefill(self, name: str, ctx: Context, held: _Held) -> None:
        tokens, at = self._plan.documents[name], 0
        begin, limit = perf_counter(), self._plan.nodes[name].time_limit
        held.key = None
        ctx.clear()
        for border in sorted({*self._plan.borders.get(name, ()), len(tokens)}):
            for n in pieces(border - at):
                self._check(name, begin, limit)
                with self._span(name, "prefill", n):
                    ctx.decode(tokens[at : at + n], logits="none")
                at += n
                if at == border:
                    self._keep((name, at if at < len(tokens) else None), ctx, tokens[:at], None)
                self._reports.progress(name, at)
        held.key, held.n_tokens = (name, None), at
        self._reports.done(name, at)

    def _branch(self, job: BranchJob, ctx: Context, held: _Held) -> None:
        planned, name = self._plan.branches[job.name], job.name
        key = (planned.after, planned.n_prefix)
        begin, limit = perf_counter(), job.time_limit
        try:
            state = self._states[key]
            if held.key == key and self._model.capabilities.attention_only:
                ctx.remove(0, held.n_tokens)  # it still holds what this goes on from
            else:
                held.key = None
                with self._span(name, "restore", state.snapshot.n_tokens):
                    state.snapshot.restore(ctx)
                held.key, held.n_tokens = key, state.snapshot.n_tokens
            restore_ms = 1e3 * (perf_counter() - begin)
        finally:
            self._let_go(key)
        answer = Answer(self._model, job.sampler, job.max_tokens, partial(self._reports.tell, name))
        try:
            tokens, kind = job.tokens_after(state.pending), "prompt"
            while True:
                self._check(name, begin, limit)
                with self._span(name, kind, len(tokens)):
                    ctx.decode(tokens)
                token = answer.step(ctx.logits())
                if token is None:
                    break
                tokens, kind = np.array([token], np.int32), "decode"
        except BaseException:
            with suppress(Exception):
                answer.close()
            raise
        finally:
            self._reports.answered(name, answer, restore_ms=restore_ms)
        self._keep((name, None), ctx, None, answer.pending)
        self._reports.done(name, answer.text)

    def _keep(self, key: _Key, ctx: Context, tokens: Tokens | None, pending: int | None) -> None:
        """Take a snapshot for those that go on from here, if there are any."""
        if self._uses.get(key, 0) > 0:
            with self._span(key[0], "export", ctx.position()):
                state = _State(ctx.snapshot(self._arena, tokens=tokens), pending)
            with self._lock:
                wanted = self._uses[key] > 0
                if wanted:
                    self._states[key] = state
            if not wanted:  # meanwhile they were all skipped
                state.snapshot.release()

    def _let_go(self, key: _Key) -> None:
        """One that goes on from there less."""
        with self._lock:
            self._uses[key] -= 1
            state = self._states.pop(key, None) if self._uses[key] <= 0 else None
        if state is not None:
            state.snapshot.release()

    @contextmanager
    def _span(self, name: str, kind: str, n_tokens: int) -> Iterator[None]:
        """Report how long a block took."""
        begin = perf_counter()
        try:
            yield
        finally:
            self._reports.span(Span(name, kind, begin, perf_counter(), n_tokens))


class _Held:
    """What a context's sequence begins with."""

    key: _Key | None = None
    n_tokens = 0


def pieces(n_tokens: int) -> list[int]:
    """Cut a document's next tokens into pieces as equal as can be: then none is smaller than need be (see `policy.TILE`)."""
    n = -(-n_tokens // PIECE)
    return [n_tokens // n + (i < n_tokens % n) for i in range(n)]
