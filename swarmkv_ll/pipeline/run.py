"""A pipeline, checked; and one at work: what its nodes, executors and results have to do with each other."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, suppress
from time import perf_counter
from typing import Any

from ..answer import Answer
from ..arena import Arena
from ..blob.layout import MAX_SEQ
from ..budget import HEADROOM, validate_context_budget
from ..errors import (
    ArenaExhaustedError,
    ContextBudgetError,
    InvalidArgumentError,
    NodeCancelledError,
    NodeError,
    PipelineError,
    PipelineFileError,
    SwarmKVError,
    UpstreamError,
)
from ..fanout import N_BATCH
from ..model import Model
from ..pipeline_file import PipelineSpec, fill, placeholders, read_pipeline
from ..policy import Policy
from ..sampling import Sampler
from ..timeline import Mark, Span
from .executor import BranchJob, Executor
from .isolated import IsolatedExecutor, arena_bytes
from .nodes import BranchNode, PrefillNode
from .orchestrator import Orchestrator
from .plan import MAX_BRANCHES, MAX_THREADS, STRATEGIES, Nodes, Strategy, Texts, check_range, make_plan
from .results import NodeResult, PipelineResult, State
from .shared import SharedExecutor
from .workers import Workers

OnToken = Callable[[str, str], None]


class Pipeline:
    """A graph of nodes, checked.

    Parameters
    ----------
    model : Model
    nodes : mapping of str to node, or iterable of (str, node)
        `PrefillNode`, `BranchNode`, `FunctionNode`, or anything with `depends_on` and `run(results)` (`Node`).
    strategy : {"shared", "snapshot"}
        Branches as sequences of one unified cache that decode in one batch; or each in a context of its own in a
        thread, isolated, from snapshots. There, what a branch computes is the same bit for bit whatever runs beside it.
    chat : bool
        Documents and prompts are turns of the model's chat template: a document opens a user's turn, a branch's prompt
        ends it; what goes on from an answer is the next turn.
    n_ctx : int, optional
        Cells of the context ("shared"), or of each ("snapshot"). By default what is needed.
    n_parallel : int, optional
        Branches at once: by default 64 ("shared"), or 2 ("snapshot": contexts).
    n_workers : int
        Functions at once.
    n_threads : int, optional
        As for `Model.context`.
    policy : Policy, optional
        Who goes into a batch ("shared"): by default `FairShare()`.
    arena : Arena, optional
        Where snapshots go ("snapshot"). By default one as large as needed.

    Attributes
    ----------
    plan : Plan
        Sizes and order.
    n_ctx, n_seq_max : int
        Of each context.

    Raises
    ------
    PipelineError
        It cannot run: cycles, unknown and duplicate names, empty texts, budgets of paths, parts of a document that are
        longer than it, an arena too small: all in one error (`problems`). No context and no buffer was made.
    InvalidArgumentError
        Another parameter is out of range.
    """

    def __init__(
        self,
        model: Model,
        nodes: Nodes,
        *,
        strategy: Strategy = "shared",
        chat: bool = False,
        n_ctx: int | None = None,
        n_parallel: int | None = None,
        n_workers: int = 4,
        n_threads: int | None = None,
        policy: Policy | None = None,
        arena: Arena | None = None,
    ) -> None:
        if strategy not in STRATEGIES:
            raise InvalidArgumentError(f"strategy should be one of {', '.join(STRATEGIES)}, is {strategy!r}")
        if policy is not None and not hasattr(policy, "choose"):
            raise InvalidArgumentError(f"policy should be a Policy, is {type(policy).__name__}")
        n_ctx = check_range("n_ctx", n_ctx, 1, 2**31 - 256)
        n_parallel = check_range("n_parallel", n_parallel, 1, 255)
        check_range("n_workers", n_workers, 1, 1024)
        check_range("n_threads", n_threads, 1, MAX_THREADS)
        self.model, self.strategy, self.policy, self.arena = model, strategy, policy, arena
        self.texts = Texts(model, chat)
        self.longest = min(n_ctx or model.n_ctx_train, model.n_ctx_train)
        self.plan = make_plan(nodes, self.texts, self.longest)
        self.n_workers, self.n_threads = n_workers, n_threads
        n_branches = max(1, len(self.plan.branches))
        self.arena_bytes = 0
        if strategy == "shared":
            self._size_shared(n_ctx, min(n_parallel or MAX_BRANCHES, n_branches), n_parallel is None)
        else:
            n_contexts = 2 if n_parallel is None else n_parallel
            self.n_seq_max, self.n_parallel = 1, min(n_contexts, max(1, n_branches + len(self.plan.documents) - 1))
            self.n_ctx = n_ctx or self.plan.n_longest + HEADROOM
            self.arena_bytes = arena_bytes(model, self.plan) if self.plan.uses else 0
            if arena is not None and arena.stats().largest_free < self.arena_bytes:
                stats = arena.stats()
                error = ArenaExhaustedError(self.arena_bytes, stats.free, stats.largest_free)
                raise PipelineError(f"the snapshots of this pipeline do not fit: {error}", [error])

    def _size_shared(self, n_ctx: int | None, n_parallel: int, as_fits: bool) -> None:
        """How many cells and sequences there have to be, so that those which wait always get their turn."""
        plan, cuttable = self.plan, self.model.capabilities.attention_only
        apart = sum(2 if cuttable else 1 + len(plan.borders.get(name, ())) for name in plan.documents)
        n_most = MAX_SEQ - apart - plan.n_held
        if n_most < 1 or (n_parallel > n_most and not as_fits):
            raise PipelineError(
                f"{apart} sequences for documents, {plan.n_held} for branches that others go on from and {n_parallel} "
                f"for branches at once are more than {MAX_SEQ}"
            )
        self.n_parallel = n_parallel = min(n_parallel, n_most)
        own = plan.n_own
        if n_ctx is not None and plan.n_cells_held + own[0] > n_ctx:
            error = ContextBudgetError(plan.n_cells_held, own[0], 0, n_ctx)
            raise PipelineError(
                f"documents, branches that others go on from, and the longest other one: {error}", [error]
            )
        self.n_seq_max = apart + plan.n_held + n_parallel
        self.n_ctx = n_ctx or plan.n_cells_held + sum(own[:n_parallel]) + HEADROOM
        self.n_ctx = max(self.n_ctx, self.n_seq_max)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], model: Model | None = None, **options: Any) -> Pipeline:
        """A pipeline as a TOML file describes it (docs/pipeline-file.md).

        Parameters
        ----------
        model : Model, optional
            By default the one the file names, or the default model: loaded now.
        options
            As for `Pipeline`; they go before what the file says.

        Raises
        ------
        PipelineError
            With all problems; those of the file (`PipelineFileError`) tell line and key.
        """
        spec = read_pipeline(path)
        return cls.from_spec(spec, model or load_model(spec), **options)

    @classmethod
    def from_spec(cls, spec: PipelineSpec, model: Model, **options: Any) -> Pipeline:
        """A pipeline of what `read_pipeline` gives."""
        nodes: list[tuple[str, Any]] = [
            (document.name, PrefillNode(document.text, document.time_limit)) for document in spec.documents
        ]
        for agent in spec.agents:
            nodes.append(
                (
                    agent.name,
                    BranchNode(
                        agent.prompt,
                        agent.depends_on,
                        agent.required_prefix_tokens,
                        agent.max_tokens,
                        Sampler(**agent.sampling) if agent.sampling else None,  # type: ignore[arg-type]
                        agent.priority,
                        agent.time_limit,
                    ),
                )
            )
        chat = model.chat_template is not None if spec.chat is None else spec.chat
        given = {"strategy": spec.strategy, "chat": chat, "n_ctx": spec.n_ctx, "n_parallel": spec.n_parallel}
        try:
            return cls(model, nodes, **{**given, **options})
        except PipelineError as error:
            located = [_located(spec, problem) for problem in error.problems]
            if located == list(error.problems):
                raise
            raise PipelineError.of(located) from error

    def run(self, *, on_token: OnToken | None = None) -> PipelineResult:
        """Run every node, and wait for the end.

        What goes wrong with a node is told in the result (`errors`, `check`); those that depend on it are skipped, the
        others finish. Ctrl-C cancels all of them, gives all memory back, and is raised again.

        Parameters
        ----------
        on_token : callable, optional
            ``on_token(name, text)`` as answers grow; whole characters. One call at a time.
        """
        run = Run(self, on_token)
        with run:  # before it begins: wherever Ctrl-C comes, it is cancelled
            run._begin()
            return run.result()

    def start(self, *, on_token: OnToken | None = None) -> Run:
        """Run every node in the background. `on_token` is as for `run`."""
        run = Run(self, on_token)
        run._begin()
        return run

    def __repr__(self) -> str:
        return f"<Pipeline {len(self.plan.nodes)} nodes, strategy {self.strategy!r}, n_ctx={self.n_ctx}>"


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
        self._all_cancelled = False
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
        self._all_cancelled = self._all_cancelled or name is None
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
            self._workers.submit(name, lambda: self._call(name, node, results), limit)

    def _call(self, name: str, node: Any, results: dict[str, Any]) -> Any:
        if self._all_cancelled:  # one that ends makes room for the next, which is not cancelled yet
            raise NodeCancelledError(name)
        return node.run(results)

    def _start_branch(self, name: str, node: BranchNode, state: NodeResult, results: dict[str, Any]) -> None:
        assert self._executor is not None
        planned = self._plan.branches[name]
        try:
            sampler = (node.sampler or Sampler()).for_branch(list(self._plan.branches).index(name))
            prompt = node.prompt
            if isinstance(prompt, str):
                prompt = fill(prompt, {other: str(results[other]) for other in placeholders(prompt)})
            tokens = self._pipeline.texts.prompt(prompt, reply=planned.after in self._plan.branches)
            before = self._length[planned.after] if planned.n_prefix is None else planned.n_prefix
            self._check_size(name, before, len(tokens) + node.max_tokens)
        except BaseException as error:  # of the caller's __str__ or sampler, too
            self._executor.skip(name)
            if not isinstance(error, SwarmKVError):
                raise error if isinstance(error, Exception) else NodeError(name, "prompt", repr(error)) from error
            cause = error if isinstance(error, ContextBudgetError) else None
            raise NodeError(name, "prompt", str(error), cause) from error
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
        if answer.tokens and not answer.finished:
            self._length[name] -= 1  # no cell holds the last one
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


def load_model(spec: PipelineSpec) -> Model:
    """The model that a file names, or the default one."""
    from ..default_model import fetch_default_model, find_default_model

    return Model(spec.model or find_default_model() or fetch_default_model())


def _kind(node: Any) -> Any:
    return "prefill" if isinstance(node, PrefillNode) else "branch" if isinstance(node, BranchNode) else "function"


def _state(error: BaseException | None) -> State:
    """How a node ended."""
    if error is None:
        return "done"
    if isinstance(error, NodeCancelledError):
        return "cancelled"
    return "skipped" if isinstance(error, UpstreamError) else "failed"


def _located(spec: PipelineSpec, problem: SwarmKVError) -> SwarmKVError:
    """A problem with the line of the file where it stands, if that can be told."""
    name = getattr(problem, "node", None) or (problem.edge[0] if hasattr(problem, "edge") else None)
    if not isinstance(name, str):
        return problem
    table = "documents" if name in [document.name for document in spec.documents] else "agents"
    at_fault = getattr(problem, "key", "depends_on")
    for written in {"document": ("text", "file"), "prompt": ("prompt_file",)}.get(at_fault, ()):
        if (table, name, written) in spec.lines:
            at_fault = written
    key = (table, name, at_fault)
    located = PipelineFileError(spec.path, spec.line_of(*key), ".".join(key), str(problem))
    located.__cause__ = problem  # it has the numbers
    return located
