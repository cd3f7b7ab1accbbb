"""The engine as a process-wide thing: started once, its devices, its log, and who may call it when."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import traceback
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from . import cuda, elf
from .errors import CudaUnavailableError, EngineLoadError, InvalidArgumentError
from .ffi import LIB_DIR, C, ffi
from .printable import one_line

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
    records: list[_Record] = []
    try:
        with _collect(records, logger.isEnabledFor(logging.DEBUG)):
            yield lines
    finally:
        lines += [line for _, _, line in records]
        _tell(records)


_Record = tuple[logging.Logger, int, str]


@contextlib.contextmanager
def _collect(records: list[_Record], debug: bool) -> Iterator[None]:
    """Around an engine call: this thread's lines of its log are added when the block ends, and nobody is told."""
    C.skv_begin_log(debug)
    try:
        yield
    finally:
        try:
            out = ffi.new("char[1024]")
            while level := C.skv_take_log(out, len(out)):
                line = ffi.string(out).decode(errors="replace").rstrip()
                records.append((logger, _LEVELS.get(level, logging.INFO), line))
        finally:
            C.skv_end_log()


def _tell(records: list[_Record]) -> None:
    """Hand records to the application's handlers: without a lock that they could need, when everything is in order.

    An error of a handler is shown as `logging` shows those that a handler notes itself, and goes no further: the
    engine's call has succeeded, and what it made would be lost.
    """
    for to, level, line in records:
        try:
            to.log(level, "%s", line)
        except RecursionError:  # as in logging's own handlers: one that asks for what is logged would never end
            raise
        except Exception:
            if logging.raiseExceptions and sys.stderr:
                with contextlib.suppress(OSError, ValueError):  # it may be closed
                    traceback.print_exc()


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
    _forked = _started or _start_lock.locked()


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

    A CUDA module that may not be loaded here is one warning of the logger `swarmkv_ll`; the CPU goes on. So is a
    backend in `GGML_BACKEND_PATH` that cannot be loaded.

    Raises
    ------
    EngineLoadError
        The backend folder holds no usable CPU backend. (A release build of ggml says nothing itself.)
    """
    check_process()
    records: list[_Record] = []
    debug = logger.isEnabledFor(logging.DEBUG)  # may wait for logging's own lock
    try:
        with _start_lock:
            if not _started:
                _start(records, debug)
    finally:
        _tell(records)


def _start(records: list[_Record], debug: bool) -> None:
    """Start the engine; what is to be told of it is added to the records."""
    global _started, _cuda_obstacle
    ours = logging.getLogger("swarmkv_ll")
    C.skv_route_log()
    _cuda_obstacle = _load_cuda(records, debug)
    _load_cpu(records, debug)
    own = os.environ.get("GGML_BACKEND_PATH")
    if own and (why := _load_own(own, records, debug)):
        records.append((ours, logging.WARNING, one_line(f"GGML_BACKEND_PATH={own} is not used: {why}", cuda.LONGEST)))
    if C.ggml_backend_dev_by_type(C.GGML_BACKEND_DEVICE_TYPE_CPU) == ffi.NULL:
        found = sorted(path.name for path in LIB_DIR.glob("libggml-cpu*.so"))
        raise EngineLoadError(
            f"no CPU device: none of the backends in {LIB_DIR} could be loaded "
            f"({', '.join(found) if found else 'there are none'}); run build_llama.sh on this machine"
        )
    C.llama_backend_init()
    _started = True
    if _cuda_obstacle is not None:
        level = logging.INFO if _cuda_obstacle.by_choice else logging.WARNING
        records.append((ours, level, f"CUDA is not used, the CPU is: {_cuda_obstacle}"))


def _load_cuda(records: list[_Record], debug: bool) -> CudaUnavailableError | None:
    """Load the CUDA module, where there is one and nothing is against it; what is."""
    try:
        # The stamp that was carried into ggml at its build, without the build id that ours has behind it.
        module = cuda.prepare(LIB_DIR, STAMP.split("/", maxsplit=1)[0])
        if module is None:
            return None
        backend, why = _load(module, records, debug)
        if backend == ffi.NULL:
            raise cuda.refusal(f"the engine could not load {module}: {why}")
        if C.ggml_backend_reg_dev_count(backend) == 0:
            raise cuda.refusal(f"the CUDA module found no GPU: {why}")
    except CudaUnavailableError as error:
        error.__cause__ = error.__context__ = None  # kept for good: its frames would keep the caller's model alive
        return error.with_traceback(None)
    return None


def _load(path: str | os.PathLike[str], records: list[_Record], debug: bool) -> tuple[Any, str]:
    """Load a backend: its registration or NULL, and what the engine said last."""
    said: list[_Record] = []
    try:
        with _collect(said, debug):
            backend = C.ggml_backend_load(os.fsencode(path))
    finally:
        records += said
    lines = [line for _, _, line in said if not line.startswith("load_backend: loaded ")]
    return backend, last_reason(lines, "it gave no reason")


def _load_cpu(records: list[_Record], debug: bool) -> None:
    """Load the CPU backend, of several variants the one that scores best here.

    The engine's `ggml_backend_load_all_from_path` would do the same, and load the CUDA module unasked.
    """
    paths = (path for path in sorted(LIB_DIR.glob("libggml-cpu-*.so")) if path.is_file())
    scores = {path: C.skv_backend_score(os.fsencode(path)) for path in paths}
    best = max(scores, key=scores.__getitem__, default=None)
    cpu = best if best is not None and scores[best] > 0 else LIB_DIR / "libggml-cpu.so"
    if not elf.obstacle(cpu):
        _load(cpu, records, debug)


def _load_own(own: str, records: list[_Record], debug: bool) -> str | None:
    """Load the user's own backend (`GGML_BACKEND_PATH`, as the engine has it); why not."""
    if "/" in own and (why := elf.obstacle(own)):  # without a slash the loader looks for it in its folders
        return why
    names_it = own == cuda.MODULE or os.path.realpath(own) == os.path.realpath(LIB_DIR / cuda.MODULE)
    if names_it and _cuda_obstacle is not None:
        return "it is the CUDA module, which may not be loaded here"
    backend, why = _load(own, records, debug)
    return why if backend == ffi.NULL else None


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
