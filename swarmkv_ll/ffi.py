"""The only door to the compiled binding: loads it, makes sure it is the right engine, exports `ffi` and `C`.

Importing this module loads `libllama.so` into the process. What can go wrong there (no library, a missing symbol,
another engine than the one compiled against, a second copy of ggml) becomes one clear :class:`EngineLoadError`.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import AbiMismatchError, EngineConflictError, EngineLoadError

LIB_DIR = Path(__file__).resolve().parent / "_lib"
"""Folder of the engine's libraries and loadable backends."""

SPIN_COUNT = "1000"
"""`GOMP_SPINCOUNT` in force while libgomp loads, unless the user has a waiting policy of their own."""


def mapped_files(*stems: str) -> list[str]:
    """Files mapped into this process whose name begins with one of `stems`, each once, sorted."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        paths = {line.split(maxsplit=5)[5].rstrip("\n") for line in maps if line.count(" ") >= 5 and "/" in line}
    return sorted(path for path in paths if os.path.basename(path).startswith(stems))


def foreign_engines() -> list[str]:
    """Files of any libllama or libggml in this process that is not ours."""
    return [path for path in mapped_files("libllama.", "libggml") if Path(path).resolve().parent != LIB_DIR]


@contextmanager
def short_spin() -> Iterator[None]:
    """Have libgomp spin only briefly at its barriers, if it is loaded in this block and the user chose nothing.

    ggml's threads meet at a barrier after each graph node. With GNU OpenMP's default, a neighbour that keeps one
    core busy makes a short decode up to 60 times slower; with 1,000 spins at most about 2 times.
    libgomp reads the environment once, when it is loaded, so the variable is taken out again afterwards: processes
    started from this one see the environment they would have seen.
    """
    if "GOMP_SPINCOUNT" in os.environ or "OMP_WAIT_POLICY" in os.environ:
        yield
        return
    os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT
    try:
        yield
    finally:
        del os.environ["GOMP_SPINCOUNT"]


def waiting_policy() -> str:
    """How OpenMP's threads wait, and who decided so, in a few words (shown by `swarmkv doctor`)."""
    if not mapped_files("libgomp.", "libomp.", "libiomp"):
        return "by ggml's own loop (the engine is built without OpenMP)"
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        if name in os.environ:
            return f"{name}={os.environ[name]} (set by the user)"
    if _openmp_was_loaded:
        return "unknown: libgomp was in this process before swarmkv_ll, set GOMP_SPINCOUNT=1000 yourself"
    return f"GOMP_SPINCOUNT={SPIN_COUNT} (set by swarmkv_ll)"


def _load() -> tuple[Any, Any]:
    if foreign := foreign_engines():
        raise EngineConflictError(foreign)
    try:
        with short_spin():
            module = importlib.import_module("swarmkv_ll._llama")
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "swarmkv_ll._llama":
            raise EngineLoadError("the binding is not built: run `pip install .` in the source folder") from None
        raise EngineLoadError(f"cannot load the engine: {error}") from None
    ffi, lib = module.ffi, module.lib
    # LD_LIBRARY_PATH or an interpreter's own library folder may have come before ours.
    if foreign := foreign_engines():
        raise EngineConflictError(foreign)
    built = ffi.string(lib.skv_built_stamp()).decode()
    loaded = ffi.string(lib.skv_loaded_stamp()).decode(errors="replace")
    if built != loaded:
        raise AbiMismatchError(built, loaded)
    # A struct that no longer fits its declaration is reported by cffi on first use only: use each now.
    for struct in (
        "struct llama_model_params",
        "struct llama_context_params",
        "llama_sampler_chain_params",
        "llama_batch",
        "llama_token_data",
        "llama_token_data_array",
        "llama_chat_message",
    ):
        ffi.sizeof(struct)
    return ffi, lib


_openmp_was_loaded = bool(mapped_files("libgomp.", "libomp.", "libiomp"))
ffi, C = _load()
