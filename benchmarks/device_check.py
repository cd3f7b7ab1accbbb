"""Check this library on a GPU machine without a network, and write what was found as JSON: see docs/device-check.md.

Needs nothing but Python; what needs packages or the engine runs in processes of its own (`device_steps.py`), so that one
that is aborted, as the engine does on an error of the device, costs only that step.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import device_pack
from device_pack import PACK, ROOT

STEPS = Path(__file__).with_name("device_steps.py")

FOR_CHECKS_S = 150
"""Seconds of the budget that a build leaves to what comes after it."""


class StepError(Exception):
    """Why a step failed, in a few lines."""


@dataclass(frozen=True)
class Step:
    """A step of `device_steps.py`.

    Attributes
    ----------
    required : bool
        Whether the result depends on its having been done.
    needs_s, most_s : float
        Seconds that it is not begun without, and those after which it is stopped: one that hangs is not to cost the
        others their time.
    """

    name: str
    required: bool
    needs_s: float
    most_s: float


PLAN = (
    Step("devices", True, 10, 60),
    Step("reference", True, 20, 150),
    Step("accuracy", True, 10, 60),
    Step("identity", True, 20, 150),
    Step("on-device", True, 10, 60),
    Step("guard", True, 10, 60),
    Step("transfer", False, 10, 60),
    Step("copies", False, 15, 60),
    Step("activation", False, 20, 90),
    Step("fan-out", True, 20, 150),
)

SHAPES: dict[str, dict[str, int]] = {
    "gpu": {
        "n_layer": 24,
        "n_embd": 1536,
        "n_head": 12,
        "n_head_kv": 4,
        "n_head_dim": 128,
        "n_ff": 4096,
        "n_vocab": 32000,
    },
    "cpu": {"n_layer": 4, "n_embd": 128, "n_head": 2, "n_head_kv": 1, "n_head_dim": 64, "n_ff": 256, "n_vocab": 512},
}
"""Of the model that is made where none is given: 0.7 billion weights, 48 KiB of KV a token; and one for rehearsals."""

N_CTX = 16384

NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "GGML_BACKEND_PATH": ""}
"""Variables with which the engine sees no GPU."""


@dataclass
class Run:
    """One run: its options, its time, and its report, which is on the disk after every step."""

    mode: str
    packed: bool
    out: Path
    work: Path
    deadline: float
    report: dict[str, Any] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)

    # ── steps ────────────────────────────────────────────────────────────────────────────────────────

    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()

    def step(self, name: str, required: bool, do: Callable[[dict[str, Any]], None], needs_s: float = 0) -> bool:
        """Do a step and note how it went: `do` puts `checks` and `figures` into what it is given."""
        entry: dict[str, Any] = {"name": name, "required": required, "status": "running", "checks": [], "figures": {}}
        self.report["steps"].append(entry)
        if self.left() < needs_s:
            entry |= {"status": "skipped", "error": f"{max(self.left(), 0):.0f} s were left, it needs {needs_s:.0f}"}
            self.write()
            say(f"{name}: skipped: {entry['error']}")
            return False
        self.write()
        say(f"{name} …")
        begin = time.monotonic()
        try:
            do(entry)
            entry["status"] = "done"
        except (StepError, OSError, subprocess.SubprocessError) as error:
            entry |= {"status": "failed", "error": str(error)}
            say(f"{name}: failed: {error}")
        except KeyboardInterrupt:
            entry |= {"status": "failed", "error": "stopped"}
            raise
        finally:
            entry["seconds"] = time.monotonic() - begin
            self.write()
        for check in entry["checks"]:
            if not check["passed"]:
                say(f"{name}: NOT PASSED: {check['name']}")
        return entry["status"] == "done"

    def skip(self, name: str, required: bool, why: str) -> None:
        """Note a step that cannot be done."""
        self.report["steps"].append(
            {"name": name, "required": required, "status": "skipped", "checks": [], "figures": {}, "error": why}
        )
        self.write()

    def write(self) -> None:
        """The report, whole or not at all."""
        self.report["seconds"] = time.monotonic() - self.began
        self.report["passed"] = verdict(self.report)
        part = self.out.with_name(f".{self.out.name}.part")
        part.write_text(json.dumps(self.report, indent=1) + "\n", encoding="utf-8")
        part.replace(self.out)

    # ── processes ────────────────────────────────────────────────────────────────────────────────────

    def command(self, *command: object, timeout: float | None = None, log: Path, **environment: str) -> None:
        """Run a program to its end, or to its time's; what it says goes to `log`, and its end into the error."""
        timeout = self.left() if timeout is None else min(timeout, self.left())
        with (
            log.open("ab") as out,
            subprocess.Popen(
                [str(word) for word in command],
                cwd=ROOT,
                env={**self.environment(), **environment},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that its compilers end with it
            ) as child,
        ):
            try:
                code = child.wait(max(timeout, 0))
            except subprocess.TimeoutExpired:
                raise StepError(f"not done within {timeout:.0f} s; {_ending(log)}") from None
            finally:
                if child.poll() is None:
                    os.killpg(child.pid, signal.SIGKILL)
        if code:
            how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            raise StepError(f"{how}; {_ending(log)}")

    def environment(self) -> dict[str, str]:
        """Of every process: packages and programs that were carried along come first."""
        made = {**os.environ, "PYTHON": sys.executable, "PYTHONUNBUFFERED": "1"}
        if self.packed:
            tools = PACK / "tools"
            made["PYTHONPATH"] = os.pathsep.join(filter(None, [str(PACK / "site"), os.environ.get("PYTHONPATH")]))
            made["PATH"] = os.pathsep.join(
                [f"{tools}/cmake/data/bin", f"{tools}/bin", os.environ.get("PATH", os.defpath)]
            )
            if not Path(sysconfig.get_path("include"), "Python.h").exists():
                made["CPATH"] = f"{tools}/include"  # the extension keeps to the stable ABI: any version's do
        if self.mode == "cpu":
            made |= NO_GPU
        return made


def _ending(log: Path, n_lines: int = 12) -> str:
    """The last lines of a log."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    return "it said:\n" + "\n".join(lines[-n_lines:]) if lines else "it said nothing"


def verdict(report: Mapping[str, Any]) -> bool:
    """Whether every required step was done, none failed, and every check passed."""
    steps = report["steps"]
    names = {step["name"] for step in steps if step["status"] == "done"}
    return (
        {step.name for step in PLAN if step.required} <= names
        and all(step["status"] == "done" or (step["status"] == "skipped" and not step["required"]) for step in steps)
        and all(check["passed"] for step in steps for check in step["checks"])
    )


def say(text: str) -> None:
    print(f"device_check: {text}", flush=True)


# ── what is done ─────────────────────────────────────────────────────────────────────────────────────


def run(args: argparse.Namespace) -> int:
    out = args.out.resolve()
    work = (args.work or PACK / "work").resolve()
    for folder in (out.parent, work):
        folder.mkdir(parents=True, exist_ok=True)
    mode = "cpu" if args.cpu else "gpu"
    this = Run(
        mode, not args.no_build and (PACK / "pack.json").exists(), out, work, time.monotonic() + 60 * args.minutes
    )
    this.report = {
        "schema": 1,
        "mode": mode,
        "created_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "minutes": args.minutes,
        "passed": False,
        "seconds": 0.0,
        "machine": machine(),
        "steps": [],
    }
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        _steps(this, args)
    except KeyboardInterrupt:
        say("stopped")
    this.write()
    print("\n".join(summary(this.report)))
    say(f"all of it is in {out}")
    return 0 if this.report["passed"] else 1


def _steps(this: Run, args: argparse.Namespace) -> None:
    can_go_on = this.step("packages", True, partial(packages, this))
    if can_go_on and not args.no_build:
        can_go_on = this.step("build", True, partial(build, this))
        if can_go_on and this.mode == "gpu":
            can_go_on = this.step("build CUDA", True, partial(build_cuda, this))
    model = args.model or (PACK / "model.gguf" if (PACK / "model.gguf").exists() else None)
    if can_go_on and model is None:
        model = this.work / f"{this.mode}.gguf"
        can_go_on = this.step("model", True, partial(make_model, this, model))
    gone = "" if can_go_on else "a step before it failed"
    for step in PLAN:
        if gone:
            this.skip(step.name, step.required, gone)
            continue
        done = this.step(step.name, step.required, partial(measure, this, step, model), step.needs_s)
        if step.name == "devices":
            checks = {check["name"]: check["passed"] for check in this.report["steps"][-1]["checks"]}
            if not checks.get("the device is what was asked for", False):
                gone = f"there is no {this.mode.upper()} to check" if done else "devices was not done"


def packages(this: Run, entry: dict[str, Any]) -> None:
    """Unpack what was carried along for this Python; without a pack, this Python has to have it."""
    if this.packed:
        entry["figures"]["pack"] = device_pack.unpack_packages()
    names = ("numpy", "cffi", "blake3", "click", "rich", "xxhash", "gguf", "setuptools")
    code = f"import importlib.metadata as m, json, {', '.join(names)}; print(json.dumps({{n: m.version(n) for n in {names}}}))"
    log = this.work / "packages.log"
    log.unlink(missing_ok=True)
    this.command(sys.executable, "-c", code, log=log)
    entry["figures"]["versions"] = json.loads(log.read_text(encoding="utf-8").splitlines()[-1])


def build(this: Run, entry: dict[str, Any]) -> None:
    """The engine's CPU part, and the extension."""
    entry["figures"]["source"] = device_pack.unpack_source()
    log = this.work / "build.log"
    log.unlink(missing_ok=True)
    this.command(sys.executable, "setup.py", "-q", "build_ext", "--inplace", log=log,
                 timeout=this.left() - FOR_CHECKS_S, SWARMKV_BUILD_OPTIONS="")  # fmt: skip


def build_cuda(this: Run, entry: dict[str, Any]) -> None:
    """The CUDA module, for this machine's device alone. One that was interrupted goes on in the next run."""
    log = this.work / "build-cuda.log"
    log.unlink(missing_ok=True)
    this.command("bash", "build_llama.sh", "--cuda", "--arch", "native", log=log, timeout=this.left() - FOR_CHECKS_S)
    module = ROOT / "swarmkv_ll/_lib/libggml-cuda.so"
    entry["figures"]["module_bytes"] = module.stat().st_size


def make_model(this: Run, path: Path, entry: dict[str, Any]) -> None:
    """Random weights from a seed; the same file as last time is not made again."""
    shape = SHAPES[this.mode]
    code = (
        f"import sys; sys.path.insert(0, {str(STEPS.parent)!r})\n"
        "from pathlib import Path\nfrom device_model import Shape, write_model\n"
        f"write_model(Path({str(path)!r}), Shape(**{shape}), n_ctx={N_CTX})"
    )
    made = path.with_suffix(".made")  # tells of what it was made
    if not (path.exists() and made.exists() and made.read_text(encoding="utf-8") == code):
        this.command(sys.executable, "-c", code, log=this.work / "model.log")
        made.write_text(code, encoding="utf-8")
    entry["figures"] |= {"shape": shape, "n_bytes": path.stat().st_size}


def measure(this: Run, step: Step, model: Path, entry: dict[str, Any]) -> None:
    """A step of `device_steps.py`. What it had found is kept, however it ends."""
    name = step.name
    found, log = this.work / f"{name}.json", this.work / f"{name}.log"
    for old in (found, log):
        old.unlink(missing_ok=True)
    hidden = NO_GPU if name == "reference" else {}
    try:
        this.command(sys.executable, STEPS, name, "--size", this.mode, "--model", model.resolve(), "--work", this.work,
                     "--out", found, log=log, timeout=step.most_s, **hidden)  # fmt: skip
    finally:
        if found.exists():
            entry |= json.loads(found.read_text(encoding="utf-8"))


def machine() -> dict[str, Any]:
    """What can be told without packages."""
    names = ("name", "driver_version", "compute_cap", "memory.total", "pcie.link.gen.max", "pcie.link.width.max")
    told = _said("nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader")
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        cpu = next(
            (line.partition(":")[2].strip() for line in file if line.startswith("model name")), platform.machine()
        )
    return {
        "gpus": [dict(zip(names, map(str.strip, line.split(",")), strict=False)) for line in told.splitlines()],
        "nvcc": _said("nvcc", "--version").splitlines()[-2:],
        "cpu": cpu,
        "n_cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "disk_free_bytes": shutil.disk_usage(ROOT).free,
    }


def _said(*command: str) -> str:
    """What a program prints; nothing where there is none, or it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


# ── the summary ──────────────────────────────────────────────────────────────────────────────────────


def summary(report: Mapping[str, Any]) -> list[str]:
    """The report in some lines."""
    steps = {step["name"]: step for step in report["steps"]}
    figures = {name: step["figures"] for name, step in steps.items()}
    lines: list[tuple[str, str]] = []

    def line(name: str, make: Callable[[], str]) -> None:
        with suppress(LookupError, ValueError):  # a step that was not done, or not to its end
            lines.append((name, make()))

    def device() -> str:
        for found in report["machine"]["gpus"] if report["mode"] == "gpu" else []:
            return f"{found['name']}, driver {found['driver_version']}, compute capability {found['compute_cap']}"
        return f"{figures['devices']['devices'][0]['description']}, {report['machine']['n_cpus']} processors"

    def built() -> str:
        cuda = figures.get("devices", {}).get("cuda-info")
        parts = {"build": "CPU part", "build CUDA": "CUDA module"}
        times = [f"{parts[name]} {steps[name]['seconds']:.0f} s" for name in parts if name in steps]
        has = f"; architecture {', '.join(cuda['architectures'])}, CUDA {cuda['toolkit']}" if cuda else ""
        return (", ".join(times) or "not built here") + has

    def model() -> str:
        told = figures["devices"]["model"]
        return f"{told['name']}, {told['n_params'] / 1e6:,.1f} M weights, {told['n_bytes'] / 1e6:,.1f} MB"

    def memory() -> str:
        arena = figures["devices"]["arena"]
        return f"arena in {arena['buffer_type']}, page-locked: {arena['pinned'] or 'no'}"

    def accuracy() -> str:
        rows = [check for check in steps["accuracy"]["checks"] if "tolerance" in check]
        worst, same = max(row["error_worst"] for row in rows), min(row["top1_same"] for row in rows)
        n = sum(row["n_positions"] for row in rows)
        return (
            f"{n:,} positions, worst error {worst:.2g} of {rows[0]['tolerance']:g} allowed, same first token {same:.0%}"
        )

    def identity() -> str:
        rows = [check for check in steps["identity"]["checks"] if check["name"].endswith("bit-identical")]
        if not rows:
            raise LookupError
        n = sum(row["n_positions"] for row in rows if row["passed"])
        return f"{sum(row['passed'] for row in rows)} of {len(rows)} ways bit-identical, {n:,} positions"

    def transfer() -> str:
        largest = max(
            (name for name in figures["transfer"] if name.endswith("MiB")), key=lambda name: int(name.split()[0])
        )
        speeds = {step: told["gb_per_s"] for step, told in figures["transfer"][largest].items()}
        return f"{largest} to and from the device: " + ", ".join(
            f"{kind} {speeds[f'{kind} put']:.1f} and {speeds[f'{kind} get']:.1f} GB/s"
            for kind in ("pinned", "pageable")
        )

    def copy(way: str, bound: str) -> str:
        times, speed = figures["copies"]["times"], figures["copies"]["speed"]
        told = {kind: times[f"{kind} {way}"] for kind in ("pinned", "pageable")}
        return ", ".join(
            f"{kind} {1e3 * told[kind]['median_s']:.2f} ms ({told[kind]['gb_per_s']:.1f} GB/s, "
            f"{speed[f'{kind} {way} ÷ {bound}']:.0%} of {bound})"
            for kind in told
        )

    def activation() -> str:
        told = figures["activation"]
        first = 1e3 * told["times"]["reprefill"]["median_s"]
        ways = ", ".join(f"{way} {ratio:.1f} ×" for way, ratio in told["speedup"].items())
        return f"{told['n_document']:,} tokens again: {first:,.0f} ms; {ways}"

    def fan_out() -> str:
        told = figures["fan-out"]
        ways = ", ".join(f"{way} {ratio:.1f} ×" for way, ratio in told["speedup"].items())
        return f"{told['n_branches']} branches of {told['n_answer']} tokens, against reprefill: {ways}"

    for name, make in (
        ("device", device), ("build", built), ("model", model), ("memory", memory), ("accuracy", accuracy),
        ("identity", identity), ("transfer", transfer), ("export", lambda: copy("export", "raw copy")),
        ("restore", lambda: copy("restore", "raw copy")), ("fork", lambda: copy("fork", "np.copyto")),
        ("activation", activation), ("fan-out", fan_out),
    ):  # fmt: skip
        line(name, make)
    checks = [(step, check) for step in report["steps"] for check in step["checks"]]
    lines.append(("checks", f"{sum(check['passed'] for _, check in checks)} of {len(checks)} passed"))
    lines += [("NOT PASSED", f"{step['name']}: {check['name']}") for step, check in checks if not check["passed"]]
    for step in report["steps"]:
        if step["status"] == "failed":
            lines.append(("FAILED", f"{step['name']}: {step['error'].splitlines()[-1]}"))
    skipped: dict[str, list[str]] = {}
    for step in report["steps"]:
        if step["status"] == "skipped":
            skipped.setdefault(step["error"], []).append(step["name"])
    lines += [("SKIPPED", f"{', '.join(names)}: {why}") for why, names in skipped.items()]
    result = "PASSED" if report["passed"] else "NOT PASSED"
    return [f"{result} ({report['mode']}), {report['seconds']:.0f} s", *(f"  {name:<11}{text}" for name, text in lines)]


def _minutes(text: str) -> float:
    with suppress(ValueError):
        if 0 < (value := float(text)) < 1e6:
            return value
    raise argparse.ArgumentTypeError(f"should be a number above 0, is {text!r}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="device_check.sh", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", help="on a machine with a network: collect what a machine without one needs")
    packing.add_argument("--python", action="append", metavar="3.N", help="the other machine's Python; may be repeated")
    packing.add_argument("--model", type=Path, help="a GGUF to carry along instead of a random one made there")
    packing.add_argument(
        "--archive", type=Path, metavar="OUT.tar", help="put it and this repository's files into one file"
    )
    running = commands.add_parser("run", help="build for this machine's GPU, check, measure")
    running.add_argument("--cpu", action="store_true", help="a rehearsal: the same on the CPU, with a tiny model")
    running.add_argument(
        "--no-build", action="store_true", help="with the engine and the packages that are here already"
    )
    running.add_argument("--model", type=Path, help="a GGUF file, instead of a random one made here")
    running.add_argument("--minutes", type=_minutes, default=10.0, help="for all of it, builds included (default 10)")
    running.add_argument("--out", type=Path, default=Path("device-check.json"), metavar="FILE.json")
    running.add_argument(
        "--work", type=Path, metavar="FOLDER", help="for what is made on the way (default device-pack/work)"
    )
    args = parser.parse_args()
    if args.model and not args.model.is_file():
        parser.error(f"there is no file {args.model}")
    try:
        if args.command == "run":
            return run(args)
        return device_pack.pack(args.python or list(device_pack.PYTHONS), args.model, args.archive)
    except OSError as error:
        print(f"device_check: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
