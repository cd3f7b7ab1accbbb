"""cffi builder of `swarmkv_ll._llama`, in API mode, against the engine that `build_llama.sh` put into `_lib`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import cffi

HERE = Path(__file__).resolve().parent
LIB = HERE.parent / "_lib"

info = json.loads((LIB / "build-info.json").read_text(encoding="utf-8"))
stamp = f"{info['stamp']}/{info['build_ids']['libllama.so'][:16]}"


def from_here(folder: Path) -> str:
    """`folder` relative to the current one, so that no path of the building machine gets into the module."""
    return os.path.relpath(folder)


ffibuilder = cffi.FFI()
ffibuilder.cdef((HERE / "cdef.h").read_text(encoding="utf-8"))
ffibuilder.set_source(
    "swarmkv_ll._llama",
    (HERE / "shim.c").read_text(encoding="utf-8"),
    include_dirs=[from_here(LIB / "include")],
    library_dirs=[from_here(LIB)],
    libraries=["llama", "ggml", "ggml-base"],
    # RPATH, not RUNPATH: LD_LIBRARY_PATH must not put another engine in ours' place.
    extra_link_args=["-Wl,-rpath,$ORIGIN/_lib", "-Wl,--disable-new-dtags"],
    define_macros=[("_GNU_SOURCE", "1"), ("SKV_BUILT_STAMP", f'"{stamp}"')],
)

if __name__ == "__main__":
    ffibuilder.compile(tmpdir=str(HERE.parent.parent), verbose=True)
