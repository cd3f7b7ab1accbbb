"""Contexts that another binding has made: what they are like, and what was done in them between our calls."""

from __future__ import annotations

import ctypes
import math
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from numbers import Real

import numpy as np
from xxhash import xxh3_64_intdigest

from .adapter import fingerprint
from .blob import GGML_TYPES, Layout
from .context import Context, Settings
from .errors import EngineConflictError, InvalidArgumentError
from .ffi import C, ffi, foreign_engines
from .identity import AdapterId, Rope, in_order
from .limits import head_dim
from .model import Model
from .outputs import ContextHandle
from .state import look


class Watch:
    """Finds out, before each call of ours, what the other binding has decoded in a context since the last."""

    def __init__(self) -> None:
        self._left: tuple[list[int], int] | None = None

    def catch_up(self, ctx: Context) -> None:
        """Forget every row of logits if it has decoded, and count the cells anew: never too few."""
        if self._left != (now := self._now(ctx)):
            ctx._outputs.clear()
            self._left = now
        cells = ctx._cells
        if cells is None:
            return
        cells.clear()
        for seq, end in enumerate(now[0]):
            # Where a window or a recurrent state is part of it, the engine tells the first position that all parts hold.
            plain = ctx.model.capabilities.attention_only
            begin = max(0, int(C.llama_memory_seq_pos_min(ctx._memory, seq))) if plain else 0
            cells.exact = False
            n = min(end - begin, cells.free(seq))  # shared cells are counted once a sequence
            if n > 0:
                cells.add([(seq, np.arange(end - n, end, dtype=np.int32))])

    def leave(self, ctx: Context) -> None:
        """Note how a call of ours has left it."""
        self._left = self._now(ctx)

    @staticmethod
    def _now(ctx: Context) -> tuple[list[int], int]:
        """What another's decode changes: where sequences end, or at least the first row of logits in the engine."""
        row = C.llama_get_logits(ctx._ptr)
        found = 0 if row == ffi.NULL else xxh3_64_intdigest(ffi.buffer(row, 4 * ctx.model.n_vocab))
        return [ctx._next(seq) for seq in range(ctx.n_seq_max)], found


def adopt(
    cls: type[Context],
    address: object,
    *,
    owner: object,
    model_path: str | os.PathLike[str] | None,
    rope: Rope | None,
    adapters: Mapping[str | os.PathLike[str], float],
    swa_full: bool,
) -> Context:
    """`Context.adopt`."""
    if foreign := foreign_engines():
        raise EngineConflictError(foreign)
    pointer = ffi.cast("struct llama_context *", _address(address))
    path = model_path if model_path is not None else getattr(owner, "model_path", None)
    if path is None:
        raise InvalidArgumentError("model_path should name the model's file: the owner has no model_path")
    rope = Rope() if rope is None else rope
    if not isinstance(rope, Rope) or not isinstance(adapters, Mapping):
        got = f"{type(rope).__name__} and {type(adapters).__name__}"
        raise InvalidArgumentError(f"rope should be a Rope and adapters a mapping of files to scales, are {got}")
    if not all(isinstance(scale, Real) and math.isfinite(scale) for scale in adapters.values()):
        raise InvalidArgumentError(f"an adapter's scale should be a number, got {list(adapters.values())}")
    in_force = in_order(AdapterId(fingerprint(file), float(scale)) for file, scale in adapters.items())
    weights = ffi.cast("struct llama_model *", C.llama_get_model(pointer))
    model = Model.adopt(weights, path, owner=owner)

    adopted, lock = cls.__new__(cls), model.guard.lock()
    unknown = Settings(True, "f16", "f16", True, False, (False, False), rope, None, {})
    adopted._begin(model, ContextHandle(model._handle, pointer), lock, unknown)
    held = [seq for seq in range(adopted.n_seq_max) if adopted.position(seq)]
    if not held:
        adopted.decode([0])
    layout = look(adopted, held[0] if held else 0)
    if not held:
        adopted.clear()
    model._shapes.clear()  # noted under types that were not known yet
    known = _settings(layout, model, rope)
    if swa_full and known.kv_unified:
        known = replace(known, window_cells=adopted.n_ctx)
    adopted._begin(model, ContextHandle(model._handle, pointer), lock, known)
    adopted.adapters, adopted._watch = in_force, Watch()
    return adopted


def _address(address: object) -> int:
    """What a pointer of any binding points to; that there is memory is all that can be checked of it."""
    if isinstance(address, ffi.CData):
        value = int(ffi.cast("uintptr_t", address))
    elif isinstance(address, (ctypes.c_void_p, ctypes._Pointer)):
        value = ctypes.cast(address, ctypes.c_void_p).value or 0
    elif isinstance(address, int) and not isinstance(address, bool):
        value = address
    else:
        raise InvalidArgumentError(f"address should be a pointer, is {type(address).__name__}")
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        ranges = [line.split(maxsplit=2)[:2] for line in maps]
    writable = [[int(end, 16) for end in span.split("-")] for span, mode in ranges if mode.startswith("rw")]
    if value % 8 or not any(begin <= value < end for begin, end in writable):
        raise InvalidArgumentError(f"address should be that of a llama_context, is {value:#x}, where there is none")
    return value


def _settings(layout: Layout, model: Model, rope: Rope) -> Settings:
    """A borrowed context's settings, as far as a sequence's state shows them."""
    # Of two caches one has no layers where the window is on all of them.
    found = [stream for cache in layout.caches for stream in cache if stream and stream.k]
    kind_k = GGML_TYPES[found[0].k[0].type if found else C.GGML_TYPE_F16]
    kind_v = GGML_TYPES[found[0].v[0].type] if found and found[0].v else kind_k
    transposed = bool(layout.v_transposed)
    # As llama_kv_cache decides it.
    switched_off = re.match(r"\s*[+-]?0*[1-9]", os.environ.get("LLAMA_ATTN_ROT_DISABLE", "")) is not None
    rotation = [
        kind.block > 1 and not switched_off and head_dim(model, name) % 64 == 0
        for kind, name in ((kind_k, "key_length"), (kind_v, "value_length"))
    ]
    return Settings(
        kv_unified=layout.n_stream <= 1,
        type_k=kind_k.name,
        type_v=kind_v.name,
        flash_attn=not transposed,
        v_transposed=transposed,
        rotation=(rotation[0], rotation[1]),
        rope=rope,
        window_cells=None,
        kv_memory={},
    )
