"""`benchmarks/device_check.sh`: a rehearsal on the CPU, and that a wrong answer, a crash or a lack of time is seen."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from helpers import TOKENS, Files, Models, all_logits, new_context

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"
sys.path.append(str(BENCHMARKS))

device_check, device_pack, device_steps = (import_module(f"device_{name}") for name in ("check", "pack", "steps"))

SCRIPT = [str(BENCHMARKS / "device_check.sh"), "run", "--no-build"]

Report = dict[str, Any]


def environment(**variables: str) -> dict[str, str]:
    return {**os.environ, "PYTHON": sys.executable, **variables}


def run(folder: Path, *options: object, **variables: str) -> tuple[int, Report, str]:
    """Run the script; gives its exit code, its report, checked against the schema, and what it printed."""
    out = folder / "report.json"
    done = subprocess.run(
        [*SCRIPT, *map(str, options), "--out", str(out), "--work", str(folder / "work")],
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, checked(out), done.stdout + done.stderr


def checked(path: Path) -> Report:
    report: Report = json.loads(path.read_text(encoding="utf-8"))
    schema = json.loads((ROOT / "docs/device-check.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator(schema).validate(report)
    return report


def by_name(report: Report) -> dict[str, Any]:
    return {step["name"]: step for step in report["steps"]}


# ── a rehearsal ──────────────────────────────────────────────────────────────────────────────────────


def test_a_rehearsal_on_the_cpu(tmp_path: Path) -> None:
    code, report, said = run(tmp_path, "--cpu")
    steps = by_name(report)
    assert list(steps) == ["packages", "model", *(step.name for step in device_check.PLAN)], said
    failed = [(step["name"], check) for step in steps.values() for check in step["checks"] if not check["passed"]]
    assert (code, failed, report["passed"]) == (0, [], True), said
    n_checks = {name: len(step["checks"]) for name, step in steps.items() if step["checks"]}
    assert n_checks["accuracy"] == 5
    assert n_checks["identity"] >= 23
    assert sum(check.get("n_positions", 0) for check in steps["identity"]["checks"]) > 1000
    lines = said[said.index("PASSED") :].splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == [
        "device", "build", "model", "memory", "accuracy", "identity", "transfer", "export", "restore", "fork", "activation",
        "fan-out", "checks",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def reference(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the CPU's logits of the model "llama"."""
    work = tmp_path_factory.mktemp("reference")
    found = step("reference", files["llama"], work)
    assert [check["passed"] for check in found["checks"]] == [True]
    return work


def step(name: str, model: Path, work: Path) -> dict[str, Any]:
    """One step, as `device_check.py` has it run."""
    out = work / f"{name}.json"
    command = [sys.executable, str(BENCHMARKS / "device_steps.py"), name, "--size", "cpu"]
    command += ["--model", str(model), "--work", str(work), "--out", str(out)]
    subprocess.run(command, env=environment(CUDA_VISIBLE_DEVICES=""), check=True, timeout=120)
    return {"name": name, "required": True, "status": "done", **json.loads(out.read_text(encoding="utf-8"))}


def test_logits_of_another_model_are_not_as_on_the_cpu(files: Files, reference: Path) -> None:
    """The same file passes; one with other weights in the last layer but the same shape does not, and all is lost."""
    good = step("accuracy", files["llama"], reference)
    assert [check["passed"] for check in good["checks"]] == 5 * [True]
    bad = step("accuracy", files["deeper"], reference)  # four of its five layers, and all else, are "llama"'s
    wrong = [check for check in bad["checks"] if "tolerance" in check]
    assert [check["passed"] for check in wrong] == 4 * [False]
    others = [{"name": s.name, "required": s.required, "status": "done", "checks": []} for s in device_check.PLAN]
    rest = [entry for entry in others if entry["name"] != "accuracy"]
    assert device_check.verdict({"steps": [*rest, good]})
    assert not device_check.verdict({"steps": [*rest, bad]})


def test_what_is_compared(models: Models) -> None:
    """The same context's logits are identical, those without flash attention near, another document's neither."""
    rows = {}
    for name, tokens, options in (
        ("truth", TOKENS, {}),
        ("again", TOKENS, {}),
        ("no flash", TOKENS, {"flash_attn": False}),
        ("other", np.roll(TOKENS, 40), {}),
    ):
        with new_context(models["llama"], **options) as ctx:
            ctx.decode(tokens)
            rows[name] = all_logits(ctx, TOKENS[:20])
    told = {name: device_steps.nearness(found, rows["truth"]) for name, found in rows.items()}
    same = {name: device_steps.identical(found, rows["truth"]) for name, found in rows.items()}
    assert same == {"truth": True, "again": True, "no flash": False, "other": False}
    assert [name for name in told if device_steps.near(told[name])] == ["truth", "again", "no flash"]
    assert [name for name in told if device_steps.far(told[name])] == ["other"]
    assert told["again"]["error_worst"] == 0 < told["no flash"]["error_worst"]

    spoilt = rows["truth"].copy()
    spoilt[3, 5] = np.nan
    assert device_steps.nearness(spoilt, rows["truth"]) == {"n_positions": 20, "not_finite": 1}
    assert not device_steps.near(device_steps.nearness(spoilt, rows["truth"]))
    assert not device_steps.identical(np.zeros((2, 3), np.float32), np.zeros((2, 3), np.float32))


# ── what goes wrong ──────────────────────────────────────────────────────────────────────────────────


def test_a_gpu_that_is_not_there(tmp_path: Path, files: Files) -> None:
    code, report, said = run(tmp_path, "--model", files["llama"], CUDA_VISIBLE_DEVICES="")
    assert (code, report["passed"], report["mode"]) == (1, False, "gpu")
    steps = by_name(report)
    assert [check["passed"] for check in steps["devices"]["checks"] if "device is" in check["name"]] == [False]
    assert {steps[step.name]["error"] for step in device_check.PLAN[1:]} == {"there is no GPU to check"}
    assert "NOT PASSED devices: the device is what was asked for" in said


def test_a_step_that_fails_is_told(tmp_path: Path) -> None:
    model = tmp_path / "no.gguf"
    model.write_bytes(b"no model")
    code, report, said = run(tmp_path, "--cpu", "--model", model)
    assert (code, report["passed"]) == (1, False)
    steps = by_name(report)
    assert steps["devices"]["status"] == "failed"
    assert "ModelLoadError" in steps["devices"]["error"]
    assert steps["fan-out"]["error"] == "devices was not done"
    assert "FAILED     devices: swarmkv_ll.errors.ModelLoadError" in said
    assert "SKIPPED    reference, accuracy, identity," in said


def test_a_process_that_aborts_costs_its_step_only(tmp_path: Path) -> None:
    this = device_check.Run("cpu", False, tmp_path / "r.json", tmp_path, time.monotonic() + 60, {"steps": []})
    log = tmp_path / "log"

    def aborts(entry: dict[str, Any]) -> None:
        entry["figures"]["before"] = 1
        this.command(sys.executable, "-c", "import os; print('last words', flush=True); os.abort()", log=log)

    assert not this.step("transfer", False, aborts)
    assert this.step("copies", False, lambda entry: None)
    first, second = json.loads(this.out.read_text(encoding="utf-8"))["steps"]
    assert (first["status"], first["figures"]) == ("failed", {"before": 1})
    assert first["error"] == "ended by SIGABRT; it said:\nlast words"
    assert second["status"] == "done"


def test_too_little_time_skips_and_says_so(tmp_path: Path, files: Files) -> None:
    code, report, said = run(tmp_path, "--cpu", "--minutes", 0.1, "--model", files["llama"])
    assert (code, report["passed"]) == (1, False)
    assert by_name(report)["devices"]["status"] == "skipped"
    assert "s were left, it needs 10" in by_name(report)["devices"]["error"]
    assert by_name(report)["fan-out"]["error"] == "devices was not done"
    assert "SKIPPED" in said


def test_a_process_is_not_waited_for_longer_than_there_is_time(tmp_path: Path) -> None:
    this = device_check.Run("cpu", False, tmp_path / "r.json", tmp_path, time.monotonic() + 2, {"steps": []})
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    with pytest.raises(device_check.StepError, match="not done within 2 s"):
        this.command(sys.executable, "-c", code, log=tmp_path / "log")


def test_a_stopped_run_keeps_what_it_has(tmp_path: Path, files: Files) -> None:
    out = tmp_path / "report.json"
    command = [*SCRIPT, "--cpu", "--model", str(files["llama"]), "--out", str(out), "--work", str(tmp_path / "work")]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL) as child:
        try:
            while not (out.exists() and by_name(checked(out)).get("reference", {}).get("status") == "running"):
                assert child.poll() is None
                time.sleep(0.02)
            child.send_signal(signal.SIGTERM)
            assert child.wait(30) == 1
        finally:
            child.kill()
    steps = by_name(checked(out))
    assert (steps["devices"]["status"], steps["reference"]["status"]) == ("done", "failed")
    assert steps["reference"]["error"] == "stopped"


@pytest.mark.parametrize("options", [["--minutes", "0"], ["--model", "/no/such/file"], ["--twice"]])
def test_wrong_options(options: list[str]) -> None:
    done = subprocess.run([*SCRIPT, *options], env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


# ── the pack ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pack of one archive, which holds a program and a text."""
    folder = tmp_path / "pack"
    folder.mkdir()
    inside = tmp_path / "inside"
    (inside / "bin").mkdir(parents=True)
    (inside / "bin/tool").write_text("#!/bin/sh\necho works\n")
    (inside / "bin/tool").chmod(0o755)
    (inside / "tests").mkdir()
    (inside / "tests/left_out.py").write_text("")
    device_pack._tar(inside, folder / "tools.tar.xz")
    told = {"sha256": device_pack._sha256(folder / "tools.tar.xz")}
    (folder / "pack.json").write_text(json.dumps({"tools.tar.xz": told}))
    monkeypatch.setattr(device_pack, "PACK", folder)
    return folder


def test_unpacking(packed: Path) -> None:
    with tarfile.open(packed / "tools.tar.xz") as tar:
        assert tar.getnames() == ["bin/tool"]
    assert device_pack.unpack_packages() == f"no py3{sys.version_info.minor}.tar.xz: this Python's own packages"
    assert subprocess.check_output([packed / "tools/bin/tool"], text=True) == "works\n"
    (packed / "tools/bin/tool").write_text("mine")
    device_pack.unpack_packages()  # once is enough
    assert (packed / "tools/bin/tool").read_text() == "mine"


def test_a_damaged_pack_is_refused(packed: Path) -> None:
    with (packed / "tools.tar.xz").open("r+b") as file:
        file.seek(40)
        file.write(b"?")
    with pytest.raises(OSError, match=r"tools\.tar\.xz is damaged: its sha256 is [0-9a-f]{64}, not [0-9a-f]{64}"):
        device_pack.unpack_packages()
    assert not (packed / "tools").exists()
