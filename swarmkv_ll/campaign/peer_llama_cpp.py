"""llama-cpp-python's ways to keep a state beside ours, in a process of its own, where it holds the document.

python -m swarmkv_ll.campaign.peer_llama_cpp

Reads ``{"model", "document", "question", "n_threads", "rounds"}`` as JSON from the standard input, and writes medians of
seconds as JSON to the standard output, as its last line. `swarmkv_ll.campaign.peers` starts it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import closing
from statistics import median
from typing import Any

import numpy as np

from ..arena import Arena
from ..context import Context
from ..interop import adopt
from ..measure import interleaved
from ..sampling import Sampler
from ..snapshot import Snapshot

N_BATCHES = (512, 2048)
"""llama-cpp-python's own default, then llama.cpp's and ours: a state of it holds the scores of that many tokens too."""


def measure(model: str, document: list[int], question: list[int], n_threads: int, rounds: int) -> dict[str, Any]:
    """Each comparison in the process's own contexts.

    Returns
    -------
    dict
        ``save_load``: one for each of `N_BATCHES`, and ``ram_cache``, with both sides' seconds; ``same_token``: in how
        many of the rounds the question's first token was the same.
    """
    n_ctx = -(-(len(document) + len(question) + 64) // 256) * 256
    found: dict[str, Any] = {"save_load": []}
    with _llama(model, n_ctx, N_BATCHES[0], n_threads) as llm:
        llm.eval(document)
        with adopt(llm) as ctx, Arena.for_branches(ctx, 1) as arena, ctx.snapshot(arena) as snapshot:
            found["save_load"].append(save_and_load(llm, ctx, arena, rounds))
            found |= come_back(llm, ctx, snapshot, document, question, rounds)
            for n_batch in N_BATCHES[1:]:
                with _llama(model, n_ctx, n_batch, n_threads) as other, adopt(other) as its:
                    other.n_tokens = snapshot.restore(its)  # instead of computing the document once more
                    other.input_ids[: len(document)] = document
                    found["save_load"].append(save_and_load(other, its, arena, rounds))
    return found


def _llama(model: str, n_ctx: int, n_batch: int, n_threads: int) -> Any:
    from llama_cpp import Llama

    return closing(
        Llama(
            model,
            n_ctx=n_ctx,
            n_batch=n_batch,
            flash_attn=True,
            n_threads=n_threads,
            n_threads_batch=n_threads,
            verbose=False,
        )
    )


def save_and_load(llm: Any, ctx: Context, arena: Arena, rounds: int) -> dict[str, float]:
    """`Llama.save_state` and `load_state` against a snapshot and its restore, of the same context."""
    kept: dict[str, Any] = {}

    def keep(name: str, take: Callable[[], Any]) -> None:
        kept[name] = take()

    def restore() -> Any:
        kept["snapshot"].restore(ctx)

    times = interleaved(
        rounds,
        save_state=lambda: keep("state", llm.save_state),
        load_state=lambda: llm.load_state(kept["state"]),
        snapshot=lambda: keep("snapshot", lambda: ctx.snapshot(arena)),
        restore=restore,
        release=lambda: kept.pop("snapshot").release(),
    )
    peer = [a + b for a, b in zip(times["save_state"], times["load_state"], strict=True)]
    ours = [a + b for a, b in zip(times["snapshot"], times["restore"], strict=True)]
    return {"peer_s": median(peer), "our_s": median(ours), **{f"{name}_s": times.median(name) for name in times}}


def come_back(
    llm: Any, ctx: Context, snapshot: Snapshot, document: list[int], question: list[int], rounds: int
) -> dict[str, Any]:
    """A new question on a document that is cached, while the context holds something else: to the first token.

    `LlamaRAMCache` is used as `Llama.create_completion` does: look the prompt up, load the state, generate. (It then
    saves the state once more, which is not counted.)
    """
    from llama_cpp import LlamaRAMCache

    cache, prompt = LlamaRAMCache(), [*document, *question]
    cache[document] = llm.save_state()
    other = list(reversed(document[-8:]))
    tokens: dict[str, list[int]] = {"peer": [], "ours": []}

    def elsewhere() -> None:
        llm.reset()
        llm.eval(other)

    def peer() -> None:
        llm.load_state(cache[prompt])
        with closing(llm.generate(prompt, temp=0.0)) as generated:
            tokens["peer"].append(next(generated))

    def ours() -> None:
        snapshot.restore(ctx)
        ctx.decode(question)
        tokens["ours"].append(greedy.sample(ctx.logits(0)))

    with Sampler() as greedy:
        times = interleaved(rounds, away=elsewhere, peer=peer, away_again=elsewhere, ours=ours)
    found = {"peer_s": times.median("peer"), "our_s": times.median("ours")}
    return {"ram_cache": found, "same_token": int(np.sum(np.equal(tokens["peer"], tokens["ours"])))}


if __name__ == "__main__":
    print(json.dumps(measure(**json.load(sys.stdin))))
