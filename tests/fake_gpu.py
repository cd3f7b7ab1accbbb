"""The GPU of fake_gpu.cpp, from Python: compiled against the engine's headers, loaded, and asked what was called."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import NamedTuple

PINS, GIVES_ORDINARY, FAILS = range(3)
"""What its host memory does: be page-locked, be ordinary memory as CUDA's where it can lock no more, or not be had."""


class Call(NamedTuple):
    """One call into the device: what, and the host memory it reads or writes (address and size, 0 where none)."""

    what: str
    host: int
    n_bytes: int

    def within(self, address: int, n_bytes: int) -> bool:
        return address <= self.host and self.host + self.n_bytes <= address + n_bytes


def find_header(lib: Path, folder: Path) -> Path | None:
    """A folder with the engine's `ggml-backend-impl.h`, which no build installs: from the unpacked source, or its package.

    A build that was taken from the cache has left no unpacked source, and another machine's no package.
    """
    name = "ggml/src/ggml-backend-impl.h"
    unpacked = lib.parent.parent / "vendor/llama.cpp" / name
    if unpacked.exists():
        return unpacked.parent
    info = json.loads((lib / "build-info.json").read_text())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "swarmkv-ll/downloads"
    for archive in cache.glob(f"*{info.get('version', '')}.tar.gz"):
        with tarfile.open(archive) as package:
            for member in package:
                source = package.extractfile(member) if member.name.endswith(f"vendor/llama.cpp/{name}") else None
                if source:
                    (folder / Path(name).name).write_bytes(source.read())
                    return folder
    return None


def build(folder: Path) -> Path | str:
    """Compile the module into a folder; why it cannot be done, where it cannot."""
    from swarmkv_ll.ffi import LIB_DIR

    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        return "no C++ compiler"
    header = find_header(LIB_DIR, folder)
    if header is None:
        return "neither the engine's unpacked source nor its package is here"
    target = folder / "fake_gpu.so"
    subprocess.run(
        [
            *(compiler, "-std=c++17", "-O1", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-pthread"),
            *(f"-I{LIB_DIR / 'include'}", f"-I{header}", "-o", target, Path(__file__).with_suffix(".cpp")),
            *(f"-L{LIB_DIR}", "-lggml", "-lggml-base", f"-Wl,-rpath,{LIB_DIR}"),
        ],
        check=True,
    )
    return target


class FakeGpu:
    """The device, loaded into this process's engine before that starts."""

    def __init__(self, module: str) -> None:
        from swarmkv_ll.ffi import C, ffi

        assert C.ggml_backend_load(module.encode()) != ffi.NULL
        self.lib = ctypes.CDLL(module)
        self.lib.fake_call.restype = ctypes.c_char_p
        self.lib.fake_n_calls.restype = self.lib.fake_memory_used.restype = ctypes.c_uint64
        self.lib.fake_memory.argtypes = [ctypes.c_uint64]
        self.lib.fake_note.argtypes = [ctypes.c_char_p, ctypes.c_uint64, ctypes.c_uint64]
        self._notes: list[bytes] = []

    def calls(self) -> list[Call]:
        """All since the last `forget`."""
        host, n_bytes = ctypes.c_uint64(), ctypes.c_uint64()
        found = []
        for i in range(self.lib.fake_n_calls()):
            what = self.lib.fake_call(ctypes.c_uint64(i), ctypes.byref(host), ctypes.byref(n_bytes))
            found.append(Call(what.decode(), host.value, n_bytes.value))
        return found

    def forget(self) -> None:
        self.lib.fake_forget_calls()

    def note(self, what: str, host: int = 0, n_bytes: int = 0) -> None:
        """Put a line of our own among the calls."""
        self._notes.append(what.encode())
        self.lib.fake_note(self._notes[-1], host, n_bytes)

    def pinning(self, mode: int) -> None:
        self.lib.fake_pinning(mode)

    def memory(self, n_bytes: int) -> None:
        """Give the device so much memory in all; at first it has a GiB."""
        self.lib.fake_memory(n_bytes)

    def used(self) -> int:
        return int(self.lib.fake_memory_used())

    def delay(self, microseconds: int) -> None:
        """How long work waits before it is done."""
        self.lib.fake_delay(microseconds)

    def pending(self) -> int:
        """Pieces of work that were given and are not done."""
        return int(self.lib.fake_pending())


def out_of_order(calls: list[Call], address: int, n_bytes: int) -> list[str]:
    """What is wrong with how a piece of host memory was used, among calls that end with its "release".

    Bytes go to or come from the device only when all work given before is done, and between the last of them and the
    release the device has been waited for.
    """
    wrong, moved, computing = [], False, False
    for call in calls:
        if call.what == "compute":
            computing = True
        elif call.what.startswith("synchronize"):
            moved = computing = False
        elif call.what in ("get", "set", "get async", "set async") and call.within(address, n_bytes):
            wrong += [f"{call.what} while the device computes"] * computing
            moved = True
        elif call.what == "release" and call.host == address:
            wrong += ["released before the device was waited for"] * moved
    return wrong
