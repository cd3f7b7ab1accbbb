"""Parameters of a context, checked before the engine sees them: it would abort the process, or exhaust memory."""

from __future__ import annotations

import operator
import os
from typing import Literal

from . import runtime
from .arena import available_memory
from .errors import ContextCreateError, HostMemoryError, InvalidArgumentError
from .ffi import C
from .model import Model

KV_TYPES: dict[str, int] = {
    "f32": C.GGML_TYPE_F32,
    "f16": C.GGML_TYPE_F16,
    "bf16": C.GGML_TYPE_BF16,
    "q8_0": C.GGML_TYPE_Q8_0,
    "q5_1": C.GGML_TYPE_Q5_1,
    "q5_0": C.GGML_TYPE_Q5_0,
    "q4_1": C.GGML_TYPE_Q4_1,
    "q4_0": C.GGML_TYPE_Q4_0,
    "iq4_nl": C.GGML_TYPE_IQ4_NL,
}
"""Types a KV cache can be kept in."""

_BITS = {"f32": 32, "f16": 16, "bf16": 16, "q8_0": 8, "q5_1": 5, "q5_0": 5, "q4_1": 4, "q4_0": 4, "iq4_nl": 4}
"""Bits a value takes at least."""

MAX_THREADS = 512
"""GGML_MAX_N_THREADS; more is an assert in the engine."""


def default_n_threads() -> int:
    """Physical cores this process may run on."""
    n_cpus = len(os.sched_getaffinity(0))
    try:
        with open("/sys/devices/system/cpu/smt/active", encoding="ascii") as file:
            return max(1, n_cpus // 2) if file.read().strip() == "1" else n_cpus
    except OSError:
        return n_cpus


def check_context(
    model: Model,
    n_ctx: int,
    n_seq_max: int,
    *,
    kv_unified: bool,
    flash_attn: Literal["auto"] | bool,
    type_k: str,
    type_v: str,
    n_batch: int,
    n_ubatch: int,
    n_threads: int,
) -> None:
    """Check the parameters of `Context`.

    Raises
    ------
    InvalidArgumentError
        One is out of its range, or two do not go together.
    ContextCreateError
        The model does not decode.
    HostMemoryError
        The KV cache would not fit into memory.
    """
    for name, value, low, high in (
        ("n_ctx", n_ctx, 1, 2**31 - 256),
        ("n_seq_max", n_seq_max, 1, int(C.llama_max_parallel_sequences())),
        ("n_batch", n_batch, 1, 2**24),
        ("n_ubatch", n_ubatch, 1, 2**24),
        ("n_threads", n_threads, 1, MAX_THREADS),
    ):
        if not low <= operator.index(value) <= high:
            raise InvalidArgumentError(f"{name} should be {low} to {high}, is {value}")
    if n_batch < n_seq_max:  # the engine keeps a row of logits for each sequence, and asserts that a batch has as many
        raise InvalidArgumentError(f"n_batch should be at least n_seq_max, {n_seq_max}, is {n_batch}")
    if flash_attn not in ("auto", True, False):
        raise InvalidArgumentError(f'flash_attn should be "auto", True or False, is {flash_attn!r}')
    # The engine takes the smaller of n_ctx and n_batch as its batch, and asserts that it holds a token a sequence.
    if min(n_ctx, n_batch) < n_seq_max:
        raise InvalidArgumentError(
            f"n_ctx of {n_ctx} and n_batch of {n_batch} should be at least n_seq_max, {n_seq_max}"
        )
    for name, kv_type, width in (
        ("type_k", type_k, head_dim(model, "key_length")),
        ("type_v", type_v, head_dim(model, "value_length")),
    ):
        if kv_type not in KV_TYPES:
            raise InvalidArgumentError(f"{name} should be one of {', '.join(KV_TYPES)}, is {kv_type!r}")
        block = int(C.ggml_blck_size(KV_TYPES[kv_type]))
        if block > 1 and width % block:
            raise InvalidArgumentError(
                f"{name}={kv_type!r} has blocks of {block} values, which heads of {width} cannot be cut into"
            )
    if flash_attn is False and C.ggml_is_quantized(KV_TYPES[type_v]):
        raise InvalidArgumentError(f"type_v={type_v!r} needs flash attention")
    if not model.decodes:
        raise ContextCreateError(f"{model.path.name} is not a decoder-only model")
    required, available = _kv_bytes(model, n_ctx, type_k, type_v), available_memory()
    if required > available:
        raise HostMemoryError(required, available)


def head_dim(model: Model, key: str) -> int:
    """Values a head has, by the GGUF's key: "key_length" or "value_length"."""
    arch = model.metadata.get("general.architecture", "")
    known = model.metadata.get(f"{arch}.attention.{key}")
    return int(known) if known else model.n_embd // max(1, model.n_head)


def host_layers(model: Model) -> int:
    """Layers that are computed on the CPU, and have their part of the KV cache in host memory."""
    if runtime.gpu_device() is None:
        return model.n_layer
    if model.n_gpu_layers < 0:
        return 0
    return min(model.n_layer, max(0, model.n_layer + 1 - model.n_gpu_layers))  # the output counts as one; it goes first


def _kv_bytes(model: Model, n_ctx: int, type_k: str, type_v: str) -> int:
    """Host memory that the KV cache takes at least; 0 where that is not known or GPUs hold all of it.

    On a GPU the engine itself refuses a cache that does not fit. In host memory it does not: it clears the cache
    when it makes it, so that the kernel would kill the process.
    """
    kinds = model.capabilities
    if kinds.blob_parts.n_attention == 0:
        return 0
    n_layer = host_layers(model)
    if not kinds.attention_only:
        n_layer = min(n_layer, 1)  # they keep less, how much less is not told
    widths = ((type_k, head_dim(model, "key_length")), (type_v, head_dim(model, "value_length")))
    bits = sum(_BITS[kv_type] * head_dim for kv_type, head_dim in widths)
    return n_ctx * n_layer * max(1, model.n_head_kv) * bits // 8
