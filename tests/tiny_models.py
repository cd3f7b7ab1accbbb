"""Tiny random-weight GGUF models, one for each kind of memory the engine has.

===============  =====================  ===============================================
writer           kind of memory         what is special
===============  =====================  ===============================================
write_llama      attention              any size through its arguments
write_deci       attention              KV rows that differ in size from layer to layer
write_qwen2vl    attention, M-RoPE      each cell carries x, y and its token
write_deepseek2  attention, K only      MLA: V is computed from the K rows
write_gemma2     sliding window of 32   every other layer forgets, soft-capped logits
write_mamba      recurrent              a state of fixed size, no rows to cut
write_jamba      hybrid                 recurrent and attention layers in turn
write_lfm2       hybrid, window of 32   all attention is windowed; S rows have 0 bytes
===============  =====================  ===============================================

`write_lora` writes an adapter for what `write_llama` writes.

The same arguments give the same bytes on every machine: weights come from the
raw 64-bit stream of PCG64, which numpy promises never to change, seeded with
the seed and the tensor's name. A model with one more layer, another vocabulary
size or another RoPE base therefore shares all its other weights with its
sibling.

The text these models write is nonsense, but nonsense that depends on every
token before it and on where each one stands: query and key weights are scaled
up until attention picks a few positions instead of averaging over all of them.

The vocabulary (`tokens_and_merges`) has a token for each byte, its id the
byte's value, so any text goes in and comes out unchanged; then four control
tokens; then words of two and more letters joined by BPE merges.
"""

from __future__ import annotations

import itertools
import shutil
import zlib
from collections.abc import Iterator
from os import PathLike

import gguf
import numpy as np
import numpy.typing as npt

__all__ = [
    "BOS",
    "CHAT_TEMPLATE",
    "EOS",
    "IM_END",
    "IM_START",
    "LARGE_STATE",
    "LARGE_STATE_CELLS",
    "SLIDING_WINDOW",
    "change_one_weight",
    "tokens_and_merges",
    "write_deci",
    "write_deepseek2",
    "write_gemma2",
    "write_jamba",
    "write_lfm2",
    "write_llama",
    "write_lora",
    "write_mamba",
    "write_qwen2vl",
]

Path = str | PathLike[str]
Array = npt.NDArray[np.float32]

BOS, EOS, IM_START, IM_END = 256, 257, 258, 259
SPECIAL = {BOS: "<|bos|>", EOS: "<|endoftext|>", IM_START: "<|im_start|>", IM_END: "<|im_end|>"}

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

SLIDING_WINDOW = 32

LARGE_STATE = {"n_layer": 4, "n_embd": 8, "n_head": 256, "n_head_kv": 256, "n_head_dim": 256, "n_ff": 16}
"""Arguments of `write_llama` for KV rows of 2 MiB a token (f32 cache); see there."""

LARGE_STATE_CELLS = 1024
"""With as many tokens, a sequence's state in an f32 cache has more than 2³¹ bytes."""

_ALPHABET = "etaoinshrdlucmfwypvbgkjqxz"


def _byte_letters() -> list[str]:
    """Return the printable letter that stands for each byte in a byte-level BPE."""
    letters = [chr(b) for b in range(256)]
    # Control codes, the space and a few invisible letters move above 255, in order.
    hidden = [*range(33), *range(127, 161), 173]
    for n, b in enumerate(hidden):
        letters[b] = chr(256 + n)
    return letters


def _merged_words() -> Iterator[tuple[str, str]]:
    """Yield merges without end: space + letter, then two letters, three, four, …"""
    space = _byte_letters()[ord(" ")]
    yield from ((space, letter) for letter in _ALPHABET)
    for length in itertools.count(1):
        for *left, right in itertools.product(_ALPHABET, repeat=length + 1):
            yield "".join(left), right


def tokens_and_merges(n_vocab: int) -> tuple[list[str], list[str]]:
    """Build the vocabulary: bytes 0 to 255, the control tokens, then merged words.

    Parameters
    ----------
    n_vocab : int
        Number of tokens, at least 260.

    Returns
    -------
    tokens : list of str
        `n_vocab` tokens in byte-level BPE letters.
    merges : list of str
        One a merged word, in the order in which they apply.
    """
    tokens = [*_byte_letters(), *SPECIAL.values()]
    if n_vocab < len(tokens):
        raise ValueError(f"n_vocab must be at least {len(tokens)}, got {n_vocab}")
    pairs = list(itertools.islice(_merged_words(), n_vocab - len(tokens)))
    tokens += [left + right for left, right in pairs]
    return tokens, [f"{left} {right}" for left, right in pairs]


def _random(seed: int, name: str, *shape: int) -> Array:
    """Return uniform numbers of mean 0 and variance 1 that depend on seed and name."""
    stream = np.random.PCG64([seed, zlib.crc32(name.encode())])
    raw = stream.random_raw(int(np.prod(shape))) >> np.uint64(40)  # 24 bits, exact in f32
    unit = raw.astype(np.float32) * np.float32(2.0**-23) - np.float32(1.0)
    numbers: Array = (unit * np.float32(3.0**0.5)).reshape(shape)
    return numbers


def _write(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class _Model:
    """A GGUF file in the making: its metadata, its tokenizer and random tensors."""

    def __init__(
        self, path: Path, arch: str, *, seed: int, n_vocab: int, n_layer: int, n_embd: int,
        n_ff: int, n_ctx: int, add_bos: bool, eos_gain: float,
    ) -> None:  # fmt: skip
        self.seed, self.n_vocab, self.n_embd, self.n_ff = seed, n_vocab, n_embd, n_ff
        self.eos_gain = eos_gain
        self.gguf = w = gguf.GGUFWriter(path, arch)
        w.add_name(f"tiny-{arch}-{seed}")
        w.add_block_count(n_layer)
        w.add_context_length(n_ctx)
        w.add_embedding_length(n_embd)
        w.add_feed_forward_length(n_ff)
        w.add_layer_norm_rms_eps(1e-5)
        w.add_file_type(gguf.LlamaFileType.ALL_F32)

        tokens, merges = tokens_and_merges(n_vocab)
        types = [gguf.TokenType.NORMAL] * n_vocab
        for token in SPECIAL:
            types[token] = gguf.TokenType.CONTROL
        w.add_tokenizer_model("gpt2")
        # The rules of the default model. With those called "gpt-2", detokenizing
        # would drop the space before punctuation.
        w.add_tokenizer_pre("smollm")
        w.add_token_list(tokens)
        w.add_token_types(types)
        w.add_token_merges(merges)
        w.add_bos_token_id(BOS)
        w.add_eos_token_id(EOS)
        w.add_eot_token_id(IM_END)
        w.add_add_bos_token(add_bos)
        w.add_chat_template(CHAT_TEMPLATE)

    def random(self, name: str, *shape: int) -> Array:
        return _random(self.seed, name, *shape)

    def add(self, name: str, tensor: Array) -> None:
        self.gguf.add_tensor(name, tensor)

    def matrix(self, name: str, n_out: int, n_in: int, gain: float = 1.0) -> None:
        """Add a weight that keeps the size of its input, times `gain`."""
        self.add(f"{name}.weight", self.random(name, n_out, n_in) * np.float32(gain / n_in**0.5))

    def norm(self, name: str, n: int, gain: float = 1.0) -> None:
        weights = np.float32(gain) * (1 + self.random(name, n) * np.float32(0.1))
        self.add(f"{name}.weight", weights)

    def embedding(self, name: str, gain: float, special_gain: float) -> None:
        """Add a matrix with a row a token; control tokens get their own gains."""
        rows = self.random(name, self.n_vocab, self.n_embd) * np.float32(gain)
        rows[list(SPECIAL)] *= np.float32(special_gain)
        rows[[EOS, IM_END]] *= np.float32(self.eos_gain / special_gain)
        self.add(f"{name}.weight", rows)

    def embeddings(self) -> None:
        """Add token embeddings, the last norm and a separate output matrix."""
        self.add("token_embd.weight", self.random("token_embd", self.n_vocab, self.n_embd))
        self.norm("output_norm", self.n_embd)
        self.embedding("output", 2.0 / self.n_embd**0.5, 0.01)

    def rope(self, n_dims: int, freq_base: float) -> None:
        self.gguf.add_rope_dimension_count(n_dims)
        self.gguf.add_rope_freq_base(freq_base)

    def heads(self, n_head: int, n_head_kv: int | list[int], n_head_dim: int) -> None:
        self.gguf.add_head_count(n_head)
        self.gguf.add_head_count_kv(n_head_kv)
        self.gguf.add_key_length(n_head_dim)
        self.gguf.add_value_length(n_head_dim)

    def attention(self, il: int, n_head: int, n_head_kv: int, n_head_dim: int) -> None:
        blk = f"blk.{il}"
        # Scores of a standard deviation of 4 instead of 1: attention takes sides.
        self.matrix(f"{blk}.attn_q", n_head * n_head_dim, self.n_embd, gain=2.0)
        self.matrix(f"{blk}.attn_k", n_head_kv * n_head_dim, self.n_embd, gain=2.0)
        self.matrix(f"{blk}.attn_v", n_head_kv * n_head_dim, self.n_embd)
        self.matrix(f"{blk}.attn_output", self.n_embd, n_head * n_head_dim, gain=2.0)

    def feed_forward(self, il: int) -> None:
        blk = f"blk.{il}"
        self.norm(f"{blk}.ffn_norm", self.n_embd)
        self.matrix(f"{blk}.ffn_gate", self.n_ff, self.n_embd)
        self.matrix(f"{blk}.ffn_up", self.n_ff, self.n_embd)
        self.matrix(f"{blk}.ffn_down", self.n_embd, self.n_ff, gain=2.0)

    def ssm_hparams(self, d_conv: int, d_state: int, dt_rank: int) -> None:
        self.gguf.add_ssm_conv_kernel(d_conv)
        self.gguf.add_ssm_inner_size(2 * self.n_embd)  # the engine knows no other factor
        self.gguf.add_ssm_state_size(d_state)
        self.gguf.add_ssm_time_step_rank(dt_rank)

    def ssm(self, il: int, d_conv: int, d_state: int, dt_rank: int, *, norms: bool) -> None:
        blk, d_inner = f"blk.{il}", 2 * self.n_embd
        self.matrix(f"{blk}.ssm_in", 2 * d_inner, self.n_embd, gain=2.0)
        self.matrix(f"{blk}.ssm_conv1d", d_inner, d_conv)
        self.add(f"{blk}.ssm_conv1d.bias", self.random(f"{blk}.conv_b", d_inner) * np.float32(0.1))
        self.matrix(f"{blk}.ssm_x", dt_rank + 2 * d_state, d_inner)
        self.matrix(f"{blk}.ssm_dt", d_inner, dt_rank)
        # Time steps around softplus(-5) = 0.007: the state remembers some hundred tokens.
        self.add(f"{blk}.ssm_dt.bias", self.random(f"{blk}.dt_b", d_inner) - np.float32(5.0))
        decay = np.arange(1, d_state + 1, dtype=np.float32)
        self.add(f"{blk}.ssm_a", np.tile(-decay, (d_inner, 1)))
        self.add(f"{blk}.ssm_d", 1 + self.random(f"{blk}.d", d_inner) * np.float32(0.1))
        self.matrix(f"{blk}.ssm_out", self.n_embd, d_inner, gain=2.0)
        if norms:
            self.norm(f"{blk}.ssm_dt_norm", dt_rank)
            self.norm(f"{blk}.ssm_b_norm", d_state)
            self.norm(f"{blk}.ssm_c_norm", d_state)

    def write(self) -> None:
        _write(self.gguf)


def write_llama(
    path: Path, *, seed: int = 0, n_vocab: int = 384, n_layer: int = 4, n_embd: int = 64,
    n_head: int = 4, n_head_kv: int = 2, n_head_dim: int = 32, n_ff: int = 128,
    n_ctx: int = 16384, rope_freq_base: float = 10000.0, add_bos: bool = False,
    eos_gain: float = 0.01,
) -> None:  # fmt: skip
    """Write a llama model: attention over everything, grouped KV heads.

    Parameters
    ----------
    path : path
        Where the file goes; an existing one is replaced.
    seed : int
        Another seed, other weights.
    n_vocab : int
        Number of tokens, at least 260; see `tokens_and_merges`.
    n_layer, n_embd, n_head, n_head_kv, n_head_dim, n_ff : int
        The shape. An f16 KV row has ``2 * n_head_kv * n_head_dim`` bytes.
    n_ctx : int
        Context length the model claims to be trained for.
    rope_freq_base : float
        RoPE base frequency; it changes no weight.
    add_bos : bool
        Whether the tokenizer puts `BOS` first when asked for special tokens.
    eos_gain : float
        Size of the logits of `EOS` and `IM_END`. The default keeps greedy decoding
        from ending; 1.5 lets it end after some tens of tokens, 3 after none to five.

    Notes
    -----
    A state of more than 2 GiB comes from ``**LARGE_STATE`` (a file of 32 MiB), an f32 cache,
    flash attention and `LARGE_STATE_CELLS` tokens, ``n_batch=1024, n_ubatch=256``. Measured
    with n_ctx=1024: `llama_state_seq_get_size` gives 2,147,496,056, decoding takes 24 s of
    processor time, shared by two threads (34 to 58 s by the clock where others kept the cores
    busy), and the process holds 2.5 GiB, without the blob. Without flash attention it is 32 s.
    Fewer tokens need wider rows, more take more attention (2,049 tokens and a file of 16 MiB:
    45 s), and an f16 cache needs twice the numbers.
    """
    m = _Model(
        path, "llama", seed=seed, n_vocab=n_vocab, n_layer=n_layer, n_embd=n_embd,
        n_ff=n_ff, n_ctx=n_ctx, add_bos=add_bos, eos_gain=eos_gain,
    )  # fmt: skip
    m.gguf.add_vocab_size(n_vocab)
    m.heads(n_head, n_head_kv, n_head_dim)
    m.rope(n_head_dim, rope_freq_base)
    m.embeddings()
    for il in range(n_layer):
        m.norm(f"blk.{il}.attn_norm", n_embd)
        m.attention(il, n_head, n_head_kv, n_head_dim)
        m.feed_forward(il)
    m.write()


def write_gemma2(
    path: Path, *, seed: int = 0, n_vocab: int = 384, n_layer: int = 4, n_ctx: int = 8192,
    window: int = SLIDING_WINDOW, rope_freq_base: float = 10000.0, add_bos: bool = False,
) -> None:  # fmt: skip
    """Write a gemma2 model: layers 0, 2, … see only the last `window` positions."""
    n_embd, n_head, n_head_kv, n_head_dim = 64, 4, 2, 32
    m = _Model(
        path, "gemma2", seed=seed, n_vocab=n_vocab, n_layer=n_layer, n_embd=n_embd,
        n_ff=128, n_ctx=n_ctx, add_bos=add_bos, eos_gain=0.01,
    )  # fmt: skip
    m.heads(n_head, n_head_kv, n_head_dim)
    m.rope(n_head_dim, rope_freq_base)
    m.gguf.add_sliding_window(window)
    m.gguf.add_attn_logit_softcapping(50.0)
    m.gguf.add_final_logit_softcapping(30.0)
    # Output and input share one matrix here. The gain of the norms after each block
    # drowns the embedding in what the blocks add, or each token would predict itself.
    m.embedding("token_embd", 2.0 / n_embd**0.5, 0.01)
    m.norm("output_norm", n_embd)
    for il in range(n_layer):
        m.norm(f"blk.{il}.attn_norm", n_embd)
        m.attention(il, n_head, n_head_kv, n_head_dim)
        m.norm(f"blk.{il}.post_attention_norm", n_embd, gain=8.0)
        m.feed_forward(il)
        m.norm(f"blk.{il}.post_ffw_norm", n_embd, gain=8.0)
    m.write()


def write_mamba(
    path: Path, *, seed: int = 0, n_vocab: int = 384, n_layer: int = 4, n_ctx: int = 8192,
    add_bos: bool = False,
) -> None:  # fmt: skip
    """Write a mamba model: recurrent only, its state has one size whatever it has read."""
    n_embd, d_conv, d_state, dt_rank = 64, 4, 16, 4
    m = _Model(
        path, "mamba", seed=seed, n_vocab=n_vocab, n_layer=n_layer, n_embd=n_embd,
        n_ff=0, n_ctx=n_ctx, add_bos=add_bos, eos_gain=0.01,
    )  # fmt: skip
    m.gguf.add_head_count(0)
    m.ssm_hparams(d_conv, d_state, dt_rank)
    m.embeddings()
    for il in range(n_layer):
        m.norm(f"blk.{il}.attn_norm", n_embd)
        m.ssm(il, d_conv, d_state, dt_rank, norms=False)
    m.write()


def write_jamba(
    path: Path, *, seed: int = 0, n_vocab: int = 384, n_layer: int = 4, n_ctx: int = 8192,
    add_bos: bool = False,
) -> None:  # fmt: skip
    """Write a jamba model: even layers are recurrent, odd ones attend (without RoPE)."""
    n_embd, n_head, n_head_dim, d_conv, d_state, dt_rank = 64, 2, 32, 4, 16, 4
    n_head_kv = [0 if il % 2 == 0 else 2 for il in range(n_layer)]
    m = _Model(
        path, "jamba", seed=seed, n_vocab=n_vocab, n_layer=n_layer, n_embd=n_embd,
        n_ff=128, n_ctx=n_ctx, add_bos=add_bos, eos_gain=0.01,
    )  # fmt: skip
    m.heads(n_head, n_head_kv, n_head_dim)
    m.ssm_hparams(d_conv, d_state, dt_rank)
    m.embeddings()
    for il, n_kv in enumerate(n_head_kv):
        m.norm(f"blk.{il}.attn_norm", n_embd)
        if n_kv == 0:
            m.ssm(il, d_conv, d_state, dt_rank, norms=True)
        else:
            m.attention(il, n_head, n_kv, n_head_dim)
        m.feed_forward(il)
    m.write()


def write_deci(
    path: Path, *, seed: int = 0, n_vocab: int = 384, n_head_kv: tuple[int, ...] = (4, 1, 2, 1),
    n_ctx: int = 8192, add_bos: bool = False,
) -> None:  # fmt: skip
    """Write a deci model: a llama whose layers have `n_head_kv[il]` KV heads each, all above 0."""
    n_embd, n_head, n_head_dim, n_layer = 64, 4, 32, len(n_head_kv)
    m = _Model(
        path, "deci", seed=seed, n_vocab=n_vocab, n_layer=n_layer, n_embd=n_embd,
        n_ff=128, n_ctx=n_ctx, add_bos=add_bos, eos_gain=0.01,
    )  # fmt: skip
    m.heads(n_head, list(n_head_kv), n_head_dim)
    m.rope(n_head_dim, 10000.0)
    m.embeddings()
    for il, n_kv in enumerate(n_head_kv):
        m.norm(f"blk.{il}.attn_norm", n_embd)
        m.attention(il, n_head, n_kv, n_head_dim)
        m.feed_forward(il)
    m.write()


def write_qwen2vl(
    path: Path, *, seed: int = 0, n_vocab: int = 384, n_layer: int = 4, n_ctx: int = 8192,
    add_bos: bool = False,
) -> None:  # fmt: skip
    """Write a qwen2vl model: positions of three coordinates (M-RoPE); text uses one number for all."""
    n_embd, n_head, n_head_kv, n_head_dim = 64, 4, 2, 16
    m = _Model(
        path, "qwen2vl", seed=seed, n_vocab=n_vocab, n_layer=n_layer, n_embd=n_embd,
        n_ff=128, n_ctx=n_ctx, add_bos=add_bos, eos_gain=0.01,
    )  # fmt: skip
    m.heads(n_head, n_head_kv, n_head_dim)
    m.rope(n_head_dim, 10000.0)
    m.gguf.add_rope_dimension_sections([2, 3, 3, 0])  # pairs that turn with time, y, x
    m.embeddings()
    for il in range(n_layer):
        m.norm(f"blk.{il}.attn_norm", n_embd)
        m.attention(il, n_head, n_head_kv, n_head_dim)
        m.feed_forward(il)
    m.write()


def write_deepseek2(
    path: Path, *, seed: int = 0, n_vocab: int = 384, n_layer: int = 4, n_ctx: int = 8192,
    add_bos: bool = False,
) -> None:  # fmt: skip
    """Write a deepseek2 model with MLA: a K row is a latent of 32 numbers and 16 that turn; there is no V."""
    n_embd, n_head, n_latent, n_rot, n_nope, n_value, n_query = 64, 4, 32, 16, 16, 32, 32
    m = _Model(
        path, "deepseek2", seed=seed, n_vocab=n_vocab, n_layer=n_layer, n_embd=n_embd,
        n_ff=128, n_ctx=n_ctx, add_bos=add_bos, eos_gain=0.01,
    )  # fmt: skip
    w = m.gguf
    w.add_head_count(n_head)
    w.add_head_count_kv(1)
    w.add_key_length(n_latent + n_rot)
    w.add_value_length(n_latent)
    w.add_key_length_mla(n_nope + n_rot)
    w.add_value_length_mla(n_value)
    w.add_q_lora_rank(n_query)
    w.add_kv_lora_rank(n_latent)
    w.add_leading_dense_block_count(n_layer)  # no experts, but their numbers are asked for
    w.add_expert_feed_forward_length(128)
    w.add_expert_shared_count(1)
    m.rope(n_rot, 10000.0)
    m.embeddings()
    for il in range(n_layer):
        blk = f"blk.{il}"
        m.norm(f"{blk}.attn_norm", n_embd)
        m.matrix(f"{blk}.attn_q_a", n_query, n_embd)
        m.norm(f"{blk}.attn_q_a_norm", n_query)
        m.matrix(f"{blk}.attn_q_b", n_head * (n_nope + n_rot), n_query, gain=2.0)
        m.matrix(f"{blk}.attn_kv_a_mqa", n_latent + n_rot, n_embd, gain=2.0)
        m.norm(f"{blk}.attn_kv_a_norm", n_latent)
        # One small matrix for each head, from the latent to its keys (stored the other way round) and values.
        keys = m.random(f"{blk}.attn_k_b", n_head, n_latent, n_nope)
        m.add(f"{blk}.attn_k_b.weight", keys * np.float32(2.0 / n_latent**0.5))
        values = m.random(f"{blk}.attn_v_b", n_head, n_value, n_latent)
        m.add(f"{blk}.attn_v_b.weight", values * np.float32(1.0 / n_latent**0.5))
        m.matrix(f"{blk}.attn_output", n_embd, n_head * n_value, gain=2.0)
        m.feed_forward(il)
    m.write()


def write_lfm2(
    path: Path, *, seed: int = 0, n_vocab: int = 384, n_layer: int = 4, n_ctx: int = 8192,
    window: int = SLIDING_WINDOW, add_bos: bool = False,
) -> None:  # fmt: skip
    """Write an lfm2 model: even layers are short convolutions, odd ones attend to the last `window` positions.

    With `window` 0 they attend to everything, and the memory is a hybrid one without a window.
    """
    n_embd, n_head, n_head_dim, n_conv = 64, 4, 16, 3
    n_head_kv = [0 if il % 2 == 0 else 2 for il in range(n_layer)]
    m = _Model(
        path, "lfm2", seed=seed, n_vocab=n_vocab, n_layer=n_layer, n_embd=n_embd,
        n_ff=128, n_ctx=n_ctx, add_bos=add_bos, eos_gain=0.01,
    )  # fmt: skip
    m.gguf.add_vocab_size(n_vocab)
    m.heads(n_head, n_head_kv, n_head_dim)
    m.rope(n_head_dim, 10000.0)
    m.gguf.add_shortconv_l_cache(n_conv)
    if window:
        m.gguf.add_sliding_window(window)
    m.add("token_embd.weight", m.random("token_embd", n_vocab, n_embd))
    m.norm("token_embd_norm", n_embd)  # the last norm, whatever its name says
    m.embedding("output", 2.0 / n_embd**0.5, 0.01)
    for il, n_kv in enumerate(n_head_kv):
        blk = f"blk.{il}"
        m.norm(f"{blk}.attn_norm", n_embd)
        if n_kv == 0:
            m.matrix(f"{blk}.shortconv.in_proj", 3 * n_embd, n_embd)
            m.matrix(f"{blk}.shortconv.conv", n_embd, n_conv)
            m.matrix(f"{blk}.shortconv.out_proj", n_embd, n_embd, gain=2.0)
        else:
            m.attention(il, n_head, n_kv, n_head_dim)
            m.norm(f"{blk}.attn_q_norm", n_head_dim, gain=2.0)
            m.norm(f"{blk}.attn_k_norm", n_head_dim, gain=2.0)
        m.feed_forward(il)
    m.write()


def write_lora(
    path: Path, *, seed: int = 0, n_layer: int = 4, n_embd: int = 64, n_head: int = 4,
    n_head_kv: int = 2, n_head_dim: int = 32, rank: int = 4, alpha: float = 8.0,
) -> None:  # fmt: skip
    """Write a LoRA adapter for the queries and values of the llama model of the same shape.

    Parameters
    ----------
    rank : int
        Inner side of the two matrices of a pair.
    alpha : float
        The engine multiplies what a pair adds by ``alpha / rank``, and by the scale it is set with. At a
        product of 1 a pair adds as much as the weight it belongs to already gives.
    """
    w = gguf.GGUFWriter(path, "llama")
    w.add_type(gguf.GGUFType.ADAPTER)
    w.add_name(f"tiny-lora-{seed}")
    w.add_string(gguf.Keys.Adapter.TYPE, "lora")
    w.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
    for il in range(n_layer):
        for name, n_out in (("attn_q", n_head * n_head_dim), ("attn_v", n_head_kv * n_head_dim)):
            full = f"blk.{il}.{name}.weight"
            a = _random(seed, f"{full}.lora_a", rank, n_embd) / np.float32(n_embd**0.5)
            b = _random(seed, f"{full}.lora_b", n_out, rank) / np.float32(rank**0.5)
            w.add_tensor(f"{full}.lora_a", a)
            w.add_tensor(f"{full}.lora_b", b)
    _write(w)


def change_one_weight(
    path_in: Path, path_out: Path, *, tensor: str = "output_norm.weight", index: int = 0,
    delta: float = 0.5,
) -> None:  # fmt: skip
    """Copy a model with one number changed: same shape, same size, another model.

    Parameters
    ----------
    path_in, path_out : path
        The model and its altered copy.
    tensor : str
        Name of an f32 tensor.
    index : int
        Which of its numbers, counted through the flat tensor.
    delta : float
        What is added to it.
    """
    shutil.copyfile(path_in, path_out)
    reader = gguf.GGUFReader(path_out, "r+")
    weights = next(t for t in reader.tensors if t.name == tensor).data
    if weights.dtype != np.float32:
        raise TypeError(f"{tensor} is {weights.dtype}, not float32")
    weights.reshape(-1)[index] += np.float32(delta)
    reader.data.flush()
