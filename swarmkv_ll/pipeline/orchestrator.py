"""Starts each node of a graph when what it waits for is there. Knows names, edges and results only. Pure Python."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

from ..dag import dependents
from ..errors import NodeCancelledError, UpstreamError

Needs = Mapping[str, int | None]
"""What a node waits for: the result of each of these (None), or so much of its progress."""


class Outcome(NamedTuple):
    """How a node ended: its result, or what it raised."""

    value: Any = None
    error: BaseException | None = None


class Orchestrator:
    """Runs a graph.

    Parameters
    ----------
    graph : mapping of str to Needs
        A graph without problems (`dag.check`): each node, and what it waits for.
    start : callable
        ``start(name, results)`` begins a node, and returns at once; `results` are those it waited for. What it raises
        is the node's failure.
    stop : callable
        ``stop(name)`` asks a node that has begun to end.
    skip : callable
        ``skip(name)`` tells that a node will never begin.

    Notes
    -----
    `done`, `failed`, `progress` and `cancel` may be called from any thread; of several that end a node the first counts.
    When one of the first three returns, what was only waiting for it has been started: an engine that reports progress
    between two batches has the newcomers in its next one. So `start`, `stop` and `skip` are called by the threads that
    report, one at a time.
    """

    def __init__(
        self,
        graph: Mapping[str, Needs],
        start: Callable[[str, dict[str, Any]], None],
        stop: Callable[[str], None],
        skip: Callable[[str], None],
    ) -> None:
        self._graph, self._start, self._stop, self._skip = graph, start, stop, skip
        self._dependents = dependents(graph)
        self._lacks = {name: dict(needs) for name, needs in graph.items()}
        self._begun: set[str] = set()
        self._events: deque[Callable[[], None]] = deque()
        self._handling, self._lock = False, threading.RLock()
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()  # for the thread that is in `run`
        self._broken: BaseException | None = None
        self.outcomes: dict[str, Outcome] = {}

    # ── told from any thread ─────────────────────────────────────────────────────────────────────────

    def done(self, name: str, value: Any) -> None:
        """A node has ended, with this result."""
        self._handle(lambda: self._settle(name, Outcome(value)))

    def failed(self, name: str, error: BaseException) -> None:
        """A node has ended with an error."""
        self._handle(lambda: self._settle(name, Outcome(error=error)))

    def progress(self, name: str, amount: int) -> None:
        """A node has come so far."""
        self._handle(lambda: self._advance(name, amount))

    def cancel(self, name: str | None = None) -> None:
        """End a node, or all of them, before it is done."""
        self._orders.put(lambda: self._cancel(self._graph if name is None else (name,)))

    def _handle(self, event: Callable[[], None]) -> None:
        self._events.append(event)
        with self._lock:
            if self._handling:
                return  # called by something that is started or stopped just now: handled when that has returned
            self._handling = True
            try:
                while self._events:
                    self._events.popleft()()
            except BaseException as error:  # of `stop` or `skip`: nobody is to wait for what may never come
                self._broken = error
            finally:
                self._handling = False
            if self._over:
                self._orders.put(lambda: None)

    @property
    def _over(self) -> bool:
        return self._broken is not None or len(self.outcomes) == len(self._graph)

    # ── the thread that waits for it ─────────────────────────────────────────────────────────────────

    def run(self) -> dict[str, Outcome]:
        """Run every node; returns when each has ended, one way or the other. Raises what `stop` or `skip` raised."""
        for name in self._graph:
            self._handle(partial(self._begin_if_ready, name))
        while not self._over:
            self._handle(self._orders.get())
        if self._broken is not None:
            raise self._broken
        return self.outcomes

    def _begin_if_ready(self, name: str) -> None:
        if self._lacks[name] or name in self._begun or name in self.outcomes:
            return
        self._begun.add(name)
        results = {other: self.outcomes[other].value for other in self._graph[name] if other in self.outcomes}
        try:
            self._start(name, results)
        except BaseException as error:  # SystemExit of the caller's, too
            self._settle(name, Outcome(error=error))

    def _settle(self, name: str, outcome: Outcome) -> None:
        if name in self.outcomes:
            return
        self.outcomes[name] = outcome
        if outcome.error is None:
            for other in self._dependents[name]:
                self._lacks[other].pop(name, None)
                self._begin_if_ready(other)
            return
        error = outcome.error
        upstream = error if isinstance(error, UpstreamError) else UpstreamError(name, error)
        ended = [name]
        while ended:
            for other in self._dependents[ended.pop()]:
                if other not in self._begun and other not in self.outcomes:
                    self._skip(other)
                    self.outcomes[other] = Outcome(error=upstream)
                    ended.append(other)

    def _advance(self, name: str, amount: int) -> None:
        for other in self._dependents[name]:
            needed = self._lacks[other].get(name)
            if needed is not None and amount >= needed:
                del self._lacks[other][name]
                self._begin_if_ready(other)

    def _cancel(self, names: Iterable[str]) -> None:
        for name in names:
            if name in self.outcomes:
                continue
            if name in self._begun:
                self._stop(name)
            else:
                self._skip(name)
                self._settle(name, Outcome(error=NodeCancelledError(name)))
