"""The benchmarks: which there are, that plain `pytest` leaves them alone, and that their ratios are what they say."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from helpers import TESTS, run_ok

ROOT = TESTS.parent
SYNTHETIC = ["benchmarks/bench_copies.py", "benchmarks/bench_blob.py", "benchmarks/bench_arena.py"]
GROUPS = {"fork", "export", "restore", "share", "blob", "activation", "reprefill", "fanout", "arena"}

COLLECT = """
import json, os, sys
import pytest

class Seen:
    def pytest_collection_finish(self, session):
        marks = {item.nodeid: item.get_closest_marker("benchmark") for item in session.items}
        groups = {name: mark and mark.kwargs["group"] for name, mark in marks.items()}
        testpaths = session.config.getini("testpaths")
        print("seen", json.dumps({"groups": groups, "testpaths": testpaths}))

os.chdir(sys.argv[1])
sys.exit(pytest.main(["benchmarks", "--collect-only", "-qq", "-p", "no:cacheprovider"], plugins=[Seen()]))
"""


def pytest_benchmarks(*args: str | Path) -> subprocess.CompletedProcess[str]:
    """Run benchmarks as a user does, in a process of their own."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *map(str, args)]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)


def test_what_there_is() -> None:
    printed = next(line for line in run_ok(COLLECT, ROOT).splitlines() if line.startswith("seen "))
    seen = json.loads(printed.removeprefix("seen "))
    groups: dict[str, str] = seen["groups"]
    assert set(groups.values()) >= GROUPS
    assert None not in groups.values()
    assert seen["testpaths"] == ["tests"], "plain pytest runs tests only"
    # What runs are compared by: made of sizes and words, nothing of an object's that differs from run to run.
    assert not [name for name in groups if not re.fullmatch(r"benchmarks/bench_\w+\.py::bench_\w+(\[[\w-]+\])?", name)]
    in_bytes = [f"{size}" for size in ("1KiB", "16KiB", "256KiB", "4MiB", "64MiB", "1GiB")]
    in_tokens = [f"{n}-tokens" for n in (64, 512, 2048, 3501, 8000)]
    for name, sizes in {
        "bench_copies.py::bench_fork": [*in_bytes, *in_tokens],
        "bench_copies.py::bench_share": [*in_bytes, *in_tokens],
        "bench_copies.py::bench_export": in_tokens,
        "bench_copies.py::bench_restore": in_tokens,
        "bench_blob.py::bench_parse": [*in_bytes, *in_tokens],
        "bench_arena.py::bench_lease": in_bytes,
        "bench_branches.py::bench_reprefill": in_tokens,
        "bench_branches.py::bench_held_branch": in_tokens,
    }.items():
        assert {f"benchmarks/{name}[{size}]" for size in sizes} <= set(groups)
    assert next(iter(groups)).endswith("bench_reprefill[8000-tokens]"), (
        "the prefill that others are cut from comes first"
    )


def test_ratios_are_recorded_and_compared(tmp_path: Path) -> None:
    storage = f"--benchmark-storage=file://{tmp_path}"
    first = pytest_benchmarks(*SYNTHETIC, "-k", "1KiB", storage, "--benchmark-save=before")
    assert first.returncode == 0, first.stdout + first.stderr
    (before,) = tmp_path.rglob("0001_before.json")
    recorded = {each["name"]: each for each in json.loads(before.read_text())["benchmarks"]}
    assert {each["group"] for each in recorded.values()} == {"fork", "share", "blob", "arena"}
    for name, each in recorded.items():
        info = each["extra_info"]
        assert info["yardstick"] == "np.copyto", name
        assert 0 < info["n_bytes"] <= 1024, name
        assert info["yardstick_s"] > 0, name
        assert info["step_s"] > 0, name
        low, high = info["ratio_quartiles"]
        assert 0 < low <= info["ratio"] <= high, name
        assert info["rounds"] == each["stats"]["rounds"], name
        assert name in first.stdout.partition("times, and speed")[2].partition("benchmark '")[0]

    some = {name for name in recorded if "share" in name or "parse" in name}
    again = pytest_benchmarks(
        *SYNTHETIC, "-k", "1KiB and (share or parse)", storage, "--benchmark-save=after", "--benchmark-compare=0001"
    )
    assert again.returncode == 0, again.stdout + again.stderr
    for name in some:
        assert f"{name} (0001_before)" in again.stdout
        assert f"{name} (NOW)" in again.stdout

    (after,) = tmp_path.rglob("0002_after.json")
    printed = run_script("compare_ratios.py", before, after).splitlines()
    assert printed[-1] == f"{len(some)} in both, {len(recorded) - len(some)} only before, 0 only after"
    assert {re.search(r"::(\S+)", line)[1] for line in printed[1:-1]} == some  # type: ignore[index]


def test_without_timing() -> None:
    """As `--benchmark-disable` runs them: each once."""
    done = pytest_benchmarks(*SYNTHETIC, "-k", "16KiB or among", "--benchmark-disable")
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


def test_sizes_that_do_not_fit_are_skipped_with_the_reason() -> None:
    code = """
        import os, sys
        import pytest
        import swarmkv_ll.arena
        swarmkv_ll.arena.available_memory = lambda: 10 << 20
        os.chdir(sys.argv[1])
        args = ["benchmarks/bench_copies.py", "-k", "bench_fork and (16KiB or 1GiB)", "-p", "no:cacheprovider"]
        sys.exit(pytest.main(args))
    """
    printed = run_ok(code, ROOT)
    assert "1GiB needs 4.00 GiB of memory, 0.01 are available" in printed
    assert "1 passed, 1 skipped" in printed


def run_script(name: str, *args: Path) -> str:
    script = str(ROOT / "benchmarks" / name)
    done = subprocess.run([sys.executable, script, *map(str, args)], capture_output=True, text=True, check=True)
    return done.stdout


# ── what the ratio is ────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def turns() -> ModuleType:
    """`benchmarks/turns.py`."""
    spec = importlib.util.spec_from_file_location("turns_of_benchmarks", ROOT / "benchmarks" / "turns.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where a dataclass looks for its module
    spec.loader.exec_module(module)
    return module


class Pedantic:
    """What is used of pytest-benchmark."""

    group, name = "fork", "bench_fork[1KiB]"

    def __init__(self) -> None:
        self.extra_info: dict[str, Any] = {}

    def pedantic(
        self, target: Callable[..., object], *, setup: Callable[[], Any], rounds: int, warmup_rounds: int
    ) -> None:
        for _ in range(warmup_rounds + rounds):
            args, _ = setup()
            target(*args)


def test_a_ratio_is_of_rounds_in_turns(turns: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, log = SimpleNamespace(now=0.0), []
    monkeypatch.setattr(turns, "perf_counter", lambda: clock.now)
    steps = iter([100.0, 2.0, 4.0, 8.0])  # the first is the warm-up's
    yardsticks = iter([100.0, 1.0, 4.0, 1.0])

    def take(name: str, seconds: float) -> None:
        log.append(name)
        clock.now += seconds

    def prepare() -> str:
        take("prepare", 1000)
        return "prepared"

    benchmark = Pedantic()
    times = turns.in_turns(
        benchmark,
        lambda given: take(f"step, {given}", next(steps)),
        lambda: take("yardstick", next(yardsticks)),
        rounds=3,
        prepare=prepare,
    )
    assert log == 4 * ["yardstick", "prepare", "step, prepared"]
    assert dict(times) == {"yardstick": [1, 4, 1], "step": [2, 4, 8]}
    row = turns.note(benchmark, times, "a yardstick", n_bytes=7)
    assert benchmark.extra_info == {
        "n_bytes": 7,
        "yardstick": "a yardstick",
        "yardstick_s": 1,
        "step_s": 4,
        "ratio": 0.5,  # of 1/2, 4/4 and 1/8
        "rounds": 3,
        "ratio_quartiles": [0.3125, 0.75],
    }
    assert turns.table([row]) == ["fork", f"  {'bench_fork[1KiB]':<46} {'4.00 s':>11} {'0.5':>10} × a yardstick"]


def test_what_a_step_gives_is_given_back(turns: ModuleType) -> None:
    from swarmkv_ll import Arena

    with Arena(8192) as arena:
        turns.in_turns(Pedantic(), lambda held: arena.lease(4096), int, rounds=5, prepare=lambda: arena.lease(4096))
        assert arena.stats().n_leases == 0

        def fail(held: object) -> None:
            raise ValueError("a benchmark that fails")

        with pytest.raises(ValueError, match="fails"):
            turns.in_turns(Pedantic(), fail, int, rounds=5, prepare=lambda: arena.lease(4096))
        assert arena.stats().n_leases == 0


def test_ratios_of_two_runs(tmp_path: Path) -> None:
    def run(name: str, ratios: dict[str, tuple[float, list[float], int]]) -> Path:
        path = tmp_path / name
        benchmarks = [
            {"fullname": f"benchmarks/b.py::{bench}", "extra_info": dict(zip(KEYS, values, strict=True))}
            for bench, values in ratios.items()
        ]
        benchmarks.append({"fullname": "benchmarks/b.py::without_ratio", "extra_info": {}})
        path.write_text(json.dumps({"benchmarks": benchmarks}))
        return path

    quiet, noisy = [0.8, 0.9], [0.5, 0.95]
    before = run(
        "a.json", {"same": (0.85, quiet, 9), "slower": (0.85, quiet, 9), "few": (0.85, quiet, 3), "old": (1, quiet, 9)}
    )
    after = run("b.json", {"same": (0.765, noisy, 9), "slower": (0.425, [0.4, 0.5], 9), "few": (0.425, [0.4, 0.5], 9)})
    assert [line.split() for line in run_script("compare_ratios.py", before, after).splitlines()] == [
        ["before", "after", "change"],
        ["b.py::same", "0.85", "0.765", "-10.0%"],
        ["b.py::slower", "0.85", "0.425", "-50.0%", "apart"],
        ["b.py::few", "0.85", "0.425", "-50.0%", "few", "rounds"],
        ["3", "in", "both,", "1", "only", "before,", "0", "only", "after"],
    ]


KEYS = ("ratio", "ratio_quartiles", "rounds")
