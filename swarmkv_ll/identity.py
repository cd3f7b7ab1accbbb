"""What a state depends on, and how two of those differ: reasons against a restore, and conversions that make it fit.

Needs no engine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, cast

from .errors import InvalidArgumentError
from .modelfile import ModelFile


@dataclass(frozen=True)
class Rope:
    """Settings of the rotary position embedding, each by default the model's own (`llama_context_params`).

    Attributes
    ----------
    freq_base, freq_scale : float
        Base frequency and scale; 0 for the model's.
    scaling : {"model", "none", "linear", "yarn", "longrope"}
    yarn_ext_factor, yarn_attn_factor, yarn_beta_fast, yarn_beta_slow : float
        Negative for the model's.
    yarn_orig_ctx : int
        0 for the model's.

    Raises
    ------
    InvalidArgumentError
        A value that is not finite or out of range.
    """

    freq_base: float = 0.0
    freq_scale: float = 0.0
    scaling: Literal["model", "none", "linear", "yarn", "longrope"] = "model"
    yarn_ext_factor: float = -1.0
    yarn_attn_factor: float = -1.0
    yarn_beta_fast: float = -1.0
    yarn_beta_slow: float = -1.0
    yarn_orig_ctx: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "scaling":
                if value not in ("model", "none", "linear", "yarn", "longrope"):
                    raise InvalidArgumentError(
                        f"rope scaling should be model, none, linear, yarn or longrope: {value!r}"
                    )
                continue
            low = -1.0 if field.name.startswith("yarn_") and field.name != "yarn_orig_ctx" else 0.0
            whole = isinstance(value, int) and not isinstance(value, bool)
            number = whole or (isinstance(value, float) and field.name != "yarn_orig_ctx")
            if not number or not low <= value <= 1e9:  # math.isfinite would choke on integers of 400 digits
                raise InvalidArgumentError(f"rope {field.name} should be {low:g} to 1e9, is {value!r}")

    @classmethod
    def own(cls, metadata: Mapping[str, str]) -> Rope:
        """A model's own settings, from its GGUF's metadata, with the engine's defaults (`src/llama-hparams.h`)."""
        arch = metadata.get("general.architecture", "")

        def found(key: str, default: str) -> str:
            return metadata.get(f"{arch}.rope.{key}", default)

        factor = float(found("scaling.factor", found("scale_linear", "1")))
        return cls(
            freq_base=float(found("freq_base", "10000")),
            freq_scale=1 / factor if factor else 1.0,
            scaling=cast("Any", found("scaling.type", "linear")),
            yarn_ext_factor=float(found("scaling.yarn_ext_factor", "-1")),
            yarn_attn_factor=float(found("scaling.yarn_attn_factor", "1")),
            yarn_beta_fast=float(found("scaling.yarn_beta_fast", "32")),
            yarn_beta_slow=float(found("scaling.yarn_beta_slow", "1")),
            yarn_orig_ctx=int(found("scaling.original_context_length", metadata.get(f"{arch}.context_length", "0"))),
        )

    def beyond(self, own: Rope) -> Rope:
        """These settings with those left to the model that are the model's anyway: equal if they mean the same."""
        kept = {}
        for field in fields(self):
            mine, its = getattr(self, field.name), getattr(own, field.name)
            same = mine == its if isinstance(mine, str) else math.isclose(mine, its, rel_tol=1e-6)
            if not same:
                kept[field.name] = mine
        return Rope(**kept)

    def __str__(self) -> str:
        default = Rope()
        changed = [
            f"{f.name}={getattr(self, f.name)}"
            for f in fields(self)
            if getattr(self, f.name) != getattr(default, f.name)
        ]
        return ", ".join(changed) or "the model's own"


@dataclass(frozen=True)
class AdapterId:
    """A LoRA adapter in force: BLAKE3 of its file (hex), and its scale."""

    fingerprint: str
    scale: float

    def __str__(self) -> str:
        return f"{self.fingerprint[:16]} × {self.scale:g}"


@dataclass(frozen=True)
class SavedModel:
    """A model as a file names it: its fingerprint, and its file name for people."""

    fingerprint: str
    name: str


def _named(model: ModelFile | SavedModel) -> str:
    name = model.path.name if isinstance(model, ModelFile) else model.name
    return f"{name} ({model.fingerprint[:16]})"


def _same_model(mine: ModelFile | SavedModel, theirs: ModelFile | SavedModel) -> bool:
    """Hashes only if it has to."""
    if mine is theirs:
        return True
    if isinstance(mine, ModelFile) and isinstance(theirs, ModelFile):
        return mine.same_as(theirs)
    return mine.fingerprint == theirs.fingerprint


@dataclass(frozen=True)
class Reason:
    """One reason why a snapshot cannot go into a context: what it needs, and what the context has."""

    field: str
    expected: object
    actual: object
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.field} should be {self.expected}, is {self.actual}{f' ({self.hint})' if self.hint else ''}"


@dataclass(frozen=True)
class Conversion:
    """Something that a restore changes on the way.

    Attributes
    ----------
    field : str
        "n_stream", "n_tokens", "v_transposed", "flash_attn" or "engine build".
    before, after : object
        What the snapshot has, and what the context is to get.
    exact : bool
        Whether the state is then what it would have been if computed there, bit for bit.
    """

    field: str
    before: object
    after: object
    exact: bool = True

    def __str__(self) -> str:
        return f"{self.field} {self.before} → {self.after}{'' if self.exact else ' (inexact)'}"


@dataclass(frozen=True)
class Compatibility:
    """Whether a snapshot can be restored into a context. True if it can.

    Attributes
    ----------
    reasons : tuple of Reason
        Everything that is against it.
    conversions : tuple of Conversion
        Everything that a restore changes on the way.
    """

    reasons: tuple[Reason, ...]
    conversions: tuple[Conversion, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether there is no reason against it."""
        return not self.reasons

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        if self.reasons:
            return "no: " + "; ".join(map(str, self.reasons))
        return "yes, " + (", ".join(f"with {change}" for change in self.conversions) or "as it is")


@dataclass(frozen=True)
class Identity:
    """What a state was computed with: a context that differs in any of it would have computed another.

    Attributes
    ----------
    model : ModelFile or SavedModel
    engine : str
        Stamp: pin and flags, then the library's build id.
    type_k, type_v : str
    flash_attn : bool
        What "auto" came to.
    rotation : tuple of (bool, bool)
        Whether K and V rows are rotated before they are quantized (`LLAMA_ATTN_ROT_DISABLE` switches it off).
    rope : Rope
    adapters : tuple of AdapterId
        LoRA adapters with their scales, in order of fingerprint.
    """

    model: ModelFile | SavedModel
    engine: str
    type_k: str
    type_v: str
    flash_attn: bool
    rotation: tuple[bool, bool]
    rope: Rope
    adapters: tuple[AdapterId, ...]

    def compare(self, other: Identity) -> tuple[list[Reason], list[Conversion]]:
        """What is against taking this state for the other's, and what could be taken all the same, inexactly."""
        reasons = []
        if not _same_model(self.model, other.model):
            reasons.append(Reason("model", _named(self.model), _named(other.model)))
        for name in ("type_k", "type_v"):
            if getattr(self, name) != getattr(other, name):
                reasons.append(Reason(name, getattr(self, name), getattr(other, name)))
        if self.rotation != other.rotation and not reasons:  # it follows from model and types, else
            hint = "is LLAMA_ATTN_ROT_DISABLE set on one side only?"
            reasons.append(Reason("rotation of K, V", self.rotation, other.rotation, hint))
        if self.rope != other.rope:
            reasons.append(Reason("RoPE", self.rope, other.rope))
        if self.adapters != other.adapters:
            reasons.append(Reason("adapters", *(" + ".join(map(str, x.adapters)) or "none" for x in (self, other))))
        conversions = []
        if _pin(self.engine) != _pin(other.engine):
            reasons.append(Reason("engine", _pin(self.engine), _pin(other.engine)))
        elif self.engine != other.engine:
            conversions.append(Conversion("engine build", self.engine, other.engine, exact=False))
        if self.flash_attn != other.flash_attn:
            conversions.append(Conversion("flash_attn", self.flash_attn, other.flash_attn, exact=False))
        return reasons, conversions

    def to_meta(self) -> dict[str, Any]:
        """As plain data, for a file."""
        name = self.model.path.name if isinstance(self.model, ModelFile) else self.model.name
        return {
            "model": {"fingerprint": self.model.fingerprint, "name": name},
            "engine": self.engine,
            "type_k": self.type_k,
            "type_v": self.type_v,
            "flash_attn": self.flash_attn,
            "rotation": list(self.rotation),
            "rope": asdict(self.rope),
            "adapters": [asdict(adapter) for adapter in self.adapters],
        }

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any]) -> Identity:
        """From what `to_meta` gave.

        Raises
        ------
        KeyError, TypeError, ValueError
            A key is missing, or its value is of another kind.
        """
        model, rope, rotation = meta["model"], meta["rope"], meta["rotation"]
        texts = {key: meta[key] for key in ("engine", "type_k", "type_v")}
        texts |= {"fingerprint": model["fingerprint"], "name": model["name"]}
        if not isinstance(meta["adapters"], list) or not isinstance(rotation, list):
            raise TypeError("adapters and rotation should be lists")
        adapters = [(adapter["fingerprint"], adapter["scale"]) for adapter in meta["adapters"]]
        texts |= {f"adapter {i}": fingerprint for i, (fingerprint, _) in enumerate(adapters)}
        for key, text in texts.items():
            if not isinstance(text, str) or len(text) > 1000:
                raise TypeError(f"{key} should be a text, is {text!r:.60}")
        flags = [meta["flash_attn"], *rotation]
        if len(flags) != 3 or not all(isinstance(flag, bool) for flag in flags):
            raise TypeError(f"flash_attn and rotation should be three truth values, are {flags!r:.60}")
        if not all(isinstance(scale, float) and math.isfinite(scale) for _, scale in adapters):
            raise TypeError("an adapter's scale should be a number")
        return cls(
            SavedModel(texts["fingerprint"], texts["name"]),
            texts["engine"],
            texts["type_k"],
            texts["type_v"],
            flags[0],
            (flags[1], flags[2]),
            Rope(**rope),
            in_order(AdapterId(fingerprint, scale) for fingerprint, scale in adapters),
        )


def in_order(adapters: Iterable[AdapterId]) -> tuple[AdapterId, ...]:
    """Adapters without those of scale 0 (the engine leaves them out), in an order of their own."""
    return tuple(sorted((a for a in adapters if a.scale), key=lambda a: (a.fingerprint, a.scale)))


def _pin(stamp: str) -> str:
    """The engine's source, without the flags and the build id behind it."""
    return stamp.split("/", maxsplit=1)[0].rpartition("-")[0] or stamp
