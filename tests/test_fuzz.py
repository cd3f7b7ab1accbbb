"""Damaged and hostile inputs: the fuzzer over many cases, that it would notice, and what it has found before."""

from __future__ import annotations

import io
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import fuzz_inputs as inputs
import numpy as np
import pytest
from handmade import every_layout
from helpers import (
    ATTENTION,
    BRANCH,
    HYBRID,
    SLIDING,
    TESTS,
    Models,
    all_logits,
    identical,
    new_context,
    text_tokens,
    uninterrupted,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmkv_ll import Arena, Rope, Snapshot, blob
from swarmkv_ll.errors import (
    ArenaExhaustedError,
    BlobError,
    IncompatibleSnapshotError,
    InvalidArgumentError,
    SnapshotFileError,
)

TOKENS = text_tokens(40)


def fuzz(*arguments: object) -> dict[str, Any]:
    """Run the fuzzer; its figures."""
    command = [sys.executable, TESTS / "fuzz.py", "--json", *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (TESTS.parent, TESTS)))}
    done = subprocess.run(
        [*map(str, command)], env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == bool(found["findings"]), done.stderr
    return found


def told(found: dict[str, Any]) -> str:
    """Findings, with the commands that repeat them."""
    return "\n\n".join(
        "\n".join([f"{one['reproduce']}  ({one.get('target')})", *one.get("notes", []), one["traceback"]])
        for one in found["findings"]
    )


# ── the fuzzer ───────────────────────────────────────────────────────────────────────────────────────


def test_twenty_thousand_cases() -> None:
    found = fuzz("--cases", 20_000, "--jobs", 2)
    assert not found["findings"], told(found)
    assert (found["cases"], found["aborts"], found["hangs"]) == (20_000, 0, 0)
    outcomes = found["outcomes"]
    for door in ("state", "beside", "file", "llama"):  # each opens for some and not for most
        assert outcomes[f"{door}: SnapshotFileError"] > outcomes[f"{door}: read"] > 100
        assert outcomes[f"{door}, restore: restored"] > 20
        assert outcomes[f"{door}, restore: IncompatibleSnapshotError"] > 20
    assert outcomes["table: SnapshotFileError"] > 500
    assert outcomes["tampered, restore: SnapshotCorruptError"] > 200
    assert outcomes["parse: taken"] > 1000
    for edit in ("slice", "delta", "convert", "extract", "append"):
        assert outcomes[f"{edit}: planned"] > 50
        assert outcomes[f"{edit}: InvalidArgumentError"] > 50


@pytest.mark.parametrize(
    ("broken", "notices"),
    [
        ("shape", "SnapshotError: the engine read 0 of"),
        ("bookkeeping", ""),  # anything: what the engine makes of it
        ("typed", "ArithmeticError"),
        ("huge", "MemoryError|bytes were allocated to read"),
        ("overrun", "wrote beyond its"),
        ("touched", "a refused restore changed positions"),
        ("leak", "leases were kept"),
        ("abort", "the process died: signal 6 .SIGABRT."),
        ("hang", "no end after"),
    ],
)
def test_the_fuzzer_notices(broken: str, notices: str) -> None:
    found = fuzz("--cases", 640, "--jobs", 1, "--break", broken, "--most-findings", 1, "--hang-after", 8)
    assert found["findings"]
    first = found["findings"][0]
    assert any(notice in first["error"].replace("(", ".").replace(")", ".") for notice in notices.split("|"))
    assert first["reproduce"] == f"python tests/fuzz.py --seed 1 --only {first['only']}"
    if broken == "shape":
        again = fuzz("--only", first["only"], "--break", broken)
        assert [one["error"] for one in again["findings"]] == [first["error"]]


def test_a_seed_says_everything() -> None:
    first, again, other = (fuzz("--cases", 192, "--jobs", 1, "--seed", seed) for seed in (5, 5, 6))
    assert first["outcomes"] == again["outcomes"]
    assert first["outcomes"] != other["outcomes"]


@pytest.mark.parametrize("name", list(every_layout()))
def test_states_are_taken_apart_and_put_together(name: str) -> None:
    state = every_layout()[name]
    data = state.encode()
    plain = inputs.take_apart(data, blob.parse(data, state.parts).layout)
    assert plain.encode() == data
    assert plain.copy().encode() == data
    copy = plain.copy()
    for seed in range(30):
        inputs.rebuild(Random(seed), copy)
    assert copy.encode() == data  # what is changed is a copy


# ── files, drawn by Hypothesis ───────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def arena() -> Iterator[Arena]:
    with Arena(1 << 20) as made:
        yield made
        made.check_integrity()


@pytest.fixture(scope="module")
def snapshot(models: Models, arena: Arena) -> Iterator[Snapshot]:
    with new_context(models[ATTENTION]) as ctx:
        ctx.decode(TOKENS)
        with ctx.snapshot(arena, tokens=TOKENS) as taken:
            yield taken


def refused(data: bytes, arena: Arena) -> bool:
    """Whether it is, by the errors that are documented, with nothing taken."""
    before = len(arena._leases)
    try:
        Snapshot.from_bytes(data, arena).release()
        return False
    except (SnapshotFileError, ArenaExhaustedError):
        return True
    finally:
        assert len(arena._leases) == before


def test_files_are_sealed_as_the_library_seals_them(snapshot: Snapshot) -> None:
    contents = snapshot._record.contents(np.frombuffer(snapshot.array.tobytes(), np.uint8))
    sections = inputs.sections_of(contents.meta, dict(contents.arrays), contents.state.tobytes())
    sections[0] = (*sections[0][:2], sections[0][2].replace(b": ", b":").replace(b", ", b","))
    assert inputs.seal(sections) == snapshot.to_bytes()


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_are_refused(arena: Arena, data: bytes) -> None:
    assert refused(data, arena)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_damage_of_a_file_is_noticed(snapshot: Snapshot, arena: Arena, data: st.DataObject) -> None:
    file = snapshot.to_bytes()
    at = data.draw(st.integers(0, len(file)))
    end = data.draw(st.integers(at, min(len(file), at + 64)))
    new = data.draw(st.binary(max_size=64))
    assert refused(file[:at] + new + file[end:], arena) == (new != file[at:end])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=5,
)
KEYS = ["kind", "sequences", "begin", "window", "parts", "identity", "identity.model", "identity.rope", "parts.has_v"]
KEYS += ["identity.adapters", "identity.rotation", "identity.rope.freq_base", "parts.n_attention", "sequences.0"]


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(KEYS), st.one_of(JSON, st.just(10**400), st.just(2**64)))
def test_any_meta_is_taken_or_refused(snapshot: Snapshot, arena: Arena, key: str, value: Any) -> None:
    contents = snapshot._record.contents(np.frombuffer(snapshot.array.tobytes(), np.uint8))
    meta = json.loads(json.dumps(contents.meta))
    holder = meta
    for name in key.split(".")[:-1]:
        holder = holder[name]
    was, holder[key.rpartition(".")[2]] = holder[key.rpartition(".")[2]], value
    sections = inputs.sections_of(meta, dict(contents.arrays), contents.state.tobytes())
    same_kind = type(was) is type(value) or was == value or key == "identity.rope.freq_base"
    assert refused(inputs.seal(sections), arena) or same_kind


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([*"kpxkp"]), st.integers(0, 10**6), st.binary(min_size=1, max_size=8)), max_size=3
    )
)
def test_what_is_taken_of_a_damaged_state_can_be_looked_at(
    snapshot: Snapshot, changes: list[tuple[str, int, bytes]]
) -> None:
    """Bookkeeping or values changed in place: every view of what still parses lies within the buffer."""
    data = bytearray(snapshot.array.tobytes())
    fields = inputs.fields_of_blob(bytes(data), snapshot._record.layout)
    for kind, at, new in changes:
        places = {"k": fields.few, "p": fields.many}.get(kind)
        offset = places[at % len(places)][0] if places else at % len(data)
        data[offset : offset + len(new)] = new[: len(data) - offset]
    try:
        found = blob.parse(bytes(data))
    except BlobError:
        return
    for layer in found.layers:
        assert layer.v is not None
        assert layer.k.nbytes + layer.v.nbytes <= len(data)
        layer.k.tobytes(), layer.v.tobytes()


# ── found by fuzzing ─────────────────────────────────────────────────────────────────────────────────


def without_recurrent_cells(plain: inputs.Plain) -> None:
    memory = plain.recurrent
    assert memory is not None
    memory.pos, memory.owners = [], []
    for plane in memory.planes:
        plane.rows = plane.rows[:0]


def with_extensions(plain: inputs.Plain) -> None:
    plain.extension = True


def with_another_cache(plain: inputs.Plain) -> None:
    plain.caches = plain.copy().caches * 2


def with_one_cache(plain: inputs.Plain) -> None:
    plain.caches = plain.caches[:1]


def without_recurrent_memory(plain: inputs.Plain) -> None:
    plain.recurrent = None


def of_more_layers(plain: inputs.Plain) -> None:
    assert plain.recurrent is not None
    plain.recurrent.n_layer += 1


def of_another_architecture(plain: inputs.Plain) -> None:
    plain.head = struct.pack("<I", 5) + b"other"


def emptied(cache: int) -> Callable[[inputs.Plain], None]:
    def empty(plain: inputs.Plain) -> None:
        plain.caches[cache] = [None] * len(plain.caches[cache])

    return empty


def moved_on(cache: int) -> Callable[[inputs.Plain], None]:
    def move(plain: inputs.Plain) -> None:
        for stream in plain.caches[cache]:
            if stream:
                stream.pos = [pos + 7 for pos in stream.pos]

    return move


@pytest.mark.parametrize(
    ("kind", "whole", "change", "field"),
    [
        (ATTENTION, False, with_extensions, "memories"),
        (ATTENTION, True, with_extensions, "memories"),
        (ATTENTION, False, with_another_cache, "memories"),
        (SLIDING, False, with_one_cache, "memories"),
        (HYBRID, False, without_recurrent_memory, "memories"),
        (HYBRID, False, of_more_layers, "layers of the model"),
        (ATTENTION, True, of_another_architecture, "architecture"),
        (HYBRID, True, of_another_architecture, "architecture"),
        (SLIDING, False, emptied(0), "end of each sequence"),
        (SLIDING, False, emptied(1), "end of each sequence"),
        (SLIDING, True, emptied(1), "end of each sequence"),
        (SLIDING, False, moved_on(0), "end of each sequence"),
        (HYBRID, False, moved_on(0), "end of each sequence"),
        (HYBRID, False, without_recurrent_cells, "end of each sequence"),
        (HYBRID, True, without_recurrent_cells, "end of each sequence"),
    ],
)
def test_what_only_the_engine_would_have_refused(
    models: Models, arena: Arena, kind: str, whole: bool, change: Callable[[inputs.Plain], None], field: str
) -> None:
    """A file that says of itself what is right, around a state that is not: before, the sequence was lost, or an answer
    wrong."""
    model = models[kind]
    with new_context(model, n_seq_max=2) as ctx:
        ctx.decode(TOKENS)
        with ctx.snapshot(arena, None if whole else 0) as good:
            layout = good._record.layout
            plain = inputs.take_apart(good.array.tobytes(), layout)
            change(plain)
            state = plain.encode()
            contents = good._record.contents(np.frombuffer(good.array.tobytes(), np.uint8))
        parts = plain.parts
        found = blob.parse(state, parts).layout
        meta = contents.meta | {
            "parts": {name: getattr(parts, name) for name in contents.meta["parts"]},
            "sequences": {str(seq): end for seq, end in found.sequences.items()},
        }
        with Snapshot.from_bytes(inputs.seal(inputs.sections_of(meta, {}, state)), arena) as odd:
            can = odd.can_restore(ctx, allow_inexact=True)
            assert any(reason.field.startswith(field) for reason in can.reasons), str(can)
            with pytest.raises(IncompatibleSnapshotError, match=field):
                odd.restore(ctx, allow_inexact=True)
        assert identical(all_logits(ctx, BRANCH), uninterrupted(model, TOKENS, BRANCH))


def test_a_transposed_v_in_many_runs(models: Models, arena: Arena) -> None:
    """Two sequences token by token: each lies in more runs of cells than are copied one by one."""
    with new_context(models[ATTENTION], n_seq_max=2, flash_attn=False) as ctx:
        for i in range(70):
            ctx.decode_batch([([i], 0), ([i + 1], 1)])
        with ctx.snapshot(arena, None) as whole, whole.extract(1) as one, ctx.snapshot(arena, 1) as exported:
            assert one.array.tobytes() == exported.array.tobytes()


def test_rope_settings_of_400_digits() -> None:
    for value in (10**400, -(10**400)):
        for name in ("freq_base", "yarn_orig_ctx", "yarn_ext_factor"):
            with pytest.raises(InvalidArgumentError, match=name):
                Rope(**{name: value})


def test_streams_of_snapshots_end_where_they_say(snapshot: Snapshot, arena: Arena) -> None:
    """What follows a snapshot is left in the stream, whatever it is."""
    file = io.BytesIO(snapshot.to_bytes() + b"\x89SKV" + bytes(5))
    with Snapshot.read_from(file, arena):
        assert file.read(4) == b"\x89SKV"


def test_a_model_file_is_no_snapshot(models: Models, arena: Arena) -> None:
    path = Path(models[ATTENTION].path)
    with pytest.raises(SnapshotFileError, match=r"not a .skv file"):
        Snapshot.load(path, arena)
    with new_context(models[ATTENTION]) as ctx, pytest.raises(SnapshotFileError, match=r"not a llama.cpp"):
        Snapshot.import_llama(path, ctx, arena)
