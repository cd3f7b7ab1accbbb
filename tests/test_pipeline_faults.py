"""Pipelines in which something goes wrong: what hangs on it is told why, all else is as if nothing had been."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from time import sleep
from typing import Any

import numpy as np
import pytest
from helpers import Files, Models, run_ok, text_tokens
from test_pipeline import LONG, STRATEGIES, Hand, branch, check_timeline, in_time, nothing_left, run

from swarmkv_ll import Arena, Model, Sampler
from swarmkv_ll.errors import (
    ContextBudgetError,
    HostMemoryError,
    InvalidArgumentError,
    NodeCancelledError,
    NodeError,
    NodeTimeoutError,
    UpstreamError,
)
from swarmkv_ll.pipeline import BranchNode, FunctionNode, Pipeline, PipelineResult, PrefillNode, Run

__all__ = ["nothing_left"]  # a fixture


class StopError(Exception):
    pass


class Sayer:
    """A sampler that raises at its n-th token, or whose parts do."""

    def __init__(self, at: int, error: type[BaseException] = StopError, where: str = "sample") -> None:
        self.at, self.error, self.where, self.greedy = at, error, where, Sampler()

    def for_branch(self, _: int) -> Sayer:
        if self.where == "for_branch":
            raise self.error
        return self

    def sample(self, logits: Any) -> int:
        self.at -= 1
        if self.at < 0 and self.where == "sample":
            raise self.error
        return 10**6 if self.where == "token" else self.greedy.sample(logits)

    def close(self) -> None:
        if self.where == "close":
            raise self.error


class Raises:
    """A node of the user's own."""

    depends_on = ("doc",)

    def __init__(self, error: type[BaseException] = StopError) -> None:
        self.error = error

    def run(self, results: Mapping[str, Any]) -> Any:
        raise self.error


class Unreadable:
    def __init__(self, error: type[BaseException] = StopError) -> None:
        self.error = error

    def __str__(self) -> str:
        raise self.error


def put_in(value: Any) -> dict[str, Any]:
    return {"f": FunctionNode(lambda _: value, "doc"), "bad": branch("x{f}", ["doc", "f"])}


FAULTS: dict[str, tuple[Callable[[], dict[str, Any]], type[BaseException]]] = {
    "function": (lambda: {"bad": FunctionNode(Raises().run, "doc")}, StopError),
    "function-exits": (lambda: {"bad": FunctionNode(Raises(SystemExit).run, "doc")}, SystemExit),
    "function-arguments": (lambda: {"bad": FunctionNode(lambda: 1, "doc")}, TypeError),
    "node": (lambda: {"bad": Raises()}, StopError),
    "node-interrupts": (lambda: {"bad": Raises(KeyboardInterrupt)}, KeyboardInterrupt),
    "first token": (lambda: {"bad": branch("x", "doc", sampler=Sayer(0))}, StopError),
    "third token": (lambda: {"bad": branch("x", "doc", sampler=Sayer(3))}, StopError),
    "early": (lambda: {"bad": branch("x", "doc", 64, sampler=Sayer(3))}, StopError),
    "handed over": (lambda: {"p": branch("x", "doc"), "bad": branch("x", "p", sampler=Sayer(3))}, StopError),
    "for_branch": (lambda: {"bad": branch("x", "doc", sampler=Sayer(0, where="for_branch"))}, StopError),
    "close": (lambda: {"bad": branch("x", "doc", sampler=Sayer(0, where="close"))}, StopError),
    "no token": (lambda: {"bad": branch("x", "doc", sampler=Sayer(0, where="token"))}, InvalidArgumentError),
    "text": (lambda: put_in(Unreadable()), StopError),
    "text-exits": (lambda: put_in(Unreadable(SystemExit)), NodeError),
    "empty": (lambda: {"f": FunctionNode(lambda _: " ", "doc"), "bad": branch("{f}", ["doc", "f"])}, NodeError),
    "surrogate": (lambda: put_in("\ud800"), NodeError),
    "over the model's length": (lambda: put_in("x" * 17000), NodeError),
    "over the context's": (lambda: put_in("x" * 3000), NodeError),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("fault", FAULTS)
def test_what_hangs_on_a_fault_is_told_all_else_goes_on(models: Models, fault: str, strategy: Any) -> None:
    make, expected = FAULTS[fault]
    others: dict[str, Any] = {
        "doc": PrefillNode(text_tokens(150)),
        "ok": branch("who?", "doc", n=12),
        "ok_64": branch("why?", "doc", 64, n=12),
        "ok_then": branch("and?", "ok", n=5),
    }
    bad = make()
    nodes = {**others, **bad, "reads": branch("{bad}", ["ok", "bad"]), "hangs": FunctionNode(len, "reads")}
    if isinstance(bad["bad"], BranchNode):
        nodes["child"] = branch("x", "bad")
        nodes["grandchild"] = branch("x", "child")
    else:
        nodes["child"] = FunctionNode(len, "bad")
    with Arena(8 << 20) as arena:
        result = run(models["llama"], nodes, strategy=strategy, arena=arena)
        arena.check_integrity()
        assert arena.stats().n_leases == 0
    found = result["bad"]
    assert type(found.error) is expected
    assert found.state == "failed"
    assert found.ended_s is not None
    for name in ("reads", "hangs", "child", "grandchild"):
        if name in nodes:
            error = result[name].error
            assert type(error) is UpstreamError, name
            assert (error.node, error.cause, result[name].state) == ("bad", found.error, "skipped")
            assert (result[name].begun_s, result[name].ended_s, result[name].tokens) == (None, None, [])
    Hand(models["llama"], {**nodes, "bad": Raises()}).check(
        result, exact=strategy == "snapshot", skip=("bad", "reads", "hangs", "child", "grandchild", "f")
    )
    check_timeline(result)
    if fault == "over the model's length":
        assert isinstance(found.error, NodeError)
        assert isinstance(found.error.cause, ContextBudgetError)
        assert found.error.cause.n_ctx == models["llama"].n_ctx_train


@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_callback_that_raises(models: Models, strategy: Any, at: int) -> None:
    """It fails the branch that was told of."""
    nodes = {
        "doc": PrefillNode(text_tokens(150)),
        "bad": branch("x", "doc", n=30),
        "ok": branch("who?", "doc", n=12),
        "then": branch("y", "bad"),
    }
    told: list[str] = []

    def on_token(name: str, _: str) -> None:
        told.append(name)
        if told.count("bad") > at and name == "bad":
            raise StopError

    result = run(models["llama"], nodes, strategy=strategy, on_token=on_token)
    assert (result["bad"].state, type(result["bad"].error)) == ("failed", StopError)
    assert (result["then"].state, type(result["then"].error)) == ("skipped", UpstreamError)
    Hand(models["llama"], nodes).check(result, exact=strategy == "snapshot", skip=("bad", "then"))


@pytest.mark.parametrize("grants", [[0], [1, 1], [10**9], None, "x"], ids=str)
def test_a_policy_that_is_wrong(models: Models, grants: Any) -> None:
    """Everything fails, and is told; nobody waits for ever."""

    class Wrong:
        def choose(self, work: Any, room: int) -> Any:
            if grants is None:
                raise StopError
            return grants

    nodes = {"doc": PrefillNode(text_tokens(100)), "a": branch("x", "doc", 50), "f": FunctionNode(lambda: 1)}
    result = run(models["llama"], nodes, policy=Wrong())
    assert isinstance(
        result["doc"].error, StopError if grants is None else (InvalidArgumentError, TypeError, ValueError)
    )
    assert isinstance(result["a"].error, UpstreamError)
    assert result["f"].value == 1


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_error_of_a_document_is_every_ones(models: Models, strategy: Any) -> None:
    """And the first failure is told, however far away."""
    nodes = {
        "doc": PrefillNode(text_tokens(1500)),
        "a": branch("x", "doc"),
        "b": branch("x", "a"),
        "c": branch("x", "b"),
    }
    result = in_time(lambda: cancel_first(Pipeline(models["llama"], nodes, strategy=strategy, n_threads=1), "doc"))
    assert result["doc"].state == "cancelled"
    for name in "abc":
        assert result[name].state == "skipped"
        assert result[name].error.node == "doc"
        assert isinstance(result[name].error.cause, NodeCancelledError)


def cancel_first(pipeline: Pipeline, name: str) -> PipelineResult:
    started = pipeline.start()
    started.cancel(name)
    return started.result(LONG)


# ── time limits ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_time_limit_of_a_branch(models: Models, strategy: Any) -> None:
    nodes = {
        "doc": PrefillNode(text_tokens(150)),
        "slow": branch("x", "doc", n=4000, time_limit=0.05),
        "then": branch("y", "slow"),
        "at_once": branch("x", "doc", n=4000, time_limit=1e-9),
        "ok": branch("who?", "doc", n=12, time_limit=1e9),
        "next": branch("why?", "ok", n=12),
    }
    with Arena(16 << 20) as arena:
        result = run(models["llama"], nodes, strategy=strategy, arena=arena)
        assert arena.stats().n_leases == 0
    for name, limit in (("slow", 0.05), ("at_once", 1e-9)):
        error = result[name].error
        assert isinstance(error, NodeTimeoutError)
        assert (error.node, error.time_limit, result[name].state) == (name, limit, "failed")
        assert len(result[name].tokens) < 4000
    assert isinstance(result["then"].error, UpstreamError)
    Hand(models["llama"], nodes).check(result, exact=strategy == "snapshot", skip=("slow", "then", "at_once"))


@pytest.fixture
def stuck() -> Iterator[Callable[..., Any]]:
    """A function that does not return before the test is over."""
    over = threading.Event()
    yield lambda *_: over.wait(LONG)
    over.set()


def test_functions_that_do_not_return(models: Models, stuck: Callable[..., Any]) -> None:
    """Past their limit they take no worker: ten of them with two."""
    calls: list[int] = []
    nodes = {
        "doc": PrefillNode(text_tokens(50)),
        **{f"stuck{i}": FunctionNode(stuck, time_limit=0.02) for i in range(10)},
        "reads": branch("{stuck3}", ["doc", "stuck3"]),
        **{f"f{i}": FunctionNode(calls.append, "doc", time_limit=LONG) for i in range(10)},
        "ok": branch("who?", "doc"),
    }
    result = run(models["llama"], nodes, n_workers=2)
    for i in range(10):
        error = result[f"stuck{i}"].error
        assert isinstance(error, NodeTimeoutError)
        assert (error.node, error.time_limit) == (f"stuck{i}", 0.02)
    assert isinstance(result["reads"].error, UpstreamError)
    assert calls == [50] * 10
    assert result["ok"].state == "done"


def behind(model: Model, stuck: Callable[..., Any], n: int) -> tuple[Run, list[str]]:
    """A run whose only thread is in a function that does not return; `n` others wait, and would note their calls."""
    calls: list[str] = []
    began = threading.Event()

    def sticks() -> None:
        began.set()
        stuck()

    nodes: dict[str, Any] = {"stuck": FunctionNode(sticks)}
    nodes |= {f"f{i}": FunctionNode(lambda i=i: calls.append(f"f{i}")) for i in range(n)}
    started = Pipeline(model, nodes, n_workers=1).start()
    assert began.wait(LONG)
    return started, calls


def test_a_function_that_does_not_return_is_cancelled(models: Models, stuck: Callable[..., Any]) -> None:
    started, calls = behind(models["llama"], stuck, 3)
    started.cancel("f1")
    started.cancel("stuck")
    result = in_time(started.result)
    states = [node.state for node in result.values()]
    assert states == ["cancelled", "done", "cancelled", "done"]
    assert calls == ["f0", "f2"]


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_limit_beyond_all_time(models: Models) -> None:
    result = run(models["llama"], {"f": FunctionNode(lambda: 1, time_limit=1e300)})
    assert result["f"].value == 1


# ── cancelled ────────────────────────────────────────────────────────────────────────────────────────


class Gate:
    """An `on_token` that holds the thread of a node at its first text, until it is opened."""

    def __init__(self, *names: str) -> None:
        self.names, self.reached, self.open = names, threading.Event(), threading.Event()

    def __call__(self, name: str, _: str) -> None:
        if name in self.names:
            self.reached.set()
            assert self.open.wait(LONG)

    def __enter__(self) -> Gate:
        return self

    def __exit__(self, *_: object) -> None:
        self.open.set()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_that_is_cancelled_makes_room(models: Models, strategy: Any) -> None:
    """The second could not begin beside the first: too few cells, or no context."""
    nodes = {
        "doc": PrefillNode(text_tokens(100)),
        "first": branch("x", "doc", n=400, priority=3),
        "never": branch("z", "doc", n=400, priority=1),
        "second": branch("y", "doc", n=300, priority=2),
    }
    limit: dict[str, Any] = {"n_ctx": 640, "n_parallel": 3} if strategy == "shared" else {"n_parallel": 1}
    pipeline = Pipeline(models["llama"], nodes, strategy=strategy, n_threads=1, **limit)
    with Gate("first") as gate, pipeline.start(on_token=gate) as started:
        assert gate.reached.wait(LONG)
        assert started.nodes["first"].state == "running"
        assert started.nodes["second"].state == "queued"
        with pytest.raises(InvalidArgumentError, match="'third'"):
            started.cancel("third")
        started.cancel("first")
        started.cancel("never")
        started.cancel("first")
        gate.open.set()
        result = in_time(started.result)
        started.cancel()  # too late: nothing happens
    assert {name: node.state for name, node in result.items()} == {
        "doc": "done",
        "first": "cancelled",
        "never": "cancelled",
        "second": "done",
    }
    assert isinstance(result["first"].error, NodeCancelledError)
    assert result["first"].error.node == "first"
    assert 1 <= len(result["first"].tokens) < 400
    assert len(result["second"].tokens) == 300
    check_timeline(result)


@pytest.mark.parametrize("how", ["cancel", "leave", "raise"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_are_cancelled(models: Models, made: list[Any], strategy: Any, how: str, stuck: Callable[..., Any]) -> None:
    nodes = {
        "doc": PrefillNode(text_tokens(100)),
        "long": branch("x", "doc", n=9000),
        "other": branch("x", "doc", n=9000),
        "child": branch("x", "long"),
        "reads": branch("{stuck}", ["doc", "stuck"]),
        "stuck": FunctionNode(stuck, "doc"),
    }

    def all_of_it() -> PipelineResult:
        with Gate("long") as gate:
            pipeline = Pipeline(models["llama"], nodes, strategy=strategy, n_threads=1)
            try:
                with pipeline.start(on_token=gate) as started:
                    assert gate.reached.wait(LONG)
                    with pytest.raises(TimeoutError):
                        started.result(0.01)
                    assert started.nodes["long"].state == "running"  # it goes on
                    gate.open.set()
                    if how == "cancel":
                        started.cancel()
                        return started.result(LONG)
                    if how == "raise":
                        raise StopError
            except StopError:
                assert how == "raise"
            assert all(thing.closed for thing in made)
            return started.result(0)

    result = in_time(all_of_it)
    assert len(made) >= 1
    assert all(thing.closed for thing in made)
    assert result["doc"].state == "done"
    for name in ("long", "other", "stuck"):
        assert result[name].state == "cancelled", name
        assert isinstance(result[name].error, NodeCancelledError)
        assert len(result[name].tokens) < 9000
    assert {result["child"].state, result["reads"].state} <= {"cancelled", "skipped"}
    check_timeline(result)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_nobody_goes_on_from_any_more_is_given_back(models: Models, strategy: Any) -> None:
    """Not at the end, but as soon as those that waited for it were cancelled, begun or not."""
    nodes = {
        "gate": branch("x", "other", n=500, priority=9),
        "other": PrefillNode([5]),
        "doc": PrefillNode(text_tokens(100)),
        "waits": branch("a", "doc", n=50),
        "lacks": branch("a{gate}", ["doc", "gate"]),
        "after": branch("b", "other", n=20, priority=0.1),
        "u": FunctionNode(lambda _: Unreadable(), "other"),
        "broken": branch("{u}", ["doc", "u"]),
    }
    if strategy == "shared":  # cells: of documents 101, of the gate 501, of the one that comes after it 21
        pipeline = Pipeline(models["llama"], nodes, n_threads=1)
        with Gate("gate") as gate, pipeline.start(on_token=gate) as started:
            assert gate.reached.wait(LONG)
            for name in ("waits", "lacks"):
                started.cancel(name)
            gate.open.set()
            result = in_time(started.result)
        assert [result[name].state for name in ("gate", "waits", "lacks", "after")] == [
            "done", "cancelled", "cancelled", "done",
        ]  # fmt: skip
        return
    seen: list[int] = []
    with Arena(4 << 20) as arena:
        pipeline = Pipeline(models["llama"], nodes, strategy="snapshot", n_parallel=1, n_threads=1, arena=arena)
        gate = Gate("gate")

        def on_token(name: str, text: str) -> None:
            gate(name, text)
            if name == "after":
                seen.append(arena.stats().n_leases)

        with gate, pipeline.start(on_token=on_token) as started:
            assert gate.reached.wait(LONG)
            assert arena.stats().n_leases == 2
            assert in_time(lambda: wait_for(started, "broken", "failed"))
            for name in ("waits", "lacks"):
                started.cancel(name)
            gate.open.set()
            result = in_time(started.result)
        assert [result[name].state for name in ("gate", "waits", "lacks", "after")] == [
            "done", "cancelled", "cancelled", "done",
        ]  # fmt: skip
        assert set(seen) == {0}


def wait_for(started: Run, name: str, state: str) -> bool:
    while started.nodes[name].state != state:
        sleep(0.001)
    return True


def test_waiting_for_a_while(models: Models) -> None:
    nodes = {"doc": PrefillNode(text_tokens(100)), "long": branch("x", "doc", n=50)}
    with Gate("long") as gate:
        started = Pipeline(models["llama"], nodes, n_threads=1).start(on_token=gate)
        assert gate.reached.wait(LONG)
        for timeout in (0, 0.01):
            with pytest.raises(TimeoutError, match=f"after {timeout:g} s"):
                started.result(timeout)
        gate.open.set()
        result = in_time(started.result)
    assert len(result.check()["long"].tokens) == 50
    assert started.result() is result


def test_functions_that_wait_are_not_called_once_all_are_cancelled(models: Models, stuck: Callable[..., Any]) -> None:
    started, calls = behind(models["llama"], stuck, 20)
    started.cancel()
    result = in_time(started.result)
    assert {node.state for node in result.values()} == {"cancelled"}
    for thread in threading.enumerate():
        if thread.name.startswith("swarmkv f"):
            thread.join(LONG)
    assert calls == []


# ── memory ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_more_memory_than_there_is(models: Models, strategy: Any) -> None:
    """It is told by `result`, and nothing else happens."""
    nodes = {"doc": PrefillNode(text_tokens(50)), "a": branch("x", "doc")}
    pipeline = Pipeline(models["large"], nodes, strategy=strategy, n_ctx=2**31 - 256)
    with pytest.raises(HostMemoryError) as caught:
        in_time(pipeline.run)
    assert caught.value.required > caught.value.available
    with pipeline.start() as started, pytest.raises(HostMemoryError):
        in_time(started.result)


CLOSED = """
    import sys, threading
    from helpers import *
    from test_pipeline import *
    strategy, what = sys.argv[2:]
    model = Model(sys.argv[1])
    arena = Arena(64 << 20)
    nodes = {
        "doc": PrefillNode(text_tokens(2000)),
        "early": branch("x", "doc", 64, n=300),
        "late": branch("y", "doc", n=300),
        "child": branch("z", "early", n=300),
        "reads": branch("z {early}", ["late", "early"], n=300),
    }
    n = 0
    def on_token(name, text):
        global n
        n += 1
        if n == 5:
            if what == "model":
                model.close()
            else:
                try:
                    arena.close()
                except LiveViewsError:
                    print("refused", end=" ")
    from swarmkv_ll.errors import LiveViewsError
    result = in_time(Pipeline(model, nodes, strategy=strategy, n_threads=1, arena=arena).start(on_token=on_token).result)
    print(*(node.state for node in result.values()), *sorted({type(e).__name__ for e in result.errors.values()}))
"""


@pytest.mark.parametrize("what", ["model", "arena"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_closed_meanwhile(files: Files, strategy: str, what: str) -> None:
    """Errors, no crash."""
    told = run_ok(CLOSED, files["llama"], strategy, what)
    if what == "model":
        assert "failed" in told
        assert "ClosedError" in told
    elif strategy == "shared" or told.startswith("refused"):  # it is not used, or holds leases
        assert told.removeprefix("refused ") == " ".join(["done"] * 5)
    else:  # it held none just then
        assert told == "failed failed skipped skipped skipped ClosedError UpstreamError"


# ── Ctrl-C ───────────────────────────────────────────────────────────────────────────────────────────

INTERRUPTED = """
    import os, random, signal, sys, threading, time
    signal.signal(signal.SIGINT, signal.default_int_handler)
    from helpers import *
    from test_pipeline import *
    times, model = int(sys.argv[2]), Model(sys.argv[1])
    arena = Arena(16 << 20)
    nodes = graph()
    pipelines = [Pipeline(model, nodes, strategy=s, n_threads=1, arena=arena) for s in STRATEGIES]
    lengths = []
    for pipeline in pipelines:
        pipeline.run().check()
        begin = time.perf_counter()
        pipeline.run().check()
        lengths.append(time.perf_counter() - begin)
    rng = random.Random(7)

    def state():
        n_files = len(os.listdir("/proc/self/fd"))
        names = sorted(thread.name for thread in threading.enumerate())
        return n_files, names

    def settled():
        # A function's thread is not waited for.
        until = time.monotonic() + 20
        while state() != before and time.monotonic() < until:
            time.sleep(0.005)
        return state()

    def interrupt(delay):
        time.sleep(delay)
        os.kill(os.getpid(), signal.SIGINT)

    before = state()
    n_interrupted, sizes = 0, []
    for i in range(times):
        sender = threading.Thread(target=interrupt, args=(rng.random() * lengths[i % 2],))
        try:
            sender.start()
            pipelines[i % 2].run()
            sender.join()
        except KeyboardInterrupt:
            n_interrupted += 1
        try:
            sender.join()
            time.sleep(0.001)
        except KeyboardInterrupt:
            n_interrupted += 1
        assert settled() == before, (i, before, state())
        arena.check_integrity()
        assert arena.stats().n_leases == 0
        sizes.append(resident_bytes())
    assert n_interrupted == times, n_interrupted
    by_hand = Hand(model, nodes)
    for pipeline in pipelines:
        by_hand.check(pipeline.run(), exact=pipeline.strategy == "snapshot")
    arena.close()
    print(max(sizes[-5:]) - max(sizes[5:15]))
"""


def test_ctrl_c_at_any_moment(files: Files) -> None:
    """Both strategies in turn. A run's contexts take more than 2 MB: one in six kept would be seen."""
    one_heap = {"MALLOC_ARENA_MAX": "1"}  # else each thread that comes and goes may keep a little in one of its own
    assert int(run_ok(INTERRUPTED, files["llama"], 50, env=one_heap)) < 12 << 20


SECOND = """
    import os, signal, sys, threading, time
    signal.signal(signal.SIGINT, signal.default_int_handler)
    from helpers import *
    from test_pipeline import *
    model = Model(sys.argv[1])
    nodes = {"doc": PrefillNode(text_tokens(100)), "long": branch("x", "doc", n=10_000)}
    pipeline = Pipeline(model, nodes, strategy=sys.argv[2], n_threads=1)
    def on_token(*_):
        global told
        if not told:
            told = True
            os.kill(os.getpid(), signal.SIGINT)
    told = False
    try:
        pipeline.run(on_token=on_token)
    except KeyboardInterrupt:
        print("interrupted", [thread.name for thread in threading.enumerate()])
"""


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ctrl_c_waits_for_the_end_of_all_threads(files: Files, strategy: str) -> None:
    assert run_ok(SECOND, files["llama"], strategy) == "interrupted ['MainThread']"


def test_a_run_is_no_longer_than_its_with_block(models: Models) -> None:
    """Interrupted before it has begun, there is nothing to wait for."""
    pipeline = Pipeline(models["llama"], {"doc": PrefillNode(text_tokens(100))}, n_threads=1)
    started = Run(pipeline, None)
    with pytest.raises(KeyboardInterrupt), started:
        raise KeyboardInterrupt
    model: Model = pipeline.model
    assert not model.closed


# ── limits of documents, and texts of functions ──────────────────────────────────────────────────────


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_document_has_its_time_limit_too(models: Models, strategy: Any) -> None:
    nodes = {
        "slow": PrefillNode("a b c " * 300, time_limit=1e-9),
        "doc": PrefillNode("d e f " * 30),
        "lost": BranchNode(" why", "slow", max_tokens=3),
        "kept": BranchNode(" why", "doc", max_tokens=3),
    }
    result = Pipeline(models["llama"], nodes, strategy=strategy, n_threads=1).run()
    assert isinstance(result["slow"].error, NodeTimeoutError)
    assert isinstance(result["lost"].error, UpstreamError)
    assert result["kept"].state == result["doc"].state == "done"


def test_a_function_s_text_has_the_room_that_was_planned_for_it(models: Models) -> None:
    """900 characters did not fit beside 128 tokens of headroom, though the model had room for many more."""

    def nodes(max_tokens: int) -> dict[str, Any]:
        return {
            "doc": PrefillNode("the pump starts at six " * 4),
            "long": FunctionNode(lambda: "x" * 900, max_tokens=max_tokens),
            "reader": BranchNode(" {long}?", ("doc", "long"), max_tokens=3),
        }

    assert Pipeline(models["llama"], nodes(900)).run().check()["reader"].n_tokens == 901
    error = Pipeline(models["llama"], nodes(1)).run()["reader"].error
    assert isinstance(error, NodeError)
    assert isinstance(error.cause, ContextBudgetError)


def test_an_exception_that_cannot_tell_itself(models: Models) -> None:
    class Mute(Exception):  # noqa: N818
        def __str__(self) -> str:
            raise ValueError

    def fail() -> None:
        raise Mute

    nodes = {"f": FunctionNode(fail), "g": FunctionNode(str, "f"), "h": FunctionNode(lambda: 1)}
    result = Pipeline(models["llama"], nodes).run()
    assert isinstance(result["g"].error, UpstreamError)
    assert isinstance(result["g"].error.cause, Mute)
    assert result["h"].value == 1


# ── what was found by others ─────────────────────────────────────────────────────────────────────────


class ClosesBadly(Sampler):
    def for_branch(self, index: int) -> Sampler:
        return ClosesBadly()

    def close(self) -> None:
        super().close()
        raise SystemExit(3)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("how", ["on_token", "close"])
def test_one_that_exits_ends_alone(models: Models, strategy: Any, how: str) -> None:
    """The run never ended, or others failed with it."""
    nodes = {
        "doc": PrefillNode("the pump starts at six " * 4),
        "bad": BranchNode(" why", "doc", max_tokens=5, sampler=ClosesBadly() if how == "close" else None),
        "after": BranchNode(" and", "bad", max_tokens=2),
        "good": BranchNode(" what", "doc", max_tokens=5),
    }

    def on_token(name: str, _: str) -> None:
        if name == "bad" and how == "on_token":
            raise SystemExit(3)

    result = run(models["llama"], nodes, strategy=strategy, on_token=on_token)
    assert isinstance(result["bad"].error, SystemExit)
    assert isinstance(result["after"].error, UpstreamError)
    assert (result["good"].state, len(result["good"].tokens)) == ("done", 5)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_text_longer_than_planned_takes_no_room_from_others(models: Models, strategy: Any) -> None:
    """The one that read it began, kept its cells for its child, and another lacked them."""
    nodes = {
        "doc": PrefillNode("the pump starts at six " * 4),
        "long": FunctionNode(lambda: "x" * 700, max_tokens=1),
        "reader": BranchNode(" {long}?", ("doc", "long"), max_tokens=3),
        "child": BranchNode(" and", "reader", max_tokens=3),
        "other": BranchNode(" what" * 90, ("doc", "reader"), max_tokens=100),
        "alone": BranchNode(" what" * 90, "doc", max_tokens=100),
    }
    result = run(models["llama"], nodes, strategy=strategy)
    assert isinstance(result["reader"].error, NodeError)
    assert isinstance(result["reader"].error.cause, ContextBudgetError)
    assert result["alone"].state == "done"
    assert result["child"].state == result["other"].state == "skipped"


def test_branches_at_once_are_as_many_as_asked_for(models: Models) -> None:
    """The document's sequence, free again, was used for one more."""
    nodes: dict[str, Any] = {"doc": PrefillNode("the pump starts at six " * 4)}
    nodes |= {f"b{i}": BranchNode(" why", "doc", max_tokens=6) for i in range(5)}
    for n_parallel in (1, 2):
        result = run(models["llama"], nodes, n_parallel=n_parallel).check()
        assert max(len(step.parts) for step in result.steps) == n_parallel


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"f": FunctionNode(str, max_tokens=-300)}, "max_tokens"),
        ({"f": FunctionNode(str, max_tokens=True)}, "max_tokens"),
        ({"f": FunctionNode(str, time_limit=10**400)}, "time_limit"),
        ({"b": BranchNode(" why", "doc", priority=10**400)}, "priority"),
        ({"b": BranchNode(" why", "doc", max_tokens=2.0)}, "max_tokens"),
    ],
)
def test_odd_numbers_are_problems_of_their_node(models: Models, change: dict[str, Any], key: str) -> None:
    with pytest.raises(NodeError) as caught:
        Pipeline(models["llama"], {"doc": PrefillNode("a b c"), **change})
    assert (caught.value.node, caught.value.key) == (next(iter(change)), key)


@pytest.mark.parametrize("nodes", [None, [1, 2], "abc", [("a", 1, 2)]])
def test_what_are_no_nodes(models: Models, nodes: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="mapping of names to nodes"):
        Pipeline(models["llama"], nodes)


def test_numbers_of_numpy_are_numbers(models: Models) -> None:
    nodes = {"doc": PrefillNode("a b c " * 9), "b": BranchNode(" why", "doc", np.int64(7), np.int32(4))}
    result = run(models["llama"], nodes).check()
    assert (len(result["b"].tokens), result["b"].n_prefix_tokens) == (4, 7)


def test_a_value_is_told_only_where_it_is_named(models: Models) -> None:
    nodes = {
        "doc": PrefillNode("a b c " * 9),
        "huge": FunctionNode(lambda: 10**5000),
        "waits": BranchNode(" why", ("doc", "huge"), max_tokens=2),
        "names": BranchNode(" {huge}", ("doc", "huge"), max_tokens=2),
    }
    result = run(models["llama"], nodes)
    assert (result["waits"].state, result["names"].state) == ("done", "failed")
    assert [node["value"] for node in result.to_dict()["nodes"] if node["name"] == "huge"] == ["<int: ValueError>"]


def test_no_thread_left(files: Files) -> None:
    """Contexts and threads that had been made stayed."""
    printed = run_ok(
        """
        import sys, threading
        from swarmkv_ll import BranchNode, Model, Pipeline, PrefillNode
        start, n = threading.Thread.start, 0
        def limited(self):
            global n
            if self.name.startswith("swarmkv context"):
                n += 1
                if n == 3:
                    raise RuntimeError("can't start new thread")
            start(self)
        threading.Thread.start = limited
        nodes = {"doc": PrefillNode("a b c " * 9), **{f"b{i}": BranchNode(" d", "doc") for i in range(5)}}
        with Model(sys.argv[1]) as model:
            try:
                Pipeline(model, nodes, strategy="snapshot", n_parallel=4).run()
            except RuntimeError as error:
                print(error, threading.active_count())
        """,
        files["llama"],
    )
    assert printed == "can't start new thread 1"
