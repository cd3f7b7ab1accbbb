"""Beside what a user would take instead, on the same library: llama-cpp-python and llama.cpp's own tools."""

from __future__ import annotations

from typing import Any

import pytest

from swarmkv_ll import Model
from swarmkv_ll.campaign.peers import PEERS, Case, compare, missing
from swarmkv_ll.campaign.summary import PEERS as METRICS
from swarmkv_ll.campaign.summary import TARGETS
from swarmkv_ll.limits import default_n_threads
from swarmkv_ll.pipeline_measure import texts

WANTED = {key: wanted for metric, _, wanted in TARGETS for key, (name, _) in METRICS.items() if name == metric}
"""Of the comparisons that have a target; the others are in `extra_info` only."""


@pytest.mark.benchmark(group="peers")
@pytest.mark.parametrize("peer", PEERS)
def bench_peer(benchmark: Any, ratio: Any, model: Model, peer: str) -> None:
    """One trial of `swarmkv bench --peers`, both sides in turns."""
    if why := missing(peer):
        pytest.skip(why)
    case = Case(model.path, *texts(model), default_n_threads())
    for found in benchmark.pedantic(lambda: compare(peer, case, model, lambda _: None), rounds=1):
        benchmark.extra_info[found.name] = found.ratio
        if found.name in WANTED:
            ratio(f"{found.name.replace('_', ' ')}, times as fast as {peer}", found.ratio, WANTED[found.name])
