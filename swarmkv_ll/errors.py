"""Every exception of the library.

All of them derive from :class:`SwarmKVError` and carry their numbers as attributes, so that a caller can
act on them without reading the message.
"""

from __future__ import annotations

import os
from collections.abc import Sequence


class SwarmKVError(Exception):
    """Base of every exception this library raises on purpose."""


# ── loading the engine ───────────────────────────────────────────────────────────────────────────────


class EngineLoadError(SwarmKVError):
    """The engine or its binding could not be loaded (library, symbol, backend folder or device missing)."""


class AbiMismatchError(EngineLoadError):
    """The engine that was loaded is not the one the binding was compiled against.

    Attributes
    ----------
    built, loaded : str
        Stamp of the engine at compile time, and of the one now in the process.
    """

    def __init__(self, built: str, loaded: str) -> None:
        self.built, self.loaded = built, loaded
        super().__init__(
            f"the binding was built for engine {built}, but {loaded} was loaded: run build_llama.sh and reinstall"
        )


class EngineConflictError(EngineLoadError):
    """Another copy of libllama or libggml is already in this process; two copies clash.

    Attributes
    ----------
    paths : tuple of str
        Files of the other copy.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = tuple(paths)
        super().__init__(
            f"another copy of the engine is already loaded in this process: {', '.join(self.paths)}; "
            "import swarmkv_ll in a process of its own"
        )


class BinaryFormatError(SwarmKVError):
    """A CUDA module, or the GPU code in it, is not as its format says.

    Attributes
    ----------
    message : str
    path : str or None
    offset : int or None
        Where in the file, in bytes.
    """

    def __init__(self, message: str, offset: int | None = None, *, path: str | None = None) -> None:
        self.message, self.offset, self.path = message, offset, path
        where = f"{path}: " if path is not None else ""
        super().__init__(where + message + (f" (at offset {offset:,})" if offset is not None else ""))


class CudaUnavailableError(EngineLoadError):
    """The CUDA module was built, but may not be loaded here; the line says why and what helps.

    Attributes
    ----------
    by_choice : bool
        The user has hidden the GPUs.
    """

    def __init__(self, message: str, *, by_choice: bool = False) -> None:
        self.by_choice = by_choice
        super().__init__(message)


# ── use of objects ───────────────────────────────────────────────────────────────────────────────────


class ClosedError(SwarmKVError):
    """An object was used after it was closed or released."""

    def __init__(self, what: str) -> None:
        self.what = what
        super().__init__(f"this {what} is closed")


class ReentrantCallError(SwarmKVError, RuntimeError):
    """A signal handler or callback called into an object that the same thread is just changing; nothing was done."""

    def __init__(self, what: str) -> None:
        self.what = what
        super().__init__(f"this {what} is in the middle of a call of this same thread")


class InvalidArgumentError(SwarmKVError, ValueError):
    """An argument is out of its range; nothing was changed."""


class LiveViewsError(SwarmKVError, BufferError):
    """Memory cannot be given back while views or leases of it are alive.

    Attributes
    ----------
    n_views, n_leases : int
        How many leases have live views, and how many leases are held.
    """

    def __init__(self, what: str, n_views: int, n_leases: int = 0) -> None:
        self.n_views, self.n_leases = n_views, n_leases
        held = f"{n_leases} lease(s) of it are held (release their snapshots)" if n_leases else ""
        views = "numpy views of it are alive (variables, also _ in a shell): del them first" if n_views else ""
        super().__init__(f"{what} cannot be given back: {' and '.join(filter(None, (held, views)))}")


class IntegrityError(SwarmKVError):
    """An object's own bookkeeping contradicts itself: a fault of this library, please report it."""


# ── memory and room ──────────────────────────────────────────────────────────────────────────────────


class ArenaExhaustedError(SwarmKVError, MemoryError):
    """No free block of the arena is large enough; nothing was taken.

    Attributes
    ----------
    requested, available, largest_free : int
        Bytes asked for (rounded up to the arena's alignment), free in all, and in the largest free block.
    """

    def __init__(self, requested: int, available: int, largest_free: int) -> None:
        self.requested, self.available, self.largest_free = requested, available, largest_free
        super().__init__(
            f"arena exhausted: {requested:,} bytes requested, {available:,} free, largest free block {largest_free:,}"
        )


class HostMemoryError(SwarmKVError, MemoryError):
    """The machine has less free memory than was asked for.

    Attributes
    ----------
    required, available : int
        Bytes.
    """

    def __init__(self, required: int, available: int) -> None:
        self.required, self.available = required, available
        super().__init__(f"{required:,} bytes of host memory requested, {available:,} available")


class DeviceMemoryError(SwarmKVError, MemoryError):
    """A device has less free memory than a snapshot on it needs; nothing was taken.

    Attributes
    ----------
    device : str
    required, available : int
        Bytes needed in one piece, and free.
    """

    def __init__(self, device: str, required: int, available: int) -> None:
        self.device, self.required, self.available = device, required, available
        super().__init__(f"{required:,} bytes in one piece needed on {device}, {available:,} free")


class ContextFullError(SwarmKVError):
    """The context has fewer free KV cells than a call needs; nothing was decoded or restored.

    Attributes
    ----------
    required, available, n_ctx : int
        KV cells needed, free, and in all, for the sequence concerned.
    """

    def __init__(self, required: int, available: int, n_ctx: int, what: str = "decode") -> None:
        self.required, self.available, self.n_ctx = required, available, n_ctx
        super().__init__(f"{what} needs {required:,} KV cells, {available:,} of {n_ctx:,} are free")


class ContextBudgetError(SwarmKVError, ValueError):
    """Prefix, branch and headroom do not fit the context.

    Attributes
    ----------
    prefix_tokens, branch_tokens, headroom, n_ctx, required : int
        Tokens; `required` is the sum of the first three.
    """

    def __init__(self, prefix_tokens: int, branch_tokens: int, headroom: int, n_ctx: int) -> None:
        self.prefix_tokens, self.branch_tokens = prefix_tokens, branch_tokens
        self.headroom, self.n_ctx = headroom, n_ctx
        self.required = prefix_tokens + branch_tokens + headroom
        super().__init__(
            f"prefix {prefix_tokens:,} + branch {branch_tokens:,} + headroom {headroom:,} = {self.required:,} tokens "
            f"do not fit a context of {n_ctx:,} ({self.required - n_ctx:,} too many)"
        )


# ── the engine at work ───────────────────────────────────────────────────────────────────────────────


class ModelLoadError(SwarmKVError):
    """The engine could not load a model file."""


class ModelUnavailableError(SwarmKVError):
    """The default model is neither in the cache nor to be had."""


class ContextCreateError(SwarmKVError):
    """The engine could not make a context with these parameters."""


class TokenizeError(SwarmKVError):
    """The engine could not tokenize, detokenize or render a chat template."""


class DecodeError(SwarmKVError):
    """The engine refused or failed to decode.

    Attributes
    ----------
    code : int
        What `llama_decode` returned.
    """

    def __init__(self, code: int, detail: str) -> None:
        self.code = code
        super().__init__(f"llama_decode returned {code}: {detail}")


class PartialRemovalError(SwarmKVError):
    """Part of a sequence cannot be removed because the memory keeps no way back; the sequence is as it was.

    Recurrent and hybrid models keep one state for the whole sequence; a sliding window forgets what left it.
    Restore a snapshot instead.
    """


class NoLogitsError(SwarmKVError):
    """Logits were asked for that no decode or restore has produced."""


class SnapshotError(SwarmKVError):
    """The engine could not export or restore a sequence's state."""


class NotOnDeviceError(SwarmKVError, AttributeError):
    """A snapshot on the device was asked for what needs its bytes in host memory.

    Attributes
    ----------
    name : str
        What was asked for: "fork", "save", …
    """

    def __init__(self, name: str) -> None:
        super().__init__(
            f"a snapshot on the device has no {name}: its bytes stay there; ctx.snapshot(arena) takes one into host memory",
            name=name,
        )


class SnapshotCorruptError(SnapshotError):
    """A snapshot's bookkeeping bytes are not what the engine wrote; it was not restored.

    Attributes
    ----------
    offset : int
        First byte that differs, from the start of the blob.
    field : str
        What stands there.
    """

    def __init__(self, offset: int, field: str) -> None:
        self.offset, self.field = offset, field
        super().__init__(f"snapshot damaged at byte {offset:,} ({field}); not restored")


class BlobError(SwarmKVError):
    """A state blob does not have the layout it should have.

    Attributes
    ----------
    offset : int
        Byte at which it goes wrong.
    field : str
        Name of the field there.
    expected, actual : object
        What should stand there, and what does.
    """

    def __init__(self, offset: int, field: str, expected: object, actual: object) -> None:
        self.offset, self.field, self.expected, self.actual = offset, field, expected, actual
        super().__init__(f"state blob, byte {offset:,}: {field} should be {expected}, is {actual}")


class IncompatibleSnapshotError(SnapshotError):
    """A snapshot cannot be restored into this context; the context is as it was.

    Attributes
    ----------
    reasons : tuple of Reason
        Every reason, each with `field`, `expected` (the snapshot's) and `actual` (the context's).
    """

    def __init__(self, reasons: Sequence[object]) -> None:
        self.reasons = tuple(reasons)
        super().__init__("cannot restore: " + "; ".join(str(reason) for reason in self.reasons))


# ── snapshot files ───────────────────────────────────────────────────────────────────────────────────


class SnapshotFileError(SnapshotError):
    """A `.skv` file or stream is not what it should be: foreign, newer, cut short or damaged.

    Attributes
    ----------
    path : str or None
        The file; None for a stream.
    offset : int
        Byte at which it goes wrong, from the beginning of the snapshot.
    field : str
        Name of the field or section there.
    expected, actual : object
        What should stand there, and what does.
    """

    def __init__(
        self, path: str | None, offset: int, field: str, expected: object, actual: object, hint: str | None = None
    ) -> None:
        self.path, self.offset, self.field, self.expected, self.actual = path, offset, field, expected, actual
        super().__init__(
            f"{path or 'snapshot stream'}, byte {offset:,}: {field} should be {expected}, is {actual}"
            + (f" ({hint})" if hint else "")
        )


class EndOfStreamError(SnapshotFileError, EOFError):
    """A stream ended where another snapshot could have begun; nothing was read."""


class DiskFullError(SwarmKVError, OSError):
    """There is no room for a file, or its size is not allowed; what stood there before is as it was.

    Attributes
    ----------
    errno : int
        `ENOSPC`, `EDQUOT` (a quota) or `EFBIG` (a limit on the size of one file).
    required, available : int or None
        Bytes to write in all, and free on that file system for ordinary users; None if not known.
    filename : str or None
        The file that was to be written.
    """

    def __init__(self, code: int, required: int | None, available: int | None, path: str | None = None) -> None:
        self.required, self.available = required, available
        text = os.strerror(code)
        if required is not None:
            text += f", {required:,} bytes to write"
        if available is not None:
            text += f", {available:,} free"
        super().__init__(code, text, *([] if path is None else [path]))


# ── pipelines ────────────────────────────────────────────────────────────────────────────────────────


class PipelineError(SwarmKVError, ValueError):
    """A pipeline cannot run as it is written. Found before a context or a buffer is made.

    Attributes
    ----------
    problems : tuple of SwarmKVError
        All that is wrong, not only the first.
    """

    def __init__(self, message: str, problems: Sequence[SwarmKVError] = ()) -> None:
        self.problems: tuple[SwarmKVError, ...] = tuple(problems) or (self,)
        super().__init__(message)

    @classmethod
    def of(cls, problems: Sequence[SwarmKVError]) -> PipelineError:
        """One error for all of them; a single one that is a `PipelineError` is itself the error."""
        if len(problems) == 1 and isinstance(problems[0], PipelineError):
            return problems[0]
        listed = "; ".join(f"({i}) {problem}" for i, problem in enumerate(problems, start=1))
        return PipelineError(f"{len(problems)} problems: {listed}" if len(problems) > 1 else str(problems[0]), problems)


class CycleError(PipelineError):
    """Nodes wait for each other.

    Attributes
    ----------
    edge : (str, str)
        The edge that closes the cycle: a node, and what it depends on.
    cycle : tuple of str
        The whole cycle, from a node over what each depends on back to that node.
    """

    def __init__(self, cycle: Sequence[str]) -> None:
        self.cycle = tuple(cycle)
        self.edge = (self.cycle[-2], self.cycle[-1])
        shown = [*self.cycle[:6], "…", *self.cycle[-6:]] if len(self.cycle) > 16 else self.cycle
        how = "depends on itself" if len(self.cycle) == 2 else f"closes the cycle {' → '.join(shown)}"
        super().__init__(f"node {self.edge[0]!r}, which depends on {self.edge[1]!r}, {how}")


class UnknownNodeError(PipelineError):
    """A node depends on one that is not there.

    Attributes
    ----------
    node, missing : str
    """

    def __init__(self, node: str, missing: str, hint: str | None = None) -> None:
        self.node, self.missing = node, missing
        super().__init__(
            f"node {node!r} depends on {missing!r}, which is not there" + (f" ({hint!r} is)" if hint else "")
        )


class DuplicateNodeError(PipelineError):
    """Two nodes have one name, or a node names a dependency twice.

    Attributes
    ----------
    node : str
    """

    def __init__(self, node: str, message: str | None = None) -> None:
        self.node = node
        super().__init__(message or f"two nodes are named {node!r}")


class NodeError(PipelineError):
    """A node cannot run as it is written.

    Attributes
    ----------
    node : str
    key : str
        Which of its parameters is at fault.
    cause : SwarmKVError or None
        The error with the numbers (`ContextBudgetError`), where there is one.
    """

    def __init__(self, node: str, key: str, message: str, cause: SwarmKVError | None = None) -> None:
        self.node, self.key, self.cause = node, key, cause
        super().__init__(f"node {node!r}: {message}")


class PipelineFileError(PipelineError):
    """A pipeline file is not TOML, or not as its schema says.

    Attributes
    ----------
    path : str
    line : int or None
    key : str or None
        Dotted path of the key at fault, such as ``agents.audit.depends_on``.
    """

    def __init__(self, path: str, line: int | None, key: str | None, message: str) -> None:
        self.path, self.line, self.key = path, line, key
        where = path if line is None else f"{path}, line {line}"
        super().__init__(f"{where}: {key}: {message}" if key else f"{where}: {message}")


class UpstreamError(SwarmKVError):
    """A node did not run, because one that it depends on failed.

    Attributes
    ----------
    node : str
        The node whose failure began it.
    cause : BaseException
        What it raised.
    """

    def __init__(self, node: str, cause: BaseException) -> None:
        self.node, self.cause = node, cause
        try:
            told = str(cause)
        except Exception:  # an exception of the caller's need not know how to tell itself
            told = "?"
        super().__init__(f"node {node!r} failed: {type(cause).__name__}: {told}")


class NodeTimeoutError(SwarmKVError, TimeoutError):
    """A node took longer than its time limit.

    Attributes
    ----------
    node : str
    time_limit : float
        Seconds.
    """

    def __init__(self, node: str, time_limit: float) -> None:
        self.node, self.time_limit = node, time_limit
        super().__init__(f"node {node!r} took longer than its time limit of {time_limit:g} s")


class NodeCancelledError(SwarmKVError):
    """A node was cancelled before it was done.

    Attributes
    ----------
    node : str
    """

    def __init__(self, node: str) -> None:
        self.node = node
        super().__init__(f"node {node!r} was cancelled")


class CampaignError(SwarmKVError):
    """A benchmark campaign cannot begin or go on: its folder, its files or its settings."""


class PeerError(CampaignError):
    """A peer is not there, did not start, or did not do what it was asked for; the message quotes what it said last."""
