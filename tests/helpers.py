"""What several test files share: models, inputs, contexts with fixed options, subprocesses."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import tiny_models

if TYPE_CHECKING:
    from swarmkv_ll import Arena, Context, Model, Snapshot

TESTS = Path(__file__).resolve().parent

ATTENTION, SLIDING, RECURRENT, HYBRID = KINDS = ("llama", "gemma2", "mamba", "jamba")
"""The tiny models' four kinds of memory, by architecture."""

CUDA_FILES = ("libggml-cuda.so", "cuda-info.json", "libcu*.so*")
"""What `build_llama.sh --cuda` adds to `_lib`: some 100 MB that a copy of the package can do without."""

WITH_CELLS = (ATTENTION, SLIDING, HYBRID)

N_BATCH, N_UBATCH = 128, 64
"""Small enough that short prefixes cross their borders."""


WRITERS: dict[str, Callable[[Path], None]] = {
    "llama": tiny_models.write_llama,
    "gemma2": tiny_models.write_gemma2,
    "mamba": tiny_models.write_mamba,
    "jamba": tiny_models.write_jamba,
    "bos": lambda path: tiny_models.write_llama(path, add_bos=True),
    "ends": lambda path: tiny_models.write_llama(path, eos_gain=1.5),
    "deeper": lambda path: tiny_models.write_llama(path, n_layer=5),
    "head48": lambda path: tiny_models.write_llama(path, n_head_dim=48),
    "head64": lambda path: tiny_models.write_llama(path, n_head_dim=64),
    "large": lambda path: tiny_models.write_llama(path, **tiny_models.LARGE_STATE),
    "uneven": tiny_models.write_deci,
    "mrope": tiny_models.write_qwen2vl,
    "mla": tiny_models.write_deepseek2,
    "hybrid-swa": tiny_models.write_lfm2,
    "shortconv": lambda path: tiny_models.write_lfm2(path, window=0),
    "lora": tiny_models.write_lora,  # an adapter for "llama", not a model
}


class Files:
    """GGUF files by name, each written when first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __getitem__(self, name: str) -> Path:
        path = self.folder / f"{name}.gguf"
        if not path.exists():
            if name == "changed":
                tiny_models.change_one_weight(self["llama"], path)
            else:
                WRITERS[name](path)
        return path


class Models:
    """Loaded models by name, shared by all tests; one that closes or changes a model loads its own."""

    def __init__(self, files: Files) -> None:
        self.files = files
        self.loaded: dict[str, Model] = {}

    def __getitem__(self, name: str) -> Model:
        from swarmkv_ll import Model

        if name not in self.loaded:
            self.loaded[name] = Model(self.files[name])
        return self.loaded[name]


def text_tokens(n: int, seed: int = 0) -> npt.NDArray[np.int32]:
    """`n` random tokens of a tiny model, none of them special."""
    return np.random.default_rng(seed).integers(0, 256, n).astype(np.int32)


BRANCH = text_tokens(9, seed=999)

TOKENS = text_tokens(96)
"""Ends where an engine batch ends, so that a prefix of 64 is computed in the same batches."""


def new_context(model: Model, n_ctx: int = 512, n_seq_max: int = 1, **options: Any) -> Context:
    """A context with small batches and one thread, so that results do not depend on the machine."""
    return model.context(n_ctx, n_seq_max, **{"n_batch": N_BATCH, "n_ubatch": N_UBATCH, "n_threads": 1, **options})


def taken(model: Model, arena: Arena, tokens: Any = TOKENS, *, named: bool = True, **options: Any) -> Snapshot:
    """The state of a context that has decoded `tokens`."""
    with new_context(model, **options) as ctx:
        ctx.decode(tokens)
        return ctx.snapshot(arena, tokens=tokens if named else None)


def address(ctx: Context) -> int:
    """The `llama_context *`, as another binding has it."""
    from swarmkv_ll.ffi import ffi

    return int(ffi.cast("uintptr_t", ctx._ptr))


def all_logits(ctx: Context, tokens: npt.ArrayLike, seq: int = 0) -> npt.NDArray[np.float32]:
    """Decode, and give a copy of every token's logits, shape (n_tokens, n_vocab)."""
    ctx.decode(tokens, seq=seq, logits="all")
    rows = ctx.logits()
    kept: npt.NDArray[np.float32] = rows.reshape(-1, rows.shape[-1]).copy()
    return kept


def uninterrupted(model: Model, prefix: npt.ArrayLike, branch: npt.ArrayLike, n_ctx: int = 512, **options: Any) -> Any:
    """The branch's logits in a context of its own that has just decoded the prefix: the truth."""
    with new_context(model, n_ctx, **options) as ctx:
        ctx.decode(prefix)
        return all_logits(ctx, branch)


def identical(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> bool:
    """Bit for bit, and not all the same number (which would prove nothing)."""
    return a.shape == b.shape and a.tobytes() == b.tobytes() and bool(np.ptp(a) > 0)


def close(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32], atol: float = 0.05) -> bool:
    """Equal but for rounding; a wrong token, position or layout is off by more than 0.5 in these models."""
    return a.shape == b.shape and bool(np.abs(a - b).max() < atol)


def differs(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> bool:
    """More than rounding can explain."""
    return a.shape == b.shape and bool(np.abs(a - b).max() > 0.5)


def resident_bytes() -> int:
    """Memory of this process that is in RAM now."""
    gc.collect()
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def run_python(
    code: str, *args: object, package: Path | None = None, env: dict[str, str] | None = None, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own, where the engine may abort or load differently.

    Parameters
    ----------
    package : path, optional
        Folder that holds the `swarmkv_ll` to import; by default the one under test.
    env : dict, optional
        Variables on top of this process's.
    """
    import swarmkv_ll

    home = package or Path(swarmkv_ll.__file__).resolve().parent.parent
    variables = {**os.environ, "PYTHONPATH": f"{home}{os.pathsep}{TESTS}", "PYTHONFAULTHANDLER": "", **(env or {})}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, args)],
        env=variables,
        cwd=TESTS.anchor,  # not the source folder, which `-c` would put first in the search path
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def run_ok(code: str, *args: object, **options: Any) -> str:
    """Run Python code that has to end well; gives what it printed."""
    done = run_python(code, *args, **options)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout.strip()
