"""What a pipeline's run gives: each node's result and times, the run's own figures, and its timeline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from statistics import mean, pstdev
from typing import Any, Literal

import numpy as np

from ..batching import Step
from ..errors import UpstreamError
from ..timeline import Mark, Span, Timeline
from ..timeline import Step as Batch

State = Literal["waiting", "queued", "running", "done", "failed", "skipped", "cancelled"]


@dataclass
class NodeResult:
    """One node's result, and where its time went. Moments are seconds since the run began.

    Attributes
    ----------
    name : str
    kind : {"prefill", "branch", "function"}
    state : str
        "waiting" for others, "queued" for a sequence or thread, "running", and at last "done", "failed", "skipped"
        (one that it depends on failed) or "cancelled".
    value : object
        A branch's text, a document's number of tokens, or what a function returned.
    error : BaseException or None
    tokens : list of int
        A branch's answer.
    finished : bool
        Whether the model ended the answer itself.
    n_prefix_tokens, n_tokens : int
        Tokens it went on from without computing them, and those it fed: a document's, a prompt's; behind a branch also
        the last token of that answer, if no cell holds it.
    n_done : int
        How many of a document's tokens have been computed.
    ready_s, begun_s, ended_s : float or None
        When all it waits for was there, when it got its sequence or thread, and when it was done.
    token_s : list of float
        When each token of the answer was chosen.
    fork_ms, restore_ms, export_ms : float
        Sharing a sequence's cells, putting a state into a context, taking one out.
    """

    name: str
    kind: Literal["prefill", "branch", "function"]
    state: State = "waiting"
    value: Any = None
    error: BaseException | None = None
    tokens: list[int] = field(default_factory=list)
    finished: bool = False
    n_prefix_tokens: int = 0
    n_tokens: int = 0
    n_done: int = 0
    ready_s: float | None = None
    begun_s: float | None = None
    ended_s: float | None = None
    token_s: list[float] = field(default_factory=list)
    fork_ms: float = 0.0
    restore_ms: float = 0.0
    export_ms: float = 0.0

    @property
    def text(self) -> str:
        """The result as text."""
        return "" if self.value is None else str(self.value)

    @property
    def waited_ms(self) -> float | None:
        """From when it could begin until it did."""
        return _ms(self.ready_s, self.begun_s)

    @property
    def time_ms(self) -> float | None:
        """From when it began until it was done."""
        return _ms(self.begun_s, self.ended_s)

    @property
    def first_token_ms(self) -> float | None:
        """Time to first token: from when it could begin, waiting and prompt included."""
        return _ms(self.ready_s, self.token_s[0]) if self.token_s else None

    @property
    def gaps_ms(self) -> list[float]:
        """Between one token and the next."""
        return [1e3 * gap for gap in np.diff(self.token_s).tolist()]

    @property
    def tokens_per_s(self) -> float | None:
        """From the first token to the last; None with fewer than two."""
        if len(self.token_s) < 2:
            return None
        return (len(self.token_s) - 1) / (self.token_s[-1] - self.token_s[0])

    @property
    def gaps(self) -> dict[str, float] | None:
        """Of `gaps_ms` the percentiles "p50", "p95" and "p99", "max", and "jitter", their standard deviation."""
        gaps = self.gaps_ms
        if not gaps:
            return None
        spread = dict(zip(("p50", "p95", "p99"), np.percentile(gaps, (50, 95, 99)).tolist(), strict=True))
        return {**spread, "max": max(gaps), "jitter": pstdev(gaps)}

    def to_dict(self) -> dict[str, Any]:
        """As plain data for JSON."""
        return {
            "name": self.name,
            "kind": self.kind,
            "state": self.state,
            "value": _plain(self.value),
            "error": None if self.error is None else f"{type(self.error).__name__}: {self.error}",
            "tokens": self.tokens,
            "finished": self.finished,
            "n_prefix_tokens": self.n_prefix_tokens,
            "n_tokens": self.n_tokens,
            "waited_ms": self.waited_ms,
            "time_ms": self.time_ms,
            "first_token_ms": self.first_token_ms,
            "first_token_at_ms": 1e3 * self.token_s[0] if self.token_s else None,
            "gaps_ms": self.gaps,
            "tokens_per_s": self.tokens_per_s,
            "fork_ms": self.fork_ms,
            "restore_ms": self.restore_ms,
            "export_ms": self.export_ms,
        }


@dataclass
class PipelineResult(Mapping[str, NodeResult]):
    """What a run gives: a mapping of names to `NodeResult`, in the order of the graph.

    Attributes
    ----------
    model, strategy : str
    nodes : dict of str to NodeResult
    end_to_end_ms : float
        All of it, contexts made and closed included; without loading the model.
    steps : list of Step
        The engine's batches ("shared").
    spans : list of Span
    """

    model: str
    strategy: str
    nodes: dict[str, NodeResult]
    end_to_end_ms: float = 0.0
    steps: list[Step] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    begun: float = 0.0

    def __getitem__(self, name: str) -> NodeResult:
        return self.nodes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.nodes)

    def __len__(self) -> int:
        return len(self.nodes)

    @property
    def errors(self) -> dict[str, BaseException]:
        """What went wrong, by node."""
        return {name: node.error for name, node in self.nodes.items() if node.error is not None}

    def check(self) -> PipelineResult:
        """Itself, if every node is done; else raises what the first that failed raised."""
        for node in self.nodes.values():
            if node.error is not None and node.state != "skipped":
                raise node.error
        return self

    @property
    def n_generated(self) -> int:
        """Tokens of all answers."""
        return sum(len(node.tokens) for node in self.nodes.values())

    def batches(self) -> dict[str, float] | None:
        """Of the engine's batches: how many, and tokens in one: mean and most; None without ("snapshot")."""
        if not self.steps:
            return None
        sizes = [step.n_tokens for step in self.steps]
        return {"n": len(sizes), "mean_tokens": mean(sizes), "max_tokens": max(sizes)}

    def shares(self) -> dict[str, float]:
        """Share of the time by kind of work.

        "shared": of the batches' time. A batch's time in the engine is divided by tokens among "prefill", "prompt" and
        "decode"; "sample" is choosing tokens, "orchestration" all else that a step takes. "snapshot": of the contexts'
        times taken together, with "export" and "restore".
        """
        if not self.steps:
            spent: dict[str, float] = {}
            for span in self.spans:
                spent[span.kind] = spent.get(span.kind, 0.0) + span.end - span.begin
            return {kind: s / sum(spent.values()) for kind, s in spent.items()}
        seconds = dict.fromkeys(("prefill", "prompt", "decode", "sample", "orchestration"), 0.0)
        for step in self.steps:
            for part in step.parts:
                seconds[part.kind] += step.engine_s * part.n_tokens / step.n_tokens
            seconds["sample"] += step.sample_s
            seconds["orchestration"] += step.overhead_s
        total = sum(seconds.values())
        return {kind: s / total for kind, s in seconds.items()} if total else {}

    def timeline(self) -> Timeline:
        """Who did what when: a lane a node."""
        spans = list(self.spans)
        for node in self.nodes.values():
            if node.ready_s is not None:
                until = node.begun_s if node.begun_s is not None else node.ended_s
                if until is not None and until > node.ready_s + 1e-3:
                    spans.append(Span(node.name, "wait", node.ready_s, until))
            if node.kind == "function" and node.begun_s is not None and node.ended_s is not None:
                spans.append(Span(node.name, "run", node.begun_s, node.ended_s))
        batches = []
        for step in self.steps:
            begin, end = step.decode_begin - self.begun, step.decode_end - self.begun
            batches.append(Batch(begin, end, step.n_tokens, len(step.parts)))
            spans += [Span(part.name, part.kind, begin, end, part.n_tokens) for part in step.parts]
        failed = []
        for node in self.nodes.values():
            cause = self.nodes[node.error.node] if isinstance(node.error, UpstreamError) else node
            if node.error is not None and cause.ended_s is not None:
                failed.append(Mark(node.name, cause.ended_s, node.state))
        return Timeline(tuple(self.nodes), tuple(spans), (*self.marks, *failed), tuple(batches))

    def to_dict(self) -> dict[str, Any]:
        """As plain data for JSON."""
        n, seconds = self.n_generated, self.end_to_end_ms / 1e3
        return {
            "model": self.model,
            "strategy": self.strategy,
            "end_to_end_ms": self.end_to_end_ms,
            "generated_tokens": n,
            "tokens_per_s": n / seconds if seconds else None,
            "batches": self.batches(),
            "time_shares": self.shares(),
            "nodes": [node.to_dict() for node in self.nodes.values()],
        }


def _ms(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else 1e3 * (end - begin)


def _plain(value: Any) -> Any:
    """A value that JSON knows, or how it tells itself."""
    try:
        told = repr(value)
    except Exception as error:  # of the caller's, or an integer of too many digits
        return f"<{type(value).__name__}: {type(error).__name__}>"
    return value if value is None or isinstance(value, str | int | float) else told
