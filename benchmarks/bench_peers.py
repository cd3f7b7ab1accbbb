"""Beside what a user would take instead: llama-cpp-python's own way to save and load a state, on the same library."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from swarmkv_ll.default_model import fetch_default_model
from swarmkv_ll.pipeline_measure import N_DOCUMENT


@pytest.mark.benchmark(group="peers")
@pytest.mark.skipif(find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed, see docs/interop.md")
@pytest.mark.parametrize("n_batch", [512, 2048])
def bench_save_and_load(benchmark: Any, ratio: Any, n_batch: int) -> None:
    """In a process of its own, where llama-cpp-python holds the document; both save and load in turns.

    It copies its scores too, n_batch rows of the vocabulary: 512 is its own default, 2,048 llama.cpp's and ours.
    """
    run = [
        sys.executable,
        str(Path(__file__).with_name("peer_llama_cpp_python.py")),
        str(fetch_default_model()),
        str(N_DOCUMENT),
        str(n_batch),
    ]
    done = benchmark.pedantic(lambda: subprocess.run(run, capture_output=True, text=True, check=True), rounds=1)
    found = json.loads(done.stdout.splitlines()[-1])
    ratio(f"save + load, times as fast as llama-cpp-python's, n_batch {n_batch:,}", found.pop("ratio"), 20, **found)
