"""Models: what loads and what does not, text and tokens, and what identifies a file."""

from __future__ import annotations

import gc
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
from helpers import (
    BRANCH,
    KINDS,
    Files,
    Models,
    all_logits,
    identical,
    new_context,
    run_ok,
    run_python,
    text_tokens,
    uninterrupted,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import BOS, EOS, IM_END, IM_START, SLIDING_WINDOW

import swarmkv_ll.modelfile
from swarmkv_ll import Model
from swarmkv_ll.errors import ClosedError, InvalidArgumentError, ModelLoadError, TokenizeError
from swarmkv_ll.modelfile import ModelFile

# ── loading ──────────────────────────────────────────────────────────────────────────────────────────


def test_attributes(llama: Model, files: Files) -> None:
    assert (llama.n_vocab, llama.n_ctx_train, llama.n_layer, llama.n_embd) == (384, 16384, 4, 64)
    assert (llama.n_head, llama.n_head_kv, llama.decodes) == (4, 2, True)
    assert 0 < llama.n_params < 10**6
    assert llama.n_bytes == 4 * llama.n_params
    assert llama.path == files["llama"]
    assert llama.metadata["general.architecture"] == "llama"
    assert llama.metadata["llama.block_count"] == "4"
    assert "llama" in llama.description
    assert "llama.gguf" in repr(llama)


def test_capabilities_of_the_four_kinds(models: Models) -> None:
    found = {kind: models[kind].capabilities for kind in KINDS}
    assert [(c.recurrent, c.hybrid, c.sliding_window) for c in found.values()] == [
        (False, False, 0),
        (False, False, SLIDING_WINDOW),
        (True, False, 0),
        (False, True, 0),
    ]
    assert [c.attention_only for c in found.values()] == [True, False, False, False]
    assert not any(c.cell_extensions for c in found.values())
    parts = [c.blob_parts for c in found.values()]
    assert [(p.n_attention, p.recurrent) for p in parts] == [(1, False), (2, False), (0, True), (1, True)]


def not_a_file(folder: Path, _: bytes) -> Path:
    return folder / "none.gguf"


def a_folder(folder: Path, _: bytes) -> Path:
    return folder


def not_a_gguf(folder: Path, _: bytes) -> Path:
    return written(folder, b"PK\3\4 something else")


def empty(folder: Path, _: bytes) -> Path:
    return written(folder, b"")


def only_the_magic(folder: Path, good: bytes) -> Path:
    return written(folder, good[:4])


def header_cut(folder: Path, good: bytes) -> Path:
    return written(folder, good[:600])


def weights_cut(folder: Path, good: bytes) -> Path:
    return written(folder, good[:-1000])


def another_version(folder: Path, good: bytes) -> Path:
    return written(folder, good[:4] + struct.pack("<I", 99) + good[8:])


def unknown_architecture(folder: Path, good: bytes) -> Path:
    return written(folder, good.replace(b"llama", b"lhama"))


def part_missing(folder: Path, good: bytes) -> Path:
    path = folder / "model-00001-of-00003.gguf"
    path.write_bytes(good)
    return path


def written(folder: Path, data: bytes) -> Path:
    path = folder / "bad.gguf"
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (not_a_file, "No such file"),
        (a_folder, "Is a directory"),
        (not_a_gguf, r"not a GGUF file \(begins with b'PK\\x03\\x04'\)"),
        (empty, "not a GGUF file"),
        (only_the_magic, r"bad\.gguf: "),
        (header_cut, r"bad\.gguf: "),
        (weights_cut, r"bad\.gguf: .*(not within the file bounds|corrupted or incomplete)"),
        (another_version, r"bad\.gguf: "),
        (unknown_architecture, r"unknown model architecture.*lhama"),
        (part_missing, r"missing: model-00002-of-00003\.gguf, model-00003-of-00003\.gguf"),
    ],
)
def test_what_cannot_be_loaded_is_said(files: Files, tmp_path: Path, make: Any, says: str) -> None:
    path = make(tmp_path, files["llama"].read_bytes())
    with pytest.raises(ModelLoadError, match=says) as caught:
        Model(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unreadable_for_lack_of_rights(files: Files, tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    path = tmp_path / "secret.gguf"
    path.write_bytes(files["llama"].read_bytes())
    path.chmod(0)
    with pytest.raises(ModelLoadError, match="Permission denied"):
        Model(path)


def test_a_corrupted_header_never_takes_the_process_down(files: Files, tmp_path: Path) -> None:
    """One number of the header changed, 150 times over; it loads, or is refused, and the process goes on."""
    good = files["llama"].read_bytes()
    data_begins = good.index(b"output_norm.weight")
    rng, paths = np.random.default_rng(1), []
    for i in range(150):
        bad = bytearray(good)
        if i % 2:
            struct.pack_into("<Q", bad, int(rng.integers(8, data_begins)), int(rng.integers(0, 2**63)))
        else:
            bad[int(rng.integers(4, data_begins))] ^= int(rng.integers(1, 256))
        paths.append(tmp_path / f"{i}.gguf")
        paths[-1].write_bytes(bad)
    code = """
        import json, sys
        from swarmkv_ll import Model
        from swarmkv_ll.errors import ModelLoadError
        for path in json.loads(sys.argv[1]):
            print(path, flush=True)
            try:
                Model(path).close()
            except ModelLoadError as error:
                print("refused")
    """
    done = run_python(code, json.dumps([str(path) for path in paths]))
    assert done.returncode == 0, f"aborted at {done.stdout.splitlines()[-1]}\n{done.stderr[-2000:]}"
    assert done.stdout.splitlines().count("refused") > 20


def test_progress_goes_from_nothing_to_all(files: Files) -> None:
    seen: list[float] = []
    Model(files["llama"], on_progress=seen.append)
    assert seen == sorted(seen)
    assert 0.0 <= seen[0] < 1.0
    assert seen[-1] == 1.0
    assert len(seen) > 2


@pytest.mark.parametrize("when", [0.0, 0.5, 1.0])
def test_what_the_callback_raises_comes_out(files: Files, when: float) -> None:
    class StopError(Exception):
        pass

    def stop(share: float) -> None:
        if share >= when:
            raise StopError(share)

    with pytest.raises(StopError) as caught:
        Model(files["llama"], on_progress=stop)
    assert caught.value.args[0] >= when
    assert Model(files["llama"]).n_layer == 4


# ── text and tokens ──────────────────────────────────────────────────────────────────────────────────


def tokens_of(model: Model, text: str, *, special: bool = False, parse: bool = False) -> list[int]:
    return [int(token) for token in model.tokenize(text, add_special=special, parse_special=parse)]


@settings(deadline=None)
@given(st.text())
def test_text_survives_tokens(models: Models, text: str) -> None:
    model = models["llama"]
    tokens = model.tokenize(text, add_special=False, parse_special=False)
    assert tokens.dtype == np.int32
    assert tokens.flags.owndata
    assert model.detokenize(tokens) == text
    assert b"".join(model.piece(token) for token in tokens) == text.encode()


@pytest.mark.parametrize("text", ["", "a\0b\0", "\0", "👩‍👩‍👧 naïve ﷽", " leading", "a\r\n\t ", "x" * 5000])
def test_awkward_texts_survive_tokens(models: Models, text: str) -> None:
    for name in ("llama", "bos"):
        assert models[name].detokenize(tokens_of(models[name], text)) == text


def test_half_a_surrogate_is_refused(llama: Model) -> None:
    with pytest.raises(TokenizeError, match="not valid Unicode"):
        llama.tokenize("\ud800", add_special=False, parse_special=False)


def test_special_tokens_are_added_only_when_asked_for_and_wanted(models: Models) -> None:
    plain = tokens_of(models["llama"], "the")
    assert tokens_of(models["llama"], "the", special=True) == plain
    assert tokens_of(models["bos"], "the", special=True) == [BOS, *plain]
    assert tokens_of(models["bos"], "the") == plain
    assert tokens_of(models["bos"], "", special=True) == [BOS]
    assert models["bos"].detokenize([BOS, *plain], remove_special=True) == "the"


def test_special_tokens_in_a_text_are_read_only_when_asked_for(llama: Model) -> None:
    text = "<|im_start|>a<|im_end|>"
    assert tokens_of(llama, text, parse=True) == [IM_START, ord("a"), IM_END]
    as_text = tokens_of(llama, text)
    assert not {IM_START, IM_END} & set(as_text)
    assert llama.detokenize(as_text) == text
    assert llama.detokenize([IM_START, ord("a"), IM_END]) == text
    assert llama.detokenize([IM_START, ord("a"), IM_END], unparse_special=False) == "a"
    assert llama.piece(IM_START) == b""
    assert llama.piece(IM_START, special=True) == b"<|im_start|>"


def test_tokens_that_are_no_text_become_replacement_characters(llama: Model) -> None:
    assert llama.detokenize([0xE2, 0x82]) == "\ufffd"
    assert llama.detokenize([0xE2, 0x82, 0xAC]) == "€"
    assert llama.piece(0xE2) == b"\xe2"


def test_ends(llama: Model) -> None:
    assert [token for token in range(llama.n_vocab) if llama.is_end(token)] == [EOS, IM_END]


def test_tokens_out_of_range_never_reach_the_engine(llama: Model) -> None:
    uses: list[Callable[[int], Any]] = [llama.piece, llama.is_end, lambda t: llama.detokenize([1, t])]
    for use in uses:
        for token in (-1, 384, 2**31, 2**40):
            with pytest.raises(InvalidArgumentError, match=f"token {token} at index"):
                use(token)
    for tokens in ([1.5], [[1]], ["1"]):
        with pytest.raises(InvalidArgumentError, match="tokens should be integers"):
            llama.detokenize(tokens)


def test_check_tokens_copies_only_if_it_has_to(llama: Model) -> None:
    right = text_tokens(10)
    assert llama.check_tokens(right) is right
    others: list[Any] = [right.astype(np.int64), right[::2], right.tolist(), []]
    for other in others:
        checked = llama.check_tokens(other)
        assert checked.dtype == np.int32
        assert checked.flags.c_contiguous
        assert checked.tolist() == list(other)


def test_chat_template(llama: Model) -> None:
    assert llama.chat_template == tiny_models.CHAT_TEMPLATE
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why? ☃"}]
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhy? ☃<|im_end|>\n"
    assert llama.apply_chat_template(messages, add_assistant=False) == text
    assert llama.apply_chat_template(iter(messages)) == text + "<|im_start|>assistant\n"
    long = "é" * 20_000
    assert long in llama.apply_chat_template([{"role": "user", "content": long}])


def test_chat_texts_the_engine_would_cut_are_refused(llama: Model) -> None:
    for message in ({"role": "user", "content": "a\0b"}, {"role": "us\0er", "content": "a"}):
        with pytest.raises(TokenizeError, match="NUL"):
            llama.apply_chat_template([message])
    with pytest.raises(TokenizeError, match="not valid Unicode"):
        llama.apply_chat_template([{"role": "user", "content": "\ud800"}])


def test_no_template_or_one_the_engine_does_not_know(files: Files, tmp_path: Path) -> None:
    template = tiny_models.CHAT_TEMPLATE.encode()
    good = files["llama"].read_bytes()
    unknown, none = tmp_path / "unknown.gguf", tmp_path / "none.gguf"
    unknown.write_bytes(good.replace(template, b"x" * len(template)))
    none.write_bytes(good.replace(b"tokenizer.chat_template", b"tokenizer.chat_templ_te"))
    with pytest.raises(TokenizeError, match="no rendering"):
        Model(unknown).apply_chat_template([{"role": "user", "content": "a"}])
    model = Model(none)
    assert model.chat_template is None
    with pytest.raises(TokenizeError, match="no chat template"):
        model.apply_chat_template([{"role": "user", "content": "a"}])


# ── what identifies it ───────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setattr(swarmkv_ll.modelfile, "cache_dir", lambda: folder)
    return folder


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Files that were really read for their hash."""
    seen: list[Path] = []
    true = ModelFile._hash

    def count(self: ModelFile) -> str:
        seen.append(self.path)
        return true(self)

    monkeypatch.setattr(ModelFile, "_hash", count)
    return seen


def test_fingerprint_is_of_the_whole_file(files: Files, tmp_path: Path, cache: Path, hashed: list[Path]) -> None:
    first = ModelFile(files["llama"])
    assert len(first.fingerprint) == 64
    assert first.fingerprint == ModelFile(files["llama"]).fingerprint
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(files["llama"].read_bytes())
    assert ModelFile(copy).fingerprint == first.fingerprint
    assert first.same_as(ModelFile(copy))
    assert len(hashed) == 2
    for name in ("changed", "deeper", "gemma2"):
        assert ModelFile(files[name]).fingerprint != first.fingerprint
        assert not first.same_as(ModelFile(files[name]))
    assert files["changed"].stat().st_size == files["llama"].stat().st_size


def test_fingerprint_is_kept_by_stat(files: Files, tmp_path: Path, cache: Path, hashed: list[Path]) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(files["llama"].read_bytes())
    first = ModelFile(path).fingerprint
    (kept,) = (cache / "fingerprints").iterdir()
    assert kept.read_text() == first
    assert ModelFile(path).fingerprint == first
    assert len(hashed) == 1
    changed = files["changed"].read_bytes()
    stat = path.stat()
    path.write_bytes(changed)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert ModelFile(path).fingerprint == ModelFile(files["changed"]).fingerprint != first
    for nonsense in (b"", b"x" * 64, b"\xff" * 64, first.encode() * 2):
        for entry in (cache / "fingerprints").iterdir():
            entry.write_bytes(nonsense)
        assert ModelFile(path).fingerprint != first


def test_the_same_unchanged_file_needs_no_hash(files: Files, cache: Path, hashed: list[Path]) -> None:
    assert ModelFile(files["llama"]).same_as(ModelFile(files["llama"]))
    assert hashed == []


def test_a_cache_that_cannot_be_written_only_costs_time(files: Files, tmp_path: Path, cache: Path) -> None:
    cache.write_bytes(b"a file where a folder should be")
    assert len(ModelFile(files["llama"]).fingerprint) == 64


def test_a_file_that_changed_after_it_was_loaded_has_no_fingerprint(files: Files, tmp_path: Path, cache: Path) -> None:
    """What is in memory is no longer what is on disk."""
    path = tmp_path / "model.gguf"
    path.write_bytes(files["llama"].read_bytes())
    model, known = Model(path), Model(path)
    fingerprint = known.fingerprint
    path.write_bytes(files["changed"].read_bytes())
    os.utime(path, ns=(1, 1))
    with pytest.raises(ModelLoadError, match="has changed since"):
        model.fingerprint  # noqa: B018
    assert known.fingerprint == fingerprint
    path.unlink()
    with pytest.raises(ModelLoadError, match="No such file"):
        model.fingerprint  # noqa: B018


def test_every_part_of_a_split_model_counts(files: Files, tmp_path: Path, cache: Path) -> None:
    """Only the naming is needed for that; the engine is not asked to load these."""
    first, second = (tmp_path / f"m-0000{i}-of-00002.gguf" for i in (1, 2))
    first.write_bytes(files["llama"].read_bytes())
    second.write_bytes(b"one")
    one = ModelFile(first).fingerprint
    second.write_bytes(b"two and more")
    assert ModelFile(first).parts == (first, second)
    assert ModelFile(first).fingerprint != one


# ── life ─────────────────────────────────────────────────────────────────────────────────────────────


def test_use_after_close(files: Files) -> None:
    with Model(files["llama"]) as model:
        fingerprint = model.fingerprint
    model.close()
    assert model.closed
    assert "closed" in repr(model)
    uses: list[Callable[[], Any]] = [
        lambda: tokens_of(model, "a"),
        lambda: model.detokenize([1]),
        lambda: model.piece(1),
        lambda: model.is_end(1),
        lambda: model.chat_template,
        lambda: model.apply_chat_template([]),
        lambda: model.context(256),
        lambda: model.n_bytes,
    ]
    for use in uses:
        with pytest.raises(ClosedError, match="model"):
            use()
    assert model.fingerprint == fingerprint  # the file's, not the weights'
    assert model.n_vocab == 384
    assert model.metadata["general.architecture"] == "llama"


def test_contexts_go_on_after_close(files: Files, llama: Model) -> None:
    model = Model(files["llama"])
    ctx = new_context(model)
    ctx.decode(text_tokens(40))
    model.close()
    del model
    gc.collect()
    assert identical(all_logits(ctx, BRANCH), uninterrupted(llama, text_tokens(40), BRANCH))
    assert ctx.model.closed
    ctx.close()


def test_a_dropped_model_is_freed(files: Files) -> None:
    """200 times a model of some hundred kilobytes; without the finalizer some 100 MB would stay."""
    printed = run_ok(
        """
        import sys
        from helpers import resident_bytes
        from swarmkv_ll import Model
        for _ in range(20):
            Model(sys.argv[1])
        before = resident_bytes()
        for _ in range(200):
            Model(sys.argv[1])
        print(resident_bytes() - before)
        """,
        files["llama"],
    )
    assert int(printed) < 20 << 20
