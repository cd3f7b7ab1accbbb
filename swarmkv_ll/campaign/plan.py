"""What a campaign consists of: its cases, in the order they are measured, and about how much work each is. No engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .records import Case

N_QUESTION = 5
"""Tokens of a branch's prompt."""

HEADROOM = 256
"""Tokens of a context kept for prompts and answers."""

MIN_CONTEXT = 512
"""Tokens that a model has to be trained on for there to be something to measure."""

DETERMINISTIC = "deterministic"

_PEER_WORK = {"llama-cpp-python": 12, "llama-batched-bench": 2}
"""Prefills of the short document that measuring a peer once is worth."""


@dataclass(frozen=True)
class Sizes:
    """How much a campaign measures.

    Attributes
    ----------
    n_document : int
        Tokens of the article's document; where eight branches are, `n_eight`.
    n_short : int
        Tokens of the document where branches, options, memory and generation are swept.
    trials, repeats : int
        Of the article and of eight branches; and of generation and of peers. The sweeps are measured once.
    lengths, branches, held : tuple of int
        Documents' lengths; numbers of branches; how many are held in memory at once.
    options : tuple of (str, str)
        Flash attention, and type of the KV cache.
    rounds : int
        Copies and activations in a case, of which medians are taken.
    n_answer : int
        Tokens a branch answers where generation is measured.
    """

    n_document: int
    n_eight: int
    n_short: int
    trials: int
    repeats: int
    lengths: tuple[int, ...]
    branches: tuple[int, ...]
    held: tuple[int, ...]
    options: tuple[tuple[str, str], ...]
    rounds: int
    n_answer: int = 32


FULL = Sizes(
    n_document=3501,
    n_eight=3501,
    n_short=1000,
    trials=3,
    repeats=3,
    lengths=(512, 1000, 2000, 8000),
    branches=(1, 2, 4, 8, 16, 32, 64),
    held=(1, 2, 4, 8, 16, 32),
    options=(("on", "q8_0"), ("off", "f16")),
    rounds=15,
)
QUICK = Sizes(
    n_document=256,
    n_eight=64,
    n_short=64,
    trials=3,
    repeats=1,
    lengths=(128,),
    branches=(),
    held=(1, 2, 4),
    options=(),
    rounds=7,
)


@dataclass(frozen=True)
class Task:
    """A case to measure, and about how many tokens' prefill it is worth in time."""

    case: Case
    cost: int


def fitting(sizes: Sizes, n_ctx: int, n_document: int | None) -> tuple[Sizes, list[str]]:
    """Sizes for a model that was trained on `n_ctx` tokens, and a line for each thing left out.

    `n_document`, where it is given, is the article's document.
    """
    most, left_out = n_ctx - HEADROOM, []
    if n_document is not None:
        sizes = replace(
            sizes,
            n_document=n_document,
            n_eight=min(n_document, sizes.n_eight),
            n_short=min(n_document, sizes.n_short),
            lengths=tuple(n for n in sizes.lengths if n < n_document),
        )
    elif sizes.n_document > most:
        left_out.append(
            f"an article's document of {sizes.n_document:,} tokens: {most:,} instead, of {n_ctx:,} trained on"
        )
    if long := [n for n in sizes.lengths if n > n_ctx - 96]:
        shown = ", ".join(f"{n:,}" for n in long)
        left_out.append(f"documents of {shown} tokens: the model was trained on {n_ctx:,}")
    sizes = replace(
        sizes,
        n_document=min(sizes.n_document, most),
        n_eight=min(sizes.n_eight, most),
        n_short=min(sizes.n_short, most),
        lengths=tuple(n for n in sizes.lengths if n not in long and n != sizes.n_document),
    )
    return sizes, left_out


def tasks(
    sizes: Sizes, documents: Sequence[tuple[str, int]], peers: Sequence[str], *, flash_attn: bool = True
) -> list[Task]:
    """All cases. What is measured several times comes round by round, so that drift falls on all of it alike.

    `documents` are real documents' names and tokens; `flash_attn` is what the engine chooses for the model.
    """
    base = Case("", document=DETERMINISTIC, flash_attn="on" if flash_attn else "off", kv_type="f16")
    found = []

    def add(experiment: str, cost: float, **known: object) -> None:
        found.append(Task(replace(base, experiment=experiment, **known), round(cost)))  # type: ignore[arg-type]

    n_once = _work(sizes.n_short)
    for trial in range(1, sizes.trials + 1):
        add("article", 3 * _work(sizes.n_document) + 400, trial=trial, n_document=sizes.n_document, n_branches=2)
        add("eight", 9 * _work(sizes.n_eight) + 600, trial=trial, n_document=sizes.n_eight, n_branches=8)
        if trial > sizes.repeats:
            continue
        add(
            "generation",
            n_once + 1200,
            trial=trial,
            n_document=sizes.n_short,
            n_branches=8,
            n_answer=sizes.n_answer,
        )
        for peer in peers:
            add(
                "peers",
                _PEER_WORK.get(peer, 10) * n_once + 3000,
                trial=trial,
                document=peer,
                n_document=sizes.n_document if peer == "llama-cpp-python" else sizes.n_short,
                n_branches=8,
                n_answer=sizes.n_answer,
            )
    if sizes.branches:
        most = max(sizes.branches)
        add("branches", (most + 1) * n_once + 20 * most, n_document=sizes.n_short, n_branches=most)
    for n in sizes.lengths:
        add("lengths", 3 * _work(n) + 400, n_document=n, n_branches=2)
    for flash, kv_type in sizes.options:
        if (flash, kv_type) != (base.flash_attn, base.kv_type):
            cost = (3 if flash == "on" else 5) * n_once + 400
            add("options", cost, n_document=sizes.n_short, n_branches=2, flash_attn=flash, kv_type=kv_type)
    add("memory", n_once + 100 * len(sizes.held), n_document=sizes.n_short, n_branches=max(sizes.held))
    for name, n in documents:
        cost = 5 * _work(n) + 2000
        add("documents", cost, document=name, n_document=n, n_branches=3, n_answer=sizes.n_answer)
    return found


def _work(n_tokens: int) -> float:
    """A prefill of `n_tokens`, in tokens of a short one: each looks at all before it."""
    return n_tokens * (1 + n_tokens / 6000)
