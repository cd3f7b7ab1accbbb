"""swarmkv_ll: prefill a document once, snapshot its KV state, fork it to many branches, restore, decode on.

    document ─▶ Context.decode ─▶ Snapshot ─┬─ fork()  one memmove ─▶ restore ─▶ branch decode
                                            ├─ share() no copy ─────▶ restore ─▶ branch decode
                                            └─ save()  a file ─ load() ─▶ restore ─▶ …

The engine (`libllama.so`) is loaded when the first name that needs it is used. Every exception is in
`swarmkv_ll.errors` and derives from `SwarmKVError`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from .errors import SwarmKVError

if TYPE_CHECKING:
    from .adapter import Adapter
    from .arena import Arena, Lease
    from .batching import BatchedDecoder
    from .budget import validate_context_budget
    from .context import Context
    from .fanout import Branch, FanOut, fan_out
    from .identity import Rope
    from .model import Model
    from .on_device import DeviceSnapshot
    from .pipeline import BranchNode, FunctionNode, Pipeline, PipelineResult, PrefillNode
    from .policy import FairShare
    from .runtime import LlamaGuard
    from .sampling import Sampler
    from .snapshot import Snapshot, bind_contiguous_cache

__version__ = "0.1.0"

_HOME = {
    "Adapter": "adapter",
    "Arena": "arena",
    "BatchedDecoder": "batching",
    "Branch": "fanout",
    "BranchNode": "pipeline",
    "Context": "context",
    "DeviceSnapshot": "on_device",
    "FairShare": "policy",
    "FanOut": "fanout",
    "FunctionNode": "pipeline",
    "Lease": "arena",
    "LlamaGuard": "runtime",
    "Model": "model",
    "Pipeline": "pipeline",
    "PipelineResult": "pipeline",
    "PrefillNode": "pipeline",
    "Rope": "identity",
    "Sampler": "sampling",
    "Snapshot": "snapshot",
    "bind_contiguous_cache": "snapshot",
    "fan_out": "fanout",
    "validate_context_budget": "budget",
}

__all__ = [
    "Adapter",
    "Arena",
    "BatchedDecoder",
    "Branch",
    "BranchNode",
    "Context",
    "DeviceSnapshot",
    "FairShare",
    "FanOut",
    "FunctionNode",
    "Lease",
    "LlamaGuard",
    "Model",
    "Pipeline",
    "PipelineResult",
    "PrefillNode",
    "Rope",
    "Sampler",
    "Snapshot",
    "SwarmKVError",
    "bind_contiguous_cache",
    "fan_out",
    "validate_context_budget",
]


def __getattr__(name: str) -> object:
    """Import a public name's module on first use, so that the pure modules need no built engine."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
