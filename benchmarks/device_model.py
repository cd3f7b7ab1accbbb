"""A model for `device_check.py`, made on the spot: llama, random Q8_0 weights, the same bytes from the same seed anywhere."""

from __future__ import annotations

import sys
import zlib
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from tiny_models import BOS, CHAT_TEMPLATE, EOS, IM_END, SPECIAL, tokens_and_merges

BLOCK, BLOCK_BYTES = 32, 34
"""Weights of a Q8_0 block, and its bytes: a scale as f16, then 32 times int8."""


@dataclass(frozen=True)
class Shape:
    """Of a llama model: all a matrix's inputs have to be multiples of 32."""

    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    n_head_dim: int
    n_ff: int
    n_vocab: int

    @property
    def kv_bytes_per_token(self) -> int:
        """In a cache of f16."""
        return 2 * 2 * self.n_layer * self.n_head_kv * self.n_head_dim


def write_model(path: Path, shape: Shape, *, n_ctx: int, seed: int = 0) -> None:
    """Write the model to `path`: whole, or not at all.

    Weights are drawn as Q8_0 blocks, so that a gigabyte takes seconds. They are so large that the logits depend on every
    token before them, and so small that rounding does not grow from layer to layer until nothing else is left, as it
    does in random models of this depth: docs/device-check.md has figures. Answers never end by themselves.
    """
    part = path.with_name(f".{path.name}.part")
    w = gguf.GGUFWriter(part, "llama")
    w.add_name(f"device-check-{seed}")
    w.add_block_count(shape.n_layer)
    w.add_context_length(n_ctx)
    w.add_embedding_length(shape.n_embd)
    w.add_feed_forward_length(shape.n_ff)
    w.add_head_count(shape.n_head)
    w.add_head_count_kv(shape.n_head_kv)
    w.add_key_length(shape.n_head_dim)
    w.add_value_length(shape.n_head_dim)
    w.add_rope_dimension_count(shape.n_head_dim)
    w.add_rope_freq_base(10000.0)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_vocab_size(shape.n_vocab)
    w.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    tokens, merges = tokens_and_merges(shape.n_vocab)
    types = [gguf.TokenType.NORMAL] * shape.n_vocab
    for token in SPECIAL:
        types[token] = gguf.TokenType.CONTROL
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("smollm")
    w.add_token_list(tokens)
    w.add_token_types(types)
    w.add_token_merges(merges)
    w.add_bos_token_id(BOS)
    w.add_eos_token_id(EOS)
    w.add_eot_token_id(IM_END)
    w.add_add_bos_token(False)
    w.add_chat_template(CHAT_TEMPLATE)

    def matrix(name: str, n_out: int, n_in: int, gain: float, quiet: list[int] | None = None) -> None:
        blocks = _blocks(seed, name, n_out, n_in, gain / n_in**0.5, quiet or [])
        w.add_tensor(f"{name}.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)

    def norm(name: str) -> None:
        w.add_tensor(f"{name}.weight", (1 + 0.1 * _uniform(seed, name, shape.n_embd)).astype(np.float32))

    share = 2.5 / shape.n_layer**0.5  # what attention, or a feed-forward part, adds to a stream of size 1
    n_q, n_kv = shape.n_head * shape.n_head_dim, shape.n_head_kv * shape.n_head_dim
    matrix("token_embd", shape.n_vocab, shape.n_embd, shape.n_embd**0.5)
    norm("output_norm")
    matrix("output", shape.n_vocab, shape.n_embd, 2.0, quiet=list(SPECIAL))
    for il in range(shape.n_layer):
        blk = f"blk.{il}"
        norm(f"{blk}.attn_norm")
        matrix(f"{blk}.attn_q", n_q, shape.n_embd, 1.4)
        matrix(f"{blk}.attn_k", n_kv, shape.n_embd, 1.4)
        matrix(f"{blk}.attn_v", n_kv, shape.n_embd, 1.0)
        matrix(f"{blk}.attn_output", shape.n_embd, n_q, share)
        norm(f"{blk}.ffn_norm")
        matrix(f"{blk}.ffn_gate", shape.n_ff, shape.n_embd, 1.0)
        matrix(f"{blk}.ffn_up", shape.n_ff, shape.n_embd, 1.0)
        matrix(f"{blk}.ffn_down", shape.n_embd, shape.n_ff, share)
    try:
        w.write_header_to_file()
        w.write_kv_data_to_file()
        w.write_tensors_to_file()
        w.close()
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _blocks(seed: int, name: str, n_out: int, n_in: int, deviation: float, quiet: list[int]) -> npt.NDArray[np.uint8]:
    """Rows of Q8_0 blocks, uint8 of shape (n_out, n_in // 32 * 34); rows in `quiet` are a hundredth as large."""
    n_blocks = n_in // BLOCK
    made = np.empty((n_out, n_blocks, BLOCK_BYTES), np.uint8)
    scales = (deviation / 73.9) * (1 + 0.2 * _uniform(seed, f"{name} scales", n_out, n_blocks))
    scales[quiet] *= 0.01
    made[:, :, :2] = scales.astype("<f2").view(np.uint8).reshape(n_out, n_blocks, 2)
    numbers = _raw(seed, name, n_out * n_in // 8).view(np.int8).reshape(n_out, n_blocks, BLOCK)
    made[:, :, 2:] = np.maximum(numbers, -127).view(np.uint8)  # −128 is none that the quantizer makes
    return made.reshape(n_out, n_blocks * BLOCK_BYTES)


def _raw(seed: int, name: str, n_words: int) -> npt.NDArray[np.uint64]:
    """The raw stream of PCG64, which numpy promises never to change."""
    return np.asarray(np.random.PCG64([seed, zlib.crc32(name.encode())]).random_raw(n_words), np.uint64)


def _uniform(seed: int, name: str, *shape: int) -> npt.NDArray[np.float64]:
    """Numbers of mean 0 and variance 1."""
    raw = _raw(seed, name, int(np.prod(shape))) >> np.uint64(40)
    return ((raw * 2.0**-23 - 1) * 3**0.5).reshape(shape)
