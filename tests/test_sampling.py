"""Samplers: the engine's chain does what the parameters say."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from helpers import Models, new_context, text_tokens

from swarmkv_ll import Sampler
from swarmkv_ll.errors import ClosedError, InvalidArgumentError

LOGITS = np.log(np.array([0.4, 0.05, 0.3, 0.05, 0.2], np.float32))


def drawn(n: int = 400, **options: Any) -> set[int]:
    """Tokens that come up in `n` draws."""
    with Sampler(**{"temperature": 1.0, "seed": 5, **options}) as sampler:
        return {sampler.sample(LOGITS) for _ in range(n)}


def test_greedy_takes_the_most_likely() -> None:
    with Sampler() as sampler:
        assert {sampler.sample(LOGITS) for _ in range(20)} == {0}
        assert sampler.sample(LOGITS[::-1]) == 4


def test_greedy_takes_the_first_of_equals_as_the_engine_does() -> None:
    logits = np.array([1, 3, 2, 3, -np.inf], np.float32)
    assert Sampler().sample(logits) == 1
    with_nan = np.array([1, 3, np.nan, 3], np.float32)  # goes through the engine
    assert Sampler().sample(with_nan) == 1
    assert Sampler().sample(np.full(4, -np.inf, np.float32)) == 0


def test_does_not_change_the_logits() -> None:
    logits = LOGITS.copy()
    logits.flags.writeable = False
    Sampler(0.7, top_k=3, top_p=0.9, min_p=0.01, seed=1).sample(logits)
    assert np.array_equal(logits, LOGITS)


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ({}, {0, 1, 2, 3, 4}),
        ({"top_k": 1}, {0}),
        ({"top_k": 2}, {0, 2}),
        ({"top_k": 100}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.35}, {0}),
        ({"top_p": 0.65}, {0, 2}),
        ({"top_p": 0.85}, {0, 2, 4}),
        ({"min_p": 0.6}, {0, 2}),
        ({"min_p": 0.3}, {0, 2, 4}),
        ({"min_p": 1.0}, {0}),
        ({"temperature": 0.01}, {0}),
        ({"temperature": 0.0, "top_k": 5}, {0}),
    ],
    ids=str,
)
def test_keeps_what_the_parameters_keep(options: dict[str, Any], tokens: set[int]) -> None:
    assert drawn(**options) == tokens


def test_draws_by_probability() -> None:
    with Sampler(1.0, seed=3) as sampler:
        counts = Counter(sampler.sample(LOGITS) for _ in range(4000))
    shares = np.array([counts[i] / 4000 for i in range(5)])
    assert np.abs(shares - np.exp(LOGITS)).max() < 0.05


def draws(sampler: Sampler, n: int = 50) -> list[int]:
    return [sampler.sample(LOGITS) for _ in range(n)]


def test_a_seed_makes_it_repeatable() -> None:
    first = draws(Sampler(1.0, seed=7))
    assert draws(Sampler(1.0, seed=7)) == first
    assert draws(Sampler(1.0, seed=8)) != first
    assert draws(Sampler(1.0, seed=0)) == draws(Sampler(1.0, seed=0))
    assert draws(Sampler(1.0)) != draws(Sampler(1.0))


def test_clone_is_in_the_same_state_and_goes_its_own_way() -> None:
    sampler = Sampler(1.0, seed=7)
    draws(sampler, 10)
    twin = sampler.clone()
    expected = draws(sampler)
    assert draws(twin) == expected
    sampler.close()
    assert len(draws(twin)) == 50


def test_each_branch_gets_a_seed_of_its_own() -> None:
    sampler = Sampler(0.9, top_k=4, top_p=0.95, min_p=0.01, seed=7)
    draws(sampler, 10)  # where the sampler itself stands does not matter
    branches = [draws(sampler.for_branch(index)) for index in range(3)]
    assert branches == [draws(Sampler(0.9, top_k=4, top_p=0.95, min_p=0.01, seed=7 + i)) for i in range(3)]
    assert branches[0] != branches[1] != branches[2]
    assert draws(Sampler().for_branch(1)) == [0] * 50
    assert draws(Sampler(1.0).for_branch(0)) != draws(Sampler(1.0).for_branch(0))
    assert Sampler(1.0, seed=2**32 - 2).for_branch(1).seed == 0  # never the value that means "anew"


def test_reset_goes_back_to_the_start() -> None:
    sampler = Sampler(1.0, seed=7)
    first = draws(sampler)
    assert draws(sampler) != first
    sampler.reset()
    assert draws(sampler) == first


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_k": -1},
        {"top_k": 2**31},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": float("nan")},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"seed": -1},
        {"seed": 2**32},
    ],
    ids=str,
)
def test_parameters_out_of_range_are_refused(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(InvalidArgumentError, match=f"{name} should be"):
        Sampler(**options)


@pytest.mark.parametrize(
    "logits",
    [LOGITS[:0], LOGITS.reshape(1, -1), LOGITS.astype(np.float64), LOGITS.astype(np.float16), np.arange(5)],
    ids=lambda logits: f"{logits.dtype}{logits.shape}",
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_other_arrays_are_refused(logits: npt.NDArray[np.float32], temperature: float) -> None:
    with pytest.raises(InvalidArgumentError, match="logits should be float32"):
        Sampler(temperature).sample(logits)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_without_a_number_choose_nothing_out_of_range(temperature: float) -> None:
    """A model that has broken down gives these; the answer is an error or some token, never an id there is not."""
    for value in (np.nan, -np.inf, np.inf):
        logits = np.full(5, value, np.float32)
        with suppress(InvalidArgumentError):
            assert Sampler(temperature, seed=1).sample(logits) in range(5)


def test_use_after_close() -> None:
    sampler = Sampler(1.0)
    sampler.close()
    sampler.close()
    for use in (lambda: sampler.sample(LOGITS), sampler.clone, sampler.reset):
        with pytest.raises(ClosedError, match="sampler"):
            use()


def test_one_sampler_for_models_of_different_vocabularies() -> None:
    sampler = Sampler()
    for n in (5, 3, 7, 5):
        assert sampler.sample(np.arange(n, dtype=np.float32)) == n - 1


def test_greedy_is_argmax_on_a_model(models: Models) -> None:
    with new_context(models["llama"]) as ctx:
        ctx.decode(text_tokens(40), logits="all")
        for row in ctx.logits():
            assert Sampler().sample(row) == int(np.argmax(row))
