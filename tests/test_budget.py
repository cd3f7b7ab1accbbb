"""The context budget: pure arithmetic, before anything is allocated."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmkv_ll import validate_context_budget
from swarmkv_ll.errors import ContextBudgetError, InvalidArgumentError, SwarmKVError

COUNT = st.integers(0, 2**31)


@given(COUNT, COUNT, COUNT, COUNT)
def test_fits_exactly_when_the_sum_does(prefix: int, branch: int, n_ctx: int, headroom: int) -> None:
    required = prefix + branch + headroom
    if required <= n_ctx:
        assert validate_context_budget(prefix, branch, n_ctx, headroom) == n_ctx - required
    else:
        with pytest.raises(ContextBudgetError) as caught:
            validate_context_budget(prefix, branch, n_ctx, headroom)
        error = caught.value
        assert (error.prefix_tokens, error.branch_tokens, error.headroom) == (prefix, branch, headroom)
        assert (error.n_ctx, error.required) == (n_ctx, required)


def test_the_message_has_every_number() -> None:
    with pytest.raises(ContextBudgetError) as caught:
        validate_context_budget(3501, 1000, 4096)
    for number in ("3,501", "1,000", "128", "4,629", "4,096", "533"):
        assert number in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, SwarmKVError)


def test_headroom_is_128_unless_given() -> None:
    assert validate_context_budget(3000, 968, 4096) == 0
    with pytest.raises(ContextBudgetError):
        validate_context_budget(3000, 969, 4096)


@pytest.mark.parametrize("name", ["prefix_tokens", "branch_tokens", "n_ctx", "headroom"])
def test_negative_or_broken_counts_are_refused(name: str) -> None:
    good = {"prefix_tokens": 1, "branch_tokens": 1, "n_ctx": 10, "headroom": 1}
    assert validate_context_budget(**good) == 7
    with pytest.raises(InvalidArgumentError, match=f"{name} should be 0 or more, is -1"):
        validate_context_budget(**good | {name: -1})
    with pytest.raises(TypeError):
        validate_context_budget(**good | {name: 1.5})  # type: ignore[arg-type]
