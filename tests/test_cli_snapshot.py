"""`swarmkv snapshot`: files made, looked into, tried and changed; what it tells against what the library tells."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import numpy.typing as npt
import pytest
import tiny_models
from handmade import every_layout
from helpers import Models, new_context, run_python, text_tokens
from matplotlib.backends.backend_agg import FigureCanvasAgg
from test_cli import COMMAND, on_a_terminal

from swarmkv_ll import Arena, Snapshot, inspection, limits, skv
from swarmkv_ll.blob import StateBlob, parse, read_layout
from swarmkv_ll.cli import main
from swarmkv_ll.cli_snapshot import KV_TYPES
from swarmkv_ll.errors import HostMemoryError, InvalidArgumentError
from swarmkv_ll.fanout import prefill
from swarmkv_ll.identity import Rope
from swarmkv_ll.record import UNKNOWN, Record

N = 96
TOKENS = text_tokens(N)
TEXT = "The pump starts at six. It stops at seven. " * 30


class Call:
    """Runs a command in this process: (exit code, standard output, standard error)."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.capsys = folder, capsys
        monkeypatch.chdir(folder)
        monkeypatch.delenv("COLUMNS", raising=False)

    def __call__(self, *args: object) -> tuple[int, str, str]:
        self.capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(["snapshot", *map(str, args)])
        done = self.capsys.readouterr()
        return int(ended.value.code or 0), done.out, done.err

    def ok(self, *args: object) -> str:
        code, printed, errors = self(*args)
        assert (code, errors) == (0, "")
        return printed

    def refused(self, *args: object) -> str:
        code, printed, errors = self(*args)
        assert (code, printed) == (2, "")
        assert len(errors.splitlines()) == 1
        return errors


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena(16 << 20) as made:
        yield made


def save(models: Models, arena: Arena, path: Path, name: str, seq: int | None = 0, **options: Any) -> None:
    """A file of `N` tokens, or of a whole context with sequences 0, 1 and 3."""
    with new_context(models[name], **{"n_ctx": 1024, "n_seq_max": 1 if seq == 0 else 4, **options}) as ctx:
        if seq is None:
            for s, n in ((0, 50), (1, 20), (3, 70)):
                ctx.decode(TOKENS[:n], seq=s)
        else:
            ctx.decode(TOKENS)
        tokens = {0: TOKENS[:50], 3: TOKENS[:70]} if seq is None else TOKENS
        with ctx.snapshot(arena, seq, tokens=tokens) as taken:
            taken.save(path)


FILES: dict[str, tuple[str, int | None, dict[str, Any]]] = {
    "llama": ("llama", 0, {}),
    "transposed": ("llama", 0, {"flash_attn": False}),
    "bf16": ("llama", 0, {"type_k": "bf16", "type_v": "f32"}),
    "quantized": ("llama", 0, {"type_k": "q8_0", "type_v": "q4_0"}),
    "streams": ("llama", 0, {"n_seq_max": 3, "kv_unified": False}),
    "window": ("gemma2", 0, {"swa_full": False}),
    "recurrent": ("mamba", 0, {}),
    "hybrid": ("jamba", 0, {}),
    "without V": ("mla", 0, {}),
    "whole": ("llama", None, {}),
    "whole streams": ("llama", None, {"kv_unified": False, "flash_attn": False}),
    "whole hybrid": ("jamba", None, {}),
    "rope": ("llama", 0, {"rope": Rope(freq_base=20_000.0)}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, models: Models) -> Path:
    """All of `FILES`, and `delta.skv`, `llama.bin`, models and a document. Tests write into folders of their own."""
    made = tmp_path_factory.mktemp("snapshots")
    (made / "doc.txt").write_text(TEXT)
    mla = models.files.folder / "mla.gguf"
    tiny_models.write_deepseek2(mla)
    with Arena(16 << 20) as arena:
        for name, (model, seq, options) in FILES.items():
            save(models, arena, made / f"{name}.skv", model, seq, **options)
        with Snapshot.load(made / "llama.skv", arena) as held:
            held.export_llama(made / "llama.bin")
            with held.delta(60) as delta:
                delta.save(made / "delta.skv")
    for name in ("llama", "gemma2", "mamba", "jamba", "mla", "changed"):
        (made / f"{name}.gguf").symlink_to(models.files[name])
    return made


@pytest.fixture
def call(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    return Call(folder, capsys, monkeypatch)


def norms(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    with np.errstate(all="ignore"):
        return np.sqrt((values.astype(np.float64) ** 2).sum(axis=1))


# ── save ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("args", "options"),
    [
        ([], {}),
        (["--n-ctx", "2048"], {}),
        (["--type-k", "q8_0", "--type-v", "q4_0"], {"type_k": "q8_0", "type_v": "q4_0"}),
        (["--flash-attn", "off", "--type-v", "bf16"], {"flash_attn": False, "type_v": "bf16"}),
    ],
)
def test_save_is_a_prefill_and_a_snapshot(
    call: Call, models: Models, arena: Arena, tmp_path: Path, args: list[str], options: dict[str, Any]
) -> None:
    out = tmp_path / "doc.skv"
    printed = call.ok("save", "--model", models.files["bos"], "--doc", "doc.txt", *args, "-o", out)
    model = models["bos"]
    tokens = model.tokenize(TEXT, add_special=True, parse_special=False)
    assert tokens[0] == tiny_models.BOS
    assert len(tokens) > 512  # more than a batch
    with model.context(2048, n_batch=512, **options) as ctx:
        prefill(ctx, tokens[:-1])
        ctx.decode(tokens[-1:])
        with ctx.snapshot(arena, tokens=tokens) as wanted, Snapshot.load(out, arena) as found:
            assert found.array.tobytes() == wanted.array.tobytes()
            assert np.array_equal(found.tokens, tokens)
            assert found.last_logits.tobytes() == wanted.last_logits.tobytes()
            assert found.can_restore(ctx)
            assert found.identity.compare(wanted.identity) == ([], [])
    assert f"{out}: {len(tokens):,} tokens, " in printed
    assert "prefilled in" in printed
    assert "saved in" in printed
    assert len(printed.splitlines()) == 1


def test_save_from_standard_input_as_llama_does(call: Call, models: Models, arena: Arena, tmp_path: Path) -> None:
    out = tmp_path / "doc.bin"
    done = subprocess.run(
        [*COMMAND, "snapshot", "save", "--model", models.files["llama"], "--doc", "-", "--llama", "-o", out],
        input=TEXT, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stderr == ""
    tokens = models["llama"].tokenize(TEXT, add_special=True, parse_special=False)
    with models["llama"].context(2048) as ctx, Snapshot.import_llama(out, ctx, arena) as found:
        assert np.array_equal(found.tokens, tokens)
        assert found.restore(ctx) == len(tokens)


def test_types_are_the_engine_s() -> None:
    assert set(KV_TYPES) == set(limits.KV_TYPES)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--doc", "none.txt", "-o", "x"], "none.txt: No such file"),
        (["--doc", "llama.gguf", "-o", "x"], "not UTF-8"),
        (["--doc", os.devnull, "-o", "x"], "document holds no tokens"),
        (["-o", "none/x"], "none/x: No such file or directory"),
        (["-o", "."], ".: Is a directory"),
        (["-o", os.devnull], "Not a regular file"),
        (["-o", "x", "--n-ctx", "100"], "do not fit a context of 100"),
        (["-o", "x", "--n-ctx", "100000"], "the model was trained on"),
        (["-o", "x", "--n-ctx", "0"], "--n-ctx"),
        (["-o", "x", "--type-k", "q3_k"], "--type-k"),
        (["-o", "x", "--type-v", "q8_0", "--flash-attn", "off"], "needs flash attention"),
        (["-o", "x", "--flash-attn", "maybe"], "--flash-attn"),
        ([], "Missing option '-o'"),
    ],
)
def test_save_refuses(call: Call, args: list[str], words: str) -> None:
    assert words in call.refused("save", "--model", "llama.gguf", "--doc", "doc.txt", *args)
    assert not (call.folder / "x").exists()


def test_save_refuses_a_folder_without_permission(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = os.access
    monkeypatch.setattr(os, "access", lambda path, mode, **options: mode != os.W_OK and allowed(path, mode, **options))
    assert "x: Permission denied" in call.refused("save", "--model", "llama.gguf", "--doc", "doc.txt", "-o", "x")


def test_save_interrupted_leaves_what_was_there(folder: Path, models: Models, tmp_path: Path) -> None:
    (tmp_path / "doc.txt").write_text(TEXT * 12)
    (tmp_path / "out.skv").write_text("before")
    process = subprocess.Popen(
        [*COMMAND, "snapshot", "save", "--model", models.files["deeper"], "--doc", "doc.txt", "-o", "out.skv"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    time.sleep(2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "swarmkv: interrupted\n")
    assert (tmp_path / "out.skv").read_text() == "before"
    assert sorted(os.listdir(tmp_path)) == ["doc.txt", "out.skv"]


# ── info ─────────────────────────────────────────────────────────────────────────────────────────────


def naive_rows(blob: StateBlob) -> list[tuple[str, int, list[npt.NDArray[np.float64] | None]]]:
    """Each layer's memory, number and norms of all its rows, the plain way."""
    found = []
    names = ["attention"] if len(blob.caches) == 1 else ["full", "windowed"]
    for name, cache in zip(names, blob.caches, strict=False):
        held = [stream for stream in cache if stream.layers]
        for i in range(len(held[0].layers) if held else 0):
            pairs = [stream.layers[i].dequantize() for stream in held]
            keys = np.concatenate([norms(k) for k, _ in pairs])
            values = None if pairs[0][1] is None else np.concatenate([norms(v) for _, v in pairs if v is not None])
            found.append((name, i, [keys, values]))
    if blob.recurrent:
        for i, pair in enumerate(zip(blob.recurrent.r, blob.recurrent.s, strict=True)):
            found.append(("recurrent", i, [norms(values) for values in pair]))
    return found


def check_rows(rows: list[dict[str, Any]], blob: StateBlob) -> None:
    naive = naive_rows(blob)
    assert [(row["memory"], row["layer"]) for row in rows] == [(name, i) for name, i, _ in naive]
    for row, (name, _, wanted) in zip(rows, naive, strict=True):
        for kind, numbers in zip("rs" if name == "recurrent" else "kv", wanted, strict=True):
            if numbers is None:
                assert row[kind] is None
                continue
            norm = row[kind]["norm"]
            finite = numbers[np.isfinite(numbers)]
            assert norm["not_finite"] == len(numbers) - len(finite)
            for what, of in (("mean", np.mean), ("min", np.min), ("max", np.max)):
                if not len(finite):
                    assert norm[what] is None
                else:
                    assert norm[what] == pytest.approx(of(finite), rel=1e-4)


@pytest.mark.parametrize("name", FILES)
def test_info_as_data(call: Call, arena: Arena, name: str) -> None:
    found = json.loads(call.ok("info", f"{name}.skv", "--json"))
    with Snapshot.load(call.folder / f"{name}.skv", arena) as held:
        blob, identity = held.blob, held.identity
        check_rows(found["layers"], blob)
        assert found["identity"] == identity.to_meta()
        assert found["kind"] == ("context" if held.whole else "sequence")
        assert {int(seq): of["next_position"] for seq, of in found["sequences"].items()} == held.sequences
        assert (found["n_stream"], found["architecture"]) == (blob.n_stream, blob.layout.arch)
        assert found["v_transposed"] == (blob.v_transposed if name != "without V" else None)
        sizes = found["bytes"]
        assert sizes["file"] == (call.folder / f"{name}.skv").stat().st_size
        assert sizes["state"] == held.n_bytes
        assert sum(sizes[of] for of in ("keys", "values", "recurrent", "bookkeeping")) == held.n_bytes
        k_bytes = sum(layer.k.nbytes for cache in blob.caches for stream in cache for layer in stream.layers)
        assert sizes["keys"] == k_bytes
        logits = held.last_logits if held.whole else {0: held.last_logits}
        tokens = held.tokens if held.whole else {0: held.tokens}
        for seq, of in found["sequences"].items():
            row = logits.get(int(seq))
            assert of["tokens"] == len(tokens.get(int(seq), ()))
            assert of["logits"] == (0 if row is None else len(row))
            assert of["most_likely_next"] == (None if row is None else int(row.argmax()))
        del blob
    if name == "window":
        assert found["window"] == tiny_models.SLIDING_WINDOW
        assert found["sequences"]["0"]["cells"] == [N, tiny_models.SLIDING_WINDOW]
    if name == "whole":
        assert {seq: of["cells"] for seq, of in found["sequences"].items()} == {"0": [50], "1": [20], "3": [70]}
    if name == "quantized":
        assert found["types"] == {"k": ["q8_0"], "v": ["q4_0"]}


@pytest.mark.parametrize("name", FILES)
def test_without_layers_the_rest_is_the_same(call: Call, name: str) -> None:
    full = json.loads(call.ok("info", f"{name}.skv", "--json"))
    brief = json.loads(call.ok("info", f"{name}.skv", "--json", "--no-layers"))
    assert brief["layers"] is None
    full["layers"] = None
    for of in full["sequences"].values():
        of["most_likely_next"] = None  # the row is not read
    assert brief == full


@pytest.mark.parametrize("args", [[], ["--no-layers"]])
def test_info_of_a_file_of_llama_s(call: Call, args: list[str]) -> None:
    found = json.loads(call.ok("info", "llama.bin", "--json", *args))
    ours = json.loads(call.ok("info", "llama.skv", "--json", *args))
    assert (found["format"], found["identity"]) == ("llama", None)
    assert (found["layers"], found["types"], found["n_stream"]) == (ours["layers"], ours["types"], ours["n_stream"])
    assert found["sequences"]["0"]["tokens"] == N
    assert found["bytes"]["file"] == (call.folder / "llama.bin").stat().st_size


def test_no_layers_reads_none(call: Call, tmp_path: Path) -> None:
    """However large the state is: a damaged tensor shows with layers only, damaged bookkeeping always."""
    data = bytearray((call.folder / "llama.skv").read_bytes())
    offset = skv.peek(call.folder / "llama.skv").sections[-1].offset
    data[offset + 5000] ^= 1
    (tmp_path / "damaged.skv").write_bytes(data)
    call.ok("info", tmp_path / "damaged.skv", "--no-layers")
    assert "checksum of state" in call.refused("info", tmp_path / "damaged.skv")
    data[offset] ^= 1
    (tmp_path / "damaged.skv").write_bytes(data)
    assert "magic should be" in call.refused("info", tmp_path / "damaged.skv", "--no-layers")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "llama.skv",
            ["a .skv file", "llama.gguf, fingerprint", "K f16, V f16", "by rows", "positions 0 to 95, 96 KV"],
        ),
        ("llama.skv", ["tokens and logits kept, most likely next token id", "the model's own", "1: one cache for all"]),
        ("transposed.skv", ["without flash attention", "transposed, as without flash attention"]),
        ("quantized.skv", ["K q8_0, V q4_0"]),
        ("rope.skv", ["freq_base=20000.0"]),
        ("streams.skv", ["3: one a sequence"]),
        ("window.skv", ["32 tokens that windowed layers look back", "full 0", "win 1", "96 and 32 KV cells"]),
        ("recurrent.skv", ["none kept (of a context with K f16, V f16)", "norms of recurrent rows", "recurrent 3"]),
        ("hybrid.skv", ["norms of key and value rows", "norms of recurrent rows"]),
        ("whole.skv", ["a whole context of llama: 3 sequences", "3: positions 0 to 69", "tokens not kept"]),
        ("delta.skv", ["one sequence from position 60 on", "0: positions 60 to 95, 36 KV cells"]),
        ("llama.bin", ["a sequence file of llama.cpp's", "not told by this kind of file", "tokens kept"]),
    ],
)
def test_info_for_people(call: Call, name: str, words: list[str]) -> None:
    printed = call.ok("info", name)
    for word in words:
        assert word in printed
    assert all(line == line.rstrip() for line in printed.splitlines())
    assert "norms" not in call.ok("info", name, "--no-layers")


@pytest.mark.parametrize("name", ["quantized", "window", "whole", "hybrid"])
def test_it_fits_a_terminal(folder: Path, name: str) -> None:
    code, shown = on_a_terminal(folder, "snapshot", "info", f"{name}.skv")
    assert code == 0
    lines = [line.rstrip() for line in _plain(shown).splitlines() if "━" not in line and "measuring" not in line]
    assert max(map(len, lines)) <= 80
    assert "…" not in "".join(line for line in lines if "fingerprint" not in line)


def _plain(text: str) -> str:
    import re

    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "\n")


def test_names_cannot_steer_the_terminal(call: Call, tmp_path: Path) -> None:
    contents = skv.load(call.folder / "llama.skv", lambda n: np.empty(n, np.uint8))
    contents.meta["identity"]["model"]["name"] = "\x1b[31mred\udc80[bold]"
    contents.meta["identity"]["engine"] = "a\nb"
    contents.meta["identity"]["adapters"] = [{"fingerprint": "\x07" * 8 + "c" * 20, "scale": 0.5}]
    skv.save(tmp_path / "odd.skv", contents)
    printed = call.ok("info", tmp_path / "odd.skv", "--plot", tmp_path / "odd.svg")
    assert "�[31mred�[bold]" in printed
    assert "c… × 0.5" in printed
    assert not {"\x1b", "\x07"} & set(printed)
    assert json.loads(call.ok("info", tmp_path / "odd.skv", "--json"))["identity"]["model"]["name"][-1] == "]"


def test_what_is_not_finite_is_told(call: Call, arena: Arena, tmp_path: Path) -> None:
    with Snapshot.load(call.folder / "llama.skv", arena) as held:
        blob = parse(held.array.copy())
        blob.layers[1].k[7, 3] = np.nan
        blob.layers[1].v[:, 0] = np.inf
        record = replace(held._record, layout=blob.layout)
        skv.save(tmp_path / "nan.skv", record.contents(blob.data))
    found = json.loads(call.ok("info", tmp_path / "nan.skv", "--json"))
    check_rows(found["layers"], blob)
    assert found["layers"][1]["v"]["norm"] == {"mean": None, "min": None, "max": None, "not_finite": N}
    printed = call.ok("info", tmp_path / "nan.skv", "--plot", tmp_path / "nan.png")
    assert f"{N + 1} rows hold infinities" in printed
    assert " – " in printed


@pytest.mark.parametrize("name", every_layout())
def test_every_layout_is_measured(name: str) -> None:
    """Random bytes, so that infinities and numbers too large to square are among them."""
    state = every_layout()[name]
    data = np.frombuffer(state.encode(), np.uint8)
    layout = read_layout(data, state.parts)
    record = Record(layout, UNKNOWN, {}, {})
    opened = inspection.Opened("x", "skv", len(data), record, data, {}, {})
    rows, grids = inspection.measure(opened, grids=True)
    check_rows([row.to_dict() for row in rows], StateBlob(layout, data))
    sizes = inspection.describe(opened, rows)["bytes"]
    assert sizes["state"] - sizes["bookkeeping"] == int(state.is_data().sum())
    json.dumps(inspection.describe(opened, rows), allow_nan=False)
    assert all(grid.end == layout.sequences[grid.seq] for grid in grids)
    if grids:
        draw_to_canvas(inspection.figure(rows, grids, name))


@pytest.mark.parametrize("piece", [1, 100, 1000])
@pytest.mark.parametrize("name", ["llama", "transposed", "quantized", "bf16", "whole streams"])
def test_pieces_of_any_size_give_the_same_norms(
    call: Call, monkeypatch: pytest.MonkeyPatch, name: str, piece: int
) -> None:
    monkeypatch.setattr(inspection, "_PIECE", piece)
    found = inspection.read(f"{name}.skv")
    rows, _ = inspection.measure(found)
    check_rows([row.to_dict() for row in rows], found.blob)


def test_progress_ends_at_the_number_of_layers(call: Call) -> None:
    told: list[tuple[int, int]] = []
    opened = inspection.read("whole streams.skv")
    inspection.measure(opened, on_progress=lambda done, total: told.append((done, total)))
    assert told == [(i, 12) for i in range(1, 13)]  # four layers in each of three streams


def test_memory_that_is_not_there_is_refused() -> None:
    with pytest.raises(HostMemoryError) as caught:
        inspection._memory(1 << 60)
    assert caught.value.required == 1 << 60


# ── the picture ──────────────────────────────────────────────────────────────────────────────────────


def draw_to_canvas(figure: Any) -> Any:
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return canvas.get_renderer()


def texts(figure: Any) -> list[Any]:
    """Everything written in a picture: titles, labels, the ticks that are in sight."""
    found = [figure._suptitle]
    for ax in figure.axes:
        found += [ax.title, ax.xaxis.label, ax.yaxis.label]
        for axis in (ax.xaxis, ax.yaxis):
            low, high = sorted(axis.get_view_interval())
            ticks = zip(axis.get_major_ticks(), axis.get_majorticklocs(), strict=True)
            found += [label for tick, at in ticks if low <= at <= high for label in (tick.label1, tick.label2)]
    return [text for text in found if text.get_visible() and text.get_text()]


def words_in(figure: Any) -> str:
    return "\n".join(text.get_text() for text in texts(figure))


@pytest.mark.parametrize("name", ["llama", "transposed", "window", "hybrid", "without V", "whole", "quantized"])
def test_the_maps_show_every_norm(call: Call, arena: Arena, name: str) -> None:
    opened = inspection.read(f"{name}.skv")
    rows, grids = inspection.measure(opened, grids=True)
    rows = [row for row in rows if row.memory != "recurrent"]
    figure = inspection.figure(rows, grids, "title")
    draw_to_canvas(figure)
    blob = opened.blob
    images = [ax.images[0] for ax in figure.axes if ax.images]
    kinds = 1 if name == "without V" else 2
    assert len(images) == kinds * len(grids)
    for image, (grid, which) in zip(images, [(g, w) for g in grids for w in range(kinds)], strict=True):
        shown = image.get_array().filled(np.nan)
        wanted, at = np.full(shown.shape, np.nan), 0
        for cache in blob.caches:
            n_layers = max(len(stream.layers) for stream in cache)
            for stream in cache:
                for i, layer in enumerate(stream.layers):
                    mine = stream.seq_id == grid.seq
                    wanted[at + i, stream.pos[mine]] = norms(layer.dequantize()[which])[mine]
            at += n_layers
        assert shown.shape == (len(rows), opened.record.layout.sequences[grid.seq])
        assert np.allclose(shown, wanted, rtol=1e-3, equal_nan=True)
        assert image.get_extent() == [-0.5, shown.shape[1] - 0.5, shown.shape[0] - 0.5, -0.5]


@pytest.mark.parametrize("name", ["llama", "window", "whole", "without V"])
def test_the_picture_is_labelled_and_nothing_overlaps(call: Call, name: str) -> None:
    opened = inspection.read(f"{name}.skv")
    rows, grids = inspection.measure(opened, grids=True)
    figure = inspection.figure(rows, grids, f"{name}.skv\n$a model$, {'many words ' * 4}")
    renderer = draw_to_canvas(figure)
    seen = words_in(figure)
    for words in ("position (tokens)", "layer", "L2 norm of the key row", "Keys"):
        assert words in seen
    assert ("L2 norm of the value row" in seen) is (name != "without V")
    assert ("grey: not held" in seen) is (name == "window")
    assert ("Keys of sequence 3" in seen) is (name == "whole")
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in texts(figure)]
    assert len(boxes) > 8
    page = figure.bbox
    for i, (text, box) in enumerate(boxes):
        assert page.x0 <= box.x0 <= box.x1 <= page.x1, text
        assert page.y0 <= box.y0 <= box.y1 <= page.y1, text
        for other, another in boxes[i + 1 :]:
            assert not box.overlaps(another), (text, other)


def test_a_long_sequence_is_drawn_in_fewer_columns(call: Call) -> None:
    n = 2 * inspection.MAX_COLUMNS + 3
    grid = inspection.Grid(0, 5, 5 + n, n_rows=1)
    assert (grid.width, grid.n_columns) == (3, -(-n // 3))
    numbers = np.arange(n, dtype=np.float32)
    numbers[4] = np.inf
    order = np.random.default_rng(0).permutation(n)
    grid.add(0, 0, (order + 5).astype(np.int32), numbers[order])
    (row,) = grid.map(0)
    assert row[0] == 1
    assert row[1] == 4  # of 3 and 5; the infinite one does not count
    assert row[2] == 7
    assert np.isnan(grid.map(1)).all()
    opened = inspection.read("llama.skv")
    rows, _ = inspection.measure(opened)
    long = inspection.Grid(0, 5, 5 + n, n_rows=len(rows))
    assert "mean of 3 a column" in words_in(inspection.figure(rows, [long], "title"))


def test_the_longest_sequences_are_drawn(call: Call, models: Models, arena: Arena, tmp_path: Path) -> None:
    with new_context(models["llama"], 1024, 8) as ctx:
        for seq, n in enumerate((10, 60, 20, 50, 30, 40, 5)):
            ctx.decode(TOKENS[:n], seq=seq)
        with ctx.snapshot(arena, None) as held:
            held.save(tmp_path / "many.skv")
    _, grids = inspection.measure(inspection.read(str(tmp_path / "many.skv")), grids=True)
    assert [grid.seq for grid in grids] == [1, 3, 4, 5]
    call.ok("info", tmp_path / "many.skv", "--plot", tmp_path / "many.svg")
    assert "7 sequences" in call.ok("info", tmp_path / "many.skv")
    assert "5: positions" in call.ok("info", tmp_path / "many.skv")


@pytest.mark.parametrize(
    ("name", "drawn", "words"),
    [
        ("llama.skv", [0], "llama.skv\nllama.gguf, 96 tokens"),
        ("delta.skv", [0], "delta.skv\nllama.gguf, 36 tokens"),
        ("llama.bin", [0], "llama.bin\n96 tokens"),
        ("whole.skv", [0, 1, 3], "whole.skv\nllama.gguf, 3 sequences"),
        ("whole.skv", [0, 3], "whole.skv\nllama.gguf, the 2 longest of 3 sequences"),
    ],
)
def test_the_picture_s_title(call: Call, name: str, drawn: list[int], words: str) -> None:
    from swarmkv_ll.cli_snapshot import _title

    assert _title(inspection.glance(name).record, f"some/where/{name}", drawn) == words


def test_pictures_are_files(call: Call, tmp_path: Path) -> None:
    png, svg = tmp_path / "a.png", tmp_path / "b.SVG"
    png.write_text("before")
    png.chmod(0o640)
    call.ok("info", "llama.skv", "--plot", png)
    assert png.read_bytes().startswith(b"\x89PNG\r\n")
    assert png.stat().st_mode & 0o777 == 0o640
    assert "norms" not in call.ok("info", "llama.skv", "--plot", svg, "--no-layers")
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    first = svg.read_bytes()
    call.ok("info", "llama.skv", "--plot", svg, "--json")
    assert svg.read_bytes() == first  # the same picture is the same file


@pytest.mark.parametrize(
    ("file", "plot", "words"),
    [
        ("llama.skv", "a.jpg", "should end in .png or .svg"),
        ("llama.skv", "none/a.png", "none/a.png: No such file"),
        ("recurrent.skv", "a.png", "no keys and values by token position"),
    ],
)
def test_what_cannot_be_drawn(call: Call, file: str, plot: str, words: str) -> None:
    assert words in call.refused("info", file, "--plot", plot)


def test_draw_checks_its_file_name(call: Call) -> None:
    rows, grids = inspection.measure(inspection.read("llama.skv"), grids=True)
    with pytest.raises(InvalidArgumentError):
        inspection.draw(rows, grids, "a.gif", "")


# ── without an engine, without extras ────────────────────────────────────────────────────────────────

ALONE = """
    import sys
    for name in sys.argv[1].split(","):
        if name:
            sys.modules[name] = None
    from swarmkv_ll.cli import main
    try:
        main(["snapshot", *sys.argv[2:]])
    finally:
        with open("/proc/self/maps") as maps:
            print("mapped:", [line for line in maps if "libllama" in line or "libggml" in line], file=sys.stderr)
        print("loaded:", sorted({"swarmkv_ll.ffi", "_cffi_backend"} & sys.modules.keys()), file=sys.stderr)
"""


@pytest.mark.parametrize(
    "args",
    [
        ["info", "{0}/quantized.skv"],
        ["info", "{0}/hybrid.skv", "--json"],
        ["info", "{0}/whole.skv", "--plot", "{1}/a.png"],
        ["info", "{0}/llama.bin", "--no-layers"],
        ["slice", "{0}/llama.skv", "40", "-o", "{1}/a.skv"],
        ["convert", "{0}/whole.skv", "--n-stream", "4", "-o", "{1}/a.skv"],
        ["convert", "{0}/llama.skv", "--to", "llama", "-o", "{1}/a.bin"],
        ["--help"],
        ["save", "--help"],
    ],
)
def test_no_engine_is_needed(folder: Path, tmp_path: Path, args: list[str]) -> None:
    done = run_python(ALONE, "swarmkv_ll._llama", *(arg.format(folder, tmp_path) for arg in args))
    assert (done.returncode, done.stderr) == (0, "mapped: []\nloaded: []\n")
    assert done.stdout


@pytest.mark.parametrize(
    ("missing", "args", "package"),
    [
        ("matplotlib", ["info", "{0}/llama.skv", "--plot", "{1}/a.png"], "matplotlib"),
        ("gguf", ["info", "{0}/quantized.skv"], "gguf"),
        ("matplotlib,gguf", ["info", "{0}/bf16.skv"], None),
        ("matplotlib,gguf", ["info", "{0}/quantized.skv", "--no-layers"], None),
    ],
)
def test_a_missing_package_is_named(
    folder: Path, tmp_path: Path, missing: str, args: list[str], package: str | None
) -> None:
    done = run_python(ALONE, missing, *(arg.format(folder, tmp_path) for arg in args))
    assert done.returncode == (2 if package else 0)
    if package:
        assert done.stdout == ""
        wanted = f"swarmkv: this needs {package}: pip install {package}"
        assert done.stderr.splitlines()[0] == wanted


def test_help_loads_nothing_heavy() -> None:
    code = """
        import sys
        from swarmkv_ll.cli import main
        try:
            main(["--help"])
        finally:
            print(sorted({"numpy", "matplotlib", "gguf", "xxhash", "_cffi_backend"} & sys.modules.keys()))
    """
    done = run_python(code)
    assert "snapshot" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("command", ["save", "info", "restore-check", "slice", "convert"])
def test_help_has_an_example(call: Call, command: str) -> None:
    printed = " ".join(call.ok(command, "--help").split())
    assert f"For example: swarmkv snapshot {command} " in printed
    short = next(line for line in call.ok("--help").splitlines() if line.startswith(f"  {command} "))
    assert not short.endswith("...")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["info", "none.skv"], "none.skv: No such file"),
        (["info", "."], ".: Is a directory"),
        (["info", os.devnull], "Not a regular file"),
        (["info", "doc.txt"], "doc.txt, byte 0: magic should be that of a .skv file, or of a sequence file"),
        (["info", "empty"], "is nothing"),
        (["info", "cut.skv"], "cut short"),
        (["info", "cut.bin"], "cut.bin, byte"),
        (["info"], "Missing argument 'FILE'"),
        (["slice", "none.skv", "5", "-o", "x"], "none.skv: No such file"),
        (["slice", "llama.skv", "0", "-o", "x"], "N"),
        (["slice", "llama.skv", "97", "-o", "x"], "N should be 1 to 96, the tokens in llama.skv; is 97"),
        (["slice", "llama.skv", "5"], "Missing option '-o'"),
        (["slice", "llama.skv", "5", "-o", "none/x"], "none/x: No such file"),
        (["slice", "llama.skv", "5", "-o", "."], ".: Is a directory"),
        (["slice", "recurrent.skv", "5", "-o", "x"], "recurrent state"),
        (["slice", "window.skv", "70", "-o", "x"], "sliding window"),
        (["slice", "whole.skv", "5", "-o", "x"], "extract a sequence first"),
        (["slice", "delta.skv", "60", "-o", "x"], "should be above 60"),
        (["convert", "llama.skv", "-o", "x"], "nothing to convert"),
        (["convert", "whole.skv", "--n-stream", "3", "-o", "x"], "sequence 3 has no stream"),
        (["convert", "quantized.skv", "--v-transposed", "-o", "x"], "q4_0 cannot be transposed"),
        (["convert", "whole.skv", "--to", "llama", "-o", "x"], "only one sequence's whole state"),
        (["convert", "delta.skv", "--to", "llama", "-o", "x"], "only one sequence's whole state"),
        (["convert", "llama.bin", "--to", "skv", "-o", "x"], "does not tell what it was computed with"),
        (["convert", "llama.skv", "--to", "gguf", "-o", "x"], "--to"),
        (["restore-check", "none.skv"], "none.skv: No such file"),
        (["restore-check", "doc.txt"], "magic"),
        (["restore-check", "llama.skv", "--model", "none.gguf"], "none.gguf: No such file"),
        (["restore-check", "llama.skv", "--n-seq-max", "999", "--model", "llama.gguf"], "n_seq_max"),
        (["nonsense"], "No such command"),
    ],
)
def test_an_error_is_one_line(call: Call, args: list[str], words: str) -> None:
    (call.folder / "empty").touch()
    (call.folder / "cut.skv").write_bytes((call.folder / "llama.skv").read_bytes()[:-4096])
    (call.folder / "cut.bin").write_bytes((call.folder / "llama.bin").read_bytes()[:-100])
    assert words in call.refused(*args)
    assert not (call.folder / "x").exists()


# ── slice, convert ───────────────────────────────────────────────────────────────────────────────────


def same(path: Path, wanted: Snapshot, arena: Arena) -> None:
    """Whether a file holds just what the library's own snapshot does."""
    with Snapshot.load(path, arena) as found:
        assert found.to_bytes() == wanted.to_bytes()


@pytest.mark.parametrize("name", ["llama", "transposed", "bf16", "quantized", "streams", "rope"])
@pytest.mark.parametrize("n", [1, 40, N])
def test_slice(call: Call, arena: Arena, tmp_path: Path, name: str, n: int) -> None:
    printed = call.ok("slice", f"{name}.skv", n, "-o", tmp_path / "out.skv")
    assert f"{n} of {N} tokens" in printed
    with Snapshot.load(call.folder / f"{name}.skv", arena) as held, held.slice(n) as wanted:
        assert (wanted.last_logits is None) == (n < N)
        same(tmp_path / "out.skv", wanted, arena)


def test_slice_of_a_delta(call: Call, arena: Arena, tmp_path: Path) -> None:
    call.ok("slice", "delta.skv", 80, "-o", tmp_path / "out.skv")
    with Snapshot.load(call.folder / "delta.skv", arena) as held, held.slice(80) as wanted:
        assert wanted.begin == 60
        same(tmp_path / "out.skv", wanted, arena)


@pytest.mark.parametrize(
    ("name", "args", "options"),
    [
        ("llama", ["--n-stream", "4"], {"n_stream": 4}),
        ("llama", ["--v-transposed"], {"v_transposed": True}),
        ("llama", ["--n-stream", "2", "--v-transposed"], {"n_stream": 2, "v_transposed": True}),
        ("transposed", ["--no-v-transposed"], {"v_transposed": False}),
        ("streams", ["--n-stream", "1"], {"n_stream": 1}),
        ("window", ["--n-stream", "3"], {"n_stream": 3}),
        ("hybrid", ["--n-stream", "3"], {"n_stream": 3}),
        ("recurrent", ["--n-stream", "3"], {"n_stream": 3}),
        ("without V", ["--v-transposed"], {"v_transposed": True}),
        ("whole", ["--n-stream", "4"], {"n_stream": 4}),
        ("whole streams", ["--n-stream", "1", "--no-v-transposed"], {"n_stream": 1, "v_transposed": False}),
        ("llama", ["--to", "skv"], {}),
    ],
)
def test_convert(call: Call, arena: Arena, tmp_path: Path, name: str, args: list[str], options: dict[str, Any]) -> None:
    printed = call.ok("convert", f"{name}.skv", *args, "-o", tmp_path / "out.skv")
    assert (", V " in printed) is (name not in ("recurrent", "without V"))
    with Snapshot.load(call.folder / f"{name}.skv", arena) as held, held.convert(**options) as wanted:
        same(tmp_path / "out.skv", wanted, arena)


@pytest.mark.parametrize("name", ["llama", "streams", "transposed", "window", "recurrent"])
def test_convert_to_a_file_of_llama_s(call: Call, arena: Arena, tmp_path: Path, name: str) -> None:
    printed = call.ok("convert", f"{name}.skv", "--to", "llama", "-o", tmp_path / "out.bin")
    assert f"a sequence file of llama.cpp's, {N} tokens" in printed
    with Snapshot.load(call.folder / f"{name}.skv", arena) as held:
        held.export_llama(tmp_path / "wanted.bin")
    assert (tmp_path / "out.bin").read_bytes() == (tmp_path / "wanted.bin").read_bytes()


def test_files_of_llama_s_are_edited_too(call: Call, arena: Arena, tmp_path: Path) -> None:
    """They stay what they are, and mean the same as ours with the same edit."""
    call.ok("slice", "llama.bin", 40, "-o", tmp_path / "out.bin")
    printed = call.ok("convert", tmp_path / "out.bin", "--n-stream", "3", "--v-transposed", "-o", tmp_path / "out.bin")
    assert "40 tokens, 3 streams, V transposed" in printed
    with (
        Snapshot.load(call.folder / "llama.skv", arena) as held,
        held.slice(40) as some,
        some.convert(n_stream=3, v_transposed=True) as wanted,
    ):
        wanted.export_llama(tmp_path / "wanted.bin")
    assert (tmp_path / "out.bin").read_bytes() == (tmp_path / "wanted.bin").read_bytes()


@pytest.mark.parametrize("args", [["slice", "f", 40], ["convert", "f", "--n-stream", 2]])
def test_out_may_be_the_file_itself(
    call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, args: list[Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "f").write_bytes((call.folder / "llama.skv").read_bytes())
    (tmp_path / "f").chmod(0o600)
    call.ok(*args, "-o", "elsewhere")
    call.ok(*args, "-o", "f")
    assert (tmp_path / "f").read_bytes() == (tmp_path / "elsewhere").read_bytes()
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o600
    assert sorted(os.listdir(tmp_path)) == ["elsewhere", "f"]


def test_a_file_is_not_replaced_by_one_that_cannot_come_back(call: Call, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(before := (call.folder / "llama.skv").read_bytes())
    assert "cannot come back" in call.refused("convert", tmp_path / "f", "--to", "llama", "-o", tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == before


def test_what_was_there_stays_after_an_error(call: Call, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("before")
    call.refused("slice", "llama.skv", 500, "-o", tmp_path / "out")
    call.refused("convert", "whole.skv", "--to", "llama", "-o", tmp_path / "out")
    call.refused("info", "recurrent.skv", "--plot", tmp_path / "out")
    assert (tmp_path / "out").read_text() == "before"


def test_a_sliced_file_goes_on_as_if_it_had_been_prefilled(
    call: Call, models: Models, arena: Arena, tmp_path: Path
) -> None:
    call.ok("slice", "llama.skv", 64, "-o", tmp_path / "out.skv")
    with new_context(models["llama"]) as ctx, Snapshot.load(tmp_path / "out.skv", arena) as held:
        ctx.decode(TOKENS[:64])
        ctx.decode(TOKENS[64:80])
        wanted = ctx.logits().tobytes()
        held.restore(ctx)
        ctx.decode(TOKENS[64:80])
        assert ctx.logits().tobytes() == wanted


# ── the edits that snapshots and these commands share ────────────────────────────────────────────────


def opened(path: Path) -> tuple[Record, npt.NDArray[np.uint8]]:
    found = inspection.read(str(path))
    return found.record, found.state


EDITS: dict[str, tuple[str, Callable[..., Any], Callable[[Snapshot], Snapshot]]] = {
    "slice": ("llama", lambda r, s: r.slice(s, 30), lambda held: held.slice(30)),
    "delta": ("llama", lambda r, s: r.delta(s, 30), lambda held: held.delta(30)),
    "convert": ("llama", lambda r, s: r.convert(s, n_stream=5), lambda held: held.convert(n_stream=5)),
    "extract": ("whole", lambda r, s: r.extract(s, 3), lambda held: held.extract(3)),
    "extract without tokens": ("whole", lambda r, s: r.extract(s, 1), lambda held: held.extract(1)),
}


@pytest.mark.parametrize("name", EDITS)
def test_records_and_snapshots_are_edited_alike(folder: Path, arena: Arena, name: str) -> None:
    file, edit, edit_snapshot = EDITS[name]
    record, state = opened(folder / f"{file}.skv")
    planned = edit(record, state)
    made, data = planned.write()
    assert len(data) == planned.n_bytes
    with Snapshot.load(folder / f"{file}.skv", arena) as held, edit_snapshot(held) as wanted:
        assert data.tobytes() == wanted.array.tobytes()
        assert made.contents(data).meta == wanted._record.contents(wanted.array).meta
        for mine, theirs in ((made.tokens, wanted._record.tokens), (made.logits, wanted._record.logits)):
            assert mine.keys() == theirs.keys()
            assert all(mine[seq].tobytes() == theirs[seq].tobytes() for seq in mine)


def test_records_are_appended(folder: Path) -> None:
    record, state = opened(folder / "llama.skv")
    base, head = record.slice(state, 60).write()
    tail, rest = record.delta(state, 60).write()
    made, data = base.append(head, tail, rest).write()
    assert data.tobytes() == state.tobytes()
    assert (made.begin, made.tokens[0].tobytes()) == (0, TOKENS.tobytes())
    assert made.logits[0].tobytes() == record.logits[0].tobytes()
    other = TOKENS.copy()
    other[3] = 0
    for wrong, words in (
        (lambda: base.append(head, record, state), "a delta from 60 on is needed"),
        (lambda: record.append(state, tail, rest), "a delta from 96 on is needed"),
        (lambda: replace(base, tokens={}).append(head, tail, rest), "have to be known"),
        (lambda: base.append(head, replace(tail, tokens={0: other}), rest), "another text: token 3"),
        (lambda: replace(base, identity=UNKNOWN).append(head, tail, rest), "cannot restore"),
    ):
        with pytest.raises(Exception, match=words):
            wrong()


def test_what_is_not_known_is_not_saved_as_known(folder: Path) -> None:
    record, state = opened(folder / "llama.bin")
    assert record.identity is UNKNOWN
    with pytest.raises(InvalidArgumentError, match="not known"):
        record.contents(state)


# ── restore-check ────────────────────────────────────────────────────────────────────────────────────


def check(call: Call, code: int, *args: object) -> str:
    found, printed, errors = call("restore-check", *args)
    assert (found, errors) == (code, "")
    return printed


@pytest.mark.parametrize("name", FILES)
def test_every_file_can_be_restored(call: Call, name: str) -> None:
    printed = check(call, 0, f"{name}.skv", "--model", f"{FILES[name][0]}.gguf")
    assert "done" in printed
    assert "conversions   none" in printed
    line = next(line for line in printed.splitlines() if line.startswith("logits"))
    compared = name not in ("recurrent", "hybrid", "whole hybrid")
    assert ("not compared" in line) is not compared
    if compared:
        assert "same most likely token" in line or "bit for bit" in line


def test_what_was_saved_here_is_equal_bit_for_bit(call: Call, tmp_path: Path) -> None:
    """`save` decodes the last token by itself, as the check does."""
    out = tmp_path / "doc.skv"
    call.ok("save", "--model", "llama.gguf", "--doc", "doc.txt", "-o", out)
    assert "bit for bit" in check(call, 0, out, "--model", "llama.gguf")
    assert "bit for bit" in check(call, 0, out, "--model", "llama.gguf", "--n-seq-max", "3", "--streams")
    inexact = check(call, 0, out, "--model", "llama.gguf", "--flash-attn", "off", "--allow-inexact")
    assert "gives others: at most" in inexact
    assert "logits" not in check(call, 0, out, "--model", "llama.gguf", "--quick")


def test_logits_that_differ_are_told(call: Call, arena: Arena, tmp_path: Path) -> None:
    contents = skv.load(call.folder / "llama.skv", lambda n: np.empty(n, np.uint8))
    row = contents.arrays["logits.0"]
    row[int(row.argmin())] = row.max() + 5
    row[0] = -np.inf
    skv.save(tmp_path / "other.skv", contents)
    printed = check(call, 0, tmp_path / "other.skv", "--model", "llama.gguf")
    assert "another most likely token" in printed
    assert "a larger batch" in printed


@pytest.mark.parametrize(
    ("file", "args", "words"),
    [
        ("llama.skv", ["--n-seq-max", "4", "--streams"], ["n_stream 1 → 4", "4 sequences (a cache each)"]),
        ("streams.skv", ["--unified"], ["n_stream 3 → 1", "1 sequence,"]),
        ("streams.skv", [], ["none", "3 sequences (a cache each)"]),
        ("llama.skv", ["--n-tokens", "40"], ["n_tokens 96 → 40", "not compared"]),
        ("llama.skv", ["--n-ctx", "700"], ["n_ctx 768"]),
        ("llama.skv", ["--flash-attn", "off", "--allow-inexact"], ["flash_attn True → False (inexact)"]),
        ("transposed.skv", ["--flash-attn", "on", "--allow-inexact"], ["v_transposed True → False (inexact)"]),
        ("whole.skv", ["--streams"], ["n_stream 1 → 4", "3 sequences, 140 tokens"]),
        ("whole.skv", ["--n-seq-max", "9"], ["9 sequences (one cache for all)"]),
        ("whole streams.skv", ["--unified"], ["n_stream 4 → 1"]),
        ("rope.skv", [], ["none"]),
        ("llama.bin", [], ["none", "keeps no logits"]),
    ],
)
def test_conversions_are_told(call: Call, file: str, args: list[str], words: list[str]) -> None:
    printed = check(call, 0, file, "--model", "llama.gguf", *args)
    for word in words:
        assert word in printed


@pytest.mark.parametrize(
    ("file", "args", "words"),
    [
        ("llama.skv", ["--model", "changed.gguf"], ["model should be"]),
        (
            "llama.skv",
            ["--type-k", "q8_0", "--type-v", "bf16"],
            ["type_k should be f16, is q8_0", "type_v should be f16"],
        ),
        ("llama.skv", ["--flash-attn", "off"], ["flash_attn should be True", "--allow-inexact takes it"]),
        ("llama.skv", ["--n-tokens", "97"], ["n_tokens should be 1 to 96"]),
        ("whole.skv", ["--n-seq-max", "2"], ["n_seq_max should be at least 4"]),
        ("whole.skv", ["--n-tokens", "9"], ["n_tokens should be None"]),
        ("delta.skv", [], ["first position should be 0, is 60"]),
        ("recurrent.skv", ["--model", "mamba.gguf", "--n-tokens", "9"], ["recurrent state"]),
        ("recurrent.skv", [], ["model should be"]),
        ("llama.bin", ["--model", "jamba.gguf"], ["not a state of such a model", "llama.bin, byte"]),
        ("llama.bin", ["--type-k", "f32"], ["type and row size of layer 0's K"]),
    ],
)
def test_reasons_are_told(call: Call, file: str, args: list[str], words: list[str]) -> None:
    printed = check(call, 1, file, "--model", "llama.gguf", *args)
    assert "not possible" in printed
    for word in words:
        assert word in printed


def test_a_context_too_small_is_a_reason(call: Call, models: Models, tmp_path: Path) -> None:
    out = tmp_path / "doc.skv"
    call.ok("save", "--model", "llama.gguf", "--doc", "doc.txt", "-o", out)
    assert "free KV cells should be at least" in check(call, 1, out, "--model", "llama.gguf", "--n-ctx", "256")


def test_a_damaged_file_is_an_error(call: Call, tmp_path: Path) -> None:
    data = bytearray((call.folder / "llama.skv").read_bytes())
    data[-5000] ^= 1
    (tmp_path / "damaged.skv").write_bytes(data)
    code, _, errors = call("restore-check", tmp_path / "damaged.skv", "--model", "llama.gguf")
    assert code == 2
    assert "checksum of state" in errors
    assert len(errors.splitlines()) == 1


def test_an_engine_that_refuses_is_told(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    from swarmkv_ll.errors import SnapshotError

    def refuse(self: Snapshot, *_: object, **__: object) -> None:
        raise SnapshotError("no")

    monkeypatch.setattr(Snapshot, "restore", refuse)
    assert "failed: no" in check(call, 1, "llama.skv", "--model", "llama.gguf")


def test_exit_codes_of_the_process(folder: Path) -> None:
    codes = [
        subprocess.run(
            [sys.executable, "-m", "swarmkv_ll", "snapshot", "restore-check", "llama.skv", "--model", f"{model}.gguf"],
            cwd=folder, capture_output=True, timeout=60, check=False,
        ).returncode
        for model in ("llama", "changed", "none")
    ]  # fmt: skip
    assert codes == [0, 1, 2]
