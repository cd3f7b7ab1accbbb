"""The tiny models of the rarer memories: small, the same every time, and they forget nothing they should remember."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
import tiny_models
from helpers import BRANCH, WRITERS, Files, Models, all_logits, differs, identical, new_context, text_tokens

from swarmkv_ll import Arena, Context, Model
from swarmkv_ll.ffi import C, ffi

NAMES = ("uneven", "mrope", "mla", "hybrid-swa", "shortconv")
N_CELLS, WINDOW = 70, tiny_models.SLIDING_WINDOW


def get_state(ctx: Context, seq: int = 0) -> bytes:
    """A sequence's state as the engine gives it, without a look at what it is."""
    n_bytes = C.llama_state_seq_get_size(ctx._ptr, seq)
    state = bytearray(n_bytes)
    assert C.llama_state_seq_get_data(ctx._ptr, ffi.from_buffer("uint8_t[]", state), n_bytes, seq) == n_bytes
    return bytes(state)


@pytest.mark.parametrize("name", [*NAMES, "lora"])
def test_the_file_is_small_and_the_same_every_time(name: str, files: Files, tmp_path: Path) -> None:
    WRITERS[name](tmp_path / "again.gguf")
    data = files[name].read_bytes()
    assert len(data) < 2**20
    assert data == (tmp_path / "again.gguf").read_bytes()


@pytest.mark.parametrize(
    ("name", "recurrent", "hybrid", "window", "extensions"),
    [
        ("uneven", False, False, 0, False),
        ("mrope", False, False, 0, True),
        ("mla", False, False, 0, False),
        ("hybrid-swa", False, True, WINDOW, False),
        ("shortconv", False, True, 0, False),
    ],
)
def test_what_the_engine_says_of_it(
    name: str, recurrent: bool, hybrid: bool, window: int, extensions: bool, models: Models
) -> None:
    found = models[name].capabilities
    assert (found.recurrent, found.hybrid, found.sliding_window) == (recurrent, hybrid, window)
    assert found.cell_extensions == extensions


@pytest.mark.parametrize("flash_attn", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_logits_depend_on_every_token_and_its_place(name: str, flash_attn: bool, models: Models) -> None:
    tokens = text_tokens(N_CELLS)
    changed, swapped = tokens.copy(), tokens.copy()
    changed[55] ^= 1
    swapped[[55, 56]] = swapped[[56, 55]]
    rows = []
    for each in (tokens, changed, swapped):
        with new_context(models[name], flash_attn=flash_attn) as ctx:
            rows.append(all_logits(ctx, each))
    truth, other, order = rows
    assert np.isfinite(truth).all()
    assert len(set(truth.argmax(axis=1).tolist())) > N_CELLS / 2
    assert identical(truth[:55], other[:55])
    assert differs(truth[57:], other[57:])
    assert differs(truth[57:], order[57:])


def attention_bytes(n_cells: int, n_row: int, n_tensors: int, extension: int = 0) -> int:
    """Size of one attention cache: `n_row` bytes a cell over all its `n_tensors` tensors."""
    return 4 + 4 + n_cells * (12 + extension) + 8 + 12 * n_tensors + n_cells * n_row


@pytest.mark.parametrize("flash_attn", [True, False])
@pytest.mark.parametrize(
    ("name", "n_bytes"),
    [
        # K and V of 4, 1, 2 and 1 heads of 32 numbers of 2 bytes
        ("uneven", attention_bytes(N_CELLS, 2 * 64 * (4 + 1 + 2 + 1), 8)),
        ("mrope", attention_bytes(N_CELLS, 2 * 64 * 4, 8, extension=12)),
        # K of 48 numbers, and nothing else
        ("mla", attention_bytes(N_CELLS, 96 * 4, 4)),
        # a cache of no layers, then the window, then one cell of two R (512 bytes) and two S (0)
        ("hybrid-swa", attention_bytes(N_CELLS, 0, 0) + attention_bytes(WINDOW, 2 * 64 * 2, 4) + 20 + 4 * 12 + 2 * 512),
        ("shortconv", attention_bytes(N_CELLS, 2 * 64 * 2, 4) + 20 + 4 * 12 + 2 * 512),
    ],
)
def test_the_state_is_what_docs_blob_says(name: str, n_bytes: int, flash_attn: bool, models: Models) -> None:
    with new_context(models[name], flash_attn=flash_attn) as ctx:
        ctx.decode(text_tokens(N_CELLS))
        assert len(get_state(ctx)) == 8 + n_bytes


@pytest.mark.parametrize("name", NAMES)
def test_a_snapshot_goes_on_in_another_context(name: str, models: Models) -> None:
    with new_context(models[name]) as ctx, new_context(models[name], 1024, n_seq_max=2) as other:
        ctx.decode(text_tokens(N_CELLS))
        with Arena.for_branches(ctx, n_branches=1) as arena, ctx.snapshot(arena) as snapshot:
            snapshot.restore(other)
            assert get_state(other) == get_state(ctx)
            assert identical(all_logits(other, BRANCH), all_logits(ctx, BRANCH))


# ── an adapter ───────────────────────────────────────────────────────────────────────────────────────


class Lora:
    """The engine's calls for adapters, by ctypes: on the library that is loaded anyway."""

    def __init__(self, model: Model) -> None:
        library = ctypes.CDLL(ffi.string(C.skv_library_path()).decode())
        self.init, self.use = library.llama_adapter_lora_init, library.llama_set_adapters_lora
        self.init.restype, self.init.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_char_p]
        self.use.restype = ctypes.c_int32
        self.use.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
        self.model = int(ffi.cast("uintptr_t", model._handle.pointer))

    def load(self, path: Path) -> int | None:
        adapter: int | None = self.init(self.model, str(path).encode())
        return adapter

    def set(self, ctx: Context, adapter: int, scale: float) -> None:
        pointers, scales = (ctypes.c_void_p * 1)(adapter), (ctypes.c_float * 1)(scale)
        assert self.use(int(ffi.cast("uintptr_t", ctx._ptr)), pointers, 1, scales) == 0


def test_an_adapter_changes_what_the_model_says(files: Files) -> None:
    with Model(files["llama"]) as model:  # frees the adapter with it
        lora = Lora(model)
        adapter = lora.load(files["lora"])
        assert adapter
        found = {}
        for scale in (None, 0.0, 0.5, 1.0):
            with new_context(model) as ctx:
                if scale is not None:
                    lora.set(ctx, adapter, scale)
                found[scale] = all_logits(ctx, text_tokens(40))
        assert identical(found[0.0], found[None])
        assert differs(found[0.5], found[None])
        assert differs(found[1.0], found[0.5])


def test_an_adapter_fits_one_shape_and_architecture(files: Files, models: Models, tmp_path: Path) -> None:
    tiny_models.write_lora(tmp_path / "wide.gguf", n_embd=128)
    assert Lora(models["llama"]).load(tmp_path / "wide.gguf") is None
    assert Lora(models["mrope"]).load(files["lora"]) is None


# ── a large state ────────────────────────────────────────────────────────────────────────────────────


def test_a_large_state_has_two_mebibytes_a_token(files: Files) -> None:
    """A few tokens tell what 1,024 would take; `write_llama` says what decoding them costs."""
    with Model(files["large"]) as model, new_context(model, 256, type_k="f32", type_v="f32") as ctx:
        sizes = []
        for _ in range(2):
            rows = all_logits(ctx, text_tokens(2))
            sizes.append(C.llama_state_seq_get_size(ctx._ptr, 0))
        assert np.isfinite(rows).all()
        each = (sizes[1] - sizes[0]) // 2
        assert each == 2**21 + 12
        assert sizes[0] + (tiny_models.LARGE_STATE_CELLS - 2) * each > 2**31
