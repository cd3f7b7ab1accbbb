"""Whether a state can go into a context: every reason against it, and every conversion on the way."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from . import state
from .blob import Layout, StateBlob, slice
from .context import Context
from .errors import InvalidArgumentError, PartialRemovalError
from .identity import Compatibility, Conversion, Reason
from .record import Bytes, Record

_OF_ATTENTION = ("type_k", "type_v", "rotation of K, V", "RoPE", "flash_attn")
"""What a state without attention caches does not depend on."""


def compare(
    known: Record, data: Bytes, ctx: Context, seq: int | None, n_tokens: int | None, allow_inexact: bool
) -> Compatibility:
    """`Snapshot.can_restore`, of a state that is in `data`."""
    layout = known.layout
    reasons, conversions = known.identity.compare(state.identity(ctx))
    if not layout.caches:  # a recurrent state knows nothing of attention
        reasons = [reason for reason in reasons if reason.field not in _OF_ATTENTION]
        conversions = [change for change in conversions if change.field not in _OF_ATTENTION]
    if not reasons:
        reasons += _layout_reasons(layout, ctx)
    rows = {len(row) for row in known.logits.values()} - {ctx.model.n_vocab}
    if rows:
        reasons.append(Reason("numbers in a row of logits", ctx.model.n_vocab, rows.pop()))
    if known.begin:
        reasons.append(Reason("first position", 0, known.begin, "append this delta to what comes before"))
    n_stream = 1 if ctx.kv_unified else ctx.n_seq_max
    if layout.caches and layout.n_stream != n_stream:
        conversions.append(Conversion("n_stream", layout.n_stream, n_stream))
    transposed = {stream.v_transposed for cache in layout.caches for stream in cache if stream}
    if transposed - {ctx.v_transposed}:
        exact = not layout.parts.has_v
        conversions.append(Conversion("v_transposed", not ctx.v_transposed, ctx.v_transposed, exact))
    if layout.whole:
        reasons += _whole_reasons(layout, ctx, seq, n_tokens)
    else:
        reasons += _sequence_reasons(layout, data, ctx, 0 if seq is None else operator.index(seq), n_tokens)
        if n_tokens is not None and n_tokens != layout.n_tokens:
            conversions.append(Conversion("n_tokens", layout.n_tokens, operator.index(n_tokens)))
    if not allow_inexact:
        hint = "equal only up to rounding: allow_inexact=True takes it"
        inexact = [c for c in conversions if not c.exact]
        if any(c.field == "flash_attn" for c in inexact):  # which is why V is laid out the other way
            inexact = [c for c in inexact if c.field != "v_transposed"]
        reasons += [Reason(c.field, c.before, c.after, hint) for c in inexact]
    return Compatibility(tuple(reasons), tuple(conversions))


def _sequence_reasons(layout: Layout, data: Bytes, ctx: Context, seq: int, n_tokens: int | None) -> list[Reason]:
    if not 0 <= seq < ctx.n_seq_max:
        return [Reason("seq", f"0 to {ctx.n_seq_max - 1}", seq)]
    positions, window = layout.positions, ctx.model.capabilities.sliding_window
    if n_tokens is not None:
        try:
            slice(StateBlob(layout, data), operator.index(n_tokens), window=window)
        except InvalidArgumentError:
            return [Reason("n_tokens", f"1 to {layout.n_tokens}", n_tokens)]
        except PartialRemovalError as error:
            return [Reason("n_tokens", layout.n_tokens, n_tokens, str(error))]
        positions = positions[positions < n_tokens]
    reasons = []
    if ctx._cells and (free := ctx._cells.free_without(seq)) < len(positions):
        reasons.append(Reason("free KV cells", f"at least {len(positions)}", free))
    for cache in layout.caches[1:]:
        held = sum(len(stream.cells) for stream in cache if stream)
        if held > window and n_tokens in (None, layout.n_tokens):
            reasons.append(Reason("cells of the sliding window", f"at most {window}", held))
    return reasons


def _whole_reasons(layout: Layout, ctx: Context, seq: int | None, n_tokens: int | None) -> list[Reason]:
    reasons: list[Reason] = []
    if seq is not None:
        reasons.append(Reason("seq", "None, for a whole context's snapshot", seq, "extract() gives one sequence"))
    if n_tokens is not None:
        reasons.append(Reason("n_tokens", "None, for a whole context's snapshot", n_tokens))
    last = max(layout.sequences)
    if last >= ctx.n_seq_max:
        reasons.append(Reason("n_seq_max", f"at least {last + 1}", ctx.n_seq_max))
    for i, cache in enumerate(layout.caches):
        cells = [stream.cells for stream in cache if stream]
        if ctx.kv_unified:
            needed = sum(map(len, cells))
        else:
            owners = np.concatenate([some.owners for some in cells]) if cells else np.empty(0, int)
            needed = int(np.bincount(owners).max(initial=0))
        room = (ctx.n_ctx if ctx.kv_unified else ctx.n_ctx_seq) if i == 0 else ctx._window_cells
        if room is None:
            reasons.append(Reason("cells of the sliding window", needed, "not known of a borrowed context"))
        elif needed > room:
            reasons.append(Reason("KV cells" if i == 0 else "cells of the sliding window", f"at least {needed}", room))
    return reasons


def _layout_reasons(layout: Layout, ctx: Context) -> list[Reason]:
    """What the engine would find in a state that is not of this kind of context, only after it has dropped another."""
    shape, parts = state.shape(ctx), state.parts(ctx)
    if layout.parts != parts:
        return [Reason("memories", layout.parts, parts)]
    reasons = shape_reasons(layout.shape, shape)
    arch = ctx.model.metadata.get("general.architecture")
    if layout.arch not in (None, arch):
        reasons.append(Reason("architecture", layout.arch, arch))
    for _, found, name in layout.bookkeeping if layout.recurrent else ():
        if name == "recurrent n_layer" and (n := int.from_bytes(found, "little")) != ctx.model.n_layer:
            reasons.append(Reason("layers of the model", n, ctx.model.n_layer))
    differ = next((ends for ends in layout.ends if ends != layout.ends[0]), None)
    if differ is not None:
        reasons.append(Reason("end of each sequence in one memory", layout.ends[0], f"{differ} in another"))
    return reasons


def shape_reasons(mine: tuple[Any, ...], theirs: tuple[Any, ...]) -> list[Reason]:
    """Where layers, types or row sizes of two states differ; what is empty fits everything."""
    reasons = []
    for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        if a is None or b is None or a == b:
            continue
        kinds = ("R", "S") if i == len(mine) - 1 else ("K", "V")
        for kind, x, y in zip(kinds, a, b, strict=True):
            if len(x) != len(y):
                reasons.append(Reason(f"layers of {kind}", len(x), len(y)))
            else:
                differ = next((layer for layer, (p, q) in enumerate(zip(x, y, strict=True)) if p != q), None)
                if differ is not None:
                    reasons.append(Reason(f"type and row size of layer {differ}'s {kind}", x[differ], y[differ]))
    return reasons
