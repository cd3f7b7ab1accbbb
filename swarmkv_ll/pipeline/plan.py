"""What a pipeline is going to need, and everything that is wrong with it, found before a context or a buffer is made."""

from __future__ import annotations

import math
import operator
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import dag
from ..budget import validate_context_budget
from ..chat import Chat
from ..errors import (
    ContextBudgetError,
    DuplicateNodeError,
    InvalidArgumentError,
    NodeError,
    PipelineError,
    SwarmKVError,
)
from ..model import Model, Tokens
from ..pipeline_file import NAME, fill, placeholders
from .nodes import BranchNode, FunctionNode, Node, PrefillNode

MAX_BRANCHES = 64
"""Branches at once in one context, where nothing else is asked for."""

Nodes = Mapping[str, Node | PrefillNode | BranchNode] | Iterable[tuple[str, Node | PrefillNode | BranchNode]]


@dataclass
class BranchPlan:
    """A branch, with the sizes it is planned with: texts of other nodes are taken to be as long as they can be.

    Attributes
    ----------
    after : str
        The document or branch it goes on from.
    n_prefix : int or None
        Only so much of the document.
    index : int
        Which of the branches it is.
    n_before, n_own : int
        Tokens it begins behind, and those that it adds: prompt and answer.
    """

    after: str
    n_prefix: int | None
    index: int
    n_before: int = 0
    n_own: int = 0


@dataclass
class Plan:
    """A pipeline that was checked.

    Attributes
    ----------
    nodes : dict of str to node
        Each after what it depends on.
    needs : dict of str to dict
        What each waits for: results (None), or so many tokens of a document.
    documents : dict of str to Tokens
    branches : dict of str to BranchPlan
    borders : dict of str to list of int
        Of each document, the lengths at which a branch begins.
    uses : dict of (str, int or None) to int
        How many branches go on from a document's first so many tokens, or from a whole document or branch (None).
    n_children : Counter of str
        How many branches go on from a node, whole or in part.
    """

    nodes: dict[str, Any] = field(default_factory=dict)
    needs: dict[str, dict[str, int | None]] = field(default_factory=dict)
    documents: dict[str, Tokens] = field(default_factory=dict)
    branches: dict[str, BranchPlan] = field(default_factory=dict)
    borders: dict[str, list[int]] = field(default_factory=dict)
    uses: dict[tuple[str, int | None], int] = field(default_factory=dict)
    n_children: Counter[str] = field(default_factory=Counter)

    @property
    def n_held(self) -> int:
        """Sequences that hold ends of branches at once, at most: where only one branch goes on, it takes over."""
        heads = [
            name
            for name, branch in self.branches.items()
            if self.n_children[name] and (branch.after in self.documents or self.n_children[branch.after] > 1)
        ]
        return len(heads)

    @property
    def n_cells_held(self) -> int:
        """Cells of all documents, and of all branches that others go on from."""
        held = sum(branch.n_own for name, branch in self.branches.items() if self.n_children[name])
        return held + sum(len(tokens) for tokens in self.documents.values())

    @cached_property
    def n_own(self) -> list[int]:
        """Cells of the branches that nobody goes on from, the largest first."""
        own = [branch.n_own for name, branch in self.branches.items() if not self.n_children[name]]
        return sorted(own, reverse=True) or [0]

    @property
    def filled(self) -> set[str]:
        """Branches that begin behind texts of other nodes, or hold some: they may be longer than planned, by `HEADROOM`.

        What a text's tokens are, cut anew, is not known before: where an answer breaks a character off, they are more.
        """
        filled: set[str] = set()
        for name, branch in self.branches.items():
            prompt = self.nodes[name].prompt
            if branch.after in filled or (isinstance(prompt, str) and placeholders(prompt)):
                filled.add(name)
        return filled

    @property
    def n_longest(self) -> int:
        """Tokens of the longest sequence."""
        paths = [branch.n_before + branch.n_own for branch in self.branches.values()]
        return max([*paths, *map(len, self.documents.values())], default=0)


class Texts:
    """Turns documents and prompts into tokens, as plain text or as turns of the chat template."""

    def __init__(self, model: Model, chat: bool) -> None:
        self._model, self._chat = model, Chat(model) if chat else None

    def document(self, document: str | npt.ArrayLike) -> Tokens:
        """What a document is computed from."""
        if not isinstance(document, str):
            if self._chat:
                raise InvalidArgumentError("with chat=True, documents and prompts should be text")
            return self._model.check_tokens(document)
        if not document.strip():
            raise InvalidArgumentError("the document holds no text")
        return (
            self._chat.document(document)
            if self._chat
            else self._model.tokenize(document, add_special=True, parse_special=False)
        )

    def prompt(self, prompt: str | npt.ArrayLike, *, reply: bool) -> Tokens:
        """What goes on from a document, or, as a reply, from an answer."""
        if not isinstance(prompt, str):
            if self._chat:
                raise InvalidArgumentError("with chat=True, documents and prompts should be text")
            tokens = self._model.check_tokens(prompt)
            if not len(tokens):
                raise InvalidArgumentError("the prompt holds no tokens")
            return tokens
        if not prompt.strip():
            raise InvalidArgumentError("the prompt holds no text")
        if self._chat:
            return self._chat.reply(prompt) if reply else self._chat.prompt(prompt)
        return self._model.tokenize(prompt, add_special=False, parse_special=False)


def make_plan(nodes: Nodes, texts: Texts, n_ctx: int) -> Plan:
    """Check a pipeline, and tell what it needs.

    Parameters
    ----------
    n_ctx : int
        The longest sequence there may be.

    Raises
    ------
    PipelineError
        With all problems.
    """
    return _Planner(nodes, texts, n_ctx).plan


def depends_on(node: Any) -> tuple[str, ...]:
    """A node's dependencies as a tuple of names.

    Raises
    ------
    TypeError
        They are none, or in no order, or can be read only once.
    """
    given = node.depends_on
    names = (given,) if isinstance(given, str) else given
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"depends_on should be names of nodes, is {given!r}")
    return tuple(names)


class _Planner:
    def __init__(self, nodes: Nodes, texts: Texts, n_ctx: int) -> None:
        self.texts, self.n_ctx, self.plan = texts, n_ctx, Plan()
        self.problems: list[SwarmKVError] = []
        self.nodes: dict[str, Any] = {}
        self.edges: dict[str, tuple[str, ...]] = {}
        try:
            pairs = [(name, node) for name, node in (nodes.items() if isinstance(nodes, Mapping) else nodes)]
        except (TypeError, ValueError):
            raise InvalidArgumentError("nodes should be a mapping of names to nodes, or (name, node) pairs") from None
        for name, node in pairs:
            self._take(name, node)
        if not self.nodes:
            self.problems.append(PipelineError("there should be at least one node"))
        try:
            order = dag.order(self.edges)
        except PipelineError as tangled:
            self.problems += tangled.problems
            order = sorted(self.edges, key=self._is_no_document)  # first documents: their lengths are needed
        self.plan.nodes = {name: self.nodes[name] for name in order}
        for name in order:
            node = self.nodes[name]
            if isinstance(node, PrefillNode):
                self._document(name, node)
            elif isinstance(node, BranchNode):
                self._branch(name, node)
            else:
                self._max_tokens(name, node)
            self._time_limit(name, node)
            self.plan.needs[name] = dict.fromkeys(self.edges[name])
        for name, branch in self.plan.branches.items():
            if branch.n_prefix is not None:
                self.plan.needs[name][branch.after] = branch.n_prefix
                borders = self.plan.borders.setdefault(branch.after, [])
                borders += [branch.n_prefix] * (branch.n_prefix not in borders)
            key = (branch.after, branch.n_prefix)
            self.plan.uses[key] = self.plan.uses.get(key, 0) + 1
            self.plan.n_children[branch.after] += 1
        if self.problems:
            raise PipelineError.of(self.problems)

    def _problem(self, name: str, key: str, message: str, cause: SwarmKVError | None = None) -> None:
        self.problems.append(NodeError(name, key, message, cause))

    def _take(self, name: Any, node: Any) -> None:
        if not isinstance(name, str) or not re.fullmatch(NAME, name):
            self.problems.append(
                PipelineError(f"a node's name should be letters, digits, - and _, and begin with no digit: {name!r}")
            )
        elif name in self.nodes:
            self.problems.append(DuplicateNodeError(name))
        else:
            self.nodes[name], self.edges[name] = node, ()
            try:
                if isinstance(node, Node | PrefillNode | BranchNode):
                    self.edges[name] = depends_on(node)
                    getattr(node, "time_limit", None), getattr(node, "max_tokens", None)
                else:
                    what = f"{type(node).__name__} is no node: it has no depends_on, or no run(results)"
                    self._problem(name, "run", what)
            except Exception as error:  # of a property of the caller's, too
                self._problem(name, "depends_on", str(error) or repr(error))
            if isinstance(node, FunctionNode) and not callable(node.function):
                self._problem(name, "function", f"function should be callable, is {type(node.function).__name__}")

    def _is_no_document(self, name: str) -> bool:
        return not isinstance(self.nodes[name], PrefillNode)

    def _document(self, name: str, node: PrefillNode) -> None:
        self.plan.documents[name] = np.empty(0, np.int32)
        try:
            tokens = self.plan.documents[name] = self.texts.document(node.document)
            if not len(tokens):
                raise InvalidArgumentError("the document holds no tokens")
            validate_context_budget(len(tokens), 0, self.n_ctx)
        except SwarmKVError as error:
            self._problem(name, "document", str(error), error)

    def _branch(self, name: str, node: BranchNode) -> None:
        names = self.edges[name]
        self._sampling(name, node)
        if not names:
            self._problem(name, "depends_on", "a branch should depend on a document or branch that it goes on from")
            return
        after = names[0]
        parent = self.nodes.get(after)
        if parent is None:
            return  # told already
        if not isinstance(parent, PrefillNode | BranchNode):
            self._problem(name, "depends_on", f"a branch goes on from a document or branch; {after!r} is neither")
            return
        n_prefix = self._n_prefix(name, node, after)
        planned = BranchPlan(after, n_prefix, len(self.plan.branches))
        self.plan.branches[name] = planned
        try:
            planned.n_own = self._n_prompt(name, node, reply=isinstance(parent, BranchNode))
        except SwarmKVError as error:
            self._problem(name, "prompt", str(error), error)
            return
        planned.n_own += _whole(node.max_tokens) or 0
        if after in self.plan.documents:
            planned.n_before = len(self.plan.documents[after]) if n_prefix is None else n_prefix
        elif after in self.plan.branches:
            planned.n_before = self.plan.branches[after].n_before + self.plan.branches[after].n_own
        try:
            validate_context_budget(planned.n_before, planned.n_own, self.n_ctx)
        except ContextBudgetError as error:
            self._problem(name, "max_tokens", str(error), error)

    def _n_prefix(self, name: str, node: BranchNode, after: str) -> int | None:
        if node.required_prefix_tokens is None:
            return None
        n = _whole(node.required_prefix_tokens)
        if after not in self.plan.documents:
            self._problem(name, "required_prefix_tokens", f"{after!r} is no document that it could need a part of")
            return None
        most = len(self.plan.documents[after])
        if n is None or n > most:
            given = node.required_prefix_tokens
            message = f"required_prefix_tokens should be 1 to {most}, the length of {after!r}, is {given!r}"
            self._problem(name, "required_prefix_tokens", message)
            return None
        return n if n < most else None  # all of it is the document's end

    def _n_prompt(self, name: str, node: BranchNode, *, reply: bool) -> int:
        """Tokens of a prompt, with the texts of other branches as long as those can be."""
        if not isinstance(node.prompt, str):
            return len(self.texts.prompt(node.prompt, reply=reply))
        inserted, named = 0, placeholders(node.prompt)
        for other in named:
            given = self.nodes.get(other)
            if other not in self.edges[name]:
                self._problem(name, "prompt", f"the prompt names {{{other}}}, which is not in depends_on")
            elif isinstance(given, PrefillNode):
                self._problem(name, "prompt", f"the prompt names {{{other}}}, a document: go on from it instead")
            else:
                inserted += _whole(getattr(given, "max_tokens", FunctionNode.max_tokens)) or 0
        filled = fill(node.prompt, dict.fromkeys(named, "x"))
        return len(self.texts.prompt(filled, reply=reply)) + inserted

    def _sampling(self, name: str, node: BranchNode) -> None:
        self._max_tokens(name, node)
        if node.sampler is not None and not hasattr(node.sampler, "for_branch"):
            self._problem(name, "sampler", f"sampler should be a Sampler, is {type(node.sampler).__name__}")
        if not _positive(node.priority):
            self._problem(name, "priority", f"priority should be a finite number above 0, is {node.priority!r}")

    def _max_tokens(self, name: str, node: Any) -> None:
        n = getattr(node, "max_tokens", 1)
        if _whole(n) is None:
            self._problem(name, "max_tokens", f"max_tokens should be a whole number, at least 1, is {n!r}")

    def _time_limit(self, name: str, node: Any) -> None:
        limit = getattr(node, "time_limit", None)
        if limit is not None and not _positive(limit):
            self._problem(name, "time_limit", f"time_limit should be a finite number of seconds above 0, is {limit!r}")


def _positive(value: Any) -> bool:
    try:
        return not isinstance(value, bool | str) and math.isfinite(value) and value > 0
    except (TypeError, OverflowError):  # no number, or above the largest float
        return False


def _whole(value: Any) -> int | None:
    """A whole number above 0; None for everything else."""
    try:
        number = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None
    return number if number > 0 else None


def check_range(name: str, value: int | None, least: int, most: int) -> int | None:
    """A whole number in its range, or None."""
    if value is None:
        return None
    number = operator.index(value)
    if not least <= number <= most:
        raise InvalidArgumentError(f"{name} should be {least} to {most}, is {number}")
    return number
