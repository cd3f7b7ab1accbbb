"""What is installed, loaded and obtained on this machine, as data (`swarmkv doctor`)."""

from __future__ import annotations

import json
import os
import platform
import resource
from contextlib import suppress
from pathlib import Path
from typing import Any

from . import cuda, elf
from .arena import Arena, available_memory
from .default_model import find_default_model
from .errors import BinaryFormatError, CudaUnavailableError, SwarmKVError
from .fatbin import Code, code_in
from .ffi import LIB_DIR, C, ffi, mapped_files, waiting_policy
from .limits import default_n_threads
from .printable import one_line
from .runtime import STAMP, LlamaGuard, backends, cuda_obstacle, devices


def examine() -> dict[str, Any]:
    """Look at engine, devices, memory and model cache; nothing is changed or downloaded."""
    info = json.loads((LIB_DIR / "build-info.json").read_text(encoding="utf-8"))
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    with Arena(8 << 20) as arena:
        stats = arena.stats()
        pinned, pin_error = arena.pinned, arena.pin_error
    try:
        model = find_default_model()
        cached = str(model) if model else None
    except SwarmKVError as error:
        cached = str(error)
    return {
        "engine": {
            "pin": f"{info['package']} {info['version']}" if info["source"] == "pin" else info["source"],
            "commit": info["commit"],
            "version": ffi.string(C.llama_version()).decode(),
            "stamp": STAMP,
            "library": ffi.string(C.skv_library_path()).decode(errors="replace"),
            "compiler": info["compiler"],
            "instruction_sets": info["instruction_sets"],
        },
        "cuda": _cuda(),
        "backends": backends(),
        "backend_files": [os.path.basename(path) for path in mapped_files("libggml-cpu", "libggml-cuda")],
        "devices": [vars(device) for device in devices()],
        "threads": {
            "default": default_n_threads(),
            "cpus": len(os.sched_getaffinity(0)),
            "waiting": waiting_policy(),
            "guard": LlamaGuard().policy,
        },
        "memory": {
            "available": available_memory(),
            "pinned": pinned,
            "pin_error": pin_error,
            "lock_limit": None if limit == resource.RLIM_INFINITY or _may_lock_all() else limit,
            "huge_pages": _huge_page_mode(),
            "huge_page_share": stats.huge_page_bytes / stats.n_bytes,
        },
        "model": cached,
        "python": platform.python_version(),
    }


def _cuda() -> dict[str, Any]:
    """The CUDA module: what is in it, the driver and its GPUs, and why it is not used."""
    module = LIB_DIR / cuda.MODULE
    built, reason = os.path.lexists(module), cuda_obstacle()
    code: Code = {}
    libraries: dict[str, Path | None] = {}
    damage = toolkit = driver = driver_error = None
    if built:
        try:
            with elf.mapped(module) as data:
                code = code_in(data)
                libraries = {name: cuda.find_library(name, LIB_DIR) for name in elf.needed(data) if "libcu" in name}
        except BinaryFormatError as error:
            damage = one_line(error, cuda.LONGEST)
        with suppress(CudaUnavailableError):
            toolkit = cuda.read_info(LIB_DIR)["toolkit"]
    try:
        driver = cuda.find_driver()
    except CudaUnavailableError as error:
        driver_error = str(error)
    return {
        "module": str(module) if built else None,
        "used": built and reason is None,
        "reason": reason,
        "architectures": [{"kind": kind, "architecture": name, "n": n} for (kind, name), n in code.items()],
        "damage": damage,
        "libraries": {name: None if path is None else str(path) for name, path in libraries.items()},
        "toolkit": toolkit,
        "driver": f"{driver.version[0]}.{driver.version[1]}" if driver else None,
        "driver_error": driver_error,
        "gpus": [
            {
                "name": gpu.name,
                "compute_capability": f"{gpu.capability[0]}.{gpu.capability[1]}",
                "runs_as": cuda.runs_as(code, gpu.capability),
            }
            for gpu in (driver.gpus if driver else ())
        ],
    }


def _may_lock_all() -> bool:
    """Whether the lock limit does not apply to this process: it has the capability CAP_IPC_LOCK (14)."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        return any(line.startswith("CapEff:") and int(line.split()[1], 16) >> 14 & 1 for line in file)


def _huge_page_mode() -> str:
    """The kernel's setting for transparent huge pages: the word in brackets."""
    try:
        with open("/sys/kernel/mm/transparent_hugepage/enabled", encoding="ascii") as file:
            return file.read().split("[")[1].split("]")[0]
    except (OSError, IndexError):
        return "not supported"
