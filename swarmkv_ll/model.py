"""A model file: its weights, its vocabulary, what its memory can do, and what identifies it."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from . import runtime
from .blob import Parts
from .errors import ClosedError, InvalidArgumentError, ModelLoadError, TokenizeError
from .ffi import C, ffi
from .identity import Rope
from .modelfile import ModelFile, difference

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
    keeps_v : bool
        The KV cache holds V beside K; with multi-head latent attention (MLA) it does not.
    """

    recurrent: bool
    hybrid: bool
    sliding_window: int
    cell_extensions: bool
    keeps_v: bool

    @property
    def attention_only(self) -> bool:
        """A plain KV cache: any tail of a sequence can be removed at any time."""
        return not (self.recurrent or self.hybrid or self.sliding_window)

    @property
    def blob_parts(self) -> Parts:
        """What a state blob of this model is made of."""
        n_attention = 0 if self.recurrent and not self.hybrid else 2 if self.sliding_window else 1
        return Parts(n_attention, self.recurrent or self.hybrid, self.cell_extensions, self.keeps_v)


class Model:
    """A GGUF model, loaded by the engine.

    Parameters
    ----------
    path : path-like
        The GGUF file; of a split model, its first part.
    n_gpu_layers : int
        Layers to keep on the GPU, counted from the last (the output is one), with their part of each KV cache; -1 for
        all. Without a GPU it has no effect.
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
        if not -(2**31) <= operator.index(n_gpu_layers) < 2**31:
            raise InvalidArgumentError(f"n_gpu_layers should be a 32-bit number, is {n_gpu_layers}")
        if guard is not None and not isinstance(guard, runtime.LlamaGuard):
            raise InvalidArgumentError(f"guard should be a LlamaGuard, is {type(guard).__name__}")
        runtime.start()
        self.file = ModelFile(path)
        self.path = self.file.path
        self.guard = guard or runtime.LlamaGuard()
        self.n_gpu_layers = operator.index(n_gpu_layers)

        params = C.llama_model_default_params()
        params.n_gpu_layers = self.n_gpu_layers
        progress = _Progress(on_progress)
        keep = ffi.new_handle(progress)
        params.progress_callback = C.skv_on_progress
        params.progress_callback_user_data = keep
        self._owned: ModelHandle | None = (owned := ModelHandle())
        with runtime.engine_log() as log:
            C.skv_model_load(os.fsencode(self.path), params, owned.slot)
        if progress.error:
            raise progress.error
        pointer = owned.pointer
        if pointer == ffi.NULL:
            raise ModelLoadError(f"{self.path}: {_why(log)}")

        self._describe()

    @classmethod
    def adopt(cls, pointer: Any, path: str | os.PathLike[str], *, owner: object) -> Model:
        """A model that another binding on the same library has loaded: borrowed, never freed. See `Context.adopt`."""
        runtime.start()
        adopted = cls.__new__(cls)
        adopted.file = ModelFile(path)
        adopted.path = adopted.file.path
        adopted.guard = runtime.LlamaGuard()
        adopted.n_gpu_layers = -1  # not known; only needed to foresee how much host memory a KV cache takes
        adopted._owned = ModelHandle(pointer, owner)
        adopted._describe()
        if found := difference(adopted.path, adopted.metadata, adopted.n_bytes):
            raise InvalidArgumentError(f"{adopted.path} is not the file of that context's model: {found}")
        return adopted

    def _is_mla(self) -> bool:
        """Whether heads are expanded from a latent vector that is all the cache keeps (`llama_hparams::is_mla`)."""
        arch = self.metadata.get("general.architecture", "")
        widths = [self.metadata.get(f"{arch}.attention.{key}_length_mla", "0") for key in ("key", "value")]
        return "0" not in widths

    def _describe(self) -> None:
        pointer = self._handle.pointer
        self._shapes: dict[object, object] = {}  # of states, by KV types; `_parts`, where they are not as expected:
        self._parts: Parts | None = None  # what `state` has learnt from the engine
        self.n_vocab = int(C.llama_vocab_n_tokens(self._handle.vocab))
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
            keeps_v=not self._is_mla(),
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
        handle = self._handle  # held for as long as the engine reads from it
        data = _utf8(text)
        room = len(data) + 16
        out = np.empty(room, np.int32)
        n = C.llama_tokenize(
            handle.vocab,
            data,
            len(data),
            ffi.from_buffer("llama_token[]", out),
            room,
            bool(add_special),
            bool(parse_special),
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
        handle = self._handle
        ids = self.check_tokens(tokens)
        room = 16 + 8 * len(ids)
        while True:
            out = ffi.new("char[]", room)
            n = C.llama_detokenize(
                handle.vocab,
                ffi.from_buffer("llama_token[]", ids),
                len(ids),
                out,
                room,
                bool(remove_special),
                bool(unparse_special),
            )
            if n >= 0:
                return bytes(ffi.buffer(out, n)).decode(errors="replace")
            room = -n

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes of one token; may be part of a UTF-8 character."""
        handle = self._handle
        (checked,) = self.check_tokens([token])
        room = 64
        while True:
            out = ffi.new("char[]", room)
            n = C.llama_token_to_piece(handle.vocab, int(checked), out, room, 0, bool(special))
            if n >= 0:
                return bytes(ffi.buffer(out, n))
            room = -n

    def is_end(self, token: int) -> bool:
        """Whether a token ends a generation (EOS, end of turn, …)."""
        handle = self._handle
        (checked,) = self.check_tokens([token])
        return bool(C.llama_vocab_is_eog(handle.vocab, int(checked)))

    def check_tokens(self, tokens: npt.ArrayLike) -> Tokens:
        """`tokens` as a contiguous int32 array of shape (n,), each a token of this model; copied only if need be.

        Raises
        ------
        InvalidArgumentError
            Not integers, not one-dimensional, or out of range.
        """
        try:
            array = np.asarray(tokens)
        except ValueError as error:
            raise InvalidArgumentError(f"tokens should be integers of shape (n,): {error}") from None
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
        handle = self._handle
        template = C.llama_model_chat_template(handle.pointer, ffi.NULL)
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
        try:
            texts = [(message["role"], message["content"]) for message in messages]
        except (KeyError, TypeError, IndexError):
            raise InvalidArgumentError('each message should be {"role": text, "content": text}') from None
        if any("\0" in text for pair in texts for text in pair):
            raise TokenizeError("a message holds a NUL character, which ends a C string")
        keep = [(ffi.new("char[]", _utf8(role)), ffi.new("char[]", _utf8(content))) for role, content in texts]
        chat = ffi.new("llama_chat_message[]", len(keep))
        for slot, (role, content) in zip(chat, keep, strict=True):
            slot.role, slot.content = role, content
        room = 256 + 2 * sum(len(role) + len(content) for role, content in keep)
        while True:
            out = ffi.new("char[]", room)
            n = C.llama_chat_apply_template(template.encode(), chat, len(keep), bool(add_assistant), out, room)
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
        handle = self._handle
        out = ffi.new("char[]", 256)
        C.llama_model_desc(handle.pointer, out, 256)
        return str(ffi.string(out).decode(errors="replace"))

    @cached_property
    def metadata(self) -> dict[str, str]:
        """The GGUF's scalar metadata, as strings."""
        handle = self._handle

        def read(function: Any, index: int) -> str:
            room = 256
            while True:
                out = ffi.new("char[]", room)
                n = function(handle.pointer, index, out, room)
                if n < room:
                    return str(ffi.string(out).decode(errors="replace"))
                room = n + 1

        count = C.llama_model_meta_count(handle.pointer)
        return {
            read(C.llama_model_meta_key_by_index, i): read(C.llama_model_meta_val_str_by_index, i) for i in range(count)
        }

    @cached_property
    def rope(self) -> Rope:
        """The model's own RoPE settings."""
        try:
            return Rope.own(self.metadata)
        except (ValueError, InvalidArgumentError):  # settings the engine knows and this library does not
            return Rope()

    @property
    def n_bytes(self) -> int:
        """Size of all tensors."""
        handle = self._handle
        return int(C.llama_model_size(handle.pointer))

    @property
    def n_params(self) -> int:
        """Number of weights."""
        handle = self._handle
        return int(C.llama_model_n_params(handle.pointer))

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
        swa_full: bool = True,
        rope: Rope | None = None,
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
            swa_full=swa_full,
            rope=rope,
        )

    def close(self) -> None:
        """Let go of the weights; they are freed when the last context on them is. Does nothing the second time."""
        self._owned = None

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._owned is None

    @property
    def _handle(self) -> ModelHandle:
        if self._owned is None:
            raise ClosedError("model")
        return self._owned

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Model {self.path.name}{', closed' if self.closed else ''}>"


class ModelHandle:
    """Owns a `llama_model *`, or borrows one. Contexts, and calls that read the vocabulary, keep it alive."""

    def __init__(self, borrowed: Any = None, owner: object = None) -> None:
        self.owner = owner  # of a borrowed model, which is not ours to free
        slot = ffi.new("struct llama_model *[1]", [borrowed or ffi.NULL])
        self.slot = slot if borrowed else ffi.gc(slot, C.skv_model_free)

    @property
    def pointer(self) -> Any:
        return self.slot[0]

    @property
    def vocab(self) -> Any:
        return C.llama_model_get_vocab(self.pointer)


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


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise TokenizeError(f"text is not valid Unicode: {error}") from None
