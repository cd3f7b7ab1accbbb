"""A pipeline at work: what its nodes, executors and results have to do with each other."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, suppress
from time import perf_counter
from typing import TYPE_CHECKING, Any

from ..answer import Answer
from ..arena import Arena
from ..budget import HEADROOM, validate_context_budget
from ..errors import (
    ContextBudgetError,
    InvalidArgumentError,
    NodeCancelledError,
    NodeError,
    SwarmKVError,
    UpstreamError,
)
from ..fanout import N_BATCH
from ..pipeline_file import fill, placeholders
from ..sampling import Sampler
from ..timeline import Mark, Span
from .executor import BranchJob, Executor
from .isolated import IsolatedExecutor
from .nodes import BranchNode, PrefillNode
from .orchestrator import Orchestrator
from .results import NodeResult, PipelineResult, State
from .shared import SharedExecutor
from .workers import Workers

if TYPE_CHECKING:
    from .definition import Pipeline

OnToken = Callable[[str, str], None]


class Run:
    """A pipeline at work. Made by `Pipeline.start`; leaving its ``with`` block cancels what is not done.

    ``async for name, text in run`` gives every answer's text as it grows, from the beginning on.

    Attributes
    ----------
    nodes : dict of str to NodeResult
        As far as they have come.
    """

    def __init__(self, pipeline: Pipeline, on_token: OnToken | None) -> None:
        self._pipeline, self._plan, self._on_token = pipeline, pipeline.plan, on_token
        self._begun = perf_counter()
        self.nodes = {name: NodeResult(name, _kind(node)) for name, node in self._plan.nodes.items()}
        self._result = PipelineResult(pipeline.model.path.name, pipeline.strategy, self.nodes, begun=self._begun)
        self._texts: list[tuple[str, str]] = []
        self._text = dict.fromkeys(self.nodes, "")
        self._telling = threading.Lock()
        self._listeners: list[Callable[[], None]] = []
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self._length: dict[str, int] = {}  # tokens that each state holds
        self._spare = (
            pipeline.n_ctx - self._plan.n_cells_held - self._plan.n_own[0]
        )  # cells that nobody needs ("shared")
        self._pending: set[str] = set()  # branches whose state lacks the answer's last token
        self._executor: Executor | None = None
        self._orchestrator = Orchestrator(self._plan.needs, self._start, self._stop, self._skip)
        self._workers = Workers(pipeline.n_workers, self._function_begun, self.done, self.failed)
        # It also cleans up, so that nothing can interrupt that.
        self._thread = threading.Thread(target=self._main, name="swarmkv pipeline", daemon=True)

    def _begin(self) -> None:
        self._thread.start()

    def result(self, timeout: float | None = None) -> PipelineResult:
        """Wait for the end, at most `timeout` seconds.

        Raises
        ------
        TimeoutError
            It goes on.
        SwarmKVError
            It could not begin: no memory for its contexts.
        """
        if not self._ended.wait(None if timeout is None else min(timeout, threading.TIMEOUT_MAX)):
            raise TimeoutError(f"the pipeline is not done after {timeout:g} s")
        if self._error is not None:
            raise self._error
        return self._result

    def text(self, name: str) -> str:
        """A branch's answer as far as it has come."""
        return self._text[name]

    def cancel(self, name: str | None = None) -> None:
        """End a node, or all: its cells are free when the batch that is being computed is done.

        Raises
        ------
        InvalidArgumentError
            No such node.
        """
        if name is not None and name not in self.nodes:
            raise InvalidArgumentError(f"no node is named {name!r}; there are {', '.join(self.nodes)}")
        if name is None:
            self._workers.close()  # one that ends would make room for the next
        self._orchestrator.cancel(name)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._stop_all()
        except BaseException:  # Ctrl-C, before it was told or while it ends
            self._stop_all()
            raise

    def _stop_all(self) -> None:
        self.cancel()
        if self._thread.ident is not None:
            self._thread.join()

    async def __aiter__(self) -> AsyncIterator[tuple[str, str]]:
        loop, news, at = asyncio.get_running_loop(), asyncio.Event(), 0

        def listen() -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody listens any more
                loop.call_soon_threadsafe(news.set)

        self._listeners.append(listen)
        try:
            while True:
                news.clear()
                ended = self._ended.is_set()
                while at < len(self._texts):
                    yield self._texts[at]
                    at += 1
                if ended:
                    if self._error is not None:
                        raise self._error
                    return
                await news.wait()
        finally:
            self._listeners.remove(listen)

    # ── the thread that runs it ──────────────────────────────────────────────────────────────────────

    def _main(self) -> None:
        try:
            with ExitStack() as stack:
                self._executor = self._made_executor(stack)
                try:
                    self._orchestrator.run()
                finally:
                    self._settle()
                    self._executor.close()
        except BaseException as error:
            self._error = error
        finally:
            self._result.end_to_end_ms = 1e3 * self._now()
            self._ended.set()
            self._news()

    def _settle(self) -> None:
        """How each node ended: of those that never began nobody else tells."""
        for name, outcome in self._orchestrator.outcomes.items():
            node = self.nodes[name]
            node.state, node.error = _state(outcome.error), outcome.error

    def _made_executor(self, stack: ExitStack) -> Executor:
        made, plan = self._pipeline, self._plan
        if made.strategy == "shared":
            n_batch = max(N_BATCH, made.n_seq_max)
            ctx = made.model.context(made.n_ctx, made.n_seq_max, n_batch=n_batch, n_threads=made.n_threads)
            executor = SharedExecutor(stack.enter_context(ctx), plan, self, made.policy, made.n_parallel)
            self._result.steps = executor.decoder.steps
            return executor
        arena = made.arena
        if arena is None:
            arena = stack.enter_context(Arena(max(1, made.arena_bytes)))
        return IsolatedExecutor(made.model, plan, self, arena, made.n_parallel, made.n_ctx, made.n_threads)

    def _start(self, name: str, results: dict[str, Any]) -> None:
        state = self.nodes[name]
        state.ready_s, state.state = self._now(), "queued"
        try:
            self._start_node(name, self._plan.nodes[name], state, results)
        except Exception as error:
            self._end(name, error)
            raise

    def _start_node(self, name: str, node: Any, state: NodeResult, results: dict[str, Any]) -> None:
        assert self._executor is not None
        if isinstance(node, PrefillNode):
            state.n_tokens = len(self._plan.documents[name])
            self._length[name] = state.n_tokens
            self._executor.prefill(name)
        elif isinstance(node, BranchNode):
            self._start_branch(name, node, state, results)
        else:
            limit = getattr(node, "time_limit", None)
            if limit is not None:
                limit = min(limit, threading.TIMEOUT_MAX)
            self._workers.submit(name, lambda: node.run(results), limit)

    def _start_branch(self, name: str, node: BranchNode, state: NodeResult, results: dict[str, Any]) -> None:
        assert self._executor is not None
        planned = self._plan.branches[name]
        try:
            sampler = (node.sampler or Sampler()).for_branch(planned.index)
            prompt = node.prompt
            if isinstance(prompt, str):
                prompt = fill(prompt, {other: str(results[other]) for other in placeholders(prompt)})
            tokens = self._pipeline.texts.prompt(prompt, reply=planned.after in self._plan.branches)
            before = self._length[planned.after] if planned.n_prefix is None else planned.n_prefix
            self._check_size(name, before, len(tokens) + node.max_tokens)
        except BaseException as error:  # of the caller's __str__ or sampler, too
            self._executor.skip(name)
            if isinstance(error, SwarmKVError):
                cause = error if isinstance(error, ContextBudgetError) else None
                raise NodeError(name, "prompt", str(error), cause) from error
            if isinstance(error, Exception):
                raise
            raise NodeError(name, "prompt", repr(error)) from error
        state.n_prefix_tokens, state.n_tokens = before, len(tokens) + (planned.after in self._pending)
        self._executor.branch(BranchJob(name, tokens, node.max_tokens, sampler, node.priority, node.time_limit))

    def _check_size(self, name: str, before: int, n_own: int) -> None:
        """Whether a branch fits, whose texts may have come out longer than they were planned with.

        Others are not to lack the room that it takes.
        """
        made, planned = self._pipeline, self._plan.branches[name]
        validate_context_budget(before, n_own, made.longest)
        if made.strategy == "snapshot":
            if before + n_own > planned.n_before + planned.n_own + HEADROOM:
                raise ContextBudgetError(before, n_own, 0, planned.n_before + planned.n_own + HEADROOM)
        elif self._plan.n_children[name]:  # held until they begin
            if n_own > planned.n_own + self._spare:
                raise ContextBudgetError(before, n_own, 0, before + planned.n_own + self._spare)
            self._spare -= max(0, n_own - planned.n_own)
        elif n_own > self._plan.n_own[0] + self._spare:
            raise ContextBudgetError(before, n_own, 0, before + self._plan.n_own[0] + self._spare)

    def _stop(self, name: str) -> None:
        assert self._executor is not None
        if self.nodes[name].kind == "function":
            self._workers.cancel(name)
        else:
            self._executor.stop(name)

    def _skip(self, name: str) -> None:
        assert self._executor is not None
        self.nodes[name].state = "skipped"
        if name in self._plan.branches:
            self._executor.skip(name)

    def _function_begun(self, name: str) -> None:
        self.begun(name, perf_counter())

    def _now(self) -> float:
        return perf_counter() - self._begun

    # ── what executors report (see `Reports`) ────────────────────────────────────────────────────────

    def begun(self, name: str, at: float) -> None:
        """A node got its sequence, context or thread."""
        node = self.nodes[name]
        node.begun_s = at - self._begun
        if node.ended_s is None:  # a function may be cancelled before this is told
            node.state = "running"

    def progress(self, name: str, watermark: int) -> None:
        """So many tokens of a document have been computed."""
        self.nodes[name].n_done = watermark
        self._result.marks.append(Mark(name, self._now(), f"{watermark:,}"))
        self._orchestrator.progress(name, watermark)

    def tell(self, name: str, text: str) -> None:
        """An answer has grown."""
        with self._telling:
            self._texts.append((name, text))
            self._text[name] += text
            if self._on_token:
                self._on_token(name, text)
        self._news()

    def answered(self, name: str, answer: Answer, *, fork_ms: float = 0.0, restore_ms: float = 0.0) -> None:
        """An answer is complete, or is not going to be."""
        node = self.nodes[name]
        node.tokens, node.value, node.finished = answer.tokens, answer.text, answer.finished
        node.token_s = [at - self._begun for at in answer.times]
        node.fork_ms, node.restore_ms = fork_ms, restore_ms
        self._length[name] = node.n_prefix_tokens + node.n_tokens + len(answer.tokens)
        if answer.pending is not None:
            self._length[name] -= 1
            self._pending.add(name)

    def span(self, span: Span) -> None:
        """A node did something."""
        if span.kind == "export":
            self.nodes[span.lane].export_ms += 1e3 * (span.end - span.begin)
        self._result.spans.append(
            Span(span.lane, span.kind, span.begin - self._begun, span.end - self._begun, span.n_tokens)
        )

    def done(self, name: str, value: Any) -> None:
        """A node has ended."""
        self.nodes[name].value = value
        self._end(name, None)
        self._orchestrator.done(name, value)

    def failed(self, name: str, error: BaseException) -> None:
        """A node has failed."""
        self._end(name, error)
        self._orchestrator.failed(name, error)

    def _end(self, name: str, error: BaseException | None) -> None:
        node = self.nodes[name]
        node.ended_s, node.error, node.state = self._now(), error, _state(error)

    def _news(self) -> None:
        for listen in list(self._listeners):
            listen()


def _kind(node: Any) -> Any:
    return "prefill" if isinstance(node, PrefillNode) else "branch" if isinstance(node, BranchNode) else "function"


def _state(error: BaseException | None) -> State:
    """How a node ended."""
    if error is None:
        return "done"
    if isinstance(error, NodeCancelledError):
        return "cancelled"
    return "skipped" if isinstance(error, UpstreamError) else "failed"
