"""A model file: its weights, its vocabulary, what its memory can do, and what identifies it."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from . import runtime
from .blob import Parts
from .cache import cache_dir, write_atomically
from .errors import ClosedError, InvalidArgumentError, ModelLoadError, TokenizeError
from .ffi import C, ffi

if TYPE_CHECKING:
    from .context import Context

Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Capabilities:
    """What a model's memory is, and so what can be done with a snapshot of it.

    Attributes
    ----------
    recurrent : bool
        One state for the whole sequence (Mamba, RWKV); no part of a sequence can be removed.
    hybrid : bool
        Attention and recurrent layers side by side; as little can be removed.
    sliding_window : int
        Tokens the windowed layers look back, 0 if there are none.
    cell_extensions : bool
        KV cells carry more than a position (M-RoPE).
    """

    recurrent: bool
    hybrid: bool
    sliding_window: int
    cell_extensions: bool

    @property
    def attention_only(self) -> bool:
        """A plain KV cache: any tail of a sequence can be removed at any time."""
        return not (self.recurrent or self.hybrid or self.sliding_window)

    @property
    def blob_parts(self) -> Parts:
        """What a state blob of this model is made of."""
        n_attention = 0 if self.recurrent and not self.hybrid else 2 if self.sliding_window else 1
        return Parts(n_attention, self.recurrent or self.hybrid, self.cell_extensions)


class Model:
    """A GGUF model, loaded by the engine.

    Parameters
    ----------
    path : path-like
        The GGUF file; of a split model, its first part.
    n_gpu_layers : int
        Layers to keep on the GPU; -1 for all. Without a GPU it has no effect.
    on_progress : callable, optional
        Called with the loaded share, 0.0 to 1.0. What it raises stops the loading and is raised from here.
    guard : LlamaGuard, optional
        Who may call the engine when; by default `LlamaGuard()`.

    Raises
    ------
    ModelLoadError
        No such file, not a GGUF, damaged, or of an architecture the engine does not know.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        n_gpu_layers: int = -1,
        on_progress: Callable[[float], None] | None = None,
        guard: runtime.LlamaGuard | None = None,
    ) -> None:
        runtime.start()
        self.file = ModelFile(path)
        self.path = self.file.path
        self.guard = guard or runtime.LlamaGuard()

        params = C.llama_model_default_params()
        params.n_gpu_layers = n_gpu_layers
        progress = _Progress(on_progress)
        handle = ffi.new_handle(progress)
        params.progress_callback = C.skv_on_progress
        params.progress_callback_user_data = handle
        with runtime.engine_log() as log:
            pointer = C.llama_model_load_from_file(os.fsencode(self.path), params)
        if progress.error:
            if pointer != ffi.NULL:
                C.llama_model_free(pointer)
            raise progress.error
        if pointer == ffi.NULL:
            raise ModelLoadError(f"{self.path}: {_why(log)}")
        self._owned: ModelHandle | None = ModelHandle(pointer)
        self._vocab = C.llama_model_get_vocab(pointer)

        self.n_vocab = int(C.llama_vocab_n_tokens(self._vocab))
        self.n_ctx_train = int(C.llama_model_n_ctx_train(pointer))
        self.n_layer = int(C.llama_model_n_layer(pointer))
        self.n_embd = int(C.llama_model_n_embd(pointer))
        self.n_head = int(C.llama_model_n_head(pointer))
        self.n_head_kv = int(C.llama_model_n_head_kv(pointer))
        self.capabilities = Capabilities(
            recurrent=bool(C.llama_model_is_recurrent(pointer)),
            hybrid=bool(C.llama_model_is_hybrid(pointer)),
            sliding_window=int(C.llama_model_n_swa(pointer)),
            cell_extensions=C.llama_model_rope_type(pointer) in (C.LLAMA_ROPE_TYPE_MROPE, C.LLAMA_ROPE_TYPE_IMROPE),
        )
        self.decodes = bool(C.llama_model_has_decoder(pointer)) and not C.llama_model_has_encoder(pointer)

    # ── text and tokens ──────────────────────────────────────────────────────────────────────────────

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> Tokens:
        """Text to tokens.

        Parameters
        ----------
        add_special : bool
            Add the tokens the model wants around a text (BOS, EOS). Right for a document, wrong for a branch that
            goes on in it.
        parse_special : bool
            Read ``<|…|>`` as control tokens instead of plain text. Wrong for text from outside.

        Returns
        -------
        ndarray of int32, shape (n_tokens,)
        """
        data = _utf8(text)
        room = len(data) + 16
        out = np.empty(room, np.int32)
        n = C.llama_tokenize(
            self._live_vocab, data, len(data), ffi.from_buffer("llama_token[]", out), room, add_special, parse_special
        )
        if n < 0:  # cannot happen: no token is shorter than a byte
            raise TokenizeError(f"the engine could not tokenize {len(data)} bytes (returned {n})")
        tokens: Tokens = out[:n].copy()
        return tokens

    def detokenize(self, tokens: npt.ArrayLike, *, remove_special: bool = False, unparse_special: bool = True) -> str:
        """Tokens to text; bytes that are not UTF-8 become U+FFFD.

        Parameters
        ----------
        remove_special : bool
            Leave out BOS and EOS where the model adds them.
        unparse_special : bool
            Render control tokens as text instead of as nothing.
        """
        ids = self.check_tokens(tokens)
        room = 16 + 8 * len(ids)
        while True:
            out = ffi.new("char[]", room)
            n = C.llama_detokenize(
                self._live_vocab,
                ffi.from_buffer("llama_token[]", ids),
                len(ids),
                out,
                room,
                remove_special,
                unparse_special,
            )
            if n >= 0:
                return bytes(ffi.buffer(out, n)).decode(errors="replace")
            room = -n

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes of one token; may be part of a UTF-8 character."""
        (checked,) = self.check_tokens([token])
        room = 64
        while True:
            out = ffi.new("char[]", room)
            n = C.llama_token_to_piece(self._live_vocab, int(checked), out, room, 0, special)
            if n >= 0:
                return bytes(ffi.buffer(out, n))
            room = -n

    def is_end(self, token: int) -> bool:
        """Whether a token ends a generation (EOS, end of turn, …)."""
        (checked,) = self.check_tokens([token])
        return bool(C.llama_vocab_is_eog(self._live_vocab, int(checked)))

    def check_tokens(self, tokens: npt.ArrayLike) -> Tokens:
        """`tokens` as a contiguous int32 array of shape (n,), each a token of this model; copied only if need be.

        Raises
        ------
        InvalidArgumentError
            Not integers, not one-dimensional, or out of range.
        """
        array = np.asarray(tokens)
        if array.size == 0:
            array = array.astype(np.int32)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise InvalidArgumentError(f"tokens should be integers of shape (n,), are {array.dtype} {array.shape}")
        if array.size and (array.min() < 0 or array.max() >= self.n_vocab):
            at = int(np.argmax((array < 0) | (array >= self.n_vocab)))
            raise InvalidArgumentError(f"token {array[at]} at index {at} is not in 0 … {self.n_vocab - 1}")
        return np.ascontiguousarray(array, np.int32)

    @property
    def chat_template(self) -> str | None:
        """The model's own chat template, or None."""
        template = C.llama_model_chat_template(self._live, ffi.NULL)
        return None if template == ffi.NULL else ffi.string(template).decode(errors="replace")

    def apply_chat_template(self, messages: Iterable[Mapping[str, str]], *, add_assistant: bool = True) -> str:
        """Render a conversation as the text this model was trained on.

        Parameters
        ----------
        messages : iterable of {"role": …, "content": …}
        add_assistant : bool
            End with the opening of an answer.

        Raises
        ------
        TokenizeError
            The model has no template, or one the engine has no rendering for (it knows a fixed list).
        """
        template = self.chat_template
        if template is None:
            raise TokenizeError("this model has no chat template")
        texts = [(message["role"], message["content"]) for message in messages]
        if any("\0" in text for pair in texts for text in pair):
            raise TokenizeError("a message holds a NUL character, which ends a C string")
        keep = [(ffi.new("char[]", _utf8(role)), ffi.new("char[]", _utf8(content))) for role, content in texts]
        chat = ffi.new("llama_chat_message[]", len(keep))
        for slot, (role, content) in zip(chat, keep, strict=True):
            slot.role, slot.content = role, content
        room = 256 + 2 * sum(len(role) + len(content) for role, content in keep)
        while True:
            out = ffi.new("char[]", room)
            n = C.llama_chat_apply_template(template.encode(), chat, len(keep), add_assistant, out, room)
            if n < 0:
                raise TokenizeError("the engine has no rendering for this model's chat template")
            if n <= room:
                return bytes(ffi.buffer(out, n)).decode(errors="replace")
            room = n

    # ── what it is ───────────────────────────────────────────────────────────────────────────────────

    @property
    def fingerprint(self) -> str:
        """BLAKE3 over the whole file (weights and metadata), hex. One changed weight changes it."""
        return self.file.fingerprint

    @cached_property
    def description(self) -> str:
        """The engine's one-line description."""
        out = ffi.new("char[]", 256)
        C.llama_model_desc(self._live, out, 256)
        return str(ffi.string(out).decode(errors="replace"))

    @cached_property
    def metadata(self) -> dict[str, str]:
        """The GGUF's scalar metadata, as strings."""

        def read(function: Any, index: int) -> str:
            room = 256
            while True:
                out = ffi.new("char[]", room)
                n = function(self._live, index, out, room)
                if n < room:
                    return str(ffi.string(out).decode(errors="replace"))
                room = n + 1

        count = C.llama_model_meta_count(self._live)
        return {
            read(C.llama_model_meta_key_by_index, i): read(C.llama_model_meta_val_str_by_index, i) for i in range(count)
        }

    @property
    def n_bytes(self) -> int:
        """Size of all tensors."""
        return int(C.llama_model_size(self._live))

    @property
    def n_params(self) -> int:
        """Number of weights."""
        return int(C.llama_model_n_params(self._live))

    # ── contexts, life ───────────────────────────────────────────────────────────────────────────────

    def context(
        self,
        n_ctx: int,
        n_seq_max: int = 1,
        *,
        kv_unified: bool = True,
        flash_attn: Literal["auto"] | bool = "auto",
        type_k: str = "f16",
        type_v: str = "f16",
        n_batch: int = 2048,
        n_ubatch: int = 512,
        n_threads: int | None = None,
    ) -> Context:
        """A new context on this model; see :class:`Context` for the parameters."""
        from .context import Context  # the one import that points downward: contexts are made by their model

        return Context(
            self,
            n_ctx,
            n_seq_max,
            kv_unified=kv_unified,
            flash_attn=flash_attn,
            type_k=type_k,
            type_v=type_v,
            n_batch=n_batch,
            n_ubatch=n_ubatch,
            n_threads=n_threads,
        )

    def close(self) -> None:
        """Let go of the weights; they are freed when the last context on them is. Does nothing the second time."""
        handle, self._owned = self._owned, None
        # Freed here if nobody else needs it, not by a finalizer: that would swallow a Ctrl-C.
        if handle and not handle.contexts:
            handle.free()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._owned is None

    @property
    def _handle(self) -> ModelHandle:
        if self._owned is None:
            raise ClosedError("model")
        return self._owned

    @property
    def _live(self) -> Any:
        return self._handle.pointer

    @property
    def _live_vocab(self) -> Any:
        self._handle  # noqa: B018 - raises after close
        return self._vocab

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Model {self.path.name}{', closed' if self.closed else ''}>"


class ModelHandle:
    """Owns a `llama_model *`; contexts keep it alive."""

    def __init__(self, pointer: Any) -> None:
        self.pointer = pointer
        self.contexts: weakref.WeakSet[object] = weakref.WeakSet()
        self.free = weakref.finalize(self, C.llama_model_free, pointer)
        self.free.atexit = False


class ModelFile:
    """Which file a model is, without keeping the model alive.

    Two of them are equal if they are the same unchanged file; for different files the fingerprint decides.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            with open(self.path, "rb") as file:
                magic = file.read(4)
        except OSError as error:
            raise ModelLoadError(f"{self.path}: {error.strerror}") from None
        if magic != b"GGUF":
            raise ModelLoadError(f"{self.path}: not a GGUF file (begins with {magic!r})")
        self.parts = self._parts()
        self.stats = tuple(_stat(part) for part in self.parts)
        self._lock = threading.Lock()
        self._fingerprint: str | None = None

    def _parts(self) -> tuple[Path, ...]:
        split = re.fullmatch(r"(.*)-00001-of-(\d{5})\.gguf", self.path.name)
        if not split:
            return (self.path,)
        name, count = split.groups()
        parts = tuple(self.path.with_name(f"{name}-{i:05d}-of-{count}.gguf") for i in range(1, int(count) + 1))
        missing = [part.name for part in parts if not part.is_file()]
        if missing:
            raise ModelLoadError(f"{self.path}: part(s) of this split model are missing: {', '.join(missing)}")
        return parts

    @property
    def fingerprint(self) -> str:
        """BLAKE3 over all parts, hex; kept on disk by device, inode, size and time of change."""
        with self._lock:
            if self._fingerprint is None:
                try:
                    if tuple(_stat(part) for part in self.parts) != self.stats:
                        raise ModelLoadError(f"{self.path}: the file has changed since the model was loaded")
                    self._fingerprint = self._read_kept() or self._hash()
                except OSError as error:
                    raise ModelLoadError(f"{self.path}: {error.strerror}") from None
            return self._fingerprint

    @property
    def _kept(self) -> Path:
        key = blake3(repr(self.stats).encode()).hexdigest(length=16)
        return cache_dir() / "fingerprints" / key

    def _read_kept(self) -> str | None:
        try:
            kept = self._kept.read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            return None
        return kept if re.fullmatch(r"[0-9a-f]{64}", kept) else None

    def _hash(self) -> str:
        hasher = blake3(max_threads=blake3.AUTO)
        for part in self.parts:
            hasher.update_mmap(part)
        digest: str = hasher.hexdigest()
        with contextlib.suppress(OSError):  # a cache that cannot be written only costs time
            write_atomically(self._kept, digest.encode())
        return digest

    def same_as(self, other: ModelFile) -> bool:
        """Whether both are the same model; hashes only if it has to."""
        return self.stats == other.stats or self.fingerprint == other.fingerprint


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise TokenizeError(f"text is not valid Unicode: {error}") from None


def _stat(path: Path) -> tuple[int, int, int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


class _Progress:
    """Takes the engine's progress calls, and keeps what the user's callback (or Ctrl-C) raised."""

    def __init__(self, callback: Callable[[float], None] | None) -> None:
        self.callback = callback
        self.error: BaseException | None = None


def _keep_progress_error(_: Any, error: BaseException, traceback: Any) -> None:
    # Not a try in the callback: Python raises Ctrl-C on entering it, before any line of its body.
    progress = ffi.from_handle(traceback.tb_frame.f_locals["user_data"])
    progress.error = error


@ffi.def_extern(error=False, onerror=_keep_progress_error)  # type: ignore[untyped-decorator]
def skv_on_progress(share: float, user_data: Any) -> bool:
    callback = ffi.from_handle(user_data).callback
    if callback is not None:
        callback(share)
    return True


def _why(log: list[str]) -> str:
    """The most telling line of a failed load: the first error, which the later ones only repeat in other words."""
    reasons = [line.split(": ", 1)[-1] for line in log if "error" in line.lower() or "fail" in line.lower()]
    return reasons[0] if reasons else "the engine could not load it"
