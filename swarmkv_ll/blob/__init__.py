"""A state blob as data: look inside it as numpy arrays, cut it, convert it, append to it. Needs no engine.

    from swarmkv_ll import blob

    state = blob.parse(snapshot.array)
    state.pos, state.layers[0].k                    # views
    edit = blob.slice(state, 200)                   # nothing is copied yet
    edit.write(lease.array)                         # edit.n_bytes are needed

`Snapshot.slice`, `delta`, `append`, `convert` and `extract` do the same and give snapshots, which know what they are of.

`docs/blob.md` tells how each kind of memory writes its state.
"""

from .layout import GGML_TYPES, MAGIC, Cells, Layout, Parts, StreamLayout
from .reading import parse, read_layout
from .recast import Edit, append, convert, delta, extract, slice
from .views import Layer, Recurrent, StateBlob, Stream

__all__ = [
    "GGML_TYPES",
    "MAGIC",
    "Cells",
    "Edit",
    "Layer",
    "Layout",
    "Parts",
    "Recurrent",
    "StateBlob",
    "Stream",
    "StreamLayout",
    "append",
    "convert",
    "delta",
    "extract",
    "parse",
    "read_layout",
    "slice",
]
