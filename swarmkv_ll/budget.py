"""Does a prefix with its branch fit a context? Asked before anything is allocated."""

from __future__ import annotations

import operator

from .errors import ContextBudgetError, InvalidArgumentError

HEADROOM = 128
"""Tokens kept free beside a prefix and its branch."""


def validate_context_budget(prefix_tokens: int, branch_tokens: int, n_ctx: int, headroom: int = HEADROOM) -> int:
    """Check that prefix, branch and headroom fit into a context, before a context or a buffer is made.

    Parameters
    ----------
    prefix_tokens : int
        Tokens of the shared document.
    branch_tokens : int
        Tokens a branch adds: its prompt and its answer.
    n_ctx : int
        Tokens the context holds for one sequence.
    headroom : int
        Tokens to keep free.

    Returns
    -------
    int
        Tokens left over, 0 or more.

    Raises
    ------
    ContextBudgetError
        They do not fit; the error carries every number.
    InvalidArgumentError
        A number is negative.
    """
    prefix_tokens, branch_tokens = operator.index(prefix_tokens), operator.index(branch_tokens)
    n_ctx, headroom = operator.index(n_ctx), operator.index(headroom)
    for name, value in (
        ("prefix_tokens", prefix_tokens),
        ("branch_tokens", branch_tokens),
        ("n_ctx", n_ctx),
        ("headroom", headroom),
    ):
        if value < 0:
            raise InvalidArgumentError(f"{name} should be 0 or more, is {value}")
    spare = n_ctx - prefix_tokens - branch_tokens - headroom
    if spare < 0:
        raise ContextBudgetError(prefix_tokens, branch_tokens, headroom, n_ctx)
    return spare
