"""A LoRA adapter: a file of low-rank changes to a model's weights, put into force by `Context.set_adapters`."""

from __future__ import annotations

import os
from pathlib import Path

from blake3 import blake3

from . import runtime
from .cache import open_regular
from .errors import InvalidArgumentError, ModelLoadError
from .ffi import C, ffi
from .model import Model


class Adapter:
    """A LoRA adapter (GGUF), loaded for one model; freed with the model's weights.

    Attributes
    ----------
    path : Path
    fingerprint : str
        BLAKE3 of the file, hex.

    Raises
    ------
    ModelLoadError
        No such file, not an adapter, or one for another model.
    """

    def __init__(self, model: Model, path: str | os.PathLike[str]) -> None:
        if not isinstance(model, Model):
            raise InvalidArgumentError(f"expected Model, got {type(model).__name__}")
        self.path = Path(path)
        self.fingerprint = fingerprint(self.path)
        self._parent = model._handle
        with runtime.engine_log() as log:
            self._pointer = C.llama_adapter_lora_init(self._parent.pointer, os.fsencode(self.path))
        if self._pointer == ffi.NULL:
            raise ModelLoadError(f"{self.path}: {runtime.last_reason(log, 'the engine could not load this adapter')}")

    def __repr__(self) -> str:
        return f"<Adapter {self.path.name}>"


def fingerprint(path: str | os.PathLike[str]) -> str:
    """BLAKE3 of an adapter's file, hex.

    Raises
    ------
    ModelLoadError
        It cannot be read, or is no GGUF.
    """
    try:
        with open_regular(path) as file:
            if (magic := file.read(4)) != b"GGUF":
                raise ModelLoadError(f"{path}: not a GGUF file (begins with {magic!r})")
            hasher = blake3(max_threads=blake3.AUTO)
            hasher.update_mmap(path)
            digest: str = hasher.hexdigest()
            return digest
    except OSError as error:
        raise ModelLoadError(f"{path}: {error.strerror}") from None
    except InvalidArgumentError as error:
        raise ModelLoadError(str(error)) from None
