"""Nodes begin when what they wait for is there; each has one outcome, whatever fails, is cancelled or comes late."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmkv_ll.errors import NodeCancelledError, NodeTimeoutError, UpstreamError
from swarmkv_ll.pipeline.orchestrator import Orchestrator, Outcome
from swarmkv_ll.pipeline.workers import Workers

Graph = Mapping[str, Mapping[str, int | None]]

WAIT = 60.0


class WrongError(Exception):
    pass


class Harness:
    """A graph whose nodes are begun, stopped and skipped into lists, and ended by the test."""

    def __init__(self, graph: Graph, start: Callable[[str, dict[str, Any]], None] | None = None) -> None:
        self.graph, self.started, self.results = graph, [], {}
        self.stopped: list[str] = []
        self.skipped: list[str] = []
        self._start = start
        self._changed = threading.Condition()
        self.orchestrator = Orchestrator(graph, self.start, self.stop, self.skip)
        self.thread = threading.Thread(target=self.orchestrator.run, daemon=True)
        self.thread.start()

    def start(self, name: str, results: dict[str, Any]) -> None:
        with self._changed:
            self.started.append(name)
            self.results[name] = results
            self._changed.notify_all()
        if self._start:
            self._start(name, results)

    def stop(self, name: str) -> None:
        with self._changed:
            self.stopped.append(name)
            self._changed.notify_all()

    def skip(self, name: str) -> None:
        with self._changed:
            self.skipped.append(name)
            self._changed.notify_all()

    def until(self, *started: str) -> None:
        """Wait until just these have begun."""
        self.wait(lambda: len(self.started) >= len(started))
        assert sorted(self.started) == sorted(started)

    def wait(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, WAIT)

    def outcomes(self) -> dict[str, Outcome]:
        """Wait for the end."""
        self.thread.join(WAIT)
        assert not self.thread.is_alive(), "it waits for ever"
        found = self.orchestrator.outcomes
        assert found.keys() == self.graph.keys()
        assert len(self.started) == len(set(self.started))
        assert len(self.skipped) == len(set(self.skipped))
        assert not set(self.started) & set(self.skipped)
        assert set(self.started) | set(self.skipped) == set(self.graph)
        return found


def needs(**depends_on: str) -> dict[str, dict[str, int | None]]:
    """A graph of edges that wait for results: `needs(a="", b="a")`."""
    return {name: dict.fromkeys(others.split()) for name, others in depends_on.items()}


def assert_upstream(outcome: Outcome, node: str, cause: BaseException) -> None:
    assert isinstance(outcome.error, UpstreamError)
    assert (outcome.error.node, outcome.error.cause) == (node, cause)
    assert outcome.value is None


DIAMOND = needs(a="", b="a", c="a", d="b c", e="")


# ── order ────────────────────────────────────────────────────────────────────────────────────────────


def test_a_node_begins_when_all_it_waits_for_is_there() -> None:
    run = Harness(DIAMOND)
    run.until("a", "e")
    run.orchestrator.done("a", 1)
    run.until("a", "e", "b", "c")
    run.orchestrator.done("c", 3)
    run.orchestrator.done("e", 5)
    run.orchestrator.done("b", 2)
    run.until("a", "e", "b", "c", "d")
    run.orchestrator.done("d", 4)
    assert run.outcomes() == {name: Outcome(value) for name, value in zip("acebd", (1, 3, 5, 2, 4), strict=True)}
    assert run.results == {"a": {}, "e": {}, "b": {"a": 1}, "c": {"a": 1}, "d": {"b": 2, "c": 3}}
    assert run.skipped == run.stopped == []


def test_nodes_that_are_ready_begin_in_their_order() -> None:
    names = [f"n{i}" for i in range(50)]
    run = Harness({"root": {}, **{name: {"root": None} for name in names}})
    run.orchestrator.done("root", None)
    run.wait(lambda: len(run.started) == 51)
    assert run.started == ["root", *names]
    for name in names:
        run.orchestrator.done(name, None)
    run.outcomes()


def test_a_graph_of_nothing_is_done() -> None:
    assert Harness({}).outcomes() == {}


def test_progress_is_enough_where_no_more_is_needed() -> None:
    run = Harness({"doc": {}, "at 10": {"doc": 10}, "at 20": {"doc": 20}, "whole": {"doc": None}, "f": {"at 10": None}})
    run.until("doc")
    run.orchestrator.progress("doc", 9)
    run.orchestrator.progress("doc", 10)
    run.until("doc", "at 10")
    run.orchestrator.done("at 10", "x")
    run.until("doc", "at 10", "f")
    run.orchestrator.progress("doc", 25)  # past it will do, too
    run.until("doc", "at 10", "f", "at 20")
    run.orchestrator.progress("doc", 30)
    run.orchestrator.done("doc", 30)
    run.until("doc", "at 10", "f", "at 20", "whole")
    for name in ("at 20", "whole", "f"):
        run.orchestrator.done(name, None)
    run.outcomes()
    assert run.results["at 10"] == {}
    assert run.results["whole"] == {"doc": 30}


def test_a_document_that_is_done_has_come_as_far_as_anybody_needs() -> None:
    run = Harness({"doc": {}, "part": {"doc": 10}})
    run.until("doc")
    run.orchestrator.done("doc", 10)
    run.until("doc", "part")
    run.orchestrator.done("part", None)
    run.orchestrator.progress("doc", 10)
    run.outcomes()


def test_progress_of_one_does_not_make_up_for_another() -> None:
    run = Harness({"doc": {}, "f": {}, "part": {"doc": 10, "f": None}})
    run.until("doc", "f")
    run.orchestrator.progress("doc", 10)
    run.orchestrator.progress("doc", 11)
    run.orchestrator.progress("f", 100)  # its result is wanted
    run.orchestrator.progress("part", 5)
    assert sorted(run.started) == ["doc", "f"]
    run.orchestrator.done("f", 1)
    run.until("doc", "f", "part")
    assert run.results["part"] == {"f": 1}
    run.orchestrator.done("doc", 2)
    run.orchestrator.done("part", 3)
    run.outcomes()


# ── failure ──────────────────────────────────────────────────────────────────────────────────────────


def test_a_failure_reaches_all_that_depend_on_it_and_only_those() -> None:
    graph = needs(a="", b="a", c="b", d="c other", other="", e="other", f="e", g="a other")
    run, error = Harness(graph), WrongError()
    run.until("a", "other")
    run.orchestrator.failed("a", error)
    run.orchestrator.done("other", 1)
    run.until("a", "other", "e")
    run.orchestrator.done("e", 2)
    run.until("a", "other", "e", "f")
    run.orchestrator.done("f", 3)
    found = run.outcomes()
    assert found["a"] == Outcome(error=error)
    for name in "bcdg":
        assert_upstream(found[name], "a", error)
    assert {name: found[name] for name in ("other", "e", "f")} == {
        "other": Outcome(1),
        "e": Outcome(2),
        "f": Outcome(3),
    }
    assert sorted(run.skipped) == ["b", "c", "d", "g"]


def test_a_failure_that_was_another_s_keeps_its_root() -> None:
    """What an engine tells of a branch whose document failed."""
    run, root = Harness(needs(a="", b="a", c="b")), UpstreamError("elsewhere", WrongError())
    run.until("a")
    run.orchestrator.failed("a", root)
    found = run.outcomes()
    assert found["b"].error is found["c"].error is root


def test_of_two_failures_the_first_is_told() -> None:
    run, first, second = Harness(needs(a="", b="", c="a b", d="c")), WrongError(1), WrongError(2)
    run.until("a", "b")
    run.orchestrator.failed("b", second)
    run.orchestrator.failed("a", first)
    found = run.outcomes()
    assert_upstream(found["c"], "b", second)
    assert_upstream(found["d"], "b", second)


def test_a_document_that_fails_takes_those_that_have_not_begun() -> None:
    """One that has begun from a part of it ends by itself."""
    run, error = (
        Harness({"doc": {}, "f": {}, "early": {"doc": 5}, "late": {"doc": 9}, "both": {"doc": 5, "f": None}}),
        WrongError(),
    )
    run.orchestrator.progress("doc", 5)
    run.until("doc", "f", "early")
    run.orchestrator.failed("doc", error)
    run.orchestrator.done("f", 1)
    run.orchestrator.done("early", 2)
    found = run.outcomes()
    assert found["early"] == Outcome(2)
    assert_upstream(found["late"], "doc", error)
    assert_upstream(found["both"], "doc", error)


def test_what_start_raises_is_the_node_s_failure() -> None:
    error = WrongError()

    def start(name: str, _: Any) -> None:
        if name in ("b", "e"):
            raise error

    run = Harness(DIAMOND, start)
    run.orchestrator.done("a", 1)
    run.until("a", "e", "b", "c")
    run.orchestrator.done("c", 3)
    found = run.outcomes()
    assert found["b"] == found["e"] == Outcome(error=error)
    assert_upstream(found["d"], "b", error)
    assert found["c"] == Outcome(3)


@pytest.mark.parametrize("first", ["done", "failed", "cancel"])
@pytest.mark.parametrize("second", ["done", "failed", "cancel"])
def test_of_several_ends_the_first_counts(first: str, second: str) -> None:
    errors = {"done": None, "failed": WrongError(), "cancel": NodeCancelledError("a")}

    def end(how: str, value: int) -> None:
        if how == "done":
            run.orchestrator.done("a", value)
        elif how == "failed":
            run.orchestrator.failed("a", errors["failed"])
        else:  # as an executor that was asked to stop does
            run.orchestrator.cancel("a")
            if value == 1:
                run.wait(lambda: run.stopped == ["a"])
            run.orchestrator.failed("a", errors["cancel"])

    run = Harness(needs(a="", b="a", last=""))
    run.until("a", "last")
    end(first, 1)
    end(second, 2)
    if first == "done":
        run.until("a", "last", "b")
        run.orchestrator.done("b", 3)
    run.orchestrator.done("last", 4)
    found = run.outcomes()
    assert found["a"] == (Outcome(1) if first == "done" else Outcome(error=errors[first]))
    assert found["b"].value == (3 if first == "done" else None)
    assert run.results.get("b", {"a": 1}) == {"a": 1}


@pytest.mark.parametrize("end", ["success", "failure", "cancel"])
def test_a_chain_of_ten_thousand(end: str) -> None:
    """Each begins the next, in the thread that it ends in: no recursion."""
    n, error = 10_000, WrongError()
    graph = {f"n{i}": ({f"n{i - 1}": None} if i else {}) for i in range(n)}
    last = 3 if end == "failure" else n

    def start(name: str, _: Any) -> None:
        if int(name[1:]) == last:
            run.orchestrator.failed(name, error)
        elif end != "cancel":
            run.orchestrator.done(name, name)

    ready = threading.Event()

    def wait(name: str, results: Any) -> None:
        ready.wait(WAIT)  # `run` is there
        start(name, results)

    run = Harness(graph, wait)
    ready.set()
    if end == "cancel":
        run.until("n0")
        run.orchestrator.cancel()
        run.wait(lambda: run.stopped == ["n0"])
        run.orchestrator.failed("n0", error)
    found = run.outcomes()
    if end == "success":
        assert [found[f"n{i}"].value for i in range(n)] == list(graph)
        assert run.started == list(graph)
    elif end == "failure":
        assert run.started == ["n0", "n1", "n2", "n3"]
        assert found["n2"] == Outcome("n2")
        for i in (4, 5000, n - 1):
            assert_upstream(found[f"n{i}"], "n3", error)
    else:
        assert run.started == ["n0"]
        assert all(outcome.error for outcome in found.values())


# ── cancel ───────────────────────────────────────────────────────────────────────────────────────────


def test_cancel_of_a_node_that_waits_runs_or_is_done() -> None:
    run = Harness(needs(a="", b="a", c="b", d="a", e="", f=""))
    run.until("a", "e", "f")
    run.orchestrator.done("f", 9)
    run.orchestrator.cancel("f")  # is done: nothing
    run.orchestrator.cancel("b")  # waits: never begins
    run.orchestrator.cancel("e")  # runs: asked to stop
    run.wait(lambda: run.stopped == ["e"])
    assert "e" not in run.orchestrator.outcomes
    run.orchestrator.done("e", 8)  # it was quicker
    run.orchestrator.done("a", 1)
    run.until("a", "e", "f", "d")
    run.orchestrator.done("d", 2)
    found = run.outcomes()
    assert isinstance(found["b"].error, NodeCancelledError)
    assert found["b"].error.node == "b"
    assert_upstream(found["c"], "b", found["b"].error)
    assert (found["f"], found["e"], found["d"]) == (Outcome(9), Outcome(8), Outcome(2))
    assert run.stopped == ["e"]


def test_cancel_of_all() -> None:
    run, stopped = Harness(DIAMOND), NodeCancelledError("a")
    run.until("a", "e")
    run.orchestrator.done("e", 5)
    run.orchestrator.cancel()
    run.wait(lambda: run.stopped == ["a"])
    run.orchestrator.failed("a", stopped)
    found = run.outcomes()
    assert found["e"] == Outcome(5)
    assert found["a"] == Outcome(error=stopped)
    for name in "bcd":
        assert isinstance(found[name].error, NodeCancelledError | UpstreamError)
    assert sorted(run.skipped) == ["b", "c", "d"]


# ── many threads, any graph ──────────────────────────────────────────────────────────────────────────


def test_events_from_many_threads() -> None:
    """Each node is told to have ended by four threads at once; each begins once, with what it waits for."""
    n_layers, width = 12, 8
    graph: dict[str, dict[str, int | None]] = {}
    for layer, i in itertools.product(range(n_layers), range(width)):
        graph[f"{layer}.{i}"] = {f"{layer - 1}.{j}": None for j in range(width)} if layer else {}

    ready = threading.Event()

    def start(name: str, results: dict[str, Any]) -> None:
        def tell(value: int) -> None:
            ready.wait(WAIT)
            run.orchestrator.progress(name, value)
            run.orchestrator.done(name, (name, value))

        assert [value[0] for value in results.values()] == list(graph[name])
        for value in range(4):
            threading.Thread(target=tell, args=(value,), daemon=True).start()

    run = Harness(graph, start)
    ready.set()
    found = run.outcomes()
    assert all(outcome.value[0] == name for name, outcome in found.items())
    for layer in range(1, n_layers):
        for i in range(width):
            told = run.results[f"{layer}.{i}"]
            assert told == {f"{layer - 1}.{j}": found[f"{layer - 1}.{j}"].value for j in range(width)}


@st.composite
def graphs(draw: st.DrawFn) -> dict[str, dict[str, int | None]]:
    n = draw(st.integers(1, 14))
    edges = [draw(st.sets(st.integers(0, i - 1), max_size=3)) if i else set() for i in range(n)]
    return {
        f"n{i}": {f"n{j}": draw(st.sampled_from([None, None, 5])) for j in sorted(some)} for i, some in enumerate(edges)
    }


def expected_failures(graph: Graph, failing: set[str]) -> set[str]:
    """A plain model: a node does not succeed if it fails, or if one it needs has not succeeded."""
    lost: set[str] = set()
    for name, depends_on in graph.items():
        if name in failing or lost & set(depends_on):
            lost.add(name)
    return lost


@settings(max_examples=80, deadline=None)
@given(graph=graphs(), seed=st.integers(0, 10**6), n_cancels=st.integers(0, 3))
def test_every_node_of_any_graph_has_an_outcome(graph: Graph, seed: int, n_cancels: int) -> None:
    """Functions that fail or not, in threads, with cancels at any time; nothing waits for ever."""
    rng = random.Random(seed)
    failing = {name for name in graph if rng.random() < 0.2}
    raised = {name: rng.choice([WrongError(name), SystemExit(name), KeyboardInterrupt(name)]) for name in failing}

    def function(name: str, results: dict[str, Any]) -> Any:
        if rng.random() < 0.3:
            time.sleep(0.001)
        run.orchestrator.progress(name, 5)
        if name in failing:
            raise raised[name]
        return name, sorted(results)

    def done(name: str, value: Any) -> None:
        run.orchestrator.done(name, value)

    def failed(name: str, error: BaseException) -> None:
        run.orchestrator.failed(name, error)

    begun: list[str] = []
    workers = Workers(3, begun.append, done, failed)
    ready = threading.Event()

    def start(name: str, results: dict[str, Any]) -> None:
        ready.wait(WAIT)
        workers.submit(name, lambda: function(name, results))

    run = Harness(graph, start)
    run_stop, cancelled = run.stop, [rng.choice([*graph, None]) for _ in range(n_cancels)]

    def stop(name: str) -> None:
        run_stop(name)
        workers.cancel(name)

    run.orchestrator._stop = stop
    ready.set()
    for name in cancelled:
        run.orchestrator.cancel(name)
    found = run.outcomes()
    for name, outcome in found.items():
        if outcome.error is None:
            assert outcome.value[0] == name
            assert set(outcome.value[1]) <= set(graph[name])
            assert {other for other, amount in graph[name].items() if amount is None} <= set(outcome.value[1])
        elif isinstance(outcome.error, UpstreamError):
            root = found[outcome.error.node].error
            assert root is outcome.error.cause
            assert not isinstance(root, UpstreamError)
        else:
            assert outcome.error is raised.get(name) or isinstance(outcome.error, NodeCancelledError)
    lost = {name for name, outcome in found.items() if outcome.error is not None}
    if not cancelled and all(amount is None for depends_on in graph.values() for amount in depends_on.values()):
        assert lost == expected_failures(graph, failing)
    assert failing & set(begun) <= lost


# ── workers ──────────────────────────────────────────────────────────────────────────────────────────


class Ends:
    """Collects how functions end."""

    def __init__(self, n_workers: int) -> None:
        self.begun: list[str] = []
        self.ended: list[tuple[str, Any]] = []
        self._changed = threading.Condition()
        self.workers = Workers(n_workers, self.begin, self.end, self.end)

    def begin(self, name: str) -> None:
        with self._changed:
            self.begun.append(name)
            self._changed.notify_all()

    def end(self, name: str, value: Any) -> None:
        with self._changed:
            self.ended.append((name, value))
            self._changed.notify_all()

    def wait(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, WAIT)

    def of(self, name: str) -> Any:
        self.wait(lambda: any(other == name for other, _ in self.ended))
        (value,) = [value for other, value in self.ended if other == name]
        return value


@pytest.mark.parametrize("n_workers", [1, 3, 50])
def test_functions_run_in_a_bounded_number_of_threads(n_workers: int) -> None:
    ends, lock, inside, most = Ends(n_workers), threading.Lock(), [0], [0]

    def work(i: int) -> int:
        with lock:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
        time.sleep(0.002)
        with lock:
            inside[0] -= 1
        return i

    for i in range(30):
        ends.workers.submit(f"{i}", lambda i=i: work(i))  # type: ignore[misc]
    ends.wait(lambda: len(ends.ended) == 30)
    assert sorted(ends.ended) == sorted((f"{i}", i) for i in range(30))
    assert ends.begun == [f"{i}" for i in range(30)]
    assert most[0] <= n_workers
    assert n_workers == 1 or most[0] > 1
    assert ends.workers._n_free == n_workers


def test_all_of_the_threads_are_used() -> None:
    ends, together = Ends(4), threading.Barrier(4)
    for i in range(4):
        ends.workers.submit(f"{i}", lambda: together.wait(WAIT))
    ends.wait(lambda: len(ends.ended) == 4)
    assert sorted(value for _, value in ends.ended) == [0, 1, 2, 3]


@pytest.mark.parametrize("error", [WrongError(), SystemExit(3), KeyboardInterrupt(), GeneratorExit()], ids=repr)
def test_what_a_function_raises_is_its_failure(error: BaseException) -> None:
    ends = Ends(1)

    def wrong() -> None:
        raise error

    ends.workers.submit("wrong", wrong)
    ends.workers.submit("right", lambda: 1)
    assert ends.of("wrong") is error
    assert ends.of("right") == 1


def test_past_its_limit_a_function_has_ended_and_the_next_begins() -> None:
    """What it still returns is not used."""
    ends, go = Ends(1), threading.Event()
    late = threading.Event()

    def slow() -> int:
        go.wait(WAIT)
        late.set()
        return 1

    ends.workers.submit("slow", slow, 0.05)
    ends.workers.submit("next", lambda: 2, WAIT)
    error = ends.of("slow")
    assert isinstance(error, NodeTimeoutError)
    assert (error.node, error.time_limit) == ("slow", 0.05)
    assert ends.of("next") == 2
    go.set()
    assert late.wait(WAIT)
    ends.workers.submit("last", lambda: 3)
    assert ends.of("last") == 3
    for thread in threading.enumerate():
        if thread.name == "swarmkv slow":
            thread.join(WAIT)
    assert sorted(name for name, _ in ends.ended) == ["last", "next", "slow"]
    assert ends.workers._n_free == 1


def test_a_function_that_has_ended_leaves_no_timer() -> None:
    ends = Ends(1)
    ends.workers.submit("quick", lambda: 1, 10 * WAIT)
    assert ends.of("quick") == 1
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join(WAIT)
            assert not thread.is_alive()


def test_a_limit_counts_from_when_the_function_is_called() -> None:
    ends, go = Ends(1), threading.Event()
    ends.workers.submit("first", lambda: go.wait(WAIT))
    ends.workers.submit("second", lambda: 2, 0.2)
    time.sleep(0.3)
    assert ends.ended == []
    go.set()
    ends.wait(lambda: len(ends.ended) == 2)
    assert ends.begun == ["first", "second"]


def test_cancel_of_a_function_that_waits_runs_or_is_done() -> None:
    ends, go = Ends(1), threading.Event()
    ran: list[str] = []
    ends.workers.submit("done", lambda: 0)
    assert ends.of("done") == 0
    ends.workers.submit("running", lambda: go.wait(WAIT))
    ends.workers.submit("waiting", lambda: ran.append("waiting"))
    ends.workers.submit("next", lambda: 2)
    for name in ("waiting", "done", "never submitted"):
        ends.workers.cancel(name)
    error = ends.of("waiting")
    assert isinstance(error, NodeCancelledError)
    assert error.node == "waiting"
    assert len(ends.ended) == 2
    ends.workers.cancel("running")
    ends.workers.cancel("running")
    assert isinstance(ends.of("running"), NodeCancelledError)
    assert ends.of("next") == 2
    go.set()
    assert ran == []
    assert len(ends.ended) == 4
    assert ends.workers._n_free == 1


def test_each_function_ends_once_whatever_comes_together() -> None:
    """Ends, limits and cancels within the same moment."""
    rng, ends = random.Random(1), Ends(8)
    for i in range(200):
        pause, limit = rng.choice([0, 0.001, 0.003]), rng.choice([None, 0.0, 0.001, 0.003])
        ends.workers.submit(f"{i}", lambda pause=pause: time.sleep(pause), limit)  # type: ignore[misc]
        if rng.random() < 0.3:
            ends.workers.cancel(f"{rng.randrange(i + 1)}")
    ends.wait(lambda: len(ends.ended) >= 200)
    assert sorted(name for name, _ in ends.ended) == sorted(f"{i}" for i in range(200))
    assert {type(value) for _, value in ends.ended} == {type(None), NodeTimeoutError, NodeCancelledError}
    assert ends.workers._n_free == 8


def test_a_thread_that_cannot_be_had_is_a_failure_not_a_silence() -> None:
    """The system has no memory for its stack. The function waited for ever, and so did those behind it."""
    ends, go = Ends(1), threading.Event()
    ends.workers.submit("first", lambda: go.wait(WAIT))
    ends.workers.submit("second", lambda: 2)
    ends.workers.submit("third", lambda: 3)
    before = threading.stack_size(1 << 47)
    try:
        go.set()
        assert isinstance(ends.of("second"), RuntimeError)
        assert isinstance(ends.of("third"), RuntimeError)
    finally:
        threading.stack_size(before)
    ends.workers.submit("last", lambda: 4)
    assert ends.of("last") == 4


@pytest.mark.parametrize("broken", ["stop", "skip"])
def test_what_stop_or_skip_raise_ends_the_run(broken: str) -> None:
    """It waited for ever."""

    def fail(_: str) -> None:
        raise ZeroDivisionError(broken)

    calls = {"stop": lambda _: None, "skip": lambda _: None, broken: fail}
    graph: dict[str, dict[str, int | None]] = {"a": {}, "b": {"a": None}}
    orchestrator = Orchestrator(graph, lambda name, results: None, calls["stop"], calls["skip"])
    orchestrator.cancel("b" if broken == "skip" else "a")
    caught: list[BaseException] = []

    def run() -> None:
        try:
            orchestrator.run()
        except ZeroDivisionError as error:
            caught.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(30)
    assert [str(error) for error in caught] == [broken]
