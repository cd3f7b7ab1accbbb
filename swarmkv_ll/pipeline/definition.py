"""A pipeline as it is given: checked, sized, and ready to be run."""

from __future__ import annotations

import os
from typing import Any

from ..arena import Arena
from ..blob.layout import MAX_SEQ
from ..budget import HEADROOM
from ..errors import (
    ArenaExhaustedError,
    ContextBudgetError,
    InvalidArgumentError,
    PipelineError,
    PipelineFileError,
    SwarmKVError,
)
from ..limits import MAX_THREADS
from ..model import Model
from ..pipeline_file import STRATEGIES, PipelineSpec, Strategy, read_pipeline
from ..policy import Policy
from ..sampling import Sampler
from .isolated import arena_bytes
from .nodes import BranchNode, PrefillNode
from .plan import MAX_BRANCHES, Nodes, Texts, check_range, make_plan
from .results import PipelineResult
from .run import OnToken, Run


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


def load_model(spec: PipelineSpec) -> Model:
    """The model that a file names, or the default one."""
    from ..default_model import fetch_default_model, find_default_model

    return Model(spec.model or find_default_model() or fetch_default_model())


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
