"""The engine as a process-wide thing: started once, its devices, its log, and who may call it when."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from . import cuda
from .errors import CudaUnavailableError, EngineLoadError, InvalidArgumentError
from .ffi import LIB_DIR, C, ffi

logger = logging.getLogger("swarmkv_ll.llama")
"""Receives the engine's own log. Silent until the application configures logging."""
logger.addHandler(logging.NullHandler())

STAMP: str = ffi.string(C.skv_loaded_stamp()).decode()
"""Which engine this is: its pin and flags, then the library's build id."""

_LEVELS = {
    C.GGML_LOG_LEVEL_DEBUG: logging.DEBUG,
    C.GGML_LOG_LEVEL_INFO: logging.INFO,
    C.GGML_LOG_LEVEL_WARN: logging.WARNING,
    C.GGML_LOG_LEVEL_ERROR: logging.ERROR,
}


@contextlib.contextmanager
def engine_log() -> Iterator[list[str]]:
    """Around an engine call: hand its log on to `logger`, and collect this thread's lines to say why it failed.

    The list is filled when the block ends.
    """
    lines: list[str] = []
    C.skv_begin_log(logger.isEnabledFor(logging.DEBUG))
    try:
        yield lines
    finally:
        out = ffi.new("char[1024]")
        while level := C.skv_take_log(out, len(out)):
            line = ffi.string(out).decode(errors="replace").rstrip()
            lines.append(line)
            logger.log(_LEVELS.get(level, logging.INFO), "%s", line)
        C.skv_end_log()


def last_reason(lines: list[str], default: str) -> str:
    """The engine's last log line, without the function name it begins with."""
    return lines[-1].split(": ", 1)[-1] if lines else default


# ── start and devices ────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Device:
    """A device of the engine: its name, description, kind, and memory in bytes."""

    name: str
    description: str
    kind: Literal["cpu", "gpu", "igpu", "accel", "other"]
    memory_free: int
    memory_total: int


_forked = False


def _after_fork() -> None:
    global _forked
    _forked = _started


os.register_at_fork(after_in_child=_after_fork)


def check_process() -> None:
    """Refuse a process that was forked after the engine was started: its threads exist in the parent only.

    Raises
    ------
    EngineLoadError
    """
    if _forked:
        raise EngineLoadError("the engine was started before this process was forked; start it in the child (spawn)")


_KINDS: dict[int, Literal["cpu", "gpu", "igpu", "accel", "other"]] = {
    C.GGML_BACKEND_DEVICE_TYPE_CPU: "cpu",
    C.GGML_BACKEND_DEVICE_TYPE_GPU: "gpu",
    C.GGML_BACKEND_DEVICE_TYPE_IGPU: "igpu",
    C.GGML_BACKEND_DEVICE_TYPE_ACCEL: "accel",
}
_start_lock = threading.Lock()
_started = False
_cuda_obstacle: CudaUnavailableError | None = None


def start() -> None:
    """Load the backends beside the engine and initialise it; once a process, called by all that need it.

    A CUDA module that may not be loaded here is one warning of the logger `swarmkv_ll`; the CPU goes on.

    Raises
    ------
    EngineLoadError
        The backend folder holds no usable CPU backend. (A release build of ggml says nothing itself.)
    """
    global _started, _cuda_obstacle
    check_process()
    with _start_lock:
        if _started:
            return
        C.skv_route_log()
        _cuda_obstacle = _load_cuda()
        _load_others()
        if C.ggml_backend_dev_by_type(C.GGML_BACKEND_DEVICE_TYPE_CPU) == ffi.NULL:
            found = sorted(path.name for path in LIB_DIR.glob("libggml-cpu*.so"))
            raise EngineLoadError(
                f"no CPU device: none of the backends in {LIB_DIR} could be loaded "
                f"({', '.join(found) if found else 'there are none'}); run build_llama.sh on this machine"
            )
        C.llama_backend_init()
        _started = True
    if _cuda_obstacle is not None:  # told without the lock: handlers are the application's
        level = logging.INFO if _cuda_obstacle.by_choice else logging.WARNING
        logging.getLogger("swarmkv_ll").log(level, "CUDA is not used, the CPU is: %s", _cuda_obstacle)


def _load_cuda() -> CudaUnavailableError | None:
    """Load the CUDA module, where there is one and nothing is against it; what is."""
    try:
        # The stamp that was carried into ggml at its build, without the build id that ours has behind it.
        module = cuda.prepare(LIB_DIR, STAMP.split("/", maxsplit=1)[0])
        if module is None:
            return None
        with engine_log() as lines:
            backend = C.ggml_backend_load(os.fsencode(module))
        why = last_reason([line for line in lines if "loaded CUDA backend" not in line], "it gave no reason")
        if backend == ffi.NULL:
            raise CudaUnavailableError(f"the engine could not load {module}: {why}")
        if C.ggml_backend_reg_dev_count(backend) == 0:
            raise CudaUnavailableError(f"the CUDA module found no GPU: {why}")
    except CudaUnavailableError as error:
        error.__cause__ = error.__context__ = None  # kept for good: its frames would keep the caller's model alive
        return error.with_traceback(None)
    return None


def _load_others() -> None:
    """Load the CPU backend, of several variants the one that scores best here, and the user's own backend.

    The engine's `ggml_backend_load_all_from_path` would do the same, and load the CUDA module unasked.
    """
    scores = {path: C.skv_backend_score(os.fsencode(path)) for path in sorted(LIB_DIR.glob("libggml-cpu-*.so"))}
    best = max(scores, key=scores.__getitem__, default=None)
    cpu = best if best is not None and scores[best] > 0 else LIB_DIR / "libggml-cpu.so"
    with engine_log():
        C.ggml_backend_load(os.fsencode(cpu))
        if own := os.environ.get("GGML_BACKEND_PATH"):
            C.ggml_backend_load(os.fsencode(own))


def cuda_obstacle() -> str | None:
    """Why the CUDA module is not used; None where it is, or where none was built."""
    start()
    return None if _cuda_obstacle is None else str(_cuda_obstacle)


def _text(pointer: Any) -> str:
    return "" if pointer == ffi.NULL else str(ffi.string(pointer).decode(errors="replace"))


def backends() -> list[str]:
    """Names of the backends that were loaded."""
    start()
    return [_text(C.ggml_backend_reg_name(C.ggml_backend_reg_get(i))) for i in range(C.ggml_backend_reg_count())]


def devices() -> list[Device]:
    """The engine's devices, in its order."""
    start()
    free, total = ffi.new("size_t *"), ffi.new("size_t *")
    found = []
    for i in range(C.ggml_backend_dev_count()):
        device = C.ggml_backend_dev_get(i)
        C.ggml_backend_dev_memory(device, free, total)
        kind = _KINDS.get(C.ggml_backend_dev_type(device), "other")
        found.append(
            Device(
                _text(C.ggml_backend_dev_name(device)),
                _text(C.ggml_backend_dev_description(device)).strip(),
                kind,
                free[0],
                total[0],
            )
        )
    return found


def gpu_device() -> Any | None:
    """The first GPU as a `ggml_backend_dev_t`, or None."""
    start()
    device = C.ggml_backend_dev_by_type(C.GGML_BACKEND_DEVICE_TYPE_GPU)
    return None if device == ffi.NULL else device


# ── who may call the engine ──────────────────────────────────────────────────────────────────────────

_global_lock = threading.RLock()
_locks: weakref.WeakSet[Any] = weakref.WeakSet([_global_lock])


def _stop() -> None:
    """At exit: stop decodes of daemon threads and keep them out, before the libraries they run in are torn down."""
    C.skv_stop_all()
    for lock in list(_locks):
        lock.acquire(timeout=5)


atexit.register(_stop)


class LlamaGuard:
    """Serialises engine calls. Which calls wait for each other is a policy, not a fact of the library.

    Parameters
    ----------
    policy : {"global", "context"}, optional
        ``"global"``: one lock for every context of the process. Safe everywhere, and the default with a GPU, whose
        contexts share one device, its streams and its memory pools.
        ``"context"``: a lock a context. The default on the CPU, where separate contexts share nothing but read-only
        weights, so that their decodes may run at the same time. One context is never entered twice at once: the
        engine keeps a batch's scratch memory in it.

    Notes
    -----
    The locks are re-entrant: a callback that runs inside an engine call may use the same context's cheap queries.
    """

    def __init__(self, policy: Literal["global", "context"] | None = None) -> None:
        if policy is None:
            policy = "context" if gpu_device() is None else "global"
        if policy not in ("global", "context"):
            raise InvalidArgumentError(f'policy should be "global" or "context", is {policy!r}')
        self.policy = policy

    def lock(self) -> Any:
        """The re-entrant lock that a new context is to hold while it is inside the engine."""
        if self.policy == "global":
            return _global_lock
        lock = threading.RLock()
        _locks.add(lock)
        return lock
