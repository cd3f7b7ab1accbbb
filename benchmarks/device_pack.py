"""What a machine without a network needs for `device_check.py`: collected here, unpacked there. Needs nothing but Python.

device-pack/llama.cpp.tar.xz   the parts of the pinned source that a build reads
device-pack/tools.tar.xz       cmake, ninja, and the headers of a Python, for machines that lack them
device-pack/py312.tar.xz       packages for that Python
device-pack/model.gguf         where a model is carried along
device-pack/pack.json          sizes and sha256 of these
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACK = ROOT / "device-pack"
VENDORED = ROOT / "vendor/llama.cpp"

PYTHONS = ("3.10", "3.11", "3.12")
"""Of Ubuntu 22.04, Debian 12 and Ubuntu 24.04."""

PACKAGES = (
    "blake3", "cffi", "click", "gguf", "markdown-it-py", "mdurl", "numpy", "pycparser", "pygments", "pyyaml", "rich",
    "setuptools", "tomli", "tqdm", "typing-extensions", "xxhash",
)  # fmt: skip
"""The library's, the extension's build's, and what the model is written with; with all that these need."""

NOT_NEEDED = re.compile(r"(^|/)(tests?|__pycache__|doc|Help|man|vim|emacs)(/|$)|bin/(ctest|cpack|ccmake)$|\.pyi$|\.a$")


def say(text: str) -> None:
    print(f"device_check: {text}", flush=True)


# ── on the machine with a network ────────────────────────────────────────────────────────────────────


def pack(pythons: list[str], model: Path | None, archive: Path | None) -> int:
    """Fill the folder `device-pack`, and with `archive` write it and the repository's files into one tar file."""
    for version in pythons:
        if not re.fullmatch(r"3\.\d\d", version) or int(version[2:]) < 10:
            say(f"--python should be 3.10 or newer, is {version!r}")
            return 2
    shutil.rmtree(PACK, ignore_errors=True)
    PACK.mkdir()
    with tempfile.TemporaryDirectory(dir=PACK) as scratch:
        _pack_source(Path(scratch))
        _pack_tools(Path(scratch) / "tools")
        for version in pythons:
            target = Path(scratch) / version
            _install(target, PACKAGES, version)
            _tar(target, PACK / f"py{version.replace('.', '')}.tar.xz")
    if model:
        shutil.copyfile(model, PACK / "model.gguf")
    files = {
        path.name: {"n_bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(PACK.iterdir())
        if path.is_file()
    }
    (PACK / "pack.json").write_text(json.dumps(files, indent=1) + "\n", encoding="utf-8")
    for name, told in files.items():
        say(f"{told['n_bytes'] / 2**20:8.2f} MiB  device-pack/{name}")
    say(f"{sum(told['n_bytes'] for told in files.values()) / 2**20:8.2f} MiB  in all")
    if archive:
        _pack_all(archive)
        say(f"{archive.stat().st_size / 2**20:8.2f} MiB  {archive}")
    return 0


def _pack_source(scratch: Path) -> None:
    """The parts that build_llama.sh unpacks, from the pinned source package."""
    pin = dict(re.findall(r'^(\w+) *= *"([^"]*)"', (ROOT / "vendor/llama.cpp.lock").read_text(encoding="utf-8"), re.M))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "swarmkv-ll/downloads"
    sdist = cache / pin["sdist"]
    if not sdist.exists() or _sha256(sdist) != pin["sha256"]:
        wanted = scratch / "requirements.txt"
        wanted.write_text(f"{pin['package']}=={pin['version']} --hash=sha256:{pin['sha256']}\n", encoding="utf-8")
        _pip("download", "--no-deps", "--no-binary", pin["package"], "--require-hashes", "-r", wanted, "-d", scratch)
        sdist = scratch / pin["sdist"]
    found = re.search(r"^engine_parts=\(([^)]*)\)", (ROOT / "build_llama.sh").read_text(encoding="utf-8"), re.M)
    if not found:
        raise SystemExit("build_llama.sh no longer says what a build reads: engine_parts")
    top = f"{pin['sdist'].removesuffix('.tar.gz')}/{pin['folder']}/"
    wanted_parts = tuple(f"{part}/" for part in found[1].split())
    with tarfile.open(sdist) as source, tarfile.open(PACK / "llama.cpp.tar.xz", "w:xz", preset=6) as target:
        for member in source:
            if member.isfile() and f"{member.name.removeprefix(top)}/".startswith(wanted_parts):
                file = source.extractfile(member)
                member.name = member.name.removeprefix(top)
                target.addfile(member, file)


def _pack_tools(target: Path) -> None:
    _install(target, ("cmake", "ninja"), None)
    headers = target / "include"
    shutil.copytree(sysconfig.get_path("include"), headers)
    shutil.copyfile(sysconfig.get_config_h_filename(), headers / "pyconfig.h")  # Debian's lies elsewhere
    _tar(target, PACK / "tools.tar.xz")


def _install(target: Path, packages: tuple[str, ...], python: str | None) -> None:
    """Have pip unpack wheels for another Python, and for any Linux that is not older than Ubuntu 20.04."""
    options: list[object] = ["--target", target, "--only-binary", ":all:", "--no-compile", "--no-deps"]
    if python:
        options += ["--python-version", python, "--implementation", "cp"]
        for abi in (f"cp{python.replace('.', '')}", "abi3", "none"):
            options += ["--abi", abi]
    for tag in (
        "manylinux_2_28",
        "manylinux_2_27",
        "manylinux_2_17",
        "manylinux2014",
        "manylinux_2_12",
        "manylinux2010",
    ):
        options += ["--platform", f"{tag}_{platform.machine()}"]
    _pip("install", *options, *packages)


def _pip(*arguments: object) -> None:
    command = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", "--no-input", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"device_check: pip failed: {(done.stderr.strip() or 'without a word').splitlines()[-1]}")


def _tar(folder: Path, out: Path) -> None:
    with tarfile.open(out, "w:xz", preset=6) as tar:
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            if path.is_file() and not NOT_NEEDED.search(name):
                tar.add(path, name)


def _pack_all(archive: Path) -> None:
    # What is committed, or would be: the files as they are now.
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = sorted({name for name in listed.split("\0") if name})
    names += [f"device-pack/{path.name}" for path in sorted(PACK.iterdir()) if path.is_file()]
    with tarfile.open(archive, "w") as tar:
        for name in names:
            if (ROOT / name).exists():
                tar.add(ROOT / name, f"swarmkv-ll/{name}")


# ── on the machine without ───────────────────────────────────────────────────────────────────────────


def unpack_packages() -> str:
    """Unpack tools and this Python's packages, if they were carried along; says which."""
    name = f"py3{sys.version_info.minor}.tar.xz"
    _unpack("tools.tar.xz", PACK / "tools")
    if not (PACK / name).exists():
        return f"no {name}: this Python's own packages"
    _unpack(name, PACK / "site")
    return name


def unpack_source() -> str:
    """Unpack the source where build_llama.sh looks for it, unless it is there, or is not carried along; says which."""
    pin = re.search(r'^sha256 *= *"(\w+)"', (ROOT / "vendor/llama.cpp.lock").read_text(encoding="utf-8"), re.M)
    known = VENDORED / ".pin"
    if pin and known.exists() and known.read_text(encoding="utf-8").strip() == pin[1]:
        return "unpacked before"
    if not (PACK / "llama.cpp.tar.xz").exists():
        return "build_llama.sh gets it"
    _unpack("llama.cpp.tar.xz", VENDORED)
    known.write_text(f"{pin[1] if pin else ''}\n", encoding="utf-8")  # the last: it says that the rest is whole
    return "llama.cpp.tar.xz"


def _unpack(name: str, target: Path) -> None:
    """Unpack an archive of the pack into an empty folder, once."""
    told: dict[str, dict[str, Any]] = json.loads((PACK / "pack.json").read_text(encoding="utf-8"))
    wanted, whole = told[name]["sha256"], target / ".unpacked"
    if whole.exists() and whole.read_text(encoding="utf-8") == wanted:
        return
    if (found := _sha256(PACK / name)) != wanted:
        raise OSError(f"device-pack/{name} is damaged: its sha256 is {found}, not {wanted}")
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    with tarfile.open(PACK / name) as tar:
        tar.extractall(target, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    whole.write_text(wanted, encoding="utf-8")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
