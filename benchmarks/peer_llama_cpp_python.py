"""Time llama-cpp-python's `save_state` + `load_state` against a snapshot + restore of the same context, in turns.

python peer_llama_cpp_python.py MODEL N_TOKENS
"""

from __future__ import annotations

import json
import sys
from importlib import resources
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from swarmkv_ll import Arena, Snapshot
from swarmkv_ll.interop import adopt
from swarmkv_ll.limits import default_n_threads

ROUNDS = 11


def main(path: str, n_tokens: int, n_batch: int) -> None:
    from llama_cpp import Llama

    llm = Llama(path, n_ctx=4608, n_batch=n_batch, flash_attn=True, n_threads=default_n_threads(), verbose=False)
    text = (resources.files("swarmkv_ll") / "data" / "sample_spec.md").read_bytes()
    llm.eval(np.resize(llm.tokenize(text), n_tokens).tolist())
    times: dict[str, list[float]] = {name: [] for name in ("save_state", "load_state", "snapshot", "restore")}

    def timed(name: str, step: Any) -> Any:
        begin = perf_counter()
        result = step()
        times[name].append(perf_counter() - begin)
        return result

    with adopt(llm) as ctx, Arena.for_branches(ctx, 1) as arena:
        for _ in range(ROUNDS):
            state = timed("save_state", llm.save_state)
            timed("load_state", lambda state=state: llm.load_state(state))
            snapshot: Snapshot = timed("snapshot", lambda: ctx.snapshot(arena))
            timed("restore", lambda snapshot=snapshot: snapshot.restore(ctx))
            snapshot.release()
    ratios = [(a + b) / (c + d) for a, b, c, d in zip(*times.values(), strict=True)]
    print(json.dumps({"ratio": median(ratios), **{f"{name}_ms": 1e3 * median(found) for name, found in times.items()}}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
