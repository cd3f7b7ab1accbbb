"""The graph of nodes: its order, and everything that can be wrong with it."""

from __future__ import annotations

from graphlib import CycleError as GraphlibCycleError
from graphlib import TopologicalSorter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmkv_ll.dag import check, dependents, order
from swarmkv_ll.errors import CycleError, DuplicateNodeError, PipelineError, UnknownNodeError

Graph = dict[str, list[str]]


def assert_is_cycle(error: CycleError, edges: Graph) -> None:
    """The cycle named is one of the graph, goes through each of its nodes once, and ends with the edge named."""
    assert error.cycle[0] == error.cycle[-1]
    assert len(set(error.cycle)) == len(error.cycle) - 1 >= 1
    for node, depends_on in zip(error.cycle, error.cycle[1:], strict=False):
        assert depends_on in edges[node]
    assert error.edge == error.cycle[-2:]


# ── cycles ───────────────────────────────────────────────────────────────────────────────────────────


def test_a_node_that_depends_on_itself() -> None:
    with pytest.raises(CycleError, match=r"'a'.* depends on itself$") as caught:
        order({"a": ["a"]})
    assert caught.value.cycle == ("a", "a")
    assert caught.value.edge == ("a", "a")
    assert caught.value.problems == (caught.value,)


def test_two_nodes_that_wait_for_each_other() -> None:
    with pytest.raises(CycleError, match="a → b → a") as caught:
        order({"a": ["b"], "b": ["a"]})
    assert caught.value.cycle == ("a", "b", "a")
    assert caught.value.edge == ("b", "a")


def test_only_the_cycle_is_named_not_the_way_into_it() -> None:
    edges = {"start": ["way"], "way": ["a"], "a": ["leaf", "b"], "b": ["c"], "c": ["a"], "leaf": []}
    (error,) = check(edges)
    assert isinstance(error, CycleError)
    assert error.cycle == ("a", "b", "c", "a")
    assert error.edge == ("c", "a")


def test_a_long_cycle() -> None:
    edges = {f"n{i}": [f"n{(i + 1) % 5000}"] for i in range(5000)}
    (error,) = check(edges)
    assert isinstance(error, CycleError)
    assert_is_cycle(error, edges)
    assert len(error.cycle) == 5001
    assert error.edge == ("n4999", "n0")


def test_cycles_apart_and_cycles_that_share_nodes_are_all_found() -> None:
    apart = check({"a": ["b"], "b": ["a"], "c": [], "d": ["d", "c"]})
    assert [error.cycle for error in apart if isinstance(error, CycleError)] == [("a", "b", "a"), ("d", "d")]
    shared = check({"a": ["b", "c"], "b": ["a"], "c": ["a"]})
    assert [error.cycle for error in shared if isinstance(error, CycleError)] == [("a", "b", "a"), ("a", "c", "a")]


def test_a_cycle_whose_edge_is_named_twice_is_one_cycle() -> None:
    """It was told twice."""
    for edges in ({"a": ["a", "a"]}, {"a": ["b"], "b": ["a", "a"]}):
        assert [type(error) for error in check(edges)] == [DuplicateNodeError, CycleError]


# ── other faults, and several ────────────────────────────────────────────────────────────────────────


def test_a_node_that_is_not_there() -> None:
    with pytest.raises(UnknownNodeError, match=r"on 'reveiw', which is not there \('review' is\)") as caught:
        order({"review": [], "summary": ["reveiw"]})
    assert (caught.value.node, caught.value.missing) == ("summary", "reveiw")
    with pytest.raises(UnknownNodeError, match=r"which is not there$"):
        order({"a": ["quite different"]})


def test_a_dependency_named_twice() -> None:
    with pytest.raises(DuplicateNodeError, match="'b' names 'a' twice") as caught:
        order({"a": [], "b": ["a", "a"]})
    assert caught.value.node == "b"


def test_several_problems_are_one_error_that_has_them_all() -> None:
    edges = {"a": ["a", "nowhere"], "b": ["c", "c"], "c": []}
    with pytest.raises(PipelineError) as caught:
        order(edges)
    assert type(caught.value) is PipelineError
    assert [type(problem) for problem in caught.value.problems] == [UnknownNodeError, DuplicateNodeError, CycleError]
    text = str(caught.value)
    assert text.startswith("3 problems: (1) ")
    assert all(str(problem) in text for problem in caught.value.problems)


def test_an_unknown_node_named_twice_is_unknown_once() -> None:
    assert [type(problem) for problem in check({"a": ["x", "x"]})] == [UnknownNodeError, DuplicateNodeError]


# ── order ────────────────────────────────────────────────────────────────────────────────────────────


def test_a_diamond() -> None:
    edges = {"end": ["left", "right"], "right": ["top"], "left": ["top"], "top": []}
    assert order(edges) == ["top", "left", "right", "end"]
    assert dependents(edges) == {"end": [], "right": ["end"], "left": ["end"], "top": ["right", "left"]}


def test_nodes_that_could_run_as_they_stand_stay_so() -> None:
    names = [f"n{i * 7919 % 100}" for i in range(100)]  # in no order of the names
    assert order({name: [] for name in names}) == names
    assert order({name: names[:i][-3:] for i, name in enumerate(names)}) == names
    assert order({}) == []


@pytest.mark.parametrize("backwards", [False, True])
def test_a_chain_of_10_000_needs_no_recursion(backwards: bool) -> None:
    names = [f"n{i}" for i in range(10_000)]
    edges = {name: names[max(0, i - 1) : i] for i, name in enumerate(names)}
    if backwards:
        edges = dict(reversed(edges.items()))
    assert order(edges) == names


# ── any graph ────────────────────────────────────────────────────────────────────────────────────────


@st.composite
def graphs(draw: st.DrawFn, acyclic: bool) -> Graph:
    """Each node depends on some of all nodes, or of those with smaller numbers; they stand in any order."""
    n = draw(st.integers(0, 12))
    edges = {
        f"n{i}": sorted(f"n{j}" for j in draw(st.sets(st.integers(0, (i if acyclic else n) - 1), max_size=4)))
        if i or not acyclic
        else []
        for i in range(n)
    }
    return {name: draw(st.permutations(edges[name])) for name in draw(st.permutations(list(edges)))}


@given(graphs(acyclic=True))
def test_each_node_comes_once_and_after_all_it_depends_on(edges: Graph) -> None:
    assert check(edges) == []
    found = order(edges)
    assert sorted(found) == sorted(edges)
    at = {name: i for i, name in enumerate(found)}
    assert all(at[name] < at[node] for node, depends_on in edges.items() for name in depends_on)
    assert order({name: tuple(depends_on) for name, depends_on in edges.items()}) == found


@given(graphs(acyclic=False))
def test_a_cycle_is_found_exactly_if_there_is_one(edges: Graph) -> None:
    try:
        TopologicalSorter(edges).prepare()
        has_cycle = False
    except GraphlibCycleError:
        has_cycle = True
    problems = check(edges)
    assert bool(problems) == has_cycle
    for problem in problems:
        assert isinstance(problem, CycleError)
        assert_is_cycle(problem, edges)
    cycles = [problem.cycle for problem in problems if isinstance(problem, CycleError)]
    assert len(set(cycles)) == len(cycles)


@given(graphs(acyclic=False))
def test_without_the_edges_that_close_cycles_none_is_left(edges: Graph) -> None:
    closing = {problem.edge for problem in check(edges) if isinstance(problem, CycleError)}
    rest = {node: [name for name in names if (node, name) not in closing] for node, names in edges.items()}
    assert check(rest) == []


@given(graphs(acyclic=False))
def test_turned_round_twice_it_is_the_same_graph(edges: Graph) -> None:
    turned = dependents(edges)
    assert list(turned) == list(edges)
    again = dependents(turned)
    assert {node: sorted(names) for node, names in again.items()} == {n: sorted(d) for n, d in edges.items()}
