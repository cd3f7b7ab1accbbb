"""A graph of named nodes: who depends on whom, in which order they can run, and what is wrong with it. Pure Python."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from difflib import get_close_matches

from .errors import CycleError, DuplicateNodeError, PipelineError, UnknownNodeError

Edges = Mapping[str, Collection[str]]
"""Each node's name, and the names of the nodes that it depends on; they are read more than once."""


def check(edges: Edges) -> list[PipelineError]:
    """Everything that keeps a graph from being run, in the order of its nodes: [] if it can be.

    Returns
    -------
    list of UnknownNodeError, DuplicateNodeError, CycleError
        A cycle is found once, at the edge that closes it when nodes are visited in their order.
    """
    problems: list[PipelineError] = []
    n_hints = 10  # looking for names that are alike takes long in a large graph
    for node, depends_on in edges.items():
        seen: set[str] = set()
        for name in depends_on:
            if name in seen:
                problems.append(DuplicateNodeError(node, f"node {node!r} names {name!r} twice in what it depends on"))
            elif name not in edges:
                n_hints -= 1
                close = get_close_matches(name, edges, 1) if n_hints >= 0 else []
                problems.append(UnknownNodeError(node, name, close[0] if close else None))
            seen.add(name)
    cycles = dict.fromkeys(cycle for _, cycle in _visit(edges) if cycle)  # an edge named twice closes it twice
    problems += [CycleError(cycle) for cycle in cycles]
    return problems


def order(edges: Edges) -> list[str]:
    """The nodes, each after what it depends on; otherwise as they stand in `edges`. The same graph, the same order.

    Raises
    ------
    PipelineError
        The graph cannot be run. With one problem its own class (`CycleError`, …), with several one error for all.
    """
    problems = check(edges)
    if problems:
        raise PipelineError.of(problems)
    return [node for node, cycle in _visit(edges) if not cycle]


def dependents(edges: Edges) -> dict[str, list[str]]:
    """Turned round: each node's name, and the nodes that depend on it, in order."""
    turned: dict[str, list[str]] = {node: [] for node in edges}
    for node, depends_on in edges.items():
        for name in depends_on:
            turned[name].append(node)
    return turned


def _visit(edges: Edges) -> Iterator[tuple[str, tuple[str, ...] | None]]:
    """Depth first with three colours, without recursion: each node as it is left, and each cycle as it is closed.

    White nodes have not been visited, grey ones lie on the path from where the visit began, black ones are done. An
    edge into a grey node closes a cycle.
    """
    grey: dict[str, Iterator[str]] = {}
    black: set[str] = set()
    for start in edges:
        if start not in black:
            grey[start] = iter(edges[start])
        while grey:
            node, ahead = next(reversed(grey.items()))
            for name in ahead:
                if name in grey:
                    path = list(grey)
                    yield node, (*path[path.index(name) :], name)
                elif name in edges and name not in black:
                    grey[name] = iter(edges[name])
                    break
            else:
                grey.popitem()  # `del` would leave a hole that `reversed` walks over again at each step
                black.add(node)
                yield node, None
